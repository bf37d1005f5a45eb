"""The text that `sh -c` reads in a command: which scripts and modules it runs. Read for what is plain; no shell."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import PurePath

SCRIPTS = (".py", ".sh", ".bash", ".zsh", ".R", ".jl", ".pl", ".rb")
"""How names end of files that a user edits and an interpreter runs."""
PYTHON = re.compile(r"python[0-9.]*")
_SHELLS = frozenset({"sh", "bash", "dash", "zsh", "ksh"})
_OPTION_C = re.compile(r"-[A-Za-z]*c[A-Za-z]*")
_TOKEN = re.compile(
    r"""(?P<comment>(?<!\S)\#[^\n]*)|(?P<redirect>\d*(?:>>|<<|>&|<&|&>|>|<)\|?)|(?P<end>&&|\|\||;;|[;|&()\n])"""
    r"""|(?P<word>(?:'[^']*'|"(?:\\.|[^"\\])*"|\\.|\$\{[^}]*\}|[^\s'"\\;|&()<>])+)""",
    re.DOTALL,
)
_ASSIGNMENT = re.compile(r"[A-Za-z_]\w*=")
# After these a further command begins.
_BEFORE_COMMANDS = frozenset({"if", "then", "elif", "else", "while", "until", "do", "!", "time", "exec", "nohup", "{"})
_RUNNERS = _SHELLS | {
    "torchrun", "accelerate", "deepspeed", "mpirun", "mpiexec", "srun", "env", "nice", "timeout", "uv", "poetry",
    "conda", "pixi", "ipython", "Rscript", "julia", "perl", "ruby", "source", ".", "numactl", "taskset", "stdbuf",
    "xvfb-run",
}  # fmt: skip
_MOVES = frozenset({"cd", "pushd"})


@dataclass(slots=True)
class ShellRuns:
    """Scripts, modules and Pythons that a text for a shell runs. Places are indices of characters in the text."""

    scripts: list[tuple[int, int, str]] = field(default_factory=list)
    """Begin, end and name of each word that names a script."""
    modules: list[str] = field(default_factory=list)
    """Names of the modules after `python -m`."""
    pythons: list[int] = field(default_factory=list)
    """Where the word of a Python ends that `-m` follows."""
    unclear: list[str] = field(default_factory=list)
    """Scripts of which the file cannot be known: their names hold a variable, or the shell has changed its folder."""

    def names(self) -> list[str]:
        """Return what its programs are called: scripts without their ends, then modules without their packages."""
        scripts = [*(word for _, _, word in self.scripts), *(raw.strip("'\"") for raw in self.unclear)]
        return [*(PurePath(word).stem for word in scripts), *(each.rpartition(".")[2] for each in self.modules)]


def place_of_text(words: Sequence[str]) -> int | None:
    """Return the place of the word that a shell reads as its commands, after `sh -c`; None if there is none."""
    for place, word in enumerate(words):
        if PurePath(word).name not in _SHELLS:
            continue
        rest = place + 1
        is_text = False
        while rest < len(words) and words[rest][:1] in "-+" and len(words[rest]) > 1:
            is_text = is_text or _OPTION_C.fullmatch(words[rest]) is not None
            takes_name = words[rest].endswith("o") and not words[rest].startswith("--")
            rest += 2 if takes_name else 1
        if is_text and rest < len(words):
            return rest
    return None


def runs_of(text: str) -> ShellRuns:
    """Read which scripts and modules a text runs: the first script of each command that runs one."""
    found = ShellRuns()
    has_moved = False
    for command in _commands(text):
        words = [(begin, end, _plain(raw), raw) for begin, end, raw in command]
        while words and (_ASSIGNMENT.match(words[0][3]) or words[0][3] in _BEFORE_COMMANDS):
            words = words[1:]
        if not words:
            continue
        name = PurePath(words[0][2] or "").name
        is_script = "/" in words[0][3] and words[0][3].endswith(SCRIPTS)
        if not is_script and not (PYTHON.fullmatch(name) or name in _RUNNERS):
            has_moved = has_moved or name in _MOVES
            continue
        for place, (begin, end, plain, raw) in enumerate(words):
            if raw == "-m" and place and place + 1 < len(words) and words[place + 1][2]:
                found.modules.append(words[place + 1][2] or "")
                if PYTHON.fullmatch(PurePath(words[place - 1][2] or "").name):
                    found.pythons.append(words[place - 1][1])
                break
            if (plain or raw.strip("'\"")).endswith(SCRIPTS):
                if plain is None or (has_moved and not plain.startswith("/")):
                    found.unclear.append(raw)
                else:
                    found.scripts.append((begin, end, plain))
                break
    return found


def plain_words(text: str) -> list[str]:
    """Return all words of a text that hold nothing which a shell or we would put in."""
    return [word for command in _commands(text) for _, _, raw in command if (word := _plain(raw))]


def _commands(text: str) -> Iterator[list[tuple[int, int, str]]]:
    """Yield the words of each simple command with their places, without what is redirected."""
    words: list[tuple[int, int, str]] = []
    is_goal = False
    for found in _TOKEN.finditer(text):
        if found.lastgroup == "word":
            if not is_goal:
                words.append((found.start(), found.end(), found[0]))
            is_goal = False
        elif found.lastgroup == "redirect":
            is_goal = True
        elif found.lastgroup == "end":
            yield words
            words, is_goal = [], False
    yield words


def _plain(raw: str) -> str | None:
    """Return a word without its quotes; None if a shell would put something into it, or we would."""
    if any(sign in raw for sign in "$`*?{"):
        return None
    try:
        (word,) = shlex.split(raw) or [""]
    except ValueError:
        return None
    return word
