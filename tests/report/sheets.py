"""Sheets as the commands make them: the suspects of a scan, with numbers and texts that look like real ones."""

from __future__ import annotations

from typing import Any

import numpy as np

from megastable.report.sheet import Column, Histogram, Passage, Sheet, Span

WORDS = (
    "the of and to in a is that for it as was with be by on not he this are or his from at which but have an had they "
    "model gradient loss training corpus document token layer norm step learning batch data rate weight sample river "
    "mountain history city music science language people government water energy system number company school world"
).split()
KINDS = ("noise", "repetition", "mojibake", "encoded", "boilerplate", "markup")
WHY = {
    "noise": "its bigrams are as rare as in random tokens: 7.9 bits above what is usual",
    "repetition": "one 4-gram fills 83% of the text; 0.4% is usual",
    "mojibake": "every ninth character is U+FFFD or a pair that only a wrong encoding makes",
    "encoded": "no spaces in 6,112 characters: base64, or a file that is not text",
    "boilerplate": "the same 212 tokens are in 1,804 other documents",
    "markup": "71% of the tokens are brackets, quotes and tags",
}
SCORE = 8.0


def text_of(kind: str, words: int, random: np.random.Generator) -> list[str]:
    """Tokens of a text of a kind."""
    if kind == "repetition":
        return ["click", " here", " to", " win", " now", "!", "\n"] * (words // 7)
    if kind == "noise":
        return [
            "".join(chr(random.integers(33, 127)) for _ in range(random.integers(1, 6))) for _ in range(words)
        ]
    if kind == "encoded":
        return ["".join(random.choice(list("ABCDEFabcdef0123456789+/"), 5)) for _ in range(words)]
    tokens = [" " + str(word) for word in random.choice(WORDS, words)]
    if kind == "mojibake":
        tokens = [token if i % 9 else "Ã©\ufffd\x93" for i, token in enumerate(tokens)]
    if kind == "markup":
        tokens = [token if i % 3 else '<td class="x">' for i, token in enumerate(tokens)]
    return [token if i % 40 else token + ".\n" for i, token in enumerate(tokens, 1)]


def _heated(tokens: list[str], kind: str, random: np.random.Generator) -> list[Span]:
    heats = np.clip(random.beta(1.2, 3, len(tokens)) + (0.4 if kind in ("noise", "encoded") else 0), 0, 1)
    return [Span(token, heat, f"{15 * heat:.2f} nats") for token, heat in zip(tokens, heats.tolist())]


def scan(rows: int = 400, words: int = 120, seed: int = 0, heated: bool = True) -> Sheet:
    """A scan that found `rows` suspects, the worst first, each with a text of `words` tokens, with losses or in one."""
    random = np.random.default_rng(seed)
    scores = np.sort(SCORE * np.exp(random.exponential(0.45, rows)))[::-1]
    pool = {kind: text_of(kind, words, random) for kind in KINDS}
    table, passages = list[dict[str, Any]](), dict[int, list[Passage]]()
    for number, score in enumerate(scores):
        kind = KINDS[int(random.choice(6, p=[0.12, 0.34, 0.1, 0.14, 0.2, 0.1]))]
        table.append({
            "shard": f"web-{random.integers(0, 40):04d}", "document": int(random.integers(0, 900_000)),
            "score": float(score), "kind": kind, "tokens": int(random.lognormal(6.5, 1.1)) + 8,
            "share": float(random.beta(2, 5)), "bits": float(random.normal(9, 2)),
            "copies": int(random.geometric(0.3)) - 1, "read": bool(random.random() < 0.2), "why": WHY[kind],
        })  # fmt: skip
        spans = _heated(pool[kind], kind, random) if heated else [Span("".join(pool[kind]))]
        passages[number] = [Passage(f"tokens 0 to {words}, loss on the checkpoint step-4000", spans)]
    edges = [0.0, *np.geomspace(0.5, 128, 33).tolist()]
    usual = 2_000_000 * np.exp(-0.5 * ((np.arange(33) - 6) / 3.0) ** 2)
    counts = np.histogram(scores, edges)[0] + usual.astype(int) * (np.arange(33) < 17)
    lengths = np.linspace(0, 6000, 41)
    return Sheet(
        title=f"{rows:,} of 3,218,404 documents are unusual: 0.31% of the corpus",
        lead=["They hold 0.31% of its tokens. Six in ten repeat themselves, or are boilerplate of one site; "
              "the worst is noise, and stands where step 4,120 read it."],
        facts=[("documents", "3,218,404"), ("tokens", "2.1 G"), ("suspects", f"{rows:,}"),
               ("of the tokens", "0.31%"), ("worst score", f"{scores[0]:.1f}"), ("took", "3 min 12 s"),
               ("corpus", "data/web-2026 (manifest 5f0c1e2a)"), ("yardstick", "2,048 documents of data/web-2026"),
               ("limit", f"{SCORE} robust deviations")],
        columns=[
            Column("shard", "shard", help="the shard's file, without its ending"),
            Column("document", "document", "text", help="its number in the shard, from 0"),
            Column("score", "score", "score", help="robust deviations from what is usual, of the feature that is "
                   "furthest from it", limit=SCORE),
            Column("kind", "kind", help="what it looks like"),
            Column("tokens", "tokens", "count"),
            Column("share", "of the document", "share", help="how much of the document is like that"),
            Column("bits", "bits/token", "number", help="compressed size, bits per token", wide=True),
            Column("copies", "copies", "count", help="other documents with the same text"),
            Column("read", "read", help="whether the run has read it already"),
            Column("why", "why", help="in words"),
        ],
        rows=table, passages=passages,
        histograms=[
            Histogram("Score of the documents", edges, counts.tolist(), [(SCORE, "limit"), (2 * SCORE, "very bad")],
                      "All documents of the corpus.", column="score"),
            Histogram("Tokens of the suspects", lengths.tolist(),
                      np.histogram([row["tokens"] for row in table], lengths)[0].tolist(), column="tokens"),
        ],
        notes=["Documents of fewer than 8 tokens were passed over: 1,204."],
        legend="loss of a token",
    )  # fmt: skip
