"""Which tests are quick, `bash launch/test.sh`, and which only in the full suite, `bash launch/test.sh all`.

A test marked `slow` is only in the full suite. Of the cases of a parametrized test that is marked `quick("one",
"tp2*")` only those with these ids are quick, and the others are slow: they repeat in another layout, or for another
kind, what the quick ones hold. A property test tries fewer examples in the quick suite.
"""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Iterable
from fnmatch import fnmatchcase

import pytest
from hypothesis import settings

FEWER = 6  # times as many examples in the full suite
LEAST = 8  # examples
IS_QUICK = os.environ.get("MEGASTABLE_TIER") == "quick"  # launch/test.sh says so


def examples(number: int) -> int:
    """How many examples a property test tries: `number` in the full suite, fewer in the quick one."""
    return max(LEAST, number // FEWER) if IS_QUICK else number


# Of the tests that name no number of their own. pyproject.toml has pytest load this profile, later than this line.
settings.register_profile("ci", settings.get_profile("ci"), max_examples=examples(100))


def mark_slow_cases(items: Iterable[pytest.Item]) -> None:
    """Mark the cases slow that their test's mark `quick` does not name. UsageError if it names none of several."""
    cases: defaultdict[tuple[object, str], list[bool]] = defaultdict(list)
    for item in items:
        mark = item.get_closest_marker("quick")
        if mark is None or not isinstance(item, pytest.Function):
            continue
        case = item.nodeid.partition("[")[2].removesuffix("]")
        is_quick = any(fnmatchcase(case, pattern) for pattern in mark.args)
        cases[item.parent, item.originalname].append(is_quick)
        if not is_quick:
            item.add_marker(pytest.mark.slow)
    for (_, name), quick in cases.items():
        if len(quick) > 1 and not any(quick):
            raise pytest.UsageError(f"{name}: its mark `quick` names none of its {len(quick)} cases")
