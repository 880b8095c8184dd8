"""`megastable drill sdc`: plant silent corruption into real runs, and tell what was found of it.

In each layout a clean run, and then one run for every fault.
"""

from __future__ import annotations

import importlib.metadata
import os
import shutil
import time
from collections.abc import Callable, Hashable, Sequence
from datetime import UTC, datetime
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.ranks import RankEnd, run_on_ranks
from drills.corruption_plan import (
    KINDS,
    LAYOUTS,
    RESUMED,
    Layout,
    Planned,
    choose,
    expected,
    fits,
    plan,
    quick,
)
from drills.corruption_score import Clean, Entry, FaultOutcome, findings, incidents, judge, total
from drills.exercise import Column, Drill, Exercise, Watch
from megastable.base.errors import ConfigError, MegastableError
from megastable.checkpoint.store import name_of
from megastable.config.tree import RunConfig
from megastable.data.manifest import FILE, TokenizerInfo, adopt
from megastable.data.shards import ShardWriter
from megastable.run.directory import RunDirectory

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


def write_corpus(folder: Path) -> None:
    """A random walk over token ids, in documents of 5 to 200 tokens, ended by 0. An existing one is used."""
    if (folder / FILE).exists():
        return
    folder.mkdir(parents=True, exist_ok=True)
    random = np.random.default_rng(0)
    with ShardWriter(folder / "part-0", VOCABULARY) as writer:
        while writer.tokens < TOKENS:
            steps = random.integers(-3, 4, random.integers(5, 200))
            document = (random.integers(1, VOCABULARY) + steps.cumsum()) % (VOCABULARY - 1) + 1
            writer.add_document(np.append(document, 0))
    tokenizer = TokenizerInfo(
        file="tokenizer.model", kind="sentencepiece", xxh3="0" * 32, vocab_size=VOCABULARY, eod=0
    )
    adopt(folder, tokenizer, 0.05).save(folder)


