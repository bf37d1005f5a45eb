"""`data=tokens`: its keys, the parts of folders for training and evaluation, and a folder's `meta.json`. No torch."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import Any, ClassVar, Literal, NamedTuple

from hpc_trainer.config.schema.data import TOKENIZER, DataConfig
from hpc_trainer.config.schema.key import ALWAYS, COUNTS, RULED, SAFE, key
from hpc_trainer.config.schema.task import TargetKind
from hpc_trainer.config.user_files import is_file, is_folder, read_given
from hpc_trainer.errors import ConfigError, DataError, HpcTrainerError

FORMAT = 1
META, TOKENS, DOCUMENTS = "meta.json", "tokens.bin", "documents.npy"
LARGEST_UINT16_VOCABULARY = 65_536
_REMAKE = "Prepare the folder again, or name another."
LONGEST_EPOCH = 2**31
"""Largest number of samples in an epoch; the order of an epoch takes 8 bytes of each rank's memory for each sample."""


@dataclass(kw_only=True, slots=True)
class TokensConfig(DataConfig):
    """Folders of tokens, memory-mapped; documents packed to windows without padding, several sources by weight."""

    takes_fed: ClassVar[bool] = True
    kept_keys: ClassVar[tuple[str, ...]] = ("mask_document_starts",)
    is_text: ClassVar[bool | None] = True
    name: str = "tokens"
    _target_: str = "hpc_trainer.datasets.records.tokens.build"
    path: str | None = key(None, ALWAYS, COUNTS, SAFE)
    """Prepared folder: with parts train/ and eval/, or one part alone. For several folders use `sources`."""
    sources: dict[str, float] = key({}, ALWAYS, COUNTS, SAFE, limits="> 0")
    """Folders and their weights in an epoch, such as {/data/code: 3, /data/books: 1}; in place of `path`."""
    seq_len: int = key(128, ALWAYS, COUNTS, limits="≥ 2")
    """Tokens that a sample predicts."""
    eval_fraction: float = key(0.1, RULED, COUNTS, limits="(0, 1)")
    """Share of a source without eval/, at its end, held out for evaluation."""
    mask_document_starts: bool = key(False, ALWAYS, COUNTS)
    """Whether the first token of a document is not a target, because no token before it predicts it. Needs tokens with
    ends of documents."""

    def num_train_samples(self) -> int | None:
        try:
            sources = find_sources(self, "train")
        except HpcTrainerError:  # `check` reports it
            return None
        if any(not 0 < source.weight < math.inf for source in sources):
            return None
        sizes = [source.num_windows(self.seq_len) for source in sources]
        return sum(epoch_shares(sizes, [source.weight for source in sources]))

    def vocabulary(self) -> int | None:
        folders = [self.path] if self.path is not None else sorted(self.sources)
        try:
            return read_meta(_train_part(Path(folders[0]))).vocab_size if folders else None
        except HpcTrainerError:
            return None

    def check(self, targets: TargetKind) -> None:
        check_tokens(self)

    def model_facts(self) -> dict[str, Any]:
        facts = DataConfig.model_facts(self)
        try:
            meta = find_sources(self, "train")[0].meta
        except (HpcTrainerError, IndexError):
            return facts
        return {**facts, "num_classes": meta.vocab_size, "tokenizer": meta.tokenizer_sha256 or meta.tokenizer}

    def preprocessing(self, mean: Any = None, std: Any = None) -> dict[str, Any]:
        from hpc_trainer.training.data.preprocessing import tokens

        return tokens(seq_len=self.seq_len, vocab_size=None)

    def unknown_facts(self, made: Mapping[str, Any] | None) -> str | None:
        return "tokenizer" if made is None or made.get("tokenizer") is None else None

    def tokenizer_files(self) -> Iterable[Path]:
        part = Path(self.path or next(iter(sorted(self.sources)))).expanduser()
        return part / TOKENIZER, part.parent / TOKENIZER


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenMeta:
    """Content of `meta.json` without the format's version and the dtype, which follows from the vocabulary."""

    vocab_size: int
    """Number of tokens in the vocabulary, 2 to 2**31; every token is less, including the end-of-document token."""
    tokenizer: str
    """Name of the tokenizer, or `bytes`."""
    tokenizer_sha256: str | None
    """SHA-256 of the tokenizer's file; None for `bytes`."""
    end_of_document: int | None
    """Token after each document; None if documents follow each other without one."""
    num_documents: int
    num_tokens: int
    """Number of tokens, ends of documents included."""
    tokens_sha256: str
    """SHA-256 of `tokens.bin`."""

    @property
    def dtype(self) -> str:
        """`uint16` or `uint32`; the file is little-endian."""
        return dtype_of(self.vocab_size)

    @property
    def itemsize(self) -> int:
        """Bytes of one token."""
        return 2 if self.dtype == "uint16" else 4

    def to_json(self) -> dict[str, object]:
        return {
            "format": FORMAT,
            "dtype": self.dtype,
            "vocab_size": self.vocab_size,
            "tokenizer": self.tokenizer,
            "tokenizer_sha256": self.tokenizer_sha256,
            "end_of_document": self.end_of_document,
            "num_documents": self.num_documents,
            "num_tokens": self.num_tokens,
            "tokens_sha256": self.tokens_sha256,
        }


