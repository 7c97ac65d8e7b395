// What follows cuBLAS in a linear layer that is trained, forward and backward: bias, activation, dropout, residual.
// T tokens, F channels of what comes out, N of what goes in: F, or 2F where the activation is gated.
#include "eet/column_sums.cuh"
#include "eet/drop.cuh"
#include "eet/launch.cuh"
#include "eet/slope.cuh"
#include "eet/vec.cuh"

namespace {

constexpr int kWarps = 8;  // of a block, each of which has a row
constexpr int kAhead = 2;  // rows that are asked for together

template <typename T>
struct Arguments {
  T* out;             // [T,F]
  const T* y;         // [T,N]
  const T* bias;      // [N] or null
  const T* residual;  // [T,F] or null
  eet::Drop drop;
  int act, num_tokens, F;
};

template <typename T>
struct BackwardArguments {
  T* dy;           // [T,N] or null: it is dout
  float* partial;  // [R,N] or null: nobody wants the bias's gradient
  const T* dout;   // [T,F]
  const T* y;      // [T,N]; not read where there is no activation
  const T* bias;   // [N] or null
  eet::Drop drop;
  int act, num_tokens, F;
};

// A block's channels, 32 vectors, and the rows that it walks down: every (R * kWarps)th.
template <typename T>
struct Strip {
  static constexpr int kVec = eet::kVec<T>, kWidth = 32 * kVec;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int c = blockIdx.x * kWidth + lane * kVec, first = blockIdx.y * kWarps + warp, step = gridDim.y * kWarps;
};

template <typename T>
__device__ inline void add_bias(float (&x)[eet::kVec<T>], const T* bias, int c) {
  if (!bias) return;
  float b[eet::kVec<T>];
  eet::unpack<T>(eet::load_constant(bias + c), b);
#pragma unroll
  for (int i = 0; i < eet::kVec<T>; ++i) x[i] += b[i];
}

// Why      PyTorch takes a launch for each part, and keeps the activated numbers and a mask for the backward pass
// Mapping  a block 32 vectors wide walks down the rows, a warp a row, two rows on their way: grid F / 32 vectors x R
// Traffic  reads T*N (and the residual's T*F), writes T*F
// Needs    F a multiple of a vector
// Numerics fp32, rounded once
// Source   LightSeq2 (Wang et al. 2022): all that lies between two products is one launch
template <typename T, bool kGated>
__global__ void __launch_bounds__(32 * kWarps) epilogue_kernel(const Arguments<T> a) {
  constexpr int kVec = eet::kVec<T>;
  constexpr bool kPrecise = sizeof(T) == 4;
  const Strip<T> at;
  const int N = kGated ? 2 * a.F : a.F, c = at.c;
  if (c >= a.F) return;
#pragma unroll 1
  for (int begin = at.first; begin < a.num_tokens; begin += at.step * kAhead) {
    uint4 y[kAhead], value[kAhead], residual[kAhead];
#pragma unroll
    for (int i = 0; i < kAhead; ++i) {
      const int64_t t = begin + i * at.step;
      if (t >= a.num_tokens) continue;
      y[i] = eet::load_constant(a.y + t * N + c);
      if (kGated) value[i] = eet::load_constant(a.y + t * N + a.F + c);
      if (a.residual) residual[i] = eet::load_constant(a.residual + t * a.F + c);
    }
#pragma unroll
    for (int i = 0; i < kAhead; ++i) {
      const int64_t t = begin + i * at.step;
      if (t >= a.num_tokens) continue;
      float x[kVec], other[kVec];
      eet::unpack<T>(y[i], x);
      add_bias(x, a.bias, c);
      eet::each_activated<kPrecise>(x, a.act, [&](int k, eet::Activated of) { x[k] = of.value; });
      if (kGated) {
        eet::unpack<T>(value[i], other);
        add_bias(other, a.bias, a.F + c);
#pragma unroll
        for (int k = 0; k < kVec; ++k) x[k] *= other[k];
      }
      a.drop.apply(x, a.drop.row(t), c);
      if (a.residual) {
        eet::unpack<T>(residual[i], other);
#pragma unroll
        for (int k = 0; k < kVec; ++k) x[k] += other[k];
      }
      eet::store(a.out + t * a.F + c, eet::pack<T>(x));
    }
  }
}

// Adds up what the block's warps have summed of each column, and leaves it in the block's row.
template <typename T>
__device__ inline void leave_sums(float* partial, int N, int c, int width, const float (&sum)[eet::kVec<T>]) {
  using Its = Strip<T>;
  __shared__ float sums[kWarps][Its::kWidth];
  __syncthreads();
#pragma unroll
  for (int k = 0; k < Its::kVec; ++k) sums[threadIdx.x / 32][threadIdx.x % 32 * Its::kVec + k] = sum[k];
  __syncthreads();
  const int column = threadIdx.x;
  if (column >= width) return;
  float total = 0.f;
#pragma unroll
  for (int warp = 0; warp < kWarps; ++warp) total += sums[warp][column];
  partial[int64_t(blockIdx.y) * N + c + column] = total;
}

// Why      in PyTorch the gradient goes through memory once for each part, and once more for the bias's sum
// Mapping  as forward; a thread keeps its columns' sums in registers, and a block leaves a row of them
// Traffic  reads T*(F + N), or T*F without an activation; writes T*N, or nothing where the gradient stays as it is
// Needs    F a multiple of a vector
// Numerics fp32; the activation is computed again; what is dropped is drawn again; sums are of unrounded numbers
// Source   LightSeq2 (Wang et al. 2022), whose column sums are in the same kernel too
template <typename T, bool kGated>
__global__ void __launch_bounds__(32 * kWarps) epilogue_backward_kernel(const BackwardArguments<T> a) {
  constexpr int kVec = eet::kVec<T>;
  constexpr bool kPrecise = sizeof(T) == 4;
  const Strip<T> at;
  const int N = kGated ? 2 * a.F : a.F, c = at.c, end = c < a.F ? a.num_tokens : 0;
  float sum[kVec] = {}, sum_of_values[kVec] = {};
#pragma unroll 1
  for (int begin = at.first; begin < end; begin += at.step * kAhead) {
    uint4 dout[kAhead], y[kAhead], value[kAhead];
#pragma unroll
    for (int i = 0; i < kAhead; ++i) {
      const int64_t t = begin + i * at.step;
      if (t >= end) continue;
      dout[i] = eet::load_constant(a.dout + t * a.F + c);
      if (a.act) y[i] = eet::load_constant(a.y + t * N + c);
      if (kGated) value[i] = eet::load_constant(a.y + t * N + a.F + c);
    }
#pragma unroll
    for (int i = 0; i < kAhead; ++i) {
      const int64_t t = begin + i * at.step;
      if (t >= end) continue;
      float grad[kVec];
      eet::unpack<T>(dout[i], grad);
      a.drop.apply(grad, a.drop.row(t), c);
      if (a.act) {
        float x[kVec], other[kVec];
        eet::unpack<T>(y[i], x);
        add_bias(x, a.bias, c);
        if (kGated) {
          eet::unpack<T>(value[i], other);
          add_bias(other, a.bias, a.F + c);
        }
        eet::each_activated<kPrecise>(x, a.act, [&](int k, eet::Activated of) {
          const float whole = grad[k];
          grad[k] = whole * of.slope;
          if (kGated) {
            grad[k] *= other[k];
            other[k] = whole * of.value;
          }
        });
        if (kGated) {
#pragma unroll
          for (int k = 0; k < kVec; ++k) sum_of_values[k] += other[k];
          eet::store(a.dy + t * N + a.F + c, eet::pack<T>(other));
        }
      }
#pragma unroll
      for (int k = 0; k < kVec; ++k) sum[k] += grad[k];
      if (a.dy) eet::store(a.dy + t * N + c, eet::pack<T>(grad));
    }
  }
  if (!a.partial) return;
  const int first = blockIdx.x * Strip<T>::kWidth, width = min(Strip<T>::kWidth, a.F - first);
  leave_sums<T>(a.partial, N, first, width, sum);
  if (kGated) leave_sums<T>(a.partial, N, a.F + first, width, sum_of_values);
}

template <typename T>
dim3 strips(int F, int R) {
  return dim3(eet::ceil_div(F, Strip<T>::kWidth), R);
}

}  // namespace

