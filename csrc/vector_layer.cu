// What lies between two layers' attention, in one launch: output projection, feed-forward network, and the next layer's
// queries, keys and values. For one or two tokens in 16 bits. T tokens, A channels of what attention gave, C channels,
// F channels inside, N outputs, K inputs.
#include <algorithm>

#include "eet/dependent.cuh"
#include "eet/exchange.cuh"
#include "eet/launch.cuh"
#include "eet/vector_product.cuh"

namespace {

constexpr int kMostPhases = 4, kMostTokens = 2;
constexpr int kLogWarps = 3, kWarps = 1 << kLogWarps;  // that multiply; one more fills the ring
constexpr int kReaders = 32 * kWarps;
constexpr int kInFlight = 48 * 1024;  // bytes that keep the memory busy: its rate times its latency, and more

template <typename T>
using Products = eet::StageProducts<T, kWarps>;
template <typename T>
using Stager = eet::RowStager<kWarps, T, kMostTokens, true>;

// Gated or InOrder.
struct EitherOrder {
  static constexpr bool kInOrder = false;
  bool gated;
  __device__ int row(int n, int N) const { return gated ? eet::Gated::row(n, N) : n; }
};

// Of phase p. A kernel for layers without gates knows that there is nothing to ask: 0.4 us a layer (LOG).
template <bool kGated>
__device__ auto order_of(int p) {
  if constexpr (kGated) {
    return EitherOrder{p == 1};
  } else {
    return eet::InOrder();
  }
}

// One of the linears. Its inputs come from the phase before, its outputs go to the next, or to `out`, or to both.
template <typename T>
struct Phase : eet::LinearArgs<T, T> {
  int from = 0, to = 0;  // where in the exchange, in numbers; -1: not there
  int stride = 0;        // of a token in shared memory
  int tile = 0;          // outputs of a stage
  eet::Steps steps{};    // that cut the inputs

