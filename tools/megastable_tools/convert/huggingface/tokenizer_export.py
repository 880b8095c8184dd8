"""Export a run's tokenizer for transformers' AutoTokenizer, with the same ids for every text.

A SentencePiece model is written as a tokenizer.json of the tokenizers library. If the model keeps every space and
spells unknown characters in bytes, as ours do, the pieces hold spaces themselves instead of their symbol "▁": so a
literal "▁" is not taken for a space, as in training. The ids are verified on real and random text each time; a
difference is an error.

Special tokens in a text are special in transformers: fine-tuning programs write "</s>" for the end of a text, and chat
templates theirs. Text from data must not forge them, which is why `megastable prepare` and `megastable generate` take
them as characters (megastable.data.tokenizer); in transformers, pass `split_special_tokens=True`.
"""

from __future__ import annotations

import argparse
import base64
import inspect
import json
import random
import string
import textwrap
from dataclasses import dataclass
from functools import lru_cache
from itertools import zip_longest
from pathlib import Path
from typing import Any

from sentencepiece import sentencepiece_model_pb2
from tokenizers import Tokenizer as HuggingFaceModel

from megastable.base.durable import write_data_file
from megastable.base.errors import CheckpointError
from megastable.data.tokenizer import BYTE, CONTROL, NORMAL, SPACE, UNKNOWN, UNUSED, USER_DEFINED, Tokenizer

FILE, CONFIG = "tokenizer.json", "tokenizer_config.json"
Json = dict[str, Any]

UNIGRAM, BPE = 1, 2  # types of models (sentencepiece_model.proto, TrainerSpec.ModelType)
RANDOM_TEXTS = 300
CUT_AT_SPACES: Json = {
    "type": "Split", "pattern": {"Regex": " +[^ ]*|[^ ]+"}, "behavior": "Isolated", "invert": False
}  # fmt: skip
# Tokens that pad a batch, in this order: never the end token, whose label would be masked with the padding. Qwen's
# files pad with <|endoftext|>, fine-tunes of Llama with <unk>.
PADS = (
    "<pad>", "[PAD]", "<|pad|>", "<|padding|>", "<|finetune_right_pad_id|>", "<|endoftext|>", "<unk>", "[UNK]",
)  # fmt: skip
WITHOUT = "to continue without a tokenizer: --no-tokenizer"
MANY_LANGUAGES = (
    "Zażółć gęślą jaźń", "Съешь же ещё этих мягких булок", "敏捷的棕色狐狸跳过了懒狗", "いろはにほへと ちりぬるを",
    "다람쥐 헌 쳇바퀴에 타고파", "نص حكيم له سر قاطع", "ऋषियों को सताने वाले", "👩\u200d👩\u200d👧 🏳\ufe0f e\u0301 ﬁ Å",
    "\u202eabc\u2066\ufeff\x00\x1b[0m", f"a{SPACE}b {SPACE}{SPACE}  c", "   a  b\t\tc \n\n d   \r\n",
    "x = 0.000000000001234567890", "-" * 99, " " * 99, "",
)  # fmt: skip


@dataclass(frozen=True)
class Written:
    """content: of tokenizer.json, complete; problem: how its ids differ on the sample texts, "" if they do not; pad:
    the id that pads a batch."""

    content: Json
    problem: str
    pad: int


