"""Writes TensorBoard's files: RUN/tensorboard/NAME and, for what must not mix with the run's own curves, runs below it.

TensorBoard sorts groups by name and opens the first two: numbers put what matters first. Points cannot be taken back
one by one, but a session that starts at a step voids all later ones of its folder. So notes, scores of tasks and undone
steps have folders of their own: they stay.
"""

from __future__ import annotations

import os
import re
import socket
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from tensorboard.compat.proto.event_pb2 import Event, SessionLog, SourceMetadata
from tensorboard.compat.proto.summary_pb2 import Summary
from tensorboard.plugins.histogram.summary_v2 import histogram_pb
from tensorboard.plugins.hparams import summary_v2 as hparams
from tensorboard.plugins.text.summary_v2 import text_pb
from tensorboard.summary.writer.record_writer import RecordWriter

from megastable.training.trackers.points import (
    VALIDATION,
    LayersPoint,
    NotePoint,
    RunPoint,
    StepPoint,
    TasksPoint,
    UndonePoint,
    ValidationPoint,
    by_statistic,
    choose_hyperparameters,
    drop_non_finite,
    values_apart,
    values_shown,
)
from megastable.training.trackers.tracker import Setting

GROUPS = {"train": "1 train", "validation": "2 validation", "stability": "3 stability", "speed": "4 speed"}
LAYERS, TOKENS = "5 layers", "6 by tokens"
BEHIND = {"train/grad_norm": "train/norm_of_gradient"}  # the loss comes first
BUCKETS = 30
LONGEST = 120  # bytes of a folder's name


class TensorBoardTracker:
    """Runs in TensorBoard: NAME, and below it `refused`, `add_undone`, `notes`, `tasks` and `by_tokens` when there is
    something to show in them."""

    def __init__(self, setting: Setting) -> None:
        self._per_layer = setting.per_layer
        folder = setting.memory.facts.get("folder")
        if not isinstance(folder, str) or folder != folder_of(folder):
            folder = folder_of(setting.run.name)
        self._root = setting.root / "tensorboard" / folder
        self._writers: dict[str, EventFile] = {}
        setting.memory.keep_facts(folder=folder)
        # As if the process before had ended here.
        self._void("", setting.run.step + 1)
        if (self._root / "by_tokens").exists():
            self._void("by_tokens", setting.run.tokens + 1)
        self._hyperparameters(setting.run)

    def add_step(self, point: StepPoint) -> None:
        self._scalars("", values_shown(point), point.step, point.time)
        if not point.applied:
            self._scalars("refused", values_apart(point), point.step, point.time)
        elif (train_loss := drop_non_finite(point.values).get("train/loss")) is not None:
            self._scalars("by_tokens", {f"{TOKENS}/loss": train_loss}, point.tokens, point.time)

    def add_validation(self, point: ValidationPoint) -> None:
        # Scores are of an earlier step, and not told again after a rewind.
        part = "tasks" if isinstance(point, TasksPoint) else ""
        self._scalars(part, drop_non_finite(point.values), point.step, point.time)
        if (loss := drop_non_finite(point.values).get(VALIDATION)) is not None:
            self._scalars("by_tokens", {f"{TOKENS}/validation_loss": loss}, point.tokens, point.time)

    def add_layers(self, point: LayersPoint) -> None:
        if self._per_layer:
            self._scalars("", drop_non_finite(point.values), point.step, point.time)
        for statistic_name, layer_values in by_statistic(point.values).items():
            name = f"{LAYERS}/{statistic_name}"
            histogram = histogram_pb(name, np.asarray(layer_values), buckets=BUCKETS)
            self._add("", histogram, point.step, point.time)

    def add_undone(self, point: UndonePoint) -> None:
        self._void("", point.step)
        if "by_tokens" in self._writers:
            self._void("by_tokens", point.tokens)
        if point.points:
            self._void("undone", point.step)
        for undone_step in point.points:
            self._scalars("undone", values_apart(undone_step), undone_step.step, undone_step.time)

    def add_note(self, point: NotePoint) -> None:
        summary = text_pb(f"notes/{point.event}", point.text)
        if point.incident is not None:
            # All of its story each time: of a text, TensorBoard shows the newest ones only.
            summary = text_pb(f"incidents/{point.incident:04d}", point.story)
        self._add("notes", summary, point.step, point.time)

    def flush(self) -> None:
        for event_file in self._writers.values():
            event_file.flush()

    def close(self, status: str) -> None:
        for event_file in self._writers.values():
            event_file.close()

    def _hyperparameters(self, run: RunPoint) -> None:
        tuned = choose_hyperparameters(run.config)
        metrics = [hparams.Metric(tag_of("train/loss")), hparams.Metric(tag_of(VALIDATION))]
        given = [hparams.HParam(key) for key in tuned]
        now = time.time()
        self._add("", hparams.hparams_config_pb(given, metrics, now), 0, now)
        self._add("", hparams.hparams_pb(tuned, trial_id=run.name, start_time_secs=run.time), 0, now)

    def _scalars(self, part: str, values: Mapping[str, float], step: int, at: float) -> None:
        if values:
            # As plain values, not as tensors: EventAccumulator.Scalars and its like read these only.
            parts = [Summary.Value(tag=tag_of(name), simple_value=value) for name, value in values.items()]
            self._add(part, Summary(value=parts), step, at)

    def _void(self, part: str, step: int) -> None:
        """Later points of a folder, from `step` on, replace those before."""
        session_start = SessionLog(status=SessionLog.SessionStatus.START)
        self._writer(part).add_event(Event(wall_time=time.time(), step=step, session_log=session_start))

    def _add(self, part: str, summary: Any, step: int, at: float) -> None:
        self._writer(part).add_event(Event(wall_time=at, step=step, summary=summary))

    def _writer(self, part: str) -> EventFile:
        if part not in self._writers:
            self._writers[part] = EventFile(self._root / part)
        return self._writers[part]


def tag_of(name: str) -> str:
    """The name of a curve in TensorBoard."""
    name = BEHIND.get(name, name)
    group, _, curve_name = name.partition("/")
    return f"{GROUPS[group]}/{curve_name}" if group in GROUPS else name


def folder_of(name: str) -> str:
    """A name as that of a folder, whatever is in it."""
    safe_name = re.sub(r"[^\w.+=@ -]", "_", name).encode()[:LONGEST].decode(errors="ignore")
    return safe_name.strip(". ") or "run"


NAME = re.compile(r"events\.out\.tfevents\.(\d{1,15})\..*")


class EventFile:
    """A new file of a folder, behind those that are there. Its methods raise OSError."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        known_moments = [int(match[1]) for path in folder.iterdir() if (match := NAME.fullmatch(path.name))]
        file_moment = max(int(time.time()), max(known_moments, default=0) + 1)
        file_name = f"events.out.tfevents.{file_moment:010d}.{socket.gethostname()}.{os.getpid()}.0"
        self._records = RecordWriter((folder / file_name).open("xb"))
        source = SourceMetadata(writer="megastable")
        self.add_event(Event(wall_time=time.time(), file_version="brain.Event:2", source_metadata=source))
        self.flush()

    def add_event(self, event: Event) -> None:
        self._records.write(event.SerializeToString())

    def flush(self) -> None:
        self._records.flush()

    def close(self) -> None:
        self._records.close()
