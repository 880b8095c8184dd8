"""Compare the predicted step time with published runs on thousands of GPUs. Pure; without torch.

    python -m megastable.plan.published                 # a table in Markdown

One set of efficiencies for each kind of GPU (launch/clusters/) serves all rows. `sure` is False if the publication
leaves something important open; the note says what.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from megastable.config.tree import RunConfig
from megastable.model.flops import flops_per_token
from megastable.parallel.layout import Layout
from megastable.plan.cluster import load
from megastable.plan.time import DEEPSPEED, Others, StepTime, step_time

KORTHIKANTI = "arXiv:2205.05198, tables 3 and 5"
NARAYANAN = "arXiv:2104.04473, table 1"
LLAMA = "arXiv:2407.21783, table 4"
FOUNDRY = "mosaicml/llm-foundry, scripts/train/benchmarking/README.md"
NEMO = "NVIDIA NeMo 24.07, performance summary"
BRIDGE = "NVIDIA Megatron Bridge, 25.11 NeMo container, performance summary"


@dataclass(frozen=True)
class Published:
    """A run and its publication's figures: seconds a step, or what they follow from.

    model, train, parallel, precision: of a RunConfig. tokens_a_gpu: per second. tflops: per GPU, where `counted` is the
    publication's FLOPs of a step.
    """

    name: str
    source: str
    cluster: str
    gpus: int
    model: Mapping[str, Any]
    train: Mapping[str, Any]
    parallel: Mapping[str, Any] = field(default_factory=dict)
    precision: Mapping[str, Any] = field(default_factory=dict)
    others: Others = DEEPSPEED
    seconds: float | None = None
    tokens_a_gpu: float | None = None
    tflops: float | None = None
    counted: float | None = None
    sure: bool = True
    note: str = ""

    @property
    def config(self) -> RunConfig:
        tree = {
            "model": self.model,
            "train": self.train,
            "parallel": self.parallel,
            "precision": self.precision,
        }
        return RunConfig.model_validate(tree)

    @property
    def layout(self) -> Layout:
        p = self.config.parallel
        return Layout(p.tensor, p.pipeline, self.gpus // (p.tensor * p.pipeline), p.context)

    @property
    def measured(self) -> float:
        """Seconds per step."""
        if self.seconds is not None:
            return self.seconds
        tokens = self.config.train.global_batch * self.config.model.sequence_length
        if self.tokens_a_gpu is not None:
            return tokens / (self.tokens_a_gpu * self.gpus)
        assert self.tflops is not None
        counted = self.counted or tokens * flops_per_token(self.config.model, True)
        return counted / (self.tflops * 1e12 * self.gpus)

    def predicted(self) -> StepTime:
        return step_time(
            self.config, self.layout, load(f"launch/clusters/{self.cluster}.yaml"), others=self.others
        )


def _gpt(layers: int, hidden: int, heads: int) -> dict[str, Any]:
    """GPT-3's shape as ours: a SwiGLU of 8/3 the width has as many weights as an MLP of 4 times the width."""
    ffn = -(-8 * hidden // 3 // 16) * 16
    sizes = {"layers": layers, "hidden": hidden, "heads": heads, "ffn": ffn}
    return sizes | {"sequence_length": 2048, "vocab_size": 51200, "qk_norm": False, "tied": True}


def _counted(layers: int, hidden: int, batch: int) -> float:
    """FLOPs of a step as arXiv:2104.04473 counts them (section 5.1): recomputation included."""
    s, v = 2048, 51200
    return 96 * batch * s * layers * hidden**2 * (1 + s / (6 * hidden) + v / (16 * layers * hidden))


def _llama(layers: int, hidden: int, heads: int, ffn: int, **rest: Any) -> dict[str, Any]:
    sizes = {"layers": layers, "hidden": hidden, "heads": heads, "ffn": ffn, "qk_norm": False}
    return sizes | {"vocab_size": 128256, "sequence_length": 8192, "kv_heads": 8} | rest


def _batch(samples: int, micro: int) -> dict[str, int]:
    return {"global_batch": samples, "micro_batch": micro}


# Sizes of arXiv:2205.05198: layers, hidden, heads, pipeline, virtual stages, batch, micro-batch, and the two times.
SHAPES = [
    ("22B", 48, 6144, 64, 1, 1, 4, 4, 1.42, 1.10),
    ("175B", 96, 12288, 96, 8, 3, 64, 1, 18.13, 13.75),
    ("530B", 105, 20480, 128, 35, 3, 280, 1, 49.05, 37.83),
    ("1T", 128, 25600, 160, 64, 1, 512, 1, 94.42, 71.49),
]


def _korthikanti() -> Iterator[Published]:
    for name, layers, hidden, heads, pipeline, virtual, batch, micro, full, best in SHAPES:
        layout = {"tensor": 8, "pipeline": pipeline}
        for seconds, how in (
            (full, {"recompute": "full"}),
            (best, {"recompute": "selective", "sequence": True}),
        ):
            yield Published(
                f"GPT {name}, {', '.join(str(value) for value in how.values() if value is not True)} recomputation",
                KORTHIKANTI, "a100", 8 * pipeline, _gpt(layers, hidden, heads), _batch(batch, micro), layout | how,
                others=Others(virtual, summing=True, scores=True), seconds=seconds,
            )  # fmt: skip


def _narayanan() -> Iterator[Published]:
    rows = [
        ("18.4B", 40, 6144, 48, 8, 1, 256, 1024, 4, 1, 135.0),
        ("39.1B", 48, 8192, 64, 8, 2, 512, 1536, 2, 1, 138.0),
        ("145.6B", 80, 12288, 96, 8, 8, 1536, 2304, 1, 2, 148.0),
        ("529.6B", 105, 20480, 128, 8, 35, 2520, 2520, 1, 3, 163.0),
    ]
    for name, layers, hidden, heads, tensor, pipeline, gpus, batch, micro, virtual, tflops in rows:
        yield Published(
            f"GPT {name}", NARAYANAN, "a100", gpus, _gpt(layers, hidden, heads), _batch(batch, micro),
            {"tensor": tensor, "pipeline": pipeline, "recompute": "full"}, others=Others(virtual, scores=True),
            tflops=tflops, counted=_counted(layers, hidden, batch), sure=False,
            note=f"micro-batch {micro} and {virtual} virtual stages assumed",
        )  # fmt: skip


def _foundry() -> Iterator[Published]:
    rows = [
        ("1B", 24, 2048, 16, 8, 112, 14, "none", 45455),
        ("3B", 32, 2560, 20, 16, 480, 10, "none", 24142),
        ("7B", 32, 4096, 32, 8, 48, 6, "none", 10643),
        ("13B", 40, 5120, 40, 64, 128, 2, "none", 4800),
        ("30B", 48, 7168, 56, 32, 1344, 14, "full", 2308),
        ("70B", 80, 8192, 64, 64, 2048, 8, "full", 1039),
    ]
    for name, layers, hidden, heads, gpus, batch, micro, recompute, tokens in rows:
        yield Published(
            f"MPT {name}", FOUNDRY, "h100", gpus, _gpt(layers, hidden, heads) | {"vocab_size": 50368},
            _batch(batch, micro), {"zero": 3, "recompute": recompute}, others=Others(fused=True), tokens_a_gpu=tokens,
        )  # fmt: skip


def _llama3() -> Iterator[Published]:
    for gpus, tflops in ((8192, 430.0), (16384, 400.0)):
        yield Published(
            "Llama 3 405B", LLAMA, "h100", gpus, _llama(126, 16384, 128, 53248), _batch(2048, 1),
            {"tensor": 8, "pipeline": 16, "sequence": True}, others=Others(8, ("data",), summing=True),
            tflops=tflops, sure=False,
            note="one of 128 layers, ends included, a virtual stage; FLOPs with causal attention assumed",
        )  # fmt: skip


def _nemo() -> Iterator[Published]:
    """FP8, delayed scaling in 24.07 and current scaling later; tensor-parallel messages overlap with the products."""
    seven = _llama(32, 4096, 32, 11008, vocab_size=32000, sequence_length=4096, kv_heads=None)
    rows: list[tuple[Any, ...]] = [
        ("GPT-3 5B", NEMO, 64, _gpt(24, 4096, 32), 2048, 4, {}, 1, 23574),
        ("GPT-3 175B", NEMO, 512, _gpt(96, 12288, 96), 2048, 2, {"tensor": 4, "pipeline": 8}, 6, 832),
        ("Llama 2 7B", NEMO, 8, seven, 128, 1, {}, 1, 16634),
        ("Llama 2 70B", NEMO, 64, _llama(80, 8192, 64, 28672, vocab_size=32000, sequence_length=4096), 128, 1,
         {"tensor": 4, "pipeline": 4}, 20, 1717),
        ("Llama 3 8B", BRIDGE, 8, _llama(32, 4096, 32, 14336), 128, 1, {"zero": 3}, 1, 14451),
        ("Llama 3 70B", BRIDGE, 64, _llama(80, 8192, 64, 28672), 128, 1, {"tensor": 4, "pipeline": 8}, 5, 1602),
        ("Llama 3.1 405B", BRIDGE, 1024, _llama(126, 16384, 128, 53248), 512, 1,
         {"tensor": 8, "pipeline": 8, "context": 2}, 8, 292),
    ]  # fmt: skip
    for name, source, gpus, model, batch, micro, layout, virtual, tokens in rows:
        recipe = "delayed" if source == NEMO else "current"
        parallel = layout | ({"sequence": True} if "tensor" in layout else {})
        yield Published(
            f"{name}, FP8 {recipe}", source, "h100", gpus, model, _batch(batch, micro), parallel,
            {"fp8": {"recipe": recipe}}, Others(virtual, ("data", "tensor", "context"), True, True),
            tokens_a_gpu=tokens, sure=False, note="what is hidden, and how well, is not said",
        )  # fmt: skip


RUNS: Sequence[Published] = (*_korthikanti(), *_narayanan(), *_foundry(), *_llama3(), *_nemo())


def table(runs: Sequence[Published] = RUNS) -> str:
    """Markdown table: predicted beside published, with the error, and the parts of the step."""
    rows = [
        "| run | GPUs | layout | published, s | predicted, s | error | source |",
        "|---|---|---|---|---|---|---|",
    ]
    errors = []
    for run in runs:
        found, lay, p = run.predicted(), run.layout, run.config.parallel
        errors.append(found.seconds / run.measured - 1)
        axes = [("T", lay.tensor), ("P", lay.pipeline), ("C", lay.context), ("D", lay.data)]
        where = " ".join(f"{axis}{size}" for axis, size in axes if size > 1)
        where += f" ZeRO {p.zero}" if p.zero > 1 else ""
        note = f"; {run.note}" if run.note else ""
        rows.append(
            f"| {run.name} | {run.gpus} {run.cluster} | {where} | {run.measured:.2f} | {found.seconds:.2f} | "
            f"{errors[-1]:+.0%} | {run.source}{note} |"
        )
    sizes = [abs(e) for e in errors]
    rows.append(
        f"\n{len(runs)} runs: error {statistics.mean(errors):+.1%} on average, {statistics.median(sizes):.1%} in the "
        f"median of its size, at most {max(sizes):.0%}."
    )
    return "\n".join(rows)


if __name__ == "__main__":
    print(table())
