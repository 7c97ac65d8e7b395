// What linear layers of few tokens share, whatever multiplies: arguments, a block's share, the stream of weights, what
// surrounds a sum, and where the largest output stands, or the one that is drawn. T tokens, N outputs, K inputs.
#pragma once

#include <climits>

#include "eet/activation.cuh"
#include "eet/gumbel.cuh"
#include "eet/launch.cuh"
#include "eet/norm.cuh"
#include "eet/ordered.cuh"
#include "eet/reduce.cuh"
#include "eet/ring.cuh"

namespace eet {

inline constexpr int kMaxTokens = 16;
// Two kernels share a multiprocessor where one can begin before the other ends.
#if __CUDA_ARCH__ >= 900
inline constexpr int kResident = 2;
#else
inline constexpr int kResident = 1;
#endif

// T: the type of activations; W: of weights.
template <typename T, typename W>
struct LinearArgs {
  T* out;             // [T,N] or null
  uint64_t* best;     // [T,blocks] or null: the largest output, or with most noise, and where it stands (ordered.cuh)
  const T* x;         // [.,K]
  const int64_t* at;  // [T] or null: token i is row at[i] of x
  const W* weight;    // [N,K]
  const T* bias;      // [N] or null
  const T* residual;  // [T,N] or null; may be `out`
  Norm<T> norm;       // no weight: none
  int num_tokens, N, K, act;
  int share, rest;  // outputs of a block; blocks that have `unit` more
  int unit = 1;     // outputs that a block has together

  LinearArgs(void* out, void* best, const void* x, const int64_t* at, const void* weight, const void* bias,
             const void* residual, const void* norm_weight, const void* norm_bias, int num_tokens, int N, int K, int act,
             float eps, int num_blocks)
      : out(static_cast<T*>(out)),
        best(static_cast<uint64_t*>(best)),
        x(static_cast<const T*>(x)),
        at(at),
        weight(static_cast<const W*>(weight)),
        bias(static_cast<const T*>(bias)),
        residual(static_cast<const T*>(residual)),
        norm{static_cast<const T*>(norm_weight), static_cast<const T*>(norm_bias), eps},
        num_tokens(num_tokens),
        N(N),
        K(K),
        act(act),
        share(N / num_blocks),
        rest(N % num_blocks) {}

  int most_outputs() const { return share + (rest > 0) * unit; }  // of a block

  // Gives blocks their outputs two at a time.
  void pair(int num_blocks) {
    share = N / 2 / num_blocks * 2;
    rest = N / 2 % num_blocks;
    unit = 2;
  }
};

// Whether a kernel of few tokens, which counts the outputs of all of them in 32 bits, can take so many.
inline bool can_count(int T, int N) { return N <= INT_MAX / T; }

// The outputs of this block.
struct Share {
  int begin, end;

  // `unit` is that of the arguments, for a kernel that is compiled for one.
  template <typename T, typename W>
  __device__ explicit Share(const LinearArgs<T, W>& a, int unit = 1, int block = blockIdx.x) {
    begin = block * a.share + min(block, a.rest) * unit;
    end = begin + a.share + (block < a.rest) * unit;
  }
};

// Which row of the weights gives output n of N.
struct InOrder {
  static constexpr bool kInOrder = true, kGated = false;
  __device__ static int row(int n, int) { return n; }
};

// Outputs 2f and 2f + 1 are gate f and what it lets through: weights have all N/2 gates first.
struct Gated {
  static constexpr bool kInOrder = false, kGated = true;
  __device__ static int row(int n, int N) { return n / 2 + n % 2 * (N / 2); }
  __device__ void prepare(int) const {}
};

// A function of i: where the weights of output n + i begin, from input k on.
template <typename Order, typename W>
__device__ auto rows_from(Order order, const W* weight, int n, int N, int K, int k) {
  if constexpr (Order::kInOrder) {
    const char* const first = reinterpret_cast<const char*>(weight + int64_t(n) * K + k);
    return [first, pitch = K * int64_t(sizeof(W))](int i) { return first + i * pitch; };
  } else {
    return [=](int i) { return reinterpret_cast<const char*>(weight + order.row(n + i, N) * int64_t(K) + k); };
  }
}

// A gated launch has an even number of outputs, and neither chooses among them nor adds to them.
inline bool can_pair(bool gated, int N, const void* best, const void* residual) {
  return !gated || (N % 2 == 0 && !best && !residual);
}

// By the warp that fills: the weights of the block's outputs, `tile` outputs and `stage_inputs` inputs at a time.
template <typename Order, typename T, typename W>
__device__ void stream_weights(Order order, const Ring& ring, const LinearArgs<T, W>& a, Share mine, int tile,
                               int stage_inputs, int stage_stride) {
  RingPlace place;
  for (int n = mine.begin; n < mine.end; n += tile) {
    for (int k = 0; k < a.K; k += stage_inputs, place.step(ring.num_stages)) {
      ring.fill(place, rows_from(order, a.weight, n, a.N, a.K, k), min(tile, mine.end - n),
                min(stage_inputs, a.K - k) * int(sizeof(W)), stage_stride);
    }
  }
}

// What `best` compares: the outputs themselves.
struct Largest : InOrder {
  __device__ void prepare(int) const {}
  __device__ float value(float output, int, int) const { return output; }
};

// Outputs that are logits, scaled and with the noise of a draw where the token's row is drawn.
struct WithNoise : Draw, InOrder {
  // By all threads, once what was before is there; they meet before they ask for a value.
  __device__ void prepare(int num_tokens) const {
    if (threadIdx.x < num_tokens) rows()[threadIdx.x] = {key(threadIdx.x), __float_as_uint(scale(threadIdx.x))};
  }

