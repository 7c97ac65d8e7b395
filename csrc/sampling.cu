// The choice of the next token among a row's logits: arg-max, or a draw after temperature, top-k and top-p.
// B rows, V words.
#include "eet/cluster.cuh"
#include "eet/dependent.cuh"
#include "eet/gumbel.cuh"
#include "eet/launch.cuh"
#include "eet/ordered.cuh"
#include "eet/reduce.cuh"
#include "eet/vec.cuh"

namespace {

constexpr int kDigitBits = 4;  // of a threshold, found in one pass over the row
constexpr int kDigits = 1 << kDigitBits;
constexpr int kThreads = 32 * kDigits;  // a warp adds up what one digit weighs
constexpr int kMaxCluster = 16;

template <typename T>
struct ChooseArgs {
  int64_t* token;            // [B]
  const T* logits;           // [B,V]
  const int64_t* positions;  // [B]
  const int64_t* seed;       // [1]
  int V, top_k;              // V: no limit
  float scale, top_p;        // 1 / temperature, or 0: greedy; 1: no limit
};

// A row of logits, its words dealt out to a cluster's threads, and what those find out together. A block puts what it
// has to tell into the others' memory, in one of two places in turn: nobody fills one that another still reads.
template <typename T>
class Row {
 public:
  __device__ explicit Row(const ChooseArgs<T>& a) : logits(a.logits + int64_t(blockIdx.y) * a.V), V(a.V) {
    scale = a.scale ? a.scale : 1.f;
  }

  // Calls visit(logit, word) for this thread's words, in ascending order. Vectors begin where memory allows it, which
  // may be before the row; a row is read from L2 at first, and from L1 after that.
  template <typename Visit>
  __device__ void each(Visit visit) const {
    const int before = reinterpret_cast<uint64_t>(logits) % 16 / sizeof(T), step = gridDim.x * kThreads * eet::kVec<T>;
    int first = (blockIdx.x * kThreads + threadIdx.x) * eet::kVec<T> - before;
    uint4 v = vector(first);
#pragma unroll 1
    for (; first < V; first += step) {
      const uint4 next = vector(first + step);
#pragma unroll
      for (int i = 0; i < eet::kVec<T>; ++i) {
        if (uint32_t(first + i) < uint32_t(V)) visit(reinterpret_cast<const T*>(&v)[i], first + i);
      }
      v = next;
    }
  }

  // As PyTorch divides by a number: times its reciprocal, rounded before the noise is added.
  __device__ float score(T logit) const { return __fmul_rn(eet::to_float(logit), scale); }

  // Unsigned numbers in the order of scores. 16-bit logits tie where their scores do, and have shorter keys.
  __device__ uint32_t key(T logit) const {
    if constexpr (sizeof(T) == 4) return eet::ordered(score(logit));
    const uint32_t bits = reinterpret_cast<const uint16_t&>(logit);
    return bits > 0x8000 ? 0xffff - bits : bits & 0x7fff | 0x8000;
  }

  // The largest of all threads' pairs, for all of them.
  __device__ uint64_t largest(uint64_t mine) {
    __shared__ uint64_t of_warp[kDigits], of_block[2][kMaxCluster];
    mine = eet::warp_max(mine);
    if (threadIdx.x % 32 == 0) of_warp[threadIdx.x / 32] = mine;
    __syncthreads();
    mine = eet::warp_max(of_warp[threadIdx.x % kDigits]);
    turn ^= 1;
    if (threadIdx.x < gridDim.x) eet::put(&of_block[turn][blockIdx.x], threadIdx.x, mine);
    eet::cluster_barrier();
    return eet::warp_max(of_block[turn][threadIdx.x % gridDim.x]);
  }

  // What a word counts for: one, or its chance as a multiple of the likeliest word's.
  __device__ float weight(T logit, bool as_mass) const {
    if (!as_mass) return 1;
    return key(logit) >= lowest ? eet::exp_of(score(logit) - top) : 0.f;
  }

