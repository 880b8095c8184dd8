"""Incidents as they are written down: enough for the next process, and said when it cannot be."""

from __future__ import annotations

import math
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch.distributed as dist

from megastable.attribution.conclusion import Conclusion, Suspect
from megastable.attribution.sample_replay import Trained
from megastable.base import errors
from megastable.base.errors import DataError, SpaceError
from megastable.checkpoint.store import LayoutState, RunState
from megastable.data.blends import ExchangeEntry, read_blends
from megastable.data.corpora import open_corpora
from megastable.data.order import LAST_POSITION
from megastable.data.plant import Planted
from megastable.data.skip_ledger import (
    Ledger,
    SampleEntry,
    SkipEntry,
    append_all,
    read_ledger,
    sample_entries,
)
from megastable.data.skipping import Skipping
from megastable.data.skips import Selection, ranges_of
from megastable.recovery.incident_log import NAMED, IncidentLog
from megastable.recovery.persisted_state import TELLING, recall
from megastable.run.directory import RunDirectory
from megastable.run.events.stability_events import IncidentEvent
from megastable.run.log import RunLog
from megastable.training.summary import incidents
from megastable_guard.actions import Action, Cause, Decision
from megastable_guard.guard_config import PolicyConfig
from megastable_guard.policy import Policy
from megastable_guard.policy_state import PolicyState
from megastable_guard.signals import Finding, Verdict
from tests.conftest import tiny
from tests.distributed import run_ranks
from tests.full_disk import files_no_larger_than
from tests.journal import note
from tests.recovery.test_recovery import planted, recipe, train
from tests.training.test_failures import train as train_with

__all__ = ["planted"]

WINDOW = [
    Trained(step, np.arange(8 * step, 8 * step + 8), np.full(8, 5.0), step < 33) for step in (31, 32, 33)
]


STEPS = 400  # of the run; the window is far before its end


def steps_of(first: int, last: int) -> list[Trained]:
    """Steps that read 8 positions each, step 1 from position 8 on."""
    return [
        Trained(step, np.arange(8 * step, 8 * step + 8), np.full(8, 5.0), True)
        for step in range(first, last + 1)
    ]


def decision(action: Action) -> Decision:
    return Decision(action, Finding(33, Verdict.SPIKE, 1.5, 31, "up"), "the loss is up")


def state(step: int = 33) -> RunState:
    layout = LayoutState(tensor=1, pipeline=1, data=1, zero=1, precision="fp32")
    return RunState(step=step, order_fingerprint="abc", layout=layout, recent_losses=[2.0, 2.5])


class Book:
    """A incident_log on a run directory, with a policy's memory that counts its clock up."""

    def __init__(self, corpus: Path, folder: Path) -> None:
        folder.mkdir(exist_ok=True)
        self.run, self.said, self.policy = RunDirectory(folder), list[str](), PolicyState(clock=33)
        self.config = tiny(corpus, folder, train={"steps": STEPS})
        self.source = open_corpora(self.config.data.corpora, 32, 0).train
        log = RunLog(self.run, self.said.append, active=dist.get_rank() == 0)
        parts: Any = SimpleNamespace(
            config=self.config, run=self.run, source=self.source, log=log, select_unskipped=self.selection
        )
        guard: Any = SimpleNamespace(policy=SimpleNamespace(state=self.policy))
        self.book = IncidentLog(parts, guard)

    def selection(self) -> Selection:
        return Skipping(self.config, self.run).selection(self.source.order)

    def open(self, action: Action = Action.REWIND) -> None:
        self.book.open(decision(action), state(), WINDOW, 9.0)

    def attribute(
        self, cause: Cause, guilty: list[int], swap: str | None = None, window: list[Trained] = WINDOW
    ) -> None:
        found = Conclusion(cause, guilty, [], "so it is")
        action = Action.REWIND if swap is None else Action.SWAP_CORPUS
        self.book.attribute(found, window, action, "and so on", 3, 0.5, swap)

    @property
    def skipped(self) -> list[tuple[int, int, str | None]]:
        """By position."""
        return [(e.first, e.end, e.corpus) for e in read_ledger(self.run.skips) if isinstance(e, SkipEntry)]

    @property
    def convicted(self) -> list[int]:
        """The positions of the first epoch that are left out by identity."""
        order = self.source.order
        named = [e for e in read_ledger(self.run.skips) if isinstance(e, SampleEntry)]
        chosen = Selection(order, Ledger(named).exclusions)
        return chosen.named_between(0, order.sequences[0]).tolist()

    def shown(self) -> list[tuple[int, str, Any]]:
        return [(i["number"], i["outcome"], i["action"]) for i in incidents(self.run, self.config)]


