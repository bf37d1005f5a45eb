"""Make report_light.png, report_dark.png and top.svg: a real sweep of 24 small trainings on this machine.

.venv/bin/python docs/pictures/report.py            # some minutes; needs Chromium
.venv/bin/python docs/pictures/report.py FOLDER     # of runs, which has the sweep already
"""

from __future__ import annotations

import asyncio
import re
import subprocess
import sys
import tempfile
from pathlib import Path

from PIL import Image

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parents[1]))

from hpc_trainer.cli.top import make_app  # noqa: E402
from hpc_trainer.operate.find import find_sweep  # noqa: E402
from tests.unit.operate.browser import chromium  # noqa: E402

PROGRAM = Path(sys.executable).with_name("hpc-trainer")
SWEEP = "digits-lr"
GRID = (
    "cluster=local experiment=digits optim.lr=1e-3,3e-3,1e-2,3e-2 optim.weight_decay=0.0,0.1 seed=0,1,2 "
    f"train.num_steps=150 monitor.log_every_steps=5 sweep_name={SWEEP}"
)
HEIGHT, COLOURS = 2000, 200


def picture_of_page(page: Path) -> None:
    """Show the page with the runs of one seed, light and dark."""
    with chromium() as tab:
        for name in ("light", "dark"):
            tab.open(page, height=HEIGHT, dark=name == "dark")
            tab.js("document.querySelector(\"[data-filter='seed']\").focus()")
            tab.call("Input.insertText", text="=0")
            tab.wait("document.querySelectorAll('#parameters .js-plotly-plot').length > 0")
            path = HERE / f"report_{name}.png"
            tab.picture(path, whole=False)
            Image.open(path).convert("RGB").quantize(COLOURS).save(path, optimize=True)


async def picture_of_top(folder: Path) -> None:
    """Show the screen as it stands when curves are drawn; the font is the reader's own."""
    app = make_app(folder, find_sweep(folder, SWEEP))
    async with app.run_test(size=(120, 36)) as pilot:
        while "loss" not in str(app.query_one("#text-curves").render()):
            await pilot.pause(0.5)
        await pilot.pause(0.5)
        svg = re.sub(r"@font-face \{.*?\}\n|<!-- Generated.*?-->\n?", "", app.export_screenshot(), flags=re.DOTALL)
    (HERE / "top.svg").write_text(svg, encoding="utf-8")


def main(folder: Path, page: Path) -> None:
    subprocess.run([PROGRAM, "report", SWEEP, "--runs-dir", folder, "--output", page], check=True)
    picture_of_page(page)
    asyncio.run(picture_of_top(folder))


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as place:
        runs = Path(sys.argv[1]) if len(sys.argv) > 1 else Path(place) / "runs"
        if len(sys.argv) < 2:
            subprocess.run([PROGRAM, "submit", *GRID.split(), f"paths.runs_dir={runs}", "--wait"], check=True)
        main(runs, Path(place) / "report.html")
