// What a warpgroup of a block computes: scores on Hopper's tensor cores, their softmax, and the mix of values (sm_90a).
#pragma once

#include "eet/mbarrier.cuh"
#include "eet/online_softmax.cuh"
#include "eet/prefill_task.cuh"
#include "eet/ring.cuh"
#include "eet/vec.cuh"
#include "eet/wgmma.cuh"

namespace eet {

// 64 queries of the block.
template <typename T, typename P>
class PrefillAttender {
 public:
  __device__ PrefillAttender(const PrefillArgs<T>& a, PrefillShared<T, P>& s)
      : a(a), s(s), group(__shfl_sync(0xffffffffu, threadIdx.x / 128, 0)), lane(threadIdx.x % 32),
        warp_row(threadIdx.x / 32 * 16), visible(s.task.visible + (P::kCausal ? warp_row : 0)) {}

  __device__ void attend() {
    const int all_tiles = s.task.num_tiles(P::kQueries, P::kKeys);
    const int num_tiles = group * 64 < s.task.num_queries ? s.task.num_tiles(group * 64 + 64, P::kKeys) : 0;
    barrier_wait(&s.queries_filled, 0);
    if (num_tiles) P::kAlone ? attend_ahead(num_tiles) : attend_in_turn(num_tiles);
    if (lane != 0) return;
    for (int tile = num_tiles; tile < all_tiles; ++tile, at.step(P::kStages)) {  // of use to later warpgroups alone
      barrier_wait(&s.filled[at.stage], at.parity);
      barrier_arrive(&s.emptied[at.stage]);
    }
  }

 private:
  // Scores of a tile are computed while the values of the tile before are mixed.
  __device__ void attend_ahead(int num_tiles) {
    OnlineSoftmax<P::kKeys> softmax(a.scale, s.task.num_queries - warp_row);
    float score[P::kKeys / 2], out[P::kDim / 2] = {};
    uint32_t weights[P::kKeys / 16][4];
    barrier_wait(&s.filled[at.stage], at.parity);
    begin_scores(score, at.stage);
    products_wait<0>();
    settle(score);
    hide(score, 0);
    softmax.weigh(score);
    pack(weights, score);
#pragma unroll 1
    for (int tile = 1; tile < num_tiles; ++tile) {
      const int before = at.stage;
      at.step(P::kStages);
      barrier_wait(&s.filled[at.stage], at.parity);
      begin_scores(score, at.stage);
      begin_mix(out, weights, before);
      products_wait<1>();
      settle(score);
      hide(score, tile);
      const bool grew = softmax.weigh(score);
      settle(score);
      products_wait<0>();
      settle(out);
      settle(weights);
      release(before);
      if (grew) {
#pragma unroll
        for (int i = 0; i < P::kDim / 2; ++i) out[i] *= softmax.shrink[i / 2 % 2];
      }
      pack(weights, score);
    }
    begin_mix(out, weights, at.stage);
    products_wait<0>();
    settle(out);
    release(at.stage);
    at.step(P::kStages);
    write(out, warp_sum<4>(softmax.sum[0]), warp_sum<4>(softmax.sum[1]));
  }

  // One product after the other: scores and weights never take registers at once.
  __device__ void attend_in_turn(int num_tiles) {
    OnlineSoftmax<P::kKeys> softmax(a.scale, s.task.num_queries - warp_row);
    float out[P::kDim / 2] = {};
#pragma unroll 1
    for (int tile = 0; tile < num_tiles; ++tile, at.step(P::kStages)) {
      float score[P::kKeys / 2];
      uint32_t weights[P::kKeys / 16][4];
      barrier_wait(&s.filled[at.stage], at.parity);
      begin_scores(score, at.stage);
      products_wait<0>();
      settle(score);
      hide(score, tile);
      if (softmax.weigh(score)) {
#pragma unroll
        for (int i = 0; i < P::kDim / 2; ++i) out[i] *= softmax.shrink[i / 2 % 2];
      }
      pack(weights, score);
      begin_mix(out, weights, at.stage);
      products_wait<0>();
      settle(out);
      settle(weights);
      release(at.stage);
    }
    write(out, warp_sum<4>(softmax.sum[0]), warp_sum<4>(softmax.sum[1]));
  }

