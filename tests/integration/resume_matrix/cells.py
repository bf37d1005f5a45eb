"""The axes of the resume matrix, and a table of cells.

It has every triple of number format, number of ranks and point of interruption, and every pair of values of any two
axes.
"""

from __future__ import annotations

import collections
import itertools
from collections.abc import Iterator, Mapping, Sequence

Cell = Mapping[str, str]
NUM_STEPS, STEPS_PER_EPOCH = 18, 6
"""Three epochs: of 197 images, or windows of text, 6 batches of 32 are used in each."""
EVAL_EVERY_STEPS = 7
"""No point is right after one: a stop that is asked for before an evaluation ends it, and the run stops there."""
POINTS = {"mid_epoch": 9, "epoch_edge": 12, "last_step": NUM_STEPS - 1}
# A value that stands first is taken where nothing else decides: the cheap one.
AXES: dict[str, tuple[str, ...]] = {
    "precision": ("fp32", "bf16", "fp16"),
    "ranks": ("1", "2", "4"),
    "point": tuple(POINTS),
    "model": ("mlp", "cnn", "resnet18"),
    "workers": ("0", "2"),
    "accum": ("4", "1"),
    "clip": ("1.0", "null"),
    "schedule": ("cosine", "constant"),
    "optim": ("adamw", "sgd"),
    "compile": ("false", "true"),
    "ema": ("0.9", "null"),
}
_DEAR = "compile"  # some minutes a cell
_ROLLBACK = (
    "train.guard.on_spike=rollback",
    "train.guard.spike_factor=1.6",
    "train.guard.spike_window=8",
    "train.guard.max_rollbacks=9",
    "monitor.log_every_steps=7",
)
# Ways of a step that are no axis, in a cell each: (values of the axes besides the first ones, more overrides).
MORE: dict[str, tuple[Cell, tuple[str, ...]]] = {
    "images": (
        {"ranks": "2", "model": "resnet18"},
        ("model.width=8", "train.recompute=selective", "train.channels_last=true", "train.label_smoothing=0.1"),
    ),
    "fsdp": (
        {"precision": "bf16", "ranks": "2", "point": "epoch_edge", "model": "resnet18", "accum": "1"},
        ("parallel=fsdp", "train.recompute=full"),
    ),
    "custom_task": (
        {"precision": "fp16", "ranks": "2", "model": "cnn"},
        ("task=custom", "task._target_=hpc_trainer.tasks.cross_entropy.CrossEntropy"),
    ),
    "auto": (
        {"ranks": "2", "model": "resnet18", "workers": "2"},
        (
            "train.micro_batch_size=auto",
            "train.grad_accum_steps=null",
            "optim.lr_scaling=sqrt",
            "optim.lr_base_batch=8",
        ),
    ),
    "muon": (
        {"ranks": "2", "ema": "null"},
        ("optim=muon", "optim.adamw_lr=0.003", "parallel=ddp"),
    ),
    "muon_fsdp": (
        {"precision": "bf16", "ranks": "2", "model": "gpt", "ema": "null"},
        ("parallel=fsdp", "optim=muon", "optim.adamw_lr=0.003", "model.num_layers=2"),
    ),
    "muon_zero1": (
        {"ranks": "2", "point": "epoch_edge", "model": "gpt", "ema": "null"},
        ("parallel.zero1=true", "optim=muon", "optim.adamw_lr=0.003"),
    ),
    "muon_fsdp_tp": (
        {"precision": "fp16", "ranks": "4", "point": "last_step", "model": "gpt", "ema": "null", "accum": "1"},
        ("parallel=fsdp_tp", "optim=muon", "optim.adamw_lr=0.003"),
    ),
    "lion_fsdp": (
        {"precision": "bf16", "ranks": "2", "model": "gpt"},
        ("parallel=fsdp", "optim=lion", "optim.lr=0.001", "model.num_layers=2"),
    ),
    "lion_zero1": (
        {"precision": "fp16", "ranks": "2", "point": "epoch_edge", "model": "cnn"},
        ("parallel.zero1=true", "optim=lion", "optim.lr=0.001", "optim.offload=true"),
    ),
    "bf16_sr": (
        {"precision": "bf16_sr", "ranks": "2", "model": "cnn", "ema": "null"},
        ("parallel.zero1=true",),
    ),
    "bf16_sr_fsdp": (
        {"precision": "bf16_sr", "ranks": "2", "point": "epoch_edge", "model": "gpt", "ema": "null", "optim": "sgd"},
        ("parallel=fsdp", "model.num_layers=2"),
    ),
    "chunked": (
        {"precision": "bf16", "ranks": "2", "ema": "null", "model": "gpt", "accum": "1"},
        ("train.loss_chunk_size=96", "train.label_smoothing=0.1"),
    ),
    "spikes_skipped": (
        {"precision": "fp16", "ranks": "2", "accum": "1"},
        ("train.guard.on_spike=skip", "train.guard.spike_factor=1.1", "train.guard.spike_window=4"),
    ),
    "rollback": ({"ranks": "2", "accum": "1"}, _ROLLBACK),
    "rollback_fsdp": ({"ranks": "2", "accum": "1"}, ("parallel=fsdp", *_ROLLBACK)),
    # Interrupted before, in and after the window of a profile: nobody learns anything else for being watched.
    "profiled": (
        {"ranks": "2", "model": "cnn"},
        ("monitor.profile_warmup_steps=2", "monitor.profile_steps=4"),
    ),
    "blocks": (
        {"precision": "bf16", "ranks": "2", "model": "resnet18", "compile": "true"},
        ("train.compile_scope=blocks", "parallel=fsdp", "train.recompute=full"),
    ),
    "budget": (
        {"precision": "bf16", "model": "gpt", "compile": "true", "accum": "1"},
        ("train.recompute=budget", "train.recompute_budget=0.3", "model.dropout=0"),
    ),
    "zero1": (
        {"ranks": "4", "point": "last_step", "ema": "null", "clip": "null"},
        ("parallel.zero1=true", "optim=custom", "optim._target_=torch.optim.RAdam"),
    ),
    "tp": ({"ranks": "2", "model": "gpt", "accum": "1"}, ("parallel=tp", "train.recompute=full")),
    "tp_compiled": (
        {"ranks": "2", "model": "gpt", "accum": "1", "compile": "true"},
        ("parallel=tp", "train.compile_scope=blocks", "train.recompute=full", "model.num_layers=2"),
    ),
    "fsdp_tp": (
        {"precision": "fp16", "ranks": "4", "point": "last_step", "model": "gpt", "accum": "1"},
        ("parallel=fsdp_tp",),
    ),
    "hsdp": (
        {"precision": "bf16", "ranks": "4", "point": "epoch_edge", "model": "resnet18", "optim": "sgd"},
        ("parallel=hsdp",),
    ),
    "fsdp_bf16": (
        {"precision": "bf16", "ranks": "2", "model": "gpt"},
        (
            "parallel=fsdp",
            "parallel.param_dtype=bf16",
            "parallel.reduce_dtype=bf16",
            "parallel.reshard_after_forward=false",
            "train.recompute=full",
            "model.num_layers=2",
        ),
    ),
    "fp16_hook": ({"precision": "fp16", "ranks": "2", "optim": "sgd"}, ("parallel.comm_hook=fp16",)),
    "powersgd": (
        {"precision": "bf16", "ranks": "2", "model": "cnn"},
        ("parallel.comm_hook=powersgd", "parallel.powersgd_start_step=3", "parallel.bucket_cap_mb=0.01"),
    ),
    # Rounds end at 5, 10, 15 and 18: an interruption at 9 or 12 is inside of one.
    "diloco": (
        {"ranks": "2", "model": "resnet18", "ema": "null"},
        ("parallel=diloco", "parallel.sync_every_steps=5", "train.eval_every_steps=15"),
    ),
    "post_local_sgd": (
        {"precision": "fp16", "ranks": "2", "point": "epoch_edge", "optim": "sgd", "ema": "null"},
        (
            "parallel=post_local_sgd",
            "parallel.sync_every_steps=5",
            "parallel.sync_warmup_steps=5",
            "train.eval_every_steps=0",
        ),
    ),
    "frozen": (
        {"precision": "bf16", "ranks": "2", "model": "resnet18"},
        ("parallel=fsdp", "train.freeze=[stem*]", "+optim.lr_of={classifier.*:10}"),
    ),
    # Zeros are chosen at 5, 10, .. 14: an interruption at 9 or 12 is between two choices.
    "prune": (
        {"precision": "fp16", "ranks": "2", "model": "cnn"},
        (
            "prune.method=unstructured",
            "prune.scope=global",
            "prune.sparsity=0.8",
            "prune.end_step=14",
            "prune.every_steps=5",
        ),
    ),
    "prune_fsdp": (
        {"precision": "bf16", "ranks": "2", "point": "epoch_edge", "model": "resnet18"},
        ("parallel=fsdp", "prune.method=channels", "prune.end_step=14", "prune.every_steps=5"),
    ),
    "prune_rollback": (
        {"ranks": "2", "accum": "1"},
        (*_ROLLBACK, "prune.method=n_m", "prune.end_step=14", "prune.every_steps=5"),
    ),
    "qat": ({"precision": "bf16", "ranks": "2"}, ("qat.to=dynamic_int8", "qat.start_step=7")),
    "augmented": (
        {"precision": "bf16", "ranks": "2", "model": "resnet18", "workers": "2"},
        ("augment=flip_crop", "augment.mixup_alpha=0.2", "augment.label_noise=0.1", "train.label_smoothing=0.1"),
    ),
    "augmented_on_device": (
        {"precision": "fp16", "ranks": "4", "point": "epoch_edge", "model": "cnn"},
        ("augment=randaugment", "augment.run_on=device", "augment.cutmix_alpha=1", "train.channels_last=true"),
    ),
    # An epoch has 197 new images and 84 places for old ones, of two data sets.
    "replayed": (
        {"precision": "bf16", "ranks": "2", "model": "resnet18", "workers": "2"},
        (
            "replay.share=0.3",
            "replay.data=[{name: synthetic_images, num_samples: 50, num_eval: 21, image_size: 8, num_channels: 1, "
            "data_seed: 5}, {name: synthetic_images, num_samples: 20, num_eval: 9, image_size: 8, num_channels: 1, "
            "data_seed: 6}]",
            "augment.mixup_alpha=0.2",
            "augment.mix_share=0.5",
        ),
    ),
    "offload": ({"ranks": "2", "model": "cnn"}, ("optim.offload=true",)),
    "offload_fsdp": (
        {"precision": "bf16", "ranks": "2", "model": "resnet18"},
        ("parallel=fsdp", "optim.offload=true"),
    ),
    "offload_zero1": (
        {"precision": "fp16", "ranks": "2", "point": "epoch_edge", "model": "cnn"},
        ("parallel.zero1=true", "optim.offload=true"),
    ),
    "offload_tp": (
        {"ranks": "2", "model": "gpt", "accum": "1", "optim": "sgd"},
        ("parallel=tp", "optim.offload=true"),
    ),
    "offload_pp": (
        {"precision": "fp16", "ranks": "2", "point": "last_step", "model": "gpt"},
        ("parallel=pp", "model.num_layers=2", "optim.offload=true"),
    ),
    "in_backward": (
        {"precision": "bf16", "model": "cnn", "accum": "1", "clip": "null"},
        ("optim.in_backward=true", "train.max_skipped_steps=null"),
    ),
    "in_backward_fsdp": (
        {"ranks": "2", "model": "resnet18", "accum": "1", "clip": "null", "ema": "null"},
        ("parallel=fsdp", "optim.in_backward=true", "train.max_skipped_steps=null"),
    ),
    "pp": (
        {"ranks": "2", "model": "resnet18", "optim": "sgd"},
        ("parallel=pp", "model.width=8", "train.channels_last=true", "train.recompute=selective"),
    ),
    "pp_ddp": (
        {"precision": "fp16", "ranks": "4", "point": "last_step", "model": "gpt", "workers": "2"},
        ("parallel=pp", "parallel.pipeline_schedule=gpipe", "train.recompute=full", "model.num_layers=2"),
    ),
    "pp_muon": (
        {"precision": "bf16", "ranks": "2", "model": "gpt", "ema": "null"},
        ("parallel=pp", "model.num_layers=2", "optim=muon", "optim.adamw_lr=0.003"),
    ),
    "pp_compiled": (
        {"precision": "bf16", "ranks": "2", "point": "last_step", "model": "gpt", "compile": "true"},
        ("parallel=pp", "train.compile_scope=blocks", "train.recompute=full", "model.num_layers=4"),
    ),
    "pp_tp": (
        {"precision": "fp16", "ranks": "4", "model": "gpt"},
        ("parallel=pp", "parallel.tensor_parallel=2", "model.num_layers=2", "train.grad_accum_steps=2"),
    ),
    "fsdp_pp_tp": (
        {"precision": "bf16", "ranks": "8", "point": "last_step", "model": "gpt"},
        ("parallel=fsdp", "parallel.pipeline_parallel=2", "parallel.tensor_parallel=2", "model.num_layers=2"),
    ),
    "fsdp_pp": (
        {"precision": "bf16", "ranks": "4", "point": "epoch_edge", "model": "gpt"},
        ("parallel=fsdp", "parallel.pipeline_parallel=2", "model.num_layers=2"),
    ),
}


