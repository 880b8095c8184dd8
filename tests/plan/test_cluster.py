"""Descriptions of clusters: those that come along, and what is said of wrong ones."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from megastable.base.errors import ConfigError
from megastable_tools.plan.cluster import ClusterConfig, load

ALONG = sorted(Path("launch/clusters").glob("*.yaml"))


def h100() -> dict[str, Any]:
    tree: dict[str, Any] = yaml.safe_load(Path("launch/clusters/h100.yaml").read_text())
    return tree


@pytest.mark.parametrize("path", ALONG, ids=lambda path: path.stem)
def test_those_that_come_along_are_plausible(path: Path) -> None:
    c = load(path)
    assert c.reserve_gib < c.memory_gib
    assert c.host.gb_per_second > c.network.gb_per_second
    assert c.host.latency_us < c.network.latency_us
    # Computing is what a GPU is for: it does more than 50 operations for each byte that it reads, or a CPU some.
    intensity = c.tflops.bf16 / c.memory_tb_per_second
    assert intensity > (50 if c.device == "gpu" else 1)
    assert c.tflops.fp8 is None or c.tflops.fp8 == pytest.approx(2 * c.tflops.bf16, rel=0.01)


def test_one_sustained_share_for_all_gpus() -> None:
    """The number that was chosen by published runs is not chosen again for every kind."""
    shares = {load(path).efficiency.sustained for path in ALONG}
    assert len(shares) == 1


@pytest.mark.parametrize(
    ("key", "value", "said"),
    [
        ("memory_gib", -1, "memory_gib=-1"),
        ("memory_gib", True, "memory_gib=true"),
        ("reserve_gib", 80, "reserve_gib=80 leaves nothing of memory_gib=79.1"),
        ("efficiency", {"products": 1.2}, "efficiency.products=1.2"),
        ("efficiency", {"products": 0.8}, "efficiency.sustained: missing"),
        ("host", {"gb_per_second": 450}, "host.latency_us: missing"),
        ("gpus", 8, "gpus: unknown key"),
        ("dollars_per_gpu_hour", "cheap", "dollars_per_gpu_hour='cheap'"),
    ],
)
def test_mistakes_are_told_with_file_and_key(tmp_path: Path, key: str, value: Any, said: str) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text(yaml.safe_dump(h100() | {key: value}))
    with pytest.raises(ConfigError) as told:
        load(path)
    assert said in str(told.value)
    assert "mine.yaml" in str(told.value)


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"nothing\.yaml: no such cluster description.*launch/clusters"):
        load(tmp_path / "nothing.yaml")


@pytest.mark.parametrize("text", ["[1, 2]", "name: a\nname: b", "name: {"])
def test_a_file_that_is_no_description(tmp_path: Path, text: str) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=r"mine\.yaml"):
        load(path)


def test_found_from_anywhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert load("launch/clusters/h100.yaml") == ClusterConfig.model_validate(_from_root())


def _from_root() -> dict[str, Any]:
    root = Path(__file__).resolve().parents[2]
    tree: dict[str, Any] = yaml.safe_load((root / "launch/clusters/h100.yaml").read_text())
    return tree
