"""Names the ranks that a hang is due to, from their last heartbeats. Pure.

Ranks that wait in a collective are witnesses. To blame are those that the others wait for (cluster/wait_graph.py);
among them, first of all, the ones that have stopped speaking. A stage of a pipeline that waits for another one is a
witness, too.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from megastable.base.activity import EXCHANGE
from megastable.cluster.wait_graph import culprits
from megastable.supervise.exit_cause import Suspects

SILENT = 5.0  # seconds without a heartbeat; one is sent every second
NAMED = 4  # ranks described in full


@dataclass(frozen=True)
class RankView:
    """What is known of a rank. activity: what it did for `lasted` seconds at its last heartbeat, `silent` seconds ago;
    entered: collectives entered by process group. closed: its connection has ended. kernel: of a rank that does not
    answer, the kernel's view."""

    host: str
    activity: str = ""
    lasted: float = 0.0
    silent: float = 0.0
    entered: Mapping[str, int] | None = None
    closed: bool = False
    kernel: str = ""

    @property
    def mute(self) -> bool:
        return self.closed or self.silent >= SILENT


def suspects(ranks: Mapping[int, RankView]) -> Suspects:
    """ranks: all that anything is known of."""
    behind = culprits({rank: view.entered for rank, view in ranks.items() if view.entered is not None})
    # No count tells a stage of a pipeline that waits for another one.
    at_work = [rank for rank, view in sorted(ranks.items()) if view.activity not in ("", EXCHANGE)]
    if any(view.activity == EXCHANGE for view in ranks.values()):
        behind = [rank for rank in behind if rank in at_work] or (behind if behind else at_work)
    mute = sorted(rank for rank, view in ranks.items() if view.mute)
    stopped = sorted(rank for rank, view in ranks.items() if view.kernel)
    blamed = [rank for rank in behind if rank in mute] or behind or mute or stopped
    hosts = {ranks[rank].host for rank in blamed}
    return Suspects(
        told=_told(ranks, blamed, behind),
        host=hosts.pop() if len(hosts) == 1 else None,
        rank=blamed[0] if len(blamed) == 1 else None,
    )


def _told(ranks: Mapping[int, RankView], blamed: Sequence[int], behind: Sequence[int]) -> list[str]:
    found = []
    for rank in blamed[:NAMED]:
        view = ranks[rank]
        parts = []
        if rank in behind:
            parts.append("the others wait for it")
        if view.activity:
            parts.append(f"in {view.activity!r} for {view.lasted + view.silent:.0f} s")
        if view.closed:
            parts.append("its connection has ended")
        elif view.mute:
            parts.append(f"silent for {view.silent:.0f} s")
        if view.kernel:
            parts.append(view.kernel)
        found.append(f"rank {rank} on {view.host}: " + ", ".join(parts))
    if len(blamed) > NAMED:
        found.append(f"and {len(blamed) - NAMED} other ranks")
    if not blamed and ranks:
        found.append("every rank is in the same collective, or none could be told apart: see the stacks")
    return found
