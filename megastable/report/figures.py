"""Saves a figure to a file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from megastable.base.errors import DataError


def save(figure: Any, path: Path) -> None:
    """Write a matplotlib figure, in the format of the file's extension, and free its memory. Raises DataError."""
    from matplotlib import pyplot

    try:
        figure.savefig(path, dpi=110, format=path.suffix[1:] or "png")
    except (OSError, ValueError) as error:
        raise DataError(f"{path} could not be written: {error}") from None
    finally:
        pyplot.close(figure)
