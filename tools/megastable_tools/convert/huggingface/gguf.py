"""Convert an exported folder to one GGUF file for llama.cpp: the same weights and the same token ids."""

from __future__ import annotations

import importlib.util
import json
import os
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from megastable.base.durable import sync_directory
from megastable.base.errors import CheckpointError, DataError
from megastable.base.installation import install_command
from megastable.base.text import visible
from megastable.checkpoint.new_run import refuse_existing
from megastable.config.model import ModelConfig
from megastable.data.local_copy import remove_abandoned, staging_of
from megastable.data.tokenizer import NO_EOD, load_tokenizer
from megastable.data.unforgeable import CONTROL, NORMAL
from megastable.model.rope import Rope, frequencies
from megastable_tools.convert.huggingface.architectures import LLAMA, OLMO2, QWEN2, QWEN3, architecture_of
from megastable_tools.convert.huggingface.folder import HuggingFaceFolder
from megastable_tools.convert.huggingface.llama_cpp import KNOWN, Vocabulary, vocabulary
from megastable_tools.convert.huggingface.tokenizer_export import CONFIG, FILE

TEMPLATE = "chat_template.jinja"


@dataclass(frozen=True)
class Gguf:
    """Result of a conversion. notes: on texts for which llama.cpp gives other ids."""

    out: Path
    architecture: str
    dtype: str
    tensors: int
    bytes: int
    notes: tuple[str, ...]


def to_gguf(folder: Path, out: Path, watch: Callable[[int, int], None] = lambda done, total: None) -> Gguf:
    """Write `out`, which must not exist, from a folder that `to-hf` made (or a fine-tuned one of the same kind).

    Matrices keep their dtype, one-dimensional tensors become fp32, as llama.cpp requires. Memory: two tensors.
    Raises CheckpointError for a tokenizer or model that llama.cpp does not support.
    """
    refuse_existing(out, "file")
    source = HuggingFaceFolder(folder)
    if importlib.util.find_spec("gguf") is None:
        install = install_command("gguf")
        raise CheckpointError(f"the package gguf, which writes such files, is not installed: {install}")
    import gguf

    if problem := unsupported(source.config):
        raise CheckpointError(f"{folder}: {problem}")
    config = reachable(source.config)
    kind, factors = architecture_of(config), _factors(config)
    assert config.vocab_size is not None
    words, settings = _tokenizer(source.path, config.vocab_size)
    writer = gguf.GGUFWriter(None, kind.type)
    _describe(writer, source, kind.type)
    _add_vocabulary(writer, words, settings)
    names = gguf.get_tensor_name_map(getattr(gguf.MODEL_ARCH, kind.type.upper()), config.layers)
    given = {
        names.get_name(part.name, (".weight", ".bias")): part.name
        for parts in source.parts.values() for part in parts
    }  # fmt: skip
    if kind is OLMO2 and config.tied:  # llama.cpp's has a separate head
        given["output.weight"] = "model.embed_tokens.weight"
    for name, theirs in given.items():
        shape, (dtype, raw) = source.shape(theirs), _kind(source, theirs)
        size = dtype.itemsize * int(np.prod(shape))
        writer.add_tensor_info(name, shape, np.dtype(np.float32), size, gguf.GGMLQuantizationType[raw])
    if factors is not None:
        kept = gguf.GGMLQuantizationType.F32
        writer.add_tensor_info("rope_freqs.weight", factors.shape, factors.dtype, factors.nbytes, kept)
    tensors, total, done = len(writer.tensors[0]), sum(t.nbytes for t in writer.tensors[0].values()), 0
    temporary = staging_of(out)
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        remove_abandoned(out)
        writer.write_header_to_file(temporary)
        writer.write_kv_data_to_file()
        writer.write_ti_data_to_file()
        for theirs in given.values():
            tensor = source.tensor(theirs).to(_kind(source, theirs)[0])
            if kind is LLAMA and theirs.endswith(("q_proj.weight", "k_proj.weight")):
                tensor = _interleaved(tensor, config.head_width)
            content = tensor.contiguous().view(torch.uint8).numpy()
            writer.write_tensor_data(content)
            done += content.nbytes
            watch(done, total)
        if factors is not None:
            writer.write_tensor_data(factors)
        writer.fout[0].flush()
        os.fsync(writer.fout[0].fileno())
        writer.close()
        os.replace(temporary, out)
        sync_directory(out.parent)
    except OSError as error:
        raise CheckpointError(
            f"{out} could not be written ({total / 1e9:.2f} GB): {error.strerror or error}. Nothing was left there"
        ) from None
    finally:
        with suppress(OSError):
            temporary.unlink(missing_ok=True)
    precision = _kind(source, "model.embed_tokens.weight")[1].lower()
    return Gguf(out, kind.name, precision, tensors, out.stat().st_size, words.notes)


def unsupported(config: ModelConfig) -> str:
    """What of a model is not written, because llama.cpp does not compute the same, or is not known to; "" for
    nothing."""
    c = reachable(config)
    kind, scaling = architecture_of(c), c.rope_scaling
    if kind not in (QWEN3, QWEN2, LLAMA, OLMO2):
        return f"{kind.name} is not written as GGUF, only {', '.join(k.name for k in (QWEN3, QWEN2, LLAMA, OLMO2))}"
    if c.window is not None:
        return f"llama.cpp knows no windows of a {kind.name}, and this model's are of {c.window} tokens"
    if kind is OLMO2 and c.head_width * c.heads != c.hidden:
        return (
            f"llama.cpp's OLMo 2 has heads of hidden / heads = {c.hidden / c.heads:g}, and this model has head_dim "
            f"{c.head_width}"
        )
    if scaling is not None and scaling.kind == "yarn":
        return "rotary embeddings scaled as yarn are not written as GGUF"
    if scaling is not None and scaling.kind == "llama3" and kind is not LLAMA:
        return f"llama.cpp scales rotary embeddings as llama3 only in a Llama, not in {kind.name}"
    return ""


