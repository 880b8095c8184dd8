"""The cases of single samples alone: on a corpus and losses that are made up, without a model."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch

from megastable.base.errors import DataError
from megastable.config.stability import PolicyConfig, StabilityConfig
from megastable.data.skips import Skips
from megastable.recovery import new_kinds, sample_replay
from megastable.recovery.by_heart import NOBODY, ByHeart
from megastable.recovery.sample_replay import Known, Laboratory, Trained
from megastable.recovery.sample_watch import CASES, LEFT_OUT, MOST, UNKNOWN, SampleWatch
from megastable.stability import novelty
from megastable.stability.actions import Cause
from megastable.stability.attribution import Conclusion
from megastable.stability.policy import Policy
from megastable.stability.sample_history import Alarm, AlarmKind, Rest, Scored, Waiting, WatchState
from megastable.stability.signals import Verdict
from megastable.stability.suspects import Seen
from tests.journal import KeptLog
from tests.stability.policies import seen

Int64s = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]
KEPT = Skips.of([])


class Texts:
    """Stands for the laboratory: a loss of 3 and any of 1000 tokens, but for samples that repeat themselves.

    tables: those that repeat something else. read: how many samples' tokens were asked for."""

    def __init__(self, batch: int, repeated: set[int], tables: Int64s | None = None) -> None:
        self.batch, self.read = batch, 0
        self.tables = np.empty(0, np.int64) if tables is None else tables
        self.repeated = np.union1d(sorted(repeated), self.tables)
        self.loader = SimpleNamespace(go_to=lambda *_: None)

    def corpora(self, positions: Int64s) -> Int64s:
        return np.zeros(positions.size, np.int64)

    def losses(self, positions: Int64s) -> Floats:
        spread = 0.3 * np.random.default_rng(1).standard_normal(positions.size)
        return np.where(np.isin(positions, self.repeated), 0.1, 3 + spread)

    def tokens(self, positions: Int64s) -> Int64s:
        self.read += positions.size
        text = np.random.default_rng(2).integers(1000, size=(positions.size, 64))
        repeated = np.where(np.isin(positions, self.tables), 11, 7)[:, None]
        return np.where(np.isin(positions, self.repeated)[:, None], repeated, text)

    def led(self, work: Callable[[Any], Any]) -> Any:
        return work(self)

    def usual(self, *_: Any) -> Known:
        positions = np.arange(-1000, 0)
        return Known(positions, self.losses(positions), self.corpora(positions))

    def examined(self, made: Made, steps: int) -> set[int]:
        """Who is convicted where all of so many steps were easy, and the alarm came right then."""
        trained = [
            Trained(step, at, self.losses(at), True) for step, at in enumerate(self._batches(steps), 1)
        ]
        state: Any = SimpleNamespace(cursor=steps * self.batch, step=steps)
        stand_in: Any = self
        made.watch._examine(case(1, kind="easy", last=steps), state, trained, stand_in)
        return {position for found in made.convicted for position in found.convicted}

    def _batches(self, steps: int) -> Int64s:
        return np.arange(steps * self.batch).reshape(steps, -1)


class Made:
    """A watch, what it wrote and said, and whom it convicted."""

    def __init__(self) -> None:
        self.log, self.convicted = KeptLog(), list[Conclusion]()
        self.events = self.log.events
        order = SimpleNamespace(corpora=[SimpleNamespace(name="code")])
        incident_log = SimpleNamespace(
            source=SimpleNamespace(order=order), skip=lambda found, *_: self.convicted.append(found)
        )
        made: Any = incident_log
        self.watch = SampleWatch(
            StabilityConfig(), made, self.log, lambda phase: None,
            lambda: KEPT,  # type: ignore[arg-type, return-value]
        )  # fmt: skip


def case(step: int, **changes: Any) -> Waiting:
    given = {"kind": "discard", "first": step, "last": step, "verdict": Verdict.SPIKE, "reason": "high"}
    return Waiting.model_validate({**given, **changes})


