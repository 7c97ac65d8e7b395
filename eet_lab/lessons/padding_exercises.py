"""Exercises of lessons 1 and 2: steps, pads, scores. B rows, K columns of the cache, D head dim."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from operator import index
from typing import Any

import torch
from torch import Tensor

from eet_lab.engine.engine import Engine
from eet_lab.engine.settings import Settings
from eet_lab.lessons.batch import SHORT, clipped
from eet_lab.lessons.exercise import Exercise, Wrong, ask, formula, named
from eet_lab.lessons.show import table
from eet_lab.models import Model
from eet_lab.models.decoder import Decoder, forward, logits, op_by_op
from eet_lab.models.weights import placed
from eet_lab.ops.types import fresh
from eet_lab.parts import Parts
from eet_lab.parts.attend import DenseMask
from eet_lab.parts.batches import left_padded


def num_steps(lengths: Sequence[int], new_tokens: int) -> tuple[int, int]:
    """The step that reads a row's last prompt token gives its first new one; both end with the longest row."""
    return max(lengths) + new_tokens - 1, new_tokens


count_steps = formula(
    num_steps,
    {
        "prompts of 3 and 5 tokens, 4 new": ([3, 5], 4),
        "one prompt of 960 tokens, 64 new": ([960], 64),
        "this lesson's batch, 32 new": ([3, 18, 44, 124], 32),
        "one prompt of 1 token, 8 new": ([1], 8),
    },
    {
        "The step that reads the last prompt token gives the first new token already: one step less.": (
            lambda lengths, new: (max(lengths) + new, new + 1)
        ),
        "Rows run side by side: the longest prompt counts, not the sum.": (
            lambda lengths, new: (sum(lengths) + new - 1, None)
        ),
        "The batch is done when its longest row is, not its shortest.": (
            lambda lengths, new: (min(lengths) + new - 1, None)
        ),
        "That is until the first token. Count the steps of the whole run.": lambda lengths, new: (max(lengths), 1),
        "The first pass gives a token, too.": lambda lengths, new: (max(lengths) + new - 2, new - 1),
    },
    "The longer the prompts are beside what is generated, the more there is to gain. Look at the last line: a prompt "
    "of one token gains nothing.",
    names=("steps token by token", "steps with pre-padding"),
    otherwise="Count the steps until the longest prompt is read, then one for each further token.",
)


def padded_share(lengths: Sequence[int]) -> float:
    """Pads of the rectangle, over all its cells."""
    return 1 - sum(lengths) / (len(lengths) * max(lengths))


share_of_pads = formula(
    padded_share,
    {
        "prompts of 3 and 5 tokens": ([3, 5],),
        "this lesson's batch": ([3, 18, 44, 124],),
        "eight prompts of 64 tokens": ([64] * 8,),
        "the H200's batch": ([16, 32, 48, 64, 80, 96, 112, 128],),
    },
    {
        "That is the share of real tokens.": lambda lengths: sum(lengths) / (len(lengths) * max(lengths)),
        "Divide by all cells of the rectangle, not by the real tokens.": (
            lambda lengths: len(lengths) * max(lengths) / sum(lengths) - 1
        ),
        "That is the number of pads; divide it by the cells of the rectangle.": (
            lambda lengths: len(lengths) * max(lengths) - sum(lengths)
        ),
        "That is a percentage; return a share between 0 and 1.": lambda lengths: 100 * padded_share(lengths),
    },
    "These cells are computed by every linear layer and thrown away. Sort requests by length, or pack their tokens "
    "without pads, and the share falls.",
    names=("share of pads",),
    otherwise="The rectangle has a row for each prompt, and as many columns as the longest one has tokens.",
)


Rows = Sequence[Sequence[int]]
LeftPad = Callable[[Rows], tuple[list[list[int]], list[list[int]]]]


def padding(model: Model) -> Exercise:
    """Write left padding; a right answer is run by the engine in place of ours."""
    return Exercise(lambda answer: _judge_padding(answer, model), left_pad)


def left_pad(prompts: Rows) -> tuple[list[list[int]], list[list[int]]]:
    """Right-aligned rows of tokens, 0 for a pad, and each token's position in its own sequence."""
    longest = max(len(prompt) for prompt in prompts)
    pads = [longest - len(prompt) for prompt in prompts]
    tokens = [[0] * pad + list(prompt) for pad, prompt in zip(pads, prompts, strict=True)]
    positions = [[max(column - pad, 0) for column in range(longest)] for pad in pads]
    return tokens, positions


def _judge_padding(answer: LeftPad, model: Model) -> tuple[str, tuple[Any, ...]]:
    for rows in ([[7, 8, 9], [5]], [[4]], [[1, 2], [3, 4]], [[6], [1, 2, 3, 4, 5], [7, 8]]):
        given = ask(answer, [list(row) for row in rows])
        if not (isinstance(given, tuple) and len(given) == 2):
            raise Wrong(f"return two things, tokens and positions, not {named(given)}.")
        _judge_layout(rows, *given)
    decoder = placed(model.decoder, torch.device("cpu"), torch.float32)
    rows = [model.encode(prompt) for prompt in SHORT]
    settings = Settings(max_new_tokens=8)
    yours = _continued(answer, decoder, rows, settings.max_new_tokens)
    ours = Engine(decoder).generate(rows, settings).tokens
    if yours != ours:
        raise Wrong("the layout looks right, but the model generated other tokens than the baseline with it.")
    told = [[clipped(p), model.decode(tokens)] for p, tokens in zip(SHORT, yours, strict=True)]
    message = "The model just read your layout, and generated the same tokens as the baseline:"
    return message, (table(["prompt", "continued through your function"], told),)


