"""What is read back from a batch script, and that no other script than the one asked for gets past the check."""

from __future__ import annotations

import dataclasses
import functools
import random
import re
import shutil
import subprocess
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from submitit.slurm.slurm import SlurmExecutor

from hpc_trainer.config import script_words as words
from hpc_trainer.errors import SubmitError
from hpc_trainer.launch.script import SBATCH_KEYS, ScriptRequest, check_script, parse_script
from hpc_trainer.launch.submitit_bridge import render_script, worker_command
from hpc_trainer.runs.spec import Shape
from tests.unit.slurm.fake_slurm import FakeSlurm

UUID = "0123456789abcdef0123456789abcdef"

# --- requests of every kind that validation lets through ---


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
def requests(draw: st.DrawFn) -> ScriptRequest:
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
    request = ScriptRequest(
        shape=draw(shapes()),
        folder=sweep / "slurm",
        job_name=name,
        uuid=uuid,
        num_elements=None if is_successor else draw(st.integers(1, 10_000)),
        array_parallelism=None if is_successor else draw(_COUNT),
        setup=tuple(setup),
        srun_args=tuple(each for each in srun_args if not list(words.srun_problem(each))),
        command=tuple(worker_command(sweep, ["--run", name] if is_successor else ["--array", uuid], python)),
        exit_codes=draw(st.sampled_from([(), ((75, 79),), ((74, 80), (76, 81), (78, 125))])),
    )
    assert not list(words.folder_problem(runs_dir)), "validation lets this folder through"
    return request


@settings(derandomize=True, max_examples=300, deadline=None)
@given(requests())
def test_every_script_reads_back_as_the_request_that_made_it(request: ScriptRequest) -> None:
    text = render_script(request)
    found = parse_script(text)
    wanted = request.as_rendered()
    assert found == wanted
    same = dataclasses.replace(wanted.shape, gpu_type=None, gpu_request="")
    for key in ("mem_gb_per_node", "mem_gb_per_gpu", "mem_gb_per_cpu"):
        have, want = getattr(found.shape, key), getattr(request.shape, key)
        assert (have is None) == (want is None)
        assert have is None or abs(have - want) <= 0.5 / 1024, "whole megabytes"
        same = dataclasses.replace(same, **{key: getattr(request.shape, key)})
    assert same == dataclasses.replace(request.shape, gpu_type=None, gpu_request="")
    if request.shape.gpus_per_node:
        assert (found.shape.gpu_type, found.shape.gpu_request) == (request.shape.gpu_type, request.shape.gpu_request)
    assert found.sweep_dir == request.folder.parent
    assert parse_script(text + "\n") == found, "`plan` prints it with another line end"


# --- no other script passes ---


@functools.cache
def _request() -> ScriptRequest:
    sweep = Path("/shared/my runs/sweep")
    return ScriptRequest(
        shape=Shape(
            num_nodes=2, tasks_per_node=4, gpus_per_node=4, cpus_per_task=8, mem_gb_per_node=None, mem_gb_per_gpu=60.0,
            mem_gb_per_cpu=None, gpu_type="a100", partition="gpu", qos="high", constraint="a&b", exclude="n[1-2]",
            account="lab", time_limit_min=60, signal_lead_s=120,
        ),
        folder=sweep / "slurm", job_name="sweep", uuid=UUID, num_elements=10, array_parallelism=4,
        setup=("module load cuda", "echo 'x y'"), srun_args=("--cpu-bind=cores",),
        command=tuple(worker_command(sweep, ["--array", UUID], "python3")),
    )  # fmt: skip


@functools.cache
def _text() -> str:
    return render_script(_request())


