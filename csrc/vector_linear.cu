// Linear layers of one to four tokens, in 16 bits: weights stream through shared memory, once. T tokens, N outputs,
// K inputs.
#include "eet/dependent.cuh"
#include "eet/launch.cuh"
#include "eet/vector_product.cuh"

namespace {

constexpr int kLogWarps = 3, kWarps = 1 << kLogWarps;  // that multiply; one more fills the ring
constexpr int kReaders = 32 * kWarps;
constexpr int kBounds = 384;  // two blocks of so many threads leave each 80 registers, as in register_linear.cu

template <typename T>
using Products = eet::StageProducts<T, kWarps>;

template <typename T>
struct VectorArgs : eet::LinearArgs<T, T> {
  using eet::LinearArgs<T, T>::LinearArgs;
  int log_tokens, stride;     // room for tokens, as a power of two; of a token in shared memory
  eet::Steps steps;           // that cut the inputs
  int tile, stage_stride;     // outputs of a stage; bytes between them
  int num_stages, num_tiles;  // in the ring; tiles between two reductions

  __host__ __device__ int sums() const { return Products<T>::sums(this->num_tokens); }
};

// Why      a decode step reads every weight once for one token: the time is the bytes over the bandwidth, and what
//          passes between the wait for the kernel ahead and the last store
// Mapping  a block a multiprocessor, each with an equal share of the outputs; one warp keeps a ring of stages filled,
//          from before the kernel ahead has ended; a stage is 5 to 8 outputs, and each of 8 warps has an eighth of its
//          inputs, whose activations it keeps in registers; the sums of all stages meet in shared memory
// Traffic  N*K weights once, T*K activations a block (from L2), T*N out; 100 KiB on their way a multiprocessor
// Needs    K a multiple of 8, T <= 4, T*K activations and 2*K of a norm in shared memory
// Numerics tensor cores; fp32 sums; norm, bias, activation, residual in fp32, rounded once
// Source   fragments read as they lie in memory: after Frantar et al. 2024, MARLIN, without its quantization
template <typename T, typename Choice>
__global__ void __launch_bounds__(kBounds, eet::kResident)
    vector_linear_kernel(const __grid_constant__ VectorArgs<T> a, const Choice choice) {
  extern __shared__ __align__(128) uint4 shared[];  // stages at odd places take much longer (LOG)
  eet::let_next_begin();
  float* partial = reinterpret_cast<float*>(shared);
  T* rows = reinterpret_cast<T*>(partial + a.num_tiles * a.steps.num * a.sums());
  T* norms = rows + a.num_tokens * a.stride;
  char* stages = reinterpret_cast<char*>(norms + (a.norm.weight ? 2 * a.K : 0));
  const int stage_bytes = a.tile * a.stage_stride;
  const eet::Ring ring{stages, reinterpret_cast<uint64_t*>(stages + a.num_stages * stage_bytes), a.num_stages,
                       stage_bytes};
  const int warp = threadIdx.x / 32;
  const eet::Share share(a, Choice::kGated ? 2 : 1);

  // The thread's output, and what is added to it: on its way before it is needed.
  const int group = kReaders >> a.log_tokens, token = threadIdx.x / group, output = threadIdx.x % group;
  eet::Outputs<T, T, 1, Choice> outputs(a, token, share, 0, choice);
  eet::RowStager<kWarps, T, eet::kVectorTokens, true> stager(a.num_tokens, kLogWarps - a.log_tokens, a.K, a.stride,
                                                             a.norm, norms);

  if (warp < kWarps) {  // ahead of the weights, which these few bytes would wait behind (LOG)
    outputs.request_bias(share.begin + output);
    stager.request_norm();
  } else if (threadIdx.x == kReaders) {
    ring.init(kWarps);
  }
  __syncthreads();
  if (warp == kWarps) {
    eet::WeightStream stream(ring, a.stage_stride);
    for (int first = share.begin; first < share.end; first += a.num_tiles * a.tile) {
      stream.add(choice, a.weight, a.N, a.K, first, min(first + a.num_tiles * a.tile, share.end), a.tile, a.steps);
    }
    return;
  }
  const int its_tile = output / a.tile, its_row = output - its_tile * a.tile;
  const float* its_sums = partial + its_tile * a.steps.num * a.sums() + (its_row * a.num_tokens + token) * kWarps;
  Products<T> products(ring, a.tile, a.stage_stride, a.num_tokens);
  const uint32_t activations = products.activations(rows, a.stride);
  const int batch = a.num_tiles * a.tile;
  eet::wait_for_previous(activations);
  stager.stage(rows, a.x, a.at);
  choice.prepare(a.num_tokens);
  eet::barrier(1, kReaders);
  outputs.request_residual(share.begin + output);

#pragma unroll 1
  for (int first = share.begin; first < share.end; first += batch) {
    const int last = min(first + batch, share.end);
    products.multiply(activations, a.K, a.steps, last - first, a.tile, partial);

    eet::barrier(1, kReaders);
    const int n = first + output;
    const auto sum = [&] { return Products<T>::total(its_sums, a.steps.num, a.sums()); };
    outputs.finish(outputs.has(n) && n < last, sum, n);
    if (last == share.end) break;
    outputs.request(n + batch);
    eet::barrier(1, kReaders);
  }
  uint64_t* scratch = reinterpret_cast<uint64_t*>(shared);
  if (!Choice::kGated && a.best) eet::leave_best(outputs.best, a.best, a.num_tokens, group, kReaders, scratch);
}

// Whether Python's plan (eet_lab/ops/cuda/plan.py) has room for what a block keeps in `shared_bytes`.
template <typename T>
bool is_sane(const VectorArgs<T>& a, int shared_bytes) {
  const int chunks = eet::ceil_div(a.K, eet::kChunk), stride = chunks * eet::kChunk;
  if (a.steps.num < 1 || a.steps.num > chunks || a.steps.most_chunks() > kWarps * eet::kMostChunks) return false;
  if (a.tile < 1 || a.tile > eet::kStageRows || a.tile % a.unit) return false;
  if (a.num_tiles < 1 || a.num_tiles > (kReaders >> a.log_tokens) / a.tile) return false;
  if (!eet::holds_steps(a.steps, sizeof(T), a.stage_stride, shared_bytes)) return false;
  if (a.stride < stride || a.stride > shared_bytes || a.stride % 8) return false;
  const int x_bytes = (a.num_tokens * a.stride + (a.norm.weight ? 2 * a.K : 0)) * int(sizeof(T));
  const int others = a.num_tiles * a.steps.num * a.sums() * int(sizeof(float)) + x_bytes;
  return eet::Ring::fits(a.num_stages, a.tile * a.stage_stride, shared_bytes - others);
}

template <typename T>
cudaError_t launch_vector_linear(const VectorArgs<T>& a, int shared_bytes, eet::WithNoise noise, int num_blocks,
                                 bool dependent, cudaStream_t stream) {
  if (!is_sane(a, shared_bytes)) return cudaErrorInvalidValue;
  const eet::Launch how{dim3(num_blocks), kReaders + 32, shared_bytes, stream, 1, dependent};
  if (a.unit == 2) return eet::launch(vector_linear_kernel<T, eet::Gated>, how, a, eet::Gated{});
  return noise.exists() ? eet::launch(vector_linear_kernel<T, eet::WithNoise>, how, a, noise)
                        : eet::launch(vector_linear_kernel<T, eet::Largest>, how, a, eet::Largest{});
}

}  // namespace

