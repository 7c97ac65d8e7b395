// Attention of short rows among themselves, in training: forward and backward, in 16 bits.
// B rows, T tokens, H heads of 64 channels.
#include <cuda_runtime.h>

#include <cstdint>

#include "eet/attention.cuh"
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

// By all of a block: the first `count` rows, `stride` numbers apart, and zeros up to a multiple of 16.
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

// By one warp: out[16,64] += weights[16,keys] rows[keys,64], with the weights rounded to T.
template <typename T, int kKeys>
__device__ void mix(float (&out)[kDim / 8][4], const float (&weights)[kKeys / 8][4], Heads rows, int num_keys) {
#pragma unroll
  for (int j = 0; j < kKeys / 16; ++j) {
    if (16 * j >= num_keys) break;
    const auto &low = weights[2 * j], &high = weights[2 * j + 1];
    const uint32_t a[4] = {eet::pack2<T>(low[0], low[1]), eet::pack2<T>(low[2], low[3]),
                           eet::pack2<T>(high[0], high[1]), eet::pack2<T>(high[2], high[3])};
#pragma unroll
    for (int n = 0; n < kDim / 16; ++n) {
      uint32_t y[4];
      eet::load_matrices_transposed(y, rows.at(16 * j + lane() % 16, 2 * n + lane() / 16));
      eet::mma<T>(out[2 * n], a[0], a[1], a[2], a[3], y[0], y[1]);
      eet::mma<T>(out[2 * n + 1], a[0], a[1], a[2], a[3], y[2], y[3]);
    }
  }
}

// By one warp: out[16,64] += weights[queries,keys]^T rows[queries,64], of the 16 keys from `first` on.
template <typename T, int kKeys>
__device__ void mix_transposed(float (&out)[kDim / 8][4], Tile<kKeys> weights, int first, Heads rows, int num_queries) {
#pragma unroll
  for (int i = 0; i < kKeys / 16; ++i) {
    if (16 * i >= num_queries) break;
    uint32_t a[4];
    eet::load_matrices_transposed(
        a, weights.at(16 * i + lane() % 8 + lane() / 16 * 8, first / 8 + lane() / 8 % 2));
#pragma unroll
    for (int n = 0; n < kDim / 16; ++n) {
      uint32_t y[4];
      eet::load_matrices_transposed(y, rows.at(16 * i + lane() % 16, 2 * n + lane() / 16));
      eet::mma<T>(out[2 * n], a[0], a[1], a[2], a[3], y[0], y[1]);
      eet::mma<T>(out[2 * n + 1], a[0], a[1], a[2], a[3], y[2], y[3]);
    }
  }
}

// By one warp: 16 rows of scores become weights, of `count` keys or, if causal, those up to the query's own.
template <int kKeys>
__device__ void softmax(float (&c)[kKeys / 8][4], int first, int count, float scale, bool causal) {
  const float exponent = scale * eet::kLog2e;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int query = first + lane() / 4 + 8 * half, end = causal ? min(count, query + 1) : count;
    float max = eet::kLowest, sum = 0;
#pragma unroll
    for (int j = 0; j < kKeys / 8; ++j) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        float& score = c[j][2 * half + i];
        if (8 * j + lane() % 4 * 2 + i >= end) score = -INFINITY;
        max = fmaxf(max, score);
      }
    }
    max = eet::warp_max<4>(max);
#pragma unroll
    for (int j = 0; j < kKeys / 8; ++j) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        float& score = c[j][2 * half + i];
        score = eet::exp2_of((score - max) * exponent);
        sum += score;
      }
    }
    const float scaled = 1 / eet::warp_sum<4>(sum);
#pragma unroll
    for (int j = 0; j < kKeys / 8; ++j) c[j][2 * half] *= scaled, c[j][2 * half + 1] *= scaled;
  }
}

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

// By one warp: those of 16 rows that exist, from `first` on, to where the row's first lies, by way of a tile's same rows.
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

