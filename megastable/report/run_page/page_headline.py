"""Says how a run stands, in a sentence and up to twelve figures, and what it trains, in a few lines. Pure."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
from pydantic import ValidationError

from megastable.base.text import count_noun, make_visible, show_duration
from megastable.config.model import ModelConfig
from megastable.model.sizes import count_parameters
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


def build_headline(
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
    that are not over. account: see `run_reader.describe_account`. recipe: the sections of the frozen one. skipped:
    samples. undone: updates, as far as they are recorded."""
    word, mood = WORDS[s.state]
    if s.state is State.RUNNING:
        if s.alert:
            word, mood = "alert", "bad"
        elif any(i.outcome == "open" for i in incidents):
            word, mood = "recovering", "warn"
        elif trends or s.slow:
            word, mood = "warned", "warn"
    key_figures = [
        _progress(s), _tokens(s, recipe, skipped), _left(s, account, now), _loss(recent, evaluations),
        _speed(s, recent), _mfu(recent), _incidents(incidents), _skipped(s, skipped), _lost(s, incidents, undone),
        _goodput(account), _cost(account, recipe), _checkpoint(usable),
    ]  # fmt: skip
    if s.guarded:  # a loop of somebody else: there is nothing of these
        unknown = ("tokens", "MFU", "samples skipped", "checkpoint")
        key_figures = [key_figure for key_figure in key_figures if key_figure.name not in unknown]
    shown = [
        {key: make_visible(field_text, 200) for key, field_text in key_figure._asdict().items()}
        for key_figure in key_figures
    ]
    return {
        "word": word, "mood": mood, "sentence": make_visible(_sentence(s, incidents, trends), 1000),
        "advice": "" if s.advice.startswith("nothing to do") else s.advice,
        "step": s.step, "steps": s.steps, "state": s.state.value, "figures": shown,
        "running": s.state in (State.RUNNING, State.STARTING, State.HUNG, State.WAITING), "age": s.age, "now": now,
    }  # fmt: skip


def _sentence(s: Status, incidents: Sequence[IncidentFacts], trends: Sequence[str]) -> str:
    """How it stands, and the one thing to know."""
    at = f"step {s.step:,}" + (f" of {s.steps:,}" if s.steps else "")
    match s.state:
        case State.RUNNING:
            told = f"Training goes on at {at}."
        case State.FINISHED:
            told = f"The run is complete: {count_noun(s.step, 'step')}."
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
        count = len(incidents)
        which = {1: "The one incident was", 2: "Both incidents were"}.get(
            count, f"All {count} incidents were"
        )
        told += f" {which} resolved without a person."
    elif not incidents:
        told += " Nothing has gone wrong so far." if s.step else ""
    return told.replace("..", ".")


def _progress(s: Status) -> Figure:
    if not s.steps:
        return Figure("step", f"{s.step:,}")
    percent = min(100.0, math.floor(1000 * s.step / s.steps) / 10)
    return Figure("done", f"{percent:.1f} %", f"step {s.step:,} of {s.steps:,}")


def _tokens(s: Status, recipe: Mapping[str, Any], skipped: int) -> Figure:
    length = recipe.get("model", {}).get("sequence_length")
    if s.cursor is None or not isinstance(length, int):
        return Figure("tokens", "?")
    train, token_remark = recipe.get("train", {}), ""
    if s.steps and isinstance(train.get("global_batch"), int) and train.get("batch_warmup") is None:
        token_remark = f"of {shorten_number((s.steps * train['global_batch'] + skipped) * length)}"
    if skipped:
        token_remark += f", {shorten_number(skipped * length)} of them skipped"
    return Figure("tokens", shorten_number(s.cursor * length), token_remark.removeprefix(", "))


def _left(s: Status, account: Mapping[str, Any] | None, now: float) -> Figure:
    if s.eta is not None and s.eta < 1e10:
        done_at = datetime.fromtimestamp(now + s.eta, UTC)
        time_format = "%H:%M UTC" if s.eta < 20 * 3600 else "%b %-d, %H:%M UTC"
        return Figure("time left", show_duration(s.eta), f"done about {done_at.strftime(time_format)}")
    if account is None:
        return Figure("time", "?")
    return Figure("time", show_duration(account["wall"]), "from the first start")


def _loss(recent: Mapping[str, npt.NDArray[Any]], evaluations: Sequence[Measurement]) -> Figure:
    accepted = recent["loss"][recent["applied"].astype(bool)] if len(recent["loss"]) else np.empty(0)
    accepted = accepted[np.isfinite(accepted)][-USUAL:]
    validation = "no validation yet"
    if evaluations:
        validation = f"validation {evaluations[-1].loss:.3f} at step {evaluations[-1].step:,}"
    median_text = f"{float(np.median(accepted)):.3f}" if len(accepted) else "?"
    return Figure("loss", median_text, f"median of {USUAL} steps; {validation}")


