"""Silent corruption in real runs: found in its step, the rank named, undone to the bytes of a clean run."""

from __future__ import annotations

from collections.abc import Callable, Container, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megastable.config.tree import RunConfig
from megastable.data.corpora import open_corpora
from megastable.run.directory import RunDirectory
from megastable.run.events.event import Event
from megastable.run.events.stability_events import (
    AlertEvent,
    GradientsDoubted,
    HostFaulty,
    IncidentEvent,
    MessagesDiffer,
    ReplayDiffers,
    ReplicasDiffer,
    SnapshotRejected,
    StateChanged,
    WrongCopy,
)
from tests.conftest import tiny, write_corpus
from tests.distributed import run_ranks

STEP, LAST, EVERY = 24, 32, 10
LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "one": (1, {}), "dp2": (2, {}), "dp3": (3, {}), "tp2": (2, {"tensor": 2}), "pp2": (2, {"pipeline": 2}),
    "pp2-zero-bubble": (2, {"pipeline": 2, "schedule": "zero_bubble"}),
    "pp2-chunks": (2, {"pipeline": 2, "model_chunks": 2}),
    "zero2": (2, {"zero": 2}), "zero3": (2, {"zero": 3}), "zero3-dp3": (3, {"zero": 3}), "fp32": (2, {}),
    "context2": (2, {"context": 2}), "tp2-dp2": (4, {"tensor": 2}), "pp2-dp2": (4, {"pipeline": 2}),
    "replicas2": (2, {"replicas": 2}), "replicas3-dp6": (6, {"replicas": 3}),
    "experts2-dp6": (6, {"expert": 2}), "experts2-zero2": (2, {"expert": 2, "zero": 2}),
}  # fmt: skip
# By name: the watches of the recipe, so that this one is the first to see a fault; its batch and micro-batch.
WATCHES: dict[str, tuple[dict[str, Any], int, int]] = {
    "gradients": ({}, 96, 16),
    "state": ({"gradients": False}, 12, 2),
    "copies": ({"fingerprint_interval": EVERY, "state": False}, 12, 2),
    "messages": ({}, 12, 2),
    "replays": ({"replay_interval": EVERY, "gradients": False}, 12, 2),
    "none": (dict.fromkeys(("messages", "state", "gradients"), False)
             | dict.fromkeys(("fingerprint_interval", "replay_interval"), 0), 12, 2),
}  # fmt: skip


def recipe(corpus: Path, run: Path, layout: str, watch: str, steps: int = LAST, every: int = 5) -> RunConfig:
    hardware, batch, micro = WATCHES[watch]
    return tiny(
        corpus, run, parallel=LAYOUTS[layout][1], precision={"kind": "fp32" if layout == "fp32" else "bf16"},
        train={"steps": steps, "global_batch": batch, "micro_batch": micro, "eval_samples": 0},
        schedule={"warmup_steps": 5, "total_steps": steps}, checkpoint={"interval": steps},
        stability={"hardware": hardware, "snapshots": {"interval": every}},
        model={"layers": 4 if layout == "pp2-chunks" else 2}
        | ({"experts": {"count": 4, "top_k": 2, "ffn": 128}} if "experts" in layout else {}),
    )  # fmt: skip


def train(config: RunConfig, fault: Callable[[], None] | None = None, ranks: Sequence[int] = ()) -> int:
    """A run on whose `ranks` a fault is put in before it begins, every rank on a host of its own."""
    import socket

    import torch.distributed as dist

    from megastable import train

    me = dist.get_rank()
    socket.gethostname = lambda: f"host{me}"  # type: ignore[assignment]
    if fault is not None and me in ranks:
        fault()
    return train.train(config, Path("recipe.yaml"))


def run_with(config: RunConfig, layout: str, fault: Callable[[], None] | None, *ranks: int) -> RunDirectory:
    """The directory of a run that ends well."""
    world = LAYOUTS[layout][0]
    assert run_ranks(world, train, config, fault, ranks) == [0] * world
    assert config.run.dir is not None
    return RunDirectory(config.run.dir)


def bytes_of(run: RunDirectory, step: int = LAST) -> dict[str, bytes]:
    """Masters, moments and weights of a run's checkpoint, which must be there, by file."""
    folder = run.checkpoints / f"step-{step}"
    found = {path.name: path.read_bytes() for path in sorted(folder.glob("*.safetensors"))}
    assert found, f"{run.root} has no checkpoint of step {step}"
    return found


