"""Traces a few steps of a rank with torch.profiler, and marks its steps and phases for Nsight Systems.

It follows the activities of the steps (base/activity.py). A trace is written once: steps that are done again, after a
rewind or a restart, are not traced again if its file exists. A profile that fails is given up, with a warning.
"""

from __future__ import annotations

import gzip
import json
import logging
import os
import pickle
import shutil
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile, record_function

from megastable.base import activity
from megastable.config.tree import LoggingConfig, ProfileConfig
from megastable.run.directory import RunDirectory
from megastable.run.step_phases import METADATA, phase_range, step_range, trace_name

log = logging.getLogger(__name__)
PATIENCE = 120.0  # seconds that the end of a run waits for a trace to be written


@contextmanager
def profile_steps(
    config: LoggingConfig, run: RunDirectory, rank: int, say: Callable[[str], None]
) -> Iterator[None]:
    """Within it, steps of this rank are traced and marked as the recipe says, and memory that runs out leaves a
    snapshot. say: prints a line."""
    snapshot_on_out_of_memory(run.profiles, rank, config.memory_history)
    profile_config = config.profile if config.profile is not None and rank in config.profile.ranks else None
    marks_nvtx = config.nvtx and torch.cuda.is_available()
    if profile_config is None and not marks_nvtx:
        yield
        return
    step_profiler = StepProfiler(profile_config, run.profiles, rank, say, marks_nvtx)
    activity.listener = step_profiler
    try:
        yield
    finally:
        activity.listener = None
        step_profiler.close()


def explain_no_trace(config: ProfileConfig | None, folder: Path, world: int, done: int, last: int) -> str:
    """Why nothing is traced although the recipe asks for it; "" if something is, or was by an earlier process.

    folder: of the traces; world: ranks; done: the step that this process begins after; last: that of the run."""
    if config is None or any((folder / trace_name(config.start, rank)).exists() for rank in config.ranks):
        return ""
    last_traced = config.start + config.steps - 1
    if min(config.ranks) >= world:
        ranks = list(config.ranks)
        return f"logging.profile.ranks={ranks}: nothing is traced, the ranks are 0 to {world - 1}"
    if last_traced <= done:
        return (
            f"logging.profile.from={config.start}: nothing is traced, step {done} is done: choose a later one"
        )
    if config.start > last:
        return f"logging.profile.from={config.start}: nothing is traced, the last step is {last}"
    return ""


