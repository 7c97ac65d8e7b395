"""Checked reading of a checkpoint's config."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from eet_lab.errors import ModelError
from eet_lab.models.config import EncoderConfig, Seq2SeqConfig
from eet_lab.scheduling.whole import is_real, is_whole

Settings = Mapping[str, Any]

GENERATED = {
    "pad_id": "pad_token_id",
    "bos_id": "bos_token_id",
    "eos_id": "eos_token_id",
    "start_id": "decoder_start_token_id",
    "forced_bos_id": "forced_bos_token_id",
    "forced_eos_id": "forced_eos_token_id",
}
"""The special tokens of encoder-decoders."""
OF_GENERATION = (*GENERATED.values(), "bad_words_ids", "suppress_tokens")
"""What generation_config.json tells where there is one, and config.json else."""
BOS = {"gpt2": 50256, "opt": 2, "llama": 1, "mistral": 1}
"""The `bos_token_id` of a config that does not say; other decoders have none."""
ENCODER_ACTIVATIONS = {"gelu": "gelu", "gelu_new": "gelu_tanh", "gelu_pytorch_tanh": "gelu_tanh", "relu": "relu"}


def size(settings: Settings, name: str, needed: Sequence[str], default: int | None = None) -> int:
    """A whole number of at least 1; `needed` are all names that such a config must have."""
    value = settings.get(name)
    value = default if value is None else value
    if not is_whole(value, 1):
        raise ModelError(
            f"{name} is {value!r} in the checkpoint's config, but it must be a whole number of at least 1; "
            f"{_title(settings)} needs {', '.join(needed[:-1])} and {needed[-1]}."
        )
    return value


def heads(settings: Settings, hidden_name: str, heads_name: str, needed: Sequence[str]) -> tuple[int, int]:
    """The width of the model and its number of heads, which has to divide it."""
    hidden, num_heads = size(settings, hidden_name, needed), size(settings, heads_name, needed)
    if hidden % num_heads:
        raise ModelError(
            f"{hidden_name} is {hidden}, which {heads_name} = {num_heads} does not divide; the checkpoint's config is "
            "damaged."
        )
    return hidden, num_heads


def number(settings: Settings, name: str, usual: float) -> float:
    """A positive number; `usual` where there is none."""
    value = settings.get(name, usual)
    if not is_real(value) or value <= 0:
        raise ModelError(f"{name} is {value!r}, but it must be a positive number; {_title(settings)}'s is {usual}.")
    return float(value)


def choice(settings: Settings, name: str, usual: str, known: Mapping[str, str]) -> str:
    """What an activation is called here."""
    value = settings.get(name, usual)
    if not isinstance(value, str) or value not in known:
        raise ModelError(
            f"The activation {value!r} is not supported; supported: {', '.join(known)}. Choose a model with one of "
            "these, or run this one with transformers."
        )
    return known[value]


def named(act: str, known: Mapping[str, str]) -> str:
    """What a config calls an activation."""
    return next(name for name, each in known.items() if each == act)


def labels(settings: Settings) -> tuple[str, ...]:
    """The names of a checkpoint's classes, in order; those that transformers gives where it has none."""
    told = settings.get("id2label")
    if told is None:
        return tuple(f"LABEL_{i}" for i in range(size(settings, "num_labels", ("num_labels",), default=2)))
    try:
        names = {int(number): str(name) for number, name in told.items()}
    except (AttributeError, TypeError, ValueError):
        names = {}
    if not names or sorted(names) != list(range(len(names))):
        raise ModelError(
            f"id2label is {told!r:.60}, but it must name the classes 0, 1 and so on; correct it in the checkpoint's "
            "config."
        )
    return tuple(names[number] for number in range(len(names)))


def classes(settings: Settings) -> dict[str, Any]:
    """What a checkpoint tells of its classes."""
    return {"labels": labels(settings), "problem_type": settings.get("problem_type")}


def classes_settings(config: EncoderConfig) -> dict[str, Any]:
    """The other way round."""
    told = {} if config.problem_type is None else {"problem_type": config.problem_type}
    if not config.labels:
        return told
    numbers = {name: number for number, name in enumerate(config.labels)}
    return {"id2label": dict(enumerate(config.labels)), "label2id": numbers, **told}


