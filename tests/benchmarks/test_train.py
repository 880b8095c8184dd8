"""The benchmark of training speed: everyone trains the same, and whoever cannot is a row."""

from __future__ import annotations

import io
import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from benchmarks import peers, speed
from benchmarks.peers import OURS, PEERS, Contestant, Peer, Task, Unavailable
from benchmarks.peers.plain_torch import PlainGPT
from benchmarks.speed import Entry, Memory, Peak, Speed, Work, assess
from megastable.base.errors import ConfigError
from megastable.config.tree import RunConfig
from megastable.data.loader import MicroBatch
from megastable.model import gpt
from megastable.model.loss import LossFunction
from megastable.parallel.topology import TensorParallel
from tests.distributed import run_ranks

ROOT = Path(__file__).parents[2]
CPU = torch.device("cpu")


def config_of(precision: str = "fp32", batch: int = 4, **model: Any) -> RunConfig:
    shape = {
        "layers": 2, "hidden": 32, "heads": 4, "kv_heads": 2, "ffn": 48, "sequence_length": 16, "vocab_size": 128,
        "vocab_multiple": 64,
    }  # fmt: skip
    return RunConfig.model_validate(
        {
            "model": shape | model,
            "data": {"corpora": [{"path": "no/such/folder"}]},
            "train": {"global_batch": batch, "micro_batch": 2},
            "precision": {"kind": precision},
            "kernels": {"compile": False, "attention": "reference", "loss": "reference"},
        }
    )


# Everyone trains the same


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize(
    "model",
    [
        {},
        {"tied": True, "kv_heads": None},
        {"qk_norm": False, "vocab_size": 100},  # with padding, which is no token
        {"qk_norm": "full", "norms": "after"},
    ],
)
def test_the_plain_model_computes_ours(precision: str, model: dict[str, Any]) -> None:
    """Loss and the gradient of every weight."""
    c = config_of(precision, **{"z_loss": 0.01} | model).model
    dtype = torch.float32 if precision == "fp32" else torch.bfloat16
    tp = TensorParallel()
    ours = gpt.GPT(c, tp, "none", 5, LossFunction(c.vocab_size or 0, c.z_loss, tp)).to(dtype)
    weights = {peers.placement_of(p).name: p for p in ours.parameters()}
    plain = PlainGPT(c).ready({name: p.detach() for name, p in weights.items()}, CPU, dtype)
    drawn = torch.randint(c.vocab_size or 0, (2, 17), generator=torch.Generator().manual_seed(0))
    tokens, labels = drawn[:, :-1], drawn[:, 1:]
    wanted, found = ours(tokens, labels), plain(tokens, labels)
    wanted.backward()
    found.backward()
    close = {"rtol": 1e-5, "atol": 1e-6} if precision == "fp32" else {"rtol": 0.05, "atol": 2e-3}
    torch.testing.assert_close(found, wanted, rtol=close["rtol"] / 5, atol=1e-5)
    theirs = dict(plain.named_parameters())
    assert theirs.keys() == weights.keys()
    for name, weight in weights.items():
        torch.testing.assert_close(theirs[name].grad, weight.grad, msg=lambda m, n=name: f"{n}: {m}", **close)


def train_all(config: RunConfig, names: list[str], rate: float, steps: int) -> dict[str, list[float]]:
    """Losses by name, at a rate at which updates matter."""
    from benchmarks.peers import huggingface, own
    from benchmarks.train_speed import random_batches

    peers.RATE = own.RATE = huggingface.RATE = rate
    task = Task(config, CPU, random_batches(config, CPU))
    found = {}
    for name in names:
        contestant = PEERS[name].build(task)
        found[name] = [float(contestant.step()) for _ in range(steps)]
        contestant.close()
    return found


@pytest.mark.slow
def test_everyone_trains_alike() -> None:
    """The same weights, tokens, clipping, decay and update: in fp32 the losses stay together for steps on end, though
    they fall. What decays and what is clipped shows, at a rate like this."""
    names = ["bare", "bare-masters", "plain", "megastable", "megastable-unwatched", "megastable-eager"]
    names += ["transformers-eager", "transformers-deepspeed"]
    found = run_ranks(1, train_all, config_of(batch=6, z_loss=0.0, init_std=0.2), names, 0.02, 5)[0]
    wanted = found.pop("bare")
    assert wanted[-1] < wanted[0] - 1
    assert found.keys() == set(names) - {"bare"}
    for name, losses in found.items():
        assert losses == pytest.approx(wanted, rel=2e-3), name
    assert found["bare-masters"] == pytest.approx(wanted, rel=1e-5)


