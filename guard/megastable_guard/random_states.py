"""The random states of a process, for checkpoints and copies in memory. Needs torch."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch


def read_random_states() -> dict[str, Any]:
    """The random states of Python, numpy, torch and the GPUs, in types that `torch.load(weights_only=True)` reads."""
    version, python_internal, python_gauss = random.getstate()
    kind, keys, position, has_gauss, cached = np.random.get_state(legacy=True)
    return {
        "python": (version, list(python_internal), python_gauss),
        "numpy": (kind, torch.from_numpy(np.asarray(keys).astype(np.int64)), position, has_gauss, cached),
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else [],
    }


def restore_random_states(state: dict[str, Any]) -> None:
    """Restore what `read_random_states` returned. GPUs: only of a machine with as many."""
    version, python_internal, python_gauss = state["python"]
    random.setstate((version, tuple(python_internal), python_gauss))
    numpy_kind, numpy_keys, *numpy_rest = state["numpy"]
    np.random.set_state((numpy_kind, numpy_keys.numpy().astype(np.uint32), *numpy_rest))
    torch.set_rng_state(state["torch"])
    if state["cuda"] and len(state["cuda"]) == torch.cuda.device_count():
        torch.cuda.set_rng_state_all(state["cuda"])
