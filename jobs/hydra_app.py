"""An app of Hydra's own style, which knows nothing of hpc_trainer: a grid of it by --app, and by Hydra's own multirun.

Command:  jobs/hydra_app.sh [KEY=VALUE]...     docs/hydra_apps.md explains it
Cost:     some seconds a run on one CPU core; no GPU, no Slurm. Expected: 4 COMPLETED, return_value below 0.1 for all.
"""

import json
import logging
import time
from pathlib import Path

import hydra
import numpy as np
from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig

log = logging.getLogger(__name__)


@hydra.main(version_base="1.3", config_path="hydra_app_conf", config_name="config")
def main(config: DictConfig) -> float:
    saved = Path(HydraConfig.get().runtime.output_dir, "state.json")  # the same folder in each attempt
    start, weights = json.loads(saved.read_text()) if saved.exists() else (0, [0.0] * config.model.degree)
    log.info("%s begins after step %d", config.model.name, start)
    for step in range(start + 1, config.steps + 1):
        x = np.random.default_rng(step).uniform(-1, 1, size=64)
        inputs = np.stack([x**power for power in range(1, config.model.degree + 1)], axis=1)
        miss = inputs @ np.array(weights) - np.sin(x)
        weights = list(np.array(weights) - config.lr * inputs.T @ miss / 64)
        time.sleep(config.pause_s)  # a real app has more to do
        saved.with_suffix(".new").write_text(json.dumps([step, weights]))
        saved.with_suffix(".new").replace(saved)
    return float(np.square(miss).mean())


if __name__ == "__main__":
    main()
