"""Formulas of communication against the papers' sums, and against what real steps say."""

from __future__ import annotations

import io
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from benchmarks.ranks import launch
from benchmarks.scaling import (
    LAYOUTS,
    Case,
    Count,
    Counted,
    Found,
    compare,
    count_joined,
    expected,
    forecast_table,
    measure,
    numbers,
    predict,
    size_in_words,
    table,
)
from megastable.base.errors import ConfigError, MegastableError
from megastable.config import recipe
from megastable.config.tree import RunConfig
from megastable.model.flops import parameters
from megastable_tools.plan import volume
from tests.distributed import run_ranks


def config(**parts: Any) -> RunConfig:
    model = dict(
        layers=8, hidden=64, heads=8, kv_heads=8, ffn=128, sequence_length=32, vocab_size=500, vocab_multiple=64,
    )  # fmt: skip
    return RunConfig.model_validate(
        {
            "model": model | parts.pop("model", {}),
            "train": {"global_batch": 64, "micro_batch": 2} | parts.pop("train", {}),
            "precision": {"kind": parts.pop("precision", "bf16")},
            "data": {"keep_documents_apart": parts.pop("apart", False)},
            "parallel": parts,
        }
    )


def terms(c: RunConfig, data: int = 1, stage: int = 0, **options: Any) -> list[volume.Term]:
    return volume.step(c, data, stage, volume.bounds(c), "reference", **options)


def ring(found: list[volume.Term], ranks: int, group: str, *whats: str) -> float:
    chosen = [t for t in found if t.group == group and (not whats or t.what.startswith(whats))]
    assert chosen
    return sum(volume.sent(t, ranks) for t in chosen)


ACTIVATIONS = ("activations", "their gradients")


def test_tensor_parallelism_is_four_all_reduces_a_block() -> None:
    """Megatron-LM, section 3: two in the forward pass, two in the backward; one each for embedding and head."""
    found = [t for t in terms(config(tensor=2)) if t.what in ("activations, forward", "their gradients")]
    assert {(t.collective, t.bytes) for t in found} == {("all-reduce", 32 * 2 * 64 * 2)}
    micro_batches = 32
    assert sum(t.calls for t in found) == micro_batches * (4 * 8 + 2)


@given(
    st.sampled_from([2, 4, 8]), st.sampled_from(["none", "selective", "full"]),
    st.sampled_from(["before", "after", "both", "deep", "branch", "mixed"]),
)  # fmt: skip
def test_sequence_parallelism_sends_what_tensor_parallelism_sends(t: int, recompute: str, norms: str) -> None:
    """Korthikanti et al., section 4.2.2: but for entering a block once more, where all-reduces have nothing to do."""
    with_it, without = (
        terms(config(tensor=t, sequence=s, recompute=recompute, model={"norms": norms}))
        for s in (True, False)
    )
    again = ring(with_it, t, "tensor", "activations, recomputed") if recompute == "full" else 0.0
    once = ring(without, t, "tensor", "activations, recomputed") if recompute == "full" else 0.0
    per_call = 32 * 2 * 64 * 2 * (t - 1) / t
    # Of 8 blocks, each left twice, but for a last product without a norm after it.
    left = {"before": 8, "mixed": 8 + 2}.get(norms, 2 * 8)
    assert again == pytest.approx((recompute == "full") * 32 * (2 * 8 + left) * per_call)
    assert once == pytest.approx((recompute == "full") * 32 * 2 * left * per_call)
    assert ring(with_it, t, "tensor", *ACTIVATIONS) - again == pytest.approx(
        # The head is entered, the embedding is left: each is a half of an all-reduce, there and back.
        ring(without, t, "tensor", *ACTIVATIONS) - once
    )


