"""Drills of learning: small trainings with planted faults, beside a clean one."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from statistics import fmean

from drills.exercise import Column, Drill, Exercise, Watch
from drills.runner import run_drill
from drills.scenario import (
    CLEAN,
    CLEAN_ABSENT,
    CLEAN_BARE,
    CLEAN_EPOCHS,
    CLEAN_EXPERTS,
    CLEAN_FP8,
    CLEAN_SIGMOID,
    CLEAN_SLOW,
    GLOBAL_BATCH,
    GROSS,
    HEALTHY,
    MIXTURE,
    SLOW,
    STEPS,
    THIN,
    Scenario,
)
from drills.score import TARGET, WRONG, Score, compare_scores, is_better, is_within
from drills.stage import Stage
from megastable.base.errors import ConfigError

QUICK_STEPS, QUICK_FAULT_STEP = 96, 62
SCENARIOS = (*GROSS, *THIN)  # of the table
EVERY = (*SCENARIOS, *SLOW, *MIXTURE, *HEALTHY)
GROUPS = {
    "all": SCENARIOS,
    "gross": GROSS,
    "thin": THIN,
    "slow": SLOW,
    "experts": MIXTURE,
    "healthy": HEALTHY,
}
QUICK = ("random-tokens", "killed-rank")
NAMES = tuple(scenario.name for scenario in EVERY)


def choose_scenarios(names: Sequence[str]) -> list[Scenario]:
    """Scenarios by name or group, in the table's order; without names: all. Raises ConfigError."""
    if unknown_names := [name for name in names if name not in (*NAMES, *GROUPS)]:
        raise ConfigError(f"{unknown_names[0]}: there is no such scenario: {', '.join([*GROUPS, *NAMES])}")
    group_names = {one_scenario.name for name in (names or ["all"]) for one_scenario in GROUPS.get(name, ())}
    return [scenario for scenario in EVERY if scenario.name in {*names, *group_names}]


def references(chosen: Sequence[Scenario]) -> list[Scenario]:
    """The fault-free runs to compare those of `chosen` with."""
    return [
        clean_scenario
        for clean_scenario in (
            CLEAN,
            CLEAN_EPOCHS,
            CLEAN_FP8,
            CLEAN_SLOW,
            CLEAN_BARE,
            CLEAN_ABSENT,
            CLEAN_EXPERTS,
            CLEAN_SIGMOID,
        )
        if any(one_scenario.reference == clean_scenario.name for one_scenario in chosen)
    ]


def list_scenarios(names: Sequence[str]) -> list[str]:
    """Scenarios by name or group, without names all, with their titles. Raises ConfigError."""
    listed_scenarios = choose_scenarios(names) if names else EVERY
    return [f"{one_scenario.name}: {one_scenario.title}" for one_scenario in listed_scenarios]


def _each(cell: Callable[[Score], object]) -> Callable[[Sequence[Score]], str]:
    """The cells of all seeds of a row; equal ones are shown once."""

    def describe(row: Sequence[Score]) -> str:
        cells = [str(cell(one_score)) for one_score in row]
        return " ".join(dict.fromkeys(cells) if len(set(cells)) == 1 else cells)

    return describe


def _describe_excess(s: Score) -> str:
    if s.clean or s.excess is None:
        return ""
    return f"{s.excess:+.4f}{' better' if is_better(s) else ''}"


def _describe_warnings(s: Score) -> str:
    warned_mark = "" if s.warned is None else " ✓" if s.warned else " ✗"
    return f"{s.warnings}{warned_mark}"


def _describe_without(s: Score) -> str:
    return f"{s.without:.4f}" if isinstance(s.without, float) else s.without or ""


def _judged(found: Sequence[str], right: bool) -> str:
    return f"{' and '.join(dict.fromkeys(found)) or 'none'} {'✓' if right else '✗'}"


def describe_ends(row: Sequence[Score]) -> str:
    """How runs ended: the mean loss, or the end of those without one."""
    val_losses = [s.val_loss for s in row if s.ended == "finished" and s.val_loss is not None]
    if len(val_losses) == len(row):
        return f"{fmean(val_losses):.4f}"
    without_loss = [s for s in row if s.ended != "finished" or s.val_loss is None]
    return ", ".join(dict.fromkeys(s.describe_end() for s in without_loss))


