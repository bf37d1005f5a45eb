"""What a job may ask for: each value is one word in its script, or no script is made (P6).

The ways in are validation (tests/unit/cli/test_hostile_inputs.py), frozen specs that somebody has edited, and the
names of folders. The attacks here come by the second and the third.
"""

from __future__ import annotations

import dataclasses
import json
import shlex
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hpc_trainer.config import script_words as words
from hpc_trainer.errors import ConfigError
from hpc_trainer.launch.batch_job import BatchJob, worker_command
from hpc_trainer.launch.grids import retry
from hpc_trainer.launch.submitit_bridge import render_script
from hpc_trainer.record.layout import SweepPaths
from hpc_trainer.record.submissions import read_ledger
from hpc_trainer.slurm.commands import megabytes
from hpc_trainer.slurm.shape import Shape
from tests.unit.launch.grids import make_grid, submit
from tests.unit.launch.scripts import read_script
from tests.unit.record.builders import make_specs
from tests.unit.slurm.fake_slurm import FakeSlurm

UUID = "0123456789abcdef0123456789abcdef"

# --- jobs of every kind that validation lets through ---


def _fitting(word: words.Word) -> st.SearchStrategy[str | None]:
    return st.none() | st.from_regex(word.pattern, fullmatch=True).filter(word.fits)


_LINE = st.text(st.characters(exclude_categories=("Cc", "Cf", "Cs", "Zl", "Zp")), max_size=30)
_FOLDER = st.text(
    st.characters(exclude_categories=("Cc", "Cf", "Cs", "Zl", "Zp"), exclude_characters="\\%/"), min_size=1
)
_GB = st.integers(1, 4096).map(float) | st.sampled_from([0.5, 0.3, 1.5, 62.5, 1 / 1024])
_COUNT = st.integers(1, 2**31 - 1)


