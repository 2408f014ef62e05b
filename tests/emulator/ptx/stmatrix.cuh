#pragma once

namespace cuflash {

inline void stmatrix_x4(unsigned address, const unsigned (&r)[4]) {
  struct Slot {
    unsigned address;
    const unsigned* r;
  } mine{address, r};
  const auto store = [](std::vector<void*>& slots) {
    for (int matrix = 0; matrix < 4; ++matrix)
      for (int lane = 0; lane < 32; ++lane) {
        const unsigned start = static_cast<Slot*>(slots[8 * matrix + lane / 4])->address;
        if (start % 16) emulator::fail("stmatrix of a row that is not aligned");
        emulator::write_shared(start + 4 * (lane % 4), static_cast<Slot*>(slots[lane])->r[matrix]);
      }
  };
  emulator::together(*emulator::state.current->warp, emulator::lane(), "stmatrix", mine, store);
}

}  // namespace cuflash