@pytest.mark.parametrize(
    ("zero", "settings", "gradients", "weights"),
    [
        (1, {}, 1, 1),
        (2, {}, 2 * 4, 1),
        (2, {"use_multi_rank_bucket_allreduce": False}, 1 * 4, 1),
        (3, {}, 1 * 4, 1 * 4),
        (3, {"stage3_max_live_parameters": 0}, 1 * 4, 2 * 4),
    ],
)
def test_zero_sends_every_parameter_so_often(
    zero: int, settings: dict[str, Any], gradients: int, weights: int
) -> None:
    """In sizes of the model (ZeRO, section 7, at 4 micro-batches): an all-reduce is 2, anything else 1; gradients of 4
    bytes, weights of 2. But for padding."""
    c, data = config(zero=zero), 8
    found = terms(c, data, zero=settings)
    size = parameters(c.model) * (data - 1) / data
    assert ring(found, data, "data", "gradients") == pytest.approx(gradients * 4 * size, rel=1e-3)
    assert ring(found, data, "data", "weights") == pytest.approx(weights * 2 * size, rel=1e-3)


@given(
    st.integers(1, 8), st.booleans(), st.sampled_from([True, False, "full"]), st.sampled_from([1, 2, 4]),
    st.booleans(), st.sampled_from(["before", "both", "deep"]),
)  # fmt: skip
def test_stages_hold_the_whole_model_together(
    stages: int, tied: bool, qk_norm: Any, tensor: int, bias: bool, place: str
) -> None:
    model = {"tied": tied, "qk_norm": qk_norm, "qkv_bias": bias, "norms": place}
    c = config(pipeline=stages, tensor=tensor, model=model)
    cut = volume.bounds(c)
    held = [volume.parameters(c.model, volume.stage_of(cut, s), tensor) for s in range(stages)]
    split = sum(sum(matrices) for matrices, _ in held) * tensor
    norms = sum(sum(n) for _, n in held)
    if qk_norm == "full":  # split, too
        norms += c.model.layers * 2 * c.model.hidden // tensor * (tensor - 1)
    if bias:
        norms += c.model.layers * 3 * c.model.hidden // tensor * (tensor - 1)
    copy = c.model.padded_vocab * c.model.hidden if tied and stages > 1 else 0
    assert split + norms == parameters(c.model) + copy


@given(st.integers(2, 8), st.booleans(), st.booleans())
def test_what_a_stage_sends_the_next_one_receives(stages: int, apart: bool, sequence: bool) -> None:
    c = config(pipeline=stages, apart=apart, **({"tensor": 2, "sequence": True} if sequence else {}))
    said = [[t for t in terms(c, 2, stage) if t.group == "pipeline"] for stage in range(stages)]
    for direction, here, there in (("activations", 0, 1), ("segments", 0, 1), ("their gradients", 1, 0)):
        for pair in pairwise(said):
            sent = [(t.bytes, t.calls) for t in pair[here] if t.what == direction and t.collective == "send"]
            got = [
                (t.bytes, t.calls) for t in pair[there] if t.what == direction and t.collective == "receive"
            ]
            assert sent == got and len(sent) == (direction != "segments" or apart)
    assert volume.accumulation(c, 2) == 16


@pytest.mark.parametrize(("recompute", "passes"), [("none", 2), ("selective", 2), ("full", 3)])
@pytest.mark.parametrize(("kv_heads", "sent"), [(8, 8), (4, 4), (2, 4)])  # of two, each goes to two ranks
def test_context_parallelism_exchanges_tokens_for_heads(
    recompute: str, passes: int, kv_heads: int, sent: int
) -> None:
    """DeepSpeed Ulysses, arXiv:2309.14509 section 3.1: q, k, v one way and the result back, of a rank's own tokens."""
    c = config(context=4, recompute=recompute, model={"kv_heads": kv_heads})
    assert volume.accumulation(c, 8) == 16  # two groups of four ranks, micro-batches of two: 64 samples
    tokens, numbers = 2 * 32 // 4, (8 + 2 * sent + 8) * 8
    found = [t for t in terms(c, data=8) if t.group == "context"]
    assert sum(t.total for t in found) == tokens * numbers * 2 * passes * 8 * 16
    assert volume.members(c, 8)["context"] == 4
    assert ring(found, 4, "context") == sum(t.total for t in found) * 3 / 4
    assert not [t for t in terms(config(), data=8) if t.group == "context"]


