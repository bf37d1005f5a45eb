"""hpc-trainer verify reproduce: only the code of then gives the losses of then, and what differs is told."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from hpc_trainer.record.layout import RunPaths
from hpc_trainer.record.redaction import REDACTED
from tests.unit.launch.frozen_code.projects import git

if TYPE_CHECKING:
    from tests.integration.conftest import LocalDriver

THEIRS = """
import torch
from torch import nn
from theirs import SCALE


class Net(nn.Module):
    def __init__(self, input_shape, num_classes):
        super().__init__()
        self.layer = nn.Linear(input_shape[0], num_classes)

    def forward(self, inputs):
        return self.layer(inputs) * SCALE


class Points:
    input_shape, num_classes = (4,), 3

    def __len__(self):
        return 64

    def __getitems__(self, indices):
        inputs = torch.tensor([[float((i * k) % 7) for k in (1, 2, 3, 5)] for i in indices])
        return inputs, torch.tensor([i % 3 for i in indices])


def build(split):
    return Points()
"""
WORDS = (
    "--trust", "theirs", "model=custom", "model._target_=theirs.net.Net", "data=custom",
    "data._target_=theirs.net.build", "train.global_batch_size=8", "train.num_steps=12", "train.eval_every_steps=4",
    "monitor.log_every_steps=3", "sweep_name=first",
)  # fmt: skip
TOKEN = "hf_" + "Q7w8" * 6


def _project(local: LocalDriver, scale: str) -> Path:
    package = local.folder / "theirs"
    package.mkdir(exist_ok=True)
    (package / "__init__.py").write_text(f"SCALE = {scale}\n")
    (package / "net.py").write_text(THEIRS)
    return package


def _repository(local: LocalDriver) -> None:
    (local.folder / ".gitignore").write_text("runs\nconfig\n__pycache__\n")
    git(local.folder, "init", "-q")
    git(local.folder, "add", "-A")
    git(local.folder, "commit", "-q", "-m", "First")


def _reproduce(local: LocalDriver, *words: str) -> tuple[int, Any]:
    run_id = local.run_folder("first").name
    done = local.run("verify", "reproduce", run_id, *words, "--json", check=False)
    assert done.returncode in (0, 1), done.stderr
    assert done.stdout, done.stderr
    return done.returncode, json.loads(done.stdout)


def _edit_record(local: LocalDriver, **changes: Any) -> None:
    path = RunPaths(local.run_folder("first")).environment(0)
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def test_a_checkout_gives_the_losses_of_then_and_another_difference_is_told(local: LocalDriver) -> None:
    _project(local, "1.0")
    _repository(local)
    git(local.folder, "remote", "add", "origin", "https://me:swordfish@example.org/lab.git")
    package = _project(local, f'2.0\nTOKEN = "{TOKEN}"')
    (package / "more.py").write_text("SCALE = 2.0\n")
    (package / "net.py").write_text(THEIRS.replace("from theirs import", "from theirs.more import"))
    local.train(*WORDS, "snapshot=off", "+cluster.env.LAB_PASSWORD=blowfish", f"+cluster.env.NCCL_X={TOKEN}")
    folder = local.run_folder("first")
    git(local.folder, "add", "-A")
    git(local.folder, "commit", "-q", "-m", "Second")
    (package / "more.py").write_text("SCALE = 5.0\n")

    code, said = _reproduce(local, "--steps", "6")

    assert (code, said["is_identical"], said["steps"]) == (0, True, [3, 4, 6]), said
    # What was taken out of the difference as a secret is the one file that is another one now.
    assert [each["name"] for each in said["differences"] if each["kind"] == "code"] == ["code of theirs"]
    texts = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    assert not [path for path, text in texts.items() if any(each in text for each in (TOKEN.encode(), b"swordfish"))]
    assert b"blowfish" not in texts[RunPaths(folder).environment(0)]
    record = json.loads(texts[RunPaths(folder).environment(0)])
    assert record["variables"]["NCCL_X"] == REDACTED

    diff = record["code"]["checkouts"][0]["diff"]
    checkout = {**record["code"]["checkouts"][0], "diff": diff.replace("+SCALE = 2.0", "+SCALE = 2.5")}
    _edit_record(local, code={**record["code"], "checkouts": [checkout]})
    code, said = _reproduce(local, "--steps", "6", "--keep")

    first = said["deviations"][0]
    assert (code, said["is_identical"], first["step"], first["name"]) == (1, False, 3, "loss")
    assert first["relative"] > 1e-6
    assert Path(said["folder"]).is_dir()


PROGRAM = """
import json
import os
import sys

with open(os.environ["HPC_TRAINER_METRICS"], "a") as file:
    for step in range(1, 6):
        print(json.dumps({"step": step, "loss": SCALE / step}), file=file, flush=True)
"""


@pytest.mark.long
def test_a_program_is_compared_by_what_it_tells_and_what_is_lost_is_refused(local: LocalDriver) -> None:
    script = local.folder / "program.py"
    script.write_text(PROGRAM.replace("SCALE", "3.0"))
    local.train("--command", "python program.py", "sweep_name=first")
    script.write_text(PROGRAM.replace("SCALE", "4.0"))
    record = RunPaths(local.run_folder("first")).environment(0)
    packages = json.loads(record.read_text())["packages"]
    _edit_record(local, packages={**packages, "torch": "1.9.0"})

    run = local.run_folder("first").name

    code, said = _reproduce(local, "--steps", "4")

    assert (code, said["is_identical"], said["metrics"]) == (0, True, ["loss"])
    assert said["steps"] == [1, 2, 3, 4]
    (torch,) = said["differences"]
    assert (torch["kind"], torch["name"], torch["was"], torch["now"]) == (
        "package",
        "torch",
        "1.9.0",
        packages["torch"],
    )
    assert not (local.folder / "runs" / "first" / "reproduced").exists()

    refused = {}
    record.write_text('{"format": 1, ')
    refused["cannot be read"] = local.run("verify", "reproduce", run, check=False)
    record.unlink()
    (archive,) = (local.folder / "runs" / "first" / "code").glob("*.zip")
    archive.rename(archive.with_suffix(".away"))
    refused["is gone"] = local.run("verify", "reproduce", run, check=False)
    (local.run_folder("first") / "metrics.jsonl").unlink()
    refused["reported no metrics"] = local.run("verify", "reproduce", run, check=False)
    for words, done in refused.items():
        assert (done.returncode, words in done.stderr) == (1, True), done.stderr
    assert local.run("verify", "reproduce", run, "--steps", "0", check=False).returncode == 2


@pytest.mark.long
def test_frozen_code_gives_the_losses_of_then_after_it_was_changed(local: LocalDriver) -> None:
    package = _project(local, "1.0")
    local.train(*WORDS)
    (package / "__init__.py").write_text("SCALE = 3.0\n")

    code, said = _reproduce(local, "--steps", "9")

    assert (code, said["is_identical"], said["steps"], said["folder"]) == (0, True, [3, 4, 6, 8, 9], None)
    assert {"loss", "lr", "eval_loss"} <= {*said["metrics"]}
    assert said["differences"] == []
    assert not (local.folder / "runs" / "first" / "reproduced").exists()
