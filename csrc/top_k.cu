// The next token by top-k and top-p, from logits whose largest in each block of the LM head is known. B rows,
// V vocabulary.
#include "eet/dependent.cuh"
#include "eet/launch.cuh"
#include "eet/logits_row.cuh"

namespace {

using eet::kChoosers;

constexpr int kBins = kChoosers;  // of scores: a thread adds up one
constexpr int kMost = 2048;       // tokens that may be left, in the lists of a row's blocks
constexpr int kFew = 128;         // tokens that are put in order at once

template <typename T>
struct TopKArgs : eet::ChooseArgs<T> {
  const uint64_t* best;  // [B,num_blocks], pairs of ordered.cuh
  int num_blocks;

  TopKArgs(const eet::ChooseArgs<T>& how, const int64_t* best, int num_blocks)
      : eet::ChooseArgs<T>(how), best(reinterpret_cast<const uint64_t*>(best)), num_blocks(num_blocks) {}
};

// What a block works in.
struct Shared {
  alignas(16) uint32_t keys[kChoosers];  // of the head's blocks
  uint32_t least_of[kChoosers / 32], largest_of[kChoosers / 32];
  uint64_t lengths[eet::kMaxCluster], fits;  // as wide as what can be put into another block's memory
  uint64_t sorted[kChoosers];
  int counts[kBins], num_listed, num_found;
  float mass;
  eet::Choice how;
};

// Scores from `low` to `top`, dealt out to bins in their order.
struct Bins {
  float low, scale;

