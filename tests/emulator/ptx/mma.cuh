#pragma once

#include "core/types.cuh"

namespace cuflash {

// PTX ISA, "Matrix fragments for mma.m16n8k16 with floating point type".
template <class Element>
void mma_m16n8k16(float (&d)[4], const unsigned (&a)[4], unsigned b0, unsigned b1) {
  struct Slot {
    float* d;
    const unsigned* a;
    unsigned b[2];
  } mine{d, a, {b0, b1}};
  const auto multiply = [](std::vector<void*>& slots) {
    float a[16][16], b[16][8];
    const auto half = [](unsigned pair, int i) { return unpack<Element>(static_cast<unsigned short>(pair >> 16 * i)); };
    for (int lane = 0; lane < 32; ++lane) {
      const Slot& slot = *static_cast<Slot*>(slots[lane]);
      const int group = lane / 4, pair = 2 * (lane % 4);
      for (int i = 0; i < 2; ++i) {
        for (int r = 0; r < 4; ++r) a[group + r % 2 * 8][pair + r / 2 * 8 + i] = half(slot.a[r], i);
        for (int r = 0; r < 2; ++r) b[pair + 8 * r + i][group] = half(slot.b[r], i);
      }
    }
    for (int lane = 0; lane < 32; ++lane) {
      float* d = static_cast<Slot*>(slots[lane])->d;
      for (int i = 0; i < 4; ++i) {
        float sum = 0.0f;
        for (int k = 0; k < 16; ++k) sum += a[lane / 4 + i / 2 * 8][k] * b[k][2 * (lane % 4) + i % 2];
        d[i] += sum;
      }
    }
  };
  emulator::together(*emulator::state.current->warp, emulator::lane(), "mma", mine, multiply);
}

}  // namespace cuflash
