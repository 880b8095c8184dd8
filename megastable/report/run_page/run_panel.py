"""Makes what the page shows around its plots: headline, incidents, checkpoints, time, layers, data, machines."""

from __future__ import annotations

import math
import time
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
from pydantic import ValidationError

from megastable.base.text import visible
from megastable.report.goodput_picture import thick
from megastable.report.postmortem import sentences
from megastable.report.postmortem.facts import IncidentFacts
from megastable.report.run_page import machine_map, page_headline
from megastable.report.run_page.layer_map import KINDS as HEAT_KINDS
from megastable.report.run_page.plot_data import encoded
from megastable.report.run_page.recipe_facts import recipe_facts
from megastable.run.events.event import LARGEST
from megastable.run.goodput.gpu_hours import gpu_hours
from megastable.run.goodput.time_account import TimeAccount, TimeKind
from megastable.run.run_history import IncidentHistory, JournalLine, Measurement, StartFacts, select_standing

if TYPE_CHECKING:
    from megastable.report.run_page.run_reader import RunReader

LINES = 200  # of the journal at a time
LOOKS = 1000  # points of a curve that is measured now and then
LOST = 30  # causes of lost time
SPANS = 2000  # of time, with their causes
THIN = 1 / 1600  # of the strip
TAIL = 20_000  # steps, of which the headline takes the last ones that were not undone
ATTEMPTS = 50  # the newest
REPORT = "report.html"  # an incident's page, in its folder
NO_END = "its end is not recorded: the supervisor was killed, too"
# Events by what a reader looks for.
GROUPS = {
    "incident": "incident discarded unstable handover alert trend located would baseline_reset rate_cut rate_warmup "
    "rate_lifted fell_back returned replicas_differ state_changed gradients_doubted replay_differs snapshot_rejected "
    "warning branches_tried discard_examined samples_examined samples_dropped",
    "checkpoint": "checkpoint rolled_back resumed reshaped memory_resume memory_refused memory_dropped memory_off "
    "imported",
    "data": "order_changed exchanges_undone blend_changed mix_changed batch_changed length_changed looked_ahead "
    "look_ahead_spent look_ahead_failed skips",
    "people": "note change_ config_changed",
    "process": "supervisor launched training ended hang restart hosts_awaited host_ stopped finished hook_failed",
}
PREFIXES = {prefix: group for group, prefixes in GROUPS.items() for prefix in prefixes.split()}

Place = dict[str, float]


