"""Interleaved 1F1B: the same bytes as 1F1B, the passes in an order without deadlocks, and the bubble of the formula."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.pipeline import PipelineCase
from megastable.checkpoint.new_run import _stages as list_stages
from megastable.parallel.interleaved import Pass, list_passes
from tests.distributed import run_ranks
from tests.engine.engines import build_engine, copy_state, take_batch
from tests.parallel.test_layouts import LENGTH, VOCABULARY, config
from tests.tiers import examples

STEPS, LIMIT = 8, 3000  # elements of a bucket: of the smallest model five
PP2 = {"pipeline": 2, "model": {"layers": 5}}
SP2 = {"tensor": 2, "sequence": True}
# Ranks, chunks of a stage, and the layout.
CASES: dict[str, tuple[int, int, dict[str, Any]]] = {
    "pp2": (2, 2, PP2),
    "pp2-five-chunks": (2, 5, {"pipeline": 2, "model": {"layers": 10, "qk_norm": True}, "batch": 5}),
    "pp2-one-micro-batch": (2, 2, PP2 | {"batch": 1}),
    "pp3-two-left": (3, 2, {"pipeline": 3, "model": {"layers": 6}}),  # an odd ring, and 8 micro-batches
    "pp4": (4, 2, {"pipeline": 4, "model": {"layers": 8}}),
    "pp4-one-left": (4, 2, {"pipeline": 4, "model": {"layers": 8}, "batch": 9}),
    "pp2-dp2": (4, 2, PP2),
    "pp2-tp2-sequence": (4, 2, PP2 | SP2 | {"recompute": "selective"}),
    "pp2-tp2-overlap": (4, 2, PP2 | SP2 | {"tensor_overlap": 2}),
    "pp2-tied-full": (2, 2, PP2 | {"tied": True, "recompute": "full"}),
    "pp2-tied-dp2": (4, 2, PP2 | {"tied": True}),
    "pp2-fp8": (2, 2, PP2 | {"fp8": "delayed"}),
    "pp2-fp32": (2, 2, PP2 | {"precision": "fp32"}),
    "pp2-fp16": (2, 2, PP2 | {"precision": "fp16"}),
}


def train_twice(chunks: int, given_parts: dict[str, Any]) -> list[dict[str, Any]]:
    """Of this rank, steps of interleaved 1F1B and of 1F1B; two are refused, one is measured and looked at before."""
    from megastable.engine.gradient_sums import GradientSums
    from megastable.engine.locators import measure_sizes

    parts = dict(given_parts)
    fp8, precision = parts.pop("fp8", None), parts.pop("precision", "bf16")
    begun, finish = set(), GradientSums.finish_sums

    def note_begun(self: GradientSums, *args: Any, **kwargs: Any) -> None:
        begun.add(len(self._works) - len(self.buckets))
        finish(self, *args, **kwargs)

    GradientSums.finish_sums = note_begun  # type: ignore[method-assign]
    found = []
    for model_chunks in (chunks, 1):
        begun.clear()
        tree = config(precision=precision, micro_batch=1, model_chunks=model_chunks, **parts)
        tree = tree.model_dump(mode="json")
        tree["optimizer"]["clip"] = 1e6  # other ranks hold a layer, and the norm is summed in another order
        if fp8:
            tree["precision"]["fp8"] = {"recipe": fp8, "backend": "emulated"}
        c = type(config()).model_validate(tree)
        engine = build_engine(c, reduce_bucket_size=LIMIT)
        random, exact, norms = torch.Generator().manual_seed(3), list[Any](), list[float]()
        for step in range(STEPS):
            tokens = torch.randint(0, VOCABULARY, (c.train.global_batch, LENGTH + 1), generator=random)
            starts = torch.rand(c.train.global_batch, LENGTH, generator=random) < 0.1
            apart = starts.int().cumsum(1).int() if step > 4 else None  # stages send other tensors then
            batch = take_batch(engine, (tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous(), apart))
            if step == 4:
                before = copy_state(engine)
                norms.append(engine.measure_step(batch[:1]).grad_norm)
                exact.append(engine.evaluate_samples(batch).tolist())
                sizes = measure_sizes(engine, batch)
                exact.append(sorted((place._replace(tick=0), size) for place, size in sizes.items()))
                after = copy_state(engine)
                assert all(torch.equal(t, after[name]) for name, t in before.items())
            measured, applied = engine.train_step(batch, 1e-2, lambda m, step=step: step not in (2, 3))
            assert applied == (step not in (2, 3)) or precision == "fp16"
            exact.append((measured.losses.tolist(), applied))
            norms.append(measured.grad_norm)
        blocks = {
            name.split(".")[1] for name in engine.flat_state().gather_shards("weight") if "blocks" in name
        }
        shards = {
            f"{engine.topology.tensor_rank}/{kind}/{name}": t
            for kind in ("weight", "exp_avg", "exp_avg_sq")
            for name, t in engine.flat_state().gather_shards(kind).items()
        }
        chunks_held = [[name for name, _ in one.named_parameters()] for one in engine.ds.module.chunks]
        found.append(
            {
                "exact": exact,
                "norms": norms,
                "shards": shards,
                "blocks": blocks,
                "begun": set(begun),
                "held": chunks_held,
            }
        )
    return found


@pytest.mark.quick("pp2", "pp2-dp2")
@pytest.mark.parametrize("name", CASES)
def test_gives_the_same_bytes_as_1f1b(name: str) -> None:
    world, chunks, parts = CASES[name]
    ranks = run_ranks(world, train_twice, chunks, parts)
    shards: tuple[dict[str, Any], dict[str, Any]] = {}, {}
    for rank in ranks:
        interleaved, plain = rank
        assert repr(interleaved["exact"]) == repr(plain["exact"])
        assert interleaved["norms"] == pytest.approx(plain["norms"], rel=1e-6)
        assert len(interleaved["held"]) == chunks and all(interleaved["held"])
        assert interleaved["begun"] <= {0}  # a bucket is sent as soon as the last chunk's pass has filled it
        for whole, part in zip(shards, rank, strict=True):
            whole.update(part["shards"])
    assert ranks[0][0]["blocks"] != ranks[0][1]["blocks"]  # stages hold other blocks
    assert shards[0].keys() == shards[1].keys()
    assert all(torch.equal(t, shards[1][key]) for key, t in shards[0].items())


# Without ranks: the order of the passes


def simulate(
    stages: int, chunks: int, batches: int, forward: float, backward: float, slack: int, latency: float = 0.0
) -> float:  # fmt: skip
    """The end of a step of passes that take these times through all of a stage. slack: messages of a kind that a stage
    may have sent to another one that has not begun to receive them: the next one then waits. A message is received from
    the begin of the pass before the one that needs it. latency: seconds that it takes."""
    orders = [list_passes(stages, stage, chunks, batches) for stage in range(stages)]
    places, now = [0] * stages, [0.0] * stages
    ends: dict[tuple[bool, int, int], float] = {}  # by direction, chunk of the model, and micro-batch

    def number_of(stage: int, one: Pass) -> int:
        return one.chunk * stages + stage

    def is_accepted(stage: int, one: Pass) -> bool:
        """Whether the receiver has come far enough for what is sent `slack` messages before that of `one`."""
        sent = [p for p in orders[stage][: places[stage]] if p.is_forward == one.is_forward]
        sent = [p for p in sent if 0 <= number_of(stage, p) + (1 if one.is_forward else -1) < stages * chunks]
        if len(sent) < slack:
            return True
        old = sent[-slack]
        other = number_of(stage, old) + (1 if one.is_forward else -1)
        at = orders[other % stages].index(Pass(one.is_forward, other // stages, old.micro_batch))
        return places[other % stages] >= at - 1

    while any(place < len(order) for place, order in zip(places, orders, strict=True)):
        before = list(places)
        for stage, order in enumerate(orders):
            while places[stage] < len(order):
                one = order[places[stage]]
                number = number_of(stage, one)
                needed = number - 1 if one.is_forward else number + 1
                is_given = 0 <= needed < stages * chunks
                if is_given and (one.is_forward, needed, one.micro_batch) not in ends:
                    break
                if not is_accepted(stage, one):
                    break
                given_at = ends[one.is_forward, needed, one.micro_batch] + latency if is_given else 0.0
                begin = max(now[stage], given_at)
                now[stage] = begin + (forward if one.is_forward else backward) / chunks
                ends[one.is_forward, number, one.micro_batch] = now[stage]
                places[stage] += 1
        assert places != before, "the stages wait for each other"
    return max(now)


@given(
    st.integers(2, 7),
    st.integers(2, 5),
    st.integers(1, 20),
    st.floats(0.1, 2),
    st.floats(0.1, 2),
)
@settings(deadline=None, max_examples=examples(60))
def test_bubble_is_that_of_the_formula(
    stages: int, chunks: int, batches: int, forward: float, backward: float
) -> None:
    """Also where a stage waits until older messages are taken. What is left of a last round costs less than 1F1B."""
    for stage in range(stages):
        passes = list_passes(stages, stage, chunks, batches)
        for chunk in range(chunks):
            for is_forward in (True, False):
                of_chunk = [one.micro_batch for one in passes if one[:2] == (is_forward, chunk)]
                assert of_chunk == list(range(batches))
    found = simulate(stages, chunks, batches, forward, backward, slack=stages)
    case = PipelineCase(stages, batches, forward, backward, 0.0, chunks=chunks)
    expected = case.working + case.predict_bubble("interleaved")
    if batches % stages == 0:
        assert found == pytest.approx(expected)
        # Messages go on behind passes, but for those with which the pipeline fills and drains.
        latency = 0.01 * min(forward, backward) / chunks
        late = simulate(stages, chunks, batches, forward, backward, slack=stages, latency=latency)
        if batches > stages:
            assert late - found == pytest.approx(2 * (stages * chunks - 1) * latency)
    else:
        assert expected - 1e-9 <= found <= case.working + case.predict_bubble("1f1b") + 1e-9


def test_runs_made_of_checkpoints_hold_the_chunks_of_their_stages() -> None:
    c = config(pipeline=2, model_chunks=2, model={"layers": 6})
    first, last = [{name.split(".")[1] for name in names if "blocks" in name} for names in list_stages(c, 2)]
    assert first | last == set("012345") and not first & last
    assert "0" in first and "5" in last and max(first) > min(last)
