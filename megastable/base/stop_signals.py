"""Signals that ask a process of a run to stop. It is seconds of imports old before anything of it could obey."""

from __future__ import annotations

import signal

STOPS = (signal.SIGTERM, signal.SIGINT)
# Seconds within which several signals count as one: a scheduler that ends a job, and a terminal, may send the same
# signal to every process and to their parent, which passes it on.
SAME = 1.0


def hold_stops() -> None:
    """Call first in a process: a signal that comes from now on waits for `release_stops`, instead of ending it."""
    signal.pthread_sigmask(signal.SIG_BLOCK, STOPS)


def release_stops() -> None:
    """Call when the handlers are set, or where nothing is left to be stopped: a signal that waits takes effect now."""
    signal.pthread_sigmask(signal.SIG_UNBLOCK, STOPS)
