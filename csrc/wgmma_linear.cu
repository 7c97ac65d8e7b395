// Linear layers of some tens of tokens, in 16 bits: weights and activations stream through shared memory to Hopper's
// tensor cores (sm_90a). T tokens, N outputs, K inputs.
#include "eet/launch.cuh"
#include "eet/wgmma.cuh"
#include "eet/wgmma_tiles.cuh"

namespace {

using eet::kTileGroups, eet::kTileInputs, eet::kTileReaders, eet::kTileRowBytes, eet::kTileRows, eet::kTileWarps;
using eet::WgmmaArgs;

constexpr int kThreads = kTileReaders + 64;  // one more warp fills the ring, one holds what is added
// With those that only take registers (threads_alone). A bound of 1,024 leaves each 64, so that a norm's block finds room,
// too. Two tiles need more: two of their blocks may share a multiprocessor.
template <int kTiles>
constexpr int kMostThreads = kTiles > 1 ? kThreads : 1024;

// Why      for more tokens than fit in registers or beside a ring, cuBLAS asks for weights when the kernel ahead has ended
//          and leaves norm, bias, activation and residual to launches of their own
// Mapping  a cluster of 1, 2 or 4 blocks has an equal share of the outputs, each block an equal part of their inputs; one
//          thread keeps a ring of stages filled, each 64 inputs of up to 128 outputs and of all tokens, which two
//          warpgroups multiply in turn; blocks of a cluster send their sums to who finishes the tokens
// Traffic  N*K weights once, T*K activations for each cluster (from L2) and tile, T*N out; 100 KiB on their way a block
// Needs    sm_90a; K a multiple of 8; at most 64 tokens
// Numerics tensor cores; fp32 sums of the parts of the inputs, added in a fixed order; bias, activation, residual in fp32, rounded
//          once
// Source   ours; the ring as in linear.cu, the tiles as in hopper_attention.cu
template <typename T, int kTokens, int kTiles>
__global__ void __launch_bounds__(kMostThreads<kTiles>, kTiles > 1 ? 2 : 1)
    wgmma_linear_kernel(const __grid_constant__ WgmmaArgs<T> a) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  extern __shared__ __align__(1024) char shared[];
  eet::let_next_begin();
  float* const sums = reinterpret_cast<float*>(shared + a.sums_at);  // [groups,T,sum_stride]
  T* const held = reinterpret_cast<T*>(shared + a.held_at);
  const eet::Ring ring{shared, reinterpret_cast<uint64_t*>(shared + a.barriers_at), a.num_stages, a.stage_bytes()};
  uint64_t* const mail_counter = ring.barriers + 2 * a.num_stages;  // of a cluster
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
  const bool is_cluster = a.log_cluster > 0;

  if (threadIdx.x == kTileReaders) {
    eet::prefetch_map(a.weights), eet::prefetch_map(a.inputs);
    ring.init(4);
    if (is_cluster) eet::open_for_sums(a, mail_counter);
  }
  __syncthreads();
  if (warp >= kTileWarps) {
    if (is_cluster && !eet::kWaitsTogether) eet::cluster_arrive();
    if (warp == kTileWarps + 1) {
      eet::hold_tiles(a, held);
    } else if (threadIdx.x == kTileReaders) {
      eet::fill_ring(a, ring);
    }
    __syncwarp();
    if (is_cluster && warp != kTileWarps + 1) {
      if (eet::kWaitsTogether) eet::cluster_arrive();
      eet::cluster_wait();
    }
    return;
  }
  eet::TilePart at(a);
  eet::wait_for_previous();
  const int group = __shfl_sync(0xffffffffu, warp / 4, 0);
  int turn = 0;  // of the groups
  eet::RingPlace place;
#pragma unroll 1
  while (at.has_more()) {
    const int n = at.n, num_rows = min(a.tile, at.end - n);
    // A product reads whole tiles, into the next stage and behind the last one: such rows and columns are never used.
    float c[kTiles][kTokens / 2] = {};
    int before = -1;
#pragma unroll 1
    for (int step = 0; step < at.steps; ++step, at.next(), place.step(a.num_stages), turn ^= 1) {
      if (turn != group) continue;
      eet::barrier_wait(ring.filled(place), place.parity);
      const char* const stage = ring.stages + place.stage * ring.stage_bytes;
      const uint64_t weights = eet::tile_of(stage), inputs = eet::tile_of(stage + a.tile_bytes());
      eet::products_begin();
#pragma unroll
      for (int k = 0; k < kTileInputs; k += 16) {
#pragma unroll
        for (int tile = 0; tile < kTiles; ++tile) {
          eet::product<T, kTokens>(c[tile], eet::further(weights, tile * kTileRows * kTileRowBytes + 2 * k),
                                   eet::further(inputs, 2 * k), true);
        }
      }
      eet::products_commit();
      if (before >= 0) {
        eet::products_wait<1>();
        ring.release({before, 0});
      }
      before = place.stage;
    }
    eet::products_wait<0>();
#pragma unroll
    for (auto& part : c) eet::settle(part);
    if (before >= 0) ring.release({before, 0});
    if (is_cluster) eet::cluster_arrive();
    eet::barrier(2, kTileReaders);  // sums may lie where others still multiply

#pragma unroll
    for (int tile = 0; tile < kTiles; ++tile) {
      const int output = tile * kTileRows + warp % 4 * 16 + g;
      float* const to = sums + group * a.group_sums() + 2 * t * a.sum_stride() + output;
#pragma unroll
      for (int i = 0; i < kTokens / 2; ++i) {
        const int token = i / 4 * 8 + i % 2, further = i / 2 % 2 * 8;
        if (token + 2 * t < a.num_tokens && output + further < a.tile) to[token * a.sum_stride() + further] = c[tile][i];
      }
    }
    const float* parts = sums;
    if (is_cluster) {
      float* const mail = sums + kTileGroups * a.group_sums();
      eet::barrier(2, kTileReaders);
      eet::cluster_wait();
      eet::send_sums(a, sums, mail, mail_counter);
      eet::wait_for_mail(mail_counter);
      parts = mail;
    }
    eet::barrier(1, kTileReaders + 32);
    const int num_parts = is_cluster ? 1 << a.log_cluster : kTileGroups;
    eet::finish<2 * kTiles>(a, parts, num_parts, is_cluster ? a.sent_sums() : a.group_sums(), held, n, num_rows);
    if (!is_cluster) eet::barrier(1, kTileReaders + 32);
  }
#endif
}