CLEAN: dict[tuple[str, str], dict[str, bytes]] = {}


def clean(corpus: Path, folder: Path, layout: str, watch: str) -> dict[str, bytes]:
    """The bytes of a run without a fault, in which nothing was found."""
    if (layout, watch) not in CLEAN:
        run = run_with(recipe(corpus, folder / "clean", layout, watch), layout, None)
        found = run.iterate_events(
            GradientsDoubted, IncidentEvent, MessagesDiffer, ReplayDiffers, ReplicasDiffer, StateChanged
        )
        assert not list(found)
        CLEAN[layout, watch] = bytes_of(run)
    return CLEAN[layout, watch]


# Faults, put into a rank


class FirstTime:
    """now: whether an engine does a step for the first time; a repetition, or the step after a rewind, is not that."""

    def __init__(self, step: int, before: Callable[[Any], None] = lambda engine: None) -> None:
        """before: called with the engine before it does the step."""
        from megastable.engine.engine import Engine

        self.now, over, real = False, False, Engine.train_step

        def train_step(engine: Engine, *args: Any, **options: Any) -> Any:
            nonlocal over
            here = engine.ds.global_steps + 1 == step and not engine._probing
            self.now, over = here and not over, here or over
            if self.now:
                before(engine)
            return real(engine, *args, **options)

        Engine.train_step = train_step  # type: ignore[method-assign]


def spoil_gradient(kind: str, always: bool = False) -> None:
    """The rank's own gradient is wrong in step `STEP`, or from it on."""
    from megastable.engine.engine import Engine

    real, step = Engine.__init__, Engine.train_step
    active = done = False
    calls: dict[int, int] = {}  # by parameter, in this step
    before: dict[tuple[int, int], Any] = {}

    def __init__(self: Engine, *args: Any) -> None:
        real(self, *args)
        for number, p in enumerate(self.ds.module.parameters()):
            p.register_hook(partial(wrong, number))

    def wrong(number: int, gradient: Any) -> Any:
        at = number, calls.get(number, 0)
        calls[number] = at[1] + 1
        stale = before.get(at)
        before[at] = gradient.clone()
        changed = {"negated": -gradient, "scaled": 3 * gradient, "zero": 0 * gradient, "stale": stale}
        return changed[kind] if active else gradient

    def train_step(self: Engine, *args: Any, **options: Any) -> Any:
        nonlocal active, done
        now = self.ds.global_steps + 1
        active = now >= STEP if always else now == STEP and not self._probing and not done
        calls.clear()
        found = step(self, *args, **options)
        done = done or active
        return found

    Engine.__init__, Engine.train_step = __init__, train_step  # type: ignore[method-assign,assignment]


def flip_sum(bit: int) -> None:
    """A bit flips of what the rank has received of the sum, of the largest of a few elements: one of nothing changes
    nothing."""
    import torch

    from megastable.engine.local_gradients import LocalGradients

    after, first_time, done = LocalGradients.measure_after_sum, FirstTime(STEP), False

    def received(self: LocalGradients, parts: Any) -> None:
        nonlocal done
        part = max(parts, key=lambda part: part.numel())
        if first_time.now and not done and part.numel() > 4096:
            at, done = int(part[:64].abs().argmax()), True
            part[at : at + 1].view(torch.int32).bitwise_xor_(torch.tensor(1 << bit, dtype=torch.int64).int())
        after(self, parts)

    LocalGradients.measure_after_sum = received  # type: ignore[method-assign,assignment]


def flip_memory(place: str, steps: Sequence[int] = (STEP,), bit: int = 0, group: int = 0) -> None:
    """A bit, the lowest, of one element of a parameter group before these steps, each done for the first time or again.
    Of a model with experts the routers are the first group, and experts that few ranks have the second."""
    import torch

    from megastable.engine.engine import Engine

    kinds = {"master": "weight", "moment": "exp_avg", "second": "exp_avg_sq"}
    real, left = Engine.train_step, list(steps)

    def train_step(self: Engine, *args: Any, **options: Any) -> Any:
        if not self._probing and left and self.ds.global_steps + 1 >= left[0]:
            left.pop(0)
            state = (
                self.zero.flat_weights[group]
                if place == "weight"
                else self.optimizer_state()[f"{group}/{kinds[place]}"]
            )
            flat = state.view(-1)
            flat[7:8].view(torch.int16 if flat.element_size() == 2 else torch.int32).bitwise_xor_(1 << bit)
        return real(self, *args, **options)

    Engine.train_step = train_step  # type: ignore[method-assign]