def _speed(s: Status, recent: Mapping[str, npt.NDArray[Any]]) -> Figure:
    median_speed = _median(recent["tokens_per_second"])
    token_speed = s.tokens_per_second if s.tokens_per_second is not None else median_speed
    step_seconds = s.rate if s.rate is not None else _median(recent["seconds"])
    step_text = "" if step_seconds is None else f"{step_seconds:.3g} s per step, of late"
    if s.guarded:
        return Figure("a step", "?" if step_seconds is None else f"{step_seconds:.3g} s", "of late")
    return Figure("tokens/s", "?" if token_speed is None else shorten_number(token_speed), step_text)


def _mfu(recent: Mapping[str, npt.NDArray[Any]]) -> Figure:
    value = _median(recent["mfu_full"])
    mfu_text = "?" if value is None else f"{100 * value:.1f} %"
    return Figure("MFU", mfu_text, "of the hardware's peak, of late")


def _incidents(incidents: Sequence[IncidentFacts]) -> Figure:
    if not incidents:
        return Figure("incidents", "0", "", "good")
    done = Counter(DONE.get(action, action[:30]) for i in incidents for action in i.actions)
    told = ", ".join(count_noun(n, action_word) for action_word, n in done.most_common(3))
    opened = sum(i.outcome != "healed" for i in incidents)
    state_text = f"{opened} not over" if opened else "all over"
    remark = f"{state_text}: {told}" if told else state_text
    return Figure("incidents", str(len(incidents)), remark, "warn" if opened else "good")


def _skipped(s: Status, skipped: int) -> Figure:
    share_text = f"{100 * skipped / s.cursor:.2f} % of those read" if s.cursor and skipped else "of the data"
    return Figure("samples skipped", f"{skipped:,}", share_text)


def _lost(s: Status, incidents: Sequence[IncidentFacts], undone: int) -> Figure:
    # Records lack the last steps of a process that was killed, incidents lack restarts without a supervisor.
    lost = max(sum(i.steps_lost for i in incidents), undone)
    refused_text = f"{count_noun(s.refused, 'update')} refused"
    return Figure("steps lost", f"{lost:,}", f"undone and repeated; {refused_text}")


def _goodput(account: Mapping[str, Any] | None) -> Figure:
    if account is None or not account["wall"]:
        return Figure("goodput", "?", "share of the time that was training")
    lost_seconds = account["wall"] - account["seconds"].get(TimeKind.TRAINING.value, 0.0)
    lost_text = f"{show_duration(lost_seconds)} were not training"
    return Figure("goodput", f"{100 * account['share']:.1f} %", lost_text)


def _cost(account: Mapping[str, Any] | None, recipe: Mapping[str, Any]) -> Figure:
    hours = None if account is None else account["gpu_hours"]
    if hours is None:
        return Figure("GPU-hours", "?")
    hours_text = f"{shorten_number(hours)} GPU-hours"
    hour_price = recipe.get("supervise", {}).get("gpu_hour_price")
    if not isinstance(hour_price, int | float):
        return Figure("GPU-hours", shorten_number(hours), "ranks × time, idle time too")
    money = hours * hour_price
    currency = str(recipe["supervise"].get("currency", ""))[:8]
    return Figure("cost", f"{money:,.{0 if money >= 10 else 2}f} {currency}", f"{hours_text}, idle time too")


def _checkpoint(usable: UsableCheckpoints) -> Figure:
    if usable.newest is None:
        return Figure("checkpoint", "none", "to resume from")
    if usable.proved is None:
        return Figure("checkpoint", f"step {usable.newest:,}", "the newest; none has proved healthy yet")
    newest_text = f"; newest of all: step {usable.newest:,}" if usable.newest != usable.proved else ""
    return Figure("checkpoint", f"step {usable.proved:,}", f"the newest proved healthy{newest_text}")


def _median(values: npt.NDArray[Any]) -> float | None:
    finite_values = values[np.isfinite(values)] if len(values) else values
    return float(np.median(finite_values)) if len(finite_values) else None


def shorten_number(value: float) -> str:
    """A large number in three digits: 812, 45.3 k, 1.24 M, 300 B."""
    for unit_letter, unit_size in (("T", 1e12), ("B", 1e9), ("M", 1e6), ("k", 1e3)):
        if abs(value) >= 0.9995 * unit_size:
            return f"{value / unit_size:#.3g}".rstrip(".") + f" {unit_letter}"
    return f"{value:.3g}"


LONGEST = 300  # characters of a line
CORPORA = 12  # that are named
SOFTWARE = ("device", "torch", "deepspeed", "transformer-engine", "megastable")


def recipe_facts(
    recipe: Mapping[str, Any], world: int | None, mixture: Sequence[tuple[str, float]], software: Mapping[str, Any],
    peak: tuple[float, str] | None,
) -> list[tuple[str, str]]:  # fmt: skip
    """Lines of (what, text). recipe: its sections; of any version, so that what it lacks is left out. world: ranks;
    mixture: corpora with their weights; software: see base/software.py; peak: TFLOP/s of a device, and its source."""
    fact_lines = [
        ("model", _model(recipe)), ("batch", _batch(recipe)), ("data", _data(mixture)),
        ("optimizer", _optimizer(recipe)), ("precision", _precision(recipe)), ("layout", _layout(recipe, world)),
        ("device", _device(software, peak)), ("price", _price(recipe)),
    ]  # fmt: skip
    return [(fact_name, make_visible(text, LONGEST)) for fact_name, text in fact_lines if text]


