"""Decides what of a text or a tree may be published.

Closed by default: a word is published if megastable uses it in its own source, if it is a number, or if it is the
pseudonym of a name that was collected before. So a password, an address or a path is left out wherever it stands,
whatever it looks like, and what megastable says of a run stays readable.
"""

from __future__ import annotations

import builtins
import re
import signal
from collections import ChainMap
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache
from itertools import count
from typing import Any

from megastable.base.process import package_folders
from megastable.config.tree import RunConfig

# What stands between blanks, brackets, quotes and the like: a path, an address or a name with dots is one token.
TOKEN = re.compile(r"[^\s,;()\[\]{}<>\"'`|=!?*^\\…]+")
AROUND = ".:-–—"  # punctuation at the ends of a token that does not belong to it
WITHHELD = "[withheld]"
NUMBER = r"[-+±~]?\d{1,11}(?:\.\d{1,17})?(?:e[-+]?\d{1,3})?[%x]?"
# Numbers, ranges and shares of them, times, dates; names that megastable gives to what it counts.
PLAIN = re.compile(
    r"\d{4}-\d\d-\d\d(?:T\d\d:\d\d:\d\d(?:\.\d{1,9})?(?:Z|[-+]\d\d:\d\d)?)?"
    rf"|{NUMBER}(?:[-/:]\d{{1,11}}){{0,2}}|\d\d:\d\d(?::\d\d(?:\.\d+)?)?|[#$%&+./:@~_–—×·±≥≤→-]{{1,3}}"
    r"|(?:step|rank|attempt|incident|stage)-?\d{1,9}|(?:step|attempt)-\d{1,18}"
)
# What follows such a word is a password, even if it is a word that megastable uses.
SECRET = r"(?:token|secret|passw(?:or)?d|passphrase|credentials?|api[-_]?key|access[-_]?key|authorization)"
PASSWORD = re.compile(rf"(?i)(?:{SECRET}\W*[:=]\W*|-{SECRET}\W+|bearer\W+)$")
# Never published, even if megastable's own source has it.
ADDRESS = re.compile(r"://|@|^[/~]|\.{2}/")
# Versions, and names of devices (base/hardware.py).
SOFTWARE = re.compile(
    r"\d{1,4}(?:\.\d{1,4}){0,3}(?:[a-z]{1,4}\d{0,4})?(?:\+(?:cpu|cu\d{2,3}|rocm[\d.]{1,8}))?"
    r"|[A-Z]{1,4}\d{1,4}[A-Z]{0,2}|\d{1,4}GB|HBM\d[a-z]?|SXM\d?|PCIe|NVL|NVIDIA|AMD|Instinct|GeForce|RTX|Tesla|cpu"
    r"|Linux|Darwin|x86_64|aarch64|arm64"
)
HASH = re.compile(r"[0-9a-f]{16,128}")


@dataclass(frozen=True)
class Keeping:
    """What is published although it is private by default. hosts: their names. names: of corpora, shards and tasks.
    texts: of samples that an incident found bad, skipped or deferred."""

    hosts: bool = False
    names: bool = False
    texts: bool = False


@dataclass
class PublicNames:
    """Names and what is published in their place, by kind: "host", "corpus", "shard", "task", "layer"."""

    keep: Keeping = field(default_factory=Keeping)
    of_kind: dict[str, dict[str, str]] = field(default_factory=dict)
    alike: dict[str, str] = field(default_factory=dict)  # other spellings: a host without its domain

    def name_publicly(self, kind: str, name: str) -> str:
        """The public name of a private one; the next pseudonym for a new one."""
        known_names = self.of_kind.setdefault(kind, {})
        if name not in known_names:
            if name in self.alike:
                return self.alike[name]
            is_data_name = kind in ("corpus", "shard", "task")
            is_kept = self.keep.hosts if kind == "host" else self.keep.names and is_data_name
            known_names[name] = name if is_kept else f"{kind}-{len(set(known_names.values())) + 1}"
            short_name = name.partition(".")[0]
            if kind == "host" and short_name != name and not short_name.isdecimal():
                self.alike[short_name] = short_name if is_kept else known_names[name]
        return known_names[name]

    def add_alias(self, kind: str, other: str, name: str) -> None:
        """Another spelling of a name."""
        self.of_kind.setdefault(kind, {})[other] = self.name_publicly(kind, name)

    def find_public(self, word: str, kind: str = "") -> str | None:
        """The public name of a word, if it is a name that was collected, of a kind or of any."""
        names_by_kind = [self.of_kind[kind]] if kind in self.of_kind else self.of_kind.values()
        return ChainMap(*names_by_kind, self.alike).get(word)

    def longest_first(self, kind: str = "") -> list[str]:
        """All private names, of a kind or of any."""
        names_by_kind = [of for name, of in self.of_kind.items() if kind in ("", name)]
        alike_names = self.alike if kind in ("", "host") else {}
        return sorted({*alike_names, *(name for of in names_by_kind for name in of)}, key=len)[::-1]


