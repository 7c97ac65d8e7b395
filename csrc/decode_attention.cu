// Attention of one new token a row, with the write of its key and value into the cache.
// B rows, H heads, G KV heads, D head dim, K columns of the KV cache.
#include <climits>

#include "eet/attention.cuh"
#include "eet/cluster.cuh"
#include "eet/dependent.cuh"
#include "eet/launch.cuh"
#include "eet/mma.cuh"
#include "eet/vec.cuh"

namespace {

constexpr int kWarps = 4, kThreads = kWarps * 32, kMaxCluster = 16;
constexpr int kHeads = 8;  // query heads that a block serves: the columns of an mma
constexpr int kKeys = 16;  // keys that a warp handles at a time: a tile
// Registers decide: the largest heads leave no room for loads ahead.
template <int kDim>
constexpr bool kAhead = kDim <= 128;
template <int kDim>
constexpr int kBlocksPerSM = kDim <= 64 ? 4 : kDim <= 128 ? 2 : 1;

template <typename T>
struct DecodeArgs {
  T *keys, *values;        // [B,G,K,D], strides in numbers
  const int64_t* columns;  // [B], `column_stride` apart
  const int64_t* num_pad;  // [B]
  int column_stride, row, head, column;
  int K, D, G, per_group, log_cluster;
  float scale;  // of scores, in units of log2(e)
  const T* qkv;   // [B,(H+2G)D]
  const T* mask;  // [B,1,1,K] or null
  T* out;         // [B,HD]
};

// One warp, 16 keys at a time. The order of the inner dimension and of the output channels is ours to choose, so the 16
// bytes that a lane loads are already its fragments of an mma, and nothing passes through shared memory.
//   scores  [head g, key]   = q[16 heads (8 used), D] * keys^T:  lane 4g+t holds inputs 8t.. of key g
//   outputs [channel, head] = values^T * weights^T:              lane 4g+t holds channels 8g.. of keys 2t and 2t+1
// Where D ends before kDim does, a lane reads the last 8 again: q is 0 there, and such outputs are not stored.
template <typename T, int kDim, bool kExact>
struct Warp {
  static constexpr int kSteps = kDim / 32;          // 32 inputs of a key by four lanes
  static constexpr int kBlocks = (kDim + 63) / 64;  // 64 channels of a value by eight lanes
  uint4 q[kSteps], key[2][kSteps], value[4][kBlocks];
  float out[kBlocks][4][4] = {}, sum[4] = {};  // sum: of weights, for heads 2t and 2t+1
  float max = eet::kLowest;
  const int D, g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;

  __device__ explicit Warp(int D) : D(kExact ? kDim : D) {}

  // Of a tile's keys, the four whose scores and values this lane has.
  __device__ int key_of(int i) const { return i / 2 * 8 + 2 * t + i % 2; }
  // Where a lane's inputs of a key and channels of a value begin.
  __device__ int input(int step) const { return kExact ? step * 32 + t * 8 : min(step * 32 + t * 8, D - 8); }
  __device__ int channel(int block) const { return kExact ? block * 64 + g * 8 : min(block * 64 + g * 8, D - 8); }

  __device__ void load_query(const T* of_head) {
#pragma unroll
    for (int i = 0; i < kSteps; ++i) {
      q[i] = kExact || i * 32 + t * 8 < D ? eet::load(of_head + input(i)) : eet::zeros();
    }
  }

  // `at(k)` is where key or value k lies.
  template <typename At>
  __device__ void load_keys(int first, At at) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const T* from = at(first + half * 8 + g);
#pragma unroll
      for (int i = 0; i < kSteps; ++i) key[half][i] = eet::load_once(from + input(i));
    }
  }

  template <typename At>
  __device__ void load_values(int first, At at) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const T* from = at(first + key_of(i));
