"""Image grid as one figure of the report page: a title above each row, a caption below each image."""

from __future__ import annotations

import base64
import html
import struct
import zlib
from dataclasses import dataclass
from typing import Any

import numpy as np

from dpcfl_net.report.figures import spec

MIN_SIDE = 24  # minimum side of an image in pixels; smaller images are enlarged
HEAD, FOOT, GAP = 0.42, 0.28, 0.12  # space above a row, below it for captions, and between images, in image sides
HEIGHT = 480  # pixels on the page, if it is wide enough


@dataclass(frozen=True, eq=False)
class Row:
    """One row of the grid.

    Attributes:
        title: Text above the row.
        images: (k, C, H, W), values in [0, 1], one or three channels.
        words: Caption of each image; empty for none.
    """

    title: str
    images: np.ndarray
    words: list[str]


def grid(rows: list[Row]) -> dict[str, Any]:
    """Draw rows of images as a plotly figure.

    Args:
        rows: Rows with equal numbers of images, all of one shape.

    Returns:
        Figure specification with an additional key `aspect` (width / height).

    Raises:
        ValueError: If the images have neither one nor three channels.
    """
    count, channels, high, wide = rows[0].images.shape
    if channels not in (1, 3):
        raise ValueError(f"images of one or three channels, got {channels}")
    times = max(1, -(-MIN_SIDE // min(high, wide)))
    high, wide = high * times, wide * times
    head, foot, gap = round(HEAD * high), round(FOOT * high), round(GAP * wide)
    tall = sum(head + high + foot * bool(row.words) for row in rows)
    canvas = np.zeros((tall, (wide + gap) * count - gap, 4), np.uint8)
    notes, top = [], 0
    for row in rows:
        top += head
        notes.append(_note(row.title, 0, top, "left", "bottom", 12))
        for i, image in enumerate(row.images):
            left = i * (wide + gap)
            pixels = np.rint(255 * np.clip(image, 0, 1)).astype(np.uint8).repeat(times, 1).repeat(times, 2)
            canvas[top : top + high, left : left + wide, :3] = np.broadcast_to(pixels.transpose(1, 2, 0), (high, wide, 3))
            canvas[top : top + high, left : left + wide, 3] = 255
            if row.words:
                notes.append(_note(row.words[i], left + wide / 2, top + high, "center", "top", 11))
        top += high + foot * bool(row.words)
    sides = {
        "showgrid": False,
        "zeroline": False,
        "showticklabels": False,
        "ticks": "",
        "fixedrange": True,
        "constrain": "domain",
    }
    trace = {"type": "image", "source": png(canvas), "hoverinfo": "skip", "zsmooth": False}
    axes = {
        "xaxis": {**sides, "range": [0, canvas.shape[1]]},
        "yaxis": {**sides, "range": [canvas.shape[0], 0], "scaleanchor": "x"},
    }
    figure = spec([trace], HEIGHT, annotations=notes, margin={"l": 0, "r": 0, "t": 0, "b": 0}, **axes)
    return {**figure, "aspect": round(canvas.shape[1] / canvas.shape[0], 3)}


def _note(text: str, x: float, y: float, across: str, down: str, size: int) -> dict[str, Any]:
    font = {"color": "@ink", "size": size}
    place = {"x": x, "y": y, "xanchor": across, "yanchor": down, "showarrow": False, "borderpad": 0}
    return {"text": html.escape(text), **place, "font": font}


def png(pixels: np.ndarray) -> str:
    """Encode RGBA pixels, (H, W, 4) uint8, as a PNG data URI."""
    high, wide, _ = pixels.shape
    lines = b"".join(b"\0" + line.tobytes() for line in pixels)
    parts = [(b"IHDR", struct.pack(">IIBBBBB", wide, high, 8, 6, 0, 0, 0)), (b"IDAT", zlib.compress(lines, 9)), (b"IEND", b"")]
    chunks = [struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data)) for kind, data in parts]
    return "data:image/png;base64," + base64.b64encode(b"\x89PNG\r\n\x1a\n" + b"".join(chunks)).decode()
