"""Reads how a run stands from its directory alone, without changing it; no process needs to run.

`read_status` reads once; `RunWatch` repeatedly, reading only what is new. The state follows from the locks of the
directory, the last events of the journal, and the age of progress.json.
"""

from __future__ import annotations

import math
import shlex
import shutil
import socket
import statistics
import time
from collections import deque
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import yaml
from pydantic import ValidationError

from megastable.base import errors
from megastable.base.durable import folder_stamp
from megastable.base.errors import DataError
from megastable.base.text import make_visible
from megastable.config.supervise import SuperviseConfig
from megastable.config.warmups import BatchWarmup, Stages, stage_batches
from megastable.run.directory import LOADER, RunDirectory, read_object
from megastable.run.events.event import NOTHING, read_later, read_real, read_whole
from megastable.run.goodput.watching import GoodputWatch
from megastable.run.record_files import read_last
from megastable.run.records import SCHEMA
from megastable.run.run_history import AttemptHistory, HistoryReader, IncidentHistory, RunHistory, TaskSummary
from megastable.run.step_phases import COLUMNS, OTHER
from megastable.supervise.hangs import tolerated_seconds
from megastable.supervise.locks import SUPERVISOR, TRAINING, is_held
from megastable.supervise.standing import Standing, State, advise_person, build_resume_command, judge_state

SHOWN = 5  # checkpoints
RECENT = 20  # of evaluations and attempts
# Of a recipe that is no YAML, or has other values than those of a recipe.
UNREADABLE = (OSError, yaml.YAMLError, ValueError, LookupError, TypeError, AttributeError, ArithmeticError)
UNITS = {
    "age": "age_seconds", "began": "began_unix_seconds", "eta": "eta_seconds", "free": "free_bytes",
    "last_progress": "last_progress_unix_seconds", "last_step": "last_step_unix_seconds",
    "left_out": "left_out_until_unix_seconds", "phases": "phase_seconds", "rate": "seconds_per_step", "size": "bytes",
    "time": "time_unix_seconds",
}  # fmt: skip


@dataclass(frozen=True)
class Process:
    """alive: whether it holds its lock; None = cannot be determined from here. pid and host: as last reported."""

    alive: bool | None
    pid: int | None = None
    host: str = ""


@dataclass(frozen=True)
class Checkpoint:
    """time: when it was complete, unix seconds. size: bytes, None if the journal does not say."""

    name: str
    step: int
    time: float
    size: int | None


@dataclass(frozen=True)
class Said:
    """An event as text, safe to show. time: unix seconds."""

    time: float
    event: str
    text: str


@dataclass(frozen=True)
class IncidentSummary:
    """One incident, now; see guard's incident. onset: the step that names it. kind: its class. put_off: deferred
    samples, in words. loss_*: nats per token."""

    number: int
    onset: int
    step: int
    verdict: str
    kind: str
    cause: str
    action: str
    outcome: str
    steps_lost: int
    batches_discarded: int
    put_off: str
    loss_before: float | None
    loss_peak: float | None
    failure: str


@dataclass(frozen=True)
class AttemptSummary:
    """One start of the training processes by a supervisor. how: see name_end; "" while it runs."""

    number: int
    began: float | None
    how: str = ""
    code: int | None = None
    signal: int | None = None
    step: int | None = None
    failure: str = ""


@dataclass(frozen=True)
class SlowSummary:
    """ratio: of a host's own work's time to the others'; cost: the share of a step that this is; text: a sentence."""

    ratio: float | None
    cost: float | None
    text: str


