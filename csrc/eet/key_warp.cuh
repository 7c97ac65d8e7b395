// What one warp does in decode attention: 16 keys at a time, from memory to softmax and outputs. D head dim; g and t
// number a lane: 4g + t.
#pragma once

#include "eet/attention.cuh"
#include "eet/mma.cuh"
#include "eet/vec.cuh"

namespace eet {

constexpr int kTileKeys = 16;  // keys that a warp handles at a time: a tile

// Where the columns of a row and KV head lie, from a lane's first number on. Past the last one, the last is read again.
template <typename T>
struct Columns {
  const T* base;
  int stride_bytes, last;

  // One instruction; the compiler would make six of it.
  __device__ const T* operator()(int k) const {
    const T* at;
    asm("mad.wide.s32 %0, %1, %2, %3;" : "=l"(at) : "r"(min(k, last)), "r"(stride_bytes), "l"(base));
    return at;
  }
};

// One warp, 16 keys at a time. The order of the inner dimension and of the output channels is ours to choose, so the 16
// bytes that a lane loads are already its fragments of an mma, and nothing passes through shared memory.
//   scores  [head g, key]   = q[16 heads (8 used), D] * keys^T:  lane 4g+t holds inputs 8t.. of key g
//   outputs [channel, head] = values^T * weights^T:              lane 4g+t holds channels 8g.. of keys 2t and 2t+1
// Where D ends before kDim does, a lane reads the last 8 again: q is 0 there, and such outputs are not stored.
template <typename T, int kDim, bool kExact>
struct KeyWarp {
  static constexpr int kSteps = kDim / 32;          // 32 inputs of a key by four lanes
  static constexpr int kBlocks = (kDim + 63) / 64;  // 64 channels of a value by eight lanes
  uint4 q[kSteps], key[2][kSteps], value[4][kBlocks], new_key[kSteps], new_value[kBlocks];
  float out[kBlocks][4][4] = {}, sum[4] = {};  // sum: of weights, for heads 2t and 2t+1
  float max = kLowest;
  const int D, g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;

  __device__ explicit KeyWarp(int D) : D(kExact ? kDim : D) {}

  // Of a tile's keys, the four whose scores and values this lane has.
  __device__ int key_of(int i) const { return i / 2 * 8 + 2 * t + i % 2; }
  // Where a lane's inputs of a key and channels of a value begin.
  __device__ int input(int step) const { return kExact ? step * 32 + t * 8 : min(step * 32 + t * 8, D - 8); }
  __device__ int channel(int block) const { return kExact ? block * 64 + g * 8 : min(block * 64 + g * 8, D - 8); }

  __device__ void load_query(const T* from) {
#pragma unroll
    for (int i = 0; i < kSteps; ++i) {
      q[i] = kExact || i * 32 + t * 8 < D ? load(from + input(i)) : zeros();
    }
  }

  // `at(k)` is where the lane's part of key or value k begins.
  template <typename At>
  __device__ void load_keys(int tile, At at) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const T* from = at(tile + half * 8 + g);
#pragma unroll
      for (int i = 0; i < kSteps; ++i) key[half][i] = load_once(from + (input(i) - input(0)));
    }
  }

  template <typename At>
  __device__ void load_values(int tile, At at) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const T* from = at(tile + key_of(i));
#pragma unroll
      for (int block = 0; block < kBlocks; ++block) {
        value[i][block] = load_once(from + (channel(block) - channel(0)));
      }
    }
  }

  // The newest key and value come from qkv; what the cache has in their place is of no use yet.
  __device__ void load_newest(const T* its_key, const T* its_value) {
#pragma unroll
    for (int i = 0; i < kSteps; ++i) new_key[i] = load(its_key + input(i));
#pragma unroll
    for (int i = 0; i < kBlocks; ++i) new_value[i] = load(its_value + channel(i));
  }
  // Query and newest key, which were loaded; only for exact heads of a multiple of 64.
  template <typename Rotation, typename Prepared>
  __device__ void rotate(const Rotation& rotation, const Prepared& prepared) {
    rotation.query(q, prepared, t);
    rotation.key(new_key, prepared, t);
  }

  __device__ void store_newest(T* its_key, T* its_value) const {
#pragma unroll
    for (int i = 0; i < kSteps; ++i) {
      if (g == 0) store(its_key + input(i), new_key[i]);
    }
#pragma unroll
    for (int i = 0; i < kBlocks; ++i) {
      if (t == 0) store(its_value + channel(i), new_value[i]);
    }
  }
  __device__ void put_newest(int k) {
#pragma unroll
    for (int i = 0; i < 2 * kSteps; ++i) {
      if (i / kSteps * 8 + g == k) key[i / kSteps][i % kSteps] = new_key[i % kSteps];
    }
#pragma unroll
    for (int i = 0; i < 4 * kBlocks; ++i) {
      if (key_of(i / kBlocks) == k) value[i / kBlocks][i % kBlocks] = new_value[i % kBlocks];
    }
  }

  // Hidden keys weigh nothing. Their values become 0: what lies there may be no number.
  template <typename Hidden>
  __device__ void hide_keys(float (&score)[4], Hidden hidden) const {
#pragma unroll
    for (int i = 0; i < 4; ++i) score[i] = hidden(key_of(i)) ? -INFINITY : score[i];
  }
  template <typename Hidden>
  __device__ void hide_values(Hidden hidden) {
#pragma unroll
    for (int i = 0; i < 4 * kBlocks; ++i) {
      if (hidden(key_of(i / kBlocks))) value[i / kBlocks][i % kBlocks] = zeros();
    }
  }

  // score[i]: head g against key_of(i).
  __device__ void multiply_keys(float (&score)[4]) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      float c[2][4] = {};