def _section(recipe: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    section_tree = recipe.get(name)
    return section_tree if isinstance(section_tree, Mapping) else {}


def _number(value: object) -> int | float | None:
    return value if isinstance(value, int | float) and not isinstance(value, bool) else None


def _model(recipe: Mapping[str, Any]) -> str:
    try:
        c = ModelConfig.model_validate(_section(recipe, "model"))
        if c.vocab_size is None:
            return ""
        key_heads = f" and {c.kv_heads} of keys" if c.kv_heads not in (None, c.heads) else ""
        experts = c.experts
        experts_text = (
            "" if experts is None
            else f", {experts.top_k} of {experts.count} experts of {c.expert_width:,} in "
            f"{count_noun(c.layers - experts.first_dense, 'layer')}"
        )  # fmt: skip
        return (
            f"{shorten_number(count_parameters(c))} parameters: {count_noun(c.layers, 'layer')} of {c.hidden:,}, "
            f"{c.heads} heads{key_heads}, feed-forward {c.ffn_width:,}{experts_text}, vocabulary {c.vocab_size:,}"
        )
    except (ValidationError, TypeError, ValueError):
        return ""


def _batch(recipe: Mapping[str, Any]) -> str:
    train = _section(recipe, "train")
    samples, length = (
        _number(train.get("global_batch")),
        _number(_section(recipe, "model").get("sequence_length")),
    )
    if samples is None or length is None:
        return ""
    micro = _number(train.get("micro_batch"))
    micro_text = "" if micro is None else f", micro-batches of {micro:,}"
    grows = train.get("batch_warmup") or train.get("sequence_warmup")
    return f"{samples:,} samples of {length:,} tokens{micro_text}{'; smaller at first' if grows else ''}"


def _data(mixture: Sequence[tuple[str, float]]) -> str:
    total_weight = sum(corpus_weight for _, corpus_weight in mixture)
    if not mixture or total_weight <= 0:
        return ""
    named_corpora = ", ".join(
        make_visible(corpus_name, 60) + (f" {corpus_weight / total_weight:.3g}" if len(mixture) > 1 else "")
        for corpus_name, corpus_weight in mixture[:CORPORA]
    )
    return named_corpora + (f" and {len(mixture) - CORPORA} more" if len(mixture) > CORPORA else "")


def _optimizer(recipe: Mapping[str, Any]) -> str:
    given, schedule = _section(recipe, "optimizer"), _section(recipe, "schedule")
    told = [str(given.get("name", ""))]
    for setting_key, word in (("lr", "rate"), ("clip", "clipped at"), ("weight_decay", "weight decay")):
        if (setting_value := _number(given.get(setting_key))) is not None:
            told.append(f"{word} {setting_value:g}")
    if schedule.get("kind"):
        warmup_steps = _number(schedule.get("warmup_steps"))
        warmup_text = f" after {warmup_steps:,} steps of warm-up" if warmup_steps else ""
        told.append(f"{schedule['kind']}{warmup_text}")
    return ", ".join(word for word in told if word)


def _precision(recipe: Mapping[str, Any]) -> str:
    given = _section(recipe, "precision")
    return str(given.get("kind", "")) + (", products in FP8" if given.get("fp8") else "")


def _layout(recipe: Mapping[str, Any], world: int | None) -> str:
    given, told, replica_ranks = _section(recipe, "parallel"), list[str](), 1
    if not recipe:
        return count_noun(world, "rank") if world else ""
    for axis_name in ("tensor", "pipeline", "context"):
        size = given.get(axis_name)
        if isinstance(size, int) and size > 1:
            replica_ranks *= size
            told.append(f"{axis_name} {size}")
    if world:
        told.append(f"data {world // replica_ranks:,}")
    rank_text = f"{count_noun(world, 'rank')}: " if world else ""
    zero = given.get("zero")
    return rank_text + " × ".join(told) + (f", ZeRO {zero}" if isinstance(zero, int) and told else "")


def _device(software: Mapping[str, Any], peak: tuple[float, str] | None) -> str:
    device_parts = [str(software["device"])] if "device" in software else []
    if peak is not None:
        device_parts.append(f"peak {peak[0]:.3g} TFLOP/s ({peak[1]})")
    device_parts += [f"{name} {software[name]}" for name in SOFTWARE[1:] if name in software]
    return ", ".join(device_parts)


def _price(recipe: Mapping[str, Any]) -> str:
    given = _section(recipe, "supervise")
    hour_price = _number(given.get("gpu_hour_price"))
    return "" if hour_price is None else f"{hour_price:g} {given.get('currency', 'USD')} a GPU-hour"
