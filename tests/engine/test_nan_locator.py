"""Where the first non-finite number arose: planted in every layout, found by a replay that leaves no trace."""

from __future__ import annotations

import contextlib
import json
import math
import random
from collections.abc import Iterator
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from megastable.config.tree import RunConfig
from megastable.engine import locators
from megastable.engine.flatstate import KINDS
from megastable.engine.locators import TensorPlace, _FirstBad, find_first_growth
from megastable.engine.patches import replace_attribute
from megastable.model.cores import Core
from megastable.model.gpt import Block
from megastable.run.directory import as_json
from tests.conftest import tiny
from tests.distributed import run_ranks
from tests.engine.engines import are_same, build_engine, copy_state, take_batch
from tests.engine.test_gate import start_of
from tests.parallel.test_layouts import EXPERTS, batches, config

LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "tp2-sequence-selective": (2, {"parallel": {"tensor": 2, "sequence": True, "recompute": "selective"}}),
    "zero2-full": (2, {"parallel": {"zero": 2, "recompute": "full"}}),
    "zero3-full": (2, {"parallel": {"zero": 3, "recompute": "full"}}),
    "context2": (2, {"parallel": {"context": 2}}),
    "pp2-dp2-tied": (4, {"parallel": {"pipeline": 2}, "model": {"tied": True}}),
}
LAST = "blocks.1"  # the last of two; on the last stage


def note_all(engine: Any) -> tuple[dict[str, torch.Tensor], Any]:
    """All that a diagnosis must leave as it was."""
    ds, optimizer = engine.ds, engine.optimizer
    scaler = getattr(optimizer, "loss_scaler", None)
    hooks = [(m._forward_hooks, m._forward_pre_hooks, m._backward_hooks) for m in ds.module.modules()]
    rest = (
        random.getstate()[1], np.random.get_state()[1].tolist(),  # type: ignore[index]
        (ds.global_steps, ds.global_samples, ds.micro_steps, ds.skipped_steps),
        (ds.was_step_applied(), engine.applied, id(engine.measured)), dict(vars(scaler)) if scaler else {},
        [group["lr"] for group in optimizer.param_groups], [sum(map(len, of_one)) for of_one in hooks],
        [len(p._backward_hooks or {}) for p in ds.module.parameters()],
        id(getattr(ds.module, "loss", None) or ds.module.loss_fn),
    )  # fmt: skip
    # By bytes: NaN equals NaN.
    state = copy_state(engine) | {"random": torch.get_rng_state()}
    return {name: t.reshape(-1).view(torch.uint8) for name, t in state.items()}, rest


def spoil(stream: Any) -> Any:
    x, rest = (stream[0], stream[1:]) if isinstance(stream, tuple) else (stream, ())
    x = torch.where(torch.arange(x.numel()).view(x.shape) == 5, math.nan, x)
    return (x, *rest) if rest else x


