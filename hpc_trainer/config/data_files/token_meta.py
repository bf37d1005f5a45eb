"""Metadata of a folder of tokens (`meta.json`), read at plan time, so without torch and numpy.

The files beside it, and how to read and write them, are in `datasets/records/token_files.py`.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hpc_trainer.config.data_files.given import read_given
from hpc_trainer.config.data_files.look import is_folder
from hpc_trainer.errors import DataError

FORMAT = 1
META, TOKENS, DOCUMENTS = "meta.json", "tokens.bin", "documents.npy"
TOKENIZER = "tokenizer.json"
"""Name of the tokenizer's file, beside the parts of a prepared folder and in an export."""
BYTES = "bytes"
"""Tokenizer name for text without a tokenizer: a token is a byte."""
LARGEST_UINT16_VOCABULARY = 65_536
_REMAKE = "Prepare the folder again, or name another."


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
            f"it was cut off, or is another one's. {_REMAKE}"
        )
    return meta


def _parsed(found: object, path: Path) -> TokenMeta:
    if not isinstance(found, dict):
        raise DataError(f"{path} is damaged: it is no mapping. {_REMAKE}")
    if found.get("format") != FORMAT:
        raise DataError(f"{path} has format {found.get('format')!r}, and this version reads {FORMAT}. {_REMAKE}")
    numbers = [found.get(name) for name in ("vocab_size", "num_documents", "num_tokens")]
    end, sha256 = found.get("end_of_document"), found.get("tokenizer_sha256")
    is_whole = all(type(number) is int and number >= 0 for number in numbers)
    texts = [found.get("tokenizer"), found.get("tokens_sha256"), *([] if sha256 is None else [sha256])]
    if not is_whole or not all(isinstance(text, str) for text in texts) or not (end is None or type(end) is int):
        raise DataError(f"{path} is damaged: a value is missing or of another type. {_REMAKE}")
    values: dict[str, Any] = {name: found.get(name) for name in TokenMeta.__dataclass_fields__}
    meta = TokenMeta(**values)
    if found.get("dtype") != meta.dtype or not 2 <= meta.vocab_size <= 2**31 or not (end or 0) < meta.vocab_size:
        raise DataError(
            f"{path} contradicts itself: vocab_size={meta.vocab_size} (2 to 2147483648) with dtype "
            f"{found.get('dtype')!r} and end_of_document={end}. {_REMAKE}"
        )
    return meta
