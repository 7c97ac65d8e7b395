// Linear layers of four to eight tokens, in 16 bits: weights stream through shared memory, once, and activations lie in
// registers. T tokens, N outputs, K inputs.
#include "eet/dependent.cuh"
#include "eet/launch.cuh"
#include "eet/vector_product.cuh"

namespace {

constexpr int kMostTokens = 8;                         // the columns of an mma
constexpr int kLeastRows = 5;                          // outputs of a stage, unless a block has fewer
constexpr int kLogWarps = 3, kWarps = 1 << kLogWarps;  // that multiply; one more fills the ring
constexpr int kReaders = 32 * kWarps;
constexpr int kEach = 2, kMostOutputs = 32 * kEach;  // outputs of a token that a lane finishes, and its warp
constexpr int kNormChunks = 7;                       // of a step that are one warp's, with a norm; else kMostChunks
constexpr int kAheadChunks = 4;                      // the same, where a warp asks for those of the next step meanwhile
constexpr int kMomentsBytes = 2 * kMostTokens * kWarps * int(sizeof(float2));
constexpr int kLeastCopy = 1792;                     // bytes of a row: the copy engine is hardly faster with less
// A block has 288 threads. This many, twice, leave each 80 registers: of a quarter of the multiprocessor three of its
// warps take 7,680 of 16,384 registers, and two of attention's warps find room beside them.
constexpr int kBounds = 384;

template <typename T>
struct RegisterArgs : eet::LinearArgs<T, T> {
  using eet::LinearArgs<T, T>::LinearArgs;
  eet::Steps steps;        // that cut the inputs; one, if there is a norm
  int tile, stage_stride;  // outputs of a stage; bytes between them
  int num_tiles, num_stages;

  // Of a tile, and eight more, so that a warp that adds up four tiles finds their sums in different banks.
  __host__ __device__ int sums() const { return eet::kStageRows * (this->num_tokens * kWarps + 1); }
  // Bytes of all sums and of the norm: what lies behind is filled in lines of 128 bytes.
  __host__ __device__ int sums_bytes() const { return (num_tiles * sums() * int(sizeof(float)) + 127) / 128 * 128; }
  __host__ __device__ int norm_bytes() const {
    return this->norm.weight ? kMomentsBytes + (2 * this->K * int(sizeof(T)) + 127) / 128 * 128 : 0;
  }
};

// A norm of rows whose numbers lie in the registers of all warps: lane 4g+t has pieces of token g, each of 8 numbers.
// Mean and variance take one pass, and a second one around the mean where that lies far from 0, so that it costs no
// digits.
template <typename T>
class RegisterNorm {
 public:
  // `home`: kMomentsBytes of shared memory and 2K numbers, where norm weights and biases wait.
  __device__ RegisterNorm(eet::Norm<T> norm, int K, char* home)
      : norm(norm), moments(reinterpret_cast<float2*>(home)), home(reinterpret_cast<T*>(home + kMomentsBytes)), K(K) {}

  // What does not depend on x, to be on its way while x is waited for.
  __device__ void request() const {
    for (int c = threadIdx.x * 8; c < K; c += 8 * kReaders) {
      eet::copy_async(home + c, norm.weight + c, true);
      if (norm.bias) eet::copy_async(home + K + c, norm.bias + c, true);
    }
    eet::commit_copies();
  }

