"""The benchmark of training speed: everyone trains the same, and whoever cannot is a row."""

from __future__ import annotations

import math
import re
from typing import Any

import pytest
import torch

from benchmarks import peers
from benchmarks.peers import OURS, PEERS, Task, Unavailable
from benchmarks.peers.plain_torch import PlainGPT
from benchmarks.speed import Speed
from megastable.config.tree import RunConfig
from megastable.model import gpt
from megastable.model.loss import LossFunction
from megastable.parallel.topology import TensorParallel
from tests.distributed import run_ranks

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
def test_plain_model_computes_ours(precision: str, model: dict[str, Any]) -> None:
    """Loss and the gradient of every weight."""
    c = config_of(precision, **{"z_loss": 0.01} | model).model
    dtype = torch.float32 if precision == "fp32" else torch.bfloat16
    tp = TensorParallel()
    ours = gpt.GPT(c, tp, "none", 5, LossFunction(c.vocab_size or 0, c.z_loss, tp)).to(dtype)
    weights = {peers.placement_of(p).name: p for p in ours.parameters()}
    plain = PlainGPT(c).load_weights({name: p.detach() for name, p in weights.items()}, CPU, dtype)
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
        contestant = PEERS[name].build_contestant(task)
        found[name] = [float(contestant.step()) for _ in range(steps)]
        contestant.close()
    return found


@pytest.mark.slow
def test_peers_train_alike() -> None:
    """The same weights, tokens, clipping, decay and update: in fp32 the losses stay together for steps on end, though
    they fall. What decays and what is clipped shows, at a rate like this."""
    names = ["bare", "bare-masters", "plain", "megastable", "megastable-unwatched"]
    names += ["transformers-eager"]
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
    assert losses[0] == pytest.approx(math.log(128), rel=0.05) and losses[-1] < losses[0] - 0.5


def test_bare_masters_do_what_deepspeed_does() -> None:
    """In bf16, too: fp32 sums, clipping, masters. At a small rate weights without masters stay behind."""
    c = config_of("bf16", z_loss=0.0, init_std=0.2)
    found = run_ranks(1, train_all, c, ["bare", "bare-masters", "megastable"], 1e-4, 8)[0]
    assert found["bare-masters"] == pytest.approx(found["megastable"], rel=1e-4)
    fallen = {name: losses[0] - losses[-1] for name, losses in found.items()}
    assert 0 < 2 * fallen["bare"] < fallen["bare-masters"], fallen


@pytest.mark.parametrize(
    ("model", "told"),
    [
        ({"norms": "both"}, "model.norms=both"),
        (
            {"norms": "after", "window": 8, "activation": "gelu"},
            "model.window=8, model.activation=gelu",
        ),
        ({"mup": {"base_width": 16}}, "model.mup="),
        ({"qkv_bias": True}, "model.qkv_bias=True"),
    ],
)
def test_plain_refuses_what_it_lacks(model: dict[str, Any], told: str) -> None:
    with pytest.raises(Unavailable, match=re.escape(f"it is built here without {told}")):
        PEERS["plain"].build_contestant(Task(config_of(**model), CPU, []))


@pytest.mark.parametrize(
    ("model", "reason"), [({"norms": "after"}, "qk_norm"), ({"qk_norm": "full"}, "no supported Hugging Face")]
)
def test_transformers_refuses_a_model_without_a_home_there(model: dict[str, Any], reason: str) -> None:
    pytest.importorskip("transformers")
    with pytest.raises(Unavailable, match=reason):
        PEERS["transformers"].build_contestant(Task(config_of(**model), CPU, []))


# What is measured


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
        parts.append(train_speed.measure_speed(config, [OURS, "megastable-fp8-off"], 3, partly=parts.append))
    (engine,) = built
    assert engine.fp8.on, "left as it was"
    return parts, len(built), in_fp8


@pytest.mark.slow
def test_measure_shares_an_engine_of_fp8_on_and_off() -> None:
    tree = config_of("bf16").model_dump()
    tree["precision"]["fp8"] = {"recipe": "delayed"}
    parts, built, in_fp8 = run_ranks(1, paired, RunConfig.model_validate(tree))[0]
    assert built == 1
    *partial, found = parts
    row = found.row_of("megastable-fp8-off")
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


# The command
