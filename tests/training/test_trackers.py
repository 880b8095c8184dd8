"""Each tracker's own reader reads back what a run told: the curves of what counts, refused and undone steps apart, and
the incident."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from tests.training.tracked_run import (
    FIRST,
    LOSSES,
    NAME,
    REFUSED,
    SECOND,
    TOKENS,
    UNDONE,
    VALIDATION,
    configured,
    process,
)

WANDB, MLFLOW = (find_spec(name) is not None for name in ("wandb", "mlflow"))
COPY = "import os, sys; open(os.environ['MEGASTABLE_RUN'] + '/copy', 'a').write(sys.stdin.read())"
STORY = ("opened: a spike", "back at step 12", "closed: healed")


@dataclass(frozen=True)
class Tracked:
    root: Path
    said: list[str]


@pytest.fixture(scope="module")
def tracked(tmp_path_factory: pytest.TempPathFactory) -> Tracked:
    """The run directory, after both processes; all trackers that are installed."""
    folder = tmp_path_factory.mktemp("tracked")
    names = ["tensorboard", "jsonl", "command", *["wandb"] * WANDB, *["mlflow"] * MLFLOW]
    config = configured(names, f'{sys.executable} -c "{COPY}"')
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HOME", str(folder))
        for name in ("WANDB_MODE", "WANDB_API_KEY", "MLFLOW_TRACKING_URI", "MLFLOW_EXPERIMENT_NAME"):
            patch.delenv(name, raising=False)
        said = process(folder / "run", config, 0, FIRST) + process(folder / "run", config, 18, SECOND)
    return Tracked(folder / "run", said)


def close(found: dict[int, float], wanted: dict[int, float]) -> bool:
    return found == pytest.approx(wanted)


def test_nothing_went_wrong(tracked: Tracked) -> None:
    assert [line for line in tracked.said if "wandb sync" not in line] == []
    assert len(tracked.said) == WANDB  # said once, not by every process


def accumulated(folder: Path) -> Any:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    found = EventAccumulator(str(folder), size_guidance={"scalars": 0, "tensors": 0})
    found.Reload()
    return found


def scalars(folder: Path, tag: str) -> dict[int, float]:
    events = accumulated(folder).Scalars(tag)
    assert len(events) == len({e.step for e in events})  # no step twice
    return {e.step: e.value for e in events}


def test_tensorboard(tracked: Tracked) -> None:
    (run,) = (tracked.root / "tensorboard").iterdir()
    assert run.name == "näme _b_ _HOME_.._x"
    assert close(scalars(run, "1 train/loss"), LOSSES)
    assert close(scalars(run, "2 validation/loss"), VALIDATION)
    by_corpus = {step: loss + 1 for step, loss in VALIDATION.items()}
    assert close(scalars(run, "2 validation/of/a b"), by_corpus)
    assert scalars(run / "tasks", "tasks/arc/acc") == {18: 0.5}
    for part, wanted in (("refused", REFUSED), ("undone", UNDONE)):
        assert close(scalars(run / part, "1 train/loss"), wanted)
    by_tokens = {step * TOKENS: loss for step, loss in LOSSES.items()}
    assert close(scalars(run / "by_tokens", "6 by tokens/loss"), by_tokens)
    assert scalars(run, "3 stability/incidents")[24] == 1


def test_tensorboard_opens_on_what_matters(tracked: Tracked) -> None:
    """It sorts groups by name, and opens the first two."""
    (run,) = (tracked.root / "tensorboard").iterdir()
    tags = accumulated(run).Tags()
    groups = sorted({tag.partition("/")[0] for tag in tags["scalars"]})
    assert groups == ["1 train", "2 validation", "3 stability", "4 speed"]
    assert sorted(tag for tag in tags["scalars"] if tag < "3") == [
        "1 train/loss", "1 train/lr", "1 train/norm_of_gradient", "2 validation/loss", "2 validation/of/a b",
    ]  # fmt: skip
    assert len(tags["scalars"]) < 20
    shown = sorted(tag for tag in tags["tensors"] if not tag.startswith("_hparams_"))
    assert shown == ["5 layers/activation_max", "5 layers/log10_gradient_rms"]


def test_tensorboard_has_distributions_notes_and_hyperparameters(tracked: Tracked) -> None:
    from tensorboard.plugins.hparams.plugin_data_pb2 import HParamsPluginData
    from tensorboard.util.tensor_util import make_ndarray

    (run,) = (tracked.root / "tensorboard").iterdir()
    found = accumulated(run)
    (event,) = found.Tensors("5 layers/activation_max")
    buckets = make_ndarray(event.tensor_proto)
    assert event.step == 10 and buckets[:, 2].sum() == 4 and (buckets[0, 0], buckets[-1, 1]) == (1, 4)
    content = found.SummaryMetadata("_hparams_/session_start_info").plugin_data.content
    start = HParamsPluginData.FromString(content).session_start_info
    assert start.hparams["optimizer.lr"].number_value == 0.002 and start.group_name
    assert "optimizer.eps" not in start.hparams and len(start.hparams) < 20  # those that tell runs apart
    notes = accumulated(run / "notes")
    texts = [make_ndarray(e.tensor_proto).item().decode() for e in notes.Tensors("incidents/0001")]
    assert all(part in texts[-1] for part in STORY)
    assert "notes/finished" in notes.Tags()["tensors"]


def test_jsonl(tracked: Tracked) -> None:
    lines = (tracked.root / "trackers/records.jsonl").read_text(encoding="utf-8").splitlines()
    rows = [json.loads(line) for line in lines]
    loss, validation = dict[int, float](), dict[int, float]()
    for row in rows:  # as docs/trackers.md says
        if row["record"] == "undone":
            for found in (loss, validation):
                for step in [step for step in found if step >= row["step"]]:
                    del found[step]
        elif row["record"] == "step" and row["applied"]:
            loss[row["step"]] = row["train/loss"]
        elif row["record"] == "validation":
            validation[row["step"]] = row["validation/loss"]
    assert close(loss, LOSSES) and close(validation, VALIDATION)
    assert [(r["step"], r["last"]) for r in rows if r["record"] == "undone"] == [(13, 16), (19, 20)]
    told = [row for row in rows if row.get("incident") == 1]
    assert [row["what"] for row in told] == ["opened", "rewound", "closed"]
    assert [row["step"] for row in rows if row["record"] == "run"] == [0, 18]
    assert {row["name"] for row in rows if row["record"] == "run"} == {NAME}
    assert not any("tracker_command" in line for line in lines)


def test_a_program_gets_the_same_lines(tracked: Tracked) -> None:
    wanted = (tracked.root / "trackers/records.jsonl").read_text(encoding="utf-8")
    assert (tracked.root / "copy").read_text(encoding="utf-8") == wanted


@pytest.mark.skipif(not WANDB, reason="wandb is not installed: bash launch/install.sh wandb")
def test_wandb(tracked: Tracked) -> None:
    """Kept offline, and read by wandb's own reader."""
    program = Path(sys.executable).with_name("wandb")
    folders = sorted((tracked.root / "trackers/wandb").glob("offline-run-*"))
    memory = json.loads((tracked.root / "trackers/wandb.json").read_text())
    assert len(folders) == 2 and all(folder.name.endswith(f"-{memory['id']}") for folder in folders)
    records = [
        json.loads(line) for folder in folders for line in subprocess.run(
            [program, "leet", "inspect", "--json", folder], capture_output=True, text=True, check=True,
            stdin=subprocess.DEVNULL, env={"HOME": str(tracked.root)},
        ).stdout.splitlines()
    ]  # fmt: skip
    rows = [r["history"]["item"] for r in records if r["type"] == "history"]
    numbers = [row["_step"] for row in rows]
    assert numbers == sorted(set(numbers))  # wandb drops a row whose number was there before
    for name, wanted in (
        ("train/loss", LOSSES), ("validation/loss", VALIDATION | {14: 9.0}), ("refused/loss", REFUSED),
        ("undone/loss", UNDONE),
    ):  # fmt: skip
        assert close({row["step"]: row[name] for row in rows if name in row}, wanted)
    assert {row["tokens"]: row["by_tokens/loss"] for row in rows if "by_tokens/loss" in row}[24 * TOKENS]
    metrics = [r["metric"] for r in records if r["type"] == "metric"]
    assert {m.get("glob_name"): m.get("step_metric") for m in metrics}["*"] == "step"
    artifacts = [r["artifact"] for r in records if r["type"] == "artifact"]
    assert [a["type"] for a in artifacts] == ["incident", "incident"]  # opened, closed
    files = {c["path"]: Path(c["local_path"]) for c in artifacts[-1]["manifest"]["contents"]}
    assert json.loads(files["incident.json"].read_text())["outcome"] == "healed"
    assert all(part in files["incident.md"].read_text() for part in STORY)
    assert files["incident.md"].is_relative_to(tracked.root)


@pytest.mark.skipif(not MLFLOW, reason="mlflow is not installed: bash launch/install.sh mlflow")
def test_mlflow(tracked: Tracked, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    from mlflow.tracking import MlflowClient

    memory = json.loads((tracked.root / "trackers/mlflow.json").read_text())
    client = MlflowClient(memory["store"])
    experiment = client.get_experiment_by_name("megastable")
    (run,) = client.search_runs([experiment.experiment_id])  # one for both processes
    assert run.info.run_id == memory["run_id"] and run.info.status == "FINISHED"
    assert run.info.run_name == NAME and run.data.params["optimizer.lr"] == "0.002"
    for name, wanted in (
        ("train/loss", LOSSES), ("validation/loss", VALIDATION | {14: 9.0}), ("refused/loss", REFUSED),
        ("undone/loss", UNDONE),
    ):  # fmt: skip
        history = client.get_metric_history(run.info.run_id, name)
        assert close({metric.step: metric.value for metric in history}, wanted)
    assert run.data.tags["incident.0001"] == "step 18: incident 1: closed: healed"
    path = client.download_artifacts(run.info.run_id, "incidents/0001/incident.json")
    assert json.loads(Path(path).read_text())["outcome"] == "healed"
