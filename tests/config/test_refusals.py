"""What the tree refuses as impossible, each with its keys and a remedy, and what follows from other sizes."""

from __future__ import annotations

import pytest

from megastable.base.errors import ConfigError
from megastable.config import deepspeed_json
from megastable.config.model import ModelConfig
from megastable.config.recipe import load_recipe, override_key, validate_tree
from megastable.config.tree import RunConfig

# Overrides of the defaults (12 blocks of 768 and 12 heads, 2048 tokens, vocabulary of a multiple of 128), and words of
# the only line of the refusal.
REFUSED = [
    ("parallel.tensor=4 model.kv_heads=2", "parallel.tensor=4|model.kv_heads=2|change one"),
    ("parallel.tensor=3 model.vocab_multiple=384", "parallel.tensor=3|model.ffn=2048|change one"),
    ("parallel.tensor=3 model.ffn=1536", "parallel.tensor=3|model.vocab_multiple=128|vocab_multiple to a multiple"),
    ("parallel.pipeline=13", "parallel.pipeline=13|model.layers=12|use fewer stages"),
    ("parallel.sequence=true", "parallel.sequence|parallel.tensor above 1"),
    ("parallel.sequence=true parallel.tensor=4 model.sequence_length=2050",
     "parallel.sequence|parallel.tensor=4|model.sequence_length=2050|change one"),
    ("parallel.tensor=2 parallel.tensor_overlap=2", "parallel.tensor_overlap=2|set parallel.sequence=true"),
    ("parallel.sequence=true parallel.tensor=2 parallel.context=2 parallel.tensor_overlap=1024",
     "parallel.tensor_overlap=1024|the 512 tokens of a sample|use fewer chunks"),
    ("parallel.pipeline=2 parallel.zero=2", "parallel.zero=2|use parallel.zero=1 or parallel.pipeline=1"),
    ("parallel.pipeline=2 parallel.zero=3", "parallel.zero=3|use parallel.zero=1 or parallel.pipeline=1"),
    ("parallel.replicas=2 parallel.zero=2", "parallel.replicas=2|parallel.zero=2|use parallel.zero=1"),
    ("parallel.replicas=2 precision.kind=fp16", "parallel.replicas=2|precision.kind=fp16|precision.kind=bf16"),
    ("parallel.replicas=2 optimizer.name=muon", "parallel.replicas=2|optimizer.name=muon|use another optimizer"),
    ("parallel.expert=2", "parallel.expert=2|set model.experts|parallel.expert=1"),
    ("parallel.expert=3 model.experts={count: 8}", "parallel.expert=3|model.experts.count=8|change one"),
    ("parallel.expert=2 model.experts={count: 8} parallel.zero=3", "parallel.expert=2|parallel.zero=3|1 or 2"),
    ("parallel.expert=2 model.experts={count: 8} parallel.replicas=2", "parallel.expert=2|parallel.replicas=2|at 1"),
    ("parallel.expert=2 model.experts={count: 8} precision.fp8={backend: te}",
     "model.experts|precision.fp8.backend=te|precision.fp8.backend=emulated"),
    ("parallel.expert=2 model.experts={count: 8} optimizer.name=muon",
     "parallel.expert=2|optimizer.name=muon|use another optimizer"),
    ("parallel.expert=2 model.experts={count: 8} optimizer.clipping=worker",
     "parallel.expert=2|optimizer.clipping=worker|use another clipping"),
    ("parallel.schedule=zero_bubble", "several stages|parallel.pipeline above 1"),
    ("parallel.model_chunks=2", "parallel.model_chunks=2|several stages|parallel.pipeline above 1"),
    ("parallel={pipeline: 4, model_chunks: 4}",
     "parallel.model_chunks=4 x parallel.pipeline=4|one block a chunk|model.layers=12|use fewer chunks"),
    ("parallel={pipeline: 2, model_chunks: 2, schedule: zero_bubble}",
     "parallel.model_chunks=2|parallel.schedule=zero_bubble|leave one of the two out"),
    ("parallel.zero=0", "parallel.zero=0|use parallel.zero=1"),
    ("parallel.context=4 parallel.tensor=2", "parallel.context=4|parallel.tensor=2|model.heads=12|change one"),
    ("parallel.context=2 parallel.context_by=ring model.sequence_length=2050",
     "parallel.context_by=ring|parallel.context=2|model.sequence_length=2050|change one"),
    ("parallel.context=4 model.sequence_length=2050", "parallel.context=4|model.sequence_length=2050|change one"),
    ("parallel.context=2 parallel.sequence=true parallel.tensor=2 model.sequence_length=2050",
     "parallel.tensor=2|model.sequence_length=2050 / parallel.context=2|change one"),
    ("train.micro_batch=6", "train.micro_batch=6|train.global_batch=64|change one"),
    ("optimizer.betas=[1.0,0.95]", "optimizer.betas=[1.0, 0.95]|below 1"),
    ("optimizer.betas=[0.9,1.0]", "optimizer.betas=[0.9, 1.0]|below 1"),
    ("optimizer.name=lamb optimizer.moments=bf16", "optimizer.name=lamb|leave optimizer.moments out"),
    ("optimizer.name=spam optimizer.spam.interval=100", "spam.warmup=150|spam.interval=100|shorten"),
    ("optimizer.stable_spam.max_decay=1", "max_decay=1|below 1"),
    ("optimizer.stable_spam.norm_decays=[0.7,1]", "norm_decays=[0.7, 1.0]|below 1"),
    ("optimizer.momentum=0.9", "only sgd and muon|optimizer.momentum=0.9"),
    ("optimizer.name=muon optimizer.momentum=1", "optimizer.momentum=1|below 1"),
    ("optimizer.adafactor.momentum=1", "momentum=1|below 1"),
    ("optimizer.qk_clip=100", "optimizer.qk_clip=100|model.qk_norm=true|model.qk_norm=false"),
    ("optimizer.name=sgd model.mup={base_width: 64}", "model.mup|optimizer.name=sgd|adamw"),
    ("model.kv_heads=5", "kv_heads=5|heads=12"),
    ("model.hidden=100", "heads=12|hidden=100|set head_dim"),
    ("model.hidden=36", "head_dim=3|odd"),
    ("model.norm_scaling=true model.norms=after", "norm_scaling|use norms=before"),
    ("model.full_attention_every=2", "full_attention_every without window"),
    ("data.skip=[[5,5]]", "empty or reversed"),
    ("data.skip=[[0,2],[9,3]]", "empty or reversed"),
    ("run.name=''", "run.name="),
    ("logging.trackers=[command]", "no program is given"),
    ("logging.trackers=[tensorboardd]", "logging.trackers"),
    ("optimizer.clipping=value", "set optimizer.clipping.threshold"),
    ("optimizer.clipping.threshold=1", "set it instead"),
    ("optimizer.clipping=off", "optimizer.clip=0 is what turns clipping off"),
    ("optimizer.clipping=agc optimizer.clipping.decay=0.9", "only adagc and zclip have it"),
    ("optimizer.clipping=adagc optimizer.clipping.decay=1", "the average would never change"),
    ("optimizer.clipping=zclip optimizer.clipping.warmup=1", "a deviation needs at least 2"),
    ("optimizer.clipping=worker parallel.zero=2", "no rank has its own"),
    ("optimizer.clipping=worker precision.kind=fp32", "no rank has its own"),
    ("optimizer.clipping=worker model.tied=true parallel.pipeline=2", "spread over two stages"),
    ("optimizer.clipping=worker optimizer.clip=0", "set the norm to clip to"),
    ("precision.fp8=fast", "precision.fp8.recipe='fast'|current, delayed or block"),
    ("precision.fp8.keep=[blocks.99.mlp.down]", "blocks.99.mlp.down: no such linear layer"),
    ("precision.fp8.keep_first=12", "keep_first=12 and keep_last=0 leave none of the 12 blocks"),
    ("precision={kind: fp16, fp8: current}", "precision.fp8 with precision.kind=fp16"),
    ("train.batch_warmup={start: 64, tokens: 9}", "the batch never grows to train.global_batch=64"),
    ("train.batch_warmup={start: 24, tokens: 9}", "an increment that divides the difference"),
    ("train.batch_warmup={start: 8, tokens: 9} train.micro_batch=16", "micro_batch=16 does not divide start=8"),
    ("train.sequence_warmup={start: 2048, tokens: 9}", "choose one of 1024, 512, 256"),
    ("train.sequence_warmup={start: 12, tokens: 9}", "must be start times a power of 2"),
    ("schedule.warmup_tokens=9 schedule.warmup_steps=9", "set warmup_steps=null"),
    ("schedule.warmup_tokens=9 schedule.total_steps=9", "set total_steps=null and give total_tokens"),
    ("schedule.total_tokens=9", "total_tokens counts tokens: give warmup_tokens"),
    ("schedule.warmup_steps=null", "the length of the warm-up is missing"),
    ("model.rope_scaling={kind: yarn, factor: 2.0}", "needs original_length"),
    ("model.rope_scaling={kind: yarn, factor: 4, original_length: 9, beta_slow: 40}", "must be below beta_fast=32"),
    ("model.rope_scaling={kind: yarn, factor: 4, original_length: 9, low_freq_factor: 2}", "has no low_freq_factor"),
    ("model.rope_scaling={kind: linear, factor: 4, original_length: 9}", "has no original_length, only factor"),
]  # fmt: skip


