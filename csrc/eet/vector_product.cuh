// Products in 16 bits with weights that stream through a ring: how rows are cut into stages, the warp that fills them, and
// for one to four tokens all others, which multiply them. K inputs.
#pragma once

#include <climits>

#include "eet/constant.cuh"
#include "eet/linear.cuh"
#include "eet/mma.cuh"
#include "eet/ring.cuh"

namespace eet {

constexpr int kVectorTokens = 4;  // at most
constexpr int kStageRows = 8;     // outputs of a stage, at most: a tile
constexpr int kChunk = 32;        // inputs that a warp multiplies at a time
constexpr int kMostChunks = 8;    // of a stage that are one warp's

// The inputs of an output, cut into steps: as equal as chunks allow. The last step, whose last chunk may be cut off, is
// one of the longest.
struct Steps {
  int num, chunks, more;  // steps; chunks of each; steps, the last ones, that have one more

  __host__ __device__ int most_chunks() const { return chunks + (more > 0); }
  __host__ __device__ int begin(int step) const { return (step * chunks + max(0, step + more - num)) * kChunk; }
  __host__ __device__ int inputs(int step, int K) const { return min(K, begin(step + 1)) - begin(step); }
};

inline Steps cut_inputs(int K, int num_steps) {
  const int chunks = ceil_div(K, kChunk);
  return {num_steps, chunks / num_steps, chunks % num_steps};
}

// Whether a plan's stages, of outputs so many bytes apart, hold the longest step.
inline bool holds_steps(const Steps& steps, int itemsize, int stage_stride, int shared_bytes) {
  const int row_bytes = steps.most_chunks() * kChunk * itemsize;
  return stage_stride >= row_bytes && stage_stride <= shared_bytes && stage_stride % 16 == 0;
}

// The warp that fills a ring. Of the first `paced` stages it asks for `at_once` at a time: what else its multiprocessor asks
// for, such as activations or the weights of the kernel ahead, presumably waits behind what was asked for before (LOG).
class WeightStream {
 public:
  __device__ WeightStream(const Ring& ring, int stage_stride, int at_once = INT_MAX, int paced = 0)
      : ring(ring), stage_stride(stage_stride), allowed(min(ring.num_stages, at_once)), paced(paced) {}

  // The weights of outputs `begin` to `end` of N, `tile` outputs at a time: all tiles of a step, then those of the next.
  // The steps cut all K inputs, or `part` of them, where `weight` begins.
  template <typename Order, typename T>
  __device__ void add(Order order, const T* weight, int N, int K, int begin, int end, int tile, const Steps& steps) {
    add(order, weight, N, K, K, begin, end, tile, steps);
  }
  template <typename Order, typename T>
  __device__ void add(Order order, const T* weight, int N, int K, int part, int begin, int end, int tile,
                      const Steps& steps) {
    for (int step = 0; step < steps.num; ++step) {
      const int from = steps.begin(step), row_bytes = steps.inputs(step, part) * int(sizeof(T));
      for (int n = begin; n < end; n += tile, next.step(ring.num_stages)) {
        if (paced > 0) {
          --paced;
          if (allowed) {
            --allowed;
          } else {
            barrier_wait(ring.filled(oldest), oldest.parity);
            oldest.step(ring.num_stages);
          }
        }
        ring.fill(next, rows_from(order, weight, n, N, K, from), min(tile, end - n), row_bytes, stage_stride);
      }
    }
  }

 private:
  const Ring& ring;
  const int stage_stride;
  RingPlace next, oldest;
  int allowed;  // paced stages that may still be asked for without a look whether the oldest is there
  int paced;    // stages that still are
};

// The warps that multiply. Of a step's chunks every kWarps-th is a warp's own: their activations stay in its registers
// while the stages of the step's tiles pass. So shared memory, which sets the pace, is read for weights and little
// else.
//
// Lane 4g+t reads 16 bytes of output g, and those are the fragment A of an mma as they come: its rows g and g + 8 are
// both output g, the first with the words x and z of the four, the second with y and w. The columns are activations:
// column 2i is token i with the words x and z, column 2i+1 with y and w. So a product is the sum of two numbers that
// lie in one lane: row g of column 2i and row g + 8 of column 2i+1, in lane 4g+i. The others are of no use.
// The activations' words wait in the order x, z, y, w.
template <typename T, int kWarps>
class StageProducts {
 public:
  // `stage_rows`: outputs of a stage, in memory.
  __device__ StageProducts(const Ring& of, int stage_rows, int stage_stride, int num_tokens)
      : ring(of), num_tokens(num_tokens) {
    const int lane = threadIdx.x % 32, g = lane / 4;
    stage_bytes = ring.stage_bytes, num_stages = ring.num_stages;
    // Else the compiler reads them again for every stage, and waits.
    asm("" : "+r"(stage_bytes), "+r"(num_stages));
    row_at = shared_address(ring.stages) + min(g, stage_rows - 1) * stage_stride;
  }

