// Updates of weights in flat buffers, and the norm of their gradients. n numbers.
#include <algorithm>
#include <cmath>
#include <type_traits>

#include "eet/gumbel.cuh"
#include "eet/launch.cuh"
#include "eet/reduce.cuh"
#include "eet/rows.cuh"
#include "eet/vec.cuh"

namespace {

constexpr int kThreads = 256;
constexpr int kBlocks = 4;  // of a multiprocessor, whose registers they share
constexpr int kWidth = 4;   // numbers that are updated together: 16 bytes in fp32
constexpr int kAtOnce = 2;  // of those, loads that are under way together

// What an update reads on the device, so that a captured one can be launched for other numbers.
struct Update {
  const float *lr, *scale, *step;  // step: its number, from 1
  const uint8_t* skip;
};

template <typename T>
struct UpdateArgs {
  T* weights;
  T* grads;
  float* moments[2];
  float* master;  // of 16-bit weights, or null: they are updated themselves
  Update update;
  int64_t n;
  int noise;   // of the seed, for rounding at random; -1: to the nearest
  int number;  // of the buffer, for the noise

  __device__ bool has_master() const { return sizeof(T) < sizeof(float) && master; }
};

// Formulas of PyTorch's fused kernels, in its order of operations. `prepare` reads what is the same for all numbers.
struct AdamW {
  static constexpr int kMoments = 2;
  float beta1, beta2, log_beta1, log_beta2, eps, weight_decay;
  float decayed, step_size, root;

  // 1 - beta^step as -(e^(step log beta) - 1), which loses no digits of a beta near 1.
  __device__ void prepare(float lr, float step) {
    decayed = lr * weight_decay;
    step_size = lr / -expm1f(step * log_beta1);
    root = sqrtf(-expm1f(step * log_beta2));
  }

  __device__ void apply(float& weight, float grad, float (&moment)[2]) const {
    weight -= decayed * weight;
    moment[0] = fmaf(beta1, moment[0], fmaf(-beta1, grad, grad));
    moment[1] = fmaf(beta2, moment[1], fmaf(-beta2, grad * grad, grad * grad));
    weight -= step_size * moment[0] / (sqrtf(moment[1]) / root + eps);
  }
};

template <int kHeld>
struct SGD {
  static constexpr int kMoments = kHeld;
  float momentum, weight_decay;
  bool nesterov;
  float lr;

  __device__ void prepare(float its_lr, float) { lr = its_lr; }

  __device__ void apply(float& weight, float grad, float (&moment)[2]) const {
    grad += weight_decay * weight;
    if constexpr (kHeld == 1) {
      moment[0] = momentum * moment[0] + grad;
      grad = nesterov ? grad + momentum * moment[0] : moment[0];
    }
    weight -= lr * grad;
  }
};

// As `rounded_at_random` in parts/buffers.py, bit for bit.
__device__ inline __nv_bfloat16 rounded_at_random(float x, uint32_t key, int64_t at) {
  if (!isfinite(x)) return __float2bfloat16_rn(x);
  const uint32_t bits = __float_as_uint(x) + (eet::mix(key + uint32_t(at)) & 0xffffu);
  return __ushort_as_bfloat16(uint16_t(bits >> 16));
}

// Numbers that are neighbours: what is read of them, and what becomes of them.
template <typename T, typename Rule, int kCount>
struct Numbers {
  static constexpr int kMoments = Rule::kMoments;
  eet::Piece<T, kCount> weight, grad;
  eet::Piece<float, kCount> master, moment[kMoments ? kMoments : 1];

  __device__ void load(const UpdateArgs<T>& a, int64_t at) {
    grad = of(a.grads + at);
#pragma unroll
    for (int i = 0; i < kMoments; ++i) moment[i] = of(a.moments[i] + at);
    if (a.has_master()) {
      master = of(a.master + at);
    } else {
      weight = of(a.weights + at);
    }
  }

  __device__ void apply(const UpdateArgs<T>& a, const Rule& rule, float scale, uint32_t key, int64_t at) {
#pragma unroll
    for (int k = 0; k < kCount; ++k) {
      float its[2], value = a.has_master() ? master.number[k] : eet::to_float(weight.number[k]);
#pragma unroll
      for (int i = 0; i < kMoments; ++i) its[i] = moment[i].number[k];
      rule.apply(value, eet::to_float(grad.number[k]) * scale, its);
#pragma unroll
      for (int i = 0; i < kMoments; ++i) moment[i].number[k] = its[i];
      master.number[k] = value;
      weight.number[k] = eet::from_float<T>(value);
      if constexpr (std::is_same_v<T, __nv_bfloat16>) {
        if (a.noise >= 0) weight.number[k] = rounded_at_random(value, key, at + k);
      }
    }
  }

