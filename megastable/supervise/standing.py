"""Decides the state of a run: running, hung, stopped, interrupted and so on. Pure.

From the locks of its directory, the last events of its journal, and the age of its last progress;
`advise_person` also looks whether there are logs.
"""

from __future__ import annotations

import shlex
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from megastable.base import errors
from megastable.base.text import make_visible, show_duration
from megastable.cluster.launcher import MODULE
from megastable.config.supervise import SuperviseConfig, redact_override
from megastable.run.directory import RunDirectory
from megastable.run.events.event import NOTHING, read_whole
from megastable.run.run_history import AT_WORK, RunHistory
from megastable.supervise.hangs import tolerated_seconds


class State(StrEnum):
    RUNNING = "running"
    STARTING = "starting"
    HUNG = "no progress"  # a process is there, but without progress for longer than allowed
    WAITING = "waiting to restart"
    FINISHED = "finished"
    STOPPED = "stopped"  # on request: it can be resumed
    FAILED = "needs a person"
    INTERRUPTED = "interrupted"  # no process, and no event that says it is over
    UNKNOWN = "cannot be told"  # the locks cannot be seen from here
    NEW = "not started"


@dataclass(frozen=True)
class Standing:
    """code: the exit code of the run, None if it has not ended or is unknown."""

    state: State
    code: int | None = None
    reason: str = ""


def judge_state(
    told: RunHistory,
    supervised: bool | None,
    training: bool | None,
    phase: str,
    age: float | None,
    rate: float | None,
    limits: SuperviseConfig,
) -> Standing:
    """supervised, training: whether the supervisor and rank 0 run, None = unknown. phase: of rank 0, "" = unknown. age:
    seconds since the last progress. rate: seconds per step."""
    is_still = age is not None and age > tolerated_seconds(phase, rate, limits)
    at_work = told.word in (*AT_WORK, "supervisor") and not told.over
    if training or (training is None and at_work and (supervised or (age is not None and not is_still))):
        if told.word == "hang" or is_still:
            pace = f"; a step takes {show_duration(rate)}" if rate is not None else ""
            return Standing(State.HUNG, reason=f"nothing has moved for {show_duration(age or 0.0)}{pace}")
        is_starting = phase == "starting" or (not phase and told.word not in ("training", "resumed"))
        doubts_text = _doubts(told, supervised, training, age)
        return Standing(State.STARTING if is_starting else State.RUNNING, reason=doubts_text)
    if supervised and told.word in ("launched", "supervisor", ""):
        return Standing(State.STARTING)
    goodbye_event = told.goodbye or NOTHING
    is_pending = told.word in ("restart", "hosts_awaited")
    if supervised and (is_pending or goodbye_event.get("event") not in ("stopped", "finished")):
        known_reason = (told.restart or goodbye_event).get("reason")
        reason = known_reason or "its processes have ended: why is being looked into"
        return Standing(State.WAITING, reason=make_visible(reason, 300))
    if None in (supervised, training) and told.word and not told.over:
        return Standing(State.UNKNOWN, reason=_doubts(told, supervised, training, age))
    return _ended(told)


def _doubts(told: RunHistory, supervised: bool | None, training: bool | None, age: float | None) -> str:
    if training is None:
        sign = f"; the last sign of them is {show_duration(age)} old" if age is not None else ""
        return f"whether its processes are there cannot be told: their locks cannot be seen from here{sign}"
    return "its supervisor is gone: the ranks train on alone" if _orphaned(told, supervised) else ""


def _orphaned(told: RunHistory, supervised: bool | None) -> bool:
    """Whether there was a supervisor that vanished without journaling its end."""
    return supervised is False and (told.supervisor or NOTHING).get("what") in ("started", "took over")