class Redactor:
    """Redacts with the names that were collected. count: of words withheld so far."""

    def __init__(self, names: PublicNames) -> None:
        self.names, self.count = names, 0
        found = _either(name for name in names.longest_first() if not is_common(name))
        forms = [rf"(?P<own>{found})"] if found else []
        for name_kind, words_before in BEFORE.items():
            if found := _either(name for name in names.longest_first(name_kind) if is_common(name)):
                forms.append(rf"(?P<before_{name_kind}>(?:{words_before})\s+[\"'`]?)(?P<{name_kind}>{found})")
        self._names = re.compile(rf"(?<![\w.-])(?:{'|'.join(forms)})(?![\w-]|\.\w)") if forms else None

    def redact_text(self, text: str) -> str:
        """A text with every word that is not public replaced; several in a row by one remark."""
        public_parts, text_offset = list[str](), 0
        # A collected name may have blanks in it, so it is looked for before there are words.
        for name_match in self._names.finditer(text) if self._names else ():
            name_kind = str(name_match.lastgroup)
            words_before = name_match.group(f"before_{name_kind}") if name_kind in BEFORE else ""
            public_name = self.names.find_public(name_match[name_kind], name_kind) or WITHHELD
            public_parts += [self._words(text[text_offset : name_match.start()]), words_before, public_name]
            text_offset = name_match.end()
        public_text = "".join([*public_parts, self._words(text[text_offset:])])
        return re.sub(rf"{re.escape(WITHHELD)}(?:[\s\W]*{re.escape(WITHHELD)})+", WITHHELD, public_text)

    def _words(self, text: str) -> str:
        return TOKEN.sub(lambda found: self._word(found[0], text[: found.start()][-40:]), text)

    def _word(self, token: str, before: str) -> str:
        bare_word = token.strip(AROUND)
        if not bare_word:
            return token
        is_public = PLAIN.fullmatch(bare_word) or (is_known(bare_word) and not ADDRESS.search(bare_word))
        if is_public and not PASSWORD.search(before):
            return token
        self.count += 1
        left_part, _, right_part = token.partition(bare_word)
        return f"{left_part}{WITHHELD}{right_part}"

    def redact_tree(self, value: Any) -> Any:
        """A JSON value with all its texts redacted, keys too; hashes of data stay."""
        if isinstance(value, str):
            return self.redact_text(value)
        if isinstance(value, Mapping):
            return number_keys(
                (self.redact_text(str(key)), self._below(str(key), below)) for key, below in value.items()
            )
        if isinstance(value, list | tuple):
            return [self.redact_tree(below) for below in value]
        if value is None or isinstance(value, bool | int | float):
            return value
        return self.redact_text(str(value))  # YAML has more kinds of values than JSON

    def redact_layer(self, name: str) -> str:
        """The name of a layer, if it is made of megastable's own words."""
        all_known = all(name_part.isdecimal() or is_known(name_part) for name_part in re.split(r"[._]", name))
        return name if all_known else self.names.name_publicly("layer", name)

    def redact_keys(self, kind: str, value: Any) -> dict[str, Any]:
        """Values by names of a kind."""
        name_items = value.items() if isinstance(value, Mapping) else ()
        return number_keys(
            (self.names.name_publicly(kind, str(name)), self.redact_tree(of)) for name, of in name_items
        )

    def redact_corpora(self, value: Any) -> list[Any]:
        """A list of corpora, as the recipe and the order of the data have it: a path is the name of the corpus."""
        public_corpora = list[Any]()
        for corpus in value if isinstance(value, list) else []:
            public_corpus = self.redact_tree(corpus)
            if isinstance(public_corpus, dict):
                public_corpus.pop("url", None)  # the name says which corpus it is
            for key in ("name", "path"):
                if isinstance(corpus, Mapping) and key in corpus:
                    public_corpus[key] = self.names.name_publicly("corpus", str(corpus[key]))
            public_corpora.append(public_corpus)
        return public_corpora

    def _below(self, key: str, value: Any) -> Any:
        if key in NAMED and isinstance(value, str):
            return self.names.name_publicly(NAMED[key], value)
        if key in KEYED and isinstance(value, Mapping):
            return self.redact_keys(KEYED[key], value)
        if key == "corpora" and isinstance(value, list):
            return self.redact_corpora(value)
        if key == "software" and isinstance(value, Mapping):
            return {self.redact_text(str(name)): public_version(version) for name, version in value.items()}
        if key in HASHED and isinstance(value, str) and HASH.fullmatch(value):
            return value
        return self.redact_tree(value)


