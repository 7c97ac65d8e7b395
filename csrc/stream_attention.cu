// Attention of one new token a row whose keys and values stream through shared memory, with the write of the new ones
// into the cache. B rows, H heads, G KV heads, D head dim, K columns of the KV cache.
#include <climits>

#include "eet/attention.cuh"
#include "eet/dependent.cuh"
#include "eet/launch.cuh"
#include "eet/merge.cuh"
#include "eet/ring.cuh"
#include "eet/rotation.cuh"
#include "eet/stream_warp.cuh"
#include "eet/vec.cuh"

namespace {

using eet::kHeads;

constexpr int kMaxCluster = 8, kLeastPage = 16;
template <int kDim>
constexpr int kWarps = kDim <= 64 ? 8 : 4;  // that multiply; one more fills the ring
template <int kDim>
using StageOf = eet::KeyStage<kDim, kWarps<kDim>>;

template <typename T>
struct StreamArgs {
  T *keys, *values;        // [B,G,K,D], or in pages [P,G,page,D]; a head's columns lie side by side
  const int64_t* columns;  // [B], `column_stride` apart
  const int64_t* num_pad;  // [B]
  int column_stride, row, head;                  // the last two are strides of the cache, in numbers; `row` also of pages
  int G, per_group, log_cluster, num_stages;     // per_group: query heads of a KV head
  float scale;                                   // of scores, in units of log2(e)
  const T* qkv;                                  // [B,(H+2G)D]
  T* out;                                        // [B,HD]
  eet::Pages pages;                              // of 16 columns or more
  eet::Rotation<T> rotation;

