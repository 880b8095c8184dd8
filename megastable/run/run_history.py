"""The one fold of a run's journal: what its events say of the run, as status, metrics, run page, record and supervisor
show or use it. Pure, fed one event at a time.

`RunHistory` holds facts as the journal has them: names of hosts and texts are made safe to show by who shows them.
`HistoryReader` follows a journal that grows.
"""

from __future__ import annotations

import re
from collections import Counter, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import isfinite
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

from megastable.base.errors import HANDOVER, NO_SPACE, STOPPED, UNSTABLE
from megastable.base.text import make_visible
from megastable.run.events.event import Event, Other, read_tree, read_whole
from megastable.run.events.people_events import ChangeMade
from megastable.run.events.reading import Follower, PassedOver
from megastable.run.events.stability_events import (
    AlertEvent,
    Discarded,
    Handover,
    HostFaulty,
    IncidentEvent,
    Probed,
    RateCut,
    RateLifted,
    RateWarmup,
    TrendEvent,
)
from megastable.run.events.supervisor_events import (
    Ended,
    HostLeftOut,
    HostProven,
    HostsAwaited,
    HostSlow,
    Launched,
    Restart,
    SupervisorEvent,
)
from megastable.run.events.training_events import (
    NEXT_UPDATE,
    CheckpointHealthy,
    CheckpointRejected,
    CheckpointSaved,
    CheckpointSuspect,
    Evaluated,
    Finished,
    RolledBack,
    Stopped,
    TasksEvaluated,
    TasksFailed,
    TasksSkipped,
    Training,
    Unstable,
    Warned,
)

OUTCOMES = ("evaluated", "failed", "skipped")
TOGETHER = 3  # evaluations in a median
KEPT = 20  # distances between two evaluations in a row
ENOUGH = 4  # of them, for a standard deviation
NORMAL = 0.954  # median distance of two evaluations, in standard deviations of one
# By the name of the metric, less is better; of all others, more.
LESS_IS_BETTER = re.compile(
    r"(?:.*[/_])?(?:perplexity|ppl|bits_per_byte|loss|nll|brier_score|error|ter|wer|cer|mse|mae|rmse|ece)(?:,.*)?",
    re.IGNORECASE,
)


@dataclass(frozen=True)
class ScoreDrop:
    """How much worse a score is than at its best. ratio: as a share of the best; sigmas: in standard deviations of one
    evaluation, infinite where it was always the same."""

    ratio: float
    sigmas: float


@dataclass(frozen=True)
class TaskSummary:
    """step: of the last evaluation, scores: its numbers by name, drops: of those with enough evaluations. settled:
    newest step whose checkpoint was evaluated, has failed or was passed over; failures: since the last success; counts:
    of checkpoints by outcome."""

    step: int
    scores: dict[str, float]
    drops: dict[str, ScoreDrop]
    settled: int
    failures: int
    counts: dict[str, int]


@dataclass
class _OneTask:
    last: deque[float] = field(default_factory=lambda: deque(maxlen=TOGETHER))
    distances: deque[float] = field(default_factory=lambda: deque(maxlen=KEPT))
    best: float | None = None

    def add(self, score: float, less: bool) -> None:
        if self.last:
            self.distances.append(abs(score - self.last[-1]))
        self.last.append(score)
        if len(self.last) == TOGETHER:
            median_now = median(self.last)
            better_of = min if less else max
            self.best = median_now if self.best is None else better_of(self.best, median_now)

    def drop(self) -> ScoreDrop | None:
        if not self.best or len(self.distances) < ENOUGH:
            return None
        fallen = abs(self.best - median(self.last))
        score_sigma = median(self.distances) / NORMAL
        return ScoreDrop(
            fallen / abs(self.best), fallen / score_sigma if score_sigma else float("inf") if fallen else 0.0
        )


