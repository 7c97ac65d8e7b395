// One row of logits and the choice of a token: arg-max, or a draw after temperature, top-k and top-p. V vocabulary.
#pragma once

#include "eet/cluster.cuh"
#include "eet/gumbel.cuh"
#include "eet/launch.cuh"
#include "eet/ordered.cuh"
#include "eet/reduce.cuh"
#include "eet/vec.cuh"

namespace eet {

inline constexpr int kDigitBits = 4;  // of a threshold, found in one pass over the row
inline constexpr int kDigits = 1 << kDigitBits;
inline constexpr int kChoosers = 32 * kDigits;  // a warp adds up what one digit weighs
inline constexpr int kMaxCluster = 16;

// How one row's token is chosen; in shared memory, since it is one for all threads and registers are few.
struct Choice {
  float scale;  // of logits
  float top_p;  // 1: no limit
  int top_k;    // V: no limit
  bool draws;   // else the largest logit is chosen
};

template <typename T>
struct ChooseArgs {
  int64_t* token;        // [B]
  const T* logits;       // [B,V]
  Draw draw;
  const int64_t* top_k;  // [B] or null; 0: no limit
  const float* top_p;    // [B] or null; 1: no limit
  int V;

  ChooseArgs(int64_t* token, const void* logits, Draw draw, const int64_t* top_k, const float* top_p, int V)
      : token(token), logits(static_cast<const T*>(logits)), draw(draw), top_k(top_k), top_p(top_p), V(V) {}

  // Of a row. Without a draw there are no limits. Loads come first, so that they are under way together.
  __device__ Choice choice(int row) const {
    const float temperature = draw.temperature_of(row), its_top_p = top_p ? top_p[row] : 1.f;
    const int64_t its_top_k = top_k ? top_k[row] : 0;
    if (!(temperature > 0)) return {1.f, 1.f, V, false};
    return {1.f / temperature, its_top_p, its_top_k > 0 && its_top_k < V ? int(its_top_k) : V, true};
  }
};

// A row of logits, its tokens dealt out to a cluster's threads, and what those find out together. A block puts what it
// has to tell into the others' memory, in one of two places in turn: nobody fills one that another still reads.
template <typename T>
class Row {
 public:
  using Weights = float[kDigits][kChoosers];  // in shared memory, written and read by chosen() alone

  float scale;  // of logits, set once it is there

  __device__ Row(const ChooseArgs<T>& a, Weights& weights)
      : weights(weights), logits(a.logits + int64_t(blockIdx.y) * a.V), V(a.V) {}

  // Calls visit(logit, token) for this thread's tokens, in ascending order. Vectors begin where memory allows it, which
  // may be before the row; a row is read from L2 at first, and from L1 after that. `v` is first_vector(), for those who
  // request it early.
  template <typename Visit>
  __device__ void each(uint4 v, Visit visit) const {
    const int step = gridDim.x * kChoosers * kVec<T>;
#pragma unroll 1
    for (int first = first_word(); first < V; first += step) {
      const uint4 next = vector(first + step);
#pragma unroll
      for (int i = 0; i < kVec<T>; ++i) {
        if (uint32_t(first + i) < uint32_t(V)) visit(reinterpret_cast<const T*>(&v)[i], first + i);
      }
      v = next;
    }
  }

  template <typename Visit>
  __device__ void each(Visit visit) const {
    each(first_vector(), visit);
  }

  __device__ uint4 first_vector() const { return vector(first_word()); }

  // Of this row's tokens, where the next one is drawn: top-k, then top-p among what it left, then the noise.
  __device__ uint64_t chosen(const Choice& how, const Gumbel& noise) {
#pragma unroll 1
    for (int as_mass = 0; as_mass < 2; ++as_mass) {
      if (as_mass ? how.top_p >= 1 : how.top_k >= V) continue;
      if (as_mass) {
        float most = -INFINITY;
        each([&](T logit, int) { most = fmaxf(most, score(logit)); });
        top = value_of(largest(pair(most, 0)));
      }
      lowest = max(lowest, threshold(as_mass ? how.top_p : how.top_k, as_mass));
    }

    float best = -INFINITY;
    int token = 0;
    each([&](T logit, int candidate) {
      if (key(logit) < lowest) return;
      const float value = score(logit) + (how.draws ? noise.of(candidate) : 0.f);
      if (value > best) best = value, token = candidate;
    });
    return largest(pair(best, token));
  }

  // The largest of all threads' pairs, for all of them.
  __device__ uint64_t largest(uint64_t mine) {
    __shared__ uint64_t of_block[2][kMaxCluster];
    mine = block_max<kChoosers>(mine);
    turn ^= 1;
    if (threadIdx.x < gridDim.x) put(&of_block[turn][blockIdx.x], threadIdx.x, mine);
    cluster_barrier();
    return warp_max(of_block[turn][threadIdx.x % gridDim.x]);
  }

  __device__ float score(T logit) const { return scaled(to_float(logit), scale); }

