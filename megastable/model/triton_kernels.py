"""The Triton kernels of elementwise.py, and how they are launched: every operand is read once and written once.

Rows of tiles are tokens. Numbers are computed in fp32 and rounded once, to the dtype of the result. Sums over tokens,
for the gradients of weights, are left in parts, one for each program of a fixed number: no atomics, so bits repeat.
"""

from __future__ import annotations

from math import gcd
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

TILE = 2048  # elements of a tensor that a program holds at a time, about
HEADS = 8  # most of them in a own_tile
NORM_PROGRAMS, HEAD_PROGRAMS = 512, 256  # in backward passes: of norms, and of each group of heads


@triton.jit
def find_inverse_rms(square_sum, width: tl.constexpr, eps):  # type: ignore[no-untyped-def]
    return tl.rsqrt(square_sum / width + eps)


@triton.jit
def load_factor(weight, at, is_inside, centered: tl.constexpr):  # type: ignore[no-untyped-def]
    """What a norm multiplies by, fp32."""
    wide_weight = tl.load(weight + at, mask=is_inside, other=0.0).to(tl.float32)
    if centered:
        wide_weight += 1.0
    return wide_weight


@triton.jit
def rotate_group(  # type: ignore[no-untyped-def]
    given, weight, result, first_head, heads, token_index, tokens, stride, turned_cos, turned_sin, eps,
    width: tl.constexpr, half: tl.constexpr, group: tl.constexpr, normed: tl.constexpr, centered: tl.constexpr,
):  # fmt: skip
    """Some heads of some tokens. given: begins with the first of these, which is `first_head` of `heads` in result."""
    pairs: tl.constexpr = width // 2
    pair_index = tl.arange(0, half)
    head_index = tl.arange(0, group)
    is_inside = (token_index < tokens)[:, None, None] & (pair_index < pairs)[None, None, :]
    is_inside &= (head_index >= 0)[None, :, None]
    at = token_index[:, None, None] * stride + head_index[None, :, None] * width + pair_index[None, None, :]
    a = tl.load(given + at, mask=is_inside, other=0.0).to(tl.float32)
    b = tl.load(given + at + pairs, mask=is_inside, other=0.0).to(tl.float32)
    if normed:
        inverse_rms = find_inverse_rms(tl.sum(a * a + b * b, 2), width, eps)[:, :, None]
        a *= inverse_rms * load_factor(weight, pair_index, pair_index < pairs, centered)[None, None, :]
        b *= (
            inverse_rms * load_factor(weight, pair_index + pairs, pair_index < pairs, centered)[None, None, :]
        )
    to = (token_index[:, None, None] * heads + first_head + head_index[None, :, None]) * width + pair_index[
        None, None, :
    ]
    tl.store(result + to, a * turned_cos - b * turned_sin, mask=is_inside)
    tl.store(result + to + pairs, b * turned_cos + a * turned_sin, mask=is_inside)


