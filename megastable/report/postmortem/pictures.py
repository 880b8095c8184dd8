"""Draws an incident: the steps around it, and the tokens of the bad samples beside those of their corpus.

Without pyplot, which would leave global state in the process.
"""

from __future__ import annotations

import io
import math
from collections.abc import Callable, Sequence
from functools import wraps
from typing import TYPE_CHECKING, Any, ParamSpec

import numpy as np

from megastable.base.text import escape_character, make_visible
from megastable.report.figures import limit_value
from megastable.report.postmortem.expert_facts import LoadLook
from megastable.report.postmortem.facts import Evidence, RegionFacts, StepRow
from megastable.report.postmortem.sample_texts import Tokens
from megastable.report.postmortem.sentences import find_rate_jump
from megastable.report.postmortem.trial_facts import BranchFacts, TrialFacts

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Given = ParamSpec("Given")
INK, FAINT, GRID = "#1f2933", "#8a94a0", "#e6e9ed"
BAD, GOOD = "#d1495b", "#1f6fb2"
ABOVE = "#c2620e"  # loads above the mean
BRANCHES = (
    "#2a9d6f", "#8e5bb5", "#d9822b", "#1f6fb2", "#c2417c", "#7a6a3a", "#17a2b8", "#9c3f1e", "#7fae2e", "#6b6be0"
)  # colours of a trial's branches  # fmt: skip
LABEL = 16  # characters shown of a token
LABEL_OF_BRANCH = 28  # characters shown of its name
STYLE: dict[Any, Any] = {
    "font.family": "DejaVu Sans", "font.size": 9.5, "axes.edgecolor": FAINT, "axes.labelcolor": INK,
    "xtick.color": FAINT, "ytick.color": FAINT, "xtick.labelcolor": INK, "ytick.labelcolor": INK,
    "axes.spines.top": False, "axes.spines.right": False, "axes.grid": True, "grid.color": GRID,
    "grid.linewidth": 0.8, "axes.axisbelow": True, "axes.titlesize": 10.5, "axes.titleweight": "bold",
    "axes.titlelocation": "left", "legend.frameon": False, "text.color": INK
}  # fmt: skip


def _as_png(draw: Callable[Given, Figure]) -> Callable[Given, bytes]:
    @wraps(draw)
    def draw_png(*given: Given.args, **named: Given.kwargs) -> bytes:
        from matplotlib import rc_context

        png_buffer = io.BytesIO()
        with rc_context(STYLE):
            # Without the library's version in it, the same facts give the same bytes.
            draw(*given, **named).savefig(png_buffer, format="png", dpi=130, metadata={"Software": None})
        return png_buffer.getvalue()

    return draw_png


@_as_png
def draw_steps(e: Evidence) -> Figure:
    """Loss, gradient norm and, if it was cut or has jumped, the learning rate around an incident with steps."""
    rate_cut = bool({"cut_lr", "cap_lr"} & set(e.incident.actions)) or find_rate_jump(e) is not None
    panels = [("loss", "loss (nats per token)"), ("grad_norm", "gradient norm")]
    panels += [("lr", "learning rate")] if rate_cut else []
    return _stack_panels(e, panels, [3, 2, 1][: len(panels)], 6.2 if rate_cut else 5.2)


@_as_png
def draw_routers(e: Evidence) -> Figure:
    """The routed experts of the worst layer around an incident; idle ones if there were some."""
    panels = [
        ("expert_violation", "largest load\n(times the mean)"), ("expert_idle", "idle experts\n(share)"),
        ("router_entropy", "lowest entropy of\na router (nats)"), ("router_z", "log-partition\nof a router"),
    ]  # fmt: skip
    all_rows = [row for run_pass in e.passes for row in run_pass]
    shown_panels = [
        (column, label) for column, label in panels if any(getattr(row, column) for row in all_rows)
    ]
    return _stack_panels(e, shown_panels, [1] * len(shown_panels), 0.8 + 1.6 * len(shown_panels))


