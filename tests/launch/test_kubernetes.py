"""The Kubernetes manifest: valid, and its parts agree with each other and with the exit codes."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import yaml

from megastable.base import errors
from megastable.config import recipe

ROOT = Path(__file__).resolve().parents[2]
FILE = ROOT / "launch/kubernetes.yaml"
OBJECTS: dict[str, Any] = {one["kind"]: one for one in yaml.safe_load_all(FILE.read_text())}
JOB = OBJECTS["Job"]["spec"]
POD = JOB["template"]["spec"]
(CONTAINER,) = POD["containers"]
VERSIONS = ["1.31", "1.34"]  # the oldest that it is said to work with, and a newer one


@pytest.mark.parametrize("version", VERSIONS)
def test_manifest_follows_the_schema(version: str) -> None:
    validation = pytest.importorskip("kubernetes_validate", reason="pip install kubernetes-validate")
    for one in OBJECTS.values():
        validation.validate(copy.deepcopy(one), version, strict=True)
    misspelt = copy.deepcopy(OBJECTS["Job"])
    misspelt["spec"]["backoffLimits"] = 3
    with pytest.raises(validation.ValidationError):
        validation.validate(misspelt, version, strict=True)


def test_manifest_has_a_pod_per_host() -> None:
    hosts = int(OBJECTS["ConfigMap"]["data"]["HOSTS"])
    assert (JOB["completionMode"], JOB["completions"], JOB["parallelism"]) == ("Indexed", hosts, hosts)
    resources = CONTAINER["resources"]
    assert resources["limits"] == resources["requests"]
    assert argument("--num_gpus") == str(resources["limits"]["nvidia.com/gpu"])
    assert (argument("--num_nodes"), argument("--node_rank")) == ("$(HOSTS)", "$(JOB_COMPLETION_INDEX)")


def argument(name: str) -> str:
    arguments: list[str] = CONTAINER["args"]
    return arguments[arguments.index(name) + 1]


def test_manifest_has_its_run_on_the_shared_volume() -> None:
    path, *overrides = CONTAINER["args"][: CONTAINER["args"].index("--")]
    config = recipe.load_recipe(ROOT / path, overrides)
    mounts = {mount["name"]: mount["mountPath"] for mount in CONTAINER["volumeMounts"]}
    assert config.run.dir is not None and config.run.dir.is_relative_to(mounts["shared"])
    assert (ROOT / CONTAINER["command"][-1]).exists()
    assert mounts["shm"] == "/dev/shm"
    volumes = {volume["name"]: volume for volume in POD["volumes"]}
    assert volumes.keys() == mounts.keys()
    claim = volumes["shared"]["persistentVolumeClaim"]["claimName"]
    assert claim == OBJECTS["PersistentVolumeClaim"]["metadata"]["name"]
    assert volumes["shm"]["emptyDir"]["medium"] == "Memory"


def test_manifest_fails_the_job_where_starting_again_changes_nothing() -> None:
    codes, disruption = JOB["podFailurePolicy"]["rules"]
    assert (codes["action"], codes["onExitCodes"]["operator"]) == ("FailJob", "In")
    assert codes["onExitCodes"]["values"] == [errors.BAD_INPUT, errors.UNSTABLE, errors.NO_SPACE]
    assert codes["onExitCodes"]["containerName"] == CONTAINER["name"]
    assert disruption["action"] == "Ignore"
    # What a podFailurePolicy needs of the rest.
    assert (POD["restartPolicy"], JOB["podReplacementPolicy"]) == ("Never", "Failed")


def test_manifest_asks_for_no_more_rights_than_it_needs() -> None:
    assert POD["automountServiceAccountToken"] is False
    assert POD["securityContext"]["runAsNonRoot"] is True
    assert CONTAINER["securityContext"]["allowPrivilegeEscalation"] is False
    assert CONTAINER["securityContext"]["capabilities"]["drop"] == ["ALL"]
    assert not {"hostNetwork", "hostPID", "hostIPC"} & set(POD)
