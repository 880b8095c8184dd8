"""What a run directory says of a drill."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from drills.gross import CLEAN_FP8
from drills.learning import SCENARIOS, LearningDrill, choose
from drills.plan import Policy
from drills.scenario import CLEAN, Scenario
from drills.score import Fate, Score, causes_of, compare, is_right, score, steps_lost, within
from megastable.run.directory import RunDirectory
from megastable.run.events.event import Event
from megastable.run.events.reading import event_of

BY_NAME = {s.name: s for s in SCENARIOS}
DATA, RATE, BIT, KILL, DISK = (
    BY_NAME[name]
    for name in ("random-tokens", "high-rate", "flipped-bit", "killed-rank", "damaged-checkpoint")
)
POISON, START_UP = BY_NAME["poisoned-weight"], BY_NAME["no-warmup"]
STRUCK = 5.0
DRILL = LearningDrill([], [Policy.OURS], [1])


def incident(number: int, what: str, step: int, cause: str, **more: Any) -> dict[str, Any]:
    """An event of the trainer's; without `policy=None` the policy's memory goes along."""
    summary = {"number": number, "step": step, "kind": more.pop("kind", "recoverable"), "cause": cause}
    summary |= {"seconds": more.pop("seconds", 0.5)}
    event = {
        "event": "incident",
        "what": what,
        "number": number,
        "step": step,
        "policy": {},
        "summary": summary,
        **more,
    }
    return {key: value for key, value in event.items() if value is not None}


def told(tmp_path: Path, events: list[dict[str, Any]], val_loss: Any = 3.5, name: str = "run") -> Path:
    """A run directory with a journal, an event a second, and a summary."""
    run = RunDirectory(tmp_path / name)
    run.root.mkdir()
    lines = [json.dumps({"time": float(time), **event}) for time, event in enumerate(events)]
    run.journal.write_text("".join(line + "\n" for line in lines))
    if val_loss is not None:
        run.summary.write_text(json.dumps({"steps": 160, "val_loss": val_loss}))
    return run.root


def judged(run: Path, scenario: Scenario, policy: Policy = Policy.OURS, **more: Any) -> Score:
    return score(run, scenario, policy, 1, **more)


START = {"event": "training", "step": 0}


def rewound(at: int, to: int, cause: str, number: int = 1, **more: Any) -> list[dict[str, Any]]:
    return [
        incident(number, "opened", at, "unknown", **more),
        incident(number, "attributed", at, cause, **more),
        {**incident(number, "rewound", at, cause, **more), "step": None, "to_step": to},
    ]


def test_bad_data_that_was_found(tmp_path: Path) -> None:
    refused = [{"event": "discarded", "step": step, "verdict": "outlier"} for step in (100, 101)]
    found = rewound(101, 99, "data")
    found[-1]["summary"]["actions"] = ["rewind"]
    run = told(tmp_path, [START, *refused, *found])
    s = judged(run, DATA, fate=Fate(planted=40, convicted=38, lost=2), code=0)
    assert (s.ended, s.step, s.val_loss) == ("finished", 160, 3.5)
    assert (s.steps_lost, s.discarded, s.fate.convicted, s.fate.lost, s.exit) == (2, 2, 38, 2, 0)
    assert (s.incidents, s.rewinds, s.handovers, s.cuts, s.alerts, s.warnings) == (1, 1, 0, 0, 0, 0)
    assert s.warned is None
    assert (s.false_alarms, s.kinds, s.causes, s.seconds_to_recover) == (0, ["recoverable"], ["data"], 0.5)
    assert s.kind_right and s.cause_right


def test_what_was_done_is_counted(tmp_path: Path) -> None:
    events = [START, *rewound(101, 90, "state"), *rewound(103, 90, "learning_rate", 2)]
    for event, actions in zip(
        events[1:], [["rewind"]] * 3 + [["rewind", "cut_lr", "cap_lr"]] * 3, strict=True
    ):
        event["summary"]["actions"] = actions
    last = incident(3, "opened", 110, "unknown")
    last["summary"]["actions"] = ["handover", "alert"]
    warned = [{"event": "warning", "step": step, "text": "rate"} for step in (101, 150)]
    run = told(tmp_path, [*events, last, {"event": "handover", "step": 110}, *warned], val_loss=None)
    s = judged(run, RATE, code=76)
    assert (s.incidents, s.rewinds, s.handovers, s.cuts, s.alerts, s.warnings) == (3, 2, 1, 2, 1, 2)
    assert (s.ended, s.exit) == ("dead", 76)
    run = told(tmp_path, [*events, {"event": "unstable", "step": 110}], val_loss=None, name="stopped")
    assert judged(run, RATE).ended == "stopped"


@pytest.mark.parametrize(("step", "in_time"), [(100, True), (101, False), (None, False)])
def test_a_bad_start_must_be_warned_of_soon(tmp_path: Path, step: int | None, in_time: bool) -> None:
    warning = [{"event": "warning", "step": step, "text": "rate"}] if step else []
    run = told(tmp_path, [START, *warning], val_loss=9.0)
    (s,) = compare([judged(run, START_UP)])
    assert s.warned is in_time and within(s) is in_time and s.cause_right and s.false_alarms == 0
    assert judged(run, START_UP, Policy.NOTHING).warned is None
    assert judged(run, DATA).warned is None


def test_a_poisoned_checkpoint_shows_in_the_numbers_of_training(tmp_path: Path) -> None:
    events = [START, {"event": "ended", "step": 101}, {}, {}, {}, {}, *rewound(103, 99, "state")]
    run = told(tmp_path, [e or {"event": "checkpoint", "step": 90} for e in events])
    s = judged(run, POISON, struck=STRUCK)
    assert (s.false_alarms, s.causes) == (0, ["state"]) and s.cause_right
    assert judged(run, KILL, struck=STRUCK).false_alarms == 1
    assert judged(run, POISON, struck=None).false_alarms == 1


def test_alarms_that_nothing_explains(tmp_path: Path) -> None:
    events = [
        START,
        {"event": "discarded", "step": 70},
        *rewound(72, 60, "data"),
        *rewound(103, 99, "data", 2),
    ]
    s = judged(told(tmp_path, events), DATA)
    assert s.false_alarms == 2 and s.causes == ["data"] and s.cause_right
    s = judged(told(tmp_path, events, name="clean"), CLEAN)
    assert s.false_alarms == 3 and s.causes == []
    # A fault from outside disturbs no number of the training: all that the trainer complains about is nothing.
    s = judged(told(tmp_path, events, name="killed"), KILL, struck=0.5)
    assert s.false_alarms == 3 and not s.cause_right


def test_a_restart_after_a_death(tmp_path: Path) -> None:
    ended = {"event": "ended", "step": 101}
    again = {"event": "training", "step": 90}
    died = [incident(1, what, 101, "process", policy=None) for what in ("opened", "closed")]
    events = [START, {"event": "checkpoint", "step": 90}, {}, {}, {}, {}, ended, died[0], again, died[1]]
    s = judged(told(tmp_path, [e or {"event": "warning"} for e in events]), KILL, struck=STRUCK)
    assert (s.steps_lost, s.seconds_to_recover, s.false_alarms) == (11, 3.0, 0)
    assert s.cause_right and s.kind_right
    assert not judged(tmp_path / "run", DISK, struck=STRUCK).cause_right


@pytest.mark.parametrize(
    ("scenario", "named", "right"),
    [
        (DATA, {"data"}, True), (DATA, {"state"}, False), (DATA, {"data", "state"}, False), (DATA, set(), False),
        (RATE, {"learning_rate"}, True), (RATE, {"learning_rate", "state"}, True), (RATE, {"state"}, False),
        (RATE, {"learning_rate", "data"}, False), (BIT, {"state"}, True), (BIT, {"hardware"}, True),
        (BIT, {"data"}, False), (DISK, {"storage", "process"}, True), (DISK, {"process"}, False),
        (KILL, {"process", "storage"}, False), (CLEAN, set(), True), (CLEAN, {"data"}, False),
        (POISON, {"storage", "process"}, True), (POISON, {"process"}, False),
        (POISON, {"storage", "learning_rate"}, False),
        (START_UP, set(), True), (START_UP, {"learning_rate"}, True), (START_UP, {"data"}, False),
    ],
)  # fmt: skip
def test_which_causes_are_right(scenario: Scenario, named: set[str], right: bool) -> None:
    assert is_right(named, scenario) == right


def test_a_single_refused_update_is_judged_by_what_was_found_of_it() -> None:
    def located(kind: str) -> Event:
        return event_of({"event": "located", "kind": kind})

    assert causes_of([], [located("not reproduced")]) == {"hardware"}
    assert causes_of([], [located("state")]) == {"hardware"}
    assert causes_of([], [located("backward")]) == causes_of([], []) == set()
    assert causes_of([{"cause": "state"}], [located("not reproduced")]) == {"state"}


def test_steps_are_lost_by_rewinds_and_by_restarts() -> None:
    events = [
        START,
        {"event": "checkpoint", "step": 60},
        *rewound(72, 60, "state"),
        *rewound(70, 50, "state"),
    ]
    assert steps_lost(map(event_of, events)) == 32
    assert (
        steps_lost(
            map(event_of, [*events, {"event": "ended", "step": 90}, {"event": "training", "step": 60}])
        )
        == 62
    )
    assert steps_lost(map(event_of, [START, {"event": "finished", "steps": 160}])) == 0


def test_a_run_that_did_not_end(tmp_path: Path) -> None:
    run = told(tmp_path, [START, {"event": "discarded", "step": 7}], val_loss=None)
    s = judged(run, KILL, Policy.NOTHING)
    assert (s.ended, s.step, s.val_loss, s.excess) == ("dead", 7, None, None)
    assert s.cause_right is s.kind_right is s.seconds_to_recover is None
    (run / "progress.json").write_text('{"step": 101}')
    assert judged(run, KILL, Policy.NOTHING).step == 101


def test_every_policy_is_compared_with_its_own_clean_run(tmp_path: Path) -> None:
    def of(scenario: Scenario, policy: Policy, loss: Any) -> Score:
        run = told(tmp_path, [START], loss, f"{scenario.name}-{policy}")
        return judged(run, scenario, policy)

    scores = compare(
        [
            of(CLEAN, Policy.OURS, 3.5), of(CLEAN, Policy.NOTHING, 3.6), of(DATA, Policy.OURS, 3.515),
            of(DATA, Policy.NOTHING, 3.9), of(RATE, Policy.OURS, "nan"), of(BIT, Policy.SKIPPING, 3.5),
        ]
    )  # fmt: skip
    excess = [s.excess for s in scores]
    assert excess[:4] == pytest.approx([0, 0, 0.015, 0.3])
    assert excess[4] is not None and math.isnan(excess[4]) and excess[5] is None
    assert [within(s) for s in scores] == [True, True, True, False, False, False]
    assert [s.clean for s in scores] == [True, True, False, False, False, False]


def test_every_seed_is_compared_with_its_own_clean_run(tmp_path: Path) -> None:
    scores = [
        judged(told(tmp_path, [START], loss, f"{s.name}-{seed}"), s).model_copy(update={"seed": seed})
        for s, seed, loss in (
            (CLEAN, 1, 3.5),
            (CLEAN, 2, 3.7),
            (DATA, 1, 3.51),
            (DATA, 2, 3.72),
            (DATA, 3, 3.6),
        )
    ]
    assert [s.excess for s in compare(scores)] == [0, 0, pytest.approx(0.01), pytest.approx(0.02), None]


def test_a_run_in_fp8_is_compared_with_one_in_fp8(tmp_path: Path) -> None:
    (kernel,) = choose(["fp8-kernel"])
    losses = {CLEAN: 3.5, CLEAN_FP8: 3.45, kernel: 3.46}
    scores = [judged(told(tmp_path, [START], loss, s.name), s) for s, loss in losses.items()]
    assert [s.excess for s in compare(scores)] == pytest.approx([0, 0, 0.01])
    assert compare([scores[0], scores[2]])[-1].excess is None


def test_the_targets(tmp_path: Path) -> None:
    good = judged(told(tmp_path, [START, *rewound(101, 99, "data")]), DATA).model_copy(
        update={"excess": 0.01}
    )
    wrong = good.model_copy(update={"cause_right": False})
    worse = good.model_copy(update={"excess": 0.03})
    better = good.model_copy(update={"excess": -0.03})
    theirs = worse.model_copy(update={"policy": Policy.NOTHING})
    assert DRILL.is_met([]) and DRILL.is_met([good]) and DRILL.is_met([good, theirs])
    assert not DRILL.is_met([worse]) and DRILL.is_met([better]) and not DRILL.is_met([wrong])
    assert DRILL.is_met([*[good] * 11, wrong]) and not DRILL.is_met([*[good] * 10, wrong, wrong])
    loser, clean = (
        s.model_copy(update={"fate": Fate(lost=1)})
        for s in (good, judged(told(tmp_path, [START], name="clean"), CLEAN))
    )
    assert not DRILL.is_met([loser]) and not DRILL.is_met([clean, good])
    assert DRILL.is_met([loser.model_copy(update={"policy": Policy.NOTHING})])


def test_what_was_never_undone_explains_all_that_follows(tmp_path: Path) -> None:
    late = told(tmp_path, [START, {"event": "discarded", "step": 150}])
    assert judged(late, DATA, Policy.SKIPPING).false_alarms == 0
    assert judged(late, DATA).false_alarms == 1
    assert judged(late, CLEAN, Policy.SKIPPING).false_alarms == 1
