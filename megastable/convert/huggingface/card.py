"""README.md of an exported folder: its origin, and how it was checked. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING

import megastable
from megastable.base.text import visible
from megastable.convert.huggingface.architectures import architecture_of
from megastable.model.flops import parameters

if TYPE_CHECKING:
    from megastable.convert.huggingface.export import Export

TEXT = """---
library_name: transformers
pipeline_tag: text-generation
---

# {name}

A language model of {parameters:,} parameters, pretrained with megastable {version}, as {architecture} in {dtype}.

| | |
|---|---|
| checkpoint | step {step} |
| manifest of the checkpoint (xxh3-128) | `{manifest}` |
| its health | {health} |
| tokenizer (xxh3-128) | {tokenizer} |
| sequence length of the training | {length:,} |
| documents kept apart in attention | {apart} |

The weights are the optimizer's fp32 masters{rounded}. Every document of the training ended with the end-of-document
token, `eos`{begins}.

## How it was checked

{checked}
{notes}"""


def card(made: Export) -> str:
    run = made.run
    return TEXT.format(
        name=visible(made.out.name),
        parameters=parameters(run.model.model_copy(update={"vocab_multiple": 1})),
        version=megastable.__version__,
        architecture=architecture_of(run.model).name,
        dtype=made.dtype,
        step=made.step,
        manifest=made.manifest,
        tokenizer=f"`{made.tokenizer}`" if made.tokenizer else "none was written",
        length=run.model.sequence_length,
        health=made.health,
        begins=_begins(made),
        apart="yes" if run.data.keep_documents_apart else "no",
        rounded="" if made.dtype == "fp32" else f", rounded once to {made.dtype}",
        checked=_checked(made),
        notes="".join(f"\nNote: {visible(note)}\n" for note in made.notes),
    )


def _begins(made: Export) -> str:
    if made.begins:
        return ", and began with `bos`: the tokenizer puts it before every text"
    after = "" if made.run.data.keep_documents_apart else ", and so each began after one: it is `bos`, too"
    return f"{after}. The tokenizer adds nothing before a text"


def _checked(made: Export) -> str:
    found = made.checked
    if found is None:
        return "It was not: the check was skipped at export."
    if found.why:
        return visible(found.verdict) + "."
    rows = "\n".join(f"| {row.of} | {row.tokens} | {row.largest:.3g} | {row.kl:.3g} |" for row in found.rows)
    return (
        f"Logits in fp32 of the model that trained (its weights rounded as here) and of transformers "
        f"{found.transformers}, and all {found.tensors} tensors bit for bit: {visible(found.verdict)}.\n\n"
        "| compared on | positions | largest difference | KL, nats/token |\n|---|---|---|---|\n"
        f"{rows}"
    )
