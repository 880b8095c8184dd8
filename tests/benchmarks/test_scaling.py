"""Formulas of communication against the papers' sums, and against what real steps say."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.scaling import (
    LAYOUTS,
    compare_ranks,
    count_joined,
)
from megastable.config.tree import RunConfig
from megastable.model.sizes import count_parameters
from megastable_tools.plan import partition, volume
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
    return volume.list_step_terms(c, data, stage, partition.stage_bounds(c), "reference", **options)


def ring(found: list[volume.Term], ranks: int, group: str, *whats: str) -> float:
    chosen = [t for t in found if t.group == group and (not whats or t.what.startswith(whats))]
    assert chosen
    return sum(volume.count_sent_bytes(t, ranks) for t in chosen)


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
    gathered = ring(with_it, t, "tensor", "activations, gathered again") if recompute != "full" else 0.0
    assert gathered == pytest.approx((recompute != "full") * 32 * 2 * 8 * per_call)
    kept = terms(
        config(tensor=t, sequence=True, keep_gathered=True, recompute=recompute, model={"norms": norms})
    )
    assert kept == [term for term in with_it if term.what != "activations, gathered again"]
    # Of 8 blocks, each left twice, but for a last product without a norm after it.
    left = {"before": 8, "mixed": 8 + 2}.get(norms, 2 * 8)
    assert again == pytest.approx((recompute == "full") * 32 * (2 * 8 + left) * per_call)
    assert once == pytest.approx((recompute == "full") * 32 * 2 * left * per_call)
    assert ring(with_it, t, "tensor", *ACTIVATIONS) - again - gathered == pytest.approx(
        # The head is entered, the embedding is left: each is a half of an all-reduce, there and back.
        ring(without, t, "tensor", *ACTIVATIONS) - once
    )


@pytest.mark.parametrize(
    ("zero", "settings", "gradients", "weights"),
    [
        (1, {}, 1, 1),
        (2, {}, 1 * 4, 1),
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
    size = count_parameters(c.model) * (data - 1) / data
    assert ring(found, data, "data", "gradients") == pytest.approx(gradients * 4 * size, rel=1e-3)
    assert ring(found, data, "data", "weights") == pytest.approx(weights * 2 * size, rel=1e-3)


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
    assert partition.count_micro_batches(c, 2) == 16


@given(st.integers(2, 4), st.integers(2, 4), st.booleans())
def test_model_chunks_send_as_many_times_what_stages_send(stages: int, chunks: int, sequence: bool) -> None:
    """Between all chunks, round the stages; norms' gradients go by chunk, in as many bytes."""
    shape = {"model": {"layers": 16, "qk_norm": True}, "pipeline": stages}
    shape |= {"tensor": 2, "sequence": True} if sequence else {"tensor": 2}
    plain, cut = (
        [terms(config(**shape, **more), 2, stage) for stage in range(stages)]
        for more in ({}, {"model_chunks": chunks})
    )

    def count(found: list[list[volume.Term]], what: str, collective: str, group: str) -> tuple[int, int]:
        chosen = [
            t
            for of_stage in found
            for t in of_stage
            if (t.what, t.collective, t.group) == (what, collective, group)
        ]
        return sum(t.calls for t in chosen), sum(t.total for t in chosen)

    for what, collective in (
        ("activations", "send"),
        ("activations", "receive"),
        ("their gradients", "send"),
    ):
        calls, size = count(cut, what, collective, "pipeline")
        assert calls == 16 * (stages * chunks - 1)
        assert size * (stages - 1) == count(plain, what, collective, "pipeline")[1] * (stages * chunks - 1)
    norms = "gradients of norms", "all-reduce", "tensor"
    assert count(cut, *norms)[0] == chunks * count(plain, *norms)[0]
    assert count(cut, *norms)[1] == count(plain, *norms)[1]