class Bench:
    """An engine after two steps, and what may be planted into it."""

    def __init__(self, config: RunConfig) -> None:
        start = start_of(config)
        self.engine, self.topology = start.engine, start.engine.topology
        with start.make_whole_loader(start.order.source, config.train.global_batch) as loader:
            first, second, self.batch = (next(loader) for _ in range(3))
        for batch in (first, second):
            self.engine.train_step(batch.micro_batches, 1e-3, lambda m: m.finite)
            assert self.engine.applied

    def part(self, name: str, block: str = LAST) -> Any:
        """A part of a block, or the block itself; None on other stages."""
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

        return replace_attribute(block, "forward", forward)

    def gradient_of_attention(self) -> Any:
        """A gradient lost inside the attention, between its products."""
        attention = self.part("attention")
        if attention is None or self.topology.data_rank != 0:
            return contextlib.nullcontext()
        original = attention.core

        def core(*args: Any) -> torch.Tensor:
            y: torch.Tensor = original.run(*args)
            if y.requires_grad:
                y.register_hook(lambda g: torch.full_like(g, math.nan))
            return y

        return replace_attribute(attention, "core", Core(core, original.prepare))

    @contextlib.contextmanager
    def gradient_of_weight(self, value: float) -> Iterator[None]:
        down = self.part("mlp.down")
        hooked = down is not None and self.topology.data_rank == 0
        handle = down.weight.register_hook(lambda g: torch.full_like(g, value)) if hooked else None
        yield
        if handle is not None:
            handle.remove()

    @contextlib.contextmanager
    def poison(self, kind: str) -> Iterator[str]:
        """One NaN in a piece of the last rank's state; the name of its parameter, on that rank."""
        flat = self.engine.flat_state()
        fragment = flat.fragments[-1]
        if kind == "computing":
            parameters = self.engine.ds.module.parameters()
            parameter = next(p for p in parameters if p.placement.name == fragment.name)
            piece = getattr(parameter, "ds_tensor", parameter).data.view(-1)
        else:
            piece = flat.view_piece(fragment, kind)
        if self.topology.rank != self.topology.layout.world - 1:
            yield ""
            return
        old = piece[0].clone()
        piece[0] = math.nan
        yield fragment.name
        piece[0] = old

    def locate(self, planted: Any) -> dict[str, Any]:
        """The step with what is planted, refused; its diagnosis, and whether that has changed anything."""
        with planted as name:
            # A poisoned master shows only after an update: refused here by hand.
            measured, applied = self.engine.train_step(self.batch.micro_batches, 1e-3, lambda _: False)
            (state, rest), found = (
                note_all(self.engine),
                locators.locate_first_nonfinite(self.engine, self.batch.micro_batches),
            )
            state_after, rest_after = note_all(self.engine)
            poisoned = locators.find_nonfinite_state(self.engine)
        assert not applied and are_same(state, state_after) and rest == rest_after
        return {"found": found, "poisoned": poisoned, "name": name, "finite": measured.finite}


def locate_all(config: RunConfig) -> dict[str, Any]:
    bench = Bench(config)
    engine, micro_batches, layout = bench.engine, bench.batch.micro_batches, bench.topology.layout
    clean = engine.train_step(micro_batches, 1e-3, lambda _: False)[0]
    answers = {
        "forward": bench.locate(bench.forward_of_block(1, layout.data - 1)),
        "attention": bench.locate(bench.gradient_of_attention()),
        "weight gradient": bench.locate(bench.gradient_of_weight(math.nan)),
        "transient": bench.locate(bench.forward_of_block(0, 0, times=1)),
    }
    if config.parallel.zero < 3:
        # Every one a number, their sum is none (ZeRO 3 divides before it adds).
        answers["sum"] = bench.locate(bench.gradient_of_weight(3e38))
    answers |= {kind: bench.locate(bench.poison(kind)) for kind in (*KINDS, "computing")}
    again = engine.train_step(micro_batches, 1e-3, lambda m: m.finite)[0]
    unspoilt = torch.equal(clean.losses, again.losses) and clean.grad_norm == again.grad_norm
    positions = [m.positions.tolist() for m in micro_batches]
    return {
        "answers": answers,
        "unspoilt": unspoilt and again.finite,
        "layout": layout,
        "positions": positions,
    }


