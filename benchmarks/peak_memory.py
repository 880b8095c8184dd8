"""Peak memory of a process."""

from __future__ import annotations

import re
from pathlib import Path


def peak_mib() -> float:
    """The peak memory of this program, in MiB. `getrusage` would include its parent's before exec."""
    found = re.search(r"^VmHWM:\s+(\d+) kB$", Path("/proc/self/status").read_text(), re.M)
    assert found is not None
    return int(found[1]) / 1024
