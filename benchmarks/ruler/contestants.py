"""Who is measured: ways to bound an update, and watchers that refuse updates or go back.

A bound is a clipping or an optimizer; each has runs of its own. A watcher sees the loss and the norm of every step of
runs that clip at 1.0, and has runs of its own from its first action on.

Settings are the authors'. Rules that people carry out by hand are stated where they are carried out here.
"""

from __future__ import annotations

import contextlib
import io
import logging
import math
import tempfile
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor

if TYPE_CHECKING:
    from benchmarks.ruler.run import Run

CLIP = 1.0
Bound = Callable[["Run", float], None]


# Bounds: called with the run and the norm of its gradients, before the update.


def bound_nothing(run: Run, norm: float) -> None:
    """The gradients as they are."""


def clip_norm(run: Run, norm: float, most: float = CLIP) -> None:
    """By the global norm (Pascanu et al., arXiv:1211.5063)."""
    factor = min(1.0, most / (norm + 1e-6)) if norm == norm else norm
    for gradient in run.gradients():
        gradient.mul_(factor)


def clip_adagc(run: Run, norm: float) -> None:
    """AdaGC (arXiv:2502.11034): every tensor by 1.05 times the average of its clipped norms, 0.98; at first, for 100
    steps, by the global norm, from which averages begin as minima."""
    memory, is_warmup = run.memory, run.step < 100
    if is_warmup:
        clip_norm(run, norm)
    for name, gradient in run.named_gradients():
        own_norm = float(gradient.norm())
        if is_warmup:
            memory[name] = min(memory.get(name, math.inf), own_norm)
            continue
        factor = min(1.0, 1.05 * memory[name] / (own_norm + 1e-12)) if own_norm == own_norm else own_norm
        gradient.mul_(factor)
        memory[name] = 0.98 * memory[name] + 0.02 * own_norm * factor


def clip_zclip(run: Run, norm: float) -> None:
    """ZClip (arXiv:2504.02507): norms beyond 2.5 deviations of an average of 0.97 are clipped to mean + 2.5^2 / z
    deviations, and all at 1.0, as in the authors' class; mean and variance begin after 25 steps."""
    memory = run.memory
    first_norms = memory.setdefault("first", [])
    if len(first_norms) < 25:
        first_norms.append(norm)
        clip_norm(run, norm)
        if len(first_norms) == 25:
            kept_norms = torch.tensor(first_norms)
            memory["mean"], memory["variance"] = float(kept_norms.mean()), float(kept_norms.var(correction=0))
        return
    deviation = math.sqrt(memory["variance"]) + 1e-6
    score, adaptive_norm = (norm - memory["mean"]) / deviation, norm
    if score > 2.5:
        adaptive_norm = memory["mean"] + 2.5**2 / score * deviation
    clip_norm(run, norm, min(adaptive_norm, CLIP))
    if norm == norm:
        memory["mean"] = 0.97 * memory["mean"] + 0.03 * adaptive_norm
        memory["variance"] = 0.97 * memory["variance"] + 0.03 * (adaptive_norm - memory["mean"]) ** 2


def clip_spam(run: Run, norm: float) -> None:
    """SPAM (arXiv:2501.06842, algorithm 1): elements with g^2 > 5000 v become sign(g) sqrt(5000 v); every 500 steps
    the moments begin again, which these runs do not reach, and the rate warms up for 150 steps."""
    for parameter in run.model.parameters():
        state = run.optimizer.state.get(parameter)
        if parameter.grad is None or not state:
            continue
        most = 5000 * state["exp_avg_sq"]
        is_spike = (parameter.grad.square() > most) & (most > 0)
        parameter.grad.copy_(torch.where(is_spike, most.sqrt().copysign(parameter.grad), parameter.grad))
    if run.step < 150:
        for group in run.optimizer.param_groups:
            group["lr"] *= 0.5 * (1 - math.cos(math.pi * (run.step + 1) / 150))


