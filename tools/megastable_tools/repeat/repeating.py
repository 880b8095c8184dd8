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
from megastable.base.text import count_noun
from megastable.cluster.child_process import LOOK, ChildProcess
from megastable.cluster.launcher import build_launcher_command
from megastable_tools.repeat.differences import (
    BitComparison,
    BitDifference,
    Deviation,
    FirstDifference,
    LayoutComparison,
    Ranks,
    bit_difference,
    first_beyond,
    first_difference,
)
from megastable_tools.repeat.trace_file import (
    PlantSpot,
    TraceHeader,
    TracePoint,
    TraceRequest,
    describe_step,
    path_of,
    read_header,
    read_steps,
)

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


def run_twice(plan: RepeatPlan, bar: Bar) -> RepeatResult:
    """Raises ConfigError or DataError for a run that fails, with the end of its output."""
    trace_folders = [plan.folder / run_name for run_name in ("first", "second")]
    request = TraceRequest(steps=plan.steps, moments=plan.tolerance is not None, blocks_only=plan.blocks_only)
    bar.set_description("run 1 of 2")
    one = _run(plan, plan.ways[0], trace_folders[0], request, bar)
    plant_point = None
    if plan.planted is not None:
        plant_point = plan.planted.find_point(_step(trace_folders[0], len(one), plan.planted.step))
    planted_request = request.model_copy(update={"plant": plant_point})
    bar.set_description("run 2 of 2")
    other = _run(plan, plan.ways[1], trace_folders[1], planted_request, bar)
    pairs = _pairs(trace_folders, (len(one), len(other)), plan.steps)
    if plan.tolerance is not None:
        return RepeatResult(plan, (one, other), first_beyond(pairs, plan.tolerance))
    if one[0].layout != other[0].layout:
        raise ConfigError(
            f"the layouts are not the same ({one[0].layout} and {other[0].layout}): sums are rounded differently; give "
            "a --tolerance above 0"
        )
    bit_comparison = first_difference(pairs)
    found_difference, second_look = bit_comparison.difference, None
    if plan.again and found_difference is not None and found_difference.other is None:
        bar.extend_total(2 * found_difference.step)
        second_look = _look_again(plan, found_difference, trace_folders, planted_request, bar)
    return RepeatResult(plan, (one, other), bit_comparison, second_look)


def _look_again(
    plan: RepeatPlan, found: FirstDifference, before: Sequence[Path], planted: TraceRequest, bar: Bar
) -> SecondLook:
    operation, point = found.operation, TracePoint.of(found.operation, found.step, found.rank)
    folders = [folder.with_name(f"{folder.name}-again") for folder in before]
    world = 0
    for number, (folder, way) in enumerate(zip(folders, plan.ways, strict=True), start=1):
        bar.set_description(f"run {number} of 2, again")
        plant = planted.plant if number == 2 else None
        request = planted.model_copy(update={"steps": found.step, "plant": plant, "dump": point})
        world = len(_run(plan, way, folder, request, bar))
    again = first_difference(_pairs(folders, (world, world), found.step)).difference
    # The odd one is 1 or 2, if three of four are the same and the other one is that.
    all_prints = [_fingerprint(folder, world, point) for folder in (*before, *folders)]
    first_print, second_print, *new_prints = all_prints
    odd = None
    if len({*new_prints}) == 1 and (first_print == new_prints[0]) != (second_print == new_prints[0]):
        odd = 2 if first_print == new_prints[0] else 1
    if again is None:
        return SecondLook("no difference", odd)
    if (again.step, again.operation, again.rank) != (found.step, operation, found.rank):
        return SecondLook("elsewhere", odd, elsewhere=again)
    import torch

    dumps = [folder / f"dump-{point.rank}.pt" for folder in folders]
    one, other = (torch.load(dump, map_location="cpu", weights_only=True) for dump in dumps)
    return SecondLook("same place", odd, bit_difference(one, other))


def _fingerprint(folder: Path, world: int, point: TracePoint) -> int | None:
    rank_trace = _step(folder, world, point.step)[point.rank]
    for traced_operation, value in zip(rank_trace.operations, rank_trace.fingerprints.tolist(), strict=True):
        if TracePoint.of(traced_operation, point.step, point.rank) == point:
            return int(value)
    return None


