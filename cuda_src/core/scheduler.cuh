// From block index to the query tile, head and batch entry that it computes.
#pragma once

#include "core/params.cuh"

namespace cuflash {

struct TileCoordinate {
  int query_tile, head, batch;

  // Query tiles of one head are neighbours, so that the blocks in flight share that head's keys and values in L2. With a
  // band the last query tile sees the most keys and goes first, so that no long tile starts when the others are done.
  //
  // The grid is (query tiles, heads, batch): block coordinates then stay in uniform registers, where a division would put
  // them, and every pointer made from them, into vector registers. The launcher splits a batch that is larger than a grid.
  template <bool LongestFirst>
  static __device__ __forceinline__ TileCoordinate of_block(const ForwardParams& p) {
    return make<LongestFirst>(p, blockIdx.x, blockIdx.y, blockIdx.z);
  }

  // The block that will probably follow on this multiprocessor: as many places on as the device holds blocks at a time. Its
  // batch may be past the end of the grid.
  template <bool LongestFirst>
  static __device__ __forceinline__ TileCoordinate of_successor(const ForwardParams& p) {
    const unsigned tile = blockIdx.x + p.resident_blocks;
    const unsigned head = blockIdx.y + tile / gridDim.x;
    return make<LongestFirst>(p, tile % gridDim.x, head % gridDim.y, blockIdx.z + head / gridDim.y);
  }

 private:
  template <bool LongestFirst>
  static __device__ __forceinline__ TileCoordinate make(const ForwardParams& p, int tile, int head, int batch) {
    return {LongestFirst ? p.query_tiles - 1 - tile : tile, head, batch};
  }
};

}  // namespace cuflash
