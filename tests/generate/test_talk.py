"""What a person and a program are given: on a terminal, in a pipe, as JSON, line by line."""

from __future__ import annotations

import io
import json
from collections.abc import Callable, Iterator

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
from tests.generate.models import LENGTH, model

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


def test_a_program_gets_the_text_or_json(speaker: Speaker, capsys: pytest.CaptureFixture[str]) -> None:
    console, out = page()
    Talk(speaker, wishes()).once("def f(", console, json=False)
    text = out.getvalue()
    told = capsys.readouterr().err
    assert "seed 3; 20 tokens, " in told and "tokens/s (prompt of 4 tokens: " in told
    console, out = page()
    Talk(speaker, wishes(number=2)).once("def f(", console, json=True)
    answer = json.loads(out.getvalue())
    assert (answer["prompt"], answer["seed"], answer["step"], answer["dtype"]) == ("def f(", 3, 3, "float32")
    assert answer["prompt_tokens"] == speaker.tokenizer.encode("def f(")
    first, second = answer["samples"]
    assert first["text"] == text.removesuffix("\n") != second["text"]
    for sample in (first, second):
        assert len(sample["tokens"]) == len(sample["logprobs"]) == 20 and sample["end"] == "length"


def test_the_same_seed_gives_the_same_text_and_none_a_new_one(speaker: Speaker) -> None:
    def text(seed: int | None) -> str:
        console, out = page()
        Talk(speaker, wishes(seed=seed)).once("", console, json=False)
        return out.getvalue()

    assert text(3) == text(3) != text(4)
    assert text(None) != text(None)


def test_a_terminal_shows_the_prompt_and_no_control_characters() -> None:
    pieces = [
        TextPiece(0, text, 1, 0.0, "eod" if text == "x" else None)
        for text in ("a\tb\n", "\x1b[2J\u202e\r", "x")
    ]
    console, out = page(terminal=True)
    printer = Printer(console, 1)
    printer.print("the \x07prompt ", pieces)
    shown = out.getvalue().replace("\x1b[1m", "").replace("\x1b[0m", "")
    assert shown == "the \\x07prompt a\tb\n\\x1b[2J\\u202e\\rx\n"
    console, out = page()
    Printer(console, 1).print("the prompt ", pieces)
    assert out.getvalue() == "a\tb\n\x1b[2J\u202e\rx\n"
    assert printer.samples[0].text == "a\tb\n\x1b[2J\u202e\rx"


def test_samples_come_one_after_the_other_the_first_one_live() -> None:
    console, out = page()
    seen = []

    def pieces() -> Iterator[TextPiece]:
        for sample, text, end in (
            (0, "a", None), (1, "x", "eod"), (2, "p", None), (0, "b", "eod"), (2, "q", "length"),
        ):  # fmt: skip
            yield TextPiece(sample, text, 1, 0.0, end)  # type: ignore[arg-type]
            seen.append(out.getvalue())

    Printer(console, 3).print("prompt", pieces())
    first, second, third = (f"--- {n} of 3 ---\n" for n in (1, 2, 3))
    assert seen == [first + "a"] * 3 + [
        f"{first}ab\n{second}x\n{third}p",
        f"{first}ab\n{second}x\n{third}pq\n",
    ]


def test_lines_are_continued_and_an_empty_one_goes_on(
    speaker: Speaker, capsys: pytest.CaptureFixture[str]
) -> None:
    def text(most: int) -> str:
        console, out = page()
        Talk(speaker, wishes(sampling=Sampling(0.0), most=most)).once("def f(", console, json=False)
        return out.getvalue()

    console, out = page()
    talk = Talk(speaker, wishes(sampling=Sampling(0.0), most=6))
    talk.loop(console, answers("def f(", "", KeyboardInterrupt, "a\udcff", "def f("))
    more = text(12).removeprefix(text(6).removesuffix("\n"))
    assert more != text(12)
    assert out.getvalue() == text(6) + more + "\n" + text(6) + "\n"
    told = capsys.readouterr().err
    assert "it continues the text that you type" in told and "error: the prompt is not UTF-8" in told


