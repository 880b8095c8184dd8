"""What `megastable plan` answers: the recipe's layout, what would be faster, in words and as numbers."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from megastable.base.errors import ConfigError
from megastable.base.free_memory import SHARE
from megastable.base.text import count_noun
from megastable.checkpoint.snapshot_budget import count_fitting
from megastable.config import deepspeed_json, recipe
from megastable.config.training import Fp8Config
from megastable.config.tree import RunConfig
from megastable.model.sizes import count_parameters
from megastable.report.figures import draw_figure
from megastable.report.text_output import TextOutput, make_table
from megastable_tools.plan import cluster as clusters
from megastable_tools.plan import search
from megastable_tools.plan.cluster import ClusterConfig
from megastable_tools.plan.memory import KINDS, Device, Kind, list_footprints
from megastable_tools.plan.search import GIB, HEADROOM, Choice, LayoutPlan, list_overrides, usable_bytes

UNITS = {"": 1.0, "K": 1e3, "M": 1e6, "B": 1e9, "T": 1e12}
ASSUMED = 128_000
MOST = 1e18  # tokens


@dataclass(frozen=True)
class Answer:
    """facts: all numbers, for programs. fits: whether something does, or the recipe's own layout if that was asked."""

    facts: dict[str, Any]
    fits: bool
    own: search.LayoutPlan | None
    found: search.SearchResult | None


def answer_plan(
    recipe_path: Path,
    overrides: Sequence[str],
    cluster_path: Path,
    gpus: int | None,
    tokens: str | None,
    top: int,
    vocab: int | None,
    fixed: bool,
    fp8: bool,
    quiet: bool = False,
) -> Answer:
    """Print and return it. Raises ConfigError."""
    out = TextOutput(quiet)
    config = recipe.load_recipe(recipe_path, overrides)
    if fp8 and config.model.experts is not None:
        raise ConfigError(
            "--fp8: Transformer Engine's layers do not take the tokens of one expert of many: leave it out"
        )
    if fp8 and (kind := config.precision.kind) != "bf16":
        raise ConfigError(f"--fp8: Transformer Engine's FP8 is beside bf16, and precision.kind is {kind}")
    cluster = clusters.load_cluster(cluster_path)
    if cluster.tflops.fp8 is None and (fp8 or config.precision.fp8):
        fp8_key = "--fp8" if fp8 else "precision.fp8"
        raise ConfigError(
            f"{fp8_key}: a GPU of {cluster.name} ({cluster_path}) does not compute in it: leave it out"
        )
    if (hour_price := config.supervise.gpu_hour_price) is not None:
        cluster = cluster.model_copy(update={"dollars_per_gpu_hour": hour_price})
    total_tokens = float(config.tokens) if tokens is None else _number(tokens)
    config, vocabulary_note = _with_vocabulary(config, recipe_path, vocab)
    notes = [vocabulary_note]
    if gpus is None:
        gpus = search.find_fewest_gpus(config, cluster)
        notes.append(
            f"--gpus is not given: {gpus}, the fewest on which the recipe's layout fits, or else is possible"
        )
    size_text = f"{in_short(count_parameters(config.model))} parameters"
    out.say_lines(
        f"{recipe_path}: {size_text} on {gpus:,} x {cluster.name}", *(f"note: {note}" for note in notes)
    )
    other_fp8 = None if config.precision.fp8 else Fp8Config()
    own = _own(config, gpus, cluster, fixed, out)
    if own is not None:
        _show(own, total_tokens, out)
        if fp8:
            precision = config.precision.model_copy(update={"fp8": other_fp8})
            other_plan = search.plan_layout(config.model_copy(update={"precision": precision}), gpus, cluster)
            out.say_lines("", compare_with_fp8(own, other_plan))
    found = None
    if not fixed:
        tried_precisions = [config.precision.fp8, other_fp8] if fp8 else [config.precision.fp8]
        found = search.search_layouts(config, gpus, cluster, tried_precisions)
        _suggest(found, own, config, top, cluster, total_tokens, out)
    facts = {
        "recipe": str(recipe_path), "cluster": cluster.name, "gpus": gpus, "notes": notes,
        "parameters": count_parameters(config.model), "vocabulary": config.model.vocab_size,
        "own": own and plan_tree(own, config, total_tokens),
        "fitting": found and len(found.plans),
        "suggestions": found and [plan_tree(plan, config, total_tokens) for plan in found.list_best()[:top]],
    }  # fmt: skip
    return Answer(facts, bool(found.plans) if found is not None else own is not None and own.fits, own, found)


