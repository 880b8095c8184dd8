"""The goodput to expect on clusters whose GPUs fail as often as Llama 3's, with and without what helps.

python -m benchmarks.expected_goodput [--gpus 64 1024 10000] [--trials 0]

A table in Markdown, from closed formulas (tools/megastable_tools/plan/goodput_model.py); --trials plays each case that
often with dice, too. docs/goodput.md names the source of every number.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from statistics import mean

from megastable_tools.plan.goodput_model import DAY, ExpectedGoodput, FaultyCluster, expected, spares
from megastable_tools.plan.goodput_trial import trial

GPUS = (64, 1024, 10_000)
# Seconds from the launch to the first step. Two ranks of a small model took 6 here, nearly all of it imports; the rest,
# which grows with the cluster, is assumed: rendezvous, compilation, reading a checkpoint.
START, START_PER_GPU = 60.0, 0.024
FAILURES = 2000  # of a trial
LONGEST = 20_000 * DAY


def cases(gpus: int) -> Iterator[tuple[str, FaultyCluster]]:
    """What is compared, for a cluster of so many GPUs."""
    plain = FaultyCluster(gpus=gpus, start=START + START_PER_GPU * gpus).tuned()
    spare = plain.with_spares()
    yield "a lost host is awaited for 4 h; a person undoes spikes", plain
    yield "+ rewinds", plain.with_rewinds()
    yield "a spare takes its place", spare
    yield "+ rewinds", spare.with_rewinds()
    yield "+ rewinds, peer memory", spare.with_peers().with_rewinds()
    yield "goes on without the host", plain.shrinking()
    yield "+ rewinds", plain.shrinking().with_rewinds()
    yield "+ rewinds, peer memory", plain.shrinking().with_peers().with_rewinds()
    halves = plain.shrinking(halves=True)
    yield "goes on without the host, batch a power of two", halves
    yield "+ rewinds, peer memory", halves.with_peers().with_rewinds()


def row(name: str, c: FaultyCluster, found: ExpectedGoodput, trials: int) -> str:
    shares = (
        found.redone, found.copying, found.detection, found.waiting, found.start_up, found.spikes, found.smaller
    )  # fmt: skip
    cells = [name, f"**{found.training:.2%}**", *(f"{share:.2%}" for share in shares)]
    if trials:
        seconds = min(FAILURES / c.rate, LONGEST)
        cells.append(f"{mean(trial(c, seconds, n) for n in range(trials)):.2%}")
    return f"| {' | '.join(cells)} |"


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.expected_goodput", description=__doc__)
    parser.add_argument("--gpus", type=int, nargs="+", default=GPUS)
    parser.add_argument("--trials", type=int, default=0)
    args = parser.parse_args(arguments)
    for gpus in args.gpus:
        base = next(cases(gpus))[1]
        hosts = spares(base)
        print(
            f"\n{gpus:,} GPUs: a failure every {1 / base.rate / 3600:.1f} h, a start takes {base.start:.0f} s, a "
            f"checkpoint every {base.interval / 60:.0f} min; {hosts} spare hosts suffice for 99 % of the failures\n"
        )
        heads = [
            "",
            "goodput",
            "redone",
            "copies",
            "noticing",
            "waiting",
            "starting",
            "spikes",
            "hosts missing",
        ]
        heads += ["by dice"] if args.trials else []
        print(f"| {' | '.join(heads)} |\n|{'---|' * len(heads)}")
        for name, c in cases(gpus):
            print(row(name, c, expected(c), args.trials))


if __name__ == "__main__":
    main()
