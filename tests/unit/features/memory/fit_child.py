"""Program of test_search.py: searches under a limit of the operating system on memory."""

import resource
import sys
from pathlib import Path

import psutil
import torch

from tests.unit.training.train_here import config_of, train_here

# Some 220 MB are taken by 128 samples and 400 MB by 256: no size is near the limit.
ROOM = 300 * 2**20


def main(folder: Path) -> None:
    torch.set_num_threads(1)
    # 64 maps of 32 x 32 pixels and what follows: half a megabyte a sample and layer, so 512 take more than there is.
    words = (
        "model=cnn", "model.num_channels=64", "data=synthetic_images", "data.num_samples=512", "data.num_eval=8",
        "train.global_batch_size=512", "train.num_steps=1", "train.micro_batch_size=auto",
        "hardware.mem_gb_per_node=1000",
    )  # fmt: skip
    config = config_of(*words)
    torch._dynamo  # noqa: B018  what fake tensors import is not to be counted
    from hpc_trainer.features.memory.estimate import estimate

    estimate(config)
    most = psutil.Process().memory_info().vms + ROOM
    resource.setrlimit(resource.RLIMIT_AS, (most, most))
    train_here(config, folder / "run")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
