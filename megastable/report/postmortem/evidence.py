"""Gathers the facts of an incident (facts.py) from the run directory alone.

A report must not fail: unreadable files are named, and the rest is gathered all the same.
"""

from __future__ import annotations

import hashlib
import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import pyarrow as pa
from pydantic import BaseModel, ValidationError

from megastable.base.errors import ConfigError, DataError
from megastable.base.text import make_visible
from megastable.config.recipe import find_recipe, load_recipe
from megastable.config.tree import RunConfig
from megastable.data.blends import read_blends
from megastable.data.order import LAST_POSITION
from megastable.data.plant import read_planted
from megastable.data.skip_ledger import Ledger
from megastable.data.skips import Skips
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
    TrackerLink,
    build_timeline,
    collect_logs,
    find_trackers,
)
from megastable.report.postmortem.journal import Journal, named_when, summary_of
from megastable.report.postmortem.sample_texts import SHOWN, PublicView, SampleSource, SampleText, Tokens
from megastable.report.postmortem.trial_facts import TrialFacts, find_trials
from megastable.run.directory import RunDirectory
from megastable.run.events.stability_events import Handover
from megastable.run.events.supervisor_events import Ended, Hang, Launched, SupervisorEvent
from megastable.run.events.training_events import CheckpointRejected, Training
from megastable.run.record_files import RecordFile, list_files, read_files
from megastable.run.records import LAYER_SCHEMA, SCHEMA
from megastable_guard.robust import fit_trend


class RecordFolder:
    """The record files of a folder, which a run may be writing."""

    def __init__(self, path: Path, kind: pa.Schema) -> None:
        self.path, self.kind = path, kind

    def list_between(self, first: int, last: int) -> list[RecordFile]:
        """Files that may hold steps of [first, last], in the order of writing."""
        try:
            return _choose_between(list_files(self.path), first, last)
        except OSError:
            return []

    def read_rows(
        self, first: int, last: int, columns: Sequence[str]
    ) -> tuple[list[dict[str, Any]], list[str]]:
        """Records of the steps [first, last] as {column: value}, in the order of time; and the damaged files."""
        wanted_schema = pa.schema([self.kind.field(column_name) for column_name in columns])
        found_rows, file_problems = list[dict[str, Any]](), list[str]()
        try:
            read = read_files(self.path, wanted_schema, lambda files: _choose_between(files, first, last))
        except OSError as error:
            return [], [f"{self.path.name} cannot be read: {error.strerror}"]
        for file, table, *_ in read:
            if table is None:
                file_problems.append(f"{self.path.name}/{file.name} is damaged: its steps are missing here")
                continue
            step = table.column("step").to_numpy()
            found_rows += table.take(np.flatnonzero((first <= step) & (step <= last))).to_pylist()
        return sorted(found_rows, key=lambda row: row["time"]), file_problems


def _choose_between(files: list[RecordFile], first: int, last: int) -> list[RecordFile]:
    return [record_file for record_file in files if record_file.low <= last and record_file.high >= first]


def split_passes(steps: Sequence[StepRow]) -> list[list[StepRow]]:
    """`steps`, in the order of their times, split at each rewind: no part is empty. A run that rewinds repeats steps:
    the first pass shows what went wrong, the last how it went on."""
    run_passes: list[list[StepRow]] = []
    for step_row in steps:
        if not run_passes or step_row.step <= run_passes[-1][-1].step:
            run_passes.append([])
        run_passes[-1].append(step_row)
    return run_passes