@pytest.mark.parametrize(("recompute", "passes"), [("none", 2), ("selective", 2), ("full", 3)])
@pytest.mark.parametrize(("kv_heads", "sent"), [(8, 8), (4, 4), (2, 4)])  # of two, each goes to two ranks
def test_context_parallelism_exchanges_tokens_for_heads(
    recompute: str, passes: int, kv_heads: int, sent: int
) -> None:
    """DeepSpeed Ulysses, arXiv:2309.14509 section 3.1: q, k, v one way and the result back, of a rank's own tokens."""
    c = config(context=4, recompute=recompute, model={"kv_heads": kv_heads})
    assert (
        partition.count_micro_batches(c, 8) == 16
    )  # two groups of four ranks, micro-batches of two: 64 samples
    tokens, numbers = 2 * 32 // 4, (8 + 2 * sent + 8) * 8
    found = [t for t in terms(c, data=8) if t.group == "context"]
    assert sum(t.total for t in found) == tokens * numbers * 2 * passes * 8 * 16
    assert volume.count_members(c, 8)["context"] == 4
    assert ring(found, 4, "context") == sum(t.total for t in found) * 3 / 4
    assert not [t for t in terms(config(), data=8) if t.group == "context"]


@pytest.mark.parametrize(("recompute", "passes"), [("none", 2), ("selective", 2), ("full", 3)])
def test_a_ring_sends_keys_and_values_round_and_their_gradients_in_fp32(recompute: str, passes: int) -> None:
    """arXiv:2310.01889: to all ranks but the first, which has them; three heads divide over no ranks."""
    c = config(
        context=4, context_by="ring", recompute=recompute, model={"heads": 6, "kv_heads": 3, "head_dim": 8}
    )
    found = [t for t in terms(c, data=8) if t.group == "context"]
    numbers, rounds = 2 * 3 * 8 * (2 * 32 // 4), 3 * 8 * 16
    sent = numbers * rounds * (2 * passes + 4)
    assert sum(t.total for t in found) == 2 * sent  # and received
    assert ring(found, 4, "context") == sent


# Real steps


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    [
        "TP2+SP full",
        "TP2+SP selective",
        "TP2+SP keeps what it gathered",
        "TP2+SP in chunks",
        "TP2+SP tied full in chunks",
        "TP2+SP FP8 but for a block and a layer, in chunks",
        "TP2+SP Gemma 2 full",
        "TP2+SPxPP2 Mix-LN full",
        "DP2 ZeRO 3 Gemma 2 full keeps nothing",
        "DP2 ZeRO 3 Mix-LN full keeps nothing",
        "DP4 ZeRO 1 in buckets",
        "DP4 in 2 replicas, in buckets",
        "DP6 in 2 replicas",
        "PP2xDP4 in 2 replicas, tied, in buckets",
        "TP2xDP2, all of it on both",
        "DP4 ZeRO 2",
        "TP2+SPxPP2 tied full",
        "TP2+SPxPP2 tied in two model chunks",
        "TP2+SPxPP2 zero-bubble",
        "TP2+SPxPP2 zero-bubble in chunks",
        "PP2xDP3 tied",
        "TP2xPP2 AGC",
        "DP4xCP2 by worker",
        "CP4 ring fp32 full",
        "Stable-SPAM DP2 fp16",
        "Adafactor TP2xDP2 ZeRO 3",
        "Muon DP3 ZeRO 3 fp32",
        "Muon TP2xPP2xDP2 QK-clip",
        "TP2+SP experts full in chunks",
        "DP4 ZeRO 1 experts, in buckets",
        "DP2 ZeRO 3 experts full keeps nothing",
        "CP2 experts full",
        "Muon TP2xDP2 experts",
        "DP4 experts on 2, in buckets",
        "DP4 ZeRO 2 experts on 2 full",
        "TP2+SPxDP2 experts on 2",
    ],
)
def test_real_steps_say_what_the_formulas_say(name: str) -> None:
    case = LAYOUTS[name]
    held = compare_ranks(name, case, run_ranks(case.world, count_joined, case))
    assert not held.differences and not held.missed
    assert sum(row.calls for row in held.rows) > 5


# Telling
