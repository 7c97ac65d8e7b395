"""Data that is on every machine, or is drawn: Python's own documentation, numbers in words, and digits as pictures."""

from __future__ import annotations

import ast
import importlib
import sysconfig
import zlib
from collections.abc import Iterator, Mapping
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from eet_lab.errors import SetupError, first_line

UNITS = (
    "zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven", "twelve",
    "thirteen", "fourteen", "fifteen", "sixteen", "seventeen", "eighteen", "nineteen",
)  # fmt: skip
TENS = ("twenty", "thirty", "forty", "fifty", "sixty", "seventy", "eighty", "ninety")
NUMBER_WORDS = (*UNITS, *TENS, "hundred", "thousand")

GLYPHS = (
    ".###. #...# #..## #.#.# ##..# #...# .###.", "..#.. .##.. ..#.. ..#.. ..#.. ..#.. .###.",
    ".###. #...# ....# ...#. ..#.. .#... #####", "##### ...#. ..#.. ...#. ....# #...# .###.",
    "...#. ..##. .#.#. #..#. ##### ...#. ...#.", "##### #.... ####. ....# ....# #...# .###.",
    "..##. .#... #.... ####. #...# #...# .###.", "##### ....# ...#. ..#.. .#... .#... .#...",
    ".###. #...# #...# .###. #...# #...# .###.", ".###. #...# #...# .#### ....# ...#. .##..",
)  # fmt: skip
"""The digits in five columns and seven rows."""
LEAST_PROSE, PROSE_SHARE = 60, 0.88
"""Characters that a paragraph has at least, and the share of them that are letters or blanks."""


def documentation() -> Iterator[str]:
    """The prose that pydoc shows of the running Python, in an order that is always the same and is not its own.

    First the language reference, then the docstrings of the standard library's modules; each is one line.
    """
    topics: Mapping[str, str] = importlib.import_module("pydoc_data.topics").topics
    for name in sorted(topics, key=_shuffled):
        yield from _prose(topics[name])
    for path in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"), key=lambda path: _shuffled(path.name)):
        found = (ast.get_docstring(node) for node in ast.walk(ast.parse(path.read_bytes())) if isinstance(node, _TOLD))
        yield from _prose("\n\n".join(filter(None, found)))


_TOLD = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)


def _prose(text: str) -> Iterator[str]:
    """The paragraphs of a text that are sentences, as one line; nothing where none is."""
    lines = (" ".join(paragraph.split()) for paragraph in text.split("\n\n"))
    if found := [line for line in lines if len(line) >= LEAST_PROSE and _letters(line) >= PROSE_SHARE]:
        yield " ".join(found)


def _letters(line: str) -> float:
    return sum(each.isalpha() or each.isspace() for each in line) / len(line)


def _shuffled(name: str) -> int:
    return zlib.crc32(name.encode())


def spelled(number: int) -> str:
    """A whole number below a million in words: "three hundred forty two thousand seven"."""
    for scale, word in ((1000, "thousand"), (100, "hundred")):
        if number >= scale:
            count, rest = divmod(number, scale)
            return f"{spelled(count)} {word}" + (f" {spelled(rest)}" if rest else "")
    if number < len(UNITS):
        return UNITS[number]
    tens, rest = divmod(number, 10)
    return TENS[tens - 2] + (f" {UNITS[rest]}" if rest else "")


def numbers(count: int, most_digits: int = 6, seed: int = 0) -> list[tuple[str, str]]:
    """Different whole numbers, in words and in digits; short ones are as likely as long ones, while there are some."""
    draw, found = np.random.default_rng(seed), dict[int, None]()
    while len(found) < min(count, 10**most_digits):
        found |= dict.fromkeys(draw.integers(10 ** draw.integers(1, most_digits + 1, count)).tolist())
    return [(spelled(number), str(number)) for number in [*found][:count]]


def digits(count: int, size: int = 8, channels: int = 1, seed: int = 0) -> tuple[Tensor, list[int]]:
    """Pictures of digits [count,channels,size,size] in values about 0, and which digits they are.

    Each is a glyph of five by seven, placed somewhere, brighter or darker, under noise; larger pictures have larger
    ones.
    """
    draw = np.random.default_rng(seed)
    labels, cell = draw.integers(10, size=count), max(1, size // 8)
    glyphs = np.array([[[mark == "#" for mark in line] for line in glyph.split()] for glyph in GLYPHS], np.float32)
    large = glyphs.repeat(cell, 1).repeat(cell, 2)
    pixels = draw.normal(0, 0.25, (count, size, size)).astype(np.float32)
    down, right = (draw.integers(size - edge + 1, size=count) for edge in large.shape[1:])
    for number, digit in enumerate(labels):
        place = np.s_[down[number] : down[number] + 7 * cell, right[number] : right[number] + 5 * cell]
        pixels[number][place] += large[digit] * draw.uniform(0.6, 1.4)
    found = torch.from_numpy(pixels - pixels.mean())[:, None].expand(-1, channels, -1, -1)
    return found, labels.tolist()


def scanned_digits() -> tuple[Tensor, list[int]] | None:
    """The 1,797 handwritten digits of scikit-learn [1797,1,8,8]; None where it is not installed.

    Errors: SetupError where it is installed and broken.
    """
    try:
        found = importlib.import_module("sklearn.datasets").load_digits()
    except ImportError as error:
        if isinstance(error, ModuleNotFoundError) and error.name == "sklearn":
            return None
        raise SetupError(
            f"scikit-learn is installed, but cannot be imported: {first_line(error)}. Mend it with `pip install "
            "--force-reinstall scikit-learn`, or uninstall it: digits are then drawn."
        ) from error
    return torch.tensor(found.images / 8 - 1, dtype=torch.float32)[:, None], found.target.tolist()
