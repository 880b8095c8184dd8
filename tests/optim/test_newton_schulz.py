"""Newton-Schulz against the singular value decomposition."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megastable.optim.muon import orthogonalized
from tests.tiers import examples

# Where five iterations leave singular values of at least 0.2 % of the norm: between 0.67 and 1.21.
BAND = (0.65, 1.25)


def matrix(rows: int, columns: int, seed: int = 0) -> torch.Tensor:
    """Singular values from 0.1 to 1, in fp64."""
    drawn = torch.Generator().manual_seed(seed)
    n = min(rows, columns)
    u, _ = torch.linalg.qr(torch.randn(rows, n, generator=drawn, dtype=torch.float64))
    v, _ = torch.linalg.qr(torch.randn(columns, n, generator=drawn, dtype=torch.float64))
    return u * torch.linspace(0.1, 1.0, n, dtype=torch.float64) @ v.t()


@pytest.mark.parametrize(("rows", "columns"), [(48, 48), (32, 80), (80, 32), (1, 7), (7, 1)])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 0.03)])
def test_singular_vectors_stay_and_values_become_one(
    rows: int, columns: int, dtype: torch.dtype, tolerance: float
) -> None:
    x = matrix(rows, columns)
    u, _, vt = torch.linalg.svd(x, full_matrices=False)
    y = orthogonalized(x.to(dtype))
    assert y.dtype is dtype and y.shape == x.shape
    inside = u.t() @ y.double() @ vt.t()  # diagonal if the singular vectors are the same
    values = inside.diagonal()
    assert BAND[0] <= float(values.min()) and float(values.max()) <= BAND[1]
    assert float((inside - values.diag()).abs().max()) <= tolerance
    assert float((u @ inside @ vt - y.double()).abs().max()) <= tolerance  # and nothing outside of them


@settings(max_examples=examples(30), deadline=None)
@given(
    rows=st.integers(1, 40), columns=st.integers(1, 40), power=st.integers(-60, 30), seed=st.integers(0, 999)
)
def test_the_size_of_a_matrix_does_not_matter(rows: int, columns: int, power: int, seed: int) -> None:
    x = matrix(rows, columns, seed).float()
    y = orthogonalized(x)
    assert float(torch.linalg.svdvals(y).max()) <= BAND[1]
    assert torch.equal(orthogonalized(x * 2.0**power), y)
    assert torch.allclose(orthogonalized(x.t().contiguous()), y.t(), atol=1e-4)


def test_zero_stays_zero() -> None:
    assert not orthogonalized(torch.zeros(4, 6)).any()


def test_its_input_is_left_alone() -> None:
    x = matrix(8, 8).float()
    before = x.clone()
    orthogonalized(x)
    assert torch.equal(x, before)
