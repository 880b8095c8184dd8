"""What is left to the full suite, `bash launch/test.sh all`: more of what the quick suite tests once."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any

import pytest


def thinned(every: Iterable[Any], quick: Collection[Any]) -> list[Any]:
    """All values of a parameter (tuples: of several); those that are not among `quick` are slow."""
    values = list(every)
    assert all(value in values for value in quick), "a value of the quick suite is gone"
    return [value if value in quick else _slow(value) for value in values]


def _slow(value: Any) -> Any:
    values = value if isinstance(value, tuple) else (value,)
    return pytest.param(*values, marks=pytest.mark.slow)