class PlacesOfSteps:
    """Where steps and times are on the three axes of the plots."""

    def __init__(self, reader: RunReader) -> None:
        self.length, self.began = reader.length, reader.began
        with reader.records.table() as table:
            # 100,000 rows place a mark as well as millions.
            some = np.arange(0, len(table.steps), max(1, len(table.steps) // 100_000))
            live = some[~table.steps["undone"][some]]
            self.step, self.position = table.steps["step"][live], table.steps["next_position"][live]
            self.time = np.maximum.accumulate(table.steps["time"][live])

    def of(self, step: int | None, time: float | None) -> Place:
        """A step, a time, or both. time: 0 is none, too."""
        time = time or None
        if step is None and len(self.step):
            step = int(np.interp(time or self.began, self.time, self.step))
        step = max(-LARGEST, min(LARGEST, step or 0))
        if not len(self.step):
            return {"step": step, "tokens": 0, "time": (time or self.began) - self.began}
        tokens = float(np.interp(step, self.step, self.position)) * self.length
        if time is None:
            time = float(np.interp(step, self.step, self.time))
        return {"step": step, "tokens": tokens, "time": time - self.began}

    def steps(self, axis: str, values: Iterable[float]) -> list[float]:
        """Steps of values of another axis."""
        if axis != "tokens" or not len(self.step):
            return list(values)
        return [float(np.interp(v / self.length, self.position, self.step)) for v in values]

    def times(self, axis: str, begin: float | None, end: float | None) -> tuple[float, float]:
        """The ends of a window of an axis; None: without end. [unix seconds]"""
        if axis == "time":
            return (
                -math.inf if begin is None else begin + self.began,
                math.inf if end is None else end + self.began,
            )
        found = [-math.inf, math.inf]
        for n, value in enumerate((begin, end)):
            if value is not None and len(self.step):
                (step,) = self.steps(axis, [value])
                # Something is read before the first step and after the last one, too.
                if self.step[0] < step < self.step[-1]:
                    found[n] = float(np.interp(step, self.step, self.time))
        return found[0], found[1]


def head(r: RunReader) -> dict[str, Any]:
    """See `page_headline`; and how far it was read."""
    history = r.history
    with r.records.table() as table:
        # The last ones that were not undone are among the last ones, but for a very long way back.
        tail = slice(max(0, len(table.steps) - TAIL), None)
        rows = tail.start + np.flatnonzero(~table.steps["undone"][tail])[-page_headline.RECENT :]
        recent = {name: table.steps[name][rows] for name in page_headline.COLUMNS}
        undone = int(np.count_nonzero(table.steps["undone"] & table.steps["applied"]))
    cases = [case for note in history.incidents.values() if (case := facts_of(note)) is not None]
    told = page_headline.headline(
        r.status, recent, cases, select_standing(history.evaluations)[-1:], describe_trends(r), r.account, r.recipe,
        r.data.skipped(r.length), usable_checkpoints(r), undone, time.time(),
    )  # fmt: skip
    problems = [*r.failures.values(), *r.status.problems, *r.data.problems]
    damaged = r.records.damaged | r.layers.damaged
    if damaged:
        name, why = next(iter(damaged.items()))
        problems.append(f"{len(damaged)} record files cannot be read ({name}: {why})")
    return {
        "name": r.name, "version": r.version, "length": r.length, "began": r.began,
        "problems": [visible(problem, 400) for problem in dict.fromkeys(problems)], **told,
    }  # fmt: skip


def panel(r: RunReader) -> dict[str, Any]:
    """All that is around the plots, but for the headline."""
    history, places = r.history, PlacesOfSteps(r)
    cases = [incident(r, note, places) for note in history.incidents.values()]
    evaluations = select_standing(history.evaluations)
    return {
        "incidents": cases,
        "evaluations": _curve(evaluations, places),
        "probe": {
            "standing": _curve(select_standing(history.probes), places),
            "undone": _curve(
                [one for one in history.probes if one.undone and math.isfinite(one.loss)], places
            ),
        },
        "by_corpus": _curves([(one.step, one.time, one.values) for one in evaluations if one.values], places),
        "tasks": _curves([(one.step, None, one.values) for one in history.scores if not one.undone], places),
        "checkpoints": [_checkpoint(r, name, places) for name in history.checkpoints],
        "usable": {
            **usable_checkpoints(r)._asdict(),
            "after": r.recipe.get("checkpoint", {}).get("healthy_after"),
        },
        "recipe": recipe_facts(
            r.recipe,
            history.starts[-1].ranks if history.starts else None,
            r.data.mixture,
            history.software,
            history.peaks[-1][1:] if history.peaks else None,
        ),
        "peaks": [
            {"step": step, "tflops": peak, "source": visible(source, 80)}
            for step, peak, source in history.peaks[-20:]
        ],
        "rates": [{"x": places.of(step, at), "text": told} for step, at, told in history.rates],
        "trends": describe_trends(r),
        "time": r.account,
        "data": r.data.content(r.length, r.status.cursor or 0, cases),
        "machines": machines(r, places),
        "journal": journal(r),
    }


def incident(r: RunReader, note: IncidentHistory, places: PlacesOfSteps) -> dict[str, Any]:
    """One incident, for its mark and its card."""
    case = facts_of(note) or IncidentFacts(number=note.number)
    folder = f"{case.number:04d}"
    return {
        "number": case.number, "x": _onset(case, note, places),
        "opened": note.opened, "closed": note.closed, "onset": case.onset, "step": case.step,
        "until": None if note.closed is None else places.of(None, note.closed),
        "title": visible(sentences.seen(case), 600), "mood": _mood(case.outcome),
        "verdict": visible(case.verdict, 60), "kind": visible(sentences.type_of(case.kind), 60),
        "cause": visible(sentences.cause(case), 300), "cause_word": visible(case.cause, 40),
        "actions": [visible(sentences.acted(action), 300) for action in case.actions],
        "action_words": [visible(action, 40) for action in case.actions],
        "outcome": visible(case.outcome, 40), "back_to": note.back_to,
        "reasons": [visible(reason, 600) for reason in case.reasons],
        "positions": [list(pair) for pair in case.positions], "guilty": bool(case.guilty),
        "deferred": [list(pair) for pair in case.deferred], "returns": [list(pair) for pair in case.returns],
        "skipped": sum(end - first for first, end in case.positions), "documents": len(case.documents),
        "steps_lost": case.steps_lost, "refused": case.batches_discarded, "seconds": _plain(case.seconds),
        "loss_before": _plain(case.loss_before), "loss_peak": _plain(case.loss_peak),
        "loss_after": _plain(case.loss_after), "norm_peak": _plain(case.norm_peak),
        "page": folder if (r.run.incidents / folder / REPORT).is_file() else None,
        "timeline": [line(entry, places) for entry in note.lines],
    }  # fmt: skip


def _onset(case: IncidentFacts, note: IncidentHistory, places: PlacesOfSteps) -> Place:
    """Where it began. The step may have been done again since: not later than the incident was opened."""
    place = places.of(case.onset or case.step, note.opened if case.breakdown else None)
    return {**place, "time": min(place["time"], note.opened - places.began)} if note.opened else place


def facts_of(note: IncidentHistory) -> IncidentFacts | None:
    """What the journal says of an incident; None if that is malformed."""
    try:
        return IncidentFacts.model_validate(note.summary)
    except ValidationError:
        return None


def account(found: TimeAccount, began: float, starts: Sequence[StartFacts] = ()) -> dict[str, Any]:
    """Where the time went. charged: seconds by incident. spans: [kind, begin, end, cause, incident, host], in seconds
    since the run began. starts, gpu_hours: see `gpu_hours`."""
    seconds = found.seconds()
    spans = list(found.spans())
    hours = gpu_hours(spans, [(start.time, start.ranks) for start in starts])
    spans = [span for span in spans if span.kind is not TimeKind.TRAINING]
    if len(spans) <= SPANS:
        drawn = [
            [span.kind.value, span.begin - began, span.end - began, visible(span.cause, 120), span.incident,
             visible(span.host, 60)]
            for span in spans
        ]  # fmt: skip
    else:
        drawn = []
        for kind in TimeKind:
            of_kind = [(span.begin - began, span.end - began) for span in spans if span.kind is kind]
            drawn += [[kind.value, a, b, "", None, ""] for a, b in thick(of_kind, THIN * found.wall)]
    lost = sorted(found.lost().items(), key=lambda entry: -entry[1][0])
    charged: dict[int, float] = defaultdict(float)
    for (_, _, number, _), (spent, _) in lost:
        if number is not None:
            charged[number] += spent
    return {
        "begin": found.begin - began, "end": found.end - began, "wall": found.wall,
        "share": found.goodput(), "smaller": found.smaller(), "gpu_hours": None if hours is None else hours.all,
        "seconds": {kind.value: round(value, 3) for kind, value in seconds.items() if value > 0}, "spans": drawn,
        "lost": [
            {"kind": kind.value, "cause": visible(cause, 160), "incident": number, "host": visible(host, 60),
             "seconds": spent, "times": times}
            for (kind, cause, number, host), (spent, times) in lost[:LOST]
        ],
        "charged": {str(number): round(spent, 3) for number, spent in charged.items()},
    }  # fmt: skip


def machines(r: RunReader, places: PlacesOfSteps) -> dict[str, Any]:
    """Processes and hosts, as far as the run directory tells."""
    s, history = r.status, r.history

    def process(told: Any) -> dict[str, Any]:
        return {"alive": told.alive, "pid": told.pid, "host": told.host}

    attempts = list[dict[str, Any]]()
    gone = s.trainer.alive is False and s.supervisor.alive is False
    for known in [one for one in history.attempts.values() if one.began is not None][-ATTEMPTS:]:
        runs = known.number == history.attempt and not gone
        attempts.append({
            "number": known.number, "began": known.began, "hosts": known.hosts, "x": places.of(None, known.began),
            "how": visible(known.end.sentence() if known.end else "runs" if runs else NO_END, 300),
            **({"ended": known.end.time or 0.0} if known.end else {}),
        })  # fmt: skip
    return {
        "supervisor": process(s.supervisor), "trainer": process(s.trainer), "phase": s.phase, "world": s.world,
        "hosts": [visible(host, 80) for host in history.hosts], "starts": s.starts, "restarts": s.restarts,
        "attempts": attempts, "slow": {host: slow.text for host, slow in s.slow.items()}, "left_out": s.left_out,
    }  # fmt: skip


def heat(r: RunReader, axis: str, begin: float | None, end: float | None) -> dict[str, Any]:
    """Maps of the layers over what is between `begin` and `end` of an axis."""
    places = PlacesOfSteps(r)
    window = [-math.inf if begin is None else begin, math.inf if end is None else end]
    window = [v + r.began for v in window] if axis == "time" else places.steps(axis, window)
    files = r.layers.chosen(window[0], window[1], axis)
    found = r.layers.read(files)
    kinds = []
    for kind, values in found["kinds"].items():
        title, unit, _ = HEAT_KINDS[kind]
        kinds.append({"kind": kind, "title": title, "unit": unit, "values": encoded(values)})
    return {
        "x": _xs([places.of(file.step, file.time) for file in files]),
        "layers": [visible(name, 60) for name in found["layers"]],
        "kinds": kinds, "looks": len(files), "of": len(r.layers.files),
    }  # fmt: skip


def machine_maps(r: RunReader, axis: str, begin: float | None, end: float | None) -> dict[str, Any]:
    """Ranks, GPUs and hosts over what is between `begin` and `end` of an axis."""
    places = PlacesOfSteps(r)
    samples = r.machines.read(*places.times(axis, begin, end))
    samples = machine_map.with_gaps(samples if axis == "time" else machine_map.forward(samples))
    stages = r.recipe.get("parallel", {}).get("pipeline")
    found = machine_map.maps(samples, stages if isinstance(stages, int) else 1)
    last = r.machines.newest
    return {
        "x": _xs([places.of(sample.step, sample.time) for sample in samples]), "looks": len(samples),
        "maps": [{**one, "values": encoded(one["values"])} for one in found],
        "hosts": machine_map.hosts(last), "time": None if last is None else last.time,
    }  # fmt: skip


def journal(r: RunReader, query: str = "", group: str = "", most: int = LINES) -> dict[str, Any]:
    """The newest events, or those that were searched for."""
    history = r.history
    found, count = select_lines(history.lines, query, group, most)
    return {
        "lines": [line(entry) for entry in found],
        "count": count,
        "passed": history.passed_over,
        "all": len(history.lines),
    }


def select_lines(
    lines: Iterable[JournalLine], query: str = "", group: str = "", most: int = LINES
) -> tuple[list[JournalLine], int]:
    """The newest `most` lines of a group ("" = all) that have all words of `query`, newest first, and the number of all
    of them."""
    words, found, count = query.lower().split(), list[JournalLine](), 0
    for entry in reversed(list(lines)):
        if group and find_group(entry.name) != group:
            continue
        if words:
            text = f"{entry.text} {entry.name} step {entry.step}".lower()
            if not all(word in text for word in words):
                continue
        count += 1
        if len(found) < most:
            found.append(entry)
    return found, count


@lru_cache(maxsize=1000)
def find_group(name: str) -> str:
    """The group of an event, by its name."""
    return next((group for prefix, group in PREFIXES.items() if name.startswith(prefix)), "other")


def line(entry: JournalLine, places: PlacesOfSteps | None = None) -> dict[str, Any]:
    """A line of the journal."""
    return {
        "time": entry.time, "step": entry.step, "name": visible(entry.name, 60), "group": find_group(entry.name),
        "text": entry.text, "incident": entry.incident,
    }  # fmt: skip


def describe_trends(r: RunReader) -> list[str]:
    """Warnings of slow signals that are not over."""
    return [event.sentence() for event in r.history.trends.values()]


def usable_checkpoints(r: RunReader) -> page_headline.UsableCheckpoints:
    """What the journal and the disk say; whether their bytes are right is checked by the start that resumes."""
    newest: int | None = None
    for note in sorted(r.history.checkpoints.values(), key=lambda note: -note.step):
        if note.state in ("saved", "healthy") and note.name in r.committed:
            newest = note.step if newest is None else newest
            if note.state == "healthy":
                return page_headline.UsableCheckpoints(newest, note.step)
    return page_headline.UsableCheckpoints(newest, None)


def _checkpoint(r: RunReader, name: str, places: PlacesOfSteps) -> dict[str, Any]:
    note = r.history.checkpoints[name]
    return {
        "name": visible(name, 80), "x": places.of(note.step, note.time), "step": note.step, "time": note.time,
        "bytes": note.bytes, "seconds": _plain(note.seconds), "blocked": _plain(note.blocked), "state": note.state,
        "why": note.why, "proved": note.proved,
        "there": name in r.committed,
    }  # fmt: skip


def _curve(looks: Sequence[Measurement], places: PlacesOfSteps) -> dict[str, Any]:
    """A loss that is measured now and then; of more than `LOOKS` looks the means of neighbours."""
    width = -(-len(looks) // LOOKS) or 1
    some = [looks[n : n + width] for n in range(0, len(looks), width)]
    return {
        "x": _xs([places.of(group[-1].step, group[-1].time) for group in some]),
        "loss": encoded(np.array([np.mean([one.loss for one in group]) for group in some], np.float32)),
    }


def _curves(
    measured: Iterable[tuple[int, float | None, Mapping[str, float]]], places: PlacesOfSteps
) -> dict[str, Any]:
    """A curve for every name, over the steps that any of them was measured at. measured: step, time, values by name."""
    looks = sorted(measured, key=lambda look: look[0])
    names = dict.fromkeys(name for _, _, values in looks for name in values)
    return {
        "x": _xs([places.of(step, time) for step, time, _ in looks]),
        "values": [
            {
                "name": visible(name, 80),
                "y": encoded(np.array([values.get(name, np.nan) for _, _, values in looks], np.float32)),
            }
            for name in names
        ],
    }


def _xs(places: list[Place]) -> dict[str, str]:
    found: dict[str, npt.NDArray[np.float64]] = {}
    for axis in ("step", "tokens", "time"):
        found[axis] = np.array([place[axis] for place in places], np.float64)
    return {axis: encoded(values) for axis, values in found.items()}


def _mood(outcome: str) -> str:
    return {"healed": "good", "stopped": "bad"}.get(outcome, "warn")


def _plain(value: float | None) -> float | None:
    """JSON has no nan."""
    return value if value is not None and math.isfinite(value) else None
