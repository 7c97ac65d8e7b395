// Attention of short rows to themselves, in training: forward and backward, in 16 bits.
// B rows, T tokens, H heads of 64 channels.
#include <cuda_runtime.h>

#include <cstdint>

#include "eet/attention.cuh"
#include "eet/drop.cuh"
#include "eet/launch.cuh"
#include "eet/mma.cuh"
#include "eet/vec.cuh"

namespace {

constexpr int kDim = 64;

template <typename T>
struct ShortArgs {
  T* to;            // [T,HD] the output, or [T,3HD] the gradient of qkv
  const T* qkv;     // [T,3HD]
  const T* dout;    // [T,HD], for the gradient
  const int* ends;  // [B+1]
  int H;
  float scale;  // of scores
  bool causal;
  eet::Drop drop;  // of weights
};

// Rows of kWidth numbers in shared memory. Pieces of 16 bytes change places, so that the 8 rows of a matrix lie in
// different banks.
template <int kWidth>
struct Tile {
  char* start;

  __host__ __device__ static constexpr int bytes(int rows) { return rows * kWidth * 2; }
  __device__ char* at(int row, int piece) const { return start + row * kWidth * 2 + (piece ^ (row & 7)) * 16; }
};
using Heads = Tile<kDim>;

__device__ inline int lane() { return threadIdx.x % 32; }

// By all of a block: the first `count` rows, `stride` numbers apart, and zeros up to a multiple of 16. Queries of zeros
// have weights, but neither an output nor a gradient.
template <typename T>
__device__ void fetch(Heads to, const T* from, int64_t stride, int count) {
  for (int i = threadIdx.x; i < (count + 15) / 16 * 16 * 8; i += blockDim.x) {
    const int row = i / 8, piece = i % 8;
    eet::copy_async(to.at(row, piece), from + row * stride + piece * 8, row < count);
  }
}

// By one warp: c[16,keys] = a[16,64] b[keys,64]^T, of the rows of a from `first` on.
template <typename T, int kKeys>
__device__ void multiply(float (&c)[kKeys / 8][4], Heads a, int first, Heads b, int num_keys) {
#pragma unroll
  for (int k = 0; k < kDim / 16; ++k) {
    uint32_t x[4];
    eet::load_matrices(x, a.at(first + lane() % 16, 2 * k + lane() / 16));
#pragma unroll
    for (int j = 0; j < kKeys / 16; ++j) {
      if (16 * j >= num_keys) break;
      uint32_t y[4];
      eet::load_matrices(y, b.at(16 * j + lane() % 8 + lane() / 16 * 8, 2 * k + lane() / 8 % 2));
      eet::mma<T>(c[2 * j], x[0], x[1], x[2], x[3], y[0], y[1]);
      eet::mma<T>(c[2 * j + 1], x[0], x[1], x[2], x[3], y[2], y[3]);
    }
  }
}

// By one warp: out[16,64] += a[16,16] rows[16,64], of the rows from `first` on.
template <typename T>
__device__ void add_product(float (&out)[kDim / 8][4], const uint32_t (&a)[4], Heads rows, int first) {
#pragma unroll
  for (int n = 0; n < kDim / 16; ++n) {
    uint32_t y[4];
    eet::load_matrices_transposed(y, rows.at(first + lane() % 16, 2 * n + lane() / 16));
    eet::mma<T>(out[2 * n], a[0], a[1], a[2], a[3], y[0], y[1]);
    eet::mma<T>(out[2 * n + 1], a[0], a[1], a[2], a[3], y[2], y[3]);
  }
}

// By one warp: out[16,64] += weights[16,keys] rows[keys,64], with the weights rounded to T.
template <typename T, int kKeys>
__device__ void mix(float (&out)[kDim / 8][4], const float (&weights)[kKeys / 8][4], Heads rows, int num_keys) {
#pragma unroll
  for (int j = 0; j < kKeys / 16; ++j) {
    if (16 * j >= num_keys) break;
    const auto &low = weights[2 * j], &high = weights[2 * j + 1];
    const uint32_t a[4] = {eet::pack2<T>(low[0], low[1]), eet::pack2<T>(low[2], low[3]),
                           eet::pack2<T>(high[0], high[1]), eet::pack2<T>(high[2], high[3])};
    add_product<T>(out, a, rows, 16 * j);
  }
}

// By one warp: out[16,64] += weights[queries,keys]^T rows[queries,64], of the 16 keys from `first` on. The last 8 need
// not exist, and `keep` then wrote no weights of theirs: these reach rows of `out` that `write` leaves out.
template <typename T, int kKeys>
__device__ void mix_transposed(float (&out)[kDim / 8][4], Tile<kKeys> weights, int first, Heads rows, int num_queries) {
#pragma unroll
  for (int i = 0; i < kKeys / 16; ++i) {
    if (16 * i >= num_queries) break;
    uint32_t a[4];
    eet::load_matrices_transposed(a, weights.at(16 * i + lane() % 8 + lane() / 16 * 8, first / 8 + lane() / 8 % 2));
    add_product<T>(out, a, rows, 16 * i);
  }
}

// The weights of a warp's 16 queries. Where those of a query are alike, say 1/50, rounding to T would make all of them
// larger, or all smaller. So what is rounded is a weight over `rest`, a number from 1/2 to 1 that makes the largest
// weight of a query a power of two.
template <int kKeys>
struct Weights {
  float of[kKeys / 8][4] = {};  // scores, then weights over `rest`
  float rest[2];
  uint32_t kept[kKeys / 64];  // bits: which of them are not dropped

