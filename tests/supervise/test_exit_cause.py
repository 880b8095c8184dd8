"""Why an attempt ended: whatever is known of it, the first cause is named and not what followed from it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megastable.base import errors
from megastable.cluster.fleet import Fate
from megastable.cluster.store import Heard
from megastable.run.events.reading import event_of
from megastable.run.rank_ipc import LastWords, Progress
from megastable.supervise.exit_cause import (
    UNKNOWN,
    AttemptEvidence,
    End,
    FirstSilent,
    find_exit_cause,
    find_first_silent,
)

GLOO = "RuntimeError: [gloo/transport/tcp/pair.cc:537] Read error [127.0.0.1]:2759: Connection reset by peer."
LINE = "[08:11] [ERROR] [launch.py:259] ['python', '-u', '--local_rank=1', 'x'] exits with return code = -9"


def words(rank: int, error: str, time: float = 1.0, **more: Any) -> LastWords:
    known = {"host": f"node-{rank}", "pid": 7, "step": 11, "cursor": 88, "code": 1, "where": "train.py:9"}
    return LastWords.model_validate(
        {**known, "rank": rank, "error": error, "time": time, "alone": True, **more}
    )


def end(
    *said: str, last: Sequence[LastWords] = (), fates: dict[int, Fate] | None = None, code: int | None = 1,
    log: str = "", step: int | None = 10, silent: FirstSilent = UNKNOWN,
) -> End:  # fmt: skip
    progress = Progress(pid=1, host="here", time=0, phase="step", world=2, steps=9, step=step, cursor=80)
    events = [event_of({"event": e}) for e in said]
    return find_exit_cause(
        AttemptEvidence(events, last, fates or {}, code, log, progress, "here", silent=silent)
    )


@pytest.mark.parametrize("said", ["finished", "stopped", "handover", "unstable"])
@pytest.mark.parametrize("launcher", [None, 0, 143])
def test_end_of_goes_by_what_the_training_said_before_any_exit_code(said: str, launcher: int | None) -> None:
    code = {"finished": 0, "stopped": 75, "handover": 78, "unstable": 76}[said]
    assert end(said, code=launcher, fates={0: Fate(signal=6, host="here")}) == End(code=code, certain=True)


def test_end_of_a_handover_names_the_hosts_that_compute_wrong() -> None:
    faulty = event_of({"event": "host_faulty", "step": 9, "hosts": ["a.cluster", "b"], "ranks": [1, 2]})
    events = [faulty, faulty, event_of({"event": "handover"})]
    names = {"a.cluster": "node-a"}
    found = find_exit_cause(
        AttemptEvidence(events, [], {}, 78, "", None, "here", called=lambda host: names.get(host, host))
    )
    assert found == End(code=errors.HANDOVER, certain=True, faulty=("node-a", "b"))


def test_end_of_names_a_killed_rank_not_those_that_lost_it() -> None:
    found = end(last=[words(0, GLOO)], fates={0: Fate(code=1), 1: Fate(signal=9, host="here")})
    assert (found.what, found.rank, found.host, found.signal) == ("SIGKILL", 1, "here", 9)
    assert (found.step, found.cursor) == (12, 88)  # the last words are newer than the progress
    assert found.failure == "rank 1 on here was killed by signal 9 (SIGKILL)"


def test_end_of_passes_over_the_launchers_own_sigterm() -> None:
    assert end(fates={0: Fate(signal=15, host="here"), 1: Fate(signal=11)}).what == "SIGSEGV"
    assert end(fates={1: Fate(signal=9, host="here"), 0: Fate(signal=9)}).rank == 1  # as they were seen


def test_end_of_names_an_error_before_what_followed_from_it() -> None:
    last = [words(0, GLOO, 0.5), words(3, "ValueError: no", 2.0), words(2, "KeyError: 'x'", 1.0)]
    found = end(last=last, fates={0: Fate(signal=15, host="here")})
    assert (found.rank, found.host, found.what) == (2, "node-2", "KeyError: 'x'")
    assert found.failure == "rank 2 on node-2 ended with: KeyError: 'x' (train.py:9)"


def test_end_of_reads_the_launchers_log() -> None:
    found = end(last=[words(0, GLOO)], log=f"noise\n{LINE}\n", fates={0: Fate(code=1), 1: Fate()})
    assert (found.host, found.rank, found.signal, found.what) == ("here", 1, 9, "SIGKILL")
    assert end(log=LINE, fates={0: Fate(signal=15, host="here")}).what == "SIGKILL"
    found = end(log=LINE.replace("-9", "3").replace("'--local_rank=1', ", ""))
    assert (found.code, found.what, found.host) == (3, "code 3", "here")


def test_end_of_blames_the_first_silent_rank_not_the_witnesses() -> None:
    silent = FirstSilent((2, 3), "second", "ranks 2, 3 on second fell silent 5.0 s before the others")
    killed = {1: Fate(signal=15, host="first")}  # by the launcher of the witness's host
    for fates in ({}, killed, {0: Fate(code=1)}, {0: Fate(signal=6, host="first")}):
        found = end(last=[words(0, GLOO)], fates=fates, log=LINE.replace("-9", "1"), silent=silent)
        assert (found.what, found.host, found.rank) == ("rank lost", "second", None)
        assert found.failure == silent.told and found.certain and found.step == 12


def test_end_of_blames_the_killed_rank_whose_connection_ended_first() -> None:
    """NCCL's watchdog aborts the ranks that lost it; the agents are asked in the order of the hosts."""
    fates = {
        0: Fate(signal=6, host="first"),
        9: Fate(signal=9, host="second"),
        8: Fate(signal=15, host="second"),
    }
    silent = FirstSilent((9,), "second", "rank 9 on second ended first, without last words")
    found = end(fates=fates, silent=silent)
    assert (found.what, found.host, found.rank) == ("SIGKILL", "second", 9)
    followed = FirstSilent((8,), "second", "rank 8 on second ended first, without last words")
    assert end(fates=fates, silent=followed).rank == 0  # its launcher ended it: never the cause
    assert end(fates=fates).rank == 0