@dataclass
class TaskHistory:
    """The evaluations of tasks: which there were, and which scores have fallen below their best.

    A score of few questions is noisy, and the best of many noisy scores is a lucky one. So the median of the last three
    evaluations is compared with the best such median, and the difference is also told in standard deviations of a
    single evaluation: the median distance of two evaluations in a row, over 0.954 (of two normal variables with equal
    mean).
    """

    _step: int = 0
    _settled: int = 0
    _failures: int = 0
    _scores: dict[str, float] = field(default_factory=dict)
    _tasks: dict[str, _OneTask] = field(default_factory=dict)
    _counts: Counter[str] = field(default_factory=lambda: Counter(dict.fromkeys(OUTCOMES, 0)))

    def add_event(self, event: TasksEvaluated | TasksFailed | TasksSkipped) -> None:
        """Take in one event; missing or malformed fields are ignored."""
        step = event.of_step or 0
        self._settled = max(self._settled, step)
        match event:
            case TasksEvaluated():
                self._counts["evaluated"] += 1
                self._step, self._failures = step, 0
                self._scores = {
                    make_visible(number_name, 120): value for number_name, value in event.numbers.items()
                }
                for score_name, score in self._scores.items():
                    one = self._tasks.setdefault(score_name, _OneTask())
                    if isfinite(score):
                        one.add(score, LESS_IS_BETTER.fullmatch(score_name) is not None)
            case TasksFailed():
                self._counts["failed"] += 1
                self._failures += 1
            case TasksSkipped():
                self._counts["skipped"] += 1

    def summarize_tasks(self) -> TaskSummary:
        """What is known now."""
        score_drops = {
            score_name: drop
            for score_name in self._scores
            if (drop := self._tasks[score_name].drop()) is not None
        }
        counts = dict(self._counts)
        return TaskSummary(self._step, dict(self._scores), score_drops, self._settled, self._failures, counts)


TAIL = 30  # newest events
INCIDENT_LINES = 60  # of each incident, the newest
FAR = 1e11  # unix seconds, which no clock tells
AT_WORK = ("training", "resumed", "launched")  # a process was at work at these
NO_SIGN = (
    "supervisor", "hook_failed", "hang", "ended", "restart", "hosts_awaited", "host_slow", "tasks_evaluated",
    "tasks_failed", "tasks_skipped",
)  # of a training process  # fmt: skip
GOODBYES = ("stopped", "finished", "unstable", "handover")  # last events of a training process
WORDS = (*AT_WORK, *GOODBYES, "ended", "hang", "restart", "hosts_awaited", "rolled_back")
ENDED_AS = ("hang", "killed", "crash", "handover", "unstable", "no_space", "stopped", "done", "unknown")


class JournalLine(NamedTuple):
    """An event in words. time: unix seconds, 0 if it has none."""

    time: float
    step: int | None
    name: str
    text: str
    incident: int | None


@dataclass(slots=True)
class Measurement:
    """Of the weights after `step`. loss: nats per token; values: by name. undone: the run went back to before it."""

    step: int
    time: float
    loss: float
    values: Mapping[str, float] = field(default_factory=dict)
    undone: bool = False


@dataclass(frozen=True)
class StartFacts:
    """A start of the training processes. time: unix seconds. attempt, hosts: of the launch before it."""

    time: float
    attempt: int | None
    step: int
    ranks: int | None
    hosts: list[str]
    software: dict[str, str]


@dataclass
class AttemptHistory:
    """One start of the training processes by a supervisor, on so many hosts. began: None if nobody journaled it. end:
    None if it runs, or if nobody journaled it: then the next one was launched."""

    number: int
    began: float | None
    hosts: int
    end: Ended | None = None

    @property
    def how(self) -> str:
        """Why it ended: one of ENDED_AS, for counting; "" while it runs."""
        return "" if self.end is None else name_end(self.end)


@dataclass
class IncidentHistory:
    """An incident: its latest summary, and what was said of it when. opened, closed: unix seconds; back_to: the step
    that the run went back to."""

    number: int
    opened: float
    closed: float | None = None
    summary: dict[str, Any] = field(default_factory=dict)
    back_to: int | None = None
    lines: deque[JournalLine] = field(default_factory=lambda: deque(maxlen=INCIDENT_LINES))


@dataclass
class CheckpointHistory:
    """What the journal says of a checkpoint. state: saved, healthy, suspect or rejected; why: of the last two; proved:
    the step that proved it healthy."""

    name: str
    step: int
    time: float
    bytes: int | None
    seconds: float | None
    blocked: float | None
    state: str = "saved"
    why: str = ""
    proved: int | None = None


@dataclass(frozen=True)
class FailedAttempt:
    """The end of an attempt by a failure. hosts: it ran on; widest: the most of an attempt until then; clock: the
    farthest step done by then."""

    event: Ended
    hosts: int
    widest: int
    clock: int


