"""Which windows a config gives to layers: by model_type, as transformers reads them."""

from __future__ import annotations

import json

import pytest
import torch
import transformers
from families import V, theirs

from eet_lab.engine.engine import Engine
from eet_lab.engine.settings import Settings
from eet_lab.models import load

WINDOW = {"sliding_window": 4}
USED = {"use_sliding_window": True, "max_window_layers": 0, "layer_types": None}
CASES = [
    ("llama", WINDOW, None),
    ("llama", WINDOW | {"use_sliding_window": True}, None),
    ("mistral", WINDOW, 4),
    ("mistral", WINDOW | {"use_sliding_window": False}, 4),
    ("mistral", WINDOW | {"layer_types": ["full_attention"] * 3}, None),
    ("mistral", {"sliding_window": None}, None),
    ("qwen2", WINDOW | USED, 4),
    ("qwen2", WINDOW | USED | {"use_sliding_window": False}, None),
    ("qwen3", WINDOW | USED | {"layer_types": ["full_attention"] * 3}, None),
    ("qwen3", WINDOW | USED | {"max_window_layers": 3}, None),
]


@pytest.mark.parametrize(("name", "changes", "window"), CASES)
def test_layers_have_the_window_that_transformers_gives_them(name, changes, window, tmp_path):
    model = load(_folder(name, tmp_path, changes), device="cpu")
    assert model.config.window == window
    reference = transformers.AutoModelForCausalLM.from_pretrained(tmp_path).eval()
    prompt = [(5 * place) % V for place in range(12)]
    run = Engine(model.decoder).generate([prompt], Settings(max_new_tokens=8))
    with torch.no_grad():
        logits = reference(torch.tensor([prompt + list(run.tokens[0])])).logits[0]
    assert list(run.tokens[0]) == logits[len(prompt) - 1 : -1].argmax(-1).tolist()


@pytest.mark.parametrize(
    ("name", "gone", "window"),
    [
        ("mistral", "sliding_window", 4096),
        ("qwen2", "use_sliding_window", None),
        ("qwen2", "max_window_layers", None),
    ],
)
def test_what_a_config_does_not_tell_is_as_in_transformers(name, gone, window, tmp_path):
    changes = {} if name == "mistral" else WINDOW | USED
    path = _folder(name, tmp_path, changes) / "config.json"
    told = json.loads(path.read_text())
    del told[gone]
    path.write_text(json.dumps(told))
    reference = transformers.AutoConfig.from_pretrained(tmp_path)
    assert load(tmp_path, device="cpu").config.window == window
    kinds = getattr(reference, "layer_types", None) or ["sliding_attention"]
    assert (reference.sliding_window if "sliding_attention" in kinds else None) == window


def _folder(name, folder, changes):
    theirs(name).save_pretrained(folder)
    told = json.loads((folder / "config.json").read_text()) | changes
    (folder / "config.json").write_text(json.dumps(told))
    return folder
