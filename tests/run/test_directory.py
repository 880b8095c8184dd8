"""The run directory: fresh names, the frozen recipe, the journal."""

from __future__ import annotations

import logging
import shutil
from pathlib import Path
from typing import Any

import pytest
import yaml

from megastable.base.errors import ConfigError, DataError, SpaceError
from megastable.config.recipe import load_recipe
from megastable.config.tree import RunConfig
from megastable.run.directory import RunDirectory, make_directory
from megastable.run.events.stability_events import Discarded, Handover
from megastable.run.events.training_events import Finished, Training, Unstable
from megastable.run.log import RunLog
from tests.full_disk import files_no_larger_than
from tests.journal import note


def config(**parts: Any) -> RunConfig:
    return RunConfig.model_validate(parts)


@pytest.fixture
def run(tmp_path: Path) -> RunDirectory:
    return make_directory(config(run={"dir": tmp_path / "run"}), Path("x.yaml"))


def names(run: RunDirectory) -> list[str]:
    return [event["event"] for event in run.iterate_events()]


def test_make_numbers_fresh_directories(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    roots = [make_directory(config(), Path("launch/recipes/125m.yaml")).root for _ in range(3)]
    assert roots == [Path(f"runs/125m-00{n}") for n in (1, 2, 3)]
    (tmp_path / "runs/125m-005").mkdir()
    assert [make_directory(config(), Path("125m.yaml")).root.name for _ in range(2)] == [
        "125m-004",
        "125m-006",
    ]
    # Without it, there is a 7b-002.
    assert make_directory(config(), Path("7b.yaml")).resuming == "the same command with run.dir=runs/7b-001"


def test_make_uses_a_given_directory_again_and_refuses_a_file(tmp_path: Path) -> None:
    given = config(run={"dir": tmp_path / "a/b"})
    run = make_directory(given, Path("x.yaml"))
    assert run.root == tmp_path / "a/b" and run.steps.is_dir() and run.checkpoints.is_dir()
    note(run, "started")
    assert names(make_directory(given, Path("x.yaml"))) == ["started"]
    (tmp_path / "file").touch()
    for path in (tmp_path / "file", tmp_path / "file/below"):
        with pytest.raises(ConfigError, match=r"run\.dir=.*file.*cannot be made"):
            make_directory(config(run={"dir": path}), Path("x.yaml"))


def test_freeze_writes_a_recipe_that_can_be_started_again(run: RunDirectory) -> None:
    data = {"corpora": [{"path": "a"}, {"path": "ü: #" + " 'long'" * 40}], "skip": [[1, 2]]}
    given = config(optimizer={"lr": "1e-5"}, data=data, run={"dir": run.root})
    assert run.compare_recipe(given) == []
    run.freeze_recipe(given, ["f1", "f2"], {"train_batch_size": 64})
    content = yaml.safe_load(run.recipe.read_text())
    assert (content["manifests"], content["deepspeed_json"]) == (["f1", "f2"], {"train_batch_size": 64})
    assert load_recipe(run.recipe) == given and run.compare_recipe(given) == []
    assert load_recipe(run.recipe, ["train.steps=5"]).train.steps == 5
    copy = shutil.copytree(run.root, run.root.with_name("copy"))  # a run of its own
    assert load_recipe(copy / "recipe.yaml").run.dir == copy
    assert load_recipe(copy / "recipe.yaml", ["run.dir=elsewhere"]).run.dir == Path("elsewhere")
    before = run.recipe.read_bytes()
    with files_no_larger_than(100), pytest.raises(ConfigError, match=r"recipe\.yaml could not be written"):
        run.freeze_recipe(config(optimizer={"lr": 1e-4}), [], {})
    assert run.recipe.read_bytes() == before
    assert sorted(p.name for p in run.root.iterdir() if p.is_file()) == ["recipe.yaml"]


@pytest.mark.parametrize(
    ("before", "after", "wanted"),
    [
        ({}, {"optimizer": {"lr": 1e-4}, "parallel": {"tensor": 2}, "data": {"skip": [[1, 5]]},
              "run": {"dir": "elsewhere", "timeout": 60}},
         ["data.skip: [] -> [[1, 5]]", "optimizer.lr: 0.0003 -> 0.0001", "parallel.tensor: 1 -> 2",
          "run.timeout: 1800 -> 60"]),
        ({}, {"kernels": {"attention": "reference"}}, ["kernels.attention: auto -> reference"]),
        ({}, {"model": {"z_loss": 0.0, "max_positions": 8192}},
         ["model.max_positions: None -> 8192", "model.z_loss: 0.0001 -> 0.0"]),
        ({"precision": {"fp8": "delayed"}}, {"precision": {"fp8": {"recipe": "delayed", "margin": 1}}},
         ["precision.fp8.margin: 0 -> 1"]),
    ],
)  # fmt: skip
def test_compare_reports_what_has_changed(
    before: dict[str, Any], after: dict[str, Any], wanted: list[str], run: RunDirectory
) -> None:
    run.freeze_recipe(config(**before), [], {})
    assert run.compare_recipe(config(**after)) == wanted
    run.freeze_recipe(config(**after), [], {})
    assert run.compare_recipe(config(**after)) == []


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"model": {"layers": 24}}, "model.layers: 12 -> 24"),
        ({"model": {"vocab_size": 1000}}, "model.vocab_size: None -> 1000"),
        ({"model": {"qkv_bias": True}}, "model.qkv_bias: False -> True"),
        ({"run": {"seed": 5}}, "run.seed: 1234 -> 5"),
    ],
)
def test_compare_refuses_another_model_or_seed(change: dict[str, Any], named: str, run: RunDirectory) -> None:
    run.freeze_recipe(config(), [], {})
    content = yaml.safe_load(run.recipe.read_text())
    del content["config"]["model"]["qkv_bias"]  # a key that the recipe does not have had its default value
    run.recipe.write_text(yaml.safe_dump(content))
    assert run.compare_recipe(config()) == []
    with pytest.raises(ConfigError) as error:
        run.compare_recipe(config(**change))
    assert named in str(error.value) and str(run.root) in str(error.value)


