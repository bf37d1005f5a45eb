"""Suggestions for a key that does not exist: a misspelled key, or the name that another library uses."""

from __future__ import annotations

import re
from collections.abc import Iterable

from hpc_trainer.config.keys import DECLARED

_MOST_MEANT = 3
_NEARLY = 0.75  # `sed` is seed (0.86); `steps` is not sweep (0.6)

_RESUME = (
    "A run goes on from its newest checkpoint by itself: give the same command again. checkpoint.resume_from=FOLDER "
    "goes on from another run, init_from.path=FOLDER takes its weights alone"
)
_STEPS = "train.num_steps (a run is counted in optimizer steps)"
_BATCH = "train.micro_batch_size (of a rank, in a pass) or train.global_batch_size (of an optimizer step)"
_WORDS = {
    _RESUME: "resume auto_resume continue continue_from resume_training resume_from_checkpoint restart restore",
    _STEPS: "epochs num_epochs max_epochs n_epochs num_train_epochs steps max_steps total_steps iterations max_iters",
    _BATCH: "batch batch_size bs per_device_train_batch_size train_batch_size",
    "optim.lr": "learning_rate lr base_lr",
    "optim=NAME, as optim=sgd": "optimizer optimiser",
    "optim=sgd, which has optim.momentum": "momentum",
    "optim.weight_decay": "wd l2 weight_decay",
    "schedule=NAME, as schedule=cosine": "scheduler lr_scheduler lr_schedule",
    "schedule.warmup_steps": "warmup num_warmup_steps lr_warmup_steps",
    "train.max_grad_norm": "grad_clip clip_grad gradient_clip_val gradient_clipping clip_norm max_norm",
    "train.grad_accum_steps": "gradient_accumulation_steps accumulate_grad_batches accumulation_steps grad_accum accum",
    "precision=NAME, as precision=bf16": "amp mixed_precision bf16 fp16 dtype precision",
    "parallel=NAME, as parallel=fsdp": "strategy ddp fsdp distributed",
    "data=NAME, as data=digits": "dataset data_name",
    "data.num_workers": "workers num_workers dataloader_num_workers",
    "tracker=NAME, as tracker=wandb": "wandb mlflow tensorboard logger report_to",
    "hardware.gpus_per_node": "gpus num_gpus n_gpus ngpus gpu devices",
    "hardware.num_nodes": "nodes n_nodes nnodes num_nodes",
    "hardware.cpus_per_task (without GPUs) or hardware.cpus_per_gpu": "cpus num_cpus cpus_per_task cores",
    "hardware.mem_gb_per_node": "mem memory mem_gb ram",
    "hardware.time_limit_min": "time timelimit time_limit walltime timeout timeout_min max_time",
    "hardware.partition": "queue partition",
    "cluster.account": "account project",
    "checkpoint.every_steps": "save_steps save_every checkpoint_every save_interval",
    "train.eval_every_steps": "eval_steps eval_every eval_interval val_check_interval",
    "monitor.log_every_steps": "logging_steps log_every log_interval log_every_n_steps",
    "paths.runs_dir": "output_dir out_dir log_dir logdir save_dir runs_dir default_root_dir",
    "seed": "seed random_seed manual_seed random_state",
}
_MEANT = {word: meant for meant, words in _WORDS.items() for word in words.split()}


def key_meant(key: str, known: Iterable[str]) -> str:
    """Return a sentence that suggests an existing key, with a space after it; "" if no key is similar.

    Args:
        key: the key that does not exist, with its section if it has one.
        known: the keys that exist in that place.
    """
    import difflib  # imported late, as in errors.py: most commands have no misspelled key

    parent, _, name = key.rpartition(".")
    word = name.lower().replace("-", "_")
    meant = _MEANT.get(word)
    if meant is not None and meant != key:
        return f"{meant}. " if meant is _RESUME else f"Did you mean {meant}? "
    inner: dict[str, list[str]] = {}
    for key_name in DECLARED:
        inner.setdefault(key_name.rpartition(".")[2], []).append(key_name)
    own = difflib.get_close_matches(word, known, n=1, cutoff=0.6 if parent else _NEARLY)
    if own and (parent or name not in inner):
        return f"Did you mean {own[0]}? "
    close = [name] if name in inner else [] if parent else difflib.get_close_matches(name, inner, n=_MOST_MEANT)
    others = [other for found in close for other in inner[found] if other != key][:_MOST_MEANT]
    return f"Did you mean {' or '.join(others)}? " if others else ""


def keys_named() -> list[str]:
    """Return all keys that suggestions name."""
    return sorted({key for meant in _WORDS for key in re.findall(r"\b[a-z_]+\.[a-z_]+\b", meant)})
