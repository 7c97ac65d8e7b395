"""Texts and images as an encoder can read them, and the checks that stand before any work."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from eet_lab.engine.settings import Called, checked_texts
from eet_lab.errors import PromptError
from eet_lab.models.config import EncoderConfig, VisionConfig
from eet_lab.parts.passes import Image, Readable, Text
from eet_lab.words import told, type_of

PIXELS = ", but they must be finite floating-point numbers, as the checkpoint's own image processor makes them."


def readable(
    texts: Sequence[Readable], config: EncoderConfig, truncate: bool, waits: bool = True, called: Called | None = None
) -> Sequence[Readable]:
    """The texts, or images, as an encoder can read them; PromptError, in which each is `called` by its number.

    `waits`: to look at pixels on a GPU, too.
    """
    if isinstance(config, VisionConfig):
        called = called or "Image {}".format
        for number, image in enumerate(texts, 1):
            _check_image(called(number), image, config)
        _check_finite([image.pixels for image in texts if isinstance(image, Image)], waits, called)
        return texts
    called = called or "Text {}".format
    if images := [number for number, text in enumerate(texts, 1) if isinstance(text, Image)]:
        raise PromptError(f"{called(images[0])} is an image, but this encoder ({config.family}) reads texts.")
    return _readable_texts(texts, config, truncate, called)  # type: ignore[arg-type]  # which they are


def _check_image(who: str, image: Readable, config: VisionConfig) -> None:
    if not isinstance(image, Image):
        raise PromptError(f"{who} is a text, but this encoder ({config.family}) reads images.")
    if not isinstance(image.pixels, Tensor):
        raise PromptError(
            f"{who} has pixels that are {type_of(image.pixels)}, but they must be a tensor: give "
            "torch.tensor(pixels), or ask the image processor for return_tensors='pt'."
        )
    if tuple(image.pixels.shape) != config.pixels or image.patch_size != config.patch_size:
        raise PromptError(
            f"{who} has the shape {list(image.pixels.shape)}, but this encoder reads {list(config.pixels)} "
            "(channels, height, width). Make pixels of it by the checkpoint's own image processor."
        )
    if not image.pixels.is_floating_point():
        raise PromptError(f"{who} has pixels that are {image.pixels.dtype}{PIXELS}")
    if outside := [place for place in image.asked if not 0 <= place < config.context]:
        raise PromptError(f"{who} has {config.context} tokens, and none at place {told(outside[0])}.")


def _check_finite(pixels: Sequence[Tensor], waits: bool, called: Called) -> None:
    """Asked of all images at once: those that are on a GPU would each be waited for."""
    if len(devices := {each.device: None for each in pixels}) > 1:
        raise PromptError(f"The images are on {' and '.join(map(str, devices))}. Put all of them on one device.")
    if not pixels or not (waits or pixels[0].device.type == "cpu"):
        return
    if not bool(torch.stack([*pixels]).isfinite().all()):
        number = next(number for number, each in enumerate(pixels, 1) if not bool(each.isfinite().all()))
        raise PromptError(f"{called(number)} has pixels that are not finite{PIXELS}")


def _check_no_pads(rows: Sequence[Sequence[int]], config: EncoderConfig, called: Called) -> None:
    """PromptError for pads within a text: RoBERTa has no positions for them, and other tokens' do not count them."""
    pad = config.first_position - 1
    for number, row in enumerate(rows, 1):
        if pad in row:
            place = [*row].index(pad) + 1
            raise PromptError(
                f"{called(number)} has {pad} as token {place} of {len(row):,}, which is RoBERTa's pad (pad_token_id) "
                "and has no position in a text. Take pads out: texts of any lengths are read together."
            )


def _readable_texts(texts: Sequence[Text], config: EncoderConfig, truncate: bool, called: Called) -> list[Text]:
    """Either all of them have token types, or none."""
    rows = checked_texts([text.ids for text in texts], config, truncate, called=called)
    if config.first_position:
        _check_no_pads(rows, config, called)
    typed, found = config.num_types > 0 and any(text.types is not None for text in texts), []
    for number, (text, row) in enumerate(zip(texts, rows, strict=True), 1):
        if not typed and len(row) == len(text.ids) and text.asked in ((), (0,), range(len(row))):
            # Most texts end here: what follows would cost the host as much as the layout of their pass.
            found.append(Text(row, None, text.asked))
            continue
        types = [0] * len(text.ids) if text.types is None else [*text.types]
        if typed and (len(types) != len(text.ids) or not set(types) <= set(range(config.num_types))):
            raise PromptError(
                f"{called(number)} has {len(text.ids)} tokens and {len(types)} token types ({told(types)}), but each "
                f"token needs one, from 0 to {config.num_types - 1}."
            )
        if outside := [place for place in text.asked if not 0 <= place < len(text.ids)]:
            raise PromptError(f"{called(number)} has {len(text.ids)} tokens, and none at place {told(outside[0])}.")
        is_cut, last = len(row) < len(text.ids), len(text.ids) - 1
        if is_cut and (gone := [place for place in text.asked if len(row) - 1 <= place < last]):
            raise PromptError(
                f"{called(number)} is cut to {len(row)} tokens, and the one at place {gone[0]}, which is asked for, is "
                "gone. Shorten the text."
            )
        at = [min(place, len(row) - 1) for place in text.asked]  # the last token stays where a text is cut
        found.append(text._replace(asked=at, ids=row, types=[*types[: len(row) - 1], types[-1]] if typed else None))
    return found
