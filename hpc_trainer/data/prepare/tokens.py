"""Preparation of texts as tokens: documents in one file per split, tokenized by bytes or a file of `tokenizers`."""

from __future__ import annotations

import glob
import hashlib
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from hpc_trainer.config.packages import optional
from hpc_trainer.config.schema.data import BYTES, TOKENIZER
from hpc_trainer.config.user_files import open_given, read_given
from hpc_trainer.data.prepare.job import (
    BROKEN,
    EVAL,
    PIECES,
    TRAIN,
    InputFile,
    Inputs,
    Job,
    Prepared,
    Settings,
    absolute,
    check_apart,
    check_fraction,
    check_parts,
    commit,
    make_missing,
    part_of,
    remove_temporaries,
    tell_broken,
    temporary_of,
    write_record,
)
from hpc_trainer.data.prepare.pool import Piece, Tell
from hpc_trainer.data.tokens import TOKENS, TokenMeta, dtype_of, read_meta
from hpc_trainer.data.tokens.files import finish
from hpc_trainer.errors import ConfigError, DataError, did_you_mean

DOCUMENT_IS = ("file", "line")
_NUM_BYTES = 256
_PIECE = 32 << 20  # bytes of text
_BATCH = 1 << 20
_LARGEST = 64 << 20  # bytes of a document; a tokenizer takes some fifty times as much memory
_ENDS = ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>", "[SEP]")
_BLOCK = 16 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenOptions:
    """Options of the preparation. `tokenizer`: `bytes`, or the path of a file. `document`: `file` or `line`.

    `end_token`: text of the token after each document; None: the tokenizer's usual end token, if it has one.
    """

    tokenizer: str = BYTES
    document: str = "file"
    end_token: str | None = None
    eval_fraction: float = 0.1


def prepare_tokens(
    sources: Sequence[str], folder: Path, options: TokenOptions, settings: Settings, tell: Callable[[int, int], None]
) -> Prepared:
    """Make the missing pieces; once none is missing, write `meta.json` of both parts.

    Args:
        sources: files, folders (all files in them that are not hidden) and patterns, such as `texts/**/*.txt`.
        folder: the prepared folder.
        options: the options.
        settings: how to carry out the call.
        tell: called with (done, total) bytes of text from time to time.

    Raises:
        ConfigError: an option is wrong, or an option or the input differs from the folder's first call.
        RunStateError: documents are broken, and `settings` does not say to skip them.
    """
    check_fraction(options.eval_fraction)
    if options.document not in DOCUMENT_IS:
        raise ConfigError(f"--document={options.document}: use {' or '.join(DOCUMENT_IS)}.")
    coding, folder = _coding(options), absolute(folder)
    check_apart(map(absolute, sources), folder)
    files = _listing(sources)
    job = Job(
        folder=folder,
        kind="tokens",
        options={
            "source": [str(absolute(word)) for word in sources], "tokenizer": coding.name,
            "tokenizer_sha256": coding.sha256, "document": options.document, "end_token": options.end_token,
            "eval_fraction": options.eval_fraction,
        },
        inputs=Inputs(files=files),
    )  # fmt: skip
    if options.document == "file":
        parts = [part_of(file.name, options.eval_fraction) for file in files]
        check_parts({part: parts.count(part) for part in (TRAIN, EVAL)}, "files", options.eval_fraction)
    job.begin(dict, fresh=settings.fresh)
    metas, pieces, made = _whole(job.folder), list(_pieces(files, options.document)), 0
    if metas is None:
        maker = TokenMaker(
            folder=str(job.folder), tokenizer=coding.path, vocab_size=coding.vocab_size, end=coding.end,
            document=options.document, eval_fraction=options.eval_fraction,
        )  # fmt: skip
        made = make_missing(job, maker, pieces, settings, tell)
        records = job.records(pieces)
        if records is None:
            metas = _whole(job.folder)  # another part may have just finished the folder
            if metas is None:
                return job.unfinished(pieces, made)
        else:
            metas = _finish(job, records, coding, options, settings)
    for path in (job.folder / PIECES).iterdir():  # also files of a call that was killed here
        path.unlink(missing_ok=True)
    remove_temporaries(job.folder, settings)
    return Prepared(
        folder=str(job.folder), is_whole=True, num_pieces=len(pieces), num_made=made, num_missing=0,
        counts={part: {"documents": meta.num_documents, "tokens": meta.num_tokens} for part, meta in metas.items()},
        num_broken=_num_broken(job.folder), overrides=("data=tokens", f"data.path={job.folder}"),
    )  # fmt: skip


