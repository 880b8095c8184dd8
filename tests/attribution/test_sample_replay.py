"""What the laboratory measures is what autograd says of each sample, under every layout; and it leaves no trace."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from megastable.attribution.sample_replay import Known, Laboratory, Trained, collect_harmless
from megastable.config.stability import AttributionConfig
from megastable.config.tree import RunConfig
from megastable.data.corpora import open_corpora
from megastable.data.loader import RankPart, segments_of
from megastable.data.order import Order, OrderedCorpus
from megastable.data.skip_ledger import Ledger, sample_entries
from megastable.data.skips import Selection
from megastable.model.gpt import GPT
from megastable.parallel.layout import Layout
from megastable.parallel.sharding import placement_of
from megastable.parallel.topology import TensorParallel
from megastable_guard.actions import Cause
from megastable_guard.conclusion import Conclusion
from tests import reference
from tests.conftest import VOCABULARY, tiny
from tests.distributed import run_ranks
from tests.patience import PATIENCE

STEPS, RATE, BATCH = 2, 3e-3, 8
ASKED = [
    [5],
    [40, 3, 3, 17, 0],
    list(range(30, 43)),
    list(range(8)),
    [],
]  # most of them no multiple of anything
ALONE = [3, 40, 21]
REGION_END = 151

ONE: dict[str, dict[str, Any]] = {
    "fp32": {"train": {"micro_batch": 2}},
    "fp32-whole": {"train": {"micro_batch": 8}},
}
TWO: dict[str, dict[str, Any]] = {
    "fp32-dp2": {"train": {"micro_batch": 2}},
    "fp32-zero3": {"train": {"micro_batch": 2}, "parallel": {"zero": 3}},
    "fp32-tp2": {"parallel": {"tensor": 2}},
    "fp32-pp2": {"parallel": {"pipeline": 2}},
    "bf16-dp2": {"train": {"micro_batch": 2}, "precision": {"kind": "bf16"}},
    "bf16-pp2": {"precision": {"kind": "bf16"}, "parallel": {"pipeline": 2}},
    "fp16-dp2": {"precision": {"kind": "fp16"}},
}


# Where all kinds of examinations are tried. They differ in what rank 0 makes of the numbers: elsewhere two are enough.
THOROUGH = ("fp32", "fp32-dp2", "fp32-pp2")


def config(corpus: Path, **parts: Any) -> RunConfig:
    train = {"global_batch": BATCH, "micro_batch": 4, "steps": 10} | parts.pop("train", {})
    model = {"vocab_size": VOCABULARY, "init_std": 0.1}
    return tiny(corpus, Path("none"), **{"precision": {"kind": "fp32"}, **parts}, train=train, model=model)


def concluded(laboratory: Any, thorough: bool) -> dict[str, Conclusion]:
    """Of steps like those before, with few of those recorded, next to better ones, and of more than are looked at;
    and of a region that goes on. The first and the last where it is not `thorough`."""
    from megastable.attribution.examination import examine_window
    from megastable.attribution.sample_replay import Trained
    from megastable.data.skips import Skips

    every = np.arange(BATCH * 16).reshape(16, BATCH)
    losses = laboratory.measure_losses(every.ravel()).reshape(16, BATCH)

    def steps(first: int, end: int, off: float = 0.0) -> list[Trained]:
        return [Trained(i, every[i], losses[i] + off, True) for i in range(first, end)]

    window, history = steps(14, 16), steps(0, 14)
    asked = {"recorded": (window, history)}
    if thorough:
        asked["measured"] = window, steps(12, 14, -5.0)
        asked["worse"] = window, steps(0, 14, -5.0)
        asked["long"] = window * 9, history
    found = {
        name: examine_window(laboratory, w, h, 14 * BATCH, Skips.from_ranges([]))
        for name, (w, h) in asked.items()
    }
    measure = laboratory.measure_losses
    laboratory.measure_losses = lambda positions: (
        measure(positions) + np.where((positions >= 114) & (positions < REGION_END), 5.0, 0.0)
    )
    grown = examine_window(laboratory, window, history, 14 * BATCH, Skips.from_ranges([]))
    vars(laboratory).pop("measure_losses")
    return {**found, "grown": grown}


def undecided(laboratory: Any) -> tuple[Conclusion, int, str]:
    """What all ranks conclude where the last one's numbers are off by a rounding error, and the bound lies in between;
    how often each measured; and what they are told of an error of rank 0 alone."""
    import torch.distributed as dist

    from megastable.base.errors import DataError

    last, count, exact = dist.get_rank() == dist.get_world_size() - 1, 0, laboratory.measure_losses

    def losses(positions: np.ndarray) -> np.ndarray:
        nonlocal count
        count += 1
        exact(positions)
        return np.full(positions.size, 3.0 + 1e-12 * (last and dist.get_world_size() > 1))

    def work(lab: Any) -> Any:
        while lab.measure_losses(np.arange(3)).mean() > 3.0 and lab.batch:  # for ever, on the last rank
            pass
        return Conclusion(
            Cause.DATA, [lab.read_tokens(np.arange(3)).shape[0]], [], repr(lab.measure_losses(np.arange(1)))
        )

    def fail(lab: Any) -> Any:
        lab.measure_losses(np.arange(3))
        raise DataError("nothing is left")

    laboratory.measure_losses = losses
    try:
        found = laboratory.run_on_rank0(work)
        with pytest.raises(DataError) as told:
            laboratory.run_on_rank0(fail)
    finally:
        vars(laboratory).pop("measure_losses")
    return found, count, str(told.value)


def torn(loader: Any, laboratory: Any) -> list[str]:
    """What every rank is told when the last one cannot read."""
    import torch.distributed as dist

    from megastable.base.errors import DataError

    def read(positions: Any) -> Any:
        raise DataError("part-0.bin is gone")

    if dist.get_rank() == dist.get_world_size() - 1:
        loader.read_micro_batches = read
    told = []
    for ask in (laboratory.measure_losses, laboratory.measure_gradient_norm):
        try:
            ask(np.arange(3))
        except DataError as error:
            told.append(str(error))
    vars(loader).pop("read_micro_batches", None)
    return told


def measure(configs: list[tuple[RunConfig, bool]], world: int) -> list[dict[str, Any]]:
    """Of each: what the laboratory found after two steps, and the state before, after and a step later."""
    import torch.distributed as dist

    from megastable.attribution.sample_replay import Laboratory
    from megastable.config import deepspeed_json
    from megastable.data.loader import Loader
    from megastable.data.skips import Skips
    from megastable.engine.engine import Engine
    from megastable.parallel.topology import Topology

    def state(engine: Any) -> dict[str, Any]:
        found = {name: t.clone() for name, t in engine.optimizer_state().items()}
        engine.zero.wait_for_weights()
        for index, parameter in enumerate(engine.ds.module.parameters()):
            found[f"low/{index}"] = getattr(parameter, "ds_tensor", parameter).detach().clone()
        return found | {"counters": engine.read_counters(), "random": torch.get_rng_state()}

    def run(c: RunConfig, measuring: bool, thorough: bool = False) -> dict[str, Any]:
        torch.manual_seed(1)
        layout = Layout(
            c.parallel.tensor, c.parallel.pipeline, deepspeed_json.size_of_data_parallel(c, world)
        )
        topology = Topology(layout, dist.get_rank(), timeout=PATIENCE)
        engine = Engine(c, deepspeed_json.build_deepspeed_json(c, world), topology)
        source = open_corpora(c.data.corpora, c.model.sequence_length, c.run.seed).train
        found: dict[str, Any] = {}
        with Loader(
            source, Skips.from_ranges([]), 0, BATCH,
            RankPart(c.train.micro_batch, topology.data_rank, layout.data), c.data,
        ) as loader:  # fmt: skip

            def step() -> Any:
                return engine.train_step(next(loader).micro_batches, RATE, lambda m: m.finite)[0]

            for _ in range(STEPS):
                step()
            if measuring:
                laboratory = Laboratory(c.stability.attribution, engine, loader)
                found["before"], cursor = state(engine), loader.cursor
                found["losses"] = [laboratory.measure_losses(np.array(p, dtype=np.int64)) for p in ASKED]
                found["norms"] = [laboratory.measure_gradient_norm(np.array([p])) for p in ALONE]
                found["concluded"] = concluded(laboratory, thorough)
                found["undecided"] = undecided(laboratory)
                found["torn"] = torn(loader, laboratory)
                found["after"] = state(engine)
                assert loader.cursor == cursor
            last = step()
            found["last"] = (last.losses.tolist(), last.grad_norm)
            found["final"] = state(engine)
        found["wrapper"] = type(engine.optimizer).__name__
        return found

    return [run(c, True, thorough) | {"undisturbed": run(c, False)} for c, thorough in configs]


@pytest.fixture(scope="module")
def one(corpus: Path) -> dict[str, list[dict[str, Any]]]:
    return measured(corpus, ONE, 1)


@pytest.fixture(scope="module")
def two(corpus: Path) -> dict[str, list[dict[str, Any]]]:
    return measured(corpus, TWO, 2)


def measured(corpus: Path, cases: dict[str, dict[str, Any]], world: int) -> dict[str, list[dict[str, Any]]]:
    """By case, what each rank found."""
    configs = [(config(corpus, **parts), name in THOROUGH) for name, parts in cases.items()]
    ranks = run_ranks(world, measure, configs, world)
    return {name: [rank[index] for rank in ranks] for index, name in enumerate(cases)}


@cache
def expected(corpus: Path) -> tuple[list[list[float]], list[float]]:
    """The same after two steps of a plain GPT, by autograd."""
    c = config(corpus)
    source = open_corpora(c.data.corpora, c.model.sequence_length, c.run.seed).train
    shape = reference.Shape(2, 4, 2, 8, VOCABULARY, z=c.model.z_loss)
    model = GPT(c.model, TensorParallel(), "none", c.run.seed)
    weights = {placement_of(p).name: p.detach() for p in model.parameters()}

    def batch(positions: list[int]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
        samples = source.read_samples(np.array(positions))
        segments = segments_of(samples[:, :-1], source.eod) if c.data.keep_documents_apart else None
        return (
            torch.from_numpy(samples[:, :-1]), torch.from_numpy(samples[:, 1:]),
            None if segments is None else torch.from_numpy(segments),
        )  # fmt: skip

    batches = [batch(list(range(BATCH * i, BATCH * (i + 1)))) for i in range(STEPS)]
    _, _, optimizer = reference.train(weights, shape, batches, [RATE] * STEPS)
    asked = sorted({p for positions in ASKED for p in positions})
    tokens, labels, segments = batch(asked)
    with torch.no_grad():
        logits = reference.logits(optimizer.w, shape, tokens, segments)
    every = torch.nn.functional.cross_entropy(logits.transpose(1, 2), labels, reduction="none").mean(1)
    losses = dict(zip(asked, every.tolist(), strict=True))
    norms = []
    for position in ALONE:
        tokens, labels, segments = batch([position])
        leaves = {name: w.detach().clone().requires_grad_() for name, w in optimizer.w.items()}
        objective, _ = reference.losses(reference.logits(leaves, shape, tokens, segments), labels, shape.z)
        gradients = torch.autograd.grad(objective, list(leaves.values()))
        norms.append(float(torch.stack([g.double().square().sum() for g in gradients]).sum().sqrt()))
    return [[losses[p] for p in positions] for positions in ASKED], norms


def check_numbers(found: dict[str, list[dict[str, Any]]], corpus: Path) -> None:
    losses, norms = expected(corpus)
    for name, ranks in found.items():
        # Two steps of Adam enlarge what rounding leaves; in bf16 the samples are still told apart.
        tolerance = 1e-4 if name.startswith("fp32") else 0.05
        for got, wanted in zip(ranks[0]["losses"], losses, strict=True):
            assert got.dtype == np.float64
            assert got.tolist() == pytest.approx(wanted, rel=tolerance), name
        assert ranks[0]["norms"] == pytest.approx(norms, rel=tolerance), name
        for other in ranks[1:]:
            assert other["norms"] == ranks[0]["norms"], name
            assert all(map(np.array_equal, other["losses"], ranks[0]["losses"])), name
    assert max(norms) > 1.2 * min(norms) and max(losses[2]) > 1.05 * min(losses[2])  # samples do differ


def check_conclusions(found: dict[str, list[dict[str, Any]]]) -> None:
    """No sample is bad among equals, nor where all that is ahead is as bad; a bad region is found to its end, and not
    beyond it; every rank concludes alike."""
    for name, ranks in found.items():
        said = dict(ranks[0]["concluded"])
        assert len(said) == (5 if name in THOROUGH else 2), name
        grown = said.pop("grown")
        # "worse", too: as bad as what was never trained on is the state, whatever was recorded of it.
        for equal in said.values():
            assert (equal.cause, equal.bad) == (Cause.STATE, []), name
        assert "of the 2 steps since the onset" in said["recorded"].reason
        if name in THOROUGH:
            assert "of the first 16 of 18 steps since the onset" in said["long"].reason
            assert all(abs(s.z) < 10 for s in said["measured"].suspects), name
        assert grown.cause is Cause.DATA and grown.bad == [*range(114, REGION_END)], name
        assert (grown.region.first, grown.region.end) == (114, REGION_END)
        assert [s.gradient_norm is not None for s in grown.suspects[:3]] == [True, True, False], name
        for rank in ranks:
            found, count, told = rank["undecided"]
            assert (found.bad, found.reason) == ([3], "array([3.])") and count == 3, name
            assert told == "nothing is left", name
            assert repr(rank["concluded"]) == repr(ranks[0]["concluded"]), name
            assert rank["torn"] == ["part-0.bin is gone"] * 2, name


def check_traces(found: dict[str, list[dict[str, Any]]]) -> None:
    """Bit for bit: state, counters and random numbers, and the step after it."""
    for name, ranks in found.items():
        for rank in ranks:
            for one, other in (("before", "after"), ("final", "undisturbed")):
                before, after = rank[one], rank[other] if other == "after" else rank[other]["final"]
                assert before.keys() == after.keys() and len(before) > 12
                for key, value in before.items():
                    same = torch.equal(value, after[key]) if torch.is_tensor(value) else value == after[key]
                    assert same, f"{name}: {key} of {one}"
            assert rank["last"] == rank["undisturbed"]["last"], name
            assert any(
                not torch.equal(rank["after"][k], rank["final"][k]) for k in rank["after"] if "low" in k
            )


def test_on_one_rank(one: dict[str, list[dict[str, Any]]], corpus: Path) -> None:
    check_numbers(one, corpus)
    check_conclusions(one)
    check_traces(one)


@pytest.mark.slow
def test_on_two_ranks(two: dict[str, list[dict[str, Any]]], corpus: Path) -> None:
    check_numbers(two, corpus)
    check_conclusions(two)
    check_traces(two)
    wrappers = {ranks[0]["wrapper"] for ranks in two.values()}
    assert wrappers == {"BF16_Optimizer", "DeepSpeedZeroOptimizer", "DeepSpeedZeroOptimizer_Stage3"}


def test_what_was_found_bad_since_is_no_measure_of_harmless_samples() -> None:
    """A sample that was trained on in this epoch, and found bad when it came again."""
    order = Order([OrderedCorpus("web", 32 * 20 + 1, 1.0, "f")], 32, seed=0)
    again = order.positions_of(0, [order.locate_sample(3).sequence, order.locate_sample(9).sequence], 20, 40)
    selection = Selection(order, Ledger(sample_entries(order, again, "bad")).exclusions)
    steps = [Trained(n, np.arange(8 * n, 8 * n + 8), np.arange(8 * n, 8 * n + 8) / 10, True) for n in (0, 1)]
    positions, losses = collect_harmless(steps, selection)
    assert positions.tolist() == [p for p in range(16) if p not in (3, 9)]
    assert losses.tolist() == [p / 10 for p in positions.tolist()]


@pytest.mark.parametrize(
    ("gradients", "known", "measured"), [(16, 60, 4), (3, 60, 2), (1, 60, 0), (0, 60, 0), (16, 40, 0)]
)
def test_the_gradients_of_a_few_batches_are_measured_the_refused_ones_first(
    gradients: int, known: int, measured: int
) -> None:
    """Nothing where too few harmless samples are known, or none may be measured. The last two batches are refused."""
    config = AttributionConfig(gradients=gradients)
    laboratory: Any = Laboratory(config, None, SimpleNamespace(batch=16))  # type: ignore[arg-type]
    asked = list[int]()

    def gradient_norm(positions: np.ndarray) -> float:
        asked.append(int(positions[0]))
        return 1.6 if positions[0] == 1064 else 1.0

    laboratory.measure_gradient_norm = gradient_norm
    harmless = Known(np.arange(known), np.full(known, 3.0), np.zeros(known, np.int64))
    steps = [Trained(n, 1000 + 16 * n + np.arange(16), np.full(16, 3.0), n < 4) for n in range(6)]
    found = laboratory.find_extraordinary(steps, harmless)
    firsts = [1064, 1080, 1000, 1016][:measured]
    assert asked == ([known - 16, *firsts] if measured else [])
    assert (found is None) == (not measured)
    assert found is None or (found.positions.tolist(), found.ratio) == ([*range(1064, 1080)], 1.6)
    laboratory.measure_gradient_norm = lambda positions: np.nan if positions[0] == 1064 else 1.0
    assert laboratory.find_extraordinary(steps, harmless) is None
