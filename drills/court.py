"""`megastable drill court`: small real runs that measure judgement. What is new, easy or repeated is not bad."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Hashable, Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from benchmarks.noise import SIGMA, healthy
from drills.court_scenarios import (
    CASES,
    CLEAN,
    LENGTH,
    NOISES,
    STEP,
    Case,
    CaseOutcome,
    Wish,
    choose_cases,
    prepare_texts,
    write_corpus,
)
from drills.exercise import Column, Drill, Exercise, Watch, describe_only
from drills.plan import SEARCH, Policy
from drills.runner import drill, finished
from drills.scenario import GLOBAL_BATCH, Scenario
from drills.score import Score
from drills.stage import RECIPE, Stage
from megastable.config.stability import StabilityConfig
from megastable.data.manifest import Manifest
from megastable.data.plant import Planted
from megastable.data.skips import Skips, numbers_of
from megastable.run.directory import RunDirectory
from megastable.run.events.event import Event
from megastable.run.events.reading import latest
from megastable.run.events.stability_events import BaselineReset, Discarded, IncidentEvent
from megastable.run.events.training_events import Training
from megastable_guard.actions import Action
from megastable_guard.guard import Recorded, simulate

BY_NAME = {case.name: case for case in CASES}
START = 30  # steps: refusals before are the recipe's, not the scenario's
EVALUATED = 512  # validation samples
CROWD = 64  # as if so many runs shared the machine: one thread a rank, so that others can use it
WITHOUT = "-without"  # ending of a run with the guard off
NOISE_STEPS = 20_000
FEW = 5  # refusals in 10,000 steps
ONE_IN, HEIGHT = 300, 8.0  # of steps have a spike of so many sigma

NOISE_WISHES = (
    Wish("1 rewind at most", lambda r: r.rewinds <= 1),
    Wish(f"{FEW} refusals in 10,000 steps at most", lambda r: 1e4 * r.refused / NOISE_STEPS <= FEW),
)


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
        micro = GLOBAL_BATCH // self.ranks
        tree["model"] = {**tree["model"], "sequence_length": LENGTH}
        tree["train"] = {**tree["train"], "eval_samples": EVALUATED, "micro_batch": micro}
        self.recipe.write_text(yaml.safe_dump(tree))

    def corpus_of(self, scenario: Scenario) -> tuple[Path, Planted | None]:
        case = BY_NAME[scenario.name.removesuffix(WITHOUT)]
        places = case.lay(np.random.default_rng((self.seed, 1)))
        output = self.folder / f"{case.name}-{self.seed}"
        write_corpus(self.texts, output, self.seed, places, case.held)
        if not places.bad:
            return output, None
        ranges = Skips.of_numbers(np.array(places.bad, dtype=np.int64)).ranges
        return output, Planted(positions=ranges, seed=self.seed, order="", documents=[], kind="text")


def run_case(
    folder: Path, case: Case, seed: int, ending: str = "", *overrides: str, watch: Watch = lambda step: None
) -> tuple[RunDirectory, Score]:
    """Run a scenario, or read the results of the same run by the same code. ending: of the run's name."""
    stage = CourtStage(folder, seed, case.steps, case.ranks)
    stage.prepare()
    settings = (f"train.steps={case.steps}", *overrides)
    scenario = Scenario(case.name + ending, case.title, frozenset(), "", fault=case.fault, overrides=settings)
    score = drill(stage, scenario, Policy.OURS, watch, jobs=CROWD)
    return RunDirectory(folder / "runs" / f"{scenario.name}-{Policy.OURS}-{seed}"), score


def run_without(folder: Path, case: Case, seed: int) -> float | None:
    """The loss of a scenario with the guard off. It is run once for the same data: later versions of the judgement do
    not change it."""
    run = RunDirectory(folder / "runs" / f"{case.name}{WITHOUT}-{Policy.OURS}-{seed}")
    note = run.root.with_name(f"{run.root.name}.data")
    told = Manifest.load(folder / f"{case.name}-{seed}").fingerprint() if note.exists() else ""
    if not told or note.read_text() != told or finished(run) is None:
        run_case(folder, case, seed, WITHOUT, "stability.enabled=false")
        note.write_text(Manifest.load(folder / f"{case.name}-{seed}").fingerprint())
    loss = json.loads(run.summary.read_text()).get("val_loss") if run.summary.exists() else None
    return None if loss is None else float(loss)


