"""One file per optimization. To add one: write the file, and add its line here (the order is that of every list)."""

from eet_lab.technique import register
from eet_lab.techniques.batched_cross_attention import BatchedCrossAttention
from eet_lab.techniques.captured_steps import CapturedSteps
from eet_lab.techniques.chunked_cross_entropy import ChunkedCrossEntropy
from eet_lab.techniques.continuous_batching import ContinuousBatching
from eet_lab.techniques.cuda_graphs import CudaGraphs
from eet_lab.techniques.dependent_launch import DependentLaunch
from eet_lab.techniques.flat_optimizer import FlatOptimizer
from eet_lab.techniques.fused_activations import FusedActivations
from eet_lab.techniques.fused_cross_entropy import FusedCrossEntropy
from eet_lab.techniques.fused_embeddings import FusedEmbeddings
from eet_lab.techniques.fused_kernels import FusedKernels
from eet_lab.techniques.fused_norms import FusedNorms
from eet_lab.techniques.fused_residuals import FusedResiduals
from eet_lab.techniques.fused_sampling import FusedSampling
from eet_lab.techniques.int8_weights import Int8Weights
from eet_lab.techniques.mask_removal import MaskRemoval
from eet_lab.techniques.memory_reuse import MemoryReuse
from eet_lab.techniques.packed_prefill import PackedPrefill
from eet_lab.techniques.persistent_layers import PersistentLayers
from eet_lab.techniques.pre_padding import PrePadding
from eet_lab.techniques.prefix_caching import PrefixCaching
from eet_lab.techniques.short_attention import ShortAttention
from eet_lab.techniques.varlen_attention import VarlenAttention

for technique in (
    PrePadding,
    MaskRemoval,
    MemoryReuse,
    PackedPrefill,
    FusedKernels,
    PersistentLayers,
    FusedSampling,
    CudaGraphs,
    DependentLaunch,
    ContinuousBatching,
    PrefixCaching,
    Int8Weights,
    ChunkedCrossEntropy,
    FusedCrossEntropy,
    FlatOptimizer,
    VarlenAttention,
    ShortAttention,
    BatchedCrossAttention,
    FusedNorms,
    FusedActivations,
    FusedResiduals,
    FusedEmbeddings,
    CapturedSteps,
):
    register(technique)
