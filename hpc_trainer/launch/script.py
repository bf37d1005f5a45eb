"""The batch script read back: what it asks of sbatch and what it starts, or an error for anything that we do not know.

submitit renders scripts by private functions, so another release could render something else. Every script passes
`check_script` before it is shown or handed to sbatch: it must say exactly what was asked for, and nothing besides.
"""

from __future__ import annotations

import dataclasses
import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

from hpc_trainer.config import script_words as words
from hpc_trainer.errors import SubmitError
from hpc_trainer.runs.spec import Shape
from hpc_trainer.runs.states import CANCEL
from hpc_trainer.runtime.pace import JOB_START
from hpc_trainer.runtime.start import start_words

# Slurm 22.05 to 23.02: srun does not take over --cpus-per-task of the job by itself.
EXPORT_CPUS = "export SRUN_CPUS_PER_TASK=$SLURM_CPUS_PER_TASK"
# Slurm 22.05 does not tell a job when it began, and the worker must know when it will end.
EXPORT_START = f"export {JOB_START}=$(date +%s)"
# A person's setup may say `set -e`: the lines after srun must be reached all the same.
GO_ON = "set +e"
# One file an element for the batch shell and all tasks: ranks write logs of their own in the run's folder.
ARRAY_OUTPUT, JOB_OUTPUT = "%A_%a.out", "%j.out"
SRUN_OPTIONS = ("--open-mode=append", "--kill-on-bad-exit=1")
WORKER = start_words("hpc_trainer.worker")
TOP_UP = (*start_words("hpc_trainer"), "top-up")
# slurm.conf: SchedulerParameters=max_script_size, 4 MiB by default. execve takes 128 KiB as one argument.
_MAX_SCRIPT_BYTES = 4 * 2**20
_MAX_ARGUMENT_BYTES = 2**17 - 1

_ARCHIVE = re.compile(r"/.*/code/[0-9a-f]{12}\.zip")
_COUNT = r"[1-9][0-9]{0,15}"
_GPUS = rf"(?:(?P<type>{words.GPU_TYPE.pattern.pattern}):)?(?P<count>{_COUNT})"
_MEMORY = re.compile(rf"(?P<mb>{_COUNT})M")
_SHAPE_WORDS = {
    "account": words.ACCOUNT,
    "constraint": words.CONSTRAINT,
    "exclude": words.HOSTS,
    "partition": words.PARTITION,
    "qos": words.QOS,
}
_MEMORY_KEYS = {"mem", "mem-per-gpu", "mem-per-cpu"}
_GPU_KEYS = {"gpus-per-node": "gpus_per_node", "gres": "gres"}
# The allow-list: every key that a script of ours may hold, and how its value looks.
SBATCH_KEYS: Mapping[str, re.Pattern[str]] = {
    "array": re.compile(rf"0-(?P<last>0|{_COUNT})%(?P<parallel>{_COUNT})"),
    "comment": re.compile(r"[A-Za-z0-9]{1,64}"),
    "cpus-per-task": re.compile(_COUNT),
    "gpus-per-node": re.compile(_GPUS),
    "gres": re.compile(f"gpu:{_GPUS}"),
    "job-name": words.NAME.pattern,
    "nodes": re.compile(_COUNT),
    "ntasks-per-node": re.compile(_COUNT),
    "open-mode": re.compile("append"),
    "output": re.compile(rf"/[^%\\]*/(?:{ARRAY_OUTPUT}|{JOB_OUTPUT})"),
    "requeue": re.compile(""),
    "signal": re.compile(rf"USR2@(?P<lead>{_COUNT})"),
    "time": re.compile(_COUNT),
    **{key: word.pattern for key, word in _SHAPE_WORDS.items()},
    **dict.fromkeys(_MEMORY_KEYS, _MEMORY),
}
_OPTIONAL = {"array", *_SHAPE_WORDS, *_MEMORY_KEYS, *_GPU_KEYS}
_FLAGS = {"requeue"}


