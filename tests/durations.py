"""What each test costs, and which quick tests cost too much.

    python -m tests.durations [--top 20]     after a run of pytest: the slowest, what is over the limit, and an error
                                             for what is over twice the limit

pytest writes `.pytest_cache/durations.tsv` (conftest.py): a line for the call of each test, and one for its fixtures.

A cost is in seconds on a quiet core: the processor time of the test and of all that it started, and the time in which
its cores were idle, because it slept or waited for a disk. What other programs took of a busy machine is not in it.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import multiprocessing.forkserver
import os
import sys
import time
from pathlib import Path
from typing import NamedTuple

LIMIT = 5.0  # seconds that a quick test may cost, and so may its fixtures
# Over this it is an error. Between the two it is only named: the same test costs half as much again on another kind of
# processor, and a suite must not fail because of the machine that it runs on.
ERROR = 2 * LIMIT
FILE = Path(__file__).parent.parent / ".pytest_cache/durations.tsv"
TICK = os.sysconf("SC_CLK_TCK")
# Tests replace them where they come from.
get_affinity, read_times, read_monotonic = os.sched_getaffinity, os.times, time.monotonic

# Quick tests, or fixtures (`FILE::fixtures`), that may cost more than the limit, and why they stay quick.
_SHARED = "one start of the ranks trains all that its cases look at"
_END_TO_END = "the end-to-end test of its room"
_STARTS = "a process is started for every moment at which it is hit"
_PROPERTY = "a property test of what no example can show"
ALLOWED: dict[str, str] = {
    "tests/parallel/test_pairs.py::test_choices_in_fp32_are_the_plain_rules": _SHARED,
    "tests/engine/test_replicas.py::test_sums_in_two_steps_give_the_bytes_of_a_plain_reference[dp4]": _SHARED,
    "tests/engine/test_interleaved.py::test_gives_the_same_bytes_as_1f1b[pp2-dp2]": "four ranks train two engines",
    "tests/parallel/test_norm_gradients.py::test_one_message_for_all_norms_gives_the_bytes_of_one_each[2]": _SHARED,
    "tests/parallel/test_gathered_again.py::test_steps_that_gather_again_are_the_same_bytes[2]": _SHARED,
    "tests/parallel/test_overlapped.py::test_steps_with_messages_beside_the_products_are_the_same_bytes[quick]": (
        _SHARED
    ),
    "tests/checkpoint/test_shared_reading.py::test_every_file_is_read_once[tp2-dp2-tp2-dp2]": _END_TO_END,
    "tests/training/test_startup_counts.py::test_few_messages_and_files_before_the_first_step[dp2]": _END_TO_END,
    "tests/training/test_startup_counts.py::test_a_rank_imports_no_more_than_it_needs": "imports all of a rank",
    "tests/attribution/test_sample_replay.py::fixtures": _SHARED,
    "tests/training/test_uploads_behind.py::test_a_wiped_run_goes_on_as_one_that_was_not": _END_TO_END,
    "tests/checkpoint/test_uploads.py::test_an_image_is_the_directory_and_brings_it_back": _END_TO_END,
    "tests/guard/test_sample_examiner.py::test_ranks_name_the_same_samples[as_fsdp-2]": "two ranks import FSDP2",
    "tests/guard/test_loop_guard.py::test_guard_rewinds_on_several_ranks[as_fsdp-2]": "two ranks import FSDP2",
    "tests/guard/test_sample_examiner.py::test_ranks_look_without_a_trace[as_fsdp]": "two ranks import FSDP2",
    "tests/forensics/court/test_skip_review.py::test_skip_review_gives_back_what_is_new_and_the_next_start_reads_it": (
        "a run, a review with its branches, and the next start"
    ),
    "tests/recovery/test_replay_trials.py::test_a_death_in_a_trial_leaves_the_run_as_it_was": (
        "three runs: one that dies in a trial, its resume, and one that does not die"
    ),
    "tests/forensics/court/test_hold_court.py::fixtures": _SHARED,
    "tests/forensics/court/test_hold_court.py::test_court_finds_a_planted_region_well_chosen": "14 branches",
    "tests/recovery/test_tensor_watch.py::test_a_jump_that_the_steps_do_not_make_again_is_undone": _END_TO_END,
    "tests/recovery/test_routing_watch.py::test_what_the_steps_make_again_is_mended_by_the_remedy_that_wins": (
        _END_TO_END
    ),
    "tests/recovery/test_routing_watch.py::test_a_bias_that_the_steps_move_again_is_the_runs_own": _END_TO_END,
    "tests/checkpoint/test_plain.py::fixtures": _SHARED,
    "tests/convert/foreign/test_deepspeed.py::fixtures": _SHARED,
    "tests/cluster/test_agent.py::test_remote_attempt_names_a_host_that_lost_its_processes_at_once": _END_TO_END,
    "tests/convert/huggingface/test_continuing.py::test_import_continue_export": _END_TO_END,
    "tests/recovery/test_recovery.py::test_a_rewind_is_exact": _END_TO_END,
    "tests/study/test_studies.py::test_compare_trains_shows_and_grows": _END_TO_END,
    "tests/supervise/test_asked_to_stop.py::test_signal_ends_a_run_with_all_that_it_has": _END_TO_END,
    "tests/training/test_hardware_watches.py::test_one_fault_counts_once": _END_TO_END,
    "tests/training/test_resume.py::test_resume_is_bit_for_bit": _END_TO_END,
    "tests/training/test_memory_resume.py::test_killed_ranks_resume_from_their_hosts_memory": _END_TO_END,
    "tests/training/test_memory_resume.py::fixtures": _SHARED,
    "tests/engine/test_gate.py::test_gate_lets_a_non_finite_step_change_nothing": _END_TO_END,
    "tests/recovery/test_incident_log.py::test_crash_in_the_middle_of_an_incident_loses_nothing_of_it": _STARTS,
    "tests/tools/test_cli.py::test_help_of_every_command_imports_nothing_heavy": "starts every command",
    "tests/convert/test_derived_runs.py::fixtures": _SHARED,
    "tests/forensics/scoring/test_document_scores.py::fixtures": _SHARED,
    "tests/forensics/test_deferred.py::fixtures": _SHARED,
    "tests/training/test_failures.py::fixtures": _SHARED,
    "tests/fp8/test_apply.py::test_fp8_layouts_train_as_one_process_does": _END_TO_END,
    "tests/training/test_failures.py::test_sigterm_to_one_rank_ends_all_in_a_checkpoint": _END_TO_END,
    "tests/test_rooms.py::test_arrows_point_down": "the first case reads all files",
    "tests/data/test_loader.py::test_loader_parts_of_a_context_group_are_its_samples": _PROPERTY,
    "tests/guard/test_policy_machine.py::TestLadder::runTest": _PROPERTY,
    "tests/config/test_recipe.py::test_override_arrives_and_survives_yaml": _PROPERTY,
    "tests/data/test_index_fuzz.py::test_shard_is_read_right_or_refused_when_damaged": _PROPERTY,
    "tests/data/test_selection.py::test_released_withdraws_what_incidents_said_alone": _PROPERTY,
    "tests/data/test_selection.py::test_selection_is_the_naive_walk_in_every_epoch": _PROPERTY,
    "tests/data/test_selection.py::test_selection_loses_the_named_samples_and_no_others": _PROPERTY,
    "tests/data/test_loader.py::test_loader_trains_every_position_once_or_skips_it": _PROPERTY,
    "tests/base/test_distributed.py::test_run_ranks_notices_a_rank_that_ends": "a rank waits for one that has ended",
}


class Clock(NamedTuple):
    """Readings at one moment, in seconds."""

    wall: float
    processor: float  # of this process, its ended children, and the ranks of tests/distributed.py
    idle: float  # of the cores that this process may use, by core

    @classmethod
    def read(cls) -> Clock:
        own = read_times()
        processor = own.user + own.system + own.children_user + own.children_system
        server = multiprocessing.forkserver._forkserver._forkserver_pid  # type: ignore[attr-defined]
        if server is not None:  # ranks are its children, not ours; what it imports once is for all tests
            with contextlib.suppress(OSError):  # it has ended, and the next one is not started yet
                ended = Path(f"/proc/{server}/stat").read_text().rpartition(")")[2].split()[13:15]
                processor += sum(map(int, ended)) / TICK
        cores = {f"cpu{core}" for core in get_affinity(0)}
        with open("/proc/stat") as lines:
            idle = sum(int(line.split()[4]) for line in lines if line.split()[0] in cores)
        return cls(read_monotonic(), processor, idle / TICK / len(cores))

    def cost_until(self, end: Clock) -> float:
        """Seconds from this moment to `end`; not below 0, as the count of ranks begins again with their server."""
        return max(0.0, min(end.wall - self.wall, end.processor - self.processor + end.idle - self.idle))


def write_durations(costs: dict[str, float]) -> None:
    FILE.parent.mkdir(exist_ok=True)
    rows = sorted(costs.items(), key=lambda row: -row[1])
    FILE.write_text("".join(f"{cost:.2f}\t{name}\n" for name, cost in rows))


def find_slow_tests(costs: dict[str, float], limit: float) -> dict[str, float]:
    """Those over `limit` that `ALLOWED` does not name, with or without their parameters."""
    return {
        name: cost
        for name, cost in costs.items()
        if cost > limit and name not in ALLOWED and name.partition("[")[0] not in ALLOWED
    }


def main() -> int:
    parser = argparse.ArgumentParser(
        description="What the tests of the last run cost, in seconds on a quiet core."
    )
    parser.add_argument("--top", type=int, default=10, help="how many to list (default: 10)")
    parser.add_argument(
        "--names", action="store_true", help="only the names of those that are errors, with their files"
    )
    options = parser.parse_args()
    costs = {name: float(cost) for cost, name in (line.split("\t") for line in FILE.read_text().splitlines())}
    too_slow = find_slow_tests(costs, ERROR)
    if options.names:
        print("\n".join(name.removesuffix("::fixtures") for name in too_slow))
        return 0
    rooms: collections.defaultdict[str, float] = collections.defaultdict(float)
    for name, cost in costs.items():
        rooms["/".join(name.partition("::")[0].split("/")[:2])] += cost
    most = sorted(rooms.items(), key=lambda room: -room[1])[:12]
    print(
        f"{sum(costs.values()):.0f} s of one core; most: "
        + ", ".join(f"{room} {cost:.0f}" for room, cost in most)
    )
    for name, cost in list(costs.items())[: options.top]:
        print(f"{cost:7.2f}  {name}")
    for name, cost in find_slow_tests(costs, LIMIT).items():
        over = f"over {ERROR:g} s, an error" if name in too_slow else f"over {LIMIT:g} s"
        print(
            f"{over}: {cost:.1f} s, {name}: make it cheaper or slow, or give a reason in tests/durations.py"
        )
    return 1 if too_slow else 0


if __name__ == "__main__":
    sys.exit(main())
