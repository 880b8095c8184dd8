"""The measurement of checkpoints runs, on a model that is too small to mean anything, and its sums are sums."""

from __future__ import annotations

import io
import os
import subprocess
import sys
from pathlib import Path

import pytest
from rich.console import Console

from benchmarks.saves import MEANING, Found, Measurement, Spread, table
from megastable.base.errors import CheckpointError
from megastable.config.tree import RunConfig
from tests.checkpoint.states import recipe_of
from tests.distributed import run_ranks

ROOT = Path(__file__).parents[2]


def measured(config: RunConfig, folder: Path, rounds: int) -> Measurement:
    from benchmarks.checkpoint_speed import measure

    return measure(config, folder, rounds)


def refused(config: RunConfig, folder: Path) -> str:
    from benchmarks.checkpoint_speed import measure
    from megastable.base import free_memory

    free_memory.free = lambda: 0
    try:
        measure(config, folder, 1)
    except CheckpointError as error:
        return str(error)
    return ""


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Measurement:
    folder = tmp_path_factory.mktemp("bench")
    result: Measurement = run_ranks(1, measured, recipe_of(), folder, 3)[0]
    left = {path.relative_to(folder).parts[0] for path in folder.rglob("*") if path.is_file()}
    assert left == {"waiting", "behind"}  # the copies are gone
    assert len(list(folder.glob("*/step-*"))) <= 4 and not list(folder.glob("*/.saving-*"))
    return result


@pytest.mark.slow
def test_every_number_is_there(found: Measurement) -> None:
    assert found.rounds == 3 and found.values.keys() == MEANING.keys()
    assert found.run["parameters"] > 1000 and found.bytes > 12 * found.run["parameters"]
    for name, spread in found.values.items():
        assert spread.low <= spread.median <= spread.high
        assert spread.low > 0 or name in ("slower", "added", "update"), name
    assert found.values["waiting"].median < 60 and found.first["blocked"] > found.first["copy"] > 0


@pytest.mark.slow
def test_what_the_steps_wait_for_is_what_the_stopwatches_say(found: Measurement) -> None:
    """Each part of a save behind the steps was reached, and there is next to nothing else."""
    assert found.waited.keys() == {
        "buffers by name", "state", "copy", "random states", "recipe", "fragments", "thread", "records exchanged",
        "outcome told",
    }  # fmt: skip
    # Without what an update waits for the copy, which is in a thread.
    parts, begin, heard = sum(found.waited.values()), found.values["begin"], found.values["heard"]
    assert 0.2 * (begin.low + heard.low) < 1e3 * parts < 1.5 * (begin.high + heard.high)
    assert found.behind["write"] > max(found.behind["  tensors"], found.behind["  statistics"]) > 0
    assert found.behind["read back"] > 0 and found.behind["commit"] > 0


@pytest.mark.slow
def test_shares_are_of_the_same_round(found: Measurement) -> None:
    v = found.values
    assert v["share"].high <= 100 * v["blocked"].high / v["waiting"].low * (1 + 1e-9)
    assert v["share"].low >= 100 * v["blocked"].low / v["waiting"].high * (1 - 1e-9)
    most = sum(v[part].high for part in ("begin", "update", "heard")) / 1e3
    assert v["blocked"].high <= most * (1 + 1e-9)
    assert v["resume"].low > found.bytes / 1e9 / v["verify"].high


def test_without_memory_for_a_copy_there_is_nothing_to_measure(tmp_path: Path) -> None:
    assert "training pauses for every checkpoint" in run_ranks(1, refused, recipe_of(), tmp_path)[0]


@pytest.mark.slow
@pytest.mark.parametrize(("share", "within"), [(4.9, True), (5.1, False)])
def test_the_limit(share: float, within: bool, found: Measurement) -> None:
    values = found.values | {"share": Spread(share, 1.0, 99.0)}
    changed = Measurement(found.run, 3, found.bytes, values, found.waited, found.behind, found.first)
    assert changed.within == within
    assert Found({}, {"a": changed}).of["a"].values["share"] == Spread.of([99.0, share, 1.0])


@pytest.mark.slow
def test_the_table_fits_a_terminal(found: Measurement) -> None:
    text = io.StringIO()
    Console(width=80, file=text).print(table("launch/recipes/quickstart.yaml", found))
    shown = text.getvalue()
    assert "…" not in shown and all(meaning.strip() in shown for meaning in MEANING.values())


def test_bad_input() -> None:
    command = [sys.executable, str(ROOT / "tools" / "bench.py"), "checkpoint", "--recipe", "no.yaml"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, env=os.environ)
    assert (
        done.returncode == 2 and "no.yaml: no such recipe" in done.stderr and "Traceback" not in done.stderr
    )
