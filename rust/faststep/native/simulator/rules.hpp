// One primitive at work, and the ways to give its outputs memory.
#pragma once

#include <string_view>

#include "simulator/simulator.hpp"

namespace faststep::simulator {

struct Site {
  Memory& memory;
  const Op& op;
  Work work;

  Node& in(size_t i) {
    return *op.inputs[i];
  }
  Node& out(size_t i = 0) {
    return *op.outputs[i];
  }
};

// An array of that shape and dtype without memory, and memory that is none.
inline mx::array bare(const mx::array& face) {
  return mx::array(face.shape(), face.dtype(), nullptr, {});
}

inline mx::allocator::Data nothing() {
  return {mx::allocator::Buffer(nullptr), {}};
}

// The memory and layout of an array.
void lay_out(Node& node, Data data, size_t data_size, mx::Strides strides, mx::array::Flags flags);
// Memory of its own: in rows, or laid out like another array.
void fresh(Site& site, Node& out);
void fresh_like(Site& site, Node& out, const mx::array& like);
void share(Node& out, const Node& in);
// A buffer that is needed only while the kernels run.
void temporary(Site& site, size_t bytes);
// Return whether nobody else has the array.
bool is_free(const Node& in);

// Return whether MLX fuses the primitive of that name with others.
bool is_elementwise(std::string_view name);
// Return whether its output lies where its input does.
bool is_view(std::string_view name);

// The primitives whose outputs are views (views.cpp).
void view(Site& site);
void reshape(Site& site);

// The primitives that take over an input's memory, or copy it as it lies (sharing.cpp).
void unary(Site& site);
void binary(Site& site);
void select(Site& site);
void contiguous(Site& site);
void copied(Site& site);
void compiled(Site& site);
void copy_into(Site& site, const Node& in, Node& out, bool vector);

} // namespace faststep::simulator
