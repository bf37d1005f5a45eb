"""For all tests: one thread of torch in each process, and hypothesis draws the same each time."""

from __future__ import annotations

import contextlib
import os

# Before torch is imported. As many processes as cores are at work, and threads that wait for each other turn idly.
os.environ.setdefault("OMP_NUM_THREADS", "1")

with contextlib.suppress(ImportError):  # the environment of torch-xla has none
    from hypothesis import settings

    # Its own deadline is 0.2 s an example: a busy machine takes that now and then.
    settings.register_profile("same", derandomize=True, deadline=None)
    settings.load_profile("same")
