"""Lasting changes of how a run trains do what a recipe with them does, bit for bit, and are taken back."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from megastable.config.tree import RunConfig
from megastable.engine import adjustments, expert_routing
from megastable.engine.adjustments import CLIP, LEAST_Z_LOSS, lower_beta2
from megastable.model.block_parts import gated
from megastable.model.experts import Router
from megastable.optim.schedule import scheduled_rate
from megastable.parallel.sharding import placement_of
from megastable_guard.policy import ADJUSTED
from tests.distributed import run_ranks
from tests.engine.engines import are_same, build_engine, copy_state, take_batch
from tests.optim import trained

LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "one": (1, {}),
    "ZeRO 2": (2, {"zero": 2, "precision": "bf16"}),
    "ZeRO 3": (2, {"zero": 3, "precision": "bf16"}),
    "TP 2": (2, {"tensor": 2, "precision": "bf16"}),
    "PP 2": (2, {"pipeline": 2, "precision": "bf16"}),
    "fp16": (1, {"precision": "fp16"}),
}
OF_ROUTERS = (
    "past_routing",
    "hold_router",
    "router_z_loss",
    "balance_loss",
    "no_balance_loss",
    "router_rate",
)
ALL = " ".join(name for name in ADJUSTED if name not in OF_ROUTERS)
UNFOLLOWED = ("qk_clip", "swiglu_clamp")
# What the recipe says in place of each adjustment.
KEYS = {
    "clip": ("optimizer", "clip", 0.5 * CLIP), "z_loss": ("model", "z_loss", LEAST_Z_LOSS),
    "beta2": ("optimizer", "betas", [0.9, lower_beta2(0.99)]), "qk_clip": ("optimizer", "qk_clip", 0.5),
    "swiglu_clamp": ("model", "swiglu_clamp", 0.1),
}  # fmt: skip


def make_adjustments_matter() -> None:
    adjustments.QK_CLIP, adjustments.CLAMPED = 0.5, partial(gated, gelu=False, clamp=0.1)


def train_adjusted(given: dict[str, Any], names: list[str], by_recipe: bool) -> list[Any]:
    """Four steps with changes of the recipe, or with adjustments that are switched, and two without them: a recipe's
    are taken back as far as an engine follows one."""
    make_adjustments_matter()
    tree = trained.recipe({}, **given).model_dump(exclude_unset=True)
    tree["optimizer"] = {**tree.get("optimizer", {}), "clip": 0.5, "betas": [0.9, 0.99]}
    tree["model"] = {**tree["model"], "z_loss": 0.0, "qk_norm": False}
    plain = RunConfig.model_validate(tree)
    for section, key, value in [KEYS[name] for name in names if by_recipe]:
        tree[section][key] = value
    c = RunConfig.model_validate(tree)
    engine = build_engine(c)
    taken = set(UNFOLLOWED).intersection(names if by_recipe else ())
    assert engine.adjustments.possible == {"reset_moments", *ALL.split()} - taken
    tokens, numbers = trained.BATCH * c.model.sequence_length, []
    for step, batch in enumerate(trained.batches()[:6]):
        if not by_recipe:
            engine.adjustments.switch_to(names if step < 4 else [])
        elif step == 4:
            engine.follow_config(plain)
        rate = scheduled_rate(c, step, step * tokens, tokens)
        measured, _ = engine.train_step(take_batch(engine, batch), rate, lambda m: m.finite)
        numbers.append((measured.loss, measured.grad_norm, engine.kept))
    return numbers


@pytest.mark.parametrize(
    ("layout", "names"),
    [*((layout, ALL) for layout in LAYOUTS), *(("one", name) for name in ("clip beta2 z_loss", *UNFOLLOWED))],
)
@pytest.mark.quick(f"one-{ALL}")
def test_switch_is_a_run_of_another_recipe(layout: str, names: str) -> None:
    world, given = LAYOUTS[layout]
    recipe, switched, plain = (
        run_ranks(world, train_adjusted, given, wanted.split(), by_recipe)
        for wanted, by_recipe in ((names, True), (names, False), ("", False))
    )
    for there, here, without in zip(recipe, switched, plain, strict=True):
        assert here[:4] == there[:4] != without[:4]
        assert (here[4:] == there[4:]) == set(UNFOLLOWED).isdisjoint(names.split())  # taken back
        as_before = [min(1, 0.5 / norm) for _, norm, _ in here[4:]]
        assert [kept for _, _, kept in here[4:]] == pytest.approx(as_before, rel=1e-5)


EXPERTS = {"count": 4, "top_k": 2, "ffn": 24, "balance_loss": 0.003, "router_z_loss": 0.02}


def train_routers(experts: dict[str, Any], names: list[str]) -> tuple[list[Any], dict[str, torch.Tensor]]:
    """Two steps with adjustments of routers, and the weights after the first one."""
    engine = build_engine(trained.recipe({}, model={"experts": experts}))
    engine.adjustments.switch_to(names)
    impossible = set() if experts["balance_loss"] else {"no_balance_loss"}
    assert engine.adjustments.possible & set(OF_ROUTERS) == set(OF_ROUTERS) - impossible
    numbers, weights = [], {}
    for batch in trained.batches()[:2]:
        measured, _ = engine.train_step(take_batch(engine, batch), 1e-3, lambda m: m.finite)
        numbers.append((measured.loss, measured.grad_norm))
        weights = weights or trained.copied(engine.flat_state().gather_shards("weight"))
    return numbers, weights


def test_larger_losses_of_routers_are_those_of_another_recipe() -> None:
    larger = EXPERTS | {"balance_loss": 0.03, "router_z_loss": 0.2}
    ((switched, _),) = run_ranks(1, train_routers, EXPERTS, ["router_z_loss", "balance_loss"])
    ((by_recipe, _),) = run_ranks(1, train_routers, larger, [])
    ((without, _),) = run_ranks(1, train_routers, EXPERTS, [])
    assert switched == by_recipe != without
    ((unbalanced, _),) = run_ranks(1, train_routers, EXPERTS, ["no_balance_loss"])
    ((by_recipe, _),) = run_ranks(1, train_routers, EXPERTS | {"balance_loss": 0.0}, [])
    assert unbalanced == by_recipe != without


def reset_biases() -> list[tuple[float, float]]:
    """The largest bias and the loss of a step, without and after a reset."""
    found = list[tuple[float, float]]()
    for resets in (False, True):
        engine = build_engine(trained.recipe({}, model={"experts": EXPERTS}))
        assert engine.routing is not None and "reset_bias" in engine.adjustments.possible
        first, second = (take_batch(engine, batch) for batch in trained.batches()[:2])
        engine.train_step(first, 1e-3, lambda m: m.finite)
        engine.routing.bias[:, 1] += 5.0
        if resets:
            engine.reset_bias()
        measured, _ = engine.train_step(second, 1e-3, lambda m: m.finite)
        found.append((float(engine.routing.bias.abs().max()), measured.loss))
    return found


def test_reset_biases_begin_again_at_zero() -> None:
    (((moved, loss), (reset, other_loss)),) = run_ranks(1, reset_biases)
    assert moved > 4 and reset == pytest.approx(1e-3) and loss != other_loss


def test_routers_learn_at_three_tenths_of_the_rate_and_nothing_else_does() -> None:
    ((_, slower),) = run_ranks(1, train_routers, EXPERTS, ["router_rate"])
    ((_, usual),) = run_ranks(1, train_routers, EXPERTS, [])
    for name, weight in usual.items():
        assert torch.equal(weight, slower[name]) != name.endswith(".router.weight"), name


def grow_routers(engine: Any, factor: float) -> None:
    """Something else than an update makes them larger."""
    flat = engine.flat_state()
    for f in flat.fragments:
        if f.name.endswith(".router.weight"):
            flat.view_piece(f, "weight").mul_(factor)
    engine.refresh_weights()


def find_norms(weights: dict[str, torch.Tensor]) -> dict[str, float]:
    """Of the routers' weights."""
    return {name: float(w.double().norm()) for name, w in weights.items() if name.endswith(".router.weight")}


