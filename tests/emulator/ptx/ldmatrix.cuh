#pragma once

namespace cuflash {

template <bool Transposed>
void emulated_ldmatrix(unsigned (&r)[4], unsigned address) {
  struct Slot {
    unsigned address;
    unsigned* r;
  } mine{address, r};
  const auto load = [](std::vector<void*>& slots) {
    for (int matrix = 0; matrix < 4; ++matrix)
      for (int lane = 0; lane < 32; ++lane) {
        unsigned short pair[2];
        for (int i = 0; i < 2; ++i) {
          const int row = Transposed ? 2 * (lane % 4) + i : lane / 4;
          const int column = Transposed ? lane / 4 : 2 * (lane % 4) + i;
          const unsigned start = static_cast<Slot*>(slots[8 * matrix + row])->address;
          if (start % 16) emulator::fail("ldmatrix of a row that is not aligned");
          pair[i] = emulator::read_shared<unsigned short>(start + 2 * column);
        }
        static_cast<Slot*>(slots[lane])->r[matrix] = pair[0] | static_cast<unsigned>(pair[1]) << 16;
      }
  };
  emulator::together(*emulator::state.current->warp, emulator::lane(), Transposed ? "ldmatrix.trans" : "ldmatrix", mine,
                     load);
}

inline void ldmatrix_x4(unsigned (&r)[4], unsigned address) {
  emulated_ldmatrix<false>(r, address);
}

inline void ldmatrix_x4_trans(unsigned (&r)[4], unsigned address) {
  emulated_ldmatrix<true>(r, address);
}

}  // namespace cuflash
