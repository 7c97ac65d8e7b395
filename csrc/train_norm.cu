// The backward pass of layer norm and RMS norm. T tokens, C channels. Forward is norm.cu, which keeps mean and scale.
#include "eet/column_sums.cuh"
#include "eet/launch.cuh"
#include "eet/rows.cuh"
#include "eet/vec.cuh"

namespace {

constexpr int kChannels = 16;  // of a thread
constexpr int kMostWarps = 16;

template <typename T>
struct Arguments {
  T* dx;               // [T,C]
  float* partial;      // [2,blocks,C]  of the weight's gradient, then of the bias's
  const T *dy, *x;     // [T,C]
  const T* weight;     // [C]
  const float* mean;   // [T], or null: an RMS norm
  const float* scale;  // [T]  1 / standard deviation
  int num_tokens, C, log_team;
};

// A row as a thread holds it: what it was asked for, packed.
template <typename T>
struct Row {
  static constexpr int kVec = eet::kVec<T>, kPieces = kChannels / kVec;
  eet::Piece<T, kVec> dy[kPieces], x[kPieces];
  float mean = 0.f, scale = 0.f;

  __device__ void request(const Arguments<T>& a, int row, int first, int step) {
    if (row >= a.num_tokens) return;
#pragma unroll
    for (int i = 0; i < kPieces; ++i) {
      const int c = first + i * step;
      if (c >= a.C) continue;
      reinterpret_cast<uint4&>(dy[i]) = eet::load_once(a.dy + int64_t(row) * a.C + c);
      reinterpret_cast<uint4&>(x[i]) = eet::load_once(a.x + int64_t(row) * a.C + c);
    }
    if (a.mean) mean = a.mean[row];
    scale = a.scale[row];
  }

