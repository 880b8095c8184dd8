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
from megastable.model.sizes import flops_per_token
from megastable.parallel.layout import Layout
from megastable_tools.plan.cluster import load_cluster
from megastable_tools.plan.time import Others, StepTime, step_time

SECTIONS = ("model", "train", "parallel", "precision", "optimizer")  # of a RunConfig


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
    optimizer: Mapping[str, Any] = field(default_factory=dict)
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
        return Layout(
            p.tensor, p.pipeline, self.gpus // (p.tensor * p.pipeline), p.context, p.replicas, p.expert
        )

    @property
    def measured(self) -> float:
        """Seconds per step."""
        if self.seconds is not None:
            return self.seconds
        step_tokens = self.config.train.global_batch * self.config.model.sequence_length
        if self.tokens_a_gpu is not None:
            return step_tokens / (self.tokens_a_gpu * self.gpus)
        assert self.tflops is not None
        counted_flops = self.counted or step_tokens * flops_per_token(self.config.model, True)
        return counted_flops / (self.tflops * 1e12 * self.gpus)

    def predict_step(self) -> StepTime:
        cluster_config = load_cluster(f"launch/clusters/{self.cluster}.yaml")
        return step_time(self.config, self.layout, cluster_config, others=Others(**self.others))


@cache
def read_runs() -> tuple[Published, ...]:
    """The runs of published.yaml, each with what its publication says of all of them."""
    published_runs = list[Published]()
    for run_publication in yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text(encoding="utf-8")):
        publication_runs = run_publication.pop("runs")
        for published_run in publication_runs:
            shared_values = {
                run_key: value | published_run.get(run_key, {}) if isinstance(value, dict) else value
                for run_key, value in run_publication.items()
            }
            published_runs.append(Published(**(published_run | shared_values)))
    return tuple(published_runs)


def make_published_table(runs: Sequence[Published]) -> str:
    """Markdown table: predicted beside published, with the error, and the parts of the step."""
    table_rows = [
        "| run | GPUs | layout | published, s | predicted, s | error | source |",
        "|---|---|---|---|---|---|---|",
    ]
    errors = []
    for run in runs:
        found, lay, parallel_config = run.predict_step(), run.layout, run.config.parallel
        errors.append(found.seconds / run.measured - 1)
        axis_sizes = [
            ("T", lay.tensor), ("P", lay.pipeline), ("C", lay.context), ("E", lay.expert), ("D", lay.data),
        ]  # fmt: skip
        where = " ".join(f"{axis_letter}{size}" for axis_letter, size in axis_sizes if size > 1)
        where += f" ZeRO {parallel_config.zero}" if parallel_config.zero > 1 else ""
        run_note = f"; {run.note}" if run.note else ""
        table_rows.append(
            f"| {run.name} | {run.gpus} {run.cluster} | {where} | {run.measured:.2f} | {found.seconds:.2f} | "
            f"{errors[-1]:+.0%} | {run.source}{run_note} |"
        )
    sizes = [abs(relative_error) for relative_error in errors]
    table_rows.append(
        f"\n{len(runs)} runs: error {statistics.mean(errors):+.1%} on average, {statistics.median(sizes):.1%} in the "
        f"median of its size, at most {max(sizes):.0%}."
    )
    return "\n".join(table_rows)


if __name__ == "__main__":
    print(make_published_table(read_runs()))
