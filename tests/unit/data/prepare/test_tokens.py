"""data prepare tokens: documents and their tokens, what is refused, and that any way makes the same bytes."""

from __future__ import annotations

import contextlib
import itertools
import json
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from hpc_trainer.config.user_files import open_given
from hpc_trainer.data.prepare import tokens
from hpc_trainer.data.prepare.job import Prepared, Settings
from hpc_trainer.data.prepare.tokens import TokenMaker, TokenOptions, prepare_tokens
from hpc_trainer.data.tokens.files import check_tokens
from hpc_trainer.errors import ConfigError, DataError, RunStateError
from tests.unit.data.prepare.raw_data import content


@pytest.fixture(autouse=True)
def _small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tokens, "_PIECE", 300)
    monkeypatch.setattr(tokens, "_BATCH", 50)


def _texts(folder: Path, num: int = 20) -> Path:
    (folder / "more").mkdir(parents=True)
    for index in range(num):
        place = folder / "more" if index % 3 else folder
        (place / f"{index:02d}.txt").write_text("".join(f"line {n} of {index}, ünd\n" for n in range(index % 7 + 1)))
    return folder


def _prepare(source: Any, folder: Path, settings: Settings | None = None, **options: Any) -> Prepared:
    given = TokenOptions(**{"eval_fraction": 0.3, **options})
    sources = [str(each) for each in (source if isinstance(source, list) else [source])]
    return prepare_tokens(sources, folder, given, settings or Settings(), lambda *_: None)


def _documents(folder: Path) -> list[list[int]]:
    found = check_tokens(folder)
    starts = found.documents.astype(int).tolist()
    return [found.tokens[a:b].tolist() for a, b in itertools.pairwise(starts)]


def _tokenizer(path: Path) -> Path:
    from tokenizers import Tokenizer, models, pre_tokenizers, trainers

    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=300, special_tokens=["<|endoftext|>"], initial_alphabet=alphabet, show_progress=False
    )
    made.train_from_iterator(["line one of two, ünd line three"] * 3, trainer)
    made.save(str(path))
    return path


def test_files_as_bytes(tmp_path: Path) -> None:
    texts = _texts(tmp_path / "texts")
    done = _prepare(texts, tmp_path / "out")
    assert done.num_pieces > 3
    assert done.overrides == ("data=tokens", f"data.path={tmp_path / 'out'}")
    both = {part: [bytes(each) for each in _documents(tmp_path / "out" / part)] for part in ("train", "eval")}
    assert sorted(both["train"] + both["eval"]) == sorted(path.read_bytes() for path in texts.rglob("*.txt"))
    assert all(both.values())
    assert {part: len(each) for part, each in both.items()} == {p: c["documents"] for p, c in done.counts.items()}
    meta = json.loads((tmp_path / "out" / "train" / "meta.json").read_text())
    assert (meta["tokenizer"], meta["vocab_size"], meta["end_of_document"]) == ("bytes", 256, None)


@pytest.mark.parametrize("size", [17, 64, 300, 10_000])
def test_lines_are_documents_wherever_pieces_are_cut(
    tmp_path: Path, size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tokens, "_PIECE", size)
    texts = _texts(tmp_path / "texts")
    (texts / "last.txt").write_bytes(b"\n\nno end \xff of line")
    _prepare(texts, tmp_path / "out", document="line")
    found = [bytes(each) for part in ("train", "eval") for each in _documents(tmp_path / "out" / part)]
    lines = [line for path in texts.rglob("*.txt") for line in path.read_bytes().splitlines(keepends=True)]
    assert sorted(found) == sorted(line for line in lines if line.strip())


