"""Families of models: for each, how its checkpoints' config reads, and what they call the weights.

A family is one module: `MODEL_TYPES` (for each model_type a title, and the class of transformers); `PREFIXES` of its
names, the one that is written first; endings of `BUFFERS`, which are no weights; `LAYERS`, what a config calls their
number (an encoder's and a decoder's, where there are both); `config(settings)`, the other way `settings(config)`,
`table(config)`, and perhaps `finished`. To add one: write the module, and add it to `DECODERS`, `ENCODERS` or
`SEQ2SEQ`.

An encoder's module has besides: beginnings of the names of `HEADS`, which have no prefix; `COPIES`, names of a tied
head; `MASK`, the mask token; and perhaps `RENAMED`, patterns of other
names, and `CLASSIFIER`, the ending of the class of transformers that has classes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from eet_lab.errors import ModelError
from eet_lab.models.config import Config, EncoderConfig
from eet_lab.models.families import bart, bert, distilbert, gpt2, llama, opt, roberta, t5, vit

DECODERS, ENCODERS, SEQ2SEQ = (gpt2, opt, llama), (bert, roberta, distilbert, vit), (t5, bart)
MODULES = (*DECODERS, *ENCODERS, *SEQ2SEQ)
FAMILIES: dict[str, Any] = {kind: module for module in MODULES for kind in module.MODEL_TYPES}
TITLES = {kind: title for module in MODULES for kind, (title, _) in module.MODEL_TYPES.items()}


def _listed(modules: Sequence[Any]) -> str:
    return ", ".join(f"{TITLES[kind]} ({kind!r})" for module in modules for kind in module.MODEL_TYPES)


SUPPORTED = (
    f"{_listed(DECODERS)}, as causal language models; {_listed(ENCODERS)}, as encoders; {_listed(SEQ2SEQ)}, as "
    "encoder-decoders"
)


def family_of(settings: Mapping[str, Any]) -> Any:
    """The module for a checkpoint's config; ModelError, which lists what is supported, where there is none."""
    kind = settings.get("model_type")
    if not isinstance(kind, str) or kind not in FAMILIES:
        why, remedy = "The config names no architecture (model_type)", "Choose one of these"
        if kind:  # programs write it, so it is not misspelt: nothing similar is suggested
            why, remedy = f"The architecture {kind!r} is not supported", f"{remedy}, or run this one with transformers"
        raise ModelError(f"{why}. Supported: {SUPPORTED}. {remedy}.")
    return FAMILIES[kind]


def settings_of(config: Config) -> dict[str, Any]:
    """What config.json would say of such a model."""
    module = FAMILIES[config.family]
    common = {
        "model_type": config.family,
        "architectures": [_architecture(config, module.MODEL_TYPES[config.family][1])],
        "vocab_size": config.vocab_size,
        "bos_token_id": config.bos_token_id,
        "eos_token_id": config.eos_id,
        "tie_word_embeddings": config.tied_head,
    }
    return common | module.settings(config)


def _architecture(config: Config, name: str) -> str:
    """The class of transformers for such a model; `name` is that of its family."""
    if isinstance(config, EncoderConfig):
        classifier = getattr(FAMILIES[config.family], "CLASSIFIER", "ForSequenceClassification")
        ends = {"classes": classifier, "token_classes": "ForTokenClassification"}
        ends |= {"next_sentence": "ForPreTraining", "mlm": "ForMaskedLM"}
        head = next((head for head in ends if head in config.heads), None)
        return name if head is None else name.removesuffix("Model") + ends[head]
    return name