def _stack_panels(
    e: Evidence, panels: Sequence[tuple[str, str]], ratios: Sequence[int], height: float
) -> Figure:
    """Columns of the steps, with their labels, from above. height: of all, in inches."""
    from matplotlib.lines import Line2D

    figure = _figure(10, height)
    axes = figure.subplots(len(panels), 1, sharex=True, height_ratios=ratios, squeeze=False)
    for axis, (panel_name, label) in zip(axes[:, 0], panels, strict=True):
        _panel(axis, e, panel_name, panel_name == panels[0][0])
        axis.set_ylabel(label)
    all_rows = [row for run_pass in e.passes for row in run_pass]
    signs = [Line2D([], [], color=GOOD, label="the run")]
    if len(e.passes) > 1:
        signs.append(Line2D([], [], color=BAD, label="undone, and done again"))
    if not all(all_row.applied for all_row in all_rows):
        cross: dict[str, Any] = {"marker": "x", "linewidth": 0, "markeredgewidth": 1.9}
        signs.append(Line2D([], [], color=BAD, label="update refused", **cross))
    if not all(
        math.isfinite(limit_value(v)) for all_row in all_rows for v in (all_row.loss, all_row.grad_norm)
    ):
        signs.append(Line2D([], [], color=BAD, marker="^", linewidth=0, label="not finite"))
    figure.legend(handles=signs, loc="outside lower center", ncols=4, handlelength=1.6, columnspacing=2)
    axes[-1, 0].set_xlabel("step")
    return figure


def _panel(axis: Axes, e: Evidence, name: str, named: bool) -> None:
    from matplotlib.ticker import MaxNLocator, NullFormatter

    is_log = name == "grad_norm"
    standing_rows, undone_parts = split_standing(e.passes)
    for undone_part in undone_parts:
        _line(axis, undone_part, name, is_log, color=BAD, linewidth=1.4, zorder=4)
    _line(axis, standing_rows, name, is_log, color=GOOD, linewidth=1.5, zorder=3)
    refused_rows = [row for pass_part in e.passes for row in pass_part if not row.applied and name != "lr"]
    if refused_rows:
        mark_style: dict[str, Any] = {"color": BAD, "marker": "x", "s": 44, "linewidths": 1.9, "zorder": 6}
        refused_values = [limit_value(getattr(refused_row, name), is_log) for refused_row in refused_rows]
        axis.scatter([refused_row.step for refused_row in refused_rows], refused_values, **mark_style)
    lost = [row for part in e.passes for row in part if not math.isfinite(limit_value(getattr(row, name)))]
    if lost and name in ("loss", "grad_norm"):
        top_style: dict[str, Any] = {"transform": axis.get_xaxis_transform(), "clip_on": False, "zorder": 7}
        axis.scatter([row.step for row in lost], [0.97] * len(lost), marker="^", color=BAD, s=36, **top_style)
    norms = [v for part in e.passes for row in part if (v := limit_value(row.grad_norm, True)) > 0]
    if is_log and norms:
        axis.set_yscale("log")
        axis.yaxis.set_major_formatter("{x:g}")
        if max(norms) < 4 * min(norms):  # less than a power of ten between them
            axis.yaxis.set_major_locator(MaxNLocator(4))
            axis.yaxis.set_minor_formatter(NullFormatter())
        else:
            axis.yaxis.set_minor_formatter(lambda value, _: f"{value:g}" if f"{value:e}"[0] in "235" else "")
    _marks(axis, e, named)
    axis.xaxis.set_major_locator(MaxNLocator(8, integer=True, steps=[1, 2, 5, 10]))
    axis.margins(x=0.01, y=0.12)


def split_standing(passes: Sequence[Sequence[StepRow]]) -> tuple[list[StepRow], list[list[StepRow]]]:
    """The steps that stayed, in order, and those that were repeated, a list for each rewind.

    Each of the latter begins with the step before it, if there is one, so that a line joins them.
    """
    standing_rows, undone_parts = list[StepRow](), list[list[StepRow]]()
    for run_pass in passes:
        kept_rows = [step_row for step_row in standing_rows if step_row.step < run_pass[0].step]
        if len(kept_rows) < len(standing_rows):
            undone_parts.append([*kept_rows[-1:], *standing_rows[len(kept_rows) :]])
        standing_rows = [*kept_rows, *run_pass]
    return standing_rows, undone_parts


def _line(axis: Axes, rows: Sequence[StepRow], name: str, log: bool, **style: Any) -> None:
    values = [limit_value(getattr(row, name), log) for row in rows]
    marker = "o" if len(rows) == 1 else None
    axis.plot([row.step for row in rows], values, marker=marker, markersize=3.5, **style)


