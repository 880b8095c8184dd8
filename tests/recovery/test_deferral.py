"""Runs that put samples off read every sample as often as a run that had no trouble: through restarts, on any number of
ranks, with two corpora, in a second epoch, and when they are made longer."""

from __future__ import annotations

import shutil
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

from megastable.base import errors
from megastable.config.tree import RunConfig
from megastable.data.blends import ExchangeEntry, exchanges_in_force, read_blends
from megastable.data.corpora import open_corpora
from megastable.data.skip_ledger import append_entry
from megastable.run.directory import RunDirectory
from megastable.run.events.data_events import ExchangesUndone
from megastable.run.events.training_events import CheckpointSuspect, Resumed
from megastable_tools.forensics.history import History
from tests.conftest import write_corpus
from tests.distributed import run_ranks
from tests.recovery.test_recovery import easy, incidents, recipe, spoil, train
from tests.training.test_failures import terminate
from tests.training.test_failures import train as train_with


@pytest.fixture(scope="module")
def corpora(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """Two of them, of which the run reads the small one several times."""
    root = tmp_path_factory.mktemp("corpora")
    write_corpus(root / "large", ids=20)
    write_corpus(root / "small", tokens=2_500, seed=1, ids=20)
    return [{"path": root / "large", "weight": 2.0}, {"path": root / "small"}]


def what_was_read(run: Path) -> Counter[tuple[int, int, int]]:
    """Corpus, epoch and sequence of all that a run trained on, by the order of the time; undone steps left out."""
    history, found = History(run), Counter[tuple[int, int, int]]()
    for done in history.list_steps(1, 10**6):
        if not done.undone:
            places = history.library_at(done.time).source.order.locate_samples(history.positions_of(done))
            found.update(zip(*(x.tolist() for x in places[:3]), strict=True))
    return found


def without_trouble(config: RunConfig, samples: int) -> Counter[tuple[int, int, int]]:
    """What the order alone gives."""
    source = open_corpora(config.data.corpora, config.model.sequence_length, config.run.seed).train
    places = source.order.locate_samples(np.arange(samples))
    return Counter(zip(*(x.tolist() for x in places[:3]), strict=True))


def write_recipe(config: RunConfig, run: Path) -> None:
    """Which `spoil` does not do."""
    told = {"config": config.model_dump(mode="json"), "manifests": []}
    (run / "recipe.yaml").write_text(yaml.safe_dump(told))


def sizes(steps: int, batch: int) -> dict[str, Any]:
    return {"steps": steps, "global_batch": batch, "micro_batch": 4, "eval_samples": 0}


@pytest.mark.slow
def test_handed_over_resumed_twice_and_made_longer(corpora: list[dict[str, Any]], tmp_path: Path) -> None:
    """The process that defers ends; the next one is stopped before it comes to what was put off; the third reads it."""
    run = tmp_path / "run"
    policy = {"snapshots": {"interval": 0}, "policy": {"recur_steps": 8, "verify_steps": 4}}
    parts: dict[str, Any] = {
        "data": {"corpora": corpora},
        "stability": policy,
        "checkpoint": {"interval": 10},
    }
    config = recipe(tmp_path, run, train=sizes(50, 8), **parts)
    (end,) = run_ranks(1, spoil, config, "weights", [32])
    assert end["code"] == errors.HANDOVER and "reads the suspect data later" in end["message"]
    told = incidents(run, "handed over")[0]["summary"]
    assert told["deferred"] and told["positions"] == [] and told["lost"] == 0
    assert {e.corpus for e in exchanges_in_force(read_blends(run / "blends.jsonl"))} == {"large", "small"}
    ((code, _),) = run_ranks(1, train_with, config, terminate, 7)
    assert code == errors.STOPPED
    assert run_ranks(1, train, config) == [(0, "")]
    longer = recipe(tmp_path, run, train=sizes(56, 8), **parts)
    assert run_ranks(1, train, longer) == [(0, "")]
    assert [e["step"] for e in RunDirectory(run).iterate_events(Resumed)][:2] == [30, 37]
    assert not (run / "skips.jsonl").exists()
    read = what_was_read(run)
    assert read == without_trouble(config, 8 * 56) and max(epoch for _, epoch, _ in read) >= 1


def spoil_untried(*given: Any) -> dict[str, Any]:
    """Without trials a window is put off: with one, a state that something else has damaged is undone, and no more."""
    from megastable.recovery import replay_trials

    replay_trials.LEAST = 10**6
    return spoil(*given)


@pytest.mark.slow
@pytest.mark.parametrize(("world", "batch"), [(1, 8), (2, 8), (3, 12)])
def test_two_windows_of_one_run(
    world: int, batch: int, corpora: list[dict[str, Any]], tmp_path: Path
) -> None:
    """The second comes when what the first one put off has been read."""
    run = tmp_path / "run"
    policy = {"policy": {"recur_steps": 8, "verify_steps": 4}}
    config = recipe(tmp_path, run, train=sizes(60, batch), data={"corpora": corpora}, stability=policy)
    for end in run_ranks(world, spoil_untried, config, "weights", [30, 48]):
        assert end["code"] == 0 and end["factor"] == 1.0
    write_recipe(config, run)
    found = incidents(run)
    assert [i["cause"] for i in found] == ["state"] * len(found) and all(i["deferred"] for i in found)
    assert not (run / "skips.jsonl").exists()
    assert what_was_read(run) == without_trouble(config, batch * 60)


@pytest.fixture(scope="module")
def thirty(corpora: list[dict[str, Any]], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of one process, with checkpoints at the steps 10, 20 and 30: to be copied."""
    run = tmp_path_factory.mktemp("thirty") / "run"
    config = recipe(run, run, train=sizes(30, 8), data={"corpora": corpora[:1]}, checkpoint={"interval": 10})
    assert run_ranks(1, train, config) == [(0, "")]
    return run


def put_off(run: Path) -> None:
    """Eight samples that step 13 reads, and behind them three more, by another line on top."""
    for swap in ((100, 260, 8), (104, 280, 3), (250, 300, 4)):
        append_entry(
            run / "blends.jsonl", ExchangeEntry(corpus="large", exchange=[swap], reason="state", step=15)
        )


@pytest.mark.slow
@pytest.mark.parametrize(
    ("left", "taken", "world"),
    [((10, 30), 10, 2), ((10, 20, 30), 10, 1), ((20, 30), 30, 1), ((30,), 30, 2)],
)
def test_a_checkpoint_of_behind_what_was_put_off_since(
    left: tuple[int, ...], taken: int, world: int, corpora: list[dict[str, Any]], thirty: Path, tmp_path: Path
) -> None:
    """The newest is taken that has not read it; where there is none, the newest, and nothing is put off. What was put
    aside before stays."""
    run, data, newer = tmp_path / "run", {"corpora": corpora[:1]}, [s for s in left if s > taken]
    shutil.copytree(thirty, run)
    put_off(run)
    folder = run / "checkpoints"
    for step in {10, 20, 30} - set(left):
        shutil.rmtree(folder / f"step-{step}")
    (folder / "suspect-step-5").mkdir()
    longer = recipe(tmp_path, run, train=sizes(40, 8), data=data)
    assert run_ranks(world, train, longer) == [(0, "")] * world
    events = RunDirectory(run).iterate_events
    assert [e["step"] for e in events(Resumed)] == [taken]
    assert {e["name"] for e in events(CheckpointSuspect)} == {f"step-{step}" for step in newer}
    assert [e["lines"] for e in events(ExchangesUndone)] == ([] if newer else [3])
    aside = {path.name for path in folder.glob("suspect-*")}
    assert aside == {f"suspect-step-{step}" for step in [5, *newer]} and not incidents(run)
    assert len(read_blends(run / "blends.jsonl")) == (4 if newer else 7)
    assert what_was_read(run) == without_trouble(longer, 8 * 40)
    # And again: nothing is done twice.
    assert run_ranks(1, train, recipe(tmp_path, run, train=sizes(42, 8), data=data)) == [(0, "")]
    assert [e["step"] for e in events(Resumed)][-1] == 40 and len(list(events(ExchangesUndone))) <= 1


__all__ = ["easy"]
