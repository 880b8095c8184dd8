"""The guard of a training loop of any stack: judges every update before it is made, and rewinds.

    guard = Guard(model, optimizer, scheduler)
    ...
    loss.backward()
    verdict = guard.check(loss=loss, grad_norm=norm)     # the same on all ranks, by one all-reduce
    if verdict.apply:
        optimizer.step(), scheduler.step()
    elif verdict.rewind:
        data.seek(guard.rewind(), defer=guard.deferred)  # weights, moments, scheduler and random states are restored

What it decides is the pure `StepJudge`; what it keeps, `HostCopies`.
"""

from __future__ import annotations

import functools
import json
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megastable_guard.actions import Action, Cause, Decision, Signals, Verdict
from megastable_guard.guard_config import GuardConfig
from megastable_guard.host_copies import (
    ForwardState,
    HostCopies,
    Stateful,
    local_part,
    read_random_states,
)
from megastable_guard.step_judge import GuardState, StepJudge


@dataclass(frozen=True)
class StepVerdict:
    """What to do with an update. apply: make it; rewind: call `Guard.rewind` instead; neither: leave it out, with the
    step of the scheduler. stop: nothing in memory helps: end, and go back to a checkpoint from before `onset`."""

    step: int
    apply: bool
    rewind: bool
    stop: bool
    onset: int
    reason: str


@dataclass(frozen=True)
class CopiedJudgement:
    """What belongs to a copy: the detector, and how many updates were applied."""

    detector: Any
    updates: int


