"""The last words of a run tell an incident as it was: whoever was guilty, or that nobody was."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from megastable.base.text import duration
from megastable.report.postmortem import costs_of, incidents_of, sentences
from megastable.report.postmortem.facts import IncidentFacts
from megastable.report.story import story
from tests.conftest import tiny

KNOWN: dict[str, Any] = {
    "loss_before": 4.0, "loss_peak": 9.0, "step": 121, "onset": 120, "verdict": "spike", "class": "recoverable",
    "cause": "data", "positions": [[190, 193]], "documents": [], "planted_documents": [], "action": "rewind",
    "outcome": "healed", "steps_lost": 2, "batches_discarded": 0, "seconds": 1.0, "failure": "",
}  # fmt: skip


def lines(corpus: Path, **change: Any) -> list[str]:
    return list(story(KNOWN | change, tiny(corpus, Path("unused"))))


def test_where_the_state_was_spoilt_nobody_is_guilty(corpus: Path) -> None:
    assert lines(corpus, cause="state") == [
        "step 120     the loss jumped from 4.00 to 9.00; recoverable, cause: state",
        "done         rewound in memory to before the onset, without a restart; skipped 190-192: healed",
        "cost         steps lost: 2, updates refused: 0",
    ]


def test_the_time_lost_is_that_of_the_post_mortem(corpus: Path, spike: Path) -> None:
    """Not only the search: the steps that are done again, too."""
    (evidence,) = incidents_of(spike)
    cost = costs_of(spike)[evidence.incident.number]
    assert cost == evidence.cost and cost.seconds > evidence.incident.seconds > 0
    found = [line for line in story(KNOWN, tiny(corpus, Path("unused")), cost) if line.startswith("cost")]
    assert found == [f"cost         steps lost: 2, updates refused: 0, time lost: {duration(cost.seconds)}"]
    assert {name: value for name, value, _ in sentences.figures(evidence)}["time lost"] == duration(
        cost.seconds
    )


def test_of_a_crash_the_failure_is_told(corpus: Path) -> None:
    failure = "rank 1 was killed by \x1b[31msignal 9 (SIGKILL)"
    crash = {"verdict": "crash", "cause": "process", "positions": [], "action": "restart", "failure": failure}
    seen, done, _ = lines(corpus, **crash, loss_before=None, loss_peak=None)
    assert seen == f"step 120     {failure}; recoverable, cause: process".replace("\x1b", "\\x1b")
    assert done.startswith("done         restarted the processes from the newest intact checkpoint, or ")
    assert done.endswith(": healed")


@pytest.mark.parametrize("action", [None, "something new"])
def test_an_action_without_words_is_named(corpus: Path, action: str | None) -> None:
    assert f"done         {action or 'nothing'}: open" in lines(
        corpus, action=action, outcome="open", positions=[]
    )


def test_a_fault_of_hardware_is_told_by_its_evidence() -> None:
    """The loss before and after says nothing of it."""
    given = {
        "number": 1,
        "onset": 24,
        "verdict": "corrupted",
        "cause": "hardware",
        "loss_before": 4.9,
        "loss_peak": 4.4,
    }
    told = sentences.seen(IncidentFacts.model_validate(given | {"reasons": ["rank 2 on node-1 got negated"]}))
    assert told == "At step 24 hardware was wrong: rank 2 on node-1 got negated."
    assert sentences.seen(IncidentFacts.model_validate(given)) == "At step 24 hardware was wrong."
