"""Training FLOPs of a model, for MFU in both conventions. Pure."""

from __future__ import annotations

from megastable.config.model import ModelConfig
from megastable.model.sizes import keys_seen


def parameters(c: ModelConfig) -> int:
    """Trainable parameters of the whole model, vocabulary padding included."""
    d = c.head_width
    norms = {False: 0, True: 2, "full": c.heads + c.key_value_heads}[c.qk_norm] * d
    biases = d * (c.heads + 2 * c.key_value_heads) if c.qkv_bias else 0
    attention = c.hidden * d * (2 * c.heads + 2 * c.key_value_heads) + norms + biases
    block = attention + 3 * c.hidden * c.ffn_width + (4 if c.norms == "both" else 2) * c.hidden
    return c.layers * block + c.hidden + c.padded_vocab * c.hidden * (1 if c.tied else 2)


def flops_per_token(c: ModelConfig, causal: bool) -> float:
    """Forward and backward, 6 per weight used in a product, plus attention.

    causal=False counts the full s x s attention square (PaLM, arXiv:2204.02311 appendix B); causal=True counts
    only the half that a causal model needs. A sliding window is counted to both sides, or to the one that is needed.
    Recomputation is not counted in either (MFU, not HFU).
    """
    d = c.head_width
    products = c.layers * c.hidden * (d * (2 * c.heads + 2 * c.key_value_heads) + 3 * c.ffn_width)
    products += c.hidden * c.padded_vocab
    seen = sum(keys_seen(c.sequence_length, c.window_of(block)) for block in range(c.layers))
    attention = 24 * c.heads * d * seen
    return 6 * products + attention * (0.5 if causal else 1.0)
