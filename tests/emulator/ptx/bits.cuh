#pragma once

namespace cuflash {

inline unsigned bits_from(int position) {
  return position >= 32 ? 0u : 0xFFFFFFFFu << max(position, 0);
}

}  // namespace cuflash
