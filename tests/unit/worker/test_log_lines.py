"""Each line of a rank's log begins with the time, however it is put together."""

from __future__ import annotations

import io
import re

import pytest

from hpc_trainer.worker.rank import TimedLines


def _logged(*writes: str) -> str:
    raw = io.BytesIO()
    stream = TimedLines(raw, "utf-8", line_buffering=True)
    assert [stream.write(text) for text in writes] == [len(text) for text in writes]
    stream.flush()
    return re.sub(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d ", "T ", raw.getvalue().decode())


@pytest.mark.parametrize(
    ("writes", "log"),
    [
        (("step 1", "\n"), "T step 1\n"),
        (("a\nb\n",), "T a\nT b\n"),
        (("a", "b", "\n", "c\n"), "T ab\nT c\n"),
        (("\n", "a\n\nb\n"), "\nT a\n\nT b\n"),
        (("10 %", "\r20 %", "\r30 %\n", "done\n"), "T 10 %\r20 %\r30 %\nT done\n"),
        (("", "a", "", "b\n"), "T ab\n"),
        (("ä\n",), "T ä\n"),
    ],
)
def test_a_line_has_its_time_once(writes: tuple[str, ...], log: str) -> None:
    assert _logged(*writes) == log
