"""Chooses the newest snapshot, or staged checkpoint, of which all hosts together hold every part. Pure."""

from __future__ import annotations

import fcntl
import json
import os
import re
import shutil
import socket
import stat
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Literal, Self

import xxhash
from pydantic import BaseModel, ConfigDict, Field, NonNegativeInt, PositiveInt, model_validator

from megastable.base import durable
from megastable.checkpoint.files import FileRecord, part_name, random_name
from megastable.checkpoint.store import RECIPE, SHARED, STATE
from megastable.run.directory import RunDirectory
from megastable.run.events.event import Event
from megastable.run.events.stability_events import Handover, IncidentEvent
from megastable.run.events.training_events import (
    CheckpointSaved,
    MemoryDropped,
    MemoryResume,
    RolledBack,
    Training,
    Unstable,
)

# Step records that were in the memory of rank 0 only, as run/records.py writes them.
RECORDS = "records.parquet"
KEY = re.compile(r"step-(\d+)-(\d+)-([0-9a-f]{16})")


class PointKey(BaseModel):
    """Names a point, a state of which every rank holds a part: of after `step`, taken by the processes `lineage` (a
    number drawn at their start), after they had rewound `epoch` times (always 0 for a staged checkpoint)."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    step: NonNegativeInt
    epoch: NonNegativeInt
    lineage: str = Field(pattern="^[0-9a-f]{16}$")

    @property
    def name(self) -> str:
        """Of its folder."""
        return f"step-{self.step}-{self.epoch}-{self.lineage}"

    @classmethod
    def parse_name(cls, name: str) -> Self | None:
        """The key of a folder's name; None if it is another's."""
        name_match = KEY.fullmatch(name)
        if name_match is None:
            return None
        return cls(step=int(name_match[1]), epoch=int(name_match[2]), lineage=name_match[3])


class HeldPart(BaseModel):
    """One rank's part of a point, complete: its files, those that a checkpoint would have; world: number of ranks."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    format: Literal[1] = 1
    key: PointKey
    rank: NonNegativeInt
    world: PositiveInt
    files: dict[str, FileRecord]

    @model_validator(mode="after")
    def _has_its_own_files(self) -> Self:
        if not set(names_of(self.rank)) <= self.files.keys() <= set(every_name(self.rank)):
            raise ValueError(f"rank {self.rank} has no files such as {sorted(self.files)}")
        return self


def names_of(rank: int) -> tuple[str, ...]:
    """The files that every rank has."""
    shared_names = (STATE, RECIPE) if rank == 0 else ()
    return f"{part_name(rank)}.safetensors", f"{part_name(rank)}.json", random_name(rank), *shared_names


def every_name(rank: int) -> tuple[str, ...]:
    """Those that it may have."""
    return (*names_of(rank), *((SHARED, RECORDS) if rank == 0 else ()))


@dataclass(frozen=True)
class Complete:
    """A point with all parts. parts: by rank; hosts: by rank, those that hold the part, in order."""

    key: PointKey
    parts: Mapping[int, HeldPart]
    hosts: Mapping[int, Sequence[int]]

    @property
    def files(self) -> dict[str, FileRecord]:
        return {name: record for part in self.parts.values() for name, record in part.files.items()}

    def hosts_with(self, name: str) -> Sequence[int]:
        """The hosts that hold a file."""
        return next(self.hosts[part_rank] for part_rank, part in self.parts.items() if name in part.files)


def newest_complete(
    held: Sequence[Sequence[HeldPart]], refuse: Callable[[PointKey], str]
) -> tuple[Complete | None, dict[PointKey, str]]:
    """The newest point that may be used and is complete; None if there is none. And the newer ones, with the reason.

    held: by host, the parts in its memory. refuse: why a point must not be used, "" if it may.
    """
    known_keys = {part.key for parts in held for part in parts}
    passed_over: dict[PointKey, str] = {}
    for known_key in sorted(known_keys, key=lambda key: (key.step, key.epoch, key.lineage), reverse=True):
        assembled_point = refuse(known_key) or _assembled(known_key, held)
        if not isinstance(assembled_point, str):
            return assembled_point, passed_over
        passed_over[known_key] = assembled_point
    return None, passed_over


