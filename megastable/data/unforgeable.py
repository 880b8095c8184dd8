"""Change a tokenizer's file so that no text gets certain ids: the tokens that end and begin documents.

Libraries find user-defined symbols (SentencePiece) and added tokens that are not special (tokenizer.json) in a text,
and a model may have the token among its ordinary pieces. Then a text that spells out "</s>" would end its document.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection
from typing import Any

from sentencepiece import sentencepiece_model_pb2

Json = dict[str, Any]

# Kinds of pieces (sentencepiece_model.proto, ModelProto.SentencePiece.Type).
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)


def close_sentencepiece(content: bytes, ids: Collection[int]) -> bytes:
    """A SentencePiece model in which the pieces `ids` are control symbols, which no text contains.

    Bytes and the unknown piece stay what they are: a model is invalid without them.
    """
    proto: Any = sentencepiece_model_pb2.ModelProto()  # type: ignore[attr-defined]
    proto.ParseFromString(content)
    open_pieces = [proto.pieces[id] for id in ids if proto.pieces[id].type in (NORMAL, USER_DEFINED, UNUSED)]
    if not open_pieces:
        return content
    for piece in open_pieces:
        piece.type = CONTROL
    closed: bytes = proto.SerializeToString()
    return closed


def close_huggingface(content: bytes, ids: Collection[int]) -> bytes:
    """A tokenizer.json that gives `ids` to no text if special tokens are encoded as text: its added tokens are special,
    and a text is cut behind the first character wherever the model could take it for one of them.

    A token of a single character cannot be cut, and stays.
    """
    given: Json = json.loads(content)
    added = [t for t in given.get("added_tokens") or () if t["id"] in ids and not t["special"]]
    for token in added:
        token["special"] = True
    cuts = [cut_behind_first(piece) for piece in _found_by_model(given["model"], ids) if len(piece) > 1]
    if cuts:
        before = given.get("pre_tokenizer")
        given["pre_tokenizer"] = {"type": "Sequence", "pretokenizers": [*([before] if before else []), *cuts]}
    return json.dumps(given, ensure_ascii=False).encode() if added or cuts else content


def cut_behind_first(piece: str) -> Json:
    """The step of a pre-tokenizer that cuts a text behind the first character of every `piece` in it."""
    regex = f"{re.escape(piece[0])}(?={re.escape(piece[1:])})"
    return {"type": "Split", "pattern": {"Regex": regex}, "behavior": "Isolated", "invert": False}


def _found_by_model(model: Json, ids: Collection[int]) -> list[str]:
    """The spellings of those of `ids` that the model may give to a text."""
    vocabulary = model["vocab"]
    if isinstance(vocabulary, dict):
        spelled = [piece for piece, id in vocabulary.items() if id in ids]
    else:  # Unigram: pieces and scores
        spelled = [vocabulary[id][0] for id in sorted(ids) if id < len(vocabulary)]
    if model.get("merges") is None or model.get("ignore_merges"):
        return spelled
    # BPE makes only what it merges; older files have "a b" for ["a", "b"].
    merged = {"".join(pair.split(" ") if isinstance(pair, str) else pair) for pair in model["merges"]}
    return [piece for piece in spelled if piece in merged]
