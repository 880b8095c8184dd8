"""The thresholds of the stability system, each with the reason of its default. Part of the tree of config.py."""

from __future__ import annotations

from pydantic import NonNegativeInt, PositiveFloat, PositiveInt

from megastable.part import Fraction, Part


class DetectorConfig(Part):
    """What counts as a deviation; see detector.py."""

    window: PositiveInt = 100


class PolicyConfig(Part):
    """What is done about one, and how often; see policy.py.

    discards: whole batches refused in one incident before the ladder is climbed; the fifth would cost more data than
    a rewind costs steps. rewinds, cuts, handovers per `budget_window` steps: what PaLM needed in a whole run
    (arXiv:2204.02311 section 5.1, about 20 times) is far below; more means that the cause is not the data.
    verify_steps: after an action the loss must be back on its trend within so many steps. Spikes that heal do so
    in 10 to 30 steps on the public traces (docs/stability.md).
    """

    discards: PositiveInt = 4
    non_finite: PositiveInt = 3  # discards for non-finite numbers in one incident before a rewind
    budget_window: PositiveInt = 2000
    rewinds: NonNegativeInt = 8
    cuts: NonNegativeInt = 3
    swaps: NonNegativeInt = 2
    handovers: NonNegativeInt = 2
    verify_steps: PositiveInt = 30
    cut_factor: Fraction = 0.5  # of the learning rate; GLM-130B and OPT-175B halved it by hand
    rewarm_steps: NonNegativeInt = 50  # updates from a tenth of the cut rate back to it


class SnapshotConfig(Part):
    """Rewind points in host memory; see snapshot.py.

    interval: steps between two. A rewind loses half of it on average, at most `interval` + the steps until something
    is noticed; a copy of 12 bytes a parameter costs about a hundredth of a step. keep: how many, the newest and
    ever older ones: a slow divergence is noticed late.
    """

    interval: NonNegativeInt = 10  # 0 = none
    keep: PositiveInt = 4
    memory_gib: PositiveFloat | None = None  # host memory per rank; None = a quarter of what is free


class AttributionConfig(Part):
    """Who is guilty; see attribution.py."""

    threshold: PositiveFloat = 6.0  # robust z of a sample's loss among its corpus's
    gradients: NonNegativeInt = 4  # suspects whose own gradient norm is measured; each costs a step
    reference: PositiveInt = 64  # harmless samples before the rewind point to compare with
    ahead: NonNegativeInt = 16  # steps looked ahead at most, for the end of a bad region


class StabilityConfig(Part):
    enabled: bool = True  # False: only non-finite updates are refused
    dry_run: bool = False  # report what would be done; refuse nothing but non-finite updates
    max_discards: PositiveInt = 20  # updates refused in a row before the run stops as unstable
    detector: DetectorConfig = DetectorConfig()
    policy: PolicyConfig = PolicyConfig()
    snapshots: SnapshotConfig = SnapshotConfig()
    attribution: AttributionConfig = AttributionConfig()
