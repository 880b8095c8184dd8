"""Defines the thresholds of the stability system, each with the reason of its default. Part of config/tree.py."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt

from megastable_guard.guard_config import GuardConfig
from megastable_guard.section import Fraction, Section


class MemoryCopyConfig(Section):
    """Copies of the newest snapshot in the memories of two hosts, which outlive the processes (docs/clusters.md,
    "Memory that survives a host"). A copy takes 12 bytes a parameter, at its host and at another one; while a new one
    is made there are two."""

    mode: Literal["auto", "always", "never"] = "auto"
    """auto: under a supervisor, on several hosts: only then is there somebody to go on at once, and a host to lose;
    always: also without, and on one host, against the death of its processes."""
    folder: Path = Path("/dev/shm")
    """Where; variables of the environment are replaced. Memory, or a disk of the host itself."""
    bandwidth: PositiveFloat = 0.25
    """Most that a rank sends; 10 GB, as of 7B parameters on 8 ranks, take 40 s. [GB/s]"""
    memory_gib: PositiveFloat | None = Field(default=None, examples=[64.0])
    """Memory for it per rank; null: a quarter of what is free. [GiB]"""
    days: PositiveFloat = 3.0
    """Time after which what a run has left is removed by the next run of the same user. [days]"""


class SnapshotConfig(Section):
    """Snapshots in host memory (checkpoint/snapshot.py). A rewind loses half of `interval` on average, at most
    `interval` plus the steps until detection; a copy, 12 bytes a parameter, costs about a hundredth of a step."""

    interval: NonNegativeInt = 10
    """Steps between snapshots; 0: none. [steps]"""
    keep: int = Field(default=4, ge=1, le=1000)
    """Number of snapshots, the newest and ever older ones, as a slow divergence is noticed late. [snapshots]"""
    memory_gib: PositiveFloat | None = Field(default=None, examples=[64.0])
    """Host memory per rank; null: a quarter of what is free. [GiB]"""
    copies: MemoryCopyConfig = MemoryCopyConfig()


class HardwareConfig(Section):
    """Silent corruption (hardware/hardware_watch.py)."""

    fingerprint_interval: NonNegativeInt = 20
    """Steps between two comparisons of the state that several ranks must hold alike; 0: none. Weights in compute
    precision, which the next update overwrites, are compared in every step. [steps]"""
    replay_interval: NonNegativeInt = 200
    """Steps between two replays: a micro-batch is computed again on its own rank and on the next one, and every device
    computes products with known answers; 0: none. [steps]"""
    messages: bool = True
    """Check before every update that pipeline stages received what was sent to them."""
    state: bool = True
    """Check before every update that masters, moments and weights are what the last one left."""
    gradients: bool = True
    """Check in every step the sum of the gradients, and the gradient of each data rank against the others (of each rank
    against its first moments, if there is one data rank): a doubt refuses the update until repeating the step has shown
    who is right."""


class AttributionConfig(Section):
    """Finding the bad samples (attribution/examination.py, megastable_guard/scores.py)."""

    threshold: PositiveFloat = 6.0
    """Robust z of a sample's loss within its corpus from which it may be called bad individually. [sigma]"""
    significance: Fraction = 0.001
    """How often a window of harmless samples passes for a bad crowd (permutation test)."""
    adjacent_significance: Fraction = 0.05
    """As `significance`, next to samples just skipped, where data is the likely cause."""
    false_discovery_rate: Fraction = 0.03
    """Share of harmless samples among those called bad in a crowd (false discovery rate)."""
    gradients: NonNegativeInt = 16
    """Most gradients measured; each costs a step. They find text that is too easy to show in the loss."""
    window: PositiveInt = 16
    """Steps since the onset whose samples are suspects; later ones follow from the first. [steps]"""
    reference: PositiveInt = 128
    """Harmless samples from before the snapshot to measure, for a corpus with few recorded. [samples]"""
    behind: NonNegativeInt = 16
    """Steps before the snapshot not used for harmless tails: the region may have begun there. [steps]"""
    region: NonNegativeInt = 40
    """Time to find the ends of a bad region and its bad samples; a forward pass of a batch is a third of a step.
    What does not end in that time is no region, and no sample is called bad. 0: nothing beyond the window is looked
    at. [steps]"""


class SampleConfig(Section):
    """Batches that are elevated together, and refused ones (recovery/watches.py)."""

    examinations: PositiveFloat = 1.0
    """Groups of batches examined in vain, per 10,000 healthy steps; each takes some steps of time."""
    quiet_steps: PositiveInt = 4
    """Steps on trend before a refused batch is examined. [steps]"""