  __device__ void store(const UpdateArgs<T>& a, int64_t at) const {
    of(a.weights + at) = weight;
    if (a.has_master()) of(a.master + at) = master;
#pragma unroll
    for (int i = 0; i < kMoments; ++i) of(a.moments[i] + at) = moment[i];
  }

 private:
  template <typename U>
  __device__ static eet::Piece<U, kCount>& of(U* p) {
    return *reinterpret_cast<eet::Piece<U, kCount>*>(p);
  }
};

// Why      PyTorch's fused updates take weights and gradients of one type with moments: around them 16-bit gradients are
//          widened and scaled, and 16-bit weights are copied from their masters, in passes of their own
// Mapping  as many blocks as there is room for; each thread goes over every so many groups of four numbers
// Traffic  AdamW of 16-bit weights with a master copy reads 14 bytes a weight (gradient 2, master 4, moments 8) and writes
//          14 (weight 2, master 4, moments 8); without one it reads 12 and writes 10; in fp32 16 and 12. SGD reads and
//          writes 8 bytes less each, or 4 with a momentum
// Needs    buffers that begin at a multiple of 16 bytes; any n
// Numerics fp32, in the order of operations of PyTorch's fused kernels; gradients are scaled in fp32; weights are rounded
//          once. Where `skip` is set nothing changes
// Source   LightSeq2 (Wang et al., SC 2022) for one launch over all weights; Loshchilov and Hutter 2019, Decoupled Weight
//          Decay Regularization
template <typename T, typename Rule>
__global__ void __launch_bounds__(kThreads, kBlocks) update_kernel(const UpdateArgs<T> a, Rule rule) {
  const int all = gridDim.x * kThreads;  // in 32 bits: one more register, and AdamW would spill
  const int64_t first = int64_t(blockIdx.x) * kThreads + threadIdx.x;
  const int64_t num_groups = a.n / kWidth, behind = num_groups * kWidth + first;
  if (*a.update.skip) return;
  const float scale = *a.update.scale, step = *a.update.step;
  rule.prepare(*a.update.lr, step);
  const uint32_t key = eet::mix(eet::mix(uint32_t(a.noise) + uint32_t(step)) + uint32_t(a.number));
#pragma unroll 1
  for (int64_t group = first; group < num_groups; group += kAtOnce * all) {
    Numbers<T, Rule, kWidth> numbers[kAtOnce];
#pragma unroll
    for (int u = 0; u < kAtOnce; ++u) {
      if (group + u * all < num_groups) numbers[u].load(a, (group + u * all) * kWidth);
    }
#pragma unroll
    for (int u = 0; u < kAtOnce; ++u) {
      if (group + u * all >= num_groups) continue;
      const int64_t at = (group + u * all) * kWidth;
      numbers[u].apply(a, rule, scale, key, at);
      numbers[u].store(a, at);
    }
  }
  if (behind < a.n) {
    Numbers<T, Rule, 1> last;
    last.load(a, behind);
    last.apply(a, rule, scale, key, behind);
    last.store(a, behind);
  }
}

// Enough for n numbers, or for the GPU.
inline int num_blocks(int64_t n) {
  const int64_t most = kBlocks * eet::device_attribute(cudaDevAttrMultiProcessorCount);
  return int(std::min<int64_t>(most, std::max<int64_t>(1, (n + kThreads * kWidth - 1) / (kThreads * kWidth))));
}

template <typename Rule>
cudaError_t launch_update(void* weights, void* grads, void* moment_1, void* moment_2, void* master, const Update& update,
                          int dtype, int64_t n, int noise, int number, const Rule& rule, cudaStream_t stream) {
  return eet::by_type(dtype, [&](auto type) {
    using Type = decltype(type);
    const UpdateArgs<Type> a{static_cast<Type*>(weights),
                             static_cast<Type*>(grads),
                             {static_cast<float*>(moment_1), static_cast<float*>(moment_2)},
                             static_cast<float*>(master),
                             update,
                             n,
                             noise,
                             number};
    return eet::launch(update_kernel<Type, Rule>, {num_blocks(n), kThreads, 0, stream}, a, rule);
  });
}

inline Update update_of(const void* lr, const void* scale, const void* step, const void* skip) {
  const auto number = [](const void* p) { return static_cast<const float*>(p); };
  return {number(lr), number(scale), number(step), static_cast<const uint8_t*>(skip)};
}

constexpr int kSummers = 512;

// Over a block, for its first thread; in the same order every time.
__device__ inline float block_sum(float mine) {
  __shared__ float of_warp[kSummers / 32];
  mine = eet::warp_sum(mine);
  if (threadIdx.x % 32 == 0) of_warp[threadIdx.x / 32] = mine;
  __syncthreads();
  return threadIdx.x < 32 ? eet::warp_sum(threadIdx.x < kSummers / 32 ? of_warp[threadIdx.x] : 0.f) : 0.f;
}

// Why      the norm of all gradients is needed before the first weight can be updated by clipped ones
// Mapping  the first launch: a block has a share of the numbers, and writes one sum; the second: one block adds those
// Traffic  reads n numbers
// Needs    a buffer that begins at a multiple of 16 bytes; any n
// Numerics fp32, in an order that depends on n and the number of blocks alone; a number that is not finite stays so
// Source   a reduction in two launches, as in Harris 2007, Optimizing Parallel Reduction in CUDA
template <typename T>
__global__ void __launch_bounds__(kSummers) squares_kernel(float* sums, const T* x, int64_t n) {
  constexpr int kVec = eet::kVec<T>;
  const int64_t first = int64_t(blockIdx.x) * kSummers + threadIdx.x, all = int64_t(gridDim.x) * kSummers;
  const int64_t num_vectors = n / kVec, behind = num_vectors * kVec + first;
  float sum[kVec] = {};
#pragma unroll 4
  for (int64_t i = first; i < num_vectors; i += all) {
    float number[kVec];
    eet::unpack<T>(eet::load_once(x + i * kVec), number);
#pragma unroll
    for (int k = 0; k < kVec; ++k) sum[k] = fmaf(number[k], number[k], sum[k]);
  }
#pragma unroll
  for (int k = 1; k < kVec; ++k) sum[0] += sum[k];
  if (behind < n) sum[0] += eet::to_float(x[behind]) * eet::to_float(x[behind]);
  const float total = block_sum(sum[0]);
  if (threadIdx.x == 0) sums[blockIdx.x] = total;
}

__global__ void __launch_bounds__(kSummers) root_kernel(float* root, const float* sums, int count) {
  float sum = 0;
  for (int i = threadIdx.x; i < count; i += kSummers) sum += sums[i];
  const float total = block_sum(sum);
  if (threadIdx.x == 0) *root = sqrtf(total);
}

}  // namespace