  // Where column k of row b and KV head `kv` lies in `keys` and in `values`.
  template <int kDim, bool kPaged>
  __device__ int64_t offset(int b, int kv, int k) const {
    const int page = kPaged ? pages.page(b, k) : b, column = kPaged ? pages.place(k) : k;
    return int64_t(page) * row + int64_t(kv) * head + int64_t(column) * kDim;
  }
};

// The keys that a row sees, and with which of them the block's stages begin.
struct Tiles {
  int begin, newest;  // of the keys, the first and the last
  int first, stride;  // of those that stages begin with
};

// By the warp that fills the ring. A lane copies a part of a piece, which lies in one page.
template <typename T, int kDim, bool kPaged>
__device__ void fill_ring(const StreamArgs<T>& a, const eet::Ring& ring, const Tiles& tiles) {
  using Stage = StageOf<kDim>;
  const int b = blockIdx.z, kv = blockIdx.y, lane = threadIdx.x % 32;
  const int part = kPaged ? min(Stage::kPiece, 1 << a.pages.log_page) : Stage::kPiece, parts = Stage::kKeys / part;
  const bool is_key = lane < parts;
  const int mine = (is_key ? lane : lane - parts) * part;
  char* const to = ring.stages + Stage::offset(mine) + (is_key ? 0 : Stage::kValues);
  const char* const cache = reinterpret_cast<const char*>(is_key ? a.keys : a.values);
  eet::RingPlace place;
  for (int tile = tiles.first; tile <= tiles.newest; tile += tiles.stride, place.step(a.num_stages)) {
    const int k = tile + mine, count = min(part, tiles.newest + 1 - k);
    const bool copies = lane < 2 * parts && k + part > tiles.begin && count > 0;
    const int rows = min(tile + Stage::kKeys, tiles.newest + 1) - max(tile, tiles.begin / part * part);
    ring.begin(place, 2 * rows * Stage::kRowBytes);
    if (copies) {
      const int64_t from = a.template offset<kDim, kPaged>(b, kv, k) * int(sizeof(T));
      ring.copy(place, to + place.stage * Stage::kBytes, cache + from, count * Stage::kRowBytes);
    }
    ring.end(place);
  }
}

// By one warp: the newest key and its value (`chunks` of 16 bytes, of one and then of the other) take their place in the
// stage, and in the cache if `stores`.
template <typename T, int kDim, bool kPaged>
__device__ void put_newest(const StreamArgs<T>& a, const uint4* chunks, uint32_t stage, int newest, bool stores) {
  using Stage = StageOf<kDim>;
  constexpr int kChunks = kDim / 8;
  const int b = blockIdx.z, kv = blockIdx.y, lane = threadIdx.x % 32, its_place = newest % Stage::kKeys;
  if (lane >= 2 * kChunks) return;
  const uint4 chunk = chunks[lane];
  const bool is_key = lane < kChunks;
  const int part = lane % kChunks;
  eet::store_shared(stage + Stage::offset(its_place) + (is_key ? 0 : Stage::kValues) + part * 16, chunk);
  if (stores) eet::store((is_key ? a.keys : a.values) + a.template offset<kDim, kPaged>(b, kv, newest) + part * 8, chunk);
}

// By one warp, which wrote them: the newest key's chunks, in place.
template <typename T, int kDim>
__device__ void rotate_newest(const eet::Rotation<T>& rotation, const eet::PreparedRotation<T, kDim>& prepared,
                              uint4* chunks) {
  const int t = threadIdx.x % 4;
  uint4 key[kDim / 32];
  __syncwarp();
#pragma unroll
  for (int i = 0; i < kDim / 32; ++i) key[i] = chunks[i * 4 + t];
  rotation.key(key, prepared, t);
  __syncwarp();
#pragma unroll
  for (int i = 0; i < kDim / 32; ++i) {
    if (threadIdx.x % 32 < 4) chunks[i * 4 + t] = key[i];
  }
}

// Why      loads into registers keep too few bytes on their way, and begin only where a warp fits beside the kernel
//          ahead: one warp asks for a hundred KiB of earlier keys and values a block before the query is there (two
//          thirds of that with more than four query heads, whose parts take room too)
// Mapping  a cluster of blocks for each row and KV head (8 query heads at most), which take stages in turn; one warp
//          fills them, the others have 16 keys of each; merged as in decode_attention.cu: grid (parts * cluster, G, B)
// Traffic  2*D numbers a key and KV head, once; q, k, v and out are small
// Needs    sm_90; D 64 or 128; one token a row; bounds are read on the device
// Numerics scores, softmax and sums in fp32; weights are rounded to T for the tensor cores
// Source   ours; Dao et al. 2023, Flash-Decoding
template <typename T, int kDim, bool kPaged, bool kRotates>
__global__ void __launch_bounds__(kWarps<kDim> * 32 + 32, 2)
    stream_attention_kernel(const __grid_constant__ StreamArgs<T> a) {
  using Stage = StageOf<kDim>;
  constexpr int kReaders = kWarps<kDim> * 32, kChunks = kDim / 8;
  extern __shared__ __align__(128) float4 shared[];
  eet::let_next_begin();
  __shared__ float2 stats[kWarps<kDim>][kHeads];
  __shared__ uint4 newest_chunks[2 * kChunks];  // of the newest key, then of its value
  __shared__ eet::PreparedRotation<T, kRotates ? kDim : 32> prepared;
  __shared__ uint64_t counter;
  const int b = blockIdx.z, kv = blockIdx.y, warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int cluster = 1 << a.log_cluster, rank = blockIdx.x & (cluster - 1);
  const int first_head = (blockIdx.x >> a.log_cluster) * kHeads, num_heads = min(kHeads, a.per_group - first_head);
  char* const stages = reinterpret_cast<char*>(shared);
  uint64_t* const barriers = reinterpret_cast<uint64_t*>(stages + a.num_stages * Stage::kBytes);
  const eet::Ring ring{stages, barriers, a.num_stages, Stage::kBytes};
  const eet::Merge<T> merge{reinterpret_cast<float4*>(barriers + 2 * a.num_stages), stats[0], &counter,
                            kWarps<kDim>, num_heads * kDim / 4, rank, a.log_cluster, kDim};

  const int newest = int(a.columns[int64_t(b) * a.column_stride]), begin = min(int(a.num_pad[b]), newest);
  merge.open();
  if (threadIdx.x == kReaders) ring.init(kWarps<kDim>);
  if constexpr (kRotates) a.rotation.prepare(b, prepared);
  __syncthreads();

  // Stages begin at multiples of their length; the blocks of a cluster take turns.
  const int stride = Stage::kKeys << a.log_cluster, skipped = max(0, begin / Stage::kKeys - rank);
  const int first = rank * Stage::kKeys + ((skipped + cluster - 1) >> a.log_cluster) * stride;
  const Tiles tiles{begin, newest, first, stride};
  if (warp == kWarps<kDim>) {
    fill_ring<T, kDim, kPaged>(a, ring, tiles);
    if (cluster > 1) eet::cluster_wait();
    return;
  }

  eet::StreamWarp<T, kDim, kWarps<kDim>> w(a.scale);
  const int head = kv * a.per_group + first_head + min(lane / 4, num_heads - 1);  // past the last head: the last, again
  const T* const row = a.qkv + int64_t(b) * ((a.per_group + 2) * a.G * kDim);
  const T* const query = row + head * kDim;
  const T* const new_key = row + (a.per_group * a.G + kv) * kDim;
  // The warp that has the newest key keeps it, and its value.
  const int its_place = newest % Stage::kKeys;
  const bool has_newest = its_place % Stage::kPiece / 4 == warp;
  asm volatile("" ::"l"(query), "l"(new_key));  // computed now, not after the wait
  eet::wait_for_previous();
  w.load_query(query);
  if (has_newest && lane < 2 * kChunks) {
    newest_chunks[lane] = eet::load(new_key + lane / kChunks * a.G * kDim + lane % kChunks * 8);
  }
  if constexpr (kRotates) {
    w.rotate_query(a.rotation, prepared);
    if (has_newest) rotate_newest(a.rotation, prepared, newest_chunks);
  }
  if (cluster > 1) eet::cluster_wait();

  const uint32_t zero = eet::opaque_zero();
  const uint32_t base = eet::shared_address(stages);
  eet::RingPlace place;
  for (int tile = tiles.first; tile <= newest; tile += tiles.stride) {
    const uint32_t stage = base + place.stage * Stage::kBytes;
    const bool edge = tile < begin || tile + Stage::kKeys > newest;
    const auto hidden = [&](int i) {
      const int k = tile + Stage::key(warp, i);
      return k < begin || k > newest;
    };
    eet::barrier_wait(ring.filled(place), place.parity);
    if (edge) {
      w.hide_values(stage, hidden);
      if (has_newest && tile + its_place == newest) {
        put_newest<T, kDim, kPaged>(a, newest_chunks, stage, newest, first_head == 0);
      }
      eet::Ring::before_copies();
      __syncwarp();
    }
    float score[4];
    w.multiply_keys(stage, score);
    if (edge) w.hide_scores(hidden, score);
    w.weigh(score);
    // An arrival can overtake loads (LOG), so it needs what they brought.
    const uint32_t values = w.multiply_values(stage, score);
    ring.release({place.stage + int(values & zero), place.parity});
    place.step(a.num_stages);
  }

  w.leave(reinterpret_cast<float*>(merge.outs + warp * merge.chunks), stats[warp], num_heads);
  eet::barrier(1, kReaders);
  T* out = a.out + int64_t((b * a.G + kv) * a.per_group + first_head) * kDim;
  merge.send_or_store(out);
  if (cluster > 1) merge.receive(out);
}

// Blocks of a cluster: as many as find a multiprocessor each, and of long rows two of them.
template <typename Stage>
int split(int seen, int jobs) {
  constexpr int kMany = 32;  // stages of a block
  const int processors = eet::device_attribute(cudaDevAttrMultiProcessorCount), num_stages = eet::ceil_div(seen, Stage::kKeys);
  int cluster = 1;
  const auto grows = [&](int each) { return cluster < kMaxCluster && 2 * cluster * jobs <= each * processors; };
  while (cluster < num_stages && grows(1)) cluster *= 2;
  while (cluster * kMany <= num_stages && grows(2)) cluster *= 2;
  return cluster;
}

template <typename T, int kDim, bool kPaged>
cudaError_t launch_stream(StreamArgs<T> a, int B, int seen, int cluster, int shared_bytes, bool dependent,
                          cudaStream_t stream) {
  using Stage = StageOf<kDim>;
  const int parts = eet::ceil_div(a.per_group, kHeads), num_heads = a.per_group < kHeads ? a.per_group : kHeads;
  if (!cluster) cluster = split<Stage>(seen, B * a.G * parts);
  while (1 << a.log_cluster < cluster) ++a.log_cluster;
  const int merged = eet::Merge<T>::shared_bytes(kWarps<kDim>, num_heads * kDim / 4, cluster);
  a.num_stages = (shared_bytes - merged) / eet::Ring::bytes(1, Stage::kBytes);
  if (a.num_stages < 1) return cudaErrorInvalidValue;
  const int bytes = merged + eet::Ring::bytes(a.num_stages, Stage::kBytes), threads = kWarps<kDim> * 32 + 32;
  // A kernel of its own where nothing is rotated: a third fewer instructions to fetch, in each layer (LOG).
  const auto kernel = a.rotation.exists() ? stream_attention_kernel<T, kDim, kPaged, true>
                                          : stream_attention_kernel<T, kDim, kPaged, false>;
  return eet::launch(kernel, {dim3(parts * cluster, a.G, B), threads, bytes, stream, cluster, dependent}, a);
}

}  // namespace

