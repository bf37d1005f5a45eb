"""For all tests: one thread of torch in each process."""

from __future__ import annotations

import os

# Before torch is imported. As many processes as cores are at work, and threads that wait for each other turn idly.
os.environ.setdefault("OMP_NUM_THREADS", "1")
