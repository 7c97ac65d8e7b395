// Products of int8 weights with a few tokens' activations.
#pragma once

#include "eet/int8.cuh"
#include "eet/linear_tiles.cuh"
#include "eet/mma.cuh"
#include "eet/vec.cuh"

namespace eet {

constexpr int kInt8Chunk = 64;  // inputs in one step of a warp: 16 weights a lane

// A warp's part of out^T[16 outputs, tokens]; lane 4g+t takes 16 weights of outputs g and g + 8 at a time: four mma.
// kGrouped: an output's inputs have scales in groups, which multiply the sums of a step; else `scales` are not used.
template <typename T, int kTokens, bool kGrouped>
struct Int8Product {
  static constexpr int kChunk = kInt8Chunk, kHalves = (kTokens + 7) / 8;
  float sum[kHalves][2][4] = {};  // two, so that one mma need not wait for the other
  float scaled[kHalves][4] = {};  // of groups, with their scales
  const T* x;
  int next;  // from a token to the one 8 later

  __device__ Int8Product(const T* rows, int stride, int num_tokens) {
    const int g = threadIdx.x % 32 / 4;
    x = rows + min(g, num_tokens - 1) * stride;  // past the last token: the last again; such sums are never read
    next = (min(g + 8, num_tokens - 1) - min(g, num_tokens - 1)) * stride;
  }

  __device__ void add(uint4 low, uint4 high, float2 scales, int k, int) {
    const uint32_t lows[4] = {low.x, low.y, low.z, low.w}, highs[4] = {high.x, high.y, high.z, high.w};
#pragma unroll
    for (int i = 0; i < 4; i += 2) {
      uint32_t a[2][2], b[2][2];
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        widen<T>(lows[i + j], a[j]);
        widen<T>(highs[i + j], b[j]);
      }
#pragma unroll
      for (int half = 0; half < kHalves; ++half) {
        const uint4 v = load(x + half * next + k + i * 4);
        mma<T>(sum[half][0], a[0][0], b[0][0], a[0][1], b[0][1], v.x, v.y);
        mma<T>(sum[half][1], a[1][0], b[1][0], a[1][1], b[1][1], v.z, v.w);
      }
    }
    if constexpr (kGrouped) {
#pragma unroll
      for (int half = 0; half < kHalves; ++half) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          float &first = sum[half][0][i], &second = sum[half][1][i];
          scaled[half][i] += (first + second) * (i < 2 ? scales.x : scales.y);
          first = second = 0;
        }
      }
    }
  }

  __device__ void store(float* partial, int num_tokens) {
    store_fragments<kHalves>(partial, num_tokens, [&](int half, int i) {
      return kGrouped ? scaled[half][i] : sum[half][0][i] + sum[half][1][i];
    });
  }
};

// The same on CUDA cores, true fp32.
template <int kTokens, bool kGrouped>
struct Int8Product<float, kTokens, kGrouped> {
  static constexpr int kChunk = kInt8Chunk;
  const float* rows;
  int stride;
  float sum[2][kTokens] = {};

  __device__ Int8Product(const float* rows, int stride, int) : rows(rows), stride(stride) {}

  __device__ void add(uint4 low, uint4 high, float2 scales, int k, int num_tokens) {
    const uint32_t lows[4] = {low.x, low.y, low.z, low.w}, highs[4] = {high.x, high.y, high.z, high.w};
#pragma unroll
    for (int part = 0; part < 4; ++part) {
      float weight[2][4], x[4];
      widen(lows[part], weight[0]);
      widen(highs[part], weight[1]);
#pragma unroll
      for (int i = 0; kGrouped && i < 4; ++i) weight[0][i] *= scales.x, weight[1][i] *= scales.y;
#pragma unroll
      for (int token = 0; token < kTokens; ++token) {
        if (token >= num_tokens) break;
        unpack<float>(load(rows + token * stride + k + part * 4), x);
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          sum[0][token] += weight[0][i] * x[i];
          sum[1][token] += weight[1][i] * x[i];
        }
      }
    }
  }

  __device__ void store(float* partial, int num_tokens) { store_quarters(sum, partial, num_tokens); }
};

}  // namespace eet
