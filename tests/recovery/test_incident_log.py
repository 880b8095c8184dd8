"""Incidents as they are written down, and what outlives a process: of the checkpoint, of the journal, and of ledgers
that the journal does not know of yet."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch.distributed as dist

from megastable.attribution.sample_replay import Trained
from megastable.base import errors
from megastable.base.errors import CheckpointError, SpaceError
from megastable.checkpoint.held_points import find_interrupted_rewind
from megastable.checkpoint.store import LayoutState, RunState
from megastable.data.blends import ExchangeEntry, read_blends
from megastable.data.corpora import open_corpora
from megastable.data.order import LAST_POSITION
from megastable.data.plant import Planted
from megastable.data.run_ledgers import Skipping
from megastable.data.skip_ledger import (
    Ledger,
    SkipEntry,
    append_entries,
    read_ledger,
    sample_entries,
)
from megastable.data.skips import Selection, ranges_of
from megastable.recovery.incident_log import IncidentLog
from megastable.recovery.recovery import TELLING, PersistedState, recall_state
from megastable.run.directory import RunDirectory
from megastable.run.events.reading import event_of
from megastable.run.events.stability_events import IncidentEvent
from megastable.run.log import RunLog
from megastable.training.summary import list_incidents
from megastable_guard.actions import Action, Cause, Decision, Finding, Verdict
from megastable_guard.conclusion import Conclusion
from megastable_guard.detector import DetectorState
from megastable_guard.incident import Incident
from megastable_guard.policy_state import PolicyState, Taken
from megastable_guard.step_judge import GuardState
from tests.conftest import tiny
from tests.distributed import run_ranks
from tests.full_disk import files_no_larger_than
from tests.journal import note
from tests.recovery.test_recovery import planted, recipe, train
from tests.training.test_failures import train as train_with

__all__ = ["planted"]

STEPS = 400  # of the run; the window is far before its end
NOBODY = Conclusion(Cause.STATE, [], [], "all are harmless")


def steps_of(first: int, last: int, later: int = 0) -> list[Trained]:
    """Steps that read 8 positions each, step 1 from position 8 on. later: by how many steps than that."""
    return [
        Trained(step + later, np.arange(8 * step, 8 * step + 8), np.full(8, 5.0), step < 33)
        for step in range(first, last + 1)
    ]


WINDOW = steps_of(31, 33)


def decision(action: Action) -> Decision:
    return Decision(action, Finding(33, Verdict.SPIKE, 1.5, 31, "up"), "the loss is up")


def state(step: int = 33) -> RunState:
    layout = LayoutState(tensor=1, pipeline=1, data=1, zero=1, precision="fp32")
    return RunState(step=step, order_fingerprint="abc", layout=layout, recent_losses=[2.0, 2.5])


def positions_in(ranges: Any) -> list[int]:
    return [p for a, b in ranges for p in range(a, b)]


class Book:
    """An incident log on a run directory, with a policy's memory that counts its clock up."""

    def __init__(self, corpus: Path, folder: Path, lines: Any = ()) -> None:
        folder.mkdir(exist_ok=True)
        self.run, self.said, self.policy = RunDirectory(folder), list[str](), PolicyState(clock=33)
        self.config = tiny(corpus, folder, train={"steps": STEPS})
        self.source = open_corpora(self.config.data.corpora, 32, 0, lines).train
        log = RunLog(self.run, self.said.append, active=dist.get_rank() == 0)
        parts: Any = SimpleNamespace(
            config=self.config, run=self.run, source=self.source, log=log, select_unskipped=self.selection
        )
        guard: Any = SimpleNamespace(policy=SimpleNamespace(state=self.policy))
        self.book = IncidentLog(parts, guard)

    def selection(self) -> Selection:
        return Skipping(self.config, self.run).select_samples(self.source.order)

    def open(self, action: Action = Action.REWIND, step: int = 33) -> Incident:
        return self.book.open_incident(decision(action), state(step), WINDOW, 9.0)

    def attribute(self, found: Conclusion, window: list[Trained] = WINDOW, swap: str | None = None) -> None:
        self.book.record_conclusion(found, window, Action.REWIND, "and so on", 3, 0.5, swap)

    def skip_bad(self, found_bad: list[int], swap: str | None = None) -> None:
        self.attribute(Conclusion(Cause.DATA, found_bad, [], "so it is"), swap=swap)

    def defer(self, window: list[Trained] = WINDOW) -> None:
        self.attribute(Conclusion(Cause.STATE, [], [], "so it is"), window)

    def left_out(self, end: int = 400) -> list[int]:
        return np.flatnonzero(self.selection().mask_skipped(np.arange(end))).tolist()

    def sequences(self, positions: Any) -> list[int]:
        return self.source.order.locate_samples(positions).sequence.tolist()

    def recall(self) -> PersistedState:
        return recall_state({}, self.run.iterate_events(*TELLING))

    def shown(self) -> list[tuple[int, str, Any]]:
        return [(i["number"], i["outcome"], i["action"]) for i in list_incidents(self.run, self.config)]


