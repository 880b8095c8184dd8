"""Says in a few lines what a run trains, on what and how, from its frozen recipe and its newest start. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from pydantic import ValidationError

from megastable.base.text import plural, visible
from megastable.config.model import ModelConfig
from megastable.model.flops import parameters
from megastable.report.run_page.page_headline import short

LONGEST = 300  # characters of a line
CORPORA = 12  # that are named
SOFTWARE = ("device", "torch", "deepspeed", "transformer-engine", "megastable")


def recipe_facts(
    recipe: Mapping[str, Any], world: int | None, mixture: Sequence[tuple[str, float]], software: Mapping[str, Any],
    peak: tuple[float, str] | None,
) -> list[tuple[str, str]]:  # fmt: skip
    """Lines of (what, text). recipe: its sections; of any version, so that what it lacks is left out. world: ranks;
    mixture: corpora with their weights; software: see base/software.py; peak: TFLOP/s of a device, and its source."""
    found = [
        ("model", _model(recipe)), ("batch", _batch(recipe)), ("data", _data(mixture)),
        ("optimizer", _optimizer(recipe)), ("precision", _precision(recipe)), ("layout", _layout(recipe, world)),
        ("device", _device(software, peak)), ("price", _price(recipe)),
    ]  # fmt: skip
    return [(name, visible(text, LONGEST)) for name, text in found if text]


def _section(recipe: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    found = recipe.get(name)
    return found if isinstance(found, Mapping) else {}


def _number(value: object) -> int | float | None:
    return value if isinstance(value, int | float) and not isinstance(value, bool) else None


def _model(recipe: Mapping[str, Any]) -> str:
    try:
        c = ModelConfig.model_validate(_section(recipe, "model"))
        if c.vocab_size is None:
            return ""
        heads = f"{c.heads} heads" + (
            f" and {c.kv_heads} of keys" if c.kv_heads not in (None, c.heads) else ""
        )
        return (
            f"{short(parameters(c))} parameters: {plural(c.layers, 'layer')} of {c.hidden:,}, {heads}, "
            f"feed-forward {c.ffn_width:,}, vocabulary {c.vocab_size:,}"
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
    told = f"{samples:,} samples of {length:,} tokens"
    micro = _number(train.get("micro_batch"))
    told += "" if micro is None else f", micro-batches of {micro:,}"
    return told + ("; smaller at first" if train.get("batch_warmup") or train.get("sequence_warmup") else "")


def _data(mixture: Sequence[tuple[str, float]]) -> str:
    whole = sum(weight for _, weight in mixture)
    if not mixture or whole <= 0:
        return ""
    named = ", ".join(
        visible(name, 60) + (f" {weight / whole:.3g}" if len(mixture) > 1 else "")
        for name, weight in mixture[:CORPORA]
    )
    return named + (f" and {len(mixture) - CORPORA} more" if len(mixture) > CORPORA else "")


def _optimizer(recipe: Mapping[str, Any]) -> str:
    given, schedule = _section(recipe, "optimizer"), _section(recipe, "schedule")
    told = [str(given.get("name", ""))]
    for key, word in (("lr", "rate"), ("clip", "clipped at"), ("weight_decay", "weight decay")):
        if (value := _number(given.get(key))) is not None:
            told.append(f"{word} {value:g}")
    if schedule.get("kind"):
        steps = _number(schedule.get("warmup_steps"))
        told.append(str(schedule["kind"]) + (f" after {steps:,} steps of warm-up" if steps else ""))
    return ", ".join(word for word in told if word)


def _precision(recipe: Mapping[str, Any]) -> str:
    given = _section(recipe, "precision")
    return str(given.get("kind", "")) + (", products in FP8" if given.get("fp8") else "")


def _layout(recipe: Mapping[str, Any], world: int | None) -> str:
    given, told, replica = _section(recipe, "parallel"), list[str](), 1
    for name in ("tensor", "pipeline", "context"):
        size = given.get(name)
        if isinstance(size, int) and size > 1:
            replica *= size
            told.append(f"{name} {size}")
    if world:
        told.append(f"data {world // replica:,}")
    ranks = f"{plural(world, 'rank')}: " if world else ""
    zero = given.get("zero")
    return ranks + " × ".join(told) + (f", ZeRO {zero}" if isinstance(zero, int) and told else "")


def _device(software: Mapping[str, Any], peak: tuple[float, str] | None) -> str:
    told = [str(software["device"])] if "device" in software else []
    if peak is not None:
        told.append(f"peak {peak[0]:.3g} TFLOP/s ({peak[1]})")
    told += [f"{name} {software[name]}" for name in SOFTWARE[1:] if name in software]
    return ", ".join(told)


def _price(recipe: Mapping[str, Any]) -> str:
    given = _section(recipe, "supervise")
    price = _number(given.get("gpu_hour_price"))
    return "" if price is None else f"{price:g} {given.get('currency', 'USD')} a GPU-hour"
