"""Becomes another program that ends with the process that started it; if memory is short, the kernel ends it first.

python -m megastable_tools.downstream.tether PARENT PROGRAM [ARGUMENT ...]
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from contextlib import suppress

PR_SET_PDEATHSIG = 1  # prctl(2); it outlives execve(2)
FIRST = "1000"  # the highest oom_score_adj (proc(5)); raising it needs no rights


def main() -> None:
    parent, *words = sys.argv[1:]
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != int(parent):  # it ended before that
        raise SystemExit(1)
    with suppress(OSError), open("/proc/self/oom_score_adj", "w") as file:
        file.write(FIRST)
    try:
        os.execvp(words[0], words)
    except OSError as error:
        raise SystemExit(f"{words[0]}: {error.strerror}") from None


if __name__ == "__main__":
    main()
