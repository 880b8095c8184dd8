"""Where the first non-finite number arose: planted in every layout, found by a replay that leaves no trace."""

from __future__ import annotations

import contextlib
import json
import math
import random
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

from megastable.config.tree import RunConfig
from megastable.model.cores import Core
from megastable.run.directory import as_json
from tests.conftest import tiny
from tests.distributed import run_ranks

LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "one": (1, {"parallel": {"recompute": "full"}}),
    "tp2": (2, {"parallel": {"tensor": 2, "sequence": True, "recompute": "selective"}}),
    "zero2": (2, {"parallel": {"zero": 2, "recompute": "full"}}),
    "zero3": (2, {"parallel": {"zero": 3, "recompute": "full"}}),
    "context2": (2, {"parallel": {"context": 2}}),
    "pp2-dp2-tied": (4, {"parallel": {"pipeline": 2}, "model": {"tied": True}}),
}
LAST = "blocks.1"  # the last of two; on the last stage


def bytes_of(engine: Any) -> dict[str, Any]:
    """All that a diagnosis must leave as it was."""
    flat = engine.flat_state()
    found: dict[str, Any] = {f"master/{i}": m.detach().clone() for i, m in enumerate(flat.masters)}
    for i, master in enumerate(flat.masters):
        for key, value in flat.optimizer.state[master].items():
            found[f"inner/{i}/{key}"] = value.detach().clone()
    for i, parameter in enumerate(engine.ds.module.parameters()):
        found[f"low/{i}"] = getattr(parameter, "ds_tensor", parameter).detach().clone()
        found[f"hooks/{i}"] = len(parameter._backward_hooks or {})
    found["random"] = torch.get_rng_state()
    found["other random"] = (random.getstate()[1], np.random.get_state()[1].tolist())  # type: ignore[index]
    ds = engine.ds
    found["counts"] = (ds.global_steps, ds.global_samples, ds.micro_steps, ds.skipped_steps)
    found["applied"] = (ds.was_step_applied(), engine.applied, engine.measured)
    found["scale"] = dict(vars(scaler)) if (scaler := getattr(engine.optimizer, "loss_scaler", None)) else {}
    found["lr"] = [group["lr"] for group in engine.optimizer.param_groups]
    hooks = [(m._forward_hooks, m._forward_pre_hooks, m._backward_hooks) for m in ds.module.modules()]
    found["module hooks"] = [sum(map(len, of_one)) for of_one in hooks]
    found["loss"] = id(getattr(ds.module, "loss", None) or ds.module.loss_fn)
    return found


def changed(before: dict[str, Any], after: dict[str, Any]) -> list[str]:
    def same(a: Any, b: Any) -> bool:
        # By bytes: NaN equals NaN.
        if isinstance(a, torch.Tensor):
            return torch.equal(a.reshape(-1).view(torch.uint8), b.reshape(-1).view(torch.uint8))
        return bool(a == b)

    assert before.keys() == after.keys() and len(before) > 20
    return [key for key, value in before.items() if not same(value, after[key])]


@contextlib.contextmanager
def replaced(thing: Any, name: str, value: Any) -> Iterator[None]:
    old = getattr(thing, name)
    setattr(thing, name, value)
    try:
        yield
    finally:
        setattr(thing, name, old)


def spoil(stream: Any) -> Any:
    x, rest = (stream[0], stream[1:]) if isinstance(stream, tuple) else (stream, ())
    x = torch.where(torch.arange(x.numel()).view(x.shape) == 5, math.nan, x)
    return (x, *rest) if rest else x


