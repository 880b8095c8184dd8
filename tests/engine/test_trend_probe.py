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
    "tp2": {"tensor": 2},
    "tp2-sequence-full": {"tensor": 2, "sequence": True, "recompute": "full"},
    "pp2-full": {"pipeline": 2, "recompute": "full"},
    "context2": {"context": 2},
    "dp2": {"micro_batch": 2},
    "zero2": {"zero": 2, "micro_batch": 2},
    "zero3-selective": {"zero": 3, "micro_batch": 2, "recompute": "selective"},
    "zero3-small-buffers": {"zero": 3, "micro_batch": 2, "buffer": 5000},
    "bf16-pp2": {"precision": "bf16", "pipeline": 2},
    "fp16-tp2": {"precision": "fp16", "tensor": 2},
}


def look(cases: list[dict[str, Any]], world: int) -> list[dict[str, Any]]:
    """Some steps of each case, the last of them looked at."""
    trend_probe.STALE, trend_probe.QUERIES = STALE, recipe().model.sequence_length // 2
    found = []
    for parts in cases:
        engine, steps = engine_of(parts, world)
        blocks, seen, hooks = engine.probe.blocks, dict[str, Any](), hooks_of(engine)
        for number, micro_batches in enumerate(steps, start=1):
            if number == STEPS:
                engine.trends.watch()
                engine.measures_update = True
                if world == 1:
                    watch_plainly(blocks, seen)
                    seen["entropies"] = [predicted(engine, m) for m in micro_batches]
                    seen["tokens"] = torch.cat([m.tokens.flatten() for m in micro_batches])
            _, applied = engine.train_step(micro_batches, RATE, lambda m: m.finite)
            assert applied
        rows = engine.trends.collect(engine.flat_state(), engine.kept)
        hooks = hooks_of(engine) - hooks
        m = engine.measured
        found.append({
            "rows": rows, "seen": seen, "hooks": hooks, "kept": engine.kept, "entropies": m.entropies,
            "counts": m.counts,
        })  # fmt: skip
        engine.train_step(micro_batches, RATE, lambda m: False)
        assert engine.measured.entropies is None  # nobody looks
        assert not engine.trends.watching
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
            seen[f"{block.name} qk"] = whole_attention(*block.queries_and_keys(args[0]), None)

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
    ((found,),) = run_ranks(1, look, [{}], 1)
    return found


def test_one_process_equals_a_plain_calculation(one: dict[str, Any]) -> None:
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


def test_entropies_of_a_batch_are_those_of_a_plain_calculation(one: dict[str, Any]) -> None:
    """Of the model's predictions, and the counts of its tokens."""
    wanted = [entropy for batch in one["seen"]["entropies"] for entropy in batch]
    assert one["entropies"].tolist() == pytest.approx(wanted, rel=1e-4)
    size = recipe().model.vocab_size
    assert one["counts"].tolist() == torch.bincount(one["seen"]["tokens"], minlength=size).tolist()


@pytest.mark.slow
@pytest.mark.parametrize("group", [("tp2", "tp2-sequence-full", "pp2-full", "context2"),
                                   ("dp2", "zero2", "zero3-selective", "zero3-small-buffers"),
                                   ("bf16-pp2", "fp16-tp2")])  # fmt: skip
def test_every_layout_finds_the_same_on_every_rank(group: tuple[str, ...], one: dict[str, Any]) -> None:
    ranks = run_ranks(2, look, [LAYOUTS[name] for name in group], 2)
    assert [case["rows"] for case in ranks[0]] == [case["rows"] for case in ranks[1]]  # bit for bit
    first = ranks[0][0]["rows"]
    for name, case in zip(group, ranks[0], strict=True):
        exact, rows = LAYOUTS[name].get("precision") is None, case["rows"]
        assert rows.keys() == one["rows"].keys() and case["hooks"] == 0
        assert torch.equal(case["counts"], one["counts"])
        assert case["entropies"].tolist() == pytest.approx(
            one["entropies"].tolist(), rel=1e-3 if exact else 0.02
        )
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


def dropped(world: int) -> list[bool]:
    """A look at a refused step, then one at an applied step; whether each finds nothing of the other."""
    trend_probe.STALE, trend_probe.QUERIES = STALE, recipe().model.sequence_length // 2
    engine, steps = engine_of({}, world)
    engine.train_step(steps[0], RATE, lambda m: True)
    engine.trends.watch()
    engine.train_step(steps[1], RATE, lambda m: False)
    engine.trends.drop()
    hooks = hooks_of(engine)
    engine.train_step(steps[1], RATE, lambda m: True)  # a step nobody looks at
    engine.trends.watch()
    engine.measures_update = True
    engine.train_step(steps[2], RATE, lambda m: True)
    rows = engine.trends.collect(engine.flat_state(), engine.kept)
    return [hooks == 0, rows == look([{}], 1)[0]["rows"]]


def test_a_refused_step_leaves_no_trace() -> None:
    (found,) = run_ranks(1, dropped, 1)
    assert found == [True, True]