def test_both_tests_are_told_who_is_convicted() -> None:
    made, told = Made(), list[list[int]]()
    for test in (made.watch._test, made.watch._easy):
        test.convict = told.append  # type: ignore[method-assign, assignment]
    laboratory: Any = SimpleNamespace(
        examine=lambda *_: Conclusion(Cause.DATA, [3], [], "bad"),
        loader=SimpleNamespace(go_to=lambda *_: None),
    )
    laboratory.led = lambda work: work(laboratory)
    state: Any = SimpleNamespace(cursor=99, step=9)
    found = made.watch._examine(case(5, positions=[3, 4], losses=[9.0, 3.0]), state, [], laboratory)
    assert found and told == [[3], [3]]


@pytest.mark.slow
def test_no_more_of_an_easy_region_is_read_than_is_needed() -> None:
    steps = 40
    texts, made = Texts(1024, set(range(42 * 1024))), Made()
    guilty = texts.examined(made, steps)
    assert set(range(steps * 1024 - MOST, 42 * 1024)) == guilty and texts.read < MOST + 8 * 1024


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
    laboratory.read_tokens = partial(Laboratory.read_tokens, laboratory)
    tokens = Laboratory.tokens(laboratory, np.arange(40))
    assert sizes == [16, 16, 8] and tokens.dtype == np.int32
    assert np.array_equal(tokens, np.arange(40)[:, None] + np.arange(1025))


@pytest.mark.parametrize(("batch", "bad"), [(16, 8), (1024, 2)])
def test_harmless_samples_of_few_tokens_do_not_carry_an_easy_region_on(batch: int, bad: int) -> None:
    """Tables and lists are half a hundredth of what is read: four steps and `bad` batches ahead repeat themselves."""
    end = (4 + bad) * batch
    tables = end + np.flatnonzero(np.random.default_rng(0).random(40 * batch) < 0.005)
    texts, made = Texts(batch, set(range(end)), tables), Made()
    assert texts.examined(made, 4) == set(range(end))
    assert bad + 3 <= made.watch.state.looked <= bad + 6


class Counting:
    """A selection that passes over every fifth position, and counts those that it was asked for."""

    def __init__(self) -> None:
        self.skips, self.asked = Skips.of([(first, first + 1) for first in range(0, 200_000, 5)]), 0

    def next_kept(self, cursor: int, count: int) -> tuple[Int64s, int]:
        self.asked += count
        return self.skips.next_kept(cursor, count)


def by_heart(texts: Texts, window: Sequence[Trained], met: Seen, selection: Any) -> ByHeart:
    positions = np.arange(-1000, 0)
    usual = Seen(positions, texts.losses(positions), texts.corpora(positions))
    laboratory: Any = texts
    return ByHeart(laboratory, window, met, usual, 7, selection, 64, 3.0)


@pytest.mark.parametrize("order", [range(1000), range(999, -1, -1), (0, 3, 9, 21, 45, 700, 15, 999, 1)])
def test_the_batches_ahead_are_those_of_the_run_and_no_position_is_asked_for_twice(
    order: Sequence[int],
) -> None:
    texts, selection = Texts(16, set()), Counting()
    search = by_heart(texts, [], Seen(*3 * [np.empty(0)]), selection)
    line, _ = selection.skips.next_kept(7, 16_000)
    for number in order:
        assert np.array_equal(search._batch(number), line[16 * number : 16 * (number + 1)])
    assert selection.asked <= 2 * 16_000


@pytest.mark.parametrize("bad", [0, 32])
def test_where_the_last_steps_are_left_out_already_nobody_is_named(bad: int) -> None:
    """They were skipped meanwhile: what is left of the window says nothing of what comes next."""
    texts = Texts(16, set(range(bad)))
    window = [Trained(n, at, texts.losses(at), True) for n, at in enumerate(texts._batches(6), 1)]
    left = np.arange(4 * 16)
    met = Seen(left, texts.losses(left), texts.corpora(left))
    assert by_heart(texts, window, met, Counting()).conclude() is NOBODY


