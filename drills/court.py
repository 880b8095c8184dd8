"""`megastable drill court`: small real runs that measure judgement. What is new, easy or repeated is not bad."""

from __future__ import annotations

import json
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from drills.court_scenarios import (
    CASES,
    CLEAN,
    LENGTH,
    STEP,
    Case,
    CaseOutcome,
    choose_cases,
    prepare_texts,
    write_corpus,
)
from drills.exercise import Column, Drill, Exercise, Watch, describe_only
from drills.runner import read_done, run_drill
from drills.scenario import GLOBAL_BATCH, SEARCH, Scenario
from drills.score import Score
from drills.stage import RECIPE, Stage
from megastable.data.manifest import Manifest
from megastable.data.plant import Planted
from megastable.data.skips import Skips, numbers_of
from megastable.run.directory import RunDirectory
from megastable.run.events.event import Event
from megastable.run.events.reading import find_latest
from megastable.run.events.stability_events import BaselineReset, Discarded, IncidentEvent
from megastable.run.events.training_events import Training

BY_NAME = {case.name: case for case in CASES}
START = 30  # steps: refusals before are the recipe's, not the scenario's
EVALUATED = 512  # validation samples
CROWD = 64  # as if so many runs shared the machine: one thread a rank, so that others can use it


class CourtStage(Stage):
    """Prose and code in one tokenizer; every scenario has a corpus of its own."""

    @property
    def recipe(self) -> Path:
        return self.folder / f"court-{self.ranks}-{self.seed}.yaml"

    @property
    def texts(self) -> Path:
        return self.folder / "texts"

    def prepare(self) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        prepare_texts(self.texts)
        tree = {**RECIPE, "run": {"seed": self.seed}, "data": {"corpora": [{"path": str(self.folder)}]}}
        micro_batch = GLOBAL_BATCH // self.ranks
        tree["model"] = {**tree["model"], "sequence_length": LENGTH}
        tree["train"] = {**tree["train"], "eval_samples": EVALUATED, "micro_batch": micro_batch}
        self.recipe.write_text(yaml.safe_dump(tree))

    def corpus_of(self, scenario: Scenario) -> tuple[Path, Planted | None]:
        case = BY_NAME[scenario.name]
        places = case.lay(np.random.default_rng((self.seed, 1)))
        corpus_folder = self.folder / f"{case.name}-{self.seed}"
        write_corpus(self.texts, corpus_folder, self.seed, places, case.held)
        if not places.bad:
            return corpus_folder, None
        ranges = Skips.from_numbers(np.array(places.bad, dtype=np.int64)).ranges
        return corpus_folder, Planted(positions=ranges, seed=self.seed, order="", documents=[], kind="text")


def run_case(
    stage: CourtStage, case: Case, watch: Watch = lambda step: None, guarded: bool = True
) -> tuple[RunDirectory, Score]:
    """Run a scenario, or read the results of the same run by the same code. guarded: False: with the guard off."""
    case_stage = replace(stage, steps=case.steps, ranks=case.ranks)
    case_stage.prepare()
    settings = (f"train.steps={case.steps}",)
    scenario = Scenario(case.name, case.title, frozenset(), "", fault=case.fault, overrides=settings)
    run_score = run_drill(case_stage, scenario, watch, CROWD, guarded)
    return stage.name_run(case.name, guarded), run_score


def run_without(stage: CourtStage, case: Case) -> float | None:
    """The loss of a scenario with the guard off. It is run once for the same data and settings: later versions of the
    judgement do not change it."""
    run = stage.name_run(case.name, guarded=False)
    data_note = run.root.with_name(f"{run.root.name}.data")

    def describe_inputs() -> str:
        corpus = Manifest.load_manifest(stage.folder / f"{case.name}-{stage.seed}")
        return "\n".join([corpus.fingerprint(), *stage.settings])

    if not data_note.exists() or data_note.read_text() != describe_inputs() or read_done(run) is None:
        run_case(stage, case, guarded=False)
        data_note.write_text(describe_inputs())
    loss = json.loads(run.summary.read_text()).get("val_loss") if run.summary.exists() else None
    return None if loss is None else float(loss)