def test_a_loss_in_chunks_gathers_two_numbers_a_token() -> None:
    c = config(tensor=2)  # 64 tokens in at least five chunks: in eight
    found = volume.step(c, 1, 0, volume.bounds(c), "chunked", elements=256 * 15)
    assert [(t.collective, t.bytes, t.calls) for t in found if t.what == "loss"] == [
        ("all-gather", 8 * 8, 32 * 8)
    ]
    # No even cut of 34 tokens into 5 to 9: five chunks of 7 tokens, the last of 6.
    c = config(tensor=2, model={"sequence_length": 17})
    found = volume.step(c, 1, 0, volume.bounds(c), "chunked", elements=256 * 8)
    assert [(t.bytes, t.calls) for t in found if t.what == "loss"] == [(7 * 8, 32 * 4), (6 * 8, 32)]


# Real steps


def talk() -> tuple[dict[tuple[str, int], int], int]:
    """Every way to talk that DeepSpeed and megastable have, once."""
    world, rank = dist.get_world_size(), dist.get_rank()
    x = torch.ones(6)
    before, counter = numbers(), Count()
    with counter:
        dist.all_reduce(x)
        dist.all_reduce(torch.ones(1, dtype=torch.uint8), op=dist.ReduceOp.MAX)
        dist.all_gather_into_tensor(torch.empty(6 * world), x)
        dist.all_gather([torch.empty(6) for _ in range(world)], x)
        dist.reduce_scatter_tensor(torch.empty(6 // world), x)
        dist.broadcast(x, 0)
        dist.reduce(x, 0)
        (dist.send if rank == 0 else dist.recv)(x, 1 - rank)
        dist.all_to_all_single(torch.empty(6), x)
        dist.barrier()
    seen = {(collective, size): calls for (_, collective, size), calls in counter.calls.items()}
    return seen, sum(numbers().values()) - sum(before.values()) - counter.calls.total()


def test_nothing_is_missed() -> None:
    both = {
        ("all-reduce", 24): 1, ("all-reduce", 1): 1, ("all-gather", 24): 2, ("reduce-scatter", 24): 1,
        ("broadcast", 24): 1, ("reduce", 24): 1, ("all-to-all", 24): 1, ("barrier", 0): 1,
    }  # fmt: skip
    for (seen, missed), own in zip(run_ranks(2, talk), ("send", "receive"), strict=True):
        assert seen == both | {(own, 24): 1} and missed == 0


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    [
        "TP2+SP full",
        "TP2+SP Gemma 2 full",
        "TP2+SPxPP2 Mix-LN full",
        "DP2 ZeRO 3 Gemma 2 full keeps nothing",
        "DP2 ZeRO 3 Mix-LN full keeps nothing",
        "DP4 ZeRO 2, to the owner",
        "TP2+SPxPP2 tied full",
        "PP2xDP3 tied",
        "TP2xPP2 AGC",
        "DP4xCP2 by worker",
        "Stable-SPAM DP2 fp16",
        "Adafactor TP2xDP2 ZeRO 3",
        "Muon DP3 ZeRO 3 fp32",
        "Muon TP2xPP2xDP2 QK-clip",
    ],
)
def test_real_steps_say_what_the_formulas_say(name: str) -> None:
    case = LAYOUTS[name]
    held = compare(name, case, run_ranks(case.world, count_joined, case))
    assert not held.differences and not held.missed
    assert sum(row.calls for row in held.rows) > 5


@pytest.mark.parametrize("zero", [1, 3])
def test_muon_exchanges_every_matrix_once(zero: int) -> None:
    """There and back, in bf16; what is said of no rank in particular is the mean."""
    case = Case(6, {"tensor": 2, "zero": zero}, global_batch=6, micro_batch=1, optimizer={"name": "muon"})
    m = case.config.model
    q, k = m.heads * m.head_width, m.key_value_heads * m.head_width
    size = m.layers * m.hidden * (2 * q + 2 * k + 3 * m.ffn_width)

    def stage(**options: Any) -> list[volume.Term]:
        return [t for t in terms(case.config, 3, **options) if t.group == "stage"]

    ranks = [stage(data_rank=d, tensor_rank=t) for d in range(3) for t in range(2)]
    assert [sum(of[way].total for of in ranks) for way in (0, 1)] == [2 * size] * 2
    assert [t.total for t in stage()] == [2 * (size // 6)] * 2


def test_ranks_are_started_and_counted() -> None:
    said: list[str] = []
    found = measure(["DP2 ZeRO 1"], said.append)
    assert said == ["DP2 ZeRO 1"] and not found.differs
    (held,) = found.layouts
    assert [(row.group, row.collective, row.calls) for row in held.rows] == [
        ("data", "all-gather", 2), ("data", "reduce-scatter", 2), ("world", "all-reduce", 1),
    ]  # fmt: skip


def test_a_rank_that_fails_is_told() -> None:
    with pytest.raises(MegastableError, match=r"rank \d: ConfigError: 3 ranks cannot be laid out"):
        launch(3, count_joined, Case(3, {"tensor": 2}))


# Telling


def printed(renderable: Any) -> str:
    text = io.StringIO()
    Console(file=text, width=120).print(renderable)
    return " ".join(text.getvalue().split())


def test_differences_are_told() -> None:
    case = LAYOUTS["PP4"]
    right = [Counted(stage, expected(case, stage), 0) for stage in range(4)]
    held = compare("PP4", case, right)
    assert not held.differences and {row.stages for row in held.rows} == {"0", "1-2", "3"}
    assert not Found([held], {}).differs and "as the formulas say" in printed(table(Found([held], {})))

    message = ("world", "all-reduce", 2432)
    wrong = replace(right[2], messages=right[2].messages | {message: 3, ("model", "barrier", 0): 1})
    held = compare("PP4", case, [*right[:2], wrong, right[3]])
    assert held.differences == [
        "PP4: rank 2 (stage 2): barrier of 0 bytes over the model group: 1 counted, 0 by the formulas",
        "PP4: rank 2 (stage 2): all-reduce of 2,432 bytes over the world group: 3 counted, 1 by the formulas",
    ]
    found = Found([held], {})
    assert found.differs and "3 / 1" in printed(table(found)) and "1 differ" in printed(table(found))
    missed = Found([compare("PP4", case, [*right[:3], replace(right[3], missed=1)])], {})
    assert missed.differs and "1 calls were not seen" in printed(table(missed))


def test_unknown_layout() -> None:
    with pytest.raises(ConfigError, match="--layout 'TP3': choose among 'TP2'"):
        measure(["TP3"])


def test_a_recipe_is_forecast_without_running_it() -> None:
    c = config(tensor=2, pipeline=2, sequence=True)
    forecast = predict(c, 8)
    assert forecast.layout == {"tensor": 2, "pipeline": 2, "data": 2} and forecast.accumulation == 16
    lines = {(line.what, line.collective): line for line in forecast.lines}
    sends = lines["activations", "send"]
    assert (sends.stage, sends.calls, sends.bytes, sends.sent) == (0, 16, 16 * 4096, 16 * 4096)
    assert lines["the gate", "all-reduce"].bytes == 8 * (2 * 64 + 2 + 9 + 9 * 2 + (c.model.vocab_size or 0))
    assert forecast.busiest["pipeline"] == 16 * 4096 + 4
    text = printed(forecast_table(forecast))
    assert "8 ranks (tensor 2 x pipeline 2 x data 2)" in text and "sent in all: tensor" in text
    with pytest.raises(ConfigError, match=r"model\.vocab_size"):
        predict(config(model={"vocab_size": None}), 8)


def test_the_page_says_how_large_the_gates_sum_of_the_recipes_is() -> None:
    said = []
    for name, ranks, vocabulary in (("7b", 64, 32_000), ("70b", 512, 128_000)):
        c = recipe.load(f"launch/recipes/{name}.yaml", [f"model.vocab_size={vocabulary}"])
        said.append(f"{size_in_words(predict(c, ranks).busiest['world'])}, 1 call")
    assert f"| world | {said[0]} | {said[1]} |" in Path("docs/scaling.md").read_text()


@pytest.mark.parametrize(
    ("size", "words"), [(0, "0 B"), (999, "999 B"), (1234, "1.23 kB"), (2.81e10, "28.1 GB")]
)
def test_sizes_in_words(size: float, words: str) -> None:
    assert size_in_words(size) == words
