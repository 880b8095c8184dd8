"""Where a run stands that begins from what another framework wrote."""

from __future__ import annotations

from typing import Any

from megastable.base.errors import ConfigError
from megastable.checkpoint.store import LayoutState, RunState
from megastable.config import deepspeed_json
from megastable.config.tree import RunConfig
from megastable.data.corpora import open_corpora


def with_vocabulary(run: RunConfig) -> RunConfig:
    """`run` with the size of its corpora's vocabulary, where the recipe says none. Raises ConfigError, DataError."""
    if run.model.vocab_size is not None:
        return run
    if not run.data.corpora:
        raise ConfigError(
            "model.vocab_size is missing, and there are no data.corpora to ask: say how many tokens the checkpoint's "
            "vocabulary has, without padding"
        )
    size = open_corpora(run.data.corpora, run.model.sequence_length, run.run.seed).vocab_size
    return run.model_copy(update={"model": run.model.model_copy(update={"vocab_size": size})})


def state_of(run: RunConfig, order_fingerprint: str = "", **given: Any) -> RunState:
    """The state of a run that has seen no data of ours; `given` says more of it."""
    p = run.parallel
    layout = LayoutState(
        tensor=p.tensor, pipeline=p.pipeline, context=p.context, zero=p.zero, precision=run.precision.kind,
        data=deepspeed_json.data_parallel(run, p.tensor * p.pipeline * p.context),
    )  # fmt: skip
    return RunState(order_fingerprint=order_fingerprint, layout=layout, **given)
