"""Markers of a checkpoint, written after it is complete: proved healthy, pinned, quarantined (its content
is wrong, although its checksums are right), or accepted by a person despite that.

The markers lie in its folder and are not in its manifest. All but a pin name the manifest that they refer to, so they
do not apply to another checkpoint that they are copied to.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from megastable.base import durable
from megastable.base.errors import CheckpointError
from megastable.checkpoint import store
from megastable.checkpoint.files import hash_file
from megastable.checkpoint.store import ACCEPTED, HEALTH, PINNED, QUARANTINED

UNREADABLE = "not known: its marker cannot be read"  # the reason of a pin that still holds

M = TypeVar("M", "Health", "Ruling")

_CONFIG = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

FORMER = "convicted.json"  # the name of quarantined.json before 2026-11-29: a wrong state must not pass for a good one


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
    """quarantined.json: a run found the content wrong, and does not continue from it. accepted.json: a person allows it
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


def read_health(checkpoint: Path) -> Health | None:
    """The healthy marker of a checkpoint, None without one. A marker that is damaged, of a newer format or of another
    checkpoint does not count; `list_marker_problems` reports it."""
    return _about(checkpoint, HEALTH, Health)[0]


def mark_bad(checkpoint: Path, reason: str) -> Ruling:
    """Forbid runs to continue from a checkpoint, until a person accepts it. It is no longer healthy, either.

    The marker is on disk when this returns. Raises CheckpointError."""
    bad_ruling = _rule(checkpoint, QUARANTINED, reason)
    for other_name in (HEALTH, ACCEPTED):
        _remove(checkpoint / other_name)
    return bad_ruling


def mark_accepted(checkpoint: Path, reason: str = "") -> Ruling:
    """Record that a person allows runs to continue from a checkpoint, whatever they find. Raises CheckpointError."""
    acceptance_ruling = _rule(checkpoint, ACCEPTED, reason)
    for bad_name in (QUARANTINED, FORMER):
        _remove(checkpoint / bad_name)
    return acceptance_ruling


def read_bad_ruling(checkpoint: Path) -> Ruling | None:
    """The ruling that forbids runs to continue from it. An unreadable marker does not count: a run finds out again."""
    if read_acceptance(checkpoint) is not None:
        return None
    return _about(checkpoint, QUARANTINED, Ruling)[0] or _about(checkpoint, FORMER, Ruling)[0]


def read_acceptance(checkpoint: Path) -> Ruling | None:
    """The ruling by which a person allows runs to continue from it anyway."""
    return _about(checkpoint, ACCEPTED, Ruling)[0]


