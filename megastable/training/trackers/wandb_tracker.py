"""Sends a run to Weights & Biases; without an account at hand it is kept offline, for `wandb sync`.

wandb's own step only grows, and cannot be taken back. So every row has a metric `step`, which all curves are drawn
over, and `tokens`; an undone step is listed again below `undone/`.
"""

from __future__ import annotations

import html
import os
from collections.abc import Mapping
from typing import Any

import numpy as np
import wandb

from megastable.run.directory import as_json
from megastable.training.trackers.points import (
    VALIDATION,
    LayersPoint,
    NotePoint,
    StepPoint,
    UndonePoint,
    ValidationPoint,
    by_statistic,
    drop_non_finite,
    values_apart,
    values_shown,
)
from megastable.training.trackers.tracker import Setting

KEEP = 200  # rows between two notes of their number
BUCKETS = 30


class WandbTracker:
    """One run of wandb for all processes of the run."""

    def __init__(self, setting: Setting) -> None:
        self._per_layer, self._memory = setting.per_layer, setting.memory
        kept_facts, run_record = setting.memory.facts, setting.run
        known_id = kept_facts.get("id")
        # Files that are not sent yet belong to the run directory: it may be moved before they are.
        os.environ.setdefault("WANDB_DATA_DIR", str(setting.folder / "wandb-data"))
        wandb_mode = None if has_account() else "offline"
        self._run: Any = wandb.init(
            project=None if "WANDB_PROJECT" in os.environ else run_record.project,
            name=run_record.name,
            id=known_id if isinstance(known_id, str) else None,
            resume="allow" if known_id and wandb_mode is None else None,
            dir=os.environ.get("WANDB_DIR", str(setting.folder)),
            mode=wandb_mode,
            config={"megastable": nest_keys(run_record.config), "directory": run_record.directory},
            settings=wandb.Settings(
                console="off", silent=True, disable_git=True, disable_code=True, quiet=True
            ),
            reinit="create_new",
        )
        if not known_id and self._run.offline:
            setting.warn(
                f"wandb has no account here, or is offline: afterwards, wandb sync {self._run.dir.rpartition('/')[0]}"
            )
        # Offline, wandb does not know how far the run came, and it drops rows of a number that was there already. A
        # process that was killed may have sent some more than it kept.
        known_rows = kept_facts.get("rows") if known_id else 0
        unsure_rows = 0 if kept_facts.get("closed", True) else KEEP
        known_rows = known_rows if isinstance(known_rows, int) else 0
        self._rows = max(int(self._run.step), known_rows + unsure_rows)
        self._memory.keep_facts(id=self._run.id, rows=self._rows, closed=False, url=self._run.url)
        self._run.define_metric("step", hidden=True)
        self._run.define_metric("tokens", hidden=True)
        self._run.define_metric("*", step_metric="step")
        self._run.define_metric("by_tokens/*", step_metric="tokens")

    def add_step(self, point: StepPoint) -> None:
        row_values = values_shown(point)
        if not point.applied:
            row_values |= values_apart(point, "refused")
        elif "train/loss" in row_values:
            row_values["by_tokens/loss"] = row_values["train/loss"]
        self._row(point.step, row_values, point.tokens)

    def add_validation(self, point: ValidationPoint) -> None:
        row_values = drop_non_finite(point.values)
        if VALIDATION in row_values:
            row_values["by_tokens/validation_loss"] = row_values[VALIDATION]
        self._row(point.step, row_values, point.tokens)

    def add_layers(self, point: LayersPoint) -> None:
        row_values: dict[str, Any] = dict(drop_non_finite(point.values)) if self._per_layer else {}
        for statistic_name, layer_values in by_statistic(point.values).items():
            layer_histogram = np.histogram(np.asarray(layer_values), bins=BUCKETS)
            row_values[f"layers/{statistic_name}"] = wandb.Histogram(np_histogram=layer_histogram)
        self._row(point.step, row_values)

    def add_undone(self, point: UndonePoint) -> None:
        for undone_step in point.points:
            self._row(undone_step.step, values_apart(undone_step, "undone"), undone_step.tokens)

    def add_note(self, point: NotePoint) -> None:
        if point.incident is None:
            self._row(point.step, {"notes": wandb.Html(make_page(point.text))})
            return
        incident_name = f"incident-{point.incident:04d}"
        self._row(point.step, {f"incidents/{incident_name}": wandb.Html(make_page(point.story))})
        self._run.summary["incidents"] = point.incident
        if point.what in ("opened", "attributed", "handed over", "closed"):
            name = f"{self._run.id}-{incident_name}"
            artifact = wandb.Artifact(name, type="incident", metadata={"step": point.step})
            with artifact.new_file("incident.json") as file:
                file.write(as_json(dict(point.summary), indent=1))
            with artifact.new_file("incident.md") as file:
                file.write(point.story)
            self._run.log_artifact(artifact)

    def flush(self) -> None:
        """wandb sends by itself."""

    def close(self, status: str) -> None:
        self._memory.keep_facts(rows=self._rows, closed=True)
        self._run.finish(exit_code=0 if status in ("finished", "stopped") else 1)

    def _row(self, step: int, values: Mapping[str, Any], tokens: int | None = None) -> None:
        if values:
            place_values = {"step": step} | ({} if tokens is None else {"tokens": tokens})
            self._run.log({**values, **place_values}, step=self._rows)
            self._rows += 1
            if self._rows % KEEP == 0:
                self._memory.keep_facts(rows=self._rows)


def has_account() -> bool:
    """Whether wandb can log in, or was told what to do."""
    if os.environ.get("WANDB_MODE") or os.environ.get("WANDB_API_KEY"):
        return True
    return bool(wandb.login(prompt=False, verify=False))


def nest_keys(config: Mapping[str, Any]) -> dict[str, Any]:
    """Keys by path as a tree, which wandb's tables and filters know."""
    nested_tree: dict[str, Any] = {}
    for path, value in config.items():
        *parents, leaf_name = path.split(".")
        tree_node = nested_tree
        for parent_name in parents:
            tree_node = tree_node.setdefault(parent_name, {})
        tree_node[leaf_name] = value
    return nested_tree


def make_page(text: str) -> str:
    """Text as a page."""
    return f"<pre style='white-space: pre-wrap'>{html.escape(text, quote=False)}</pre>"
