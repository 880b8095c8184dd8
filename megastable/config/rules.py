"""Checks rules between keys: impossible combinations, and those that DeepSpeed is known to get wrong."""

from __future__ import annotations

import json
from collections.abc import Iterator

from megastable.config.model import ModelConfig
from megastable.config.optimizers import OptimizerConfig
from megastable.config.training import Fp8Config, ParallelConfig, PrecisionConfig, TrainConfig

# An update of an element is about the learning rate.
ADAM_LIKE = ("adamw", "stable_adamw", "spam", "stable_spam")
LINEARS = (
    "attention.qkv",
    "attention.out",
    "mlp.gate_up",
    "mlp.down",
)  # of a dense block, that FP8 can compute


def list_linears(m: ModelConfig, block: int) -> tuple[str, ...]:
    """The linear layers of a block that FP8 can compute: `LINEARS`, or the experts' in place of the MLP's."""
    experts = m.experts_of(block)
    if experts is None:
        return LINEARS
    mlps = [f"mlp.experts.{number}" for number in range(experts.count)] + ["mlp.shared"] * bool(
        experts.shared
    )
    return (*LINEARS[:2], *(f"{mlp}.{part}" for mlp in mlps for part in ("gate_up", "down")))


def caps_logits(attention: str, device: str) -> bool:
    """Whether an attention kernel has model.attention_softcap on a device of this type."""
    return attention in ("reference", "blocked") or (attention == "sdpa" and device == "cuda")


def writes_scores(m: ModelConfig, segmented: bool) -> bool:
    """Whether ring attention writes scores out, where a fused kernel that has a causal mask and nothing else does not
    do. segmented: attention stays inside documents or pieces."""
    return segmented or m.attention_softcap is not None or m.window is not None


