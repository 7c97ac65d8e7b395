// Attention of one new token a row, with the write of its key and value into the cache.
// B rows, H heads, G KV heads, D head dim, K columns of the KV cache.
#include "eet/attention.cuh"
#include "eet/cluster.cuh"
#include "eet/launch.cuh"
#include "eet/mma.cuh"
#include "eet/vec.cuh"

namespace {

constexpr int kMaxCluster = 8;
constexpr int kHeads = 8;  // query heads that a block serves: the columns of an mma
constexpr int kKeys = 16;  // keys that a warp handles at a time
// Registers decide: larger heads leave room for fewer warps, and the largest for no loads ahead.
template <int kDim>
constexpr int kMaxWarps = kDim <= 64 ? 16 : 8;
template <int kDim>
constexpr bool kAhead = kDim <= 128;

template <typename T>
struct DecodeArgs {
  T* out;  // [B,HD]
  eet::Cache<T> keys, values;
  const T* qkv;            // [B,(H+2G)D]
  const T* mask;           // [B,1,1,K] or null
  const int64_t* num_pad;  // [B]
  const int64_t* columns;  // [B], `column_stride` apart
  int64_t column_stride;
  eet::Heads heads;
  int K;
};

// One warp, 16 keys at a time. The order of the inner dimension and of the output channels is ours to choose, so the 16
// bytes that a lane loads are already its fragments of an mma, and nothing passes through shared memory.
//   scores  [head g, key]   = q[16 heads (8 used), D] * keys^T:  lane 4g+t holds inputs 8t.. of key g
//   outputs [channel, head] = values^T * weights^T:              lane 4g+t holds channels 8g.. of keys 2t and 2t+1
// Where D ends before kDim does, a lane reads the last 8 again: q is 0 there, and such outputs are not stored.
template <typename T, int kDim>
struct Warp {
  static constexpr int kSteps = kDim / 32;          // 32 inputs of a key by four lanes
  static constexpr int kBlocks = (kDim + 63) / 64;  // 64 channels of a value by eight lanes
  uint4 q[kSteps], key[2][kSteps], value[4][kBlocks];
  float out[kBlocks][4][4] = {};
  float max = eet::kLowest, sum = 0;

  __device__ int g() const { return threadIdx.x % 32 / 4; }
  __device__ int t() const { return threadIdx.x % 4; }

  __device__ void load_query(const T* of_head, int D) {
#pragma unroll
    for (int i = 0; i < kSteps; ++i) {
      const int d = i * 32 + t() * 8;
      q[i] = d < D ? eet::load(of_head + d) : eet::zeros();
    }
  }

  template <typename At>
  __device__ void load_keys(int first, int D, At at) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const T* from = at(first + half * 8 + g());
#pragma unroll
      for (int i = 0; i < kSteps; ++i) key[half][i] = eet::load_once(from + min(i * 32 + t() * 8, D - 8));
    }
  }

  template <typename At>
  __device__ void load_values(int first, int D, At at) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const T* from = at(first + i / 2 * 8 + 2 * t() + i % 2);
#pragma unroll
      for (int block = 0; block < kBlocks; ++block) {
        value[i][block] = eet::load_once(from + min(block * 64 + g() * 8, D - 8));
      }
    }
  }

  // score[half][j]: head g against key half*8 + 2t + j.
  __device__ void multiply_keys(float (&score)[2][2]) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      float c[4] = {};
