"""Secrets: they are taken out of all that is recorded of a run, and files that hold them are never frozen.

Redaction covers variables, command lines, differences of code and addresses. Files are recognised by their names,
whether git tracks them or not (design, section 5).
"""

from __future__ import annotations

import functools
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import translate
from typing import Any

from hpc_trainer.config.schema.key import REDACTED, SECRET_NAME_ENDS

# Patterns of the names of files and folders, for any part of a path.
_ANYWHERE = (
    ".env", ".env.*", ".env-*", ".env_*", "*.env", ".envrc", ".flaskenv", "*.pem", "*.key", "*.p12", "*.pfx", "*.p8",
    "*.pk8", "*.jks", "*.bks", "*.keystore", "*.kdb", "*.kdbx", "*.ppk", "*.gpg", "*.pgp", "*.ovpn", "*.keytab",
    "*.tfvars", "*.tfstate", "*.tfstate.*", ".netrc", "_netrc", ".authinfo", ".authinfo.*", ".pypirc", ".npmrc",
    ".yarnrc.yml", ".pgpass", "pgpass.conf", ".my.cnf", ".mylogin.cnf", ".htpasswd", ".git-credentials",
    ".gitcredentials", ".smbcredentials", ".s3cfg", ".boto", ".dockercfg", ".dockerconfigjson", ".databrickscfg",
    ".terraformrc", ".msmtprc", ".comet.config", "clearml.conf", "kaggle.json", "kubeconfig",
    "*.kubeconfig", "credentials", "credentials.*", "*credentials.json", "service_account*.json",
    "service-account*.json", "serviceaccount*.json", "*firebase-adminsdk*.json", "client_secret*.json",
    "client-secret*.json", "secrets", "secrets.*", ".secret", ".secrets", ".secrets.*", "*.token", "token", ".token",
    ".*-token", ".*_token", ".*_api_key", ".vault_pass*", ".vault-pass*", "vault_pass*", "passwd", ".passwd",
    ".*_history", ".ssh", ".aws", ".azure", ".gcloud", ".kube", ".docker", ".gnupg",
    ".kaggle", ".vault",
)  # fmt: skip
# For these rules only the last part of a path counts. Code and text about secrets are none: key.py, docs/api_key.md.
_CODE = re.compile(
    r".*\.(py|pyi|pyx|pxd|so|c|cc|cpp|cxx|cu|cuh|h|hpp|ipynb|md|rst|html|css|js|ts|java|go|rs|jl|r|m|lua|tex|svg|png)"
)
# Files that show a newcomer which secrets to write, such as .env.example.
_TEMPLATE = re.compile(r".*\.(example|sample|template|dist)")
_LAST_WORDS = frozenset(
    (
        "secret", "secrets", "credential", "credentials", "creds", "password", "passwords", "passwd", "passphrase",
        "apikey", "apikeys", "keyfile", "kubeconfig",
    )
)  # fmt: skip
_FIRST_WORDS = frozenset(("secrets", "credentials", "creds", "passwords", "passwd", "apikey", "apikeys"))
_BEFORE_KEY = frozenset(
    (
        "access", "account", "anthropic", "api", "app", "auth", "aws", "azure", "client", "comet", "deploy",
        "deployment", "dsa", "ecdsa", "ed25519", "encryption", "gcp", "github", "gitlab", "google", "gpg", "hf", "host",
        "huggingface", "jwt", "master", "openai", "pgp", "private", "rsa", "secret", "server", "service", "signing",
        "ssh", "wandb",
    )
)  # fmt: skip
_BEFORE_TOKEN = frozenset(
    (
        "access", "api", "auth", "aws", "azure", "bearer", "bot", "deploy", "gh", "github", "gitlab", "google", "hf",
        "hub", "huggingface", "jwt", "login", "npm", "oauth", "personal", "pypi", "read", "refresh", "sas", "session",
        "slack", "user", "vault", "wandb", "write",
    )
)  # fmt: skip
# A public key's file name tells where the private key is used, so it is excluded too.
_KEY_FILE = re.compile(r"id_(rsa|dsa|ecdsa|ed25519)(_sk)?([._~-].*)?")


