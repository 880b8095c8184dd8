"""Initial weights: a function of seed and name, the same whole tensors under every layout."""

from __future__ import annotations

import math
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from megastable.config.model import ModelConfig
from megastable.model import init
from megastable.model.gpt import GPT, layers
from megastable.model.init import ParameterPart, fill, initialise, threads_to_draw, whole_weight
from megastable.parallel.sharding import Placement, placement_of, shard, unshard
from megastable.parallel.topology import TensorParallel
from tests.patience import PATIENCE
from tests.tiers import examples


def config(**changes: Any) -> ModelConfig:
    fields: dict[str, Any] = dict(
        layers=3, hidden=64, heads=8, kv_heads=4, ffn=96, vocab_size=250, vocab_multiple=64, init_std=0.02
    )
    return ModelConfig(**fields | changes)


def weights(
    c: ModelConfig, tp: TensorParallel | None = None, seed: int = 1
) -> dict[str, tuple[Tensor, Placement]]:
    model = GPT(c, tp or TensorParallel(), "none", seed)
    return {placement_of(p).name: (p.detach(), placement_of(p)) for p in model.parameters()}


def test_the_same_seed_gives_the_same_bytes_and_another_one_others() -> None:
    one, same, other = weights(config()), weights(config()), weights(config(), seed=2)
    assert one.keys() == same.keys() == other.keys()
    for name, (w, _) in one.items():
        assert torch.equal(w, same[name][0])
        assert torch.equal(w, other[name][0]) == (w.dim() == 1), name


def test_no_random_state_is_used_or_moved() -> None:
    torch.manual_seed(1)
    one = weights(config())
    before = torch.get_rng_state()
    torch.manual_seed(2)
    other = weights(config())
    assert all(torch.equal(w, other[name][0]) for name, (w, _) in one.items())
    torch.manual_seed(1)
    assert torch.equal(torch.get_rng_state(), before)


def test_no_two_matrices_are_alike() -> None:
    beginnings = [tuple(w.flatten()[:4].tolist()) for w, _ in weights(config()).values() if w.dim() > 1]
    assert len(set(beginnings)) == len(beginnings)


def test_a_deeper_model_begins_with_the_same_blocks() -> None:
    """But for the scale of what goes into the residual stream."""
    few, many = weights(config(layers=2)), weights(config(layers=8))
    for name, (w, _) in few.items():
        scale = 0.5 if name.endswith(("attention.out.weight", "mlp.down.weight")) else 1.0
        torch.testing.assert_close(many[name][0], w * scale, rtol=1e-6, atol=0)


@pytest.mark.parametrize(
    "changes", [{}, {"tied": True}, {"qk_norm": "full"}], ids=["untied", "tied", "full-qk-norm"]
)
@pytest.mark.parametrize("size", [2, 4])
def test_the_shards_of_a_tensor_group_are_slices_of_the_whole(size: int, changes: dict[str, Any]) -> None:
    c = config(**changes)
    whole = weights(c)
    ranks = [weights(c, TensorParallel(rank=r, size=size)) for r in range(size)]
    split = 0
    for name, (w, placement) in whole.items():
        parts = [rank[name][0] for rank in ranks]
        assert all(rank[name][1] == placement for rank in ranks)
        for r, part in enumerate(parts):
            assert torch.equal(part, shard(w, placement, r, size)), name
        assert torch.equal(unshard(parts, placement), w), name
        split += parts[0].shape != w.shape
    # Four products a block, the norms of queries and keys, the embedding, the head.
    assert split == (6 if c.qk_norm == "full" else 4) * 3 + (1 if c.tied else 2)


def test_a_shard_of_qkv_holds_whole_heads_of_each() -> None:
    """8 query and 4 key/value heads of width 8 on two ranks: rank 1 has queries 4 to 7, keys and values 2 and 3."""
    name = "blocks.1.attention.qkv.weight"
    whole = weights(config())[name][0]
    part = weights(config(), TensorParallel(rank=1, size=2))[name][0]
    q, k, v = whole.split([64, 32, 32])
    assert torch.equal(part, torch.cat((q[32:], k[16:], v[16:])))


def test_one_layer_built_alone_is_the_same_as_in_the_model() -> None:
    c = config()
    block = layers(c, TensorParallel(), "none")[2].build()
    initialise(block, c, TensorParallel(), 1)
    whole = weights(c)
    for p in block.parameters():
        assert torch.equal(p, whole[placement_of(p).name][0])


def test_standard_deviations() -> None:
    c = config(layers=2, hidden=256, ffn=512, init_std=0.05)
    for name, (w, _) in weights(c).items():
        if w.dim() == 1:
            assert (w == 1).all(), name
            continue
        wanted = 0.05
        if name.endswith(("attention.out.weight", "mlp.down.weight")):
            wanted /= math.sqrt(2 * c.layers)
        # Standard error of a standard deviation of n normal numbers: 1 / sqrt(2 n); five of them.
        assert float(w.std()) == pytest.approx(wanted, rel=5 / math.sqrt(2 * w.numel())), name
        assert abs(float(w.mean())) < 5 * wanted / math.sqrt(w.numel()), name


