// From block index to the tile, head and batch entry that it computes.
#pragma once

#include "core/params.cuh"

namespace cuflash {

struct TileCoordinate {
  int query_tile, head, batch;

  // Query tiles of one head are neighbours, so that the blocks in flight share that head's keys and values in L2. With
  // a band the last query tile sees the most keys and goes first, so that no long tile starts when the others are done.
  //
  // The grid is (query tiles, heads, batch): block coordinates then stay in uniform registers, where a division would
  // put them, and every pointer made from them, into vector registers. The launcher splits a batch that is larger than
  // a grid.
  template <bool LongestFirst>
  static __device__ __forceinline__ TileCoordinate of_block(const ForwardParams& p) {
    const int tile = blockIdx.x;
    return {LongestFirst ? p.query_tiles - 1 - tile : tile, static_cast<int>(blockIdx.y), static_cast<int>(blockIdx.z)};
  }
};

// The key tile, key/value head and batch entry of a block whose grid is (key tiles, heads_kv, batch). Under a causal
// mask the first key tile is seen by the most queries, and goes first; or with LastFirst it goes last.
struct KeyTileCoordinate {
  int key_tile, head, batch;

  template <bool LastFirst>
  static __device__ __forceinline__ KeyTileCoordinate of_block() {
    const int tile = LastFirst ? gridDim.x - 1 - blockIdx.x : blockIdx.x;
    return {tile, static_cast<int>(blockIdx.y), static_cast<int>(blockIdx.z)};
  }
};

}  // namespace cuflash
