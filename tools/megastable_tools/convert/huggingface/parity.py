"""Check that an exported folder computes the same as the checkpoint, by the logits of both in fp32.

Ours come from the training model, with the checkpoint's weights rounded to the folder's precision (so that one
limit serves an fp32 and a bf16 export); theirs from transformers. A wrong layout of the rotary embeddings shows here,
but not in sampled text.
"""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Callable, Collection, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from megastable.base import free_memory
from megastable.base.errors import CheckpointError, MegastableError
from megastable.base.installation import install_command
from megastable.base.text import plural, size
from megastable.checkpoint.whole import WholeState, run_of
from megastable.config.model import ModelConfig
from megastable.config.tree import RunConfig
from megastable.data.corpora import open_corpora
from megastable.data.tokenizer import NO_EOD, load_tokenizer
from megastable.report.sheet import Column, Sheet
from megastable_tools.convert.huggingface import logits
from megastable_tools.convert.huggingface.architectures import OWN
from megastable_tools.convert.huggingface.folder import HuggingFaceFolder
from megastable_tools.convert.huggingface.mup_scales import factor_of, without_mup
from megastable_tools.convert.huggingface.names import merge, split, table
from megastable_tools.convert.huggingface.tokenizer_export import real_text

LARGEST = 1e-4  # difference of two logits
KL = 1e-10  # nats per token, the mean
ROWS = 2  # of random tokens, and of text
LENGTH = 512  # tokens of a row, at most
WORK = 4e12  # approximate multiply-adds of one model; larger models get less text
LOGITS = 1 << 27  # bytes of fp32 logits per model; positions are left out to stay below
# Model keys whose values are compared by the report: logits need not show a difference.
NUMBERS = (
    "rope_theta", "rope_scaling", "norm_eps", "attention_scale", "attention_softcap", "logit_softcap", "window",
)  # fmt: skip
# Properties of ModelConfig that hold for a key that was left out.
EFFECTIVE = {
    "kv_heads": "key_value_heads", "head_dim": "head_width", "ffn": "ffn_width", "attention_scale": "score_scale",
    "embedding_scale": "embedding_factor",
}  # fmt: skip

Say = Callable[[str], None]


@dataclass(frozen=True)
class LogitRow:
    """tokens: positions compared; largest: absolute difference of two logits; kl: of theirs from ours, nats per token,
    the mean; agree: share of positions with the same likeliest token; scale: the largest logit."""

    of: str
    tokens: int
    largest: float
    kl: float
    agree: float
    scale: float

    @property
    def same(self) -> bool:
        return self.largest < LARGEST and self.kl < KL


@dataclass
class ParityReport:
    """why: the reason why logits were not compared, "" if they were. unequal: tensors of the folder whose bits differ
    from the checkpoint's; settings: differences of config.json that logits need not show; precision: the folder's; how:
    how transformers loaded the weights."""

    checkpoint: Path
    folder: Path
    rows: list[LogitRow] = field(default_factory=list)
    unequal: list[str] = field(default_factory=list)
    settings: list[str] = field(default_factory=list)
    tensors: int = 0
    precision: str = ""
    how: str = ""
    transformers: str = ""
    why: str = ""
    notes: list[str] = field(default_factory=list)

    @property
    def failed(self) -> bool:
        """Compared, and different."""
        return bool(self.unequal or self.settings) or not all(row.same for row in self.rows)

    @property
    def verdict(self) -> str:
        if self.why and not self.failed:
            return f"NOT CHECKED: {self.why}. All {self.tensors} tensors are the same, bit for bit"
        if not self.failed:
            return (
                f"the same: all {self.tensors} tensors bit for bit, differences of logits below {LARGEST:g}, "
                f"KL divergence below {KL:g}"
            )
        problems = list(self.settings)
        if self.unequal:
            problems.append(
                f"{len(self.unequal)} of {self.tensors} tensors differ, the first is {self.unequal[0]}"
            )
        for row in self.rows:
            if not row.same:
                problems.append(
                    f"on {row.of} logits differ by up to {row.largest:.3g} (limit {LARGEST:g}), KL divergence "
                    f"{row.kl:.3g} (limit {KL:g})"
                )
        return f"NOT THE SAME: {'; '.join(problems)}"

    @property
    def facts(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self) | {"same": not self.failed and not self.why, "verdict": self.verdict}