def bos(settings: Settings, vocab: int) -> dict[str, Any]:
    """What the config tells of the token that an empty prompt stands for.

    Without one, or with one outside the vocabulary, it is kept as such, as in transformers: other prompts and training
    need none. Where the config does not say it is that of the family's class there.
    """
    usual = {"bos_token_id": BOS.get(settings["model_type"])}
    token = token_id({**usual, **settings}, "bos_token_id")
    is_known = token is not None and token < vocab
    unknown = None if is_known else token
    return {"bos_id": token if is_known else 0, "unknown_bos_id": unknown, "has_bos": token is not None}


def generated(settings: Settings) -> dict[str, Any]:
    """What the config of an encoder-decoder tells of the tokens that it generates, and its vocabulary's size."""
    vocab = size(settings, "vocab_size", ("vocab_size", "decoder_start_token_id"))
    ids = {ours: token_id(settings, name) for ours, name in GENERATED.items()}
    if ids["start_id"] is None:
        raise ModelError(
            f"decoder_start_token_id is missing in the checkpoint's config, and {_title(settings)} begins with it what "
            "it generates; add it to config.json."
        )
    words, more = (settings.get(name) or () for name in ("bad_words_ids", "suppress_tokens"))
    if not isinstance(words, (list, tuple)) or not isinstance(more, (list, tuple)):
        raise ModelError("bad_words_ids or suppress_tokens is no list; correct it in the checkpoint's config.")
    each = (word if isinstance(word, (list, tuple)) else [word] for word in words)
    suppressed = [*(word[0] for word in each if len(word) == 1), *more]
    if bad := [token for token in suppressed if not is_whole(token, 0, vocab - 1)]:
        raise ModelError(
            f"bad_words_ids or suppress_tokens has {bad[0]!r:.60}, but token ids are whole numbers from 0 to "
            f"{vocab - 1}; correct it in the checkpoint's config."
        )
    for ours, name in GENERATED.items():
        if (token := ids[ours]) is not None and token >= vocab:
            raise ModelError(
                f"{name} is {token}, but the vocabulary ends at {vocab - 1}; correct it in the checkpoint's config."
            )
    for name in (GENERATED["forced_bos_id"], GENERATED["forced_eos_id"]):
        told = settings.get(name)
        if isinstance(told, (list, tuple)) and any(each != told[0] for each in told):
            raise ModelError(
                f"{name} is {told!r:.60} in the checkpoint, but one token can be forced here. Name one of them in "
                "generation_config.json, or in config.json where there is none."
            )
    given = {ours: token for ours, token in ids.items() if token is not None}
    return {"vocab_size": vocab, "suppressed": tuple(dict.fromkeys(suppressed)), **given}


def generated_settings(config: Seq2SeqConfig) -> dict[str, Any]:
    """The other way round."""
    told = {name: getattr(config, ours) for ours, name in GENERATED.items()}
    return told | ({"bad_words_ids": [[token] for token in config.suppressed]} if config.suppressed else {})


def token_id(settings: Settings, name: str) -> int | None:
    """A token id, if the config has one; some checkpoints give a list of them."""
    value = settings.get(name)
    value = value[0] if isinstance(value, (list, tuple)) and value else value
    if value is not None and not is_whole(value, 0):
        raise ModelError(f"{name} is {value!r} in the checkpoint's config, but token ids are whole numbers from 0.")
    return value


def ends(settings: Settings, vocab: int) -> tuple[int, ...]:
    """All tokens that end a text. What is outside the vocabulary is never generated: -1 stands for none."""
    value = settings.get("eos_token_id")
    tokens = value if isinstance(value, (list, tuple)) else [] if value is None else [value]
    if not all(map(is_whole, tokens)):
        raise ModelError(f"eos_token_id is {value!r} in the checkpoint, but token ids are whole numbers from 0.")
    return tuple(token for token in dict.fromkeys(tokens) if 0 <= token < vocab)


def refuse(settings: Settings, beyond: Mapping[str, bool]) -> None:
    """ModelError where a checkpoint has one of these."""
    for what, there in beyond.items():
        if there:
            raise ModelError(f"The checkpoint has {what}, which is not supported; choose another model.")


def _title(settings: Settings) -> str:
    from eet_lab.models.families import TITLES

    return TITLES[settings["model_type"]]
