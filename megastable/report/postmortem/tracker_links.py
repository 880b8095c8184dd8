"""Where the trackers of a run show it, by what they remember (run/tracker_memory.py)."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from urllib.parse import quote, urlsplit, urlunsplit

from megastable.report.postmortem.sample_texts import Facts
from megastable.run.tracker_memory import TrackerMemory


class TrackerLink(Facts):
    """url: of the run's page, "" if the tracker has none; command: that shows it then."""

    name: str
    url: str = ""
    command: str = ""


def find_trackers(run: Path) -> list[TrackerLink]:
    """Of all trackers that this run has written to, and not a run that it was copied from."""
    known = {name: TrackerMemory(run, name).facts for name in ("wandb", "mlflow", "tensorboard")}
    return [link for name, facts in known.items() if facts and (link := _link(name, facts, run)) is not None]


def _link(name: str, facts: Mapping[str, Any], run: Path) -> TrackerLink | None:
    if name == "wandb":
        url = _public(facts.get("url"))
        files = f"{shlex.quote(str(run / 'trackers/wandb'))}/offline-run-*"
        return TrackerLink(name="Weights & Biases", url=url, command="" if url else f"wandb sync {files}")
    if name == "tensorboard":
        return TrackerLink(
            name="TensorBoard", command=f"tensorboard --logdir {shlex.quote(str(run / 'tensorboard'))}"
        )
    store, experiment, number = (facts.get(key) for key in ("store", "experiment", "run_id"))
    if not isinstance(store, str):
        return None
    if (page := _public(store)) and isinstance(experiment, str) and isinstance(number, str):
        return TrackerLink(
            name="MLflow", url=f"{page.rstrip('/')}/#/experiments/{quote(experiment)}/runs/{quote(number)}"
        )
    shown = page if "://" in store and not store.startswith("file:") else store
    return (
        TrackerLink(name="MLflow", command=f"mlflow ui --backend-store-uri {shlex.quote(shown)}")
        if shown
        else None
    )


def _public(url: object) -> str:
    """The address of a page, without a password; "" if it is none."""
    if not isinstance(url, str):
        return ""
    try:
        parts = urlsplit(url)
        host = (parts.hostname or "") + ("" if parts.port is None else f":{parts.port}")
    except ValueError:
        return ""
    if parts.scheme not in ("http", "https") or not host:
        return ""
    return urlunsplit((parts.scheme, host, parts.path, "", ""))
