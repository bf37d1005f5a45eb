"""What is told of a sweep, once, to a real HTTP server on this machine and to commands; and what harms nothing."""

from __future__ import annotations

import http.server
import json
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from hpc_trainer.config.rules.cluster_rules import notify_problems
from hpc_trainer.config.schema.cluster import Executor
from hpc_trainer.config.schema.output import NotifyConfig, NotifyShape
from hpc_trainer.launch.grids import _forget_ends
from hpc_trainer.launch.submit import with_mail
from hpc_trainer.notify import events
from hpc_trainer.notify.events import at_end
from hpc_trainer.record.files import write_json
from hpc_trainer.record.journal import write_result
from hpc_trainer.record.states import RunState
from tests.unit.record.builders import make_config, make_spec, make_specs
from tests.unit.record.sweeps import SweepOnDisk

_SECRET = "/services/T0/B0/very-secret"


class Server(http.server.ThreadingHTTPServer):
    """Keeps what is posted; answers with `code`, after `pause_s`."""

    daemon_threads = True

    def __init__(self) -> None:
        self.posts: list[tuple[str, dict[str, str], str]] = []
        self.code, self.pause_s = 200, 0.0
        super().__init__(("127.0.0.1", 0), _Handler)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}{_SECRET}"


class _Handler(http.server.BaseHTTPRequestHandler):
    server: Server

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"])).decode()
        self.server.posts.append((self.path, dict(self.headers), body))
        time.sleep(self.server.pause_s)
        self.send_response(self.server.code)
        self.end_headers()

    def log_message(self, *_: Any) -> None:
        """Nothing."""


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    with Server() as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        monkeypatch.setenv("MY_HOOK", server.url)
        monkeypatch.setenv("no_proxy", "*")
        yield server
        server.shutdown()


@pytest.fixture
def sweep(tmp_path: Path) -> SweepOnDisk:
    sweep = SweepOnDisk(tmp_path / "runs" / "mine", make_specs(3))
    write_json(sweep.paths.sweep, {"sweep": "mine", "run_ids": [spec.run_id for spec in sweep.specs]})
    for index in range(3):
        sweep.run(index)
    return sweep


def _end(sweep: SweepOnDisk, index: int, state: RunState = RunState.COMPLETED, **keys: Any) -> None:
    config = make_config()
    config.notify = NotifyConfig(**{"webhook_env": "MY_HOOK", "timeout_s": 5.0, **keys})
    error = {"type": "OSError", "message": "no such file\nmore"} if state.has_failed else {}
    at_end(config, sweep.run(index), state, "exception" if state.has_failed else "done", error)


def _complete(sweep: SweepOnDisk, index: int, **metrics: float) -> None:
    write_result(
        sweep.run(index), step=1, num_steps=1, attempt=0, world_size=1, cause="done", reason=None, metrics=metrics
    )


def test_the_first_failure_and_the_end_are_told_once(
    sweep: SweepOnDisk, server: Server, capsys: pytest.CaptureFixture[str]
) -> None:
    _end(sweep, 0, RunState.FAILED)
    _end(sweep, 1, RunState.FAILED)
    _end(sweep, 2)
    _end(sweep, 2)
    texts = [json.loads(body)["text"] for _, _, body in server.posts]
    assert texts == [
        f"mine: the first run failed: {sweep.specs[0].run_id} (exception). no such file",
        "mine: the sweep is done: 1 COMPLETED, 2 FAILED",
    ]
    assert {path for path, _, _ in server.posts} == {_SECRET}
    _forget_ends(sweep.paths, [sweep.specs[0].run_id])
    _end(sweep, 0)
    assert len(server.posts) == 3, "after a new submit the end is news again"
    assert "very-secret" not in capsys.readouterr().out
    assert not any("very-secret" in path.read_text() for path in sweep.paths.notify.rglob("*") if path.is_file())


def test_runs_that_ended_otherwise_count(sweep: SweepOnDisk, server: Server) -> None:
    """Cancelled before it began, and complete before notify was on."""
    sweep.mark("CANCEL", 0)
    sweep.mark("DONE", 1)
    _end(sweep, 2, shape=NotifyShape.json)
    (event,) = [json.loads(body) for _, _, body in server.posts]
    assert event["event"] == "done"
    assert event["counts"] == {"CANCELLED": 1, "COMPLETED": 2}


def test_a_new_best_is_told_in_the_shape_of_ntfy(sweep: SweepOnDisk, server: Server) -> None:
    for index, loss in enumerate((0.5, 0.7, 0.3)):
        _complete(sweep, index, eval_loss=loss)
        _end(sweep, index, events=["best"], shape=NotifyShape.ntfy)
    ((_, headers, body),) = server.posts
    assert body == f"mine: a new best: eval_loss=0.3 ({sweep.specs[2].run_id}), before 0.5"
    assert headers["Title"] == "hpc-trainer"
    assert "Priority" not in headers