DIRECTIVES = [line for line in _text().splitlines() if line.startswith("#SBATCH")]
REPLACED = [
    # A line that another release might write, or that somebody might smuggle in.
    ("#SBATCH --requeue", "#SBATCH --requeue\n#SBATCH --uid=0", "no directive of ours"),
    ("#SBATCH --requeue", "#SBATCH --requeue\n#SBATCH --wrap=id", "no directive of ours"),
    ("#SBATCH --requeue", "#SBATCH --requeue\n#SBATCH --export=NONE", "no directive of ours"),
    ("#SBATCH --requeue", "#SBATCH --requeue\n#SBATCH --wckey=submitit", "no directive of ours"),
    ("#SBATCH --requeue", "#SBATCH --requeue --uid=0", "no directive of ours"),
    ("#SBATCH --requeue", "#SBATCH --requeue=1", "takes no value"),
    ("#SBATCH --requeue", "#SBATCH --no-requeue", "no directive of ours"),
    ("#SBATCH --requeue", "#SBATCH\t--requeue", "control characters"),
    ("#SBATCH --requeue", "#PBS -q other\n#SBATCH --requeue", "no directive of ours"),
    ("#SBATCH --requeue", "#BSUB -q other\n#SBATCH --requeue", "no directive of ours"),
    ("#SBATCH --requeue", "#SBATCH --requeue\n#SBATCH --requeue", "requeue is given twice"),
    ("#SBATCH --requeue", "#SBATCH --requeue\n#SBATCH --mem=1M", "exclude each other"),
    ("#SBATCH --requeue", "#SBATCH --requeue\n#SBATCH --gres=gpu:4", "exclude each other"),
    ("--partition=gpu\n", "--partition=gpu --uid=0\n", "one directive a line"),
    ("--partition=gpu\n", "--partition=gpu#x\n", "one directive a line"),
    ("--partition=gpu\n", "--partition=\n", "one directive a line"),
    ("--partition=gpu\n", "--partition='gpu\n", "No closing quotation"),
    ("--partition=gpu\n", "--partition='a b'\n", "'a b' is no value of --partition"),
    ("--partition=gpu\n", "--partition='$(id)'\n", "is no value of --partition"),
    ("--partition=gpu\n", "--partition=other\n", "shape is"),
    ("--partition=gpu\n", "--partition gpu\n", "no directive of ours"),
    ("--output='/shared/my runs", "--output='/shared/my %u runs", "is no value of --output"),
    ("--output='/shared/my runs", "--output='/shared/my\\\\runs", "one directive a line"),
    ("--output='/shared/my runs", "--output='/else where", "must begin with srun"),
    ("--nodes=2\n", "--nodes=0\n", "'0' is no value of --nodes"),
    ("--nodes=2\n", "--nodes=2-4\n", "'2-4' is no value of --nodes"),
    ("--time=60\n", "--time=1-00\n", "is no value of --time"),
    ("--mem-per-gpu=61440M\n", "--mem-per-gpu=0M\n", "is no value of --mem-per-gpu"),
    ("--signal=USR2@120\n", "--signal=B:USR2@120\n", "is no value of --signal"),
    ("--open-mode=append\n", "--open-mode=truncate\n", "is no value of --open-mode"),
    ("--array=0-9%4\n", "--array=0-9\n", "is no value of --array"),
    ("--array=0-9%4\n", "--array=0-8%4\n", "num_elements is 9, not 10"),
    (f"--comment={UUID}\n", "--comment=other\n", "the worker's --array must be the comment"),
    ("#!/bin/bash\n", "#!/bin/sh\n", "begins with #!/bin/bash"),
    ("#!/bin/bash\n", "#!/bin/bash -l\n", "begins with #!/bin/bash"),
    ("# Parameters\n", "# Parameters\necho early\n", "--comment is missing"),
    ("export SRUN_CPUS_PER_TASK=$SLURM_CPUS_PER_TASK\n", "", "the first commands must be"),
    ("export SRUN_CPUS_PER_TASK=$SLURM_CPUS_PER_TASK\n", "export SRUN_CPUS_PER_TASK=1\n", "the first commands must be"),
    ("export HPC_TRAINER_JOB_START=$(date +%s)\n", "", "the first commands must be"),
    ("module load cuda\n", "module load cuda\n#BSUB -q other\n", "has no place among commands"),
    ("module load cuda\n", "module load cuda\ntouch pwned\n", "setup is"),
    ("module load cuda\n", "", "setup is"),
    ("export SUBMITIT_EXECUTOR=slurm\n", "export SUBMITIT_EXECUTOR=slurm\ntouch pwned\n", "must follow"),
    ("export SUBMITIT_EXECUTOR=slurm\n", "", "must follow"),
    ("srun --unbuffered ", "srun ", "must begin with srun"),
    ("srun --unbuffered ", "srun --unbuffered --uid=0 ", "must begin with srun"),
    ("srun --unbuffered ", "srun  --unbuffered ", "a word is not quoted"),
    (" --kill-on-bad-exit=1 ", " --kill-on-bad-exit=0 ", "must begin with srun"),
    (" --cpu-bind=cores ", " --cpu-bind=cores --uid=0 ", "srun_args is"),
    (" --cpu-bind=cores ", " bash ", "srun would run any other word"),
    (" -- python3 ", " python3 ", "hold -- before the worker"),
    (" -- python3 ", " -- $PYTHON ", "a word is not quoted"),
    (" -- python3 ", " -- sh ", "command is"),
    (" -- python3 -u ", " -- python3 ", "no command of a worker"),
    (" --array 0123", " ; touch pwned; --array 0123", "a word is not quoted"),
    (f" --array {UUID}", f" --array {UUID} --run x", "the worker takes --sweep-dir DIR, and --array UUID"),
    (f" --array {UUID}", "", "the worker takes --sweep-dir DIR, and --array UUID"),
    (f" --array {UUID}", f" --array {UUID} &", "a word is not quoted"),
    (f" --array {UUID}\n", f" --array {UUID}\nscancel $SLURM_JOB_ID\n", "no line of ours after the ranks"),
    (f" --array {UUID}\n", f" --array {UUID}\nsrun true\n", "must follow"),
    ("set +e\n", "", "must follow"),
    ("code=$?\n", "code=0\n", "no line of ours after the ranks"),
    ("exit $code\n", "exit 0\n", "no line of ours after the ranks"),
    ("exit $code\n", "exit $code\ntrue\n", "no line of ours after the ranks"),
    ("exit $code\n", "case $code in 75) code=0;; esac\nexit $code\n", "exit_codes is ((75, 0),), not ()"),
    ("exit $code\n", "case $code in 75) code=79;; *) id;; esac\nexit $code\n", "no line of ours after the ranks"),
    ("requeue Incomplete", "requeue", "no line of ours after the ranks"),
    ("echo 'x y'\n", "echo 'x\u2028y'\n", "control characters"),
    ("echo 'x y'\n", "echo 'x\ry'\n", "control characters"),
    ("echo 'x y'\n", "echo 'x\x00y'\n", "control characters"),
    ("echo 'x y'\n", "echo 'x\udce9y'\n", "not all of it can be written as UTF-8"),
    ("echo 'x y'\n", f"echo '{'x' * 2**22}'\n", "max_script_size"),
    ("/sweep' --array", f"/{'x' * 2**17}' --array", "longer than 131071 bytes"),
]  # fmt: skip