def pairs(cell: Cell) -> set[tuple[str, str, str, str]]:
    """Every pair of values of the cell, each with its axis."""
    return {(a, cell[a], b, cell[b]) for a, b in itertools.combinations(cell, 2)}


def all_pairs(axes: Mapping[str, Sequence[str]]) -> set[tuple[str, str, str, str]]:
    """Every pair that there is."""
    return {
        (a, one, b, other)
        for a, b in itertools.combinations(axes, 2)
        for one, other in itertools.product(axes[a], axes[b])
    }


def covering(axes: Mapping[str, Sequence[str]], *, num_whole: int = 0) -> list[dict[str, str]]:
    """Cells that hold all pairs, and the whole product of the first `num_whole` axes.

    Greedy: each takes what it must, a point of that product or else the first pair that is missing, then what covers
    the most, and of equals what was used least; but of what is dear (`_DEAR`) no more than must be.
    """
    missing, cells, used = all_pairs(axes), [], collections.Counter[tuple[str, str]]()
    whole = list(axes)[:num_whole]
    points = list(itertools.product(*(axes[axis] for axis in whole))) if num_whole else []
    while missing or points:
        if points:
            cell = dict(zip(whole, points.pop(0), strict=True))
        else:
            a, one, b, other = min(missing)
            cell = {a: one, b: other}
        for axis in sorted(axes.keys() - cell.keys()):
            gains = {value: len(_new_pairs(cell, axis, value, axes) & missing) for value in axes[axis]}
            uses = {value: 0 if axis == _DEAR else used[axis, value] for value in axes[axis]}
            cell[axis] = max(gains, key=lambda value: (gains[value], -uses[value]))  # the first of equals
        used.update(cell.items())
        ordered = {axis: cell[axis] for axis in axes}
        missing -= pairs(ordered)
        cells.append(ordered)
    return cells