def flip_update() -> None:
    """The lowest bit of a master that the rank has updated in step `STEP`, before its memory is fingerprinted."""
    import torch

    from megastable.engine.engine import Engine

    apply_update, first_time = Engine._apply_update, FirstTime(STEP)

    def updated(self: Engine, *given: Any) -> None:
        apply_update(self, *given)
        if first_time.now:
            self.masters[0].detach()[7:8].view(torch.int32).bitwise_xor_(1)

    Engine._apply_update = updated  # type: ignore[method-assign]


def flip_before_checkpoint() -> None:
    """A weight, between the last step and its checkpoint."""
    import torch

    from megastable.recovery.recovery import Recovery

    inspect, done = Recovery.inspect_hardware, False

    def inspected(self: Recovery, *args: Any, **options: Any) -> Any:
        nonlocal done
        if not done and args[0].state.step == LAST:
            done = True
            self.engine.zero.flat_weights[0].view(-1)[7:8].view(torch.int16).bitwise_xor_(1)
        return inspect(self, *args, **options)

    Recovery.inspect_hardware = inspected  # type: ignore[method-assign]


def flip_snapshot(copied: bool) -> None:
    """A bit of the snapshot after step 20: in it, and one of the weights, so that the run goes back to it; or of a
    moment, before it is copied."""
    import torch

    from megastable.checkpoint.snapshot import Ring

    take, done = Ring.take_snapshot, False

    def taken(self: Any, step: int, *args: Any, **options: Any) -> None:
        nonlocal done
        if step == 20 and not done and not copied:
            done = True
            self._engine.optimizer_state()["0/exp_avg"].view(-1)[7:8].view(torch.int32).bitwise_xor_(1)
        take(self, step, *args, **options)
        self._engine.ring = self

    def spoil(engine: Any) -> None:
        tensor = next(iter(engine.ring._kept[-1].tensors.values()))
        tensor.view(-1)[7:8].view(torch.int32).bitwise_xor_(1 << 30)
        engine.zero.flat_weights[0].view(-1)[7:8].view(torch.int16).bitwise_xor_(1)

    Ring.take_snapshot = taken  # type: ignore[method-assign]
    if copied:
        FirstTime(STEP, spoil)


def flip_message(number: int) -> None:
    """The lowest bit of an element in a message of step `STEP` that the rank receives, the first one or a later one."""
    import torch
    from deepspeed import comm

    real, first_time, seen = comm.recv, FirstTime(STEP), 0

    def receive(tensor: Any, *args: Any, **options: Any) -> Any:
        nonlocal seen
        done = real(tensor, *args, **options)
        if first_time.now and tensor.dtype is torch.bfloat16:
            if seen == number:
                tensor.view(-1)[7:8].view(torch.int16).bitwise_xor_(1)
            seen += 1
        return done

    comm.recv = receive  # type: ignore[assignment]


def flip_chunk_message(number: int) -> None:
    """As `flip_message`, of those between chunks of the model."""
    import torch
    from deepspeed.runtime.pipe import p2p

    from megastable.engine import interleaved

    show, first_time, seen = interleaved.show_message, FirstTime(STEP), 0

    def shown(end: Any, message: Any, hop: tuple[int, int]) -> None:
        nonlocal seen
        if end is p2p.recv and first_time.now and message.dtype is torch.bfloat16:
            if seen == number:
                message.view(-1)[7:8].view(torch.int16).bitwise_xor_(1)
            seen += 1
        show(end, message, hop)

    interleaved.show_message = shown


