"""Hosts that have IPv6 addresses only: supervisor, agents, heartbeats and ranks meet over IPv6."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path

import pytest

from drills.chaos import VARIABLES
from drills.hosts import Hosts
from drills.namespaces import missing
from megastable.base import errors
from tests.launch.test_two_hosts import STEPS, arguments
from tests.patience import PATIENCE

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.slow
@pytest.mark.timeout(3 * PATIENCE)
@pytest.mark.skipif(missing() is not None, reason=str(missing()))
def test_a_supervised_run_over_ipv6(corpus: Path, tmp_path: Path) -> None:
    (tmp_path / "hosts").mkdir()
    with Hosts(tmp_path / "hosts") as hosts:
        shutil.copytree(corpus, hosts.shared.outside / "corpus")
        names = {host.name: f"fd77::{number}" for number, host in enumerate(hosts, 1)}
        lines = ["127.0.0.1 localhost", *(f"{address} {name}" for name, address in names.items())]
        (hosts.folder / "hosts").write_text("\n".join(lines) + "\n")
        running = []
        for number, host in enumerate(hosts):
            only = f"ip address flush dev eth0 && ip address add {names[host.name]}/64 dev eth0 nodad"
            made = host.run(["sh", "-c", only], PATIENCE)
            assert made.returncode == 0, made
            training = arguments(hosts.shared.folder / "corpus", hosts.shared.folder / "run")
            where = ["--no_ssh", "--num_nodes", "2", "--num_gpus", "1", "--node_rank", str(number)]
            words = [sys.executable, str(ROOT / "launch/supervise.py"), *training, "--", *where]
            log = tmp_path / f"{host}.log"
            running.append(host.start(words, log, {**VARIABLES, "PYTHONPATH": str(ROOT)}, ROOT))
        codes = [one.wait(PATIENCE) for one in running]
        said = "\n".join((tmp_path / f"{host}.log").read_text()[-3000:] for host in hosts)
        assert codes == [errors.OK, errors.OK], said
        summary = json.loads((hosts.shared.outside / "run/summary.json").read_text())
        events = (hosts.shared.outside / "run/journal.jsonl").read_text()
    assert (summary["steps"], summary["world_size"]) == (STEPS, 2)
    assert events.count('"event":"launched"') + events.count('"event": "launched"') == 1, said
