#pragma once

#include "core/types.cuh"
#include "ptx/tma.cuh"

namespace cuflash {

enum class Swizzle { bytes_128 = 1, bytes_64 = 2 };

constexpr uint64 matrix_descriptor(Swizzle swizzle, int leading_bytes, int stride_bytes) {
  return static_cast<uint64>(leading_bytes >> 4) << 16 | static_cast<uint64>(stride_bytes >> 4) << 32 |
         static_cast<uint64>(swizzle) << 62;
}

// What a shared memory descriptor says: PTX ISA, "Matrix descriptor".
struct EmulatedMatrix {
  unsigned start, leading, stride;
  int swizzle_bytes;

  explicit EmulatedMatrix(uint64 descriptor)
      : start((descriptor & 0x3FFF) << 4),
        leading((descriptor >> 16 & 0x3FFF) << 4),
        stride((descriptor >> 32 & 0x3FFF) << 4),
        swizzle_bytes(descriptor >> 62 == 1 ? 128 : 64) {}

  // The element at `outer` (row of A, column of B) and depth k. Transposed: rows in memory are the depth.
  template <class Element>
  float at(int outer, int k, bool transposed) const {
    const int columns = swizzle_bytes / 2;
    const unsigned address =
        transposed ? start + outer / columns * leading + k / 8 * stride + k % 8 * swizzle_bytes + outer % columns * 2
                   : start + outer / 8 * stride + outer % 8 * swizzle_bytes + 2 * k;
    return unpack<Element>(emulator::read_shared<unsigned short>(swizzled(address, swizzle_bytes)));
  }
};

struct EmulatedSlot {
  float* d;
  const unsigned* a;
};

template <int N, class Element>
void emulated_product(const std::vector<EmulatedSlot>& slots, uint64 query, uint64 key, bool transposed,
                      bool transposed_query, bool accumulate) {
  float a[64][16], b[16][N];
  const EmulatedMatrix first(query), second(key);
  for (int k = 0; k < 16; ++k) {
    for (int row = 0; row < 64; ++row) {
      // Rows of a warp and the fragment layout are those of mma.m16n8k16.
      const int lane = row % 8 * 4 + k % 8 / 2, r = row % 16 / 8 + k / 8 * 2;
      const unsigned* from = slots[row / 16 * 32 + lane].a;
      a[row][k] = from ? unpack<Element>(static_cast<unsigned short>(from[r] >> 16 * (k % 2)))
                       : first.at<Element>(row, k, transposed_query);
    }
    for (int n = 0; n < N; ++n) b[k][n] = second.at<Element>(n, k, transposed);
  }
  for (int thread = 0; thread < 128; ++thread)
    for (int i = 0; i < N / 2; ++i) {
      const int row = thread / 32 * 16 + thread % 32 / 4 + i % 4 / 2 * 8, n = i / 4 * 8 + 2 * (thread % 4) + i % 2;
      float sum = 0.0f;
      for (int k = 0; k < 16; ++k) sum += a[row][k] * b[k][n];
      float& d = slots[thread].d[i];
      d = accumulate ? d + sum : sum;
    }
}

inline emulator::CopyGroups& emulated_products() {
  return emulator::state.products[threadIdx.x / 128];
}

// f() once for the warpgroup, when all its threads are here.
template <class Mine, class F>
void by_warpgroup(const char* instruction, Mine& mine, F&& f) {
  emulator::together(*emulator::state.current->warpgroup, threadIdx.x % 128, instruction, mine, f);
}

template <int N, class Element>
struct Wgmma {
  using Accumulators = float (&)[1][N / 8][4];

  static void start(Accumulators d, const unsigned* a, uint64 query, uint64 key, bool transposed, bool transposed_query,
                    int accumulate) {
    EmulatedSlot mine{&d[0][0][0], a};
    by_warpgroup("wgmma.mma_async", mine, [&](std::vector<void*>& pointers) {
      std::vector<EmulatedSlot> slots;
      for (void* pointer : pointers) slots.push_back(*static_cast<EmulatedSlot*>(pointer));
      emulator::start(emulated_products(), [=] {
        emulated_product<N, Element>(slots, query, key, transposed, transposed_query, accumulate != 0);
      });
    });
  }

  template <int TransposeB, int TransposeA = 0>
  static void ss(Accumulators d, uint64 query, uint64 key, int accumulate) {
    start(d, nullptr, query, key, TransposeB, TransposeA, accumulate);
  }

  template <int TransposeB>
  static void rs(Accumulators d, const unsigned (&a)[4], uint64 key, int accumulate) {
    start(d, a, 0, key, TransposeB, false, accumulate);
  }
};

inline void wgmma_fence() {}

inline void wgmma_commit() {
  int nothing = 0;
  by_warpgroup("wgmma.commit_group", nothing, [](std::vector<void*>&) { emulator::commit(emulated_products()); });
}

template <int Pending>
void wgmma_wait() {
  int nothing = 0;
  by_warpgroup("wgmma.wait_group", nothing,
               [](std::vector<void*>&) { emulator::wait_for_all_but(emulated_products(), Pending); });
}

template <int Blocks>
void pin_accumulators(float (&)[1][Blocks][4]) {}

}  // namespace cuflash