  // Piece i holds the numbers from `first` + i * `apart` on, and nothing where that is K or more.
  template <int kCount>
  __device__ void apply(uint4 (&x)[kCount], const T* row, int first, int apart) const {
    float shift = 0;
    const int count = first + (kCount - 1) * apart < K ? kCount : kCount - 1;
    eet::wait_for_copies<0>();
    look(x, moments);
    float2 found = whole(moments);
    // Every warp has all tokens, so all warps agree.
    if (__any_sync(0xffffffffu, found.x * found.x > kFar * found.y)) {
      shift = found.x;
      float sum = 0, squares = 0;
#pragma unroll 1
      for (int c = first; c < K; c += apart) add(eet::load(row + c), shift, sum, squares);
      sum = eet::warp_sum<4>(sum), squares = eet::warp_sum<4>(squares);
      float2* const scratch = moments + kMostTokens * kWarps;
      if (threadIdx.x % 4 == 0) leave(sum, squares, scratch);
      found = whole(scratch);
    }
    const uint32_t zero = eet::opaque_zero();
    const float mean = shift + found.x, scale = rsqrtf(fmaxf(found.y, 0.f) + norm.eps);
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      if (i == kCount - 1 && i == count) break;
      // A piece waits for the one before the last: else all are unpacked at once, into registers that are not there.
      if (i >= 2) {
        const uint32_t none = x[i - 2].w & zero;
        x[i].x ^= none, x[i].y ^= none, x[i].z ^= none, x[i].w ^= none;
      }
      float v[8], w[8], b[8];
      eet::unpack<T>(x[i], v);
      eet::unpack<T>(eet::load(home + first + i * apart), w);
      eet::unpack<T>(norm.bias ? eet::load(home + K + first + i * apart) : eet::zeros(), b);
#pragma unroll
      for (int k = 0; k < 8; ++k) v[k] = (v[k] - mean) * scale * w[k] + b[k];
      x[i] = eet::pack<T>(v);
    }
  }

 private:
  // Leaves the sums of this warp's numbers and of their squares, by tensor cores: a row times ones, and the diagonal of
  // the rows times themselves. Behind the last number there are zeros.
  template <int kCount>
  __device__ void look(const uint4 (&x)[kCount], float2* scratch) const {
    const uint32_t ones = eet::pack2<T>(1.f, 1.f);
    const int g = threadIdx.x % 32 / 4;
    float sum[4] = {}, low[2][4] = {}, high[2][4] = {};
#pragma unroll
    for (const uint4& v : x) {
      eet::mma<T>(sum, v.x, v.y, v.z, v.w, ones, ones);
      eet::mma_short<T>(low[0], v.x, v.y, v.x);
      eet::mma_short<T>(high[0], v.x, v.y, v.y);
      eet::mma_short<T>(low[1], v.z, v.w, v.z);
      eet::mma_short<T>(high[1], v.z, v.w, v.w);
    }
    const float even = (low[0][0] + low[1][0]) + (high[0][2] + high[1][2]);
    const float odd = (low[0][1] + low[1][1]) + (high[0][3] + high[1][3]);
    if (threadIdx.x % 4 == g / 2) leave(sum[0] + sum[2], g % 2 ? odd : even, scratch);
  }

  __device__ static void leave(float sum, float squares, float2* scratch) {
    scratch[threadIdx.x % 32 / 4 * kWarps + threadIdx.x / 32] = make_float2(sum, squares);
  }

  static constexpr float kFar = 16;  // of the mean's square, in variances: there their difference has too few digits
  eet::Norm<T> norm;
  float2* moments;  // [2][token][warp]
  T* home;
  int K;

  __device__ static void add(uint4 piece, float shift, float& sum, float& squares) {
    float v[8];
    eet::unpack<T>(piece, v);
#pragma unroll
    for (float value : v) sum += value - shift, squares += (value - shift) * (value - shift);
  }

  // Mean and variance of the row's numbers less `shift`.
  __device__ float2 whole(const float2* scratch) const {
    float sum = 0, squares = 0;
    const int g = threadIdx.x % 32 / 4;
    eet::barrier(1, kReaders);
#pragma unroll
    for (int warp = 0; warp < kWarps; warp += 2) {
      const float4 two = *reinterpret_cast<const float4*>(scratch + g * kWarps + warp);
      sum += two.x + two.z, squares += two.y + two.w;
    }
    const float share = __fdividef(1.f, K), mean = norm.bias ? sum * share : 0.f;
    return make_float2(mean, squares * share - mean * mean);
  }
};