# Traces


def _steps(folder: Path, world: int, steps: int) -> Iterator[Ranks]:
    """The traces of all ranks, step by step. Raises DataError if one has not all `steps`."""
    step_count = -1
    for step_traces in zip(*(read_steps(folder, rank_number) for rank_number in range(world)), strict=False):
        step_count += 1
        yield step_traces
    if step_count != steps:
        raise DataError(f"{folder}: the traces end after step {max(step_count, 0)} of {steps}: run it again")


def _step(folder: Path, world: int, step: int) -> Ranks:
    return next(step_traces for step_traces in _steps(folder, world, step) if step_traces[0].step == step)


def _pairs(folders: Sequence[Path], worlds: tuple[int, int], steps: int) -> Iterator[tuple[Ranks, Ranks]]:
    one, second_steps = (_steps(folder, world, steps) for folder, world in zip(folders, worlds, strict=True))
    return zip(one, second_steps, strict=True)


# Processes


def _run(plan: RepeatPlan, way: Way, folder: Path, request: TraceRequest, bar: Bar) -> list[TraceHeader]:
    """Train with a trace; the headers of all ranks."""
    request.save_request(folder)
    forced_overrides = [] if plan.blocks_only else [UNCOMPILED]
    run_overrides = [*way.overrides, *forced_overrides, f"run.dir={folder.resolve()}"]
    run_launcher(build_launcher_command(MODULE, str(plan.recipe), run_overrides, way.given), folder, bar)
    first_header = read_header(folder, 0)
    return [first_header, *(read_header(folder, rank_number) for rank_number in range(1, first_header.world))]


def run_launcher(words: Sequence[str], folder: Path, told: Callable[[int], None]) -> None:
    """Run the launcher to its end, with its output in the folder. told: of the steps that rank 0 has done since it was
    told last. Raises ConfigError and DataError."""
    output_log, done = folder / "output.log", 0
    try:
        launcher_process = ChildProcess(words, log=output_log)
    except OSError as error:
        raise ConfigError(f"{words[0]} could not be started: {error}") from None
    try:
        process_result = None
        while process_result is None:
            process_result = launcher_process.poll()
            if (steps_now := _done(folder)) > done:
                told(steps_now - done)
                done = steps_now
            if process_result is None:
                time.sleep(LOOK)
    except BaseException:
        # As Ctrl-C would: the launcher ends the ranks of other hosts, too.
        end_deadline = time.monotonic() + PATIENCE
        with suppress(ProcessLookupError):
            os.kill(launcher_process.pid, signal.SIGINT)
        while launcher_process.poll() is None and time.monotonic() < end_deadline:
            time.sleep(LOOK)
        launcher_process.kill()
        raise
    if process_result.code != 0:
        raise _failure(output_log, process_result.code)


def _done(folder: Path) -> int:
    """The steps that rank 0 has written: all lines but the header and the initial state."""
    try:
        return max(0, path_of(folder, 0).read_bytes().count(b"\n") - 2)
    except OSError:
        return 0


def _failure(log: Path, code: int | None) -> MegastableError:
    try:
        log_lines = log.read_text(errors="replace").strip().splitlines()
    except OSError:
        log_lines = []
    told_text = next((log_line for log_line in log_lines if log_line.startswith("error: ")), None)
    if code == BAD_INPUT and told_text is not None:
        return ConfigError(told_text.removeprefix("error: "))
    last_lines = "\n".join(log_lines[-LAST_WORDS:])
    return DataError(f"the traced run ended with code {code}:\n{last_lines}\nall of its output: {log}")


# What was found, in sentences and for JSON


