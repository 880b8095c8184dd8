"""Present a plan: tables, a memory bar, all numbers as a tree for JSON, a picture."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from megastable.base.free_memory import SHARE
from megastable.base.text import plural
from megastable.checkpoint.snapshot_budget import capacity
from megastable.config.tree import RunConfig
from megastable.report.figures import draw_figure
from megastable.report.text_output import make_table
from megastable_tools.plan.memory import KINDS, Device, Footprint, Kind, footprints
from megastable_tools.plan.search import GIB, HEADROOM, Choice, LayoutPlan, overrides, room

if TYPE_CHECKING:
    from matplotlib.figure import Figure

WIDTH = 72  # characters of a bar
# The bar must be readable without colours.
LETTERS: dict[Kind, str] = dict(zip(KINDS, "WGMOALB", strict=True))
COLOURS: dict[Kind, str] = dict(
    zip(KINDS, ("blue", "cyan", "magenta", "green", "yellow", "red", "bright_black"), strict=True)
)
PAINT = {kind: f"tab:{colour}" for kind, colour in zip(
    KINDS, ("blue", "cyan", "purple", "green", "orange", "red", "gray"), strict=True
)}  # fmt: skip
TIGHT = (
    f"That is less than {HEADROOM:.0%} of usable memory, the error of the prediction: try it "
    "for ten steps first"
)


def layout_in_words(found: LayoutPlan) -> str:
    """A layout in one line."""
    p, lay = found.config.parallel, found.layout
    axes = [("tensor", lay.tensor), ("pipeline", lay.pipeline), ("data", lay.data)]
    split = " x ".join(f"{name} {size}" for name, size in axes if size > 1) or "one rank"
    split += f" (context {lay.context})" if lay.context > 1 else ""
    split += ", sequence parallelism" if p.sequence else ""
    fp8, again = found.config.precision.fp8, "no" if p.recompute == "none" else p.recompute
    return (
        f"{split}, ZeRO {p.zero}, {again} recomputation, micro-batches of {found.config.train.micro_batch}, "
        f"{found.accumulation} a step" + (f", FP8 {fp8.recipe}" if fp8 else "")
    )


# Memory


def bar(found: LayoutPlan) -> Text:
    """The tightest GPU's memory at the peak of a step: a letter per kind, r the cluster's reserve, | its end."""
    whole = found.cluster.memory_gib * GIB
    parts: list[tuple[str, str, float]]
    parts = [(LETTERS[kind], COLOURS[kind], size) for kind, size in found.tightest.kinds.items()]
    parts.append(("r", "bright_black", found.cluster.reserve_gib * GIB))
    used = sum(size for *_, size in parts)
    unit, shown, passed, at = max(whole, used) / WIDTH, Text(), 0.0, 0
    for letter, colour, size in [*parts, (".", "bright_black", max(whole - used, 0.0))]:
        passed += size
        shown.append(letter * (round(passed / unit) - at), style=colour)
        at = round(passed / unit)
    end = round(whole / unit)
    if used > whole:
        shown = Text.assemble(shown[:end], "|", shown[end:])
    return Text.assemble("[", shown, "]")


def memory(found: LayoutPlan) -> RenderableType:
    """Bytes by kind on the tightest rank, with the largest items of each."""
    tight = found.tightest
    table = make_table("", "kind", ">GiB", "of it")
    for kind, size in tight.kinds.items():
        if size:
            items = [(i.bytes, i.name) for i in tight.items if i.kind == kind and tight.peak in i.phases]
            most = sorted(items, reverse=True)[:3]
            inside = (
                ", ".join(f"{name} {bytes / GIB:.2f}" for bytes, name in most)
                if len(items) > 1
                else most[0][1]
            )
            inside += f", {len(items) - 3} more" if len(items) > 3 else ""
            table.add_row(LETTERS[kind], kind, f"{size / GIB:.2f}", inside)
    table.add_row("", "in all", f"{tight.total / GIB:.2f}", f"of {room(found.cluster) / GIB:.2f} usable")
    table.add_row("", "building", f"{tight.building / GIB:.2f}", "at most, before the first step")
    stage = (
        f"stage {tight.stage}, the tightest of {found.layout.pipeline}"
        if found.layout.pipeline > 1
        else "every rank"
    )
    title = Text(f"memory of a GPU at its peak ({tight.peak}; {stage})")
    return Group(title, bar(found), table)


def verdict(found: LayoutPlan) -> str:
    """Whether it fits, and the excess by kind if it does not."""
    if found.fits:
        return f"fits: {found.left / GIB:.2f} GiB are left" + (f". {TIGHT}" if found.tight else "")
    kinds = found.tightest.kinds
    fixed = sum(size for kind, size in kinds.items() if kind not in ("activations", "logits"))
    worst = max(kinds, key=lambda kind: kinds[kind])
    lacks = f"does not fit: {-found.left / GIB:.2f} GiB too much"
    if fixed > room(found.cluster):
        return f"{lacks}. Weights, gradients and Adam's state alone take {fixed / GIB:.2f}: split the model further"
    return f"{lacks}; most of it {worst}, {kinds[worst] / GIB:.2f}"


def host(found: LayoutPlan) -> tuple[str, dict[str, Any]]:
    """Host memory for snapshots and for the checkpoint written in the background: in words, in numbers."""
    h, snapshots = found.tightest.host, found.config.stability.snapshots
    ranks, memory = min(found.cluster.gpus_per_host, found.layout.world), found.cluster.host_memory_gib * GIB
    budget = snapshots.memory_gib * GIB if snapshots.memory_gib else SHARE * memory / ranks
    most = capacity(h.points + 1, h.snapshot, budget) if h.points else 0
    points, aside = min(most, h.points), most > h.points
    used = ranks * max(most * h.snapshot + h.checkpoint, h.building)
    numbers = {
        "snapshot_bytes": h.snapshot, "rewind_points_wanted": h.points, "rewind_points": points, "aside": aside,
        "checkpoint_bytes": h.checkpoint, "building_bytes": h.building,
        "host_bytes": used, "host_memory_bytes": int(memory), "fits": used <= memory,
    }  # fmt: skip
    text = f"host memory: {plural(points, 'snapshot')} of {h.snapshot / GIB:.2f} GiB"
    text += ", one more to look back on batches" if aside else ""
    text += f" and a checkpoint's copy of {h.checkpoint / GIB:.2f} a rank"
    text += f", {used / GIB:,.0f} GiB of {memory / GIB:,.0f} for {plural(ranks, 'rank')}"
    if points < h.points:
        text += f"; the recipe asks for {h.points} snapshots, which do not fit"
    if h.building:
        text += f"; before the first step up to {h.building / GIB:.2f} a rank"
    if ranks * h.building > memory:
        text += ": TOO MUCH; use more tensor or pipeline stages, or parallel.zero=3"
    elif used > memory:
        text += ": TOO MUCH; lower stability.snapshots.keep, or checkpoint.asynchronous=false"
    return text, numbers


# Time


def timing(found: LayoutPlan) -> RenderableType:
    """Seconds of a step by activity, with the reason; traffic by link."""
    time = found.time
    parts = make_table("what", ">s", ">%", "because", title="time of a step")
    for line in sorted(time.lines, key=lambda line: -line.seconds):
        what = line.what if line.what in line.kind or line.kind in line.what else f"{line.what} ({line.kind})"
        parts.add_row(what, f"{line.seconds:.3f}", f"{100 * line.seconds / time.seconds:.1f}", line.because)
    if not time.traffic:
        return parts
    links = make_table("group", "link", ">ranks", ">GB", ">s", title="what a rank sends in a step")
    for t in sorted(time.traffic, key=lambda traffic: -traffic.seconds):
        links.add_row(t.group, t.link, str(t.ranks), f"{t.bytes / 1e9:,.3f}", f"{t.seconds:.3f}")
    return Group(parts, links)


def summary(found: LayoutPlan, tokens: float) -> str:
    """Speed, and time and cost of this many tokens."""
    time = found.time
    bubble, days = time.parts["bubble"] / time.seconds, time.days(tokens)
    return (
        f"step {time.seconds:.3g} s, {time.tokens_per_second:,.0f} tokens/s, MFU {time.mfu:.1%} ({time.mfu_causal:.1%} "
        f"counting half of attention), bubble {bubble:.1%}\n"
        f"{in_short(tokens)} tokens: {in_days(days)} days, ${time.dollars(tokens):,.0f} at "
        f"${time.price:g} per GPU and hour (without failures, evaluation and restarts)"
    )


UNITS = ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "K"))


def in_days(days: float) -> str:
    return f"{days:,.0f}" if days >= 100 else f"{days:.1f}" if days >= 1 else f"{days:.2g}"


def in_short(number: float) -> str:
    """7.24B, 125M."""
    size, unit = next((pair for pair in UNITS if number >= pair[0]), (1.0, ""))
    return f"{number / size:.3g}{unit}"


# Suggestions


def suggestions(plans: Sequence[LayoutPlan], own: LayoutPlan | None, tokens: float) -> Table:
    """One row per plan, with days and cost of this many tokens; the commands are in `commands`."""
    eight = any(plan.config.precision.fp8 for plan in plans)
    table = make_table(
        "#", ">TP", ">PP", ">DP", ">CP", ">ZeRO", ">mb x n", "recompute", *(["FP8"] * eight), ">GiB left", ">step s",
        ">MFU", ">bubble", ">days", ">$", *([">speed"] * (own is not None)),
    )  # fmt: skip
    table.padding = (0, 1, 0, 0)
    for number, found in enumerate(plans, 1):
        c, lay, time = Choice.of(found.config), found.layout, found.time
        row = [str(number), *map(str, (lay.tensor, lay.pipeline, lay.data, lay.context, c.zero))]
        row += [f"{c.micro_batch}x{found.accumulation}", c.recompute]
        row += [c.fp8.recipe if c.fp8 else "-"] if eight else []
        row += [f"{found.left / GIB:.1f}{'!' * found.tight}", f"{time.seconds:.3g}", f"{time.mfu:.1%}"]
        row += [f"{time.parts['bubble'] / time.seconds:.1%}", in_days(time.days(tokens))]
        row += [f"{time.dollars(tokens):,.0f}"]
        row += [f"x{own.time.seconds / time.seconds:.2f}"] if own is not None else []
        table.add_row(*row)
    return table


def commands(plans: Sequence[LayoutPlan], base: RunConfig) -> Iterator[str]:
    """Numbered overrides to add after the recipe, for each of `suggestions`. base: the recipe's RunConfig."""
    for number, found in enumerate(plans, 1):
        yield f"{number}: {' '.join(overrides(found.config, base)) or 'the recipe unchanged'}"


