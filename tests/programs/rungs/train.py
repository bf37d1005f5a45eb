"""Hydra app that does what work.py does."""

import json
import os
import signal
import sys
import time
from pathlib import Path

import hydra
from omegaconf import DictConfig

from hpc_trainer import log_metrics

stops = []
signal.signal(signal.SIGTERM, lambda *_: stops.append(1))


@hydra.main(version_base="1.3", config_path="conf", config_name="config")
def main(config: DictConfig) -> float:
    folder = Path(os.environ["HPC_TRAINER_CHECKPOINTS"])
    saved = folder / "step.json"
    start = json.loads(saved.read_text()) if saved.exists() else 0
    for step in range(start + 1, config.steps + 1):
        time.sleep(config.pause_s)
        loss = abs(config.optim.lr - 0.01) + config.model.bias + 1 / step
        with (folder / "computed.txt").open("a") as file:
            print(step, config.optim.lr, file=file)
        log_metrics(step, loss=loss)
        if stops:
            saved.write_text(json.dumps(step))
            sys.exit(75)
    return loss


if __name__ == "__main__":
    main()
