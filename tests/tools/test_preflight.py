"""`megastable preflight` as its users meet it: on one host, over a real ssh, and where something is wrong."""

from __future__ import annotations

import json
import os
import shutil
import stat
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from megastable.cluster.launcher import find_free_port
from megastable.commands.root import app
from tests.patience import PATIENCE
from tests.tools.cli import Done, call

ROOT = Path(__file__).parents[2]
SERVER = """\
Port {port}
ListenAddress 127.0.0.1
HostKey {folder}/host
AuthorizedKeysFile {folder}/user.pub
StrictModes no
UsePAM no
PermitRootLogin prohibit-password
PidFile none
"""
CLIENT = """\
#!/bin/sh
exec {ssh} -F none -i {folder}/user -o IdentitiesOnly=yes -o LogLevel=ERROR -o StrictHostKeyChecking=no \
-o UserKnownHostsFile=/dev/null "$@"
"""


def preflight(*arguments: object, cwd: Path, columns: int = 200) -> Done:
    return call(app, "preflight", *arguments, cwd=cwd, columns=columns)


@pytest.fixture(autouse=True)
def _on_cpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")


@pytest.fixture
def sshd(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[int]:
    """The port of an sshd on loopback that lets this user in, with an ssh on PATH that knows the key."""
    program = shutil.which("sshd", path=f"{os.environ['PATH']}:/usr/sbin")
    if program is None:
        pytest.skip("no sshd (Debian: openssh-server)")
    folder, port = tmp_path / "ssh", find_free_port()
    folder.mkdir(mode=0o700)
    for name in ("user", "host"):
        subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", folder / name], check=True)
    (folder / "config").write_text(SERVER.format(port=port, folder=folder))
    (folder / "bin").mkdir()
    wrapper = folder / "bin/ssh"
    wrapper.write_text(CLIENT.format(ssh=shutil.which("ssh"), folder=folder))
    wrapper.chmod(stat.S_IRWXU)
    monkeypatch.setenv("PATH", f"{folder / 'bin'}:{os.environ['PATH']}")
    start = [program, "-D", "-e", "-f", str(folder / "config")]
    if (
        os.geteuid() == 0 and not Path("/run/sshd").exists()
    ):  # where no service has made it; not to be left there
        inside = 'mount -t tmpfs tmpfs /run && mkdir /run/sshd && exec "$@"'
        start = ["unshare", "--mount", "sh", "-c", inside, "sh", *start]
    server = subprocess.Popen(start, stderr=subprocess.PIPE, text=True)
    try:
        until = time.monotonic() + PATIENCE
        words = ["ssh", "-o", "BatchMode=yes", "-p", str(port), "127.0.0.1", "true"]
        while subprocess.run(words, capture_output=True).returncode != 0:
            if server.poll() is not None or time.monotonic() > until:
                server.kill()
                pytest.skip(f"sshd does not run here: {server.communicate()[1].strip()[-200:]}")
            time.sleep(0.1)
        yield port
    finally:
        server.kill()
        server.wait()


def test_this_host(tmp_path: Path) -> None:
    done = preflight("--quick", cwd=tmp_path, columns=80)
    assert (done.returncode, done.stderr) == (0, ""), done
    head, *rows = [line.split() for line in done.stdout.splitlines() if line.strip()]
    assert head == "host code pkgs env clock disk shm dir GPUs".split()
    assert rows[1][:5] == ["localhost", "ok", "ok", "ok", "ok"]
    assert rows[-1] == "1 host checked: nothing found".split()
    assert os.listdir(tmp_path) == []  # not even the token is left


@pytest.mark.slow
def test_over_ssh(sshd: int, tmp_path: Path) -> None:
    """Two names of this host, and one that is none."""
    hostfile = tmp_path / "hostfile"
    hostfile.write_text("127.0.0.1 slots=1\nlocalhost slots=1\nno-such-host.invalid slots=1\n")
    arguments = ["--quick", "--output", "out.json", "--", "--hostfile", hostfile, "--ssh_port", sshd]
    done = preflight(*arguments, cwd=tmp_path)
    assert done.returncode == 2 and "3 hosts checked: 2 refused" in done.stdout, done
    assert "REFUSED no-such-host.invalid: ssh: Could not resolve hostname" in done.stdout
    facts = json.loads((tmp_path / "out.json").read_text())
    assert sorted(one["host"] for one in facts["findings"]) == ["localhost", "no-such-host.invalid"]
    assert "REFUSED localhost: is the same host as 127.0.0.1" in done.stdout
    assert facts["hosts"]["localhost"]["code"] == facts["hosts"]["127.0.0.1"]["code"]
    done = preflight(*arguments, "--include", "127.0.0.1", cwd=tmp_path)
    assert (done.returncode, done.stderr) == (0, "") and "1 host checked: nothing found" in done.stdout, done


def test_a_checkpoint_must_fit(tmp_path: Path) -> None:
    done = preflight("--quick", ROOT / "launch/recipes/405b.yaml", f"run.dir={tmp_path}/runs/big", cwd=ROOT)
    assert done.returncode == 2 and "a checkpoint takes about" in done.stdout, done
    assert os.listdir(tmp_path) == []  # the run directory is not made


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("-- --hostfile none", "--hostfile none: there is no such file"),
        ("-- --no_ssh --num_nodes 2 --node_rank 3", "--node_rank 3"),
        ("-- -H hostfile", "hostfile, line 2"),
        ("-- script.py", "script.py"),
        ("none.yaml", "none.yaml"),
    ],
)
def test_bad_input(words: str, said: str, tmp_path: Path) -> None:
    (tmp_path / "hostfile").write_text("a slots=1\nb slot=1\n")
    done = preflight(*words.split(), cwd=tmp_path)
    assert (done.returncode, done.stdout) == (2, "") and said in done.stderr
