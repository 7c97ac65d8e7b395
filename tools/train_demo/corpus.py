"""Gather the demo model's corpus from the running Python's own standard library.

    python tools/train_demo/corpus.py [--out .demo_data]

Three kinds of document: docstrings (from the sources, and from the compiled modules by looking at them),
blocks of comments that read as prose, and the language reference in `pydoc_data.topics`. Modules, not
documents, are dealt out to the three splits, and nothing that repeats a line of the training text stays in
the other two. The training modules' whole source, with their tests, goes to `sources.jsonl`: two megabytes of
prose are few, and a model that reads code beside them learns their words sooner.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import importlib
import inspect
import json
import platform
import re
import sys
import sysconfig
import textwrap
import zlib
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

SKIPPED = {"site-packages", "__phello__", "pydoc_data"}
TESTS = {"test", "tests", "idle_test"}
MIN_CHARS = 40  # shorter docstrings say nothing ("See above.")
MIN_COMMENT_CHARS = 120  # shorter comments lean on the code around them
MIN_PROSE = 0.72  # share of letters and spaces; tables and byte dumps fall below
MIN_PROSE_SOURCE = 0.6  # the same for whole sources; the code page tables of `encodings` fall below
REPEATED_CHARS = 40  # a line this long seen twice is a copy, not a coincidence
RULER = re.compile(r"\s*#*\s*([-=*~#_^.+])\1{3,}\s*")


class Document(NamedTuple):
    module: str
    text: str


def family(module: str) -> str:
    """The unit that is split: `_pydecimal`, `decimal` and `test.test_decimal` belong together."""
    parts = [part for part in module.split(".") if part not in TESTS]
    return parts[0].removeprefix("test_").lstrip("_").removeprefix("py") if parts else ""


def split_of(module: str) -> str:
    """Deal families out by checksum: about one in ten to validation, one in ten to test; the rest trains."""
    if family(module) in {"doc_data", "builtins"}:
        return "train"
    return {0: "validation", 1: "test"}.get(zlib.crc32(family(module).encode()) % 10, "train")


def clean(text: str) -> str:
    """Drop trailing blanks, rulers ("=====") and surplus empty lines."""
    lines = [line.rstrip() for line in text.expandtabs().splitlines() if not RULER.fullmatch(line)]
    return re.sub(r"\n{3,}", "\n\n", "\n".join(lines)).strip("\n")


def prose_share(text: str) -> float:
    return sum(c.isalpha() or c.isspace() for c in text) / max(1, len(text))


def describe(signature: str, docstring: str) -> str:
    """Open every second document with the signature: the model learns to begin with code and with prose."""
    docstring = clean(docstring)
    if len(docstring) < MIN_CHARS:
        return ""
    if zlib.crc32(docstring.encode()) % 2:
        return docstring
    return f"{signature}\n{textwrap.indent(docstring, '    ')}"


def source_docstrings(module: str, tree: ast.Module) -> Iterator[Document]:
    if docstring := ast.get_docstring(tree):
        yield Document(module, f"The {module} module\n\n{clean(docstring)}")
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            docstring = ast.get_docstring(node) or ""
            if isinstance(node, ast.ClassDef):
                head = f"class {node.name}({', '.join(map(ast.unparse, node.bases))}):"
            else:
                head = f"def {node.name}({ast.unparse(node.args)}):"
            yield Document(module, describe(head, docstring))


def comment_blocks(module: str, source: str) -> Iterator[Document]:
    for block in re.findall(r"(?:^[ \t]*#(?!!).*\n){3,}", source, flags=re.MULTILINE):
        text = clean(re.sub(r"^[ \t]*#+ ?", "", block, flags=re.MULTILINE))
        if len(text) >= MIN_COMMENT_CHARS:
            yield Document(module, textwrap.dedent(text))


def read_sources(root: Path) -> Iterator[Document]:
    for path in sorted(root.rglob("*.py")):
        parts = path.relative_to(root).with_suffix("").parts
        if SKIPPED & set(parts) or parts[0].startswith("_sysconfigdata") or "-" in parts[0]:
            continue
        with contextlib.suppress(UnicodeDecodeError, SyntaxError):  # a test's own input, broken on purpose
            source = path.read_text("utf-8-sig")
            ast.parse(source)
            yield Document(".".join(parts).removesuffix(".__init__"), source)


def from_sources(sources: Iterable[Document]) -> Iterator[Document]:
    for module, source in sources:
        yield from source_docstrings(module, ast.parse(source))
        yield from comment_blocks(module, source)


def compiled_modules() -> list[str]:
    dynamic = Path(sysconfig.get_path("platstdlib"), "lib-dynload").glob("*.so")
    names = set(sys.builtin_module_names) | {path.name.split(".")[0] for path in dynamic}
    return sorted(name for name in names if "test" not in name and not name.startswith("xx"))


def from_compiled() -> Iterator[Document]:
    """Docstrings that live in C; a module that this Python was built without is left out."""
    for name in compiled_modules():
        try:
            module = importlib.import_module(name)
        except ImportError:
            continue
        owners = [module, *(value for _, value in sorted(vars(module).items()) if inspect.isclass(value))]
        for owner in owners:
            for key, value in sorted(vars(owner).items()):
                docstring = getattr(value, "__doc__", None)
                if isinstance(docstring, str) and (callable(value) or inspect.isdatadescriptor(value)):
                    signature = getattr(value, "__text_signature__", None) or "(...)"
                    signature = re.sub(r"\$\w+(, /)?(, )?", "", signature)  # the implied $self or $module
                    yield Document(name, describe(f"{key}{signature}", inspect.cleandoc(docstring)))


def from_topics() -> Iterator[Document]:
    for _, text in sorted(importlib.import_module("pydoc_data.topics").topics.items()):
        yield Document("pydoc_data.topics", clean(text))


def without_copies(documents: Iterable[Document]) -> Iterator[Document]:
    """Drop whole documents seen before, and long paragraphs seen before (licences, shared descriptions)."""
    seen: set[str] = set()
    for module, text in documents:
        parts = text.split("\n\n")
        kept = [part for part in parts if len(part) < 2 * REPEATED_CHARS or part.strip() not in seen]
        text = "\n\n".join(kept)
        if len(text) < MIN_CHARS or text in seen or prose_share(text) < MIN_PROSE:
            continue
        seen.add(text)
        seen.update(part.strip() for part in kept)
        yield Document(module, text)


def long_lines(text: str) -> set[str]:
    return {line.strip() for line in text.splitlines() if len(line.strip()) >= REPEATED_CHARS}


def split(documents: Iterable[Document], sources: Iterable[Document]) -> dict[str, list[Document]]:
    splits: dict[str, list[Document]] = {name: [] for name in ("train", "validation", "test")}
    for document in documents:
        splits[split_of(document.module)].append(document)
    splits["sources"] = [
        Document(module, clean(source))
        for module, source in sources
        if split_of(module) == "train" and prose_share(source) >= MIN_PROSE_SOURCE
    ]
    trained_on = splits["train"] + splits["sources"]
    known = {line for document in trained_on for line in long_lines(document.text)}
    for name in ("validation", "test"):  # measured on the library's own documentation alone
        splits[name] = [
            document
            for document in splits[name]
            if not TESTS & set(document.module.split(".")) and not long_lines(document.text) & known
        ]
    return splits


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path(".demo_data"))
    out: Path = parser.parse_args().out
    out.mkdir(parents=True, exist_ok=True)
    (out / ".gitignore").write_text("*\n")

    sources = list(read_sources(Path(sysconfig.get_path("stdlib"))))
    documents = [*from_topics(), *from_sources(sources), *from_compiled()]
    splits = split(without_copies(documents), sources)
    facts: dict[str, object] = {"python": platform.python_version()}
    for name, members in splits.items():
        lines = (json.dumps({"module": module, "text": text}) + "\n" for module, text in members)
        (out / f"{name}.jsonl").write_text("".join(lines), encoding="utf-8")
        modules, characters = {m for m, _ in members}, sum(len(text) for _, text in members)
        facts[name] = {"modules": len(modules), "documents": len(members), "characters": characters}
    (out / "corpus.json").write_text(json.dumps(facts, indent=2) + "\n")
    print((out / "corpus.json").read_text())


if __name__ == "__main__":
    main()
