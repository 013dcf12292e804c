// The two sides of a call from Rust: the arrays that come in, and the status that goes out.
#pragma once

#include <algorithm>
#include <cstddef>
#include <exception>
#include <iterator>
#include <type_traits>
#include <utility>
#include <vector>

#include "mlx/mlx.h"
#include "ffi.hpp"

namespace faststep {

namespace mx = mlx::core;

// Set the message that faststep_last_error returns.
void set_last_error(const char* message) noexcept;

// The status of `work`, which returns one or nothing.
template <typename Work>
int guarded(Work work) noexcept {
  try {
    if constexpr (std::is_void_v<decltype(work())>) {
      work();
      return Status::done;
    } else {
      return work();
    }
  } catch (const std::exception& error) {
    set_last_error(error.what());
  } catch (...) {
    set_last_error("an exception that is no std::exception");
  }
  return Status::failed;
}

inline const mx::array& at(const void* array) {
  return *static_cast<const mx::array*>(array);
}

inline std::vector<mx::array> list(const void* const* arrays, size_t count) {
  std::vector<mx::array> all;
  all.reserve(count);
  std::transform(arrays, arrays + count, std::back_inserter(all), at);
  return all;
}

inline std::vector<const mx::array*> pointers(const void* const* arrays, size_t count) {
  std::vector<const mx::array*> all(count);
  std::transform(arrays, arrays + count, all.begin(), [](const void* array) { return &at(array); });
  return all;
}

// An array that belongs to the caller.
inline void* owned(mx::array array) {
  return new mx::array(std::move(array));
}

} // namespace faststep
