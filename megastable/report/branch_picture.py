"""Draws branches of a run that began on the same state."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from megastable.report.figures import save
from megastable.report.scale import drawable


@dataclass(frozen=True)
class DrawnBranch:
    """losses, norms: of its steps; loss: of the data to come at its end; nats. bold: drawn thicker."""

    name: str
    losses: Sequence[float]
    norms: Sequence[float]
    loss: float
    bold: bool = False


def draw_branches(
    first_step: int, branches: Sequence[DrawnBranch], before: float, title: str, path: Path
) -> None:
    """Loss and gradient norm of every step, and the loss of the data to come at the end of every branch.

    The format follows from the name (.png, .svg, .pdf). Raises DataError when it cannot be written.

    Args:
        first_step: of the branches.
        before: loss of the data to come on the state that all began with, nats.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (loss, norm, end) = pyplot.subplots(
        1, 3, figsize=(16, 5), layout="constrained", width_ratios=(5, 5, 4)
    )
    for number, branch in enumerate(branches):
        steps = range(first_step, first_step + len(branch.losses))
        style = {"color": f"C{number % 10}", "linewidth": 2.4 if branch.bold else 1.0}
        style |= {"linestyle": "-" if number < 10 else "--", "label": branch.name}
        loss.plot(steps, [drawable(value) for value in branch.losses], **style)
        norm.plot(steps, [drawable(value, positive=True) for value in branch.norms], **style)
        end.barh(number, drawable(branch.loss) - before, color=style["color"], height=0.7)
    norm.set_yscale("log")
    end.axvline(0.0, color="0.3", linewidth=1)
    end.set_yticks(range(len(branches)), [branch.name for branch in branches], parse_math=False)
    end.invert_yaxis()
    for axis, what in ((loss, "training loss (nats per token)"), (norm, "gradient norm")):
        axis.set_xlabel("step")
        axis.set_ylabel(what)
    loss.legend(fontsize="small")
    end.set_xlabel(f"data to come at the end, minus {before:.3f} before (nats)")
    figure.suptitle(title, parse_math=False)
    save(figure, path)
