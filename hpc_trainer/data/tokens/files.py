"""Folder of tokens: documents one after the other in one memory-mapped file. numpy only, no torch.

tokens.bin     all tokens, little-endian; uint16 if vocab_size ≤ 65,536, else uint32
documents.npy  uint64 [num_documents + 1]: the start of each document, and the end; an end token belongs to its document
meta.json      description (`TokenMeta`); written last, so a folder without it is unfinished

Splits are folders of this kind: `train/` and `eval/` below the prepared folder.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hpc_trainer.config.schema.data import BYTES
from hpc_trainer.config.user_files import open_given
from hpc_trainer.data.tokens import DOCUMENTS, META, TOKENS, TokenMeta, dtype_of, read_meta
from hpc_trainer.errors import DataError
from hpc_trainer.record.files import fsync_folder, write_json

_BLOCK = 1 << 22
_REMAKE = "Prepare the folder again, or name another."


@dataclass(frozen=True, slots=True)
class TokenFolder:
    """Memory-mapped folder of tokens. The operating system reads its pages on demand."""

    path: Path
    meta: TokenMeta
    tokens: NDArray[np.unsignedinteger[Any]]
    """Tokens [num_tokens]."""
    documents: NDArray[np.uint64]
    """Starts of the documents, and the end, [num_documents + 1]."""


def read_tokens(folder: Path) -> TokenFolder:
    """Map the folder, after checks that read only its first and last bytes; `check_tokens` reads everything.

    Raises:
        DataError: the folder is missing, unfinished or damaged, or has no token.
    """
    meta = read_meta(folder)
    if not meta.num_tokens:
        raise DataError(f"{folder} holds no token. {_REMAKE}")
    try:
        open_given(folder / DOCUMENTS).close()  # numpy would wait for the writer of a pipe
        # Plain arrays over the maps, because slicing np.memmap itself makes a memmap object each time.
        tokens = np.asarray(np.memmap(folder / TOKENS, dtype=stored_dtype(meta.vocab_size), mode="r"))
        documents = np.asarray(np.load(folder / DOCUMENTS, mmap_mode="r", allow_pickle=False))
    except (OSError, ValueError, EOFError) as error:
        raise DataError(f"{folder} cannot be read: {str(error).rstrip('.')}. {_REMAKE}") from error
    is_ours = documents.dtype == np.uint64 and documents.shape == (meta.num_documents + 1,)
    if not is_ours or documents[0] != 0 or documents[-1] != meta.num_tokens:
        raise DataError(
            f"{folder / DOCUMENTS} must be uint64 [{meta.num_documents + 1}], from 0 to {meta.num_tokens}; it is "
            f"{documents.dtype} {list(documents.shape)}. {_REMAKE}"
        )
    return TokenFolder(folder, meta, tokens, documents)


def write_tokens(
    folder: Path,
    documents: Iterable[NDArray[np.integer]],
    *,
    vocab_size: int,
    end_of_document: int | None = None,
    tokenizer: str = BYTES,
    tokenizer_sha256: str | None = None,
) -> TokenMeta:
    """Write a folder, document by document; after a kill at any time it is complete, or `read_tokens` refuses it.

    Args:
        folder: the folder, created if it is missing. A finished folder is not overwritten.
        documents: integers [length] of each document, 0 .. vocab_size - 1, without an end token.
        end_of_document: token that is added after each document.

    Raises:
        DataError: the folder is finished already, or a token is outside the vocabulary; then nothing counts as written.
    """
    if (folder / META).exists():
        raise DataError(f"{folder} holds tokens already, and is not overwritten. Delete it, or name another.")
    if not 2 <= vocab_size <= 2**31 or not 0 <= (end_of_document or 0) < vocab_size:
        raise DataError(
            f"vocab_size={vocab_size} must be 2 to 2147483648, and end_of_document={end_of_document} must be less than "
            "it."
        )
    folder.mkdir(parents=True, exist_ok=True)
    digest, starts = hashlib.sha256(), [0]
    end = np.array([] if end_of_document is None else [end_of_document], dtype=stored_dtype(vocab_size))
    with (folder / TOKENS).open("wb") as file:
        for number, document in enumerate(documents):
            data = as_stored(document, vocab_size, f"document {number} of {folder}").tobytes() + end.tobytes()
            file.write(data)
            digest.update(data)
            starts.append(starts[-1] + len(data) // end.itemsize)
    return finish(
        folder,
        np.array(starts, dtype=np.uint64),
        TokenMeta(
            vocab_size=vocab_size, tokenizer=tokenizer, tokenizer_sha256=tokenizer_sha256,
            end_of_document=end_of_document, num_documents=len(starts) - 1, num_tokens=starts[-1],
            tokens_sha256=digest.hexdigest(),
        ),
    )  # fmt: skip


def finish(folder: Path, documents: NDArray[np.uint64], meta: TokenMeta) -> TokenMeta:
    """Finish a folder whose `tokens.bin` is written: flush everything to the disk, `meta.json` last."""
    np.save(folder / DOCUMENTS, documents, allow_pickle=False)
    for name in (TOKENS, DOCUMENTS):
        with (folder / name).open("rb+") as file:
            os.fsync(file.fileno())
    fsync_folder(folder)
    write_json(folder / META, meta.to_json())
    return meta


def as_stored(document: NDArray[np.integer], vocab_size: int, what: str) -> NDArray[np.unsignedinteger[Any]]:
    """Return tokens [length] in the file's dtype.

    Raises:
        DataError: a token is outside the vocabulary; the message names `what`.
    """
    tokens = np.asarray(document)
    if tokens.ndim != 1 or (tokens.size and tokens.dtype.kind not in "ui"):
        raise DataError(f"{what} must be whole numbers [length]; it is {tokens.dtype} {list(tokens.shape)}.")
    if tokens.size and (int(tokens.min()) < 0 or int(tokens.max()) >= vocab_size):
        wrong = int(tokens.min()) if int(tokens.min()) < 0 else int(tokens.max())
        raise DataError(f"{what} has the token {wrong}; the vocabulary has 0 to {vocab_size - 1}. Use its tokenizer.")
    return tokens.astype(stored_dtype(vocab_size))


def check_tokens(folder: Path) -> TokenFolder:
    """Read a whole folder, and check the checksum, the order of documents, and the range of the tokens.

    Raises:
        DataError: a check failed; the first failure is reported.
    """
    tokens = read_tokens(folder)
    digest = hashlib.sha256()
    for start in range(0, tokens.meta.num_tokens, _BLOCK):
        block = tokens.tokens[start : start + _BLOCK]
        digest.update(block.tobytes())
        if int(block.max()) >= tokens.meta.vocab_size:
            raise DataError(
                f"{folder / TOKENS} has the token {int(block.max())}, and a vocabulary of {tokens.meta.vocab_size}. "
                f"{_REMAKE}"
            )
    if digest.hexdigest() != tokens.meta.tokens_sha256:
        raise DataError(f"{folder / TOKENS} has changed since it was written (SHA-256). {_REMAKE}")
    if np.any(tokens.documents[1:] < tokens.documents[:-1]):
        raise DataError(f"{folder / DOCUMENTS} is damaged: a document ends before it starts. {_REMAKE}")
    return tokens


def stored_dtype(vocab_size: int) -> np.dtype[Any]:
    """Return the dtype of tokens in the file, which is the same on machines of both byte orders."""
    return np.dtype(dtype_of(vocab_size)).newbyteorder("<")
