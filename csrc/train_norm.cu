// The backward pass of layer norm and RMS norm. T tokens, C channels. Forward is norm.cu, which keeps mean and scale.
#include "eet/column_sums.cuh"
#include "eet/dependent.cuh"
#include "eet/launch.cuh"
#include "eet/mma.cuh"
#include "eet/rows.cuh"
#include "eet/vec.cuh"

namespace {

constexpr int kChannels = 16;  // of a thread
constexpr int kRows = 6;       // of a team, all arrays counted: those of one that is reduced, and those on their way

template <typename T>
struct Arguments {
  T* dx;               // [T,C]
  float* partial;      // [2,blocks,C]  of the weight's gradient, then of the bias's
  const T *dy, *x;     // [T,C]
  const T* dresidual;  // [T,C]  of x as it goes on past the norm, or null
  const T* weight;     // [C]
  const float* mean;   // [T], or null: an RMS norm
  const float* scale;  // [T]  1 / standard deviation
  int num_tokens, C, log_team;
};

// What a thread has of the rows that it walks down: 16 channels of dy and x, of the weight and, where there is one, of
// the residual's gradient, in shared memory that no other thread reads. So a row is asked for ahead of time without a
// register, and without a barrier when it has arrived. Three arrays take the memory of two, and have one row fewer on its way.
template <typename T, int kWarps, bool kAdds>
class Ring {
 public:
  static constexpr int kVec = eet::kVec<T>, kPieces = kChannels / kVec, kThreads = 32 * kWarps;
  static constexpr int kArrays = kAdds ? 3 : 2, kStages = kRows / kArrays;
  static constexpr int kBytes = (kRows + 1) * kPieces * kThreads * sizeof(uint4);

  __device__ Ring(const Arguments<T>& a, uint4* shared) : a(a), mine(shared + threadIdx.x) {
    first = (threadIdx.x & ((32 << a.log_team) - 1)) * kVec;
    step = kVec << (5 + a.log_team);
  }

  // The channel at which piece i begins; those beyond C do not exist.
  __device__ int channel(int i) const { return first + i * step; }

  __device__ void request(int row, int stage) const {
#pragma unroll
    for (int i = 0; i < kPieces; ++i) {
      if (row >= a.num_tokens || channel(i) >= a.C) continue;
      const int64_t from = int64_t(row) * a.C + channel(i);
      eet::copy_async(place(stage, 0, i), a.dy + from, true);
      eet::copy_async(place(stage, 1, i), a.x + from, true);
      if constexpr (kAdds) eet::copy_async(place(stage, 2, i), a.dresidual + from, true);
    }
    eet::commit_copies();  // of nothing, too: groups are counted
  }

  // With the first row.
  __device__ void request_weight() const {
#pragma unroll
    for (int i = 0; i < kPieces; ++i) {
      if (channel(i) < a.C) eet::copy_async(place(kStages, 0, i), a.weight + channel(i), true);
    }
  }

  __device__ void read(int stage, int i, float (&grad)[kVec], float (&x)[kVec], float (&weight)[kVec]) const {
    eet::unpack<T>(*place(stage, 0, i), grad);
    eet::unpack<T>(*place(stage, 1, i), x);
    eet::unpack<T>(*place(kStages, 0, i), weight);
  }

  // Adds what the residual's gradient has there.
  __device__ void add(int stage, int i, float (&grad)[kVec]) const {
    if constexpr (kAdds) {
      float more[kVec];
      eet::unpack<T>(*place(stage, 2, i), more);
#pragma unroll
      for (int k = 0; k < kVec; ++k) grad[k] += more[k];
    }
  }

 private:
  __device__ uint4* place(int stage, int which, int i) const {
    return mine + ((stage * kArrays + which) * kPieces + i) * kThreads;
  }

