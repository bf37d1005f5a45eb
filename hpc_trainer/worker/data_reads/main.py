"""Process with torch that `data check` and `data bench` ask (`worker/answer.py`)."""

from __future__ import annotations

from hpc_trainer.config.load import from_plain
from hpc_trainer.worker.answer import answer
from hpc_trainer.worker.data_reads.bench import bench
from hpc_trainer.worker.data_reads.check import check

if __name__ == "__main__":
    answer({
        "check": lambda asked, tell: check(from_plain(asked.pop("config")), tell=tell, **asked),
        "bench": lambda asked, tell: bench(from_plain(asked.pop("config")), tell=tell, **asked),
    })  # fmt: skip
