// Attention of many new tokens a row without a mask, on Hopper's own tensor cores and copy engine (sm_90a).
// B rows, T tokens, H heads, G KV heads, D head dim, K columns of the KV cache.
#include "eet/attention.cuh"
#include "eet/launch.cuh"
#include "eet/ring.cuh"
#include "eet/tensor_map.cuh"
#include "eet/vec.cuh"
#include "eet/wgmma.cuh"

namespace {

// How a head dim, padded to kDim, is worked on: warpgroups of 64 queries, keys of a tile, tiles in shared memory,
// blocks of an SM.
template <int kDim_, int kGroups_, int kKeys_, int kStages_, int kBlocks_>
struct Plan {
  static constexpr int kDim = kDim_, kGroups = kGroups_, kKeys = kKeys_, kStages = kStages_, kBlocks = kBlocks_;
  static constexpr int kQueries = 64 * kGroups, kWarps = 4 * kGroups, kThreads = 32 * kWarps + 128;
  // Registers: the loader's warpgroup leaves most of its own to the others.
  static constexpr int kEvenly = 65536 / (kThreads * kBlocks) / 8 * 8, kLoader = 40;
  static constexpr int kAttender = (kEvenly * (kGroups + 1) - kLoader) / kGroups / 8 * 8;
  static constexpr int kPanels = kDim / 64;              // tiles of 64 numbers side by side
  static constexpr int kTileBytes = kKeys * kDim * 2;    // of keys, and of values
  static constexpr int kPanelBytes = kTileBytes / kPanels;
};

constexpr int64_t kTogetherBytes = 16 << 20;  // keys and values that are read over and over at the same time

template <typename T, typename P>
struct Shared {
  T query[P::kPanels][P::kQueries][64];
  T key[P::kStages][P::kPanels][P::kKeys][64], value[P::kStages][P::kPanels][P::kKeys][64];
  uint64_t queries_filled, queries_emptied, tail_filled;
  uint64_t key_filled[P::kStages], key_emptied[P::kStages], value_filled[P::kStages], value_emptied[P::kStages];
};

template <typename T>
struct Args {
  CUtensorMap queries, keys, values;  // where they are read
  CUtensorMap new_keys, new_values;   // where they are written, if `append`
  T* out;                             // [T,HD]
  const int64_t *first, *count, *num_pad;  // [B]
  const int64_t* columns;                  // [T], `column_stride` apart
  int64_t column_stride;
  eet::Heads heads;
  int B, num_blocks, heads_together;  // blocks of queries in the longest row
  bool append;
};

// One block of queries of one head.
struct Task {
  int b, h, kv;
  int64_t token;              // its first query
  int query, num_queries;     // in the row; how many of them exist from here on
  int begin, visible;         // the first key's column; how many keys the first query sees

  template <typename T>
  __device__ Task(const Args<T>& a, int index, int queries) {
    // All blocks of some heads, whose keys and values fit into L2 together: the longest work first.
    const int num_heads = a.B * a.heads.H, section = index / (a.heads_together * a.num_blocks);
    const int first_head = section * a.heads_together, together = min(a.heads_together, num_heads - first_head);
    const int rest = index - first_head * a.num_blocks, head = first_head + rest % together;
    b = head / a.heads.H, h = head % a.heads.H, kv = h / (a.heads.H / a.heads.G);
    query = (a.num_blocks - 1 - rest / together) * queries;
    num_queries = int(a.count[b]) - query;
    if (num_queries <= 0) return;
    token = a.first[b] + query;
    begin = int(a.num_pad[b]);
    visible = int(a.columns[(token - query) * a.column_stride]) + query - begin + 1;
  }
  // Keys that some of the first `queries` queries see.
  __device__ int num_keys(int queries) const { return visible + min(queries, num_queries) - 1; }
  __device__ int num_tiles(int queries, int keys) const { return (num_keys(queries) + keys - 1) / keys; }
};

// One warp: brings queries, and keys and values tile by tile; writes new keys and values to the cache.
template <typename T, typename P>
class Loader {
 public:
  __device__ Loader(const Args<T>& a, Shared<T, P>& s) : a(a), s(s), lane(threadIdx.x % 32) {}

