"""How a run stands, decided from what is known of it. Pure.

Told by who holds the locks of its directory, by the last words of its journal, and by the age of its last progress.
"""

from __future__ import annotations

import shlex
from dataclasses import dataclass
from enum import StrEnum

from megastable import errors
from megastable.rundir import RunDirectory
from megastable.supervise.settings import SuperviseConfig
from megastable.supervise.story import Story, whole
from megastable.supervise.words import duration, visible


class State(StrEnum):
    RUNNING = "running"
    STARTING = "starting"
    HUNG = "no progress"  # somebody is there, but nothing has moved for longer than it may take
    WAITING = "waiting to restart"
    FINISHED = "finished"
    STOPPED = "stopped"  # as asked: it can go on
    FAILED = "needs a person"
    INTERRUPTED = "interrupted"  # nobody is there, and nobody said that it was over
    NEW = "not started"


@dataclass(frozen=True)
class Stands:
    """code: the exit code that the run ended with, None while it has not or nobody knows."""

    state: State
    code: int | None = None
    reason: str = ""


def state_of(
    story: Story,
    supervised: bool | None,
    training: bool | None,
    phase: str,
    age: float | None,
    rate: float | None,
    limits: SuperviseConfig,
) -> Stands:
    """supervised, training: whether the supervisor and rank 0 are there, None = cannot be told. phase: of rank 0, "" =
    unknown. age: seconds since the last sign of progress. rate: seconds a step."""
    if training:
        starts = phase == "starting" or (not phase and story.word not in ("training", "resumed"))
        usual = rate if phase == "step" else None
        patience = (
            limits.hang_unknown if usual is None else max(limits.hang_floor, limits.hang_factor * usual)
        )
        if story.word == "hang" or (age is not None and age > patience):
            since = f"nothing has moved for {duration(age or 0.0)}"
            return Stands(
                State.HUNG, reason=since + (f"; a step takes {duration(rate)}" if rate is not None else "")
            )
        return Stands(State.STARTING if starts else State.RUNNING)
    if supervised and story.word in ("launched", "supervisor", "training", "resumed", ""):
        return Stands(State.STARTING)
    goodbye = (story.goodbye or {}).get("event")
    if supervised and (story.word == "restart" or goodbye not in ("stopped", "finished")):
        return Stands(State.WAITING, reason=visible((story.restart or {}).get("reason") or "", 300))
    if training is None and goodbye is None and story.word:
        return Stands(
            State.RUNNING, reason="the lock cannot be read here: whether anybody trains cannot be told"
        )
    return _ended(story)


def _ended(story: Story) -> Stands:
    """After the supervisor's last word or, where it had none, the training process's."""
    told, goodbye = story.supervisor or {}, story.goodbye or {}
    reason = visible(told.get("reason") or goodbye.get("reason") or "", 500)
    if told.get("what") == "ended" and (code := whole(told.get("code"))) is not None:
        known = {errors.OK: State.FINISHED, errors.STOPPED: State.STOPPED}
        return Stands(known.get(code, State.FAILED), code, reason)
    match goodbye.get("event"):
        case "finished":
            return Stands(State.FINISHED, errors.OK)
        case "stopped":
            return Stands(State.STOPPED, errors.STOPPED, reason)
        case "unstable":
            return Stands(State.FAILED, errors.UNSTABLE, reason)
        case "handover":
            return Stands(State.INTERRUPTED, errors.HANDOVER, reason)
    if story.word:
        failure = next((a.failure for a in reversed(story.attempts.values()) if a.failure), "")
        return Stands(State.INTERRUPTED, None, failure or "its processes are gone, and none said why")
    return Stands(State.NEW)


def advice(stands: Stands, run: RunDirectory, story: Story) -> str:
    """What a person does next, a sentence."""
    words = ["python", "launch/supervise.py", str(run.recipe), f"run.dir={run.root}"]
    again = visible(shlex.join(words))
    match stands.state:
        case State.RUNNING:
            return "nothing to do"
        case State.STARTING:
            return "nothing to do: it loads data and weights"
        case State.WAITING:
            return "nothing to do: the supervisor starts it again by itself"
        case State.FINISHED:
            return f"nothing to do: {visible(run.summary)} has its figures"
        case State.HUNG:
            return f"a supervisor ends it and starts it again; the logs are in {visible(run.logs)}"
        case State.STOPPED | State.INTERRUPTED:
            return f"to go on: {again}"
        case State.NEW:
            return f"to start it: {again}"
    if stands.code == errors.NO_SPACE:
        return f"make room, then: {again}"
    newest = max(story.incidents, default=None)
    where = run.logs if newest is None or stands.code == errors.BAD_INPUT else run.incidents / f"{newest:04d}"
    return f"read {visible(where)} and mend the cause, then: {again}"
