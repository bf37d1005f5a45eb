"""Forms of published training scripts: which loop, which objects, which lines, and the command that runs the script."""

from __future__ import annotations

import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

Document = Callable[..., Any]
Told = Callable[[str], dict[str, Any]]


@pytest.fixture
def told(tmp_path: Path, document: Document) -> Told:
    """Read a script; `changes` of the answer maps (step, line of the script) to the change."""

    def read(text: str) -> dict[str, Any]:
        text = textwrap.dedent(text)
        (tmp_path / "train.py").write_text(text)
        answer: dict[str, Any] = document("init", "--from", "train.py")
        lines = text.splitlines()
        answer["changes"] = {
            (number, lines[place["line"] - 1].strip()): place["change"]
            for number, step in enumerate(answer["steps"], start=1)
            for place in step["places"]
        }
        return answer

    return read


def test_a_loop_over_parts_of_a_batch_is_not_the_training_loop(told: Told) -> None:
    """nanoGPT's form: the micro steps call backward(), and the loop around them the optimizer."""
    answer = told(
        """
        import os
        import torch
        out_dir = "out"
        learning_rate = 6e-4
        max_iters = 600000
        ddp = int(os.environ.get("RANK", -1)) != -1
        if ddp:
            torch.distributed.init_process_group(backend="nccl")
            device = f"cuda:{int(os.environ['LOCAL_RANK'])}"
        model = build()
        optimizer = model.configure_optimizers(learning_rate)
        raw_model = model.module if ddp else model
        while True:
            torch.save(raw_model.state_dict(), out_dir)
            for micro_step in range(4):
                loss = model(batch())
                scaler.scale(loss).backward()
            scaler.step(optimizer)
        """
    )
    changes = answer["changes"]
    assert changes[4, "while True:"] == "continue at `step`: while step < run.num_steps"
    assert (4, "for micro_step in range(4):") not in changes
    assert "run.restore(model=model, optimizer=optimizer)" in answer["steps"][2]["advice"], "raw_model is model"
    assert changes[1, "learning_rate = 6e-4"] == 'config.params["learning_rate"]'
    assert changes[1, "max_iters = 600000"] == "config.train.num_steps"
    assert answer["as_it_is"] == "hpc-trainer submit --command 'python train.py'", "RANK starts DDP, so it stays unset"


def test_a_loop_in_methods_is_followed_to_the_loop_over_batches_and_that_over_epochs(told: Told) -> None:
    """The form of PyTorch's tutorials: a Trainer whose methods call each other."""
    answer = told(
        """
        import os, argparse
        import torch
        import torch.multiprocessing as mp
        class Trainer:
            def _run_batch(self, x, y):
                self.optimizer.zero_grad()
                self.model(x).backward()
                self.optimizer.step()
            def _run_epoch(self):
                for x, y in self.data:
                    self._run_batch(x, y)
            def train(self):
                for epoch in range(self.epochs):
                    self._run_epoch()
                    self._save_checkpoint(epoch)
        def main(rank, world_size):
            os.environ["MASTER_ADDR"] = "localhost"
            torch.distributed.init_process_group(backend="nccl", rank=rank, world_size=world_size)
            torch.distributed.destroy_process_group()
        if __name__ == "__main__":
            parser = argparse.ArgumentParser()
            parser.add_argument("total_epochs", type=int)
            args = parser.parse_args()
            mp.spawn(main, args=(2,), nprocs=2)
        """
    )
    changes = answer["changes"]
    assert changes[4, "for x, y in self.data:"].startswith("continue at `step`")
    assert changes[4, "for epoch in range(self.epochs):"] == (
        "the epoch follows from `step`: step // batches in an epoch"
    )
    assert changes[4, "self._save_checkpoint(epoch)"] == "replace by run.save"
    assert changes[2, "mp.spawn(main, args=(2,), nprocs=2)"] == "remove: hpc-trainer starts each rank"
    assert changes[2, 'os.environ["MASTER_ADDR"] = "localhost"'] == "remove"
    assert answer["as_it_is"] == (
        "hpc-trainer submit --command 'python train.py TOTAL_EPOCHS' train.command_per=node"
    ), "it starts its ranks itself"


def test_what_a_checkpoint_must_hold_is_found_by_parameters_by_class_and_by_name(told: Told) -> None:
    answer = told(
        """
        import torch
        from torch.optim import Adadelta
        policy = Policy()
        optimizer = Adadelta(policy.parameters(), lr=0.1)
        lr_scheduler, num_epochs = create_scheduler(args, optimizer)
        loss_scaler = NativeScaler()
        teacher.load_state_dict(policy.state_dict())
        teacher_without_ddp = teacher.module
        teacher_without_ddp.load_state_dict(saved)
        opt = parser.parse_args()
        opt_cfg = OptimizerConfig()
        """
    )
    names = "teacher=teacher, policy=policy, optimizer=optimizer, lr_scheduler=lr_scheduler, loss_scaler=loss_scaler"
    order = answer["steps"][2]["advice"].partition("run.restore(")[2].partition(")")[0]
    assert sorted(order.split(", ")) == sorted(names.split(", "))
    starts = [line for number, line in answer["changes"] if number == 3]
    assert starts == ["teacher_without_ddp.load_state_dict(saved)"], "a copy of weights stays"