def test_a_case_that_has_no_room_to_wait_is_written_down() -> None:
    made = Made()
    for step in range(1, CASES + 2):
        made.watch._wait(case(step, positions=[step]))
    (event,) = made.events
    assert [waiting.first for waiting in made.watch.state.waiting] == list(range(2, CASES + 2))
    assert (event["event"], event["first"], event["step"]) == ("samples_dropped", 1, CASES + 1)
    assert event["positions"] == [1] and event["reason"]


@pytest.mark.parametrize(("kind", "known"), [("batch", False), ("batch", True), ("trickle", False)])
def test_a_case_of_which_nobody_can_be_examined_is_written_down(kind: str, known: bool) -> None:
    """After a restart its steps are not known; or all of its samples are skipped by then."""
    made, laboratory, state = Made(), Texts(16, set()), SimpleNamespace(step=99, cursor=999)
    everyone: Any = Skips.of([(0, 16)]) if known else KEPT
    made.watch.selection = lambda: everyone
    at = np.arange(16)
    trained = [Trained(5, at, laboratory.losses(at), True)] if known else []
    stands: Any = laboratory
    where: Any = state
    assert made.watch._examine(case(5, kind=kind), where, trained, stands) is None
    (event,) = made.events
    assert (event["event"], event["step"], event["first"]) == ("samples_dropped", 99, 5)
    assert event["reason"] == (LEFT_OUT if known else UNKNOWN)


def test_whole_batches_are_looked_back_on_where_there_is_a_state_of_before_them() -> None:
    policy = Policy(PolicyConfig(rewinds=1))
    made = Made()
    for waiting in (case(3, kind="trickle"), case(5, kind="batch")):
        made.watch._wait(waiting)
    assert made.watch.lifted(policy, 9, None) is None and made.watch.lifted(policy, 9, 5) is None
    found = made.watch.lifted(policy, 9, 4)
    assert found is not None and found.kind == "batch" and made.watch.lifted(policy, 9, 4) is None
    policy.decide(seen(9, Verdict.SPIKE), 0)  # all rewinds there are
    made.watch._wait(case(5, kind="batch"))
    assert made.watch.lifted(policy, 9, 4) is None


def test_another_level_is_not_examined_again_and_again() -> None:
    made = Made()
    alarm = Alarm(AlarmKind.BATCH, 7, "higher")
    scored = Scored(np.zeros(16), 4.0)
    for test, told in ((made.watch._test, alarm), (made.watch._easy, None)):
        test.observe = lambda *_, told=told: (scored, told)  # type: ignore[method-assign]
    order: Any = made.watch.incident_log.source.order
    order.locate = lambda positions: SimpleNamespace(corpus=np.zeros(positions.size, np.int64))
    batch: Any = SimpleNamespace(positions=np.arange(16))
    measured: Any = SimpleNamespace(losses=torch.zeros(16), grad_norm=1.0)

    def waits(step: int) -> bool:
        made.watch.observe(batch, measured, True, step)
        found = made.watch._waiting[:]
        made.watch._waiting.clear()
        return bool(found)

    assert waits(8)
    made.watch.nobody(case(7, kind="trickle"), Conclusion(Cause.STATE, [], [], "harmless"), 8, 0.1)
    assert waits(9)
    made.watch.nobody(case(7, kind="batch"), Conclusion(Cause.STATE, [], [], "harmless"), 9, 0.1)
    assert not waits(10) and made.watch.state.rest == 73
    assert not waits(72) and waits(73)


