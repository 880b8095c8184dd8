"""What a repetition found, in sentences and as a tree for JSON. Pure."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from megastable.base.text import plural
from megastable.repeat.first_difference import FirstDifference
from megastable.repeat.layout_difference import LayoutComparison
from megastable.repeat.operations import when
from megastable.repeat.repeating import RepeatResult, SecondLook
from megastable.repeat.trace_file import TraceHeader

SHOWN = 8  # names and ranks in a sentence


def sentences(result: RepeatResult) -> list[str]:
    """The last one is the answer."""
    found, (one, other) = result.compared, result.headers
    if isinstance(found, LayoutComparison):
        return [*_unmatched(found), *_largest(found), _of_layouts(result, found)]
    if found.difference is None:
        return [f"no difference in {_extent(result)}: {plural(found.tensors, 'tensor')} compared"]
    lines = [_spread(found.difference)]
    if result.again is not None:
        lines.append(_again(result.again))
    if not (one[0].exact and other[0].exact):
        lines.append(
            f"{one[0].device}: kernels may sum in another order each time; run.deterministic=true forbids it"
        )
    return [*lines, f"first difference: {_place(found.difference, one, result.again)}"]


def tree(result: RepeatResult) -> dict[str, Any]:
    """For JSON."""
    plan, found = result.plan, result.compared
    facts: dict[str, Any] = {
        "kind": "repeat", "recipe": str(plan.recipe), "overrides": [list(way.overrides) for way in plan.ways],
        "same": result.same, "steps": plan.steps, "compared_steps": found.steps, "tensors": found.tensors,
        "runs": [asdict(headers[0]) | {"hosts": [h.host for h in headers]} for headers in result.headers],
        "says": sentences(result)[-1],
    }  # fmt: skip
    if isinstance(found, LayoutComparison):
        return facts | {
            "tolerance": plan.tolerance,
            "difference": None if found.first is None else _flat(asdict(found.first), found.first.operation),
            "largest": None if found.largest is None else _flat(asdict(found.largest), found.largest.operation),
            "unmatched": list(found.unmatched),
        }  # fmt: skip
    difference, again = found.difference, result.again
    return facts | {
        "difference": None if difference is None else _flat(asdict(difference), difference.operation),
        "again": None if again is None else _of_look(again),
    }


def _of_look(again: SecondLook) -> dict[str, Any]:
    where = again.elsewhere
    return asdict(again) | {"elsewhere": None if where is None else _flat(asdict(where), where.operation)}


def _flat(fields: dict[str, Any], operation: Any) -> dict[str, Any]:
    """With the operation's fields beside the others."""
    micro_batch = None if operation.micro_batch < 0 else operation.micro_batch
    return fields | {"operation": operation.name, "phase": operation.phase, "micro_batch": micro_batch}


def _extent(result: RepeatResult) -> str:
    worlds = [len(headers) for headers in result.headers]
    ranks = plural(worlds[0], "rank") if worlds[0] == worlds[1] else f"{worlds[0]} and {worlds[1]} ranks"
    return f"{plural(result.compared.steps, 'step')} of {ranks}"


def _place(found: FirstDifference, headers: list[TraceHeader], again: SecondLook | None) -> str:
    told = str(found)
    if len({header.host for header in headers}) > 1:
        told = told.replace(f"rank {found.rank},", f"rank {found.rank} (host {headers[found.rank].host}),", 1)
    bits = again.bits if again is not None else None
    return told if bits is None else f"{told}: {bits}"


def _spread(found: FirstDifference) -> str:
    told = f"{when(found.step)}: {found.differing:,} of {plural(found.compared, 'tensor')} differ"
    if len(found.ranks) > 1:
        shown = ", ".join(map(str, found.ranks[:SHOWN])) + (", ..." if len(found.ranks) > SHOWN else "")
        told += f"; the first on ranks {shown} alike: they exchange there, which hides whose part it was"
    return told


def _again(look: SecondLook) -> str:
    odd = "" if look.odd is None else f"; run {look.odd} is the odd one of four"
    if look.outcome == "same place":
        return f"run again, both differ at the same place: repeatable{odd}"
    if look.outcome == "elsewhere":
        return f"run again, they first differ elsewhere ({look.elsewhere}): transient{odd}"
    return f"run again, they do not differ up to there: transient{odd}"


def _unmatched(found: LayoutComparison) -> list[str]:
    names = found.unmatched
    if not names:
        return []
    more = f" and {len(names) - SHOWN:,} more" if len(names) > SHOWN else ""
    return [f"only in one of the two, and not compared: {', '.join(names[:SHOWN])}{more}"]


def _largest(found: LayoutComparison) -> list[str]:
    return [] if found.largest is None else [f"largest difference within the tolerance: {found.largest}"]


def _of_layouts(result: RepeatResult, found: LayoutComparison) -> str:
    beyond = f"beyond {result.plan.tolerance:g}"
    if found.first is not None:
        return f"first difference {beyond} (relative): {found.first}"
    statistics = f"statistics of {plural(found.tensors, 'tensor')}"
    return f"no difference {beyond} (relative) in {_extent(result)}: {statistics} compared"
