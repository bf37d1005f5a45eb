"""Small stand-ins for Slurm's commands on PATH: they record how they were called and answer what the test says.

`sbatch` accepts every script as a job array and `squeue` shows it, unless the test gives other answers. A test writes
rows of `squeue` and `sacct` as short as it likes; header, ends of rows and columns that it leaves out come from here.
"""

from __future__ import annotations

import hashlib
import os
import re
import stat
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

QUEUE_HEADER = "JOBID|STATE|NODELIST|REASON|COMMENT|NAME|end\n"
ACCOUNTING_HEADER = "JobID|State|ExitCode|NodeList|JobName|Comment|End|\n"
CLUSTER = "fakecluster"
_RECORD = """#!/bin/sh
here={folder}
name=$(basename "$0")
case "$name $*" in "sbatch --test-only"*) name=test-only ;; esac  # a command of its own: it submits nothing
echo "$name $*" >> "$here/calls"
env | grep -E '^(SLURM_|SBATCH_|SRUN_|SUBMITIT_)' | sort > "$here/$name.env"
if [ -e "$here/$name.hang" ]; then exec sleep 60; fi
if [ -e "$here/$name.err" ]; then cat "$here/$name.err" >&2; fi
if [ -e "$here/$name.out" ]; then cat "$here/$name.out"; exit "$(cat "$here/$name.rc")"; fi
if [ "$name $*" = "scontrol show config" ]; then echo "ClusterName             = $(cat "$here/cluster")"; exit 0; fi
"""
_SBATCH = """
if [ "$name" = test-only ]; then
    echo "sbatch: Job 1 to start at 2026-01-01T00:00:00 using 1 processors on nodes n1 in partition main" >&2
    exit 0
fi
number=$(( $(cat "$here/number") + 1 ))
echo "$number" > "$here/number"
for script; do :; done  # the last argument
cp "$script" "$here/script-$number.sh"
echo "$script" > "$here/path-$number"
comment=$(sed -n 's/^#SBATCH --comment=//p' "$script")
last=$(sed -n 's/^#SBATCH --array=0-\\([0-9]*\\)%.*/\\1/p' "$script")
ids=$number
if [ -n "$last" ]; then ids=$(seq -f "${number}_%.0f" 0 "$last"); fi
shown="$here/queue"
if [ -e "$here/squeue.lags" ]; then shown="$here/queue.later"; fi
jobname=$(sed -n 's/^#SBATCH --job-name=//p' "$script")
for id in $ids; do echo "$id|PENDING||Priority|$comment|$jobname" >> "$shown"; done
if [ -e "$here/lose_reply" ]; then
    rm "$here/lose_reply"
    echo "sbatch: error: Batch job submission failed: Socket timed out on send/recv operation" >&2
    exit 1
fi
echo "Submitted batch job $number"
"""
_SQUEUE = """
echo "{header}"
awk -F '|' -v OFS='|' '{ while (NF < 6) $(NF + 1) = ""; print $0, "end" }' "$here/queue"
""".replace("{header}", QUEUE_HEADER.strip())
_SACCT = f"""
echo "{ACCOUNTING_HEADER.strip()}"
"""
_SCONTROL = """
if [ "$*" = "-o" ]; then
    while read -r _ what id; do
        if [ "$what" = job ] && [ -e "$here/path-$id" ]; then
            echo "JobId=$id ArrayJobId=$id ArrayTaskId=0-1 JobState=PENDING Command=$(cat "$here/path-$id") WorkDir=/"
        fi
    done
fi
"""


def uuid_of(job_id: str) -> str:
    """The uuid that a submission on disk (`SweepOnDisk.submit`) has in these tests."""
    return hashlib.sha256(_array(job_id).encode()).hexdigest()[:32]


def _array(job_id: str) -> str:
    return re.split(r"[_.+]", job_id, maxsplit=1)[0]


def queue_rows(text: str, uuid: Callable[[str], str] = uuid_of) -> str:
    """What `squeue` prints of these rows: without a name, and with the comment `x` or none, they are jobs of ours."""
    lines = []
    for line in text.splitlines():
        parts = line.split("|")
        if len(parts) == 5 and parts[4] in ("x", ""):
            parts[4] = uuid(parts[0])
        lines.append("|".join([*parts, *[""] * (6 - len(parts)), "end"]) + "\n")
    return QUEUE_HEADER + "".join(lines)


def accounting_rows(text: str, uuid: Callable[[str], str] = uuid_of) -> str:
    """What `sacct` prints of these rows: without a name they are jobs of ours."""
    lines = []
    for line in text.splitlines():
        parts = line.split("|")
        ours = [f"sweep-{uuid(parts[0])[:8]}", "", ""]
        lines.append("|".join([*parts, *ours[len(parts) - 4 :], ""]) + "\n")
    return ACCOUNTING_HEADER + "".join(lines)