@pytest.mark.slow
@pytest.mark.parametrize("name", LAYOUTS)
def test_locate_finds_what_was_planted(name: str, corpus: Path, tmp_path: Path) -> None:
    world, parts = LAYOUTS[name]
    parts = {**parts, "model": dict(tiny(corpus, tmp_path).model) | parts.get("model", {})}
    ranks = run_ranks(world, locate_all, tiny(corpus, tmp_path / "run", **parts))
    layout, answers = ranks[0]["layout"], ranks[0]["answers"]
    data, stage = layout.data - 1, layout.pipeline - 1
    for rank in ranks:
        assert rank["unspoilt"]
        for case, answer in rank["answers"].items():
            # The same on all ranks, and fit for the journal.
            told = as_json(asdict(answer["found"]))
            assert told == as_json(asdict(answers[case]["found"]))
            assert json.loads(told)["sentence"] == answer["found"].sentence
            assert bool(answer["poisoned"]) == (case in (*KINDS, "computing"))
            assert answer["finite"] == (case in ("weight", "exp_avg", "exp_avg_sq"))
    found = {case: answer["found"] for case, answer in answers.items()}

    first, found_bad = found["forward"], layout.rank_at(stage, data, 0)
    assert (first.kind, first.layer, first.tensor, first.value) == ("forward", LAST, "output", "nan")
    place = (first.rank, first.stage, first.data_rank, first.tensor_rank, first.micro_batch)
    assert place == (found_bad, stage, data, 0, 1)
    assert list(first.positions) == ranks[found_bad]["positions"][1] and first.seen_by == (found_bad,)
    assert not all(map(math.isfinite, first.losses)) and first.reproduced

    for case, layer, tensor in (
        ("attention", f"{LAST}.attention.core", "input gradient"),
        ("weight gradient", f"{LAST}.mlp.down", "weight gradient"),
    ):
        first = found[case]
        assert (first.kind, first.layer, first.tensor) == ("backward", layer, tensor)
        assert (first.stage, first.data_rank, first.micro_batch) == (stage, 0, 0)
    first = found["attention"]
    assert len(first.seen_by) == layout.tensor * layout.context and all(map(math.isfinite, first.losses))

    first = found["transient"]
    assert first.kind == "not reproduced" and not first.reproduced and first.rank is None
    # One finite replay blames nobody.
    assert "is finite, with a loss of" in first.sentence and "hardware" not in first.sentence
    if "sum" in found:
        assert found["sum"].kind == "sum" and found["sum"].rank is None and found["sum"].reproduced

    kinds = {"weight": "fp32 master", "exp_avg": "first moment", "exp_avg_sq": "second moment"}
    for kind, title in (kinds | {"computing": "computing copy"}).items():
        first, parameter = found[kind], ranks[-1]["answers"][kind]["name"]
        line = f"{title} of {parameter} on rank {world - 1}"
        assert (first.kind, first.rank, first.micro_batch) == ("state", world - 1, None)
        assert f"{first.layer}.weight" == parameter and first.stage == stage
        assert first.parameters == (line,) and answers[kind]["poisoned"] == [line] and line in first.sentence


EXPERT = f"{LAST}.mlp.experts.3"


@contextlib.contextmanager
def spoilt_expert(bench: Bench, kind: str) -> Iterator[str]:
    """NaN in the gradient of an expert's weights, or in the weights."""
    weight_name = f"{EXPERT}.down.weight"
    if kind == "gradient":
        weight = bench.part("mlp.experts.3.down").weight
        handle = weight.register_hook(lambda g: torch.full_like(g, math.nan))
        yield weight_name
        handle.remove()
        return
    flat = bench.engine.flat_state()
    piece = flat.view_piece(next(f for f in flat.fragments if f.name == weight_name), "weight")
    assert piece is not None
    old = piece[0].clone()
    piece[0] = math.nan
    yield weight_name
    piece[0] = old


def locate_expert(config: RunConfig) -> list[Any]:
    bench = Bench(config)
    return [bench.locate(spoilt_expert(bench, kind))["found"] for kind in ("gradient", "weight")]


def test_locate_names_layer_and_expert(corpus: Path, tmp_path: Path) -> None:
    model = dict(tiny(corpus, tmp_path).model) | {"experts": {"count": 4, "top_k": 2, "ffn": 24}}
    ((gradient, weight),) = run_ranks(1, locate_expert, tiny(corpus, tmp_path / "run", model=model))
    assert (gradient.kind, gradient.layer, gradient.tensor) == (
        "backward",
        f"{EXPERT}.down",
        "weight gradient",
    )
    assert (weight.kind, weight.layer) == ("state", f"{EXPERT}.down") and EXPERT in weight.sentence


