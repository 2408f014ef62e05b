// From block index to the tile, head and batch entry that it computes.
#pragma once

#include "core/params.cuh"
#include "ptx/elect.cuh"

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

// One of `tiles` tiles of each of `pairs` (batch, head) pairs, by a single index: section after section of the pairs,
// and in a section of more than one the first tiles of all its pairs come first.
struct SectionCoordinate {
  int tile, pair;

  static __device__ __forceinline__ SectionCoordinate make(int index, int tiles, int pairs, int section) {
    const int section_tiles = section * tiles;
    const int first = index / section_tiles * section;
    const int size = min(section, pairs - first);
    const int rest = index - first * tiles;
    return {rest / size, first + rest % size};
  }
};

// The key tile, key/value head and batch entry of a block, and how many blocks of the same head come before it.
struct KeyTileCoordinate {
  int key_tile, head, batch, before;

  // Of a grid (key tiles, heads_kv, batch). Under a causal mask the first key tile is seen by the most queries, and
  // goes first.
  static __device__ __forceinline__ KeyTileCoordinate of_block() {
    const int tile = blockIdx.x;
    return {tile, static_cast<int>(blockIdx.y), static_cast<int>(blockIdx.z), tile};
  }

  // Under a mask: the tiles of several heads mingle, longest first, so that no long one starts when the others are
  // done. With a section that is a power of two and divides the heads, of a grid (tiles * section, heads_kv / section,
  // batch): divisions would keep a block from its first copies for a third of a step. Otherwise p.section is negative
  // and the grid has one dimension.
  static __device__ __forceinline__ KeyTileCoordinate longest_first(const BackwardParams& p, int tiles) {
    if (p.section > 0) {
      const int index = blockIdx.x, head = blockIdx.y * p.section + (index & (p.section - 1));
      return {index >> __popc(p.section - 1), head, static_cast<int>(blockIdx.z), 0};
    }
    const auto c = SectionCoordinate::make(blockIdx.x, tiles, gridDim.x / tiles, -p.section);
    const int heads = p.heads_q / p.group;
    return {in_uniform_register(c.tile), in_uniform_register(c.pair % heads), in_uniform_register(c.pair / heads), 0};
  }

  // Of a grid of one dimension, for blocks that take turns in what they do for a head: from its last key tile to the
  // first, and with those of other heads in between, so that few of one head run at a time and wait for each other.
  static __device__ __forceinline__ KeyTileCoordinate in_turn(const BackwardParams& p, int tiles) {
    const auto c = SectionCoordinate::make(blockIdx.x, tiles, gridDim.x / tiles, p.section);
    const int heads = p.heads_q / p.group;
    return {in_uniform_register(tiles - 1 - c.tile), in_uniform_register(c.pair % heads),
            in_uniform_register(c.pair / heads), in_uniform_register(c.tile)};
  }
};

}  // namespace cuflash