def with_and_without(own: LayoutPlan, other: LayoutPlan) -> str:
    """The same layout in FP8 and without; `other` is the variant that the recipe does not choose."""
    eight, bf16 = (own, other) if own.config.precision.fp8 else (other, own)
    assert eight.config.precision.fp8 is not None
    gain, more = bf16.time.seconds / eight.time.seconds, (eight.tightest.total - bf16.tightest.total) / GIB
    return (
        f"FP8 ({eight.config.precision.fp8.recipe}) in this layout: a step of {eight.time.seconds:.3g} s for "
        f"{bf16.time.seconds:.3g} s, x {gain:.2f}; {abs(more):.2f} GiB {'more' if more > 0 else 'less'} memory, "
        f"{'fits' if eight.fits else 'does not fit'} (MFU is of the bf16 peak throughout)"
    )


# For programs


def tree(found: LayoutPlan, base: RunConfig, tokens: float) -> dict[str, Any]:
    """All numbers of a plan: bytes, seconds, dollars. base: the RunConfig that `overrides` start from."""
    c, lay, tight, time = found.config, found.layout, found.tightest, found.time
    return {
        "overrides": overrides(c, base),
        "layout": {
            "gpus": lay.world, "tensor": lay.tensor, "pipeline": lay.pipeline, "data": lay.data,
            "context": lay.context, "sequence": c.parallel.sequence, "zero": c.parallel.zero,
            "recompute": c.parallel.recompute, "micro_batch": c.train.micro_batch,
            "accumulation": found.accumulation, "fp8": c.precision.fp8 and c.precision.fp8.recipe,
        },
        "fits": found.fits,
        "memory": {
            "room_bytes": room(found.cluster), "left_bytes": found.left, "stage": tight.stage, "peak_phase": tight.peak,
            "building_bytes": tight.building, "kinds_bytes": tight.kinds,
            "items": [
                {"kind": i.kind, "name": i.name, "bytes": i.bytes, "phases": list(i.phases)} for i in tight.items
            ],
        },
        "host": host(found)[1],
        "time": {
            "seconds": time.seconds, "mfu": time.mfu, "mfu_causal": time.mfu_causal, "tflops_per_gpu": time.tflops,
            "tokens_per_second": time.tokens_per_second, "parts_seconds": time.parts,
            "lines": [vars(line) for line in time.lines], "traffic": [vars(t) for t in time.traffic],
        },
        "tokens": tokens, "days": time.days(tokens), "dollars": time.dollars(tokens),
    }  # fmt: skip


