"""Pictures are decoded to what Pillow shows, made smaller without aliases, and named where they are broken."""

from __future__ import annotations

import io
import subprocess
import sys
import warnings

import numpy as np
import pytest
import torch
from PIL import Image, ImageOps
from torch.nn import functional

from hpc_trainer.data.images import ImageFolderConfig
from hpc_trainer.data.images.pictures import decode, read_picture, resize_and_crop, to_array
from hpc_trainer.errors import BrokenPictureError
from tests.unit.data.images.making import encoded, pixels


@pytest.mark.parametrize("extension", ["jpg", "png", "webp"])
@pytest.mark.parametrize("channels", [1, 3])
def test_a_picture_is_what_pillow_shows(extension, channels):
    data = encoded(pixels(1, 2, channels=3), extension)
    mode = "L" if channels == 1 else "RGB"
    expected = np.asarray(Image.open(io.BytesIO(data)).convert(mode)).reshape(20, 24, channels)
    assert np.array_equal(to_array(decode(data, "a", channels)), expected)


@pytest.mark.parametrize("extension", ["jpg", "png", "webp"])
@pytest.mark.parametrize("orientation", range(1, 9))
def test_a_picture_is_turned_as_its_camera_noted(extension, orientation):
    array, exif, file = pixels(1, 2, (20, 24)), Image.Exif(), io.BytesIO()
    exif[0x0112] = orientation
    Image.fromarray(array).save(file, {"jpg": "JPEG"}.get(extension, extension), exif=exif)
    shown = ImageOps.exif_transpose(Image.open(io.BytesIO(file.getvalue())))
    found = to_array(decode(file.getvalue(), "a", 3))
    assert np.array_equal(found, np.asarray(shown))
    assert found.shape[:2] == ((24, 20) if orientation > 4 else (20, 24))


def test_a_picture_of_the_right_size_is_not_touched():
    array = pixels(0, 0, (16, 16))
    assert np.array_equal(read_picture(encoded(array), "a", num_channels=3, short_side=16, size=16), array)


def test_the_centre_is_cut_out():
    array = pixels(0, 0, (16, 20))
    found = read_picture(encoded(array), "a", num_channels=3, short_side=16, size=8)
    assert np.array_equal(found, array[4:12, 6:14])
    wide = pixels(0, 0, (16, 21))  # no pixel lies in the middle: nothing is blurred for that
    assert np.array_equal(read_picture(encoded(wide), "a", num_channels=3, short_side=16, size=8), wide[4:12, 6:14])


@pytest.mark.parametrize(("width", "height", "short", "size"), [(88, 60, 30, 24), (64, 64, 16, 16), (60, 100, 24, 20)])
def test_it_is_resized_as_torch_does_with_antialiasing(width, height, short, size):
    array = np.array(Image.fromarray(pixels(1, 1, (8, 8))).resize((width, height), Image.Resampling.BICUBIC))
    found = read_picture(encoded(array), "a", num_channels=3, short_side=short, size=size)
    scale = short / min(width, height)
    whole = functional.interpolate(
        torch.from_numpy(array).permute(2, 0, 1)[None].float(), (round(height * scale), round(width * scale)),
        mode="bilinear", antialias=True,
    )  # fmt: skip
    top, left = (whole.shape[-2] - size) // 2, (whole.shape[-1] - size) // 2
    expected = whole[0, :, top : top + size, left : left + size].permute(1, 2, 0).numpy()
    assert np.abs(found - expected).max() < 1.5  # Pillow counts in whole numbers


def test_fine_stripes_become_grey_and_no_pattern():
    stripes = np.zeros((256, 256, 3), dtype=np.uint8)
    stripes[:, ::2] = 255
    found = read_picture(encoded(stripes), "a", num_channels=3, short_side=32, size=32).astype(int)
    assert np.abs(found - 127.5)[:, 1:-1].max() < 2


def test_a_large_jpeg_is_decoded_at_a_part_of_its_size():
    smooth = np.array(Image.fromarray(pixels(1, 1, (6, 8))).resize((800, 600), Image.Resampling.BICUBIC))
    data = encoded(smooth, "jpg", quality=95)
    assert decode(data, "a", 3).size == (800, 600)
    assert decode(data, "a", 3, least=75).size == (100, 75)
    assert decode(data, "a", 3, least=76).size == (200, 150)
    assert decode(data, "a", 3, least=900).size == (800, 600)
    fast = read_picture(data, "a", num_channels=3, short_side=70, size=64).astype(int)
    exact = resize_and_crop(decode(data, "a", 3), 70, 64)
    assert np.abs(fast - exact).mean() < 1


def test_unusual_pictures_are_made_rgb():
    rgba = np.concatenate([pixels(0, 0), np.zeros((20, 24, 1), dtype=np.uint8)], axis=-1)
    grey = pixels(0, 0, channels=1)
    palette = io.BytesIO()
    Image.fromarray(pixels(0, 0)).convert("P").save(palette, "PNG", transparency=bytes(range(256)))
    cmyk = io.BytesIO()
    Image.fromarray(pixels(0, 0)).convert("CMYK").save(cmyk, "JPEG")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert np.array_equal(to_array(decode(encoded(rgba), "a", 3)), rgba[..., :3])
        assert np.array_equal(to_array(decode(encoded(grey), "a", 3)), grey.repeat(3, axis=-1))
        for file in (palette, cmyk):
            assert decode(file.getvalue(), "a", 3).mode == "RGB"


def _deep() -> bytes:
    file = io.BytesIO()
    Image.fromarray(np.full((8, 8), 40_000, dtype=np.uint16)).save(file, "PNG")
    return file.getvalue()


@pytest.mark.parametrize(
    ("data", "cause"),
    [
        (b"", "it is empty"),
        (b"no picture at all", "it has none of these formats"),
        (b"GIF89a" + bytes(100), "it has none of these formats"),
        (_deep(), "its pixels are I;16, more than 8 bits a channel"),
    ],
)
def test_what_is_no_picture_is_named(data, cause):
    with pytest.raises(BrokenPictureError, match=rf"^x/y.jpg cannot be decoded as JPEG, PNG, WEBP: {cause}$"):
        decode(data, "x/y.jpg", 3)


@pytest.mark.parametrize("extension", ["jpg", "png", "webp"])
def test_a_truncated_picture_is_never_decoded(extension):
    data = encoded(pixels(0, 0, (64, 64)), extension)
    for share in (0.02, 0.3, 0.6, 0.9):
        with pytest.raises(BrokenPictureError, match=r"x\.jpg cannot be decoded"):
            decode(data[: int(len(data) * share)], "x.jpg", 3)


def test_the_default_is_that_of_imagenet():
    assert [ImageFolderConfig(image_size=size).short_side for size in (224, 32, 1)] == [256, 37, 1]


def test_no_torch_is_imported():
    names = ", ".join(f"hpc_trainer.data.images.{name}" for name in ("folder", "shards", "pictures"))
    code = f"import sys, {names}; print('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "False\n"