def draw_answer(answer: Answer, title: str, path: Path) -> None:
    """Of the recipe's own layout, else of the best. Raises ConfigError where there is none."""
    own_plan = answer.own
    if own_plan is None and answer.found is not None:
        own_plan = next(iter(answer.found.list_best()), answer.found.nearest)
    if own_plan is None:
        raise ConfigError(f"--plot {path}: there is no layout to show")
    draw_plan(own_plan, title, path)


def _own(
    config: RunConfig, gpus: int, cluster: ClusterConfig, fixed: bool, out: TextOutput
) -> search.LayoutPlan | None:
    """The recipe's layout as it stands; None where it cannot be laid out on these GPUs, which is said."""
    try:
        deepspeed_json.size_of_data_parallel(config, gpus)
    except ConfigError as error:
        if fixed:
            raise
        out.say_lines("", f"the recipe's own layout is not possible here: {error}")
        return None
    return search.plan_layout(config, gpus, cluster)


def _show(own: search.LayoutPlan, total: float, out: TextOutput) -> None:
    out.say_lines("", f"THE RECIPE'S LAYOUT: {layout_in_words(own)}", "")
    out.show_table(make_memory_table(own))
    out.say_lines(say_whether_it_fits(own))
    if not own.fits:
        for other in search.list_remedies(own):
            gpus_text = "" if other.layout.world == own.layout.world else f"{other.layout.world:,} GPUs"
            change = " ".join(search.list_overrides(other.config, own.config)) or gpus_text
            out.say_lines(
                f"  would fit with {change}: {other.left / search.GIB:.2f} GiB left, {other.time.seconds:.3g} s a step"
            )
    out.say_lines(count_host_memory(own)[0], "")
    out.show_table(make_time_table(own))
    out.say_lines(summarize_speed(own, total))


def _suggest(
    found: search.SearchResult,
    own: search.LayoutPlan | None,
    config: RunConfig,
    top: int,
    cluster: ClusterConfig,
    total: float,
    out: TextOutput,
) -> None:
    if best_plans := found.list_best()[:top]:
        out.say_lines(
            "", f"SUGGESTIONS: the fastest of each tensor x pipeline, of {len(found.plans):,} that fit", ""
        )
        plan_table = make_suggestion_table(best_plans, own if own is not None and own.fits else None, total)
        out.show_table(plan_table, whole=True)
        if any(layout_plan.tight for layout_plan in best_plans):
            out.say_lines(f"! {TIGHT}", "")
        out.say_lines("what to say after the recipe:", *list_commands(best_plans, config))
        return
    if found.nearest is None:
        reason_text = f"nothing that the model allows divides train.global_batch={config.train.global_batch}"
        out.say_lines("", f"NO LAYOUT IS POSSIBLE on {count_noun(found.gpus, 'GPU')}: {reason_text}")
        if (other := search.other_batch(config, found.gpus, cluster)) is not None:
            words = [f"train.global_batch={other.config.train.global_batch}"]
            words += search.list_overrides(other.config, config)
            out.say_lines(f"with another batch it fits: {' '.join(words)}")
    else:
        nearest_text = f"{layout_in_words(found.nearest)}: it {say_whether_it_fits(found.nearest)}"
        out.say_lines("", f"NOTHING FITS on {count_noun(found.gpus, 'GPU')}. Nearest is {nearest_text}")
    if (other := search.find_other_gpus(config, found, cluster)) is not None:
        said, gpus = " ".join(search.list_overrides(other.config, config)), other.layout.world
        out.say_lines(f"on {count_noun(gpus, 'GPU')} it fits: --gpus {gpus}, {said or 'the recipe as it is'}")


def _number(text: str) -> float:
    """15T, 300B, 2e12."""
    number_match = re.fullmatch(r"([0-9]+\.?[0-9]*(?:[eE][0-9]+)?)\s*([KMBT]?)", text.strip(), re.IGNORECASE)
    read_number = float(number_match[1]) * UNITS[number_match[2].upper()] if number_match else 0.0
    if not 0 < read_number <= MOST:
        raise ConfigError(f"--tokens {text}: a number such as 15T, 300B or 2e12")
    return read_number


