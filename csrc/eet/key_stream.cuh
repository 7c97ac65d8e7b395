// Keys and values of a row and KV head that stream through a ring of stages in shared memory, and the newest ones, which
// come with the query. B rows, H heads, G KV heads, D head dim.
#pragma once

#include <climits>
#include <cstdint>

#include "eet/attention.cuh"
#include "eet/launch.cuh"
#include "eet/ring.cuh"
#include "eet/rotation.cuh"
#include "eet/stream_warp.cuh"
#include "eet/vec.cuh"

namespace eet {

constexpr int kLeastPage = 16;

template <typename T>
struct KeyStream {
  T *keys, *values;        // [B,G,K,D], or in pages [P,G,page,D]; a head's columns lie side by side
  const int64_t* columns;  // [B], `column_stride` apart
  const int64_t* num_pad;  // [B]
  int column_stride, row, head;               // the last two are strides of the cache, in numbers; `row` also of pages
  int B, G, per_group, log_cluster, num_stages;  // per_group: query heads of a KV head
  float scale;                                // of scores, in units of log2(e)
  const T* qkv;                               // [B,(H+2G)D]
  T* out;                                     // [B,HD]
  Pages pages;                                // of 16 columns or more
  Rotation<T> rotation;

  // Where column k of row b and KV head `kv` lies in `keys` and in `values`.
  template <int kDim, bool kPaged>
  __device__ int64_t offset(int b, int kv, int k) const {
    const int page = kPaged ? pages.page(b, k) : b, column = kPaged ? pages.place(k) : k;
    return int64_t(page) * row + int64_t(kv) * head + int64_t(column) * kDim;
  }
};

// Whether the kernels that stream take a cache of such strides, or in such pages, on this GPU.
inline bool can_stream(int64_t row_stride, int64_t head_stride, int64_t key_stride, const int* table, int log_page, int D) {
  if (device_attribute(cudaDevAttrComputeCapabilityMajor) < 9) return false;
  if (row_stride > INT_MAX || head_stride > INT_MAX || key_stride != D) return false;
  return (D == 64 || D == 128) && (!table || 1 << log_page >= kLeastPage);
}

// What a block reads of a row: the keys that the row sees, and with which of them the block's stages begin.
struct Tiles {
  int begin, newest;       // of the keys, the first and the last
  int first, end, stride;  // of those that stages begin with: below `end`
};

// By the warp that fills the ring, for row b and KV head `kv`. A lane copies a part of a piece, which lies in one page.
template <typename T, int kDim, int kWarps, bool kPaged>
__device__ void fill_ring(const KeyStream<T>& a, const Ring& ring, RingPlace& place, int b, int kv, const Tiles& tiles) {
  using Stage = KeyStage<kDim, kWarps>;
  const int lane = threadIdx.x % 32;
  const int part = kPaged ? min(Stage::kPiece, 1 << a.pages.log_page) : Stage::kPiece, parts = Stage::kKeys / part;
  const bool is_key = lane < parts;
  const int mine = (is_key ? lane : lane - parts) * part;
  char* const to = ring.stages + Stage::offset(mine) + (is_key ? 0 : Stage::kValues);
  const char* const cache = reinterpret_cast<const char*>(is_key ? a.keys : a.values);
  for (int tile = tiles.first; tile < tiles.end; tile += tiles.stride, place.step(a.num_stages)) {
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

// What the kWarps that multiply do with one row b and KV head `kv`; one more warp fills the ring.
template <typename T, int kDim, int kWarps, bool kPaged>
struct RowReader {
  using Stage = KeyStage<kDim, kWarps>;
  using Warp = StreamWarp<T, kDim, kWarps>;
  static constexpr int kChunks = kDim / 8;

  const KeyStream<T>& a;
  int b, kv, first_head, num_heads;  // of the KV head's queries, the block's
  const Tiles& tiles;
  uint4* newest_chunks;  // shared [2][kChunks]: of the newest key, then of its value
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int head = kv * a.per_group + first_head + min(lane / 4, num_heads - 1);  // past the last head: the last, again
  const T* const row = a.qkv + int64_t(b) * ((a.per_group + 2) * a.G * kDim);
  const T* const query = row + head * kDim;
  const T* const new_key = row + (a.per_group * a.G + kv) * kDim;
  // The warp that has the newest key keeps it, and its value.
  const int its_place = tiles.newest % Stage::kKeys;
  const bool has_newest = its_place % Stage::kPiece / 4 == warp;

  // Rotated as `prepared` says, if at all.
  template <bool kRotates, typename Prepared>
  __device__ void load_query(Warp& w, const Prepared& prepared) const {
    w.load_query(query);
    if (has_newest && lane < 2 * kChunks) {
      newest_chunks[lane] = load(new_key + lane / kChunks * a.G * kDim + lane % kChunks * 8);
    }
    if constexpr (kRotates) {
      w.rotate_query(a.rotation, prepared);
      if (has_newest) rotate_newest(prepared);
    }
  }

  __device__ void read(Warp& w, const Ring& ring, RingPlace& place) const {
    const uint32_t zero = opaque_zero(), base = shared_address(ring.stages);
    for (int tile = tiles.first; tile < tiles.end; tile += tiles.stride) {
      const uint32_t stage = base + place.stage * Stage::kBytes;
      const bool edge = tile < tiles.begin || tile + Stage::kKeys > tiles.newest;
      const auto hidden = [&](int i) {
        const int k = tile + Stage::key(warp, i);
        return k < tiles.begin || k > tiles.newest;
      };
      barrier_wait(ring.filled(place), place.parity);
      if (edge) {
        w.hide_values(stage, hidden);
        if (has_newest && tile + its_place == tiles.newest) put_newest(stage);
        Ring::before_copies();
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
  }

 private:
  // By one warp, which wrote them: the newest key's chunks, in place.
  __device__ void rotate_newest(const PreparedRotation<T, kDim>& prepared) const {
    const int t = lane % 4;
    uint4 key[kDim / 32];
    __syncwarp();
#pragma unroll
    for (int i = 0; i < kDim / 32; ++i) key[i] = newest_chunks[i * 4 + t];
    a.rotation.key(key, prepared, t);
    __syncwarp();
#pragma unroll
    for (int i = 0; i < kDim / 32; ++i) {
      if (lane < 4) newest_chunks[i * 4 + t] = key[i];
    }
    __syncwarp();
  }

  // By one warp: the newest key and its value take their place in the stage, and one block of the row's in the cache.
  __device__ void put_newest(uint32_t stage) const {
    if (lane >= 2 * kChunks) return;
    const uint4 chunk = newest_chunks[lane];
    const bool is_key = lane < kChunks;
    const int part = lane % kChunks;
    store_shared(stage + Stage::offset(its_place) + (is_key ? 0 : Stage::kValues) + part * 16, chunk);
    if (first_head) return;
    store((is_key ? a.keys : a.values) + a.template offset<kDim, kPaged>(b, kv, tiles.newest) + part * 8, chunk);
  }
};

}  // namespace eet
