// The choice of the next token among a row's logits: arg-max, or a draw after temperature, top-k and top-p.
// B rows, V words.
#include "eet/dependent.cuh"
#include "eet/launch.cuh"
#include "eet/reduce.cuh"
#include "eet/vec.cuh"

namespace {

constexpr int kDigitBits = 4;  // of a threshold, found in one pass over the row
constexpr int kDigits = 1 << kDigitBits;
constexpr int kThreads = 32 * kDigits;  // a warp adds up what one digit weighs
constexpr int kMaxCluster = 8;

// Unsigned numbers in the order of the floats; -0 counts as 0.
__device__ inline uint32_t ordered(float x) {
  const uint32_t bits = __float_as_uint(x + 0.f);
  return bits >> 31 ? ~bits : bits | 0x80000000u;
}

__device__ inline float unordered(uint32_t key) { return __uint_as_float(key >> 31 ? key & 0x7fffffffu : ~key); }

// Of two such pairs the larger has the larger value or, where they tie, the lower word.
__device__ inline uint64_t pair(float value, int word) { return uint64_t(ordered(value)) << 32 | ~uint32_t(word); }

__device__ inline uint64_t warp_max(uint64_t x) {
#pragma unroll
  for (int step = 16; step > 0; step /= 2) x = max(x, __shfl_xor_sync(0xffffffffu, x, step));
  return x;
}

// Until all of the cluster's threads are here, and see what the others wrote. Before sm_90 a cluster is one block.
__device__ inline void cluster_barrier() {
#if __CUDA_ARCH__ >= 900
  asm volatile("barrier.cluster.arrive.aligned;\n\tbarrier.cluster.wait.aligned;" ::: "memory");
#else
  __syncthreads();
#endif
}

// The number that the cluster's block `rank` keeps in shared memory where this block keeps `*mine`.
template <typename Number>
__device__ inline Number of_block(const Number* mine, int rank) {
#if __CUDA_ARCH__ >= 900
  uint32_t address;
  asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(address) : "r"(uint32_t(__cvta_generic_to_shared(mine))), "r"(rank));
  Number value;
  if constexpr (sizeof(Number) == 8) {
    asm volatile("ld.shared::cluster.u64 %0, [%1];" : "=l"(value) : "r"(address) : "memory");
  } else {
    asm volatile("ld.shared::cluster.f32 %0, [%1];" : "=f"(value) : "r"(address) : "memory");
  }
  return value;
#else
  return *mine;
#endif
}

// A 31-bit integer hash (two rounds of the multiply-xorshift family; constants by C. Wellons, "hash-prospector").
__device__ inline uint32_t mix(uint32_t x) {
  x &= 0x7fffffffu;
  x = ((x ^ x >> 15) * 0x2c1b3c6du) & 0x7fffffffu;
  x = ((x ^ x >> 15) * 0x297a2d39u) & 0x7fffffffu;
  return x ^ x >> 15;
}

// Gumbel noise by (seed, row, position, word) alone. Its logarithms are precise: PyTorch draws the same to the bit.
struct Noise {
  uint32_t key;

  __device__ Noise(int64_t seed, int row, int64_t position)
      : key(mix(mix(mix(mix(uint32_t(seed)) + uint32_t(seed >> 31)) + row) + uint32_t(position))) {}

  __device__ float of(int word) const {
    const float uniform = (float(mix(key + word) & 0x7fffffu) + 0.5f) * 0x1p-23f;
    return -logf(-logf(uniform));
  }
};

template <typename T>
struct ChooseArgs {
  int64_t* token;            // [B]
  const T* logits;           // [B,V]
  const int64_t* positions;  // [B]
  const int64_t* seed;       // [1]
  int V, top_k;              // V: no limit
  float scale, top_p;        // 1 / temperature, or 0: greedy; 1: no limit
};

// A row of logits, its words dealt out to a cluster's threads, and what those find out together.
// Whatever they tell each other stands in one of two places in turn: nobody fills one that another still reads.
template <typename T>
class Row {
 public:
  __device__ explicit Row(const ChooseArgs<T>& a) : logits(a.logits + int64_t(blockIdx.y) * a.V), V(a.V) {
    scale = a.scale ? a.scale : 1.f;
  }