@pytest.fixture
def book(corpus: Path, tmp_path: Path) -> Iterator[Book]:
    """On the one rank of a process group of its own."""
    dist.init_process_group("gloo", f"file://{tmp_path}/rendezvous", rank=0, world_size=1)
    yield Book(corpus, tmp_path / "run")
    dist.destroy_process_group()


def test_attribute_skips_the_bad_and_where_there_are_none_reads_the_window_later(book: Book) -> None:
    incident, before = book.open(), book.source.order
    book.skip_bad([250, 251, 260])
    assert book.left_out() == [250, 251, 260] and incident.positions == [(250, 252), (260, 261)]
    assert incident.documents and not incident.deferred and book.source.order is before
    book.book.close_incident(state(70), "healed")
    for cause in (Cause.NUMERICS, Cause.LEARNING_RATE, Cause.HARDWARE):
        incident = book.open()
        book.attribute(Conclusion(cause, [], [], "so it is"))
        assert incident.positions == incident.deferred == incident.documents == []
        book.book.close_incident(state(70), "healed")
    incident = book.open()
    book.defer()
    left = [p for p in range(248, 272) if p not in (250, 251, 260)]
    assert incident.deferred == ranges_of(np.array(left)) and incident.positions == []
    (entry,) = (e for e in read_blends(book.run.blends) if isinstance(e, ExchangeEntry))
    assert (entry.incident, entry.step, entry.reason) == (5, 31, "state: so it is")
    there = book.source.order.deferred_positions(0, 10**6)
    assert book.sequences(there) == before.locate_samples(left).sequence.tolist()
    assert there.tolist() == positions_in(incident.returns)
    book.book.close_incident(state(70), "healed")
    assert book.shown() == [(number, "healed", "rewind") for number in range(1, 6)]


def test_attribute_swaps_a_corpus_out_from_the_first_bad_sample_on(book: Book) -> None:
    name = book.source.order.corpora[0].name
    book.open()
    book.skip_bad([260, 262], swap=name)
    skipped = [e for e in read_ledger(book.run.skips) if isinstance(e, SkipEntry)]
    assert [(e.first, e.end, e.corpus) for e in skipped] == [(260, LAST_POSITION, name)]
    assert f"  swapped out: corpus {name}" in book.said


def test_defer_loses_samples_only_where_the_run_ends_too_soon_and_says_so(book: Book) -> None:
    incident, first = book.open(), 8 * (STEPS - 2)
    book.defer(steps_of(STEPS - 2, STEPS))
    assert incident.deferred == [] and incident.positions == [(first, first + 24)]
    assert book.left_out(8 * STEPS + 8) == [*range(first, first + 24)]
    assert "  lost in this epoch: 24 samples: the run ends before there is room" in book.said


@pytest.mark.parametrize("left_out", [[], [SkipEntry(first=3150, end=LAST_POSITION, reason="a person did")]])
def test_defer_never_loses_samples_ahead_that_nobody_met(left_out: list[SkipEntry], book: Book) -> None:
    """Where there is no room for all of them, fewer are deferred, and the window has what room there is."""
    incident = book.open(step=391)
    book.defer(steps_of(388, 390))  # up to position 3128; the run ends at 3208
    append_entries(book.run.skips, left_out)
    window = steps_of(391, 391)
    assert book.book.is_adjacent(window)
    book.defer(window)
    assert incident.lost == 0 and incident.positions == []
    assert len(positions_in(incident.deferred)) == 24 + 8 + (2 if left_out else 20)


