// Runs CUDA kernels on the CPU, thread by thread, to test their logic where there is no GPU.
//
// Every CUDA thread is a coroutine. It runs until an instruction that needs other threads, such as a shuffle, a matrix
// product or a barrier, and then the next one runs; a seed decides which warp goes on. Asynchronous copies and products
// happen at once or as late as their waits allow: a kernel that does not wait reads what was there before, one that
// overwrites too early loses what it needs. Shared memory starts as NaN, addresses outside it are errors, and so is a
// state in which no thread can go on.
//
// The headers of ptx/ here take the place of those in cuda_src/ptx.
#pragma once

#include <ucontext.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <functional>
#include <map>
#include <memory>
#include <random>
#include <stdexcept>
#include <string>
#include <vector>

#define __device__
#define __global__
#define __shared__
#define __grid_constant__
#define __forceinline__ inline
#define __launch_bounds__(...)
#define __align__(n) __attribute__((aligned(n)))

struct uint4 {
  unsigned x, y, z, w;
};

struct float4 {
  float x, y, z, w;
};

struct float2 {
  float x, y;
};

inline float4 make_float4(float x, float y, float z, float w) {
  return {x, y, z, w};
}

inline uint4 make_uint4(unsigned x, unsigned y, unsigned z, unsigned w) {
  return {x, y, z, w};
}

// Whatever a kernel calls its dynamic shared memory.
constexpr unsigned kSharedCapacity = 232448;
alignas(1024) char shared[kSharedCapacity];
alignas(1024) char dynamic[kSharedCapacity];

