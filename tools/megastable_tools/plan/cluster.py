"""Description of a cluster: its GPUs, their memory and peaks, the links between them, its price. Pure; without torch.

    cluster = load("launch/clusters/h100.yaml")

`time.py` turns it into seconds. Rates are from data sheets; `Efficiency` has the share that training reaches, with the
same numbers for all models, so that predictions extend to runs that were never measured.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, NonNegativeFloat, PositiveFloat, PositiveInt, ValidationError, model_validator
from pydantic_core import ErrorDetails

from megastable.base.errors import ConfigError
from megastable.config.recipe import find_recipe, list_shipped_files, read_yaml
from megastable_guard.section import Section

KNOWN_HEAD = 128  # the width of a head that `Efficiency.attention` is of
Share = Field(gt=0.0, le=1.0)
Tera = Annotated[float, Field(gt=0.0, le=1e12)]  # refuses values given in FLOP/s or byte/s


class Peak(Section):
    """Dense TFLOP/s of a GPU by precision. None: not supported."""

    bf16: Tera  # and fp16
    fp8: Tera | None = None
    fp32: Tera | None = None


class Link(Section):
    """A GPU's send rate in one direction, while it receives as much.

    latency_us: of a message between two neighbours, paid by a collective once per round.
    """

    gb_per_second: PositiveFloat
    latency_us: NonNegativeFloat


class Efficiency(Section):
    """The share of the peaks that is reached.

    products, products_fp8: of large matrix products. The fastest found among many shapes: A100 268 of 312 TFLOP/s, H100
    792 of 989 (S. Bekman, Machine Learning Engineering, "Maximum Achievable Matmul FLOPS"); H200 alike. The values for
    FP8 (about 1,400 of 1,979) and for a B200 are less certain. GPUs lower their clocks under such load. sustained: the
    share of that in training, with given shapes, dependent operations and low clocks. It was fitted to published runs
    (published.py), the same for all GPUs. half_size: shortest side, in elements, of a product that reaches half: its
    edges weigh more, and tiles stay empty. At 2,048, a common number of tokens in a micro-batch, it reaches 94 %. An
    estimate; of a Hopper GPU fitted to published runs, too. attention: of the 16-bit peak, of the FLOPs of a causal
    model, forward and backward, of heads of 128: FlashAttention-2 (arXiv:2307.08691, figures 4 to 6) 150 to 190 of 312,
    FlashAttention-3 (arXiv:2407.08608, figures 5 and 6) 350 to 550 of 989, at 2,048 to 8,192 tokens. half_head: a
    narrower head has as many exponentials for fewer FLOPs; the width at which they take as long as the products. Of
    these figures, cuDNN at 2,048 tokens: heads of 64 334 TFLOP/s forward and 334 backward, of 128 484 and 365 (backward
    by the ratio of a causal forward pass to a whole one, 334 to 395 and 484 to 617, of 395 and 465): 85 % of its speed.
    memory, streams: of the bandwidth, by the elementwise work of blocks, and by gradient sums and the update, which are
    long vectors: a copy reaches 3.0 of 3.35 TB/s on an H100; kernels with reductions reach less. host, network: of the
    links' rates, by large collectives (nccl-tests): about 360 of 450 GB/s inside a DGX H100, 40 to 45 of 50 GB/s over
    400 Gb/s InfiniBand. overlap: of the communication that DeepSpeed overlaps with computing where it can (ZeRO 2 and
    3). The rest costs time: both need the same memory and multiprocessors. An estimate.
    """

    products: float = Share
    products_fp8: float = Share
    sustained: float = Share
    half_size: NonNegativeFloat = 128.0
    attention: float = Share
    half_head: NonNegativeFloat = 27.0
    memory: float = Share
    streams: float = Field(default=0.85, gt=0.0, le=1.0)
    host: float = Share
    network: float = Share
    overlap: float = Share

    def rate_attention(self, head_width: int) -> float:
        """Share of the peak that attention with heads of this width reaches: of 128, and of wider ones, `attention`."""
        known_width = min(head_width, KNOWN_HEAD)
        return self.attention * (1 + self.half_head / KNOWN_HEAD) / (1 + self.half_head / known_width)


class ClusterConfig(Section):
    """One kind of GPU in identical hosts.

    reserve_gib: GPU memory that training cannot use: CUDA context, NCCL's buffers, fragmentation.
    kernel_us: minimum time of one operation, however small.
    """

    name: str
    device: Literal["gpu", "cpu"] = "gpu"
    gpus_per_host: PositiveInt = 8
    memory_gib: PositiveFloat
    reserve_gib: NonNegativeFloat = 4.0
    tflops: Peak
    memory_tb_per_second: Tera
    host: Link
    network: Link
    host_memory_gib: PositiveFloat
    dollars_per_gpu_hour: NonNegativeFloat
    efficiency: Efficiency
    kernel_us: NonNegativeFloat = 4.0

    @model_validator(mode="after")
    def _something_is_left(self) -> ClusterConfig:
        if self.reserve_gib >= self.memory_gib:
            raise ValueError(
                f"reserve_gib={self.reserve_gib:g} leaves nothing of memory_gib={self.memory_gib:g}: lower it"
            )
        return self


def load_cluster(path: str | Path) -> ClusterConfig:
    """Read a cluster's description, found as a recipe is (`recipe.find`).

    Raises ConfigError with the file, the keys and the problem of each.
    """
    found_file = find_recipe(path)
    if not found_file.exists():
        raise ConfigError(
            f"{path}: no such cluster description; these come along: {list_shipped_files('launch/clusters')}"
        )
    try:
        return ClusterConfig.model_validate(read_yaml(found_file))
    except ValidationError as error:
        problem_lines = "\n".join(f"  {_explain(error_detail)}" for error_detail in error.errors())
        raise ConfigError(f"{found_file}:\n{problem_lines}") from None


def _explain(detail: ErrorDetails) -> str:
    setting_key = ".".join(str(key_part) for key_part in detail["loc"])
    if detail["type"] in ("missing", "extra_forbidden"):
        problem = "missing" if detail["type"] == "missing" else "unknown key"
        return f"{setting_key}: {problem}; see launch/clusters/h100.yaml for all keys"
    error_message = detail["msg"].removeprefix("Value error, ")
    return f"{setting_key}={detail['input']!r}: {error_message}" if setting_key else error_message
