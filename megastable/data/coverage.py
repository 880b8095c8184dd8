"""What a run reads of its corpora, for people: epochs, shares that differ from their weights, missing validation."""

from __future__ import annotations

from collections.abc import Sequence

from megastable.base.text import visible
from megastable.config.recipe import find
from megastable.data.blends import GoneStream
from megastable.data.corpora import Corpora
from megastable.data.held_out import SPLIT
from megastable.data.manifest import Stream
from megastable.data.source import Source

# Muennighoff et al., arXiv:2305.16264: up to 4 epochs are about as good as new text; a repetition is worth 1/e of new
# text after about 15.
WORTH_LITTLE = 16
ROUNDED = 0.02  # of a share: more is said


def describe_epochs(source: Source, samples: int) -> str:
    """How often a run of `samples` positions reads every corpus."""
    order = source.order
    read = zip(order.corpora, source.streams, order.samples_before(samples), order.sequences, strict=True)
    return "epochs of this run: " + ", ".join(
        f"{corpus.name}{_elsewhere(corpus.name, stream)} {_count(done / size)}"
        for corpus, stream, done, size in read
        if done
    )


def _elsewhere(name: str, stream: Stream) -> str:
    """The folder of a corpus, if that has another name: a copy, planted or pruned, is called as the original is."""
    if isinstance(stream, GoneStream) or find(stream.directory).resolve().name == name:
        return ""
    return f" ({visible(stream.directory)})"


def find_warnings(corpora: Corpora, samples: int, evaluated: bool) -> list[str]:
    """What is probably not meant.

    Args:
        corpora: of the run.
        samples: positions that the run reads.
        evaluated: the recipe asks for validation.
    """
    order = corpora.train.order
    found = [
        f"the run reads the corpus {corpus.name} {_count(done / size)} times; after about {WORTH_LITTLE} "
        "little is left to learn (arXiv:2305.16264): more text, a lower weight, or fewer train.steps"
        for corpus, done, size in zip(
            order.corpora, order.samples_before(samples), order.sequences, strict=True
        )
        if done > WORTH_LITTLE * size
    ]
    total = sum(share.weight for share in corpora.shares)
    quotas = dict(zip((corpus.name for corpus in order.corpora), order.quotas, strict=True))
    for share in corpora.shares:
        quota, wanted = quotas[share.name], share.weight / total * order.block
        if quota and abs(quota / wanted - 1) > ROUNDED:
            found.append(
                f"the corpus {share.name} gets {quota} of {order.block} samples of the blend, its weight would be "
                f"{wanted:.3g} of them ({100 * (quota / wanted - 1):+.0f} %): shares are whole numbers of "
                f"{order.block}; merge small corpora into one, or choose a weight that is"
            )
    if evaluated:
        found += _missing_validation(corpora)
    return found


def _missing_validation(corpora: Corpora) -> Sequence[str]:
    held_out, length = corpora.held_out, corpora.train.order.sequence_length
    if not held_out.without:
        return ()
    tokens = {manifest.name: manifest.tokens(SPLIT) for manifest in corpora.manifests}
    splits = ", ".join(
        f"{name} has {tokens[name]:,} tokens" if tokens[name] else f"{name} has none"
        for name in held_out.without
    )
    what = "no validation loss at all" if held_out.blend is None else "corpora without a validation loss"
    return [
        f"{what}: the validation split of {splits}, a sample needs {length + 1:,} "
        "(megastable prepare shards --validation or --validation-input; train.eval_samples=0 if none is wanted)"
    ]


def _count(epochs: float) -> str:
    return f"{epochs:,.0f}" if epochs >= 100 else f"{epochs:.3g}"
