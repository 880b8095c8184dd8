"""Tells a run in a few figures: on the console before its first step, in summary.json after the last."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from megastable.base import durable
from megastable.base.collectives import run_on_first
from megastable.base.errors import DataError, SpaceError
from megastable.base.hardware import peak_tflops
from megastable.base.reproducible import is_exact
from megastable.base.text import count_noun
from megastable.config.optimizers import OptimizerConfig
from megastable.config.recipe import find_recipe
from megastable.config.rules import list_linears
from megastable.config.tree import RunConfig
from megastable.data.samples import token_counts, unigram_entropy
from megastable.engine.engine import Engine
from megastable.model.kernels import DTYPES
from megastable.model.sizes import count_parameters, describe_active, in_fp8
from megastable.run.directory import RunDirectory, as_json
from megastable.run.events.reading import find_latest
from megastable.run.events.stability_events import IncidentEvent
from megastable.run.events.training_events import Evaluated, Finished, RecordsLost
from megastable.run.goodput.watching import read_account
from megastable.run.log import RunLog
from megastable_guard.policy_state import PolicyState


def introduce_run(config: RunConfig, engine: Engine, run: Path, peak: float, peak_source: str) -> str:
    """Several lines. run: the run directory; peak: TFLOP/s of a device, and its source."""
    c, layout = config, engine.topology.layout
    context = f" (context {layout.context})" if layout.context > 1 else ""
    context += f" (experts over {layout.expert})" if layout.expert > 1 else ""
    replicas = f" in {layout.replicas} replicas" if layout.replicas > 1 else ""
    same_bits = "may differ in the last bits (run.deterministic=true: the same bits)"
    if is_exact(c.run.deterministic, engine.device):
        same_bits = "gives the same bits"
    return (
        f"{count_parameters(c.model) / 1e6:,.1f}M parameters{describe_active(c.model)}, "
        f"{count_noun(layout.world, 'rank')}: tensor "
        f"{layout.tensor} x pipeline {layout.pipeline} x data {layout.data}{context}, ZeRO {c.parallel.zero}"
        f"{replicas}, "
        f"{c.precision.kind} on {engine.device.type}\n"
        f"optimizer wrapper {type(engine.optimizer).__name__}, kernels: {engine.kernels}\n"
        f"recomputation {c.parallel.recompute}, peak {peak:.3g} TFLOP/s a device ({peak_source})"
        f"{_fp8_note(c, engine)}\n"
        f"{_clipping(c.optimizer)}\n"
        f"a repeated step {same_bits}\n"
        f"{count_noun(c.train.global_batch, 'sample')} of {c.model.sequence_length} tokens a step{_warmups(c)}, "
        f"run directory {run}"
    )


def find_peak(config: RunConfig, engine: Engine) -> tuple[float, str]:
    """The device's peak, TFLOP/s, as rank 0 sees it, so that all ranks report the same MFU; where it is from."""
    if given_peak := config.logging.peak_tflops:
        return given_peak, "given"
    return run_on_first(lambda: peak_tflops(engine.device, DTYPES[config.precision.kind]))


def _warmups(config: RunConfig) -> str:
    told, batch, sequence = "", config.train.batch_warmup, config.train.sequence_warmup
    if batch is not None:
        told += f", from {batch.start} samples on over {batch.tokens:,} tokens"
    if sequence is not None:
        told += f", in pieces from {sequence.start} tokens on over {sequence.tokens:,} tokens"
    return told


def _fp8_note(config: RunConfig, engine: Engine) -> str:
    if config.precision.fp8 is None:
        return ""
    count, of = (
        len(in_fp8(config)),
        sum(len(list_linears(config.model, block)) for block in range(config.model.layers)),
    )
    told = f"\nFP8 with {config.precision.fp8.recipe} scales in {count} of {of} linear layers"
    is_emulated = engine.kernels.fp8 == "emulated"
    return told + (", emulated: its rounding is real, its speed is not" if is_emulated else "")


def _clipping(o: OptimizerConfig) -> str:
    """Says what is clipped; the settings of a kind are those of optim/clipping.py."""
    of, norm = o.clipping, f"a norm of {o.clip:g}"
    match of.kind:
        case "value":
            return f"every element of the gradient is clipped to {of.threshold:g}"
        case "adagc" | "zclip" | "agc":
            set_ = {k: v for k, v in of.model_dump(exclude={"kind"}).items() if v is not None}
            settings = f" ({', '.join(f'{k} {v:g}' for k, v in set_.items())})" if set_ else ""
            return f"gradients are clipped by {of.kind}{settings}"
        case "worker":
            return f"each worker's gradient is clipped to {norm}"
    return f"gradients are clipped to {norm}" if o.clip else "gradients are not clipped"


