// The choice of the next token among a row's logits: arg-max, or a draw after temperature, top-k and top-p.
// B rows, V vocabulary.
#include "eet/dependent.cuh"
#include "eet/launch.cuh"
#include "eet/logits_row.cuh"

namespace {

using eet::ChooseArgs, eet::kChoosers;

// Why      PyTorch sorts all tokens and makes ten passes over them, and noise in 64-bit integers, for a single number
// Mapping  a cluster of up to 16 blocks a row: grid (cluster, B), 512 threads. Thresholds are found without a sort: a
//          pass for every 4 bits, in which each thread has 16 bins of its own: nothing is atomic, and sums do not vary
// Traffic  V logits a row, from L2 and then from L1: one pass for an arg-max or a plain draw; top-k, 4 to 8 more;
//          top-p as many, and one
// Needs    nothing: any V; -inf is never drawn beside a finite logit
// Numerics scores, noise and masses in fp32: the draw that PyTorch makes of the same logits; tokens that tie with the
//          last one of the top-k or top-p stay
// Source   Gumbel-max: Kool et al. 2019; selection by digits as in torch.topk; by masses, after FlashInfer's top-p
template <typename T>
__global__ void __launch_bounds__(kChoosers) choose_kernel(const ChooseArgs<T> a) {
  __shared__ typename eet::Row<T>::Weights weights;
  __shared__ eet::Choice how;
  __shared__ uint32_t key;
  eet::cluster_arrive();  // who puts something into another block's memory has to know that it is there
  eet::wait_for_previous();
  eet::let_next_begin();
  if (threadIdx.x == 0) how = a.choice(blockIdx.y);
  if (threadIdx.x == 32) key = a.draw.key(blockIdx.y);  // in another warp, which waits for its own loads
  eet::Row<T> row(a, weights);
  __syncthreads();
  row.scale = how.scale;
  const eet::Gumbel noise(key);
  eet::cluster_wait();
  const uint64_t chosen = row.chosen(how, noise);
  if (blockIdx.x == 0 && threadIdx.x == 0) a.token[blockIdx.y] = eet::word_of(chosen);
}

// Why      the LM head's blocks already know the largest of their share, with the noise of a draw or without: its logits
//          are never written
// Mapping  a warp a row: grid B, 32 threads
// Traffic  num_blocks pairs of 8 bytes a row
// Needs    pairs as linear.cuh leaves them: larger for a larger logit, and where logits tie for a lower token
// Numerics integers
// Source   arg-max is associative
__global__ void choose_best_kernel(int64_t* token, const uint64_t* best, int num_blocks) {
  eet::wait_for_previous();
  eet::let_next_begin();
  uint64_t mine = 0;
  for (int i = threadIdx.x; i < num_blocks; i += 32) mine = max(mine, best[int64_t(blockIdx.x) * num_blocks + i]);
  mine = eet::warp_max(mine);
  if (threadIdx.x == 0) token[blockIdx.x] = eet::word_of(mine);
}

}  // namespace

// token = arg-max of logits in rows whose temperature [B] is 0, else a draw after the row's top_k and top_p [B]. Without
// `noise` all rows get their arg-max, and without top_k and top_p there are no limits.
extern "C" cudaError_t eet_choose(int64_t* token, const void* logits, const int64_t* positions, const int64_t* noise,
                                  const float* temperature, const int64_t* top_k, const float* top_p, int dtype, int B,
                                  int V, int dependent, cudaStream_t stream) {
  return eet::by_type(dtype, [&](auto type) {
    using Type = decltype(type);
    const ChooseArgs<Type> a(token, logits, {noise, temperature, positions, nullptr}, top_k, top_p, V);
    return eet::launch_on_rows(choose_kernel<Type>, a, B, dependent != 0, stream);
  });
}

// token = the token of the largest of `best` [B,num_blocks].
extern "C" cudaError_t eet_choose_best(int64_t* token, const int64_t* best, int B, int num_blocks, int dependent,
                                       cudaStream_t stream) {
  return eet::launch(choose_best_kernel, {dim3(B), 32, 0, stream, 1, dependent != 0}, token,
                     reinterpret_cast<const uint64_t*>(best), num_blocks);
}
