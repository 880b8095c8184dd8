"""List a folder of checkpoints, and check by file sizes whether one is complete: nothing is hashed.

For decisions after every save and for lists, where reading terabytes would be too slow. `store.verify` reads
everything.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Literal, NamedTuple

from megastable.base.errors import CheckpointError
from megastable.checkpoint import store
from megastable.checkpoint.store import Contents

Kind = Literal["checkpoint", "suspect", "rejected", "saving", "replaced", "deleting"]
DELETING = ".deleting-"  # prefix of a checkpoint that is being deleted

_KINDS: dict[str, Kind] = {
    "": "checkpoint",
    "suspect-": "suspect",
    "rejected-": "rejected",
    store.SAVING: "saving",
    f"{store.SAVING}replaced-": "replaced",
    DELETING: "deleting",
}
# Those that a person rolled back behind have the number of the rollback in their names.
_NAME = re.compile(rf"({'|'.join(map(re.escape, _KINDS))}|rollback\d+-)step-(0|[1-9][0-9]{{0,17}})")


class FoundCheckpoint(NamedTuple):
    """A folder that is, was or will be a checkpoint."""

    step: int
    kind: Kind
    path: Path


def found(folder: Path) -> list[FoundCheckpoint]:
    """The checkpoints of a folder by step, of all kinds; empty if it does not exist. Raises CheckpointError for a
    folder that cannot be read."""
    try:
        with os.scandir(folder) as inside:
            named = [(match, one) for one in inside if (match := _NAME.fullmatch(one.name)) and one.is_dir()]
    except FileNotFoundError:
        return []
    except OSError as error:
        raise CheckpointError(f"{folder} cannot be read: {error.strerror}") from None
    return sorted(
        FoundCheckpoint(int(match[2]), _KINDS.get(match[1], "suspect"), folder / one.name)
        for match, one in named
    )


def latest(folder: Path) -> str:
    """The name in the file `latest`, "" if there is none."""
    try:
        return (folder / store.LATEST).read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError):
        return ""


def glance(checkpoint: Path) -> Contents:
    """The manifest of a checkpoint whose files all exist with the right sizes. Raises CheckpointError otherwise."""
    contents = store.read_contents(checkpoint)
    match = _NAME.fullmatch(checkpoint.name)
    if match and int(match[2]) != contents.step:
        raise CheckpointError(
            f"{checkpoint / store.MANIFEST}: is of step {contents.step}: another checkpoint's"
        )
    for name, record in contents.files.items():
        path = checkpoint / name
        try:
            size = path.stat().st_size
        except (OSError, ValueError) as error:
            raise CheckpointError(f"{path}: {getattr(error, 'strerror', None) or error}") from None
        if size != record.size:
            raise CheckpointError(
                f"{path}: {size} bytes, the manifest says {record.size}: truncated or changed"
            )
    return contents
