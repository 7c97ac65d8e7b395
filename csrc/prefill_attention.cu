// Attention of many new tokens a row, on tensor cores. The cache holds their keys and values already.
// B rows, T tokens, Q queries a row, H heads, G KV heads, D head dim, K columns of the KV cache.
#include "eet/attention.cuh"
#include "eet/launch.cuh"
#include "eet/mma.cuh"
#include "eet/vec.cuh"

namespace {

constexpr int kWarps = 4;
constexpr int kThreads = kWarps * 32;
constexpr int kQueries = 16 * kWarps;  // of a block
template <int kDim>
constexpr int kKeys = kDim <= 128 ? 64 : 32;  // of a tile
template <int kDim>
constexpr int kRow = kDim + 8;  // a row in shared memory: 8 rows of an ldmatrix lie in different banks

template <typename T>
struct PrefillArgs {
  T* out;  // [T,HD]
  eet::Cache<T> keys, values;
  const T* qkv;                             // [T,(H+2G)D]
  const T* mask;                            // [B,1,Q,K] or null
  const int64_t *first, *count, *num_pad;   // [B]
  const int64_t* columns;                   // [T], `column_stride` apart
  int64_t column_stride;
  eet::Heads heads;
  int Q, K;     // for a mask
  bool causal;  // without one
  int window;   // keys that a causal query sees at most
  float scale;  // of scores
};

template <typename T, int kDim>
struct Tiles {
  T query[kQueries][kRow<kDim>], key[2][kKeys<kDim>][kRow<kDim>], value[2][kKeys<kDim>][kRow<kDim>];
};

// Numbers k and k + 1 of a row, where they exist; together, where the row is so aligned.
template <typename T>
__device__ inline uint32_t load_pair(const T* row, int k, int end, bool aligned) {
  if (aligned) return k < end ? *reinterpret_cast<const uint32_t*>(row + k) : 0;
  const auto bits = [&](int i) -> uint32_t { return i < end ? reinterpret_cast<const uint16_t*>(row)[i] : 0; };
  return bits(k) | bits(k + 1) << 16;
}

// Why      scores of a whole prompt do not fit into fast memory: tiles of keys pass by while a softmax is kept up to date
// Mapping  4 warps of 16 queries each against tiles of 64 keys: grid (ceil(longest / 64), H, B), the longest work first
// Traffic  q and out once; keys and values once for each 64 queries of a head, mostly from L2
// Needs    D a multiple of 8, at most 256; a row's columns are consecutive; tiles of pads or before a window are not read
// Numerics scores, softmax and sums in fp32; weights are rounded to T for the tensor cores
// Source   Dao 2023, FlashAttention-2; the first key is num_pad itself, so pads take no part at all
template <typename T, int kDim>
__global__ void __launch_bounds__(kThreads) prefill_kernel(const PrefillArgs<T> a) {
  extern __shared__ uint4 shared[];
  Tiles<T, kDim>& tiles = *reinterpret_cast<Tiles<T, kDim>*>(shared);
  constexpr int kTileKeys = kKeys<kDim>;
  const int H = a.heads.H, D = a.heads.D;
  const int b = blockIdx.z, h = blockIdx.y, kv = h / (H / a.heads.G);
  const int64_t token = a.mask ? int64_t(b) * a.Q : a.first[b];
  const int count = a.mask ? a.Q : int(a.count[b]), query = int(gridDim.x - 1 - blockIdx.x) * kQueries;
  if (query >= count) return;
  const int column = int(a.columns[token * a.column_stride]) + query;  // of the block's first query
  const int begin = a.mask ? 0 : max(int(a.num_pad[b]), column + 1 - a.window);
  const int end = a.mask ? a.K : a.causal ? column + min(kQueries, count - query) : begin + count;

  // A thread copies one vector of every kRowStep-th row.
  constexpr int kVecs = kDim / 8, kRowStep = kThreads / kVecs;
  const int first_row = threadIdx.x / kVecs, first_d = threadIdx.x % kVecs * 8;
  const T* next_query = a.qkv + a.heads.query(token + query + first_row, h) + first_d;
#pragma unroll
  for (int row = 0; row < kQueries; row += kRowStep, next_query += kRowStep * a.heads.width()) {
    eet::copy_async(&tiles.query[row + first_row][first_d], next_query, query + row + first_row < count && first_d < D);
  }
  const int64_t of_head = kv * a.keys.head + first_d;
  int next_key = begin + first_row;
  int keys_left = first_d < D ? end - begin - first_row : 0;
  const auto copy_tile = [&](int buffer) {
#pragma unroll
    for (int row = 0; row < kTileKeys; row += kRowStep, keys_left -= kRowStep, next_key += kRowStep) {
      const int k = keys_left > 0 ? next_key : begin;
      const int64_t at = of_head + a.keys.pages.page(b, k) * a.keys.row + a.keys.pages.place(k) * a.keys.column;
      eet::copy_async(&tiles.key[buffer][row + first_row][first_d], a.keys.start + at, keys_left > 0);
      eet::copy_async(&tiles.value[buffer][row + first_row][first_d], a.values.start + at, keys_left > 0);
    }
    eet::commit_copies();
  };
  copy_tile(0);

  const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4, row = threadIdx.x / 32 * 16;  // the warp's first query
  const int low_row = lane % 16, low_d = lane / 16 * 8;                      // ldmatrix: rows first, then channels
  const int high_row = lane / 16 * 8 + lane % 8, high_d = lane / 8 % 2 * 8;  // channels first, then rows
  // With a mask the scores are scaled before it is added.
  const float exponent = (a.mask ? 1.f : a.scale) * eet::kLog2e;
  constexpr bool kHold = kDim <= 128;  // registers for all of the warp's queries
  uint32_t held[kHold ? kDim / 16 : 1][4];
  float out[kDim / 8][4] = {}, max[2] = {eet::kLowest, eet::kLowest}, sum[2] = {};

  const int num_tiles = (end - begin + kTileKeys - 1) / kTileKeys;
  for (int tile = 0; tile < num_tiles; ++tile) {
    const int buffer = tile % 2, first_key = begin + tile * kTileKeys;
    if (tile + 1 < num_tiles) {
      copy_tile(buffer ^ 1);
      eet::wait_for_copies<1>();
    } else {
      eet::wait_for_copies<0>();
    }
    __syncthreads();
    if (kHold && tile == 0) {
#pragma unroll
      for (int d = 0; d < kDim; d += 16) eet::load_matrices(held[d / 16], &tiles.query[row + low_row][d + low_d]);
    }

    uint32_t bias[kTileKeys / 4];  // pairs of keys, on their way while the scores are computed
    if (a.mask) {
#pragma unroll
      for (int i = 0; i < kTileKeys / 4; ++i) {
        const int k = first_key + i / 2 * 8 + t * 2, q = min(query + row + g + i % 2 * 8, count - 1);
        bias[i] = load_pair(a.mask + (token + q) * a.K, k, end, a.K % 2 == 0);
      }
    }

    float score[kTileKeys / 8][4] = {};
#pragma unroll
    for (int d = 0; d < kDim; d += 16) {
      uint32_t(&q)[4] = held[kHold ? d / 16 : 0];
      if (!kHold) eet::load_matrices(q, &tiles.query[row + low_row][d + low_d]);
#pragma unroll
      for (int k = 0; k < kTileKeys; k += 16) {
        uint32_t r[4];
        eet::load_matrices(r, &tiles.key[buffer][k + high_row][d + high_d]);
        eet::mma<T>(score[k / 8], q[0], q[1], q[2], q[3], r[0], r[1]);
        eet::mma<T>(score[k / 8 + 1], q[0], q[1], q[2], q[3], r[2], r[3]);
      }
    }

    if (a.mask) {
#pragma unroll
      for (int i = 0; i < kTileKeys / 4; ++i) {
        const int k = first_key + i / 2 * 8 + t * 2;
        float* s = &score[i / 2][i % 2 * 2];
        const T* pair = reinterpret_cast<const T*>(&bias[i]);
        s[0] = k < end ? s[0] * a.scale + eet::to_float(pair[0]) : -INFINITY;
        s[1] = k + 1 < end ? s[1] * a.scale + eet::to_float(pair[1]) : -INFINITY;
      }
    } else if (first_key + kTileKeys > (a.causal ? column + row + 1 : end) || first_key < column + row + 16 - a.window) {
      // A query of the warp must not see a key.
#pragma unroll
      for (int i = 0; i < kTileKeys / 2; ++i) {
        const int k = first_key + i / 4 * 8 + t * 2 + i % 2;
        const int newest = a.causal ? column + row + g + i % 4 / 2 * 8 : end - 1;
        if (k > newest || k <= newest - a.window) score[i / 4][i % 4] = -INFINITY;
      }
    }

#pragma unroll
    for (int half = 0; half < 2; ++half) {  // queries g and g + 8
      float newest = -INFINITY;
#pragma unroll
      for (int i = 0; i < kTileKeys / 8; ++i) newest = fmaxf(newest, fmaxf(score[i][2 * half], score[i][2 * half + 1]));
      const float new_max = fmaxf(max[half], eet::warp_max<4>(newest));
      const float shrink = eet::exp2_of((max[half] - new_max) * exponent);
      max[half] = new_max;
      sum[half] *= shrink;
#pragma unroll
      for (int i = 0; i < kDim / 8; ++i) out[i][2 * half] *= shrink, out[i][2 * half + 1] *= shrink;
#pragma unroll
      for (int i = 0; i < kTileKeys / 4; ++i) {
        float& s = score[i / 2][2 * half + i % 2];
        sum[half] += s = eet::exp2_of((s - new_max) * exponent);
      }
    }

#pragma unroll
    for (int k = 0; k < kTileKeys; k += 16) {
      const float(&s0)[4] = score[k / 8], (&s1)[4] = score[k / 8 + 1];
      const uint32_t p[4] = {eet::pack2<T>(s0[0], s0[1]), eet::pack2<T>(s0[2], s0[3]), eet::pack2<T>(s1[0], s1[1]),
                             eet::pack2<T>(s1[2], s1[3])};
#pragma unroll
      for (int d = 0; d < kDim; d += 16) {
        uint32_t r[4];
        eet::load_matrices_transposed(r, &tiles.value[buffer][k + low_row][d + low_d]);
        eet::mma<T>(out[d / 8], p[0], p[1], p[2], p[3], r[0], r[1]);
        eet::mma<T>(out[d / 8 + 1], p[0], p[1], p[2], p[3], r[2], r[3]);
      }
    }
    __syncthreads();  // the next copy may overwrite this buffer
  }

#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int q = query + row + g + half * 8;
    const float scale_out = 1.f / eet::warp_sum<4>(sum[half]);
    if (q >= count) continue;
    T* to = a.out + ((token + q) * H + h) * D;
#pragma unroll
    for (int i = 0; i < kDim / 8; ++i) {
      const int d = i * 8 + t * 2;
      const uint32_t pair = eet::pack2<T>(out[i][2 * half] * scale_out, out[i][2 * half + 1] * scale_out);
      if (d < D) *reinterpret_cast<uint32_t*>(to + d) = pair;
    }
  }
}

