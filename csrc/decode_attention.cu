// Attention of one new token a row, with the write of its key and value into the cache.
// B rows, H heads, G KV heads, D head dim, K columns of the KV cache.
#include <algorithm>
#include <climits>
#include <type_traits>

#include "eet/attention.cuh"
#include "eet/dependent.cuh"
#include "eet/key_warp.cuh"
#include "eet/launch.cuh"
#include "eet/merge.cuh"
#include "eet/rotation.cuh"
#include "eet/vec.cuh"

namespace {

using eet::kHeads;
using eet::kTileKeys;

constexpr int kMaxWarps = 8, kMaxCluster = 8;
// Registers decide how many warps fit on a multiprocessor; the largest heads leave no room for loads ahead.
template <int kDim>
constexpr int kResidentWarps = kDim <= 64 ? 16 : 8;
template <int kDim>
constexpr bool kAhead = kDim <= 128;

template <typename T>
struct DecodeArgs {
  T *keys, *values;        // [B,G,K,D], or in pages [P,G,page,D]
  const int64_t* columns;  // [B], `column_stride` apart
  const int64_t* num_pad;  // [B]
  int column_stride, row, head, column;  // the last three are strides of the cache, in numbers; `row` also of pages
  int K, D, G, per_group, log_cluster;   // per_group: query heads of a KV head
  float scale;                           // of scores, in units of log2(e)
  const T* qkv;                          // [B,(H+2G)D]
  const T* mask;                         // [B,1,1,K] or null
  T* out;                                // [B,HD]
  eet::Pages pages;                      // of a multiple of 16 columns: a tile lies in one
};

struct NoRotation {};  // of models that have neither norms of heads nor rotary positions

// Why      a new token reads all keys and values of its row once: the time is their bytes over the bandwidth, and for
//          short rows a chain of latencies, so each thread has few instructions to fetch and nothing to divide
// Mapping  a cluster of blocks for each row and KV head (8 query heads at most); warps take 16 keys at a time, and the
//          parts are merged in shared memory, first in a block, then across its cluster: grid (parts * cluster, G, B)
// Traffic  2*D numbers a key and KV head, once; q, k, v and out are small
// Needs    D a multiple of 8, at most 256; one token a row; bounds are read on the device, K only bounds what is read
// Numerics scores, softmax and sums in fp32; weights are rounded to T for the tensor cores
// Source   Dao et al. 2023, Flash-Decoding; the new key and value come from qkv, so nobody waits for the cache
template <typename T, int kDim, bool kExact, bool kPaged, typename Rotation>
__global__ void __launch_bounds__(kMaxWarps * 32, kResidentWarps<kDim> / kMaxWarps)
    decode_kernel(const DecodeArgs<T> a, const Rotation rotation) {
  constexpr bool kRotates = !std::is_same_v<Rotation, NoRotation>;
  extern __shared__ float4 shared[];
  eet::let_next_begin();
  __shared__ float2 stats[kMaxWarps][kHeads];
  __shared__ uint64_t counter;
  __shared__ eet::PreparedRotation<T, kRotates ? kDim : 32> prepared;
  const int b = blockIdx.z, kv = blockIdx.y, warp = threadIdx.x / 32, num_warps = blockDim.x / 32;
  const int cluster = 1 << a.log_cluster, rank = blockIdx.x & (cluster - 1);
  const int first_head = (blockIdx.x >> a.log_cluster) * kHeads, num_heads = min(kHeads, a.per_group - first_head);
  eet::KeyWarp<T, kDim, kExact> w(a.D);
  const int D = w.D, last = a.K - 1;

  // Tiles begin at multiples of 16, and warps of all the cluster's blocks take turns: a warp knows its first tile, and
  // requests it, before it knows where the row's pads end, and before the kernel ahead of this one has ended.
  const int newest = int(a.columns[int64_t(b) * a.column_stride]), num_pad = min(int(a.num_pad[b]), newest);
  // Where column 0 would lie if all columns lay like those of this tile.
  const auto lies = [&](int tile) {
    int64_t at = int64_t(kPaged ? a.pages.page(b, tile) : b) * a.row + int64_t(kv) * a.head;
    if (kPaged) at += int64_t(a.pages.place(tile) - tile) * a.column;
    return at;
  };
  const int column_bytes = a.column * int(sizeof(T));
  int next = (warp * cluster + rank) * kTileKeys;
  int64_t at = lies(min(next, last));
  const auto key_at = [&](int k) { return eet::Columns<T>{a.keys + at + w.input(0), column_bytes, last}(k); };
  const auto value_at = [&](int k) { return eet::Columns<T>{a.values + at + w.channel(0), column_bytes, last}(k); };
  if (kAhead<kDim> && next <= last) {
    w.load_keys(next, key_at);
    w.load_values(next, value_at);
  }

  const eet::Merge<T> merge{shared, stats[0], &counter, num_warps, num_heads * D / 4, rank, a.log_cluster, D};
  merge.open();

  const int head = kv * a.per_group + first_head + min(w.g, num_heads - 1);  // past the last head: the last, again
  const T* query = a.qkv + int64_t(b) * ((a.per_group + 2) * a.G * D) + head * D;
  const T *new_key = query + (a.per_group * a.G + kv - head) * D, *new_value = new_key + a.G * D;
  // Addresses are computed now, not after the wait.
  const T *key_from = new_key + w.input(0), *value_from = new_value + w.channel(0);
  asm volatile("" ::"l"(query + w.input(0)), "l"(key_from), "l"(value_from));
  if constexpr (kRotates) {
    rotation.prepare(b, prepared);
    __syncthreads();
  }
  eet::wait_for_previous();
  w.load_query(query);
  if (kAhead<kDim>) w.load_newest(new_key, new_value);
  if constexpr (kRotates) w.rotate(rotation, prepared);
  const T* mask = a.mask ? a.mask + int64_t(b) * a.K : nullptr;
  T bias[4];
  const auto load_mask = [&](int tile) {
#pragma unroll
    for (int i = 0; i < 4; ++i) bias[i] = mask[min(tile + w.key_of(i), last)];
  };
  if (mask) load_mask(next);
  if (cluster > 1) eet::cluster_wait();

  const int begin = mask ? 0 : num_pad, end = mask ? a.K : newest + 1;
  const int stride = num_warps * kTileKeys << a.log_cluster, pads = begin - next - kTileKeys;
  int step = pads < 0 ? stride : (pads + stride) & -stride;  // after a tile of nothing but pads, to the first other one
  for (bool is_first = true; next < end; is_first = false) {
    const int tile = next;
    next += step;
    step = stride;
    if (kPaged && (!kAhead<kDim> || next < end)) at = lies(kAhead<kDim> ? next : tile);
    const bool edge = tile < begin || tile + kTileKeys >= end || unsigned(newest - tile) < kTileKeys;
    if (!kAhead<kDim>) w.load_keys(tile, [&](int k) { return k == newest ? key_from : key_at(k); });
    if (kAhead<kDim> && edge) w.put_newest(newest - tile);
    float score[4];
    w.multiply_keys(score);
    if (kAhead<kDim> && next < end) w.load_keys(next, key_at);
#pragma unroll
    for (float& s : score) s *= a.scale;
    if (mask) {
#pragma unroll
      for (int i = 0; i < 4; ++i) score[i] = fmaxf(score[i] + eet::to_float(bias[i]) * eet::kLog2e, eet::kLowest);
      load_mask(next);
    }
    const auto hidden = [=](int i) { return tile + i < begin || tile + i >= end; };
    if (edge) w.hide_keys(score, hidden);
    w.weigh(score, is_first);
    if (!kAhead<kDim>) w.load_values(tile, [&](int k) { return k == newest ? value_from : value_at(k); });
    if (edge) w.hide_values(hidden);
    w.multiply_values(score);
    if (kAhead<kDim> && next < end) w.load_values(next, value_at);
  }

  w.leave(shared + warp * merge.chunks, stats[warp], num_heads);
  if (warp == num_warps - 1 && rank == 0 && first_head == 0) {  // the cache's new column
    if (!kAhead<kDim>) w.load_newest(new_key, new_value);
    at = lies(newest) + int64_t(newest) * a.column;
    w.store_newest(a.keys + at, a.values + at);
  }
  __syncthreads();
  T* out = a.out + int64_t((b * a.G + kv) * a.per_group + first_head) * D;
  merge.send_or_store(out);
  if (cluster > 1) merge.receive(out);
}

// A tile for every warp while there is room for so many: first a block for each multiprocessor, then more warps a block,
// then more blocks, as many as begin while a linear layer still has half of the multiprocessors' registers (LOG).
template <int kDim>
void split(int tiles, int jobs, int& warps, int& cluster) {
  const bool clusters = eet::device_attribute(cudaDevAttrComputeCapabilityMajor) >= 9;
  const int processors = eet::device_attribute(cudaDevAttrMultiProcessorCount);
  warps = 4, cluster = 1;
  const auto grows = [&](int each) {  // to at most so many warps a multiprocessor
    return warps * cluster < tiles && 2 * warps * cluster * jobs <= each * processors;
  };
  while (clusters && cluster < kMaxCluster && grows(4)) cluster *= 2;
  if (grows(kResidentWarps<kDim>)) warps = kMaxWarps;
  while (clusters && cluster < kMaxCluster && grows(8)) cluster *= 2;
}

struct How {
  int B, seen, warps, cluster;  // seen: keys that a row sees at most
  bool dependent;
  cudaStream_t stream;
};

template <typename T, int kDim, bool kExact, bool kPaged, typename Rotation = NoRotation>
cudaError_t launch_decode(DecodeArgs<T> a, How how, Rotation rotation = {}) {
  auto& [B, seen, warps, cluster, dependent, stream] = how;
  const int parts = eet::ceil_div(a.per_group, kHeads);
  const int num_columns = std::min(a.K - kTileKeys, seen - 1) + kTileKeys;  // of the tiles that they meet
  if (!warps) split<kDim>(eet::ceil_div(num_columns, kTileKeys), B * a.G * parts, warps, cluster);
  while (1 << a.log_cluster < cluster) ++a.log_cluster;
  const int num_heads = a.per_group < kHeads ? a.per_group : kHeads;
  const int bytes = eet::Merge<T>::shared_bytes(warps, num_heads * a.D / 4, cluster);
  const auto kernel = decode_kernel<T, kDim, kExact, kPaged, Rotation>;
  return eet::launch(kernel, {dim3(parts * cluster, a.G, B), warps * 32, bytes, stream, cluster, dependent}, a, rotation);
}

template <typename T, bool kPaged>
cudaError_t launch_for(const DecodeArgs<T>& a, const eet::Rotation<T>& rotation, const How& how) {
  if (rotation.exists()) {  // pairs of numbers of such heads lie in one lane
    return a.D == 64 ? launch_decode<T, 64, true, kPaged>(a, how, rotation)
                     : launch_decode<T, 128, true, kPaged>(a, how, rotation);
  }
  if (a.D == 64) return launch_decode<T, 64, true, kPaged>(a, how);
  if (a.D == 128) return launch_decode<T, 128, true, kPaged>(a, how);
  if (a.D < 64) return launch_decode<T, 64, false, kPaged>(a, how);
  if (a.D < 128) return launch_decode<T, 128, false, kPaged>(a, how);
  return launch_decode<T, 256, false, kPaged>(a, how);
}

}  // namespace

