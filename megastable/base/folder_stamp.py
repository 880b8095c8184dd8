"""Tells whether a folder may have changed since it was listed, without listing it again."""

from __future__ import annotations

import time
from pathlib import Path

RECENT = 3.0  # seconds: times of some file systems tick every second or two


def folder_stamp(folder: Path) -> int | None:
    """The time of a folder's last change, to compare with that of a later call. None while it is so recent that another
    change may get the same time: list it again then. Take it before the listing. Raises OSError."""
    changed = folder.stat().st_mtime_ns
    return changed if time.time() - changed / 1e9 > RECENT else None
