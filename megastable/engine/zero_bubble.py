"""The schedule ZB-H1 for DeepSpeed's pipeline: weight gradients fill the time in which stages would wait.

A backward pass is two instructions: B, the gradients that the stage before waits for, and W, those of the weights of
the linear layers (parallel/deferred_gradients.py). Stage i computes the W of a micro-batch i micro-batches later than
its B, so that all stages have some left when no B comes any more: with p stages the bubble is (p - 1) (F + B - W) in
place of (p - 1) (F + B + W), the times of a stage's passes. Source: Qi et al., arXiv:2401.10241, section 2.3.

Forward passes, B and messages are those of DeepSpeed's 1F1B, in its order: a stage has no more micro-batches in flight,
only keeps the inputs of the products and the gradients of their outputs of i + 1 of them until their W. W go in the
order of micro-batches as well, so all sums of gradients are the same, bit for bit.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from typing import Any

import torch.distributed as dist
from deepspeed.runtime.pipe import p2p
from deepspeed.runtime.pipe.schedule import (
    BackwardPass,
    PipeInstruction,
    ReduceTiedGrads,
    SendGrad,
    TrainSchedule,
)
from torch import Tensor
from torch.distributed import Work

from megastable.base import activity
from megastable.engine.patches import replace_attribute
from megastable.parallel.deferred_gradients import DeferredGradients


class WeightPass(PipeInstruction):
    """Compute the weight gradients of the oldest micro-batch that has some left."""


class ZeroBubbleSchedule(TrainSchedule):
    """DeepSpeed's 1F1B with a `WeightPass` for every micro-batch."""

    def steps(self) -> Iterator[list[PipeInstruction]]:
        """The instructions of this stage, in lists as DeepSpeed runs them."""
        left_passes = 0
        for instructions in super().steps():
            own_instructions = []
            for instruction in instructions:
                if isinstance(instruction, ReduceTiedGrads):  # the step ends
                    own_instructions += [WeightPass() for _ in range(left_passes)]
                own_instructions.append(instruction)
                # The stage before waits for the gradient: it goes first.
                if isinstance(instruction, BackwardPass if self.is_first_stage else SendGrad):
                    if left_passes == self.stage_id:
                        own_instructions.append(WeightPass())
                    else:
                        left_passes += 1
            yield own_instructions


class _GradientSends:
    """Gradients on their way to the stage before. Nothing waits for their arrival: while the stage before still
    computes, this one goes on with a W."""

    def __init__(self, stages: int) -> None:
        self._stages = stages
        self._begun: deque[tuple[Work, Tensor]] = deque()  # the tensors stay in memory until they are sent

    def begin_send(self, gradient: Tensor, rank: int) -> None:
        work = dist.isend(gradient, rank)
        assert work is not None
        self._begun.append((work, gradient))
        # It has fewer micro-batches in flight than there are stages: older gradients have arrived.
        self.wait_for_sends(self._stages)

    def wait_for_sends(self, left: int = 0) -> None:
        """Until `left` are on their way at most."""
        while len(self._begun) > left:
            self._begun.popleft()[0].wait()


def fill_bubbles(engine: Any) -> None:
    """Let DeepSpeed's pipeline engine train by `ZeroBubbleSchedule`, with products that defer their weight gradients.
    After all that changes its instructions."""
    deferred_gradients, gradient_sends = DeferredGradients(), _GradientSends(engine.num_stages)
    known_instructions = dict(engine._INSTRUCTION_MAP)

    def pass_back(self: Any, buffer_id: int) -> None:
        received = self.grad_layer
        if not self.is_last_stage():
            # The next message is received into the same memory, and a W may still need this one.
            is_single = isinstance(received, Tensor)
            self.grad_layer = received.clone() if is_single else [one.clone() for one in received]
        with deferred_gradients.collect():
            known_instructions[BackwardPass](self, buffer_id)
        self.grad_layer = received

    def differentiate_weights(self: Any) -> None:
        activity.enter_activity(activity.BACKWARD)
        deferred_gradients.compute_oldest()

    def send_gradient(self: Any, buffer_id: int) -> None:
        with replace_attribute(p2p.dist, "send", gradient_sends.begin_send):
            known_instructions[SendGrad](self, buffer_id)

    def reduce_tied_gradients(self: Any) -> None:
        gradient_sends.wait_for_sends()
        known_instructions[ReduceTiedGrads](self)

    engine._INSTRUCTION_MAP = known_instructions | {
        BackwardPass: pass_back, WeightPass: differentiate_weights, SendGrad: send_gradient,
        ReduceTiedGrads: reduce_tied_gradients,
    }  # fmt: skip
    engine._train_schedule = lambda: ZeroBubbleSchedule(
        engine.micro_batches, engine.num_stages, engine.stage_id
    )