  int tiles() const { return eet::ceil_div(this->most_outputs(), tile); }
};

template <typename T>
struct LayerArgs {
  Phase<T> phase[kMostPhases];
  int num_phases, num_tokens;
  int log_team, log_group = 0;  // powers of two: warps that share a token's norm; outputs that a block has of a token
  eet::Exchange exchange;
  int stage_rows, stage_stride, stage_bytes, num_stages;  // of the ring
  int partial_floats, row_numbers, norm_numbers;          // that lie before it
};

// Why      between two kernels the memory is idle: the last block ends, its results are written, the next one asks for
//          its inputs. Here one ring of weights goes on through four linears, and hides what they wait for
// Mapping  a block a multiprocessor, each with an equal share of every linear's outputs; one warp fills the ring, from
//          before the kernel ahead has ended, and eight multiply; outputs go to all blocks through L2 and tell by
//          themselves that they have arrived (exchange.cuh)
// Traffic  every weight once; from L2 a block reads T * (A + 2C + F) activations; 200 KiB a multiprocessor hold what comes
//          next, 48 of them on their way at a time: what is exchanged waits behind them
// Needs    all blocks at once on the device: they wait for each other. Each has a multiprocessor, and what may hold it
//          back are kernels launched before, which end by themselves
// Numerics as vector_linear.cu
// Source   a persistent kernel with a continuous stream of weights: "Look Ma, No Bubbles!" (Hazy Research, 2025); data
//          that is its own flag: NCCL's LL protocol
template <typename T, bool kGated>
__global__ void __launch_bounds__(kReaders + 32, 1) vector_layer_kernel(const __grid_constant__ LayerArgs<T> a) {
  extern __shared__ __align__(128) uint4 shared[];  // stages at odd places take much longer (LOG)
  eet::let_next_begin();
  float* partial = reinterpret_cast<float*>(shared);
  T* rows = reinterpret_cast<T*>(partial + a.partial_floats);
  T* norms = rows + a.row_numbers;
  char* stages = reinterpret_cast<char*>(norms + a.norm_numbers);
  const eet::Ring ring{stages, reinterpret_cast<uint64_t*>(stages + a.num_stages * a.stage_bytes), a.num_stages,
                       a.stage_bytes};
  const int warp = threadIdx.x / 32;

  if (threadIdx.x == kReaders) ring.init(kWarps);
  __syncthreads();
  if (warp == kWarps) {
    eet::WeightStream stream(ring, a.stage_stride, max(2, kInFlight / a.stage_bytes), INT_MAX);
    for (int p = 0; p < a.num_phases; ++p) {
      const Phase<T>& f = a.phase[p];
      const eet::Share share(f, kGated && p == 1 ? 2 : 1);
      stream.add(order_of<kGated>(p), f.weight, f.N, f.K, share.begin, share.end, f.tile, f.steps);
    }
    return;
  }
  // The thread's output, of a token, for a copy of the exchange.
  const int copies = a.exchange.copies, output = threadIdx.x & ((1 << a.log_group) - 1);
  const int job = threadIdx.x >> a.log_group, copy = job / a.num_tokens, token = job - copy * a.num_tokens;
  Products<T> products(ring, a.stage_rows, a.stage_stride, a.num_tokens);
  T *to_home = nullptr, *from_home = nullptr;  // of this kernel's half of the exchange: where it sends and receives
  unsigned turns = 0;

#pragma unroll 1
  for (int p = 0; p < a.num_phases; ++p) {
    // All that does not depend on x, while it is waited for.
    const Phase<T>& f = a.phase[p];
    const auto order = order_of<kGated>(p);
    const eet::Share share(f, kGated && p == 1 ? 2 : 1);
    const int num_outputs = share.end - share.begin, n = share.begin + output;
    eet::Outputs<T, T, 1, decltype(order)> outputs(f, token, share, 0, order);
    outputs.request_bias(n);
    Stager<T> stager(a.num_tokens, a.log_team, f.K, f.stride, f.norm, norms);
    if (p + 1 < a.num_phases && !f.norm.weight) {  // the next norm's weights take the place of the one before
      const Phase<T>& next = a.phase[p + 1];
      Stager<T>(a.num_tokens, a.log_team, next.K, next.stride, next.norm, norms).request_norm();
    }
    const int its_tile = output / f.tile, sums = Products<T>::sums(a.num_tokens);
    const float* its_sums = partial + its_tile * f.steps.num * sums +
                            ((output - its_tile * f.tile) * a.num_tokens + token) * kWarps;
    if (p == 0) {
      eet::wait_for_previous();
      turns = a.exchange.turns_so_far();
    }
    outputs.request_residual(n);
    stager.template stage<true>(rows, f.from < 0 ? f.x : from_home + f.from, nullptr, f.from >= 0);
    eet::barrier(1, kReaders);

    products.multiply(products.activations(rows, f.stride), f.K, f.steps, num_outputs, f.tile, partial);
    if (p == 0) {
      T* half = reinterpret_cast<T*>(a.exchange.half(turns));
      to_home = half + copy * a.exchange.size, from_home = half + blockIdx.x % copies * a.exchange.size;
    }

    eet::barrier(1, kReaders);
    const bool has = n < share.end && copy < copies;
    if (kGated && p == 1) {
      const T value = outputs.gated(has ? Products<T>::total(its_sums, f.steps.num, sums) : 0.f);
      if (has && n % 2 == 0) eet::send(to_home + f.to + token * (f.N / 2) + n / 2, value);
    } else if (has) {
      const T value = outputs.value(Products<T>::total(its_sums, f.steps.num, sums));
      if (f.to >= 0) eet::send(to_home + f.to + token * f.N + n, value);
      if (f.out && copy == 0) f.out[token * int64_t(f.N) + n] = value;
    }
    if (p == 0) a.exchange.clear(turns + 1, threadIdx.x, kReaders);
  }
  if (blockIdx.x == 0 && threadIdx.x == 0) a.exchange.turn(turns);
}

// What Python plans of shared memory (eet_lab/ops/cuda/layer.py): chunks of a stage's inputs, and its outputs, at most.
struct Plan {
  int most_chunks, most_rows, num_stages, shared_bytes;
};

// Cuts the stages, all of equal size, and says whether all that a block keeps has room.
template <typename T>
bool take_plan(LayerArgs<T>& a, const Plan& plan) {
  if (plan.most_chunks < 1 || plan.most_chunks > kWarps * eet::kMostChunks) return false;
  if (plan.most_rows < 1 || plan.most_rows > eet::kStageRows) return false;
  const int C = a.phase[1].K, sums = Products<T>::sums(a.num_tokens);
  a.stage_stride = eet::odd_stride(plan.most_chunks * eet::kChunk * int(sizeof(T)));
  a.log_team = kLogWarps + 1 - a.num_tokens;
  a.stage_rows = a.row_numbers = a.partial_floats = 0, a.norm_numbers = 2 * C;
  for (int p = 0; p < a.num_phases; ++p) {
    Phase<T>& f = a.phase[p];
    while (1 << a.log_group < f.most_outputs()) ++a.log_group;
    f.stride = eet::odd_stride(f.K * int(sizeof(T))) / int(sizeof(T));
    f.steps = eet::cut_inputs(f.K, eet::ceil_div(eet::ceil_div(f.K, eet::kChunk), plan.most_chunks));
    f.tile = eet::ceil_div(f.most_outputs(), eet::ceil_div(f.most_outputs(), plan.most_rows));
    a.stage_rows = max(a.stage_rows, f.tile);
    a.row_numbers = max(a.row_numbers, a.num_tokens * f.stride);
    a.partial_floats = max(a.partial_floats, f.tiles() * f.steps.num * sums);
  }
  if (kReaders >> a.log_group < a.num_tokens * a.exchange.copies) return false;
  a.stage_bytes = a.stage_rows * a.stage_stride, a.num_stages = plan.num_stages;
  const int others = a.partial_floats * int(sizeof(float)) + (a.row_numbers + a.norm_numbers) * int(sizeof(T));
  return eet::Ring::fits(plan.num_stages, a.stage_bytes, plan.shared_bytes - others);
}

template <typename T>
cudaError_t launch_vector_layer(LayerArgs<T> a, const Plan& plan, int num_blocks, bool dependent, cudaStream_t stream) {
  if (!take_plan(a, plan)) return cudaErrorInvalidValue;
  const auto kernel = a.phase[1].unit == 2 ? vector_layer_kernel<T, true> : vector_layer_kernel<T, false>;
  return eet::launch(kernel, {dim3(num_blocks), kReaders + 32, plan.shared_bytes, stream, 1, dependent}, a);
}

}  // namespace

