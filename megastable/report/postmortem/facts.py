"""Defines the facts of one incident, as a tree: the content of evidence.json, and the source of every other file.

JSON, in which numbers that are not finite are text; times are Unix seconds, losses nats per token, gradient norms those
before clipping, positions ranges [first, end). Missing facts are named in `Evidence.problems`.
"""

from __future__ import annotations

import math
import re
import shlex
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from operator import itemgetter
from pathlib import Path
from typing import Any
from urllib.parse import quote, urlsplit, urlunsplit

from pydantic import BaseModel, ConfigDict, field_validator, model_validator

from megastable.base.text import count_noun, show_ranges
from megastable.data.order import LAST_POSITION
from megastable.data.samples import Document
from megastable.data.skip_ledger import AnyEntry
from megastable.data.skips import ranges_of
from megastable.report.postmortem.sample_texts import Facts, SampleText, Tokens
from megastable.report.postmortem.trial_facts import TrialFacts
from megastable.report.safe import clean_log
from megastable.run.directory import TrackerMemory
from megastable.run.events.event import Event
from megastable.run.events.stability_events import IncidentEvent
from megastable.run.rank_ipc import LastWords
from megastable_guard.incident import Breakdown, IncidentFields

TIMELINE_LINES = 80  # lines


class TimelineEntry(Facts):
    """An event. time: Unix seconds; step: None if it has none; own: of the incident itself."""

    time: float
    step: int | None
    text: str
    own: bool

    @property
    def moment(self) -> str:
        return datetime.fromtimestamp(self.time, UTC).strftime("%Y-%m-%d %H:%M:%S")


def build_timeline(events: Sequence[Event], number: int) -> list[TimelineEntry]:
    """Events of incident `number` and around it."""
    timeline_entries = [
        TimelineEntry(
            time=event["time"], step=step if type(step := event.get("step")) is int else None,
            text=event.format_sentence() or event.event.replace("_", " "),
            own=isinstance(event, IncidentEvent) and event.get("number") == number,
        )
        for event in events
    ]  # fmt: skip
    if len(timeline_entries) <= TIMELINE_LINES:
        return timeline_entries
    half_lines = TIMELINE_LINES // 2
    more_events = count_noun(len(timeline_entries) - 2 * half_lines, "more event")
    gap_entry = TimelineEntry(time=timeline_entries[half_lines].time, step=None, text=more_events, own=False)
    return [*timeline_entries[:half_lines], gap_entry, *timeline_entries[-half_lines:]]


class TrackerLink(Facts):
    """url: of the run's page, "" if the tracker has none; command: that shows it then."""

    name: str
    url: str = ""
    command: str = ""


def find_trackers(run: Path) -> list[TrackerLink]:
    """Of all trackers that this run has written to, and not a run that it was copied from."""
    links = list[TrackerLink]()
    if facts := TrackerMemory(run, "wandb").facts:
        url, files = _public(facts.get("url")), f"{shlex.quote(str(run / 'trackers/wandb'))}/offline-run-*"
        command = "" if url else f"wandb sync {files}"
        links.append(TrackerLink(name="Weights & Biases", url=url, command=command))
    facts = TrackerMemory(run, "mlflow").facts
    store, experiment_id, run_id = (facts.get(fact_key) for fact_key in ("store", "experiment", "run_id"))
    if isinstance(store, str):
        if (page := _public(store)) and isinstance(experiment_id, str) and isinstance(run_id, str):
            url = f"{page.rstrip('/')}/#/experiments/{quote(experiment_id)}/runs/{quote(run_id)}"
            links.append(TrackerLink(name="MLflow", url=url))
        elif store_text := page if "://" in store and not store.startswith("file:") else store:
            command = f"mlflow ui --backend-store-uri {shlex.quote(store_text)}"
            links.append(TrackerLink(name="MLflow", command=command))
    if TrackerMemory(run, "tensorboard").facts:
        command = f"tensorboard --logdir {shlex.quote(str(run / 'tensorboard'))}"
        links.append(TrackerLink(name="TensorBoard", command=command))
    return links


def _public(url: object) -> str:
    """The address of a page, without a password; "" if it is none."""
    try:
        url_parts = urlsplit(url if isinstance(url, str) else "")
        host_port = (url_parts.hostname or "") + ("" if url_parts.port is None else f":{url_parts.port}")
    except ValueError:
        return ""
    if url_parts.scheme not in ("http", "https") or not host_port:
        return ""
    return urlunsplit((url_parts.scheme, host_port, url_parts.path, "", ""))


COPIED = 1 << 20  # last bytes of a log that are copied
TAIL = 60  # last lines shown, ...
WIDEST = 20_000  # ... and characters
MOST_LOGS = 12  # logs shown
_UNUSUAL = re.compile(r"[^A-Za-z0-9._-]")
_RANK = re.compile(r"rank-(\d+)\.(json|stacks)")
_WHO = re.compile(r"\Arank .*\n|0x[0-9a-f]+")  # differs between the stacks of two ranks at the same place


class Log(Facts):
    """A log, or a file left by a rank. ranks: all with the same content, "" for a log of all. file: the copy of its
    end, control characters escaped, beside the report; tail: its last lines."""

    source: str
    ranks: str
    file: str
    bytes: int
    tail: str


