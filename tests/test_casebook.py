"""Incidents as they are written down: enough for the next process, and said when it cannot be."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch.distributed as dist

from megastable import errors
from megastable.casebook import NAMED, Casebook
from megastable.checkpoint.store import LayoutState, RunState
from megastable.data.corpora import open_corpora
from megastable.data.order import LAST_POSITION
from megastable.data.plant import Planted
from megastable.data.skip_ledger import Ledger, SampleEntry, SkipEntry, read_ledger
from megastable.data.skips import Selection
from megastable.errors import DataError, SpaceError
from megastable.evidence import Trained
from megastable.recall import TELLING, recall
from megastable.report.summary import incidents
from megastable.rundir import RunDirectory
from megastable.stability.attribution import Conclusion
from megastable.stability.policy import Action, Cause, Decision, PolicyState
from megastable.stability.signals import Finding, Verdict
from tests.conftest import tiny
from tests.distributed import run_ranks
from tests.full_disk import files_no_larger_than
from tests.test_failures import train as train_with
from tests.test_recovery import planted, recipe, train

__all__ = ["planted"]

WINDOW = [
    Trained(step, np.arange(8 * step, 8 * step + 8), np.full(8, 5.0), step < 33) for step in (31, 32, 33)
]


def decision(action: Action) -> Decision:
    return Decision(action, Finding(33, Verdict.SPIKE, 1.5, 31, "up"), "the loss is up")


def state(step: int = 33) -> RunState:
    layout = LayoutState(tensor=1, pipeline=1, data=1, zero=1, precision="fp32")
    return RunState(step=step, order_fingerprint="abc", layout=layout, recent_losses=[2.0, 2.5])


class Book:
    """A casebook on a run directory, with a policy's memory that counts its clock up."""

    def __init__(self, corpus: Path, folder: Path) -> None:
        folder.mkdir(exist_ok=True)
        self.run, self.said, self.policy = RunDirectory(folder), list[str](), PolicyState(clock=33)
        self.config = tiny(corpus, folder)
        self.source = open_corpora(self.config.data.corpora, 32, 0).train
        note = self.run.note if dist.get_rank() == 0 else lambda event, **fields: None
        self.book = Casebook(self.run, self.source, lambda: self.policy, note, self.said.append)

    def open(self, action: Action = Action.REWIND) -> None:
        self.book.open(decision(action), state(), WINDOW, 9.0)

    def attribute(self, cause: Cause, guilty: list[int], swap: str | None = None) -> None:
        found = Conclusion(cause, guilty, [], "so it is")
        action = Action.REWIND if swap is None else Action.SWAP_CORPUS
        self.book.attribute(found, WINDOW, action, "and so on", 3, 0.5, swap)

    @property
    def skipped(self) -> list[tuple[int, int, str | None]]:
        """By position."""
        return [(e.first, e.end, e.corpus) for e in read_ledger(self.run.skips) if isinstance(e, SkipEntry)]

    @property
    def convicted(self) -> list[int]:
        """The positions of the first epoch that are left out by identity."""
        order = self.source.order
        named = [e for e in read_ledger(self.run.skips) if isinstance(e, SampleEntry)]
        chosen = Selection(order, Ledger.of(named).exclusions)
        return chosen.named_between(0, order.sequences[0]).tolist()

    def shown(self) -> list[tuple[int, str, Any]]:
        return [(i["number"], i["outcome"], i["action"]) for i in incidents(self.run, self.config)]


@pytest.fixture
def book(corpus: Path, tmp_path: Path) -> Iterator[Book]:
    """On the one rank of a process group of its own."""
    dist.init_process_group("gloo", f"file://{tmp_path}/rendezvous", rank=0, world_size=1)
    yield Book(corpus, tmp_path / "run")
    dist.destroy_process_group()


def test_only_what_is_not_innocent_is_skipped(book: Book) -> None:
    for cause, guilty, ranges in (
        (Cause.DATA, [250, 251, 260], [(250, 252), (260, 261)]),
        (Cause.STATE, [], [(248, 272)]),
        (Cause.NUMERICS, [], []),
        (Cause.LEARNING_RATE, [], []),
        (Cause.HARDWARE, [], []),
    ):
        before = len(book.skipped)
        book.open()
        book.attribute(cause, guilty)
        assert book.convicted == [250, 251, 260]
        assert [entry[:2] for entry in book.skipped[before:]] == (ranges if cause is Cause.STATE else [])
        assert book.book.incident is not None and book.book.incident.positions == ranges
        assert bool(book.book.incident.documents) == (cause is Cause.DATA)
        book.book.close(state(70), "healed")
    assert book.shown() == [(number, "healed", "rewind") for number in (1, 2, 3, 4, 5)]