@pytest.mark.slow
def test_megatron_core_trains_on_a_cpu_too() -> None:
    pytest.importorskip("megatron.core")
    losses = run_ranks(1, train_all, config_of("bf16"), ["megatron-core"], 0.01, 6)[0]["megatron-core"]
    assert losses[0] == pytest.approx(np.log(128), rel=0.05) and losses[-1] < losses[0] - 0.5


def test_bare_with_masters_does_what_deepspeed_does() -> None:
    """In bf16, too: fp32 sums, clipping, masters. At a small rate weights without masters stay behind."""
    c = config_of("bf16", z_loss=0.0, init_std=0.2)
    found = run_ranks(1, train_all, c, ["bare", "bare-masters", "megastable"], 1e-4, 8)[0]
    assert found["bare-masters"] == pytest.approx(found["megastable"], rel=1e-4)
    fallen = {name: losses[0] - losses[-1] for name, losses in found.items()}
    assert 0 < 2 * fallen["bare"] < fallen["bare-masters"], fallen


@pytest.mark.parametrize(
    ("model", "reason"), [({"norms": "after"}, "qk_norm"), ({"qk_norm": "full"}, "no supported Hugging Face")]
)
def test_a_model_without_a_home_over_there(model: dict[str, Any], reason: str) -> None:
    pytest.importorskip("transformers")
    task = Task(config_of(**model), CPU, [])
    with pytest.raises(Unavailable, match=reason):
        PEERS["transformers"].build(task)


@pytest.mark.parametrize(
    ("peer", "model", "told"),
    [
        ("plain", {"norms": "both"}, "model.norms=both"),
        (
            "plain",
            {"norms": "after", "window": 8, "activation": "gelu"},
            "model.window=8, model.activation=gelu",
        ),
        ("plain", {"mup": {"base_width": 16}}, "model.mup="),
        ("plain", {"qkv_bias": True}, "model.qkv_bias=True"),
        ("megatron", {"norms": "after"}, "model.norms=after"),
        (
            "megatron",
            {"qk_norm": "full", "logit_softcap": 30.0},
            "model.qk_norm=full, model.logit_softcap=30.0",
        ),
    ],
)
def test_a_peer_refuses_what_it_lacks(peer: str, model: dict[str, Any], told: str) -> None:
    c = config_of(**model)
    build = {  # Megatron-core may not be installed
        "plain": lambda: PEERS["plain"].build(Task(c, CPU, [])),
        "megatron": lambda: peers.refuse_others(c.model, {"qk_norm": (True, False)}),
    }[peer]
    with pytest.raises(Unavailable, match=re.escape(f"it is built here without {told}")):
        build()


def test_a_peer_takes_what_it_has() -> None:
    has = {"norms": ("before", "after")}
    sizes = {"layers": 3, "tied": True, "init": "xavier", "residual_init": "zero", "z_loss": 0.0}
    peers.refuse_others(config_of(**sizes).model, {})
    peers.refuse_others(config_of(norms="after").model, has)


# What is measured


class Standin(Peer):
    def build(self, task: Task) -> Contestant:
        return STANDINS[self.builder](task)


def cannot(task: Task) -> Contestant:
    raise Unavailable("it has no legs")


def fails_later(task: Task) -> Contestant:
    steps = iter(range(4))  # of the warm-up and of as many rounds, were each of one step

    def step() -> float:
        if next(steps, None) is None:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate")
        return 1.0

    return Contestant(step, "", same_weights=False)


def never_warm(task: Task) -> Contestant:
    try:
        time.sleep(120)
    except TimeoutError:  # as of a compiler
        raise RuntimeError("the backend failed") from None
    raise AssertionError


def another(task: Task) -> Contestant:
    return Contestant(lambda: 1.0, "computes something else")


