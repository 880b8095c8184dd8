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
from megastable.data.manifest import TokenizerInfo, adopt
from megastable.data.shards import ShardWriter
from megastable.model.gpt import GPT
from megastable.parallel.topology import TensorParallel
from megastable.report.postmortem.sample_texts import Library
from megastable_tools.forensics.scoring import losses as losses_module
from megastable_tools.forensics.scoring import pick
from megastable_tools.forensics.scoring.document_scores import (
    Scorer,
    batches,
    rows,
    score_shelf,
    window_rows,
    windows,
    worst,
)
from megastable_tools.forensics.scoring.losses import losses_of, losses_under, token_losses
from megastable_tools.forensics.scoring.score_sheet import score_sheet
from megastable_tools.forensics.scoring.scored import first_rows, judged, likes
from megastable_tools.forensics.shard_set import Shelf, open_shelf
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
    adopt(folder, info, 0.1).save(folder)
    return folder


def plain_losses(model: PlainModel, tokens: torch.Tensor) -> torch.Tensor:
    """Cross-entropy of each token of one row after the first, by torch."""
    return torch.nn.functional.cross_entropy(model(tokens[None, :-1])[0], tokens[1:], reduction="none")


# Losses of tokens


@pytest.mark.parametrize("tied", [False, True])
def test_token_losses_are_torchs(corpus: Path, tied: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    model = model_of(corpus, model={"tied": tied})
    tokens = np.random.default_rng(0).integers(0, VOCABULARY, (5, 21))
    with torch.no_grad():
        expected = torch.stack([plain_losses(model, torch.from_numpy(row)) for row in tokens]).numpy()
    assert token_losses(model, tokens) == pytest.approx(expected, abs=2e-6)
    # Logits of three tokens at a time, rows of two at a time: only the memory is another.
    monkeypatch.setattr(losses_module, "LOGITS", 3 * 4 * model.config.padded_vocab)
    assert token_losses(model, tokens, batch=40) == pytest.approx(expected, abs=2e-6)
    given = torch.from_numpy(tokens)
    chunked = torch.autograd.grad(losses_of(model, given).sum(), model.gpt[0].weight)[0]
    monkeypatch.undo()
    whole = torch.autograd.grad(losses_of(model, given).sum(), model.gpt[0].weight)[0]
    assert torch.allclose(chunked, whole, atol=1e-5)


def test_an_id_beyond_the_vocabulary_costs_infinity(corpus: Path) -> None:
    model = model_of(corpus)
    tokens = np.array([[1, 2, VOCABULARY, 3, -1, 4]])
    found = token_losses(model, tokens)[0]
    assert np.isinf(found).tolist() == [False, True, False, True, False]
    assert found[0] == pytest.approx(token_losses(model, tokens[:, :2])[0, 0], abs=1e-6)


# Windows


@given(st.lists(st.integers(0, 50), max_size=12), st.integers(1, 16), st.integers(0, 1), st.integers(1, 64))
def test_windows_tell_every_token_once(lengths: list[int], size: int, first: int, batch: int) -> None:
    of = windows(np.array(lengths, dtype=np.int64), size, first)
    told = [[False] * n for n in lengths]
    for owner, begin, length, fresh in zip(of.owner, of.begin, of.length, of.fresh, strict=True):
        assert 1 <= length <= size and length == min(size, lengths[owner] - first)
        for at in range(begin + fresh, begin + length):
            assert not told[owner][at]
            told[owner][at] = True
    assert told == [[at >= first for at in range(n)] for n in lengths]
    chosen = list(batches(of, batch))
    assert sorted(np.concatenate([[], *chosen]).tolist()) == list(range(len(of)))
    assert all(len(one) == 1 or len(one) * of.length[one].max() <= batch for one in chosen)


def test_rows_begin_with_what_stands_before() -> None:
    of = windows(np.array([3, 5]), 4, 0)
    table = window_rows(of, np.arange(len(of)), np.arange(10, 18), np.array([0, 3, 8]), before=0)
    assert table.tolist() == [[0, 10, 11, 12, 0], [0, 13, 14, 15, 16], [13, 14, 15, 16, 17]]


def test_the_worst_window_is_the_first_of_equals_and_nan_before_all() -> None:
    of = windows(np.array([9, 0, 3, 8]), 4, 0)
    means = np.array([1.0, 3.0, 3.0, 2.0, 1.0, math.nan])
    assert worst(of, means, 4).tolist() == [1, -1, 3, 5]


# What is usual


@given(arrays.arrays(np.int64, st.integers(0, 200), elements=st.integers(0, 100_000)))
def test_every_length_is_judged_by_enough_documents(tokens: np.ndarray) -> None:
    loss = np.linspace(1, 2, len(tokens))
    by = likes(tokens, loss)
    if len(tokens) < 8:
        assert by == [] and np.isnan(judged(by, tokens, loss)).all()
        return
    assert sum(one.documents for one in by) == len(tokens)
    assert len(by) == 1 or min(one.documents for one in by) >= 32
    assert [one.below for one in by] == sorted({one.below for one in by}) and by[-1].below == 1 << 62
    assert np.isfinite(judged(by, tokens, loss)).all()


def test_a_loss_is_judged_by_its_length_and_from_both_sides() -> None:
    random = np.random.default_rng(0)
    tokens = np.repeat([20, 2000], 500)
    loss = np.where(tokens == 20, random.normal(6, 1, 1000), random.normal(3, 0.1, 1000))
    loss[[0, 500, 999]] = [3.0, 6.0, 1.0]
    z = judged(likes(tokens, loss), tokens, loss)
    assert z[0] == pytest.approx(-3, abs=0.5) and z[500] > 20 and z[999] < -15
    rest = np.delete(z, [0, 500, 999])
    assert rest.std() == pytest.approx(1, abs=0.1) and abs(np.median(rest)) < 0.1


# Documents


def reference(
    model: PlainModel, document: torch.Tensor, eod: int
) -> tuple[torch.Tensor, list[tuple[float, int]]]:
    """The mean loss of a document, differentiable, and (loss, first token) of its windows, one at a time."""
    size, whole = model.config.sequence_length, torch.cat((torch.tensor([eod]), document))
    told, found, at = list[torch.Tensor](), list[tuple[float, int]](), 0
    while at < len(document):
        begin = max(0, min(at, len(document) - size))
        losses = plain_losses(model, whole[begin : begin + size + 1])
        told.append(losses[at - begin :])
        found.append((float(losses.detach().mean()), begin))
        at += size
    return torch.cat(told).mean(), found


@pytest.mark.parametrize("batch", [LENGTH, 4 * LENGTH])
def test_rows_are_those_of_a_plain_reference(corpus: Path, odd: Path, batch: int) -> None:
    model, shelf = model_of(corpus), open_shelf([odd])
    bytes_of = np.arange(VOCABULARY + 1)
    scorer = dataclasses.replace(Scorer.of(shelf, model, gradients=True, batch=batch), bytes_of=bytes_of)
    wanted = {"part-0": np.array([0, 3, 4, 17, ODD])}
    table = [row for parcel in pick.parcels(shelf, wanted, 100) for row in scorer.measure(parcel).to_pylist()]
    assert [row["document"] for row in table] == [0, 3, 4, 17, ODD]
    for row in table:
        document = torch.from_numpy(shelf.shards[0].read(row["first_token"], row["tokens"]))
        mean, found = reference(model, document, 0)
        assert row["loss"] == pytest.approx(float(mean.detach()), abs=1e-5)
        loss, first = max(found, key=lambda one: one[0])
        assert row["worst_window"] == pytest.approx(loss, abs=1e-5)
        assert row["worst_first"] == row["first_token"] + first
        gradients = torch.autograd.grad(mean, list(model.parameters()))
        norm = math.sqrt(sum(float(g.double().square().sum()) for g in gradients))
        assert row["gradient_norm"] == pytest.approx(norm, rel=1e-4)
        size = int(bytes_of[document.numpy()].sum())
        if size:
            expected = float(mean.detach()) * row["tokens"] / math.log(2) / size
            assert row["bits_per_byte"] == pytest.approx(expected, rel=1e-5)
        else:
            assert math.isnan(row["bits_per_byte"])
    parcel = next(iter(pick.parcels(shelf, {"part-0": np.array([ODD])}, 1)))
    again = scorer.losses(parcel, 10, parcel.tokens)
    assert float(np.append(scorer.losses(parcel, 0, 10), again).mean()) == pytest.approx(
        table[-1]["loss"], abs=1e-5
    )


def test_without_an_end_of_documents_the_first_token_is_not_told(corpus: Path, odd: Path) -> None:
    scorer = dataclasses.replace(Scorer.of(open_shelf([odd]), model_of(corpus)), eod=None)
    table = [
        row
        for parcel in pick.parcels(open_shelf([odd]), None, 1000)
        for row in scorer.measure(parcel).to_pylist()
    ]
    assert math.isnan(table[0]["loss"]) and table[0]["worst_tokens"] == 0
    document = torch.from_numpy(open_shelf([odd]).shards[0].read(table[1]["first_token"], table[1]["tokens"]))
    if len(document) <= LENGTH:
        assert table[1]["loss"] == pytest.approx(float(plain_losses(scorer.model, document).mean()), abs=1e-5)


def test_the_odd_document_comes_out_worst_and_is_shown(run: Path, odd: Path, tmp_path: Path) -> None:
    shelf, folder = open_shelf([odd]), tmp_path / "scores"
    scores = score_shelf(shelf, run, folder, progress=False)
    assert scores.documents == 80 and scores.tokens == shelf.tokens and scores.precision == "bfloat16"
    table = list(rows(folder))
    assert [row["document"] for row in table] == list(range(80))
    mean = sum(row["loss"] * row["tokens"] for row in table) / shelf.tokens
    assert scores.loss == pytest.approx(mean, rel=1e-5) and sum(scores.counts) == 80
    first = first_rows(folder, 3)[0]
    assert first == first_rows(folder, 1, "odd")[0] and scores.high >= 1
    z = [row["z"] for row in first_rows(folder, 80, "low")]
    assert z == sorted(z) and scores.low == sum(one <= -4 for one in z)
    with pytest.raises(DataError, match="no order 'best'"):
        first_rows(folder, 1, "best")
    assert first["document"] == ODD and first["worst_z"] > 4 and first["gradient_norm"] is None
    begin = first["worst_first"] - first["first_token"]
    assert begin >= 60 - LENGTH
    sheet = score_sheet(folder, shelf, Scorer.of(shelf, losses_module.load(run)), most=5, texts=1)
    assert len(sheet.rows) == 5 and sheet.rows[0]["document"] == ODD and "predict" in sheet.rows[0]["finding"]
    (passage,) = sheet.passages[0]
    heat = [span.heat for span in passage.spans]
    assert len(heat) == first["tokens"] - 1 and np.mean(heat[70:]) > 1.5 * np.mean(heat[10:60])
    assert sheet.histograms[0].counts == scores.counts and len(sheet.histograms[0].marks) == 3


def test_parts_that_are_there_are_not_measured_again(
    run: Path, odd: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a scan goes on (test_scan.py): both are one map over documents."""
    monkeypatch.setattr("megastable_tools.forensics.scoring.document_scores.PARCEL", 1000)
    shelf, folder = open_shelf([odd]), tmp_path / "scores"
    whole, table = score_shelf(shelf, run, folder, progress=False), list(rows(folder))
    (folder / "scores.json").unlink()
    with pytest.raises(DataError, match="holds a score that was interrupted"):
        list(rows(folder))
    (folder / "parts/000001.parquet").write_bytes(b"torn")
    again = score_shelf(shelf, run, folder, progress=False)
    assert (
        whole.parts > 4 and 0 < again.measured_tokens < whole.measured_tokens and list(rows(folder)) == table
    )
    assert score_shelf(shelf, run, folder, progress=False).measured_tokens == 0
    with pytest.raises(DataError, match="precision"):
        score_shelf(shelf, run, folder, exact=True, progress=False)


def test_documents_can_be_picked(run: Path, odd: Path, tmp_path: Path) -> None:
    shelf = open_shelf([odd])
    score_shelf(
        shelf, run, tmp_path / "some", documents=pick.between(shelf, 10, 50), sample=4, progress=False
    )
    assert [row["document"] for row in rows(tmp_path / "some")] == [15, 25, 35, 45]
    assert all(row["z"] is None for row in rows(tmp_path / "some"))  # too few to say what is usual
    (tmp_path / "list").write_text("part-0 7\npart-0 3\n")
    assert pick.listed(shelf, tmp_path / "list")["part-0"].tolist() == [3, 7]
    assert pick.spread(shelf, 1000)["part-0"].tolist() == list(range(80))
    with pytest.raises(DataError, match="there is no document 80 in part-0"):
        pick.checked(shelf, {"part-0": np.array([80])})
    with pytest.raises(DataError, match="has no shard"):
        pick.checked(shelf, {"part-1": np.array([0])})
    with pytest.raises(DataError, match="none of 80 to 90"):
        pick.between(shelf, 80, 91)


# Samples of a run


def test_samples_have_the_losses_of_training(run: Path, known: Path) -> None:
    of, library = losses_under(run), Library(tiny(known, run))
    positions = np.arange(6)
    found = of(library, positions)
    assert found.shape == (6, LENGTH)
    exact = losses_module.load(run, exact=True)
    assert np.abs(found - token_losses(exact, library.source.samples(positions))).mean() < 0.05


def test_samples_of_a_sequence_warmup_are_cut_as_they_were_read(run: Path, known: Path) -> None:
    """Each piece as a row of its own has the same losses."""
    cut = {
        "sequence_warmup": {"start": 8, "tokens": 3 * LENGTH}
    }  # 8 tokens, then 16 from position 1 on, then all
    of, library = losses_under(run), Library(tiny(known, run, train=cut))
    positions = np.arange(6)
    samples, model = library.source.samples(positions), losses_module.load(run)
    whole = token_losses(model, samples)
    found = of(library, positions)
    assert library.pieces.values == (8, 16, 32) and library.pieces.firsts == (0, 1, 3)
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
def test_samples_that_do_not_fit_are_refused(
    corpus: Path, run: Path, change: dict[str, int], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(losses_module, "load", lambda _: model_of(corpus, model=change))
    with pytest.raises(DataError, match=message):
        losses_under(run)(Library(tiny(corpus, run)), np.arange(2))


def test_another_tokenizer_is_refused(corpus: Path, tmp_path: Path) -> None:
    write_corpus(tmp_path, tokens=500)
    shelf = open_shelf([tmp_path])
    assert isinstance(shelf, Shelf) and shelf.manifest is not None
    info = shelf.manifest.tokenizer.model_copy(update={"xxh3": "1" * 32})
    other = dataclasses.replace(shelf, manifest=shelf.manifest.model_copy(update={"tokenizer": info}))
    Scorer.of(shelf, model_of(corpus))
    with pytest.raises(DataError, match=r"trained with the tokenizer tokenizer\.model"):
        Scorer.of(other, model_of(corpus))