def compare(
    checkpoint: Path, folder: Path, say: Say = lambda _: None, accept: Collection[str] = (), seed: int = 0
) -> ParityReport:
    """checkpoint: a verified folder step-N; accept: as for `HuggingFaceFolder`.

    Raises CheckpointError, ConfigError."""
    theirs, run = HuggingFaceFolder(folder, accept), run_of(checkpoint)
    plain = without_mup(run.model)
    found = ParityReport(checkpoint, folder, tensors=sum(map(len, theirs.parts.values())))
    _same_model(checkpoint, plain, theirs)
    for key in NUMBERS:
        mine, other = _effective(plain, key), _effective(theirs.config, key)
        if mine != other:
            found.settings.append(f"model.{key} is {other} in the folder, and {mine} in the checkpoint")
    held = {theirs.dtype(part.name) for parts in theirs.parts.values() for part in parts}
    found.precision = ", ".join(sorted(str(dtype).removeprefix("torch.") for dtype in held))
    weights = _Rounded(WholeState(checkpoint), run.model, theirs)
    samples = _samples(run, theirs, seed, found.notes)
    whole, largest = _memory(theirs, samples)
    free = free_memory.free()
    if importlib.util.find_spec("transformers") is None:
        install = install_command("hf")
        found.why = f"transformers, which the check needs, is not installed: {install}, then run `check`"
    elif largest > free:
        need = f"it would take {size(largest)} of memory, but {size(free)} are free"
        found.why = f"{need}: run `check` on a larger machine"
    if found.why:
        found.unequal = weights.all_unequal()
        return found
    tokens = torch.cat([t for _, t in samples])
    at = _positions(tokens, theirs)
    # Not inference_mode: the table of positions that the model keeps is used with gradients, too.
    with torch.no_grad():
        say("our logits")
        mine = logits.ours(run, checkpoint, weights, tokens, at)
        found.unequal = sorted(weights.unequal)
        say("logits of transformers")
        found.how = "loaded whole" if whole <= free else "loaded layer by layer, for want of memory"
        other, found.transformers = logits.theirs(theirs, tokens, at, whole <= free)
    first = 0
    for of, rows in samples:
        found.rows.append(_row(of, mine[first : first + len(rows)], other[first : first + len(rows)]))
        first += len(rows)
    return found


def _same_model(checkpoint: Path, ours: ModelConfig, folder: HuggingFaceFolder) -> None:
    """Check that both describe the same model. Raises CheckpointError with the difference."""
    theirs = folder.config
    for key in ModelConfig.model_fields:
        a, b = _effective(ours, key), _effective(theirs, key)
        if a != b and key not in OWN and key not in (*NUMBERS, "full_attention_every"):
            raise CheckpointError(
                f"{folder.path} is a different model from {checkpoint}: model.{key} is {b} in the folder, {a} in the "
                "checkpoint"
            )


def _effective(config: ModelConfig, key: str) -> Any:
    """What a key amounts to, also where it is left out."""
    if key == "window":
        return [config.window_of(block) for block in range(config.layers)]
    return getattr(config, EFFECTIVE.get(key, key))