#pragma unroll
      for (int block = 0; block < kBlocks; ++block) value[i][block] = eet::load_once(from + channel(block));
    }
  }

  // Puts a key and value, which were loaded in vain, into place `k` of the tile.
  __device__ void patch(int k, const T* new_key, const T* new_value) {
    uint4 of_key[kSteps], of_value[kBlocks];
#pragma unroll
    for (int i = 0; i < kSteps; ++i) of_key[i] = eet::load(new_key + input(i));
#pragma unroll
    for (int i = 0; i < kBlocks; ++i) of_value[i] = eet::load(new_value + channel(i));
#pragma unroll
    for (int i = 0; i < 2 * kSteps; ++i) {
      if (i / kSteps * 8 + g == k) key[i / kSteps][i % kSteps] = of_key[i % kSteps];
    }
#pragma unroll
    for (int i = 0; i < 4 * kBlocks; ++i) {
      if (key_of(i / kBlocks) == k) value[i / kBlocks][i % kBlocks] = of_value[i % kBlocks];
    }
  }

  // score[i]: head g against key_of(i).
  __device__ void multiply_keys(float (&score)[4]) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      float c[2][4] = {};
#pragma unroll
      for (int i = 0; i < kSteps; ++i) {
        const uint4 k = key[half][i];
        eet::mma<T>(c[0], q[i].x, 0, q[i].y, 0, k.x, k.y);
        eet::mma<T>(c[1], q[i].z, 0, q[i].w, 0, k.z, k.w);
      }
      score[half * 2] = c[0][0] + c[1][0];
      score[half * 2 + 1] = c[0][1] + c[1][1];
    }
  }

  // Online softmax of scores in units of log2(e); leaves weights in their place.
  __device__ void weigh(float (&score)[4], bool is_first) {
    const float newest = fmaxf(fmaxf(score[0], score[1]), fmaxf(score[2], score[3]));
    const float new_max = fmaxf(max, eet::warp_max<4>(newest));
    if (!is_first) {
      const float shrink = eet::exp2_of(max - new_max);
      const float of_even = __shfl_sync(0xffffffffu, shrink, t * 8);  // of the lane's outputs: heads 2t and 2t+1
      const float of_odd = __shfl_sync(0xffffffffu, shrink, t * 8 + 4);
      sum[0] *= of_even, sum[1] *= of_odd;
#pragma unroll
      for (auto& block : out) {
#pragma unroll
        for (auto& c : block) c[0] *= of_even, c[1] *= of_odd, c[2] *= of_even, c[3] *= of_odd;
      }
    }
    max = new_max;
#pragma unroll
    for (float& s : score) s = eet::exp2_of(s - max);
  }

  __device__ void multiply_values(const float (&weight)[4]) {
    const uint32_t b0 = eet::pack2<T>(weight[0], weight[1]), b1 = eet::pack2<T>(weight[2], weight[3]);
    const uint32_t ones = eet::pack2<T>(1.f, 1.f);
    eet::mma<T>(sum, ones, 0, ones, 0, b0, b1);
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

  // Its outputs [num_heads][D], not yet divided by the sums, and for each head the maximum and the sum.
  __device__ void leave(float4* outs, float2* stats, int num_heads) {
    if (t == 0) stats[g].x = max;
    if (g == 0) stats[2 * t].y = sum[0], stats[2 * t + 1].y = sum[1];
#pragma unroll
    for (int i = 0; i < kBlocks * 2; ++i) {
      const int h = 2 * t + i % 2, channel = i / 2 * 64 + g * 8;
      const auto& c = out[i / 2];
      if (h >= num_heads || (!kExact && channel >= D)) continue;
      float4* to = outs + (h * D + channel) / 4;
      to[0] = make_float4(c[0][i % 2], c[0][2 + i % 2], c[1][i % 2], c[1][2 + i % 2]);
      to[1] = make_float4(c[2][i % 2], c[2][2 + i % 2], c[3][i % 2], c[3][2 + i % 2]);
    }
  }
};