def dtype_of(vocab_size: int) -> str:
    """Return the smallest of `uint16` and `uint32` that holds all tokens."""
    return "uint16" if vocab_size <= LARGEST_UINT16_VOCABULARY else "uint32"


def read_meta(folder: Path) -> TokenMeta:
    """Read the metadata of a complete folder: `meta.json` is written last, and `tokens.bin` must have the size it says.

    Raises:
        DataError: there is no such folder, or it is unfinished, damaged, or of another version.
    """
    path = folder / META
    try:
        content = json.loads(read_given(path))
        size = (folder / TOKENS).stat().st_size
    except (FileNotFoundError, NotADirectoryError) as error:
        missing = Path(error.filename).name
        is_begun = missing == META and is_folder(folder)
        unfinished = " `meta.json` is written last: it may be unfinished." if is_begun else ""
        raise DataError(
            f"{folder} must be a folder of tokens, and has no {missing}.{unfinished} "
            "Make it with `hpc-trainer data prepare`, or name another."
        ) from error
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror}. Check its permissions, on every node.") from error
    except (ValueError, RecursionError) as error:
        raise DataError(f"{path} is damaged: {error}. {_REMAKE}") from error
    meta = _parsed(content, path)
    if size != meta.num_tokens * meta.itemsize:
        raise DataError(
            f"{folder / TOKENS} has {size} bytes, and {META} says {meta.num_tokens} tokens of {meta.itemsize} bytes: "
            f"it was cut off, or belongs to another folder. {_REMAKE}"
        )
    return meta


def _parsed(content: object, path: Path) -> TokenMeta:
    if not isinstance(content, dict):
        raise DataError(f"{path} is damaged: it is not a mapping. {_REMAKE}")
    if content.get("format") != FORMAT:
        raise DataError(f"{path} has format {content.get('format')!r}, and this version reads {FORMAT}. {_REMAKE}")
    numbers = [content.get(name) for name in ("vocab_size", "num_documents", "num_tokens")]
    end, sha256 = content.get("end_of_document"), content.get("tokenizer_sha256")
    is_whole = all(type(number) is int and number >= 0 for number in numbers)
    texts = [content.get("tokenizer"), content.get("tokens_sha256"), *([] if sha256 is None else [sha256])]
    if not is_whole or not all(isinstance(text, str) for text in texts) or not (end is None or type(end) is int):
        raise DataError(f"{path} is damaged: a value is missing or of another type. {_REMAKE}")
    values: dict[str, Any] = {name: content.get(name) for name in TokenMeta.__dataclass_fields__}
    meta = TokenMeta(**values)
    if content.get("dtype") != meta.dtype or not 2 <= meta.vocab_size <= 2**31 or not (end or 0) < meta.vocab_size:
        raise DataError(
            f"{path} contradicts itself: vocab_size={meta.vocab_size} (2 to 2147483648) with dtype "
            f"{content.get('dtype')!r} and end_of_document={end}. {_REMAKE}"
        )
    return meta