@dataclass(frozen=True)
class Status:
    """One look at a run. Losses in nats per token, times in seconds, `time` and the like in unix seconds.

    code: the exit code that the run ended with, None while it has not. command: that of the advice, with which it ends;
    "" if it has none. phase: of the training process. recent: (step,
    loss) of the last steps, oldest first; of refused ones, too. age: since the last sign of progress. rate: seconds per
    step, the median of the last ones; tokens_per_second: at that rate; phases: of a step, likewise. tokens: of the
    steps done; skipped: samples before the cursor that are in none of them; last_step: when the last one ended.
    readings: the newest of what is recorded (NEWEST). loss, grad_norm, lr: of the last step. probe: step
    and loss of the newest look at it. eta: of the rest at that rate. restarts: counted by how the previous attempt
    ended (run_history.name_end). starts: of training processes. stages: of the pipeline. task_interval: steps
    between two evaluations of tasks, None without any. hosts: of the newest attempt, that of rank 0 first; left_out:
    until when, by host, others are preferred to those that failed; slow: by host, those that are slow now. trends: slow
    signals that are warned of now. free: bytes that a user has left where checkpoints are written. alert: since when
    and why automatic remedies are paused, "" if they are not. guarded: a loop of somebody else trains, under the guard
    alone. goodput: where the time went (run/goodput), None if that
    is not known; `settled` of it: seconds by kind of what will not change any more.
    problems: what could not be read.
    """

    run: str
    name: str
    time: float
    state: State
    code: int | None
    reason: str
    advice: str
    command: str
    supervisor: Process
    trainer: Process
    phase: str
    step: int
    steps: int | None
    cursor: int | None
    skipped: int | None
    tokens: int | None
    last_step: float | None
    world: int | None
    stages: int
    loss: float | None
    grad_norm: float | None
    lr: float | None
    tokens_per_second: float | None
    phases: dict[str, float]
    readings: dict[str, float]
    applied: bool | None
    rate: float | None
    eta: float | None
    age: float | None
    last_progress: float | None
    began: float | None
    starts: int
    attempt: int | None
    attempts: tuple[AttemptSummary, ...]
    hosts: tuple[str, ...]
    left_out: dict[str, float]
    slow: dict[str, SlowSummary]
    restarts: dict[str, int]
    incidents: tuple[IncidentSummary, ...]
    refused: int
    guarded: bool
    alert: str
    trends: dict[str, str]
    goodput: Mapping[str, Any] | None
    checkpoints: tuple[Checkpoint, ...]
    free: int | None
    validation: tuple[tuple[int, float], ...]
    validation_by_corpus: dict[str, float]
    probe: tuple[int, float] | None
    tasks: TaskSummary
    task_interval: int | None
    recent: tuple[tuple[int, float], ...]
    tail: tuple[Said, ...]
    problems: tuple[str, ...]

    @property
    def steps_lost(self) -> int:
        return sum(i.steps_lost for i in self.incidents)


def exit_code(status: Status) -> int:
    """Exit code of `status RUN`: 0 while it runs unattended (also while it waits to restart) or is complete; 75 if it
    was stopped or never started, so that starting it is enough; else the code that the run ended with, 1 if its
    processes vanished without one, or if that cannot be determined. Bad input, 2, is raised by `read_status`."""
    if status.state in (State.STOPPED, State.NEW):
        return errors.STOPPED
    if status.state in (State.FAILED, State.INTERRUPTED, State.UNKNOWN):
        return status.code or errors.FAILED
    return errors.OK


def collect_facts(status: Status) -> dict[str, Any]:
    """For programs: keys name their units."""
    return {**_with_units(asdict(status)), "steps_lost": status.steps_lost}


def _with_units(value: Any) -> Any:
    if isinstance(value, dict):
        return {UNITS.get(key, key): _with_units(nested_value) for key, nested_value in value.items()}
    return [_with_units(nested_value) for nested_value in value] if isinstance(value, list | tuple) else value


def read_status(run: Path) -> Status:
    """The status of the run in a directory. Raises DataError if there is no run."""
    return RunWatch(run).read_status()


@dataclass
class _Recipe:
    """The parts of recipe.yaml that are needed."""

    stamp: tuple[int, int] | None = None
    steps: int | None = None
    batches: Stages | None = None
    sequence_length: int | None = None
    stages: int = 1
    task_interval: int | None = None
    limits: SuperviseConfig = field(default_factory=SuperviseConfig)