  __device__ Bins(float low, float top) : low(low), scale(kBins / (top - low)) {}
  // Where all are equal, or infinitely far apart, a score's bin is NaN, that is 0; the order stays.
  __device__ int of(float score) const { return min(__float2int_rz((score - low) * scale), kBins - 1); }
};

// How many of n numbers in shared memory are larger than `mine`; what lies behind them, up to 16 bytes, is 0.
template <typename Number>
__device__ int num_larger(const Number* numbers, int n, Number mine) {
  constexpr int kEach = 16 / sizeof(Number);
  int larger = 0;
#pragma unroll 4
  for (int i = 0; i < n; i += kEach) {
    const uint4 v = eet::load(numbers + i);
#pragma unroll
    for (int j = 0; j < kEach; ++j) larger += reinterpret_cast<const Number*>(&v)[j] > mine;
  }
  return larger;
}

// Puts n numbers, all of them different and no more than threads, into descending order; there is room for one more.
__device__ void sort(uint64_t* to, uint64_t* from, int n) {
  if (threadIdx.x == 0) from[n] = 0;
  __syncthreads();
  if (threadIdx.x < n) to[num_larger(from, n, from[threadIdx.x])] = from[threadIdx.x];
  __syncthreads();
}

// The scores of the k-th largest of the head's blocks and of the largest; `key` is that of the thread's block, or 0.
__device__ float2 bounds(int num_blocks, int top_k, uint32_t key, Shared& shared) {
  shared.keys[threadIdx.x] = key;
  __syncthreads();
  uint32_t kept = ~0u;
  if (threadIdx.x < num_blocks && num_larger(shared.keys, num_blocks, key) < top_k) kept = key;
  const uint32_t least = __reduce_min_sync(0xffffffffu, kept), largest = __reduce_max_sync(0xffffffffu, key);
  if (threadIdx.x % 32 == 0) shared.least_of[threadIdx.x / 32] = least, shared.largest_of[threadIdx.x / 32] = largest;
  __syncthreads();
  const int warp = threadIdx.x % (kChoosers / 32);
  return make_float2(eet::of_ordered(__reduce_min_sync(0xffffffffu, shared.least_of[warp])),
                     eet::of_ordered(__reduce_max_sync(0xffffffffu, shared.largest_of[warp])));
}

// Writes the tokens of all blocks' lists one after another, and returns how many; -1: a list was too short.
__device__ int gathered(uint64_t* to, const uint64_t* lists, const Shared& shared) {
  const int room = kMost / gridDim.x, warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int length = lane < gridDim.x ? int(shared.lengths[lane]) : 0;
  if (__any_sync(0xffffffffu, length > room)) return -1;
  const int before = __reduce_add_sync(0xffffffffu, lane < warp ? length : 0);
  const int mine = __shfl_sync(0xffffffffu, length, warp);
  for (int i = lane; i < mine; i += 32) to[before + i] = lists[warp * room + i];
  __syncthreads();
  return __reduce_add_sync(0xffffffffu, length);
}

// Keeps the tokens from the bin on with which `least` of n are together: somewhat more than these. Returns how many.
__device__ int reduced(uint64_t* to, const uint64_t* from, int n, int least, Bins bins, Shared& shared) {
  for (int i = threadIdx.x; i < n; i += kChoosers) atomicAdd(&shared.counts[bins.of(eet::value_of(from[i]))], 1);
  __syncthreads();
  // A thread a bin, from the highest on: those before the one that is needed last.
  const int together = eet::running_sum<kChoosers>(shared.counts[kBins - 1 - threadIdx.x]);
  const int lowest = kBins - 1 - __syncthreads_count(together < least);
  for (int i = threadIdx.x; i < n; i += kChoosers) {
    if (bins.of(eet::value_of(from[i])) >= lowest) to[atomicAdd(&shared.num_found, 1)] = from[i];
  }
  __syncthreads();
  return shared.num_found;
}

// Draws from a row's `n` tokens, one for each thread, which are in order: what the top-k and the top-p leave of them.
__device__ uint64_t draw_from_sorted(const eet::Choice& how, int n, float top, const eet::Gumbel& noise,
                                     Shared& shared) {
  const uint64_t mine = threadIdx.x < n ? shared.sorted[threadIdx.x] : 0;
  const float score = eet::value_of(mine);
  bool stays = threadIdx.x < n && score >= eet::value_of(shared.sorted[how.top_k - 1]);
  if (how.top_p < 1) {
    const float mass = eet::running_sum<kChoosers>(stays ? eet::exp_of(score - top) : 0.f);
    if (threadIdx.x == kChoosers - 1) shared.mass = mass;
    __syncthreads();
    // The token that reaches it; the last one, if rounding leaves that to none.
    const int last = __syncthreads_count(int(threadIdx.x) < n - 1 && mass < shared.mass * how.top_p);
    stays = stays && score >= eet::value_of(shared.sorted[last]);
  }
  uint64_t best = 0;
  if (stays) best = eet::pair(score + noise.of(eet::word_of(mine)), eet::word_of(mine));
  return eet::block_max<kChoosers>(best);
}

// Why      a selection among all tokens passes over them again and again, 10 to 30 us after a decode step's last layer.
//          But the k-th largest of some tokens is no larger than the k-th largest of all: the largest of each of the
//          head's blocks tell at once which few tokens are left
// Mapping  a cluster of up to 16 blocks a row: grid (cluster, B), 512 threads. Each finds the bound, sends its tokens
//          that reach it to the first; this drops most of them if they are many, by 512 bins of scores, puts the others
//          in order, weighs them and draws
// Traffic  num_blocks pairs of 8 bytes a block and V logits a row, from L2, but for choose_kernel's way
// Needs    num_blocks <= 512. A row with a larger k than num_blocks or with none, one of whose blocks has more than its
//          share of 2,048 tokens above the bound, or that has more than 512 left down to the bin of the k-th, takes
//          choose_kernel's way
// Numerics scores, noise and masses in fp32: the draw that PyTorch makes of the same logits; tokens that tie with the
//          last one of the top-k or top-p stay
// Source   Gumbel-max: Kool et al. 2019; a bound from what is known of parts: Fagin et al. 2001, the threshold algorithm
template <typename T>
__global__ void __launch_bounds__(kChoosers, 1) choose_top_k_kernel(const TopKArgs<T> a) {
  __shared__ alignas(16) typename eet::Row<T>::Weights weights;
  __shared__ Shared shared;
  uint64_t* const lists = reinterpret_cast<uint64_t*>(weights);  // of each block, at the first: [cluster][room]
  uint64_t* const found = lists + kMost;                         // of all of them, one after another
  static_assert(2 * kMost * sizeof(uint64_t) <= sizeof(weights));
  const int rank = blockIdx.x, room = kMost / gridDim.x;
  eet::cluster_arrive();
  shared.counts[threadIdx.x] = 0;
  if (threadIdx.x == 0) shared.num_listed = shared.num_found = 0;
  eet::wait_for_previous();
  eet::let_next_begin();

  // Requested together, since each takes as long as a barrier; the position when its place is there.
  const int64_t place = a.draw.place(blockIdx.y), noise_key = a.draw.noise[blockIdx.y];
  uint64_t best = 0;
  if (threadIdx.x < a.num_blocks) best = a.best[int64_t(blockIdx.y) * a.num_blocks + threadIdx.x];
  eet::Row<T> row(a, weights);
  const uint4 first_vector = row.first_vector();
  if (threadIdx.x == 0) shared.how = a.choice(blockIdx.y);
  const int64_t position = a.draw.positions[place];
  __syncthreads();
  const eet::Choice& how = shared.how;
  row.scale = how.scale;
  bool few = how.draws && how.top_k <= a.num_blocks;  // the same in all of the cluster
  int n = 0;
  float top = 0;
  uint32_t mixed;
  if (few) {
    const uint32_t key = best ? eet::ordered(eet::scaled(eet::value_of(best), how.scale)) : 0;
    const float2 bound = bounds(a.num_blocks, how.top_k, key, shared);
    const float least = bound.x;
    top = bound.y;
    eet::cluster_wait();
    row.each(first_vector, [&](T logit, int token) {
      const float score = row.score(logit);
      if (!(score >= least)) return;  // nor is NaN a candidate
      const int number = atomicAdd(&shared.num_listed, 1);
      if (number < room) eet::put(&lists[rank * room + number], 0, eet::pair(score, token));
    });
    mixed = eet::Gumbel::key_of(noise_key, position);
    __syncthreads();
    if (threadIdx.x == 0) eet::put(&shared.lengths[rank], 0, uint64_t(shared.num_listed));
    eet::cluster_barrier();

    if (rank == 0) {
      n = gathered(found, lists, shared);
      const bool many = n > kFew;
      if (many) n = reduced(lists, found, n, how.top_k, Bins(least, top), shared);
      const bool fits = n >= how.top_k && n <= kChoosers;  // a NaN may be a block's largest, but is no candidate
      if (threadIdx.x < gridDim.x) eet::put(&shared.fits, threadIdx.x, uint64_t(fits));
      if (fits) sort(shared.sorted, lists + (many ? 0 : kMost), n);
    }
    eet::cluster_barrier();
    few = shared.fits;
  } else {
    eet::cluster_wait();
    mixed = eet::Gumbel::key_of(noise_key, position);
  }
  const eet::Gumbel noise(mixed);
  uint64_t chosen = 0;
  if (!few) {
    chosen = row.chosen(how, noise);
  } else if (rank == 0) {
    chosen = draw_from_sorted(how, n, top, noise, shared);
  }
  if (rank == 0 && threadIdx.x == 0) a.token[blockIdx.y] = eet::word_of(chosen);
}

}  // namespace

// What eet_choose gives for logits [B,V] and rows with positions[at[i]]. `best` [B,num_blocks] has the largest of each
// block's tokens, as linear.cuh leaves them without a draw.
extern "C" cudaError_t eet_choose_top_k(int64_t* token, const void* logits, const int64_t* best,
                                        const int64_t* positions, const int64_t* at, const int64_t* noise,
                                        const float* temperature, const int64_t* top_k, const float* top_p, int dtype,
                                        int B, int V, int num_blocks, int dependent, cudaStream_t stream) {
  if (!noise || !top_k || !top_p || num_blocks > min(V, kChoosers)) return cudaErrorInvalidValue;
  return eet::by_type(dtype, [&](auto type) {
    using Type = decltype(type);
    const TopKArgs<Type> a({token, logits, {noise, temperature, positions, at}, top_k, top_p, V}, best, num_blocks);
    return eet::launch_on_rows(choose_top_k_kernel<Type>, a, B, dependent != 0, stream);
  });
}
