// Which query tiles a block of the persistent grid computes, in which order.
#pragma once

#include "core/params.cuh"
#include "core/scheduler.cuh"
#include "ptx/atomic.cuh"
#include "ptx/elect.cuh"
#include "ptx/shared.cuh"
#include "sm90/ring.cuh"

namespace cuflash {

// Query tiles of `section` (batch, head) pairs together, section after section: as many as share the L2 cache with
// their keys and values. In a section of more than one the longest tiles of all its heads come first.
struct WorkList {
  unsigned* tickets;  // two zeros: tiles given out, and blocks that are through; null to share out by turns
  int tiles, section;

  // With query_tile = -1 past the end.
  template <bool LongestFirst>
  __device__ __forceinline__ TileCoordinate coordinate(const ForwardParams& p, int index) const {
    if (index >= tiles) return {-1, 0, 0};
    const auto c = SectionCoordinate::make(index, p.query_tiles, tiles / p.query_tiles, section);
    return {LongestFirst ? p.query_tiles - 1 - c.tile : c.tile, c.pair % p.heads_q, c.pair / p.heads_q};
  }

  // By one thread: the index after `index`. Where tiles take unequally long, whichever block is free takes the next.
  __device__ __forceinline__ int next(int index) const {
    const int grid = gridDim.x;
    return tickets ? grid + static_cast<int>(atomic_add(tickets, 1u)) : index + grid;
  }

  // By each block when it has been given an index past the end: the last one leaves the tickets as it found them.
  __device__ __forceinline__ void leave() const {
    if (tickets == nullptr || atomic_add(tickets + 1, 1u) + 1 != gridDim.x) return;
    tickets[0] = 0;
    tickets[1] = 0;
  }
};

// Words of one thread for many warps, `Words` at a time: a ring of two messages with its barriers.
template <int Words>
struct MessageRing {
  using Barriers = RingBarriers<2>;
  using Position = Barriers::Position;
  Barriers barriers;
  static constexpr int bytes = Barriers::bytes + 2 * 4 * Words;

  __device__ __forceinline__ unsigned at() const { return barriers.at; }
  __device__ __forceinline__ unsigned slot(int stage) const {
    return barriers.at + Barriers::bytes + 4 * Words * stage;
  }

  // By one thread, which advances its position itself.
  __device__ __forceinline__ void publish(const Position& at, const int (&words)[Words]) const {
    barriers.wait_empty(at);
#pragma unroll
    for (int i = 0; i < Words; ++i) store_shared(slot(at.stage) + 4 * i, static_cast<unsigned>(words[i]));
    mbarrier_arrive(barriers.full(at.stage));
  }

  // By each of the warps, in uniform registers.
  __device__ __forceinline__ void take(Position& at, int lane, int (&words)[Words]) const {
    barriers.wait_full(at);
#pragma unroll
    for (int i = 0; i < Words; ++i)
      words[i] = in_uniform_register(static_cast<int>(load_shared(slot(at.stage) + 4 * i)));
    if (lane == 0) barriers.release(at);
    at.advance();
  }
};

// The query tiles of a block, from its producer: their coordinates take divisions, which are made once and ahead.
struct TileRing : MessageRing<3> {
  __device__ __forceinline__ void publish(const Position& at, const TileCoordinate& c) const {
    MessageRing::publish(at, {c.query_tile, c.head, c.batch});
  }

  __device__ __forceinline__ TileCoordinate take(Position& at, int lane) const {
    int words[3];
    MessageRing::take(at, lane, words);
    return {words[0], words[1], words[2]};
  }
};

}  // namespace cuflash
