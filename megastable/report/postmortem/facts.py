"""Defines the facts of one incident, as a tree: the content of evidence.json, and the source of every other file.

JSON, in which numbers that are not finite are text; times are Unix seconds, losses nats per token, gradient norms those
before clipping, positions ranges [first, end). Missing facts are named in `Evidence.problems`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from pydantic import BaseModel, ConfigDict, field_validator, model_validator

from megastable.data.documents import Document
from megastable.data.order import LAST_POSITION
from megastable.data.skip_ledger import AnyEntry
from megastable.report.postmortem.logs import Log
from megastable.report.postmortem.sample_texts import Facts, SampleText, Tokens
from megastable.report.postmortem.timeline import TimelineEntry
from megastable.report.postmortem.tracker_links import TrackerLink
from megastable.report.postmortem.trial_facts import TrialFacts
from megastable_guard.incident import Breakdown, IncidentFields

VERSION = 9  # of the derived files: a change rewrites all incidents


class RunFacts(Facts):
    """name: of the directory. world: ranks at the time. global_batch: at the onset. lr: the peak rate. price: of a
    GPU-hour, in `currency`. public: the report is for readers who have nothing of the run but its published record."""

    name: str
    directory: str
    world: int | None = None
    steps: int | None = None
    global_batch: int | None = None
    sequence_length: int | None = None
    lr: float | None = None
    cut_factor: float | None = None
    corpora: tuple[str, ...] = ()
    planted: tuple[str, ...] = ()
    price: float | None = None
    currency: str = ""
    public: bool = False


class IncidentFacts(IncidentFields):
    """The journal's last summary of an incident, of any version; fields that it lacks are left out."""

    model_config = ConfigDict(extra="ignore", frozen=True)

    documents: Sequence[Document] = ()

    @model_validator(mode="before")
    @classmethod
    def _has_onset(cls, given: Any) -> Any:
        return {"onset": given["step"]} | given if isinstance(given, dict) and "step" in given else given

    @field_validator("positions", "deferred", "returns")
    @classmethod
    def _forward(cls, ranges: list[tuple[int, int]]) -> list[tuple[int, int]]:
        if not all(0 <= first < end <= LAST_POSITION for first, end in ranges):
            raise ValueError("no ranges of positions")
        return ranges

    @property
    def breakdown(self) -> bool:
        """Whether processes or files failed, not numbers."""
        return bool(self.failure) or self.verdict in [*Breakdown]

    @property
    def guilty(self) -> list[tuple[int, int]]:
        """Positions measured and found guilty; not those only skipped along with a step."""
        return self.positions if self.cause == "data" and not self.breakdown else []

    @property
    def shown(self) -> list[tuple[int, int]]:
        """Positions whose texts are shown: skipped, or else deferred."""
        return self.positions or self.deferred


class SuspectFacts(BaseModel):
    """A sample on the good state, as measured by attribution."""

    model_config = ConfigDict(extra="ignore", frozen=True)

    position: int
    loss: float | None = None
    z: float | None = None
    gradient_norm: float | None = None


class RegionFacts(BaseModel):
    """The extent of bad data, as found by attribution: positions [first, end); how both ends were found, in a sentence.

    measured: samples measured for it; steps: their cost, in steps of time. probes: first position, samples and bad
    samples of each measured batch.
    """

    model_config = ConfigDict(extra="ignore", frozen=True)

    first: int
    end: int
    how: str = ""
    measured: int = 0
    steps: float = 0.0
    probes: list[tuple[int, int, int]] = []

    @property
    def stretches(self) -> list[Stretch]:
        """The probes in ascending order, similar neighbours merged."""
        told: list[Stretch] = []
        for first, measured, bad in sorted(self.probes):
            last = told[-1] if told else None
            if last is not None and first <= last.end and (bad > 0) == (last.bad > 0):
                last.end, last.batches = max(last.end, first + measured), last.batches + 1
                last.measured, last.bad = last.measured + measured, last.bad + bad
            else:
                told.append(Stretch(first, first + measured, 1, measured, bad))
        return told


@dataclass
class Stretch:
    """Neighbouring measured batches: positions [first, end), samples measured, and bad ones among them."""

    first: int
    end: int
    batches: int
    measured: int
    bad: int


class StepRow(BaseModel):
    """A recorded step; if its file is not on disk yet, the journal's data on a refused one."""

    model_config = ConfigDict(extra="ignore", frozen=True)

    step: int
    time: float
    loss: float
    grad_norm: float
    first_position: int
    next_position: int
    applied: bool = True
    finite: bool = True
    lr: float | None = None
    seconds: float | None = None


class LayerValue(Facts):
    """A statistic of a parameter or block at the records of `Layers`; None if not recorded."""

    name: str
    statistic: str
    before: float | None
    during: float | None
    after: float | None

    @property
    def ratio(self) -> float | None:
        """The value at the next record after `before`, divided by it."""
        then = self.during if self.during is not None else self.after
        return then / self.before if self.before and then is not None else None


class Layers(Facts):
    """The records of every layer: the last before the onset, the first before it was undone, the first after the proof
    that it was over. *_step: of the record, None if there was none."""

    before_step: int | None
    during_step: int | None
    after_step: int | None
    values: list[LayerValue]


class Cost(Facts):
    """What it took. seconds, the time lost, is the sum of four: redone, steps lost at step_seconds, the median of the
    steps around; recovery: searching and undoing; downtime: from the end of a process, as it was noticed, to the next
    one's first step; silent: from the last progress until it was noticed.
    """

    steps: int
    batches_refused: int
    tokens: int | None
    step_seconds: float | None
    redone_seconds: float
    recovery_seconds: float
    downtime_seconds: float
    silent_seconds: float
    gpu_hours: float | None
    money: float | None

    @property
    def seconds(self) -> float:
        return self.redone_seconds + self.recovery_seconds + self.downtime_seconds + self.silent_seconds


class LaterLoss(Facts):
    """The loss at `step`, `after` steps after an incident was over, or at the end of the run: median of 20 steps.
    expected: where the trend of the applied steps before the onset leads to at that step, with the scatter of single
    steps about it; None if that is too far off to be said."""

    step: int
    after: int
    loss: float
    at_end: bool = False
    expected: float | None = None
    scatter: float | None = None


class Evidence(Facts):
    """Everything. inputs: digest of its sources. passes: recorded steps, a list for each pass.

    back_to: steps that the run was rewound to. healed_at: step of the proof that it was over; None if none is
    journaled. later: what came of it, as far as the run has come.
    trackers: that show the run.
    """

    format: int = VERSION
    inputs: str
    run: RunFacts
    incident: IncidentFacts
    cost: Cost
    back_to: list[int]
    healed_at: int | None
    later: list[LaterLoss]
    trackers: list[TrackerLink]
    timeline: list[TimelineEntry]
    suspects: list[SuspectFacts]
    regions: list[RegionFacts]
    trials: list[TrialFacts]
    skipped: list[AnyEntry]
    passes: list[list[StepRow]]
    layers: Layers | None
    samples: list[SampleText]
    tokens: Tokens | None
    logs: list[Log]
    problems: list[str]

    @property
    def brief(self) -> Evidence:
        """The parts that the index of a run shows, without the large ones."""
        empty: dict[str, Any] = dict.fromkeys(
            ("timeline", "suspects", "regions", "trials", "passes", "samples", "logs"), ()
        )
        return self.model_copy(update=empty | {"layers": None, "tokens": None})
