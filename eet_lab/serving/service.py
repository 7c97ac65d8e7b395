"""A model of this process behind a front: its engine's thread, and the front, which may run here too."""

from __future__ import annotations

from typing import Any, ClassVar

from eet_lab.errors import ModelError
from eet_lab.models import Model
from eet_lab.models.checkpoint import read_json
from eet_lab.models.encoder import Encoder
from eet_lab.models.vision import VisionEncoder
from eet_lab.serving.front import Front
from eet_lab.serving.generator import Generator
from eet_lab.serving.jobs import Card
from eet_lab.serving.options import Options
from eet_lab.serving.reader import Reader
from eet_lab.serving.worker import Worker
from eet_lab.technique import Recipe
from eet_lab.texts import RecipeLike, as_recipe

DECODER_RECIPE, ENCODER_RECIPE = "all,continuous_batching", "all"


class Service(Front):
    """A model and its front in one process. All but `worker`'s work runs on the server's loop."""

    per_answer_s: ClassVar[float] = 0.0002
    """Here an event takes the interpreter's lock, which the engine's thread needs too: more than a quarter of the time
    would slow the engine for everyone.
    """

    worker: Worker
    generator: Generator | None

    def __init__(self, model: Model, recipe: RecipeLike | None = None, options: Options | None = None) -> None:
        options = options or Options()
        self.model = model
        if isinstance(model.network, VisionEncoder):
            raise ModelError(
                f"{model.name} reads images ({model.config.family}), and a server's requests have texts. Use "
                "eet_lab.classify or eet_lab.encode, or serve a model that reads texts."
            )
        is_encoder = isinstance(model.network, Encoder)
        _ = model.encoder if is_encoder else model.decoder  # which says what it cannot serve
        default = ENCODER_RECIPE if is_encoder else DECODER_RECIPE
        columns = options.columns(model.config.context)
        self.recipe: Recipe = as_recipe(default if recipe is None else recipe, model.device, model.config)
        ends, vocab_size = ends_of(model), model.config.vocab_size
        card = Card(model.name, str(self.recipe), columns, ends, vocab_size, is_encoder, model.tokenizer, model.folder)
        self.reader = Reader(model, self.recipe) if is_encoder else None
        generator = None if is_encoder else Generator(model, self.recipe, columns, self.receive)
        worker = self.reader or generator
        assert worker is not None
        super().__init__(card, options, worker, generator)


def ends_of(model: Model) -> tuple[int, ...]:
    """The tokens that end a text of this model: the config's, and those that the checkpoint's generation_config.json
    adds, such as the end of a turn.
    """
    path = None if model.folder is None else model.folder / "generation_config.json"
    sources: list[Any] = [model.config.eos_id, (model.settings or {}).get("eos_token_id")]
    if path is not None and path.exists():
        sources.append(read_json(path).get("eos_token_id"))
    found = dict.fromkeys(token for source in sources for token in (source if isinstance(source, list) else [source]))
    return tuple(token for token in found if isinstance(token, int) and 0 <= token < model.config.vocab_size)
