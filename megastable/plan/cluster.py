"""What a cluster is: its GPUs, their memory and peaks, the links between them, its price. Pure; without torch.

    cluster = load("launch/clusters/h100.yaml")

`time.py` makes seconds of it. Rates are those of data sheets; what training reaches of them is in `Efficiency`, the
same numbers whatever the model, so that a prediction says something of a run that nobody has made.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, NonNegativeFloat, PositiveFloat, PositiveInt, ValidationError, model_validator
from pydantic_core import ErrorDetails

from megastable.base.errors import ConfigError
from megastable.config.recipe import find, read_yaml
from megastable.config.section import Section

Share = Field(gt=0.0, le=1.0)
Tera = Annotated[float, Field(gt=0.0, le=1e12)]  # somebody who writes FLOP/s or byte/s is told


class Peak(Section):
    """Dense TFLOP/s of a GPU by precision. None: it cannot compute in it."""

    bf16: Tera  # and fp16
    fp8: Tera | None = None
    fp32: Tera | None = None


class Link(Section):
    """What a GPU can send in one direction while it receives as much.

    latency_us: of a message between two neighbours, as a collective pays it once a round.
    """

    gb_per_second: PositiveFloat
    latency_us: NonNegativeFloat


class Efficiency(Section):
    """What is reached of the peaks.

    products, products_fp8: of large matrix products. The fastest that anybody found among many shapes: A100 268 of 312
    TFLOP/s, H100 792 of 989 (S. Bekman, Machine Learning Engineering, "Maximum Achievable Matmul FLOPS"); H200 alike.
    In FP8 about 1,400 of 1,979, and of a B200, are less well known. GPUs lower their clocks under such load.
    sustained: of that, in training, where shapes are what they are, operations wait for others, and clocks stay low.
    The one number that was chosen so that published runs come out right (published.py), the same for all GPUs.
    half_size: a product whose shortest side has so many elements reaches half: the ends of each weigh more, and tiles
    are left empty. At 2,048, the tokens of many a micro-batch, it reaches 94 %. An estimate.
    attention: of the 16-bit peak, of the FLOPs that a causal model needs, forward and backward: FlashAttention-2
    (arXiv:2307.08691, figures 4 to 6) 150 to 190 of 312, FlashAttention-3 (arXiv:2407.08608, figures 5 and 6) 350 to
    550 of 989, at 2,048 to 8,192 tokens.
    memory, streams: of the bandwidth, by the elementwise work of blocks, and by the sums of gradients and the update,
    which are long vectors: copying takes 3.0 of 3.35 TB/s of an H100; kernels with reductions in them take less.
    host, network: of the links' rates, by large collectives (nccl-tests): about 360 of 450 GB/s inside of a DGX H100,
    40 to 45 of 50 GB/s over 400 Gb/s InfiniBand.
    overlap: of communication that DeepSpeed hides behind computing where it can (ZeRO 2 and 3). The rest is seen: both
    need the same memory and multiprocessors. An estimate.
    """

    products: float = Share
    products_fp8: float = Share
    sustained: float = Share
    half_size: NonNegativeFloat = 128.0
    attention: float = Share
    memory: float = Share
    streams: float = Field(default=0.85, gt=0.0, le=1.0)
    host: float = Share
    network: float = Share
    overlap: float = Share


class ClusterConfig(Section):
    """One kind of GPU in hosts that are all alike.

    reserve_gib: of a GPU's memory that training cannot have: CUDA context, NCCL's buffers, fragmentation.
    kernel_us: the least that one operation takes, however little it computes.
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


def load(path: str | Path) -> ClusterConfig:
    """Read a cluster's description, from the working directory or else from the project's.

    Raises ConfigError that names the file, the keys and what is wrong with each.
    """
    found = find(path)
    if not found.exists():
        raise ConfigError(
            f"{path}: no such description of a cluster; the ones that come along are in launch/clusters/"
        )
    try:
        return ClusterConfig.model_validate(read_yaml(found))
    except ValidationError as error:
        problems = "\n".join(f"  {_explain(detail)}" for detail in error.errors())
        raise ConfigError(f"{found}:\n{problems}") from None


def _explain(detail: ErrorDetails) -> str:
    key = ".".join(str(part) for part in detail["loc"])
    if detail["type"] == "missing":
        return f"{key}: missing; see launch/clusters/h100.yaml for all keys"
    if detail["type"] == "extra_forbidden":
        return f"{key}: unknown key; launch/clusters/h100.yaml has all that there are"
    message = detail["msg"].removeprefix("Value error, ")
    return f"{key}={detail['input']!r}: {message}" if key else message
