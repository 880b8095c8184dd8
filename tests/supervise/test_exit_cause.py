"""Why an attempt ended: whatever is known of it, the first cause is named and not what followed from it."""

from __future__ import annotations

from typing import Any

import pytest

from megastable.base import errors
from megastable.cluster.local_attempt import Fate
from megastable.run.events.reading import event_of
from megastable.run.rank_ipc import LastWords, Progress
from megastable.supervise.exit_cause import AttemptEvidence, End, end_of
from megastable.supervise.first_silent import UNKNOWN, FirstSilent

GLOO = "RuntimeError: [gloo/transport/tcp/pair.cc:537] Read error [127.0.0.1]:2759: Connection reset by peer."
LINE = "[08:11] [ERROR] [launch.py:259] ['python', '-u', '--local_rank=1', 'x'] exits with return code = -9"


def words(rank: int, error: str, time: float = 1.0, **more: Any) -> LastWords:
    known = {"host": f"node-{rank}", "pid": 7, "step": 11, "cursor": 88, "code": 1, "where": "train.py:9"}
    return LastWords.model_validate(
        {**known, "rank": rank, "error": error, "time": time, "alone": True, **more}
    )


def end(
    *said: str,
    last: list[LastWords] | None = None,
    fates: dict[int, Fate] | None = None,
    code: int | None = 1,
    log: str = "",
    step: int | None = 10,
    world: int = 2,
    silent: FirstSilent = UNKNOWN,
) -> End:
    progress = Progress(pid=1, host="here", time=0, phase="step", world=world, steps=9, step=step, cursor=80)
    events = [event_of({"event": e}) for e in said]
    return end_of(
        AttemptEvidence(events, last or [], fates or {}, code, log, progress, "here", silent=silent)
    )


SAID = {
    "finished": errors.OK,
    "stopped": errors.STOPPED,
    "handover": errors.HANDOVER,
    "unstable": errors.UNSTABLE,
}


@pytest.mark.parametrize(("said", "code"), SAID.items())
@pytest.mark.parametrize("launcher", [None, 0, 1, 143])
def test_what_the_training_said_counts_before_any_exit_code(
    said: str, code: int, launcher: int | None
) -> None:
    assert end(said, code=launcher, fates={0: Fate(signal=6, host="here")}) == End(code=code, certain=True)


def test_a_hand_over_names_the_hosts_that_compute_wrong() -> None:
    faulty = event_of({"event": "host_faulty", "step": 9, "hosts": ["a.cluster", "b"], "ranks": [1, 2]})
    events = [faulty, faulty, event_of({"event": "handover"})]
    names = {"a.cluster": "node-a"}
    found = end_of(
        AttemptEvidence(events, [], {}, 78, "", None, "here", called=lambda host: names.get(host, host))
    )
    assert found == End(code=errors.HANDOVER, certain=True, faulty=("node-a", "b"))


def test_a_killed_rank_is_named_not_those_that_lost_it() -> None:
    found = end(last=[words(0, GLOO)], fates={0: Fate(code=1), 1: Fate(signal=9, host="here")})
    assert (found.what, found.rank, found.host, found.signal) == ("SIGKILL", 1, "here", 9)
    assert (found.step, found.cursor) == (12, 88)  # the last words are newer than the progress
    assert found.failure == "rank 1 on here was killed by signal 9 (SIGKILL)"


def test_the_launchers_own_sigterm_is_not_the_cause() -> None:
    assert end(fates={0: Fate(signal=15, host="here"), 1: Fate(signal=11)}).what == "SIGSEGV"
    assert end(fates={1: Fate(signal=9, host="here"), 0: Fate(signal=9)}).rank == 1  # as they were seen


def test_an_error_of_its_own_counts_before_what_followed_from_it() -> None:
    last = [words(0, GLOO, 0.5), words(3, "ValueError: no", 2.0), words(2, "KeyError: 'x'", 1.0)]
    found = end(last=last, fates={0: Fate(signal=15, host="here")})
    assert (found.rank, found.host, found.what) == (2, "node-2", "KeyError: 'x'")
    assert found.failure == "rank 2 on node-2 ended with: KeyError: 'x' (train.py:9)"


