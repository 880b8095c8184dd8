"""The panel: fits, tells what matters, and lets no text of a run act on the terminal."""

from __future__ import annotations

import json
import math
import time
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from megastable.base.text import duration, size, visible
from megastable.run.events.reading import event_of
from megastable.supervise.notifiers import news
from megastable.supervise.standing import State
from megastable.supervise.status import RunWatch, Status, read_status
from megastable.supervise.status_panel import BARS, live, panel, show, sparkline
from tests.supervise.runs import incident, journal


@pytest.fixture
def status(tmp_path: Path) -> Status:
    run = tmp_path / "[red]x\x1b[31m"
    run.mkdir()
    evil = "killed \x1b[2J[bold]bold[/bold]\r\n" + "long " * 50
    journal(
        run,
        {"event": "launched", "attempt": 1},
        {"event": "training", "step": 0, "world": 2},
        {"event": "evaluated", "step": 5, "loss": 3.25},
        incident(1, cause="data", actions=["cut_lr"], outcome="healed", steps_lost=4),
        {"event": "ended", "attempt": 1, "signal": 9, "failure": evil},
        {"event": "restart", "attempt": 2, "reason": evil},
        *({"event": "warning", "step": n, "text": evil} for n in range(40)),
        {"event": "supervisor", "what": "ended", "code": 76, "reason": evil},
        begin=time.time() - 60,
    )
    told = {
        "step": 30,
        "steps": 40,
        "loss": 2.5,
        "seconds": 1.0,
        "phase": "step",
        "tokens_per_second": 123456.0,
    }
    (run / "progress.json").write_text(json.dumps(told))
    return read_status(run)


def test_the_command_to_copy_stands_on_a_line_of_its_own(status: Status) -> None:
    assert len(status.command) > 40 and status.advice.endswith(status.command)
    for width in (40, 140):
        console = Console(width=width, force_terminal=True, color_system=None)
        with console.capture() as capture:
            show(status, console)
        assert capture.get().splitlines()[-1] == status.command


def rendered(status: Status, width: int) -> str:
    console = Console(width=width, record=True, force_terminal=False)
    with console.capture() as capture:
        console.print(panel(status))
    return capture.get()


@pytest.mark.parametrize("width", [40, 80, 140])
def test_it_fits_and_tells_what_matters(width: int, status: Status) -> None:
    text = rendered(status, width)
    lines = text.splitlines()
    assert all(len(line) <= width for line in lines)
    flat = " ".join(text.replace("│", " ").split())
    for part in (
        "needs a person",
        "step 30 of 40",
        "2.5000",
        "123,456",
        "3.250",
        "exit code 76",
        "4 steps lost",
        "killed 1",
    ):
        assert part in flat, part
    assert "run.dir=" in flat


def test_an_incident_is_called_by_the_step_that_it_began_with(tmp_path: Path) -> None:
    """As in the post-mortem, and in what people are told; it was acted on a step later."""
    journal(tmp_path, incident(1, step=121, onset=120))
    status = read_status(tmp_path)
    assert (status.incidents[0].onset, status.incidents[0].step) == (120, 121)
    assert "#1 step 120: spike" in rendered(status, 140)
    assert news(event_of(incident(1, step=121, onset=120))) == "incident 1 (step 120) opened"


def test_an_alert_stands_out(status: Status) -> None:
    assert "ALERT" not in rendered(status, 80)
    assert "ALERT      since step 7: spent" in rendered(replace(status, alert="since step 7: spent"), 80)


@pytest.mark.parametrize("width", [80, 140])
def test_nothing_in_it_acts(width: int, status: Status) -> None:
    text = rendered(status, width)
    assert all(c.isprintable() or c == "\n" for c in text)
    assert "\\x1b[2J[bold]" in text and "[red]x\\x1b[31m" in text


def test_a_terminal_is_not_overrun(status: Status) -> None:
    status = replace(status, state=State.RUNNING, reason="", advice="nothing to do")
    console = Console(width=80, height=24, force_terminal=True, color_system=None)
    with console.capture() as capture:
        console.print(panel(status))
    assert len(capture.get().splitlines()) <= 24


