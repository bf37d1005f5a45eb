"""Pictures a second of both sources beside torch's own DataLoader over a hand-written ImageFolder, and webdataset.

All read the same jpgs (real photographs, cut to the size of ImageNet's), make the same float32 batches of 224 pixels,
and have the same number of loader processes; in turn, round by round, in one process. The files are in the page
cache: it is decoding and hand-over that is compared, not the disk.

The rivals transform as torchvision's recipe does (decode all of it, Resize(256), CenterCrop(224), to float, normalise),
written out with Pillow and torch: torchvision need not be installed. A second pair of rivals decodes as ours do (jpegs
at a part of their size, one pass for resizing and cutting): what then remains is the way around the decoder.
"""

from __future__ import annotations

import gc
import importlib.util
import io
import itertools
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from pathlib import Path

import numpy as np
import psutil
import torch
from PIL import Image
from torch.utils.data import DataLoader, Dataset

from hpc_trainer.data.images import ImageFolderConfig, ImagesConfig, ImageShardsConfig
from hpc_trainer.data.images.dataset import build
from hpc_trainer.data.images.folder import FolderSource
from hpc_trainer.data.images.index import ABOUT, ROW, ROWS, VERSION, build_index
from hpc_trainer.data.images.pictures import read_picture
from hpc_trainer.training.data.loader import train_batches
from hpc_trainer.training.data.order import BatchOrder
from tests.unit.data.images.making import make_shards
from tests.unit.data.images.real_pictures import ALL, photograph

ROUNDS = 5
NUM_PICTURES, BATCH, NUM_CLASSES = 320, 32, 8
SHORT, SIZE = 256, 224
WORKERS = (0, 2)
Batch = tuple[torch.Tensor, torch.Tensor]
_MEAN, _STD = [0.485, 0.456, 0.406], [0.229, 0.224, 0.225]
_MANY = 10**7
_SIZES = {"raw": (500, 375), "prepared": (341, 256)}
"""As most of ImageNet is, and with the shorter side that `data prepare` leaves."""
_PARTS = (*_SIZES, "index", "listing")


