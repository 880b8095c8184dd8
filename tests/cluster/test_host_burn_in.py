"""Burn-ins of hosts that stand by, polled by the supervisor."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from pathlib import Path

import pytest

from megastable.cluster import host_burn_in
from megastable.cluster.host_burn_in import BurnInAnswer, HostBurnIns
from megastable.cluster.host_report import HostBurnIn
from megastable.cluster.reach import Local
from tests.patience import PATIENCE


class Saying:
    """Reaches hosts on which a burn-in prints a text."""

    def __init__(self, text: str, code: int = 0) -> None:
        self.text, self.code, self.asked = text, code, 0
        self.detached = True

    def words(self, host: str, command: Sequence[str]) -> list[str]:
        self.asked += 1
        return [sys.executable, "-c", f"print({self.text!r}); raise SystemExit({self.code})"]


def polled(burn_ins: HostBurnIns, host: str = "b") -> BurnInAnswer:
    until = time.monotonic() + PATIENCE
    while time.monotonic() < until:
        if (answer := burn_ins.poll(host, 0.0)) is not None:
            return answer
        time.sleep(0.01)
    raise AssertionError("no answer")


def report(**told: object) -> str:
    burned = HostBurnIn.model_validate({"seed": 1, "seconds": 1.0} | told)
    return f"a warning of a library\n{burned.model_dump_json()}"


@pytest.mark.slow
def test_this_host_is_sound(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    assert polled(HostBurnIns(Local())) == BurnInAnswer()


def test_what_was_wrong() -> None:
    answer = polled(
        HostBurnIns(Saying(report(found=["cuda:0: wrong", "cuda:1: wrong, too"], undiagnosed="x")))
    )
    assert answer == BurnInAnswer(found="cuda:0: wrong; cuda:1: wrong, too")


@pytest.mark.parametrize(
    ("text", "code", "why"),
    [
        (report(in_use="5 GB are used by others"), 0, "5 GB are used by others"),
        ("ssh: connect to host b: No route to host", 255, "No route to host"),
        ("{}", 0, "cannot be read"),
        ("", 0, "cannot be read"),
    ],
    ids=["in-use", "unreachable", "unreadable", "silent"],
)
def test_one_that_could_not_be_made_is_tried_again_later(
    text: str, code: int, why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    reach = Saying(text, code)
    burn_ins = HostBurnIns(reach)
    answer = polled(burn_ins)
    assert why in answer.unmade and not answer.found
    for _ in range(20):
        assert burn_ins.poll("b", 0.0) is None
    assert reach.asked == 1
    monkeypatch.setattr(host_burn_in, "AGAIN", 0.0)
    polled(burn_ins, "c")
    assert polled(burn_ins, "c").unmade and reach.asked == 3


def test_nothing_of_it_is_left_when_the_run_is_over(tmp_path: Path) -> None:
    class Sleeping(Saying):
        def words(self, host: str, command: Sequence[str]) -> list[str]:
            return ["sh", "-c", f"echo > {tmp_path / 'begun'}; sleep 1000; echo > {tmp_path / 'over'}"]

    burn_ins = HostBurnIns(Sleeping(""))
    assert burn_ins.poll("b", 0.0) is None
    (running,) = burn_ins._running.values()
    burn_ins.close()
    assert running.wait().code not in (0, None)
