"""Two GPUs in one process: what the second computes is what the first does, alone and both at once."""

from __future__ import annotations

import itertools
from concurrent.futures import ThreadPoolExecutor

import encoders
import pytest
import torch

import eet_lab
from eet_lab.models import load
from eet_lab.training import Example, Trainer

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="two GPUs are needed"),
]
GPUS = ("cuda:0", "cuda:1")
PROMPTS = [[5] * 40, [7, 8, 9] * 5, [11]]
JOINED = "all,continuous_batching:rows=2"


@pytest.fixture(scope="module")
def models():
    return [eet_lab.load("demo", device=gpu, dtype="float16") for gpu in GPUS]


@pytest.mark.parametrize("recipe", ["", "all", JOINED, "all,int8_weights"])
def test_two_engines_at_once_say_what_each_says_alone(models, recipe):
    """Each from a thread of its own, a few times, while the other's graphs are captured and replayed."""

    def said(model) -> list:
        return [eet_lab.generate(model, PROMPTS, recipe, max_new_tokens=24).run.tokens for _ in range(3)]

    alone = [said(model) for model in models]
    assert alone[0] == alone[1]
    with ThreadPoolExecutor(2) as pool:
        assert list(pool.map(said, models)) == alone
    assert torch.cuda.current_device() == 0


def test_the_second_gpu_reads_texts_and_trains():
    given = [load(encoders.theirs("bert-classes"), device=gpu, dtype="float16") for gpu in GPUS]
    texts = [[5, 6, 7], [8] * 20]
    first, second = (eet_lab.classify(model, texts, "all").logits for model in given)
    assert torch.equal(torch.as_tensor(first), torch.as_tensor(second))
    losses = []
    for gpu in GPUS:
        model = eet_lab.load("demo", device=gpu, dtype="bfloat16")
        recipe = eet_lab.technique.Recipe.parse("all", "cuda", model.config.in_training)
        trainer = Trainer(model.network, recipe.parts, lr=1e-3)
        batch = [Example([3, 5, 8, 13] * 9), Example([2, 4] * 7)]
        losses.append([step.loss for step in trainer.steps(itertools.repeat(batch, 5))])
        assert trainer.model.device == torch.device(gpu)
    assert losses[0] == losses[1] and losses[0][-1] < losses[0][0]
