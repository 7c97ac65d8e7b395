"""ViT: an encoder of images, whose layers norm before attention and before the feed-forward network, as GPT-2's do."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from eet_lab.errors import ModelError
from eet_lab.models.config import VisionConfig
from eet_lab.models.families import reading
from eet_lab.models.table import Entry, affine, one

MODEL_TYPES = {"vit": ("ViT", "ViTModel")}
CLASSIFIER = "ForImageClassification"
PREFIXES = ("vit.",)
BUFFERS = ()
HEADS = ("classifier.",)
LAYERS = "num_hidden_layers"
SIZES = (LAYERS, "hidden_size", "num_attention_heads", "intermediate_size", "image_size", "patch_size")
RENAMED = {  # of live models since transformers 5.20, which checkpoints do not have
    r"^layers\.": "encoder.layer.",
    r"attention\.([qkv])_proj": lambda m: f"attention.attention.{dict(q='query', k='key', v='value')[m[1]]}",
    r"attention\.o_proj": "attention.output.dense",
    r"mlp\.fc1": "intermediate.dense",
    r"mlp\.fc2": "output.dense",
}


def config(settings: Mapping[str, Any]) -> VisionConfig:
    """Read a checkpoint's config. Errors: ModelError."""
    hidden, heads = reading.heads(settings, "hidden_size", "num_attention_heads", SIZES)
    image, patch = (reading.size(settings, name, SIZES) for name in ("image_size", "patch_size"))
    pooler = reading.size(settings, "pooler_output_size", SIZES, default=hidden)
    act = settings.get("pooler_act")
    beyond = {
        "queries, keys and values without a bias (qkv_bias = false)": settings.get("qkv_bias") is False,
        f"a pooler of {pooler} outputs (pooler_output_size)": pooler != hidden,
        f"a pooler with {act!r} (pooler_act)": act not in (None, "tanh"),
    }
    reading.refuse(settings, beyond)
    if image % patch:
        raise ModelError(
            f"image_size is {image}, which patch_size = {patch} does not divide; the checkpoint's config is damaged."
        )
    return VisionConfig(
        num_layers=reading.size(settings, LAYERS, SIZES),
        hidden_size=hidden,
        num_heads=heads,
        ffn_size=reading.size(settings, "intermediate_size", SIZES),
        vocab_size=0,
        context=1 + (image // patch) ** 2,
        act=reading.choice(settings, "hidden_act", "gelu", reading.ENCODER_ACTIVATIONS),
        eps=reading.number(settings, "layer_norm_eps", 1e-12),
        tied_head=False,
        family="vit",
        **reading.classes(settings),
        image_size=image,
        patch_size=patch,
        num_channels=reading.size(settings, "num_channels", SIZES, default=3),
    )


def settings(config: VisionConfig) -> dict[str, Any]:
    """The other way round."""
    return {
        "num_hidden_layers": config.num_layers,
        "hidden_size": config.hidden_size,
        "num_attention_heads": config.num_heads,
        "intermediate_size": config.ffn_size,
        "hidden_act": reading.named(config.act, reading.ENCODER_ACTIVATIONS),
        "layer_norm_eps": config.eps,
        "image_size": config.image_size,
        "patch_size": config.patch_size,
        "num_channels": config.num_channels,
        **reading.classes_settings(config),
    }


def table(config: VisionConfig) -> dict[str, Entry]:
    """Queries, keys and values are tensors of their own."""
    h, at = "encoder.layer.*.", "encoder.layer.*.attention."
    return {
        **affine("patches", "embeddings.patch_embeddings.projection"),
        **one("cls_token", "embeddings.cls_token"),
        **one("position_embedding", "embeddings.position_embeddings"),
        **affine("layers.*.norm_1", h + "layernorm_before"),
        **affine("layers.*.qkv", *(f"{at}attention.{x}" for x in ("query", "key", "value")), how="cat"),
        **affine("layers.*.proj", at + "output.dense"),
        **affine("layers.*.norm_2", h + "layernorm_after"),
        **affine("layers.*.fc_1", h + "intermediate.dense"),
        **affine("layers.*.fc_2", h + "output.dense"),
        **affine("norm", "layernorm"),
        **affine("pooler", "pooler.dense"),
        **affine("classes", "classifier"),
    }
