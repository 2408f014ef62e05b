#pragma once

namespace cuflash {

inline int rematerialized_thread() {
  return threadIdx.x;
}

}  // namespace cuflash
