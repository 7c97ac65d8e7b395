// Attention of one new token a row over rows of very different lengths, with the write of the new keys and values into the
// cache. B rows, H heads, G KV heads, D head dim, K columns of the KV cache.
#include "eet/attention.cuh"
#include "eet/cluster.cuh"
#include "eet/dependent.cuh"
#include "eet/key_stream.cuh"
#include "eet/launch.cuh"
#include "eet/merge.cuh"

namespace {

using eet::kHeads;
using eet::KeyStream;

constexpr int kWarps = 4;      // that multiply; one more fills the ring
template <int kDim>
constexpr int kResident = kDim <= 64 ? 4 : 2;  // blocks of a multiprocessor
constexpr int kBlocks = 8;     // of a cluster
constexpr int kRows = 8;       // of a cluster
constexpr int kSlack = 1;      // stages that a block may take more or fewer, so that a row is not divided
constexpr unsigned kWholeWarp = 0xffffffffu;

// How the blocks of a cluster divide the stages of its rows, which follow each other; in shared memory.
struct Division {
  int begin[kRows], newest[kRows];          // the keys that a row sees
  int start[kRows + 1], from[kBlocks + 1];  // where rows and blocks begin among all stages, and the last one ends

  // By one warp, of which lane i knows of row i.
  template <typename T>
  __device__ void fill(const KeyStream<T>& a, int first_row, int stage_keys) {
    const int lane = threadIdx.x % 32, row = first_row + lane;
    const bool is_row = lane < kRows && row < a.B;
    const int last = is_row ? int(a.columns[int64_t(row) * a.column_stride]) : 0;
    const int first = is_row ? min(int(a.num_pad[row]), last) : 0;
    const int count = is_row ? last / stage_keys - first / stage_keys + 1 : 0;
    int sum = count;
#pragma unroll
    for (int step = 1; step < kRows; step *= 2) {
      const int earlier = __shfl_up_sync(kWholeWarp, sum, step);
      if (lane >= step) sum += earlier;
    }
    const int all = __shfl_sync(kWholeWarp, sum, kRows - 1), before = sum - count;
    if (lane < kRows) begin[lane] = first, newest[lane] = last, start[lane] = before;
    if (lane == 0) start[kRows] = all, from[0] = 0, from[kBlocks] = all;
#pragma unroll
    for (int i = 1; i < kBlocks; ++i) {  // no block without a stage lies within a row, so its readers follow each other
      const int share = all < kBlocks ? min(i, all) : i * all / kBlocks;
      const unsigned near = __ballot_sync(kWholeWarp, is_row && abs(before - share) <= kSlack);
      const int at = __shfl_sync(kWholeWarp, before, near ? __ffs(near) - 1 : 0);
      if (lane == 0) from[i] = near ? at : share;
    }
  }

  // The rows of which block `rank` has a part: from the first on, below the second. These two by whole warps.
  __device__ int2 rows(int rank) const {
    const int lane = threadIdx.x % 32, row = lane % kRows;
    const bool is_row = lane < kRows && start[row] < start[row + 1];
    const unsigned over = __ballot_sync(kWholeWarp, is_row && start[row + 1] <= from[rank]);
    const unsigned begun = __ballot_sync(kWholeWarp, is_row && start[row] < from[rank + 1]);
    return make_int2(__popc(over), __popc(begun));
  }

  // The first of the blocks that have a part of a row, and how many there are.
  __device__ int2 readers(int row) const {
    const int block = threadIdx.x % kBlocks, low = max(start[row], from[block]), high = min(start[row + 1], from[block + 1]);
    const unsigned found = __ballot_sync(kWholeWarp, low < high) & ((1u << kBlocks) - 1);
    return make_int2(__ffs(found) - 1, __popc(found));
  }

  // Block `rank`'s part of a row of its own.
  __device__ eet::Tiles part(int row, int rank, int stage_keys) const {
    const int shift = begin[row] / stage_keys - start[row];
    const int low = max(start[row], from[rank]), high = min(start[row + 1], from[rank + 1]);
    return {begin[row], newest[row], (low + shift) * stage_keys, (high + shift) * stage_keys, stage_keys};
  }
};

// Where a block merges its share of a row's outputs: each of the row's readers sends its part of them.
struct Mailbox {
  float4* outs;      // [readers][slots], of four channels each
  float2* stats;     // the same: their maximum and the sum of weights
  uint64_t* counter;

  static __host__ __device__ constexpr int most(int chunks) { return chunks + kBlocks; }
  static __host__ __device__ constexpr int bytes(int chunks) { return most(chunks) * int(sizeof(float4) + sizeof(float2)); }

  __device__ Mailbox(char* at, int chunks, uint64_t* counter)
      : outs(reinterpret_cast<float4*>(at)), stats(reinterpret_cast<float2*>(outs + most(chunks))), counter(counter) {}

