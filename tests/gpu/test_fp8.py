"""FP8 by Transformer Engine: its layers against their emulation, and what the engine promises, with them inside.

Its modules are nearer to the emulation than bf16 is: that tells a right scale, layout or order from a wrong one.
Bounds of its own tests beside it (tests/pytorch/test_numerics.py there: 0.0675, 0.125 of each number in FP8).
"""

from __future__ import annotations

import math
import shutil
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.utils import counters

from megastable.config.tree import RunConfig
from megastable.fp8.apply import emulate_fp8
from megastable.fp8.controller import Fp8
from megastable.fp8.te import TransformerEngine, why_not
from megastable.fp8.te import apply_transformer_engine as by_te
from megastable.model.gpt import GPT, Block
from megastable.model.kernels import Kernels
from megastable.model.sizes import in_fp8
from megastable.parallel.deferred_gradients import DeferredGradients
from megastable.parallel.topology import TensorParallel
from tests.conftest import tiny
from tests.gpu.test_engine import SHAPE, batches, config_of, count_synchronisations, engine_of, same, state
from tests.gpu.test_kernels import error

if TYPE_CHECKING:
    from megastable.engine.engine import Engine

pytestmark = [
    pytest.mark.usefixtures("world", "possible"),
    pytest.mark.skipif(find_spec("transformer_engine") is None, reason="Transformer Engine is not installed"),
]
RECIPES = ["current", "delayed", "block"]
EAGER = {"compile": False}


@pytest.fixture
def possible(request: pytest.FixtureRequest, gpu: torch.device) -> None:
    """Skips a recipe that this GPU has no products of."""
    recipe = (
        request.node.callspec.params.get("recipe", "current")
        if hasattr(request.node, "callspec")
        else "current"
    )
    if reason := why_not(config_of(precision={"fp8": recipe}), gpu):
        pytest.skip(reason)


# Layers


def model_of(
    fp8: dict[str, Any], backend: str, gpu: torch.device, late: bool = False, **model: Any
) -> tuple[Block, Fp8 | None]:
    """A block with the same weights whatever computes it. backend: te, emulated or off. late: it leaves weight
    gradients for later."""
    parallel = {"pipeline": 2, "schedule": "zero_bubble"} if late else {}
    c = config_of(model=model, parallel=parallel, precision={"fp8": {"backend": "te", **fp8}})
    gpt = GPT(c.model, TensorParallel(), "none", 3).to(gpu, torch.bfloat16)
    found: Fp8 | None = None
    assert c.precision.fp8 is not None
    if backend == "te":
        found = by_te(gpt, c, None, gpu)
    elif backend == "emulated":
        found = emulate_fp8(gpt, c.precision.fp8, in_fp8(c))
    block = gpt[1]
    assert isinstance(block, Block)
    return block, found


PARTS: dict[str, tuple[list[str], Callable[[Block], Callable[[Tensor], Tensor]], int]] = {
    # what is kept out of FP8, what is computed, its width of the input
    "attention.qkv": ([], lambda b: lambda x: b.attention.qkv(b.attention_norm(x)), 256),
    "attention.out": ([], lambda b: b.attention.out, 256),
    "mlp": ([], lambda b: lambda x: b.mlp(b.mlp_norm(x)), 256),
    "mlp.gate_up": (["mlp.down"], lambda b: lambda x: b.mlp(b.mlp_norm(x)), 256),
    "mlp.down": (["mlp.gate_up"], lambda b: lambda x: b.mlp(b.mlp_norm(x)), 256),
}
WIDE: dict[str, Any] = dict(hidden=256, heads=4, kv_heads=2, ffn=512)