def write_tokenizer(
    tokenizer: Tokenizer, folder: Path, longest: int, exact: bool = True, begins: bool = True
) -> Written:
    """Write tokenizer.json, tokenizer_config.json, and a SentencePiece model's own file, as other programs expect them.

    longest: tokens of a sequence; begins: the end of a document also begins one. A tokenizer's `bos` is put before
    every text. Raises CheckpointError if ids differ and `exact` is required, DataError.
    """
    fast_content = make_fast_tokenizer(tokenizer)
    if tokenizer.bos is not None:
        fast_content["post_processor"] = _begun(fast_content, tokenizer.bos)
    tokenizer_text = json.dumps(fast_content, ensure_ascii=False, separators=(",", ":")).encode()
    try:
        model = HuggingFaceModel.from_str(tokenizer_text.decode())
    except Exception as error:  # the library raises plain Exception
        raise CheckpointError(f"{tokenizer.file} cannot be written as a {FILE}: {error}; {WITHOUT}") from None
    model.encode_special_tokens = True
    problem = _compared(tokenizer, model)
    if problem and exact:
        raise CheckpointError(
            f"{tokenizer.file} cannot be written as a {FILE} that gives the same ids: {problem}. To accept that: "
            f"--inexact-tokenizer; {WITHOUT}"
        )
    write_data_file(folder / FILE, tokenizer_text)
    if tokenizer.kind == "sentencepiece":
        write_data_file(folder / "tokenizer.model", tokenizer.content)
    tokenizer_content: Json = json.loads(model.to_str())  # older files omit defaults
    special = {token.content: id for id, token in model.get_added_tokens_decoder().items() if token.special}
    pad_ids = (special[name] for name in PADS if special.get(name, tokenizer.eod) != tokenizer.eod)
    pad_id = next(pad_ids, tokenizer.eod)
    space = puts_space_before(tokenizer_content)
    tokenizer_config = _config(tokenizer, pad_id, model, longest, begins, space)
    write_data_file(folder / CONFIG, (json.dumps(tokenizer_config, indent=2) + "\n").encode())
    return Written(tokenizer_content, problem, pad_id)


def puts_space_before(content: Json) -> bool:
    """Whether a tokenizer.json puts a space before every text, as Llama 2's does."""
    return any(
        text_rule.get("add_prefix_space") is True
        or text_rule.get("type") == "Prepend"
        or (text_rule.get("type") == "Metaspace" and text_rule.get("prepend_scheme", "always") != "never")
        for text_rule in list_text_rules(content)
    )


def list_text_rules(content: Json) -> list[Json]:
    """The normalizers and pre-tokenizers of a tokenizer.json, in order, with sequences flattened."""
    text_rules, open_rules = list[Json](), [content.get("pre_tokenizer"), content.get("normalizer")]
    while open_rules:
        text_rule = open_rules.pop()
        if text_rule is not None and text_rule.get("type") == "Sequence":
            open_rules += reversed(text_rule.get("normalizers", text_rule.get("pretokenizers", [])))
        elif text_rule is not None:
            text_rules.append(text_rule)
    return text_rules


def _compared(tokenizer: Tokenizer, model: HuggingFaceModel) -> str:
    sample_texts, problems = make_sample_texts(tokenizer), list[str]()
    begin_ids = [] if tokenizer.bos is None else [tokenizer.bos]
    for sample_text in sample_texts:
        ours, theirs = [*begin_ids, *tokenizer.encode(sample_text)], model.encode(sample_text).ids
        if ours != theirs:
            pairs = enumerate(zip_longest(ours, theirs, fillvalue="none"))
            at, (our_id, their_id) = next((i, pair) for i, pair in pairs if pair[0] != pair[1])
            problems.append(
                f"of the text {sample_text[:60]!r} the token {at} is {our_id} and would be {their_id}"
            )
    return f"{problems[0]} ({len(problems)} of {len(sample_texts)} texts differ)" if problems else ""


def make_fast_tokenizer(tokenizer: Tokenizer) -> Json:
    """The content of a tokenizer.json with the same ids and no additions. Raises CheckpointError."""
    if tokenizer.kind == "sentencepiece":
        return _of_sentencepiece(tokenizer)
    content: Json = json.loads(tokenizer.closed)
    content["truncation"] = content["padding"] = None
    # Many put a token before every text; training had none.
    content["post_processor"] = _without_additions(content.get("post_processor"))
    return content


def _without_additions(processor: Json | None) -> Json | None:
    if processor is None or processor.get("type") == "ByteLevel":  # it only moves offsets
        return processor
    kept_processors = [p for p in map(_without_additions, processor.get("processors", [])) if p is not None]
    return {"type": "Sequence", "processors": kept_processors} if kept_processors else None


