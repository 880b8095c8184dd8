"""Losses of tokens, windows and documents, and what is odd among them."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from megastable.base.errors import DataError
from megastable.checkpoint.plain import PlainModel
from megastable.data.manifest import TokenizerInfo, adopt_shards
from megastable.data.shards import ShardWriter
from megastable.model.gpt import GPT
from megastable.parallel.topology import TensorParallel
from megastable.report.postmortem.sample_texts import Library
from megastable_tools.forensics.scoring import losses as losses_module
from megastable_tools.forensics.scoring.document_scores import (
    Scorer,
    batch_windows,
    check_picked,
    cut_windows,
    pick_between,
    pick_listed,
    pick_spread,
    score_shelf,
    split_into_parcels,
)  # fmt: skip
from megastable_tools.forensics.scoring.losses import losses_of, losses_under, token_losses
from megastable_tools.forensics.scoring.score_sheet import score_sheet
from megastable_tools.forensics.scoring.scored import (
    find_baselines,
    first_rows,
    judge_losses,
    read_scored_rows,
)
from megastable_tools.forensics.shard_set import open_shelf
from tests.conftest import LENGTH, VOCABULARY, tiny, write_corpus
from tests.distributed import run_ranks

FEW = 12  # ids that occur
ODD = 40  # the document of the odd corpus that is random


def model_of(corpus: Path, **parts: Any) -> PlainModel:
    """One that was never trained."""
    config = tiny(corpus, corpus, **{**parts, "model": {"vocab_size": VOCABULARY, **parts.get("model", {})}})
    return PlainModel(GPT(config.model, TensorParallel(), "none", 7), config, corpus, 0, "")


def train(config: Any) -> int:
    from megastable.train import train

    return train(config, Path("recipe.yaml"))


@pytest.fixture(scope="module")
def known(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("known")
    write_corpus(folder, ids=FEW)
    return folder


@pytest.fixture(scope="module")
def run(known: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that has learnt which tokens there are, and that they are near each other."""
    folder = tmp_path_factory.mktemp("run")
    steps = {"steps": 60, "eval_samples": 0}
    run_ranks(1, train, tiny(known, folder, train=steps, checkpoint={"interval": 100}))
    return folder


