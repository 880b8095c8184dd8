"""Checkpoints of a run: saved under a temporary name, verified, renamed; found again, newest good one first.

checkpoints/step-N/ holds DeepSpeed's files, rng-*.pt, state.json (where the run stands) and manifest.json (sizes
and checksums of all others). `checkpoints/latest` is a text file with the name of the newest one, replaced
atomically. Whatever happens in the middle of a save, the checkpoints before it stay as they were.

All functions here that take part in a save or load are collective: every rank calls them.
"""

from __future__ import annotations

import json
import logging
import os
import shutil
from collections.abc import Callable, Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist
from pydantic import BaseModel, ConfigDict, ValidationError

from megastable import durable
from megastable.checkpoint import reshape
from megastable.checkpoint.files import FileRecord, Writer, hash_file, write_file
from megastable.errors import CheckpointError
from megastable.ranks import first, gathered
from megastable.rng import rng_state, set_rng_state

log = logging.getLogger(__name__)

MANIFEST, STATE, LATEST = "manifest.json", "state.json", "latest"
SAVING = ".saving-"  # prefix of a checkpoint that is being written


class LayoutState(BaseModel):
    """How the ranks were laid out when a checkpoint was written."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    tensor: int
    pipeline: int
    data: int
    zero: int
    precision: str


class RunState(BaseModel):
    """Where a run stands; everything that is needed to continue besides weights, moments and RNG.

    step: steps done, discarded ones included. updates: those that were applied; the learning rate follows from
    it. cursor: the next data position. stability: the state of detector, policy and the open incident (recovery.py).
    mix: the share of each corpus in the last step.
    """

    # A loss may be nan: the default would write null, which is no number when it is read again.
    model_config = ConfigDict(extra="forbid", ser_json_inf_nan="constants")

    format: Literal[1] = 1
    step: int = 0
    updates: int = 0
    cursor: int = 0
    tokens: int = 0
    seconds: float = 0.0
    discards_in_a_row: int = 0
    first_loss: float | None = None
    recent_losses: list[float] = []
    order_fingerprint: str
    layout: LayoutState
    stability: dict[str, Any] = {}
    mix: dict[str, float] = {}
    versions: dict[str, str] = {}


class Contents(BaseModel):
    """manifest.json of a checkpoint."""

    model_config = ConfigDict(extra="forbid")

    format: Literal[1] = 1
    step: int
    files: dict[str, FileRecord]


@dataclass(frozen=True)
class Saved:
    """Outcome of a save: the checkpoint, or why there is none."""

    path: Path | None
    problem: str = ""
    size: int = 0


def name_of(step: int) -> str:
    return f"step-{step}"


def save(folder: Path, engine: Any, state: RunState, keep: int) -> Saved:
    """Write `folder`/step-N. Never raises for a disk that refuses: the outcome says so, on every rank alike."""
    target = folder / name_of(state.step)
    temporary = folder / f"{SAVING}{target.name}"
    problem = _on_first(lambda: _begin(folder, temporary))
    if problem:
        return Saved(None, problem)
    writer = Writer()
    engine.save(temporary, writer, {})
    writer.save(rng_state(), temporary / f"rng-{dist.get_rank():05d}.pt")
    pieces = reshape.describe(engine).model_dump_json().encode()
    writer.save(pieces, temporary / f"{reshape.PREFIX}{dist.get_rank():05d}.json")
    everyone = gathered((writer.records, writer.error or _reread(temporary, writer.records)))
    problem = next((f"rank {rank}: {error}" for rank, (_, error) in enumerate(everyone) if error), "")
    files = {name: record for records, _ in everyone for name, record in records.items()}
    if problem:
        _on_first(lambda: shutil.rmtree(temporary, ignore_errors=True))
        return Saved(None, problem)
    problem = _on_first(lambda: _commit(folder, temporary, target, state, files, keep))
    if problem:
        return Saved(None, problem)
    return Saved(target, size=sum(record.size for record in files.values()))


def _on_first(action: Callable[[], None]) -> str:
    """Run `action` on rank 0; its OSError as text, the same on every rank, "" when it went well."""

    def attempt() -> str:
        try:
            action()
        except OSError as error:
            return str(error)
        return ""

    return first(attempt)


def _begin(folder: Path, temporary: Path) -> None:
    _bring_back(folder)
    for stale in folder.glob(f"{SAVING}*"):
        shutil.rmtree(stale)
    newest = newest_first(folder)
    if newest:
        needed = sum(file.stat().st_size for file in newest[0].iterdir())
        free = shutil.disk_usage(folder).free
        if free < needed:
            raise OSError(
                f"{folder}: {free / 1e9:.2f} GB free, the last checkpoint took {needed / 1e9:.2f} GB"
            )
    temporary.mkdir()


def _reread(folder: Path, records: dict[str, FileRecord]) -> str:
    """Compare what lies on the disk with what was written."""
    for name, record in records.items():
        try:
            found = hash_file(folder / name)
        except OSError as error:
            return f"{folder / name}: {error}"
        if found != record:
            return f"{folder / name}: reads back differently from what was written"
    return ""


def _commit(
    folder: Path, temporary: Path, target: Path, state: RunState, files: dict[str, FileRecord], keep: int
) -> None:
    replaced = folder / f"{SAVING}replaced-{target.name}"
    try:
        unseen = [name for name in files if not (temporary / name).exists()]
        if unseen:
            raise OSError(
                f"{temporary / unseen[0]}: written by another rank, not seen here: the folder is not shared"
            )
        files[STATE] = write_file(temporary / STATE, state.model_dump_json(indent=1).encode())
        contents = Contents(step=state.step, files=dict(sorted(files.items())))
        write_file(temporary / MANIFEST, contents.model_dump_json(indent=1).encode())
        durable.sync_directory(temporary)
        if target.exists():  # the same step again, after a return to an older checkpoint
            os.replace(target, replaced)
        os.replace(temporary, target)
        durable.sync_directory(folder)
    except OSError:
        if replaced.exists() and not target.exists():
            os.replace(replaced, target)
        shutil.rmtree(temporary, ignore_errors=True)
        raise
    try:
        durable.write_file(folder / LATEST, target.name.encode())
    except OSError as error:
        log.warning("%s: %s; it still names an older checkpoint", folder / LATEST, error)
    shutil.rmtree(replaced, ignore_errors=True)
    for old in newest_first(folder)[keep:]:
        if old != target:
            shutil.rmtree(old, ignore_errors=True)


def set_aside(checkpoint: Path) -> None:
    """Rename a damaged checkpoint, so that it no longer counts among those that are kept; as well as that can be done,
    as it is passed over anyway."""
    try:
        _rename(checkpoint, "rejected")
    except OSError as error:
        log.warning("%s: damaged, and could not be renamed: %s", checkpoint, error)
    _point_latest(checkpoint.parent)


def set_aside_newer(folder: Path, step: int, but: Collection[str] = ()) -> list[str]:
    """Rename the checkpoints of later steps than `step`, `but` for some: the run goes back behind them. Their names.

    They are kept for a person to look at, as suspect-step-N; those of earlier calls are deleted. Raises
    CheckpointError when one could not be renamed: a restart would go on from it.
    """
    older, done = list(folder.glob("suspect-*")), list[Path]()
    stuck: list[str] = []
    try:
        _bring_back(folder)  # or it would come back later as if it were a good one
    except OSError as error:
        stuck.append(str(error))
    for path in [path for path in newest_first(folder) if step_of(path) > step and path.name not in but]:
        try:
            _rename(path, "suspect")
            done.append(path)
        except OSError as error:
            stuck.append(str(error))
    _point_latest(folder)
    if stuck:
        raise CheckpointError(
            f"{stuck[0]}: a checkpoint of after step {step}, which the run goes back to, could not be put aside: "
            f"rename or delete those in {folder} by hand, then start again"
        )
    for old in older if done else ():
        if old.name not in {f"suspect-{path.name}" for path in done}:
            shutil.rmtree(old, ignore_errors=True)
    return [path.name for path in done]


def _rename(checkpoint: Path, why: str) -> None:
    target = checkpoint.with_name(f"{why}-{checkpoint.name}")
    shutil.rmtree(target, ignore_errors=True)
    os.replace(checkpoint, target)
    durable.sync_directory(checkpoint.parent)


def _point_latest(folder: Path) -> None:
    """`latest` names the newest checkpoint that is left, or is not there: never one that was set aside."""
    left = newest_first(folder)
    try:
        (folder / LATEST).unlink(missing_ok=True)
        if left:
            durable.write_file(folder / LATEST, left[0].name.encode())
    except OSError as error:
        log.warning("%s: %s", folder / LATEST, error)


def restore_rng(checkpoint: Path) -> None:
    """Set this rank's random states from a checkpoint, where it has some for this rank."""
    path = checkpoint / f"rng-{dist.get_rank():05d}.pt"
    if not path.exists():
        return
    set_rng_state(torch.load(path, map_location="cpu", weights_only=True))


