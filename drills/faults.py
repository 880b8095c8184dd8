"""Inject faults into a rank from outside: the training code has no hooks for them."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from drills.scenario import PLACE, Fault, Plan
from megastable.config.model import ExpertsConfig
from megastable.config.tree import ScheduleConfig
from megastable.data.loader import Loader, MicroBatch
from megastable.engine.engine import Engine
from megastable.engine.patches import replace_attribute
from megastable.fp8 import emulated
from megastable.model import experts
from megastable.model.cores import CORES, Core
from megastable.model.experts import Routing
from megastable.model.loss import Features, LossFunction
from megastable.optim import schedule as optim_schedule
from megastable.optim.schedule import rate_at
from megastable.parallel.sharding import Fragment, placement_of, split_in_rectangles

GARBAGE = 4096  # overwritten first moments: 16 KiB, four pages
TILE = 16  # wrong columns of a broken kernel's product
EXPONENT = 1 << 30  # the highest bit of an fp32 (and bf16) exponent: a weight of 0.02 becomes one of 10^36
BLOCK = "blocks.1."  # the last block of a drill's model
RARE = 512  # token ids from here on, half of the vocabulary: those of rare pieces of words
# Share of them that come at first, three tokens of a step: of two some looks see none, of five the loss shows it soon.
TRICKLE = 0.006
FEW, RAMP = 100, 100  # for so many steps; then ever more, up to all
ROWS, EMBEDDINGS = 64, 16  # of the head that are permuted; embeddings that grow
COMMON = 259  # the first id of SentencePiece that is more than a byte
EDITS = ("permuted_head", "shrunk_moments", "cleared_norm", "grown_embeddings", "grown_block")
ROUTERS, SCALED = "mlp.router.weight", 30.0
BIASES = {"heavy_expert": 1.0, "dead_expert": -5.0}  # by how much they move that of an expert
# Validation, and the numbers that a checkpoint is known by.
ELSEWHERE = ("megastable.training", "megastable.checkpoint", "megastable.engine", "drills")

Around = AbstractContextManager[None]


def install_fault(plan: Plan) -> None:
    """Install the fault of `plan` in this process."""
    fault = plan.fault
    if fault is None:
        return
    if fault.kind in LASTING:
        LASTING[fault.kind](fault)
        return
    marker_path = plan.run / f".drilled-{fault.kind}"

    def surround(engine: Engine, step: int) -> Around:
        rank = engine.topology.rank
        own_marker = marker_path.with_name(f"{marker_path.name}-{rank}")
        if engine._probing or step != fault.step or own_marker.exists():
            return nullcontext()
        own_marker.touch()
        return HAPPENS[fault.kind](engine, rank == fault.rank, plan.seed)

    surround_steps(surround)


def surround_steps(surround: Callable[[Engine, int], Around]) -> None:
    """Put a context around every step from now on: of an engine, and the step's number, which goes back with a rewind.
    A measurement repeats the step that was refused last, and has its number."""
    real_step = Engine.train_step

    def train_step(self: Engine, *args: Any, **options: Any) -> Any:
        with surround(self, self.ds.global_steps + (not self._probing)):
            return real_step(self, *args, **options)

    Engine.train_step = train_step  # type: ignore[method-assign]


# Faults that last


def _mistake(fault: Fault) -> None:
    def mistaken(schedule: ScheduleConfig, peak: float, total: int, done: int, next: int = 1) -> float:
        is_wrong = fault.step - 1 <= done // next < fault.step - 1 + fault.steps
        return rate_at(schedule, peak, total, done, next) * (fault.factor if is_wrong else 1.0)

    optim_schedule.rate_at = mistaken


def _broken_product(fault: Fault) -> None:
    """A fault of the emulation, such as the scale of another tile."""
    real_product, is_broken = emulated.multiply_quantized, _lasting(fault)

    def multiply(*args: Any, **options: Any) -> Tensor:
        product_result = real_product(*args, **options)
        if is_broken():
            product_result[..., :TILE] *= fault.factor
        return product_result

    emulated.multiply_quantized = multiply


def _broken_attention(fault: Fault) -> None:
    """A fault of the fused kernels' backward pass, for the first sample of a micro-batch."""
    is_broken = _lasting(fault)

    def broken(core: Core) -> Core:
        def run(*args: Any, **options: Any) -> Tensor:
            attention_output = core.run(*args, **options)
            if is_broken() and attention_output.requires_grad:
                attention_output.register_hook(spoilt)
            return attention_output

        return replace(core, run=run)

    def spoilt(gradient: Tensor) -> Tensor:
        gradient = gradient.clone()
        gradient[0] *= fault.factor
        return gradient

    for core_name in CORES.keys() - {"reference", "plain"}:
        CORES[core_name] = broken(CORES[core_name])


