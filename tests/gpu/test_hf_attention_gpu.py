"""transformers' own models over our kernels."""

from __future__ import annotations

import pytest
import torch
from test_hf_attention import DECODERS, ENCODERS, padded, registered, shaken, with_attention

__all__ = ["registered"]
pytestmark = pytest.mark.gpu
LENGTHS = [3, 40, 1, 17, 33]


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("family", [*DECODERS, *ENCODERS])
def test_states_are_as_near_to_fp64_as_those_of_sdpa(family, dtype, side, monkeypatch):
    """Twice sdpa's own error, and 4 eps of the largest number: the house's budget."""
    if family != "modernbert":  # kernels take no windows that are not causal; all others take them
        monkeypatch.setattr("eet_lab.models.hf_attention._by_torch", None)
    model, (ids, mask) = shaken((DECODERS | ENCODERS)[family]), padded(side, LENGTHS)
    found = {}
    for name, kind in (("sdpa", torch.float64), ("sdpa", dtype), ("eet", dtype)):
        placed = with_attention(model, name).to("cuda", kind)
        with torch.inference_mode():
            out = placed(input_ids=ids.cuda(), attention_mask=mask.cuda(), output_hidden_states=True)
        found[name, kind] = out.hidden_states[-1][mask.bool().cuda()].double()
    precise = found["sdpa", torch.float64]
    ours, theirs = ((found[name, dtype] - precise).abs().max().item() for name in ("eet", "sdpa"))
    assert ours <= 2 * theirs + 4 * torch.finfo(dtype).eps * precise.abs().max().item()


@pytest.mark.parametrize("family", DECODERS)
def test_a_ragged_batch_goes_on_as_with_sdpa(family):
    model, (ids, mask) = shaken(DECODERS[family]).cuda(), padded("left", LENGTHS)
    how = dict(max_new_tokens=12, do_sample=False)
    found = [
        with_attention(model, name).generate(input_ids=ids.cuda(), attention_mask=mask.cuda(), **how)[:, ids.shape[1] :]
        for name in ("sdpa", "eet")
    ]
    assert torch.equal(*found)
