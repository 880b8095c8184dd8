"""Draws an incident: the steps around it, and the tokens of the guilty samples beside those of their corpus.

Without pyplot, which would leave global state in the process.
"""

from __future__ import annotations

import io
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from megastable.base.text import escaped, visible
from megastable.report.postmortem.facts import Evidence, RegionFacts, StepRow
from megastable.report.postmortem.sample_texts import Tokens
from megastable.report.postmortem.trial_facts import BranchFacts, TrialFacts
from megastable.report.scale import drawable

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

INK, FAINT, GRID = "#1f2933", "#8a94a0", "#e6e9ed"
BAD, GOOD = "#d1495b", "#1f6fb2"
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


def steps_picture(e: Evidence) -> bytes | None:
    """Loss, gradient norm and, if cut, the learning rate around the incident, as PNG; None without steps."""
    from matplotlib import rc_context

    if not e.passes:
        return None
    with rc_context(STYLE):
        return _png(_steps(e))


def _steps(e: Evidence) -> Figure:
    from matplotlib.lines import Line2D

    cut = bool({"cut_lr", "cap_lr"} & set(e.incident.actions))
    panels = [("loss", "loss (nats per token)"), ("grad_norm", "gradient norm")]
    panels += [("lr", "learning rate")] if cut else []
    figure = _figure(10, 6.2 if cut else 5.2)
    axes = figure.subplots(len(panels), 1, sharex=True, height_ratios=[3, 2, 1][: len(panels)], squeeze=False)
    for axis, (name, label) in zip(axes[:, 0], panels, strict=True):
        _panel(axis, e, name)
        axis.set_ylabel(label)
    rows = [row for part in e.passes for row in part]
    signs = [Line2D([], [], color=GOOD, label="the run")]
    if len(e.passes) > 1:
        signs.append(Line2D([], [], color=BAD, label="undone, and done again"))
    if not all(row.applied for row in rows):
        signs.append(
            Line2D([], [], color=BAD, marker="x", linewidth=0, markeredgewidth=1.9, label="update refused")
        )
    if not all(math.isfinite(drawable(v)) for row in rows for v in (row.loss, row.grad_norm)):
        signs.append(Line2D([], [], color=BAD, marker="^", linewidth=0, label="not finite"))
    figure.legend(handles=signs, loc="outside lower center", ncols=4, handlelength=1.6, columnspacing=2)
    axes[-1, 0].set_xlabel("step")
    return figure


def _panel(axis: Axes, e: Evidence, name: str) -> None:
    from matplotlib.ticker import MaxNLocator, NullFormatter

    log = name == "grad_norm"
    stood, undone = standing(e.passes)
    for part in undone:
        _line(axis, part, name, log, {"color": BAD, "linewidth": 1.4, "zorder": 4})
    _line(axis, stood, name, log, {"color": GOOD, "linewidth": 1.5, "zorder": 3})
    refused = [row for part in e.passes for row in part if not row.applied and name != "lr"]
    if refused:
        marks: dict[str, Any] = {"color": BAD, "marker": "x", "s": 44, "linewidths": 1.9, "zorder": 6}
        values = [drawable(getattr(row, name), log) for row in refused]
        axis.scatter([row.step for row in refused], values, **marks)
    lost = [row for part in e.passes for row in part if not math.isfinite(drawable(getattr(row, name)))]
    if lost and name != "lr":
        top: dict[str, Any] = {"transform": axis.get_xaxis_transform(), "clip_on": False, "zorder": 7}
        axis.scatter([row.step for row in lost], [0.97] * len(lost), marker="^", color=BAD, s=36, **top)
    norms = [v for part in e.passes for row in part if (v := drawable(row.grad_norm, True)) > 0]
    if log and norms:
        axis.set_yscale("log")
        axis.yaxis.set_major_formatter("{x:g}")
        if max(norms) < 4 * min(norms):  # less than a power of ten between them
            axis.yaxis.set_major_locator(MaxNLocator(4))
            axis.yaxis.set_minor_formatter(NullFormatter())
        else:
            axis.yaxis.set_minor_formatter(lambda value, _: f"{value:g}" if f"{value:e}"[0] in "235" else "")
    _marks(axis, e, name == "loss")
    axis.xaxis.set_major_locator(MaxNLocator(8, integer=True, steps=[1, 2, 5, 10]))
    axis.margins(x=0.01, y=0.12)


def standing(passes: Sequence[Sequence[StepRow]]) -> tuple[list[StepRow], list[list[StepRow]]]:
    """The steps that stayed, in order, and those that were repeated, a list for each rewind.

    Each of the latter begins with the step before it, if there is one, so that a line joins them.
    """
    stood, undone = list[StepRow](), list[list[StepRow]]()
    for part in passes:
        kept = [row for row in stood if row.step < part[0].step]
        if len(kept) < len(stood):
            undone.append([*kept[-1:], *stood[len(kept) :]])
        stood = [*kept, *part]
    return stood, undone