def test_seeds_of_generators_samplers_without_shuffle_and_loads_of_models_stay(told: Told) -> None:
    answer = told(
        """
        import random, torch
        import numpy as np
        from torch.utils.data import DataLoader, DistributedSampler
        model = torch.hub.load("owner/repo", "net")
        train_set, rest = random_split(data, [9, 1], generator=torch.Generator().manual_seed(42))
        torch.manual_seed(1)
        np.random.seed(1)
        sampler = DistributedSampler(rest, shuffle=False)
        loader = DataLoader(train_set, **kwargs)
        device = "cuda" if torch.cuda.is_available() else "cpu"
        net = torch.nn.DataParallel(model)
        for x in loader:
            net(x).backward()
        """
    )
    changes = answer["changes"]
    assert [line for number, line in changes if number == 3] == ["torch.manual_seed(1)", "np.random.seed(1)"]
    assert not any("DistributedSampler(" in line for _, line in changes)
    assert changes[4, "loader = DataLoader(train_set, **kwargs)"].startswith("if it shuffles: ")
    assert changes[2, 'device = "cuda" if torch.cuda.is_available() else "cpu"'] == "run.device"
    assert changes[2, "net = torch.nn.DataParallel(model)"].startswith("remove: each GPU has a rank")
    assert changes[4, "for x in loader:"].startswith("continue at"), "also without a step() of the optimizer"


@pytest.mark.parametrize(
    ("text", "command"),
    [
        (  # the form of timm and MAE: a learning rate that is computed; of FSDP2's example: switches
            "p.add_argument('--lr', type=float, default=None)\np.add_argument('--flag', action='store_true')\n"
            "p.add_argument('--blr', type=float, default=1e-3)\np.add_argument('--workers', type=int, default=8)\n",
            "--command 'python train.py --blr {params.blr}' params.blr=0.001",
        ),
        ("p.add_argument('--fp16', action='store_true')\np.add_argument('--data', default='d')\n", "'python train.py'"),
        ("args = HfArgumentParser(A).parse_args_into_dataclasses()\n", "--command 'python train.py ARGUMENTS'"),
        (
            "import os\nrank = int(os.environ['LOCAL_RANK'])\n",
            "--command 'python train.py' train.command_env=torchrun",
        ),
        (
            "import torch.distributed as dist\ndist.init_process_group('nccl')\n",
            "--command 'python train.py' train.command_env=torchrun",
        ),
        (
            "import click\n@click.command()\n@click.option('--lr', default=0.1)\n@click.option('--amp/--no-amp')\n"
            "@click.argument('data')\ndef main(lr, amp, data):\n    pass\nmain()\n",
            "--command 'python train.py DATA --lr {params.lr}' params.lr=0.1",
        ),
        (
            "from absl import app, flags\nflags.DEFINE_string('workdir', None, 'folder')\n"
            "flags.DEFINE_float('learning_rate', 0.5, 'rate')\nflags.DEFINE_bool('debug', False, '')\n"
            "flags.mark_flags_as_required(['workdir'])\napp.run(main)\n",
            "--workdir WORKDIR --learning_rate {params.learning_rate}' params.learning_rate=0.5",
        ),
    ],
)
def test_the_command_runs_the_script_as_it_is(text: str, command: str, told: Told) -> None:
    answer = told(f"import argparse, torch\np = argparse.ArgumentParser()\n{text}main()\n")
    assert answer["as_it_is"].startswith("hpc-trainer submit --command ")
    assert answer["as_it_is"].endswith(command)


def test_of_many_arguments_those_are_listed_that_become_something_else(told: Told) -> None:
    lines = "".join(f"p.add_argument('--a{number}', default={number})\n" for number in range(40))
    answer = told(f"import argparse\np = argparse.ArgumentParser()\n{lines}p.add_argument('--seed')\np.parse_args()\n")
    step = answer["steps"][0]
    assert (len(step["places"]), step["num_more"]) == (24, 18)
    assert [place["text"] for place in step["places"][-2:]] == ["--seed", "p.parse_args()"]


def test_a_loop_in_another_file_is_named(tmp_path: Path, document: Document) -> None:
    (tmp_path / "engine.py").write_text("def train_one_epoch():\n    for x in data:\n        x.backward()\n")
    (tmp_path / "train.py").write_text("import torch\nfrom engine import train_one_epoch\ntrain_one_epoch()\n")
    answer = document("init", "--from", "train.py")
    assert answer["note"] == (
        "train.py has no loop that calls backward(). Name also the file that has it, as "
        "hpc-trainer init --from engine.py."
    )
    answer = document("init", "--from", "engine.py")
    assert answer["as_it_is"] is None
    assert answer["note"].startswith("engine.py starts nothing by itself: name the script that is run.")
