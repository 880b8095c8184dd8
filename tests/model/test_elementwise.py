"""Own kernels of a block's elementwise work against plain code in fp64, forward and backward, in Triton's interpreter;
blocks with them against blocks without; and which of them a run takes.

The interpreter is switched on when Triton is imported: those tests run in a process of their own, started by the first.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch._dynamo.utils import counters

from megastable.config.tree import RunConfig
from megastable.engine import elementwise_choice
from megastable.model import elementwise
from megastable.model.elementwise import PARTS, Heads
from megastable.model.gpt import Block
from megastable.model.init import initialise_weights
from megastable.model.kernels import Kernels, Timing
from megastable.parallel.topology import TensorParallel
from megastable.run.directory import RunDirectory
from megastable.run.events.training_events import Training
from megastable.run.log import RunLog
from megastable.train import Trainer, train
from megastable.training.resume import list_timings
from tests.conftest import tiny
from tests.distributed import run_ranks
from tests.engine.test_numerics import every_way
from tests.model.test_gpt import LENGTH, batch, config
from tests.parallel.compiling import without_kernels

ROOT = Path(__file__).parents[2]
HAS_TRITON = find_spec("triton") is not None
INTERPRETED = HAS_TRITON and os.environ.get("TRITON_INTERPRET") == "1"
interpreted = pytest.mark.skipif(
    not INTERPRETED,
    reason="in the process of test_kernels_in_the_interpreter" if HAS_TRITON else "Triton is not installed",
)
# Relative errors in norm. The interpreter cuts what it stores as bf16 where a GPU rounds: twice the error.
CLOSE = {torch.float32: 1e-5, torch.bfloat16: 1.1 * 2**-7}


@pytest.mark.slow
@pytest.mark.skipif(not HAS_TRITON or INTERPRETED, reason="Triton is not installed")
def test_kernels_in_the_interpreter() -> None:
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-p",
        "no:cacheprovider",
        "-p",
        "no:xdist",
        "-x",
        __file__,
    ]
    done = subprocess.run(
        command,
        env={**os.environ, "TRITON_INTERPRET": "1"},
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=900,
    )
    assert done.returncode == 0, done.stdout[-6000:]


@pytest.fixture
def several_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    """So few that each has several blocks of rows, and so small tiles that there are several of these."""
    from megastable.model import triton_kernels

    monkeypatch.setattr(triton_kernels, "NORM_PROGRAMS", 2)
    monkeypatch.setattr(triton_kernels, "HEAD_PROGRAMS", 2)
    monkeypatch.setattr(triton_kernels, "TILE", 128)


def compare(
    got: Sequence[Tensor], wanted: Sequence[Tensor], close: float, among: Sequence[Tensor] = ()
) -> None:
    for number, (found, right) in enumerate(zip(got, wanted, strict=True)):
        assert found.shape == right.shape
        assert float((found.double() - right).norm() / right.norm()) < close, number


def check(own: Any, plain: Any, inputs: Sequence[Tensor], turned: bool = False) -> None:
    """Results and gradients. turned: upstream gradients lie in memory as no result does."""
    dtype, generator = inputs[0].dtype, torch.Generator().manual_seed(1)
    results = own(*inputs)
    upstream = [torch.randn(y.shape, generator=generator).to(dtype) for y in results]
    if turned:
        upstream = [dy.transpose(0, 2).contiguous().transpose(0, 2) for dy in upstream]
    wide = [x.detach().double().requires_grad_() for x in inputs]
    right = plain(*wide)
    close = CLOSE[dtype]
    compare([y.detach() for y in results], [y.detach() for y in right], close)
    assert all(y.dtype == dtype for y in results)
    gradients = torch.autograd.grad(results, list(inputs), upstream)
    assert all(gradient.dtype == dtype for gradient in gradients)
    compare(gradients, torch.autograd.grad(right, wide, [dy.double() for dy in upstream]), close)


def drawn(seed: int, dtype: torch.dtype, *shapes: tuple[int, ...]) -> list[Tensor]:
    g = torch.Generator().manual_seed(seed)
    return [(0.3 + torch.randn(shape, generator=g)).to(dtype).requires_grad_() for shape in shapes]


def norm_in_fp64(x: Tensor, weight: Tensor, eps: float, centered: bool) -> Tensor:
    return x / (x.pow(2).mean(-1, keepdim=True) + eps).sqrt() * (weight + centered)


dtypes = st.sampled_from([torch.float32, torch.bfloat16])


@interpreted
@pytest.mark.usefixtures("several_programs")
@given(data=st.data())
def test_heads_are_normed_and_rotated(data: st.DataObject) -> None:
    def draw(least: int, most: int) -> int:
        return data.draw(st.integers(least, most))

    s, b, k, pairs = draw(1, 6), draw(1, 3), draw(1, 3), draw(1, 9)
    q, d, eps = k * draw(1, 3), 2 * pairs, data.draw(st.sampled_from([1e-6, 0.5]))
    normed, centered, apart, turned = (data.draw(st.booleans()) for _ in range(4))
    heads, dtype = Heads(q, k, eps, centered), data.draw(dtypes)
    angle = torch.randn(b if apart else 1, s, 1, pairs, generator=torch.Generator().manual_seed(2)).transpose(
        0, 1
    )
    cos, sin = angle.cos() * 1.2, angle.sin() * 1.2

    def own(qkv: Tensor, *weights: Tensor) -> tuple[Tensor, ...]:
        both = (weights[0], weights[1]) if weights else None
        return elementwise.rotate_heads(qkv, both, cos, sin, heads)

    def plain(qkv: Tensor, *weights: Tensor) -> tuple[Tensor, ...]:
        *both, v = qkv.view(s, b, -1, d).split((q, k, k), 2)
        if weights:
            both = [norm_in_fp64(x, w, eps, centered) for x, w in zip(both, weights, strict=True)]
        turned_both = []
        for x in both:
            first, second = x.chunk(2, -1)
            turned_both.append(torch.cat((first * cos - second * sin, second * cos + first * sin), -1))
        return *turned_both, v

    check(own, plain, drawn(s, dtype, (s, b, (q + 2 * k) * d), *[(d,)] * (2 * normed)), turned)


@interpreted
@pytest.mark.usefixtures("several_programs")
@given(s=st.integers(1, 9), b=st.integers(1, 3), h=st.integers(1, 70), eps=st.sampled_from([1e-6, 0.5]),
       centered=st.booleans(), turned=st.booleans(), dtype=dtypes)  # fmt: skip
def test_norms_take_the_residual_along(
    s: int, b: int, h: int, eps: float, centered: bool, turned: bool, dtype: torch.dtype
) -> None:
    inputs = drawn(s + h, dtype, (s, b, h), (s, b, h), (h,))
    weights = [0, 2], [0, 1, 2]

    def plain(x: Tensor, y: Tensor | None, weight: Tensor) -> tuple[Tensor, ...]:
        total = x if y is None else x + y
        if y is not None:  # the norm is of the sum as it is kept
            total = total + (total.to(dtype).double() - total).detach()
        return total, norm_in_fp64(total, weight, eps, centered)

    check(
        lambda x, w: elementwise.norm_stream(x, w, eps, centered), lambda x, w: plain(x, None, w),
        [inputs[i] for i in weights[0]], turned,
    )  # fmt: skip
    check(lambda x, y, w: elementwise.add_and_norm(x, y, w, eps, centered), plain, inputs, turned)
    total, normed_total = elementwise.add_and_norm(*inputs, eps, centered)
    assert torch.equal(normed_total, elementwise.norm_stream(total, inputs[2], eps, centered)[1])


@interpreted
@pytest.mark.usefixtures("several_programs")
@given(s=st.integers(1, 9), b=st.integers(1, 3), f=st.integers(1, 200), turned=st.booleans(), dtype=dtypes)
def test_swiglu(s: int, b: int, f: int, turned: bool, dtype: torch.dtype) -> None:
    def plain(gate_up: Tensor) -> tuple[Tensor, ...]:
        gate, up = gate_up.chunk(2, -1)
        return (gate / (1 + (-gate).exp()) * up,)

    check(lambda x: (elementwise.swiglu(x),), plain, drawn(s + f, dtype, (s, b, 2 * f)), turned)


@interpreted
def test_heads_may_lie_over_two_thousand_million_elements_apart() -> None:
    """as those of a gradient [heads, tokens, d] do: its memory is reserved, and not touched"""
    from megastable.model import triton_kernels

    qkv, *gradients = (
        x.detach() for x in drawn(3, torch.bfloat16, (1, 1, 20), *[(1, 1, n, 4) for n in (3, 1, 1)])
    )
    far = torch.empty(2**31 + 4, dtype=torch.bfloat16).as_strided((1, 1, 3, 4), (4, 4, 2**30, 1))
    far.copy_(gradients[0])
    angle = torch.ones(1, 1, 1, 2)
    found = torch.empty_like(qkv), torch.empty_like(qkv)
    for upstream, gradient in zip((gradients[0], far), found, strict=True):
        triton_kernels.unrotate(
            (upstream, *gradients[1:]), qkv, None, None, angle.cos(), angle.sin(), gradient, 1e-6, False
        )
    assert torch.equal(*found)


# In blocks

BLOCKS: dict[str, dict[str, Any]] = {
    "plain": {},
    "zero-centered": {"zero_centered_norms": True},
    "no-qk-norm": {"qk_norm": False, "kv_heads": None},
    "norm-scaling": {"norm_scaling": True},
    "yarn": {"rope_scaling": {"kind": "yarn", "factor": 8.0, "original_length": 64}},
}


def run_block(name: str, recompute: str, kernels: Kernels, apart: bool, aside: bool = False) -> list[Tensor]:
    """The output and all gradients of the second block."""
    c = config(**BLOCKS[name])
    block = Block(c, TensorParallel(), 1, recompute, kernels)
    initialise_weights(block, c, TensorParallel(), seed=7)
    with torch.no_grad():
        for index, p in enumerate(block.parameters()):
            if p.dim() == 1:
                p.copy_(0.5 + 0.3 * torch.sin(torch.arange(len(p)) + index))
    block.in_halves = aside
    _, _, segments = batch()
    x = torch.randn(
        LENGTH, len(segments), c.hidden, generator=torch.Generator().manual_seed(4)
    ).requires_grad_()
    y: Any = block((x, segments) if apart else x)
    y = y[0] if apart else y
    upstream = torch.randn(y.shape, generator=torch.Generator().manual_seed(5))
    return [y.detach(), *torch.autograd.grad(y, [x, *block.parameters()], upstream)]


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    from megastable.model import triton_kernels

    names, launch = list[str](), triton_kernels.launch

    def told(kernel: Any, *rest: Any, **options: Any) -> None:
        names.append(kernel.__name__)
        launch(kernel, *rest, **options)

    monkeypatch.setattr(triton_kernels, "launch", told)
    return names


FORWARD = ["norm_kernel", "rotate_kernel", "norm_kernel", "swiglu_kernel"]
BACKWARD = ["unswiglu_kernel", "unnorm_kernel", "unrotate_kernel", "unnorm_kernel"]
AGAIN = {"none": [], "selective": ["swiglu_kernel"], "full": FORWARD}


@interpreted
@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
@pytest.mark.parametrize("apart", [False, True], ids=["causal", "documents"])
@pytest.mark.parametrize("name", BLOCKS)
def test_blocks_with_them_are_blocks_without(
    name: str, apart: bool, recompute: str, compiled: bool, launches: list[str]
) -> None:
    if (compiled or recompute == "selective") and name != "plain":
        pytest.skip("as plain")
    wanted = run_block(name, recompute, Kernels("reference"), apart)
    assert not launches
    counters.clear()
    torch._dynamo.reset()
    with without_kernels():
        got = run_block(name, recompute, Kernels("reference", compile=compiled, elementwise=PARTS), apart)
    assert not counters["graph_break"]
    for found, right in zip(got, wanted, strict=True):
        torch.testing.assert_close(found, right, rtol=1e-4, atol=1e-5)
    assert launches[:4] == FORWARD
    if compiled:
        assert sorted(set(launches)) == sorted({*FORWARD, *BACKWARD})
    else:
        assert sorted(launches[4:]) == sorted([*AGAIN[recompute], *BACKWARD])


@interpreted
def test_each_part_is_by_itself(launches: list[str]) -> None:
    wanted = run_block("plain", "none", Kernels("reference"), False)
    for part, kernel in zip(PARTS, ("rotate", "norm", "swiglu"), strict=True):
        launches.clear()
        got = run_block("plain", "none", Kernels("reference", elementwise=(part,)), False)
        assert {name.removeprefix("un") for name in launches} == {f"{kernel}_kernel"}
        for found, right in zip(got, wanted, strict=True):
            torch.testing.assert_close(found, right, rtol=1e-4, atol=1e-5)


@interpreted
def test_hooks_and_plain_pytorch_see_none_of_them(launches: list[str]) -> None:
    """where hooks watch modules, or plain PyTorch takes their place"""
    wanted = run_block("plain", "none", Kernels("reference"), False)
    got = run_block("plain", "none", Kernels("reference", elementwise=PARTS), False, aside=True)
    block = Block(config(), TensorParallel(), 1, "none", Kernels("reference", elementwise=PARTS))
    block.compute_plainly(attention=False, compiled=False, own=True)
    x = torch.randn(LENGTH, 1, 32)
    block(x)
    assert not launches
    for found, right in zip(got, wanted, strict=True):
        torch.testing.assert_close(found, right, rtol=1e-5, atol=1e-6)
    block.compute_plainly(attention=False, compiled=False, own=False)
    block(x)
    assert launches == FORWARD


@interpreted
def test_clamp_of_a_remedy_takes_the_place_of_swiglu(launches: list[str]) -> None:
    from megastable.engine.adjustments import CLAMPED
    from megastable.model.block_parts import swiglu

    block = Block(config(), TensorParallel(), 1, "none", Kernels("reference", elementwise=PARTS))
    x = torch.randn(LENGTH, 1, 32)
    block.mlp.activation = CLAMPED
    block(x)
    assert launches == FORWARD[:3]
    block.mlp.activation = swiglu
    block(x)
    assert launches[3:] == FORWARD


def every_way_with_them(parts: RunConfig) -> dict[str, Any]:
    """On a rank: as `every_way`, with own kernels though there is no GPU."""
    from megastable.engine import numerics

    numerics.choose_parts = lambda *_: (PARTS, [])
    return every_way(parts)


@interpreted
def test_runs_have_their_numbers_with_and_without(corpus: Path, tmp_path: Path) -> None:
    """loss, gradient norm and losses of samples where ranks share norms; and each kind of kernels is left"""
    parallel = {"tensor": 2, "sequence": True}
    parts = {"precision": {"kind": "fp32"}, "parallel": parallel, "kernels": {"elementwise": "triton"}}
    run = tiny(corpus, tmp_path / "run", **parts)
    plain = tiny(corpus, tmp_path / "plain", **parts | {"kernels": {"elementwise": "torch"}})
    wanted = [found[""] for found in run_ranks(2, every_way, plain)]
    for found, right in zip(run_ranks(2, every_way_with_them, run), wanted, strict=True):
        assert found.pop("back") == found[""][:1] and found["elementwise"] == right
        assert found[""] != right and len(found) == 8
        for numbers in found.values():
            assert numbers == pytest.approx(right, rel=1e-4)


# Which a run takes

GPU = torch.device("cuda")


def chosen(device: torch.device = GPU, **parts: Any) -> tuple[tuple[str, ...], list[str]]:
    wanted = {"kernels": {"elementwise": "triton"}, "precision": {"kind": "bf16"}} | parts
    return elementwise_choice.choose_parts(RunConfig.model_validate(wanted), device)


@pytest.fixture
def triton_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(elementwise_choice, "find_spec", lambda name: name)


@pytest.mark.usefixtures("triton_found")
@pytest.mark.parametrize(
    ("parts", "left", "reason"),
    [
        ({"parallel": {"zero": 3}}, "heads norms swiglu", "ZeRO 3"),
        ({"parallel": {"context": 2}}, "heads", "context parallelism"),
        ({"model": {"qk_norm": "full"}}, "heads", "qk_norm=full"),
        ({"model": {"qkv_bias": True}}, "heads", "qkv_bias"),
        ({"model": {"norms": "after"}}, "norms", "norms=after"),
        ({"model": {"norms": "mixed"}}, "norms", "norms=mixed"),
        ({"model": {"dropout": 0.1}}, "norms", "dropout"),
        (
            {"model": {"mup": {"base_width": 8, "base_layers": 1, "base_head_dim": 2}}},
            "norms",
            "muP's factor",
        ),
        ({"model": {"hidden": 32768, "heads": 64}}, "norms", "8,192"),
        ({"model": {"activation": "gelu"}}, "swiglu", "not SwiGLU"),
        ({"model": {"swiglu_clamp": 1.0}}, "swiglu", "not SwiGLU"),
        ({"precision": {"kind": "bf16", "fp8": "current"}}, "norms swiglu", "FP8"),
    ],
)
def test_choose_says_what_own_kernels_cannot_compute(parts: dict[str, Any], left: str, reason: str) -> None:
    parts_left = tuple(left.split())
    found, notes = chosen(**parts)
    assert found == tuple(part for part in PARTS if part not in parts_left)
    (note,) = notes
    assert reason in note and note.endswith(f"PyTorch computes {' and '.join(parts_left)}")
    automatic, notes = chosen(**parts | {"kernels": {"elementwise": "auto"}})
    assert automatic == found and not notes


@pytest.mark.usefixtures("triton_found")
def test_choose_leaves_all_of_it_to_torch() -> None:
    assert chosen() == (PARTS, []) and chosen(kernels={"elementwise": "torch"}) == ((), [])
    repeated = {"kernels": {"elementwise": "auto"}, "run": {"deterministic": True}}
    assert chosen(**repeated) == ((), []) and chosen(run={"deterministic": True}) == (PARTS, [])
    found, (note,) = chosen(torch.device("cpu"))
    assert not found and "on GPUs only; PyTorch computes heads and norms and swiglu" in note
    assert chosen(torch.device("cpu"), kernels={"elementwise": "auto"}) == ((), [])


TOLD = Kernels("reference", elementwise=PARTS)
CPU = torch.device("cpu")


def small_run(kind: str = "fp32") -> RunConfig:
    parts = {"layers": 1, "hidden": 32, "heads": 4, "kv_heads": 2, "ffn": 48, "sequence_length": 12}
    return RunConfig.model_validate(
        {"model": parts, "precision": {"kind": kind}, "train": {"micro_batch": 2}}
    )


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> dict[str, float]:
    """Milliseconds of own kernels, by shape of the first input's last dimension; plain code takes 1."""
    told = dict[str, float]()

    def timed(case: elementwise_choice.Case, compute: Any, device: torch.device) -> float:
        case.differentiate(compute)
        part = {64: "heads", 32: "norms", 96: "swiglu"}[case.inputs[0].shape[-1]]
        return told[part] if compute is case.own else 1.0

    monkeypatch.setattr(elementwise_choice, "time_case", timed)
    return told


