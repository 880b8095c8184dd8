"""Tests of what only a GPU shows. One process, a group of one over NCCL; each is skipped where there is no GPU.

Tests with the fixture `exact` compute as run.deterministic=true does, whose variables libraries read when CUDA starts:
they run in a process of their own, the others with the defaults of training.

    pytest tests/gpu            the others
    pytest tests/gpu -m exact   these

bash launch/bench_gpu.sh runs both before it measures.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

HERE = Path(__file__).parent


def _only_exact(config: pytest.Config) -> bool:
    return str(config.option.markexpr) == "exact"


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    for item in items:
        if HERE in item.path.parents:
            item.add_marker(pytest.mark.gpu)
            if "exact" in getattr(item, "fixturenames", ()):
                item.add_marker(pytest.mark.exact)
                if not _only_exact(config):
                    item.add_marker(
                        pytest.mark.skip(reason="in a process of its own: pytest tests/gpu -m exact")
                    )
            if not torch.cuda.is_available():
                item.add_marker(
                    pytest.mark.skip(reason="there is no GPU here (torch.cuda.is_available() is False)")
                )


@pytest.fixture(scope="session")
def gpu() -> torch.device:
    return torch.device("cuda", 0)


@pytest.fixture(scope="session")
def world(pytestconfig: pytest.Config) -> Iterator[None]:
    """A process group of this process, as under the launcher."""
    os.environ.update(
        RANK="0",
        LOCAL_RANK="0",
        WORLD_SIZE="1",
        LOCAL_WORLD_SIZE="1",
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT="0",
    )
    from megastable.base import reproducible
    from megastable.engine import distributed

    if _only_exact(pytestconfig):
        os.environ.update(reproducible.ENVIRONMENT)  # torch's part is switched by `exact`
    distributed.start_distributed(timeout=120)
    yield
    distributed.stop_distributed()


@pytest.fixture
def exact() -> Iterator[None]:
    """As run.deterministic=true."""
    from megastable.base import reproducible

    reproducible.switch_determinism(True)
    yield
    reproducible.switch_determinism(False)


@pytest.fixture(autouse=True)
def _clean() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch.cuda.empty_cache()
