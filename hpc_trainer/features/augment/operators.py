"""Pixel operators on batches of images, each row by its own numbers, on the CPU or on a device.

Colours are changed by kornia's functional operators. Geometry is changed by torch's `grid_sample`. Its grid is made
without matrix products: their bits may depend on how many images are in a batch.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor
from torch.nn import functional

from hpc_trainer.features.augment import AugmentConfig
from hpc_trainer.features.augment.draw import Drawn, Shape


class Operators:
    """Executor of the operators that were drawn.

    Args:
        config: says which operators are on.
        shape: sizes of images before and after.
        pixels: (mean, std) of each channel by which pixels were normalized; None: unknown.
    """

    def __init__(
        self, config: AugmentConfig, shape: Shape, pixels: tuple[Sequence[float], Sequence[float]] | None
    ) -> None:
        self._padding, self._shape, self._pixels = config.crop_padding, shape, pixels
        self._changes_colours = config.changes_colours
        self._constants: dict[torch.device, tuple[Tensor, Tensor, Tensor]] = {}
        if config.changes_colours:
            import kornia.enhance  # before worker processes are forked: each would import it  # noqa: F401

    def __call__(self, drawn: Drawn) -> Tensor:
        """Return the images of the batch [num_samples, C, out_height, out_width]; those of `drawn` stay unchanged."""
        with _one_thread(drawn.images.device):
            return self._run(drawn)

    def _run(self, drawn: Drawn) -> Tensor:
        images, is_own, mixes = drawn.images, False, []
        is_before_colours = is_in_colours = self._changes_colours
        for name, rows, numbers in self._steps(drawn):
            if is_before_colours and name not in _OF_PLACE:
                images, is_own, is_before_colours = self._to_pixels(images), True, False
            if is_in_colours and name in _LAST:
                images, is_in_colours = self._values(images), False
            if name in _CROPS:
                images, is_own = self._crop(name, images, numbers), True
            elif name in _CHANGES and len(rows) == len(images):
                images, is_own = _CHANGES[name](images, numbers), True
            elif name in _CHANGES:
                images, is_own = images if is_own else images.clone(), True
                images.index_copy_(0, rows, _CHANGES[name](images[rows], numbers))
            else:
                mixes.append((name, rows, numbers))
        # Whatever was drawn for this batch: else a sample's last bits would depend on the other samples.
        if is_before_colours:
            images = self._to_pixels(images)
        if is_in_colours:
            images = self._values(images)
        return _mixed(images, drawn.num_samples, mixes) if mixes else images[: drawn.num_samples]

    def _steps(self, drawn: Drawn) -> Iterator[tuple[str, Tensor, Tensor]]:
        """Yield for each step the operator, its rows (then those of partners), and its numbers [rows, width]."""
        at_row = at_number = 0
        for name, count, width in drawn.program.steps:
            num_rows = 2 * count if name in _MIXES else count
            numbers = drawn.numbers[at_number : at_number + count * width].view(count, width)
            yield name, drawn.rows[at_row : at_row + num_rows], numbers
            at_row, at_number = at_row + num_rows, at_number + count * width

    def _crop(self, name: str, images: Tensor, numbers: Tensor) -> Tensor:
        size = self._shape.out_height, self._shape.out_width
        if name == "resized_crop":
            return warped(images, numbers, size, padding_mode="border")
        *_, black = self._of(images.device)
        copy = by_slices if images.device.type == "cpu" else by_index
        return copy(images, numbers, size, self._padding, black.to(images.dtype))

    def _to_pixels(self, values: Tensor) -> Tensor:
        """Return pixels from 0 to 1, one operation at a time.

        A fused operation rounds differently at the end of a vector, so the result would depend on the place in a batch.
        """
        mean, std, _ = self._of(values.device)
        return (values * std).add_(mean).clamp_(0.0, 1.0)

    def _values(self, pixels: Tensor) -> Tensor:
        mean, std, _ = self._of(pixels.device)
        return (pixels - mean).div_(std)

    def _of(self, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
        """Return (mean, std, the value of black), [1, C, 1, 1] each; cached, since a copy would wait for the device."""
        constants = self._constants.get(device)
        if constants is None:
            mean, std = ([0.0], [1.0]) if self._pixels is None else self._pixels
            black = [-value / by for value, by in zip(mean, std, strict=True)]
            made = [torch.tensor(list(values), device=device).view(1, -1, 1, 1) for values in (mean, std, black)]
            constants = self._constants[device] = (made[0], made[1], made[2])
        return constants


def warped(images: Tensor, matrices: Tensor, size: tuple[int, int], *, padding_mode: str) -> Tensor:
    """Return images [n, C, *size], bilinear, each pixel read from where `matrices` [n, 6] (draw.py) map it."""
    (height, width), (out_height, out_width) = images.shape[2:], size
    x = torch.arange(out_width, device=images.device) - (out_width - 1) / 2
    y = torch.arange(out_height, device=images.device) - (out_height - 1) / 2
    a, b, c, d, e, f = matrices.view(-1, 6, 1).unbind(1)
    across = (a * x + c)[:, None, :] + (b * y)[:, :, None]
    down = (d * x + f)[:, None, :] + (e * y)[:, :, None]
    grid = torch.stack([across * (2.0 / width), down * (2.0 / height)], dim=-1)
    return functional.grid_sample(images, grid, padding_mode=padding_mode, align_corners=False)


def by_slices(images: Tensor, numbers: Tensor, size: tuple[int, int], border: int, black: Tensor) -> Tensor:
    """Cut images [n, C, *size] out of `images` with a black border, by `numbers` (top, left, 1 if flipped).

    One slice for each sample, which on a CPU takes a fifth of the time of `by_index`.
    """
    (height, width), (out_height, out_width) = images.shape[2:], size
    cut = black.expand(len(images), images.shape[1], *size).clone()
    for image, source, (low_y, low_x, is_flipped) in zip(cut, images, numbers.long().tolist(), strict=True):
        down, to_down = _overlap(low_y - border, height, out_height)
        across, to_across = _overlap(low_x - border, width, out_width)
        image[:, to_down, to_across] = source[:, down, across]
        if is_flipped:
            image.copy_(image.flip(-1))
    return cut


def _overlap(low: int, size: int, out_size: int) -> tuple[slice, slice]:
    """Return along one side the slice of `size` that `out_size` pixels from `low` on cover, and the slice it fills."""
    first = min(max(low, 0), size)
    last = max(min(low + out_size, size), first)
    return slice(first, last), slice(first - low, last - low) if last > first else slice(0, 0)


def by_index(images: Tensor, numbers: Tensor, size: tuple[int, int], border: int, black: Tensor) -> Tensor:
    """Return the same as `by_slices` without waiting for a device, with as many kernels for any number of samples."""
    count, channels, height, width = images.shape
    whole = black.expand(count, channels, height + 2 * border, width + 2 * border).clone()
    whole[:, :, border : border + height, border : border + width] = images
    top, left, is_flipped = numbers.long().unbind(1)
    down = top[:, None] + torch.arange(size[0], device=images.device)
    across = torch.arange(size[1], device=images.device).expand(count, -1)
    across = left[:, None] + torch.where(is_flipped[:, None] > 0, across.flip(1), across)
    rows = whole.gather(2, down[:, None, :, None].expand(-1, channels, -1, whole.shape[3]))
    return rows.gather(3, across[:, None, None, :].expand(-1, channels, size[0], -1))


def _move(images: Tensor, matrices: Tensor) -> Tensor:
    height, width = images.shape[2:]
    return warped(images, matrices, (height, width), padding_mode="zeros")


def _by_kornia(name: str) -> Callable[[Tensor, Tensor], Tensor]:
    """Return a function of kornia.enhance as an operator; its numbers are [n, 1], or [n, 0] if it takes none."""

    def change(images: Tensor, numbers: Tensor) -> Tensor:
        import kornia.enhance

        changed: Tensor = getattr(kornia.enhance, name)(images, *([numbers.flatten()] if numbers.shape[1] else []))
        return changed

    return change


def _posterize(images: Tensor, bits: Tensor) -> Tensor:
    return _by_kornia("posterize")(images, bits.long())


def _autocontrast(images: Tensor, none: Tensor) -> Tensor:
    """Stretch each channel to 0 to 1; a channel of one value stays, as in torchvision."""
    has_contrast = images.amax((-2, -1), keepdim=True) > images.amin((-2, -1), keepdim=True)
    return torch.where(has_contrast, _by_kornia("normalize_min_max")(images, none), images)


def _flip(images: Tensor, none: Tensor) -> Tensor:
    return images.flip(-1)


def _erase(images: Tensor, boxes: Tensor) -> Tensor:
    return images.masked_fill(_inside(images, boxes), 0.0)


def _mixup(images: Tensor, others: Tensor, weights: Tensor) -> Tensor:
    weights = weights.view(-1, 1, 1, 1)
    return (images * weights).add_(others * (1.0 - weights))


def _cutmix(images: Tensor, others: Tensor, boxes: Tensor) -> Tensor:
    return torch.where(_inside(images, boxes), others, images)


def _inside(images: Tensor, boxes: Tensor) -> Tensor:
    """Return a mask [n, 1, H, W] of the pixels inside the boxes (top, left, height, width)."""
    top, left, height, width = boxes.view(-1, 4, 1).unbind(1)
    y = torch.arange(images.shape[2], device=images.device)
    x = torch.arange(images.shape[3], device=images.device)
    down, across = (y >= top) & (y < top + height), (x >= left) & (x < left + width)
    return (down[:, :, None] & across[:, None, :]).unsqueeze(1)


def _mixed(images: Tensor, num_samples: int, mixes: Sequence[tuple[str, Tensor, Tensor]]) -> Tensor:
    """Return the first `num_samples` images, mixed with their partners, which are the images behind them."""
    mixed = images[:num_samples]
    if len(mixes) == 1 and len(mixes[0][2]) == num_samples:
        name, _, numbers = mixes[0]
        return _MIXES[name](mixed, images[num_samples:], numbers)
    mixed = mixed.clone()
    for name, rows, numbers in mixes:
        own, partners = rows[: len(numbers)], rows[len(numbers) :]
        mixed.index_copy_(0, own, _MIXES[name](images[own], images[partners], numbers))
    return mixed


_CROPS = ("resized_crop", "padded_crop")
_OF_PLACE, _LAST = frozenset({*_CROPS, "flip"}), frozenset({"erase", "mixup", "cutmix"})
"""Operators before and after those that change pixels from 0 to 1; neither needs to know black and white."""
_MIXES: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {"mixup": _mixup, "cutmix": _cutmix}
_CHANGES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "flip": _flip,
    "move": _move,
    "brightness": _by_kornia("adjust_brightness_accumulative"),
    "contrast": _by_kornia("adjust_contrast_with_mean_subtraction"),
    "saturation": _by_kornia("adjust_saturation_with_gray_subtraction"),
    "hue": _by_kornia("adjust_hue"),
    "sharpness": _by_kornia("sharpness"),
    "posterize": _posterize,
    "solarize": _by_kornia("solarize"),
    "autocontrast": _autocontrast,
    "equalize": _by_kornia("equalize"),
    "erase": _erase,
}


@contextlib.contextmanager
def _one_thread(device: torch.device) -> Iterator[None]:
    """Use one thread on a CPU: two threads add up a mean in another order than one, and loader processes have one."""
    before = torch.get_num_threads()
    if device.type != "cpu" or before == 1:
        yield
        return
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)