def spoil_messages(steps: Sequence[int]) -> None:
    """What the rank sends changes after it was fingerprinted. No steps: from the 6th on, up to a hundred."""
    import torch
    from deepspeed import comm

    from megastable.engine.engine import Engine

    real, step, left, active, done = comm.send, Engine.train_step, list(steps), False, 0

    def train_step(self: Engine, *args: Any, **options: Any) -> Any:
        nonlocal active, done
        done += 1
        active = 6 <= done < 100 if not steps else bool(left) and self.ds.global_steps + 1 >= left[0]
        if active and left:
            left.pop(0)
        return step(self, *args, **options)

    def send(tensor: Any, *args: Any, **options: Any) -> Any:
        nonlocal active
        if active and tensor.dtype is torch.bfloat16:
            active = False
            tensor = tensor.detach().clone()
            tensor.view(-1)[7:8].view(torch.int16).bitwise_xor_(1)
        return real(tensor, *args, **options)

    comm.send, Engine.train_step = send, train_step  # type: ignore[assignment,method-assign]


def spoil_input_gradient() -> None:
    """What a stage sends back is wrong before it is fingerprinted: its own product was."""
    from megastable.engine.zero import StageMessages

    sent, first_time = StageMessages._add_sent, FirstTime(STEP)

    def add_sent(self: StageMessages, message: Any, hop: tuple[int, int]) -> None:
        if first_time.now and message.is_floating_point():
            message.mul_(-1.0)
        sent(self, message, hop)

    StageMessages._add_sent = add_sent  # type: ignore[method-assign]


def spoil_gates_sum() -> None:
    """The rank receives another norm in the gate's sum, once: it clips by that, and all gather what it updates."""
    from megastable.engine.engine import Engine

    measure, first_time = Engine._measure_step, FirstTime(STEP)

    def measured(self: Engine, *given: Any) -> Any:
        right, norm = measure(self, *given)
        return (replace(right, grad_norm=8 * norm), 8 * norm) if first_time.now else (right, norm)

    Engine._measure_step = measured  # type: ignore[method-assign]