  __device__ void load(const Task& task) {
    const bool fresh = a.append;
    const int kv = task.kv, num_tiles = task.num_tiles(P::kQueries, P::kKeys);
    const int num_keys = task.num_keys(task.num_queries);
    // Where the row's keys begin.
    const eet::Corner key = fresh ? eet::Corner{0, a.heads.H + kv, int(task.token) - task.query, 0}
                                  : eet::Corner{0, kv, task.begin, task.b};
    const eet::Corner value = fresh ? eet::Corner{0, key.head + a.heads.G, key.position, 0} : key;

    if (lane == 0) {
      eet::barrier_wait(&s.queries_emptied, queries_parity ^ 1);
      eet::expect_bytes(&s.queries_filled, sizeof(s.query));
      for (int panel = 0; panel < P::kPanels; ++panel) {
        eet::load_box(s.query[panel], a.queries, {panel * 64, task.h, int(task.token), 0}, &s.queries_filled);
      }
    }
    queries_parity ^= 1;
    const int first_own = (task.query + P::kKeys - 1) / P::kKeys;  // if all keys are new
    eet::RingPlace own;
    for (int tile = 0; tile < num_tiles; ++tile, at.step(P::kStages)) {
      if (tile == first_own) own = at;
      if (lane == 0) {
        eet::barrier_wait(&s.key_emptied[at.stage], at.parity ^ 1);
        load_tile(s.key[at.stage], a.keys, key, tile, &s.key_filled[at.stage]);
        eet::barrier_wait(&s.value_emptied[at.stage], at.parity ^ 1);
      }
      const int left = num_keys - tile * P::kKeys;
      if (left < P::kKeys) {
        load_tail(value, tile, left);
      } else if (lane == 0) {
        load_tile(s.value[at.stage], a.values, value, tile, &s.value_filled[at.stage]);
      }
    }
    if (fresh && task.h % (a.heads.H / a.heads.G) == 0) append(task, own, first_own, num_tiles);
  }

 private:
  __device__ void load_tile(T (*to)[P::kKeys][64], const CUtensorMap& map, eet::Corner from, int tile,
                            uint64_t* barrier) {
    from.position += tile * P::kKeys;
    eet::expect_bytes(barrier, P::kTileBytes);
    for (int panel = 0; panel < P::kPanels; ++panel, from.d += 64) eet::load_box(to[panel], map, from, barrier);
  }

  // What lies after the row's newest value may be anything, NaN too, which a weight of 0 would not make 0.
  __device__ void load_tail(const eet::Corner& from, int tile, int left) {
    T(&to)[P::kPanels][P::kKeys][64] = s.value[at.stage];
    if (lane == 0) load_tile(to, a.values, from, tile, &s.tail_filled);
    __syncwarp();
    eet::barrier_wait(&s.tail_filled, tail_parity);
    tail_parity ^= 1;
    for (int panel = 0; panel < P::kPanels; ++panel) {
      for (int i = left * 8 + lane; i < P::kKeys * 8; i += 32) eet::store(&to[panel][0][0] + i * 8, eet::zeros());
    }
    eet::publish_to_engines();
    __syncwarp();
    if (lane == 0) eet::barrier_arrive(&s.value_filled[at.stage]);
  }

  // The last tiles are those of the block's own tokens. The map ends at the row's newest column.
  __device__ void append(const Task& task, eet::RingPlace place, int tile, int num_tiles) {
    for (; tile < num_tiles; ++tile, place.step(P::kStages)) {
      eet::barrier_wait(&s.key_filled[place.stage], place.parity);
      eet::barrier_wait(&s.value_filled[place.stage], place.parity);
      if (lane != 0) continue;
      for (int panel = 0; panel < P::kPanels; ++panel) {
        const eet::Corner to{panel * 64, task.kv, task.begin + tile * P::kKeys, task.b};
        eet::store_box(a.new_keys, to, s.key[place.stage][panel]);
        eet::store_box(a.new_values, to, s.value[place.stage][panel]);
      }
    }
    if (lane == 0) eet::wait_for_stores();
    __syncwarp();
  }