def computed(
    part: str, fp8: dict[str, Any], backend: str, gpu: torch.device, norms: str = "before", steps: int = 2
) -> list[Tensor]:
    """Output, gradients of the input and of the weights, of the last of some steps: delayed scales know the first."""
    kept, chosen, width = PARTS[part]
    keep = [f"blocks.{i}.{linear}" for i in range(2) for linear in kept]
    block, switch = model_of({**fp8, "keep": keep}, backend, gpu, **WIDE, norms=norms)
    generator = torch.Generator(gpu).manual_seed(0)
    found: list[Tensor] = []
    for _ in range(steps):
        x = torch.randn(128, 2, width, generator=generator, device=gpu)
        x[..., 7] *= 20  # as activations have them
        x = x.to(torch.bfloat16).requires_grad_()
        upstream = (1e-4 * torch.randn(128, 2, 1, generator=generator, device=gpu)).to(torch.bfloat16)
        block.zero_grad()
        with switch.computing() if switch is not None else torch.enable_grad():
            y = chosen(block)(x)
            ways = torch.randn(y.shape, generator=generator, device=gpu).to(torch.bfloat16)
            y.backward(ways * upstream)
        if switch is not None:
            switch.settle_step(True)
        assert x.grad is not None
        found = [y.detach(), x.grad, *(p.grad for p in block.parameters() if p.grad is not None)]
    return found


@pytest.mark.parametrize("formats", ["auto", "e4m3"])
@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("part", PARTS)
def test_its_layers_are_nearer_to_the_emulation_than_bf16(
    part: str, recipe: str, formats: str, gpu: torch.device
) -> None:
    fp8 = {"recipe": recipe, "formats": formats}
    its, ours, without = (computed(part, fp8, backend, gpu) for backend in ("te", "emulated", "off"))
    assert len(its) == len(ours) == len(without)
    for number, (mine, wanted, plain) in enumerate(zip(its, ours, without, strict=True)):
        assert mine.dtype == torch.bfloat16 and mine.shape == wanted.shape
        away, rounding = error(mine, wanted), error(plain, wanted)
        assert away < 0.0675, f"tensor {number}"
        # The emulation rounds what is normed, or activated, to bf16 before it quantizes it; its kernels do not.
        assert away < max(0.6 * rounding, 2**-7), f"tensor {number}: {away:.4f}, bf16 {rounding:.4f}"


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("part", ["attention.qkv", "attention.out", "mlp"])
def test_norms_after(part: str, recipe: str, gpu: torch.device) -> None:
    """No norm is a part of its modules then."""
    its, ours, without = (
        computed(part, {"recipe": recipe}, backend, gpu, "after") for backend in ("te", "emulated", "off")
    )
    for mine, wanted, plain in zip(its, ours, without, strict=True):
        assert error(mine, wanted) < max(0.6 * error(plain, wanted), 2**-7)