@dataclass(frozen=True, slots=True, kw_only=True)
class ScriptRequest:
    """One job array, one run's successor job, or one top-up job: what we ask for, and what its script reads back as."""

    shape: Shape
    folder: Path
    """Absolute folder of scripts and of what batch shells print."""
    job_name: str
    uuid: str
    """The intent's uuid: the job's comment, and the worker's --array."""
    num_elements: int | None
    """Elements of the array; None for a single job."""
    array_parallelism: int | None
    """Elements that may run at once; None for a single job."""
    setup: tuple[str, ...]
    srun_args: tuple[str, ...]
    command: tuple[str, ...]
    """The words of one rank: `PYTHON... -u -c START hpc_trainer.worker --sweep-dir DIR --array UUID` (of a successor
    job `--run RUN_ID`), or of a top-up job: `PYTHON... -u -c START hpc_trainer top-up DIR`."""
    exit_codes: tuple[tuple[int, int], ...] = ()
    """(ours, instead): exit codes that the site's RequeueExit has taken."""

    @property
    def tail(self) -> list[str]:
        """The lines after the one that starts the ranks."""
        return _tail(f"{self.folder}", self.num_elements is not None, self.exit_codes)

    @property
    def output(self) -> str:
        """Where sbatch and srun print to, in Slurm's patterns."""
        return f"{self.folder}/{JOB_OUTPUT if self.num_elements is None else ARRAY_OUTPUT}"

    @property
    def python(self) -> tuple[str, ...]:
        """Program and arguments before `-u -c START hpc_trainer.worker`, or before `-u` and the frozen code."""
        return self.command[: _find_worker(self.command)[0]]

    @property
    def archive(self) -> Path | None:
        """The frozen code that ranks start from."""
        start, end = _find_worker(self.command)
        return Path(self.command[end - 1]) if end - start == 2 else None

    @property
    def sweep_dir(self) -> Path:
        """The sweep's folder, as the worker is told."""
        return Path(_worker_options(self.command)["--sweep-dir"])

    def as_rendered(self) -> ScriptRequest:
        """The same request as a script can say it: whole megabytes, no more parallel elements than there are."""
        shape = self.shape
        return dataclasses.replace(
            self,
            shape=dataclasses.replace(
                shape,
                mem_gb_per_node=_whole(shape.mem_gb_per_node),
                mem_gb_per_gpu=_whole(shape.mem_gb_per_gpu),
                mem_gb_per_cpu=_whole(shape.mem_gb_per_cpu),
                gpu_type=shape.gpu_type if shape.gpus_per_node else None,
                gpu_request=shape.gpu_request if shape.gpus_per_node else "gpus_per_node",
            ),
            array_parallelism=None
            if self.num_elements is None
            else min(self.num_elements, self.array_parallelism or 1),
        )


def megabytes(gigabytes: float) -> int:
    """Memory as sbatch takes it, in whole MB."""
    return round(gigabytes * 1024)


def _whole(gigabytes: float | None) -> float | None:
    return None if gigabytes is None else megabytes(gigabytes) / 1024


def check_script(text: str, request: ScriptRequest) -> None:
    """Makes sure that the batch script is the one that was asked for.

    Raises:
        SubmitError: it holds anything unknown, or says something else; names the line or the field.
    """
    found, wanted = parse_script(text), request.as_rendered()
    for field in dataclasses.fields(wanted):
        have, want = getattr(found, field.name), getattr(wanted, field.name)
        if have != want:
            raise SubmitError(
                f"the batch script is not the one asked for: {field.name} is {have!r}, not {want!r}.{_FIX}"
            )


def parse_script(text: str) -> ScriptRequest:
    """The request that a batch script of ours was made from (P6), in the form of `ScriptRequest.as_rendered`.

    Raises:
        SubmitError: a line or value that no script of ours holds.
    """
    lines = _lines(text)
    directives, start = _directives(lines)
    array = _matched("array", directives) if "array" in directives else {}
    output = ARRAY_OUTPUT if array else JOB_OUTPUT
    folder, name = directives["output"].rsplit("/", 1)
    if name != output:
        _refuse(0, "", f"--output must end with /{output}")
    setup, number = _body(lines, start)
    srun_args, command = _srun_line(number, lines[number - 1], folder, output)
    uuid = directives["comment"]
    if array and _worker_options(command).get("--array") != uuid:
        _refuse(number, lines[number - 1], f"the worker's --array must be the comment {uuid}")
    is_top_up = tuple(command[-len(TOP_UP) - 1 : -1]) == TOP_UP
    if not array and not is_top_up and "--run" not in _worker_options(command):
        _refuse(number, lines[number - 1], f"a job that is no array must run a worker's --run, or {shlex.join(TOP_UP)}")
    exit_codes = _exit_codes(lines[number:])
    if lines[number:] != _tail(folder, bool(array), exit_codes):
        _refuse(number + 1, lines[number] if number < len(lines) else "", "no line of ours after the ranks")
    return ScriptRequest(
        shape=_shape(directives),
        folder=Path(folder),
        job_name=directives["job-name"],
        uuid=uuid,
        num_elements=int(array["last"] or 0) + 1 if array else None,
        array_parallelism=int(array["parallel"] or 0) if array else None,
        setup=tuple(setup),
        srun_args=srun_args,
        command=command,
        exit_codes=exit_codes,
    )