COLUMNS: tuple[Column[Score], ...] = (
    Column("scenario", lambda row: row[0].scenario, left=True),
    Column("val\nloss", describe_ends),
    Column("minus\nclean", _each(_describe_excess),
           lambda row: any(not s.clean and not is_within(s) for s in row)),
    Column("loss without\nthe guard", _each(_describe_without)),
    Column("bad\nfound", _each(lambda s: f"{s.fate.skipped}/{s.fate.planted}" if s.fate.planted else "")),
    Column("clean\nlost", _each(lambda s: s.fate.lost), lambda row: any(s.fate.lost for s in row)),
    Column("put\noff", _each(lambda s: s.fate.deferred)),
    Column("steps\nlost", _each(lambda s: s.steps_lost)),
    Column("batches\nrefused", _each(lambda s: s.discarded)),
    Column("inci-\ndents", _each(lambda s: s.incidents)),
    Column("re-\nwinds", _each(lambda s: s.rewinds)),
    Column("cuts", _each(lambda s: s.cuts)),
    Column("hand-\novers", _each(lambda s: s.handovers)),
    Column("alerts", _each(lambda s: s.alerts)),
    Column("warn-\nings", _each(_describe_warnings)),
    Column("routing\nwarned", _each(lambda s: s.signs)),
    Column("led\nby", _each(lambda s: "" if s.begin is None else "never ✗" if s.lead is None else s.lead)),
    Column("exit", _each(lambda s: "" if s.exit is None else s.exit)),
    Column("seconds to\nrecover", _each(
        lambda s: "" if s.seconds_to_recover is None else f"{s.seconds_to_recover:.1f}")),
    Column("false\nalarms", _each(lambda s: s.false_alarms)),
    Column("class", _each(lambda s: _judged(s.kinds, s.kind_right)), left=True),
    Column("remedy", _each(lambda s: ", ".join(s.remedies)), left=True),
    Column("place", _each(lambda s: "" if s.placed is None else "✓" if s.placed else "✗"),
           lambda row: any(s.placed is False for s in row)),
    Column("cause", _each(lambda s: _judged(s.causes, s.cause_right)),
           lambda row: not all(s.cause_right for s in row), left=True),
)  # fmt: skip


class LearningDrill(Drill[Score]):
    """Of the scenarios in `names`, with each seed."""

    columns = COLUMNS

    def __init__(
        self,
        names: Sequence[str],
        seeds: Sequence[int],
        stage: Stage = Stage(Path(), 0),  # noqa: B008
        control: bool = False,
        jobs: int = 1,
        quick: bool = False,
    ) -> None:
        """stage: of every run, but for folder, seed and steps. control: each run also with the guard off. Raises
        ConfigError."""
        self.scenarios = choose_scenarios(names or (list(QUICK) if quick else []))
        if stage.text is not None and not stage.text.exists():
            raise ConfigError(f"--text {stage.text}: there is no such file or folder")
        if stage.ranks < 1 or GLOBAL_BATCH % stage.ranks:
            raise ConfigError(
                f"--ranks {stage.ranks}: a step's {GLOBAL_BATCH} samples are shared evenly; choose 1, 2 or 4"
            )
        if quick:
            self.scenarios = [scenario.at_step(QUICK_FAULT_STEP) for scenario in self.scenarios]
        text = stage.text and stage.text.resolve()
        self.stage = replace(stage, steps=QUICK_STEPS if quick else STEPS, text=text)
        self.seeds, self.control, self.jobs = seeds, control, jobs

    def plan_exercises(self, folder: Path) -> list[Exercise[Score]]:
        """The clean runs first, then every scenario, with every seed."""
        stage_by_seed = [replace(self.stage, folder=folder, seed=seed) for seed in self.seeds]
        for stage in stage_by_seed:
            stage.prepare()
        all_scenarios = (*references(self.scenarios), *self.scenarios)
        return [
            Exercise(f"{s.name}, seed {stage.seed}", stage.steps, partial(self._run, stage, s))
            for s in all_scenarios
            for stage in stage_by_seed
        ]

    def _run(self, stage: Stage, scenario: Scenario, watch: Watch) -> list[Score]:
        own_score = run_drill(stage, scenario, watch, self.jobs)
        if not self.control:
            return [own_score]
        bare_score = run_drill(stage, scenario, watch, self.jobs, guarded=False)
        without = bare_score.describe_end() if bare_score.val_loss is None else bare_score.val_loss
        return [own_score.model_copy(update={"without": without})]

    def row_of(self, outcome: Score) -> tuple[Hashable, Hashable]:
        return outcome.scenario, outcome.scenario

    def compare_outcomes(self, outcomes: Sequence[Score]) -> list[Score]:
        return compare_scores(outcomes)

    def is_met(self, outcomes: Sequence[Score]) -> bool:
        """None ends worse or loses a clean sample for good, at most one in 12 causes is wrong, and nothing is done
        without a fault."""
        drilled = [s for s in outcomes if not s.clean]
        wrong = sum(not s.cause_right for s in drilled)
        is_any_lost = any(s.fate.lost for s in outcomes)
        acts_unasked = any(s.incidents for s in outcomes if s.clean)
        right_enough = wrong <= len(drilled) // WRONG and not is_any_lost and not acts_unasked
        return all(map(is_within, drilled)) and right_enough

    def describe_verdict(self, outcomes: Sequence[Score]) -> str:
        drilled = [s for s in outcomes if not s.clean]
        well, right = sum(map(is_within, drilled)), sum(s.cause_right for s in drilled)
        gained_count = sum(is_within(s) and is_better(s) for s in drilled)
        alarms, lost = sum(s.false_alarms for s in outcomes), sum(s.fate.lost for s in outcomes)
        return (
            f"{well} of {len(drilled)} at most {TARGET} nat worse than the clean run (or warned of, where that is "
            f"asked for){', ' + str(gained_count) + ' of them better by more than that' if gained_count else ''}, "
            f"cause right in {right} of {len(drilled)}, {lost} clean samples lost for good, {alarms} false alarms"
        )
