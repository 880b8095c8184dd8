"""Writes summary.json: a run in a few figures."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from megastable.base import durable
from megastable.base.errors import DataError, SpaceError
from megastable.config.recipe import find
from megastable.config.tree import RunConfig
from megastable.data.plant import read_planted
from megastable.data.statistics import token_counts, unigram_entropy
from megastable.model.flops import parameters
from megastable.run.directory import RunDirectory, as_json
from megastable.run.events.reading import latest
from megastable.run.events.stability_events import IncidentEvent
from megastable.run.events.training_events import Evaluated, Finished, RecordsLost
from megastable.run.goodput.watching import read_account
from megastable.run.log import RunLog
from megastable_guard.policy_state import PolicyState

if TYPE_CHECKING:  # it needs torch
    from megastable.checkpoint.store import RunState
    from megastable.data.corpora import Corpora
    from megastable.training.observer import Observer

ENTROPY_TOKENS = 50_000_000  # of the validation text: more would not change its unigram entropy


def write_summary(
    run: RunDirectory, config: RunConfig, state: RunState, validation: Evaluated | None, corpora: Corpora,
    observer: Observer | None, log: RunLog,
) -> None:  # fmt: skip
    """Write the last records and summary.json; rank 0. Raises SpaceError if the disk refuses."""
    assert observer is not None, "rank 0 keeps the records"
    observer.flush()
    if pending := observer.steps.pending:
        lost = len(pending)
        log.emit(RecordsLost(steps=lost, from_step=pending[0].step))
        raise SpaceError(f"{run.steps}: the last {lost} step records could not be written and are lost")
    entropy = None
    if corpora.validation is not None:
        counts = sum(
            token_counts(stream, corpora.vocab_size, ENTROPY_TOKENS) for stream in corpora.validation.streams
        )
        entropy = unigram_entropy(np.asarray(counts))
    summary = summarise(config, state, validation, entropy, incidents(run, config), goodput(run))
    try:
        durable.write_file(run.summary, (as_json(summary, indent=1) + "\n").encode())
    except OSError as error:
        raise SpaceError(f"{run.summary} could not be written: {error}: make room, start again") from None
    log.emit(Finished(**summary))


def goodput(run: RunDirectory) -> dict[str, Any] | None:
    """Where the time of the run went so far; None if its files do not say."""
    try:
        # Up to its last sign of life: this host's clock may differ from the supervisor's.
        return read_account(run.root)[0].facts()
    except DataError:
        return None


def incidents(run: RunDirectory, config: RunConfig) -> list[dict[str, Any]]:
    """The incidents of a run, in order, from its journal; `class` as the field calls it. outcome: "open" if none was
    journaled, as after a crash during one.

    planted_documents: of a deliberately corrupted corpus (data/plant.py), for comparison; else empty.
    """
    planted = [read_planted(find(corpus.path)) for corpus in config.data.corpora]
    documents = [d.model_dump() for p in planted if p is not None for d in p.documents]
    return [_shown(summary, documents) for summary in latest(run.events(IncidentEvent)).values()]


def _shown(summary: dict[str, Any], planted: list[dict[str, Any]]) -> dict[str, Any]:
    rest = {key: value for key, value in summary.items() if key != "kind"}
    actions = summary.get("actions") or [None]
    return {**rest, "class": summary.get("kind"), "action": actions[-1], "planted_documents": planted}


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
        "parameters": parameters(config.model),
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
        "zero_stage": layout.zero,
        "precision": layout.precision,
        "fp8": _fp8(config, state),
        "cursor": state.cursor,
        "goodput": goodput,
        "incidents": incidents,
    }
