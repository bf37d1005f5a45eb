"""A run whose data changed under it is refused, with the key that allows it; another run begins with its state."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from tests.integration.conftest import LocalDriver

WORDS = (
    "model=gpt", "model.num_layers=1", "model.embed_dim=16", "data=text_bytes", "data.seq_len=8",
    "train.global_batch_size=4", "hardware=cpu_x1",
)  # fmt: skip


@pytest.mark.long
def test_a_changed_data_file_is_refused_until_it_is_allowed(local: LocalDriver) -> None:
    text = local.folder / "text.txt"
    text.write_text("to be or not to be " * 40)
    words = ("train", *WORDS, f"data.path={text}", "train.num_steps=6", "sweep_name=contract")
    local.run(*words)
    folder = local.run_folder("contract")
    (folder / "DONE").unlink()
    text.write_text("to be or not to bee" * 40)
    refused = local.run(*words, check=False)
    assert refused.returncode == 1
    assert "IncompatibleResumeError" in refused.stderr
    (end,) = local.events("contract", "end")[1:]
    assert (end["state"], end["error"]["exit_code"], end["cause"]) == ("FAILED", 78, "incompatible_resume")
    message = end["error"]["message"]
    shown = [line.removeprefix("error: ") for line in refused.stderr.splitlines()]
    assert set(message.splitlines()[1:]) <= set(shown), "the differences and the flag"
    assert "dataset.digest: " in message
    allow = message.rpartition(" ")[2]
    assert allow == "checkpoint.allow_changes=[dataset.digest,eval_dataset.digest]"
    why = local.json("why", folder.name, "--sweep", "contract")
    assert "another training" in why["verdict"]
    assert allow in why["advice"][0]
    assert local.json(*words, allow)["state"] == "COMPLETED"
    changes = local.events("contract", "resume")[-1]["changes"]
    assert [change.partition(": ")[0] for change in changes] == ["incompatible"] * 2

    # Another run, which is to begin with this one's state, and is another training.
    other = ("train", *WORDS, f"data.path={text}", "train.num_steps=9", "seed=5", "sweep_name=other")
    refused = local.run(*other, f"checkpoint.resume_from={folder}", check=False)
    assert "error:   seed: 0 -> 5\n" in refused.stderr
    assert "begin anew (without checkpoint.resume_from)" in refused.stderr
    assert "allow_changes=[dataset.digest,eval_dataset.digest,seed]\n" in refused.stderr

    longer = ("train", *WORDS, f"data.path={text}", "train.num_steps=9", "sweep_name=longer")
    # The checkpoint of step 6 is still that of the first attempt, and says what that was made with.
    done = local.json(*longer, f"checkpoint.resume_from={folder}", allow)
    assert (done["state"], done["step"]) == ("COMPLETED", 9)
    assert [record["step"] for record in local.events("longer", "resume")] == [6]
    assert min(local.metrics("longer", "loss")) > 6
