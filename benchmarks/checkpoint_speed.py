"""Measure the cost of checkpoints: pauses of training, background work, and the time to resume.

    found = measure_all({"125m": config}, None, rounds=5)    # in this process; CPU or GPU

Every round saves once synchronously, once behind real steps, copies the same bytes like `cp` with fsync,
and resumes from the checkpoint, in random order, so that the machine's other load affects all alike. Stopwatches
in the saver show what the steps waited for. Data are random tokens, and the steps are as small as the recipe's batch;
the state is that of the recipe's model. On a GPU the steps also wait there for the copy: see "steps, added up".
"""

from __future__ import annotations

import gc
import os
import random
import statistics
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch

from benchmarks.common import Stopwatch, machine
from benchmarks.saves import MEANING, Found, Measurement, Spread
from megastable.base.errors import CheckpointError
from megastable.checkpoint import parts, saving, store
from megastable.checkpoint.files import TensorFile
from megastable.checkpoint.saving import SaveOutcome, Saver
from megastable.checkpoint.store import LayoutState, RunState
from megastable.checkpoint.whole import load_into
from megastable.config import deepspeed_json
from megastable.config.tree import RunConfig
from megastable.data.loader import MicroBatch
from megastable.engine import distributed, patches
from megastable.engine.engine import Engine
from megastable.engine.measured import Measured
from megastable.engine.watch import Ballot
from megastable.model.flops import parameters
from megastable.parallel.layout import Layout
from megastable.parallel.topology import Topology
from megastable.run import directory

VOCABULARY = 32_000  # if the recipe leaves it to the tokenizer
RATE = 1e-9  # the weights stay about as they are
STEPS = 2  # without a save in the background, before a save and after it
WAYS = ("waiting", "behind", "copy", "resume")
BLOCK = 1 << 22  # bytes copied at a time


def measure(
    config: RunConfig, folder: Path, rounds: int, say: Callable[[str], None] = lambda _: None
) -> Measurement:
    """Costs of a checkpoint of this config's model. The process group, of one rank, already exists; `folder` is empty.

    Raises ConfigError for a layout that needs more ranks, CheckpointError if a save fails.
    """
    deepspeed_json.build(config, 1)
    tree = config.model_dump()
    tree["model"]["vocab_size"] = config.model.vocab_size or VOCABULARY
    tree["run"]["dir"] = folder
    tree["checkpoint"] |= {"keep": 1, "keep_every": 0, "staging": None}
    config = RunConfig.model_validate(tree)
    bench = Bench(config, folder)
    try:
        return bench.measure(rounds, say)
    finally:
        bench.close()


def measure_all(
    configs: Mapping[str, RunConfig],
    disk: Path | None,
    rounds: int,
    say: Callable[[str], None] = lambda _: None,
) -> Found:
    """All configs in turn, in a process group started here. disk: a folder on the disk to measure, restored afterwards;
    None = that of temporary files. Raises ConfigError, CheckpointError."""
    found: dict[str, Measurement] = {}
    distributed.start_distributed(max(c.run.timeout for c in configs.values()))
    about = machine(distributed.device())
    try:
        for name, config in configs.items():
            with tempfile.TemporaryDirectory(prefix="megastable-bench-", dir=disk) as folder:
                say(name)
                found[name] = measure(config, Path(folder), rounds, say)
            gc.collect()  # the engine
    except OSError as error:
        raise CheckpointError(
            f"{error.filename or disk or tempfile.gettempdir()}: {error.strerror or error}"
        ) from None
    finally:
        distributed.stop_distributed()
    return Found(about, found)