// Four channels of a head, from parts that saw different keys: their sum, each scaled to the greatest maximum, and in
// `total` that maximum and the sum of weights.
template <int kParts>
__device__ float4 merged(const float4* outs, int out_stride, const float2* stats, int stat_stride, float2& total) {
  float2 stat[kParts];
  float4 out = {};
  total = make_float2(eet::kLowest, 0);
#pragma unroll
  for (int j = 0; j < kParts; ++j) stat[j] = stats[j * stat_stride], total.x = fmaxf(total.x, stat[j].x);
#pragma unroll
  for (int j = 0; j < kParts; ++j) {
    const float4 part = outs[j * out_stride];
    const float share = eet::exp2_of(stat[j].x - total.x);
    total.y += share * stat[j].y;
    out.x += share * part.x, out.y += share * part.y, out.z += share * part.z, out.w += share * part.w;
  }
  return out;
}

template <typename T>
__device__ void store_divided(T* to, float4 v, float by) {
  const float share = __fdividef(1.f, by);
  const uint2 packed = make_uint2(eet::pack2<T>(v.x * share, v.y * share), eet::pack2<T>(v.z * share, v.w * share));
  *reinterpret_cast<uint2*>(to) = packed;
}

// Why      a new token reads all keys and values of its row once: the time is their bytes over the bandwidth
// Mapping  a cluster of blocks for each row and KV head (8 query heads at most); warps take 16 keys at a time, and the
//          parts are merged in shared memory, first in a block, then across its cluster: grid (parts * cluster, G, B)
// Traffic  2*D numbers a key and KV head, once; q, k, v and out are small
// Needs    D a multiple of 8, at most 256; one token a row; bounds are read on the device, K only bounds the mask
// Numerics scores, softmax and sums in fp32; weights are rounded to T for the tensor cores
// Source   Dao et al. 2023, Flash-Decoding; the new key and value come from qkv, so nobody waits for the cache
template <typename T, int kDim, bool kExact>
__global__ void __launch_bounds__(kThreads, kBlocksPerSM<kDim>) decode_kernel(const DecodeArgs<T> a) {
  extern __shared__ float4 outs[];  // [warps][chunks], then the mail: [cluster][slots]
  __shared__ float2 stats[kWarps][kHeads];
  __shared__ uint64_t counter;
  const int b = blockIdx.z, kv = blockIdx.y, warp = threadIdx.x / 32;
  const int cluster = 1 << a.log_cluster, rank = blockIdx.x & (cluster - 1);
  const int first_head = (blockIdx.x >> a.log_cluster) * kHeads, num_heads = min(kHeads, a.per_group - first_head);
  Warp<T, kDim, kExact> w(a.D);
  const int D = w.D;

  // Tiles begin at multiples of 16, and warps of all the cluster's blocks take turns: a warp knows its first tile, and
  // requests it, before it knows where the row begins and ends, and before the kernel ahead of this one has ended.
  const int newest = int(a.columns[int64_t(b) * a.column_stride]), num_pad = int(a.num_pad[b]);
  const int64_t of_head = int64_t(b) * a.row + int64_t(kv) * a.head;
  T *keys = a.keys + of_head, *values = a.values + of_head;
  const int column = a.column, last = a.K - 1;
  const auto key_at = [=](int k) { return keys + int64_t(min(k, last)) * column; };
  const auto value_at = [=](int k) { return values + int64_t(min(k, last)) * column; };
  int first = (warp * cluster + rank) * kKeys;
  if (kAhead<kDim> && first <= last) {
    w.load_keys(first, key_at);
    w.load_values(first, value_at);
  }

  const int chunks = num_heads * D / 4;  // of four channels; block `rank` merges chunks rank, rank + cluster, ...
  const int slots = (chunks + cluster - 1) >> a.log_cluster;
  float4* mail = outs + kWarps * chunks;
  float2* mail_stats = reinterpret_cast<float2*>(mail + cluster * slots);
  if (cluster > 1) {
    const int my_slots = (chunks - rank + cluster - 1) >> a.log_cluster;
    if (threadIdx.x == 0) eet::open_mailbox(&counter, my_slots * cluster * int(sizeof(float4) + sizeof(float2)));
    __syncwarp();
    eet::cluster_arrive();
  }

  eet::wait_for_previous();
  eet::let_next_begin();
  const int head = first_head + min(w.g, num_heads - 1);  // past the last head: the last, again
  const T* token = a.qkv + int64_t(b) * ((a.per_group + 2) * a.G * D);
  const T *new_key = token + (a.per_group * a.G + kv) * D, *new_value = new_key + a.G * D;
  w.load_query(token + (kv * a.per_group + head) * D);

  // The newest key and value are not in the cache yet.
  if (kAhead<kDim> && unsigned(newest - first) < kKeys) w.patch(newest - first, new_key, new_value);
  const auto load = [&](int tile, auto load_tile, auto at, const T* fresh) {
    if (unsigned(newest - tile) < kKeys) {
      load_tile(tile, [&](int k) { return k == newest ? fresh : at(k); });
    } else {
      load_tile(tile, at);
    }
  };
  const auto load_keys = [&](int tile) {
    load(tile, [&](int k, auto at) { w.load_keys(k, at); }, key_at, new_key);
  };
  const auto load_values = [&](int tile) {
    load(tile, [&](int k, auto at) { w.load_values(k, at); }, value_at, new_value);
  };
  if (cluster > 1) eet::cluster_wait();

  const T* mask = a.mask;
  const int begin = mask ? 0 : num_pad, end = mask ? a.K : newest + 1;
  const int stride = kWarps * kKeys << a.log_cluster;
  int step = stride;
  if (first + kKeys <= begin) step = (begin - kKeys - first + stride) / stride * stride;  // nothing but pads
  for (bool is_first = true; first < end; is_first = false) {
    const int tile = first;
    first += step;
    step = stride;
    float score[4];
    if (!kAhead<kDim>) load_keys(tile);
    w.multiply_keys(score);
    if (kAhead<kDim> && first < end) load_keys(first);
#pragma unroll
    for (float& s : score) s *= a.scale;
    if (mask) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const float bias = eet::to_float(mask[int64_t(b) * a.K + min(tile + w.key_of(i), last)]);
        score[i] = fmaxf(score[i] + bias * 1.4426950408889634f, eet::kLowest);
      }
    }
    const bool edge = tile < begin || tile + kKeys > end;
    const auto hidden = [&](int i) {
      const int k = tile + w.key_of(i);
      return k < begin || k >= end;
    };
    if (edge) {
#pragma unroll
      for (int i = 0; i < 4; ++i) score[i] = hidden(i) ? -INFINITY : score[i];
    }
    w.weigh(score, is_first);
    if (!kAhead<kDim>) load_values(tile);
    if (edge) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
