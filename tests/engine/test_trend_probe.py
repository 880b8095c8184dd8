"""A light look finds what a plain calculation does, the same under every layout and on every rank."""

from __future__ import annotations

import math
from itertools import pairwise
from typing import Any

import pytest
import torch

from megastable.engine import trend_probe
from megastable.model.sizes import choose_predicted_positions, space_evenly
from tests.distributed import run_ranks
from tests.engine.test_layer_stats import (
    CLIP,
    RATE,
    STEPS,
    engine_of,
    hooks_of,
    plain,
    recipe,
    whole_attention,
)

ATTENDED = "entropy", "focus", "logit", *trend_probe.OUTPUTS, "added"
STALE = 1.5  # rows above it are some of those of random tokens
LAYOUTS: dict[str, dict[str, Any]] = {
    "tp2-sequence-full": {"tensor": 2, "sequence": True, "recompute": "full"},
    "pp2-full": {"pipeline": 2, "recompute": "full"},
    "context2": {"context": 2},
    "ring2": {"context": 2, "context_by": "ring"},
    "zero2": {"zero": 2, "micro_batch": 2},
    "zero3-selective-small-buffers": {"zero": 3, "micro_batch": 2, "recompute": "selective", "buffer": 5000},
    "bf16-pp2": {"precision": "bf16", "pipeline": 2},
    "fp16-tp2": {"precision": "fp16", "tensor": 2},
}


