"""Weights gathered while the next forward pass begins: the same bytes as after the update; nobody reads too early."""

from __future__ import annotations

from collections import Counter
from itertools import accumulate
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megastable.base.fingerprint import fingerprint_tensors
from megastable.config.tree import RunConfig
from megastable.engine import weight_gathers
from megastable.engine.locators import computing_copies
from megastable.engine.rank_checks import Replicas
from megastable.engine.weight_gathers import BEFORE_ALL, WeightGathers
from megastable.parallel.layout import cut_evenly, cut_into_buckets, find_owned
from megastable.parallel.mappings import Shares
from tests.distributed import run_ranks
from tests.engine.engines import are_same, build_engine, copy_state, take_batch
from tests.parallel.test_layouts import LENGTH, VOCABULARY, config

STEPS, REFUSED, REWOUND = 10, (2, 5), 7
LIMIT = 5200  # elements of a bucket: one begins with the last matrix of a block
FP8 = {"precision": {"fp8": {"recipe": "delayed", "backend": "emulated"}}}
# Ranks, the layout, and other sections.
CASES: dict[str, tuple[int, dict[str, Any], dict[str, Any]]] = {
    "dp2": (2, {}, {}),
    "dp3": (3, {"batch": 6, "micro_batch": 1, "model": {"ffn": 60}}, {}),  # buckets begin inside parameters
    "tp2-sequence-dp2": (4, {"tensor": 2, "sequence": True}, {}),
    "pp2-dp2": (4, {"pipeline": 2, "micro_batch": 1}, {}),
    "pp2-dp2-zero-bubble": (4, {"pipeline": 2, "micro_batch": 1, "schedule": "zero_bubble"}, {}),
    "pp2-chunks-dp2": (4, {"pipeline": 2, "micro_batch": 1, "model_chunks": 2, "model": {"layers": 4}}, {}),
    "replicas2-dp4": (4, {"replicas": 2, "micro_batch": 1}, {}),
    "tied-dp2-full": (2, {"tied": True, "recompute": "full"}, {}),
    "tied-pp2-dp2": (4, {"tied": True, "pipeline": 2, "micro_batch": 1}, {}),
    "compiled-dp2": (2, {}, {"kernels": {"compile": True}}),
    "fp8-dp2": (2, {}, FP8),
    "qk-clip-dp2": (2, {"model": {"qk_norm": False}}, {"optimizer": {"qk_clip": 0.01}}),
    "lamb-dp2": (2, {}, {"optimizer": {"name": "lamb"}}),
    "fp32-dp3": (3, {"precision": "fp32", "batch": 6, "micro_batch": 1}, {}),
    "zero2-dp3": (3, {"zero": 2, "batch": 6, "micro_batch": 1}, {}),
}


class LateWork:
    """A gather that arrives when it is waited for; until then what other ranks have updated is not a number."""

    def __init__(self, shares: Shares, group: Any) -> None:
        self._given, self._begin = (shares, group), weight_gathers.begin_gather_slices.real
        self._own, self._sent = shares.piece.clone(), shares.even.clone()
        shares.whole.fill_(torch.nan)
        shares.piece.copy_(self._own)

    def wait(self) -> None:
        if self._given:
            shares = self._given[0]
            assert torch.equal(shares.piece, self._own), "written before all have it"
            shares.even.copy_(self._sent)
            self._begin(*self._given).wait()
            self._given = ()


def look_at_weights(engine: Any, step: int) -> Any:
    """Right after some updates, outside of a forward pass: each step by another way."""
    replicas = Replicas(engine)
    match step:
        case 0:
            return [flat.double().sum().item() for flat in engine.zero.flat_weights]
        case 1:
            return [(name, fingerprint_tensors([copy]).item()) for name, copy, _ in computing_copies(engine)]
        case 4 | 8 | 9:
            kind = {4: "copies", 8: "replicas", 9: "tied"}[step]
            return replicas.fingerprint_by_name(kind) if kind in replicas.kinds else None
    return None


