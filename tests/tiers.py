"""Which tests are quick, `bash launch/test.sh`, and which only in the full suite, `bash launch/test.sh all`.

A test marked `slow` is only in the full suite. Of the cases of a parametrized test that is marked `quick("one",
"tp2*")` only those with these ids are quick, and the others are slow: they repeat in another layout, or for another
kind, what the quick ones hold.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from fnmatch import fnmatchcase

import pytest


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