def read_outcome(run: RunDirectory, case: Case, seed: int, score: Score) -> CaseOutcome:
    """What became of a run, by its journal and its ledger."""
    journal_events = leave_start_out(run.iterate_events())
    incidents = [summary for _, summary in sorted(find_latest(journal_events).items())]
    search_file = run.root.with_name(run.root.name + SEARCH)
    search_measured: dict[str, Any] = json.loads(search_file.read_text()) if search_file.exists() else {}
    done = read_done(run)
    planted = find_positions(done.planted) if done is not None and done.planted is not None else set()
    return CaseOutcome(
        scenario=case.name,
        seed=seed,
        ended=score.ended,
        exit=score.exit,
        planted=score.fate.planted,
        found=score.fate.skipped,
        lost=score.fate.lost + sum(i.get("lost", 0) for i in incidents),
        untrained=count_untrained(journal_events, planted),
        deferred=score.fate.deferred,
        rewinds=count_rewinds(journal_events),
        undone=score.steps_lost,
        refused=sum(isinstance(journal_event, Discarded) for journal_event in journal_events),
        handovers=score.handovers,
        shifts=sum(isinstance(journal_event, BaselineReset) for journal_event in journal_events),
        incidents=[f"{i['onset']}: {i['verdict']}, {i['cause']}, {i['outcome']}" for i in incidents],
        causes=sorted({i["cause"] for i in incidents}),
        seen=find_sight(journal_events, STEP),
        loss=score.val_loss,
        search_batches=search_measured.get("batches", 0),
        search_seconds=round(search_measured.get("seconds", 0.0), 1),
        wall_seconds=score.wall_seconds,
    )


def leave_start_out(events: Iterable[Event]) -> list[Event]:
    """Without refusals while the rate is first at its peak, where the recipe itself is unsteady."""
    return [e for e in events if not (isinstance(e, Discarded) and e["step"] < START)]


def find_positions(planted: Planted) -> set[int]:
    return set(numbers_of(planted.positions).tolist())


def count_untrained(events: Sequence[Event], planted: set[int]) -> int:
    """Samples that are not planted, of refused updates that were not done again."""
    refused: list[tuple[int, set[int]]] = []
    for event in events:
        if isinstance(event, Discarded):
            batch_positions = set(range(event["first_position"], event["next_position"]))
            refused.append((event["step"], batch_positions - planted))
        elif isinstance(event, Training) or (isinstance(event, IncidentEvent) and event.what == "rewound"):
            step_back = event["step"] if isinstance(event, Training) else event["to_step"]
            refused = [(step, batch_positions) for step, batch_positions in refused if step <= step_back]
    return len(set[int]().union(*(batch_positions for _, batch_positions in refused)))


def count_rewinds(events: Sequence[Event]) -> int:
    """Rewinds, and restarts from a checkpoint, that undid an update: a return over refused steps alone undoes none."""
    rewind_count, refused_steps = 0, set[int]()
    for journal_event in events:
        if isinstance(journal_event, Discarded):
            refused_steps.add(journal_event["step"])
        elif isinstance(journal_event, IncidentEvent) and journal_event.what == "handed over":
            rewind_count += 1
        elif isinstance(journal_event, IncidentEvent) and journal_event.what == "rewound":
            steps_undone = set(range(journal_event["to_step"] + 1, journal_event["policy"]["tripped"] + 1))
            rewind_count += not steps_undone <= refused_steps
            refused_steps -= steps_undone
    return rewind_count


def find_sight(events: Sequence[Event], begin: int) -> int | None:
    """Steps from `begin` to the first refusal or incident."""
    steps_seen = (
        event.step
        for event in events
        if isinstance(event, Discarded) or (isinstance(event, IncidentEvent) and event.what == "opened")
    )
    return next((step - begin for step in steps_seen if step is not None and step >= begin), None)


def _differ(loss: float | None, other: float | None) -> str:
    return "" if loss is None or other is None else f"{loss - other:+.4f}"