def train_twice(name: str, late: bool = True) -> dict[str, Any]:
    """Of this rank, ten steps with gathers that arrive as late as they can, or as they do, and with DeepSpeed's; two
    are refused, one is undone. By layer: how many buckets it waited for."""
    _, given_parts, sections = CASES[name]
    parts = {"precision": "bf16", **given_parts}
    tree = config(**parts).model_dump(mode="json")
    for section, keys in sections.items():
        tree[section] |= keys
    c = RunConfig.model_validate(tree)
    begin_gather, wait_for_layer = weight_gathers.begin_gather_slices, WeightGathers._wait_for_layer
    begin_gathers, waited = WeightGathers.begin_gathers, Counter[int]()

    def begin_late(*given: Any) -> Any:
        return LateWork(*given) if late else begin_gather(*given)

    def note_wait(self: WeightGathers, number: int, *given: Any) -> None:
        begun_before = len(self._begun)
        wait_for_layer(self, number, *given)
        waited[number] += begun_before - len(self._begun)

    begin_late.real = begin_gather  # type: ignore[attr-defined]
    WeightGathers._wait_for_layer = note_wait  # type: ignore[method-assign]
    weight_gathers.begin_gather_slices = begin_late
    states, seen, readers = [], [], set[int]()
    for is_ours in (True, False):
        engine = build_engine(c, reduce_bucket_size=LIMIT)
        readers |= {bucket.reader for bucket in engine.zero.gathers.buckets}
        if not is_ours:  # DeepSpeed's, of whole buffers, waited for
            o = engine.optimizer
            flats = (
                (o.bf16_groups_flat, o.bf16_partitioned_groups) if hasattr(o, "bf16_groups_flat") else None
            )
            flats = flats or (o.bit16_groups_flat, o.parallel_partitioned_bit16_groups)

            def gather_whole(
                *_: Any, flats: Any = flats, groups: Any = o.real_dp_process_group, **__: Any
            ) -> None:
                for flat, pieces, group in zip(*flats, groups, strict=True):
                    own_rank = torch.distributed.get_rank(group)
                    torch.distributed.all_gather_into_tensor(flat, pieces[own_rank], group)

            engine.zero.gathers.begin_gathers = gather_whole
        random, told = torch.Generator().manual_seed(3), list[Any]()
        for step in range(STEPS):
            tokens = torch.randint(0, VOCABULARY, (c.train.global_batch, LENGTH + 1), generator=random)
            batch = take_batch(engine, (tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous(), None))
            if step == REWOUND - 2:
                kept = {n: t.clone() for n, t in engine.optimizer_state().items()}, engine.read_counters()
            if step == REWOUND:
                engine.restore_optimizer_state(kept[0])
                engine.refresh_weights()
                engine.restore_counters(kept[1])
            if step in (4, 8):  # right after an update
                told.append(engine.evaluate_samples(batch).tolist())
                told.append(engine.measure_step(batch[:1]).grad_norm)
            measured, applied = engine.train_step(batch, 1e-2, lambda m, step=step: step not in REFUSED)
            assert applied == (step not in REFUSED)
            told.append((measured.losses.tolist(), measured.grad_norm, engine.kept, measured.gradients))
            told.append(look_at_weights(engine, step))
        seen.append(told)
        states.append(copy_state(engine))
    WeightGathers.begin_gathers, WeightGathers._wait_for_layer = begin_gathers, wait_for_layer  # type: ignore[method-assign]
    weight_gathers.begin_gather_slices = begin_gather
    assert repr(seen[0]) == repr(seen[1]) and are_same(*states)
    return {"waited": {number for number, count in waited.items() if count}, "readers": readers}


@pytest.mark.quick("dp3", "pp2-dp2", "qk-clip-dp2")
@pytest.mark.parametrize("name", CASES)
def test_late_weights_give_the_same_bytes_as_gathers_that_are_waited_for(name: str) -> None:
    for rank in run_ranks(CASES[name][0], train_twice, name):
        # Some are there before the first layer, the others when their layers are called.
        assert rank["waited"] == rank["readers"] >= {BEFORE_ALL, 0} and len(rank["readers"]) > 2 - (
            "pp2" in name
        )


def test_gathers_that_go_on_beside_the_forward_pass_give_the_same_bytes() -> None:
    for rank in run_ranks(3, train_twice, "dp3", False):
        assert rank["waited"] == rank["readers"]


def read_before_the_pass() -> list[bool]:
    """Of two steps, whether all weights were there when FP8 began to compute, if it reads them then."""
    begin_gather, seen = weight_gathers.begin_gather_slices, list[bool]()

    def begin_late(*given: Any) -> Any:
        return LateWork(*given)

    begin_late.real = begin_gather  # type: ignore[attr-defined]
    tree = config(precision="bf16").model_dump(mode="json")
    tree["precision"] |= FP8["precision"]
    engine = build_engine(RunConfig.model_validate(tree), reduce_bucket_size=LIMIT)

    class Reading(type(engine.fp8)):  # type: ignore[misc]
        reads_weights = True

        def computing(self) -> Any:
            seen.append(all(bool(p.isfinite().all()) for p in engine.ds.module.parameters()))
            return super().computing()

    engine.fp8.__class__, weight_gathers.begin_gather_slices = Reading, begin_late
    tokens = torch.zeros(engine.config.train.global_batch, LENGTH, dtype=torch.long)
    for _ in range(2):
        engine.train_step(take_batch(engine, (tokens, tokens, None)), 1e-2, lambda _: True)
    weight_gathers.begin_gather_slices = begin_gather
    return seen


def test_scales_that_are_guessed_from_weights_wait_for_all_of_them() -> None:
    assert run_ranks(2, read_before_the_pass) == [[True, True]] * 2


@given(st.lists(st.integers(1, 90), min_size=1, max_size=9), st.integers(1, 5), st.integers(1, 300))
def test_buckets_are_even_and_every_element_has_one_owner(sizes: list[int], ranks: int, limit: int) -> None:
    length = -(-sum(sizes) // (2 * ranks)) * 2 * ranks
    buckets = cut_evenly(sizes, length, ranks, limit)
    assert [element for bucket in buckets for element in bucket] == list(range(length))
    assert all(bucket and len(bucket) % ranks == 0 for bucket in buckets)
    assert all(bucket.start % (8 * ranks) == 0 for bucket in buckets)
    # Each begins at most so much later than a parameter.
    starts = [0, *accumulate(sizes)]
    assert all(min(b.start - s for s in starts if s <= b.start) < 8 * ranks for b in buckets)
    assert len(buckets) <= len(cut_into_buckets(sizes, limit))
    for rank in range(ranks):
        owned = [element for bucket in buckets for element in find_owned(bucket, length, ranks, rank)]
        assert owned == list(range(length))[rank * length // ranks :][: length // ranks]