def reachable(config: ModelConfig) -> ModelConfig:
    """The same model without windows that no token leaves."""
    if config.window is None or config.window < config.longest:
        return config
    return config.model_copy(update={"window": None, "full_attention_every": None})


def _kind(source: HuggingFaceFolder, name: str) -> tuple[torch.dtype, str]:
    held = source.dtype(name)
    if len(source.shape(name)) == 1 or held not in (torch.bfloat16, torch.float16):
        return torch.float32, "F32"
    return held, "BF16" if held == torch.bfloat16 else "F16"


def _factors(config: ModelConfig) -> npt.NDArray[np.float32] | None:
    """llama.cpp's divisors for the frequencies of a Llama 3, fp32 [head_width / 2]; None for other models."""
    if config.rope_scaling is None or config.rope_scaling.kind != "llama3":
        return None
    rope, cpu = Rope.of(config), torch.device("cpu")
    return np.asarray((frequencies(rope._replace(scaling=None), cpu) / frequencies(rope, cpu)).numpy())


def _interleaved(tensor: Tensor, width: int) -> Tensor:
    """llama.cpp's Llama rotates neighbours, Hugging Face's the halves of a head. tensor: [heads x width, hidden]."""
    rows, columns = tensor.shape
    return tensor.view(rows // width, 2, width // 2, columns).transpose(1, 2).reshape(rows, columns)


def _describe(writer: Any, source: HuggingFaceFolder, kind: str) -> None:
    import gguf

    c = source.config
    writer.add_name(visible(source.path.resolve().name))
    writer.add_type(gguf.GGUFType.MODEL)
    types = {"F32": "ALL_F32", "F16": "MOSTLY_F16", "BF16": "MOSTLY_BF16"}
    raw = _kind(source, "model.embed_tokens.weight")[1]
    writer.add_file_type(gguf.LlamaFileType[types[raw]])
    writer.add_quantization_version(gguf.GGML_QUANT_VERSION)
    writer.add_vocab_size(c.vocab_size)
    writer.add_context_length(c.longest)
    writer.add_embedding_length(c.hidden)
    writer.add_block_count(c.layers)
    writer.add_feed_forward_length(c.ffn_width)
    writer.add_head_count(c.heads)
    writer.add_head_count_kv(c.key_value_heads)
    writer.add_key_length(c.head_width)
    writer.add_value_length(c.head_width)
    writer.add_rope_dimension_count(c.head_width)
    writer.add_rope_freq_base(c.rope_theta)
    if c.rope_scaling is not None and c.rope_scaling.kind == "linear":
        writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
        writer.add_rope_scaling_factor(c.rope_scaling.factor)
    writer.add_layer_norm_rms_eps(c.norm_eps)


def _tokenizer(folder: Path, size: int) -> tuple[Vocabulary, dict[str, Any]]:
    """The content of tokenizer.json, and {"bos", "eos", "pad", "unk": ids or None, "template": chat template or
    None}."""
    try:
        model = load_tokenizer(folder / FILE, NO_EOD).model  # type: ignore[attr-defined]
        content = json.loads(model.to_str())
        config = json.loads((folder / CONFIG).read_text(encoding="utf-8"))
        template = config.get("chat_template")
        if (folder / TEMPLATE).is_file():
            template = (folder / TEMPLATE).read_text(encoding="utf-8")
        words = vocabulary(content, size)
    except CheckpointError as error:
        raise CheckpointError(f"{folder / FILE}: {error}. {KNOWN}") from None
    except DataError as error:
        raise CheckpointError(str(error)) from None
    except OSError as error:
        raise CheckpointError(f"{error.filename} cannot be read: {error.strerror}") from None
    except (ValueError, AttributeError, IndexError, RecursionError) as error:
        raise CheckpointError(
            f"{folder}: {FILE}, {CONFIG} or {TEMPLATE} has an unexpected format: {visible(repr(error), 200)}"
        ) from None
    if words.begin and words.begin != _content(config.get("bos_token")):
        raise CheckpointError(
            f"{folder / FILE} puts {words.begin!r} before every text, llama.cpp only the bos_token of {CONFIG}: name it"
        )
    named = {
        key: token for key in ("bos", "eos", "pad", "unk") if (token := _content(config.get(f"{key}_token")))
    }  # fmt: skip
    ids = {key: model.token_to_id(token) for key, token in named.items()}
    for id in ids.values():  # in transformers, these entries make a token special
        if id is not None and words.types[id] == NORMAL:
            words.types[id] = CONTROL
    return words, ids | {"template": template}


def _content(token: Any) -> str:
    return str(token["content"]) if isinstance(token, dict) else str(token or "")


def _add_vocabulary(writer: Any, words: Vocabulary, settings: dict[str, Any]) -> None:
    writer.add_tokenizer_model(words.model)
    writer.add_tokenizer_pre(words.pre)
    writer.add_token_list(words.tokens)
    writer.add_token_types(words.types)
    if words.scores:
        writer.add_token_scores(words.scores)
    if words.merges:
        writer.add_token_merges(words.merges)
    for key in ("bos", "eos", "pad", "unk"):
        if settings.get(key) is not None:
            getattr(writer, f"add_{key}_token_id")(settings[key])
    writer.add_add_bos_token(bool(words.begin))
    writer.add_add_eos_token(False)
    writer.add_add_space_prefix(words.space)
    if isinstance(settings["template"], str):
        writer.add_chat_template(settings["template"])