STANDINS: dict[str, Callable[[Task], Contestant]] = {
    "cannot": cannot, "fails_later": fails_later, "another": another, "never_warm": never_warm
}  # fmt: skip


def measured(config: RunConfig, rounds: int, memory: float) -> tuple[Speed, list[str], int]:
    from benchmarks import train_speed

    for name in STANDINS:
        PEERS[name] = Standin(name, "")
    PEERS["no module"] = Peer("nowhere:nothing", "")
    names = [OURS, "cannot", "bare", "fails_later", "another", "no module"]
    said, advanced = [], []
    train_speed._memory = lambda device: memory  # type: ignore[assignment]
    found = train_speed.measure(config, names, rounds, None, lambda: advanced.append(1), said.append)
    return found, said, len(advanced)


@pytest.mark.slow
@pytest.mark.parametrize("apart", [False, True])
def test_whoever_cannot_is_a_row(apart: bool) -> None:
    config = config_of("bf16", hidden=256, ffn=512)  # beside it the engine's scratch space, 1 MiB, is small
    found, said, advanced = run_ranks(1, measured, config, 4, 0.0 if apart else 1e15)[0]
    assert found.run["apart"] is apart and found.rounds == 4
    assert any("apart" in note for note in found.notes) is apart
    problems = {row.name: row.problem for row in found.rows if row.problem is not None}
    assert problems["cannot"] == "it has no legs" and problems["fails_later"].startswith("out of memory")
    assert problems["no module"].startswith("failed: ModuleNotFoundError")
    assert [row.name for row in found.rows] == [OURS, "cannot", "bare", "fails_later", "another", "no module"]
    for name in (OURS, "bare", "another"):
        row = found.row(name)
        assert len(row.samples_ms) == 4 and row.problem is None
    assert found.row("bare").ratio is not None and found.row(OURS).ratio is None
    assert any("another" in note and "does not compute the same" in note for note in found.notes)
    assert "bare: warming up" in said and advanced >= 4 * 3 + 3
    # 18 and 6 bytes a parameter: 16-bit weights; fp32 masters and gradients; moments.
    held = {name: found.row(name).entry.memory.held_gib * 2**30 for name in (OURS, "bare")}  # type: ignore[union-attr]
    assert held[OURS] == pytest.approx(18 * found.run["parameters"], rel=0.2)
    assert held["bare"] == pytest.approx(6 * found.run["parameters"], rel=0.2)


def late(config: RunConfig) -> Speed:
    from benchmarks import train_speed

    PEERS["never_warm"] = Standin("never_warm", "")
    return train_speed.measure(config, [OURS, "never_warm", "bare"], 50_000, False, seconds=4.0)


@pytest.mark.slow
def test_who_is_not_warm_in_time_is_a_row() -> None:
    """And what was measured until then is there, in as many rounds as there was time for, but at least in two."""
    found = run_ranks(1, late, config_of())[0]
    problem = found.row("never_warm").problem
    assert problem is not None and problem.startswith("it was not warm in the time that there was")
    samples = [found.row(name).samples_ms for name in (OURS, "bare")]
    assert any(f"{found.rounds} rounds in place of 50000" in note for note in found.notes)
    assert len(samples[0]) == found.rounds >= 2


def paired(config: RunConfig) -> tuple[list[Speed], int, list[bool]]:
    """What was measured after every part of it, engines built, and whether each step was in FP8."""
    from benchmarks import train_speed
    from megastable.engine.engine import Engine

    built, parts, in_fp8, begin, train_step = [], [], [], Engine.__init__, Engine.train_step

    def init(self: Engine, *args: Any) -> None:
        built.append(self)
        begin(self, *args)

    def step(self: Engine, *args: Any, **kwargs: Any) -> Any:
        in_fp8.append(self.fp8.on)
        return train_step(self, *args, **kwargs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Engine, "__init__", init)
        patch.setattr(Engine, "train_step", step)
        parts.append(train_speed.measure(config, [OURS, "megastable-fp8-off"], 3, partly=parts.append))
    (engine,) = built
    assert engine.fp8.on, "left as it was"
    return parts, len(built), in_fp8