def _begun(content: Json, bos: int) -> Json:
    """A post-processor that puts the token `bos` before every text, as before every document in training."""
    begin_name = HuggingFaceModel.from_str(json.dumps(content)).id_to_token(bos)
    token = {"SpecialToken": {"id": begin_name, "type_id": 0}}
    one, second_sequence = ({"Sequence": {"id": sequence_name, "type_id": 0}} for sequence_name in "AB")
    begin_template: Json = {
        "type": "TemplateProcessing", "single": [token, one], "pair": [token, one, token, second_sequence],
        "special_tokens": {begin_name: {"id": begin_name, "ids": [bos], "tokens": [begin_name]}},
    }  # fmt: skip
    before = content.get("post_processor")
    if before is None:
        return begin_template
    other_processors = before["processors"] if before["type"] == "Sequence" else [before]
    return {"type": "Sequence", "processors": [*other_processors, begin_template]}


def _of_sentencepiece(tokenizer: Tokenizer) -> Json:
    model_proto: Any = sentencepiece_model_pb2.ModelProto()  # type: ignore[attr-defined]
    model_proto.ParseFromString(tokenizer.closed)
    model_kind, rules = model_proto.trainer_spec.model_type, model_proto.normalizer_spec
    if model_kind not in (UNIGRAM, BPE) or model_proto.trainer_spec.treat_whitespace_as_suffix:
        raise CheckpointError(
            f"{tokenizer.file}: only models of type BPE and unigram can be written as a {FILE}"
        )
    spells_bytes = sum(piece.type == BYTE for piece in model_proto.pieces) == 256
    is_literal = spells_bytes and not (
        rules.add_dummy_prefix or rules.remove_extra_whitespaces or rules.precompiled_charsmap
    )
    token_pieces = [
        p.piece.replace(SPACE, " ") if is_literal and p.type in (NORMAL, USER_DEFINED, UNUSED) else p.piece
        for p in model_proto.pieces
    ]
    piece_kinds, piece_scores = [p.type for p in model_proto.pieces], [p.score for p in model_proto.pieces]
    unknown_id = piece_kinds.index(UNKNOWN)
    added_tokens = [
        {"id": i, "content": piece, "single_word": False, "lstrip": False, "rstrip": False, "normalized": False,
         "special": piece_kinds[i] != USER_DEFINED}
        for i, piece in enumerate(token_pieces) if piece_kinds[i] in (UNKNOWN, CONTROL, USER_DEFINED)
    ]  # fmt: skip
    # Splitting texts before runs of spaces changes no id then: the library is slow on whole texts.
    can_cut = not any(" " in token_piece.lstrip(" ") for token_piece in token_pieces)
    decoder_steps: list[Json] = [{"type": "ByteFallback"}, {"type": "Fuse"}]
    if not is_literal:
        decoder_steps.insert(0, {"type": "Replace", "pattern": {"String": SPACE}, "content": " "})
        if rules.add_dummy_prefix:
            decoder_steps.append({"type": "Strip", "content": " ", "start": 1, "stop": 0})
    return {
        "version": "1.0", "truncation": None, "padding": None, "added_tokens": added_tokens,
        "normalizer": None if is_literal else _normalizer(rules),
        "pre_tokenizer": CUT_AT_SPACES if is_literal and model_kind == BPE and can_cut else None,
        "post_processor": None, "decoder": {"type": "Sequence", "decoders": decoder_steps},
        "model": _bpe(token_pieces, piece_kinds, piece_scores, unknown_id, spells_bytes) if model_kind == BPE
        else _unigram(token_pieces, piece_kinds, piece_scores, unknown_id, spells_bytes),
    }  # fmt: skip


def _bpe(pieces: list[str], kinds: list[int], scores: list[float], unknown: int, spells: bool) -> Json:
    """Merges in the order of their scores: SentencePiece always makes the best piece that two neighbours form, from the
    left, whichever two they are."""
    normal_pieces = {piece: i for i, piece in enumerate(pieces) if kinds[i] == NORMAL}
    merges = []
    for piece, i in normal_pieces.items():
        for cut_index in range(1, len(piece)):
            if piece[:cut_index] in normal_pieces and piece[cut_index:] in normal_pieces:
                merges.append((-scores[i], i, cut_index, [piece[:cut_index], piece[cut_index:]]))
    return {
        "type": "BPE", "dropout": None, "unk_token": pieces[unknown], "continuing_subword_prefix": None,
        "end_of_word_suffix": None, "fuse_unk": True, "byte_fallback": spells, "ignore_merges": False,
        "vocab": {piece: i for i, piece in enumerate(pieces)}, "merges": [pair for *_, pair in sorted(merges)],
    }  # fmt: skip


