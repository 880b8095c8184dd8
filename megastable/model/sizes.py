"""Parameters, FLOPs and costs of layers, chunk sizes of the loss, and what FP8 computes, from a model's sizes alone.

Pure; without torch, for the planner.
"""

from __future__ import annotations

from functools import lru_cache

from megastable.config.model import ModelConfig
from megastable.config.rules import list_linears
from megastable.config.training import Fp8Config
from megastable.config.tree import RunConfig


def count_parameters(c: ModelConfig) -> int:
    """Trainable parameters of the whole model, vocabulary padding included."""
    d = c.head_width
    norm_elements = {False: 0, True: 2, "full": c.heads + c.key_value_heads}[c.qk_norm] * d
    bias_elements = d * (c.heads + 2 * c.key_value_heads) if c.qkv_bias else 0
    attention_weights = c.hidden * d * (2 * c.heads + 2 * c.key_value_heads) + norm_elements + bias_elements
    block_norms = (4 if c.norms == "both" else 2) * c.hidden
    block_elements = c.layers * (attention_weights + block_norms) + _mlp_elements(c)
    return block_elements + c.hidden + c.padded_vocab * c.hidden * (1 if c.tied else 2)


def describe_active(c: ModelConfig) -> str:
    """How many of the parameters a token uses, for a place behind their number; "" if it uses all of them."""
    if c.experts is None:
        return ""
    active_parameters = count_parameters(c) - _mlp_elements(c) + _mlp_elements(c, of_token=True)
    return f" ({active_parameters / 1e6:,.1f}M of them for a token)"


def _mlp_elements(c: ModelConfig, of_token: bool = False) -> int:
    """Weights of the MLPs and routers of all blocks; of_token: only those that are used for a token."""
    router_rows = 0 if c.experts is None else c.expert_blocks * c.experts.count
    return c.hidden * (3 * c.mlp_widths(of_token) + router_rows)


def flops_per_token(c: ModelConfig, causal: bool) -> float:
    """Forward and backward, 6 per weight used in a product, plus attention. Of experts those of one token count.

    causal=False counts the full s x s attention square (PaLM, arXiv:2204.02311 appendix B); causal=True counts
    only the half that a causal model needs. A sliding window is counted to both sides, or to the one that is needed.
    Recomputation is not counted in either (MFU, not HFU).
    """
    d = c.head_width
    product_weights = c.layers * c.hidden * d * (2 * c.heads + 2 * c.key_value_heads)
    product_weights += _mlp_elements(c, of_token=True)
    product_weights += c.hidden * c.padded_vocab
    seen_keys = sum(keys_seen(c.sequence_length, c.window_of(block)) for block in range(c.layers))
    attention_flops = 24 * c.heads * d * seen_keys
    return 6 * product_weights + attention_flops * (0.5 if causal else 1.0)


MULTIPLE = 16  # sizes of its FP8 products must be multiples of this


def find_misfit(config: RunConfig) -> str | None:
    """The reason why it has no products for a model in this layout, on any GPU; None if it has."""
    c, m, p = config, config.model, config.parallel
    if c.precision.kind != "bf16":
        return f"around Transformer Engine's FP8 everything is bf16, and precision.kind is {c.precision.kind}"
    if m.experts is not None:
        return "its layers do not take the tokens of one expert of many"
    rank_heads, rank_kv_heads, d = m.heads // p.tensor, m.key_value_heads // p.tensor, m.head_width
    qkv_width = (rank_heads + 2 * rank_kv_heads) * d
    sharing_ranks = p.context * (p.tensor if p.sequence else 1)
    size_by_name = {
        "model.hidden": m.hidden,
        "queries, keys and values of a tensor rank (model.heads, kv_heads, head_dim)": qkv_width,
        "the heads of a tensor rank (model.heads, head_dim)": rank_heads * d,
        "model.ffn of a tensor rank": m.ffn_width // p.tensor,
        "tokens of a rank (train.micro_batch, model.sequence_length)": (
            c.train.micro_batch * m.sequence_length // sharing_ranks
        ),
    }
    for size_name, product_size in size_by_name.items():
        if product_size % MULTIPLE:
            return f"its FP8 products need multiples of {MULTIPLE}, but {size_name}: {product_size:,}"
    return None


# Logits at a time. Chunks must be long, so that adding up dW [rows, h] once per chunk costs little.
CPU_ELEMENTS = 2**26
GPU_ELEMENTS = 2**27

PREDICTED = 32  # every so many tokens the entropy of the prediction is measured: all took 0.3 % of a step


def elements_on(device: str) -> int:
    """Logits at a time on a device of this type."""
    return CPU_ELEMENTS if device == "cpu" else GPU_ELEMENTS


def space_evenly(length: int, most: int) -> list[int]:
    """At most so many positions of a sequence, evenly spaced, with the last one."""
    position_count = min(length, most)
    return [(i + 1) * length // position_count - 1 for i in range(position_count)]


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
    projection_width = c.head_width * (2 * c.heads + 2 * c.key_value_heads)
    seen_keys = keys_seen(c.sequence_length, c.window_of(block))
    mlp_columns = 3 * c.ffn_width
    if (experts := c.experts_of(block)) is not None:
        mlp_columns = 3 * c.expert_width * (experts.top_k + experts.shared) + experts.count
    return c.hidden * (projection_width + mlp_columns) + 2 * seen_keys * c.heads * c.head_width


def matrix_elements(c: ModelConfig, expert: int = 1) -> int:
    """Elements of the model's matrices: all of its weights but those of the norms and biases, which are few. expert: of
    them, those of one of so many ranks that share out the experts."""
    attention_columns = c.head_width * 2 * (c.heads + c.key_value_heads)
    block_elements = c.layers * c.hidden * attention_columns + _mlp_elements(c)
    if c.experts is not None:
        block_elements -= (
            3 * c.hidden * c.expert_width * c.expert_blocks * (c.experts.count - c.experts.count // expert)
        )
    return block_elements + c.hidden * c.padded_vocab * (1 if c.tied else 2)


def layer_costs(c: ModelConfig) -> list[tuple[float, bool]]:
    """For every layer (embedding, blocks, final norm, head): its cost per token, in multiply-adds, and whether it is a
    block."""
    block_costs = [(block_cost(c, block), True) for block in range(c.layers)]
    return [(1.0, False), *block_costs, (1.0, False), (float(c.hidden * c.padded_vocab), False)]


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


def keeps_weight_casts(config: RunConfig) -> bool:
    """Whether the micro-batches of a step share one cast of each weight to FP8. Not where weights are partitioned, nor
    where memory is what matters: the casts of all layers would stay beside the recomputed block."""
    return config.parallel.zero < 3 and config.parallel.recompute != "full"


def fp8_linears(config: RunConfig, index: int) -> frozenset[str]:
    """The linear layers of block `index`, of `list_linears`, that are computed in FP8."""
    fp8_config, m = config.precision.fp8, config.model
    if fp8_config is None:
        return frozenset()
    return _fp8_linears(fp8_config, m.layers, index, list_linears(m, index))


@lru_cache(maxsize=4096)  # the layout search asks repeatedly
def _fp8_linears(fp8: Fp8Config, layers: int, index: int, linears: tuple[str, ...]) -> frozenset[str]:
    if not fp8.keep_first <= index < layers - fp8.keep_last:
        return frozenset()
    return frozenset(linear for linear in linears if f"blocks.{index}.{linear}" not in fp8.keep)