def test_samples_are_skipped_also_where_their_documents_cannot_be_named(
    book: Book, monkeypatch: pytest.MonkeyPatch
) -> None:
    def damaged(*_: Any) -> Any:
        raise DataError("part-0.idx is damaged")

    monkeypatch.setattr("megastable.casebook.documents_at", damaged)
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


@pytest.mark.parametrize("skip", [True, False])
@pytest.mark.parametrize("action", [Action.HANDOVER, Action.STOP])
def test_giving_up_skips_the_window_unless_it_is_innocent(action: Action, skip: bool, book: Book) -> None:
    book.open(action)
    incident = book.book.give_up(decision(action), state(), WINDOW, skip)
    wanted = [(248, 272)] if skip else []
    assert [entry[:2] for entry in book.skipped] == incident.positions == wanted
    outcome = "handed over" if action is Action.HANDOVER else "stopped"
    assert book.shown() == [(1, outcome, action)] and book.book.incident is None
    assert book.run.handed_over() == (31 if action is Action.HANDOVER else None)
    memory, lost = recall({}, book.run.events(*TELLING))
    assert (memory.incidents, memory.guard.policy, lost) == (1, book.policy, [])
    # What is handed over goes on in the next process, which has done the steps since its checkpoint again.
    assert (memory.incident is None) is (action is Action.STOP)
    if memory.incident is not None:
        book.book.restore(memory.incident, 1, step=20)
        assert book.shown() == [(1, "open", action)] and memory.incident.steps_lost == 13


def test_the_next_process_goes_on_from_every_point(book: Book) -> None:
    """Whenever it ends: the open incident and the policy as they were, from the journal alone."""

    def known() -> None:
        memory, lost = recall({}, book.run.events(*TELLING))
        assert memory.incident == book.book.incident and memory.guard.policy == book.policy
        assert memory.incidents == book.book.count and lost == []

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
    book.book.restore(
        *(lambda memory: (memory.incident, memory.incidents, 0))(recall({}, book.run.events())[0])
    )
    book.open()
    known()
    assert book.shown() == [(1, "healed", "rewind"), (2, "open", None)]


def test_the_summary_passes_over_events_that_it_does_not_know(book: Book) -> None:
    book.run.note("incident", number=1, what="opened")
    book.run.note("incident", summary={"colour": "red"})
    book.run.note("incident", what="closed", summary="over")
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
            book.book.give_up(decision(Action.HANDOVER), state(), WINDOW, skip=False)
    book.run.note("later")
    whats = [e["what"] for e in book.run.events("incident")]
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
    real = Casebook.rewound

    def rewound(self: Casebook, step: int, cursor: int) -> None:
        real(self, step, cursor)
        os.kill(os.getpid(), signal.SIGKILL)

    Casebook.rewound = rewound  # type: ignore[method-assign]


def test_a_crash_in_the_middle_of_an_incident_loses_nothing_of_it(
    planted: tuple[Path, Planted], tmp_path: Path
) -> None:
    corpus, what = planted
    config = recipe(corpus, tmp_path / "run")
    run = RunDirectory(tmp_path / "run")
    with pytest.raises(AssertionError, match="-9"):  # of the harness: the rank is dead
        run_ranks(1, train_with, config, kill_when_rewound)
    (left,) = incidents(run, config)
    assert left["outcome"] == "open" and [tuple(r) for r in left["positions"]] == [what.positions]
    # There is no checkpoint: all begins again, but the ledger and the incident are there.
    assert run_ranks(1, train, config) == [(errors.OK, "")]
    (healed,) = incidents(run, config)
    assert healed["number"] == left["number"] and healed["outcome"] == "healed"
    assert healed["documents"] == left["documents"] and healed["steps_lost"] == left["steps_lost"]


def test_a_journal_of_another_version_is_said_and_training_begins(corpus: Path, tmp_path: Path) -> None:
    run = RunDirectory(tmp_path)
    run.note("incident", number=3, what="opened", policy={"karma": 1})
    steps = {"steps": 2, "global_batch": 8, "micro_batch": 2, "eval_samples": 0, "eval_interval": 0}
    assert run_ranks(2, train, tiny(corpus, tmp_path, train=steps)) == [(errors.OK, "")] * 2
    (dropped,) = run.events("stability_state_dropped")
    assert dropped["problem"] == "incident of the journal: policy.karma: Extra inputs are not permitted"
