// Attention of many new tokens a row without a mask, on Hopper's own tensor cores and copy engine (sm_90a).
// B rows, T tokens, H heads, G KV heads, D head dim, K columns of the KV cache.
#include <algorithm>

#include "eet/launch.cuh"
#include "eet/prefill_loader.cuh"
#include "eet/softmax.cuh"
#include "eet/wgmma.cuh"

namespace {

// One warpgroup: 64 queries of the block.
template <typename T, typename P>
class Attender {
 public:
  __device__ Attender(const eet::PrefillArgs<T>& a, eet::PrefillShared<T, P>& s)
      : a(a), s(s), group(__shfl_sync(0xffffffffu, threadIdx.x / 128, 0)), lane(threadIdx.x % 32),
        warp_row(threadIdx.x / 32 * 16), visible(s.task.visible + warp_row) {}

  __device__ void attend() {
    const int all_tiles = s.task.num_tiles(P::kQueries, P::kKeys);
    const int num_tiles = group * 64 < s.task.num_queries ? s.task.num_tiles(group * 64 + 64, P::kKeys) : 0;
    eet::stage_wait(&s.queries_filled, 0);
    if (num_tiles) attend(num_tiles);
    for (int tile = num_tiles; tile < all_tiles; ++tile) {  // only the warpgroups after this one need these
      eet::stage_wait(&s.filled[at.stage], at.parity);
      release(at.stage);
      at.step(P::kStages);
    }
  }

 private:
  // Scores of a tile are computed while the values of the tile before are mixed.
  __device__ void attend(int num_tiles) {
    eet::Softmax<P::kKeys> softmax(a.heads.D);
    float score[P::kKeys / 2], out[P::kDim / 2] = {};
    uint32_t weights[P::kKeys / 16][4];
    eet::stage_wait(&s.filled[at.stage], at.parity);
    begin_scores(score, at.stage);
    eet::products_wait<0>();
    eet::settle(score);
    hide(score, 0);
    softmax.weigh(score);
    pack(weights, score);
#pragma unroll 1
    for (int tile = 1; tile < num_tiles; ++tile) {
      const int before = at.stage;
      at.step(P::kStages);
      eet::stage_wait(&s.filled[at.stage], at.parity);
      begin_scores(score, at.stage);
      begin_mix(out, weights, before);
      eet::products_wait<1>();
      eet::settle(score);
      hide(score, tile);
      const bool grew = softmax.weigh(score);
      eet::settle(score);
      eet::products_wait<0>();
      eet::settle(out);
      eet::settle(weights);
      release(before);
      if (grew) {
#pragma unroll
        for (int i = 0; i < P::kDim / 2; ++i) out[i] *= softmax.shrink[i / 2 % 2];
      }
      pack(weights, score);
    }
    begin_mix(out, weights, at.stage);
    eet::products_wait<0>();
    eet::settle(out);
    release(at.stage);
    at.step(P::kStages);
    write(out, eet::warp_sum<4>(softmax.sum[0]), eet::warp_sum<4>(softmax.sum[1]));
  }

  __device__ void begin_scores(float (&score)[P::kKeys / 2], int stage) {
    eet::products_begin();
#pragma unroll
    for (int d = 0; d < P::kDim; d += 16) {
      const uint64_t q = eet::tile_of(s.query[d / 64][group * 64]), k = eet::tile_of(s.key[stage][d / 64]);
      eet::product<T, P::kKeys>(score, eet::further(q, d % 64 * 2), eet::further(k, d % 64 * 2), d > 0);
    }
    eet::products_commit();
  }