def _tail(folder: str, is_array: bool, exit_codes: Sequence[tuple[int, int]]) -> list[str]:
    """What the batch shell does when the ranks have left: the requeue that a worker asked it for, and the exit code."""
    job = "${SLURM_ARRAY_JOB_ID}_${SLURM_ARRAY_TASK_ID}" if is_array else "${SLURM_JOB_ID}"
    cases = "".join(f" {ours}) code={instead};;" for ours, instead in exit_codes)
    return [
        "code=$?",
        f'request={shlex.quote(f"{folder}/requeue-")}"{job}-${{SLURM_RESTART_COUNT:-0}}"',
        # rm first: a request is for this incarnation alone. It names the run's folder: the marker is read last.
        f'if run=$(cat -- "$request" 2> /dev/null); then rm -f -- "$request"; '
        f'[ -e "$run/{CANCEL}" ] || scontrol requeue Incomplete "{job}"; fi',
        *([f"case $code in{cases} esac"] if cases else []),
        "exit $code",
    ]


def _exit_codes(tail: Sequence[str]) -> tuple[tuple[int, int], ...]:
    case = next((line for line in tail if line.startswith("case ")), "")
    return tuple((int(ours), int(instead)) for ours, instead in re.findall(r" (\d{1,3})\) code=(\d{1,3});;", case))


_FIX = " Nothing was submitted. Is this submitit version one that hpc_trainer supports (constraints.txt)?"


def _refuse(number: int, line: str, why: str) -> NoReturn:
    where = f", line {number}, {line[:200]!r}" if number else ""
    raise SubmitError(f"batch script{where}: {why.rstrip('.')}.{_FIX}")


def _lines(text: str) -> list[str]:
    try:
        size = len(text.encode())
    except UnicodeEncodeError as error:
        _refuse(0, "", f"not all of it can be written as UTF-8: {error.reason} at {error.start}")
    if size > _MAX_SCRIPT_BYTES:
        _refuse(0, "", f"{size} bytes, and Slurm takes {_MAX_SCRIPT_BYTES} (max_script_size)")
    lines = text.rstrip("\n").split("\n")
    for number, line in enumerate(lines, 1):
        if words.has_control(line):
            _refuse(number, line, "control characters have no place in a script")
    return lines


def _directives(lines: Sequence[str]) -> tuple[dict[str, str], int]:
    """The values of the #SBATCH lines, and the index of the first command."""
    if lines[0] != "#!/bin/bash":
        _refuse(1, lines[0], "a script of ours begins with #!/bin/bash")
    found: dict[str, str] = {}
    start = next((index for index, line in enumerate(lines) if line and not line.startswith("#")), len(lines))
    for number, line in enumerate(lines[1:start], 2):
        if line and not line.startswith("# "):
            key, value = _directive(number, line)
            if key in found:
                _refuse(number, line, f"{key} is given twice")
            found[key] = value
    missing = SBATCH_KEYS.keys() - _OPTIONAL - found.keys()
    if missing:
        _refuse(0, "", f"--{min(missing)} is missing")
    for group in (_MEMORY_KEYS, _GPU_KEYS.keys()):
        several = sorted(found.keys() & group)
        if len(several) > 1:
            _refuse(0, "", f"--{' and --'.join(several)} exclude each other: Slurm takes one")
    return found, start


def _directive(number: int, line: str) -> tuple[str, str]:
    match = re.fullmatch(r"#SBATCH --([a-z][a-z-]*)(=.*)?", line)
    if not match or match[1] not in SBATCH_KEYS:
        _refuse(number, line, f"no directive of ours. They are: {', '.join(sorted(SBATCH_KEYS))}")
    key, quoted = match[1], (match[2] or "")[1:]
    if key in _FLAGS:
        if match[2] is not None:
            _refuse(number, line, "takes no value")
        return key, ""
    value = _unquote(number, line, quoted)
    if len(value) > words.MAX_WORD_LENGTH or not SBATCH_KEYS[key].fullmatch(value):
        _refuse(number, line, f"{value!r} is no value of --{key}")
    return key, value


def _unquote(number: int, line: str, quoted: str) -> str:
    """The one word that sbatch reads. Backslashes, which it treats unlike a shell, are refused."""
    try:
        found = shlex.split(quoted)
    except ValueError as error:
        _refuse(number, line, str(error))
    if len(found) != 1 or quoted != shlex.quote(found[0]) or "\\" in quoted:
        _refuse(number, line, "one directive a line, and its value one word in plain quotes")
    return found[0]


def _matched(key: str, directives: Mapping[str, str]) -> dict[str, str | None]:
    match = SBATCH_KEYS[key].fullmatch(directives[key])
    assert match, key  # _directive has looked
    return match.groupdict()


