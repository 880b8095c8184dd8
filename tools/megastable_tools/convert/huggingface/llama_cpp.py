"""Translate tokenizer.json to llama.cpp's vocabulary, with the same ids. Pure.

llama.cpp's own converter puts a space before every text of a SentencePiece model unless the model is a Llama, refuses
one for OLMo 2, and recognises byte-level tokenizers by a hash of known ids, which excludes one trained here. Here
llama.cpp's settings follow from the tokenizer's rules; an unsupported rule is refused.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field, replace

from megastable.base.errors import CheckpointError
from megastable.data.tokenizer import SPACE

# The kinds of pieces are numbered alike in llama.h.
from megastable.data.unforgeable import BYTE, CONTROL, NORMAL, UNKNOWN, UNUSED, USER_DEFINED, cut_behind_first
from megastable_tools.convert.huggingface.architectures import LLAMA, OLMO2, Architecture
from megastable_tools.convert.huggingface.tokenizer_export import CUT_AT_SPACES, Json, spaced, steps

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
LLAMA3, QWEN2 = _WORDS % "{1,3}", _WORDS % ""


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


def vocabulary(content: Json, size: int) -> Vocabulary:
    """content: a tokenizer.json as the library writes it; size: of the model's vocabulary. Raises CheckpointError."""
    model = content["model"]
    if model["type"] != "BPE":
        raise CheckpointError(
            f"it is of type {model['type']}, and of llama.cpp's tokenizers only those of type BPE give the same ids"
        )
    for token in content["added_tokens"]:
        if token["single_word"] or token["lstrip"] or token["rstrip"]:
            raise CheckpointError(f"its token {token['content']!r} takes spaces with it, llama.cpp's do not")
    tokens, types = _tokens(content, size)
    begin = _begin(content.get("post_processor"))
    if model.get("byte_fallback"):
        return replace(_scored(content, tokens, types), begin=begin)
    merges = [" ".join(pair) for pair in _pairs(model)]
    return Vocabulary(
        "gpt2", _pre(content), tokens, types, merges=merges, begin=begin, notes=_normalised(content)
    )


def is_qwens(content: Json) -> bool:
    """Whether a tokenizer.json normalises and splits texts like Qwen's: then only its merges differ."""
    if content["model"]["type"] != "BPE" or content["model"].get("byte_fallback"):
        return False
    try:
        return _pre(content) == "qwen2" and [step["type"] for step in steps(content)][:1] == ["NFC"]
    except CheckpointError:
        return False


def _begin(processor: Json | None) -> str:
    """The token put before every text. Raises CheckpointError for additions that llama.cpp does not make."""
    found = ""
    for step in [] if processor is None else processor.get("processors", [processor]):
        if step["type"] == "TemplateProcessing":
            *before, text = step["single"]
            if len(before) > 1 or "Sequence" not in text:
                raise CheckpointError("it adds more to a text than a token before it, llama.cpp does not")
            found = str(before[0]["SpecialToken"]["id"]) if before else ""
        elif step["type"] != "ByteLevel":  # only moves offsets
            raise CheckpointError(f"llama.cpp does not support its post-processor {step['type']}")
    return found


def converted(architecture: Architecture, words: Vocabulary, model_file: bool) -> str:
    """The error that llama.cpp's own converter would make with a folder; "" if it is right.

    model_file: the folder also holds tokenizer.model.
    """
    if model_file and words.model == "llama" and architecture is not OLMO2:
        if architecture is LLAMA or words.space:
            return ""
        return "puts a space before every text"
    return "knows published tokenizers of this kind only"


def _tokens(content: Json, size: int) -> tuple[list[str], list[int]]:
    tokens, types = [f"[PAD{i}]" for i in range(size)], [UNUSED] * size
    for piece, i in content["model"]["vocab"].items():
        tokens[i], types[i] = piece, NORMAL
        if content["model"].get("byte_fallback") and _BYTE.fullmatch(piece):
            types[i] = BYTE
    for token in content["added_tokens"]:
        unknown = token["content"] == content["model"].get("unk_token")
        kind = UNKNOWN if unknown else CONTROL if token["special"] else USER_DEFINED
        tokens[token["id"]], types[token["id"]] = token["content"], kind
    return tokens, types


def _pairs(model: Json) -> list[list[str]]:
    return [pair.split(" ", 1) if isinstance(pair, str) else pair for pair in model["merges"]]


def _scored(content: Json, tokens: list[str], types: list[int]) -> Vocabulary:
    """SentencePiece: merges the two neighbours that form the piece with the best score, whichever they are."""
    ranks: dict[str, int] = {}
    for rank, (left, right) in enumerate(_pairs(content["model"])):
        ranks.setdefault(left + right, rank)
    rules = steps(content)
    for step in rules:
        if step not in SPACES and (step["type"], step.get("replacement")) != ("Metaspace", SPACE):
            raise CheckpointError(f"llama.cpp has no {step['type']} before SentencePiece's pieces")
    notes = []
    if not any(step["type"] in ("Replace", "Metaspace") for step in rules):
        notes.append(f"a literal {SPACE} (U+2581) in a text becomes a space in llama.cpp")
    if any(step.get("prepend_scheme") == "first" for step in rules):
        notes.append("llama.cpp also puts a space after a special token in a text")
    return Vocabulary(
        "llama",
        "default",
        [t.replace(" ", SPACE) if kind == NORMAL else t for t, kind in zip(tokens, types)],
        types,
        scores=[float(-ranks.get(t, -LOWEST)) if kind == NORMAL else 0.0 for t, kind in zip(tokens, types)],
        space=spaced(content),
        notes=tuple(notes),
    )


def _pre(content: Json) -> str:
    """llama.cpp's name of this pre-tokenizer. Raises CheckpointError."""
    # Its regular expressions cut the special tokens of a text by themselves.
    own = [cut_behind_first(token["content"]) for token in content["added_tokens"] if token["special"]]
    found = [step for step in steps(content) if step["type"] != "NFC" and step not in own]
    kinds = [step["type"] for step in found]
    if spaced(content):
        raise CheckpointError("it puts a space before every text, llama.cpp's byte-level tokenizers do not")
    if kinds == ["ByteLevel"] and found[0].get("use_regex", True):
        return "gpt-2"
    if kinds == ["Digits", "ByteLevel"] and found[0]["individual_digits"] and found[1].get("use_regex", True):
        return "starcoder"
    if kinds == ["Split", "ByteLevel"] and not found[1].get("use_regex", True):
        regex = found[0]["pattern"].get("Regex")
        if found[0]["behavior"] == "Isolated" and not found[0]["invert"] and regex in (LLAMA3, QWEN2):
            whole = content["model"].get("ignore_merges")  # "llama-bpe" looks for whole words first
            return "qwen2" if regex == QWEN2 else "llama-bpe" if whole else "dbrx"
    raise CheckpointError(
        f"it splits texts in a way that llama.cpp does not support ({', '.join(kinds) or 'nowhere'})"
    )


def _normalised(content: Json) -> tuple[str, ...]:
    if any(step["type"] == "NFC" for step in steps(content)):
        return ("llama.cpp does not normalise texts: write them in Unicode's form NFC",)
    return ()
