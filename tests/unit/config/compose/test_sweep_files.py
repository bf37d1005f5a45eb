"""Files of sweep/: axes that step together, blocks, conditions; whose keys win."""

from __future__ import annotations

from pathlib import Path

from hpc_trainer.config.compose.fast_compose import GridComposer
from tests.composed import expand


def _grid(tmp_path: Path, text: str, *more: str) -> list[tuple[str, ...]]:
    (tmp_path / "sweep").mkdir(exist_ok=True)
    (tmp_path / "sweep" / "mine.yaml").write_text("# @package _global_\n" + text)
    with GridComposer([tmp_path]) as composer:
        points = expand(composer, ["cluster=local", "sweep=mine", *more])
    return [tuple(point.axes.values()) for point in points]


_ZIP = """
sweep:
  axes:
    seed: [1, 2]
  zip:
    - model: [mlp, cnn]
      optim.lr: [1e-3, 3e-3]
"""


def test_axes_that_step_together(tmp_path: Path) -> None:
    both = [("mlp", "0.001"), ("cnn", "0.003")]
    assert _grid(tmp_path, _ZIP) == [(seed, *pair) for seed in ("1", "2") for pair in both]
    # A key on the command line leaves; what stepped together with it goes on stepping.
    assert _grid(tmp_path, _ZIP, "seed=7", "model=gpt") == [("0.001",), ("0.003",)]
    assert _grid(tmp_path, _ZIP, "seed=7", "optim.lr=1,2")[:2] == [("1", "mlp"), ("1", "cnn")]


_BLOCKS = """
sweep:
  axes:
    seed: [1, 2]
  exclude:
    - seed == 2 and model == 'cnn'
  blocks:
    - axes:
        model: [mlp, cnn]
    - axes:
        model: [gpt]
        seed: [5]
      zip:
        - data: [text_bytes]
          train.num_steps: [9]
    - exclude: [seed == 1]
"""


def test_blocks_are_joined_and_share_what_stands_beside_them(tmp_path: Path) -> None:
    assert _grid(tmp_path, _BLOCKS) == [
        ("1", "mlp"), ("1", "cnn"), ("2", "mlp"),
        ("gpt", "5", "text_bytes", "9"),
        ("2",),
    ]  # fmt: skip


def test_the_shipped_files_have_the_points_that_their_headers_say() -> None:
    with GridComposer() as composer:
        sizes = {
            name: len(expand(composer, ["experiment=digits", f"sweep={name}"]))
            for name in composer.choices("sweep")
            if name not in ("compress", "pretrain_finetune")  # no grid: deploy/test_forms.py, launch/test_stages.py
        }
    assert sizes == {
        "digits_blocks": 9,
        "digits_grid": 4,
        "digits_paired": 4,
        "seeds": 5,
        "strong_scaling": 2,
        "weak_scaling": 2,
    }
