"""`data=synthetic_images` and `data=synthetic_tokens`: samples that are generated, not read; their keys."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from hpc_trainer.config.schema.data import DataConfig
from hpc_trainer.config.schema.key import ALWAYS, APART, COUNTS, SAFE, key


@dataclass(kw_only=True, slots=True)
class SyntheticImagesConfig(DataConfig):
    """Images generated from (index, data_seed) alone: a class pattern under noise; for speed and shape tests."""

    is_text: ClassVar[bool | None] = False
    name: str = "synthetic_images"
    _target_: str = "hpc_trainer.datasets.synthetic_images.build"
    num_samples: int = key(10_000, ALWAYS, COUNTS, limits="≥ 1")
    """Training images."""
    num_eval: int = key(1_000, ALWAYS, COUNTS, limits="≥ 1")
    """Evaluation images."""
    image_size: int = key(32, ALWAYS, COUNTS, limits="8 to 224")
    """Height and width in pixels."""
    num_channels: int = key(3, ALWAYS, COUNTS, limits="1 or 3")
    """Colour channels."""
    num_classes: int = key(10, ALWAYS, COUNTS, limits="≥ 2")
    """Classes."""
    data_seed: int = key(0, ALWAYS, COUNTS, limits="0 to 9,223,372,036,854,775,807")
    """Seed of the class patterns and the noise, independent of the run's seed."""
    keep_in_memory: bool = key(False, ALWAYS, APART, SAFE)
    """Whether each rank (with num_workers, each loader process) keeps the images that it has made: 4 bytes for each
    value, so 1,000 images of 224 pixels take 0.6 GB. This is for runs that must not wait for images, such as
    benchmarks. The images are the same."""

    def num_train_samples(self) -> int:
        return self.num_samples


@dataclass(kw_only=True, slots=True)
class SyntheticTokensConfig(DataConfig):
    """Windows of random tokens made from (index, data_seed) alone; for speed and shape tests of language models."""

    is_text: ClassVar[bool | None] = True
    name: str = "synthetic_tokens"
    _target_: str = "hpc_trainer.datasets.synthetic_tokens.build"
    num_samples: int = key(10_000, ALWAYS, COUNTS, limits="≥ 1")
    """Training windows."""
    num_eval: int = key(100, ALWAYS, COUNTS, limits="≥ 1")
    """Evaluation windows."""
    seq_len: int = key(1024, ALWAYS, COUNTS, limits="≥ 2")
    """Tokens that a window predicts."""
    vocab_size: int = key(50_257, ALWAYS, COUNTS, limits="2 to 2,147,483,648")
    """Number of tokens in the vocabulary; GPT-2's has 50,257."""
    data_seed: int = key(0, ALWAYS, COUNTS, limits="0 to 9,223,372,036,854,775,807")
    """Seed of the tokens, independent of the run's seed."""

    def num_train_samples(self) -> int:
        return self.num_samples

    def vocabulary(self) -> int:
        return self.vocab_size

    def preprocessing(self, mean: Any = None, std: Any = None) -> dict[str, Any]:
        from hpc_trainer.training.data.preprocessing import tokens

        return tokens(seq_len=self.seq_len, vocab_size=self.vocab_size)
