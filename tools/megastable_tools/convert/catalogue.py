"""List the checkpoints of a run: state, health, losses and problems of each.

Compares sizes, hashes nothing: `store.verify` does that. Damaged checkpoints are listed with their problem.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeVar

from megastable.base import durable
from megastable.base.errors import CheckpointError, DataError
from megastable.base.process import login_name
from megastable.base.text import count_noun, make_visible, show_duration, show_size
from megastable.checkpoint import markers, store
from megastable.checkpoint.held_points import find_interrupted_rewind
from megastable.checkpoint.markers import Health, Pinned
from megastable.checkpoint.store import (
    FoundCheckpoint,
    Kind,
    LayoutState,
    check_sizes,
    list_checkpoints,
    read_latest,
)
from megastable.config import recipe
from megastable.report.sheet import Column, Sheet
from megastable.run.directory import RunDirectory
from megastable.run.events.event import Event
from megastable.run.events.reading import read_events
from megastable.run.events.stability_events import IncidentEvent
from megastable.run.events.training_events import (
    CheckpointRejected,
    CheckpointSaved,
    CheckpointSuspect,
    Evaluated,
    Imported,
    RolledBack,
    Training,
)
from megastable.run.log import RunLog
from megastable.supervise.locks import SUPERVISOR, TRAINING, take_lock
from megastable_tools.convert.inspecting import checkpoints_of

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


def list_entries(run: Path) -> list[CatalogueEntry]:
    """The checkpoints of a run directory, or of its checkpoints/ folder, by step. Raises CheckpointError for any other
    path."""
    try:
        folder, journal = _folder(recipe.find_recipe(run))
    except OSError as error:
        raise CheckpointError(f"{run} cannot be read: {error.strerror}") from None
    told = _Journaled(journal) if journal is not None else None
    newest = read_latest(folder)
    return [_entry(one, told, one.path.name == newest) for one in list_checkpoints(folder)]


def make_catalogue_sheet(run: Path, listed: Sequence[CatalogueEntry]) -> Sheet:
    """The list as a table, and with all fields for JSON."""
    latest_names = [entry.name for entry in listed if entry.latest]
    healthy_names = [entry.name for entry in listed if entry.state == "healthy"]
    sheet_facts = [
        ("checkpoints", f"{len(listed):,}"),
        ("on the disk", show_size(sum(entry.bytes for entry in listed))),
        ("latest", latest_names[0] if latest_names else "none"),
        ("newest healthy", healthy_names[-1] if healthy_names else "none yet"),
    ]
    sheet_columns = [
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
    sheet_notes = [f"{count_noun(damaged, 'checkpoint')} cannot be used: see its problem"] if damaged else []
    data = {
        "checkpoints": len(listed), "bytes": sum(entry.bytes for entry in listed),
        "latest": latest_names[0] if latest_names else None,
        "newest_healthy": healthy_names[-1] if healthy_names else None,
    }  # fmt: skip
    rows = [_row(catalogue_entry) for catalogue_entry in listed]
    return Sheet(
        f"Checkpoints of {run}", facts=sheet_facts, columns=sheet_columns, rows=rows, notes=sheet_notes, data=data
    )  # fmt: skip


def _row(entry: CatalogueEntry) -> dict[str, Any]:
    """Keys without a column are for JSON only."""
    health_marker, pin_marker = entry.health, entry.pinned
    return {
        "name": entry.name, "step": entry.step, "path": str(entry.path), "state": entry.state, "latest": entry.latest,
        "pinned": None if pin_marker is None else pin_marker.reason or "yes",
        "proven_at": None if health_marker is None else health_marker.step,
        "steps_on_trend": None if health_marker is None else health_marker.steps,
        "loss": entry.loss, "probes": entry.probes, "validation": entry.validation,
        "size": show_size(entry.bytes), "bytes": entry.bytes,
        "written": None if entry.age is None else f"{show_duration(entry.age)} ago", "age_seconds": entry.age,
        "layout_text": entry.layout and _short(entry.layout), "layout": entry.layout and entry.layout.model_dump(),
        "problem": entry.problem,
    }  # fmt: skip


def _folder(path: Path) -> tuple[Path, Path | None]:
    """(the folder with the checkpoints, the run's journal if known)."""
    if (path / store.MANIFEST).exists():
        raise CheckpointError(f"{path} is a checkpoint: give the directory of its run, two levels above")
    if path.absolute().name == "checkpoints" and path.is_dir():
        return path, path.absolute().parent / "journal.jsonl"
    inner_folder = path / "checkpoints"
    if inner_folder.is_dir() or (path / store.RECIPE).is_file():
        return inner_folder, path / "journal.jsonl"
    if path.is_dir() and list_checkpoints(path):  # copied out of their run
        return path, None
    raise CheckpointError(f"{path} is not the directory of a run: give one such as runs/quickstart")


def _entry(one: FoundCheckpoint, told: _Journaled | None, named: bool) -> CatalogueEntry:
    path = one.path
    _, damage_problem = _tried(check_sizes, path)
    run_state, state_problem = _tried(store.read_state, path)
    # Problems of state.json mostly follow from those of the manifest.
    main_problem = UNFINISHED.get(one.kind) or damage_problem or state_problem
    ruling, acceptance_marker = markers.read_bad_ruling(path), markers.read_acceptance(path)
    vitals_doubt = run_state.vitals.doubt if run_state is not None and run_state.vitals is not None else ""
    all_problems = [
        *([main_problem] if main_problem else []), *([f"quarantined: {ruling.reason}"] if ruling else []),
        *([f"accepted by a person: {acceptance_marker.reason}"] if acceptance_marker else []),
        *([f"will not count as healthy: {vitals_doubt}"] if vitals_doubt else []), *markers.list_marker_problems(path),
    ]  # fmt: skip
    health_marker = markers.read_health(path)
    standing: Standing = "fresh" if health_marker is None else "healthy"
    if one.kind in UNFINISHED:
        standing = "incomplete"
    elif one.kind == "suspect" or one.kind == "rejected":
        standing = one.kind
    elif main_problem:
        standing = "damaged"
    return CatalogueEntry(
        step=one.step, name=path.name, path=path, state=standing, bytes=_bytes(path),
        layout=run_state.layout if run_state else None, health=health_marker, pinned=markers.read_pin(path),
        loss=run_state.recent_loss if run_state else None,
        probes=store.finite_mean(run_state.vitals.losses) if run_state and run_state.vitals else None,
        validation=told.find_loss_until(one) if told else None,
        age=_age(path, told), latest=named,
        problem="; ".join(all_problems).replace(f"{path}{os.sep}", ""),
    )  # fmt: skip


def _tried(read: Callable[[Path], T], path: Path) -> tuple[T | None, str]:
    """(content, "") or (None, the problem)."""
    try:
        return read(path), ""
    except CheckpointError as error:
        return None, str(error)
    except RecursionError:
        return None, f"{path / store.STATE}: damaged (nested too deep)"


class _Journaled:
    """Validation losses, and when checkpoints were written, in a journal. A checkpoint that was set aside keeps the
    earlier ones, even if the run has repeated its step."""

    def __init__(self, journal: Path) -> None:
        self._by_step: dict[int, float] = {}
        self._aside: dict[str, float | None] = {}
        self.written: dict[str, float] = {}  # unix seconds, by the name of the folder
        try:
            for journal_event in read_events(journal):
                self._take(journal_event)
        except DataError:
            return  # the list is useful without losses

    def find_loss_until(self, one: FoundCheckpoint) -> float | None:
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
            step_digits = name.removeprefix("step-")
            if step_digits.isascii() and step_digits.isdigit() and len(step_digits) < 19:
                aside_name = f"{event.NAME.removeprefix('checkpoint_')}-{name}"
                self._aside[aside_name] = self._last(int(step_digits))
                if name in self.written:
                    self.written[aside_name] = self.written[name]

    def _last(self, step: int) -> float | None:
        earlier_steps = [loss_step for loss_step in self._by_step if loss_step <= step]
        return self._by_step[max(earlier_steps)] if earlier_steps else None


def _bytes(path: Path) -> int:
    total_bytes = 0
    try:
        for folder_entry in os.scandir(path):
            if folder_entry.is_file(follow_symlinks=False):
                total_bytes += folder_entry.stat(follow_symlinks=False).st_size
    except OSError:
        pass  # deleted meanwhile or unreadable: reported as its problem
    return total_bytes


def _age(path: Path, told: _Journaled | None) -> float | None:
    """Seconds. A copy's files are younger than the checkpoint: the journal, where it has it, knows better."""
    if told is not None and path.name in told.written:
        return max(0.0, time.time() - told.written[path.name])
    for dated_path in (path / store.MANIFEST, path):
        try:
            return max(0.0, time.time() - dated_path.stat().st_mtime)
        except OSError:
            continue
    return None


def _short(layout: LayoutState) -> str:
    context = f" (CP{layout.context})" if layout.context > 1 else ""
    return f"TP{layout.tensor} PP{layout.pipeline} DP{layout.data}{context} ZeRO-{layout.zero} {layout.precision}"


# What a person decides on a checkpoint: `pin_checkpoint`, `unpin_checkpoint`, `accept_checkpoint`, and `rollback` to it


def find_one(path: Path) -> Path:
    """A checkpoint named explicitly: "the newest of a run" changes over time. Raises CheckpointError."""
    found = checkpoints_of(path)
    if len(found) > 1:
        checkpoint_names = ", ".join(run_checkpoint.name for run_checkpoint in found)
        raise CheckpointError(f"{path} has {len(found)} checkpoints: name one: {checkpoint_names}")
    return found[0]


def pin_checkpoint(path: Path, reason: str) -> str:
    """Protect one checkpoint from deletion; returns a message. Raises CheckpointError."""
    checkpoint_path = find_one(path)
    markers.pin_checkpoint(checkpoint_path, reason)
    return make_visible(f"{checkpoint_path} is kept until unpinned{f': {reason}' if reason else ''}")


def unpin_checkpoint(path: Path) -> str:
    """Unpin one. Raises CheckpointError."""
    checkpoint_path = find_one(path)
    was = markers.unpin_checkpoint(checkpoint_path)
    return make_visible(f"{checkpoint_path} " + ("may be deleted by retention" if was else "was not pinned"))


def accept_checkpoint(path: Path, reason: str) -> str:
    """Let runs continue from a checkpoint that was quarantined or set aside, and restore its name; returns a message.

    Raises CheckpointError.
    """
    checkpoint = find_one(path)
    if all_problems := store.list_problems(checkpoint):
        raise CheckpointError(f"{all_problems[0]}: damaged bytes cannot be accepted")
    quarantine_marker = markers.read_bad_ruling(checkpoint)
    target = checkpoint.with_name(store.name_of(store.read_contents(checkpoint).step))
    if target != checkpoint and target.exists():
        raise CheckpointError(f"{target} exists: rename or remove it first")
    markers.mark_accepted(checkpoint, reason)
    if target != checkpoint:
        try:
            os.replace(checkpoint, target)
            durable.sync_directory(target.parent)
        except OSError as error:
            raise CheckpointError(f"{checkpoint} could not be renamed: {error.strerror or error}") from None
        store.point_latest(target.parent)
    was = f"; it was quarantined: {quarantine_marker.reason}" if quarantine_marker is not None else ""
    step = store.step_of(target)
    newer = ", ".join(one.name for one in store.newest_first(target.parent) if store.step_of(one) > step)
    newer_note = f". There are newer ones, and a run continues from the newest: {newer}" if newer else ""
    return make_visible(
        f"{target} is accepted: runs continue from it, whatever they find in it{was}{newer_note}"
    )


def roll_back(path: Path, reason: str) -> str:
    """Set aside the checkpoints after `path`, and the summary of a finished run; returns a message. Nothing is deleted.

    Raises CheckpointError if the run could not resume from it or is at work, ConfigError if its locks cannot be taken,
    SpaceError if the journal cannot be written.
    """
    checkpoint = find_one(path).resolve()
    run, step = RunDirectory(checkpoint.parent.parent), store.read_contents(checkpoint).step
    if checkpoint.parent != run.checkpoints or not run.journal.exists():
        raise CheckpointError(f"{checkpoint} is not in the checkpoints of a run that has a journal")
    with ExitStack() as held_locks:
        for lock_name, lock_holder in ((SUPERVISOR, "supervisor"), (TRAINING, "training")):
            if (held_lock := take_lock(run.root / lock_name)) is None:
                raise CheckpointError(f"{run.root}: its {lock_holder} is at work: stop the run first")
            held_locks.enter_context(held_lock)
        _check(checkpoint, run, step)
        log = RunLog(run)
        # The journal first. From this line on, copies of later steps in the memory of hosts do not count, and a start
        # finishes what is not done here.
        log.commit_event(RolledBack(step=step, reason=reason, who=login_name()))
        rolled_back = run.find_rollback()
        assert rolled_back is not None, "its line was just written"
        aside_reason = f"rollback{rolled_back[0]}"
        newer_names = store.set_aside_newer(run.checkpoints, step, forget=False, why=aside_reason)
        for newer_name in newer_names:
            why = f"a person rolled the run back to step {step}"
            log.commit_event(CheckpointSuspect(name=newer_name, reason=why))
        if run.summary.exists():
            os.replace(run.summary, run.summary.with_name(f"{run.summary.stem}-{aside_reason}.json"))
            durable.sync_directory(run.root)
    aside = ", ".join(f"{aside_reason}-{newer_name}" for newer_name in newer_names)
    return make_visible(
        f"the next start of {run.root} trains on from step {step}"
        + (f"; set aside, not deleted: {aside}" if newer_names else "; there was no newer checkpoint")
        + f". How to start it: megastable status {run.root}"
    )


def _check(checkpoint: Path, run: RunDirectory, step: int) -> None:
    if checkpoint.name != store.name_of(step):
        raise CheckpointError(
            f"{checkpoint} was set aside: accept it first: megastable checkpoint accept {checkpoint}"
        )
    if all_problems := store.list_problems(checkpoint):
        raise CheckpointError(f"{all_problems[0]}: the run cannot go on from it")
    ruling = markers.read_bad_ruling(checkpoint)
    if ruling is not None and markers.read_acceptance(checkpoint) is None:
        raise CheckpointError(
            f"{checkpoint} was quarantined: {ruling.reason}. To go on from it all the same: "
            f"megastable checkpoint accept {checkpoint}"
        )
    interrupted_rewind = find_interrupted_rewind(run.iterate_events(Training, IncidentEvent, CheckpointSaved))
    before = run.find_handover()
    if before is None and interrupted_rewind is not None and checkpoint.name not in interrupted_rewind[1]:
        before = interrupted_rewind[0]
    if before is not None and step >= before:
        raise CheckpointError(
            f"{checkpoint}: an incident asks for a checkpoint from before step {before}: name one of those"
        )