@pytest.mark.parametrize("on", [True, False])
@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("part", ["attention.qkv", "attention.out", "mlp"])
def test_weight_gradients_that_come_later_are_the_same(
    part: str, recipe: str, on: bool, gpu: torch.device
) -> None:
    """Of two micro-batches, both left before the first is computed; and nothing else is left."""
    _, chosen, width = PARTS[part]
    results = []
    for late in (False, True):
        block, switch = model_of({"recipe": recipe}, "te", gpu, late, **WIDE)
        assert switch is not None
        switch.on, deferred_gradients = on, DeferredGradients()
        generator, found = torch.Generator(gpu).manual_seed(2), list[Tensor]()
        with switch.computing():
            for _ in range(2):
                x = torch.randn(128, 2, width, generator=generator, device=gpu)
                x = x.to(torch.bfloat16).requires_grad_()
                with deferred_gradients.collect():
                    y = chosen(block)(x)
                    y.backward(torch.randn(y.shape, generator=generator, device=gpu).to(torch.bfloat16))
                assert x.grad is not None
                found += [y.detach(), x.grad]
            if late:
                assert not [p for p in block.parameters() if p.dim() == 2 and p.grad is not None]
            for _ in range(2):
                deferred_gradients.compute_oldest()
        results.append([*found, *(p.grad for p in block.parameters() if p.grad is not None)])
    assert len(results[0]) == len(results[1])
    assert all(torch.equal(plain, late) for plain, late in zip(*results, strict=True))


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("part", ["attention.qkv", "attention.out", "mlp"])
def test_switched_off_its_modules_compute_in_bf16(part: str, recipe: str, gpu: torch.device) -> None:
    """Gate before up, the norm's epsilon and all that: nothing but rounding is left."""
    _, chosen, width = PARTS[part]
    (block, switch), (plain, _) = (model_of({"recipe": recipe}, b, gpu, **WIDE) for b in ("te", "off"))
    assert switch is not None
    switch.on = False
    results = []
    for one in (block, plain):
        generator = torch.Generator(gpu).manual_seed(1)
        x = torch.randn(128, 2, width, generator=generator, device=gpu).to(torch.bfloat16).requires_grad_()
        with switch.computing():
            y = chosen(one)(x)
            y.backward(torch.randn(y.shape, generator=generator, device=gpu).to(torch.bfloat16))
        assert x.grad is not None
        results.append([y.detach(), x.grad, *(p.grad for p in one.parameters() if p.grad is not None)])
    for mine, wanted in zip(*results, strict=True):
        assert error(mine, wanted) < 2**-6


def test_what_delayed_scales_remember_is_what_the_emulation_remembers(gpu: torch.device) -> None:
    """Through three steps of two micro-batches; an evaluation and a refused update leave nothing behind."""
    told = []
    for backend in ("te", "emulated"):
        block, switch = model_of({"recipe": "delayed", "history": 4}, backend, gpu, **WIDE)
        assert switch is not None
        generator = torch.Generator(gpu).manual_seed(2)

        def run(size: float, block: Block = block, generator: torch.Generator = generator) -> None:
            x = size * torch.randn(128, 2, 256, generator=generator, device=gpu)
            x = x.to(torch.bfloat16).requires_grad_()
            y = block.attention.out(x) + block.mlp(block.mlp_norm(x))
            if torch.is_grad_enabled():
                y.backward(size * 1e-3 * torch.ones_like(y))

        for size in (1.0, 4.0, 2.0):
            with switch.computing():
                run(size)
                run(size / 2)
            switch.settle_step(True)
        before = switch.write_history()
        with torch.no_grad(), switch.computing():
            run(100.0)
        with switch.computing():
            run(100.0)
        switch.settle_step(False)
        assert switch.write_history() == before
        told.append(before)
    its, ours = told
    assert its.keys() == ours.keys()
    for layer in its:
        if not layer.startswith("blocks.0") or layer.endswith("qkv"):
            continue  # never ran
        got, wanted = torch.tensor(its[layer]), torch.tensor(ours[layer])
        # Of the first step's gradients the emulation knows the scale, and its kernels guess.
        torch.testing.assert_close(got[:2], wanted[:2], rtol=0.05, atol=0)
        torch.testing.assert_close(got[2, :2], wanted[2, :2], rtol=0.1, atol=0)
        assert torch.equal(got == 0, wanted == 0)


# The engine


def fp8_config(recipe: str = "current", **parts: Any) -> RunConfig:
    fp8 = {"recipe": recipe, "backend": "te"}
    return config_of(**({"precision": {"fp8": fp8}, "kernels": EAGER} | parts))


def accept(measured: Any) -> bool:
    return bool(measured.finite)


def steps(engine: Engine, numbers: range, lr: float = 3e-3) -> list[float]:
    return [engine.train_step(batches(i % 3), lr, accept)[0].loss for i in numbers]


def fp8_of(engine: Engine) -> Fp8:
    assert engine.fp8 is not None
    return engine.fp8


