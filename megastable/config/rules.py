"""Checks rules between keys: impossible combinations, and those that DeepSpeed is known to get wrong."""

from __future__ import annotations

from typing import TYPE_CHECKING

from megastable.config import warmups

if TYPE_CHECKING:
    from megastable.config.tree import Fp8Config, RunConfig

LINEARS = ("attention.qkv", "attention.out", "mlp.gate_up", "mlp.down")  # of a block, that FP8 can compute


def impossible(c: RunConfig) -> list[str]:
    """Impossible combinations, and those that DeepSpeed 0.19.8 gets wrong; each with its key and its remedy."""
    m, p, bad = c.model, c.parallel, []
    for key, size in (("heads", m.heads), ("kv_heads", m.key_value_heads), ("ffn", m.ffn_width)):
        if size % p.tensor:
            bad.append(f"parallel.tensor={p.tensor} does not divide model.{key}={size}: change one of them")
    if m.vocab_multiple % p.tensor:
        bad.append(
            f"parallel.tensor={p.tensor} does not divide model.vocab_multiple={m.vocab_multiple}: the padded "
            "vocabulary is shared out by it; set vocab_multiple to a multiple of parallel.tensor"
        )
    if p.context > 1 and m.heads % (p.tensor * p.context):
        bad.append(
            f"parallel.context={p.context} x parallel.tensor={p.tensor} does not divide model.heads={m.heads}: "
            "attention shares the heads out over both; change one of them"
        )
    if m.sequence_length % p.context:
        bad.append(
            f"parallel.context={p.context} does not divide model.sequence_length={m.sequence_length}: change one of "
            "them"
        )
    if p.pipeline > m.layers:
        bad.append(
            f"parallel.pipeline={p.pipeline} needs at least one block a stage, and model.layers={m.layers}: "
            "use fewer stages"
        )
    if p.sequence and p.tensor == 1:
        bad.append(
            "parallel.sequence shares the sequence out over the tensor group: set parallel.tensor above 1"
        )
    if p.sequence and m.sequence_length % p.context == 0 and m.sequence_length // p.context % p.tensor:
        of = f" / parallel.context={p.context}" if p.context > 1 else ""
        bad.append(
            f"parallel.sequence: parallel.tensor={p.tensor} does not divide "
            f"model.sequence_length={m.sequence_length}{of}: change one of them"
        )
    if p.pipeline > 1 and p.zero > 1:
        bad.append(
            f"parallel.zero={p.zero} with parallel.pipeline={p.pipeline}: DeepSpeed's pipeline keeps whole gradients; "
            "use parallel.zero=1 or parallel.pipeline=1"
        )
    if c.precision.fp8 is not None:
        bad += _impossible_fp8(c, c.precision.fp8)
    if p.zero == 0:
        bad.append(
            "parallel.zero=0: DeepSpeed's wrappers without ZeRO have no gradient norm (fp32), sum in bf16 (bf16), "
            "or divide by a loss scale that they never multiplied by (fp16); use parallel.zero=1, which costs nothing "
            "on one data-parallel rank"
        )
    if c.train.global_batch % c.train.micro_batch:
        bad.append(
            f"train.micro_batch={c.train.micro_batch} does not divide train.global_batch={c.train.global_batch}: "
            "change one of them"
        )
    bad += warmups.impossible(c.train, m.sequence_length)
    if c.optimizer.betas[0] >= 1 or c.optimizer.betas[1] >= 1:
        bad.append(f"optimizer.betas={list(c.optimizer.betas)}: both must be below 1")
    return bad


def _impossible_fp8(c: RunConfig, fp8: Fp8Config) -> list[str]:
    bad, layers = [], c.model.layers
    if c.precision.kind == "fp16":
        bad.append(
            "precision.fp8 with precision.kind=fp16: sums of products of E4M3 numbers are beyond fp16's range; use "
            "precision.kind=bf16"
        )
    if fp8.keep_first + fp8.keep_last >= layers:
        bad.append(
            f"precision.fp8: keep_first={fp8.keep_first} and keep_last={fp8.keep_last} leave none of the {layers} "
            "blocks to FP8: lower them, or leave precision.fp8 out"
        )
    known = {f"blocks.{i}.{linear}" for i in range(layers) for linear in LINEARS}
    if unknown := sorted(set(fp8.keep) - known):
        bad.append(
            f"precision.fp8.keep: {', '.join(unknown)}: no such linear layer; name them like blocks.0.mlp.down, with "
            f"blocks.0 to blocks.{layers - 1} and {', '.join(LINEARS)}"
        )
    return bad