def pin_checkpoint(checkpoint: Path, reason: str = "") -> Pinned:
    """Keep a checkpoint until `unpin_checkpoint`; an older reason is replaced. The marker is on disk when this returns.

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


def unpin_checkpoint(checkpoint: Path) -> bool:
    """Remove the pin of a checkpoint; whether there was one. Raises CheckpointError."""
    pin_path = checkpoint / PINNED
    try:
        pin_path.unlink()
        durable.sync_directory(checkpoint)
    except (FileNotFoundError, NotADirectoryError):
        if not checkpoint.is_dir():
            raise CheckpointError(f"{checkpoint}: there is no such checkpoint") from None
        return False
    except OSError as error:
        raise CheckpointError(f"{pin_path} could not be removed: {error.strerror or error}") from None
    return True


def read_pin(checkpoint: Path) -> Pinned | None:
    """The pin of a checkpoint. An unreadable pin counts: nothing is deleted because of a damaged file."""
    return _pinned(checkpoint)[0]


def list_marker_problems(checkpoint: Path) -> list[str]:
    """Problems with the markers of a checkpoint, a sentence each."""
    problems = [_about(checkpoint, HEALTH, Health)[1], _pinned(checkpoint)[1]]
    problems += [_about(checkpoint, marker_name, Ruling)[1] for marker_name in (QUARANTINED, ACCEPTED)]
    return [problem for problem in problems if problem]


def _about(checkpoint: Path, name: str, model: type[M]) -> tuple[M | None, str]:
    """(a marker that refers to this very checkpoint or None, its problem or "")."""
    marker_path = checkpoint / name
    try:
        marker = model.model_validate_json(marker_path.read_bytes())
        if marker.manifest != _hash(checkpoint):
            return None, f"{marker_path}: is about another checkpoint: it does not count"
    except (FileNotFoundError, NotADirectoryError):
        return None, ""
    except (OSError, ValueError) as error:
        return None, f"{marker_path}: damaged ({_told(error)}): it does not count"
    return marker, ""


def _rule(checkpoint: Path, name: str, reason: str) -> Ruling:
    try:
        manifest_hash = _hash(checkpoint)
    except OSError as error:
        raise CheckpointError(
            f"{checkpoint}: there is no such checkpoint: {error.strerror or error}"
        ) from None
    printable_reason = reason.encode("utf-8", "backslashreplace").decode()
    new_ruling = Ruling(manifest=manifest_hash, reason=printable_reason, time=round(time.time(), 3))
    _write(checkpoint / name, new_ruling)
    return new_ruling


def _remove(path: Path) -> None:
    try:
        path.unlink(missing_ok=True)
        durable.sync_directory(path.parent)
    except OSError as error:
        raise CheckpointError(f"{path} could not be removed: {error.strerror or error}") from None


def _pinned(checkpoint: Path) -> tuple[Pinned | None, str]:
    pin_path = checkpoint / PINNED
    try:
        return Pinned.model_validate_json(pin_path.read_bytes()), ""
    except NotADirectoryError:
        return None, ""
    except (OSError, ValueError) as error:
        if isinstance(error, FileNotFoundError) and not os.path.lexists(pin_path):
            return None, ""
        unreadable_pin = Pinned(reason=UNREADABLE, time=0.0)
        return unreadable_pin, f"{pin_path}: damaged ({_told(error)}): the checkpoint is kept"


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
        first_error: Any = error.errors(include_url=False, include_context=False, include_input=False)[0]
        field_path = ".".join(map(str, first_error["loc"]))
        return f"{field_path}: {first_error['msg']}" if field_path else str(first_error["msg"])
    return str(getattr(error, "strerror", None) or error).split("\n", 1)[0]


# Decide when a checkpoint has proved healthy: after enough later steps on trend, without a gap.
#
# A state that is finite when saved may still be bad: a drift shows only later. So a checkpoint counts as healthy when
# the run that continued from it stayed on trend for a while. Pure: the caller judges each step.


class StepsOnTrend:
    """Counts the steps on trend after each checkpoint that is not proven yet.

    after: number of steps on trend required; 0 = healthy as soon as it is saved. Only an unbroken series of them
    later than the checkpoint counts, so one step that is not on trend resets all counts.
    """

    def __init__(self, after: int) -> None:
        if after < 0:
            raise ValueError(f"after={after}: a number of steps")
        self.after = after
        self._at: int | None = None  # the last known step
        self._on_trend_since = 0  # all steps later than it, up to _at, stayed on trend
        self._pending: set[int] = set()

    @property
    def pending(self) -> list[int]:
        """Steps of the checkpoints that are not proven yet, ascending."""
        return sorted(self._pending)

    def count_steps_on_trend(self, checkpoint: int) -> int:
        """Number of steps after the checkpoint of that step that stayed on trend so far, without a gap."""
        return 0 if self._at is None else max(0, self._at - max(checkpoint, self._on_trend_since))

    def add_checkpoint(self, step: int) -> list[int]:
        """A checkpoint of `step` is complete. The call may come late: steps after it count from when it was taken.

        Returns the steps of the checkpoints that are healthy now: mostly none, with after=0 this one.
        """
        if self._at is None or step > self._at:  # the steps between are unknown
            self._at = self._on_trend_since = step
        self._pending.add(step)
        return self._proven()

    def add_step(self, step: int, on_trend: bool) -> list[int]:
        """`step` is done. on_trend: it stayed on trend: an applied update, no finding, no open incident.

        Returns the steps of the checkpoints that became healthy with it, ascending. A gap in the steps resets the
        count. A step that was done before means that the run was rewound.
        """
        if self._at is not None and step <= self._at:
            self.rewind_to(step - 1)
        elif self._at is None or step > self._at + 1:
            self._on_trend_since = step - 1
        self._at = step
        if not on_trend:
            self._on_trend_since = step
        return self._proven()

    def rewind_to(self, step: int) -> None:
        """The run continues from the state after `step`: later checkpoints no longer count, and the remaining ones
        start again, since the steps on trend after them may have led into the incident."""
        self.resume_at(step, self._pending)

    def resume_at(self, step: int, pending: Iterable[int]) -> None:
        """A new process continues from `step`. pending: steps of the checkpoints in the folder that are not
        healthy; the counts of the last process are lost."""
        self._pending = {saved_step for saved_step in pending if saved_step <= step}
        self._at = self._on_trend_since = step

    def _proven(self) -> list[int]:
        proven_steps = [step for step in self.pending if self.count_steps_on_trend(step) >= self.after]
        self._pending.difference_update(proven_steps)
        return proven_steps