def find_impossible(
    m: ModelConfig, p: ParallelConfig, precision: PrecisionConfig, o: OptimizerConfig, train: TrainConfig
) -> Iterator[str]:
    """Impossible combinations, and those that DeepSpeed 0.19.8 gets wrong; each with its key and its remedy."""
    for size_key, key_size in (("heads", m.heads), ("kv_heads", m.key_value_heads), ("ffn", m.ffn_width)):
        if key_size % p.tensor:
            yield f"parallel.tensor={p.tensor} does not divide model.{size_key}={key_size}: change one of them"
    if m.experts is not None:
        yield from _impossible_experts(m, p, precision)
    if m.vocab_multiple % p.tensor:
        yield (
            f"parallel.tensor={p.tensor} does not divide model.vocab_multiple={m.vocab_multiple}: the padded "
            "vocabulary is shared out by it; set vocab_multiple to a multiple of parallel.tensor"
        )
    if p.context > 1 and not p.is_ring and m.heads % (p.tensor * p.context):
        yield (
            f"parallel.context={p.context} x parallel.tensor={p.tensor} does not divide model.heads={m.heads}: "
            "attention shares the heads out over both; change one of them, or set parallel.context_by=ring"
        )
    if p.is_ring and m.sequence_length % (2 * p.context):
        yield (
            f"parallel.context_by=ring: twice parallel.context={p.context} does not divide "
            f"model.sequence_length={m.sequence_length}: a rank has two chunks of every sample; change one of them"
        )
    elif m.sequence_length % p.context:
        yield (
            f"parallel.context={p.context} does not divide model.sequence_length={m.sequence_length}: change one of "
            "them"
        )
    if p.model_chunks > 1:
        yield from _impossible_chunks(p, m.layers)
    if p.pipeline > m.layers:
        yield (
            f"parallel.pipeline={p.pipeline} needs at least one block a stage, and model.layers={m.layers}: "
            "use fewer stages"
        )
    if p.sequence and p.tensor == 1:
        yield "parallel.sequence shares the sequence out over the tensor group: set parallel.tensor above 1"
    if p.sequence and m.sequence_length % p.context == 0 and m.sequence_length // p.context % p.tensor:
        context_text = f" / parallel.context={p.context}" if p.context > 1 else ""
        yield (
            f"parallel.sequence: parallel.tensor={p.tensor} does not divide "
            f"model.sequence_length={m.sequence_length}{context_text}: change one of them"
        )
    if p.tensor_overlap > 1 and not p.sequence:
        yield (
            f"parallel.tensor_overlap={p.tensor_overlap} cuts what goes along the sequence: set "
            "parallel.sequence=true, or leave it out"
        )
    elif m.sequence_length % (p.context * p.tensor) == 0:
        own_length = m.sequence_length // (p.context * p.tensor)
        if own_length % p.tensor_overlap:
            yield (
                f"parallel.tensor_overlap={p.tensor_overlap} does not divide the {own_length} tokens of a sample that "
                "are a tensor rank's (model.sequence_length / parallel.context / parallel.tensor): use fewer chunks"
            )
    if p.pipeline > 1 and p.zero > 1:
        yield (
            f"parallel.zero={p.zero} with parallel.pipeline={p.pipeline}: DeepSpeed's pipeline keeps whole gradients; "
            "use parallel.zero=1 or parallel.pipeline=1"
        )
    if p.expert > 1:
        yield from _impossible_expert_ranks(m, p, o)
    if p.replicas > 1:
        yield from _impossible_replicas(p, precision.kind, o)
    if p.schedule == "zero_bubble" and p.pipeline == 1:
        yield (
            "parallel.schedule=zero_bubble orders the passes of several stages: set parallel.pipeline above 1, or use "
            "parallel.schedule=1f1b"
        )
    if precision.fp8 is not None:
        yield from _impossible_fp8(precision.fp8, precision.kind, m)
    if p.zero == 0:
        yield (
            "parallel.zero=0: DeepSpeed's wrappers without ZeRO have no gradient norm (fp32), sum in bf16 (bf16), "
            "or divide by a loss scale that they never multiplied by (fp16); use parallel.zero=1, which costs nothing "
            "on one data-parallel rank"
        )
    if train.global_batch % train.micro_batch:
        yield (
            f"train.micro_batch={train.micro_batch} does not divide train.global_batch={train.global_batch}: "
            "change one of them"
        )
    yield from _impossible_warmups(train, m.sequence_length)
    yield from _impossible_optimizer(o)
    yield from _impossible_clipping(o, m, p, precision.kind)
    if o.qk_clip is not None and m.qk_norm:
        yield (
            f"optimizer.qk_clip={o.qk_clip:g} with model.qk_norm={json.dumps(m.qk_norm)}: queries and keys are normed "
            "after their weights, so scaling these has no effect, and the norm bounds the logits already; leave "
            "optimizer.qk_clip out, or set model.qk_norm=false"
        )
    if m.mup is not None and o.name not in ADAM_LIKE:
        yield (
            f"model.mup with optimizer.name={o.name}: its rates are those of Adam; use {', '.join(ADAM_LIKE)}, or "
            "leave model.mup out"
        )


def _impossible_experts(m: ModelConfig, p: ParallelConfig, precision: PrecisionConfig) -> Iterator[str]:
    if m.expert_width % p.tensor:
        yield (
            f"parallel.tensor={p.tensor} does not divide model.experts.ffn={m.expert_width}: change one of them"
        )
    if precision.fp8 is not None and precision.fp8.backend == "te":
        yield (
            "model.experts with precision.fp8.backend=te: Transformer Engine's layers take no part of the tokens; use "
            "precision.fp8.backend=emulated, or leave precision.fp8 out"
        )


def _impossible_expert_ranks(m: ModelConfig, p: ParallelConfig, o: OptimizerConfig) -> Iterator[str]:
    given = f"parallel.expert={p.expert}"
    if m.experts is None:
        yield f"{given} shares out experts, and the model has none: set model.experts, or parallel.expert=1"
    elif m.experts.count % p.expert:
        yield f"{given} does not divide model.experts.count={m.experts.count}: change one of them"
    if p.zero == 3:
        yield (
            f"{given} with parallel.zero=3, which shares every weight out over all data ranks; use parallel.zero=1 or "
            "2, or parallel.expert=1"
        )
    if p.replicas > 1:
        yield f"{given} with parallel.replicas={p.replicas}: leave one of them at 1"
    if o.name == "muon":
        yield (
            f"{given} with optimizer.name=muon: it shares matrices out over all data ranks, not those with the same "
            "experts; use another optimizer, or parallel.expert=1"
        )
    if o.clipping.kind == "worker":
        yield (
            f"{given} with optimizer.clipping=worker: the gradient of an expert is of all workers that send it "
            "tokens; use another clipping, or parallel.expert=1"
        )


