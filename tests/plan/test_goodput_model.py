"""The predicted goodput: against dice, at its limits, and what each measure is worth."""

from __future__ import annotations

import math
from dataclasses import astuple, replace
from statistics import mean

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megastable_tools.plan.goodput_model import DAY, LLAMA, FaultyCluster, expect_goodput, play_trial
from tests.tiers import examples

BASE = FaultyCluster(gpus=1024, start=120.0)
LARGE = FaultyCluster(gpus=10_000, start=300.0, interval=900.0)
# Eight hosts that are away so long that several are missing at once.
EIGHT = FaultyCluster(gpus=64, start=100.0, failures=60 * LLAMA, repair=12 * 3600.0)


@pytest.mark.quick("huge", "many-spares")
@pytest.mark.parametrize(
    "cluster",
    [
        BASE, LARGE, BASE.with_spares(), LARGE.with_spares(), LARGE.with_spares().with_peers(),
        LARGE.with_spares().with_peers().with_rewinds(), replace(LARGE.with_spares(), gpus=100_000, interval=300.0),
        replace(LARGE.with_peers(), pair=0.3), replace(BASE, spikes=30.0), replace(BASE, spikes=30.0).with_rewinds(),
        BASE.with_shrinking(), LARGE.with_shrinking(), EIGHT.with_shrinking(),
        LARGE.with_shrinking().with_peers().with_rewinds(),
        BASE.with_shrinking(halves=True), LARGE.with_shrinking(halves=True), EIGHT.with_shrinking(halves=True),
        LARGE.with_shrinking(halves=True).with_peers().with_rewinds(), LARGE.with_shrinking(3600.0),
    ],
    ids=(
        "small large spares many-spares peers all huge pairs spiky rewinds shrinks shrinks-large shrinks-eight "
        "shrinks-all halves halves-large halves-eight halves-all patient"
    ).split(),
)  # fmt: skip
def test_expected_goodput_is_what_dice_say(cluster: FaultyCluster) -> None:
    failures = 3000
    seconds = failures / cluster.rate
    seen = mean(play_trial(cluster, min(seconds, 3000 * DAY) / 4, seed) for seed in range(4))
    wanted = expect_goodput(cluster).training
    # Of N failures, their number and what they cost scatter by about 1 / sqrt(N) of what is lost.
    assert 1 - seen == pytest.approx(1 - wanted, rel=0.06, abs=0.001)


CLUSTER = st.builds(
    FaultyCluster, gpus=st.integers(8, 100_000), start=st.floats(1, 1000), failures=st.floats(1e-6, 1e-2),
    lost=st.floats(0, 1), repair=st.floats(60, 1e5), away=st.floats(0, 1e5), detection=st.floats(0, 1000),
    interval=st.floats(60, 5000), blocked=st.floats(0, 60), commit=st.floats(0, 300),
    snapshot=st.none() | st.floats(10, 1000), spikes=st.floats(0, 20), rewinds=st.booleans(),
)  # fmt: skip


def test_expected_goodput_of_half_of_the_hosts_by_hand() -> None:
    """Failures cost nothing but the host, which is there for 1000 days, and then away for eight."""
    free = FaultyCluster(
        gpus=64, start=1e-9, detection=0.0, blocked=1.0, commit=0.0, interval=10.0, spikes=0.0, lost=1.0,
        failures=1e-3 / 8, repair=8 * DAY,
    )  # fmt: skip
    away = 8 / 1008  # of the time
    chances = [math.comb(8, n) * away**n * (1 - away) ** (8 - n) for n in range(9)]
    # Of 10 s, which take longer.
    copied = {used: 10 / used / (10 / used + 1) for used in (1, 1 / 2, 1 / 4, 1 / 8)}
    halves = expect_goodput(free.with_shrinking(0.0, halves=True))
    levels = {1: chances[0], 1 / 2: sum(chances[1:5]), 1 / 4: sum(chances[5:7]), 1 / 8: chances[7]}
    training = sum(p * used * copied[used] for used, p in levels.items())
    assert halves.training == pytest.approx(training, rel=1e-4)
    assert halves.smaller == pytest.approx(1 - sum(used * p for used, p in levels.items()))
    assert expect_goodput(free.with_shrinking(0.0)).smaller == pytest.approx(away)
    # A minute for every checkpoint from which it grows: if the last, the fifth, the seventh or the eighth comes back.
    slow = expect_goodput(replace(free, commit=60.0).with_shrinking(0.0, halves=True))
    growths = {1: 1 * chances[1], 1 / 2: 5 * chances[5], 1 / 4: 7 * chances[7], 1 / 8: 8 * chances[8]}
    wanted = sum(used * count for used, count in growths.items()) * 60 / (8 * DAY)
    assert slow.start_up == pytest.approx(wanted, rel=1e-4)


@settings(max_examples=examples(300), deadline=None)
@given(CLUSTER, st.booleans(), st.booleans())
def test_expected_goodput_adds_up(c: FaultyCluster, shrinks: bool, halves: bool) -> None:
    c = c.with_shrinking(c.away, halves) if shrinks else c
    if c.rate * (c.interval + c.start) > 20:
        return  # never a whole segment
    found = expect_goodput(c)
    # What hosts under repair lack is no time: the others are shares of what is left.
    assert sum(astuple(found)) == pytest.approx(1.0)
    assert all(share >= -1e-9 for share in astuple(found))


@pytest.mark.parametrize("gpus", [64, 1024, 10_000])
def test_tuned_interval_is_best(gpus: int) -> None:
    c = FaultyCluster(gpus=gpus, start=100.0, spikes=0.0).with_spares()
    disk, peers = c.with_tuned_interval(least=0.0), c.with_peers()
    assert peers.snapshot is not None
    for factor in (0.5, 2.0):
        other = replace(disk, interval=factor * disk.interval)
        assert expect_goodput(other).training < expect_goodput(disk).training
        other = replace(peers, snapshot=factor * peers.snapshot)
        assert expect_goodput(other).training < expect_goodput(peers).training
