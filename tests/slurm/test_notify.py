"""`notify.mail` on a real Slurm: its MailProg hands the message to an SMTP server on this machine."""

from __future__ import annotations

import os
import socketserver
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.slurm.driver import Driver
from tests.slurm.test_first_day import TINY
from tests.slurm.testbed import config
from tests.slurm.testbed.cluster import SlurmCluster

# As mail(1) is called: MailProg -s SUBJECT ADDRESS, with the text on its standard input.
_MAIL_PROGRAM = """\
#!{python}
import smtplib, sys
from email.message import EmailMessage
message = EmailMessage()
message["From"], message["Subject"], message["To"] = "slurm@localhost", sys.argv[2], sys.argv[3]
message.set_content(sys.stdin.read())
with smtplib.SMTP("127.0.0.1", {port}, timeout=30) as server:
    server.send_message(message)
"""


class _Session(socketserver.StreamRequestHandler):
    """Handler of the SMTP commands by which a client hands over a message (RFC 5321, 4.5.1)."""

    server: Smtp

    def handle(self) -> None:
        self._say("220 localhost")
        recipients: list[str] = []
        while line := self.rfile.readline().decode().strip():
            verb = line[:4].upper()
            if verb == "RCPT":
                recipients.append(line.partition("<")[2].partition(">")[0])
            if verb == "DATA":
                self._say("354 go on")
                text = "".join(iter(lambda: self.rfile.readline().decode(), ".\r\n"))
                self.server.messages.append((tuple(recipients), text))
            self._say("221 bye" if verb == "QUIT" else "250 ok")
            if verb == "QUIT":
                return

    def _say(self, line: str) -> None:
        self.wfile.write(f"{line}\r\n".encode())


class Smtp(socketserver.ThreadingTCPServer):
    """An SMTP server on a free port of the loopback; `messages` has recipients and text of each message."""

    allow_reuse_address = True
    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Session)
        self.messages: list[tuple[tuple[str, ...], str]] = []


@pytest.fixture
def smtp(slurm: SlurmCluster) -> Iterator[Smtp]:
    program = Path(f"{config.mail_program(slurm.spec)}.test")
    with Smtp() as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        program.write_text(_MAIL_PROGRAM.format(python=sys.executable, port=server.server_address[1]))
        program.chmod(0o755)
        yield server
        program.unlink()
        server.shutdown()
        thread.join(60)


@pytest.mark.long
def test_slurm_mails_when_an_array_has_ended_or_failed(slurm: SlurmCluster, smtp: Smtp, tmp_path: Path) -> None:
    assert os.access(config.mail_program(slurm.spec), os.X_OK)
    driver = Driver(slurm, tmp_path)
    driver.submit(*TINY, "sweep_name=mailed", "notify.mail=anna@example.org")
    driver.submit(*TINY, "sweep_name=broken", "notify.mail=bert@example.org", "cluster.python=/no/such/python")
    driver.wait_for_states("mailed", "COMPLETED")
    driver.wait_for_states("broken", "FAILED")

    def of(address: str) -> list[str]:
        return [text for recipients, text in smtp.messages if recipients == (address,)]

    slurm.wait_for(lambda: bool(of("anna@example.org") and of("bert@example.org")), 120, "two messages")
    (done,) = of("anna@example.org")
    assert "Ended" in done
    assert "COMPLETED" in done
    assert "mailed" in done, "the job's name begins with that of the sweep"
    (failed,) = of("bert@example.org")
    assert "Failed" in failed
    assert "broken" in failed
    assert "ExitCode 2" in failed or "FAILED" in failed, failed