def _unigram(pieces: list[str], kinds: list[int], scores: list[float], unknown: int, spells: bool) -> Json:
    # Bytes are for characters without a piece: a text that spells out "<0x0A>" must not get the byte.
    lowest_score = min(scores) - 1000.0
    scored_pieces = [
        [token_piece, lowest_score if kinds[i] in (BYTE, CONTROL, UNKNOWN, UNUSED) else scores[i]]
        for i, token_piece in enumerate(pieces)
    ]
    return {"type": "Unigram", "unk_id": unknown, "vocab": scored_pieces, "byte_fallback": spells}


def _normalizer(rules: Any) -> Json:
    normalizer_steps: list[Json] = []
    if rules.precompiled_charsmap:
        encoded_charsmap = base64.b64encode(rules.precompiled_charsmap).decode()
        normalizer_steps.append({"type": "Precompiled", "precompiled_charsmap": encoded_charsmap})
    if rules.remove_extra_whitespaces:
        normalizer_steps.append({"type": "Strip", "strip_left": True, "strip_right": True})
        normalizer_steps.append({"type": "Replace", "pattern": {"Regex": " {2,}"}, "content": " "})
    if rules.add_dummy_prefix:
        normalizer_steps.append({"type": "Prepend", "prepend": SPACE})
    normalizer_steps.append({"type": "Replace", "pattern": {"String": " "}, "content": SPACE})
    return {"type": "Sequence", "normalizers": normalizer_steps}


def _config(
    tokenizer: Tokenizer, pad: int, model: HuggingFaceModel, longest: int, begins: bool, space: bool
) -> Json:
    # In training a document followed the end of another, unless they were kept apart.
    end_id, begin_id = tokenizer.eod, tokenizer.bos
    begin_id = end_id if begin_id is None and begins else begin_id
    unknown_token = next((t for t in ("<unk>", "[UNK]") if model.token_to_id(t) is not None), None)
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        # Transformers 4 would add token_type_ids, which our models do not take.
        "model_input_names": ["input_ids", "attention_mask"],
        "model_max_length": longest,
        **({"bos_token": model.id_to_token(begin_id)} if begin_id is not None else {}),
        "eos_token": model.id_to_token(end_id),
        "pad_token": model.id_to_token(pad),
        **({"unk_token": unknown_token} if unknown_token else {}),
        "add_bos_token": tokenizer.bos is not None,
        "add_eos_token": False,
        # Otherwise transformers 4 and llama.cpp's converter would choose for themselves.
        "add_prefix_space": space,
        "clean_up_tokenization_spaces": False,
    }


@lru_cache(maxsize=1)
def real_text() -> str:
    """Some real text that every machine has: from Python's own library."""
    return inspect.getsource(argparse) + inspect.getsource(string) + inspect.getsource(textwrap)


def make_sample_texts(tokenizer: Tokenizer, seed: int = 0) -> list[str]:
    """Real and random texts to compare two tokenizers on."""
    drawn = random.Random(seed)
    ids = range(tokenizer.vocab_size)
    found = [*MANY_LANGUAGES, *(SPACE.join(MANY_LANGUAGES),), real_text()]
    found += [f"a{name} {name}b" for name in ("<s>", "</s>", "<unk>", "<|endoftext|>", "<0x0A>", "<pad>")]
    for number in range(RANDOM_TEXTS):
        length = drawn.randrange(1, 60)
        if number % 3 == 0:
            found.append(tokenizer.decode(drawn.choices(ids, k=length)))
        elif number % 3 == 1:
            found.append("".join(drawn.choices(" =-_a\n0#*\t" + SPACE, k=length)))
        else:
            highest = drawn.choice((0x80, 0x800, 0xD800))
            found.append("".join(chr(drawn.randrange(highest)) for _ in range(length)))
    return found


def find_tokenizer_difference(one: Tokenizer, other: Tokenizer) -> str:
    """How two tokenizers differ on some texts; "" if they do not."""
    for sample in make_sample_texts(one):
        if one.encode(sample) != other.encode(sample):
            return f"for the text {sample[:60]!r} they give {one.encode(sample)[:8]} and {other.encode(sample)[:8]} ..."
    return ""
