// From block index to the query tile, head and batch entry that it computes.
#pragma once

#include "core/params.cuh"

namespace cuflash {

struct TileCoordinate {
  int query_tile, head, batch;

  // Query tiles of one head are neighbours, so that the blocks in flight share that head's keys and values in L2. With a
  // band the last query tile sees the most keys and goes first, so that no long tile starts when the others are done.
  template <bool LongestFirst>
  static __device__ __forceinline__ TileCoordinate of_block(const ForwardParams& p) {
    const unsigned tile = blockIdx.x;
    const unsigned tiles = p.query_tiles;
    const unsigned rest = tile / tiles;
    const unsigned in_head = tile - rest * tiles;
    TileCoordinate c;
    c.query_tile = LongestFirst ? tiles - 1 - in_head : in_head;
    c.batch = rest / p.heads_q;
    c.head = rest - c.batch * p.heads_q;
    return c;
  }
};

}  // namespace cuflash
