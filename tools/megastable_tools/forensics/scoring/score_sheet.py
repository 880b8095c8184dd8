"""Present document scores: the worst first, with their text coloured by the loss of its tokens."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from megastable.base.errors import DataError
from megastable.base.text import count_noun, show_number
from megastable.report.sheet import Column, Histogram, Passage, Sheet
from megastable_tools.forensics.scoring.document_scores import Parcel, Scorer
from megastable_tools.forensics.scoring.scored import ODD, Scores, first_rows
from megastable_tools.forensics.shard_set import Shelf, split_at_tokens

WHOLE = 2048  # tokens up to which a document is shown in full

COLUMNS = (
    Column("odd", "odd", "score", "robust deviations from the usual: the larger of |z| and that of the worst window",
           limit=ODD),
    Column("shard", "shard"),
    Column("document", "document", "count", "number of the document in its shard"),
    Column("tokens", "tokens", "count"),
    Column("loss", "loss", "number", "nats per token, the mean over the document"),
    Column("z", "z", "number", "the loss relative to documents of similar length; below 0: unusually easy"),
    Column("worst_window", "worst window", "number", "nats per token of the window with the highest mean"),
    Column("worst_z", "its z", "number", "the worst window relative to those of other documents"),
    Column("worst_first", "from token", "count", "first token of the worst window, counted in the shard", wide=True),
    Column("worst_tokens", "its tokens", "count", "of the worst window", wide=True),
    Column("bits_per_byte", "bits/byte", "number", "of the text, comparable between tokenizers"),
    Column("gradient_norm", "gradient", "number", "norm of the gradient of the document's mean loss"),
    Column("first_token", "first token", "count", "of the document, counted in the shard", wide=True),
    Column("finding", "finding"),
)  # fmt: skip

FEW = 100  # documents


def score_sheet(
    folder: Path,
    shelf: Shelf,
    scorer: Scorer | None = None,
    most: int = 200,
    texts: int = 20,
    by: str = "window",
) -> Sheet:
    """The first `most` documents of the scores in `folder`, made from `shelf`, with the texts of the first ones.

    by: one of `scored.ORDERS`. scorer: measures the losses of their tokens again, for colours. Raises DataError
    for scores that are missing, damaged or of another shelf, and for a shelf that cannot be read.
    """
    scores = Scores.load_result(folder)
    if scores.fingerprint != shelf.fingerprint:
        raise DataError(
            f"{folder} holds scores of other shards than {shelf.name}, or it has changed: score it again"
        )
    rows = [row | {"finding": _finding(row)} for row in first_rows(folder, most, by)]
    first_texts = {index: row for index, row in enumerate(rows[:texts]) if row["tokens"]}
    text_passages = {index: [_passage(row, shelf, scorer)] for index, row in first_texts.items()}
    lead = [
        f"{count_noun(scores.documents, 'document')}, {count_noun(scores.tokens, 'token')}: {scores.loss:.3f} "
        "nats per token"
        + (f", {scores.bits_per_byte:.3f} bits per byte" if scores.bits_per_byte is not None else "") + ".",
        f"By {ODD:g} robust deviations and more, {count_noun(scores.high, 'document')} or a part of it is harder to "
        f"predict than usual, {count_noun(scores.low, 'document')} easier.",
    ]  # fmt: skip
    if scores.documents < FEW:
        few_documents = count_noun(scores.documents, "document")
        lead.append(f"{few_documents} are too few for a baseline: below {FEW}, it is a guess.")
    rate = f"{scores.tokens_per_second:,.0f}/s" if scores.tokens_per_second else "all were measured before"
    windows_read = f"in windows of {count_noun(scores.window, 'token')}"
    facts = [
        ("checkpoint", f"{scores.checkpoint} (step {scores.step})"),
        ("read", f"{windows_read}, each with a fresh context, as in training"),
        ("arithmetic", f"{scores.precision} on {scores.device}"),
        ("tokens scored", rate),
    ]
    data = {
        "checkpoint": str(scores.checkpoint), "step": scores.step, "documents": scores.documents,
        "tokens": scores.tokens, "loss": scores.loss, "bits_per_byte": scores.bits_per_byte,
        "harder_than_usual": scores.high, "easier_than_usual": scores.low, "window_tokens": scores.window,
        "precision": scores.precision, "device": scores.device, "tokens_per_second": scores.tokens_per_second,
    }  # fmt: skip
    sheet_notes = [
        *scores.warnings,
        "A loss far below the usual is a finding, too: text that is repeated, generated or memorised.",
        "The checkpoint may know its own training data already, bad text included: one from before, or from a clean "
        "corpus, shows more.",
    ]
    if scorer is None and texts:
        sheet_notes.append("With the checkpoint the tokens are coloured by their loss.")
    sheet_columns = [c for c in COLUMNS if any(row.get(c.key) is not None for row in rows)]
    quantiles = dict(zip(scores.shares, scores.quantiles))
    quantile_marks = [(quantiles[share], f"{share:.0%}") for share in (0.01, 0.5, 0.99) if share in quantiles]
    histogram = Histogram(
        "loss of the documents, nats per token", scores.edges, scores.counts, quantile_marks, column="loss",
        note="Marked: 1%, half and 99% of the documents are below.",
    )  # fmt: skip
    return Sheet(
        title=f"{scores.name}, scored by step {scores.step}", lead=lead, facts=facts, columns=sheet_columns, rows=rows,
        passages=text_passages, histograms=[histogram] if sum(scores.counts) else [],
        notes=sheet_notes, legend="loss of a token", data=data,
    )  # fmt: skip


def _finding(row: dict[str, Any]) -> str:
    """The finding in words; "" for a usual document."""
    if row["odd"] is None or row["odd"] < ODD:
        return ""
    if not np.isfinite(row["odd"]):
        return "its loss is not a number: ids beyond the vocabulary, or a broken model"
    a_part = row["worst_tokens"] < row["tokens"] and row["worst_z"] > row["z"]
    if row["z"] >= ODD and not a_part:
        return f"hard to predict as a whole, {row['z']:.1f} deviations above the usual"
    if row["worst_z"] >= ODD:
        return f"a part that is hard to predict, from token {row['worst_first']:,} of the shard"
    return f"predicted too well, {-row['z']:.1f} deviations below the usual: repeated, generated or memorised"


def _passage(row: dict[str, Any], shelf: Shelf, scorer: Scorer | None) -> Passage:
    """The document, or for a longer one the worst window."""
    first, document_end = row["first_token"], row["first_token"] + row["tokens"]
    begin, upto = first, document_end
    if row["tokens"] > WHOLE:
        begin, upto = row["worst_first"], row["worst_first"] + row["worst_tokens"]
    shard = shelf.find_shard(row["shard"])
    shown_ids = shard.read_raw(begin, upto - begin).tolist()
    shown_losses = None
    if scorer is not None:
        parcel = Parcel(0, shard, np.array([row["document"]]), np.array([first]), np.array([document_end]))
        shown_losses = scorer.losses_between(parcel, begin - first, upto - first).tolist()
    if shown_ids and shown_ids[-1] == shelf.eod:
        shown_ids, shown_losses = shown_ids[:-1], shown_losses[:-1] if shown_losses is not None else None
    loss_text = f"loss {show_number(row['loss'])}, worst window {show_number(row['worst_window'])}"
    where = f"document {row['document']} of {row['shard']}, its tokens {begin - first:,} to {upto - first - 1:,} of "
    text = split_at_tokens(shown_ids, shelf.tokenizer, shown_losses)
    return Passage(f"{where}{row['tokens']:,}: {loss_text}", text)