def bound_stable_adamw(run: Run, norm: float) -> None:
    """StableAdamW (arXiv:2304.13013): the rate of a tensor is divided by the RMS of g / sqrt(v), if above 1."""
    for group in run.optimizer.param_groups:
        (parameter,) = group["params"]
        if parameter.grad is None:
            continue
        squares = parameter.grad.square()
        state = run.optimizer.state.get(parameter)
        number = float(state["step"]) + 1 if state else 1.0
        average = torch.lerp(state["exp_avg_sq"], squares, 1 - 0.95) if state else squares * 0.05
        corrected = (average / (1 - 0.95**number)).clamp_(min=1e-16)
        group["lr"] /= max(1.0, math.sqrt(float((squares / corrected).mean())))


BOUNDS: dict[str, tuple[str, Bound]] = {
    "nothing": ("no clipping", bound_nothing),
    "clipping": ("by the global norm, 1.0", clip_norm),
    "adagc": ("AdaGC", clip_adagc),
    "zclip": ("ZClip", clip_zclip),
    "spam": ("SPAM", clip_spam),
    "stable-adamw": ("StableAdamW", bound_stable_adamw),
}


# Watchers


@dataclass(frozen=True)
class Action:
    """What a watcher does with an update. back: to the newest copy of at most this many updates, to read on at
    `position` steps of the data, unless the watcher goes back by itself."""

    kind: Literal["apply", "refuse", "rewind"]
    back: int = 0
    position: int = 0


APPLY, REFUSE = Action("apply"), Action("refuse")


class Watcher:
    """Sees every step of a run before its update, and after it. Restarts are limited to 8, as our rewinds are: then it
    trains on. changes_rounding: of the model that it watches, so that it needs runs of its own."""

    name = ""
    title = ""
    rows: Iterator[int] | None = None  # of the data, if it has an order of its own
    changes_rounding = False

    def __init__(self, run: Run) -> None:
        self.restarts = 0

    def judge_step(self, run: Run, loss: float, norm: float) -> Action:
        """Before the update."""
        return APPLY

    def judge_update(self, run: Run, loss: float) -> Action:
        """After it: no refusal."""
        return APPLY

    def rewind(self, trained: int) -> int | None:
        """Go back in place after `trained` steps; the step. None: the run does it, as the action says."""
        return None

    def restart(self, back: int, position: int) -> Action:
        self.restarts += 1
        return Action("rewind", back, position) if self.restarts <= 8 else APPLY


class SkipNonFinite(Watcher):
    """What loss scalers and most stacks do: an update with a loss or a norm that is not finite is left out."""

    name, title = "skip-nan", "refuses what is not finite"

    def judge_step(self, run: Run, loss: float, norm: float) -> Action:
        return APPLY if math.isfinite(loss) and math.isfinite(norm) else REFUSE


class SigmaSkip(Watcher):
    """OLMo-core's SkipStepOptimizer: a loss or a norm more than 6 deviations above the mean of the last 128 steps,
    refused ones included, is refused, once 64 are known."""

    name, title = "olmo-skip", "OLMo's skip: 6 sigma over 128 steps"

    def __init__(self, run: Run) -> None:
        super().__init__(run)
        self.known = deque[tuple[float, float]](maxlen=128)

    def is_within(self, loss: float, norm: float) -> bool:
        known_steps = torch.tensor(list(self.known), dtype=torch.float64)
        self.known.append((loss, norm))
        if len(known_steps) < 63:
            return True
        deviations, means = torch.std_mean(known_steps, dim=0)
        # Comparisons with nan are false, here as there: a nan among the known ones refuses all steps.
        return bool((torch.tensor([loss, norm]) - means <= 6 * deviations).all())

    def judge_step(self, run: Run, loss: float, norm: float) -> Action:
        return APPLY if self.is_within(loss, norm) else REFUSE


class BackAndSkip(SigmaSkip):
    """PaLM's rule (arXiv:2204.02311, section 5.1), with a trigger in place of a person: three losses in a row beyond 6
    deviations, or one that is not finite. Back by 100 steps, and on with the data 200 steps after that point."""

    name, title = "palm", "PaLM's rule: back 100 steps, skip 200"

    def __init__(self, run: Run) -> None:
        super().__init__(run)
        self.above = 0

    def judge_step(self, run: Run, loss: float, norm: float) -> Action:
        is_finite = math.isfinite(loss) and math.isfinite(norm)
        self.above = 0 if is_finite and self.is_within(loss, 0.0) else self.above + 1
        if is_finite and self.above < 3:
            return APPLY
        self.above = 0
        self.known.clear()
        target_step = max(0, run.step - 100)
        return self.restart(target_step, run.position_at(target_step) + 200)


