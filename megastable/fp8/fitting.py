"""Check by sizes alone whether Transformer Engine has FP8 products for a model. Pure; without torch."""

from __future__ import annotations

from megastable.config.tree import RunConfig

MULTIPLE = 16  # sizes of its FP8 products must be multiples of this


def misfit(config: RunConfig) -> str | None:
    """The reason why it has no products for a model in this layout, on any GPU; None if it has."""
    c, m, p = config, config.model, config.parallel
    if c.precision.kind != "bf16":
        return f"around Transformer Engine's FP8 everything is bf16, and precision.kind is {c.precision.kind}"
    heads, kv, d = m.heads // p.tensor, m.key_value_heads // p.tensor, m.head_width
    sizes = {
        "model.hidden": m.hidden,
        "queries, keys and values of a tensor rank (model.heads, kv_heads, head_dim)": (heads + 2 * kv) * d,
        "the heads of a tensor rank (model.heads, head_dim)": heads * d,
        "model.ffn of a tensor rank": m.ffn_width // p.tensor,
        "tokens of a rank (train.micro_batch, model.sequence_length)": _tokens(config),
    }
    for name, size in sizes.items():
        if size % MULTIPLE:
            return f"its FP8 products need multiples of {MULTIPLE}, but {name}: {size:,}"
    return None


def _tokens(config: RunConfig) -> int:
    p = config.parallel
    shared = p.context * (p.tensor if p.sequence else 1)
    return config.train.micro_batch * config.model.sequence_length // shared
