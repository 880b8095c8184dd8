"""All facts of one incident, from its run directory alone: what every file of the post-mortem is made of.

`Evidence` is what evidence.json holds (JSON; numbers that are not finite as text; times in Unix seconds, losses in nats
per token, gradient norms before clipping, positions as ranges [first, end)). Whatever could not be had is named in
`problems`, and the rest is there all the same: a report of trouble must not be trouble.
"""

from __future__ import annotations

import hashlib
import statistics
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

from pydantic import BaseModel, ConfigDict, ValidationError

from megastable.config import RunConfig
from megastable.data.documents import Document
from megastable.data.manifest import FILE as MANIFEST
from megastable.data.plant import read_planted
from megastable.data.skips import SkipEntry, read_ledger
from megastable.recipe import find
from megastable.report.postmortem import passes
from megastable.report.postmortem.safe import log_text
from megastable.report.postmortem.texts import Facts, Library, Sample, Tokens
from megastable.report.postmortem.timeline import Entry, nearby, timeline
from megastable.rundir import RunDirectory, as_json

VERSION = 1  # of what is made of the facts: another one writes all incidents again
BEFORE, AFTER = 60, 40  # steps that are shown around an incident
LONGEST = 20_000  # steps of one that are read at most
COPIED = 1 << 20  # bytes of a log, its end, that are copied
TAIL = 60  # lines of it that are shown
COLUMNS = (
    "step", "time", "first_position", "next_position", "applied", "finite", "loss", "grad_norm", "lr",
    "worst_position", "worst_loss", "seconds",
)  # fmt: skip
NO_STATISTICS = ("step", "time", "name")

T = TypeVar("T")
Known = TypeVar("Known", bound=BaseModel)


class RunFacts(Facts):
    """name: of the directory. world: ranks at the time. lr: the peak rate. price: of a GPU-hour, in `currency`."""

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


class IncidentFacts(BaseModel):
    """What the journal's last word on it says; as stability/incident.py, but lenient: of any version, or torn."""

    model_config = ConfigDict(extra="ignore", frozen=True)

    number: int
    step: int = 0
    onset: int = 0
    verdict: str = "unknown"
    kind: str = "unknown"
    cause: str = "unknown"
    actions: list[str] = []
    reasons: list[str] = []
    positions: list[tuple[int, int]] = []
    documents: list[Document] = []
    steps_lost: int = 0
    batches_discarded: int = 0
    seconds: float = 0.0
    loss_before: float | None = None
    loss_peak: float | None = None
    norm_peak: float | None = None
    loss_after: float | None = None
    outcome: str = "open"
    failure: str = ""
    evidence: list[str] = []

    @property
    def breakdown(self) -> bool:
        """Whether processes or files failed, rather than numbers."""
        return bool(self.failure) or self.verdict in ("crash", "hang", "damaged_checkpoint")

    @property
    def guilty(self) -> list[tuple[int, int]]:
        """Positions that were found guilty by themselves; what was only skipped along with a window is not."""
        return self.positions if self.cause == "data" else []


class Suspect(BaseModel):
    """A sample on the good state, as attribution measured it."""

    model_config = ConfigDict(extra="ignore", frozen=True)

    position: int
    loss: float | None = None
    z: float | None = None
    gradient_norm: float | None = None


class Row(BaseModel):
    """A recorded step; where its file is not on the disk yet, what the journal says of a refused one."""

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
    worst_position: int | None = None
    worst_loss: float | None = None
    seconds: float | None = None


class LayerValue(Facts):
    """A statistic of a parameter or block, at the last look before the onset and the first one after it."""

    name: str
    statistic: str
    before: float | None
    after: float | None

    @property
    def ratio(self) -> float | None:
        return self.after / self.before if self.before and self.after is not None else None


class Layers(Facts):
    before_step: int | None
    after_step: int | None
    after_recovery: bool  # the look after the onset is of the healed run
    values: list[LayerValue]


class Log(Facts):
    """A log or a rank's stacks. file: the copy of its end, control characters escaped, beside the report."""

    source: str
    file: str
    bytes: int
    text: str

    @property
    def tail(self) -> str:
        return "\n".join(self.text.rstrip("\n").splitlines()[-TAIL:])


