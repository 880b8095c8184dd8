"""The validation losses of a run: of its blend and of every corpus, in every layout those of the plain model."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from megastable.checkpoint.plain import load_plain
from megastable.config.tree import RunConfig
from megastable.data.blends import read_blends
from megastable.data.corpora import Corpora, open_corpora
from megastable.data.held_out import corpus_samples
from megastable.data.manifest import Manifest, Stream
from megastable.data.order import Order, OrderedCorpus
from megastable.data.source import Source
from megastable.model.loss import cross_entropy
from megastable.run.directory import RunDirectory
from megastable.run.log import RunLog
from megastable.training.data_order import DataOrder
from tests.conftest import LENGTH, tiny, write_corpus
from tests.distributed import run_ranks

STEPS = 4
SAMPLES = 31  # no multiple of two ranks' micro-batches of 2
EACH, SMALL = 11, 6  # of a corpus: 31 over 3 corpora; a small corpus has no more
WEIGHTS = {"big": 0.9, "medium": 0.08, "small": 0.02}
LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "one": (1, {}),
    "dp3": (3, {}),
    "dp2-zero3": (2, {"zero": 3}),
    "tp2": (2, {"tensor": 2, "sequence": True}),
    "pp2": (2, {"pipeline": 2}),
}


def train(config: RunConfig) -> int:
    from megastable.train import train

    return train(config, Path("recipe.yaml"))


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Corpora with many validation samples, with few, or with none."""
    folder = tmp_path_factory.mktemp("data")
    for seed, name in enumerate(("big", "medium", "small", "later", "plain")):
        share = {"small": (2 * LENGTH + 1) / 20_000, "plain": 0.0}.get(name, 0.1)
        write_corpus(folder / name, 20_000, seed, share)
    small = Manifest.load(folder / "small").tokens("validation")
    assert (small - 1) // LENGTH == SMALL
    return folder


def config(
    data: Path, run: Path, weights: dict[str, float], parallel: dict[str, Any], **parts: Any
) -> RunConfig:
    corpora = [{"path": str(data / name), "weight": weight} for name, weight in weights.items()]
    batch = {"steps": STEPS, "global_batch": 12, "micro_batch": 2, "eval_samples": SAMPLES}
    return tiny(
        data, run, parallel=parallel, data={"corpora": corpora}, precision={"kind": "fp32"},
        train=batch | parts.pop("train", {}), checkpoint={"interval": 2}, **parts,
    )  # fmt: skip


def evaluated(run: Path) -> list[dict[str, Any]]:
    events = [json.loads(line) for line in (run / "journal.jsonl").read_text().splitlines()]
    return [event for event in events if event["event"] == "evaluated"]


def warnings(run: Path) -> list[str]:
    events = [json.loads(line) for line in (run / "journal.jsonl").read_text().splitlines()]
    return [
        event["text"] for event in events if event["event"] == "warning" and "no validation" in event["text"]
    ]


def plain_loss(run: Path, step: int, tokens: Any) -> float:
    """By one process, one model, one batch."""
    model = load_plain(run / f"checkpoints/step-{step}")
    ids = torch.from_numpy(tokens)
    with torch.no_grad():
        return float(cross_entropy(model(ids[:, :-1]), ids[:, 1:], model.vocabulary)[0].mean())


def alone(data: Path, name: str, count: int) -> Any:
    """The first samples of a corpus that is the only one: int64 [n, L + 1]."""
    manifest = Manifest.load(data / name)
    stream = Stream(data / name, manifest, "validation")
    order = Order([OrderedCorpus(name, stream.tokens, 1.0)], LENGTH, 1234)
    return Source(order, [stream], 0).samples(np.arange(min(count, order.sequences[0])))


def opened(made: RunConfig) -> Corpora:
    return open_corpora(made.data.corpora, made.model.sequence_length, made.run.seed)


@pytest.mark.quick("one")
@pytest.mark.parametrize("layout", LAYOUTS)
def test_losses_are_those_of_the_plain_model_on_the_same_samples(
    data: Path, tmp_path: Path, layout: str
) -> None:
    world, parallel = LAYOUTS[layout]
    made = config(data, tmp_path / "run", WEIGHTS, parallel)
    assert run_ranks(world, train, made) == [0] * world
    (found,) = evaluated(tmp_path / "run")
    source = opened(made).validation
    assert source is not None
    expected = plain_loss(tmp_path / "run", STEPS, source.samples(np.arange(SAMPLES)))
    assert found["loss"] == pytest.approx(expected, abs=1e-6) and found["samples"] == SAMPLES
    assert {name: told["samples"] for name, told in found["corpora"].items()} == {
        "big": EACH,
        "medium": EACH,
        "small": SMALL,
    }
    for name, told in found["corpora"].items():
        assert told["loss"] == pytest.approx(
            plain_loss(tmp_path / "run", STEPS, alone(data, name, EACH)), abs=1e-6
        )
    summary = json.loads((tmp_path / "run/summary.json").read_text())
    assert summary["val_loss"] == found["loss"]
    assert summary["val_loss_by_corpus"] == {name: told["loss"] for name, told in found["corpora"].items()}


@pytest.mark.slow
def test_the_overall_loss_is_the_same_number_with_and_without_those_of_corpora(
    data: Path, tmp_path: Path
) -> None:
    losses = {}
    for count in (0, None, 20):
        run = tmp_path / str(count)
        made = config(data, run, WEIGHTS, {}, train={"eval_samples_per_corpus": count, "eval_interval": 2})
        run_ranks(1, train, made)
        found = evaluated(run)
        losses[count] = [event["loss"] for event in found]
        assert [bool(event.get("corpora")) for event in found] == [count != 0] * 2
    assert losses[0] == losses[None] == losses[20] and len(losses[0]) == 2


