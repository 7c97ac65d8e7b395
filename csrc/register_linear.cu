// Linear layers of up to eight tokens, in 16 bits: weights stream through shared memory, once, and activations lie in
// registers. T tokens, N outputs, K inputs.
#include "eet/cluster.cuh"
#include "eet/dependent.cuh"
#include "eet/launch.cuh"
#include "eet/register_norm.cuh"
#include "eet/register_product.cuh"
#include "eet/vector_product.cuh"

namespace {

constexpr int kWarps = 8;      // that multiply; one more fills the ring
constexpr int kReaders = 32 * kWarps;
// Barriers. 1: all warps have stored their partial sums. 2: loads of the bias and the norm are issued; the filler waits
// for it before it asks for weights, which they would wait behind (LOG).
constexpr int kAdded = 1, kRequested = 2;
constexpr int kEach = 2, kMostOutputs = 32 * kEach;  // outputs of a token that a lane finishes, and its warp
// A block has 288 threads. This many, twice, leave each 80 registers: of a quarter of the multiprocessor three of its
// warps take 7,680 of 16,384 registers, and two of attention's warps find room beside them.
constexpr int kBounds = 384;

template <typename T>
using RegisterArgs = eet::RegisterArgs<T, kWarps>;
template <typename T>
using RegisterNorm = eet::RegisterNorm<T, kWarps>;
template <typename T, bool kNormed>
using RegisterProducts = eet::RegisterProducts<T, kWarps, kNormed>;

// Between two blocks that divide the inputs of their outputs: block 0 finishes tokens 0, 2, .., block 1 the others.
struct Mail {
  uint64_t* counter;
  float* sums;  // [tokens,stride], of the tokens that this block finishes
  int stride, num_tokens, rank;

  // `home`: RegisterArgs::mail_bytes() of shared memory.
  template <typename T>
  __device__ Mail(const RegisterArgs<T>& a, char* home, int rank)
      : counter(reinterpret_cast<uint64_t*>(home)),
        sums(reinterpret_cast<float*>(counter + 1)),
        stride(a.sums),
        num_tokens((a.num_tokens + 1 - rank) / 2),
        rank(rank) {}

