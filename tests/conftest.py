"""What every test may use: a tiny real corpus, and recipes for it."""

from __future__ import annotations

import contextlib
import gc
import os
import signal
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megastable.config.tree import RunConfig
from megastable.data.manifest import Manifest, TokenizerInfo, adopt_shards
from megastable.data.shards import ShardWriter
from tests import durations, tiers

VOCABULARY = 250
LENGTH = 32
# What only extras install.
CLIENTS = {"gguf", "lm_eval", "megatron", "mlflow", "selenium", "transformers", "wandb"}


def pytest_configure() -> None:
    """Give each of the processes that test side by side cores of its own, with all that it starts.

    A rank's gloo thread spins while bytes wait for a rank that has not asked for them yet, on a core that another test
    could use: without this the tests of several ranks take 40 % longer.
    """
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        # Started in the background of a script; what tests start would not hear Ctrl-C either.
        signal.signal(signal.SIGINT, signal.default_int_handler)
    worker = os.environ.get("PYTEST_XDIST_WORKER")
    if worker is not None:
        cores, workers = sorted(os.sched_getaffinity(0)), int(os.environ["PYTEST_XDIST_WORKER_COUNT"])
        os.sched_setaffinity(0, cores[int(worker.removeprefix("gw")) :: workers] or cores)
        # Ranks that wait for each other are not to interrupt the one that they wait for.
        os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))


@pytest.hookimpl(tryfirst=True)  # before -m deselects
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    tiers.mark_slow_cases(items)


def pytest_collection_finish() -> None:
    """Some 6,000 tests and all that they import live to the end: no collection of garbage is to look at them again."""
    gc.collect()
    gc.freeze()


_costs: dict[str, float] = {}
_phase_start = durations.Clock.read()


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_logstart() -> None:
    global _phase_start
    _phase_start = durations.Clock.read()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport() -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Note on the report what its phase has cost; xdist carries it to the process that writes them all."""
    global _phase_start
    report = yield
    end = durations.Clock.read()
    report.cost = _phase_start.cost_until(end)  # type: ignore[attr-defined]
    _phase_start = end
    return report


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    name = report.nodeid if report.when == "call" else f"{report.nodeid.partition('::')[0]}::fixtures"
    # xdist makes the report of a test whose process died.
    _costs[name] = _costs.get(name, 0.0) + getattr(report, "cost", 0.0)


def pytest_sessionfinish(session: pytest.Session) -> None:
    # Those that failed and run again, alone, are not the run that the file is about.
    again = session.config.getoption("lf", False)
    if "PYTEST_XDIST_WORKER" not in os.environ and _costs and not again:
        durations.write_durations(_costs)


@contextlib.contextmanager
def _skip_without_client() -> Iterator[None]:
    """A test for a program of others is skipped where that is not installed, wherever in our code it was missed."""
    try:
        yield
    except Exception as error:
        cause: BaseException | None = error
        while cause is not None:
            if isinstance(cause, ModuleNotFoundError) and (cause.name or "").partition(".")[0] in CLIENTS:
                pytest.skip(f"{cause.name} is not installed (pyproject.toml says with which extra it is)")
            cause = cause.__cause__ or cause.__context__
        raise


@pytest.hookimpl(wrapper=True)
def pytest_runtest_setup() -> Generator[None, None, None]:
    with _skip_without_client():
        yield


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call() -> Generator[None, None, None]:
    with _skip_without_client():
        yield


@pytest.fixture(autouse=True)
def _environment() -> Iterator[None]:
    """What a test, or a tool that it calls, sets is not there for the next one."""
    before = dict(os.environ)
    yield
    if os.environ != before:
        os.environ.clear()
        os.environ.update(before)


def write_corpus(
    directory: Path, tokens: int = 40_000, seed: int = 0, validation: float = 0.05, ids: int = VOCABULARY
) -> Manifest:
    """A corpus that can be learnt: a random walk over token ids in documents of 5 to 200 tokens, ended by 0.

    ids: how many of the vocabulary's ids occur; with few it is learnt in a few dozen steps.
    """
    directory.mkdir(parents=True, exist_ok=True)
    random = np.random.default_rng(seed)
    with ShardWriter(directory / "part-0", VOCABULARY) as writer:
        while writer.tokens < tokens:
            steps = random.integers(-3, 4, random.integers(5, 200))
            document = (random.integers(1, ids) + steps.cumsum()) % (ids - 1) + 1
            writer.add_document(np.append(document, 0))
    tokenizer = TokenizerInfo(
        file="tokenizer.model", kind="sentencepiece", xxh3="0" * 32, vocab_size=VOCABULARY, eod=0
    )
    manifest = adopt_shards(directory, tokenizer, validation)
    manifest.save_manifest(directory)
    return manifest


@pytest.fixture(scope="session")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a tiny prepared corpus; not to be changed."""
    folder = tmp_path_factory.mktemp("corpus")
    write_corpus(folder)
    return folder


def tiny(corpus: Path, run: Path, **parts: Any) -> RunConfig:
    """A configuration that trains in seconds; `parts` are merged into the tree."""
    tree: dict[str, Any] = {
        "run": {"dir": run, "timeout": 120},
        "model": {"layers": 2, "hidden": 32, "heads": 4, "kv_heads": 2, "ffn": 64, "sequence_length": LENGTH}
        | {"vocab_multiple": 64},
        "data": {"corpora": [{"path": corpus}]},
        "optimizer": {"lr": 3e-3},
        "schedule": {"warmup_steps": 5, "total_steps": 20},
        "train": {"steps": 20, "global_batch": 8, "micro_batch": 2, "eval_samples": 8, "eval_interval": 0},
        "checkpoint": {"interval": 10},
        "logging": {"trackers": [], "interval": 1000, "norms_interval": 5, "peak_tflops": 1.0},
    }  # fmt: skip
    for key, value in parts.items():
        tree[key] = {**tree.get(key, {}), **value} if isinstance(value, dict) else value
    return RunConfig.model_validate(tree)
