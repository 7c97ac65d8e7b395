// Hopper's copy engine: boxes of a strided tensor, to and from shared memory, one instruction each (sm_90 and later).
#pragma once

#include <cuda.h>
#include <cuda_runtime.h>

#include <cstdint>

#include "eet/mma.cuh"

namespace eet {

// A tensor [rows, positions, heads, D] of 16-bit numbers, by its sizes and strides in numbers, the last dimension
// contiguous. A box is `num_positions` of one head, 64 numbers each, with the 128-byte swizzle that wgmma.cuh describes;
// what lies outside of the tensor is read as 0 and not written.
inline cudaError_t make_tensor_map(CUtensorMap* map, const void* start, int D, int heads, int64_t head_stride,
                                   int64_t positions, int64_t position_stride, int rows, int64_t row_stride,
                                   int num_positions) {
  static const auto encode = [] {
    void* function = nullptr;
    cudaDriverEntryPointQueryResult found;
    cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &function, 12000, cudaEnableDefault, &found);
    return reinterpret_cast<decltype(&cuTensorMapEncodeTiled)>(function);
  }();
  if (!encode) return cudaErrorNotSupported;
  const cuuint64_t sizes[] = {cuuint64_t(D), cuuint64_t(heads), cuuint64_t(positions), cuuint64_t(rows)};
  const cuuint64_t strides[] = {cuuint64_t(head_stride) * 2, cuuint64_t(position_stride) * 2,
                                cuuint64_t(row_stride) * 2};  // in bytes
  const cuuint32_t box[] = {64, 1, cuuint32_t(num_positions), 1}, every[] = {1, 1, 1, 1};
  const CUresult result =
      encode(map, CU_TENSOR_MAP_DATA_TYPE_UINT16, 4, const_cast<void*>(start), sizes, strides, box, every,
             CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B, CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
             CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  return result == CUDA_SUCCESS ? cudaSuccess : cudaErrorInvalidValue;
}

// Where a box begins.
struct Corner {
  int d, head, position, row;
};

// The first box would wait for its map.
__device__ inline void prefetch_map(const CUtensorMap& map) {
  asm volatile("prefetch.tensormap [%0];" ::"l"(&map) : "memory");
}

// Its bytes count towards what the barrier was promised; zeros from outside of the tensor count too.
__device__ inline void load_box(void* to, const CUtensorMap& map, Corner from, uint64_t* barrier) {
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4, %5, %6}], [%2];"
      ::"r"(shared_address(to)), "l"(&map), "r"(shared_address(barrier)), "r"(from.d), "r"(from.head),
      "r"(from.position), "r"(from.row)
      : "memory");
}

// The same of what is read once: activations stay in L2 instead.
__device__ inline void load_box_once(void* to, const CUtensorMap& map, Corner from, uint64_t* barrier) {
  uint64_t once;
  asm volatile("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(once));
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint "
      "[%0], [%1, {%3, %4, %5, %6}], [%2], %7;" ::"r"(shared_address(to)),
      "l"(&map), "r"(shared_address(barrier)), "r"(from.d), "r"(from.head), "r"(from.position), "r"(from.row),
      "l"(once)
      : "memory");
}

__device__ inline void store_box(const CUtensorMap& map, Corner to, const void* from) {
  asm volatile("cp.async.bulk.tensor.4d.global.shared::cta.bulk_group [%0, {%2, %3, %4, %5}], [%1];" ::"l"(&map),
               "r"(shared_address(from)), "r"(to.d), "r"(to.head), "r"(to.position), "r"(to.row)
               : "memory");
}

// Until the boxes that this thread stores have left shared memory.
__device__ inline void wait_for_stores() {
  asm volatile("cp.async.bulk.commit_group;\n\tcp.async.bulk.wait_group.read 0;" ::: "memory");
}

// What this thread wrote to shared memory becomes visible to the copy engine and to wgmma.
__device__ inline void publish_to_engines() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

}  // namespace eet