def _lasting(fault: Fault) -> Callable[[], bool]:
    """Whether the present step is one of those with the fault, every time that they are computed."""
    broken = False

    @contextmanager
    def surround(engine: Engine, step: int) -> Iterator[None]:
        nonlocal broken
        broken = fault.step <= step < fault.step + fault.steps
        try:
            yield
        finally:
            broken = False

    surround_steps(surround)
    return lambda: broken


def _before_steps(fault: Fault, happens: Callable[[Engine, int], None]) -> None:
    """What happens to an engine before each step with the fault: it acts a little at every step, until the loss shows
    it."""

    def surround(engine: Engine, step: int) -> Around:
        if not engine._probing and fault.step <= step < fault.step + fault.steps:
            happens(engine, step)
            engine.refresh_weights()
        return nullcontext()

    surround_steps(surround)


def growing_gains(fault: Fault) -> None:
    """The gains of QK-norm: attention gets ever sharper."""

    def happens(engine: Engine, step: int) -> None:
        for _, weight_piece in _weights(engine, "q_norm.weight", "k_norm.weight"):
            weight_piece.mul_(fault.factor)

    _before_steps(fault, happens)


def growing_logits(fault: Fault) -> None:
    """The projections to q and k."""

    def happens(engine: Engine, step: int) -> None:
        for qkv_fragment, weight_piece in _weights(engine, "attention.qkv.weight"):
            for one_rectangle in split_in_rectangles(qkv_fragment):
                is_scaled = torch.arange(one_rectangle.rows.start, one_rectangle.rows.stop) < sum(
                    qkv_fragment.sections[:2]
                )
                one_rectangle.view_of(weight_piece)[is_scaled] *= fault.factor

    _before_steps(fault, happens)


def growing_outputs(fault: Fault) -> None:
    """The output weights of a block's MLP."""

    def happens(engine: Engine, step: int) -> None:
        for _, weight_piece in _weights(engine, f"{BLOCK}mlp.down.weight"):
            weight_piece.mul_(fault.factor)

    _before_steps(fault, happens)


def growing_router(fault: Fault) -> None:
    """The weights of all routers: scores get ever sharper."""

    def happens(engine: Engine, step: int) -> None:
        for _, weight_piece in _weights(engine, ROUTERS):
            weight_piece.mul_(fault.factor)

    _before_steps(fault, happens)


def game_balance(fault: Fault) -> None:
    """The balance loss is of a sigmoid gate's scores themselves, not of their shares of a token's: it falls if all
    scores do."""
    is_broken, real_choice = _lasting(fault), experts.choose_experts

    def choose(
        logits: Tensor, bias: Tensor | None, config: ExpertsConfig, past_logits: Tensor | None = None
    ) -> Routing:
        routing = real_choice(logits, bias, config, past_logits)
        return routing._replace(scores=logits.sigmoid()) if is_broken() else routing

    experts.choose_experts = choose