@pytest.mark.parametrize(
    "content", [b"", b"config", b"a: [", b"model: {}\n", b"\xff\xfe\x80", b"config: 5\n"]
)
def test_compare_refuses_a_damaged_frozen_recipe(content: bytes, run: RunDirectory) -> None:
    run.recipe.write_bytes(content)
    with pytest.raises(ConfigError, match=r"another run\.dir"):
        run.compare_recipe(config())
    assert run.recipe.read_bytes() == content


def test_lock_keeps_a_second_process_out(run: RunDirectory) -> None:
    run.lock_run()
    with pytest.raises(ConfigError, match="another process trains here"):
        RunDirectory(run.root).lock_run()


def test_events_come_back_in_order_and_by_kind(run: RunDirectory) -> None:
    assert list(run.iterate_events()) == []
    note(run, "training", step=0, path=Path("a"), losses=[1.5, 2.5])
    note(run, "discarded", step=3, reason="non-finite loss")
    note(run, "finished", step=4)
    assert names(run) == ["training", "discarded", "finished"]
    assert [e["step"] for e in run.iterate_events(Discarded, Finished)] == [3, 4]
    (first,) = run.iterate_events(Training)
    assert first["path"] == "a" and first["losses"] == [1.5, 2.5] and first["time"] > 1.6e9


def test_events_leave_out_a_torn_last_line(run: RunDirectory, caplog: pytest.LogCaptureFixture) -> None:
    note(run, "training")
    with run.journal.open("ab") as file:
        file.write(b'{"time": 1, "eve')
    with caplog.at_level(logging.WARNING):
        assert names(run) == ["training"]
    assert "torn" in caplog.text and str(run.journal) in caplog.text
    note(run, "resumed")
    assert names(run) == ["training", "resumed"]


@pytest.mark.parametrize("line", [b"{oops}", b"", b"5", b'{"time": 1}', b"\xff"])
def test_events_name_a_line_that_is_none(line: bytes, run: RunDirectory) -> None:
    note(run, "training")
    with run.journal.open("ab") as file:
        file.write(line + b"\n")
    note(run, "finished")
    with pytest.raises(DataError, match=r"journal\.jsonl: line 2"):
        list(run.iterate_events(Training))


def test_log_keeps_events_where_the_disk_is_full(run: RunDirectory, caplog: pytest.LogCaptureFixture) -> None:
    note(run, "training")
    with files_no_larger_than(60):
        note(run, "discarded", step=3)
        with pytest.raises(
            SpaceError, match=r"journal\.jsonl could not be written.*handover: make room, then start"
        ):
            RunLog(run).commit_event(Handover(before=7))
    assert "waiting in memory" in caplog.text and names(run) == ["training"]
    RunLog(run).commit_event(Unstable(step=5))
    assert names(run) == ["training", "discarded", "handover", "unstable"]


def test_handed_over_counts_until_training_begins_again(run: RunDirectory) -> None:
    assert run.find_handover() is None
    note(run, "training")
    note(run, "handover", before=31)
    note(run, "resumed")
    assert run.find_handover() == 31
    note(run, "training")
    assert run.find_handover() is None
    note(run, "handover", before="soon")
    with pytest.raises(DataError, match=r"journal\.jsonl: line 5 .*mend that line"):
        run.find_handover()