def _impossible_chunks(p: ParallelConfig, layers: int) -> Iterator[str]:
    if p.pipeline == 1:
        yield (
            f"parallel.model_chunks={p.model_chunks} are chunks of the model on each of several stages: set "
            "parallel.pipeline above 1, or leave it out"
        )
    elif p.pipeline <= layers < p.pipeline * p.model_chunks:
        yield (
            f"parallel.model_chunks={p.model_chunks} x parallel.pipeline={p.pipeline} needs at least one block a "
            f"chunk, and model.layers={layers}: use fewer chunks, or fewer stages"
        )
    if p.schedule == "zero_bubble":
        yield (
            f"parallel.model_chunks={p.model_chunks} with parallel.schedule=zero_bubble: its order of weight gradients "
            "is that of one chunk a stage; leave one of the two out"
        )


def _impossible_replicas(p: ParallelConfig, precision: str, o: OptimizerConfig) -> Iterator[str]:
    if (p.zero, precision) != (1, "bf16"):
        yield (
            f"parallel.replicas={p.replicas} with parallel.zero={p.zero} and precision.kind={precision}: only ZeRO 1 "
            "in bf16 has sums that are made in steps; use parallel.zero=1 and precision.kind=bf16, or "
            "parallel.replicas=1"
        )
    if o.name == "muon":
        yield (
            f"parallel.replicas={p.replicas} with optimizer.name=muon: it shares matrices out over all data ranks "
            "as if each held another part of them; use another optimizer, or parallel.replicas=1"
        )


def _impossible_warmups(train: TrainConfig, full_length: int) -> Iterator[str]:
    """What is wrong with the warm-ups of a configuration, each with its remedy."""
    if (batch_warmup := train.batch_warmup) is not None:
        increment = batch_warmup.increment or batch_warmup.start
        if batch_warmup.start >= train.global_batch or (train.global_batch - batch_warmup.start) % increment:
            yield (
                f"train.batch_warmup: from start={batch_warmup.start} by {increment} the batch never grows to "
                f"train.global_batch={train.global_batch}: choose a start below it, and an increment that divides the "
                "difference"
            )
        elif batch_warmup.start % train.micro_batch or increment % train.micro_batch:
            yield (
                f"train.batch_warmup: train.micro_batch={train.micro_batch} does not divide "
                f"start={batch_warmup.start} and the increment of {increment}: change one of them"
            )
    if (sequence_warmup := train.sequence_warmup) is not None:
        length_ratio, left_over = divmod(full_length, sequence_warmup.start)
        if left_over or length_ratio < 2 or length_ratio & (length_ratio - 1):
            halved_lengths = [str(full_length >> i) for i in range(1, 8) if full_length % (1 << i) == 0]
            known_lengths = (
                f"one of {', '.join(halved_lengths)}"
                if halved_lengths
                else "another sequence length, which can be halved"
            )
            yield (
                f"train.sequence_warmup.start={sequence_warmup.start}: model.sequence_length={full_length} must "
                f"be start times a power of 2: choose {known_lengths}"
            )