@pytest.mark.parametrize(("given", "words"), REFUSED)
def test_validate_refuses_the_impossible_with_keys_and_a_remedy(given: str, words: str) -> None:
    tree: dict[str, object] = {}
    for assignment in given.replace(": ", ":\0").replace(", ", ",\0").split():
        override_key(tree, assignment.replace("\0", " "))
    with pytest.raises(ConfigError) as error:
        validate_tree(tree, "test")
    assert len(str(error.value).splitlines()) == 2  # one reason only, so that no case hides behind another
    assert all(word in str(error.value) for word in words.split("|")), str(error.value)


@pytest.mark.parametrize(
    ("said", "kind", "threshold"),
    [
        ([], "norm", None),
        (["optimizer.clipping=zclip", "optimizer.clipping.threshold=3"], "zclip", 3),
        (["optimizer.clipping.threshold=0.1", "optimizer.clipping=agc"], "agc", 0.1),
        (["optimizer={clipping: worker}"], "worker", None),
    ],
)
def test_load_takes_a_word_for_the_kind_of_clipping(
    said: list[str], kind: str, threshold: float | None
) -> None:
    c = load_recipe("launch/recipes/7b.yaml", said)
    assert (c.optimizer.clipping.kind, c.optimizer.clipping.threshold) == (kind, threshold)
    assert deepspeed_json.build_deepspeed_json(c, 8)["gradient_clipping"] == (
        c.optimizer.clip if kind == "norm" else 0
    )


@pytest.mark.parametrize(("given", "trackers"), [("mlflow", ("mlflow",)), (None, ())])
def test_trackers_may_be_one_name_or_none(given: str | None, trackers: tuple[str, ...]) -> None:
    assert RunConfig.model_validate({"logging": {"trackers": given}}).logging.trackers == trackers


def test_model_config_derives_what_follows_from_other_sizes() -> None:
    m = ModelConfig(hidden=768, heads=12, vocab_size=50_257)
    assert (m.key_value_heads, m.head_width, m.ffn_width, m.padded_vocab) == (12, 64, 2048, 50_304)
    m = ModelConfig(
        hidden=4096, heads=32, kv_heads=8, head_dim=64, ffn=100, vocab_size=128, vocab_multiple=64
    )
    assert (m.key_value_heads, m.head_width, m.ffn_width, m.padded_vocab) == (8, 64, 100, 128)
    assert ModelConfig(hidden=4096, heads=32).ffn_width == 11_008  # as Llama 7B
