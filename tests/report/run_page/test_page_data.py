"""What the page says of a run: its journal, plots, layers, skipped data, headline."""

from __future__ import annotations

import base64
import json
import shutil
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from megastable.base.errors import DataError
from megastable.config.tree import RunConfig
from megastable.data.skips import Skips
from megastable.model.flops import parameters
from megastable.report.run_page import page_parts, run_panel
from megastable.report.run_page.data_map import BINS, binned
from megastable.report.run_page.page_file import write_page
from megastable.report.run_page.page_headline import short
from megastable.report.run_page.recipe_facts import recipe_facts
from megastable.report.run_page.run_reader import RunReader, told_apart
from megastable.run.directory import RunDirectory
from megastable.run.goodput.watching import read_account
from megastable.run.records import Recorder
from megastable.run.run_history import HistoryReader, Measurement, select_standing
from tests.report.run_page.made_runs import curve, machines, made_run, summary
from tests.report.run_page.run_files import BATCH, BEGIN, LENGTH, begin, note, progress, record


def config_of(run: RunDirectory) -> RunConfig:
    return RunConfig.model_validate(yaml.safe_load(run.recipe.read_text())["config"])


HOSTILE = "<script>alert(1)</script>\x1b[31m\u202e</script><img src=x onerror=alert(1)>"


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> RunDirectory:
    return made_run(tmp_path_factory.mktemp("made") / "run")


@pytest.fixture(scope="module")
def reader(run: RunDirectory) -> RunReader:
    reader = RunReader(run.root)
    reader.look(now=True)
    return reader


def floats(text: str, kind: str = "f4") -> list[float]:
    return np.frombuffer(base64.b64decode(text), f"<{kind}").tolist()


def figures(head: dict[str, Any]) -> dict[str, tuple[str, str]]:
    return {figure["name"]: (figure["value"], figure["remark"]) for figure in head["figures"]}


def test_the_headline(reader: RunReader) -> None:
    told = figures(reader.head())
    assert told["done"] == ("75.0 %", "step 150 of 200")
    all_of, skipped = short((200 * BATCH + 10) * LENGTH), short(10 * LENGTH)
    assert told["tokens"] == (short(150 * BATCH * LENGTH), f"of {all_of}, {skipped} of them skipped")
    assert told["incidents"] == ("2", "all over: 2 rewinds")
    assert told["samples skipped"][0] == "10" and told["steps lost"][0] == "4"
    assert told["loss"] == (
        f"{curve(140):.3f}"[:3] + told["loss"][0][3:],
        "median of 20 steps; validation 3.827 at step 150",
    )
    assert told["MFU"][0] == "41.0 %" and told["goodput"][0].endswith(" %")
    assert "Both incidents were resolved without a person." in reader.head()["sentence"]


def test_what_it_cost_and_which_checkpoint_to_take(tmp_path: Path) -> None:
    run = made_run(tmp_path / "run", supervise={"gpu_hour_price": 3.0})
    reader = RunReader(run.root)

    def told(name: str) -> tuple[str, str]:
        reader.look(now=True)
        return figures(reader.head())[name]

    # Two ranks, from the first event to the last.
    hours = 2 * read_account(run.root)[0].wall / 3600
    assert told("cost") == (f"{3 * hours:.2f} USD", f"{short(hours)} GPU-hours, idle time too")
    assert told("checkpoint") == ("step 100", "the newest proved healthy; newest of all: step 150")
    note(run, BEGIN + 900, "checkpoint_rejected", name="step-150", reason="damaged")
    assert told("checkpoint") == ("step 100", "the newest proved healthy")
    (run.checkpoints / "step-100" / "manifest.json").unlink()
    assert told("checkpoint")[0] == "step 50"
    (run.checkpoints / "step-50" / "manifest.json").unlink()
    assert told("checkpoint") == ("none", "to resume from")
    note(run, BEGIN + 901, "checkpoint", step=150, name="step-150", bytes=1, seconds=1.0, blocked=0.1)
    assert told("checkpoint") == ("step 150", "the newest; none has proved healthy yet")
    assert reader.panel()["usable"] == {"newest": 150, "proved": None, "after": 50}