#pragma unroll
      for (int i = 0; i < kSteps; ++i) {
        const uint4 k = key[half][i];
        mma<T>(c[0], q[i].x, 0, q[i].y, 0, k.x, k.y);
        mma<T>(c[1], q[i].z, 0, q[i].w, 0, k.z, k.w);
      }
      score[half * 2] = c[0][0] + c[1][0];
      score[half * 2 + 1] = c[0][1] + c[1][1];
    }
  }

  // Online softmax of scores in units of log2(e); leaves weights in their place.
  __device__ void weigh(float (&score)[4], bool is_first) {
    const float largest = fmaxf(fmaxf(score[0], score[1]), fmaxf(score[2], score[3]));
    const float new_max = fmaxf(max, warp_max<4>(largest));
    if (!is_first) {
      const float shrink = exp2_of(max - new_max);
      const float of_even = __shfl_sync(0xffffffffu, shrink, t * 8);  // of the lane's outputs: heads 2t and 2t+1
      const float of_odd = __shfl_sync(0xffffffffu, shrink, t * 8 + 4);
      sum[0] *= of_even, sum[1] *= of_odd;
#pragma unroll
      for (auto& block : out) {
#pragma unroll
        for (auto& c : block) c[0] *= of_even, c[1] *= of_odd, c[2] *= of_even, c[3] *= of_odd;
      }
    }
    max = new_max;
#pragma unroll
    for (float& s : score) s = exp2_of(s - max);
  }

  __device__ void multiply_values(const float (&weight)[4]) {
    const uint32_t b0 = pack2<T>(weight[0], weight[1]), b1 = pack2<T>(weight[2], weight[3]);
    const uint32_t ones = pack2<T>(1.f, 1.f);
    mma<T>(sum, ones, 0, ones, 0, b0, b1);
#pragma unroll
    for (int block = 0; block < kBlocks; ++block) {
      const uint4 &v00 = value[0][block], &v01 = value[1][block], &v10 = value[2][block], &v11 = value[3][block];
      const uint32_t low[4][2] = {{v00.x, v01.x}, {v00.y, v01.y}, {v00.z, v01.z}, {v00.w, v01.w}};
      const uint32_t high[4][2] = {{v10.x, v11.x}, {v10.y, v11.y}, {v10.z, v11.z}, {v10.w, v11.w}};
#pragma unroll
      for (int i = 0; i < 4; ++i) {  // channels 8g + 2i and 8g + 2i + 1
        mma<T>(out[block][i], __byte_perm(low[i][0], low[i][1], 0x5410),
                    __byte_perm(low[i][0], low[i][1], 0x7632), __byte_perm(high[i][0], high[i][1], 0x5410),
                    __byte_perm(high[i][0], high[i][1], 0x7632), b0, b1);
      }
    }
  }

  // Its outputs [num_heads][D], not yet divided by the sums, and for each head the maximum and the sum.
  __device__ void leave(float4* outs, float2* stats, int num_heads) const {
    if (t == 0) stats[g].x = max;
    if (g == 0) stats[2 * t].y = sum[0], stats[2 * t + 1].y = sum[1];
#pragma unroll
    for (int i = 0; i < kBlocks * 2; ++i) {
      const int h = 2 * t + i % 2, first = i / 2 * 64 + g * 8;
      const auto& c = out[i / 2];
      if (h >= num_heads || (!kExact && first >= D)) continue;
      float4* to = outs + (h * D + first) / 4;
      to[0] = make_float4(c[0][i % 2], c[0][2 + i % 2], c[1][i % 2], c[1][2 + i % 2]);
      to[1] = make_float4(c[2][i % 2], c[2][2 + i % 2], c[3][i % 2], c[3][2 + i % 2]);
    }
  }
};

}  // namespace eet