def secrets_among(names: Iterable[str]) -> list[str]:
    """Return the paths that look like a secret or are in a folder of secrets, in the same order."""
    return [name for name in names if is_secret(name)]


def is_secret(name: str) -> bool:
    """Return True if the path `name` looks like a secret, or is in a folder of secrets."""
    parts = name.lower().split("/")
    last = parts[-1]
    if any(map(_anywhere().match, parts[:-1] if _TEMPLATE.fullmatch(last) else parts)):
        return True
    if last.startswith("id_") and last.removesuffix(".pub").isidentifier():  # id_rsa, id_work; not id_map.py
        return True
    if _CODE.fullmatch(last):
        return False
    return bool(_KEY_FILE.fullmatch(last)) or _has_secret_words(name.rsplit("/", 1)[-1])


@functools.cache
def _anywhere() -> re.Pattern[str]:
    return re.compile("|".join(map(translate, _ANYWHERE)))  # one expression: 300 files × 70 patterns took 80 ms


def _has_secret_words(file: str) -> bool:
    """Return True if a file's name has words of a secret: my-secrets.yaml, ApiKey.txt, deploy_key.old.

    Names such as tokens.txt and special_tokens_map.json have none.
    """
    stem = re.sub(r"(\.[A-Za-z0-9~]{1,10})+\Z", "", file.lstrip(".")) or file
    spaced = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", stem)
    parts = [word for word in re.split(r"[^a-z0-9]+", spaced.lower()) if word]
    if not parts:
        return False
    if parts == ["token"] or "".join(parts) in _LAST_WORDS:  # KubeConfig
        return True
    *_, before, last = ("", *parts)
    if last.rstrip("0123456789") in _LAST_WORDS or parts[0] in _FIRST_WORDS:
        return True
    return (last in ("key", "keys") and before in _BEFORE_KEY) or (last == "token" and before in _BEFORE_TOKEN)


_VARIABLE = re.compile(r"TOKEN|KEY|SECRET|PASSW|PASSPHRASE|CREDENTIAL|AUTH|COOKIE|DSN|WEBHOOK", re.IGNORECASE)
_LONGEST_END = 1 + max(map(len, SECRET_NAME_ENDS))


def _one(letter: str) -> str:
    return f"[{letter}{letter.upper()}]" if letter.isalpha() else "[_.-]"


def _tree(names: Iterable[str]) -> str:
    """Return a pattern of some words as a tree, so that each letter of a text tries one branch, not each word."""
    rests: dict[str, list[str]] = {}
    for word in names:
        rests.setdefault(word[:1], []).append(word[1:])
    is_end = rests.pop("", None) is not None
    branches = [_one(letter) + _tree(rest) for letter, rest in rests.items()]
    return f"(?:{'|'.join(branches)}){'?' if is_end else ''}" if branches else ""


def _just_before(names: Iterable[str], end: str = "") -> str:
    """Return a zero-width pattern that matches just after one of the words, if no letter precedes the word.

    The pattern is a tree that begins at the words' ends.
    """
    longer: dict[str, list[str]] = {}
    for word in names:
        longer.setdefault(word[-len(end) - 1 :], []).append(word)
    whole = rf"(?<![a-zA-Z]{''.join(map(_one, end))})" if longer.pop(end, None) else None
    branches = [rf"(?<={''.join(map(_one, key))}){_just_before(rest, key)}" for key, rest in longer.items()]
    branches += [] if whole is None else [whole]
    return f"(?:{'|'.join(branches)})"


