// Products in 16 bits of up to eight tokens, whose activations lie in registers, with weights that stream through a
// ring (vector_product.cuh).
#pragma once

#include "eet/constant.cuh"
#include "eet/dependent.cuh"
#include "eet/linear.cuh"
#include "eet/mma.cuh"
#include "eet/register_norm.cuh"
#include "eet/ring.cuh"
#include "eet/vector_product.cuh"

namespace eet {

constexpr int kNormChunks = 7;   // of a step that are one warp's, with a norm; else kMostChunks
constexpr int kAheadChunks = 4;  // the same, where a warp asks for those of the next step meanwhile

template <typename T, int kWarps>
struct RegisterArgs : LinearArgs<T, T> {
  using LinearArgs<T, T>::LinearArgs;
  Steps steps;             // that cut the inputs; one, if there is a norm
  int tile, stage_stride;  // outputs of a stage; bytes between them
  int num_tiles, num_stages;
  int at_once = 1;  // stages that are asked for at a time, until the ring is full for the first time
  bool divided = false;  // two blocks, a cluster, have the same outputs and half of the inputs each
  int sums;  // floats from token to token: 4 mod 8, so that the 32 that a warp stores lie in 32 banks

  void set_tiles(int its_tile, int its_num) {
    tile = its_tile, num_tiles = its_num;
    sums = (tile * num_tiles + 3) / 8 * 8 + 4;
  }
  // Bytes of all sums, of the mail and of the norm: what lies behind is filled in lines of 128 bytes.
  __host__ __device__ int sums_bytes() const {
    return (this->num_tokens * kWarps * sums * int(sizeof(float)) + 127) / 128 * 128;
  }
  __host__ __device__ int part() const { return divided ? this->K / 2 : this->K; }  // inputs of a block
  // The counter of what the other block sends, and its sums of every second token.
  __host__ __device__ int mail_bytes() const {
    if (!divided) return 0;
    return ((this->num_tokens + 1) / 2 * sums * int(sizeof(float)) + int(sizeof(uint64_t)) + 127) / 128 * 128;
  }
  __host__ __device__ int norm_bytes() const { return this->norm.weight ? RegisterNorm<T, kWarps>::bytes(this->K) : 0; }
};

// The warps that multiply, as StageProducts: of a step's chunks every kWarps-th is a warp's own, and lane 4g+t reads 16
// bytes of output g, which are the fragment A of an mma as they come: its rows g and g + 8 are both output g, with the
// words x, z and y, w. Column i of B is token i, with x, z in one mma and y, w in the other; of each product half the
// rows are of use.
template <typename T, int kWarps, bool kNormed>
class RegisterProducts {
 public:
  // `begin`: of the block's inputs.
  __device__ RegisterProducts(const RegisterArgs<T, kWarps>& a, const Ring& ring, float* partial, int begin)
      : a(a), ring(ring), partial(partial), begin(begin), zero(opaque_zero()) {}

  // Leaves the sums of all outputs: partial [warp][token][sums]. It waits for the kernel before this one, with `computed`
  // computed by then, asks for activations, and calls request(), for what else is read.
  template <typename Request>
  __device__ void multiply(const RegisterNorm<T, kWarps>& norm, Share share, int computed, Request request) const {
    with_constant<1, kNormed ? kNormChunks : kMostChunks>((a.steps.most_chunks() + kWarps - 1) / kWarps, [&](auto count) {
      all_steps<decltype(count)::value>(norm, share, computed, request);
    });
  }

 private:
  const RegisterArgs<T, kWarps>& a;
  Ring ring;
  float* partial;
  int begin;
  uint32_t zero;  // of opaque_zero()

  // x, moved at once: else the assembler does it in front of every product.
  __device__ uint32_t opaque(uint32_t x) const {
    asm volatile("xor.b32 %0, %0, %1;" : "+r"(x) : "r"(zero));
    return x;
  }
  __device__ uint4 arranged(uint4 v) const { return make_uint4(opaque(v.x), opaque(v.z), opaque(v.y), opaque(v.w)); }