  // Both as floats, x normalized.
  __device__ void unpack(int i, float (&grad)[kVec], float (&normed)[kVec]) {
    eet::keep_packed(dy[i]);
    eet::keep_packed(x[i]);
#pragma unroll
    for (int k = 0; k < kVec; ++k) {
      grad[k] = eet::to_float(dy[i].number[k]);
      normed[k] = (eet::to_float(x[i].number[k]) - mean) * scale;
    }
  }
};

// Why      PyTorch's takes two kernels, which both read all rows, and leaves most of the GPU idle at 512 to 1,024 channels
// Mapping  a team of 1 to 16 warps walks down the rows, a thread has 16 channels of each: about two blocks a multiprocessor
// Traffic  reads 2*C and writes C numbers a row; the next row in 16 bits is on its way while one is reduced
// Needs    C a multiple of 8, at most 8,192
// Numerics fp32; x is normalized again from what forward kept, so a weight of 0 loses nothing; two independent sums a row;
//          columns are summed in registers, then over the block's teams, then over blocks, always in the same order
// Source   the two sums as in LightSeq2 (Wang et al. 2022); two stages for the columns as in Apex and Liger-Kernel
template <typename T>
__global__ void __launch_bounds__(32 * kMostWarps) norm_backward_kernel(const Arguments<T> a) {
  using Its = Row<T>;
  constexpr int kVec = Its::kVec, kPieces = Its::kPieces;
  constexpr bool kAhead = sizeof(T) == 2;  // in 32 bits two rows are more than a thread's registers
  extern __shared__ float4 shared[];
  __shared__ float2 scratch[2][kMostWarps];
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int team = warp >> a.log_team, teams = blockDim.x >> (5 + a.log_team), others = (1 << a.log_team) - 1;
  const int first = (threadIdx.x & ((32 << a.log_team) - 1)) * kVec, step = kVec << (5 + a.log_team);
  const int stride = gridDim.x * teams;
  int row = blockIdx.x * teams + team, parity = 0;

  eet::Piece<T, kVec> weight[kPieces];
  Its held;
  held.request(a, row, first, step);
#pragma unroll
  for (int i = 0; i < kPieces; ++i) {
    const int c = first + i * step;
    if (c < a.C) reinterpret_cast<uint4&>(weight[i]) = eet::load_constant(a.weight + c);
  }
  float of_weight[kPieces][kVec] = {}, of_bias[kPieces][kVec] = {};
#pragma unroll 1
  for (; row < a.num_tokens; row += stride, parity ^= 1) {
    Its next;
    if constexpr (kAhead) next.request(a, row + stride, first, step);
    float sum[2] = {};  // of the gradient of the normed row, and of its product with that
#pragma unroll
    for (int i = 0; i < kPieces; ++i) {
      if (first + i * step >= a.C) continue;
      float grad[kVec], normed[kVec];
      held.unpack(i, grad, normed);
      eet::keep_packed(weight[i]);
#pragma unroll
      for (int k = 0; k < kVec; ++k) {
        of_weight[i][k] += grad[k] * normed[k];
        of_bias[i][k] += grad[k];
        const float inner = grad[k] * eet::to_float(weight[i].number[k]);
        sum[0] += inner;
        sum[1] += inner * normed[k];
      }
    }
    eet::combine_lanes<eet::Sum>(sum, 32);
    if (a.log_team) {
      // Two halves take turns: who is a row ahead has passed this row's barrier, and nobody is two ahead.
      if (lane == 0) scratch[parity][warp] = {sum[0], sum[1]};
      eet::barrier(1 + team, 32 << a.log_team);
      const float2 part = scratch[parity][(warp & ~others) + (lane & others)];
      sum[0] = part.x, sum[1] = part.y;
      eet::combine_lanes<eet::Sum>(sum, 1 << a.log_team);
    }
    const float mean = a.mean ? sum[0] / a.C : 0.f, slope = sum[1] / a.C;
#pragma unroll
    for (int i = 0; i < kPieces; ++i) {
      const int c = first + i * step;
      if (c >= a.C) continue;
      float grad[kVec], normed[kVec];
      held.unpack(i, grad, normed);
      eet::keep_packed(weight[i]);
#pragma unroll
      for (int k = 0; k < kVec; ++k) {
        grad[k] = held.scale * (grad[k] * eet::to_float(weight[i].number[k]) - mean - normed[k] * slope);
      }
      eet::store(a.dx + int64_t(row) * a.C + c, eet::pack<T>(grad));
    }
    if constexpr (kAhead) {
      held = next;
    } else {
      held.request(a, row + stride, first, step);
    }
  }

  // The block's teams add up their columns one after the other, and it leaves a row of each sum.
  float4* const sums[2] = {shared, shared + a.C / 4};
  for (int turn = 0; turn < teams; ++turn) {
    if (turn == team) {
#pragma unroll
      for (int i = 0; i < kPieces; ++i) {
        const int c = first + i * step;
        if (c >= a.C) continue;
        const auto add = [&](float4* to, const float (&mine)[kVec]) {
#pragma unroll
          for (int k = 0; k < kVec; k += 4) {
            float4 so_far = turn ? to[(c + k) / 4] : float4{};
            so_far.x += mine[k], so_far.y += mine[k + 1], so_far.z += mine[k + 2], so_far.w += mine[k + 3];
            to[(c + k) / 4] = so_far;
          }
        };
        add(sums[0], of_weight[i]);
        add(sums[1], of_bias[i]);
      }
    }
    __syncthreads();
  }
  float4* const partial = reinterpret_cast<float4*>(a.partial);
  const int quads = a.C / 4;
  for (int i = threadIdx.x; i < quads; i += blockDim.x) {
    partial[blockIdx.x * quads + i] = sums[0][i];
    partial[(gridDim.x + blockIdx.x) * quads + i] = sums[1][i];
  }
}

}  // namespace

// `mean` null: an RMS norm. `dweight` [C] and `dbias` [C] by way of `partial` [2,num_blocks,C]; null: nobody wants it.
// Teams of 2^log_team warps; a block has `num_warps`.
extern "C" cudaError_t eet_norm_backward(void* dx, void* dweight, void* dbias, float* partial, const void* dy,
                                         const void* x, const void* norm_weight, const float* mean, const float* scale,
                                         int dtype, int T, int C, int log_team, int num_warps, int num_blocks,
                                         cudaStream_t stream) {
  if (C % 8 || kChannels * 32 << log_team < C || num_warps > kMostWarps) return cudaErrorInvalidValue;
  return eet::by_type(dtype, [&](auto type) {
    using Type = decltype(type);
    const auto in = [](const void* p) { return static_cast<const Type*>(p); };
    const Arguments<Type> a{static_cast<Type*>(dx), partial, in(dy), in(x), in(norm_weight), mean, scale,
                            T, C, log_team};
    const eet::Launch how{dim3(num_blocks), 32 * num_warps, 2 * C * int(sizeof(float)), stream};
    if (cudaError_t error = eet::launch(norm_backward_kernel<Type>, how, a)) return error;
    const eet::ColumnSums<Type> sums{{static_cast<Type*>(dweight), static_cast<Type*>(dbias)}, partial, num_blocks, C};
    return eet::sum_columns(sums, stream);
  });
}
