"""The run directory: fresh names, the frozen recipe, the journal."""

from __future__ import annotations

import json
import logging
import math
import shutil
from pathlib import Path
from typing import Any

import pytest
import yaml

from megastable.base.errors import ConfigError, DataError, SpaceError
from megastable.config.recipe import load
from megastable.config.tree import RunConfig
from megastable.run.directory import RunDirectory, make
from megastable.run.events.stability_events import Discarded, Handover
from megastable.run.events.training_events import Finished, Training, Unstable
from megastable.run.log import RunLog
from tests.full_disk import files_no_larger_than
from tests.journal import note


def config(**parts: Any) -> RunConfig:
    return RunConfig.model_validate(parts)


# Making one


def test_fresh_directories_are_numbered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    roots = [make(config(), Path("launch/recipes/125m.yaml")).root for _ in range(3)]
    assert roots == [Path(f"runs/125m-00{n}") for n in (1, 2, 3)]
    (tmp_path / "runs/125m-005").mkdir()
    assert make(config(), Path("125m.yaml")).root == Path("runs/125m-004")
    assert make(config(), Path("125m.yaml")).root == Path("runs/125m-006")
    run = make(config(), Path("7b.yaml"))
    assert run.root == Path("runs/7b-001")
    assert run.resuming == "the same command with run.dir=runs/7b-001"  # without it, there is a 7b-002


def test_a_given_directory_is_made_with_its_parents_and_used_again(tmp_path: Path) -> None:
    given = config(run={"dir": tmp_path / "a/b"})
    run = make(given, Path("x.yaml"))
    assert run.root == tmp_path / "a/b" and run.steps.is_dir() and run.checkpoints.is_dir()
    note(run, "started")
    assert [e["event"] for e in make(given, Path("x.yaml")).events()] == ["started"]


def test_a_directory_that_cannot_be_made_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for path in (tmp_path / "file", tmp_path / "file/below"):
        with pytest.raises(ConfigError, match=r"run\.dir=.*file.*cannot be made"):
            make(config(run={"dir": path}), Path("x.yaml"))


# The frozen recipe


@pytest.fixture
def run(tmp_path: Path) -> RunDirectory:
    return make(config(run={"dir": tmp_path / "run"}), Path("x.yaml"))


def test_the_recipe_is_frozen_as_it_was_resolved(run: RunDirectory) -> None:
    data = {"corpora": [{"path": "a"}, {"path": "ü: #" + " 'long'" * 40}], "skip": [[1, 2]]}
    given = config(optimizer={"lr": "1e-5"}, data=data, run={"dir": run.root})
    assert run.compare(given) == []
    run.freeze(given, ["f1", "f2"], {"train_batch_size": 64})
    content = yaml.safe_load(run.recipe.read_text())
    assert content["manifests"] == ["f1", "f2"]
    assert RunConfig.model_validate(content["config"]) == given
    assert content["deepspeed_json"] == {"train_batch_size": 64}
    assert load(run.recipe) == given  # it can be started again as it stands
    assert load(run.recipe, ["train.steps=5"]).train.steps == 5
    assert run.compare(given) == []
    copy = shutil.copytree(
        run.root, run.root.with_name("copy")
    )  # a run of its own, unless somebody says otherwise
    assert load(copy / "recipe.yaml").run.dir == copy
    assert load(copy / "recipe.yaml", ["run.dir=elsewhere"]).run.dir == Path("elsewhere")
    assert sorted(p.name for p in run.root.iterdir() if p.is_file()) == ["recipe.yaml"]


def test_other_changes_are_reported_and_kept(run: RunDirectory) -> None:
    run.freeze(config(), [], {})
    changed = config(
        optimizer={"lr": 1e-4},
        parallel={"tensor": 2},
        data={"skip": [[1, 5]]},
        run={"dir": "elsewhere", "timeout": 60},
    )
    wanted = [
        "data.skip: [] -> [[1, 5]]",
        "optimizer.lr: 0.0003 -> 0.0001",
        "parallel.tensor: 1 -> 2",
        "run.timeout: 1800 -> 60",
    ]
    assert run.compare(changed) == wanted
    run.freeze(changed, [], {})
    assert run.compare(changed) == []