@pytest.fixture
def book(corpus: Path, tmp_path: Path) -> Iterator[Book]:
    """On the one rank of a process group of its own."""
    dist.init_process_group("gloo", f"file://{tmp_path}/rendezvous", rank=0, world_size=1)
    yield Book(corpus, tmp_path / "run")
    dist.destroy_process_group()


def test_only_the_guilty_are_skipped_and_where_there_are_none_the_window_is_read_later(book: Book) -> None:
    for cause, guilty, ranges in (
        (Cause.DATA, [250, 251, 260], [(250, 252), (260, 261)]),
        (Cause.STATE, [], []),
        (Cause.NUMERICS, [], []),
        (Cause.LEARNING_RATE, [], []),
        (Cause.HARDWARE, [], []),
    ):
        before = book.source.order
        book.open()
        book.attribute(cause, guilty)
        assert book.convicted == [250, 251, 260] and book.skipped == []
        assert book.book.incident is not None and book.book.incident.positions == ranges
        deferred = [p for p in range(248, 272) if p not in (250, 251, 260)] if cause is Cause.STATE else []
        assert book.book.incident.deferred == ranges_of(np.array(deferred, dtype=np.int64))
        assert bool(book.book.incident.documents) == (cause is Cause.DATA)
        if deferred:
            (entry,) = (e for e in read_blends(book.run.blends) if isinstance(e, ExchangeEntry))
            assert entry.incident == 2 and entry.step == 31 and entry.reason == "state: so it is"
            there = book.source.order.deferred(0, 10**6)
            assert (
                book.source.order.locate(there).sequence.tolist() == before.locate(deferred).sequence.tolist()
            )
            assert there.tolist() == [p for a, b in book.book.incident.returns for p in range(a, b)]
            at = int(there[0])
            assert (
                f"  deferred: 21 samples (positions 248-249, 252-259, 261-271), read again from position {at} "
                in (" ".join(book.said))
            )
        else:
            assert book.source.order is before
        book.book.close(state(70), "healed")
    assert book.shown() == [(number, "healed", "rewind") for number in (1, 2, 3, 4, 5)]


def test_where_the_run_ends_too_soon_samples_are_lost_in_this_epoch_and_that_is_said(book: Book) -> None:
    end = STEPS + 1
    book.open()
    book.attribute(Cause.STATE, [], window=steps_of(end - 3, end - 1))
    first = 8 * (end - 3)
    incident = book.book.incident
    assert incident is not None and incident.deferred == [] and incident.positions == [(first, first + 24)]
    assert book.skipped == [(first, first + 24, None)]
    assert "  lost in this epoch: 24 samples: the run ends before there is room" in book.said


@pytest.mark.parametrize("left_out", [[], [SkipEntry(first=3150, end=LAST_POSITION, reason="a person did")]])
def test_samples_ahead_that_nobody_met_are_never_lost(left_out: list[SkipEntry], book: Book) -> None:
    """Where there is no room for all of them, fewer are put off, and the window has what room there is."""
    book.book.open(decision(Action.REWIND), state(391), WINDOW, 9.0)
    book.attribute(Cause.STATE, [], window=steps_of(388, 390))  # up to position 3128; the run ends at 3208
    append_all(book.run.skips, left_out)
    window, incident = steps_of(391, 391), book.book.incident
    assert incident is not None and book.book.adjacent(window)
    book.attribute(Cause.STATE, [], window=window)
    assert incident.lost == 0 and incident.positions == []
    assert sum(b - a for a, b in incident.deferred) == 24 + 8 + (2 if left_out else 20)


