"""Secrets are taken out by name, by form and by value, and what only looks alike stays."""

from __future__ import annotations

import time

import pytest

from hpc_trainer.record.redaction import REDACTED, Redaction

HF = "hf_" + "a1B2" * 6
# What each pattern has most to do with.
WORST = (
    "a", "t", "t_", "s.", "h-", "a ", " ", "_", "token_", "token ", "token=", "token=abcd ", 'token="', 'token="abcd" ',
    "token=5 ", "token=abcd\n", "api_key: abcd\n", "t\n", "=", "\n", "eyJ-", ".eyJaaaaaaaa", "://a", "://aa@",
    "-----BEGIN PRIVATE KEY-----", "-----BEGIN PRIVATE KEY----------END", "sk-", "export ", "Bearer ", "1e1",
    "[redacted]",
)  # fmt: skip
GITHUB = "ghp_" + "Zy9x" * 9


@pytest.mark.parametrize(
    ("text", "secret"),
    [
        (f"curl -H 'Authorization: Bearer {GITHUB}'", GITHUB),
        (f"login {HF} now", HF),
        ("git clone https://me:hunter2@example.org/lab.git", "hunter2"),
        ("https://gh0st@example.org/x", "gh0st"),
        ("--extra-index-url=https://u:pw12@host/simple", "pw12"),
        ("https://example.org/data?access_token=abcd1234&x=1", "abcd1234"),
        ('+API_KEY = "0123456789abcdef"', "0123456789abcdef"),
        ("config['hub_token'] = 'swordfish'", "swordfish"),
        ("DB_PASSWORD=swordfish", "swordfish"),
        ("AKIAIOSFODNN7EXAMPLE", "AKIAIOSFODNN7EXAMPLE"),
        ("-----BEGIN OPENSSH PRIVATE KEY-----\nb3Blbn\nNzaC1\n-----END OPENSSH PRIVATE KEY-----", "NzaC1"),
        ("eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiIxMjM0NTY3ODkwIn0.dozjgNryP4J3jVmNHl0w5N", "dozjgNryP4J3jVmNHl0w5N"),
    ],
)
def test_a_secret_is_taken_out_of_text(text: str, secret: str) -> None:
    redaction = Redaction()

    found = redaction.text(text)

    assert secret not in found
    assert REDACTED in found
    assert redaction.count >= 1
    assert found.count("\n") == text.count("\n")


@pytest.mark.parametrize(
    "code",
    [
        'tokens = batch["tokens"]',
        "num_tokens: int = 5000",
        "model(token=token_ids, mask=mask)",
        "key, value = line.split()",
        "    auth=self.auth,",
        'sort_key="loss"',
        "index 3f2a1b0..9c8d7e6 100644",
        "https://example.org/lab/my@file",
        "tokenizer.eos_token = special",
    ],
)
def test_code_that_only_looks_alike_stays(code: str) -> None:
    assert Redaction().code(code) == code


def test_words_of_a_command_line() -> None:
    words = ["train", "--token", "swordfish", "+hub.api_key=swordfish", "data.num_tokens=100", "model.sort_key=loss",
             "+auth=true", "--password=swordfish", f"x={HF}", "--steps", "5"]  # fmt: skip

    assert Redaction().arguments(words) == [
        "train", "--token", REDACTED, f"+hub.api_key={REDACTED}", "data.num_tokens=100", "model.sort_key=loss",
        "+auth=true", f"--password={REDACTED}", f"x={REDACTED}", "--steps", "5",
    ]  # fmt: skip


def test_variables_keep_their_names() -> None:
    found = Redaction().variables(
        {"HF_TOKEN": "x", "NCCL_DEBUG": "INFO", "HF_ENDPOINT": "https://a:b1@host", "KEY": ""}
    )

    assert found == {
        "HF_TOKEN": REDACTED, "NCCL_DEBUG": "INFO", "HF_ENDPOINT": f"https://{REDACTED}@host", "KEY": "",
    }  # fmt: skip


def test_the_value_of_a_secret_variable_is_found_wherever_it_stands() -> None:
    environ = {"LAB_SECRET": "correct horse battery", "AUTH_MODE": "true", "SSH_AUTH_SOCK": "/run/agent.12"}
    redaction = Redaction.of_process(environ)

    assert redaction.text("say correct horse battery, it is true: /run/agent.12") == (
        f"say {REDACTED}, it is true: /run/agent.12"
    )


def test_a_secret_variable_is_looked_for_from_eight_letters_on() -> None:
    redaction = Redaction.of_process({"A_TOKEN": "12ab567x", "B_TOKEN": "12ab56y", "HOSTNAME": "computer-7"})

    assert redaction.text("12ab567x, 12ab56y on computer-7") == f"{REDACTED}, 12ab56y on computer-7"


def test_a_tree_of_json() -> None:
    tree = {"url": "https://t0ken@host", "list": ["a", {"password": "swordfish"}], "n": 3}

    assert Redaction().values(tree) == {
        "url": f"https://{REDACTED}@host",
        "list": ["a", {"password": REDACTED}],
        "n": 3,
    }


@pytest.mark.few(8)
@pytest.mark.parametrize("piece", WORST)
def test_time_grows_with_the_length_alone(piece: str) -> None:
    """The bound on time itself is of tests/benchmarks/redaction.py; this one no loaded machine breaks.

    Time squared would be 64 times as much for 8 times the text.
    """

    def seconds(length: int) -> float:
        text = piece * (length // len(piece)) + "=x;"
        begin = time.process_time()
        for redact in (Redaction().text, Redaction().code, lambda text: Redaction().arguments([text])):
            redact(text)
        return time.process_time() - begin

    assert min(seconds(400_000) for _ in range(2)) < 24 * max(min(seconds(50_000) for _ in range(3)), 1e-3)


@pytest.mark.parametrize("value", ["[" * 100_000, "9" * 100_000, "{" * 100_000])
def test_a_value_of_any_form_is_redacted(value: str) -> None:
    assert len(Redaction().arguments([f"token={value}", f"--x={value}"])) == 2


def test_all_ends_of_names_are_known_in_any_case_and_only_as_whole_words() -> None:
    for end in ("token", "secret", "passwd", "password", "passphrase", "pwd", "credential", "credentials", "auth",
                "api_key", "hf.key", "aws-key", "clientKey", "SIGNINGKEY", "Api_Key"):  # fmt: skip
        assert Redaction().text(f"a {end}=swordfish b") == f"a {end}={REDACTED} b"
        assert Redaction().code(f"x.{end} = 'swordfish'") == f"x.{end} = '{REDACTED}'"
        assert Redaction().code(f"+export MY_{end}: swordfish") == f"+export MY_{end}: {REDACTED}"
        assert Redaction().text(f"my{end}=swordfish") == f"my{end}=swordfish"
        assert Redaction().code(f"my{end}: swordfish") == f"my{end}: swordfish"
