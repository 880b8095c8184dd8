"""Names of other trainers: each stands for a key that exists, and is understood wherever it is written."""

from __future__ import annotations

import re

import pytest

from megastable.base.errors import ConfigError
from megastable.config.keys import all_keys, known_elsewhere, read_names
from megastable.config.recipe import load_recipe, override_key, validate_tree

TABLES = read_names()
KEYS = {key.path for key in all_keys()}
QUICKSTART = "launch/recipes/quickstart.yaml"


def refused(*overrides: str) -> list[str]:
    with pytest.raises(ConfigError) as error:
        load_recipe(QUICKSTART, overrides)
    return [line.strip() for line in str(error.value).splitlines()[1:]]


@pytest.mark.parametrize("name", [*TABLES["megatron"], *TABLES["others"]])
def test_known_elsewhere_names_a_key_that_exists(name: str) -> None:
    there = known_elsewhere(name)
    assert there is not None
    key, equals, value = there.ours.partition("=")
    assert key in KEYS
    if equals:
        tree: dict[str, object] = {}
        override_key(tree, there.ours)
        assert value and validate_tree(tree, "test")


@pytest.mark.parametrize("table", [TABLES["megatron_without_key"], TABLES["others_without_key"]])
def test_known_elsewhere_gives_reasons_with_keys_that_exist(table: dict[str, str]) -> None:
    sections = {path.partition(".")[0] for path in KEYS}
    for name, reason in table.items():
        assert reason and known_elsewhere(name).ours == ""  # type: ignore[union-attr]
        named = re.findall(r"\b[a-z]+\.[a-z_.]*[a-z]\b", reason.replace("prepare_data.py", ""))
        assert {path for path in named if path.partition(".")[0] in sections} <= KEYS, reason


# The issue's, and what somebody who comes from there would try first.
ASKED = """
num_layers ffn_hidden_size num_query_groups seq_length train_iters clip_grad tensor_model_parallel_size
sequence_parallel num_experts qk_layernorm untie_embeddings_and_output_weights bf16 data_path exit_duration_in_mins
num_hidden_layers torch_dtype gradient_accumulation_steps zero_optimization local_batch_size n_embd learning_rate
""".split()


@pytest.mark.parametrize("name", ASKED)
def test_load_understands_other_names_wherever_they_stand(name: str) -> None:
    there = known_elsewhere(name)
    assert there is not None
    # A key of ours is none of theirs where it is one: train.eval_interval.
    places = [path for path in (f"model.{name}", f"train.{name}", name) if path not in KEYS]
    for path in places + [path.replace("_", "-") for path in places]:
        (line,) = refused(f"{path}=3")
        if there.ours:
            assert line.startswith(f"{path}: unknown key; did you mean {there.ours}?"), line
        else:
            assert line == f"{path}: no such key: {there.note}"


@pytest.mark.parametrize(
    ("given", "lines"),
    [
        (["model.num_layers=3"], ["model.num_layers: unknown key; did you mean model.layers? e.g. model.layers=12"]),
        (["train.lr_warmup_samples=9"], [
            "train.lr_warmup_samples: unknown key; did you mean schedule.warmup_tokens? (in tokens: multiply by "
            "model.sequence_length) e.g. schedule.warmup_tokens=1000000"
        ]),
        (["model.kv_lora_rank=8"],
         ["model.kv_lora_rank: no such key: attention is causal, softmax, multi-head or grouped-query, "
          "to all tokens or those in model.window"]),
        (["bf16.enabled=true"], ["bf16: unknown key; did you mean precision.kind=bf16?"]),
        (["fp16=false"], ["fp16: unknown key; when true it stands for precision.kind=fp16: leave it out"]),
        # Sections of other trainers: what is in them is looked up, one by one.
        (["training.seq_len=5", "training.steps=3"], [
            "training.seq_len: unknown key; did you mean model.sequence_length? e.g. model.sequence_length=2048",
            "training: unknown key; did you mean train? e.g. train.steps=1000",
        ]),
        (["optimizer.kind=lamb"],
         ["optimizer.kind: unknown key; did you mean optimizer.name? (in small letters, as adamw) e.g. "
          "optimizer.name=adamw"]),
    ],
)  # fmt: skip
def test_load_says_what_another_trainers_name_is_here(given: list[str], lines: list[str]) -> None:
    assert refused(*given) == lines
