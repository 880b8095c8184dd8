"""The engine on a GPU: it learns, it repeats itself bit for bit, and a gate, a snapshot and a resume are exact."""

from __future__ import annotations

import math
import shutil
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch

from megastable.config import deepspeed_json
from megastable.config.tree import RunConfig
from megastable.data.loader import MicroBatch
from megastable.parallel.layout import Layout
from megastable.parallel.topology import Topology
from tests.conftest import tiny

if TYPE_CHECKING:
    from megastable.engine.engine import Engine

pytestmark = pytest.mark.usefixtures("world")

SHAPE = dict(layers=2, hidden=128, heads=4, kv_heads=2, ffn=256, sequence_length=128, vocab_size=500)
KINDS: dict[str, dict[str, Any]] = {
    "bf16": {},
    "bf16-eager": {"kernels": {"compile": False}},
    "bf16-moments": {"optimizer": {"moments": "bf16"}},
    "bf16-zero2": {"parallel": {"zero": 2}},
    "fp16": {"precision": {"kind": "fp16"}},
    "fp32": {"precision": {"kind": "fp32"}},
}


def config_of(**parts: Any) -> RunConfig:
    tree: dict[str, Any] = {
        "model": SHAPE,
        "train": {"global_batch": 8, "micro_batch": 4, "steps": 20},
        "run": {"timeout": 120},
    }
    for key, value in parts.items():
        tree[key] = tree.get(key, {}) | value
    return RunConfig.model_validate(tree)


def engine_of(config: RunConfig) -> Engine:
    from megastable.engine.engine import Engine

    torch.manual_seed(0)
    return Engine(config, deepspeed_json.build_deepspeed_json(config, 1), Topology(Layout(1, 1, 1), 0, 120))


def batches(seed: int) -> list[MicroBatch]:
    generator = torch.Generator().manual_seed(seed)
    found = []
    for _ in range(2):
        # Text that can be learnt: every token is its predecessor plus one, now and then a new one.
        begin = torch.randint(500, (4, 1), generator=generator)
        drawn = (begin + torch.arange(129)) % 500
        tokens, labels = drawn[:, :-1].contiguous(), drawn[:, 1:].contiguous()
        found.append(MicroBatch(tokens.pin_memory(), labels.pin_memory(), torch.arange(4), None))
    return found


def state(engine: Engine) -> dict[str, torch.Tensor]:
    found = {name: value.detach().clone() for name, value in engine.optimizer_state().items()}
    for index, parameter in enumerate(engine.ds.module.parameters()):
        found[f"low/{index}"] = parameter.detach().clone()
    return found


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


@pytest.mark.usefixtures("exact")
@pytest.mark.parametrize("kind", KINDS)
def test_it_learns_and_repeats_itself_bit_for_bit(kind: str) -> None:
    runs = []
    for _ in range(2):
        engine = engine_of(config_of(**KINDS[kind]))
        losses = [engine.train_step(batches(i % 3), 3e-3, lambda m: m.finite)[0].loss for i in range(12)]
        runs.append((losses, state(engine)))
        del engine
    assert runs[0][0] == runs[1][0] and same(runs[0][1], runs[1][1])
    assert runs[0][0][-1] < runs[0][0][0] - 0.3


