"""How old this process is."""

from __future__ import annotations

import subprocess
import sys
import time


def test_the_age_of_a_process_is_what_another_one_has_waited_for_it() -> None:
    code = "import time; time.sleep(0.5); from megastable.base.activity import age; print(age())"
    began = time.monotonic()
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert 0.5 <= float(done.stdout) <= time.monotonic() - began + 0.02  # ticks are hundredths
