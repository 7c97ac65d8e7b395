// Attention of one new token a row, with the write of its key and value into the cache.
// B rows, H heads, G KV heads, D head dim, K columns of the KV cache.
#include "eet/attention.cuh"
#include "eet/cluster.cuh"
#include "eet/dependent.cuh"
#include "eet/launch.cuh"
#include "eet/mma.cuh"
#include "eet/vec.cuh"

namespace {

constexpr int kMaxWarps = 8, kMaxCluster = 8;
constexpr int kHeads = 8;  // query heads that a block serves: the columns of an mma
constexpr int kKeys = 16;  // keys that a warp handles at a time: a tile
// Registers decide: larger heads leave room for fewer warps, and the largest for no values ahead.
template <int kDim>
constexpr int kResidentWarps = kDim <= 64 ? 16 : 8;
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
  // Of a tile's keys, the four whose scores and values this lane has.
  __device__ int key_of(int i) const { return i / 2 * 8 + 2 * t() + i % 2; }

  __device__ void load_query(const T* of_head, int D) {
#pragma unroll
    for (int i = 0; i < kSteps; ++i) {
      const int d = i * 32 + t() * 8;
      q[i] = d < D ? eet::load(of_head + d) : eet::zeros();
    }
  }

  __device__ void load_keys(const T* base, int64_t stride, int first, int last, int D) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const T* from = base + min(first + half * 8 + g(), last) * stride;
#pragma unroll
      for (int i = 0; i < kSteps; ++i) key[half][i] = eet::load_once(from + min(i * 32 + t() * 8, D - 8));
    }
  }

  __device__ void load_values(const T* base, int64_t stride, int first, int last, int D) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const T* from = base + min(first + key_of(i), last) * stride;