def _ended(told: RunHistory) -> Standing:
    """From the supervisor's last event or, if none, the training process's."""
    if told.word == "rolled_back":
        return Standing(State.STOPPED, reason=f"a person rolled it back to step {told.step}")
    supervisor_event, goodbye_event = told.supervisor or NOTHING, told.goodbye or NOTHING
    end_reason = make_visible(supervisor_event.get("reason") or goodbye_event.get("reason") or "", 500)
    exit_code = read_whole(supervisor_event.get("code"))
    if supervisor_event.get("what") == "ended" and exit_code is not None:
        known_states = {errors.OK: State.FINISHED, errors.STOPPED: State.STOPPED}
        return Standing(known_states.get(exit_code, State.FAILED), exit_code, end_reason)
    match goodbye_event.get("event"):
        case "finished":
            return Standing(State.FINISHED, errors.OK)
        case "stopped":
            return Standing(State.STOPPED, errors.STOPPED, end_reason)
        case "unstable":
            return Standing(State.FAILED, errors.UNSTABLE, end_reason)
        case "handover":
            return Standing(State.INTERRUPTED, errors.HANDOVER, end_reason)
    if told.word:
        failures = ((attempt.end or NOTHING).get("failure") for attempt in reversed(told.attempts.values()))
        failure_text = make_visible(next(filter(None, failures), ""), 300)
        return Standing(State.INTERRUPTED, None, failure_text or "its processes are gone, and none said why")
    return Standing(State.NEW)


def advise_person(stands: Standing, run: RunDirectory, told: RunHistory, supervised: bool | None) -> str:
    """The next action for a person, a sentence."""
    if told.is_guarded and stands.state in (State.HUNG, State.STOPPED, State.INTERRUPTED, State.FAILED):
        end_text = "end it, then start" if stands.state is State.HUNG else "start"
        return f"{end_text} its script again, with the checkpoint that it wrote last"
    again = make_visible(shlex.join(build_resume_command(run, told)))
    match stands.state:
        case State.RUNNING | State.STARTING if _orphaned(told, supervised):
            return f"the same command takes it over, and mends what happens: {again}"
        case State.RUNNING:
            return "nothing to do"
        case State.STARTING:
            return "nothing to do: it loads data and weights"
        case State.WAITING:
            return "nothing to do: the supervisor starts it again by itself"
        case State.FINISHED:
            return f"nothing to do: {make_visible(run.summary)} has its figures"
        case State.HUNG if supervised:
            log_folder = make_visible(run.logs)
            return f"nothing to do: the supervisor ends it and starts it again; the logs are in {log_folder}"
        case State.HUNG:
            return f"a supervisor ends it and starts it again: {again}"
        case State.UNKNOWN:
            host = (told.supervisor or NOTHING).get("host") or "the host that it was started on"
            return f"look on {make_visible(host, 80)}; if nobody is at work there, to go on: {again}"
        case State.STOPPED | State.INTERRUPTED:
            return f"to go on: {again}"
        case State.NEW:
            return f"to start it: {again}"
    if stands.code == errors.NO_SPACE:
        return f"make room, then: {again}"
    newest = max(told.incidents, default=None)
    where = run.logs if newest is None or stands.code == errors.BAD_INPUT else run.incidents / f"{newest:04d}"
    if not where.exists():  # no rank was ever started: the reason, which is shown beside it, is all there is
        return f"mend the cause, then: {again}"
    return f"read {make_visible(where)} and mend the cause, then: {again}"


def build_resume_command(run: RunDirectory, told: RunHistory) -> list[str]:
    """The command that resumes the run as last started, where it lies now: it may have been moved or copied; with its
    own recipe if no supervisor journaled one."""
    recipe, overrides, given = (told.started.get(key) for key in ("recipe", "overrides", "given"))
    if not isinstance(recipe, str) or not isinstance(overrides, list):
        recipe, overrides, given = str(run.recipe), [], []
    words = [
        "megastable",
        "supervise",
        recipe,
        *(redact_override(str(override_text)) for override_text in overrides),
    ]
    said = [word.removeprefix("run.dir=") for word in words if word.startswith("run.dir=")]
    if said and Path(said[-1]).resolve() != run.root.resolve():
        words = [word for word in words if not word.startswith("run.dir=")]
    if not any(word.startswith("run.dir=") for word in words):
        words.append(f"run.dir={run.root}")  # else it would be a new run
    if (module := told.started.get("module", MODULE)) != MODULE:
        words += ["--module", str(module)]
    return [*words, "--", *map(str, given)] if isinstance(given, list) and given else words
