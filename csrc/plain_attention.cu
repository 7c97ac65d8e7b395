// Attention in fp32 on CUDA cores, for one new token a row or many. The cache holds their keys and values already.
// B rows, T tokens, H heads, G KV heads, D head dim, K columns of the KV cache.
#include "eet/attention.cuh"
#include "eet/launch.cuh"
#include "eet/vec.cuh"

namespace {

constexpr int kWarps = 4;
constexpr int kMaxDim = 256;

struct PlainArgs {
  float* out;  // [T,HD]
  eet::Cache<float> keys, values;
  const float* qkv;                        // [T,(H+2G)D]
  const float* mask;                       // [T,K] or null
  const int64_t *rows, *columns;           // [T], columns `column_stride` apart
  const int64_t *first, *count, *num_pad;  // [B]
  int64_t column_stride;
  eet::Heads heads;
  int K, window;  // keys that a causal query sees at most
  float scale;    // of scores
  bool causal;
};

// Why      tensor cores would round fp32 to tf32; this is for checking, not for speed
// Mapping  a block for each token and head: grid (T, H), 4 warps; a lane scores a key, then lanes share the channels
// Traffic  2*D numbers a key for every query and head
// Needs    D a multiple of 8, at most 256
// Numerics fp32 throughout; online softmax
// Source   Milakov and Gimelshein 2018, Online normalizer calculation for softmax
__global__ void __launch_bounds__(kWarps * 32) plain_kernel(const PlainArgs a) {
  __shared__ __align__(16) float query[kMaxDim];
  __shared__ float maxima[kWarps], sums[kWarps], outs[kWarps][kMaxDim];
  const auto [H, G, D] = a.heads;
  const int64_t token = blockIdx.x, b = a.rows[token], column = a.columns[token * a.column_stride];
  const int h = blockIdx.y, kv = h / (H / G), warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int64_t place = token - a.first[b];
  if (!a.mask && (place < 0 || place >= a.count[b])) return;  // a pad
  int begin = a.mask ? 0 : int(a.num_pad[b]), end = a.mask ? a.K : a.causal ? int(column) + 1 : begin + int(a.count[b]);
  begin = max(begin, end - a.window);

  for (int d = threadIdx.x; d < D; d += blockDim.x) query[d] = a.qkv[a.heads.query(token, h) + d] * a.scale;
  __syncthreads();

  float max = eet::kLowest, sum = 0, out[kMaxDim / 32] = {};
  for (int base = begin + warp * 32; base < end; base += kWarps * 32) {
    float score = -INFINITY;
    if (base + lane < end) {
      score = 0;
      const float* key = a.keys.at(b, kv, base + lane);
      for (int d = 0; d < D; d += 4) {
        float x[4], q[4];
        eet::unpack<float>(eet::load(key + d), x);
        eet::unpack<float>(eet::load(query + d), q);
        score += x[0] * q[0] + x[1] * q[1] + x[2] * q[2] + x[3] * q[3];
      }
      if (a.mask) score += a.mask[token * a.K + base + lane];
    }
    const float new_max = fmaxf(max, eet::warp_max(score)), shrink = eet::exp_of(max - new_max);
    const float weight = eet::exp_of(score - new_max);
    max = new_max;
    sum = sum * shrink + weight;
    for (float& x : out) x *= shrink;
    for (int i = 0; i < min(32, end - base); ++i) {
      const float share = __shfl_sync(0xffffffffu, weight, i);
      const float* value = a.values.at(b, kv, base + i);
#pragma unroll
      for (int j = 0; j < kMaxDim / 32; ++j) {
        if (j * 32 + lane < D) out[j] += share * value[j * 32 + lane];
      }
    }
  }

  sum = eet::warp_sum(sum);
  if (lane == 0) maxima[warp] = max, sums[warp] = sum;
#pragma unroll
  for (int j = 0; j < kMaxDim / 32; ++j) outs[warp][j * 32 + lane] = out[j];
  __syncthreads();
  for (int d = threadIdx.x; d < D; d += blockDim.x) {
    float most = eet::kLowest, total = 0, value = 0;
    for (int i = 0; i < kWarps; ++i) most = fmaxf(most, maxima[i]);
    for (int i = 0; i < kWarps; ++i) {
      const float share = eet::exp_of(maxima[i] - most);
      total += share * sums[i];
      value += share * outs[i][d];
    }
    a.out[(token * H + h) * D + d] = value / total;
  }
}

}  // namespace

// Causal: keys num_pad .. a token's own column, with a window the last of them; else as many keys from num_pad on as the
// row has tokens. With a mask: keys 0 .. K-1. Pads' outputs are left as they are.
extern "C" cudaError_t eet_plain_attention(void* out, void* keys, void* values, const void* qkv, const void* mask,
                                           const int64_t* rows, const int64_t* columns, const int64_t* first,
                                           const int64_t* count, const int64_t* num_pad, const int* table,
                                           int64_t columns_stride, int64_t row_stride, int64_t head_stride,
                                           int64_t key_stride, int table_stride, int log_page, int T, int H, int G,
                                           int D, int K, int window, float scale, int causal, cudaStream_t stream) {
  if (window && (mask || !causal)) return cudaErrorInvalidValue;
  const auto cache = [&](void* p) {
    const eet::Pages pages{table, table_stride, log_page};
    return eet::Cache<float>{static_cast<float*>(p), row_stride, head_stride, key_stride, pages};
  };
  const PlainArgs a{static_cast<float*>(out), cache(keys), cache(values), static_cast<const float*>(qkv),
                    static_cast<const float*>(mask), rows, columns, first, count, num_pad, columns_stride,
                    {H, G, D}, K, eet::most_keys(window), scale, causal != 0};
  return eet::launch(plain_kernel, {dim3(T, H), kWarps * 32, 0, stream}, a);
}
