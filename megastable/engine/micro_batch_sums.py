"""BF16_Optimizer's fp32 sums of the micro-batches' gradients, and their norm, in the fewest passes over memory.

DeepSpeed makes an fp32 copy of every gradient to add it, sets the sums to zero twice after an update, and reads them
again for the norm. Here the first micro-batch overwrites the sums, and what is written last (the last micro-batch's
sum, or the average over the data ranks) is measured in chunks that a cache still holds.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import torch
from deepspeed.runtime.bf16_optimizer import BF16_Optimizer
from torch import Tensor, nn

from megastable.parallel.sharding import Fragment

# Elements: an fp32 chunk and its bf16 gradient fit a CPU core's cache, or a GPU's.
CHUNKS = {"cpu": 1 << 18, "cuda": 1 << 21}
SMALL = 1 << 16  # elements of which a norm by itself costs more than to read them again with all others
Place = tuple[int, int]  # group, offset in this rank's part of its flat buffer


class MicroBatchSums:
    """Sums of this rank, in the gradient buffers of `o`, whose accumulation and zeroing this replaces.

    micro_batches: how many a step has; fragments: of this rank's part of the flat buffers; ranks: that share the data.
    """

    def __init__(
        self, o: BF16_Optimizer, micro_batches: Callable[[], int], fragments: Sequence[Fragment], ranks: int
    ) -> None:  # fmt: skip
        self._optimizer, self._micro_batches, self._ranks = o, micro_batches, ranks
        parts: list[Tensor] = o.fp32_groups_gradient_flat_partition
        device = parts[0].device
        self._chunk = CHUNKS.get(device.type, CHUNKS["cuda"])
        self._wide = torch.empty(self._chunk if device.type == "cpu" else 0)
        self._views = {(f.group, f.offset): parts[f.group][f.offset : f.offset + f.numel] for f in fragments}
        self._counted = [(f.group, f.offset) for f in fragments if f.counted]
        # Several threads of a CPU would wait for each other after every chunk: they read all once more for the norm.
        self._is_chunked = device.type != "cpu" or torch.get_num_threads() == 1
        chunk_counts = {
            place: -(-self._views[place].numel() // self._chunk)
            for place in self._counted
            if self._is_chunked and self._views[place].numel() > SMALL
        }
        self._none = torch.zeros(0, device=device)
        # Norms of every chunk; one kernel each writes its number without a copy.
        chunk_table = torch.zeros(sum(chunk_counts.values()), device=device)
        self._norms = dict(zip(chunk_counts, chunk_table.split(list(chunk_counts.values())), strict=True))
        self._measured = set[Place]()
        self.clear_counts()

    @property
    def counted(self) -> list[Tensor]:
        """The gradients that this rank counts in the norm; views."""
        return [self._views[place] for place in self._counted]

    def clear_counts(self) -> None:
        """A step has ended: the next gradients overwrite the sums."""
        o = self._optimizer
        self._measured.clear()
        self._counts = [[0] * len(group_sums) for group_sums in o.fp32_groups_gradients]
        o.fp32_groups_has_gradients = [[False] * len(group_sums) for group_sums in o.fp32_groups_gradients]

    @torch.no_grad()
    def add_gradient(self, parameter: nn.Parameter, group: int, number: int) -> None:
        """Add the gradient of a micro-batch, of parameter `number` of `group`."""
        assert parameter.grad is not None
        o, group_counts = self._optimizer, self._counts[group]
        gradient_sum: Tensor = o.fp32_groups_gradients[group][number]
        group_counts[number] += 1
        flat_grad, is_first = parameter.grad.detach().view(gradient_sum.shape), group_counts[number] == 1
        # With one data rank its part is the whole buffer.
        place = group, int(gradient_sum.storage_offset())
        chunk_norms = self._norms.get(place) if self._ranks == 1 else None
        if chunk_norms is not None and group_counts[number] == self._micro_batches():
            self._add_and_measure(gradient_sum, flat_grad, is_first, chunk_norms)
            self._measured.add(place)
        else:
            self._measured.discard(place)
            self._add(gradient_sum, flat_grad, is_first)
        parameter._hp_grad = gradient_sum  # type: ignore[attr-defined]
        o.fp32_groups_has_gradients[group][number] = True

    def _add(self, gradient_sum: Tensor, gradient: Tensor, is_first: bool) -> None:
        if is_first:
            gradient_sum.copy_(gradient)
        elif gradient_sum.is_cuda:
            gradient_sum.add_(gradient)  # one kernel, which converts while it reads
        elif gradient.numel() <= self._chunk:
            gradient_sum.add_(self._wide[: gradient.numel()].copy_(gradient))
        else:
            chunks = zip(gradient_sum.split(self._chunk), gradient.split(self._chunk), strict=True)
            for sum_chunk, gradient_chunk in chunks:
                self._add(sum_chunk, gradient_chunk, is_first)

    def _add_and_measure(
        self, gradient_sum: Tensor, gradient: Tensor, is_first: bool, chunk_norms: Tensor
    ) -> None:  # fmt: skip
        chunks = zip(gradient_sum.split(self._chunk), gradient.split(self._chunk), strict=True)
        for chunk_number, (sum_chunk, gradient_chunk) in enumerate(chunks):
            self._add(sum_chunk, gradient_chunk, is_first)
            torch.linalg.vector_norm(sum_chunk, out=chunk_norms[chunk_number])

    @torch.no_grad()
    def fill_missing(self, group: int, numbers: Iterable[int]) -> None:
        """Zero the sums of those parameters that got no gradient in this step: an earlier one's are in them."""
        for number in numbers:
            if not self._counts[group][number]:
                self._optimizer.fp32_groups_gradients[group][number].zero_()

    def fill_all(self) -> None:
        """`fill_missing` of all parameters."""
        for group, group_counts in enumerate(self._counts):
            self.fill_missing(group, range(len(group_counts)))

    @torch.no_grad()
    def average_piece(self, piece: Tensor, places: Iterable[Place]) -> None:
        """Divide a piece of this rank's part, a sum over the data ranks, by their number. places: of its fragments."""
        if not self._is_chunked:
            piece.div_(self._ranks)
            return
        for place in places:
            chunk_norms = self._norms.get(place)
            for chunk_number, chunk in enumerate(self._views[place].split(self._chunk)):
                chunk.div_(self._ranks)
                if chunk_norms is not None:
                    torch.linalg.vector_norm(chunk, out=chunk_norms[chunk_number])
            if chunk_norms is not None:
                self._measured.add(place)

    def forget_norms(self, fragments: Iterable[Fragment]) -> None:
        """The gradients of these have been changed: `sum_squares` is to read them again."""
        self._measured.difference_update((f.group, f.offset) for f in fragments)

    @torch.no_grad()
    def sum_squares(self) -> Tensor:
        """The squared norm of what this rank counts, fp64 []."""
        measured_norms = [self._norms[place] for place in self._norms if place in self._measured]
        left_gradients = [self._views[place] for place in self._counted if place not in self._measured]
        if left_gradients:
            measured_norms.append(torch.stack(torch._foreach_norm(left_gradients)))
        return torch.cat([self._none, *measured_norms]).double().square().sum()