def test_trouble_that_goes_on_behind_what_was_left_out_is_adjacent_and_defers_ever_more(book: Book) -> None:
    assert not book.book.adjacent(WINDOW)
    book.open()
    book.attribute(Cause.STATE, [])  # 24 samples, up to position 272
    assert book.book.adjacent(steps_of(34, 35)) and book.book.adjacent(steps_of(33, 34))
    assert book.book.adjacent(steps_of(36, 37)) and not book.book.adjacent(steps_of(37, 38))
    assert not book.book.adjacent(steps_of(31, 33))  # the same again is no neighbour
    late = [Trained(step + 201, t.positions, t.losses, True) for step, t in enumerate(steps_of(34, 35), 33)]
    assert not book.book.adjacent(late)
    for window, count in ((steps_of(34, 35), 48), (steps_of(40, 41), 96)):
        before = book.book.incident
        assert before is not None and book.book.adjacent(window)
        known = sum(b - a for a, b in before.deferred)
        book.attribute(Cause.STATE, [], window=window)
        assert sum(b - a for a, b in before.deferred) - known == count
    # It is known to the next process, from the journal alone.
    memory = recall({}, book.run.events(*TELLING))
    assert (
        memory.left_out == book.book.left_out and memory.left_out is not None and memory.left_out.count == 96
    )
    book.book.close(state(70), "healed")
    after = recall({}, book.run.events(*TELLING))
    assert after.left_out == memory.left_out and after.incident is None


def test_samples_that_come_back_with_trouble_are_convicted(book: Book) -> None:
    """Those of the first two batches of a stretch, where it begins there: the others are put off once more."""
    nobody = Conclusion(Cause.STATE, [], [], "all are harmless")
    assert book.book.returned_again(nobody, WINDOW) is nobody
    book.open()
    book.attribute(Cause.STATE, [], window=steps_of(31, 36))
    book.book.close(state(70), "healed")
    returns = book.source.order.deferred(0, 10**6)
    step = int(returns[0]) // 8
    assert len(returns) == 48 and (np.diff(returns) == 1).all()
    for first in (step - 1, step, step + 1):
        found = book.book.returned_again(nobody, steps_of(first, first + 3))
        assert found.cause is Cause.DATA and found.guilty == returns[:16].tolist()
        assert found.later == [p for p in returns[16:].tolist() if p < 8 * (first + 4)]
        assert "16 samples came with trouble before" in found.reason and "all are harmless" in found.reason
    assert book.book.returned_again(nobody, steps_of(step, step)).guilty == returns[:8].tolist()
    # It did not begin with them, or where they do not begin.
    for window in (
        steps_of(step - 5, step + 1),
        steps_of(step + 3, step + 5),
        steps_of(step + 20, step + 22),
    ):
        assert book.book.returned_again(nobody, window) is nobody
    for other in (Conclusion(Cause.DATA, [1], [], ""), Conclusion(Cause.HARDWARE, [], [], "")):
        assert book.book.returned_again(other, steps_of(step, step + 4)) is other
    window, before = steps_of(step, step + 3), book.source.order
    found = book.book.returned_again(nobody, window)
    book.open()
    book.book.attribute(found, window, Action.REWIND, "and so on", 3, 0.5)
    left, incident = book.selection(), book.book.incident
    assert np.flatnonzero(left.mask(np.arange(returns[-1] + 1))).tolist() == found.guilty
    assert incident is not None and incident.deferred == ranges_of(returns[16:32])
    places = np.concatenate([np.arange(a, b) for a, b in incident.returns])
    put_off = before.locate(returns[16:32]).sequence.tolist()
    assert book.source.order.locate(places).sequence.tolist() == put_off


