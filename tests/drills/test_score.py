"""What a run directory says of a drill."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

from drills import learning
from drills.learning import SCENARIOS, LearningDrill
from drills.scenario import CLEAN, HEALTHY, MIXTURE, Scenario
from drills.score import Fate, find_fate, is_right, is_within, score_run
from megastable.data.corpora import open_corpora
from megastable.data.plant import Planted, plant_corruption
from megastable.data.skip_ledger import SkipEntry, append_entries, sample_entries
from megastable.run.directory import RunDirectory
from tests.conftest import tiny, write_corpus

BY_NAME = {s.name: s for s in SCENARIOS}
DATA, RATE, BIT, KILL, DISK = (
    BY_NAME[name]
    for name in ("random-tokens", "high-rate", "flipped-bit", "killed-rank", "damaged-checkpoint")
)
POISON, START_UP = BY_NAME["poisoned-weight"], BY_NAME["no-warmup"]
DRILL = LearningDrill([], [1])


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


START = {"event": "training", "step": 0}


def rewound(at: int, to: int, cause: str, number: int = 1, **more: Any) -> list[dict[str, Any]]:
    return [
        incident(number, "opened", at, "unknown", **more),
        incident(number, "attributed", at, cause, **more),
        {**incident(number, "rewound", at, cause, **more), "step": None, "to_step": to},
    ]


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
def test_is_right_of_causes(scenario: Scenario, named: set[str], right: bool) -> None:
    assert is_right(named, scenario) == right


def test_is_met_by_the_targets(tmp_path: Path) -> None:
    run = told(tmp_path, [START, *rewound(101, 99, "data")])
    good = score_run(run, DATA, 1).model_copy(update={"excess": 0.01})
    wrong = good.model_copy(update={"cause_right": False})
    worse = good.model_copy(update={"excess": 0.03})
    better = good.model_copy(update={"excess": -0.03})
    assert DRILL.is_met([]) and DRILL.is_met([good])
    assert not DRILL.is_met([worse]) and DRILL.is_met([better]) and not DRILL.is_met([wrong])
    assert DRILL.is_met([*[good] * 11, wrong]) and not DRILL.is_met([*[good] * 10, wrong, wrong])
    loser, clean = (
        s.model_copy(update={"fate": Fate(lost=1)})
        for s in (good, score_run(told(tmp_path, [START], name="clean"), CLEAN, 1))
    )
    assert not DRILL.is_met([loser]) and not DRILL.is_met([clean, good])


def test_a_fault_of_experts_must_be_named_and_healed(tmp_path: Path) -> None:
    heavy, growing = (
        next(s for s in MIXTURE if s.name == name) for name in ("heavy-expert", "growing-router")
    )

    def warn(signal: str, step: int, place: str) -> dict[str, Any]:
        return {
            "event": "trend", "what": "warned", "step": step, "signal": signal, "text": f"{place} is ill",
            "remedy": "", "numbers": {},
        }  # fmt: skip

    adjusted = {"event": "settings_adjusted", "step": 110, "settings": ["router_rate"], "reason": ""}
    events = [START, *rewound(104, 90, "state"), adjusted]
    unnamed = score_run(told(tmp_path, events, name="unnamed"), heavy, 1)
    warning = warn("expert_bias", 104, heavy.place)
    named = score_run(told(tmp_path, [*events, warning], name="named"), heavy, 1)
    assert (unnamed.placed, named.placed) == (False, True) and (unnamed.signs, named.signs) == (0, 1)
    assert named.remedies == ("router_rate",) and named.cause_right
    within = {"excess": 0.01}
    assert not is_within(unnamed.model_copy(update=within)) and is_within(named.model_copy(update=within))
    assert not is_within(named.model_copy(update={"excess": 0.03}))
    slow = score_run(
        told(tmp_path, [START, warn("router_entropy", 120, growing.place)], name="slow"), growing, 1
    )
    assert slow.trend_at == 120
    for lead, excess, right in ((40, 0.01, True), (5, 0.01, False), (40, 0.03, True), (None, 0.01, False)):
        assert is_within(slow.model_copy(update={"lead": lead, "excess": excess})) == right


def test_nothing_may_be_done_in_a_run_without_a_fault(tmp_path: Path) -> None:
    usual = HEALTHY[0]
    quiet, disturbed = (
        score_run(told(tmp_path, [START, *events], name=name), usual, 1)
        for name, events in (("quiet", []), ("disturbed", rewound(104, 90, "state")))
    )
    assert DRILL.is_met([quiet]) and not DRILL.is_met([quiet, disturbed])


def test_control_has_a_loss_or_says_how_it_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    own, bare = (
        score_run(told(tmp_path, [{**START, "step": 7}], val_loss, name), RATE, 1)
        for val_loss, name in ((3.5, "own"), (None, "bare"))
    )
    monkeypatch.setattr(learning, "run_drill", lambda *args, guarded=True: own if guarded else bare)
    drill = LearningDrill(["high-rate"], [1], control=True)
    (score,) = drill._run(drill.stage, RATE, lambda step: None)
    assert score == own.model_copy(update={"without": "dead at step 7"})
    table = drill.show_table([score, score.model_copy(update={"without": 4.25})])
    assert "dead at step 7 4.2500" in [cell for column in table.columns for cell in map(str, column.cells)]


@pytest.fixture
def bad(tmp_path: Path) -> tuple[RunDirectory, Planted, Any]:
    """A run on a planted corpus, the samples that are bad in it, and its source."""
    write_corpus(tmp_path / "clean")
    (tmp_path / "clean/tokenizer.model").touch()  # it is copied
    run = RunDirectory(tmp_path / "run")
    run.root.mkdir()
    config = tiny(tmp_path / "bad", run.root)
    planted, _ = plant_corruption(tmp_path / "clean", tmp_path / "bad", config, step=5, samples=10, of_each=2)
    run.recipe.write_text(yaml.safe_dump({"config": config.model_dump(mode="json"), "manifests": []}))
    run.journal.write_text("")
    opened = open_corpora(config.data.corpora, config.model.sequence_length, config.run.seed)
    return run, planted, opened.train.order


def numbers(planted: Planted) -> np.ndarray:
    return np.array([position for first, end in planted.positions for position in range(first, end)])


def test_fate_counts_identities_and_positions(bad: tuple[RunDirectory, Planted, Any]) -> None:
    run, planted, order = bad
    found_bad = numbers(planted)
    clean = np.setdiff1d(np.arange(found_bad.min(), found_bad.max()), found_bad)[:1]
    append_entries(run.skips, sample_entries(order, np.append(found_bad[:7], clean), "data"))
    assert (found := find_fate(run.root, planted)).skipped == 7 and found.lost == 1
    # A window that is left out by position counts as well: of its samples, whichever they are.
    first = int(found_bad[-1]) // 8 * 8
    append_entries(run.skips, [SkipEntry(first=first, end=first + 8, reason="state")])
    found = find_fate(run.root, planted)
    assert (found.skipped, found.lost) == (9, 7)
    assert find_fate(run.root, None).lost == 16