def test_a_long_line_is_read_once_however_many_pieces_it_has(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every piece read the rest of the line: 1,800 times, of a file of 60 GB in one line."""
    num_read = 0

    @contextlib.contextmanager
    def counted(path: str) -> Iterator[Any]:
        def readline(size: int = -1) -> bytes:
            nonlocal num_read
            num_read += len(data := file.readline(size))
            return data

        with open_given(path) as file:
            yield SimpleNamespace(readline=readline, seek=file.seek, tell=file.tell)

    monkeypatch.setattr(tokens, "open_given", counted)
    (tmp_path / "a.txt").write_bytes(b"x" * 100_000 + b"\n" + b"y\n")
    maker = TokenMaker(folder="", tokenizer=None, vocab_size=256, end=None, document="line", eval_fraction=0.5)
    pieces = [(start, min(start + 1000, 100_003)) for start in range(0, 100_003, 1000)]
    found = [
        text for start, stop in pieces for text, _ in maker._documents(str(tmp_path / "a.txt"), "a.txt", start, stop)
    ]
    assert found == [b"x" * 100_000 + b"\n", b"y\n"]
    assert num_read < 250_000


def test_the_same_line_stays_in_its_part_when_others_come(tmp_path: Path) -> None:
    def parts_of(folder: Path) -> dict[bytes, str]:
        return {bytes(each): part for part in ("train", "eval") for each in _documents(folder / part)}

    _prepare(_texts(tmp_path / "few", 10), tmp_path / "a", document="line")
    _prepare(_texts(tmp_path / "many", 30), tmp_path / "b", document="line")
    few, many = parts_of(tmp_path / "a"), parts_of(tmp_path / "b")
    assert len(few) < len(many)
    assert few == {line: many[line] for line in few}


def test_a_tokenizer_with_an_end_token(tmp_path: Path) -> None:
    from tokenizers import Tokenizer

    texts, file = _texts(tmp_path / "texts"), _tokenizer(tmp_path / "mine.json")
    for document in ("file", "line"):
        out = tmp_path / document
        _prepare([texts / "more", texts / "00.txt"], out, tokenizer=str(file), document=document)
        known = Tokenizer.from_file(str(out / "tokenizer.json"))
        end = known.token_to_id("<|endoftext|>")
        found = [each for part in ("train", "eval") for each in _documents(out / part)]
        assert all(each[-1] == end and end not in each[:-1] for each in found)
        whole = [path.read_text() for path in (texts / "more").iterdir()] + [(texts / "00.txt").read_text()]
        wanted = whole if document == "file" else [line for text in whole for line in text.splitlines()]
        assert sorted(found) == sorted([*known.encode(text).ids, end] for text in wanted)
        meta = check_tokens(out / "train").meta
        assert (meta.tokenizer, meta.vocab_size, meta.end_of_document) == ("mine.json", known.get_vocab_size(), end)


def test_parts_and_processes_make_the_same_bytes(tmp_path: Path) -> None:
    texts, file = _texts(tmp_path / "texts"), _tokenizer(tmp_path / "mine.json")
    options = {"tokenizer": str(file), "document": "line"}
    _prepare(texts, tmp_path / "whole", **options)
    for index in (3, 1, 2):
        done = _prepare(texts, tmp_path / "parts", Settings(part=(index, 3)), **options)
        assert done.is_whole == (index == 2)
        if not done.is_whole:
            with pytest.raises(DataError):
                check_tokens(tmp_path / "parts" / "train")
    _prepare(texts, tmp_path / "two", Settings(num_workers=2), **options)
    assert content(tmp_path / "whole") == content(tmp_path / "parts") == content(tmp_path / "two")
    again = _prepare(texts, tmp_path / "two", Settings(num_workers=2), **options)
    assert (again.num_made, again.is_whole) == (0, True)


def test_broken_documents_are_listed_and_refused_or_left_out(tmp_path: Path) -> None:
    texts, file = _texts(tmp_path / "texts"), _tokenizer(tmp_path / "mine.json")
    (texts / "latin.txt").write_bytes("müde\nund gut\n".encode("latin-1"))
    with pytest.raises(RunStateError, match="1 of 21 documents cannot be read"):
        _prepare(texts, tmp_path / "out", tokenizer=str(file))
    assert (tmp_path / "out" / "broken.txt").read_text() == "latin.txt: it is not UTF-8 at byte 1\n"
    done = _prepare(texts, tmp_path / "out", Settings(skip_broken=True), tokenizer=str(file))
    assert (done.num_made, done.num_broken) == (0, 1)
    assert sum(each["documents"] for each in done.counts.values()) == 20
    _prepare(texts, tmp_path / "lines", Settings(skip_broken=True), tokenizer=str(file), document="line")
    assert (tmp_path / "lines" / "broken.txt").read_text() == "latin.txt, byte 0: it is not UTF-8 at byte 1\n"


def test_bad_input_is_refused_with_file_and_fix(tmp_path: Path) -> None:
    texts, file = _texts(tmp_path / "texts"), _tokenizer(tmp_path / "mine.json")
    out = tmp_path / "out"
    no_tokenizer = tmp_path / "no.json"
    no_tokenizer.write_text("{}")
    for source, options, match in (
        (tmp_path / "none", {}, "must be a file, a folder or a pattern"),
        (texts / "*.md", {}, "all files are empty, or there is none"),
        (texts, {"document": "page"}, "--document=page: use file or line"),
        (texts, {"end_token": "</s>"}, "needs --tokenizer FILE"),
        (texts, {"tokenizer": str(file), "end_token": "<|endoftxt|>"}, r"Did you mean <\|endoftext\|>"),
        (texts, {"tokenizer": "none.json"}, "must be `bytes` or a file"),
        (texts, {"tokenizer": str(no_tokenizer)}, "is not a file that `tokenizers` reads"),
        (texts / "00.txt", {}, "(train|eval) has none of the 1 files"),
        (texts, {"eval_fraction": 0.0}, "must be between 0 and 1"),
    ):  # fmt: skip
        with pytest.raises(ConfigError, match=match):
            _prepare(source, out, **options)
    with pytest.raises(ConfigError, match=r"is inside .*texts, which is an input"):
        _prepare(texts, texts / "out")
    assert not out.exists()
    (tmp_path / "one.txt").write_text("the same line\n" * 9)
    with pytest.raises(ConfigError, match=r"(train|eval) has none of the 9 documents"):
        _prepare(tmp_path / "one.txt", out, document="line")
    with pytest.raises(ConfigError, match="--document was line, is file"):
        _prepare([texts, tmp_path / "one.txt"], out)


def test_a_vocabulary_of_more_than_16_bits_takes_32(tmp_path: Path) -> None:
    from tokenizers import Tokenizer, models, pre_tokenizers

    known = Tokenizer(models.WordLevel({"[UNK]": 0, **{f"w{n}": n for n in range(1, 70_000)}}, unk_token="[UNK]"))
    known.pre_tokenizer = pre_tokenizers.Whitespace()
    known.save(str(tmp_path / "large.json"))
    (tmp_path / "text.txt").write_text("".join(f"w{n} w{69_999 - n}\n" for n in range(40)))
    _prepare(tmp_path / "text.txt", tmp_path / "out", tokenizer=str(tmp_path / "large.json"), document="line")
    found = [each for part in ("train", "eval") for each in _documents(tmp_path / "out" / part)]
    assert sorted(found) == sorted([n, 69_999 - n] for n in [*range(40)])
    assert check_tokens(tmp_path / "out" / "train").tokens.dtype == np.dtype("<u4")