@interpreted
@pytest.mark.parametrize("kind", ["fp32", "bf16"])
def test_measurement_keeps_what_is_faster(kind: str, clock: dict[str, float]) -> None:
    clock |= {"heads": 0.5, "norms": 0.99, "swiglu": 0.97}
    kept = elementwise_choice.keep_faster_parts(TOLD, small_run(kind), CPU)
    assert kept.elementwise == ("heads", "swiglu") and not kept.notes
    assert "(heads 0.500 ms, PyTorch's 1.000; norms 0.990 ms, PyTorch's 1.000; swiglu" in str(kept)
    assert kept.replaceable.keys() >= {"elementwise"}


@interpreted
def test_measurement_leaves_wrong_and_broken_kernels(
    clock: dict[str, float], monkeypatch: pytest.MonkeyPatch
) -> None:
    clock |= {"heads": 0.5, "norms": 0.5, "swiglu": 0.5}
    right = elementwise.rotate_heads

    def wrong(*told: Any) -> tuple[Tensor, ...]:
        q, k, v = right(*told)
        return q, k * (1 + 3e-4), v

    def broken(given: Tensor) -> Tensor:
        raise RuntimeError("ptxas exited\nwith a list")

    monkeypatch.setattr(elementwise, "rotate_heads", wrong)
    monkeypatch.setattr(elementwise, "swiglu", broken)
    kept = elementwise_choice.keep_faster_parts(TOLD, small_run(), CPU)
    assert kept.elementwise == ("norms",)
    first, second = kept.notes
    assert "heads compute other numbers than PyTorch here, relative error 0.00" in first
    assert "swiglu do not work here (RuntimeError: ptxas exited); PyTorch computes swiglu" in second


