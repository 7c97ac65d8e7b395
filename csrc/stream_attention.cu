// Attention of one new token a row whose keys and values stream through shared memory, with the write of the new ones
// into the cache. B rows, H heads, G KV heads, D head dim, K columns of the KV cache.
#include "eet/attention.cuh"
#include "eet/dependent.cuh"
#include "eet/key_stream.cuh"
#include "eet/launch.cuh"
#include "eet/merge.cuh"

namespace {

using eet::kHeads;
using eet::KeyStream;

constexpr int kMaxCluster = 8;
template <int kDim>
constexpr int kWarpsOf = kDim <= 64 ? 8 : 4;  // that multiply; one more fills the ring

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
__global__ void __launch_bounds__(kWarpsOf<kDim> * 32 + 32, 2)
    stream_attention_kernel(const __grid_constant__ KeyStream<T> a) {
  using Stage = eet::KeyStage<kDim, kWarpsOf<kDim>>;
  constexpr int kWarps = kWarpsOf<kDim>;
  extern __shared__ __align__(128) float4 shared[];
  eet::let_next_begin();
  __shared__ float2 stats[kWarps][kHeads];
  __shared__ uint4 newest_chunks[kDim / 4];
  __shared__ eet::PreparedRotation<T, kRotates ? kDim : 32> prepared;
  __shared__ uint64_t counter;
  const int b = blockIdx.z, kv = blockIdx.y, warp = threadIdx.x / 32;
  const int cluster = 1 << a.log_cluster, rank = blockIdx.x & (cluster - 1);
  const int first_head = (blockIdx.x >> a.log_cluster) * kHeads, num_heads = min(kHeads, a.per_group - first_head);
  char* const stages = reinterpret_cast<char*>(shared);
  uint64_t* const barriers = reinterpret_cast<uint64_t*>(stages + a.num_stages * Stage::kBytes);
  const eet::Ring ring{stages, barriers, a.num_stages, Stage::kBytes};
  const eet::Merge<T> merge{reinterpret_cast<float4*>(barriers + 2 * a.num_stages), stats[0], &counter,
                            kWarps, num_heads * kDim / 4, rank, a.log_cluster, kDim};

  const int newest = int(a.columns[int64_t(b) * a.column_stride]), begin = min(int(a.num_pad[b]), newest);
  merge.open();
  if (threadIdx.x == kWarps * 32) ring.init(kWarps);
  if constexpr (kRotates) a.rotation.prepare(b, prepared);
  __syncthreads();

  // Stages begin at multiples of their length; the blocks of a cluster take turns.
  const int stride = Stage::kKeys << a.log_cluster, skipped = max(0, begin / Stage::kKeys - rank);
  const int first = rank * Stage::kKeys + ((skipped + cluster - 1) >> a.log_cluster) * stride;
  const eet::Tiles tiles{begin, newest, first, newest + 1, stride};
  eet::RingPlace place;
  if (warp == kWarps) {
    if (eet::kWaitsTogether && cluster > 1) eet::cluster_wait();
    eet::fill_ring<T, kDim, kWarps, kPaged>(a, ring, place, b, kv, tiles);
    __syncwarp();
    if (!eet::kWaitsTogether && cluster > 1) eet::cluster_wait();
    return;
  }

  eet::StreamWarp<T, kDim, kWarps> w(a.scale);
  const eet::RowReader<T, kDim, kWarps, kPaged> reader{a, b, kv, first_head, num_heads, tiles, newest_chunks};
  asm volatile("" ::"l"(reader.query), "l"(reader.new_key));  // computed now, not after the wait
  eet::wait_for_previous();
  reader.template load_query<kRotates>(w, prepared);
  if (cluster > 1) eet::cluster_wait();
  reader.read(w, ring, place);

  w.leave(reinterpret_cast<float*>(merge.outs + warp * merge.chunks), stats[warp], num_heads);
  eet::barrier(1, kWarps * 32);
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
cudaError_t launch_stream(KeyStream<T> a, int B, int seen, int cluster, int shared_bytes, bool dependent,
                          cudaStream_t stream) {
  using Stage = eet::KeyStage<kDim, kWarpsOf<kDim>>;
  const int parts = eet::ceil_div(a.per_group, kHeads), num_heads = a.per_group < kHeads ? a.per_group : kHeads;
  if (!cluster) cluster = split<Stage>(seen, B * a.G * parts);
  while (1 << a.log_cluster < cluster) ++a.log_cluster;
  const int merged = eet::Merge<T>::shared_bytes(kWarpsOf<kDim>, num_heads * kDim / 4, cluster);
  a.num_stages = (shared_bytes - merged) / eet::Ring::bytes(1, Stage::kBytes);
  if (a.num_stages < 1) return cudaErrorInvalidValue;
  const int bytes = merged + eet::Ring::bytes(a.num_stages, Stage::kBytes), threads = kWarpsOf<kDim> * 32 + 32;
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
  if (!eet::can_stream(row_stride, head_stride, key_stride, table, log_page, D)) return cudaErrorInvalidValue;
  if (cluster < 0 || cluster > kMaxCluster || cluster & (cluster - 1)) return cudaErrorInvalidValue;
  return eet::by_half_type(dtype, [&](auto type) {
    using Type = decltype(type);
    KeyStream<Type> a{static_cast<Type*>(keys), static_cast<Type*>(values), columns, num_pad};
    a.column_stride = int(columns_stride), a.row = int(row_stride), a.head = int(head_stride);
    a.B = B, a.G = G, a.per_group = H / G, a.scale = eet::kLog2e * scale;
    a.qkv = static_cast<const Type*>(qkv), a.out = static_cast<Type*>(out);
    a.pages = {table, table_stride, log_page};
    a.rotation = {positions, q_norm, k_norm, inv_freq, factor, eps};
    const auto launch = D == 64 ? (table ? launch_stream<Type, 64, true> : launch_stream<Type, 64, false>)
                                : (table ? launch_stream<Type, 128, true> : launch_stream<Type, 128, false>);
    return launch(a, B, seen, cluster, shared_bytes, dependent, stream);
  });
}
