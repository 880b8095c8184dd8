"""`megastable drill sdc`: plant silent corruption into real runs, and tell what was found of it.

In each layout a clean run, and then one run for every fault.
"""

from __future__ import annotations

import importlib.metadata
import os
import shutil
import time
from collections.abc import Callable, Hashable, Mapping, Sequence
from datetime import UTC, datetime
from functools import cached_property, partial
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from benchmarks.ranks import RankEnd, run_on_ranks
from drills.corruption_plan import (
    KINDS,
    LAYOUTS,
    RESUMED,
    Change,
    Layout,
    Planned,
    choose_faults,
    fits_layout,
    must_be_found,
    plan_faults,
    plan_quick,
)
from drills.exercise import Column, Drill, Exercise, Outcome, Watch
from megastable.base.errors import ConfigError, MegastableError
from megastable.checkpoint.store import name_of
from megastable.config.tree import RunConfig
from megastable.data.manifest import FILE
from megastable.run.directory import RunDirectory

# Events that say that hardware lied, or that its copies do.
FINDINGS = (
    "replicas_differ", "gradients_doubted", "messages_differ", "state_changed", "replay_differs", "snapshot_rejected",
    "wrong_copy",
)  # fmt: skip
TARGET = 0.95  # of the faults that must be found; of those found, with the right rank
Entry = Mapping[str, Any]

Ending = Literal["finished", "handed over", "unstable", "hung", "failed"]
ENDINGS: dict[str, Ending] = {"HandoverError": "handed over", "UnstableError": "unstable", "hung": "hung"}
# named: the right rank alone; suspected: among others; unknown: no rank; wrong: others.
Naming = Literal["named", "suspected", "unknown", "wrong"]
VOCABULARY = 250
LENGTH = 32
TOKENS = 40_000
LAST = 40  # steps of a run
SAMPLES = 96  # of a step; of fewer, gradients of single ranks have no direction in common
MICRO_BATCHES = 2  # of a step and rank
# A fault is between the second look and the third.
HARDWARE: dict[str, Any] = {"fingerprint_interval": 10, "replay_interval": 10}
PATIENCE = 600.0  # seconds of a clean run
# A run with a fault may take so long, or so many times as long as the clean one: the machine may be busy.
HUNG, TIMES = 300.0, 20.0
PRELOAD = [
    "megastable.train", "drills.corruption_faults", "deepspeed.module_inject.auto_ep_layer", "deepspeed.comm.mori",
    "numpy.ma", "rich._emoji_codes",
]  # fmt: skip


