"""Names of other trainers: each stands for a key that exists, and is understood wherever it is written."""

from __future__ import annotations

import re

import pytest

from megastable.base.errors import ConfigError
from megastable.config.keys import all_keys
from megastable.config.other_names import known_elsewhere, read_names
from megastable.config.recipe import load, override, validate

TABLES = read_names()
KEYS = {key.path for key in all_keys()}
QUICKSTART = "launch/recipes/quickstart.yaml"


def refused(*overrides: str) -> list[str]:
    with pytest.raises(ConfigError) as error:
        load(QUICKSTART, overrides)
    return [line.strip() for line in str(error.value).splitlines()[1:]]


@pytest.mark.parametrize("name", [*TABLES["megatron"], *TABLES["others"]])
def test_a_name_stands_for_a_key_that_exists(name: str) -> None:
    there = known_elsewhere(name)
    assert there is not None
    key, equals, value = there.ours.partition("=")
    assert key in KEYS
    if equals:
        tree: dict[str, object] = {}
        override(tree, there.ours)
        assert value and validate(tree, "test")


@pytest.mark.parametrize("table", [TABLES["megatron_without_key"], TABLES["others_without_key"]])
def test_keys_that_a_reason_names_exist(table: dict[str, str]) -> None:
    sections = {path.partition(".")[0] for path in KEYS}
    for name, reason in table.items():
        assert reason and known_elsewhere(name).ours == ""  # type: ignore[union-attr]
        named = re.findall(r"\b[a-z]+\.[a-z_.]*[a-z]\b", reason.replace("prepare_data.py", ""))
        assert {path for path in named if path.partition(".")[0] in sections} <= KEYS, reason


def test_a_name_stands_once_and_as_it_is_looked_up() -> None:
    names = [name for table in TABLES.values() for name in table]
    assert len(names) == len(set(names))
    assert all(re.fullmatch(r"[a-z][a-z0-9_]*", name) for name in names)


# The issue's, and what somebody who comes from there would try first.
ASKED = """
num_layers hidden_size ffn_hidden_size num_attention_heads num_query_groups kv_channels seq_length micro_batch_size
global_batch_size train_samples train_iters lr_warmup_samples clip_grad adam_beta2 tensor_model_parallel_size
pipeline_model_parallel_size sequence_parallel use_distributed_optimizer num_experts recompute_activations qk_layernorm
untie_embeddings_and_output_weights swiglu bf16 fp8_format rotary_base init_method_std data_path tokenizer_model
save_interval eval_interval log_interval exit_duration_in_mins n_layer num_hidden_layers intermediate_size
num_key_value_heads max_position_embeddings rms_norm_eps torch_dtype gradient_accumulation_steps zero_optimization
train_micro_batch_size_per_gpu local_batch_size tensor_parallel_degree block_size n_embd learning_rate
""".split()


@pytest.mark.parametrize("name", ASKED)
def test_it_is_understood_wherever_it_stands(name: str) -> None:
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
        (
            ["train.lr_warmup_samples=9"],
            [
                "train.lr_warmup_samples: unknown key; did you mean schedule.warmup_tokens? (in tokens: "
                "multiply by model.sequence_length) e.g. schedule.warmup_tokens=1000000"
            ],
        ),
        (
            ["model.num_experts=8"],
            ["model.num_experts: no such key: experts are not supported; megastable trains dense models"],
        ),
        (["model.bf16=true"], ["model.bf16: unknown key; did you mean precision.kind=bf16?"]),
        (["bf16.enabled=true"], ["bf16: unknown key; did you mean precision.kind=bf16?"]),
        # Sections of other trainers: what is in them is looked up, one by one.
        (
            ["training.seq_len=5", "training.steps=3"],
            [
                "training.seq_len: unknown key; did you mean model.sequence_length? e.g. model.sequence_length=2048",
                "training: unknown key; did you mean train? e.g. train.steps=1000",
            ],
        ),
        (
            ["parallelism.tensor_parallel_degree=5"],
            ["parallelism.tensor_parallel_degree: unknown key; did you mean parallel.tensor? e.g. parallel.tensor=1"],
        ),
    ],
)  # fmt: skip
def test_what_is_said(given: list[str], lines: list[str]) -> None:
    assert refused(*given) == lines


@pytest.mark.parametrize("given", ["false", "{enabled: false}"])
def test_what_is_turned_off_is_not_advised_to_be_turned_on(given: str) -> None:
    (told,) = refused(f"fp16={given}")
    assert told == "fp16: unknown key; when true it stands for precision.kind=fp16: leave it out"


def test_what_another_trainer_has_below_a_known_name_is_explained_as_well() -> None:
    told = refused("zero_optimization={stage: 3, overlap_comm: true}")
    assert [line.partition(":")[0] for line in told] == [
        "zero_optimization",
        "zero_optimization.overlap_comm",
    ]


@pytest.mark.parametrize("key", ["optimizer.kind", "optimizer.type", "optim"])
def test_the_choice_of_an_optimizer_is_found(key: str) -> None:
    (told,) = refused(f"{key}=lamb")
    assert told.startswith(f"{key}: unknown key; did you mean optimizer.name?")


def test_an_optimizer_that_there_is_not_is_refused_with_those_that_there_are() -> None:
    (told,) = refused("optimizer.name=AdamW")
    assert "expected adamw, " in told and "adafactor" in told