def test_see_keeps_what_comes_first() -> None:
    """The ranks of a pipeline see things in another order than they arise."""
    watch = _FirstBad(blocks=4)
    watch.see_tensor(torch.empty(0, 3), 1, True, "blocks.3.mlp.experts.0.down", "input")  # of no tokens
    seen = [
        (1, False, "blocks.0"), (0, True, "embedding"), (0, True, "blocks.2"), (0, True, "head"), (0, True, "loss"),
        (0, False, "final_norm"), (0, False, "blocks.1.mlp.down"), (0, False, "embedding"),
    ]  # fmt: skip
    fine, bad = torch.ones(3), torch.tensor([0.0, -math.inf, 1.0])
    for micro_batch, backward, layer in seen:
        watch.see_tensor(bad, micro_batch, backward, layer, "output")
        assert watch.first is not None and watch.first.layer == layer and watch.first.value == "inf"
    for micro_batch, backward, layer in seen:
        watch.see_tensor(bad, micro_batch, backward, layer, "output")
    watch.see_tensor(fine, 0, False, "embedding", "input")
    assert watch.first is not None and (watch.first.layer, watch.first.tick) == ("embedding", 1 + len(seen))


def test_an_expert_that_more_tokens_choose_has_not_grown() -> None:
    expert = f"{LAST}.mlp.experts.0.down"
    summed, other = (
        TensorPlace(True, depth, 1, layer, tensor)
        for depth, layer, tensor in ((-2, expert, "weight gradient"), (-1, "blocks.0", "output gradient"))
    )
    good = {summed: 1.0, other: 1.0}
    assert find_first_growth(good, {summed: 90.0, other: 1.0}) is None
    growth = find_first_growth(good, {summed: 90.0, other: 9.0})
    assert growth is not None and growth.first == growth.last == other
    given = summed._replace(tensor="input gradient")
    growth = find_first_growth(good | {given: 1.0}, {given: 8.0, other: 9.0})
    assert growth is not None and growth.first == given


def lose_numbers(real: Any, x: torch.Tensor) -> torch.Tensor:
    """A module's result, of no numbers, from its own forward function: what it depends on stays."""
    y: torch.Tensor = real(x) * math.nan
    return y


def spoil_expert() -> dict[str, Any]:
    """The diagnosis of a step in which the last rank's last expert gives NaN, and this rank's samples."""
    from megastable.parallel.sharding import placement_of

    engine = build_engine(config(expert=2, micro_batch=1, model=EXPERTS))
    batch = take_batch(engine, batches()[0])
    name, spoilt = f"{LAST}.mlp.experts.3.down", contextlib.ExitStack()
    for module in engine.ds.module.modules():
        weight = getattr(module, "weight", None)
        is_chosen = isinstance(weight, torch.Tensor) and placement_of(weight).name == f"{name}.weight"
        if is_chosen and engine.topology.data_rank == 3:
            spoilt.enter_context(replace_attribute(module, "forward", partial(lose_numbers, module.forward)))
    with spoilt:
        engine.train_step(batch, 1e-3, lambda m: m.finite)
        found = locators.locate_first_nonfinite(engine, batch)
    return {"found": found, "positions": batch[0].positions.tolist()}


@pytest.mark.slow
def test_an_expert_has_samples_of_all_ranks_that_send_it_tokens() -> None:
    ranks = run_ranks(4, spoil_expert)
    for rank in ranks:
        found = rank["found"]
        assert (found.kind, found.layer, found.rank) == ("forward", f"{LAST}.mlp.experts.3.down", 3)
        assert list(found.positions) == ranks[2]["positions"] + ranks[3]["positions"]
        assert len(found.losses) == 2 and not any(map(math.isfinite, found.losses))