def test_what_a_recipe_of_an_older_version_does_not_say_is_the_default(run: RunDirectory) -> None:
    run.freeze(config(), [], {})
    content = yaml.safe_load(run.recipe.read_text())
    for key in ("qkv_bias", "rope_scaling", "max_positions"):
        del content["config"]["model"][key]
    run.recipe.write_text(yaml.safe_dump(content))
    assert run.compare(config()) == []
    assert run.compare(config(model={"max_positions": 8192})) == ["model.max_positions: None -> 8192"]
    with pytest.raises(ConfigError, match=r"model.qkv_bias: False -> True"):
        run.compare(config(model={"qkv_bias": True}))
    with pytest.raises(ConfigError, match=r"model.rope_scaling"):
        run.compare(config(model={"rope_scaling": {"kind": "linear", "factor": 2}}))


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"model": {"layers": 24}}, "model.layers: 12 -> 24"),
        ({"model": {"vocab_size": 1000}}, "model.vocab_size: None -> 1000"),
        ({"run": {"seed": 5}}, "run.seed: 1234 -> 5"),
    ],
)
def test_another_model_or_seed_is_refused(change: dict[str, Any], named: str, run: RunDirectory) -> None:
    run.freeze(config(), [], {})
    before = run.recipe.read_bytes()
    with pytest.raises(ConfigError) as error:
        run.compare(config(**change))
    assert named in str(error.value) and str(run.root) in str(error.value)
    assert run.recipe.read_bytes() == before


@pytest.mark.parametrize(
    "content", [b"", b"config", b"a: [", b"model: {}\n", b"\xff\xfe\x80", b"config: 5\n"]
)
def test_a_damaged_frozen_recipe_is_an_error(content: bytes, run: RunDirectory) -> None:
    run.recipe.write_bytes(content)
    with pytest.raises(ConfigError, match=r"another run\.dir"):
        run.compare(config())
    assert run.recipe.read_bytes() == content


def test_a_full_disk_leaves_the_frozen_recipe_as_it_was(run: RunDirectory) -> None:
    run.freeze(config(), [], {})
    before = run.recipe.read_bytes()
    with files_no_larger_than(100), pytest.raises(ConfigError, match=r"recipe\.yaml could not be written"):
        run.freeze(config(optimizer={"lr": 1e-4}), [], {})
    assert run.recipe.read_bytes() == before
    assert not run.recipe.with_suffix(".tmp").exists()


def test_what_only_says_how_it_is_computed_may_change(run: RunDirectory) -> None:
    run.freeze(config(), [], {})
    assert run.compare(config(kernels={"attention": "reference"})) == ["kernels.attention: auto -> reference"]
    assert run.compare(config(model={"z_loss": 0.0})) == ["model.z_loss: 0.0001 -> 0.0"]


def test_a_second_process_is_kept_out(run: RunDirectory) -> None:
    run.lock()
    with pytest.raises(ConfigError, match="another process trains here"):
        RunDirectory(run.root).lock()


# The journal


def test_events_come_back_in_order_and_by_kind(run: RunDirectory) -> None:
    note(run, "training", step=0, path=Path("a"), losses=[1.5, 2.5])
    note(run, "discarded", step=3, reason="non-finite loss")
    note(run, "finished", step=4)
    assert [e["event"] for e in run.events()] == ["training", "discarded", "finished"]
    assert [e["step"] for e in run.events(Discarded, Finished)] == [3, 4]
    (first,) = run.events(Training)
    assert first["path"] == "a" and first["losses"] == [1.5, 2.5]
    assert first["time"] > 1.6e9


