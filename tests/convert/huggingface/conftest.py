"""Checkpoints of random weights, and a corpus with a real tokenizer."""

from __future__ import annotations

import contextlib
import http.client
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import strategies as st
from torch import Tensor

from megastable.checkpoint import store
from megastable.checkpoint.new_run import write_run
from megastable.checkpoint.whole import describe_parameters
from megastable.config.model import ModelConfig
from megastable.config.tree import RunConfig
from megastable.data.manifest import adopt_shards
from megastable.data.shards import ShardWriter
from megastable.data.tokenizer import Tokenizer
from megastable.engine.expert_routing import BIAS
from megastable_tools.convert.huggingface.architectures import ARCHITECTURES, RoutedExperts
from megastable_tools.convert.huggingface.tokenizer_export import MANY_LANGUAGES, real_text
from megastable_tools.prepare.corpus_tokenizer import train_sentencepiece
from tests.conftest import tiny
from tests.patience import PATIENCE

VOCABULARY = 700  # no padding divides it
YARN = {"kind": "yarn", "factor": 4.0, "original_length": 12}
# Weights of these tests give logits of some 3, which the caps bend.
GEMMA2 = {
    "layers": 3, "norms": "both", "zero_centered_norms": True, "activation": "gelu", "embedding_scale": "sqrt_hidden",
    "qk_norm": False, "tied": True, "head_dim": 16, "attention_scale": 24**-0.5, "attention_softcap": 2.0,
    "logit_softcap": 5.0, "window": 7, "full_attention_every": 2, "norm_eps": 1e-6,
}  # fmt: skip
MODELS: dict[str, dict[str, Any]] = {
    "qwen3": {"layers": 3},
    "qwen3-tied": {"layers": 2, "tied": True, "kv_heads": 1, "head_dim": 24},
    "llama": {"layers": 2, "qk_norm": False, "rope_theta": 500_000.0},
    "llama-tied": {"layers": 2, "qk_norm": False, "tied": True, "kv_heads": None, "norm_eps": 1e-6},
    "llama3": {
        "layers": 2, "qk_norm": False, "rope_theta": 500_000.0, "kv_heads": 1, "head_dim": 16,
        "rope_scaling": {"kind": "llama3", "factor": 8.0, "original_length": 16},
    },
    "llama-linear": {"layers": 1, "qk_norm": False, "rope_scaling": {"kind": "linear", "factor": 4.0}},
    "qwen2": {"layers": 2, "qk_norm": False, "qkv_bias": True, "tied": True, "norm_eps": 1e-6},
    "olmo2": {"layers": 2, "qk_norm": "full", "norms": "after"},
    "olmo2-wide": {"layers": 1, "qk_norm": "full", "norms": "after", "head_dim": 16, "kv_heads": 4, "ffn": 96},
    "qwen3-yarn": {"layers": 1, "rope_scaling": YARN | {"beta_fast": 8.0, "beta_slow": 0.5, "attention_factor": 1.3}},
    "qwen2-windows": {"layers": 3, "qk_norm": False, "qkv_bias": True, "window": 7, "full_attention_every": 3},
    "mistral": {"layers": 2, "qk_norm": False, "window": 7, "rope_scaling": YARN},
    "olmo3": {"layers": 5, "qk_norm": "full", "norms": "after", "window": 7, "full_attention_every": 4},
    "gemma2": GEMMA2,
    "qwen3-moe": {
        "layers": 3, "window": 9,
        "experts": {"count": 4, "top_k": 2, "ffn": 24, "first_dense": 1, "normalize": False, "bias_rate": 0},
    },
    "mixtral": {"layers": 2, "qk_norm": False, "experts": {"count": 3, "top_k": 2, "bias_rate": 0}},
    "olmoe": {"layers": 2, "qk_norm": "full", "ffn": 48, "experts": {"count": 4, "top_k": 3, "ffn": 40}},
    "dots1": {
        "layers": 3, "window": 7, "full_attention_every": 2,
        "experts": {
            "count": 6, "top_k": 2, "ffn": 16, "shared": 2, "first_dense": 1, "gate": "sigmoid", "scale": 2.5,
        },
    },
}  # fmt: skip
# The same in their words.
THEIR_YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16, "rope_theta": 1e4}
Make = Callable[..., Path]


@st.composite
def choices(draw: st.DrawFn) -> dict[str, Any]:
    """What a model has of one of the architectures: keys of `ModelConfig`, all that are not sizes."""
    kind = draw(st.sampled_from(ARCHITECTURES))
    any_of: dict[str, st.SearchStrategy[Any]] = {
        "window": st.none() | st.integers(1, 20),
        "attention_scale": st.none() | st.integers(1, 999).map(lambda n: n**-0.5),
        "attention_softcap": st.none() | st.floats(0.1, 99), "logit_softcap": st.none() | st.floats(0.1, 99),
    }  # fmt: skip
    found = kind.fixed_values() | {key: draw(any_of[key]) for key in any_of if key in kind.free}
    if kind.experts is not None:
        found["experts"] = draw(expert_choices(kind.experts))
    every = st.none() | st.integers(2, 5) if found["window"] is not None else st.none()
    return found | ({"full_attention_every": draw(every)} if "full_attention_every" in kind.free else {})