def _assembled(key: PointKey, held: Sequence[Sequence[HeldPart]]) -> Complete | str:
    """The point of all its parts, or why it is not complete."""
    parts_by_rank: dict[int, HeldPart] = {}
    hosts_by_rank: dict[int, list[int]] = {}
    for host, host_parts in enumerate(held):
        for host_part in host_parts:
            if host_part.key != key:
                continue
            if parts_by_rank.setdefault(host_part.rank, host_part) != host_part:
                return f"two copies of rank {host_part.rank}'s part differ"
            if host not in hosts_by_rank.setdefault(host_part.rank, []):
                hosts_by_rank[host_part.rank].append(host)
    world_sizes = {part.world for part in parts_by_rank.values()}
    if len(world_sizes) > 1:
        return f"its parts are of {' and of '.join(map(str, sorted(world_sizes)))} ranks"
    (world_size,) = world_sizes
    if missing_ranks := sorted(set(range(world_size)) - parts_by_rank.keys()):
        ranks_text = ", ".join(map(str, missing_ranks[:5])) + (", ..." if len(missing_ranks) > 5 else "")
        return f"no host holds the part of rank {ranks_text}"
    if len(parts_by_rank) != world_size:
        return "it has parts of ranks that there are not"
    return Complete(key, parts_by_rank, hosts_by_rank)


# Decides from the journal which checkpoints, and snapshots in hosts' memory, still belong to the run's history. Pure.
#
# A checkpoint that no longer counts is renamed. A copy in the memory of a host that was away cannot be: so each
# carries its lineage, and what the journal says happened after it decides.


# What `explain_outdated` needs.
HISTORY = (
    Training, IncidentEvent, Handover, Unstable,
    CheckpointSaved, MemoryDropped, MemoryResume, RolledBack,
)  # fmt: skip
TRIES = 2  # of the same point: a third failure may be its own


def explain_outdated(events: Sequence[Event], key: PointKey) -> str:
    """Why the point must not be used; "" if it may. events: of the journal, those of `HISTORY`, in order."""
    starts = [i for i, e in enumerate(events) if isinstance(e, Training) and e.lineage == key.lineage]
    if not starts:
        return "the journal does not know it: of an earlier run in this directory"
    drop_count, same_processes, resume_count = 0, True, 0
    for event in events[starts[0] + 1 :]:
        event_step = event.get("step")
        is_earlier = isinstance(event_step, int) and event_step < key.step
        if isinstance(event, Handover | Unstable):
            return "the run was handed over, or was unstable, after it"
        if isinstance(event, RolledBack) and is_earlier:
            return f"a person rolled the run back to step {event_step} after it"
        if isinstance(event, Training):
            same_processes = False
            if is_earlier:
                return f"training has gone on from step {event_step} since"
        elif isinstance(event, MemoryDropped):
            drop_count += same_processes
            if is_earlier and (not same_processes or key.epoch < drop_count):
                return f"the run was rewound to step {event_step} after it"
        elif isinstance(event, MemoryResume):
            resume_count += (event_step, event.lineage, event.epoch) == (key.step, key.lineage, key.epoch)
    open_rewind = find_interrupted_rewind(events)
    if open_rewind is not None and open_rewind[0] <= key.step:
        return f"an incident was open that undid step {open_rewind[0]} and what came after"
    if resume_count >= TRIES:
        return f"training was restored from it {resume_count} times, and did not get to another one"
    return ""


def find_interrupted_rewind(events: Iterable[Event]) -> tuple[int, set[str]] | None:
    """Leftovers of a rewind that the last process had not put aside when it died: the first undone step, and the
    checkpoints written after the rewind, which are good.

    events: the journal's "training", "incident" and "checkpoint", in order.
    """
    undone_step, later_names = None, set[str]()
    for event in events:
        incident_change = event.get("what")
        if isinstance(event, Training) or (incident_change == "closed" and "policy" in event):
            undone_step = None
        elif incident_change == "opened" and "policy" in event:
            undone_step, later_names = event.get("onset"), set()
        elif incident_change == "rewound" and isinstance(event.get("to_step"), int):
            undone_step, later_names = event["to_step"] + 1, set()
        elif isinstance(event, CheckpointSaved):
            later_names.add(str(event.get("name")))
    return (undone_step, later_names) if isinstance(undone_step, int) else None