def make_config(corpus: Path, run: Path, layout: Layout, seed: int) -> RunConfig:
    """A run of seconds: a tiny model."""
    tree: dict[str, Any] = {
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
    return RunConfig.model_validate(tree)


class Course:
    """The runs of a layout with a seed."""

    def __init__(self, layout: Layout, seed: int, corpus: Path, folder: Path) -> None:
        self.layout, self.seed, self.corpus, self.folder = layout, seed, corpus, folder

    @cached_property
    def clean(self) -> Clean:
        """The run without a fault, done first. Raises MegastableError if it fails."""
        shutil.rmtree(self.folder, ignore_errors=True)
        self.folder.mkdir(parents=True)
        ended, seconds = self._run("clean", None, PATIENCE)
        if any(rank.error for rank in ended):
            texts = [f"rank {rank}: {end.error} {end.text}" for rank, end in enumerate(ended) if end.error]
            log = (self.folder / "clean.log").read_text(errors="replace")[-2000:]
            raise MegastableError(f"the clean run of {self.layout.name} failed: {'; '.join(texts)}\n{log}")
        events = _events(self.folder / "clean")
        return Clean(
            layout=self.layout.name, seed=self.seed, findings=findings(events), incidents=incidents(events),
            seconds=round(seconds, 1),
        )  # fmt: skip

    def strike(self, fault: Planned, watch: Watch) -> list[FaultOutcome]:
        """Run with a fault."""
        limit = max(HUNG, TIMES * self.clean.seconds)
        name = f"{fault.kind.replace('/', '-')}-{fault.position + 1}"
        if fault.begin:
            self._resume(self.folder / name, fault.begin)
        ended, seconds = self._run(name, fault, limit)
        held = ended[fault.rank].result
        left = _bytes(self.folder / name)
        outcome = judge(
            fault, expected(fault.kind), held.changes if held else (), _events(self.folder / name),
            [rank.error for rank in ended], left == _bytes(self.folder / "clean") if left else None, seconds,
            held and held.time, next((f"{rank.error}: {rank.text}" for rank in ended if rank.error), ""),
        )  # fmt: skip
        return [outcome]

    def _run(self, name: str, fault: Planned | None, limit: float) -> tuple[list[RankEnd], float]:
        # Not at the top: it imports torch, which takes longer than to refuse bad input.
        from drills.corruption_faults import FaultJob, train_with_fault

        begin = time.monotonic()
        settings = make_config(self.corpus, self.folder / name, self.layout, self.seed)
        ended = run_on_ranks(
            self.layout.ranks, train_with_fault, FaultJob(settings, fault), limit,
            collective_timeout=settings.run.timeout, log=self.folder / f"{name}.log", preload=PRELOAD,
        )  # fmt: skip
        return ended, time.monotonic() - begin

    def _resume(self, run: Path, step: int) -> None:
        """Make a run that was stopped after a checkpoint, and nothing else."""
        clean = self.folder / "clean"
        at = _checkpoint(clean, step)
        shutil.copytree(at, run / at.relative_to(clean))
        shutil.copy2(RunDirectory(clean).recipe, run)


def _bytes(run: Path) -> dict[str, bytes]:
    """Of the last checkpoint, by file; empty without one."""
    return {path.name: path.read_bytes() for path in sorted(_checkpoint(run, LAST).glob("*.safetensors"))}


def _checkpoint(run: Path, step: int) -> Path:
    return RunDirectory(run).checkpoints / name_of(step)


def _events(run: Path) -> list[Entry]:
    return [event.fields for event in RunDirectory(run).events()]


Row = Sequence[FaultOutcome]


def _share(of: Row, right: Callable[[FaultOutcome], bool]) -> str:
    return f"{sum(map(right, of))}/{len(of)}" if of else ""


def _found(row: Row) -> list[FaultOutcome]:
    return [o for o in row if o.found]


def _undone(row: Row) -> list[FaultOutcome]:
    return [o for o in row if o.found and o.undone is not None]


def _describe_found(row: Row) -> str:
    """In brackets where nothing that exists is expected to find it."""
    if any(o.counts for o in row):
        return _share(row, lambda o: bool(o.found))
    return f"({len(_found(row))}/{len(row)})"


def _describe_steps(row: Row) -> str:
    steps = sorted({o.steps for o in _found(row) if o.steps is not None})
    return "" if not steps else f"{steps[0]}" if len(steps) == 1 else f"{steps[0]}-{steps[-1]}"


def _describe_named(row: Row) -> str:
    suspected = sum(o.naming == "suspected" for o in _found(row))
    return _share(_found(row), lambda o: o.right) + (f" ({suspected} with others)" if suspected else "")


def _describe_instead(row: Row) -> str:
    texts = [o.instead for o in row if not o.found and o.instead]
    times = {text: texts.count(text) for text in texts}
    return ", ".join(text if count == 1 else f"{text} (x{count})" for text, count in times.items())


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
        layouts, kinds = choose(names)
        self.seeds, self.begin = seeds, time.monotonic()
        self.plans = [f for seed in seeds for f in (quick(seed) if short else plan(layouts, kinds, seed))]
        self.courses: dict[tuple[str, int], Course] = {}

    def plan_exercises(self, folder: Path) -> list[Exercise[FaultOutcome]]:
        # Of the server that ranks are forked from, too.
        os.environ.update(DS_ACCELERATOR="cpu", OMP_NUM_THREADS="1")
        corpus = folder / "corpus"
        write_corpus(corpus)
        for name, seed in dict.fromkeys((fault.layout, fault.seed) for fault in self.plans):
            course = Course(LAYOUTS[name], seed, corpus, folder / "runs" / f"{name}-{seed}")
            self.courses[name, seed] = course
        return [
            Exercise(str(fault), LAST, partial(self.courses[fault.layout, fault.seed].strike, fault))
            for fault in self.plans
        ]

    @property
    def clean(self) -> list[Clean]:
        return [course.clean for course in self.courses.values()]

    def row_of(self, outcome: FaultOutcome) -> tuple[Hashable, Hashable]:
        return outcome.planned.kind, outcome.planned.layout

    def is_met(self, outcomes: Sequence[FaultOutcome]) -> bool:
        return total(outcomes, self.clean).met

    def describe_verdict(self, outcomes: Sequence[FaultOutcome]) -> str:
        return total(outcomes, self.clean).describe()

    def report(self, outcomes: Sequence[FaultOutcome]) -> dict[str, Any]:
        """date: UTC. cpu: of this machine."""
        from benchmarks.common import name_processor

        return {
            "date": datetime.now(UTC).isoformat(timespec="seconds"),
            "torch": importlib.metadata.version("torch"),
            "deepspeed": importlib.metadata.version("deepspeed"),
            "cpu": name_processor(),
            "seeds": list(self.seeds),
            "seconds": round(time.monotonic() - self.begin, 1),
            "total": total(outcomes, self.clean).model_dump(mode="json"),
            "clean": [clean.model_dump(mode="json") for clean in self.clean],
            "faults": super().report(outcomes),
        }


def list_kinds() -> list[str]:
    """Kinds of faults with their layouts; in brackets where nothing is expected to find them."""
    lines = []
    for kind in KINDS:
        names = ", ".join(layout.name for layout in LAYOUTS.values() if fits(kind, layout))
        lines.append(f"{kind}: {names if expected(kind) else f'({names})'}")
    return lines