@st.composite
def expert_choices(draw: st.DrawFn, kind: RoutedExperts) -> dict[str, Any]:
    """Keys of `ExpertsConfig`, all that an architecture says but the first dense layers."""
    any_of: dict[str, st.SearchStrategy[Any]] = {
        "count": st.integers(2, 9), "ffn": st.none() | st.integers(1, 99), "normalize": st.booleans(),
        "scale": st.floats(0.1, 9), "shared": st.integers(1, 3),
    }  # fmt: skip
    found = kind.fixed_values() | {key: draw(any_of[key]) for key in any_of if key in kind.keys}
    return found | {"top_k": draw(st.integers(2, found["count"]))}


@pytest.fixture(scope="session")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    """As ours are: SentencePiece BPE that keeps every text."""
    texts = [real_text()[:60_000], *MANY_LANGUAGES]
    return train_sentencepiece(texts, tmp_path_factory.mktemp("tokenizer") / "tokenizer.model", VOCABULARY)


@pytest.fixture(scope="session")
def text_corpus(tokenizer: Tokenizer, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_text_corpus(tmp_path_factory.mktemp("text"), tokenizer)


def write_text_corpus(folder: Path, tokenizer: Tokenizer) -> Path:
    """A prepared corpus of real text, with its tokenizer."""
    text = real_text()
    with ShardWriter(folder / "part-0", tokenizer.vocab_size) as writer:
        for first in range(0, len(text), 2000):
            writer.add_document(np.array([*tokenizer.encode(text[first : first + 2000]), tokenizer.eod]))
    tokenizer.copy_to(folder)
    adopt_shards(folder, tokenizer.info, validation=0.1).save_manifest(folder)
    return folder


def configured(corpus: Path, out: Path, model: dict[str, Any], **parts: Any) -> RunConfig:
    return tiny(corpus, out, model={"vocab_size": VOCABULARY, "sequence_length": 48, **model}, **parts)


@pytest.fixture(scope="session")
def make(text_corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> Make:
    """make(model, parallel={...}, ...) -> the folder of a checkpoint whose weights are random, norms too; not to be
    changed."""
    known: dict[str, Path] = {}

    def made(model: dict[str, Any], **parts: Any) -> Path:
        key = repr((model, parts))
        if key not in known:
            out = tmp_path_factory.mktemp("made") / "run"
            known[key] = write_random(out, configured(text_corpus, out, model, **parts))
        return known[key]

    return made


def write_random(
    out: Path, run: RunConfig, expert_state: dict[str, Tensor] | None = None, **changed: Tensor
) -> Path:
    p = run.parallel
    layout = store.LayoutState(tensor=p.tensor, pipeline=p.pipeline, data=2, zero=p.zero, precision="bf16")
    state = store.RunState(step=7, order_fingerprint="0" * 64, layout=layout)
    whole = random_weights(run.model) | changed
    return write_run(
        out, run, state, lambda name, kind: whole[name], optimizer=None, origin={},
        expert_state=draw_biases(run.model) if expert_state is None else expert_state,
    )  # fmt: skip


def draw_biases(config: ModelConfig) -> dict[str, Tensor]:
    """Of the choice of experts where an architecture has them: many choices are others without."""
    if config.experts is None or config.experts.gate != "sigmoid":
        return {}
    biases = 0.2 * torch.randn(
        config.layers, config.experts.count, generator=torch.Generator().manual_seed(1)
    )
    for block in range(config.experts.first_dense):
        biases[block] = 0
    return {BIAS: biases}


def random_weights(config: ModelConfig, seed: int = 0) -> dict[str, Tensor]:
    """Nothing is at its initial value: neither norms, nor the rows of the vocabulary's padding."""
    drawn = torch.Generator().manual_seed(seed)
    found = {}
    for name, described in describe_parameters(config).items():
        weight = torch.randn(described.shape, generator=drawn)
        found[name] = 1 + 0.3 * weight if len(described.shape) == 1 else 0.15 * weight
    return found


ROOT = Path(__file__).parents[3]


@contextlib.contextmanager
def llama_cpp(file: Path) -> Iterator[Callable[[str, dict[str, Any]], list[int]]]:
    """ask("/tokenize" or "/completion", body) -> tokens, of a llama.cpp that has `file`; all in fp32."""
    import xllamacpp

    given = xllamacpp.CommonParams()
    given.model.path, given.n_ctx, given.n_parallel, given.port = str(file), 256, 1, 0
    given.warmup, given.n_gpu_layers, given.cpuparams.n_threads, given.verbosity = False, 0, 1, -1
    given.cache_type_k = given.cache_type_v = xllamacpp.ggml_type.GGML_TYPE_F32
    given.flash_attn_type = xllamacpp.llama_flash_attn_type.LLAMA_FLASH_ATTN_TYPE_DISABLED
    server = xllamacpp.Server(given)
    line = http.client.HTTPConnection(server.listening_address.removeprefix("http://"), timeout=PATIENCE)

    def ask(path: str, body: dict[str, Any]) -> list[int]:
        line.request("POST", path, json.dumps(body), {"Content-Type": "application/json"})
        return list(json.load(line.getresponse())["tokens"])

    with contextlib.closing(line):
        yield ask