class Bench:
    """An engine and two savers, one synchronous, one asynchronous."""

    def __init__(self, config: RunConfig, folder: Path) -> None:
        c, layout = config, Layout(1, 1, 1)
        self.config, self.folder = config, folder
        torch.manual_seed(c.run.seed)
        settings = deepspeed_json.build(c, 1)
        self.engine = Engine(c, settings, Topology(layout, 0, c.run.timeout))
        held = LayoutState(**vars(layout), zero=c.parallel.zero, precision=c.precision.kind)
        self.state = RunState(order_fingerprint="0" * 32, layout=held)
        recipe = directory.frozen(c, [], settings)
        self.waiting = self._saver("waiting", recipe, asynchronous=False)
        self.behind = self._saver("behind", recipe, asynchronous=True)
        self.batches = [self._batch() for _ in range(deepspeed_json.accumulation(c, 1))]
        self.samples: dict[str, list[float]] = defaultdict(list)
        self.waited: dict[str, list[float]] = defaultdict(list)
        self.thread: dict[str, list[float]] = defaultdict(list)
        self.bytes = 0
        self.order = random.Random(0)

    def _saver(self, name: str, recipe: bytes, asynchronous: bool) -> Saver:
        folder = self.folder / name
        folder.mkdir()
        how = self.config.checkpoint.model_copy(update={"asynchronous": asynchronous})
        return Saver(folder, self.engine, how, self.config.model, lambda: recipe, "0" * 16)

    def _batch(self) -> MicroBatch:
        c = self.config
        assert c.model.vocab_size is not None
        shape = c.train.micro_batch, c.model.sequence_length + 1
        drawn = torch.randint(c.model.vocab_size, shape)
        positions = torch.arange(c.train.micro_batch)
        return MicroBatch(drawn[:, :-1].contiguous(), drawn[:, 1:].contiguous(), positions, None)

    def measure(self, rounds: int, say: Callable[[str], None]) -> Measurement:
        """Warm up, including the first asynchronous save, then run `rounds` rounds."""
        self.behind.prepare()
        for _ in range(2):
            self._step()
        say("warming up")
        for way in ("behind", "waiting", "copy", "resume"):
            self._do(way)
        first = {"blocked": self.samples["blocked"][0], "copy": self.waited["copy"][0]}
        for found in (self.samples, self.waited, self.thread):
            found.clear()
        for number in range(rounds):
            say(f"round {number + 1} of {rounds}")
            for way in self.order.sample(WAYS, len(WAYS)):
                self._do(way)
        self._conclude()
        return Measurement(
            self._run(), rounds, self.bytes, {name: Spread.of(self.samples[name]) for name in MEANING},
            _medians(self.waited), _medians(self.thread), first,
        )  # fmt: skip

    def close(self) -> None:
        """Stop all writing."""
        for saver in (self.waiting, self.behind):
            saver._thread.shutdown()

    def _run(self) -> dict[str, Any]:
        c = self.config
        return {
            "parameters": parameters(c.model),
            "sequence_length": c.model.sequence_length,
            "global_batch": c.train.global_batch,
            "precision": c.precision.kind,
            "zero": c.parallel.zero,
            "optimizer": type(self.engine.optimizer).__name__,
        }

    def _do(self, way: str) -> None:
        gc.collect()
        gc.disable()
        try:
            {"waiting": self._waiting, "behind": self._behind, "copy": self._copy, "resume": self._resume}[
                way
            ]()
        finally:
            gc.enable()

    # Saving

    def _step(self) -> tuple[float, Measured]:
        begun = time.perf_counter()
        measured, _ = self.engine.train_step(self.batches, RATE, _finite, self._ballot)
        return time.perf_counter() - begun, measured

    def _ballot(self) -> Ballot:
        return {"checkpoint": self.behind.ballot()}

    def _next(self) -> RunState:
        self.state.step += 1
        return self.state

    def _stood(self, outcome: SaveOutcome | None) -> None:
        if outcome is None or outcome.path is None:
            raise CheckpointError(f"{self.folder}: {outcome.problem if outcome else 'there was no save'}")
        self.bytes = outcome.size

    def _waiting(self) -> None:
        saver, watch = self.waiting, Stopwatch(torch.device("cpu"))
        with _stopwatches(watch, _thread_of(saver)):
            begun = time.perf_counter()
            saver.begin(self._next())
            outcome = saver.finish()
            self.samples["waiting"].append(time.perf_counter() - begun)
        self._stood(outcome)
        self.samples["writing"].append(watch.seconds["write"])

    def _behind(self) -> None:
        """Some steps, a save, steps until it is complete, and some steps."""
        saver, calls = self.behind, Stopwatch(torch.device("cpu"))
        thread = Stopwatch(torch.device("cpu"))
        self._step()  # the first step after other work is slower
        alone = [self._step()[0] for _ in range(STEPS)]
        steps: list[float] = []
        outcome = None
        with _stopwatches(calls, _face_of(saver, self.engine)), _stopwatches(thread, _thread_of(saver)):
            begun = time.perf_counter()
            saver.begin(self._next())
            begin = time.perf_counter() - begun
            if not saver.asynchronous:
                raise CheckpointError(f"{self.folder}: {saver.take_note()}")
            heard = 0.0
            while outcome is None:
                seconds, measured = self._step()
                steps.append(seconds)
                after = time.perf_counter()
                outcome = saver.heard(measured.ballot["checkpoint"])
                heard += time.perf_counter() - after
            stands = time.perf_counter() - begun
        self._stood(outcome)
        alone += [self._step()[0] for _ in range(STEPS)]
        self.samples["step"].append(statistics.median(alone))
        # The first update waits for the rest of the copy.
        update = max(0.0, outcome.blocked - begin - heard)
        found = {
            "blocked": begin + heard + update,
            "begin": begin,
            "update": update,
            "heard": heard,
            "stands": stands,
        }
        found |= {"step behind": statistics.median(steps), "steps": sum(steps), "count": len(steps)}
        for name, value in found.items():
            self.samples[name].append(value)
        for into, watch in ((self.waited, calls), (self.thread, thread)):
            for name, value in watch.seconds.items():
                into[name].append(value)

    # Reading

    def _saved(self) -> Path:
        return store.newest_first(self.waiting.folder)[0]

    def _copy(self) -> None:
        target = self.folder / "copy"
        target.mkdir()
        begun = time.perf_counter()
        for path in self._saved().iterdir():
            with path.open("rb") as come, (target / path.name).open("wb") as go:
                while block := come.read(BLOCK):
                    go.write(block)
                go.flush()
                os.fsync(go.fileno())
        self.samples["copying"].append(time.perf_counter() - begun)
        for path in target.iterdir():
            path.unlink()
        target.rmdir()

    def _resume(self) -> None:
        """Resume as a start does: verify every checksum, then load from the file cache."""
        checkpoint = self._saved()
        for path in checkpoint.iterdir():
            with path.open("rb") as file:
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        begun = time.perf_counter()
        store.verify(checkpoint)
        verified = time.perf_counter()
        load_into(self.engine, checkpoint, store.read_state(checkpoint))
        self.engine.refresh_weights()
        loaded = time.perf_counter()
        self.samples["verifying"].append(verified - begun)
        self.samples["loading"].append(loaded - verified)

    # Numbers

    def _conclude(self) -> None:
        """Derived numbers of a round."""
        s = self.samples

        def each(name: str, of: Callable[..., float], *names: str) -> None:
            s[name] = [of(*values) for values in zip(*(s[n] for n in names), strict=True)]

        each("share", lambda b, w: 100 * b / w, "blocked", "waiting")
        each("slower", lambda b, a: 100 * (b / a - 1), "step behind", "step")
        each("added", lambda b, h, t, n, a: b + h + t - n * a, "begin", "heard", "steps", "count", "step")
        for name in ("begin", "update", "heard"):
            s[name] = [1e3 * value for value in s[name]]
        each("write to copy", lambda w, c: c / w, "writing", "copying")
        each("save to copy", lambda w, c: c / w, "waiting", "copying")
        each("resume", lambda verify, load: verify + load, "verifying", "loading")
        for name, of, unit in (
            ("write", "writing", 1e6), ("save", "waiting", 1e6), ("copy", "copying", 1e6),
            ("verify", "verifying", 1e9), ("load", "loading", 1e9),
        ):  # fmt: skip
            s[name] = [self.bytes / unit / seconds for seconds in s[of]]


