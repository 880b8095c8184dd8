"""What the page says of a run: its journal, plots, layers, skipped data, headline."""

from __future__ import annotations

import base64
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from megastable.config.tree import RunConfig
from megastable.data.skips import Skips
from megastable.model.sizes import count_parameters
from megastable.report.run_page import layer_map, page_file, run_reader
from megastable.report.run_page.data_map import BINS, binned
from megastable.report.run_page.page_file import write_page
from megastable.report.run_page.page_headline import recipe_facts, shorten_number
from megastable.report.run_page.run_reader import RunReader
from megastable.run.directory import RunDirectory
from tests.report.run_page.made_runs import curve, machines, made_run, summary
from tests.report.run_page.run_files import BATCH, BEGIN, LENGTH, note, progress


def config_of(run: RunDirectory) -> RunConfig:
    return RunConfig.model_validate(yaml.safe_load(run.recipe.read_text())["config"])


HOSTILE = "<script>alert(1)</script>\x1b[31m\u202e</script><img src=x onerror=alert(1)>"


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> RunDirectory:
    return made_run(tmp_path_factory.mktemp("made") / "run")


@pytest.fixture(scope="module")
def reader(run: RunDirectory) -> RunReader:
    reader = RunReader(run.root)
    reader.look_again(now=True)
    return reader


def floats(text: str, kind: str = "f4") -> list[float]:
    return np.frombuffer(base64.b64decode(text), f"<{kind}").tolist()


def figures(head: dict[str, Any]) -> dict[str, tuple[str, str]]:
    return {figure["name"]: (figure["value"], figure["remark"]) for figure in head["figures"]}


def test_head_has_figures(reader: RunReader) -> None:
    told = figures(reader.read_head())
    assert told["done"] == ("75.0 %", "step 150 of 200")
    all_of, skipped = shorten_number((200 * BATCH + 10) * LENGTH), shorten_number(10 * LENGTH)
    assert told["tokens"] == (shorten_number(150 * BATCH * LENGTH), f"of {all_of}, {skipped} of them skipped")
    assert told["incidents"] == ("2", "all over: 2 rewinds")
    assert told["samples skipped"][0] == "10" and told["steps lost"][0] == "4"
    assert told["loss"] == (
        f"{curve(140):.3f}"[:3] + told["loss"][0][3:],
        "median of 20 steps; validation 3.827 at step 150",
    )
    assert told["MFU"][0] == "41.0 %" and told["goodput"][0].endswith(" %")
    assert "Both incidents were resolved without a person." in reader.read_head()["sentence"]


def test_panel_tells_what_is_trained(tmp_path: Path) -> None:
    run = made_run(
        tmp_path / "run", parallel={"tensor": 2}, supervise={"gpu_hour_price": 2.5}, optimizer={"lr": 3e-4}
    )
    note(run, BEGIN + 900, "training", step=150, cursor=1, world=8, peak_tflops=989.0, peak_source="nominal, H100",
         software={"device": "NVIDIA H100", "torch": "2.11"})  # fmt: skip
    reader = RunReader(run.root)
    reader.look_again(now=True)
    told = dict(reader.read_panel()["recipe"])
    assert told["model"].startswith(
        f"{shorten_number(count_parameters(config_of(run).model))} parameters: 2 layers of 32, 2 heads, "
    )
    assert told["batch"] == "8 samples of 32 tokens, micro-batches of 2"
    assert told["data"] == "web 0.5, code 0.5" and told["layout"] == "8 ranks: tensor 2 × data 4, ZeRO 1"
    assert told["device"] == "NVIDIA H100, peak 989 TFLOP/s (nominal, H100), torch 2.11"
    assert (
        told["optimizer"].startswith("adamw, rate 0.0003, clipped at 1")
        and told["price"] == "2.5 USD a GPU-hour"
    )
    assert reader.read_panel()["peaks"] == [{"step": 150, "tflops": 989.0, "source": "nominal, H100"}]