def describe_result(result: RepeatResult) -> list[str]:
    """The last one is the answer."""
    found, (one, second_headers) = result.compared, result.headers
    if isinstance(found, LayoutComparison):
        return _describe_layouts(result, found)
    if found.difference is None:
        return [f"no difference in {_extent(result)}: {count_noun(found.tensors, 'tensor')} compared"]
    sentence_lines = [_spread(found.difference)]
    if result.again is not None:
        sentence_lines.append(_again(result.again))
    if not (one[0].exact and second_headers[0].exact):
        sentence_lines.append(
            f"{one[0].device}: kernels may sum in another order each time; run.deterministic=true forbids it"
        )
    told = str(found.difference)
    if len({rank_header.host for rank_header in one}) > 1:
        rank = found.difference.rank
        told = told.replace(f"rank {rank},", f"rank {rank} (host {one[rank].host}),", 1)
    found_bits = result.again.bits if result.again is not None else None
    return [*sentence_lines, f"first difference: {told}" + ("" if found_bits is None else f": {found_bits}")]


def result_tree(result: RepeatResult) -> dict[str, Any]:
    """For JSON."""
    plan, found = result.plan, result.compared
    result_facts: dict[str, Any] = {
        "kind": "repeat", "recipe": str(plan.recipe), "overrides": [list(way.overrides) for way in plan.ways],
        "same": result.same, "steps": plan.steps, "compared_steps": found.steps, "tensors": found.tensors,
        "runs": [asdict(headers[0]) | {"hosts": [h.host for h in headers]} for headers in result.headers],
        "says": describe_result(result)[-1],
    }  # fmt: skip
    if isinstance(found, LayoutComparison):
        return result_facts | {
            "tolerance": plan.tolerance, "difference": _flat(found.first), "largest": _flat(found.largest),
            "unmatched": list(found.unmatched),
        }  # fmt: skip
    again = result.again
    return result_facts | {
        "difference": _flat(found.difference),
        "again": None if again is None else asdict(again) | {"elsewhere": _flat(again.elsewhere)},
    }


def _flat(found: FirstDifference | Deviation | None) -> dict[str, Any] | None:
    """With the operation's fields beside the others."""
    if found is None:
        return None
    operation = found.operation
    micro_batch = None if operation.micro_batch < 0 else operation.micro_batch
    return asdict(found) | {"operation": operation.name, "phase": operation.phase, "micro_batch": micro_batch}


def _extent(result: RepeatResult) -> str:
    worlds = [len(run_headers) for run_headers in result.headers]
    ranks = count_noun(worlds[0], "rank") if worlds[0] == worlds[1] else f"{worlds[0]} and {worlds[1]} ranks"
    return f"{count_noun(result.compared.steps, 'step')} of {ranks}"


def _spread(found: FirstDifference) -> str:
    compared_text = count_noun(found.compared, "tensor")
    told = f"{describe_step(found.step)}: {found.differing:,} of {compared_text} differ"
    if len(found.ranks) > 1:
        shown = ", ".join(map(str, found.ranks[:SHOWN])) + (", ..." if len(found.ranks) > SHOWN else "")
        told += f"; the first on ranks {shown} alike: they exchange there, which hides whose part it was"
    return told


def _again(look: SecondLook) -> str:
    odd_text = "" if look.odd is None else f"; run {look.odd} is the odd one of four"
    if look.outcome == "same place":
        return f"run again, both differ at the same place: repeatable{odd_text}"
    if look.outcome == "elsewhere":
        return f"run again, they first differ elsewhere ({look.elsewhere}): transient{odd_text}"
    return f"run again, they do not differ up to there: transient{odd_text}"


def _describe_layouts(result: RepeatResult, found: LayoutComparison) -> list[str]:
    sentences, names = list[str](), found.unmatched
    if names:
        more_text = f" and {len(names) - SHOWN:,} more" if len(names) > SHOWN else ""
        sentences.append(f"only in one of the two, and not compared: {', '.join(names[:SHOWN])}{more_text}")
    if found.largest is not None:
        sentences.append(f"largest difference within the tolerance: {found.largest}")
    beyond_text = f"beyond {result.plan.tolerance:g} (relative)"
    if found.first is not None:
        return [*sentences, f"first difference {beyond_text}: {found.first}"]
    statistics_text = f"statistics of {count_noun(found.tensors, 'tensor')}"
    return [*sentences, f"no difference {beyond_text} in {_extent(result)}: {statistics_text} compared"]