  // Of `count` keys or, if causal, those up to the query's own.
  __device__ void softmax(int first, int count, float scale, bool causal) {
    const float exponent = scale * eet::kLog2e;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int query = first + lane() / 4 + 8 * half, end = causal ? min(count, query + 1) : count;
      float max = eet::kLowest, sum = 0;
#pragma unroll
      for (int j = 0; j < kKeys / 8; ++j) {
#pragma unroll
        for (int i = 2 * half; i < 2 * half + 2; ++i) {
          if (key(j, i) >= end) of[j][i] = -INFINITY;
          max = fmaxf(max, of[j][i]);
        }
      }
      max = eet::warp_max<4>(max);
#pragma unroll
      for (int j = 0; j < kKeys / 8; ++j) {
#pragma unroll
        for (int i = 2 * half; i < 2 * half + 2; ++i) {
          of[j][i] = eet::exp2_of((of[j][i] - max) * exponent);
          sum += of[j][i];
        }
      }
      sum = eet::warp_sum<4>(sum);  // 1 at least
      const float power = __uint_as_float(__float_as_uint(sum) & 0x7f800000), inverse = 1 / power;
      rest[half] = power / sum;
#pragma unroll
      for (int j = 0; j < kKeys / 8; ++j) of[j][2 * half] *= inverse, of[j][2 * half + 1] *= inverse;
    }
  }

  // Element (query, key) is drawn from mix(mix(query's row + head) + key), as in eet_lab/ops/noise.py.
  template <typename T>
  __device__ void draw(const ShortArgs<T>& a, int head, int begin, int first, int count) {
#pragma unroll
    for (uint32_t& bits : kept) bits = ~0u;
    if (!a.drop.tokens) return;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int query = min(first + lane() / 4 + 8 * half, count - 1);
      const uint32_t row = eet::mix(a.drop.row(begin + query) + uint32_t(head));
#pragma unroll
      for (int j = 0; j < kKeys / 8; ++j) {
#pragma unroll
        for (int i = 2 * half; i < 2 * half + 2; ++i) {
          if (eet::mix(row + uint32_t(key(j, i))) < a.drop.below) kept[j / 8] &= ~(1u << (j % 8 * 4 + i));
        }
      }
    }
  }

  // A number of each weight: 0 where it is dropped, and the others grow.
  template <typename T>
  __device__ void drop(const ShortArgs<T>& a, float (&x)[kKeys / 8][4]) const {
    if (!a.drop.tokens) return;
#pragma unroll
    for (int j = 0; j < kKeys / 8; ++j) {
#pragma unroll
      for (int i = 0; i < 4; ++i) x[j][i] = kept[j / 8] >> (j % 8 * 4 + i) & 1 ? x[j][i] * a.drop.scale : 0.f;
    }
  }

 private:
  __device__ static int key(int j, int i) { return 8 * j + lane() % 4 * 2 + i % 2; }
};

// By one warp: 16 rows of a product as T, to rows of a tile from `first` on.
template <typename T, int kWidth>
__device__ void keep(Tile<kWidth> to, int first, const float (&c)[kWidth / 8][4], int num_columns) {
#pragma unroll
  for (int j = 0; j < kWidth / 8; ++j) {
    if (8 * j >= num_columns) break;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      char* const place = to.at(first + lane() / 4 + 8 * half, j) + lane() % 4 * 4;
      *reinterpret_cast<uint32_t*>(place) = eet::pack2<T>(c[j][2 * half], c[j][2 * half + 1]);
    }
  }
}