@triton.jit
def load_turn(  # type: ignore[no-untyped-def]
    table, token_index, tokens, samples, by_place, by_sample, width: tl.constexpr, half: tl.constexpr
):
    """cos or sin, fp32 [rows, 1, half], of a table [s, b, d / 2] with these strides."""
    pair_index = tl.arange(0, half)
    is_inside = (token_index < tokens)[:, None] & (pair_index < width // 2)[None, :]
    at = ((token_index // samples) * by_place + (token_index % samples) * by_sample)[:, None] + pair_index[
        None, :
    ]
    return tl.load(table + at, mask=is_inside, other=0.0)[:, None, :]


@triton.jit
def rotate_kernel(  # type: ignore[no-untyped-def]
    qkv, q_weight, k_weight, cos, sin, q, k, tokens, samples, turn_place, turn_sample, eps,
    q_heads: tl.constexpr, k_heads: tl.constexpr, width: tl.constexpr, half: tl.constexpr, group: tl.constexpr,
    rows: tl.constexpr, normed: tl.constexpr, centered: tl.constexpr,
):  # fmt: skip
    """qkv [tokens, (q + 2 k) d] -> q [tokens, q, d], k [tokens, k, d]."""
    token_index = tl.program_id(0).to(tl.int64) * rows + tl.arange(0, rows)
    first_head = tl.program_id(1) * group
    turned_cos = load_turn(cos, token_index, tokens, samples, turn_place, turn_sample, width, half)
    turned_sin = load_turn(sin, token_index, tokens, samples, turn_place, turn_sample, width, half)
    stride = (q_heads + 2 * k_heads) * width
    given = qkv + first_head * width
    if first_head < q_heads:
        rotate_group(
            given, q_weight, q, first_head, q_heads, token_index, tokens, stride, turned_cos, turned_sin, eps,
            width, half, group, normed, centered,
        )  # fmt: skip
    else:
        rotate_group(
            given, k_weight, k, first_head - q_heads, k_heads, token_index, tokens, stride, turned_cos, turned_sin,
            eps, width, half, group, normed, centered,
        )  # fmt: skip


@triton.jit
def unrotate_group(  # type: ignore[no-untyped-def]
    upstream, by_place, by_sample, by_head, given, weight, gradient, part, cos, sin, first_head, tokens, samples,
    turn_place, turn_sample, stride, eps,
    width: tl.constexpr, half: tl.constexpr, group: tl.constexpr, rows: tl.constexpr, normed: tl.constexpr,
    centered: tl.constexpr, turned: tl.constexpr,
):  # fmt: skip
    """The backward pass of `rotate_group` for all tokens of a program; turned: or of heads that stay as they are."""
    pairs: tl.constexpr = width // 2
    pair_index = tl.arange(0, half)
    head_index = tl.arange(0, group)
    a_total = tl.zeros([rows, group, half], tl.float32)
    b_total = tl.zeros([rows, group, half], tl.float32)
    row_index = tl.program_id(0).to(tl.int64) * rows
    while row_index < tokens:
        token_index = row_index + tl.arange(0, rows)
        is_inside = (token_index < tokens)[:, None, None] & (pair_index < pairs)[None, None, :]
        is_inside &= (head_index >= 0)[None, :, None]
        token_place = (token_index // samples) * by_place + (token_index % samples) * by_sample
        above = (
            token_place[:, None, None]
            + (first_head + head_index).to(tl.int64)[None, :, None] * by_head
            + pair_index[None, None, :]
        )
        da = tl.load(upstream + above, mask=is_inside, other=0.0).to(tl.float32)
        db = tl.load(upstream + above + pairs, mask=is_inside, other=0.0).to(tl.float32)
        at = (
            token_index[:, None, None] * stride
            + head_index[None, :, None] * width
            + pair_index[None, None, :]
        )
        if turned:
            turned_cos = load_turn(cos, token_index, tokens, samples, turn_place, turn_sample, width, half)
            turned_sin = load_turn(sin, token_index, tokens, samples, turn_place, turn_sample, width, half)
            dy = da * turned_cos + db * turned_sin
            db = db * turned_cos - da * turned_sin
            da = dy
            if normed:
                a = tl.load(given + at, mask=is_inside, other=0.0).to(tl.float32)
                b = tl.load(given + at + pairs, mask=is_inside, other=0.0).to(tl.float32)
                inverse_rms = find_inverse_rms(tl.sum(a * a + b * b, 2), width, eps)[:, :, None]
                a *= inverse_rms
                b *= inverse_rms
                a_total += da * a
                b_total += db * b
                da *= load_factor(weight, pair_index, pair_index < pairs, centered)[None, None, :]
                db *= load_factor(weight, pair_index + pairs, pair_index < pairs, centered)[None, None, :]
                mean_along = (tl.sum(da * a + db * b, 2) / width)[:, :, None]
                da = inverse_rms * (da - a * mean_along)
                db = inverse_rms * (db - b * mean_along)
        tl.store(gradient + at, da, mask=is_inside)
        tl.store(gradient + at + pairs, db, mask=is_inside)
        row_index += tl.num_programs(0) * rows
    if normed:
        tl.store(part + pair_index, tl.sum(tl.sum(a_total, 0), 0), mask=pair_index < pairs)
        tl.store(part + pair_index + pairs, tl.sum(tl.sum(b_total, 0), 0), mask=pair_index < pairs)


@triton.jit
def unrotate_kernel(  # type: ignore[no-untyped-def]
    dq, dk, dv, qkv, q_weight, k_weight, cos, sin, gradient, weight_parts, tokens, samples, turn_place, turn_sample,
    eps, q_place, q_sample, q_head, k_place, k_sample, k_head, v_place, v_sample, v_head,
    q_heads: tl.constexpr, k_heads: tl.constexpr, width: tl.constexpr, half: tl.constexpr, group: tl.constexpr,
    rows: tl.constexpr, normed: tl.constexpr, centered: tl.constexpr,
):  # fmt: skip
    """dq [s, b, q, d], dk and dv [s, b, k, d], each with these strides, -> gradient [s b, (q + 2 k) d], and parts
    [programs, (q + k) / group, d] of the gradients of weights."""
    group_number = tl.program_id(1)
    first_head = group_number * group
    stride = (q_heads + 2 * k_heads) * width
    given = qkv + first_head * width
    to = gradient + first_head * width
    part = weight_parts + (tl.program_id(0) * ((q_heads + k_heads) // group) + group_number) * width
    if first_head < q_heads:
        unrotate_group(
            dq, q_place, q_sample, q_head, given, q_weight, to, part, cos, sin, first_head, tokens, samples, turn_place,
            turn_sample, stride, eps, width, half, group, rows, normed, centered, True,
        )  # fmt: skip
    elif first_head < q_heads + k_heads:
        unrotate_group(
            dk, k_place, k_sample, k_head, given, k_weight, to, part, cos, sin, first_head - q_heads, tokens, samples,
            turn_place, turn_sample, stride, eps, width, half, group, rows, normed, centered, True,
        )  # fmt: skip
    else:
        unrotate_group(
            dv, v_place, v_sample, v_head, given, k_weight, to, part, cos, sin, first_head - q_heads - k_heads, tokens,
            samples, turn_place, turn_sample, stride, eps, width, half, group, rows, False, centered, False,
        )  # fmt: skip


@triton.jit
def norm_kernel(  # type: ignore[no-untyped-def]
    x, y, weight, total, result, tokens, eps,
    width: tl.constexpr, block: tl.constexpr, rows: tl.constexpr, adds: tl.constexpr, centered: tl.constexpr,
):  # fmt: skip
    """x, y [tokens, width] -> their sum, and its norm; without `adds` the norm of x."""
    token_index = tl.program_id(0).to(tl.int64) * rows + tl.arange(0, rows)
    column_index = tl.arange(0, block)
    is_inside = (token_index < tokens)[:, None] & (column_index < width)[None, :]
    at = token_index[:, None] * width + column_index[None, :]
    wide_value = tl.load(x + at, mask=is_inside, other=0.0).to(tl.float32)
    if adds:
        wide_value += tl.load(y + at, mask=is_inside, other=0.0).to(tl.float32)
        # The norm is of the sum as it is kept.
        rounded_sum = wide_value.to(total.dtype.element_ty)
        tl.store(total + at, rounded_sum, mask=is_inside)
        wide_value = rounded_sum.to(tl.float32)
    inverse_rms = find_inverse_rms(tl.sum(wide_value * wide_value, 1), width, eps)[:, None]
    norm_factor = load_factor(weight, column_index, column_index < width, centered)[None, :]
    tl.store(result + at, wide_value * inverse_rms * norm_factor, mask=is_inside)


@triton.jit
def unnorm_kernel(  # type: ignore[no-untyped-def]
    upstream, beside, x, weight, gradient, weight_parts, tokens, eps,
    width: tl.constexpr, block: tl.constexpr, rows: tl.constexpr, centered: tl.constexpr,
):  # fmt: skip
    """Gradients of the norm of x and of x itself, both [tokens, width] -> the sum of both for x, and parts [programs,
    width] of the weight's."""
    column_index = tl.arange(0, block)
    is_column = column_index < width
    norm_factor = load_factor(weight, column_index, is_column, centered)[None, :]
    weight_total = tl.zeros([rows, block], tl.float32)
    row_index = tl.program_id(0).to(tl.int64) * rows
    while row_index < tokens:
        token_index = row_index + tl.arange(0, rows)
        is_inside = (token_index < tokens)[:, None] & is_column[None, :]
        at = token_index[:, None] * width + column_index[None, :]
        dy = tl.load(upstream + at, mask=is_inside, other=0.0).to(tl.float32)
        wide_value = tl.load(x + at, mask=is_inside, other=0.0).to(tl.float32)
        inverse_rms = find_inverse_rms(tl.sum(wide_value * wide_value, 1), width, eps)[:, None]
        wide_value *= inverse_rms
        weight_total += dy * wide_value
        dy *= norm_factor
        mean_along = (tl.sum(dy * wide_value, 1) / width)[:, None]
        kept_gradient = tl.load(beside + at, mask=is_inside, other=0.0).to(tl.float32)
        tl.store(gradient + at, inverse_rms * (dy - wide_value * mean_along) + kept_gradient, mask=is_inside)
        row_index += tl.num_programs(0) * rows
    tl.store(weight_parts + tl.program_id(0) * width + column_index, tl.sum(weight_total, 0), mask=is_column)


@triton.jit
def swiglu_kernel(  # type: ignore[no-untyped-def]
    gate_up, result, tokens, width: tl.constexpr, block: tl.constexpr, rows: tl.constexpr
):
    """[tokens, 2 width] -> [tokens, width]."""
    token_index = tl.program_id(0).to(tl.int64) * rows + tl.arange(0, rows)
    column_index = tl.program_id(1) * block + tl.arange(0, block)
    is_inside = (token_index < tokens)[:, None] & (column_index < width)[None, :]
    at = token_index[:, None] * (2 * width) + column_index[None, :]
    gate = tl.load(gate_up + at, mask=is_inside, other=0.0).to(tl.float32)
    up = tl.load(gate_up + at + width, mask=is_inside, other=0.0).to(tl.float32)
    to = token_index[:, None] * width + column_index[None, :]
    tl.store(result + to, gate * tl.sigmoid(gate) * up, mask=is_inside)


@triton.jit
def unswiglu_kernel(  # type: ignore[no-untyped-def]
    upstream, gate_up, gradient, tokens, width: tl.constexpr, block: tl.constexpr, rows: tl.constexpr
):
    """The gradient of swiglu_kernel's result -> that of what it was given."""
    token_index = tl.program_id(0).to(tl.int64) * rows + tl.arange(0, rows)
    column_index = tl.program_id(1) * block + tl.arange(0, block)
    is_inside = (token_index < tokens)[:, None] & (column_index < width)[None, :]
    at = token_index[:, None] * (2 * width) + column_index[None, :]
    gate = tl.load(gate_up + at, mask=is_inside, other=0.0).to(tl.float32)
    up = tl.load(gate_up + at + width, mask=is_inside, other=0.0).to(tl.float32)
    dy = tl.load(
        upstream + token_index[:, None] * width + column_index[None, :], mask=is_inside, other=0.0
    ).to(tl.float32)
    open_share = tl.sigmoid(gate)
    silu_gate = gate * open_share
    tl.store(gradient + at, dy * up * (open_share + silu_gate * (1.0 - open_share)), mask=is_inside)
    tl.store(gradient + at + width, dy * silu_gate, mask=is_inside)


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


def choose_warps(rows: int, block: int = 0, group: int = 0, half: int = 0, **_: object) -> int:
    """Of a program, by its tile."""
    return min(16, max(4, rows * (block or 2 * group * half) // 512))


def count_groups(q: Tensor, k: Tensor) -> tuple[int, int]:
    """Groups of heads of q and of k [s, b, heads, d]."""
    heads = q.shape[2], k.shape[2]
    group = choose_head_tile(q.shape[-1], *heads)["group"]
    return heads[0] // group, heads[1] // group


def launch(kernel: Any, grid: tuple[int, ...], *given: object, **constants: Any) -> None:
    """Start `kernel` on the device of its first tensor."""
    device = next(operand.device for operand in given if isinstance(operand, Tensor))
    with torch.cuda.device(device if device.type == "cuda" else -1):
        kernel[grid](*given, **constants, num_warps=choose_warps(**constants))


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
    k_heads, tokens = k.shape[2], s * b
    _check(qkv, q, k)
    own_tile = choose_head_tile(width, q_heads, k_heads)
    launch_grid = triton.cdiv(tokens, own_tile["rows"]), sum(count_groups(q, k))
    launch(
        rotate_kernel, launch_grid, qkv, q_weight, k_weight, cos, sin, q, k, tokens, b, *_find_strides(cos, sin), eps,
        q_heads=q_heads, k_heads=k_heads, width=width, **own_tile, normed=q_weight is not None, centered=centered,
    )  # fmt: skip


def unrotate(
    gradients: tuple[Tensor, ...], qkv: Tensor, q_weight: Tensor | None, k_weight: Tensor | None, cos: Tensor,
    sin: Tensor, gradient: Tensor, eps: float, centered: bool,
) -> Tensor:  # fmt: skip
    """To the gradient of qkv from those of q, k and v [s, b, heads, d]. Returns parts [programs, groups, d] of the
    gradients of weights, fp32; those of q come first."""
    s, b, q_heads, width = gradients[0].shape
    k_heads, tokens, normed = gradients[1].shape[2], s * b, q_weight is not None
    _check(qkv, gradient)
    own_tile = choose_head_tile(width, q_heads, k_heads)
    q_groups, k_groups = count_groups(*gradients[:2])
    program_count = min(HEAD_PROGRAMS, triton.cdiv(tokens, own_tile["rows"]))
    part_shape = program_count if normed else 0, q_groups + k_groups, width
    weight_parts = qkv.new_empty(part_shape, dtype=torch.float32)
    own_gradients = [
        upstream if upstream.stride(-1) == 1 else upstream.contiguous() for upstream in gradients
    ]
    own_strides = [upstream.stride(dim) for upstream in own_gradients for dim in range(3)]
    launch(
        unrotate_kernel, (program_count, q_groups + 2 * k_groups), *own_gradients, qkv, q_weight, k_weight, cos, sin,
        gradient, weight_parts, tokens, b, *_find_strides(cos, sin), eps, *own_strides, q_heads=q_heads,
        k_heads=k_heads, width=width, **own_tile, normed=normed, centered=centered,
    )  # fmt: skip
    return weight_parts


def norm(
    x: Tensor, y: Tensor | None, weight: Tensor, total: Tensor, result: Tensor, eps: float, centered: bool
) -> None:
    """To the norm of x, or to the sum of x and y and its norm. All [..., width]."""
    width = x.shape[-1]
    _check(x, total, result, *([] if y is None else [y]))
    own_tile, tokens = choose_row_tile(width), x.numel() // width
    launch(
        norm_kernel, (triton.cdiv(tokens, own_tile["rows"]),), x, y, weight, total, result, tokens, eps, width=width,
        **own_tile, adds=y is not None, centered=centered,
    )  # fmt: skip


def unnorm(
    upstream: Tensor, beside: Tensor, x: Tensor, weight: Tensor, gradient: Tensor, eps: float, centered: bool
) -> Tensor:
    """To the gradient of x [..., width]. Returns parts [programs, width] of the weight's, fp32."""
    width = x.shape[-1]
    _check(upstream, beside, x, gradient)
    own_tile, tokens = choose_row_tile(width), x.numel() // width
    program_count = min(NORM_PROGRAMS, triton.cdiv(tokens, own_tile["rows"]))
    weight_parts = x.new_empty((program_count, width), dtype=torch.float32)
    launch(
        unnorm_kernel, (program_count,), upstream, beside, x, weight, gradient, weight_parts, tokens, eps, width=width,
        **own_tile, centered=centered,
    )  # fmt: skip
    return weight_parts


def swiglu(gate_up: Tensor, result: Tensor) -> None:
    """[..., 2 f] -> [..., f]."""
    _check(gate_up, result)
    _launch_columns(swiglu_kernel, gate_up, result, width=result.shape[-1])


def unswiglu(upstream: Tensor, gate_up: Tensor, gradient: Tensor) -> None:
    """[..., f], [..., 2 f] -> [..., 2 f]."""
    _check(upstream, gate_up, gradient)
    _launch_columns(unswiglu_kernel, upstream, gate_up, gradient, width=upstream.shape[-1])


def _launch_columns(kernel: Any, *given: Tensor, width: int) -> None:
    """With a program for every block of rows and columns of what is [..., 2 width] or [..., width]."""
    own_tile, tokens = choose_column_tile(width), given[0].numel() // given[0].shape[-1]
    launch_grid = triton.cdiv(tokens, own_tile["rows"]), triton.cdiv(width, own_tile["block"])
    launch(kernel, launch_grid, *given, tokens, width=width, **own_tile)
