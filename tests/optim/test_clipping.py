"""In every precision: the optimizer gets what the formula of a clipping makes of the gradients that the gate saw.

Under every layout, with refusals and rewinds: tests/parallel/test_pairs.py.
"""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from megastable.config.tree import RunConfig
from megastable.optim.clipping import AdaGC, clip_factors, row_factors, scale_rows
from megastable.optim.pieces import Piece, WholeParameter
from megastable.parallel.sharding import Fragment, Placement, join_shards, placement_of
from tests.distributed import run_ranks
from tests.engine.engines import build_engine, take_batch
from tests.optim import rules
from tests.optim.trained import BATCH, batches, recipe
from tests.parallel.test_gradients import Pieces, joined_whole
from tests.parallel.test_layouts import relative, state_of

STEPS = 3


def plain_sgd(clipping: Any, clip: float = 1.0, **options: Any) -> RunConfig:
    """Its "exp_avg" is the gradient that the optimizer gets."""
    made = recipe({"name": "sgd", "momentum": 0.0, "clip": clip, "clipping": clipping}, **options)
    scale = made.precision.model_copy(update={"initial_scale_power": 8})  # no overflow in fp16
    return made.model_copy(update={"precision": scale})


def clip_rank(recipes: dict[str, RunConfig]) -> dict[str, Any]:
    """What one rank sees, by recipe: `_train_three`."""
    return {name: _train_three(c) for name, c in recipes.items()}


def _train_three(c: RunConfig) -> dict[str, Any]:
    """Three steps. In the last two, one worker's samples repeat a token, so that its gradient is far larger."""
    engine = build_engine(c)
    fragments = engine.flat_state().fragments
    seen: dict[str, list[Any]] = {key: [] for key in ("before", "after", "weight", "local", "norms", "kept")}
    names = {id(q): placement_of(q).name for q in engine.ds.module.parameters()}

    def pieces(take: Any) -> Pieces:
        return {(f.name, f.start): take(f).clone() for f in fragments}

    def judge(measured: Any) -> bool:
        found = engine.zero.view_gradients(fragments)
        scale = measured.loss_scale
        seen["before"].append(pieces(lambda f: found[f.group, f.offset].view(-1)[: f.numel] / scale))
        seen["weight"].append(pieces(lambda f: engine.flat_state().view_piece(f, "weight")))
        return True

    if c.optimizer.clipping.kind == "worker":
        average, o = engine.ds.buffered_allreduce_fallback, engine.optimizer

        def spied(*_: Any, **__: Any) -> None:
            groups = zip(o.bf16_groups, o.fp32_groups_gradients, strict=True)
            local = [(q, g) for qs, gs in groups for q, g in zip(qs, gs, strict=True)]
            seen["local"].append({names[id(q)]: g.clone().view(q.shape) for q, g in local})
            average()

        engine.ds.buffered_allreduce_fallback = spied
    for index, (tokens, labels, _) in enumerate(batches()[:STEPS]):
        if index:
            first = (
                torch.arange(BATCH)
                .view(-1, engine.topology.layout.samples, c.train.micro_batch)[:, 0]
                .flatten()
            )
            tokens[first], labels[first] = 3, 3
        micro_batches = take_batch(engine, (tokens, labels, None))
        measured, applied = engine.train_step(micro_batches, 1e-2, judge)
        assert applied
        seen["norms"].append(measured.grad_norm)
        seen["kept"].append(engine.kept)
        seen["after"].append(pieces(lambda f: engine.flat_state().view_piece(f, "exp_avg")))
    own = {"tensor": engine.topology.tensor_rank, "shapes": {f.name: f.shape for f in fragments}}
    return seen | state_of(engine) | own


def whole(ranks: list[dict[str, Any]], name: str, key: str) -> list[dict[str, Tensor]]:
    """Whole tensors of all ranks' pieces, by step."""
    of = [rank[name] for rank in ranks]
    return [joined_whole(of, [rank[key][step] for rank in of]) for step in range(STEPS)]


