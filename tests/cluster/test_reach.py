"""Commands on many hosts: answers and reasons by host, in time, a few at once, and nothing left behind."""

from __future__ import annotations

import os
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

from megastable.cluster.reach import (
    Ssh,
    in_this_folder,
    run_on_hosts,
)
from tests.patience import PATIENCE


@dataclass(frozen=True)
class Scripts:
    """A shell script per host, on this one."""

    of: dict[str, str]

    def build_command(self, host: str, command: Sequence[str]) -> list[str]:
        return ["sh", "-c", self.of[host], *command]


@pytest.mark.slow
def test_run_on_gives_answers_and_reasons_by_host() -> None:
    scripts = {
        "good": "echo fine", "bad": "echo much; echo why >&2; exit 3", "silent": "exit 4", "dead": "kill -9 $$",
        "ssh": "echo 'ssh: connect to host second port 22: Connection timed out'; exit 255",
        "slow": "echo began; sleep 600",
    }  # fmt: skip
    order: list[str] = []
    before = time.time()
    found = run_on_hosts(scripts, Scripts(scripts), [], 3.0, told=lambda host, _: order.append(host))
    assert {host: answer.reason for host, answer in found.items()} == {
        "good": None, "bad": "exit code 3: why", "silent": "exit code 4", "dead": "exit code -9",
        "ssh": "ssh: connect to host second port 22: Connection timed out",
        "slow": "no answer within 3 s: began",
    }  # fmt: skip
    assert found["good"].output == "fine" and before <= found["good"].ended <= time.time()
    assert list(found) == list(scripts) and sorted(order) == sorted(scripts) and order[-1] == "slow"


def test_run_on_runs_a_few_at_a_time(tmp_path: Path) -> None:
    """Each looks how many run beside it."""
    script = f"touch {tmp_path}/$$; ls {tmp_path} | wc -l; sleep 0.1; rm {tmp_path}/$$"
    found = run_on_hosts(
        map(str, range(9)), Scripts(dict.fromkeys(map(str, range(9)), script)), [], PATIENCE, at_once=3
    )
    assert {answer.reason for answer in found.values()} == {None}
    assert max(int(answer.output) for answer in found.values()) in (2, 3)


def test_run_on_ends_what_runs_when_interrupted(tmp_path: Path) -> None:
    def stop(*_: object) -> None:
        raise KeyboardInterrupt

    scripts = {
        "long": f"echo $$ > {tmp_path}/pid; exec sleep 600",
        "short": f"until [ -s {tmp_path}/pid ]; do :; done",
    }
    with pytest.raises(KeyboardInterrupt):
        run_on_hosts(scripts, Scripts(scripts), [], PATIENCE, told=stop)
    assert not psutil.pid_exists(int((tmp_path / "pid").read_text()))


@given(st.lists(st.text(st.characters(exclude_characters="\0\n", codec="utf-8")), max_size=3))
def test_in_this_folder_brings_words_to_another_shell_as_they_are(words: list[str]) -> None:
    line = in_this_folder(["printf", "%s\\n", *words])
    found = subprocess.run(["sh", "-c", line], capture_output=True, check=True).stdout.decode()
    assert found == "".join(f"{word}\n" for word in words or [""])


def test_ssh_is_asked_for_the_host_and_for_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By what a program in ssh's place is given; a real one: tests/launch."""
    stand = tmp_path / "ssh"
    stand.write_text('#!/bin/sh\nfor w; do printf "%s\\n" "$w"; done\n')
    stand.chmod(stand.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    found = run_on_hosts(["-oProxyCommand=x"], Ssh(2222), ["true"], PATIENCE)[
        "-oProxyCommand=x"
    ].output.splitlines()
    assert found[-3:-1] == ["--", "-oProxyCommand=x"] and found[-1].endswith(" true")
    assert found[:-3] == ["-o", "BatchMode=yes", "-o", "ConnectTimeout=5", "-p", "2222"]
    assert "-p" not in Ssh().build_command("a", ["true"])
