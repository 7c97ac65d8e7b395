"""The batch that a workload of training trains with, and the trainer of a recipe for it."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch

from eet_lab.bench.cost import train_flops
from eet_lab.bench.workloads import FIRST_TOKEN, TrainBatch
from eet_lab.errors import ModelError, PromptError
from eet_lab.models import Model
from eet_lab.models.config import EncoderConfig, Seq2SeqConfig, VisionConfig
from eet_lab.models.weights import random_decoder
from eet_lab.parts import Parts
from eet_lab.training import Example, Trainer


class Batch(NamedTuple):
    """A network with a head to train, and always the same examples; tokens are those that it is trained to tell of."""

    network: Any
    examples: Sequence[Example]
    dropout: float
    num_tokens: int
    num_flops: float

    @classmethod
    def of(cls, workload: TrainBatch, model: Model) -> Batch:
        """Rows of random tokens, or images; an encoder-decoder's tokens are those of its answers.

        Errors: PromptError, ModelError.
        """
        network = _with_head(model)
        config, examples = network.config, _examples(workload, network.config, network.device)
        work = Trainer(network).work(examples)
        num_tokens = sum(of_text for of_text, _ in work.sizes)
        return cls(network, examples, workload.dropout, num_tokens, train_flops(config, work))

    def trainer(self, parts: Parts) -> Trainer:
        """A trainer of this network, which clips nothing."""
        drop = self.dropout
        return Trainer(self.network, parts, dropout=drop, attention_dropout=drop, max_grad_norm=None)


def _with_head(model: Model) -> Any:
    """The network, with classes where random weights lack a head; ModelError where a checkpoint does."""
    config = model.config
    if not isinstance(config, EncoderConfig) or "classes" in config.heads:
        return model.network
    if model.kind != "random":
        raise ModelError(f"{model.name} has no classification head to train. Load a checkpoint that was saved with it.")
    labels = ("LABEL_0", "LABEL_1")
    with_classes = replace(config, heads=(*config.heads, "classes"), labels=labels)
    return random_decoder(with_classes, 0, model.network.device, model.network.dtype)


def _examples(workload: TrainBatch, config: Any, device: torch.device) -> list[Example]:
    """Rows of random tokens, of the lengths that are asked for, or images, which are on the device for everybody."""
    if isinstance(config, VisionConfig):
        if workload.low:
            raise PromptError(f"{workload} names lengths, but all images have {config.context} tokens: leave /s out.")
        draw = torch.Generator().manual_seed(0)
        pixels = [torch.randn(config.pixels, generator=draw).to(device) for _ in range(workload.rows)]
        return [Example(labels=number % len(config.labels), pixels=image) for number, image in enumerate(pixels)]
    chosen, lengths = random.Random(0), workload.lengths(config.context)
    ids = [[chosen.randrange(FIRST_TOKEN, config.vocab_size) for _ in range(length)] for length in lengths]
    if isinstance(config, EncoderConfig):
        return [Example(row, number % len(config.labels)) for number, row in enumerate(ids)]
    if isinstance(config, Seq2SeqConfig):
        return [Example(row, row[::-1]) for row in ids]
    return [Example(row) for row in ids]