  __device__ void send(int place, float4 v, float2 total, int rank) const {
    const uint32_t its_counter = eet::at_block(counter, rank);
    eet::send(eet::at_block(outs + place, rank), v, its_counter);
    eet::send(eet::at_block(stats + place, rank), total, its_counter);
  }
};

// Why      where a block has a whole row, all wait for the longest: one row of 8,000 keys among 63 of 200 doubles a step
// Mapping  a cluster of 8 blocks for 8 rows and a KV head (8 query heads at most). Its blocks take equal shares of the
//          stages of all its rows, and those that read one row each merge a share of its outputs. What a block does with
//          a row is what stream_attention.cu does: grid (parts * 8, G, B / 8)
// Traffic  2*D numbers a key and KV head, once; q, k, v and out are small
// Needs    sm_90; D 64 or 128; one token a row; bounds are read on the device
// Numerics scores, softmax and sums in fp32; weights are rounded to T for the tensor cores. The lengths of its eight rows
//          decide where a row is divided, and so the order of its sums
// Source   ours; sharing of keys as in Sanovar et al. 2024, LeanAttention, but within clusters, which need no workspace
template <typename T, int kDim, bool kPaged, bool kRotates>
__global__ void __launch_bounds__(kWarps * 32 + 32, kResident<kDim>)
    balanced_attention_kernel(const __grid_constant__ KeyStream<T> a) {
  using Stage = eet::KeyStage<kDim, kWarps>;
  constexpr int kReaders = kWarps * 32;
  extern __shared__ __align__(128) float4 shared[];
  eet::let_next_begin();
  __shared__ float2 stats[kWarps][kHeads];
  __shared__ uint4 newest_chunks[kDim / 4];
  __shared__ eet::PreparedRotation<T, kRotates ? kDim : 32> prepared;
  __shared__ uint64_t counters[2];
  __shared__ Division division;
  const int kv = blockIdx.y, warp = threadIdx.x / 32, rank = blockIdx.x % kBlocks;
  const int first_head = blockIdx.x / kBlocks * kHeads, num_heads = min(kHeads, a.per_group - first_head);
  char* const stages = reinterpret_cast<char*>(shared);
  uint64_t* const barriers = reinterpret_cast<uint64_t*>(stages + a.num_stages * Stage::kBytes);
  const eet::Ring ring{stages, barriers, a.num_stages, Stage::kBytes};
  const eet::Merge<T> merge{reinterpret_cast<float4*>(barriers + 2 * a.num_stages), stats[0], counters,
                            kWarps, num_heads * kDim / 4, 0, 0, kDim};
  const int chunks = merge.chunks;
  // Of a block's rows, others can have parts of the first one, and of the last one where that is another.
  const auto mailbox = [&](bool later) {
    return Mailbox(reinterpret_cast<char*>(merge.mail) + later * Mailbox::bytes(chunks), chunks, counters + later);
  };

  const int first_row = blockIdx.z * kRows;
  if (warp == 0) division.fill(a, first_row, Stage::kKeys);
  if (threadIdx.x == kReaders) ring.init(kWarps);
  __syncthreads();
  const int2 rows = division.rows(rank);
  // A row's readers merge its outputs in turns, by fours of channels.
  const auto num_slots = [&](int2 readers) { return (chunks - (rank - readers.x) + readers.y - 1) / readers.y; };
  const auto opened = [&](int row, bool later) {
    const int2 readers = division.readers(row);
    const int bytes = readers.y * num_slots(readers) * int(sizeof(float4) + sizeof(float2));
    if (threadIdx.x == 0) eet::open_mailbox(counters + later, bytes);
  };
  if (rows.x < rows.y) opened(rows.x, false);
  if (rows.x + 1 < rows.y) opened(rows.y - 1, true);
  __syncwarp();
  eet::cluster_arrive();

  eet::RingPlace place;
  if (warp == kWarps) {
    if (eet::kWaitsTogether) eet::cluster_wait();
    for (int r = rows.x; r < rows.y; ++r) {
      const eet::Tiles tiles = division.part(r, rank, Stage::kKeys);
      eet::fill_ring<T, kDim, kWarps, kPaged>(a, ring, place, first_row + r, kv, tiles);
    }
    __syncwarp();
    if (!eet::kWaitsTogether) eet::cluster_wait();
    return;
  }

  const auto out_of = [&](int r) {
    return a.out + int64_t(((first_row + r) * a.G + kv) * a.per_group + first_head) * kDim;
  };
  const auto prepare = [&](int r) {
    if constexpr (kRotates) {
      a.rotation.prepare(first_row + r, prepared);
      eet::barrier(1, kReaders);
    }
  };
  if (rows.x < rows.y) prepare(rows.x);
  eet::wait_for_previous();
  eet::cluster_wait();
  for (int r = rows.x; r < rows.y; ++r) {
    const eet::Tiles tiles = division.part(r, rank, Stage::kKeys);
    if (r > rows.x) {
      eet::barrier(1, kReaders);  // all are done with what the row before has left here
      prepare(r);
    }
    eet::StreamWarp<T, kDim, kWarps> w(a.scale);
    const eet::RowReader<T, kDim, kWarps, kPaged> reader{a, first_row + r, kv, first_head, num_heads, tiles, newest_chunks};
    reader.template load_query<kRotates>(w, prepared);
    reader.read(w, ring, place);
    w.leave(reinterpret_cast<float*>(merge.outs + warp * chunks), stats[warp], num_heads);

    const int2 readers = division.readers(r);
    const bool later = division.from[readers.x] < division.start[r];  // not its first block's first row
    const int slots = (chunks + readers.y - 1) / readers.y, mine = (rank - readers.x) * slots;
    eet::barrier(1, kReaders);
#pragma unroll 1
    for (int i = threadIdx.x; i < chunks; i += kReaders) {
      float2 total;
      const float4 v = eet::merged<kWarps>(merge.outs + i, chunks, stats[0] + i * 4 / kDim, kHeads, total);
      const int slot = i / readers.y, to = i - slot * readers.y;
      if (readers.y > 1) {
        mailbox(later && to == 0).send(mine + slot, v, total, readers.x + to);
      } else {
        merge.store(out_of(r) + i * 4, v, total.y);
      }
    }
  }

#pragma unroll 1
  for (int r = rows.x; r < rows.y; r = max(r + 1, rows.y - 1)) {  // of the first row and the last one
    const int2 readers = division.readers(r);
    if (readers.y == 1) continue;
    const Mailbox box = mailbox(r > rows.x);
    const int slots = (chunks + readers.y - 1) / readers.y;
    eet::wait_for_mail(box.counter);
#pragma unroll 1
    for (int slot = threadIdx.x; slot < num_slots(readers); slot += kReaders) {
      float2 total;
      const float4 v = eet::merged_in_turn(readers.y, box.outs + slot, slots, box.stats + slot, slots, total);
      merge.store(out_of(r) + (slot * readers.y + rank - readers.x) * 4, v, total.y);
    }
  }
}

template <typename T, int kDim, bool kPaged>
cudaError_t launch_balanced(KeyStream<T> a, int shared_bytes, bool dependent, cudaStream_t stream) {
  using Stage = eet::KeyStage<kDim, kWarps>;
  const int parts = eet::ceil_div(a.per_group, kHeads), num_heads = a.per_group < kHeads ? a.per_group : kHeads;
  const int chunks = num_heads * kDim / 4;
  const int merged = eet::Merge<T>::shared_bytes(kWarps, chunks, 1) + 2 * Mailbox::bytes(chunks);
  constexpr int kOwn = 1024 + 2048;  // of a multiprocessor's, what CUDA takes of each block, and static arrays
  const int room = (shared_bytes + kOwn) * 2 / kResident<kDim> - kOwn;
  a.num_stages = (room - merged) / eet::Ring::bytes(1, Stage::kBytes);
  if (a.num_stages < 1) return cudaErrorInvalidValue;
  const int bytes = merged + eet::Ring::bytes(a.num_stages, Stage::kBytes), threads = kWarps * 32 + 32;
  const auto kernel = a.rotation.exists() ? balanced_attention_kernel<T, kDim, kPaged, true>
                                          : balanced_attention_kernel<T, kDim, kPaged, false>;
  const dim3 grid(parts * kBlocks, a.G, eet::ceil_div(a.B, kRows));
  return eet::launch(kernel, {grid, threads, bytes, stream, kBlocks, dependent}, a);
}

}  // namespace

