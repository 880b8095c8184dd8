"""Which parts of a block's elementwise work own kernels compute (model/elementwise.py): those that fit the recipe, and
where the recipe leaves it open, those that are faster here.

A short measurement at the start times each part by itself, forward and backward, at the run's shapes, against what
torch.compile makes of the plain code (where blocks are compiled; else the plain code). What computes other numbers than
plain PyTorch is not used. The journal keeps what was measured, for the starts that resume the run.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from importlib.util import find_spec

import torch
from torch import Tensor

from megastable.config.tree import RunConfig
from megastable.model import elementwise
from megastable.model.attention import Rope, rope_table, rotate_pairs
from megastable.model.block_parts import norm_rows, swiglu
from megastable.model.elementwise import PARTS, Heads
from megastable.model.kernels import DTYPES, Kernels, Timing

WIDEST = 8192  # elements of a norm's row: of wider ones the backward pass spills registers
REPEATS = 10
GAIN = 0.98  # of the other's time: own kernels must take less
# Relative error in norm beyond which numbers are other ones, by bytes of an element: both ways round differently.
ALIKE = {2: 2**-5, 4: 1e-4}


def choose_parts(config: RunConfig, device: torch.device) -> tuple[tuple[str, ...], list[str]]:
    """The parts that own kernels can compute, if the recipe wants them, and why they are not those it names."""
    wanted, refusals = config.kernels.elementwise, refuse_parts(config, device)
    if wanted == "torch" or (wanted == "auto" and config.run.deterministic):
        return (), []
    possible_parts = tuple(part for part in PARTS if part not in refusals)
    if wanted == "auto":
        return possible_parts, []
    reasons = dict.fromkeys(refusals.values())
    return possible_parts, [
        f"kernels.elementwise=triton: {reason}; PyTorch computes "
        f"{' and '.join(part for part in PARTS if refusals.get(part) == reason)}"
        for reason in reasons
    ]


def refuse_parts(config: RunConfig, device: torch.device) -> dict[str, str]:
    """By part that own kernels cannot compute: why."""
    m = config.model
    if device.type != "cuda":
        return dict.fromkeys(PARTS, "own kernels compute on GPUs only")
    if find_spec("triton") is None:
        return dict.fromkeys(PARTS, "triton is not installed")
    if config.parallel.zero == 3:
        return dict.fromkeys(PARTS, "ZeRO 3 gathers weights for modules, which own kernels pass by")
    part_refusals = {}
    if m.qk_norm == "full":
        part_refusals["heads"] = "model.qk_norm=full norms all heads together"
    elif m.qkv_bias:
        part_refusals["heads"] = "model.qkv_bias lies between the product and the heads"
    elif config.parallel.context > 1 and not config.parallel.is_ring:
        part_refusals["heads"] = "context parallelism exchanges heads before they are rotated"
    if m.norms != "before":
        part_refusals["norms"] = f"model.norms={m.norms} has norms elsewhere than before attention and MLP"
    elif m.dropout or m.depth_ratio != 1:
        part_refusals["norms"] = (
            "dropout, or muP's factor of depth, lies between MLP or attention and the residual"
        )
    elif m.hidden > WIDEST:
        part_refusals["norms"] = f"rows of over {WIDEST:,} elements do not fit the registers of a program"
    if m.activation != "silu" or m.swiglu_clamp is not None:
        part_refusals["swiglu"] = "the activation is not SwiGLU without a clamp"
    if config.precision.fp8 is not None:
        fp8_reason = "modules for FP8 may hold the norms and SwiGLU"
        part_refusals |= {part: fp8_reason for part in ("norms", "swiglu") if part not in part_refusals}
    return part_refusals


@dataclass(frozen=True)
class Case:
    """One part at some shape: what own kernels and plain code make of `inputs`."""

    own: Callable[..., tuple[Tensor, ...]]
    plain: Callable[..., tuple[Tensor, ...]]
    inputs: tuple[Tensor, ...]

    def differentiate(self, compute: Callable[..., tuple[Tensor, ...]]) -> list[Tensor]:
        """Results, and the gradients of `inputs`, for upstream gradients that are the results themselves."""
        results = compute(*self.inputs)
        gradients = torch.autograd.grad(results, self.inputs, [result.detach() for result in results])
        return [*(result.detach() for result in results), *gradients]


def make_case(part: str, config: RunConfig, device: torch.device) -> Case:
    """A part at the shapes of a micro-batch on this rank, with drawn numbers."""
    m, p = config.model, config.parallel
    generator = torch.Generator(device).manual_seed(0)
    s, b = m.sequence_length // p.context, config.train.micro_batch

    def draw(*shape: int) -> Tensor:
        drawn = torch.randn(shape, generator=generator, device=device, dtype=DTYPES[config.precision.kind])
        return drawn.requires_grad_()

    match part:
        case "heads":
            return _make_heads(config, draw, s, b)
        case "norms":
            return _make_norms(config, draw, (s // p.tensor if p.sequence else s, b, m.hidden))
    gate_up = draw(s, b, 2 * m.ffn_width // p.tensor)
    return Case(lambda given: (elementwise.swiglu(given),), lambda given: (swiglu(given),), (gate_up,))


def _make_heads(config: RunConfig, draw: Callable[..., Tensor], s: int, b: int) -> Case:
    m, tensor_size = config.model, config.parallel.tensor
    width, q_heads, k_heads = m.head_width, m.heads // tensor_size, m.key_value_heads // tensor_size
    qkv = draw(s, b, (q_heads + 2 * k_heads) * width)
    cos, sin = (table[:, None, None] for table in rope_table(s, Rope.from_config(m), qkv.device))
    heads = Heads(q_heads, k_heads, m.norm_eps, m.zero_centered_norms)

    def rotate(given: Tensor, *weights: Tensor) -> tuple[Tensor, ...]:
        both_weights = (weights[0], weights[1]) if weights else None
        return elementwise.rotate_heads(given, both_weights, cos, sin, heads)

    def rotate_plainly(given: Tensor, *weights: Tensor) -> tuple[Tensor, ...]:
        *q_and_k, v = given.view(s, b, -1, width).split((q_heads, k_heads, k_heads), dim=2)
        if weights:
            options = heads.eps, heads.centered
            q_and_k = [norm_rows(x, weight, *options) for x, weight in zip(q_and_k, weights, strict=True)]
        return *(rotate_pairs(x, cos, sin) for x in q_and_k), v

    return Case(rotate, rotate_plainly, (qkv, *(draw(width) for _ in range(2 if m.qk_norm else 0))))


def _make_norms(config: RunConfig, draw: Callable[..., Tensor], shape: tuple[int, int, int]) -> Case:
    """As in a block, whose attention is left out."""
    options = config.model.norm_eps, config.model.zero_centered_norms

    def norm(x: Tensor, y: Tensor, first: Tensor, second: Tensor) -> tuple[Tensor, ...]:
        x, normed_x = elementwise.norm_stream(x, first, *options)
        return normed_x, *elementwise.add_and_norm(x, y, second, *options)

    def norm_plainly(x: Tensor, y: Tensor, first: Tensor, second: Tensor) -> tuple[Tensor, ...]:
        total = x + y
        return norm_rows(x, first, *options), total, norm_rows(total, second, *options)

    return Case(norm, norm_plainly, (draw(*shape), draw(*shape), draw(shape[-1]), draw(shape[-1])))


def find_error(case: Case) -> float:
    """The largest relative error in norm of a result or gradient of own kernels, against plain code in fp32."""
    found_tensors = case.differentiate(case.own)
    wide_inputs = tuple(given.detach().float().requires_grad_() for given in case.inputs)
    # Upstream gradients are results, which are rounded here only: that is a part of the error.
    wanted_tensors = replace(case, inputs=wide_inputs).differentiate(case.plain)
    errors = [
        float((found - wanted).norm() / wanted.norm().clamp_min(1e-30))
        for found, wanted in zip(found_tensors, wanted_tensors, strict=True)
    ]
    return max(error if error == error else float("inf") for error in errors)


def time_case(case: Case, compute: Callable[..., tuple[Tensor, ...]], device: torch.device) -> float:
    """Milliseconds forward and backward on `device`, whose queue is kept full; the first three calls, which compile,
    do not count."""
    for _ in range(3):
        case.differentiate(compute)
    begin = _read_clock(device)
    for _ in range(REPEATS):
        case.differentiate(compute)
    return (_read_clock(device) - begin) / REPEATS * 1000


def _read_clock(device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


def measure_part(
    part: str, kernels: Kernels, config: RunConfig, device: torch.device, earlier: Sequence[Timing]
) -> Timing:
    """What own kernels are worth here; what an earlier start has measured at the same place, unless they fail now."""
    case = make_case(part, config, device)
    device_name = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
    shapes = ", ".join(" x ".join(map(str, given.shape)) for given in case.inputs)
    dtype_name = str(case.inputs[0].dtype).removeprefix("torch.")
    compiled_text = "compiled" if kernels.compile else "not compiled"
    place = f"{device_name} with torch {torch.__version__}, {compiled_text}, {dtype_name} {shapes}"
    known_timing = next(
        (known for known in reversed(earlier) if (known.part, known.place) == (part, place)), None
    )
    if known_timing is not None and not is_faster(known_timing):
        return known_timing
    try:
        if (error := find_error(case)) > ALIKE[case.inputs[0].element_size()]:
            fault_text = (
                f"compute other numbers than PyTorch here, relative error {error:.2g} (please report it)"
            )
            return Timing(part, place, fault=fault_text)
        if known_timing is not None:
            return known_timing
        plain = torch.compile(case.plain, dynamic=False) if kernels.compile else case.plain
        own_time, plain_time = (time_case(case, compute, device) for compute in (case.own, plain))
        return Timing(part, place, own_time, plain_time)
    except Exception as error:
        # A compiler of kernels may raise anything; the run has others.
        first_line = (str(error).splitlines() or [""])[0]
        return Timing(part, place, fault=f"do not work here ({type(error).__name__}: {first_line[:200]})")


def is_faster(timing: Timing) -> bool:
    """Whether own kernels are to compute the part."""
    return not timing.fault and timing.own_time < GAIN * timing.plain_time


def keep_faster_parts(
    kernels: Kernels, config: RunConfig, device: torch.device, earlier: Sequence[Timing] = ()
) -> Kernels:
    """`kernels` with those own parts that are right and faster on this device, if the recipe leaves it open.

    earlier: what starts of the run have measured, the newest last. It holds for the same device, software and shapes:
    by the clock a resume could take other kernels, which round differently.
    """
    if config.kernels.elementwise != "auto" or not kernels.elementwise:
        return kernels
    timings = tuple(measure_part(part, kernels, config, device, earlier) for part in kernels.elementwise)
    notes = list(kernels.notes)
    for timing in timings:
        begin_text = f"kernels.elementwise=auto: own kernels for {timing.part}"
        known_places = [known.place for known in earlier if known.part == timing.part]
        if timing.fault:
            notes.append(f"{begin_text} {timing.fault}; PyTorch computes {timing.part}")
        if known_places and timing.place not in known_places:
            notes.append(
                f"{begin_text} are measured again, on {timing.place}: earlier on {known_places[-1]}. Where the choice "
                "is another one, so are the last bits"
            )
    kept_parts = tuple(timing.part for timing in timings if is_faster(timing))
    return replace(kernels, elementwise=kept_parts, measured=timings, notes=tuple(notes))
