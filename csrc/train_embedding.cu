// Embeddings that are trained: tokens become activations, and the gradients of these go back into the tables.
// T tokens, C channels, V rows of a table.
#include "eet/drop.cuh"
#include "eet/launch.cuh"
#include "eet/vec.cuh"

namespace {

constexpr int kThreads = 256, kWarps = kThreads / 32;

template <typename T>
struct Arguments {
  T* out;                                      // [T,C]
  const int64_t *ids, *positions, *types;      // [T]; no types: all are 0
  const T *token, *position, *type;            // tables; the last two may be null
  float scale;                                 // of the token embedding
  eet::Drop drop;
  int num_tokens, C;
};

// Why      in PyTorch three gathers, a product, two sums and a dropout are seven launches
// Mapping  a thread a vector of a token: grid T*C / (256 vectors)
// Traffic  3*C numbers read and C written a token
// Needs    C a multiple of 8
// Numerics fp32, rounded once
// Source   LightSeq2's embedding (Wang et al. 2022)
template <typename T>
__global__ void __launch_bounds__(kThreads) embed_kernel(const Arguments<T> a) {
  constexpr int kVec = eet::kVec<T>;
  const int vectors = a.C / kVec, place = blockIdx.x * kThreads + threadIdx.x;
  const int t = place / vectors, c = (place - t * vectors) * kVec;
  if (t >= a.num_tokens) return;
  float x[kVec], other[kVec];
  eet::unpack<T>(eet::load_constant(a.token + a.ids[t] * a.C + c), x);
#pragma unroll
  for (float& number : x) number *= a.scale;
  const auto add = [&](const T* table, int64_t row) {
    eet::unpack<T>(eet::load_constant(table + row * a.C + c), other);
#pragma unroll
    for (int i = 0; i < kVec; ++i) x[i] += other[i];
  };
  if (a.position) add(a.position, a.positions[t]);
  if (a.type) add(a.type, a.types ? a.types[t] : 0);
  a.drop.apply(x, a.drop.row(t), c);
  eet::store(a.out + int64_t(t) * a.C + c, eet::pack<T>(x));
}

constexpr int kPart = 32;  // places of a part, one for each lane to look up

// Gradients of tokens, sorted by the table's row that each has read: place i has row keys[i] and is token order[i]. The
// places of a row are a run. A part has kPart places; of a run that it does not have whole it leaves the sum in `edges`:
// of the one that goes on from the part before in edges[part,0], of the one that begins here in edges[part,1].
template <typename T>
struct BackwardArguments {
  T* dtable;             // [V,C]  rows that nobody has read stay as they are
  float* edges;          // [parts,2,C]
  const T* dout;         // [T,C]
  const int* keys;       // [T] ascending
  const int64_t* order;  // [T]
  float scale;
  int padding;           // a row that is not trained, or -1
  eet::Drop drop;
  int num_tokens, C;

