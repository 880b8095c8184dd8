"""Plays the life of a run on a cluster whose GPUs fail, event by event: the slow reference of goodput_model.py."""

from __future__ import annotations

import math
import random

from megastable.plan.goodput_model import DAY, FaultyCluster


def trial(c: FaultyCluster, training: float, seed: int) -> float:
    """The goodput of one run of so many seconds of training. Either all hosts work or none: `shrinks` is not played."""
    dice = random.Random(seed)
    rate, spikes = c.rate, c.spikes / DAY
    wall = done = 0.0  # seconds passed; seconds of training that count now
    # Copies that are being made or are safe: (training it holds, wall time at which it is safe). On disk, in memory.
    disk, memory = [(0.0, 0.0)], [(0.0, 0.0)]
    peers = c.snapshot is not None
    every, cost, late = (
        (c.snapshot, c.copied, c.copied) if c.snapshot is not None else (c.interval, c.blocked, c.commit)
    )
    since = last = 0.0  # training since the last copy; where the newest checkpoint on disk is
    fails = wall + dice.expovariate(rate)
    spike = dice.expovariate(spikes) if spikes else math.inf  # in seconds of training
    while done < training:
        until = min(every - since, spike, training - done)
        if wall + until > fails:  # in a step
            spike -= fails - wall
            wall = fails
            done = _back(memory if peers and dice.random() >= c.pair else disk, wall)
        else:
            wall, done, since, spike = wall + until, done + until, since + until, spike - until
            if spike <= 0:
                undone = (c.ring if c.rewinds else c.interval) / 2
                wall += undone + c.spike_cost + (0.0 if c.rewinds else c.start)  # done again at once
                fails += undone + c.spike_cost + (0.0 if c.rewinds else c.start)  # failures pause meanwhile
                spike = dice.expovariate(spikes)
                continue
            if since < every:
                continue
            paid = cost + (c.blocked * every / c.interval if peers else 0.0)
            if wall + paid <= fails:
                wall, since = wall + paid, 0.0
                copies = memory if peers else disk
                copies.append((done, wall + late))
                if peers and done - last >= c.interval:
                    disk.append((done, wall + c.commit))
                    last = done
                del memory[:-4], disk[:-4]
                continue
            wall = fails
            done = _back(memory if peers and dice.random() >= c.pair else disk, wall)
        # A failure: noticed, a host awaited, started again until that succeeds.
        while True:
            wall += c.detection + (c.away if dice.random() < c.lost else 0.0)
            fails = wall + dice.expovariate(rate)
            if fails >= wall + c.start:
                break
            wall = fails
        wall, since = wall + c.start, 0.0
        last = min(last, done)
        memory[:], disk[:] = [(done, 0.0)], [copy for copy in disk if copy[0] <= done]
    return training / wall


def _back(copies: list[tuple[float, float]], now: float) -> float:
    """The training of the newest copy that is safe."""
    return next((held for held, safe in reversed(copies) if safe <= now), 0.0)
