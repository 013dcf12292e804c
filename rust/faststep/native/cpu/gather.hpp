// Parts of joins that move to their places as they come (one_by_one.cpp): a join holds its parts and itself at once otherwise.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <unordered_map>
#include <vector>

#include "mlx/mlx.h"

namespace faststep {

// Whether a join has its memory, once so many of its bytes are there: earlier it would hold more than its parts do for long.
constexpr bool has_room(size_t ready, size_t bytes) {
  return 2 * ready >= bytes;
}

// The flags of an array that lies row after row.
mlx::core::array::Flags rows_of(const mlx::core::Shape& shape);

// Whether an operation joins what it is made of.
bool is_join(const mlx::core::Primitive& primitive);

// The joins of a tape, while its operations are evaluated one by one.
class Gathering {
 public:
  explicit Gathering(const std::vector<mlx::core::array>& tape);
  // The outputs of an operation that are parts of a join.
  std::vector<mlx::core::array> parts(const mlx::core::array& array) const;
  // A part has been computed.
  void add(mlx::core::array part);
  // Compute a join whose parts have places; false: it has none, and is to be evaluated.
  bool finish(mlx::core::array& join);

 private:
  struct Room {
    size_t bytes, ready = 0;
    mlx::core::Dtype dtype;
    std::optional<mlx::core::array> memory;
    std::vector<mlx::core::array> waiting; // until there is memory
  };
  struct Place {
    uintptr_t join;
    size_t offset; // in bytes
  };
  void move(mlx::core::array& part, Room& room) const;

  std::unordered_map<uintptr_t, Room> rooms_; // by join
  std::unordered_map<uintptr_t, Place> places_; // by part
};

} // namespace faststep