# --- the tokenizer ---


@dataclass(frozen=True, slots=True, kw_only=True)
class _Coding:
    """Tokenizer of a preparation. `path` is None for bytes."""

    name: str
    path: str | None
    sha256: str | None
    vocab_size: int
    end: int | None


def _coding(options: TokenOptions) -> _Coding:
    if options.tokenizer == BYTES:
        if options.end_token is not None:
            raise ConfigError(
                f"--end-token={options.end_token!r} needs --tokenizer FILE: the 256 bytes have no such token."
            )
        return _Coding(name=BYTES, path=None, sha256=None, vocab_size=_NUM_BYTES, end=None)
    path = Path(options.tokenizer).expanduser().absolute()
    tokenizer = _load(path)
    vocabulary = tokenizer.get_vocab(with_added_tokens=True)
    if options.end_token is not None and options.end_token not in vocabulary:
        near = did_you_mean(options.end_token, [name for name in vocabulary if not name.isalnum()])
        raise ConfigError(f"--end-token={options.end_token!r} is not a token of {path}. {near}".rstrip())
    ends = [options.end_token] if options.end_token is not None else [name for name in _ENDS if name in vocabulary]
    return _Coding(
        name=path.name, path=str(path), sha256=hashlib.sha256(read_given(path)).hexdigest(),
        vocab_size=max(vocabulary.values()) + 1, end=vocabulary[ends[0]] if ends else None,
    )  # fmt: skip


def _load(path: Path) -> Any:
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")  # processes share the cores already
    tokenizers = optional("tokenizers", f"--tokenizer {path}")
    if not path.is_file():
        raise ConfigError(f"--tokenizer={path} must be `{BYTES}` or a file that `tokenizers` reads (tokenizer.json).")
    try:
        return tokenizers.Tokenizer.from_file(str(path))
    except Exception as error:  # the library has no error class of its own
        raise ConfigError(f"--tokenizer={path} is not a file that `tokenizers` reads: {error}.") from error


# --- the input ---


def _listing(sources: Sequence[str]) -> tuple[InputFile, ...]:
    """Return all files without duplicates, sorted by name and path; empty files are left out."""
    files: dict[Path, InputFile] = {}
    for word in sources:
        for name, path in _files_of(word):
            info = path.stat()
            if info.st_size:
                files.setdefault(
                    path, InputFile(name=name, path=str(path), size=info.st_size, mtime_ns=info.st_mtime_ns)
                )  # fmt: skip
    if not files:
        raise ConfigError(
            f"{' '.join(sources)}: all files are empty, or there is none. Name files, folders or patterns."
        )
    return tuple(sorted(files.values(), key=lambda file: (file.name, file.path)))


def _files_of(word: str) -> Iterator[tuple[str, Path]]:
    """Yield (name, path) of each file of a source; the name is relative to the source's folder or pattern."""
    path = absolute(word)
    if path.is_file():
        yield path.name, path
    elif path.is_dir():
        for folder, folders, names in os.walk(path):
            folders[:] = sorted(name for name in folders if not name.startswith("."))
            for name in names:
                if not name.startswith(".") and Path(folder, name).is_file():
                    yield Path(folder, name).relative_to(path).as_posix(), Path(folder, name)
    elif glob.has_magic(str(path)):
        plain = next(parent for parent in (path, *path.parents) if not glob.has_magic(str(parent)))
        for match in glob.iglob(str(path), recursive=True):  # noqa: PTH207  (an absolute pattern)
            if Path(match).is_file():
                yield Path(match).relative_to(plain).as_posix(), Path(match)
    else:
        raise ConfigError(f"{word} must be a file, a folder or a pattern; there is none.")


