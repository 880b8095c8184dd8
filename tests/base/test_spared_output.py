"""Output for which there is no room, in processes of their own."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

SPARE = "import sys; from megastable.base.spared_output import spare_output; spare_output(); "
FULL = Path("/dev/full")


def run(code: str, out: str) -> int:
    with open(out, "w") as file:
        return subprocess.run([sys.executable, "-u", "-c", code], stdout=file, stderr=file).returncode


@pytest.mark.skipif(not FULL.exists(), reason="no /dev/full here")
def test_a_full_disk_ends_no_process_that_prints() -> None:
    prints = "print('x'); print('y', file=sys.stderr, flush=True); sys.stdout.write('z' * 99999); sys.stdout.flush()"
    assert run(f"import sys; {prints}", str(FULL)) != 0
    assert run(SPARE + prints, str(FULL)) == 0
    assert run(SPARE + "raise SystemExit(7)", str(FULL)) == 7


def test_what_there_is_room_for_is_written_at_once(tmp_path: Path) -> None:
    code = "print('a'); print('ü\\ud800', file=sys.stderr); import os; os._exit(0)"
    assert run(SPARE + code, str(tmp_path / "out")) == 0
    assert (tmp_path / "out").read_text() == "a\nü\\ud800\n"


def test_other_errors_are_raised() -> None:
    code = SPARE + "import os; os.close(1); print('x')"
    assert run(code, "/dev/null") != 0