namespace emulator {

struct Dim {
  unsigned x = 0, y = 0, z = 0;
};

// Threads that execute an instruction together: a warp, or a warpgroup.
struct Team {
  int size, arrived = 0;
  unsigned generation = 0;
  const char* instruction = nullptr;
  std::vector<void*> slots;
  explicit Team(int size) : size(size), slots(size) {}
};

struct CopyGroups {
  std::vector<std::vector<std::function<void()>>> committed;
  std::vector<std::function<void()>> open;
};

struct Thread {
  ucontext_t context;
  std::unique_ptr<char[]> stack;
  Dim index;
  Team *warp = nullptr, *warpgroup = nullptr;
  CopyGroups copies;
  bool done = false;
};

struct NamedBarrier {
  int arrived = 0, votes = 0, result = 0;
  unsigned generation = 0;
};

struct Mbarrier {
  int expected = 0, pending = 0;
  long bytes = 0;
  unsigned phase = 0;
  std::vector<std::function<long()>> late;  // copies that have not been made, each returns its bytes
};

struct State {
  std::vector<Thread> threads;
  std::vector<Team> warps, warpgroups;
  std::vector<CopyGroups> products;  // of each warpgroup
  std::map<int, NamedBarrier> barriers;
  std::map<unsigned, Mbarrier> mbarriers;
  ucontext_t scheduler;
  Thread* current = nullptr;
  bool progress = false;
  Dim block, grid;
  unsigned shared_bytes = 0;
  bool late = false;  // whether asynchronous work is done as late as possible
  std::mt19937 random;
  std::string error;
  std::function<void()> kernel;
};

inline State state;

[[noreturn]] inline void fail(const std::string& what) {
  const Dim& b = state.block;
  throw std::runtime_error("block (" + std::to_string(b.x) + ", " + std::to_string(b.y) + ", " + std::to_string(b.z) +
                           "), thread " + std::to_string(state.current->index.x) + ": " + what);
}

inline void yield() {
  swapcontext(&state.current->context, &state.scheduler);
}

template <class Condition>
void wait_until(Condition&& condition) {
  while (!condition()) yield();
  state.progress = true;
}

inline int lane() {
  return state.current->index.x % 32;
}

// All threads of a team bring `mine`; the last to come calls complete(slots).
template <class Mine, class Complete>
void together(Team& team, int place, const char* instruction, Mine& mine, Complete&& complete) {
  if (team.arrived == 0) team.instruction = instruction;
  if (std::strcmp(team.instruction, instruction) != 0)
    fail(std::string(instruction) + " while others of its warp are at " + team.instruction);
  team.slots[place] = &mine;
  const unsigned generation = team.generation;
  state.progress = true;
  if (++team.arrived == team.size) {
    complete(team.slots);
    team.arrived = 0;
    ++team.generation;
    return;
  }
  wait_until([&] { return team.generation != generation; });
}

// result = combine(values of all 32 lanes, this lane).
template <class T, class Combine>
T warp_value(const char* instruction, T value, Combine&& combine) {
  struct Slot {
    T in, out;
  } mine{value, value};
  together(*state.current->warp, lane(), instruction, mine, [&](std::vector<void*>& slots) {
    T values[32];
    for (int i = 0; i < 32; ++i) values[i] = static_cast<Slot*>(slots[i])->in;
    for (int i = 0; i < 32; ++i) static_cast<Slot*>(slots[i])->out = combine(values, i);
  });
  return mine.out;
}

inline char* shared_pointer(unsigned address, unsigned bytes, unsigned alignment) {
  if (address % alignment) fail("shared address " + std::to_string(address) + " is not a multiple of its access");
  if (address + bytes > state.shared_bytes)
    fail("shared address " + std::to_string(address) + " + " + std::to_string(bytes) + " is outside");
  return shared + address;
}

template <class T>
T read_shared(unsigned address) {
  T value;
  std::memcpy(&value, shared_pointer(address, sizeof(T), sizeof(T)), sizeof(T));
  return value;
}

template <class T>
void write_shared(unsigned address, const T& value) {
  std::memcpy(shared_pointer(address, sizeof(T), sizeof(T)), &value, sizeof(T));
}

inline int barrier(int id, int threads, bool vote, bool waits) {
  NamedBarrier& b = state.barriers[id];
  const unsigned generation = b.generation;
  state.progress = true;
  b.votes |= vote;
  if (++b.arrived == threads) {
    b.result = b.votes;
    b.arrived = b.votes = 0;
    ++b.generation;
  } else if (b.arrived > threads) {
    fail("more threads than it counts at barrier " + std::to_string(id));
  } else if (waits) {
    wait_until([&] { return b.generation != generation; });
  }
  return b.result;
}

// ---- asynchronous work in groups ----

inline void start(CopyGroups& groups, std::function<void()> work) {
  if (state.late)
    groups.open.push_back(std::move(work));
  else
    work();
}

inline void commit(CopyGroups& groups) {
  groups.committed.push_back(std::move(groups.open));
  groups.open.clear();
}

inline void wait_for_all_but(CopyGroups& groups, size_t pending) {
  while (groups.committed.size() > pending) {
    for (auto& work : groups.committed.front()) work();
    groups.committed.erase(groups.committed.begin());
  }
}

// ---- mbarriers ----

inline void settle(Mbarrier& b) {
  if (b.pending == 0 && b.bytes == 0) {
    ++b.phase;
    b.pending = b.expected;
  }
}

inline Mbarrier& mbarrier(unsigned address) {
  shared_pointer(address, 8, 8);
  const auto found = state.mbarriers.find(address);
  if (found == state.mbarriers.end()) fail("no mbarrier at shared address " + std::to_string(address));
  return found->second;
}

// An asynchronous copy that counts towards the phase of a barrier.
template <class Copy>
void copy_towards(unsigned barrier, Copy&& copy) {
  Mbarrier& b = mbarrier(barrier);
  if (state.late) {
    b.late.push_back(copy);
  } else {
    b.bytes -= copy();
    settle(b);
  }
}

// ---- scheduling ----

inline void thread_main() {
  try {
    state.kernel();
  } catch (const std::exception& error) {
    if (state.error.empty()) state.error = error.what();
  }
  state.current->done = true;
  state.progress = true;
  swapcontext(&state.current->context, &state.scheduler);
}

// Runs the lanes of a warp once each; says whether one of them got on.
inline bool run_warp(size_t warp) {
  state.progress = false;
  for (size_t i = 32 * warp; i < 32 * warp + 32 && state.error.empty(); ++i) {
    Thread& thread = state.threads[i];
    if (thread.done) continue;
    state.current = &thread;
    swapcontext(&state.scheduler, &thread.context);
  }
  return state.progress;
}

inline void run_block(unsigned threads) {
  constexpr size_t kStack = 256 * 1024;
  std::memset(shared, 0xFF, sizeof shared);
  state.barriers.clear();
  state.mbarriers.clear();
  state.warps.assign(threads / 32, Team(32));
  state.warpgroups.assign((threads + 127) / 128, Team(128));
  state.products.assign(state.warpgroups.size(), {});
  state.threads.resize(threads);
  for (unsigned i = 0; i < threads; ++i) {
    Thread& thread = state.threads[i];
    if (!thread.stack) thread.stack = std::make_unique<char[]>(kStack);
    thread.index = {i, 0, 0};
    thread.warp = &state.warps[i / 32];
    thread.warpgroup = &state.warpgroups[i / 128];
    thread.copies = {};
    thread.done = false;
    getcontext(&thread.context);
    thread.context.uc_stack.ss_sp = thread.stack.get();
    thread.context.uc_stack.ss_size = kStack;
    thread.context.uc_link = &state.scheduler;
    makecontext(&thread.context, thread_main, 0);
  }
  const size_t warps = threads / 32;
  size_t idle = 0;
  while (state.error.empty() &&
         !std::all_of(state.threads.begin(), state.threads.end(), [](const Thread& t) { return t.done; })) {
    const size_t warp = state.random() % warps;
    // A warp goes on for a while, so that warps drift apart.
    size_t turns = 1 + state.random() % 32;
    bool got_on = false;
    while (turns-- && run_warp(warp)) got_on = true;
    idle = got_on ? 0 : idle + 1;
    if (idle > 64 * warps) {
      state.error = "no thread can go on:";
      for (size_t w = 0; w < warps; ++w) {
        const Team& team = state.warps[w];
        state.error += " warp " + std::to_string(w) + (team.arrived ? std::string(" in ") + team.instruction : "");
      }
    }
  }
}

template <class Params>
const char* run(void (*kernel)(Params), const void* params, const unsigned* grid, unsigned threads,
                unsigned shared_bytes, unsigned seed, int late) {
  state.kernel = [=] { kernel(*static_cast<const Params*>(params)); };
  state.grid = {grid[0], grid[1], grid[2]};
  state.shared_bytes = shared_bytes;
  state.late = late;
  state.random.seed(seed);
  state.error.clear();
  for (unsigned z = 0; z < grid[2]; ++z)
    for (unsigned y = 0; y < grid[1]; ++y)
      for (unsigned x = 0; x < grid[0]; ++x) {
        state.block = {x, y, z};
        run_block(threads);
        if (!state.error.empty()) return state.error.c_str();
      }
  return nullptr;
}

}  // namespace emulator