BEFORE, AFTER = 60, 40  # steps shown around an incident
LONG_BEFORE = 500  # steps before the onset whose trend what came later is compared with
FEWEST = 24  # of them that tell a trend
SAME = 0.02  # nats
LONGEST = 20_000  # most steps read of one
COLUMNS = (
    "step", "time", "first_position", "next_position", "applied", "finite", "loss", "grad_norm", "lr", "seconds",
    "expert_violation", "expert_idle", "router_entropy", "router_z",
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
        # Of a loop of somebody else, under the guard alone.
        self.is_guarded = self.journal.is_guarded and not self.directory.recipe.exists()
        try:
            if not self.is_guarded:
                self.config, self.recipe = (
                    load_recipe(self.directory.recipe),
                    self.directory.recipe.read_bytes(),
                )
        except (ConfigError, OSError) as error:
            self.problems.append(f"the recipe: {error}")
        try:
            self.ledger = Ledger.read_ledger(self.directory.skips)
        except DataError as error:
            self.problems.append(f"the skip ledger: {error}")
        self.steps = RecordFolder(self.directory.steps, SCHEMA)
        self.layers = RecordFolder(self.directory.layers, LAYER_SCHEMA)

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
        ledger_path = self.directory.skips
        return SampleSource(self.config, read_blends(self.directory.blends), self.ledger, ledger_path)


class Gatherer:
    """Gathers one incident."""

    def __init__(self, run: Run, number: int) -> None:
        self.run, self.config, self.journal = run, run.config, run.journal
        self.problems = list(run.problems)
        indexes = self.journal.own[number]
        # A damaged checkpoint is found before an incident can be opened.
        found = range(max(0, indexes[0] - NEAR), indexes[0])
        rejected_indexes = [n for n in found if isinstance(self.journal.events[n], CheckpointRejected)]
        is_damage = summary_of(self.journal.events[indexes[0]]).get("verdict") == "damaged_checkpoint"
        self.begin, self.end = min([indexes[0], *rejected_indexes]) if is_damage else indexes[0], indexes[-1]
        self.own = [self.journal.events[event_index] for event_index in indexes]
        self.incident = self._lenient(IncidentFacts, summary_of(self.own[-1]), "the incident")
        self.skipped = list(run.ledger.of_incident(number).entries)
        # A process that dies while an incident of the training is open has tried nothing.
        self.trials = [] if self.incident.breakdown else find_trials(self.journal, indexes)

    @property
    def inputs(self) -> str:
        """Digest of the inputs, cheap to take: of large files names and sizes only.

        Without the corpora: once they are gone, what was written about them is worth keeping.
        """
        input_paths = [
            self.run.layers.path / layer_file.name
            for layer_file in self.run.layers.list_between(*self._looks())
        ]
        input_paths += [self.run.directory.root / path for path in self.incident.evidence]
        file_sizes = [f"{input_path.name}:{_size(input_path)}" for input_path in input_paths]
        # Not the files of the steps, which are compacted.
        step_times = self.run.steps.read_rows(*self._window(), ("step", "time"))
        made = hashlib.sha256(self.run.recipe)
        for event in self.journal.events[self.journal.find_nearby(self.begin, self.end)]:
            made.update(repr(event.fields).encode())
        later = [event.fields for event in self.journal.later[self.incident.number]]
        run = self.run.problems, self.run.trackers
        made.update(repr((VERSION, self._outage, self.skipped, step_times, file_sizes, run, later)).encode())
        return made.hexdigest()

    def gather_evidence(self) -> Evidence:
        """All of it. Never raises, bugs aside."""
        i, run = self.incident, self.run
        rows = self._try("the step records", self._rows, list[StepRow]())
        suspects = self._suspects()
        losses = {s.position: s.loss for s in suspects if s.loss is not None}
        samples: list[SampleText] = []
        tokens: Tokens | None = None
        if i.shown and run.shows_texts and not run.is_guarded:
            samples = self._try("the texts", lambda: self._samples(losses), [])
        if i.bad and samples:
            tokens = self._try("the tokens", self._tokens, None)
        if samples and (problem := run.samples.open_library().problem):
            self.problems.append(problem)
        found, problems = collect_logs(run.directory.root, run.directory.logs.name, i.evidence)
        self.problems += problems
        facts = self._facts(rows)
        regions = self._regions()
        later_losses = self._try("what came later", self._later, list[LaterLoss]())
        trials = self._try("tokens of a trial", self._named_trials, self.trials)
        layers = self._try("the layers", lambda: self._layers(rows), None)
        # Messages name files, and quote what is in them.
        problem_texts = self.problems if run.public is None else map(run.public.text, self.problems)
        return Evidence(
            inputs=self.inputs, run=facts, incident=i, cost=self._cost(facts, rows), back_to=self._back_to(),
            healed_at=self._closed_at() if i.outcome == "healed" else None,
            later=later_losses, trackers=self.run.trackers,
            timeline=build_timeline(self.journal.events[self.journal.find_nearby(self.begin, self.end)], i.number),
            suspects=suspects, regions=regions, trials=trials, skipped=self.skipped,
            passes=split_passes(rows), layers=layers, samples=samples, tokens=tokens, logs=found,
            problems=list(dict.fromkeys(problem_texts)),
        )  # fmt: skip

    # From the corpora, in the order valid at the time of each position

    def _samples(self, losses: dict[int, float]) -> list[SampleText]:
        found = list[SampleText]()
        others = Skips.from_ranges(self.incident.shown).gaps()
        for event_time, skipped, deferred in named_when(self.own):
            named_ranges = Skips.from_ranges(skipped if self.incident.positions else deferred)
            if ranges := named_ranges.minus(others).ranges:
                found += self.run.samples.open_library(event_time).read_samples(ranges, losses)
        found = sorted(found, key=lambda sample: sample.position)[:SHOWN]
        return found if self.run.public is None else list(map(self.run.public.hide_names, found))

    def _named_trials(self) -> list[TrialFacts]:
        """With the texts of their tokens."""
        if not self.run.shows_texts or not any(trial.tokens for trial in self.trials):
            return self.trials
        decode_text = self.run.samples.open_library().decode_ids
        return [
            trial.model_copy(update={"texts": [decode_text([token]) for token in trial.tokens]})
            for trial in self.trials
        ]

    def _tokens(self) -> Tokens:
        # Skipped samples stay in place, whatever is deferred later.
        source = self.run.samples
        library = source.open_library(max(time for time, skipped, _ in named_when(self.own) if skipped))
        return library.compare_tokens(self.incident.bad, source.select_usable(library))

    def gather_cost(self) -> Cost:
        """The cost alone."""
        step_rows = self._try("the step records", self._rows, list[StepRow]())
        return self._cost(self._facts(step_rows), step_rows)

    # From the journal

    def _cost(self, run: RunFacts, rows: Sequence[StepRow]) -> Cost:
        """rows: the steps around the incident."""
        i, (silent, down) = self.incident, self._outage
        known_seconds = [step_row.seconds for step_row in rows if step_row.seconds]
        usual_seconds = statistics.median(known_seconds) if known_seconds else None
        redone_seconds, spent = i.steps_lost * (usual_seconds or 0.0), i.seconds
        if i.breakdown:  # the supervisor counts the same time, up to the end of the first step
            down, spent = max(down, spent), 0.0
        lost_tokens = None
        if run.global_batch is not None and run.sequence_length is not None:
            lost_tokens = i.steps_lost * run.global_batch * run.sequence_length
        gpu_hours = None if run.world is None else run.world * (redone_seconds + spent + down + silent) / 3600
        return Cost(
            steps=i.steps_lost, batches_refused=i.batches_discarded, tokens=lost_tokens, step_seconds=usual_seconds,
            redone_seconds=redone_seconds, recovery_seconds=spent, downtime_seconds=down, silent_seconds=silent,
            gpu_hours=gpu_hours, money=None if gpu_hours is None or run.price is None else gpu_hours * run.price,
        )  # fmt: skip

    @property
    def _outage(self) -> tuple[float, float]:
        """Seconds of the processes that the incident ended: from the last progress of each until its end was noticed,
        and from then to the first step, or the end, of the next."""
        end_kinds = (Ended, Hang) if self.incident.breakdown else (Handover,)
        silent_seconds, down, since, again = 0.0, 0.0, 0.0, False
        for event_index in self.journal.list_turns(self.begin):
            event = self.journal.events[event_index]
            again = again or isinstance(event, Launched)
            outage_over = isinstance(event, Training) or (again and isinstance(event, Ended))
            if since and (outage_over or (isinstance(event, SupervisorEvent) and event.what == "ended")):
                down, since = down + max(0.0, event["time"] - since), 0.0
            if event_index > self.end and not since:
                break
            # A supervisor says of an end that was none of failure that it was "".
            if isinstance(event, end_kinds) and not since and event.get("what") != "":
                quiet = event.get("waited" if isinstance(event, Hang) else "silent")
                silent_seconds += (
                    quiet if isinstance(quiet, int | float) and 0 < quiet < event["time"] else 0.0
                )
                since, again = event["time"], False
        return silent_seconds, down

    def _suspects(self) -> list[SuspectFacts]:
        told = [event["suspects"] for event in self.own if isinstance(event.get("suspects"), list)]
        given = [s for some in told for s in some if isinstance(s, dict) and type(s.get("position")) is int]
        found = [self._lenient(SuspectFacts, s, "a suspect") for s in given]
        return list({s.position: s for s in found}.values())

    def _regions(self) -> list[RegionFacts]:
        given = [event["region"] for event in self.own if isinstance(event.get("region"), dict)]
        bounded = [region for region in given if type(region.get("first")) is type(region.get("end")) is int]
        regions = [self._lenient(RegionFacts, region, "a region") for region in bounded]
        return [region for region in regions if 0 <= region.first < region.end <= LAST_POSITION]

    def _back_to(self) -> list[int]:
        step_keys = {"rewound": "to_step", "restarted": "step"}
        if self.incident.verdict == "damaged_checkpoint":
            step_keys["closed"] = "step"  # all in one event: a checkpoint used instead
        named_steps = [event.get(step_keys.get(str(event.get("what")), "")) for event in self.own]
        return [named_step for named_step in named_steps if type(named_step) is int]

    def _closed_at(self) -> int | None:
        """The last step before the incident was proven over or given up."""
        step = self.own[-1].get("step") if self.own[-1].get("what") == "closed" else None
        return step if type(step) is int and self.incident.verdict != "damaged_checkpoint" else None

    # From other files

    def _window(self) -> tuple[int, int]:
        """The steps shown."""
        i = self.incident
        tried = [t for t in self.trials if i.onset - LONGEST < t.snapshot < t.last < i.step + LONGEST]
        first_step = max(1, min([min(i.onset, i.step) - BEFORE, *(t.snapshot for t in tried)]))
        last_step = max([max(i.step, i.onset, self._closed_at() or 0) + AFTER, *(t.last for t in tried)])
        return first_step, min(last_step, first_step + LONGEST)

    def _later(self) -> list[LaterLoss]:
        """What the run did after the incident, against the trend from before."""
        onset, later_looks = self.incident.onset, self.journal.later[self.incident.number]
        looks = {e.step: e for e in later_looks if e.step and e.loss is not None and math.isfinite(e.loss)}
        if not looks:
            return []
        first_step, columns = max(1, onset - LONG_BEFORE), ("step", "time", "loss", "applied")
        step_rows, file_problems = self.run.steps.read_rows(first_step, onset - 1, columns)
        self.problems += file_problems
        accepted = [row for row in step_rows if row["applied"] and math.isfinite(row["loss"])]
        before = {row["step"]: row["loss"] for row in accepted}
        return [
            LaterLoss(step=look_step, after=e.after or 0, loss=e.loss or 0.0, at_end=bool(e.at_end),
                      **expect_loss(before, onset, look_step))
            for look_step, e in sorted(looks.items())
        ]  # fmt: skip

    def _looks(self) -> tuple[int, int]:
        """The steps around it with layer records."""
        every = self.config.logging.layers_interval if self.config else 0
        return self.incident.onset - every, max(self.incident.step, self._closed_at() or 0) + every

    def _rows(self) -> list[StepRow]:
        first, last_step = self._window()
        rows, file_problems = self.run.steps.read_rows(first, last_step, COLUMNS)
        self.problems += file_problems
        known_steps = {(row["step"], row["first_position"]) for row in rows}
        for step in range(first, last_step + 1):
            for event in self.journal.refused.get(step, ()):
                if (step, event.get("first_position")) not in known_steps:
                    rows.append({**event, "applied": False})
        step_rows: list[StepRow] = []
        for row in rows:
            with suppress(ValidationError):  # a malformed event
                step_rows.append(StepRow.model_validate(row))
        return sorted(step_rows, key=lambda row: row.time)

    def _layers(self, rows: Sequence[StepRow]) -> Layers | None:
        layer_columns = [field.name for field in LAYER_SCHEMA]
        layer_rows, file_problems = self.run.layers.read_rows(*self._looks(), layer_columns)
        self.problems += file_problems
        opened_time, undone_by = self.own[0]["time"], ("rewound", "restarted", "handed over", "closed")
        at_onset = [row.time for row in rows if row.step == self.incident.onset and row.time <= opened_time]
        onset_time = max(at_onset, default=opened_time)
        end_time = min((e["time"] for e in self.own if e.get("what") in undone_by), default=math.inf)
        closed_time = self.own[-1]["time"] if self.incident.outcome == "healed" else math.inf
        times = sorted({layer_row["time"] for layer_row in layer_rows})
        before_times = [time for time in times if time < onset_time][-1:]
        during_times = [time for time in times if onset_time <= time <= end_time][:1]
        after_times = [time for time in times if time > closed_time][:1]
        looks = [
            {layer_row["name"]: layer_row for layer_row in layer_rows if layer_row["time"] in look_times}
            for look_times in (before_times, during_times, after_times)
        ]
        if not any(looks):
            return None
        values = []
        for name in dict.fromkeys(name for look in looks for name in look):
            of = [look.get(name, {}) for look in looks]
            for key in dict.fromkeys(key for row in of for key in row if key not in NO_STATISTICS):
                before, during, after = (row.get(key) for row in of)
                if (before, during, after) != (None, None, None):
                    value = LayerValue(name=name, statistic=key, before=before, during=during, after=after)
                    values.append(value)
        before_step, during_step, after_step = (
            next((row["step"] for row in look.values()), None) for look in looks
        )
        return Layers(before_step=before_step, during_step=during_step, after_step=after_step, values=values)

    def _facts(self, rows: Sequence[StepRow]) -> RunFacts:
        c, root = self.config, self.run.directory.root
        name, world = root.resolve().name, self.journal.find_world(self.begin)
        if c is None:
            public, guarded = self.run.public is not None, self.run.is_guarded
            return RunFacts(name=name, directory=str(root), world=world, public=public, guarded=guarded)
        at_onset = [row.first_position for row in rows if row.step == self.incident.onset]
        known_onsets = [position for position in at_onset if position is not None]
        global_batch = c.batches.value_at(known_onsets[-1]) if known_onsets else c.train.global_batch
        return RunFacts(
            name=name, directory=str(root), world=world, steps=c.train.steps, global_batch=global_batch,
            sequence_length=c.model.sequence_length, lr=c.optimizer.lr,
            cut_factor=c.stability.policy.cut_factor, corpora=tuple(str(corpus.path) for corpus in c.data.corpora),
            planted=tuple(self._try("planted.json", self._planted, list[str]())), price=c.supervise.gpu_hour_price,
            currency=c.supervise.currency, public=self.run.public is not None,
        )  # fmt: skip

    def _planted(self) -> list[str]:
        """The planted faults, and how much of them this incident found."""
        planted_texts = []
        for corpus in self.config.data.corpora if self.config and self.incident.positions else []:
            planted = read_planted(find_recipe(corpus.path))
            if planted is None:
                continue
            found_exactly = self.incident.bad == planted.positions
            found_text = "; exactly these were found bad" if found_exactly else ""
            planted_texts.append(f"{corpus.path} was made bad on purpose: it has {planted}{found_text}")
        return planted_texts

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
        remaining_fields = dict(given)
        while True:
            try:
                return kind.model_validate(remaining_fields)
            except ValidationError as error:
                for field_name in {str(error_detail["loc"][0]) for error_detail in error.errors()}:
                    dropped_field = f"{what}: {field_name}={remaining_fields.pop(field_name, None)!r}"
                    self.problems.append(f"{make_visible(dropped_field, 200)} is not understood")


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
        fit_trend(chosen, [before[at] for at in chosen], step, floor=0.0, full=len(chosen))
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
