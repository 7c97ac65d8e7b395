// Linear layers of few tokens with int8 weights, which stream through shared memory as they are. T tokens, N outputs,
// K inputs, G groups of inputs with a scale each.
#include "eet/dependent.cuh"
#include "eet/int8_product.cuh"
#include "eet/launch.cuh"
#include "eet/linear_tiles.cuh"

namespace {

using eet::kChunk, eet::kTile;

template <typename T>
struct Int8Args : eet::TileArgs<T, int8_t> {
  using eet::TileArgs<T, int8_t>::TileArgs;
  const float* scale;  // [N,G]
  int G, log_inputs;   // inputs that share a scale, where there are groups
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
  constexpr int kReaders = eet::kReaders<kTokens>, kWarps = kReaders / 32, kTiles = eet::kTiles<kTokens>;
  constexpr int kGroup = kTiles * kTile;  // outputs between two reductions
  extern __shared__ __align__(128) uint4 shared[];  // stages at odd places take much longer (LOG)
  const eet::TileBlock<T, kTokens> block(a, shared);
  const int warp = threadIdx.x / 32;
  const eet::Share share(a);
  const int begin = share.begin, end = share.end;

  if (threadIdx.x == kReaders) block.ring.init(kWarps);
  __syncthreads();
  if (warp == kWarps) {
    eet::stream_weights(block.ring, a, share, kTile, a.stage_inputs, a.stage_stride());
    return;
  }
  const int token = threadIdx.x / kGroup, output = threadIdx.x % kGroup;
  eet::Outputs<T, int8_t> outputs(a, token, share);
  const auto scale_of = [&](int n) { return outputs.has(n) && !kGrouped ? a.scale[n] : 1.f; };
  float scale = scale_of(begin + output);
  outputs.request_bias(begin + output);
  eet::RowStager<kWarps, T, kTokens> stager(a.num_tokens, a.log_team, a.K, a.stride, a.norm,
                                            block.rows + a.num_tokens * a.stride);
  stager.request_norm();
  eet::let_next_begin();
  eet::wait_for_previous();
  outputs.request_residual(begin + output);
  stager.stage(block.rows, a.x, a.at);
  eet::barrier(1, kReaders);

  const int g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
  eet::RingPlace place;
  int chunk = 0;  // counts those of all stages, so that the warps have equally many
#pragma unroll 1
  for (int first = begin; first < end; first += kGroup) {
#pragma unroll 1
    for (int tile = 0; tile < kTiles && first + tile * kTile < end; ++tile) {
      const int num_rows = min(kTile, end - first - tile * kTile);
      eet::Int8Product<T, kTokens, kGrouped> part(block.rows, a.stride, a.num_tokens);
#pragma unroll 1
      for (int k = 0; k < a.K; k += a.stage_inputs, place.step(a.num_stages)) {
        // Past the last output and the last input the last is read again: there the activation is 0, and here nothing
        // is stored.
        const int num_inputs = min(a.stage_inputs, a.K - k), num_chunks = (num_inputs + kChunk - 1) / kChunk;
        // The scales of a warp's next chunk are on their way while this one is waited for and multiplied.
        float2 scales = make_float2(1.f, 1.f);
        const auto request = [&](int i) {
          if (!kGrouped || i >= num_chunks) return;
          const float* scale = a.scale + ((k + i * kChunk) >> a.log_inputs);
          const int64_t n = first + tile * kTile;
          scales = make_float2(scale[(n + min(g, num_rows - 1)) * a.G], scale[(n + min(g + 8, num_rows - 1)) * a.G]);
        };
        request((warp - chunk) & (kWarps - 1));
        const char* stage = block.ring.wait(place);
        const char *low = stage + min(g, num_rows - 1) * a.stage_stride();
        const char *high = stage + min(g + 8, num_rows - 1) * a.stage_stride();
#pragma unroll 2
        for (int i = (warp - chunk) & (kWarps - 1); i < num_chunks; i += kWarps) {
          const int mine = i * kChunk + t * 16, at = min(mine, num_inputs - 16);
          const float2 now = scales;
          request(i + kWarps);
          part.add(eet::load(low + at), eet::load(high + at), now, k + mine, a.num_tokens);
        }
        block.ring.release(place);
        chunk += num_chunks;
      }
      part.store(block.partial_of(tile, warp, a.num_tokens), a.num_tokens);
    }

    eet::barrier(1, kReaders);
    const int n = first + output;
    if (outputs.has(n)) outputs.finish(block.sum(output, token, a.num_tokens) * scale, n);
    if (first + kGroup >= end) break;
    scale = scale_of(n + kGroup);
    outputs.request(n + kGroup);
    eet::barrier(1, kReaders);
  }
  uint64_t* scratch = reinterpret_cast<uint64_t*>(shared);
  if (a.best) eet::leave_best(outputs.best, a.best, a.num_tokens, kGroup, kReaders, scratch);
}

// Whole chunks, and 16 bytes more: the rows that a warp reads at a time lie in different banks.
template <typename T>
int row_stride(int K) {
  return eet::ceil_div(K, kChunk) * kChunk + 16 / int(sizeof(T));
}

template <int kTokens, typename T>
cudaError_t launch_linear(Int8Args<T> a, int num_blocks, bool dependent, cudaStream_t stream) {
  const bool pairs = kTokens != 8;  // its 16 warps take more than half of the registers
  const int bytes = eet::plan_tiles<kTokens>(a, row_stride<T>(a.K), kChunk, pairs);
  if (!bytes) return cudaErrorInvalidValue;
  const auto kernel = a.G > 1 ? int8_linear_kernel<T, kTokens, true> : int8_linear_kernel<T, kTokens, false>;
  return eet::launch(kernel, {dim3(num_blocks), eet::kReaders<kTokens> + 32, bytes, stream, 1, dependent}, a);
}

}  // namespace

// out = act(norm(x) (scale weight)^T + bias) + residual, for at most 16 tokens; `best` gets each block's largest.
extern "C" cudaError_t eet_int8_linear(void* out, void* best, const void* x, const int64_t* at, const void* weight,
                                       const void* scale, const void* bias, const void* residual,
                                       const void* norm_weight, const void* norm_bias, int dtype, int T, int N, int K,
                                       int G, int log_inputs, int act, float eps, int blocks, int dependent,
                                       cudaStream_t stream) {
  if (T < 1 || T > eet::kMaxTokens || blocks < 1 || blocks > N) return cudaErrorInvalidValue;
  if (K % 16 || (G > 1 && 1 << log_inputs < kChunk)) return cudaErrorInvalidValue;
  return eet::by_type(dtype, [&](auto type) {
    using Type = decltype(type);
    Int8Args<Type> a(out, best, x, at, weight, bias, residual, norm_weight, norm_bias, T, N, K, act, eps, blocks);
    a.scale = static_cast<const float*>(scale), a.G = G, a.log_inputs = log_inputs;
    // From four tokens on, and with groups, twice as many warps are ahead (LOG).
    return T <= 3 && G == 1 ? launch_linear<4>(a, blocks, dependent, stream)
           : T <= 8         ? launch_linear<8>(a, blocks, dependent, stream)
                            : launch_linear<16>(a, blocks, dependent, stream);
  });
}