@pytest.fixture(scope="module")
def odd(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Like the corpus that the run learnt, but for a document that has a random part, and one of a single token."""
    folder = tmp_path_factory.mktemp("odd")
    random = np.random.default_rng(5)
    with ShardWriter(folder / "part-0", VOCABULARY) as writer:
        for number in range(80):
            steps = random.integers(-3, 4, int(random.integers(5, 200))).cumsum()
            document = (random.integers(1, FEW) + steps) % (FEW - 1) + 1
            if number == ODD:
                document = np.append(np.resize(document, 60), random.integers(1, VOCABULARY, 90))
            writer.add_document(np.append(document if number else document[:0], 0))
    info = TokenizerInfo(
        file="tokenizer.model", kind="sentencepiece", xxh3="0" * 32, vocab_size=VOCABULARY, eod=0
    )
    adopt_shards(folder, info, 0.1).save_manifest(folder)
    return folder


def plain_losses(model: PlainModel, tokens: torch.Tensor) -> torch.Tensor:
    """Cross-entropy of each token of one row after the first, by torch."""
    return torch.nn.functional.cross_entropy(model(tokens[None, :-1])[0], tokens[1:], reduction="none")


@pytest.mark.parametrize("tied", [False, True])
def test_token_losses_are_torchs(corpus: Path, tied: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    model = model_of(corpus, model={"tied": tied})
    tokens = np.random.default_rng(0).integers(0, VOCABULARY, (5, 21))
    given_ = torch.from_numpy(tokens)
    with torch.no_grad():
        expected = torch.stack([plain_losses(model, row) for row in given_]).numpy()
    assert token_losses(model, tokens) == pytest.approx(expected, abs=2e-6)
    whole = torch.autograd.grad(losses_of(model, given_).sum(), model.gpt[0].weight)[0]
    # Logits of three tokens at a time, rows of two at a time: only the memory is another.
    monkeypatch.setattr(losses_module, "LOGITS", 3 * 4 * model.config.padded_vocab)
    assert token_losses(model, tokens, batch=40) == pytest.approx(expected, abs=2e-6)
    chunked = torch.autograd.grad(losses_of(model, given_).sum(), model.gpt[0].weight)[0]
    assert torch.allclose(chunked, whole, atol=1e-5)
    tokens[0, [2, 4]] = VOCABULARY, -1  # an id beyond the vocabulary costs infinity
    found = token_losses(model, tokens)
    assert np.flatnonzero(np.isinf(found)).tolist() == [1, 3]
    assert found[0, 0] == pytest.approx(expected[0, 0], abs=2e-6)


@given(st.lists(st.integers(0, 50), max_size=12), st.integers(1, 16), st.integers(0, 1), st.integers(1, 64))
def test_windows_tell_every_token_once(lengths: list[int], size: int, first: int, batch: int) -> None:
    of = cut_windows(np.array(lengths, dtype=np.int64), size, first)
    told = [[0] * n for n in lengths]
    for owner, begin, length, fresh in zip(of.owner, of.begin, of.length, of.fresh, strict=True):
        assert 1 <= length <= size and length == min(size, lengths[owner] - first)
        for at in range(begin + fresh, begin + length):
            told[owner][at] += 1
    assert told == [[int(at >= first) for at in range(n)] for n in lengths]
    chosen = list(batch_windows(of, batch))
    assert sorted(np.concatenate([[], *chosen]).tolist()) == list(range(len(of)))
    assert all(len(one) == 1 or len(one) * of.length[one].max() <= batch for one in chosen)


@given(arrays.arrays(np.int64, st.integers(0, 200), elements=st.integers(0, 100_000)))
def test_likes_judge_every_length_by_enough_documents(tokens: np.ndarray) -> None:
    loss = np.linspace(1, 2, len(tokens))
    by = find_baselines(tokens, loss)
    if len(tokens) < 8:
        assert by == [] and np.isnan(judge_losses(by, tokens, loss)).all()
        return
    assert sum(one.documents for one in by) == len(tokens)
    assert len(by) == 1 or min(one.documents for one in by) >= 32
    assert [one.below for one in by] == sorted({one.below for one in by}) and by[-1].below == 1 << 62
    assert np.isfinite(judge_losses(by, tokens, loss)).all()


def reference(model: PlainModel, document: torch.Tensor) -> tuple[torch.Tensor, list[tuple[float, int]]]:
    """The mean loss of a document, differentiable, and (loss, first token) of its windows, one at a time."""
    size, whole = model.config.sequence_length, torch.cat((torch.tensor([0]), document))
    told, found, at = list[torch.Tensor](), list[tuple[float, int]](), 0
    while at < len(document):
        begin = max(0, min(at, len(document) - size))
        losses = plain_losses(model, whole[begin : begin + size + 1])
        told.append(losses[at - begin :])
        found.append((float(losses.detach().mean()), begin))
        at += size
    return torch.cat(told).mean(), found


@pytest.mark.parametrize("batch", [LENGTH, 4 * LENGTH])
def test_scorer_measures_what_a_plain_reference_does(corpus: Path, odd: Path, batch: int) -> None:
    model, shelf, bytes_of = model_of(corpus), open_shelf([odd]), np.arange(VOCABULARY + 1)
    scorer = dataclasses.replace(
        Scorer.of_shelf(shelf, model, gradients=True, batch=batch), bytes_of=bytes_of
    )
    wanted = {"part-0": np.array([0, 3, 4, 17, ODD])}
    table = [
        row
        for parcel in split_into_parcels(shelf, wanted, 100)
        for row in scorer.measure_parcel(parcel).to_pylist()
    ]
    assert [row["document"] for row in table] == [0, 3, 4, 17, ODD]
    for row in table:
        document = torch.from_numpy(shelf.shards[0].read_tokens(row["first_token"], row["tokens"]))
        mean, found = reference(model, document)
        loss, first = max(found, key=lambda one: one[0])
        gradients = torch.autograd.grad(mean, list(model.parameters()))
        mean_loss, size = float(mean.detach()), int(bytes_of[document.numpy()].sum())
        assert (row["loss"], row["worst_window"]) == (
            pytest.approx(mean_loss, abs=1e-5),
            pytest.approx(loss, abs=1e-5),
        )
        assert row["worst_first"] == row["first_token"] + first
        norm = math.sqrt(sum(float(g.double().square().sum()) for g in gradients))
        assert row["gradient_norm"] == pytest.approx(norm, rel=1e-4)
        bits = mean_loss * row["tokens"] / math.log(2) / size if size else math.nan
        assert row["bits_per_byte"] == pytest.approx(bits, rel=1e-5, nan_ok=True)
    parcel = next(iter(split_into_parcels(shelf, {"part-0": np.array([ODD])}, 1)))
    own = np.append(scorer.losses_between(parcel, 0, 10), scorer.losses_between(parcel, 10, parcel.tokens))
    assert float(own.mean()) == pytest.approx(table[-1]["loss"], abs=1e-5)
    # Without an end of documents the first token of each has no loss.
    blind = dataclasses.replace(scorer, eod=None, gradients=False)
    first_parcel = next(iter(split_into_parcels(shelf, {"part-0": np.array([0, 3])}, 1000)))
    none, some = blind.measure_parcel(first_parcel).to_pylist()
    assert (
        math.isnan(none["loss"]) and none["worst_tokens"] == 0 and some["worst_first"] > some["first_token"]
    )


def test_score_shelf_finds_the_odd_document_and_shows_it(run: Path, odd: Path, tmp_path: Path) -> None:
    shelf, folder = open_shelf([odd]), tmp_path / "scores"
    scores = score_shelf(shelf, run, folder, progress=False)
    assert scores.documents == 80 and scores.tokens == shelf.tokens and scores.precision == "bfloat16"
    table = list(read_scored_rows(folder))
    assert [row["document"] for row in table] == list(range(80))
    mean = sum(row["loss"] * row["tokens"] for row in table) / shelf.tokens
    assert scores.loss == pytest.approx(mean, rel=1e-5) and sum(scores.counts) == 80
    first = first_rows(folder, 3)[0]
    assert first == first_rows(folder, 1, "odd")[0] and scores.high >= 1
    assert first["document"] == ODD and first["worst_z"] > 4 and first["gradient_norm"] is None
    assert first["worst_first"] - first["first_token"] >= 60 - LENGTH
    z = [row["z"] for row in first_rows(folder, 80, "low")]
    assert z == sorted(z) and scores.low == sum(one <= -4 for one in z)
    with pytest.raises(DataError, match="no order 'best'"):
        first_rows(folder, 1, "best")
    sheet = score_sheet(folder, shelf, Scorer.of_shelf(shelf, losses_module.load_model(run)), most=5, texts=1)
    assert len(sheet.rows) == 5 and sheet.rows[0]["document"] == ODD and "predict" in sheet.rows[0]["finding"]
    heat = [span.heat for span in sheet.passages[0][0].spans]
    assert len(heat) == first["tokens"] - 1 and np.mean(heat[70:]) > 1.5 * np.mean(heat[10:60])
    assert sheet.histograms[0].counts == scores.counts


def test_score_shelf_takes_picked_documents(run: Path, odd: Path, tmp_path: Path) -> None:
    shelf, some = open_shelf([odd]), tmp_path / "some"
    score_shelf(shelf, run, some, documents=pick_between(shelf, 10, 50), sample=4, progress=False)
    assert [row["document"] for row in read_scored_rows(some)] == [15, 25, 35, 45]
    assert all(row["z"] is None for row in read_scored_rows(some))  # too few to say what is usual
    (tmp_path / "list").write_text("part-0 7\npart-0 3\n")
    assert pick_listed(shelf, tmp_path / "list")["part-0"].tolist() == [3, 7]
    assert pick_spread(shelf, 1000)["part-0"].tolist() == list(range(80))
    for name, number, message in (("part-0", 80, "there is no document 80"), ("part-1", 0, "has no shard")):
        with pytest.raises(DataError, match=message):
            check_picked(shelf, {name: np.array([number])})
    with pytest.raises(DataError, match="none of 80 to 90"):
        pick_between(shelf, 80, 91)


def test_losses_under_a_checkpoint_are_those_of_training(run: Path, known: Path) -> None:
    """Also of a sequence warm-up: each piece has the losses of a row of its own."""
    positions, of, model = np.arange(6), losses_under(run), losses_module.load_model(run)
    library = Library(tiny(known, run))
    samples = library.source.read_samples(positions)
    exact = losses_module.load_model(run, exact=True)
    assert np.abs(of(library, positions) - token_losses(exact, samples)).mean() < 0.05
    # 8 tokens, then 16 from position 1 on, then all.
    cut = Library(tiny(known, run, train={"sequence_warmup": {"start": 8, "tokens": 3 * LENGTH}}))
    found, whole = of(cut, positions), token_losses(model, samples)
    assert (cut.pieces.values, cut.pieces.firsts) == ((8, 16, 32), (0, 1, 3))
    for position, length in enumerate((8, 16, 16)):
        pieces = [samples[position : position + 1, at : at + length + 1] for at in range(0, LENGTH, length)]
        alone = np.concatenate([token_losses(model, piece)[0] for piece in pieces])
        assert found[position] == pytest.approx(alone, rel=0.05, abs=0.05)
        assert np.abs(found[position] - alone).max() < np.abs(found[position] - whole[position]).max()
    assert found[3:] == pytest.approx(whole[3:], rel=0.05, abs=0.05)


@pytest.mark.parametrize(
    ("change", "message"),
    [({"vocab_size": 200}, "has a vocabulary of 200 tokens, the samples one of 250"),
     ({"sequence_length": 16}, "trained on sequences of 16 tokens, the samples have 32")],
)  # fmt: skip
def test_losses_under_refuses_samples_that_do_not_fit(
    corpus: Path, run: Path, change: dict[str, int], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(losses_module, "load_model", lambda _: model_of(corpus, model=change))
    with pytest.raises(DataError, match=message):
        losses_under(run)(Library(tiny(corpus, run)), np.arange(2))
