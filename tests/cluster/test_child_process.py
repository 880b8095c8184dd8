"""Child processes: fed from memory, ended in time with all that they started; probes that may hang."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import psutil

from megastable.cluster.child_process import TAIL, ChildProcess, ChildResult, TimedProbe
from tests.patience import PATIENCE, until


def test_child_process_is_fed_and_the_end_of_its_output_kept() -> None:
    given = b"x" * 200_000 + b"the end\n"
    assert ChildProcess(["sh", "-c", "cat; exit 3"], PATIENCE, given).wait() == ChildResult(
        3, ("x" * TAIL + "the end")[-TAIL + 1 :]
    )


def test_child_process_that_takes_too_long_is_ended_with_its_children(tmp_path: Path) -> None:
    log = tmp_path / "log"
    command = ChildProcess(["sh", "-c", "sleep 600 & echo $!; wait"], 0.3, log=log)
    assert command.poll() is None and command.wait() == ChildResult(None)
    child = int(log.read_text())
    until(lambda: not psutil.pid_exists(child) or psutil.Process(child).status() == psutil.STATUS_ZOMBIE)


def test_child_process_tells_the_signal_that_killed_it() -> None:
    command = ChildProcess([sys.executable, "-c", "import time; time.sleep(600)"])
    command.kill()
    assert command.wait() == ChildResult(-9)
    command.kill()  # its number may be somebody else's by now


def test_timed_probe_answers_or_says_why() -> None:
    assert TimedProbe(lambda: {"a": [1, None]}, PATIENCE).read_answer() == ({"a": [1, None]}, None)
    assert TimedProbe(lambda: "x" * 200_000, PATIENCE).read_answer() == ("x" * 200_000, None)
    assert TimedProbe(lambda: Path("/none").read_text(), PATIENCE).read_answer() == (
        None,
        "/none: No such file or directory",
    )
    assert (
        TimedProbe(lambda: 1 // 0, PATIENCE).read_answer()[1]
        == "ZeroDivisionError: integer division or modulo by zero"
    )
    assert TimedProbe(lambda: os.abort(), PATIENCE).read_answer() == (None, "the probe was killed")


def test_timed_probe_leaves_behind_what_hangs_and_holds_nothing_of_ours(tmp_path: Path) -> None:
    """As ssh does, the caller waits until nobody has the other end of the output."""
    os.mkfifo(tmp_path / "pipe")
    code = (
        "import os, sys\nfrom megastable.cluster.child_process import TimedProbe\n"
        "def stuck():\n"
        "    import signal\n"
        "    open(sys.argv[2], 'w').write(str(os.getpid()))\n"
        "    open(sys.argv[1])\n"  # nobody ever writes into it
        "one, two = TimedProbe(stuck, 0.5), TimedProbe(lambda: 'well', 60.0)\n"
        "print(one.read_answer(), two.read_answer())\n"
    )
    words = [sys.executable, "-c", code, str(tmp_path / "pipe"), str(tmp_path / "pid")]
    done = subprocess.run(words, capture_output=True, text=True, timeout=PATIENCE)
    assert "no answer within" in done.stdout and "('well', None)" in done.stdout
