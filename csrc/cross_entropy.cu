// Label-smoothed cross entropy of logits, and its gradient over them. N tokens, V words.
#include <cfloat>

#include "eet/launch.cuh"
#include "eet/reduce.cuh"
#include "eet/vec.cuh"

namespace {

constexpr int kMostThreads = 1024;
constexpr int kAtOnce = 4;  // vectors that a thread has under way
constexpr int64_t kIgnored = -100;

template <typename T>
struct LossArgs {
  float* losses;          // [N]
  float* kept;            // [2,N] or null, written with the losses, read without: the maximum of a row, and the logarithm of
                          // the sum of exponentials relative to it
  T* logits;              // [N,V], over which the gradient is written
  const int64_t* labels;  // [N]
  const float* outer;     // what the gradient is multiplied by, on the device; null: 1
  int64_t stride;         // from row to row
  int V, num_held;        // vectors of a row that stay in shared memory
  float smoothing;
};

// What is known of some logits of a row; exponentials are relative to the largest one.
struct Sums {
  float top = -FLT_MAX, powers = 0, logits = 0;

  __device__ void add(float part_top, float part_powers, float part_logits) {
    const float both = fmaxf(top, part_top);
    // Not one fused operation: two lanes that add each other's get the same number.
    powers = __fadd_rn(__fmul_rn(powers, eet::exp_of(top - both)), __fmul_rn(part_powers, eet::exp_of(part_top - both)));
    logits += part_logits;
    top = both;
  }

  // Of all lanes, for all of them, in the same order every time.
  __device__ void combine_lanes() {
#pragma unroll
    for (int step = 16; step > 0; step /= 2) {
      const float its_top = __shfl_xor_sync(0xffffffffu, top, step);
      const float its_powers = __shfl_xor_sync(0xffffffffu, powers, step);
      add(its_top, its_powers, __shfl_xor_sync(0xffffffffu, logits, step));
    }
  }

  // Of all threads of the block.
  __device__ void combine_block() {
    __shared__ float of_warp[3][kMostThreads / 32];
    combine_lanes();
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    if (lane == 0) of_warp[0][warp] = top, of_warp[1][warp] = powers, of_warp[2][warp] = logits;
    __syncthreads();
    *this = Sums();
    if (lane < blockDim.x / 32) top = of_warp[0][lane], powers = of_warp[1][lane], logits = of_warp[2][lane];
    combine_lanes();
  }
};

// A row: vectors where memory is aligned to them, and up to 14 numbers before and behind, one a thread.
template <typename T>
struct Row {
  int first, num_vectors, edge;  // edge: this thread's number outside of the vectors, or -1

  __device__ Row(const T* row, int V) {
    constexpr int kVec = eet::kVec<T>;
    first = min(V, int(-reinterpret_cast<uint64_t>(row) % 16 / sizeof(T)));
    num_vectors = (V - first) / kVec;
    const int end = first + num_vectors * kVec, mine = threadIdx.x;
    edge = mine < first ? mine : end + mine - first < V ? end + mine - first : -1;
  }

