"""The goodput to expect on clusters whose GPUs fail as often as Llama 3's, with and without what helps.

python -m benchmarks.expected_goodput [--gpus 64 1024 10000] [--trials 0]

A table in Markdown, from closed formulas (tools/megastable_tools/plan/goodput_model.py); --trials plays each case that
often with dice, too. docs/goodput.md names the source of every number.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from statistics import mean

from megastable_tools.plan.goodput_model import (
    DAY,
    ExpectedGoodput,
    FaultyCluster,
    count_spares,
    expect_goodput,
    play_trial,
)

GPUS = (64, 1024, 10_000)
# Seconds from the launch to the first step. Two ranks of a small model took 6 here, nearly all of it imports; the rest,
# which grows with the cluster, is assumed: rendezvous, compilation, reading a checkpoint.
START, START_PER_GPU = 60.0, 0.024
FAILURES = 2000  # of a trial
LONGEST = 20_000 * DAY


def cases(gpus: int) -> Iterator[tuple[str, FaultyCluster]]:
    """What is compared, for a cluster of so many GPUs."""
    plain_cluster = FaultyCluster(gpus=gpus, start=START + START_PER_GPU * gpus).with_tuned_interval()
    spare_cluster = plain_cluster.with_spares()
    yield "a lost host is awaited for 4 h; a person undoes spikes", plain_cluster
    yield "+ rewinds", plain_cluster.with_rewinds()
    yield "a spare takes its place", spare_cluster
    yield "+ rewinds", spare_cluster.with_rewinds()
    yield "+ rewinds, peer memory", spare_cluster.with_peers().with_rewinds()
    yield "goes on without the host", plain_cluster.with_shrinking()
    yield "+ rewinds", plain_cluster.with_shrinking().with_rewinds()
    yield "+ rewinds, peer memory", plain_cluster.with_shrinking().with_peers().with_rewinds()
    halving_cluster = plain_cluster.with_shrinking(halves=True)
    yield "goes on without the host, batch a power of two", halving_cluster
    yield "+ rewinds, peer memory", halving_cluster.with_peers().with_rewinds()


def row(name: str, c: FaultyCluster, found: ExpectedGoodput, trials: int) -> str:
    loss_shares = (
        found.redone, found.copying, found.detection, found.waiting, found.start_up, found.spikes, found.smaller
    )  # fmt: skip
    row_cells = [name, f"**{found.training:.2%}**", *(f"{share:.2%}" for share in loss_shares)]
    if trials:
        trial_seconds = min(FAILURES / c.rate, LONGEST)
        row_cells.append(
            f"{mean(play_trial(c, trial_seconds, trial_seed) for trial_seed in range(trials)):.2%}"
        )
    return f"| {' | '.join(row_cells)} |"


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.expected_goodput", description=__doc__)
    parser.add_argument("--gpus", type=int, nargs="+", default=GPUS)
    parser.add_argument("--trials", type=int, default=0)
    parsed_arguments = parser.parse_args(arguments)
    for gpus in parsed_arguments.gpus:
        base = next(cases(gpus))[1]
        hosts = count_spares(base)
        print(
            f"\n{gpus:,} GPUs: a failure every {1 / base.rate / 3600:.1f} h, a start takes {base.start:.0f} s, a "
            f"checkpoint every {base.interval / 60:.0f} min; {hosts} spare hosts suffice for 99 % of the failures\n"
        )
        table_heads = [
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
        table_heads += ["by dice"] if parsed_arguments.trials else []
        print(f"| {' | '.join(table_heads)} |\n|{'---|' * len(table_heads)}")
        for case_name, faulty_cluster in cases(gpus):
            print(row(case_name, faulty_cluster, expect_goodput(faulty_cluster), parsed_arguments.trials))


if __name__ == "__main__":
    main()