def picture(found: LayoutPlan, title: str, path: Path) -> None:
    """Memory by kind of every stage, and the time of a step by part. The file name decides the format.

    Raises DataError when it cannot be written.
    """
    device: Device = "cpu" if found.cluster.device == "cpu" else "cuda"
    stages = footprints(found.config, found.layout, device=device)
    with draw_figure(path, 14, 5) as figure:
        _draw(found, stages, figure)
        figure.suptitle(f"{title}: {layout_in_words(found)}", parse_math=False, fontsize=10)


def _draw(found: LayoutPlan, stages: Sequence[Footprint], figure: Figure) -> None:
    left, right = figure.subplots(1, 2, width_ratios=(3, 2))
    bottom = [0.0] * len(stages)
    for kind in KINDS:
        sizes = [stage.kinds[kind] / GIB for stage in stages]
        if any(sizes):
            left.bar(range(len(stages)), sizes, bottom=bottom, label=kind, color=PAINT[kind])
            bottom = [a + b for a, b in zip(bottom, sizes, strict=True)]
    left.axhline(found.cluster.memory_gib, color="black", linewidth=1, label="the GPU")
    usable = f"less {found.cluster.reserve_gib:g} in reserve"
    left.axhline(room(found.cluster) / GIB, color="black", linewidth=1, linestyle=":", label=usable)
    left.set(xlabel="pipeline stage", ylabel="GiB at the peak")
    left.legend(loc="center left", bbox_to_anchor=(1, 0.5))
    parts = {kind: seconds for kind, seconds in found.time.parts.items() if seconds > 0}
    shown = sorted(parts, key=lambda kind: parts[kind])
    right.barh(shown, [parts[kind] for kind in shown], color="tab:blue")
    right.set_xlabel(f"s, of a step of {found.time.seconds:.3g} s")
