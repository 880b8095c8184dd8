"""What is found out about a checkpoint after it stands: that it proved healthy, that a person wants it to be kept.

health.json and pinned.json lie in its folder and are not in its manifest. A health marker names the manifest that it
is about, so it says nothing of another checkpoint that it is copied to.
"""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from megastable import durable
from megastable.checkpoint import store
from megastable.checkpoint.files import hash_file
from megastable.checkpoint.store import HEALTH, PINNED
from megastable.errors import CheckpointError

UNREADABLE = "not known: its marker cannot be read"  # the reason of a pin that stands all the same

_CONFIG = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


class Health(BaseModel):
    """manifest: xxh3-128 of the bytes of manifest.json; step: when it was found healthy; steps: that had stayed on
    trend by then; time: unix seconds."""

    model_config = _CONFIG

    format: Literal[1] = 1
    manifest: str
    step: int = Field(ge=0)
    steps: int = Field(ge=0)
    time: float


class Pinned(BaseModel):
    """Not to be deleted. time: unix seconds."""

    model_config = _CONFIG

    format: Literal[1] = 1
    reason: str = ""
    time: float


def mark_healthy(checkpoint: Path, step: int, steps: int) -> Health:
    """Say that a checkpoint proved healthy at `step`, when `steps` steps after it had stayed on trend.

    The marker is on the disk when this returns. Raises CheckpointError when the manifest cannot be read or says that
    the checkpoint is not finite, and when the marker cannot be written.
    """
    if not store.read_contents(checkpoint).finite:
        raise CheckpointError(f"{checkpoint}: its manifest says that it is not finite: it cannot be healthy")
    health = Health(manifest=_hash(checkpoint), step=step, steps=steps, time=round(time.time(), 3))
    _write(checkpoint / HEALTH, health)
    return health


def healthy(checkpoint: Path) -> Health | None:
    """What a checkpoint was found healthy by, None when it was not. A marker that is damaged, of a newer format or of
    another checkpoint counts as none; `problems` says so."""
    return _health(checkpoint)[0]


def pin(checkpoint: Path, reason: str = "") -> Pinned:
    """Keep a checkpoint until `unpin`; an older reason is replaced. The marker is on the disk when this returns.

    Raises CheckpointError for a folder that is none, and when the marker cannot be written.
    """
    if not os.path.isfile(checkpoint / store.MANIFEST):
        raise CheckpointError(
            f"{checkpoint}: there is no such checkpoint: it is not a folder with {store.MANIFEST}"
        )
    text = reason.encode("utf-8", "backslashreplace").decode()  # of a command line it may be no UTF-8
    pinned = Pinned(reason=text, time=round(time.time(), 3))
    _write(checkpoint / PINNED, pinned)
    return pinned


def unpin(checkpoint: Path) -> bool:
    """Let a checkpoint go like any other; whether it was pinned. Raises CheckpointError."""
    path = checkpoint / PINNED
    try:
        path.unlink()
        durable.sync_directory(checkpoint)
    except (FileNotFoundError, NotADirectoryError):
        if not checkpoint.is_dir():
            raise CheckpointError(f"{checkpoint}: there is no such checkpoint") from None
        return False
    except OSError as error:
        raise CheckpointError(f"{path} could not be removed: {error.strerror or error}") from None
    return True


def pinned(checkpoint: Path) -> Pinned | None:
    """The pin of a checkpoint. One that cannot be read counts, too: nothing is deleted because of a damaged file."""
    return _pinned(checkpoint)[0]


def problems(checkpoint: Path) -> list[str]:
    """What is wrong with the markers of a checkpoint, a sentence each."""
    return [problem for _, problem in (_health(checkpoint), _pinned(checkpoint)) if problem]


def _health(checkpoint: Path) -> tuple[Health | None, str]:
    path = checkpoint / HEALTH
    try:
        health = Health.model_validate_json(path.read_bytes())
        if health.manifest != _hash(checkpoint):
            return None, f"{path}: is about another checkpoint: it does not count"
    except (FileNotFoundError, NotADirectoryError):
        return None, ""
    except (OSError, ValueError) as error:
        return None, f"{path}: damaged ({_told(error)}): it does not count"
    return health, ""


def _pinned(checkpoint: Path) -> tuple[Pinned | None, str]:
    path = checkpoint / PINNED
    try:
        return Pinned.model_validate_json(path.read_bytes()), ""
    except NotADirectoryError:
        return None, ""
    except (OSError, ValueError) as error:
        if isinstance(error, FileNotFoundError) and not os.path.lexists(path):
            return None, ""
        unknown = Pinned(reason=UNREADABLE, time=0.0)
        return unknown, f"{path}: damaged ({_told(error)}): it is kept all the same"


def _hash(checkpoint: Path) -> str:
    return hash_file(checkpoint / store.MANIFEST).xxh3


def _write(path: Path, marker: BaseModel) -> None:
    try:
        durable.write_file(path, marker.model_dump_json(indent=1).encode() + b"\n")
    except OSError as error:
        raise CheckpointError(f"{path} could not be written: {error.strerror or error}") from None


def _told(error: Exception) -> str:
    """An error in a few words."""
    if isinstance(error, ValidationError):
        first: Any = error.errors(include_url=False, include_context=False, include_input=False)[0]
        where = ".".join(map(str, first["loc"]))
        return f"{where}: {first['msg']}" if where else str(first["msg"])
    return str(getattr(error, "strerror", None) or error).split("\n", 1)[0]
