// Operations that exchange arrays with other ranks.
#pragma once

#include <algorithm>
#include <iterator>
#include <string_view>

namespace faststep {

// By the name of the primitive, which says what it reduces by.
inline bool exchanges(std::string_view name) {
  constexpr std::string_view kinds[] = {"AllReduce", "AllGather", "Send", "Recv", "ReduceScatter"};
  return std::any_of(std::begin(kinds), std::end(kinds), [&](auto kind) { return name.ends_with(kind); });
}

} // namespace faststep