def test_adjacent_trouble_defers_ever_more(book: Book) -> None:
    assert not book.book.is_adjacent(WINDOW)
    incident = book.open()
    book.defer()  # 24 samples, up to position 272
    near = ((33, 0, True), (34, 0, True), (36, 0, True), (37, 0, False), (31, 0, False), (34, 200, False))
    for first, later, expected in near:
        assert book.book.is_adjacent(steps_of(first, first + 1, later)) == expected, (first, later)
    for window, count in ((steps_of(34, 35), 48), (steps_of(40, 41), 96)):
        known = len(positions_in(incident.deferred))
        assert book.book.is_adjacent(window)
        book.defer(window)
        assert len(positions_in(incident.deferred)) - known == count
    # It is known to the next process, from the journal alone.
    left_out = book.recall().left_out
    assert left_out is not None and left_out == book.book.left_out and left_out.count == 96
    book.book.close_incident(state(70), "healed")
    assert book.recall().left_out == left_out and book.recall().incident is None


def test_returned_again_blames_samples_that_come_back_with_trouble(book: Book) -> None:
    """Those of the first two batches of a stretch, where it begins there: the others are deferred once more."""
    again = book.book.blame_returned
    assert again(NOBODY, WINDOW) is NOBODY
    book.open()
    book.defer(steps_of(31, 36))
    book.book.close_incident(state(70), "healed")
    returns = book.source.order.deferred_positions(0, 10**6)
    step = int(returns[0]) // 8
    for first in (step - 1, step, step + 1):
        found = again(NOBODY, steps_of(first, first + 3))
        assert found.cause is Cause.DATA and found.bad == returns[:16].tolist() and not found.proven
        assert found.later == [p for p in returns[16:].tolist() if p < 8 * (first + 4)]
    # It did not begin with them, or where they do not begin.
    for first, last in ((step - 5, step + 1), (step + 3, step + 5), (step + 20, step + 22)):
        assert again(NOBODY, steps_of(first, last)) is NOBODY
    for other in (Conclusion(Cause.DATA, [1], [], ""), Conclusion(Cause.HARDWARE, [], [], "")):
        assert again(other, steps_of(step, step + 4)) is other
    window, put_off = steps_of(step, step + 3), book.sequences(returns[16:32])
    incident, found = book.open(), again(NOBODY, window)
    book.attribute(found, window)
    assert book.left_out(int(returns[-1]) + 1) == found.bad
    assert incident.deferred == ranges_of(returns[16:32])
    assert book.sequences(np.array(positions_in(incident.returns))) == put_off


def test_attribute_remembers_where_samples_return_that_a_trial_has_deferred(book: Book) -> None:
    for proven in (False, True):
        incident = book.open()
        book.attribute(Conclusion(Cause.DATA, [], [], "mixed", later=[250, 251, 260], proven=proven))
        assert bool(book.policy.costly) == proven
    costly = positions_in(book.policy.costly)
    assert len(costly) == 3 and set(costly) < set(positions_in(incident.returns))


def test_release_withdraws_a_skip_which_may_be_made_again(book: Book) -> None:
    append_entries(book.run.skips, [*sample_entries(book.source.order, np.array([262]), "a person did")])
    incident = book.open()
    book.skip_bad([250, 251, 260, 261, 262])
    book.book.release_samples([250, 261, 262], cursor=256, reason="the rate was too high")
    assert book.left_out() == [251, 260, 262] == positions_in(incident.positions)
    (event,) = [e for e in book.run.iterate_events(IncidentEvent) if e["what"] == "released"]
    assert event["positions"] == [[261, 262]] and event["next_epoch"] == [[250, 251]]
    epoch = book.source.order.sequences[0]
    assert book.selection().named_between(epoch, 2 * epoch).size == 3
    book.skip_bad([250])
    assert book.left_out() == [250, 251, 260, 262]
    ever = Selection(book.source.order, Ledger.read_ledger(book.run.skips).ever.exclusions)
    assert np.flatnonzero(ever.mask_skipped(np.arange(400))).tolist() == [250, 251, 260, 261, 262]


