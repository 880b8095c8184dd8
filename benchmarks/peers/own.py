"""Our engine as in a run, and the same modules without DeepSpeed, to measure the engine's overhead."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.common import is_finite
from benchmarks.peers import RATE, Contestant, Task, Unavailable, adamw_of, make_training_step
from megastable.config import deepspeed_json
from megastable.config.tree import RunConfig
from megastable.data.loader import MicroBatch
from megastable.engine.elementwise_choice import keep_faster_parts
from megastable.engine.engine import Engine
from megastable.engine.measured import Measured
from megastable.engine.numerics import choose_kernels
from megastable.engine.watch import Ballot
from megastable.hardware.hardware_watch import HardwareWatch
from megastable.model import gpt
from megastable.model.kernels import Kernels
from megastable.model.loss import LossFunction
from megastable.parallel.layout import Layout
from megastable.parallel.topology import TensorParallel, Topology
from megastable.run.directory import RunDirectory
from megastable.run.log import RunLog

OF_LOOP = (0.0,) * 7  # the ballot of train.py: to stop, skips, checkpoints, copies in memory


def ours(task: Task) -> Contestant:
    """`Engine.train_step` with the gate and the watch over hardware of every step, as train.py calls it; `bench.py
    stability` measures the rest."""
    return _engine(task, task.config, mine=True)


def ours_unwatched(task: Task) -> Contestant:
    """Our engine without the watch over hardware, which reads memory before and after an update. Where ours exists, the
    same engine."""
    if task.ours is None:
        return _engine(task, task.config, watched=False)
    kernel_text = f"{_said(task.config, task)}; the engine of megastable, no watch over hardware"
    return Contestant(lambda: _unwatched_step(task, task.ours), kernel_text)


def ours_bf16(task: Task) -> Contestant:
    """The same without precision.fp8: the baseline of FP8."""
    if task.config.precision.fp8 is None:
        raise Unavailable("the recipe asks for no FP8 (precision.fp8=current): it would be ours once more")
    config_tree = task.config.model_dump()
    config_tree["precision"]["fp8"] = None
    return _engine(task, RunConfig.model_validate(config_tree))


def ours_fp8_off(task: Task) -> Contestant:
    """Our engine with FP8 switched off for its steps: a large model is built only once. Not quite `ours_bf16`, whose
    blocks are compiled whole."""
    engine: Engine | None = task.ours
    if task.config.precision.fp8 is None:
        raise Unavailable("the recipe asks for no FP8 (precision.fp8=current): it would be ours once more")
    if engine is None or engine.fp8 is None:
        raise Unavailable("it uses the engine of megastable, which does not exist: measure --together")
    fp8 = engine.fp8

    def step() -> float:
        fp8.on = False
        try:
            measured, applied = engine.train_step(task.batches, RATE, is_finite)
        finally:
            fp8.on = True
        assert applied, "the gate dropped a step of the benchmark"
        return measured.loss

    return Contestant(step, f"{_said(task.config, task)}; FP8 switched off", same_weights=False)


def _engine(task: Task, c: RunConfig, mine: bool = False, watched: bool = True) -> Contestant:
    engine = Engine(c, deepspeed_json.build_deepspeed_json(c, 1), Topology(Layout(1, 1, 1), 0, c.run.timeout))
    if mine:
        task.ours = engine

    def close() -> None:
        if mine:
            task.ours = None
        engine.ds.destroy()

    engine_text = f"{_said(c, task)}; {type(engine.optimizer).__name__}, fp32 masters, gate"
    if not watched:
        return Contestant(
            lambda: _unwatched_step(task, engine), f"{engine_text}, no watch over hardware", close=close
        )
    watch = WatchedEngine(c, engine)
    return Contestant(lambda: watch.step(task.batches), engine_text, close=close, prepare=watch.begin)


def _unwatched_step(task: Task, engine: Engine) -> float:
    measured, applied = engine.train_step(task.batches, RATE, is_finite)
    assert applied, "the gate dropped a step of the benchmark"
    return measured.loss


class WatchedEngine:
    """An engine and the watch over its hardware, in the order of train.py."""

    def __init__(self, config: RunConfig, engine: Engine) -> None:
        self._engine, self._done = engine, 0
        self._folder = tempfile.TemporaryDirectory(prefix="megastable-bench-")  # while the watch lives
        run_log = RunLog(RunDirectory(Path(self._folder.name)))
        loader: Any = None  # for samples that are computed again, as none are here
        self._watch = HardwareWatch(config, engine, loader, 0, run_log.run, run_log, lambda _: None)

    def begin(self) -> None:
        """Others may have trained the engine meanwhile."""
        self._watch.state.seal_state(self._done)

    def step(self, batches: Sequence[MicroBatch]) -> float:
        measured, applied = self._engine.train_step(batches, RATE, self._judge, self._ballot)
        assert applied, "the gate dropped a step of the benchmark"
        self._done += 1
        for hardware_watch in self._watch.watches:
            hardware_watch.after_update(measured, self._done, RATE)
        return measured.loss

    def _ballot(self) -> Ballot:
        return {"loop": OF_LOOP, **{watch.name: watch.ballot(self._done) for watch in self._watch.watches}}

    def _judge(self, measured: Measured) -> bool:
        self._watch.judge_step(measured, self._done + 1)
        assert self._watch.memory is None, self._watch.memory.reason
        return measured.finite


def _said(c: RunConfig, task: Task) -> str:
    chosen_kernels = _choose(c, task)
    return "; ".join([str(chosen_kernels), *chosen_kernels.notes])


def _choose(c: RunConfig, task: Task) -> Kernels:
    """As a run does; measured once for all contestants."""
    told = c.model_dump_json()
    if told not in _chosen:
        _chosen[told] = keep_faster_parts(choose_kernels(c, task.device), c, task.device)
    return _chosen[told]


_chosen = dict[str, Kernels]()


def _model(task: Task) -> tuple[nn.Module, LossFunction]:
    """Our modules with our kernels. Their weights come from the same seed."""
    c = task.config
    chosen = _choose(c, task)
    m = c.model
    loss = LossFunction(m.vocab_size or 0, m.z_loss, TensorParallel(), chosen.compile, m.logit_softcap)
    module = gpt.GPT(c.model, TensorParallel(), c.parallel.recompute, c.run.seed, loss, kernels=chosen)
    return module.to(task.device, task.dtype), loss


def bare(task: Task) -> Contestant:
    """16-bit weights, gradients and moments: the minimum for training the same modules.

    Less than DeepSpeed does: it keeps fp32 masters, moments and sums of gradients (`bare_masters`).
    """
    module, loss_function = _model(task)

    def loss_of(tokens: Tensor, labels: Tensor) -> Tensor:
        loss_function.samples.clear()  # per-sample losses, which are not used here
        mean_loss: Tensor = module(tokens, labels)
        return mean_loss

    return Contestant(
        make_training_step(task, module, loss_of), f"{_said(task.config, task)}; AdamW fused, no masters"
    )


def bare_masters(task: Task) -> Contestant:
    """As DeepSpeed's ZeRO with fp32 accumulation: 16-bit gradients are added up in fp32 after every
    micro-batch, clipped, applied to fp32 masters, and the weights are copies of these."""
    module, loss = _model(task)
    c, n = task.config, len(task.batches)
    weights: list[Any] = list(module.parameters())
    masters = [nn.Parameter(w.detach().float().clone()) for w in weights]
    sums = [torch.zeros_like(m) for m in masters]
    optimizer = adamw_of(masters, c.optimizer)

    def step() -> Tensor:
        total_loss: Any = 0.0
        for batch_number, (tokens, labels) in enumerate(task.send_inputs()):
            loss.samples.clear()
            mean_loss = module(tokens, labels) / n
            mean_loss.backward()
            total_loss += mean_loss.detach()
            gradients = [one_weight.grad for one_weight in weights]
            if batch_number:
                torch._foreach_add_(sums, gradients)
            else:
                torch._foreach_copy_(sums, gradients)
            for weight in weights:
                weight.grad = None
        for master, gradient in zip(masters, sums, strict=True):
            master.grad = gradient
        if c.optimizer.clip:
            nn.utils.clip_grad_norm_(masters, c.optimizer.clip)
        optimizer.step()
        with torch.no_grad():
            torch._foreach_copy_(weights, list[Tensor](masters))
        assert isinstance(total_loss, Tensor)
        return total_loss

    return Contestant(step, f"{_said(c, task)}; AdamW fused on fp32 masters, fp32 sums")