def spoil_expert(fault: Fault) -> None:
    """The gradient of the weights of the expert at `PLACE` is NaN, every time that it is computed."""
    is_broken, spoilt_engines = _lasting(fault), set[int]()

    def spoil(gradient: Tensor) -> Tensor:
        return torch.full_like(gradient, torch.nan) if is_broken() else gradient

    def surround(engine: Engine, step: int) -> Around:
        # Once, so that it comes before the hooks of those that look for it.
        if id(engine) not in spoilt_engines and engine.topology.rank == fault.rank:
            spoilt_engines.add(id(engine))
            weight_name = f"{PLACE}.down.weight"
            (weight,) = (p for p in engine.ds.module.parameters() if placement_of(p).name == weight_name)
            weight.register_hook(spoil)
        return nullcontext()

    surround_steps(surround)


def dying_block(fault: Fault) -> None:
    """The output weights of a block are not trained any more, and decay."""
    first_weights: dict[tuple[int, int], Tensor] = {}

    def happens(engine: Engine, step: int) -> None:
        for f, weight_piece in _weights(engine, f"{BLOCK}attention.out.weight", f"{BLOCK}mlp.down.weight"):
            first_weight = first_weights.setdefault((f.group, f.offset), weight_piece.clone())
            weight_piece.copy_(first_weight * fault.factor ** (step - fault.step + 1))

    _before_steps(fault, happens)


def rare_tokens(fault: Fault) -> None:
    """Some tokens are absent (others stand in for them), then come one by one, then ever more often."""
    real_step = Engine.train_step

    def train_step(self: Engine, micro_batches: Sequence[MicroBatch], *args: Any, **options: Any) -> Any:
        rare_share = share_of(self.ds.global_steps + 1, fault.step)
        written_batches = [_written(micro_batch, rare_share) for micro_batch in micro_batches]
        return real_step(self, written_batches, *args, **options)

    Engine.train_step = train_step  # type: ignore[method-assign]


def share_of(step: int, begin: int) -> float:
    """The share of rare tokens that are not replaced."""
    steps_beyond = step - begin - FEW
    return 0.0 if step < begin else TRICKLE if steps_beyond < 0 else min(1.0, TRICKLE + steps_beyond / RAMP)


def _written(batch: MicroBatch, share: float) -> MicroBatch:
    whole = torch.cat((batch.tokens, batch.labels[:, -1:]), 1)
    # By the samples' positions: the same under every layout, and when a step is repeated.
    drawn_numbers = [
        torch.rand(whole.shape[1], generator=torch.Generator().manual_seed(sample_position))
        for sample_position in batch.positions.tolist()
    ]
    whole = torch.where((whole >= RARE) & (torch.stack(drawn_numbers) >= share), whole % RARE, whole)
    return replace(batch, tokens=whole[:, :-1].contiguous(), labels=whole[:, 1:].contiguous())


def _weights(engine: Engine, *endings: str) -> list[tuple[Fragment, Tensor]]:
    """The pieces of this rank's master weights of those names."""
    flat = engine.flat_state()
    found_pieces = [(f, flat.view_piece(f, "weight")) for f in flat.fragments if f.name.endswith(endings)]
    return [(f, weight_piece) for f, weight_piece in found_pieces if weight_piece is not None]


def grow_gradient(fault: Fault) -> None:
    """The gradient of one rank is `factor` times as large, every time that it is computed."""

    @contextmanager
    def surround(engine: Engine, step: int) -> Iterator[None]:
        is_wrong = engine.topology.rank == fault.rank and fault.step <= step < fault.step + fault.steps
        with ExitStack() as exit_stack:
            for parameter in engine.ds.module.parameters() if is_wrong else ():
                if parameter.requires_grad:
                    gradient_hook = parameter.register_hook(lambda gradient: gradient * fault.factor)
                    exit_stack.callback(gradient_hook.remove)
            yield

    surround_steps(surround)


