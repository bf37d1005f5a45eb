"""RandAugment (Cubuk et al. 2020, arXiv:1909.13719): its operators and strengths, as in torchvision."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

Numbers = NDArray[np.float64]

OPERATORS = (
    "identity", "shear_x", "shear_y", "translate_x", "translate_y", "rotate", "brightness", "saturation", "contrast",
    "sharpness", "posterize", "solarize", "autocontrast", "equalize",
)  # fmt: skip
_MOVES = ("shear_x", "shear_y", "translate_x", "translate_y", "rotate")
_FACTORS = ("brightness", "saturation", "contrast", "sharpness")
_LARGEST = 30  # the magnitude at which each operator is strongest
_SHEAR, _MOVE, _ANGLE, _FACTOR = 0.3, 150 / 331, np.deg2rad(30.0), 0.9
_BITS, _FEWEST_BITS = 8, 4


def of_one_round(
    u_operator: Numbers, u_sign: Numbers, magnitude: int, height: int, width: int, *, has_colours: bool
) -> Iterator[tuple[str, NDArray[np.int64], Numbers]]:
    """Yield (operator, rows that drew it, their numbers [k, width]) of one round; each row draws one operator.

    Args:
        u_operator: [n] in [0, 1), chooses the operator.
        u_sign: [n] in [0, 1), chooses the direction of a change.
        magnitude: 0 to 30.
        height: of the images, pixels.
        width: of the images, pixels.
        has_colours: False for grey images, whose saturation cannot change.
    """
    chosen = np.floor(u_operator * len(OPERATORS)).astype(np.int64)
    sign, share = np.where(u_sign < 0.5, -1.0, 1.0), magnitude / _LARGEST
    strengths = {
        "shear_x": _SHEAR, "shear_y": _SHEAR, "rotate": _ANGLE, "translate_x": _MOVE * width,
        "translate_y": _MOVE * height,
    }  # fmt: skip
    moves = np.tile([1.0, 0.0, 0.0, 0.0, 1.0, 0.0], (len(chosen), 1))
    for name in _MOVES:
        rows = np.flatnonzero(chosen == OPERATORS.index(name))
        moves[rows] = _matrices(name, strengths[name] * share * sign[rows])
    are_moved = np.flatnonzero(np.isin(chosen, [OPERATORS.index(name) for name in _MOVES]))
    yield "move", are_moved, moves[are_moved]
    for name in OPERATORS:
        rows = np.flatnonzero(chosen == OPERATORS.index(name))
        if name in _FACTORS and (has_colours or name != "saturation"):
            yield name, rows, 1.0 + _FACTOR * share * sign[rows, None]
        elif name == "posterize":
            yield name, rows, np.full((len(rows), 1), float(_BITS - round(share * (_BITS - _FEWEST_BITS))))
        elif name == "solarize":
            yield name, rows, np.full((len(rows), 1), 1.0 - share)
        elif name in ("autocontrast", "equalize"):
            yield name, rows, np.empty((len(rows), 0))


def _matrices(name: str, strength: Numbers) -> Numbers:
    """Return matrices [k, 6] that map a pixel (x, y) of the new image to the old one.

    x' = a x + b y + c, y' = d x + e y + f, in pixels from the middle.
    """
    matrices = np.tile([1.0, 0.0, 0.0, 0.0, 1.0, 0.0], (len(strength), 1))
    if name == "rotate":
        matrices[:, 0] = matrices[:, 4] = np.cos(strength)
        matrices[:, 1], matrices[:, 3] = np.sin(strength), -np.sin(strength)
    else:
        matrices[:, {"shear_x": 1, "shear_y": 3, "translate_x": 2, "translate_y": 5}[name]] = strength
    return matrices