def test_samples_that_come_back_with_trouble_may_be_released(book: Book) -> None:
    book.open()
    book.attribute(Cause.STATE, [])
    returns = book.source.order.deferred(0, 10**6)
    step = int(returns[0]) // 8
    found = book.book.returned_again(
        Conclusion(Cause.STATE, [], [], "all are harmless"), steps_of(step, step + 1)
    )
    policy = Policy(PolicyConfig())
    policy.decide(Finding(step, Verdict.SPIKE, 1.5, step, "up"), oldest=0)
    assert policy.remedy(found.cause, 0, "text", "", found.proven, found.guilty).cause is Cause.DATA
    assert found.guilty and policy.state.taken[-1].unproven == tuple(found.guilty)


def test_a_conviction_is_withdrawn_and_may_be_made_again(book: Book) -> None:
    others = [*sample_entries(book.source.order, np.array([262]), "a person did")]
    append_all(book.run.skips, others)
    book.open()
    book.attribute(Cause.DATA, [250, 251, 260, 261, 262])
    book.book.release([250, 261, 262], cursor=256, reason="the rate was too high")
    left = book.selection()
    assert np.flatnonzero(left.mask(np.arange(400))).tolist() == [251, 260, 262]
    assert book.book.incident is not None and book.book.incident.positions == [
        (251, 252),
        (260, 261),
        (262, 263),
    ]
    (event,) = [e for e in book.run.events(IncidentEvent) if e["what"] == "released"]
    assert event["positions"] == [[261, 262]] and event["next_epoch"] == [[250, 251]]
    assert (
        "  released: 2 samples (the rate was too high): 1 are read again from position 261 on, 1 were passed and are "
        "read in the next epoch"
    ) in book.said
    epoch = book.source.order.sequences[0]
    assert left.named_between(epoch, 2 * epoch).size == 3
    book.attribute(Cause.DATA, [250])
    assert np.flatnonzero(book.selection().mask(np.arange(400))).tolist() == [250, 251, 260, 262]
    ever = Selection(book.source.order, Ledger.read(book.run.skips).ever.exclusions)
    assert np.flatnonzero(ever.mask(np.arange(400))).tolist() == [250, 251, 260, 261, 262]


def test_samples_are_skipped_also_where_their_documents_cannot_be_named(
    book: Book, monkeypatch: pytest.MonkeyPatch
) -> None:
    def damaged(*_: Any) -> Any:
        raise DataError("part-0.idx is damaged")

    monkeypatch.setattr("megastable.recovery.incident_log.documents_at", damaged)
    book.open()
    with pytest.raises(DataError, match="damaged"):
        book.attribute(Cause.DATA, [250])
    assert book.convicted == [250]


def test_a_corpus_is_swapped_out_from_the_first_guilty_sample_on(book: Book) -> None:
    name = book.source.order.corpora[0].name
    book.open()
    book.attribute(Cause.DATA, [260, 262], swap=name)
    assert book.skipped == [(260, LAST_POSITION, name)] and book.convicted == [260, 262]
    assert f"  swapped out: corpus {name}" in book.said


def test_the_documents_of_an_incident_do_not_fill_the_journal(book: Book) -> None:
    book.open()
    for first in (0, 800):
        book.attribute(Cause.DATA, list(range(first, first + 600)))
    assert book.book.incident is not None and len(book.book.incident.documents) <= NAMED


