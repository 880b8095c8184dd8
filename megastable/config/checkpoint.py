"""The thresholds by which a checkpoint's content is trusted, each with the reason of its default."""

from __future__ import annotations

from pydantic import NonNegativeInt, PositiveFloat

from megastable.config.section import Section


class VitalsConfig(Section):
    """What a checkpoint remembers of its state, and when a state is another one; see vitals.py.

    probes: samples whose losses it remembers, the first ones of the order; each save costs a forward pass over them,
    and so does each start. 0: no samples; sizes of weights and moments are remembered all the same.

    size_change: relative, of a tensor's norm and largest magnitude. The numbers are read back bit for bit, whatever the
    layout; only the order of a sum differs. Moments that are kept in bf16 are rounded: 2^-8 there, whatever this says.
    loss_change: nats per token, of the median over the probes, computed in fp32 both times; loss_change_low: where one
    of them was in 16 bits. Rounding moves single samples either way.

    rise: nats per token above the checkpoint before and above the latest training losses, from which on a state is not
    called healthy, however calm the steps after it are.

    worse: nats per token, beyond four times their scatter: how much worse than when they were trained on the latest
    samples must be on a state that was resumed from, before the checkpoint is blamed for trouble soon after.
    """

    probes: NonNegativeInt = 32
    size_change: PositiveFloat = 1e-4
    loss_change: PositiveFloat = 0.005
    loss_change_low: PositiveFloat = 0.05
    rise: PositiveFloat = 0.5
    worse: PositiveFloat = 0.5
