"""An exception is told with the line of the person's own code first, however deep it was raised."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from tests.integration.conftest import LocalDriver

MODEL = """
from torch import nn

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Sequential(nn.Flatten(), nn.Linear(63, 10))

    def forward(self, x):
        return self.inner(x)

def build(input_shape, num_classes):
    return Net()
"""


def test_why_begins_with_the_persons_own_line(local: LocalDriver) -> None:
    (local.folder / "shapes_of_mine.py").write_text(MODEL)
    done = local.run(
        "train", "experiment=digits", "sweep_name=shapes", "train.num_steps=12", "--trust", "shapes_of_mine",
        "model=custom", "model._target_=shapes_of_mine.build", check=False,
    )  # fmt: skip
    assert done.returncode == 1
    frame = "shapes_of_mine.py:10 in forward: return self.inner(x)"
    (run,) = local.json("status", "shapes")["runs"]
    told = local.json("why", run["run_id"])
    assert told["frame"] == frame, told
    assert "mat1 and mat2 shapes cannot be multiplied" in told["evidence"][0]
    because = local.run("why", run["run_id"]).stdout.split("Because:")[1].split("Do:")[0].splitlines()
    assert because[1].strip() == frame
    assert "mat1 and mat2" in because[2]
    log = (local.run_folder("shapes") / "logs" / "attempt-000.rank-0.log").read_text().splitlines()
    header, begins, *_ = log
    assert header.startswith("attempt 0: job "), "whose log it is"
    assert re.fullmatch(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d attempt 0: starts at step 0", begins), log
    assert "Traceback (most recent call last):" in log, "what goes to standard error stays as it is"


@pytest.mark.long
def test_of_a_program_it_is_in_its_last_lines(local: LocalDriver) -> None:
    (local.folder / "reads.py").write_text("import json\nprint('hello', flush=True)\njson.loads('{')\n")
    local.run("train", "--command", "python3 reads.py", "sweep_name=program", check=False)
    (run,) = local.json("status", "program")["runs"]
    assert local.json("why", run["run_id"])["frame"].endswith("reads.py:3 in <module>: json.loads('{')")
    assert "\nhello\n" in (local.run_folder("program") / "logs" / "attempt-000.rank-0.log").read_text()
