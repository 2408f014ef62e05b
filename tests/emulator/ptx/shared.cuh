#pragma once

namespace cuflash {

inline unsigned shared_address(const void* p) {
  return static_cast<unsigned>(__cvta_generic_to_shared(p));
}

template <class T>
void store_shared(unsigned address, const T& value) {
  emulator::write_shared(address, value);
}

inline void store_shared(unsigned address, const float (&value)[4]) {
  emulator::write_shared(address, float4{value[0], value[1], value[2], value[3]});
}

inline unsigned load_shared(unsigned address) {
  return emulator::read_shared<unsigned>(address);
}

inline float load_shared_float(unsigned address) {
  return emulator::read_shared<float>(address);
}

inline float2 load_shared_float2(unsigned address) {
  return emulator::read_shared<float2>(address);
}

inline float4 load_shared_float4(unsigned address) {
  return emulator::read_shared<float4>(address);
}

inline const char* load_shared_pointer(unsigned address) {
  return emulator::read_shared<const char*>(address);
}

inline uint4 load_shared_chunk(unsigned address) {
  return emulator::read_shared<uint4>(address);
}

inline void fence_async_proxy() {}

}  // namespace cuflash