KINDS: dict[str, dict[str, Any]] = {
    "eager": {},
    "compiled": {"kernels": {}},
    "recompute-full": {"parallel": {"recompute": "full"}},
    "recompute-selective": {"parallel": {"recompute": "selective"}},
    "recompute-full-compiled": {"parallel": {"recompute": "full"}, "kernels": {}},
    "zero2": {"parallel": {"zero": 2}},
    "zero3": {"parallel": {"zero": 3}},
    "norms-after": {"model": {"norms": "after"}},
}


@pytest.mark.parametrize(
    ("recipe", "kind"),
    [(r, k) for r in RECIPES for k in KINDS if r != "block" or k in ("compiled", "recompute-full")],
)
def test_it_learns_and_repeats_itself_bit_for_bit(recipe: str, kind: str) -> None:
    runs = []
    for _ in range(2):
        engine = engine_of(fp8_config(recipe, **KINDS[kind]))
        assert engine.kernels.fp8 == "te" and isinstance(engine.fp8, TransformerEngine)
        runs.append((steps(engine, range(12)), state(engine), fp8_of(engine).write_history()))
        del engine
    assert runs[0][0] == runs[1][0] and same(runs[0][1], runs[1][1]) and runs[0][2] == runs[1][2]
    assert runs[0][0][-1] < runs[0][0][0] - 0.3


@pytest.mark.parametrize("kind", ["compiled", "recompute-full-compiled", "zero3"])
def test_a_step_is_looked_into(kind: str) -> None:
    engine = engine_of(fp8_config(**KINDS[kind]))
    steps(engine, range(2))
    engine.probe.watch_step()
    steps(engine, range(1))
    rows = engine.collect_statistics().layers.items()
    assert {n for n, row in rows if "input_underflow" in row} == {
        f"{n}.weight" for n in fp8_of(engine).layers
    }


@pytest.mark.parametrize("recipe", RECIPES)
def test_twenty_steps_are_close_to_bf16(recipe: str) -> None:
    in_fp8_, in_bf16 = (
        steps(engine_of(c), range(20)) for c in (fp8_config(recipe), config_of(kernels=EAGER))
    )
    assert abs(in_fp8_[0] - in_bf16[0]) < 0.01 * in_bf16[0]
    mean = [sum(losses[-5:]) / 5 for losses in (in_fp8_, in_bf16)]
    assert abs(mean[0] - mean[1]) < 0.1 * (in_bf16[0] - mean[1])  # of what was learnt


@pytest.mark.parametrize("recompute", ["selective", "full"])
@pytest.mark.parametrize("recipe", RECIPES)
def test_recomputation_changes_nothing(recipe: str, recompute: str) -> None:
    """By torch alone: scales do not move within a step, so that Transformer Engine has nothing to bring back."""
    plain = engine_of(fp8_config(recipe))
    wanted, history = steps(plain, range(4)), fp8_of(plain).write_history()
    del plain
    again = engine_of(fp8_config(recipe, parallel={"recompute": recompute}))
    assert steps(again, range(4)) == wanted and fp8_of(again).write_history() == history


@pytest.mark.parametrize("recipe", RECIPES)
def test_off_and_on_without_a_restart(recipe: str) -> None:
    engine, plain = engine_of(fp8_config(recipe)), engine_of(config_of(kernels=EAGER))
    for _ in range(2):
        fp8_of(engine).on = True
        steps(engine, range(2))
        on = engine.measure_step(batches(7))
        fp8_of(engine).on = False
        off = engine.measure_step(batches(7))
        assert (on.fp8, off.fp8) == (True, False) and on.loss != off.loss
        assert abs(on.loss - off.loss) < 0.02 * off.loss
        assert abs(on.grad_norm - off.grad_norm) < 0.15 * off.grad_norm
        steps(engine, range(2))
    # With the same weights it is the engine without FP8, but for where its kernels round.
    plain.restore_optimizer_state({name: t.clone() for name, t in engine.optimizer_state().items()})
    plain.refresh_weights()
    off, without = engine.measure_step(batches(8)), plain.measure_step(batches(8))
    assert math.isclose(off.loss, without.loss, rel_tol=2e-3)
    assert math.isclose(off.grad_norm, without.grad_norm, rel_tol=2e-2)
    evaluated = [e.evaluate_samples(batches(9)).mean().item() for e in (engine, plain)]
    assert math.isclose(*evaluated, rel_tol=2e-3)