def train_held(given: dict[str, Any]) -> dict[str, Any]:
    """Steps in which something else makes routers larger, with their norms held from the second on; the last ones again
    on another engine; then without. What is wrong with them, by name, and the caps."""
    # A buffer for every parameter, of which ZeRO 3 updates one after the other.
    parts = {"sub_group_size": 1} if given.get("zero") == 3 else {}
    engine = build_engine(trained.recipe({}, model={"experts": EXPERTS}, **given), **parts)
    first, *others = (take_batch(engine, batch) for batch in trained.batches()[:5])

    def train_step(
        micro_batches: list[Any], to: Any = engine, factor: float = 1.2
    ) -> dict[str, torch.Tensor]:
        """The weights after it."""
        grow_routers(to, factor)
        to.train_step(micro_batches, 1e-2, lambda m: m.finite)
        return trained.copied(to.flat_state().gather_shards("weight"))

    caps = find_norms(train_step(first))
    start, begin_counters = trained.copied(engine.optimizer_state()), engine.read_counters()
    free = train_step(others[0])
    engine.restore_optimizer_state(start)
    engine.restore_counters(begin_counters)
    engine.refresh_weights()
    engine.adjustments.switch_to(["hold_router"])
    held = train_step(others[0])
    # The same update, after which routers alone are scaled, here and in compute precision.
    right = all(free[name].norm() > 1.1 * caps[name] for name in caps)
    for name, weight in free.items():
        factor = caps[name] / float(weight.double().norm()) if name in caps else 1.0
        right &= torch.allclose(held[name], weight * factor, rtol=1e-6, atol=0)
        right &= name in caps or torch.equal(held[name], weight)
    gathered = copy_state(engine)
    engine.refresh_weights()
    right &= are_same(gathered, copy_state(engine))
    # What is smaller stays so, to the bit: the norm is a limit.
    smaller = find_norms(train_step(others[1], factor=0.5))
    middle, counters = trained.copied(engine.optimizer_state()), engine.read_counters()
    ends = [train_step(others[2], factor=3.0), train_step(others[3])]
    other = build_engine(engine.config, **parts)
    if given.get("zero") != 3:  # in either order, as a start from a checkpoint or from memory has it
        other.adjustments.switch_to(["hold_router"])
    other.restore_shared_state(
        {n.removeprefix("shared/"): t for n, t in middle.items() if n.startswith("shared/")}
    )
    other.adjustments.switch_to(["hold_router"])
    other.restore_optimizer_state(middle)
    other.restore_counters(counters)
    other.refresh_weights()
    again = [train_step(others[2], other, 3.0), train_step(others[3], other)]
    resumed = all(are_same(*pair) for pair in zip(ends, again, strict=True))
    resumed &= are_same(copy_state(engine), copy_state(other))
    # A state of before is held at its own norms, and one that was held is not held for good.
    engine.restore_optimizer_state(start)
    measured = [float(cap) for cap in engine.routing.caps]
    engine.adjustments.switch_to([])
    engine.restore_optimizer_state(middle)
    engine.refresh_weights()
    return {
        "caps": caps, "measured": measured, "right": right, "smaller": smaller, "resumed": resumed,
        "ends": [find_norms(end) for end in ends], "freed": find_norms(train_step(others[3], factor=3.0)),
        "shared": sorted(engine.shared_state),
        "routers": {name: weight for name, weight in ends[-1].items() if name in caps},
    }  # fmt: skip


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.quick("ZeRO 2")
def test_held_routers_grow_no_larger_whatever_makes_them_grow(layout: str) -> None:
    world, given = LAYOUTS[layout]
    ranks = run_ranks(world, train_held, given)
    for rank in ranks:
        blocks = [f"blocks.{layer}.mlp.router.weight" for layer in range(2)]
        assert [rank["measured"][blocks.index(name)] for name in rank["caps"]] == pytest.approx(
            [*rank["caps"].values()]
        )
        assert rank["caps"] and rank["right"] and rank["resumed"] and "experts/caps" not in rank["shared"]
        for name, cap in rank["caps"].items():
            assert rank["smaller"][name] < 0.7 * cap and rank["freed"][name] > 1.1 * cap
            assert [end[name] for end in rank["ends"]] == pytest.approx([cap, cap], rel=1e-6)
    if layout != "PP 2":
        assert all(are_same(rank["routers"], ranks[0]["routers"]) for rank in ranks)


