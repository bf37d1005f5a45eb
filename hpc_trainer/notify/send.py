"""Program of a child process that sends one event: `python -m hpc_trainer.notify.send` reads an order from stdin.

It prints errors, but never the webhook's address, which holds a secret: the output goes into a log.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import urllib.error
import urllib.request
from typing import Any

_TITLE = "hpc-trainer"


def main() -> int:
    """Send the event by each channel of the order, and return 1 if one failed."""
    order = json.load(sys.stdin)
    event, timeout_s = order["event"], float(order["timeout_s"])
    problems = []
    if order["command"] is not None:
        problems.append(_run_command(order["command"], event, timeout_s))
    if order["webhook_env"] is not None:
        problems.append(_post(order["webhook_env"], order["shape"], event, timeout_s))
    errors = [problem for problem in problems if problem is not None]
    print("; ".join(errors), end="", flush=True)
    return 1 if errors else 0


def _run_command(command: str, event: dict[str, Any], timeout_s: float) -> str | None:
    """Run the user's command with the event in its environment and on its stdin; return an error message, if any."""
    facts = {"EVENT": event["event"], "SWEEP": event["sweep"], "RUN": event["run_id"], "TEXT": _line(event)}
    environ = {**os.environ, **{f"HPC_TRAINER_NOTIFY_{name}": value for name, value in facts.items()}}
    try:
        done = subprocess.run(
            ["/bin/sh", "-c", command], input=json.dumps(event), text=True, errors="replace", capture_output=True,
            timeout=timeout_s, env=environ, check=False,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        return f"notify.command took more than {timeout_s:g} s"
    except OSError as error:
        return f"notify.command could not be started: {error.strerror}"
    if done.returncode:
        lines = (done.stderr or done.stdout).strip().splitlines()
        return f"notify.command ended with {done.returncode}{': ' + lines[-1][:200] if lines else ''}"
    return None


def _post(variable: str, shape: str, event: dict[str, Any], timeout_s: float) -> str | None:
    """Post the event to the address in an environment variable; return an error message without the address, if any."""
    url = os.environ.get(variable, "")
    if not url:
        return f"the variable {variable} (notify.webhook_env) is not set in the job"
    if not url.startswith(("https://", "http://")):
        return f"the variable {variable} (notify.webhook_env) holds no http address"
    data, headers = _body(shape, event)
    try:
        request = urllib.request.Request(url, data=data, headers=headers, method="POST")  # noqa: S310  (checked above)
        with urllib.request.urlopen(request, timeout=timeout_s) as answer:  # noqa: S310
            answer.read(1000)
    except urllib.error.HTTPError as error:
        return f"the webhook answered {error.code}"
    except (OSError, ValueError) as error:  # URLError, a time-out, an address that is none
        reason = getattr(error, "reason", None)
        return f"the webhook could not be reached: {type(reason if isinstance(reason, Exception) else error).__name__}"
    return None


def _body(shape: str, event: dict[str, Any]) -> tuple[bytes, dict[str, str]]:
    """Return the body and the headers of the request in the shape of Slack, of ntfy, or as plain JSON."""
    if shape == "ntfy":
        urgent = event["event"] in ("failed", "stalled")
        headers = {"Title": _TITLE, "Tags": "warning" if urgent else "white_check_mark"}
        return _line(event).encode(), {**headers, **({"Priority": "high"} if urgent else {})}
    content: dict[str, Any] = {"text": _line(event)} if shape == "slack" else event
    return json.dumps(content).encode(), {"Content-Type": "application/json"}


def _line(event: dict[str, Any]) -> str:
    return f"{event['sweep']}: {event['text']}"


if __name__ == "__main__":
    sys.exit(main())