def _new_pairs(cell: Cell, axis: str, value: str, axes: Mapping[str, Sequence[str]]) -> set[tuple[str, str, str, str]]:
    """Of one more value with those that the cell has; in the order of the axes, as `all_pairs` has them."""
    place = list(axes).index
    return {
        (axis, value, other, cell[other]) if place(axis) < place(other) else (other, cell[other], axis, value)
        for other in cell
    }


def name_of(cell: Cell) -> str:
    """`fp16-x4-epoch_edge-cnn-w2-a4-clip-cosine-sgd-compiled-ema`."""
    words = [cell["precision"], f"x{cell['ranks']}", cell["point"], cell["model"], f"w{cell['workers']}"]
    words += [f"a{cell['accum']}", "clip" if cell["clip"] != "null" else "noclip", cell["schedule"], cell["optim"]]
    words += ["compiled"] * (cell["compile"] == "true") + ["ema"] * (cell["ema"] != "null")
    words += [each for each in [cell.get("more")] if each]
    return "-".join(words)


def overrides(cell: Cell) -> Iterator[str]:
    """The cell as a command line."""
    yield from ("experiment=digits", "cluster=local", "hardware=cpu_x1", "seed=11")
    if cell["model"] == "gpt":
        yield from ("data=text_bytes", "data.seq_len=16", "data.path=tests/text.txt", "model.num_layers=1")
        yield from ("model.embed_dim=32",)
    else:
        yield from ("data=synthetic_images", "data.num_samples=197", "data.num_eval=41", "data.image_size=8")
        yield from ("data.num_channels=1",)
    yield from (
        f"train.num_steps={NUM_STEPS}",
        "train.global_batch_size=32",
        f"train.eval_every_steps={EVAL_EVERY_STEPS}",
    )
    yield from ("schedule=" + cell["schedule"], "schedule.warmup_steps=3", "monitor.log_every_steps=1")
    yield from ("checkpoint.every_steps=5", "checkpoint.keep_last=2", "precision=" + cell["precision"])
    # Overflows in the first steps, and again and again: the scale doubles after two good steps.
    yield from ("precision.init_scale=16777216", "precision.growth_interval=2") if cell["precision"] == "fp16" else ()
    yield from (f"hardware.tasks_per_node={cell['ranks']}", f"model={cell['model']}", f"optim={cell['optim']}")
    if cell["model"] == "resnet18":
        yield "model.width=8" if cell["compile"] == "true" else "model.width=4"  # 4 in NHWC: features/channels_last
    else:
        yield "model.dropout=0.2"
    yield from (f"data.num_workers={cell['workers']}", f"train.grad_accum_steps={cell['accum']}")
    yield from (f"train.max_grad_norm={cell['clip']}", f"train.compile={cell['compile']}", "optim.lr=0.01")
    yield f"train.ema_decay={cell['ema']}"
    yield from MORE[cell["more"]][1] if "more" in cell else ()


def _more() -> Iterator[Cell]:
    for name, (values, _) in MORE.items():
        yield {axis: known[0] for axis, known in AXES.items()} | dict(values) | {"more": name}


TABLE = {name_of(cell): cell for cell in covering(AXES, num_whole=3)}
CELLS = TABLE | {name_of(cell): cell for cell in _more()}

LONG = frozenset(name for name, cell in CELLS.items() if cell["compile"] == "true" or cell["ranks"] == "8")
"""What takes a minute or more: what is compiled, or has eight ranks."""


SAMPLE = (
    "fp16-x2-mid_epoch-mlp-w2-a1-noclip-constant-sgd",
    "fp32-x2-mid_epoch-mlp-w0-a1-clip-cosine-adamw-ema-rollback_fsdp",
)
"""What `make test` plays: DDP and FSDP, both optimizers, an overflow, loader processes, a step back."""