  // The largest key so that words with this key or a larger one are `target` in number, or have this share of the mass.
  // Digit by digit, from the highest: every pass weighs the words whose key agrees so far, by their next digit.
  __device__ uint32_t threshold(float target, bool as_mass) {
    __shared__ float weights[kDigits][kThreads], of_block[2][kMaxCluster][kDigits];
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
      for (int i = 0; i < kThreads; i += 32) sum += weights[warp][i + lane];
      sum = eet::warp_sum(sum);
      turn ^= 1;
      if (lane < gridDim.x) eet::put(&of_block[turn][blockIdx.x][warp], lane, sum);
      eet::cluster_barrier();

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

  float top;            // the largest score, once it is needed
  uint32_t lowest = 0;  // key that stays

 private:
  __device__ uint4 vector(int first) const {
    if (first + eet::kVec<T> <= V) return eet::load(logits + first);
    uint4 v = eet::zeros();
    if (first >= V) return v;
#pragma unroll
    for (int i = 0; i < eet::kVec<T>; ++i) {
      if (first + i < V) reinterpret_cast<T*>(&v)[i] = logits[first + i];
    }
    return v;
  }

  const T* logits;
  int V, turn = 0;
  float scale;
};

// Why      PyTorch sorts all words and makes ten passes over them, and noise in 64-bit integers, for a single number
// Mapping  a cluster of up to 16 blocks a row: grid (cluster, B), 512 threads. Thresholds are found without a sort: a
//          pass for every 4 bits, in which each thread has 16 bins of its own: nothing is atomic, and sums do not vary
// Traffic  V logits a row, from L2 and then from L1: one pass for an arg-max or a plain draw; top-k, 4 to 8 more;
//          top-p as many, and one
// Needs    nothing: any V; -inf is never drawn beside a finite logit
// Numerics scores, noise and masses in fp32: the draw that PyTorch makes of the same logits; words that tie with the
//          last one of the top-k or top-p stay
// Source   Gumbel-max: Kool et al. 2019; selection by digits as in torch.topk; by masses, after FlashInfer's top-p
template <typename T>
__global__ void __launch_bounds__(kThreads) choose_kernel(const ChooseArgs<T> a) {
  eet::cluster_arrive();  // who puts something into another block's memory has to know that it is there
  eet::wait_for_previous();
  eet::let_next_begin();
  const bool draws = a.scale > 0;
  const eet::Gumbel gumbel(*a.seed, blockIdx.y, a.positions[blockIdx.y]);
  Row<T> row(a);
  eet::cluster_wait();

#pragma unroll 1
  for (int as_mass = 0; as_mass < 2; ++as_mass) {  // top-k, then top-p among what it left
    if (as_mass ? a.top_p >= 1 : a.top_k >= a.V) continue;
    if (as_mass) {
      float most = -INFINITY;
      row.each([&](T logit, int) { most = fmaxf(most, row.score(logit)); });
      row.top = eet::value_of(row.largest(eet::pair(most, 0)));
    }
    row.lowest = max(row.lowest, row.threshold(as_mass ? a.top_p : a.top_k, as_mass));
  }

  float best = -INFINITY;
  int word = 0;
  row.each([&](T logit, int candidate) {
    if (row.key(logit) < row.lowest) return;
    const float value = row.score(logit) + (draws ? gumbel.of(candidate) : 0.f);
    if (value > best) best = value, word = candidate;
  });
  const uint64_t chosen = row.largest(eet::pair(best, word));
  if (blockIdx.x == 0 && threadIdx.x == 0) a.token[blockIdx.y] = eet::word_of(chosen);
}

// Why      the LM head's blocks already know the largest logit of their share: its logits are never written
// Mapping  a warp a row: grid B, 32 threads
// Traffic  num_blocks pairs of 8 bytes a row
// Needs    pairs as linear.cuh leaves them: larger for a larger logit, and where logits tie for a lower word
// Numerics integers
// Source   arg-max is associative
__global__ void choose_best_kernel(int64_t* token, const uint64_t* best, int num_blocks) {
  eet::wait_for_previous();
  eet::let_next_begin();
  uint64_t mine = 0;
  for (int i = threadIdx.x; i < num_blocks; i += 32) mine = max(mine, best[int64_t(blockIdx.x) * num_blocks + i]);
  mine = eet::warp_max(mine);
  if (threadIdx.x == 0) token[blockIdx.x] = eet::word_of(mine);
}

// Enough threads for the words, and blocks for the multiprocessors; the largest clusters only where there is much room.
int cluster_size(int B, int V) {
  if (eet::device_attribute(cudaDevAttrComputeCapabilityMajor) < 9) return 1;
  const int multiprocessors = eet::device_attribute(cudaDevAttrMultiProcessorCount);
  const int most = B * kMaxCluster <= multiprocessors / 2 ? kMaxCluster : kMaxCluster / 2;
  int cluster = 1;
  while (cluster < most && cluster * B <= multiprocessors && cluster * kThreads * 8 < V) cluster *= 2;
  return cluster;
}

}  // namespace

// token = arg-max of logits where the temperature is 0, else a draw.
extern "C" cudaError_t eet_choose(int64_t* token, const void* logits, const int64_t* positions, const int64_t* seed,
                                  int dtype, int B, int V, int top_k, float temperature, float top_p, int dependent,
                                  cudaStream_t stream) {
  return eet::by_type(dtype, [&](auto type) {
    using Type = decltype(type);
    const bool draws = temperature > 0;
    const ChooseArgs<Type> a{token, static_cast<const Type*>(logits), positions, seed, V,
                             draws && top_k > 0 ? min(top_k, V) : V, draws ? 1.f / temperature : 0.f,
                             draws ? top_p : 1.f};
    const int cluster = cluster_size(B, V);
    if (cluster > 8) {  // more than every GPU with clusters promises
      const auto allow = cudaFuncAttributeNonPortableClusterSizeAllowed;
      if (cudaError_t error = cudaFuncSetAttribute(choose_kernel<Type>, allow, 1)) return error;
    }
    return eet::launch(choose_kernel<Type>, {dim3(cluster, B), kThreads, 0, stream, cluster, dependent != 0}, a);
  });
}

// token = the word of the largest of `best` [B,num_blocks].
extern "C" cudaError_t eet_choose_best(int64_t* token, const int64_t* best, int B, int num_blocks, int dependent,
                                       cudaStream_t stream) {
  return eet::launch(choose_best_kernel, {dim3(B), 32, 0, stream, 1, dependent != 0}, token,
                     reinterpret_cast<const uint64_t*>(best), num_blocks);
}
