"""Exchanges files between a rank and the supervisor: progress, stop requests, stacks, last words.

Rank 0 writes progress.json, and watches for new lines in the skip ledger and among the requests for changes. Every
rank reads control.json: asked to stop, it says so in the next step's ballot; asked for its stacks, it dumps them in
logs/; and a rank of an earlier attempt ends itself, on any host. A rank that ends by an error writes it down as its
last words.
"""

from __future__ import annotations

import contextlib
import faulthandler
import json
import os
import threading
import time
import traceback
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from torch.distributed import DistError

from megastable.base import activity
from megastable.base.errors import SUPERSEDED, MegastableError, code_of
from megastable.base.process import package_folders
from megastable.checkpoint.store import RunState
from megastable.run import directory
from megastable.run.directory import RunDirectory
from megastable.run.rank_ipc import LOST, Control, LastWords, folder_of, host_name, pause_of
from megastable.training.startup import StopRequest

SECONDS = 0.25  # seconds between polls of rank 0, and between its progress reports


class WatchedFile:
    """A file that other processes add lines to. has_news: it has changed since it was last read. denials: it is news,
    too, that this process may not read it. watched: this process looks at it at all."""

    def __init__(self, path: Path, denials: bool = False, watched: bool = True) -> None:
        self.path, self.denials, self.has_news = path, denials, False
        self._read = self._state() if watched else None

    def begin_to_read(self) -> None:
        """Call before reading it: later changes are news."""
        self._read = self._state()
        self.has_news = False

    def look_for_news(self) -> None:
        if self._state() != self._read:
            self.has_news = True

    def _state(self) -> tuple[int, int] | None:
        try:
            # Opened, as a network file system may answer `stat` from a cache up to a minute old.
            with self.path.open("rb") as opened_file:
                file_stat = os.fstat(opened_file.fileno())
        except PermissionError:
            return (-1, 0) if self.denials else None
        except OSError:
            return None
        return file_stat.st_size, file_stat.st_mtime_ns