  // Calls visit(logit, word) for this thread's words, in ascending order. Vectors begin where memory allows it, which may
  // be before the row; a row is read from L2 at first, and from L1 after that.
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
    if constexpr (sizeof(T) == 4) return ordered(score(logit));
    const uint32_t bits = reinterpret_cast<const uint16_t&>(logit);
    return bits > 0x8000 ? 0xffff - bits : bits & 0x7fff | 0x8000;
  }

  // The largest of all threads' pairs, for all of them.
  __device__ uint64_t largest(uint64_t mine) {
    __shared__ uint64_t of_warp[kDigits], of_blocks[2];
    mine = warp_max(mine);
    if (threadIdx.x % 32 == 0) of_warp[threadIdx.x / 32] = mine;
    __syncthreads();
    mine = warp_max(of_warp[threadIdx.x % kDigits]);
    turn ^= 1;
    if (threadIdx.x == 0) of_blocks[turn] = mine;
    cluster_barrier();
    return warp_max(of_block(of_blocks + turn, threadIdx.x % gridDim.x));
  }

  // What a word counts for: one, or its chance as a multiple of the likeliest word's.
  __device__ float weight(T logit, bool as_mass) const {
    if (!as_mass) return 1;
    return key(logit) >= lowest ? eet::exp_of(score(logit) - top) : 0.f;
  }

  // The largest key so that words with this key or a larger one are `target` in number, or have this share of the mass.
  // Digit by digit, from the highest: every pass weighs the words whose key agrees so far, by their next digit.
  __device__ uint32_t threshold(float target, bool as_mass) {
    __shared__ float weights[kDigits][kThreads], of_digit[2][kDigits];
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
      if (lane == 0) of_digit[turn][warp] = sum;
      cluster_barrier();

      // Each lane: its digit and the larger ones, in all blocks. The same sums in the same order everywhere.
      float parts[kMaxCluster / 2];
#pragma unroll
      for (int i = 0; i < kMaxCluster / 2; ++i) {
        const int rank = 2 * i + lane / kDigits;
        parts[i] = rank < gridDim.x ? of_block(of_digit[turn] + digit, rank) : 0.f;
      }
      sum = parts[0] + parts[1] + parts[2] + parts[3];
      sum += __shfl_xor_sync(0xffffffffu, sum, kDigits);
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
    uint4 v = eet::zeros();  // the row's end, and beyond it nothing
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
// Mapping  a cluster of up to 8 blocks a row: grid (cluster, B), 512 threads. Thresholds are found without a sort: a pass
//          for every 4 bits, in which each thread has 16 bins of its own, so nothing is atomic and sums do not vary
// Traffic  V logits a row, from L2 and then from L1: one pass for an arg-max or a plain draw; top-k, 4 to 8 more;
//          top-p as many, and one
// Needs    nothing: any V; -inf is never drawn beside a finite logit
// Numerics scores, noise and masses in fp32, the draw that PyTorch makes of the same logits; words that tie with the last
//          one of the top-k or top-p stay
// Source   Gumbel-max: Kool et al. 2019; selection by digits as in torch.topk; by masses, after FlashInfer's top-p
template <typename T>
__global__ void __launch_bounds__(kThreads) choose_kernel(const ChooseArgs<T> a) {
  eet::wait_for_previous();
  eet::let_next_begin();
  const bool draws = a.scale > 0;
  const Noise noise(*a.seed, blockIdx.y, a.positions[blockIdx.y]);
  Row<T> row(a);

#pragma unroll 1
  for (int as_mass = 0; as_mass < 2; ++as_mass) {  // top-k, then top-p among what it left
    if (as_mass ? a.top_p >= 1 : a.top_k >= a.V) continue;
    if (as_mass) {
      float most = -INFINITY;
      row.each([&](T logit, int) { most = fmaxf(most, logit); });
      row.top = row.score(unordered(row.largest(pair(most, 0)) >> 32));
    }
    row.lowest = max(row.lowest, row.threshold(as_mass ? a.top_p : a.top_k, as_mass));
  }

  float best = -INFINITY;
  int word = 0;
  row.each([&](T logit, int candidate) {
    if (row.key(logit) < row.lowest) return;
    const float value = row.score(logit) + (draws ? noise.of(candidate) : 0.f);
    if (value > best) best = value, word = candidate;
  });
  const uint64_t chosen = row.largest(pair(best, word));
  if (blockIdx.x == 0 && threadIdx.x == 0) a.token[blockIdx.y] = int64_t(~uint32_t(chosen));
  cluster_barrier();  // nobody leaves while another reads its shared memory
}

// Why      the LM head's blocks already know the largest logit of their share: its logits are never written
// Mapping  a warp a row: grid B, 32 threads
// Traffic  num_blocks pairs of 8 bytes a row
// Needs    pairs as linear.cu leaves them: larger for a larger logit, and where logits tie for a lower word
// Numerics integers
// Source   arg-max is associative
__global__ void choose_best_kernel(int64_t* token, const uint64_t* best, int num_blocks) {
  eet::wait_for_previous();
  eet::let_next_begin();
  uint64_t mine = 0;
  for (int i = threadIdx.x; i < num_blocks; i += 32) mine = max(mine, best[int64_t(blockIdx.x) * num_blocks + i]);
  mine = warp_max(mine);
  if (threadIdx.x == 0) token[blockIdx.x] = int64_t(~uint32_t(mine));
}

// Enough threads for the words, and blocks for the multiprocessors.
int cluster_size(int B, int V) {
  if (eet::device_attribute(cudaDevAttrComputeCapabilityMajor) < 9) return 1;
  const int multiprocessors = eet::device_attribute(cudaDevAttrMultiProcessorCount);
  int cluster = 1;
  while (cluster < kMaxCluster && 2 * cluster * B <= 2 * multiprocessors && cluster * kThreads * 8 < V) cluster *= 2;
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
    return eet::launch(choose_kernel<Type>, {dim3(cluster, B), kThreads, 0, stream, cluster, dependent != 0}, a);
  });
}

// token = the word of the largest of `best` [B,num_blocks].
extern "C" cudaError_t eet_choose_best(int64_t* token, const int64_t* best, int B, int num_blocks, int dependent,
                                       cudaStream_t stream) {
  return eet::launch(choose_best_kernel, {dim3(B), 32, 0, stream, 1, dependent != 0}, token,
                     reinterpret_cast<const uint64_t*>(best), num_blocks);
}