def in_turns(config: RunConfig) -> tuple[Speed, int, list[int]]:
    """What was measured, engines built, and the numbers of each step's ballot."""
    from benchmarks import train_speed
    from megastable.engine.engine import Engine

    built, numbers, begin, train_step = [], list[int](), Engine.__init__, Engine.train_step

    def init(self: Engine, *args: Any) -> None:
        built.append(self)
        begin(self, *args)

    def step(self: Engine, *args: Any, **kwargs: Any) -> Any:
        measured, applied = train_step(self, *args, **kwargs)
        numbers.append(sum(map(len, measured.ballot.values())))
        return measured, applied

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Engine, "__init__", init)
        patch.setattr(Engine, "train_step", step)
        found = train_speed.measure(config, [OURS, "megastable-unwatched"], 3, False)
    return found, len(built), numbers


@pytest.mark.slow
def test_the_price_of_the_watch_over_hardware_is_a_ratio_of_one_run() -> None:
    """Ours sends a run's ballot, also right after the same engine was trained without."""
    found, built, numbers = run_ranks(1, in_turns, config_of("bf16"))[0]
    assert built == 1 and set(numbers) == {0, 8}  # 7 of the loop, one of the watch over memory
    row = found.row("megastable-unwatched")
    assert row.ratio is not None and len(row.samples_ms) == 3 and found.row(OURS).problem is None


@pytest.mark.slow
def test_fp8_on_and_off_share_an_engine_and_each_is_told_when_it_is_measured() -> None:
    tree = config_of("bf16").model_dump()
    tree["precision"]["fp8"] = {"recipe": "delayed"}
    parts, built, in_fp8 = run_ranks(1, paired, RunConfig.model_validate(tree))[0]
    assert built == 1
    *partial, found = parts
    row = found.row("megastable-fp8-off")
    assert row.problem is None and row.ratio is not None and "FP8 switched off" in row.entry.backends
    assert in_fp8.count(True) == in_fp8.count(False) > 0
    assert len(partial) == 2 + 2 * 3, "after every warm-up and measurement"
    for part in partial:  # paired, whenever it is ended
        assert any("not finished" in note for note in part.notes)
        assert len({len(r.samples_ms) for r in part.rows if r.samples_ms}) <= 1
    assert [row.problem for row in partial[0].rows] == ["not measured", "not measured"]
    assert all(row.entry is not None for row in partial[2].rows) and not any(
        "not finished" in n for n in found.notes
    )


def test_without_an_engine_to_share_it_is_a_row() -> None:
    from benchmarks.peers import Task
    from benchmarks.peers.own import Unavailable, ours_fp8_off

    tree = config_of("bf16").model_dump()
    for fp8, told in ((None, "no FP8"), ({"recipe": "current"}, "measure --together")):
        tree["precision"]["fp8"] = fp8
        with pytest.raises(Unavailable, match=told):
            ours_fp8_off(Task(RunConfig.model_validate(tree), torch.device("cpu"), []))


def test_memory_is_counted() -> None:
    from benchmarks.train_speed import living_bytes, peak_of

    before = living_bytes()
    kept = torch.ones(1000, requires_grad=True)
    view = kept.detach()[10:]  # the same storage
    kept.grad = torch.ones(1000)
    assert living_bytes() - before == 8000 and len(view) == 990

    def step() -> torch.Tensor:
        for _ in range(3):
            torch.empty(5_000_000, dtype=torch.uint8)
        return torch.empty(7_000_000, dtype=torch.uint8)

    assert 7_000_000 <= peak_of(step) < 12_100_000