def workers(ranks: list[dict[str, Any]], name: str, context: int) -> list[list[dict[str, Tensor]]]:
    """Each worker's own gradient, the mean over its context ranks: by step and worker, whole tensors."""
    placements = {n: p for rank in ranks for n, p in rank[name]["placements"].items()}
    made = []
    for step in range(STEPS):
        shards: dict[int, dict[str, dict[int, Tensor]]] = {}
        for rank in (rank[name] for rank in ranks):
            _, data, tensor = rank["coordinates"]
            for parameter, g in rank["local"][step].items():
                held = shards.setdefault(data // context, {}).setdefault(parameter, {})
                held[tensor] = held.get(tensor, torch.zeros_like(g)) + g / context
        made.append([
            {n: join_shards([held[r] for r in sorted(held)], placements[n]) for n, held in shards[worker].items()}
            for worker in sorted(shards)
        ])  # fmt: skip
    return made


LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "bf16-tp2-dp2": (4, {"precision": "bf16", "tensor": 2}),
    "bf16-zero2-dp2": (2, {"precision": "bf16", "zero": 2}),
    "fp16-pp3": (3, {"precision": "fp16", "pipeline": 3, "model": {"layers": 3}}),
    "fp16-zero3-dp2": (2, {"precision": "fp16", "zero": 3}),
}
KINDS: dict[str, tuple[Any, Any]] = {
    "value": ({"kind": "value", "threshold": 0.003}, lambda: rules.Value(0.003)),
    "adagc": ({"kind": "adagc", "warmup": 1}, lambda: rules.AdaGC(1)),
    "zclip": ({"kind": "zclip", "warmup": 2}, lambda: rules.ZClip(2)),
    "agc": ("agc", lambda: rules.AGC(0.01, "head.weight")),
}


@pytest.mark.slow
@pytest.mark.parametrize("layout", LAYOUTS)
def test_clip_is_the_formula_in_every_precision(layout: str) -> None:
    world, options = LAYOUTS[layout]
    recipes = {name: plain_sgd(section, **options) for name, (section, _) in KINDS.items()}
    ranks = run_ranks(world, clip_rank, recipes)
    for name, (_, rule) in KINDS.items():
        clip = rule()
        before, after = whole(ranks, name, "before"), whole(ranks, name, "after")
        weights = whole(ranks, name, "weight")
        for step in range(STEPS):
            assert ranks[0][name]["norms"][step] == pytest.approx(rules.norm_of(before[step]), rel=1e-6)
            wanted = clip(before[step], weights[step])
            for parameter, g in wanted.items():
                assert relative(after[step][parameter], g) < 1e-5, f"{name}: {parameter} in step {step}"
            assert ranks[0][name]["kept"][step] == pytest.approx(clip.kept[step], abs=1e-4)
        assert name == "zclip" or min(clip.kept) < 0.95, f"{name} clipped nothing"
        assert all(rank[name]["norms"][0] == ranks[0]["value"]["norms"][0] for rank in ranks)


def test_steps_without_a_gradient_do_not_lower_what_a_tensor_is_clipped_to() -> None:
    """An expert that no token chose for a while learns as before when one does."""
    config = recipe({"clipping": {"kind": "adagc", "warmup": 2}}).optimizer
    clipping = AdaGC(config, {"w": WholeParameter(Placement("w"), (4,), 0)}, (0, 1), torch.device("cpu"))
    fragment = Fragment(
        name="w", dim=None, sections=(), shape=(4,), group=0, offset=0, start=0, numel=4, counted=True
    )
    kept = []
    for size in (0.5, 0.5, 0.5, *[0.0] * 200, 0.5, 5.0):
        piece = Piece(fragment, torch.ones(4), torch.full((4,), size / 2), {}, {})
        kept.append(clipping.clip_pieces([piece], size, 1.0))
    assert kept[:-1] == [1.0] * 204 and kept[-1] == pytest.approx(0.105)


WORKERS: dict[str, tuple[int, dict[str, Any]]] = {
    "dp3": (3, {}),
    "tp2-dp2": (4, {"tensor": 2}),
    "pp2-dp2": (4, {"pipeline": 2}),
    "context2-dp2": (4, {"context": 2}),
}


