"""Export a checkpoint as a folder that transformers load: fp32 masters, rounded once, tensor by tensor."""

from __future__ import annotations

import errno
import json
import math
import shutil
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor

import megastable
from megastable.base.durable import staged_directory, write_data_file
from megastable.base.errors import CheckpointError, DataError
from megastable.base.text import make_visible
from megastable.checkpoint import markers, store
from megastable.checkpoint.files import TensorFile, hash_file
from megastable.checkpoint.new_run import refuse_existing
from megastable.checkpoint.plain import find_checkpoint
from megastable.checkpoint.whole import WholeState, run_of
from megastable.config.model import ModelConfig
from megastable.config.recipe import find_recipe
from megastable.config.tree import RunConfig
from megastable.data.manifest import TokenizerInfo
from megastable.data.tokenizer import Tokenizer, load_tokenizer
from megastable.model.sizes import count_parameters as count_parameters
from megastable_tools.convert.huggingface.architectures import (
    DOTS1,
    QWEN2,
    architecture_of,
    are_factors_exact,
    factor_of,
    map_biases,
    map_tensor_names,
    split_tensor,
    without_mup,
)
from megastable_tools.convert.huggingface.folder import (
    CONFIG,
    INDEX,
    Entry,
    bytes_of,
    plan_weight_files,
    write_weight_index,
)
from megastable_tools.convert.huggingface.gguf import (
    KNOWN,
    describe_converter_error,
    find_unsupported,
    is_qwens,
    translate_vocabulary,
)
from megastable_tools.convert.huggingface.parity import ParityReport, find_bias_problem
from megastable_tools.convert.huggingface.settings import settings_of
from megastable_tools.convert.huggingface.tokenizer_export import WITHOUT, Written, write_tokenizer
from megastable_tools.prepare.corpus_tokenizer import GUESSED, corpus_of, named_tokenizer

Dtype = Literal["bf16", "fp32"]
DTYPES: dict[str, torch.dtype] = {"bf16": torch.bfloat16, "fp32": torch.float32}


@dataclass
class Export:
    """Result of an export. tensors, files, bytes: of the weights; health: of the checkpoint, in words; begins: the
    tokenizer puts a token before every text; notes: for the user; checked: None if the caller skipped the check."""

    out: Path
    checkpoint: Path
    step: int
    manifest: str
    dtype: str
    run: RunConfig
    tensors: int
    files: int
    bytes: int
    health: str = ""
    tokenizer: str = ""
    begins: bool = False
    notes: list[str] = field(default_factory=list)
    checked: ParityReport | None = None


