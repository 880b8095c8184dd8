"""Says in a sentence and twelve figures how a run stands, for somebody who has never seen it. Pure."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from megastable.base.text import duration, plural, visible
from megastable.report.postmortem.facts import IncidentFacts
from megastable.run.goodput.time_account import TimeKind
from megastable.run.run_history import Measurement
from megastable.supervise.standing import State
from megastable.supervise.status import Status

RECENT = 200  # steps looked at
USUAL = 20  # steps whose median is the loss now
COLUMNS = ("loss", "applied", "mfu_full", "seconds", "tokens_per_second", "lr", "memory")

# What a state means: a word, and whether that is good.
WORDS = {
    State.RUNNING: ("healthy", "good"), State.STARTING: ("starting", "plain"), State.HUNG: ("not moving", "bad"),
    State.WAITING: ("restarting", "warn"), State.FINISHED: ("finished", "good"), State.STOPPED: ("stopped", "plain"),
    State.FAILED: ("needs a person", "bad"), State.INTERRUPTED: ("interrupted", "bad"),
    State.UNKNOWN: ("cannot be told", "warn"), State.NEW: ("not started", "plain"),
}  # fmt: skip
DONE = {
    "rewind": "rewind", "restart": "restart", "handover": "restart from a checkpoint", "skip": "skip",
    "wait": "wait",
    "cut_lr": "rate cut", "cap_lr": "rate cap", "discard": "refusal", "fall_back": "return to bf16",
    "adjust": "change of how it trains",
    "swap_corpus": "corpus swap", "alert": "alert", "stop": "stop",
}  # fmt: skip


class Figure(NamedTuple):
    """mood: good, bad, warn or plain."""

    name: str
    value: str
    remark: str = ""
    mood: str = "plain"


class UsableCheckpoints(NamedTuple):
    """Steps of checkpoints on disk; None: there is none. newest: of those that are neither suspect nor rejected;
    proved: the newest of these that proved healthy."""

    newest: int | None
    proved: int | None


def headline(
    s: Status,
    recent: Mapping[str, npt.NDArray[Any]],
    incidents: Sequence[IncidentFacts],
    evaluations: Sequence[Measurement],
    trends: Sequence[str],
    account: Mapping[str, Any] | None,
    recipe: Mapping[str, Any],
    skipped: int,
    usable: UsableCheckpoints,
    undone: int,
    now: float,
) -> dict[str, Any]:
    """recent: columns of the last steps that were not undone. incidents: all. evaluations: the last. trends: warnings
    that are not over. account: see `run_panel.account`. recipe: the sections of the frozen one. skipped: samples.
    undone: updates, as far as they are recorded."""
    word, mood = _word(s, incidents, trends)
    figures = [
        _progress(s), _tokens(s, recipe, skipped), _left(s, account, now), _loss(recent, evaluations),
        _speed(s, recent), _mfu(recent), _incidents(incidents), _skipped(s, skipped), _lost(s, incidents, undone),
        _goodput(account), _cost(account, recipe), _checkpoint(usable),
    ]  # fmt: skip
    shown = [{key: visible(text, 200) for key, text in figure._asdict().items()} for figure in figures]
    return {
        "word": word, "mood": mood, "sentence": visible(_sentence(s, incidents, trends), 1000),
        "advice": "" if s.advice.startswith("nothing to do") else s.advice,
        "step": s.step, "steps": s.steps, "state": s.state.value, "figures": shown,
        "running": s.state in (State.RUNNING, State.STARTING, State.HUNG, State.WAITING), "age": s.age, "now": now,
    }  # fmt: skip


def _word(s: Status, incidents: Sequence[IncidentFacts], trends: Sequence[str]) -> tuple[str, str]:
    word, mood = WORDS[s.state]
    if s.state is State.RUNNING:
        if s.alert:
            return "alert", "bad"
        if any(i.outcome == "open" for i in incidents):
            return "recovering", "warn"
        if trends or s.slow:
            return "warned", "warn"
    return word, mood


def _sentence(s: Status, incidents: Sequence[IncidentFacts], trends: Sequence[str]) -> str:
    """How it stands, and the one thing to know."""
    at = f"step {s.step:,}" + (f" of {s.steps:,}" if s.steps else "")
    match s.state:
        case State.RUNNING:
            told = f"Training goes on at {at}."
        case State.FINISHED:
            told = f"The run is complete: {plural(s.step, 'step')}."
        case State.STOPPED:
            told = f"Stopped as asked at {at}; it can be resumed."
        case State.HUNG:
            told = f"No progress at {at}: {s.reason}."
        case State.NEW:
            told = "The run has not begun yet."
        case _:
            told = f"{WORDS[s.state][0].capitalize()} at {at}" + (f": {s.reason}." if s.reason else ".")
    opened = [i for i in incidents if i.outcome == "open"]
    if s.alert:
        told += f" Alert {s.alert}."
    elif opened and s.state is State.RUNNING:
        told += f" Incident {opened[-1].number} (step {opened[-1].onset:,}) is not proven to be over yet."
    elif trends and s.state is State.RUNNING:
        told += f" Warned: {trends[-1]}."
    elif s.slow and s.state is State.RUNNING:
        told += f" Slow: {next(iter(s.slow.values())).text}."
    elif incidents and all(i.outcome == "healed" for i in incidents):
        told += f" {_all_of(len(incidents))} resolved without a person."
    elif not incidents:
        told += " Nothing has gone wrong so far." if s.step else ""
    return told.replace("..", ".")


def _all_of(n: int) -> str:
    return {1: "The one incident was", 2: "Both incidents were"}.get(n, f"All {n} incidents were")


def _progress(s: Status) -> Figure:
    if not s.steps:
        return Figure("step", f"{s.step:,}")
    return Figure(
        "done",
        f"{min(100.0, math.floor(1000 * s.step / s.steps) / 10):.1f} %",
        f"step {s.step:,} of {s.steps:,}",
    )


def _tokens(s: Status, recipe: Mapping[str, Any], skipped: int) -> Figure:
    length = recipe.get("model", {}).get("sequence_length")
    if s.cursor is None or not isinstance(length, int):
        return Figure("tokens", "?")
    train, remark = recipe.get("train", {}), ""
    if s.steps and isinstance(train.get("global_batch"), int) and train.get("batch_warmup") is None:
        remark = f"of {short((s.steps * train['global_batch'] + skipped) * length)}"
    if skipped:
        remark += f", {short(skipped * length)} of them skipped"
    return Figure("tokens", short(s.cursor * length), remark.removeprefix(", "))


def _left(s: Status, account: Mapping[str, Any] | None, now: float) -> Figure:
    took = "" if account is None else f"{duration(account['wall'])} so far"
    if s.eta is not None and s.eta < 1e10:
        when = datetime.fromtimestamp(now + s.eta, UTC)
        form = "%H:%M UTC" if s.eta < 20 * 3600 else "%b %-d, %H:%M UTC"
        return Figure("time left", duration(s.eta), f"done about {when.strftime(form)}")
    return Figure("time", duration(account["wall"]) if account else "?", took and "from the first start")


def _loss(recent: Mapping[str, npt.NDArray[Any]], evaluations: Sequence[Measurement]) -> Figure:
    accepted = recent["loss"][recent["applied"].astype(bool)] if len(recent["loss"]) else np.empty(0)
    accepted = accepted[np.isfinite(accepted)][-USUAL:]
    remark = (
        f"median of {USUAL} steps; validation {evaluations[-1].loss:.3f} at step {evaluations[-1].step:,}"
        if evaluations
        else f"median of {USUAL} steps; no validation yet"
    )
    return Figure("loss", f"{float(np.median(accepted)):.3f}" if len(accepted) else "?", remark)


def _speed(s: Status, recent: Mapping[str, npt.NDArray[Any]]) -> Figure:
    known = _median(recent["tokens_per_second"])
    value = s.tokens_per_second if s.tokens_per_second is not None else known
    rate = s.rate if s.rate is not None else _median(recent["seconds"])
    return Figure(
        "tokens/s",
        "?" if value is None else short(value),
        "" if rate is None else f"{rate:.3g} s per step, of late",
    )


def _mfu(recent: Mapping[str, npt.NDArray[Any]]) -> Figure:
    value = _median(recent["mfu_full"])
    return Figure(
        "MFU", "?" if value is None else f"{value:.1%}".replace("%", " %"), "of the hardware's peak, of late"
    )


def _incidents(incidents: Sequence[IncidentFacts]) -> Figure:
    if not incidents:
        return Figure("incidents", "0", "", "good")
    done = Counter(DONE.get(action, action[:30]) for i in incidents for action in i.actions)
    told = ", ".join(plural(n, what) for what, n in done.most_common(3))
    opened = sum(i.outcome != "healed" for i in incidents)
    state = f"{opened} not over" if opened else "all over"
    return Figure(
        "incidents", str(len(incidents)), f"{state}: {told}" if told else state, "warn" if opened else "good"
    )


def _skipped(s: Status, skipped: int) -> Figure:
    share = (
        f"{skipped / s.cursor:.2%} of those read".replace("%", " %")
        if s.cursor and skipped
        else "of the data"
    )
    return Figure("samples skipped", f"{skipped:,}", share)


def _lost(s: Status, incidents: Sequence[IncidentFacts], undone: int) -> Figure:
    # Records lack the last steps of a process that was killed, incidents lack restarts without a supervisor.
    lost = max(sum(i.steps_lost for i in incidents), undone)
    return Figure("steps lost", f"{lost:,}", f"undone and repeated; {plural(s.refused, 'update')} refused")


def _goodput(account: Mapping[str, Any] | None) -> Figure:
    if account is None or not account["wall"]:
        return Figure("goodput", "?", "share of the time that was training")
    lost = account["wall"] - account["seconds"].get(TimeKind.TRAINING.value, 0.0)
    return Figure("goodput", f"{100 * account['share']:.1f} %", f"{duration(lost)} were not training")


def _cost(account: Mapping[str, Any] | None, recipe: Mapping[str, Any]) -> Figure:
    hours = None if account is None else account["gpu_hours"]
    if hours is None:
        return Figure("GPU-hours", "?")
    told = f"{short(hours)} GPU-hours"
    price = recipe.get("supervise", {}).get("gpu_hour_price")
    if not isinstance(price, int | float):
        return Figure("GPU-hours", short(hours), "ranks × time, idle time too")
    money = hours * price
    currency = str(recipe["supervise"].get("currency", ""))[:8]
    return Figure("cost", f"{money:,.{0 if money >= 10 else 2}f} {currency}", f"{told}, idle time too")


def _checkpoint(usable: UsableCheckpoints) -> Figure:
    if usable.newest is None:
        return Figure("checkpoint", "none", "to resume from")
    if usable.proved is None:
        return Figure("checkpoint", f"step {usable.newest:,}", "the newest; none has proved healthy yet")
    more = f"; newest of all: step {usable.newest:,}" if usable.newest != usable.proved else ""
    return Figure("checkpoint", f"step {usable.proved:,}", f"the newest proved healthy{more}")


def _median(values: npt.NDArray[Any]) -> float | None:
    known = values[np.isfinite(values)] if len(values) else values
    return float(np.median(known)) if len(known) else None


def short(value: float) -> str:
    """A large number in three digits: 812, 45.3 k, 1.24 M, 300 B."""
    for unit, size in (("T", 1e12), ("B", 1e9), ("M", 1e6), ("k", 1e3)):
        if abs(value) >= 0.9995 * size:
            return f"{value / size:#.3g}".rstrip(".") + f" {unit}"
    return f"{value:.3g}"