def fruitless(watch: SampleWatch, step: int) -> int:
    """Steps of rest after a look at `step` that convicted nobody."""
    watch.nobody(case(step, kind="batch"), Conclusion(Cause.STATE, [], [], "harmless"), step, 0.1)
    return watch.state.rest - step


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
    early = watch.state
    assert [fruitless(watch, step) for step in (10, 100)] == [64, 128]
    late = watch.state
    watch.rewind(early)
    assert watch.state.rest == 228 and fruitless(watch, 228) == 256
    again = Made().watch
    again.rewind(WatchState.model_validate_json(late.model_dump_json()))
    assert again.state.rest == 228 and fruitless(again, 228) == 256
    watch.convicted(case(5, kind="discard"))
    assert fruitless(watch, 500) == 512
    watch.convicted(case(5, kind="batch"))
    watch.rewind(late)
    assert watch.state.rest == 1012 and fruitless(watch, 1012) == 64


def test_new_kinds_are_looked_for_now_and_then_where_the_state_is_good(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made, looks, found = Made(), list[int](), list[Waiting]()
    step = 0

    def look(*_: Any) -> list[Waiting]:
        looks.append(step)
        return list(found)

    monkeypatch.setattr(new_kinds, "look", look)

    def concluded(watch: SampleWatch, *_: Any) -> Conclusion:
        watch._looked += ahead
        return Conclusion(Cause.STATE, [], [], "no worse than others")

    monkeypatch.setattr(SampleWatch, "_concluded", concluded)
    ahead = 4
    laboratory: Any = Texts(16, set())

    def act(until: int, ordinary: bool = True) -> None:
        nonlocal step
        while step < until:
            step += 1
            state: Any = SimpleNamespace(cursor=16 * step, step=step)
            made.watch._ordinary = ordinary
            made.watch.act(state, [], laboratory, True, True)

    every = novelty.PERIOD
    act(2 * every + 2)
    assert looks == [1, 1 + every, 1 + 2 * every]
    made.watch._waiting.append(case(step, kind="trickle", positions=[3]))
    act(step + 1)
    suspected = step
    assert looks[3:] == [suspected], "and where losses suspect somebody"
    act(40, ordinary=False)
    assert len(looks) == 4
    found.append(case(40, kind="kind"))
    act(300)
    assert looks[4:] == [41, 41 + 64, 41 + 64 + 128], "rarer and rarer where nobody is guilty"
    assert [(e["event"], e["step"]) for e in made.events] == [
        ("samples_examined", n) for n in (suspected, *looks[4:])
    ]
    watch = Made().watch
    watch.rewind(WatchState.model_validate_json(made.watch.state.model_dump_json()))
    assert watch.state.kinds == made.watch.state.kinds and watch.state.kinds.until == 233 + 256
    watch.rewind(WatchState())
    assert watch.state.kinds.until == 233 + 256, "a rewind does not look again"
    watch.convicted(case(5, kind="kind"))
    assert watch.state.kinds.steps == 0 and watch.state.rest == 0
    made.watch._kinds, ahead = Rest(), 0
    looks.clear()
    act(500)
    assert looks == [301, 305, 313, 329, 361, 425, 489], "too few to be told may soon be more"


def test_a_sample_that_cannot_be_read_again_is_told_and_ends_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    made = Made()

    def unreadable(*_: Any) -> Any:
        raise DataError("shard-7.bin: a read error")

    monkeypatch.setattr(new_kinds, "look", unreadable)
    monkeypatch.setattr(SampleWatch, "_concluded", unreadable)
    made.watch._waiting.append(case(18, kind="trickle", positions=[3]))
    made.watch._ordinary = True
    laboratory: Any = Texts(16, set())
    state: Any = SimpleNamespace(cursor=320, step=20)
    assert made.watch.act(state, [], laboratory, True, True) == []
    assert [(e["event"], "shard-7.bin" in str(e)) for e in made.events] == [
        ("samples_dropped", True), ("warning", True)
    ]  # fmt: skip
    assert made.watch.state.kinds.until == 84 and not made.watch.state.waiting
