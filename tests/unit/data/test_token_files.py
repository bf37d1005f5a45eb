"""Folders of tokens: what is written is read, and what is damaged is refused by name."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from hpc_trainer.data.tokens import read_meta
from hpc_trainer.data.tokens.files import check_tokens, read_tokens, write_tokens
from hpc_trainer.errors import DataError
from tests.seeds import chosen_seed

TEXTS = [b"one", b"", b"two and a half"]


def byte_documents(texts: list[bytes] | None = None) -> list[np.ndarray]:
    return [np.frombuffer(each, dtype=np.uint8) for each in (TEXTS if texts is None else texts)]


@pytest.mark.parametrize(("vocab_size", "dtype"), [(257, "<u2"), (65_536, "<u2"), (65_537, "<u4")])
def test_what_is_written_is_read(tmp_path: Path, vocab_size: int, dtype: str) -> None:
    meta = write_tokens(tmp_path / "a", byte_documents(), vocab_size=vocab_size, end_of_document=256)
    found = check_tokens(tmp_path / "a")
    assert found.meta == meta == read_meta(tmp_path / "a")
    assert found.tokens.dtype == np.dtype(dtype)
    assert found.documents.tolist() == [0, 4, 5, 20]
    assert found.tokens.tolist() == [*b"one", 256, 256, *b"two and a half", 256]


def test_random_documents_come_back(tmp_path: Path) -> None:
    draws = np.random.default_rng(chosen_seed())
    for number in range(20):
        vocab_size = int(draws.choice([2, 1000, 2**16, 2**16 + 1, 2**31]))
        texts = [draws.integers(0, vocab_size, size=draws.integers(0, 50)) for _ in range(draws.integers(1, 9))]
        end = int(draws.integers(0, vocab_size)) if draws.integers(2) else None
        folder = tmp_path / str(number)
        write_tokens(folder, iter(texts), vocab_size=vocab_size, end_of_document=end)
        if not sum(map(len, texts)) and end is None:
            continue
        found = check_tokens(folder)
        ends = [] if end is None else [end]
        for text, start, stop in zip(texts, found.documents[:-1], found.documents[1:], strict=True):
            assert found.tokens[start:stop].tolist() == [*text.tolist(), *ends]


def test_killed_while_it_is_written_nothing_is_read(tmp_path: Path) -> None:
    def killed() -> Iterator[np.ndarray]:
        yield from byte_documents()
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write_tokens(tmp_path / "a", killed(), vocab_size=256)
    with pytest.raises(DataError, match=r"has no meta\.json\. `meta\.json` is written last: it may be unfinished"):
        read_tokens(tmp_path / "a")
    write_tokens(tmp_path / "a", byte_documents(), vocab_size=256)  # begun anew
    assert check_tokens(tmp_path / "a").meta.num_tokens == 17
    with pytest.raises(DataError, match="holds tokens already"):
        write_tokens(tmp_path / "a", byte_documents(), vocab_size=256)


@pytest.mark.parametrize(
    ("document", "said"),
    [
        (np.array([1, 256]), "document 0 of .* has the token 256; the vocabulary has 0 to 255"),
        (np.array([-1, 2]), "has the token -1"),
        (np.array([0.5]), r"must be whole numbers \[length\]; it is float64 \[1\]"),
        (np.array([[1]]), r"it is int64 \[1, 1\]"),
    ],
)
def test_no_token_outside_the_vocabulary_is_written(tmp_path: Path, document: np.ndarray, said: str) -> None:
    with pytest.raises(DataError, match=said):
        write_tokens(tmp_path / "a", [document], vocab_size=256)
    with pytest.raises(DataError, match=r"has no meta\.json"):
        read_tokens(tmp_path / "a")


def _edit_meta(**values: object) -> Callable[[Path], None]:
    def edit(folder: Path) -> None:
        path = folder / "meta.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | values))

    return edit


def _cut(folder: Path) -> None:
    data = (folder / "tokens.bin").read_bytes()
    (folder / "tokens.bin").write_bytes(data[:-1])


def _objects(folder: Path) -> None:
    np.save(folder / "documents.npy", np.array([0, "a"], dtype=object), allow_pickle=True)


DAMAGE: list[tuple[Callable[[Path], object], str]] = [
    (_cut, "tokens.bin has 33 bytes, and meta.json says 17 tokens of 2 bytes"),
    (_edit_meta(format=2), "has format 2, and this version reads 1"),
    (_edit_meta(vocab_size="256"), "a value is missing or of another type"),
    (_edit_meta(vocab_size=100_000), "contradicts itself: vocab_size=100000 .* with dtype 'uint16'"),
    (_edit_meta(end_of_document=256), "and end_of_document=256"),
    (_edit_meta(num_documents=9), r"documents.npy must be uint64 \[10\], from 0 to 17; it is uint64 \[4\]"),
    (lambda folder: (folder / "meta.json").write_text("{"), "meta.json is damaged"),
    (lambda folder: (folder / "meta.json").write_text("[]"), "meta.json is damaged: it is not a mapping"),
    (lambda folder: (folder / "tokens.bin").unlink(), "has no tokens.bin"),
    (lambda folder: (folder / "documents.npy").unlink(), "documents.npy"),
    (lambda folder: (folder / "documents.npy").write_bytes(b""), "cannot be read"),
    (_objects, "Python objects in dtype"),
]


@pytest.mark.parametrize(("damage", "said"), DAMAGE)
def test_damage_is_named(tmp_path: Path, damage: Callable[[Path], object], said: str) -> None:
    write_tokens(tmp_path / "a", byte_documents(), vocab_size=256)
    damage(tmp_path / "a")
    with pytest.raises(DataError, match=said) as caught:
        read_tokens(tmp_path / "a")
    assert str(tmp_path / "a") in str(caught.value)


def test_a_full_check_sees_what_a_start_does_not(tmp_path: Path) -> None:
    write_tokens(tmp_path / "a", byte_documents(), vocab_size=256)
    path = tmp_path / "a" / "tokens.bin"
    data = bytearray(path.read_bytes())
    data[4] ^= 1
    path.write_bytes(data)
    read_tokens(tmp_path / "a")
    with pytest.raises(DataError, match=re.escape("has changed since it was written (SHA-256)")):
        check_tokens(tmp_path / "a")
    data[5] = 1
    path.write_bytes(data)
    with pytest.raises(DataError, match=f"has the token {256 + data[4]}, and a vocabulary of 256"):
        check_tokens(tmp_path / "a")


def test_no_token_at_all_is_refused(tmp_path: Path) -> None:
    write_tokens(tmp_path / "a", [], vocab_size=256)
    with pytest.raises(DataError, match="holds no token"):
        read_tokens(tmp_path / "a")
    with pytest.raises(DataError, match="must be a folder of tokens, and has no meta"):
        read_tokens(tmp_path / "b")


def test_no_torch_is_imported() -> None:
    code = "import sys, hpc_trainer.data.tokens.files; sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)
