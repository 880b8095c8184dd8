"""`megastable drill sdc`: plant silent corruption into real runs, and tell what was found of it."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

from drills.corruption_plan import KINDS, LAYOUTS, Planned, choose, expected, fits, plan, quick
from drills.corruption_runner import Report, drill
from drills.corruption_score import Outcome
from drills.corruption_table import table, told, verdict
from drills.table import console
from megastable.base.errors import ConfigError
from megastable.base.progress_bar import bar


def run(names: Sequence[str], seeds: Sequence[int], short: bool, keep: Path | None, quiet: bool) -> Report:
    """The drill of the layouts and kinds in `names`. keep: where corpus and runs are left. quiet: only errors are
    printed. Raises ConfigError."""
    if short and names:
        raise ConfigError(f"--quick has faults of its own: leave out {', '.join(names)}, or --quick")
    layouts, kinds = choose(names)
    plans: list[Planned] = []
    for seed in seeds:
        plans += quick(seed) if short else plan(layouts, kinds, seed)
    done: list[str] = []
    with ExitStack() as stack:
        folder = keep or Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="drill-")))
        shown = stack.enter_context(bar("starting", len(plans), silent=quiet, unit="runs"))

        def tell(name: str, outcome: Outcome | None) -> None:
            shown.doing(name)
            if outcome is not None:
                done.append(name)
                shown()
                if not quiet:
                    line = f"{len(done)}/{len(plans)} {name}: {told(outcome)}, {outcome.seconds:.0f} s"
                    console().print(line, soft_wrap=True)

        report = drill(plans, folder.resolve(), tell)
    if not quiet:
        console().print(table(report.faults))
        console().print(verdict(report.total), soft_wrap=True)
    return report


def listing() -> list[str]:
    """Kinds of faults with their layouts; in brackets where nothing is expected to find them."""
    lines = []
    for kind in KINDS:
        names = ", ".join(layout.name for layout in LAYOUTS.values() if fits(kind, layout))
        lines.append(f"{kind}: {names if expected(kind) else f'({names})'}")
    return lines
