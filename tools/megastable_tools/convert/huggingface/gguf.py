"""Convert an exported folder to one GGUF file for llama.cpp: the same weights and the same token ids."""

from __future__ import annotations

import importlib.util
import json
import os
import re
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from megastable.base.durable import remove_abandoned, staging_of, sync_directory
from megastable.base.errors import CheckpointError, DataError
from megastable.base.process import install_command
from megastable.base.text import make_visible
from megastable.checkpoint.new_run import refuse_existing
from megastable.config.model import ModelConfig
from megastable.data.tokenizer import (
    BYTE,
    CONTROL,
    NO_EOD,
    NORMAL,
    SPACE,
    UNKNOWN,
    UNUSED,
    USER_DEFINED,
    cut_behind_first,
    load_tokenizer,
)
from megastable.model.attention import Rope, rope_frequencies
from megastable_tools.convert.huggingface.architectures import (
    LLAMA,
    OLMO2,
    QWEN2,
    QWEN3,
    Architecture,
    architecture_of,
)
from megastable_tools.convert.huggingface.folder import HuggingFaceFolder
from megastable_tools.convert.huggingface.tokenizer_export import (
    CONFIG,
    CUT_AT_SPACES,
    FILE,
    Json,
    list_text_rules,
    puts_space_before,
)

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
    source_folder = HuggingFaceFolder(folder)
    if importlib.util.find_spec("gguf") is None:
        install_text = install_command("gguf")
        raise CheckpointError(f"the package gguf, which writes such files, is not installed: {install_text}")
    import gguf

    if model_problem := find_unsupported(source_folder.config):
        raise CheckpointError(f"{folder}: {model_problem}")
    model_config = drop_unreached_windows(source_folder.config)
    kind, factors = architecture_of(model_config), _factors(model_config)
    assert model_config.vocab_size is not None
    llama_vocabulary, tokenizer_settings = _tokenizer(source_folder.path, model_config.vocab_size)
    writer = gguf.GGUFWriter(None, kind.type)
    _describe(writer, source_folder, kind.type)
    _add_vocabulary(writer, llama_vocabulary, tokenizer_settings)
    name_map = gguf.get_tensor_name_map(getattr(gguf.MODEL_ARCH, kind.type.upper()), model_config.layers)
    names_given = {
        name_map.get_name(row_part.name, (".weight", ".bias")): row_part.name
        for row_parts in source_folder.parts.values() for row_part in row_parts
    }  # fmt: skip
    if kind is OLMO2 and model_config.tied:  # llama.cpp's has a separate head
        names_given["output.weight"] = "model.embed_tokens.weight"
    for gguf_name, their_name in names_given.items():
        shape, (dtype, raw) = source_folder.shape_of(their_name), _kind(source_folder, their_name)
        size = dtype.itemsize * int(np.prod(shape))
        writer.add_tensor_info(gguf_name, shape, np.dtype(np.float32), size, gguf.GGMLQuantizationType[raw])
    if factors is not None:
        kept_type = gguf.GGMLQuantizationType.F32
        writer.add_tensor_info("rope_freqs.weight", factors.shape, factors.dtype, factors.nbytes, kept_type)
    tensors, total, done = len(writer.tensors[0]), sum(t.nbytes for t in writer.tensors[0].values()), 0
    temporary_file = staging_of(out)
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        remove_abandoned(out)
        writer.write_header_to_file(temporary_file)
        writer.write_kv_data_to_file()
        writer.write_ti_data_to_file()
        for their_name in names_given.values():
            source_tensor = source_folder.read_tensor(their_name).to(_kind(source_folder, their_name)[0])
            if kind is LLAMA and their_name.endswith(("q_proj.weight", "k_proj.weight")):
                # llama.cpp's Llama rotates neighbours, Hugging Face's the halves of a head [heads x width, hidden].
                halves = source_tensor.unflatten(0, (-1, 2, model_config.head_width // 2))
                source_tensor = halves.transpose(1, 2).flatten(0, 2)
            tensor_bytes = source_tensor.contiguous().view(torch.uint8).numpy()
            writer.write_tensor_data(tensor_bytes)
            done += tensor_bytes.nbytes
            watch(done, total)
        if factors is not None:
            writer.write_tensor_data(factors)
        writer.fout[0].flush()
        os.fsync(writer.fout[0].fileno())
        writer.close()
        os.replace(temporary_file, out)
        sync_directory(out.parent)
    except OSError as error:
        raise CheckpointError(
            f"{out} could not be written ({total / 1e9:.2f} GB): {error.strerror or error}. Nothing was left there"
        ) from None
    finally:
        with suppress(OSError):
            temporary_file.unlink(missing_ok=True)
    precision_name = _kind(source_folder, "model.embed_tokens.weight")[1].lower()
    return Gguf(out, kind.name, precision_name, tensors, out.stat().st_size, llama_vocabulary.notes)


def find_unsupported(config: ModelConfig) -> str:
    """What of a model is not written, because llama.cpp does not compute the same, or is not known to; "" for
    nothing."""
    c = drop_unreached_windows(config)
    kind, rope_scaling = architecture_of(c), c.rope_scaling
    if kind not in (QWEN3, QWEN2, LLAMA, OLMO2):
        return f"{kind.name} is not written as GGUF, only {', '.join(k.name for k in (QWEN3, QWEN2, LLAMA, OLMO2))}"
    if c.window is not None:
        return f"llama.cpp knows no windows of a {kind.name}, and this model's are of {c.window} tokens"
    if kind is OLMO2 and c.head_width * c.heads != c.hidden:
        return (
            f"llama.cpp's OLMo 2 has heads of hidden / heads = {c.hidden / c.heads:g}, and this model has head_dim "
            f"{c.head_width}"
        )
    if rope_scaling is not None and rope_scaling.kind == "yarn":
        return "rotary embeddings scaled as yarn are not written as GGUF"
    if rope_scaling is not None and rope_scaling.kind == "llama3" and kind is not LLAMA:
        return f"llama.cpp scales rotary embeddings as llama3 only in a Llama, not in {kind.name}"
    return ""


def drop_unreached_windows(config: ModelConfig) -> ModelConfig:
    """The same model without windows that no token leaves."""
    if config.window is None or config.window < config.longest:
        return config
    return config.model_copy(update={"window": None, "full_attention_every": None})


def _kind(source: HuggingFaceFolder, name: str) -> tuple[torch.dtype, str]:
    held_dtype = source.dtype_of(name)
    if len(source.shape_of(name)) == 1 or held_dtype not in (torch.bfloat16, torch.float16):
        return torch.float32, "F32"
    return held_dtype, "BF16" if held_dtype == torch.bfloat16 else "F16"


def _factors(config: ModelConfig) -> npt.NDArray[np.float32] | None:
    """llama.cpp's divisors for the frequencies of a Llama 3, fp32 [head_width / 2]; None for other models."""
    if config.rope_scaling is None or config.rope_scaling.kind != "llama3":
        return None
    rope, cpu = Rope.from_config(config), torch.device("cpu")
    factors = rope_frequencies(rope._replace(scaling=None), cpu) / rope_frequencies(rope, cpu)
    return np.asarray(factors.numpy())


def _describe(writer: Any, source: HuggingFaceFolder, kind: str) -> None:
    import gguf

    model_config = source.config
    writer.add_name(make_visible(source.path.resolve().name))
    writer.add_type(gguf.GGUFType.MODEL)
    raw_type = _kind(source, "model.embed_tokens.weight")[1]
    writer.add_file_type(gguf.LlamaFileType[f"{'ALL' if raw_type == 'F32' else 'MOSTLY'}_{raw_type}"])
    writer.add_quantization_version(gguf.GGML_QUANT_VERSION)
    writer.add_vocab_size(model_config.vocab_size)
    writer.add_context_length(model_config.longest)
    writer.add_embedding_length(model_config.hidden)
    writer.add_block_count(model_config.layers)
    writer.add_feed_forward_length(model_config.ffn_width)
    writer.add_head_count(model_config.heads)
    writer.add_head_count_kv(model_config.key_value_heads)
    writer.add_key_length(model_config.head_width)
    writer.add_value_length(model_config.head_width)
    writer.add_rope_dimension_count(model_config.head_width)
    writer.add_rope_freq_base(model_config.rope_theta)
    if model_config.rope_scaling is not None and model_config.rope_scaling.kind == "linear":
        writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
        writer.add_rope_scaling_factor(model_config.rope_scaling.factor)
    writer.add_layer_norm_rms_eps(model_config.norm_eps)


def _tokenizer(folder: Path, size: int) -> tuple[Vocabulary, dict[str, Any]]:
    """The content of tokenizer.json, and {"bos", "eos", "pad", "unk": ids or None, "template": chat template or
    None}."""
    try:
        tokenizer_model = load_tokenizer(folder / FILE, NO_EOD).model  # type: ignore[attr-defined]
        content = json.loads(tokenizer_model.to_str())
        config = json.loads((folder / CONFIG).read_text(encoding="utf-8"))
        template = config.get("chat_template")
        if (folder / TEMPLATE).is_file():
            template = (folder / TEMPLATE).read_text(encoding="utf-8")
        words = translate_vocabulary(content, size)
    except CheckpointError as error:
        raise CheckpointError(f"{folder / FILE}: {error}. {KNOWN}") from None
    except DataError as error:
        raise CheckpointError(str(error)) from None
    except OSError as error:
        raise CheckpointError(f"{error.filename} cannot be read: {error.strerror}") from None
    except (ValueError, AttributeError, IndexError, RecursionError) as error:
        raise CheckpointError(
            f"{folder}: {FILE}, {CONFIG} or {TEMPLATE} has an unexpected format: {make_visible(repr(error), 200)}"
        ) from None
    if words.begin and words.begin != _content(config.get("bos_token")):
        raise CheckpointError(
            f"{folder / FILE} puts {words.begin!r} before every text, llama.cpp only the bos_token of {CONFIG}: name it"
        )
    named_tokens = {
        key: token for key in ("bos", "eos", "pad", "unk") if (token := _content(config.get(f"{key}_token")))
    }  # fmt: skip
    ids = {key: tokenizer_model.token_to_id(token) for key, token in named_tokens.items()}
    for token_id in ids.values():  # in transformers, these entries make a token special
        if token_id is not None and words.types[token_id] == NORMAL:
            words.types[token_id] = CONTROL
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
    for token_key in ("bos", "eos", "pad", "unk"):
        if settings.get(token_key) is not None:
            getattr(writer, f"add_{token_key}_token_id")(settings[token_key])
    writer.add_add_bos_token(bool(words.begin))
    writer.add_add_eos_token(False)
    writer.add_add_space_prefix(words.space)
    if isinstance(settings["template"], str):
        writer.add_chat_template(settings["template"])


# A tokenizer.json as llama.cpp's vocabulary, with the same ids. llama.cpp's own converter puts a space before every
# text of a SentencePiece model unless the model is a Llama, refuses one for OLMo 2, and recognises byte-level
# tokenizers by a hash of known ids, which excludes one trained here. Here llama.cpp's settings follow from the
# tokenizer's rules; an unsupported rule is refused. The kinds of pieces are numbered alike in llama.h.


LOWEST = -1e9  # a score
# Text rules of SentencePiece's tokenizer.json that llama.cpp supports.
SPACES: tuple[Json, ...] = (
    CUT_AT_SPACES,
    {"type": "Replace", "pattern": {"String": " "}, "content": SPACE},
    {"type": "Prepend", "prepend": SPACE},
)
_BYTE = re.compile(r"<0x[0-9A-F]{2}>")
# Regular expressions of pre-tokenizers, and llama.cpp's names for them (llama-vocab.cpp, llm_tokenizer_bpe).
_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}%s"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
KNOWN = (
    "For llama.cpp train with SentencePiece of type BPE (megastable prepare tokenizer), or byte-level BPE that cuts "
    "texts as GPT-2, StarCoder, Llama 3 or Qwen 2 do"
)
LLAMA3_WORDS, QWEN2_WORDS = _WORDS % "{1,3}", _WORDS % ""


@dataclass(frozen=True)
class Vocabulary:
    """model: "llama" (SentencePiece, merged by scores) or "gpt2" (bytes, merged by merges); pre: its pre-tokenizer;
    space: it puts a space before every text; begin: the token that it puts there, or ""; notes: on texts for which its
    ids differ from tokenizer.json's."""

    model: str
    pre: str
    tokens: list[str]
    types: list[int]
    scores: list[float] = field(default_factory=list)
    merges: list[str] = field(default_factory=list)
    space: bool = False
    begin: str = ""
    notes: tuple[str, ...] = ()


def translate_vocabulary(content: Json, size: int) -> Vocabulary:
    """content: a tokenizer.json as the library writes it; size: of the model's vocabulary. Raises CheckpointError."""
    model = content["model"]
    if model["type"] != "BPE":
        raise CheckpointError(
            f"it is of type {model['type']}, and of llama.cpp's tokenizers only those of type BPE give the same ids"
        )
    for token in content["added_tokens"]:
        if token["single_word"] or token["lstrip"] or token["rstrip"]:
            raise CheckpointError(f"its token {token['content']!r} takes spaces with it, llama.cpp's do not")
    token_texts, types = _tokens(content, size)
    begin = _begin(content.get("post_processor"))
    if model.get("byte_fallback"):
        return replace(_scored(content, token_texts, types), begin=begin)
    merge_lines = [" ".join(merge_pair) for merge_pair in _pairs(model)]
    id_notes: tuple[str, ...] = ()
    if any(text_rule["type"] == "NFC" for text_rule in list_text_rules(content)):
        id_notes = ("llama.cpp does not normalise texts: write them in Unicode's form NFC",)
    return Vocabulary(
        "gpt2", _pre(content), token_texts, types, merges=merge_lines, begin=begin, notes=id_notes
    )


def is_qwens(content: Json) -> bool:
    """Whether a tokenizer.json normalises and splits texts like Qwen's: then only its merges differ."""
    if content["model"]["type"] != "BPE" or content["model"].get("byte_fallback"):
        return False
    try:
        first_rules = list_text_rules(content)[:1]
        return _pre(content) == "qwen2" and [text_rule["type"] for text_rule in first_rules] == ["NFC"]
    except CheckpointError:
        return False


def _begin(processor: Json | None) -> str:
    """The token put before every text. Raises CheckpointError for additions that llama.cpp does not make."""
    begin_found = ""
    for processor_step in [] if processor is None else processor.get("processors", [processor]):
        if processor_step["type"] == "TemplateProcessing":
            *before, text = processor_step["single"]
            if len(before) > 1 or "Sequence" not in text:
                raise CheckpointError("it adds more to a text than a token before it, llama.cpp does not")
            begin_found = str(before[0]["SpecialToken"]["id"]) if before else ""
        elif processor_step["type"] != "ByteLevel":  # only moves offsets
            raise CheckpointError(f"llama.cpp does not support its post-processor {processor_step['type']}")
    return begin_found


def describe_converter_error(architecture: Architecture, words: Vocabulary, model_file: bool) -> str:
    """The error that llama.cpp's own converter would make with a folder; "" if it is right.

    model_file: the folder also holds tokenizer.model.
    """
    if not model_file or words.model != "llama" or architecture is OLMO2:
        return "knows published tokenizers of this kind only"
    return "" if architecture is LLAMA or words.space else "puts a space before every text"


def _tokens(content: Json, size: int) -> tuple[list[str], list[int]]:
    token_texts, token_types = [f"[PAD{token_number}]" for token_number in range(size)], [UNUSED] * size
    for token_piece, token_number in content["model"]["vocab"].items():
        token_texts[token_number], token_types[token_number] = token_piece, NORMAL
        if content["model"].get("byte_fallback") and _BYTE.fullmatch(token_piece):
            token_types[token_number] = BYTE
    for added_token in content["added_tokens"]:
        is_unknown = added_token["content"] == content["model"].get("unk_token")
        token_kind = UNKNOWN if is_unknown else CONTROL if added_token["special"] else USER_DEFINED
        token_texts[added_token["id"]], token_types[added_token["id"]] = added_token["content"], token_kind
    return token_texts, token_types


def _pairs(model: Json) -> list[list[str]]:
    return [pair.split(" ", 1) if isinstance(pair, str) else pair for pair in model["merges"]]


def _scored(content: Json, tokens: list[str], types: list[int]) -> Vocabulary:
    """SentencePiece: merges the two neighbours that form the piece with the best score, whichever they are."""
    ranks: dict[str, int] = {}
    for merge_rank, (left_piece, right_piece) in enumerate(_pairs(content["model"])):
        ranks.setdefault(left_piece + right_piece, merge_rank)
    text_rules = list_text_rules(content)
    for step in text_rules:
        if step not in SPACES and (step["type"], step.get("replacement")) != ("Metaspace", SPACE):
            raise CheckpointError(f"llama.cpp has no {step['type']} before SentencePiece's pieces")
    id_notes = []
    if not any(step["type"] in ("Replace", "Metaspace") for step in text_rules):
        id_notes.append(f"a literal {SPACE} (U+2581) in a text becomes a space in llama.cpp")
    if any(step.get("prepend_scheme") == "first" for step in text_rules):
        id_notes.append("llama.cpp also puts a space after a special token in a text")
    spaced_tokens = [t.replace(" ", SPACE) if kind == NORMAL else t for t, kind in zip(tokens, types)]
    scores = [float(-ranks.get(t, -LOWEST)) if kind == NORMAL else 0.0 for t, kind in zip(tokens, types)]
    return Vocabulary(
        "llama", "default", spaced_tokens, types, scores=scores, space=puts_space_before(content),
        notes=tuple(id_notes),
    )  # fmt: skip


def _pre(content: Json) -> str:
    """llama.cpp's name of this pre-tokenizer. Raises CheckpointError."""
    # Its regular expressions cut the special tokens of a text by themselves.
    own_rules = [cut_behind_first(token["content"]) for token in content["added_tokens"] if token["special"]]
    found = [step for step in list_text_rules(content) if step["type"] != "NFC" and step not in own_rules]
    kinds = [step["type"] for step in found]
    if puts_space_before(content):
        raise CheckpointError("it puts a space before every text, llama.cpp's byte-level tokenizers do not")
    if kinds == ["ByteLevel"] and found[0].get("use_regex", True):
        return "gpt-2"
    if kinds == ["Digits", "ByteLevel"] and found[0]["individual_digits"] and found[1].get("use_regex", True):
        return "starcoder"
    if kinds == ["Split", "ByteLevel"] and not found[1].get("use_regex", True):
        split_regex = found[0]["pattern"].get("Regex")
        is_isolated = found[0]["behavior"] == "Isolated" and not found[0]["invert"]
        if is_isolated and split_regex in (LLAMA3_WORDS, QWEN2_WORDS):
            whole = content["model"].get("ignore_merges")  # "llama-bpe" looks for whole words first
            return "qwen2" if split_regex == QWEN2_WORDS else "llama-bpe" if whole else "dbrx"
    raise CheckpointError(
        f"it splits texts in a way that llama.cpp does not support ({', '.join(kinds) or 'nowhere'})"
    )
