"""The same ops as `reference`, over the kernels in csrc/. Nothing here waits for the device, and nothing falls back.

Types: float16, bfloat16, and but for fused_layer float32. C a multiple of 8, but for a linear without a norm; D a
multiple of 8 and at most 256.

Our kernels sum in fp32. The product of more tokens than a linear streams for is cuBLAS's, to which PyTorch's
settings apply: by default cuBLAS may reduce partial sums of 16 bits in 16 bits
(`torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction` and its bf16 twin).
"""

from __future__ import annotations

from eet_lab.ops.cuda.attention import attention, masked_attention
from eet_lab.ops.cuda.layer import fused_layer, takes_layers
from eet_lab.ops.cuda.linear import linear_residual, linear_residual_norm, norm_linear
from eet_lab.ops.cuda.norm import norm, softmax
from eet_lab.ops.cuda.tokens import advance, choose, choose_top_k, embed, embed_norm, next_token, next_token_by_torch

__all__ = [
    "advance",
    "attention",
    "choose",
    "choose_top_k",
    "embed",
    "embed_norm",
    "fused_layer",
    "linear_residual",
    "linear_residual_norm",
    "masked_attention",
    "next_token",
    "next_token_by_torch",
    "norm",
    "norm_linear",
    "softmax",
    "takes_layers",
]
