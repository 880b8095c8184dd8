"""Commands beside a run: fed from memory, ended in time with all that they started; their logs as they grow."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

import psutil
import pytest

from megastable.cluster.child_process import TAIL, ChildProcess, Result
from megastable.supervise.log_tail import LogTail, end_of_log
from tests.patience import PATIENCE


def test_it_is_fed_and_the_end_of_its_output_is_kept() -> None:
    given = b"x" * 200_000 + b"the end\n"
    assert ChildProcess(["sh", "-c", "cat; exit 3"], PATIENCE, given).wait() == Result(
        3, ("x" * TAIL + "the end")[-TAIL + 1 :]
    )


def test_its_output_is_added_to_a_log(tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.write_text("before\n")
    command = ChildProcess(
        ["sh", "-c", "cat; echo $WHO >&2"], PATIENCE, b"given\n", os.environ | {"WHO": "me"}, log
    )
    assert command.wait() == Result(0) and log.read_text() == "before\ngiven\nme\n"


@pytest.mark.parametrize("waits", [True, False])
def test_one_that_takes_too_long_is_ended_with_its_children(waits: bool, tmp_path: Path) -> None:
    log = tmp_path / "log"
    command = ChildProcess(["sh", "-c", "sleep 600 & echo $!; wait"], 0.3, log=log)
    assert command.poll() is None
    if waits:
        result: Result | None = command.wait()
    else:
        until = time.monotonic() + PATIENCE
        while (result := command.poll()) is None and time.monotonic() < until:
            time.sleep(0.01)
    assert result == Result(None) and command.poll() is result
    child, until = int(log.read_text()), time.monotonic() + PATIENCE
    while psutil.pid_exists(child) and psutil.Process(child).status() != psutil.STATUS_ZOMBIE:
        assert time.monotonic() < until


def test_one_that_is_killed_says_by_which_signal() -> None:
    command = ChildProcess([sys.executable, "-c", "import time; time.sleep(600)"])
    command.kill()
    assert command.wait() == Result(-9)
    command.kill()  # its number may be somebody else's by now


def test_a_log_is_shown_in_whole_lines_once_each(tmp_path: Path) -> None:
    log = tmp_path / "log"
    tail = LogTail(log)
    assert tail.new() == ""
    with log.open("ab", buffering=0) as file:
        file.write(b"one\n\ntwo\nthr")
        assert tail.new() == "one\n\ntwo" and tail.new() == ""
        file.write(b"\xffee\n")
        assert tail.new() == "thr\ufffdee" and tail.new() == ""
        later = LogTail.at_end(log)
        file.write(b"four\n")
        assert later.new() == "four" and end_of_log(log, 5) == "four\n"
    assert end_of_log(tmp_path / "none", 5) == ""
