"""Functions of a model run where it is, and are told what to do where they are given no model."""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import wraps
from typing import Any, TypeVar, cast

from eet_lab.devices import present
from eet_lab.errors import ModelError
from eet_lab.models.decoder import Decoder
from eet_lab.models.loading import Model
from eet_lab.models.seq2seq import Seq2Seq
from eet_lab.models.vision import AnyEncoder
from eet_lab.threads import cpu_threads
from eet_lab.words import type_of

Work = TypeVar("Work", bound=Callable[..., Any])


def on_its_device(work: Work) -> Work:
    """A decorator for functions whose first argument is a decoder: they run within `cpu_threads`, or with its GPU as
    the present one of torch.

    ModelError for what is no `Model`, for an encoder and for an encoder-decoder.
    """
    return _within(work, lambda model: model.decoder)


def on_its_generators_device(work: Work) -> Work:
    """The same for functions whose first argument is a decoder or an encoder-decoder."""
    return _within(work, lambda model: model.generator)


def on_its_encoders_device(work: Work) -> Work:
    """The same for functions whose first argument is an encoder; ModelError for a decoder."""
    return _within(work, lambda model: model.encoder)


def on_any_device(work: Work) -> Work:
    """The same for functions whose first argument is a model of any kind."""
    return _within(work, lambda model: model.network)


def _within(work: Work, network_of: Callable[[Model], Decoder | AnyEncoder | Seq2Seq]) -> Work:
    @wraps(work)
    def within(model: Any, *args: Any, **keywords: Any) -> Any:
        network = network_of(checked_model(model))
        with cpu_threads(network.device.type), present(network.device):
            return work(model, *args, **keywords)

    return cast(Work, within)


def checked_model(model: Any) -> Model:
    """The same model; ModelError for what is none, with how to get one."""
    if isinstance(model, Model):
        return model
    wanted = "but it must be a loaded model"
    if isinstance(model, (str, os.PathLike)):
        raise ModelError(f"model is {model!r}, {wanted}: eet_lab.load({model!r}).")
    if isinstance(model, Decoder | AnyEncoder | Seq2Seq):
        kind = "an Encoder" if isinstance(model, AnyEncoder) else type_of(model)
        raise ModelError(f"model is {kind}, but it must be the loaded model that it is part of.")
    if hasattr(model, "state_dict"):
        raise ModelError(f"model is {type_of(model)}, {wanted}: eet_lab.load(model).")
    raise ModelError(f"model is {model!r:.60}, {wanted}, such as eet_lab.load('demo').")