class Cost(Facts):
    """What it took. step_seconds: median of the steps around; downtime: from the end of a process to the next one's
    first step."""

    steps: int
    batches_refused: int
    tokens: int | None
    step_seconds: float | None
    redone_seconds: float
    recovery_seconds: float
    downtime_seconds: float
    gpu_hours: float | None
    money: float | None

    @property
    def seconds(self) -> float:
        return self.redone_seconds + self.recovery_seconds + self.downtime_seconds


class Evidence(Facts):
    """Everything. inputs: digest of what it was made from. passes: recorded steps, a list for each time through.

    back_to: steps that the run went back to. healed_at: step of the proof that it was over; None where none was told.
    """

    format: int = VERSION
    inputs: str
    run: RunFacts
    incident: IncidentFacts
    cost: Cost
    back_to: list[int]
    healed_at: int | None
    timeline: list[Entry]
    suspects: list[Suspect]
    skipped: list[SkipEntry]
    passes: list[list[Row]]
    layers: Layers | None
    samples: list[Sample]
    tokens: Tokens | None
    logs: list[Log]
    problems: list[str]


class Case:
    """Gathers one incident. events: the whole journal; library: opens the corpora, once for all incidents."""

    def __init__(
        self,
        run: RunDirectory,
        config: RunConfig | None,
        events: Sequence[dict[str, Any]],
        number: int,
        library: Callable[[], Library],
        problems: Sequence[str] = (),
    ) -> None:
        self.run, self.config, self.events, self.library = run, config, events, library
        self.problems = list(problems)
        own = [
            index for index, event in enumerate(events)
            if event["event"] == "incident" and _summary(event).get("number") == number
        ]  # fmt: skip
        self.begin, self.end = own[0], own[-1]
        self.own = [events[index] for index in own]
        self.incident = self._lenient(IncidentFacts, _summary(self.own[-1]), "the incident")

    @property
    def inputs(self) -> str:
        """Digest of what the facts are made of, cheap to take: of large files their names and sizes."""
        found = [
            f
            for folder in (self.run.steps, self.run.layers)
            for f in passes.files(folder, *self._window(), 0)
        ]
        logs = [self.run.root / path for path in self.incident.evidence]
        corpora = [find(corpus.path) / MANIFEST for corpus in self.config.data.corpora] if self.config else []
        sizes = [
            f"{path}:{_size(path)}" for path in (*found, *logs, *corpora, self.run.recipe, self.run.skips)
        ]
        near = [*nearby(self.events, self.begin, self.end), *_until(self.events[self.end + 1 :], "training")]
        return hashlib.sha256(as_json([VERSION, near, sizes]).encode()).hexdigest()

    def gather(self) -> Evidence:
        """All of it. Raises nothing but what a broken program would."""
        i = self.incident
        rows = self._try("the step records", self._rows, list[dict[str, Any]]())
        suspects = self._suspects()
        losses = {s.position: s.loss for s in suspects if s.loss is not None}
        samples: list[Sample] = []
        tokens: Tokens | None = None
        if i.positions:
            samples = self._try("the texts", lambda: self.library().samples(i.positions, losses), [])
        if i.guilty and samples:
            tokens = self._try("the tokens", lambda: self.library().tokens(i.guilty), None)
        if samples and self.library().problem:
            self.problems.append(self.library().problem)
        ledger = self._try("the skip ledger", lambda: read_ledger(self.run.skips), list[SkipEntry]())
        world = next(
            (e.get("world") for e in reversed(self.events[: self.begin]) if e["event"] == "training"), None
        )
        facts = self._run_facts(world if isinstance(world, int) else None)
        return Evidence(
            inputs=self.inputs, run=facts, incident=i, cost=self._cost(facts, rows), back_to=self._back_to(),
            healed_at=self._healed_at(rows), timeline=timeline(self.events, self.begin, self.end, i.number),
            suspects=suspects, skipped=[entry for entry in ledger if entry.incident == i.number],
            passes=[[Row.model_validate(row) for row in part] for part in passes.passes(rows)],
            layers=self._try("the layers", lambda: self._layers(rows), None), samples=samples, tokens=tokens,
            logs=[log for path in i.evidence if (log := self._log(path)) is not None],
            problems=list(dict.fromkeys(self.problems)),
        )  # fmt: skip

    # From the journal

    def _suspects(self) -> list[Suspect]:
        given = [s for event in self.own for s in event.get("suspects") or () if isinstance(s, dict)]
        found = [self._lenient(Suspect, s, "a suspect") for s in given if isinstance(s.get("position"), int)]
        return list({s.position: s for s in found}.values())

    def _back_to(self) -> list[int]:
        steps = [
            e.get("to_step", e.get("step")) for e in self.own if e.get("what") in ("rewound", "restarted")
        ]
        if self.incident.breakdown:
            after = self.events[self.begin :]
            steps += [e.get("step") for e in after if e["event"] == "resumed"][:1]
        return [step for step in steps if isinstance(step, int)]

    def _healed_at(self, rows: Sequence[dict[str, Any]]) -> int | None:
        """The last step before the proof. The journal's event has no step; the policy's clock in it is close."""
        last = self.own[-1]
        if last.get("what") != "closed" or self.incident.outcome != "healed":
            return None
        done = [row["step"] for row in rows if row["time"] <= last["time"] + 0.01]
        clock = (last.get("policy") or {}).get("clock")
        if done and done[-1] > self.incident.step:
            return int(done[-1])
        return clock if isinstance(clock, int) and clock > self.incident.step else None

    def _downtime(self) -> float:
        """From the end of each process that this incident ended to the first step, or the end, of the next."""
        ends = ("ended", "hang") if self.incident.breakdown else ("handover",)
        starts = [n for n in range(self.begin) if self.events[n]["event"] in ("training", "launched")]
        total, since, again = 0.0, 0.0, False
        for number, event in enumerate(
            self.events[max(starts, default=-1) + 1 :], max(starts, default=-1) + 1
        ):
            kind = event["event"]
            again = again or (since > 0 and kind == "launched")
            if since and (kind == "training" or (again and kind == "ended")):
                total, since, again = total + max(0.0, event["time"] - since), 0.0, False
            if number > self.end and not since:
                break
            if kind in ends and not since:
                waited = event.get("waited") if kind == "hang" else None
                since = event["time"] - (waited if isinstance(waited, int | float) else 0.0)
        return total

    # From other files

    def _window(self) -> tuple[int, int]:
        """The steps that are shown."""
        i = self.incident
        first = max(1, min(i.onset, i.step) - BEFORE)
        clocks = [c for e in self.own if isinstance(c := (e.get("policy") or {}).get("clock"), int)]
        return first, min(max(i.step, i.onset, *clocks) + AFTER, first + LONGEST)

    def _rows(self) -> list[dict[str, Any]]:
        first, last = self._window()
        rows, problems = passes.rows(self.run.steps, first, last, COLUMNS)
        self.problems += problems
        known = {(row["step"], row["first_position"]) for row in rows}
        refused = [e for e in self.events if e["event"] == "discarded" and first <= e.get("step", 0) <= last]
        for event in refused:
            if (event["step"], event.get("first_position")) not in known:
                rows.append({k: v for k, v in event.items() if k in Row.model_fields} | {"applied": False})
        for row in rows:
            row["loss"], row["grad_norm"] = float(row["loss"]), float(row["grad_norm"])
        return sorted(rows, key=lambda row: row["time"])

    def _layers(self, rows: Sequence[dict[str, Any]]) -> Layers | None:
        onset = self.incident.onset
        begin = min((r["time"] for r in rows if r["step"] >= onset), default=self.own[0]["time"])
        every = self.config.logging.layers_interval if self.config else 0
        before, after, problems = passes.around(
            self.run.layers, begin, max(0, onset - 3 * every), self.incident.step + 3 * every
        )
        self.problems += problems
        if not before and not after:
            return None
        old, new = ({row["name"]: row for row in look} for look in (before, after))
        values = [
            LayerValue(name=name, statistic=key, before=old.get(name, {}).get(key), after=new.get(name, {}).get(key))
            for name in dict.fromkeys((*old, *new))
            for key in {**old.get(name, {}), **new.get(name, {})} if key not in NO_STATISTICS
        ]  # fmt: skip
        return Layers(
            before_step=before[0]["step"] if before else None, after_step=after[0]["step"] if after else None,
            after_recovery=bool(after) and self.own[-1].get("what") == "closed"
            and after[0]["time"] > self.own[-1]["time"],
            values=[v for v in values if v.before is not None or v.after is not None],
        )  # fmt: skip

    def _log(self, path: str) -> Log | None:
        """The end of a file that the incident names, if it lies inside the run directory."""
        root = self.run.root.resolve()
        try:
            file = (root / path).resolve()
            if not file.is_relative_to(root):
                self.problems.append(f"{path} is not in the run directory: it was not copied")
                return None
            with file.open("rb") as stream:
                size = stream.seek(0, 2)
                stream.seek(max(0, size - COPIED))
                content = stream.read(COPIED)
        except (OSError, ValueError) as error:
            why = error.strerror if isinstance(error, OSError) else error
            self.problems.append(f"{path} could not be read: {why}")
            return None
        inside = file.relative_to(root)
        parts = inside.parts[1:] if inside.parts[0] == self.run.logs.name else inside.parts
        return Log(source=str(inside), file="-".join(parts), bytes=size, text=log_text(content))

    def _run_facts(self, world: int | None) -> RunFacts:
        c, name = self.config, self.run.root.resolve().name
        if c is None:
            return RunFacts(name=name, directory=str(self.run.root), world=world)
        return RunFacts(
            name=name, directory=str(self.run.root), world=world, steps=c.train.steps,
            global_batch=c.train.global_batch, sequence_length=c.model.sequence_length, lr=c.optimizer.lr,
            cut_factor=c.stability.policy.cut_factor, corpora=tuple(str(corpus.path) for corpus in c.data.corpora),
            planted=tuple(self._try("planted.json", self._planted, list[str]())), price=c.supervise.gpu_hour_price,
            currency=c.supervise.currency,
        )  # fmt: skip

    def _planted(self) -> list[str]:
        """What was made bad on purpose, and how much of it this incident found."""
        told = []
        for corpus in self.config.data.corpora if self.config and self.incident.positions else []:
            planted = read_planted(find(corpus.path))
            if planted is None:
                continue
            exactly = self.incident.guilty == [planted.positions]
            found = "; exactly these were found guilty" if exactly else ""
            told.append(f"{corpus.path} was made bad on purpose: it has {planted}{found}")
        return told

    def _cost(self, run: RunFacts, rows: Sequence[dict[str, Any]]) -> Cost:
        i = self.incident
        known = [row["seconds"] for row in rows if row.get("seconds")]
        usual = statistics.median(known) if known else None
        redone = i.steps_lost * (usual or 0.0)
        down = self._downtime()
        tokens = None
        if run.global_batch is not None and run.sequence_length is not None:
            tokens = i.steps_lost * run.global_batch * run.sequence_length
        hours = None if run.world is None else run.world * (redone + i.seconds + down) / 3600
        return Cost(
            steps=i.steps_lost, batches_refused=i.batches_discarded, tokens=tokens, step_seconds=usual,
            redone_seconds=redone, recovery_seconds=i.seconds, downtime_seconds=down, gpu_hours=hours,
            money=None if hours is None or run.price is None else hours * run.price,
        )  # fmt: skip

    # Going on without

    def _try(self, what: str, get: Callable[[], T], otherwise: T) -> T:
        try:
            return get()
        except (
            Exception
        ) as error:  # a corpus that is gone, a disk that is failing: the other facts still count
            self.problems.append(f"{what}: {error or type(error).__name__}")
            return otherwise

    def _lenient(self, kind: type[Known], given: dict[str, Any], what: str) -> Known:
        """`given` as far as it can be read; what is left out is named."""
        rest = dict(given)
        while True:
            try:
                return kind.model_validate(rest)
            except ValidationError as error:
                for key in {str(detail["loc"][0]) for detail in error.errors()}:
                    self.problems.append(f"{what}: {key}={rest.pop(key, None)!r} is not understood")


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return -1


def _summary(event: dict[str, Any]) -> dict[str, Any]:
    summary = event.get("summary")
    return summary if isinstance(summary, dict) else {}


def _until(events: Sequence[dict[str, Any]], kind: str) -> list[dict[str, Any]]:
    """Up to and with the first of a kind; nothing where there is none."""
    for number, event in enumerate(events):
        if event["event"] == kind:
            return list(events[: number + 1])
    return []