def test_nothing_is_measured_where_the_recipe_says_it() -> None:
    told = small_run()
    named = told.model_copy(update={"kernels": told.kernels.model_copy(update={"elementwise": "triton"})})
    assert elementwise_choice.keep_faster_parts(TOLD, named, CPU) is TOLD
    none = Kernels("reference")
    assert elementwise_choice.keep_faster_parts(none, told, CPU) is none


@interpreted
def test_what_was_measured_holds_at_the_same_place(
    clock: dict[str, float], monkeypatch: pytest.MonkeyPatch
) -> None:
    clock |= {"heads": 0.5, "norms": 1.5, "swiglu": 0.5}
    c = small_run()
    first = elementwise_choice.keep_faster_parts(TOLD, c, CPU)
    clock |= {"heads": 1.5, "norms": 0.5, "swiglu": 1.5}
    assert elementwise_choice.keep_faster_parts(TOLD, c, CPU, first.measured) == first
    # The newest of several; those of other places do not count.
    old = [timing._replace(own_time=9.0) for timing in first.measured]
    elsewhere = [timing._replace(own_time=9.0, place=f"H100 {timing.place}") for timing in first.measured]
    assert elementwise_choice.keep_faster_parts(TOLD, c, CPU, [*old, *first.measured, *elsewhere]) == first
    again = elementwise_choice.keep_faster_parts(TOLD, c, CPU, elsewhere)
    assert again.elementwise == ("norms",) and len(again.notes) == 3
    assert again.notes[0].startswith(
        f"kernels.elementwise=auto: own kernels for heads are measured again, on {first.measured[0].place}: earlier on "
        f"H100 {first.measured[0].place}."
    )
    longer = c.model_copy(update={"train": c.train.model_copy(update={"micro_batch": 3})})
    assert elementwise_choice.keep_faster_parts(TOLD, longer, CPU, first.measured).elementwise == ("norms",)
    compiled = replace(TOLD, compile=True)
    monkeypatch.setattr(torch, "compile", lambda plain, dynamic: plain)
    assert elementwise_choice.keep_faster_parts(compiled, c, CPU, first.measured).elementwise == ("norms",)

    def broken(given: Tensor) -> Tensor:
        raise RuntimeError("no compiler")

    monkeypatch.setattr(elementwise, "swiglu", broken)
    kept = elementwise_choice.keep_faster_parts(TOLD, c, CPU, first.measured)
    assert kept.elementwise == ("heads",) and "swiglu do not work here" in kept.notes[0]