@pytest.mark.usefixtures("exact")
@pytest.mark.parametrize("apart", [False, True], ids=["causal", "documents"])
def test_long_sequences_repeat_themselves_bit_for_bit(apart: bool) -> None:
    """Of 2,048 tokens, where the gradients of attention are summed over many blocks of queries."""
    shape = SHAPE | {"hidden": 512, "ffn": 1024, "sequence_length": 2048}
    config = config_of(model=shape, data={"keep_documents_apart": apart})
    drawn = torch.randint(500, (4, 2049), generator=torch.Generator().manual_seed(1))
    segments = (torch.arange(2048) // 300).int().expand(4, -1).contiguous() if apart else None
    batch = MicroBatch(drawn[:, :-1].contiguous(), drawn[:, 1:].contiguous(), torch.arange(4), segments)
    runs = []
    for _ in range(2):
        engine = engine_of(config)
        steps = [engine.train_step([batch, batch], 1e-3, lambda m: m.finite)[0] for _ in range(4)]
        runs.append(([(m.loss, m.grad_norm) for m in steps], state(engine)))
        del engine
    assert runs[0][0] == runs[1][0] and same(runs[0][1], runs[1][1])


def test_fp32_on_a_gpu_equals_fp32_on_a_cpu(tmp_path: Path) -> None:
    """The same module in plain torch on the CPU: losses of some steps by AdamW."""
    from megastable.model.gpt import GPT
    from megastable.model.loss import LossFunction
    from megastable.parallel.topology import TensorParallel

    config = config_of(precision={"kind": "fp32"}, optimizer={"clip": 0.0})
    engine = engine_of(config)
    on_gpu = [engine.train_step(batches(i), 1e-3, lambda m: True)[0].loss for i in range(5)]

    loss = LossFunction(500, config.model.z_loss, TensorParallel())
    model = GPT(config.model, TensorParallel(), "none", config.run.seed, loss)
    groups = [
        {
            "params": [p for p in model.parameters() if p.dim() > 1],
            "weight_decay": config.optimizer.weight_decay,
        },
        {"params": [p for p in model.parameters() if p.dim() <= 1], "weight_decay": 0.0},
    ]
    adamw = torch.optim.AdamW(groups, lr=1e-3, betas=config.optimizer.betas, eps=config.optimizer.eps)
    for i, wanted in enumerate(on_gpu):
        loss.samples.clear()
        for part in batches(i):
            (model(part.tokens, part.labels) / 2).backward()
        mean = float(torch.stack([s[0] for s in loss.samples]).mean())
        assert math.isclose(mean, wanted, rel_tol=2e-4)
        adamw.step()
        adamw.zero_grad()


@pytest.mark.parametrize("kind", ["bf16", "bf16-moments", "bf16-zero2", "fp32"])
@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_gradient_that_is_not_finite_never_reaches_the_weights(kind: str, value: float) -> None:
    engine = engine_of(config_of(**KINDS[kind]))
    for i in range(3):
        engine.train_step(batches(i), 1e-3, lambda m: m.finite)
    before = state(engine)
    weight = next(p for n, p in engine.ds.module.named_parameters() if n.endswith("mlp.down.weight"))
    handle = weight.register_hook(lambda g: torch.full_like(g, value))
    measured, applied = engine.train_step(batches(3), 1e-3, lambda m: m.finite)
    handle.remove()
    assert not applied and not measured.finite and same(before, state(engine))
    measured, applied = engine.train_step(batches(3), 1e-3, lambda m: m.finite)
    assert applied and measured.finite and not same(before, state(engine))


@pytest.mark.usefixtures("exact")
@pytest.mark.parametrize("kind", ["bf16", "bf16-moments", "bf16-zero2"])
def test_a_rewind_point_copied_behind_the_steps_brings_back_every_bit(kind: str) -> None:
    from megastable.checkpoint.snapshot import Ring

    engine = engine_of(config_of(**KINDS[kind]))
    for i in range(3):
        engine.train_step(batches(i), 1e-3, lambda m: m.finite)
    ring = Ring(engine, capacity=2, interval=1)
    ring.take_snapshot(3, None)
    then = state(engine)
    first = [engine.train_step(batches(i), 1e-3, lambda m: m.finite)[0].loss for i in range(3, 7)]
    after = state(engine)
    snapshot = ring.find_before(4)
    assert snapshot is not None and not same(then, after)
    ring.restore_snapshot(snapshot)
    engine.refresh_weights()
    assert same(then, state(engine))
    again = [engine.train_step(batches(i), 1e-3, lambda m: m.finite)[0].loss for i in range(3, 7)]
    assert again == first and same(after, state(engine))


def count_synchronisations(engine: Engine, step: int) -> tuple[int, int]:
    """How often a step makes the host wait for the GPU: before the gate's one read, and in all."""
    read, seen = engine._collect, list[int]()
    torch.cuda.set_sync_debug_mode("warn")
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")

            def waits() -> int:
                return sum("synchroniz" in str(w.message) for w in caught)

            def collect(*args: Any) -> Any:
                seen.append(waits())
                return read(*args)

            engine._collect = collect  # type: ignore[method-assign, assignment]
            engine.train_step(batches(step), 1e-3, lambda m: m.finite, ballot=lambda: {"some": (0.0, 1.0)})
            return seen[0], waits()
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_the_host_waits_for_the_gpu_only_at_the_end_of_a_step() -> None:
    """Forward and backward are only queued; the gate reads once, DeepSpeed's update a few times."""
    engine = engine_of(config_of())
    for i in range(3):
        engine.train_step(batches(i), 1e-3, lambda m: m.finite)
    before_gate, in_all = count_synchronisations(engine, 9)
    assert before_gate == 0 and in_all <= 8


@pytest.mark.usefixtures("exact")
def test_a_run_resumes_bit_for_bit(tmp_path: Path, corpus: Path) -> None:
    from megastable.train import train

    def run(name: str, steps: int) -> Path:
        lengths = {"steps": steps, "global_batch": 8, "micro_batch": 2, "eval_samples": 0}
        config = tiny(corpus, tmp_path / name, train=lengths, logging={"layers_interval": 0})
        assert train(config, Path("recipe.yaml")) == 0
        return tmp_path / name / "checkpoints" / f"step-{steps}" / "rank-00000.safetensors"

    straight = run("straight", 12)
    run("stopped", 6)
    # This process holds the lock of the run that it began: a copy is a run of its own.
    shutil.copytree(tmp_path / "stopped", tmp_path / "resumed")
    assert run("resumed", 12).read_bytes() == straight.read_bytes()
    assert "resumed" in (tmp_path / "resumed" / "journal.jsonl").read_text()
