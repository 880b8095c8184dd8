"""List the checkpoints of a run: state, health, losses and problems of each.

Compares sizes, hashes nothing: `store.verify` does that. Damaged checkpoints are listed with their problem.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeVar

from megastable.base.errors import CheckpointError, DataError
from megastable.base.text import duration, plural, size
from megastable.checkpoint import markers, store
from megastable.checkpoint.markers import Health, Pinned
from megastable.checkpoint.store import FoundCheckpoint, Kind, LayoutState, found, glance, latest
from megastable.config import recipe
from megastable.report.sheet import Column, Sheet
from megastable.run.events.event import Event
from megastable.run.events.reading import read_events
from megastable.run.events.training_events import (
    CheckpointRejected,
    CheckpointSaved,
    CheckpointSuspect,
    Evaluated,
    Imported,
)

T = TypeVar("T")
Standing = Literal["fresh", "healthy", "suspect", "rejected", "damaged", "incomplete"]

UNFINISHED: dict[Kind, str] = {
    "saving": "is being written, or its save was interrupted: the next save deletes it",
    "replaced": "was being replaced by a save that was interrupted: the next start restores it if there is no other",
    "deleting": "is being deleted, or the deletion was interrupted: the next save completes it",
}


@dataclass(frozen=True)
class CatalogueEntry:
    """A checkpoint of a run.

    probes: mean loss of its probe samples when it was saved, None without probes. state: fresh = complete by its sizes,
    not proven yet; suspect = the run was rewound past it; rejected = found damaged when a run started; incomplete =
    being written or deleted. bytes: size on disk. loss: mean of its last finite training losses, nats per token;
    validation: the last validation loss up to it. age: seconds since it was written, as the
    journal says, else as its files do. latest: whether `latest` names it.
    problem: "" if there is none.
    """

    step: int
    name: str
    path: Path
    state: Standing
    bytes: int
    layout: LayoutState | None
    health: Health | None
    pinned: Pinned | None
    loss: float | None
    probes: float | None
    validation: float | None
    age: float | None
    latest: bool
    problem: str


def entries(run: Path) -> list[CatalogueEntry]:
    """The checkpoints of a run directory, or of its checkpoints/ folder, by step. Raises CheckpointError for any other
    path."""
    try:
        folder, journal = _folder(recipe.find(run))
    except OSError as error:
        raise CheckpointError(f"{run} cannot be read: {error.strerror}") from None
    told = _Journaled(journal) if journal is not None else None
    newest = latest(folder)
    return [_entry(one, told, one.path.name == newest) for one in found(folder)]


def sheet(run: Path, listed: Sequence[CatalogueEntry]) -> Sheet:
    """The list as a table, and with all fields for JSON."""
    named = [entry.name for entry in listed if entry.latest]
    good = [entry.name for entry in listed if entry.state == "healthy"]
    facts = [
        ("checkpoints", f"{len(listed):,}"),
        ("on the disk", size(sum(entry.bytes for entry in listed))),
        ("latest", named[0] if named else "none"),
        ("newest healthy", good[-1] if good else "none yet"),
    ]
    columns = [
        Column("name", "checkpoint"),
        Column("state", "state", help="fresh: not proven yet; healthy: later steps stayed on trend"),
        Column("pinned", "pinned", help="not deleted until unpinned"),
        Column("loss", "loss", "number", help="mean of its last training losses, nats per token"),
        Column("probes", "probes", "number", help="mean loss of the probe samples when it was saved"),
        Column("validation", "validation", "number", help="last validation loss up to it, nats per token"),
        Column("size", "size", words=True),
        Column("written", "written", words=True),
        Column("bytes", "bytes", "count", wide=True),
        Column("age_seconds", "seconds since", "number", wide=True),
        Column("layout_text", "layout", words=True),
        Column("problem", "problem"),
    ]
    damaged = sum(entry.state == "damaged" for entry in listed)
    notes = [f"{plural(damaged, 'checkpoint')} cannot be used: see its problem"] if damaged else []
    return Sheet(
        title=f"Checkpoints of {run}",
        facts=facts,
        columns=columns,
        rows=[_row(e) for e in listed],
        notes=notes,
        data={
            "checkpoints": len(listed),
            "bytes": sum(entry.bytes for entry in listed),
            "latest": named[0] if named else None,
            "newest_healthy": good[-1] if good else None,
        },
    )


def _row(entry: CatalogueEntry) -> dict[str, Any]:
    """Keys without a column are for JSON only."""
    health, pinned = entry.health, entry.pinned
    return {
        "name": entry.name, "step": entry.step, "path": str(entry.path), "state": entry.state, "latest": entry.latest,
        "pinned": None if pinned is None else pinned.reason or "yes",
        "proven_at": None if health is None else health.step,
        "calm_steps": None if health is None else health.steps,
        "loss": entry.loss, "probes": entry.probes, "validation": entry.validation,
        "size": size(entry.bytes), "bytes": entry.bytes,
        "written": None if entry.age is None else f"{duration(entry.age)} ago", "age_seconds": entry.age,
        "layout_text": entry.layout and _short(entry.layout), "layout": entry.layout and entry.layout.model_dump(),
        "problem": entry.problem,
    }  # fmt: skip


def _folder(path: Path) -> tuple[Path, Path | None]:
    """(the folder with the checkpoints, the run's journal if known)."""
    if (path / store.MANIFEST).exists():
        raise CheckpointError(f"{path} is a checkpoint: give the directory of its run, two levels above")
    if path.absolute().name == "checkpoints" and path.is_dir():
        return path, path.absolute().parent / "journal.jsonl"
    inside = path / "checkpoints"
    if inside.is_dir() or (path / store.RECIPE).is_file():
        return inside, path / "journal.jsonl"
    if path.is_dir() and found(path):  # copied out of their run
        return path, None
    raise CheckpointError(f"{path} is not the directory of a run: give one such as runs/quickstart")


def _entry(one: FoundCheckpoint, told: _Journaled | None, named: bool) -> CatalogueEntry:
    path = one.path
    _, damage = _tried(glance, path)
    state, unreadable = _tried(store.read_state, path)
    # Problems of state.json mostly follow from those of the manifest.
    problem = UNFINISHED.get(one.kind) or damage or unreadable
    ruling, accepted = markers.convicted(path), markers.accepted(path)
    doubt = state.vitals.doubt if state is not None and state.vitals is not None else ""
    problems = [
        *([problem] if problem else []), *([f"convicted: {ruling.reason}"] if ruling else []),
        *([f"accepted by a person: {accepted.reason}"] if accepted else []),
        *([f"will not count as healthy: {doubt}"] if doubt else []), *markers.problems(path),
    ]  # fmt: skip
    health = markers.healthy(path)
    standing = _standing(one.kind, bool(damage or unreadable), health)
    return CatalogueEntry(
        step=one.step, name=path.name, path=path, state=standing, bytes=_bytes(path),
        layout=state.layout if state else None, health=health, pinned=markers.pinned(path),
        loss=state.recent_loss if state else None,
        probes=store.finite_mean(state.vitals.losses) if state and state.vitals else None,
        validation=told.until(one) if told else None,
        age=_age(path, told.written.get(path.name) if told else None), latest=named,
        problem="; ".join(problems).replace(f"{path}{os.sep}", ""),
    )  # fmt: skip


def _tried(read: Callable[[Path], T], path: Path) -> tuple[T | None, str]:
    """(content, "") or (None, the problem)."""
    try:
        return read(path), ""
    except CheckpointError as error:
        return None, str(error)
    except RecursionError:
        return None, f"{path / store.STATE}: damaged (nested too deep)"


def _standing(kind: Kind, damaged: bool, health: Health | None) -> Standing:
    if kind in UNFINISHED:
        return "incomplete"
    if kind == "suspect" or kind == "rejected":
        return kind
    if damaged:
        return "damaged"
    return "fresh" if health is None else "healthy"


class _Journaled:
    """Validation losses, and when checkpoints were written, in a journal. A checkpoint that was set aside keeps the
    earlier ones, even if the run has repeated its step."""

    def __init__(self, journal: Path) -> None:
        self._by_step: dict[int, float] = {}
        self._aside: dict[str, float | None] = {}
        self.written: dict[str, float] = {}  # unix seconds, by the name of the folder
        try:
            for event in read_events(journal):
                self._take(event)
        except DataError:
            return  # the list is useful without losses

    def until(self, one: FoundCheckpoint) -> float | None:
        """The last loss at or before a checkpoint."""
        if one.kind in ("suspect", "rejected") and one.path.name in self._aside:
            return self._aside[one.path.name]
        return self._last(one.step)

    def _take(self, event: Event) -> None:
        step, name = event.get("step"), event.get("name")
        if isinstance(event, Evaluated) and type(step) is int:
            try:
                self._by_step[step] = float(event["loss"])
            except (KeyError, TypeError, ValueError, OverflowError):
                self._by_step.pop(step, None)
        elif isinstance(event, CheckpointSaved | Imported) and event.time is not None:
            self.written[str(name) if isinstance(event, CheckpointSaved) else f"step-{step}"] = event.time
        elif isinstance(event, CheckpointSuspect | CheckpointRejected) and isinstance(name, str):
            number = name.removeprefix("step-")
            if number.isascii() and number.isdigit() and len(number) < 19:
                aside = f"{event.NAME.removeprefix('checkpoint_')}-{name}"
                self._aside[aside] = self._last(int(number))
                if name in self.written:
                    self.written[aside] = self.written[name]

    def _last(self, step: int) -> float | None:
        before = [at for at in self._by_step if at <= step]
        return self._by_step[max(before)] if before else None


def _bytes(path: Path) -> int:
    total = 0
    try:
        for entry in os.scandir(path):
            if entry.is_file(follow_symlinks=False):
                total += entry.stat(follow_symlinks=False).st_size
    except OSError:
        pass  # deleted meanwhile or unreadable: reported as its problem
    return total


def _age(path: Path, written_at: float | None) -> float | None:
    """Seconds. A copy's files are younger than the checkpoint: the journal, where it has it, knows better."""
    if written_at is not None:
        return max(0.0, time.time() - written_at)
    for written in (path / store.MANIFEST, path):
        try:
            return max(0.0, time.time() - written.stat().st_mtime)
        except OSError:
            continue
    return None


def _short(layout: LayoutState) -> str:
    context = f" (CP{layout.context})" if layout.context > 1 else ""
    return f"TP{layout.tensor} PP{layout.pipeline} DP{layout.data}{context} ZeRO-{layout.zero} {layout.precision}"