def test_journal_keeps_what_was_measured(tmp_path: Path) -> None:
    run = RunDirectory(tmp_path)
    timings = [Timing("heads", "H100, bf16", 0.123456789, 1.0), Timing("swiglu", "H100", fault="do not work")]
    log = RunLog(run, print)
    for measured in (timings[:1], [], timings[1:]):
        log.emit_event(Training(step=0, cursor=0, world=1, elementwise=measured))
    assert list_timings(run) == timings


def train_with_clock(config: RunConfig, own_time: float) -> str:
    """On a rank: with own kernels though there is no GPU, at this pace; PyTorch takes 1. Returns the kernels."""
    from megastable.engine import numerics

    numerics.choose_parts = lambda *_: (PARTS, [])
    elementwise_choice.time_case = lambda case, compute, _: own_time if compute is case.own else 1.0
    kernels, begin = list[str](), Trainer._all_steps
    Trainer._all_steps = lambda trainer: (kernels.append(str(trainer.engine.kernels)), begin(trainer))[1]  # type: ignore[method-assign]
    train(config, Path("recipe.yaml"))
    return kernels[0]


@interpreted
def test_a_resume_takes_the_kernels_of_the_start(corpus: Path, tmp_path: Path) -> None:
    def run(steps: int) -> RunConfig:
        times = {"steps": steps, "eval_samples": 0, "eval_interval": 0}
        return tiny(corpus, tmp_path / "run", train=times, checkpoint={"interval": 2})

    (first,) = run_ranks(1, train_with_clock, run(2), 0.5)
    (second,) = run_ranks(1, train_with_clock, run(4), 1.5)
    assert second == first and "own kernels for heads, norms, swiglu (heads 0.500 ms" in first


@interpreted
def test_measurement_takes_time() -> None:
    case = elementwise_choice.make_case("swiglu", small_run(), CPU)
    assert 0 < elementwise_choice.time_case(case, case.plain, CPU) < 1000