def _judge_layout(rows: Rows, tokens: Any, positions: Any) -> None:
    longest, case = max(map(len, rows)), f"For left_pad({[list(row) for row in rows]})"
    right_tokens, right_positions = left_pad(rows)
    for b, row in enumerate(rows):
        try:
            got, at = ([index(each) for each in part[b]] for part in (tokens, positions))
            num_rows = len(tokens), len(positions)
        except Exception as error:
            raise Wrong(f"{case}: tokens and positions each need {len(rows)} rows of whole numbers.") from error
        if num_rows != (len(rows), len(rows)):
            raise Wrong(f"{case}: tokens and positions have {num_rows} rows; both must have {len(rows)}.")
        if len(got) != longest or len(at) != longest:
            raise Wrong(f"{case}: tokens[{b}] has length {len(got)}, positions[{b}] {len(at)}; both must be {longest}.")
        if got != right_tokens[b]:
            right_padded = got[: len(row)] == list(row) and longest > len(row)
            hint = " The pads belong on the left, so that every row ends in the same column." if right_padded else ""
            raise Wrong(f"{case}: tokens[{b}] should be {right_tokens[b]}, but it is {got}.{hint}")
        pad = longest - len(row)
        if at[pad:] != right_positions[b][pad:]:
            shifted = at == list(range(longest))
            hint = " Count from the row's own first token, not from the first column." if shifted else ""
            raise Wrong(
                f"{case}: positions[{b}] should give the real tokens {right_positions[b][pad:]}, not {at[pad:]}.{hint}"
            )
        if min(at) < 0:
            raise Wrong(f"{case}: positions[{b}] has a negative number; the embedding has none. Give pads position 0.")


@torch.inference_mode()
def _continued(answer: LeftPad, decoder: Decoder, rows: Rows, num_new: int) -> tuple[tuple[int, ...], ...]:
    """Greedy tokens of passes that the learner's function lays out: each reads its rows whole, without a KV cache."""
    ops, read = Parts().ops.bind(fresh), [list(row) for row in rows]
    for _ in range(num_new):
        tokens, positions = (torch.tensor(part).flatten() for part in answer([list(row) for row in read]))
        batch = left_padded(read)._replace(ids=tokens, positions=positions)
        hidden = forward(decoder, ops, DenseMask(ops, batch, None, empty=fresh), batch, op_by_op)
        newest = logits(decoder, ops, hidden[batch.last]).argmax(-1)
        for row, token in zip(read, newest.tolist(), strict=True):
            row.append(token)
    return tuple(tuple(row[len(prompt) :]) for row, prompt in zip(read, rows, strict=True))


def first_pass_scores(lengths: Sequence[int]) -> tuple[int, int]:
    """All cells of a square for each row, and the triangle over a row's own tokens."""
    return len(lengths) * max(lengths) ** 2, sum(n * (n + 1) // 2 for n in lengths)


count_scores = formula(
    first_pass_scores,
    {
        "one prompt of 4 tokens": ([4],),
        "prompts of 3 and 5 tokens": ([3, 5],),
        "this lesson's batch": ([3, 18, 44, 124],),
        "eight prompts of 1,024 tokens": ([1024] * 8,),
    },
    {
        "A token sees itself, too: n (n + 1) / 2 for a row of n tokens.": (
            lambda lengths: (None, sum(n * (n - 1) // 2 for n in lengths))
        ),
        "A row of n real tokens uses a triangle, not the whole square.": (
            lambda lengths: (None, sum(n * n for n in lengths))
        ),
        "With pads, every row has as many columns as the longest one.": (
            lambda lengths: (sum(n * n for n in lengths), len(lengths) * max(lengths) * (max(lengths) + 1) // 2)
        ),
        "Count the scores of all rows.": lambda lengths: (max(lengths) ** 2, max(lengths) * (max(lengths) + 1) // 2),
        "A score is of one query and one key: columns times columns.": lambda lengths: (
            len(lengths) * max(lengths),
            sum(lengths),
        ),
    },
    "Even where all rows are equally long, about half of the scores are thrown away: those of the future.",
    names=("scores computed with a mask", "scores used"),
    otherwise="With a mask, each row computes a square as wide as the longest prompt.",
)


Attend = Callable[[Tensor, Tensor, Tensor, int, int], Tensor]


def attend(q: Tensor, keys: Tensor, values: Tensor, num_pad: int, column: int) -> Tensor:
    """One query [D] over the columns that it may see of keys and values [K,D]."""
    seen = slice(num_pad, column + 1)
    weights = torch.softmax(keys[seen] @ q / len(q) ** 0.5, dim=0)
    return weights @ values[seen]


def _judge_attention(answer: Attend) -> tuple[str, tuple[Any, ...]]:
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
                "keys or values are still read and then weighted with 0. Do not read them: slice."
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
        "it sees the future, too. The query's own column is the last that it may see.": (q, 0, num_pad, len(keys) - 1),
        "it does not see its own column. A slice ends before its end.": (q, 0, num_pad, column - 1),
        "the scores are not divided by √D.": (q * len(q) ** 0.5, 0, num_pad, column),
    }
    for words, (query, before, first, last) in mistakes.items():
        if last >= first - before and torch.allclose(
            given, attend(query, keys, values, first - before, last), atol=1e-5
        ):
            return words
    return "the result differs from softmax(q·k / √D) over columns num_pad to column, times their values."


attention = Exercise(_judge_attention, attend)
"""Write attention for one query without a mask."""