class CourtDrill(Drill[CaseOutcome]):
    """Of the scenarios in `names`."""

    columns = (
        Column[CaseOutcome]("scenario", describe_only(lambda o: o.scenario), left=True),
        Column[CaseOutcome]("seed", describe_only(lambda o: o.seed)),
        Column("bad\nfound", describe_only(lambda o: f"{o.found}/{o.planted}" if o.planted else "")),
        Column("others\nlost", describe_only(lambda o: o.lost)),
        Column("un-\ntrained", describe_only(lambda o: o.untrained)),
        Column("de-\nferred", describe_only(lambda o: o.deferred)),
        Column("re-\nwinds", describe_only(lambda o: o.rewinds)),
        Column("steps\nundone", describe_only(lambda o: o.undone)),
        Column("re-\nfused", describe_only(lambda o: o.refused)),
        Column("hand-\novers", describe_only(lambda o: o.handovers)),
        Column("shifts", describe_only(lambda o: o.shifts)),
        Column("seen\nafter", describe_only(lambda o: "" if o.seen is None else o.seen)),
        Column("exit", describe_only(lambda o: o.ended if o.exit is None else o.exit)),
        Column("loss", describe_only(lambda o: "" if o.loss is None else f"{o.loss:.4f}")),
        Column("minus\nwithout", describe_only(lambda o: _differ(o.loss, o.without))),
        Column("minus\nclean", describe_only(lambda o: _differ(o.loss, o.clean))),
        Column("batches\nmeasured", describe_only(lambda o: o.search_batches)),
        Column("seconds\nof it", describe_only(lambda o: f"{o.search_seconds:.1f}")),
        Column("incidents: onset, verdict, cause, outcome", describe_only(lambda o: "\n".join(o.incidents)), left=True,
               wrap=True),
        Column("judged", describe_only(lambda o: f"NOT ok: {', '.join(o.missed)}" if o.missed else "ok"),
               lambda row: bool(row[0].missed), left=True, wrap=True),
    )  # fmt: skip

    def __init__(
        self, names: Sequence[str], seeds: Sequence[int], control: bool, settings: tuple[str, ...]
    ) -> None:
        """control: each run also with the guard off. settings: see `Stage`. Raises ConfigError."""
        self.cases = choose_cases(names)
        self.seeds, self.control, self.settings = seeds, control, settings

    def plan_exercises(self, folder: Path) -> list[Exercise[CaseOutcome]]:
        return [
            Exercise(f"{case.name}, seed {seed}", case.steps, partial(self._judge_case, stage, case))
            for case in self.cases
            for seed in self.seeds
            for stage in [CourtStage(folder, seed, settings=self.settings)]
        ]

    def _judge_case(self, stage: CourtStage, case: Case, watch: Watch) -> list[CaseOutcome]:
        """Run it and what it is compared with, and read what became of it."""
        run, run_score = run_case(stage, case, watch)
        case_outcome = read_outcome(run, case, stage.seed, run_score)
        without = run_without(stage, case) if self.control else None
        clean = run_without(stage, BY_NAME[CLEAN]) if case.compared else None
        return [case_outcome.model_copy(update={"without": without, "clean": clean}).judged_by(case.wishes)]

    def row_of(self, outcome: CaseOutcome) -> tuple[Hashable, Hashable]:
        return outcome.scenario, outcome.seed

    def is_met(self, outcomes: Sequence[CaseOutcome]) -> bool:
        return not any(case_outcome.missed for case_outcome in outcomes)

    def describe_verdict(self, outcomes: Sequence[CaseOutcome]) -> str:
        return (
            f"{sum(not o.missed for o in outcomes)} of {len(outcomes)} as wanted, {sum(o.lost for o in outcomes)} good "
            f"samples skipped for good, {sum(o.untrained for o in outcomes)} more in refused updates"
        )


def list_cases(names: Sequence[str]) -> list[str]:
    """Scenarios by name, without names all, with their titles. Raises ConfigError."""
    return [f"{court_case.name}: {court_case.title}" for court_case in choose_cases(names)]
