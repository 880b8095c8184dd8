"""Reads the scores that an evaluation has written."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megastable.base.errors import DataError
from megastable.base.text import visible

LARGEST = 50 * 2**20  # bytes of a file
MOST = 1000  # scores
LONGEST = 120  # characters of a name


def read_scores(folder: Path) -> dict[str, float]:
    """The scores in the newest results*.json below `folder`, by name. Raises DataError if there are none.

    The file has numbers by name, `{"acc": 0.5}`, or by task and name, `{"arc": {"acc": 0.5}}`, or the latter below
    "results", as lm-evaluation-harness writes it.
    """
    try:
        files = sorted(folder.rglob("results*.json"), key=lambda path: path.stat().st_mtime_ns)
        if not files:
            raise DataError("it has written no results: the JSON file belongs where {results} says")
        if files[-1].stat().st_size > LARGEST:
            raise DataError(f"{files[-1].name} has more than {LARGEST >> 20} MiB")
        content = json.loads(files[-1].read_bytes())
    except OSError as error:
        raise DataError(f"its results cannot be read: {error}") from None
    except (ValueError, RecursionError) as error:
        raise DataError(f"{files[-1].name} is no JSON: {visible(error, 200)}") from None
    found = scores_of(content)
    if not found:
        raise DataError(f"{files[-1].name} has no numbers: expected {{task: {{metric: number}}}}")
    if len(found) > MOST:
        raise DataError(f"{files[-1].name} has {len(found):,} numbers, more than {MOST:,}")
    return found


def scores_of(content: Any) -> dict[str, float]:
    """The finite numbers of a results file, by "TASK/METRIC" or name."""
    if not isinstance(content, Mapping):
        return {}
    harness = isinstance(content.get("results"), Mapping)
    found: dict[str, float] = {}
    for name, value in (content["results"] if harness else content).items():
        if isinstance(value, Mapping):
            found |= {f"{name}/{_metric(key)}": number for key, number in value.items() if not _is_error(key)}
        else:
            found[name] = value
    numbers = {name: value for name, value in found.items() if _is_finite(value)}
    return {visible(name, LONGEST): float(value) for name, value in numbers.items()}


def _metric(key: str) -> str:
    """lm-evaluation-harness writes "acc,none": the metric, and the filter of the answers."""
    return key.removesuffix(",none")


def _is_error(key: str) -> bool:
    """Standard errors and counts of lm-evaluation-harness are no scores."""
    return "_stderr" in key or key == "sample_len"


def _is_finite(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
