"""The predicted goodput: against dice, at its limits, and what each measure is worth."""

from __future__ import annotations

import math
from dataclasses import astuple, replace
from statistics import mean

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megastable_tools.plan.goodput_model import DAY, LLAMA, FaultyCluster, expected, spares
from megastable_tools.plan.goodput_trial import trial
from tests.tiers import examples

BASE = FaultyCluster(gpus=1024, start=120.0)
LARGE = FaultyCluster(gpus=10_000, start=300.0, interval=900.0)
# Eight hosts that are away so long that several are missing at once.
EIGHT = FaultyCluster(gpus=64, start=100.0, failures=60 * LLAMA, repair=12 * 3600.0)
OFTEN = replace(EIGHT, start=300.0, failures=600 * LLAMA, lost=0.4).shrinking(halves=True)


@pytest.mark.quick("huge", "many-spares")
@pytest.mark.parametrize(
    "cluster",
    [
        BASE, LARGE, BASE.with_spares(), LARGE.with_spares(), LARGE.with_spares().with_peers(),
        LARGE.with_spares().with_peers().with_rewinds(), replace(LARGE.with_spares(), gpus=100_000, interval=300.0),
        replace(LARGE.with_peers(), pair=0.3), replace(BASE, spikes=30.0), replace(BASE, spikes=30.0).with_rewinds(),
        BASE.shrinking(), LARGE.shrinking(), EIGHT.shrinking(), LARGE.shrinking().with_peers().with_rewinds(),
        BASE.shrinking(halves=True), LARGE.shrinking(halves=True), EIGHT.shrinking(halves=True),
        LARGE.shrinking(halves=True).with_peers().with_rewinds(), LARGE.shrinking(3600.0),
    ],
    ids=(
        "small large spares many-spares peers all huge pairs spiky rewinds shrinks shrinks-large shrinks-eight "
        "shrinks-all halves halves-large halves-eight halves-all patient"
    ).split(),
)  # fmt: skip
def test_the_formula_is_what_dice_say(cluster: FaultyCluster) -> None:
    failures = 3000
    seconds = failures / cluster.rate
    seen = mean(trial(cluster, min(seconds, 3000 * DAY) / 4, seed) for seed in range(4))
    wanted = expected(cluster).training
    # Of N failures, their number and what they cost scatter by about 1 / sqrt(N) of what is lost.
    assert 1 - seen == pytest.approx(1 - wanted, rel=0.06, abs=0.001)


@pytest.mark.parametrize("cluster", [
    OFTEN, replace(OFTEN, snapshot=1800.0, copied=2.0),
    replace(OFTEN, lost=0.9, failures=150 * LLAMA, repair=2 * 3600.0, commit=600.0),
], ids=["checkpoints", "copies", "growth"])  # fmt: skip
def test_a_run_that_is_seldom_whole(cluster: FaultyCluster) -> None:
    """Half of what it loses is idle hosts; the rest must not hide behind that."""
    seen = mean(trial(cluster, 1500 / cluster.rate, seed) for seed in range(4))
    assert 1 - seen == pytest.approx(1 - expected(cluster).training, rel=0.03)


def test_without_failures_only_copies_cost() -> None:
    calm = expected(replace(BASE, failures=1e-15, spikes=0.0))
    assert calm.training == pytest.approx(1800 / 1802) and calm.copying == pytest.approx(2 / 1802)
    never = replace(BASE, failures=0.0, spikes=0.0)
    assert (
        expected(never).training
        == expected(never.shrinking(halves=True)).training
        == pytest.approx(1800 / 1802)
    )


def test_a_single_failure_by_hand() -> None:
    """Rare failures: each costs half an interval, the copy that was not safe, detection, waiting and a start."""
    c = replace(BASE, failures=1e-7, spikes=0.0)
    each = 1802 / 2 + 60 + 20 + 0.5 * 4 * 3600 + 120
    assert expected(c).training == pytest.approx(1800 / 1802 / (1 + c.rate * each), rel=1e-4)


CLUSTER = st.builds(
    FaultyCluster, gpus=st.integers(8, 100_000), start=st.floats(1, 1000), failures=st.floats(1e-6, 1e-2),
    lost=st.floats(0, 1), repair=st.floats(60, 1e5), away=st.floats(0, 1e5), detection=st.floats(0, 1000),
    interval=st.floats(60, 5000), blocked=st.floats(0, 60), commit=st.floats(0, 300),
    snapshot=st.none() | st.floats(10, 1000), spikes=st.floats(0, 20), rewinds=st.booleans(),
)  # fmt: skip