@pytest.mark.quick("False-80-24")
@pytest.mark.parametrize(("width", "height"), [(80, 24), (140, 40)])
@pytest.mark.parametrize("over", [False, True])
def test_a_large_run_with_many_incidents_stays_one_screen(
    over: bool, width: int, height: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path.parent)  # as people see it: by a path that is not long
    silent = [f"rank {rank} does not answer (asleep in futex_wait_queue)" for rank in range(128)]
    failure, stacks = "; ".join(silent), [f"logs/attempt-0001/rank-{rank}.stacks" for rank in range(128)]
    exclude = "@".join(f"node-{n:03d}" for n in range(16))
    journal(
        tmp_path,
        {
            "event": "supervisor", "what": "started", "recipe": "launch/recipes/7b.yaml",
            "overrides": ["run.dir=runs/7b", "parallel.tensor=8", "parallel.pipeline=4"],
            "given": ["--hostfile", "hostfile", "--exclude", exclude],
        },
    )  # fmt: skip
    for n in range(1, 1001):
        journal(
            tmp_path,
            {"event": "launched", "attempt": n},
            {"event": "training", "step": n, "world": 128},
            {"event": "hang", "attempt": n, "step": n, "silent": silent, "stacks": stacks},
            {"event": "ended", "attempt": n, "hung": True, "failure": failure},
            incident(
                n, verdict="hang", failure=failure, evidence=stacks, outcome="healed" if n % 3 else "open"
            ),
            {"event": "restart", "attempt": n, "reason": failure},
            begin=time.time() - 7000,
        )
    if over:
        journal(tmp_path, {"event": "supervisor", "what": "ended", "code": 76, "reason": failure})
    told = {"attempt": 1000, "step": 1000, "steps": 9000, "loss": 2.0, "lr": 1e-4, "grad_norm": 0.5, "world": 128,
            "seconds": 3.0, "applied": False, "tokens_per_second": 1e6, "phase": "step"}  # fmt: skip
    (tmp_path / "progress.json").write_text(json.dumps(told))
    console = Console(width=width, height=height, force_terminal=True, color_system=None)
    with console.capture() as capture:
        console.print(panel(read_status(Path(tmp_path.name))))
    lines = capture.get().splitlines()
    assert len(lines) < height and all(len(line) <= width for line in lines)
    # No part of the command is lost.
    assert exclude in "".join(line.strip("│ ") for line in lines)


def test_where_the_time_went_is_a_line(status: Status) -> None:
    seconds = {"training": 880.0, "start_up": 100.0, "waiting_for_hosts": 19.5, "hang": 0.5}
    told = replace(status, goodput={"share": 0.88, "wall_seconds": 1000.0, "seconds": seconds})
    wanted = "88.0% of 17 min was training, start up 10.0%, waiting for hosts 1.9%"
    (line,) = (line for line in rendered(told, 119).splitlines() if "goodput" in line)
    assert wanted in line and "hang" not in line
    assert "goodput" not in rendered(replace(status, goodput=None), 140)


def test_a_run_of_nothing(tmp_path: Path) -> None:
    (tmp_path / "recipe.yaml").touch()
    text = rendered(read_status(tmp_path), 80)
    assert "not started" in text and "none yet" in text and "step 0" in text


def test_live_ends_with_the_run(tmp_path: Path) -> None:
    journal(tmp_path, {"event": "training", "step": 0}, {"event": "finished", "steps": 3})
    console = Console(width=80, force_terminal=True, color_system=None)
    with console.capture() as capture:
        status = live(RunWatch(tmp_path), console, seconds=0.01)
    assert status.state is State.FINISHED and "finished" in capture.get()
    looks: list[Status] = []
    with console.capture():
        live(
            RunWatch(tmp_path), console, seconds=0.0, until=lambda s: bool(looks.append(s)) or len(looks) == 3
        )
    assert len(looks) == 3


@given(st.lists(st.floats(allow_nan=True, allow_infinity=True), max_size=50), st.integers(1, 30))
def test_a_sparkline_has_a_bar_for_every_value_or_as_many_as_fit(values: list[float], width: int) -> None:
    line = sparkline(values, width)
    assert len(line) == min(width, len(values))
    assert set(line) <= {*BARS, "×"}
    if len(values) <= width:
        assert [c == "×" for c in line] == [not math.isfinite(v) for v in values]


def test_a_sparkline_shows_a_fall_and_survives_a_spike() -> None:
    falling = [5 - n / 10 for n in range(32)]
    assert sparkline(falling, 32)[0] == "█" and sparkline(falling, 32)[-1] == "▁"
    assert list(sparkline(falling, 32)) == sorted(sparkline(falling, 32), reverse=True)
    spiked = sparkline([*falling, 1e9], 33)
    assert spiked[-1] == "█" and len(set(spiked)) > 4


@given(st.text(max_size=30))
def test_visible_text_acts_on_nothing(text: str) -> None:
    shown = visible(text)
    assert shown.isprintable() or shown == ""
    assert visible(shown) == shown


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.42, "0.4 s"), (9.96, "10 s"), (59.4, "59 s"), (59.9, "1 min"), (3599, "1 h 0 min"), (12_000, "3 h 20 min"),
     (360_000, "4 d 4 h")],
)  # fmt: skip
def test_durations(seconds: float, text: str) -> None:
    assert duration(seconds) == text


def test_sizes() -> None:
    assert (size(73_509_951), size(9.8e10), size(None)) == ("73.5 MB", "98 GB", "?")


def test_who_trains_and_who_failed_is_a_line(status: Status) -> None:
    told = replace(status, hosts=("first", "fourth"), left_out={"second": status.time + 600})
    (line,) = (line for line in rendered(told, 119).splitlines() if "hosts" in line)
    assert "first, fourth; failed, and the last choice: second until " in line
    many = replace(status, hosts=tuple(f"n{number}" for number in range(20)), left_out={})
    (line,) = (line for line in rendered(many, 119).splitlines() if "hosts" in line)
    assert "n7 and 12 more" in line
    assert "hosts" not in rendered(replace(status, hosts=("first",), left_out={}), 140)
