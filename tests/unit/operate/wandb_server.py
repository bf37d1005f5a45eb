"""A W&B server for one project: it keeps what wandb's own client sends, as the real one does."""

from __future__ import annotations

import gzip
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


@dataclass
class Run:
    """What the server has of one run."""

    history: list[str] = field(default_factory=list)
    config: str = "{}"
    name: str | None = None
    group: str | None = None
    project: str | None = None
    exit_code: int | None = None

    @property
    def steps(self) -> list[int]:
        """Of each line, in order."""
        return [json.loads(line)["_step"] for line in self.history]

    def values(self, key: str) -> dict[int, float]:
        """Of one metric, by step."""
        lines = [json.loads(line) for line in self.history]
        return {line["_step"]: line[key] for line in lines if key in line}


class WandbServer(ThreadingHTTPServer):
    """Listens on this machine alone."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.runs: dict[str, Run] = {}
        self.url = f"http://127.0.0.1:{self.server_port}"


@contextmanager
def wandb_server() -> Iterator[WandbServer]:
    """One that answers."""
    with WandbServer() as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        yield server
        server.shutdown()
        thread.join()


class _Handler(BaseHTTPRequestHandler):
    server: WandbServer

    def log_message(self, *_: object) -> None:
        """Says nothing."""

    def do_PUT(self) -> None:
        self._body()
        self._answer({})

    def do_POST(self) -> None:
        body = self._body()
        if self.path == "/graphql":
            asked = json.loads(body)
            self._answer({"data": self._graphql(asked["query"], asked["variables"])})
            return
        if self.path.endswith("/file_stream"):
            self._take(self.server.runs[self.path.split("/")[-2]], json.loads(body))
        self._answer({})

    def _body(self) -> bytes:
        raw = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        return gzip.decompress(raw) if self.headers.get("Content-Encoding") == "gzip" else raw

    def _answer(self, value: Any) -> None:
        body = json.dumps(value).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def _take(self, run: Run, sent: dict[str, Any]) -> None:
        history = (sent.get("files") or {}).get("wandb-history.jsonl")
        if history:
            assert history["offset"] == len(run.history)
            run.history += history["content"]
        if sent.get("complete"):
            run.exit_code = sent["exitcode"]

    def _graphql(self, query: str, variables: dict[str, Any]) -> dict[str, Any]:
        if "createRunFiles" in query:
            files = [{"name": name, "uploadUrl": f"{self.server.url}/file"} for name in variables["files"]]
            return {"createRunFiles": {"runID": "1", "uploadHeaders": [], "files": files}}
        if "upsertBucket" in query:
            return {"upsertBucket": self._upsert(variables)}
        if "RunResumeStatus" in query:
            project = {"id": "1", "name": variables["project"], "entity": _ENTITY}
            return {"model": {**project, "bucket": self._bucket(variables)}}
        return {}

    def _upsert(self, variables: dict[str, Any]) -> dict[str, Any]:
        run = self.server.runs.setdefault(variables["name"], Run())
        run.config = variables["config"] or run.config
        run.name, run.project = variables["displayName"] or run.name, variables["project"]
        run.group = variables["groupName"] or run.group
        bucket = {"id": "1", "name": variables["name"], "displayName": run.name, "config": run.config}
        return {"bucket": {**bucket, "project": {"id": "1", "name": run.project, "entity": _ENTITY}}, "inserted": True}

    def _bucket(self, variables: dict[str, Any]) -> dict[str, Any] | None:
        run = self.server.runs.get(variables["name"])
        if run is None:
            return None
        return {
            "id": "1", "name": variables["name"], "displayName": run.name, "config": run.config, "tags": [],
            "summaryMetrics": "{}", "wandbConfig": '{"t": {}}', "logLineCount": 0, "eventsLineCount": 0,
            "eventsTail": "[]", "historyLineCount": len(run.history), "historyTail": json.dumps(run.history[-1:]),
        }  # fmt: skip


_ENTITY = {"id": "1", "name": "somebody"}