// Why      libraries' tiles of 128 queries and keys are mostly empty for rows of 50 tokens, and their gradients of queries,
//          keys and values lie apart: beside each other they are a copy
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
  float weights[kRows / 8][4] = {}, out[kDim / 8][4] = {};
  if (first < at.count) {
    multiply<T, kRows>(weights, q, first, k, at.count);
    softmax<kRows>(weights, first, at.count, a.scale, a.causal);
  }
  eet::wait_for_copies<0>();
  __syncthreads();
  if (first >= at.count) return;
  mix<T, kRows>(out, weights, v, at.count);
  write(a.to + at.first * width + at.head * kDim, width, q, first, at.count, out);
}

// Why      as above
// Mapping  as above; then a warp for each 16 keys, which reads weights and gradients of scores from shared memory
// Traffic  qkv and dout once, dqkv once; nothing is kept from the forward pass, since a row's scores fit into registers
// Needs    as above
// Numerics scores, softmax and sums in fp32; weights and gradients of scores are rounded to T for the tensor cores; no
//          atomics: the same bits each time
// Source   ours; FlashAttention-2's formulas, with sum(weights * dweights) of a query in place of sum(dout * out)
template <typename T, int kRows>
__global__ void __launch_bounds__(2 * kRows) short_attention_backward_kernel(const ShortArgs<T> a) {
  extern __shared__ __align__(128) char shared[];
  const Place at(a);
  if (at.count <= 0) return;
  constexpr int kBytes = Heads::bytes(kRows);
  const Heads q{shared}, k{q.start + kBytes}, v{k.start + kBytes}, dout{v.start + kBytes};
  const Tile<kRows> weights{dout.start + kBytes}, dscores{weights.start + Tile<kRows>::bytes(kRows)};
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
  float weight[kRows / 8][4] = {}, grad[kRows / 8][4] = {};
  if (first < at.count) {
    multiply<T, kRows>(weight, q, first, k, at.count);
    softmax<kRows>(weight, first, at.count, a.scale, a.causal);
    keep<T>(weights, first, weight, at.count);
  }
  eet::wait_for_copies<0>();
  __syncthreads();
  if (first < at.count) {
    multiply<T, kRows>(grad, dout, first, v, at.count);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      float sum = 0;
#pragma unroll
      for (int j = 0; j < kRows / 8; ++j) {
#pragma unroll
        for (int i = 2 * half; i < 2 * half + 2; ++i) sum += weight[j][i] * grad[j][i];
      }
      sum = eet::warp_sum<4>(sum);
#pragma unroll
      for (int j = 0; j < kRows / 8; ++j) {
#pragma unroll
        for (int i = 2 * half; i < 2 * half + 2; ++i) grad[j][i] = weight[j][i] * (grad[j][i] - sum) * a.scale;
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
  written(to + 2 * width, [&](auto& out) { mix_transposed<T, kRows>(out, weights, first, dout, at.count); });
}

template <int kRows, typename T>
cudaError_t launch(const ShortArgs<T>& a, int B, cudaStream_t stream) {
  const int tiles = a.dout ? 4 : 3, shared_bytes = tiles * Heads::bytes(kRows) + (a.dout ? 2 * Tile<kRows>::bytes(kRows) : 0);
  const eet::Launch how{dim3(B * a.H), 2 * kRows, shared_bytes, stream};
  return a.dout ? eet::launch(short_attention_backward_kernel<T, kRows>, how, a)
                : eet::launch(short_attention_kernel<T, kRows>, how, a);
}

}  // namespace

// Without `dout`: `to` [T,HD] is the output. With it: `to` [T,3HD] is the gradient of qkv. `ends` [B+1]: where rows begin,
// and where the last one ends; `longest`: tokens of a row at most.
extern "C" cudaError_t eet_short_attention(void* to, const void* qkv, const void* dout, const int* ends, int dtype,
                                           int B, int H, int longest, float scale, int causal, cudaStream_t stream) {
  if (B < 1 || H < 1 || longest < 1 || longest > 128 || !(scale > 0)) return cudaErrorInvalidValue;
  return eet::by_half_type(dtype, [&](auto type) {
    using Type = decltype(type);
    const auto in = [](const void* p) { return static_cast<const Type*>(p); };
    const ShortArgs<Type> a{static_cast<Type*>(to), in(qkv), in(dout), ends, H, scale, causal != 0};
    return longest <= 64 ? launch<64>(a, B, stream) : launch<128>(a, B, stream);
  });
}
