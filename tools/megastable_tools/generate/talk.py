"""Prompts and their continuations: once, as JSON, or line by line at a terminal. The command is megastable generate."""

from __future__ import annotations

import contextlib
import json
import secrets
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from rich.console import Console

from megastable.base.errors import DataError
from megastable.base.text import count_noun, make_visible
from megastable_tools.generate.decode import Sampling, TextPiece, write_continuations
from megastable_tools.generate.load import Speaker

KEPT = "\n\t"
BOLD, DIM, PLAIN = "\x1b[1m", "\x1b[2m", "\x1b[0m"


@dataclass
class Continuation:
    """A continuation. logprobs: nats, of each token; end: see `TextPiece`, "" while it goes on."""

    text: str = ""
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    end: str = ""

    def add_piece(self, piece: TextPiece) -> None:
        self.text += piece.text
        self.tokens.append(piece.token)
        self.logprobs.append(piece.logprob)
        self.end = piece.end or ""


class Printer:
    """Prints `number` samples as they are written: the first one live, the others when it is their turn.

    On a terminal the prompt comes first, and characters that do not show are made visible; elsewhere the text comes as
    it is. Several samples have a line between them. `samples`: what was written so far.
    """

    def __init__(self, console: Console, number: int) -> None:
        self.samples = [Continuation() for _ in range(number)]
        self._console = console
        self._ended = True  # the line

    def print_pieces(self, prompt: str, pieces: Iterable[TextPiece]) -> None:
        """All of it; interrupted, the line is ended."""
        sample_index = 0
        try:
            self._begin(sample_index, prompt)
            for piece in pieces:
                self.samples[piece.sample].add_piece(piece)
                if piece.sample == sample_index:
                    self._out(piece.text)
                while sample_index < len(self.samples) and self.samples[sample_index].end:
                    self._end_line()
                    sample_index += 1
                    if sample_index < len(self.samples):
                        self._begin(sample_index, prompt)
                        self._out(self.samples[sample_index].text)
        finally:
            self._end_line()

    def _begin(self, sample: int, prompt: str) -> None:
        if len(self.samples) > 1:
            self._out(f"--- {sample + 1} of {len(self.samples)} ---\n", DIM)
        if self._console.is_terminal:
            self._out(prompt, BOLD)

    def _end_line(self) -> None:
        if not self._ended:
            self._out("\n")

    def _out(self, text: str, style: str = "") -> None:
        if not text:
            return
        if self._console.is_terminal:
            # Not by rich: it would count the columns of a tab from the beginning of the piece.
            visible_text = make_visible(text, keep=KEPT)
            is_styled = style and self._console.color_system is not None
            self._console.file.write(f"{style}{visible_text}{PLAIN}" if is_styled else visible_text)
        else:
            self._console.file.write(text)
        self._console.file.flush()
        self._ended = text.endswith("\n")


class SpeedWatch:
    """How fast pieces come. prompt: its tokens; number: of samples."""

    def __init__(self, prompt: int, number: int) -> None:
        self._prompt, self._number = prompt, number
        self._tokens = 0
        self._begin = self._first = self._last = time.perf_counter()

    def watch_pieces(self, pieces: Iterable[TextPiece]) -> Iterator[TextPiece]:
        self._begin = self._first = self._last = time.perf_counter()
        for piece in pieces:
            self._last = time.perf_counter()
            if not self._tokens:
                self._first = self._last
            self._tokens += 1
            yield piece

    @property
    def rate(self) -> float:
        """Tokens a second of all samples together, after the first of each; 0 when there are no more."""
        seconds = self._last - self._first
        return max(0, self._tokens - self._number) / seconds if seconds > 0 else 0.0

    @property
    def told(self) -> str:
        rate_text = f"{count_noun(self._tokens, 'token')}, {self.rate:,.1f} tokens/s"
        prompt_text = f"prompt of {count_noun(self._prompt, 'token')}: {self._first - self._begin:.2f} s"
        return f"{rate_text} ({prompt_text})"


def print_note(text: str) -> None:
    """A line on stderr for whoever sits there."""
    print(make_visible(text, keep="\n"), file=sys.stderr, flush=True)


def read_prompt(text: str | None, file: Path | None) -> str | None:
    """The prompt; None where a person sits at the terminal and gave none. A last newline of a file or pipe is left out.

    Raises DataError for a file that cannot be read, or is no UTF-8, and for two prompts.
    """
    if text is not None and file is not None:
        raise DataError("give --prompt or --prompt-file, not both")
    if text is not None:
        return text
    if file is None and sys.stdin.isatty():
        return None
    try:
        content = sys.stdin.buffer.read() if file is None else file.read_bytes()
        return content.decode("utf-8").removesuffix("\n").removesuffix("\r")
    except OSError as error:
        raise DataError(f"the prompt {file or ''} cannot be read: {error.strerror}") from None
    except UnicodeDecodeError as error:
        where = file or "the standard input"
        raise DataError(f"{where}: byte {error.start} is no UTF-8: convert it first") from None


def ask_line() -> str:
    """A line of a person, without its end. Raises EOFError, KeyboardInterrupt."""
    if sys.stdout.isatty():
        import readline  # noqa: F401 (arrow keys, and the lines before)

        return input("> ")
    print("> ", end="", file=sys.stderr, flush=True)
    return input()


HELLO = """{checkpoint}: a base model. It does not answer, it continues the text that you type.
Enter alone: go on where it stopped. Ctrl-C: stop it. Ctrl-D: leave."""