// One token a row, token b being row b's; with `inv_freq` or norms, heads of 64 or 128 are rotated and normed first, those
// of the newest key among them. Without a mask: keys num_pad .. column, of which a row sees no more
// than `seen`; with one: keys 0 .. K-1.
// `warps` a block (4 or 8) and blocks a `cluster` (1, 2, 4 or 8) for each row and KV head; 0: chosen by their number.
// `table` [B,blocks]: the cache is in pages of 2^log_page columns, 16 or more; null: it is not.
extern "C" cudaError_t eet_decode_attention(void* out, void* keys, void* values, const void* qkv,
                                            const int64_t* positions, const void* q_norm, const void* k_norm,
                                            const void* inv_freq, float factor, float eps, const void* mask,
                                            const int64_t* num_pad, const int64_t* columns, const int* table,
                                            int64_t column_stride, int64_t row_stride, int64_t head_stride,
                                            int64_t key_stride, int blocks, int log_page, int dtype, int B, int H,
                                            int G, int D, int K, int seen, float scale, int warps, int cluster,
                                            int dependent, cudaStream_t stream) {
  const bool divided = (warps == 4 || warps == kMaxWarps) && cluster > 0 && cluster <= kMaxCluster;
  if ((warps || cluster) && (!divided || cluster & (cluster - 1))) return cudaErrorInvalidValue;
  if (row_stride > INT_MAX || head_stride > INT_MAX || key_stride > INT_MAX / 2) return cudaErrorInvalidValue;
  if (table && 1 << log_page < kTileKeys) return cudaErrorInvalidValue;
  if (seen < 1 || seen > K) return cudaErrorInvalidValue;
  if ((inv_freq || q_norm) && D != 64 && D != 128) return cudaErrorInvalidValue;
  return eet::by_half_type(dtype, [&](auto type) {
    using Type = decltype(type);
    const eet::Rotation<Type> rotation(positions, q_norm, k_norm, inv_freq, factor, eps);
    DecodeArgs<Type> a{static_cast<Type*>(keys), static_cast<Type*>(values), columns, num_pad};
    a.column_stride = int(column_stride);
    a.row = int(row_stride), a.head = int(head_stride), a.column = int(key_stride);
    a.K = K, a.D = D, a.G = G, a.per_group = H / G, a.scale = eet::kLog2e * scale;
    a.qkv = static_cast<const Type*>(qkv), a.mask = static_cast<const Type*>(mask), a.out = static_cast<Type*>(out);
    a.pages = {table, blocks, log_page};
    const How how{B, seen, warps, cluster, dependent != 0, stream};
    return table ? launch_for<Type, true>(a, rotation, how)
                 : launch_for<Type, false>(a, rotation, how);
  });
}