def prefixes(world: int) -> list[dict[str, Any]]:
    """A look at the outputs of a quarter of a sample, and those of the same block for all of it, cut."""
    length = recipe().model.sequence_length
    trend_probe.PREFIX = length // 4
    engine, steps = engine_of({}, world)
    whole: dict[str, Any] = {}

    def before(block: Any, args: Any) -> None:
        if block.name not in whole:
            whole[block.name] = [
                float(y[: length // 4].double().square().mean().sqrt())
                for y in block.outputs(args[0][:, :1], None, length)
            ]

    for block in engine.probe.blocks:
        block.register_forward_pre_hook(before)
    engine.trends.watch()
    engine.measures_update = True
    engine.train_step(steps[0], RATE, lambda m: True)
    rows = engine.trends.collect(engine.flat_state(), engine.kept)
    return [{"got": [rows[b][k] for k in trend_probe.OUTPUTS], "whole": whole[b]} for b in whole]


def test_outputs_are_those_of_the_first_tokens() -> None:
    (blocks,) = run_ranks(1, prefixes, 1)
    assert len(blocks) == 2
    for block in blocks:
        assert block["got"] == pytest.approx(block["whole"], rel=1e-4)


def test_positions_are_evenly_spaced_with_the_last_one() -> None:
    assert choose_predicted_positions(65) == [20, 42, 64] and choose_predicted_positions(64) == [31, 63]
    assert space_evenly(8, 4) == [1, 3, 5, 7] and space_evenly(3, 4) == [0, 1, 2]
    for length in (513, 1000, 131072):
        at = space_evenly(length, 512)
        gaps = {b - a for a, b in pairwise(at)}
        assert len(at) == 512 and at[-1] == length - 1 and max(gaps) - min(gaps) <= 1


def entries(world: int) -> list[int]:
    """How often the tally is added to for the attention of a look's micro-batches, and the number of blocks."""
    engine, steps = engine_of({"micro_batch": 2}, world)
    engine.trends.watch()
    engine.train_step(steps[0], RATE, lambda m: True)
    kind, kinds = trend_probe.KINDS.index("attention"), len(trend_probe.KINDS)
    cells = [cell for cell in engine.trends.tally._cells if cell % kinds == kind]
    return [len(cells), len(engine.probe.blocks)]


def test_the_tally_is_added_to_once_for_each_block() -> None:
    ((found, blocks),) = run_ranks(1, entries, 1)
    assert found == blocks == 2


def shared(world: int) -> int:
    """How often the pieces of the gradients are made at a step that both probes watch."""
    engine, steps = engine_of({}, world)
    made, real = list[int](), engine.zero.gradients

    def gradients(fragments: Any) -> Any:
        made.append(len(fragments))
        return real(fragments)

    engine.zero.gradients = gradients
    engine.trends.watch()
    engine.probe.watch()
    engine.train_step(steps[0], RATE, lambda m: True)
    return made.count(len(engine.flat_state().fragments))


def test_both_probes_share_the_pieces_of_the_gradients() -> None:
    assert run_ranks(1, shared, 1) == [1]


def young(world: int, model: dict[str, Any], updates: list[int]) -> list[list[float]]:
    """What blocks add when so many updates were applied."""
    found = []
    engine, steps = engine_of({"model": model}, world)
    for number in updates:
        engine.updates = number
        engine.trends.watch()
        engine.measures_update = True
        engine.train_step(steps[0], 0.0, lambda m: True)
        rows = engine.trends.collect(engine.flat_state(), engine.kept)
        found.append([row["added"] for row in rows.values() if "added" in row])
    return found


def test_a_young_branch_does_not_fade() -> None:
    """norms=branch scales branches up from 0 at the start of a run."""
    model = {"norms": "branch", "branch_steps": 1000}
    ((none, first, old),) = run_ranks(1, young, 1, model, [0, 10, 1000])
    assert len(first) == 2 and all(math.isfinite(added) and added > 0.01 for added in none)
    # The first block's input has not been normed: the norm of the sum changes it more than the branch does.
    assert first[1] == pytest.approx(old[1], rel=0.5)


def test_a_row_is_stale_by_its_own_second_moment() -> None:
    """A table of three rows: one whose gradient is usual, one that was never seen before, one without a gradient."""
    from megastable.engine.flatstate import FlatState
    from megastable.engine.layer_stats import LayerTally
    from megastable.parallel.fragments import Fragment

    shape, name = (3, 4), "embedding.weight"
    f = Fragment(
        name=name, dim=0, sections=(3,), shape=shape, group=0, offset=0, start=0, numel=12, counted=True
    )
    master = torch.nn.Parameter(torch.ones(12))
    optimizer = torch.optim.AdamW([master], betas=(0.9, 0.999))
    v = torch.tensor([1.0, 1e-3, 1.0]).repeat_interleave(4)
    unbias = 1 - 0.999**50
    optimizer.state[master] = {
        "step": torch.tensor(50.0),
        "exp_avg": torch.zeros(12),
        "exp_avg_sq": v * unbias,
    }
    flat = FlatState([master], optimizer, [f], None, [optimizer.param_groups[0]])
    probe: Any = trend_probe.TrendProbe.__new__(trend_probe.TrendProbe)
    probe.tally, probe._rows, probe._hooks = (
        LayerTally([name], torch.device("cpu"), trend_probe.KINDS),
        {},
        [],
    )
    # Unscaled, the square of the first is 144 times its second moment, but clipped to a half 36 times; of the second
    # 1000 times.
    gradient = torch.tensor([12.0, 2.0, 0.0]).repeat_interleave(4) * 8
    probe.gradients(flat, {(0, 0): gradient}, 8.0)
    probe._add(name, "weight", master)
    probe._stale(flat, f, 0.5)
    totals = torch.zeros(3, len(trend_probe.KINDS), dtype=torch.float64)
    for cell, count, total in zip(probe.tally._cells, probe.tally._counts, probe.tally._totals, strict=True):
        totals[0, cell] += total
        totals[1, cell] += count
    assert trend_probe._row(totals)["stale"] == 0.5