// Clusters of this size that run at once, each block on a multiprocessor of its own: some of those are left over.
template <typename Kernel>
int most_clusters(Kernel kernel, int log_cluster, int num_blocks) {
  if (!log_cluster) return num_blocks;
  int found = 0;
  cudaLaunchAttribute attribute{};
  attribute.id = cudaLaunchAttributeClusterDimension;
  attribute.val.clusterDim.x = 1 << log_cluster;
  attribute.val.clusterDim.y = attribute.val.clusterDim.z = 1;
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(num_blocks >> log_cluster << log_cluster);
  config.blockDim = dim3(kThreads);
  config.dynamicSmemBytes = eet::whole_shared();
  config.attrs = &attribute, config.numAttrs = 1;
  if (eet::allow_shared(kernel, eet::whole_shared())) return 0;
  if (cudaOccupancyMaxActiveClusters(&found, kernel, &config)) return 0;
  return min(found, num_blocks >> log_cluster);
}

// Whether N outputs of K inputs can be divided so.
bool can_divide(int N, int K, int num_clusters, int log_cluster, int tile) {
  if (num_clusters < 1 || num_clusters > N || tile < 1 || tile > eet::kMostOutputs) return false;
  return log_cluster >= 0 && log_cluster <= eet::kMostLogCluster && eet::ceil_div(K, kTileInputs) >> log_cluster;
}

// Whether Python's plan (eet_lab/ops/cuda/plan.py) has room for what a block keeps in `shared_bytes`.
template <int kTokens, int kTiles, typename T>
bool is_sane(const WgmmaArgs<T>& a, int shared_bytes) {
  const int stage = a.stage_bytes(), tiles = a.num_tiles();
  const int mail = a.log_cluster ? a.sent_sums() << a.log_cluster : 0;
  const int sums = (kTileGroups * a.group_sums() + mail) * int(sizeof(float));
  if (a.log_cluster && (tiles > 1 || a.tile > kTileRows)) return false;
  // Whole tiles are read: what lies behind the last stage has to be there.
  const int beyond = max(kTiles * kTileRows * kTileRowBytes, a.tile_bytes() + kTokens * kTileRowBytes) - stage;
  const int needed = eet::ceil_div(a.num_steps(), 1 << a.log_cluster) * tiles;
  const int held_tokens = a.residual ? a.each() : 0;
  const int held = (held_tokens + 1) * a.tile * int(sizeof(T));
  if (!eet::Ring::fits(a.num_stages, stage, shared_bytes)) return false;
  // A stage is the same warpgroup's in every round (LOG), which keeps one of its own while it waits for the next.
  if (a.num_stages < needed && (a.num_stages % kTileGroups || a.num_stages < 2 * kTileGroups)) return false;
  const int ring = a.num_stages * stage, barriers = (a.num_stages + (a.log_cluster > 0)) * 2 * int(sizeof(uint64_t));
  if (a.sums_at % 16 || a.held_at % 16 || a.barriers_at % 16 || a.sums_at < (tiles > 1 ? ring : 0)) return false;
  return a.held_at >= ring + beyond && a.held_at - sums >= a.sums_at && a.barriers_at - held >= a.held_at &&
         a.barriers_at <= shared_bytes - barriers;
}

