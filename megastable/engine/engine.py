"""The training engine: a narrow interface to DeepSpeed's engines.

    engine = Engine(config, ds_config, topology)
    result = engine.train_step(micro_batches, lr, judge)   # forward, backward, gate, update
    losses = engine.evaluate_samples(micro_batches)                # per-sample cross-entropy

The interface is the same for one pipeline stage or many, ZeRO 1 to 3, bf16, fp16 or fp32. Differences of the ZeRO
wrappers: zero.py; changes to DeepSpeed: patches.py.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Mapping, Sequence
from itertools import chain, islice
from typing import Any

import deepspeed
import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from megastable.base import activity
from megastable.base.collectives import find_difference, gather_objects, mark_collective, run_on_first
from megastable.base.errors import ConfigError
from megastable.config.tree import RunConfig
from megastable.data.loader import MicroBatch
from megastable.engine import patches
from megastable.engine.adjustments import Adjustments, LogitClipping
from megastable.engine.build import Mpu, Pipeline, build_model, turn_refusals_into_config_errors
from megastable.engine.distributed import choose_device, silence_stdout
from megastable.engine.elementwise_choice import keep_faster_parts
from megastable.engine.expert_routing import PREFIX, ExpertRouting
from megastable.engine.flatstate import SHARED, FlatState
from megastable.engine.hostcopy import Filled
from megastable.engine.interleaved import interleave_chunks
from megastable.engine.layer_stats import LayerStatistics, Probe
from megastable.engine.measured import DeviceClock, Judge, Measured
from megastable.engine.numerics import NumericsSwitch, choose_kernels
from megastable.engine.trend_probe import TrendProbe
from megastable.engine.watch import Ballot
from megastable.engine.zero import Bf16, Worker, wrap_optimizer
from megastable.engine.zero_bubble import fill_bubbles
from megastable.fp8.apply import apply_fp8
from megastable.fp8.controller import History
from megastable.model import gpt
from megastable.model.block_parts import keys_of_samples, share_norm_weights
from megastable.model.kernels import Timing
from megastable.model.loss import LossFunction
from megastable.optim.build import build_optimizer as build_optimizer
from megastable.optim.build import shared_state
from megastable.optim.clipping import CLIPPINGS, Clipping, by_norm
from megastable.optim.pieces import Piece, PieceOptimizer, Surroundings
from megastable.parallel.mappings import TiedGradient
from megastable.parallel.sharding import placement_of
from megastable.parallel.topology import ContextParallel, TensorParallel, Topology

CLIPPING = "clipping/"  # prefix of the clipping's state among the shared state
COUNTERS = ("global_steps", "micro_steps", "skipped_steps", "global_samples", "_step_applied")


class Engine:
    """A GPT with its optimizer on this rank of a `Topology`. All methods are collective."""

    def __init__(
        self,
        config: RunConfig,
        ds_config: dict[str, Any],
        topology: Topology,
        timings: Sequence[Timing] = (),
    ) -> None:
        """timings: what earlier starts of the run have measured of own kernels."""
        self.config, self.topology = config, topology
        self.device = choose_device()
        layout, p = topology.layout, config.parallel
        self.tp = TensorParallel(
            topology.tensor_group, topology.tensor_rank, layout.tensor, p.sequence, p.gathers_again,
            p.tensor_overlap,
        )  # fmt: skip
        self.cp = ContextParallel(
            topology.context_group, layout.context, topology.context_rank, p.is_ring, topology.experts
        )
        m = config.model
        assert m.vocab_size is not None
        self.kernels = choose_kernels(config, self.device)
        if difference := find_difference({"kernels": self.kernels}):
            raise mark_collective(
                ConfigError(
                    f"kernels: ranks {difference[1]} would use other kernels than rank 0, and copies of weights would "
                    "drift apart: install the same software on all hosts, or choose kernels that all of them have"
                )
            )
        if self.kernels.elementwise:  # measured by one rank, so that all choose alike
            self.kernels = run_on_first(lambda: keep_faster_parts(self.kernels, config, self.device, timings))
        self.loss = LossFunction(m.vocab_size, m.z_loss, self.tp, self.kernels.compile, m.logit_softcap)
        channels = topology.make_channels() if p.model_chunks > 1 else None
        with silence_stdout():
            module = build_model(config, ds_config, topology, self.kernels, self.loss, self.cp, self.device)
            has_stages_in_fp8 = config.precision.fp8 is not None and layout.pipeline > 1
            sharing_group = topology.stage_group() if has_stages_in_fp8 else None
            self.fp8 = apply_fp8(module, config, self.kernels.fp8, sharing_group, self.device)
            if config.parallel.zero < 3:
                for chunk in module.chunks if isinstance(module, Pipeline) else [module]:
                    share_norm_weights(chunk)
            self.numerics = NumericsSwitch(module, self.kernels, self.loss, self.fp8)
            with (
                turn_refusals_into_config_errors(config.deepspeed),
                patches.share_among(topology.shard_group),
                patches.share_experts(topology),
            ):
                self.ds, self.optimizer, *_ = deepspeed.initialize(
                    model=module,
                    optimizer=build_optimizer(module, config.optimizer, m, self.kernels.compile),
                    config=ds_config,
                    mpu=Mpu(topology) if layout.pipeline == 1 else None,
                    dist_init_required=False,
                )
        self.zero = wrap_optimizer(self.optimizer, self.ds, topology, self.device)
        if config.stability.enabled:
            self.zero.watch_hardware(config.stability.hardware)
        self.clipping = self._attach()
        self.routing = (
            ExpertRouting(module, m, topology, self._flat, self.device) if m.experts is not None else None
        )
        self.kept = 1.0  # the share of the gradient's norm that clipping left in the last update
        clip_threshold = config.optimizer.qk_clip
        self.qk_clip = LogitClipping(module, m, topology, clip_threshold, self.device, p.is_ring)
        self.adjustments = Adjustments(
            config, self.optimizer, self.loss, self.qk_clip, module, self.kernels.fp8, self.routing
        )
        self.tied = self._tie() if config.model.tied and layout.pipeline > 1 else None
        if layout.pipeline > 1:
            patches.disable_step_timers(self.ds)
            if channels is not None:
                interleave_chunks(self.ds, channels)
            patches.report_activities(self.ds)
            if p.schedule == "zero_bubble":
                fill_bubbles(self.ds)
        self._update_by_deepspeed = patches.hold_update_back(self.ds)
        if self.device.type == "cuda":
            activity.clock = DeviceClock(lambda: torch.cuda.Event(enable_timing=True))
        self.updates = 0
        self._probing = self._segmented = False
        self.measures_update = False  # whether the coming update's size is measured, for `collect_statistics`
        self._copies: list[Filled | torch.cuda.Event] = []
        is_whole = layout.pipeline == layout.expert == 1
        outline = self.ds.module if is_whole else gpt.outline_model(m)
        self.probe = Probe(self.ds.module, outline, topology, self.tp, self.device, self.fp8)
        self.trends = TrendProbe(self.probe)
        self.measured: Measured | None = None
        self.applied = False
        self.counters_before = self.read_counters()

    def _attach(self) -> Clipping | None:
        """Tell the optimizer and the clipping what lies in the flat buffers; None if DeepSpeed clips. Collective."""
        inner, o = self.optimizer.optimizer, self.config.optimizer
        self._flat = flat = self.flat_state()
        if not isinstance(inner, PieceOptimizer) and o.clipping.kind == "norm":
            return None
        t = self.topology
        place = t.tensor_rank, t.layout.tensor
        whole_parameters = flat.whole_parameters(t.layout.tensor)
        if isinstance(inner, PieceOptimizer):
            surroundings = Surroundings(whole_parameters, place, t.stage_group())
            inner.attach_buffers(self.masters, flat.fragments, surroundings)
        if o.clipping.kind == "norm":
            return None
        if isinstance(self.zero, Bf16) and o.clipping.kind == "worker":
            return Worker(o, self.zero, self.ds, t, self.device)
        return CLIPPINGS[o.clipping.kind](o, whole_parameters, place, self.device)

    def _tie(self) -> TiedGradient | None:
        """Sum tied gradients after the data-parallel sum, instead of before it as DeepSpeed does. None on a stage
        without a copy."""
        group = self.topology.tied_group()
        self.ds.module.tied_comms = {}  # disables DeepSpeed's own sum
        tied = {placement_of(p).name for p in self.ds.module.tied_modules.parameters()}
        if not tied:
            return None
        self._tied = f = next((f for f in self.flat_state().fragments if f.name in tied), None)
        held = range(f.start, f.start + f.numel) if f else range(0)
        return TiedGradient(held, self.topology.stage, group)

    def _sum_tied(self, tied: TiedGradient) -> None:
        own_gradient = torch.empty(0, device=self.device)
        if (f := self._tied) is not None:
            own_gradient = self.zero.view_gradients([f])[f.group, f.offset].view(-1)[: f.numel]
        tied.add_other_stage(own_gradient)
        self.zero.forget_norms([] if self._tied is None else [self._tied])

    # Training

    def train_step(
        self,
        micro_batches: Sequence[MicroBatch],
        lr: float,
        judge: Judge,
        ballot: Callable[[], Ballot] = dict,
    ) -> tuple[Measured, bool]:
        """One step: forward, backward, gate, and the update or its refusal.

        Args:
            micro_batches: this rank's.
            lr: learning rate of the update.
            judge: whether it may be applied.
            ballot: called after the backward pass; returns the same names with as many numbers on every rank, in the
                same order. Their sums over the ranks piggyback on the gate's all-reduce (`Measured.ballot`).

        Returns:
            What was measured, and whether the update was applied.
        """
        if not self._probing:
            self.counters_before = self.read_counters()
        self._begin_step(micro_batches, lr)
        # Before the passes: on a GPU, a copy to it would wait for all that is queued.
        token_counts = self._count_tokens(micro_batches)
        self._run_forward_and_backward(micro_batches)

        # The gate: every rank has the same measurements, and decides alike.
        activity.enter_activity(activity.REDUCE)
        self.zero.average_gradients()
        if self.tied is not None:
            self._sum_tied(self.tied)
        self.measured, clip_norm = self._measure_step(len(micro_batches), token_counts, ballot)
        self._show_gradients(self.measured.loss_scale)
        self._wait_for_copies()
        # A non-finite norm goes on to DeepSpeed, which drops the update whatever the judge says. It skips an fp16
        # overflow itself and lowers the loss scale.
        if judge(self.measured) or (self.measured.overflow and not self._probing):
            self._apply_update(self.measured, clip_norm)
        else:
            self._refuse_update()

        activity.enter_activity(activity.REST)
        if self.fp8 is not None:
            self.fp8.settle_step(self.applied)
        if self.applied:
            self.updates += 1
            if self.routing is not None:
                assert self.measured.choices is not None
                self.routing.follow_update(self.measured.choices)
        return self.measured, self.applied

    def _begin_step(self, micro_batches: Sequence[MicroBatch], lr: float) -> None:
        # DeepSpeed recognizes the last one by the remainder of a count over all steps, which had other numbers of them.
        self.ds.micro_steps = 0
        if len(micro_batches) != self.ds.gradient_accumulation_steps():
            rank_samples = len(micro_batches) * self.config.train.micro_batch
            self.ds.set_train_batch_size(rank_samples * self.topology.layout.data)
            self.optimizer.gradient_accumulation_steps = len(micro_batches)
        self._pass_on(micro_batches)
        self.loss.samples.clear()
        self.loss.entropies = self.trends.watching and not self._probing
        self.zero.begin_step()
        self.qk_clip.begin_step()
        if self.routing is not None:
            loss_scale = float(getattr(self.optimizer, "loss_scale", 1.0))
            self.routing.begin_step(loss_scale / len(micro_batches))
        for param_group in self.optimizer.param_groups:
            param_group["lr"] = lr * param_group.get("lr_scale", 1.0)

    def _run_forward_and_backward(self, micro_batches: Sequence[MicroBatch]) -> None:
        """Leave the gradients of all micro-batches with DeepSpeed, whose `step` and `train_batch` do not update."""
        activity.enter_activity(activity.FORWARD)
        with self._computing():
            if self.topology.layout.pipeline > 1:
                self.ds.train_batch(iter([self._inputs(m) for m in micro_batches]))
                return
            self.ds.train()
            for micro_batch in micro_batches:
                activity.enter_activity(activity.FORWARD)
                inputs, labels = self._inputs(micro_batch)
                loss = self.ds(inputs, labels)
                activity.enter_activity(activity.BACKWARD)
                self.ds.backward(loss)
                del loss
                self.ds.step()

    @torch.no_grad()
    def evaluate_samples(self, micro_batches: Sequence[MicroBatch]) -> Tensor:
        """Per-sample cross-entropy, fp64 [ranks x micro-batches], in the loader's order; no update."""
        self._pass_on(micro_batches)
        self.loss.samples.clear()
        self.loss.entropies = False
        with self._computing():
            if self.topology.layout.pipeline > 1:
                batch_iterator = iter([self._inputs(m) for m in micro_batches])
                self.ds.eval_batch(batch_iterator, num_micro_batches=len(micro_batches))
            else:
                self.ds.eval()
                for micro_batch in micro_batches:
                    self.ds(*self._inputs(micro_batch))
        return self._collect(len(micro_batches), self.zero.make_scalar([]))[0][0]

    def _pass_on(self, micro_batches: Sequence[MicroBatch]) -> None:
        """Let a pipeline agree again on what its stages send if that changes: with segments, or without."""
        has_segments = micro_batches[0].segments is not None
        if has_segments != self._segmented and self.topology.layout.pipeline > 1:
            self.ds.reset_activation_shape()
        self._segmented = has_segments

    def _computing(self) -> contextlib.AbstractContextManager[Any]:
        if self.fp8 is None:
            return contextlib.nullcontext()
        if self.fp8.reads_weights:  # which may still be gathered, where FP8 is switched on again
            self.zero.wait_for_weights()
        return self.fp8.computing()

    def _inputs(self, batch: MicroBatch) -> tuple[gpt.Stream, Tensor]:
        def move(x: Tensor) -> Tensor:
            return x.to(self.device, non_blocking=True)

        tokens, labels = move(batch.tokens), move(batch.labels)
        segments = None if batch.segments is None else move(batch.segments)
        if self.config.model.dropout:
            dropout_keys = move(keys_of_samples(batch.positions, self.config.run.seed))
            return (tokens, dropout_keys if segments is None else segments, dropout_keys), labels
        return (tokens if segments is None else (tokens, segments)), labels

    def _count_tokens(self, micro_batches: Sequence[MicroBatch]) -> Tensor:
        """How often each token is in this rank's part of the batch, fp64 [vocabulary]; 0 where another rank has the
        same tokens. Ids outside the vocabulary are left out."""
        t, size = self.topology, self.loss.vocabulary
        if not t.is_last_stage or t.tensor_rank:
            return torch.zeros(size, dtype=torch.float64, device=self.device)
        ids = np.concatenate([m.tokens.numpy().ravel() for m in micro_batches])
        counts = np.bincount(ids[(ids >= 0) & (ids < size)], minlength=size)
        return torch.from_numpy(counts).to(self.device, torch.float64)

    def _collect(self, micro_batches: int, extra: Tensor) -> tuple[Tensor, Tensor]:
        """One sum over the world: per-sample numbers of the last stage [2 or 3, samples], and `extra` (fp64 [n]) of
        every rank. For a sample that ranks share, each of them has the mean over its own tokens."""
        t, b = self.topology, self.config.train.micro_batch
        table_shape = 2 + self.loss.entropies, micro_batches, t.layout.samples, b
        table = torch.zeros(table_shape, dtype=torch.float64, device=self.device)
        if t.is_last_stage and t.tensor_rank == 0:
            table[:, :, t.sample_rank] = torch.stack(self.loss.samples, 1).double() / t.layout.context
        flat_sums = torch.cat((table.flatten(), extra))
        dist.all_reduce(flat_sums)
        flat_sums = flat_sums.cpu()
        return flat_sums[: table.numel()].view(len(table), -1), flat_sums[table.numel() :]

    def _show_gradients(self, scale: float) -> None:
        """To the probes that watch the step. The pieces are freed before the update."""
        if probes := [probe for probe in (self.probe, self.trends) if probe.watching]:
            flat = self.flat_state()
            gradient_pieces = self.zero.view_gradients(flat.fragments)
            for probe in probes:
                probe.add_gradients(flat, gradient_pieces, scale)

    def _measure_step(
        self, micro_batches: int, token_counts: Tensor, ballot: Callable[[], Ballot]
    ) -> tuple[Measured, Any]:
        """Make one sum over the world of all that a step is judged by.

        Args:
            micro_batches: how many were computed.
            token_counts: of this rank's part of the batch, fp64 [vocabulary].
            ballot: as in `train_step`.

        Returns:
            The measurements, and the norm that the update clips by, as DeepSpeed's wrapper wants it.
        """
        norm_part, is_valid, known_norm = self.zero.squared_norm()
        local = self.zero.local
        own_gradient = self.zero.make_scalar([]) if local is None else local.make_columns()
        own_ballot = ballot()
        votes = self.zero.make_scalar(list(chain.from_iterable(own_ballot.values())))
        norm_summands = torch.stack((torch.where(is_valid, norm_part, 0.0), (~is_valid).double()))
        own_choices = self.zero.make_scalar([]) if self.routing is None else self.routing.measure_step()
        summands = token_counts, own_gradient, norm_summands, own_choices, votes
        activity.enter_activity(activity.GATE)
        (losses, squares, *entropies), sums = self._collect(micro_batches, torch.cat(summands))
        summed = sums.split([len(summand) for summand in summands])
        summed_counts, rank_gradients, (squared_norm, broken_count), choices, votes = summed
        grad_norm = math.inf if broken_count else math.sqrt(float(squared_norm))
        scale = float(getattr(self.optimizer, "loss_scale", 1.0))
        lowest_scale = getattr(getattr(self.optimizer, "loss_scaler", None), "min_scale", 0.0)
        overflow = bool(broken_count) and self.config.precision.kind == "fp16" and scale > lowest_scale
        # A non-finite loss is not an overflow of the scaled gradients: a smaller scale would not fix it.
        overflow = overflow and bool(torch.isfinite(losses).all())
        remaining_votes = iter(votes.tolist())
        measured = Measured(
            losses=losses, squares=squares, grad_norm=grad_norm,
            ballot={name: tuple(islice(remaining_votes, len(own_votes))) for name, own_votes in own_ballot.items()},
            loss_scale=scale, overflow=overflow, fp8=None if self.fp8 is None else self.fp8.on,
            gradients=tuple(rank_gradients.tolist()), counts=summed_counts,
            entropies=entropies[0] if entropies else None,
            choices=None if self.routing is None else self.routing.unfold_sums(choices),
        )  # fmt: skip
        return measured, grad_norm if known_norm is None else known_norm

    def _apply_update(self, measured: Measured, norm: Any) -> None:
        """Clip, and let DeepSpeed update; it drops gradients that are not finite. norm: as from `_measure_step`."""
        activity.enter_activity(activity.OPTIMIZER)
        inner = self.optimizer.optimizer
        if isinstance(inner, PieceOptimizer):
            inner.sizes, inner.recording = [], self.measures_update
        self.kept = self._clip(measured.grad_norm, measured.loss_scale)
        clips_logits = self.qk_clip.threshold is not None
        held_routing = self.routing if self.routing is not None and self.routing.caps is not None else None
        with contextlib.ExitStack() as update_context:
            is_followed = clips_logits or held_routing is not None
            update_context.enter_context(self.zero.clipping_by(norm, is_followed))
            if clips_logits:
                highest_logits = self.qk_clip.gather_highest_logits()
                clipping_step = self.qk_clip.after_update(highest_logits, inner, self._flat)
                update_context.enter_context(patches.replace_attribute(inner, "step", clipping_step))
            if held_routing is not None:
                held_step = held_routing.hold_after(inner)
                update_context.enter_context(patches.replace_attribute(inner, "step", held_step))
            self._update_by_deepspeed(None)
        self.applied = bool(self.ds.was_step_applied())

    def _refuse_update(self) -> None:
        """Drop the gradients instead of an update."""
        self.zero.discard_gradients()
        self.ds._step_applied = self.applied = False
        self.ds.skipped_steps += 1
        self.ds.global_steps += 1
        self.ds.global_samples += self.ds.train_batch_size()

    def _clip(self, norm: float, scale: float) -> float:
        """Clip the gradients, where DeepSpeed does not; the share of their norm that is left. Collective."""
        if not math.isfinite(norm):
            return 1.0  # DeepSpeed drops the update
        if self.clipping is None:
            return by_norm(norm, self.adjustments.clip)
        flat = self._flat
        flat_gradients, gradient_pieces = self.zero.view_gradients(flat.fragments), []
        for f in flat.fragments:
            weight_piece = flat.view_piece(f, "weight")
            assert weight_piece is not None
            gradient = flat_gradients[f.group, f.offset].view(-1)[: f.numel]
            gradient_pieces.append(Piece(f, weight_piece, gradient, {}, {}))
        return self.clipping.clip_pieces(gradient_pieces, norm, scale)

    @property
    def updates(self) -> int:
        """Updates applied so far; set it when a state is loaded."""
        return self._updates

    @updates.setter
    def updates(self, number: int) -> None:
        self._updates = number
        gpt.set_updates(self.ds.module, self.config.model, number)

    def follow_config(self, config: RunConfig) -> None:
        """Train with the settings of `config` from the next update on: those that are read again at every step
        (run/changes.py, `LIVE`)."""
        self.config = config
        self.adjustments.follow_config(config)

    def measure_step(self, micro_batches: Sequence[MicroBatch]) -> Measured:
        """Measurements of a step on these micro-batches, by the same forward and backward; the state is unchanged."""
        saved_counters, last_result = self.read_counters(), (self.measured, self.applied)
        self._probing = True
        try:
            first_group = self.optimizer.param_groups[0]
            base_rate = first_group["lr"] / first_group.get("lr_scale", 1.0)
            measured, _ = self.train_step(micro_batches, base_rate, lambda _: False)
        finally:
            self._probing = False
            self.measured, self.applied = last_result
            self.restore_counters(saved_counters)
        return measured

    def collect_statistics(self) -> LayerStatistics:
        """Statistics of weights, moments and the last update, and of the last step if `probe.watch_step()` preceded
        it."""
        return self.probe.collect_statistics(self.flat_state(), self.applied)

    # State

    def optimizer_state(self) -> dict[str, Tensor]:
        """The tensors that a snapshot copies: fp32 masters and the optimizer's state by name. The originals, not
        copies."""
        state_tensors: dict[str, Tensor] = {}
        for index, master in enumerate(self.masters):
            state_tensors[f"{index}/weight"] = master.data
            for key, value in self.optimizer.optimizer.state.get(master, {}).items():
                state_tensors[f"{index}/{key}"] = value
        return state_tensors | {f"{SHARED}{key}": value for key, value in self.shared_state.items()}

    @property
    def shared_state(self) -> dict[str, Tensor]:
        """State of the optimizer, of clipping and of routers that every rank holds alike, by name; the originals."""
        clipping_state = self.clipping.shared if self.clipping is not None else {}
        optimizer_state = shared_state(self.optimizer.optimizer)
        expert_state = {} if self.routing is None else self.routing.shared
        clipping_state = {f"{CLIPPING}{name}": value for name, value in clipping_state.items()}
        return optimizer_state | clipping_state | expert_state

    def restore_shared_state(self, saved: Mapping[str, Tensor]) -> None:
        """Replace the shared state by copies of `saved`. Without state of this kind of clipping, it begins again."""
        held = shared_state(self.optimizer.optimizer)
        held.clear()
        own_names = [name for name in saved if not name.startswith((CLIPPING, PREFIX))]
        held.update({name: saved[name].to(self.device, copy=True) for name in own_names})
        if self.routing is not None:
            self.routing.restore_state(saved)
        if self.clipping is not None:
            mine = {n.removeprefix(CLIPPING): t for n, t in saved.items() if n.startswith(CLIPPING)}
            self.clipping.restore_state(mine)

    @property
    def clipping_reset(self) -> str | None:
        """The kind of clipping, if it has begun no history of the gradients that it needs."""
        own_clipping = self.clipping
        has_no_history = own_clipping is not None and bool(own_clipping.names) and not own_clipping.shared
        return self.config.optimizer.clipping.kind if has_no_history else None

    @torch.no_grad()
    def restore_optimizer_state(self, saved: dict[str, Tensor]) -> None:
        """Restore masters and the optimizer's state from `saved`, in place; call `refresh_weights` afterwards. Drops
        gradients. What of the state belongs to an adjustment follows those of now."""
        self._wait_for_copies()
        shared = {name.removeprefix(SHARED): t for name, t in saved.items() if name.startswith(SHARED)}
        self.restore_shared_state(shared)
        inner = self.optimizer.optimizer
        for index, master in enumerate(self.masters):
            wanted = {name.split("/", 1)[1]: t for name, t in saved.items() if name.startswith(f"{index}/")}
            master.data.copy_(wanted.pop("weight"))
            state = inner.state[master]
            for key in [key for key in state if key not in wanted]:
                del state[key]
            for key, value in wanted.items():
                if key in state:
                    state[key].copy_(value)
                else:
                    on = master.device if value.dim() or inner.defaults.get("fused") else "cpu"
                    state[key] = value.to(on, copy=True)
        self.adjustments.switch_to(self.adjustments.now)

    @torch.no_grad()
    def reset_moments(self) -> None:
        """Begin the optimizer's moments, and their bias correction, again at zero; clipping keeps its history."""
        self._wait_for_copies()
        for state in self.optimizer.optimizer.state.values():
            for value in state.values():
                if isinstance(value, Tensor):
                    value.zero_()
        shared_state(self.optimizer.optimizer).clear()

    def reset_bias(self) -> None:
        """Begin the biases of all experts again at zero."""
        assert self.routing is not None, "adjustments.possible has it"
        self.routing.bias.zero_()

    def choose_by_past(self) -> None:
        """Have routers choose by older weights for some updates; collective."""
        assert self.routing is not None, "adjustments.possible has it"
        self.routing.choose_by_past()

    def change_once(self, remedy: str) -> None:
        """What a remedy of `ONCE` (megastable_guard/policy.py) changes at once in the state; collective."""
        changes: dict[str, Callable[[], None]] = {
            "reset_bias": self.reset_bias, "past_routing": self.choose_by_past, "reset_moments": self.reset_moments,
        }  # fmt: skip
        if remedy in changes:
            changes[remedy]()

    def read_counters(self) -> dict[str, Any]:
        """DeepSpeed's step counters, fp16's loss scaler, the state of FP8's delayed scales, and `updates`."""
        return {
            "engine": {counter_name: getattr(self.ds, counter_name) for counter_name in COUNTERS},
            "scaler": self.scaler,
            "fp8": self.fp8.copy_state() if self.fp8 is not None else None,
            "updates": self.updates,
        }

    def restore_counters(self, saved: dict[str, Any]) -> None:
        for counter_name, saved_value in saved["engine"].items():
            setattr(self.ds, counter_name, saved_value)
        self.restore_scaler(saved["scaler"])
        self.updates = saved["updates"]
        if self.fp8 is not None:
            self.fp8.restore_state(saved["fp8"])

    def fp8_history(self) -> dict[str, list[list[float]]]:
        """State of FP8's delayed scales, of all layers of the model; collective."""
        here = self.fp8.write_history() if self.fp8 is not None else {}
        if self.topology.layout.pipeline == 1 or self.fp8 is None:
            return here
        return {name: told for held in gather_objects(here) for name, told in held.items()}

    def restore_fp8_history(self, history: History) -> None:
        if self.fp8 is not None:
            self.fp8.read_history(history)

    @property
    def scaler(self) -> dict[str, Any]:
        """fp16's loss scaler: its scale and its counters; empty in other precisions."""
        if self.config.precision.kind != "fp16":
            return {}
        values = vars(self.optimizer.loss_scaler).items()
        return {name: value for name, value in values if isinstance(value, int | float | bool)}

    def restore_scaler(self, saved: dict[str, Any]) -> None:
        """Continue with these of `scaler`'s numbers; none has an effect in other precisions than fp16."""
        for field_name in saved.keys() & self.scaler.keys():
            setattr(self.optimizer.loss_scaler, field_name, saved[field_name])

    def hold_updates(self, until: Filled | torch.cuda.Event) -> None:
        """Delay the next update, on the GPU or for a thread, until `until`: its tensors are still being copied."""
        self._copies.append(until)

    def _wait_for_copies(self) -> None:
        for pending_copy in self._copies:
            if isinstance(pending_copy, Filled):
                pending_copy.synchronize()
            else:
                torch.cuda.current_stream().wait_event(pending_copy)
        self._copies.clear()

    def flat_state(self) -> FlatState:
        """Masters and moments of this rank by parameter; see flatstate.py. Views: writing to them changes the state."""
        return self.zero.flat_state()

    @property
    def masters(self) -> list[Tensor]:
        """The flat fp32 master weights of this rank."""
        return self.zero.masters

    def refresh_weights(self) -> None:
        """Copy the master weights to the parameters in compute precision."""
        self.zero.refresh_weights()
