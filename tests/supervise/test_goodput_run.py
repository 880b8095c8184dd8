"""A real supervised run whose rank is killed: its account against a clock of this process."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from megastable.base import errors
from megastable.run import records
from megastable.run.goodput.time_account import TimeKind
from megastable.run.goodput.watching import read_account
from megastable.supervise.status import facts, read_status
from tests.patience import PATIENCE
from tests.supervise.test_supervisor import Supervised, settings

K = TimeKind
STEPS = 24


@pytest.fixture
def supervised(corpus: Path, tmp_path: Path) -> Iterator[Supervised]:
    config = settings(corpus, tmp_path / "run")
    train = config.train.model_copy(update={"eval_interval": 8})
    logging = config.logging.model_copy(update={"flush_steps": 3})
    found = Supervised(config.model_copy(update={"train": train, "logging": logging}), tmp_path, STEPS)
    yield found
    found.end()


@pytest.mark.slow
@pytest.mark.timeout(4 * PATIENCE + 60)
def test_the_account_of_a_run_with_a_killed_rank_adds_up(supervised: Supervised) -> None:
    s = supervised
    began = time.time()
    s.start()
    s.at(11, attempt=1)
    s.kill(s.ranks()[1])
    assert s.finish(2 * PATIENCE) == errors.OK, s.output.read_text()[-3000:]

    account, problems = read_account(s.run.root)
    seconds = account.seconds()
    assert problems == [] and sum(seconds.values()) == pytest.approx(account.wall, rel=1e-6)
    # After its last event, a supervisor writes reports and ends: that is not the run's time.
    ended_at = s.events("supervisor")[-1]["time"]
    assert account.wall == pytest.approx(ended_at - began, rel=0.01, abs=0.1)
    (ended, _), launched = s.events("ended"), s.events("launched")
    training = s.events("training")
    started = sum(t["time"] - b["time"] for b, t in zip(launched, training, strict=True))
    assert started <= seconds[K.START_UP] < 1.3 * started + 2
    rows = records.read(s.run.steps).to_pylist()
    assert len(rows) == STEPS and {row["attempt"] for row in rows} == {1, 2}
    assert all(row["attempt"] == 2 for row in rows if row["step"] > ended["clock"])
    assert [event["ahead"] for event in launched] == [0.0, 0.0]  # one host has one clock
    lost = {kind: (entry, told) for (kind, *entry), told in account.lost().items() if entry[1] == 1}
    assert K.REDONE in lost and K.ENDING in lost and lost[K.REDONE][0][0] == ended["what"]
    # Steps done again: at least from the checkpoint to the last one recorded; and none of them is training.
    again = training[1]["step"]
    redone = sum(row["seconds"] for row in rows if again < row["step"] <= ended["clock"])
    assert seconds[K.REDONE] == pytest.approx(redone, rel=0.01, abs=1.1)
    first = sum(row["seconds"] for row in rows if row["step"] > ended["clock"])
    assert seconds[K.TRAINING] > first
    assert seconds[K.EVALUATION] > 0 and seconds[K.CHECKPOINTING] > 0
    assert seconds[K.UNKNOWN] < 0.05 * account.wall, seconds

    told = json.loads(s.run.summary.read_text())["goodput"]
    assert 0 < told["share"] < 1 and sum(told["seconds"].values()) == pytest.approx(
        told["wall_seconds"], rel=0.01
    )
    shown = facts(read_status(s.run.root))["goodput"]
    assert shown.pop("settled") == shown["seconds"]
    assert shown == account.facts()
