"""Seconds of a core to submit a grid of a Hydra app with seven groups, on a real Slurm, beside hydra-submitit-launcher.

The grid takes both choices of all seven groups, so that no two points in a row have the same files. Both submit the
same overrides of the same app. The rival is stopped when its array is accepted.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
from pathlib import Path

from tests.benchmarks.submission import Bench, slurm_bench

REPEATS = 3
_CHOICES = {
    "data": {
        name: f"_target_: my.{name}\nname: {name}\ndir: ${{paths.data}}/{name}\nclasses: 10\nbatch_size: 128\n"
        "workers: 4\npin_memory: true\naugment: {crop: true, flip: 0.5, mean: [0.49, 0.48, 0.44]}\n"
        for name in ("cifar", "imagenet")
    },
    "model": {
        name: f"_target_: my.{name}\nname: {name}\nclasses: ${{data.classes}}\nwidth: 64\ndepth: 12\ndropout: 0.1\n"
        "compile: false\nhead: {hidden: 256, act: gelu}\n"
        for name in ("resnet", "vit")
    },
    "optim": {
        name: f"_target_: torch.optim.{name}\n_partial_: true\nlr: 0.01\nweight_decay: 0.01\n"
        for name in ("AdamW", "SGD")
    },
    "schedule": {
        name: f"name: {name}\nwarmup: 100\ntotal: ${{trainer.max_steps}}\n" for name in ("cosine", "constant")
    },
    "trainer": {
        name: f"_target_: lightning.Trainer\nstrategy: {name}\nmax_steps: 10000\naccelerator: gpu\ndevices: 1\n"
        "precision: bf16\nlog_every_n_steps: 50\n"
        for name in ("auto", "ddp")
    },
    "logger": {
        name: f"{name}: {{_target_: my.{name}, save_dir: '${{paths.output}}', prefix: ''}}\n"
        for name in ("csv", "wandb")
    },
    "callbacks": {
        name: "checkpoint: {dirpath: '${paths.output}/checkpoints', monitor: val/acc, mode: max}\n"
        f"early_stopping: {{patience: 100, monitor: val/acc}}\nbar: {{theme: {name}}}\n"
        for name in ("rich", "plain")
    },
}
_ROOT = """
seed: 0
tags: [dev, "${model.name}"]
paths: {root: "${oc.env:HOME,/tmp}", data: "${paths.root}/data", output: "${hydra:runtime.output_dir}"}
extras: {ignore_warnings: false, print_config: true}
"""
_APP = """
import hydra

@hydra.main(version_base="1.3", config_path="conf", config_name="config")
def main(config):
    print(config.seed)

if __name__ == "__main__":
    main()
"""
GROUPS = [f"{group}={','.join(choices)}" for group, choices in _CHOICES.items()]
# Points -> the axes of values.
SIZES = {128: [], 1024: ["optim.lr=1e-3,1e-2", "seed=range(4)"]}
BUDGET_S, BUDGET_RATIO = 5.0, 10
COLUMNS = ("median", "min", "max", "budget", "peak MiB")


def write_app(folder: Path) -> None:
    """Write the app into a new folder."""
    defaults = [f"  - {group}: {next(iter(choices))}\n" for group, choices in _CHOICES.items()]
    files = {"config": f"defaults:\n{''.join(defaults)}  - _self_\n{_ROOT}"}
    files |= {f"{group}/{name}": text for group, choices in _CHOICES.items() for name, text in choices.items()}
    for name, text in files.items():
        path = folder / "conf" / f"{name}.yaml"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    (folder / "train.py").write_text(_APP)


def used(argv: list[str], folder: Path, env: dict[str, str]) -> tuple[float, float]:
    """Return the seconds of a core that a command and its children took, and the largest peak memory in MiB."""
    with subprocess.Popen(argv, cwd=folder, env=env, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE) as process:
        assert process.stderr is not None
        said = process.stderr.read()
        _, status, usage = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise RuntimeError(said.decode()[-3000:])
    return usage.ru_utime + usage.ru_stime, usage.ru_maxrss / 1024


def _ours(bench: Bench, app: Path, words: list[str], number: int) -> tuple[float, float]:
    argv = [
        sys.executable, "-m", "hpc_trainer", "submit", "cluster=testbed", "hardware=testbed_x1",
        f"sweep_name=app{number}", "--app", "train.py", *words,
    ]  # fmt: skip
    made = used(argv, app, {**bench.env, "HPC_TRAINER_RUNS": str(bench.folder / "runs")})
    bench.end_all()
    return made


def run(rival_path: Path | None = None) -> None:
    """Print the table; without the rival's folder (`make bench` installs it), or without Slurm, it says so."""
    with slurm_bench("submit --app") as bench:
        if bench is None:
            return
        bench.env.pop("PYTHONDONTWRITEBYTECODE", None)  # a user's modules are compiled
        app = bench.folder / "app"
        write_app(app)
        print(f"\n{'submit --app, CPU s':<22}", *(f"{name:>10}" for name in COLUMNS))
        imports = [used([sys.executable, "-c", "import train"], app, bench.env)[0] for _ in range(REPEATS)]
        _print("import of the app", imports)
        ours = {}
        for points, axes in SIZES.items():
            results = [_ours(bench, app, [*GROUPS, *axes], points * 10 + number) for number in range(REPEATS)]
            seconds = [each[0] for each in results]
            ours[points] = statistics.median(seconds)
            budget = f"import+{BUDGET_S:.0f}" if points == max(SIZES) else "-"
            _print(f"{points:>6} points", seconds, budget, f"{max(each[1] for each in results):.0f}")
        if rival_path is None:
            print("hydra-submitit-launcher: not measured (make bench installs it)")
            return
        for points, axes in SIZES.items():
            argv = [sys.executable, "train.py", "-m", *bench.rival_words(), *GROUPS, *axes]
            taken = bench.until_accepted(argv, app, rival_path)[1]
            budget = f"; budget: ≥ {BUDGET_RATIO} ×" if points == max(SIZES) else ""
            print(
                f"{points:>6} points, rival   {taken:>10.2f} = {taken / ours[points]:.0f} × ours (n=1{budget})",
                flush=True,
            )


def _print(name: str, seconds: list[float], *more: str) -> None:
    told = (statistics.median(seconds), min(seconds), max(seconds))
    print(f"{name:<22}", *(f"{each:>10.2f}" for each in told), *(f"{each:>10}" for each in more), flush=True)


if __name__ == "__main__":
    run(Path(sys.argv[1]).absolute() if len(sys.argv) > 1 else None)
