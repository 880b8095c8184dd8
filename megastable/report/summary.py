"""summary.json: a run in a few figures."""

from __future__ import annotations

from typing import Any

from megastable.checkpoint.store import RunState
from megastable.config import RunConfig
from megastable.model.flops import parameters


def summarise(
    config: RunConfig, state: RunState, validation: float | None, entropy: float | None
) -> dict[str, Any]:
    """Losses in nats per token; final_loss: mean of the last steps (up to 20); None = not measured.

    val_unigram_entropy: the loss of the best model that knows only how frequent each token of the validation text is.
    """
    recent, layout = state.recent_losses, state.layout
    return {
        "steps": state.step,
        "updates": state.updates,
        "parameters": parameters(config.model),
        "tokens": state.tokens,
        "first_loss": state.first_loss,
        "final_loss": sum(recent) / max(1, len(recent)),
        "val_loss": validation,
        "val_unigram_entropy": entropy,
        "tokens_per_second": state.tokens / max(state.seconds, 1e-9),
        "seconds": state.seconds,
        "world_size": layout.tensor * layout.pipeline * layout.data,
        "tensor": layout.tensor,
        "pipeline": layout.pipeline,
        "data": layout.data,
        "zero_stage": layout.zero,
        "precision": layout.precision,
        "cursor": state.cursor,
    }
