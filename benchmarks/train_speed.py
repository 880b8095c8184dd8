"""Measure training speed of ours and of others side by side: tokens per second, MFU, memory, and the ratios.

    speed = measure(config, ["megastable", "bare", "transformers"], rounds=9)    # in a process group of one; CPU or GPU

All train the same model on the same random tokens with the same micro-batches (`peers`). Every round measures each
once, in random order, after a separately counted warm-up, which includes compilation (a contestant that shares
code with an earlier one, as bare does with ours, finds it compiled). If they do not fit into memory together, each is
built, measured and released in turn, in several passes ("apart").

Memory of each: held between two steps, and the peak of a step on top. On a GPU both are those of
torch's allocator. A CPU's resident bytes are shared by all, so there they are the bytes of all living tensors, and
the sum of a step's allocations by torch.profiler: without scratch space of oneDNN.
"""

from __future__ import annotations

import gc
import math
import random
import signal
import time
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import accumulate
from typing import Any

import psutil
import torch
from torch import Tensor

from benchmarks.common import describe_machine, describe_run
from benchmarks.peers import OURS, PEERS, Contestant, Task, Unavailable
from benchmarks.speed import Entry, Memory, Peak, Speed, Work, assess_speed
from megastable.base.errors import ConfigError
from megastable.base.hardware import measured_tflops, nominal_tflops
from megastable.config import deepspeed_json
from megastable.config.model import ModelConfig
from megastable.config.tree import RunConfig
from megastable.data.loader import MicroBatch
from megastable.engine import distributed
from megastable.model.sizes import count_parameters, flops_per_token

SMALL, LARGE = 4_096, 32_000  # vocabularies, if the recipe leaves it to the tokenizer
SMALL_HIDDEN = 512  # maximum width of a small model
MICRO_BATCHES = 4  # maximum per step
SETTLING = 2  # steps after the first one, before anything is measured
PASSES = 3  # over all contestants, when they are apart
LEAST_SECONDS, MOST_STEPS = 0.3, 16  # minimum duration and maximum steps of one measurement
LEAST_ROUNDS = 2  # even if the time is over
STEP_BLOCKS = 4  # of a model that does not fit
ROOM = 0.8  # usable share of the device's memory
SETTLED = 0.3  # seconds
MEASURED = "a run whose memory counts"
NO_TIME = "it was not warm in the time that there was: more --seconds, or fewer --peers"

Say = Callable[[str], None]


def resolve_config(
    config: RunConfig, micro_batches: int = MICRO_BATCHES, room: float = math.inf
) -> tuple[RunConfig, list[str]]:
    """The config to measure on one device, and notes on its changes. room: bytes for ours; a larger model gets fewer
    blocks. Raises ConfigError for settings that cannot be compared here."""
    if config.precision.kind == "fp16":
        raise ConfigError(
            "precision.kind=fp16: the others are trained without a loss scale; use bf16 or fp32"
        )
    notes, config_tree = [], config.model_dump()
    alone_values = {
        "tensor": 1, "sequence": False, "tensor_overlap": 1, "pipeline": 1, "schedule": "1f1b", "model_chunks": 1,
        "context": 1, "replicas": 1,
    }  # fmt: skip
    for axis, alone in alone_values.items():
        if (wanted := config_tree["parallel"][axis]) != alone:
            config_tree["parallel"][axis] = alone
            notes.append(
                f"parallel.{axis}={str(alone).lower()} in place of {str(wanted).lower()}: one device"
            )
    for warmup in ("batch_warmup", "sequence_warmup"):
        if config_tree["train"][warmup] is not None:
            config_tree["train"][warmup] = None
            notes.append(f"train.{warmup}=null: what is measured is the steady state")
    if config.model.vocab_size is None:
        vocab_size = SMALL if config.model.hidden <= SMALL_HIDDEN else LARGE
        config_tree["model"]["vocab_size"] = vocab_size
        notes.append(f"model.vocab_size={vocab_size:,}: the recipe leaves it to the tokenizer")
    most = micro_batches * config.train.micro_batch
    if config.train.global_batch > most:
        config_tree["train"]["global_batch"] = most
        notes.append(
            f"train.global_batch={most} in place of {config.train.global_batch}: a step of at most {micro_batches} "
            "micro-batches, so that an update weighs more here than in the run"
        )
    if config.kernels.compile == "auto":
        config_tree["kernels"]["compile"] = True
        notes.append('kernels.compile: true in place of "auto": what is measured is the steady state')
    if config.optimizer.moments == "bf16":
        notes.append("optimizer.moments=bf16 of ours; the others' moments are of the type of their weights")
    if config.parallel.recompute != "none":
        notes.append(
            f"parallel.recompute={config.parallel.recompute} of ours and bare: the others recompute nothing"
        )
    if config.data.keep_documents_apart:
        config_tree["data"]["keep_documents_apart"] = False
        notes.append("data.keep_documents_apart=false: the others do not keep them apart")
    resolved_config = RunConfig.model_validate(config_tree)
    deepspeed_json.build_deepspeed_json(resolved_config, 1)
    block_count, own_blocks = count_blocks(resolved_config, room), resolved_config.model.layers
    if block_count < own_blocks:
        config_tree["model"]["layers"] = block_count
        notes.append(
            f"model.layers={block_count} in place of {own_blocks}: as many as this device's memory has room for, which "
            "have the speed of all, but for head and loss, that weigh more"
        )
    return RunConfig.model_validate(config_tree), notes


