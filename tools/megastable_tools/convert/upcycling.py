"""Make a run with routed experts of a dense checkpoint that computes what the checkpoint does: sparse upcycling.

Every expert begins as a copy of the dense MLP (Komatsuzaki et al., arXiv:2212.05055), or as a slice of it, with as many
slices as the MLP is wider than an expert (He et al., arXiv:2410.07524). Expert e has slice e modulo their number; the
slices of one copy have the same row of the router, so that a token's experts are whole copies. Their weights add up to
`scale`, of which each slice gets its share, and so the last matrices of experts are multiplied by slices / `scale`:
then the experts of a token add up to the dense MLP. Routers begin as in a new run, shared experts give 0 at first.

Experts of the same slice differ by what their tokens teach them; noise lets them differ from the beginning.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
import xxhash
from torch import Tensor

from megastable.base.errors import CheckpointError, ConfigError
from megastable.checkpoint import store
from megastable.checkpoint.new_run import origin_of, refuse_existing
from megastable.checkpoint.whole import Described, WholeState, describe_parameters, next_run_of
from megastable.config import recipe
from megastable.config.model import ModelConfig
from megastable.config.tree import RunConfig
from megastable.model.init import ParameterPart, fill_parts
from megastable.parallel.topology import TensorParallel
from megastable.run.directory import FREE
from megastable_tools.convert.derived_runs import Made, ledgers_of, write_run_of
from megastable_tools.convert.inspecting import field_differences

OF_EXPERTS = re.compile(r"(blocks\.\d+\.mlp)\.(?:router|(shared|experts\.(\d+))\.(gate_up|down))\.weight")


def make_upcycled_config(checkpoint: Path, overrides: Sequence[str]) -> RunConfig:
    """The recipe of a dense checkpoint's run with `overrides`, which set model.experts. Raises CheckpointError,
    ConfigError."""
    old_run = next_run_of(checkpoint)
    if old_run.model.experts is not None:
        raise CheckpointError(f"{checkpoint}: it has experts: only a dense model can be upcycled")
    recipe_tree = old_run.model_dump(mode="json")
    for assignment in overrides:
        recipe.override_key(recipe_tree, assignment)
    new_run = recipe.validate_tree(recipe_tree, f"{checkpoint}, upcycled")
    model, experts = new_run.model, new_run.model.experts
    if experts is None:
        raise ConfigError("model.experts is missing: say how many, such as model.experts.count=8")
    for key, own_value, other_value in field_differences(old_run.model.model_dump(), model.model_dump()):
        if not key.startswith("experts") and f"model.{key}" not in FREE:
            raise ConfigError(
                f"model.{key}={other_value}: the checkpoint has {own_value}: upcycling changes nothing but experts"
            )
    if not experts.normalize:
        raise ConfigError(
            "model.experts.normalize=false: then the weights of a token's experts add up to another number for every "
            "token, and no experts compute what the dense MLP does: leave it out"
        )
    if model.ffn_width % model.expert_width:
        raise ConfigError(
            f"model.experts.ffn={model.expert_width} does not divide the dense MLP's {model.ffn_width}: an expert is a "
            "copy of it or one of its equal slices"
        )
    slice_count = count_slices(model)
    for key, number in (("count", experts.count), ("top_k", experts.top_k)):
        if number % slice_count:
            raise ConfigError(
                f"model.experts.{key}={number} is no multiple of {slice_count}, the experts that are one dense MLP: "
                f"change it, or model.experts.ffn={model.expert_width}"
            )
    return new_run


def count_slices(model: ModelConfig) -> int:
    """Experts that make up the dense MLP."""
    return model.ffn_width // model.expert_width


def upcycle_checkpoint(
    checkpoint: Path,
    out: Path,
    run: RunConfig,
    noise: float = 0.0,
    *,
    watch: Callable[[int], None] = lambda _: None,
) -> Made:
    """Make the run `out` of a verified checkpoint, by the recipe of `make_upcycled_config`, with fresh moments, at the
    same step and position in the data. noise: standard deviation of what is added to the experts' weights, in units of
    the root mean square of each matrix; with 0 the new run computes what the checkpoint does.

    watch: as of `write_run`. Raises CheckpointError, ConfigError; then nothing is left of `out`.
    """
    refuse_existing(out)
    if noise < 0:
        raise ConfigError(f"--noise {noise:g}: it must be 0 or more")
    state = store.read_state(checkpoint)
    # Vitals and losses are those of the model before.
    state = state.model_copy(update={"vitals": None, "recent_losses": []})
    return write_run_of(
        out, run, state, _make_reader(WholeState(checkpoint), run, noise), ledgers_of(checkpoint), optimizer=None,
        origin=origin_of(checkpoint, how="upcycled", noise=noise), watch=watch,
    )  # fmt: skip


def _make_reader(dense: WholeState, run: RunConfig, noise: float) -> Callable[[str, str], Tensor]:
    """`whole(name, kind)` of the new run, for `write_run`. Memory: two tensors."""
    model, described = run.model, describe_parameters(run.model)

    def whole(name: str, kind: str) -> Tensor:
        name_match = OF_EXPERTS.fullmatch(name)
        if name_match is None:
            return dense.read_tensor(name, kind)
        mlp_name, expert_name, expert_number, linear = name_match.groups()
        if expert_name is None:
            return _draw_router(described[name], run)
        if expert_number is None and linear == "down":
            return torch.zeros(described[name].shape)
        of_dense = dense.read_tensor(f"{mlp_name}.{linear}.weight", kind)
        if expert_number is None:
            return _cut_mlp(of_dense, linear, 0, described[name].shape[0] // 2)
        first_channel = int(expert_number) % count_slices(model) * model.expert_width
        expert_matrix = _cut_mlp(of_dense, linear, first_channel, model.expert_width)
        if linear == "down":
            assert model.experts is not None
            expert_matrix = expert_matrix * (count_slices(model) / model.experts.scale)
        return _add_noise(expert_matrix, noise, f"{run.run.seed} {name}") if noise else expert_matrix

    return whole


def _draw_router(of: Described, run: RunConfig) -> Tensor:
    """As in a new run, but the same row for all slices of a copy."""
    router_rows, slice_count = torch.empty(of.shape), count_slices(run.model)
    router_part = ParameterPart(of.placement, of.shape, router_rows.view(-1))
    fill_parts([router_part], run.model, TensorParallel(), run.run.seed, threads=1)
    return router_rows[::slice_count].repeat_interleave(slice_count, 0)


def _cut_mlp(tensor: Tensor, linear: str, first: int, count: int) -> Tensor:
    """`count` of the dense MLP's inner channels from `first` on, of a matrix of it; after the last comes the first."""
    channel_count = tensor.shape[1] if linear == "down" else tensor.shape[0] // 2
    chosen_channels = torch.arange(first, first + count) % channel_count
    if linear == "down":
        return tensor[:, chosen_channels]
    return torch.cat([half[chosen_channels] for half in tensor.chunk(2)])  # gate, and up


def _add_noise(tensor: Tensor, noise: float, seed: str) -> Tensor:
    random_source = torch.Generator().manual_seed(xxhash.xxh3_64_intdigest(seed.encode()) >> 1)
    matrix_rms = float(tensor.square().mean().sqrt())
    return tensor + noise * matrix_rms * torch.randn(tensor.shape, generator=random_source)
