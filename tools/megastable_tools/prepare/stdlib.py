"""Build the embedded corpus: the source of the Python standard library, real text available on every machine."""

from __future__ import annotations

import platform
import sysconfig
import tempfile
from pathlib import Path

from megastable.base.errors import DataError
from megastable.data.manifest import FILE, Manifest, Stream
from megastable.data.tokenizer import load_tokenizer
from megastable_tools.prepare.corpus_tokenizer import train_sentencepiece
from megastable_tools.prepare.prepare import check_free, prepare_shards
from megastable_tools.prepare.reporting import Summary
from megastable_tools.prepare.text_files import TextFiles

NAME = "stdlib"
VALIDATION = 0.03  # of about 730 modules of very different lengths
LEFT_OUT = {"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__"}


def stdlib_files() -> list[Path]:
    """The modules of this Python's standard library, sorted, without tests and installed packages."""
    root = Path(sysconfig.get_path("stdlib"))
    module_files = sorted(
        path for path in root.rglob("*.py") if not LEFT_OUT.intersection(path.relative_to(root).parts)
    )
    if not module_files:
        raise DataError(
            f"there is no .py file in {root}: this Python was installed without its source, use another"
        )
    return module_files


def prepare_stdlib(
    output: Path,
    *,
    vocab_size: int = 4096,
    workers: int = 1,
    overwrite: bool = False,
    progress: bool = True,
) -> Summary:
    """Train a tokenizer on the standard library and make the corpus `output` from it.

    A complete `output` is reused. Raises DataError if it has another vocabulary, or is another corpus.
    """
    if (output / FILE).exists() and not overwrite:
        manifest = Manifest.load_manifest(output)
        info = manifest.tokenizer
        if (manifest.name, info.vocab_size) != (NAME, vocab_size):
            raise DataError(
                f"{output} is the corpus {manifest.name!r} with a vocabulary of {info.vocab_size}, "
                f"not {NAME!r} with {vocab_size}: choose another --output, or replace it with --overwrite"
            )
        for split_name in manifest.splits:
            Stream(output, manifest, split_name)  # checks the sizes of all its files
        return Summary.of_corpus(
            "reused", output, manifest, load_tokenizer(output / info.file, info.eod, info.bos)
        )
    check_free(output, overwrite)
    module_files = stdlib_files()
    with tempfile.TemporaryDirectory() as temporary_folder:
        tokenizer = train_sentencepiece(
            TextFiles(module_files, skip_bad=True), Path(temporary_folder, "tokenizer.model"), vocab_size
        )
        return prepare_shards(
            module_files,
            output,
            tokenizer.file,
            name=NAME,
            validation=VALIDATION,
            workers=workers,
            skip_bad=True,
            overwrite=overwrite,
            source=f"standard library of Python {platform.python_version()}",
            progress=progress,
        )