# Finding one again


def step_of(checkpoint: Path) -> int:
    """The step in the name of a checkpoint."""
    return int(checkpoint.name.removeprefix("step-"))


def newest_first(folder: Path) -> list[Path]:
    """The complete-looking checkpoints of a folder, the newest first."""
    found = []
    for path in folder.glob("step-*"):
        number = path.name.removeprefix("step-")
        if path.is_dir() and number.isdigit():
            found.append((int(number), path))
    return [path for _, path in sorted(found, reverse=True)]


def read_contents(checkpoint: Path) -> Contents:
    """manifest.json of a checkpoint. Raises CheckpointError when it is missing or not one."""
    path = checkpoint / MANIFEST
    try:
        return Contents.model_validate(json.loads(path.read_text(encoding="utf-8")))
    except FileNotFoundError:
        raise CheckpointError(f"{path}: missing: the save did not finish") from None
    except (OSError, ValueError, ValidationError) as error:
        raise CheckpointError(f"{path}: damaged ({str(error).splitlines()[0]})") from None


def read_state(checkpoint: Path) -> RunState:
    """state.json of a checkpoint. Raises CheckpointError when it is missing or not one."""
    path = checkpoint / STATE
    try:
        return RunState.model_validate(json.loads(path.read_text(encoding="utf-8")))
    except (OSError, ValueError, ValidationError) as error:
        raise CheckpointError(f"{path}: damaged ({str(error).splitlines()[0]})") from None


