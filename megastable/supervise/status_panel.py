"""Draws how a run stands as a panel that fits 80 columns, once or live.

All text of a run goes through `told.visible` before it comes here, and is put into rich's Text, which parses no markup.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from datetime import datetime
from itertools import pairwise
from typing import Any

from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.live import Live
from rich.padding import Padding
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.rule import Rule
from rich.table import Table
from rich.text import Text

from megastable.base.text import duration, plural, size
from megastable.supervise.standing import State
from megastable.supervise.status import IncidentSummary, Process, RunWatch, Status

BARS = "▁▂▃▄▅▆▇█"
LARGEST = 1e30  # larger values would break the scale
WIDE = 120  # columns from which events are beside the numbers
FEWEST, MOST = 3, 8  # events shown
LONG = (500, 120, 60)  # characters of a reason: the longest with which the panel fits the terminal's height
HOSTS = 8  # named
MOST_SLOW = 2  # slow ones shown
LOSSES, LEAST = 4, 0.001  # kinds of lost time shown, and the least share
TALL = 10_000  # lines, if the output is no terminal
COLOURS = {
    State.RUNNING: "green", State.STARTING: "cyan", State.HUNG: "yellow", State.WAITING: "yellow", State.NEW: "cyan",
    State.FINISHED: "green", State.STOPPED: "cyan", State.FAILED: "red", State.INTERRUPTED: "red",
    State.UNKNOWN: "yellow",
}  # fmt: skip
PRESENT = (State.RUNNING, State.STARTING, State.HUNG, State.WAITING, State.UNKNOWN)  # a process may run
EVENT_COLOURS = {
    "incident": "yellow", "discarded": "yellow", "hang": "yellow", "restart": "yellow", "warning": "yellow",
    "alert": "red", "ended": "red", "unstable": "red", "checkpoint_failed": "red", "checkpoint_rejected": "red",
    "hook_failed": "red", "finished": "green", "handover": "yellow", "fell_back": "yellow", "rate_cut": "yellow",
    "trend": "yellow", "host_slow": "yellow",
}  # fmt: skip


def sparkline(values: Sequence[float], width: int) -> str:
    """Values as bars, at most `width`; neighbours are averaged if there are more. Non-finite values are ×.

    The scale spans the middle of the values, so that a spike does not flatten the rest.
    """
    values = [max(-LARGEST, min(LARGEST, v)) if math.isfinite(v) else math.nan for v in values]
    count = min(width, len(values))
    edges = [len(values) * n // count for n in range(count + 1)] if count else []
    means = [math.fsum(values[a:b]) / (b - a) for a, b in pairwise(edges)]
    finite = sorted(m for m in means if math.isfinite(m))
    if not finite:
        return "×" * len(means)
    low, middle = finite[0], finite[len(finite) // 2]
    high = min(finite[-1], middle + 4 * max(middle - low, 1e-9)) if len(finite) > 2 else finite[-1]
    span = max(high - low, 1e-9)
    return "".join(
        BARS[round(min(1.0, (m - low) / span) * (len(BARS) - 1))] if math.isfinite(m) else "×" for m in means
    )


def panel(status: Status, folded: bool = True) -> RenderableType:
    """The panel of a run; wide terminals get the events beside the numbers. Below it is the command of the advice, to
    be copied: folded, or on one line of any length, which Live and a console that crops cannot show."""
    return _View(status, folded)


def live(
    watch: RunWatch, console: Console, seconds: float = 1.0, until: Callable[[Status], bool] | None = None
) -> Status:
    """Show a run until `until` says so (by default until no process is at work) or Ctrl-C. Returns the last status."""
    over = until or (lambda s: s.state not in PRESENT)
    status = watch.status()
    with Live(
        panel(status), console=console, auto_refresh=False, transient=True, vertical_overflow="crop"
    ) as shown:
        try:
            while not over(status):
                time.sleep(seconds)
                status = watch.status()
                shown.update(panel(status), refresh=True)
        except KeyboardInterrupt:
            pass
    show(status, console)
    return status


def show(status: Status, console: Console) -> None:
    """Print it for good."""
    console.print(panel(status, folded=False), crop=False)


class _View:
    def __init__(self, status: Status, folded: bool) -> None:
        self.status, self.folded = status, folded

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        s, wide = self.status, options.max_width >= WIDE
        inner = options.update(width=options.max_width - 4)
        side = inner.update(width=(inner.max_width - 2) // 2) if wide and s.tail else inner
        command = Text(s.command, overflow="fold")
        bar, following = _bar(s), _labelled([("next", Text(s.advice.removesuffix(s.command).rstrip()))])
        height = console.height if console.is_terminal else TALL
        for most in LONG:
            numbers = _labelled(_rows(s, side.max_width - 24, most))
            lines = len(console.render_lines(numbers, side))
            # Less the frame, the bar, and the shell's line.
            room = height - lines - len(console.render_lines(following, inner)) - 4
            room -= len(console.render_lines(command, options)) if s.command else 0
            if room > FEWEST:
                break
        body: RenderableType = numbers
        if s.tail and wide:
            body = Table.grid(padding=(0, 2), expand=True)
            body.add_column(ratio=1)
            body.add_column(ratio=1)
            body.add_row(numbers, _events(s, lines))
        elif s.tail and room > 1:
            body = Group(numbers, Rule(style="dim"), _events(s, min(MOST, room - 1)))
        colour = COLOURS[s.state]
        title = Text.assemble((s.name, "bold"), " ", (str(s.state), f"bold {colour}"))
        yield Panel(Group(bar, body, following), title=title, title_align="left", border_style=colour)
        if s.command:
            yield command if self.folded else Text(s.command, no_wrap=True, overflow="ignore")


def _labelled(rows: Iterable[tuple[str, Text]]) -> Table:
    grid = Table.grid(padding=(0, 1))
    grid.add_column(style="dim", no_wrap=True, min_width=10)
    grid.add_column(overflow="fold")  # a command must not be cut
    for name, value in rows:
        grid.add_row(name, value)
    return grid


def _bar(s: Status) -> RenderableType:
    grid = Table.grid(expand=True, padding=(0, 1))
    grid.add_column(no_wrap=True)
    grid.add_column(ratio=1)
    grid.add_column(no_wrap=True, justify="right")
    done = f"step {s.step:,}" + (f" of {s.steps:,}" if s.steps else "")
    left = f"{min(1.0, s.step / s.steps):.0%}" if s.steps else ""
    if s.eta is not None:
        left += f"  {duration(s.eta)} to go"
    bar = ProgressBar(total=s.steps or 1, completed=min(s.step, s.steps) if s.steps else 0)
    grid.add_row(Text(done, style="bold"), Padding(bar, 0), Text(left))
    return grid


def _rows(s: Status, width: int, most: int) -> Iterator[tuple[str, Text]]:
    """width: of the loss bars. most: characters of a reason; `as_json` has all of it."""
    if s.reason:
        code = f" (exit code {s.code})" if s.code else ""
        yield "why", Text(_cut(s.reason, most) + code, style=COLOURS[s.state])
    if s.alert:
        yield "ALERT", Text(_cut(s.alert, most), style="red")
    yield "loss", _loss(s, width)
    if speed := _joined(
        s.grad_norm is not None and f"gradient norm {s.grad_norm:.3g}",
        s.lr is not None and f"learning rate {s.lr:.3g}",
        s.applied is False and "last update refused",
    ):
        yield "step", Text(speed)
    if speed := _joined(
        s.tokens_per_second is not None and f"{s.tokens_per_second:,.0f} tokens/s",
        s.rate is not None and f"{s.rate:.3g} s a step",
        s.world is not None and plural(s.world, "rank"),
    ):
        yield "speed", Text(speed)
    if s.validation:
        *_, (step, loss) = s.validation
        before = f", {s.validation[-2][1]:.3f} at {s.validation[-2][0]:,}" if len(s.validation) > 1 else ""
        yield "validation", Text(f"{loss:.3f} at step {step:,}{before}")
        if s.validation_by_corpus:
            found = ", ".join(f"{name} {loss:.3f}" for name, loss in s.validation_by_corpus.items())
            yield "corpora", Text(_cut(found, most))
    if s.probe:
        yield "probe", Text(f"{s.probe[1]:.3f} at step {s.probe[0]:,}")
    if s.tasks.scores:
        found = ", ".join(f"{name} {value:.4g}" for name, value in s.tasks.scores.items())
        yield "tasks", Text(_cut(f"step {s.tasks.step:,}: {found}", most))
    if s.checkpoints:
        newest = s.checkpoints[0]
        told = f"{newest.name}, {_ago(s.time - newest.time)}" + (
            f", {size(newest.size)}" if newest.size else ""
        )
        yield (
            "checkpoint",
            Text(told + (f"; {len(s.checkpoints) - 1} older" if len(s.checkpoints) > 1 else "")),
        )
    else:
        yield "checkpoint", Text("none yet")
    yield "incidents", _incidents(s)
    if s.restarts or len(s.attempts) > 1:
        told = f"{sum(s.restarts.values())}"
        if how := ", ".join(f"{name} {count}" for name, count in sorted(s.restarts.items())):
            told += f" ({how})"
        if failure := next((a.failure for a in reversed(s.attempts) if a.failure), ""):
            told += f"; last: {_cut(failure, most)}"
        yield "restarts", Text(told)
    if s.goodput is not None and s.goodput["wall_seconds"]:
        yield "goodput", Text(_goodput(s.goodput))
    yield "processes", _processes(s)
    if len(s.hosts) > 1 or s.left_out:
        yield "hosts", Text(_hosts(s))
    for slow in list(s.slow.values())[:MOST_SLOW]:
        yield "slow", Text(_cut(slow.text, most), style="yellow")
    for problem in s.problems:
        yield "unread", Text(_cut(problem, most), style="yellow")


def _loss(s: Status, width: int) -> Text:
    if s.loss is None:
        return Text("not yet")
    line = sparkline([loss for _, loss in s.recent], max(8, width - 12))
    return Text.assemble(f"{s.loss:.4f}", "  ", (line, "cyan"), (f" {plural(len(s.recent), 'step')}", "dim"))


def _incidents(s: Status) -> Text:
    if not s.incidents:
        return Text("none" + (f"; {plural(s.refused, 'update')} refused" if s.refused else ""))
    is_open = sum(case.outcome == "open" for case in s.incidents)
    told = Text(f"{len(s.incidents)}" + (f", {is_open} open" if is_open else ""))
    told.append(f"; {plural(s.steps_lost, 'step')} lost, {plural(s.refused, 'update')} refused")
    for case in s.incidents[-2:]:
        told.append("\n")
        told.append(_case(case), style="yellow" if case.outcome == "open" else "")
    return told


def _case(case: IncidentSummary) -> str:
    losses = ""
    if case.loss_before is not None and case.loss_peak is not None:
        losses = f", loss {case.loss_before:.2f} to {case.loss_peak:.2f}"
    action = f", {case.action.replace('_', ' ')}" if case.action else ""
    left = f"; {case.put_off}" if case.put_off else ""
    return f"#{case.number} step {case.onset:,}: {case.verdict}{losses}, {case.cause}{action}: {case.outcome}{left}"


def _goodput(told: Mapping[str, Any]) -> str:
    wall = told["wall_seconds"]
    lost = sorted(((v, kind) for kind, v in told["seconds"].items() if kind != "training"), reverse=True)
    shares = [f"{kind.replace('_', ' ')} {v / wall:.1%}" for v, kind in lost[:LOSSES] if v / wall >= LEAST]
    smaller = told.get("smaller", 0.0)
    shares += [f"{smaller:.1%} more if no host had been missing"] if smaller >= LEAST else []
    return ", ".join([f"{told['share']:.1%} of {duration(wall)} was training", *shares])


def _hosts(s: Status) -> str:
    names = ", ".join(s.hosts[:HOSTS]) + (f" and {len(s.hosts) - HOSTS} more" if len(s.hosts) > HOSTS else "")
    out = [f"{host} until {_clock(until, s.time)}" for host, until in s.left_out.items()]
    return names + (f"; failed, and the last choice: {', '.join(out)}" if out else "")


def _processes(s: Status) -> Text:
    told = Text()
    for name, process in (("supervisor", s.supervisor), ("training", s.trainer)):
        told.append("; " if told else "")
        told.append(f"{name} ")
        told.append(*_alive(process))
    if s.attempt is not None:
        told.append(f", attempt {s.attempt}")
    if s.age is not None and s.state is not State.FINISHED:
        told.append(f"; last sign {_ago(s.age)}")
    return told


def _alive(process: Process) -> tuple[str, str]:
    if process.alive is None:
        return "cannot be told", "yellow"
    if not process.alive:
        return "none", ""
    where = _joined(
        process.pid is not None and f"pid {process.pid}", process.host and f"on {process.host}", by=" "
    )
    return where or "is there", "green"


def _events(s: Status, count: int) -> Table:
    grid = Table.grid(padding=(0, 1), expand=True)
    grid.add_column(style="dim", no_wrap=True, min_width=8)
    grid.add_column(no_wrap=True, overflow="ellipsis", ratio=1)
    for said in s.tail[-count:]:
        grid.add_row(_clock(said.time, s.time), Text(said.text, style=EVENT_COLOURS.get(said.event, "")))
    return grid


def _clock(moment: float, now: float) -> str:
    """The time of day; with the date if it is another day."""
    try:
        then, today = datetime.fromtimestamp(moment), datetime.fromtimestamp(now)
    except (ValueError, OverflowError, OSError):
        return "?"
    return f"{then:%H:%M:%S}" if then.date() == today.date() else f"{then:%m-%d %H:%M}"


def _ago(seconds: float) -> str:
    return f"{duration(seconds)} ago" if seconds >= 1 else "just now"


def _joined(*parts: str | bool | None, by: str = " · ") -> str:
    return by.join(str(part) for part in parts if part)


def _cut(text: str, most: int) -> str:
    return text if len(text) <= most else text[: most - 1] + "…"
