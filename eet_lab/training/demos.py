"""Demos: what each task can learn from where nobody gives data, and small models that are trained here from nothing.

C channels.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from time import perf_counter
from typing import Any

import torch
from torch import Tensor

from eet_lab.devices import checked_device, present
from eet_lab.errors import ModelError, TrainingError, did_you_mean
from eet_lab.models import Model
from eet_lab.models.config import SEQ2SEQ_PRESETS, Config, EncoderConfig, VisionConfig
from eet_lab.models.decoder import mapped
from eet_lab.models.families import FAMILIES
from eet_lab.models.loading import DEMO, demo_tokenizer
from eet_lab.models.tokenizer import Tokenizer
from eet_lab.models.weights import random_decoder, untrained
from eet_lab.parts import Parts
from eet_lab.parts.losses import Head
from eet_lab.scheduling.whole import MOST, check_whole
from eet_lab.threads import cpu_threads
from eet_lab.training import demo_data
from eet_lab.training.data import Examples, Masked, Numbered, Rows, read_texts
from eet_lab.training.run import TrainRun, train
from eet_lab.training.tasks import CLASSES, LANGUAGE, MASKED, SEQ2SEQ, TOKEN_CLASSES, Example, TrainTask
from eet_lab.training.trainer import Trainer

BUNDLED = DEMO / "heldout.jsonl"
MOST_NUMBERS, MOST_IMAGES = 22_000, 4_000


def bundled(model: Model, task: TrainTask, row_tokens: int) -> Numbered:
    """What ships, or is drawn, for a model to learn that task from. Errors: ModelError, TrainingError."""
    return DATA[task](model, read_texts(BUNDLED), row_tokens)


def masked(model: Model, rows: Numbered) -> Masked:
    """Rows of texts with some words masked, others in each epoch, for a model to learn masked language modeling from.

    Errors: ModelError where the model learns no masked words, or its tokenizer has no word for that.
    """
    word = getattr(FAMILIES[model.config.family], "MASK", None)
    if word is None:
        raise ModelError(
            f"{model.name} is of the family {model.config.family}, which learns no masked words: give the "
            "rows themselves, or an encoder of texts."
        )
    mask_id = None if model.tokenizer is None else model.tokenizer.id_of(word)
    if mask_id is None:
        raise ModelError(f"{model.name} has no tokenizer with the word {word}. Load it with its own, as tokenizer=.")
    return Masked(rows, mask_id, model.config.vocab_size)


def _masked(model: Model, texts: Iterable[str], row_tokens: int) -> Masked:
    return masked(model, Rows.of_texts(model, texts, row_tokens))


def _classes(model: Model, texts: Iterable[str], row_tokens: int) -> Examples:
    """Which digit a picture shows; of texts, from which of as many equal parts of all of them a row is."""
    config: Any = model.config
    num_classes = len(config.labels)
    if isinstance(config, VisionConfig):
        pixels, labels = demo_data.digits(MOST_IMAGES, config.image_size, config.num_channels)
        return Examples([Example(labels=d, pixels=p) for p, d in zip(pixels, labels, strict=True) if d < num_classes])
    rows = Rows.of_texts(model, texts, row_tokens)
    order = torch.randperm(len(rows), generator=torch.Generator().manual_seed(0)).tolist()
    return Examples([Example(rows[number].ids, number * num_classes // len(rows)) for number in order])


def _token_classes(model: Model, texts: Iterable[str], row_tokens: int) -> Examples:
    """How many characters each token has, beginning with 1: the last class has those with more, too."""
    config: Any = model.config
    last, rows = len(config.labels) - 1, Rows.of_texts(model, texts, row_tokens)
    found = {token: min(last, max(0, len(model.decode([token]).strip()) - 1)) for token in {*rows.ids.tolist()}}
    return Examples([Example(row.ids, [found[token] for token in row.ids]) for row in rows])


def _numbers(model: Model, texts: Iterable[str] = (), row_tokens: int = 0) -> Examples:
    """Numbers in words, and in digits; each ends with the end-of-text token where the model has one."""
    end = [] if model.config.eos_id is None else [model.config.eos_id]

    def ids(text: str) -> list[int]:
        read = model.encode(text)
        return read if read[-1:] == end else [*read, *end]

    return Examples([Example(ids(words), ids(figures)) for words, figures in demo_data.numbers(MOST_NUMBERS)])


DATA: Mapping[TrainTask, Callable[[Model, Iterable[str], int], Numbered]] = {
    LANGUAGE: Rows.of_texts, MASKED: _masked, CLASSES: _classes, TOKEN_CLASSES: _token_classes, SEQ2SEQ: _numbers,
}  # fmt: skip
TOLD = {
    LANGUAGE: "Python’s documentation, held-out part",
    MASKED: "Python’s documentation, words masked",
    CLASSES: "from which part of Python’s documentation a text is",
    TOKEN_CLASSES: "how many characters each token has",
    SEQ2SEQ: "numbers: from words to digits",
}
"""What `bundled` has for texts, in words; images are of digits."""


@dataclass(frozen=True)
class Demo:
    """A small model that is trained here from nothing: what it is, what it reads, and how it is trained.

    `held_out` is how many examples are kept apart, the last ones. `is_whole`: an example counts as right where all that
    is told of it is, such as an answer.
    """

    title: str
    config: Config
    read: Callable[[Model], Numbered]
    steps: int
    batch_rows: int
    settings: Mapping[str, Any]
    held_out: int = 64
    is_whole: bool = False
    tokenizer: Callable[[], Tokenizer | None] = demo_tokenizer
    which: Callable[[], str] | None = None
    """What it reads, in words, where that depends on what is installed."""

    def in_steps(self, steps: int) -> Demo:
        """The same in so many steps. Errors: TrainingError."""
        check_whole(TrainingError, "steps", steps, 1, MOST)
        warmup = min(self.settings["warmup_steps"], steps)
        return replace(self, steps=steps, settings={**self.settings, "warmup_steps": warmup})

    def model(self, device: str = "cpu", dtype: torch.dtype = torch.float32) -> Model:
        """The model before it is trained, with random weights."""
        at = torch.device(device)
        if self.config.family == "gpt2":
            network = untrained(self.config, 0, at, dtype, SPREAD)
        else:
            drawn = random_decoder(self.config, 0, at, dtype)
            network = mapped(drawn, lambda tensor: tensor * SPREAD if tensor.ndim > 1 else tensor)
        return Model(self.title, self.title, network, self.tokenizer(), "random")

    def data(self, model: Model) -> tuple[Numbered, Numbered]:
        """What it learns from, and what is held out."""
        found = self.read(model)
        return found.part(0, len(found) - self.held_out), found.part(len(found) - self.held_out, len(found))


def _documentation(num_characters: int, row_tokens: int, model: Model) -> Numbered:
    """About so much of what pydoc shows of this Python."""
    texts, left = list[str](), num_characters
    for text in demo_data.documentation():
        texts.append(text)
        if (left := left - len(text)) <= 0:
            break
    return Rows.of_texts(model, texts, row_tokens)


def _masked_numbers(model: Model) -> Masked:
    """Numbers in words and in digits, so that each tells what is masked of the other."""
    texts = (f"{words}</s>{figures}" for words, figures in demo_data.numbers(MOST_NUMBERS))
    return masked(model, Examples([Example(model.encode(text)) for text in texts]))


def _digits(model: Model) -> Numbered:
    """Handwritten digits where scikit-learn is installed, and else drawn ones."""
    if (found := demo_data.scanned_digits()) is None:
        return _classes(model, (), 0)
    return Examples([Example(labels=label, pixels=image) for image, label in zip(*found, strict=True)])


def _which_digits() -> str:
    if demo_data.scanned_digits() is None:
        return "drawn digits; scikit-learn has handwritten ones: pip install scikit-learn"
    return "the handwritten digits of scikit-learn"


SPREAD = 3.0
"""Weights are drawn from N(0, 0.02), which suits 768 channels; narrow models learn sooner from wider ones.

