"""The innermost frame of a person's own code, found in a traceback's text."""

from __future__ import annotations

import importlib
import sys
import traceback
from pathlib import Path

import pytest

import hpc_trainer
from hpc_trainer.record.journal import own_frame, read_error


def _raised(code: str) -> str:
    try:
        exec(compile(code, "<string>", "exec"), {})
    except Exception as error:
        return "".join(traceback.format_exception(error.with_traceback(error.__traceback__.tb_next)))  # type: ignore[union-attr]
    raise AssertionError("it raised nothing")


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "net_of_mine.py").write_text(
        "import json\n\n\ndef outer(text):\n    return parse(text)\n\n\ndef parse(text):\n    return json.loads(text)\n"
        "\n\ndef hides(text):\n    try:\n        parse(text)\n    except ValueError as error:\n"
        "        raise RuntimeError('no good') from error\n"
    )
    (tmp_path / "broken_of_mine.py").write_text("x = 1\nif x\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "net_of_mine", raising=False)
    return tmp_path


def test_it_is_the_innermost_that_is_neither_ours_nor_installed(project: Path) -> None:
    text = _raised("import net_of_mine; net_of_mine.outer('{')")
    assert "json/decoder.py" in text, "the error was raised in the standard library"
    assert own_frame(text) == "net_of_mine.py:9 in parse: return json.loads(text)"


def test_of_a_chain_the_last_error_counts(project: Path) -> None:
    text = _raised("import net_of_mine; net_of_mine.hides('{')")
    assert own_frame(text) == "net_of_mine.py:16 in hides: raise RuntimeError('no good') from error"


def test_a_frame_of_cython_is_a_librarys() -> None:
    text = '  File "pandas/_libs/parsers.pyx", line 735, in pandas._libs.parsers.TextReader.__cinit__\n'
    assert (
        own_frame(f'  File "/home/me/a.py", line 1, in <module>\n    read()\n{text}')
        == "/home/me/a.py:1 in <module>: read()"
    )


def test_a_file_that_is_no_python_is_named(project: Path) -> None:
    assert own_frame(_raised("import broken_of_mine")) == "broken_of_mine.py:2: if x"


def test_a_data_workers_traceback_within_the_message_counts() -> None:
    """torch hands it on as the text of an error that is raised in the loader."""
    text = (
        "Traceback (most recent call last):\n"
        f'  File "{Path(hpc_trainer.__file__).parent}/training/loop.py", line 9, in train\n    batch = next(batches)\n'
        '  File "/env/lib/python3.11/site-packages/torch/_utils.py", line 5, in reraise\n    raise exception\n'
        "ValueError: Caught ValueError in DataLoader worker process 0.\nOriginal Traceback (most recent call last):\n"
        '  File "/env/lib/python3.11/site-packages/torch/fetch.py", line 7, in fetch\n    data = dataset[0]\n'
        '  File "/home/me/images.py", line 12, in __getitem__\n    raise ValueError("no image")\nValueError: no image\n'
    )
    assert own_frame(text) == '/home/me/images.py:12 in __getitem__: raise ValueError("no image")'


def test_an_installed_package_counts_if_it_is_trusted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    place = tmp_path / "lib" / "python3.11" / "site-packages"
    (place / "lab_of_mine").mkdir(parents=True)
    (place / "lab_of_mine" / "__init__.py").write_text("def fail():\n    raise ValueError('x')\n")
    monkeypatch.syspath_prepend(str(place))
    try:
        text = _raised("import lab_of_mine; lab_of_mine.fail()")
        importlib.import_module("lab_of_mine")
        assert own_frame(text) is None
        assert own_frame(text, ["lab_of_mine"]) == "lab_of_mine/__init__.py:2 in fail: raise ValueError('x')"
    finally:
        sys.modules.pop("lab_of_mine", None)


def test_ours_alone_is_nobodys() -> None:
    assert own_frame(_raised("from hpc_trainer.record.files import make_folder; make_folder(3)")) is None
    assert own_frame("no traceback at all") is None
    assert own_frame("") is None


def test_a_frame_that_is_no_text_is_left_out() -> None:
    assert read_error({"frame": {"file": 1}, "message": "x"}) == {"message": "x"}
