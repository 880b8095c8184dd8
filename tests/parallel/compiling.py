"""torch.compile for tests: every pass but the one that makes kernels."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch


@contextmanager
def without_kernels() -> Iterator[None]:
    """Blocks are compiled by aot_eager: the kernels of the last pass take many times as long to make."""
    compiler = torch.compile
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "compile", lambda f, **options: compiler(f, **options, backend="aot_eager"))
        yield
