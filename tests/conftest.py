"""For all tests: one thread of torch a process, Ctrl-C as in a terminal, the same draws of hypothesis each time."""

from __future__ import annotations

import contextlib
import os
import signal

import pytest

# Before torch is imported. As many processes as cores are at work, and threads that wait for each other turn idly.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# A shell starts what it leaves in the background (`make test &` in a script) with SIGINT ignored, and all that is
# started from there would ignore it too: tests that interrupt a command wait in vain.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

with contextlib.suppress(ImportError):  # the environment of torch-xla has none
    from hypothesis import settings

    # Its own deadline is 0.2 s an example: a busy machine takes that now and then.
    settings.register_profile("same", derandomize=True, deadline=None)
    settings.load_profile("same")


@pytest.fixture(scope="session", autouse=True)
def node_disk(tmp_path_factory: pytest.TempPathFactory) -> None:
    """A place for frozen code that goes with the session's other files; else its copies stay in /tmp for a week."""
    os.environ["SLURM_TMPDIR"] = str(tmp_path_factory.mktemp("node"))