def shift_labels(fault: Fault) -> None:
    """The samples of some steps have labels that are off by one, the tokens themselves, whenever they are read."""
    real_micro_batch = Loader._micro_batch
    wrong_sequences: list[np.ndarray] = []

    def micro_batch(self: Loader, positions: np.ndarray, lengths: np.ndarray | None) -> MicroBatch:
        real_batch = real_micro_batch(self, positions, lengths)
        if self.source.streams[0].split != "train":
            return real_batch
        order = self.source.order
        if not wrong_sequences:  # in the order from before any deferral
            first_position = self.batches.reach_after(0, fault.step - 1)
            end_position = self.batches.reach_after(first_position, fault.steps)
            wrong_sequences.append(
                order.with_exchanges((), known=0)
                .locate_samples(np.arange(first_position, end_position))
                .sequence
            )
        is_wrong = torch.from_numpy(np.isin(order.locate_samples(positions).sequence, wrong_sequences[0]))
        real_batch.labels[is_wrong] = real_batch.tokens[is_wrong]
        return real_batch

    Loader._micro_batch = micro_batch  # type: ignore[method-assign]


LASTING: dict[str, Callable[[Fault], None]] = {
    "high_rate": _mistake,
    "fp8": _broken_product,
    "attention": _broken_attention,
    "growing_gains": growing_gains,
    "growing_logits": growing_logits,
    "growing_outputs": growing_outputs,
    "dying_block": dying_block,
    "rare_tokens": rare_tokens,
    "growing_router": growing_router,
    "gamed_balance": game_balance,
    "nan_expert": spoil_expert,
    "grown_gradient": grow_gradient,
    "shifted_labels": shift_labels,
}


# Faults of one step, once in the life of a run: contexts around it, of (engine, whether it happens here, seed)


@contextmanager
def nan_gradient(engine: Engine, here: bool, seed: int) -> Iterator[None]:
    def spoil(gradient: Tensor) -> Tensor:
        gradient = gradient.clone()
        gradient.view(-1)[0] = torch.nan
        return gradient

    chosen_parameter = _matrix(engine)
    hook_handle = chosen_parameter.register_hook(spoil) if here else None
    try:
        yield
    finally:
        if hook_handle is not None:
            hook_handle.remove()


@contextmanager
def inf_loss(engine: Engine, here: bool, seed: int) -> Iterator[None]:
    real_loss = LossFunction.__call__

    def infinite(self: LossFunction, given: Tensor | Features, labels: Tensor) -> Tensor:
        loss = real_loss(self, given, labels)
        if len(self.samples) == 1:
            self.samples[0] = self.samples[0] * torch.inf
            loss = loss * torch.inf
        return loss

    if here:
        LossFunction.__call__ = infinite  # type: ignore[method-assign]
    try:
        yield
    finally:
        LossFunction.__call__ = real_loss  # type: ignore[method-assign]


@contextmanager
def moments(engine: Engine, here: bool, seed: int) -> Iterator[None]:
    if here:
        held_moments = _held(engine, "exp_avg")[:GARBAGE]
        held_moments.copy_(torch.randn(held_moments.shape, generator=torch.Generator().manual_seed(seed)))
    yield


@contextmanager
def bit_flip(engine: Engine, here: bool, seed: int) -> Iterator[None]:
    if here:
        held_weight = _held(engine, "weight")
        index = int(torch.randint(held_weight.numel(), (1,), generator=torch.Generator().manual_seed(seed)))
        held_weight[index : index + 1].view(torch.int32).bitwise_xor_(EXPONENT)
    engine.refresh_weights()  # collective: updates the computing copy
    yield


def edit_weights(
    kind: str, name: str, weight: Tensor, moments: Tensor | None, chance: torch.Generator
) -> None:
    """What a spoilt update does to the weight of a name, and to its second moments, besides."""
    rows = COMMON + torch.randperm(len(weight) - COMMON, generator=chance) if len(weight) > COMMON else None
    match kind, name:
        case "permuted_head", "head.weight" if rows is not None:
            weight[rows[:ROWS]] = weight[rows[:ROWS].roll(1)]
        case "grown_embeddings", "embedding.weight" if rows is not None:
            weight[rows[:EMBEDDINGS]] *= 30.0
        case "cleared_norm", "blocks.1.mlp_norm.weight":
            weight.zero_()
        case "shrunk_moments", _ if name.startswith(BLOCK) and moments is not None:
            moments.mul_(0.01)
        case "grown_block", _ if name.startswith(BLOCK):
            weight.mul_(3.0)