def _impossible_optimizer(o: OptimizerConfig) -> Iterator[str]:
    if o.betas[0] >= 1 or o.betas[1] >= 1:
        yield f"optimizer.betas={list(o.betas)}: both must be below 1"
    if o.moments == "bf16" and not o.reads_key("moments"):
        yield (
            f"optimizer.moments=bf16 with optimizer.name={o.name}: only adamw keeps its moments in bf16; leave "
            "optimizer.moments out"
        )
    if o.momentum == 1:
        yield "optimizer.momentum=1: must be below 1"
    if o.momentum is not None and not o.reads_key("momentum"):
        yield f"optimizer.momentum={o.momentum:g} with optimizer.name={o.name}: only sgd and muon have it; leave it out"
    if o.name == "spam" and o.spam.warmup > o.spam.interval:
        yield (
            f"optimizer.spam.warmup={o.spam.warmup} is longer than optimizer.spam.interval={o.spam.interval}: the rate "
            "would never be reached; shorten the warm-up"
        )
    if o.stable_spam.max_decay >= 1:
        yield f"optimizer.stable_spam.max_decay={o.stable_spam.max_decay:g}: must be below 1"
    if max(o.stable_spam.norm_decays) >= 1:
        yield f"optimizer.stable_spam.norm_decays={list(o.stable_spam.norm_decays)}: both must be below 1"
    if o.adafactor.momentum >= 1:
        yield f"optimizer.adafactor.momentum={o.adafactor.momentum:g}: must be below 1"


def _impossible_clipping(
    o: OptimizerConfig, m: ModelConfig, p: ParallelConfig, precision: str
) -> Iterator[str]:
    of = o.clipping
    if of.kind == "value" and of.threshold is None:
        yield "optimizer.clipping.kind=value: set optimizer.clipping.threshold, the largest magnitude of an element"
    if of.threshold is not None and not o.reads_key("clipping.threshold"):
        yield (
            f"optimizer.clipping.threshold={of.threshold:g} with optimizer.clipping.kind={of.kind}: that clips to "
            "optimizer.clip; set it instead"
        )
    for key in ("decay", "warmup"):
        if getattr(of, key) is not None and not o.reads_key(f"clipping.{key}"):
            yield (
                f"optimizer.clipping.{key} with optimizer.clipping.kind={of.kind}: only adagc and zclip have it; leave "
                "it out"
            )
    if of.decay == 1:
        yield "optimizer.clipping.decay=1: the average would never change; set it below 1"
    if of.kind == "zclip" and of.warmup is not None and of.warmup < 2:
        yield (
            f"optimizer.clipping.warmup={of.warmup} with optimizer.clipping.kind=zclip: a deviation needs at least 2 "
            "norms; set it to 2 or more"
        )
    if of.kind == "worker":
        if (precision, p.zero) != ("bf16", 1):
            yield (
                f"optimizer.clipping.kind=worker with precision.kind={precision}, parallel.zero={p.zero}: there "
                "DeepSpeed sums gradients during the backward pass, and no rank has its own; use bf16 and "
                "parallel.zero=1, or another kind"
            )
        if m.tied and p.pipeline > 1:
            yield (
                "optimizer.clipping.kind=worker with model.tied and parallel.pipeline above 1: a worker's gradient of "
                "the embedding is spread over two stages; use one stage, or another kind"
            )
        if not o.clip:
            yield "optimizer.clipping.kind=worker with optimizer.clip=0: set the norm to clip to"


def _impossible_fp8(fp8: Fp8Config, precision: str, m: ModelConfig) -> Iterator[str]:
    layers = m.layers
    if precision == "fp16":
        yield (
            "precision.fp8 with precision.kind=fp16: sums of products of E4M3 numbers are beyond fp16's range; use "
            "precision.kind=bf16"
        )
    if fp8.keep_first + fp8.keep_last >= layers:
        yield (
            f"precision.fp8: keep_first={fp8.keep_first} and keep_last={fp8.keep_last} leave none of the {layers} "
            "blocks to FP8: lower them, or leave precision.fp8 out"
        )
    known_linears = {f"blocks.{i}.{linear_name}" for i in range(layers) for linear_name in list_linears(m, i)}
    if unknown_linears := sorted(set(fp8.keep) - known_linears):
        yield (
            f"precision.fp8.keep: {', '.join(unknown_linears)}: no such linear layer; name them like "
            f"blocks.0.mlp.down, with blocks.0 to blocks.{layers - 1} and {', '.join(LINEARS)}"
            f"{'' if m.experts is None else ', of experts mlp.experts.0.down'}"
        )
