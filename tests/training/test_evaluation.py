"""The validation losses of a run: of its blend and of every corpus, in every layout those of the plain model."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

from megastable.base.errors import MegastableError
from megastable.checkpoint.plain import load_plain
from megastable.config.tree import RunConfig
from megastable.data.blends import read_blends
from megastable.data.corpora import Corpora, corpus_samples, open_corpora, samples_in_turn
from megastable.data.manifest import Manifest, Stream
from megastable.data.order import Order, OrderedCorpus
from megastable.data.samples import Source
from megastable.data.shards import Shard
from megastable.model.loss import cross_entropy
from megastable.run.directory import RunDirectory
from megastable.run.events.event import Event
from megastable.run.log import RunLog
from megastable.training.data_order import DataOrder
from tests.conftest import LENGTH, tiny, write_corpus
from tests.distributed import run_ranks, train
from tests.journal import events

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


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Corpora with many validation samples, with few, or with none."""
    folder = tmp_path_factory.mktemp("data")
    for seed, name in enumerate(("big", "medium", "small", "later", "plain")):
        share = {"small": (2 * LENGTH + 1) / 20_000, "plain": 0.0}.get(name, 0.1)
        write_corpus(folder / name, 20_000, seed, share)
    small = Manifest.load_manifest(folder / "small").count_tokens("validation")
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


def warnings(run: Path) -> list[str]:
    return [event["text"] for event in events(run, "warning") if "no validation" in event["text"]]


def plain_loss(run: Path, step: int, tokens: Any) -> float:
    """By one process, one model, one batch."""
    model = load_plain(run / f"checkpoints/step-{step}")
    ids = torch.from_numpy(tokens)
    with torch.no_grad():
        return float(cross_entropy(model(ids[:, :-1]), ids[:, 1:], model.vocabulary)[0].mean())


def alone(data: Path, name: str, count: int) -> Any:
    """The first samples of a corpus that is the only one: int64 [n, L + 1]."""
    manifest = Manifest.load_manifest(data / name)
    stream = Stream(data / name, manifest, "validation")
    order = Order([OrderedCorpus(name, stream.tokens, 1.0)], LENGTH, 1234)
    return Source(order, [stream], 0).read_samples(np.arange(min(count, order.sequences[0])))


def opened(made: RunConfig) -> Corpora:
    return open_corpora(
        made.data.corpora, made.model.sequence_length, made.run.seed, validation=made.data.validation
    )


@pytest.mark.quick("one")
@pytest.mark.parametrize("layout", LAYOUTS)
def test_losses_are_those_of_the_plain_model_on_the_same_samples(
    data: Path, tmp_path: Path, layout: str
) -> None:
    world, parallel = LAYOUTS[layout]
    made = config(data, tmp_path / "run", WEIGHTS, parallel)
    assert run_ranks(world, train, made) == [0] * world
    (found,) = events(tmp_path / "run", "evaluated")
    source = opened(made).validation
    assert source is not None
    expected = plain_loss(tmp_path / "run", STEPS, source.read_samples(np.arange(SAMPLES)))
    assert found["loss"] == pytest.approx(expected, abs=1e-6) and found["samples"] == SAMPLES
    samples = {name: told["samples"] for name, told in found["corpora"].items()}
    assert samples == {"big": EACH, "medium": EACH, "small": SMALL}
    for name, told in found["corpora"].items():
        loss = plain_loss(tmp_path / "run", STEPS, alone(data, name, EACH))
        assert told["loss"] == pytest.approx(loss, abs=1e-6)
    summary = json.loads((tmp_path / "run/summary.json").read_text())
    assert summary["val_loss"] == found["loss"]
    assert summary["val_loss_by_corpus"] == {name: told["loss"] for name, told in found["corpora"].items()}


