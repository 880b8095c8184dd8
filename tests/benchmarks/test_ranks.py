"""Ranks of measurements and drills: how a function ended on each, and that none is left."""

from __future__ import annotations

import os
import time
from pathlib import Path

import psutil
import pytest

from benchmarks import ranks
from benchmarks.ranks import ABANDONED, DIED, HUNG, RankEnd, launch, run_on_ranks
from megastable.base.errors import MegastableError


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
def test_the_others_are_not_waited_for_long(what: str, errors: str, tmp_path: Path) -> None:
    ends = run_on_ranks(2, trouble, what, limit=200, log=tmp_path / "log")
    assert [end.error for end in ends] == [ABANDONED, errors]
    assert not psutil.pid_exists(int((tmp_path / "log").read_text().splitlines()[-1]))
    assert what != "tells" or (ends[1].text == "as told" and ends[1].result > 0)


@pytest.mark.slow
def test_a_rank_that_hangs(tmp_path: Path) -> None:
    ends = run_on_ranks(1, trouble, "hangs", limit=20, log=tmp_path / "log")
    assert [end.error for end in ends] == [HUNG]


@pytest.mark.slow
def test_results_by_rank_or_what_failed() -> None:
    pids = launch(2, trouble, "none")
    assert len(set(pids)) == 2 and not any(psutil.pid_exists(pid) for pid in pids)
    with pytest.raises(MegastableError, match="rank 1: ValueError: so it is"):
        launch(2, trouble, "raises")
