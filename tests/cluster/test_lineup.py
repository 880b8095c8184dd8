"""Which hosts train next, over whatever is lost and comes back."""

from __future__ import annotations

from collections.abc import Sequence
from math import inf

from hypothesis import given
from hypothesis import strategies as st

from megastable.cluster.lineup import SETTLE, lineup

HOSTS = ["a", "b", "c", "s"]  # s is a spare
SHRINK = 120.0


def fits(names: Sequence[str]) -> bool:
    return len(names) != 2  # as with a global batch that two cannot share


def of(
    there: str, waited: float = 0.0, last: str = "abc", shrink_after: float | None = SHRINK, wanted: int = 3,
    **barred: bool,
) -> str:  # fmt: skip
    return "".join(lineup(HOSTS, wanted, there, barred, last, waited, shrink_after, fits))


def test_all_are_there() -> None:
    assert of("abcs") == "abc" == of("abcs", last="")
    assert of("abcs", last="asc") == "asc"  # who trains goes on: the host of before is the spare now


def test_a_spare_takes_the_place_of_the_one_that_failed() -> None:
    assert of("acs", b=False) == "asc"
    assert of("bcs", a=False) == "sbc"
    assert of("abcs", b=False) == "asc"  # also if it is back already
    assert of("abcs", b=True) == "asc"


def test_a_spare_does_not_take_the_place_of_one_that_is_only_late() -> None:
    assert of("acs") == "" == of("acs", last="")
    assert of("acs", waited=SETTLE) == "asc"
    assert of("acs", waited=SETTLE, last="") == "acs"


def test_without_a_spare_the_same_host_is_waited_for_until_the_run_shrinks() -> None:
    assert of("ac", b=False) == "" == of("ac", SHRINK - 1, b=False)
    assert of("abc", 60, b=False) == "abc"  # a flap
    assert of("ac", SHRINK) == "a"  # two cannot share the batch
    assert of("ac", inf, shrink_after=None) == ""
    assert of("", inf) == ""


def test_a_faulty_host_is_not_used_even_if_fewer_remain() -> None:
    assert of("abcs", b=True, wanted=4, last="abcs") == ""
    assert of("abcs", SETTLE, b=True, wanted=4, last="abcs") == "acs"  # nobody else to wait for
    assert of("abc", SETTLE, b=True) == ""  # the spare may still come
    assert of("abc", inf, shrink_after=None, b=True) == ""


def test_a_smaller_run_has_the_order_of_the_host_file() -> None:
    assert of("bca", wanted=4, waited=SHRINK, last="abcs") == "abc"


@given(
    there=st.sets(st.sampled_from(HOSTS)),
    barred=st.dictionaries(st.sampled_from(HOSTS), st.booleans()),
    last=st.permutations(HOSTS).map(lambda names: names[:3]) | st.just([]),
    waited=st.sampled_from([0.0, SETTLE, SHRINK, inf]),
    shrink_after=st.sampled_from([None, 0.0, SHRINK]),
)
def test_only_hosts_that_are_there_and_may_be_used(
    there: set[str], barred: dict[str, bool], last: list[str], waited: float, shrink_after: float | None
) -> None:
    chosen = lineup(HOSTS, 3, there, barred, last, waited, shrink_after, fits)
    assert set(chosen) <= there and len(set(chosen)) == len(chosen) <= 3
    assert not any(barred.get(host) for host in chosen)
    if chosen and len(chosen) < 3:
        assert shrink_after is not None and fits(chosen)
        assert waited >= SETTLE or shrink_after == 0
    if len(chosen) == 3 and last:
        # Whoever stays keeps its place, so that the ranks of a host stay where its memory is.
        assert all(host == new or host not in chosen for host, new in zip(last, chosen, strict=True))
    usable = [host for host in HOSTS if not barred.get(host) and host in there]
    if len(usable) >= 3 and waited >= SETTLE:
        assert len(chosen) == 3
        # The last choice only where it is needed.
        soft = [host for host in chosen if host in barred]
        assert not soft or not [h for h in usable if h not in barred and h not in chosen]
    if not chosen and waited == inf and shrink_after is not None:
        assert not any(fits(usable[:n]) for n in range(1, len(usable) + 1))
