"""Each tracker's own reader reads back what a run told: the curves of what counts, refused and undone steps apart, and
the incident."""

from __future__ import annotations

import errno
import io
import json
import os
import signal
import subprocess
import sys
import threading
import time
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any, cast

import pytest

from megastable.run.directory import RunDirectory
from megastable.run.events.stability_events import IncidentEvent
from megastable.run.events.training_events import ConfigChanged
from megastable.run.log import RunLog
from megastable.training.trackers.points import (
    Point,
    RunPoint,
    StepPoint,
    UndonePoint,
)
from megastable.training.trackers.relay import Lane, Relay, ToldSteps, TrackerNotes
from megastable.training.trackers.tensorboard_tracker import folder_of
from megastable.training.trackers.tracker import JsonlTracker, Setting
from megastable.training.tracking import Tracking, run_point
from tests.journal import note
from tests.patience import until
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
    record,
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


def point(step: int, applied: bool = True, tokens: int = 10) -> StepPoint:
    return StepPoint(step, step * tokens, float(step), applied, {"train/loss": 1.0 / step})


class Recording:
    """A tracker that keeps what it is told. wait: before each step."""

    def __init__(self, wait: threading.Event | None = None, wrong: bool = False) -> None:
        self.told: list[Any] = []
        self.wait, self.wrong = wait, wrong

    def add_step(self, point: StepPoint) -> None:
        if self.wait is not None:
            self.wait.wait()
        if self.wrong:
            raise SystemExit("no such project")
        self.told.append(point)

    add_validation = add_layers = add_undone = add_note = add_step

    def flush(self) -> None:
        self.told.append("flush")

    def close(self, status: str) -> None:
        self.told.append(status)


def test_one_that_hangs_is_given_up_with_one_warning() -> None:
    said, never = list[str](), threading.Event()
    lane = Lane("x", lambda: Recording(never), said.append, 0.05, room=10)
    begin = time.monotonic()
    for n in range(1, 1000):
        lane.put_point(point(n))
    assert time.monotonic() - begin < 1.0 and lane.dropped >= 980
    until(lambda: lane.check_timeout() or lane.over)
    lane.put_point(point(1))
    lane.check_timeout()
    assert lane.failed and [line[:9] for line in said] == ["tracker x", "tracker x"]
    assert "does not keep up" in said[0] and "given up: it has not answered" in said[1]
    never.set()


def tracking(root: Path, said: list[str], command: str, timeout: int = 60, room: int = 100) -> Tracking:
    root.mkdir(exist_ok=True)
    config, run = configured(["command"], command, timeout), RunDirectory(root)
    return Tracking(config.logging, run, run_point(config, run, 0, 0, None), said.append, room)


def test_trackers_that_stand_still_or_are_gone_hold_up_nothing(tmp_path: Path) -> None:
    said = list[str]()
    t = tracking(tmp_path / "run", said, "cat")
    assert t._process is not None
    os.kill(t._process.pid, signal.SIGSTOP)
    begin = time.perf_counter()
    for n in range(1, 5000):
        t.send_step(record(n, 1.0), n)
    assert (time.perf_counter() - begin) / 5000 < 0.001
    begin = time.monotonic()
    t.close(seconds=0.3)
    assert time.monotonic() - begin < 2
    assert said[0] == "WARNING: trackers do not keep up: 100 records wait, more are dropped"
    os.kill(t._process.pid, signal.SIGKILL)
    until(lambda: len(said) > 1)
    assert "the process of the trackers is gone" in said[-1]
    t.send_step(record(1, 1.0), 1)
    t.close()


def test_steps_that_come_again_undo_those_before() -> None:
    told = ToldSteps()
    assert [told.add_step(point(n, applied=n != 4)) for n in range(1, 6)] == [None] * 5
    undone = told.add_step(point(3))
    assert isinstance(undone, UndonePoint) and (undone.step, undone.last, undone.tokens) == (3, 5, 30)
    assert [p.step for p in undone.points] == [3, 5]  # 4 was refused: it did nothing
    assert told.add_step(point(4)) is None and told.add_step(point(5)) is None
    again = ToldSteps.from_dump(json.loads(json.dumps(told.model_dump())))
    assert again.last == 5 and again.go_back(5, 1000, 0.0) is None
    later = again.go_back(3, 1000, 0.0)
    assert later is not None and [p.step for p in later.points] == [4, 5] and later.tokens == 40
    broken = (None, [], {"last": "x"}, {"last": 3, "points": [1]})
    assert [ToldSteps.from_dump(one).last for one in broken] == [0] * 4


def test_every_event_becomes_a_note_once(tmp_path: Path) -> None:
    run = RunDirectory(tmp_path)
    log = RunLog(run)
    notes = TrackerNotes(run.journal)
    assert list(notes.read_new()) == []
    for n in (1, 2):
        log.emit_event(IncidentEvent(what="opened", step=n, number=n, reason="bad", summary={"number": n}))
    assert [(note.step, note.incident) for note in notes.read_new()] == [(1, 1), (2, 2)]
    assert list(notes.read_new()) == []
    later = TrackerNotes(run.journal, notes.read)
    log.emit_event(IncidentEvent(what="closed", step=9, number=2, summary={"number": 2, "outcome": "healed"}))
    (note,) = later.read_new()
    assert note.story == "**Incident 2**\n\n- step 2: opened: bad\n- step 9: closed: healed\n"
    assert later.incidents == 2
    log.emit_event(IncidentEvent(what="attributed", number=2, cause="data", summary={"number": 2, "step": 8}))
    assert [(note.step, note.text) for note in later.read_new()] == [(8, "incident 2: cause: data")]
    # A person repaired it: the rest was told already.
    run.journal.write_bytes(b"\n".join(run.journal.read_bytes().splitlines()[1:]) + b"\n")
    assert list(later.read_new()) == []
    log.emit_event(IncidentEvent(what="opened", step=11, number=3, summary={"number": 3}))
    assert [note.incident for note in later.read_new()] == [3]