// The warps that multiply, as StageProducts: of a step's chunks every kWarps-th is a warp's own, and lane 4g+t reads 16
// bytes of output g, which are the fragment A of an mma as they come: its rows g and g + 8 are both output g, with the
// words x, z and y, w. Column i of B is token i, with x, z in one mma and y, w in the other; of each product half the
// rows are of use.
template <typename T, bool kNormed>
class RegisterProducts {
 public:
  __device__ RegisterProducts(const RegisterArgs<T>& a, const eet::Ring& ring, float* partial)
      : a(a), ring(ring), partial(partial), zero(eet::opaque_zero()) {}

  // Leaves the sums of all tiles: partial [tile][sums()], of which those of a warp are [token][kStageRows].
  __device__ void multiply(const RegisterNorm<T>& norm, eet::Share share) const {
    switch ((a.steps.most_chunks() + kWarps - 1) / kWarps) {
      case 1: return all_steps<1>(norm, share);
      case 2: return all_steps<2>(norm, share);
      case 3: return all_steps<3>(norm, share);
      case 4: return all_steps<4>(norm, share);
      case 5: return all_steps<5>(norm, share);
      case 6: return all_steps<6>(norm, share);
      case 7: return all_steps<7>(norm, share);
      default:
        if constexpr (!kNormed) all_steps<eet::kMostChunks>(norm, share);
    }
  }

 private:
  const RegisterArgs<T>& a;
  eet::Ring ring;
  float* partial;
  uint32_t zero;  // of opaque_zero()

  // x, moved here and now: else the assembler does it in front of every product.
  __device__ uint32_t here(uint32_t x) const {
    asm volatile("xor.b32 %0, %0, %1;" : "+r"(x) : "r"(zero));
    return x;
  }
  __device__ uint4 arranged(uint4 v) const { return make_uint4(here(v.x), here(v.z), here(v.y), here(v.w)); }

  // kCount: chunks of a warp. Only its last one may lie behind the step's end, in part or all.
  template <int kCount>
  __device__ void all_steps(const RegisterNorm<T>& norm, eet::Share share) const {
    constexpr int kApart = kWarps * eet::kChunk, kBytes = int(sizeof(T)), kAtOnce = 2;
    constexpr bool kAhead = !kNormed && kCount <= kAheadChunks;
    const int warp = threadIdx.x / 32, t = threadIdx.x % 4, g = threadIdx.x % 32 / 4;
    const int first = warp * eet::kChunk + t * 8, last = first + (kCount - 1) * kApart;
    const T* row = a.x + min(g, a.num_tokens - 1) * int64_t(a.K) + first;  // past the last token the last, again
    uint4 x[kCount];
    const auto request = [&](int step) {
      const T* from = row + a.steps.begin(step);
#pragma unroll
      for (int i = 0; i < kCount - 1; ++i) x[i] = eet::load(from + i * kApart);
      x[kCount - 1] = eet::zeros();
      if (last < a.steps.inputs(step, a.K)) x[kCount - 1] = eet::load(from + (kCount - 1) * kApart);
    };
    request(0);
    if (kNormed) norm.apply(x, row - first, first, kApart);

    const uint32_t weights = eet::shared_address(ring.stages) + min(g, a.tile - 1) * a.stage_stride;
    float* const sums = partial + (warp * a.num_tokens + 2 * t) * eet::kStageRows + g;
    const bool has_even = 2 * t < a.num_tokens, has_odd = 2 * t + 1 < a.num_tokens;
    eet::RingPlace place;
    const int num_steps = kAhead ? a.steps.num : 1;
#pragma unroll 1
    for (int step = 0; step < num_steps; ++step) {
      uint4 v[kCount];
#pragma unroll
      for (int i = 0; i < kCount; ++i) v[i] = arranged(x[i]);
      if (kAhead && step + 1 < num_steps) request(step + 1);
      // Behind the last input the last is read again: there the activations are 0.
      int end = min(last, a.steps.inputs(step, a.K) - 8) * kBytes;
      asm("" : "+r"(end));  // else it is computed again for every tile
      float* to = sums;
#pragma unroll 1
      for (int n = share.begin; n < share.end; n += a.tile, place.step(ring.num_stages), to += a.sums()) {
        const uint32_t stage = weights + place.stage * ring.stage_bytes;
        const bool goes_on = kAhead && step;
        float even = goes_on && has_even ? *to : 0.f, odd = goes_on && has_odd ? to[eet::kStageRows] : 0.f;
        eet::barrier_wait(ring.filled(place), place.parity);
        float low[2][4] = {}, high[2][4] = {};  // sums that do not wait for each other
#pragma unroll
        for (int from = 0; from < kCount; from += kAtOnce) {
          uint4 w[kAtOnce];
#pragma unroll
          for (int i = from; i < from + kAtOnce && i < kCount; ++i) {
            w[i - from] = eet::load_shared(stage + (i + 1 < kCount ? (first + i * kApart) * kBytes : end));
          }
#pragma unroll
          for (int i = from; i < from + kAtOnce && i < kCount; ++i) {
            const uint4 words = w[i - from];
            eet::mma<T>(low[i % 2], words.x, words.y, words.z, words.w, v[i].x, v[i].y);
            eet::mma<T>(high[i % 2], words.x, words.y, words.z, words.w, v[i].z, v[i].w);
          }
        }
        even += (low[0][0] + low[1][0]) + (high[0][2] + high[1][2]);
        odd += (low[0][1] + low[1][1]) + (high[0][3] + high[1][3]);
        if (has_even) *to = even;
        if (has_odd) to[eet::kStageRows] = odd;
        // Not before: an arrival can overtake loads that wait behind another kernel's, and then the stage is filled
        // again while it is read. The store needs what was loaded.
        ring.release(place);
      }
    }
  }
};