// By one warp: 16 rows of a product, from `first` on, as far as they exist, by way of the same rows of a tile. `to` is
// where the first of all rows lies.
template <typename T>
__device__ void write(T* to, int64_t stride, Heads by, int first, int count, const float (&c)[kDim / 8][4]) {
  __syncwarp();
  keep<T>(by, first, c, kDim);
  __syncwarp();
#pragma unroll
  for (int i = lane(); i < 16 * 8; i += 32) {
    const int row = first + i / 8;
    if (row >= count) break;
    eet::store(to + row * stride + i % 8 * 8, *reinterpret_cast<const uint4*>(by.at(row, i % 8)));
  }
}

// A block's row and head.
struct Place {
  int head, first, count;

  template <typename T>
  __device__ explicit Place(const ShortArgs<T>& a) : head(blockIdx.x % a.H) {
    const int row = blockIdx.x / a.H;
    first = a.ends[row], count = a.ends[row + 1] - first;
  }
};

// Why      libraries' tiles of 128 queries and keys are mostly empty for rows of 50 tokens; and their gradients of
//          queries, keys and values lie apart, so that a copy is needed to have them beside each other
// Mapping  a block for each row and head: B * H; a warp for each 16 queries, with all of their scores in registers
// Traffic  qkv and out once
// Needs    sm_80; heads of 64 channels, rows of at most kRows tokens, one KV head a head
// Numerics scores, softmax and sums in fp32; weights are rounded to T for the tensor cores
// Source   ours; registers as operands as in FlashAttention-2 (Dao 2023)
template <typename T, int kRows>
__global__ void __launch_bounds__(2 * kRows) short_attention_kernel(const ShortArgs<T> a) {
  extern __shared__ __align__(128) char shared[];
  const Place at(a);
  if (at.count <= 0) return;
  const Heads q{shared}, k{q.start + Heads::bytes(kRows)}, v{k.start + Heads::bytes(kRows)};
  const int64_t width = int64_t(a.H) * kDim;
  const T* const from = a.qkv + at.first * 3 * width + at.head * kDim;
  fetch(q, from, 3 * width, at.count);
  fetch(k, from + width, 3 * width, at.count);
  eet::commit_copies();
  fetch(v, from + 2 * width, 3 * width, at.count);
  eet::commit_copies();
  eet::wait_for_copies<1>();
  __syncthreads();
  const int first = threadIdx.x / 32 * 16;
  Weights<kRows> weights;
  if (first < at.count) {
    multiply<T, kRows>(weights.of, q, first, k, at.count);
    weights.softmax(first, at.count, a.scale, a.causal);
    weights.draw(a, at.head, at.first, first, at.count);
    weights.drop(a, weights.of);
  }
  eet::wait_for_copies<0>();
  __syncthreads();
  if (first >= at.count) return;
  float out[kDim / 8][4] = {};
  mix<T, kRows>(out, weights.of, v, at.count);
#pragma unroll
  for (auto& part : out) {
#pragma unroll
    for (int i = 0; i < 4; ++i) part[i] *= weights.rest[i / 2];
  }
  write(a.to + at.first * width + at.head * kDim, width, q, first, at.count, out);
}

// By one warp: multiplies 16 rows of a tile, from `first` on, by a number of each.
template <typename T>
__device__ void multiply_rows(Heads rows, int first, const float (&by)[2]) {
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const int row = 4 * i + lane() / 8;
    const float factor = __shfl_sync(0xffffffffu, by[i / 2], row % 8 * 4);
    uint4& piece = *reinterpret_cast<uint4*>(rows.at(first + row, lane() % 8));
    float x[eet::kVec<T>];
    eet::unpack<T>(piece, x);
#pragma unroll
    for (float& each : x) each *= factor;
    piece = eet::pack<T>(x);
  }
  __syncwarp();
}