# The time of a search must grow only linearly with the text's length. Therefore no pattern has an open beginning: each
# starts at the first letter of a fixed word or at the start of a line. tests/benchmarks/redaction.py measures the worst
# texts.
_END = _tree(SECRET_NAME_ENDS)
_SECRET_END = re.compile(rf"[\w.+~-]*(?<![a-zA-Z]){_END}")
_NAME = re.compile(r"[\w.+~-]*")
_SCALAR = (
    rf"(?:-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][+-]?[0-9]+)?|{_tree(('true', 'false', 'null', 'none', 'yes', 'no'))})"
)
_PATH = r"/|\./|~/"
_PLAIN = re.compile(rf"(?:{_PATH}).*|{_SCALAR}", re.DOTALL)
# name = "text" in code and configuration: only quoted text is a value; the name of another variable is not.
_QUOTED = r"""["']?\]?\s*[:=]\s*[rbfuRBFU]?(["'])(?![^"'\s]*\[redacted\])[^"'\s]{4,}(?=\1)"""
# name=value without quotes, in a command line or a query.
_UNQUOTED = rf"(=)(?!{_PATH}|{_SCALAR}(?![^\s\"',;&()\[\]{{}}]))[^\s\"',;&()\[\]{{}}]{{4,}}"
# Beginning of a token -> pattern of the rest.
_TOKENS = {
    "hf_": r"[A-Za-z0-9]{16,}", **{f"gh{kind}_": r"[A-Za-z0-9]{16,}" for kind in "pousr"}, "github_pat_": r"\w{20,}",
    "glpat-": r"[\w-]{16,}", "sk-": r"[\w-]{16,}", "AKIA": r"[0-9A-Z]{16}\b", "ASIA": r"[0-9A-Z]{16}\b",
    **{f"xox{kind}-": r"[\w-]{10,}" for kind in "abeprs"}, "AIza": r"[\w-]{30,}", "npm_": r"[A-Za-z0-9]{30,}",
    "pypi-": r"[\w-]{30,}", "dop_v1_": r"[0-9a-f]{32,}",
}  # fmt: skip
_FORMS = "|".join(rf"{begin}(?<!\w{begin}){rest}" for begin, rest in _TOKENS.items())
_FIRST = "".join(
    sorted(
        {letter for word in SECRET_NAME_ENDS for letter in (word[0], word[0].upper())} | {token[0] for token in _TOKENS}
    )
)
# Texts, which `re` compiles at their first use and keeps: most commands redact nothing.
_IN_CODE = rf"(?=[{_FIRST}])(?<![a-zA-Z])(?:{_END}{_QUOTED}|{_FORMS})"
_IN_TEXT = rf"(?=[{_FIRST}])(?<![a-zA-Z])(?:{_END}(?:{_QUOTED}|{_UNQUOTED})|{_FORMS})"
# name=value and name: value in code: only a line without anything else, as in a .env file.
_LINE = (
    rf"(?m)^(?=.{{8}})((?:[+\- ]?export | )?[\w.+~-]+(?=[=:] ?[^\s\"',;()\[\]{{}}]{{4,}}$)"
    rf"{_just_before(SECRET_NAME_ENDS)}[=:] ?)"
    rf"(?!{_PATH}|{_SCALAR}$)[^\s\"',;()\[\]{{}}]+$"
)
_URL = re.compile(r"(://)(?![^/\s@\"'<>]*\[redacted\])[^/\s@\"'<>]+(?=@)")
_BEARER = re.compile(r"(earer )(?<=[Bb]earer )[\w.~+/=-]{8,}")
# Claims and signature of a JSON web token; its header is no secret.
_WEB_TOKEN = re.compile(r"(\.)ey(?<=[\w-]{11}\.ey)[JA][\w-]{7,}\.[\w-]+")
_PRIVATE_KEY = re.compile(r"(-----BEGIN [A-Z ]*PRIVATE KEY-----)(.*?)(?=-----END|\Z)", re.DOTALL)
_LEAST = 8
"""Least length of a secret variable's value that is searched for elsewhere: `1` and `true` are everywhere."""