// Threads of a block, so many that two of them have not registers enough on one multiprocessor, while one and a block of
// kThreads have. Else a multiprocessor that is without a block of the kernel ahead gets two of this one, which take turns
// at its memory, while others have none: 2 us a launch (LOG).
template <typename Kernel>
int threads_alone(Kernel kernel) {
  cudaFuncAttributes of{};
  if (cudaFuncGetAttributes(&of, kernel)) {
    cudaGetLastError();  // it is no later call's
    return kThreads;
  }
  const int warp_registers = eet::ceil_div(of.numRegs, 8) * 8 * 32;
  const int more_than_half = eet::device_attribute(cudaDevAttrMaxRegistersPerMultiprocessor) / (2 * warp_registers) + 1;
  return min(max(32 * more_than_half, kThreads), of.maxThreadsPerBlock);
}

template <int kTokens, int kTiles, typename T>
cudaError_t launch_tiles(const WgmmaArgs<T>& a, int shared_bytes, int num_clusters, bool dependent,
                         cudaStream_t stream) {
  if (!is_sane<kTokens, kTiles>(a, shared_bytes)) return cudaErrorInvalidValue;
  const int cluster = 1 << a.log_cluster;
  const auto kernel = wgmma_linear_kernel<T, kTokens, kTiles>;
  static const int alone = threads_alone(kernel);
  // Without a residual a block takes less than half of the shared memory (plan.py), with one more than half.
  const int threads = a.residual ? kThreads : alone;
  return eet::launch(kernel, {dim3(num_clusters * cluster), threads, shared_bytes, stream, cluster, dependent}, a);
}

template <int kTokens, typename T>
cudaError_t launch_wgmma(WgmmaArgs<T> a, int shared_bytes, int num_clusters, bool dependent, cudaStream_t stream) {
  const auto map = [&](CUtensorMap* to, const T* from, int rows, int box) {
    return eet::make_tensor_map(to, from, a.K, 1, a.K, rows, a.K, 1, int64_t(a.K) * rows, box);
  };
  if (cudaError_t error = map(&a.weights, a.weight, a.N, a.tile)) return error;
  if (cudaError_t error = map(&a.inputs, a.x, a.num_tokens, a.num_tokens)) return error;
  return a.tile <= kTileRows ? launch_tiles<kTokens, 1>(a, shared_bytes, num_clusters, dependent, stream)
                             : launch_tiles<kTokens, 2>(a, shared_bytes, num_clusters, dependent, stream);
}

}  // namespace

// out = act(x weight^T + bias) + residual, for at most 64 tokens. `log_cluster`: blocks of a cluster, as a power of two.
extern "C" cudaError_t eet_wgmma_linear(void* out, const void* x, const void* weight, const void* bias,
                                        const void* residual, int dtype, int T, int N, int K, int act, int num_clusters,
                                        int log_cluster, int tile, int num_stages, int sums_at, int held_at,
                                        int barriers_at, int shared_bytes, int dependent, cudaStream_t stream) {
  if (eet::device_attribute(cudaDevAttrComputeCapabilityMajor) != 9) return cudaErrorInvalidValue;
  if (T < 1 || T > eet::kMostTileTokens || N < 1 || K < 8 || K % 8) return cudaErrorInvalidValue;
  if (!can_divide(N, K, num_clusters, log_cluster, tile)) return cudaErrorInvalidValue;
  return eet::by_half_type(dtype, [&](auto type) {
    using Type = decltype(type);
    WgmmaArgs<Type> a(out, nullptr, x, nullptr, weight, bias, residual, nullptr, nullptr, T, N, K, act, 0.f,
                      num_clusters);
    a.log_cluster = log_cluster, a.tile = tile, a.num_stages = num_stages;
    a.sums_at = sums_at, a.held_at = held_at, a.barriers_at = barriers_at;
    return T <= 32 ? launch_wgmma<32>(a, shared_bytes, num_clusters, dependent, stream)
                   : launch_wgmma<64>(a, shared_bytes, num_clusters, dependent, stream);
  });
}

// Clusters of 1, 2 and 4 blocks: `found` [3], the host's, gets how many of them run at once on `num_blocks`
// multiprocessors. Nothing is launched.
extern "C" cudaError_t eet_wgmma_clusters(int* found, int dtype, int T, int num_blocks) {
  return eet::by_half_type(dtype, [&](auto type) {
    using Type = decltype(type);
    const auto kernel = T <= 32 ? wgmma_linear_kernel<Type, 32, 1> : wgmma_linear_kernel<Type, 64, 1>;
    for (int log = 0; log <= eet::kMostLogCluster; ++log) found[log] = most_clusters(kernel, log, num_blocks);
    return cudaSuccess;
  });
}