def _shape(directives: Mapping[str, str]) -> Shape:
    gpu_key = next((key for key in _GPU_KEYS if key in directives), None)
    gpus = _matched(gpu_key, directives) if gpu_key else {}
    return Shape(
        num_nodes=int(directives["nodes"]),
        tasks_per_node=int(directives["ntasks-per-node"]),
        gpus_per_node=int(gpus.get("count") or 0),
        cpus_per_task=int(directives["cpus-per-task"]),
        mem_gb_per_node=_gigabytes("mem", directives),
        mem_gb_per_gpu=_gigabytes("mem-per-gpu", directives),
        mem_gb_per_cpu=_gigabytes("mem-per-cpu", directives),
        gpu_type=gpus.get("type"),
        partition=directives.get("partition"),
        qos=directives.get("qos"),
        constraint=directives.get("constraint"),
        exclude=directives.get("exclude"),
        account=directives.get("account"),
        time_limit_min=int(directives["time"]),
        signal_lead_s=int(_matched("signal", directives)["lead"] or 0),
        gpu_request=_GPU_KEYS[gpu_key] if gpu_key else "gpus_per_node",
    )


def _gigabytes(key: str, directives: Mapping[str, str]) -> float | None:
    return int(_matched(key, directives)["mb"] or 0) / 1024 if key in directives else None


def _body(lines: Sequence[str], start: int) -> tuple[list[str], int]:
    """The setup lines, which may hold any shell, and the number of the line that starts the ranks."""
    for index, command in enumerate((EXPORT_CPUS, EXPORT_START), start):
        line = lines[index] if index < len(lines) else ""
        if line != command:
            _refuse(index + 1, line, f"the first commands must be {EXPORT_CPUS} and {EXPORT_START}")
    # From the end: setup is any shell, and might hold lines that look like ours.
    number = max((index for index, line in enumerate(lines, 1) if line.startswith("srun ")), default=len(lines))
    frame = [GO_ON, "", "# command", "export SUBMITIT_EXECUTOR=slurm"]
    last = number - 1 - len(frame)
    if last <= start + 1 or list(lines[last : number - 1]) != frame:
        _refuse(number, lines[number - 1], f"the line that starts the ranks must follow {frame[1:]}")
    for index, line in enumerate(lines[start:last], start + 1):
        for problem in words.setup_problem(line):
            _refuse(index, line, problem)
    return list(lines[start + 2 : last]), number


def _srun_line(number: int, line: str, folder: str, output: str) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """The further arguments of srun, and the words of the command."""
    try:
        found = shlex.split(line)
    except ValueError as error:
        _refuse(number, line, str(error))
    if line != shlex.join(found):
        _refuse(number, line, "a word is not quoted: bash would read more than words")
    if max(len(word.encode()) for word in found) > _MAX_ARGUMENT_BYTES:
        _refuse(number, line, f"a word is longer than {_MAX_ARGUMENT_BYTES} bytes")
    # submitit's own --output comes first; the last one counts.
    own = output.replace(".out", "_%t_log.out")
    given = ["srun", "--unbuffered", "--output", f"{folder}/{own}", "--output", f"{folder}/{output}", *SRUN_OPTIONS]
    if found[: len(given)] != given or "--" not in found:
        _refuse(number, line, f"must begin with {shlex.join(given)}, and hold -- before the worker")
    end = found.index("--")
    srun_args, command = found[len(given) : end], found[end + 1 :]
    for argument in srun_args:
        for problem in words.srun_problem(argument):
            _refuse(number, line, problem)
    try:
        if output == ARRAY_OUTPUT:
            _worker_options(command)
    except ValueError as error:
        _refuse(number, line, str(error))
    return tuple(srun_args), tuple(command)


def _find_worker(command: Sequence[str]) -> tuple[int, int]:
    """Where the words that start a worker begin and end: WORKER, or `-u ARCHIVE` with the frozen code."""
    for index in range(1, len(command)):
        if tuple(command[index : index + len(WORKER)]) == WORKER:
            return index, index + len(WORKER)
        if command[index - 1] == "-u" and _ARCHIVE.fullmatch(command[index]):
            return index - 1, index + 1
    raise ValueError(f"no command of a worker: PYTHON {shlex.join(WORKER)} ..., or PYTHON -u .../code/DIGEST.zip ...")


def _worker_options(command: Sequence[str]) -> dict[str, str]:
    """The worker's own options."""
    rest = command[_find_worker(command)[1] :]
    keys, values = rest[::2], rest[1::2]
    if list(keys) not in (["--sweep-dir", "--array"], ["--sweep-dir", "--run"]) or len(values) != len(keys):
        raise ValueError("the worker takes --sweep-dir DIR, and --array UUID or --run RUN_ID")
    return dict(zip(keys, values, strict=True))