// `noise` is what a seed is mixed to, for bf16 weights that are rounded at random; -1: weights are rounded to the nearest.
extern "C" cudaError_t eet_adamw(void* weights, void* grads, void* exp_avg, void* exp_avg_sq, void* master,
                                 const void* lr, const void* scale, const void* step, const void* skip, int dtype,
                                 int64_t n, float beta1, float beta2, float eps, float weight_decay, int noise,
                                 int number, cudaStream_t stream) {
  const AdamW rule{beta1, beta2, float(std::log(double(beta1))), float(std::log(double(beta2))), eps, weight_decay};
  return launch_update(weights, grads, exp_avg, exp_avg_sq, master, update_of(lr, scale, step, skip), dtype, n, noise,
                       number, rule, stream);
}

// `momentum_buffer` null: there is no momentum.
extern "C" cudaError_t eet_sgd(void* weights, void* grads, void* momentum_buffer, void* master, const void* lr,
                               const void* scale, const void* step, const void* skip, int dtype, int64_t n,
                               float momentum, float weight_decay, int nesterov, int noise, int number,
                               cudaStream_t stream) {
  const auto launch = [&](auto rule) {
    return launch_update(weights, grads, momentum_buffer, nullptr, master, update_of(lr, scale, step, skip), dtype, n,
                         noise, number, rule, stream);
  };
  return momentum_buffer ? launch(SGD<1>{momentum, weight_decay, nesterov != 0})
                         : launch(SGD<0>{momentum, weight_decay, nesterov != 0});
}

// The sum of squares of each of `num_blocks` parts.
extern "C" cudaError_t eet_squares(void* sums, const void* x, int dtype, int64_t n, int num_blocks,
                                   cudaStream_t stream) {
  return eet::by_type(dtype, [&](auto type) {
    using Type = decltype(type);
    return eet::launch(squares_kernel<Type>, {num_blocks, kSummers, 0, stream}, static_cast<float*>(sums),
                       static_cast<const Type*>(x), n);
  });
}

// The root of the sum of these.
extern "C" cudaError_t eet_root(void* root, const void* sums, int count, cudaStream_t stream) {
  return eet::launch(root_kernel, {1, kSummers, 0, stream}, static_cast<float*>(root), static_cast<const float*>(sums),
                     count);
}