class RunHistory:
    """most_lines: of the list of events in words; 0: nobody needs it. count: of events.

    Time. began: of the first event; last: of the last sign of a training process [unix seconds]. step: the last that
    the journal names, or None; clock: the farthest one done. tail: the newest events; passed_over: refused updates that
    are not in the list.

    Processes. supervisor: its last event about itself, unless something ran after its end; started: recipe and
    arguments of its last start. word: the name of the last event that shows which process is at work; goodbye: the last
    of GOODBYES, if nothing ran since; since_launch: those of this attempt, and faulty hosts. restart: the pending one,
    or what it waits for; restarts: by how the attempts before them ended. under_way: the newest attempt was launched,
    and no end of it is journaled. rejected: the newest step whose checkpoint it passed over. is_guarded: a
    loop of somebody else trains, under the guard alone.

    Since a person started the run: failed_attempts; unanswered: the failure that is not acted on yet; failed: the time
    of the last one, until training goes on. launched: whether an attempt began since then; widest: on how many hosts at
    most.

    Hosts of the newest attempt, that of rank 0 first; slow: those that are slow now. Since a person started the run:
    left_out: those that failed; proven: those of them that a burn-in has proven since; newly_left_out: those that were
    left out since the last failure.

    Training. refused: updates. alert: the current one. trends: slow signals that are warned of now. rates: what changed
    the learning rate or the updates (step, time, sentence). peaks: step, TFLOP/s of a device, source. evaluated: the
    newest step whose checkpoint eval.command is done with, unless a person rolled it back.
    """

    def __init__(self, most_lines: int = 0) -> None:
        self.most_lines, self.count = most_lines, 0
        self.began: float | None = None
        self.last: float | None = None
        self.step: int | None = None
        self.clock = 0
        self.tail = deque[Event](maxlen=TAIL)
        self.lines = deque[JournalLine](maxlen=most_lines)
        self.passed_over = 0
        self.supervisor: SupervisorEvent | None = None
        self.started: Mapping[str, Any] = {}
        self.word = ""
        self.goodbye: Event | None = None
        self.since_launch: list[Event] = []
        self.restart: Restart | HostsAwaited | None = None
        self.restarts = Counter[str]()
        self.attempts: dict[int, AttemptHistory] = {}
        self.starts: list[StartFacts] = []
        self.under_way = self.is_guarded = False
        self.rejected = 0
        self.failed_attempts: list[FailedAttempt] = []
        self.unanswered: FailedAttempt | None = None
        self.failed: float | None = None
        self.launched, self.widest = False, 0
        self.hosts: tuple[str, ...] = ()
        self.slow: dict[str, HostSlow] = {}
        self.left_out: dict[str, HostLeftOut] = {}
        self.proven: set[str] = set()
        self.newly_left_out: set[str] = set()
        self.refused = 0
        self.incidents: dict[int, IncidentHistory] = {}
        self.alert: AlertEvent | None = None
        self.trends: dict[str, TrendEvent] = {}
        self.checkpoints: dict[str, CheckpointHistory] = {}
        self.rates: list[tuple[int, float, str]] = []
        self.peaks: list[tuple[int, float, str]] = []
        self.evaluations: list[Measurement] = []
        self.probes: list[Measurement] = []
        self.scores: list[Measurement] = []
        self.tasks, self.evaluated = TaskHistory(), 0

    @property
    def attempt(self) -> int:
        """The newest; 0 = none."""
        return next(reversed(self.attempts), 0)

    @property
    def over(self) -> bool:
        """Whether the training process or the supervisor ended properly, and nothing ran since."""
        return self.goodbye is not None or (self.supervisor is not None and self.supervisor.what == "ended")

    @property
    def software(self) -> dict[str, str]:
        """Of the newest start that says what it computes with."""
        return next((start.software for start in reversed(self.starts) if start.software), {})

    def add_event(self, event: Event) -> None:
        """Take in one event; missing or malformed fields are ignored."""
        self.count += 1
        if isinstance(event, PassedOver):
            self.refused += event.refused or 0
            self.passed_over += event.refused or 0
            return
        event_time = event.time
        sane_time = event_time if event_time is not None and abs(event_time) < FAR else 0.0
        self.began = self.began or sane_time or None
        if event_time is not None and event.event not in NO_SIGN:
            self.last = event_time
        event_step = read_whole(event.get("to_step" if "to_step" in event else "step"))
        self.step = self.step if event_step is None else event_step
        self._add_words(event, sane_time, event_step)
        self._add_work(event)
        self._add_training(event, sane_time, event_step)

    def _add_words(self, event: Event, time: float, step: int | None) -> None:
        """The tail, the list, and the event's incident."""
        incident_number = read_whole((summary := read_tree(event.get("summary"))).get("number"))
        # Probes are in a plot; in a list they would take the place of what happened.
        if not isinstance(event, Other | Probed):
            self.tail.append(event)
        new_lines = list[JournalLine]()
        if self.most_lines and not isinstance(event, Probed):
            new_lines.append(JournalLine(time, step, event.event, event.format_sentence(), incident_number))
            self.lines += new_lines
        if incident_number is None:
            return
        incident_history = self.incidents.setdefault(incident_number, IncidentHistory(incident_number, time))
        incident_history.summary = summary
        incident_history.lines += new_lines
        if isinstance(event, IncidentEvent):
            if event.what == "closed":
                incident_history.closed = time
            if event.what == "restarted":
                self.failed = None
            if event.what in ("rewound", "restarted") and step is not None:
                incident_history.back_to = step
                self._undo(step)

    def _undo(self, step: int) -> None:
        """The run goes on from `step`: what was measured of later weights is of none that there are."""
        for one_measurement in (*self.evaluations, *self.probes, *self.scores):
            one_measurement.undone |= one_measurement.step > step
        self.trends = {signal: event for signal, event in self.trends.items() if (event.step or 0) <= step}

    def _add_work(self, event: Event) -> None:
        """What processes are at work on which hosts, and how they end."""
        if event.event in WORDS:
            self.word = event.event
            self.restart = event if isinstance(event, Restart | HostsAwaited) else None
            self.goodbye = None if event.event in AT_WORK else self.goodbye
            if event.event in AT_WORK and self.supervisor is not None and self.supervisor.what == "ended":
                self.supervisor = None
        match event:
            case SupervisorEvent():
                self.supervisor = event
                if event.what == "ended":
                    self.unanswered = None
                else:
                    self.word, self.started = event.event, event.fields
                if event.what == "started":  # by a person, who has looked
                    self.failed_attempts.clear()
                    self.left_out.clear()
                    self.proven.clear()
                    self.launched, self.widest = False, 0
            case Launched(attempt=int(attempt_number)):
                self.hosts = tuple(map(str, event.hosts))
                self.attempts.pop(attempt_number, None)
                self.attempts[attempt_number] = AttemptHistory(attempt_number, event.time, len(self.hosts))
                self.under_way = self.launched = True
                self.widest = max(self.widest, len(self.hosts), event.wanted or 0)
                self.rejected, self.unanswered = 0, None
                self.slow.clear()
                self.since_launch.clear()
            case Finished() | Stopped() | Unstable() | Handover() | HostFaulty():
                self.since_launch.append(event)
                self.goodbye = event if event.event in GOODBYES else self.goodbye
                self.step = (event.steps or self.step) if isinstance(event, Finished) else self.step
            case Ended():
                self._add_end(event)
            case Restart():
                # How the attempt ended, given its number or that of the next.
                known = (self.attempts.get(n) for n in (event.attempt or 0, (event.attempt or 0) - 1))
                causes = (attempt.how for attempt in known if attempt is not None and attempt.how)
                self.restarts[next(causes, "unknown")] += 1
                self.unanswered = None
            case HostLeftOut(host=str(host_name)):
                self.left_out[host_name] = event
                self.proven.discard(host_name)
                self.newly_left_out.add(host_name)
            case HostProven(host=str(host_name)):
                self.proven.add(host_name)
            case HostSlow(host=str(host_name)):
                self.slow.pop(host_name, None)
                if event.what != "over":
                    self.slow[host_name] = event

    def _add_end(self, event: Ended) -> None:
        self.under_way = False
        self.clock = max(self.clock, event.clock or 0)
        if (attempt_number := event.attempt) is not None:
            self.attempts.setdefault(attempt_number, AttemptHistory(attempt_number, None, 0)).end = event
        if event.what:
            self.failed = event.time
            self.unanswered = FailedAttempt(event, len(self.hosts), self.widest, self.clock)
            self.failed_attempts.append(self.unanswered)
            self.newly_left_out.clear()

    def _add_training(self, event: Event, time: float, step: int | None) -> None:
        """What the training did, and what was measured of it."""
        match event:
            case Training():
                self.clock = max(self.clock, step or 0)
                self.is_guarded = bool(event.guarded)
                if step is not None:
                    self._undo(step)
                software = {str(package_name): str(value) for package_name, value in event.software.items()}
                attempt = self.attempt or None
                self.starts.append(
                    StartFacts(time, attempt, step or 0, event.world, list(self.hosts), software)
                )
                if event.peak_tflops is not None and isfinite(event.peak_tflops):
                    self.peaks.append((step or 0, event.peak_tflops, event.peak_source or ""))
            case Discarded():
                self.refused += 1
            case AlertEvent():
                self.alert = event if event.what == "begun" else None
            case TrendEvent(signal=str(signal)):
                self.trends.pop(signal, None)
                if event.what != "over":
                    self.trends[signal] = event
            case Evaluated(loss=float(loss)) if step is not None:
                self.evaluations.append(Measurement(step, time, loss, event.by_corpus))
            case Probed(loss=float(loss)) if step is not None:
                self.probes.append(Measurement(step, time, loss))
            case TasksEvaluated() | TasksFailed() | TasksSkipped():
                self.tasks.add_event(event)
                self.evaluated = max(self.evaluated, event.of_step or 0)
                if isinstance(event, TasksEvaluated) and event.of_step is not None and event.numbers:
                    self.scores.append(Measurement(event.of_step, time, float("nan"), event.numbers))
            case RolledBack(step=int(back_to)):
                self.evaluated = min(self.evaluated, back_to)
            case RateCut() | RateWarmup() | RateLifted() | ChangeMade():
                self.rates.append((step or 0, time, event.format_sentence()))
            case Warned() if event.sign == NEXT_UPDATE:
                self.rates.append((step or 0, time, event.format_sentence()))
            case CheckpointSaved() | CheckpointHealthy() | CheckpointSuspect() | CheckpointRejected():
                self._add_checkpoint(event, time, step)

    def _add_checkpoint(self, event: Event, time: float, step: int | None) -> None:
        checkpoint_name = str(event.get("name"))
        if isinstance(event, CheckpointSaved):
            self.clock = max(self.clock, step or 0)
            self.checkpoints.pop(checkpoint_name, None)
            self.checkpoints[checkpoint_name] = CheckpointHistory(
                checkpoint_name, step or 0, time, event.bytes, event.seconds, event.blocked
            )
            return
        step_digits = checkpoint_name.removeprefix("step-")
        if isinstance(event, CheckpointRejected) and step_digits.isdecimal() and len(step_digits) < 19:
            self.rejected = max(self.rejected, int(step_digits))
        if (known_checkpoint := self.checkpoints.get(checkpoint_name)) is None:
            return
        if isinstance(event, CheckpointHealthy):
            known_checkpoint.state, known_checkpoint.proved = "healthy", step
        else:
            known_checkpoint.state = "suspect" if isinstance(event, CheckpointSuspect) else "rejected"
            known_checkpoint.why = event.format_sentence()