  const Args<T>& a;
  Shared<T, P>& s;
  const int lane;
  eet::RingPlace at;
  uint32_t queries_parity = 0, tail_parity = 0;
};

// The running softmax of two queries of a thread: g = lane / 4 of the warp's 16, and g + 8.
template <int kKeys>
struct Softmax {
  float exponent;  // exp(scale x) is 2^(exponent x)
  float max[2] = {eet::kLowest, eet::kLowest}, sum[2] = {0, 0}, shrink[2];

  __device__ explicit Softmax(int D) : exponent(rsqrtf(float(D)) * 1.4426950408889634f) {}

  // Scores become weights, relative to some earlier maximum: it is replaced only by what is more than 2^8 times as
  // heavy. True if it was: what was summed before has to be multiplied by `shrink`.
  __device__ bool weigh(float (&score)[kKeys / 2]) {
    bool grew = false;
    float newest[2];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      float best = score[2 * half];
#pragma unroll
      for (int i = 0; i < kKeys / 8; ++i) {
        best = fmaxf(best, fmaxf(score[4 * i + 2 * half], score[4 * i + 2 * half + 1]));
      }
      newest[half] = eet::warp_max<4>(best);
      grew |= (newest[half] - max[half]) * exponent > 8;
    }
    grew = __any_sync(0xffffffffu, grew);
    if (grew) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        newest[half] = fmaxf(max[half], newest[half]);
        shrink[half] = eet::exp2_of((max[half] - newest[half]) * exponent);
        sum[half] *= shrink[half];
        max[half] = newest[half];
      }
    }
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const float offset = -max[half] * exponent;
#pragma unroll
      for (int i = 0; i < kKeys / 4; ++i) {
        float& s = score[i / 2 * 4 + 2 * half + i % 2];
        s = eet::exp2_of(fmaf(s, exponent, offset));
      }
#pragma unroll
      for (int i = 0; i < kKeys / 4; ++i) sum[half] += score[i / 2 * 4 + 2 * half + i % 2];
    }
    return grew;
  }
};

// One warpgroup: 64 queries of the block.
template <typename T, typename P>
class Attender {
 public:
  __device__ Attender(const Args<T>& a, Shared<T, P>& s)
      : a(a), s(s), group(__shfl_sync(0xffffffffu, threadIdx.x / 128, 0)), lane(threadIdx.x % 32),
        warp_row(threadIdx.x / 32 * 16) {}

  __device__ void attend(const Task& task) {
    const int all_tiles = task.num_tiles(P::kQueries, P::kKeys);
    const int num_tiles = group * 64 < task.num_queries ? task.num_tiles(group * 64 + 64, P::kKeys) : 0;
    eet::barrier_wait(&s.queries_filled, queries_parity);
    queries_parity ^= 1;
    if (num_tiles) attend(task, num_tiles);
    eet::publish_to_engines();  // what was read and written here, before the copy engine writes the next queries
    release(&s.queries_emptied);
    for (int tile = num_tiles; tile < all_tiles; ++tile) {  // only the warpgroups after this one need these
      eet::barrier_wait(&s.key_filled[at_key.stage], at_key.parity);
      release_key();
      eet::barrier_wait(&s.value_filled[at_value.stage], at_value.parity);
      release_value();
    }
  }

 private:
  // Scores of a tile are computed while the values of the tile before are mixed.
  __device__ void attend(const Task& task, int num_tiles) {
    Softmax<P::kKeys> softmax(a.heads.D);
    float score[P::kKeys / 2], out[P::kDim / 2] = {};
    uint32_t weights[P::kKeys / 16][4];
    begin_scores(score);
    eet::products_wait<0>();
    eet::settle(score);
    release_key();
    hide(score, task, 0);
    softmax.weigh(score);
    pack(weights, score);
#pragma unroll 1
    for (int tile = 1; tile < num_tiles; ++tile) {
      begin_scores(score);
      begin_mix(out, weights);
      eet::products_wait<1>();
      eet::settle(score);
      release_key();
      hide(score, task, tile);
      const bool grew = softmax.weigh(score);
      eet::settle(score);  // all of it while values are mixed
      eet::products_wait<0>();
      eet::settle(out);
      eet::settle(weights);
      release_value();
      if (grew) {
#pragma unroll
        for (int i = 0; i < P::kDim / 2; ++i) out[i] *= softmax.shrink[i / 2 % 2];
      }
      pack(weights, score);
    }
    begin_mix(out, weights);
    eet::products_wait<0>();
    eet::settle(out);
    release_value();
    write(out, softmax, task);
  }

