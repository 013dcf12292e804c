// MLX's headers include this library, and do not bring it along; none of what they format is used here.
#pragma once

#include <string>

namespace fmt {

template <typename... Values>
std::string format(const char* text, Values&&...) {
  return text;
}

} // namespace fmt
