"""Sends a run to MLflow: to the server of MLFLOW_TRACKING_URI, or else into the run directory.

MLflow keeps every value of a step, and none can be taken back: an undone step is listed again below `undone/`.
"""

from __future__ import annotations

import os
import re
import statistics
import time
from collections.abc import Mapping
from contextlib import suppress

from mlflow.entities import Metric, Param, RunTag
from mlflow.exceptions import MlflowException
from mlflow.tracking import MlflowClient

from megastable.base.text import make_visible
from megastable.run.directory import as_json
from megastable.training.trackers.points import (
    LayersPoint,
    NotePoint,
    RunPoint,
    StepPoint,
    UndonePoint,
    ValidationPoint,
    by_statistic,
    drop_non_finite,
    values_apart,
    values_shown,
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
        run_record, tracker_memory = setting.run, setting.memory
        store_uri = os.environ.get("MLFLOW_TRACKING_URI")
        if store_uri is None:
            os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")
            store_uri = (setting.folder.resolve() / "mlruns").as_uri()
        for variable_name, value in PATIENCE.items():
            os.environ.setdefault(variable_name, value)
        self._client = MlflowClient(store_uri)
        self._warn, self._timeout = setting.warn, setting.timeout
        self._metrics: list[Metric] = []
        self._notes: list[NotePoint] = []
        self._silent: float | None = None  # since when the server is away
        self._id = ""
        known_id = tracker_memory.facts.get("run_id")
        if isinstance(known_id, str) and tracker_memory.facts.get("store") == store_uri:
            with suppress(MlflowException):  # it was deleted
                self._client.update_run(known_id, status="RUNNING")
                self._id = known_id
        if not self._id:
            experiment = self._experiment(run_record.project)
            self._id = self._client.create_run(experiment, run_name=run_record.name).info.run_id
            tracker_memory.keep_facts(run_id=self._id, store=store_uri)
        tracker_memory.keep_facts(experiment=str(self._client.get_run(self._id).info.experiment_id))
        run_tags = {"megastable.directory": run_record.directory, "megastable.step": str(run_record.step)}
        self._client.log_batch(self._id, tags=[RunTag(key, value) for key, value in run_tags.items()])
        self._parameters(run_record)

    def add_step(self, point: StepPoint) -> None:
        metric_values = values_shown(point)
        if not point.applied:
            metric_values |= values_apart(point, "refused")
        metric_values["tokens"] = float(point.tokens)
        self._add(metric_values, point.step, point.time)

    def add_validation(self, point: ValidationPoint) -> None:
        self._add(point.values, point.step, point.time)

    def add_layers(self, point: LayersPoint) -> None:
        metric_values = dict(point.values) if self._per_layer else {}
        for statistic_name, layer_values in by_statistic(point.values).items():
            metric_values[f"layers/{statistic_name}/lowest"] = min(layer_values)
            metric_values[f"layers/{statistic_name}/median"] = statistics.median(layer_values)
            metric_values[f"layers/{statistic_name}/largest"] = max(layer_values)
        self._add(metric_values, point.step, point.time)

    def add_undone(self, point: UndonePoint) -> None:
        for undone_step in point.points:
            self._add(values_apart(undone_step, "undone"), undone_step.step, undone_step.time)

    def add_note(self, point: NotePoint) -> None:
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
        current_time = time.monotonic()
        if self._silent is None:
            self._silent = current_time
            self._warn(f"MLflow does not take records, they wait: {make_visible(error, 300)}")
        if current_time - self._silent > OUTAGE:
            raise error
        del self._metrics[:-WAITING]

    def _write(self, point: NotePoint) -> None:
        tag_name = f"note.{point.event}" if point.incident is None else f"incident.{point.incident:04d}"
        self._client.set_tag(self._id, tag_name, make_visible(f"step {point.step}: {point.text}", LONGEST))
        if point.incident is not None:
            artifact_folder = f"incidents/{point.incident:04d}"
            self._client.log_text(self._id, point.story, f"{artifact_folder}/incident.md")
            summary_text = as_json(dict(point.summary), indent=1)
            self._client.log_text(self._id, summary_text, f"{artifact_folder}/incident.json")

    def close(self, status: str) -> None:
        self.flush(self._timeout / 2)
        self._client.set_terminated(self._id, STATUS.get(status, "FAILED"))

    def _add(self, values: Mapping[str, float], step: int, at: float) -> None:
        milliseconds = int(at * 1000)
        self._metrics += [
            Metric(escape_name(name), value, milliseconds, step)
            for name, value in drop_non_finite(values).items()
        ]
        if len(self._metrics) >= BATCH and self._silent is None:
            self.flush()

    def _experiment(self, name: str) -> str:
        given_id = os.environ.get("MLFLOW_EXPERIMENT_ID")
        if given_id:
            return given_id
        name = os.environ.get("MLFLOW_EXPERIMENT_NAME", name)
        known_experiment = self._client.get_experiment_by_name(name)
        if known_experiment is None:
            try:
                return str(self._client.create_experiment(name))
            except MlflowException:  # another run has just made it
                known_experiment = self._client.get_experiment_by_name(name)
                if known_experiment is None:
                    raise
        return str(known_experiment.experiment_id)

    def _parameters(self, run: RunPoint) -> None:
        """The recipe. A parameter cannot change: later values become tags."""
        known_parameters = self._client.get_run(self._id).data.params
        given_parameters = {
            escape_name(key): make_visible(value, LONGEST)
            for key, value in run.config.items() if value not in (None, "", [])
        }  # fmt: skip
        new_parameters = [
            Param(parameter_key, v)
            for parameter_key, v in given_parameters.items()
            if parameter_key not in known_parameters
        ]
        for begin in range(0, len(new_parameters), PARAMETERS):
            self._client.log_batch(self._id, params=new_parameters[begin : begin + PARAMETERS])
        for parameter_key, value in given_parameters.items():
            if parameter_key in known_parameters and known_parameters[parameter_key] != value:
                self._client.set_tag(self._id, f"changed.{parameter_key}", f"{value} from step {run.step} on")


def escape_name(name: str) -> str:
    """A name as MLflow allows it."""
    return re.sub(r"[^\w.\-/ :]", "_", name, flags=re.ASCII)[:250]