template <typename T, int kDim>
cudaError_t launch_prefill(const PrefillArgs<T>& a, int B, int longest, cudaStream_t stream) {
  const dim3 grid(eet::ceil_div(longest, kQueries), a.heads.H, B);
  return eet::launch(prefill_kernel<T, kDim>, {grid, kThreads, sizeof(Tiles<T, kDim>), stream}, a);
}

}  // namespace

// Causal: keys num_pad .. a query's own column, with a window the last of them; else as many keys from num_pad on as the
// row has tokens. With a mask: all keys 0 .. K-1 for all B * Q tokens.
extern "C" cudaError_t eet_prefill_attention(void* out, void* keys, void* values, const void* qkv, const void* mask,
                                             const int64_t* first, const int64_t* count, const int64_t* num_pad,
                                             const int64_t* columns, const int* table, int64_t columns_stride,
                                             int64_t row_stride, int64_t head_stride, int64_t key_stride,
                                             int table_stride, int log_page, int dtype, int B, int longest, int H,
                                             int G, int D, int K, int window, float scale, int causal,
                                             cudaStream_t stream) {
  if (window && (mask || !causal)) return cudaErrorInvalidValue;
  return eet::by_half_type(dtype, [&](auto type) {
    using Type = decltype(type);
    const auto cache = [&](void* p) {
      const eet::Pages pages{table, table_stride, log_page};
      return eet::Cache<Type>{static_cast<Type*>(p), row_stride, head_stride, key_stride, pages};
    };
    const PrefillArgs<Type> a{static_cast<Type*>(out), cache(keys), cache(values), static_cast<const Type*>(qkv),
                              static_cast<const Type*>(mask), first, count, num_pad, columns,
                              columns_stride, {H, G, D}, longest, K, causal != 0, eet::most_keys(window), scale};
    if (D <= 32) return launch_prefill<Type, 32>(a, B, longest, stream);
    if (D <= 64) return launch_prefill<Type, 64>(a, B, longest, stream);
    if (D <= 128) return launch_prefill<Type, 128>(a, B, longest, stream);
    return launch_prefill<Type, 256>(a, B, longest, stream);
  });
}
