"""Run drills of corruption: in each layout a clean run, and then one run for every fault."""

from __future__ import annotations

import importlib.metadata
import platform
import shutil
import time
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from itertools import groupby
from pathlib import Path

from pydantic import BaseModel, ConfigDict

from drills.corruption_crew import Crew
from drills.corruption_plan import LAYOUTS, Layout, Planned, expected
from drills.corruption_ranks import Ended
from drills.corruption_score import Clean, Entry, Outcome, Total, findings, incidents, judge, total
from drills.corruption_stage import LAST, config, write_corpus
from megastable.base.errors import MegastableError
from megastable.checkpoint.store import name_of
from megastable.run.directory import RunDirectory

PATIENCE = 600.0  # seconds of a clean run
# A run with a fault may take so long, or so many times as long as the clean one: the machine may be busy.
HUNG, TIMES = 300.0, 20.0

Bytes = dict[str, bytes]


class Report(BaseModel):
    """All facts of a drill. date: UTC. cpu: of this machine."""

    model_config = ConfigDict(extra="forbid", ser_json_inf_nan="constants")

    date: str
    torch: str
    deepspeed: str
    cpu: str
    seeds: list[int]
    seconds: float
    total: Total
    clean: list[Clean]
    faults: list[Outcome]


class _Course:
    """The runs of a layout with a seed."""

    def __init__(self, crew: Crew, layout: Layout, seed: int, corpus: Path, folder: Path) -> None:
        self.crew, self.layout, self.seed, self.corpus, self.folder = crew, layout, seed, corpus, folder
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        ended, self._seconds = self._run("clean", None, PATIENCE)
        if any(rank.error for rank in ended):
            texts = [f"rank {rank}: {end.error} {end.text}" for rank, end in enumerate(ended) if end.error]
            log = (folder / "clean.log").read_text(errors="replace")[-2000:]
            raise MegastableError(f"the clean run of {layout.name} failed: {'; '.join(texts)}\n{log}")
        self._bytes = _bytes(folder / "clean")
        events = _events(folder / "clean")
        seconds = round(self._seconds, 1)
        self.clean = Clean(
            layout=layout.name, seed=seed, findings=findings(events), incidents=incidents(events), seconds=seconds
        )  # fmt: skip

    def strike(self, fault: Planned) -> Outcome:
        name = f"{fault.kind.replace('/', '-')}-{fault.position + 1}"
        if fault.begin:
            self._resume(self.folder / name, fault.begin)
        ended, seconds = self._run(name, fault, max(HUNG, TIMES * self._seconds))
        errors = [rank.error for rank in ended]
        held = ended[fault.rank]
        left = _bytes(self.folder / name)
        return judge(
            fault, expected(fault.kind), held.changes, _events(self.folder / name),
            errors, left == self._bytes if left else None, seconds, held.struck,
            next((f"{rank.error}: {rank.text}" for rank in ended if rank.error), ""),
        )  # fmt: skip

    def _run(self, name: str, fault: Planned | None, limit: float) -> tuple[list[Ended], float]:
        begin = time.monotonic()
        settings = config(self.corpus, self.folder / name, self.layout, self.seed)
        ended = self.crew.run(settings, fault, self.folder / f"{name}.log", limit)
        return ended, time.monotonic() - begin

    def _resume(self, run: Path, step: int) -> None:
        """Make a run that was stopped after a checkpoint, and nothing else."""
        clean = self.folder / "clean"
        at = _checkpoint(clean, step)
        shutil.copytree(at, run / at.relative_to(clean))
        shutil.copy2(RunDirectory(clean).recipe, run)


def _bytes(run: Path) -> Bytes:
    """Of the last checkpoint, by file; empty without one."""
    return {path.name: path.read_bytes() for path in sorted(_checkpoint(run, LAST).glob("*.safetensors"))}


def _checkpoint(run: Path, step: int) -> Path:
    return RunDirectory(run).checkpoints / name_of(step)


def _events(run: Path) -> list[Entry]:
    return [event.fields for event in RunDirectory(run).events()]


def drill(plans: Sequence[Planned], folder: Path, tell: Callable[[str, Outcome | None], None]) -> Report:
    """Plant all `plans`, which are in order of seeds and layouts. folder: of corpus and runs. tell: before a run, with
    its name; and after it. Raises MegastableError if a clean run fails."""
    begin, clean, outcomes = time.monotonic(), list[Clean](), list[Outcome]()
    corpus = folder / "corpus"
    write_corpus(corpus)
    for (seed, name), faults in groupby(plans, key=lambda fault: (fault.seed, fault.layout)):
        layout = LAYOUTS[name]
        with Crew(layout.ranks) as crew:
            tell(f"{name}, clean, seed {seed}", None)
            course = _Course(crew, layout, seed, corpus, folder / "runs" / f"{name}-{seed}")
            clean.append(course.clean)
            for fault in faults:
                tell(str(fault), None)
                outcomes.append(course.strike(fault))
                tell(str(fault), outcomes[-1])
    return Report(
        date=datetime.now(UTC).isoformat(timespec="seconds"),
        torch=importlib.metadata.version("torch"),
        deepspeed=importlib.metadata.version("deepspeed"),
        cpu=_cpu(),
        seeds=list(dict.fromkeys(fault.seed for fault in plans)),
        seconds=round(time.monotonic() - begin, 1),
        total=total(outcomes, clean),
        clean=clean,
        faults=outcomes,
    )


def _cpu() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()