class FakeSlurm:
    """Slurm's commands in `folder/bin`; what they were told and asked lies in `folder`."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.bin = folder / "bin"
        self.bin.mkdir(parents=True)
        (folder / "number").write_text("100\n")
        (folder / "queue").touch()
        (folder / "calls").touch()
        (folder / "cluster").write_text(f"{CLUSTER}\n")
        played = {"sbatch": _SBATCH, "squeue": _SQUEUE, "sacct": _SACCT, "scontrol": _SCONTROL}
        for name in ("sbatch", "squeue", "sacct", "sacctmgr", "sinfo", "scontrol", "scancel", "sshare"):
            script = self.bin / name
            script.write_text(_RECORD.replace("{folder}", str(folder)) + played.get(name, ""))
            script.chmod(script.stat().st_mode | stat.S_IXUSR)

    def answer(self, name: str, output: str = "", *, code: int = 0, error: str = "") -> None:
        """From now on `name` prints this and exits with this code; of `squeue` and `sacct` these are the rows."""
        if not code and name in ("squeue", "sacct"):
            output = (queue_rows if name == "squeue" else accounting_rows)(output, self._uuid_of)
        self.print(name, output, code=code, error=error)

    def print(self, name: str, output: str, *, code: int = 0, error: str = "") -> None:
        """From now on `name` prints precisely this."""
        (self.folder / f"{name}.rc").write_text(str(code))
        (self.folder / f"{name}.err").write_text(error)
        (self.folder / f"{name}.out").write_text(output)

    def _uuid_of(self, job_id: str) -> str:
        """That of the submission, if sbatch took it; else that of one on disk."""
        script = self.folder / f"script-{_array(job_id)}.sh"
        found = re.search(r"^#SBATCH --comment=(\S+)$", script.read_text() if script.exists() else "", re.MULTILINE)
        return found[1] if found else uuid_of(job_id)

    def forget(self, name: str) -> None:
        """`name` behaves as in the beginning."""
        for path in self.folder.glob(f"{name}.*"):
            path.unlink()

    def lag(self) -> None:
        """From now on squeue does not yet show what sbatch accepts."""
        (self.folder / "squeue.lags").touch()

    def catch_up(self) -> None:
        """squeue shows everything again."""
        (self.folder / "squeue.lags").unlink()
        later = self.folder / "queue.later"
        with (self.folder / "queue").open("a") as queue:
            queue.write(later.read_text() if later.exists() else "")
        later.unlink(missing_ok=True)

    def hang(self, name: str) -> None:
        """`name` answers nothing for a minute."""
        (self.folder / f"{name}.hang").touch()

    def lose_reply(self) -> None:
        """The next sbatch is accepted, and fails all the same: the reply was lost."""
        (self.folder / "lose_reply").touch()

    def clear_queue(self) -> None:
        """squeue knows no job."""
        (self.folder / "queue").write_text("")

    def calls(self, name: str = "") -> list[str]:
        """How `name` (or any command) was called, in order."""
        lines = (self.folder / "calls").read_text().splitlines()
        return [line for line in lines if not name or line.split()[0] == name]

    def forget_calls(self) -> None:
        """Begins to count anew."""
        (self.folder / "calls").write_text("")

    def seen_environment(self, name: str) -> list[str]:
        """Names of the Slurm variables that the last call of `name` saw."""
        return [line.split("=", 1)[0] for line in (self.folder / f"{name}.env").read_text().splitlines()]

    def script(self, job_id: str) -> str:
        """The batch script that sbatch got as this job."""
        return (self.folder / f"script-{job_id}.sh").read_text()


@pytest.fixture
def fake_slurm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeSlurm:
    """Slurm's commands, played by scripts; the real ones, if there are any, are out of reach."""
    fake = FakeSlurm(tmp_path / "fake-slurm")
    monkeypatch.setenv("PATH", f"{fake.bin}:{os.environ['PATH']}")
    # Tests keep their sweeps in /tmp, which the nodes of a cluster would not see.
    monkeypatch.setattr("hpc_trainer.launch.grids.mount_of", lambda folder: ("/home", "nfs4", "rw"))
    return fake


@pytest.fixture
def no_slurm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A PATH with the tools of a plain machine and no Slurm."""
    folder = tmp_path / "plain-bin"
    folder.mkdir()
    for tool in ("sh", "env", "cat", "git"):
        found = next((Path(each) / tool for each in ("/usr/bin", "/bin") if (Path(each) / tool).exists()), None)
        if found is not None:
            (folder / tool).symlink_to(found)
    monkeypatch.setenv("PATH", str(folder))


@pytest.fixture(autouse=True)
def alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Neither the person's own files and variables nor a surrounding job reach a test; the umask comes back."""
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "no-user-config"))
    for name in list(os.environ):
        if name.startswith(("SLURM_", "SBATCH_", "SRUN_", "SUBMITIT_", "HPC_TRAINER_RUNS", "TORCHELASTIC_")):
            monkeypatch.delenv(name)
    before = os.umask(0o077)
    try:
        yield
    finally:
        os.umask(before)
