"""What a start costs with many ranks: messages in which all take part, and files that all open."""

from __future__ import annotations

import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from megastable.config.tree import RunConfig
from tests.conftest import tiny
from tests.distributed import run_ranks
from tests.training.startup_counts import count_start

IMPORTS = 3200  # files, of which torch has 2,000 with what it imports, and DeepSpeed 500
NEEDLESS = {"matplotlib", "starlette", "tokenizers", "sentencepiece", "google", "transformers", "tensorboard"}
# What only rank 0 opens, or one rank of each host, is not listed: a run has a few hundred hosts.
EACH_NEW: dict[str, int] = {}
EACH_RESUMED = {"checkpoints/step-2/rank-0000R.json": 1, "checkpoints/step-2/rank-0000R.safetensors": 1}
# The last one is one of those that there are once: shared out among all ranks.
EACH_RESUMED |= {"checkpoints/step-2/rng-0000R.pt": 1, "checkpoints/step-2/recipe.yaml": 1}


def configure(corpus: Path, run: Path, steps: int, **parallel: Any) -> RunConfig:
    batch = {"steps": steps, "global_batch": 8, "micro_batch": 2, "eval_samples": 8, "eval_interval": 0}
    return tiny(corpus, run, parallel=parallel, train=batch, checkpoint={"interval": 2})


@pytest.mark.quick("dp2")
@pytest.mark.parametrize("parallel", [{}, {"pipeline": 2}], ids=["dp2", "pp2"])
def test_few_messages_and_files_before_the_first_step(
    parallel: dict[str, int], corpus: Path, tmp_path: Path
) -> None:
    begun = run_ranks(2, count_start, configure(corpus, tmp_path / "run", 2, **parallel))
    resumed = run_ranks(2, count_start, configure(corpus, tmp_path / "run", 4, **parallel))
    for found, told, agreed in ((begun, 8, 8), (resumed, 10, 17)):
        assert found[0][0] == found[1][0]
        wanted = {"all_gather_object": 4, "broadcast_object_list": told, "agree": agreed + len(parallel)}
        assert Counter(found[0][0]) == wanted
    assert read_of_run(begun[1][1]) == EACH_NEW
    assert read_of_run(resumed[1][1]) == {
        name.replace("R", "1"): count for name, count in EACH_RESUMED.items()
    }


def read_of_run(opens: dict[str, int]) -> dict[str, int]:
    """Without the tokens, which every rank reads for itself."""
    return {name: count for name, count in opens.items() if not name.endswith((".bin", ".idx"))}


def test_a_rank_imports_no_more_than_it_needs() -> None:
    command = [sys.executable, "-m", "tests.training.startup_counts", "megastable.train"]
    count, *packages = subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()
    assert int(count) <= IMPORTS and not NEEDLESS & set(packages)