def _with_vocabulary(config: RunConfig, path: Path, given: int | None) -> tuple[RunConfig, str]:
    """The configuration with a size of the vocabulary, and where that comes from."""
    size, said = given or config.model.vocab_size, "as --vocab says" if given else "the recipe's"
    corpus_folders = [recipe.find_recipe(corpus.path) for corpus in config.data.corpora]
    if prepared_folders := [
        corpus_folder for corpus_folder in corpus_folders if (corpus_folder / "manifest.json").is_file()
    ]:
        from megastable.data.manifest import Manifest

        of_corpus = [(Manifest.load_manifest(f).tokenizer.vocab_size, f) for f in prepared_folders]
        corpus_size, largest = max(of_corpus, key=lambda sized: sized[0])
        if size is None:
            size, said = corpus_size, f"of the corpus {largest}"
        elif size < corpus_size:
            raise ConfigError(
                f"a vocabulary of {size}, {said}, is smaller than the {corpus_size} of the corpus {largest}: "
                "leave it out"
            )
    if size is None:
        # The recipes that come along say in their first lines what they are meant for.
        recipe_text = recipe.find_recipe(path).read_text(encoding="utf-8")
        size, said = ASSUMED, "assumed: there is no corpus yet; --vocab says another"
        if comment_match := re.search(r"vocabulary of ([\d,]+)", recipe_text):
            size, said = int(comment_match[1].replace(",", "")), "as the recipe's comment says"
    sized_model = config.model.model_copy(update={"vocab_size": size})
    return config.model_copy(update={"model": sized_model}), f"vocabulary {size:,}, {said}"


# Tables, a memory bar, all numbers as a tree for JSON, a picture


WIDTH = 72  # characters of a bar
# The bar must be readable without colours.
LETTERS: dict[Kind, str] = dict(zip(KINDS, "WGMOALB", strict=True))
_COLOURS = "blue cyan magenta green yellow red bright_black".split()
COLOURS: dict[Kind, str] = dict(zip(KINDS, _COLOURS, strict=True))
_PAINT = "tab:blue tab:cyan tab:purple tab:green tab:orange tab:red tab:gray".split()
PAINT: dict[Kind, str] = dict(zip(KINDS, _PAINT, strict=True))
TIGHT = f"That is less than {HEADROOM:.0%} of usable memory, the error of the prediction: try it for ten steps first"


def layout_in_words(found: LayoutPlan) -> str:
    """A layout in one line."""
    p, lay = found.config.parallel, found.layout
    axis_sizes = [("tensor", lay.tensor), ("pipeline", lay.pipeline), ("data", lay.data)]
    split = " x ".join(f"{axis_name} {size}" for axis_name, size in axis_sizes if size > 1) or "one rank"
    split += f" (context {lay.context}{', a ring' if p.is_ring else ''})" if lay.context > 1 else ""
    if p.sequence:
        split += ", sequence parallelism" + (" that keeps what it gathers" if p.keep_gathered else "")
    if p.tensor_overlap > 1:
        split += f" in {p.tensor_overlap} chunks"
    split += f", {p.replicas} replicas" if p.replicas > 1 else ""
    split += f", experts on {p.expert} data ranks" if p.expert > 1 else ""
    split += f", {p.model_chunks} model chunks a stage" if p.model_chunks > 1 else ""
    split += ", zero-bubble schedule" if p.schedule == "zero_bubble" else ""
    fp8_config, again = found.config.precision.fp8, "no" if p.recompute == "none" else p.recompute
    return (
        f"{split}, ZeRO {p.zero}, {again} recomputation, micro-batches of {found.config.train.micro_batch}, "
        f"{found.accumulation} a step" + (f", FP8 {fp8_config.recipe}" if fp8_config else "")
    )


# Memory


def draw_bar(found: LayoutPlan) -> Text:
    """The tightest GPU's memory at the peak of a step: a letter per kind, r the cluster's reserve, | its end."""
    gpu_bytes = found.cluster.memory_gib * GIB
    bar_parts: list[tuple[str, str, float]]
    bar_parts = [(LETTERS[kind], COLOURS[kind], size) for kind, size in found.tightest.kinds.items()]
    bar_parts.append(("r", "bright_black", found.cluster.reserve_gib * GIB))
    used_bytes = sum(size for *_, size in bar_parts)
    bytes_per_letter, bar_text, passed_bytes, at = max(gpu_bytes, used_bytes) / WIDTH, Text(), 0.0, 0
    for letter, part_colour, size in [*bar_parts, (".", "bright_black", max(gpu_bytes - used_bytes, 0.0))]:
        passed_bytes += size
        bar_text.append(letter * (round(passed_bytes / bytes_per_letter) - at), style=part_colour)
        at = round(passed_bytes / bytes_per_letter)
    end = round(gpu_bytes / bytes_per_letter)
    if used_bytes > gpu_bytes:
        bar_text = Text.assemble(bar_text[:end], "|", bar_text[end:])
    return Text.assemble("[", bar_text, "]")


