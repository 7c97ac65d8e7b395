// Layer norm and RMS norm in a launch of their own: the first one where norm_linear takes two. T tokens, C channels.
#include "eet/dependent.cuh"
#include "eet/launch.cuh"
#include "eet/norm.cuh"
#include "eet/rows.cuh"

namespace {

constexpr int kFew = 64;  // tokens of wgmma_linear, at most
// How many blocks of 512 threads shall fit on a multiprocessor: four limit a thread to 32 registers.
#if __CUDA_ARCH__ == 900
constexpr int kFewResident = 4;
#else
constexpr int kFewResident = 1;
#endif

template <typename T>
struct NormArgs {
  T* out;               // [T,C]
  float *mean, *scale;  // [T] what a backward pass needs, or null
  const T* x;           // [T,C]
  eet::Norm<T> norm;
  int num_tokens, C, log_team;
};

// Why      a prefill's rows are too many to be normalized inside the matrix product that reads them
// Mapping  a team of 1 to 16 warps has X rows, which stay in its registers: grid T / X teams
// Traffic  reads C and writes C numbers a row; weight and bias come from L2, once for X rows
// Needs    C a multiple of 8; X 1, 2 or 4
// Numerics two-pass mean and variance in fp32; the result is rounded once
// Source   Ba et al. 2016, Layer Normalization; Zhang and Sennrich 2019, Root Mean Square Layer Normalization; X rows at
//          a time after Fang et al. 2021, TurboTransformers
template <typename T, int X>
__global__ void __launch_bounds__(32 << eet::kMaxLogTeam) norm_kernel(const NormArgs<T> a) {
  __shared__ float scratch[2][1 << eet::kMaxLogTeam][X];
  constexpr int kVec = eet::kVec<T>;
  using Rows = eet::Rows<T, kVec, X>;
  eet::let_next_begin();
  if (blockIdx.x == 0) {
    eet::prefetch(a.norm.weight, a.C);
    if (a.norm.bias) eet::prefetch(a.norm.bias, a.C);
  }
  eet::wait_for_previous();
  Rows rows(a.out, a.x, a.num_tokens, a.C, a.log_team);

  float mean[X] = {}, scale[X] = {};
  if (a.norm.bias) {
    rows.each([&](int, const typename Rows::Pieces& x) {
#pragma unroll
      for (int i = 0; i < X; ++i) {
#pragma unroll
        for (int k = 0; k < kVec; ++k) mean[i] += eet::to_float(x[i].number[k]);
      }
    });
    eet::combine_team<eet::Sum>(mean, a.log_team, scratch[0]);
#pragma unroll
    for (int i = 0; i < X; ++i) mean[i] /= a.C;
  }
  rows.each([&](int, const typename Rows::Pieces& x) {
#pragma unroll
    for (int i = 0; i < X; ++i) {
#pragma unroll
      for (int k = 0; k < kVec; ++k) {
        const float deviation = eet::to_float(x[i].number[k]) - mean[i];
        scale[i] += deviation * deviation;
      }
    }
  });
  eet::combine_team<eet::Sum>(scale, a.log_team, scratch[1]);
#pragma unroll
  for (int i = 0; i < X; ++i) scale[i] = rsqrtf(scale[i] / a.C + a.norm.eps);
  rows.keep(a.mean, mean);
  rows.keep(a.scale, scale);

  rows.each([&](int c, const typename Rows::Pieces& x) {
    float weight[kVec], bias[kVec] = {}, y[kVec];
    eet::unpack<T>(eet::load_constant(a.norm.weight + c), weight);
    if (a.norm.bias) eet::unpack<T>(eet::load_constant(a.norm.bias + c), bias);
#pragma unroll
    for (int i = 0; i < X; ++i) {
#pragma unroll
      for (int k = 0; k < kVec; ++k) {
        y[k] = (eet::to_float(x[i].number[k]) - mean[i]) * scale[i] * weight[k] + bias[k];
      }
      rows.write(c, i, y);
    }
  });
}

// Why      norms between products of some tens of tokens (wgmma_linear.cu), whose blocks fill the multiprocessors: a block
//          that found no room beside two of them would take the place of the next product's (LOG). Up to 2,048 channels
//          in 16 bits find it
// Mapping  a block has a row, and a thread a vector of it; weight and bias are loaded before the wait for the row: grid T
// Traffic  reads C and writes C numbers a row; weight and bias come from L2, once for each row
// Needs    C a multiple of a vector, of at most 512 vectors
// Numerics, Source as above
template <typename T>
__global__ void __launch_bounds__(32 << eet::kMaxLogTeam, kFewResident) norm_of_few_kernel(const NormArgs<T> a) {
  __shared__ float scratch[2][1 << eet::kMaxLogTeam][1];
  constexpr int kVec = eet::kVec<T>, kWords = 4, kOfWord = kVec / kWords;
  using Word = T[kOfWord];
  eet::let_next_begin();
  const int c = threadIdx.x * kVec;
  const bool has = c < a.C;
  uint4 x = eet::zeros(), weight = x, bias = x;
  if (has) weight = eet::load_constant(a.norm.weight + c);
  if (has && a.norm.bias) bias = eet::load_constant(a.norm.bias + c);
  const float share = 1.f / a.C;
  eet::wait_for_previous();
  if (has) x = eet::load(a.x + int64_t(blockIdx.x) * a.C + c);
  // Calls visit(numbers, i) for the vector's words. As floats all of them would take more registers.
  const auto each = [&](auto visit) {
    eet::keep_packed(x);
#pragma unroll
    for (int i = 0; i < kWords; ++i) visit(reinterpret_cast<const Word(&)[kWords]>(x)[i], i);
  };

  float mean[1] = {}, scale[1] = {};
  if (a.norm.bias) {
    each([&](const Word& numbers, int) {
      for (const T& number : numbers) mean[0] += eet::to_float(number);
    });
    eet::combine_team<eet::Sum>(mean, a.log_team, scratch[0]);
    mean[0] *= share;
  }
  each([&](const Word& numbers, int) {
    for (const T& number : numbers) {
      const float deviation = eet::to_float(number) - mean[0];
      scale[0] += deviation * deviation;
    }
  });
  if (!has) scale[0] = 0;
  eet::combine_team<eet::Sum>(scale, a.log_team, scratch[1]);
  scale[0] = rsqrtf(fmaf(scale[0], share, a.norm.eps));
  if (threadIdx.x == 0 && a.mean) a.mean[blockIdx.x] = mean[0];
  if (threadIdx.x == 0 && a.scale) a.scale[blockIdx.x] = scale[0];

  eet::keep_packed(weight), eet::keep_packed(bias);
  uint4 out;
  each([&](const Word& numbers, int i) {
    const Word& w = reinterpret_cast<const Word(&)[kWords]>(weight)[i];
    const Word& b = reinterpret_cast<const Word(&)[kWords]>(bias)[i];
    Word& y = reinterpret_cast<Word(&)[kWords]>(out)[i];
#pragma unroll
    for (int k = 0; k < kOfWord; ++k) {
      y[k] = eet::from_float<T>((eet::to_float(numbers[k]) - mean[0]) * scale[0] * eet::to_float(w[k]) + eet::to_float(b[k]));
    }
  });
  if (has) eet::store(a.out + int64_t(blockIdx.x) * a.C + c, out);
}

}  // namespace

