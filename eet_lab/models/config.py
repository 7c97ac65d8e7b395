"""The shape of a model, of whatever family."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from math import prod
from typing import Any, Self

from eet_lab.models.rope import Rope
from eet_lab.ops.reference import GATED
from eet_lab.ops.types import Spec

NORMS = ("norm_1", "norm_2", "norm")
LINEARS = ("qkv", "proj", "fc_1", "fc_2")
CROSS = ("cross.norm", "cross.q", "cross.kv", "cross.proj")
Shape = tuple[int, ...]


@dataclass(frozen=True)
class Config:
    """Sizes and constants of a decoder; `context` is the longest sequence in tokens.

    `biases` names the norms and linears that have one; a norm without is an RMS norm. `family` is the name under which
    checkpoints have it (`models.families`).
    """

    num_layers: int
    hidden_size: int
    num_heads: int
    ffn_size: int
    vocab_size: int
    context: int
    act: str = "gelu_tanh"
    eps: float = 1e-5
    bos_id: int = 0
    eos_id: int | None = None  # the end of a document, in training data
    eos_ids: tuple[int, ...] | None = None  # all tokens that end a text; None: eos_id, if there is one
    tied_head: bool = True
    family: str = "gpt2"
    num_kv_heads: int = 0  # 0: as many as heads
    head_dim: int = 0  # 0: that all heads together are as wide as the model
    biases: tuple[str, ...] = (*NORMS, *LINEARS)
    qk_norm: bool = False  # queries and keys of each head have an RMS norm
    window: int | None = None  # a token sees so many, itself among them
    rope: Rope | None = None  # None: positions have embeddings
    first_position: int = 0  # rows of the position embeddings before that of position 0
    stage: str = "generate"  # what such a model is run for, as techniques declare it
    half: str = "float16"  # the 16-bit type that holds what its layers compute
    unknown_bos_id: int | None = None  # the checkpoint's, where the vocabulary lacks it: an empty prompt has no token
    has_bos: bool = True  # else bos_id stands for any token in forecasts, and an empty prompt has none

    def __post_init__(self) -> None:
        object.__setattr__(self, "num_kv_heads", self.num_kv_heads or self.num_heads)
        object.__setattr__(self, "head_dim", self.head_dim or self.hidden_size // self.num_heads)

    @property
    def ends(self) -> tuple[int, ...]:
        """The tokens that end a text."""
        if self.eos_ids is not None:
            return self.eos_ids
        return () if self.eos_id is None else (self.eos_id,)

    @property
    def bos_token_id(self) -> int | None:
        """The token from which an empty prompt would start, as a config has it."""
        known = self.bos_id if self.has_bos else None
        return known if self.unknown_bos_id is None else self.unknown_bos_id

    @property
    def limit(self) -> str:
        """What a longer text would pass, for an error."""
        is_dynamic = self.rope is not None and self.rope.kind == "dynamic"
        why = " (rope scaling 'dynamic' is not run beyond: its frequencies would change as the KV cache grows)"
        return f"model's context of {self.context:,} tokens{why if is_dynamic else ''}"

    @property
    def in_training(self) -> Self:
        """The same sizes, of a model that is trained."""
        return replace(self, stage="train")

    @property
    def spec(self) -> Spec:
        """What attention has to know."""
        rope, factor = self.rope is not None, self.rope.attention_factor if self.rope else 1.0
        sizes = self.num_heads, self.num_kv_heads, self.head_dim
        return Spec(*sizes, window=self.window, rope=rope, rope_factor=factor)

    @property
    def has_position_embedding(self) -> bool:
        """Whether positions have embeddings."""
        return self.rope is None

    def layer_shapes(self) -> dict[str, Shape]:
        """The shape of each tensor of a layer, by its path in `Layer`."""
        C, D, F = self.hidden_size, self.head_dim, self.ffn_size
        width, inner = self.num_heads * D, F * (2 if self.act in GATED else 1)
        weights: dict[str, Shape] = {"norm_1": (C,), "qkv": (width + 2 * self.num_kv_heads * D, C), "proj": (C, width)}
        weights |= {"norm_2": (C,), "fc_1": (inner, C), "fc_2": (C, F)}
        if self.qk_norm:
            weights |= {"q_norm": (D,), "k_norm": (D,)}
        return self._with_biases(weights)

    def outer_shapes(self) -> dict[str, Shape]:
        """The shape of each tensor beside the layers, by its path in `Decoder`; a tied head is not there."""
        table = (self.vocab_size, self.hidden_size)
        shapes: dict[str, Shape] = {"token_embedding": table}
        if self.has_position_embedding:
            shapes["position_embedding"] = (self.first_position + self.context, self.hidden_size)
        shapes |= self._with_biases({"norm": (self.hidden_size,)})
        return shapes if self.tied_head else shapes | {"head.weight": table}

    def _with_biases(self, weights: Mapping[str, Shape]) -> dict[str, Shape]:
        shapes: dict[str, Shape] = {}
        for part, shape in weights.items():
            shapes[f"{part}.weight"] = shape
            if part in self.biases:
                shapes[f"{part}.bias"] = shape[:1]
        return shapes

    def stacks(self) -> dict[str, tuple[int, dict[str, Shape]]]:
        """How many layers there are, and the shapes of one, by what their paths begin with."""
        return {"": (self.num_layers, self.layer_shapes())}

    @property
    def num_params(self) -> int:
        """Parameters, with tied embeddings counted once."""
        stacks = (num * sum(map(prod, shapes.values())) for num, shapes in self.stacks().values())
        return sum(stacks) + sum(map(prod, self.outer_shapes().values()))

    def kv_bytes_per_token(self, element_bytes: int) -> int:
        """Bytes that one token adds to the KV cache."""
        return 2 * self.num_layers * self.num_kv_heads * self.head_dim * element_bytes


@dataclass(frozen=True)
class EncoderConfig(Config):
    """The same of an encoder: all tokens of a text see each other, and norms follow the residuals.

    `context` is the longest text in tokens. `heads` names what the checkpoint has of `HEADS`; `labels` are the names
    of its classes.
    """

    num_types: int = 2  # of tokens, such as those of a first and of a second sentence; 0: it tells none apart
    heads: tuple[str, ...] = ()
    labels: tuple[str, ...] = ()
    problem_type: str | None = None  # what transformers takes a text's classes for; None: one of them
    mlm_act: str = "gelu"  # of `mlm_transform`
    class_act: str | None = None  # of the linear before the classes; None: these read what the pooler makes
    stage: str = "encode"

    @property
    def spec(self) -> Spec:
        """What attention has to know."""
        return super().spec._replace(causal=False)

    def outer_shapes(self) -> dict[str, Shape]:
        """The shape of each tensor beside the layers, by its path in `Encoder`, without a tied head's weight."""
        table, C = (self.vocab_size, self.hidden_size), self.hidden_size
        shapes: dict[str, Shape] = {"token_embedding": table}
        shapes["position_embedding"] = (self.first_position + self.context, C)
        if self.num_types:
            shapes["type_embedding"] = self.num_types, C
        shapes |= _affine(norm=(C,))
        for head in self.heads:
            shapes |= self.head_shapes(head)
        return shapes

    def head_shapes(self, head: str) -> dict[str, Shape]:
        """The shape of each tensor of one of `HEADS`."""
        V, C = self.vocab_size, self.hidden_size
        if head == "mlm":
            own = {} if self.tied_head else {"head.weight": (V, C)}
            return _affine(mlm_transform=(C, C), mlm_norm=(C,)) | own | {"head.bias": (V,)}
        if head == "classes":
            before = {} if self.class_act is None else _affine(class_dense=(C, C))
            return before | _affine(classes=(len(self.labels), C))
        linears = {"pooler": (C, C), "next_sentence": (2, C), "token_classes": (len(self.labels), C)}
        return _affine(**{head: linears[head]})


