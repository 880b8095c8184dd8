"""The cases of single samples alone: on a corpus and losses that are made up, without a model."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from megastable.attribution.sample_history import Waiting, WatchState
from megastable.attribution.sample_replay import Trained
from megastable.config.stability import StabilityConfig
from megastable.data.skips import Skips
from megastable.recovery import watches
from megastable.recovery.watches import CASES, SampleWatch
from megastable_guard.actions import Cause, Verdict
from megastable_guard.conclusion import Conclusion
from megastable_guard.guard_config import PolicyConfig
from megastable_guard.policy import Policy
from tests.guard.traces import seen
from tests.journal import KeptLog

Int64s = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]
KEPT = Skips.from_ranges([])


def state_of(watch: Any) -> WatchState:
    return WatchState.model_validate(watch.state_dict())


@pytest.fixture(autouse=True)
def _examined_by_a_bench(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watches, "examine_window", lambda laboratory, *given: laboratory.examine(*given))


class SampleBench:
    """Stands for the laboratory."""

    batch = 16

    def __init__(self, found: Conclusion | None = None) -> None:
        self.found, self.examined = found, list[tuple[list[int], list[int]]]()  # steps of window and history
        self.loader = SimpleNamespace(go_to=lambda *_: None)

    def run_on_rank0(self, work: Callable[[Any], Any]) -> Any:
        return work(self)

    def examine(self, window: Sequence[Trained], history: Sequence[Trained], *_: Any) -> Conclusion:
        self.examined.append(([t.step for t in window], [t.step for t in history]))
        assert self.found is not None
        return self.found


class Made:
    """A watch, what it wrote and said, and which samples it found bad."""

    def __init__(self) -> None:
        self.log, self.found_bad = KeptLog(), list[Conclusion]()
        self.events = self.log.events
        order = SimpleNamespace(corpora=[SimpleNamespace(name="code")])
        incident_log: Any = SimpleNamespace(skip_bad_samples=lambda found, *_: self.found_bad.append(found))
        parts: Any = SimpleNamespace(
            config=SimpleNamespace(stability=StabilityConfig()), log=self.log, phase=lambda phase: None,
            source=SimpleNamespace(order=order), loader=SimpleNamespace(go_to=lambda *_: None),
            select_unskipped=lambda: KEPT,
        )  # fmt: skip
        self.parts, self.watch = parts, SampleWatch(parts, incident_log)


def case(step: int, **changes: Any) -> Waiting:
    given = {"kind": "discard", "first": step, "last": step, "verdict": Verdict.SPIKE, "reason": "high"}
    return Waiting.model_validate({**given, **changes})


def test_a_case_that_has_no_room_to_wait_is_written_down() -> None:
    made = Made()
    for step in range(1, CASES + 2):
        made.watch._wait(case(step, positions=[step]))
    (event,) = made.events
    assert [waiting.first for waiting in state_of(made.watch).waiting] == list(range(2, CASES + 2))
    assert (event["event"], event["first"], event["step"]) == ("samples_dropped", 1, CASES + 1)
    assert event["positions"] == [1] and event["reason"]


def test_whole_batches_are_looked_back_on_where_there_is_a_state_of_before_them() -> None:
    policy = Policy(PolicyConfig(rewinds=1))
    made = Made()
    for waiting in (case(3), case(5, kind="batch")):
        made.watch._wait(waiting)
    assert (
        made.watch.take_waiting_batches(policy, 9, None) is None
        and made.watch.take_waiting_batches(policy, 9, 5) is None
    )
    found = made.watch.take_waiting_batches(policy, 9, 4)
    assert (
        found is not None and found.kind == "batch" and made.watch.take_waiting_batches(policy, 9, 4) is None
    )
    policy.decide_on_step(seen(9, Verdict.SPIKE), 0)  # all rewinds there are
    made.watch._wait(case(5, kind="batch"))
    assert made.watch.take_waiting_batches(policy, 9, 4) is None


def fruitless(watch: SampleWatch, step: int) -> int:
    """Steps of rest after a look at `step` that found no bad sample."""
    watch.record_nobody_bad(case(step, kind="batch"), Conclusion(Cause.STATE, [], [], "harmless"), step, 0.1)
    return state_of(watch).rest.until - step


def test_looks_for_nothing_cost_a_bounded_share_of_a_run() -> None:
    watch, looks = Made().watch, list[int]()
    step = 1
    while step < 100_000:  # an alarm whenever there may be one
        looks.append(step)
        step += fruitless(watch, step)
    assert [b - a for a, b in pairwise(looks)][:7] == [64, 128, 256, 512, 1024, 2048, 4096]
    assert len(looks) <= 6 + 1 + 100_000 // 4096
    assert fruitless(watch, step + 4095) == 4096 and fruitless(watch, step + 4095 + 2 * 4096) == 64


def test_the_rest_is_kept_by_rewinds_and_restarts_and_short_again_where_somebody_is_bad() -> None:
    watch = Made().watch
    early = watch.state_dict()
    assert [fruitless(watch, step) for step in (10, 100)] == [64, 128]
    late = watch.state_dict()
    watch.rewound(5, early)
    assert state_of(watch).rest.until == 228 and fruitless(watch, 228) == 256
    again = Made().watch
    again.load_state_dict(json.loads(json.dumps(late)))
    assert state_of(again).rest.until == 228 and fruitless(again, 228) == 256
    watch.shorten_rest(case(5, kind="discard"))
    assert fruitless(watch, 500) == 512
    watch.shorten_rest(case(5, kind="batch"))
    watch.rewound(5, late)
    assert state_of(watch).rest.until == 1012 and fruitless(watch, 1012) == 64


def act(made: Made, step: int, calm: bool = True, laboratory: Any = None) -> list[Conclusion]:
    state: Any = SimpleNamespace(cursor=16 * step, step=step)
    trained = [Trained(n, 16 * n + np.arange(16), np.full(16, 3.0), True) for n in range(1, step + 1)]
    return made.watch.examine_cases(state, trained, laboratory or SampleBench(), calm, skip_all)


def skip_all(found: Conclusion, *_: object) -> tuple[Conclusion, str]:
    return found, ""


def test_a_case_is_examined_after_quiet_steps_and_its_bad_samples_are_skipped() -> None:
    """Only what came before its steps is harmless for sure."""
    made, bench = Made(), SampleBench(Conclusion(Cause.DATA, [49], [], "bad"))
    made.watch._wait(case(3, kind="batch", last=5))
    for step, calm in ((10, True), (11, False), (12, True), (13, True), (14, True)):
        assert act(made, step, calm, bench) == [] and not bench.examined
    assert act(made, 15, True, bench) == [bench.found] == made.found_bad
    assert bench.examined == [([3, 4, 5], [1, 2])] and not state_of(made.watch).waiting


def test_suspects_that_are_new_clear_the_cases_that_wait_behind_them() -> None:
    """What was usual is forgotten while a case is examined; the other cases are told, and nothing fails."""
    made, bench = Made(), SampleBench(Conclusion(Cause.DATA, [49], [], "bad"))
    for step in (3, 5):
        made.watch._wait(case(step, positions=[16 * step]))

    def train_through(found: Conclusion, *_: object) -> tuple[Conclusion, str]:
        made.watch.begin_again()
        return found, "they are new"

    state: Any = SimpleNamespace(cursor=320, step=20)
    made.watch._quiet = 3
    assert made.watch.examine_cases(state, [], bench, True, train_through) == []  # type: ignore[arg-type]
    assert sorted((event["event"], event["first"]) for event in made.events) == [
        ("discard_examined", 3),
        ("samples_dropped", 5),
    ]