  __device__ void begin_scores(float (&score)[P::kKeys / 2]) {
    eet::barrier_wait(&s.key_filled[at_key.stage], at_key.parity);
    eet::products_begin();
#pragma unroll
    for (int d = 0; d < P::kDim; d += 16) {
      const uint64_t q = eet::tile_of(s.query[d / 64][group * 64]), k = eet::tile_of(s.key[at_key.stage][d / 64]);
      eet::product<T, P::kKeys>(score, eet::further(q, d % 64 * 2), eet::further(k, d % 64 * 2), d > 0);
    }
    eet::products_commit();
  }

  __device__ void begin_mix(float (&out)[P::kDim / 2], const uint32_t (&weights)[P::kKeys / 16][4]) {
    constexpr int kWide = P::kDim < 128 ? P::kDim : 128;
    eet::barrier_wait(&s.value_filled[at_value.stage], at_value.parity);
    eet::products_begin();
#pragma unroll
    for (int d = 0; d < P::kDim; d += kWide) {
      const uint64_t v = eet::tile_of(s.value[at_value.stage][d / 64], P::kPanelBytes);
      float(&part)[kWide / 2] = *reinterpret_cast<float(*)[kWide / 2]>(out + d / 2);
#pragma unroll
      for (int k = 0; k < P::kKeys; k += 16) eet::product<T, kWide>(part, weights[k / 16], eet::further(v, k * 128));
    }
    eet::products_commit();
  }

  // Keys after a query's own.
  __device__ void hide(float (&score)[P::kKeys / 2], const Task& task, int tile) {
    const int seen = task.visible + warp_row - tile * P::kKeys;  // keys of this tile, by the warp's first query
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
  __device__ void write(const float (&out)[P::kDim / 2], const Softmax<P::kKeys>& softmax, const Task& task) {
    const float scale[2] = {1.f / eet::warp_sum<4>(softmax.sum[0]), 1.f / eet::warp_sum<4>(softmax.sum[1])};
    const int D = a.heads.D;
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
    const int num_rows = min(16, task.num_queries - warp_row);
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
    __syncwarp();
  }

  __device__ void release(uint64_t* barrier) {
    if (lane == 0) eet::barrier_arrive(barrier);
  }
  __device__ void release_key() { release(&s.key_emptied[at_key.stage]), at_key.step(P::kStages); }
  __device__ void release_value() { release(&s.value_emptied[at_value.stage]), at_value.step(P::kStages); }

  const Args<T>& a;
  Shared<T, P>& s;
  const int group, lane, warp_row;  // of the block's queries, the warp's first
  eet::RingPlace at_key, at_value;
  uint32_t queries_parity = 0;
};

// Why      scores of a whole prompt do not fit into fast memory; only warpgroup products reach this GPU's matrix rate
// Mapping  warpgroups of 64 queries of one head against tiles of keys; one warp brings the tiles. Grid: blocks of
//          queries in the longest row * H * B, in sections of some heads, and of these the longest work first
// Traffic  q and out once; keys and values once for each block of queries, mostly from L2; new ones to the cache, once
// Needs    sm_90a; D a multiple of 8, at most 256 (zeros up to 64, 128 or 256); a row's columns are consecutive
// Numerics scores, softmax and sums in fp32; weights, at most 2^8, are rounded to T for the tensor cores
// Source   Shah et al. 2024, FlashAttention-3: scores of the next tile are computed while values of this one are mixed;
//          the first key is num_pad itself, so pads take no part at all
template <typename T, typename P>
__global__ void __launch_bounds__(P::kThreads, P::kBlocks) hopper_prefill_kernel(const __grid_constant__ Args<T> a) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  extern __shared__ __align__(1024) char shared[];
  Shared<T, P>& s = *reinterpret_cast<Shared<T, P>*>(shared);
  if (threadIdx.x == 0) {
    for (uint64_t* barrier = &s.queries_filled; barrier != &s.key_filled[0]; ++barrier) {
      eet::barrier_init(barrier, barrier == &s.queries_emptied ? P::kWarps : 1);
    }
    for (int stage = 0; stage < P::kStages; ++stage) {
      eet::barrier_init(&s.key_filled[stage], 1), eet::barrier_init(&s.value_filled[stage], 1);
      eet::barrier_init(&s.key_emptied[stage], P::kWarps), eet::barrier_init(&s.value_emptied[stage], P::kWarps);
    }
    eet::publish_to_engines();
  }
  __syncthreads();
  const int num_tasks = a.B * a.heads.H * a.num_blocks;
  if (threadIdx.x / 128 == P::kGroups) {
    eet::give_registers<P::kLoader>();
    if (threadIdx.x / 32 != P::kWarps) return;
    Loader<T, P> loader(a, s);
    for (int i = blockIdx.x; i < num_tasks; i += gridDim.x) {
      const Task task(a, i, P::kQueries);
      if (task.num_queries > 0) loader.load(task);
    }
  } else {
    eet::take_registers<P::kAttender>();
    Attender<T, P> attender(a, s);
    for (int i = blockIdx.x; i < num_tasks; i += gridDim.x) {
      const Task task(a, i, P::kQueries);
      if (task.num_queries > 0) attender.attend(task);
    }
  }
#endif
}