def test_on_another_host_the_launchers_log_tells() -> None:
    found = end(last=[words(0, GLOO)], log=f"noise\nnode-7: {LINE}\n", fates={0: Fate(code=1)})
    assert (found.host, found.signal, found.what) == ("node-7", 9, "SIGKILL")
    assert end(log=LINE, fates={0: Fate(signal=15, host="here")}).what == "SIGKILL"
    assert found.rank is None and end(log=LINE, fates={0: Fate(code=1), 1: Fate()}).rank == 1
    found = end(log=LINE.replace("-9", "3").replace("'--local_rank=1', ", ""))
    assert (found.code, found.what, found.host) == (3, "code 3", "here")


def test_of_ranks_that_only_lost_another_the_first_silent_one_is_to_blame() -> None:
    silent = FirstSilent((2, 3), "second", "ranks 2, 3 on second fell silent 5.0 s before the others")
    killed = {1: Fate(signal=15, host="first")}  # by the launcher of the witness's host
    for fates in ({}, killed, {0: Fate(code=1)}, {0: Fate(signal=6, host="first")}):
        found = end(last=[words(0, GLOO)], fates=fates, log=LINE.replace("-9", "1"), silent=silent)
        assert (found.what, found.host, found.rank) == ("rank lost", "second", None)
        assert found.failure == silent.told and found.certain and found.step == 12


def test_of_killed_ranks_on_two_hosts_the_one_whose_connection_ended_first_is_to_blame() -> None:
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


def test_the_launcher_numbers_ranks_within_their_host() -> None:
    """Only on the host of rank 0, which reports the progress, are they those of the run."""
    at = Progress(pid=1, host="h0", time=0, phase="step", world=4, steps=9, step=1, cursor=8)

    def of(host: str, progress: Progress | None) -> End:
        names = {"h0": "first", "h1": "second"}
        return end_of(AttemptEvidence([], [], {}, 1, LINE, progress, host, {}, lambda name: names[name]))

    found = of("second", at)
    assert found.failure == "local rank 1 on second was killed by signal 9 (SIGKILL)" and found.rank is None
    assert of("first", at).failure == "rank 1 on first was killed by signal 9 (SIGKILL)"
    assert of("first", None).failure.startswith("local rank 1 on first ")


def test_all_hosts_that_are_gone_are_named() -> None:
    gone = {f"node-{n}": "is gone: no word from it for 31 s" for n in range(12)}
    found = end_of(AttemptEvidence([], [], {}, None, "", None, "here", dict(list(gone.items())[:2])))
    assert found.failure == "host node-0 is gone: no word from it for 31 s; and node-1" and found.host is None
    assert end_of(AttemptEvidence([], [], {}, None, "", None, "here", gone)).failure.endswith(
        ", node-8 and 3 more"
    )


def test_what_was_seen_of_a_process_counts_before_its_connection() -> None:
    silent = FirstSilent((1,), "here", "rank 1 on here ended first, without last words")
    last = [words(0, GLOO)]
    assert end(last=last, fates={1: Fate(signal=9, host="here")}, silent=silent).what == "SIGKILL"
    assert end(last=last, fates={1: Fate(signal=6, host="here")}, silent=silent).what == "SIGABRT"
    assert end(last=last, fates={1: Fate(code=77)}, code=77, silent=silent).what == "connection lost"
    assert end(last=[words(1, "KeyError: 'x'")], silent=silent).what == "KeyError: 'x'"
    assert end(code=77, silent=silent).what == "code 77"  # nobody says that it lost another


def test_nobody_saw_it() -> None:
    assert end(code=None).what == "processes gone"
    assert end(code=0).what == "no word"  # the launcher may end with 0 though a rank was killed
    assert end(code=0, last=[words(0, GLOO)]).what == "connection lost"
    assert end(code=2, step=None).step is None and end(code=2).code == errors.BAD_INPUT


def test_a_rank_without_others_did_not_lose_one() -> None:
    last = [words(0, "ConnectionRefusedError: [Errno 111] Connection refused")]
    found = end(last=last, world=1)
    assert (found.rank, found.what) == (0, last[0].error) and "lost" not in found.failure