@pytest.mark.parametrize("defer", [True, False])
@pytest.mark.parametrize("action", [Action.HANDOVER, Action.STOP])
def test_give_up_defers_the_window_of_a_handover_unless_it_is_harmless_and_nothing_of_a_stop(
    action: Action, defer: bool, book: Book
) -> None:
    """Nothing says that the next start goes back behind a stop: the order that a checkpoint came by must stay."""
    corpora = open_corpora(book.config.data.corpora, 32, 0)
    known = corpora.train.order.fingerprint(corpora.fingerprints, before=400)
    book.open(action)
    incident, handed_over = (
        book.book.give_up(decision(action), state(), WINDOW, defer),
        action is Action.HANDOVER,
    )
    assert incident.deferred == ([(248, 272)] if defer and handed_over else [])
    same = book.source.order.fingerprint(corpora.fingerprints, before=400) == known
    assert same is not (defer and handed_over)
    assert not read_ledger(book.run.skips) and incident.positions == []
    assert book.shown() == [(1, "handed over" if handed_over else "stopped", action)]
    assert book.run.find_handover() == (31 if handed_over else None)
    memory = book.recall()
    assert (memory.incidents, memory.guard.policy) == (1, book.policy)
    # What is handed over goes on in the next process, which has done the steps since its checkpoint again.
    assert (memory.incident is not None) is handed_over
    if memory.incident is not None:
        book.book.restore_incident(memory.incident, 1, state(20))
        assert book.shown() == [(1, "open", action)] and memory.incident.steps_lost == 13


def test_rewound_reopens_incidents_that_were_over_in_undone_steps(book: Book) -> None:
    for step in (33, 60):
        book.open()
        book.book.close_incident(state(step), "healed")
    incident = book.open()
    book.book.record_rewind(40, 320, 0.25)
    assert book.book.closed == {1: 33} and incident.seconds == 0.25


# The next process


def test_recall_goes_on_from_every_point(book: Book) -> None:
    """Whenever it ends: the open incident and the policy as they were, from the journal alone."""

    def known() -> None:
        memory = book.recall()
        assert memory.incident == book.book.incident and memory.guard.policy == book.policy
        assert memory.incidents == book.book.count

    book.open()
    known()
    book.policy.clock = 34
    book.skip_bad([250])
    known()
    book.book.record_rewind(30, 240)
    known()
    assert book.shown() == [(1, "open", "rewind")]
    book.policy.clock = 60
    book.book.close_incident(state(60), "healed")
    known()
    memory = book.recall()
    book.book.restore_incident(memory.incident, memory.incidents, state(0))
    book.open()
    known()
    assert book.shown() == [(1, "healed", "rewind"), (2, "open", None)]


class ProcessKilled(BaseException):
    """The end of the process."""


@pytest.mark.parametrize("what", ["attributed", "released", "deferred", "skipped alone"])
@pytest.mark.parametrize("done", [True, False], ids=["after the ledger", "before it"])
def test_restore_tells_what_the_ledger_holds_where_the_process_was_killed_before_the_journal(
    book: Book, monkeypatch: pytest.MonkeyPatch, what: str, done: bool
) -> None:
    """And nothing twice. ProcessKilled before the ledger has it, nothing is left out, and nothing is told."""
    found_bad = [250, 251, 260]
    book.policy.watching = what != "skipped alone"
    if what != "skipped alone":
        book.open()
    if what == "released":
        book.skip_bad(found_bad)

    def die(*_: object, **__: object) -> None:
        raise ProcessKilled

    found = Conclusion(Cause.DATA, found_bad, [], "so it is")
    acts = {
        "attributed": lambda: book.skip_bad(found_bad),
        "released": lambda: book.book.release_samples([250, 251], 240, "harmless"),
        "deferred": book.defer,
        "skipped alone": lambda: book.book.skip_bad_samples(
            found, 31, WINDOW, Verdict.SHIFT, "seen", state(), 0.1
        ),
    }

    with monkeypatch.context() as patch:
        if done:
            patch.setattr(book.book, "_commit", die)
        else:
            patch.setattr("megastable.data.run_ledgers.append_entries", die)
        with pytest.raises(ProcessKilled):
            acts[what]()
    again = Book(Path(book.config.data.corpora[0].path), book.run.root, read_blends(book.run.blends))
    again.policy.watching = book.policy.watching
    expected = {"released": [260] if done else found_bad, "deferred": []}.get(what, found_bad if done else [])
    for _ in range(2):  # the third process finds nothing more to tell
        memory = again.recall()
        assert memory.incidents == 1
        again.book.restore_incident(memory.incident, 1, state(20))
        (shown,) = list_incidents(again.run, again.config)
        assert shown["outcome"] == ("healed" if what == "skipped alone" else "open")
        assert positions_in(shown["positions"]) == expected == again.left_out()
        assert shown["released"] == (2 if done and what == "released" else 0)
        assert shown["deferred"] == ([[248, 272]] if done and what == "deferred" else [])
        assert bool(shown["documents"]) == bool(expected)
        if done:
            assert shown["cause"] == (Cause.STATE if what == "deferred" else Cause.DATA)
        again.book.incident = None
    told = [e["what"] for e in again.run.iterate_events(IncidentEvent)]
    assert told.count("attributed") == (what == "released") + done


