"""Kernels: what is chosen, what is said where it is not what was asked for; and a step by plain PyTorch instead."""

from __future__ import annotations

import re
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest
import torch
from torch._dynamo.utils import counters

from megastable.base.errors import ConfigError
from megastable.base.free_memory import total_bytes
from megastable.config.model import ModelConfig
from megastable.config.tree import RunConfig
from megastable.engine.build import check_weights_fit
from megastable.engine.numerics import Numerics, NumericsSwitch, choose_kernels
from megastable.model.gpt import GPT
from megastable.model.kernels import Kernels
from megastable.model.loss import LossFunction
from megastable.parallel.layout import Layout
from megastable.parallel.topology import TensorParallel
from megastable_tools.plan.memory import kernels_on
from tests.conftest import tiny
from tests.distributed import run_ranks
from tests.parallel.compiling import without_kernels


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
        engine.numerics.switch_to(Numerics(False, frozenset(choice)))
        measured = engine.measure_step(batch)
        found[" ".join(choice)] = [
            measured.loss, measured.grad_norm, *measured.losses.flatten().tolist(),
            *engine.evaluate_samples(batch).tolist(),
        ]  # fmt: skip
    engine.numerics.switch_to(Numerics(False))
    found["back"] = [engine.measure_step(batch).loss]
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
def test_switch_to_plain_pytorch_keeps_the_numbers(name: str, corpus: Path, tmp_path: Path) -> None:
    world, parts = LAYOUTS[name]
    parts = parts | {"precision": {"kind": "fp32"}, "model": {"dropout": 0.1} | parts.get("model", {})}
    for found in run_ranks(world, every_way, tiny(corpus, tmp_path / "run", **parts)):
        usual = found.pop("")
        assert found.pop("back") == usual[:1] and found.keys() == KINDS
        for numbers in found.values():
            assert numbers != usual and numbers == pytest.approx(usual, rel=1e-4)


def test_switch_leaves_no_compiled_end() -> None:
    """the final norm, and the embedding's factor: with plain PyTorch in place of compiled code, no graph is made"""
    kernels = Kernels("reference", compile=True)
    loss = LossFunction(250, 0.0, TensorParallel())
    config = ModelConfig(
        layers=1, hidden=32, heads=4, ffn=48, sequence_length=8, vocab_size=250, embedding_scale=2.0
    )
    tokens, graphs = torch.arange(16).view(2, 8), list[int]()
    torch._dynamo.reset()
    counters.clear()
    with without_kernels():
        model = GPT(config, TensorParallel(), "none", 3, loss, kernels)
        switch, found = NumericsSwitch(model, kernels, loss, None), list[torch.Tensor]()
        for plain in (frozenset({"compile"}), frozenset[str](), frozenset({"compile"})):
            switch.switch_to(Numerics(False, plain))
            found.append(model(tokens).detach())
            graphs.append(counters["stats"]["unique_graphs"])
    assert graphs == [0, 3, 3]  # of the embedding's factor, the block and the norm
    torch.testing.assert_close(found[1], found[0])
    assert torch.equal(found[2], found[0])
    torch._dynamo.reset()


CPU = torch.device("cpu")


def chosen(**parts: Any) -> Any:
    return choose_kernels(RunConfig.model_validate({"precision": {"kind": "fp32"}} | parts), CPU)


@pytest.mark.parametrize("cap", [None, 50.0])
@pytest.mark.parametrize("kind", ["fp32", "fp16"])
@pytest.mark.parametrize("attention", ["auto", "reference", "sdpa", "blocked", "te"])
def test_choose_is_what_the_planner_chooses(attention: str, kind: str, cap: float | None) -> None:
    config = RunConfig.model_validate(
        {
            "kernels": {"attention": attention},
            "precision": {"kind": kind},
            "model": {"attention_softcap": cap},
        }
    )
    assert kernels_on(config, "cpu").attention == choose_kernels(config, CPU).attention


@pytest.mark.parametrize(
    ("parts", "note"),
    [
        ({"kernels": {"attention": "te"}}, r"attention=te: Transformer Engine .*; blocked is used"),
        (
            {"kernels": {"attention": "te"}, "precision": {"kind": "fp32", "fp8": "delayed"}},
            r"attention=te: with FP8's delayed scales .*; blocked is used",
        ),
        (
            {"precision": {"kind": "fp32", "fp8": {"backend": "te"}}},
            r"precision\.fp8\.backend=te: Transformer Engine computes on GPUs only; FP8 is emulated",
        ),
        (
            {"kernels": {"compile": True}, "precision": {"kind": "fp32", "fp8": "block"}},
            r"compile=true: emulated FP8 .*; nothing is compiled",
        ),
        (
            {"kernels": {"compile": True}, "parallel": {"zero": 3}},
            r"compile=true: ZeRO 3 .*; nothing is compiled",
        ),
        (
            {
                "kernels": {"experts": "grouped"},
                "model": {"experts": {"count": 4, "ffn": 204}},
                "parallel": {"tensor": 2},
            },
            "multiples of 4, and they are 768 and 102",
        ),
    ],
)
def test_choose_says_what_cannot_be_had(parts: dict[str, Any], note: str) -> None:
    found = chosen(**parts)
    (said,) = found.notes
    assert re.search(note, said), said
    assert found.attention == "blocked" and found.compile is False and found.fp8 in ("off", "emulated")


def check(layers: int, layout: Layout, zero: int = 1, model: dict[str, Any] | None = None) -> None:
    model = {"layers": layers, "hidden": 64, "heads": 4, "vocab_size": 250} | (model or {})
    config = RunConfig.model_validate({"model": model, "parallel": {"zero": zero}})
    check_weights_fit(config, layout, torch.device("cpu"))


def test_check_weights_fit_refuses_weights_beyond_memory() -> None:
    of_block = 2 * (4 * 64 * 64 + 3 * 64 * 256)  # bytes in bf16
    layers = total_bytes() // of_block + 1
    one, tensor, data = Layout(1, 1, 1), Layout(2, 1, 1), Layout(1, 1, 2)
    check(layers - 100, one)
    check(layers, tensor)
    check(layers, data, zero=3)
    for layout in (one, data):
        with pytest.raises(ConfigError, match=f"lower model.layers={layers}, .* parallel.tensor"):
            check(layers, layout)
    # One of two experts of each block, of the size of its MLP: with attention less than two thirds of the weights.
    both = {"experts": {"count": 2, "top_k": 1, "normalize": False}}
    for expert, blocks in ((1, 0.4 * layers), (2, 0.7 * layers)):
        check(int(blocks), Layout(data=2, expert=expert), model=both)
        with pytest.raises(ConfigError, match=r"experts by parallel\.expert"):
            check(int(1.8 * blocks), Layout(data=2, expert=expert), model=both)