// Why      for eight tokens activations and their norm are as much as several stages of weights, and what is copied to
//          shared memory, normalized there and read again takes longer than the products
// Mapping  a block a multiprocessor, each with an equal share of the outputs; one warp keeps a ring of stages filled,
//          from before the kernel ahead has ended; a stage is 5 to 8 outputs, and each of 8 warps has an eighth of its
//          inputs: it loads those of all tokens into registers, and normalizes them there
// Traffic  N*K weights once, T*K activations a block (from L2), T*N out; 100 KiB on their way a multiprocessor
// Needs    K a multiple of 8, and at most 1792 with a norm; at most 8 tokens, and 64 outputs a block
// Numerics tensor cores; fp32 sums; norm, bias, activation, residual in fp32, rounded once
// Source   ours; the fragments as in vector_linear.cu
template <typename T, bool kNormed>
__global__ void __launch_bounds__(kBounds, eet::kResident)
    register_linear_kernel(const __grid_constant__ RegisterArgs<T> a) {
  extern __shared__ __align__(128) uint4 shared[];  // the copy engine fills whole lines sooner
  eet::let_next_begin();
  float* partial = reinterpret_cast<float*>(shared);
  char* home = reinterpret_cast<char*>(shared) + a.sums_bytes();
  char* stages = home + (kNormed ? a.norm_bytes() : 0);
  const int stage_bytes = a.tile * a.stage_stride;
  const eet::Ring ring{stages, reinterpret_cast<uint64_t*>(stages + a.num_stages * stage_bytes), a.num_stages,
                       stage_bytes};
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const eet::Share share(a);

  if (threadIdx.x == kReaders) ring.init(kWarps);
  __syncthreads();
  if (warp == kWarps) {
    eet::WeightStream stream(ring, a.stage_stride);
    stream.add(a.weight, a.K, share.begin, share.end, a.tile, a.steps);
    return;
  }
  // A warp finishes the outputs of one token.
  eet::Outputs<T, T, kEach> outputs(a, warp, share, 32);
  outputs.request_bias(share.begin + lane);
  const RegisterNorm<T> norm(a.norm, a.K, home);
  if (kNormed) norm.request();
  const RegisterProducts<T, kNormed> products(a, ring, partial);
  eet::wait_for_previous();
  outputs.request_residual(share.begin + lane);
  products.multiply(norm, share);

  eet::barrier(1, kReaders);
  if (warp >= a.num_tokens) return;
#pragma unroll
  for (int i = 0; i < kEach; ++i) {
    const int output = lane + 32 * i, tile = output / a.tile;
    if (!outputs.has(share.begin + output)) break;
    const float* from = partial + tile * a.sums() + warp * eet::kStageRows + output - tile * a.tile;
    float part[kWarps], sum = 0;
#pragma unroll
    for (int j = 0; j < kWarps; ++j) part[j] = from[j * a.num_tokens * eet::kStageRows];
#pragma unroll
    for (float one : part) sum += one;
    outputs.finish(sum, share.begin + output, i);
  }
}