def test_what_is_measured_of_a_recipe() -> None:
    from benchmarks.train_speed import memory_needed, random_batches, resolve

    tree = config_of(vocab_size=None, batch=64).model_dump()
    tree["kernels"]["compile"] = "auto"
    tree["data"]["keep_documents_apart"] = True
    config, notes = resolve(RunConfig.model_validate(tree))
    assert (config.train.global_batch, config.model.vocab_size, config.kernels.compile) == (8, 4096, True)
    assert len(notes) == 4 and not config.data.keep_documents_apart
    assert resolve(config) == (config, [])
    batches = random_batches(config, CPU)
    assert len(batches) == 4 and isinstance(batches[0], MicroBatch)
    assert torch.equal(batches[1].tokens[:, 1:], batches[1].labels[:, :-1])
    assert not torch.equal(batches[0].tokens, batches[1].tokens)
    needed = [memory_needed(config.model, b, [OURS, "bare"]) for b in (1, 2, 4)]
    assert needed[0] < needed[1] < needed[2]
    assert peers.default_peers("cpu") == [
        OURS, "bare", "plain", "transformers", "transformers-deepspeed"
    ]  # fmt: skip
    assert peers.default_peers("cuda") == [*peers.default_peers("cpu"), "megatron-core"]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"precision": {"kind": "fp16"}}, "loss scale"),
        ({"parallel": {"tensor": 2}}, "1 rank cannot be laid out"),
    ],
)
def test_what_cannot_be_measured(change: dict[str, Any], message: str) -> None:
    from benchmarks.train_speed import resolve

    with pytest.raises(ConfigError, match=message):
        resolve(RunConfig.model_validate(config_of().model_dump() | change))


# Numbers into a table

WORK = Work(tokens=1000, flops_full=2e9, flops_causal=1e9)
MACHINE, RUN = {"kind": "cpu"}, {"tokens": 1000, "parameters": 5_000_000}


def entry(loss: float = 7.0, same: bool = True) -> Entry:
    return Entry("in some way", 1.0, 14.0, loss, Memory(1.0, 2.0, 3.0), same)


def assessed(samples: dict[str, list[float]], nominal: float | None = None, **problems: str) -> Speed:
    entries = {name: entry() for name in samples}
    order = [*samples, *problems]
    return assess(order, samples, entries, problems, WORK, Peak(0.02, nominal), (MACHINE, RUN), ["a note"])


@given(st.lists(st.floats(0.1, 10.0), min_size=1, max_size=12), st.floats(0.01, 10.0), st.floats(0.01, 10.0))
def test_what_falls_on_a_whole_round_falls_out(noise: list[float], ours: float, theirs: float) -> None:
    found = assessed({OURS: [ours * n for n in noise], "bare": [theirs * n for n in noise]})
    ratio = found.row("bare").ratio
    assert ratio is not None and (ratio.low, ratio.median, ratio.high) == pytest.approx([theirs / ours] * 3)
    middle = float(np.median(noise))
    for name, seconds in ((OURS, ours), ("bare", theirs)):
        row = found.row(name)
        assert row.step_ms is not None and row.tokens_per_second is not None
        assert row.step_ms.median == pytest.approx(1e3 * seconds * middle)
        assert row.tokens_per_second.median == pytest.approx(1000 / seconds / middle)
        assert row.tokens_per_second.low <= row.tokens_per_second.median <= row.tokens_per_second.high
        assert row.mfu["full"] == pytest.approx(2 * row.mfu["causal"])
        assert row.mfu["full"] == pytest.approx(2e9 / (seconds * middle) / 0.02e12)


@pytest.mark.parametrize(
    ("seconds", "verdict"),
    [
        ([0.951, 0.951, 0.951], "× 0.951 [0.951, 0.951], kept"),
        ([0.949, 0.949, 0.949], "× 0.949 [0.949, 0.949], NOT KEPT"),
        ([0.5, 1.0, 1.5], "× 1.000 [0.500, 1.500], not decided: more rounds, or a quieter machine"),
    ],
)
def test_the_limit(seconds: list[float], verdict: str) -> None:
    """Above 1 ours is faster."""
    found = assessed({OURS: [1.0] * 3, "bare": seconds, "plain": [2.0] * 3})
    ratio = found.row("plain").ratio
    assert ratio is not None and ratio.median == 2.0 and found.row("plain").limit is None
    told = [line for line in speed.lines(found) if line.startswith("limit")]
    assert told == [f"limit: ours at least × 0.95 of bare: {verdict}"]


def test_another_loss_is_told() -> None:
    entries = {
        OURS: entry(),
        "close": entry(7.01),
        "far": entry(7.5),
        "none": entry(float("nan")),
        "own": entry(9.0, False),
    }
    found = assess([], {}, entries, {}, WORK, Peak(1.0, None), (MACHINE, RUN))
    assert [note.partition(":")[0] for note in found.notes] == ["far", "none"]


