// Bringing the next block's inputs into L2 while this one computes. A block that has a multiprocessor to itself has nothing
// to overlap its first loads with; from L2 they take a fraction of the time they take from memory.
#pragma once

#include "core/scheduler.cuh"
#include "ptx/prefetch.cuh"

namespace cuflash {

// Rows [begin, end) of row_bytes each, spread over Threads threads by cache line.
template <int Threads>
__device__ __forceinline__ void prefetch_rows(const char* base, int64 row_stride, int row_bytes, int begin, int end, int thread) {
  for (int row = begin + thread; row < end; row += Threads) {
    for (int offset = 0; offset < row_bytes; offset += 128) prefetch_l2(base + row * row_stride + offset);
  }
}

// The successor's query rows, and its share of the keys and values that the blocks of one head read together.
template <int TileM, int Threads>
__device__ __forceinline__ void prefetch_inputs(const ForwardParams& p, const TileCoordinate& c, int thread) {
  if (c.batch >= static_cast<int>(gridDim.z)) return;
  const int row = c.query_tile * TileM;
  const char* gQ = static_cast<const char*>(p.q) + c.batch * p.q_batch + c.head * p.q_head;
  prefetch_rows<Threads>(gQ, p.q_row, 2 * p.head_dim, row, min(row + TileM, p.seqlen_q), thread);
  if (c.head % p.group != 0) return;
  const int share = min((p.seqlen_k + p.query_tiles - 1) / p.query_tiles, 2 * TileM);
  const int begin = c.query_tile * share, end = min(begin + share, p.seqlen_k);
  const char* gK = static_cast<const char*>(p.k) + c.batch * p.k_batch + c.head / p.group * p.k_head;
  const char* gV = static_cast<const char*>(p.v) + c.batch * p.v_batch + c.head / p.group * p.v_head;
  prefetch_rows<Threads>(gK, p.k_row, 2 * p.head_dim, begin, end, thread);
  prefetch_rows<Threads>(gV, p.v_row, 2 * p.head_dim_v, begin, end, thread);
}

}  // namespace cuflash
