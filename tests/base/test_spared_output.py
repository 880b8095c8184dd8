"""Output that nobody takes, in processes of their own."""

from __future__ import annotations

import os
import pty
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import pytest

SPARE = "import sys; from megastable.base.spared_output import spare_output; spare_output(); "
FULL = Path("/dev/full")
MUCH = 1 << 20  # bytes, more than any pipe here holds
PRINTS = f"""
import logging, sys
from rich.console import Console
print("x"); print("y", file=sys.stderr, flush=True)
sys.stdout.write("z" * {MUCH}); sys.stdout.flush()
logging.getLogger("library").warning("w")
Console().print("r" * 9999)
Console(stderr=True).print("r")
"""
# A library that has a handler of its own before our streams are there, as DeepSpeed has.
LIBRARY = "import logging, sys; logging.getLogger('library').addHandler(logging.StreamHandler(sys.stdout)); "


def run(code: str, out: int) -> int:
    return subprocess.run([sys.executable, "-u", "-c", code], stdout=out, stderr=out).returncode


@pytest.mark.skipif(not FULL.exists(), reason="no /dev/full here")
def test_a_full_disk_ends_no_process_that_prints() -> None:
    with FULL.open("w") as full:
        assert run(PRINTS, full.fileno()) != 0
        assert run(LIBRARY + SPARE + PRINTS, full.fileno()) == 0
        assert run(SPARE + "raise SystemExit(7)", full.fileno()) == 7


def test_a_reader_that_is_gone_ends_no_process_that_prints() -> None:
    reading, writing = os.pipe()
    os.close(reading)
    assert run(PRINTS, writing) != 0
    assert run(LIBRARY + SPARE + PRINTS, writing) == 0
    os.close(writing)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["pipe", "terminal"])
def test_nobody_waits_for_a_reader_that_does_not_read(kind: str) -> None:
    reading, writing = os.pipe() if kind == "pipe" else pty.openpty()
    assert run(LIBRARY + SPARE + PRINTS, writing) == 0  # hangs for ever else
    assert os.get_blocking(writing)  # others share it
    os.close(reading)
    os.close(writing)


def test_a_reader_that_comes_back_is_told_what_it_has_missed() -> None:
    """And all that a reader takes in time is written, however much that is."""
    code = SPARE + f"sys.stdout.write('a' * {MUCH}); print(flush=True); input(); print('b', flush=True)"
    child = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert child.stdin is not None and child.stdout is not None
    # It has lost the rest when it waits for a line: the first one fills the pipe for good.
    while Path(f"/proc/{child.pid}/syscall").read_text().split()[:2] != ["0", "0x0"]:
        assert child.poll() is None
    os.set_blocking(child.stdout.fileno(), False)
    early = b""
    with suppress(BlockingIOError):
        while block := os.read(child.stdout.fileno(), MUCH):
            early += block
    os.set_blocking(child.stdout.fileno(), True)
    late, _ = child.communicate(b"\n")
    assert set(early) == {ord("a")}
    lost = MUCH + 1 - len(early)
    told = f"\n[{lost} bytes of output were lost here: their reader did not take them]\nb\n"
    assert late.decode() == told

    code = SPARE + f"sys.stdout.write('a' * {MUCH})"
    assert len(subprocess.run([sys.executable, "-c", code], capture_output=True).stdout) == MUCH


def test_what_there_is_room_for_is_written_at_once(tmp_path: Path) -> None:
    code = "print('a'); print('ü\\ud800', file=sys.stderr); import os; os._exit(0)"
    with (tmp_path / "out").open("w") as file:
        assert run(SPARE + code, file.fileno()) == 0
    assert (tmp_path / "out").read_text() == "a\nü\\ud800\n"


def test_closed_output_is_no_files_output(tmp_path: Path) -> None:
    """The next file to be opened would get the number of the closed descriptor, and what is printed to it."""
    code = (
        SPARE
        + "import os; f = open(sys.argv[1], 'w'); os.system('echo a; echo b >&2'); print('c', flush=True)"
    )
    script = '"$0" -c "$1" "$2" <&- >&- 2>&-'
    done = subprocess.run(["bash", "-c", script, sys.executable, code, str(tmp_path / "file")])
    assert done.returncode == 0
    assert (tmp_path / "file").read_text() == ""
