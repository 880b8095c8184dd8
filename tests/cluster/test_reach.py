"""Commands on many hosts: answers and reasons by host, in time, a few at once, and nothing left behind."""

from __future__ import annotations

import os
import shlex
import shutil
import socket
import stat
import subprocess
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megastable.base.errors import ConfigError
from megastable.cluster.child_process import ChildProcess, Result
from megastable.cluster.reach import (
    KEPT,
    Local,
    Srun,
    Ssh,
    allocated,
    in_this_folder,
    python,
    reason_of,
    run_on,
)
from tests.patience import PATIENCE


@dataclass(frozen=True)
class Scripts:
    """A shell script per host, on this one."""

    of: dict[str, str]

    def words(self, host: str, command: Sequence[str]) -> list[str]:
        return ["sh", "-c", self.of[host], *command]


@pytest.mark.slow
def test_answers_and_reasons_by_host() -> None:
    scripts = {
        "good": "echo fine", "bad": "echo much; echo why >&2; exit 3", "silent": "exit 4", "dead": "kill -9 $$",
        "ssh": "echo 'ssh: connect to host second port 22: Connection timed out'; exit 255",
        "slow": "echo began; sleep 600",
    }  # fmt: skip
    order: list[str] = []
    before = time.time()
    found = run_on(scripts, Scripts(scripts), [], 3.0, told=lambda host, _: order.append(host))
    assert {host: answer.reason for host, answer in found.items()} == {
        "good": None, "bad": "exit code 3: why", "silent": "exit code 4", "dead": "exit code -9",
        "ssh": "ssh: connect to host second port 22: Connection timed out",
        "slow": "no answer within 3 s: began",
    }  # fmt: skip
    assert found["good"].output == "fine" and before <= found["good"].ended <= time.time()
    assert list(found) == list(scripts) and sorted(order) == sorted(scripts) and order[-1] == "slow"


def test_a_few_at_a_time(tmp_path: Path) -> None:
    """Each looks how many run beside it."""
    script = f"touch {tmp_path}/$$; ls {tmp_path} | wc -l; sleep 0.1; rm {tmp_path}/$$"
    found = run_on(
        map(str, range(9)), Scripts(dict.fromkeys(map(str, range(9)), script)), [], PATIENCE, at_once=3
    )
    assert {answer.reason for answer in found.values()} == {None}
    assert max(int(answer.output) for answer in found.values()) in (2, 3)


def test_one_that_cannot_be_started_does_not_keep_the_others() -> None:
    class Mixed:
        def words(self, host: str, command: Sequence[str]) -> list[str]:
            return [host]

    found = run_on(["no-such-program", "true", "n\0l"], Mixed(), [], PATIENCE)
    assert found["true"].reason is None and "could not be started" in str(found["no-such-program"].reason)
    assert "could not be started" in str(found["n\0l"].reason)


def test_an_interrupt_ends_what_runs(tmp_path: Path) -> None:
    def stop(*_: object) -> None:
        raise KeyboardInterrupt

    scripts = {
        "long": f"echo $$ > {tmp_path}/pid; exec sleep 600",
        "short": f"until [ -s {tmp_path}/pid ]; do :; done",
    }
    with pytest.raises(KeyboardInterrupt):
        run_on(scripts, Scripts(scripts), [], PATIENCE, told=stop)
    assert not psutil.pid_exists(int((tmp_path / "pid").read_text()))


@given(st.lists(st.text(st.characters(exclude_characters="\0\n", codec="utf-8")), max_size=3))
def test_words_reach_another_shell_as_they_are(words: list[str]) -> None:
    line = in_this_folder(["printf", "%s\\n", *words])
    found = subprocess.run(["sh", "-c", line], capture_output=True, check=True).stdout.decode()
    assert found == "".join(f"{word}\n" for word in words or [""])


def test_our_modules_are_found_from_anywhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("PYTHONPATH", raising=False)
    found = run_on(["x"], Local(), python("megastable.cluster.host_check", "--help"), PATIENCE)
    assert found["x"].reason is None and "--folder" in found["x"].output


def test_a_large_answer_arrives_whole() -> None:
    line = "x" * (KEPT - 1)
    assert ChildProcess(["printf", "%s", line[:100_000]], kept=KEPT).wait() == Result(0, line[:100_000])
    assert (
        len(ChildProcess(["sh", "-c", f"head -c {KEPT + 9} /dev/zero | tr '\\0' x"], kept=KEPT).wait().tail)
        == KEPT
    )


def test_ssh_is_asked_for_the_host_and_for_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By what a program in ssh's place is given; a real one: tests/launch."""
    stand = tmp_path / "ssh"
    stand.write_text('#!/bin/sh\nfor w; do printf "%s\\n" "$w"; done\n')
    stand.chmod(stand.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    found = run_on(["-oProxyCommand=x"], Ssh(2222), ["true"], PATIENCE)[
        "-oProxyCommand=x"
    ].output.splitlines()
    assert found[-3:-1] == ["--", "-oProxyCommand=x"] and found[-1].endswith(" true")
    assert found[:-3] == ["-o", "BatchMode=yes", "-o", "ConnectTimeout=5", "-p", "2222"]
    assert "-p" not in Ssh().words("a", ["true"])


def test_ssh_says_why_it_fails() -> None:
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))  # and does not listen
        answer = run_on(["127.0.0.1"], Ssh(closed.getsockname()[1]), ["true"], PATIENCE)["127.0.0.1"]
    assert answer.reason is not None and "Connection refused" in answer.reason


def test_srun_runs_one_task_on_that_node() -> None:
    words = Srun().words("n2", ["true"])
    assert words[0] == "srun" and {"--nodelist=n2", "--ntasks=1", "--overlap"} <= set(words)
    assert shlex.split(words[-1])[-1] == "true"


def test_nodes_of_an_allocation(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert allocated({}) is None
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ConfigError, match=r"n\[1-2\].*scontrol"):
        allocated({"SLURM_JOB_NODELIST": "n[1-2]"})


def test_scontrol_lists_the_nodes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if shutil.which("scontrol") is None:
        pytest.skip("no scontrol (Debian: slurm-client)")
    (tmp_path / "conf").write_text(
        "ClusterName=x\nSlurmctldHost=localhost\nNodeName=n[1-3]\nPartitionName=p Nodes=ALL\n"
    )
    monkeypatch.setenv("SLURM_CONF", str(tmp_path / "conf"))
    assert allocated({"SLURM_JOB_NODELIST": "n[1-2],x7"}) == ["n1", "n2", "x7"]


def test_reasons_are_safe_to_print() -> None:
    assert reason_of(Result(255, "a\n\x1b[31mred\n"), 1.0) == r"\x1b[31mred"
    assert reason_of(Result(0, "anything"), 1.0) is None