def count_blocks(config: RunConfig, room: float) -> int:
    """How many blocks of the model fit into `room` bytes with ours: all, or the largest multiple of `STEP_BLOCKS`, at
    least one such step, so that cards that are nearly alike measure the same model."""
    m, width = config.model, 4 if config.precision.kind == "fp32" else 2

    def needs(blocks: int) -> float:
        cut_model = m.model_copy(update={"layers": blocks})
        return memory_needed(cut_model, config.train.micro_batch, [OURS], width)

    if needs(m.layers) <= room:
        return m.layers
    fitting = [blocks for blocks in range(STEP_BLOCKS, m.layers, STEP_BLOCKS) if needs(blocks) <= room]
    return max(fitting, default=min(STEP_BLOCKS, m.layers))


def random_batches(config: RunConfig, device: torch.device) -> list[MicroBatch]:
    """The micro-batches of one step, in memory as from a loader."""
    c, generator = config, torch.Generator().manual_seed(config.run.seed)
    assert c.model.vocab_size is not None
    drawn_batches = []
    for number in range(deepspeed_json.count_micro_batches(c, 1)):
        b = c.train.micro_batch
        drawn = torch.randint(c.model.vocab_size, (b, c.model.sequence_length + 1), generator=generator)
        tokens, labels = drawn[:, :-1].contiguous(), drawn[:, 1:].contiguous()
        if device.type == "cuda":
            tokens, labels = tokens.pin_memory(), labels.pin_memory()
        drawn_batches.append(MicroBatch(tokens, labels, torch.arange(number * b, (number + 1) * b), None))
    return drawn_batches


def memory_needed(c: ModelConfig, micro_batch: int, names: Sequence[str], width: int = 2) -> float:
    """Estimated bytes of all contestants together: what each holds, and the largest step.

    width: bytes of an activation. A block without recomputation keeps about 34 bytes of 16-bit activations per token
    and hidden unit (Korthikanti et al., arXiv:2205.05198, section 4, without the scores); logits exist three times.
    """
    bytes_held = count_parameters(c) * (sum(PEERS[name].holds for name in names) + width)
    tokens = micro_batch * c.sequence_length
    return bytes_held + tokens * (17 * width * c.hidden * c.layers + (8 + width) * c.padded_vocab)


def steps_needed(names: Sequence[str], rounds: int) -> int:
    """Number of calls of `advance` by `measure_speed`, if all can run."""
    return len(names) * (rounds + 1)