def train_by_past(given: dict[str, Any], by_hand: bool) -> dict[str, Any]:
    """Ten steps; after the first one older routers choose for six updates, by two to four updates: the engine's, or, by
    hand, those of the weights that were kept for it."""
    expert_routing.PAST_LENGTH, expert_routing.PAST_AGE = 6, 2
    engine = build_engine(trained.recipe({}, model={"experts": EXPERTS}, **given))
    kept, dtype = list[dict[str, torch.Tensor]](), next(engine.ds.module.parameters()).dtype
    # The kept weights that choose in every step, None: the present ones.
    choosing = [None, 0, 0, 0, 0, 2, 2, None, None, None]

    def compute_past_logits(self: Router, x: torch.Tensor) -> torch.Tensor | None:
        if not self.training or (of := choosing[len(kept) - 1]) is None:
            return None
        with torch.no_grad():
            return F.linear(x.float(), kept[1 + of][placement_of(self.weight).name].to(dtype).float())

    if by_hand:
        Router.compute_past_logits = compute_past_logits  # type: ignore[method-assign]
    kept.append({})  # before the first step
    numbers, right = [], True

    def train_step(to: Any, number: int) -> tuple[Any, ...]:
        batch = take_batch(to, trained.batches()[number])
        evaluated = to.evaluate_samples(batch).tolist()
        measured, _ = to.train_step(batch, 3e-2, lambda m: m.finite)
        return evaluated, measured.loss, measured.grad_norm, measured.choices.tolist()

    for number in range(10):
        if number == 1 and not by_hand:
            engine.choose_by_past()
        if number == 4:
            middle, counters = trained.copied(engine.optimizer_state()), engine.read_counters()
            engine.train_step(take_batch(engine, trained.batches()[9]), 3e-2, lambda _: False)
            right &= are_same(middle, engine.optimizer_state())
        numbers.append(train_step(engine, number))
        if by_hand:
            kept.append(trained.copied(engine.flat_state().gather_shards("weight")))
    if not by_hand:
        other = build_engine(engine.config)
        other.restore_optimizer_state(middle)
        other.restore_counters(counters)
        other.refresh_weights()
        right &= [train_step(other, number) for number in range(4, 10)] == numbers[4:]
        right &= are_same(copy_state(engine), copy_state(other))
        engine.restore_optimizer_state(middle)
        right &= "experts/past" in engine.shared_state
    return {"numbers": numbers, "right": right}