  __device__ void begin_mix(float (&out)[P::kDim / 2], const uint32_t (&weights)[P::kKeys / 16][4], int stage) {
    constexpr int kWide = P::kDim < 128 ? P::kDim : 128;
    eet::products_begin();
#pragma unroll
    for (int d = 0; d < P::kDim; d += kWide) {
      const uint64_t v = eet::tile_of(s.value[stage][d / 64], P::kPanelBytes);
      float(&part)[kWide / 2] = *reinterpret_cast<float(*)[kWide / 2]>(out + d / 2);
#pragma unroll
      for (int k = 0; k < P::kKeys; k += 16) eet::product<T, kWide>(part, weights[k / 16], eet::further(v, k * 128));
    }
    eet::products_commit();
  }

  // Keys after a query's own.
  __device__ void hide(float (&score)[P::kKeys / 2], int tile) {
    const int seen = visible - tile * P::kKeys;  // of this tile, by the warp's first query
    if (seen >= P::kKeys) return;
    const int mine = seen + lane / 4 - lane % 4 * 2;
#pragma unroll
    for (int i = 0; i < P::kKeys / 2; ++i) {
      if (i / 4 * 8 + i % 2 >= mine + i / 2 % 2 * 8) score[i] = -INFINITY;
    }
  }

  __device__ void pack(uint32_t (&weights)[P::kKeys / 16][4], const float (&score)[P::kKeys / 2]) {
#pragma unroll
    for (int i = 0; i < P::kKeys / 4; ++i) weights[i / 4][i % 4] = eet::pack2<T>(score[2 * i], score[2 * i + 1]);
  }

  // Through the queries' place in shared memory, which nobody but this warp uses any more, to whole rows.
  __device__ void write(const float (&out)[P::kDim / 2], float sum, float sum_8) {
    const float scale[2] = {1.f / sum, 1.f / sum_8};
    const eet::PrefillTask& task = s.task;
    const int D = a.heads.D, num_rows = task.num_queries - warp_row;
#pragma unroll
    for (int panel = 0; panel < P::kPanels; ++panel) {
      T(*rows)[64] = s.query[panel] + warp_row;
#pragma unroll
      for (int i = 0; i < 8; i += 2) {
        uint32_t r[4];
#pragma unroll
        for (int j = 0; j < 4; ++j) {
          const float* pair = &out[panel * 32 + i * 4 + j * 2];
          r[j] = eet::pack2<T>(pair[0] * scale[j % 2], pair[1] * scale[j % 2]);
        }
        eet::store_matrices(&rows[lane % 16][((i + lane / 16) ^ lane % 8) * 8], r);
      }
    }
    __syncwarp();
#pragma unroll
    for (int panel = 0; panel < P::kPanels; ++panel) {
      const T(*rows)[64] = s.query[panel] + warp_row;
      const int d = panel * 64 + lane % 8 * 8;
#pragma unroll
      for (int row = lane / 8; row < 16; row += 4) {
        if (row >= num_rows || d >= D) continue;
        T* to = a.out + ((task.token + warp_row + row) * a.heads.H + task.h) * D + d;
        eet::store(to, eet::load(&rows[row][(lane % 8 ^ row % 8) * 8]));
      }
    }
  }

  __device__ void release(int stage) {
    if (lane == 0) eet::stage_arrive(&s.emptied[stage]);
  }

