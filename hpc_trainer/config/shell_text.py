"""Scripts and modules that the text of `sh -c` in a command runs, as far as they can be read without a shell."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import PurePath

SCRIPTS = (".py", ".sh", ".bash", ".zsh", ".R", ".jl", ".pl", ".rb")
"""Ends of the names of files that a user edits and an interpreter runs."""
PYTHON = re.compile(r"python[0-9.]*")
_SHELLS = frozenset({"sh", "bash", "dash", "zsh", "ksh"})
_OPTION_C = re.compile(r"-[A-Za-z]*c[A-Za-z]*")
_TOKEN = re.compile(
    r"""(?P<comment>(?<!\S)\#[^\n]*)|(?P<redirect>\d*(?:>>|<<|>&|<&|&>|>|<)\|?)|(?P<end>&&|\|\||;;|[;|&()\n])"""
    r"""|(?P<word>(?:'[^']*'|"(?:\\.|[^"\\])*"|\\.|\$\{[^}]*\}|[^\s'"\\;|&()<>])+)""",
    re.DOTALL,
)
_ASSIGNMENT = re.compile(r"[A-Za-z_]\w*=")
# A further command begins after these words.
_BEFORE_COMMANDS = frozenset({"if", "then", "elif", "else", "while", "until", "do", "!", "time", "exec", "nohup", "{"})
_RUNNERS = _SHELLS | {
    "torchrun", "accelerate", "deepspeed", "mpirun", "mpiexec", "srun", "env", "nice", "timeout", "uv", "poetry",
    "conda", "pixi", "ipython", "Rscript", "julia", "perl", "ruby", "source", ".", "numactl", "taskset", "stdbuf",
    "xvfb-run",
}  # fmt: skip
_MOVES = frozenset({"cd", "pushd"})


@dataclass(slots=True)
class ShellRuns:
    """Scripts, modules and Pythons that a text for a shell runs. A place is the index of a character in the text."""

    scripts: list[tuple[int, int, str]] = field(default_factory=list)
    """Begin, end and name of each word that names a script."""
    modules: list[str] = field(default_factory=list)
    """Names of the modules after `python -m`."""
    pythons: list[int] = field(default_factory=list)
    """Ends of the words that name a Python before `-m`."""
    unclear: list[str] = field(default_factory=list)
    """Scripts whose files cannot be known: their names hold a variable, or the shell has changed its folder."""

    def names(self) -> list[str]:
        """Return the names of the programs: scripts without their suffixes, then modules without their packages."""
        scripts = [*(word for _, _, word in self.scripts), *(raw.strip("'\"") for raw in self.unclear)]
        return [*(PurePath(word).stem for word in scripts), *(module.rpartition(".")[2] for module in self.modules)]


def place_of_text(words: Sequence[str]) -> int | None:
    """Return the index of the word that a shell reads as its commands, after `sh -c`; None if there is none."""
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
    """Find the scripts and modules that a text runs: the first one of each command that runs any."""
    runs = ShellRuns()
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
                runs.modules.append(words[place + 1][2] or "")
                if PYTHON.fullmatch(PurePath(words[place - 1][2] or "").name):
                    runs.pythons.append(words[place - 1][1])
                break
            if (plain or raw.strip("'\"")).endswith(SCRIPTS):
                if plain is None or (has_moved and not plain.startswith("/")):
                    runs.unclear.append(raw)
                else:
                    runs.scripts.append((begin, end, plain))
                break
    return runs


def plain_words(text: str) -> list[str]:
    """Return all words of a text in which neither a shell nor hpc-trainer would substitute anything."""
    return [word for command in _commands(text) for _, _, raw in command if (word := _plain(raw))]


def _commands(text: str) -> Iterator[list[tuple[int, int, str]]]:
    """Yield the words of each simple command with their places, without redirections."""
    words: list[tuple[int, int, str]] = []
    is_goal = False
    for token in _TOKEN.finditer(text):
        if token.lastgroup == "word":
            if not is_goal:
                words.append((token.start(), token.end(), token[0]))
            is_goal = False
        elif token.lastgroup == "redirect":
            is_goal = True
        elif token.lastgroup == "end":
            yield words
            words, is_goal = [], False
    yield words


def _plain(raw: str) -> str | None:
    """Return a word without its quotes; None if a shell or hpc-trainer would substitute something in it."""
    if any(sign in raw for sign in "$`*?{"):
        return None
    try:
        (word,) = shlex.split(raw) or [""]
    except ValueError:
        return None
    return word
