"""Folders of images as torchvision's ImageFolder reads them: one folder for each class, and above it one for each client."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from dpcfl_net.core.errors import ConfigError
from dpcfl_net.core.extras import advice
from dpcfl_net.data.files import FileSource
from dpcfl_net.data.formats.table import Table, refused

SUFFIXES = (".bmp", ".gif", ".jpeg", ".jpg", ".png", ".ppm", ".pgm", ".tif", ".tiff", ".webp")
MODES = {1: "L", 3: "RGB", 4: "RGBA"}


def read(path: Path, files: FileSource) -> tuple[Table, Table | None]:
    """Read CLASS/image or CLIENT/CLASS/image, below the folders train and test if there are both.

    Classes are numbered in the order of their names. A folder without images is a class too.

    Args:
        path: The folder.
        files: The settings.

    Returns:
        Training and test records; None for the test records if there is no folder test.

    Raises:
        ConfigError: If a folder or an image does not fit, or Pillow is missing.
    """
    parts = [path / "train", path / "test"] if (path / "train").is_dir() and (path / "test").is_dir() else [path]
    found = {part: _images(part) for part in parts}
    depths = {len(image.relative_to(part).parts) for part, images in found.items() for image in images}
    if depths not in ({2}, {3}):
        raise refused(path, f"images must be in CLASS/ or all in CLIENT/CLASS/, got the depths {sorted(depths)}")
    level = "*/*/" if depths == {3} else "*/"  # folders without images count: classes are public, which of them occur is not
    folders = {folder.name for part in parts for folder in part.glob(level) if folder.is_dir() and folder.name[0] not in "._"}
    names = sorted(folders | {image.parent.name for images in found.values() for image in images})
    if len(names) > 256:
        raise refused(path, f"it has {len(names)} classes, must be at most 256")
    tables = [_table(part, images, names, depths == {3}, files.shape) for part, images in found.items()]
    return tables[0], tables[1] if len(tables) > 1 else None


def _images(folder: Path) -> list[Path]:
    found = sorted(path for path in folder.rglob("*") if path.is_file() and path.suffix.lower() in SUFFIXES)
    if not found:
        raise refused(folder, f"it has no image ({', '.join(SUFFIXES)})")
    return found


def _table(folder: Path, images: list[Path], names: list[str], clients: bool, shape: Sequence[int] | None) -> Table:
    first = _pixels(images[0], shape)
    x = np.empty((len(images), *first.shape), np.uint8)
    for row, image in enumerate(images):
        pixels = _pixels(image, shape)
        if pixels.shape != first.shape:
            raise refused(image, f"its shape is {pixels.shape}, that of {images[0].name} {first.shape}; set data.files.shape")
        x[row] = pixels
    y = np.array([names.index(image.parent.name) for image in images], np.int64)
    owners = np.array([image.relative_to(folder).parts[0] for image in images]) if clients else None
    return Table(x, y, owners, len(names))


def _pixels(path: Path, shape: Sequence[int] | None) -> np.ndarray:
    image_library = pillow()
    try:
        with image_library.open(path) as image:
            return pixels(image, shape)
    except (OSError, SyntaxError, ValueError, image_library.DecompressionBombError) as error:
        raise refused(path, f"not an image: {error}") from error


def pixels(image: Any, shape: Sequence[int] | None) -> np.ndarray:
    """Convert an image of Pillow; values of 16 bits are divided by 257.

    Args:
        image: The image.
        shape: (C, H, W) to convert and resize to; None: as it is, grey or RGB.

    Returns:
        uint8 (C, H, W).

    Raises:
        ConfigError: If there is no such number of channels, or the values of the image have no range that its format states.
    """
    image = _of_bytes(image)
    if shape is None:
        image = image.convert("L" if image.mode in ("1", "L", "LA") else "RGB")
    else:
        channels, height, width = shape
        if channels not in MODES:
            raise ConfigError(f"data.files.shape is {list(shape)}: an image has {', '.join(map(str, MODES))} channels")
        image = image.convert(MODES[channels])
        image = image if image.size == (width, height) else image.resize((width, height), pillow().Resampling.BILINEAR)
    values = np.asarray(image, np.uint8)
    return values[None] if values.ndim == 2 else np.ascontiguousarray(values.transpose(2, 0, 1))


def _of_bytes(image: Any) -> Any:
    """The image with values of 8 bits; Pillow's own conversion to 8 bits makes every value above 255 white."""
    if image.mode.startswith("I;16") or (image.mode == "I" and image.format == "PNG"):  # Pillow 10 opens 16 bits of a PNG as I
        return pillow().fromarray(np.rint(np.asarray(image) / 257).astype(np.uint8))
    if image.mode in ("I", "F"):
        raise ConfigError(
            f"data.files.path: {getattr(image, 'filename', None) or 'an image'}: its values are numbers of 32 bits (mode "
            f"{image.mode}), which have no range that is white: save it with 8 or 16 bits"
        )
    return image


def pillow() -> Any:
    """Import Pillow's Image module.

    Raises:
        ConfigError: If Pillow is not installed.
    """
    try:
        from PIL import Image
    except ModuleNotFoundError:
        raise ConfigError(f"data.dataset: images need Pillow: {advice('images')}") from None
    return Image