@pytest.mark.slow
@pytest.mark.parametrize("layout", WORKERS)
def test_clip_of_each_workers_gradient(layout: str) -> None:
    """Each data-parallel rank's own gradient is clipped, then averaged; the gate sees the average of unclipped ones."""
    world, options = WORKERS[layout]
    c = plain_sgd("worker", 5.0, precision="bf16", **options)
    never = plain_sgd("worker", 1e6, precision="bf16", **options)
    ranks = run_ranks(world, clip_rank, {"worker": c, "never": never})
    local = workers(ranks, "worker", c.parallel.context)
    before, after = whole(ranks, "worker", "before"), whole(ranks, "worker", "after")
    for step, gradients in enumerate(local):
        norms = [rules.norm_of(g) for g in gradients]
        scales = [min(1.0, 5.0 / (norm + 1e-6)) for norm in norms]
        assert (min(norms) < 5 < max(norms)) == (step > 0), norms
        for parameter in before[step]:
            mean = sum(g[parameter] for g in gradients) / len(gradients)
            assert relative(before[step][parameter], mean) < 1e-5, parameter
            wanted = sum(g[parameter] * s for g, s in zip(gradients, scales, strict=True)) / len(gradients)
            assert relative(after[step][parameter], wanted) < 1e-5, parameter
        kept = rules.norm_of(after[step]) / rules.norm_of(before[step])
        for rank in ranks:
            assert rank["worker"]["norms"][step] == pytest.approx(rules.norm_of(before[step]), rel=1e-6)
            assert rank["worker"]["kept"][step] == pytest.approx(kept, rel=1e-5)
    assert ranks[0]["never"]["kept"] == [1.0] * STEPS
    assert ranks[0]["never"]["norms"][:2] == ranks[0]["worker"]["norms"][:2]
    untouched = whole(ranks, "never", "before"), whole(ranks, "never", "after")
    for was, is_now in zip(*untouched, strict=True):
        assert all(was[parameter].equal(is_now[parameter]) for parameter in was)


@given(
    highest=st.lists(st.floats(-50, 5000, width=32), min_size=12, max_size=12),
    kv=st.sampled_from([1, 2, 3, 12]),
)
def test_every_head_is_scaled_by_its_own_factor(highest: list[float], kv: int) -> None:
    queries, keys = clip_factors(torch.tensor(highest), kv, 100.0)
    for head, logit in enumerate(highest):
        product = float(queries[head] * keys[head // (12 // kv)])
        assert product == pytest.approx(100 / logit if logit > 100 else 1.0, rel=1e-5)
    assert float(keys.max()) <= 1
    if max(highest) <= 100:
        assert (queries == 1).all() and (keys == 1).all()  # nothing is rounded


@pytest.mark.parametrize("number", [math.inf, -math.inf, math.nan])
def test_what_is_not_finite_is_left_alone(number: float) -> None:
    queries, keys = clip_factors(torch.tensor([number, 1.0]), 1, 100.0)
    assert queries.tolist() == [1.0, 1.0] and keys.tolist() == [1.0]


def test_rows_of_a_tensor_rank() -> None:
    queries, keys = torch.tensor([1.0, 2.0, 3.0, 4.0]), torch.tensor([5.0, 6.0])
    assert row_factors(queries, keys, 2, 2, 1).tolist() == [3, 3, 4, 4, 6, 6, 1, 1]


@given(width=st.integers(1, 4), cut=st.tuples(st.integers(0, 20), st.integers(0, 20)))
def test_pieces_that_cut_rows(width: int, cut: tuple[int, int]) -> None:
    factors = torch.tensor([2.0, 3.0, 5.0, 7.0, 11.0])
    wanted = factors.repeat_interleave(width)
    begin, end = sorted(min(n, len(wanted)) for n in cut)
    if begin == end:
        return
    fragment = Fragment(
        name="qkv", dim=0, sections=(5,), shape=(5, width) if width > 1 else (5,), group=0, offset=0, start=begin,
        numel=end - begin, counted=True,
    )  # fmt: skip
    piece = torch.ones(end - begin)
    scale_rows(piece, fragment, factors)
    assert torch.equal(piece, wanted[begin:end])