def make_memory_table(found: LayoutPlan) -> RenderableType:
    """Bytes by kind on the tightest rank, with the largest items of each."""
    tight = found.tightest
    plan_table = make_table("", "kind", ">GiB", "of it")
    for kind, kind_bytes in tight.kinds.items():
        if kind_bytes:
            items = [(i.bytes, i.name) for i in tight.items if i.kind == kind and tight.peak in i.phases]
            most = sorted(items, reverse=True)[:3]
            inside_text = ", ".join(f"{item_name} {item_bytes / GIB:.2f}" for item_bytes, item_name in most)
            if len(items) == 1:
                inside_text = most[0][1]
            inside_text += f", {len(items) - 3} more" if len(items) > 3 else ""
            plan_table.add_row(LETTERS[kind], kind, f"{kind_bytes / GIB:.2f}", inside_text)
    usable_text = f"of {usable_bytes(found.cluster) / GIB:.2f} usable"
    plan_table.add_row("", "in all", f"{tight.total / GIB:.2f}", usable_text)
    plan_table.add_row("", "building", f"{tight.building / GIB:.2f}", "at most, before the first step")
    stage_text = "every rank"
    if found.layout.pipeline > 1:
        stage_text = f"stage {tight.stage}, the tightest of {found.layout.pipeline}"
    table_title = Text(f"memory of a GPU at its peak ({tight.peak}; {stage_text})")
    return Group(table_title, draw_bar(found), plan_table)


def say_whether_it_fits(found: LayoutPlan) -> str:
    """Whether it fits, and the excess by kind if it does not."""
    if found.fits:
        return f"fits: {found.left / GIB:.2f} GiB are left" + (f". {TIGHT}" if found.tight else "")
    kinds = found.tightest.kinds
    fixed = sum(kind_bytes for kind, kind_bytes in kinds.items() if kind not in ("activations", "logits"))
    worst_kind = max(kinds, key=lambda kind: kinds[kind])
    lacks = f"does not fit: {-found.left / GIB:.2f} GiB too much"
    if fixed > usable_bytes(found.cluster):
        return f"{lacks}. Weights, gradients and Adam's state alone take {fixed / GIB:.2f}: split the model further"
    return f"{lacks}; most of it {worst_kind}, {kinds[worst_kind] / GIB:.2f}"


def count_host_memory(found: LayoutPlan) -> tuple[str, dict[str, Any]]:
    """Host memory for snapshots and for the checkpoint written in the background: in words, in numbers."""
    h, snapshots = found.tightest.host, found.config.stability.snapshots
    ranks, memory = min(found.cluster.gpus_per_host, found.layout.world), found.cluster.host_memory_gib * GIB
    rank_budget = snapshots.memory_gib * GIB if snapshots.memory_gib else SHARE * memory / ranks
    most_points = count_fitting(h.points + 1, h.snapshot, rank_budget) if h.points else 0
    points, aside = min(most_points, h.points), most_points > h.points
    used_bytes = ranks * max(most_points * h.snapshot + h.checkpoint, h.building)
    numbers = {
        "snapshot_bytes": h.snapshot, "rewind_points_wanted": h.points, "rewind_points": points, "aside": aside,
        "checkpoint_bytes": h.checkpoint, "building_bytes": h.building,
        "host_bytes": used_bytes, "host_memory_bytes": int(memory), "fits": used_bytes <= memory,
    }  # fmt: skip
    host_text = f"host memory: {count_noun(points, 'snapshot')} of {h.snapshot / GIB:.2f} GiB"
    host_text += ", one more to look back on batches" if aside else ""
    host_text += f" and a checkpoint's copy of {h.checkpoint / GIB:.2f} a rank"
    host_text += f", {used_bytes / GIB:,.0f} GiB of {memory / GIB:,.0f} for {count_noun(ranks, 'rank')}"
    if points < h.points:
        host_text += f"; the recipe asks for {h.points} snapshots, which do not fit"
    if h.building:
        host_text += f"; before the first step up to {h.building / GIB:.2f} a rank"
    if ranks * h.building > memory:
        host_text += ": TOO MUCH; use more tensor or pipeline stages, or parallel.zero=3"
    elif used_bytes > memory:
        host_text += ": TOO MUCH; lower stability.snapshots.keep, or checkpoint.asynchronous=false"
    return host_text, numbers


