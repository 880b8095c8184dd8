"""The Transformer Engine backend without Transformer Engine: when it is taken, and what becomes of our parameters.

What its kernels compute is asked on a GPU (tests/gpu/test_fp8.py). Here stands in for it what a module of its shows of
itself: parameters of its own under its names, and quantizers of its layout.
"""

from __future__ import annotations

import sys
import types
from collections import Counter
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from megastable.config.rules import LINEARS
from megastable.config.tree import RunConfig
from megastable.fp8 import te
from megastable.model.gpt import Block
from megastable.parallel.deferred_gradients import DeferredGradients
from megastable.parallel.sharding import placement_of
from megastable.parallel.topology import TensorParallel
from tests.distributed import run_ranks

GPU = torch.device("cuda", 0)
ROOT = Path(__file__).parents[2]


def config(
    fp8: Any = "current", parallel: dict[str, Any] | None = None, kind: str = "bf16", **model: Any
) -> RunConfig:
    shape = dict(layers=2, hidden=64, heads=4, kv_heads=2, ffn=128, sequence_length=32, vocab_size=500)
    return RunConfig.model_validate(
        {
            "model": shape | model,
            "precision": {"kind": kind, "fp8": fp8},
            "train": {"global_batch": 4, "micro_batch": 2},
            "parallel": parallel or {},
        }
    )


# Whether it can be had


@pytest.mark.parametrize(
    ("parts", "told"),
    [
        ({"kind": "fp32"}, "precision.kind is fp32"),
        ({"hidden": 72, "heads": 4, "head_dim": 16}, "model.hidden: 72"),
        ({"ffn": 120}, "model.ffn of a tensor rank: 120"),
        ({"ffn": 144, "parallel": {"tensor": 2}}, "model.ffn of a tensor rank: 72"),
        ({"head_dim": 6}, "the heads of a tensor rank (model.heads, head_dim): 24"),
        ({"heads": 3, "kv_heads": 1, "head_dim": 8}, "(model.heads, kv_heads, head_dim): 40"),
        ({"sequence_length": 20}, "model.sequence_length): 40"),
        (
            {"parallel": {"tensor": 2, "sequence": True}, "sequence_length": 24},
            "sequence_length): 24",
        ),
        ({"parallel": {"context": 2}, "sequence_length": 24}, "sequence_length): 24"),
    ],
)
def test_misfit_names_sizes_that_its_products_do_not_take(parts: dict[str, Any], told: str) -> None:
    reason = te.find_misfit(config(**parts))
    assert reason is not None and told in reason
    assert te.why_not(config(**parts), GPU) == reason


@pytest.mark.parametrize(
    ("recipe", "capability", "lacks", "told"),
    [
        ("current", (9, 0), "", None),
        ("delayed", (8, 0), "fp8", "on this GPU it reports: no fp8"),
        ("block", (9, 0), "mxfp8", None),
        ("block", (8, 9), "fp8_block_scaling", "for blocks on this GPU it reports: no fp8_block_scaling"),
        ("block", (12, 0), "mxfp8", "for blocks on this GPU it reports: no mxfp8"),
    ],
)
def test_why_not_asks_what_the_gpu_can(
    recipe: str, capability: tuple[int, int], lacks: str, told: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: capability)

    def asked(what: str) -> Any:
        return lambda return_reason: (what != lacks, f"no {what}")

    names = ("fp8", "fp8_block_scaling", "mxfp8")
    surface = types.SimpleNamespace(**{f"is_{what}_available": asked(what) for what in names})
    fp8 = config(recipe).precision.fp8
    assert fp8 is not None and te._unsupported(surface, fp8) == told


# What becomes of our parameters


class Shown(nn.Module):
    """Of a module of Transformer Engine: its parameters, what delayed scaling keeps, and what its calls were told.
    Computes nothing."""

    def __init__(self, told: dict[str, Any], **shapes: tuple[int, ...]) -> None:
        super().__init__()
        assert told["device"] == "meta" and told["bias"] is False
        self.told, self.fp8_meta, self.quantizers = told, {}, {}
        self.first, self.wgrad_store = list[bool | None](), None
        for name, shape in shapes.items():
            setattr(self, name, nn.Parameter(torch.empty(shape, device="meta", dtype=told["params_dtype"])))

    def forward(self, x: torch.Tensor, is_first_microbatch: bool | None = None) -> torch.Tensor:
        self.first.append(is_first_microbatch)
        return x

    def init_fp8_metadata(self, num_gemms: int) -> None:
        for key, number in (("scaling_fwd", 3 * num_gemms), ("scaling_bwd", 2 * num_gemms)):
            self.quantizers[key] = [types.SimpleNamespace(scale=None, amax=None) for _ in range(number)]