#pragma unroll
        for (uint4& v : w.value[i]) v = hidden(i) ? eet::zeros() : v;  // what is there may be no number
      }
    }
    w.multiply_values(score);
    if (kAhead<kDim> && first < end) load_values(first);
  }

  w.leave(outs + warp * chunks, stats[warp], num_heads);
  __syncthreads();
  T* out = a.out + int64_t((b * a.G + kv) * a.per_group + first_head) * D;
  for (int i = threadIdx.x; i < chunks; i += kThreads) {
    float2 total;
    const float4 v = merged<kWarps>(outs + i, chunks, &stats[0][i * 4 / D], kHeads, total);
    if (cluster == 1) {
      store_divided(out + i * 4, v, total.y);
    } else {
      const int at = rank * slots + (i >> a.log_cluster), to = i & (cluster - 1);
      const uint32_t its_counter = eet::at_block(&counter, to);
      eet::send(eet::at_block(mail + at, to), v, its_counter);
      eet::send(eet::at_block(mail_stats + at, to), total, its_counter);
    }
  }
  if (warp == kWarps - 1 && rank == 0 && first_head == 0) {  // the cache's new column
    T *key_to = keys + int64_t(newest) * column, *value_to = values + int64_t(newest) * column;
    for (int i = threadIdx.x % 32 * 8; i < 2 * D; i += 32 * 8) {
      eet::store(i < D ? key_to + i : value_to + (i - D), eet::load(i < D ? new_key + i : new_value + (i - D)));
    }
  }
  if (cluster == 1) return;
  for (int i = threadIdx.x; i * cluster + rank < chunks; i += kThreads) {
    eet::wait_for_mail(&counter);
    float2 total;
    float4 v;
    switch (a.log_cluster) {
      case 1: v = merged<2>(mail + i, slots, mail_stats + i, slots, total); break;
      case 2: v = merged<4>(mail + i, slots, mail_stats + i, slots, total); break;
      case 3: v = merged<8>(mail + i, slots, mail_stats + i, slots, total); break;
      default: v = merged<16>(mail + i, slots, mail_stats + i, slots, total);
    }
    store_divided(out + (i * cluster + rank) * 4, v, total.y);
  }
}