# Time


def make_time_table(found: LayoutPlan) -> RenderableType:
    """Seconds of a step by activity, with the reason; traffic by link."""
    time = found.time
    parts = make_table("what", ">s", ">%", "because", title="time of a step")
    for line in sorted(time.lines, key=lambda line: -line.seconds):
        what = line.what if line.what in line.kind or line.kind in line.what else f"{line.what} ({line.kind})"
        parts.add_row(what, f"{line.seconds:.3f}", f"{100 * line.seconds / time.seconds:.1f}", line.because)
    if not time.traffic:
        return parts
    link_table = make_table("group", "link", ">ranks", ">GB", ">s", title="what a rank sends in a step")
    for t in sorted(time.traffic, key=lambda traffic: -traffic.seconds):
        link_table.add_row(t.group, t.link, str(t.ranks), f"{t.bytes / 1e9:,.3f}", f"{t.seconds:.3f}")
    return Group(parts, link_table)


def summarize_speed(found: LayoutPlan, tokens: float) -> str:
    """Speed, and time and cost of this many tokens."""
    time = found.time
    bubble_share, training_days = time.parts["bubble"] / time.seconds, time.count_days(tokens)
    return (
        f"step {time.seconds:.3g} s, {time.tokens_per_second:,.0f} tokens/s, MFU {time.mfu:.1%} ({time.mfu_causal:.1%} "
        f"counting half of attention), bubble {bubble_share:.1%}\n"
        f"{in_short(tokens)} tokens: {in_days(training_days)} days, ${time.count_dollars(tokens):,.0f} at "
        f"${time.price:g} per GPU and hour (without failures, evaluation and restarts)"
    )


SHORT_UNITS = ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "K"))


def in_days(days: float) -> str:
    return f"{days:,.0f}" if days >= 100 else f"{days:.1f}" if days >= 1 else f"{days:.2g}"


def in_short(number: float) -> str:
    """7.24B, 125M."""
    unit_size, unit_letter = next(
        (short_unit for short_unit in SHORT_UNITS if number >= short_unit[0]), (1.0, "")
    )
    return f"{number / unit_size:.3g}{unit_letter}"


# Suggestions


def make_suggestion_table(plans: Sequence[LayoutPlan], own: LayoutPlan | None, tokens: float) -> Table:
    """One row per plan, with days and cost of this many tokens; the commands are in `commands`."""
    eight = any(plan.config.precision.fp8 for plan in plans)
    has_experts = any(Choice.of(plan.config).expert > 1 for plan in plans)
    plan_table = make_table(
        "#", ">TP", ">PP", ">DP", ">CP", *([">EP"] * has_experts), ">ZeRO", ">mb x n", "recompute",
        *(["FP8"] * eight), ">GiB left", ">step s", ">MFU", ">bubble", ">days", ">$", *([">speed"] * (own is not None)),
    )  # fmt: skip
    plan_table.padding = (0, 1, 0, 0)
    for plan_number, found in enumerate(plans, 1):
        c, lay, time = Choice.of(found.config), found.layout, found.time
        table_row = [str(plan_number), *map(str, (lay.tensor, lay.pipeline, lay.data, lay.context))]
        table_row += [str(c.expert)] * has_experts + [str(c.zero)]
        table_row += [f"{c.micro_batch}x{found.accumulation}", c.recompute]
        table_row += [c.fp8.recipe if c.fp8 else "-"] if eight else []
        table_row += [f"{found.left / GIB:.1f}{'!' * found.tight}", f"{time.seconds:.3g}", f"{time.mfu:.1%}"]
        table_row += [f"{time.parts['bubble'] / time.seconds:.1%}", in_days(time.count_days(tokens))]
        table_row += [f"{time.count_dollars(tokens):,.0f}"]
        table_row += [f"x{own.time.seconds / time.seconds:.2f}"] if own is not None else []
        plan_table.add_row(*table_row)
    return plan_table