def _line(axis: Axes, rows: Sequence[StepRow], name: str, log: bool, style: dict[str, Any]) -> None:
    marker = "o" if len(rows) == 1 else None
    axis.plot(
        [r.step for r in rows],
        [drawable(getattr(r, name), log) for r in rows],
        marker=marker,
        markersize=3.5,
        **style,
    )


def _marks(axis: Axes, e: Evidence, named: bool) -> None:
    i = e.incident
    at = [(i.onset, "onset"), (i.step, "acted on"), *((s, "back to") for s in e.back_to[-1:])]
    at += [(e.healed_at, "healed")] if e.healed_at is not None else []
    shown: dict[int, list[str]] = {}
    for step, what in at:
        shown.setdefault(step, []).append(what)
    axis.axvspan(i.onset - 0.5, max(i.step, i.onset) + 0.5, color=BAD, alpha=0.08, linewidth=0, zorder=0)
    low, high = min(r.step for p in e.passes for r in p), max(r.step for p in e.passes for r in p)
    groups: list[list[int]] = []
    for step in sorted(shown):
        axis.axvline(
            step,
            color=GOOD if "healed" in shown[step] else FAINT,
            linewidth=1,
            linestyle=(0, (3, 3)),
            zorder=1,
        )
        if groups and step - groups[-1][0] < 0.05 * (high - low):
            groups[-1].append(step)
        else:
            groups.append([step])
    if not named:
        return
    # Above the plot, where they hide nothing; a label that would touch its neighbour is raised.
    free = -math.inf
    for group in groups:
        words = " · ".join(f"{what} {step:,}" for step in group for what in shown[step])
        width = 0.0083 * len(words) * (high - low)
        right = group[-1] - width > low and ("healed" not in words or group[0] + width > high)
        begin = group[-1] - width if right else group[0]
        level = int(begin < free)
        free = max(free, begin + width)
        axis.annotate(
            words, (group[-1 if right else 0], 1), xycoords=("data", "axes fraction"), ha="right" if right else "left",
            xytext=(0, 4 + 13 * level), textcoords="offset points", fontsize=8.8, parse_math=False,
        )  # fmt: skip


def branches_picture(trial: TrialFacts, e: Evidence) -> bytes:
    """The losses of a trial's branches and of the run over the same steps, and the loss of the data to come after each
    branch, as PNG."""
    from matplotlib import rc_context

    with rc_context(STYLE):
        return _png(draw_branches(trial, e.passes))


