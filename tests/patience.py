"""How long tests wait for what must happen. A busy machine is late; what never comes is a fault."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")

PATIENCE = 600.0  # seconds; pytest's own limit (pyproject.toml) is a little longer


def until(what: Callable[[], T]) -> T:
    """Wait until something is true, and return it."""
    end = time.monotonic() + PATIENCE
    while not (found := what()):
        assert time.monotonic() < end, "waited in vain"
        time.sleep(0.01)
    return found
