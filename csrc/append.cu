// The write of new keys and values into the KV cache, where attention itself does not do it.
// T tokens, B rows, H heads, G KV heads, D head dim, K columns of the KV cache.
#include "eet/attention.cuh"
#include "eet/launch.cuh"
#include "eet/vec.cuh"

namespace {

template <typename T>
struct AppendArgs {
  T* out;  // [T,HD] or null: where a pad's output is set to 0
  eet::Cache<T> keys, values;
  const T* qkv;            // [T,(H+2G)D]
  const int64_t* rows;     // [T]
  const int64_t* columns;  // [T], `column_stride` apart
  int64_t column_stride;
  const int64_t *first, *count;  // [B]
  eet::Heads heads;
};

// Why      a prefill's queries read keys that other blocks produced, so all of them are written before
// Mapping  a block a token: grid T, 128 threads; a thread a vector
// Traffic  reads and writes 2*G*D numbers a token; writes H*D zeros for a pad
// Needs    D a multiple of 8
// Numerics copies
// Source   the KV cache of every decoder since Fairseq; the zeros are what attention without a mask owes to pads
template <typename T>
__global__ void append_kernel(const AppendArgs<T> a) {
  const auto [H, G, D] = a.heads;
  const int64_t token = blockIdx.x, row = a.rows[token], column = a.columns[token * a.column_stride];
  constexpr int kVec = eet::kVec<T>;
#pragma unroll 4  // that many loads on their way
  for (int i = threadIdx.x * kVec; i < 2 * G * D; i += blockDim.x * kVec) {
    const int kv = i / D % G, d = i % D;
    const eet::Cache<T>& cache = i < G * D ? a.keys : a.values;
    eet::store(cache.at(row, kv, column) + d, eet::load(a.qkv + a.heads.key(token, 0) + i));
  }
  if (!a.out) return;
  const int64_t place = token - a.first[row];
  if (place >= 0 && place < a.count[row]) return;
  for (int i = threadIdx.x * kVec; i < H * D; i += blockDim.x * kVec) {
    eet::store(a.out + token * H * D + i, eet::zeros());
  }
}

}  // namespace

// `out` is null, or [T,HD] whose pads are to be 0.
extern "C" cudaError_t eet_append(void* out, void* keys, void* values, const void* qkv, const int64_t* rows,
                                  const int64_t* columns, const int64_t* first, const int64_t* count, const int* table,
                                  int64_t columns_stride, int64_t row_stride, int64_t head_stride, int64_t key_stride,
                                  int table_stride, int log_page, int dtype, int T, int H, int G, int D,
                                  cudaStream_t stream) {
  return eet::by_type(dtype, [&](auto type) {
    using Type = decltype(type);
    const auto cache = [&](void* p) {
      const eet::Pages pages{table, table_stride, log_page};
      return eet::Cache<Type>{static_cast<Type*>(p), row_stride, head_stride, key_stride, pages};
    };
    const AppendArgs<Type> a{static_cast<Type*>(out), cache(keys), cache(values), static_cast<const Type*>(qkv), rows,
                             columns, columns_stride, first, count, {H, G, D}};
    return eet::launch(append_kernel<Type>, {T, 128, 0, stream}, a);
  });
}