@pytest.mark.parametrize("norms", ["before", "after"])
def test_parameters_keep_their_names_places_and_marks(norms: str) -> None:
    engines = [engine_of(c) for c in (fp8_config(model={"norms": norms}), config_of(model={"norms": norms}))]
    fragments = [[vars(f) for f in engine.flat_state().fragments] for engine in engines]
    assert fragments[0] == fragments[1]
    shown = [
        [(p.placement, p.tensor_model_parallel, p.dtype, p.shape) for p in engine.ds.module.parameters()]
        for engine in engines
    ]
    assert shown[0] == shown[1]
    assert same(state(engines[0]), state(engines[1]))  # and they begin alike


@pytest.mark.parametrize("recipe", ["current", "delayed"])
def test_a_refused_update_leaves_no_trace(recipe: str) -> None:
    engine = engine_of(fp8_config(recipe))
    steps(engine, range(3))
    before, history = state(engine), fp8_of(engine).write_history()
    weight = next(p for p in engine.ds.module.parameters() if p.placement.name == "blocks.1.mlp.down.weight")
    handle = weight.register_hook(lambda g: torch.full_like(g, math.nan))
    measured, applied = engine.train_step(batches(3), 1e-3, accept)
    handle.remove()
    assert not applied and not measured.finite
    assert same(before, state(engine)) and fp8_of(engine).write_history() == history
    engine.evaluate_samples(batches(4))
    engine.measure_step(batches(5))
    assert fp8_of(engine).write_history() == history
    steps(engine, range(1))
    assert (fp8_of(engine).write_history() == history) == (recipe == "current")


@pytest.mark.usefixtures("exact")
@pytest.mark.parametrize("recipe", RECIPES)
def test_a_rewind_point_brings_back_every_bit(recipe: str) -> None:
    from megastable.checkpoint.snapshot import Ring

    engine = engine_of(fp8_config(recipe))
    steps(engine, range(3))
    ring = Ring(engine, capacity=2, interval=1)
    ring.take_snapshot(3, None)
    then = state(engine), fp8_of(engine).write_history()
    first = steps(engine, range(3, 7))
    after = state(engine), fp8_of(engine).write_history()
    snapshot = ring.find_before(4)
    assert snapshot is not None and not same(then[0], after[0])
    ring.restore_snapshot(snapshot)
    engine.refresh_weights()
    assert same(then[0], state(engine)) and fp8_of(engine).write_history() == then[1]
    assert steps(engine, range(3, 7)) == first
    assert same(after[0], state(engine)) and fp8_of(engine).write_history() == after[1]


def trained(corpus: Path, run: Path, fp8: dict[str, Any] | None, steps: int) -> Path:
    from megastable.train import train

    lengths = {"steps": steps, "global_batch": 8, "micro_batch": 2, "eval_samples": 0}
    config = tiny(
        corpus, run, train=lengths, logging={"layers_interval": 0}, precision={"fp8": fp8}, kernels=EAGER
    )
    assert train(config, Path("recipe.yaml")) == 0
    return run / "checkpoints" / f"step-{steps}" / "rank-00000.safetensors"


@pytest.mark.usefixtures("exact")
@pytest.mark.parametrize("recipe", RECIPES)
def test_a_run_resumes_bit_for_bit(recipe: str, tmp_path: Path, corpus: Path) -> None:
    fp8 = {"recipe": recipe, "backend": "te"}
    straight = trained(corpus, tmp_path / "straight", fp8, 12)
    trained(corpus, tmp_path / "stopped", fp8, 6)
    # This process holds the lock of the run that it began: a copy is a run of its own.
    shutil.copytree(tmp_path / "stopped", tmp_path / "resumed")
    assert trained(corpus, tmp_path / "resumed", fp8, 12).read_bytes() == straight.read_bytes()