// Cuts the stages so that they bring most bytes on their way, and says how many of `room` bytes all takes; 0: it does
// not fit.
template <typename T>
int cut(RegisterArgs<T>& a, int room) {
  int best_bytes = 0, best_ahead = 0;
  const int num_chunks = eet::ceil_div(a.K, eet::kChunk), in_one = kWarps * eet::kMostChunks;
  const bool single = num_chunks <= in_one;
  const int least_steps = single ? 1 : eet::ceil_div(num_chunks, kWarps * kAheadChunks);
  if (a.norm.weight && num_chunks > kWarps * kNormChunks) return 0;
  RegisterArgs<T> c = a;
  for (c.tile = eet::kStageRows; c.tile >= kLeastRows; --c.tile) {
    c.num_tiles = eet::ceil_div(c.most_outputs(), c.tile);
    for (int num = least_steps; num <= (single ? 1 : num_chunks); ++num) {
      c.steps = eet::cut_inputs(c.K, num);
      const int row_bytes = c.steps.most_chunks() * eet::kChunk * int(sizeof(T));
      if (num > least_steps && row_bytes < kLeastCopy) break;
      c.stage_stride = eet::odd_stride(row_bytes);
      const int others = c.sums_bytes() + c.norm_bytes(), stage = eet::Ring::bytes(1, c.tile * c.stage_stride);
      const int needed = c.num_tiles * num, fitting = room > others ? (room - others) / stage : 0;
      c.num_stages = min(fitting, needed);
      const int ahead = fitting >= needed ? INT_MAX : c.num_stages * c.tile * row_bytes;
      // A tile takes the readers as long whatever it holds, so more of them have to be worth it.
      if (ahead - best_ahead > best_ahead / 10) a = c, best_ahead = ahead, best_bytes = others + c.num_stages * stage;
    }
  }
  return best_bytes;
}

template <typename T>
cudaError_t launch_register_linear(RegisterArgs<T> a, int num_blocks, bool dependent, cudaStream_t stream) {
  const int paired = eet::paired_shared(a.residual);
  int bytes = cut(a, paired) && a.num_stages >= min(eet::kPairedStages, a.num_tiles * a.steps.num) ? paired : 0;
  if (!bytes) bytes = cut(a, eet::whole_shared());
  if (!bytes) return cudaErrorInvalidValue;
  const auto kernel = a.norm.weight ? register_linear_kernel<T, true> : register_linear_kernel<T, false>;
  return eet::launch(kernel, {dim3(num_blocks), kReaders + 32, bytes, stream, 1, dependent}, a);
}

}  // namespace

// out = act(norm(x) weight^T + bias) + residual, for at most eight tokens.
extern "C" cudaError_t eet_register_linear(void* out, const void* x, const void* weight, const void* bias,
                                           const void* residual, const void* norm_weight, const void* norm_bias,
                                           int dtype, int T, int N, int K, int act, float eps, int blocks,
                                           int dependent, cudaStream_t stream) {
  if (T < 1 || T > kMostTokens || blocks < 1 || blocks > N) return cudaErrorInvalidValue;
  if (eet::ceil_div(N, blocks) > kMostOutputs) return cudaErrorInvalidValue;
  return eet::by_half_type(dtype, [&](auto type) {
    using Type = decltype(type);
    const RegisterArgs<Type> a(out, nullptr, x, nullptr, weight, bias, residual, norm_weight, norm_bias, T, N, K, act,
                               eps, blocks);
    return launch_register_linear<Type>(a, blocks, dependent, stream);
  });
}