def find_tried_steps(events: Iterable[Event], clock: int, verify_steps: int) -> list[int]:
    """The steps of checkpoints that processes resumed from after a handover without reaching new ground: none may be
    resumed from again.

    events: the journal's "handover" and "training", in order. clock: the farthest step by now; steps more than
    `verify_steps` past the farthest one of a handover are new ground.
    """
    tried_steps, no_progress = list[int](), False
    for event in events:
        if isinstance(event, Handover):
            policy_state = event.get("policy")
            handover_clock = policy_state.get("clock") if isinstance(policy_state, dict) else None
            no_progress = isinstance(handover_clock, int) and clock - handover_clock <= verify_steps
            tried_steps = tried_steps if no_progress else []
        elif no_progress and isinstance(resumed_step := event.get("step"), int) and resumed_step:
            tried_steps.append(resumed_step)
    return tried_steps


def explain_bad_ancestor(key: PointKey, newest: int, quarantined: Collection[int]) -> str:
    """Why a point must not be used if checkpoints of the steps `quarantined` hold bad states; newest: the step of the
    newest one that does not, -1 if there is none."""
    bad = [step for step in quarantined if newest < step <= key.step]
    return f"the checkpoint of step {max(bad)}, which it descends from, was quarantined" if bad else ""


# A folder in a host's memory (/dev/shm) that holds parts of a run's newest snapshots, beyond its processes.
#
# FOLDER/megastable-UID/RUN-HASH/step-100-0-LINEAGE/    files as in a checkpoint, and held-00003.json once complete
#
# Only its user can read it. Every process of the run locks the folder (shared) as long as it lives: what nobody locks
# and whose run has finished, is gone, or has not been heard of for days, is removed by the next run of the user.


OWNER, LOCK = "owner.json", "lock"
DAY = 86400.0


def memory_of(folder: Path) -> str:
    """Identifies the memory in which `folder` lies: equal on two ranks if they see the same one. Raises OSError."""
    folder_stat, boot_id = folder.stat(), ""
    with suppress(OSError):
        boot_id = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"{socket.gethostname()} {boot_id} {folder_stat.st_dev} {folder_stat.st_ino}"


class PartFolder:
    """Where a run keeps parts of its points on a `disk` of this host that several runs use. All ranks of the host share
    it. Nothing is created here."""

    def __init__(self, disk: Path, run: Path) -> None:
        run = run.resolve()
        self.root = disk / f"{run.name}-{xxhash.xxh3_64_hexdigest(str(run).encode())}"

    def list_parts(self) -> list[HeldPart]:
        """The parts here; those with missing or short files are left out."""
        found = []
        for path in self.root.glob("step-*/held-*.json"):
            try:
                part = HeldPart.model_validate_json(path.read_bytes())
                whole = all((path.parent / name).stat().st_size == r.size for name, r in part.files.items())
            except (OSError, ValueError):
                continue
            if whole and path.parent.name == part.key.name and path.name == _seal(part.rank):
                found.append(part)
        return sorted(found, key=lambda part: (part.key.step, part.key.epoch, part.key.lineage, part.rank))

    def point_folder(self, key: PointKey) -> Path:
        return self.root / key.name

    def begin_point(self, key: PointKey) -> Path:
        """The folder to write files of a point to. Raises OSError."""
        self.point_folder(key).mkdir(mode=0o700, exist_ok=True)
        return self.point_folder(key)

    def seal_part(self, part: HeldPart) -> None:
        """From now on it counts: its files are all there. Raises OSError."""
        durable.write_file(self.point_folder(part.key) / _seal(part.rank), part.model_dump_json().encode())

    def drop_part(self, rank: int, but: Callable[[PointKey], bool]) -> None:
        """Remove a rank's parts of all points, except of those."""
        for key in self.list_points():
            if but(key):
                continue
            self.clear_part(rank, key)
            with suppress(OSError):  # other parts remain
                self.point_folder(key).rmdir()

    def clear_part(self, rank: int, key: PointKey) -> None:
        """Remove a rank's part of a point, but not the folder: it may be another rank's, and still empty."""
        for file_name in (_seal(rank), *every_name(rank)):  # the seal first
            (self.point_folder(key) / file_name).unlink(missing_ok=True)

    def drop_points(self, which: Callable[[PointKey], bool]) -> None:
        """Remove whole points. Another rank may be at it, too."""
        for key in self.list_points():
            if which(key):
                for seal_path in self.point_folder(key).glob(_seal("*")):
                    seal_path.unlink(missing_ok=True)
                shutil.rmtree(self.point_folder(key), ignore_errors=True)

    def list_points(self) -> list[PointKey]:
        with suppress(OSError):
            return [key for name in os.listdir(self.root) if (key := PointKey.parse_name(name)) is not None]
        return []