  // Where the lane's activations begin, in shared memory. Past the last token the last, again; such sums are never stored.
  __device__ uint32_t activations(const T* rows, int stride) const {
    const int token = min(threadIdx.x % 32 / 8, num_tokens - 1);
    return shared_address(rows + token * stride) + threadIdx.x / 4 % 2 * 8;
  }

  // Leaves the sums of so many outputs, `tile` at a time: partial [tile][step][kStageRows][token][kWarps].
  __device__ void multiply(uint32_t x, int K, const Steps& steps, int num_outputs, int tile, float* partial) {
    with_constant<1, kMostChunks>((steps.most_chunks() + kWarps - 1) / kWarps, [&](auto count) {
      all_steps<decltype(count)::value>(x, K, steps, num_outputs, tile, partial);
    });
  }

  // Numbers that a stage leaves.
  __host__ __device__ static int sums(int num_tokens) { return kStageRows * num_tokens * kWarps; }

  // An output's sum: what lies at `from`, and `sums` numbers further for each step.
  __device__ static float total(const float* from, int num_steps, int sums) {
    float total = 0;
    for (int step = 0; step < num_steps; ++step, from += sums) {
#pragma unroll
      for (int i = 0; i < kWarps; i += 4) {
        const float4 part = *reinterpret_cast<const float4*>(from + i);
        total += (part.x + part.y) + (part.z + part.w);
      }
    }
    return total;
  }

 private:
  Ring ring;
  RingPlace place;
  int num_tokens, stage_bytes, num_stages;
  uint32_t row_at;  // the lane's row in the ring's first stage

  // kCount: chunks of a warp. Only its last one may lie behind the step's end, in part or all.
  template <int kCount>
  __device__ void all_steps(uint32_t x, int K, const Steps& steps, int num_outputs, int tile, float* partial) {
    constexpr int kBytes = kChunk * int(sizeof(T)), kApart = kWarps * kBytes;
    constexpr int kChains = kCount < 4 ? kCount : 4;  // sums that do not wait for each other
    const int warp = threadIdx.x / 32, t = threadIdx.x % 4, g = threadIdx.x % 32 / 4;
    const uint32_t first_at = warp * kBytes + t * 16, last_at = first_at + (kCount - 1) * kApart;
    int stride = steps.num * sums(num_tokens);
    asm("" : "+r"(stride));
#pragma unroll 1
    for (int step = 0; step < steps.num; ++step) {
      const uint32_t x_at = x + steps.begin(step) * int(sizeof(T)), row_bytes = steps.inputs(step, K) * int(sizeof(T));
      uint2 v[kCount];
#pragma unroll
      for (int i = 0; i < kCount - 1; ++i) v[i] = load_shared_half(x_at + first_at + i * kApart);
      v[kCount - 1] = last_at < row_bytes ? load_shared_half(x_at + last_at) : make_uint2(0, 0);
      // Behind the last input the last is read again: there the activations are 0.
      const uint32_t last = row_at + min(last_at, row_bytes - 16);
      float* to = partial + step * sums(num_tokens) + (g * num_tokens + t) * kWarps + warp;
#pragma unroll 1
      for (int left = num_outputs; left > 0; left -= tile, place.step(num_stages), to += stride) {
        const uint32_t stage = place.stage * stage_bytes;
        barrier_wait(ring.filled(place), place.parity);
        uint4 w[kCount];
#pragma unroll
        for (int i = 0; i < kCount - 1; ++i) w[i] = load_shared(row_at + first_at + stage + i * kApart);
        w[kCount - 1] = load_shared(last + stage);
        float sum[kChains][4] = {};
#pragma unroll
        for (int i = 0; i < kCount; ++i) mma<T>(sum[i % kChains], w[i].x, w[i].y, w[i].z, w[i].w, v[i].x, v[i].y);
        float whole = sum[0][0] + sum[0][3];
#pragma unroll
        for (int i = 1; i < kChains; ++i) whole += sum[i][0] + sum[i][3];
        if (t < num_tokens) *to = whole;
        // Not before: an arrival can overtake loads that wait behind another kernel's, and then the stage is filled
        // again while it is read. The store needs what was loaded.
        ring.release(place);
      }
    }
  }
};

}  // namespace eet
