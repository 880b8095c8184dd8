"""Runs the same steps twice, each time by the deepspeed launcher, and compares the traces.

    result = repeat(plan, bar)

Where they differ, both are run again up to that step, with the tensor in question written to a file: that says which
bits differ, and whether they do so again.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from megastable.base.errors import BAD_INPUT, ConfigError, DataError, MegastableError
from megastable.base.progress_bar import Bar
from megastable.base.text import plural
from megastable.cluster.child_process import LOOK, ChildProcess
from megastable.cluster.launcher import launcher
from megastable_tools.repeat.first_difference import BitComparison, FirstDifference, Ranks, first_difference
from megastable_tools.repeat.flipped_bit import BitDifference, bit_difference
from megastable_tools.repeat.layout_difference import LayoutComparison, first_beyond
from megastable_tools.repeat.operations import when
from megastable_tools.repeat.trace_file import TraceHeader, path_of, read_header, read_steps
from megastable_tools.repeat.trace_request import PlantSpot, TracePoint, TraceRequest

MODULE = "megastable_tools.repeat.traced_run"
UNCOMPILED = "kernels.compile=false"  # a compiled block hides its operations
LAST_WORDS = 8  # lines of a failed run's output that the error has
PATIENCE = 10.0  # seconds for the launcher to end the ranks of all hosts
SHOWN = 8  # names and ranks in a sentence


@dataclass(frozen=True)
class Way:
    """One way of running the recipe: its overrides, and arguments of the launcher."""

    overrides: tuple[str, ...]
    given: tuple[str, ...]


@dataclass(frozen=True)
class RepeatPlan:
    """ways: of the first and the second run. tolerance: relative, None = bit for bit. again: run a difference again.
    folder: for the traces; empty."""

    recipe: Path
    ways: tuple[Way, Way]
    steps: int
    folder: Path
    tolerance: float | None = None
    planted: PlantSpot | None = None
    blocks_only: bool = False
    again: bool = True


@dataclass(frozen=True)
class SecondLook:
    """What two more runs up to the difference say. outcome: they differ at the same place, first elsewhere, or not at
    all. odd: which of the first two runs, 1 or 2, is unlike the three others at that place; None = neither, or both.
    bits: of the tensor, if it differs again. elsewhere: where, if so."""

    outcome: Literal["same place", "elsewhere", "no difference"]
    odd: int | None = None
    bits: BitDifference | None = None
    elsewhere: FirstDifference | None = None


@dataclass(frozen=True)
class RepeatResult:
    """headers: by rank, of the first and the second run. again: None if nothing was run again."""

    plan: RepeatPlan
    headers: tuple[list[TraceHeader], list[TraceHeader]]
    compared: BitComparison | LayoutComparison
    again: SecondLook | None = None

    @property
    def same(self) -> bool:
        found = self.compared
        return (found.difference if isinstance(found, BitComparison) else found.first) is None


def repeat(plan: RepeatPlan, bar: Bar) -> RepeatResult:
    """Raises ConfigError or DataError for a run that fails, with the end of its output."""
    folders = [plan.folder / name for name in ("first", "second")]
    request = TraceRequest(steps=plan.steps, moments=plan.tolerance is not None, blocks_only=plan.blocks_only)
    bar.doing("run 1 of 2")
    one = _run(plan, plan.ways[0], folders[0], request, bar)
    planted = request.model_copy(update={"plant": _point(plan, folders[0], len(one))})
    bar.doing("run 2 of 2")
    other = _run(plan, plan.ways[1], folders[1], planted, bar)
    worlds = len(one), len(other)
    if plan.tolerance is not None:
        return RepeatResult(
            plan, (one, other), first_beyond(_pairs(folders, worlds, plan.steps), plan.tolerance)
        )
    if one[0].layout != other[0].layout:
        raise ConfigError(
            f"the layouts are not the same ({one[0].layout} and {other[0].layout}): sums are rounded differently; give "
            "a --tolerance above 0"
        )
    compared = first_difference(_pairs(folders, worlds, plan.steps))
    found, look = compared.difference, None
    if plan.again and found is not None and found.other is None:
        bar.more(2 * found.step)
        look = _look_again(plan, found, folders, planted, bar)
    return RepeatResult(plan, (one, other), compared, look)


def _point(plan: RepeatPlan, folder: Path, world: int) -> TracePoint | None:
    if plan.planted is None:
        return None
    return plan.planted.found(_step(folder, world, plan.planted.step))


def _look_again(
    plan: RepeatPlan, found: FirstDifference, before: Sequence[Path], planted: TraceRequest, bar: Bar
) -> SecondLook:
    operation = found.operation
    point = TracePoint(
        step=found.step, phase=operation.phase, micro_batch=operation.micro_batch, name=operation.name,
        rank=found.rank,
    )  # fmt: skip
    folders = [folder.with_name(f"{folder.name}-again") for folder in before]
    world = 0
    for number, (folder, way) in enumerate(zip(folders, plan.ways, strict=True), start=1):
        bar.doing(f"run {number} of 2, again")
        plant = planted.plant if number == 2 else None
        request = planted.model_copy(update={"steps": found.step, "plant": plant, "dump": point})
        world = len(_run(plan, way, folder, request, bar))
    again = first_difference(_pairs(folders, (world, world), found.step)).difference
    odd = _odd([_fingerprint(folder, world, point) for folder in (*before, *folders)])
    if again is None:
        return SecondLook("no difference", odd)
    if (again.step, again.operation, again.rank) != (found.step, operation, found.rank):
        return SecondLook("elsewhere", odd, elsewhere=again)
    import torch

    one, other = (
        torch.load(folder / f"dump-{point.rank}.pt", map_location="cpu", weights_only=True)
        for folder in folders
    )
    return SecondLook("same place", odd, bit_difference(one, other))


def _odd(fingerprints: Sequence[int | None]) -> int | None:
    """1 or 2, if three of four are the same and the other one is that."""
    first, second, *more = fingerprints
    if len({*more}) == 1 and (first == more[0]) != (second == more[0]):
        return 2 if first == more[0] else 1
    return None


def _fingerprint(folder: Path, world: int, point: TracePoint) -> int | None:
    trace = _step(folder, world, point.step)[point.rank]
    for operation, value in zip(trace.operations, trace.fingerprints.tolist(), strict=True):
        if (operation.phase, operation.micro_batch, operation.name) == (
            point.phase,
            point.micro_batch,
            point.name,
        ):
            return int(value)
    return None


# Traces


def _steps(folder: Path, world: int, steps: int) -> Iterator[Ranks]:
    """The traces of all ranks, step by step. Raises DataError if one has not all `steps`."""
    count = -1
    for ranks in zip(*(read_steps(folder, rank) for rank in range(world)), strict=False):
        count += 1
        yield ranks
    if count != steps:
        raise DataError(f"{folder}: the traces end after step {max(count, 0)} of {steps}: run it again")


def _step(folder: Path, world: int, step: int) -> Ranks:
    return next(ranks for ranks in _steps(folder, world, step) if ranks[0].step == step)


def _pairs(folders: Sequence[Path], worlds: tuple[int, int], steps: int) -> Iterator[tuple[Ranks, Ranks]]:
    one, other = (_steps(folder, world, steps) for folder, world in zip(folders, worlds, strict=True))
    return zip(one, other, strict=True)


# Processes


def _run(plan: RepeatPlan, way: Way, folder: Path, request: TraceRequest, bar: Bar) -> list[TraceHeader]:
    """Train with a trace; the headers of all ranks."""
    request.save(folder)
    forced = [] if plan.blocks_only else [UNCOMPILED]
    overrides = [*way.overrides, *forced, f"run.dir={folder.resolve()}"]
    run_launcher(launcher(MODULE, str(plan.recipe), overrides, way.given), folder, bar)
    first = read_header(folder, 0)
    return [first, *(read_header(folder, rank) for rank in range(1, first.world))]


def run_launcher(words: Sequence[str], folder: Path, told: Callable[[int], None]) -> None:
    """Run the launcher to its end, with its output in the folder. told: of the steps that rank 0 has done since it was
    told last. Raises ConfigError and DataError."""
    log, done = folder / "output.log", 0
    try:
        process = ChildProcess(words, log=log)
    except OSError as error:
        raise ConfigError(f"{words[0]} could not be started: {error}") from None
    try:
        while (result := process.poll()) is None:
            time.sleep(LOOK)
            if (now := _done(folder)) > done:
                told(now - done)
                done = now
    except BaseException:
        _end(process)
        raise
    if (now := _done(folder)) > done:
        told(now - done)
    if result.code != 0:
        raise _failure(log, result.code)


def _done(folder: Path) -> int:
    """The steps that rank 0 has written: all lines but the header and the initial state."""
    try:
        return max(0, path_of(folder, 0).read_bytes().count(b"\n") - 2)
    except OSError:
        return 0


def _end(process: ChildProcess) -> None:
    """As Ctrl-C would: the launcher ends the ranks of other hosts, too."""
    until = time.monotonic() + PATIENCE
    with suppress(ProcessLookupError):
        os.kill(process.pid, signal.SIGINT)
    while process.poll() is None and time.monotonic() < until:
        time.sleep(LOOK)
    process.kill()


def _failure(log: Path, code: int | None) -> MegastableError:
    try:
        lines = log.read_text(errors="replace").strip().splitlines()
    except OSError:
        lines = []
    told = next((line for line in lines if line.startswith("error: ")), None)
    if code == BAD_INPUT and told is not None:
        return ConfigError(told.removeprefix("error: "))
    last = "\n".join(lines[-LAST_WORDS:])
    return DataError(f"the traced run ended with code {code}:\n{last}\nall of its output: {log}")


# What was found, in sentences and for JSON


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