Calls = list[tuple[str, Any, str]]  # name, owner, attribute


def _face_of(saver: Saver, held: Engine) -> Calls:
    """Calls that the steps wait for."""
    return [
        ("buffers by name", held, "optimizer_state"), ("room", saver, "_has_room"), ("state", RunState, "model_copy"),
        ("copy", saver._host, "copy"), ("random states", saving, "rng_state"), ("recipe", saver, "recipe"),
        ("fragments", held, "flat_state"), ("thread", saver._thread, "submit"),
        ("records exchanged", saving, "gathered"), ("outcome told", saving, "first"),
    ]  # fmt: skip


def _thread_of(saver: Saver) -> Calls:
    """Calls in the saver's thread."""
    return [
        ("write", saving, "write_rank"), ("  statistics", parts, "statistics_of"),
        ("  tensors", TensorFile, "write"), ("  fsync of them", TensorFile, "close"),
        ("read back", saving, "hash_file"), ("commit", saver, "_commit"),
    ]  # fmt: skip


@contextmanager
def _stopwatches(watch: Stopwatch, calls: Calls) -> Iterator[None]:
    with ExitStack() as stack:
        for name, owner, attribute in calls:
            watch.seconds[name] = 0.0  # in this order
            timed = watch.timed(name, getattr(owner, attribute))
            stack.enter_context(patches.instead(owner, attribute, timed))
        yield


def _medians(found: Mapping[str, Sequence[float]]) -> dict[str, float]:
    return {name: statistics.median(values) for name, values in found.items() if any(values)}


def _finite(measured: Measured) -> bool:
    return measured.finite
