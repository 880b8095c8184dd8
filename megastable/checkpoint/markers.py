"""What is found out about a checkpoint after it stands: that it proved healthy, that a person wants it to be kept, that
its content is wrong though its checksums are right, that a person accepts it all the same.

The markers lie in its folder and are not in its manifest. All but a pin name the manifest that they are about, so they
say nothing of another checkpoint that they are copied to.
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

UNREADABLE = "not known: its marker cannot be read"  # the reason of a pin that stands all the same

M = TypeVar("M", "Health", "Ruling")

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


class Ruling(BaseModel):
    """convicted.json: a run found the content wrong, and does not go on from it. accepted.json: a person says that it
    may. manifest: as in `Health`; reason: a sentence; time: unix seconds."""

    model_config = _CONFIG

    format: Literal[1] = 1
    manifest: str
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


def convict(checkpoint: Path, reason: str) -> Ruling:
    """Say that no run may go on from a checkpoint, until a person accepts it. It is no longer healthy, either.

    The marker is on the disk when this returns. Raises CheckpointError."""
    ruling = _rule(checkpoint, CONVICTED, reason)
    for other in (HEALTH, ACCEPTED):
        _remove(checkpoint / other)
    return ruling


def accept(checkpoint: Path, reason: str = "") -> Ruling:
    """A person says that runs may go on from a checkpoint, whatever they find in it. Raises CheckpointError."""
    ruling = _rule(checkpoint, ACCEPTED, reason)
    _remove(checkpoint / CONVICTED)
    return ruling


def convicted(checkpoint: Path) -> Ruling | None:
    """Why no run may go on from a checkpoint. A marker that cannot be read counts as none: a run finds out again."""
    return None if accepted(checkpoint) is not None else _ruling(checkpoint, CONVICTED)[0]


def accepted(checkpoint: Path) -> Ruling | None:
    """Whether a person has said that runs may go on from it all the same."""
    return _ruling(checkpoint, ACCEPTED)[0]


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
    rulings = (_ruling(checkpoint, name) for name in (CONVICTED, ACCEPTED))
    return [problem for _, problem in (_health(checkpoint), _pinned(checkpoint), *rulings) if problem]


def _health(checkpoint: Path) -> tuple[Health | None, str]:
    return _about(checkpoint, HEALTH, Health)


def _ruling(checkpoint: Path, name: str) -> tuple[Ruling | None, str]:
    return _about(checkpoint, name, Ruling)


def _about(checkpoint: Path, name: str, model: type[M]) -> tuple[M | None, str]:
    """A marker that is about this very checkpoint; what is wrong with it."""
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
