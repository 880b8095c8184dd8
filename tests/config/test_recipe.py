"""Recipes and overrides: what is read, what is refused and with which words, and the recipes that come along."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from megastable.base.errors import ConfigError
from megastable.base.installation import ROOT
from megastable.base.text import plural
from megastable.config import __main__, deepspeed_json
from megastable.config.recipe import find, load, override, read_yaml, validate
from megastable.config.tree import RunConfig
from megastable.model.flops import parameters
from tests.tiers import examples

QUICKSTART = "launch/recipes/quickstart.yaml"


def refused(*overrides: str, recipe: str | Path = QUICKSTART) -> str:
    with pytest.raises(ConfigError) as error:
        load(recipe, overrides)
    return str(error.value)


# Overrides


def test_overrides_are_applied_in_order_over_the_recipe() -> None:
    c = load(
        QUICKSTART,
        [
            "model.layers=12", "parallel.tensor=2", "parallel.pipeline=2", "train.steps=20", "run.dir=runs/x",
            "model.tied=true", "data.skip=[[1200,1300],[5,6]]", "optimizer.betas=[0.8, 0.9]", "train.steps=30",
        ],
    )  # fmt: skip
    assert (c.model.layers, c.parallel.tensor, c.parallel.pipeline, c.train.steps) == (12, 2, 2, 30)
    assert c.run.dir == Path("runs/x") and c.model.tied is True
    assert c.data.skip == [(1200, 1300), (5, 6)] and c.optimizer.betas == (0.8, 0.9)
    assert c.model.hidden == 256  # the recipe's
    assert c.optimizer.weight_decay == 0.1  # the default


def test_an_entry_of_a_list_is_overridden_by_its_number() -> None:
    c = load(QUICKSTART, ["data.corpora.0.path=data/mine", "data.corpora.0.weight=0.5"])
    assert [(str(x.path), x.weight) for x in c.data.corpora] == [("data/mine", 0.5)]
    c = load(QUICKSTART, ["optimizer.betas=[0.8, 0.9]", "optimizer.betas.1=0.99"])
    assert c.optimizer.betas == (0.8, 0.99)


@pytest.mark.parametrize(
    ("text", "value"), [("1e-3", 1e-3), ("2.5E-4", 2.5e-4), ("1.0e-3", 1e-3), ("1", 1.0)]
)
def test_numbers_as_people_write_them(text: str, value: float) -> None:
    """YAML 1.1 takes 1e-3 for a string."""
    assert load(QUICKSTART, [f"optimizer.lr={text}"]).optimizer.lr == value


@pytest.mark.parametrize(
    ("assignment", "words"),
    [
        ("model.layers", ("'model.layers'", "key=value")),
        ("=5", ("'=5'", "key=value")),
        ("data.skip=[[1,2", ("data.skip=[[1,2", "not valid YAML")),
        ("data.corpora.1.path=x", ("data.corpora.1", "list of 1")),
        ("data.corpora.first.path=x", ("data.corpora.first", "'first'", "list of 1")),
        ("data.corpora.-1.path=x", ("data.corpora.-1", "list of 1")),
        ("model.layers.x=3", ("model.layers is a value (4)", "no keys below")),
        ("train.steps=1e3", ("train.steps='1e3': expected a whole number above 0, e.g. train.steps=1000",)),
        ("train.steps=many", ("train.steps='many': expected a whole number above 0, e.g. train.steps=1000",)),
        ("optimizer.lr=-1", ("optimizer.lr=-1: expected a number above 0, e.g. optimizer.lr=0.0003",)),
        ("optimizer.lr=inf", ("optimizer.lr='inf': expected a finite number above 0",)),
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
        ("run.dir=5", ("run.dir=5: expected a path or null, e.g. run.dir=runs/mine",)),
        (
            "data.skip=3",
            ("data.skip=3: expected [[whole ", "at least 0], ...], e.g. data.skip='[[1200, 1300]]'"),
        ),
        ("model=5", ("model=5: expected keys below it, e.g. model.layers=12",)),
        ("data.skip=[[3,3]]", ("data.skip: range [3, 3) is empty",)),
    ],
)
def test_a_bad_override_is_named_with_its_key(assignment: str, words: tuple[str, ...]) -> None:
    message = refused(assignment)
    for word in words:
        assert word in message, message


def test_keys_below_a_value_in_a_list() -> None:
    assert "optimizer.betas.0 is a value (0.9)" in refused(
        "optimizer.betas=[0.9, 0.95]", "optimizer.betas.0.x=1"
    )


@pytest.mark.parametrize(
    ("key", "hint"),
    [
        ("model.layer", "did you mean model.layers?"),
        ("modle", "did you mean model?"),
        ("train.step", "did you mean train.steps?"),
        ("layers", "did you mean model.layers?"),
        ("paralel.tensor", "did you mean parallel?"),
        ("train.lr", "did you mean optimizer.lr?"),
        ("optimizer.interval", "did you mean optimizer.spam.interval or optimizer.stable_spam.interval or"),
        ("optimizer.lrate", "known here: name, lr, betas, eps, weight_decay"),
        ("model.kvheads", "did you mean model.kv_heads?"),
        ("data.corpora.0.pth", "did you mean data.corpora.0.path?"),
        ("optimizer.zzz", "known here: name, lr, betas, eps, weight_decay"),
        ("data.corpora.0.zzz", "known here: path, weight"),
        ("zzz", "known here: run, model, data,"),
    ],
)
def test_an_unknown_key_is_refused_with_a_suggestion(key: str, hint: str) -> None:
    part = key.split(".")[0]
    where = key if part in RunConfig.model_fields else part
    message = refused(f"{key}=3")
    assert f"{where}: unknown key; {hint}" in message, message


def test_every_problem_is_told_at_once() -> None:
    message = refused("model.layer=3", "optimizer.lr=0", "parallel.zero=7")
    for word in ("model.layer:", "optimizer.lr=0:", "parallel.zero=7:", QUICKSTART):
        assert word in message
    assert len(message.splitlines()) == 4


# Files


def test_a_missing_recipe() -> None:
    assert "launch/recipes/" in refused(recipe="nothing/here.yaml")
    assert "nothing/here.yaml: no such recipe" in refused(recipe="nothing/here.yaml")


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
    ],
)
def test_a_broken_recipe_is_named_with_the_place(
    content: bytes, words: tuple[str, ...], tmp_path: Path
) -> None:
    path = tmp_path / "broken.yaml"
    path.write_bytes(content)
    message = refused(recipe=path)
    assert str(path) in message
    for word in words:
        assert word in message, message


def test_a_folder_is_no_recipe(tmp_path: Path) -> None:
    assert "cannot be read" in refused(recipe=tmp_path)


@pytest.mark.parametrize("content", ["", "# nothing but a comment\n", "model:\ntrain:\n"])
def test_an_empty_recipe_is_the_defaults(content: str, tmp_path: Path) -> None:
    path = tmp_path / "empty.yaml"
    path.write_text(content)
    overrides = ["model.layers=3", "train.steps=5"]
    assert load(path, overrides) == RunConfig.model_validate({"model": {"layers": 3}, "train": {"steps": 5}})


def test_recipes_of_the_project_are_found_from_anywhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert find(QUICKSTART) == ROOT / QUICKSTART
    assert load(QUICKSTART) == load(ROOT / QUICKSTART)
    (tmp_path / "launch/recipes").mkdir(parents=True)
    (tmp_path / QUICKSTART).write_text("train: {steps: 7}\n")
    assert load(QUICKSTART).train.steps == 7  # what lies here comes first


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
def test_valid_overrides_arrive_and_survive_yaml(chosen: dict[str, Any]) -> None:
    """Given on the command line, dumped as the run directory freezes it, loaded again: the same tree."""
    tree = read_yaml(find(QUICKSTART))
    for key, value in chosen.items():
        override(tree, f"{key}={json.dumps(value)}")
    c = validate(tree, "test")
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
def test_whatever_is_typed_it_is_valid_or_a_config_error(key: str, text: str) -> None:
    """Never another exception: those would reach the user as a traceback."""
    with contextlib.suppress(ConfigError):
        assert isinstance(load(QUICKSTART, [f"{key}={text}"]), RunConfig)


# python -m megastable.config


def config_command(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "megastable.config", *arguments],
        capture_output=True,
        text=True,
        cwd=ROOT,
        check=False,
    )


@pytest.mark.slow
def test_the_command_prints_the_tree_and_the_deepspeed_json(corpus: Path) -> None:
    given = ["parallel.tensor=2", "train.steps=40", f"data.corpora=[{{path: {corpus}}}]"]
    done = config_command(QUICKSTART, "--world", "8", *given)
    epochs, verdict = done.stderr.splitlines()
    assert (done.returncode, verdict) == (0, f"{QUICKSTART}: valid on 8 ranks, 0 warnings")
    assert epochs.startswith("epochs of this run: ")
    tree, ds = done.stdout.split("# DeepSpeed, 8 ranks\n")
    assert RunConfig.model_validate(yaml.safe_load(tree)) == load(QUICKSTART, given)
    assert json.loads(ds)["gradient_accumulation_steps"] == 1


def test_the_command_ends_with_2_and_no_traceback_on_bad_input() -> None:
    done = config_command(QUICKSTART, "model.layer=3")
    assert (done.returncode, done.stdout) == (2, "")
    assert (
        done.stderr
        == f"error: {QUICKSTART}:\n  model.layer: unknown key; did you mean model.layers? e.g. model.layers=12\n"
    )


def main(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    """The same in this process: (exit code, stdout, stderr)."""

    code = 0
    try:
        __main__.main(arguments)
    except SystemExit as end:
        code = int(end.code or 0)
    out = capsys.readouterr()
    return code, out.out, out.err


def test_the_command_prints_one_json_object(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = main(capsys, QUICKSTART, "--json", "--no-data")
    answer = json.loads(out)
    assert code == 0
    assert RunConfig.model_validate(answer["config"]) == load(QUICKSTART)
    assert answer["deepspeed"]["train_batch_size"] == 16 and answer["warnings"] == []


@pytest.mark.parametrize(
    ("arguments", "word"),
    [
        (("nothing.yaml",), "nothing.yaml: no such recipe"),
        ((QUICKSTART, "parallel.tensor=2", "--world", "3"), "3 ranks cannot be laid out"),
        ((QUICKSTART, "--world", "0"), "0 ranks cannot be laid out"),
        ((QUICKSTART, "--world", "-2"), "-2 ranks cannot be laid out"),
        ((QUICKSTART, "deepspeed=none.json"), "deepspeed=none.json: no such file"),
        ((QUICKSTART, "--word", "3"), "unrecognized arguments: --word"),
        ((), "required: recipe"),
    ],
)
def test_the_command_and_bad_arguments(
    arguments: tuple[str, ...], word: str, capsys: pytest.CaptureFixture[str]
) -> None:
    code, out, err = main(capsys, *arguments)
    assert (code, out) == (2, "") and word in err


@pytest.mark.parametrize(
    ("override", "told"),
    [
        ("data.corpora=[{path: nowhere}]", "nowhere is not a prepared corpus, make one with megastable prepare"),
        ("data.corpora=[]", "data.corpora is empty: name at least one"),
        ("model.vocab_size=128", "model.vocab_size=128 is smaller than the tokenizer's 250: leave it out"),
    ],
)  # fmt: skip
def test_the_command_refuses_what_training_would_refuse(
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


@pytest.mark.parametrize(
    ("override", "told"),
    [
        ("schedule.warmup_steps=5000", "schedule.warmup_steps=5000: not below train.steps=220"),
        ("optimizer.lr=30", "optimizer.lr=30: 4.4e+03 times 0.0068"),
    ],
)
def test_the_command_warns_of_what_is_dangerous(
    override: str, told: str, corpus: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    given = (QUICKSTART, f"data.corpora=[{{path: {corpus}}}]", override)
    code, out, err = main(capsys, *given)
    assert code == 0 and RunConfig.model_validate(yaml.safe_load(out.split("# DeepSpeed")[0]))
    epochs, *lines = err.splitlines(keepends=True)
    assert epochs.startswith("epochs of this run: ") and lines[0].startswith("WARNING: ") and told in err
    code, out, again = main(capsys, *given, "--json")
    assert code == 0 and again == err
    _, *warnings, verdict = err.splitlines()
    assert [f"WARNING: {text}" for text in json.loads(out)["warnings"]] == warnings
    assert verdict == f"{QUICKSTART}: valid on 1 rank, {plural(len(warnings), 'warning')}"


def test_the_command_ends_quietly_when_its_reader_is_gone() -> None:
    """As in `| head`."""
    reading, writing = os.pipe()
    os.close(reading)
    done = subprocess.run(
        [sys.executable, "-m", "megastable.config", QUICKSTART, "--no-data"],
        cwd=ROOT, stdout=writing, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    os.close(writing)
    assert done.returncode == -signal.SIGPIPE and done.stderr == ""


@pytest.mark.parametrize("content", ["", "# nothing\n", "{}\n"])
def test_the_command_refuses_an_empty_recipe(
    content: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "empty.yaml").write_text(content)
    code, out, err = main(capsys, str(tmp_path / "empty.yaml"))
    assert (code, out) == (2, "") and "empty.yaml is empty: " in err and "launch/recipes/" in err


# The recipes that come along

RECIPES = sorted((ROOT / "launch/recipes").glob("*.yaml"))
# The batch of each in tokens a step, as published for models of its size.
TOKENS = {
    "125m": 0.5e6, "350m": 0.5e6, "1.3b": 1e6, "1.3b-fp8": 1e6, "7b": 4e6, "7b-fp8": 4e6, "70b": 16e6, "405b": 16e6,
}  # fmt: skip


@pytest.mark.parametrize("path", RECIPES, ids=lambda p: p.stem)
def test_a_recipe_loads_and_builds(path: Path) -> None:
    """On the number of GPUs that its first lines name, with every rank in use."""
    intended = re.search(r"for (\d+) GPUs", path.read_text())
    world = int(intended[1]) if intended else 2
    c = load(path)
    ds = deepspeed_json.build(c, world)
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
def test_a_recipe_has_the_size_of_its_name(name: str) -> None:
    path = ROOT / f"launch/recipes/{name}.yaml"
    header = path.read_text()
    vocabulary = re.search(r"a vocabulary of ([\d,]+)", header)
    tokens_in_all = re.search(r"([\d.]+)([BT])\s+tokens in all", header.replace("\n#", ""))
    assert vocabulary is not None and tokens_in_all is not None
    c = load(path, [f"model.vocab_size={vocabulary[1].replace(',', '')}"])
    size = name.removesuffix("-fp8")
    wanted = float(size[:-1]) * {"m": 1e6, "b": 1e9}[size[-1]]
    assert parameters(c.model) == pytest.approx(wanted, rel=0.1)
    tokens = c.train.global_batch * c.model.sequence_length
    assert tokens == pytest.approx(TOKENS[name], rel=0.06)
    said = float(tokens_in_all[1]) * {"B": 1e9, "T": 1e12}[tokens_in_all[2]]
    assert tokens * c.train.steps == pytest.approx(said, rel=0.05)
    # At least the 20 tokens a parameter of Hoffmann et al., arXiv:2203.15556.
    assert tokens * c.train.steps > 20 * parameters(c.model)


@pytest.mark.parametrize("name", [name for name in TOKENS if name.endswith("-fp8")])
def test_an_fp8_recipe_is_the_plain_one_but_for_that(name: str) -> None:
    fp8, plain = (load(ROOT / f"launch/recipes/{n}.yaml") for n in (name, name.removesuffix("-fp8")))
    assert fp8.precision.fp8 is not None and fp8.precision.fp8.backend == "te"
    without = fp8.precision.model_copy(update={"fp8": None})
    assert fp8.model_copy(update={"precision": without}) == plain


def test_a_key_that_stands_twice_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "twice.yaml"
    path.write_text("train: {steps: 5}\nmodel: {layers: 2}\ntrain: {global_batch: 8}\n")
    with pytest.raises(ConfigError, match=r"(?s)'train' stands here twice.*line 3"):
        load(path)


@pytest.mark.parametrize("given", ["train.steps=true", "model.layers=yes", "optimizer.lr=on"])
def test_yes_is_no_number(given: str, tmp_path: Path) -> None:
    path, key = tmp_path / "empty.yaml", given.partition("=")[0]
    path.write_text("")
    with pytest.raises(ConfigError, match=rf"{key}=true: expected a (whole )?number above 0, e.g. {key}="):
        load(path, [given])


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
def test_a_word_may_stand_for_fp8(said: list[str], recipe: str | None, margin: int | None) -> None:
    """And loses nothing of what else is said, in either order."""
    fp8 = load(ROOT / "launch/recipes/7b.yaml", said).precision.fp8
    assert (fp8 and fp8.recipe, fp8 and fp8.margin) == (recipe, margin)


def test_a_layer_to_keep_may_be_named_without_brackets() -> None:
    fp8 = load(ROOT / "launch/recipes/7b.yaml", ["precision.fp8.keep=blocks.3.mlp.down"]).precision.fp8
    assert fp8 is not None and fp8.keep == ("blocks.3.mlp.down",)


@pytest.mark.parametrize(
    ("said", "message"),
    [
        (
            "precision.fp8=fast",
            r"precision\.fp8\.recipe='fast': expected current, delayed or block, e\.g\. precision\.fp8\.recipe=current",
        ),
        (
            "precision.fp8.keep=[blocks.99.mlp.down]",
            r"precision\.fp8\.keep: blocks\.99\.mlp\.down: no such linear layer",
        ),
        ("precision.fp8.keep_first=32", r"keep_first=32 and keep_last=0 leave none of the 32 blocks"),
        ("precision={kind: fp16, fp8: current}", r"precision\.fp8 with precision\.kind=fp16"),
        ("precision.kind=true", r"precision\.kind=true: expected bf16, fp32 or fp16"),
    ],
)
def test_fp8_that_cannot_be_is_refused(said: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load(ROOT / "launch/recipes/7b.yaml", [said])