// `norm_bias` null: an RMS norm. X rows are reduced at a time. `mean` and `scale` [T], or null: see train_norm.cu.
extern "C" cudaError_t eet_norm(void* out, float* mean, float* scale, const void* x, const void* norm_weight,
                                const void* norm_bias, int dtype, int T, int C, int X, float eps, int dependent,
                                cudaStream_t stream) {
  return eet::by_type(dtype, [&](auto type) {
    using Type = decltype(type);
    const auto in = [](const void* p) { return static_cast<const Type*>(p); };
    constexpr int kVec = eet::kVec<Type>;
    const eet::Norm<Type> norm{in(norm_weight), in(norm_bias), eps};
    NormArgs<Type> a{static_cast<Type*>(out), mean, scale, in(x), norm, T, C, 0};
    if (T <= kFew && X == 1 && C <= kVec << (5 + eet::kMaxLogTeam)) {
      while (kVec << (5 + a.log_team) < C) ++a.log_team;
      return eet::launch(norm_of_few_kernel<Type>, {T, 32 << a.log_team, 0, stream, 1, dependent != 0}, a);
    }
    return eet::by_rows(X, [&](auto num_rows) {
      constexpr int kRows = decltype(num_rows)::value;
      const auto grid = eet::rows_grid(T, C, kVec, kRows, eet::Rows<Type, kVec, kRows>::kHeld);
      a.log_team = grid.log_team;
      return eet::launch(norm_kernel<Type, kRows>, {grid.blocks, grid.threads, 0, stream, 1, dependent != 0}, a);
    });
  });
}