@given(recipe=st.recursive(st.none() | st.booleans() | st.integers() | st.text(max_size=5), lambda inner: (
    st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from([
        "model", "train", "parallel", "optimizer", "schedule", "precision", "supervise", "layers", "lr", "tensor",
        "global_batch", "sequence_length", "zero", "kind", "gpu_hour_price", "currency", "warmup_steps",
    ]), inner, max_size=6)
), max_leaves=12).filter(lambda made: isinstance(made, dict)))  # fmt: skip
def test_recipe_facts_take_any_recipe(recipe: Any) -> None:
    for name, text in recipe_facts(recipe, 3, [("a", 0.0)], {}, None):
        assert name and text


def test_plots_tell_accepted_refused_and_undone_apart(reader: RunReader) -> None:
    plots = reader.read_plots("step", None, None, 1000)
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


def test_panel_has_incidents_and_checkpoints(reader: RunReader) -> None:
    panel = reader.read_panel()
    first, second = panel["incidents"]
    assert first["number"] == 1 and first["x"]["step"] == 60 and first["mood"] == "good"
    assert first["title"].startswith("At step 60") and first["cause_word"] == "data" and first["bad"]
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


def test_panel_has_skipped_data(reader: RunReader) -> None:
    data = reader.read_panel()["data"]
    corpora = {corpus["name"]: corpus for corpus in data["corpora"]}
    assert corpora["web"]["samples"] == 10 and corpora["code"]["samples"] == 0
    assert [[n, share] for n, share in corpora["web"]["bins"]] == pytest.approx(
        np.array([[int(60 * 4096 * BINS / 1e6), 0.096], [int(110 * 4096 * BINS / 1e6), 0.096]])
    )
    assert [mark["incident"] for mark in data["marks"]] == [1, 2]