class StepProfiler:
    """An `activity.ActivityListener`. config: None, nothing is traced; nvtx: mark every step, not only traced ones."""

    def __init__(
        self,
        config: ProfileConfig | None,
        folder: Path,
        rank: int,
        say: Callable[[str], None],
        nvtx: bool = False,
    ) -> None:
        self.config, self.folder, self.rank, self.say = config, folder, rank, say
        self._always, self._cuda = nvtx, torch.cuda.is_available()
        self._trace: profile | None = None
        self._steps: list[int] = []  # in the trace
        self._ranges: list[Callable[[], object]] = []  # ends of the step's range and of that of its phase
        self._over = config is None
        self._writer: threading.Thread | None = None
        # Of a process that was killed while it wrote them.
        for torn_trace in folder.glob(f".step-*-rank-{rank}.json*"):
            with suppress(OSError):
                torn_trace.unlink()

    # The listener

    def begin_step(self, step: int) -> None:
        """The step after `step` begins. Does not raise."""
        with self._unless_it_fails():
            self._begin(step + 1)

    def enter_activity(self, name: str) -> None:
        """An activity of the step begins. Does not raise."""
        if self._ranges:
            with self._unless_it_fails():
                if len(self._ranges) > 1:
                    self._ranges.pop()()
                self._open(phase_range(name))

    def end_step(self) -> None:
        """The step is over. Does not raise."""
        if self._ranges or self._trace is not None:
            with self._unless_it_fails():
                self._close_ranges()
                if self._trace is not None and self._steps[-1] + 1 not in self._wanted:
                    self._finish()

    def close(self) -> None:
        """Write what was traced so far. Does not raise."""
        with self._unless_it_fails():
            self._close_ranges()
            if self._cuda and sys.exception() is not None:
                self._trace = None  # to stop it waits for the GPU, which may wait for a rank that is gone
            if self._trace is not None:
                self._finish()
            if self._writer is not None:
                self._writer.join(PATIENCE)

    # Steps

    @property
    def _wanted(self) -> range:
        c = self.config
        return range(0) if c is None else range(c.start, c.start + c.steps)

    def _begin(self, step: int) -> None:
        self._close_ranges()  # of a step that was given up
        if self._trace is not None and step != self._steps[-1] + 1:
            self._finish()  # the run went back
        if self._trace is None and not self._over and step in self._wanted:
            self._start()
        if self._trace is not None:
            self._steps.append(step)
        if self._trace is not None or self._always:
            self._open(step_range(step))

    def _start(self) -> None:
        self.folder.mkdir(exist_ok=True)
        if self._path.exists():
            self._over = True
            log.info("%s exists: these steps are not traced again", self._path)
            return
        profiled_activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if self._cuda else [])]
        new_trace = profile(activities=profiled_activities)
        new_trace.start()
        self._trace, self._steps = new_trace, []

    def _finish(self) -> None:
        """Stop tracing; a thread writes the file."""
        trace, self._trace, self._over = self._trace, None, True
        assert trace is not None
        facts = {"rank": self.rank, "steps": self._steps, "device": "cuda" if self._cuda else "cpu"}
        trace.add_metadata_json(METADATA, json.dumps(facts))
        trace.stop()
        self._writer = threading.Thread(target=self._write, args=(trace,), name="profile", daemon=True)
        self._writer.start()

    @property
    def _path(self) -> Path:
        return self.folder / trace_name(self._wanted.start, self.rank)

    def _write(self, trace: Any) -> None:
        plain_path = self.folder / f".{self._path.name.removesuffix('.gz')}"
        packed_path = self.folder / f".{self._path.name}"
        try:
            trace.export_chrome_trace(str(plain_path))
            with plain_path.open("rb") as plain, gzip.open(packed_path, "wb", compresslevel=6) as packed:
                shutil.copyfileobj(plain, packed, 1 << 20)
            os.replace(packed_path, self._path)
            steps_text = f"steps {self._steps[0]} to {self._steps[-1]}"
            self.say(f"profile of {steps_text}, rank {self.rank}: {self._path}")
        except Exception as error:
            log.warning("the profile could not be written to %s: %s", self._path, error)
        finally:
            with suppress(OSError):
                plain_path.unlink(missing_ok=True)
                packed_path.unlink(missing_ok=True)

    # Ranges

    def _open(self, name: str) -> None:
        open_ranges = ExitStack()
        if self._trace is not None:
            open_ranges.enter_context(record_function(name))
        if self._cuda:
            torch.cuda.nvtx.range_push(name)
            open_ranges.callback(torch.cuda.nvtx.range_pop)
        self._ranges.append(open_ranges.close)

    def _close_ranges(self) -> None:
        while self._ranges:
            self._ranges.pop()()

    @contextmanager
    def _unless_it_fails(self) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            log.warning("the profile is given up, the run goes on: %s: %s", type(error).__name__, error)
            failed_trace, self._trace, self._over, self._always = self._trace, None, True, False
            self._ranges.clear()
            if failed_trace is not None:
                with suppress(Exception):
                    failed_trace.stop()


def snapshot_on_out_of_memory(folder: Path, rank: int, history: int) -> None:
    """From now on, the first allocation that fails in this process writes a snapshot to `folder`. history: allocations
    to keep with their stacks. Does nothing without a GPU; does not raise."""
    if not torch.cuda.is_available():
        return
    try:
        if history:
            torch.cuda.memory._record_memory_history(max_entries=history, stacks="python")
        snapshot_writer = SnapshotWriter(folder, rank, torch.cuda.memory._snapshot)
        torch._C._cuda_attach_out_of_memory_observer(snapshot_writer)  # type: ignore[attr-defined]
    except Exception as error:  # all of them are private to torch
        log.warning("no snapshot will be written when memory runs out: %s: %s", type(error).__name__, error)


class SnapshotWriter:
    """Called by torch's allocator before it raises. take: a snapshot."""

    def __init__(self, folder: Path, rank: int, take: Callable[[], Any]) -> None:
        self.path = folder / f"out-of-memory-rank-{rank}.pickle"
        self._take, self._done = take, False

    def __call__(self, *_: object) -> None:
        """Writes it, once; that of an earlier process is replaced. Does not raise."""
        if self._done:
            return
        self._done = True
        temporary_path = self.path.with_name(f".{self.path.name}")
        try:
            self.path.parent.mkdir(exist_ok=True)
            with temporary_path.open("wb") as snapshot_file:
                pickle.dump(self._take(), snapshot_file)
            os.replace(temporary_path, self.path)
            log.warning("out of memory: what was allocated is in %s", self.path)
        except Exception as error:
            log.warning("%s: no snapshot of the memory: %s: %s", self.path, type(error).__name__, error)