@pytest.mark.slow
def test_corpora_that_come_and_go_leave_the_samples_of_the_others_as_they_are(
    data: Path, tmp_path: Path
) -> None:
    there = shutil.copytree(data, tmp_path / "data")
    run = tmp_path / "run"

    def go_on(steps: int, *names: str) -> Event:
        weights = {name: WEIGHTS.get(name, 0.5) for name in names}
        run_ranks(2, train, config(there, run, weights, {}, train={"steps": steps}))
        return events(run, "evaluated")[-1]

    first = go_on(2, "big", "medium", "plain")
    assert set(first["corpora"]) == {"big", "medium"} and warnings(run) == []
    # A corpus comes, and one goes whose text is still there: it stays a part of the overall loss.
    second = go_on(4, "big", "plain", "later")
    assert {name: told["samples"] for name, told in second["corpora"].items()} == dict.fromkeys(
        ("big", "medium", "later"), 11
    )
    source = opened(config(there, run, {"big": 0.9, "medium": 0.08}, {})).validation
    assert source is not None
    expected = plain_loss(run, 4, source.read_samples(np.arange(SAMPLES)))
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
    os.environ["LOCAL_RANK"] = "0"
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
        places = order.locate_samples(np.asarray(positions))
        return [(order.corpora[c].name, int(s)) for c, s in zip(places.corpus, places.sequence, strict=True)]

    of_blend = samples(blend, np.arange(computed))
    further = samples(each, found.further) if len(found.further) else []
    assert not set(further) & set(of_blend) and len(set(further)) == len(further)
    for name, of in tokens.items():
        mine = [[*of_blend, *further][place] for place in found.places[name]]
        order = Order([OrderedCorpus(name, of, 1.0)], 10, 5)
        assert mine == samples(order, np.arange(min(count, (of - 1) // 10)))


# Sets of one's own

SETS = ("medium", "plain", "few")  # the first one has a split of its own, of which nothing is made here


@pytest.fixture(scope="module")
def sets(data: Path) -> Path:
    """As `data`, with a set of fewer samples than are asked for."""
    write_corpus(data / "few", 3 * LENGTH + 1, 9, 0.0)
    return data


def with_sets(made: RunConfig, *given: dict[str, Any]) -> RunConfig:
    tree = made.model_dump(mode="json")
    return RunConfig.model_validate(tree | {"data": tree["data"] | {"validation": list(given)}})


def of_set(folder: Path, name: str, count: int) -> Any:
    """The first samples of all the text of a folder, in the order of a corpus of that name: int64 [n, L + 1]."""
    manifest = Manifest.load_manifest(folder)
    whole = [segment for segments in manifest.splits.values() for segment in segments]
    stream = Stream(folder, manifest.model_copy(update={"splits": {"all": whole}}), "all")
    order = Order([OrderedCorpus(name, stream.tokens, 1.0)], LENGTH, 1234)
    return Source(order, [stream], 0).read_samples(np.arange(min(count, order.sequences[0])))


@pytest.mark.quick("one")
@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_set_of_ones_own_has_a_loss_and_the_mean_is_over_all(
    sets: Path, tmp_path: Path, layout: str
) -> None:
    world, parallel = LAYOUTS[layout]
    given = [{"path": str(sets / name), "name": f"own {name}"} for name in SETS]
    made = with_sets(config(sets, tmp_path / "run", {"big": 0.9, "small": 0.1}, parallel), *given)
    assert run_ranks(world, train, made) == [0] * world
    (found,) = events(tmp_path / "run", "evaluated")
    tokens = {f"own {name}": of_set(sets / name, f"own {name}", EACH) for name in SETS}
    assert {name: told["samples"] for name, told in found["corpora"].items()} == {
        name: len(mine) for name, mine in tokens.items()
    }
    for name, mine in tokens.items():
        loss = plain_loss(tmp_path / "run", STEPS, mine)
        assert found["corpora"][name]["loss"] == pytest.approx(loss, abs=1e-6)
    assert found["samples"] == sum(map(len, tokens.values()))
    everything = plain_loss(tmp_path / "run", STEPS, np.concatenate(list(tokens.values())))
    assert found["loss"] == pytest.approx(everything, abs=1e-6)
    summary = json.loads((tmp_path / "run/summary.json").read_text())
    assert set(summary["val_loss_by_corpus"]) == set(tokens)


def foreign(folder: Path) -> None:
    manifest = Manifest.load_manifest(folder)
    other = manifest.tokenizer.model_copy(update={"xxh3": "1" * 32})
    manifest.model_copy(update={"tokenizer": other}).save_manifest(folder)


def outside(folder: Path) -> None:
    """Ids that no token has."""
    file = folder / "part-0.bin"
    file.write_bytes(b"\xff" * file.stat().st_size)


def another(folder: Path) -> None:
    """One id, which a token has."""
    content = bytearray((folder / "part-0.bin").read_bytes())
    content[0] ^= 1
    (folder / "part-0.bin").write_bytes(content)


def short(folder: Path) -> None:
    shutil.rmtree(folder)
    write_corpus(folder, 1, 11, 0.0)


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (shutil.rmtree, "manifest.json is not there: .*own is not a prepared corpus"),
        (foreign, "data.validation: .*own was made with another tokenizer than"),
        (short, "data.validation: corpus 'own' has .* tokens, a sequence needs"),
        (another, "part-0.bin is not the file that the manifest describes"),
        (outside, "part-0.bin: token .* outside of the vocabulary"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_damaged_sets_are_refused_before_training(
    data: Path, tmp_path: Path, damage: Callable[[Path], None], words: str
) -> None:
    folder = tmp_path / "own"
    write_corpus(folder, 10 * LENGTH, 5, 0.0)
    damage(folder)
    made = with_sets(config(data, tmp_path / "run", {"big": 1.0}, {}), {"path": str(folder)})
    with pytest.raises(MegastableError, match=words):
        read_all(made)


def read_all(made: RunConfig) -> None:
    """As the start does."""
    held_out = opened(made).held_out
    for stream, name in held_out.shards:
        stream.open_shard(name).verify_shard()
    assert held_out.blend is not None
    held_out.blend.read_samples(samples_in_turn(held_out.blend.order, EACH).further)


def reads(made: RunConfig) -> list[str]:
    """Verify as the start does; the shards that this rank has read in full."""
    from megastable.training.startup import verify_held_out

    read, verify = list[str](), Shard.verify_shard

    def verifying(self: Shard) -> Any:
        read.append(self.name)
        return verify(self)

    Shard.verify_shard = verifying  # type: ignore[method-assign, assignment]
    assert made.run.dir is not None
    try:
        verify_held_out(RunDirectory(made.run.dir), opened(made).held_out)
    finally:
        Shard.verify_shard = verify  # type: ignore[method-assign]
    return read


def starts(made: RunConfig, spoilt: Path) -> list[object]:
    """What this rank reads at a start, at the next, after a shard got another time, and after it was spoilt."""
    found: list[object] = [reads(made), reads(made)]
    dist.barrier()
    if dist.get_rank() == 0:
        os.utime(spoilt, ns=(0, 0))
    dist.barrier()
    found.append(reads(made))
    dist.barrier()
    if dist.get_rank() == 0:
        another(spoilt.parent)
    dist.barrier()
    for _ in range(2):  # what was found damaged is not remembered
        try:
            found.append(reads(made))
        except MegastableError as error:
            found.append(str(error))
    return found


def test_the_ranks_share_the_shards_and_the_next_start_reads_what_has_changed(
    data: Path, tmp_path: Path
) -> None:
    paths, run = [tmp_path / "own", tmp_path / "other"], tmp_path / "run"
    run.mkdir()
    for seed, folder in enumerate(paths):
        write_corpus(folder, 10 * LENGTH, seed, 0.0)
    made = with_sets(config(data, run, {"big": 1.0}, {}), *({"path": str(path)} for path in paths))
    first_rank, second_rank = run_ranks(2, starts, made, paths[0] / "part-0.bin")
    assert first_rank[:3] == [["part-0"], [], ["part-0"]] and second_rank[:3] == [["part-0"], [], []]
    for told in (*first_rank[3:], *second_rank[3:]):
        assert "own/part-0.bin is not the file that the manifest describes" in told