def look(cases: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Some steps of each case, the last of them looked at."""
    import torch.distributed as dist

    trend_probe.STALE, trend_probe.QUERIES = STALE, recipe().model.sequence_length // 2
    found = []
    for parts in cases:
        engine, steps = engine_of(parts)
        blocks, seen, hooks = engine.probe.blocks, dict[str, Any](), hooks_of(engine)
        for number, micro_batches in enumerate(steps, start=1):
            if number == STEPS:
                engine.trends.watch_step()
                engine.measures_update = True
                if dist.get_world_size() == 1:
                    watch_plainly(blocks, seen)
                    seen["entropies"] = [predicted(engine, m) for m in micro_batches]
                    seen["tokens"] = torch.cat([m.tokens.flatten() for m in micro_batches])
            _, applied = engine.train_step(micro_batches, RATE, lambda m: m.finite)
            assert applied
        rows = engine.trends.collect_look(engine.flat_state(), engine.kept)
        hooks, m = hooks_of(engine) - hooks, engine.measured
        found.append({
            "rows": rows, "seen": seen, "hooks": hooks, "kept": engine.kept, "entropies": m.entropies,
            "counts": m.counts,
        })  # fmt: skip
        engine.train_step(micro_batches, RATE, lambda m: False)
        assert engine.measured.entropies is None and not engine.trends.watching  # nobody looks
    return found


@torch.no_grad()
def predicted(engine: Any, batch: Any) -> list[float]:
    """The mean entropy of the predictions of each sample, by plain torch in fp64."""
    logits = engine.ds.module(batch.tokens)[..., : recipe().model.vocab_size].double()[
        choose_predicted_positions(recipe().model.sequence_length)
    ]
    entropies = torch.distributions.Categorical(logits=logits).entropy()
    return entropies.mean(0).tolist()


def watch_plainly(blocks: list[Any], seen: dict[str, Any]) -> None:
    """The whole first micro-batch of every block: its attention, and what it adds."""

    def before(block: Any, args: Any) -> None:
        if f"{block.name} qk" not in seen:
            seen[f"{block.name} qk"] = whole_attention(*block.queries_and_keys(args[0])[:2], None)

    def after(block: Any, args: Any, y: Any) -> None:
        if block.name not in seen:
            seen[block.name] = (args[0].detach().clone(), y.detach().clone())

    def output(kind: str, block: Any) -> Any:
        def keep(module: Any, args: Any, y: Any) -> None:
            if y.shape[1] > 1:  # not the probe's own
                seen.setdefault(f"{block.name} {kind}", y.detach().clone())

        return keep

    for block in blocks:
        products = block.attention.qkv, block.attention.out, block.mlp.down
        for kind, module in zip(trend_probe.OUTPUTS, products, strict=True):
            module.register_forward_hook(output(kind, block))
        block.register_forward_pre_hook(before)
        block.register_forward_hook(after)


@pytest.fixture(scope="module")
def one() -> dict[str, Any]:
    """Of one process."""
    ((found,),) = run_ranks(1, look, [{}])
    return found


def test_collect_equals_a_plain_calculation(one: dict[str, Any]) -> None:
    rows, (wanted, sizes) = one["rows"], plain(False, False)
    assert list(rows) == list(wanted.layers) and one["kept"] == pytest.approx(
        CLIP / wanted.overall["grad_norm"], rel=1e-3
    )
    for name, row in rows.items():
        if name in sizes:
            of, n = wanted.layers[name], sizes[name]
            assert row["numel"] == n
            assert row["weight"] == pytest.approx(of["weight_rms"] * math.sqrt(n), rel=1e-4)
            assert row["gradient"] == pytest.approx(of["gradient_rms"] * math.sqrt(n), rel=1e-4)
            assert row["update"] / row["weight"] == pytest.approx(of["update_ratio"], rel=1e-3)
            assert ("stale" in row) == (name in trend_probe.TABLES)
            continue
        # Of every other query, with the last one.
        entropy, highest = (x[..., 1::2] for x in one["seen"][f"{name} qk"])
        x, y = (t[:, :1].double() for t in one["seen"][name])
        assert row["entropy"] == pytest.approx(float(entropy[0].mean()), rel=1e-4)
        assert row["logit"] == pytest.approx(float(highest[0].max()), rel=1e-4)
        assert row["added"] == pytest.approx(float((y - x).norm() / x.norm()), rel=1e-4)
        seen = torch.arange(1, recipe().model.sequence_length + 1).double()[1::2]
        assert row["focus"] == pytest.approx(float((seen.log() - entropy[0]).mean()), rel=1e-4)
        for kind in trend_probe.OUTPUTS:
            wanted_rms = one["seen"][f"{name} {kind}"][:, :1].double().square().mean().sqrt()
            assert row[kind] == pytest.approx(float(wanted_rms), rel=1e-4)
    assert 0 < rows["embedding.weight"]["stale"] < 1 and one["hooks"] == 2 * 2  # those of this test


def test_measured_entropies_are_those_of_a_plain_calculation(one: dict[str, Any]) -> None:
    """Of the model's predictions, and the counts of its tokens."""
    wanted = [entropy for batch in one["seen"]["entropies"] for entropy in batch]
    assert one["entropies"].tolist() == pytest.approx(wanted, rel=1e-4)
    size = recipe().model.vocab_size
    assert one["counts"].tolist() == torch.bincount(one["seen"]["tokens"], minlength=size).tolist()


@pytest.mark.slow
def test_collect_finds_the_same_in_every_layout_and_on_every_rank(one: dict[str, Any]) -> None:
    ranks = run_ranks(2, look, list(LAYOUTS.values()))
    assert [case["rows"] for case in ranks[0]] == [case["rows"] for case in ranks[1]]  # bit for bit
    first = ranks[0][list(LAYOUTS).index("zero2")]["rows"]
    for name, case in zip(LAYOUTS, ranks[0], strict=True):
        exact, rows = LAYOUTS[name].get("precision") is None, case["rows"]
        assert rows.keys() == one["rows"].keys() and case["hooks"] == 0
        assert torch.equal(case["counts"], one["counts"])
        # Of parts of a sample each has evenly spaced positions of its own.
        near = 1e-3 if exact and name not in ("context2", "ring2") else 0.02
        assert case["entropies"].tolist() == pytest.approx(one["entropies"].tolist(), rel=near)
        for row, wanted in one["rows"].items():
            wanted = dict(wanted)
            got = {key: value for key, value in rows[row].items() if key not in (*ATTENDED, "stale")}
            kept = {key: value for key, value in wanted.items() if key in got}
            assert got == pytest.approx(kept, rel=1e-3 if exact else 0.1), f"{name}: {row}"
            # A row of a table may be cut by a rank's part; of two data ranks each sees a sample of its own.
            assert abs(rows[row].get("stale", 0) - wanted.get("stale", 0)) <= (0.05 if exact else 0.15), name
            for key in ATTENDED:
                if key in wanted:
                    same = first[row][key] if "micro_batch" in LAYOUTS[name] else wanted[key]
                    assert rows[row][key] == pytest.approx(same, rel=1e-3 if exact else 0.05), (
                        f"{name}: {row} {key}"
                    )


def test_space_evenly_has_the_last_one() -> None:
    assert choose_predicted_positions(65) == [20, 42, 64] and choose_predicted_positions(64) == [31, 63]
    assert space_evenly(8, 4) == [1, 3, 5, 7] and space_evenly(3, 4) == [0, 1, 2]
    for length in (513, 1000, 131072):
        at = space_evenly(length, 512)
        gaps = {b - a for a, b in pairwise(at)}
        assert len(at) == 512 and at[-1] == length - 1 and max(gaps) - min(gaps) <= 1