def _marks(axis: Axes, e: Evidence, named: bool) -> None:
    i = e.incident
    at = [(i.onset, "onset"), (i.step, "acted on"), *((s, "back to") for s in e.back_to[-1:])]
    at += [(e.healed_at, "healed")] if e.healed_at is not None else []
    shown: dict[int, list[str]] = {}
    for step, mark_name in at:
        shown.setdefault(step, []).append(mark_name)
    axis.axvspan(i.onset - 0.5, max(i.step, i.onset) + 0.5, color=BAD, alpha=0.08, linewidth=0, zorder=0)
    first_step, last_step = min(r.step for p in e.passes for r in p), max(r.step for p in e.passes for r in p)
    groups: list[list[int]] = []
    for step in sorted(shown):
        colour = GOOD if "healed" in shown[step] else FAINT
        axis.axvline(step, color=colour, linewidth=1, linestyle=(0, (3, 3)), zorder=1)
        if groups and step - groups[-1][0] < 0.05 * (last_step - first_step):
            groups[-1].append(step)
        else:
            groups.append([step])
    if not named:
        return
    # Above the plot, where they hide nothing; a label that would touch its neighbour is raised.
    free_from = -math.inf
    for group in groups:
        label_text = " · ".join(f"{mark_name} {step:,}" for step in group for mark_name in shown[step])
        label_width = 0.0083 * len(label_text) * (last_step - first_step)
        is_right = group[-1] - label_width > first_step and (
            "healed" not in label_text or group[0] + label_width > last_step
        )
        label_begin = group[-1] - label_width if is_right else group[0]
        label_level = int(label_begin < free_from)
        free_from = max(free_from, label_begin + label_width)
        axis.annotate(
            label_text, (group[-1 if is_right else 0], 1), xycoords=("data", "axes fraction"),
            ha="right" if is_right else "left", xytext=(0, 4 + 13 * label_level), textcoords="offset points",
            fontsize=8.8, parse_math=False,
        )  # fmt: skip


def draw_branches(trial: TrialFacts, passes: Sequence[Sequence[StepRow]]) -> Figure:
    """The losses of a trial's branches and of the run over the same steps, and the loss of the data to come after each
    branch, to be drawn with `STYLE`. passes: recorded steps of the run."""
    from matplotlib.ticker import MaxNLocator

    figure = _figure(10, max(4.4, 2.6 + 0.3 * len(trial.branches)))
    steps, coming = figure.subplots(1, 2, width_ratios=[5, 3])
    hues = [*BRANCHES[: len(trial.branches)], *[FAINT] * (len(trial.branches) - len(BRANCHES))]
    first_step, last_step = trial.snapshot, max(trial.last, trial.step)
    inside = [[row for row in run_pass if first_step <= row.step <= last_step] for run_pass in passes]
    _draw_run(steps, inside)
    for branch, branch_hue in zip(trial.branches, hues, strict=True):
        at = range(trial.snapshot + 1, trial.snapshot + 1 + len(branch.losses))
        is_chosen = branch.name == trial.chosen
        steps.plot(
            at, [limit_value(loss) for loss in branch.losses], color=branch_hue, zorder=4,
            linewidth=2.0 if is_chosen else 1.4, label=_name(branch, trial),
            marker="." if len(branch.losses) < 2 else None,
        )  # fmt: skip
    steps.axvline(trial.snapshot, color=FAINT, linewidth=1, linestyle=(0, (3, 3)), zorder=1)
    steps.annotate(
        f"snapshot: after step {trial.snapshot:,}", (trial.snapshot, 1), xycoords=("data", "axes fraction"),
        xytext=(0, 4), textcoords="offset points", fontsize=8.8,
    )  # fmt: skip
    steps.set_xlabel("step")
    steps.set_ylabel("loss of the step's own batch (nats per token)")
    steps.xaxis.set_major_locator(MaxNLocator(8, integer=True, steps=[1, 2, 5, 10]))
    steps.margins(x=0.02, y=0.12)
    _draw_differences(coming, trial, hues)
    figure.legend(*steps.get_legend_handles_labels(), loc="outside lower center", ncols=3, handlelength=1.8)
    return figure


branches_picture = _as_png(draw_branches)


def _draw_run(axis: Axes, passes: Sequence[Sequence[StepRow]]) -> None:
    """The recorded steps of a trial's window: what stayed, what was undone, what was refused."""
    standing_rows, undone_parts = split_standing([part for part in passes if part])
    for part_number, part in enumerate(undone_parts):
        label = "the run: undone steps" if part_number == 0 else None
        dashes = (0, (2, 1.5))
        _line(axis, part, "loss", False, color=FAINT, linewidth=2.2, linestyle=dashes, zorder=3, label=label)
    if standing_rows:
        _line(axis, standing_rows, "loss", False, color=INK, linewidth=2.2, zorder=3, label="the run")
    refused = [row for part in passes for row in part if not row.applied]
    if refused:
        axis.scatter(
            [row.step for row in refused], [limit_value(row.loss) for row in refused], color=BAD, marker="x", s=44,
            linewidths=1.9, zorder=6, label="the run: update refused",
        )  # fmt: skip


