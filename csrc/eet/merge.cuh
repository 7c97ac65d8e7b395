// How the parts of a row and head, which saw different keys, become one output: first in a block, then across a cluster.
// D head dim.
#pragma once

#include "eet/attention.cuh"
#include "eet/cluster.cuh"
#include "eet/launch.cuh"
#include "eet/vec.cuh"

namespace eet {

constexpr int kHeads = 8;  // query heads that a block of decode attention serves: the columns of an mma

// Four channels of a head, from parts that saw different keys: their sum, each scaled to the greatest maximum, and in
// `total` that maximum and the sum of weights.
template <int kParts>
__device__ float4 merged(const float4* outs, int out_stride, const float2* stats, int stat_stride, float2& total) {
  float2 stat[kParts];
  float4 out = {};
  total = make_float2(kLowest, 0);
#pragma unroll
  for (int j = 0; j < kParts; ++j) stat[j] = stats[j * stat_stride], total.x = fmaxf(total.x, stat[j].x);
#pragma unroll
  for (int j = 0; j < kParts; ++j) {
    const float4 part = outs[j * out_stride];
    const float share = exp2_of(stat[j].x - total.x);
    total.y += share * stat[j].y;
    out.x += share * part.x, out.y += share * part.y, out.z += share * part.z, out.w += share * part.w;
  }
  return out;
}

// The same for 2, 4 or 8 parts: all are loaded at once. A loop, or shuffles among lanes, took longer.
__device__ inline float4 merged(int num_parts, const float4* outs, int out_stride, const float2* stats, int stat_stride,
                         float2& total) {
  if (num_parts == 2) return merged<2>(outs, out_stride, stats, stat_stride, total);
  if (num_parts == 4) return merged<4>(outs, out_stride, stats, stat_stride, total);
  return merged<8>(outs, out_stride, stats, stat_stride, total);
}

// The same for any number of parts, one after the other.
__device__ inline float4 merged_in_turn(int num_parts, const float4* outs, int out_stride, const float2* stats,
                                        int stat_stride, float2& total) {
  float4 out = {};
  total = make_float2(kLowest, 0);
#pragma unroll 1
  for (int part = 0; part < num_parts; ++part) {
    const float4 more = outs[part * out_stride];
    const float2 its = stats[part * stat_stride];
    const float most = fmaxf(total.x, its.x), mine = exp2_of(total.x - most), share = exp2_of(its.x - most);
    total = make_float2(most, mine * total.y + share * its.y);
    out.x = mine * out.x + share * more.x, out.y = mine * out.y + share * more.y;
    out.z = mine * out.z + share * more.z, out.w = mine * out.w + share * more.w;
  }
  return out;
}

// How the parts of a row and head become its output: a block merges its warps' parts and sends each chunk of four
// channels to one block of the cluster, which merges what it gets. Block `rank` gets chunks rank, rank + cluster, ...
template <typename T>
struct Merge {
  float4* outs;   // [warps][chunks]
  float2* stats;  // [warps][kHeads], of a head: the maximum and the sum
  uint64_t* counter;
  int num_warps, chunks, rank, log_cluster, D;
  int cluster = 1 << log_cluster, slots = (chunks + cluster - 1) >> log_cluster;
  float4* mail = outs + num_warps * chunks;                                // [cluster][slots]
  float2* mail_stats = reinterpret_cast<float2*>(mail + cluster * slots);  // [cluster][slots]

  static int shared_bytes(int num_warps, int chunks, int cluster) {
    const int num_mail = cluster > 1 ? cluster * ceil_div(chunks, cluster) : 0;
    return (num_warps * chunks + num_mail) * sizeof(float4) + num_mail * sizeof(float2);
  }

  __device__ void open() const {
    if (cluster == 1) return;
    const int my_slots = (chunks - rank + cluster - 1) >> log_cluster;
    if (threadIdx.x == 0) open_mailbox(counter, my_slots * cluster * int(sizeof(float4) + sizeof(float2)));
    __syncwarp();
    cluster_arrive();
  }

  __device__ void send_or_store(T* out) const {
    for (int i = threadIdx.x; i < chunks; i += num_warps * 32) {
      float2 total;
      const float4 v = merged(num_warps, outs + i, chunks, stats + i * 4 / D, kHeads, total);
      if (cluster == 1) {
        store(out + i * 4, v, total.y);
        continue;
      }
      const int at = rank * slots + (i >> log_cluster), to = i & (cluster - 1);
      const uint32_t its_counter = at_block(counter, to);
      send(at_block(mail + at, to), v, its_counter);
      send(at_block(mail_stats + at, to), total, its_counter);
    }
  }

  __device__ void receive(T* out) const {
    for (int i = threadIdx.x; i * cluster + rank < chunks; i += num_warps * 32) {
      wait_for_mail(counter);
      float2 total;
      const float4 v = merged(cluster, mail + i, slots, mail_stats + i, slots, total);
      store(out + (i * cluster + rank) * 4, v, total.y);
    }
  }

  __device__ void store(T* to, float4 v, float sum) const {
    const float share = reciprocal(sum);
    const uint2 packed = make_uint2(pack2<T>(v.x * share, v.y * share), pack2<T>(v.z * share, v.w * share));
    *reinterpret_cast<uint2*>(to) = packed;
  }
};

}  // namespace eet