def to_hf(
    given: Path,
    out: Path,
    *,
    dtype: Dtype = "bf16",
    shard_size: int = 5 * 10**9,
    tokenizer: Path | None = None,
    without_tokenizer: bool = False,
    inexact_tokenizer: bool = False,
    drop_expert_bias: bool = False,
    check: Callable[[Path, Path], ParityReport] | None = None,
    watch: Callable[[int, int], None] = lambda done, total: None,
) -> Export:
    """Write `out`, which must not exist, from a checkpoint (or a run: its newest good one).

    tokenizer: a file or folder, instead of that of the recipe's first corpus. drop_expert_bias: leave out the bias of
    the choice of experts, if the architecture has none. check(checkpoint, folder) is called
    before `out` appears; if it fails, nothing does. watch: bytes so far, and in all. Memory: two tensors in fp32, and a
    rounded copy.

    Raises CheckpointError, ConfigError for an unsupported option, DataError.
    """
    refuse_existing(out)
    checkpoint = find_checkpoint(given)
    run = run_of(checkpoint)
    whole_state = WholeState(checkpoint)
    scaled = run.model
    whole_state.check_fits(scaled)
    run = run.model_copy(update={"model": without_mup(scaled)})
    bias_problem = find_bias_problem(whole_state.biases, run.model)
    if bias_problem and not drop_expert_bias:
        raise CheckpointError(
            f"{checkpoint}: {bias_problem}. --drop-expert-bias exports it without, and says how many choices of "
            "experts that changes; or train with model.experts.gate=sigmoid and model.experts.shared: "
            f"{DOTS1.name} has a bias"
        )
    found, user_notes = (None, []) if without_tokenizer else _tokenizer(run, tokenizer)
    if bias_problem:
        user_notes.append(f"{bias_problem}: it was left out, as you asked")
    all_parts = [part for parts in map_tensor_names(run.model).values() for part in parts]
    entries = [(all_part.name, DTYPES[dtype], all_part.shape) for all_part in all_parts]
    entries += [(bias.name, torch.float32, bias.shape) for bias in map_biases(run.model).values()]
    planned_files = plan_weight_files(entries, shard_size)
    made = Export(
        out, checkpoint, store.step_of(checkpoint), hash_file(checkpoint / store.MANIFEST).xxh3, dtype, run,
        tensors=len(entries), files=len(planned_files), bytes=sum(map(bytes_of, entries)), notes=user_notes,
    )  # fmt: skip
    proven = markers.read_health(checkpoint)
    made.health = f"proven by the {proven.steps} steps after it" if proven else "not proven by later steps"
    existing_parent = next(parent_path for parent_path in out.absolute().parents if parent_path.exists())
    free_bytes = shutil.disk_usage(existing_parent).free
    if free_bytes < made.bytes:
        raise CheckpointError(
            f"{out}: needs {made.bytes / 1e9:.2f} GB, but {free_bytes / 1e9:.2f} GB are free on that disk: make room"
        )
    with staged_directory(out) as folder:
        try:
            their_tensors = _theirs(whole_state, run.model, scaled, DTYPES[dtype])
            _write_weights(folder, planned_files, their_tensors, lambda done: watch(done, made.bytes))
        except OSError as error:
            is_full = error.errno == errno.ENOSPC
            why = "the disk is full: make room" if is_full else error.strerror or str(error)
            raise CheckpointError(
                f"{out} could not be written ({made.bytes / 1e9:.2f} GB): {why}. Nothing was left there"
            ) from None
        pad_id = None
        if found is not None:
            made.tokenizer, made.begins = found.xxh3, found.bos is not None
            begins = not run.data.keep_documents_apart
            written = write_tokenizer(found, folder, run.model.longest, not inexact_tokenizer, begins)
            pad_id = written.pad
            made.notes += _told(made, found, written)
        else:
            made.notes.append("no tokenizer was written, as you asked")
        if run.model.longest > run.model.sequence_length:
            made.notes.append(
                f"max_position_embeddings is {run.model.longest:,}, as it was imported; this run trained on "
                f"{run.model.sequence_length:,} tokens at a time"
            )
        if scaled.mup is not None:
            is_exact = are_factors_exact(scaled)
            rounded = "exactly" if is_exact else "rounded once: the ratios of sizes are no powers of two"
            made.notes.append(
                f"muP's scales are multiplied into the weights, {rounded}; an import finds none"
            )
        _write_settings(folder, run, dtype, found, pad_id)
        if check is not None:
            made.checked = check(checkpoint, folder)
            if made.checked.failed:
                raise NotTheSame(made.checked)
        write_data_file(folder / "README.md", write_card(made).encode())
    return made


class NotTheSame(CheckpointError):
    """The folder does not compute the same as the checkpoint."""

    code = 1

    def __init__(self, checked: ParityReport) -> None:
        super().__init__(f"{checked.verdict}. Nothing was left there (--no-check keeps it for inspection)")
        self.checked = checked