def parts(told: dict[str, Any]) -> int:
    group = told["tp_group"]
    return 1 if group is None else len(group)


def linear(inputs: int, outputs: int, **told: Any) -> Shown:
    mode, n = told["parallel_mode"], parts(told)
    shape = (outputs // n if mode == "column" else outputs, inputs // n if mode == "row" else inputs)
    return Shown(told, weight=shape)


def layer_norm_linear(inputs: int, outputs: int, zero_centered_gamma: bool, **told: Any) -> Shown:
    assert told["parallel_mode"] in (None, "column") and told["normalization"] == "RMSNorm"
    told["centered"] = zero_centered_gamma
    return Shown(told, layer_norm_weight=(inputs,), weight=(outputs // parts(told), inputs))


def layer_norm_mlp(hidden: int, ffn: int, zero_centered_gamma: bool, **told: Any) -> Shown:
    assert told["activation"] == "swiglu" and told["normalization"] == "RMSNorm"
    own = ffn // parts(told)
    told["centered"] = zero_centered_gamma
    return Shown(told, layer_norm_weight=(hidden,), fc1_weight=(2 * own, hidden), fc2_weight=(hidden, own))


@pytest.fixture
def surface(monkeypatch: pytest.MonkeyPatch) -> list[tuple[bool, Any, Any]]:
    """Stands in for Transformer Engine. What its autocasts were told: (enabled, recipe, group)."""
    autocasts: list[tuple[bool, Any, Any]] = []

    @contextmanager
    def autocast(enabled: bool, recipe: Any, amax_reduction_group: Any) -> Any:
        autocasts.append((enabled, recipe, amax_reduction_group))
        yield

    def recorded(name: str) -> Any:
        return lambda **told: (name, told)

    names = ("DelayedScaling", "Float8CurrentScaling", "Float8BlockScaling")
    recipe = types.SimpleNamespace(
        Format=types.SimpleNamespace(HYBRID="hybrid", E4M3="e4m3"), **{n: recorded(n) for n in names}
    )
    manager = types.SimpleNamespace(get_buffer_info=lambda: "place")
    modules = {
        "transformer_engine": {},
        "transformer_engine.common": {"recipe": recipe},
        "transformer_engine.pytorch": {
            "Linear": linear, "LayerNormLinear": layer_norm_linear, "LayerNormMLP": layer_norm_mlp,
            "autocast": autocast,
        },
        "transformer_engine.pytorch.quantization": {"FP8GlobalStateManager": manager},
    }  # fmt: skip
    for name, contents in modules.items():
        module = types.ModuleType(name)
        vars(module).update(contents)
        monkeypatch.setitem(sys.modules, name, module)
        if (parent := name.rpartition(".")[0]) and parent in sys.modules:
            monkeypatch.setattr(sys.modules[parent], name.rpartition(".")[2], module, raising=False)
    return autocasts


def tensor_parallel(size: int, sequence: bool = False) -> TensorParallel:
    return TensorParallel(range(size) if size > 1 else None, 0, size, sequence)


def known(module: nn.Module) -> list[tuple[str, int, bool]]:
    return [(placement_of(p).name, id(p), p.tensor_model_parallel) for p in module.parameters()]


NORMS = {"attention.qkv": "attention_norm", "mlp.gate_up": "mlp_norm"}
WHOLE = (
    ["attention.qkv", "attention.out", "mlp"],
    [("attention.qkv",), ("attention.out",), ("mlp.gate_up", "mlp.down")],
)
SINGLE = [*LINEARS], [(name,) for name in LINEARS]
CASES: dict[str, tuple[set[str], dict[str, Any], list[str], list[tuple[str, ...]], set[str]]] = {
    # linears, the model, (modules: their parameters), what each computes, linears that take the norm before them
    "all": (set(LINEARS), {}, *WHOLE, {*NORMS}),
    "half of the MLP": (
        {"attention.out", "mlp.down"}, {}, ["attention.out", "mlp.down"], [("attention.out",), ("mlp.down",)], set(),
    ),
    "the other half": (
        {"attention.qkv", "mlp.gate_up"}, {}, ["attention.qkv", "mlp.gate_up"],
        [("attention.qkv",), ("mlp.gate_up",)], {*NORMS},
    ),
    "norms after": (set(LINEARS), {"norms": "after"}, *SINGLE, set()),
    "norms on both sides": (set(LINEARS), {"norms": "both"}, *WHOLE, {*NORMS}),
    "centered norms": (set(LINEARS), {"norms": "both", "zero_centered_norms": True}, *WHOLE, {*NORMS}),
    "norms with a factor": (set(LINEARS), {"norm_scaling": True}, *SINGLE, set()),
    "GeGLU": (set(LINEARS), {"activation": "gelu"}, *SINGLE, {*NORMS}),
    "clamped": (set(LINEARS), {"swiglu_clamp": 7.0}, *SINGLE, {*NORMS}),
}  # fmt: skip


@pytest.mark.parametrize(("tp", "partitioned"), [(1, True), (2, False)], ids=["ZeRO 3", "tensor 2"])
@pytest.mark.parametrize("case", CASES)
def test_fit_puts_our_parameters_into_its_modules(
    case: str, tp: int, partitioned: bool, surface: list[Any]
) -> None:
    """The very ones, in their order, with their marks; and nothing left of those that it made itself."""
    linears, model, where, computed, fused = CASES[case]
    c = config(**model)
    block = Block(c.model, tensor_parallel(tp), 1, "none")
    for p in block.parameters() if partitioned else ():
        p.ds_shape, p.data = p.shape, torch.empty(0)  # type: ignore[attr-defined]
    before = known(block)
    found = te.fit_block(block, linears)
    assert known(block) == before
    assert [name for name, part in block.named_modules() if isinstance(part, Shown)] == where
    assert [tuple(name.removeprefix("blocks.1.") for name in one.layers) for one in found] == computed
    for one in found:
        named = [placement_of(w).name.removesuffix(".weight") for w in one.weights]
        assert tuple(named) == one.layers
    identities = {name for name, part in block.named_modules() if isinstance(part, nn.Identity)}
    assert identities == {NORMS[linear] for linear in fused}
    centered = [one.module.told["centered"] for one in found if "centered" in one.module.told]
    assert centered == [c.model.zero_centered_norms] * len(fused)
    modes = [one.module.told.get("parallel_mode", "mlp") for one in found]
    columns = {"qkv": "column", "gate_up": "column", "out": "row", "down": "row"}
    for one, mode in zip(found, modes, strict=True):
        if mode == "mlp":
            assert one.module.told["set_parallel_mode"] == (tp > 1)
        else:
            assert mode == (None if tp == 1 else columns[one.layers[0].rpartition(".")[2]])


def delayed(**fp8: Any) -> tuple[te.TransformerEngine, list[te.Fitted], Block]:
    c = config({"recipe": "delayed", "history": 4, "margin": 1, **fp8})
    block = Block(c.model, TensorParallel(), 0, "none")
    with torch.no_grad():
        for number, parameter in enumerate(block.parameters()):
            parameter.fill_(0.5 * 2.0**number)
    found = te.fit_block(block, LINEARS)
    assert c.precision.fp8 is not None
    return te.TransformerEngine(found, c.precision.fp8, None, torch.device("cpu")), found, block


def cell(found: list[te.Fitted], layer: str, slot: str) -> Any:
    """The quantizer of Transformer Engine, by its own numbers."""
    one = next(one for one in found if layer in one.layers)
    n = one.layers.index(layer)
    fwd, bwd = one.module.quantizers["scaling_fwd"], one.module.quantizers["scaling_bwd"]
    return {"input": fwd[3 * n], "weight": fwd[3 * n + 1], "gradient": bwd[2 * n]}[slot]


def raised(quantizer: Any, magnitude: float) -> None:
    """As its kernels do it: in place, to the largest."""
    quantizer.amax.clamp_(min=magnitude)


def test_settle_moves_delayed_scales(surface: list[Any]) -> None:
    """Guesses first; then by what kernels have seen, once a step, and only if its update was applied."""
    fp8, found, _ = delayed()
    assert all(one.module.fp8_meta == {"place": []} for one in found)
    layer = "blocks.0.mlp.down"
    assert fp8.reads_weights
    x, w, g = (cell(found, layer, slot) for slot in ("input", "weight", "gradient"))
    with fp8.computing():
        largest = next(one.weights[-1] for one in found if layer in one.layers).detach().max()
        assert (float(x.scale), float(g.scale)) == (1 / 2, 2.0**20 / 2)
        assert float(w.scale) == 448 / float(largest) / 2
        raised(x, 3.0)
        raised(x, 7.0)  # another micro-batch
        raised(x, 5.0)
        raised(g, 1e-3)
        assert float(x.scale) == 0.5  # none moves within a step
    assert not fp8.reads_weights
    fp8.settle_step(True)
    with fp8.computing():
        assert float(x.scale) == pytest.approx(448 / 7 / 2)
        assert float(g.scale) == pytest.approx(57344 / 1e-3 / 2)
        raised(x, 100.0)
    history = fp8.write_history()
    fp8.settle_step(False)
    assert fp8.write_history() == history and history[layer][0] == [7.0, 0.0, 0.0, 0.0]
    with torch.no_grad(), fp8.computing():
        raised(x, 200.0)  # an evaluation
    with fp8.computing():
        assert float(x.scale) == pytest.approx(448 / 7 / 2)
    fp8.settle_step(True)
    assert fp8.write_history() == history  # nothing was seen in that step
    fp8.on = False
    assert not fp8.reads_weights
    fp8.on = True
    assert fp8.reads_weights  # the history is gone


# Gradients that come later


def test_its_modules_leave_weight_gradients_for_later(surface: list[Any]) -> None:
    """Each in the place of its weight, computed from what its module gave for it, and given to autograd."""

    def fit(schedule: str) -> list[Shown]:
        c = config("current", {"pipeline": 2, "schedule": schedule})
        block = Block(c.model, TensorParallel(), 0, "none")
        te.apply_transformer_engine(nn.Sequential(block), c, None, torch.device("cpu"))
        return [part for part in block.modules() if isinstance(part, Shown)]

    assert [module.wgrad_store for module in fit("1f1b")] == [None] * 3
    modules = fit("zero_bubble")
    operands, counts = {}, Counter[int]()

    def wgrad_gemm(x: torch.Tensor, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        return gradient.t() @ x, None

    def fc2_wgrad_gemm(x: torch.Tensor, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        return gradient.t() @ x, None

    deferred_gradients = DeferredGradients()
    with deferred_gradients.collect():
        for module in reversed(modules):
            for name, weight in reversed([*module.named_parameters()]):
                if weight.dim() == 1:
                    continue
                x, gradient = (torch.randn(8, width) for width in reversed(weight.shape))
                operands[weight] = x, gradient
                assert module.wgrad_store.delay_wgrad_compute()
                multiply = fc2_wgrad_gemm if name == "fc2_weight" else wgrad_gemm
                module.wgrad_store.put([x, gradient], multiply)
    assert len(operands) == 4 and all(weight.grad is None for weight in operands)
    for weight in operands:
        weight.register_post_accumulate_grad_hook(lambda weight: counts.update([id(weight)]))
    deferred_gradients.compute_oldest()
    assert counts == Counter(map(id, operands))
    for weight, (x, gradient) in operands.items():
        assert weight.grad is not None and torch.equal(weight.grad, gradient.t() @ x)


# The gradients of norms


@pytest.mark.parametrize(
    ("parallel", "told"),
    [({}, [True, False]), ({"zero": 3}, [None, None]), ({"recompute": "full"}, [None, None])],
)
def test_modules_are_told_of_the_first_pass_of_each_step(
    parallel: dict[str, Any], told: list[bool | None], surface: list[Any]
) -> None:
    """A weight is cast by it, whatever has changed the weight since the step before; an evaluation keeps nothing."""
    c = config("current", parallel)
    block = Block(c.model, TensorParallel(), 0, "none")
    fp8 = te.apply_transformer_engine(nn.Sequential(block), c, None, torch.device("cpu"))
    modules = [part for part in block.modules() if isinstance(part, Shown)]
    x = torch.zeros(1)
    for _ in range(2):
        with fp8.computing():
            with torch.no_grad():
                modules[0](x)
            for module in modules * 2:
                module(x)
        modules[0](x)
    assert modules[0].first == [None, *told, None] * 2
    assert [module.first for module in modules[1:]] == [told * 2] * (len(modules) - 1)
    with pytest.raises(TypeError), fp8.computing():
        modules[0]()
    modules[0](x)
    assert modules[0].first[-1] is None


def sum_rank() -> list[list[float]]:
    import torch.distributed as dist

    tp = TensorParallel(dist.group.WORLD, dist.get_rank(), 2, True)
    weight = nn.Parameter(torch.ones(3, dtype=torch.bfloat16))
    weight.register_hook(partial(te._sum_gradient, tp))
    found = []
    for micro_batch in range(2):
        (weight * (1.0 + tp.rank + micro_batch)).sum().backward()
        assert weight.grad is not None
        found.append(weight.grad.tolist())
    return found


def test_norm_gradients_of_a_tensor_group_are_summed_once_a_micro_batch() -> None:
    assert run_ranks(2, sum_rank) == [[[3.0] * 3, [3.0 + 5.0] * 3]] * 2
