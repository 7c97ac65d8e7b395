// A number that a launch is told, as a constant of the code that follows.
#pragma once

#include <type_traits>

namespace eet {

// Calls with(n), where n is a constant that equals `number`, which lies between the two. By comparisons: of a switch the
// compiler makes a table in constant memory, and a kernel would fetch from it when the one ahead has ended (LOG).
template <int kLow, int kHigh, typename With>
__device__ inline void with_constant(int number, With with) {
  if constexpr (kLow == kHigh) {
    with(std::integral_constant<int, kLow>{});
  } else {
    constexpr int kMiddle = (kLow + kHigh) / 2;
    if (number <= kMiddle) {
      with_constant<kLow, kMiddle>(number, with);
    } else {
      with_constant<kMiddle + 1, kHigh>(number, with);
    }
  }
}

}  // namespace eet
