"""The Triton kernels of elementwise.py, and how they are launched: every operand is read once and written once.

Rows of tiles are tokens. Numbers are computed in fp32 and rounded once, to the dtype of the result. Sums over tokens,
for the gradients of weights, are left in parts, one for each program of a fixed number: no atomics, so bits repeat.
"""

from __future__ import annotations

from math import gcd

import torch
import triton
import triton.language as tl
from torch import Tensor

TILE = 2048  # elements of a tensor that a program holds at a time, about
HEADS = 8  # most of them in a tile
NORM_PROGRAMS, HEAD_PROGRAMS = 512, 256  # in backward passes: of norms, and of each group of heads


@triton.jit
def find_inverse_rms(square_sum, width: tl.constexpr, eps):  # type: ignore[no-untyped-def]
    return tl.rsqrt(square_sum / width + eps)


@triton.jit
def load_factor(weight, at, mask, centered: tl.constexpr):  # type: ignore[no-untyped-def]
    """What a norm multiplies by, fp32."""
    loaded = tl.load(weight + at, mask=mask, other=0.0).to(tl.float32)
    if centered:
        loaded += 1.0
    return loaded


@triton.jit
def rotate_group(  # type: ignore[no-untyped-def]
    given, weight, result, first, heads, token, tokens, stride, turned_cos, turned_sin, eps,
    width: tl.constexpr, half: tl.constexpr, group: tl.constexpr, normed: tl.constexpr, centered: tl.constexpr,
):  # fmt: skip
    """Some heads of some tokens. given: at the first head of these; first: which it is in `result`, of `heads`."""
    pairs: tl.constexpr = width // 2
    pair = tl.arange(0, half)
    head = tl.arange(0, group)
    mask = (token < tokens)[:, None, None] & (pair < pairs)[None, None, :] & (head >= 0)[None, :, None]
    at = token[:, None, None] * stride + head[None, :, None] * width + pair[None, None, :]
    a = tl.load(given + at, mask=mask, other=0.0).to(tl.float32)
    b = tl.load(given + at + pairs, mask=mask, other=0.0).to(tl.float32)
    if normed:
        inverse = find_inverse_rms(tl.sum(a * a + b * b, 2), width, eps)[:, :, None]
        a *= inverse * load_factor(weight, pair, pair < pairs, centered)[None, None, :]
        b *= inverse * load_factor(weight, pair + pairs, pair < pairs, centered)[None, None, :]
    to = (token[:, None, None] * heads + first + head[None, :, None]) * width + pair[None, None, :]
    tl.store(result + to, a * turned_cos - b * turned_sin, mask=mask)
    tl.store(result + to + pairs, b * turned_cos + a * turned_sin, mask=mask)


