"""Sums of gradients that nothing zeroes, and their norm, taken while they are written."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from megastable.config.tree import RunConfig
from tests.conftest import tiny
from tests.distributed import run_ranks

LEFT_OUT = "blocks.1.mlp.down.weight"


def train_with_a_gap(config: RunConfig, threads: int) -> list[dict[str, Any]]:
    """Five steps. In the second a parameter gets no gradient, the third is refused; what the gate saw of each."""
    from megastable.engine import micro_batch_sums
    from megastable.parallel.sharding import placement_of
    from tests.engine.test_gate import start_of

    torch.set_num_threads(threads)
    micro_batch_sums.CHUNKS["cpu"] = 1000  # several a parameter, the last one shorter
    micro_batch_sums.SMALL = 100  # norms' weights are smaller
    start, seen, kept_gradients = start_of(config), list[dict[str, Any]](), dict[str, Any]()
    engine = start.engine
    assert bool(engine.zero.sums.own._norms) == (threads == 1)  # several threads measure no chunks
    fragments = engine.flat_state().fragments
    parameters = {placement_of(p).name: p for p in engine.ds.module.parameters()}

    def judge(measured: Any) -> bool:
        found = engine.zero.view_gradients(fragments)
        gradients = {f.name: (f, found[f.group, f.offset].view(-1)[: f.numel].double()) for f in fragments}
        square = sum(float(g.square().sum()) for f, g in gradients.values() if f.counted)
        largest = float(gradients[LEFT_OUT][1].abs().max()) if LEFT_OUT in gradients else None
        seen.append({"norm": measured.grad_norm, "square": square, "largest": largest})
        kept_gradients.update({name: (f, g.clone()) for name, (f, g) in gradients.items()})
        return len(seen) != 3

    with start.make_whole_loader(start.order.source, config.train.global_batch) as loader:
        for step in range(5):
            if LEFT_OUT in parameters:
                parameters[LEFT_OUT].requires_grad_(step != 1)
            engine.train_step(next(loader).micro_batches, 1e-3, judge)
            low = torch.cat([part.float() for part in engine.zero.own_low_weights()])
            seen[-1]["is_written"] = torch.equal(low, torch.cat(engine.masters).bfloat16().float())
            if step == 0:  # the first moments are a tenth of the clipped gradients
                moments = {f.name: engine.flat_state().view_piece(f, "exp_avg").double() for f in fragments}
                errors = [
                    float((moments[name] - 0.1 * engine.kept * g).abs().max() / g.abs().max())
                    for name, (f, g) in kept_gradients.items()
                ]
                seen[0] |= {"kept": engine.kept, "error": max(errors)}
    return seen


LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "one-3": (1, {"train": {"micro_batch": 2, "global_batch": 6}}),
    "one-1": (1, {"train": {"micro_batch": 8}}),
    "one-threads2": (1, {"train": {"micro_batch": 2, "global_batch": 6}}),
    "data2-threads2": (2, {}),
    "data2": (2, {}),
    "tensor2": (2, {"parallel": {"tensor": 2}}),
    "tied": (2, {"parallel": {"pipeline": 2}, "model": {"tied": True}}),
    "qk-clip": (1, {"optimizer": {"qk_clip": 1e-3}, "model": {"qk_norm": False}}),
    "bf16-moments": (1, {"optimizer": {"moments": "bf16"}}),
    "worker": (2, {"optimizer": {"clipping": "worker"}}),
}


@pytest.mark.quick("one-3", "data2", "tied", "qk-clip")
@pytest.mark.parametrize("name", LAYOUTS)
def test_norm_is_that_of_the_gradients_that_are_applied(name: str, corpus: Path, tmp_path: Path) -> None:
    world, parts = LAYOUTS[name]
    parts = {**parts, "model": dict(tiny(corpus, tmp_path).model) | parts.get("model", {})}
    parts["optimizer"] = {"clip": 0.1} | parts.get("optimizer", {})
    threads = 2 if name.endswith("threads2") else 1
    ranks = run_ranks(world, train_with_a_gap, tiny(corpus, tmp_path / "run", **parts), threads)
    for of_step in zip(*ranks, strict=True):
        wanted = sum(rank["square"] for rank in of_step) ** 0.5
        assert all(rank["norm"] == pytest.approx(wanted, rel=1e-6) for rank in of_step)
        assert wanted > 0.1  # it is clipped
    largest = [
        [rank[step]["largest"] for rank in ranks if rank[step]["largest"] is not None] for step in range(5)
    ]
    assert [max(of_step) > 0 for of_step in largest] == [True, False, True, True, True]
    assert all(of_step["is_written"] for rank in ranks for of_step in rank)
    if name != "worker":  # which clips others than the average
        tolerance = 1e-3 if name == "bf16-moments" else 1e-7
        assert all(rank[0]["kept"] < 0.9 and rank[0]["error"] < tolerance for rank in ranks)


def test_a_gradient_more_than_micro_batches_is_measured_too(monkeypatch: pytest.MonkeyPatch) -> None:
    from megastable.engine import micro_batch_sums
    from megastable.parallel.sharding import Fragment

    monkeypatch.setattr(micro_batch_sums, "SMALL", 0)
    flat = torch.full((8,), 9.0)  # of an earlier step
    parts = {"fp32_groups_gradient_flat_partition": [flat], "fp32_groups_gradients": [[flat]]}
    fragment = Fragment(
        name="w", dim=None, sections=(), shape=(8,), group=0, offset=0, start=0, numel=8, counted=True
    )
    deepspeeds: Any = SimpleNamespace(**parts)
    sums = micro_batch_sums.MicroBatchSums(deepspeeds, lambda: 1, [fragment], 1)
    weight = nn.Parameter(torch.zeros(8, dtype=torch.bfloat16))
    weight.grad = torch.arange(8, dtype=torch.bfloat16)
    for count in (1, 2):
        sums.add_gradient(weight, 0, 0)
        assert flat.tolist() == [count * x for x in range(8)]
        assert float(sums.sum_squares()) == pytest.approx(140 * count**2)
