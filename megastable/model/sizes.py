"""Costs of layers and chunk sizes of the loss, from a model's sizes alone. Pure; without torch, for the planner."""

from __future__ import annotations

from functools import lru_cache

from megastable.config.model import ModelConfig
from megastable.config.rules import LINEARS
from megastable.config.training import Fp8Config
from megastable.config.tree import RunConfig

# Logits at a time. Chunks must be long, so that adding up dW [rows, h] once per chunk costs little.
CPU_ELEMENTS = 2**26
GPU_ELEMENTS = 2**27

PREDICTED = 32  # every so many tokens the entropy of the prediction is measured: all took 0.3 % of a step


def elements_on(device: str) -> int:
    """Logits at a time on a device of this type."""
    return CPU_ELEMENTS if device == "cpu" else GPU_ELEMENTS


def space_evenly(length: int, most: int) -> list[int]:
    """At most so many positions of a sequence, evenly spaced, with the last one."""
    n = min(length, most)
    return [(i + 1) * length // n - 1 for i in range(n)]


def choose_predicted_positions(length: int) -> list[int]:
    """Positions of a sample of `length` tokens whose predictions are measured: every `PREDICTED`th, with the last."""
    return space_evenly(length, -(-length // PREDICTED))


def keys_seen(length: int, window: int | None) -> float:
    """Keys that a query of causal attention sees, in the mean over a sample of `length` tokens.

    Of `length` queries the first ones see fewer than `window`: an area of length x window - window² / 2.
    """
    return length / 2 if window is None or window >= length else window - window**2 / (2 * length)


def block_cost(c: ModelConfig, block: int) -> float:
    """Multiply-adds of a block per token, with causal attention (half of the scores, or those of its window)."""
    width = c.head_width * (2 * c.heads + 2 * c.key_value_heads)
    seen = keys_seen(c.sequence_length, c.window_of(block))
    return c.hidden * width + 3 * c.hidden * c.ffn_width + 2 * seen * c.heads * c.head_width


def matrix_elements(c: ModelConfig) -> int:
    """Elements of the model's matrices: all of its weights but those of the norms and biases, which are few."""
    attention = c.head_width * 2 * (c.heads + c.key_value_heads)
    block = c.hidden * (attention + 3 * c.ffn_width)
    return c.layers * block + c.hidden * c.padded_vocab * (1 if c.tied else 2)


def layer_costs(c: ModelConfig) -> list[tuple[float, bool]]:
    """For every layer (embedding, blocks, final norm, head): its cost per token, in multiply-adds, and whether it is a
    block."""
    blocks = [(block_cost(c, block), True) for block in range(c.layers)]
    return [(1.0, False), *blocks, (1.0, False), (float(c.hidden * c.padded_vocab), False)]


def chunk_size(tokens: int, columns: int, elements: int) -> int:
    """Tokens at a time: about `elements` logits, in equal chunks if the number of tokens has such a divisor.

    Equal, because every further size is compiled once more.
    """
    chunks = -(-tokens // max(elements // columns, 1))
    equal = next((n for n in range(chunks, 2 * chunks) if tokens % n == 0), chunks)
    return -(-tokens // equal)


def in_fp8(config: RunConfig) -> frozenset[str]:
    """The linear layers that `precision.fp8` computes, by name; none without it."""
    blocks = range(config.model.layers)
    return frozenset(f"blocks.{i}.{linear}" for i in blocks for linear in fp8_linears(config, i))


def fp8_linears(config: RunConfig, index: int) -> frozenset[str]:
    """The linear layers of block `index`, of `LINEARS`, that are computed in FP8."""
    fp8 = config.precision.fp8
    return frozenset() if fp8 is None else _fp8_linears(fp8, config.model.layers, index)


@lru_cache(maxsize=4096)  # the layout search asks repeatedly
def _fp8_linears(fp8: Fp8Config, layers: int, index: int) -> frozenset[str]:
    if not fp8.keep_first <= index < layers - fp8.keep_last:
        return frozenset()
    return frozenset(linear for linear in LINEARS if f"blocks.{index}.{linear}" not in fp8.keep)
