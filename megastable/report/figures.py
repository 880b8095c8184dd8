"""Draws a figure into a file."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from megastable.base.errors import DataError

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def save(figure: Figure, path: Path) -> None:
    """Write a figure, in the format of the file's extension. Raises DataError."""
    try:
        figure.savefig(path, dpi=110, format=path.suffix[1:] or "png")
    except (OSError, ValueError) as error:
        raise DataError(f"{path} could not be written: {error}") from None


@contextmanager
def draw_figure(path: Path, width: float, height: float) -> Iterator[Figure]:
    """A new figure of so many inches, without a window system; saved at the end. Raises DataError."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained")
    yield figure
    save(figure, path)