// Why      as above
// Mapping  as above; then a warp for each 16 keys, which reads weights and gradients of scores from shared memory
// Traffic  qkv and dout once, dqkv once; nothing is kept from the forward pass, since a row's scores fit into registers
// Needs    as above; for more than 64 tokens a block takes 128 KiB of shared memory, which sm_86 and sm_89 do not have
// Numerics scores, softmax and sums in fp32; weights, gradients of scores, and dout times `rest` are rounded to T for
//          the tensor cores; no atomics: the same bits each time
// Source   ours; FlashAttention-2's formulas, with sum(weights * dweights) of a query in place of sum(dout * out)
template <typename T, int kRows>
__global__ void __launch_bounds__(2 * kRows) short_attention_backward_kernel(const ShortArgs<T> a) {
  extern __shared__ __align__(128) char shared[];
  const Place at(a);
  if (at.count <= 0) return;
  constexpr int kBytes = Heads::bytes(kRows);
  const Heads q{shared}, k{q.start + kBytes}, v{k.start + kBytes}, dout{v.start + kBytes};
  const Tile<kRows> applied{dout.start + kBytes}, dscores{applied.start + Tile<kRows>::bytes(kRows)};
  const int64_t width = int64_t(a.H) * kDim;
  const T* const from = a.qkv + at.first * 3 * width + at.head * kDim;
  fetch(q, from, 3 * width, at.count);
  fetch(k, from + width, 3 * width, at.count);
  eet::commit_copies();
  fetch(v, from + 2 * width, 3 * width, at.count);
  fetch(dout, a.dout + at.first * width + at.head * kDim, width, at.count);
  eet::commit_copies();
  eet::wait_for_copies<1>();
  __syncthreads();
  const int first = threadIdx.x / 32 * 16;
  Weights<kRows> weights;
  float grad[kRows / 8][4] = {};
  if (first < at.count) {
    multiply<T, kRows>(weights.of, q, first, k, at.count);
    weights.softmax(first, at.count, a.scale, a.causal);
    weights.draw(a, at.head, at.first, first, at.count);
    Weights<kRows> left = weights;
    left.drop(a, left.of);
    keep<T>(applied, first, left.of, at.count);
  }
  eet::wait_for_copies<0>();
  __syncthreads();
  if (first < at.count) {
    multiply_rows<T>(dout, first, weights.rest);
    multiply<T, kRows>(grad, dout, first, v, at.count);
    weights.drop(a, grad);
    float sum[2] = {};
#pragma unroll
    for (int j = 0; j < kRows / 8; ++j) {
#pragma unroll
      for (int i = 0; i < 4; ++i) sum[i / 2] += weights.of[j][i] * grad[j][i];
    }
#pragma unroll
    for (float& each : sum) each = eet::warp_sum<4>(each);
#pragma unroll
    for (int j = 0; j < kRows / 8; ++j) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        grad[j][i] = weights.of[j][i] * (grad[j][i] - sum[i / 2] * weights.rest[i / 2]) * a.scale;
      }
    }
    keep<T>(dscores, first, grad, at.count);
  }
  __syncthreads();
  if (first >= at.count) return;

  // Nobody reads values any more: what is written goes by way of their rows.
  T* const to = a.to + at.first * 3 * width + at.head * kDim;
  const auto written = [&](T* where, auto sum) {
    float out[kDim / 8][4] = {};
    sum(out);
    write(where, 3 * width, v, first, at.count, out);
  };
  written(to, [&](auto& out) { mix<T, kRows>(out, grad, k, at.count); });
  written(to + width, [&](auto& out) { mix_transposed<T, kRows>(out, dscores, first, q, at.count); });
  written(to + 2 * width, [&](auto& out) { mix_transposed<T, kRows>(out, applied, first, dout, at.count); });
}

template <int kRows, typename T>
cudaError_t launch(const ShortArgs<T>& a, int B, cudaStream_t stream) {
  const int scores = 2 * Tile<kRows>::bytes(kRows), one = Heads::bytes(kRows);
  const eet::Launch how{dim3(B * a.H), 2 * kRows, a.dout ? 4 * one + scores : 3 * one, stream};
  return a.dout ? eet::launch(short_attention_backward_kernel<T, kRows>, how, a)
                : eet::launch(short_attention_kernel<T, kRows>, how, a);
}

}  // namespace

// Without `dout`, `to` [T,HD] is the output; with it, `to` [T,3HD] is the gradient of qkv. `ends` [B+1]: where rows
// begin, and where the last one ends. No row has more than `longest` tokens, which is not checked.
extern "C" cudaError_t eet_short_attention(void* to, const void* qkv, const void* dout, const int* ends,
                                           const int64_t* drop_tokens, int drop_call, int drop_below,
                                           float drop_scale, int dtype, int B, int H, int longest, float scale,
                                           int causal, cudaStream_t stream) {
  if (B < 1 || H < 1 || longest < 1 || longest > 128 || !(scale > 0)) return cudaErrorInvalidValue;
  return eet::by_half_type(dtype, [&](auto type) {
    using Type = decltype(type);
    const auto in = [](const void* p) { return static_cast<const Type*>(p); };
    const ShortArgs<Type> a{static_cast<Type*>(to), in(qkv), in(dout), ends, H, scale, causal != 0,
                            {drop_tokens, drop_call, uint32_t(drop_below), drop_scale}};
    return longest <= 64 ? launch<64>(a, B, stream) : launch<128>(a, B, stream);
  });
}
