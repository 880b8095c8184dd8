"""Compare the predicted step time with published runs on thousands of GPUs: published.yaml. Pure; without torch.

    python -m megastable_tools.plan.published                 # a table in Markdown

One set of efficiencies for each kind of GPU (launch/clusters/) serves all rows.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import yaml

from megastable.config.tree import RunConfig
from megastable.model.flops import flops_per_token
from megastable.parallel.layout import Layout
from megastable_tools.plan.cluster import load
from megastable_tools.plan.time import Others, StepTime, step_time

SECTIONS = ("model", "train", "parallel", "precision")  # of a RunConfig


@dataclass(frozen=True)
class Published:
    """A run and its publication's figures: seconds a step, or what they follow from. The file says what each means."""

    name: str
    source: str
    cluster: str
    gpus: int
    model: Mapping[str, Any]
    train: Mapping[str, Any]
    parallel: Mapping[str, Any] = field(default_factory=dict)
    precision: Mapping[str, Any] = field(default_factory=dict)
    others: Mapping[str, Any] = field(default_factory=dict)
    seconds: float | None = None
    tokens_a_gpu: float | None = None
    tflops: float | None = None
    counted: float | None = None
    sure: bool = True
    note: str = ""

    @property
    def config(self) -> RunConfig:
        return RunConfig.model_validate({section: getattr(self, section) for section in SECTIONS})

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
        cluster = load(f"launch/clusters/{self.cluster}.yaml")
        return step_time(self.config, self.layout, cluster, others=Others(**self.others))


@cache
def read_runs() -> tuple[Published, ...]:
    """The runs of published.yaml, each with what its publication says of all of them."""
    found = list[Published]()
    for publication in yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text(encoding="utf-8")):
        runs = publication.pop("runs")
        for run in runs:
            shared = {
                key: value | run.get(key, {}) if isinstance(value, dict) else value
                for key, value in publication.items()
            }
            found.append(Published(**(run | shared)))
    return tuple(found)


def table(runs: Sequence[Published]) -> str:
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
    print(table(read_runs()))
