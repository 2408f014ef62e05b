// A ring of shared memory stages that producers fill, one thread by the copy engine or several warps, and consumer
// warps empty.
#pragma once

#include "ptx/mbarrier.cuh"

namespace cuflash {

// Which stage comes next, and whether its barriers are in an even or odd round.
template <int Stages>
struct RingPosition {
  int stage = 0;
  unsigned round = 0;

  __device__ __forceinline__ void advance() {
    if (++stage == Stages) {
      stage = 0;
      round ^= 1;
    }
  }
};

// The barriers of a ring: full[Stages], then empty[Stages], 8 bytes each.
template <int Stages>
struct RingBarriers {
  unsigned at;
  static constexpr int bytes = 16 * Stages;
  using Position = RingPosition<Stages>;

  __device__ __forceinline__ void init(int consumer_warps, int producers = 1) const {
#pragma unroll
    for (int stage = 0; stage < Stages; ++stage) {
      mbarrier_init(full(stage), producers);
      mbarrier_init(empty(stage), consumer_warps);
    }
  }

  __device__ __forceinline__ unsigned full(int stage) const { return at + 8 * stage; }
  __device__ __forceinline__ unsigned empty(int stage) const { return at + 8 * (Stages + stage); }

  // Producer.
  __device__ __forceinline__ void wait_empty(const Position& p) const { mbarrier_wait(empty(p.stage), p.round ^ 1); }

  // By one thread of each producer that has filled its part itself.
  __device__ __forceinline__ void publish(const Position& p) const { mbarrier_arrive(full(p.stage)); }

  // Consumer.
  __device__ __forceinline__ void wait_full(const Position& p) const { mbarrier_wait(full(p.stage), p.round); }

  // By one thread of each consumer warp, when the warp has done with the stage.
  __device__ __forceinline__ void release(const Position& p) const { mbarrier_arrive(empty(p.stage)); }
};

}  // namespace cuflash