def _pieces(files: Sequence[InputFile], document: str) -> Iterator[Piece]:
    """Yield pieces of about 32 MiB. Items are [path, name, start, stop]; a file that is a document stays whole."""
    items: list[Any] = []
    amount = number = 0
    for file in files:
        step = file.size if document == "file" else _PIECE
        for start in range(0, file.size, step):
            stop = min(start + step, file.size)
            items.append([file.path, file.name, start, stop])
            amount += stop - start
            if amount >= _PIECE:
                yield Piece(name=f"{number:06d}", items=items, amount=amount)
                items, amount, number = [], 0, number + 1
    if items:
        yield Piece(name=f"{number:06d}", items=items, amount=amount)


# --- pieces ---


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenMaker:
    """Maker of a piece's tokens. `tokenizer`: the file; None: bytes. `end`: the token after each document."""

    folder: str
    tokenizer: str | None
    vocab_size: int
    end: int | None
    document: str
    eval_fraction: float

    def make(self, piece: Piece, tell: Tell) -> None:
        """Write a file for each part, and the record, which lists the documents that cannot be read."""
        paths = {part: Path(self.folder, PIECES, f"{part}-{piece.name}.bin") for part in (TRAIN, EVAL)}
        lengths: dict[str, list[int]] = {part: [] for part in paths}
        broken: list[tuple[str, str]] = []
        encode = self._encoder()
        dtype = np.dtype(dtype_of(self.vocab_size)).newbyteorder("<")
        end = np.array([] if self.end is None else [self.end], dtype=dtype).tobytes()
        outs = {part: temporary_of(path).open("wb") for part, path in paths.items()}
        try:
            done = 0
            for batch in self._batches(piece, broken):
                for part, tokens in zip(batch.parts, encode(batch.texts), strict=True):
                    data = np.asarray(tokens).astype(dtype).tobytes() + end
                    outs[part].write(data)
                    lengths[part].append(len(data) // dtype.itemsize)
                tell(batch.size)
                done += batch.size
            tell(piece.amount - done)  # bytes outside documents, as line ends
            for out in outs.values():
                out.flush()
                os.fsync(out.fileno())
        finally:
            for out in outs.values():
                out.close()
        for path in paths.values():
            commit(temporary_of(path), path)
        files = {f"{PIECES}/{path.name}": path.stat().st_size for path in paths.values()}
        write_record(Path(self.folder), piece.name, {"files": files, "lengths": lengths, "broken": broken})

    def _encoder(self) -> Callable[[list[bytes]], Sequence[Any]]:
        if self.tokenizer is None:
            return lambda texts: [np.frombuffer(text, dtype=np.uint8) for text in texts]
        tokenizer = _load(Path(self.tokenizer))

        def encode(texts: list[bytes]) -> Sequence[Any]:
            encodings = tokenizer.encode_batch([text.decode() for text in texts], add_special_tokens=False)
            return [np.array(encoding.ids, dtype=np.int64) for encoding in encodings]

        return encode

    def _batches(self, piece: Piece, broken: list[tuple[str, str]]) -> Iterator[_Batch]:
        batch = _Batch()
        for path, name, start, stop in piece.items:
            for text, where in self._documents(path, name, start, stop):
                problem = self._problem(text)
                if problem is not None:
                    broken.append((where, problem))
                elif text:
                    key = name if self.document == "file" else text.decode("utf-8", "surrogateescape")
                    batch.add(text, part_of(key, self.eval_fraction))
                if batch.size >= _BATCH:
                    yield batch
                    batch = _Batch()
        if batch.texts:
            yield batch

    def _documents(self, path: str, name: str, start: int, stop: int) -> Iterator[tuple[bytes, str]]:
        """Yield (text, name) of each document; lines count if they begin at or after `start` and before `stop`."""
        if self.document == "file":
            with open_given(path) as whole:
                yield whole.read(), name
            return
        with open_given(path) as file:
            if start:
                file.seek(start - 1)
                _end_line(file, stop)  # the previous line, or the rest of a line that belongs to the previous piece
            while (place := file.tell()) < stop and (line := file.readline()):
                # Without an end token, the line end marks the end of the document.
                text = line.rstrip(b"\r\n")
                yield (text if self.end is not None or not text else line), f"{name}, byte {place}"

    def _problem(self, text: bytes) -> str | None:
        if self.tokenizer is None:
            return None
        if len(text) > _LARGEST:
            return (
                f"it has {len(text) >> 20} MiB, and a tokenizer gets at most {_LARGEST >> 20} at once; try --document "
                "line"
            )
        try:
            text.decode()
        except UnicodeDecodeError as error:
            return f"it is not UTF-8 at byte {error.start}"
        return None


def _end_line(file: BinaryIO, stop: int) -> None:
    """Read to the end of a line, or to `stop`: each piece of one line of 60 GB would read the rest of the line."""
    while (part := file.readline(_BATCH)) and not part.endswith(b"\n") and file.tell() < stop:
        pass


@dataclass(slots=True)
class _Batch:
    texts: list[bytes] = field(default_factory=list)
    parts: list[str] = field(default_factory=list)
    size: int = 0

    def add(self, text: bytes, part: str) -> None:
        self.texts.append(text)
        self.parts.append(part)
        self.size += len(text)


# --- the end ---


def _whole(folder: Path) -> dict[str, TokenMeta] | None:
    try:
        return {part: read_meta(folder / part) for part in (TRAIN, EVAL)}
    except DataError:
        return None


def _finish(
    job: Job, records: Sequence[Mapping[str, Any]], coding: _Coding, options: TokenOptions, settings: Settings
) -> dict[str, TokenMeta]:
    """Join the pieces of both parts; write `meta.json` of each part last."""
    lengths = {part: [length for record in records for length in record["lengths"][part]] for part in (TRAIN, EVAL)}
    broken = [(str(name), str(cause)) for record in records for name, cause in record["broken"]]
    num_documents = sum(map(len, lengths.values())) + len(broken)
    tell_broken(job.folder, broken, num_documents, "documents", settings)
    check_parts({part: len(values) for part, values in lengths.items()}, "documents", options.eval_fraction)
    if coding.path is not None:
        _write_whole(job.folder / TOKENIZER, [Path(coding.path)])
    metas = {}
    for part in (EVAL, TRAIN):
        files = [
            job.folder / name for record in records for name in record["files"] if Path(name).name.startswith(part)
        ]
        digest = _write_whole(job.folder / part / TOKENS, files)
        starts = np.concatenate([[0], np.cumsum(lengths[part], dtype=np.uint64)]).astype(np.uint64)
        metas[part] = _end_part(job.folder / part, starts, coding, digest)
    return {part: metas[part] for part in (TRAIN, EVAL)}


def _end_part(folder: Path, starts: NDArray[np.uint64], coding: _Coding, digest: str) -> TokenMeta:
    return finish(
        folder,
        starts,
        TokenMeta(
            vocab_size=coding.vocab_size, tokenizer=coding.name, tokenizer_sha256=coding.sha256,
            end_of_document=coding.end, num_documents=len(starts) - 1, num_tokens=int(starts[-1]), tokens_sha256=digest,
        ),
    )  # fmt: skip


def _write_whole(path: Path, files: Sequence[Path]) -> str:
    """Write the bytes of `files`, one after the other, to `path`; return their SHA-256."""
    digest = hashlib.sha256()
    temporary = temporary_of(path)
    with temporary.open("wb") as out:
        for part in files:
            with part.open("rb") as file:
                while block := file.read(_BLOCK):
                    digest.update(block)
                    out.write(block)
        out.flush()
        os.fsync(out.fileno())
    commit(temporary, path)
    return digest.hexdigest()


def _num_broken(folder: Path) -> int:
    try:
        return len((folder / BROKEN).read_text(encoding="utf-8").splitlines())
    except FileNotFoundError:
        return 0
