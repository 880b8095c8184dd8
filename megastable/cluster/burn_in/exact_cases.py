"""Matrix products and attention with answers that are known bit for bit, computed by integers on the CPU.

    case = matmul_case("cuda", seed, round, number)
    run = case.setup(device)
    run()    # must equal case.answers

Every sum is one of integers and so exact in any order: kernels may split and tile as they like.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from megastable.base import products
from megastable.base.splitmix import sequence
from megastable.cluster.burn_in import draws

Run = Callable[[], tuple[Tensor, ...]]
ROWS = 32  # different rows of A and columns of B: their products are a small table, computed by int64
# Sums of absolute values up to these are exact in the dtype itself, whatever a kernel adds in: 8, 11, 24 bits.
EXACT = {torch.bfloat16: 1 << 8, torch.float16: 1 << 11, torch.float32: 1 << 24}
# Up to these they are exact in an fp32 accumulator, and are rounded once, to the dtype. Two bits are left: tensor cores
# align the terms of a sum before they add them. fp16 ends at 65,504.
ACCUMULATED = {torch.bfloat16: 1 << 22, torch.float16: 1 << 15, torch.float32: 1 << 22}
LARGEST = {torch.bfloat16: 1 << 8, torch.float16: 1 << 11, torch.float32: 1 << 11}  # fp32: exact as TF32, too
SIDES = {"cuda": (1024, 8192, 64), "cpu": (32, 160, 1)}  # smallest, largest, step: of n, k and m
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
FACTOR = (
    16  # of queries: a key that is not picked has a score at least 8 x 16 lower, and exp(-128) is 0 in fp32
)
VALUES = {
    torch.bfloat16: 127,
    torch.float16: 20,
    torch.float32: 127,
}  # products of two, summed over a head: fp16 holds
HEADS = {"cuda": (64, 128), "cpu": (32, 64)}


@dataclass(frozen=True)
class KnownCase:
    """setup: puts the inputs on a device, and gives what computes there. answers: of each of its results, on the
    CPU."""

    what: str
    answers: tuple[Tensor, ...]
    setup: Callable[[torch.device], Run]


@dataclass(frozen=True)
class MatmulShape:
    """A [n, k] times B [k, m].

    terms: nonzero elements in a row of A, up to +-a_most; all of B are, up to +-b_most. a_turned, b_turned: whether it
    lies in memory transposed, as in the products of a backward pass. tf32: fp32 through the tensor cores.
    """

    n: int
    k: int
    m: int
    dtype: torch.dtype
    terms: int
    a_most: int
    b_most: int
    a_turned: bool = False
    b_turned: bool = False
    tf32: bool = False

    @property
    def what(self) -> str:
        layout = ("T" if self.a_turned else "N") + ("T" if self.b_turned else "N")
        terms = f", {self.terms} terms" if self.terms < self.k else ""
        tf32 = " as TF32" if self.tf32 else ""
        return f"{name(self.dtype)}{tf32} [{self.n}, {self.k}] x [{self.k}, {self.m}] {layout}{terms}"


def name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def matmul_shape(kind: str, seed: int, round_: int, number: int) -> MatmulShape:
    """Pure. kind: "cuda" or "cpu"; number: of the case in its round."""
    key = draws.key("matmul", seed, round_, number)
    dtype = DTYPES[(round_ + number) % len(DTYPES)]
    low, high, step = SIDES[kind]
    n, k, m = (step * draws.between(low // step, high // step, key, side) for side in "nkm")
    # What a CPU adds fp16 in is its own choice, so there only sums that are exact in fp16.
    narrow = dtype != torch.float32 and (draws.pick((True, False), key, "narrow") or kind == "cpu")
    if narrow:
        a_most, b_most = draws.pick(((1, 1), (1, 2), (2, 1)), key, "most")
        terms = min(k, EXACT[dtype] // (a_most * b_most))
    else:
        each = ACCUMULATED[dtype] // k
        a_most = min(1 << draws.between(0, each.bit_length() - 1, key, "most"), LARGEST[dtype])
        b_most, terms = min(each // a_most, LARGEST[dtype]), k
    return MatmulShape(
        n, k, m, dtype, terms, a_most, b_most,
        a_turned=draws.pick((True, False), key, "a"), b_turned=draws.pick((True, False), key, "b"),
        tf32=kind == "cuda" and dtype == torch.float32 and draws.pick((True, False), key, "tf32"),
    )  # fmt: skip


def matmul_case(kind: str, seed: int, round_: int, number: int) -> KnownCase:
    return matmul_of(matmul_shape(kind, seed, round_, number), draws.key("matmul of", seed, round_, number))


def matmul_of(shape: MatmulShape, key: int) -> KnownCase:
    """A's rows are drawn from a few different ones, and B's columns: C's elements from the table of their products."""
    rows = draws.nonzero(draws.key(key, "a"), (ROWS, shape.k), shape.a_most)
    if shape.terms < shape.k:
        order = sequence(draws.key(key, "terms"), 0, rows.numel()).view_as(rows).argsort(1)
        rows.scatter_(1, order[:, shape.terms :], 0)
    columns = draws.nonzero(draws.key(key, "b"), (ROWS, shape.k), shape.b_most)
    of_row = draws.integers(draws.key(key, "rows"), (shape.n,), 0, ROWS - 1)
    of_column = draws.integers(draws.key(key, "columns"), (shape.m,), 0, ROWS - 1)
    # By way of fp32, which holds every sum: so the dtype rounds once, as a kernel does.
    table = (rows @ columns.t()).float().to(shape.dtype)

    def setup(device: torch.device) -> Run:
        a = rows.to(shape.dtype)[of_row].to(device)
        b = columns.to(shape.dtype)[of_column].to(device).t()
        a = a.t().contiguous().t() if shape.a_turned else a
        b = b if shape.b_turned else b.contiguous()
        return lambda: (product(a, b, shape.tf32),)

    return KnownCase(shape.what, (table[of_row][:, of_column],), setup)


