"""A table of runs in which every two choices and parts of a layout meet, instead of every choice under every layout.

Faults of combinations are faults of two settings, hardly ever of three (Kuhn et al., doi:10.1109/TSE.2004.24). A value
that is added to `COLUMNS` needs rows in `TABLE`; `missing` names the pairs that they must have.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import combinations, product

Row = Mapping[str, str]

COLUMNS: dict[str, tuple[str, ...]] = {
    "pipeline": ("1", "2", "3", "4"),
    "tensor": ("1", "2"),
    "data": ("1", "2", "3"),
    "zero": ("1", "2", "3"),
    "context": ("1", "2"),
    "sequence": ("no", "yes"),
    "recompute": ("none", "selective", "full"),
    "precision": ("fp32", "bf16", "fp16", "fp8"),
    "tied": ("no", "yes"),
    "model": (
        "plain", "both", "mixed", "deep", "branch", "norm-scaling", "zero-centered", "caps", "windows", "clamp",
        "spike-no-more", "zero-residual", "dropout", "mup", "gemma2", "qwen2",
    ),
    "optimizer": (
        "adamw", "low-moments", "sgd", "stable_adamw", "lamb", "spam", "stable_spam", "adafactor",
        "adafactor-momentum", "muon", "muon-clip",
    ),
    "clipping": ("norm", "value", "adagc", "zclip", "agc", "worker"),
}  # fmt: skip
MOST = 8  # ranks


def possible(row: Row) -> bool:
    """Whether the recipe allows these values together; a row may be part of one."""

    def has(column: str, *values: str) -> bool:
        return row.get(column) in values

    staged = has("pipeline", "2", "3", "4")
    ranks = 1
    for column in ("pipeline", "tensor", "data", "context"):
        ranks *= int(row.get(column, "1"))
    refused = (
        ranks > MOST,
        staged and has("zero", "2", "3"),
        has("sequence", "yes") and has("tensor", "1"),
        has("clipping", "worker") and (has("precision", "fp32", "fp16") or has("zero", "2", "3")),
        has("clipping", "worker") and has("tied", "yes") and staged,
        # QK-clip is for models without QK-norm.
        has("optimizer", "muon-clip") and "model" in row and not has("model", "caps", "gemma2", "qwen2"),
        # Their rates and decays are those of Adam.
        has("model", "mup", "spike-no-more") and "optimizer" in row and not has("optimizer", "adamw", "low-moments"),
    )  # fmt: skip
    return not any(refused)


# What an optimizer and clipping do to a gradient does not depend on how the model made it.
APART = {frozenset(pair) for pair in (("model", "optimizer"), ("model", "clipping"))}


def wanted() -> Iterator[frozenset[tuple[str, str]]]:
    """The pairs that must meet."""
    for one, other in combinations(COLUMNS, 2):
        if frozenset((one, other)) not in APART:
            for a, b in product(COLUMNS[one], COLUMNS[other]):
                if possible({one: a, other: b}):
                    yield frozenset(((one, a), (other, b)))


def missing(rows: list[dict[str, str]]) -> set[frozenset[tuple[str, str]]]:
    """The pairs that no row has."""
    met = {frozenset(pair) for row in rows for pair in combinations(row.items(), 2)}
    return set(wanted()) - met


TABLE = """
pipeline tensor data zero context sequence recompute precision tied model         optimizer          clipping
1        1      1    1    1       no       selective bf16      yes  dropout       sgd                worker
1        1      1    1    1       no       full      fp8       no   qwen2         adafactor          worker
1        1      1    2    1       no       full      fp8       no   spike-no-more adamw              agc
1        1      1    3    1       no       selective fp16      yes  deep          adamw              zclip
1        1      1    3    1       no       full      fp32      no   clamp         low-moments        adagc
1        1      2    2    1       no       selective bf16      yes  dropout       spam               adagc
1        1      2    3    1       no       none      fp8       yes  zero-centered spam               norm
1        1      2    3    1       no       full      bf16      no   caps          stable_spam        value
1        1      2    3    1       no       full      fp8       no   both          lamb               adagc
1        2      1    1    1       yes      none      fp8       yes  zero-residual adafactor-momentum worker
1        2      1    2    1       yes      none      fp32      yes  windows       low-moments        value
1        2      1    2    1       yes      none      fp16      yes  mixed         muon               agc
1        2      1    2    1       yes      full      fp8       no   deep          stable_adamw       agc
1        2      1    3    1       yes      selective fp32      no   branch        sgd                adagc
2        1      1    1    1       no       none      fp32      yes  zero-centered adafactor-momentum agc
2        1      1    1    1       no       none      fp16      yes  mup           low-moments        zclip
2        1      1    1    1       no       none      fp8       yes  mixed         low-moments        zclip
2        1      1    1    1       no       selective bf16      no   plain         sgd                agc
2        1      1    1    1       no       selective fp8       no   norm-scaling  stable_spam        agc
2        1      1    1    1       no       full      bf16      no   clamp         adamw              worker
2        1      1    1    1       no       full      fp16      yes  zero-residual adafactor          adagc
2        1      1    1    1       no       full      fp8       no   qwen2         adafactor          value
1        1      3    1    1       no       none      bf16      yes  gemma2        muon-clip          worker
1        1      3    1    1       no       selective bf16      yes  mixed         stable_adamw       worker
1        1      3    2    1       no       none      fp32      no   gemma2        sgd                adagc
1        1      3    2    1       no       none      fp32      yes  zero-residual adafactor          norm
1        1      3    2    1       no       none      bf16      yes  deep          lamb               adagc
1        1      3    2    1       no       none      bf16      yes  norm-scaling  muon               value
1        1      3    2    1       no       none      fp16      no   mup           adamw              norm
1        1      3    2    1       no       selective fp32      yes  branch        adamw              norm
1        1      3    2    1       no       full      fp32      yes  qwen2         adafactor          zclip
1        1      3    3    1       no       selective fp8       yes  windows       muon               zclip
1        1      3    3    1       no       full      fp16      no   plain         lamb               zclip
3        1      1    1    1       no       none      bf16      yes  gemma2        muon-clip          adagc
3        1      1    1    1       no       none      fp16      yes  dropout       stable_adamw       adagc
3        1      1    1    1       no       none      fp8       no   mixed         adafactor          value
3        1      1    1    1       no       selective fp32      no   windows       adafactor-momentum norm
3        1      1    1    1       no       selective fp32      no   clamp         sgd                zclip
3        1      1    1    1       no       selective bf16      yes  norm-scaling  adafactor-momentum agc
3        1      1    1    1       no       selective fp16      no   branch        spam               value
3        1      1    1    1       no       full      fp32      yes  both          adamw              agc
3        1      1    1    1       no       full      bf16      no   spike-no-more adamw              worker
3        1      1    1    1       no       full      fp16      no   qwen2         lamb               agc
3        1      1    1    1       no       full      fp16      yes  caps          adafactor-momentum zclip
3        1      1    1    1       no       full      fp8       yes  zero-residual muon               adagc
1        1      2    2    2       no       none      fp32      no   plain         stable_spam        zclip
1        1      2    2    2       no       none      fp8       no   clamp         adamw              adagc
1        1      2    3    2       no       selective bf16      no   zero-residual adafactor-momentum value
1        1      2    3    2       no       full      fp32      no   mixed         sgd                value
1        2      1    2    2       yes      none      fp8       no   caps          muon-clip          value
1        2      1    2    2       yes      selective bf16      no   both          lamb               zclip
1        2      1    3    2       no       full      bf16      no   branch        low-moments        adagc
1        2      1    3    2       yes      selective bf16      yes  gemma2        muon-clip          agc
1        2      1    3    2       yes      full      fp32      yes  norm-scaling  stable_adamw       norm
1        2      1    3    2       yes      full      fp32      yes  mup           adamw              value
1        2      2    3    1       yes      none      bf16      yes  qwen2         adafactor          agc
2        1      2    1    1       no       none      fp8       yes  branch        lamb               norm
2        1      2    1    1       no       selective fp16      yes  spike-no-more low-moments        zclip
2        1      2    1    1       no       full      bf16      yes  deep          stable_adamw       zclip
2        1      2    1    1       no       full      fp16      yes  gemma2        muon-clip          norm
2        2      1    1    1       yes      full      fp32      yes  dropout       spam               agc
4        1      1    1    1       no       none      fp32      no   caps          muon-clip          zclip
4        1      1    1    1       no       none      fp32      yes  zero-residual stable_adamw       value
4        1      1    1    1       no       none      bf16      no   mup           low-moments        worker
4        1      1    1    1       no       none      fp16      no   plain         sgd                norm
4        1      1    1    1       no       none      fp8       no   deep          stable_spam        norm
4        1      1    1    1       no       none      fp8       no   dropout       spam               worker
4        1      1    1    1       no       none      fp8       yes  both          adamw              zclip
4        1      1    1    1       no       selective bf16      yes  branch        stable_adamw       zclip
4        1      1    1    1       no       selective fp16      yes  mixed         adafactor-momentum adagc
4        1      1    1    1       no       selective fp16      yes  zero-centered stable_spam        agc
4        1      1    1    1       no       selective fp16      yes  windows       muon               norm
4        1      1    1    1       no       full      fp32      yes  clamp         adafactor-momentum adagc
4        1      1    1    1       no       full      fp8       no   gemma2        lamb               worker
1        1      3    2    2       no       full      fp16      yes  zero-centered adafactor-momentum norm
1        1      3    3    2       no       none      fp32      no   spike-no-more adamw              agc
1        1      3    3    2       no       none      fp8       no   dropout       spam               zclip
1        2      3    1    1       yes      selective fp16      yes  clamp         stable_spam        adagc
2        1      3    1    1       no       none      fp16      yes  both          low-moments        agc
2        1      3    1    1       no       selective fp32      yes  caps          lamb               value
3        1      1    1    2       no       none      fp32      no   deep          muon               adagc
3        1      2    1    1       no       selective fp8       no   mup           low-moments        norm
3        2      1    1    1       yes      selective bf16      no   zero-centered stable_spam        worker
3        2      1    1    1       yes      full      fp8       yes  plain         sgd                zclip
2        1      2    1    2       no       full      bf16      no   windows       muon               worker
4        1      1    1    2       no       selective fp8       no   qwen2         adafactor          agc
4        1      2    1    1       no       none      fp16      no   norm-scaling  stable_adamw       value
4        2      1    1    1       yes      full      bf16      yes  spike-no-more adamw              norm
"""
_HEAD, *_LINES = (line.split() for line in TABLE.strip().splitlines())
ROWS: dict[str, dict[str, str]] = {"-".join(line): dict(zip(_HEAD, line, strict=True)) for line in _LINES}