  // kCount: chunks of a warp. Only its last one may lie behind the step's end, in part or all.
  template <int kCount, typename Request>
  __device__ void all_steps(const RegisterNorm<T, kWarps>& norm, Share share, int computed, Request other_requests) const {
    constexpr int kApart = kWarps * kChunk, kBytes = int(sizeof(T)), kAtOnce = 2;
    constexpr bool kAhead = !kNormed && kCount <= kAheadChunks;
    const int warp = threadIdx.x / 32, t = threadIdx.x % 4, g = threadIdx.x % 32 / 4;
    const int first = warp * kChunk + t * 8, last = first + (kCount - 1) * kApart;
    const int row = min(g, a.num_tokens - 1) * a.K;  // past the last token the last, again
    int next = row + begin + first;                  // where the next step begins
    uint32_t weights = shared_address(ring.stages) + min(g, a.tile - 1) * a.stage_stride;
    int num_inputs = a.steps.inputs(0, a.part()), num_outputs = share.end - share.begin;
    const int at = (warp * a.num_tokens + 2 * t) * a.sums + g;
    const int num_sums = g < a.tile ? min(max(a.num_tokens - 2 * t, 0), 2) : 0;  // of a tile that the lane leaves
    uint4 x[kCount];
    const auto request = [&] {
#pragma unroll
      for (int i = 0; i < kCount - 1; ++i) x[i] = load(a.x + next + i * kApart);
      x[kCount - 1] = zeros();
      if (last < num_inputs) x[kCount - 1] = load(a.x + next + (kCount - 1) * kApart);
    };
    wait_for_previous(next, num_inputs, weights, num_sums, num_outputs, kNormed ? norm.share : 0.f, computed);
    request();
    other_requests();
    if (kNormed) norm.apply(x, a.x + row, first, kApart);

    RingPlace place;
    const int num_steps = kAhead ? a.steps.num : 1;
#pragma unroll 1
    for (int step = 0; step < num_steps; ++step) {
      uint4 v[kCount];
#pragma unroll
      for (int i = 0; i < kCount; ++i) v[i] = kNormed ? x[i] : arranged(x[i]);
      // Behind the last input the last is read again: there the activations are 0.
      int end = min(last, num_inputs - 8) * kBytes;
      asm("" : "+r"(end));  // else it is computed again for every tile
      if (kAhead && step + 1 < num_steps) {
        next += num_inputs, num_inputs = a.steps.inputs(step + 1, a.part());
        request();
      }
      float* to = partial + at;
#pragma unroll 1
      for (int left = num_outputs; left > 0; left -= a.tile, place.step(ring.num_stages), to += a.tile) {
        const uint32_t stage = weights + place.stage * ring.stage_bytes;
        const bool goes_on = kAhead && step, has_even = num_sums > 0, has_odd = num_sums > 1;
        float even = goes_on && has_even ? *to : 0.f, odd = goes_on && has_odd ? to[a.sums] : 0.f;
        barrier_wait(ring.filled(place), place.parity);
        float low[2][4] = {}, high[2][4] = {};  // sums that do not wait for each other
#pragma unroll
        for (int from = 0; from < kCount; from += kAtOnce) {
          uint4 w[kAtOnce];
#pragma unroll
          for (int i = from; i < from + kAtOnce && i < kCount; ++i) {
            w[i - from] = load_shared(stage + (i + 1 < kCount ? (first + i * kApart) * kBytes : end));
          }
#pragma unroll
          for (int i = from; i < from + kAtOnce && i < kCount; ++i) {
            const uint4 words = w[i - from];
            mma<T>(low[i % 2], words.x, words.y, words.z, words.w, v[i].x, v[i].y);
            mma<T>(high[i % 2], words.x, words.y, words.z, words.w, v[i].z, v[i].w);
          }
        }
        even += (low[0][0] + low[1][0]) + (high[0][2] + high[1][2]);
        odd += (low[0][1] + low[1][1]) + (high[0][3] + high[1][3]);
        if (has_even) *to = even;
        if (has_odd) to[a.sums] = odd;
        // Not before: an arrival can overtake loads that wait behind another kernel's, and then the stage is filled
        // again while it is read. The store needs what was loaded.
        ring.release(place);
      }
    }
  }
};

}  // namespace eet
