"""Encoders of images beside transformers: states, classes, gradients, checkpoints."""

from __future__ import annotations

import copy
from functools import cache

import pytest
import torch
import transformers
from encoders import CLASSES
from safetensors.torch import load_file
from torch.nn.functional import cross_entropy

import eet_lab
from eet_lab.bench.encoding import encode_all
from eet_lab.errors import KernelError, ModelError, PromptError, TrainingError
from eet_lab.models import ENCODER_PRESETS, load
from eet_lab.models.families import settings_of
from eet_lab.models.table import flat
from eet_lab.ops import cuda
from eet_lab.ops.types import Linear, Norm, fresh
from eet_lab.serving.service import Service
from eet_lab.technique import Recipe
from eet_lab.training import Example, Trainer

SIZES = {
    "hidden_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "intermediate_size": 48,
    "image_size": 24,
    "patch_size": 8,
    "num_channels": 2,
}
KINDS = {"body": "AutoModel", "classes": "AutoModelForImageClassification"}
RECIPES = ("", "pre_padding", "pre_padding,mask_removal,memory_reuse", "all")


@cache
def theirs(kind):
    torch.manual_seed(3)
    config = transformers.AutoConfig.for_model("vit", **SIZES, **CLASSES)
    model = getattr(transformers, KINDS[kind]).from_config(config, attn_implementation="eager").eval()
    with torch.no_grad():
        for path, parameter in model.named_parameters():
            is_norm = parameter.ndim == 1 and path.endswith("weight")
            parameter.copy_(torch.randn_like(parameter) * 0.3 + is_norm)
    return model


@cache
def ours(kind):
    return load(theirs(kind), device="cpu")


def images(num=5):
    return torch.randn(num, 2, 24, 24, generator=torch.Generator().manual_seed(1))


def close(got, exact):
    torch.testing.assert_close(got, exact, rtol=1e-4, atol=1e-5 * float(exact.detach().abs().max()))


@pytest.mark.parametrize("recipe", RECIPES)
def test_states_and_classes_are_those_of_transformers(recipe):
    """In passes of two images, and one alone."""
    with torch.no_grad():
        body, logits = theirs("body")(images()), theirs("classes")(images()).logits
    how = {"batch_tokens": 25}
    model = ours("body")
    for states, exact in zip(eet_lab.encode(model, images(), recipe, pool=None, **how).vectors, body[0], strict=True):
        close(states, exact)
    close(eet_lab.encode(model, images(), recipe, pool="mean", **how).vectors, body[0].mean(1))
    close(eet_lab.encode(model, list(images()), recipe, pool="cls", **how).vectors, body.pooler_output)
    found = eet_lab.classify(ours("classes"), images().numpy(), recipe, **how)
    close(found.logits, logits)
    assert found.labels == tuple(("bad", "fair", "good")[number] for number in logits.argmax(-1).tolist())
    close(
        eet_lab.encode(ours("classes"), images(), recipe, pool="cls").vectors, theirs("classes").vit(images())[0][:, 0]
    )


@pytest.mark.parametrize("recipe", ["", "pre_padding", "all"])
def test_gradients_are_those_of_transformers(recipe):
    model = theirs("classes")
    labels = [2, 0, 1, 1, 0]
    trainer = Trainer(
        ours("classes").network, Recipe.parse(recipe, "cpu", ours("classes").config.in_training).parts, batch_tokens=25
    )
    examples = [Example(pixels=image, labels=label) for image, label in zip(images(), labels, strict=True)]
    model.zero_grad()
    loss = cross_entropy(model(images()).logits, torch.tensor(labels))
    loss.backward()
    value, grads = trainer.gradients(examples)
    assert value == pytest.approx(loss.item(), rel=2e-5)
    wanted = copy.deepcopy(model)  # with gradients for weights, which are read under our names
    for parameter, other in zip(wanted.parameters(), model.parameters(), strict=True):
        parameter.data = other.grad.clone()
    exact = dict(flat(load(wanted, device="cpu").network))
    assert grads.keys() == exact.keys()
    for path, grad in grads.items():
        assert torch.allclose(grad, exact[path], rtol=2e-4, atol=2e-5 * max(1.0, float(exact[path].abs().max()))), path
    before = trainer.evaluate(examples)
    for _ in range(3):
        trainer.step(examples)
    assert trainer.evaluate(examples) < before


