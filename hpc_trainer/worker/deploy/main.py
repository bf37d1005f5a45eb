"""Process with torch that `export`, `eval` and `predict` ask (`worker/answer.py`)."""

from __future__ import annotations

import os

from hpc_trainer.worker.answer import answer
from hpc_trainer.worker.deploy.ask_model import evaluate_model, predict
from hpc_trainer.worker.deploy.export import export

if __name__ == "__main__":
    os.environ["TORCH_FORCE_WEIGHTS_ONLY_LOAD"] = "1"  # torch.export.load would unpickle what it cannot read otherwise
    answer({
        "export": lambda asked, _: export(asked),
        "eval": lambda asked, _: evaluate_model(asked),
        "predict": lambda asked, _: predict(asked),
    })  # fmt: skip
