"""Output that nobody takes, in processes of their own."""

from __future__ import annotations

import os
import pty
import subprocess
import sys
from pathlib import Path

import pytest

SPARE = "import sys; from megastable.base.process import spare_output; spare_output(); "
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
def test_spare_output_survives_a_full_disk() -> None:
    with FULL.open("w") as full:
        assert run(PRINTS, full.fileno()) != 0
        assert run(LIBRARY + SPARE + PRINTS, full.fileno()) == 0
        assert run(SPARE + "raise SystemExit(7)", full.fileno()) == 7


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["pipe", "terminal"])
def test_spare_output_waits_for_no_reader(kind: str) -> None:
    reading, writing = os.pipe() if kind == "pipe" else pty.openpty()
    assert run(LIBRARY + SPARE + PRINTS, writing) == 0  # hangs for ever else
    assert os.get_blocking(writing)  # others share it
    os.close(reading)
    os.close(writing)


def test_spare_output_of_a_closed_stream_reaches_no_file(tmp_path: Path) -> None:
    """The next file to be opened would get the number of the closed descriptor, and what is printed to it."""
    code = (
        SPARE
        + "import os; f = open(sys.argv[1], 'w'); os.system('echo a; echo b >&2'); print('c', flush=True)"
    )
    script = '"$0" -c "$1" "$2" <&- >&- 2>&-'
    done = subprocess.run(["bash", "-c", script, sys.executable, code, str(tmp_path / "file")])
    assert done.returncode == 0
    assert (tmp_path / "file").read_text() == ""