@pytest.mark.parametrize("defer", [True, False])
@pytest.mark.parametrize("action", [Action.HANDOVER, Action.STOP])
def test_a_handover_defers_the_window_unless_it_is_innocent_and_a_stop_nothing(
    action: Action, defer: bool, book: Book
) -> None:
    """Nothing says that the next start goes back behind a stop: the order that a checkpoint came by must stay."""
    corpora = open_corpora(book.config.data.corpora, 32, 0)
    known = corpora.train.order.fingerprint(corpora.fingerprints, before=400)
    book.open(action)
    incident = book.book.give_up(decision(action), state(), WINDOW, defer)
    handed_over = action is Action.HANDOVER
    assert incident.deferred == ([(248, 272)] if defer and handed_over else [])
    same = book.source.order.fingerprint(corpora.fingerprints, before=400) == known
    assert same is not (defer and handed_over)
    assert book.skipped == [] and incident.positions == []
    outcome = "handed over" if action is Action.HANDOVER else "stopped"
    assert book.shown() == [(1, outcome, action)] and book.book.incident is None
    assert book.run.handed_over() == (31 if action is Action.HANDOVER else None)
    memory = recall({}, book.run.events(*TELLING))
    assert (memory.incidents, memory.guard.policy) == (1, book.policy)
    # What is handed over goes on in the next process, which has done the steps since its checkpoint again.
    assert (memory.incident is None) is (action is Action.STOP)
    if memory.incident is not None:
        book.book.restore(memory.incident, 1, state(20))
        assert book.shown() == [(1, "open", action)] and memory.incident.steps_lost == 13