class SignsConfig(Section):
    """Signs of a learning rate that is too high, or too low, from the start (warnings/signs.py). Each is a warning,
    given once; nothing acts on it.

    Chosen on runs of 3 layers of 128 on Python source, measured on two other texts (docs/stability-method.md, with the
    error rates). The first look at every block is what later ones are compared with. Healthy runs, too, grow 46 times
    over it, to an rms of 1.7; `rms` is the geometric middle of that and the 222 of the run `no-qk-norm` at step 20.
    Models narrower than `narrowest` tolerate a thousandfold growth.
    """

    enabled: bool = True
    """Look for them."""
    norms: tuple[PositiveInt, ...] = (1, 2, 5, 10, 20, 50)
    """Steps after which weights and update are measured; []: never. [steps]"""
    looks: tuple[PositiveInt, ...] = (1, 20, 50, 100)
    """Steps after which every block is measured; []: never. [steps]"""
    change: PositiveFloat = 0.25
    """Change of a layer's output by one update, relative to itself."""
    growth: PositiveFloat = 40.0
    """Growth of the residual stream since the first measurement; a sign only together with `rms`."""
    rms: PositiveFloat = 20.0
    """Root mean square of the residual stream."""
    narrowest: PositiveInt = 128
    """Least width of a model that is judged by its residual stream."""
    collapse: Fraction = 0.25
    """Remaining share of a block's first attention entropy."""
    below_unigram: NonNegativeFloat = 0.3
    """How far the loss must be below the unigram entropy once the learning rates of all updates add up to `rate_sum`.
    [nats]"""
    rate_sum: PositiveFloat = 0.25
    """Sum of learning rates at which that is checked."""
    updates: PositiveInt = 20
    """Least number of updates before that check. [updates]"""
    peak: PositiveFloat = 0.95
    """Ratio of update to weight half a warm-up after its end, relative to that at its end; a sign only of updates of at
    least half of `change`."""
    slow_share: Fraction = 0.4
    """Share of the fall of the loss that is in the second half of the sum of rates, while the loss is above the unigram
    entropy."""
    slow_updates: PositiveInt = 200
    """Number of updates at which that is checked, or twice the warm-up if that is longer. [updates]"""
    sample: PositiveInt = 250_000
    """Part of the corpus that the unigram entropy is measured on. [tokens]"""


class TrendsConfig(Section):
    """Slow-moving signals, judged through the whole run (warnings/trends.py). Each is a warning with a remedy; nothing
    acts on it.

    A look measures one sample of each data rank, and norms of parameters: `interval` bounds the cost. The limits were
    chosen on small runs (docs/stability-method.md).
    """

    enabled: bool = True
    """Look for them."""
    interval: PositiveInt = 25
    """Steps between two looks. [steps]"""
    start: NonNegativeInt = 100
    """Steps before the first look; `signs` are about these. There is none while the learning rate warms up either.
    [steps]"""
    window: int = Field(default=16, ge=6)
    """Looks over which growth is extrapolated. [looks]"""
    confirm: PositiveInt = 2
    """Looks, or evaluations, in a row beyond a limit that are a warning; and well within it, before it is over."""
    forget: Fraction = 0.005
    """How fast the best level of a block is forgotten at each look: slower changes are no trend."""
    entropy_left: Annotated[float, Field(gt=0, lt=1)] = 0.6
    """Remaining share of a block's best attention entropy."""
    focus_left: Annotated[float, Field(gt=0, lt=1)] = 0.5
    """Remaining share of what a block's attention entropy was at most below that of uniform attention."""
    focus_floor: PositiveFloat = 0.25
    """How far it must have been below it. [nats]"""
    logit_floor: PositiveFloat = 20.0
    """Largest attention logit below which its growth is not judged."""
    logit_horizon: PositiveInt = 2000
    """Within how many steps the largest attention logit would reach 10,000, at its present growth. [steps]"""
    output_growth: PositiveFloat = 5.0
    """Growth of the root mean square of a sub-layer's output (qkv, attention, MLP) over its lowest level."""
    output_horizon: PositiveInt = 2000
    """Within how many steps it would grow a hundredfold, at its present growth; both must be exceeded. [steps]"""
    straightness: PositiveFloat = 1.1
    """Growth of a norm, relative to the sum of all updates. The optimizer alone gives at most 1, if every update points
    straight outwards: more means that something else changes the weights."""
    gradient_growth: PositiveFloat = 2.0
    """Gradient norm before clipping, relative to its lowest level."""
    update_change: PositiveFloat = 0.5
    """Change of a layer's output by one update, relative to itself."""
    update_least: PositiveFloat = 0.01
    """Root mean square of an update, relative to the learning rate: of optimizers with updates like Adam's."""
    stale_share: Fraction = 0.002
    """Share of the rows of embedding or head with a gradient whose second moment is below a hundredth of its square."""
    stale_factor: PositiveFloat = 4.0
    """As `stale_share`, times the usual share of this run."""
    layer_gradient: Fraction = 0.4
    """Remaining share of the gradient of a block's input weights, relative to that of its output weights."""
    layer_added: Fraction = 0.002
    """RMS of what a block adds to the residual stream, relative to the stream."""
    overfit: PositiveFloat = 0.02
    """Rise of the validation loss above its best, and fall of the training loss since then. [nats]"""
    swing: PositiveFloat = 0.05
    """Rise of the validation loss between two turning points, and fall: two of each in the last eight evaluations are a
    warning. [nats]"""


class StabilityConfig(GuardConfig):
    """Detection, remedies and attribution (docs/stability.md)."""

    enabled: bool = True
    """false: only non-finite updates are refused."""
    dry_run: bool = False
    """Report what would be done; refuse only non-finite updates."""
    max_discards: PositiveInt = 20
    """Updates refused in a row before the run stops as unstable. [updates]"""
    snapshots: SnapshotConfig = SnapshotConfig()
    hardware: HardwareConfig = HardwareConfig()
    attribution: AttributionConfig = AttributionConfig()
    samples: SampleConfig = SampleConfig()
    signs: SignsConfig = SignsConfig()
    trends: TrendsConfig = TrendsConfig()
