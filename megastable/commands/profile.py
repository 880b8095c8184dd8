"""`megastable profile`: show what a run's steps spend their time on, from its directory alone. Imports no torch."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from megastable.commands.app import App
from megastable.commands.options import Json, JsonFile, Rows, Run, put_json

if TYPE_CHECKING:
    from rich.console import Console

    from megastable.report.trace_summary import PhaseSummary, TraceSummary
    from megastable.run.events.supervisor_events import HostSlow

app = App()
NO_TRACE = "No trace: start or resume it with logging.profile='{from: STEP, steps: 3}' for one."


@app.add_command(
    examples="""
    megastable profile runs/7b
    megastable profile runs/7b --last 1000 --rows 30
    megastable profile runs/7b --json
    """,
    more="Phases are those of rank 0, of every step; traces are those that logging.profile asked for. What the numbers "
    "mean is in docs/profiling.md.\n\nExit codes: 0, or 2 if there is no run, or none of its steps has phases.",
)
def profile(
    run: Run,
    last: Annotated[int | None, typer.Option(min=1, help="Only the phases of the last N steps")] = None,
    as_json: Json = False,
    output: JsonFile = None,
    rows: Rows = 12,
) -> None:
    """Show where the time of a run's steps goes: phases of every step, operators of the traced ones."""
    from megastable.base.errors import DataError
    from megastable.report.trace_summary import read_phases, read_trace
    from megastable.run.directory import RunDirectory
    from megastable.run.step_phases import of_trace
    from megastable.supervise.status import require_run

    require_run(run)
    run_directory = RunDirectory(run)
    phases = read_phases(run_directory.steps, last)
    traces, problems = list["TraceSummary"](), list(phases.problems)
    trace_paths = sorted(run_directory.profiles.glob("*.json.gz"))
    for trace_path in [path for path in trace_paths if of_trace(path.name) is not None]:
        try:
            traces.append(read_trace(trace_path))
        except DataError as error:
            problems.append(str(error))
    snapshot_names = sorted(path.name for path in run_directory.profiles.glob("out-of-memory-*.pickle"))
    slowest_host = slow_host(run_directory)
    for problem in problems:
        typer.echo(f"WARNING: {problem}", err=True)
    if not as_json:
        from rich.console import Console

        console = Console(markup=False, emoji=False, highlight=False)
        _show_phases(console, run, phases, slowest_host)
        for trace in traces:
            _show_trace(console, trace, rows)
        if not traces:
            console.print(NO_TRACE, soft_wrap=True)
        for snapshot_name in snapshot_names:
            console.print(
                f"Memory ran out: {snapshot_name}, for https://pytorch.org/memory_viz", soft_wrap=True
            )
    summary, slowest_facts = asdict(phases), None
    del summary["problems"]  # of the traces, too, below
    if slowest_host is not None:
        slowest_facts = {name: slowest_host.get(name) for name in ("host", "rank", "ratio", "cost")}
    json_facts = {
        "run": str(run), **summary, "slowest": slowest_facts, "traces": [asdict(trace) for trace in traces],
        "snapshots": snapshot_names, "problems": problems,
    }  # fmt: skip
    put_json(json_facts, as_json, output)


def slow_host(directory: Any) -> HostSlow | None:
    """The host that slows the others down in the newest attempt, as the supervisor last said it; None if none does."""
    from megastable.run.run_history import HistoryReader

    history_reader = HistoryReader(directory.journal)
    history_reader.look_again()
    return next(reversed(history_reader.history.slow.values()), None)


def _show_phases(console: Console, run: Path, found: PhaseSummary, slowest: HostSlow | None) -> None:
    from rich.table import Table

    from megastable.base.text import count_noun, make_visible

    console.print(
        f"{make_visible(run)}: {count_noun(found.steps, 'step')}, from {found.first:,} to {found.last:,}",
        soft_wrap=True,
    )
    if found.without:
        console.print(f"{count_noun(found.without, 'step')} without phases left out")
    phase_table = Table("phase", *(_right(name) for name in ("share", "mean ms", "median ms", "p99 ms")))
    shown_phases = [phase_share for phase_share in found.phases if phase_share.mean > 0]
    for phase_share in [*shown_phases, found.whole]:
        if phase_share is found.whole:
            phase_table.add_section()
        times = [f"{1e3 * x:.2f}" for x in (phase_share.mean, phase_share.p50, phase_share.p99)]
        phase_table.add_row(phase_share.phase, f"{phase_share.share:.1%}", *times)
    console.print(phase_table)
    if slowest is not None:
        console.print(slowest.format_sentence(), soft_wrap=True)


def _show_trace(console: Console, found: TraceSummary, rows: int) -> None:
    from rich.table import Table

    from megastable.base.text import make_visible

    steps = make_visible(", ".join(map(str, found.steps)), 200)
    console.print(
        f"\n{make_visible(found.file, 80)}: rank {found.rank}, steps {steps}, {found.seconds:.3f} s on {found.device}",
        soft_wrap=True,
    )
    if found.overlapped is not None:
        console.print(
            f"communication {found.communication / found.seconds:.1%} of the time, {found.overlapped:.1%} of it while "
            "something is computed",
            soft_wrap=True,
        )
    console.print(f"idle {found.idle:.1%}")
    if not rows:
        return
    operator_table = Table("operator", *(_right(name) for name in ("times", "ms", "share")))
    for one in found.operators[:rows]:
        milliseconds = f"{1e3 * one.seconds:.2f}"
        operator_table.add_row(make_visible(one.name, 90), f"{one.count:,}", milliseconds, f"{one.share:.1%}")
    console.print(operator_table)
    if (count := len(found.operators)) > rows:
        console.print(f"{count - rows} more operators: --rows {count}, or --json")


def _right(name: str) -> Any:
    from rich.table import Column

    return Column(name, justify="right")