// x += attended proj^T + bias; x += act(norm_2(x) fc_1^T + bias) fc_2^T + bias; qkv = next_norm(x) next_qkv^T + bias.
// `gated`: fc_1 has F gates and F outputs that they let through, and act(gate) times those is what fc_2 gets.
// `exchange` [2 * copies * T * (2C + F)] with all bits 1 and `turns` [1] with 0, as they are at first: the same for
// every launch of these sizes. No more blocks than there are multiprocessors, since all wait for each other, nor than
// the larger of C and F: who sends nothing is not waited for, and would be late. Each of `linears` is weight, bias,
// norm's weight and bias; the last may have no weight: then no qkv.
extern "C" cudaError_t eet_vector_layer(void* x, void* qkv, const void* attended, void* exchange, unsigned* turns,
                                        int copies, const void* const* linears, int dtype, int T, int A, int C, int F,
                                        int N, int act, int gated, float eps_2, float next_eps, int num_blocks,
                                        int most_chunks, int most_rows, int num_stages, int shared_bytes, int dependent,
                                        cudaStream_t stream) {
  const int most_blocks = std::min(std::max(C, F), eet::device_attribute(cudaDevAttrMultiProcessorCount));
  if (T < 1 || T > kMostTokens || copies < 1 || num_blocks < 1 || num_blocks > most_blocks) return cudaErrorInvalidValue;
  const Plan plan{most_chunks, most_rows, num_stages, shared_bytes};
  return eet::by_half_type(dtype, [&](auto type) {
    using Type = decltype(type);
    const auto phase = [&](int i, void* out, const void* in, const void* residual, int outputs, int inputs, int act,
                           float eps, int from, int to) {
      const void* const* w = linears + 4 * i;
      return Phase<Type>{{out, nullptr, in, nullptr, w[0], w[1], residual, w[2], w[3], T, outputs, inputs, act, eps,
                          num_blocks},
                         from, to};
    };
    const int last = linears[12] ? T * (C + F) : -1;
    LayerArgs<Type> a{{phase(0, x, attended, x, C, A, eet::kNone, 0.f, -1, 0),
                       phase(1, nullptr, nullptr, nullptr, gated ? 2 * F : F, C, act, eps_2, 0, T * C),
                       phase(2, x, nullptr, x, C, F, eet::kNone, 0.f, T * C, last),
                       phase(3, qkv, nullptr, nullptr, N, C, eet::kNone, next_eps, last, -1)},
                      linears[12] ? 4 : 3,
                      T,
                      0,
                      0,
                      {static_cast<uint16_t*>(exchange), turns, T * (2 * C + F), copies}};
    if (gated) a.phase[1].pair(num_blocks);
    return launch_vector_layer(a, plan, num_blocks, dependent, stream);
  });
}