def test_full_disk_is_no_bad_input_and_loses_nothing(book: Book) -> None:
    """Ledger and journal: each is an error of its own that says what to do."""
    book.open()
    with (
        files_no_larger_than(20),
        pytest.raises(SpaceError, match=r"skips\.jsonl could not .* make room and start"),
    ):
        book.skip_bad([250])
    size = book.run.journal.stat().st_size
    with files_no_larger_than(size + 20):
        with pytest.raises(SpaceError, match=r"journal\.jsonl could not .* make room"):
            book.skip_bad([251])
        book.book.record_rewind(30, 240)  # the next process would miss nothing
        with pytest.raises(SpaceError, match="handover"):
            book.book.give_up(decision(Action.HANDOVER), state(), WINDOW, defer=False)
    note(book.run, "later")
    whats = [e["what"] for e in book.run.iterate_events(IncidentEvent)]
    assert whats == ["opened", "attributed", "rewound", "handed over"] and book.run.find_handover() == 31


def refused(corpus: Path, folder: Path) -> str:
    book = Book(corpus, folder)
    book.open()
    with pytest.raises(SpaceError) as error:
        book.skip_bad([250])
    return f"{error.value.collective} {error.value}"


def test_full_disk_is_told_on_all_ranks(corpus: Path, tmp_path: Path) -> None:
    (tmp_path / "skips.jsonl").mkdir()
    one, other = run_ranks(2, refused, corpus, tmp_path)
    assert one == other and one.startswith("True") and "skips.jsonl could not be written" in one


def kill_when_rewound() -> None:
    """SIGKILL this process as soon as it has written down that it went back."""
    real = IncidentLog.record_rewind

    def rewound(self: IncidentLog, step: int, cursor: int, seconds: float) -> None:
        real(self, step, cursor)
        os.kill(os.getpid(), signal.SIGKILL)

    IncidentLog.record_rewind = rewound  # type: ignore[method-assign]


def test_crash_in_the_middle_of_an_incident_loses_nothing_of_it(
    planted: tuple[Path, Planted], tmp_path: Path
) -> None:
    corpus, what = planted
    config, run = recipe(corpus, tmp_path / "run"), RunDirectory(tmp_path / "run")
    with pytest.raises(AssertionError, match="-9"):  # of the harness: the rank is dead
        run_ranks(1, train_with, config, kill_when_rewound)
    (left,) = list_incidents(run, config)
    assert left["outcome"] == "open" and [tuple(r) for r in left["positions"]] == what.positions
    # There is no checkpoint: all begins again, but the ledger and the incident are there.
    assert run_ranks(1, train, config) == [(errors.OK, "")]
    (healed,) = list_incidents(run, config)
    assert healed["number"] == left["number"] and healed["outcome"] == "healed"
    assert healed["documents"] == left["documents"] and healed["steps_lost"] == left["steps_lost"]


def policy(clock: int) -> PolicyState:
    return PolicyState(clock=clock, taken=[Taken(clock=clock, step=clock, action=Action.REWIND)])