@dataclass(frozen=True)
class VisionConfig(EncoderConfig):
    """The same of an encoder of images, which reads them as patches behind a class token; its norms are before layers.

    `context` is the class token and all patches of an image. Sizes are in pixels.
    """

    image_size: int = 224
    patch_size: int = 16
    num_channels: int = 3
    num_types: int = 0

    @property
    def pixels(self) -> Shape:
        """The shape of an image."""
        return self.num_channels, self.image_size, self.image_size

    def outer_shapes(self) -> dict[str, Shape]:
        """The shape of each tensor beside the layers, by its path in `VisionEncoder`."""
        C, P = self.hidden_size, self.patch_size
        shapes: dict[str, Shape] = {"cls_token": (1, 1, C), "position_embedding": (1, self.context, C)}
        shapes |= {"patches.weight": (C, self.num_channels, P, P), "patches.bias": (C,)} | _affine(norm=(C,))
        for head in self.heads:
            shapes |= self.head_shapes(head)
        return shapes


@dataclass(frozen=True)
class Seq2SeqConfig(Config):
    """The same of a decoder with an encoder of as wide layers, to whose states each of its layers attends.

    `num_layers` are the decoder's. What it generates begins after `start_id`.
    """

    encoder_layers: int = 0
    post_norm: bool = False  # norms follow the residuals
    embedding_norm: bool = False  # embeddings have a norm
    embedding_scale: float = 1.0  # of token embeddings
    head_scale: float = 1.0  # of the states that the head reads
    head_bias: bool = False  # the checkpoint has what is added to logits; it is not trained
    attention_scale: float | None = None  # of scores; None: head_dim ** -0.5
    positions: str = "learned"  # or "sinusoidal", or "relative": a bias of scores
    num_buckets: int = 0  # of relative positions
    max_distance: int = 0
    pad_id: int = 0  # stands in the decoder for labels that are ignored
    trains_pads: bool = True  # whether reading the pad token trains its embedding
    start_id: int = 0
    forced_bos_id: int | None = None  # the first token that is generated
    forced_eos_id: int | None = None  # the last one, where max_new_tokens ends a text
    suppressed: tuple[int, ...] = ()  # tokens that are never generated
    stage: str = "seq2seq"

    @property
    def spec(self) -> Spec:
        """What the decoder's attention to its own tokens has to know."""
        return super().spec._replace(scale=self.attention_scale, max_distance=self.max_distance)

    @property
    def encoder_spec(self) -> Spec:
        """The same of the encoder's."""
        return self.spec._replace(causal=False)

    @property
    def cross_spec(self) -> Spec:
        """The same of the decoder's attention to the encoder."""
        return self.encoder_spec._replace(max_distance=0)

    @property
    def padding_id(self) -> int | None:
        """The token whose embedding is not trained by being read, if there is one."""
        return None if self.trains_pads else self.pad_id

    @property
    def has_position_embedding(self) -> bool:
        return self.positions != "relative"

    def layer_shapes(self) -> dict[str, Shape]:
        """The shape of each tensor of a decoder's layer."""
        C, width, kv = self.hidden_size, self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        cross: dict[str, Shape] = {"cross.norm": (C,), "cross.q": (width, C), "cross.kv": (2 * kv, C)}
        return super().layer_shapes() | self._with_biases(cross | {"cross.proj": (C, width)})

    def stacks(self) -> dict[str, tuple[int, dict[str, Shape]]]:
        encoder, decoder = super().layer_shapes(), self.layer_shapes()
        return {"encoder.": (self.encoder_layers, encoder), "decoder.": (self.num_layers, decoder)}

    def outer_shapes(self) -> dict[str, Shape]:
        """The shape of each tensor beside the layers, by its path in `Seq2Seq`; a tied head is not there."""
        V, C = self.vocab_size, self.hidden_size
        stack: dict[str, Shape] = {}
        if self.positions == "learned":
            stack["position_embedding"] = (self.first_position + self.context, C)
        if self.num_buckets:
            stack["bias"] = (self.num_buckets, self.num_heads)
        names = ["embedding_norm"] * self.embedding_norm + ["norm"] * (not self.post_norm)
        stack |= self._with_biases({name: (C,) for name in names})
        shapes: dict[str, Shape] = {"token_embedding": (V, C)}
        shapes |= {f"{name}.{path}": shape for name in ("encoder", "decoder") for path, shape in stack.items()}
        if not self.tied_head:
            shapes["head.weight"] = (V, C)
        return shapes | ({"head.bias": (V,)} if self.head_bias else {})