class RunWatch:
    """Watches one run. clock: unix seconds; journal, goodput: of the run, if somebody has them already; who has the
    journal looks at it. sections: of the frozen recipe; committed: names of the checkpoints that are there. Raises
    DataError if the directory holds no run."""

    def __init__(
        self,
        run: Path,
        clock: Callable[[], float] = time.time,
        journal: HistoryReader | None = None,
        goodput: GoodputWatch | None = None,
    ) -> None:
        self.run, self.clock = RunDirectory(run), clock
        require_run(run)
        self._looks, self._journal = journal is None, journal or HistoryReader(self.run.journal)
        self._recipe, self.sections = _Recipe(), dict[str, Any]()
        self.committed: set[str] = set()
        self._time = goodput or GoodputWatch(run, journal=self._journal)
        self._steps = RecentSteps(self.run.steps)

    def read_status(self) -> Status:
        now = self.clock()
        if self._looks:
            self._journal.look_again()
        problems = self._journal.problems
        self._read_recipe(problems)
        self._steps.read_records()
        s, progress = self._journal.history, read_object(self.run.progress)
        attempt = next(reversed(s.attempts), read_whole(progress.get("attempt")))
        # Files of an earlier attempt say nothing about the processes of this one.
        stale = bool(s.attempts) and read_whole(progress.get("attempt")) not in (attempt, None)
        supervisor = self._process(SUPERVISOR, s.supervisor.fields if s.supervisor else NOTHING)
        trainer = self._process(TRAINING, {} if stale else progress)
        phase = "" if stale else make_visible(progress.get("phase") or "", 20)
        step, steps = self._step(progress), self._recipe.steps or read_whole(progress.get("steps"))
        loss, seconds = read_real(progress.get("loss")), _finite(progress.get("seconds"))
        measured = read_whole(progress.get("measured_step"))
        self._steps.add_step(step if measured is None else measured, loss, seconds)
        last, rate = self._last_progress(progress), self._steps.median_step_seconds()
        age = max(0.0, now - last) if last is not None else None  # clocks may jump
        slowest = max((x for x in (rate, seconds) if x is not None), default=None)
        limits = self._recipe.limits
        if not s.over and age is not None and age <= tolerated_seconds(phase, slowest, limits):
            supervisor, trainer = _believed(supervisor, trainer)
        stands = judge_state(s, supervisor.alive, trainer.alive, phase, age, slowest, limits)
        unreadable = self._journal.problem if stands.state is State.NEW else ""
        if unreadable:
            stands = Standing(State.UNKNOWN, reason=make_visible(unreadable, 300))
        if stands.state is State.NEW and self._complete():
            why = "its journal is gone: summary.json says that it is complete"
            stands = Standing(State.FINISHED, errors.OK, why)
        elif stands.state is State.STARTING and s.word == "supervisor" and self._complete():
            why = "the supervisor waits for the evaluation of the last checkpoint (eval.command)"
            stands = Standing(State.FINISHED, errors.OK, why)
        goes_on = stands.state in (State.RUNNING, State.HUNG) and steps is not None and rate is not None
        recent, applied = self._steps.losses_until(step), progress.get("applied")
        advised = (
            f"make {make_visible(self.run.journal)} readable, or ask as the user to whom the run belongs"
            if unreadable
            else advise_person(stands, self.run, s, supervisor.alive)
        )
        again = make_visible(shlex.join(build_resume_command(self.run, s)))
        return Status(
            run=make_visible(self.run.root),
            name=make_visible(self.run.root.resolve().name, 60),
            time=now,
            state=stands.state,
            code=stands.code,
            reason=stands.reason,
            advice=advised,
            command=again if advised.endswith(again) else "",
            supervisor=supervisor,
            trainer=trainer,
            phase=phase,
            step=step,
            steps=steps,
            cursor=read_whole(progress.get("cursor")),
            skipped=self._skipped(progress),
            tokens=read_whole(progress.get("tokens")),
            last_step=_finite(progress.get("stepped")) or self._steps.newest.get("time"),
            world=read_whole(progress.get("world")) or (s.starts[-1].ranks if s.starts else None),
            stages=self._recipe.stages,
            loss=loss if loss is not None else recent[-1][1] if recent else None,
            grad_norm=read_real(progress.get("grad_norm")),
            lr=read_real(progress.get("lr")),
            tokens_per_second=self._speed(progress, rate),
            phases=dict(self._steps.phases),
            readings=dict(self._steps.newest),
            applied=applied if isinstance(applied, bool) else None,
            rate=rate,
            eta=self._left(step, steps or 0, read_whole(progress.get("cursor"))) * (rate or 0.0)
            if goes_on
            else None,
            age=age,
            last_progress=last,
            began=s.began,
            starts=len(s.starts),
            attempt=attempt,
            attempts=tuple(map(_summarize_attempt, list(s.attempts.values())[-RECENT:])),
            hosts=tuple(make_visible(host, 80) for host in s.hosts),
            slow={
                make_visible(h, 80): SlowSummary(e.ratio, e.cost, e.format_sentence())
                for h, e in s.slow.items()
            },
            left_out=_find_left_out(s, now),
            restarts=dict(s.restarts),
            incidents=tuple(_summarize_incident(case) for _, case in sorted(s.incidents.items())),
            refused=s.refused,
            guarded=s.is_guarded and not self.sections,
            alert=_describe_alert(s),
            trends={
                make_visible(k, 40): make_visible(event.text or "", 300) for k, event in s.trends.items()
            },
            goodput=self._goodput(bool(supervisor.alive or trainer.alive), now),
            checkpoints=self._checkpoints(),
            free=_free(self.run.checkpoints),
            validation=tuple((one.step, one.loss) for one in s.evaluations[-RECENT:]),
            validation_by_corpus={
                make_visible(name, 80): loss
                for one in s.evaluations[-1:]
                for name, loss in one.values.items()
            },
            probe=(s.probes[-1].step, s.probes[-1].loss) if s.probes else None,
            tasks=s.tasks.summarize_tasks(),
            task_interval=self._recipe.task_interval,
            recent=recent,
            tail=tuple(Said(event.time or 0.0, event.event, event.format_line()) for event in s.tail),
            problems=tuple(make_visible(problem) for problem in problems),
        )

    # Reading

    def _read_recipe(self, problems: list[str]) -> None:
        try:
            recipe_stat = self.run.recipe.stat()
            recipe_stamp = (recipe_stat.st_size, recipe_stat.st_mtime_ns)
            if recipe_stamp == self._recipe.stamp:
                return
            config = yaml.load(self.run.recipe.read_text(encoding="utf-8"), LOADER)["config"]
            self.sections = {key: section for key, section in config.items() if isinstance(section, dict)}
            supervise_limits = SuperviseConfig.model_validate(config.get("supervise") or {})
            train_section, sequence_length = config["train"], int(config["model"]["sequence_length"])
            warmup_section = train_section.get("batch_warmup")
            batch_warmup = None if warmup_section is None else BatchWarmup.model_validate(warmup_section)
            batch_sizes = stage_batches(int(train_section["global_batch"]), batch_warmup, sequence_length)
            if min(batch_sizes.values) < 1:
                raise ValueError(f"train.global_batch={train_section['global_batch']} is not a batch")
            pipeline_stages = read_whole((config.get("parallel") or {}).get("pipeline")) or 1
            eval_section = config.get("eval") or {}
            eval_interval = read_whole(eval_section.get("interval")) if eval_section.get("command") else None
            self._recipe = _Recipe(
                recipe_stamp, read_whole(train_section["steps"]), batch_sizes, sequence_length, pipeline_stages,
                eval_interval, supervise_limits,
            )  # fmt: skip
        except FileNotFoundError:
            return
        except UNREADABLE as error:
            broken_part = "its supervise part" if isinstance(error, ValidationError) else "it"
            problems.append(f"{self.run.recipe}: {broken_part} cannot be read: {str(error).splitlines()[0]}")

    def _process(self, lock: str, told: Mapping[str, Any]) -> Process:
        host = make_visible(told.get("host") or "", 80)
        return Process(is_held(self.run.root / lock), read_whole(told.get("pid")), host)

    def _goodput(self, alive: bool, now: float) -> dict[str, Any] | None:
        account = self._time.account_lately(alive, now)
        return None if account is None else {**account.list_facts(), "settled": account.settled_seconds()}

    def _checkpoints(self) -> tuple[Checkpoint, ...]:
        """The newest committed ones, newest first."""
        found = []
        for path in self.run.checkpoints.glob("step-*"):
            number = path.name.removeprefix("step-")
            if number.isdecimal():
                try:
                    written = (path / "manifest.json").stat().st_mtime
                except OSError:
                    continue
                known = self._journal.history.checkpoints.get(path.name)
                found.append(Checkpoint(path.name, int(number), written, known.bytes if known else None))
        self.committed = {checkpoint.name for checkpoint in found}
        return tuple(sorted(found, key=lambda c: -c.step)[:SHOWN])

    # Derived values

    def _step(self, progress: dict[str, Any]) -> int:
        step = read_whole(progress.get("step"))
        if step is None:
            step, word = self._journal.history.step, self._journal.history.word
            if step is None or word in ("training", "resumed", "launched"):
                return max(step or 0, self._steps.last)
        return step

    def _complete(self) -> bool:
        """Whether all steps are done: summary.json exists (continuing a run removes it)."""
        done_steps, wanted_steps = read_whole(read_object(self.run.summary).get("steps")), self._recipe.steps
        return done_steps is not None and (wanted_steps is None or done_steps >= wanted_steps)

    def _last_progress(self, progress: dict[str, Any]) -> float | None:
        """Time of the newest progress. The writer's clock may differ from ours; the file's time is the server's."""
        sign_times = [_finite(progress.get("time")), _finite(self._journal.history.last)]
        with suppress(OSError):
            sign_times.append(self.run.progress.stat().st_mtime)
        return max((sign_time for sign_time in sign_times if sign_time is not None), default=None)

    def _speed(self, progress: dict[str, Any], rate: float | None) -> float | None:
        """Tokens per second at the median rate: the last step may have been slower or faster."""
        step_seconds = _finite(progress.get("seconds")) or 0.0
        step_tokens = (_finite(progress.get("tokens_per_second")) or 0.0) * step_seconds
        batch_sizes, cursor = self._recipe.batches, read_whole(progress.get("cursor"))
        if batch_sizes is not None and (cursor is not None or len(batch_sizes.values) == 1):
            step_tokens = batch_sizes.value_at(cursor or 0) * (self._recipe.sequence_length or 0)
        return step_tokens / rate if step_tokens and rate else None

    def _skipped(self, progress: dict[str, Any]) -> int | None:
        cursor, tokens = read_whole(progress.get("cursor")), read_whole(progress.get("tokens"))
        length = self._recipe.sequence_length
        return None if cursor is None or tokens is None or not length else max(0, cursor - tokens // length)

    def _left(self, step: int, steps: int, cursor: int | None) -> float:
        """The steps after `step`, counted in steps of the batch at the cursor: later ones may be larger."""
        steps_left, batch_sizes = max(0, steps - step), self._recipe.batches
        if batch_sizes is None or cursor is None:
            return steps_left
        return (batch_sizes.reach_after(cursor, steps_left) - cursor) / batch_sizes.value_at(cursor)


def require_run(run: Path) -> None:
    """Raises DataError if a directory is not that of a run."""
    run_files = ("recipe.yaml", "journal.jsonl", "progress.json", SUPERVISOR, TRAINING)
    if not run.is_dir():
        raise DataError(f"{run}: no such directory: give the directory of a run, such as runs/quickstart")
    try:
        if any((run / file_name).exists() for file_name in run_files):
            return
        run_names = sorted(path.name for path in run.iterdir() if (path / "journal.jsonl").exists())
    except OSError as error:
        raise DataError(f"{run} cannot be read: {error.strerror}") from None
    hint = (
        f"those below it are: {', '.join(run_names[:10])}"
        if run_names
        else "give one, such as runs/quickstart"
    )
    raise DataError(f"{make_visible(run)} is not the directory of a run: {make_visible(hint)}")


def _believed(*processes: Process) -> tuple[Process, ...]:
    """A lock of another host that looks free may not be shared between hosts: unknown while there is progress, unless a
    lock held there is seen."""
    elsewhere = [process for process in processes if process.host not in ("", socket.gethostname())]
    if any(process.alive for process in elsewhere):
        return processes
    return tuple(
        replace(process, alive=None) if process in elsewhere and process.alive is False else process
        for process in processes
    )


def _summarize_attempt(known: AttemptHistory) -> AttemptSummary:
    if (end := known.end) is None:
        return AttemptSummary(known.number, known.began)
    failure = make_visible(end.get("failure") or "", 300)
    return AttemptSummary(known.number, known.began, known.how, end.code, end.signal, end.step, failure)


def _summarize_incident(known: IncidentHistory) -> IncidentSummary:
    summary = known.summary
    actions = summary.get("actions")
    return IncidentSummary(
        number=known.number,
        onset=read_whole(summary.get("onset", summary.get("step"))) or 0,
        step=read_whole(summary.get("step")) or 0,
        verdict=make_visible(summary.get("verdict", "?"), 40),
        kind=make_visible(summary.get("kind", "?"), 40),
        cause=make_visible(summary.get("cause", "?"), 40),
        action=make_visible(actions[-1], 40) if isinstance(actions, list) and actions else "",
        outcome=make_visible(summary.get("outcome", "?"), 40),
        steps_lost=read_whole(summary.get("steps_lost")) or 0,
        batches_discarded=read_whole(summary.get("batches_discarded")) or 0,
        put_off=read_later(summary),
        loss_before=read_real(summary.get("loss_before")),
        loss_peak=read_real(summary.get("loss_peak")),
        failure=make_visible(summary.get("failure") or "", 300),
    )


def _find_left_out(history: RunHistory, now: float) -> dict[str, float]:
    """Until when, by host, others are preferred to those that failed."""
    until_by_host = {
        make_visible(host, 80): event.until + (event.burn_in or 0.0)
        for host, event in history.left_out.items() if event.until is not None and host not in history.proven
    }  # fmt: skip
    return {host: until_time for host, until_time in until_by_host.items() if until_time > now}


def _describe_alert(history: RunHistory) -> str:
    if history.alert is None:
        return ""
    step, reason = read_whole(history.alert.get("step")), make_visible(history.alert.get("reason") or "", 500)
    return f"since step {step:,}: {reason}" if step is not None else reason


def _free(folder: Path) -> int | None:
    try:
        return shutil.disk_usage(folder).free
    except OSError:
        return None


def _finite(value: object) -> float | None:
    number = read_real(value)
    return number if number is not None and math.isfinite(number) else None


KEPT = 240  # steps
ROWS = 300  # rows that are read: steps done again are among them
TIMED = 50  # steps whose median is the rate
ENOUGH = 5  # observed steps needed for a rate
NEWEST = (
    "time", "grad_norm", "mfu_full", "mfu_causal", "memory", "loss_scale", "clipped_fraction", "update_ratio",
    "attention_logit", "attention_entropy", "fp8_saturation", "expert_violation", "expert_idle",
    "router_entropy",
)  # fmt: skip
READ = pa.schema([SCHEMA.field(name) for name in ("step", "loss", "seconds", *NEWEST, *COLUMNS.values())])


class RecentSteps:
    """folder: of the step records. newest: the last known value of each of NEWEST; phases: seconds of a step by phase,
    the median of the last ones."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.newest: dict[str, float] = {}
        self.phases: dict[str, float] = {}
        self._records: list[tuple[int, float, float]] = []  # step, loss, seconds
        self._changed: int | None = None  # when the folder was (folder_stamp.py)
        self._seen: deque[tuple[int, float, float]] = deque(maxlen=KEPT)

    def read_records(self) -> None:
        """Read the newest records, if there may be new ones."""
        try:
            changed_stamp = folder_stamp(self.folder)
            if changed_stamp is not None and changed_stamp == self._changed:
                return
            # Of damaged files nothing: a gap in the plot is better than none.
            step_table = read_last(self.folder, READ, ROWS)
        except OSError:
            return
        self._changed = changed_stamp
        row_dicts = step_table.slice(max(0, len(step_table) - ROWS)).to_pylist()
        for dict_row in row_dicts:
            self.newest |= {name: dict_row[name] for name in NEWEST if dict_row[name] is not None}
        steps_by_number = {
            dict_row["step"]: (dict_row["step"], dict_row["loss"], dict_row["seconds"])
            for dict_row in row_dicts
        }
        self._records = [steps_by_number[step] for step in sorted(steps_by_number)][-KEPT:]
        timed_rows = [dict_row for dict_row in row_dicts if dict_row[COLUMNS[OTHER]] is not None][-TIMED:]
        self.phases = {
            phase: statistics.median(timed_row[phase_column] or 0.0 for timed_row in timed_rows)
            for phase, phase_column in COLUMNS.items()
            if timed_rows
        }

    def add_step(self, step: int, loss: float | None, seconds: float | None) -> None:
        """Add the current step. After a rewind, all that was seen is outdated."""
        if self._seen and step < self._seen[-1][0]:
            self._seen.clear()
        if loss is not None and seconds is not None and (not self._seen or self._seen[-1][0] != step):
            self._seen.append((step, loss, seconds))

    @property
    def last(self) -> int:
        """The last recorded step; 0 if none."""
        return self._records[-1][0] if self._records else 0

    def median_step_seconds(self) -> float | None:
        """Seconds per step, of observed steps, if there are enough: the records may be of another number of ranks."""
        steps = list(self._seen) if len(self._seen) >= ENOUGH or not self._records else self._records
        return statistics.median(seconds for _, _, seconds in steps[-TIMED:]) if steps else None

    def losses_until(self, step: int) -> tuple[tuple[int, float], ...]:
        """(step, loss) up to the current step, oldest first: later ones were undone."""
        rows = {at: loss for at, loss, _ in [*self._records, *self._seen] if at <= step}
        return tuple((at, rows[at]) for at in sorted(rows))[-KEPT:]
