"""Experts made of a dense MLP compute what it does, whatever the router chooses; and what cannot is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from megastable.base.errors import CheckpointError, ConfigError
from megastable.checkpoint import store
from megastable.checkpoint.plain import load_plain
from megastable.checkpoint.whole import WholeState
from megastable.config import recipe
from megastable_tools.convert.inspecting import show_checkpoint
from megastable_tools.convert.upcycling import make_upcycled_config, upcycle_checkpoint
from tests.checkpoint.states import make_run, numbers, recipe_of
from tests.conftest import tiny
from tests.distributed import run_ranks, train

MODEL = {"ffn": 64, "vocab_size": 50}
TOKENS = torch.randint(50, (2, 12), generator=torch.Generator().manual_seed(0))


@pytest.fixture(scope="module")
def dense(tmp_path_factory: pytest.TempPathFactory) -> Path:
    small = {name: tensor * 0.2 for name, tensor in numbers(recipe_of(**MODEL)).items()}
    return make_run(tmp_path_factory.mktemp("dense") / "run", model=MODEL, change=small)


def give(**keys: Any) -> list[str]:
    return [f"model.experts.{key}={value}" for key, value in keys.items()]


@pytest.mark.parametrize(
    "keys",
    [
        {"count": 4, "top_k": 2},
        {"count": 4, "top_k": 2, "gate": "sigmoid", "scale": 2.5},
        {"count": 8, "top_k": 4, "ffn": 16, "shared": 3, "first_dense": 1},
        {"count": 8, "top_k": 8, "ffn": 8, "gate": "sigmoid"},
    ],
)
def test_upcycled_experts_compute_what_the_dense_mlp_does(
    dense: Path, tmp_path: Path, keys: dict[str, Any]
) -> None:
    run = make_upcycled_config(dense, give(**keys))
    made = upcycle_checkpoint(dense, tmp_path / "moe", run)
    before, after = load_plain(dense), load_plain(made.checkpoint)
    assert after.config.experts is not None and after.config.experts.count == keys["count"]
    expected = before(TOKENS).detach()
    assert float((after(TOKENS).detach() - expected).abs().max()) < 1e-6 * max(
        1.0, float(expected.abs().max())
    )
    assert float(expected.std()) > 0.01
    shown = dict(show_checkpoint(tmp_path / "moe").sheet.facts)["model"]
    assert (
        f"{keys['count']} experts of width {run.model.expert_width}, {keys['top_k']} of them for a token"
        in shown
    )
    assert ("3 shared, the first 1 layer without" in shown) == ("shared" in keys)
    old, new = store.read_state(dense), store.read_state(made.checkpoint)
    assert (new.step, new.cursor, new.tokens, new.adam_step) == (old.step, old.cursor, old.tokens, 0)
    held, source = WholeState(made.checkpoint), WholeState(dense)
    for name in set(held.names) & set(source.names):  # all but the MLPs that became experts
        assert torch.equal(held.read_tensor(name, "weight"), source.read_tensor(name, "weight"))
    slices = run.model.ffn_width // run.model.expert_width
    router = held.read_tensor("blocks.1.mlp.router.weight", "weight").view(-1, slices, run.model.hidden)
    assert (router == router[:, :1]).all()  # whole copies are chosen
    assert len(router.unique(dim=0)) == len(router)


def test_noise_lets_experts_differ(dense: Path, tmp_path: Path) -> None:
    run = make_upcycled_config(dense, give(count=2, top_k=2))
    made = upcycle_checkpoint(dense, tmp_path / "moe", run, noise=0.01)
    held, source = WholeState(made.checkpoint), WholeState(dense)
    one, other = (held.read_tensor(f"blocks.0.mlp.experts.{n}.down.weight", "weight") for n in range(2))
    of_dense = source.read_tensor("blocks.0.mlp.down.weight", "weight")
    for expert in (one, other):
        assert float((expert - of_dense).std() / of_dense.square().mean().sqrt()) == pytest.approx(
            0.01, rel=0.1
        )
    assert not torch.equal(one, other)


@pytest.mark.parametrize(
    ("overrides", "named"),
    [
        ([], "model.experts is missing: say how many"),
        (give(count=4, ffn=12), "model.experts.ffn=12 does not divide the dense MLP's"),
        (give(count=5, top_k=2, ffn=32), "model.experts.count=5 is no multiple of 2"),
        (give(count=4, top_k=3, ffn=32), "model.experts.top_k=3 is no multiple of 2"),
        (give(count=4, normalize=False), "model.experts.normalize=false: .*add up to another number"),
        ([*give(count=4), "model.layers=5"], "model.layers=5: the checkpoint has"),
    ],
)
def test_make_upcycled_config_refuses(dense: Path, overrides: list[str], named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        make_upcycled_config(dense, overrides)


def test_a_run_with_experts_is_not_upcycled(dense: Path, tmp_path: Path) -> None:
    made = upcycle_checkpoint(dense, tmp_path / "moe", make_upcycled_config(dense, give(count=2)))
    with pytest.raises(CheckpointError, match="it has experts: only a dense model can be upcycled"):
        make_upcycled_config(made.checkpoint, give(count=4))


@pytest.mark.slow
def test_an_upcycled_run_goes_on_with_the_dense_ones_loss(corpus: Path, tmp_path: Path) -> None:
    short = {"train": {"steps": 3}, "checkpoint": {"interval": 2}, "precision": {"kind": "fp32"}}
    config = tiny(corpus, tmp_path / "dense", model={"ffn": 64, "z_loss": 0.0}, **short)
    assert run_ranks(1, train, config) == [0]
    parent = tmp_path / "dense/checkpoints/step-2"
    run = make_upcycled_config(parent, give(count=4, top_k=4, ffn=32, shared=1))
    upcycle_checkpoint(parent, tmp_path / "moe", run)
    assert run_ranks(1, train, recipe.load_recipe(tmp_path / "moe/recipe.yaml")) == [0]
    first, then = (
        store.read_state(tmp_path / name / "checkpoints/step-3").recent_losses for name in ("dense", "moe")
    )
    assert then == [pytest.approx(first[2], abs=1e-6)]
