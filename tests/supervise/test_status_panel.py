"""The panel: fits, tells what matters, and lets no text of a run act on the terminal."""

from __future__ import annotations

import json
import math
import time
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from rich.console import Console

from megastable.run.records import Recorder
from megastable.supervise.standing import State
from megastable.supervise.status import RunWatch, Status, collect_facts, read_status
from megastable.supervise.status_panel import BARS, build_panel, print_status, show_live, sparkline
from tests.report.runs import step_record
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


def test_show_has_the_command_to_copy_on_a_line_of_its_own(status: Status) -> None:
    assert len(status.command) > 40 and status.advice.endswith(status.command)
    for width in (40, 140):
        console = Console(width=width, force_terminal=True, color_system=None)
        with console.capture() as capture:
            print_status(status, console)
        assert capture.get().splitlines()[-1] == status.command


def rendered(status: Status, width: int) -> str:
    console = Console(width=width, record=True, force_terminal=False)
    with console.capture() as capture:
        console.print(build_panel(status))
    return capture.get()


@pytest.mark.parametrize("width", [40, 80, 140])
def test_panel_fits_and_tells_what_matters_and_nothing_in_it_acts(width: int, status: Status) -> None:
    text = rendered(replace(status, alert="since step 7: spent"), width)
    assert all(len(line) <= width for line in text.splitlines())
    flat = " ".join(text.replace("│", " ").split())
    told = [
        "needs a person",
        "step 30 of 40",
        "2.5000",
        "123,456",
        "3.250",
        "exit code 76",
        "killed 1",
        "run.dir=",
    ]
    assert not [part for part in (*told, "4 steps lost", "ALERT since step 7: spent") if part not in flat]
    assert all(c.isprintable() or c == "\n" for c in text)
    assert width == 40 or ("\\x1b[2J[bold]" in text and "[red]x\\x1b[31m" in text)


def test_panel_and_facts_have_a_line_for_experts(status: Status, tmp_path: Path) -> None:
    assert "experts" not in rendered(status, 80)
    (run,) = tmp_path.iterdir()
    (run / "steps").mkdir()
    recorder = Recorder(run / "steps", 1)
    routed = {"expert_violation": 1.31, "expert_idle": 0.125, "router_entropy": 1.72}
    recorder.add_records(replace(step_record(30, time.time(), 2.5), **routed))
    found = read_status(run)
    line = "experts    load up to 1.31 times the mean · 12.5% idle · entropy 1.72 nats"
    assert line in rendered(found, 80)
    readings = collect_facts(found)["readings"]
    assert {name: readings[name] for name in routed} == pytest.approx(routed)


@pytest.mark.quick("False-80-24")
@pytest.mark.parametrize(("width", "height"), [(80, 24), (140, 40)])
@pytest.mark.parametrize("over", [False, True])
def test_panel_of_a_large_run_with_many_incidents_stays_one_screen(
    over: bool, width: int, height: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path.parent)  # as people see it: by a path that is not long
    silent = [f"rank {rank} does not answer (asleep in futex_wait_queue)" for rank in range(128)]
    failure, exclude = "; ".join(silent), "@".join(f"node-{n:03d}" for n in range(16))
    told = {
        "overrides": ["run.dir=runs/7b", "parallel.tensor=8"],
        "given": ["--hostfile", "hostfile", "-e", exclude],
    }
    journal(tmp_path, {"event": "supervisor", "what": "started", "recipe": "launch/recipes/7b.yaml"} | told)
    for n in range(1, 301):
        journal(
            tmp_path, {"event": "launched", "attempt": n}, {"event": "training", "step": n, "world": 128},
            {"event": "hang", "attempt": n, "step": n, "silent": silent, "stacks": []},
            {"event": "ended", "attempt": n, "hung": True, "failure": failure},
            incident(n, verdict="hang", failure=failure, outcome="healed" if n % 3 else "open"),
            {"event": "restart", "attempt": n, "reason": failure}, begin=time.time() - 7000,
        )  # fmt: skip
    if over:
        journal(tmp_path, {"event": "supervisor", "what": "ended", "code": 76, "reason": failure})
    told = {"attempt": 300, "step": 300, "steps": 9000, "loss": 2.0, "lr": 1e-4, "grad_norm": 0.5, "world": 128,
            "seconds": 3.0, "applied": False, "tokens_per_second": 1e6, "phase": "step"}  # fmt: skip
    (tmp_path / "progress.json").write_text(json.dumps(told))
    console = Console(width=width, height=height, force_terminal=True, color_system=None)
    with console.capture() as capture:
        console.print(build_panel(read_status(Path(tmp_path.name))))
    lines = capture.get().splitlines()
    assert len(lines) < height and all(len(line) <= width for line in lines)
    # No part of the command is lost.
    assert exclude in "".join(line.strip("│ ") for line in lines)


def test_live_ends_with_the_run(tmp_path: Path) -> None:
    journal(tmp_path, {"event": "training", "step": 0}, {"event": "finished", "steps": 3})
    console = Console(width=80, force_terminal=True, color_system=None)
    with console.capture() as capture:
        status = show_live(RunWatch(tmp_path), console, seconds=0.01)
    assert status.state is State.FINISHED and "finished" in capture.get()


@example([1.0, math.nan, 2.0, -math.inf], 30)
@given(st.lists(st.floats(allow_nan=True, allow_infinity=True), max_size=50), st.integers(1, 30))
def test_sparkline_has_a_bar_for_every_value_or_as_many_as_fit(values: list[float], width: int) -> None:
    line = sparkline(values, width)
    assert len(line) == min(width, len(values))
    assert set(line) <= {*BARS, "×"}
    if len(values) <= width:
        assert [c == "×" for c in line] == [not math.isfinite(v) for v in values]