#pragma unroll
      for (int i = 0; i < kSteps; ++i) {
        const uint4 k = key[half][i];
        eet::mma<T>(c, q[i].x, 0, q[i].y, 0, k.x, k.y);
        eet::mma<T>(c, q[i].z, 0, q[i].w, 0, k.z, k.w);
      }
      score[half][0] = c[0];
      score[half][1] = c[1];
    }
  }

  // Online softmax of scores in units of log2(e); leaves weights in their place.
  __device__ void weigh(float (&score)[2][2]) {
    const float newest = fmaxf(fmaxf(score[0][0], score[0][1]), fmaxf(score[1][0], score[1][1]));
    const float new_max = fmaxf(max, eet::warp_max<4>(newest)), shrink = eet::exp2_of(max - new_max);
    max = new_max;
    sum *= shrink;
    const float of_even = __shfl_sync(0xffffffffu, shrink, t() * 8);  // of the lane's outputs: heads 2t and 2t+1
    const float of_odd = __shfl_sync(0xffffffffu, shrink, t() * 8 + 4);
#pragma unroll
    for (auto& block : out) {
#pragma unroll
      for (auto& c : block) c[0] *= of_even, c[1] *= of_odd, c[2] *= of_even, c[3] *= of_odd;
    }
#pragma unroll
    for (auto& half : score) {
#pragma unroll
      for (float& s : half) sum += s = eet::exp2_of(s - max);
    }
  }

  __device__ void multiply_values(const float (&weight)[2][2]) {
    const uint32_t b0 = eet::pack2<T>(weight[0][0], weight[0][1]), b1 = eet::pack2<T>(weight[1][0], weight[1][1]);
#pragma unroll
    for (int block = 0; block < kBlocks; ++block) {
      const uint4 &v00 = value[0][block], &v01 = value[1][block], &v10 = value[2][block], &v11 = value[3][block];
      const uint32_t low[4][2] = {{v00.x, v01.x}, {v00.y, v01.y}, {v00.z, v01.z}, {v00.w, v01.w}};
      const uint32_t high[4][2] = {{v10.x, v11.x}, {v10.y, v11.y}, {v10.z, v11.z}, {v10.w, v11.w}};
#pragma unroll
      for (int i = 0; i < 4; ++i) {  // channels 8g + 2i and 8g + 2i + 1
        eet::mma<T>(out[block][i], __byte_perm(low[i][0], low[i][1], 0x5410),
                    __byte_perm(low[i][0], low[i][1], 0x7632), __byte_perm(high[i][0], high[i][1], 0x5410),
                    __byte_perm(high[i][0], high[i][1], 0x7632), b0, b1);
      }
    }
  }
};