def draw_branches(trial: TrialFacts, passes: Sequence[Sequence[StepRow]]) -> Figure:
    """As `branches_picture`, to be drawn with `STYLE`. passes: recorded steps of the run (passes.py)."""
    from matplotlib.ticker import MaxNLocator

    figure = _figure(10, max(4.4, 2.6 + 0.3 * len(trial.branches)))
    steps, coming = figure.subplots(1, 2, width_ratios=[5, 3])
    hues = [*BRANCHES[: len(trial.branches)], *[FAINT] * (len(trial.branches) - len(BRANCHES))]
    first, last = trial.snapshot, max(trial.last, trial.step)
    _draw_run(steps, [[row for row in part if first <= row.step <= last] for part in passes])
    for branch, hue in zip(trial.branches, hues, strict=True):
        at = range(trial.snapshot + 1, trial.snapshot + 1 + len(branch.losses))
        chosen = branch.name == trial.chosen
        steps.plot(
            at, [drawable(loss) for loss in branch.losses], color=hue, linewidth=2.0 if chosen else 1.4, zorder=4,
            label=_name(branch, trial), marker="." if len(branch.losses) < 2 else None,
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


def _draw_run(axis: Axes, passes: Sequence[Sequence[StepRow]]) -> None:
    """The recorded steps of a trial's window: what stayed, what was undone, what was refused."""
    stood, undone = standing([part for part in passes if part])
    for number, part in enumerate(undone):
        label = "the run: undone steps" if number == 0 else None
        style = {"color": FAINT, "linewidth": 2.2, "linestyle": (0, (2, 1.5)), "zorder": 3, "label": label}
        _line(axis, part, "loss", False, style)
    if stood:
        _line(axis, stood, "loss", False, {"color": INK, "linewidth": 2.2, "zorder": 3, "label": "the run"})
    refused = [row for part in passes for row in part if not row.applied]
    if refused:
        axis.scatter(
            [row.step for row in refused], [drawable(row.loss) for row in refused], color=BAD, marker="x", s=44,
            linewidths=1.9, zorder=6, label="the run: update refused",
        )  # fmt: skip


def _draw_differences(axis: Axes, trial: TrialFacts, hues: Sequence[str]) -> None:
    """For each branch a point with its standard error, the first one at the top."""
    known = [drawable(branch.difference) for branch in trial.branches]
    for place, (branch, value, hue) in enumerate(zip(trial.branches, known, hues, strict=True)):
        error = drawable(branch.error)
        axis.errorbar(
            value, place, xerr=None if math.isnan(error) else error, fmt="o", color=hue, markersize=6, capsize=3,
        )  # fmt: skip
        if math.isnan(value):
            axis.annotate("not finite", (0, place), color=BAD, ha="center", va="center", fontsize=8.8)
    axis.axvline(0, color=FAINT, linewidth=1, zorder=1)
    axis.set_yticks(
        range(len(known)), [_name(branch, trial).replace(" (", "\n(") for branch in trial.branches]
    )
    axis.set_ylim(len(known) - 0.4, -0.6)
    axis.tick_params(axis="y", length=0)
    axis.margins(x=0.15)
    axis.grid(axis="y", visible=False)
    axis.set_xlabel(
        "loss of the data to come,\nminus the control ± standard error\n(nats per token; left is better)"
    )


def _name(branch: BranchFacts, trial: TrialFacts) -> str:
    name = visible(branch.label, LABEL_OF_BRANCH).replace("$", r"\$")
    roles = [(branch.is_control, "control"), (branch.name == trial.chosen, "chosen")]
    told = ", ".join(role for true, role in roles if true)
    return f"{name} ({told})" if told else name


def region_picture(region: RegionFacts, batch: int) -> bytes:
    """The batches measured to find the ends of a region, and the share of bad samples in each, as PNG. batch: samples
    of a step."""
    from matplotlib import rc_context

    with rc_context(STYLE):
        return _png(_region(region, batch))


def _region(region: RegionFacts, batch: int) -> Figure:
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

    def named(at: float, _: int) -> str:
        steps = _unplace(at, span)
        return f"{region.first + round(steps * batch):,}"

    axis.xaxis.set_major_formatter(FuncFormatter(named))
    for text in axis.get_xticklabels():
        text.set(rotation=35, ha="right", rotation_mode="anchor", fontsize=8)
    axis.set_xlabel("position: linear in the region, doubling beyond its ends")
    axis.legend(loc="center right")
    return figure


def _place(steps: float, span: float) -> float:
    """Position on the axis of a batch that many batches after the region's first: a doubling takes a sixteenth of the
    region's width."""
    beyond = -steps if steps < 0 else steps - span
    if beyond <= 0:
        return steps
    wide = max(1.0, span / 16) * math.log2(1 + beyond)
    return -wide if steps < 0 else span + wide


def _unplace(at: float, span: float) -> float:
    beyond = -at if at < 0 else at - span
    if beyond <= 0:
        return at
    steps = 2 ** (beyond / max(1.0, span / 16)) - 1
    return -steps if at < 0 else span + steps


def tokens_picture(tokens: Tokens) -> bytes:
    """The most frequent tokens of guilty samples and corpus, and both distributions by rank, as PNG."""
    from matplotlib import rc_context

    with rc_context(STYLE):
        return _png(_tokens(tokens))


def _tokens(tokens: Tokens) -> Figure:
    figure = _figure(10, 0.7 + 0.19 * max(10, len(tokens.top)))
    bars, ranks = figure.subplots(1, 2, width_ratios=[3, 2])
    places = list(range(len(tokens.top)))
    for offset, name, colour in ((-0.2, "guilty", BAD), (0.2, "corpus", GOOD)):
        shares = [100 * getattr(share, name) for share in tokens.top]
        label = "guilty samples" if name == "guilty" else "corpus"
        bars.barh([place + offset for place in places], shares, 0.38, color=colour, label=label)
    bars.set_yticks(
        places,
        [label_of(share.text) for share in tokens.top],
        family="DejaVu Sans Mono",
        fontsize=8.5,
        parse_math=False,
    )
    bars.tick_params(axis="y", length=0)
    bars.invert_yaxis()
    bars.grid(axis="y", visible=False)
    bars.set_xlabel("share of all tokens, %")
    bars.set_title("Most frequent tokens of either")
    bars.legend(loc="lower right")
    for curve, colour in ((tokens.guilty_by_rank, BAD), (tokens.corpus_by_rank, GOOD)):
        ranks.loglog(
            *zip(*((rank, 100 * share) for rank, share in curve), strict=True), color=colour, linewidth=1.8
        )
    for axis in (ranks.xaxis, ranks.yaxis):
        axis.set_major_formatter("{x:g}")
    ranks.set_title("How uneven: share by rank")
    ranks.set_xlabel("rank of the token, most frequent first")
    ranks.set_ylabel("share, %")
    return figure


def label_of(text: str) -> str:
    """A token as a label: spaces visible, glyphs missing from the font escaped, short."""
    shown = "".join(c if _has_glyph(c) else escaped(c) for c in visible(text).replace(" ", "␣"))
    return shown if len(shown) <= LABEL else shown[: LABEL - 1] + "…"


def _has_glyph(character: str) -> bool:
    from matplotlib.font_manager import findfont, get_font

    return ord(character) < 0x80 or ord(character) in get_font(findfont("DejaVu Sans Mono")).get_charmap()


def _figure(width: float, height: float) -> Figure:
    from matplotlib.figure import Figure

    return Figure(figsize=(width, height), layout="constrained", facecolor="white")


def _png(figure: Figure) -> bytes:
    content = io.BytesIO()
    # Without the library's version in it, the same facts give the same bytes.
    figure.savefig(content, format="png", dpi=130, metadata={"Software": None})
    return content.getvalue()