template <typename T, typename P>
cudaError_t launch(Args<T> a, const T* qkv, void* keys, void* values, const int64_t (&strides)[3], int T_, int K,
                   int longest, cudaStream_t stream) {
  const int H = a.heads.H, G = a.heads.G, D = a.heads.D;
  const int64_t width = int64_t(H + 2 * G) * D;
  const auto new_map = [&](CUtensorMap* map, int num) {
    return eet::make_tensor_map(map, qkv, D, H + 2 * G, D, T_, width, 1, width * T_, num);
  };
  const auto cache_map = [&](CUtensorMap* map, const void* start) {
    return eet::make_tensor_map(map, start, D, G, strides[1], K, strides[2], a.B, strides[0], P::kKeys);
  };
  if (cudaError_t error = new_map(&a.queries, P::kQueries)) return error;
  if (cudaError_t error = cache_map(&a.new_keys, keys)) return error;
  if (cudaError_t error = cache_map(&a.new_values, values)) return error;
  a.keys = a.new_keys, a.values = a.new_values;
  if (a.append) {
    if (cudaError_t error = new_map(&a.keys, P::kKeys)) return error;
    a.values = a.keys;
  }
  a.num_blocks = eet::ceil_div(longest, P::kQueries);
  const int64_t head_bytes = int64_t(K) * D * 4;
  a.heads_together = int(std::max<int64_t>(1, kTogetherBytes / head_bytes));
  const int grid = a.B * H * a.num_blocks;
  return eet::launch(hopper_prefill_kernel<T, P>, {dim3(grid), P::kThreads, int(sizeof(Shared<T, P>)), stream}, a);
}

}  // namespace

// Causal: keys num_pad .. a query's own column. With `append`, all keys and values are new: they are read from qkv, and
// written to the cache, whose K columns end with the newest of every row.
extern "C" cudaError_t eet_hopper_attention(void* out, void* keys, void* values, const void* qkv, const int64_t* first,
                                            const int64_t* count, const int64_t* num_pad, const int64_t* columns,
                                            int64_t column_stride, int64_t row_stride, int64_t head_stride,
                                            int64_t key_stride, int dtype, int T, int B, int longest, int H, int G,
                                            int D, int K, int append, cudaStream_t stream) {
  return eet::by_half_type(dtype, [&](auto type) {
    using Type = decltype(type);
    Args<Type> a{};
    a.out = static_cast<Type*>(out);
    a.first = first, a.count = count, a.num_pad = num_pad, a.columns = columns, a.column_stride = column_stride;
    a.heads = {H, G, D}, a.B = B, a.append = append;
    const auto run = [&](auto plan) {
      return launch<Type, decltype(plan)>(a, static_cast<const Type*>(qkv), keys, values,
                                          {row_stride, head_stride, key_stride}, T, K, longest, stream);
    };
    if (D <= 64) return run(Plan<64, 2, 128, 4, 1>());
    if (D <= 128) return run(Plan<128, 2, 128, 2, 1>());
    return run(Plan<256, 2, 64, 2, 1>());
  });
}