// Why      a new token reads all keys and values of its row once: the time is their bytes over the bandwidth
// Mapping  a cluster of blocks for each row and KV head (8 query heads at most); warps take 16 keys at a time, and the
//          parts are merged in shared memory, first in a block, then across its cluster: grid (cluster, G * parts, B)
// Traffic  2*D numbers a key and KV head, once; q, k, v and out are small
// Needs    D a multiple of 8, at most 256; one token a row; bounds are read on the device, K only bounds the mask
// Numerics scores, softmax and sums in fp32; weights are rounded to T for the tensor cores
// Source   Dao et al. 2023, Flash-Decoding; the new key and value come from qkv, so nobody waits for the cache
template <typename T, int kDim>
__global__ void __launch_bounds__(kMaxWarps<kDim> * 32, 1) decode_kernel(const DecodeArgs<T> a) {
  extern __shared__ float shared[];
  const int H = a.heads.H, D = a.heads.D, per_group = H / a.heads.G;
  const int b = blockIdx.z, parts = (per_group + kHeads - 1) / kHeads;
  const int kv = blockIdx.y / parts, first_head = blockIdx.y % parts * kHeads;
  const int num_heads = min(kHeads, per_group - first_head);
  const int warp = threadIdx.x / 32, num_warps = blockDim.x / 32, cluster = gridDim.x;

  Warp<T, kDim> w;
  const int head = kv * per_group + first_head + min(w.g(), num_heads - 1);  // past the last head: the last, again
  const int newest = int(a.columns[b * a.column_stride]);
  const int begin = a.mask ? 0 : int(a.num_pad[b]), end = a.mask ? a.K : newest + 1;
  const T* new_key = a.qkv + a.heads.key(b, kv);
  const T* new_value = a.qkv + a.heads.value(b, kv);
  w.load_query(a.qkv + a.heads.query(b, head), D);

  // The newest key and value are not in the cache yet; past the last one, the last is read again, with weight 0. A tile
  // without either is plain, and its addresses are cheap.
  const auto load = [&](int first, const eet::Cache<T>& cache, const T* fresh, auto load_tile) {
    const T* base = cache.at(b, kv, 0);
    const int stride = int(cache.column);
    if (first >= end) return;
    if (kAhead<kDim> && first + kKeys <= end && unsigned(newest - first) >= kKeys) {
      load_tile([=](int k) { return base + int64_t(k) * stride; });
    } else {
      load_tile([=](int k) { return min(k, end - 1) == newest ? fresh : base + int64_t(min(k, end - 1)) * stride; });
    }
  };
  T mask[2][2];
  const auto load_keys = [&](int first) {
    load(first, a.keys, new_key, [&](auto at) { w.load_keys(first, D, at); });
    if (!a.mask) return;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int k = first + i / 2 * 8 + w.t() * 2 + i % 2;
      mask[i / 2][i % 2] = k < end ? a.mask[int64_t(b) * a.K + k] : T(0.f);
    }
  };
  const auto load_values = [&](int first) {
    load(first, a.values, new_value, [&](auto at) { w.load_values(first, D, at); });
  };

  // Warps of all the cluster's blocks take turns, so that they all have as much to do.
  const int stride = cluster * num_warps * kKeys;
  const float log2e = 1.4426950408889634f, scale = rsqrtf(float(D)) * log2e;
  int first = begin + (warp * cluster + blockIdx.x) * kKeys;
  if (kAhead<kDim>) {
    load_keys(first);
    load_values(first);
  }

  if (blockIdx.x == 0 && first_head == 0) {  // the cache's new column
    for (int i = threadIdx.x * 8; i < 2 * D; i += blockDim.x * 8) {
      const bool is_key = i < D;
      const int d = is_key ? i : i - D;
      eet::store((is_key ? a.keys : a.values).at(b, kv, newest) + d, eet::load((is_key ? new_key : new_value) + d));
    }
  }

  for (; first < end; first += stride) {
    float score[2][2];
    if (!kAhead<kDim>) load_keys(first);
    w.multiply_keys(score);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      float& s = score[i / 2][i % 2];
      s *= scale;
      if (a.mask) s = fmaxf(s + eet::to_float(mask[i / 2][i % 2]) * log2e, eet::kLowest);
      if (first + i / 2 * 8 + w.t() * 2 + i % 2 >= end) s = -INFINITY;
    }
    if (kAhead<kDim>) load_keys(first + stride);
    w.weigh(score);
    if (!kAhead<kDim>) load_values(first);
    w.multiply_values(score);
    if (kAhead<kDim>) load_values(first + stride);
  }

  // Each warp leaves its maximum, its sum and its outputs [heads][D]; the block merges them.
  float* maxima = shared;                        // [warps][kHeads]
  float* sums = maxima + num_warps * kHeads;     // [warps][kHeads]
  float* block_max = sums + num_warps * kHeads;  // [kHeads]
  float* block_sum = block_max + kHeads;         // [kHeads]
  float* block_out = block_sum + kHeads;         // [num_heads][D]
  float* outs = block_out + num_heads * D;       // [warps][num_heads][D]
  const float sum = eet::warp_sum<4>(w.sum);
  if (w.t() == 0) {
    maxima[warp * kHeads + w.g()] = w.max;
    sums[warp * kHeads + w.g()] = sum;
  }
