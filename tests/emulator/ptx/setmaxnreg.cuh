#pragma once

namespace cuflash {

template <int Registers>
void give_registers() {}

template <int Registers>
void take_registers() {}

}  // namespace cuflash
