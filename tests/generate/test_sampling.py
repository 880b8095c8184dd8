"""Sampling against its definition, written out token by token."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megastable.base.errors import DataError
from megastable.generate.decode import Sampling, pick


def distribution(logits: list[float], sampling: Sampling) -> dict[int, float]:
    """What each token that may be chosen is chosen with."""
    highest = max(logits)
    weights = {i: math.exp((x - highest) / sampling.temperature) for i, x in enumerate(logits)}
    order = sorted(weights, key=lambda i: -logits[i])[: sampling.top_k or None]
    total, kept, mass = sum(weights[i] for i in order), [], 0.0
    for i in order:
        if kept and mass / total >= sampling.top_p:
            break
        kept.append(i)
        mass += weights[i]
    return {i: weights[i] / mass for i in kept}


# Far enough apart that no rounding decides which of two is likelier, or where a share is reached.
scores = st.lists(st.integers(-400, 400), min_size=1, max_size=12, unique=True).map(
    lambda xs: [x / 100 for x in xs]
)


@given(
    logits=scores, temperature=st.sampled_from([0.1, 0.7, 1.0, 3.0]), top_k=st.integers(0, 14),
    top_p=st.sampled_from([0.0123, 0.4567, 0.89, 1.0]), points=st.integers(1, 40),
)  # fmt: skip
def test_even_uniform_numbers_give_every_token_its_share(
    logits: list[float], temperature: float, top_k: int, top_p: float, points: int
) -> None:
    sampling = Sampling(temperature, top_k, top_p)
    wanted = distribution(logits, sampling)
    uniforms = (torch.arange(points, dtype=torch.float64) + 0.5) / points
    chosen = pick(torch.tensor([logits] * points), sampling, uniforms).tolist()
    assert set(chosen) <= wanted.keys()
    for token, share in wanted.items():
        # An interval of that length holds so many of the even points, or one more or less.
        assert abs(chosen.count(token) - share * points) <= 1 + 1e-6


@given(logits=scores, top_k=st.integers(0, 3), top_p=st.sampled_from([0.5, 1.0]))
def test_without_temperature_it_is_the_likeliest(logits: list[float], top_k: int, top_p: float) -> None:
    got = pick(torch.tensor([logits]), Sampling(0.0, top_k, top_p), torch.tensor([0.99], dtype=torch.float64))
    assert got.tolist() == [logits.index(max(logits))]


@pytest.mark.parametrize("sampling", [Sampling(1e-6), Sampling(1e-6, top_p=1.0), Sampling(1e-3, 2, 0.1)])
@pytest.mark.parametrize("uniform", [0.0, 1 - 2**-53])
def test_extremes(sampling: Sampling, uniform: float) -> None:
    """Large logits, a temperature near zero, the first and the last uniform number there is."""
    logits = torch.tensor([[-1e30, 5e4, 1e4, -math.inf]])
    assert pick(logits, sampling, torch.tensor([uniform], dtype=torch.float64)).tolist() == [1]


def test_the_last_uniform_number_never_takes_what_is_ruled_out() -> None:
    last = torch.full((1,), 1 - 2**-53, dtype=torch.float64)
    for sampling in (Sampling(1.0, 3, 1.0), Sampling(1.0, 0, 0.6), Sampling(1.0, 0, 1.0)):
        logits = torch.cat((torch.randn(1, 1000), torch.full((1, 50), -math.inf)), -1)
        assert int(pick(logits, sampling, last)) < 1000


@pytest.mark.parametrize(
    ("wrong", "word"),
    [((-0.1,), "temperature -0.1"), ((math.nan,), "temperature nan"), ((1.0, -1), "top-k -1"),
     ((1.0, 0, 0.0), "top-p 0.0"), ((1.0, 0, 1.5), "top-p 1.5"), ((1.0, 0, math.nan), "top-p nan")],
)  # fmt: skip
def test_what_cannot_be_is_refused(wrong: tuple[float, ...], word: str) -> None:
    with pytest.raises(DataError, match=word):
        Sampling(*wrong)  # type: ignore[arg-type]
