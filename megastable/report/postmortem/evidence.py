"""Gathers the facts of an incident (facts.py) from the run directory alone.

A report must not fail: unreadable files are named, and the rest is gathered all the same.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError

from megastable.base.errors import ConfigError, DataError
from megastable.base.text import visible
from megastable.config.recipe import find, load
from megastable.config.tree import RunConfig
from megastable.data.blends import read_blends
from megastable.data.order import LAST_POSITION
from megastable.data.plant import read_planted
from megastable.data.skip_ledger import Ledger
from megastable.data.skips import Skips
from megastable.report.postmortem import passes
from megastable.report.postmortem.cost import cost_of, outage
from megastable.report.postmortem.facts import (
    VERSION,
    Cost,
    Evidence,
    IncidentFacts,
    LaterLoss,
    Layers,
    LayerValue,
    RegionFacts,
    RunFacts,
    StepRow,
    SuspectFacts,
)
from megastable.report.postmortem.journal import Journal, named_when, summary_of
from megastable.report.postmortem.logs import logs
from megastable.report.postmortem.sample_source import PublicView, SampleSource
from megastable.report.postmortem.sample_texts import SHOWN, SampleText, Tokens
from megastable.report.postmortem.timeline import timeline
from megastable.report.postmortem.tracker_links import TrackerLink, find_trackers
from megastable.report.postmortem.trial_facts import TrialFacts, find_trials
from megastable.run.directory import RunDirectory
from megastable.run.events.training_events import CheckpointRejected
from megastable.run.records import LAYER_SCHEMA, SCHEMA
from megastable_guard.robust import trend

BEFORE, AFTER = 60, 40  # steps shown around an incident
LONG_BEFORE = 500  # steps before the onset whose trend what came later is compared with
FEWEST = 24  # of them that tell a trend
SAME = 0.02  # nats
LONGEST = 20_000  # most steps read of one
COLUMNS = (
    "step", "time", "first_position", "next_position", "applied", "finite", "loss", "grad_norm", "lr", "seconds",
)  # fmt: skip
NO_STATISTICS = ("step", "time", "name")

T = TypeVar("T")
Known = TypeVar("Known", bound=BaseModel)
NEAR = 8  # events between a checkpoint's rejection and the incident made of it


class Run:
    """Shared by all incidents of a run, each part read once. public: the view of a published record, if it is for one.
    Raises DataError if the journal cannot be read."""

    def __init__(self, root: Path, public: PublicView | None = None) -> None:
        self.public = public
        self.directory = RunDirectory(root)
        self.journal = Journal(self.directory)
        self.problems = list(self.journal.problems)
        self.config: RunConfig | None = None
        self.recipe, self.ledger = b"", Ledger([])
        try:
            self.config, self.recipe = load(self.directory.recipe), self.directory.recipe.read_bytes()
        except (ConfigError, OSError) as error:
            self.problems.append(f"the recipe: {error}")
        try:
            self.ledger = Ledger.read(self.directory.skips)
        except DataError as error:
            self.problems.append(f"the skip ledger: {error}")
        self.steps = passes.RecordFolder(self.directory.steps, SCHEMA)
        self.layers = passes.RecordFolder(self.directory.layers, LAYER_SCHEMA)

    @property
    def incidents(self) -> list[int]:
        """Their numbers, in order."""
        return list(self.journal.own)

    @property
    def shows_texts(self) -> bool:
        return self.public is None or self.public.source is not None

    @cached_property
    def trackers(self) -> list[TrackerLink]:
        """That show the run; none to readers of its record."""
        return find_trackers(self.directory.root) if self.public is None else []

    @cached_property
    def samples(self) -> SampleSource:
        """Of the texts of samples. Raises DataError."""
        if self.public is not None and self.public.source is not None:
            return self.public.source
        if self.config is None:
            raise DataError("without a recipe nobody knows the corpora")
        skips = self.directory.skips
        return SampleSource(self.config, read_blends(self.directory.blends), self.ledger, skips)


class Gatherer:
    """Gathers one incident."""

    def __init__(self, run: Run, number: int) -> None:
        self.run, self.config, self.journal = run, run.config, run.journal
        self.problems = list(run.problems)
        indexes = self.journal.own[number]
        # A damaged checkpoint is found before an incident can be opened.
        found = range(max(0, indexes[0] - NEAR), indexes[0])
        rejected = [n for n in found if isinstance(self.journal.events[n], CheckpointRejected)]
        damage = summary_of(self.journal.events[indexes[0]]).get("verdict") == "damaged_checkpoint"
        self.begin, self.end = min([indexes[0], *rejected]) if damage else indexes[0], indexes[-1]
        self.own = [self.journal.events[index] for index in indexes]
        self.incident = self._lenient(IncidentFacts, summary_of(self.own[-1]), "the incident")
        self.skipped = list(run.ledger.of_incident(number).entries)
        # A process that dies while an incident of the training is open has tried nothing.
        self.trials = [] if self.incident.breakdown else find_trials(self.journal, indexes)

    @property
    def inputs(self) -> str:
        """Digest of the inputs, cheap to take: of large files names and sizes only.

        Without the corpora: once they are gone, what was written about them is worth keeping.
        """
        paths = [self.run.layers.path / file.name for file in self.run.layers.files(*self._looks())]
        paths += [self.run.directory.root / path for path in self.incident.evidence]
        sizes = [f"{path.name}:{_size(path)}" for path in paths]
        # Not the files of the steps, which are compacted.
        steps = self.run.steps.rows(*self._window(), ("step", "time"))
        made = hashlib.sha256(self.run.recipe)
        for event in self.journal.events[self.journal.nearby(self.begin, self.end)]:
            made.update(repr(event.fields).encode())
        later = [event.fields for event in self.journal.later[self.incident.number]]
        run = self.run.problems, self.run.trackers
        made.update(repr((VERSION, self._outage, self.skipped, steps, sizes, run, later)).encode())
        return made.hexdigest()

    def gather(self) -> Evidence:
        """All of it. Never raises, bugs aside."""
        i, run = self.incident, self.run
        rows = self._try("the step records", self._rows, list[StepRow]())
        suspects = self._suspects()
        losses = {s.position: s.loss for s in suspects if s.loss is not None}
        samples: list[SampleText] = []
        tokens: Tokens | None = None
        if i.shown and run.shows_texts:
            samples = self._try("the texts", lambda: self._samples(losses), [])
        if i.guilty and samples:
            tokens = self._try("the tokens", self._tokens, None)
        if samples and (problem := run.samples.library().problem):
            self.problems.append(problem)
        found, problems = logs(run.directory.root, run.directory.logs.name, i.evidence)
        self.problems += problems
        facts = self._facts(rows)
        return Evidence(
            inputs=self.inputs, run=facts, incident=i, cost=self._cost(facts, rows), back_to=self._back_to(),
            healed_at=self._closed_at() if i.outcome == "healed" else None,
            later=self._try("what came later", self._later, []), trackers=self.run.trackers,
            timeline=timeline(self.journal.events[self.journal.nearby(self.begin, self.end)], i.number),
            suspects=suspects, regions=self._regions(), trials=self._try("tokens of a trial", self._named_trials,
            self.trials), skipped=self.skipped,
            passes=passes.passes(rows), layers=self._try("the layers", lambda: self._layers(rows), None),
            samples=samples, tokens=tokens, logs=found, problems=self._told_problems(),
        )  # fmt: skip

    def _told_problems(self) -> list[str]:
        """Each once. Messages name files, and quote what is in them."""
        told = self.problems if self.run.public is None else map(self.run.public.text, self.problems)
        return list(dict.fromkeys(told))

    # From the corpora, in the order valid at the time of each position

    def _samples(self, losses: dict[int, float]) -> list[SampleText]:
        found = list[SampleText]()
        others = Skips.of(self.incident.shown).gaps()
        for time, skipped, deferred in named_when(self.own):
            ranges = Skips.of(skipped if self.incident.positions else deferred).minus(others).ranges
            found += self.run.samples.library(time).samples(ranges, losses) if ranges else []
        found = sorted(found, key=lambda sample: sample.position)[:SHOWN]
        return found if self.run.public is None else list(map(self.run.public.sample, found))

    def _named_trials(self) -> list[TrialFacts]:
        """With the texts of their tokens."""
        if not self.run.shows_texts or not any(trial.tokens for trial in self.trials):
            return self.trials
        text = self.run.samples.library().text
        return [
            trial.model_copy(update={"texts": [text([token]) for token in trial.tokens]})
            for trial in self.trials
        ]

    def _tokens(self) -> Tokens:
        # Convicted samples stay in place, whatever is deferred later.
        source = self.run.samples
        library = source.library(max(time for time, skipped, _ in named_when(self.own) if skipped))
        return library.tokens(self.incident.guilty, source.selection(library))

    def cost(self) -> Cost:
        """The cost alone."""
        rows = self._try("the step records", self._rows, list[StepRow]())
        return self._cost(self._facts(rows), rows)

    # From the journal

    def _cost(self, run: RunFacts, rows: Sequence[StepRow]) -> Cost:
        return cost_of(self.incident, run, rows, *self._outage)

    @property
    def _outage(self) -> tuple[float, float]:
        return outage(self.journal, self.begin, self.end, bool(self.incident.breakdown))

    def _suspects(self) -> list[SuspectFacts]:
        told = [event["suspects"] for event in self.own if isinstance(event.get("suspects"), list)]
        given = [s for some in told for s in some if isinstance(s, dict) and type(s.get("position")) is int]
        found = [self._lenient(SuspectFacts, s, "a suspect") for s in given]
        return list({s.position: s for s in found}.values())

    def _regions(self) -> list[RegionFacts]:
        told = [event for event in self.own if isinstance(event.get("region"), dict)]
        found = [
            self._lenient(RegionFacts, event["region"], "a region")
            for event in told
            if all(type(event["region"].get(edge)) is int for edge in ("first", "end"))
        ]
        return [region for region in found if 0 <= region.first < region.end <= LAST_POSITION]

    def _back_to(self) -> list[int]:
        keys = {"rewound": "to_step", "restarted": "step"}
        if self.incident.verdict == "damaged_checkpoint":
            keys["closed"] = "step"  # all in one event: a checkpoint used instead
        steps = [event.get(keys.get(str(event.get("what")), "")) for event in self.own]
        return [step for step in steps if type(step) is int]

    def _closed_at(self) -> int | None:
        """The last step before the incident was proven over or given up."""
        step = self.own[-1].get("step") if self.own[-1].get("what") == "closed" else None
        return step if type(step) is int and self.incident.verdict != "damaged_checkpoint" else None

    # From other files

    def _window(self) -> tuple[int, int]:
        """The steps shown."""
        i = self.incident
        tried = [
            (t.snapshot, t.last)
            for t in self.trials
            if i.onset - LONGEST < t.snapshot < t.last < i.step + LONGEST
        ]
        first = max(1, min([min(i.onset, i.step) - BEFORE, *(snapshot for snapshot, _ in tried)]))
        last = max([max(i.step, i.onset, self._closed_at() or 0) + AFTER, *(last for _, last in tried)])
        return first, min(last, first + LONGEST)

    def _later(self) -> list[LaterLoss]:
        """What the run did after the incident, against the trend from before."""
        looks = self.journal.later[self.incident.number]
        told = {e.step: (e, e.loss) for e in looks if e.step and e.loss is not None and math.isfinite(e.loss)}
        if not told:
            return []
        onset, columns = self.incident.onset, ("step", "time", "loss", "applied")
        rows, problems = self.run.steps.rows(max(1, onset - LONG_BEFORE), onset - 1, columns)
        self.problems += problems
        before = {row["step"]: row["loss"] for row in rows if row["applied"] and math.isfinite(row["loss"])}
        return [
            LaterLoss(
                step=step,
                after=e.after or 0,
                loss=loss,
                at_end=bool(e.at_end),
                **expect_loss(before, onset, step),
            )
            for step, (e, loss) in sorted(told.items())
        ]

    def _looks(self) -> tuple[int, int]:
        """The steps around it with layer records."""
        every = self.config.logging.layers_interval if self.config else 0
        return self.incident.onset - every, max(self.incident.step, self._closed_at() or 0) + every

    def _rows(self) -> list[StepRow]:
        first, last = self._window()
        rows, problems = self.run.steps.rows(first, last, COLUMNS)
        self.problems += problems
        known = {(row["step"], row["first_position"]) for row in rows}
        for step in range(first, last + 1):
            refused = self.journal.refused.get(step, ())
            rows += [{**e, "applied": False} for e in refused if (step, e.get("first_position")) not in known]
        found: list[StepRow] = []
        for row in rows:
            with suppress(ValidationError):  # a malformed event
                found.append(StepRow.model_validate(row))
        return sorted(found, key=lambda row: row.time)

    def _layers(self, rows: Sequence[StepRow]) -> Layers | None:
        columns = [field.name for field in LAYER_SCHEMA]
        found, problems = self.run.layers.rows(*self._looks(), columns)
        self.problems += problems
        opened = self.own[0]["time"]
        met = [row.time for row in rows if row.step == self.incident.onset and row.time <= opened]
        onset = max(met, default=opened)
        ends = [
            e["time"] for e in self.own if e.get("what") in ("rewound", "restarted", "handed over", "closed")
        ]
        closed = self.own[-1]["time"] if self.incident.outcome == "healed" else float("inf")
        before = [row for row in found if row["time"] < onset]
        during = [row for row in found if onset <= row["time"] <= min(ends, default=float("inf"))]
        after = [row for row in found if row["time"] > closed]
        looks = [
            {row["name"]: row for row in some if row["time"] == some[which]["time"]} if some else {}
            for some, which in ((before, -1), (during, 0), (after, 0))
        ]
        if not any(looks):
            return None
        values = []
        for name in dict.fromkeys(name for look in looks for name in look):
            of = [look.get(name, {}) for look in looks]
            for key in dict.fromkeys(key for row in of for key in row if key not in NO_STATISTICS):
                old, mid, new = (row.get(key) for row in of)
                values.append(LayerValue(name=name, statistic=key, before=old, during=mid, after=new))
        steps = [next((row["step"] for row in look.values()), None) for look in looks]
        return Layers(
            before_step=steps[0], during_step=steps[1], after_step=steps[2],
            values=[v for v in values if (v.before, v.during, v.after) != (None, None, None)],
        )  # fmt: skip

    def _facts(self, rows: Sequence[StepRow]) -> RunFacts:
        c, root = self.config, self.run.directory.root
        name, world = root.resolve().name, self.journal.world(self.begin)
        if c is None:
            return RunFacts(name=name, directory=str(root), world=world, public=self.run.public is not None)
        onset = [row.first_position for row in rows if row.step == self.incident.onset]
        batch = c.batches.at(onset[-1]) if onset else c.train.global_batch
        return RunFacts(
            name=name, directory=str(root), world=world, steps=c.train.steps, global_batch=batch,
            sequence_length=c.model.sequence_length, lr=c.optimizer.lr,
            cut_factor=c.stability.policy.cut_factor, corpora=tuple(str(corpus.path) for corpus in c.data.corpora),
            planted=tuple(self._try("planted.json", self._planted, list[str]())), price=c.supervise.gpu_hour_price,
            currency=c.supervise.currency, public=self.run.public is not None,
        )  # fmt: skip

    def _planted(self) -> list[str]:
        """The planted faults, and how much of them this incident found."""
        told = []
        for corpus in self.config.data.corpora if self.config and self.incident.positions else []:
            planted = read_planted(find(corpus.path))
            if planted is None:
                continue
            exactly = self.incident.guilty == planted.positions
            found = "; exactly these were found guilty" if exactly else ""
            told.append(f"{corpus.path} was made bad on purpose: it has {planted}{found}")
        return told

    # Going on without

    def _try(self, what: str, get: Callable[[], T], otherwise: T) -> T:
        try:
            return get()
        except Exception as error:
            # A missing corpus, a failing disk, anything: the other facts still count.
            self.problems.append(f"{what}: {error or type(error).__name__}")
            return otherwise

    def _lenient(self, kind: type[Known], given: dict[str, Any], what: str) -> Known:
        """`given` as far as readable; omissions are named."""
        rest = dict(given)
        while True:
            try:
                return kind.model_validate(rest)
            except ValidationError as error:
                for key in {str(detail["loc"][0]) for detail in error.errors()}:
                    told = f"{what}: {key}={rest.pop(key, None)!r}"
                    self.problems.append(f"{visible(told, 200)} is not understood")


def expect_loss(before: Mapping[int, float], onset: int, step: int) -> dict[str, float]:
    """The loss that those before a step lead to later, by the trend of the newest of them (guard's robust): of as many
    steps as it is ahead, at least 60.

    Args:
        before: losses by step, nats per token.
        onset: the step; those before it count.
        step: the later one.

    Returns:
        `expected`, and `scatter` of the losses around it (from the median distance, as a standard deviation), nats per
        token; nothing if there are too few for that distance, or if their newer half leads elsewhere: a loss that
        flattens out is no line.
    """
    ahead = step - onset
    steps = sorted(at for at in before if at >= onset - max(BEFORE, ahead))
    if len(steps) < FEWEST or ahead > 2 * len(steps):
        return {}
    newer = steps[len(steps) // 2 :]
    found, checked = (
        trend(chosen, [before[at] for at in chosen], step, floor=0.0, full=len(chosen))
        for chosen in (steps, newer)
    )
    if abs(found.level - checked.level) > max(SAME, found.scale):
        return {}
    return {"expected": found.level, "scatter": found.scale}


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except (OSError, ValueError):
        return -1
