"""`data/` of files that a person has: tokens, arrays, tables, Hugging Face data sets; one dataclass each."""

from __future__ import annotations

from dataclasses import dataclass

from hpc_trainer.config.schema.data import DataConfig
from hpc_trainer.config.schema.key import ALWAYS, COUNTS, RULED, SAFE, key


@dataclass(kw_only=True, slots=True)
class TokensConfig(DataConfig):
    """Folders of tokens, memory-mapped; documents packed to windows without padding, several sources by weight."""

    name: str = "tokens"
    _target_: str = "hpc_trainer.datasets.tokens.build"
    path: str | None = key(None, ALWAYS, COUNTS, SAFE)
    """A prepared folder: with parts train/ and eval/, or one part alone; of several sources `sources` has them."""
    sources: dict[str, float] = key({}, ALWAYS, COUNTS, SAFE, limits="> 0")
    """Folders and how much of an epoch each makes up, as {/data/code: 3, /data/books: 1}; in place of `path`."""
    seq_len: int = key(128, ALWAYS, COUNTS, limits="≥ 2")
    """Tokens a sample predicts."""
    eval_fraction: float = key(0.1, RULED, COUNTS, limits="(0, 1)")
    """Share of a source without eval/, at its end, held out for evaluation."""
    mask_document_starts: bool = key(False, ALWAYS, COUNTS)
    """The first token of a document is no target: nothing before it tells it. Needs tokens with ends of documents."""