#define threadIdx (emulator::state.current->index)
#define blockIdx (emulator::state.block)
#define gridDim (emulator::state.grid)

// ---- built-in functions of CUDA C++ ----

using std::max;
using std::min;

template <class To, class From>
To emulated_bits(From from) {
  To to;
  std::memcpy(&to, &from, sizeof to);
  return to;
}

inline int __float_as_int(float x) {
  return emulated_bits<int>(x);
}
inline unsigned __float_as_uint(float x) {
  return emulated_bits<unsigned>(x);
}
inline float __int_as_float(int x) {
  return emulated_bits<float>(x);
}
inline float __uint_as_float(unsigned x) {
  return emulated_bits<float>(x);
}
inline float __fmul_rn(float a, float b) {
  return a * b;
}
inline float __fadd_rn(float a, float b) {
  return a + b;
}
inline uint64_t __cvta_generic_to_shared(const void* p) {
  const char* at = static_cast<const char*>(p);
  return at - (at >= dynamic && at < dynamic + kSharedCapacity ? dynamic : shared);
}

template <class T>
T __shfl_xor_sync(unsigned, T value, int mask) {
  return emulator::warp_value("shfl.xor", value, [&](const T* values, int i) { return values[i ^ mask]; });
}
template <class T>
T __shfl_sync(unsigned, T value, int source) {
  return emulator::warp_value("shfl", value, [&](const T* values, int) { return values[source]; });
}
inline int __popc(unsigned bits) {
  return __builtin_popcount(bits);
}

inline bool __any_sync(unsigned, bool vote) {
  return emulator::warp_value("vote.any", vote,
                              [](const bool* v, int) { return std::any_of(v, v + 32, [](bool x) { return x; }); });
}
inline bool __all_sync(unsigned, bool vote) {
  return !__any_sync(0xFFFFFFFFu, !vote);
}
inline unsigned __reduce_or_sync(unsigned, unsigned value) {
  return emulator::warp_value("redux.or", value, [](const unsigned* v, int) {
    unsigned all = 0;
    for (int i = 0; i < 32; ++i) all |= v[i];
    return all;
  });
}
inline int __reduce_max_sync(unsigned, int value) {
  return emulator::warp_value("redux.max", value, [](const int* v, int) { return *std::max_element(v, v + 32); });
}
inline void __syncwarp() {
  emulator::warp_value("syncwarp", 0, [](const int*, int) { return 0; });
}
inline void __syncthreads() {
  emulator::barrier(0, emulator::state.threads.size(), false, true);
}
inline bool __syncthreads_or(bool vote) {
  return emulator::barrier(0, emulator::state.threads.size(), vote, true);
}
