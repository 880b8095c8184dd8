"""Computes what is known beforehand on every device of this host, and prints what was wrong as one JSON object.

    python -m megastable.cluster.burn_in --seconds 600 --seed 1
    python -m megastable.cluster.burn_in --seconds 1 --seed 1 --first-round 17    # repeats that round

`preflight.py --burn-in` runs it on every host.
"""

from __future__ import annotations

import argparse
import signal
from pathlib import Path

from megastable.cluster.burn_in.rank_processes import be_a_rank, burn_in
from megastable.cluster.host_check import BURN_IN


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seconds", type=float, required=True, help="of work; at least one round")
    parser.add_argument("--seed", type=int, default=0, help="of all inputs")
    parser.add_argument("--first-round", type=int, default=0)
    rank = parser.add_argument_group("one rank, started by this program")
    rank.add_argument("--phase", choices=("rounds", "exchange"))
    rank.add_argument("--kind", choices=("cuda", "cpu"))
    rank.add_argument("--rank", type=int)
    rank.add_argument("--of", type=int)
    rank.add_argument("--folder", type=Path)
    given = parser.parse_args()
    signal.alarm(int(given.seconds + BURN_IN))  # the last resort: whoever asked may be gone
    if given.phase is None:
        print(burn_in(given.seconds, given.seed, given.first_round).model_dump_json(), flush=True)
        return 0
    return be_a_rank(
        given.phase,
        given.kind,
        given.rank,
        given.of,
        given.folder,
        given.seconds,
        given.seed,
        given.first_round,
    )


if __name__ == "__main__":
    raise SystemExit(main())
