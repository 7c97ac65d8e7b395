// What follows cuBLAS in an encoder's linear layers: bias, residual, and the norm behind them. T tokens, C channels.
#include "eet/dependent.cuh"
#include "eet/launch.cuh"
#include "eet/norm.cuh"
#include "eet/rows.cuh"

namespace {

constexpr int kHeld = 4;  // vectors of a row that a thread has in registers

template <typename T>
struct ResidualNormArgs {
  T* residual;    // [T,C]; the result is written over it
  const T* y;     // [T,C] or null
  const T* bias;  // [C] or null
  eet::Norm<T> norm;
  int num_tokens, C, log_team;
};

// Why      PyTorch takes two launches, and the sum goes through memory once more
// Mapping  a team of 1 to 16 warps has a row, which stays in its registers
// Traffic  reads 2*C and writes C numbers a row; bias and norm come from L2
// Needs    C a multiple of 8, at most 16,384 in 16 bits and 8,192 in 32
// Numerics the sum is not rounded; two-pass mean and variance in fp32; the result is rounded once
// Source   Ba et al. 2016, Layer Normalization; the fusion as in FasterTransformer's add_bias_input_layernorm
template <typename T>
__global__ void __launch_bounds__(32 << eet::kMaxLogTeam) residual_norm_kernel(const ResidualNormArgs<T> a) {
  __shared__ float scratch[2][1 << eet::kMaxLogTeam][1];
  constexpr int kVec = eet::kVec<T>;
  const int team = threadIdx.x >> (5 + a.log_team), teams = blockDim.x >> (5 + a.log_team);
  const int row = blockIdx.x * teams + team;
  const int64_t from = int64_t(min(row, a.num_tokens - 1)) * a.C;  // past the last row the last again, never written
  const int first = (threadIdx.x & ((32 << a.log_team) - 1)) * kVec, step = kVec << (5 + a.log_team);
  eet::wait_for_previous();
  eet::let_next_begin();

  float x[kHeld][kVec] = {}, mean[1] = {}, scale[1] = {};
#pragma unroll
  for (int i = 0; i < kHeld; ++i) {
    const int c = first + i * step;
    if (c >= a.C) continue;
    const auto add = [&](const T* part) {
      float number[kVec];
      eet::unpack<T>(eet::load(part), number);
#pragma unroll
      for (int k = 0; k < kVec; ++k) x[i][k] += number[k];
    };
    add(a.residual + from + c);
    if (a.y) add(a.y + from + c);
    if (a.bias) add(a.bias + c);
#pragma unroll
    for (float number : x[i]) mean[0] += number;
  }
  if (a.norm.bias) {
    eet::combine_team<eet::Sum>(mean, a.log_team, scratch[0]);
    mean[0] /= a.C;
  } else {
    mean[0] = 0.f;
  }
#pragma unroll
  for (int i = 0; i < kHeld; ++i) {
    if (first + i * step >= a.C) continue;
#pragma unroll
    for (float number : x[i]) scale[0] += (number - mean[0]) * (number - mean[0]);
  }
  eet::combine_team<eet::Sum>(scale, a.log_team, scratch[1]);
  scale[0] = rsqrtf(scale[0] / a.C + a.norm.eps);
  if (row >= a.num_tokens) return;
#pragma unroll
  for (int i = 0; i < kHeld; ++i) {
    const int c = first + i * step;
    if (c >= a.C) continue;
    float weight[kVec], bias[kVec] = {}, y[kVec];
    eet::unpack<T>(eet::load_constant(a.norm.weight + c), weight);
    if (a.norm.bias) eet::unpack<T>(eet::load_constant(a.norm.bias + c), bias);
#pragma unroll
    for (int k = 0; k < kVec; ++k) y[k] = (x[i][k] - mean[0]) * scale[0] * weight[k] + bias[k];
    eet::store(a.residual + from + c, eet::pack<T>(y));
  }
}

}  // namespace

// residual = norm(y + bias + residual); `norm_bias` null: an RMS norm.
extern "C" cudaError_t eet_residual_norm(void* residual, const void* y, const void* bias, const void* norm_weight,
                                         const void* norm_bias, int dtype, int T, int C, float eps, int dependent,
                                         cudaStream_t stream) {
  return eet::by_type(dtype, [&](auto type) {
    using Type = decltype(type);
    constexpr int kVec = eet::kVec<Type>;
    const auto in = [](const void* p) { return static_cast<const Type*>(p); };
    const auto grid = eet::rows_grid(T, C, kVec, 1, kHeld);
    if (C % kVec || kHeld * kVec << (5 + grid.log_team) < C) return cudaErrorInvalidValue;
    const ResidualNormArgs<Type> a{static_cast<Type*>(residual), in(y), in(bias), {in(norm_weight), in(norm_bias), eps},
                                   T, C, grid.log_team};
    return eet::launch(residual_norm_kernel<Type>, {grid.blocks, grid.threads, 0, stream, 1, dependent != 0}, a);
  });
}
