// A softmax that is kept up to date while scores pass by, in registers.
#pragma once

#include "eet/attention.cuh"
#include "eet/reduce.cuh"

namespace eet {

// The running softmax of two queries of a thread: g = lane / 4 of the warp's 16, and g + 8.
template <int kKeys>
struct OnlineSoftmax {
  // A weight is 2^(exponent * score + offset): relative to an earlier maximum, which is replaced only once a score
  // exceeds `limit`, 2^8 times as heavy. A query's four lanes each look at their own scores, and share them only then.
  float exponent, slack, offset[2], limit[2], sum[2] = {}, shrink[2];

  // Of the warp's queries the first `num_queries` exist. The others never ask for a new maximum: no query's bits depend
  // on what lies after its row.
  __device__ OnlineSoftmax(float scale, int num_queries) : exponent(scale * kLog2e), slack(8 / exponent) {
    const int g = threadIdx.x % 32 / 4;
    // A query may have seen no key yet when another one asks for its first maximum.
    offset[0] = offset[1] = -kUnscored * exponent;
    limit[0] = g < num_queries ? kUnscored : INFINITY;
    limit[1] = g + 8 < num_queries ? kUnscored : INFINITY;
  }

  // Scores become weights. True if what was summed before has to be multiplied by `shrink`.
  __device__ bool weigh(float (&score)[kKeys / 2]) {
    float best[2] = {score[0], score[2]};
#pragma unroll
    for (int i = 0; i < kKeys / 8; ++i) {
      best[0] = fmaxf(best[0], fmaxf(score[4 * i], score[4 * i + 1]));
      best[1] = fmaxf(best[1], fmaxf(score[4 * i + 2], score[4 * i + 3]));
    }
    const bool grew = __any_sync(0xffffffffu, best[0] > limit[0] || best[1] > limit[1]);
    if (grew) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const float max = fmaxf(limit[half] - slack, warp_max<4>(best[half]));
        shrink[half] = exp2_of(-max * exponent - offset[half]);
        offset[half] = -max * exponent, limit[half] = max + slack;
        sum[half] *= shrink[half];
      }
    }
#pragma unroll
    for (int i = 0; i < kKeys / 2; ++i) {
      score[i] = exp2_of(fmaf(score[i], exponent, offset[i / 2 % 2]));
      sum[i / 2 % 2] += score[i];
    }
    return grew;
  }
};

}  // namespace eet