def test_end_of_knows_that_the_launcher_numbers_ranks_within_their_host() -> None:
    """Only on the host of rank 0, which reports the progress, are they those of the run."""
    at = Progress(pid=1, host="h0", time=0, phase="step", world=4, steps=9, step=1, cursor=8)

    def of(host: str, progress: Progress | None) -> End:
        names = {"h0": "first", "h1": "second"}
        return find_exit_cause(
            AttemptEvidence([], [], {}, 1, LINE, progress, host, {}, lambda name: names[name])
        )

    found = of("second", at)
    assert found.failure == "local rank 1 on second was killed by signal 9 (SIGKILL)" and found.rank is None
    assert of("first", at).failure == "rank 1 on first was killed by signal 9 (SIGKILL)"
    assert of("first", None).failure.startswith("local rank 1 on first ")


def test_end_of_names_all_hosts_that_are_gone() -> None:
    gone = {f"node-{n}": "is gone: no word from it for 31 s" for n in range(12)}
    found = find_exit_cause(AttemptEvidence([], [], {}, None, "", None, "here", dict(list(gone.items())[:2])))
    assert found.failure == "host node-0 is gone: no word from it for 31 s; and node-1" and found.host is None
    assert find_exit_cause(AttemptEvidence([], [], {}, None, "", None, "here", gone)).failure.endswith(
        ", node-8 and 3 more"
    )


def test_end_of_what_nobody_saw() -> None:
    assert end(code=None).what == "processes gone"
    assert end(code=0).what == "no word"  # the launcher may end with 0 though a rank was killed
    assert end(code=0, last=[words(0, GLOO)]).what == "connection lost"
    assert end(code=2, step=None).step is None and end(code=2).code == errors.BAD_INPUT


NOW = 1000.0
HOSTS = ("first", "first", "second", "second")


def rank(number: int, at: float, closed: float | None = None, cut: bool = False) -> Heard:
    """at, closed: seconds before `NOW`."""
    return Heard(
        number, 1, HOSTS[number], 7, NOW - at, closed=None if closed is None else NOW - closed, cut=cut
    )


def found(*ranks: Heard, spoke: tuple[int, ...] = (0, 1)) -> FirstSilent:
    return find_first_silent(ranks, spoke, str, NOW)


def test_first_silent_is_a_killed_rank_before_witnesses_and_those_the_launcher_ends() -> None:
    told = found(rank(0, 3.0, 2.9), rank(1, 3.1, 2.8), rank(2, 3.2, 2.0), rank(3, 3.3, 3.0))
    assert (told.ranks, told.rank, told.host) == ((3,), 3, "second")
    assert told.told == "rank 3 on second ended first, without last words"


def test_first_silent_is_a_host_without_power() -> None:
    # second is without power 9 s before NOW; its kernel resets the connections when it is back
    told = found(
        rank(0, 4.0, 3.3), rank(1, 4.1, 3.2), rank(2, 9.1, 3.6, cut=True), rank(3, 9.9, 3.6, cut=True)
    )
    assert (told.ranks, told.rank, told.host) == ((2, 3), None, "second")
    assert told.told == "ranks 2, 3 on second fell silent 6.6 s before the others"


def test_first_silent_is_nobody_that_ends_after_a_witness() -> None:
    """Rank 3 was ended by the launcher; rank 0 had lost a rank that the store never heard of."""
    assert found(rank(0, 3.0, 2.9), rank(3, 3.3, 1.8), spoke=(0,)).ranks == ()


def test_first_silent_is_nobody_without_a_difference() -> None:
    assert found().ranks == ()
    assert found(*(rank(n, 9.0) for n in range(4)), spoke=()).ranks == ()  # the store itself was cut off
    assert found(rank(0, 9.0), rank(2, 9.2), rank(3, 4.0, 3.0), spoke=(3,)).ranks == ()  # two hosts at once
    assert found(rank(0, 3.0, 2.0), rank(1, 3.0, 2.0), spoke=(0, 1)).ranks == ()


@given(
    lost=st.integers(0, 3),
    late=st.lists(st.floats(0.0, 8.0), min_size=4, max_size=4),
    after=st.lists(st.floats(0.001, 2.0), min_size=4, max_size=4),
)
def test_first_silent_is_whoever_dies_first_however_late_the_heartbeats(
    lost: int, late: list[float], after: list[float]
) -> None:
    """One rank dies at 0; the others leave last words and end later."""
    ends = [0.0 if number == lost else after[number] for number in range(4)]
    ranks = [rank(n, 10 - ends[n] + late[n], 10 - ends[n]) for n in range(4)]
    told = found(*ranks, spoke=tuple(n for n in range(4) if n != lost))
    assert told.ranks == (lost,) and told.host == HOSTS[lost]
