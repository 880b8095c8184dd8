"""A step by plain PyTorch in place of the run's kernels: the same numbers, whatever the layout."""

from __future__ import annotations

from itertools import combinations
from pathlib import Path
from typing import Any

import pytest

from megastable.config.tree import RunConfig
from tests.conftest import tiny
from tests.distributed import run_ranks


def every_way(config: RunConfig) -> dict[str, Any]:
    """Loss, gradient norm and losses of samples of a step, by each choice of kernels; "": by all of the run's."""
    from megastable.engine.numerics import Numerics
    from megastable.model import cores, sizes
    from tests.engine.test_gate import first_batch, start_of

    # Several parts of what plain PyTorch computes a part at a time.
    cores.ELEMENTS, sizes.elements_on = 2048, lambda kind: 2048
    start = start_of(config)
    engine, batch = start.engine, first_batch(start)
    kinds = sorted(engine.numerics.kernels)
    found = {}
    for choice in (c for count in range(len(kinds) + 1) for c in combinations(kinds, count)):
        engine.numerics.switch(Numerics(False, frozenset(choice)))
        measured = engine.measure(batch)
        found[" ".join(choice)] = [
            measured.loss, measured.grad_norm, *measured.losses.flatten().tolist(),
            *engine.evaluate(batch).tolist(),
        ]  # fmt: skip
    engine.numerics.switch(Numerics(False))
    found["back"] = [engine.measure(batch).loss]
    return found


KINDS = {"attention", "loss", "attention loss"}
LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "one": (1, {}),
    "tp2": (2, {"parallel": {"tensor": 2}}),
    "pp2-tied": (2, {"parallel": {"pipeline": 2}, "model": {"tied": True}}),
    "cp2": (2, {"parallel": {"context": 2}}),
    "zero3-recomputed": (2, {"parallel": {"zero": 3, "recompute": "full"}}),
}


@pytest.mark.quick("one")
@pytest.mark.parametrize("name", LAYOUTS)
def test_a_step_by_plain_pytorch_has_the_same_numbers(name: str, corpus: Path, tmp_path: Path) -> None:
    world, parts = LAYOUTS[name]
    parts = parts | {"precision": {"kind": "fp32"}, "model": {"dropout": 0.1} | parts.get("model", {})}
    for found in run_ranks(world, every_way, tiny(corpus, tmp_path / "run", **parts)):
        usual = found.pop("")
        assert found.pop("back") == usual[:1] and found.keys() == KINDS
        for numbers in found.values():
            assert numbers != usual and numbers == pytest.approx(usual, rel=1e-4)


@pytest.mark.slow
def test_so_it_has_without_compiled_code(corpus: Path, tmp_path: Path) -> None:
    parts: dict[str, Any] = {"precision": {"kind": "fp32"}, "kernels": {"compile": True}}
    (found,) = run_ranks(1, every_way, tiny(corpus, tmp_path / "run", **parts))
    usual = found.pop("")
    assert found.pop("back") == usual[:1] and len(found) == 7
    for numbers in found.values():
        assert numbers == pytest.approx(usual, rel=1e-4)
