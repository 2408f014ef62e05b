// Which query tiles a block of the persistent grid computes, in which order. Every warp of the block works it out for
// itself, and no block waits for another.
#pragma once

#include "core/params.cuh"
#include "core/scheduler.cuh"

namespace cuflash {

// Query tiles of `section` (batch, head) pairs together, section after section: as many as share the L2 cache with
// their keys and values. In a section of more than one the longest tiles of all its heads come first.
struct WorkList {
  int tiles, section;

  template <bool LongestFirst>
  __device__ __forceinline__ TileCoordinate coordinate(const ForwardParams& p, int index) const {
    const int section_tiles = section * p.query_tiles;
    const int first = index / section_tiles * section;
    const int size = min(section, tiles / p.query_tiles - first);
    const int rest = index - first * p.query_tiles;
    const int tile = rest / size, pair = first + rest % size;
    return {LongestFirst ? p.query_tiles - 1 - tile : tile, pair % p.heads_q, pair / p.heads_q};
  }

  // The block's n-th tile. With a band the blocks take turns back and forth, so that who got the longest tile of one
  // round gets the shortest of the next.
  template <bool LongestFirst>
  static __device__ __forceinline__ int index(int n) {
    const int grid = gridDim.x, block = blockIdx.x;
    return n * grid + (LongestFirst && n % 2 ? grid - 1 - block : block);
  }
};

}  // namespace cuflash
