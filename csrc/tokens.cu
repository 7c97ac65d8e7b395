// The two ends of a decode step: tokens become activations, and the state moves on to the next column.
// T tokens, B rows, C channels, V words, S columns of the canvas.
#include "eet/dependent.cuh"
#include "eet/launch.cuh"
#include "eet/vec.cuh"

namespace {

// Why      two gathers and a sum are three launches and two more trips through memory in PyTorch
// Mapping  a block a token: grid T; a thread a vector, at most 256 of them
// Traffic  2*C numbers read and C written a token
// Needs    C a multiple of 8
// Numerics fp32, rounded once
// Source   the embedding kernels of FasterTransformer and EET; it keeps a step's kernels from beginning in the step before
template <typename T>
__global__ void embed_kernel(T* out, const int64_t* ids, const int64_t* positions, const T* words, const T* places,
                             int C) {
  eet::wait_for_previous();
  eet::let_next_begin();  // after the wait: see eet/dependent.cuh
  constexpr int kVec = eet::kVec<T>;
  const int64_t token = blockIdx.x, word = ids[token] * C, place = positions[token] * C;
  for (int c = threadIdx.x * kVec; c < C; c += blockDim.x * kVec) {
    float x[kVec], y[kVec];
    eet::unpack<T>(eet::load(words + word + c), x);
    eet::unpack<T>(eet::load(places + place + c), y);
#pragma unroll
    for (int i = 0; i < kVec; ++i) x[i] += y[i];
    eet::store(out + token * C + c, eet::pack<T>(x));
  }
}

struct State {
  int64_t *tokens, *ids, *positions;  // [B,S], [B], [B]
  int64_t* column;                    // [1]
  const int64_t* end;                 // [B]
  int64_t row_stride, column_stride;  // of tokens, in numbers
};

// Why      nine tiny launches in PyTorch: the new column of the canvas, and what the next step reads
// Mapping  one block, a thread a row
// Traffic  a few numbers a row
// Needs    a column after the present one
// Numerics integers
// Source   where the prompt still stands it is read instead of what was generated, as in FasterTransformer
__global__ void advance_kernel(const State s, const int64_t* token, int B) {
  const int64_t column = *s.column + 1;  // before the wait: only this kernel writes it
  __syncthreads();
  eet::wait_for_previous();
  eet::let_next_begin();
  for (int row = threadIdx.x; row < B; row += blockDim.x) {
    int64_t* canvas = s.tokens + row * s.row_stride + column * s.column_stride;
    const int64_t generated = token[row], known = *canvas;
    *canvas = s.ids[row] = column >= s.end[row] ? generated : known;
    s.positions[row] += 1;
  }
  if (threadIdx.x == 0) *s.column = column;
}

}  // namespace

// out = words[ids] + places[positions].
extern "C" cudaError_t eet_embed(void* out, const int64_t* ids, const int64_t* positions, const void* words,
                                 const void* places, int dtype, int T, int C, int dependent, cudaStream_t stream) {
  return eet::by_type(dtype, [&](auto type) {
    using Type = decltype(type);
    const auto in = [](const void* p) { return static_cast<const Type*>(p); };
    const int vectors = eet::ceil_div(C, eet::kVec<Type>), threads = min(eet::ceil_div(vectors, 32) * 32, 256);
    return eet::launch(embed_kernel<Type>, {dim3(T), threads, 0, stream, 1, dependent != 0}, static_cast<Type*>(out),
                       ids, positions, in(words), in(places), C);
  });
}

// Writes `token` [B] into the next column, except where the prompt still stands, and steps forward.
extern "C" cudaError_t eet_advance(int64_t* tokens, const int64_t* end, int64_t* column, int64_t* ids,
                                   int64_t* positions, const int64_t* token, int64_t row_stride, int64_t column_stride,
                                   int B, int dependent, cudaStream_t stream) {
  const State state{tokens, ids, positions, column, end, row_stride, column_stride};
  const int threads = min(eet::ceil_div(B, 32) * 32, 1024);
  return eet::launch(advance_kernel, {dim3(1), threads, 0, stream, 1, dependent != 0}, state, token, B);
}
