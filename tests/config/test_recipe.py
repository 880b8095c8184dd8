"""Recipes and overrides: what is read, what is refused and with which words, and the recipes that come along."""

from __future__ import annotations

import contextlib
import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from megastable.base.errors import ConfigError
from megastable.base.process import ROOT
from megastable.config import __main__, deepspeed_json
from megastable.config.recipe import find_recipe, load_recipe, override_key, read_yaml, validate_tree
from megastable.config.tree import RunConfig
from megastable.model.sizes import count_parameters
from tests.tiers import examples

QUICKSTART = "launch/recipes/quickstart.yaml"


def refused(*overrides: str, recipe: str | Path = QUICKSTART) -> str:
    with pytest.raises(ConfigError) as error:
        load_recipe(recipe, overrides)
    return str(error.value)


# Overrides


@pytest.mark.parametrize(
    ("assignment", "words"),
    [
        ("model.layers", ("'model.layers'", "key=value")),
        ("data.skip=[[1,2", ("data.skip=[[1,2", "not valid YAML")),
        ("data.corpora.1.path=x", ("data.corpora.1", "list of 1")),
        ("model.layers.x=3", ("model.layers is a value (4)", "no keys below")),
        ("train.steps=many", ("train.steps='many': expected a whole number above 0, e.g. train.steps=1000",)),
        ("optimizer.lr=-1", ("optimizer.lr=-1: expected a number above 0, e.g. optimizer.lr=0.0003",)),
        ("parallel.zero=5", ("parallel.zero=5", "0, 1, 2 or 3")),
        ("schedule.kind=cosin", ("schedule.kind='cosin': expected cosine, linear, constant or wsd, e.g.",)),
        ("data.corpora=[{weight: 1}]", ("data.corpora.0.path: missing, e.g. data.corpora.0.path=data/mine",)),
        (
            "data.corpora.0.weight=-1",
            ("data.corpora.0.weight=-1: expected a number above 0, e.g. data.corpora.0.w",),
        ),
        (
            "optimizer.betas=[0.9, 2]",
            ("optimizer.betas.1=2: expected optimizer.betas to be [number from 0 to 1, ",),
        ),
        (
            "data.skip=3",
            ("data.skip=3: expected [[whole ", "at least 0], ...], e.g. data.skip='[[1200, 1300]]'"),
        ),
        ("train.steps=true", ("train.steps=true: expected a whole number above 0, e.g. train.steps=",)),
    ],
)
def test_load_names_a_bad_override_with_its_key(assignment: str, words: tuple[str, ...]) -> None:
    message = refused(assignment)
    for word in words:
        assert word in message, message


@pytest.mark.parametrize(
    ("key", "hint"),
    [
        ("model.layer", "did you mean model.layers?"),
        ("layers", "did you mean model.layers?"),
        ("train.lr", "did you mean optimizer.lr?"),
        ("optimizer.interval", "did you mean optimizer.spam.interval or optimizer.stable_spam.interval or"),
        ("data.corpora.0.zzz", "known here: path, url, cache_gib, weight"),
        ("zzz", "known here: run, model, data,"),
    ],
)
def test_load_refuses_an_unknown_key_with_a_suggestion(key: str, hint: str) -> None:
    part = key.split(".")[0]
    where = key if part in RunConfig.model_fields else part
    message = refused(f"{key}=3")
    assert f"{where}: unknown key; {hint}" in message, message


# Files


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"model: {layers: 4\ntrain: {steps: 5}\n", ("not valid YAML", "line 2")),
        (b"model:\n  layers: 4\n   hidden: 5\n", ("not valid YAML", "line 3")),
        (b"\tmodel: 4\n", ("not valid YAML", "line 1")),
        (b"- model\n- train\n", ("expected keys such as 'model:'", "list")),
        (b"just text\n", ("expected keys such as 'model:'", "str")),
        (b"model: {layers: \xff\xfe}\n", ("cannot be read",)),
        (b"model: 5\n", ("model=5",)),
        (b"1: 2\n", ("1: unknown key", "known here: run, model")),
        (b"train: {steps: 5}\ntrain: {global_batch: 8}\n", ("'train' stands here twice", "line 2")),
        (b"", ("is empty: ", "launch/recipes/")),
    ],
)
def test_load_names_a_broken_recipe_with_the_place(
    content: bytes, words: tuple[str, ...], tmp_path: Path
) -> None:
    path = tmp_path / "broken.yaml"
    path.write_bytes(content)
    message = refused(recipe=path)
    assert str(path) in message
    for word in words:
        assert word in message, message


# Properties

