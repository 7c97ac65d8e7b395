"""What is run: a part a row of the results' tables, with the seconds that it takes on an H200.

What is wanted most comes first, since a budget may end before the last. Peers are where they say something:
transformers uncompiled takes 10 to 20 ms a token whatever the model, and each of its compiled modes half a minute to
compile.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from eet_lab.bench.rows import OURS
from eet_lab.bench.serving import HF, HF_SERVE, HTTP, HTTP_CACHED
from eet_lab.bench.train_ops import TRAIN_CASES
from h200.policies import DOCUMENT_AXES, DOCUMENTS, highest_loads, simulated_beside_measured
from h200.recorded import recorded_compare, recorded_ladder
from h200.session import Session
from h200.timelines import recorded_timeline
from h200.work import (
    accuracy_of,
    allocators,
    benchmarked,
    build,
    encoded,
    fused,
    machine,
    ops,
    served,
    streamed,
    trained,
    with_dropout,
)

HEADLINE = ("pre_padding", "mask_removal", "memory_reuse")
ALONE = ("baseline", *HEADLINE, ",".join(HEADLINE), "all")
ONE_BY_ONE = ("all", "all,-dependent_launch", "all,-persistent_layers")
LARGE = (
    *(f"op:norm_linear/t{tokens}/n36864/c12288" for tokens in (1, 8)),
    *(f"op:linear_residual/t{tokens}/n12288/c49152" for tokens in (1, 8)),
    *(f"op:norm_linear/t{tokens}/n16384/c4096/gelu_tanh" for tokens in (1, 3, 16)),
    *(f"op:linear_residual/t{tokens}/n4096/c16384" for tokens in (1, 3)),
    "op:norm_linear/t9/n24576/c8192",
    "op:decode_attention/b1/kv32768/h25/d64",
    "op:prefill_attention/b1/s32768/h4/d64",
)
"""Hidden sizes and prompts far beyond the models that are benchmarked."""
STREAMED = (
    ("all", True),
    ("all,-cuda_graphs", True),
    # The last one has no dependent launch, which needs a cache that lies still; this has none either.
    ("all,-cuda_graphs,-dependent_launch", True),
    ("all,-cuda_graphs", False),
    ("all,-memory_reuse", False),
)
TRAINED_OPS = tuple(f"op:{case.name}" for case in TRAIN_CASES)
SMALL_TRAINED_OPS = (
    "op:norm_backward/t9/c64",
    "op:cross_entropy/t9/v50",
    "op:linear_cross_entropy/t9/c16/v50",
    "op:attention_backward/b2/s9/h2/d8",
)
SDPA = "hf-sdpa"
BOTH = (SDPA, "hf-compile")
TRAIN_PEERS, TUNED = ("hf-eager", *BOTH, "hf-reduce-overhead"), "hf-max-autotune"
ENDS = ("baseline", "all")
STATIC = ("hf-static-compile",)
PAGED, SHARING = "memory_reuse:kv=paged", ",prefix_caching"
COMPILED = (*STATIC, "torch-cuda-graphs")


class Part(NamedTuple):
    """`seconds` is an estimate; the report has what it took."""

    seconds: int
    run: Callable[[Session], Any]


PARTS: dict[str, Part] = {
    "build": Part(15, build),
    "machine": Part(5, machine),
    "bench-xl-b1": Part(120, benchmarked("gpt2-xl/b1/p128/n128", recipes=ONE_BY_ONE)),
    "bench-gpt2-b1": Part(60, benchmarked("gpt2/b1/p128/n128", recipes=ONE_BY_ONE, repeats=5)),
    "bench-xl-int8": Part(20, benchmarked("gpt2-xl/b1/p128/n128", recipes=("all", "all,int8_weights"), peers=())),
    "bench-l16": Part(40, benchmarked("l16-h1024/b4/p512/n512", peers=COMPILED)),
    "bench-l24": Part(55, benchmarked("l24-h2048/b4/p512/n512", peers=COMPILED)),
    "bench-xl-ragged": Part(60, benchmarked("gpt2-xl/b16/p16-960/n64", peers=("hf-sdpa", "torch-cuda-graphs"))),
    "bench-xl-b8": Part(130, benchmarked("gpt2-xl/b8/p512/n128", peers=("hf-sdpa", *COMPILED))),
    "bench-xl-b32": Part(90, benchmarked("gpt2-xl/b32/p64-500/n64", peers=COMPILED)),
    "bench-llama-b1": Part(40, benchmarked("llama-1b/b1/p128/n128", peers=STATIC)),
    "bench-llama-b16": Part(50, benchmarked("llama-1b/b16/p1024/n128", peers=STATIC)),
    "bench-qwen3-b1": Part(50, benchmarked("qwen3-0.6b/b1/p128/n128", peers=STATIC)),
    "bench-qwen3-8b": Part(100, benchmarked("qwen3-8b/b1/p128/n64", peers=STATIC)),
    # The type that these families' checkpoints have.
    "bf16-llama-qwen3": Part(
        120, benchmarked("llama-1b/b1/p128/n128", "qwen3-0.6b/b1/p128/n128", peers=STATIC, dtype="bfloat16")
    ),
    # Its tuning takes 150 seconds and more: a part each, so that no other row waits for it.
    **{
        f"compiled-{name}": Part(240, benchmarked(workload, peers=("torch-compile",)))
        for name, workload in (
            ("xl-b32", "gpt2-xl/b32/p64-500/n64"),
            ("llama-b1", "llama-1b/b1/p128/n128"),
            ("llama-b16", "llama-1b/b16/p1024/n128"),
            ("qwen3-b1", "qwen3-0.6b/b1/p128/n128"),
        )
    },
    "serve-llama": Part(
        200,
        served(
            "serve:llama-1b/r256/p100-1024/n512/all",
            *(f"all,continuous_batching:rows={rows}:budget=2048:chunk=1024" for rows in (64, 256)),
        ),
    ),
    # Half of the time each: transformers within a process, and as a server.
    **{
        name: Part(
            330,
            served(
                "serve:llama-1b/r256/p100-1024/n100-1024/all",
                "all,continuous_batching:rows=256:budget=2048:chunk=1024",
                providers=(OURS, HTTP, peer),
                repeats=1,
            ),
        )
        for name, peer in (("serve-llama-http", HF), ("serve-llama-hf-serve", HF_SERVE))
    },
    # One request where there is room for many.
    **{
        f"serve-one-{name}": Part(
            25,
            served(
                f"serve:{model}/r1/p128/n128/all",
                "all,continuous_batching:rows=256:budget=2048:chunk=1024",
                repeats=5,
            ),
        )
        for name, model in (("gpt2", "gpt2"), ("llama", "llama-1b"))
    },
    # Both in pages, so that they differ in what is shared alone; then asked again of a server that keeps its answers.
    "serve-prefix": Part(
        60,
        served(
            "serve:llama-1b/r128/p1056-1280/shared1024/n32-64/all",
            *(f"all,{PAGED},continuous_batching:rows=64:budget=2048:chunk=1024{more}" for more in ("", SHARING)),
            providers=(OURS, HTTP, HTTP_CACHED),
            repeats=5,
            smoke="serve:smoke/r5/p36-50/shared34/n2-4/all",
        ),
    ),
    "encode-bert": Part(60, encoded("encode:bert-base/t2048/p5-500", "pre_padding", "all")),
    "policies-bert": Part(220, highest_loads("bert-base")),
    "simulated-llama": Part(
        90,
        simulated_beside_measured(
            "llama-1b", "all,continuous_batching:rows=64:budget=2048:chunk=1024", chunks=(1024, 256)
        ),
    ),
    "simulated-documents": Part(
        180,
        simulated_beside_measured(
            "llama-1b",
            "all,continuous_batching:rows=64:budget=8192:chunk=8192",
            chunks=(8192, 512),
            lengths=DOCUMENTS,
            axes=DOCUMENT_AXES,
            requests=3_000,
            file="documents-llama-1b",
        ),
    ),
    "accuracy-demo": Part(
        20, accuracy_of("accuracy:demo/b16/p64/n64", "all", "all,-persistent_layers", "all,int8_weights")
    ),
    "train-gpt2": Part(200, trained(with_dropout("gpt2/b8/s1024", BOTH, BOTH), *ENDS)),
    # max-autotune alone tries its products in other ways for more than five minutes.
    "train-tuned-gpt2": Part(560, trained({"train:gpt2/b8/s1024": (*TRAIN_PEERS, TUNED)}, "all")),
    "train-gpt2-b64": Part(110, trained({"train:gpt2/b64/s1024": BOTH}, "all")),
    # Liger has kernels for Llama, Mistral and Qwen alone.
    "train-qwen3": Part(90, trained({"train:qwen3-0.6b/b4/s1024": (*BOTH, "hf-liger")}, "all")),
    "train-bert": Part(520, trained(with_dropout("bert-base/b32/s128", (*TRAIN_PEERS, TUNED), BOTH), *ENDS)),
    # Like MRPC, whose sentences have 53 tokens on average.
    "train-bert-ragged": Part(60, trained({"train:bert-base/b32/s5-101": BOTH}, *ENDS)),
    # Without techniques a step with dropout takes many seconds.
    "train-vit": Part(120, trained(with_dropout("vit-b-32/b128", BOTH, BOTH), "all")),
    "train-big": Part(130, trained(with_dropout("transformer-big/b8/s64", BOTH, BOTH), *ENDS)),
    "train-base": Part(130, trained(with_dropout("transformer-base/b64/s64", BOTH, BOTH), *ENDS)),
    "fusion-gpt2": Part(60, fused("train:gpt2/b8/s1024")),
    "train-ops": Part(180, ops(*TRAINED_OPS, smoke=SMALL_TRAINED_OPS, dtype="bfloat16")),
    "sweep-l16": Part(60, benchmarked("l16-h1024/b4/p128/n896", "l16-h1024/b4/p896/n128", peers=COMPILED)),
    "ops-decode-b1": Part(8, ops("op:decode_attention/b1/kv1024/h25/d64")),
    "ops-decode": Part(60, ops("op:decode_attention")),
    "ops-prefill": Part(45, ops("op:prefill_attention")),
    "ops-linear": Part(60, ops("op:norm_linear", "op:linear_residual")),
    "ops-int8": Part(40, ops("op:int8_norm_linear", "op:int8_linear_residual")),
    "ops-rows": Part(40, ops("op:norm", "op:softmax")),
    "ops-tokens": Part(60, ops("op:embed", "op:choose", "op:choose_top_k", "op:next_token")),
    "ops-large": Part(60, ops(*LARGE)),
    "memory-stream": Part(180, streamed("gpt2-xl/r200/p1-960/n16", *STREAMED)),
    "allocators": Part(15, allocators),
    "compare-xl": Part(85, recorded_compare("gpt2-xl/b8/p16-128/n64")),
    "ladder-xl": Part(215, recorded_ladder("gpt2-xl/b8/p16-128/n64")),
    "ladder-xl-one-row": Part(215, recorded_ladder("gpt2-xl/b1/p128/n128")),
    "compare-demo": Part(25, recorded_compare("demo/b8/p16-128/n64")),
    "int8-demo": Part(25, recorded_compare("demo/b8/p16-128/n64", "all,int8_weights", "all", "-int8")),
    "ladder-demo": Part(55, recorded_ladder("demo/b8/p16-128/n64")),
    # After what they are put into.
    "timeline-xl": Part(40, recorded_timeline("gpt2-xl/b8/p16-128/n64", "compare-gpt2-xl")),
    "timeline-xl-one-row": Part(40, recorded_timeline("gpt2-xl/b1/p128/n128", "ladder-gpt2-xl-one-row")),
    "timeline-demo": Part(15, recorded_timeline("demo/b8/p16-128/n64", "compare-demo")),
    "toggles-gpt2": Part(
        90, benchmarked("gpt2/b8/p16-512/n128", recipes=ALONE, peers=("hf-sdpa", "hf-static-compile"))
    ),
    "toggles-xl": Part(
        240, benchmarked("gpt2-xl/b8/p16-512/n128", recipes=ALONE, repeats=2, peers=("hf-static-compile",))
    ),
}
"""By name: `--only bench-xl` runs those whose name has the word."""
