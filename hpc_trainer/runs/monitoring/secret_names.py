"""Names of files that hold keys, tokens and passwords: never frozen, whatever git says (design, section 5).

Only the name decides; no file is opened. Upper and lower case are equal.
"""

from __future__ import annotations

import functools
import re
from fnmatch import translate

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
_PRIVATE_KEY = re.compile(r"id_(rsa|dsa|ecdsa|ed25519)(_sk)?([._~-].*)?")


def is_secret(name: str) -> bool:
    """Return True if the path `name` looks like a secret, or is in a folder of secrets."""
    parts = name.lower().split("/")
    if any(map(_anywhere().match, parts)):
        return True
    last = parts[-1]
    if last.startswith("id_") and last.removesuffix(".pub").isidentifier():  # id_rsa, id_work; not id_map.py
        return True
    if _CODE.fullmatch(last):
        return False
    return bool(_PRIVATE_KEY.fullmatch(last)) or _has_secret_words(name.rsplit("/", 1)[-1])


@functools.cache
def _anywhere() -> re.Pattern[str]:
    return re.compile("|".join(map(translate, _ANYWHERE)))  # one expression: 300 files × 70 patterns took 80 ms


def _has_secret_words(file: str) -> bool:
    """Return True if a file's name has words of a secret: my-secrets.yaml, ApiKey.txt, deploy_key.old.

    Names such as tokens.txt and special_tokens_map.json have none.
    """
    stem = re.sub(r"(\.[A-Za-z0-9~]{1,10})+\Z", "", file.lstrip(".")) or file
    spaced = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", stem)
    words = [word for word in re.split(r"[^a-z0-9]+", spaced.lower()) if word]
    if not words:
        return False
    if words == ["token"] or "".join(words) in _LAST_WORDS:  # KubeConfig
        return True
    *_, before, last = ("", *words)
    if last.rstrip("0123456789") in _LAST_WORDS or words[0] in _FIRST_WORDS:
        return True
    return (last in ("key", "keys") and before in _BEFORE_KEY) or (last == "token" and before in _BEFORE_TOKEN)
