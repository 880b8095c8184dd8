"""Sends a run to MLflow: to the server of MLFLOW_TRACKING_URI, or else into the run directory.

MLflow keeps every value of a step, and none can be taken back: an undone step is listed again below `undone/`.
"""

from __future__ import annotations

import math
import os
import re
import statistics
import time
from collections.abc import Mapping

from mlflow.entities import Metric, Param, RunTag
from mlflow.exceptions import MlflowException
from mlflow.tracking import MlflowClient

from megastable.base.text import visible
from megastable.run.directory import as_json
from megastable.training.trackers.curves import apart, by_statistic, finite, shown
from megastable.training.trackers.points import (
    LayersPoint,
    NotePoint,
    RunPoint,
    StepPoint,
    UndonePoint,
    ValidationPoint,
)
from megastable.training.trackers.tracker import Setting

BATCH = 500  # metrics of one request; MLflow takes 1000 at most
PARAMETERS = 100  # of one request
LONGEST = 500  # characters of a parameter
# Each request must answer within logging.tracker_timeout; by itself MLflow repeats one for minutes.
PATIENCE = {"MLFLOW_HTTP_REQUEST_TIMEOUT": "15", "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "1"}
OUTAGE = 6 * 3600.0  # seconds for which records wait for a server
WAITING = 200_000  # metrics that wait at most; then the oldest are dropped
STATUS = {"finished": "FINISHED", "stopped": "KILLED"}


class MlflowTracker:
    """One run of MLflow for all processes of the run."""

    def __init__(self, setting: Setting) -> None:
        self._per_layer = setting.per_layer
        run, memory = setting.run, setting.memory
        store = os.environ.get("MLFLOW_TRACKING_URI")
        if store is None:
            os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")
            store = (setting.folder.resolve() / "mlruns").as_uri()
        for name, value in PATIENCE.items():
            os.environ.setdefault(name, value)
        self._client = MlflowClient(store)
        self._warn, self._timeout = setting.warn, setting.timeout
        self._metrics: list[Metric] = []
        self._notes: list[NotePoint] = []
        self._silent: float | None = None  # since when the server is away
        known = memory.facts.get("run_id") if memory.facts.get("store") == store else None
        self._id = self._resumed(known) if isinstance(known, str) else ""
        if not self._id:
            self._id = self._client.create_run(self._experiment(run.project), run_name=run.name).info.run_id
            memory.keep(run_id=self._id, store=store)
        memory.keep(experiment=str(self._client.get_run(self._id).info.experiment_id))
        tags = {"megastable.directory": run.directory, "megastable.step": str(run.step)}
        self._client.log_batch(self._id, tags=[RunTag(key, value) for key, value in tags.items()])
        self._parameters(run)

    def step(self, point: StepPoint) -> None:
        values = shown(point)
        if not point.applied:
            values |= apart(point, "refused")
        values["tokens"] = float(point.tokens)
        self._add(values, point.step, point.time)

    def validation(self, point: ValidationPoint) -> None:
        self._add(finite(point.values), point.step, point.time)

    def layers(self, point: LayersPoint) -> None:
        values = finite(point.values) if self._per_layer else {}
        for kind, found in by_statistic(point.values).items():
            values[f"layers/{kind}/lowest"] = min(found)
            values[f"layers/{kind}/median"] = statistics.median(found)
            values[f"layers/{kind}/largest"] = max(found)
        self._add(values, point.step, point.time)

    def undone(self, point: UndonePoint) -> None:
        for step in point.points:
            self._add(apart(step, "undone"), step.step, step.time)

    def note(self, point: NotePoint) -> None:
        self._notes.append(point)

    def flush(self, seconds: float = 10.0) -> None:
        until = time.monotonic() + seconds  # after an outage there may be more than fits into one call
        try:
            while self._metrics and time.monotonic() < until:
                self._client.log_batch(self._id, metrics=self._metrics[:BATCH])
                del self._metrics[:BATCH]
            while self._notes and time.monotonic() < until:
                self._write(self._notes[0])
                del self._notes[0]
        except MlflowException as error:
            self._wait(error)
        else:
            self._silent = None

    def _wait(self, error: MlflowException) -> None:
        """Keep what there is for a server that is away. Raises the error when that lasts."""
        now = time.monotonic()
        if self._silent is None:
            self._silent = now
            self._warn(f"MLflow does not take records, they wait: {visible(error, 300)}")
        if now - self._silent > OUTAGE:
            raise error
        del self._metrics[:-WAITING]

    def _write(self, point: NotePoint) -> None:
        key = f"note.{point.event}" if point.incident is None else f"incident.{point.incident:04d}"
        self._client.set_tag(self._id, key, visible(f"step {point.step}: {point.text}", LONGEST))
        if point.incident is not None:
            folder = f"incidents/{point.incident:04d}"
            self._client.log_text(self._id, point.story, f"{folder}/incident.md")
            summary = as_json(dict(point.summary), indent=1)
            self._client.log_text(self._id, summary, f"{folder}/incident.json")

    def close(self, status: str) -> None:
        self.flush(self._timeout / 2)
        self._client.set_terminated(self._id, STATUS.get(status, "FAILED"))

    def _add(self, values: Mapping[str, float], step: int, at: float) -> None:
        milliseconds = int(at * 1000)
        self._metrics += [
            Metric(safe(name), value, milliseconds, step)
            for name, value in values.items()
            if math.isfinite(value)
        ]
        if len(self._metrics) >= BATCH and self._silent is None:
            self.flush()

    def _experiment(self, name: str) -> str:
        given = os.environ.get("MLFLOW_EXPERIMENT_ID")
        if given:
            return given
        name = os.environ.get("MLFLOW_EXPERIMENT_NAME", name)
        found = self._client.get_experiment_by_name(name)
        if found is not None:
            return str(found.experiment_id)
        try:
            return str(self._client.create_experiment(name))
        except MlflowException:  # another run has just made it
            found = self._client.get_experiment_by_name(name)
            if found is None:
                raise
            return str(found.experiment_id)

    def _resumed(self, known: str) -> str:
        """The run that the process before has written to; "" if it was deleted."""
        try:
            self._client.update_run(known, status="RUNNING")
        except MlflowException:
            return ""
        return known

    def _parameters(self, run: RunPoint) -> None:
        """The recipe. A parameter cannot change: later values become tags."""
        known = self._client.get_run(self._id).data.params
        given = {
            safe(key): visible(value, LONGEST)
            for key, value in run.config.items()
            if value not in (None, "", [])
        }
        new = [Param(key, value) for key, value in given.items() if key not in known]
        for begin in range(0, len(new), PARAMETERS):
            self._client.log_batch(self._id, params=new[begin : begin + PARAMETERS])
        for key, value in given.items():
            if key in known and known[key] != value:
                self._client.set_tag(self._id, f"changed.{key}", f"{value} from step {run.step} on")


def safe(name: str) -> str:
    """A name as MLflow allows it."""
    return re.sub(r"[^\w.\-/ :]", "_", name, flags=re.ASCII)[:250]
