"""Patterns of the values allowed in a batch script, for validation and for jobs (launch/batch_job.py).

sbatch and bash read a script by different rules: in a directive a backslash escapes even inside single quotes and no
variable is expanded; `#PBS` and `#BSUB` lines count wherever they stand (tried on Slurm 22.05: a `#BSUB -q` among the
commands changed the partition). So values are words of few characters, and paths hold no character that sbatch or
bash interprets.
"""

from __future__ import annotations

import re
import shlex
import unicodedata
from collections.abc import Iterator
from typing import NamedTuple

# sbatch copies one argument of a directive into 8,192 bytes (BUFSIZ); the key takes some of them.
MAX_WORD_LENGTH = 8000
# execve takes this many bytes as one argument (MAX_ARG_STRLEN, 128 KiB with the final zero); with more srun would not
# start.
MAX_ARGUMENT_BYTES = 2**17 - 1
# PATH_MAX is 4,096 bytes, and a run's deepest file adds about 250 to the folder of sweeps.
MAX_FOLDER_BYTES = 3500


class Word(NamedTuple):
    """Kind of value: its pattern, and an example to show a user whose value does not fit."""

    pattern: re.Pattern[str]
    example: str

    def fits(self, value: str) -> bool:
        """Return True if the whole value is of this kind."""
        return len(value) <= MAX_WORD_LENGTH and bool(self.pattern.fullmatch(value))


NAME = Word(re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}"), "my-sweep")
PARTITION = Word(re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.:+@-]*(,[A-Za-z0-9_][A-Za-z0-9_.:+@-]*)*"), "gpu,gpu-long")
QOS = Word(re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.:+@,/-]*"), "qos_gpu-t3")
ACCOUNT = Word(re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.:+@%/-]*"), "abc@v100")
# A feature expression: and, or, counts, brackets and parentheses.
CONSTRAINT = Word(re.compile(r"[A-Za-z0-9_(\[][A-Za-z0-9_.:+@,%&|*()\[\]/=-]*"), "nvlink&[rack1|rack2]")
# No slash: sbatch takes a host list with a slash for a file name, and reads that file.
HOSTS = Word(re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.,\[\]-]*"), "gpu[001-004,007]")
GPU_TYPE = Word(re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]*"), "a100")
ADDRESS = Word(re.compile(r"[A-Za-z0-9_\[:][A-Za-z0-9_.:%\[\]-]*"), "10.0.0.1")
ENV_NAME = Word(re.compile(r"[A-Za-z_][A-Za-z0-9_]*"), "NCCL_SOCKET_IFNAME")
# An option that brings its value with it: srun would run a bare word in place of the worker.
SRUN_ARGUMENT = re.compile(r"--?[A-Za-z][^\s=]*(=.*)?")

# Characters that bash would expand or end a command at. cluster.python is words, not shell.
_SHELL = "$`;&|<>(){}*?!"
DIRECTIVES = ("#SBATCH", "#PBS", "#BSUB")
"""Beginnings of lines that sbatch obeys."""


def has_control(text: str) -> bool:
    """Return True if `text` holds what a line cannot: control or format characters, line separators, broken Unicode."""
    if text.isascii():  # nearly always; validation looks at every line of every point of a grid
        return not text.isprintable()
    return any(unicodedata.category(char) in ("Cc", "Cf", "Cs", "Zl", "Zp") for char in text)


def word_problem(key: str, value: str | None, word: Word) -> Iterator[str]:
    """Yield the problem with an optional value that becomes one word of a directive."""
    if value is not None and not word.fits(value):
        allowed = plain(value) or word.example
        yield (
            f"{key}={shown(value)} must be one plain word as Slurm takes it here, like {word.example}: no spaces, "
            f"quotes, line breaks or shell characters. Use {key}={allowed}."
        )


def plain(text: str) -> str:
    """Return the letters, digits, `_`, `.` and `-` of a text, at most 40, as a name to suggest; it may be empty."""
    return re.sub(r"[^A-Za-z0-9_.-]+", "", text)[:40].lstrip(".-")


def folder_problem(folder: str) -> Iterator[str]:
    """Yield the problem with the absolute folder of sweeps, a part of a directive and of the worker's command."""
    if has_control(folder) or "\\" in folder or "%" in folder:
        nearest = re.sub(r"[\\%]|[^\x20-\x7e]", "_", folder)
        yield (
            f"the folder of sweeps {shown(folder)} must hold no control characters, backslash or percent sign: "
            f"sbatch interprets them. Use paths.runs_dir={shlex.quote(nearest[:200])}, or a symbolic link."
        )
    elif len(folder.encode()) > MAX_FOLDER_BYTES or max(len(name.encode()) for name in folder.split("/")) > 255:
        yield (
            f"the folder of sweeps {shown(folder)} is too long: a name takes at most 255 bytes, and all of it at most "
            f"{MAX_FOLDER_BYTES}, to leave room for a run's files. Use a shorter paths.runs_dir."
        )


def argument_problem(key: str, argument: str) -> Iterator[str]:
    """Yield the problem with a word of the line that starts the ranks.

    The word is quoted, so it may hold shell characters.
    """
    if has_control(argument):
        yield f"{key} holds {shown(argument)}: an argument is one line without control characters."
    elif len(argument.encode()) > MAX_ARGUMENT_BYTES:
        yield (
            f"{key} holds {shown(argument)}: it is longer than the {MAX_ARGUMENT_BYTES} bytes that Linux accepts as "
            f"one "
            "argument."
        )


def setup_problem(line: str) -> Iterator[str]:
    """Yield the problem with one line of cluster.setup: shell code, so any single line is legal except a directive."""
    if has_control(line):
        yield f"cluster.setup holds {shown(line)}: each entry is one line without control characters."
    elif line.lstrip().startswith(DIRECTIVES):
        yield (
            f"cluster.setup holds {shown(line)}: sbatch directives are not allowed among commands (#SBATCH comes too "
            "late there, #PBS and #BSUB override the profile). Use the keys of hardware and cluster."
        )


def srun_problem(argument: str, key: str = "cluster.srun_args") -> Iterator[str]:
    """Yield the problem with one item of `key`, a list of options for the program that starts the worker."""
    wrong = list(argument_problem(key, argument))
    yield from wrong
    if not wrong and not SRUN_ARGUMENT.fullmatch(argument):
        program, example = ("srun", "--cpu-bind=cores") if key == "cluster.srun_args" else ("it", "--env=A=B")
        yield (
            f"{key} holds {shown(argument)}: each entry is one option with its value, as {example}; {program} would "
            "run any other argument instead of the worker."
        )


def python_problem(python: str) -> Iterator[str]:
    """Yield the problem with cluster.python: a program and its first arguments."""
    what = f"cluster.python={shown(python)}"
    wrong = list(argument_problem("cluster.python", python))
    if wrong:
        yield from wrong
        return
    shell = sorted(set(python) & set(_SHELL))
    if shell or "~" in python[:1]:
        yield (
            f"{what} is a program and its arguments, not shell: {' '.join(shell) or '~'} would not be expanded. Use "
            "${oc.env:HOME} for a variable, and cluster.setup for commands."
        )
        return
    try:
        arguments = shlex.split(python)
    except ValueError as error:
        yield f"{what}: {error}. Quote it as a shell would, or use python."
        return
    if not arguments or not arguments[0] or arguments[0].startswith("-"):
        yield f"{what} must begin with a program. Use python, or null for the Python that submits."


def shown(value: str) -> str:
    """Return a value as messages show it: quoted, and cut if it is long."""
    return repr(value if len(value) <= 120 else f"{value[:117]}...")