template <typename T, int kDim, bool kExact>
cudaError_t launch_decode(DecodeArgs<T> a, int B, bool dependent, cudaStream_t stream) {
  int cluster = 1;
  const int num_heads = a.per_group < kHeads ? a.per_group : kHeads, parts = eet::ceil_div(a.per_group, kHeads);
  const int tiles = eet::ceil_div(a.K, kKeys);
  const bool clusters = eet::device_attribute(cudaDevAttrComputeCapabilityMajor) >= 9;
  const int room = eet::device_attribute(cudaDevAttrMultiProcessorCount) * kBlocksPerSM<kDim>;
  const int jobs = B * a.G * parts;  // each a cluster
  while (clusters && cluster < kMaxCluster && 2 * cluster * jobs <= room && cluster * kWarps < tiles) cluster *= 2;
  a.log_cluster = 0;
  while (1 << a.log_cluster < cluster) ++a.log_cluster;
  const auto kernel = decode_kernel<T, kDim, kExact>;
  if (cluster > 8) {
    cudaError_t error = cudaFuncSetAttribute(kernel, cudaFuncAttributeNonPortableClusterSizeAllowed, 1);
    if (error) return error;
  }
  const int chunks = num_heads * a.D / 4, mail = cluster > 1 ? cluster * eet::ceil_div(chunks, cluster) : 0;
  const int bytes = (kWarps * chunks + mail) * sizeof(float4) + mail * sizeof(float2);
  return eet::launch(kernel, {dim3(parts * cluster, a.G, B), kThreads, bytes, stream, cluster, dependent}, a);
}

}  // namespace

// One token a row, token b being row b's. Without a mask: keys num_pad .. column; with one: keys 0 .. K-1.
extern "C" cudaError_t eet_decode_attention(void* out, void* keys, void* values, const void* qkv, const void* mask,
                                            const int64_t* num_pad, const int64_t* columns, int64_t column_stride,
                                            int64_t row_stride, int64_t head_stride, int64_t key_stride, int dtype,
                                            int B, int H, int G, int D, int K, int dependent, cudaStream_t stream) {
  if (row_stride > INT_MAX || head_stride > INT_MAX || key_stride > INT_MAX) return cudaErrorInvalidValue;
  return eet::by_half_type(dtype, [&](auto type) {
    using Type = decltype(type);
    const DecodeArgs<Type> a{static_cast<Type*>(keys), static_cast<Type*>(values), columns, num_pad,
                             int(column_stride), int(row_stride), int(head_stride), int(key_stride),
                             K, D, G, H / G, 0, 1.4426950408889634f / sqrtf(float(D)),
                             static_cast<const Type*>(qkv), static_cast<const Type*>(mask), static_cast<Type*>(out)};
    if (D == 64) return launch_decode<Type, 64, true>(a, B, dependent, stream);
    if (D == 128) return launch_decode<Type, 128, true>(a, B, dependent, stream);
    if (D < 64) return launch_decode<Type, 64, false>(a, B, dependent, stream);
    if (D < 128) return launch_decode<Type, 128, false>(a, B, dependent, stream);
    return launch_decode<Type, 256, false>(a, B, dependent, stream);
  });
}