def _draw_differences(axis: Axes, trial: TrialFacts, hues: Sequence[str]) -> None:
    """For each branch a point with its standard error, the first one at the top."""
    known = [limit_value(branch.difference) for branch in trial.branches]
    for row_place, (branch, value, hue) in enumerate(zip(trial.branches, known, hues, strict=True)):
        error = limit_value(branch.error)
        axis.errorbar(
            value, row_place, xerr=None if math.isnan(error) else error, fmt="o", color=hue, markersize=6, capsize=3,
        )  # fmt: skip
        if math.isnan(value):
            axis.annotate("not finite", (0, row_place), color=BAD, ha="center", va="center", fontsize=8.8)
    axis.axvline(0, color=FAINT, linewidth=1, zorder=1)
    branch_names = [_name(branch, trial).replace(" (", "\n(") for branch in trial.branches]
    axis.set_yticks(range(len(known)), branch_names)
    axis.set_ylim(len(known) - 0.4, -0.6)
    axis.tick_params(axis="y", length=0)
    axis.margins(x=0.15)
    axis.grid(axis="y", visible=False)
    axis.set_xlabel(
        "loss of the data to come,\nminus the control ± standard error\n(nats per token; left is better)"
    )


def _name(branch: BranchFacts, trial: TrialFacts) -> str:
    shown_name = make_visible(branch.label, LABEL_OF_BRANCH).replace("$", r"\$")
    branch_roles = [(branch.is_control, "control"), (branch.name == trial.chosen, "chosen")]
    role_text = ", ".join(role_name for has_role, role_name in branch_roles if has_role)
    return f"{shown_name} ({role_text})" if role_text else shown_name


@_as_png
def draw_region(region: RegionFacts, batch: int) -> Figure:
    """The batches measured to find the ends of a region, and the share of bad samples in each. batch: samples of a
    step."""
    from matplotlib.ticker import FuncFormatter

    figure = _figure(10, 2.4)
    axis = figure.subplots()
    batch = max(1, batch)
    span = (region.end - region.first) / batch
    # Linear inside; beyond both ends probe distances double, and so does the scale.
    places = [_place((first + size / 2 - region.first) / batch, span) for first, size, _ in region.probes]
    shares = [100 * bad / max(1, size) for _, size, bad in region.probes]
    axis.axvspan(0, span, color=BAD, alpha=0.10, linewidth=0, zorder=0)
    for colour, marker, label, which in (
        (BAD, "o", "bad samples in it", [share > 0 for share in shares]),
        (GOOD, "s", "clean", [share == 0 for share in shares]),
    ):
        chosen = [(x, y) for x, y, mine in zip(places, shares, which, strict=True) if mine]
        if chosen:
            at, share = zip(*chosen, strict=True)
            axis.scatter(at, share, s=26, color=colour, marker=marker, label=label, zorder=3)
    axis.set_ylim(-6, 106)
    axis.set_ylabel("bad, %")
    left, right = min([0.0, *places]), max([span, *places])
    far = [2.0**n for n in range(0, 24, 2)]
    ticks = [-f for f in far if _place(-f, span) >= left] + [0.0, span / 2, span]
    ticks += [span + f for f in far if _place(span + f, span) <= right]
    axis.set_xticks([_place(t, span) for t in ticks])

    def name_position(at: float, _: int) -> str:
        return f"{region.first + round(_unplace(at, span) * batch):,}"

    axis.xaxis.set_major_formatter(FuncFormatter(name_position))
    for text in axis.get_xticklabels():
        text.set(rotation=35, ha="right", rotation_mode="anchor", fontsize=8)
    axis.set_xlabel("position: linear in the region, doubling beyond its ends")
    axis.legend(loc="center right")
    return figure


def _place(steps: float, span: float) -> float:
    """Position on the axis of a batch that many batches after the region's first: a doubling takes a sixteenth of the
    region's width."""
    beyond_steps = -steps if steps < 0 else steps - span
    if beyond_steps <= 0:
        return steps
    wide_steps = max(1.0, span / 16) * math.log2(1 + beyond_steps)
    return -wide_steps if steps < 0 else span + wide_steps


def _unplace(at: float, span: float) -> float:
    beyond_steps = -at if at < 0 else at - span
    if beyond_steps <= 0:
        return at
    region_steps = 2 ** (beyond_steps / max(1.0, span / 16)) - 1
    return -region_steps if at < 0 else span + region_steps


