"""A folder in a host's memory (/dev/shm) that holds parts of a run's newest snapshots, beyond its processes.

    FOLDER/megastable-UID/RUN-HASH/step-100-0-LINEAGE/    files as in a checkpoint, and held-00003.json once complete

Only its user can read it. Every process of the run locks the folder (shared) as long as it lives: what nobody locks
and whose run has finished, is gone, or has not been heard of for days, is removed by the next run of the user.
"""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import socket
import stat
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import IO

import xxhash

from megastable.base import durable
from megastable.checkpoint.held_points import HeldPart, PointKey, every_name
from megastable.run.directory import RunDirectory

OWNER, LOCK = "owner.json", "lock"
DAY = 86400.0


def memory_of(folder: Path) -> str:
    """Identifies the memory in which `folder` lies: equal on two ranks if they see the same one. Raises OSError."""
    found, boot = folder.stat(), ""
    with suppress(OSError):
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"{socket.gethostname()} {boot} {found.st_dev} {found.st_ino}"


class PartFolder:
    """Where a run keeps parts of its points on a `disk` of this host that several runs use. All ranks of the host share
    it. Nothing is created here."""

    def __init__(self, disk: Path, run: Path) -> None:
        run = run.resolve()
        self.root = disk / f"{run.name}-{xxhash.xxh3_64_hexdigest(str(run).encode())}"

    def held(self) -> list[HeldPart]:
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

    def point(self, key: PointKey) -> Path:
        return self.root / key.name

    def begin(self, key: PointKey) -> Path:
        """The folder to write files of a point to. Raises OSError."""
        self.point(key).mkdir(mode=0o700, exist_ok=True)
        return self.point(key)

    def seal(self, part: HeldPart) -> None:
        """From now on it counts: its files are all there. Raises OSError."""
        durable.write_file(self.point(part.key) / _seal(part.rank), part.model_dump_json().encode())

    def drop_part(self, rank: int, but: Callable[[PointKey], bool]) -> None:
        """Remove a rank's parts of all points, except of those."""
        for key in self.points():
            if but(key):
                continue
            self.clear_part(rank, key)
            with suppress(OSError):  # other parts remain
                self.point(key).rmdir()

    def clear_part(self, rank: int, key: PointKey) -> None:
        """Remove a rank's part of a point, but not the folder: it may be another rank's, and still empty."""
        for name in (_seal(rank), *every_name(rank)):  # the seal first
            (self.point(key) / name).unlink(missing_ok=True)

    def drop(self, which: Callable[[PointKey], bool]) -> None:
        """Remove whole points. Another rank may be at it, too."""
        for key in self.points():
            if which(key):
                for seal in self.point(key).glob(_seal("*")):
                    seal.unlink(missing_ok=True)
                shutil.rmtree(self.point(key), ignore_errors=True)

    def points(self) -> list[PointKey]:
        with suppress(OSError):
            return [key for name in os.listdir(self.root) if (key := PointKey.of(name)) is not None]
        return []


class MemoryFolder(PartFolder):
    """That of one run in this host's memory. Nothing is created before `open`."""

    def __init__(self, folder: Path, run: Path) -> None:
        self.user = folder / f"megastable-{os.geteuid()}"
        super().__init__(self.user, run)
        self._run = run.resolve()
        self._lock: IO[str] | None = None

    def open(self) -> None:
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

    def size(self) -> int:
        """Bytes of all its files."""
        total = 0
        for path in self.root.glob("step-*/*"):
            with suppress(OSError):
                total += path.stat().st_size
        return total

    def touch(self) -> None:
        """The run still lives."""
        with suppress(OSError):
            os.utime(self.root)

    def remove(self) -> None:
        """Remove everything: the run needs it no more."""
        shutil.rmtree(self.root, ignore_errors=True)
        with suppress(OSError):  # other runs remain
            self.user.rmdir()
        self.close()

    def close(self) -> None:
        if self._lock is not None:
            self._lock.close()
            self._lock = None

    def sweep(self, days: float) -> list[str]:
        """Remove what other runs of this user have left here: runs that are finished or gone, or not heard of for
        `days`, and of which no process lives. Returns their names."""
        removed = []
        for root in self.user.iterdir() if self.user.is_dir() else ():
            with suppress(OSError):
                if root == self.root or not root.is_dir() or not _abandoned(root, days):
                    continue
                with _locked(root / LOCK, fcntl.LOCK_EX | fcntl.LOCK_NB):
                    shutil.rmtree(root, ignore_errors=True)
                removed.append(root.name)
        return removed


def _seal(rank: int | str) -> str:
    return f"held-{rank:05d}.json" if isinstance(rank, int) else f"held-{rank}.json"


def _locked(path: Path, how: int) -> IO[str]:
    """The file, locked. Raises FileNotFoundError if it was removed meanwhile, BlockingIOError."""
    file = path.open("a+")
    try:
        fcntl.flock(file, how)
        if os.fstat(file.fileno()).st_ino != path.stat().st_ino:
            raise FileNotFoundError(path)
    except BaseException:
        file.close()
        raise
    return file


def _abandoned(root: Path, days: float) -> bool:
    try:
        run = RunDirectory(Path(json.loads((root / OWNER).read_bytes())["run"]))
    except (OSError, ValueError, KeyError, TypeError):
        return time.time() - root.stat().st_mtime > DAY  # it is being made, or broken
    if time.time() - root.stat().st_mtime > days * DAY:
        return True
    return run.summary.exists() or not run.journal.exists()