def collect_logs(root: Path, folder: str, paths: Iterable[str]) -> tuple[list[Log], list[str]]:
    """Those of `paths` that are to be shown, and what could not be read: whole logs, then last words, causes before
    consequences, then stacks. Equal ones are shown once, for all their ranks.

    Args:
        root: the run directory; only files in it are read.
        folder: of the logs, left out of names.
        paths: below `root`.
    """
    sorted_logs, unread_logs = list[tuple[tuple[Any, ...], int | None, Any, Log]](), list[str]()
    for path in dict.fromkeys(paths):
        try:
            file_bytes, end_bytes = _end(root, path)
        except (OSError, ValueError) as error:
            why_unread = (error.strerror or error) if isinstance(error, OSError) else error
            unread_logs.append(f"{path}: {why_unread}")
            continue
        log_lines, named, parts = clean_log(end_bytes), _RANK.fullmatch(Path(path).name), Path(path).parts
        copy_name = "-".join(("log", *(parts[1:] if parts[0] == folder else parts)))
        tail_lines = "\n".join(log_lines.rstrip("\n").splitlines()[-TAIL:])[-WIDEST:]
        log = Log(source=path, ranks="", file=_UNUSUAL.sub("_", copy_name), bytes=file_bytes, tail=tail_lines)
        if named is None:
            sorted_logs.append((("", 0.0, 0, path), None, path, log))
        else:
            said = _said(log_lines) if named[2] == "json" else (0.0, _WHO.sub("", log_lines))
            rank, content_key = int(named[1]), (Path(path).parent, named[2], said[1])
            sorted_logs.append(((named[2], said[0], rank, path), rank, content_key, log))
    alike: dict[Any, tuple[Log, list[int]]] = {}
    for _, rank_number, content_key, log in sorted(sorted_logs, key=itemgetter(0)):
        alike.setdefault(content_key, (log, []))[1].extend([] if rank_number is None else [rank_number])
    shown = list[Log]()
    for log, ranks in alike.values():
        noun = "rank" if len(ranks) == 1 else "ranks"
        ranks_text = f"{noun} {show_ranges(ranges_of(ranks))}" if ranks else ""
        shown.append(log.model_copy(update={"ranks": ranks_text}))
    if len(shown) > MOST_LOGS:
        unread_logs.append(f"{count_noun(len(shown) - MOST_LOGS, 'more log')}, all different, are not shown")
    return shown[:MOST_LOGS], unread_logs


def _said(text: str) -> tuple[float, Any]:
    """When a rank said its last words, and their content without the rank."""
    try:
        last_words = LastWords.model_validate_json(text)
    except ValueError:
        return math.inf, text
    return last_words.time, (re.sub(r"\d+", "", last_words.error), last_words.where)


def copy_log(root: Path, log: Log) -> bytes:
    """The content of `log.file`. Raises OSError and ValueError if it is gone."""
    return clean_log(_end(root, log.source)[1]).encode()


def _end(root: Path, path: str) -> tuple[int, bytes]:
    """Size and last bytes of a file. Raises ValueError for one outside of `root`."""
    log_file = (root / path).resolve()
    if log_file.exists() and not log_file.is_file():
        raise ValueError("no file")
    if not log_file.is_relative_to(root.resolve()):
        raise ValueError("not in the run directory: not copied")
    with log_file.open("rb") as stream:
        file_bytes = stream.seek(0, 2)
        stream.seek(max(0, file_bytes - COPIED))
        return file_bytes, stream.read(COPIED)


VERSION = 12  # of the derived files: a change rewrites all incidents


class RunFacts(Facts):
    """name: of the directory. world: ranks at the time. global_batch: at the onset. lr: the peak rate. price: of a
    GPU-hour, in `currency`. guarded: a loop of somebody else, under the guard alone: its positions are indices of a
    dataset. public: the report is for readers who have nothing of the run but its published record."""

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
    guarded: bool = False


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
        if not all(0 <= first_position < end <= LAST_POSITION for first_position, end in ranges):
            raise ValueError("no ranges of positions")
        return ranges

    @property
    def breakdown(self) -> bool:
        """Whether processes or files failed, not numbers."""
        return bool(self.failure) or self.verdict in [*Breakdown]

    @property
    def bad(self) -> list[tuple[int, int]]:
        """Positions measured and found bad; not those only skipped along with a step."""
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
        for first_position, measured, bad in sorted(self.probes):
            last = told[-1] if told else None
            if last is not None and first_position <= last.end and (bad > 0) == (last.bad > 0):
                last.end, last.batches = max(last.end, first_position + measured), last.batches + 1
                last.measured, last.bad = last.measured + measured, last.bad + bad
            else:
                told.append(Stretch(first_position, first_position + measured, 1, measured, bad))
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
    first_position: int | None = None  # a guarded run knows none
    next_position: int | None = None
    applied: bool = True
    finite: bool = True
    lr: float | None = None
    seconds: float | None = None
    expert_violation: float | None = None  # and the others: of routed experts
    expert_idle: float | None = None
    router_entropy: float | None = None
    router_z: float | None = None


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
        later_value = self.during if self.during is not None else self.after
        return later_value / self.before if self.before and later_value is not None else None


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
        empty_parts: dict[str, Any] = dict.fromkeys(
            ("timeline", "suspects", "regions", "trials", "passes", "samples", "logs"), ()
        )
        return self.model_copy(update=empty_parts | {"layers": None, "tokens": None})
