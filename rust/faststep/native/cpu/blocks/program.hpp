// A fused kernel as a list of loops, run on one block of elements after the other: what lies between two operations stays in the
// processor's first cache.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <vector>

#include "mlx/mlx.h"
#include "mlx/primitives.h"
#include "cpu/blocks/loops.hpp"

namespace faststep::blocks {

// The strides by which an input goes over an output's shape.
mx::Strides strides_over(const mx::array& in, const mx::Shape& shape);

class Program {
 public:
  static constexpr size_t most_axes = 16; // of what it computes

  // Of a kernel; none where an operation or a dtype of it has no loop.
  static std::shared_ptr<const Program> of(const mx::Compiled& kernel);

  // The same, made once for all kernels of that name in MLX.
  static std::shared_ptr<const Program> known(const mx::Compiled& kernel);

  // Return whether the program is faster than the compiled kernel, which calls the C library for each element (loops.hpp).
  bool is_ahead_of_library() const {
    return is_ahead_of_library_;
  }

  // Allocate a kernel's outputs as MLX does, and hand its work to the stream's thread.
  static void dispatch(
      std::shared_ptr<const Program> program,
      const std::vector<mx::array>& inputs,
      std::vector<mx::array>& outputs,
      mx::Stream stream);

 private:
  class Builder;
  class Task;

  // What an operation reads or writes: a place that moves on with each block, or one element for all of them.
  struct Place {
    enum Kind { input, output, room, constant } kind;
    size_t number; // of the input, the output, the room (a block's) or the constant (an element's)
    size_t itemsize;
    bool single;
  };

  struct Step {
    Loop loop;
    size_t out;
    std::array<size_t, 3> in;
  };

  std::vector<Place> places_;
  std::vector<Step> once_; // those of single elements
  std::vector<Step> steps_;
  std::vector<size_t> writers_; // of each output: the number of the step that writes it
  std::vector<size_t> readers_; // of each input: the number of the last step that reads it
  std::vector<std::optional<size_t>> inputs_; // their places; none of a number in the source
  std::vector<size_t> outputs_;
  std::vector<std::array<char, 8>> constants_; // and room for single elements
  size_t rooms_ = 0, room_bytes_ = 0;
  bool is_ahead_of_library_ = false;
};

} // namespace faststep::blocks
