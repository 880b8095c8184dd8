"""Initial state of a run that starts from another framework's checkpoint."""

from __future__ import annotations

from typing import Any

from megastable.base.errors import ConfigError
from megastable.checkpoint.store import LayoutState, RunState
from megastable.config import deepspeed_json
from megastable.config.tree import RunConfig
from megastable.data.corpora import open_corpora


def with_vocabulary(run: RunConfig) -> RunConfig:
    """`run` with its corpora's vocabulary size, if the recipe has none. Raises ConfigError, DataError."""
    if run.model.vocab_size is not None:
        return run
    if not run.data.corpora:
        raise ConfigError(
            "model.vocab_size is missing, and there are no data.corpora to take it from: set it to the number of "
            "tokens in the checkpoint's vocabulary, without padding"
        )
    size = open_corpora(run.data.corpora, run.model.sequence_length, run.run.seed).vocab_size
    return run.model_copy(update={"model": run.model.model_copy(update={"vocab_size": size})})


def state_of(run: RunConfig, order_fingerprint: str = "", **given: Any) -> RunState:
    """The state of a run that has read no data yet; `given` sets further fields."""
    p = run.parallel
    layout = LayoutState(
        tensor=p.tensor, pipeline=p.pipeline, context=p.context, zero=p.zero, precision=run.precision.kind,
        data=deepspeed_json.data_parallel(run, p.tensor * p.pipeline * p.context),
    )  # fmt: skip
    return RunState(order_fingerprint=order_fingerprint, layout=layout, **given)
