// Linear layers of few tokens with int8 weights, which stream through shared memory as they are. T tokens, N outputs,
// K inputs, G groups of inputs with a scale each.
#include "eet/dependent.cuh"
#include "eet/int8_product.cuh"
#include "eet/launch.cuh"
#include "eet/linear_tiles.cuh"

namespace {

using eet::kInt8Chunk;

template <typename T>
struct Int8Args : eet::TileArgs<T, int8_t> {
  using eet::TileArgs<T, int8_t>::TileArgs;
  const float* scale;  // [N,G]
  int G, log_inputs;   // inputs that share a scale, where there are groups
};

// The scales of a warp's weights: one for each output, which multiplies its whole sum, or one for each group of inputs,
// of which those of the warp's next chunk are on their way while another one is waited for and multiplied.
template <bool kGrouped>
class Scales {
 public:
  template <typename T>
  __device__ explicit Scales(const Int8Args<T>& a) : scale(a.scale), G(a.G), log_inputs(a.log_inputs) {}

  __device__ float whole(int n, bool exists) const { return exists && !kGrouped ? scale[n] : 1.f; }

  // Of two outputs' inputs from `k` on.
  __device__ void request(int64_t low, int64_t high, int k) {
    if (kGrouped) next = make_float2(scale[low * G + (k >> log_inputs)], scale[high * G + (k >> log_inputs)]);
  }
  __device__ float2 requested() const { return next; }

 private:
  const float* scale;
  int G, log_inputs;
  float2 next = make_float2(1.f, 1.f);
};

// Why      a decode step waits for the bytes of the weights: these are half as many as in 16 bits
// Mapping  as linear_kernel: a block a multiprocessor, with an equal share of the outputs; one warp keeps a ring of
//          weights filled, from before the kernel ahead has ended; the others split the inputs of 16 outputs at a time,
//          widen the weights in registers, and add up in shared memory
// Traffic  N*K bytes of weights and 4*N*G of scales once, T*K activations a block (from L2), T*N out
// Needs    K a multiple of 16, T <= 16, T*K activations in shared memory; groups of a power of two, at least 64 inputs
// Numerics whole numbers times activations, exactly; fp32 sums; a scale multiplies its group's sum; the rest in fp32
// Source   Frantar et al. 2024, MARLIN, for widening next to the tensor cores
template <typename T, int kTokens, bool kGrouped>
__global__ void __launch_bounds__(eet::kReaders<kTokens> + 32, 1) int8_linear_kernel(const Int8Args<T> a) {
  extern __shared__ __align__(128) uint4 shared[];  // stages at odd places take much longer (LOG)
  eet::multiply_tiles<kTokens, eet::Int8Product<T, kTokens, kGrouped>, Scales<kGrouped>>(a, shared);
}

template <int kTokens, bool kGrouped, typename T>
cudaError_t launch_linear(Int8Args<T> a, const eet::TilePlan& plan, int num_blocks, bool dependent,
                          cudaStream_t stream) {
  if (!eet::take_plan<kTokens>(a, plan, kInt8Chunk, kInt8Chunk * int(sizeof(T)))) return cudaErrorInvalidValue;
  return eet::launch(int8_linear_kernel<T, kTokens, kGrouped>,
                     {dim3(num_blocks), eet::kReaders<kTokens> + 32, plan.shared_bytes, stream, 1, dependent}, a);
}

}  // namespace

// out = act(norm(x) (scale weight)^T + bias) + residual, for at most 16 tokens; `best` gets each block's largest.
extern "C" cudaError_t eet_int8_linear(void* out, void* best, const void* x, const int64_t* rows, const void* weight,
                                       const void* scale, const void* bias, const void* residual,
                                       const void* norm_weight, const void* norm_bias, int dtype, int T, int N, int K,
                                       int G, int log_inputs, int act, float eps, int num_blocks, int stride,
                                       int stage_rows, int stage_inputs, int num_stages, int shared_bytes,
                                       int dependent, cudaStream_t stream) {
  if (T < 1 || T > eet::kMaxTokens || !eet::can_count(T, N)) return cudaErrorInvalidValue;
  if (num_blocks < 1 || num_blocks > N) return cudaErrorInvalidValue;
  if (K % 16 || (G > 1 && 1 << log_inputs < kInt8Chunk)) return cudaErrorInvalidValue;
  const eet::TilePlan plan{stride, stage_rows, stage_inputs, num_stages, shared_bytes};
  return eet::by_type(dtype, [&](auto type) {
    using Type = decltype(type);
    Int8Args<Type> a(out, best, x, rows, weight, bias, residual, norm_weight, norm_bias, T, N, K, act, eps, num_blocks);
    a.scale = static_cast<const float*>(scale), a.G = G, a.log_inputs = log_inputs;
    // 16 warps are ahead of 8 for four to eight tokens, and with groups for all up to eight (LOG).
    if (G > 1) {
      return T <= 8 ? launch_linear<8, true>(a, plan, num_blocks, dependent, stream)
                    : launch_linear<16, true>(a, plan, num_blocks, dependent, stream);
    }
    return T <= 3   ? launch_linear<4, false>(a, plan, num_blocks, dependent, stream)
           : T <= 8 ? launch_linear<8, false>(a, plan, num_blocks, dependent, stream)
                    : launch_linear<16, false>(a, plan, num_blocks, dependent, stream);
  });
}
