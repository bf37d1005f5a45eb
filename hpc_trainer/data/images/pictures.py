"""Decoding of pictures by Pillow, with an antialiased resize and a crop. No torch: the command line checks data."""

from __future__ import annotations

import contextlib
import io
import math
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from hpc_trainer.errors import BrokenPictureError

if TYPE_CHECKING:
    from PIL.Image import Image

FORMATS = ("JPEG", "PNG", "WEBP")
EXTENSIONS = ("jpg", "jpeg", "png", "webp")
_MODES = {1: "L", 3: "RGB"}
# Modes of more than 8 bits a channel: Pillow would silently clip them to white.
_DEEP = ("I", "F")
_ORIENTATION = 0x0112  # EXIF tag


def decode(
    data: bytes, name: str, num_channels: int, least: int | None = None, formats: tuple[str, ...] | None = FORMATS
) -> Image:
    """Decode the picture in `data` as grey (1 channel) or RGB (3), rotated by its EXIF tag, without transparency.

    Args:
        name: name of the file, for messages.
        least: least pixels of the shorter side. A JPEG is decoded at 1/2, 1/4 or 1/8 of its size if its shorter side
            stays at least this long. This is much faster, and only for callers that shrink the picture anyway.
        formats: Pillow's names of the allowed formats; None: all formats of Pillow.

    Raises:
        BrokenPictureError: the picture cannot be decoded.
    """
    from PIL import Image  # `plan` has reported a missing Pillow (`ImagesConfig.problems`)

    mode = _MODES[num_channels]
    try:
        image: Image.Image = Image.open(io.BytesIO(data), formats=formats)
        if least is not None:
            scale = least / min(image.size)
            image.draft(mode, (math.ceil(image.width * scale), math.ceil(image.height * scale)))
        image.load()
        if image.mode.startswith(_DEEP):
            raise ValueError(f"its pixels are {image.mode}, more than 8 bits a channel")
        image = _upright(image)
        if image.mode in ("P", "PA") and "transparency" in image.info:
            image = image.convert("RGBA")  # Pillow warns about a direct conversion
        return image if image.mode == mode else image.convert(mode)
    except MemoryError:
        raise
    except Exception as error:  # Pillow's plugins raise OSError, SyntaxError, ValueError, struct.error and more
        cause = "it is empty" if not data else _plain(error)
        kinds = "" if formats is None else f" as {', '.join(formats)}"
        raise BrokenPictureError(f"{name} cannot be decoded{kinds}: {cause}") from error


def _upright(image: Image) -> Image:
    """Rotate a picture by its EXIF orientation; return it unchanged if it needs no rotation or has no readable tag."""
    from PIL import ImageOps

    with contextlib.suppress(Exception):
        if image.getexif().get(_ORIENTATION, 1) != 1:
            return ImageOps.exif_transpose(image)
    return image


def resize_and_crop(image: Image, short_side: int, size: int) -> NDArray[np.uint8]:
    """Resize a picture to a shorter side of `short_side` pixels, and return its centre, [size, size, channels].

    The resize is bilinear with antialiasing, in one pass: pixels outside the crop are not computed. A picture that has
    this size already is only cropped.
    """
    from PIL import Image

    width, height = _resized(image.size, short_side)
    left, top = round((width - size) / 2), round((height - size) / 2)
    if (width, height) == image.size:
        return to_array(image.crop((left, top, left + size, top + size)))
    across, down = image.width / width, image.height / height
    box = (left * across, top * down, (left + size) * across, (top + size) * down)
    return to_array(image.resize((size, size), Image.Resampling.BILINEAR, box=box))


def resized(image: Image, height: int, width: int) -> NDArray[np.uint8]:
    """Return the picture resized to a height and a width, [height, width, channels]; bilinear with antialiasing."""
    from PIL import Image

    if image.size != (width, height):
        image = image.resize((width, height), Image.Resampling.BILINEAR)
    return to_array(image)


def _resized(image_size: tuple[int, int], short_side: int) -> tuple[int, int]:
    """Return (width, height) for this shorter side, rounded like torchvision's Resize."""
    shorter = min(image_size)
    width, height = (short_side if side == shorter else int(short_side * side / shorter) for side in image_size)
    return width, height


def to_array(image: Image) -> NDArray[np.uint8]:
    """Return the pixels, [height, width, channels]."""
    pixels: NDArray[np.uint8] = np.asarray(image)
    return pixels if pixels.ndim == 3 else pixels[:, :, None]


def read_picture(data: bytes, name: str, *, num_channels: int, short_side: int, size: int) -> NDArray[np.uint8]:
    """Decode, resize and crop a picture, and return its pixels [size, size, channels].

    Raises:
        BrokenPictureError: the picture cannot be decoded.
    """
    return resize_and_crop(decode(data, name, num_channels, least=short_side), short_side, size)


def _plain(error: Exception) -> str:
    """Return the text of an error, without Pillow's name of the object in memory, which does not help the user."""
    text = str(error)
    if "cannot identify image file" in text:
        return "it has none of these formats"
    return text or type(error).__name__
