"""What a GPU host runs: every stage in its time, whatever happens to one, and all of it in one JSON."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path

import psutil
import pytest

from benchmarks import ranks, suite
from benchmarks.peers import OURS, chosen_peers
from benchmarks.ranks import ABANDONED, DIED, RankEnd, launch_ranks, run_on_ranks
from benchmarks.suite import STAGES, Stage
from benchmarks.train_speed import ROOM, resolve_config
from megastable.base.errors import MegastableError
from megastable.config import deepspeed_json, recipe
from megastable.fp8.te import find_misfit
from megastable.parallel.layout import Layout
from megastable_tools.plan import memory

ROOT = Path(__file__).parents[2]
WRITES = "import sys; open(sys.argv[sys.argv.index('--output') + 1], 'w').write({!r}); print('said')"


def python(text: str, seconds: int = 20, json: bool = True, name: str = "one") -> Stage:
    return Stage(name, ("-c", text), seconds, json)


@pytest.mark.parametrize("stage", [s for s in STAGES if "bench" in s.command], ids=lambda s: s.name)
def test_stages_name_recipes_and_peers_that_exist(stage: Stage) -> None:
    """Of stages that only a GPU host runs: what they ask for exists and can be laid out on one GPU."""
    words = list(stage.command)
    overrides = [word for word in words if "=" in word and not word.startswith("-")]
    config = recipe.load_recipe(ROOT / words[words.index("--recipe") + 1], overrides)
    config, _ = resolve_config(config, room=ROOM * 79.1 * 2**30)
    assert deepspeed_json.build_deepspeed_json(config, 1)["train_batch_size"] == config.train.global_batch
    peers = [words[i + 1] for i, word in enumerate(words) if word == "--peers"]
    assert chosen_peers(peers, "cuda")[0] == OURS
    # FP8 is compared with bf16 in the same run, and only there; and the model has the sizes that it takes.
    (planned,) = memory.list_footprints(config, Layout(1, 1, 1))
    assert planned.total < 75e9  # of an H100's 80 GB; the rest is the context's and the allocator's
    pair = {"megastable-bf16", "megastable-fp8-off"} & set(peers)
    assert bool(pair) == stage.name.endswith("-fp8") == (config.precision.fp8 is not None)
    assert config.precision.fp8 is None or find_misfit(config) is None


@pytest.mark.parametrize(
    ("name", "gib", "blocks"),
    # A small model is left whole.
    [("7b", 79.1, 12), ("7b", 141.0, 20), ("7b", 240.0, 32), ("7b", 1.0, 4), ("1.3b", 79.1, 24)],
)
def test_a_model_that_does_not_fit_is_measured_with_fewer_blocks(name: str, gib: float, blocks: int) -> None:
    config = recipe.load_recipe(ROOT / f"launch/recipes/{name}.yaml")
    resolved, notes = resolve_config(config, room=ROOM * gib * 2**30)
    assert resolved.model.layers == blocks
    assert (resolved.parallel.tensor, resolved.parallel.sequence) == (1, False)
    told = [note for note in notes if note.startswith("model.layers=")]
    assert [note.split(":")[0] for note in told] == (
        [f"model.layers={blocks} in place of {config.model.layers}"] if blocks < config.model.layers else []
    )
    wide = "parallel.tensor=1 in place of 2: one device"
    assert (wide in notes) == (config.parallel.tensor == 2)


def test_suite_runs_every_stage(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    stages = (
        python(WRITES.format("[1]"), name="good"), python("raise SystemExit(3)", name="bad"),
        python("", name="last"),
    )  # fmt: skip
    monkeypatch.setattr(suite, "STAGES", stages)
    file = tmp_path / "all.json"
    with pytest.raises(suite.typer.Exit) as end:
        suite.main(output=file, seconds=60, only=None, listed=False)
    assert end.value.exit_code == 1
    found = json.loads(file.read_text())["stages"]
    assert [(name, done["outcome"]) for name, done in found.items()] == [
        ("good", "passed"), ("bad", "failed with 3"), ("last", "passed"),
    ]  # fmt: skip
    assert all(Path(done["log"]).parent == tmp_path / "all.logs" for done in found.values())
    assert found["good"]["result"] == [1] and "failed with 3" in capsys.readouterr().out
    suite.main(output=file, seconds=60, only=["good"], listed=False)
    assert json.loads(file.read_text())["stages"].keys() == {"good"}
    with pytest.raises(suite.typer.Exit):
        suite.main(output=file, seconds=suite.LEAST - 1, only=["good"], listed=False)
    assert "left out: no time is left" in capsys.readouterr().out
    (left,) = json.loads(file.read_text())["stages"].values()
    assert left["outcome"].startswith("left out: no time is left") and left["returned"] is None


def trouble(what: str) -> int | RankEnd:
    """On rank 1; the other one waits for it then, as in a collective that a rank never reaches."""
    if what != "none":
        if os.environ["RANK"] == "1":
            if what == "raises":
                raise ValueError("so it is")
            if what == "tells":
                return RankEnd("HandoverError", "as told", os.getpid())
            if what == "dies":
                os._exit(9)
        print(os.getpid(), flush=True)
        time.sleep(1000)
    return os.getpid()


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ranks, "GRACE", 0.2)


@pytest.mark.quick("raises*")
@pytest.mark.parametrize(
    ("what", "errors"),
    [("raises", "ValueError"), ("tells", "HandoverError"), ("dies", DIED)],
)
def test_run_on_ranks_waits_for_others_not_long(what: str, errors: str, tmp_path: Path) -> None:
    ends = run_on_ranks(2, trouble, what, limit=200, log=tmp_path / "log")
    assert [end.error for end in ends] == [ABANDONED, errors]
    assert not psutil.pid_exists(int((tmp_path / "log").read_text().splitlines()[-1]))
    assert what != "tells" or (ends[1].text == "as told" and ends[1].result > 0)


def die_at_once(_: None) -> None:
    """Rank 1 ends by itself; the other one fails because of that."""
    if os.environ["RANK"] == "1":
        os._exit(9)
    time.sleep(0.1)
    raise ValueError("a rank has gone")


def test_the_rank_that_died_is_named_not_one_that_noticed_it() -> None:
    with pytest.raises(MegastableError, match="on 2 ranks: rank 1: died"):
        launch_ranks(2, die_at_once, None)
