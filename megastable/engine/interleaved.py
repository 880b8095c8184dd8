"""Interleaved 1F1B for DeepSpeed's pipeline: every stage holds several chunks of the model.

Its passes are DeepSpeed's, of one chunk after the other (build.py, `Pipeline`), in the order of
parallel/interleaved.py; micro-batches follow each other in every chunk as in 1F1B, so all sums of gradients are the
same, bit for bit. Messages go round the stages, and DeepSpeed's, for which both ends wait, would end in a deadlock.
Here a stage begins to receive what its next pass needs before the present one, waits for what the present one needs,
and never for what it has sent. Sources: Narayanan et al., arXiv:2104.04473, section 2.2.2; DeepSpeed 0.19.8's
runtime/pipe/engine.py.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
from deepspeed.runtime.pipe import p2p
from deepspeed.runtime.pipe.schedule import (
    BackwardPass,
    ForwardPass,
    LoadMicroBatch,
    OptimizerStep,
    PipeInstruction,
    PipeSchedule,
    RecvActivation,
    RecvGrad,
    ReduceGrads,
    ReduceTiedGrads,
    SendActivation,
    SendGrad,
)
from torch import Tensor
from torch.distributed import Work

from megastable.engine.patches import Hop, show_message
from megastable.parallel.interleaved import Pass, list_passes
from megastable.parallel.topology import Channels


class ExpectActivation(PipeInstruction):
    """Begin to receive what a `RecvActivation` waits for."""


class ExpectGrad(PipeInstruction):
    """Begin to receive what a `RecvGrad` waits for."""


class FreeBuffers(PipeInstruction):
    """Forget what a pass has left: of an evaluation, or a backward pass."""


class FinishSends(PipeInstruction):
    """Wait until all that was sent has arrived."""


class InterleavedSchedule(PipeSchedule):
    """The instructions of a stage in a step, or in an evaluation; `chunk` is one of the stage's."""

    def __init__(self, micro_batches: int, stages: int, stage_id: int, chunks: int, trains: bool) -> None:
        super().__init__(micro_batches, stages, stage_id)
        self._chunks, self._trains = chunks, trains

    def steps(self) -> Iterator[list[PipeInstruction]]:
        """The instructions, in lists as DeepSpeed runs them."""
        all_passes = list_passes(self.stages, self.stage_id, self._chunks, self.micro_batches)
        passes = [one_pass for one_pass in all_passes if self._trains or one_pass.is_forward]
        yield self._expect(passes[0])
        for present_pass, next_pass in pairwise([*passes, None]):
            assert present_pass is not None
            yield [*(self._expect(next_pass) if next_pass else []), *self._compute(present_pass)]
        yield [FinishSends(), *([ReduceTiedGrads(), ReduceGrads(), OptimizerStep()] if self._trains else [])]

    def num_pipe_buffers(self) -> int:
        """One for each chunk of each micro-batch; what is in them is freed."""
        return self._chunks * self.micro_batches

    def _place(self, of: Pass) -> dict[str, int]:
        return {"buffer_id": of.chunk * self.micro_batches + of.micro_batch, "chunk": of.chunk}

    def _is_end(self, of: Pass, is_last: bool) -> bool:
        """Whether the chunk is the model's first, or its last."""
        if is_last:
            return self.is_last_stage and of.chunk == self._chunks - 1
        return self.is_first_stage and of.chunk == 0

    def _expect(self, coming: Pass) -> list[PipeInstruction]:
        if self._is_end(coming, is_last=not coming.is_forward):
            return []
        return [(ExpectActivation if coming.is_forward else ExpectGrad)(**self._place(coming))]

    def _compute(self, present: Pass) -> list[PipeInstruction]:
        place = self._place(present)
        begins, ends = self._is_end(present, is_last=False), self._is_end(present, is_last=True)
        if present.is_forward:
            return [
                *([] if begins else [RecvActivation(**place)]),
                *([LoadMicroBatch(**place)] if begins or ends else []),
                ForwardPass(**place),
                *([] if ends else [SendActivation(**place)]),
                *([] if self._trains else [FreeBuffers(**place)]),
            ]
        return [
            *([] if ends else [RecvGrad(**place)]),
            BackwardPass(**place),
            *([] if begins else [SendGrad(**place)]),
            FreeBuffers(**place),
        ]