def test_what_was_measured_of_undone_weights_is_not_shown(tmp_path: Path) -> None:
    run = begin(tmp_path / "run")
    reader = HistoryReader(run.journal)
    for step in (50, 100):
        corpora = {"web": {"loss": 3.0, "samples": 8}}
        note(run, BEGIN + step, "evaluated", step=step, loss=4.0, samples=16, corpora=corpora)
        note(run, BEGIN + step, "tasks_evaluated", of_step=step, scores={"arc/acc": 0.5})

    def left(measured: list[Measurement]) -> list[int]:
        return [one.step for one in measured if not one.undone]

    assert reader.look() and left(reader.history.evaluations) == left(reader.history.scores) == [50, 100]
    note(run, BEGIN + 120, "incident", what="rewound", to_step=90, number=1, summary={"number": 1})
    note(run, BEGIN + 130, "evaluated", step=100, loss=3.5, samples=16)
    assert reader.look() and [one.loss for one in select_standing(reader.history.evaluations)] == [4.0, 3.5]
    assert left(reader.history.scores) == [50]
    note(run, BEGIN + 140, "training", step=40, cursor=1, world=2)
    assert reader.look() and left(reader.history.evaluations) == left(reader.history.scores) == []


def test_the_probe_is_a_curve_and_what_was_undone_of_it_is_apart(tmp_path: Path) -> None:
    run = begin(tmp_path / "run")
    for step in (25, 50, 75):
        note(run, BEGIN + step, "probed", step=step, loss=5.0 - step / 100, samples=16)
    note(run, BEGIN + 76, "probed", step=76, loss="nan", samples=16)
    reader = RunReader(run.root)
    reader.look(now=True)
    probe = reader.panel()["probe"]
    assert floats(probe["standing"]["x"]["step"], "f8") == [25, 50, 75]
    assert floats(probe["standing"]["loss"], "f4") == [4.75, 4.5, 4.25] and probe["undone"]["loss"] == ""
    note(run, BEGIN + 80, "incident", what="rewound", to_step=50, number=1, summary={"number": 1})
    note(run, BEGIN + 90, "probed", step=75, loss=4.0, samples=16)
    reader.look(now=True)
    panel = reader.panel()
    probe = panel["probe"]
    assert floats(probe["standing"]["x"]["step"], "f8") == [25, 50, 75]
    assert floats(probe["standing"]["loss"], "f4")[-1] == 4.0
    assert floats(probe["undone"]["x"]["step"], "f8") == [75] and floats(probe["undone"]["loss"], "f4") == [
        4.25
    ]
    # In the list of events they would take the place of what happened.
    assert not run_panel.journal(reader, "probe")["count"]


def test_of_many_looks_at_the_probe_neighbours_are_averaged(reader: RunReader) -> None:
    looks = [Measurement(step, BEGIN + step, float(step)) for step in range(1, 2 * run_panel.LOOKS + 2)]
    curve = run_panel._curve(looks, run_panel.PlacesOfSteps(reader))
    losses = floats(curve["loss"], "f4")
    assert len(losses) == 667 and losses[:2] == [2.0, 5.0] and losses[-1] == 2000.0


def test_what_is_trained(tmp_path: Path) -> None:
    run = made_run(
        tmp_path / "run", parallel={"tensor": 2}, supervise={"gpu_hour_price": 2.5}, optimizer={"lr": 3e-4}
    )
    note(run, BEGIN + 900, "training", step=150, cursor=1, world=8, peak_tflops=989.0, peak_source="nominal, H100",
         software={"device": "NVIDIA H100", "torch": "2.11"})  # fmt: skip
    reader = RunReader(run.root)
    reader.look(now=True)
    told = dict(reader.panel()["recipe"])
    assert told["model"].startswith(
        f"{short(parameters(config_of(run).model))} parameters: 2 layers of 32, 2 heads, "
    )
    assert told["batch"] == "8 samples of 32 tokens, micro-batches of 2"
    assert told["data"] == "web 0.5, code 0.5" and told["layout"] == "8 ranks: tensor 2 × data 4, ZeRO 1"
    assert told["device"] == "NVIDIA H100, peak 989 TFLOP/s (nominal, H100), torch 2.11"
    assert (
        told["optimizer"].startswith("adamw, rate 0.0003, clipped at 1")
        and told["price"] == "2.5 USD a GPU-hour"
    )
    assert reader.panel()["peaks"] == [{"step": 150, "tflops": 989.0, "source": "nominal, H100"}]