@st.composite
def shapes(draw: st.DrawFn) -> Shape:
    gpus = draw(st.just(0) | st.integers(1, 16))
    memory = draw(st.sampled_from([None, "mem_gb_per_node", "mem_gb_per_cpu", *(["mem_gb_per_gpu"] if gpus else [])]))
    keys = ("mem_gb_per_node", "mem_gb_per_gpu", "mem_gb_per_cpu")
    return Shape(
        num_nodes=draw(_COUNT),
        tasks_per_node=gpus or draw(_COUNT),
        gpus_per_node=gpus,
        cpus_per_task=draw(_COUNT),
        **{key: draw(_GB) if key == memory else None for key in keys},  # type: ignore[arg-type]
        gpu_type=draw(_fitting(words.GPU_TYPE)),
        partition=draw(_fitting(words.PARTITION)),
        qos=draw(_fitting(words.QOS)),
        constraint=draw(_fitting(words.CONSTRAINT)),
        exclude=draw(_fitting(words.HOSTS)),
        account=draw(_fitting(words.ACCOUNT)),
        time_limit_min=draw(st.integers(1, 2**31 // 60)),
        signal_lead_s=draw(st.integers(1, 2**16 - 1)),
        gpu_request=draw(st.sampled_from(["gpus_per_node", "gres"])),
    )


@st.composite
def jobs(draw: st.DrawFn) -> BatchJob:
    name = draw(st.from_regex(words.NAME.pattern, fullmatch=True))
    runs_dir = "/" + "/".join(draw(st.lists(_FOLDER, min_size=1, max_size=3)))
    sweep = Path(runs_dir, name)
    python = draw(st.none() | st.sampled_from(["python3", "apptainer exec --nv 'my image.sif' python", "/é x/python"]))
    python = f"'{python}'" if python == "/é x/python" else python
    uuid = draw(st.from_regex("[0-9a-f]{32}", fullmatch=True))
    setup = draw(st.lists(_LINE.filter(lambda line: not list(words.setup_problem(line))), max_size=4))
    # Lines that look like the end of a script.
    setup += draw(st.sampled_from([[], ["", "# command", "export SUBMITIT_EXECUTOR=slurm", "srun true"], ["echo '"]]))
    values = _LINE.filter(lambda line: not words.has_control(line))
    srun_args = draw(st.lists(st.sampled_from(["--x=", "-c", "--cpu-bind="]).flatmap(lambda k: values.map(k.__add__))))
    is_successor = draw(st.booleans())
    job = BatchJob(
        shape=draw(shapes()),
        sweep=SweepPaths(sweep),
        uuid=uuid,
        num_elements=None if is_successor else draw(st.integers(1, 10_000)),
        array_parallelism=None if is_successor else draw(_COUNT),
        setup=tuple(setup),
        srun_args=tuple(each for each in srun_args if not list(words.srun_problem(each))),
        command=worker_command(
            sweep, ["--run", name] if is_successor else ["--array", uuid], shlex.split(python or "python3")
        ),
        exit_codes=draw(st.sampled_from([(), ((75, 79),), ((74, 80), (76, 81), (78, 125))])),
    )
    assert not list(words.folder_problem(runs_dir)), "validation lets this folder through"
    return job


def _rendered(shape: Shape) -> Shape:
    """A shape as a script can say it: whole megabytes, and of GPUs nothing where there are none."""
    memory = {key: getattr(shape, key) for key in ("mem_gb_per_node", "mem_gb_per_gpu", "mem_gb_per_cpu")}
    whole = {key: None if value is None else megabytes(value) / 1024 for key, value in memory.items()}
    gpus = {} if shape.gpus_per_node else {"gpu_type": None, "gpu_request": "gpus_per_node"}
    return dataclasses.replace(shape, **whole, **gpus)


@settings(max_examples=40)
@given(jobs())
def test_every_script_reads_back_as_the_job_that_made_it(job: BatchJob) -> None:
    text = render_script(job)
    found = read_script(text)
    assert found.shape == _rendered(job.shape)
    for key in ("mem_gb_per_node", "mem_gb_per_gpu", "mem_gb_per_cpu"):
        have, want = getattr(found.shape, key), getattr(job.shape, key)
        assert have is None or abs(have - want) <= 0.5 / 1024, "whole megabytes"
    most = job.num_elements and min(job.num_elements, job.array_parallelism or 1)
    assert found.array == (None if job.num_elements is None else (job.num_elements, most))
    assert (found.flags["job-name"], found.flags["comment"]) == (job.job_name, job.uuid)
    assert found.flags["output"] == job.output
    assert (found.setup, found.srun_args, found.command) == (list(job.setup), list(job.srun_args), list(job.command))
    assert found.sweep_dir == job.sweep.folder
    assert found.tail == job.tail
    known = {"job-name", "comment", "output", "open-mode", "requeue", "signal", "time", "nodes", "ntasks-per-node",
             "cpus-per-task", "array", "gpus-per-node", "gres", "mem", "mem-per-gpu", "mem-per-cpu", "partition",
             "qos", "constraint", "exclude", "account"}  # fmt: skip
    assert found.flags.keys() <= known


# --- attacks ---


def _job(**changes: Any) -> BatchJob:
    sweep = Path("/shared/my runs/sweep")
    job = BatchJob(
        shape=Shape(
            num_nodes=2, tasks_per_node=4, gpus_per_node=4, cpus_per_task=8, mem_gb_per_node=None, mem_gb_per_gpu=60.0,
            mem_gb_per_cpu=None, gpu_type="a100", partition="gpu", qos="high", constraint="a&b", exclude="n[1-2]",
            account="lab", time_limit_min=60, signal_lead_s=120,
        ),
        sweep=SweepPaths(sweep), uuid=UUID, num_elements=10, array_parallelism=4,
        setup=("module load cuda", "echo 'x y'"), srun_args=("--cpu-bind=cores",),
        command=worker_command(sweep, ["--array", UUID], ["python3"]),
    )  # fmt: skip
    return dataclasses.replace(job, **changes)


WORD_KEYS = ("partition", "qos", "constraint", "exclude", "account", "gpu_type")
ATTACKS = [
    "gpu\n#SBATCH --uid=0", "gpu\n#PBS -q other", "gpu\ntouch pwned", "gpu\r#SBATCH --uid=0", "gpu\u2028--uid=0",
    "gpu --uid=0", "--uid=0", "$(touch pwned)", "`touch pwned`", "gpu;touch pwned", "gpu' --uid=0 '", 'gpu" --uid=0 "',
    "gpu\\", "gpu#x", "gpu\x00", "gpu\udce9", "/etc/passwd", "", " ", "x" * 9000,
]  # fmt: skip


def test_only_a_task_of_several_ranks_starts_them_by_torchrun() -> None:
    one, four = (worker_command(Path("/runs/s"), ("--array", UUID), ranks_per_task=count) for count in (1, 4))
    assert four == (*one, "--torchrun", "4")


@pytest.mark.parametrize("key", WORD_KEYS)
@pytest.mark.parametrize("attack", ATTACKS, ids=range(len(ATTACKS)))
def test_a_word_of_a_directive_is_one_plain_word(key: str, attack: str) -> None:
    shape = dataclasses.replace(_job().shape, **{key: attack})
    with pytest.raises(ConfigError, match=rf"{key}=.* must be one plain word") as caught:
        render_script(_job(shape=shape))
    assert len(str(caught.value)) < 500
    assert str(caught.value).isprintable()


COUNT_KEYS = (
    "num_nodes", "tasks_per_node", "ranks_per_task", "gpus_per_node", "cpus_per_task", "time_limit_min",
    "signal_lead_s",
)  # fmt: skip


@pytest.mark.parametrize("key", COUNT_KEYS)
@pytest.mark.parametrize("attack", ["60\n#SBATCH --uid=0", "60", -1, 1.5, None, True, [60]])
def test_a_count_is_a_whole_number(key: str, attack: object) -> None:
    with pytest.raises(ConfigError, match=f"{key}=.* must be a whole number"):
        render_script(_job(shape=dataclasses.replace(_job().shape, **{key: attack})))


@pytest.mark.parametrize("line", ["export A='x\n#BSUB -q other'", "export A=\x00", "#SBATCH --uid=0"])
def test_a_line_that_asks_for_facts_is_one_line_and_no_directive(line: str) -> None:
    with pytest.raises(ConfigError):
        render_script(_job(facts=(line,)))


@pytest.mark.parametrize("key", ["mem_gb_per_node", "mem_gb_per_gpu", "mem_gb_per_cpu"])
@pytest.mark.parametrize(
    "attack", ["60G", "1\n#SBATCH --uid=0", 0.0, -1.0, 1e-9, float("inf"), float("nan"), [60], True]
)
def test_memory_is_a_number_of_megabytes(key: str, attack: object) -> None:
    with pytest.raises(ConfigError, match=f"{key}=.* must be a number of GB, 1 MB or more"):
        render_script(_job(shape=dataclasses.replace(_job().shape, **{"mem_gb_per_gpu": None, key: attack})))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"setup": ("#SBATCH --uid=0",)}, "not allowed among commands"),
        ({"setup": ("  #BSUB -q other",)}, "not allowed among commands"),
        ({"setup": ("true\n#PBS -q other",)}, "one line without control characters"),
        ({"setup": ("echo 'x\u2028y'",)}, "one line without control characters"),
        ({"setup": ("x" * 2**22,)}, "max_script_size"),
        ({"srun_args": ("bash",)}, "srun would run any other argument"),
        ({"srun_args": ("--",)}, "srun would run any other argument"),
        ({"srun_args": ("--x=1\n#BSUB -q other",)}, "one line without control characters"),
        ({"srun_args": ("--x=" + "y" * 2**17,)}, "longer than the 131071 bytes"),
        ({"command": ("python3", "a\n#BSUB -q other")}, "the command of the ranks holds"),
        ({"command": ("python3", "y" * 2**17)}, "longer than the 131071 bytes"),
        ({"sweep": SweepPaths(Path("/shared/%u/sweep"))}, "control characters, backslash or percent sign"),
        ({"sweep": SweepPaths(Path("/shared/a\\b/sweep"))}, "control characters, backslash or percent sign"),
        (
            {"sweep": SweepPaths(Path("/shared/a\n#SBATCH --uid=0/sweep"))},
            "control characters, backslash or percent sign",
        ),
        ({"sweep": SweepPaths(Path("/shared/sweep\n#SBATCH --uid=0"))}, "gives its jobs their name"),
        ({"sweep": SweepPaths(Path("/shared/my sweep"))}, "gives its jobs their name"),
    ],
    ids=range(16),
)
def test_lines_arguments_and_folders_are_one_line_each(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        render_script(_job(**changes))
    assert len(str(caught.value)) < 600


@pytest.mark.parametrize(
    ("section", "key", "value", "message"),
    [
        ("shape", "partition", "gpu\n#SBATCH --wrap='touch pwned'", "must be one plain word"),
        ("shape", "account", "lab --uid=0", "must be one plain word"),
        ("shape", "signal_lead_s", "1\n#SBATCH --uid=0", "must be a whole number"),
        ("setup", "", "#BSUB -q other", "not allowed among commands"),
        ("srun_args", "", "bash", "srun would run any other argument"),
    ],
    ids=lambda value: repr(value)[:20],
)
def test_an_edited_spec_gets_into_no_script(
    section: str, key: str, value: str, message: str, tmp_path: Path, fake_slurm: FakeSlurm
) -> None:
    """A line of specs.jsonl without a seal is read, as those of older versions are: its values are judged again."""
    paths = SweepPaths(tmp_path / "runs" / "sweep")
    (spec,) = make_specs(1, "cluster=slurm")
    submit(make_grid(paths.folder, [spec]))
    record = json.loads(paths.specs.read_text())
    if section == "shape":
        record["shape"][key] = value
    else:
        record["config"]["cluster"][section] = [value]
    assert record.pop("crc")
    paths.specs.write_text(json.dumps(record) + "\n")
    fake_slurm.clear_queue()
    fake_slurm.answer("sacct", "101_0|FAILED|1:0|n1\n")
    fake_slurm.forget_calls()
    with pytest.raises(ConfigError, match=message):
        retry(paths, [spec.run_id])
    assert fake_slurm.calls("sbatch") == []
    assert len(read_ledger(paths).unsettled) == 0, "nothing is left to ask Slurm about"


@pytest.mark.parametrize("name", ["digits old", "sweep\n#SBATCH --wrap=id", "$(touch pwned)"])
def test_a_renamed_sweep_gets_into_no_script(name: str, tmp_path: Path, fake_slurm: FakeSlurm) -> None:
    paths = SweepPaths(tmp_path / "runs" / "sweep")
    (spec,) = make_specs(1, "cluster=slurm")
    submit(make_grid(paths.folder, [spec]))
    paths.folder.rename(paths.folder.with_name(name))
    renamed = SweepPaths(paths.folder.with_name(name))
    fake_slurm.clear_queue()
    fake_slurm.answer("sacct", "101_0|FAILED|1:0|n1\n")
    fake_slurm.forget_calls()
    with pytest.raises(ConfigError, match="gives its jobs their name"):
        retry(renamed, [spec.run_id])
    assert fake_slurm.calls("sbatch") == []


def test_a_sweep_may_have_the_longest_name(tmp_path: Path, fake_slurm: FakeSlurm) -> None:
    paths = SweepPaths(tmp_path / "runs" / ("s" * 100))
    assert len(submit(make_grid(paths.folder, make_specs(1, "cluster=slurm")))) == 1
    assert read_script(fake_slurm.script("101")).flags["job-name"].startswith("s" * 100 + "-")


# --- sbatch itself reads the same ---


def sbatch_reads(script: str, folder: Path) -> list[str]:
    """The arguments that the real sbatch finds in a script: its client says so before it looks for a controller."""
    (folder / "slurm.conf").write_text(
        "ClusterName=none\nSlurmctldHost=localhost\nSlurmctldPort=1\nAuthType=auth/none\nCredType=cred/none\n"
        "NodeName=n1 CPUs=1\nPartitionName=p Nodes=n1 Default=YES\n"
    )
    (folder / "script.sh").write_text(script)
    environ = {"PATH": "/usr/bin:/bin", "SLURM_CONF": str(folder / "slurm.conf"), "LC_ALL": "C.UTF-8"}
    found = []
    with subprocess.Popen(
        ["sbatch", "-vvv", str(folder / "script.sh")], env=environ, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stderr
        for line in process.stderr:
            if "Found in script, argument" in line:
                found.append(line.split(' argument "', 1)[1].removesuffix('"\n'))
            if "end of defined options" in line:
                break
            assert "error:" not in line, line
        else:
            pytest.fail("sbatch stopped before it had read the script")
        process.kill()
    return found


# The program alone, with a configuration of this test's own that names no controller.
needs_sbatch = pytest.mark.skipif(
    shutil.which("sbatch", path="/usr/bin:/bin") is None, reason="sbatch is not installed"
)


@needs_sbatch
@pytest.mark.parametrize(
    "setup", [(), ("# SBATCH --uid=0", "echo '#SBATCH --uid=0'", "cat <<E", "# PBS -q x", "E", "")]
)
def test_sbatch_finds_the_directives_and_no_others(tmp_path: Path, setup: tuple[str, ...]) -> None:
    script = render_script(dataclasses.replace(_job(), setup=setup))
    found = dict(word.removeprefix("--").partition("=")[::2] for word in sbatch_reads(script, tmp_path))
    assert dict(read_script(script).flags) == found
    assert found["output"] == "/shared/my runs/sweep/slurm/%A_%a.out"
    assert found["constraint"] == "a&b"


@needs_sbatch
def test_sbatch_obeys_directives_of_other_schedulers_among_the_commands(tmp_path: Path) -> None:
    """Why setup lines may not begin with them. If this fails, Slurm has become milder."""
    script = render_script(_job()).replace("module load cuda\n", "module load cuda\n#BSUB -q other\n")
    assert sbatch_reads(script, tmp_path)[-2:] == ["-q", "other"]


@needs_sbatch
@settings(max_examples=40)
@given(jobs())
def test_sbatch_reads_what_we_read(tmp_path_factory: pytest.TempPathFactory, job: BatchJob) -> None:
    modest = dataclasses.replace(
        job.shape, num_nodes=1, tasks_per_node=1, cpus_per_task=1, gpus_per_node=min(job.shape.gpus_per_node, 1)
    )
    script = render_script(dataclasses.replace(job, shape=modest, array_parallelism=7))
    found = dict(
        word.removeprefix("--").partition("=")[::2] for word in sbatch_reads(script, tmp_path_factory.mktemp("sbatch"))
    )
    assert found["output"] == job.output
    assert found["job-name"] == job.job_name
    for key in ("partition", "qos", "constraint", "exclude", "account"):
        assert found.get(key) == getattr(modest, key)