def incident(number: int = 1, **changes: Any) -> Incident:
    given = {"number": number, "step": 33, "onset": 31, "verdict": Verdict.SPIKE, "kind": "recoverable"}
    return Incident.model_validate({**given, **changes})


def told(what: str, clock: int = 33, about: Incident | None = None, **fields: Any) -> dict[str, Any]:
    about = about or incident()
    memory = {"policy": policy(clock).model_dump(mode="json"), "summary": about.model_dump(mode="json")}
    return {"event": "incident", "what": what, "number": about.number, "time": 1.5, **memory, **fields}


def saved(clock: int = 0, **parts: Any) -> dict[str, Any]:
    guard = GuardState(detector=DetectorState(seen=40), policy=policy(clock))
    return PersistedState(guard=guard, **parts).model_dump(mode="json")


def test_recall_takes_what_happened_after_the_checkpoint_from_the_journal() -> None:
    attributed = incident(steps_lost=8, positions=[(3, 5)])
    events = [told("opened"), told("attributed", 33, attributed), told("rewound", 33, attributed)]
    for before in (saved(20), {}):
        memory = recall_state(before, map(event_of, events))
        assert memory.incident == attributed and memory.incidents == 1
        assert memory.guard.policy == policy(33)
        assert memory.guard.detector == PersistedState.model_validate(before).guard.detector
    # A checkpoint of after it knows better.
    later = saved(50, incident=None, incidents=1)
    assert recall_state(later, map(event_of, events)).model_dump(mode="json") == later
    over = [told("opened"), told("closed", 60, incident(outcome="healed"))]
    assert recall_state(saved(40, incident=incident(), incidents=1), map(event_of, over)).incident is None


def test_recall_gives_a_dry_run_a_clock_of_its_own() -> None:
    dry = PersistedState(guard=GuardState(simulated=True, policy=policy(5))).model_dump(mode="json")
    events = [told("opened", 33, incident(4))]
    memory = recall_state(dry, map(event_of, events), simulated=True)
    assert memory.guard.policy == policy(5) and memory.incident is None and memory.incidents == 4
    memory = recall_state(
        dry, map(event_of, events)
    )  # back in earnest: what was done before the dry run counts
    assert memory.guard.policy.clock == 33 and memory.incident is not None


@pytest.mark.parametrize(
    ("place", "value", "named"),
    [
        (("guard", "detector", "shape"), 1, "guard.detector.shape: Extra"),
        (("guard", "policy", "karma"), 1, "guard.policy.karma: Extra"),
        (("incident", "verdict"), "odd", "incident.verdict"),
        (("incidents",), "many", "incidents: Input"),
    ],
)
def test_recall_refuses_a_state_of_another_version(place: tuple[str, ...], value: Any, named: str) -> None:
    tree = below = saved(40, incident=incident(), incidents=1)
    for key in place[:-1]:
        below = below[key]
    below[place[-1]] = value
    with pytest.raises(CheckpointError, match=rf"the checkpoint remembers .*another version .*\({named}"):
        recall_state(tree, [])
    strange = told("attributed")
    strange["policy"]["karma"] = 1
    with pytest.raises(CheckpointError, match=r"event incident remembers .*policy\.karma: Extra"):
        recall_state(saved(20), [event_of(strange)])


TRAINING, OPENED, REWOUND = {"event": "training"}, told("opened", onset=31), told("rewound", to_step=20)
SAVED, LATER = ({"event": "checkpoint", "name": name} for name in ("step-40", "step-30"))


@pytest.mark.parametrize(
    ("events", "left"),
    [
        ([], None),
        ([TRAINING, SAVED], None),
        ([TRAINING, SAVED, OPENED], (31, set())),
        ([OPENED, REWOUND], (21, set())),
        ([OPENED, REWOUND, LATER], (21, {"step-30"})),
        # It came back: what was written in between, before it did, is as good as it was.
        ([OPENED, REWOUND, LATER, told("opened", onset=38)], (38, set())),
        ([OPENED, REWOUND, told("closed")], None),
        ([OPENED, REWOUND, TRAINING], None),
    ],
)
def test_interrupted_tells_what_a_dead_process_went_back_behind(
    events: list[dict[str, Any]], left: tuple[int, set[str]] | None
) -> None:
    assert find_interrupted_rewind(map(event_of, events)) == left