def _tokenizer(run: RunConfig, given: Path | None) -> tuple[Tokenizer, list[str]]:
    """The tokenizer of the recipe's corpora, or the named one; and notes for the user. Raises CheckpointError."""
    info: TokenizerInfo | None = None
    problem = ""
    try:
        corpus, info = corpus_of(run)
    except DataError as error:
        if given is None:
            raise CheckpointError(
                f"the tokenizer was not found: {error}. Name it with --tokenizer; {WITHOUT}"
            ) from None
    try:
        if given is not None:
            found, problem = named_tokenizer(find_recipe(given), run)
        else:
            assert info is not None
            found = load_tokenizer(corpus / info.file, info.eod, info.bos)
    except DataError as error:
        raise CheckpointError(f"{error}. Name the tokenizer with --tokenizer; {WITHOUT}") from None
    # A named tokenizer may be the other form of the corpus's tokenizer: only the corpus's own file must be unchanged.
    if info is not None and given is None and found.xxh3 != info.xxh3:
        raise CheckpointError(
            f"{found.file} is not the file that the corpus was made with: restore it, or name the tokenizer with "
            f"--tokenizer; {WITHOUT}"
        )
    assert run.model.vocab_size is not None
    if found.vocab_size > run.model.vocab_size or (info is not None and found.vocab_size != info.vocab_size):
        has = info.vocab_size if info else run.model.vocab_size
        raise CheckpointError(
            f"{found.file} has {found.vocab_size} tokens, the run's tokenizer {has}: it is a different one; name the "
            f"right one with --tokenizer; {WITHOUT}"
        )
    if info is not None and problem:
        raise CheckpointError(
            f"{found.file}: {problem}: it is a different tokenizer; name the right one with --tokenizer; {WITHOUT}"
        )
    return found, [f"{problem}: {GUESSED}"] if problem else []


def _told(made: Export, tokenizer: Tokenizer, written: Written) -> list[str]:
    """Notes for the user on the exported tokenizer."""
    user_notes = []
    if written.problem:
        user_notes.append(f"the tokenizer's ids are not always those of training: {written.problem}")
    if written.pad == tokenizer.eod:
        user_notes.append(
            "the tokenizer has no token for padding, so its end-of-document token pads: in fine-tuning mask padding by "
            "the attention mask, not by its id, or the end is never learned"
        )
    assert made.run.model.vocab_size is not None
    model_kind = architecture_of(made.run.model)
    if model_kind is QWEN2 and not is_qwens(written.content):
        user_notes.append(
            "transformers 5 replaces the tokenizer of a Qwen2 by Qwen's own, which gives other ids: load this one with "
            f"PreTrainedTokenizerFast.from_pretrained({made.out.name!r})"
        )
    if tokenizer_problem := find_unsupported(made.run.model):
        return [*user_notes, f"to-gguf does not write this model: {tokenizer_problem}"]
    try:
        llama_vocabulary = translate_vocabulary(written.content, made.run.model.vocab_size)
    except CheckpointError as error:
        return [*user_notes, f"this tokenizer is not for llama.cpp: {error}. {KNOWN}"]
    has_model_file = tokenizer.kind == "sentencepiece"
    if converter_error := describe_converter_error(model_kind, llama_vocabulary, has_model_file):
        user_notes.append(
            f"llama.cpp's own converter {converter_error}: use `megastable convert to-gguf {made.out.name} "
            f"{made.out.name}.gguf` instead"
        )
    return user_notes


def _write_weights(
    folder: Path,
    planned: dict[str, list[Entry]],
    tensors: Iterator[tuple[str, Tensor]],
    watch: Callable[[int], None],
) -> None:
    done_bytes = 0
    with ThreadPoolExecutor(1) as thread_pool:
        # Each tensor is made by the other thread while the previous one is written.
        coming_tensor = thread_pool.submit(next, tensors, None)
        for file_name, tensor_entries in planned.items():
            # Without this metadata transformers 4 does not load a file.
            with TensorFile(folder / file_name, tensor_entries, {"format": "pt"}) as tensor_writer:
                for tensor_entry in tensor_entries:
                    ready_tensor = coming_tensor.result()
                    assert ready_tensor is not None
                    coming_tensor = thread_pool.submit(next, tensors, None)
                    tensor_writer.write_tensor(*ready_tensor)
                    done_bytes += bytes_of(tensor_entry)
                    watch(done_bytes)
    if len(planned) > 1:
        write_data_file(folder / INDEX, write_weight_index(planned).encode())