  // Calls visit(i, vector) for each of this thread's vectors; several loads are under way together.
  template <typename Load, typename Visit>
  __device__ void each(Load load, Visit visit) const {
#pragma unroll 1
    for (int begin = threadIdx.x; begin < num_vectors; begin += kAtOnce * blockDim.x) {
      uint4 v[kAtOnce];
#pragma unroll
      for (int u = 0; u < kAtOnce; ++u) {
        if (begin + u * blockDim.x < num_vectors) v[u] = load(begin + u * blockDim.x);
      }
#pragma unroll
      for (int u = 0; u < kAtOnce; ++u) {
        if (begin + u * blockDim.x < num_vectors) visit(begin + u * blockDim.x, v[u]);
      }
    }
  }
};

// Why      PyTorch widens the logits to fp32, writes all log-probabilities, and reads and writes those for the gradient
// Mapping  a block a row; a thread goes over every so many vectors of 16 bytes and comes back to the same ones
// Traffic  the loss alone reads N*V; the gradient alone reads and writes N*V. Together they read and write N*V as well:
//          the row waits in shared memory (what of it has no room is read again). Rows without a label are not read
// Needs    nothing of V, and no alignment of rows: those of an odd V have none
// Numerics fp32; exponentials relative to an online maximum, as is the label's logit; sums in an order that depends on V
//          and on where a row begins; gradients are multiplied by `outer` before they are rounded. A label that is no word
//          gives NaN
// Source   LightSeq2's criterion (Wang et al., SC 2022); online softmax (Milakov and Gimelshein 2018); the gradient in
//          the place of the logits after Liger-Kernel (Hsu et al. 2024)
template <typename T, bool kTakesLoss, bool kWritesGrad>
__global__ void __launch_bounds__(kMostThreads) cross_entropy_kernel(const LossArgs<T> a) {
  extern __shared__ uint4 held[];
  constexpr int kVec = eet::kVec<T>;
  const int64_t number = blockIdx.x, label = a.labels[number];
  T* logits = a.logits + number * a.stride;
  const Row<T> row(logits, a.V);
  const bool is_ignored = label == kIgnored, is_word = label >= 0 && label < a.V;

  float top = 0, log_sum = 0;
  float edge = row.edge < 0 || is_ignored ? 0 : eet::to_float(logits[row.edge]);
  if (kTakesLoss && !is_ignored) {
    const float its = is_word ? eet::to_float(logits[label]) : NAN;
    Sums sums;
    row.each([&](int i) { return eet::load_once(logits + row.first + i * kVec); },
             [&](int i, uint4 v) {
               if (kWritesGrad && i < a.num_held) held[i] = v;
               float x[kVec];
               eet::unpack<T>(v, x);
               float most = x[0];
#pragma unroll
               for (int k = 1; k < kVec; ++k) most = fmaxf(most, x[k]);
               if (most > sums.top) {
                 sums.powers *= eet::exp_of(sums.top - most);
                 sums.top = most;
               }
#pragma unroll
               for (int k = 0; k < kVec; ++k) sums.powers += eet::exp_of(x[k] - sums.top);
               if (a.smoothing > 0) {
#pragma unroll
                 for (int k = 0; k < kVec; ++k) sums.logits += x[k];
               }
             });
    if (row.edge >= 0) sums.add(edge, 1, edge);
    sums.combine_block();
    top = sums.top, log_sum = logf(sums.powers);
    if (threadIdx.x == 0) {
      float loss = log_sum + (1 - a.smoothing) * (top - its);
      if (a.smoothing > 0) loss += a.smoothing * (top - sums.logits / a.V);
      a.losses[number] = loss;
    }
  } else if (kTakesLoss) {
    if (threadIdx.x == 0) a.losses[number] = 0;
  } else {
    top = a.kept[number], log_sum = a.kept[gridDim.x + number];
  }
  if (kTakesLoss && a.kept && threadIdx.x == 0) a.kept[number] = top, a.kept[gridDim.x + number] = log_sum;
  if constexpr (kWritesGrad) {
    if (is_ignored) {
      for (int i = threadIdx.x; i < row.num_vectors; i += blockDim.x) {
        eet::store(logits + row.first + i * kVec, eet::zeros());
      }
      if (row.edge >= 0) logits[row.edge] = eet::from_float<T>(0);
      return;
    }
    const float outer = is_word ? (a.outer ? *a.outer : 1.f) : NAN;
    const float all = a.smoothing / a.V, taken = 1 - a.smoothing, offset = log_sum * eet::kLog2e;
    const auto of = [&](float x, bool is_label) {
      const float p = eet::exp2_of(fmaf(x - top, eet::kLog2e, -offset)) - all;
      return (is_label ? p - taken : p) * outer;
    };
    const int word = is_word ? int(label) : -1;
    row.each(
        [&](int i) { return kTakesLoss && i < a.num_held ? held[i] : eet::load_once(logits + row.first + i * kVec); },
        [&](int i, uint4 v) {
          const int begin = row.first + i * kVec;
          float x[kVec], y[kVec];
          eet::unpack<T>(v, x);
#pragma unroll
          for (int k = 0; k < kVec; ++k) y[k] = of(x[k], false);
          if (unsigned(word - begin) < kVec) {
#pragma unroll
            for (int k = 0; k < kVec; ++k) y[k] = of(x[k], begin + k == word);
          }
          eet::store(logits + begin, eet::pack<T>(y));
        });
    if (row.edge >= 0) logits[row.edge] = eet::from_float<T>(of(edge, row.edge == word));
  }
}

// Threads that have enough to do, and shared memory for the row if both passes go over it. Where two blocks fit into a
// multiprocessor one reads while the other one writes; one alone has twice the threads.
template <typename T, bool kTakesLoss, bool kWritesGrad>
cudaError_t launch_cross_entropy(LossArgs<T> a, int N, cudaStream_t stream) {
  const int num_vectors = a.V / eet::kVec<T>, vector = sizeof(uint4);
  int bytes = 0, most = kMostThreads / 2;
  if (kTakesLoss && kWritesGrad) {
    a.num_held = min(num_vectors, eet::whole_shared() / vector);
    bytes = a.num_held * vector;
    constexpr int kBesides = 1024 + sizeof(Sums) * kMostThreads / 32;
    const int of_all = eet::device_attribute(cudaDevAttrMaxSharedMemoryPerMultiprocessor);
    if (2 * (bytes + kBesides) > of_all) most = kMostThreads;
  }
  int threads = 64;
  while (threads < most && threads * kAtOnce < num_vectors) threads *= 2;
  return eet::launch(cross_entropy_kernel<T, kTakesLoss, kWritesGrad>, {N, threads, bytes, stream}, a);
}

// `dtype` is that of the logits [N,V], whose rows are `stride` apart; all but those are fp32, and labels int64.
template <bool kTakesLoss, bool kWritesGrad>
cudaError_t launch_by_type(void* losses, const void* kept, const void* logits, const void* labels,
                           const void* outer, int dtype, int N, int V, int64_t stride, float smoothing,
                           cudaStream_t stream) {
  return eet::by_type(dtype, [&](auto type) {
    using Type = decltype(type);
    const LossArgs<Type> a{static_cast<float*>(losses),
                           static_cast<float*>(const_cast<void*>(kept)),
                           static_cast<Type*>(const_cast<void*>(logits)),
                           static_cast<const int64_t*>(labels),
                           static_cast<const float*>(outer),
                           stride,
                           V,
                           0,
                           smoothing};
    return launch_cross_entropy<Type, kTakesLoss, kWritesGrad>(a, N, stream);
  });
}

}  // namespace

// The loss of each row, and what the gradient is made of beside its logits: `kept` [2,N].
extern "C" cudaError_t eet_cross_entropy_loss(void* losses, void* kept, const void* logits, const void* labels,
                                              int dtype, int N, int V, int64_t stride, float smoothing,
                                              cudaStream_t stream) {
  return launch_by_type<true, false>(losses, kept, logits, labels, nullptr, dtype, N, V, stride, smoothing, stream);
}

// The gradient of `outer` times the sum of all losses, written over the logits.
extern "C" cudaError_t eet_cross_entropy_grad(void* logits, const void* kept, const void* labels, const void* outer,
                                              int dtype, int N, int V, int64_t stride, float smoothing,
                                              cudaStream_t stream) {
  return launch_by_type<false, true>(nullptr, kept, logits, labels, outer, dtype, N, V, stride, smoothing, stream);
}

// The loss of each row, and the gradient of the sum of all, written over the logits.
extern "C" cudaError_t eet_cross_entropy(void* losses, void* logits, const void* labels, int dtype, int N, int V,
                                         int64_t stride, float smoothing, cudaStream_t stream) {
  return launch_by_type<true, true>(losses, nullptr, logits, labels, nullptr, dtype, N, V, stride, smoothing, stream);
}