def measure_speed(
    config: RunConfig,
    names: Sequence[str],
    rounds: int,
    apart: bool | None = None,
    advance: Callable[[], None] = lambda: None,
    say: Say = lambda _: None,
    seconds: float | None = None,
    partly: Callable[[Speed], None] | None = None,
) -> Speed:
    """Speeds of `names` (of `peers.PEERS`, ours among them) on this config's model, batch and precision.

    The process group, of one rank, already exists. apart: None = if memory requires it. advance: called for every
    warm-up and measurement. seconds: approximate total time; a
    peer that is not warm in time gets a row without numbers (from the main thread only). partly: called with the
    results so far, after every warm-up and measurement. A peer that cannot run also gets a row. Raises ConfigError if
    none can.
    """
    end = None if seconds is None else time.monotonic() + seconds
    device = distributed.choose_device()
    config, notes = resolve_config(config, room=ROOM * _memory(device))
    task = Task(config, device, random_batches(config, device))
    if apart is None:
        needed = memory_needed(config.model, config.train.micro_batch, names, task.dtype.itemsize)
        apart = len(names) > 1 and needed > ROOM * _memory(task.device)
        if apart:
            notes.append(f"measured apart: together they take about {needed / 2**30:,.0f} GiB")
    about = describe_machine(task.device), describe_run(config)
    if about[0]["load_average"] > about[0]["cores"] / 2:
        notes.append(
            f"the machine was busy before this began (load {about[0]['load_average']} on {about[0]['cores']} cores): "
            "on a CPU such numbers are unreliable"
        )
    size = 8192 if task.device.type == "cuda" else 1024
    tflops = [measured_tflops(task.device, task.dtype, size, 1.0)]
    known = None
    if task.device.type == "cuda":
        known = nominal_tflops(torch.cuda.get_device_name(task.device), task.dtype)
    c, tokens = config.model, config.train.global_batch * config.model.sequence_length
    work = Work(tokens, tokens * flops_per_token(c, False), tokens * flops_per_token(c, True))
    about[1]["apart"] = apart

    def found(*more: str) -> Speed:
        about[1]["steps_in_a_measurement"] = bench.steps
        device_peak = Peak(max(tflops), known)
        notes_told = [*notes, *more]
        # In an unfinished round some have a sample more.
        rounds_done = min((len(of) for of in bench.samples.values() if of), default=0)
        samples_by_name = {name: of[:rounds_done] for name, of in bench.samples.items()}
        return assess_speed(
            names, samples_by_name, bench.entries, bench.problems, work, device_peak, about, notes_told
        )

    def advanced() -> None:
        advance()
        if partly is not None:
            partly(found("not finished: the time of it was over, or it was ended"))

    bench = Bench(task, names, advanced, say, end)
    if apart:
        bench.measure_apart(rounds)
    else:
        bench.measure_together(rounds)
    tflops.append(measured_tflops(task.device, task.dtype, size, 1.0))
    if (done := len(bench.samples[OURS])) < rounds:
        return found(f"{done} rounds in place of {rounds}: the time was over")
    return found()


def _memory(device: torch.device) -> float:
    """Bytes of the device's memory."""
    if device.type == "cuda":
        return float(torch.cuda.get_device_properties(device).total_memory)
    return float(psutil.virtual_memory().available)


