// How attention of whole prompts is cut into blocks for Hopper, and what a block keeps in shared memory.
#pragma once

#include "eet/attention.cuh"
#include "eet/tensor_map.cuh"

namespace eet {

// For a head dim, padded to kDim: warpgroups of 64 queries in a block, keys of a tile, tiles in shared memory, blocks of a
// multiprocessor. Several blocks hide each other's waits, which short rows are full of; one alone hides its own: scores of
// a tile are computed while the values of the tile before are mixed, which takes more registers.
template <int kDim_, int kGroups_, int kKeys_, int kStages_, bool kCausal_, int kBlocks_ = 1>
struct PrefillPlan {
  static constexpr bool kCausal = kCausal_;  // else each query sees all keys of its row
  static constexpr int kBlocks = kBlocks_;
  static constexpr bool kAlone = kBlocks == 1;
  static constexpr int kDim = kDim_, kGroups = kGroups_, kKeys = kKeys_, kStages = kStages_;
  static constexpr int kQueries = 64 * kGroups, kWarps = 4 * kGroups;
  static constexpr int kThreads = 32 * kWarps + (kAlone ? 128 : 32);
  static constexpr int kPanels = kDim / 64;            // 64 numbers wide, side by side
  static constexpr int kTileBytes = kKeys * kDim * 2;  // of keys, and of values
  static constexpr int kPanelBytes = kTileBytes / kPanels;
  // Registers: the loader's warpgroup leaves most of its share to the others, where there is a whole one.
  static constexpr int kShare = 65536 / kThreads / 8 * 8, kLoader = 24;
  static constexpr int kAttender = (kShare * (kGroups + 1) - kLoader) / kGroups / 8 * 8;
  static_assert(kQueries % kKeys == 0 && kQueries / kKeys <= kStages, "a block's own keys end in shared memory");
};

template <typename T>
struct PrefillArgs {
  CUtensorMap queries, keys, values;       // where they are read
  CUtensorMap new_keys, new_values;        // where they are written, if all keys are new and they are to be
  T* out;                                  // [T,HD]
  const int64_t *first, *count, *num_pad;  // [B]
  const int64_t* columns;                  // [T], `column_stride` apart
  int64_t column_stride;
  Heads heads;
  int B, num_blocks, heads_together;  // blocks of queries in the longest row; see PrefillTask
  int window;                         // keys that a query sees at most
  // A tile is seen whole by a warp whose first query sees kKeys keys from its begin on, and fewer than so many more.
  int seen_whole;
  float scale;                        // of scores
  bool all_new, appends;              // a row's columns begin with its first new token; they are written to the cache
};

// One block of queries of one head.
struct PrefillTask {
  int b, h, kv;
  int64_t token;           // its first query
  int query, num_queries;  // the same in the row; how many of the row's there are from it on, perhaps none
  int begin, visible;      // the first key's column; how many keys from there on the first query sees, but for the window
  int skipped;             // keys of the row before that one, which no query sees
  int more;                // keys that each query sees more than the one before it: 1 or 0

  PrefillTask() = default;

  // Tasks are numbered by sections of `heads_together` heads, whose keys and values stay in L2, and there by length:
  // what takes longest begins first.
  template <typename T>
  __device__ PrefillTask(const PrefillArgs<T>& a, int index, int queries, int keys, bool causal) {
    const int first_head = index / (a.heads_together * a.num_blocks) * a.heads_together;
    const int num_heads = min(a.heads_together, a.B * a.heads.H - first_head);
    const int rest = index - first_head * a.num_blocks, head = first_head + rest % num_heads;
    b = head / a.heads.H, h = head % a.heads.H, kv = h / (a.heads.H / a.heads.G);
    query = (a.num_blocks - 1 - rest / num_heads) * queries;
    const int64_t first = a.first[b];
    begin = int(a.num_pad[b]), num_queries = int(a.count[b]) - query;
    token = first + query, visible = causal ? query + 1 : query + num_queries, more = causal;
    if (!a.all_new && num_queries > 0) visible += int(a.columns[first * a.column_stride]) - begin;
    skipped = causal ? max(0, visible - a.window) : 0;
    if (a.all_new) skipped -= skipped % keys;  // so that a tile begins with the first query
    begin += skipped, visible -= skipped;
  }

  // Keys that the first `queries` queries see between them, and the tiles that these fill.
  __device__ int num_keys(int queries) const { return visible + more * (min(queries, num_queries) - 1); }
  __device__ int num_tiles(int queries, int keys) const { return (num_keys(queries) + keys - 1) / keys; }
};

template <typename T, typename P>
struct PrefillShared {
  T query[P::kPanels][P::kQueries][64];
  T key[P::kStages][P::kPanels][P::kKeys][64], value[P::kStages][P::kPanels][P::kKeys][64];
  PrefillTask task;
  uint64_t queries_filled, last_filled, filled[P::kStages], emptied[P::kStages];
};

}  // namespace eet