@given(st.lists(st.tuples(st.integers(0, 900), st.integers(1, 80)), max_size=12))
def test_binned_holds_the_share_that_is_skipped(given_: list[tuple[int, int]]) -> None:
    total = 1200
    ranges = [(first, first + length) for first, length in given_]
    gone = {n for first, end in ranges for n in range(first, end)}
    found = dict(map(tuple, binned(Skips.from_ranges(ranges), total)))
    for n in range(BINS):
        inside = [k for k in range(total * n // BINS, total * (n + 1) // BINS) if k in gone]
        assert found.get(n, 0.0) == pytest.approx(len(inside) / (total / BINS), abs=1e-5)


def test_heat_has_layers(reader: RunReader) -> None:
    heat = reader.read_heat("step", None, None)
    assert heat["layers"] == ["embedding", "block 0", "block 1"] and heat["looks"] == 15
    kinds = {kind["kind"]: np.array(floats(kind["values"])).reshape(3, 15) for kind in heat["kinds"]}
    assert set(kinds) == {"activation", "gradient", "logit", "entropy", "update"}
    assert (
        kinds["gradient"][2, 0] == pytest.approx(0.02 + 10 / 1e4) and np.isnan(kinds["activation"][0]).all()
    )
    assert reader.read_heat("step", 45, 75)["looks"] == 5
    assert reader.read_heat("tokens", 45 * BATCH * LENGTH, 75 * BATCH * LENGTH)["looks"] == 5


def test_heat_has_the_load_of_every_expert(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def loads(step: int) -> list[list[float]]:
        return [] if step < 30 else [[0.0, 2.5 + step / 1000, 0.004, 700.0]] + [[1.0] * 3] * (step > 50)

    reader = RunReader(made_run(tmp_path / "run", loads=loads).root)
    heat = reader.read_heat("step", None, None)
    experts = heat["experts"]
    assert (experts["blocks"], experts["count"], heat["looks"]) == ([0, 1], 4, 15)
    steps = floats(experts["x"]["step"], "f8")
    assert steps == list(range(30, 151, 10))  # without the looks that have no experts
    found = np.array(floats(experts["loads"], "u2")).reshape(13, 2, 4)
    # Hundredths of the mean: 0 only without a token, and neither of them is the sign of what was not recorded.
    assert found[:, 0].tolist() == [[0, 250 + step // 10, 1, 65534] for step in range(30, 151, 10)]
    assert found[2:4, 1].tolist() == [[65535] * 4, [100, 100, 100, 65535]]
    monkeypatch.setattr(layer_map, "MOST_LOADS", 40)  # room for five moments: the last one is among them
    few = reader.read_heat("step", None, 125)["experts"]
    assert floats(few["x"]["step"], "f8") == [30, 50, 80, 100, 130]
    assert floats(few["loads"], "u2")[-8:] == found[10].flatten().tolist()


def test_page_of_dense_runs_has_nothing_about_experts(run: RunDirectory, tmp_path: Path) -> None:
    mixed = made_run(tmp_path / "run", last=20, incidents=(), loads=lambda step: [[1.0, 1.0]])
    for runs, has_experts in (([run.root], False), ([run.root, mixed.root], True)):
        write_page(runs, tmp_path / "page.html")
        text = (tmp_path / "page.html").read_text()
        assert ("makeExperts" in text, '"experts":' in text) == (has_experts, has_experts)
    assert "makeExperts" in page_file.join_scripts()  # a server does not know what will be asked


def test_journal_is_searched(reader: RunReader) -> None:
    found = run_reader.build_journal(reader, "healthy STEP-50")
    assert found["count"] == 1 and found["lines"][0]["text"] == "checkpoint step-50 has proved healthy"
    assert run_reader.build_journal(reader, group="checkpoint")["count"] == 5
    assert run_reader.build_journal(reader, "step 61")["lines"][0]["step"] == 61
    newest = run_reader.build_journal(reader, most=3)
    assert len(newest["lines"]) == 3 and newest["count"] == newest["all"] > 20


def test_page_takes_what_a_run_says_for_text(tmp_path: Path) -> None:
    root = tmp_path / HOSTILE.replace("/", "|")
    run = made_run(root, last=70, incidents=(60,))
    told = summary(
        2, 65, reasons=[HOSTILE], cause=HOSTILE, verdict=HOSTILE, actions=[HOSTILE], outcome=HOSTILE
    )
    note(run, BEGIN + 900, "incident", what="opened", number=2, step=66, reason=HOSTILE, summary=told)
    note(run, BEGIN + 901, HOSTILE, step=66)
    note(run, BEGIN + 902, "incident", what="opened", number=3, step=1, summary={"number": 3, "onset": "x"})
    odd = {"bytes": float("nan"), "seconds": "nan", "blocked": "inf"}
    note(run, BEGIN + 903, "checkpoint", step=66, name="../../../etc", **odd)
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


def answers(reader: RunReader) -> list[dict[str, Any]]:
    """All that a page may ask for, as JSON gives it back."""
    asked = [reader.read_head(), reader.read_panel(), run_reader.build_journal(reader)]
    for axis in ("step", "tokens", "time"):
        asked += [
            reader.read_plots(axis, None, None, 50),
            reader.read_heat(axis, 1, 500),
            reader.machine_maps(axis, 1, 50),
        ]
    found: list[dict[str, Any]] = json.loads(page_file.as_json(asked))
    return found


ODD = {
    "nan": float("nan"), "inf": float("inf"), "minus-inf": -float("inf"), "large": 1e300, "integer": 10**19,
    "enormous": 10**400, "text": "x", "list": [], "negative": -1,
}  # fmt: skip


@pytest.mark.parametrize("odd", ODD.values(), ids=ODD)
def test_reader_answers_whatever_the_numbers(tmp_path: Path, odd: Any) -> None:
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
    reader.look_again(now=True)
    head, panel, journal, *_ = answers(reader)
    assert not reader.failures and journal["lines"][0]["text"] and head["figures"]
    assert len(panel["incidents"]) >= 15
    write_page([run.root], tmp_path / "run.html")


def test_reader_tells_of_a_part_that_fails_and_reads_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = made_run(tmp_path / "run", last=30, incidents=())
    reader = RunReader(run.root)

    def fails() -> bool:
        raise RuntimeError("unforeseen")

    monkeypatch.setattr(reader.journal, "look_again", fails)
    before = reader.version
    machines(run)
    reader.look_again(now=True)
    assert reader.version > before and reader.machine_maps("time", None, None)["maps"]
    assert "HistoryReader cannot read the run (RuntimeError: unforeseen)" in reader.read_head()["problems"][0]
    monkeypatch.undo()
    reader.look_again()
    assert not reader.read_head()["problems"]
