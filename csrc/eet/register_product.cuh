// Products in 16 bits of up to eight tokens, whose activations lie in registers, with weights that stream through a
// ring (vector_product.cuh).
#pragma once

#include "eet/constant.cuh"
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

  // Of a tile, and eight more, so that a warp that adds up four tiles finds their sums in different banks.
  __host__ __device__ int sums() const { return kStageRows * (this->num_tokens * kWarps + 1); }
  // Bytes of all sums and of the norm: what lies behind is filled in lines of 128 bytes.
  __host__ __device__ int sums_bytes() const { return (num_tiles * sums() * int(sizeof(float)) + 127) / 128 * 128; }
  __host__ __device__ int norm_bytes() const { return this->norm.weight ? RegisterNorm<T, kWarps>::bytes(this->K) : 0; }
};

// The warps that multiply, as StageProducts: of a step's chunks every kWarps-th is a warp's own, and lane 4g+t reads 16
// bytes of output g, which are the fragment A of an mma as they come: its rows g and g + 8 are both output g, with the
// words x, z and y, w. Column i of B is token i, with x, z in one mma and y, w in the other; of each product half the
// rows are of use.
template <typename T, int kWarps, bool kNormed>
class RegisterProducts {
 public:
  __device__ RegisterProducts(const RegisterArgs<T, kWarps>& a, const Ring& ring, float* partial)
      : a(a), ring(ring), partial(partial), zero(opaque_zero()) {}

  // Leaves the sums of all tiles: partial [tile][sums()], of which those of a warp are [token][kStageRows].
  __device__ void multiply(const RegisterNorm<T, kWarps>& norm, Share share) const {
    with_constant<1, kNormed ? kNormChunks : kMostChunks>((a.steps.most_chunks() + kWarps - 1) / kWarps, [&](auto count) {
      all_steps<decltype(count)::value>(norm, share);
    });
  }

 private:
  const RegisterArgs<T, kWarps>& a;
  Ring ring;
  float* partial;
  uint32_t zero;  // of opaque_zero()

  // x, moved at once: else the assembler does it in front of every product.
  __device__ uint32_t opaque(uint32_t x) const {
    asm volatile("xor.b32 %0, %0, %1;" : "+r"(x) : "r"(zero));
    return x;
  }
  __device__ uint4 arranged(uint4 v) const { return make_uint4(opaque(v.x), opaque(v.z), opaque(v.y), opaque(v.w)); }

  // kCount: chunks of a warp. Only its last one may lie behind the step's end, in part or all.
  template <int kCount>
  __device__ void all_steps(const RegisterNorm<T, kWarps>& norm, Share share) const {
    constexpr int kApart = kWarps * kChunk, kBytes = int(sizeof(T)), kAtOnce = 2;
    constexpr bool kAhead = !kNormed && kCount <= kAheadChunks;
    const int warp = threadIdx.x / 32, t = threadIdx.x % 4, g = threadIdx.x % 32 / 4;
    const int first = warp * kChunk + t * 8, last = first + (kCount - 1) * kApart;
    const T* row = a.x + min(g, a.num_tokens - 1) * int64_t(a.K) + first;  // past the last token the last, again
    uint4 x[kCount];
    const auto request = [&](int step) {
      const T* from = row + a.steps.begin(step);
#pragma unroll
      for (int i = 0; i < kCount - 1; ++i) x[i] = load(from + i * kApart);
      x[kCount - 1] = zeros();
      if (last < a.steps.inputs(step, a.K)) x[kCount - 1] = load(from + (kCount - 1) * kApart);
    };
    request(0);
    if (kNormed) norm.apply(x, row - first, first, kApart);

    const uint32_t weights = shared_address(ring.stages) + min(g, a.tile - 1) * a.stage_stride;
    float* const sums = partial + (warp * a.num_tokens + 2 * t) * kStageRows + g;
    const bool has_even = 2 * t < a.num_tokens, has_odd = 2 * t + 1 < a.num_tokens;
    RingPlace place;
    const int num_steps = kAhead ? a.steps.num : 1;
#pragma unroll 1
    for (int step = 0; step < num_steps; ++step) {
      uint4 v[kCount];
#pragma unroll
      for (int i = 0; i < kCount; ++i) v[i] = arranged(x[i]);
      if (kAhead && step + 1 < num_steps) request(step + 1);
      // Behind the last input the last is read again: there the activations are 0.
      int end = min(last, a.steps.inputs(step, a.K) - 8) * kBytes;
      asm("" : "+r"(end));  // else it is computed again for every tile
      float* to = sums;
#pragma unroll 1
      for (int n = share.begin; n < share.end; n += a.tile, place.step(ring.num_stages), to += a.sums()) {
        const uint32_t stage = weights + place.stage * ring.stage_bytes;
        const bool goes_on = kAhead && step;
        float even = goes_on && has_even ? *to : 0.f, odd = goes_on && has_odd ? to[kStageRows] : 0.f;
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
        if (has_odd) to[kStageRows] = odd;
        // Not before: an arrival can overtake loads that wait behind another kernel's, and then the stage is filled
        // again while it is read. The store needs what was loaded.
        ring.release(place);
      }
    }
  }
};

}  // namespace eet