def test_hosts_that_can_train() -> None:
    c, halves = EIGHT.shrinking(), EIGHT.shrinking(halves=True)
    assert [8 * c.used(n) for n in range(9)] == [8, 7, 6, 5, 4, 3, 2, 1, 0]
    assert [8 * halves.used(n) for n in range(9)] == [8, 4, 4, 4, 4, 2, 2, 1, 0]
    assert replace(LARGE, halves=True).used(625) == 0.5 and replace(LARGE, halves=True).used(626) == 0.25


def test_half_of_the_hosts_by_hand() -> None:
    """Failures cost nothing but the host, which is there for 1000 days, and then away for eight."""
    free = FaultyCluster(
        gpus=64, start=1e-9, detection=0.0, blocked=1.0, commit=0.0, interval=10.0, spikes=0.0, lost=1.0,
        failures=1e-3 / 8, repair=8 * DAY,
    )  # fmt: skip
    away = 8 / 1008  # of the time
    chances = [math.comb(8, n) * away**n * (1 - away) ** (8 - n) for n in range(9)]
    copied = {
        used: 10 / used / (10 / used + 1) for used in (1, 1 / 2, 1 / 4, 1 / 8)
    }  # of 10 s, which take longer
    halves = expected(free.shrinking(0.0, halves=True))
    levels = {1: chances[0], 1 / 2: sum(chances[1:5]), 1 / 4: sum(chances[5:7]), 1 / 8: chances[7]}
    assert halves.training == pytest.approx(
        sum(p * used * copied[used] for used, p in levels.items()), rel=1e-4
    )
    assert halves.smaller == pytest.approx(1 - sum(used * p for used, p in levels.items()))
    assert expected(free.shrinking(0.0)).smaller == pytest.approx(away)
    # A minute for every checkpoint from which it grows: if the last, the fifth, the seventh or the eighth comes back.
    slow = expected(replace(free, commit=60.0).shrinking(0.0, halves=True))
    growths = {1: 1 * chances[1], 1 / 2: 5 * chances[5], 1 / 4: 7 * chances[7], 1 / 8: 8 * chances[8]}
    wanted = sum(used * count for used, count in growths.items()) * 60 / (8 * DAY)
    assert slow.start_up == pytest.approx(wanted, rel=1e-4)


def test_two_minutes_of_waiting_by_hand() -> None:
    """For every lost host, before the others go on."""
    c = replace(BASE, spikes=0.0)
    at_once, later = expected(c.shrinking(0.0)), expected(c.shrinking())
    assert at_once.waiting == 0 and later.waiting == pytest.approx(c.rate * c.lost * 120, rel=0.02)
    assert at_once.training - later.training == pytest.approx(later.waiting, rel=0.05)
    assert replace(c, repair=60.0).shrinking().away == 60.0


@settings(max_examples=examples(300), deadline=None)
@given(CLUSTER, st.booleans(), st.booleans())
def test_shares_add_up(c: FaultyCluster, shrinks: bool, halves: bool) -> None:
    c = c.shrinking(c.away, halves) if shrinks else c
    if c.rate * (c.interval + c.start) > 20:
        return  # never a whole segment
    found = expected(c)
    # What hosts under repair lack is no time: the others are shares of what is left.
    assert sum(astuple(found)) == pytest.approx(1.0)
    assert all(share >= -1e-9 for share in astuple(found))


@pytest.mark.parametrize("gpus", [64, 1024, 10_000])
def test_as_often_as_pays_is_best(gpus: int) -> None:
    c = FaultyCluster(gpus=gpus, start=100.0, spikes=0.0).with_spares()
    disk, peers = c.tuned(least=0.0), c.with_peers()
    assert peers.snapshot is not None
    for factor in (0.5, 2.0):
        assert expected(replace(disk, interval=factor * disk.interval)).training < expected(disk).training
        other = replace(peers, snapshot=factor * peers.snapshot)
        assert expected(other).training < expected(peers).training


def test_spares() -> None:
    none = replace(LARGE, failures=0.0)
    assert spares(none) == 1
    mean_gone = LARGE.rate * 0.5 * LARGE.repair
    count = spares(LARGE)
    assert mean_gone < count < mean_gone + 5 * math.sqrt(mean_gone) + 2
    assert spares(LARGE, 0.5) <= count <= spares(LARGE, 1e-6)
