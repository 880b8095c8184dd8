"""Pods of an Indexed Job on hosts made of namespaces: what Kubernetes makes of a manifest, done by hand.

Every pod has a root of its own with the image's folders, the shared volume, a new address after every start, the
manifest's user without capabilities, and no variables but those that the manifest sets.
"""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from drills.hosts import NETWORK, Host, Hosts
from drills.namespaces import Started
from tests.patience import PATIENCE

ROOT = Path(__file__).resolve().parents[2]
POD_ROOT = "/run/pod"  # /run is the host's own, and empty after it was switched on
# The image: this machine's folders, without those that the pod's user may not enter, and without its /tmp. Of them
# only what the image holds: the repository and its Python.
MAKE = f"""
umask 022
mkdir {POD_ROOT} && mount -t tmpfs -o mode=755 tmpfs {POD_ROOT} && cd /
for one in *; do
  if [ -L "$one" ]; then cp -P "$one" {POD_ROOT}/
  elif [ -d "$one" ]; then
    mkdir "{POD_ROOT}/$one"
    case "$one $(stat -c %a "$one")" in run\\ *|tmp\\ *|*[0246]) ;; *) mount --rbind "/$one" "{POD_ROOT}/$one" ;; esac
  fi
done
chmod 1777 {POD_ROOT}/tmp
for folder in "$IMAGE_A" "$IMAGE_B" "$IMAGE_C"; do
  mkdir -p "{POD_ROOT}$folder" && mount --rbind "$folder" "{POD_ROOT}$folder"
done
mkdir -p {POD_ROOT}/run/bin "{POD_ROOT}$VOLUME"
mount --bind "$SHARED" "{POD_ROOT}$VOLUME"
printf '#!/bin/sh\\nexec %s "$@"\\n' "$PYTHON" > {POD_ROOT}/run/bin/python
chmod 755 {POD_ROOT}/run/bin/python
printf '%s' "$KNOWN" > {POD_ROOT}/run/hosts
mount --bind {POD_ROOT}/run/hosts {POD_ROOT}/etc/hosts
ip address flush dev eth0
ip address add "$ADDRESS/24" dev eth0
hostname "$NAME"
"""


def expanded(text: str, variables: Mapping[str, str]) -> str:
    """`text` of a command or args as Kubernetes expands it: $(NAME) if NAME is set, else as it is; $$ is a dollar."""

    def of(found: re.Match[str]) -> str:
        return "$" if found[0] == "$$" else variables.get(found[1], found[0])

    return re.sub(r"\$\$|\$\((\w+)\)", of, text)


class Pods:
    """The pods of a manifest's Job, by index. objects: of the manifest, by kind. output: a folder for their logs."""

    def __init__(self, objects: Mapping[str, Any], hosts: Hosts, output: Path) -> None:
        self._job, self._variables = objects["Job"], objects["ConfigMap"]["data"]
        self._pod = self._job["spec"]["template"]["spec"]
        (self._container,) = self._pod["containers"]
        self._hosts, self._output = hosts, output
        self._addresses: dict[int, str] = {}
        self._last = 100

    def own_volume(self) -> None:
        """Give what lies on the volume to the pods' group, as fsGroup has it."""
        volume = self._hosts.shared.outside
        for path in (volume, *volume.rglob("*")):
            os.chown(path, -1, self._pod["securityContext"]["fsGroup"])
            path.chmod(0o2770 if path.is_dir() else 0o660)

    def names(self, index: int) -> list[str]:
        """The host name of a pod, and the name by which others find it."""
        name = f"{self._job['metadata']['name']}-{index}"
        return [name, f"{name}.{self._pod['subdomain']}"]

    def host(self, index: int) -> Host:
        return list(self._hosts)[index]

    def log(self, index: int) -> Path:
        return self._output / f"pod-{index}.log"

    def start(self, index: int) -> Started:
        """A new pod, on a host that is on: its container's command, as it stands."""
        host = self.host(index)
        self._last += 1
        self._addresses[index] = f"{NETWORK}.{self._last}"
        self._make(host, index)
        return host.start(self._words(index), self.log(index))

    def again(self, index: int, there: int) -> subprocess.CompletedProcess[str]:
        """Run the command of pod `index` in another pod, which is running, to its end."""
        return self.host(there).run(self._words(index), PATIENCE)

    def _words(self, index: int) -> list[str]:
        """The command of a pod's container, for its host."""
        variables = {
            **self._variables,
            **{one["name"]: one["value"] for one in self._container["env"]},
            "JOB_COMPLETION_INDEX": str(index),
        }
        words = [
            expanded(word, variables) for word in (*self._container["command"], *self._container["args"])
        ]
        image = {"PATH": "/run/bin:/usr/local/bin:/usr/bin:/bin", "PYTHONPATH": str(ROOT)}
        settings = [f"{name}={value}" for name, value in {**image, **variables}.items()]
        user = self._pod["securityContext"]
        rights = [
            f"--reuid={user['runAsUser']}", f"--regid={user['runAsGroup']}", f"--groups={user['fsGroup']}",
            "--inh-caps=-all", "--bounding-set=-all", "--no-new-privs", "--pdeathsig", "KILL",
        ]  # fmt: skip
        inside = ["env", "-i", f"--chdir={ROOT}", *settings, "setpriv", *rights, "--", *words]
        return ["chroot", POD_ROOT, *inside]

    def replace(self, index: int) -> Started:
        """The pod is lost with all its processes; a new one of the same index takes its place."""
        self.host(index).power_off()
        self.host(index).power_on()
        return self.start(index)

    def _make(self, host: Host, index: int) -> None:
        name, _ = self.names(index)
        # Of itself the kubelet tells a pod all names, of others the cluster knows those with the service's.
        known = [f"{self._addresses[index]} {' '.join(reversed(self.names(index)))}"]
        known += [f"{a} {self.names(i)[1]}" for i, a in self._addresses.items() if i != index]
        settings = {
            "IMAGE_A": str(ROOT), "IMAGE_B": sys.prefix, "IMAGE_C": sys.base_prefix,
            "PYTHON": shlex.quote(sys.executable), "VOLUME": self._container["volumeMounts"][0]["mountPath"],
            "SHARED": str(self._hosts.shared.folder), "KNOWN": "\n".join(["127.0.0.1 localhost", *known]) + "\n",
            "ADDRESS": self._addresses[index], "NAME": name,
        }  # fmt: skip
        made = host.run(["bash", "-ec", MAKE], PATIENCE, settings)
        assert made.returncode == 0, made.stderr