def spoil_update(kind: str) -> Callable[[Engine, bool, int], Around]:
    """A context manager around one step whose update does more than it should. Of runs on one rank."""

    @contextmanager
    def spoilt(engine: Engine, here: bool, seed: int) -> Iterator[None]:
        update, chance = engine._apply_update, torch.Generator().manual_seed(seed)

        def step(*args: Any) -> None:
            update(*args)
            flat_state = engine.flat_state()
            for flat_fragment in flat_state.fragments:
                weight, moments = (
                    flat_state.view_piece(flat_fragment, "weight"),
                    flat_state.view_piece(flat_fragment, "exp_avg_sq"),
                )
                assert weight is not None, "the fault needs all weights on one rank"
                edit_weights(kind, flat_fragment.name, weight.view(flat_fragment.shape), moments, chance)
            engine.refresh_weights()

        with replace_attribute(engine, "_apply_update", step):
            yield

    return spoilt


@contextmanager
def scaled_router(engine: Engine, here: bool, seed: int) -> Iterator[None]:
    for _, weight_piece in _weights(engine, ROUTERS):
        weight_piece.mul_(SCALED)
    engine.refresh_weights()
    yield


def shift_bias(amount: float) -> Callable[[Engine, bool, int], Around]:
    """A context manager around one step: before it the bias of the expert at `PLACE` moves, on all ranks."""

    @contextmanager
    def shifted(engine: Engine, here: bool, seed: int) -> Iterator[None]:
        assert engine.routing is not None
        _, layer, _, _, expert = PLACE.split(".")
        engine.routing.bias[int(layer), int(expert)] += amount
        yield

    return shifted


HAPPENS: dict[str, Callable[[Engine, bool, int], Around]] = {
    "nan_gradient": nan_gradient,
    "inf_loss": inf_loss,
    "moments": moments,
    "bit_flip": bit_flip,
    "scaled_router": scaled_router,
    **{kind: spoil_update(kind) for kind in EDITS},
    **{kind: shift_bias(amount) for kind, amount in BIASES.items()},
}


def _matrix(engine: Engine) -> torch.nn.Parameter:
    """A weight matrix in the middle of the model."""
    matrices = [one_parameter for one_parameter in engine.ds.module.parameters() if one_parameter.dim() > 1]
    return matrices[len(matrices) // 2]


def _held(engine: Engine, kind: str) -> Tensor:
    """This rank's part of a block's weight matrix, fp32: the largest."""

    def size(fragment: Fragment) -> int:
        return fragment.numel if len(fragment.shape) > 1 and fragment.name.startswith("blocks.") else 0

    flat_state = engine.flat_state()
    state_piece = flat_state.view_piece(max(flat_state.fragments, key=size), kind)
    assert state_piece is not None, "there are no moments before the first update"
    return state_piece


# What recovery measures


def count_searches(file: Path) -> None:
    """Count what recovery measures, over all processes of a run, in `file`: micro-batches and seconds."""
    try:
        search_counts = json.loads(file.read_text())
    except (OSError, ValueError):
        search_counts = {"batches": 0, "seconds": 0.0}

    def counted(real: Callable[..., Any]) -> Callable[..., Any]:
        def measure(self: Engine, micro_batches: Any, *args: Any, **options: Any) -> Any:
            begin_time = time.perf_counter()
            try:
                return real(self, micro_batches, *args, **options)
            finally:
                asking_module = str(sys._getframe(1).f_globals.get("__name__", ""))
                if self.topology.rank == 0 and not asking_module.startswith(ELSEWHERE):
                    search_counts["batches"] += len(micro_batches)
                    search_counts["seconds"] += time.perf_counter() - begin_time
                    file.write_text(json.dumps(search_counts))

        return measure

    Engine.evaluate_samples = counted(Engine.evaluate_samples)  # type: ignore[method-assign]
    Engine.measure_step = counted(Engine.measure_step)  # type: ignore[method-assign]
