"""Markers of a checkpoint, written after it is complete: proved healthy, pinned, convicted of wrong content (although
its checksums are right), or accepted by a person despite that.

The markers lie in its folder and are not in its manifest. All but a pin name the manifest that they refer to, so they
do not apply to another checkpoint that they are copied to.
"""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from megastable.base import durable
from megastable.base.errors import CheckpointError
from megastable.checkpoint import store
from megastable.checkpoint.files import hash_file
from megastable.checkpoint.store import ACCEPTED, CONVICTED, HEALTH, PINNED

UNREADABLE = "not known: its marker cannot be read"  # the reason of a pin that still holds

M = TypeVar("M", "Health", "Ruling")

_CONFIG = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


class Health(BaseModel):
    """manifest: xxh3-128 of the bytes of manifest.json; step: when it was found healthy; steps: number on trend by
    then; time: unix seconds."""

    model_config = _CONFIG

    format: Literal[1] = 1
    manifest: str
    step: int = Field(ge=0)
    steps: int = Field(ge=0)
    time: float


class Pinned(BaseModel):
    """A pin: protects a checkpoint from deletion. time: unix seconds."""

    model_config = _CONFIG

    format: Literal[1] = 1
    reason: str = ""
    time: float


class Ruling(BaseModel):
    """convicted.json: a run found the content wrong, and does not continue from it. accepted.json: a person allows it
    anyway. manifest: as in `Health`; reason: a sentence; time: unix seconds."""

    model_config = _CONFIG

    format: Literal[1] = 1
    manifest: str
    reason: str = ""
    time: float


def mark_healthy(checkpoint: Path, step: int, steps: int) -> Health:
    """Mark a checkpoint as healthy at `step`, after `steps` steps on trend.

    The marker is on disk when this returns. Raises CheckpointError if the manifest cannot be read or says that
    the checkpoint is not finite, and if the marker cannot be written.
    """
    if not store.read_contents(checkpoint).finite:
        raise CheckpointError(f"{checkpoint}: its manifest says that it is not finite: it cannot be healthy")
    health = Health(manifest=_hash(checkpoint), step=step, steps=steps, time=round(time.time(), 3))
    _write(checkpoint / HEALTH, health)
    return health


def healthy(checkpoint: Path) -> Health | None:
    """The healthy marker of a checkpoint, None without one. A marker that is damaged, of a newer format or of another
    checkpoint does not count; `problems` reports it."""
    return _about(checkpoint, HEALTH, Health)[0]


def convict(checkpoint: Path, reason: str) -> Ruling:
    """Forbid runs to continue from a checkpoint, until a person accepts it. It is no longer healthy, either.

    The marker is on disk when this returns. Raises CheckpointError."""
    ruling = _rule(checkpoint, CONVICTED, reason)
    for other in (HEALTH, ACCEPTED):
        _remove(checkpoint / other)
    return ruling


def accept(checkpoint: Path, reason: str = "") -> Ruling:
    """Record that a person allows runs to continue from a checkpoint, whatever they find. Raises CheckpointError."""
    ruling = _rule(checkpoint, ACCEPTED, reason)
    _remove(checkpoint / CONVICTED)
    return ruling


def convicted(checkpoint: Path) -> Ruling | None:
    """The ruling that forbids runs to continue from it. An unreadable marker does not count: a run finds out again."""
    return None if accepted(checkpoint) is not None else _about(checkpoint, CONVICTED, Ruling)[0]


def accepted(checkpoint: Path) -> Ruling | None:
    """The ruling by which a person allows runs to continue from it anyway."""
    return _about(checkpoint, ACCEPTED, Ruling)[0]


def pin(checkpoint: Path, reason: str = "") -> Pinned:
    """Keep a checkpoint until `unpin`; an older reason is replaced. The marker is on disk when this returns.

    Raises CheckpointError for a folder that is not a checkpoint, and if the marker cannot be written.
    """
    if not os.path.isfile(checkpoint / store.MANIFEST):
        raise CheckpointError(
            f"{checkpoint}: there is no such checkpoint: it is not a folder with {store.MANIFEST}"
        )
    text = reason.encode("utf-8", "backslashreplace").decode()  # from a command line it may not be UTF-8
    pinned = Pinned(reason=text, time=round(time.time(), 3))
    _write(checkpoint / PINNED, pinned)
    return pinned


def unpin(checkpoint: Path) -> bool:
    """Remove the pin of a checkpoint; whether there was one. Raises CheckpointError."""
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
    """The pin of a checkpoint. An unreadable pin counts: nothing is deleted because of a damaged file."""
    return _pinned(checkpoint)[0]


def problems(checkpoint: Path) -> list[str]:
    """Problems with the markers of a checkpoint, a sentence each."""
    rulings = (_about(checkpoint, name, Ruling) for name in (CONVICTED, ACCEPTED))
    return [
        problem
        for _, problem in (_about(checkpoint, HEALTH, Health), _pinned(checkpoint), *rulings)
        if problem
    ]


def _about(checkpoint: Path, name: str, model: type[M]) -> tuple[M | None, str]:
    """(a marker that refers to this very checkpoint or None, its problem or "")."""
    path = checkpoint / name
    try:
        marker = model.model_validate_json(path.read_bytes())
        if marker.manifest != _hash(checkpoint):
            return None, f"{path}: is about another checkpoint: it does not count"
    except (FileNotFoundError, NotADirectoryError):
        return None, ""
    except (OSError, ValueError) as error:
        return None, f"{path}: damaged ({_told(error)}): it does not count"
    return marker, ""


def _rule(checkpoint: Path, name: str, reason: str) -> Ruling:
    try:
        manifest = _hash(checkpoint)
    except OSError as error:
        raise CheckpointError(
            f"{checkpoint}: there is no such checkpoint: {error.strerror or error}"
        ) from None
    text = reason.encode("utf-8", "backslashreplace").decode()
    ruling = Ruling(manifest=manifest, reason=text, time=round(time.time(), 3))
    _write(checkpoint / name, ruling)
    return ruling


def _remove(path: Path) -> None:
    try:
        path.unlink(missing_ok=True)
        durable.sync_directory(path.parent)
    except OSError as error:
        raise CheckpointError(f"{path} could not be removed: {error.strerror or error}") from None


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
        return unknown, f"{path}: damaged ({_told(error)}): the checkpoint is kept"


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
