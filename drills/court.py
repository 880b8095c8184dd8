"""`megastable drill court`: small real runs that measure judgement. What is new, easy or repeated is not bad."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import yaml
from rich.table import Table
from rich.text import Text

from drills.court_noise import judge_noise
from drills.court_scenarios import CASES, CLEAN, STEP, Case, Row, choose_cases
from drills.court_texts import LENGTH, prepare_texts, write_corpus
from drills.plan import SEARCH, Policy
from drills.runner import drill, finished
from drills.scenario import GLOBAL_BATCH, Scenario
from drills.score import Score
from drills.stage import RECIPE, Stage
from drills.table import console
from megastable.base.progress_bar import bar
from megastable.data.manifest import Manifest
from megastable.data.plant import Planted
from megastable.data.skips import Skips
from megastable.run.directory import RunDirectory
from megastable.run.events.event import Event
from megastable.run.events.reading import latest
from megastable.run.events.stability_events import BaselineReset, Discarded, IncidentEvent
from megastable.run.events.training_events import Training

BY_NAME = {case.name: case for case in CASES}
START = 30  # steps: refusals before are the recipe's, not the scenario's
EVALUATED = 512  # validation samples
CROWD = 64  # as if so many runs shared the machine: one thread a rank, so that others can use it
WITHOUT = "-without"  # ending of a run with the guard off


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


def run_court(
    names: Sequence[str], seeds: Sequence[int], control: bool, keep: Path | None, quiet: bool
) -> list[Row]:
    """Run the scenarios in `names`, one after another. control: also each with the guard off. keep: where runs are
    left. Raises ConfigError."""
    cases, noises = choose_cases(names)
    todo = [(case, seed) for case in cases for seed in seeds]
    rows: list[Row] = []
    with ExitStack() as stack:
        folder = (keep or Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="drill-")))).resolve()
        total = len(todo) + len(noises) * len(seeds)
        shown = stack.enter_context(bar("starting", total, silent=quiet, unit="runs"))

        def tell(row: Row) -> None:
            rows.append(row)
            shown()
            if not quiet:
                said = ", ".join(row.missed) or "ok"
                line = (
                    f"{len(rows)}/{total} {row.scenario}, seed {row.seed}: {said}, {row.wall_seconds:.0f} s"
                )
                console().print(line, soft_wrap=True)

        for name in noises:
            for seed in seeds:
                shown.doing(name)
                tell(judge_noise(name, seed))
        for case, seed in todo:
            shown.doing(f"{case.name}, seed {seed}")
            tell(judge_case(folder, case, seed, control))
    return rows


def judge_case(folder: Path, case: Case, seed: int, control: bool) -> Row:
    """Run a scenario, and what it is compared with, and read what became of it."""
    run, score = run_case(folder, case, seed)
    row = read_row(run, case, seed, score)
    without = run_without(folder, case, seed) if control else None
    clean = run_without(folder, BY_NAME[CLEAN], seed) if case.compared else None
    row = row.model_copy(update={"without": without, "clean": clean})
    return row.model_copy(update={"missed": [wish.words for wish in case.wishes if not wish.grants(row)]})


def run_case(
    folder: Path, case: Case, seed: int, ending: str = "", *overrides: str
) -> tuple[RunDirectory, Score]:
    """Run a scenario, or read the results of the same run by the same code. ending: of the run's name."""
    stage = CourtStage(folder, seed, case.steps, case.ranks)
    stage.prepare()
    settings = (f"train.steps={case.steps}", *overrides)
    scenario = Scenario(case.name + ending, case.title, frozenset(), "", fault=case.fault, overrides=settings)
    score = drill(stage, scenario, Policy.OURS, lambda step: None, jobs=CROWD)
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
    return read_loss(run)


def read_loss(run: RunDirectory) -> float | None:
    """The validation loss at the end; None for a run that did not reach it."""
    if not run.summary.exists():
        return None
    loss = json.loads(run.summary.read_text()).get("val_loss")
    return None if loss is None else float(loss)


def read_row(run: RunDirectory, case: Case, seed: int, score: Score) -> Row:
    """What became of a run, by its journal and its ledger."""
    events = leave_start_out(run.events())
    incidents = [summary for _, summary in sorted(latest(events).items())]
    search = run.root.with_name(run.root.name + SEARCH)
    measured: dict[str, Any] = json.loads(search.read_text()) if search.exists() else {}
    done = finished(run)
    planted = find_positions(done.planted) if done is not None and done.planted is not None else set()
    return Row(
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
    return {position for first, end in planted.positions for position in range(first, end)}


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


HEADERS = (
    "seed", "bad\nfound", "others\nlost", "un-\ntrained", "de-\nferred", "re-\nwinds", "steps\nundone", "re-\nfused",
    "hand-\novers", "shifts", "seen\nafter", "exit", "loss", "minus\nwithout", "minus\nclean", "batches\nmeasured",
    "seconds\nof it", "incidents: onset, verdict, cause, outcome", "",
)  # fmt: skip
LEFT = HEADERS[-2:]


def show_table(rows: Sequence[Row]) -> Table:
    """A line a run; what was not granted in red."""
    shown = Table(header_style="bold")
    shown.add_column("scenario", no_wrap=True)
    for header in HEADERS:
        shown.add_column(header, justify="left" if header in LEFT else "right")
    for row in rows:
        judged = Text("ok") if not row.missed else Text("NOT ok: " + ", ".join(row.missed), "bold red")
        shown.add_row(row.scenario, *describe_row(row), judged)
    return shown


def describe_row(row: Row) -> list[str]:
    """The cells of a run, except its name and the judgement."""

    def differ(other: float | None) -> str:
        return "" if row.loss is None or other is None else f"{row.loss - other:+.4f}"

    return [
        str(row.seed), f"{row.found}/{row.planted}" if row.planted else "", str(row.lost), str(row.untrained),
        str(row.deferred), str(row.rewinds), str(row.undone), str(row.refused), str(row.handovers), str(row.shifts),
        "" if row.seen is None else str(row.seen), row.ended if row.exit is None else str(row.exit),
        "" if row.loss is None else f"{row.loss:.4f}", differ(row.without), differ(row.clean),
        str(row.search_batches), f"{row.search_seconds:.1f}", "\n".join(row.incidents),
    ]  # fmt: skip


def describe_verdict(rows: Sequence[Row]) -> str:
    """The result, in a sentence."""
    return (
        f"{sum(not row.missed for row in rows)} of {len(rows)} as wanted, {sum(row.lost for row in rows)} good samples "
        f"skipped for good, {sum(row.untrained for row in rows)} more in refused updates"
    )