@triton.jit
def load_turn(  # type: ignore[no-untyped-def]
    table, token, tokens, samples, by_place, by_sample, width: tl.constexpr, half: tl.constexpr
):
    """cos or sin, fp32 [rows, 1, half], of a table [s, b, d / 2] with these strides."""
    pair = tl.arange(0, half)
    mask = (token < tokens)[:, None] & (pair < width // 2)[None, :]
    at = ((token // samples) * by_place + (token % samples) * by_sample)[:, None] + pair[None, :]
    return tl.load(table + at, mask=mask, other=0.0)[:, None, :]


@triton.jit
def rotate_kernel(  # type: ignore[no-untyped-def]
    qkv, q_weight, k_weight, cos, sin, q, k, tokens, samples, turn_place, turn_sample, eps,
    q_heads: tl.constexpr, k_heads: tl.constexpr, width: tl.constexpr, half: tl.constexpr, group: tl.constexpr,
    rows: tl.constexpr, normed: tl.constexpr, centered: tl.constexpr,
):  # fmt: skip
    """qkv [tokens, (q + 2 k) d] -> q [tokens, q, d], k [tokens, k, d]."""
    token = tl.program_id(0).to(tl.int64) * rows + tl.arange(0, rows)
    first = tl.program_id(1) * group
    turned_cos = load_turn(cos, token, tokens, samples, turn_place, turn_sample, width, half)
    turned_sin = load_turn(sin, token, tokens, samples, turn_place, turn_sample, width, half)
    stride = (q_heads + 2 * k_heads) * width
    given = qkv + first * width
    if first < q_heads:
        rotate_group(
            given, q_weight, q, first, q_heads, token, tokens, stride, turned_cos, turned_sin, eps, width, half, group,
            normed, centered,
        )  # fmt: skip
    else:
        rotate_group(
            given, k_weight, k, first - q_heads, k_heads, token, tokens, stride, turned_cos, turned_sin, eps, width,
            half, group, normed, centered,
        )  # fmt: skip


@triton.jit
def unrotate_group(  # type: ignore[no-untyped-def]
    upstream, by_place, by_sample, by_head, given, weight, gradient, part, cos, sin, first, tokens, samples,
    turn_place, turn_sample, stride, eps,
    width: tl.constexpr, half: tl.constexpr, group: tl.constexpr, rows: tl.constexpr, normed: tl.constexpr,
    centered: tl.constexpr, turned: tl.constexpr,
):  # fmt: skip
    """The backward pass of `rotate_group` for all tokens of a program; turned: or of heads that stay as they are."""
    pairs: tl.constexpr = width // 2
    pair = tl.arange(0, half)
    head = tl.arange(0, group)
    a_total = tl.zeros([rows, group, half], tl.float32)
    b_total = tl.zeros([rows, group, half], tl.float32)
    row = tl.program_id(0).to(tl.int64) * rows
    while row < tokens:
        token = row + tl.arange(0, rows)
        mask = (token < tokens)[:, None, None] & (pair < pairs)[None, None, :] & (head >= 0)[None, :, None]
        place = (token // samples) * by_place + (token % samples) * by_sample
        above = place[:, None, None] + (first + head)[None, :, None] * by_head + pair[None, None, :]
        da = tl.load(upstream + above, mask=mask, other=0.0).to(tl.float32)
        db = tl.load(upstream + above + pairs, mask=mask, other=0.0).to(tl.float32)
        at = token[:, None, None] * stride + head[None, :, None] * width + pair[None, None, :]
        if turned:
            turned_cos = load_turn(cos, token, tokens, samples, turn_place, turn_sample, width, half)
            turned_sin = load_turn(sin, token, tokens, samples, turn_place, turn_sample, width, half)
            dy = da * turned_cos + db * turned_sin
            db = db * turned_cos - da * turned_sin
            da = dy
            if normed:
                a = tl.load(given + at, mask=mask, other=0.0).to(tl.float32)
                b = tl.load(given + at + pairs, mask=mask, other=0.0).to(tl.float32)
                inverse = find_inverse_rms(tl.sum(a * a + b * b, 2), width, eps)[:, :, None]
                a *= inverse
                b *= inverse
                a_total += da * a
                b_total += db * b
                da *= load_factor(weight, pair, pair < pairs, centered)[None, None, :]
                db *= load_factor(weight, pair + pairs, pair < pairs, centered)[None, None, :]
                along = (tl.sum(da * a + db * b, 2) / width)[:, :, None]
                da = inverse * (da - a * along)
                db = inverse * (db - b * along)
        tl.store(gradient + at, da, mask=mask)
        tl.store(gradient + at + pairs, db, mask=mask)
        row += tl.num_programs(0) * rows
    if normed:
        tl.store(part + pair, tl.sum(tl.sum(a_total, 0), 0), mask=pair < pairs)
        tl.store(part + pair + pairs, tl.sum(tl.sum(b_total, 0), 0), mask=pair < pairs)


@triton.jit
def unrotate_kernel(  # type: ignore[no-untyped-def]
    dq, dk, dv, qkv, q_weight, k_weight, cos, sin, gradient, parts, tokens, samples, turn_place, turn_sample, eps,
    q_place, q_sample, q_head, k_place, k_sample, k_head, v_place, v_sample, v_head,
    q_heads: tl.constexpr, k_heads: tl.constexpr, width: tl.constexpr, half: tl.constexpr, group: tl.constexpr,
    rows: tl.constexpr, normed: tl.constexpr, centered: tl.constexpr,
):  # fmt: skip
    """dq [s, b, q, d], dk and dv [s, b, k, d], each with these strides, -> gradient [s b, (q + 2 k) d], and parts
    [programs, (q + k) / group, d] of the gradients of weights."""
    number = tl.program_id(1)
    first = number * group
    stride = (q_heads + 2 * k_heads) * width
    given = qkv + first * width
    to = gradient + first * width
    part = parts + (tl.program_id(0) * ((q_heads + k_heads) // group) + number) * width
    if first < q_heads:
        unrotate_group(
            dq, q_place, q_sample, q_head, given, q_weight, to, part, cos, sin, first, tokens, samples, turn_place,
            turn_sample, stride, eps, width, half, group, rows, normed, centered, True,
        )  # fmt: skip
    elif first < q_heads + k_heads:
        unrotate_group(
            dk, k_place, k_sample, k_head, given, k_weight, to, part, cos, sin, first - q_heads, tokens, samples,
            turn_place, turn_sample, stride, eps, width, half, group, rows, normed, centered, True,
        )  # fmt: skip
    else:
        unrotate_group(
            dv, v_place, v_sample, v_head, given, k_weight, to, part, cos, sin, first - q_heads - k_heads, tokens,
            samples, turn_place, turn_sample, stride, eps, width, half, group, rows, False, centered, False,
        )  # fmt: skip


@triton.jit
def norm_kernel(  # type: ignore[no-untyped-def]
    x, y, weight, total, result, tokens, eps,
    width: tl.constexpr, block: tl.constexpr, rows: tl.constexpr, adds: tl.constexpr, centered: tl.constexpr,
):  # fmt: skip
    """x, y [tokens, width] -> their sum, and its norm; without `adds` the norm of x."""
    token = tl.program_id(0).to(tl.int64) * rows + tl.arange(0, rows)
    column = tl.arange(0, block)
    mask = (token < tokens)[:, None] & (column < width)[None, :]
    at = token[:, None] * width + column[None, :]
    value = tl.load(x + at, mask=mask, other=0.0).to(tl.float32)
    if adds:
        value += tl.load(y + at, mask=mask, other=0.0).to(tl.float32)
        # The norm is of the sum as it is kept.
        rounded = value.to(total.dtype.element_ty)
        tl.store(total + at, rounded, mask=mask)
        value = rounded.to(tl.float32)
    inverse = find_inverse_rms(tl.sum(value * value, 1), width, eps)[:, None]
    factor = load_factor(weight, column, column < width, centered)[None, :]
    tl.store(result + at, value * inverse * factor, mask=mask)


@triton.jit
def unnorm_kernel(  # type: ignore[no-untyped-def]
    upstream, beside, x, weight, gradient, parts, tokens, eps,
    width: tl.constexpr, block: tl.constexpr, rows: tl.constexpr, centered: tl.constexpr,
):  # fmt: skip
    """Gradients of the norm of x and of x itself, both [tokens, width] -> the sum of both for x, and parts [programs,
    width] of the weight's."""
    column = tl.arange(0, block)
    inside = column < width
    factor = load_factor(weight, column, inside, centered)[None, :]
    weight_total = tl.zeros([rows, block], tl.float32)
    row = tl.program_id(0).to(tl.int64) * rows
    while row < tokens:
        token = row + tl.arange(0, rows)
        mask = (token < tokens)[:, None] & inside[None, :]
        at = token[:, None] * width + column[None, :]
        dy = tl.load(upstream + at, mask=mask, other=0.0).to(tl.float32)
        value = tl.load(x + at, mask=mask, other=0.0).to(tl.float32)
        inverse = find_inverse_rms(tl.sum(value * value, 1), width, eps)[:, None]
        value *= inverse
        weight_total += dy * value
        dy *= factor
        along = (tl.sum(dy * value, 1) / width)[:, None]
        kept = tl.load(beside + at, mask=mask, other=0.0).to(tl.float32)
        tl.store(gradient + at, inverse * (dy - value * along) + kept, mask=mask)
        row += tl.num_programs(0) * rows
    tl.store(parts + tl.program_id(0) * width + column, tl.sum(weight_total, 0), mask=inside)


@triton.jit
def swiglu_kernel(  # type: ignore[no-untyped-def]
    gate_up, result, tokens, width: tl.constexpr, block: tl.constexpr, rows: tl.constexpr
):
    """[tokens, 2 width] -> [tokens, width]."""
    token = tl.program_id(0).to(tl.int64) * rows + tl.arange(0, rows)
    column = tl.program_id(1) * block + tl.arange(0, block)
    mask = (token < tokens)[:, None] & (column < width)[None, :]
    at = token[:, None] * (2 * width) + column[None, :]
    gate = tl.load(gate_up + at, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(gate_up + at + width, mask=mask, other=0.0).to(tl.float32)
    to = token[:, None] * width + column[None, :]
    tl.store(result + to, gate * tl.sigmoid(gate) * up, mask=mask)


@triton.jit
def unswiglu_kernel(  # type: ignore[no-untyped-def]
    upstream, gate_up, gradient, tokens, width: tl.constexpr, block: tl.constexpr, rows: tl.constexpr
):
    """The gradient of swiglu_kernel's result -> that of what it was given."""
    token = tl.program_id(0).to(tl.int64) * rows + tl.arange(0, rows)
    column = tl.program_id(1) * block + tl.arange(0, block)
    mask = (token < tokens)[:, None] & (column < width)[None, :]
    at = token[:, None] * (2 * width) + column[None, :]
    gate = tl.load(gate_up + at, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(gate_up + at + width, mask=mask, other=0.0).to(tl.float32)
    dy = tl.load(upstream + token[:, None] * width + column[None, :], mask=mask, other=0.0).to(tl.float32)
    open_share = tl.sigmoid(gate)
    opened = gate * open_share
    tl.store(gradient + at, dy * up * (open_share + opened * (1.0 - open_share)), mask=mask)
    tl.store(gradient + at + width, dy * opened, mask=mask)


def choose_head_tile(width: int, q_heads: int, k_heads: int) -> dict[str, int]:
    """half, group and rows of the kernels of heads; width: of a head."""
    half, group = triton.next_power_of_2(width // 2), gcd(HEADS, gcd(q_heads, k_heads))
    return {"half": half, "group": group, "rows": max(1, TILE // 2 // (group * half))}


def choose_row_tile(width: int) -> dict[str, int]:
    """block and rows of the kernels of norms: whole rows."""
    block = triton.next_power_of_2(width)
    return {"block": block, "rows": max(1, TILE // block)}


def choose_column_tile(width: int) -> dict[str, int]:
    """block and rows of the kernels of SwiGLU, for results [tokens, width]: blocks that no mask cuts, if they have 64
    columns."""
    block = max(64, gcd(width, TILE // 2))
    return {"block": block, "rows": max(1, TILE // block)}


def choose_warps(elements: int) -> int:
    """Of a program with a tile of so many elements."""
    return min(16, max(4, elements // 512))


def count_groups(q: Tensor, k: Tensor) -> tuple[int, int]:
    """Groups of heads of q and of k [s, b, heads, d]."""
    heads = q.shape[2], k.shape[2]
    group = choose_head_tile(q.shape[-1], *heads)["group"]
    return heads[0] // group, heads[1] // group


def launch(kernel: object, grid: tuple[int, ...], elements: int, *given: object, **constants: object) -> None:
    """Start `kernel` on the device of its first tensor; elements: of its tile."""
    device = next(operand.device for operand in given if isinstance(operand, Tensor))
    with torch.cuda.device(device if device.type == "cuda" else -1):
        kernel[grid](*given, **constants, num_warps=choose_warps(elements))  # type: ignore[index]


def _check(*operands: Tensor) -> None:
    assert all(operand.is_contiguous() for operand in operands)


def _find_strides(cos: Tensor, sin: Tensor) -> tuple[int, int]:
    """From a place in the sample and from a sample to the next, in both tables [s, b or 1, 1, d / 2]."""
    assert cos.stride() == sin.stride() and cos.stride(-1) == 1
    return cos.stride(0), cos.stride(1) if cos.shape[1] > 1 else 0


def rotate(
    qkv: Tensor, q_weight: Tensor | None, k_weight: Tensor | None, cos: Tensor, sin: Tensor, q: Tensor, k: Tensor,
    eps: float, centered: bool,
) -> None:  # fmt: skip
    """To q [s, b, q, d] and k [s, b, k, d]; see `elementwise.rotate_heads`."""
    s, b, q_heads, width = q.shape
    k_heads = k.shape[2]
    _check(qkv, q, k)
    tile = choose_head_tile(width, q_heads, k_heads)
    grid = triton.cdiv(s * b, tile["rows"]), (q_heads + k_heads) // tile["group"]
    launch(
        rotate_kernel, grid, tile["rows"] * tile["group"] * tile["half"] * 2, qkv, q_weight, k_weight, cos, sin, q, k,
        s * b, b, *_find_strides(cos, sin), eps, q_heads=q_heads, k_heads=k_heads, width=width, **tile,
        normed=q_weight is not None, centered=centered,
    )  # fmt: skip


def unrotate(
    gradients: tuple[Tensor, ...], qkv: Tensor, q_weight: Tensor | None, k_weight: Tensor | None, cos: Tensor,
    sin: Tensor, gradient: Tensor, eps: float, centered: bool,
) -> Tensor:  # fmt: skip
    """To the gradient of qkv from those of q, k and v [s, b, heads, d]. Returns parts [programs, groups, d] of the
    gradients of weights, fp32; those of q come first."""
    s, b, q_heads, width = gradients[0].shape
    k_heads = gradients[1].shape[2]
    _check(qkv, gradient)
    tile = choose_head_tile(width, q_heads, k_heads)
    programs, groups = (
        min(HEAD_PROGRAMS, triton.cdiv(s * b, tile["rows"])),
        (q_heads + k_heads) // tile["group"],
    )
    normed = q_weight is not None
    parts = qkv.new_empty((programs, groups, width) if normed else (0, groups, width), dtype=torch.float32)
    whole = [upstream if upstream.stride(-1) == 1 else upstream.contiguous() for upstream in gradients]
    strides = [upstream.stride(dim) for upstream in whole for dim in range(3)]
    grid = programs, groups + k_heads // tile["group"]
    launch(
        unrotate_kernel, grid, tile["rows"] * tile["group"] * tile["half"] * 2, *whole, qkv, q_weight, k_weight, cos,
        sin, gradient, parts, s * b, b, *_find_strides(cos, sin), eps, *strides, q_heads=q_heads,
        k_heads=k_heads, width=width, **tile, normed=normed, centered=centered,
    )  # fmt: skip
    return parts


def norm(
    x: Tensor, y: Tensor | None, weight: Tensor, total: Tensor, result: Tensor, eps: float, centered: bool
) -> None:
    """To the norm of x, or to the sum of x and y and its norm. All [..., width]."""
    width = x.shape[-1]
    _check(x, total, result, *([] if y is None else [y]))
    tile, tokens = choose_row_tile(width), x.numel() // width
    launch(
        norm_kernel, (triton.cdiv(tokens, tile["rows"]),), tile["rows"] * tile["block"], x, y, weight, total, result,
        tokens, eps, width=width, **tile, adds=y is not None, centered=centered,
    )  # fmt: skip


def unnorm(
    upstream: Tensor, beside: Tensor, x: Tensor, weight: Tensor, gradient: Tensor, eps: float, centered: bool
) -> Tensor:
    """To the gradient of x [..., width]. Returns parts [programs, width] of the weight's, fp32."""
    width = x.shape[-1]
    _check(upstream, beside, x, gradient)
    tile, tokens = choose_row_tile(width), x.numel() // width
    programs = min(NORM_PROGRAMS, triton.cdiv(tokens, tile["rows"]))
    parts = x.new_empty((programs, width), dtype=torch.float32)
    launch(
        unnorm_kernel, (programs,), tile["rows"] * tile["block"], upstream, beside, x, weight, gradient, parts, tokens,
        eps, width=width, **tile, centered=centered,
    )  # fmt: skip
    return parts


def swiglu(gate_up: Tensor, result: Tensor) -> None:
    """[..., 2 f] -> [..., f]."""
    width = result.shape[-1]
    _check(gate_up, result)
    tile, tokens = choose_column_tile(width), result.numel() // width
    grid = triton.cdiv(tokens, tile["rows"]), triton.cdiv(width, tile["block"])
    launch(swiglu_kernel, grid, tile["rows"] * tile["block"], gate_up, result, tokens, width=width, **tile)


def unswiglu(upstream: Tensor, gate_up: Tensor, gradient: Tensor) -> None:
    """[..., f], [..., 2 f] -> [..., 2 f]."""
    width = upstream.shape[-1]
    _check(upstream, gate_up, gradient)
    tile, tokens = choose_column_tile(width), upstream.numel() // width
    grid = triton.cdiv(tokens, tile["rows"]), triton.cdiv(width, tile["block"])
    launch(
        unswiglu_kernel,
        grid,
        tile["rows"] * tile["block"],
        upstream,
        gate_up,
        gradient,
        tokens,
        width=width,
        **tile,
    )