def test_giving_up_again_over_samples_that_were_put_off_puts_them_off_again(book: Book) -> None:
    """Without a snapshot nobody can be examined: nobody is convicted."""
    book.open(Action.HANDOVER)
    book.book.give_up(decision(Action.HANDOVER), state(), WINDOW, True)
    returns = book.source.order.deferred(0, 10**6)
    window = steps_of(int(returns[0]) // 8, int(returns[-1]) // 8)
    book.open(Action.HANDOVER)
    again = book.book.give_up(decision(Action.HANDOVER), state(), window, True)
    assert again.deferred == ranges_of(np.concatenate([t.positions for t in window]))
    assert again.positions == [] and not read_ledger(book.run.skips)
    assert again.cause is not Cause.DATA


def test_the_next_process_goes_on_from_every_point(book: Book) -> None:
    """Whenever it ends: the open incident and the policy as they were, from the journal alone."""

    def known() -> None:
        memory = recall({}, book.run.events(*TELLING))
        assert memory.incident == book.book.incident and memory.guard.policy == book.policy
        assert memory.incidents == book.book.count

    book.open()
    known()
    book.policy.taken, book.policy.clock = [], 34
    book.attribute(Cause.DATA, [250])
    known()
    book.book.rewound(30, 240)
    known()
    assert book.shown() == [(1, "open", "rewind")]
    book.policy.clock = 60
    book.book.close(state(60), "healed")
    known()
    memory = recall({}, book.run.events())
    book.book.restore(memory.incident, memory.incidents, state(0))
    book.open()
    known()
    assert book.shown() == [(1, "healed", "rewind"), (2, "open", None)]


class Killed(BaseException):
    """The end of the process."""


@pytest.mark.parametrize("what", ["attributed", "released", "deferred", "skipped alone"])
@pytest.mark.parametrize("after_the_ledger", [True, False])
def test_killed_between_the_ledger_and_the_journal_the_next_process_tells_what_the_ledger_holds(
    book: Book, monkeypatch: pytest.MonkeyPatch, what: str, after_the_ledger: bool
) -> None:
    """And nothing twice. Killed before the ledger has it, nothing is left out, and nothing is told."""
    guilty = [250, 251, 260]
    book.policy.watching = what != "skipped alone"
    if what != "skipped alone":
        book.open()
    if what == "released":
        book.attribute(Cause.DATA, guilty)

    def die(*_: object, **__: object) -> None:
        raise Killed

    def act() -> None:
        if what == "released":
            book.book.release([250, 251], 240, "innocent")
        elif what == "skipped alone":
            found = Conclusion(Cause.DATA, guilty, [], "so it is")
            book.book.skip(found, 31, WINDOW, Verdict.SHIFT, "seen", state(), 0.1)
        else:
            book.attribute(Cause.DATA if what == "attributed" else Cause.STATE, guilty)

    with monkeypatch.context() as patch:
        if after_the_ledger:
            patch.setattr(book.book, "_commit", die)
        else:
            patch.setattr("megastable.data.skipping.append_all", die)
        with pytest.raises(Killed):
            act()
    again = Book(Path(book.config.data.corpora[0].path), book.run.root)
    again.policy.watching = book.policy.watching
    lines = read_blends(again.run.blends)
    again.source = open_corpora(again.config.data.corpora, 32, 0, lines).train
    again.book.source = again.source
    for _ in range(2):  # the third process finds nothing more to tell
        memory = recall({}, again.run.events(*TELLING))
        assert memory.incidents == 1
        again.book.restore(memory.incident, 1, state(20))
        (shown,) = incidents(again.run, again.config)
        done = after_the_ledger
        assert shown["outcome"] == ("healed" if what == "skipped alone" else "open")
        positions = guilty if done and what in ("attributed", "skipped alone") else []
        if what == "released":
            positions = [260] if done else guilty
        assert shown["positions"] == [list(some) for some in ranges_of(np.array(positions, np.int64))]
        assert again.convicted == positions
        assert shown["released"] == (2 if done and what == "released" else 0)
        assert shown["deferred"] == ([[248, 272]] if done and what == "deferred" else [])
        assert bool(shown["documents"]) == (bool(positions))
        if done:
            assert shown["cause"] == (Cause.STATE if what == "deferred" else Cause.DATA)
        again.book.incident = None
    told = [e["what"] for e in again.run.events(IncidentEvent)]
    assert told.count("attributed") == (1 if what == "released" else 0) + (1 if done else 0)


def test_every_convicted_sample_keeps_its_loss_and_the_seconds_go_on_to_the_end_of_the_rewind(
    book: Book,
) -> None:
    book.open()
    suspects = [Suspect(248 + n, 9.0 - n / 100, 8.0) for n in range(60)]
    found = Conclusion(Cause.DATA, [248 + n for n in range(40)], suspects, "so it is")
    book.book.attribute(found, WINDOW, Action.REWIND, "and so on", 3, 1.5)
    book.book.rewound(30, 240, 0.25)
    (told,) = (e for e in book.run.events(IncidentEvent) if e["what"] == "attributed")
    assert [s["position"] for s in told["suspects"]] == list(range(248, 288))
    assert book.book.incident is not None and book.book.incident.seconds == 1.75


def test_an_incident_that_was_over_in_undone_steps_is_not_over(book: Book) -> None:
    for number, step in ((1, 33), (2, 60)):
        book.open()
        book.book.close(state(step), "healed")
        assert book.book.closed[number] == step
    book.open()
    book.book.rewound(40, 320)
    assert book.book.closed == {1: 33}


def test_the_loss_before_and_after_is_the_median_so_that_the_spike_is_no_part_of_it(book: Book) -> None:
    spiking = state().model_copy(update={"recent_losses": [2.0, 2.1, 2.2, 9.0, math.nan]})
    book.book.open(decision(Action.DISCARD), spiking, WINDOW, 9.0)
    incident = book.book.incident
    assert incident is not None and incident.loss_before == pytest.approx(2.15)
    book.book.close(spiking, "healed")
    assert incident.loss_after == pytest.approx(2.15)


def test_the_summary_passes_over_events_that_it_does_not_know(book: Book) -> None:
    note(book.run, "incident", number=1, what="opened")
    note(book.run, "incident", summary={"colour": "red"})
    note(book.run, "incident", what="closed", summary="over")
    assert book.shown() == []


def test_a_full_disk_is_no_bad_input(book: Book) -> None:
    """Ledger and journal: each is an error of its own that says what to do, and nothing is lost with room again."""
    book.open()
    with (
        files_no_larger_than(20),
        pytest.raises(SpaceError, match=r"skips\.jsonl could not .* make room and start"),
    ):
        book.attribute(Cause.DATA, [250])
    size = book.run.journal.stat().st_size
    with (
        files_no_larger_than(size + 20),
        pytest.raises(SpaceError, match=r"journal\.jsonl could not .* make room"),
    ):
        book.attribute(Cause.DATA, [251])
    with files_no_larger_than(size + 20):
        book.book.rewound(30, 240)  # the next process would miss nothing
        with pytest.raises(SpaceError, match="handover"):
            book.book.give_up(decision(Action.HANDOVER), state(), WINDOW, defer=False)
    note(book.run, "later")
    whats = [e["what"] for e in book.run.events(IncidentEvent)]
    assert whats == ["opened", "attributed", "rewound", "handed over"] and book.run.handed_over() == 31


def refused(corpus: Path, folder: Path) -> str:
    book = Book(corpus, folder)
    book.open()
    try:
        book.attribute(Cause.DATA, [250])
    except SpaceError as error:
        return f"{error.collective} {error}"
    return "written"


def test_all_ranks_hear_of_it(corpus: Path, tmp_path: Path) -> None:
    (tmp_path / "skips.jsonl").mkdir()
    one, other = run_ranks(2, refused, corpus, tmp_path)
    assert one == other and one.startswith("True") and "skips.jsonl could not be written" in one


def kill_when_rewound() -> None:
    """SIGKILL this process as soon as it has written down that it went back."""
    real = IncidentLog.rewound

    def rewound(self: IncidentLog, step: int, cursor: int, seconds: float) -> None:
        real(self, step, cursor)
        os.kill(os.getpid(), signal.SIGKILL)

    IncidentLog.rewound = rewound  # type: ignore[method-assign]


def test_a_crash_in_the_middle_of_an_incident_loses_nothing_of_it(
    planted: tuple[Path, Planted], tmp_path: Path
) -> None:
    corpus, what = planted
    config = recipe(corpus, tmp_path / "run")
    run = RunDirectory(tmp_path / "run")
    with pytest.raises(AssertionError, match="-9"):  # of the harness: the rank is dead
        run_ranks(1, train_with, config, kill_when_rewound)
    (left,) = incidents(run, config)
    assert left["outcome"] == "open" and [tuple(r) for r in left["positions"]] == what.positions
    # There is no checkpoint: all begins again, but the ledger and the incident are there.
    assert run_ranks(1, train, config) == [(errors.OK, "")]
    (healed,) = incidents(run, config)
    assert healed["number"] == left["number"] and healed["outcome"] == "healed"
    assert healed["documents"] == left["documents"] and healed["steps_lost"] == left["steps_lost"]


def test_a_journal_of_another_version_is_refused(corpus: Path, tmp_path: Path) -> None:
    run = RunDirectory(tmp_path)
    note(run, "incident", number=3, what="opened", policy={"karma": 1})
    steps = {"steps": 2, "global_batch": 8, "micro_batch": 2, "eval_samples": 0, "eval_interval": 0}
    for code, error in run_ranks(2, train, tiny(corpus, tmp_path, train=steps)):
        assert code == errors.CheckpointError.code and "policy.karma: Extra inputs" in error


def test_where_samples_return_that_a_trial_has_deferred_is_remembered(book: Book) -> None:
    for proven in (False, True):
        book.open()
        found = Conclusion(Cause.DATA, [], [], "mixed", later=[250, 251, 260], proven=proven)
        book.book.attribute(found, WINDOW, Action.REWIND, "and so on", 3, 0.5)
        incident = book.book.incident
        assert incident is not None and bool(book.policy.costly) == proven
    costly, returns = (
        {p for a, b in told for p in range(a, b)} for told in (book.policy.costly, incident.returns)
    )
    assert len(costly) == 3 and costly < returns