  __device__ int num_parts() const { return (num_tokens + kPart - 1) / kPart; }
  __device__ int end_of(int part) const { return min((part + 1) * kPart, num_tokens); }
};

template <typename T>
__device__ inline void store_row(const BackwardArguments<T>& a, int row, int c, float (&sum)[eet::kVec<T>]) {
  if (row == a.padding) return;
#pragma unroll
  for (float& number : sum) number *= a.scale;
  eet::store(a.dtable + int64_t(row) * a.C + c, eet::pack<T>(sum));
}

// Why      PyTorch adds up with atomics, or a row of the table by one thread: a frequent token takes as long as all others
// Mapping  a warp has 32 places and 32 vectors of the channels: grid T/32 x C / (8 * 32 vectors)
// Traffic  reads T*C, writes C numbers for each token that occurs, and at most 8*C bytes a part
// Needs    C a multiple of 8
// Numerics fp32, in the order of tokens, rounded once; no atomics
// Source   sorted segments, as in DGL and PyTorch's embedding_dense_backward
template <typename T>
__global__ void __launch_bounds__(kThreads) embed_backward_kernel(const BackwardArguments<T> a) {
  constexpr int kVec = eet::kVec<T>, kTogether = 4;
  const int lane = threadIdx.x % 32, part = blockIdx.x, begin = part * kPart, end = a.end_of(part);
  const int c = (blockIdx.y * blockDim.x + threadIdx.x) * kVec;
  const bool is_in = c < a.C;
  const int mine = min(begin + lane, a.num_tokens - 1);
  const int64_t token = a.order[mine];
  const int key = a.keys[mine];
  const uint32_t noise = a.drop.row(token);
  const int before = begin ? a.keys[begin - 1] : -1, behind = end < a.num_tokens ? a.keys[end] : -1;
  float* const edge = a.edges + int64_t(part) * 2 * a.C + c;

  float sum[kVec] = {};
  bool is_whole = __shfl_sync(~0u, key, 0) != before;  // so far: the run did not begin in another part
#pragma unroll 1
  for (int place = 0; place < end - begin; place += kTogether) {
    uint4 rows[kTogether];
#pragma unroll
    for (int i = 0; i < kTogether; ++i) {
      const int64_t from = __shfl_sync(~0u, token, place + i);
      if (is_in && begin + place + i < end) rows[i] = eet::load_constant(a.dout + from * a.C + c);
    }
#pragma unroll
    for (int i = 0; i < kTogether; ++i) {
      const int row = __shfl_sync(~0u, key, place + i), following = __shfl_sync(~0u, key, (place + i + 1) % 32);
      const uint32_t its_noise = __shfl_sync(~0u, noise, place + i);
      if (begin + place + i >= end) continue;
      const bool is_last = begin + place + i + 1 == end;
      if (is_in) {
        float grad[kVec];
        eet::unpack<T>(rows[i], grad);
        a.drop.apply(grad, its_noise, c);
#pragma unroll
        for (int k = 0; k < kVec; ++k) sum[k] += grad[k];
      }
      if (!is_last && following == row) continue;
      if (is_in) {
        if (is_whole && !(is_last && behind == row)) {
          store_row(a, row, c, sum);
        } else {
#pragma unroll
          for (int k = 0; k < kVec; ++k) edge[(is_whole ? a.C : 0) + k] = sum[k];
        }
      }
#pragma unroll
      for (float& number : sum) number = 0.f;
      is_whole = true;
    }
  }
}

// Why      a run of many parts: the block of the part in which it begins adds up its sums
// Mapping  grid parts x C / 32 vectors, of which few have something to do; warps take parts in turn
// Traffic  4*C bytes for each part of such a run
// Needs    C a multiple of 8
// Numerics fp32, always in the same order, rounded once
// Source   two stages, as everywhere here
template <typename T>
__global__ void __launch_bounds__(kThreads) join_parts_kernel(const BackwardArguments<T> a) {
  constexpr int kVec = eet::kVec<T>;
  __shared__ float sums[kWarps][32 * kVec];
  const int part = blockIdx.x, begin = part * kPart, end = a.end_of(part);
  const int row = a.keys[end - 1];
  const bool goes_on = end < a.num_tokens && a.keys[end] == row;
  const bool begins_here = a.keys[begin] != row || begin == 0 || a.keys[begin - 1] != row;
  if (!goes_on || !begins_here) return;
  int last = part + 1;  // of the parts that begin with this row, which a binary search finds
  for (int beyond = a.num_parts(); beyond - last > 1;) {
    const int middle = (last + beyond) / 2;
    (a.keys[middle * kPart] == row ? last : beyond) = middle;
  }
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, c = (blockIdx.y * 32 + lane) * kVec;
  float sum[kVec] = {};
  if (c < a.C) {
#pragma unroll 4
    for (int each = part + warp; each <= last; each += kWarps) {
      const float* const from = a.edges + (int64_t(each) * 2 + (each == part)) * a.C + c;
#pragma unroll
      for (int k = 0; k < kVec; ++k) sum[k] += from[k];
    }
  }
#pragma unroll
  for (int k = 0; k < kVec; ++k) sums[warp][lane * kVec + k] = sum[k];
  __syncthreads();
  if (warp || c >= a.C) return;
#pragma unroll
  for (int k = 0; k < kVec; ++k) {
    for (int other = 1; other < kWarps; ++other) sum[k] += sums[other][lane * kVec + k];
  }
  store_row(a, row, c, sum);
}

}  // namespace

// out = drop(token[ids] * scale + position[positions] + type[types]); null tables add nothing, null `types` are all 0.
extern "C" cudaError_t eet_train_embed(void* out, const int64_t* ids, const int64_t* positions, const int64_t* types,
                                       const void* token, const void* position, const void* type, float scale,
                                       const int64_t* drop_tokens, int drop_call, int drop_below, float drop_scale,
                                       int dtype, int T, int C, cudaStream_t stream) {
  return eet::by_type(dtype, [&](auto real) {
    using Type = decltype(real);
    const auto in = [](const void* p) { return static_cast<const Type*>(p); };
    const eet::Drop drop{drop_tokens, drop_call, uint32_t(drop_below), drop_scale};
    const Arguments<Type> a{static_cast<Type*>(out), ids, positions, types, in(token), in(position), in(type), scale,
                            drop, T, C};
    const int64_t vectors = int64_t(T) * (C / eet::kVec<Type>);
    if (vectors > (1ll << 31) - kThreads) return cudaErrorInvalidValue;
    return eet::launch(embed_kernel<Type>, {int((vectors + kThreads - 1) / kThreads), kThreads, 0, stream}, a);
  });
}

// The sums of a table's rows, times `scale`; the other rows of `dtable` stay as they are. edges [T/32 rounded up,2,C].
extern "C" cudaError_t eet_train_embed_backward(void* dtable, float* edges, const void* dout, const int* keys,
                                                const int64_t* order, float scale, int padding,
                                                const int64_t* drop_tokens, int drop_call, int drop_below,
                                                float drop_scale, int dtype, int T, int C, cudaStream_t stream) {
  return eet::by_type(dtype, [&](auto real) {
    using Type = decltype(real);
    const eet::Drop drop{drop_tokens, drop_call, uint32_t(drop_below), drop_scale};
    const BackwardArguments<Type> a{static_cast<Type*>(dtable), edges, static_cast<const Type*>(dout), keys, order,
                                    scale, padding, drop, T, C};
    const int parts = eet::ceil_div(T, kPart), strips = eet::ceil_div(C, 32 * eet::kVec<Type>), warps = min(strips, kWarps);
    const eet::Launch backward{dim3(parts, eet::ceil_div(strips, warps)), 32 * warps, 0, stream};
    if (cudaError_t error = eet::launch(embed_backward_kernel<Type>, backward, a)) return error;
    return eet::launch(join_parts_kernel<Type>, {dim3(parts, strips), kThreads, 0, stream}, a);
  });
}