def list_commands(plans: Sequence[LayoutPlan], base: RunConfig) -> Iterator[str]:
    """Numbered overrides to add after the recipe, for each of `suggestions`. base: the recipe's RunConfig."""
    for plan_number, layout_plan in enumerate(plans, 1):
        yield f"{plan_number}: {' '.join(list_overrides(layout_plan.config, base)) or 'the recipe unchanged'}"


def compare_with_fp8(own: LayoutPlan, other: LayoutPlan) -> str:
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


def plan_tree(found: LayoutPlan, base: RunConfig, tokens: float) -> dict[str, Any]:
    """All numbers of a plan: bytes, seconds, dollars. base: the RunConfig that `overrides` start from."""
    c, lay, tight, time = found.config, found.layout, found.tightest, found.time
    return {
        "overrides": list_overrides(c, base),
        "layout": {
            "gpus": lay.world, "tensor": lay.tensor, "pipeline": lay.pipeline, "data": lay.data,
            "context": lay.context, "context_by": c.parallel.context_by, "replicas": lay.replicas,
            "sequence": c.parallel.sequence, "zero": c.parallel.zero,
            "recompute": c.parallel.recompute, "keep_gathered": c.parallel.keep_gathered,
            "schedule": c.parallel.schedule, "model_chunks": c.parallel.model_chunks,
            "tensor_overlap": c.parallel.tensor_overlap, "expert": c.parallel.expert,
            "micro_batch": c.train.micro_batch, "accumulation": found.accumulation,
            "fp8": c.precision.fp8 and c.precision.fp8.recipe,
        },
        "fits": found.fits,
        "memory": {
            "room_bytes": usable_bytes(found.cluster), "left_bytes": found.left, "stage": tight.stage,
            "peak_phase": tight.peak,
            "building_bytes": tight.building, "kinds_bytes": tight.kinds,
            "items": [
                {"kind": i.kind, "name": i.name, "bytes": i.bytes, "phases": list(i.phases)} for i in tight.items
            ],
        },
        "host": count_host_memory(found)[1],
        "time": {
            "seconds": time.seconds, "mfu": time.mfu, "mfu_causal": time.mfu_causal, "tflops_per_gpu": time.tflops,
            "tokens_per_second": time.tokens_per_second, "parts_seconds": time.parts,
            "lines": [vars(line) for line in time.lines], "traffic": [vars(t) for t in time.traffic],
        },
        "tokens": tokens, "days": time.count_days(tokens), "dollars": time.count_dollars(tokens),
    }  # fmt: skip


def draw_plan(found: LayoutPlan, title: str, path: Path) -> None:
    """Memory by kind of every stage, and the time of a step by part. The file name decides the format.

    Raises DataError when it cannot be written.
    """
    planned_device: Device = "cpu" if found.cluster.device == "cpu" else "cuda"
    stages = list_footprints(found.config, found.layout, device=planned_device)
    usable_gib = usable_bytes(found.cluster) / GIB
    usable_text = f"less {found.cluster.reserve_gib:g} in reserve"
    with draw_figure(path, 14, 5) as figure:
        left, time_axes = figure.subplots(1, 2, width_ratios=(3, 2))
        bar_bottoms = [0.0] * len(stages)
        for kind in KINDS:
            kind_sizes = [stage_footprint.kinds[kind] / GIB for stage_footprint in stages]
            if any(kind_sizes):
                left.bar(range(len(stages)), kind_sizes, bottom=bar_bottoms, label=kind, color=PAINT[kind])
                bar_bottoms = [a + bar_height for a, bar_height in zip(bar_bottoms, kind_sizes, strict=True)]
        left.axhline(found.cluster.memory_gib, color="black", linewidth=1, label="the GPU")
        left.axhline(usable_gib, color="black", linewidth=1, linestyle=":", label=usable_text)
        left.set(xlabel="pipeline stage", ylabel="GiB at the peak")
        left.legend(loc="center left", bbox_to_anchor=(1, 0.5))
        part_times = sorted(
            (seconds, part_kind) for part_kind, seconds in found.time.parts.items() if seconds > 0
        )
        part_seconds, part_kinds = zip(*part_times, strict=True)
        time_axes.barh(part_kinds, part_seconds, color="tab:blue")
        time_axes.set_xlabel(f"s, of a step of {found.time.seconds:.3g} s")
        figure.suptitle(f"{title}: {layout_in_words(found)}", parse_math=False, fontsize=10)
