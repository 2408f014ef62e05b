#pragma once

namespace cuflash {

inline void mbarrier_init(unsigned barrier, int arrivals) {
  emulator::shared_pointer(barrier, 8, 8);
  emulator::state.mbarriers[barrier] = {arrivals, arrivals, 0, 0, {}};
}

inline void mbarrier_init_fence() {}

inline void mbarrier_arrive(unsigned barrier) {
  emulator::Mbarrier& b = emulator::mbarrier(barrier);
  if (b.pending == 0) emulator::fail("one arrival too many at an mbarrier");
  --b.pending;
  emulator::settle(b);
}

inline void mbarrier_arrive_expect(unsigned barrier, int bytes) {
  emulator::mbarrier(barrier).bytes += bytes;
  mbarrier_arrive(barrier);
}

inline void mbarrier_wait(unsigned barrier, unsigned parity) {
  emulator::Mbarrier& b = emulator::mbarrier(barrier);
  emulator::wait_until([&] {
    if ((b.phase & 1) != (parity & 1)) return true;
    for (auto& copy : b.late) b.bytes -= copy();
    if (!b.late.empty()) emulator::settle(b);
    b.late.clear();
    return (b.phase & 1) != (parity & 1);
  });
}

}  // namespace cuflash
