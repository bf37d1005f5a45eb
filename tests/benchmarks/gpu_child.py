"""What `tests.benchmarks.gpu` starts as processes of their own: the hand-written twin of a run, and what to divide by.

    python -m tests.benchmarks.gpu_child twin SWEEP_FOLDER RUN_ID LINES     trains as the run would; metrics into LINES
    python -m tests.benchmarks.gpu_child facts SWEEP_FOLDER RUN_ID          operations of a sample, the device's peak
    python -m tests.benchmarks.gpu_child product cuda|cpu SIZE              TFLOP/s of a square product in bf16

The last two print a line of JSON.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from hpc_trainer.config.schema.train import TrainConfig
from hpc_trainer.features.mfu.flops import flops_per_sample, peak_flops
from hpc_trainer.record.layout import SweepPaths
from hpc_trainer.record.spec import read_spec
from hpc_trainer.runtime.devices import kind_of
from hpc_trainer.training.build import build_dataset, build_model, build_task
from hpc_trainer.training.data.order import BatchOrder
from hpc_trainer.training.rng import seed_everything
from tests.benchmarks.by_hand import Batch, optimizer_by_hand, train_by_hand

_PRODUCTS, _REPEATS = 200, 7  # some 0.3 s on a GPU: clocks settle


def twin(config: TrainConfig, lines: Path) -> None:
    """The same model, weights, samples and settings as the run, in a loop that a person wrote for just this."""
    device = _device(config)
    torch.set_num_threads(config.hardware.cpus_per_rank)
    torch.backends.cudnn.benchmark = not config.train.deterministic
    seed_everything(config.seed)
    dataset = build_dataset(config, "train", build_task(config))
    model = build_model(config, dataset).to(device)
    if config.train.channels_last:
        model = model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    loss_of = _loss_of(model, config)
    order = BatchOrder(len(dataset), config.train.global_batch_size, config.seed)
    host = (dataset.__getitems__(order.global_indices(step)) for step in range(config.train.num_steps))  # type: ignore[arg-type]
    batches = _copied_ahead(host, device) if device.type == "cuda" else host
    with lines.open("w") as file:
        train_by_hand(config, loss_of, model, optimizer_by_hand(config, model), batches, device, file)


def _loss_of(model: nn.Module, config: TrainConfig) -> Callable[[torch.Tensor, torch.Tensor], torch.Tensor]:
    def plain(inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return functional.cross_entropy(model(inputs).flatten(0, -2), targets.flatten())

    compute: Any = torch.compile(plain, dynamic=False) if config.train.compile else plain
    if not config.train.channels_last:
        return compute  # type: ignore[no-any-return]
    return lambda inputs, targets: compute(inputs.contiguous(memory_format=torch.channels_last), targets)


def _copied_ahead(host: Iterator[Batch], device: torch.device) -> Iterator[Batch]:
    """From pinned memory on a stream of their own, while the step before is computed."""
    stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
    for batch in host:
        with torch.cuda.stream(stream):
            inputs, targets = (each.pin_memory().to(device, non_blocking=True) for each in batch)
        current = torch.cuda.current_stream(device)
        current.wait_stream(stream)
        inputs.record_stream(current)
        targets.record_stream(current)
        yield inputs, targets


def facts(config: TrainConfig) -> dict[str, Any]:
    """`flops`: of a sample, forward and backward. `peak`: FLOP/s by the datasheet; None: nobody knows the device."""
    task = build_task(config)
    dataset = build_dataset(config, "train", task)
    return {
        "flops": flops_per_sample(
            lambda: build_model(config, dataset), task, lambda size: dataset.__getitems__(range(size))
        ),
        "peak": peak_flops(config, _device(config)),
        "num_weights": sum(each.numel() for each in build_model(config, dataset).parameters()),
    }


def product(device_type: str, size: int) -> dict[str, Any]:
    """TFLOP/s of size x size x size on random data: zeros run faster than any training would."""
    device = torch.device(device_type)
    left, right = (torch.randn(size, size, device=device).bfloat16() for _ in range(2))
    calls = _PRODUCTS if device_type == "cuda" else 1
    seconds = [_seconds(lambda: left @ right, calls, device) for _ in range(_REPEATS + 1)][1:]
    tflops = 2 * size**3 * calls / statistics.median(seconds) / 1e12
    name = torch.cuda.get_device_name(device) if device_type == "cuda" else "CPU"
    cudnn = torch.backends.cudnn.version() if device_type == "cuda" else None  # type: ignore[no-untyped-call]
    return {"tflops": tflops, "device": name, "torch": torch.__version__, "cuda": torch.version.cuda, "cudnn": cudnn}


def _seconds(call: Callable[[], object], calls: int, device: torch.device) -> float:
    wait = kind_of(device).synchronize
    wait(device)
    begin = time.perf_counter()
    for _ in range(calls):
        call()
    wait(device)
    return time.perf_counter() - begin


def _device(config: TrainConfig) -> torch.device:
    return torch.device(config.hardware.device_type)


def main(words: list[str]) -> None:
    """Does what the words say, and nothing else."""
    match words:
        case ["twin", sweep, run_id, lines]:
            twin(read_spec(SweepPaths(Path(sweep)), run_id).typed(), Path(lines))
        case ["facts", sweep, run_id]:
            print(json.dumps(facts(read_spec(SweepPaths(Path(sweep)), run_id).typed())))
        case ["product", device_type, size]:
            if device_type == "cuda" and not torch.cuda.is_available():
                raise SystemExit("torch sees no GPU here. Use --small, or a node that has one.")
            print(json.dumps(product(device_type, int(size))))
        case _:
            raise SystemExit(__doc__)


if __name__ == "__main__":
    main(sys.argv[1:])
