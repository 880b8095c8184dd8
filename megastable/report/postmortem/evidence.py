"""Gathers the facts of an incident (facts.py) from the run directory alone.

A report of trouble must not be trouble: what cannot be read is named, and the rest is gathered all the same.
"""

from __future__ import annotations

import hashlib
import re
import statistics
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError

from megastable.config import RunConfig
from megastable.data.plant import read_planted
from megastable.data.skips import SkipEntry, read_ledger
from megastable.recipe import find
from megastable.report.postmortem import passes
from megastable.report.postmortem.facts import (
    VERSION,
    Cost,
    Evidence,
    IncidentFacts,
    Layers,
    LayerValue,
    Log,
    Row,
    RunFacts,
    Suspect,
)
from megastable.report.postmortem.safe import log_text
from megastable.report.postmortem.texts import Library, Sample, Tokens
from megastable.report.postmortem.timeline import nearby, timeline
from megastable.rundir import RunDirectory, as_json

BEFORE, AFTER = 60, 40  # steps that are shown around an incident
LONGEST = 20_000  # steps of one that are read at most
COPIED = 1 << 20  # bytes of a log, its end, that are copied
COLUMNS = (
    "step", "time", "first_position", "next_position", "applied", "finite", "loss", "grad_norm", "lr",
    "worst_position", "worst_loss", "seconds",
)  # fmt: skip
NO_STATISTICS = ("step", "time", "name")
_UNUSUAL = re.compile(r"[^A-Za-z0-9._-]")

T = TypeVar("T")
Known = TypeVar("Known", bound=BaseModel)


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
        """Digest of what the facts are made of, cheap to take: of large files their names and sizes.

        The corpora are not among them: when they are gone, what was written of them is worth keeping.
        """
        window, folders = self._window(), (self.run.steps, self.run.layers)
        found = [path for folder in folders for path in passes.files(folder, *window, slack=0)]
        logs = [self.run.root / path for path in self.incident.evidence]
        sizes = [f"{path}:{_size(path)}" for path in (*found, *logs, self.run.recipe, self.run.skips)]
        near = nearby(self.events, self.begin, self.end)
        return hashlib.sha256(
            as_json([VERSION, near, self._back_to(), self._downtime(), sizes]).encode()
        ).hexdigest()

    def gather(self) -> Evidence:
        """All of it. Raises nothing but what a broken program would."""
        i = self.incident
        rows = self._try("the step records", self._rows, list[Row]())
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
            passes=passes.passes(rows),
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

    def _healed_at(self, rows: Sequence[Row]) -> int | None:
        """The last step before the proof. The journal's event has no step; the policy's clock in it is close."""
        last = self.own[-1]
        if last.get("what") != "closed" or self.incident.outcome != "healed":
            return None
        done = [row.step for row in rows if row.time <= last["time"] + 0.01]
        told = [*done[-1:], *_clocks([last])]
        return next((step for step in told if step > self.incident.step), None)

    def _downtime(self) -> float:
        """From the end of each process that this incident ended to the first step, or the end, of the next."""
        ends = ("ended", "hang") if self.incident.breakdown else ("handover",)
        start = max(
            (n for n in range(self.begin) if self.events[n]["event"] in ("training", "launched")), default=-1
        )
        total, since, again = 0.0, 0.0, False
        for number in range(start + 1, len(self.events)):
            event = self.events[number]
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
        return first, min(max(i.step, i.onset, *_clocks(self.own)) + AFTER, first + LONGEST)

    def _rows(self) -> list[Row]:
        first, last = self._window()
        rows, problems = passes.rows(self.run.steps, first, last, COLUMNS)
        self.problems += problems
        known = {(row["step"], row["first_position"]) for row in rows}
        for event in self.events:
            place = event.get("step"), event.get("first_position")
            if event["event"] == "discarded" and place not in known:
                rows.append(event | {"applied": False})
        found: list[Row] = []
        for row in rows:
            with suppress(ValidationError):  # an event of another version
                found.append(Row.model_validate(row))
        return sorted((row for row in found if first <= row.step <= last), key=lambda row: row.time)

    def _layers(self, rows: Sequence[Row]) -> Layers | None:
        onset = self.incident.onset
        begin = min((row.time for row in rows if row.step >= onset), default=self.own[0]["time"])
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
        name = _UNUSUAL.sub("_", "-".join(("log", *parts)))
        return Log(source=str(inside), file=name, bytes=size, text=log_text(content))

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

    def _cost(self, run: RunFacts, rows: Sequence[Row]) -> Cost:
        i = self.incident
        known = [row.seconds for row in rows if row.seconds]
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
        except Exception as error:
            # A corpus that is gone, a disk that is failing, whatever it is: the other facts still count.
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


def _clocks(events: Sequence[dict[str, Any]]) -> list[int]:
    """The farthest step that had been reached at each event, as the policy's memory in it tells."""
    memories = [m for event in events if isinstance(m := event.get("policy"), dict)]
    return [clock for memory in memories if isinstance(clock := memory.get("clock"), int)]