  __device__ float value(float logit, int token, int n) const {
    const uint2 row = rows()[token];
    const float its_scale = __uint_as_float(row.y);
    return its_scale > 0 ? scaled(logit, its_scale) + Gumbel(row.x).of(n) : logit;
  }

 private:
  __device__ static uint2* rows() {  // in shared memory, since registers are few where outputs are finished
    __shared__ uint2 rows[kMaxTokens];
    return rows;
  }
};

// A thread's outputs of a token, kEach at a time and `apart`: what is added to a sum, requested before it is needed, and
// where the result goes.
template <typename T, typename W, int kEach = 1, typename Choice = Largest>
struct Outputs {
  const LinearArgs<T, W>& a;
  const int token, end, apart;
  T bias[kEach], residual[kEach];
  uint64_t best = 0;
  Choice choice;

  __device__ Outputs(const LinearArgs<T, W>& a, int token, Share mine, int apart = 0, Choice choice = Choice())
      : a(a), token(token), end(mine.end), apart(apart), choice(choice) {}

  __device__ bool has(int n) const { return token < a.num_tokens && n < end; }
  __device__ int place(int n) const { return token * a.N + n; }  // in memory
  __device__ void request_bias(int n) {
#pragma unroll
    for (int i = 0; i < kEach; ++i, n += apart) bias[i] = a.bias && has(n) ? a.bias[choice.row(n, a.N)] : T(0.f);
  }
  // After what may have written it was waited for.
  __device__ void request_residual(int n) {
#pragma unroll
    for (int i = 0; i < kEach; ++i, n += apart) {
      residual[i] = a.residual && has(n) ? a.residual[place(n)] : T(0.f);
    }
  }

  // For the next group of outputs.
  __device__ void request(int n) {
    request_bias(n);
    request_residual(n);
  }

  // Of the first.
  __device__ T value(float sum) const {
    return from_float<T>(activate(sum + to_float(bias[0]), a.act) + to_float(residual[0]));
  }
  // The second becomes the first, and so on.
  __device__ void move_on() {
#pragma unroll
    for (int i = 1; i < kEach; ++i) bias[i - 1] = bias[i], residual[i - 1] = residual[i];
  }

  // By all of a warp, which has gates and what they let through side by side: the result for a gate's lane.
  __device__ T gated(float sum) const {
    const float whole = sum + to_float(bias[0]), let_through = __shfl_down_sync(0xffffffffu, whole, 1);
    return from_float<T>(activate(whole, a.act) * let_through);
  }

  // By all of a warp, of which `mine` says who has output n; `sum()` is its sum.
  template <typename Sum>
  __device__ void finish(bool mine, Sum sum, int n) {
    if constexpr (Choice::kGated) {
      const T its_value = gated(mine ? sum() : 0.f);
      if (mine && n % 2 == 0) a.out[place(n) / 2] = its_value;
    } else if (mine) {
      finish(sum(), n);
    }
  }

  __device__ void finish(float sum, int n) {
    const T its_value = value(sum);
    if (a.out) a.out[place(n)] = its_value;
    if (a.best) best = max(best, pair(choice.value(to_float(its_value), token, n), n));
  }
};

// By a warp whose lane 4g+t summed, in fp32, every fourth input of the outputs g and g + 8: the sums, [tokens][16].
template <int kTokens>
__device__ void store_quarters(const float (&sum)[2][kTokens], float* partial, int num_tokens) {
  const int g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
#pragma unroll
  for (int token = 0; token < kTokens; ++token) {
    if (token >= num_tokens) break;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const float whole = warp_sum<4>(sum[half][token]);
      if (t == 0) partial[token * 16 + half * 8 + g] = whole;
    }
  }
}

// By all num_readers threads that multiply: the block's largest output of each token, whose outputs belong to `group`
// neighbouring threads, a multiple of 16. `scratch` is shared, with an entry for every 16 threads.
__device__ inline void leave_best(uint64_t best, uint64_t* to, int num_tokens, int group, int num_readers,
                                  uint64_t* scratch) {
  const int width = min(group, 32), num_parts = group / width;
#pragma unroll
  for (int step = 16; step > 0; step /= 2) {
    const uint64_t other = __shfl_xor_sync(0xffffffffu, best, step);
    if (step < width) best = max(best, other);
  }
  barrier(1, num_readers);  // nobody reads what lies in `scratch` any more
  if (threadIdx.x % width == 0) scratch[threadIdx.x / width] = best;
  barrier(1, num_readers);
  if (threadIdx.x >= num_tokens) return;
  best = 0;
  for (int i = 0; i < num_parts; ++i) best = max(best, scratch[threadIdx.x * num_parts + i]);
  to[threadIdx.x * gridDim.x + blockIdx.x] = best;
}

// Bytes between rows in shared memory, an odd number of 64: the 8 rows that a warp reads lie in different banks.
inline int odd_stride(int bytes) { return (ceil_div(bytes, 64) | 1) * 64; }

}  // namespace eet