def verify(checkpoint: Path, part: int = 0, parts: int = 1) -> None:
    """Compare every file (or each `parts`-th from `part` on) with the manifest; CheckpointError where one differs."""
    contents = read_contents(checkpoint)
    for name, record in list(contents.files.items())[part::parts]:
        path = checkpoint / name
        try:
            size = path.stat().st_size
            found = hash_file(path) if size == record.size else None
        except OSError as error:
            raise CheckpointError(f"{path}: {error.strerror or error}") from None
        if size != record.size:
            raise CheckpointError(
                f"{path}: {size} bytes, the manifest says {record.size}: cut off or changed"
            )
        if found != record:
            raise CheckpointError(f"{path}: its checksum is not the manifest's: damaged")


def newest_good(folder: Path) -> tuple[Path | None, dict[str, str]]:
    """(the newest checkpoint that verifies, newer ones that do not, with the reason). Ranks share the reading."""
    rejected: dict[str, str] = {}
    for name in first(lambda: _names(folder)):
        problem = ""
        try:
            verify(folder / name, dist.get_rank(), dist.get_world_size())
        except CheckpointError as error:
            problem = str(error)
        problem = next((p for p in gathered(problem) if p), "")
        if not problem:
            return folder / name, rejected
        rejected[name] = problem
    return None, rejected


def _names(folder: Path) -> list[str]:
    try:
        _bring_back(folder)
    except OSError as error:
        raise CheckpointError(f"{folder}: {error}") from None
    return [path.name for path in newest_first(folder)]


def _bring_back(folder: Path) -> None:
    """After a crash between two renames the older checkpoint is whole, under another name."""
    for hidden in folder.glob(f"{SAVING}replaced-*"):
        target = folder / hidden.name.removeprefix(f"{SAVING}replaced-")
        if not target.exists():
            os.replace(hidden, target)
        else:
            shutil.rmtree(hidden, ignore_errors=True)  # it was replaced, only not removed yet