if TYPE_CHECKING:  # it needs torch
    from megastable.checkpoint.store import RunState
    from megastable.data.corpora import Corpora
    from megastable.training.recorder import Observer

ENTROPY_TOKENS = 50_000_000  # of the validation text: more would not change its unigram entropy


def write_summary(
    run: RunDirectory, config: RunConfig, state: RunState, validation: Evaluated | None, corpora: Corpora,
    observer: Observer | None, log: RunLog,
) -> None:  # fmt: skip
    """Write the last records and summary.json; rank 0. Raises SpaceError if the disk refuses."""
    assert observer is not None, "rank 0 keeps the records"
    observer.flush()
    if pending_records := observer.steps.pending:
        lost_count = len(pending_records)
        log.emit_event(RecordsLost(steps=lost_count, from_step=pending_records[0].step))
        raise SpaceError(f"{run.steps}: the last {lost_count} step records could not be written and are lost")
    text_entropy = None
    if corpora.validation is not None:
        token_totals = sum(
            token_counts(stream, corpora.vocab_size, ENTROPY_TOKENS) for stream in corpora.validation.streams
        )
        text_entropy = unigram_entropy(np.asarray(token_totals))
    goodput = None
    with suppress(DataError):  # its files do not say
        # Up to its last sign of life: this host's clock may differ from the supervisor's.
        goodput = read_account(run.root)[0].list_facts()
    run_summary = summarise(config, state, validation, text_entropy, list_incidents(run, config), goodput)
    try:
        durable.write_file(run.summary, (as_json(run_summary, indent=1) + "\n").encode())
    except OSError as error:
        raise SpaceError(f"{run.summary} could not be written: {error}: make room, start again") from None
    log.emit_event(Finished(**run_summary))


def list_incidents(run: RunDirectory, config: RunConfig) -> list[dict[str, Any]]:
    """The incidents of a run, in order, from its journal; `class` as the field calls it. outcome: "open" if none was
    journaled, as after a crash during one.

    planted_documents: of a deliberately corrupted corpus (data/plant.py), for comparison; else empty.
    """
    from megastable.data.plant import read_planted  # with it comes every kind of tokenizer, and protobuf

    planted = [read_planted(find_recipe(corpus.path)) for corpus in config.data.corpora]
    documents = [d.model_dump() for p in planted if p is not None for d in p.documents]
    incidents = []
    for summary in find_latest(run.iterate_events(IncidentEvent)).values():
        rest = {key: value for key, value in summary.items() if key != "kind"}
        action = (summary.get("actions") or [None])[-1]
        more = {"class": summary.get("kind"), "action": action, "planted_documents": documents}
        incidents.append(rest | more)
    return incidents


def _fp8(config: RunConfig, state: RunState) -> dict[str, Any] | None:
    """fallbacks: how often FP8 was left. steps_without: steps of new ground done without it for that reason."""
    if config.precision.fp8 is None:
        return None
    memory = PolicyState.model_validate(state.stability.get("guard", {}).get("policy", {}))
    recipe = config.precision.fp8.recipe
    return {"recipe": recipe, "fallbacks": len(memory.fallbacks), "steps_without": memory.rested}


def summarise(
    config: RunConfig, state: RunState, validation: Evaluated | None, entropy: float | None,
    incidents: list[dict[str, Any]], goodput: dict[str, Any] | None = None,
) -> dict[str, Any]:  # fmt: skip
    """Losses in nats per token; final_loss: `RunState.recent_loss`; None = not measured. tokens_per_second: over all
    steps, without evaluations, checkpoints and starts.

    val_loss_by_corpus: where there are several. val_unigram_entropy: the unigram entropy of the validation text.
    goodput: seconds by kind, and the share of training, of all the time since the run began (docs/goodput.md). fp8: its
    fallbacks, in a run that uses it.
    """
    layout = state.layout
    return {
        "steps": state.step,
        "updates": state.updates,
        "parameters": count_parameters(config.model),
        "tokens": state.tokens,
        "first_loss": state.first_loss,
        "final_loss": state.recent_loss,
        "val_loss": None if validation is None else validation.loss,
        "val_loss_by_corpus": {} if validation is None else validation.by_corpus,
        "val_unigram_entropy": entropy,
        "tokens_per_second": state.tokens / max(state.seconds, 1e-9),
        "seconds": state.seconds,
        "world_size": layout.tensor * layout.pipeline * layout.data,
        "tensor": layout.tensor,
        "pipeline": layout.pipeline,
        "data": layout.data,
        "context": layout.context,
        "replicas": layout.replicas,
        "zero_stage": layout.zero,
        "precision": layout.precision,
        "fp8": _fp8(config, state),
        "cursor": state.cursor,
        "goodput": goodput,
        "incidents": incidents,
    }