class HistoryReader:
    """Follows a journal: `history` grows with every `look_again`, and begins again when the file was repaired. starts:
    how often it has begun."""

    def __init__(self, journal: Path, most_lines: int = 0) -> None:
        self._follower = Follower(journal, brief=True)
        self.starts = self._follower.starts
        self.history = RunHistory(most_lines)
        self._others: list[list[Event]] = []

    def share_events(self) -> list[Event]:
        """A list to which later looks append every event, for who folds them in another way, and empties it."""
        self._others.append([])
        return self._others[-1]

    def look_again(self) -> bool:
        """Whether there is anything new."""
        seen_before = (self.history.count, self.starts)
        for event in self._follower.stream_events():
            self._begin_again()
            self.history.add_event(event)
            for shared_events in self._others:
                shared_events.append(event)
        self._begin_again()
        return seen_before != (self.history.count, self.starts)

    def _begin_again(self) -> None:
        """Forget what an old version of the journal said."""
        if self._follower.starts != self.starts:
            self.starts, self.history = self._follower.starts, RunHistory(self.history.most_lines)
            for shared_events in self._others:
                shared_events.clear()

    @property
    def problem(self) -> str:
        """Why the last look failed; "" if it did not."""
        return self._follower.problem

    @property
    def problems(self) -> list[str]:
        damaged, problem = self._follower.damaged, self._follower.problem
        found = [f"{self._follower.path}: {damaged} damaged lines were passed over"] if damaged else []
        return ([problem] if problem else []) + found


def select_standing(measured: Sequence[Measurement]) -> list[Measurement]:
    """Finite losses of weights that were not undone."""
    return [one for one in measured if not one.undone and isfinite(one.loss)]


def name_end(event: Ended) -> str:
    """Why an attempt ended, from its `ended` event: one of ENDED_AS, for counting."""
    if event.get("hung"):
        return "hang"
    if event.get("signal"):
        return "killed"
    code = event.get("code")
    known = {0: "done", STOPPED: "stopped", UNSTABLE: "unstable", NO_SPACE: "no_space", HANDOVER: "handover"}
    return known.get(code, "crash") if isinstance(code, int) else "crash"