@pytest.mark.slow
def test_one_corpus_has_no_second_loss(data: Path, tmp_path: Path) -> None:
    run_ranks(1, train, config(data, tmp_path / "run", {"big": 1.0}, {}))
    (found,) = evaluated(tmp_path / "run")
    assert "corpora" not in found
    assert json.loads((tmp_path / "run/summary.json").read_text())["val_loss_by_corpus"] == {}


@pytest.mark.slow
def test_corpora_that_come_and_go_leave_the_samples_of_the_others_as_they_are(
    data: Path, tmp_path: Path
) -> None:
    there = shutil.copytree(data, tmp_path / "data")
    run = tmp_path / "run"

    def go_on(steps: int, *names: str) -> dict[str, Any]:
        weights = {name: WEIGHTS.get(name, 0.5) for name in names}
        run_ranks(2, train, config(there, run, weights, {}, train={"steps": steps}))
        return evaluated(run)[-1]

    first = go_on(2, "big", "medium", "plain")
    assert set(first["corpora"]) == {"big", "medium"} and warnings(run) == []
    # A corpus comes, and one goes whose text is still there: it stays a part of the overall loss.
    second = go_on(4, "big", "plain", "later")
    assert {name: told["samples"] for name, told in second["corpora"].items()} == dict.fromkeys(
        ("big", "medium", "later"), 11
    )
    source = opened(config(there, run, {"big": 0.9, "medium": 0.08}, {})).validation
    assert source is not None
    expected = plain_loss(run, 4, source.samples(np.arange(SAMPLES)))
    assert second["loss"] == pytest.approx(expected, abs=1e-6)
    for name, told in second["corpora"].items():
        assert told["loss"] == pytest.approx(plain_loss(run, 4, alone(there, name, EACH)), abs=1e-6)
    assert warnings(run) == []
    # It is deleted: the overall loss is of the others, and that is said.
    shutil.rmtree(there / "medium")
    made = config(there, run, {"big": 0.9, "plain": 0.5, "later": 0.5}, {})
    blends = read_blends(run / "blends.jsonl")
    left = open_corpora(made.data.corpora, made.model.sequence_length, made.run.seed, blends)
    assert left.held_out.names == [["big"], ["big", "later"]]
    (said,) = run_ranks(1, tell, made)
    (told,) = warnings(run)
    assert "corpus medium" in told and "do not compare" in told and said[-1] == f"WARNING: {told}"
    assert said[0].startswith("epochs of this run: big 0.")
    assert any(
        "corpora without a validation loss: the validation split of plain has none" in text for text in said
    )


def tell(made: RunConfig) -> list[str]:
    assert made.run.dir is not None
    said: list[str] = []
    run = RunDirectory(made.run.dir)
    blends = read_blends(run.blends)
    corpora = open_corpora(made.data.corpora, made.model.sequence_length, made.run.seed, blends)
    order = DataOrder(made, run, corpora, RunLog(run, said.append), strict=True)
    order.tell_of_coverage()
    order.tell_of_validation(4)
    return said


def test_ranks_that_see_other_validation_data_are_refused(data: Path, tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match="validation data: ranks \\[1\\] see another one"):
        run_ranks(2, with_its_own_data, data, tmp_path)


def with_its_own_data(data: Path, folder: Path) -> int:
    """The second host has a corpus that was taken out of the blend; the first has lost it."""
    import torch.distributed as dist

    from megastable.training.startup import open_data

    here = folder / f"host-{dist.get_rank()}"
    shutil.copytree(data, here / "data")
    os.chdir(here)  # the same paths on both hosts
    local, run = Path("data"), folder / "run"
    if dist.get_rank() == 0:
        run.mkdir()
        shares = opened(config(local, run, {"big": 0.9, "medium": 0.08}, {})).shares
        line = {"position": 0, "corpora": [share.model_dump() for share in shares]}
        (run / "blends.jsonl").write_text(json.dumps(line) + "\n")
        shutil.rmtree(local / "medium")
    dist.barrier()
    open_data(config(local, run, {"big": 1.0}, {}))
    return 0


@pytest.mark.parametrize("count", [1, 3, 50])
@pytest.mark.parametrize("computed", [1, 8, 300])
def test_every_sample_of_a_corpus_is_computed_once(count: int, computed: int) -> None:
    tokens = {"a": 100, "b": 21, "c": 1000}
    blend = Order([OrderedCorpus(name, tokens[name], w) for name, w in (("a", 0.3), ("b", 0.7))], 10, 5)
    each = Order([OrderedCorpus(name, n, 1.0) for name, n in tokens.items()], 10, 5)
    found = corpus_samples(blend, computed, each, count)

    def samples(order: Order, positions: Any) -> list[tuple[str, int]]:
        places = order.locate(np.asarray(positions))
        return [(order.corpora[c].name, int(s)) for c, s in zip(places.corpus, places.sequence, strict=True)]

    of_blend = samples(blend, np.arange(computed))
    further = samples(each, found.further) if len(found.further) else []
    assert not set(further) & set(of_blend) and len(set(further)) == len(further)
    for name, of in tokens.items():
        mine = [[*of_blend, *further][place] for place in found.places[name]]
        order = Order([OrderedCorpus(name, of, 1.0)], 10, 5)
        assert mine == samples(order, np.arange(min(count, (of - 1) // 10)))
