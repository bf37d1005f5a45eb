"""Make notebook.png: what a notebook shows of a real sweep of eight small trainings, two of which diverge.

.venv/bin/python docs/pictures/notebook.py            # a minute or two; needs Chromium and pandas
.venv/bin/python docs/pictures/notebook.py FOLDER     # of runs, which has the sweep already

The texts of docs/notebook.md are what it prints.
"""

from __future__ import annotations

import html
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from PIL import Image

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parents[1]))

import hpc_trainer  # noqa: E402
from tests.unit.operate.browser import chromium  # noqa: E402

PROGRAM = Path(sys.executable).with_name("hpc-trainer")
GRID = (
    "cluster=local experiment=digits optim=sgd optim.lr=1e-3,1e-2,1e-1,1e10 seed=0,1 train.num_steps=100 "
    "train.eval_every_steps=20 sweep_name=rates"
)
CELLS = (
    'hpc_trainer.status("rates")',
    'columns = ["optim.lr", "eval_accuracy", "eval_accuracy.std", "eval_accuracy.best", "n", "runs"]\n'
    'hpc_trainer.results("rates", group_by=["seed"], columns=columns, sort="eval_accuracy")',
    'best = hpc_trainer.results("rates", sort="eval_accuracy")["run_id"][0]\n'
    'hpc_trainer.metrics(best).dropna(subset="eval_loss")[["step", "eval_loss", "eval_accuracy"]]',
)
STYLE = """
body { font: 13px/1.45 system-ui, sans-serif; margin: 18px; width: 864px; color: #111; background: #fff; }
.cell { display: grid; grid-template-columns: 60px 1fr; margin-bottom: 14px; }
.number { color: #307fc1; font: 12px/1.9 monospace; }
pre { margin: 0; padding: 6px 10px; background: #f5f5f5; border: 1px solid #ddd; font: 12px/1.5 monospace; }
.out { grid-column: 2; padding-top: 8px; overflow: hidden; }
table { border-collapse: collapse; border: 0; font-size: 12px; }
th, td { border: 0; padding: 3px 8px; text-align: right; } thead { border-bottom: 1px solid #bbb; }
tr:nth-child(even) td { background: #f7f7f7; } p { margin: 4px 0; } ul { margin: 2px 0; }
"""


def shown(names: dict[str, Any]) -> str:
    """Return the page with all cells; print what a terminal shows of each."""
    cells = []
    for number, code in enumerate(CELLS, start=1):
        *lines, last = code.splitlines()
        exec("\n".join(lines), names)  # noqa: S102  (the cells above)
        value = eval(last, names)  # noqa: S307
        sys.stdout.write(f"{code}\n{value}\n\n")
        cells.append(
            f'<div class="cell"><div class="number">[{number}]:</div><pre>{html.escape(code)}</pre>'
            f'<div class="out">{value._repr_html_()}</div></div>'
        )
    return f'<!doctype html><meta charset="utf-8"><style>{STYLE}</style>{"".join(cells)}'


def picture_of(page: Path) -> None:
    with chromium() as tab:
        tab.call("Emulation.setDeviceMetricsOverride", width=900, height=400, deviceScaleFactor=1, mobile=False)
        tab.call("Page.navigate", url=page.as_uri())
        tab.wait("document.readyState === 'complete' && document.querySelectorAll('.cell').length")
        height = tab.js("document.documentElement.scrollHeight")
        tab.call("Emulation.setDeviceMetricsOverride", width=900, height=height, deviceScaleFactor=1, mobile=False)
        path = HERE / "notebook.png"
        tab.picture(path, whole=False)
        Image.open(path).convert("RGB").quantize(64).save(path, optimize=True)


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as place:
        runs = Path(sys.argv[1]) if len(sys.argv) > 1 else Path(place) / "runs"
        if len(sys.argv) < 2:
            subprocess.run([PROGRAM, "submit", *GRID.split(), f"paths.runs_dir={runs}", "--wait"], check=False)
        names: dict[str, Any] = {"hpc_trainer": hpc_trainer}
        os.environ["HPC_TRAINER_RUNS"] = str(runs)
        page = Path(place) / "notebook.html"
        page.write_text(shown(names), encoding="utf-8")
        picture_of(page)