class KillLossSpike(Watcher):
    """llm-foundry's callback: more than 4 steps in a row at twice the mean of the last 100 or above, or half
    of them above 10, from step 200 on. A loss that is not finite ends a run, too. Then from the last checkpoint, every
    50 steps, behind the data that was read."""

    name, title = "kill-loss-spike", "llm-foundry's KillLossSpike, restarted"

    def __init__(self, run: Run) -> None:
        super().__init__(run)
        self.window, self.outliers, self.seen = deque[float](maxlen=100), 0, 0

    def judge_update(self, run: Run, loss: float) -> Action:
        is_spike = not math.isfinite(loss)
        self.seen += 1
        if len(self.window) == 100:
            self.outliers = self.outliers + 1 if loss >= 2 * sum(self.window) / 100 else 0
            is_high = self.seen > 200 and sum(known > 10 for known in self.window) >= 50
            is_spike = is_spike or self.outliers > 4 or is_high
        self.window.append(loss)
        if not is_spike:
            return APPLY
        self.window.clear()
        self.outliers = self.seen = 0
        return self.restart(run.step - 1, run.position)


class LightningSpike(Watcher):
    """Lightning's SpikeDetection, the class itself: it ends the run after an update whose loss is three times the mean
    of 10, or not finite. Then from the last checkpoint, every 50 steps, without the two steps that it writes down."""

    name, title = "lightning", "Lightning's SpikeDetection, restarted"

    def __init__(self, run: Run) -> None:
        super().__init__(run)
        self.begin()

    def begin(self) -> None:
        from lightning.fabric.utilities.spike import SpikeDetection

        self.file = tempfile.mkdtemp() + "/skip_batches.json"
        self.detection: Any = SpikeDetection(exclude_batches_path=self.file)
        self.count = 0

    def judge_update(self, run: Run, loss: float) -> Action:
        from lightning.fabric.utilities.spike import TrainingSpikeException

        strategy = SimpleNamespace(
            root_device=torch.device("cpu"),
            barrier=lambda: None,
            reduce_boolean_decision=lambda value, all: value,
        )
        fabric: Any = SimpleNamespace(strategy=strategy, global_rank=0)
        try:
            self.detection.on_train_batch_end(fabric, torch.tensor(loss), None, self.count)
        except TrainingSpikeException:
            # Its load_state_dict fails (it reads an attribute that does not exist), so it begins again.
            self.begin()
            run.skipped_steps |= {run.position - 2, run.position - 1}
            target_step = run.newest_copy(run.step - 1)
            return self.restart(target_step, run.position_at(target_step))
        self.count += 1
        return APPLY


class StabilityGuard(Watcher):
    """stabilityguard's GuardedOptimizer, the class itself with its defaults, around an optimizer that only says whether
    it was asked to step."""

    name, title = "stabilityguard", "stabilityguard 0.3"
    changes_rounding = True  # by hooks in the backward pass

    def __init__(self, run: Run) -> None:
        super().__init__(run)
        from stabilityguard import GuardedOptimizer

        logging.getLogger("stabilityguard").setLevel(logging.ERROR)
        self.asked = Asked(run.optimizer)
        self.guarded: Any = GuardedOptimizer(self.asked, run.model, verbose=False, log_dir=tempfile.mkdtemp())

    def judge_step(self, run: Run, loss: float, norm: float) -> Action:
        self.asked.steps = False
        with contextlib.redirect_stdout(io.StringIO()):
            self.guarded.step(loss=loss)
        return APPLY if self.asked.steps else REFUSE


class Asked:
    """An optimizer that remembers whether it was asked to step."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer, self.steps = optimizer, False

    def __getattr__(self, name: str) -> Any:
        return getattr(self.optimizer, name)

    def step(self, closure: Any = None) -> None:
        self.steps = True

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Left to the run."""


WATCHERS: dict[str, type[Watcher]] = {
    watcher.name: watcher
    for watcher in (SkipNonFinite, SigmaSkip, BackAndSkip, KillLossSpike, LightningSpike, StabilityGuard)
}


def gradients_norm(gradients: list[Tensor]) -> float:
    """L2 norm of all gradients together."""
    return float(torch.nn.utils.get_total_norm(gradients))