@given(recipe=st.recursive(st.none() | st.booleans() | st.integers() | st.text(max_size=5), lambda inner: (
    st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from([
        "model", "train", "parallel", "optimizer", "schedule", "precision", "supervise", "layers", "lr", "tensor",
        "global_batch", "sequence_length", "zero", "kind", "gpu_hour_price", "currency", "warmup_steps",
    ]), inner, max_size=6)
), max_leaves=12).filter(lambda made: isinstance(made, dict)))  # fmt: skip
def test_a_recipe_of_any_kind(recipe: Any) -> None:
    for name, text in recipe_facts(recipe, 3, [("a", 0.0)], {}, None):
        assert name and text


def test_skipped_data_is_told_in_numbers(reader: RunReader) -> None:
    data = reader.panel()["data"]
    assert data["count"] == len(data["lines"]) == 2
    assert [line["incident"] for line in data["lines"]] == [2, 1]  # the newest first
    assert all(line["what"].startswith("web, tokens ") and line["samples"] == 5 for line in data["lines"])


def test_plots_tell_accepted_refused_and_undone_apart(reader: RunReader) -> None:
    plots = reader.plots("step", None, None, 1000)
    accepted = plots["accepted"]
    assert floats(accepted["x"]["step"], "f8") == list(range(1, 151))
    assert floats(accepted["x"]["tokens"], "f8") == [step * BATCH * LENGTH for step in range(1, 151)]
    assert floats(accepted["x"]["time"], "f8")[0] == 22.0
    assert floats(accepted["series"]["loss"]) == pytest.approx([curve(step) for step in range(1, 151)])
    assert plots["refused"]["count"] == 4 and floats(plots["refused"]["x"]["step"], "f8") == [
        60,
        61,
        110,
        111,
    ]
    assert floats(plots["refused"]["series"]["loss"]) == [9, 10, 9, 10]
    assert floats(plots["undone"]["x"]["step"], "f8") == [58, 59, 108, 109]
    assert floats(plots["sometimes"]["x"]["step"], "f8") == list(range(10, 151, 10))


def test_columns_of_a_window_have_a_neighbour_on_each_side(reader: RunReader) -> None:
    plots = reader.plots("step", 40, 60, 1000)["accepted"]
    assert floats(plots["x"]["step"], "f8") == list(range(39, 62))
    low = floats(plots["trend"]["low"])
    assert np.isnan(low[:25]).all() and np.isfinite(low[25:]).all()  # 64 steps before, were there any
    coarse = reader.plots("time", None, None, 10)["accepted"]["series"]["loss"]
    assert len(floats(coarse["mean"])) == 10 and floats(coarse["high"])[0] == pytest.approx(curve(1))


def test_incidents_and_checkpoints(reader: RunReader) -> None:
    panel = reader.panel()
    first, second = panel["incidents"]
    assert first["number"] == 1 and first["x"]["step"] == 60 and first["mood"] == "good"
    assert first["title"].startswith("At step 60") and first["cause_word"] == "data" and first["guilty"]
    assert second["until"]["time"] > second["x"]["time"] and len(second["timeline"]) == 4
    states = {one["name"]: (one["state"], one["there"]) for one in panel["checkpoints"]}
    assert states == {
        "step-50": ("healthy", True),
        "step-100": ("healthy", True),
        "step-150": ("saved", True),
    }
    assert floats(panel["evaluations"]["x"]["step"], "f8") == [50, 100, 150]
    assert floats(panel["by_corpus"]["x"]["step"], "f8") == [50, 100, 150]
    curves = {one["name"]: floats(one["y"], "f4") for one in panel["by_corpus"]["values"]}
    assert curves["code"] == [1.5] * 3 and len(curves["web"]) == 3
    (task,) = panel["tasks"]["values"]
    assert floats(panel["tasks"]["x"]["step"], "f8") == [50] and task["name"] == "arc/acc"
    assert floats(task["y"], "f4") == [0.25]
    seconds = panel["time"]["seconds"]
    assert sum(seconds.values()) == pytest.approx(panel["time"]["wall"], abs=0.1)
    assert {lost["incident"] for lost in panel["time"]["lost"] if lost["kind"] == "recovery"} == {1, 2}
    for number, seconds in panel["time"]["charged"].items():
        of = [lost["seconds"] for lost in panel["time"]["lost"] if lost["incident"] == int(number)]
        assert seconds == pytest.approx(sum(of), abs=1e-3) and seconds > 0


