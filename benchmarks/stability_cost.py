"""Measure the cost of the stability system as a share of a training step, with and without it in turns.

    measurement = measure(config, rounds=30)    # in a process group of one; CPU or GPU

Every round does the same batch once in every kind of step, in random order, and differences within a round are
compared, so that the machine's other load affects all alike ("paired"). The gate's cost is mostly below
the noise of that, so steps with stopwatches measure it as well ("direct"). On a GPU these wait for the device
around everything that they time, and overestimate the loss.

The data are random tokens: neither a corpus nor a run is needed. The learning rate is nearly zero, so that the
steps, and the detector's input, do not change. Not counted: the gradient norm by which DeepSpeed clips,
which the gate requests and hands back, so that it is computed once either way.
"""

from __future__ import annotations

import gc
import io
import random
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.common import describe_machine, describe_run, is_finite, write_random_corpus
from benchmarks.costs import Costs, assess_costs
from megastable.checkpoint.store import LayoutState, RunState
from megastable.config import deepspeed_json
from megastable.config.tree import CorpusConfig, RunConfig
from megastable.data.corpora import Corpora, open_corpora
from megastable.data.loader import Loader, RankPart, Step
from megastable.data.run_ledgers import Skipping
from megastable.data.skips import Skips
from megastable.engine import distributed, patches
from megastable.engine.engine import Engine
from megastable.engine.layer_stats import LayerStatistics
from megastable.engine.measured import Measured
from megastable.engine.watch import Ballot
from megastable.parallel.layout import Layout
from megastable.parallel.topology import Topology
from megastable.recovery.recovery import Recovery
from megastable.recovery.run_parts import RunParts, StepResult
from megastable.recovery.watches import EVERY, ProbeWatch
from megastable.run import directory
from megastable.run.directory import RunDirectory
from megastable.run.log import RunLog
from megastable.training.recorder import Observer
from megastable_guard.actions import Action, Signals

KINDS = (
    "bare",
    "gate",
    "guard",
    "hardware",
    "snapshot",
    "layers",
    "timed gate",
    "timed guard",
    "timed hardware",
    "timed layers",
    "timed trends",
)
VOCABULARY = 4096  # if the recipe leaves it to the tokenizer
SAMPLES = 64  # in the corpus of random tokens
BATCHES = 4  # used in turns
RATE = 1e-9


@dataclass(frozen=True)
class Measurement:
    """machine: hardware and software. run: the trained model. disturbed: steps that the guard did not simply pass."""

    machine: dict[str, Any]
    run: dict[str, Any]
    rounds: int
    disturbed: int
    costs: Costs


