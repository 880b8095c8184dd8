"""The run directory of a guarded run, as megastable's readers expect one: the journal, step records, progress.json and
summary.json. Only the first rank has one."""

from __future__ import annotations

import json
import math
import os
import socket
import time
import warnings
import weakref
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import IO, Any

from megastable_guard.durable_files import append_line, lock_file, write_file
from megastable_guard.step_files import GuardedStep, StepFiles

FLUSH_SECONDS = 10.0  # between two writings of step records
# Locks of this process by directory, with what belongs to it: a second guard in a notebook takes over from the first.
_LOCKS: dict[Path, tuple[IO[str], StepFiles]] = {}


def as_json(value: Any, indent: int | None = None) -> str:
    """Strict JSON: nan and infinities become text, which float() parses."""
    return json.dumps(_plain(value), default=str, indent=indent)


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _plain(value_below) for name, value_below in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(value_below) for value_below in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


class RunFiles:
    """Writes the files of one process. A disk that refuses ends no run: what is to be written waits, with a warning.

    Args:
        root: the run directory; it is made.
        world: ranks.

    Raises:
        RuntimeError: another process trains in this directory.
        OSError: the directory cannot be made.
    """

    def __init__(self, root: Path, world: int) -> None:
        self.root, self.world = root, world
        (root / "steps").mkdir(parents=True, exist_ok=True)
        self.steps = self._take_run()
        self.waiting: list[str] = []  # lines of the journal that the disk refused so far
        self._due = time.monotonic() + FLUSH_SECONDS
        self._has_warned = False
        (root / "summary.json").unlink(missing_ok=True)  # the run goes on
        weakref.finalize(self, _end_files, root.resolve(), self.steps)  # also when the process ends

    def _take_run(self) -> StepFiles:
        """Lock the directory, and continue its records."""
        lock_key = self.root.resolve()
        if lock_key in _LOCKS:
            held_lock, former_steps = _LOCKS[lock_key]
            with suppress(OSError):
                former_steps.flush_rows()
        elif (free_lock := lock_file(self.root / ".lock")) is None:
            raise RuntimeError(
                f"run_dir={self.root}: another process trains here: stop it, or use another run_dir"
            )
        else:
            held_lock = free_lock
        own_steps = StepFiles(self.root / "steps")
        _LOCKS[lock_key] = held_lock, own_steps
        return own_steps

    def release_run(self) -> None:
        """Let another process train here."""
        _release_run(self.root.resolve(), self.steps)

    def read_incidents(self) -> Iterator[dict[str, Any]]:
        """The summaries that the journal has, of earlier processes too, in order. Damaged lines are left out."""
        try:
            journal_lines = (self.root / "journal.jsonl").read_bytes().split(b"\n")
        except OSError:
            return
        for journal_line in journal_lines:
            if b'"summary"' not in journal_line:
                continue
            try:
                summary = json.loads(journal_line)["summary"]
            except (ValueError, LookupError, TypeError, RecursionError):
                continue
            if isinstance(summary, dict) and isinstance(summary.get("number"), int):
                yield summary

    def write_event(self, event: str, fields: Mapping[str, Any]) -> None:
        """A line of the journal, on disk when this returns."""
        self.waiting.append(as_json({"time": round(time.time(), 3), "event": event, **fields}))
        self._flush_events()

    def add_step(self, step: GuardedStep) -> None:
        """A step; it is written within `FLUSH_SECONDS`."""
        self.steps.rows.append(step)
        if time.monotonic() >= self._due:
            self.flush_steps(step.step)

    def flush_steps(self, step: int, phase: str = "step") -> None:
        """Write what is pending. step: that the run has done; phase: as in progress.json of megastable."""
        self._due = time.monotonic() + FLUSH_SECONDS
        self._flush_events()
        try:
            self.steps.flush_rows()
            progress = {
                "pid": os.getpid(), "host": socket.gethostname(), "time": time.time(), "phase": phase,
                "world": self.world, "step": step,
            }  # fmt: skip
            if self.steps.rows:
                last = self.steps.rows[-1]
                progress |= {
                    "measured_step": last.step, "stepped": last.time, "loss": last.loss, "grad_norm": last.grad_norm,
                    "lr": last.lr, "seconds": last.seconds, "applied": last.applied,
                }  # fmt: skip
            temporary_path = (
                self.root / ".progress.json.tmp"
            )  # the next one replaces it soon: it need not be durable
            temporary_path.write_text(as_json(progress))
            os.replace(temporary_path, self.root / "progress.json")
        except OSError as error:
            self._warn(error)

    def write_summary(self, summary: Mapping[str, Any]) -> None:
        try:
            write_file(self.root / "summary.json", (as_json(dict(summary), indent=2) + "\n").encode())
        except OSError as error:
            self._warn(error)

    def _flush_events(self) -> None:
        try:
            while self.waiting:
                append_line(self.root / "journal.jsonl", self.waiting[0])
                self.waiting.pop(0)
        except OSError as error:
            self._warn(error)

    def _warn(self, error: OSError) -> None:
        """Once: a full disk would fill the console as well."""
        if not self._has_warned:
            self._has_warned = True
            warnings.warn(
                f"run_dir={self.root} cannot be written to ({error}): what is to be written waits in memory",
                stacklevel=2,
            )


def _release_run(lock_key: Path, steps: StepFiles) -> None:
    if lock_key in _LOCKS and _LOCKS[lock_key][1] is steps:
        _LOCKS.pop(lock_key)[0].close()


def _end_files(lock_key: Path, steps: StepFiles) -> None:
    """Where nobody called `Guard.finish_run`."""
    with suppress(OSError):
        steps.flush_rows()
    _release_run(lock_key, steps)