NAMED = {"host": "host", "corpus": "corpus", "shard": "shard"}  # fields whose value is one name
KEYED = {"corpora": "corpus", "val_loss_by_corpus": "corpus", "scores": "task"}  # fields whose keys are names
# A corpus that is called "data" or "code" must not change what megastable says of causes: such a name is replaced
# where a word before it says that it is one.
BEFORE = {"host": "hosts?|on", "corpus": "corpus|corpora", "shard": "shards?"}
HOSTS = ("hosts", "gone")  # fields whose items are names of hosts
HASHED = ("fingerprint", "xxh3")


def is_common(name: str) -> bool:
    """Whether a name is also a number, or a word that megastable uses: it does not tell that it is a name."""
    return bool(PLAIN.fullmatch(name)) or (is_known(name) and not re.search(r"\d", name))


def number_keys(pairs: Iterable[tuple[str, Any]]) -> dict[str, Any]:
    """Values by key. Keys that have become equal are numbered, so that no value is lost."""
    found: dict[str, Any] = {}
    for key, value in pairs:
        unused_keys = (f"{key} {key_number}" for key_number in count(2))
        found[
            key
            if key not in found
            else next(unused_key for unused_key in unused_keys if unused_key not in found)
        ] = value
    return found


def _either(names: Iterable[str]) -> str:
    return "|".join(map(re.escape, names))


def public_version(value: Any) -> str:
    """A version or the name of a device, without a word that is neither."""
    version_words = str(value).split()
    return " ".join(
        version_word if SOFTWARE.fullmatch(version_word) else WITHHELD for version_word in version_words
    )


def collect_names(value: Any, names: PublicNames) -> None:
    """Add the names of hosts, corpora and shards that a JSON value holds."""
    if isinstance(value, Mapping):
        for field_name, value_below in value.items():
            if field_name in NAMED and isinstance(value_below, str) and value_below:
                names.name_publicly(NAMED[field_name], value_below)
            elif field_name in KEYED and isinstance(value_below, Mapping):
                for private_name in value_below:
                    names.name_publicly(KEYED[field_name], str(private_name))
            elif field_name in HOSTS:
                for host_name in value_below if isinstance(value_below, list | tuple) else ():
                    if isinstance(host_name, str) and host_name:
                        names.name_publicly("host", host_name)
            collect_names(value_below, names)
    elif isinstance(value, list | tuple):
        for value_below in value:
            collect_names(value_below, names)


@cache
def known_words() -> frozenset[str]:
    """Every token of our packages' source, the keys of the recipe, and names of Python's errors and of signals."""
    found = {
        token.strip(AROUND)
        for package_folder in package_folders()
        for source_path in package_folder.rglob("*.py")
        for token in TOKEN.findall(source_path.read_text("utf-8"))
    }
    found |= set(_keys(RunConfig().model_dump(mode="json")))
    found |= {name for name in dir(builtins) if name.endswith(("Error", "Exception", "Interrupt"))}
    found |= {one_signal.name for one_signal in signal.Signals}
    return frozenset(found)


def is_known(word: str) -> bool:
    """Whether megastable uses the word: as it is, as the first of a sentence, or as the plural of one that it uses."""
    all_words = known_words()
    word_forms = {word, word[:1].lower() + word[1:]}
    word_forms |= {word_form[:-1] for word_form in word_forms if word_form.endswith("s")}
    return not word_forms.isdisjoint(all_words)


def _keys(tree: Any, before: str = "") -> Iterator[str]:
    for tree_key, tree_value in tree.items() if isinstance(tree, dict) else ():
        yield f"{before}{tree_key}"
        yield from _keys(tree_value, f"{before}{tree_key}.")