class Stopwatch:
    """Seconds by name, added up. On a GPU it waits for `device` before and after."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.seconds: dict[str, float] = defaultdict(float)

    def synchronise(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    @contextmanager
    def time(self, name: str) -> Iterator[None]:
        self.synchronise()
        begin_time = time.perf_counter()
        yield
        self.synchronise()
        self.seconds[name] += time.perf_counter() - begin_time

    def timed(self, name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        """`call`, and its time is added to `name`."""

        def wrapped(*args: Any, **kwargs: Any) -> Any:
            with self.time(name):
                return call(*args, **kwargs)

        return wrapped


def steps_needed(rounds: int) -> int:
    """Number of calls of `advance` by `measure_costs`."""
    return (rounds + 1) * len(KINDS)


def measure_costs(
    config: RunConfig,
    rounds: int,
    advance: Callable[[], None] = lambda: None,
    say: Callable[[str], None] = lambda _: None,
) -> Measurement:
    """Costs on this config's model, batch and precision. The process group, of one rank, already exists.

    Raises ConfigError for a layout that needs more ranks.
    """
    deepspeed_json.build_deepspeed_json(config, 1)
    with tempfile.TemporaryDirectory(prefix="megastable-bench-") as folder:
        vocab_size = config.model.vocab_size or VOCABULARY
        write_random_corpus(Path(folder) / "corpus", vocab_size, (config.model.sequence_length + 1) * SAMPLES)
        config_tree = config.model_dump()
        config_tree["model"]["vocab_size"] = vocab_size
        config_tree["data"] |= {"corpora": [CorpusConfig(path=Path(folder) / "corpus")], "skip": []}
        config_tree["logging"]["trackers"] = []  # optional: not part of the system
        config_tree["run"]["dir"] = Path(folder) / "run"
        config = RunConfig.model_validate(config_tree)
        corpora = open_corpora(config.data.corpora, config.model.sequence_length, config.run.seed)
        run_directory = directory.make_directory(config, Path("bench"))
        with _loader(config, corpora) as loader:
            return Bench(config, corpora, run_directory, loader, say).measure(rounds, advance)


def _loader(config: RunConfig, corpora: Corpora) -> Loader:
    return Loader(
        corpora.train, Skips.from_ranges([]), 0, config.batches, RankPart(config.train.micro_batch), config.data,
        pin_memory=distributed.choose_device().type == "cuda", pieces=config.pieces,
    )  # fmt: skip


class Bench:
    """An engine with its stability system, and a method for each kind of step."""

    def __init__(
        self,
        config: RunConfig,
        corpora: Corpora,
        run: RunDirectory,
        loader: Loader,
        say: Callable[[str], None],
    ) -> None:
        c, layout = config, Layout(1, 1, 1)
        self.config, self.loader = config, loader
        random.seed(c.run.seed)
        torch.manual_seed(c.run.seed)
        self.engine = Engine(c, deepspeed_json.build_deepspeed_json(c, 1), Topology(layout, 0, c.run.timeout))
        held = LayoutState(**vars(layout), zero=c.parallel.zero, precision=c.precision.kind)
        self.state = RunState(order_fingerprint=corpora.order_fingerprint, layout=held)
        with redirect_stdout(io.StringIO()):  # no progress line of a training run
            self.observer = Observer(c, run, layout, self.engine.device, peak=1.0, done=self.state)
        self.observer.live.console.quiet = True
        self.observer.steps.flush_steps = sys.maxsize  # written here, under the stopwatch
        self.batches = [next(loader) for _ in range(BATCHES)]
        for batch in self.batches:  # Adam's moments are there, as in the middle of a run
            self.latest, _ = self.engine.train_step(batch.micro_batches, RATE, is_finite)
        parts = RunParts(c, self.engine, loader, run, Skipping(c, run), RunLog(run, say), lambda _: None)
        self.recovery = Recovery(parts, self.state)
        self.probe = ProbeWatch(self.engine, loader, self.batches[0].micro_batches, self.recovery.log)
        self.hardware = self.recovery.hardware
        self.memory = self.hardware.state
        self.disturbed = 0
        self.order = random.Random(0)

    def measure(self, rounds: int, advance: Callable[[], None]) -> Measurement:
        """Warm up, then run `rounds` rounds of every kind of step."""
        self._settle_in()
        samples: dict[str, list[float]] = defaultdict(list)
        began = describe_machine(self.engine.device)
        for number in range(rounds + 1):
            round_seconds = self._round(self.batches[number % BATCHES], advance)
            for name, seconds in round_seconds.items() if number else ():  # the first round is a warm-up
                samples[name].append(seconds)
        c = self.config
        steps_between = {
            "snapshot": c.stability.snapshots.interval if self.recovery.points.ring.steps else 0,
            "norms": c.logging.norms_interval,
            "layers": c.logging.layers_interval,
            "trends": c.stability.trends.interval if self.recovery.watches.trends.config.enabled else 0,
            "tensors": EVERY,
            "probe": EVERY,
            "records": c.logging.flush_steps,
        }
        return Measurement(
            began, self._run(), rounds, self.disturbed, assess_costs(samples, KINDS, steps_between)
        )

    def _run(self) -> dict[str, Any]:
        optimizer, points = type(self.engine.optimizer).__name__, self.recovery.points
        return {**describe_run(self.config), "optimizer": optimizer, "snapshots": len(points.ring.steps)}

    def _settle_in(self) -> None:
        """As in the middle of a run: the detector's windows are full, the ring of snapshots too."""
        measured = self.latest
        # Snapshots are taken here, under the stopwatch.
        self.recovery.points.ring.is_due = lambda step, urgent=False: False  # type: ignore[method-assign]
        random_draws = np.random.default_rng(0)
        for _ in range(2 * self.config.stability.detector.window):
            self.state.step += 1
            loss = measured.loss + 0.01 * random_draws.standard_normal()
            grad_norm = measured.grad_norm * np.exp(0.1 * random_draws.standard_normal())
            self.recovery.guard.judge_step(Signals(self.state.step, loss, grad_norm, RATE), None)
        for _ in range(self.config.stability.snapshots.keep + 1):
            self.state.step += 1
            self._snapshot()

    def _round(self, batch: Step, advance: Callable[[], None]) -> dict[str, float]:
        """Seconds of every kind of step, and by stopwatch."""
        watch = Stopwatch(self.engine.device)
        ways: dict[str, Callable[[], None]] = {
            "bare": lambda: self._bare(batch),
            "gate": lambda: self._gate(batch),
            "guard": lambda: self._guard(batch),
            "hardware": lambda: self._guard(batch, self.recovery.watches.collect_ballot),
            "snapshot": lambda: self._with_snapshot(batch, watch),
            "layers": lambda: self._with_layers(batch),
            "timed gate": lambda: self._timed_gate(batch, watch),
            "timed guard": lambda: self._timed_guard(batch, watch),
            "timed hardware": lambda: self._timed_hardware(batch, watch),
            "timed layers": lambda: self._timed_layers(batch, watch),
            "timed trends": lambda: self._timed_trends(batch, watch),
        }
        gc.collect()
        gc.disable()
        try:
            for kind in self.order.sample(KINDS, len(KINDS)):
                # Memory is looked after in one kind of step, by what it was left with right before.
                watched = kind.endswith("hardware")
                self.memory.on = watched
                self.memory.seal_state(self.state.step)
                with watch.time(kind):
                    ways[kind]()
                advance()
            with watch.time("statistics"):
                self.engine.collect_statistics()
            with watch.time("tensors"):
                self.recovery.watches.tensors.measure_norms()
            with watch.time("probe"):
                self.probe.look_at_probe(self.state.step)
            # As many as fit in one file.
            steps = self.observer.steps
            steps.pending = steps.pending[-1:] * self.config.logging.flush_steps
            with watch.time("write"):
                steps.flush_records()
        finally:
            gc.enable()
        return watch.seconds

    # The kinds of step

    def _bare(self, batch: Step) -> None:
        """DeepSpeed's own update instead of the gate."""
        own_engine = self.engine
        own_engine._begin_step(batch.micro_batches, RATE)
        own_engine._count_tokens(batch.micro_batches)
        with patches.replace_attribute(own_engine.ds, "_take_model_step", own_engine._update_by_deepspeed):
            own_engine._run_forward_and_backward(batch.micro_batches)

    def _gate(self, batch: Step) -> None:
        self.engine.train_step(batch.micro_batches, RATE, is_finite)

    def _guard(self, batch: Step, ballot: Callable[[int], Ballot] = lambda _: {}) -> None:
        train = self.engine.train_step
        self._settle(batch, *train(batch.micro_batches, RATE, self._judge, lambda: ballot(self.state.step)))

    def _with_snapshot(self, batch: Step, watch: Stopwatch) -> None:
        # Before the step: on a GPU the copies overlap with its forward and backward.
        begin_time = time.perf_counter()
        self._snapshot()
        watch.seconds["take"] = time.perf_counter() - begin_time
        self._guard(batch)

    def _with_layers(self, batch: Step) -> None:
        self.engine.probe.watch_step()
        measured, applied = self.engine.train_step(batch.micro_batches, RATE, self._judge)
        self._settle(batch, measured, applied, self.engine.collect_statistics())

    def _timed_gate(self, batch: Step, watch: Stopwatch) -> None:
        """The gate by itself: without the update, and without the norm that DeepSpeed needs anyway."""
        inner_watch = Stopwatch(self.engine.device)
        e, inner_seconds = self.engine, inner_watch.seconds
        timed_calls = [
            ("all", e, "train_step"), ("before", e, "_begin_step"), ("before", e, "_count_tokens"),
            ("passes", e, "_run_forward_and_backward"), ("update", e, "_update_by_deepspeed"),
            ("norm", e.zero, "squared_norm"), ("own norm", *self._own_norm()), ("collect", e, "_collect"),
            ("counters", e, "read_counters"),
        ]  # fmt: skip
        with _stopwatches(inner_watch, timed_calls):
            e.train_step(batch.micro_batches, RATE, inner_watch.timed("finite", is_finite))
        other_seconds = ("counters", "before", "passes", "update", "norm", "collect", "finite")
        rest_seconds = inner_seconds["all"] - sum(inner_seconds[name] for name in other_seconds)
        norm_seconds = inner_seconds["norm"] - inner_seconds["own norm"]
        for name in ("collect", "finite", "counters"):
            watch.seconds[name] = inner_seconds[name]
        watch.seconds |= {"norm": norm_seconds, "rest": rest_seconds, "losses": self._losses()}

    def _timed_guard(self, batch: Step, watch: Stopwatch) -> None:
        timed_judge = watch.timed("judge", self._judge)
        measured, applied = self.engine.train_step(batch.micro_batches, RATE, timed_judge)
        r, inner_watch = self.recovery, Stopwatch(self.engine.device)
        timed_calls = [("samples", r.samples, "observe_batch"), ("signs", r.watches.signs, "judge_step")]
        with _stopwatches(inner_watch, timed_calls), watch.time("settle"):
            self._settle(batch, measured, applied)
        watch.seconds["settle"] -= sum(inner_watch.seconds.values())
        watch.seconds |= inner_watch.seconds

    def _timed_hardware(self, batch: Step, watch: Stopwatch) -> None:
        with _stopwatches(watch, [("seal", self.memory, "seal_state")]):
            self._guard(batch, watch.timed("ballot", self.recovery.watches.collect_ballot))

    def _timed_layers(self, batch: Step, watch: Stopwatch) -> None:
        e, probe = self.engine, self.engine.probe
        timed_calls = [
            (probe, "_before"), (probe, "_after"), (probe, "add_gradients"), (e.zero, "view_gradients"),
            (e, "flat_state"),
        ]  # fmt: skip
        with _stopwatches(watch, [("look", *call) for call in timed_calls]):
            with watch.time("look"):
                probe.watch_step()
            measured, applied = e.train_step(batch.micro_batches, RATE, self._judge)
        with watch.time("tell"):
            layer_statistics = e.collect_statistics()
        with _stopwatches(watch, [("tell", self.observer.layers, "add_records")]):
            self._settle(batch, measured, applied, layer_statistics)

    def _timed_trends(self, batch: Step, watch: Stopwatch) -> None:
        own_engine, trend_probe, trend_watch = self.engine, self.engine.trends, self.recovery.watches.trends
        timed_calls = [(trend_probe, "_before"), (trend_probe, "_after"), (trend_probe, "add_gradients")]
        with _stopwatches(watch, [("trend", *call) for call in timed_calls]):
            trend_probe.watch_step()
            measured, applied = own_engine.train_step(batch.micro_batches, RATE, self._judge)
        with watch.time("trend"):
            trend_watch.judge_step(self.state, RATE, applied, incident=False)
        self._settle(batch, measured, applied)

    # Parts of the steps

    def _judge(self, measured: Measured) -> bool:
        return self.recovery.judge_update(measured, self.state.step + 1, RATE)

    def _settle(
        self, batch: Step, measured: Measured, applied: bool, found: LayerStatistics | None = None
    ) -> None:
        """The work of train.py after a step."""
        state_before, sample_count = self.state, batch.positions.size
        state_after = state_before.after_step(
            cursor=batch.next, tokens=sample_count * self.config.model.sequence_length, seconds=1.0, loss=measured.loss,
            applied=applied, mix={}, batch=sample_count, piece=batch.piece,
        )  # fmt: skip
        self.recovery.watches.signs.judge_step(state_after, found)
        step_result = StepResult(batch, measured, applied, state_before, state_after, RATE, 1.0, 0.0)
        self.observer.record_step(step_result, found, self.engine.loss.z_loss)
        self.state = self.recovery.carry_out_decision(step_result).state
        decision = self.recovery.decision
        self.disturbed += decision is not None and decision.action is not Action.APPLY

    def _snapshot(self) -> None:
        recovery = self.recovery
        recovery.points.take_snapshot(
            self.state, recovery.guard.detector.state, recovery.watches.state_dicts()
        )

    def _losses(self) -> float:
        """Seconds of the loss function for the per-sample losses of a step: included in the bare step."""
        c, loss_watch = self.config, Stopwatch(self.engine.device)
        zero_losses = torch.zeros(c.model.sequence_length, c.train.micro_batch, device=self.engine.device)
        with loss_watch.time(""):
            for _ in self.batches[0].micro_batches:
                torch.stack((zero_losses.detach().mean(0), zero_losses.detach().mean(0)))
        return loss_watch.seconds[""]

    def _own_norm(self) -> tuple[Any, str]:
        """The method with which DeepSpeed computes the norm for clipping."""
        if hasattr(self.engine.optimizer, "_get_norm_groups"):  # ZeRO 3
            return self.engine.optimizer, "_get_norm_groups"
        return self.engine.zero, "_squares"  # ZeRO 1 and 2: replaced by ours


@contextmanager
def _stopwatches(watch: Stopwatch, calls: list[tuple[str, Any, str]]) -> Iterator[None]:
    """Time the calls of (name, owner, attribute)."""
    with ExitStack() as exit_stack:
        for name, owner, attribute in calls:
            timed_call = watch.timed(name, getattr(owner, attribute))
            exit_stack.enter_context(patches.replace_attribute(owner, attribute, timed_call))
        yield
