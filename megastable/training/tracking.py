"""Sends what a run does to its trackers, in another process, without ever waiting for it. Rank 0 only.

A step costs the training thread one append to a queue. A thread turns records into lines and writes them into a pipe
as the other side takes them; what the queue has no room for is dropped.
"""

from __future__ import annotations

import os
import queue
import select
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from megastable.config.tree import LoggingConfig, RunConfig
from megastable.run.directory import RunDirectory
from megastable.run.records import LayerRecord, StepRecord
from megastable.training.trackers.points import (
    LayersPoint,
    Point,
    RunPoint,
    StepPoint,
    ValidationPoint,
    flatten_recipe,
    is_untold,
    layer_values,
    line_of,
    values_of,
)
from megastable.training.trackers.tracker import COMMAND

ROOM = 10_000  # records
PARTING = 5.0  # seconds that the end of a process waits for its trackers; they go on by themselves
MORE = {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}  # of the environment of the process


def run_point(config: RunConfig, run: RunDirectory, step: int, tokens: int, attempt: int | None) -> RunPoint:
    """The record of the run, for a process that begins after `step`."""
    recipe_values = flatten_recipe(config.model_dump(mode="json"))
    told_values = {
        recipe_value: value for recipe_value, value in recipe_values.items() if not is_untold(recipe_value)
    }
    name, folder = run.name_run(config), str(run.root.resolve())
    return RunPoint(name, folder, step, tokens, time.time(), attempt, config.logging.project, told_values)


class Tracking:
    """The trackers of a run, as rank 0 sees them. say: prints a line."""

    def __init__(
        self,
        config: LoggingConfig,
        run: RunDirectory,
        begin: RunPoint,
        say: Callable[[str], None],
        room: int = ROOM,
    ) -> None:
        self._say = say
        self._queue = queue.Queue[Callable[[], Point] | None](room)
        self._dropped, self._over = 0, False
        self._process: subprocess.Popen[bytes] | None = None
        if not config.trackers:
            self._over = True
            return
        words = [
            sys.executable, "-m", "megastable.training.trackers", ",".join(dict.fromkeys(config.trackers)),
            f"--timeout={config.tracker_timeout}",
            *(["--per-layer"] if config.per_layer_scalars else []),
        ]  # fmt: skip
        try:
            run.logs.mkdir(exist_ok=True)
            with (run.logs / "trackers.log").open("ab") as log:
                self._process = subprocess.Popen(
                    words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, start_new_session=True,
                    env=os.environ | MORE | {COMMAND: config.tracker_command or ""}, bufsize=0,
                )  # fmt: skip
        except OSError as error:
            self._end(f"no tracker could be started: {error}")
            return
        assert self._process.stdin is not None
        os.set_blocking(self._process.stdin.fileno(), False)
        self._writer = threading.Thread(target=self._write, args=(begin,), name="trackers", daemon=True)
        self._reader = threading.Thread(target=self._listen, name="tracker warnings", daemon=True)
        self._writer.start()
        self._reader.start()

    def send_step(self, record: StepRecord, tokens: int) -> None:
        """A finished step; tokens: of all steps so far."""
        self._put(lambda: StepPoint(record.step, tokens, record.time, record.applied, values_of(record)))

    def send_layers(self, rows: Sequence[LayerRecord]) -> None:
        """The statistics of a step's layers."""
        self._put(lambda: LayersPoint(rows[0].step, rows[0].time, layer_values(rows)))

    def send_validation(self, step: int, tokens: int, values: Mapping[str, float]) -> None:
        """An evaluation, with its losses by curve, in nats per token."""
        current_time = time.time()
        self._put(lambda: ValidationPoint(step, tokens, current_time, values))

    def close(self, seconds: float = PARTING) -> None:
        """Tell the trackers that this is all. Waits for them for a short time only."""
        if self._process is None or self._over:
            return
        close_deadline = time.monotonic() + seconds
        try:
            self._queue.put_nowait(None)
        except queue.Full:
            return  # nobody reads; the pipe ends with this process
        self._writer.join(max(0.0, close_deadline - time.monotonic()))
        try:
            self._process.wait(max(0.0, close_deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            self._say(f"trackers are still busy after {seconds:g} s, and go on without this process")
        else:
            self._reader.join(1.0)

    def _put(self, point: Callable[[], Point]) -> None:
        if self._over:
            return
        try:
            self._queue.put_nowait(point)
        except queue.Full:
            self._dropped += 1
            if self._dropped == 1:
                self._say(
                    f"WARNING: trackers do not keep up: {self._queue.maxsize:,} records wait, more are dropped"
                )

    def _write(self, begin: RunPoint) -> None:
        """Of the thread that writes."""
        make_point: Callable[[], Point] | None = lambda: begin  # noqa: E731
        try:
            while make_point is not None:
                self._send((line_of(make_point()) + "\n").encode())
                make_point = self._queue.get()
        except OSError as error:
            self._end(f"the process of the trackers is gone ({error})")
        except Exception as error:  # a record that cannot be told must not print a traceback into the console
            self._end(f"{type(error).__name__}: {error}")
        finally:
            self._over = True
            self._stdin().close()

    def _send(self, line: bytes) -> None:
        tracker_pipe, rest_bytes = self._stdin(), memoryview(line)
        pipe_poll = select.poll()
        pipe_poll.register(tracker_pipe, select.POLLOUT)
        while rest_bytes:
            if pipe_poll.poll(1000):
                rest_bytes = rest_bytes[tracker_pipe.write(rest_bytes) or 0 :]

    def _stdin(self) -> Any:
        assert self._process is not None
        return self._process.stdin

    def _listen(self) -> None:
        """Of the thread that hears warnings."""
        assert self._process is not None and self._process.stdout is not None
        for line in self._process.stdout:
            self._say(f"WARNING: {line.decode(errors='replace').strip()}")

    def _end(self, why: str) -> None:
        self._over = True
        self._say(f"WARNING: {why}: nothing more goes to trackers in this process; see logs/trackers.log")