@dataclass(frozen=True)
class Wishes:
    """What is asked of every prompt. most: tokens of a sample; stops: texts that end one; past_eod: the end of a
    document does not; document_start: the prompt begins one."""

    sampling: Sampling
    most: int = 200
    number: int = 1
    seed: int | None = None
    stops: tuple[str, ...] = ()
    past_eod: bool = False
    document_start: bool = False


class Talk:
    """A model, and what is asked of it. Raises DataError for wishes that it cannot fulfil."""

    def __init__(self, speaker: Speaker, wishes: Wishes) -> None:
        if wishes.past_eod and speaker.model.run.data.keep_documents_apart:
            raise DataError(
                "--past-eod: this run kept its documents apart (data.keep_documents_apart): nothing goes on behind the "
                "end of one"
            )
        if "" in wishes.stops:
            raise DataError("--stop: an empty text stops at once")
        self.speaker, self.wishes = speaker, wishes
        self.seed = secrets.randbelow(2**32) if wishes.seed is None else wishes.seed
        self._turn = 0

    def encode_text(self, text: str) -> list[int]:
        """The ids of a prompt; a note where positions will be met that were not trained on."""
        ids = self.speaker.encode_prompt(text, self.wishes.document_start)
        self.check_length(len(ids))
        return ids

    def check_length(self, prompt: int) -> None:
        """A note where a prompt of so many tokens, with what is asked for, is longer than the samples of training."""
        trained = self.speaker.model.config.longest
        if prompt + self.wishes.most > trained:
            print_note(
                f"note: prompt and --max-tokens are {prompt + self.wishes.most:,} tokens, and the model was trained on "
                f"{trained:,}: beyond them its text may fall apart"
            )

    def continue_ids(self, ids: Sequence[int]) -> Iterator[TextPiece]:
        """The continuations of `ids`; another turn, other choices. Raises as `write`, DataError when memory
        ends."""
        w, model = self.wishes, self.speaker.model
        turn, self._turn = self._turn, self._turn + 1
        ends = () if w.past_eod else self.speaker.ends
        try:
            yield from write_continuations(
                model, self.speaker.tokenizer, ids, w.sampling,
                number=w.number, most=w.most, seed=(self.seed, turn), ends=ends, stops=w.stops,
            )  # fmt: skip
        except (RuntimeError, MemoryError) as error:
            # torch has a class of its own for this on GPUs only.
            if isinstance(error, RuntimeError) and "memory" not in str(error):
                raise
            raise DataError(
                f"the memory of {model.device} does not suffice for {w.number:,} times {len(ids) + w.most:,} tokens: "
                "take a smaller --number or --max-tokens, or --dtype bf16"
            ) from None

    def continue_once(self, text: str, console: Console, as_json: bool) -> None:
        """Continue one prompt, on the console or as JSON in its file; the seed and the speed are told on stderr."""
        prompt_ids, talk_wishes = self.encode_text(text), self.wishes
        speed_watch = SpeedWatch(len(prompt_ids), talk_wishes.number)
        pieces = speed_watch.watch_pieces(self.continue_ids(prompt_ids))
        if not as_json:
            Printer(console, talk_wishes.number).print_pieces(text, pieces)
            print_note(f"seed {self.seed}; {speed_watch.told}")
            return
        all_samples = [Continuation() for _ in range(talk_wishes.number)]
        for piece in pieces:
            all_samples[piece.sample].add_piece(piece)
        model = self.speaker.model
        about_run = {
            "checkpoint": str(model.checkpoint), "step": model.step, "fingerprint": model.fingerprint,
            "dtype": str(next(model.parameters()).dtype).removeprefix("torch."), "device": str(model.device),
            "seed": self.seed, "temperature": talk_wishes.sampling.temperature, "top_k": talk_wishes.sampling.top_k,
            "top_p": talk_wishes.sampling.top_p, "prompt_tokens": prompt_ids,
            "tokens_per_second": round(speed_watch.rate, 2), "prompt": text,
            "samples": [
                {"text": s.text, "end": s.end, "tokens": s.tokens, "logprobs": [round(x, 6) for x in s.logprobs]}
                for s in all_samples
            ],
        }  # fmt: skip
        console.file.write(json.dumps(about_run) + "\n")

    def continue_lines(self, console: Console, ask: Callable[[], str]) -> None:
        """Continue each line that `ask` gives until it raises EOFError; an empty one goes on with the last
        text."""
        print_note(HELLO.format(checkpoint=self.speaker.model.checkpoint))
        ids: list[int] = []
        while True:
            try:
                line = ask()
            except EOFError:
                console.print()
                return
            except KeyboardInterrupt:  # what was typed is forgotten
                console.print()
                continue
            if line or not ids:
                try:
                    ids = self.encode_text(line)
                except DataError as error:
                    print_note(f"error: {error}")
                    continue
            elif self.wishes.number > 1:
                print_note("there are several texts: type the one to go on with")
                continue
            else:
                self.check_length(len(ids))
            watch, printer = SpeedWatch(len(ids), self.wishes.number), Printer(console, self.wishes.number)
            with contextlib.suppress(KeyboardInterrupt):
                printer.print_pieces(line, watch.watch_pieces(self.continue_ids(ids)))
            ids += [token for token in printer.samples[0].tokens if token not in self.speaker.ends]
            print_note(watch.told)