  __device__ void open(int num_outputs) const {
    eet::open_mailbox(counter, num_tokens * num_outputs * int(sizeof(float)));
  }
  __device__ bool is_for(int token) const { return token % 2 == rank; }
  __device__ float* of(int token) const { return sums + token / 2 * stride; }
  __device__ uint32_t of_other(int token) const { return eet::at_block(of(token), rank ^ 1); }
  __device__ uint32_t others_counter() const { return eet::at_block(counter, rank ^ 1); }
};

// Why      for eight tokens activations and their norm are as much as several stages of weights, and what is copied to
//          shared memory, normalized there and read again takes longer than the products
// Mapping  a block a multiprocessor, each with an equal share of the outputs, or where activations are many a cluster of
//          two, each with half of the inputs, so that they are read half as often; one warp keeps a ring of stages filled,
//          from before the kernel ahead has ended; a stage is 5 to 8 outputs, and each of 8 warps has an eighth of its
//          inputs: it loads those of all tokens into registers, and normalizes them there
// Traffic  N*K weights once, T*K activations a block, or half where two divide them (from L2), T*N out; 100 KiB on their
//          way a multiprocessor
// Needs    K a multiple of 8, and at most 1792 with a norm; at most 8 tokens, and 64 outputs a block; to divide inputs
//          sm_90, K a multiple of 16 and no norm
// Numerics tensor cores; fp32 sums; norm, bias, activation, residual in fp32, rounded once
// Source   ours; the fragments as in vector_linear.cu
template <typename T, bool kNormed, bool kDivided>
__global__ void __launch_bounds__(kBounds, eet::kResident)
    register_linear_kernel(const __grid_constant__ RegisterArgs<T> a) {
  extern __shared__ __align__(128) uint4 shared[];  // the copy engine fills whole lines sooner
  eet::let_next_begin();
  float* partial = reinterpret_cast<float*>(shared);
  char* home = reinterpret_cast<char*>(shared) + a.sums_bytes();
  char* stages = home + (kNormed ? a.norm_bytes() : kDivided ? a.mail_bytes() : 0);
  const int stage_bytes = a.tile * a.stage_stride;
  const eet::Ring ring{stages, reinterpret_cast<uint64_t*>(stages + a.num_stages * stage_bytes), a.num_stages,
                       stage_bytes};
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int rank = kDivided ? blockIdx.x % 2 : 0, begin = kDivided ? rank * a.part() : 0;
  const eet::Share share(a, 1, kDivided ? blockIdx.x / 2 : blockIdx.x);
  const Mail mail(a, home, rank);

  if (threadIdx.x == kReaders) {
    ring.init(kWarps);
    if (kDivided) mail.open(share.end - share.begin);
  }
  __syncthreads();
  if (kDivided) eet::cluster_arrive();
  if (warp == kWarps) {
    if (kDivided && eet::kWaitsTogether) eet::cluster_wait();
    eet::barrier(kRequested, kReaders + 32);
    eet::WeightStream stream(ring, a.stage_stride, a.at_once, a.num_stages);
    const int part = kDivided ? a.part() : a.K;
    stream.add(eet::InOrder(), a.weight + begin, a.N, a.K, part, share.begin, share.end, a.tile, a.steps);
    __syncwarp();
    if (kDivided && !eet::kWaitsTogether) eet::cluster_wait();
    return;
  }
  // A warp has the outputs of one token.
  const bool finishes = !kDivided || mail.is_for(warp);
  eet::Outputs<T, T, kEach> outputs(a, finishes ? warp : a.num_tokens, share, 32);
  outputs.request_bias(share.begin + lane);
  const RegisterNorm<T> norm(a.norm, a.K, home);
  if (kNormed) norm.request();
  eet::arrive_at_barrier(kRequested, kReaders + 32);
  const RegisterProducts<T, kNormed> products(a, ring, partial, begin);
  if (kDivided && eet::kWaitsTogether) eet::cluster_wait();
  products.multiply(norm, share, outputs.place(share.begin + lane), [&] { outputs.request_residual(share.begin + lane); });

  eet::barrier(kAdded, kReaders);
  const float* from = partial + warp * a.sums + lane;
  const auto sum = [&] {
    float part[kWarps], sum = 0;
#pragma unroll
    for (int j = 0; j < kWarps; ++j) part[j] = from[j * a.num_tokens * a.sums];
#pragma unroll
    for (float one : part) sum += one;
    return sum;
  };
  if (kDivided) {
    if (!eet::kWaitsTogether) eet::cluster_wait();
    if (!finishes) {
      uint32_t to = mail.of_other(warp) + lane * sizeof(float);
#pragma unroll 1
      for (int n = share.begin + lane; warp < a.num_tokens && n < share.end; n += 32) {
        eet::send(to, sum(), mail.others_counter());
        from += 32, to += 32 * sizeof(float);
      }
      return;
    }
    eet::wait_for_mail(mail.counter);
  }
  const float* others = mail.of(warp) + lane;
#pragma unroll 1  // short code is fetched sooner
  for (int n = share.begin + lane; outputs.has(n); n += 32, from += 32, others += 32, outputs.move_on()) {
    outputs.finish(kDivided ? sum() + *others : sum(), n);
  }
}

// Whether Python's plan (eet_lab/ops/cuda/plan.py) has room for what a block keeps in `shared_bytes`.
template <typename T>
bool is_sane(const RegisterArgs<T>& a, int shared_bytes) {
  const int most = a.norm.weight ? eet::kNormChunks : a.steps.num == 1 ? eet::kMostChunks : eet::kAheadChunks;
  if (a.divided && (a.norm.weight || a.K % 16)) return false;
  if (a.steps.num > (a.norm.weight ? 1 : eet::ceil_div(a.part(), eet::kChunk))) return false;
  if (a.steps.most_chunks() > kWarps * most) return false;
  if (a.tile < 1 || a.tile > eet::kStageRows || a.num_tiles != eet::ceil_div(a.most_outputs(), a.tile)) return false;
  if (a.at_once < 1) return false;
  if (!eet::holds_steps(a.steps, sizeof(T), a.stage_stride, shared_bytes)) return false;
  const int others = a.sums_bytes() + a.norm_bytes() + a.mail_bytes();
  return eet::Ring::fits(a.num_stages, a.tile * a.stage_stride, shared_bytes - others);
}

template <typename T>
cudaError_t launch_register_linear(const RegisterArgs<T>& a, int shared_bytes, int num_blocks, bool dependent,
                                   cudaStream_t stream) {
  if (!is_sane(a, shared_bytes)) return cudaErrorInvalidValue;
  const auto kernel = a.norm.weight   ? register_linear_kernel<T, true, false>
                      : a.divided     ? register_linear_kernel<T, false, true>
                                      : register_linear_kernel<T, false, false>;
  const int cluster = a.divided ? 2 : 1;
  return eet::launch(kernel, {dim3(num_blocks * cluster), kReaders + 32, shared_bytes, stream, cluster, dependent}, a);
}

}  // namespace

// out = act(norm(x) weight^T + bias) + residual, for at most eight tokens. `divided`, which needs sm_90: by `num_blocks`
// clusters of two blocks, each with half of the inputs. `at_once`: stages that are asked for at a time, until the ring is
// full for the first time.
extern "C" cudaError_t eet_register_linear(void* out, const void* x, const void* weight, const void* bias,
                                           const void* residual, const void* norm_weight, const void* norm_bias,
                                           int dtype, int T, int N, int K, int act, float eps, int num_blocks,
                                           int divided, int num_steps, int tile, int stage_stride, int num_stages,
                                           int at_once, int num_tiles, int shared_bytes, int dependent,
                                           cudaStream_t stream) {
  if (T < 1 || T > eet::kRegisterTokens || !eet::can_count(T, N)) return cudaErrorInvalidValue;
  if (num_blocks < 1 || num_blocks > N) return cudaErrorInvalidValue;
  if (divided && eet::device_attribute(cudaDevAttrComputeCapabilityMajor) < 9) return cudaErrorInvalidValue;
  if (num_steps < 1 || eet::ceil_div(N, num_blocks) > kMostOutputs) return cudaErrorInvalidValue;
  return eet::by_half_type(dtype, [&](auto type) {
    using Type = decltype(type);
    RegisterArgs<Type> a(out, nullptr, x, nullptr, weight, bias, residual, norm_weight, norm_bias, T, N, K, act,
                               eps, num_blocks);
    a.divided = divided, a.steps = eet::cut_inputs(a.part(), num_steps), a.stage_stride = stage_stride;
    a.num_stages = num_stages, a.at_once = at_once;
    a.set_tiles(tile, num_tiles);
    return launch_register_linear<Type>(a, shared_bytes, num_blocks, dependent, stream);
  });
}
