"""A recipe that trains in an instant."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from tests.conftest import tiny


@pytest.fixture
def tiny_recipe(tmp_path: Path, corpus: Path) -> Path:
    path = tmp_path / "tiny.yaml"
    tree = tiny(corpus, tmp_path / "run").model_dump(mode="json")
    path.write_text(yaml.safe_dump(tree))
    return path