  __device__ void begin_scores(float (&score)[P::kKeys / 2], int stage) {
    products_begin();
#pragma unroll
    for (int d = 0; d < P::kDim; d += 16) {
      const uint64_t q = tile_of(s.query[d / 64][group * 64]), k = tile_of(s.key[stage][d / 64]);
      product<T, P::kKeys>(score, further(q, d % 64 * 2), further(k, d % 64 * 2), d > 0);
    }
    products_commit();
  }

  __device__ void begin_mix(float (&out)[P::kDim / 2], const uint32_t (&weights)[P::kKeys / 16][4], int stage) {
    constexpr int kWide = P::kDim < 128 ? P::kDim : 128;
    products_begin();
#pragma unroll
    for (int d = 0; d < P::kDim; d += kWide) {
      const uint64_t v = tile_of(s.value[stage][d / 64], P::kPanelBytes);
      float(&part)[kWide / 2] = *reinterpret_cast<float(*)[kWide / 2]>(out + d / 2);
#pragma unroll
      for (int k = 0; k < P::kKeys; k += 16) product<T, kWide>(part, weights[k / 16], further(v, k * 128));
    }
    products_commit();
  }

  // Keys after a query's own, or after the last, and those before its window.
  __device__ void hide(float (&score)[P::kKeys / 2], int tile) {
    const int seen = visible - tile * P::kKeys;  // of this tile, by the warp's first query
    if (unsigned(seen - P::kKeys) < unsigned(a.seen_whole)) return;
    const int mine = seen + (P::kCausal ? lane / 4 : 0) - lane % 4 * 2;
    const auto hide_if = [&](auto hidden) {
#pragma unroll
      for (int i = 0; i < P::kKeys / 2; ++i) {
        if (hidden(i / 4 * 8 + i % 2 - (P::kCausal ? i / 2 % 2 * 8 : 0))) score[i] = -INFINITY;
      }
    };
    hide_if([=](int k) { return k >= mine; });
    if (P::kCausal && seen + 15 > a.window) hide_if([=](int k) { return k < mine - a.window; });
  }

  __device__ void pack(uint32_t (&weights)[P::kKeys / 16][4], const float (&score)[P::kKeys / 2]) {
#pragma unroll
    for (int i = 0; i < P::kKeys / 4; ++i) weights[i / 4][i % 4] = pack2<T>(score[2 * i], score[2 * i + 1]);
  }

  // Through the queries' place in shared memory, which this warpgroup alone uses, to whole rows.
  __device__ void write(const float (&out)[P::kDim / 2], float sum, float sum_8) {
    const float scale[2] = {1.f / sum, 1.f / sum_8};
    const PrefillTask& task = s.task;
    const int D = a.heads.D, num_rows = task.num_queries - warp_row;
    // Each warp waited for its own products. To keep `group` until here would cost the loop a dozen instructions.
    barrier(1 + threadIdx.x / 128, 128);
#pragma unroll
    for (int panel = 0; panel < P::kPanels; ++panel) {
      T(*rows)[64] = s.query[panel] + warp_row;
#pragma unroll
      for (int i = 0; i < 8; i += 2) {
        uint32_t r[4];
#pragma unroll
        for (int j = 0; j < 4; ++j) {
          const float* pair = &out[panel * 32 + i * 4 + j * 2];
          r[j] = pack2<T>(pair[0] * scale[j % 2], pair[1] * scale[j % 2]);
        }
        store_matrices(&rows[lane % 16][((i + lane / 16) ^ lane % 8) * 8], r);
      }
    }
    __syncwarp();
#pragma unroll
    for (int panel = 0; panel < P::kPanels; ++panel) {
      const T(*rows)[64] = s.query[panel] + warp_row;
      const int d = panel * 64 + lane % 8 * 8;
#pragma unroll
      for (int row = lane / 8; row < 16; row += 4) {
        if (row >= num_rows || d >= D) continue;
        T* to = a.out + ((task.token + warp_row + row) * a.heads.H + task.h) * D + d;
        store(to, load(&rows[row][(lane % 8 ^ row % 8) * 8]));
      }
    }
  }

  __device__ void release(int stage) {
    if (lane == 0) barrier_arrive(&s.emptied[stage]);
  }

  const PrefillArgs<T>& a;
  PrefillShared<T, P>& s;
  const int group, lane, warp_row, visible;  // the warp's first query in the block, and the keys that it sees
  RingPlace at;
};

}  // namespace eet
