"""How much memory a process took."""

from __future__ import annotations

import re
from pathlib import Path


def peak_mib() -> float:
    """The most that this program ever held, in MiB. `getrusage` would count what its parent held before it, too."""
    found = re.search(r"^VmHWM:\s+(\d+) kB$", Path("/proc/self/status").read_text(), re.M)
    assert found is not None
    return int(found[1]) / 1024