FINITE = st.floats(1e-12, 1e12)
BETA = st.just(0.0) | st.floats(1e-12, 0.99)
VALUES: dict[str, st.SearchStrategy[Any]] = {
    "model.layers": st.integers(1, 200),
    "model.qk_norm": st.sampled_from([True, False, "full"]),
    "model.norms": st.sampled_from(["before", "after", "both", "mixed", "deep", "branch"]),
    "model.zero_centered_norms": st.booleans(),
    "model.attention_scale": st.none() | FINITE,
    "model.attention_softcap": st.none() | FINITE,
    "model.logit_softcap": st.none() | FINITE,
    "model.window": st.none() | st.integers(1, 10**6),
    "model.activation": st.sampled_from(["silu", "gelu"]),
    "model.swiglu_clamp": st.none() | FINITE,
    "model.dropout": st.just(0.0) | st.floats(1e-12, 0.99),
    "model.embedding_scale": FINITE | st.just("sqrt_hidden"),
    "model.init": st.sampled_from(["normal", "fan_in", "xavier", "small"]),
    "model.init_std": FINITE,
    "model.residual_init": st.sampled_from(["depth", "zero"]),
    "model.rope_theta": FINITE,
    "model.kv_heads": st.sampled_from([None, 1, 2, 4]),
    "kernels.attention": st.sampled_from(["reference", "sdpa"]),
    "optimizer.lr": FINITE,
    "optimizer.betas": st.tuples(BETA, BETA).map(list),
    "optimizer.eps": st.floats(1e-30, 1.0),
    "schedule.kind": st.sampled_from(["cosine", "linear", "constant", "wsd"]),
    "schedule.floor": st.just(0.0) | st.floats(1e-12, 1),
    "schedule.decay_steps": st.none() | st.integers(1, 10**9),
    "data.skip": st.lists(
        st.tuples(st.integers(0, 10**15 - 100), st.integers(1, 100)).map(lambda t: [t[0], t[0] + t[1]]),
        max_size=3,
    ),
    "data.corpora.0.path": st.text("abc/. -_:#'\"[{&*!|>%@`ü", min_size=1, max_size=10),
    "data.corpora.0.weight": FINITE,
    "run.dir": st.none() | st.text("abc/.-_ :#", min_size=1, max_size=10),
    "run.seed": st.integers(0, 2**32 - 1),
    "precision.kind": st.sampled_from(["bf16", "fp32", "fp16"]),
    "deepspeed": st.text("abc/.{}é", min_size=1, max_size=10),
}


@settings(deadline=None, max_examples=examples(150))
@given(st.fixed_dictionaries({}, optional=VALUES))
def test_override_arrives_and_survives_yaml(chosen: dict[str, Any]) -> None:
    """Given on the command line, dumped as the run directory freezes it, loaded again: the same tree."""
    tree = read_yaml(find_recipe(QUICKSTART))
    for key, value in chosen.items():
        override_key(tree, f"{key}={json.dumps(value)}")
    c = validate_tree(tree, "test")
    for key, value in chosen.items():
        got: Any = c
        for name in key.split("."):
            got = got[int(name)] if name.isdigit() else getattr(got, name)
        if isinstance(got, Path):
            assert got == Path(value)
        else:
            assert json.loads(json.dumps(got)) == value
    frozen = yaml.safe_dump(c.model_dump(mode="json"), sort_keys=False)
    assert RunConfig.model_validate(yaml.safe_load(frozen)) == c


@settings(deadline=None, max_examples=examples(150))
@given(
    st.sampled_from(
        [*VALUES, "model", "data.corpora", "data.corpora.0", "a.b", "run.dir.x", "model.", ".", ""]
    ),
    st.text(max_size=12),
)
def test_load_takes_anything_or_raises_config_error(key: str, text: str) -> None:
    """Never another exception: those would reach the user as a traceback."""
    with contextlib.suppress(ConfigError):
        assert isinstance(load_recipe(QUICKSTART, [f"{key}={text}"]), RunConfig)


# python -m megastable.config