class Bench:
    """Contestants on one task, and their results. samples: seconds per step, paired by index."""

    def __init__(
        self,
        task: Task,
        names: Sequence[str],
        advance: Callable[[], None],
        say: Say,
        end: float | None = None,
    ) -> None:
        """end: deadline by time.monotonic."""
        self.task, self.names, self.advance, self.say = task, list(names), advance, say
        self.end = end
        self.round_seconds = 0.0  # of one contestant's part in a round
        if any(PEERS[name].given for name in names):
            assert task.weights  # created here, so that they count as no contestant's memory
        self.device = task.device
        self.entries: dict[str, Entry] = {}
        self.problems: dict[str, str] = {}
        self.samples: dict[str, list[float]] = defaultdict(list)
        self.steps = 1  # in a measurement
        self.order = random.Random(0)

    def measure_together(self, rounds: int) -> None:
        """All of them exist at once: every round measures each."""
        living: dict[str, Contestant] = {}
        try:
            for name in self.names:
                if (built_contestant := self._begin(name, (len(living) + 1) * rounds)) is not None:
                    living[name] = built_contestant
            for round_number in range(rounds):
                if round_number >= LEAST_ROUNDS and self._left() < 0:
                    break
                self.say(f"round {round_number + 1} of {rounds}")
                with _no_garbage():
                    for name in self.order.sample(list(living), len(living)):
                        self._sample(name, living[name])
        finally:
            self._end(living)

    def measure_apart(self, rounds: int) -> None:
        """One exists at a time; in every pass each measures its part of the rounds, alternately forwards and backwards,
        so that slow changes (heat, other jobs) affect all alike."""
        pass_count = min(PASSES, rounds)
        for pass_number in range(pass_count):
            rounds_share = rounds * (pass_number + 1) // pass_count - rounds * pass_number // pass_count
            for name in self.names if pass_number % 2 == 0 else self.names[::-1]:
                if name in self.problems:
                    continue
                built_contestant = self._begin(name, rounds_share)
                if built_contestant is None:
                    continue
                living_contestants = {name: built_contestant}
                del built_contestant
                try:
                    with _no_garbage():
                        self.say(f"{name}, pass {pass_number + 1} of {pass_count}")
                        for _ in range(rounds_share):
                            self._sample(name, living_contestants[name])
                finally:
                    self._end(living_contestants)

    def _left(self) -> float:
        """Seconds until the deadline."""
        return math.inf if self.end is None else self.end - time.monotonic()

    def _begin(self, name: str, turns: int) -> Contestant | None:
        """Build and warm up; None, with the reason noted, if that fails or leaves no time for `turns` turns."""
        self.say(f"{name}: warming up")
        bytes_before = self._held()
        built: Contestant | None = None
        alarm = Alarm()
        try:
            begin_time = time.perf_counter()
            seconds_patience = math.inf if name == OURS else self._left() - turns * self.round_seconds
            with warnings.catch_warnings(), alarm.after(seconds_patience):
                warnings.simplefilter("ignore")
                built = PEERS[name].build_contestant(self.task)
                at_build = time.perf_counter() - begin_time
                built.prepare()
                begin_time = time.perf_counter()
                loss = float(built.step())
                self._wait()
                first = time.perf_counter() - begin_time
                begin_time = time.perf_counter()
                for _ in range(SETTLING):
                    built.step()
                self._wait()
            if not self.entries:  # of ours: the same number for all
                last_seconds = (time.perf_counter() - begin_time) / SETTLING
                self.steps = max(1, min(MOST_STEPS, math.ceil(LEAST_SECONDS / last_seconds)))
                self.round_seconds = self.steps * last_seconds
            if name not in self.entries:
                self.advance()
                memory = self._memory_of(built, bytes_before)
                self.entries[name] = Entry(built.backends, at_build, first, loss, memory, built.same_weights)
            return built
        except Exception as error:
            self._failed(name, Unavailable(NO_TIME) if alarm.rang else error)
        built = None
        self.samples.pop(name, None)
        self._clean()
        return None

    def _failed(self, name: str, error: Exception) -> None:
        """Others continue without it; without ours there is nothing to compare."""
        if isinstance(error, Unavailable | ConfigError):
            problem_text = str(error)
        elif isinstance(error, torch.OutOfMemoryError):
            problem_text = "out of memory: a smaller train.micro_batch, or parallel.recompute"
        else:
            first_line = (str(error).strip() or "no message").splitlines()[0]
            problem_text = f"failed: {type(error).__name__}: {first_line[:300]}"
        if name == OURS:
            if isinstance(error, torch.OutOfMemoryError):
                raise ConfigError(f"{OURS}: {problem_text}") from error
            raise error
        self.problems[name] = problem_text

    def _sample(self, name: str, contestant: Contestant) -> None:
        if name in self.problems:
            return
        try:
            contestant.prepare()
            self._wait()
            begin_time = time.perf_counter()
            for _ in range(self.steps):
                contestant.step()
            self._wait()
            self.samples[name].append((time.perf_counter() - begin_time) / self.steps)
        except Exception as error:
            self._failed(name, error)
            self.samples.pop(name, None)
        self.advance()

    def _wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def _end(self, living: dict[str, Contestant]) -> None:
        for contestant in living.values():
            contestant.close()
        living.clear()
        torch._dynamo.reset()  # compiled code keeps the modules alive
        self._clean()

    def _clean(self) -> None:
        gc.collect()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    # Memory

    def _held(self) -> int:
        """Bytes in tensors now: by torch's allocator, or over all tensors found."""
        gc.collect()
        if self.device.type == "cuda":
            self._wait()
            return torch.cuda.memory_allocated(self.device)
        return living_bytes()

    def _memory_of(self, contestant: Contestant, before: int) -> Memory:
        """before: bytes held before it was built."""
        bytes_held = self._held()
        contestant.prepare()
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self.device)
            contestant.step()
            self._wait()
            step_peak = torch.cuda.max_memory_allocated(self.device) - bytes_held
        else:
            step_peak = peak_of(contestant.step)
        own_bytes = bytes_held - before
        return Memory(own_bytes / 2**30, step_peak / 2**30, (own_bytes + step_peak) / 2**30)