class Bench:
    """An engine after two steps, and what may be planted into it."""

    def __init__(self, config: RunConfig) -> None:
        from megastable.config import deepspeed_json
        from megastable.data.loader import Loader
        from megastable.data.skips import Skips
        from megastable.engine.engine import Engine
        from megastable.parallel.layout import Layout
        from megastable.parallel.topology import Topology
        from megastable.training.startup import open_data

        torch.set_num_threads(1)  # on busy cores two wait for each other
        world, p = dist.get_world_size(), config.parallel
        config, corpora = open_data(config)
        layout = Layout(p.tensor, p.pipeline, deepspeed_json.data_parallel(config, world), p.context)
        self.topology = Topology(layout, dist.get_rank(), 120)
        self.engine = Engine(config, deepspeed_json.build(config, world), self.topology)
        train, apart = config.train, config.data.keep_documents_apart
        self.loader = Loader(
            corpora.train, Skips.of([]), 0, train.global_batch, train.micro_batch, self.topology.sample_rank,
            layout.samples, apart, part=(self.topology.context_rank, layout.context),
        )  # fmt: skip
        for _ in range(2):
            assert self.step().finite and self.engine.applied
        self.batch = next(self.loader)

    def step(self) -> Any:
        return self.engine.train_step(next(self.loader).micro_batches, 1e-3, lambda m: m.finite)[0]

    def part(self, name: str, block: str = LAST) -> Any:
        """A part of a block, or the block itself; None on other stages."""
        from megastable.model.gpt import Block

        for module in self.engine.ds.module.modules():
            if isinstance(module, Block) and module.name == block:
                return module.get_submodule(name) if name else module
        return None

    def forward_of_block(self, micro_batch: int, data_rank: int, times: int = 99, name: str = LAST) -> Any:
        """NaN in the block's output: on tensor rank 0 of a data rank, in one micro-batch, in so many steps."""
        block, calls = self.part("", name), [0]
        if block is None or (self.topology.data_rank, self.topology.tensor_rank) != (data_rank, 0):
            return contextlib.nullcontext()
        original = block.forward

        def forward(stream: Any) -> Any:
            step, index = divmod(calls[0], len(self.batch.micro_batches))
            calls[0] += 1
            y = original(stream)
            return spoil(y) if index == micro_batch and step < times else y

        return replaced(block, "forward", forward)

    def gradient_of_attention(self, value: float) -> Any:
        """A gradient lost inside the attention, between its products."""
        attention = self.part("attention")
        if attention is None or self.topology.data_rank != 0:
            return contextlib.nullcontext()
        original = attention.core

        def core(*args: Any) -> torch.Tensor:
            y: torch.Tensor = original.run(*args)
            if y.requires_grad:
                y.register_hook(lambda g: torch.full_like(g, value))
            return y

        return replaced(attention, "core", Core(core, original.prepare))

    @contextlib.contextmanager
    def gradient_of_weight(self, value: float) -> Iterator[None]:
        down = self.part("mlp.down")
        if down is None or self.topology.data_rank != 0:
            yield
            return
        handle = down.weight.register_hook(lambda g: torch.full_like(g, value))
        try:
            yield
        finally:
            handle.remove()

    @contextlib.contextmanager
    def poison(self, kind: str) -> Iterator[str]:
        """One NaN in a piece of the last rank's state; the name of its parameter, on that rank."""
        flat = self.engine.flat_state()
        fragment = flat.fragments[-1]
        if kind == "computing":
            parameter = next(
                p for p in self.engine.ds.module.parameters() if p.placement.name == fragment.name
            )
            piece = getattr(parameter, "ds_tensor", parameter).data.view(-1)
        else:
            piece = flat.piece(fragment, kind)
        if self.topology.rank != self.topology.layout.world - 1:
            yield ""
            return
        old = piece[0].clone()
        piece[0] = math.nan
        try:
            yield fragment.name
        finally:
            piece[0] = old

    def locate(self, planted: Any) -> dict[str, Any]:
        """The step with what is planted, refused; its diagnosis; what that has changed."""
        from megastable.engine import nan_locator

        with planted as name:
            # A poisoned master shows only after an update: refused here by hand.
            measured, applied = self.engine.train_step(self.batch.micro_batches, 1e-3, lambda _: False)
            before = bytes_of(self.engine)
            found = nan_locator.locate(self.engine, self.batch.micro_batches)
            traces = changed(before, bytes_of(self.engine))
            poisoned = nan_locator.poisoned(self.engine)
        assert not applied
        return {
            "found": found,
            "traces": traces,
            "poisoned": poisoned,
            "name": name,
            "finite": measured.finite,
        }


def cases(config: RunConfig) -> dict[str, Any]:
    from megastable.engine.flatstate import KINDS

    bench = Bench(config)
    engine, batch = bench.engine, bench.batch
    clean = engine.train_step(batch.micro_batches, 1e-3, lambda _: False)[0]
    data = bench.topology.layout.data - 1
    answers = {
        "forward": bench.locate(bench.forward_of_block(1, data)),
        "attention": bench.locate(bench.gradient_of_attention(math.nan)),
        "weight gradient": bench.locate(bench.gradient_of_weight(math.nan)),
        "transient": bench.locate(bench.forward_of_block(0, 0, times=1)),
    }
    if config.parallel.zero < 3:
        # Every one a number, their sum is none (ZeRO 3 divides before it adds).
        answers["sum"] = bench.locate(bench.gradient_of_weight(3e38))
    for kind in (*KINDS, "computing"):
        answers[kind] = bench.locate(bench.poison(kind))
    again = engine.train_step(batch.micro_batches, 1e-3, lambda _: False)[0]
    unspoilt = torch.equal(clean.losses, again.losses) and clean.grad_norm == again.grad_norm
    return {
        "answers": answers, "unspoilt": unspoilt and clean.finite, "layout": bench.topology.layout,
        "positions": [m.positions.tolist() for m in batch.micro_batches], "after": bench.step().finite,
    }  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("name", LAYOUTS)
