// Whose turn it is to add to the sums of dQ, where the order of the additions is fixed: that of the blocks, one key
// tile each. A word for every 32 query rows counts the blocks that are through with the query tile that begins there;
// blocks that the mask keeps away from the tile are counted with those before them. A block waits for its predecessor
// alone. That has a smaller index, and blocks are started in the order of their indices, so that waiting ends whatever
// else runs on the GPU.
#pragma once

#include "core/params.cuh"
#include "ptx/acquire_release.cuh"

namespace cuflash {

constexpr int kTurnRows = 32;

struct Turn {
  unsigned* word;

  static __device__ __forceinline__ Turn of_rows(const BackwardParams& p, int batch, int head, int row_begin) {
    const int64 row = (static_cast<int64>(batch) * p.heads_q + head) * p.padded_rows + row_begin;
    return {p.turns + row / kTurnRows};
  }

  // By every thread that will add.
  __device__ __forceinline__ void wait(unsigned before) const {
    while (load_acquire(word) != before) {
    }
  }

  // By one thread, after a barrier behind all additions of its block.
  __device__ __forceinline__ void pass(unsigned before) const { store_release(word, before + 1); }
};

}  // namespace cuflash