class Guard:
    """Guards one run; the same on every rank.

    Args:
        model, optimizer: of this rank; plain, DDP or FSDP2. The optimizer may be wrapped.
        scheduler: its state is rewound, too.
        others: what else is to be rewound, by name: a scaler, a sampler that is not sought by hand.
        config: thresholds and budgets.
        interval, keep: steps from one copy in host memory to the next, and how many; keep=0: nothing is rewound.
        run_dir: for the journal; None: none is written.
    """

    def __init__(
        self, model: torch.nn.Module, optimizer: Any, scheduler: Stateful | None = None, *,
        others: Mapping[str, Stateful] | None = None, config: GuardConfig | None = None, interval: int = 50,
        keep: int = 3, run_dir: str | Path | None = None,
    ) -> None:  # fmt: skip
        stateful_parts = {**({"scheduler": scheduler} if scheduler is not None else {}), **(others or {})}
        self.model, self.optimizer, self.others = model, optimizer, stateful_parts
        self.applies = True  # the last update
        self.config = config or GuardConfig()
        self.judge = StepJudge(self.config)
        self.copies = HostCopies(model, optimizer, stateful_parts, interval, keep) if keep else None
        self.step = 0  # of the last check
        self.updates = 0  # applied ones
        self.journal = Path(run_dir) / "journal.jsonl" if run_dir is not None else None
        self.deferred: list[int] = []  # steps whose data the last rewind leaves for later
        self._judgements: dict[int, CopiedJudgement] = {}
        self._decision: Decision | None = None
        self._forward = self._copy_forward_state()

    def check(
        self, *, loss: float | Tensor, grad_norm: float | Tensor | None = None, weight: float = 1.0
    ) -> StepVerdict:
        """Judge an update before it is made: after backward, once a step on every rank.

        Args:
            loss: mean of this rank's part of the batch, nats per token.
            grad_norm: L2 norm of the gradient of the whole batch before clipping; None: it is measured here.
            weight: of this rank's part in the mean, such as its number of tokens.
        """
        gradient_norm = self._measure_norm() if grad_norm is None else grad_norm
        mean_loss, norm_value = self._average_over_ranks(float(loss), float(gradient_norm), weight)
        oldest_copy = self.copies.steps[0] if self.copies and self.copies.steps else None
        step_signals = Signals(self.step + 1, mean_loss, norm_value, self.optimizer.param_groups[0].get("lr"))
        judged_before = CopiedJudgement(self.judge.detector.state.model_copy(deep=True), self.updates)
        step_decision = self.judge.judge_step(step_signals, oldest_copy)
        # That the loss of this step is on its trend is what is known of the state before its update.
        is_good = step_decision.finding.verdict is Verdict.HEALTHY and step_decision.finding.on_trend
        if self.copies and self.copies.is_due(self.step) and (is_good or not self.copies.steps):
            self.copies.take_copy(self.step, self._forward)
            self._judgements[self.step] = judged_before
        self.step += 1
        self.updates += step_decision.applies
        self._forward, self._decision = self._copy_forward_state(), step_decision
        step_verdict = self._answer(step_decision)
        self.applies = step_verdict.apply
        if not step_verdict.apply:
            self._write(
                "rewound" if step_verdict.rewind else "discarded", step_verdict, mean_loss, norm_value
            )
        return step_verdict

    def rewind(self) -> int:
        """Go back to the newest good state from before the trouble. The step after which that was: the next one trains
        on the data behind it. Raises RuntimeError if the last verdict was no rewind."""
        if self._decision is None or not self._decision.action.rewinds or self.copies is None:
            raise RuntimeError("guard.rewind() belongs behind a check whose verdict says rewind")
        finding, tripped = self._decision.finding, self.step
        restored_copy = self.copies.restore_before(finding.onset)
        self.step, self._forward = restored_copy.step, restored_copy.forward
        copied_judgement = self._judgements[self.step]
        self._judgements = {step: kept for step, kept in self._judgements.items() if step <= self.step}
        self.updates, self._decision = copied_judgement.updates, None
        self.judge.rewind_detector(copied_judgement.detector.model_copy(deep=True))
        self.judge.policy.note_rewind(self.updates, tripped - self.step)
        self.judge.policy.choose_remedy(Cause.UNKNOWN, self.updates)
        self.deferred = list(range(finding.onset, tripped + 1))
        return self.step

    def hold_refused(self) -> None:
        """Make the optimizer and the scheduler leave out what is refused, for loops that call both in any case."""
        inner_optimizer: Any = self.copies.optimizer if self.copies else self.optimizer
        step_optimizer = inner_optimizer.step

        @functools.wraps(step_optimizer)
        def step_if_applied(closure: Callable[[], Any] | None = None) -> Any:
            # In the closure the guard may be asked, as in Lightning.
            loss = closure() if closure is not None else None
            if self.applies:
                return step_optimizer() if closure is None else step_optimizer(lambda: loss)
            return loss

        inner_optimizer.step = step_if_applied
        if "scheduler" in self.others:
            held_scheduler: Any = self.others["scheduler"]
            step_scheduler = held_scheduler.step
            held_scheduler.step = lambda *given: step_scheduler(*given) if self.applies else None

    def drop_update(self) -> None:
        """Leave out an update that is not to be judged: of data that a loader had fetched before the last rewind. What
        its forward pass has changed is put back."""
        self.applies = False
        if self.copies is not None:
            self.copies.restore_forward_state(self._forward)
        self.optimizer.zero_grad()

    def state_dict(self) -> dict[str, Any]:
        """For a checkpoint of the run. The copies are not in it: a resumed run begins with new ones."""
        return {"step": self.step, "updates": self.updates, "judge": self.judge.state.model_dump(mode="json")}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.step, self.updates = int(state["step"]), int(state["updates"])
        self.judge = StepJudge(self.config, GuardState.model_validate(state["judge"]))
        self._forward = self._copy_forward_state()

    def _copy_forward_state(self) -> ForwardState:
        """Buffers only where a copy of the state may follow."""
        if self.copies is None or not self.copies.is_due(self.step):
            return ForwardState({}, read_random_states())
        return self.copies.copy_forward_state()

    def _answer(self, decision: Decision) -> StepVerdict:
        """Without a copy from before the onset a finite update is applied: a loop of somebody else is not ended."""
        wants_end = decision.action in (Action.HANDOVER, Action.RESTART, Action.STOP)
        is_finite = decision.finding.verdict is not Verdict.NON_FINITE
        return StepVerdict(
            self.step, decision.applies or (wants_end and is_finite), decision.action.rewinds, wants_end,
            decision.finding.onset, decision.reason,
        )  # fmt: skip

    def _average_over_ranks(self, loss: float, norm: float, weight: float) -> tuple[float, float]:
        """Mean loss by weight, and the norm, which the ranks know alike but for rounding."""
        if not (dist.is_available() and dist.is_initialized()) or dist.get_world_size() == 1:
            return loss, norm
        device = local_part(next(self.model.parameters())).device
        rank_sums = torch.tensor([loss * weight, weight, norm, 1.0], dtype=torch.float64, device=device)
        dist.all_reduce(rank_sums)
        weighted_loss, total_weight, norm_sum, rank_count = rank_sums.tolist()
        return weighted_loss / total_weight, norm_sum / rank_count

    def _measure_norm(self) -> float:
        gradients = [p.grad for p in self.model.parameters() if p.grad is not None]
        total_norm = torch.nn.utils.get_total_norm(gradients)
        return float(total_norm.full_tensor() if hasattr(total_norm, "full_tensor") else total_norm)

    def _write(self, event: str, verdict: StepVerdict, loss: float, norm: float) -> None:
        """A line of the journal, by the first rank."""
        if self.journal is None or (dist.is_available() and dist.is_initialized() and dist.get_rank()):
            return
        self.journal.parent.mkdir(parents=True, exist_ok=True)
        journal_line = {
            "time": round(time.time(), 3), "event": event, "step": verdict.step, "onset": verdict.onset,
            "reason": verdict.reason, "loss": loss, "grad_norm": norm,
        }  # fmt: skip
        with self.journal.open("a") as file:
            file.write(json.dumps(journal_line) + "\n")