@pytest.mark.parametrize(("old", "new", "message"), REPLACED, ids=range(len(REPLACED)))
def test_another_script_is_refused(old: str, new: str, message: str) -> None:
    assert _text().count(old) == 1, "the case finds its place"
    with pytest.raises(SubmitError, match=re.escape(message)) as caught:
        check_script(_text().replace(old, new), _request())
    assert len(str(caught.value)) < 3000


@pytest.mark.parametrize("line", DIRECTIVES)
def test_a_missing_directive_is_refused(line: str) -> None:
    with pytest.raises(SubmitError):
        check_script(_text().replace(f"{line}\n", ""), _request())


def test_no_random_change_of_a_script_passes() -> None:
    """3,000 scripts with a character put in, taken out or changed: either the same request, or refused.

    What may change is what neither sbatch nor bash reads: comments and empty lines above the first command.
    """
    seed = 20261121
    chance, passed = random.Random(seed), 0
    alphabet = "#-=%'\"\\$;&|`()<> \n\tx0é\u2028"
    for number in range(3000):
        at = chance.randrange(len(_text()) + 1)
        kept = chance.choice((at, at + 1))
        changed = _text()[:at] + chance.choice(alphabet + "\x00") * chance.choice((0, 1)) + _text()[kept:]
        if changed.rstrip("\n") == _text().rstrip("\n"):
            continue
        try:
            check_script(changed, _request())
        except SubmitError:
            continue
        passed += 1
        same = [line for line in changed.splitlines() if line and not line.startswith("# ")]
        wanted = [line for line in _text().splitlines() if line and not line.startswith("# ")]
        assert same == wanted, f"seed {seed}, change {number} at {at}"
    assert passed < 300, f"seed {seed}: {passed} passed"


