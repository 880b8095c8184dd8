"""`show`: the facts of one checkpoint, and the statistics of its tensors recorded when it was written."""

from __future__ import annotations

import fnmatch
import math
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

from megastable.base.errors import CheckpointError
from megastable.base.text import duration, number, plural, size
from megastable.checkpoint import markers, store
from megastable.checkpoint.markers import Health
from megastable.checkpoint.pieces import PieceStatistics
from megastable.checkpoint.store import RunState
from megastable.checkpoint.whole import WholeState, run_of
from megastable.config.model import ModelConfig
from megastable.report.sheet import Column, Sheet
from megastable_tools.convert.verifying import checkpoints_of

COLUMNS = (
    Column("name", "tensor"),
    Column("shape", "shape"),
    Column("kind", "of"),
    Column("norm", "norm", "number"),
    Column("rms", "rms", "number"),
    Column("absmax", "max |x|", "number"),
    Column("mean", "mean", "number"),
    Column("nonfinite", "not finite", "count"),
    Column("elements", "elements", "count"),
)


@dataclass(frozen=True)
class Shown:
    """facts: a tree for JSON; sheet: a table with a row for each tensor."""

    facts: dict[str, Any]
    sheet: Sheet


def show(path: Path, pattern: str | None = None) -> Shown:
    """The checkpoint that `path` names (for a run its newest), not verified. pattern: of tensors, * and ? as in a
    shell.

    Raises CheckpointError, also if no tensor matches the pattern.
    """
    checkpoint = checkpoints_of(path)[0]
    contents, state, run = store.read_contents(checkpoint), store.read_state(checkpoint), run_of(checkpoint)
    whole = WholeState(checkpoint)

    def asked(name: str) -> bool:
        return pattern is None or fnmatch.fnmatchcase(name, pattern)

    rows = [row for name in filter(asked, whole.names) for row in _rows(whole, name)]
    rows += [
        {"name": name, "kind": "shared", "shape": list(tensor.shape), "elements": tensor.numel()}
        for name, tensor in whole.shared.items()
        if asked(name)
    ]
    if not rows:
        near = ", ".join(whole.names[:3])
        raise CheckpointError(f"{checkpoint}: no tensor is named like {pattern!r}; there are {near}, ...")
    count = sum(math.prod(whole.shape(name)) for name in whole.names)
    health, pinned, doubts = (
        markers.healthy(checkpoint),
        markers.pinned(checkpoint),
        markers.problems(checkpoint),
    )
    ruling, accepted = markers.convicted(checkpoint), markers.accepted(checkpoint)
    tree = {
        "checkpoint": str(checkpoint), "bytes": contents.size, "files": len(contents.files), "parameters": count,
        "optimizer": whole.stateful, "model": run.model.model_dump(mode="json"),
        "state": state.model_dump(exclude={"stability"}), "fingerprints": contents.fingerprints,
        "versions": contents.versions or state.versions, "finite": contents.finite,
        "health": health and health.model_dump(), "pinned": pinned and pinned.model_dump(), "markers": doubts,
        "convicted": ruling and ruling.model_dump(), "accepted": accepted and accepted.model_dump(),
        "tensors": rows,
    }  # fmt: skip
    facts = [
        ("model", _model(run.model)), ("parameters", f"{count:,}"),
        ("optimizer", f"{state.optimizer}, {state.adam_step:,.0f} updates" if whole.stateful else "none"),
        ("step", f"{state.step:,} ({plural(state.updates, 'update')})"), ("tokens", f"{state.tokens:,}"),
        ("data position", f"{state.cursor:,}"), ("trained for", duration(state.seconds)),
        ("loss", number(state.recent_loss)), ("layout", str(state.layout)),
        ("size", f"{size(contents.size)} in {plural(len(contents.files), 'file')}"),
        ("finite", "yes" if contents.finite else "no"),
        *((f"fingerprint of the {key}", value) for key, value in contents.fingerprints.items()),
        *((f"{key} that wrote it", value) for key, value in (contents.versions or state.versions).items()),
        ("healthy", _healthy(health)), ("probe samples", _probed(state)),
        *([("convicted", ruling.reason)] if ruling else []),
        *([("accepted", accepted.reason or "yes")] if accepted else []),
        *([("pinned", pinned.reason or "yes")] if pinned else []),
    ]  # fmt: skip
    lead = ["Not verified here: use verify for that."]
    return Shown(
        tree, Sheet(str(checkpoint), lead=lead, facts=facts, columns=COLUMNS, rows=rows, notes=doubts)
    )


def _healthy(health: Health | None) -> str:
    if health is None:
        return "not proven"
    return f"yes: {plural(health.steps, 'step')} after it stayed on trend, up to step {health.step:,}"


def _probed(state: RunState) -> str:
    if state.vitals is None or not state.vitals.losses:
        return "none: a start cannot check its losses"
    doubt = f"; {state.vitals.doubt}" if state.vitals.doubt else ""
    return f"{len(state.vitals.losses)}, mean loss {fmean(state.vitals.losses):.4f} when it was saved{doubt}"


def _model(model: ModelConfig) -> str:
    more, scaling = "", model.rope_scaling
    if model.tied:
        more += ", tied"
    if model.qkv_bias:
        more += ", biases of queries, keys and values"
    if scaling is not None:
        more += f", rotary scaling {scaling.kind} by {scaling.factor:g}"
    if model.max_positions is not None:
        more += f", positions up to {model.max_positions:,}"
    return (
        f"{plural(model.layers, 'layer')}, width {model.hidden:,}, {plural(model.heads, 'head')} of {model.head_width} "
        f"({model.key_value_heads} of keys and values), feed-forward {model.ffn_width:,}, "
        f"vocabulary {model.vocab_size:,}{more}"
    )


def _rows(whole: WholeState, name: str) -> Iterable[dict[str, Any]]:
    shape = whole.shape(name)
    for kind in whole.kinds_of(name):
        parts = [(piece.numel, piece.statistics.get(kind)) for piece in whole.pieces(name)]
        one = merged([(count, part) for count, part in parts if part is not None])
        elements = math.prod(shape)
        row = {"name": name, "kind": kind, "shape": list(shape), "elements": elements}
        if one is not None:
            row |= one.model_dump() | {"rms": one.norm / math.sqrt(elements) if elements else 0.0}
        yield row


def merged(parts: list[tuple[int, PieceStatistics]]) -> PieceStatistics | None:
    """Statistics of a tensor, from those of its pieces with their numbers of elements."""
    total = sum(count for count, _ in parts)
    if not total:
        return None
    absmax = [part.absmax for _, part in parts]
    return PieceStatistics(
        nonfinite=sum(part.nonfinite for _, part in parts),
        norm=math.sqrt(sum(part.norm**2 for _, part in parts)),
        absmax=math.nan if any(map(math.isnan, absmax)) else max(absmax),
        mean=math.fsum(part.mean * (count / total) for count, part in parts)
        if all(math.isfinite(part.mean) for _, part in parts)
        else sum(part.mean for _, part in parts),
    )