def test_what_was_planted_is_found(name: str, corpus: Path, tmp_path: Path) -> None:
    world, parts = LAYOUTS[name]
    parts = {**parts, "model": dict(tiny(corpus, tmp_path).model) | parts.get("model", {})}
    ranks = run_ranks(world, cases, tiny(corpus, tmp_path / "run", **parts))
    layout = ranks[0]["layout"]
    data = layout.data - 1
    for rank in ranks:
        assert rank["unspoilt"] and rank["after"]
        for case, answer in rank["answers"].items():
            assert answer["traces"] == [], case
            # The same on all ranks, and fit for the journal.
            assert as_json(asdict(answer["found"])) == as_json(asdict(ranks[0]["answers"][case]["found"]))
            assert json.loads(as_json(asdict(answer["found"])))["sentence"] == answer["found"].sentence
            sound = case in ("forward", "attention", "weight gradient", "transient", "sum")
            assert bool(answer["poisoned"]) != sound
            assert answer["finite"] == (case in ("weight", "exp_avg", "exp_avg_sq"))
    found = {case: answer["found"] for case, answer in ranks[0]["answers"].items()}

    first = found["forward"]
    guilty = layout.rank(layout.pipeline - 1, data, 0)
    assert (first.kind, first.layer, first.tensor, first.value) == ("forward", LAST, "output", "nan")
    assert (first.rank, first.stage, first.data_rank, first.tensor_rank, first.micro_batch) == (
        guilty, layout.pipeline - 1, data, 0, 1,
    )  # fmt: skip
    assert list(first.positions) == ranks[guilty]["positions"][1] and first.seen_by == (guilty,)
    assert not all(map(math.isfinite, first.losses)) and first.reproduced

    first = found["attention"]
    assert (first.kind, first.layer, first.tensor) == (
        "backward",
        f"{LAST}.attention.core",
        "input gradient",
    )
    assert (first.stage, first.data_rank, first.micro_batch) == (layout.pipeline - 1, 0, 0)
    assert len(first.seen_by) == layout.tensor * layout.context and all(map(math.isfinite, first.losses))

    first = found["weight gradient"]
    assert (first.kind, first.layer, first.tensor) == (
        "backward",
        f"{LAST}.mlp.down",
        "weight gradient",
    )
    assert (first.stage, first.data_rank, first.micro_batch) == (layout.pipeline - 1, 0, 0)

    assert found["transient"].kind == "not reproduced" and not found["transient"].reproduced
    assert found["transient"].rank is None
    # One finite replay blames nobody.
    assert "is finite, with a loss of" in found["transient"].sentence
    assert "hardware" not in found["transient"].sentence
    if "sum" in found:
        assert found["sum"].kind == "sum" and found["sum"].rank is None and found["sum"].reproduced

    kinds = {"weight": "fp32 master", "exp_avg": "first moment", "exp_avg_sq": "second moment"}
    kinds["computing"] = "computing copy"
    for kind, title in kinds.items():
        first, parameter = found[kind], ranks[-1]["answers"][kind]["name"]
        line = f"{title} of {parameter} on rank {world - 1}"
        assert (first.kind, first.rank, first.micro_batch) == ("state", world - 1, None)
        assert f"{first.layer}.weight" == parameter and first.stage == layout.pipeline - 1
        assert first.parameters == (line,) and ranks[0]["answers"][kind]["poisoned"] == [line]
        assert line in first.sentence


NORMS = {
    "before": ["attention_norm", "mlp_norm"],
    "after": ["attention_norm", "mlp_norm"],
    "both": ["attention_norm", "attention_post_norm", "mlp_norm", "mlp_post_norm"],
    "deep": ["attention_norm", "mlp_norm"],
    "branch": ["attention_norm", "mlp_norm"],
}


def norm_cases(config: RunConfig) -> dict[str, Any]:
    """By norm: NaN in its output, in the gradient of its output, and in that of its weight."""
    bench = Bench(config)
    answers = {}
    for name in NORMS[config.model.norms]:
        norm = bench.part(name)
        original = norm.forward

        def spoilt(x: torch.Tensor, original: Any = original) -> Any:
            return spoil(original(x))

        def hooked(x: torch.Tensor, original: Any = original) -> Any:
            y = original(x)
            if y.requires_grad:
                y.register_hook(lambda g: torch.full_like(g, math.nan))
            return y

        handle = norm.weight.register_hook(lambda g: torch.full_like(g, math.nan))
        answers[name] = [bench.locate(contextlib.nullcontext())]
        handle.remove()
        for forward in (spoilt, hooked):
            answers[name].append(bench.locate(replaced(norm, "forward", forward)))
    return answers


