"""The cases of single samples alone: on a corpus and losses that are made up, without a model."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from functools import partial
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch

from megastable.attribution import sample_replay
from megastable.attribution.conclusion import Conclusion
from megastable.attribution.sample_history import Alarm, Waiting, WatchState
from megastable.attribution.sample_replay import Laboratory, Trained
from megastable.base.errors import DataError
from megastable.config.stability import StabilityConfig
from megastable.data.skips import Skips
from megastable.recovery import sample_watch
from megastable.recovery.sample_watch import CASES, LEFT_OUT, UNKNOWN, SampleWatch
from megastable_guard.actions import Cause
from megastable_guard.guard_config import PolicyConfig
from megastable_guard.policy import Policy
from megastable_guard.signals import Verdict
from tests.guard.policies import seen
from tests.journal import KeptLog

Int64s = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]
KEPT = Skips.of([])


def state_of(watch: Any) -> WatchState:
    return WatchState.model_validate(watch.state_dict())


@pytest.fixture(autouse=True)
def _examined_by_a_bench(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sample_watch, "examine", lambda laboratory, *given: laboratory.examine(*given))


class Bench:
    """Stands for the laboratory."""

    batch = 16

    def __init__(self, found: Conclusion | None = None) -> None:
        self.found, self.examined = found, list[tuple[list[int], list[int]]]()  # steps of window and history
        self.loader = SimpleNamespace(go_to=lambda *_: None)

    def led(self, work: Callable[[Any], Any]) -> Any:
        return work(self)

    def examine(self, window: Sequence[Trained], history: Sequence[Trained], *_: Any) -> Conclusion:
        self.examined.append(([t.step for t in window], [t.step for t in history]))
        assert self.found is not None
        return self.found


class Made:
    """A watch, what it wrote and said, and whom it convicted."""

    def __init__(self) -> None:
        self.log, self.convicted = KeptLog(), list[Conclusion]()
        self.events = self.log.events
        order = SimpleNamespace(corpora=[SimpleNamespace(name="code")])
        incident_log: Any = SimpleNamespace(skip=lambda found, *_: self.convicted.append(found))
        parts: Any = SimpleNamespace(
            config=SimpleNamespace(stability=StabilityConfig()), log=self.log, phase=lambda phase: None,
            source=SimpleNamespace(order=order), loader=SimpleNamespace(go_to=lambda *_: None),
            select_unskipped=lambda: KEPT,
        )  # fmt: skip
        self.parts, self.watch = parts, SampleWatch(parts, incident_log)


def case(step: int, **changes: Any) -> Waiting:
    given = {"kind": "discard", "first": step, "last": step, "verdict": Verdict.SPIKE, "reason": "high"}
    return Waiting.model_validate({**given, **changes})


def test_tokens_are_read_by_batches_and_no_more_kept_than_is_looked_at(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sample_replay, "agree", lambda work: work())
    sizes = list[int]()

    def samples(positions: Int64s) -> Int64s:
        sizes.append(positions.size)
        return positions[:, None] + np.arange(2049)

    source = SimpleNamespace(samples=samples, order=SimpleNamespace(sequence_length=2048))
    laboratory: Any = SimpleNamespace(loader=SimpleNamespace(source=source), batch=16)
    laboratory._tell = lambda *_: None
    laboratory._read_tokens = partial(Laboratory._read_tokens, laboratory)
    tokens = Laboratory.tokens(laboratory, np.arange(40))
    assert sizes == [16, 16, 8] and tokens.dtype == np.int32
    assert np.array_equal(tokens, np.arange(40)[:, None] + np.arange(1025))


def test_a_case_that_has_no_room_to_wait_is_written_down() -> None:
    made = Made()
    for step in range(1, CASES + 2):
        made.watch._wait(case(step, positions=[step]))
    (event,) = made.events
    assert [waiting.first for waiting in state_of(made.watch).waiting] == list(range(2, CASES + 2))
    assert (event["event"], event["first"], event["step"]) == ("samples_dropped", 1, CASES + 1)
    assert event["positions"] == [1] and event["reason"]


@pytest.mark.parametrize("known", [False, True])
def test_a_case_of_which_nobody_can_be_examined_is_written_down(known: bool) -> None:
    """After a restart its steps are not known; or all of its samples are skipped by then."""
    made, laboratory, state = Made(), Bench(), SimpleNamespace(step=99, cursor=999)
    everyone: Any = Skips.of([(0, 16)]) if known else KEPT
    made.parts.select_unskipped = lambda: everyone
    at = np.arange(16)
    trained = [Trained(5, at, np.full(16, 3.0), True)] if known else []
    stands: Any = laboratory
    where: Any = state
    assert made.watch._examine(case(5, kind="batch"), where, trained, stands, skip_all) is None
    (event,) = made.events
    assert (event["event"], event["step"], event["first"]) == ("samples_dropped", 99, 5)
    assert event["reason"] == (LEFT_OUT if known else UNKNOWN)


def test_whole_batches_are_looked_back_on_where_there_is_a_state_of_before_them() -> None:
    policy = Policy(PolicyConfig(rewinds=1))
    made = Made()
    for waiting in (case(3), case(5, kind="batch")):
        made.watch._wait(waiting)
    assert made.watch.lifted(policy, 9, None) is None and made.watch.lifted(policy, 9, 5) is None
    found = made.watch.lifted(policy, 9, 4)
    assert found is not None and found.kind == "batch" and made.watch.lifted(policy, 9, 4) is None
    policy.decide(seen(9, Verdict.SPIKE), 0)  # all rewinds there are
    made.watch._wait(case(5, kind="batch"))
    assert made.watch.lifted(policy, 9, 4) is None


def test_another_level_is_not_examined_again_and_again() -> None:
    made = Made()
    told = Alarm(7, "higher")
    made.watch._test.observe = lambda *_: told  # type: ignore[method-assign]
    order: Any = made.parts.source.order
    order.locate = lambda positions: SimpleNamespace(corpus=np.zeros(positions.size, np.int64))
    batch: Any = SimpleNamespace(positions=np.arange(16))
    measured: Any = SimpleNamespace(losses=torch.zeros(16), grad_norm=1.0)

    def waits(step: int) -> bool:
        made.watch.observe(batch, measured, True, step)
        found = made.watch._waiting[:]
        made.watch._waiting.clear()
        return bool(found)

    assert waits(8)
    made.watch.nobody(case(7), Conclusion(Cause.STATE, [], [], "harmless"), 8, 0.1)
    assert waits(9)
    made.watch.nobody(case(7, kind="batch"), Conclusion(Cause.STATE, [], [], "harmless"), 9, 0.1)
    assert not waits(10) and state_of(made.watch).rest.until == 73
    assert not waits(72) and waits(73)


def fruitless(watch: SampleWatch, step: int) -> int:
    """Steps of rest after a look at `step` that convicted nobody."""
    watch.nobody(case(step, kind="batch"), Conclusion(Cause.STATE, [], [], "harmless"), step, 0.1)
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


def test_the_rest_is_kept_by_rewinds_and_restarts_and_short_again_where_somebody_is_guilty() -> None:
    watch = Made().watch
    early = watch.state_dict()
    assert [fruitless(watch, step) for step in (10, 100)] == [64, 128]
    late = watch.state_dict()
    watch.rewound(5, early)
    assert state_of(watch).rest.until == 228 and fruitless(watch, 228) == 256
    again = Made().watch
    again.load_state_dict(json.loads(json.dumps(late)))
    assert state_of(again).rest.until == 228 and fruitless(again, 228) == 256
    watch.convicted(case(5, kind="discard"))
    assert fruitless(watch, 500) == 512
    watch.convicted(case(5, kind="batch"))
    watch.rewound(5, late)
    assert state_of(watch).rest.until == 1012 and fruitless(watch, 1012) == 64


def test_a_sample_that_cannot_be_read_again_is_told_and_ends_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    made = Made()

    def unreadable(*_: Any) -> Any:
        raise DataError("shard-7.bin: a read error")

    monkeypatch.setattr(sample_watch, "examine", unreadable)
    made.watch._waiting.append(case(18, positions=[3]))
    made.watch._quiet = 3
    assert act(made, 20) == []
    (event,) = made.events
    assert event["event"] == "samples_dropped" and "shard-7.bin" in event["reason"]
    assert not state_of(made.watch).waiting


def act(made: Made, step: int, calm: bool = True, laboratory: Any = None) -> list[Conclusion]:
    state: Any = SimpleNamespace(cursor=16 * step, step=step)
    trained = [Trained(n, 16 * n + np.arange(16), np.full(16, 3.0), True) for n in range(1, step + 1)]
    return made.watch.act(state, trained, laboratory or Bench(), calm, skip_all)


def skip_all(found: Conclusion, *_: object) -> tuple[Conclusion, str]:
    return found, ""


def test_a_case_is_examined_after_quiet_steps_and_its_bad_samples_are_skipped() -> None:
    """Only what came before its steps is harmless for sure."""
    made, bench = Made(), Bench(Conclusion(Cause.DATA, [49], [], "bad"))
    made.watch._wait(case(3, kind="batch", last=5))
    for step, calm in ((10, True), (11, False), (12, True), (13, True), (14, True)):
        assert act(made, step, calm, bench) == [] and not bench.examined
    assert act(made, 15, True, bench) == [bench.found] == made.convicted
    assert bench.examined == [([3, 4, 5], [1, 2])] and not state_of(made.watch).waiting


def test_suspicions_of_whole_batches_are_one_case_since_the_first() -> None:
    made = Made()
    made.watch._wait(case(4))
    for onset, step in ((7, 9), (8, 12), (6, 14)):
        made.watch._suspect(Alarm(onset, "higher"), step)
    refused, batch = state_of(made.watch).waiting
    assert refused.kind == "discard"
    assert (batch.kind, batch.first, batch.last, batch.verdict) == ("batch", 6, 14, Verdict.SHIFT)


def test_suspects_that_are_new_clear_the_cases_that_wait_behind_them() -> None:
    """What was usual is forgotten while a case is examined; the other cases are told, and nothing fails."""
    made, bench = Made(), Bench(Conclusion(Cause.DATA, [49], [], "bad"))
    for step in (3, 5):
        made.watch._wait(case(step, positions=[16 * step]))

    def train_through(found: Conclusion, *_: object) -> tuple[Conclusion, str]:
        made.watch.begin_again()
        return found, "they are new"

    state: Any = SimpleNamespace(cursor=320, step=20)
    made.watch._quiet = 3
    assert made.watch.act(state, [], bench, True, train_through) == []  # type: ignore[arg-type]
    assert sorted((event["event"], event["first"]) for event in made.events) == [
        ("discard_examined", 3),
        ("samples_dropped", 5),
    ]