// One token a row, token b being row b's; keys num_pad .. column, `seen` at most. With `inv_freq` or norms, its
// queries and its key are rotated and normed first. Blocks a `cluster` (1, 2, 4 or 8) for each row and KV head; 0: chosen
// by their number and the keys. A head's columns lie D numbers apart. A block takes up to `shared_bytes`.
// `table` [B,table_stride]: the cache is in pages of 2^log_page columns, 16 or more; null: it is not.
extern "C" cudaError_t eet_stream_attention(void* out, void* keys, void* values, const void* qkv,
                                            const int64_t* positions, const void* q_norm, const void* k_norm,
                                            const void* inv_freq, float factor, float eps, const int64_t* num_pad,
                                            const int64_t* columns, const int* table, int64_t columns_stride,
                                            int64_t row_stride, int64_t head_stride, int64_t key_stride,
                                            int table_stride, int log_page, int dtype, int B, int H, int G, int D,
                                            int seen, float scale, int cluster, int shared_bytes, int dependent,
                                            cudaStream_t stream) {
  if (eet::device_attribute(cudaDevAttrComputeCapabilityMajor) < 9) return cudaErrorInvalidValue;
  if (cluster < 0 || cluster > kMaxCluster || cluster & (cluster - 1)) return cudaErrorInvalidValue;
  if (row_stride > INT_MAX || head_stride > INT_MAX || key_stride != D) return cudaErrorInvalidValue;
  if (D != 64 && D != 128) return cudaErrorInvalidValue;
  if (table && 1 << log_page < kLeastPage) return cudaErrorInvalidValue;
  return eet::by_half_type(dtype, [&](auto type) {
    using Type = decltype(type);
    StreamArgs<Type> a{static_cast<Type*>(keys), static_cast<Type*>(values), columns, num_pad};
    a.column_stride = int(columns_stride), a.row = int(row_stride), a.head = int(head_stride);
    a.G = G, a.per_group = H / G, a.scale = eet::kLog2e * scale;
    a.qkv = static_cast<const Type*>(qkv), a.out = static_cast<Type*>(out);
    a.pages = {table, table_stride, log_page};
    a.rotation = {positions, q_norm, k_norm, inv_freq, factor, eps};
    const auto launch = D == 64 ? (table ? launch_stream<Type, 64, true> : launch_stream<Type, 64, false>)
                                : (table ? launch_stream<Type, 128, true> : launch_stream<Type, 128, false>);
    return launch(a, B, seen, cluster, shared_bytes, dependent, stream);
  });
}