def _theirs(
    whole: WholeState, config: ModelConfig, scaled: ModelConfig, dtype: torch.dtype
) -> Iterator[tuple[str, Tensor]]:
    """scaled: the checkpoint's model, which may have muP's scales."""
    for our_name, row_parts in map_tensor_names(config).items():
        next_tensor = whole.read_tensor(our_name, "weight")
        if (scale_factor := factor_of(our_name, scaled)) != 1:
            next_tensor = next_tensor * scale_factor
        if not all(map(math.isfinite, next_tensor.aminmax())):  # the fastest check that also detects NaN
            raise CheckpointError(
                f"{whole.checkpoint}: {our_name} holds values that are not finite: export an older checkpoint"
            )
        for their_name, their_tensor in split_tensor(next_tensor, row_parts).items():
            yield their_name, their_tensor.to(dtype)
    biases = whole.biases
    for block, bias in map_biases(config).items():
        yield bias.name, torch.zeros(bias.shape) if biases is None else biases[block]


def _write_settings(
    folder: Path, run: RunConfig, dtype: Dtype, tokenizer: Tokenizer | None, pad: int | None
) -> None:
    begin_id = end_id = None
    if tokenizer is not None:
        begin_id, end_id = tokenizer.bos, tokenizer.eod
        if begin_id is None and not run.data.keep_documents_apart:
            begin_id = end_id  # kept apart, none attended to the end of the previous one
    special_tokens = {"bos": begin_id, "eos": end_id, "pad": pad}
    config_settings = settings_of(run.model, str(DTYPES[dtype]).removeprefix("torch."), special_tokens)
    generation = {f"{token_name}_token_id": id for token_name, id in special_tokens.items() if id is not None}
    write_data_file(folder / CONFIG, (json.dumps(config_settings, indent=2) + "\n").encode())
    write_data_file(folder / "generation_config.json", (json.dumps(generation, indent=2) + "\n").encode())


def write_card(made: Export) -> str:
    """README.md of the folder: its origin, and how it was checked."""
    run, text = made.run, Path(__file__).with_name("card.md").read_text(encoding="utf-8").removesuffix("\n")
    if made.begins:
        begins = ", and began with `bos`: the tokenizer puts it before every text"
    else:
        after = "" if run.data.keep_documents_apart else ", and so each began after one: it is `bos`, too"
        begins = f"{after}. The tokenizer adds nothing before a text"
    return text.format(
        name=make_visible(made.out.name),
        parameters=count_parameters(run.model.model_copy(update={"vocab_multiple": 1})),
        version=megastable.__version__,
        architecture=architecture_of(run.model).name,
        dtype=made.dtype,
        step=made.step,
        manifest=made.manifest,
        tokenizer=f"`{made.tokenizer}`" if made.tokenizer else "none was written",
        length=run.model.sequence_length,
        health=made.health,
        begins=begins,
        apart="yes" if run.data.keep_documents_apart else "no",
        rounded="" if made.dtype == "fp32" else f", rounded once to {made.dtype}",
        checked=_say_checks(made),
        notes="".join(f"\nNote: {make_visible(user_note)}\n" for user_note in made.notes),
    )


def _say_checks(made: Export) -> str:
    found = made.checked
    if found is None:
        return "It was not: the check was skipped at export."
    if found.why:
        return make_visible(found.verdict) + "."
    rows = "\n".join(f"| {row.of} | {row.tokens} | {row.largest:.3g} | {row.kl:.3g} |" for row in found.rows)
    return (
        f"Logits in fp32 of the model that trained (its weights rounded as here) and of transformers "
        f"{found.transformers}, and all {found.tensors} tensors bit for bit: {make_visible(found.verdict)}.\n\n"
        "| compared on | positions | largest difference | KL, nats/token |\n|---|---|---|---|\n"
        f"{rows}"
    )