def train_by_past_twice(given: dict[str, Any]) -> list[dict[str, Any]]:
    return [train_by_past(given, by_hand) for by_hand in (False, True)]


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.quick("ZeRO 2")
def test_older_routers_choose_for_some_updates(layout: str) -> None:
    world, given = LAYOUTS[layout]
    for by_engine, by_hand in run_ranks(world, train_by_past_twice, given):
        assert by_engine["numbers"] == by_hand["numbers"] and by_engine["right"]


def train_following(given: dict[str, Any], live: bool) -> tuple[list[Any], dict[str, torch.Tensor]]:
    """Six steps with settings of a recipe, or of one that the engine follows from the third on."""
    tree = trained.recipe({}, **given).model_dump(exclude_unset=True)

    def settings(z_loss: float, **optimizer: Any) -> RunConfig:
        changed = {"optimizer": tree["optimizer"] | optimizer, "model": tree["model"] | {"z_loss": z_loss}}
        return RunConfig.model_validate(tree | changed)

    old = settings(0.0, clip=0.0, betas=[0.9, 0.95], weight_decay=0.1)
    new = settings(1e-2, clip=0.2, betas=[0.8, 0.99], weight_decay=0.5)
    engine, numbers = build_engine(old if live else new), []
    engine.follow_config(old)
    for step, batch in enumerate(trained.batches()[:6]):
        if step == 2:
            engine.follow_config(new)
        measured, _ = engine.train_step(take_batch(engine, batch), 1e-3, lambda m: m.finite)
        numbers.append((measured.loss, measured.grad_norm, engine.kept))
    return numbers, trained.copied(engine.optimizer_state())


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.quick("one")
def test_follow_trains_as_if_built_with_the_settings(layout: str) -> None:
    """Clipping that begins, other moments, decay and z-loss: the same bits, whichever of both it was built with."""
    world, given = LAYOUTS[layout]
    live, built = (run_ranks(world, train_following, given, live) for live in (True, False))
    for (numbers, state), (other_numbers, other_state) in zip(live, built, strict=True):
        assert numbers == other_numbers and are_same(state, other_state)
        assert [kept < 1 for _, _, kept in numbers] == [False] * 2 + [True] * 4


def reset_moments() -> tuple[bool, float]:
    """Whether weights are kept and all else is zero; the largest change by the next update, at a rate of 1e-3."""
    engine = build_engine(trained.recipe({}))
    *first, last = (take_batch(engine, batch) for batch in trained.batches()[:4])
    for batch in first:
        engine.train_step(batch, 1e-3, lambda m: m.finite)
    before = {name: t.clone() for name, t in engine.optimizer_state().items()}
    engine.reset_moments()
    after = engine.optimizer_state()
    right = all(torch.equal(t, before[n]) if n.endswith("/weight") else not t.any() for n, t in after.items())
    engine.train_step(last, 1e-3, lambda m: m.finite)
    moved = [
        float((t - before[n]).abs().max())
        for n, t in engine.optimizer_state().items()
        if n.endswith("/weight")
    ]
    return right, max(moved)


def test_reset_moments_begins_again_with_the_bias_correction() -> None:
    """The first update is one of the full rate in every element, as at the start of a run, and no larger."""
    ((right, moved),) = run_ranks(1, reset_moments)
    assert right and 0 < moved < 1.2e-3