class Source(NamedTuple):
    """Tokens `start` to `stop` of a folder, in windows of seq_len + 1 that overlap by one."""

    folder: Path
    meta: TokenMeta
    start: int
    stop: int
    weight: float

    def num_windows(self, seq_len: int) -> int:
        return max(0, (self.stop - self.start - 1) // seq_len)


def find_sources(data: TokensConfig, split: Literal["train", "eval"]) -> list[Source]:
    """Return the sources of a split in the order of their paths, which is the order in a run's identity.

    Raises:
        ConfigError: no source is named or too many are, tokenizers differ, or a part has no window.
        DataError: a folder is missing, unfinished or damaged.
    """
    sources = [_source(Path(path), weight, data, split) for path, weight in _named(data).items()]
    _check_alike(sources)
    if data.eval_fraction != TokensConfig().eval_fraction and all(_has_eval(Path(path)) for path in _named(data)):
        raise ConfigError(
            f"data.eval_fraction={data.eval_fraction:g} has no effect: each source has a part eval/. Use "
            f"data.eval_fraction={TokensConfig().eval_fraction:g}, its default."
        )
    for source in sources:
        if not source.num_windows(data.seq_len):
            size = source.stop - source.start
            fix = f"data.seq_len={size - 1} or less" if size > 2 else "a larger one"
            raise ConfigError(
                f"data.seq_len={data.seq_len} is too long for {source.folder}: it has {size} tokens for split={split}, "
                f"and a window needs data.seq_len + 1. Use {fix}."
            )
        if data.mask_document_starts and source.meta.end_of_document is None:
            raise ConfigError(
                f"data.mask_document_starts needs an end-of-document token, and {source.folder} has none. Prepare it "
                "with one, or use data.mask_document_starts=false."
            )
    return sources


def epoch_shares(sizes: Sequence[int], weights: Sequence[float]) -> list[int]:
    """Return the samples of each source in an epoch: in proportion to the weights, and at least the source's size.

    Shares are rounded to whole numbers. An epoch is the shortest one that has each window of each source at least once.
    """
    parts = [Fraction(weight) for weight in weights]
    total = sum(parts)
    length = max(math.ceil(size * total / part) for size, part in zip(sizes, parts, strict=True))
    exact = [length * part / total for part in parts]
    shares = [math.floor(share) for share in exact]
    by_rest = sorted(range(len(shares)), key=lambda index: (shares[index] - exact[index], index))
    for index in by_rest[: length - sum(shares)]:
        shares[index] += 1
    return shares


def check_tokens(data: TokensConfig) -> None:
    """Check both splits and the length of an epoch. Raises what `find_sources` raises.

    Raises:
        ConfigError: an epoch is too long.
    """
    for split in ("train", "eval"):
        find_sources(data, split)
    length = data.num_train_samples() or 0
    if length > LONGEST_EPOCH:
        raise ConfigError(
            f"data.sources: an epoch with each source whole and in proportion to its weight has {length} samples; at "
            f"most {LONGEST_EPOCH} are possible. Give the largest source a larger weight, or leave the smallest out."
        )


def _named(data: TokensConfig) -> dict[str, float]:
    if data.path is not None and data.sources:
        raise ConfigError("data.path and data.sources both say where tokens are. Keep one of them: data.path=null.")
    if data.path is None and not data.sources:
        raise ConfigError(
            "data=tokens needs data.path, a folder that `hpc-trainer data prepare` made, or +data.sources={FOLDER: "
            "WEIGHT, ..}."
        )
    places = [Path(path).expanduser().resolve() for path in data.sources]
    if len(set(places)) < len(places):
        raise ConfigError(f"data.sources names a folder twice: {', '.join(data.sources)}. Name each once.")
    return {data.path: 1.0} if data.path is not None else dict(sorted(data.sources.items()))


def _source(path: Path, weight: float, data: TokensConfig, split: Literal["train", "eval"]) -> Source:
    train = _train_part(path)
    if _has_eval(path):
        folder = train if split == "train" else path / "eval"
        meta = read_meta(folder)
        return Source(folder, meta, 0, meta.num_tokens, weight)
    meta = read_meta(train)
    cut = meta.num_tokens - round(meta.num_tokens * data.eval_fraction)
    return Source(train, meta, *((0, cut) if split == "train" else (cut, meta.num_tokens)), weight)


def _train_part(path: Path) -> Path:
    path = path.expanduser()
    return path / "train" if is_folder(path / "train") and not is_file(path / META) else path


def _has_eval(path: Path) -> bool:
    return is_folder(path.expanduser() / "eval") and _train_part(path) != path.expanduser()


def _check_alike(sources: Sequence[Source]) -> None:
    first = sources[0]
    for name, what in (
        ("vocab_size", "vocabulary"), ("tokenizer_sha256", "tokenizer (SHA-256)"), ("tokenizer", "tokenizer"),
        ("end_of_document", "end-of-document token"),
    ):  # fmt: skip
        wanted = getattr(first.meta, name)
        other = next((source for source in sources if getattr(source.meta, name) != wanted), None)
        if other is not None:
            raise ConfigError(
                f"data.sources: {first.folder} and {other.folder} have different values of {what}: {wanted} and "
                f"{getattr(other.meta, name)}. All must come from one tokenizer. Prepare them again with one, or leave "
                "one out."
            )