  const Arguments<T>& a;
  uint4* mine;
  int first, step;
};

// Blocks that a multiprocessor holds; train_norm.py launches as many.
template <typename T, int kWarps>
constexpr int kBlocks = kWarps > 8 ? 1 : sizeof(T) == 2 ? 3 : 2;

// Why      PyTorch's takes two kernels that both read all rows, and leaves most of the GPU idle at 512 to 1,024 channels;
//          x of a pre-norm layer is a residual, too, and autograd adds the two gradients by a kernel of its own
// Mapping  a team of 1 to 16 warps walks down the rows, a thread has 16 channels of each: one wave of blocks
// Traffic  reads 2*C and writes C numbers a row; two rows of each team are on their way while one is reduced.
//          With a residual's gradient it reads 3*C, and one row is on its way
// Needs    C a multiple of 8, at most 8,192
// Numerics fp32; x is normalized again from what forward kept, so a weight of 0 loses nothing; two independent sums a row;
//          dx is rounded once, the residual's gradient added;
//          columns are summed in registers, then over the block's teams, then over blocks, always in the same order
// Source   the two sums as in LightSeq2 (Wang et al. 2022); two stages for the columns as in Apex and Liger-Kernel
template <typename T, int kWarps, bool kAdds>
__global__ void __launch_bounds__(32 * kWarps, kBlocks<T, kWarps>) norm_backward_kernel(const Arguments<T> a) {
  using Its = Ring<T, kWarps, kAdds>;
  constexpr int kVec = Its::kVec, kPieces = Its::kPieces, kStages = Its::kStages;
  extern __shared__ uint4 shared[];
  __shared__ float2 scratch[2][kWarps];
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int team = warp >> a.log_team, teams = kWarps >> a.log_team, others = (1 << a.log_team) - 1;
  const int stride = gridDim.x * teams;
  const Its ring(a, shared);
  int row = blockIdx.x * teams + team, stage = 0;
  ring.request_weight();
#pragma unroll
  for (int ahead = 0; ahead < kStages - 1; ++ahead) ring.request(row + ahead * stride, ahead);

  const auto of_row = [&](const float* numbers, int row) { return numbers && row < a.num_tokens ? numbers[row] : 0.f; };
  float mean = of_row(a.mean, row), scale = of_row(a.scale, row);
  float of_weight[kPieces][kVec] = {}, of_bias[kPieces][kVec] = {};
#pragma unroll 1
  for (int turn = 0; row < a.num_tokens; row += stride, turn ^= 1) {
    ring.request(row + (kStages - 1) * stride, stage ? stage - 1 : kStages - 1);
    const float next_mean = of_row(a.mean, row + stride), next_scale = of_row(a.scale, row + stride);
    eet::wait_for_copies<kStages - 1>();
    float sum[2] = {};  // of the gradient of the normed row, and of its product with that
#pragma unroll
    for (int i = 0; i < kPieces; ++i) {
      if (ring.channel(i) >= a.C) continue;
      float grad[kVec], x[kVec], w[kVec];
      ring.read(stage, i, grad, x, w);
#pragma unroll
      for (int k = 0; k < kVec; ++k) {
        const float product = grad[k] * ((x[k] - mean) * scale);
        of_weight[i][k] += product;
        of_bias[i][k] += grad[k];
        sum[0] += grad[k] * w[k];
        sum[1] += product * w[k];
      }
    }
    eet::combine_lanes<eet::Sum>(sum, 32);
    if (a.log_team) {
      // Two halves take turns: who is a row ahead has passed this row's barrier, and nobody is two ahead.
      if (lane == 0) scratch[turn][warp] = {sum[0], sum[1]};
      eet::barrier(1 + team, 32 << a.log_team);
      const float2 part = scratch[turn][(warp & ~others) + (lane & others)];
      sum[0] = part.x, sum[1] = part.y;
      eet::combine_lanes<eet::Sum>(sum, 1 << a.log_team);
    }
    // scale * (grad * w - mean of these - normed * slope), with what is the same for the row computed once.
    const float slope = -scale * scale * sum[1] / a.C, shift = a.mean ? -scale * sum[0] / a.C : 0.f;
#pragma unroll
    for (int i = 0; i < kPieces; ++i) {
      if (ring.channel(i) >= a.C) continue;
      float grad[kVec], x[kVec], w[kVec];
      ring.read(stage, i, grad, x, w);
#pragma unroll
      for (int k = 0; k < kVec; ++k) grad[k] = grad[k] * w[k] * scale + ((x[k] - mean) * slope + shift);
      ring.add(stage, i, grad);
      eet::store(a.dx + int64_t(row) * a.C + ring.channel(i), eet::pack<T>(grad));
    }
    mean = next_mean, scale = next_scale;
    if (++stage == kStages) stage = 0;
  }
  // Teams without a row in the block's last turn: racecheck holds warps of one block that passed as many barriers ordered.
  if (a.log_team && row - team < a.num_tokens) eet::barrier(1 + team, 32 << a.log_team);

  // The ring's memory is free now: the block adds up its teams' columns there, and leaves a row of each sum.
  eet::let_next_begin();
  eet::wait_for_copies<0>();
  __syncthreads();
  const int quads = a.C / 4;
  float4* const sums = reinterpret_cast<float4*>(shared);  // [2,teams,C]
#pragma unroll
  for (int i = 0; i < kPieces; ++i) {
    if (ring.channel(i) >= a.C) continue;
#pragma unroll
    for (int k = 0; k < kVec; k += 4) {
      float4* const to = sums + team * quads + (ring.channel(i) + k) / 4;
      to[0] = {of_weight[i][k], of_weight[i][k + 1], of_weight[i][k + 2], of_weight[i][k + 3]};
      to[teams * quads] = {of_bias[i][k], of_bias[i][k + 1], of_bias[i][k + 2], of_bias[i][k + 3]};
    }
  }
  __syncthreads();
  float4* const partial = reinterpret_cast<float4*>(a.partial);
  for (int i = threadIdx.x; i < 2 * quads; i += Its::kThreads) {
    const int which = i >= quads, column = i - which * quads;
    float4 total = {};
    for (int each = 0; each < teams; ++each) {
      const float4 one = sums[(which * teams + each) * quads + column];
      total.x += one.x, total.y += one.y, total.z += one.z, total.w += one.w;
    }
    partial[int64_t(which * gridDim.x + blockIdx.x) * quads + column] = total;
  }
}

template <typename T, int kWarps, bool kAdds>
cudaError_t launch(const Arguments<T>& a, int num_blocks, cudaStream_t stream) {
  const eet::Launch how{dim3(num_blocks), 32 * kWarps, Ring<T, kWarps, kAdds>::kBytes, stream};
  return eet::launch(norm_backward_kernel<T, kWarps, kAdds>, how, a);
}

template <typename T, bool kAdds>
cudaError_t launch(const Arguments<T>& a, int num_blocks, cudaStream_t stream) {
  return a.log_team > 3 ? launch<T, 16, kAdds>(a, num_blocks, stream) : launch<T, 8, kAdds>(a, num_blocks, stream);
}

}  // namespace