Exchanged = list[tuple[Tensor, Work]]  # the tensors of a message that is being sent or received


class _Ring:
    """The messages of a stage's chunks, and what DeepSpeed's engine computes between them."""

    def __init__(self, engine: Any, channels: Channels) -> None:
        self._engine, self._pipeline, self._channels = engine, engine.module, channels
        self._stages, self._stage = engine.num_stages, engine.stage_id
        self._chunks = len(engine.module.chunks)
        # Activations and gradients. The tensors stay in memory until they have arrived.
        self._sent: dict[bool, deque[Exchanged]] = {True: deque(), False: deque()}
        self._arriving: dict[tuple[bool, int], Exchanged] = {}
        self._known = dict(engine._INSTRUCTION_MAP)

    def replace_instructions(self) -> None:
        """Let the engine compute chunk by chunk."""
        engine, shape = self._engine, (self._stages, self._stage, self._chunks)
        own_instructions: dict[type, Callable[..., None]] = {
            ExpectActivation: partial(self._expect, True), RecvActivation: self._receive_activation,
            ExpectGrad: partial(self._expect, False), RecvGrad: self._receive_gradient,
            SendActivation: self._send_activation, SendGrad: self._send_gradient,
            FreeBuffers: self._free_buffers, FinishSends: self._finish_sends,
        } | {kind: partial(self._compute, kind) for kind in (LoadMicroBatch, ForwardPass, BackwardPass)}  # fmt: skip
        # DeepSpeed gives every instruction its engine.
        engine._INSTRUCTION_MAP = self._known | {
            kind: lambda _, instruct=instruct, **place: instruct(**place)
            for kind, instruct in own_instructions.items()
        }
        engine.is_last_stage = self._has_loss
        engine._train_schedule = lambda: InterleavedSchedule(engine.micro_batches, *shape, trains=True)
        engine._inference_schedule = lambda count: InterleavedSchedule(count, *shape, trains=False)

    def _has_loss(self) -> bool:
        """Whether the present chunk ends with the loss; between steps, whether the stage's last one does."""
        is_last_chunk: bool = self._pipeline.present == self._chunks - 1
        return is_last_chunk and self._stage == self._stages - 1

    def _compute(self, kind: type, buffer_id: int, chunk: int) -> None:
        self._pipeline.present = chunk
        self._known[kind](self._engine, buffer_id)

    def _free_buffers(self, buffer_id: int, chunk: int) -> None:
        for of_kind in self._engine.pipe_buffers.values():
            of_kind[buffer_id] = None
        self._engine.grad_layer = None

    # Receiving

    def _expect(self, is_activation: bool, buffer_id: int, chunk: int) -> None:
        engine = self._engine
        if engine.pipe_recv_buf is None and self._stage:
            # The stage before describes its first message. Like all later ones, but for what it is of.
            engine.pipe_recv_buf = _outline(engine._recv_tensor_meta(engine.prev_stage))
            engine._grad_layer_buf = []
        if engine.pipe_recv_buf is None or (is_activation, buffer_id) in self._arriving:
            return  # the first stage sees in its first outputs what comes round to it
        own, other = self._find_hop(chunk, not is_activation)
        awaited = [x for x in engine.pipe_recv_buf if is_activation or x.is_floating_point()]
        buffers = [torch.empty_like(outline, device=engine.device) for outline in awaited]
        self._arriving[is_activation, buffer_id] = [
            (buffer, self._begin(dist.irecv, buffer, is_activation, other, own)) for buffer in buffers
        ]

    def _receive(self, is_activation: bool, buffer_id: int, chunk: int) -> list[Tensor]:
        self._expect(is_activation, buffer_id, chunk)
        received = []
        for tensor, work in self._arriving.pop((is_activation, buffer_id)):
            work.wait()
            show_message(p2p.recv, tensor, self._find_hop(chunk, not is_activation))
            received.append(tensor)
        return received

    def _receive_activation(self, buffer_id: int, chunk: int) -> None:
        received = self._receive(True, buffer_id, chunk)
        for tensor in received:
            tensor.requires_grad = tensor.is_floating_point()
        inputs = received[0] if len(received) == 1 else tuple(received)
        self._engine.pipe_buffers["inputs"][buffer_id] = inputs

    def _receive_gradient(self, buffer_id: int, chunk: int) -> None:
        received = self._receive(False, buffer_id, chunk)
        is_tuple = isinstance(self._engine.pipe_buffers["outputs"][buffer_id], tuple)
        self._engine.grad_layer = received if is_tuple else received[0]

    # Sending

    def _send_activation(self, buffer_id: int, chunk: int) -> None:
        engine, outputs = self._engine, self._engine.pipe_buffers["outputs"][buffer_id]
        if engine.first_output_send:
            engine.first_output_send = False
            if self._stage < self._stages - 1:
                engine._send_tensor_meta(outputs, engine.next_stage)
            if not self._stage:
                engine.pipe_recv_buf = _outline(outputs)
        self._send(_list_tensors(outputs), True, chunk)

    def _send_gradient(self, buffer_id: int, chunk: int) -> None:
        inputs = _list_tensors(self._engine.pipe_buffers["inputs"][buffer_id])
        self._send([tensor.grad for tensor in inputs if tensor.is_floating_point()], False, chunk)

    def _send(self, tensors: Sequence[Tensor | None], is_activation: bool, chunk: int) -> None:
        own, other = self._find_hop(chunk, is_activation)
        # Older ones have arrived by now, or will before this stage is waited for.
        self._wait_for_sends(is_activation, self._stages)
        message = list[tuple[Tensor, Work]]()
        for tensor in tensors:
            assert tensor is not None
            sent_tensor = tensor.detach().contiguous()
            show_message(p2p.send, sent_tensor, (own, other))
            message.append((sent_tensor, self._begin(dist.isend, sent_tensor, is_activation, own, other)))
        self._sent[is_activation].append(message)

    def _finish_sends(self) -> None:
        self._pipeline.present = self._chunks - 1  # between steps DeepSpeed asks who has the loss
        for is_activation in self._sent:
            self._wait_for_sends(is_activation, 0)

    def _wait_for_sends(self, is_activation: bool, left: int) -> None:
        """Until of all messages this many at most are on their way."""
        sent = self._sent[is_activation]
        while len(sent) > left:
            for _, work in sent.popleft():
                work.wait()

    # Both

    def connect_stages(self) -> None:
        """Send an empty message on every way, one after the other. Collective. NCCL makes a connection for the first
        one, for which both ends wait: in the middle of a step each could wait for another one."""
        for is_activation in (True, False):
            for place in range(self._stages):
                sender, receiver = (place, place + 1) if is_activation else (place + 1, place)
                token = torch.zeros(1, device=self._engine.device)
                for exchange, end in ((dist.isend, sender), (dist.irecv, receiver)):
                    if end % self._stages == self._stage:
                        self._begin(exchange, token, is_activation, sender, receiver).wait()

    def _find_hop(self, chunk: int, is_next: bool) -> Hop:
        """This chunk, and the one after or before it, by their numbers in the model."""
        own = chunk * self._stages + self._stage
        return own, own + (1 if is_next else -1)

    def _begin(
        self, exchange: Callable[..., Work | None], tensor: Tensor, is_activation: bool, sender: int, receiver: int
    ) -> Work:  # fmt: skip
        goes_around = sender // self._stages != receiver // self._stages
        group = self._channels[2 * goes_around + (not is_activation)]
        is_own = exchange is dist.isend
        other_stage = (receiver if is_own else sender) % self._stages
        work = exchange(tensor, group=group, **{"group_dst" if is_own else "group_src": other_stage})
        assert work is not None
        return work


def _list_tensors(stream: Any) -> list[Tensor]:
    return list(stream) if isinstance(stream, tuple) else [stream]


def _outline(stream: Any) -> list[Tensor]:
    """Its tensors, without memory."""
    return [torch.empty_like(tensor, device="meta", requires_grad=False) for tensor in _list_tensors(stream)]


def interleave_chunks(engine: Any, channels: Channels) -> None:
    """Let DeepSpeed's pipeline engine compute the chunks of its `Pipeline` in turns. Before all that changes its
    instructions. Collective."""
    ring = _Ring(engine, channels)
    ring.connect_stages()
    ring.replace_instructions()