class Heartbeat:
    """The heartbeat of one rank, for its whole run: `with Heartbeat(...) as heart`."""

    def __init__(
        self, run: RunDirectory, rank: int, world: int, steps: int, stop: StopRequest, attempt: int | None
    ) -> None:
        self.run, self.rank, self.stop, self.attempt = run, rank, stop, attempt
        self._facts: dict[str, Any] = {
            "attempt": attempt, "pid": os.getpid(), "host": host_name(), "world": world, "steps": steps,
            "phase": "starting", "step": None, "cursor": None,
        }  # fmt: skip
        self._dirty = True
        self._over, self._news = False, threading.Event()
        self._dumped = 0
        self._pause = pause_of(world) if rank else SECONDS
        self.skips, self.changes = (
            WatchedFile(run.skips, watched=not rank), WatchedFile(run.changes, denials=True, watched=not rank)
        )  # fmt: skip
        self._thread = threading.Thread(target=self._look, name="heartbeat", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if isinstance(error, Exception):
            self._last_words(error)
        self.enter_phase("ended")
        self._over = True
        self._news.set()
        self._thread.join(timeout=2)  # bounded, as the file system may hang

    @property
    def strict(self) -> bool:
        """Whether a person started this process and sees its errors, rather than a supervisor."""
        return self.attempt is None or self.attempt <= 1

    # Progress

    def enter_phase(self, name: str) -> None:
        """Set the current phase; another thread writes it down at once."""
        activity.enter_activity(name)
        if name != self._facts["phase"]:
            self._facts["phase"] = name
            self._dirty = True
            self._news.set()

    def begin_step(self, state: RunState) -> None:
        """Where the run stands, before a step. The first step of a process still counts as its start."""
        self._facts |= {"step": state.step, "cursor": state.cursor, "tokens": state.tokens}
        self._dirty = True
        if "seconds" in self._facts:
            self.enter_phase(activity.REST)
        activity.begin_step(state.step)

    def end_step(self, state: RunState, **numbers: Any) -> None:
        """Measurements of the step that led to `state`, which is over: fields of `Progress`."""
        activity.end_step(numbers["seconds"])
        # Where the run stands is said later: the guard may still take the step back, or an evaluation begin.
        measured_place = {"measured_step": state.step, "measured_cursor": state.cursor}
        self._facts |= {**numbers, **measured_place, "stepped": round(time.time(), 3)}
        self._dirty = True

    def _report(self) -> None:
        with contextlib.suppress(OSError):  # a full disk: the journal has what matters
            self._dirty = False
            # Not synced: of no use after a power cut.
            temporary_path = self.run.progress.with_name(f".{self.run.progress.name}.tmp")
            temporary_path.write_text(directory.as_json({**self._facts, "time": round(time.time(), 3)}))
            os.replace(temporary_path, self.run.progress)

    # Control

    def _look(self) -> None:
        while True:
            is_over = self._over
            if self._dirty and not self.rank:
                self._report()
            if is_over:
                return
            if not self.rank:
                self.skips.look_for_news()
                self.changes.look_for_news()
            if self.attempt is not None:
                with contextlib.suppress(OSError, ValueError):  # missing, or being replaced: next time
                    self._obey(Control.model_validate(json.loads(self.run.control.read_text())))
            if self._news.wait(self._pause):
                self._news.clear()

    def _obey(self, wanted: Control) -> None:
        assert self.attempt is not None
        if wanted.attempt > self.attempt:
            os._exit(SUPERSEDED)
        if wanted.attempt < self.attempt:
            return
        if wanted.stop:
            self.stop.ask_to_stop()
        if wanted.dump > self._dumped:
            self._dumped = wanted.dump
            self._stacks()

    def _stacks(self) -> None:
        facts = self._facts
        with self._file("stacks").open("w") as stacks_file:
            stacks_file.write(
                f"rank {self.rank} on {facts['host']}, process {facts['pid']}: {facts['phase']} after step "
                f"{facts['step']}\n\n"
            )
            stacks_file.flush()
            faulthandler.dump_traceback(stacks_file)

    # Last words

    def _last_words(self, error: Exception) -> None:
        is_collective = isinstance(error, MegastableError) and error.collective
        if is_collective and self.rank:
            return
        last_words = LastWords(
            rank=self.rank, host=self._facts["host"], pid=os.getpid(), time=time.time(),
            step=self._facts["step"], cursor=self._facts["cursor"],
            code=code_of(error),
            error=_in_a_line(error), where=_where(error), alone=not is_collective,
            trace="".join(traceback.format_exception(error)) if _lost(error, self._facts["world"]) else "",
        )  # fmt: skip
        with contextlib.suppress(OSError):
            self._file("json").write_text(last_words.model_dump_json())

    def _file(self, suffix: str) -> Path:
        logs_folder = folder_of(self.run, self.attempt or 0)
        logs_folder.mkdir(parents=True, exist_ok=True)
        return logs_folder / f"rank-{self.rank}.{suffix}"


def _lost(error: BaseException, world: int) -> bool:
    """Whether the error means that another rank is gone: one of torch.distributed, not of a file system or a server."""
    # Gloo's errors have no class of their own, but begin with their source file.
    of_ranks = isinstance(error, DistError) or (isinstance(error, RuntimeError) and "gloo" in str(error))
    return world > 1 and of_ranks and LOST.search(str(error)) is not None


def describe_end(error: BaseException, rank: int, world: int) -> str:
    """The message of a rank ended by an unexpected error: its traceback, or a line if only another rank is gone.

    The other rank is to blame, so its message should stand out in the log; the traceback is in the last words.
    """
    if not _lost(error, world):
        return "".join(traceback.format_exception(error))
    return f"rank {rank} lost another rank at {_where(error) or 'its start'}: {_in_a_line(error)}\n"


def _in_a_line(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}".splitlines()[0][:500]


def _where(error: BaseException) -> str:
    """The innermost line of our code."""
    # Not by the name in the path: dependencies may lie in a clone of that name.
    packages = package_folders()
    own_frames = [
        frame for frame in traceback.extract_tb(error.__traceback__)
        if any(Path(frame.filename).is_relative_to(package) for package in packages)
    ]  # fmt: skip
    return f"{Path(own_frames[-1].filename).name}:{own_frames[-1].lineno}" if own_frames else ""