// out = act(norm(x) weight^T + bias) + residual, for at most four tokens; `best` gets each block's largest of a token,
// or with `noise` the one that is drawn where its temperature [T] is above 0. `gated`: weights are N/2 gates and N/2 that
// they let through, act(gate) times which goes to out [T,N/2].
extern "C" cudaError_t eet_vector_linear(void* out, void* best, const void* x, const int64_t* rows, const void* weight,
                                         const void* bias, const void* residual, const void* norm_weight,
                                         const void* norm_bias, const int64_t* positions, const int64_t* noise,
                                         const float* temperature, int dtype, int T, int N, int K, int act, int gated,
                                         float eps, int num_blocks, int stride, int num_steps, int tile,
                                         int stage_stride, int num_stages, int num_tiles, int shared_bytes,
                                         int dependent, cudaStream_t stream) {
  if (T < 1 || T > eet::kVectorTokens || !eet::can_count(T, N)) return cudaErrorInvalidValue;
  if (num_blocks < 1 || num_blocks > N) return cudaErrorInvalidValue;
  if (num_steps < 1 || !eet::can_pair(gated, N, best, residual)) return cudaErrorInvalidValue;
  const eet::WithNoise drawn{{noise, temperature, positions, rows}};
  return eet::by_half_type(dtype, [&](auto type) {
    using Type = decltype(type);
    VectorArgs<Type> a(out, best, x, rows, weight, bias, residual, norm_weight, norm_bias, T, N, K, act, eps, num_blocks);
    if (gated) a.pair(num_blocks);
    a.log_tokens = T > 2 ? 2 : T - 1, a.stride = stride;
    a.steps = eet::cut_inputs(K, num_steps), a.tile = tile, a.stage_stride = stage_stride;
    a.num_stages = num_stages, a.num_tiles = num_tiles;
    return launch_vector_linear<Type>(a, shared_bytes, drawn, num_blocks, dependent, stream);
  });
}