def _samples(
    run: RunConfig, folder: HuggingFaceFolder, seed: int, notes: list[str]
) -> list[tuple[str, Tensor]]:
    """Tokens to compare on: (description, int64 [rows, length])."""
    vocabulary = folder.config.vocab_size
    assert vocabulary is not None
    budget = int(WORK / (2 * folder.numel) / (2 * ROWS))
    length = min(run.model.sequence_length, folder.config.sequence_length, LENGTH, max(32, budget))
    drawn = torch.Generator().manual_seed(seed)
    found = [("random tokens", torch.randint(vocabulary, (ROWS, length), generator=drawn))]
    try:
        source = open_corpora(
            run.data.corpora, length, run.run.seed, validation=run.data.validation
        ).validation
        if source is not None:
            text = torch.from_numpy(source.samples(np.arange(ROWS)))[:, :-1]
            if int(text.max()) < vocabulary:
                return [*found, ("text of the validation corpus", text)]
    except (MegastableError, IndexError):
        pass  # the corpora need not be on this machine
    try:
        ids = load_tokenizer(folder.path, NO_EOD).encode(real_text())
    except MegastableError:
        notes.append("compared on random tokens alone: neither the run's corpora nor a tokenizer were found")
        return found
    rows = min(ROWS, len(ids) // length)
    text = torch.tensor(ids[: rows * length]).view(rows, length)
    return (
        [*found, ("text of Python's own library", text)] if rows and int(text.max()) < vocabulary else found
    )


def _memory(folder: HuggingFaceFolder, samples: Sequence[tuple[str, Tensor]]) -> tuple[int, int]:
    """Bytes that transformers need with the whole model, and layer by layer."""
    c, tokens = folder.config, torch.cat([t for _, t in samples])
    rows, length = tokens.shape
    # Activations of a layer: its MLP, and scores of attention; logits of both, and what is computed from them.
    scores, answers = rows * c.heads * length**2, len(_positions(tokens, folder)) * rows * (c.vocab_size or 0)
    activations = 4 * (tokens.numel() * (6 * c.hidden + 4 * c.ffn_width) + 3 * scores + 6 * answers)
    outside = 4 * c.hidden * (c.vocab_size or 0) * 2
    layer = (4 * folder.numel - outside // (2 if c.tied else 1)) // c.layers
    return int(1.1 * 4 * folder.numel) + activations, outside + 2 * layer + activations


def _positions(tokens: Tensor, folder: HuggingFaceFolder) -> Tensor:
    """The positions of a row to compare: all, or as many as fit, evenly spaced, with the last."""
    rows, length = tokens.shape
    most = max(1, min(length, LOGITS // (4 * (folder.config.vocab_size or 1) * rows)))
    return torch.linspace(length - 1, 0, most).round().long().flip(0)


class _Rounded:
    """The checkpoint's weights, times muP's scales if `model` has them, rounded as the folder should hold them; records
    the tensors that differ."""

    def __init__(self, whole: WholeState, model: ModelConfig, folder: HuggingFaceFolder) -> None:
        self.whole, self.model, self.folder, self.unequal = whole, model, folder, set[str]()
        self.table = table(folder.config)

    def __call__(self, name: str) -> Tensor:
        """fp32, with the padding of the vocabulary unchanged; for our model, so without those scales."""
        tensor, parts = self.whole.tensor(name, "weight"), self.table[name]
        factor = factor_of(name, self.model)
        if factor != 1:
            tensor = tensor * factor
        rounded = {}
        for theirs, part in split(tensor, parts).items():
            held = self.folder.tensor(theirs)
            if held.dtype == torch.float64:  # converted on reading
                held = held.float()
            mine = part.to(held.dtype)
            if not torch.equal(mine.view(torch.uint8), held.view(torch.uint8)):  # -0.0 is not 0.0, nan is nan
                self.unequal.add(theirs)
            rounded[theirs] = mine.float()
        whole = merge(rounded, parts, len(tensor))
        return whole if factor == 1 else whole / factor

    def all_unequal(self) -> list[str]:
        for name in self.table:
            self(name)
        return sorted(self.unequal)


def _row(of: str, ours: Tensor, theirs: Tensor) -> LogitRow:
    """ours, theirs: fp32 [rows, positions, vocabulary]."""
    mine, other = ours.flatten(0, 1), theirs.flatten(0, 1)
    if mine.shape != other.shape:
        raise CheckpointError(f"transformers give logits {tuple(theirs.shape)}, ours are {tuple(ours.shape)}")
    largest = scale = total = 0.0
    for a, b in zip(mine.split(64), other.split(64), strict=True):
        p, q = a.double().log_softmax(-1), b.double().log_softmax(-1)
        total += float((p.exp() * (p - q)).sum())
        # max() of Python would drop a nan.
        largest = (
            float(np.fmax(largest, float((a - b).abs().max())))
            if bool((a - b).isfinite().all())
            else math.nan
        )
        scale = max(scale, float(a.abs().max()))
        if math.isnan(largest):
            break
    agree = float((mine.argmax(-1) == other.argmax(-1)).double().mean())
    # max() of Python would make 0 of a nan.
    kl = math.nan if math.isnan(largest) else float(np.maximum(0.0, total / len(mine)))
    return LogitRow(of, len(mine), largest, kl, agree, scale)


def sheet(found: ParityReport) -> Sheet:
    """The report as a table."""
    facts = [
        ("checkpoint", str(found.checkpoint)),
        ("folder", str(found.folder)),
        ("weights there", found.precision),
    ]
    if found.rows:
        facts.append(("transformers", f"{found.transformers}, {found.how}"))
    facts.append(("tensors", f"{plural(found.tensors, 'tensor')}, {len(found.unequal)} different"))
    columns = (
        Column("of", "compared on"), Column("tokens", "positions", "count"),
        Column("largest", "largest difference", "text"), Column("kl", "KL, nats/token", "text"),
        Column("agree", "same likeliest token", "share"), Column("scale", "largest logit", "number"),
    )  # fmt: skip
    rows = [
        {"of": r.of, "tokens": r.tokens, "largest": f"{r.largest:.3g}", "kl": f"{r.kl:.3g}", "agree": r.agree,
         "scale": r.scale}
        for r in found.rows
    ]  # fmt: skip
    notes = [
        *found.notes,
        f"Both in fp32, the checkpoint's weights rounded to what the folder holds. Limits: {LARGEST:g}, {KL:g}.",
    ]
    return Sheet(
        found.verdict, facts=facts, columns=columns, rows=rows, notes=notes if found.rows else found.notes
    )
