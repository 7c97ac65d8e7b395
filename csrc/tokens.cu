// The two ends of a pass: tokens become activations, and the state moves on to the next columns.
// T tokens, B rows, C channels, V vocabulary, S columns of the token buffer, R passes in the log.
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
__global__ void embed_kernel(T* out, const int64_t* ids, const int64_t* positions, const T* token_embedding,
                             const T* position_embedding, int C) {
  eet::wait_for_previous();
  eet::let_next_begin();  // after the wait: see eet/dependent.cuh
  constexpr int kVec = eet::kVec<T>;
  const int64_t token = blockIdx.x, token_row = ids[token] * C, position_row = positions[token] * C;
  const bool has_position_embedding = position_embedding != nullptr;
  for (int c = threadIdx.x * kVec; c < C; c += blockDim.x * kVec) {
    float x[kVec], y[kVec];
    eet::unpack<T>(eet::load(token_embedding + token_row + c), x);
    eet::unpack<T>(has_position_embedding ? eet::load(position_embedding + position_row + c) : eet::zeros(), y);
#pragma unroll
    for (int i = 0; i < kVec; ++i) x[i] += y[i];
    eet::store(out + token * C + c, eet::pack<T>(x));
  }
}

struct TokenBuffer {
  int64_t* tokens;                         // [B,S]
  const int64_t *end, *limit;              // [B]
  int64_t *columns, *ids, *positions;      // [B]
  int64_t *log, *num_passes;               // [R,B], [1]
  int64_t row_stride, column_stride;       // of tokens, in numbers
  int64_t log_stride;                      // of log's rows: a pass may be of its first columns alone
  int R;

  __device__ int64_t* token(int row, int64_t column) const {
    return tokens + row * row_stride + column * column_stride;
  }
};

// Where a row goes after a pass that read `count` of its tokens, and what stands there.
struct Move {
  int64_t column = 0, position = 0, known = 0;
  bool generates = false;

  __device__ Move() = default;
  __device__ Move(const TokenBuffer& s, int row, int64_t count) : column(s.columns[row]), position(s.positions[row]) {
    if (count > 0 && column + count <= s.limit[row]) {
      column += count, position += count;
      generates = column >= s.end[row];
    }
    known = *s.token(row, column);
  }
};

// Why      some twenty tiny launches in PyTorch: the new numbers of the token buffer, and what the next pass reads
// Mapping  one block, a thread a row
// Traffic  a dozen numbers a row
// Needs    nothing
// Numerics integers
// Source   where the prompt still stands it is read instead of what was generated, as in FasterTransformer
__global__ void advance_kernel(const TokenBuffer s, const int64_t* token, const int64_t* count, int B) {
  // Before the wait: only this kernel writes what it reads here, and `count` is a constant or a copy.
  const int64_t pass = *s.num_passes;
  int64_t* const log = s.log + pass % s.R * s.log_stride;
  const int first = threadIdx.x;
  const Move first_move = first < B ? Move(s, first, count[first]) : Move();
  asm volatile("" ::"l"(log));  // computed now, not after the wait
  __syncthreads();
  eet::wait_for_previous();
  eet::let_next_begin();
  for (int row = first; row < B; row += blockDim.x) {
    const Move move = row == first ? first_move : Move(s, row, count[row]);
    const int64_t id = move.generates ? token[row] : move.known;
    *s.token(row, move.column) = s.ids[row] = log[row] = id;
    s.positions[row] = move.position;
    s.columns[row] = move.column;
  }
  if (threadIdx.x == 0) *s.num_passes = pass + 1;
}

}  // namespace

// out = token_embedding[ids] + position_embedding[positions]; a null `position_embedding` adds nothing.
extern "C" cudaError_t eet_embed(void* out, const int64_t* ids, const int64_t* positions, const void* token_embedding,
                                 const void* position_embedding, int dtype, int T, int C, int dependent,
                                 cudaStream_t stream) {
  return eet::by_type(dtype, [&](auto type) {
    using Type = decltype(type);
    const auto in = [](const void* p) { return static_cast<const Type*>(p); };
    const int vectors = eet::ceil_div(C, eet::kVec<Type>), threads = min(eet::ceil_div(vectors, 32) * 32, 256);
    return eet::launch(embed_kernel<Type>, {dim3(T), threads, 0, stream, 1, dependent != 0}, static_cast<Type*>(out),
                       ids, positions, in(token_embedding), in(position_embedding), C);
  });
}

// After a pass that read `count` [B] tokens of each row: `token` [B] is written where they end, except where the prompt
// still stands, and the row goes there; one at its limit, or that was not read, stays. `log` [R,B] gets the new `ids`.
extern "C" cudaError_t eet_advance(int64_t* tokens, const int64_t* end, const int64_t* limit, int64_t* columns,
                                   int64_t* ids, int64_t* positions, int64_t* log, int64_t* num_passes,
                                   const int64_t* token, const int64_t* count, int64_t row_stride,
                                   int64_t column_stride, int64_t log_stride, int B, int R, int dependent,
                                   cudaStream_t stream) {
  const TokenBuffer buffer{tokens,     end,        limit,         columns,    ids, positions, log,
                           num_passes, row_stride, column_stride, log_stride, R};
  const int threads = min(eet::ceil_div(B, 32) * 32, 1024);
  return eet::launch(advance_kernel, {dim3(1), threads, 0, stream, 1, dependent != 0}, buffer, token, count, B);
}
