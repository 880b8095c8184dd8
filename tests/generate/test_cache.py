"""The forward pass in steps is that of all tokens at once, for every kind of model and any steps."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from megastable.checkpoint.plain import PlainModel
from megastable_tools.generate import decode as caching
from megastable_tools.generate.decode import KeyValueCache, read_tokens
from tests.generate.models import KINDS, LENGTH, VOCABULARY, model, tokens
from tests.tiers import examples

MODELS = {name: model(**changes) for name, changes in KINDS.items()}


@torch.no_grad()
def logits_in_steps(plain: PlainModel, given: Tensor, steps: list[int]) -> Tensor:
    """fp32 [b, s, vocabulary]; the last step takes what is left."""
    cache, at, parts = KeyValueCache(), 0, []
    for step in [*steps, given.shape[1]]:
        part = given[:, at : at + step]
        if part.shape[1]:
            parts.append(plain.compute_logits(read_tokens(plain, part, cache)))
            at += part.shape[1]
            assert cache.length == at
    return torch.cat(parts).transpose(0, 1)[..., : plain.vocabulary].float()


@settings(deadline=None, max_examples=examples(60))
@given(
    name=st.sampled_from(sorted(KINDS)), rows=st.integers(1, 3), count=st.integers(1, 90),
    steps=st.lists(st.integers(1, 20), max_size=8), seed=st.integers(0, 99),
)  # fmt: skip
def test_extend_in_steps_of_any_size_gives_the_logits_of_the_whole(
    name: str, rows: int, count: int, steps: list[int], seed: int
) -> None:
    """Also beyond the trained length, and beyond the cache's first allocation of 64 tokens."""
    given = tokens(rows, count, seed)
    with torch.no_grad():
        wanted = MODELS[name](given)
    torch.testing.assert_close(logits_in_steps(MODELS[name], given, steps), wanted, rtol=1e-4, atol=1e-4)


def test_extend_reads_a_long_prompt_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(caching, "AT_ONCE", 7)
    plain, given, seen = MODELS["grouped"], tokens(2, 40), []
    handle = plain.gpt[0].register_forward_hook(lambda _, args, __: seen.append(args[0].shape[1]))
    in_parts = logits_in_steps(plain, given, [])
    handle.remove()
    assert seen == [7, 7, 7, 7, 7, 5]
    with torch.no_grad():
        torch.testing.assert_close(in_parts, plain(given), rtol=1e-4, atol=1e-4)


def test_cache_goes_on_with_chosen_rows_as_if_they_were_alone() -> None:
    plain, given, more = MODELS["grouped"], tokens(3, 9), tokens(4, 6, seed=1)
    cache, rows = KeyValueCache(), torch.tensor([2, 0, 0, 2])
    read_tokens(plain, given, cache)
    cache.choose_rows(rows)
    with torch.no_grad():
        got = plain.compute_logits(read_tokens(plain, more, cache)).transpose(0, 1)[..., :VOCABULARY]
        wanted = plain(torch.cat((given[rows], more), 1))[:, 9:]
    torch.testing.assert_close(got, wanted, rtol=1e-4, atol=1e-4)


def test_extend_leaves_a_model_that_can_be_trained() -> None:
    """Tables that both use must have been made for both."""
    plain = model(rope_theta=1234.0)
    read_tokens(plain, tokens(1, LENGTH), KeyValueCache())
    plain(tokens(1, LENGTH)).square().mean().backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in plain.parameters())
