"""When the norm of a tensor moves as no update moves it."""

from __future__ import annotations

import math

import numpy as np
import pytest

from megastable_guard.damage import FASTER, KNOWN_PACES, TensorJump, TensorLook, TensorNorms, TensorPaces

BETA2, EVERY = 0.95, 25


def looked_at(looks: int, seed: int = 0) -> tuple[TensorPaces, dict[str, TensorNorms]]:
    """A healthy run: tensors grow at their own paces, second moments scatter and fall. No look is a jump."""
    random, paces = np.random.default_rng(seed), TensorPaces()
    for look in range(looks):
        norms = {
            f"blocks.{i}.weight": TensorNorms(
                5 + (1 + i) * (1 - math.exp(-look / 10)) * random.uniform(0.9, 1.1),
                math.exp(-0.02 * look + random.normal(0, 0.2)),
            )
            for i in range(4)
        }
        assert paces.judge(TensorLook(EVERY * look, 0.1 * look, EVERY * look, norms), BETA2) is None
    return paces, norms


def judge(
    paces: TensorPaces,
    looks: int,
    norms: dict[str, TensorNorms],
    updates: int = EVERY,
    beta2: float | None = BETA2,
) -> TensorJump | None:
    return paces.judge(TensorLook(EVERY * looks, 0.1 * looks, EVERY * (looks - 1) + updates, norms), beta2)


@pytest.mark.parametrize("seed", range(5))
def test_a_healthy_run_has_no_jump(seed: int) -> None:
    looked_at(200, seed=seed)


@pytest.mark.parametrize("factor", [0.0, 0.5, 3.0, math.inf, math.nan])
def test_weights_that_jump_are_named_until_that_is_dealt_with(factor: float) -> None:
    paces, norms = looked_at(20)
    name = "blocks.2.weight"
    spoilt = norms | {name: norms[name]._replace(weight=factor * norms[name].weight)}
    for _ in range(2):
        jump = judge(paces, 20, spoilt)
        assert jump is not None and (jump.tensor, jump.kind, jump.before, jump.step) == (
            name,
            "weight",
            475,
            500,
        )
        assert f"weights of {name}" in jump.reason and f"{FASTER:g} times as fast" in jump.reason
    assert not jump.is_repeated(norms)
    if math.isfinite(factor):
        assert jump.is_repeated(spoilt)
    paces.accept(TensorLook(500, 2.0, 500, norms))
    assert judge(paces, 21, norms) is None


def test_second_moments_forget_no_faster_than_they_can() -> None:
    paces, norms = looked_at(20)
    name = "blocks.1.weight"
    was = norms[name].second_moment
    assert was is not None
    slow = norms | {name: norms[name]._replace(second_moment=was * BETA2**EVERY)}
    assert judge(paces, 20, slow) is None
    paces, norms = looked_at(20)
    shrunk = norms | {name: norms[name]._replace(second_moment=0.01 * was)}
    assert judge(paces, 20, shrunk, updates=EVERY * 10) is None  # so many updates may have forgotten that
    paces, norms = looked_at(20)
    jump = judge(paces, 20, norms | {name: norms[name]._replace(second_moment=0.01 * was)}, updates=5)
    assert jump is not None and jump.kind == "second_moment" and "faster than they can forget" in jump.reason
    grown = norms | {name: norms[name]._replace(second_moment=1e6 * was)}
    assert judge(looked_at(20)[0], 20, grown) is None  # one gradient can do that
    assert judge(looked_at(20)[0], 20, shrunk, updates=5, beta2=None) is None


def test_nothing_is_judged_before_a_pace_is_known_nor_without_updates() -> None:
    for looks, seen in ((KNOWN_PACES, False), (KNOWN_PACES + 1, True)):
        paces, norms = looked_at(looks)
        spoilt = {name: n._replace(weight=10 * n.weight) for name, n in norms.items()}
        assert (judge(paces, looks, spoilt) is not None) == seen
    paces, norms = looked_at(20)
    spoilt = {name: n._replace(weight=10 * n.weight) for name, n in norms.items()}
    assert paces.judge(TensorLook(500, 1.9, EVERY * 19, spoilt), BETA2) is None


def test_after_a_rewind_the_next_look_begins_again() -> None:
    paces, norms = looked_at(20)
    paces.rewind(450)
    spoilt = {name: n._replace(weight=10 * n.weight) for name, n in norms.items()}
    assert judge(paces, 20, spoilt) is None
    paces.rewind(500)
    assert (
        judge(paces, 21, {name: n._replace(weight=20 * n.weight) for name, n in spoilt.items()}) is not None
    )


@pytest.mark.parametrize("looks", [1, 2, 20])
def test_paces_that_are_stored_judge_as_before(looks: int) -> None:
    paces, norms = looked_at(20)
    norms |= {"embedding.weight": TensorNorms(math.nan, None)}
    paces.accept(TensorLook(500, 2.0, 500, norms))
    paces = paces if looks == 20 else looked_at(looks)[0]
    again = TensorPaces.model_validate_json(paces.model_dump_json())
    assert again.model_dump_json() == paces.model_dump_json()
    spoilt = {name: n._replace(weight=10 * n.weight) for name, n in norms.items()}
    for step in range(21, 30):
        assert repr(judge(again, step, spoilt)) == repr(judge(paces, step, spoilt))