#pragma unroll
      for (int block = 0; block < kBlocks; ++block) {
        value[i][block] = eet::load_once(from + min(block * 64 + g() * 8, D - 8));
      }
    }
  }

  // A key by itself: head g's score of it.
  __device__ float score_of(const uint4 (&k)[kSteps]) const {
    float c[4] = {};
#pragma unroll
    for (int i = 0; i < kSteps; ++i) {
      eet::mma<T>(c, q[i].x, 0, q[i].y, 0, k[i].x, k[i].y);
      eet::mma<T>(c, q[i].z, 0, q[i].w, 0, k[i].z, k[i].w);
    }
    return c[0];
  }

  // Begins the softmax with one key, whose score is `only`, in units of log2(e).
  __device__ void open(float only, const uint4 (&v)[kBlocks]) {
    max = only;
    sum = t() == 0;
#pragma unroll
    for (int block = 0; block < kBlocks; ++block) {
      float x[8];
      eet::unpack<T>(v[block], x);
#pragma unroll
      for (int i = 0; i < 8; ++i) out[block][i / 2][i % 2 * 2] = out[block][i / 2][i % 2 * 2 + 1] = x[i];
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
  __device__ void weigh(float (&score)[4]) {
    const float newest = fmaxf(fmaxf(score[0], score[1]), fmaxf(score[2], score[3]));
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
    for (float& s : score) sum += s = eet::exp2_of(s - max);
  }

  __device__ void multiply_values(const float (&weight)[4]) {
    const uint32_t b0 = eet::pack2<T>(weight[0], weight[1]), b1 = eet::pack2<T>(weight[2], weight[3]);
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
  __device__ void leave(float4* outs, float2* stats, int num_heads, int D) {
    const float total = eet::warp_sum<4>(sum);
    if (t() == 0) stats[g()] = make_float2(max, total);
#pragma unroll
    for (int i = 0; i < kBlocks * 2; ++i) {
      const int h = 2 * t() + i % 2, channel = i / 2 * 64 + g() * 8;
      const auto& c = out[i / 2];
      if (h >= num_heads || channel >= D) continue;
      float4* to = outs + (h * D + channel) / 4;
      to[0] = make_float4(c[0][i % 2], c[0][2 + i % 2], c[1][i % 2], c[1][2 + i % 2]);
      to[1] = make_float4(c[2][i % 2], c[2][2 + i % 2], c[3][i % 2], c[3][2 + i % 2]);
    }
  }
};

// Four channels of a head, from parts that saw different keys: their sum, each scaled to the greatest maximum, and in
// `stat` that maximum and the sum of weights.
__device__ float4 merged(const float4* outs, int out_stride, const float2* stats, int stat_stride, int num_parts,
                         float2& stat) {
  float4 out = {};
  stat = make_float2(eet::kLowest, 0);
#pragma unroll 4
  for (int j = 0; j < num_parts; ++j) stat.x = fmaxf(stat.x, stats[j * stat_stride].x);
#pragma unroll 4
  for (int j = 0; j < num_parts; ++j) {
    const float2 part = stats[j * stat_stride];
    const float4 of_part = outs[j * out_stride];
    const float share = eet::exp2_of(part.x - stat.x);
    stat.y += share * part.y;
    out.x += share * of_part.x, out.y += share * of_part.y, out.z += share * of_part.z, out.w += share * of_part.w;
  }
  return out;
}

template <typename T>
__device__ void store_divided(T* to, float4 v, float by) {
  const float share = __fdividef(1.f, by);
  const uint2 packed = make_uint2(eet::pack2<T>(v.x * share, v.y * share), eet::pack2<T>(v.z * share, v.w * share));
  *reinterpret_cast<uint2*>(to) = packed;
}

// Shared memory of a block: its warps' parts, and the mail of its cluster's blocks. A chunk is four channels of a head;
// block `rank` merges chunks rank, rank + cluster, ...: its slots.
struct Layout {
  int chunks, slots, outs, stats, mail, mail_stats, bytes;

  __host__ __device__ Layout(int num_heads, int D, int num_warps, int cluster) {
    chunks = num_heads * D / 4;
    slots = (chunks + cluster - 1) / cluster;
    outs = 16;
    mail = outs + num_warps * chunks * int(sizeof(float4));
    const int num_mail = cluster > 1 ? cluster * slots : 0;
    stats = mail + num_mail * int(sizeof(float4));
    mail_stats = stats + num_warps * kHeads * int(sizeof(float2));
    bytes = mail_stats + num_mail * int(sizeof(float2));
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
__global__ void __launch_bounds__(kMaxWarps * 32, 1) decode_kernel(const DecodeArgs<T> a) {
  extern __shared__ char shared[];
  const int H = a.heads.H, D = a.heads.D, per_group = H / a.heads.G;
  const int b = blockIdx.z, parts = (per_group + kHeads - 1) / kHeads;
  const int kv = blockIdx.y / parts, first_head = blockIdx.y % parts * kHeads;
  const int num_heads = min(kHeads, per_group - first_head);
  const int warp = threadIdx.x / 32, num_warps = blockDim.x / 32, cluster = gridDim.x, rank = blockIdx.x;

  // Tiles begin at multiples of 16, and warps of all the cluster's blocks take turns: a warp knows its first tile, and
  // requests it, before it knows where the row begins and ends, and before the kernel ahead of this one has ended.
  Warp<T, kDim> w;
  const int slot = warp * cluster + rank, stride = cluster * num_warps * kKeys;
  const int64_t *column_at = a.columns + b * a.column_stride, *pad_at = a.num_pad + b;
  const int newest = int(*column_at), num_pad = int(*pad_at);
  const T *keys = a.keys.at(b, kv, 0), *values = a.values.at(b, kv, 0);
  const int column = int(a.keys.column);
  const auto load_keys = [&](int tile) { w.load_keys(keys, column, tile, a.K - 1, D); };
  const auto load_values = [&](int tile) { w.load_values(values, column, tile, a.K - 1, D); };
  int first = slot * kKeys;
  if (kAhead<kDim> && first < a.K) {
    load_keys(first);
    load_values(first);
  }

  const Layout layout(num_heads, D, num_warps, cluster);
  uint64_t* counter = reinterpret_cast<uint64_t*>(shared);
  float4* outs = reinterpret_cast<float4*>(shared + layout.outs);          // [warps][chunks]
  float4* mail = reinterpret_cast<float4*>(shared + layout.mail);          // [cluster][slots]
  float2* stats = reinterpret_cast<float2*>(shared + layout.stats);        // [warps][kHeads]
  float2* mail_stats = reinterpret_cast<float2*>(shared + layout.mail_stats);  // [cluster][slots]
  if (cluster > 1) {
    const int my_slots = (layout.chunks - rank + cluster - 1) / cluster;
    if (threadIdx.x == 0) eet::open_mailbox(counter, my_slots * cluster * int(sizeof(float4) + sizeof(float2)));
    __syncwarp();
    eet::cluster_arrive();
  }

  eet::wait_for_previous();
  eet::let_next_begin();
  const int head = kv * per_group + first_head + min(w.g(), num_heads - 1);  // past the last head: the last, again
  w.load_query(a.qkv + a.heads.query(b, head), D);
  const float log2e = 1.4426950408889634f, scale = rsqrtf(float(D)) * log2e;
  const T* mask = a.mask ? a.mask + int64_t(b) * a.K : nullptr;

  // The newest key and value are not in the cache yet: the warp with the fewest tiles begins with them.
  if (slot == cluster * num_warps - 1) {
    uint4 k[w.kSteps], v[w.kBlocks];
    const T *new_key = a.qkv + a.heads.key(b, kv), *new_value = a.qkv + a.heads.value(b, kv);
#pragma unroll
    for (int i = 0; i < w.kSteps; ++i) k[i] = eet::load(new_key + min(i * 32 + w.t() * 8, D - 8));
#pragma unroll
    for (int i = 0; i < w.kBlocks; ++i) v[i] = eet::load(new_value + min(i * 64 + w.g() * 8, D - 8));
    float score = w.score_of(k) * scale;
    if (mask) score = fmaxf(score + eet::to_float(mask[newest]) * log2e, eet::kLowest);
    w.open(score, v);
    T *key_to = a.keys.at(b, kv, newest), *value_to = a.values.at(b, kv, newest);
#pragma unroll
    for (int i = 0; i < w.kSteps; ++i) {
      const int d = i * 32 + w.t() * 8;
      if (first_head == 0 && w.g() == 0 && d < D) eet::store(key_to + d, k[i]);
    }
#pragma unroll
    for (int i = 0; i < w.kBlocks; ++i) {
      const int d = i * 64 + w.g() * 8;
      if (first_head == 0 && w.t() == 0 && d < D) eet::store(value_to + d, v[i]);
    }
  }

  const int begin = mask ? 0 : num_pad, end = mask ? a.K : newest;
  const bool pads = first + kKeys <= begin;  // nothing but pads
  if (pads) first += (begin - kKeys - first + stride) / stride * stride;
  if (kAhead<kDim> && pads && first < end) {
    load_keys(first);
    load_values(first);
  }

  for (; first < end; first += stride) {
    const int next = first + stride;
    const bool edge = first < begin || first + kKeys > end || unsigned(newest - first) < kKeys;
    const auto hidden = [&](int i) {
      const int k = first + w.key_of(i);
      return edge && (k < begin || k >= end || k == newest);
    };
    float score[4];
    if (!kAhead<kDim>) load_keys(first);
    w.multiply_keys(score);
    if (kAhead<kDim> && next < end) load_keys(next);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      score[i] *= scale;
      if (mask && !hidden(i)) {
        score[i] = fmaxf(score[i] + eet::to_float(mask[first + w.key_of(i)]) * log2e, eet::kLowest);
      }
      if (hidden(i)) score[i] = -INFINITY;
    }
    w.weigh(score);
    if (!kAhead<kDim>) load_values(first);
    if (edge) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
#pragma unroll
        for (uint4& v : w.value[i]) v = hidden(i) ? eet::zeros() : v;  // what is there may be no number
      }
    }
    w.multiply_values(score);
    if (kAhead<kDim> && next < end) load_values(next);
  }

  w.leave(outs + warp * layout.chunks, stats + warp * kHeads, num_heads, D);
  __syncthreads();
  T* out = a.out + (int64_t(b) * H + kv * per_group + first_head) * D;
  if (cluster > 1) eet::cluster_wait();
  for (int i = threadIdx.x; i < layout.chunks; i += blockDim.x) {
    float2 stat;
    const float4 v = merged(outs + i, layout.chunks, stats + i * 4 / D, kHeads, num_warps, stat);
    if (cluster == 1) {
      store_divided(out + i * 4, v, stat.y);
    } else {
      const int at = rank * layout.slots + i / cluster, to = i % cluster;
      const uint32_t its_counter = eet::at_block(counter, to);
      eet::send(eet::at_block(mail + at, to), v, its_counter);
      eet::send(eet::at_block(mail_stats + at, to), stat, its_counter);
    }
  }
  if (cluster == 1) return;
  for (int i = threadIdx.x; i * cluster + rank < layout.chunks; i += blockDim.x) {
    eet::wait_for_mail(counter);
    float2 stat;
    const float4 v = merged(mail + i, layout.slots, mail_stats + i, layout.slots, cluster, stat);
    store_divided(out + (i * cluster + rank) * 4, v, stat.y);
  }
}

template <typename T, int kDim>
cudaError_t launch_decode(const DecodeArgs<T>& a, int B, bool dependent, cudaStream_t stream) {
  const int D = a.heads.D, per_group = a.heads.H / a.heads.G;
  const int jobs = a.heads.G * eet::ceil_div(per_group, kHeads), tiles = eet::ceil_div(a.K, kKeys);
  const int num_heads = per_group < kHeads ? per_group : kHeads;
  const int multiprocessors = eet::device_attribute(cudaDevAttrMultiProcessorCount);
  const bool clusters = eet::device_attribute(cudaDevAttrComputeCapabilityMajor) >= 9;
  const int slots = multiprocessors * kResidentWarps<kDim>;
  int warps = kMaxWarps, cluster = 1;
  while (warps > 4 && B * jobs * warps > slots) warps /= 2;
  while (clusters && cluster < kMaxCluster && 2 * cluster * B * jobs * warps <= slots && cluster * warps < 2 * tiles) {
    cluster *= 2;
  }
  const auto kernel = decode_kernel<T, kDim>;
  const int bytes = Layout(num_heads, D, warps, cluster).bytes;
  return eet::launch(kernel, {dim3(cluster, jobs, B), warps * 32, bytes, stream, cluster, dependent}, a);
}

}  // namespace

