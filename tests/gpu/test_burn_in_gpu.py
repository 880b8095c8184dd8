"""A burn-in of the GPUs: healthy ones pass, whatever kernels they have."""

from __future__ import annotations

import pytest

from megastable.cluster.burn_in import BurnIn
from megastable.cluster.gpu_health import read_gpus
from megastable.cluster.host_bench import find_devices


@pytest.mark.parametrize("first", range(6))
def test_a_healthy_gpu_passes(first: int) -> None:
    """The rounds have other dtypes, sizes and layouts; several GPUs sum, too."""
    work = BurnIn(find_devices(), 0.0, 1)
    work.run_rounds(0.0, first)
    assert work.report["found"] == [] and work.report["runs"] >= 2, work.report


def test_the_driver_tells_of_every_gpu() -> None:
    gpus, why = read_gpus()
    assert why is None and gpus is not None and gpus[0]["memory"] > gpus[0]["memory_used"] > 0, (gpus, why)
    assert None not in (
        gpus[0]["temperature"],
        gpus[0]["power"],
        gpus[0]["clock"],
        gpus[0]["clocks_throttled"],
    )
