"""The exercises of lesson 8: what logits take, and one update of AdamW."""

from __future__ import annotations

import math

from eet_lab.lessons.exercise import formula

BETAS, EPS = (0.9, 0.999), 1e-8


def logits_bytes(tokens: int, vocab: int, itemsize: int, chunk: int) -> tuple[int, int]:
    """All logits of a step with their gradient, and those of a chunk with its."""
    return 2 * tokens * vocab * itemsize, 2 * min(tokens, chunk) * vocab * itemsize


logits_memory = formula(
    logits_bytes,
    {
        "GPT-2, 8 texts of 1,024 tokens": (8192, 50257, 4, 1024),
        "the lesson's model": (512, 4096, 4, 1024),
        "Llama 3 in bfloat16": (4096, 128256, 2, 512),
    },
    {
        "The gradient of the logits is as large as they are: count it, too.": lambda t, v, b, c: (
            t * v * b, min(t, c) * v * b,
        ),
        "There are no more tokens at a time than there are in all.": lambda t, v, b, c: (None, 2 * c * v * b),
        "A chunk is a number of tokens: each has a logit for every word.": lambda t, v, b, c: (None, 2 * c * b),
        "Count bytes: each number has `itemsize` of them.": lambda t, v, b, c: (2 * t * v, 2 * min(t, c) * v),
    },
    "So with chunks the memory of the loss no longer grows with the batch.",
    names=("whole", "in chunks"),
    otherwise="A logit for each token and each word, and a gradient of the same size.",
)  # fmt: skip


def adamw(weight: float, grad: float, first: float, second: float, step: int, lr: float, decay: float) -> tuple:
    """The new weight, and both moments."""
    first = BETAS[0] * first + (1 - BETAS[0]) * grad
    second = BETAS[1] * second + (1 - BETAS[1]) * grad**2
    unbiased, spread = first / (1 - BETAS[0] ** step), math.sqrt(second / (1 - BETAS[1] ** step))
    return weight * (1 - lr * decay) - lr * unbiased / (spread + EPS), first, second


def _biased(weight: float, grad: float, first: float, second: float, step: int, lr: float, decay: float) -> tuple:
    _, first, second = adamw(weight, grad, first, second, step, lr, decay)
    return weight * (1 - lr * decay) - lr * first / (math.sqrt(second) + EPS), None, None


update = formula(
    adamw,
    {
        "the first step": (0.5, 0.2, 0.0, 0.0, 1, 1e-2, 0.1),
        "a later step": (-1.5, -0.03, 0.04, 0.002, 10, 1e-2, 0.1),
        "no gradient": (2.0, 0.0, 0.01, 1e-4, 3, 1e-3, 0.5),
    },
    {
        "Moments begin at 0, so they are too small at first: divide each by 1 - beta ** step.": _biased,
        "The weight decays by lr * decay of itself, beside what the gradient does.":
            lambda w, g, first, second, step, lr, decay: (adamw(w, g, first, second, step, lr, 0.0)[0], None, None),
        "That is Adam with L2: in AdamW the decay does not go through the moments.":
            lambda w, g, first, second, step, lr, decay: adamw(w, g + decay * w, first, second, step, lr, 0.0),
        "`step` counts this update: it is 1 for the first one.":
            lambda w, g, first, second, step, lr, decay: (
                adamw(w, g, first, second, step + 1, lr, decay)[0], None, None
            ),
    },
    "One such update reads four numbers of a weight and writes three: 28 bytes in fp32, for a dozen operations.",
    names=("weight", "first moment", "second moment"),
    otherwise="First both moments, then both without their bias, then the weight.",
)  # fmt: skip
