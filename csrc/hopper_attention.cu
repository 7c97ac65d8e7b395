// Attention of many new tokens a row without a mask, on Hopper's own tensor cores and copy engine (sm_90a).
// B rows, T tokens, H heads, G KV heads, D head dim, K columns of the KV cache.
#include <algorithm>
#include <type_traits>

#include "eet/launch.cuh"
#include "eet/mbarrier.cuh"
#include "eet/prefill_attender.cuh"
#include "eet/prefill_loader.cuh"

namespace {

// Why      scores of a whole prompt do not fit into fast memory; only warpgroup products reach this GPU's matrix rate
// Mapping  warpgroups of 64 queries of one head against tiles of keys, which one warp brings; their softmax hides each
//          other's products. Grid: blocks of queries in the longest row * H * B, see PrefillTask
// Traffic  q and out once; keys and values once for each block of queries, mostly from L2; new ones to the cache, once
// Needs    sm_90a; D a multiple of 8, at most 256 (zeros up to 64, 128 or 256); a row's columns are consecutive
// Numerics scores, softmax and sums in fp32; weights, at most 2^8, are rounded to T for the tensor cores
// Source   Shah et al. 2024, FlashAttention-3; the first key is num_pad itself, so pads take no part at all
template <typename T, typename P>
__global__ void __launch_bounds__(P::kThreads, P::kBlocks)
    hopper_prefill_kernel(const __grid_constant__ eet::PrefillArgs<T> a) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  extern __shared__ __align__(1024) char shared[];
  auto& s = *reinterpret_cast<eet::PrefillShared<T, P>*>(shared);
  if (threadIdx.x == 0) {
    eet::barrier_init(&s.queries_filled, 1), eet::barrier_init(&s.last_filled, 1);
    for (int stage = 0; stage < P::kStages; ++stage) {
      eet::barrier_init(&s.filled[stage], 1), eet::barrier_init(&s.emptied[stage], P::kWarps);
    }
    eet::publish_to_engines();
    s.task = eet::PrefillTask(a, blockIdx.x, P::kQueries, P::kKeys, P::kCausal);
  }
  if (threadIdx.x == 32) eet::prefetch_map(a.queries), eet::prefetch_map(a.keys), eet::prefetch_map(a.values);
  __syncthreads();
  if (s.task.num_queries <= 0) return;
  if (threadIdx.x / 128 == P::kGroups) {
    if constexpr (P::kAlone) eet::give_registers<P::kLoader>();
    if (threadIdx.x / 32 == P::kWarps) eet::PrefillLoader<T, P>(a, s).load();
  } else {
    if constexpr (P::kAlone) eet::take_registers<P::kAttender>();
    eet::PrefillAttender<T, P>(a, s).attend();
  }
#endif
}

template <typename P, typename T>
cudaError_t launch(eet::PrefillArgs<T> a, const T* qkv, void* keys, void* values, const int64_t (&strides)[3],
                   int num_tokens, int K, int longest, cudaStream_t stream) {
  const int H = a.heads.H, G = a.heads.G, D = a.heads.D;
  const auto tokens = [&](CUtensorMap* map, int positions) {
    const int64_t width = int64_t(H + 2 * G) * D;
    return eet::make_tensor_map(map, qkv, D, H + 2 * G, D, num_tokens, width, 1, width * num_tokens, positions);
  };
  const auto cache = [&](CUtensorMap* map, const void* start) {
    return eet::make_tensor_map(map, start, D, G, strides[1], K, strides[2], a.B, strides[0], P::kKeys);
  };
  if (cudaError_t error = tokens(&a.queries, P::kQueries)) return error;
  if (cudaError_t error = tokens(&a.keys, P::kKeys)) return error;
  if (a.appends || !a.all_new) {
    if (cudaError_t error = cache(&a.new_keys, keys)) return error;
    if (cudaError_t error = cache(&a.new_values, values)) return error;
  }
  a.values = a.keys;
  if (!a.all_new) a.keys = a.new_keys, a.values = a.new_values;
  a.num_blocks = eet::ceil_div(longest, P::kQueries);
  a.seen_whole = std::max(0, a.window - 14 - P::kKeys);  // the last of its 16 queries sees 15 more
  // Sections of about 16 MiB, a third of L2, and of about the same size: a small last one would keep few blocks busy.
  const int64_t num_heads = int64_t(a.B) * H, num_sections = std::max<int64_t>(1, num_heads * K * D * 4 >> 24);
  a.heads_together = int((num_heads + num_sections - 1) / num_sections);
  const int shared_bytes = sizeof(eet::PrefillShared<T, P>);
  return eet::launch(hopper_prefill_kernel<T, P>,
                     {dim3(num_heads * a.num_blocks), P::kThreads, shared_bytes, stream}, a);
}

}  // namespace

// Causal: keys num_pad .. a query's own column, with a window the last of them; else all new keys of its row. With
// `all_new` all of these are new; they are read from qkv, and if the kernel `appends`, written to the cache. What lies behind
// a row's newest token in its last tile is written too, into its own slot and up to column K - 1: keys of the tokens after
// it, zeros as values.
extern "C" cudaError_t eet_hopper_attention(void* out, void* keys, void* values, const void* qkv, const int64_t* first,
                                            const int64_t* count, const int64_t* num_pad, const int64_t* columns,
                                            int64_t columns_stride, int64_t row_stride, int64_t head_stride,
                                            int64_t key_stride, int dtype, int T, int B, int longest, int H, int G,
                                            int D, int K, int all_new, int appends, int window, float scale, int causal,
                                            cudaStream_t stream) {
  if (!causal && (!all_new || appends || window)) return cudaErrorInvalidValue;
  return eet::by_half_type(dtype, [&](auto type) {
    using Type = decltype(type);
    eet::PrefillArgs<Type> a{};
    a.out = static_cast<Type*>(out);
    a.first = first, a.count = count, a.num_pad = num_pad, a.columns = columns, a.column_stride = columns_stride;
    a.heads = {H, G, D}, a.B = B;
    a.all_new = all_new, a.appends = appends, a.window = eet::most_keys(window), a.scale = scale;
    const auto run = [&](auto plan) {
      return launch<decltype(plan)>(a, static_cast<const Type*>(qkv), keys, values,
                                    {row_stride, head_stride, key_stride}, T, K, longest, stream);
    };
    // As many warpgroups as have room for tiles of 64 keys in registers: up to 128 channels they beat wider tiles (LOG).
    // Texts of an encoder are short: two blocks hide each other's waits.
    const auto sized = [&](auto is_causal) {
      constexpr bool kCausal = decltype(is_causal)::value;
      if (D <= 64) return run(std::conditional_t<kCausal, eet::PrefillPlan<64, 4, 64, 6, true>,
                                                 eet::PrefillPlan<64, 2, 64, 4, false, 2>>());
      if (D <= 128) return run(eet::PrefillPlan<128, 3, 64, 5, kCausal>());
      return run(eet::PrefillPlan<256, 2, 64, 2, kCausal>());
    };
    return causal ? sized(std::true_type()) : sized(std::false_type());
  });
}
