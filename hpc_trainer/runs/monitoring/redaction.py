"""Takes secrets out of what is recorded of a run: variables, command lines, differences of code, addresses.

A secret is known by its name (`HF_TOKEN`, `api_key=..`), by its form (`hf_..`, `ghp_..`, a private key, a password in
a URL), or because a variable of this process that is named so has it as its value. What is found becomes `[redacted]`.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hpc_trainer.config.identity import CONFIDENTIAL_NAME

REDACTED = "[redacted]"

_VARIABLE = re.compile(r"TOKEN|KEY|SECRET|PASSW|PASSPHRASE|CREDENTIAL|AUTH|COOKIE|DSN|WEBHOOK", re.IGNORECASE)
# The end of a name, so that `num_tokens`, `tokenizer`, `token_dim` and `image_key` stay.
_NAME = rf"[\w.+~-]*?(?<![a-z]){CONFIDENTIAL_NAME}"
_SECRET_NAME = re.compile(_NAME, re.IGNORECASE)
# name = "text" in code and configuration: only quoted text is a value; a name of another variable is none.
_QUOTED = re.compile(rf"({_NAME}[\"']?\]?\s*[:=]\s*[rbfu]?)([\"'])([^\"'\s]{{4,}})\2", re.IGNORECASE)
# name=value without quotes, in a command line or a query; in code only a line that is nothing else, as of a .env file.
_PLAIN = re.compile(rf"(?<![\w.])({_NAME}=)([^\s\"',;&()\[\]{{}}]{{4,}})", re.IGNORECASE)
_LINE = re.compile(rf"^([+\- ]?(?:export )?{_NAME}[=:] ?)([^\s\"',;()\[\]{{}}]{{4,}})$", re.IGNORECASE | re.MULTILINE)
_URL = re.compile(r"(?<=://)[^/\s@\"'<>]+(?=@)")
_FORMS = re.compile(
    r"\bhf_[A-Za-z0-9]{16,}|\bgh[pousr]_[A-Za-z0-9]{16,}|\bgithub_pat_\w{20,}|\bglpat-[\w-]{16,}|\bsk-[\w-]{16,}"
    r"|\b(?:AKIA|ASIA)[0-9A-Z]{16}\b|\bxox[abeprs]-[\w-]{10,}|\bAIza[\w-]{30,}|\bnpm_[A-Za-z0-9]{30,}|\bpypi-[\w-]{30,}"
    r"|\bey[JK][\w-]{8,}\.ey[\w-]{8,}\.[\w-]+|\bdop_v1_[0-9a-f]{32,}"
    r"|(?<=[Bb]earer )[\w.~+/=-]{8,}"
)
_PRIVATE_KEY = re.compile(r"(-----BEGIN [A-Z ]*PRIVATE KEY-----)(.*?)(?=-----END|\Z)", re.DOTALL)
_LEAST = 8
"""Letters of a secret variable's value that is looked for elsewhere: `1` and `true` stand everywhere."""


@dataclass(slots=True)
class Redaction:
    """Redacts what it is given, and counts."""

    known: Sequence[str] = ()
    """Values of secrets that are known, the longest first."""
    count: int = 0

    @classmethod
    def of_process(cls, environ: Mapping[str, str] = os.environ) -> Redaction:
        """Knows the values of this process's variables that are named as secrets are."""
        values = {value for name, value in environ.items() if _VARIABLE.search(name) and len(value) >= _LEAST}
        return cls(sorted((each for each in values if not _is_plain(each)), key=len, reverse=True))

    def text(self, text: str) -> str:
        """A text without what looks like a secret; it keeps its lines."""
        return self._sub(_PLAIN, _without_value, self.code(text))

    def code(self, text: str) -> str:
        """The same for code, where `token=value` mostly names a variable."""
        for value in self.known:
            if value in text:
                self.count += text.count(value)
                text = text.replace(value, REDACTED)
        text = self._sub(_PRIVATE_KEY, lambda found: found[1] + "\n" * found[2].count("\n") + REDACTED, text)
        text = self._sub(_URL, lambda _: REDACTED, text)
        text = self._sub(_FORMS, lambda _: REDACTED, text)
        text = self._sub(_QUOTED, lambda found: f"{found[1]}{found[2]}{REDACTED}{found[2]}", text)
        return self._sub(_LINE, _without_value, text)

    def words(self, words: Iterable[str]) -> list[str]:
        """A command line: also the value after `--token`, and `NAME=VALUE` however it is written."""
        found: list[str] = []
        is_next = False
        for word in words:
            name, sign, value = word.partition("=")
            is_secret = _SECRET_NAME.fullmatch(name.lstrip("-")) is not None
            if is_next and not word.startswith("-"):
                self.count += 1
                found.append(REDACTED)
            elif sign and is_secret and not _is_plain(value):
                self.count += 1
                found.append(f"{name}={REDACTED}")
            else:
                found.append(self.text(word))
            is_next = not sign and is_secret and word.startswith("-")
        return found

    def variables(self, variables: Mapping[str, str]) -> dict[str, str]:
        """Names stay, values of those named as secrets do not."""
        found = {}
        for name, value in variables.items():
            if _VARIABLE.search(name) and value:
                self.count += 1
                found[name] = REDACTED
            else:
                found[name] = self.text(value)
        return found

    def values(self, tree: Any) -> Any:
        """Every text in a tree of JSON; of a mapping's values also those whose key is a secret's name."""
        if isinstance(tree, str):
            return self.text(tree)
        if isinstance(tree, Mapping):
            return {key: self._value(str(key), value) for key, value in tree.items()}
        if isinstance(tree, (list, tuple)):
            return [self.values(each) for each in tree]
        return tree

    def _value(self, key: str, value: Any) -> Any:
        if isinstance(value, str) and _SECRET_NAME.fullmatch(key) and not _is_plain(value):
            self.count += 1
            return REDACTED
        return self.values(value)

    def _sub(self, pattern: re.Pattern[str], replace: Callable[[re.Match[str]], str | None], text: str) -> str:
        def once(found: re.Match[str]) -> str:
            new = None if REDACTED in found[0] else replace(found)
            self.count += new is not None
            return found[0] if new is None else new

        return pattern.sub(once, text)


def _without_value(found: re.Match[str]) -> str | None:
    """Of `name=value`; None: the value is no secret."""
    return None if _is_plain(found[2]) else found[1] + REDACTED


def _is_plain(value: str) -> bool:
    """True for a number, a truth value or a path, which no secret is."""
    if value.startswith(("/", "./", "~/")) or not value:
        return True
    try:
        return not isinstance(json.loads(value.lower()), (str, list, dict))
    except ValueError:
        return value.lower() in ("none", "yes", "no", REDACTED)
