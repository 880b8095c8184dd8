"""Every layout goes on from every other's checkpoint: the same bytes, and the losses of a run that was never moved.

All pairs: MEGASTABLE_RESHAPES=all. The suite goes from each layout to the next one, around the circle.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

from megastable.checkpoint.whole import WholeState
from megastable.config.training import VitalsConfig
from megastable.config.tree import RunConfig
from megastable.engine.flatstate import KINDS
from megastable.run import records
from megastable.run.directory import RunDirectory
from megastable.run.events.training_events import CheckpointRejected, Resumed
from tests.conftest import tiny
from tests.distributed import run_ranks, train
from tests.training.test_resume import resave

LAYOUTS: dict[str, tuple[int, dict[str, int | str]]] = {
    "one": (1, {}),
    "tp2": (2, {"tensor": 2}),
    "pp2": (2, {"pipeline": 2}),
    "tp2-pp2": (4, {"tensor": 2, "pipeline": 2}),
    "dp2-zero1": (2, {"zero": 1}),
    "dp2-zero2": (2, {"zero": 2}),
    "dp2-zero3": (2, {"zero": 3}),
    "tp2-dp2": (4, {"tensor": 2}),
    "context2": (2, {"context": 2}),
    "ring2": (2, {"context": 2, "context_by": "ring"}),
}
NAMES = list(LAYOUTS)
EVERY = os.environ.get("MEGASTABLE_RESHAPES") == "all"
PAIRS = [
    (a, b)
    for i, a in enumerate(NAMES)
    for b in (NAMES if EVERY else (NAMES[(i + 3) % len(NAMES)],))
    if a != b
]
STEPS, MORE = 3, 3


def at(corpus: Path, run: Path, name: str, steps: int) -> RunConfig:
    batch = {"steps": steps, "global_batch": 8, "micro_batch": 4, "eval_samples": 0, "eval_interval": 0}
    schedule = {"warmup_steps": 2, "total_steps": STEPS + MORE}
    return tiny(
        corpus, run, parallel=LAYOUTS[name][1], train=batch, precision={"kind": "fp32"}, schedule=schedule,
        checkpoint={"interval": STEPS},
    )  # fmt: skip


def losses(run: Path) -> list[float]:
    return [float(value) for value in records.read_newest_records(run / "steps").column("loss").to_pylist()]


@pytest.fixture(scope="module")
def runs(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[float]]:
    """Of every layout a run of all steps without a stop: where it is, and its losses."""
    folder = tmp_path_factory.getbasetemp() / "straight"
    found = {}
    for name in NAMES:
        if not (folder / name / "summary.json").exists():
            run_ranks(LAYOUTS[name][0], train, at(corpus, folder / name, name, STEPS + MORE))
        found[name] = losses(folder / name)
    return found


@pytest.mark.slow
@pytest.mark.parametrize(("a", "b"), PAIRS)
def test_a_run_goes_on_in_another_layout(
    a: str, b: str, runs: dict[str, list[float]], corpus: Path, tmp_path: Path
) -> None:
    straight = tmp_path.parent / "straight" / a / "checkpoints" / f"step-{STEPS}"
    moved = tmp_path / "moved"
    (moved / "checkpoints").mkdir(parents=True)
    (moved / "checkpoints" / straight.name).symlink_to(straight)
    world = LAYOUTS[b][0]
    # There, and back: nothing is trained between.
    run_ranks(world, resave, at(corpus, moved, b, STEPS + MORE), tmp_path / "there/checkpoints")
    run_ranks(LAYOUTS[a][0], resave, at(corpus, tmp_path / "there", a, STEPS + MORE), tmp_path / "back")
    folders = straight, tmp_path / "there/checkpoints" / straight.name, tmp_path / "back" / straight.name
    before, there, back = map(WholeState, folders)
    for name in before.names:
        for kind in KINDS:
            tensor = before.read_tensor(name, kind)
            assert torch.equal(there.read_tensor(name, kind), tensor), (name, kind)
            assert torch.equal(back.read_tensor(name, kind), tensor), (name, kind)
    for path in straight.glob("rank-*.safetensors"):
        assert path.read_bytes() == (folders[2] / path.name).read_bytes()
    # And on: the losses of the run that stayed as it was.
    run_ranks(world, train, at(corpus, moved, b, STEPS + MORE))
    after = losses(moved)
    assert len(after) == MORE
    # It is the state that was saved, by a wide margin, wherever it is loaded.
    *_, resumed = RunDirectory(moved).iterate_events(Resumed)  # `resave` has resumed, too
    assert not list(RunDirectory(moved).iterate_events(CheckpointRejected))
    changes = resumed["changes"]
    assert changes["sizes"] < VitalsConfig().size_change / 20, changes
    assert changes["losses"] < VitalsConfig().loss_change / 20, changes
    worst = max(abs(x - y) for x, y in zip(after, runs[a][STEPS:], strict=True))
    if EVERY:
        with (tmp_path.parent / "differences.txt").open("a") as file:
            file.write(f"{a} {b} {worst:.3g} {changes['sizes']:.3g} {changes['losses']:.3g}\n")
    assert worst < 1e-6, worst