def spoil_column() -> None:
    """From the first step on, every product of the rank has zeros in its second column."""
    import torch
    from torch.utils._python_dispatch import TorchDispatchMode

    class Faulty(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            out = func(*args, **(kwargs or {}))
            if func in (torch.ops.aten.mm.default, torch.ops.aten.addmm.default) and out.shape[1] > 1:
                out[:, 1] = 0
            return out

    Faulty().__enter__()


def spoil_replays(numbers: Container[int]) -> None:
    """In its replays alone, the rank's gradient of one matrix is doubled: in these of all results that it computes
    there, counted from 1."""
    from megastable.engine import rank_checks as module
    from megastable.hardware import recomputation

    real, computed = module.digest_gradient, 0

    def digest(engine: Any, micro_batches: Any) -> Any:
        nonlocal computed
        computed += 1
        factor = 2 if computed in numbers else 1
        hook = list(engine.ds.module.parameters())[3].register_hook(lambda g: factor * g)
        try:
            return real(engine, micro_batches)
        finally:
            hook.remove()

    recomputation.digest_gradient = digest  # type: ignore[attr-defined]


# One fault, found and undone


def gradients(layout: str, fault: str, rank: int) -> tuple[Any, ...]:
    bits = {"sign": 31, "exponent": 27, "mantissa": 22}
    put = partial(flip_sum, bits[fault]) if fault in bits else partial(spoil_gradient, fault)
    verdict = "sum" if fault in bits else "transient"
    return (
        "gradients",
        layout,
        put,
        rank,
        GradientsDoubted,
        {"step": STEP, "ranks": [rank], "verdict": verdict},
        STEP,
    )


def state(layout: str, place: str) -> tuple[Any, ...]:
    rank = LAYOUTS[layout][0] - 1
    return (
        "state",
        layout,
        partial(flip_memory, place),
        rank,
        StateChanged,
        {"step": STEP - 1, "ranks": [rank]},
        STEP,
    )


FOUND = [
    gradients("dp2", "negated", 1), gradients("dp2", "zero", 1), gradients("dp2", "sign", 1),
    gradients("dp3", "scaled", 2), gradients("zero2", "stale", 1), gradients("zero2", "exponent", 1),
    gradients("zero3", "scaled", 1), gradients("zero3-dp3", "mantissa", 1), gradients("fp32", "exponent", 1),
    gradients("tp2-dp2", "sign", 2), gradients("pp2-dp2", "stale", 1), gradients("tp2", "negated", 0),
    gradients("pp2", "zero", 1), gradients("replicas3-dp6", "sign", 3), gradients("replicas3-dp6", "negated", 4),
    gradients("experts2-dp6", "sign", 3), gradients("experts2-dp6", "negated", 4),
    ("gradients", "pp2", spoil_input_gradient, 1, GradientsDoubted, {"step": STEP, "ranks": [1]}, STEP),
    ("gradients", "pp2-chunks", spoil_input_gradient, 1, GradientsDoubted, {"step": STEP, "ranks": [1]}, STEP),
    state("one", "weight"), state("dp2", "master"), state("zero2", "moment"), state("zero3", "weight"),
    state("pp2", "second"),
    ("state", "tp2", flip_before_checkpoint, 1, StateChanged, {"step": LAST, "ranks": [1]}, LAST + 1),
    ("state", "dp2", partial(flip_snapshot, False), 1, StateChanged, {"step": 20, "ranks": [1]}, 21),
    ("copies", "dp3", partial(flip_memory, "weight"), 1, ReplicasDiffer,
     {"step": STEP - 1, "proven": STEP - 2, "ranks": [1]}, STEP - 1),
    ("copies", "zero2", partial(flip_memory, "weight"), 1, ReplicasDiffer, {"step": STEP - 1, "ranks": []}, STEP - 1),
    ("copies", "dp3", partial(flip_snapshot, True), 1, ReplicasDiffer, {"step": STEP - 1, "ranks": [1]}, STEP - 1),
    ("copies", "experts2-dp6", partial(flip_memory, "weight", group=1), 3, ReplicasDiffer,
     {"step": STEP - 1, "proven": STEP - 2, "ranks": [3]}, STEP - 1),
    # A shard is compared with the other replicas' when it is read anyway, or at the interval. What the other rank of
    # the replica has gathered of it is not that rank's fault.
    ("messages", "replicas3-dp6", flip_update, 3, ReplicasDiffer,
     {"step": STEP, "proven": STEP - 1, "ranks": [3]}, STEP),
    ("copies", "replicas3-dp6", partial(flip_memory, "master"), 3, ReplicasDiffer,
     {"step": 30, "proven": 20, "ranks": [3]}, 21),
    ("copies", "replicas3-dp6", partial(flip_memory, "master", bit=30), 3, ReplicasDiffer,
     {"step": STEP, "proven": 20, "ranks": [3]}, 21),
    # An activation to the last stage; the last gradient of a step to the first one; one of the second replica.
    ("messages", "pp2", partial(flip_message, 0), 1, MessagesDiffer, {"step": STEP, "ranks": [1]}, STEP),
    ("messages", "pp2", partial(flip_message, 5), 0, MessagesDiffer, {"step": STEP, "ranks": [0]}, STEP),
    ("messages", "pp2-zero-bubble", partial(flip_message, 5), 0, MessagesDiffer, {"step": STEP, "ranks": [0]}, STEP),
    ("messages", "pp2-chunks", partial(flip_chunk_message, 2), 0, MessagesDiffer, {"step": STEP, "ranks": [0]}, STEP),
    ("messages", "pp2-dp2", partial(flip_message, 2), 1, MessagesDiffer, {"step": STEP, "ranks": [1]}, STEP),
    ("messages", "dp3", spoil_gates_sum, 1, ReplicasDiffer, {"step": STEP, "ranks": [1]}, STEP),
    ("messages", "dp2", spoil_gates_sum, 1, ReplicasDiffer, {"step": STEP, "ranks": []}, STEP),
]  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize(("watch", "layout", "fault", "rank", "kind", "fields", "onset"), FOUND)
def test_watch_finds_a_fault_and_the_run_ends_with_the_bytes_of_a_clean_one(
    watch: str, layout: str, fault: Any, rank: int, kind: type[Event], fields: dict[str, Any], onset: int, corpus: Path,
    tmp_path: Path,
) -> None:  # fmt: skip
    wanted = clean(corpus, tmp_path, layout, watch)
    run = run_with(recipe(corpus, tmp_path / "run", layout, watch), layout, fault, rank)
    (event,) = run.iterate_events(kind)
    assert {key: event[key] for key in fields} == fields
    (first, *_) = run.iterate_events(IncidentEvent)
    assert first["onset"] == onset
    assert bytes_of(run) == wanted
    rejected = [e["step"] for e in run.iterate_events(SnapshotRejected)]
    assert rejected == ([20] if getattr(fault, "func", None) is flip_snapshot else [])


@pytest.mark.slow
@pytest.mark.parametrize(
    "layout",
    [
        "dp2",
        "zero2",
        "zero3-dp3",
        "fp32",
        "pp2",
        "pp2-zero-bubble",
        "pp2-chunks",
        "tp2-dp2",
        "context2",
        "replicas3-dp6",
        "experts2-dp6",
        "experts2-zero2",
    ],
)
def test_watches_change_no_byte_and_blame_no_sound_rank(layout: str, corpus: Path, tmp_path: Path) -> None:
    """Also where DeepSpeed's own sums are replaced by measured ones."""
    run = run_with(recipe(corpus, tmp_path / "off", layout, "none"), layout, None)
    for watch in ("messages", "replays"):
        assert clean(corpus, tmp_path / watch, layout, watch) == bytes_of(run)


def flips(*steps: int) -> Callable[[], None]:
    return partial(flip_memory, "weight", steps)


# Faults of which a first look blames the wrong rank, or that are not one fault


def test_one_fault_counts_once(corpus: Path, tmp_path: Path) -> None:
    run = run_with(recipe(corpus, tmp_path / "run", "dp2", "messages", 18), "dp2", flips(7, 13), 1)
    assert [e["ranks"] for e in run.iterate_events(StateChanged)] == [[1], [1]]
    assert not list(run.iterate_events(WrongCopy, HostFaulty))


@pytest.mark.slow
def test_majority_of_wrong_copies_does_not_leave_out_the_right_one(corpus: Path, tmp_path: Path) -> None:
    """As after a wrong first hop of a ring."""
    run = run_with(recipe(corpus, tmp_path / "run", "dp3", "copies", 22), "dp3", flips(7, 12, 17), 1, 2)
    assert [e["ranks"] for e in run.iterate_events(ReplicasDiffer)] == [[0]] * 3
    assert [e["ranks"] for e in run.iterate_events(WrongCopy)] == [[1, 2]] * 3
    assert not list(run.iterate_events(HostFaulty))


@pytest.mark.slow
@pytest.mark.parametrize(("layout", "rank", "first"), [("replicas2", 1, []), ("replicas3-dp6", 3, [3])])
def test_of_different_shards_the_step_done_again_shows_the_wrong_one(
    layout: str, rank: int, first: list[int], corpus: Path, tmp_path: Path
) -> None:
    config, fault = (
        recipe(corpus, tmp_path / "run", layout, "copies", 22),
        partial(flip_memory, "master", (17,)),
    )
    run = run_with(config, layout, fault, rank)
    assert [(e["step"], e["ranks"]) for e in run.iterate_events(ReplicasDiffer)] == [(20, first)]
    assert [(e["step"], e["ranks"]) for e in run.iterate_events(WrongCopy)] == [(20, [rank])]


@pytest.mark.slow
def test_receiver_of_wrong_messages_is_not_left_out(corpus: Path, tmp_path: Path) -> None:
    fault = partial(spoil_messages, (7, 10, 13))
    run = run_with(recipe(corpus, tmp_path / "run", "pp2", "messages", 16), "pp2", fault, 0)
    assert [e["ranks"] for e in run.iterate_events(MessagesDiffer)] == [[1]] * 3
    assert not list(run.iterate_events(HostFaulty))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("layout", "first", "rank"),
    [("dp2", 1, 1), ("dp3", 2, 1), ("one", 2, 0), ("zero2", 1, 1), ("tp2-dp2", 1, 1)],
)
def test_replay_that_differs_by_chance_leaves_the_state_alone(
    layout: str, first: int, rank: int, corpus: Path, tmp_path: Path
) -> None:
    """first: of its results in the second check, after two in the first one: its own samples, or another rank's."""
    fault = partial(spoil_replays, (2 + first,))
    run = run_with(recipe(corpus, tmp_path / "run", layout, "replays"), layout, fault, rank)
    (event,) = run.iterate_events(ReplayDiffers)
    named = [0, 1] if layout == "tp2-dp2" else [rank]  # who of a replica was wrong is not known
    assert (event["step"], event["verdict"], event["ranks"]) == (2 * EVERY, "transient", named)
    assert not list(run.iterate_events(IncidentEvent))
    assert bytes_of(run) == clean(corpus, tmp_path, layout, "replays")


