// Before the backward kernels: delta = rowsum(dO * O) - dlse of every row, and zeros in the sums of dQ
// (FlashAttention-2, Dao 2023, section 3.2, algorithm 2, line 4). P's gradient needs delta since the weights of a row
// sum to 1; lse moves with the scores by P, so its gradient enters as one more term.
//
// Grid: (padded_rows / tile_m, heads_q, batch).
#include "core/params.cuh"
#include "core/scheduler.cuh"
#include "core/types.cuh"

namespace cuflash {

constexpr int kThreads = 32 * Config::warps;
constexpr int kRowThreads = 8;  // threads that share a row

// Elements [0, valid) of a chunk of 8, in pieces of VectorBytes; the others are 0.
template <int VectorBytes>
__device__ __forceinline__ uint4 load_chunk(const char* source, int valid) {
  if constexpr (VectorBytes == 16) {
    if (valid >= 8) return *reinterpret_cast<const uint4*>(source);
  }
  unsigned words[4];
#pragma unroll
  for (int w = 0; w < 4; ++w) {
    if (VectorBytes >= 4 && 2 * w + 1 < valid) {
      words[w] = *reinterpret_cast<const unsigned*>(source + 4 * w);
    } else {
      const unsigned short* pair = reinterpret_cast<const unsigned short*>(source) + 2 * w;
      const unsigned low = 2 * w < valid ? pair[0] : 0, high = 2 * w + 1 < valid ? pair[1] : 0;
      words[w] = low | high << 16;
    }
  }
  return make_uint4(words[0], words[1], words[2], words[3]);
}

__device__ __forceinline__ float add_products(unsigned x, unsigned y, float sum) {
  using Element = Config::element;
  sum = fmaf(unpack<Element>(static_cast<unsigned short>(x)), unpack<Element>(static_cast<unsigned short>(y)), sum);
  return fmaf(unpack<Element>(static_cast<unsigned short>(x >> 16)),
              unpack<Element>(static_cast<unsigned short>(y >> 16)), sum);
}

// This thread's part of rowsum(dO * O): every kRowThreads-th chunk.
__device__ __forceinline__ float partial_delta(const char* dout, const char* out, int head_dim_v, int first_chunk) {
  float sum = 0.0f;
#pragma unroll 4
  for (int chunk = first_chunk; 8 * chunk < head_dim_v; chunk += kRowThreads) {
    const int valid = head_dim_v - 8 * chunk;
    const uint4 x = load_chunk<Config::vector_bytes>(dout + 16 * chunk, valid);
    const uint4 y = load_chunk<Config::vector_bytes>(out + 16 * chunk, valid);
    sum = add_products(x.x, y.x, sum);
    sum = add_products(x.y, y.y, sum);
    sum = add_products(x.z, y.z, sum);
    sum = add_products(x.w, y.w, sum);
  }
  return sum;
}

// rowsum(dO * O) - dlse of a row; 0 for rows past the end and for rows without keys, which have no gradient.
__device__ __forceinline__ float row_delta(const BackwardParams& p, const TileCoordinate& c, int row, int first_chunk) {
  float sum = 0.0f;
  if (row < p.seqlen_q) {
    const char* dout = static_cast<const char*>(p.dout) + c.batch * p.dout_batch + c.head * p.dout_head;
    const char* out = static_cast<const char*>(p.out) + c.batch * p.out_batch + c.head * p.out_head;
    sum = partial_delta(dout + row * p.dout_row, out + row * p.out_row, p.head_dim_v, first_chunk);
  }
#pragma unroll
  for (int distance = kRowThreads / 2; distance > 0; distance /= 2) sum += __shfl_xor_sync(0xFFFFFFFFu, sum, distance);
  if (p.dlse != nullptr && row < p.seqlen_q)
    sum -= p.dlse[(static_cast<int64>(c.batch) * p.heads_q + c.head) * p.seqlen_q + row];
  return sum;
}

}  // namespace cuflash

extern "C" __global__ void __launch_bounds__(32 * Config::warps)
    sm80_backward_prepare(const __grid_constant__ cuflash::BackwardParams p) {
  using namespace cuflash;
  const TileCoordinate c = TileCoordinate::of_block<false>(p);
  const int thread = threadIdx.x;
  const int64 first_row =
      (static_cast<int64>(c.batch) * p.heads_q + c.head) * p.padded_rows + c.query_tile * Config::tile_m;
  if constexpr (Config::accumulate_dq) {
    uint4* sums = reinterpret_cast<uint4*>(p.dq_sum + first_row * Config::tile_d);
#pragma unroll 4
    for (int i = thread; i < Config::tile_m * Config::tile_d / 4; i += kThreads) sums[i] = make_uint4(0, 0, 0, 0);
  }
#pragma unroll 1
  for (int row = thread / kRowThreads; row < Config::tile_m; row += kThreads / kRowThreads) {
    const float delta = row_delta(p, c, c.query_tile * Config::tile_m + row, thread % kRowThreads);
    if (thread % kRowThreads == 0) p.delta[first_row + row] = delta;
  }
}