// `mean` null: an RMS norm. `dresidual` [T,C] is added to dx; null: nothing is.
// `dweight` [C] and `dbias` [C] by way of `partial` [2,num_blocks,C]; null: nobody wants it.
// Teams of 2^log_team warps, in blocks of 8; one of 16 warps is a block.
extern "C" cudaError_t eet_norm_backward(void* dx, void* dweight, void* dbias, float* partial, const void* dy,
                                         const void* x, const void* dresidual, const void* norm_weight,
                                         const float* mean, const float* scale, int dtype, int T, int C, int log_team,
                                         int num_blocks, cudaStream_t stream) {
  if (C % 8 || log_team > 4 || kChannels * 32 << log_team < C) return cudaErrorInvalidValue;
  return eet::by_type(dtype, [&](auto type) {
    using Type = decltype(type);
    const auto in = [](const void* p) { return static_cast<const Type*>(p); };
    const Arguments<Type> a{static_cast<Type*>(dx), partial, in(dy), in(x), in(dresidual), in(norm_weight), mean, scale,
                            T, C, log_team};
    const auto launched = dresidual ? launch<Type, true> : launch<Type, false>;
    if (cudaError_t error = launched(a, num_blocks, stream)) return error;
    const eet::ColumnSums<Type> sums{{static_cast<Type*>(dweight), static_cast<Type*>(dbias)}, partial, num_blocks, C};
    return eet::sum_columns(sums, stream);
  });
}