def test_numbers_that_are_none_stay_readable_for_every_reader(run: RunDirectory) -> None:
    """JSON knows neither nan nor infinity; Python would write them all the same."""
    note(run, "discarded", loss=math.nan, summary={"norms": (math.inf, -math.inf, 1.0)})

    def refuse(word: str) -> None:
        raise AssertionError(f"{word} is not JSON")

    entry = json.loads(run.journal.read_text(), parse_constant=refuse)
    assert math.isnan(float(entry["loss"]))
    assert [float(n) for n in entry["summary"]["norms"]] == [math.inf, -math.inf, 1.0]


def test_a_torn_last_line_is_left_out_with_a_warning(
    run: RunDirectory, caplog: pytest.LogCaptureFixture
) -> None:
    note(run, "training")
    with run.journal.open("ab") as file:
        file.write(b'{"time": 1, "eve')
    with caplog.at_level(logging.WARNING):
        assert [e["event"] for e in run.events()] == ["training"]
    assert "torn" in caplog.text and str(run.journal) in caplog.text
    note(run, "resumed")
    assert [e["event"] for e in run.events()] == ["training", "resumed"]


@pytest.mark.parametrize("line", [b"{oops}", b"", b"5", b'"text"', b'{"time": 1}', b"\xff"])
def test_a_line_that_is_no_event_is_named(line: bytes, run: RunDirectory) -> None:
    note(run, "training")
    with run.journal.open("ab") as file:
        file.write(line + b"\n")
    note(run, "finished")
    with pytest.raises(DataError, match=r"journal\.jsonl: line 2"):
        list(run.events(Training))


def test_no_journal_yet(run: RunDirectory) -> None:
    assert list(run.events()) == []


def test_a_full_disk_makes_events_wait(run: RunDirectory, caplog: pytest.LogCaptureFixture) -> None:
    note(run, "training")
    with files_no_larger_than(60):
        note(run, "discarded", step=3)
        note(run, "evaluated", step=4)
    assert "waiting in memory" in caplog.text
    assert [e["event"] for e in run.events()] == ["training"]
    note(run, "finished")
    assert [e["event"] for e in run.events()] == ["training", "discarded", "evaluated", "finished"]


def test_what_a_restart_depends_on_does_not_wait(run: RunDirectory) -> None:
    note(run, "training")
    with files_no_larger_than(60):
        note(run, "discarded", step=3)
        with pytest.raises(
            SpaceError, match=r"journal\.jsonl could not be written.*handover: make room, then start"
        ):
            RunLog(run).commit(Handover(before=7))
    RunLog(run).commit(Unstable(step=5))
    assert [e["event"] for e in run.events()] == ["training", "discarded", "handover", "unstable"]


def test_a_handover_counts_until_training_begins_again(run: RunDirectory) -> None:
    assert run.handed_over() is None
    note(run, "training")
    note(run, "handover", before=31)
    note(run, "resumed")
    assert run.handed_over() == 31
    note(run, "training")
    assert run.handed_over() is None


@pytest.mark.parametrize("fields", [{}, {"before": None}, {"before": "soon"}])
def test_a_handover_that_says_not_where_to_is_named(fields: dict[str, Any], run: RunDirectory) -> None:
    note(run, "training")
    note(run, "handover", **fields)
    with pytest.raises(DataError, match=r"journal\.jsonl: line 2 .*mend that line"):
        run.handed_over()


def test_fp8_switched_off_or_on_is_one_change(run: RunDirectory) -> None:
    run.freeze(config(precision={"fp8": "delayed"}), [], {})
    (off,) = run.compare(config())
    assert off.startswith("precision.fp8: {") and "'recipe': 'delayed'" in off and off.endswith("-> None")
    assert run.compare(config(precision={"fp8": {"recipe": "delayed", "margin": 1}})) == [
        "precision.fp8.margin: 0 -> 1"
    ]
    run.freeze(config(), [], {})
    (on,) = run.compare(config(precision={"fp8": "block"}))
    assert on.startswith("precision.fp8: None -> {")