@pytest.mark.parametrize("recipe", ["current", "delayed"])
def test_its_checkpoints_are_everybodys(recipe: str, tmp_path: Path, corpus: Path) -> None:
    """The names of a run in bf16; and a run goes on by the other backend, and without FP8."""
    from safetensors import safe_open

    def names(file: Path) -> set[str]:
        with safe_open(file, "pt") as opened:
            return set(opened.keys())

    begun = trained(corpus, tmp_path / "te", {"recipe": recipe, "backend": "te"}, 6)
    assert names(begun) == names(trained(corpus, tmp_path / "bf16", None, 6))
    for name, fp8 in {"emulated": {"recipe": recipe, "backend": "emulated"}, "bf16": None}.items():
        run = tmp_path / f"on-{name}"
        shutil.copytree(tmp_path / "te", run)
        assert trained(corpus, run, fp8, 9).exists()
        assert "resumed" in (run / "journal.jsonl").read_text()


@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
@pytest.mark.parametrize("recipe", RECIPES)
def test_pieces_are_compiled_once_for_all_blocks(recipe: str, recompute: str, gpu: torch.device) -> None:
    c = config_of(model={"layers": 4}, precision={"fp8": {"recipe": recipe, "backend": "te"}})
    tokens = torch.randint(500, (4, 128), generator=torch.Generator().manual_seed(1)).to(gpu)
    results: list[list[Tensor]] = []
    for compiled in (False, True):
        model = GPT(c.model, TensorParallel(), recompute, 3, kernels=Kernels(compile=compiled))
        model = model.to(gpu, torch.bfloat16)
        switch = by_te(model, c, None, gpu)
        counters.clear()
        graphs: list[int] = []
        for _ in range(4):
            model.zero_grad()
            with switch.computing():
                model(tokens).float().square().mean().backward()
            switch.settle_step(True)
            graphs.append(counters["stats"]["unique_graphs"])
        # As many as of a block, not of all; and none in a later step.
        assert (len(set(graphs)) == 1 and 0 < graphs[0] < 16) if compiled else graphs == [0] * 4
        results.append([p.grad for p in model.parameters() if p.grad is not None])
    for mine, wanted in zip(*results[::-1], strict=True):
        assert error(mine, wanted) < 0.05  # QK-norm and rotation round elsewhere, and FP8 makes more of it


@pytest.mark.parametrize("recipe", RECIPES)
def test_the_host_does_not_wait_for_the_gpu_within_a_step(recipe: str) -> None:
    engine = engine_of(fp8_config(recipe))
    steps(engine, range(3))
    assert count_synchronisations(engine, 3)[0] == 0


def test_sizes_that_do_not_fit_are_told_and_emulated() -> None:
    engine = engine_of(fp8_config(model=SHAPE | {"ffn": 264}))
    assert engine.kernels.fp8 == "emulated"
    (note,) = engine.kernels.notes
    assert "model.ffn" in note and "264" in note
    assert all(math.isfinite(loss) for loss in steps(engine, range(2)))


def test_nothing_of_it_is_left_where_a_block_is_kept(gpu: torch.device) -> None:
    c = config_of(precision={"fp8": {"backend": "te", "keep_first": 1}})
    model = GPT(c.model, TensorParallel(), "none", 3)
    by_te(model, c, None, gpu)
    from transformer_engine.pytorch.module.base import TransformerEngineBaseModule as Base

    def its(block: nn.Module) -> int:
        return sum(isinstance(part, Base) for part in block.modules())

    assert [its(model[1]), its(model[2])] == [0, 3]
