// What one warp of a block does while the others compute: it keeps the copy engine busy (sm_90 and later).
#pragma once

#include "eet/mbarrier.cuh"
#include "eet/prefill_task.cuh"
#include "eet/ring.cuh"
#include "eet/vec.cuh"

namespace eet {

// Brings queries, and keys and values tile by tile; writes new keys and values to the cache, if it is to.
template <typename T, typename P>
class PrefillLoader {
 public:
  __device__ PrefillLoader(const PrefillArgs<T>& a, PrefillShared<T, P>& s)
      : a(a), s(s), task(s.task), lane(threadIdx.x % 32) {
    // Where the row's keys and values begin: in the cache, or among the tokens.
    key = value = {0, task.kv, task.begin, task.b};
    if (!a.all_new) return;
    key = {0, a.heads.H + task.kv, int(task.token) - task.query + task.skipped, 0};
    value = {0, key.head + a.heads.G, key.position, 0};
  }

  __device__ void load() {
    if (lane == 0) {
      expect_bytes(&s.queries_filled, sizeof(s.query));
      for (int panel = 0; panel < P::kPanels; ++panel) {
        load_box(s.query[panel], a.queries, {panel * 64, task.h, int(task.token), 0}, &s.queries_filled);
      }
    }
    const int num_tiles = task.num_tiles(P::kQueries, P::kKeys), num_keys = task.num_keys(task.num_queries);
    const int first_own = (task.query - task.skipped) / P::kKeys;  // if all keys are new
    RingPlace at, own;
    for (int tile = 0; tile < num_tiles; ++tile, at.step(P::kStages)) {
      if (tile == first_own) own = at;
      const int left = num_keys - tile * P::kKeys;
      if (left < P::kKeys) {
        load_last(tile, left, at);
      } else if (lane == 0) {
        load_tile(tile, at, &s.filled[at.stage]);
      }
    }
    if (a.appends && task.h % (a.heads.H / a.heads.G) == 0) append(own, first_own, num_tiles);
  }

 private:
  __device__ void load_tile(int tile, RingPlace at, uint64_t* barrier) {
    barrier_wait(&s.emptied[at.stage], at.parity ^ 1);
    expect_bytes(barrier, 2 * P::kTileBytes);
    Corner from_key = key, from_value = value;
    from_key.position += tile * P::kKeys, from_value.position += tile * P::kKeys;
    for (int panel = 0; panel < P::kPanels; ++panel, from_key.d += 64, from_value.d += 64) {
      load_box(s.key[at.stage][panel], a.keys, from_key, barrier);
      load_box(s.value[at.stage][panel], a.values, from_value, barrier);
    }
  }

  // What lies after the row's newest value may be anything, NaN too, which a weight of 0 would not make 0.
  __device__ void load_last(int tile, int left, RingPlace at) {
    if (lane == 0) load_tile(tile, at, &s.last_filled);
    __syncwarp();
    barrier_wait(&s.last_filled, 0);
    for (int panel = 0; panel < P::kPanels; ++panel) {
      T* rows = &s.value[at.stage][panel][0][0];
      for (int i = left * 8 + lane; i < P::kKeys * 8; i += 32) store(rows + i * 8, zeros());
    }
    publish_to_engines();
    __syncwarp();
    if (lane == 0) barrier_arrive(&s.filled[at.stage]);
  }

  // The last tiles are those of the block's own tokens, and are still there. The map ends at the newest column of all
  // rows, so a shorter row's last tile reaches beyond its newest column, within its own slot.
  __device__ void append(RingPlace at, int tile, int num_tiles) {
    for (; tile < num_tiles; ++tile, at.step(P::kStages)) {
      barrier_wait(&s.filled[at.stage], at.parity);
      for (int panel = 0; panel < P::kPanels && lane == 0; ++panel) {
        const Corner to{panel * 64, task.kv, task.begin + tile * P::kKeys, task.b};
        store_box(a.new_keys, to, s.key[at.stage][panel]);
        store_box(a.new_values, to, s.value[at.stage][panel]);
      }
    }
    if (lane == 0) wait_for_stores();
  }

  const PrefillArgs<T>& a;
  PrefillShared<T, P>& s;
  const PrefillTask& task;
  const int lane;
  Corner key, value;
};

}  // namespace eet