GPT-2 learns more if it begins as GPT-2 does (`untrained`); the others do not.
"""


SPECIAL = ("<pad>", "</s>", "[MASK]")


def _number_words() -> Tokenizer:
    """A token for each word and for each digit."""
    from tokenizers import Regex, decoders, models, pre_tokenizers
    from tokenizers import Tokenizer as Fast

    known = [*SPECIAL, *demo_data.NUMBER_WORDS, *"0123456789"]
    words = Fast(models.WordLevel({word: number for number, word in enumerate(known)}, unk_token=SPECIAL[0]))
    words.add_special_tokens([*SPECIAL])
    words.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.WhitespaceSplit(), pre_tokenizers.Split(Regex("[0-9]"), "isolated")]
    )
    words.decoder = decoders.Fuse()
    return Tokenizer.of(words)


def _gpt2(num_layers: int, C: int) -> Config:
    return Config(num_layers, C, 4, 4 * C, 4096, 1024, bos_id=0, eos_id=0)


_ADAM: dict[str, Any] = {"betas": (0.9, 0.98), "lr_schedule": "cosine"}
_MARIAN: dict[str, Any] = {"num_layers": 2, "encoder_layers": 2, "hidden_size": 64, "num_heads": 4, "ffn_size": 256}
_MARIAN |= {"head_dim": 16, "num_kv_heads": 4, "vocab_size": 43, "context": 64, "embedding_scale": 8.0}
_MARIAN |= {"bos_id": 0, "pad_id": 0, "start_id": 0, "eos_id": 1}

DEMOS: dict[str, Demo] = {
    "gpt2-tiny": Demo(
        "a tiny GPT-2 on Python’s documentation", _gpt2(2, 128), partial(_documentation, 330_000, 64), 200, 8,
        {"lr": 4e-3, "warmup_steps": 20, **_ADAM}, held_out=48,
    ),
    "gpt2-mini": Demo(
        "a small GPT-2 on Python’s documentation", _gpt2(4, 256), partial(_documentation, 10_000_000, 256), 1500, 16,
        {"lr": 2e-3, "warmup_steps": 100, "dropout": 0.1, "attention_dropout": 0.1, **_ADAM},
    ),
    "bert-tiny": Demo(
        "a tiny BERT on numbers in words and in digits, some of them masked",
        EncoderConfig(2, 64, 4, 256, 43, 64, act="gelu", eps=1e-12, family="bert", heads=("mlm",)),
        _masked_numbers, 600, 64, {"lr": 3e-3, "warmup_steps": 100, **_ADAM}, held_out=1000, tokenizer=_number_words,
    ),
    "translator-tiny": Demo(
        "a tiny translator of numbers, from words to digits", replace(SEQ2SEQ_PRESETS["transformer-base"], **_MARIAN),
        _numbers, 500, 64, {"lr": 3e-3, "warmup_steps": 100, **_ADAM}, held_out=500, is_whole=True,
        tokenizer=_number_words,
    ),
    "vit-tiny": Demo(
        "a tiny ViT on digits",
        VisionConfig(
            2, 64, 4, 128, 0, 17, act="gelu", eps=1e-12, family="vit", heads=("classes",), labels=tuple("0123456789"),
            image_size=8, patch_size=2, num_channels=1,
        ),
        _digits, 400, 64, {"lr": 3e-3, "warmup_steps": 20, **_ADAM}, held_out=400, tokenizer=lambda: None,
        which=_which_digits,
    ),
}  # fmt: skip
"""Models that are trained here; `gpt2-mini` is for a GPU."""


@dataclass(frozen=True)
class TrainedDemo:
    """What came of it: `right` is the share of what is held out that the model tells rightly."""

    model: Model = field(repr=False)
    run: TrainRun
    right: float
    seconds: float


def demo_of(name: str) -> Demo:
    """The demo of that name. Errors: TrainingError."""
    if name not in DEMOS:
        raise TrainingError(f"There is no demo {name!r:.60}.{did_you_mean(name, DEMOS)} Demos are {', '.join(DEMOS)}.")
    return DEMOS[name]


def train_demo(
    demo: Demo, parts: Parts | None = None, *, device: str | None = None, dtype: torch.dtype = torch.float32,
    evaluate_every: int | None = None, **how: Any,
) -> TrainedDemo:  # fmt: skip
    """Train one, with a tenth of its steps between two looks at what is held out.

    `how` are further words of `train`, such as `on_step` and `cancel`. `seconds` are those of the training alone.
    Errors: those of `Trainer` and of `train`.
    """
    device = checked_device(device)
    with cpu_threads(device), present(torch.device(device)):
        model = demo.model(device=device, dtype=dtype)
        rows, held_out = demo.data(model)
        trainer = Trainer(model.network, parts, max_steps=demo.steps, **demo.settings)
        begin = perf_counter()
        run = train(
            trainer, rows, max_steps=demo.steps, batch_rows=demo.batch_rows, held_out=held_out,
            evaluate_every=evaluate_every or -(-demo.steps // 10), **how,
        )  # fmt: skip
        seconds = perf_counter() - begin
        trained = replace(model, network=trainer.trained())
        return TrainedDemo(trained, run, share_right(trained, held_out, demo.is_whole, parts), seconds)


def share_right(model: Model, held_out: Numbered, is_whole: bool = False, parts: Parts | None = None) -> float:
    """The share of labels that the model would tell, or of examples of which it would tell all.

    The second is the share of answers that greedy generation gets to the last token: each is asked for behind those
    before it.
    """
    judge = Trainer(model.network, replace(parts or Parts(), loss=_right))
    if not is_whole:
        return judge.evaluate([*held_out])
    return sum(judge.evaluate([example]) == 1 for example in held_out) / len(held_out)


def _right(states: Tensor, labels: Tensor, head: Head, smoothing: float = 0.0) -> Tensor:
    """How many labels have the largest logit, in the place of a loss."""
    return (head.logits(states).argmax(-1) == labels).sum().float()
