"""What all contestants train: a small GPT in plain torch on Python's source code, and texts of other kinds.

A run reads rows of tokens at positions, 16 to a step. A fault replaces rows, or changes weights, gradients or rates.
"""

from __future__ import annotations

import math
from pathlib import Path
from random import Random

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.peers.plain_torch import PlainGPT
from drills.court_scenarios import Kind, write_text
from drills.scenario import TextKind, make_text
from megastable.config.model import ModelConfig
from megastable.data.tokenizer import Tokenizer
from megastable_tools.prepare.corpus_tokenizer import train_sentencepiece
from megastable_tools.prepare.stdlib import stdlib_files
from megastable_tools.prepare.text_files import TextFiles

Rows = npt.NDArray[np.int64]

LENGTH, BATCH, VOCABULARY = 32, 16, 512  # tokens of a row, rows of a step
STEPS, STEP = 320, 180  # of a run; the one in which a fault begins
AHEAD = 1700  # steps of data behind the end: PaLM's rule jumps over 200, eight times at most
POSITIONS = (STEPS + AHEAD) * BATCH
HELD_OUT = 256  # rows of each kind that no run trains on
OTHER = 6000  # rows of every other kind
WARMUP, FLOOR = 60, 0.1  # of the learning rate: steps to its peak, share that is left at the end
SIZES = {"small": (48, 2, 6e-3), "medium": (96, 3, 3e-3)}  # width, layers, peak of the learning rate
TEXTS: tuple[Kind, ...] = ("prose", "foreign", "table", "hex", "babble")  # of the court drill
MADE: tuple[TextKind, ...] = (
    "base64",
    "sorted words",
    "reversed text",
    "a sentence",
)  # of the learning drills, from code
KINDS = ("code", *TEXTS, *MADE)


def prepare_texts(folder: Path) -> dict[str, Rows]:
    """Rows [n, LENGTH + 1] of every kind of text, by one tokenizer; what is there already is read again."""
    if not (folder / "complete").exists():
        folder.mkdir(parents=True, exist_ok=True)
        code_text = _write_code((POSITIONS + HELD_OUT) * LENGTH * 4)
        text_by_kind: dict[str, str] = {"code": code_text, **{kind: write_text(kind) for kind in TEXTS}}
        for kind in MADE:
            text_by_kind[kind] = make_text(
                kind, Random(kind), code_text[: OTHER * LENGTH * 3], OTHER * LENGTH * 3
            )
        training_texts = [text_by_kind[kind][: 1 << 20] for kind in ("code", "prose", "table")]
        tokenizer = train_sentencepiece(training_texts, folder / "tokenizer.model", VOCABULARY)
        for name, kind_text in text_by_kind.items():
            row_count = POSITIONS + HELD_OUT if name == "code" else OTHER
            np.save(folder / f"{name}.npy", cut_rows(kind_text, tokenizer, row_count))
        (folder / "complete").touch()
    return {kind: np.load(folder / f"{kind}.npy") for kind in KINDS}


def _write_code(characters: int) -> str:
    source_files = stdlib_files()
    Random("code").shuffle(source_files)
    return "\n".join(TextFiles(source_files, skip_bad=True))[:characters]


def cut_rows(text: str, tokenizer: Tokenizer, count: int) -> Rows:
    """At most `count` rows of a text in random order; a short one is repeated."""
    token_ids = np.asarray(tokenizer.encode(text[: 5 * count * (LENGTH + 1)]), dtype=np.int64)
    if len(token_ids) < 1000:  # a sentence
        token_ids = np.resize(token_ids, count * (LENGTH + 1))
    row_count = min(count, len(token_ids) // (LENGTH + 1))
    cut = token_ids[: row_count * (LENGTH + 1)].reshape(row_count, LENGTH + 1)
    return np.random.default_rng(0).permutation(cut)


def build_model(size: str, seed: int) -> PlainGPT:
    """Of a size, with weights drawn by the seed."""
    width, layers, _ = SIZES[size]
    model_config = ModelConfig(
        hidden=width, layers=layers, heads=4, ffn=3 * width, sequence_length=LENGTH, vocab_size=VOCABULARY,
        tied=True,
    )  # fmt: skip
    module = PlainGPT(model_config)
    draws = torch.Generator().manual_seed(seed)
    weights = {
        name: 0.02 * torch.randn(value.shape, generator=draws) if value.dim() > 1 else torch.ones_like(value)
        for name, value in module.state_dict().items()
    }
    return module.load_weights(weights, torch.device("cpu"), torch.float32)


def scheduled_rate(size: str, step: int) -> float:
    """The learning rate of a step, from 1: warm-up, then a cosine."""
    peak = SIZES[size][2]
    if step <= WARMUP:
        return peak * step / WARMUP
    progress = min(1.0, (step - WARMUP) / (STEPS - WARMUP))
    return peak * (FLOOR + (1 - FLOOR) * 0.5 * (1 + math.cos(math.pi * progress)))


def measure_losses(model: PlainGPT, inputs: Tensor, labels: Tensor) -> Tensor:
    """The loss of every row, nats per token [n], in the present grad mode."""
    token_losses = F.cross_entropy(model.compute_logits(inputs), labels.flatten(), reduction="none")
    return token_losses.view(labels.shape).mean(1)


def validate(model: PlainGPT, rows: Rows) -> float:
    """Mean loss of rows [n, LENGTH + 1], nats per token."""
    batch = torch.from_numpy(rows)
    with torch.no_grad():
        return float(measure_losses(model, batch[:, :-1], batch[:, 1:]).mean())