class Alarm:
    """Interrupts the main thread, for example during compilation, after some seconds."""

    rang = False  # the exception may arrive as another type

    @contextmanager
    def after(self, seconds: float) -> Iterator[None]:
        if not math.isfinite(seconds):
            yield
            return

        def ring(*_: Any) -> None:
            self.rang = True
            raise TimeoutError

        old_handler = signal.signal(signal.SIGALRM, ring)
        try:
            # Repeated: an exception inside a destructor is lost.
            signal.setitimer(signal.ITIMER_REAL, max(seconds, 0.001), 5.0)
            yield
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
            signal.signal(signal.SIGALRM, old_handler)


@contextmanager
def _no_garbage() -> Iterator[None]:
    """Keep the garbage collector out of timed code."""
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def living_bytes() -> int:
    """Bytes of the storages of all tensors known to Python, and of their gradients; each storage once."""
    bytes_by_storage: dict[int, int] = {}

    def count(tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        bytes_by_storage[storage.data_ptr()] = storage.nbytes()

    for thing in gc.get_objects():
        if not issubclass(type(thing), Tensor) or thing.device.type != "cpu" or thing.layout != torch.strided:
            continue
        if type(thing) not in (Tensor, torch.nn.Parameter):
            continue  # fake tensors of tracing hold no memory
        count(thing)
        if thing.is_leaf and thing.grad is not None:
            count(thing.grad)
    return sum(bytes_by_storage.values())


def peak_of(step: Callable[[], Any], again: int = 0) -> int:
    """Peak of bytes allocated by `step` on the CPU, on top of what existed before.

    again: repeat it this many times, and take the minimum. torch.profiler does not see earlier memory,
    which a pipeline frees in its first step; and gloo's threads free sent buffers with a delay.
    """
    activities = [torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=activities, profile_memory=True) as profile:
        for _ in range(1 + again):
            with torch.profiler.record_function(MEASURED):
                step()
        # gloo's threads free what they have sent a little later. One that does while the profiler of torch 2.13 ends
        # takes the process down.
        time.sleep(SETTLED)
    assert profile.profiler is not None and profile.profiler.kineto_results is not None
    start_times: list[int] = []
    size_changes: list[tuple[int, int]] = []
    for profiler_event in profile.profiler.kineto_results.events():
        event_name = profiler_event.name()
        if event_name == "[memory]":
            size_changes.append((profiler_event.start_ns(), profiler_event.nbytes()))
        elif event_name == MEASURED:
            start_times.append(profiler_event.start_ns())
    start_times.sort()
    size_changes.sort()
    peak_bytes = []
    for begin_time, end_time in zip(start_times, [*start_times[1:], math.inf], strict=True):
        bytes_before = sum(size for change_time, size in size_changes if change_time < begin_time)
        sizes_inside = (size for change_time, size in size_changes if begin_time <= change_time < end_time)
        peak_bytes.append(max(accumulate(sizes_inside, initial=bytes_before)) - bytes_before)
    return min(peak_bytes[min(again, 1) :])