def test_what_submitit_renders_is_checked_before_anything_is_written(
    tmp_path: Path, fake_slurm: FakeSlurm, monkeypatch: pytest.MonkeyPatch
) -> None:
    render = SlurmExecutor._make_submission_file_text

    def of_another_release(self: SlurmExecutor, command: str, uid: str) -> str:
        return str(render(self, command, uid)).replace("#SBATCH --requeue", "#SBATCH --requeue\n#SBATCH --new-thing=1")

    monkeypatch.setattr(SlurmExecutor, "_make_submission_file_text", of_another_release)
    sweep = tmp_path / "sweep"
    request = dataclasses.replace(
        _request(), folder=sweep / "slurm", command=tuple(worker_command(sweep, ["--array", UUID], "python3"))
    )
    with pytest.raises(SubmitError, match=r"'#SBATCH --new-thing=1': no directive of ours.*Nothing was submitted"):
        render_script(request)
    assert not sweep.exists()


def test_the_signal_does_not_come_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """submitit reads SUBMITIT_PREEMPT_SIGNAL when it is imported; a job started by submitit may have it."""
    monkeypatch.setattr("submitit.slurm.slurm.SlurmJobEnvironment.USR_SIG", "USR1")
    assert render_script(_request()) == _text()


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


needs_sbatch = pytest.mark.skipif(shutil.which("sbatch") is None, reason="sbatch is not installed")


@needs_sbatch
@pytest.mark.parametrize(
    "setup", [(), ("# SBATCH --uid=0", "echo '#SBATCH --uid=0'", "cat <<E", "# PBS -q x", "E", "")]
)
def test_sbatch_finds_the_directives_and_no_others(tmp_path: Path, setup: tuple[str, ...]) -> None:
    script = render_script(dataclasses.replace(_request(), setup=setup))
    found = dict(word.removeprefix("--").partition("=")[::2] for word in sbatch_reads(script, tmp_path))
    assert set(found) <= set(SBATCH_KEYS)
    assert found["output"] == "/shared/my runs/sweep/slurm/%A_%a.out"
    assert found["constraint"] == "a&b"
    assert len(found) == len(DIRECTIVES)


@needs_sbatch
def test_sbatch_obeys_directives_of_other_schedulers_among_the_commands(tmp_path: Path) -> None:
    """Why setup lines may not begin with them. If this fails, Slurm has become milder."""
    script = _text().replace("module load cuda\n", "module load cuda\n#BSUB -q other\n")
    assert sbatch_reads(script, tmp_path)[-2:] == ["-q", "other"]


@needs_sbatch
@settings(derandomize=True, max_examples=40, deadline=None)
@given(requests())
def test_sbatch_reads_what_we_read(tmp_path_factory: pytest.TempPathFactory, request: ScriptRequest) -> None:
    modest = dataclasses.replace(
        request.shape, num_nodes=1, tasks_per_node=1, cpus_per_task=1, gpus_per_node=min(request.shape.gpus_per_node, 1)
    )
    script = render_script(dataclasses.replace(request, shape=modest, array_parallelism=7))
    found = dict(
        word.removeprefix("--").partition("=")[::2] for word in sbatch_reads(script, tmp_path_factory.mktemp("sbatch"))
    )
    assert found["output"] == request.output
    assert found["job-name"] == request.job_name
    for key in ("partition", "qos", "constraint", "exclude", "account"):
        assert found.get(key) == getattr(modest, key)
