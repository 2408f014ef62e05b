#pragma once

namespace cuflash {

template <int Threads>
void named_barrier_sync(int barrier) {
  emulator::barrier(barrier, Threads, false, true);
}

template <int Threads>
void named_barrier_arrive(int barrier) {
  emulator::barrier(barrier, Threads, false, false);
}

template <int Threads>
bool named_barrier_or(int barrier, bool vote) {
  return emulator::barrier(barrier, Threads, vote, true);
}

}  // namespace cuflash