def product(a: Tensor, b: Tensor, tf32: bool) -> Tensor:
    """As a model computes it. tf32: allowed; it changes products on GPUs only."""
    if not a.is_cuda:
        return products.mm(a, b)
    torch.set_float32_matmul_precision("high" if tf32 else "highest")
    try:
        return torch.mm(a, b)
    finally:
        torch.set_float32_matmul_precision("highest")


# Attention


@dataclass(frozen=True)
class AttentionShape:
    """Queries, keys and values [batch, heads, length, head]. length: at most (head / 2)^2."""

    batch: int
    heads: int
    length: int
    head: int
    dtype: torch.dtype
    causal: bool

    @property
    def what(self) -> str:
        size = f"[{self.batch}, {self.heads}, {self.length}, {self.head}]"
        return f"{name(self.dtype)} {size}{' causal' if self.causal else ''}"


def attention_shape(kind: str, seed: int, round_: int, number: int) -> AttentionShape:
    """Pure; as `matmul_shape`."""
    key = draws.key("attention", seed, round_, number)
    head = draws.pick(HEADS[kind], key, "head")
    longest = (head // 2) ** 2
    gpu = kind == "cuda"
    return AttentionShape(
        batch=draws.between(1, 2, key, "batch"),
        heads=draws.between(4, 16, key, "heads") if gpu else 2,
        length=draws.between(longest // 2, longest, key, "length") if gpu else draws.between(9, 96, key, "length"),
        head=head,
        dtype=DTYPES[(round_ + number) % len(DTYPES)],
        causal=draws.pick((True, False), key, "causal"),
    )  # fmt: skip


def attention_case(kind: str, seed: int, round_: int, number: int) -> KnownCase:
    return attention_of(
        attention_shape(kind, seed, round_, number), draws.key("attention of", seed, round_, number)
    )


def attention_of(shape: AttentionShape, key: int) -> KnownCase:
    """Each query picks one key, so that each output is one row of the values.

    The score of the key that is picked is 0, that of others so low that their weight is exactly 0. Then the weights,
    their sum and its logarithm are exact in every kernel, and so are the gradients: values get those of the outputs
    that picked them, and queries and keys get 0.
    """
    batch, heads, length = shape.batch, shape.heads, shape.length
    size = (batch, heads, length, shape.head)
    codes = _codes(shape.head, length)
    if shape.causal:  # near and far ones, none of them after the query
        at = torch.arange(length)
        chosen = torch.where(at % 2 == 0, at // 2, at)
    else:
        chosen = draws.permutation(draws.key(key, "chosen"), length)
    signs = 2 * draws.integers(draws.key(key, "signs"), (shape.head,), 0, 1) - 1
    keys = torch.cat((codes, torch.ones_like(codes)), 1) * signs
    queries = FACTOR * torch.cat((codes[chosen], -torch.ones_like(codes)), 1) * signs
    values, slopes = (
        draws.tiled(draws.nonzero(draws.key(key, what), (draws.PRIME,), VALUES[shape.dtype]).float(), size)
        for what in ("values", "slopes")
    )
    of_values = torch.zeros_like(values).index_add_(2, chosen, slopes)
    zeros = torch.zeros(size, dtype=shape.dtype)
    answers = (values[:, :, chosen].to(shape.dtype), zeros, zeros, of_values.to(shape.dtype))

    def setup(device: torch.device) -> Run:
        def put(x: Tensor) -> Tensor:
            return x.to(shape.dtype).to(device).expand(size).contiguous()

        q, k, v, slope = map(put, (queries, keys, values, slopes))
        return lambda: attention(q, k, v, slope, shape.causal)

    return KnownCase(shape.what, answers, setup)


def attention(q: Tensor, k: Tensor, v: Tensor, slope: Tensor, causal: bool) -> tuple[Tensor, ...]:
    """The output, and the gradients of q, k and v for the gradient `slope` of the output; unscaled scores. -0 becomes
    0: a sum of zeros may be either."""
    q, k, v = (x.detach().requires_grad_() for x in (q, k, v))
    output = F.scaled_dot_product_attention(q, k, v, is_causal=causal, scale=1.0)
    return (output.detach(), *(g + 0.0 for g in torch.autograd.grad(output, (q, k, v), slope)))


def _codes(head: int, count: int) -> Tensor:
    """Rows of +1 and -1 [count, head / 2]: the product of two different ones is at most head / 4, of one with itself
    head / 2. Two halves, each a row of a Hadamard matrix (Sylvester 1867) or its negative."""
    half = head // 4
    at = torch.arange(half)
    parity = at[:, None] & at[None, :]
    for shift in (4, 2, 1):
        parity = parity ^ (parity >> shift)
    rows = 1 - 2 * (parity & 1)
    rows = torch.cat((rows, -rows))
    number = torch.arange(count)
    return torch.cat((rows[number % len(rows)], rows[number // len(rows)]), 1)