class MemoryFolder(PartFolder):
    """That of one run in this host's memory. Nothing is created before `open_locked`."""

    def __init__(self, folder: Path, run: Path) -> None:
        self.user = folder / f"megastable-{os.geteuid()}"
        super().__init__(self.user, run)
        self._run = run.resolve()
        self._lock: IO[str] | None = None

    def open_locked(self) -> None:
        """Create and lock it. Raises OSError, also if it belongs to somebody else."""
        self.user.mkdir(mode=0o700, exist_ok=True)
        found = self.user.lstat()
        if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid() or found.st_mode & 0o077:
            raise OSError(f"{self.user} is not a folder of this user alone")
        until = time.monotonic() + 5.0
        while self._lock is None:
            self.root.mkdir(mode=0o700, exist_ok=True)
            with suppress(FileNotFoundError):  # it was just removed by another run
                self._lock = _locked(self.root / LOCK, fcntl.LOCK_SH)
            if time.monotonic() > until:
                raise OSError(f"{self.root / LOCK} cannot be locked")
        durable.write_file(self.root / OWNER, json.dumps({"run": str(self._run)}).encode())

    def count_bytes(self) -> int:
        """Bytes of all its files."""
        total_bytes = 0
        for part_file in self.root.glob("step-*/*"):
            with suppress(OSError):
                total_bytes += part_file.stat().st_size
        return total_bytes

    def mark_alive(self) -> None:
        """The run still lives."""
        with suppress(OSError):
            os.utime(self.root)

    def remove_all(self) -> None:
        """Remove everything: the run needs it no more."""
        shutil.rmtree(self.root, ignore_errors=True)
        with suppress(OSError):  # other runs remain
            self.user.rmdir()
        self.close()

    def close(self) -> None:
        if self._lock is not None:
            self._lock.close()
            self._lock = None

    def sweep_abandoned(self, days: float) -> list[str]:
        """Remove what other runs of this user have left here: runs that are finished or gone, or not heard of for
        `days`, and of which no process lives. Returns their names."""
        removed_names = []
        for run_folder in self.user.iterdir() if self.user.is_dir() else ():
            with suppress(OSError):
                if run_folder == self.root or not run_folder.is_dir() or not _abandoned(run_folder, days):
                    continue
                with _locked(run_folder / LOCK, fcntl.LOCK_EX | fcntl.LOCK_NB):
                    shutil.rmtree(run_folder, ignore_errors=True)
                removed_names.append(run_folder.name)
        return removed_names


def _seal(rank: int | str) -> str:
    return f"held-{rank:05d}.json" if isinstance(rank, int) else f"held-{rank}.json"


def _locked(path: Path, how: int) -> IO[str]:
    """The file, locked. Raises FileNotFoundError if it was removed meanwhile, BlockingIOError."""
    lock_file = path.open("a+")
    try:
        fcntl.flock(lock_file, how)
        if os.fstat(lock_file.fileno()).st_ino != path.stat().st_ino:
            raise FileNotFoundError(path)
    except BaseException:
        lock_file.close()
        raise
    return lock_file


def _abandoned(root: Path, days: float) -> bool:
    try:
        run_directory = RunDirectory(Path(json.loads((root / OWNER).read_bytes())["run"]))
    except (OSError, ValueError, KeyError, TypeError):
        return time.time() - root.stat().st_mtime > DAY  # it is being made, or broken
    if time.time() - root.stat().st_mtime > days * DAY:
        return True
    return run_directory.summary.exists() or not run_directory.journal.exists()