// One token a row, token b being row b's. Without a mask: keys num_pad .. column; with one: keys 0 .. K-1.
extern "C" cudaError_t eet_decode_attention(void* out, void* keys, void* values, const void* qkv, const void* mask,
                                            const int64_t* num_pad, const int64_t* columns, int64_t column_stride,
                                            int64_t row_stride, int64_t head_stride, int64_t key_stride, int dtype,
                                            int B, int H, int G, int D, int K, int dependent, cudaStream_t stream) {
  return eet::by_half_type(dtype, [&](auto type) {
    using Type = decltype(type);
    const auto cache = [&](void* p) {
      return eet::Cache<Type>{static_cast<Type*>(p), row_stride, head_stride, key_stride};
    };
    const DecodeArgs<Type> a{static_cast<Type*>(out), cache(keys), cache(values), static_cast<const Type*>(qkv),
                             static_cast<const Type*>(mask), num_pad, columns, column_stride, {H, G, D}, K};
    if (D <= 32) return launch_decode<Type, 32>(a, B, dependent, stream);
    if (D <= 64) return launch_decode<Type, 64>(a, B, dependent, stream);
    if (D <= 128) return launch_decode<Type, 128>(a, B, dependent, stream);
    return launch_decode<Type, 256>(a, B, dependent, stream);
  });
}