// out = drop(act(y + bias)) + residual; gated: drop(act(first half) * second half). R blocks share the rows.
extern "C" cudaError_t eet_train_epilogue(void* out, const void* y, const void* bias, const void* residual,
                                          const int64_t* drop_tokens, int drop_call, int drop_below, float drop_scale,
                                          int act, int gated, int dtype, int T, int F, int R, cudaStream_t stream) {
  return eet::by_type(dtype, [&](auto type) {
    using Type = decltype(type);
    const auto in = [](const void* p) { return static_cast<const Type*>(p); };
    const eet::Drop drop{drop_tokens, drop_call, uint32_t(drop_below), drop_scale};
    const Arguments<Type> a{static_cast<Type*>(out), in(y), in(bias), in(residual), drop, act, T, F};
    const auto kernel = gated ? epilogue_kernel<Type, true> : epilogue_kernel<Type, false>;
    return eet::launch(kernel, {strips<Type>(F, R), 32 * kWarps, 0, stream}, a);
  });
}

// From dout: dy, and the bias's gradient by way of `partial` [R,N]. No `dbias`: nobody wants it. No `dy`: it is dout.
extern "C" cudaError_t eet_train_epilogue_backward(void* dy, void* dbias, float* partial, const void* dout,
                                                   const void* y, const void* bias, const int64_t* drop_tokens,
                                                   int drop_call, int drop_below, float drop_scale, int act, int gated,
                                                   int dtype, int T, int F, int R, cudaStream_t stream) {
  return eet::by_type(dtype, [&](auto type) {
    using Type = decltype(type);
    const auto in = [](const void* p) { return static_cast<const Type*>(p); };
    const eet::Drop drop{drop_tokens, drop_call, uint32_t(drop_below), drop_scale};
    const BackwardArguments<Type> a{static_cast<Type*>(dy), dbias ? partial : nullptr, in(dout), in(y), in(bias),
                                    drop, act, T, F};
    const auto kernel = gated ? epilogue_backward_kernel<Type, true> : epilogue_backward_kernel<Type, false>;
    if (cudaError_t error = eet::launch(kernel, {strips<Type>(F, R), 32 * kWarps, 0, stream}, a)) return error;
    const eet::ColumnSums<Type> sums{{static_cast<Type*>(dbias), nullptr}, partial, R, gated ? 2 * F : F};
    return eet::sum_columns(sums, stream);
  });
}
