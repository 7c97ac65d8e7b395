"""Lesson 2's exercise: attention for one query, without a mask. K columns of the cache, D head dim."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from eet_lab.panels.lessons.exercise import Exercise, Wrong, ask, named

Attend = Callable[[Tensor, Tensor, Tensor, int, int], Tensor]


def exercise() -> Exercise:
    """Write attention for one query without a mask."""
    return Exercise(_judge, attend)


def attend(q: Tensor, keys: Tensor, values: Tensor, num_pad: int, column: int) -> Tensor:
    """One query [D] over the columns that it may see of keys and values [K,D]."""
    seen = slice(num_pad, column + 1)
    weights = torch.softmax(keys[seen] @ q / len(q) ** 0.5, dim=0)
    return weights @ values[seen]


def _judge(answer: Attend) -> tuple[str, tuple[Any, ...]]:
    generator = torch.Generator().manual_seed(0)
    for num_pad, column, K in ((0, 3, 4), (2, 5, 6), (1, 3, 7), (4, 4, 9)):
        q, keys, values = (torch.randn(*shape, generator=generator) for shape in ((8,), (K, 8), (K, 8)))
        case = f"With num_pad={num_pad}, column={column} and {K} columns in the cache"
        expected = attend(q, keys, values, num_pad, column)
        given = ask(answer, q, keys, values, num_pad, column)
        _judge_kind(case, given, expected)
        if not torch.allclose(given, expected, atol=1e-5):
            raise Wrong(f"{case}: {_likely(given, q, keys, values, num_pad, column)}")
        hidden = torch.ones(K, dtype=torch.bool)
        hidden[num_pad : column + 1] = False
        poisoned_keys, poisoned_values = keys.clone(), values.clone()
        poisoned_keys[hidden] = poisoned_values[hidden] = torch.nan
        given = ask(answer, q, poisoned_keys, poisoned_values, num_pad, column)
        _judge_kind(case, given, expected)
        if not torch.allclose(given, expected, atol=1e-5):
            raise Wrong(
                f"{case}: the numbers are right, but they turn into NaN when the hidden columns hold NaN. So hidden "
                "keys or values are still read and then weighted with 0. Cut them off instead: slice."
            )
    return "It agrees with the masked result, and NaN in pads and in the future changes nothing.", ()


def _judge_kind(case: str, given: Any, expected: Tensor) -> None:
    if not isinstance(given, Tensor):
        raise Wrong(f"{case}: return a tensor [D] = [8], not {named(given)}.")
    if (given.shape, given.dtype) != (expected.shape, expected.dtype):
        kind = f"{list(given.shape)} of {str(given.dtype).removeprefix('torch.')}"
        raise Wrong(f"{case}: return a tensor [D] = [8] of float32, as q is, not {kind}.")


def _likely(given: Tensor, q: Tensor, keys: Tensor, values: Tensor, num_pad: int, column: int) -> str:
    """What a wrong result looks like."""
    mistakes = {
        "it sees the pads, too. A row's first real token is in column num_pad.": (q, num_pad, num_pad, column),
        "it looks into the future. The query's own column is the last that it may see.": (q, 0, num_pad, len(keys) - 1),
        "it does not see its own column. A slice ends before its end.": (q, 0, num_pad, column - 1),
        "the scores are not divided by √D.": (q * len(q) ** 0.5, 0, num_pad, column),
    }
    for words, (query, before, first, last) in mistakes.items():
        if last >= first - before and torch.allclose(
            given, attend(query, keys, values, first - before, last), atol=1e-5
        ):
            return words
    return "the result is another one than softmax(q·k / √D) over columns num_pad to column, times their values."