@pytest.mark.slow
@pytest.mark.parametrize("norms", NORMS)
def test_norms_are_found_wherever_they_are(norms: str, corpus: Path, tmp_path: Path) -> None:
    config = tiny(
        corpus, tmp_path / "run", parallel={"recompute": "full"},
        model=dict(tiny(corpus, tmp_path).model) | {"norms": norms},
    )  # fmt: skip
    (answers,) = run_ranks(1, norm_cases, config)
    assert {*answers} == {*NORMS[norms]}
    for name, cases in answers.items():
        assert all(answer["traces"] == [] for answer in cases)
        places = [(f.kind, f.layer, f.tensor) for f in (answer["found"] for answer in cases)]
        layer = f"{LAST}.{name}"
        # The hook of what is planted comes first: the next to see the gradient are the norm's own weight and input.
        assert places[:2] == [("backward", layer, "weight gradient"), ("forward", layer, "output")]
        assert places[2][:2] == ("backward", layer)


def fp16_cases(config: RunConfig) -> dict[str, Any]:
    from megastable.engine import nan_locator
    from megastable.model import gpt

    bench = Bench(config)
    engine = bench.engine
    loss, call = type(engine.loss), type(engine.loss).__call__
    features = gpt.Readout.features

    def large(*args: Any) -> Any:
        return tuple(1e4 * part for part in features(*args))

    answers = {
        "first stage": bench.locate(bench.forward_of_block(3, 0, name="blocks.0")),
        "logits": bench.locate(replaced(gpt.Readout, "features", large)),
        "loss": bench.locate(replaced(loss, "__call__", lambda self, *a: call(self, *a) * math.nan)),
    }
    # An overflow of its own; the replay runs at the scale of the step, not at the one that it was lowered to.
    engine.set_loss_scale(2.0**24)
    answers["overflow"] = bench.locate(contextlib.nullcontext())

    def fails(*_: Any) -> None:
        raise RuntimeError("in the middle")

    before = bytes_of(engine)
    with replaced(engine, "measure", fails), pytest.raises(RuntimeError, match="in the middle"):
        nan_locator.locate(engine, bench.batch.micro_batches)
    return {
        "answers": answers,
        "scale": engine.optimizer.loss_scale,
        "left": changed(before, bytes_of(engine)),
    }


@pytest.mark.slow
def test_fp16_in_a_pipeline(corpus: Path, tmp_path: Path) -> None:
    config = tiny(
        corpus, tmp_path, precision={"kind": "fp16", "initial_scale_power": 8}, parallel={"pipeline": 2},
        data={"keep_documents_apart": True},
    )  # fmt: skip
    ranks = run_ranks(2, fp16_cases, config)
    for rank in ranks:
        assert rank["left"] == [] and rank["scale"] < 2.0**24
        assert {case: answer["traces"] for case, answer in rank["answers"].items() if answer["traces"]} == {}
        assert [case for case, answer in rank["answers"].items() if answer["finite"]] == []
    found = {case: answer["found"] for case, answer in ranks[0]["answers"].items()}

    def place(case: str) -> tuple[Any, ...]:
        f = found[case]
        return f.kind, f.layer, f.tensor, f.value, f.rank, f.stage, f.micro_batch

    assert place("first stage") == ("forward", "blocks.0", "output", "nan", 0, 0, 3)
    assert place("logits") == ("forward", "head", "output", "inf", 1, 1, 0)
    assert place("loss") == ("forward", "loss", "output", "nan", 1, 1, 0)
    assert found["overflow"].kind == "backward" and found["overflow"].value == "inf"
    assert all(map(math.isfinite, found["overflow"].losses))


def test_what_comes_first() -> None:
    """The ranks of a pipeline see things in another order than they arise."""
    from megastable.engine.nan_locator import _FirstBad

    watch = _FirstBad(blocks=4)
    seen = [
        (1, False, "blocks.0"), (0, True, "embedding"), (0, True, "blocks.2"), (0, True, "head"), (0, True, "loss"),
        (0, False, "final_norm"), (0, False, "blocks.1.mlp.down"), (0, False, "embedding"),
    ]  # fmt: skip
    fine, bad = torch.ones(3), torch.tensor([0.0, -math.inf, 1.0])
    for micro_batch, backward, layer in seen:
        watch.see(bad, micro_batch, backward, layer, "output")
        assert watch.first is not None and watch.first.layer == layer and watch.first.value == "inf"
    for micro_batch, backward, layer in seen:
        watch.see(bad, micro_batch, backward, layer, "output")
    watch.see(fine, 0, False, "embedding", "input")
    assert watch.first is not None and (watch.first.layer, watch.first.tick) == ("embedding", len(seen))