@dataclass(slots=True)
class Redaction:
    """Redactor of texts that counts the secrets it has removed."""

    secrets: Sequence[str] = ()
    """Values of known secrets, the longest first."""
    count: int = 0

    @classmethod
    def of_process(cls, environ: Mapping[str, str] = os.environ) -> Redaction:
        """Create a redactor that knows the values of this process's variables whose names look like secrets."""
        values = {value for name, value in environ.items() if _VARIABLE.search(name) and len(value) >= _LEAST}
        return cls(sorted((value for value in values if not _is_plain(value)), key=len, reverse=True))

    def text(self, text: str) -> str:
        """Return a text without parts that look like secrets; the number of lines stays."""
        return self._without(text, _IN_TEXT)

    def code(self, text: str) -> str:
        """Return code without secrets; in code, `token=value` mostly names a variable and stays."""
        return self._without(text, _IN_CODE)

    def _without(self, text: str, named: str) -> str:
        for value in self.secrets:
            if value in text:
                self.count += text.count(value)
                text = text.replace(value, REDACTED)
        text = _PRIVATE_KEY.sub(self._key, text)
        count = 0
        for pattern in (_URL, _BEARER, _WEB_TOKEN, _LINE):
            text, num_hits = re.subn(pattern, _after_begin, text)
            count += num_hits
        text, num_hits = re.subn(named, _after_sign, text)
        self.count += count + num_hits
        return text

    def _key(self, match: re.Match[str]) -> str:
        if REDACTED in match[2]:
            return match[0]
        self.count += 1
        return match[1] + "\n" * match[2].count("\n") + REDACTED

    def arguments(self, arguments: Iterable[str]) -> list[str]:
        """Return a command line without secrets, including the value after `--token` and every form of `NAME=VALUE`."""
        kept: list[str] = []
        is_next = False
        for word in arguments:
            name, sign, value = word.partition("=")
            is_secret = _is_secret(name.lstrip("-"))
            if is_next and not word.startswith("-"):
                self.count += 1
                kept.append(REDACTED)
            elif sign and is_secret and not _is_plain(value):
                self.count += 1
                kept.append(f"{name}={REDACTED}")
            else:
                kept.append(self.text(word))
            is_next = not sign and is_secret and word.startswith("-")
        return kept

    def variables(self, variables: Mapping[str, str]) -> dict[str, str]:
        """Return variables by name, with the values redacted if the names look like secrets."""
        redacted = {}
        for name, value in variables.items():
            if _VARIABLE.search(name) and value:
                self.count += 1
                redacted[name] = REDACTED
            else:
                redacted[name] = self.text(value)
        return redacted

    def values(self, tree: Any) -> Any:
        """Return a tree of JSON with every text redacted, and with values redacted whose key is a secret's name."""
        if isinstance(tree, str):
            return self.text(tree)
        if isinstance(tree, Mapping):
            return {key: self._value(str(key), value) for key, value in tree.items()}
        if isinstance(tree, (list, tuple)):
            return [self.values(item) for item in tree]
        return tree

    def _value(self, key: str, value: Any) -> Any:
        if isinstance(value, str) and _is_secret(key) and not _is_plain(value):
            self.count += 1
            return REDACTED
        return self.values(value)


# Functions, because a replacement template takes twice the time.
def _after_begin(match: re.Match[str]) -> str:
    return match[1] + REDACTED


def _after_sign(match: re.Match[str]) -> str:
    """Keep the name and the sign or quote before the value: the text up to the end of the pattern's last group."""
    last = match.lastindex
    return REDACTED if last is None else match[0][: match.end(last) - match.start()] + REDACTED


def _is_secret(name: str) -> bool:
    return _NAME.fullmatch(name) is not None and _SECRET_END.fullmatch(name[-_LONGEST_END:]) is not None


def _is_plain(value: str) -> bool:
    """Return True for a number, a boolean or a path, which cannot be a secret."""
    return value in ("", REDACTED) or _PLAIN.fullmatch(value) is not None