@_as_png
def draw_loads(looks: Sequence[LoadLook]) -> Figure:
    """The load of every expert at each look, one below the other, in one scale; a row is a layer."""
    from matplotlib.colors import LinearSegmentedColormap
    from matplotlib.patches import Patch
    from matplotlib.ticker import MaxNLocator

    look_heights = [0.45 + max(0.6, min(3.2, 0.12 * len(look.blocks))) for look in looks]
    load_figure = _figure(10, 0.6 + sum(look_heights))
    look_axes = load_figure.subplots(len(looks), 1, sharex=True, squeeze=False)[:, 0]
    # White is the mean; a load of 0 has a colour of its own, and one that is not recorded is left out.
    hue_scale = LinearSegmentedColormap.from_list("loads", [GOOD, "white", ABOVE])
    load_colours = hue_scale.with_extremes(under=INK, bad=GRID)
    for look_axis, look in zip(look_axes, looks, strict=True):
        with np.errstate(divide="ignore"):
            load_octaves = np.log2(look.loads).clip(-2, 2)
        load_octaves[look.loads == 0] = -3
        load_image = look_axis.imshow(
            load_octaves, cmap=load_colours, vmin=-2, vmax=2, aspect="auto", interpolation="nearest"
        )
        look_axis.set_title(f"step {look.step:,}, {look.moment}")
        look_axis.set_ylabel("layer")
        look_axis.grid(visible=False)
        label_rows = range(0, len(look.blocks), -(-len(look.blocks) // 12))
        look_axis.set_yticks(label_rows, [str(look.blocks[row]) for row in label_rows])
        look_axis.xaxis.set_major_locator(MaxNLocator(16, integer=True))
    look_axes[-1].set_xlabel("expert")
    colour_scale = load_figure.colorbar(load_image, ax=look_axes, ticks=range(-2, 3), pad=0.01)
    colour_scale.ax.set_yticklabels(["¼ or less", "½", "the mean", "2 times", "4 or more"])
    if any((look.loads == 0).any() for look in looks):
        load_figure.legend(handles=[Patch(color=INK, label="no token")], loc="outside lower center")
    return load_figure


@_as_png
def draw_tokens(tokens: Tokens) -> Figure:
    """The most frequent tokens of bad samples and corpus, and both distributions by rank."""
    figure = _figure(10, 0.7 + 0.19 * max(10, len(tokens.top)))
    bars, ranks = figure.subplots(1, 2, width_ratios=[3, 2])
    bar_places = range(len(tokens.top))
    for bar_offset, side_name, label, colour in (
        (-0.2, "bad", "bad samples", BAD),
        (0.2, "corpus", "corpus", GOOD),
    ):
        token_shares = [100 * getattr(share, side_name) for share in tokens.top]
        side_places = [bar_place + bar_offset for bar_place in bar_places]
        bars.barh(side_places, token_shares, 0.38, color=colour, label=label)
    labels = [label_of(share.text) for share in tokens.top]
    bars.set_yticks(bar_places, labels, family="DejaVu Sans Mono", fontsize=8.5, parse_math=False)
    bars.tick_params(axis="y", length=0)
    bars.invert_yaxis()
    bars.grid(axis="y", visible=False)
    bars.set_xlabel("share of all tokens, %")
    bars.set_title("Most frequent tokens of either")
    bars.legend(loc="lower right")
    for rank_curve, colour in ((tokens.bad_by_rank, BAD), (tokens.corpus_by_rank, GOOD)):
        percentages = [100 * share for _, share in rank_curve]
        ranks.loglog([rank for rank, _ in rank_curve], percentages, color=colour, linewidth=1.8)
    for axis in (ranks.xaxis, ranks.yaxis):
        axis.set_major_formatter("{x:g}")
    ranks.set_title("How uneven: share by rank")
    ranks.set_xlabel("rank of the token, most frequent first")
    ranks.set_ylabel("share, %")
    return figure


def label_of(text: str) -> str:
    """A token as a label: spaces visible, glyphs missing from the font escaped, short."""
    shown_text = "".join(
        c if _has_glyph(c) else escape_character(c) for c in make_visible(text).replace(" ", "␣")
    )
    return shown_text if len(shown_text) <= LABEL else shown_text[: LABEL - 1] + "…"


def _has_glyph(character: str) -> bool:
    from matplotlib.font_manager import findfont, get_font

    return ord(character) < 0x80 or ord(character) in get_font(findfont("DejaVu Sans Mono")).get_charmap()


def _figure(width: float, height: float) -> Figure:
    from matplotlib.figure import Figure

    return Figure(figsize=(width, height), layout="constrained", facecolor="white")