#pragma unroll
  for (int i = 0; i < w.kBlocks * 16; ++i) {
    const int block = i / 16, channel = block * 64 + w.g() * 8 + i % 16 / 4 * 2 + i % 4 / 2, h = w.t() * 2 + i % 2;
    if (h < num_heads && channel < D) outs[(warp * num_heads + h) * D + channel] = w.out[block][i / 4 % 4][i % 4];
  }
  __syncthreads();
  const int64_t out_at = (int64_t(b) * H + kv * per_group + first_head) * D;
  for (int i = threadIdx.x; i < num_heads * D; i += blockDim.x) {
    const int h = i / D;
    float max = eet::kLowest, total = 0, value = 0;
    for (int j = 0; j < num_warps; ++j) max = fmaxf(max, maxima[j * kHeads + h]);
    for (int j = 0; j < num_warps; ++j) {
      const float share = eet::exp2_of(maxima[j * kHeads + h] - max);
      total += share * sums[j * kHeads + h];
      value += share * outs[j * num_heads * D + i];
    }
    block_out[i] = value;
    if (i % D == 0) block_max[h] = max, block_sum[h] = total;
    if (cluster == 1) a.out[out_at + i] = eet::from_float<T>(value / total);
  }
  if (cluster == 1) return;
  eet::cluster_barrier();
  for (int i = blockIdx.x * blockDim.x + threadIdx.x; i < num_heads * D; i += cluster * blockDim.x) {
    float max[kMaxCluster], sum[kMaxCluster], out[kMaxCluster], most = eet::kLowest, total = 0, value = 0;
#pragma unroll
    for (int j = 0; j < kMaxCluster; ++j) {
      if (j >= cluster) break;
      max[j] = eet::of_block(block_max + i / D, j);
      sum[j] = eet::of_block(block_sum + i / D, j);
      out[j] = eet::of_block(block_out + i, j);
      most = fmaxf(most, max[j]);
    }
#pragma unroll
    for (int j = 0; j < kMaxCluster; ++j) {
      if (j >= cluster) break;
      const float share = eet::exp2_of(max[j] - most);
      total += share * sum[j];
      value += share * out[j];
    }
    a.out[out_at + i] = eet::from_float<T>(value / total);
  }
  eet::cluster_barrier();  // nobody leaves while another reads its shared memory
}

template <typename T, int kDim>
cudaError_t launch_decode(const DecodeArgs<T>& a, int B, cudaStream_t stream) {
  const int D = a.heads.D, per_group = a.heads.H / a.heads.G;
  const int jobs = a.heads.G * eet::ceil_div(per_group, kHeads), keys = eet::ceil_div(a.K, kKeys);
  const int multiprocessors = eet::device_attribute(cudaDevAttrMultiProcessorCount);
  const bool clusters = eet::device_attribute(cudaDevAttrComputeCapabilityMajor) >= 9;
  // Few rows: many warps, and several blocks a row and head. Many rows: small blocks, of which several fit.
  const int num_heads = per_group < kHeads ? per_group : kHeads;
  const int slots = multiprocessors * kMaxWarps<kDim>;
  int warps = kMaxWarps<kDim>;
  while (warps > 4 && (B * jobs * warps > slots || warps >= 2 * keys)) warps /= 2;
  int cluster = 1;
  while (clusters && cluster < kMaxCluster && 2 * cluster * B * jobs * warps <= slots && cluster * warps < keys) {
    cluster *= 2;
  }
  const int bytes = (2 * (warps + 1) * kHeads + (warps + 1) * num_heads * D) * sizeof(float);
  const auto kernel = decode_kernel<T, kDim>;
  return eet::launch(kernel, {dim3(cluster, jobs, B), warps * 32, bytes, stream, cluster}, a);
}

}  // namespace

// One token a row, token b being row b's. Without a mask: keys num_pad .. column; with one: keys 0 .. K-1.
extern "C" cudaError_t eet_decode_attention(void* out, void* keys, void* values, const void* qkv, const void* mask,
                                            const int64_t* num_pad, const int64_t* columns, int64_t column_stride,
                                            int64_t row_stride, int64_t head_stride, int64_t key_stride, int dtype,
                                            int B, int H, int G, int D, int K, cudaStream_t stream) {
  return eet::by_half_type(dtype, [&](auto type) {
    using Type = decltype(type);
    const auto cache = [&](void* p) {
      return eet::Cache<Type>{static_cast<Type*>(p), row_stride, head_stride, key_stride};
    };
    const DecodeArgs<Type> a{static_cast<Type*>(out), cache(keys), cache(values), static_cast<const Type*>(qkv),
                             static_cast<const Type*>(mask), num_pad, columns, column_stride, {H, G, D}, K};
    if (D <= 32) return launch_decode<Type, 32>(a, B, stream);
    if (D <= 64) return launch_decode<Type, 64>(a, B, stream);
    if (D <= 128) return launch_decode<Type, 128>(a, B, stream);
    return launch_decode<Type, 256>(a, B, stream);
  });
}