def make_config(corpus: Path, run: Path, layout: Layout, seed: int) -> RunConfig:
    """A run of seconds: a tiny model."""
    config_tree: dict[str, Any] = {
        "run": {"dir": run, "seed": seed, "timeout": 600},
        "model": {"layers": 2, "hidden": 32, "heads": 4, "kv_heads": 2, "ffn": 64, "sequence_length": LENGTH}
        | {"vocab_multiple": 64},
        "data": {"corpora": [{"path": corpus}]},
        "precision": {"kind": "bf16"},
        "parallel": layout.parallel,
        "optimizer": {"lr": 3e-3},
        "schedule": {"warmup_steps": 5, "total_steps": LAST},
        "train": {"steps": LAST, "global_batch": SAMPLES, "micro_batch": SAMPLES // layout.data // MICRO_BATCHES}
        | {"eval_samples": 0, "eval_interval": 0},
        # A hand-over goes back to the one of step 20, and a wrong replica resumes from it.
        "checkpoint": {"interval": RESUMED},
        "stability": {"hardware": HARDWARE, "snapshots": {"interval": 5}},
        "logging": {"trackers": [], "interval": 1000, "norms_interval": 0, "peak_tflops": 1.0},
    }  # fmt: skip
    return RunConfig.model_validate(config_tree)


class Course:
    """The runs of a layout with a seed."""

    def __init__(self, layout: Layout, seed: int, corpus: Path, folder: Path) -> None:
        self.layout, self.seed, self.corpus, self.folder = layout, seed, corpus, folder

    @cached_property
    def clean(self) -> Clean:
        """The run without a fault, done first. Raises MegastableError if it fails."""
        shutil.rmtree(self.folder, ignore_errors=True)
        self.folder.mkdir(parents=True)
        ended, run_seconds = self._run("clean", None, PATIENCE)
        if any(rank.error for rank in ended):
            texts = [f"rank {rank}: {end.error} {end.text}" for rank, end in enumerate(ended) if end.error]
            log = (self.folder / "clean.log").read_text(errors="replace")[-2000:]
            raise MegastableError(f"the clean run of {self.layout.name} failed: {'; '.join(texts)}\n{log}")
        events = _events(self.folder / "clean")
        return Clean(
            layout=self.layout.name, seed=self.seed, findings=findings(events), incidents=incidents(events),
            seconds=round(run_seconds, 1),
        )  # fmt: skip

    def strike(self, fault: Planned, watch: Watch) -> list[FaultOutcome]:
        """Run with a fault."""
        seconds_limit = max(HUNG, TIMES * self.clean.seconds)
        run_name = f"{fault.kind.replace('/', '-')}-{fault.position + 1}"
        if fault.begin:
            self._resume(self.folder / run_name, fault.begin)
        rank_ends, run_seconds = self._run(run_name, fault, seconds_limit)
        held = rank_ends[fault.rank].result
        left = _bytes(self.folder / run_name)
        fault_outcome = judge_fault(
            fault, must_be_found(fault.kind), held.changes if held else (), _events(self.folder / run_name),
            [rank.error for rank in rank_ends], left == _bytes(self.folder / "clean") if left else None, run_seconds,
            held and held.time, next((f"{rank.error}: {rank.text}" for rank in rank_ends if rank.error), ""),
        )  # fmt: skip
        return [fault_outcome]

    def _run(self, name: str, fault: Planned | None, limit: float) -> tuple[list[RankEnd], float]:
        # Not at the top: it imports torch, which takes longer than to refuse bad input.
        from drills.corruption_faults import FaultJob, train_with_fault

        begin_time = time.monotonic()
        run_config = make_config(self.corpus, self.folder / name, self.layout, self.seed)
        rank_ends = run_on_ranks(
            self.layout.ranks, train_with_fault, FaultJob(run_config, fault), limit,
            collective_timeout=run_config.run.timeout, log=self.folder / f"{name}.log", preload=PRELOAD,
        )  # fmt: skip
        return rank_ends, time.monotonic() - begin_time

    def _resume(self, run: Path, step: int) -> None:
        """Make a run that was stopped after a checkpoint, and nothing else."""
        clean_folder = self.folder / "clean"
        checkpoint_path = _checkpoint(clean_folder, step)
        shutil.copytree(checkpoint_path, run / checkpoint_path.relative_to(clean_folder))
        shutil.copy2(RunDirectory(clean_folder).recipe, run)


def _bytes(run: Path) -> dict[str, bytes]:
    """Of the last checkpoint, by file; empty without one."""
    return {path.name: path.read_bytes() for path in sorted(_checkpoint(run, LAST).glob("*.safetensors"))}


def _checkpoint(run: Path, step: int) -> Path:
    return RunDirectory(run).checkpoints / name_of(step)


def _events(run: Path) -> list[Entry]:
    return [journal_event.fields for journal_event in RunDirectory(run).iterate_events()]


# What was found of a fault, by its run's journal


class Clean(BaseModel):
    """A run without a fault. findings: names of events that it must not have; incidents: their causes."""

    model_config = ConfigDict(extra="forbid")

    layout: str
    seed: int
    findings: list[str]
    incidents: list[str]
    seconds: float


class FaultOutcome(Outcome):
    """What became of a fault.

    expected: whether it must be found. changes: what it changed; nothing: it did not happen. ended: how its run did,
    with the error, if any. same: whether the last checkpoint has the bytes of the clean run's; None without one. found:
    by which event, empty if by none; verdict: of that; steps: that were done with the fault by then; naming, ranks: of
    all such events; reason: of the first. early: events from before the fault. guard: causes of incidents, and refused
    updates, where nothing was found.
    """

    planned: Planned
    expected: bool
    changes: list[Change]
    ended: Ending
    error: str = ""
    same: bool | None
    found: str
    verdict: str = ""
    steps: int | None = None
    naming: Naming | None = None
    ranks: list[list[int]] = Field(default_factory=list)
    reason: str = ""
    early: list[str] = Field(default_factory=list)
    guard: list[str] = Field(default_factory=list)
    seconds: float

    @property
    def harmless(self) -> bool:
        """Whether it left no trace, although nobody undid it: it corrupted nothing."""
        return not self.found and self.same is True and bool(self.changes)

    @property
    def counts(self) -> bool:
        """Whether it must be found."""
        return self.expected and not self.harmless

    @property
    def right(self) -> bool:
        """Whether the right rank was named, or is among those that were."""
        return self.naming in ("named", "suspected")

    @property
    def undone(self) -> bool | None:
        """Whether the run ends as the clean one does, because the fault was found; None: a fault that lasts cannot be
        undone, and one that was not found is not."""
        return self.same is True if self.found and not self.planned.lasts else None

    @property
    def finder(self) -> str:
        """By what it was found."""
        event_name = self.found.replace("_", " ")
        return f"{event_name} ({self.verdict})" if self.verdict else event_name

    @property
    def instead(self) -> str:
        """What became of a fault that was not found."""
        if not self.changes and self.ended != "hung":
            return "did not happen"
        if self.harmless:
            return "left no trace"
        if self.ended != "finished":
            return self.ended
        return f"guard: {', '.join(dict.fromkeys(self.guard))}" if self.guard else ""

    def describe(self) -> str:
        if not self.found:
            return f"not found{', ' if self.instead else ''}{self.instead}, {self.seconds:.0f} s"
        undone_text = {True: ", undone", False: ", not undone", None: ""}[self.undone]
        return f"found by {self.finder} after {self.steps} steps, rank {self.naming}{undone_text}, {self.seconds:.0f} s"


def is_finding(event: Entry) -> bool:
    """A gradient that only its data made stand out is none."""
    name = event.get("event")
    return name in FINDINGS and not (name == "gradients_doubted" and event.get("verdict") == "data")


def findings(events: Sequence[Entry]) -> list[str]:
    return [str(journal_event["event"]) for journal_event in events if is_finding(journal_event)]


def incidents(events: Sequence[Entry]) -> list[str]:
    """The causes of incidents, as they were known in the end."""
    cause_by_number = {}
    for journal_event in events:
        if journal_event.get("event") == "incident":
            summary = journal_event.get("summary") or {}
            cause_by_number[journal_event.get("number")] = str(summary.get("cause"))
    return list(cause_by_number.values())


def ending(errors: Sequence[str]) -> Ending:
    """Of a run, from what was raised on its ranks; empty: nothing."""
    raised_names = [error for error in errors if error]
    if not raised_names:
        return "finished"
    known_endings = {ENDINGS.get(error, "failed") for error in raised_names}
    return known_endings.pop() if len(known_endings) == 1 else "failed"


def judge_naming(told: Sequence[Sequence[int]], rank: int) -> Naming:
    """What several events together say of the rank that is at fault."""
    ranks_told = [told_ranks for told_ranks in told if told_ranks]
    if not ranks_told:
        return "unknown"
    if any(rank not in told_ranks for told_ranks in ranks_told):
        return "wrong"
    return "named" if any(list(told_ranks) == [rank] for told_ranks in ranks_told) else "suspected"


def judge_fault(
    planned: Planned,
    expected: bool,
    changes: Sequence[Change],
    events: Sequence[Entry],
    errors: Sequence[str],
    same: bool | None,
    seconds: float,
    struck: float | None,
    text: str = "",
) -> FaultOutcome:
    """events: of the run's journal; errors: what was raised on its ranks, text: of the first of them. struck: when the
    fault did, in unix time."""
    all_findings = [event for event in events if is_finding(event)]
    is_known = struck is not None or not any(errors)  # of a run that was ended, when the fault struck is not
    late = [event for event in all_findings if struck is not None and event["time"] >= struck]
    # A snapshot that is rejected is of an earlier step.
    first_finding = min(late, key=lambda event: event["event"] == "snapshot_rejected") if late else {}
    ranks_told = [[int(rank) for rank in event.get("ranks") or []] for event in late]
    refused_updates = ["refused" for event in events if event.get("event") == "discarded"][:1]
    return FaultOutcome(
        planned=planned,
        expected=expected,
        changes=list(changes),
        ended=ending(errors),
        error=text,
        same=same,
        found=str(first_finding.get("event", "")),
        verdict=str(first_finding.get("verdict", "")),
        # Copies that differ are noticed in the step after the one that the event names.
        steps=max(0, int(first_finding.get("step") or 0) - planned.step) if late else None,
        naming=judge_naming(ranks_told, planned.rank) if late else None,
        ranks=ranks_told,
        reason=str(first_finding.get("reason", "")),
        early=[str(event["event"]) for event in all_findings if event not in late] if is_known else [],
        guard=[] if late else incidents(events) + refused_updates,
        seconds=round(seconds, 1),
    )


class Total(BaseModel):
    """Numbers of faults. counted: that must be found; found: of those; found_at_all: of all. right: of these, those
    whose rank was named, alone or among others; undone: of those that can_be_undone, to the bytes of the clean run.
    harmless: left no trace, unfound; absent: did not happen. false_alarms: runs with a finding without a fault, or
    before it."""

    model_config = ConfigDict(extra="forbid")

    faults: int
    counted: int
    found: int
    found_at_all: int
    right: int
    can_be_undone: int
    undone: int
    harmless: int
    hung: int
    absent: int
    clean: int
    false_alarms: int

    @property
    def met(self) -> bool:
        """Whether the targets are."""
        is_enough = self.found >= TARGET * self.counted and self.right >= TARGET * self.found_at_all
        return is_enough and not self.false_alarms and not self.absent

    def describe(self) -> str:
        """In a sentence."""
        extra_texts = [f"{self.hung} hung"] if self.hung else []
        extra_texts += [f"{self.absent} did not happen"] if self.absent else []
        other_count = self.faults - self.counted
        return (
            f"{self.found} of {self.counted} faults that must be found were"
            f"{f', and {self.found_at_all - self.found} of {other_count} others' if other_count else ''}; "
            f"the right rank named in {self.right} of {self.found_at_all}, "
            f"{self.undone} of {self.can_be_undone} undone to the bytes of the clean run; "
            f"{self.harmless} left no trace{''.join(f', {extra_text}' for extra_text in extra_texts)}; "
            f"{self.false_alarms} false alarms, with {self.clean} clean runs"
        )


def count_outcomes(outcomes: Sequence[FaultOutcome], clean: Sequence[Clean]) -> Total:
    found_outcomes = [o for o in outcomes if o.found]
    undone_outcomes = [o.undone for o in found_outcomes if o.undone is not None]
    return Total(
        faults=len(outcomes),
        counted=sum(o.counts for o in outcomes),
        found=sum(o.counts and bool(o.found) for o in outcomes),
        found_at_all=len(found_outcomes),
        right=sum(o.right for o in found_outcomes),
        can_be_undone=len(undone_outcomes),
        undone=sum(undone_outcomes),
        harmless=sum(o.harmless for o in outcomes),
        hung=sum(o.ended == "hung" for o in outcomes),
        absent=sum(not o.changes and o.ended != "hung" for o in outcomes),
        clean=len(clean),
        false_alarms=sum(bool(c.findings) for c in clean) + sum(bool(o.early) for o in outcomes),
    )


Row = Sequence[FaultOutcome]


def _share(of: Row, right: Callable[[FaultOutcome], bool]) -> str:
    return f"{sum(map(right, of))}/{len(of)}" if of else ""


def _found(row: Row) -> list[FaultOutcome]:
    return [one_outcome for one_outcome in row if one_outcome.found]


def _undone(row: Row) -> list[FaultOutcome]:
    return [one_outcome for one_outcome in row if one_outcome.found and one_outcome.undone is not None]


def _describe_found(row: Row) -> str:
    """In brackets where nothing that exists is expected to find it."""
    if any(one_outcome.counts for one_outcome in row):
        return _share(row, lambda o: bool(o.found))
    return f"({len(_found(row))}/{len(row)})"


def _describe_steps(row: Row) -> str:
    steps = sorted({one_outcome.steps for one_outcome in _found(row) if one_outcome.steps is not None})
    return "" if not steps else f"{steps[0]}" if len(steps) == 1 else f"{steps[0]}-{steps[-1]}"


def _describe_named(row: Row) -> str:
    suspected = sum(o.naming == "suspected" for o in _found(row))
    return _share(_found(row), lambda o: o.right) + (f" ({suspected} with others)" if suspected else "")


def _describe_instead(row: Row) -> str:
    texts = [one_outcome.instead for one_outcome in row if not one_outcome.found and one_outcome.instead]
    text_counts = {text: texts.count(text) for text in texts}
    return ", ".join(text if count == 1 else f"{text} (x{count})" for text, count in text_counts.items())


class CorruptionDrill(Drill[FaultOutcome]):
    """Of the layouts and kinds in `names`."""

    columns = (
        Column[FaultOutcome]("fault", lambda row: row[0].planned.kind, left=True),
        Column[FaultOutcome]("layout", lambda row: row[0].planned.layout, left=True),
        Column("found", _describe_found, lambda row: any(o.counts and not o.found for o in row)),
        Column("steps", _describe_steps),
        Column("by", lambda row: ", ".join(dict.fromkeys(o.finder for o in _found(row))), left=True, wrap=True),
        Column("rank\nnamed", _describe_named, lambda row: any(not o.right for o in _found(row))),
        Column("undone", lambda row: _share(_undone(row), lambda o: o.undone is True),
               lambda row: any(not o.undone for o in _undone(row))),
        Column("not found, but", _describe_instead, lambda row: any(o.ended == "hung" and not o.found for o in row),
               left=True, wrap=True),
    )  # fmt: skip

    def __init__(self, names: Sequence[str], seeds: Sequence[int], short: bool) -> None:
        """short: six faults only. Raises ConfigError."""
        if short and names:
            raise ConfigError(f"--quick has faults of its own: leave out {', '.join(names)}, or --quick")
        layouts, kinds = choose_faults(names)
        self.seeds, self.begin = seeds, time.monotonic()
        self.plans = [
            f for seed in seeds for f in (plan_quick(seed) if short else plan_faults(layouts, kinds, seed))
        ]
        self.courses: dict[tuple[str, int], Course] = {}

    def plan_exercises(self, folder: Path) -> list[Exercise[FaultOutcome]]:
        # Not at the top: it imports torch, which takes longer than to refuse bad input.
        from benchmarks.common import write_random_corpus

        # Of the server that ranks are forked from, too.
        os.environ.update(DS_ACCELERATOR="cpu", OMP_NUM_THREADS="1")
        corpus_folder = folder / "corpus"
        if not (corpus_folder / FILE).exists():
            write_random_corpus(corpus_folder, VOCABULARY, TOKENS)
        for name, seed in dict.fromkeys((fault.layout, fault.seed) for fault in self.plans):
            new_course = Course(LAYOUTS[name], seed, corpus_folder, folder / "runs" / f"{name}-{seed}")
            self.courses[name, seed] = new_course
        return [
            Exercise(str(fault), LAST, partial(self.courses[fault.layout, fault.seed].strike, fault))
            for fault in self.plans
        ]

    @property
    def clean(self) -> list[Clean]:
        return [one_course.clean for one_course in self.courses.values()]

    def row_of(self, outcome: FaultOutcome) -> tuple[Hashable, Hashable]:
        return outcome.planned.kind, outcome.planned.layout

    def is_met(self, outcomes: Sequence[FaultOutcome]) -> bool:
        return count_outcomes(outcomes, self.clean).met

    def describe_verdict(self, outcomes: Sequence[FaultOutcome]) -> str:
        return count_outcomes(outcomes, self.clean).describe()

    def report_outcomes(self, outcomes: Sequence[FaultOutcome]) -> dict[str, Any]:
        """date: UTC. cpu: of this machine."""
        from benchmarks.common import name_processor

        return {
            "date": datetime.now(UTC).isoformat(timespec="seconds"),
            "torch": importlib.metadata.version("torch"),
            "deepspeed": importlib.metadata.version("deepspeed"),
            "cpu": name_processor(),
            "seeds": list(self.seeds),
            "seconds": round(time.monotonic() - self.begin, 1),
            "total": count_outcomes(outcomes, self.clean).model_dump(mode="json"),
            "clean": [clean_run.model_dump(mode="json") for clean_run in self.clean],
            "faults": super().report_outcomes(outcomes),
        }


def list_kinds() -> list[str]:
    """Kinds of faults with their layouts; in brackets where nothing is expected to find them."""
    kind_lines = []
    for kind in KINDS:
        layout_names = ", ".join(layout.name for layout in LAYOUTS.values() if fits_layout(kind, layout))
        kind_lines.append(f"{kind}: {layout_names if must_be_found(kind) else f'({layout_names})'}")
    return kind_lines
