"""What a person and a program are given: on a terminal, in a pipe, as JSON, line by line."""

from __future__ import annotations

import io
import json
from collections.abc import Callable

import pytest
import torch
from rich.console import Console

from megastable.base.errors import DataError
from megastable.config.tree import DataConfig
from megastable.data.tokenizer import load_tokenizer
from megastable_tools.generate.decode import Sampling, TextPiece
from megastable_tools.generate.load import Speaker
from megastable_tools.generate.talk import Printer, Talk, Wishes
from tests.data.texts import sentencepiece_file
from tests.generate.models import model

WARM = Sampling(1.0, 0, 1.0)


@pytest.fixture(scope="module")
def speaker(tmp_path_factory: pytest.TempPathFactory) -> Speaker:
    tokenizer = load_tokenizer(sentencepiece_file(tmp_path_factory.mktemp("tokenizer"), 400))
    plain = model(vocabulary=tokenizer.vocab_size)
    return Speaker(plain, tokenizer, frozenset({tokenizer.eod}), (tokenizer.eod,))


def page(terminal: bool = False) -> tuple[Console, io.StringIO]:
    out = io.StringIO()
    return Console(file=out, force_terminal=terminal, no_color=True, width=30), out


def wishes(**fields: object) -> Wishes:
    return Wishes(**{"sampling": WARM, "most": 20, "seed": 3, **fields})  # type: ignore[arg-type]


def answers(*lines: str | type[BaseException]) -> Callable[[], str]:
    """Somebody who types these lines, and leaves."""
    rest = iter(lines)

    def ask() -> str:
        line = next(rest, EOFError)
        if isinstance(line, str):
            return line
        raise line

    return ask


def test_printer_shows_a_terminal_the_prompt_and_no_control_characters() -> None:
    pieces = [TextPiece(0, text, 1, 0.0) for text in ("a\tb\n", "\x1b[2J\u202e\r")]
    pieces.append(TextPiece(0, "x", 1, 0.0, "eod"))
    console, out = page(terminal=True)
    printer = Printer(console, 1)
    printer.print_pieces("the \x07prompt ", pieces)
    shown = out.getvalue().replace("\x1b[1m", "").replace("\x1b[0m", "")
    assert shown == "the \\x07prompt a\tb\n\\x1b[2J\\u202e\\rx\n"
    console, out = page()
    Printer(console, 1).print_pieces("the prompt ", pieces)
    assert out.getvalue() == "a\tb\n\x1b[2J\u202e\rx\n"
    assert printer.samples[0].text == "a\tb\n\x1b[2J\u202e\rx"


def test_talk_continues_lines_and_goes_on_at_an_empty_one(
    speaker: Speaker, capsys: pytest.CaptureFixture[str]
) -> None:
    def text(most: int) -> str:
        console, out = page()
        Talk(speaker, wishes(sampling=Sampling(0.0), most=most)).continue_once(
            "def f(", console, as_json=False
        )
        return out.getvalue()

    console, out = page()
    talk = Talk(speaker, wishes(sampling=Sampling(0.0), most=6))
    talk.continue_lines(console, answers("def f(", "", KeyboardInterrupt, "a\udcff", "def f("))
    more = text(12).removeprefix(text(6).removesuffix("\n"))
    assert more != text(12)
    assert out.getvalue() == text(6) + more + "\n" + text(6) + "\n"
    told = capsys.readouterr().err
    assert "it continues the text that you type" in told and "error: the prompt is not UTF-8" in told


def test_talk_refuses_wishes_that_cannot_be(speaker: Speaker) -> None:
    with pytest.raises(DataError, match="--stop: an empty text"):
        Talk(speaker, wishes(stops=("a", "")))
    apart = model(vocabulary=speaker.tokenizer.vocab_size, data=DataConfig(keep_documents_apart=True))
    with pytest.raises(DataError, match="kept its documents apart"):
        Talk(Speaker(apart, speaker.tokenizer, speaker.ends, speaker.start), wishes(past_eod=True))


def test_talk_says_what_to_do_when_memory_ends(speaker: Speaker) -> None:
    def full(*_: object) -> None:
        raise RuntimeError("DefaultCPUAllocator: can't allocate memory")

    handle = speaker.model.gpt[1].mlp.register_forward_hook(full)
    try:
        with pytest.raises(DataError, match="cpu does not suffice for 2 times 24 tokens: take a smaller"):
            Talk(speaker, wishes(number=2)).continue_once("def f(", page()[0], as_json=False)
    finally:
        handle.remove()


def test_talk_goes_past_the_end_of_a_document(speaker: Speaker) -> None:
    """A model that says nothing but the end of a document."""
    only = model(vocabulary=speaker.tokenizer.vocab_size, tied=True)
    with torch.no_grad():
        weight = only.gpt[0].weight
        weight.zero_()[speaker.tokenizer.eod] = 1.0  # every token's x is 0, but for the end's
        weight[speaker.tokenizer.encode("x")] = 1.0
    ending = Speaker(only, speaker.tokenizer, speaker.ends, speaker.start)
    for past, end, count in ((False, "eod", 1), (True, "length", 4)):
        console, out = page()
        talk = Talk(ending, wishes(sampling=Sampling(0.0), most=4, past_eod=past))
        talk.continue_once("", console, as_json=True)
        (sample,) = json.loads(out.getvalue())["samples"]
        assert sample["end"] == end and len(sample["tokens"]) == count