@pytest.mark.parametrize("kind", KINDS)
def test_a_checkpoint_goes_in_and_out_to_the_bit(kind, tmp_path):
    theirs(kind).save_pretrained(tmp_path / "theirs")
    model = load(tmp_path / "theirs", device="cpu")
    model.save(tmp_path / "ours")
    before, after = (load_file(tmp_path / name / "model.safetensors") for name in ("theirs", "ours"))
    assert before.keys() == after.keys() and all(torch.equal(before[name], after[name]) for name in before)
    again = getattr(transformers, KINDS[kind]).from_pretrained(tmp_path / "ours")
    assert all(torch.equal(a, b) for a, b in zip(again.parameters(), theirs(kind).parameters(), strict=True))
    assert model.config == ours(kind).config


def test_kernels_take_patches_of_any_size():
    """ViT-H/14 has 588 numbers a patch, and kernels read 8 at a time; what was normed has as many as weights do."""
    patches, w = (torch.empty(3, 588, dtype=torch.float16, device="meta") for _ in range(2))
    made = cuda.norm_linear(patches, None, Linear(w, None), empty=fresh)
    assert (made.shape, made.dtype) == ((3, 3), torch.float16)
    with pytest.raises(KernelError, match="588 channels; kernels need a multiple of 8"):
        cuda.norm_linear(patches, Norm(w[0], None, 1e-5), Linear(w, None), empty=fresh)


@pytest.mark.parametrize("name", ["vit-b-16", "vit-b-32"])
def test_presets_have_the_true_size(name):
    config = ENCODER_PRESETS[name]
    with torch.device("meta"):
        model = transformers.ViTForImageClassification(transformers.ViTConfig(**settings_of(config)))
    assert sum(p.numel() for p in model.parameters()) == config.num_params
    assert load(name, device="meta").config is config


def test_what_cannot_be_read_is_told():
    model = ours("classes")
    for given, says in [
        (torch.zeros(1, 2, 24, 16), r"Image 1 has the shape \[2, 24, 16\], but .* reads \[2, 24, 24\]"),
        (torch.zeros(1, 2, 24, 24, dtype=torch.uint8), "Image 1 has pixels that are torch.uint8"),
        (torch.full((1, 2, 24, 24), float("nan")), "not finite"),
        (torch.zeros(2, 24, 24), "Image 1 is .* reads pixels as an array"),
        ("a text", "Image 1 is .* reads pixels as an array"),
        ([[1, 2]], "Image 1 is .* reads pixels as an array"),
    ]:
        with pytest.raises(PromptError, match=says):
            eet_lab.classify(model, given)
    with pytest.raises(ModelError, match="masked language modeling head"):
        eet_lab.fill_mask(model, images())
    with pytest.raises(ModelError, match="reads images .vit., and a server's requests have texts"):
        Service(model)
    with pytest.raises(ModelError, match="is an encoder of images .vit.: it generates no text. Use eet_lab.enc"):
        eet_lab.generate(model, ["a"])
    with pytest.raises(ModelError, match="`eet-lab bench train:MODEL/b8` times its training"):
        eet_lab.compare(model)
    with pytest.raises(ModelError, match="reads images, and encode:any/t2/p3 are texts. Give an encoder of texts"):
        encode_all(model, "encode:any/t2/p3")
    trainer = Trainer(model.network)
    with pytest.raises(PromptError, match="Example 1 is a text"):
        trainer.step([Example([1, 2], 0)])
    with pytest.raises(TrainingError, match="label 3, but labels are from 0 to 2"):
        trainer.step([Example(pixels=images()[0], labels=3)])
    with pytest.raises(PromptError, match="Example 1 has pixels that are an ndarray, but they must be a tensor"):
        trainer.step([Example(pixels=images()[0].numpy(), labels=0)])
    odd = transformers.ViTConfig(**SIZES | {"patch_size": 7})
    with pytest.raises(ModelError, match="image_size is 24, which patch_size = 7 does not divide"):
        load(transformers.ViTForImageClassification(odd))
    with pytest.raises(ModelError, match="qkv_bias"):
        load(transformers.ViTModel(transformers.ViTConfig(**SIZES, qkv_bias=False)))