HEADS = {
    "pooler": "a pooler",
    "mlm": "a masked language modeling head",
    "next_sentence": "a next sentence head",
    "classes": "a classification head",
    "token_classes": "a token classification head",
}
"""What an encoder may have on top of its layers."""


def _affine(**parts: Shape) -> dict[str, Shape]:
    return {
        f"{name}.{kind}": s for name, shape in parts.items() for kind, s in (("weight", shape), ("bias", shape[:1]))
    }


_GPT2: dict[str, Any] = {"bos_id": 50256, "eos_id": 50256}
_LLAMA: dict[str, Any] = {"act": "swiglu", "biases": (), "family": "llama", "bos_id": 128000, "eos_id": 128001}
_QWEN3: dict[str, Any] = _LLAMA | {"family": "qwen3", "bos_id": 151643, "eos_id": 151645}
_QWEN3 |= {"eps": 1e-6, "head_dim": 128, "num_kv_heads": 8, "qk_norm": True, "rope": Rope(1e6)}


def _llama3(factor: float) -> Rope:
    """Of Llama 3.1 and later."""
    numbers = (("factor", factor), ("low_freq_factor", 1.0), ("high_freq_factor", 4.0))
    return Rope(500000.0, "llama3", (*numbers, ("original_max_position_embeddings", 8192)))


