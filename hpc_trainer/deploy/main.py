"""Process with torch that `export`, `eval` and `predict` ask (`worker/answer.py`)."""

from __future__ import annotations

import os

from hpc_trainer.deploy.evaluate_torch import evaluate_model, predict
from hpc_trainer.deploy.export_torch import export
from hpc_trainer.worker.answer import answer

if __name__ == "__main__":
    os.environ["TORCH_FORCE_WEIGHTS_ONLY_LOAD"] = "1"  # torch.export.load would unpickle what it cannot read otherwise
    answer({
        "export": lambda asked, _: export(asked),
        "eval": lambda asked, _: evaluate_model(asked),
        "predict": lambda asked, _: predict(asked),
    })  # fmt: skip