// As eet_stream_attention, for any number of rows, of which eight that follow each other share their blocks. A block takes
// up to `shared_bytes` where two share a multiprocessor, and half of it where four do.
extern "C" cudaError_t eet_balanced_attention(void* out, void* keys, void* values, const void* qkv,
                                              const int64_t* positions, const void* q_norm, const void* k_norm,
                                              const void* inv_freq, float factor, float eps, const int64_t* num_pad,
                                              const int64_t* columns, const int* table, int64_t columns_stride,
                                              int64_t row_stride, int64_t head_stride, int64_t key_stride,
                                              int table_stride, int log_page, int dtype, int B, int H, int G, int D,
                                              float scale, int shared_bytes, int dependent, cudaStream_t stream) {
  if (!eet::can_stream(row_stride, head_stride, key_stride, table, log_page, D)) return cudaErrorInvalidValue;
  return eet::by_half_type(dtype, [&](auto type) {
    using Type = decltype(type);
    KeyStream<Type> a{static_cast<Type*>(keys), static_cast<Type*>(values), columns, num_pad};
    a.column_stride = int(columns_stride), a.row = int(row_stride), a.head = int(head_stride);
    a.B = B, a.G = G, a.per_group = H / G, a.scale = eet::kLog2e * scale;
    a.qkv = static_cast<const Type*>(qkv), a.out = static_cast<Type*>(out);
    a.pages = {table, table_stride, log_page};
    a.rotation = {positions, q_norm, k_norm, inv_freq, factor, eps};
    const auto launch = D == 64 ? (table ? launch_balanced<Type, 64, true> : launch_balanced<Type, 64, false>)
                                : (table ? launch_balanced<Type, 128, true> : launch_balanced<Type, 128, false>);
    return launch(a, shared_bytes, dependent, stream);
  });
}