# Whole matrices of a model of width 256 (8 heads of 32, 4 of keys), MLP of 512, 256 rows of vocabulary, 4 blocks.
@pytest.mark.parametrize(
    ("changes", "qkv", "out", "gate_up", "down", "embedding", "head"),
    [
        ({}, 0.02, 0.02 / 8**0.5, 0.02, 0.02 / 8**0.5, 0.02, 0.02),
        ({"residual_init": "same"}, 0.02, 0.02, 0.02, 0.02, 0.02, 0.02),
        ({"residual_init": "zero"}, 0.02, 0.0, 0.02, 0.0, 0.02, 0.02),
        ({"init": "fan_in"}, 1 / 16, 1 / 16 / 8**0.5, 1 / 16, 512**-0.5 / 8**0.5, 0.02, 1 / 16),
        (
            {"init": "xavier", "residual_init": "same"},
            ((2 / 512) ** 0.5, (2 / 384) ** 0.5, (2 / 384) ** 0.5), (2 / 512) ** 0.5,
            (2 / 768) ** 0.5, (2 / 768) ** 0.5, 0.02, (2 / 512) ** 0.5,
        ),
        ({"init": "small"}, *[(2 / 1280) ** 0.5, (2 / 1280 / 8) ** 0.5] * 2, 0.02, (2 / 1280) ** 0.5),
        ({"mup": {"base_width": 64, "zero_output": True}}, 0.01, 0.01 / 8**0.5, 0.01, 0.01 / 8**0.5, 0.02, 0.0),
        (
            {"mup": {"base_width": 64, "base_layers": 2}},
            0.01, 0.01 / 4**0.5, 0.01, 0.01 / 4**0.5, 0.02, 0.02,
        ),
        ({"norms": "deep"}, (0.02, 0.02, 0.02 * 32**-0.25), *[0.02 * 32**-0.25] * 3, 0.02, 0.02),
    ],
    ids=["normal", "same", "zero", "fan-in", "xavier", "small", "mup", "completep", "deep"],
)  # fmt: skip
def test_standard_deviations_of_every_choice(
    changes: dict[str, Any],
    qkv: float | tuple[float, float, float],
    out: float,
    gate_up: float,
    down: float,
    embedding: float,
    head: float,
) -> None:
    c = config(layers=4, hidden=256, ffn=512, **changes)
    made = {name: w for name, (w, _) in weights(c).items() if w.dim() > 1}
    wanted = {
        "attention.out": out,
        "mlp.gate_up": gate_up,
        "mlp.down": down,
        "embedding": embedding,
        "head": head,
    }
    parts = qkv if isinstance(qkv, tuple) else (qkv, qkv, qkv)
    for i in range(4):
        whole = made.pop(f"blocks.{i}.attention.qkv.weight").split((256, 128, 128))
        made |= {f"{i}.{which}.weight": part for which, part in zip(("q", "k", "v"), whole, strict=True)}
    wanted |= dict(zip((".q", ".k", ".v"), parts, strict=True))
    for name, w in made.items():
        (std,) = (value for ending, value in wanted.items() if name.endswith(f"{ending}.weight"))
        assert float(w.std()) == pytest.approx(std, rel=5 / math.sqrt(2 * w.numel())), name


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("chunk", [100, 1 << 18])
@pytest.mark.parametrize(
    "changes",
    [
        {"norms": "deep", "init": "xavier"},
        {"norms": "both", "zero_centered_norms": True},
        {"mup": {"base_width": 16}},
    ],
    ids=["deep", "zero-centered", "mup"],
)
def test_shards_of_every_choice_are_slices_of_the_whole(
    size: int, chunk: int, changes: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """DeepNorm's factor begins in the middle of a fused matrix, and of a chunk."""
    c = config(**changes)
    whole = {name: (whole_weight(p, tuple(w.shape), c, 1), p) for name, (w, p) in weights(c).items()}
    monkeypatch.setattr(init, "CHUNK", chunk)
    for rank in range(size):
        for name, (w, placement) in weights(c, TensorParallel(rank=rank, size=size)).items():
            assert torch.equal(w, shard(whole[name][0], placement, rank, size)), name
            assert w.dim() > 1 or (w == (0.0 if c.zero_centered_norms else 1.0)).all()


# Drawn in chunks, by threads


@given(st.integers(1, 90), st.integers(1, 90), st.integers(1, 700))
@settings(deadline=None, max_examples=examples(150))
def test_chunks_are_the_bytes_of_the_whole(rows: int, columns: int, size: int) -> None:
    whole = torch.empty(rows, columns).normal_(0.0, 0.02, generator=torch.Generator().manual_seed(3))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(init, "CHUNK", size)
        at = 0
        for first, chunk in init._chunks(rows, columns, 0.02, torch.Generator().manual_seed(3)):
            assert first == at and chunk.dtype == torch.float32
            assert torch.equal(chunk, whole[first : first + len(chunk)])
            # Sixteen rows at the least where the rows are odd, and what is left over.
            assert chunk.numel() < max(size, init.BLOCK * columns) + init.BLOCK + columns
            at += len(chunk)
    assert at == rows


def parts_of(
    c: ModelConfig, tp: TensorParallel, data: int, dtype: torch.dtype
) -> dict[tuple[str, int], tuple[ParameterPart, Tensor]]:
    """Of every parameter and data rank what ZeRO 3 gives it, and the numbers that belong there; by name and rank."""
    found = {}
    for layer in layers(c, tp, "none"):
        for p in layer.build().parameters():
            placement, shape = placement_of(p), list(p.shape)
            if placement.dim is not None:
                shape[placement.dim] = sum(placement.sections)
            flat = shard(whole_weight(placement, tuple(shape), c, 1), placement, tp.rank, tp.size).flatten()
            size = -(-len(flat) // data)
            padded = torch.cat((flat, torch.zeros(size * data - len(flat)))).to(dtype)
            for rank in range(data):
                into = torch.full((size,), torch.nan, dtype=dtype)
                part = ParameterPart(placement, tuple(p.shape), into, rank * size)
                found[placement.name, rank] = part, padded[rank * size : (rank + 1) * size]
    return found


@pytest.mark.parametrize("threads", [1, 2, 5])
@pytest.mark.parametrize(
    ("size", "data", "dtype"), [(1, 1, "float32"), (1, 3, "bfloat16"), (2, 5, "float16")]
)
def test_every_number_of_threads_and_ranks_gives_the_same_bytes(
    threads: int, size: int, data: int, dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(init, "CHUNK", 1000)
    c = config(qk_norm="full", layers=1)
    for rank in range(size):
        tp = TensorParallel(rank=rank, size=size)
        made = parts_of(c, tp, data, getattr(torch, dtype))
        fill([part for part, _ in made.values()], c, tp, 1, threads)
        for name, (part, wanted) in made.items():
            assert torch.equal(part.into, wanted), name


@pytest.mark.parametrize("threads", [1, 4])
def test_so_many_threads_draw_at_once(threads: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each waits for the others; of torch's own threads they have one each, or there would be threads x threads."""
    together, own = threading.Barrier(threads, timeout=PATIENCE), []

    def drawn(part: ParameterPart, **_: Any) -> None:
        together.wait()
        own.append(torch.get_num_threads())

    monkeypatch.setattr(init, "_fill", drawn)
    parts = [ParameterPart(Placement(str(i)), (2, 2), torch.empty(4)) for i in range(2 * threads)]
    fill(parts, config(), TensorParallel(), 1, threads)
    assert own == [1] * len(parts)


def test_an_error_in_a_thread_is_raised_and_later_threads_are_as_before(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def failing(part: ParameterPart, **_: Any) -> None:
        raise torch.OutOfMemoryError(part.placement.name)

    monkeypatch.setattr(init, "_fill", failing)
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        with pytest.raises(torch.OutOfMemoryError, match="x"):
            fill(
                [ParameterPart(Placement("x"), (2, 2), torch.empty(4))] * 3, config(), TensorParallel(), 1, 2
            )
        with ThreadPoolExecutor(1) as pool:
            assert torch.get_num_threads() == pool.submit(torch.get_num_threads).result() == 3
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize(
    ("ranks", "bound_to", "wanted"), [(8, 96, 12), (1, 96, 96), (200, 96, 1), (8, 12, 12), (8, 4, 4)]
)
def test_ranks_of_a_host_share_its_cores(
    ranks: int, bound_to: int, wanted: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Slurm binds a task to cores of its own: these are its share already."""
    monkeypatch.setattr("os.cpu_count", lambda: 96)
    monkeypatch.setattr("os.sched_getaffinity", lambda _: set(range(bound_to)))
    monkeypatch.delenv("LOCAL_SIZE", raising=False)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", str(ranks))
    assert threads_to_draw() == wanted


def test_norms_begin_at_one_and_biases_at_zero() -> None:
    """Also the part of a tensor rank; `whole_weight` says the same."""
    for tp in (TensorParallel(), TensorParallel(rank=1, size=2)):
        found = weights(config(qkv_bias=True), tp)
        assert found["blocks.2.attention.qkv.bias"][0].shape == (128 // tp.size,)
        for name, (w, placement) in found.items():
            if w.dim() == 1:
                assert torch.equal(w, torch.full(w.shape, 0.0 if name.endswith(".bias") else 1.0)), name
                assert torch.equal(whole_weight(placement, tuple(w.shape), config(), 1), w)