def test_another_line_is_another_draw(speaker: Speaker) -> None:
    console, out = page()
    Talk(speaker, wishes(stops=("\n",))).loop(console, answers("x", "x"))
    first, second, *_ = out.getvalue().split("\n")
    assert first != second


def test_ctrl_c_stops_a_text_but_not_the_loop(speaker: Speaker, capsys: pytest.CaptureFixture[str]) -> None:
    class Impatient(io.StringIO):
        def write(self, text: str) -> int:
            if len(self.getvalue()) > 30 and not self.interrupted:
                self.interrupted = True
                raise KeyboardInterrupt
            return super().write(text)

        interrupted = False

    out = Impatient()
    talk = Talk(speaker, wishes(most=100, past_eod=True))
    talk.loop(Console(file=out, force_terminal=False), answers("def f(", "def g("))
    told = capsys.readouterr().err
    assert out.interrupted and "\n100 tokens" in told  # the second line was continued to its end
    assert told.count(" tokens/s") == 2 and told.count("\n100 tokens") == 1


def test_several_texts_cannot_all_go_on(speaker: Speaker, capsys: pytest.CaptureFixture[str]) -> None:
    Talk(speaker, wishes(number=2, most=2)).loop(page()[0], answers("x", ""))
    assert "type the one to go on with" in capsys.readouterr().err


def test_what_is_longer_than_the_training_is_told(
    speaker: Speaker, capsys: pytest.CaptureFixture[str]
) -> None:
    Talk(speaker, wishes(most=LENGTH - 4)).once("def f(", page()[0], json=False)
    assert "note" not in capsys.readouterr().err
    Talk(speaker, wishes(most=LENGTH - 3)).once("def f(", page()[0], json=False)
    assert f"{LENGTH + 1} tokens, and the model was trained on {LENGTH}" in capsys.readouterr().err


def test_wishes_that_cannot_be(speaker: Speaker) -> None:
    with pytest.raises(DataError, match="--stop: an empty text"):
        Talk(speaker, wishes(stops=("a", "")))
    apart = model(vocabulary=speaker.tokenizer.vocab_size, data=DataConfig(keep_documents_apart=True))
    with pytest.raises(DataError, match="kept its documents apart"):
        Talk(Speaker(apart, speaker.tokenizer, speaker.ends, speaker.start), wishes(past_eod=True))


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("CUDA out of memory"),
        RuntimeError("DefaultCPUAllocator: can't allocate memory"),
    ],
)
def test_memory_that_ends_is_told_with_what_to_do(speaker: Speaker, error: RuntimeError) -> None:
    def full(*_: object) -> None:
        raise error

    handle = speaker.model.gpt[1].mlp.register_forward_hook(full)
    try:
        with pytest.raises(
            DataError, match="memory of cpu does not suffice for 2 times 24 tokens: take a smaller"
        ):
            Talk(speaker, wishes(number=2)).once("def f(", page()[0], json=False)
    finally:
        handle.remove()


def test_past_the_end_of_a_document(speaker: Speaker) -> None:
    """A model that says nothing but the end of a document."""
    only = model(vocabulary=speaker.tokenizer.vocab_size, tied=True)
    with torch.no_grad():
        weight = only.gpt[0].weight
        weight.zero_()[speaker.tokenizer.eod] = 1.0  # every token's x is 0, but for the end's
        weight[speaker.tokenizer.encode("x")] = 1.0
    ending = Speaker(only, speaker.tokenizer, speaker.ends, speaker.start)
    for past, end, count in ((False, "eod", 1), (True, "length", 4)):
        console, out = page()
        Talk(ending, wishes(sampling=Sampling(0.0), most=4, past_eod=past)).once("", console, json=True)
        (sample,) = json.loads(out.getvalue())["samples"]
        assert sample["end"] == end and len(sample["tokens"]) == count