  const eet::PrefillArgs<T>& a;
  eet::PrefillShared<T, P>& s;
  const int group, lane, warp_row, visible;  // the warp's first query in the block, and the keys that it sees
  eet::StagePlace at;
};

// Why      scores of a whole prompt do not fit into fast memory; only warpgroup products reach this GPU's matrix rate
// Mapping  warpgroups of 64 queries of one head against tiles of keys, which one warp brings; their softmax hides each
//          other's products. Grid: blocks of queries in the longest row * H * B, see PrefillTask
// Traffic  q and out once; keys and values once for each block of queries, mostly from L2; new ones to the cache, once
// Needs    sm_90a; D a multiple of 8, at most 256 (zeros up to 64, 128 or 256); a row's columns are consecutive
// Numerics scores, softmax and sums in fp32; weights, at most 2^8, are rounded to T for the tensor cores
// Source   Shah et al. 2024, FlashAttention-3; the first key is num_pad itself, so pads take no part at all
template <typename T, typename P>
__global__ void __launch_bounds__(P::kThreads, 1) hopper_prefill_kernel(const __grid_constant__ eet::PrefillArgs<T> a) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  extern __shared__ __align__(1024) char shared[];
  auto& s = *reinterpret_cast<eet::PrefillShared<T, P>*>(shared);
  if (threadIdx.x == 0) {
    eet::stage_init(&s.queries_filled, 1), eet::stage_init(&s.last_filled, 1);
    for (int stage = 0; stage < P::kStages; ++stage) {
      eet::stage_init(&s.filled[stage], 1), eet::stage_init(&s.emptied[stage], P::kWarps);
    }
    eet::publish_to_engines();
    s.task = eet::PrefillTask(a, blockIdx.x, P::kQueries);
  }
  if (threadIdx.x == 32) eet::prefetch_map(a.queries), eet::prefetch_map(a.keys), eet::prefetch_map(a.values);
  __syncthreads();
  if (s.task.num_queries <= 0) return;
  if (threadIdx.x / 128 == P::kGroups) {
    eet::give_registers<P::kLoader>();
    if (threadIdx.x / 32 == P::kWarps) eet::PrefillLoader<T, P>(a, s).load();
  } else {
    eet::take_registers<P::kAttender>();
    Attender<T, P>(a, s).attend();
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
  if (cudaError_t error = cache(&a.new_keys, keys)) return error;
  if (cudaError_t error = cache(&a.new_values, values)) return error;
  a.values = a.keys;
  if (!a.all_new) a.keys = a.new_keys, a.values = a.new_values;
  a.num_blocks = eet::ceil_div(longest, P::kQueries);
  // Sections of about 16 MiB, a third of L2, and of about the same size: a small last one would keep few blocks busy.
  const int64_t num_heads = int64_t(a.B) * H, num_sections = std::max<int64_t>(1, num_heads * K * D * 4 >> 24);
  a.heads_together = int((num_heads + num_sections - 1) / num_sections);
  const int shared_bytes = sizeof(eet::PrefillShared<T, P>);
  return eet::launch(hopper_prefill_kernel<T, P>,
                     {dim3(num_heads * a.num_blocks), P::kThreads, shared_bytes, stream}, a);
}

}  // namespace

// Causal: keys num_pad .. a query's own column. With `all_new` all of these are new and end with column K - 1; they are
// read from qkv, and written to the cache.
extern "C" cudaError_t eet_hopper_attention(void* out, void* keys, void* values, const void* qkv, const int64_t* first,
                                            const int64_t* count, const int64_t* num_pad, const int64_t* columns,
                                            int64_t column_stride, int64_t row_stride, int64_t head_stride,
                                            int64_t key_stride, int dtype, int T, int B, int longest, int H, int G,
                                            int D, int K, int all_new, cudaStream_t stream) {
  return eet::by_half_type(dtype, [&](auto type) {
    using Type = decltype(type);
    eet::PrefillArgs<Type> a{};
    a.out = static_cast<Type*>(out);
    a.first = first, a.count = count, a.num_pad = num_pad, a.columns = columns, a.column_stride = column_stride;
    a.heads = {H, G, D}, a.B = B, a.all_new = all_new;
    const auto run = [&](auto plan) {
      return launch<decltype(plan)>(a, static_cast<const Type*>(qkv), keys, values,
                                    {row_stride, head_stride, key_stride}, T, K, longest, stream);
    };
    // As many warpgroups as have room for tiles of 64 keys in registers: more of them beat wider tiles.
    if (D <= 64) return run(eet::PrefillPlan<64, 4, 64, 6>());
    if (D <= 128) return run(eet::PrefillPlan<128, 3, 64, 5>());
    return run(eet::PrefillPlan<256, 2, 64, 2>());
  });
}