def main(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    """The same in this process: (exit code, stdout, stderr)."""

    code = 0
    try:
        __main__.main(arguments)
    except SystemExit as end:
        code = int(end.code or 0)
    out = capsys.readouterr()
    return code, out.out, out.err


@pytest.mark.parametrize(
    ("override", "told"),
    [
        ("data.corpora=[{path: nowhere}]", "nowhere is not a prepared corpus, make one with megastable prepare"),
        ("data.corpora=[]", "data.corpora is empty: name at least one"),
        ("model.vocab_size=128", "model.vocab_size=128 is smaller than the tokenizer's 250: leave it out"),
    ],
)  # fmt: skip
def test_command_refuses_what_training_would_refuse(
    override: str, told: str, corpus: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """With --no-data the corpora are not opened: they may lie on another host."""
    given = (QUICKSTART, f"data.corpora=[{{path: {corpus}}}]", override)
    code, out, err = main(capsys, *given)
    assert (code, out) == (2, "") and err.startswith("error: ") and told in err
    assert ("--no-data" in err) == override.startswith("data.")
    code, out, err = main(capsys, *given, "--no-data")
    assert (code, err) == (0, f"{QUICKSTART}: valid on 1 rank, 0 warnings\n")
    assert RunConfig.model_validate(yaml.safe_load(out.split("# DeepSpeed")[0]))


# The recipes that come along

RECIPES = sorted((ROOT / "launch/recipes").glob("*.yaml"))
# The batch of each in tokens a step, as published for models of its size.
TOKENS = {
    "125m": 0.5e6, "350m": 0.5e6, "1.3b": 1e6, "1.3b-fp8": 1e6, "7b": 4e6, "7b-fp8": 4e6, "70b": 16e6, "405b": 16e6,
    "moe-7b-a1b": 4e6, "moe-30b-a3b": 4e6,
}  # fmt: skip


@pytest.mark.parametrize("path", RECIPES, ids=lambda p: p.stem)
def test_recipe_loads_and_builds(path: Path) -> None:
    """On the number of GPUs that its first lines name, with every rank in use."""
    intended = re.search(r"for (\d+) GPUs", path.read_text())
    world = int(intended[1]) if intended else 2
    c = load_recipe(path)
    ds = deepspeed_json.build_deepspeed_json(c, world)
    replicas = world // (c.parallel.tensor * c.parallel.pipeline)
    assert (
        ds["train_micro_batch_size_per_gpu"] * ds["gradient_accumulation_steps"] * replicas
        == c.train.global_batch
    )
    # 1F1B wants a few micro-batches a stage, or most of the time goes into filling the pipeline.
    assert c.parallel.pipeline == 1 or ds["gradient_accumulation_steps"] >= 8 * c.parallel.pipeline
    # A tensor group stays inside a host of 8.
    assert 8 % c.parallel.tensor == 0


@pytest.mark.parametrize("name", TOKENS)
def test_recipe_has_the_size_of_its_name(name: str) -> None:
    path = ROOT / f"launch/recipes/{name}.yaml"
    header = path.read_text()
    vocabulary = re.search(r"a vocabulary of ([\d,]+)", header)
    tokens_in_all = re.search(r"([\d.]+)([BT])\s+tokens in all", header.replace("\n#", ""))
    assert vocabulary is not None and tokens_in_all is not None
    c = load_recipe(path, [f"model.vocab_size={vocabulary[1].replace(',', '')}"])
    size, _, active = name.removesuffix("-fp8").removeprefix("moe-").partition("-a")
    wanted = float(size[:-1]) * {"m": 1e6, "b": 1e9}[size[-1]]
    assert count_parameters(c.model) == pytest.approx(wanted, rel=0.1)
    if active:  # rounded down
        said_active = re.search(r"of which ([\d.]+)B\s+compute a token", header.replace("\n#", ""))
        assert said_active is not None and int(float(said_active[1])) == int(active[:-1])
        used = count_parameters(c.model) - c.model.hidden * 3 * (
            c.model.mlp_widths() - c.model.mlp_widths(True)
        )
        assert float(said_active[1]) == pytest.approx(used / 1e9, abs=0.05)
    tokens = c.train.global_batch * c.model.sequence_length
    assert tokens == pytest.approx(TOKENS[name], rel=0.06)
    said = float(tokens_in_all[1]) * {"B": 1e9, "T": 1e12}[tokens_in_all[2]]
    assert tokens * c.train.steps == pytest.approx(said, rel=0.05)
    # At least the 20 tokens a parameter of Hoffmann et al., arXiv:2203.15556.
    assert tokens * c.train.steps > 20 * count_parameters(c.model)


@pytest.mark.parametrize(
    ("said", "recipe", "margin"),
    [
        (["precision.fp8=delayed", "precision.fp8.margin=1"], "delayed", 1),
        (["precision.fp8.margin=1", "precision.fp8=delayed"], "delayed", 1),
        (["precision.fp8=true", "precision.fp8.margin=1", "precision.fp8=true"], "current", 1),
        (["precision.fp8.margin=1", "precision.fp8=off", "precision.fp8=block"], "block", 0),
        (["precision.fp8=off", "precision.fp8.margin=2"], "current", 2),
        (["precision={fp8: block}", "precision.fp8.margin=2"], "block", 2),
        (["precision.fp8.margin=1", "precision.fp8=off"], None, None),
        (["precision.fp8=none"], None, None),
    ],
)
def test_load_takes_a_word_for_fp8(said: list[str], recipe: str | None, margin: int | None) -> None:
    """And loses nothing of what else is said, in either order."""
    fp8 = load_recipe(ROOT / "launch/recipes/7b.yaml", said).precision.fp8
    assert (fp8 and fp8.recipe, fp8 and fp8.margin) == (recipe, margin)
