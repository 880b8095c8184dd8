"""Which pieces of a tied embedding two pipeline stages exchange."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from megastable.parallel.layout import Layout
from megastable.parallel.tied import overlaps


def cut(numel: int, size: int, ranks: int) -> list[range]:
    """A weight at the beginning of a flat buffer that ZeRO cuts into pieces of `size` elements."""
    return [range(min(rank * size, numel), min((rank + 1) * size, numel)) for rank in range(ranks)]


@given(st.integers(1, 6), st.integers(1, 40), st.integers(0, 20), st.integers(0, 20))
def test_every_element_goes_to_the_one_rank_that_updates_its_copy(
    ranks: int, numel: int, more: int, others: int
) -> None:
    one, other = (cut(numel, -(-numel // ranks) + extra, ranks) for extra in (more, others))
    for i, own in enumerate(one):
        counts = overlaps(own, other)
        assert sum(counts) == len(own)
        assert counts == [overlaps(there, one)[i] for there in other]  # what one sends, the other waits for
        sent = [(j, element) for j, there in enumerate(other) for element in own if element in there]
        assert [j for j, _ in sent] == [j for j, n in enumerate(counts) for _ in range(n)]
        assert [element for _, element in sent] == list(
            own
        )  # in the order of the piece: nothing is to be sorted


def test_the_ranks_of_both_stages_by_tensor_rank() -> None:
    layout = Layout(tensor=2, pipeline=3, data=2)
    assert layout.groups("tied") == [[0, 2, 8, 10], [1, 3, 9, 11]]