# Faults that last: by name, the watch, the layout, what is put into rank 1, the event, and the ranks that it names.
LASTING: dict[str, tuple[str, str, Any, type[Event], list[int]]] = {
    "gradient": ("gradients", "dp3", partial(spoil_gradient, "scaled", True), GradientsDoubted, [1]),
    "replays": ("replays", "dp3", partial(spoil_replays, range(3, 999)), ReplayDiffers, [1]),
    "replays of two": ("replays", "dp2", partial(spoil_replays, range(3, 999)), ReplayDiffers, []),
    "replays by chance": ("replays", "dp2", partial(spoil_replays, (1, 7, 15)), ReplayDiffers, [1]),
    "column": ("replays", "dp2", spoil_column, ReplayDiffers, [1]),
    "column of zero3": ("replays", "zero3", spoil_column, ReplayDiffers, [1]),
    "memory": ("messages", "dp2", partial(flip_memory, "weight", (7, 11, 15)), StateChanged, [1]),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", LASTING)
def test_rank_with_a_lasting_fault_must_leave_if_it_is_known(name: str, corpus: Path, tmp_path: Path) -> None:
    """With a third result it is known whose is wrong; of two it is one, and which is not known."""
    watch, layout, fault, kind, ranks = LASTING[name]
    config = recipe(corpus, tmp_path / "run", layout, watch)
    with pytest.raises(AssertionError, match=r"HandoverError|UnstableError"):
        run_ranks(LAYOUTS[layout][0], train, config, fault, (1,))
    run = RunDirectory(tmp_path / "run")
    events = list(run.iterate_events(kind))
    assert all(event["ranks"] == ranks for event in events)
    assert name == "memory" or events[-1]["verdict"] == "persistent"
    assert [(e["ranks"], e["hosts"]) for e in run.iterate_events(HostFaulty)] == (
        [([1], ["host1"])] if ranks else []
    )


@pytest.mark.slow
def test_link_that_is_always_wrong_does_not_repeat_a_step_for_ever(corpus: Path, tmp_path: Path) -> None:
    """Without snapshots nothing else would bound it."""
    config = recipe(corpus, tmp_path / "run", "pp2", "messages", 16, every=0)
    with pytest.raises(AssertionError, match=r"HandoverError|UnstableError"):
        run_ranks(2, train, config, partial(spoil_messages, ()), (0,))
    run = RunDirectory(tmp_path / "run")
    assert len(list(run.iterate_events(MessagesDiffer))) == 3
    assert next(run.iterate_events(IncidentEvent))["verdict"] == "corrupted"


@pytest.mark.slow
def test_gradient_that_one_of_two_always_gets_wrong_calls_a_person(corpus: Path, tmp_path: Path) -> None:
    """Which one is not known, and the state is good: the step is refused again and again, and the run goes on."""
    fault = partial(spoil_gradient, "scaled", True)
    run = run_with(recipe(corpus, tmp_path / "run", "dp2", "gradients"), "dp2", fault, 1)
    assert [event["what"] for event in run.iterate_events(AlertEvent)][:1] == ["begun"]
    assert {(e["verdict"], tuple(e["ranks"])) for e in run.iterate_events(GradientsDoubted)} == {
        ("persistent", ())
    }


@pytest.mark.slow
def test_odd_data_of_one_rank_is_not_blamed_on_hardware(tmp_path: Path) -> None:
    """All its samples in a step are one token, over and over: doubted, cleared, and the guard does what it does."""
    write_corpus(corpus := tmp_path / "corpus", tokens=120_000)
    config = recipe(corpus, tmp_path / "run", "dp2", "gradients")
    source = open_corpora(config.data.corpora, 32, config.run.seed).train
    batch = np.arange((STEP - 1) * 96, STEP * 96).reshape(-1, 2, 16)[:, 1].ravel()
    tokens = np.memmap(corpus / "part-0.bin", dtype=np.uint16, mode="r+")
    for number, first in enumerate(source.order.locate_samples(batch).first_token.tolist()):
        tokens[first : first + 33] = 1 + number % 249
    tokens.flush()
    run = run_with(config, "dp2", None)
    events = [
        (event["step"], event["verdict"], event["ranks"]) for event in run.iterate_events(GradientsDoubted)
    ]
    assert events == [(STEP, "data", [])]
    assert not any(event["summary"]["cause"] == "hardware" for event in run.iterate_events(IncidentEvent))