def test_a_command_gets_the_event(sweep: SweepOnDisk, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = f'cat > {tmp_path}/event; echo "$HPC_TRAINER_NOTIFY_EVENT $HPC_TRAINER_NOTIFY_TEXT" > {tmp_path}/words'
    _end(sweep, 0, RunState.OUT_OF_MEMORY, webhook_env=None, command=command)
    assert json.loads((tmp_path / "event").read_text())["run_id"] == sweep.specs[0].run_id
    assert (tmp_path / "words").read_text().startswith("failed mine: the first run failed")
    _end(sweep, 1, events=["done"], webhook_env=None, command="exit 3")
    _forget_ends(sweep.paths, [sweep.specs[0].run_id])
    _end(sweep, 0, RunState.FAILED, webhook_env=None, command="echo oh no >&2; exit 3")
    assert "notify.command ended with 3: oh no" in capsys.readouterr().out


@pytest.mark.parametrize("how", ["command", "server", "500", "gone", "unset", "no address"])
def test_what_hangs_or_fails_harms_nothing(
    how: str, sweep: SweepOnDisk, server: Server, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:  # fmt: skip
    says = {
        "command": "took more than 1 s", "server": "could not be reached", "500": "answered 500",
        "gone": "could not be reached: ConnectionRefusedError", "unset": "MY_HOOK (notify.webhook_env) is not set",
        "no address": "holds no http address",
    }  # fmt: skip
    keys: dict[str, Any] = {"timeout_s": 1.0}
    if how == "command":
        keys |= {"webhook_env": None, "command": f"sleep 99 & echo $! > {tmp_path}/pid; sleep 99"}
    elif how == "server":
        server.pause_s = 30.0
    elif how == "500":
        server.code = 500
    elif how == "gone":
        monkeypatch.setenv("MY_HOOK", "http://127.0.0.1:9/very-secret")
    elif how == "unset":
        monkeypatch.delenv("MY_HOOK")
    else:
        monkeypatch.setenv("MY_HOOK", "file:///etc/passwd?very-secret")
    begin = time.monotonic()
    _end(sweep, 0, RunState.FAILED, **keys)
    assert time.monotonic() - begin < 25
    said = capsys.readouterr().out
    assert says[how] in said
    assert "very-secret" not in said
    if how == "command":
        stat = Path(f"/proc/{(tmp_path / 'pid').read_text().strip()}/stat")
        deadline = time.monotonic() + 30  # a killed process ends when it gets a processor
        while stat.exists() and stat.read_text().split()[2] != "Z" and time.monotonic() < deadline:
            time.sleep(0.2)
        assert time.monotonic() < deadline, "what it left is ended too"


def test_a_search_is_done_when_it_says_so(sweep: SweepOnDisk, server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    """A trial that pauses at a rung has not ended, and may be the last to move."""
    states: dict[str, int] = {}
    monkeypatch.setattr(events, "contributions", lambda hook: (lambda _: states,) if hook == "search_ends" else ())
    _end(sweep, 0)
    _end(sweep, 1)
    _end(sweep, 2)
    assert server.posts == [], "trials may be drawn or promoted"
    states |= {"COMPLETED": 2, "PAUSED": 1}
    _end(sweep, 2, RunState.PAUSED)
    _end(sweep, 2, RunState.PAUSED)
    assert [json.loads(body)["text"] for _, _, body in server.posts] == [
        "mine: the sweep is done: 2 COMPLETED, 1 PAUSED"
    ]


def test_a_paused_trial_has_not_ended(sweep: SweepOnDisk, server: Server) -> None:
    for index, state in enumerate((RunState.COMPLETED, RunState.COMPLETED, RunState.PAUSED)):
        _end(sweep, index, state)
    assert server.posts == []


def test_a_folder_that_cannot_be_written_harms_nothing(
    sweep: SweepOnDisk, server: Server, capsys: pytest.CaptureFixture[str]
) -> None:
    sweep.paths.notify.write_text("a file")
    _end(sweep, 0, RunState.FAILED)
    assert "nobody was notified" in capsys.readouterr().out
    assert server.posts == []


def test_two_last_runs_at_once_tell_one_end(sweep: SweepOnDisk, server: Server) -> None:
    sweep.mark("DONE", 0)
    threads = [threading.Thread(target=_end, args=(sweep, index)) for index in (1, 2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(server.posts) == 1


def test_without_a_channel_nothing_is_written(sweep: SweepOnDisk) -> None:
    _end(sweep, 0, RunState.FAILED, webhook_env=None)
    assert not sweep.paths.notify.exists()


@pytest.mark.parametrize(
    ("keys", "says"),
    [
        ({"events": ["dome"]}, "Did you mean done"),
        ({"webhook_env": "https://hooks.example.org/secret"}, "must be the name of an environment variable"),
        ({"command": "a\nb"}, "one line of shell"),
        ({"command": " "}, "one line of shell"),
        ({"mail": "a b@c"}, "one address"),
    ],
)
def test_bad_keys(keys: dict[str, Any], says: str) -> None:
    (problem,) = notify_problems(NotifyConfig(**keys), Executor.slurm)
    assert says in problem
    assert "secret" not in problem.replace("that is a secret", "")


def test_mail_is_slurms(tmp_path: Path) -> None:
    assert list(notify_problems(NotifyConfig(mail="anna@example.org"), Executor.local))
    spec = make_spec("cluster=slurm", notify__mail="anna@example.org")
    assert with_mail(spec.config)["sbatch"] == {"mail-user": "anna@example.org", "mail-type": "END,FAIL"}
    own = {**spec.config, "cluster": {**spec.config["cluster"], "sbatch": {"mail-type": "ALL"}}}
    assert with_mail(own)["sbatch"] == {"mail-user": "anna@example.org", "mail-type": "ALL"}
    assert with_mail(make_spec("cluster=slurm").config)["sbatch"] == {}