def test_skipped_data(reader: RunReader) -> None:
    data = reader.panel()["data"]
    corpora = {corpus["name"]: corpus for corpus in data["corpora"]}
    assert corpora["web"]["samples"] == 10 and corpora["code"]["samples"] == 0
    assert [[n, share] for n, share in corpora["web"]["bins"]] == pytest.approx(
        np.array([[int(60 * 4096 * BINS / 1e6), 0.096], [int(110 * 4096 * BINS / 1e6), 0.096]])
    )
    assert [mark["incident"] for mark in data["marks"]] == [1, 2]


@given(st.lists(st.tuples(st.integers(0, 900), st.integers(1, 80)), max_size=12))
def test_bins_hold_the_share_that_is_skipped(given_: list[tuple[int, int]]) -> None:
    total = 1200
    ranges = [(first, first + length) for first, length in given_]
    gone = {n for first, end in ranges for n in range(first, end)}
    found = dict(map(tuple, binned(Skips.of(ranges), total)))
    for n in range(BINS):
        inside = [k for k in range(total * n // BINS, total * (n + 1) // BINS) if k in gone]
        assert found.get(n, 0.0) == pytest.approx(len(inside) / (total / BINS), abs=1e-5)


def test_layers(reader: RunReader) -> None:
    heat = reader.heat("step", None, None)
    assert heat["layers"] == ["embedding", "block 0", "block 1"] and heat["looks"] == 15
    kinds = {kind["kind"]: np.array(floats(kind["values"])).reshape(3, 15) for kind in heat["kinds"]}
    assert set(kinds) == {"activation", "gradient", "logit", "entropy", "update"}
    assert (
        kinds["gradient"][2, 0] == pytest.approx(0.02 + 10 / 1e4) and np.isnan(kinds["activation"][0]).all()
    )
    assert reader.heat("step", 45, 75)["looks"] == 5
    assert reader.heat("tokens", 45 * BATCH * LENGTH, 75 * BATCH * LENGTH)["looks"] == 5


def test_the_journal_is_searched(reader: RunReader) -> None:
    found = run_panel.journal(reader, "healthy STEP-50")
    assert found["count"] == 1 and found["lines"][0]["text"] == "checkpoint step-50 has proved healthy"
    assert run_panel.journal(reader, group="checkpoint")["count"] == 5
    assert run_panel.journal(reader, "step 61")["lines"][0]["step"] == 61
    newest = run_panel.journal(reader, most=3)
    assert len(newest["lines"]) == 3 and newest["count"] == newest["all"] > 20


def test_a_torn_last_line_waits_and_a_repaired_journal_is_read_anew(tmp_path: Path) -> None:
    run = begin(tmp_path / "run")
    reader = HistoryReader(run.journal, most_lines=5)
    assert reader.look() and len(reader.history.lines) == 3
    whole = (
        json.dumps({"time": BEGIN + 30, "event": "evaluated", "step": 5, "loss": 3.5, "samples": 1}) + "\n"
    )
    with run.journal.open("a") as journal:
        journal.write(whole[:30])
    assert not reader.look() and not reader.history.evaluations
    with run.journal.open("a") as journal:
        journal.write(whole[30:])
    assert reader.look() and reader.history.evaluations == [Measurement(5, BEGIN + 30, 3.5)]
    run.journal.write_text(whole)
    assert reader.look() and [line.name for line in reader.history.lines] == ["evaluated"]
    assert run_panel.select_lines(reader.history.lines, "3.500")[1] == 1


def test_what_a_run_says_is_text(tmp_path: Path) -> None:
    root = tmp_path / HOSTILE.replace("/", "|")
    run = made_run(root, last=70, incidents=(60,))
    told = summary(
        2, 65, reasons=[HOSTILE], cause=HOSTILE, verdict=HOSTILE, actions=[HOSTILE], outcome=HOSTILE
    )
    note(run, BEGIN + 900, "incident", what="opened", number=2, step=66, reason=HOSTILE, summary=told)
    note(run, BEGIN + 901, HOSTILE, step=66)
    note(run, BEGIN + 902, "incident", what="opened", number=3, step=1, summary={"number": 3, "onset": "x"})
    note(
        run,
        BEGIN + 903,
        "checkpoint",
        step=66,
        name="../../../etc",
        bytes=float("nan"),
        seconds="nan",
        blocked="inf",
    )
    note(run, BEGIN + 904, "launched", attempt=None, hosts=[HOSTILE], wanted=HOSTILE)
    write_page([root], tmp_path / "run.html")
    page = (tmp_path / "run.html").read_text()
    assert "<script>alert" not in page and "<img" not in page and "\x1b" not in page and "\u202e" not in page
    data = page.partition('id="data">')[2].partition("</script>")[0]
    found = json.loads(data)["runs"][0]
    assert found["panel"]["incidents"][1]["reasons"] == [
        HOSTILE.replace("\x1b", "\\x1b").replace("\u202e", "\\u202e")
    ]
    assert found["panel"]["checkpoints"][-1]["there"] is False


def test_a_run_without_a_step(tmp_path: Path) -> None:
    run = begin(tmp_path / "run")
    reader = RunReader(run.root)
    reader.look(now=True)
    page_parts.as_json([reader.head(), reader.panel(), reader.heat("time", None, None)])
    assert page_parts.as_json(reader.plots("tokens", None, None, 100))
    assert figures(reader.head())["done"][0] == "0.0 %"


def test_no_run(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="is not the directory of a run"):
        RunReader(tmp_path)
    with pytest.raises(DataError, match="no such directory"):
        RunReader(tmp_path / "none")


@pytest.mark.parametrize(
    ("value", "told"),
    [(0, "0"), (812, "812"), (45_300, "45.3 k"), (999_600, "1.00 M"), (1.5e9, "1.50 B"), (3e13, "30.0 T")],
)
def test_short(value: float, told: str) -> None:
    assert short(value) == told


def answers(reader: RunReader) -> list[dict[str, Any]]:
    """All that a page may ask for, as JSON gives it back."""
    asked = [reader.head(), reader.panel(), run_panel.journal(reader)]
    for axis in ("step", "tokens", "time"):
        asked += [
            reader.plots(axis, None, None, 50),
            reader.heat(axis, 1, 500),
            reader.machine_maps(axis, 1, 50),
        ]
    found: list[dict[str, Any]] = json.loads(page_parts.as_json(asked))
    return found


ODD = {
    "nan": float("nan"), "inf": float("inf"), "minus-inf": -float("inf"), "large": 1e300, "integer": 10**19,
    "enormous": 10**400, "text": "x", "list": [], "negative": -1,
}  # fmt: skip


@pytest.mark.parametrize("odd", ODD.values(), ids=ODD)
def test_no_number_leaves_a_page_without_an_answer(tmp_path: Path, odd: Any) -> None:
    run = made_run(tmp_path / "run", last=30, incidents=())
    for number, key in enumerate(summary(1, 5), start=1):
        told = {**summary(number, 5), key: odd}
        note(run, BEGIN + 100, "incident", what="opened", number=number, step=5, summary=told)
    for name, fields in {
        "evaluated": ("step", "loss", "samples"), "launched": ("attempt", "wanted"), "ended": ("attempt", "code"),
        "checkpoint": ("step", "bytes", "seconds", "blocked"), "host_left_out": ("host", "until"),
        "tasks_evaluated": ("of_step",), "rate_cut": ("step", "factor"), "training": ("step", "cursor", "world"),
    }.items():  # fmt: skip
        note(run, BEGIN + 100, name, **dict.fromkeys(fields, odd))
    note(run, odd, "evaluated", step=5, loss=3.5, samples=1)
    numbers = dict.fromkeys(("loss", "grad_norm", "lr", "seconds", "stepped"), odd)
    progress(run, 31, BEGIN + 200, 3.0)
    run.progress.write_text(json.dumps(json.loads(run.progress.read_text()) | numbers))
    reader = RunReader(run.root)
    reader.look(now=True)
    head, panel, journal, *_ = answers(reader)
    assert not reader.failures and journal["lines"][0]["text"] and head["figures"]
    assert len(panel["incidents"]) >= 15
    write_page([run.root], tmp_path / "run.html")


def test_steps_that_take_for_ever_are_no_time_left(tmp_path: Path) -> None:
    run = begin(tmp_path / "run")
    recorder = Recorder(run.steps, 10)
    for step in range(1, 21):
        recorder.add(record(step, BEGIN + step, 3.0, seconds=1e30))
    progress(run, 20, time.time(), 3.0, seconds=1e30)
    reader = RunReader(run.root)
    reader._watch.clock = time.time
    assert answers(reader)


def test_a_part_that_fails_is_told_and_holds_up_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = made_run(tmp_path / "run", last=30, incidents=())
    reader = RunReader(run.root)

    def fails() -> bool:
        raise RuntimeError("unforeseen")

    monkeypatch.setattr(reader.journal, "look", fails)
    before = reader.version
    machines(run)
    reader.look(now=True)
    assert reader.version > before and reader.machine_maps("time", None, None)["maps"]
    assert "HistoryReader cannot read the run (RuntimeError: unforeseen)" in reader.head()["problems"][0]
    monkeypatch.undo()
    reader.look()
    assert not reader.head()["problems"]


def test_a_mark_is_where_it_happened_also_if_the_step_was_done_again(reader: RunReader) -> None:
    plots, panel = reader.plots("time", None, None, 1000), reader.panel()
    refused = floats(plots["refused"]["x"]["time"], "f8")
    for incident, first in zip(panel["incidents"], (refused[0], refused[2]), strict=True):
        assert first <= incident["x"]["time"] <= first + 6.0
        assert incident["x"]["time"] < incident["until"]["time"]


def resumed_by_hand(root: Path) -> RunDirectory:
    """Killed after step 55, resumed from step 40, without a supervisor."""
    run, now = begin(root), BEGIN + 22
    recorder = Recorder(run.steps, 5)
    for first, last in ((1, 55), (41, 99)):
        note(run, now, "training", step=first - 1, cursor=BATCH * (first - 1), world=2, seconds=5.0)
        for step in range(first, last + 1):
            recorder.add(record(step, now + 2 * step, curve(step), attempt=None))
        now += 200
    recorder.flush()
    return run


def test_steps_that_a_restart_by_hand_undid_are_lost(tmp_path: Path) -> None:
    reader = RunReader(resumed_by_hand(tmp_path / "run").root)
    assert figures(reader.head())["steps lost"][0] == "15"
    assert reader.plots("step", None, None, 1000)["undone"]["count"] == 15


def test_an_attempt_whose_end_nobody_recorded_runs_no_longer(tmp_path: Path) -> None:
    run = made_run(tmp_path / "run", last=30, incidents=())
    note(run, BEGIN + 300, "launched", attempt=2, hosts=["host-1"], wanted=1)
    note(run, BEGIN + 310, "launched", attempt=3, hosts=["host-1"], wanted=1)
    reader = RunReader(run.root)
    told = [attempt["how"] for attempt in reader.panel()["machines"]["attempts"]]
    assert told == ["its end is not recorded: the supervisor was killed, too"] * 2 + ["runs"]


def test_the_axis_of_time_ends_with_the_latest_step(tmp_path: Path) -> None:
    run = begin(tmp_path / "run")
    recorder = Recorder(run.steps, 10)
    for step in range(1, 61):
        recorder.add(record(step, BEGIN + 100 + step - (50 if step > 40 else 0), curve(step)))
    plots = RunReader(run.root).plots("time", None, None, 1000)
    assert plots["ends"]["time"] == 140.0 and plots["ends"]["step"] == 60.0
    x = floats(plots["sometimes"]["x"]["time"], "f8")
    assert x == sorted(x) and len(x) == 6 and len(floats(plots["accepted"]["x"]["time"], "f8")) == 60


def test_checkpoints_come_and_go(tmp_path: Path) -> None:
    run = made_run(tmp_path / "run", last=120, incidents=())
    reader = RunReader(run.root)

    def there() -> list[bool]:
        reader.look(now=True)
        return [one["there"] for one in reader.panel()["checkpoints"]]

    assert there() == [True, True]
    shutil.rmtree(run.checkpoints / "step-50")
    (run.checkpoints / "step-100" / "manifest.json").rename(tmp_path / "manifest.json")
    assert there() == [False, False]
    (tmp_path / "manifest.json").rename(run.checkpoints / "step-100" / "manifest.json")
    assert there() == [False, True]


def test_runs_of_the_same_name_are_told_apart(tmp_path: Path) -> None:
    roots = [made_run(tmp_path / name, last=20, incidents=()).root for name in ("a/out", "b/out", "other")]
    readers = told_apart([RunReader(root) for root in roots])
    assert [reader.head()["name"] for reader in readers] == ["a/out", "b/out", "other"]
