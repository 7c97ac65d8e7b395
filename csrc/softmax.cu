// Softmax of many rows. T rows, C numbers a row.
#include "eet/dependent.cuh"
#include "eet/launch.cuh"
#include "eet/reduce.cuh"
#include "eet/rows.cuh"

namespace {

template <typename T>
struct SoftmaxArgs {
  T* out;      // [T,C]
  const T* x;  // [T,C]
  int num_rows, C, log_team;
};

// Why      what attention that keeps its scores spends beside its matrix products: an op to call and to time, which no
//          technique puts into a step, since the attention kernels keep no scores
// Mapping  a team of 1 to 16 warps has X rows, which stay in its registers: grid T / X teams
// Traffic  reads C and writes C numbers a row
// Needs    nothing of C; rows that are no whole number of 16-byte vectors go number by number. X 1, 2 or 4
// Numerics maximum and sum in fp32; the result is rounded once
// Source   Fang et al. 2021, TurboTransformers: X rows at a time
template <typename T, int kWidth, int X>
__global__ void __launch_bounds__(32 << eet::kMaxLogTeam) softmax_kernel(const SoftmaxArgs<T> a) {
  __shared__ float scratch[2][1 << eet::kMaxLogTeam][X];
  using Rows = eet::Rows<T, kWidth, X>;
  eet::wait_for_previous();
  eet::let_next_begin();
  Rows rows(a.out, a.x, a.num_rows, a.C, a.log_team);

  float max[X], sum[X] = {};
#pragma unroll
  for (int i = 0; i < X; ++i) max[i] = -INFINITY;
  rows.each([&](int, const typename Rows::Pieces& x) {
#pragma unroll
    for (int i = 0; i < X; ++i) {
#pragma unroll
      for (int k = 0; k < kWidth; ++k) max[i] = fmaxf(max[i], eet::to_float(x[i].number[k]));
    }
  });
  eet::combine_team<eet::Max>(max, a.log_team, scratch[0]);
  rows.each([&](int, const typename Rows::Pieces& x) {
#pragma unroll
    for (int i = 0; i < X; ++i) {
#pragma unroll
      for (int k = 0; k < kWidth; ++k) sum[i] += eet::exp_of(eet::to_float(x[i].number[k]) - max[i]);
    }
  });
  eet::combine_team<eet::Sum>(sum, a.log_team, scratch[1]);
#pragma unroll
  for (int i = 0; i < X; ++i) sum[i] = 1.f / sum[i];

  rows.each([&](int c, const typename Rows::Pieces& x) {
#pragma unroll
    for (int i = 0; i < X; ++i) {
      float y[kWidth];
#pragma unroll
      for (int k = 0; k < kWidth; ++k) y[k] = eet::exp_of(eet::to_float(x[i].number[k]) - max[i]) * sum[i];
      rows.write(c, i, y);
    }
  });
}

template <typename T, int kWidth, int X>
cudaError_t launch_softmax(SoftmaxArgs<T> a, bool dependent, cudaStream_t stream) {
  const auto grid = eet::rows_grid(a.num_rows, a.C, kWidth, X, eet::Rows<T, kWidth, X>::kHeld);
  a.log_team = grid.log_team;
  return eet::launch(softmax_kernel<T, kWidth, X>, {grid.blocks, grid.threads, 0, stream, 1, dependent}, a);
}

}  // namespace

// X rows are reduced at a time.
extern "C" cudaError_t eet_softmax(void* out, const void* x, int dtype, int T, int C, int X, int dependent,
                                   cudaStream_t stream) {
  return eet::by_type(dtype, [&](auto type) {
    using Type = decltype(type);
    return eet::by_rows(X, [&](auto num_rows) {
      constexpr int kRows = decltype(num_rows)::value, kVec = eet::kVec<Type>;
      const SoftmaxArgs<Type> a{static_cast<Type*>(out), static_cast<const Type*>(x), T, C, 0};
      return C % kVec ? launch_softmax<Type, 1, kRows>(a, dependent != 0, stream)
                      : launch_softmax<Type, kVec, kRows>(a, dependent != 0, stream);
    });
  });
}
