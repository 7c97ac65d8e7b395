"""Docstrings begin with what they are about."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

from eet_lab.paths import PACKAGE

PREPOSITIONS = {"about", "above", "after", "among", "around", "as", "at", "before", "below", "beside", "between"}
PREPOSITIONS |= {"beyond", "by", "for", "from", "in", "into", "of", "on", "over", "per", "to", "under", "until"}
PREPOSITIONS |= {"with", "within", "without"}
FILES = sorted(path for path in PACKAGE.rglob("*.py"))


def docstrings(body: list[ast.stmt], owner: str) -> Iterator[tuple[int, str, str]]:
    """Line, name and text of each: of what owns these statements, of its public parts and of its public names."""
    for before, node in zip([None, *body], body, strict=False):
        if isinstance(node, (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
            if not node.name.startswith("_"):
                parts = node.body if isinstance(node, ast.ClassDef) else node.body[:1]
                yield from docstrings(parts, f"{owner}.{node.name}")
        elif isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            name = owner if before is None else f"{owner}.{named(before)}"
            if not named(before).startswith("_"):
                yield node.lineno, name, node.value.value.strip()


def named(node: ast.stmt | None) -> str:
    """What an assignment names; nothing for other statements."""
    if not isinstance(node, (ast.Assign, ast.AnnAssign)):
        return ""
    return ast.unparse(node.target if isinstance(node, ast.AnnAssign) else node.targets[0])


def begins_bare(text: str) -> bool:
    """Whether a preposition comes first, so that a reader must guess what it belongs to."""
    return text.split()[0].strip(",.:").lower() in PREPOSITIONS


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.relative_to(PACKAGE).as_posix())
def test_no_public_docstring_begins_with_a_bare_preposition(path: Path) -> None:
    found = docstrings(ast.parse(path.read_text(encoding="utf-8")).body, path.stem)
    assert [f"{path}:{line}: {name}: {text[:60]}" for line, name, text in found if begins_bare(text)] == []


EXAMPLE = '''
"""Of a file."""
MOST = 3
"""Bytes of a file."""
_LEAST = 1
"""Of a row."""
class A:
    """One."""
    x: int
    """From 0 to 1."""
    def f(self):
        "In words."
    def _g(self):
        "By it."
'''


def test_what_is_looked_for_is_found() -> None:
    told = list(docstrings(ast.parse(EXAMPLE).body, "m"))
    assert [name for _, name, _ in told] == ["m", "m.MOST", "m.A", "m.A.x", "m.A.f"]
    assert [name for _, name, text in told if begins_bare(text)] == ["m", "m.A.x", "m.A.f"]
