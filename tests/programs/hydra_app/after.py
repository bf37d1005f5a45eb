"""A Hydra app with a folder of configurations: it saves into its output folder."""

import logging
import time
from pathlib import Path

import hydra
import torch
from omegaconf import DictConfig

from hpc_trainer import log_metrics

log = logging.getLogger(__name__)


@hydra.main(version_base=None, config_path="conf", config_name="config")
def main(config: DictConfig) -> float:
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=config.lr)
    last, done = Path(config.out, "model.pt"), 0
    if last.exists():
        saved = torch.load(last, weights_only=True)
        done = saved["step"]
        model.load_state_dict(saved["model"])
    for step in range(done + 1, config.steps + 1):
        inputs = torch.randn(8, 4, generator=torch.Generator().manual_seed(step))
        loss = (model(inputs) - inputs.sum(1, keepdim=True)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        time.sleep(0.02)
        log_metrics(step, loss=loss, num_steps=config.steps)
        if step % 10 == 0:
            log.info("step %d: loss %.4f", step, loss)
            torch.save({"step": step, "model": model.state_dict()}, last.with_suffix(".new"))
            last.with_suffix(".new").rename(last)
    return loss.item()


if __name__ == "__main__":
    main()
