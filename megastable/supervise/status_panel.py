"""Draws how a run stands as a panel that fits 80 columns, once or live.

All text of a run goes through `told.visible` before it comes here, and is put into rich's Text, which parses no markup.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
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

from megastable.base.text import count_noun, show_duration, show_size
from megastable.supervise.standing import State
from megastable.supervise.status import IncidentSummary, RunWatch, Status

BARS = "▁▂▃▄▅▆▇█"
LARGEST = 1e30  # larger values would break the scale
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
    bar_count = min(width, len(values))
    bar_edges = [len(values) * n // bar_count for n in range(bar_count + 1)] if bar_count else []
    bar_means = [math.fsum(values[a:b]) / (b - a) for a, b in pairwise(bar_edges)]
    finite_means = sorted(bar_mean for bar_mean in bar_means if math.isfinite(bar_mean))
    if not finite_means:
        return "×" * len(bar_means)
    scale_bottom, median_mean = finite_means[0], finite_means[len(finite_means) // 2]
    scale_top = finite_means[-1]
    if len(finite_means) > 2:
        scale_top = min(scale_top, median_mean + 4 * max(median_mean - scale_bottom, 1e-9))
    scale_span = max(scale_top - scale_bottom, 1e-9)
    shares = [(mean - scale_bottom) / scale_span for mean in bar_means]
    return "".join(BARS[round(min(1.0, x) * (len(BARS) - 1))] if math.isfinite(x) else "×" for x in shares)


def build_panel(status: Status, folded: bool = True) -> RenderableType:
    """The panel of a run. Below it is the command of the advice, to be copied: folded, or on one line of any length,
    which Live and a console that crops cannot show."""
    return _View(status, folded)


def show_live(watch: RunWatch, console: Console, seconds: float = 1.0) -> Status:
    """Show a run until no process is at work, or Ctrl-C. Returns the last status."""
    status = watch.read_status()
    panel = build_panel(status)
    shown = Live(panel, console=console, auto_refresh=False, transient=True, vertical_overflow="crop")
    with suppress(KeyboardInterrupt), shown:
        while status.state in PRESENT:
            time.sleep(seconds)
            status = watch.read_status()
            shown.update(build_panel(status), refresh=True)
    print_status(status, console)
    return status


def print_status(status: Status, console: Console) -> None:
    """Print it for good."""
    console.print(build_panel(status, folded=False), crop=False)


class _View:
    def __init__(self, status: Status, folded: bool) -> None:
        self.status, self.folded = status, folded

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        run_status, inner_options = self.status, options.update(width=options.max_width - 4)
        command_text = Text(run_status.command, overflow="fold")
        advice_text = Text(run_status.advice.removesuffix(run_status.command).rstrip())
        progress_bar, advice_table = _bar(run_status), _labelled([("next", advice_text)])
        screen_height = console.height if console.is_terminal else TALL
        for reason_length in LONG:
            number_table = _labelled(_rows(run_status, inner_options.max_width - 24, reason_length))
            # Less the frame, the bar, and the shell's line.
            room_left = screen_height - 4 - len(console.render_lines(number_table, inner_options))
            room_left -= len(console.render_lines(advice_table, inner_options))
            room_left -= len(console.render_lines(command_text, options)) if run_status.command else 0
            if room_left > FEWEST:
                break
        panel_body: RenderableType = number_table
        if run_status.tail and room_left > 1:
            panel_body = Group(number_table, Rule(style="dim"), _events(run_status, min(MOST, room_left - 1)))
        state_colour = COLOURS[run_status.state]
        state_text = (str(run_status.state), f"bold {state_colour}")
        panel_title = Text.assemble((run_status.name, "bold"), " ", state_text)
        panel_group = Group(progress_bar, panel_body, advice_table)
        yield Panel(panel_group, title=panel_title, title_align="left", border_style=state_colour)
        if run_status.command:
            yield command_text if self.folded else Text(run_status.command, no_wrap=True, overflow="ignore")


def _labelled(rows: Iterable[tuple[str, Text]]) -> Table:
    label_grid = Table.grid(padding=(0, 1))
    label_grid.add_column(style="dim", no_wrap=True, min_width=10)
    label_grid.add_column(overflow="fold")  # a command must not be cut
    for label_text, value in rows:
        label_grid.add_row(label_text, value)
    return label_grid


def _bar(s: Status) -> RenderableType:
    bar_grid = Table.grid(expand=True, padding=(0, 1))
    bar_grid.add_column(no_wrap=True)
    bar_grid.add_column(ratio=1)
    bar_grid.add_column(no_wrap=True, justify="right")
    done_text = f"step {s.step:,}" + (f" of {s.steps:,}" if s.steps else "")
    left_text = f"{min(1.0, s.step / s.steps):.0%}" if s.steps else ""
    if s.eta is not None:
        left_text += f"  {show_duration(s.eta)} to go"
    progress_bar = ProgressBar(total=s.steps or 1, completed=min(s.step, s.steps) if s.steps else 0)
    bar_grid.add_row(Text(done_text, style="bold"), Padding(progress_bar, 0), Text(left_text))
    return bar_grid


def _rows(s: Status, width: int, most: int) -> Iterator[tuple[str, Text]]:
    """width: of the loss bars. most: characters of a reason; `facts` has all of it."""
    if s.reason:
        code_text = f" (exit code {s.code})" if s.code else ""
        yield "why", Text(_cut(s.reason, most) + code_text, style=COLOURS[s.state])
    if s.alert:
        yield "ALERT", Text(_cut(s.alert, most), style="red")
    yield "loss", _loss(s, width)
    if speed_text := _joined(
        s.grad_norm is not None and f"gradient norm {s.grad_norm:.3g}",
        s.lr is not None and f"learning rate {s.lr:.3g}",
        s.applied is False and "last update refused",
    ):
        yield "step", Text(speed_text)
    if speed_text := _joined(
        s.tokens_per_second is not None and f"{s.tokens_per_second:,.0f} tokens/s",
        s.rate is not None and f"{s.rate:.3g} s a step",
        s.world is not None and count_noun(s.world, "rank"),
    ):
        yield "speed", Text(speed_text)
    if experts_text := _experts(s.readings):
        yield "experts", Text(experts_text)
    if s.validation:
        *before, (step, loss) = s.validation
        before_text = f", {before[-1][1]:.3f} at {before[-1][0]:,}" if before else ""
        yield "validation", Text(f"{loss:.3f} at step {step:,}{before_text}")
        if s.validation_by_corpus:
            losses_text = ", ".join(f"{corpus} {loss:.3f}" for corpus, loss in s.validation_by_corpus.items())
            yield "corpora", Text(_cut(losses_text, most))
    if s.probe:
        yield "probe", Text(f"{s.probe[1]:.3f} at step {s.probe[0]:,}")
    if s.tasks.scores:
        scores_text = ", ".join(f"{task} {score:.4g}" for task, score in s.tasks.scores.items())
        yield "tasks", Text(_cut(f"step {s.tasks.step:,}: {scores_text}", most))
    newest_text = "none yet"
    if s.checkpoints:
        newest, *older = s.checkpoints
        newest_text = f"{newest.name}, {_ago(s.time - newest.time)}"
        newest_text += f", {show_size(newest.size)}" if newest.size else ""
        newest_text += f"; {len(older)} older" if older else ""
    if not s.guarded:
        yield "checkpoint", Text(newest_text)
    yield "incidents", _incidents(s)
    if s.restarts or len(s.attempts) > 1:
        restarts_text = f"{sum(s.restarts.values())}"
        if endings_text := ", ".join(f"{ending} {count}" for ending, count in sorted(s.restarts.items())):
            restarts_text += f" ({endings_text})"
        if failures := [attempt.failure for attempt in s.attempts if attempt.failure]:
            restarts_text += f"; last: {_cut(failures[-1], most)}"
        yield "restarts", Text(restarts_text)
    if s.goodput is not None and s.goodput["wall_seconds"]:
        yield "goodput", Text(_goodput(s.goodput))
    yield "processes", _processes(s)
    if len(s.hosts) > 1 or s.left_out:
        yield "hosts", Text(_hosts(s))
    for slow_host in list(s.slow.values())[:MOST_SLOW]:
        yield "slow", Text(_cut(slow_host.text, most), style="yellow")
    for problem_text in s.problems:
        yield "unread", Text(_cut(problem_text, most), style="yellow")


def _loss(s: Status, width: int) -> Text:
    if s.loss is None:
        return Text("not yet")
    loss_line = sparkline([loss for _, loss in s.recent], max(8, width - 12))
    return Text.assemble(
        f"{s.loss:.4f}", "  ", (loss_line, "cyan"), (f" {count_noun(len(s.recent), 'step')}", "dim")
    )


def _experts(readings: Mapping[str, float]) -> str:
    """Of the layer where each is worst; "" without routed experts."""
    largest_load, idle_share, lowest_entropy = (
        readings.get(name) for name in ("expert_violation", "expert_idle", "router_entropy")
    )
    return _joined(
        largest_load is not None and f"load up to {largest_load:.3g} times the mean",
        idle_share is not None and f"{idle_share:.1%} idle",
        lowest_entropy is not None and f"entropy {lowest_entropy:.3g} nats",
    )


def _incidents(s: Status) -> Text:
    if not s.incidents:
        return Text("none" + (f"; {count_noun(s.refused, 'update')} refused" if s.refused else ""))
    open_count = sum(case.outcome == "open" for case in s.incidents)
    incidents_text = Text(f"{len(s.incidents)}" + (f", {open_count} open" if open_count else ""))
    incidents_text.append(
        f"; {count_noun(s.steps_lost, 'step')} lost, {count_noun(s.refused, 'update')} refused"
    )
    for case in s.incidents[-2:]:
        incidents_text.append("\n")
        incidents_text.append(_case(case), style="yellow" if case.outcome == "open" else "")
    return incidents_text


def _case(case: IncidentSummary) -> str:
    losses_text = ""
    if case.loss_before is not None and case.loss_peak is not None:
        losses_text = f", loss {case.loss_before:.2f} to {case.loss_peak:.2f}"
    action_text = f", {case.action.replace('_', ' ')}" if case.action else ""
    deferred_text = f"; {case.put_off}" if case.put_off else ""
    told = f"#{case.number} step {case.onset:,}: {case.verdict}{losses_text}, {case.cause}{action_text}"
    return f"{told}: {case.outcome}{deferred_text}"


def _goodput(told: Mapping[str, Any]) -> str:
    wall = told["wall_seconds"]
    lost = sorted(((v, kind) for kind, v in told["seconds"].items() if kind != "training"), reverse=True)
    shares = [f"{kind.replace('_', ' ')} {v / wall:.1%}" for v, kind in lost[:LOSSES] if v / wall >= LEAST]
    smaller = told.get("smaller", 0.0)
    shares += [f"{smaller:.1%} more if no host had been missing"] if smaller >= LEAST else []
    return ", ".join([f"{told['share']:.1%} of {show_duration(wall)} was training", *shares])


def _hosts(s: Status) -> str:
    names = ", ".join(s.hosts[:HOSTS]) + (f" and {len(s.hosts) - HOSTS} more" if len(s.hosts) > HOSTS else "")
    out = [f"{host} until {_clock(until, s.time)}" for host, until in s.left_out.items()]
    return names + (f"; failed, and the last choice: {', '.join(out)}" if out else "")


def _processes(s: Status) -> Text:
    processes_text = Text()
    for process_name, process in (("supervisor", s.supervisor), ("training", s.trainer)):
        processes_text.append("; " if processes_text else "")
        processes_text.append(f"{process_name} ")
        if process.alive is None:
            processes_text.append("cannot be told", "yellow")
        elif not process.alive:
            processes_text.append("none")
        else:
            parts = (process.pid is not None and f"pid {process.pid}", process.host and f"on {process.host}")
            processes_text.append(_joined(*parts, by=" ") or "is there", "green")
    if s.attempt is not None:
        processes_text.append(f", attempt {s.attempt}")
    if s.age is not None and s.state is not State.FINISHED:
        processes_text.append(f"; last sign {_ago(s.age)}")
    return processes_text


def _events(s: Status, count: int) -> Table:
    event_grid = Table.grid(padding=(0, 1), expand=True)
    event_grid.add_column(style="dim", no_wrap=True, min_width=8)
    event_grid.add_column(no_wrap=True, overflow="ellipsis", ratio=1)
    for said in s.tail[-count:]:
        event_text = Text(said.text, style=EVENT_COLOURS.get(said.event, ""))
        event_grid.add_row(_clock(said.time, s.time), event_text)
    return event_grid


def _clock(moment: float, now: float) -> str:
    """The time of day; with the date if it is another day."""
    try:
        then, today = datetime.fromtimestamp(moment), datetime.fromtimestamp(now)
    except (ValueError, OverflowError, OSError):
        return "?"
    return f"{then:%H:%M:%S}" if then.date() == today.date() else f"{then:%m-%d %H:%M}"


def _ago(seconds: float) -> str:
    return f"{show_duration(seconds)} ago" if seconds >= 1 else "just now"


def _joined(*parts: str | bool | None, by: str = " · ") -> str:
    return by.join(str(part) for part in parts if part)


def _cut(text: str, most: int) -> str:
    return text if len(text) <= most else text[: most - 1] + "…"
