"""A model of this process that is served: its engine's thread, and the front, where that runs here too."""

from __future__ import annotations

import asyncio
from typing import ClassVar

from torch import Tensor

from eet_lab.encoding import POOLS
from eet_lab.engine.tasks import CLASSES, TextTask
from eet_lab.errors import ModelError, SetupError
from eet_lab.models import Model
from eet_lab.models.encoder import Encoder
from eet_lab.models.vision import VisionEncoder
from eet_lab.serving.errors import ApiError
from eet_lab.serving.front import Front
from eet_lab.serving.generator import Generator
from eet_lab.serving.jobs import Card
from eet_lab.serving.options import DECODER_RECIPE, ENCODER_RECIPE, Options
from eet_lab.serving.reader import Reader
from eet_lab.serving.worker import Worker
from eet_lab.technique import Recipe
from eet_lab.texts import RecipeLike, as_recipe


def recipe_to_serve(model: Model, recipe: RecipeLike | None, device: str, options: Options) -> Recipe:
    """The recipe by which a model is served; None: the usual one of its kind.

    Errors: RecipeError; ModelError for a model that cannot be served, SetupError for options that are not for it.
    """
    if isinstance(model.network, VisionEncoder):
        raise ModelError(
            f"{model.name} reads images ({model.config.family}), and a server's requests have texts. Use "
            "eet_lab.classify or eet_lab.encode, or serve a model that reads texts."
        )
    is_encoder = isinstance(model.network, Encoder)
    _ = model.encoder if is_encoder else model.decoder  # which says what it cannot serve
    options.columns(model.config.context, is_encoder)
    if options.pool != "mean" and not is_encoder:
        raise SetupError(
            f"pool is {options.pool}, which says how an encoder makes vectors, but {model.name} generates. Leave pool "
            "out."
        )
    if options.policy is not None and not is_encoder:
        raise SetupError(
            f"policy is {options.policy}, but {model.name} generates: its requests join as continuous_batching of its "
            "recipe says. Leave policy out, and set the recipe's knobs."
        )
    usual = ENCODER_RECIPE if is_encoder else DECODER_RECIPE
    return as_recipe(usual if recipe is None else recipe, device, model.config)


def card_of(model: Model, recipe: Recipe, options: Options) -> Card:
    """What a front has to know of a model, which need not have its weights."""
    is_encoder = isinstance(model.network, Encoder)
    return Card(
        name=options.served_model_name or model.name,
        recipe=str(recipe),
        columns=options.columns(model.config.context, is_encoder),
        ends=model.config.ends,
        vocab_size=model.config.vocab_size,
        is_encoder=is_encoder,
        tokenizer=model.tokenizer,
        folder=model.folder,
    )


class Service:
    """A model, the thread that has its engine, and what a front has to know of them, wherever that runs.

    `worker` is the `reader` of an encoder, or the `generator` of any other model.
    """

    def __init__(self, model: Model, recipe: RecipeLike | None = None, options: Options | None = None) -> None:
        self.model, self.options = model, options or Options()
        self.recipe = recipe_to_serve(model, recipe, model.device, self.options)
        self.card = card_of(model, self.recipe, self.options)
        is_encoder = self.card.is_encoder
        self.reader = Reader(model, self.recipe, self.options.policy, self._tasks()) if is_encoder else None
        self.generator = None if is_encoder else Generator(model, self.recipe, self.card.columns)
        worker = self.reader or self.generator
        assert worker is not None
        self.worker: Worker = worker

    def _tasks(self) -> tuple[TextTask, ...]:
        """What requests may ask of an encoder."""
        vectors = POOLS[self.options.pool]
        return (vectors, CLASSES) if CLASSES.head in self.model.encoder.config.heads else (vectors,)


class LocalFront(Front):
    """A front in the process of its model, on whose loop all of it runs but the worker's own work."""

    per_answer_s: ClassVar[float] = 0.0002
    """Here an event takes the interpreter's lock, which the engine's thread needs too: more than a quarter of the time
    would slow the engine for everyone.
    """

    def __init__(self, service: Service) -> None:
        super().__init__(service.card, service.options, service.worker, service.generator)
        self.model, self.reader = service.model, service.reader
        self._results = set[asyncio.Future[Tensor]]()
        if service.generator is not None:
            service.generator.receive = self.receive

    def awaited(self) -> asyncio.Future[Tensor]:
        """What the reader makes of a request's texts. Errors: the one with which all were ended."""
        if self._ended is not None:
            raise self._ended
        result = asyncio.get_running_loop().create_future()
        self._results.add(result)
        result.add_done_callback(self._results.discard)
        return result

    def end_all(self, error: ApiError) -> None:
        super().end_all(error)
        for result in self._results:
            if not result.done():
                result.set_exception(error)
