"""The softmax of `stream_warp.cuh` and `merge.cuh` in numpy's fp32: warps whose first keys, or all, are hidden."""

from __future__ import annotations

import re

import numpy as np
import pytest

from eet_lab.paths import csrc_dir

KEYS = 16  # of a warp and stage


def unscored() -> np.float32:
    """The maximum that a warp begins with, as its source says."""
    warp, shared = ((csrc_dir() / "eet" / f"{name}.cuh").read_text() for name in ("stream_warp", "attention"))
    [name] = re.findall(r"\bmax = (k\w+);", warp)
    [value] = re.findall(rf"constexpr float {name} = (\S+)f;", shared)
    return np.float32(float.fromhex(value) if "0x" in value else value)


def left_by_a_warp(score, value, exponent):
    """`weigh` and `leave`: the maximum in units of log2(e), the sum of weights, and the output."""
    largest, slack, total, out = unscored(), np.float32(8) / exponent, np.float32(0), np.float32(0)
    for first in range(0, len(score), KEYS):
        own = score[first : first + KEYS]
        if own.max() > largest + slack:
            shrink = np.exp2((largest - max(largest, own.max())) * exponent)
            largest, total, out = max(largest, own.max()), total * shrink, out * shrink
        weight = np.exp2(own * exponent - largest * exponent)
        total, out = total + weight.sum(), out + weight @ value[first : first + KEYS]
    return largest * exponent, total, out


def merged(parts):
    """What comes of parts, itself a part."""
    greatest = max(np.float32(-3.4028234e38), *(part[0] for part in parts))
    shares = [np.exp2(part[0] - greatest) for part in parts]
    return greatest, *(sum(share * part[i] for share, part in zip(shares, parts, strict=True)) for i in (1, 2))


@pytest.mark.parametrize("scale", [0.125, 0.6931, 1.0, 8.0])
@pytest.mark.filterwarnings("ignore:overflow")
def test_hidden_keys_weigh_nothing_whatever_the_scale_of_scores(scale):
    exponent, draw = np.float32(scale) * np.float32(1.4426950408889634), np.random.default_rng(0)
    score, value = draw.normal(size=(2, 8, 3 * KEYS)).astype(np.float32)
    score[:, : 2 * KEYS], score[0, 2 * KEYS :] = -np.inf, -np.inf  # of the first warp all, of the others two stages
    score[4:] = -np.inf  # a block of the cluster that sees none
    blocks = [
        [left_by_a_warp(*pair, exponent) for pair in zip(s, v, strict=True)]
        for s, v in ((score[:4], value[:4]), (score[4:], value[4:]))
    ]
    _, total, out = merged([merged(warps) for warps in blocks])
    weight = np.exp2((score - score.max()).astype(np.float64) * exponent)
    assert out / total == pytest.approx((weight * value).sum() / weight.sum(), rel=1e-5)