def test_the_table_fits_a_terminal() -> None:
    names = [OURS, *(n for n in PEERS if n != OURS)][:9]
    samples = {name: [0.9 + 0.1 * i + 0.4 * len(name) for i in range(5)] for name in names[:-1]}
    found = assessed(samples, 989.0, **{names[-1]: "it is not installed"})
    text = io.StringIO()
    Console(width=80, file=text).print(speed.table(found))
    assert "…" not in text.getvalue() and all(name in text.getvalue() for name in names)
    told = "\n".join(speed.lines(found))
    assert f"{names[-1]}: it is not installed" in told and "989 TFLOP/s" in told and "note: a note" in told


# The command


def bench(*arguments: object) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"COLUMNS": "80", "OMP_NUM_THREADS": "1", "TERM": "dumb"}
    command = [sys.executable, "-m", "megastable", "bench", "train", *map(str, arguments)]
    return subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True)


TINY = (
    "model.layers=1 model.hidden=32 model.heads=2 model.kv_heads=2 model.ffn=64 model.sequence_length=16 "
    "train.global_batch=4 train.micro_batch=2 kernels.compile=false"
).split()


@pytest.mark.slow
def test_the_command(tmp_path: Path) -> None:
    file = tmp_path / "train.json"
    done = bench("--peers", "bare", "--rounds", 2, "--device", "cpu", "--output", file, *TINY)
    assert done.returncode == 0, done.stderr
    found = json.loads(file.read_text())
    assert found.keys() == {"machine", "run", "peak", "rounds", "rows", "notes"}
    assert found["run"].keys() >= {"parameters", "tokens", "micro_batch", "steps_in_a_measurement", "apart"}
    assert found["peak"]["measured_tflops"] > 0 and found["peak"]["nominal_tflops"] is None
    ours, bare = found["rows"]
    assert (ours["name"], bare["name"], found["rounds"]) == (OURS, "bare", 2)
    assert bare.keys() == {
        "name", "problem", "entry", "step_ms", "tokens_per_second", "mfu", "mfu_nominal", "ratio", "limit",
        "samples_ms",
    }  # fmt: skip
    assert bare["entry"].keys() == set(asdict(entry())) and bare["ratio"].keys() == {"median", "low", "high"}
    assert bare["mfu"]["full"] > bare["mfu"]["causal"] > 0
    for text in ("model.vocab_size=4,096", "limit: ours at least", "tokens/s"):
        assert text in done.stdout, text


def test_a_forecast_of_traffic(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from megastable_tools.commands.bench import app

    arguments = ["--recipe", "launch/recipes/125m.yaml", "model.vocab_size=32000", "--ranks", "8"]
    with pytest.raises(SystemExit) as end:
        app(["scaling", *arguments, "--output", str(tmp_path / "traffic.json")])
    assert end.value.code == 0 and "8 ranks" in capsys.readouterr().out
    assert json.loads((tmp_path / "traffic.json").read_text())["world"] == 8


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["train", "--peers", "nobody"], "--peers nobody: choose among"),
        (["train", "--device", "tpu"], "--device tpu: it is cpu or cuda"),
        (["train", "--device", "cpu", "parallel.tensor=2"], "1 rank cannot be laid out"),
        (["train", "--recipe", "no.yaml"], "no.yaml: no such recipe"),
        (["scaling", "--layout", "TP3"], "--layout 'TP3': choose among"),
        (
            ["scaling", "model.layers=2"],
            "model.layers=2: the layouts that are counted have models of their own",
        ),
        (["scaling", "--recipe", "launch/recipes/125m.yaml"], "model.vocab_size comes from a corpus"),
    ],
)
def test_bad_input(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert refused(arguments, capsys).startswith(f"error: {message}")


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_gpu_that_is_not_there(capsys: pytest.CaptureFixture[str]) -> None:
    assert "torch finds no GPU here" in refused(["train", "--device", "cuda"], capsys)


def refused(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    """The one line that is said; nothing was begun, so that this process is as it was."""
    from megastable_tools.commands.bench import app

    before = dict(os.environ)
    with pytest.raises(SystemExit) as end:
        app(arguments)
    os.environ.clear()
    os.environ.update(before)
    said = capsys.readouterr().err
    assert end.value.code == 2 and said.count("\n") == 1
    return said
