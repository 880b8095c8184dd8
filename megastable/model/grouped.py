"""Products of rows that lie side by side by group, each group with a matrix of its own: one kernel for all experts.

torch's grouped product (`F.grouped_mm`; on Hopper one CUTLASS kernel) wants the matrices as one tensor. Those of
experts lie at equal distances in the optimizer's flat buffer, so that this tensor is a view of it; elsewhere it is a
copy.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

ALIGNED = 16  # bytes, of which rows and addresses of its matrices are multiples


def can_group(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether torch has a kernel for it that is faster than one product for each group."""
    if not hasattr(F, "grouped_mm") or device.type != "cuda" or dtype is not torch.bfloat16:
        return False
    return torch.cuda.get_device_capability(device) >= (9, 0)


def view_together(matrices: Sequence[Tensor]) -> Tensor:
    """[groups, out, in] of contiguous matrices [out, in], without gradients: a view if they lie at equal distances in
    one storage, where the kernel can begin to read, else a copy."""
    first_matrix, *other_matrices = matrices
    first_storage, storage_offsets = (
        first_matrix.untyped_storage().data_ptr(),
        [matrix.storage_offset() for matrix in matrices],
    )
    even_distance = storage_offsets[1] - storage_offsets[0] if other_matrices else first_matrix.numel()
    is_even = all(later - earlier == even_distance for earlier, later in pairwise(storage_offsets))
    is_one = all(matrix.untyped_storage().data_ptr() == first_storage for matrix in other_matrices)
    if not (
        is_even
        and is_one
        and first_matrix.data_ptr() % ALIGNED == 0
        and even_distance >= first_matrix.numel()
        and all(map(Tensor.is_contiguous, matrices))
    ):
        return torch.stack(list(matrices))
    return first_matrix.as_strided(
        (len(matrices), *first_matrix.shape), (even_distance, first_matrix.shape[1], 1)
    )


def multiply_groups(x: Tensor, ends: Tensor, weights: Sequence[Tensor]) -> Tensor:
    """x [rows, in], sorted by group -> [rows, out]: the rows of group g times weights[g]^T, [out, in].

    Args:
        x: its rows, those of the first group first.
        ends: int32 [groups], the row after the last one of each group.
        weights: of each group.
    """
    y: Tensor = _GroupedProduct.apply(x, ends, *weights)
    return y


class _GroupedProduct(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, ends: Tensor, *weights: Tensor) -> Tensor:
        # The weights themselves: a copy would be kept until the backward pass.
        ctx.save_for_backward(x, ends, *weights)
        return F.grouped_mm(x, view_together(weights).transpose(1, 2), offs=ends)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        x, row_ends, *group_weights = ctx.saved_tensors
        gradient = gradient.contiguous()
        dx = (
            F.grouped_mm(gradient, view_together(group_weights), offs=row_ends)
            if ctx.needs_input_grad[0]
            else None
        )
        if not any(ctx.needs_input_grad[2:]):
            return dx, None, *(None for _ in group_weights)
        # A group without rows leaves its part unwritten on some devices.
        has_rows = torch.diff(row_ends, prepend=row_ends.new_zeros(1)) > 0
        weight_gradients = F.grouped_mm(gradient.t(), x, offs=row_ends)
        weight_gradients = torch.where(has_rows[:, None, None], weight_gradients, 0.0)
        return dx, None, *weight_gradients.unbind()
