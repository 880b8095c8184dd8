"""Reads one run for its page, in a thread of its own, and makes what the page shows around its plots."""

from __future__ import annotations

import logging
import math
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
from pydantic import ValidationError

from megastable.base.text import make_visible
from megastable.report.figures import thicken_intervals
from megastable.report.postmortem import sentences
from megastable.report.postmortem.facts import IncidentFacts
from megastable.report.postmortem.sample_texts import count_positions
from megastable.report.run_page import machine_map, page_headline, plot_data
from megastable.report.run_page.data_map import DataMap
from megastable.report.run_page.layer_map import KINDS as HEAT_KINDS
from megastable.report.run_page.layer_map import ExpertLoads, LayerMap
from megastable.report.run_page.machine_map import MachineMap
from megastable.report.run_page.page_headline import recipe_facts
from megastable.report.run_page.plot_data import AXES, encode_array
from megastable.report.run_page.step_table import RecordReader
from megastable.run.directory import RunDirectory, read_object
from megastable.run.events.event import LARGEST
from megastable.run.goodput.time_account import TimeAccount, TimeKind, count_hours
from megastable.run.goodput.watching import GoodputWatch
from megastable.run.run_history import (
    CheckpointHistory,
    HistoryReader,
    IncidentHistory,
    JournalLine,
    Measurement,
    RunHistory,
    StartFacts,
    select_standing,
)
from megastable.supervise.status import RunWatch, Status

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
        with reader.records.hold_table() as table:
            # 100,000 rows place a mark as well as millions.
            sampled_rows = np.arange(0, len(table.steps), max(1, len(table.steps) // 100_000))
            live_rows = sampled_rows[~table.steps["undone"][sampled_rows]]
            self.step, self.position = table.steps["step"][live_rows], table.steps["next_position"][live_rows]
            self.time = np.maximum.accumulate(table.steps["time"][live_rows])

    def place_event(self, step: int | None, time: float | None) -> Place:
        """A step, a time, or both. time: 0 is none, too."""
        time = time or None
        if step is None and len(self.step):
            step = int(np.interp(time or self.began, self.time, self.step))
        step = max(-LARGEST, min(LARGEST, step or 0))
        if not len(self.step):
            return {"step": step, "tokens": 0, "time": (time or self.began) - self.began}
        token_count = float(np.interp(step, self.step, self.position)) * self.length
        if time is None:
            time = float(np.interp(step, self.step, self.time))
        return {"step": step, "tokens": token_count, "time": time - self.began}

    def find_steps(self, axis: str, values: Iterable[float]) -> list[float]:
        """Steps of values of another axis."""
        if axis != "tokens" or not len(self.step):
            return list(values)
        return [float(np.interp(v / self.length, self.position, self.step)) for v in values]

    def find_times(self, axis: str, begin: float | None, end: float | None) -> tuple[float, float]:
        """The ends of a window of an axis; None: without end. [unix seconds]"""
        window_times = [-math.inf, math.inf]
        for n, window_end in enumerate((begin, end)):
            if window_end is not None and axis == "time":
                window_times[n] = window_end + self.began
            elif window_end is not None and len(self.step):
                (end_step,) = self.find_steps(axis, [window_end])
                # Something is read before the first step and after the last one, too.
                if self.step[0] < end_step < self.step[-1]:
                    window_times[n] = float(np.interp(end_step, self.step, self.time))
        return window_times[0], window_times[1]


def build_head(r: RunReader) -> dict[str, Any]:
    """See `page_headline`; and how far it was read."""
    history = r.history
    with r.records.hold_table() as table:
        # The last ones that were not undone are among the last ones, but for a very long way back.
        tail_rows = slice(max(0, len(table.steps) - TAIL), None)
        live_rows = np.flatnonzero(~table.steps["undone"][tail_rows])
        recent_rows = tail_rows.start + live_rows[-page_headline.RECENT :]
        recent_columns = {name: table.steps[name][recent_rows] for name in page_headline.COLUMNS}
        undone = int(np.count_nonzero(table.steps["undone"] & table.steps["applied"]))
    known_cases = [case for note in history.incidents.values() if (case := facts_of(note)) is not None]
    headline_facts = page_headline.build_headline(
        r.status, recent_columns, known_cases, select_standing(history.evaluations)[-1:], describe_trends(r),
        r.account, r.recipe, r.data.count_skipped(r.length), usable_checkpoints(r), undone, time.time(),
    )  # fmt: skip
    problem_texts = [*r.failures.values(), *r.status.problems, *r.data.problems]
    damaged = r.records.damaged | r.layers.damaged
    if damaged:
        name, why_damaged = next(iter(damaged.items()))
        problem_texts.append(f"{len(damaged)} record files cannot be read ({name}: {why_damaged})")
    return {
        "name": r.name, "version": r.version, "length": r.length, "began": r.began,
        "problems": [make_visible(problem_text, 400) for problem_text in dict.fromkeys(problem_texts)],
        **headline_facts,
    }  # fmt: skip


def build_panel(r: RunReader) -> dict[str, Any]:
    """All that is around the plots, but for the headline."""
    history, places = r.history, PlacesOfSteps(r)
    cases = [build_incident(r, note, places) for note in history.incidents.values()]
    evaluations = select_standing(history.evaluations)
    undone = [one for one in history.probes if one.undone and math.isfinite(one.loss)]
    healthy_after = r.recipe.get("checkpoint", {}).get("healthy_after")
    ranks = history.starts[-1].ranks if history.starts else None
    peak_facts = history.peaks[-1][1:] if history.peaks else None
    return {
        "incidents": cases, "evaluations": _curve(evaluations, places),
        "probe": {"standing": _curve(select_standing(history.probes), places), "undone": _curve(undone, places)},
        "by_corpus": _curves([(one.step, one.time, one.values) for one in evaluations if one.values], places),
        "tasks": _curves([(one.step, None, one.values) for one in history.scores if not one.undone], places),
        "checkpoints": [_checkpoint(r, note, places) for note in history.checkpoints.values()],
        "usable": usable_checkpoints(r)._asdict() | {"after": healthy_after},
        "recipe": recipe_facts(r.recipe, ranks, r.data.mixture, history.software, peak_facts),
        "peaks": [
            {"step": step, "tflops": peak, "source": make_visible(source, 80)}
            for step, peak, source in history.peaks[-20:]
        ],
        "rates": [{"x": places.place_event(step, at), "text": told} for step, at, told in history.rates],
        "trends": describe_trends(r), "time": r.account,
        "data": r.data.build_content(r.length, r.status.cursor or 0, cases),
        "machines": build_machines(r, places), "journal": build_journal(r),
    }  # fmt: skip


def build_incident(r: RunReader, note: IncidentHistory, places: PlacesOfSteps) -> dict[str, Any]:
    """One incident, for its mark and its card."""
    case = facts_of(note) or IncidentFacts(number=note.number)
    page_folder = f"{case.number:04d}"
    onset_place = places.place_event(case.onset or case.step, note.opened if case.breakdown else None)
    if note.opened:  # the step may have been done again since: not later than the incident was opened
        onset_place["time"] = min(onset_place["time"], note.opened - places.began)
    return {
        "number": case.number, "x": onset_place,
        "opened": note.opened, "closed": note.closed, "onset": case.onset, "step": case.step,
        "until": None if note.closed is None else places.place_event(None, note.closed),
        "title": make_visible(sentences.describe_symptom(case), 600), "mood": sentences.name_mood(case.outcome),
        "verdict": make_visible(case.verdict, 60), "kind": make_visible(sentences.type_of(case.kind), 60),
        "cause": make_visible(sentences.describe_cause(case), 300), "cause_word": make_visible(case.cause, 40),
        "actions": [make_visible(sentences.describe_action(action), 300) for action in case.actions],
        "action_words": [make_visible(action, 40) for action in case.actions],
        "outcome": make_visible(case.outcome, 40), "back_to": note.back_to,
        "reasons": [make_visible(reason_text, 600) for reason_text in case.reasons],
        "positions": [list(pair) for pair in case.positions], "bad": bool(case.bad),
        "deferred": [list(pair) for pair in case.deferred], "returns": [list(pair) for pair in case.returns],
        "skipped": count_positions(case.positions),
        "documents": len(case.documents), "steps_lost": case.steps_lost, "refused": case.batches_discarded,
        "seconds": case.seconds, "loss_before": case.loss_before, "loss_peak": case.loss_peak,
        "loss_after": case.loss_after, "norm_peak": case.norm_peak,
        "page": page_folder if (r.run.incidents / page_folder / REPORT).is_file() else None,
        "timeline": [build_line(journal_line) for journal_line in note.lines],
    }  # fmt: skip


def facts_of(note: IncidentHistory) -> IncidentFacts | None:
    """What the journal says of an incident; None if that is malformed."""
    try:
        return IncidentFacts.model_validate(note.summary)
    except ValidationError:
        return None


def describe_account(found: TimeAccount, began: float, starts: Sequence[StartFacts] = ()) -> dict[str, Any]:
    """Where the time went. charged: seconds by incident. spans: [kind, begin, end, cause, incident, host], in seconds
    since the run began. starts, gpu_hours: see `gpu_hours`."""
    seconds = found.sum_seconds()
    time_spans = list(found.list_spans())
    rank_hours = count_hours(time_spans, [(start.time, start.ranks) for start in starts])
    time_spans = [time_span for time_span in time_spans if time_span.kind is not TimeKind.TRAINING]
    if len(time_spans) <= SPANS:
        drawn_spans = [
            [span.kind.value, span.begin - began, span.end - began, make_visible(span.cause, 120), span.incident,
             make_visible(span.host, 60)]
            for span in time_spans
        ]  # fmt: skip
    else:
        drawn_spans = []
        for kind in TimeKind:
            of_kind = [(span.begin - began, span.end - began) for span in time_spans if span.kind is kind]
            drawn_spans += [
                [kind.value, begin_seconds, end_seconds, "", None, ""]
                for begin_seconds, end_seconds in thicken_intervals(of_kind, THIN * found.wall)
            ]
    largest_losses = sorted(found.sum_losses().items(), key=lambda entry: -entry[1][0])
    charged: dict[int, float] = defaultdict(float)
    for (_, _, number, _), (spent_seconds, _) in largest_losses:
        if number is not None:
            charged[number] += spent_seconds
    return {
        "begin": found.begin - began, "end": found.end - began, "wall": found.wall,
        "share": found.compute_goodput(), "smaller": found.measure_missing(),
        "gpu_hours": None if rank_hours is None else rank_hours.all, "spans": drawn_spans,
        "seconds": {kind.value: round(kind_seconds, 3) for kind, kind_seconds in seconds.items() if kind_seconds > 0},
        "lost": [
            {"kind": kind.value, "cause": make_visible(loss_cause, 160), "incident": number,
            "host": make_visible(host_name, 60),
             "seconds": spent_seconds, "times": span_count}
            for (kind, loss_cause, number, host_name), (spent_seconds, span_count) in largest_losses[:LOST]
        ],
        "charged": {str(number): round(spent_seconds, 3) for number, spent_seconds in charged.items()},
    }  # fmt: skip


def build_machines(r: RunReader, places: PlacesOfSteps) -> dict[str, Any]:
    """Processes and hosts, as far as the run directory tells."""
    s, history = r.status, r.history

    def process(told: Any) -> dict[str, Any]:
        return {"alive": told.alive, "pid": told.pid, "host": told.host}

    attempt_rows = list[dict[str, Any]]()
    is_gone = s.trainer.alive is False and s.supervisor.alive is False
    for known in [one for one in history.attempts.values() if one.began is not None][-ATTEMPTS:]:
        still_runs = known.number == history.attempt and not is_gone
        attempt_rows.append({
            "number": known.number, "began": known.began, "hosts": known.hosts, "x": places.place_event(None,
            known.began),
            "how": make_visible(known.end.format_sentence() if known.end else "runs" if still_runs else NO_END, 300),
            **({"ended": known.end.time or 0.0} if known.end else {}),
        })  # fmt: skip
    return {
        "supervisor": process(s.supervisor), "trainer": process(s.trainer), "phase": s.phase, "world": s.world,
        "hosts": [make_visible(host, 80) for host in history.hosts], "starts": s.starts, "restarts": s.restarts,
        "attempts": attempt_rows, "slow": {host: slow.text for host, slow in s.slow.items()}, "left_out": s.left_out,
    }  # fmt: skip


def build_heat(r: RunReader, axis: str, begin: float | None, end: float | None) -> dict[str, Any]:
    """Maps of the layers over what is between `begin` and `end` of an axis."""
    step_places = PlacesOfSteps(r)
    window = [-math.inf if begin is None else begin, math.inf if end is None else end]
    window = [v + r.began for v in window] if axis == "time" else step_places.find_steps(axis, window)
    files = r.layers.choose_files(window[0], window[1], axis)
    layer_values = r.layers.read_maps(files)
    heat_maps = [
        {
            "kind": kind,
            "title": HEAT_KINDS[kind][0],
            "unit": HEAT_KINDS[kind][1],
            "values": encode_array(values),
        }
        for kind, values in layer_values["kinds"].items()
    ]
    return {
        "x": _xs([step_places.place_event(layer_file.step, layer_file.time) for layer_file in files]),
        "layers": [make_visible(layer_name, 60) for layer_name in layer_values["layers"]],
        "kinds": heat_maps, "looks": len(files), "of": len(r.layers.files),
        **_describe_loads(r.layers.read_loads(files), step_places),
    }  # fmt: skip


def _describe_loads(found: ExpertLoads | None, places: PlacesOfSteps) -> dict[str, Any]:
    """Of a run without experts nothing: its page has not a byte about them."""
    if found is None:
        return {}
    expert_maps = {
        "x": _xs([places.place_event(layer_file.step, layer_file.time) for layer_file in found.files]),
        "blocks": found.blocks, "count": found.loads.shape[2], "loads": encode_array(found.loads),
    }  # fmt: skip
    return {"experts": expert_maps}


def machine_maps(r: RunReader, axis: str, begin: float | None, end: float | None) -> dict[str, Any]:
    """Ranks, GPUs and hosts over what is between `begin` and `end` of an axis."""
    step_places = PlacesOfSteps(r)
    samples = r.machines.read_between(*step_places.find_times(axis, begin, end))
    samples = machine_map.with_gaps(samples if axis == "time" else machine_map.keep_forward(samples))
    stages = r.recipe.get("parallel", {}).get("pipeline")
    drawn_maps = machine_map.build_maps(samples, stages if isinstance(stages, int) else 1)
    last = r.machines.newest
    return {
        "x": _xs([step_places.place_event(sample.step, sample.time) for sample in samples]), "looks": len(samples),
        "maps": [{**drawn_map, "values": encode_array(drawn_map["values"])} for drawn_map in drawn_maps],
        "hosts": machine_map.list_hosts(last), "time": None if last is None else last.time,
    }  # fmt: skip


def build_journal(r: RunReader, query: str = "", group: str = "", most: int = LINES) -> dict[str, Any]:
    """The newest events, or those that were searched for."""
    history = r.history
    found_lines, line_count = select_lines(history.lines, query, group, most)
    return {
        "lines": [build_line(journal_line) for journal_line in found_lines], "count": line_count,
        "passed": history.passed_over, "all": len(history.lines),
    }  # fmt: skip


def select_lines(
    lines: Iterable[JournalLine], query: str = "", group: str = "", most: int = LINES
) -> tuple[list[JournalLine], int]:
    """The newest `most` lines of a group ("" = all) that have all words of `query`, newest first, and the number of all
    of them."""
    words, found_lines, line_count = query.lower().split(), list[JournalLine](), 0
    for entry in reversed(list(lines)):
        if group and find_group(entry.name) != group:
            continue
        line_text = f"{entry.text} {entry.name} step {entry.step}".lower() if words else ""
        if not all(search_word in line_text for search_word in words):
            continue
        line_count += 1
        if len(found_lines) < most:
            found_lines.append(entry)
    return found_lines, line_count


@lru_cache(maxsize=1000)
def find_group(name: str) -> str:
    """The group of an event, by its name."""
    return next((group for name_prefix, group in PREFIXES.items() if name.startswith(name_prefix)), "other")


def build_line(entry: JournalLine) -> dict[str, Any]:
    """A line of the journal."""
    return {
        "time": entry.time, "step": entry.step, "name": make_visible(entry.name, 60), "group": find_group(entry.name),
        "text": entry.text, "incident": entry.incident,
    }  # fmt: skip


def describe_trends(r: RunReader) -> list[str]:
    """Warnings of slow signals that are not over."""
    return [event.format_sentence() for event in r.history.trends.values()]


def usable_checkpoints(r: RunReader) -> page_headline.UsableCheckpoints:
    """What the journal and the disk say; whether their bytes are right is checked by the start that resumes."""
    newest_step: int | None = None
    for note in sorted(r.history.checkpoints.values(), key=lambda note: -note.step):
        if note.state in ("saved", "healthy") and note.name in r.committed:
            newest_step = note.step if newest_step is None else newest_step
            if note.state == "healthy":
                return page_headline.UsableCheckpoints(newest_step, note.step)
    return page_headline.UsableCheckpoints(newest_step, None)


def _checkpoint(r: RunReader, note: CheckpointHistory, places: PlacesOfSteps) -> dict[str, Any]:
    return {
        "name": make_visible(note.name, 80), "x": places.place_event(note.step, note.time), "step": note.step,
        "time": note.time, "bytes": note.bytes, "seconds": note.seconds, "blocked": note.blocked, "state": note.state,
        "why": note.why, "proved": note.proved, "there": note.name in r.committed,
    }  # fmt: skip


def _curve(looks: Sequence[Measurement], places: PlacesOfSteps) -> dict[str, Any]:
    """A loss that is measured now and then; of more than `LOOKS` looks the means of neighbours."""
    width = -(-len(looks) // LOOKS) or 1
    some = [looks[n : n + width] for n in range(0, len(looks), width)]
    return {
        "x": _xs([places.place_event(group[-1].step, group[-1].time) for group in some]),
        "loss": encode_array(np.array([np.mean([one.loss for one in group]) for group in some], np.float32)),
    }


def _curves(
    measured: Iterable[tuple[int, float | None, Mapping[str, float]]], places: PlacesOfSteps
) -> dict[str, Any]:
    """A curve for every name, over the steps that any of them was measured at. measured: step, time, values by name."""
    looks = sorted(measured, key=lambda look: look[0])
    curves = list[dict[str, str]]()
    for name in dict.fromkeys(name for _, _, values in looks for name in values):
        curve_values = np.array([values.get(name, np.nan) for _, _, values in looks], np.float32)
        curves.append({"name": make_visible(name, 80), "y": encode_array(curve_values)})
    return {"x": _xs([places.place_event(step, time) for step, time, _ in looks]), "values": curves}


def _xs(places: list[Place]) -> dict[str, str]:
    return {
        axis: encode_array(np.array([step_place[axis] for step_place in places], np.float64)) for axis in AXES
    }


log = logging.getLogger(__name__)
PAUSE = 0.3  # seconds between two looks
HEAVY = threading.Lock()  # for what takes much memory for a moment, of runs of millions of steps
EVENTS = 20_000  # in the list
STATUS = 1.0  # seconds between two looks at how the run stands


class RunReader:
    """A run, as far as it was read. Raises DataError if the directory holds no run.

    version: grows with everything new; read it before anything else. Methods may be called from any thread."""

    def __init__(self, root: Path) -> None:
        self.root, self.run = root, RunDirectory(root)
        self.name = make_visible(root.resolve().name, 80)
        self.records = RecordReader(self.run.steps)
        self.journal = HistoryReader(self.run.journal, EVENTS)
        self._time = GoodputWatch(root, self.journal)
        self._watch = RunWatch(root, journal=self.journal, goodput=self._time)
        self.layers = LayerMap(self.run.layers)
        self.machines = MachineMap(self.run.machines)
        self.data = DataMap(self.run)
        self.account: dict[str, Any] | None = None  # where the time went (account)
        self._accounted: tuple[float, int] | None = None
        self.version = 0
        self.failures: dict[str, str] = {}  # by part of the reader: what is wrong
        self._lock = threading.RLock()
        self._due = 0.0
        self._over = threading.Event()
        self.journal.look_again()
        self.status: Status = self._watch.read_status()
        self.look_again()

    def start_reading(self) -> None:
        """Go on reading, until `stop_reading`."""
        threading.Thread(target=self._follow, name=f"reads {self.name}", daemon=True).start()

    def stop_reading(self) -> None:
        self._over.set()

    def look_again(self, now: bool = False) -> None:
        """Read what is new. now: also what was looked at a moment ago and takes long."""
        has_news = self.records.look_again() | self.records.see_progress(read_object(self.run.progress))
        with self._lock:
            for reader_part in (self.journal, self.layers, self.machines, self.data):
                with self._failing(type(reader_part).__name__):
                    has_news |= reader_part.look_again()
        if now or time.monotonic() >= self._due:
            self._due = time.monotonic() + STATUS
            with HEAVY:
                committed_before = self.committed
                status_before, self.status = self.status, self._watch.read_status()
                is_alive = bool(self.status.supervisor.alive or self.status.trainer.alive)
                time_account = self._time.look_again(is_alive) if now else self._time.account_lately(is_alive)
                if time_account is not None and (time_account.end, len(time_account.at)) != self._accounted:
                    self.account = describe_account(time_account, self.began, self.history.starts)
                    self._accounted = (time_account.end, len(time_account.at))
                    has_news = True
                del time_account
            has_news |= status_before.state != self.status.state or status_before.step != self.status.step
            has_news |= committed_before != self.committed
        if has_news:
            self.version += 1

    def _follow(self) -> None:
        while not self._over.wait(PAUSE):
            with self._failing("RunReader"):
                self.look_again()
            if "RunReader" in self.failures:
                self._over.wait(5.0)

    @contextmanager
    def _failing(self, part: str) -> Iterator[None]:
        """A page must not end, nor lack its other parts, because of one file that nobody foresaw."""
        try:
            yield
        except Exception as error:
            reason = f"{part} cannot read the run ({type(error).__name__}: {error})"
            failure_text = f"a part of this page is not up to date: {reason}"
            if failure_text != self.failures.get(part):
                log.exception("%s", self.root)
                self.failures[part] = failure_text
                self.version += 1
        else:
            if self.failures.pop(part, None):
                self.version += 1

    # What the page asks for

    @property
    def recipe(self) -> dict[str, Any]:
        """The sections of the frozen one."""
        return self._watch.sections

    @property
    def committed(self) -> set[str]:
        """Names of the checkpoints that are there."""
        return self._watch.committed

    @property
    def history(self) -> RunHistory:
        """What the journal says."""
        return self.journal.history

    @property
    def length(self) -> int:
        """Tokens of a sample."""
        sequence_length = self.recipe.get("model", {}).get("sequence_length")
        return sequence_length if isinstance(sequence_length, int) and sequence_length > 0 else 1

    @property
    def began(self) -> float:
        """Unix seconds."""
        if (began_time := self.history.began) is not None:
            return began_time
        with self.records.hold_table() as step_table:
            return float(step_table.steps["time"][0]) if len(step_table.steps) else 0.0

    def describe_run(self) -> str:
        """How the run stood at the last look, in a line that is there at once."""
        s = self.status
        return f"{self.name}: {s.state.value}, step {s.step:,}" + (f" of {s.steps:,}" if s.steps else "")

    def read_head(self) -> dict[str, Any]:
        """The headline, and what else changes with every step."""
        with self._lock:
            return build_head(self)

    def read_panel(self) -> dict[str, Any]:
        """All but the plots: incidents, checkpoints, time, data, machines."""
        with self._lock:
            return build_panel(self)

    def read_plots(self, axis: str, begin: float | None, end: float | None, columns: int) -> dict[str, Any]:
        began_time = self.began
        with HEAVY, self.records.hold_table() as step_table:
            return plot_data.plot_data(step_table, self.length, began_time, axis, begin, end, columns)

    def read_heat(self, axis: str, begin: float | None, end: float | None) -> dict[str, Any]:
        """Heat maps of the layers."""
        with self._lock:
            return build_heat(self, axis, begin, end)

    def machine_maps(self, axis: str, begin: float | None, end: float | None) -> dict[str, Any]:
        """Ranks, GPUs and hosts."""
        with self._lock:
            return machine_maps(self, axis, begin, end)


def told_apart(readers: Sequence[RunReader]) -> Sequence[RunReader]:
    """The same; runs whose directories have the same name are also called by the one above."""
    name_counts = Counter(run_reader.name for run_reader in readers)
    for run_reader in readers:
        if name_counts[run_reader.name] > 1:
            run_reader.name = make_visible("/".join(run_reader.root.resolve().parts[-2:]), 80)
    return readers
