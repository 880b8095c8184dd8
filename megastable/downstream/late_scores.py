"""Tells the trackers of a complete run the scores that were journaled after they were closed."""

from __future__ import annotations

from collections.abc import Callable

from megastable.config.tree import RunConfig
from megastable.run.directory import RunDirectory, read_object
from megastable.run.events.event import whole
from megastable.training.tracking import Tracking, run_point


def tell_trackers(config: RunConfig, run: RunDirectory, say: Callable[[str], None]) -> None:
    """Open the trackers once more, as another process of the run: they read in the journal what they do not know yet.

    Returns when they are closed, or after some minutes: they go on by themselves.
    """
    summary = read_object(run.summary)
    steps, tokens = whole(summary.get("steps")), whole(summary.get("tokens"))
    if (
        steps is None or tokens is None
    ):  # after fewer steps than they know, they would take the others for undone
        return
    tracking = Tracking(config.logging, run, run_point(config, run, steps, tokens, None), say)
    # They wait for those of the training as long as for one call, and end as long after it at the latest.
    tracking.close(3 * config.logging.tracker_timeout)