def write_pictures(root: Path, width: int, height: int) -> None:
    """`NUM_PICTURES` parts of the photographs as jpgs: in folders of classes, and the same in tars with an index."""
    random = np.random.default_rng(0)
    photographs = [photograph(name) for name in ALL]
    packed = []
    for number in range(NUM_PICTURES):
        whole = Image.fromarray(photographs[number % len(photographs)])
        side = random.uniform(0.6, 1.0)
        box_width = side * min(whole.width, whole.height * width / height)
        box_height = box_width * height / width
        left, top = random.uniform(0, whole.width - box_width), random.uniform(0, whole.height - box_height)
        part = whole.resize(
            (width, height), Image.Resampling.BICUBIC, box=(left, top, left + box_width, top + box_height)
        )
        file = io.BytesIO()
        part.save(file, "JPEG", quality=90)
        name, label = f"{number:06}.jpg", number % NUM_CLASSES
        folder = root / "folder/train" / f"class-{label}"
        folder.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(file.getvalue())
        packed.append((name, file.getvalue(), label))
    build_index(make_shards(root / "shards/train", packed, per_shard=NUM_PICTURES // 8))
    for kind in ("folder", "shards"):  # what is held out is not read here
        (root / kind / "eval").symlink_to(root / kind / "train")


def as_torchvision_does(data: bytes) -> torch.Tensor:
    """Its recipe for evaluation, step by step."""
    image = Image.open(io.BytesIO(data)).convert("RGB")
    scale = SHORT / min(image.size)
    image = image.resize((int(image.width * scale), int(image.height * scale)), Image.Resampling.BILINEAR)
    left, top = round((image.width - SIZE) / 2), round((image.height - SIZE) / 2)
    image = image.crop((left, top, left + SIZE, top + SIZE))
    pixels = torch.from_numpy(np.array(image)).permute(2, 0, 1).contiguous().float().div(255)
    return pixels.sub_(torch.tensor(_MEAN)[:, None, None]).div_(torch.tensor(_STD)[:, None, None])


def as_ours_do(data: bytes) -> torch.Tensor:
    """The decoder of both sources, one picture at a time."""
    array = read_picture(data, "", num_channels=3, short_side=SHORT, size=SIZE)
    pixels = torch.from_numpy(array).permute(2, 0, 1).contiguous().float().div_(255)
    return pixels.sub_(torch.tensor(_MEAN)[:, None, None]).div_(torch.tensor(_STD)[:, None, None])


class ImageFolder(Dataset[tuple[torch.Tensor, int]]):
    """What torchvision's does: a list of (path, class), a file at a time."""

    def __init__(self, root: Path, transform: Callable[[bytes], torch.Tensor]) -> None:
        names = sorted(path.name for path in root.iterdir())
        self.samples = [(path, label) for label, name in enumerate(names) for path in sorted((root / name).iterdir())]
        self.transform = transform

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        path, label = self.samples[index]
        return self.transform(path.read_bytes()), label


def _ours(root: Path, num_workers: int, kind: type[ImagesConfig]) -> Iterator[Batch]:
    config = kind(path=str(root), image_size=SIZE, resize=SHORT, mean=_MEAN, std=_STD)
    order = BatchOrder(NUM_PICTURES, BATCH, 0)
    dataset = build(config, "train")
    with train_batches(
        dataset, order, first_step=0, num_steps=order.steps_per_epoch, rank=0, world_size=1, micro_batch_size=BATCH,
        grad_accum_steps=1, num_workers=num_workers,
    ) as batches:  # fmt: skip
        yield from batches


def _data_loader(root: Path, num_workers: int, transform: Callable[[bytes], torch.Tensor]) -> Iterator[Batch]:
    generator = torch.Generator().manual_seed(0)
    loader = DataLoader(
        ImageFolder(root / "train", transform), batch_size=BATCH, shuffle=True, num_workers=num_workers,
        generator=generator, multiprocessing_context="fork" if num_workers else None,
    )  # fmt: skip
    yield from loader


def _webdataset(root: Path, num_workers: int, transform: Callable[[bytes], torch.Tensor]) -> Iterator[Batch]:
    import webdataset  # type: ignore[import-not-found, unused-ignore]

    dataset = webdataset.WebDataset(
        sorted(map(str, (root / "train").glob("*.tar"))), shardshuffle=8, seed=0, empty_check=False
    )
    dataset = dataset.shuffle(200).to_tuple("jpg", "cls").map_tuple(transform, int).batched(BATCH)
    loader = webdataset.WebLoader(
        dataset, batch_size=None, num_workers=num_workers,
        multiprocessing_context="fork" if num_workers else None,
    )  # fmt: skip
    yield from loader


def _memory_mb() -> float:
    """Of this process and its loader processes; what several share counts once."""
    processes = [psutil.Process(), *psutil.Process().children(recursive=True)]
    return sum(each.memory_full_info().pss for each in processes) / 1e6


def measure(batches: Iterator[Batch]) -> tuple[float, float, float]:
    """(pictures a second, pictures a second of processor time, MB), from the first batch on: that starts processes."""
    with closing(batches) as given:
        first = seen = len(next(given)[1])
        memory = _memory_mb()
        begin, processor, found = time.perf_counter(), _processor_s(), (0.0, 0.0, 0.0)
        for inputs, targets in given:
            assert inputs.shape[1:] == (3, SIZE, SIZE)
            seen += len(targets)
            if seen == NUM_PICTURES:  # loader processes are gone a moment later
                seconds, used = time.perf_counter() - begin, _processor_s() - processor
                found = ((seen - first) / seconds, (seen - first) / used, memory)
    assert seen == NUM_PICTURES
    return found


def _processor_s() -> float:
    """Of this process and its loader processes."""
    times = [each.cpu_times() for each in [psutil.Process(), *psutil.Process().children(recursive=True)]]
    return sum(float(each.user + each.system) for each in times)


def rivals(root: Path) -> dict[str, Callable[[int], Iterator[Batch]]]:
    """Each starts an epoch with so many loader processes."""
    found: dict[str, Callable[[int], Iterator[Batch]]] = {
        "image_folder": lambda workers: _ours(root / "folder", workers, ImageFolderConfig),
        "image_shards": lambda workers: _ours(root / "shards", workers, ImageShardsConfig),
        "DataLoader, ImageFolder": lambda workers: _data_loader(root / "folder", workers, as_torchvision_does),
        "the same, our decoder": lambda workers: _data_loader(root / "folder", workers, as_ours_do),
    }
    if importlib.util.find_spec("webdataset") is None:
        print("webdataset is not installed here; `make bench` has it")
    else:
        found["webdataset"] = lambda workers: _webdataset(root / "shards", workers, as_torchvision_does)
        found["webdataset, our decoder"] = lambda workers: _webdataset(root / "shards", workers, as_ours_do)
    return found


def _report(root: Path, what: str) -> None:
    for workers in WORKERS:
        figures: dict[str, list[tuple[float, float, float]]] = {name: [] for name in rivals(root)}
        for number in range(ROUNDS + 1):
            for name, start in rivals(root).items():
                gc.collect()
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore")
                    found = measure(start(workers))
                if number:  # the first round warms up
                    figures[name].append(found)
        print(f"\n{what}, {workers} loader processes, batches of {BATCH}, n={ROUNDS} rounds; medians (range)")
        for name, mine in figures.items():
            wall, processor, memory = ([each[column] for each in mine] for column in range(3))
            print(
                f"{name:24} {statistics.median(wall):6.0f} pictures/s ({min(wall):.0f}-{max(wall):.0f}), by processor "
                f"time {statistics.median(processor):6.0f} ({min(processor):.0f}-{max(processor):.0f}), "
                f"{statistics.median(memory):5.0f} MB"
            )
        for ours, (name, base) in itertools.product(("image_folder", "image_shards"), figures.items()):
            if name not in ("image_folder", "image_shards"):
                by_clock, by_processor = (_ratio(figures[ours], base, column) for column in range(2))
                print(f"{ours} / {name:24} {by_clock}, by processor time {by_processor}")


def _ratio(mine: list[tuple[float, float, float]], base: list[tuple[float, float, float]], column: int) -> str:
    """Of the same round."""
    found = [own[column] / other[column] for own, other in zip(mine, base, strict=True)]
    return f"{statistics.median(found):.2f} x ({min(found):.2f}-{max(found):.2f})"


_START = r"""
import json, re, sys, time
import numpy as np
from pathlib import Path
from hpc_trainer.data.images import ImageShardsConfig
from hpc_trainer.data.images import shards
fraction = json.loads(sys.argv[2])
def mib():
    found = re.findall(r"Rss(?:Anon|File):\s+(\d+)", open("/proc/self/status").read())
    return [int(each) / 1024 for each in found]
before, begin, processor = mib(), time.perf_counter(), time.process_time()
source = shards.ShardSource(ImageShardsConfig(path=sys.argv[1], eval_fraction=fraction), "train")
gone = list(source.missing())
seconds, used, after = time.perf_counter() - begin, time.process_time() - processor, mib()
assert not gone and len(source) > 8_900_000, (gone[:1], len(source))
labels = source.labels(np.random.default_rng(0).integers(0, len(source), 100_000))
print(json.dumps([seconds, used, after[0] - before[0], after[1] - before[1], mib()[1] - before[1]]))
"""


def _large_index(root: Path) -> None:
    """An index of 10 million samples in 10,000 shards, files of the right size without content."""
    num_shards = 10_000
    rows = np.zeros(_MANY, dtype=ROW)
    rows["shard"] = np.repeat(np.arange(num_shards), _MANY // num_shards)
    rows["offset"] = np.tile(np.arange(_MANY // num_shards) * 120_000 + 512, num_shards)
    rows["label"] = np.arange(_MANY) % 1000
    size = 120_000 * (_MANY // num_shards)
    shards = [
        {"name": f"shard-{number:06}.tar", "size": size, "sha256": "0" * 64, "num_samples": _MANY // num_shards}
        for number in range(num_shards)
    ]
    for split in ("train", "eval"):
        (root / split).mkdir(parents=True)
    for shard in shards:
        with (root / "train" / shard["name"]).open("wb") as file:
            file.truncate(size)  # no room is taken
    np.save(root / "train" / ROWS, rows)
    about = {"version": VERSION, "num_samples": _MANY, "num_classes": 1000, "rows_sha256": "", "shards": shards}
    (root / "train" / ABOUT).write_text(json.dumps(about))


def _report_index(root: Path) -> None:
    _large_index(root)
    print(f"\nindex of {_MANY:,} samples in 10,000 shards (budget: start 2 s, 200 MiB), n=5, each in a new process")
    for fraction, what in ((None, "folders train and eval"), (0.1, "split by hash")):
        path = root if fraction is None else root / "train"
        found = []
        for _ in range(5):
            done = subprocess.run(
                [sys.executable, "-c", _START, path, json.dumps(fraction)], capture_output=True, text=True, check=True
            )
            found.append(json.loads(done.stdout))
        seconds, used, own, mapped, later = ([each[column] for each in found] for column in range(5))
        print(
            f"{what:24} {statistics.median(seconds):.2f} s ({min(seconds):.2f}-{max(seconds):.2f}), of the processor "
            f"{statistics.median(used):.2f} s; {statistics.median(own):.0f} MiB of its own, "
            f"{statistics.median(mapped):.0f} MiB of the mapped file, {statistics.median(later):.0f} MiB after 100,000 "
            "random labels"
        )


def _report_listing(root: Path) -> None:
    for split, count in (("train", 100_000), ("eval", 10)):
        for number in range(count):
            folder = root / split / f"class-{number % 10}"
            if number < 10:
                folder.mkdir(parents=True)
            os.close(os.open(folder / f"{number:06}.jpg", os.O_CREAT | os.O_WRONLY))
    listings, digests = [], []
    for _ in range(5):
        begin = time.perf_counter()
        source = FolderSource(ImageFolderConfig(path=str(root)), "train")
        middle = time.perf_counter()
        source.digest()
        listings.append(middle - begin)
        digests.append(time.perf_counter() - middle)
    print(
        f"\nfolder of 100,000 files on a local disk, n=5: listed in {statistics.median(listings):.2f} s "
        f"({min(listings):.2f}-{max(listings):.2f}), fingerprint {statistics.median(digests):.2f} s "
        f"({min(digests):.2f}-{max(digests):.2f})"
    )


def run(parts: Sequence[str] = _PARTS) -> None:
    """Prints a table for each part."""
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as name:
        for part in parts:
            root = Path(name) / part
            if part in _SIZES:
                width, height = _SIZES[part]
                write_pictures(root, width, height)
                _report(root, f"jpgs of {width} x {height}")
            elif part == "index":
                _report_index(root)
            else:
                _report_listing(root)


if __name__ == "__main__":
    run(sys.argv[1:] or _PARTS)
