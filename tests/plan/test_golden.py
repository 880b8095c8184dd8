"""The plan's numbers stay what they were: of recipes that together use every formula.

python -m tests.plan.test_golden        # writes golden.json again, after a formula was changed on purpose
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from megastable.config import recipe
from megastable_tools.plan import answer, search
from megastable_tools.plan.cluster import load_cluster
from megastable_tools.plan.memory import PHASES

GOLDEN = Path(__file__).with_name("golden.json")
SMALL = (
    "parallel.tensor=1 parallel.sequence=false parallel.pipeline=1 parallel.zero=1 model.layers=6 model.hidden=1024 "
    "model.heads=8 model.ffn=2816 train.global_batch=64"
)
# A recipe, GPUs, a cluster, and overrides.
CASES = [
    "70b 512 h100", "405b 8192 h100", "7b-fp8 64 h100", "1.3b 8 a100", "125m 1 cpu", "1.3b-fp8 16 h200",
    "7b 64 h100 parallel.zero=3", "7b 64 a100 parallel.zero=2 parallel.recompute=full model.tied=true",
    "7b 16 h100 parallel.tensor=4 parallel.recompute=selective optimizer.moments=bf16",
    "7b 16 h100 parallel.context=4 model.sequence_length=32768 train.micro_batch=1 optimizer.clipping.kind=worker",
    f"7b 6 h100 {SMALL} train.global_batch=48 parallel.pipeline=3 parallel.zero=1 train.micro_batch=2 model.tied=true",
    f"7b 8 h100 {SMALL} precision.fp8=delayed parallel.recompute=full precision.fp8.keep_first=1",
    f"7b 8 h100 {SMALL} precision.fp8=block parallel.tensor=2",
    f"7b 4 h100 {SMALL} precision.kind=fp16 kernels.loss=reference model.logit_softcap=30 optimizer.name=muon",
    f"7b 4 h100 {SMALL} parallel.zero=3 optimizer.name=muon parallel.tensor=2 parallel.sequence=true",
    f"7b 4 h100 {SMALL} kernels.attention=reference kernels.compile=false model.attention_softcap=50",
    f"7b 4 h100 {SMALL} kernels.attention=blocked kernels.compile=false parallel.recompute=selective",
    f"7b 4 h100 {SMALL} model.norms=both model.window=512 model.full_attention_every=2 optimizer.name=spam",
    f"7b 4 h100 {SMALL} model.norms=mixed model.qk_norm=full optimizer.name=lamb parallel.recompute=full",
    f"7b 4 h100 {SMALL} model.norms=after model.qk_norm=false optimizer.name=stable_spam",
    f"7b 4 h100 {SMALL} data.keep_documents_apart=true model.swiglu_clamp=7 optimizer.name=adafactor",
    f"7b 4 h100 {SMALL} kernels.compile=false model.swiglu_clamp=7 optimizer.name=sgd parallel.zero=2",
    f"7b 2 cpu {SMALL} precision.kind=fp32 model.window=256 optimizer.name=adafactor optimizer.adafactor.momentum=0.9",
    f"7b 2 cpu {SMALL} precision.kind=bf16 kernels.attention=blocked model.window=256 model.logit_softcap=30",
    "moe-7b-a1b 8 h100", "moe-30b-a3b 64 h100 model.experts.first_dense=2 model.experts.shared=1",
    "moe-7b-a1b 8 a100 parallel.expert=1 parallel.zero=3 parallel.tensor=2 optimizer.name=adafactor",
    f"7b 4 h100 {SMALL} optimizer.name=stable_adamw model.mup.base_width=512 checkpoint.asynchronous=false",
]  # fmt: skip


def numbers_of(case: str) -> dict[str, Any]:
    """What a plan predicts, without texts."""
    name, gpus, cluster, *overrides = case.split()
    config = recipe.load_recipe(f"launch/recipes/{name}.yaml", ["model.vocab_size=50000", *overrides])
    plan = search.plan_layout(config, int(gpus), load_cluster(f"launch/clusters/{cluster}.yaml"))
    tree = answer.plan_tree(plan, config, 1e9)
    time, memory = tree["time"], tree["memory"]
    numbers = {
        "seconds": time["seconds"], "mfu": [time["mfu"], time["mfu_causal"]], "parts": time["parts_seconds"],
        "traffic": [[t["group"], t["link"], t["bytes"], t["seconds"]] for t in time["traffic"]],
        "phases": {phase: sum(plan.tightest.bytes_at(phase).values()) for phase in PHASES},
        "kinds": memory["kinds_bytes"], "left": memory["left_bytes"], "stage": memory["stage"], "host": tree["host"],
        "dollars": tree["dollars"],
    }  # fmt: skip
    return json.loads(json.dumps(numbers))  # type: ignore[no-any-return]


@pytest.mark.parametrize("case", CASES)
def test_plan_numbers_stay(case: str) -> None:
    golden = json.loads(GOLDEN.read_text())[case]
    found = numbers_of(case)
    assert found.keys() == golden.keys()
    for key, wanted in golden.items():
        if isinstance(wanted, dict):
            assert found[key] == pytest.approx(wanted, rel=1e-9), key
        elif key == "traffic":
            for mine, theirs in zip(found[key], wanted, strict=True):
                assert mine[:2] == theirs[:2] and mine[2:] == pytest.approx(theirs[2:], rel=1e-9)
        else:
            assert found[key] == pytest.approx(wanted, rel=1e-9), key


if __name__ == "__main__":
    lines = (f" {json.dumps(case)}: {json.dumps(numbers_of(case))}" for case in CASES)
    GOLDEN.write_text("{\n" + ",\n".join(lines) + "\n}\n")
