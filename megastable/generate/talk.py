"""`tools/generate.py`: a prompt and its continuations, or a loop at a terminal in which each line is continued."""

from __future__ import annotations

import contextlib
import secrets
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from rich.console import Console

from megastable.base.errors import DataError
from megastable.generate.continuations import TextPiece, write
from megastable.generate.load import Speaker
from megastable.generate.output import Continuation, Printer, SpeedWatch, as_json, note
from megastable.generate.sampling import Sampling

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

    def ids(self, text: str) -> list[int]:
        """The ids of a prompt; a note where positions will be met that were not trained on."""
        ids = self.speaker.prompt(text, self.wishes.document_start)
        self.check(len(ids))
        return ids

    def check(self, prompt: int) -> None:
        """A note where a prompt of so many tokens, with what is asked for, is longer than the samples of training."""
        trained = self.speaker.model.config.longest
        if prompt + self.wishes.most > trained:
            note(
                f"note: prompt and --max-tokens are {prompt + self.wishes.most:,} tokens, and the model was trained on "
                f"{trained:,}: beyond them its text may fall apart"
            )

    def pieces(self, ids: Sequence[int]) -> Iterator[TextPiece]:
        """The continuations of `ids`; another turn, other choices. Raises as `write`, DataError when memory ends."""
        w, s = self.wishes, self.speaker
        turn, self._turn = self._turn, self._turn + 1
        ends = () if w.past_eod else s.ends
        try:
            yield from write(
                s.model, s.tokenizer, ids, w.sampling,
                number=w.number, most=w.most, seed=(self.seed, turn), ends=ends, stops=w.stops,
            )  # fmt: skip
        except (RuntimeError, MemoryError) as error:
            # torch has a class of its own for this on GPUs only.
            if isinstance(error, RuntimeError) and "memory" not in str(error):
                raise
            raise DataError(
                f"the memory of {s.model.device} does not suffice for {w.number:,} times {len(ids) + w.most:,} tokens: "
                "take a smaller --number or --max-tokens, or --dtype bf16"
            ) from None

    def once(self, text: str, console: Console, json: bool) -> None:
        """Continue one prompt, on the console or as JSON in its file; the seed and the speed are told on stderr."""
        ids, w = self.ids(text), self.wishes
        watch = SpeedWatch(len(ids), w.number)
        pieces = watch.of(self.pieces(ids))
        if not json:
            Printer(console, w.number).print(text, pieces)
            note(f"seed {self.seed}; {watch.told}")
            return
        samples = [Continuation() for _ in range(w.number)]
        for piece in pieces:
            samples[piece.sample].add(piece)
        model = self.speaker.model
        about = {
            "checkpoint": str(model.checkpoint), "step": model.step, "fingerprint": model.fingerprint,
            "dtype": str(next(model.parameters()).dtype).removeprefix("torch."), "device": str(model.device),
            "seed": self.seed, "temperature": w.sampling.temperature, "top_k": w.sampling.top_k,
            "top_p": w.sampling.top_p, "prompt_tokens": ids, "tokens_per_second": round(watch.rate, 2),
        }  # fmt: skip
        console.file.write(as_json(text, samples, about) + "\n")

    def loop(self, console: Console, ask: Callable[[], str]) -> None:
        """Continue each line that `ask` gives until it raises EOFError; an empty one goes on with the last text."""
        note(HELLO.format(checkpoint=self.speaker.model.checkpoint))
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
                    ids = self.ids(line)
                except DataError as error:
                    note(f"error: {error}")
                    continue
            elif self.wishes.number > 1:
                note("there are several texts: type the one to go on with")
                continue
            else:
                self.check(len(ids))
            watch, printer = SpeedWatch(len(ids), self.wishes.number), Printer(console, self.wishes.number)
            with contextlib.suppress(KeyboardInterrupt):
                printer.print(line, watch.of(self.pieces(ids)))
            ids += [token for token in printer.samples[0].tokens if token not in self.speaker.ends]
            note(watch.told)