def read_outcome(run: RunDirectory, case: Case, seed: int, score: Score) -> CaseOutcome:
    """What became of a run, by its journal and its ledger."""
    events = leave_start_out(run.events())
    incidents = [summary for _, summary in sorted(latest(events).items())]
    search = run.root.with_name(run.root.name + SEARCH)
    measured: dict[str, Any] = json.loads(search.read_text()) if search.exists() else {}
    done = finished(run)
    planted = find_positions(done.planted) if done is not None and done.planted is not None else set()
    return CaseOutcome(
        scenario=case.name,
        seed=seed,
        ended=score.ended,
        exit=score.exit,
        planted=score.fate.planted,
        found=score.fate.convicted,
        lost=score.fate.lost + sum(i.get("lost", 0) for i in incidents),
        untrained=count_untrained(events, planted),
        deferred=score.fate.deferred,
        rewinds=count_rewinds(events),
        undone=score.steps_lost,
        refused=sum(isinstance(event, Discarded) for event in events),
        handovers=score.handovers,
        alerts=score.alerts,
        shifts=sum(isinstance(event, BaselineReset) for event in events),
        incidents=[f"{i['onset']}: {i['verdict']}, {i['cause']}, {i['outcome']}" for i in incidents],
        causes=sorted({i["cause"] for i in incidents}),
        seen=find_sight(events, STEP),
        loss=score.val_loss,
        search_batches=measured.get("batches", 0),
        search_seconds=round(measured.get("seconds", 0.0), 1),
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
            batch = set(range(event["first_position"], event["next_position"]))
            refused.append((event["step"], batch - planted))
        elif isinstance(event, Training) or (isinstance(event, IncidentEvent) and event.what == "rewound"):
            back = event["step"] if isinstance(event, Training) else event["to_step"]
            refused = [(step, batch) for step, batch in refused if step <= back]
    return len(set[int]().union(*(batch for _, batch in refused)))


def count_rewinds(events: Sequence[Event]) -> int:
    """Rewinds, and restarts from a checkpoint, that undid an update: a return over refused steps alone undoes none."""
    count, refused = 0, set[int]()
    for event in events:
        if isinstance(event, Discarded):
            refused.add(event["step"])
        elif isinstance(event, IncidentEvent) and event.what == "handed over":
            count += 1
        elif isinstance(event, IncidentEvent) and event.what == "rewound":
            undone = set(range(event["to_step"] + 1, event["policy"]["tripped"] + 1))
            count += not undone <= refused
            refused -= undone
    return count


def find_sight(events: Sequence[Event], begin: int) -> int | None:
    """Steps from `begin` to the first refusal or incident."""
    steps = (
        event.step
        for event in events
        if isinstance(event, Discarded) or (isinstance(event, IncidentEvent) and event.what == "opened")
    )
    return next((step - begin for step in steps if step is not None and step >= begin), None)


# The guard on noise alone: every action is a false alarm


def make_noise(name: str, seed: int) -> Iterator[Recorded]:
    """The steps of a healthy run: its width changes slowly, or in bursts, or it has spikes that mean nothing."""
    if name != "noise-spikes":
        yield from healthy(
            {"noise-volatile": "heteroscedastic", "noise-bursts": "bursts"}[name], NOISE_STEPS, seed
        )
        return
    chance = np.random.default_rng((seed, 2))
    for row in healthy("white", NOISE_STEPS, seed):
        spike = HEIGHT * (chance.random() < 1 / ONE_IN)
        assert row.grad_norm is not None
        # The scatter of the log norm: 0.1 times Student's t of 3 degrees, whose robust deviation is 0.113.
        yield row._replace(loss=row.loss + SIGMA * spike, grad_norm=row.grad_norm * np.exp(0.113 * spike))


def judge_noise(name: str, seed: int) -> CaseOutcome:
    """What the guard, with default settings, would have done."""
    done, undone = Counter[Action](), list[str]()
    config = StabilityConfig()
    kept = config.snapshots
    for judged in simulate(make_noise(name, seed), config, interval=kept.interval, keep=kept.keep):
        done[judged.action] += 1
        if judged.action not in (Action.APPLY, Action.DISCARD):
            undone.append(f"{judged.verdict}: {judged.action}")
    return CaseOutcome(
        scenario=name, seed=seed, refused=done[Action.DISCARD], rewinds=done[Action.REWIND],
        handovers=done[Action.HANDOVER], alerts=done[Action.ALERT], incidents=undone,
    ).judged_by(NOISE_WISHES)  # fmt: skip


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

    def __init__(self, names: Sequence[str], seeds: Sequence[int], control: bool) -> None:
        """control: each run also with the guard off. Raises ConfigError."""
        self.cases, self.noises = choose_cases(names)
        self.seeds, self.control = seeds, control

    def plan_exercises(self, folder: Path) -> list[Exercise[CaseOutcome]]:
        return [
            *(
                Exercise(f"{name}, seed {seed}", NOISE_STEPS, partial(self._judge_noise, name, seed))
                for name in self.noises
                for seed in self.seeds
            ),
            *(
                Exercise(
                    f"{case.name}, seed {seed}", case.steps, partial(self._judge_case, folder, case, seed)
                )
                for case in self.cases
                for seed in self.seeds
            ),
        ]

    def _judge_noise(self, name: str, seed: int, watch: Watch) -> list[CaseOutcome]:
        return [judge_noise(name, seed)]

    def _judge_case(self, folder: Path, case: Case, seed: int, watch: Watch) -> list[CaseOutcome]:
        """Run it and what it is compared with, and read what became of it."""
        run, score = run_case(folder, case, seed, watch=watch)
        outcome = read_outcome(run, case, seed, score)
        without = run_without(folder, case, seed) if self.control else None
        clean = run_without(folder, BY_NAME[CLEAN], seed) if case.compared else None
        return [outcome.model_copy(update={"without": without, "clean": clean}).judged_by(case.wishes)]

    def row_of(self, outcome: CaseOutcome) -> tuple[Hashable, Hashable]:
        return outcome.scenario, outcome.seed

    def is_met(self, outcomes: Sequence[CaseOutcome]) -> bool:
        return not any(outcome.missed for outcome in outcomes)

    def describe_verdict(self, outcomes: Sequence[CaseOutcome]) -> str:
        return (
            f"{sum(not o.missed for o in outcomes)} of {len(outcomes)} as wanted, {sum(o.lost for o in outcomes)} good "
            f"samples skipped for good, {sum(o.untrained for o in outcomes)} more in refused updates"
        )


def list_cases() -> list[str]:
    """All scenarios, those of real runs with their titles."""
    return [*(f"{case.name}: {case.title}" for case in CASES), *NOISES]