PRESETS = {
    "gpt2": Config(12, 768, 12, 3072, 50257, 1024, **_GPT2),
    "gpt2-medium": Config(24, 1024, 16, 4096, 50257, 1024, **_GPT2),
    "gpt2-xl": Config(48, 1600, 25, 6400, 50257, 1024, **_GPT2),
    "l16-h1024": Config(16, 1024, 16, 4096, 50257, 1024, **_GPT2),
    "l24-h2048": Config(24, 2048, 16, 8192, 50257, 1024, **_GPT2),
    "opt-1.3b": Config(24, 2048, 32, 8192, 50272, 2048, "relu", bos_id=2, eos_id=2, family="opt", first_position=2),
    "llama-1b": Config(16, 2048, 32, 8192, 128256, 131072, **_LLAMA, num_kv_heads=8, rope=_llama3(32.0)),
    "llama-8b": Config(
        32, 4096, 32, 14336, 128256, 131072, **_LLAMA, num_kv_heads=8, rope=_llama3(8.0), tied_head=False
    ),
    "qwen3-0.6b": Config(28, 1024, 16, 3072, 151936, 40960, **_QWEN3),
    "qwen3-8b": Config(36, 4096, 32, 12288, 151936, 40960, **_QWEN3, tied_head=False),
}
"""True sizes with random weights: for timing, their text means nothing."""

_BERT: dict[str, Any] = {"act": "gelu", "eps": 1e-12, "family": "bert", "heads": ("pooler",)}


def _vit(patch_size: int) -> VisionConfig:
    """ViT-B for images of 224 pixels and ImageNet's classes."""
    labels = tuple(f"LABEL_{number}" for number in range(1000))
    sizes: dict[str, Any] = {"act": "gelu", "eps": 1e-12, "family": "vit", "heads": ("classes",), "labels": labels}
    return VisionConfig(12, 768, 12, 3072, 0, 1 + (224 // patch_size) ** 2, **sizes, patch_size=patch_size)


ENCODER_PRESETS = {
    "bert-base": EncoderConfig(12, 768, 12, 3072, 30522, 512, **_BERT),
    "bert-large": EncoderConfig(24, 1024, 16, 4096, 30522, 512, **_BERT),
    "vit-b-16": _vit(16),
    "vit-b-32": _vit(32),
}
"""The same of encoders, of texts and of images."""


def _transformer(hidden_size: int, num_heads: int, ffn_size: int) -> Seq2SeqConfig:
    """Of Vaswani et al. (2017), with the vocabulary of LightSeq2's translation from English into German."""
    sizes: dict[str, Any] = {"act": "relu", "bos_id": 0, "eos_id": 2, "pad_id": 1, "start_id": 2, "family": "marian"}
    layers: dict[str, Any] = {"encoder_layers": 6, "post_norm": True, "trains_pads": False, "positions": "sinusoidal"}
    layers |= {"biases": (*NORMS, *LINEARS, *CROSS, "embedding_norm"), "embedding_scale": hidden_size**0.5}
    return Seq2SeqConfig(6, hidden_size, num_heads, ffn_size, 40480, 1024, **sizes, **layers)


SEQ2SEQ_PRESETS = {
    "transformer-base": _transformer(512, 8, 2048),
    "transformer-big": _transformer(1024, 16, 4096),
}
"""The same of encoder-decoders."""