def test_a_change_of_a_key_that_may_hold_a_secret_is_no_note(tmp_path: Path) -> None:
    run = RunDirectory(tmp_path)
    log, notes = RunLog(run), TrackerNotes(run.journal)
    secret = [
        "logging.tracker_command: a -> curl -H hunter2", "eval.command: None -> hunter2", "eval: None -> hunter2",
        "supervise.metrics_port: 9137 -> 9200", "supervise: None -> hunter2",
    ]  # fmt: skip
    log.emit_event(ConfigChanged(changes=[*secret, "train.steps: 10 -> 20", "eval.interval: 1 -> 2"]))
    log.emit_event(ConfigChanged(changes=secret))
    assert [note.text for note in notes.read_new()] == [
        "recipe changed: train.steps: 10 -> 20; eval.interval: 1 -> 2"
    ]


@pytest.mark.parametrize(
    ("before", "after", "status"),
    [
        (["finished"], [], "finished"),  # opened once more, for scores that came later
        (["finished"], ["training"], "failed"),  # continued, and so far without an end
        (["stopped"], [], "failed"),
        ([], ["training", "stopped"], "stopped"),
        (["stopped"], ["training", "finished"], "finished"),
    ],
)
def test_how_a_run_ended(tmp_path: Path, before: list[str], after: list[str], status: str) -> None:
    run = RunDirectory(tmp_path)
    for name in before:
        note(run, name, steps=1)
    told = TrackerNotes(run.journal)
    list(told.read_new())
    later = TrackerNotes(run.journal, told.read)
    for name in after:
        note(run, name, steps=1)
    list(later.read_new())
    assert later.status == status


@pytest.mark.parametrize("name", ["..", "/etc", "a/../b", "", ".", "x" * 300, "ж" * 100, "\x00\n", " . "])
def test_any_name_is_a_folder_inside(name: str, tmp_path: Path) -> None:
    folder = tmp_path / folder_of(name)
    folder.mkdir()
    assert folder.resolve().parent == tmp_path.resolve() and folder_of(folder.name) == folder.name


class Told:
    """A lane that keeps what it gets."""

    over = failed = False

    def __init__(self) -> None:
        self.points: list[Point] = []

    def put_point(self, point: Point) -> None:
        self.points.append(point)

    def check_timeout(self) -> None: ...

    def close(self, status: str) -> None:
        self.over = True


def relay(root: Path, after: int) -> tuple[Relay, Told]:
    (root / "trackers").mkdir(exist_ok=True)
    told = Told()
    run = RunPoint("n", str(root), after, after * 10, float(after))
    return Relay(run, cast(list[Lane], [told])), told


def undone(told: Told) -> list[tuple[int, int]]:
    return [(p.step, p.tokens) for p in told.points if isinstance(p, UndonePoint)]


def test_steps_that_a_killed_job_told_are_undone_before_they_come_again(tmp_path: Path) -> None:
    """It kept nothing of them: everything was killed at once, within seconds of its start."""
    first, told = relay(tmp_path, 0)
    for number in range(1, 9):
        first.pass_point(point(number))
    assert undone(told) == []
    second, told = relay(tmp_path, 5)
    second.pass_point(point(6))
    assert undone(told) == [(6, 51)] and isinstance(told.points[-1], StepPoint)
    assert second.close(1.0)
    # One that has ended in order has told what it kept, and nothing else.
    third, told = relay(tmp_path, 6)
    third.pass_point(point(7))
    assert undone(told) == []


def jsonl(root: Path) -> JsonlTracker:
    (root / "trackers").mkdir(exist_ok=True)
    return JsonlTracker(Setting(RunPoint("n", str(root), 0, 0, 0.0), "jsonl"))


def lines(root: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (root / "trackers/records.jsonl").read_text().splitlines()]


def test_a_line_that_a_full_disk_has_cut_is_removed_by_the_next_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tracker = jsonl(tmp_path)
    tracker.add_step(point(1))
    tracker.flush()
    whole = lines(tmp_path)

    class Full:
        """A disk with room for half a line."""

        def __init__(self, file: io.FileIO) -> None:
            self.file, self.room = file, 30

        def write(self, content: memoryview) -> int:
            if not self.room:
                raise OSError(errno.ENOSPC, "No space left on device")
            written, self.room = self.file.write(content[: self.room]), 0
            return written

    monkeypatch.setattr(tracker, "_file", Full(tracker._file))
    tracker.add_step(point(2))
    with pytest.raises(OSError, match="No space"):
        tracker.flush()
    assert not (tmp_path / "trackers/records.jsonl").read_text().endswith("\n")
    again = jsonl(tmp_path)
    again.add_step(point(2))
    again.close("finished")
    assert [row["record"] for row in lines(tmp_path)] == ["run", "step", "run", "step"]
    assert lines(tmp_path)[:2] == whole