 private:
  // Unsigned numbers in the order of scores. 16-bit logits tie where their scores do, and have shorter keys.
  __device__ uint32_t key(T logit) const {
    if constexpr (sizeof(T) == 4) return ordered(score(logit));
    const uint32_t bits = reinterpret_cast<const uint16_t&>(logit);
    return bits > 0x8000 ? 0xffff - bits : bits & 0x7fff | 0x8000;
  }

  // What a token counts for: one, or its chance as a multiple of the likeliest token's.
  __device__ float weight(T logit, bool as_mass) const {
    if (!as_mass) return 1;
    return key(logit) >= lowest ? exp_of(score(logit) - top) : 0.f;
  }

  // The largest key so that tokens with this key or a larger one are `target` in number, or have this share of mass.
  // Digit by digit, from the highest: every pass weighs the tokens whose key agrees so far, by their next digit.
  __device__ uint32_t threshold(float target, bool as_mass) {
    __shared__ float of_block[2][kMaxCluster][kDigits];
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, digit = lane % kDigits;
    constexpr int kKeyBits = 8 * sizeof(T);
    uint32_t found = 0;
    float above = 0;  // what larger keys weigh
#pragma unroll 1
    for (int shift = kKeyBits - kDigitBits; shift >= 0; shift -= kDigitBits) {
#pragma unroll
      for (int i = 0; i < kDigits; ++i) weights[i][threadIdx.x] = 0;
      each([&](T logit, int) {
        const uint32_t prefix = key(logit) >> shift;
        if (prefix >> kDigitBits == found) weights[prefix % kDigits][threadIdx.x] += weight(logit, as_mass);
      });
      __syncthreads();
      float sum = 0;
#pragma unroll
      for (int i = 0; i < kChoosers; i += 32) sum += weights[warp][i + lane];
      sum = warp_sum(sum);
      turn ^= 1;
      if (lane < gridDim.x) put(&of_block[turn][blockIdx.x][warp], lane, sum);
      cluster_barrier();

      // Each lane: its digit and the larger ones, in all blocks. The same sums in the same order everywhere.
      sum = 0;
#pragma unroll
      for (int rank = 0; rank < kMaxCluster; ++rank) {
        if (rank < gridDim.x) sum += of_block[turn][rank][digit];
      }
#pragma unroll
      for (int step = 1; step < kDigits; step *= 2) {
        const float more = __shfl_down_sync(0xffffffffu, sum, step, kDigits);
        if (digit + step < kDigits) sum += more;
      }
      const bool first = shift == kKeyBits - kDigitBits;
      if (as_mass && first) target *= __shfl_sync(0xffffffffu, sum, 0);
      // Where rounding left no digit heavy enough, all that agrees so far stays.
      const uint32_t enough = __ballot_sync(0xffffffffu, sum > 0 && above + sum >= target) % (1u << kDigits);
      const int next = enough ? 31 - __clz(enough) : 0;
      const float larger = __shfl_sync(0xffffffffu, sum, (next + 1) % kDigits);
      if (next + 1 < kDigits) above += larger;
      found = found << kDigitBits | next;
    }
    return found;
  }

  // Blocks take turns at cache lines, since a tokenizer's frequent tokens are neighbours.
  __device__ int first_word() const {
    constexpr int kLine = 8;  // vectors
    const int before = reinterpret_cast<uint64_t>(logits) % 16 / sizeof(T), line = threadIdx.x / kLine;
    return ((line * gridDim.x + blockIdx.x) * kLine + threadIdx.x % kLine) * kVec<T> - before;
  }

  __device__ uint4 vector(int first) const {
    if (first + kVec<T> <= V) return load(logits + first);
    uint4 v = zeros();
    if (first >= V) return v;
#pragma unroll
    for (int i = 0; i < kVec<T>; ++i) {
      if (first + i < V) reinterpret_cast<T*>(&v)[i] = logits[first + i];
    }
    return v;
  }

  Weights& weights;
  const T* logits;
  int V, turn = 0;
  float top;            // the largest score, once it is needed
  uint32_t lowest = 0;  // key that stays
};

// Enough threads for the tokens, and blocks for the multiprocessors; the largest clusters only where there is room.
inline int cluster_size(int B, int V) {
  if (device_attribute(cudaDevAttrComputeCapabilityMajor) < 9) return 1;
  const int multiprocessors = device_attribute(cudaDevAttrMultiProcessorCount);
  const int most = B * kMaxCluster <= multiprocessors / 2 ? kMaxCluster : kMaxCluster / 2;
  int cluster = 1;
  while (cluster < most && cluster * B <= multiprocessors && cluster * kChoosers * 8 < V) cluster *= 2;
  return cluster;
}

// A cluster of blocks for each of B rows.
template <typename Args>
cudaError_t launch_on_rows(void (*kernel)(Args), const Args& a, int B, bool dependent, cudaStream_t stream) {
  const int cluster = cluster_size(B, a.V);
  if (cluster > 8) {  // more than every GPU with clusters promises
    if (cudaError_t error = cudaFuncSetAttribute(kernel, cudaFuncAttributeNonPortableClusterSizeAllowed, 1)) return error;
  }
  return launch(kernel, {dim3(cluster, B), kChoosers, 0, stream, cluster, dependent}, a);
}

}  // namespace eet
