// What the step needs of mlx::core::array and mlx-c leaves out. Every pointer is an mlx::core::array, as in mlx_array.ctx.
#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <stdexcept>
#include <unordered_set>
#include <vector>

#include "mlx/backend/cpu/encoder.h"
#include "mlx/mlx.h"
#include "mlx/primitives.h"

namespace mx = mlx::core;

namespace {

const mx::array& at(const void* a) {
  return *static_cast<const mx::array*>(a);
}

bool foreign(mx::Stream s) {
  if (s == mx::default_stream(s.device)) {
    return false;
  }
  try { // both throw for a stream of another thread; the GPU back ends offer nothing that does not wait
    if (s.device == mx::Device::gpu) {
      mx::synchronize(s);
    } else {
      mx::cpu::get_command_encoder(s);
    }
    return false;
  } catch (const std::exception&) {
    return true;
  }
}

// The nearest random bits that an array which is not evaluated yet is computed from.
const mx::array* random_bits(const mx::array& a) {
  std::vector<const mx::array*> todo{&a};
  std::unordered_set<uintptr_t> seen;
  for (size_t next = 0; next < todo.size(); ++next) {
    const auto& x = *todo[next];
    if (!x.has_primitive() || !seen.insert(x.id()).second) {
      continue;
    }
    if (std::strcmp(x.primitive().name(), "RandomBits") == 0) {
      return &x;
    }
    for (const auto& in : x.inputs()) {
      todo.push_back(&in);
    }
  }
  return nullptr;
}

} // namespace

extern "C" {

uintptr_t faststep_array_id(const void* a) {
  return at(a).id();
}

int faststep_array_is_lazy(const void* a) {
  return at(a).status() == mx::array::Status::unscheduled;
}

// Whether the array is not evaluated and waits for work on a stream of another thread.
int faststep_array_is_foreign(const void* a) {
  std::vector<const mx::array*> todo{&at(a)};
  std::unordered_set<uintptr_t> seen;
  while (!todo.empty()) {
    const auto& x = *todo.back();
    todo.pop_back();
    if (x.status() != mx::array::Status::unscheduled || !x.has_primitive() || !seen.insert(x.id()).second) {
      continue;
    }
    if (foreign(x.primitive().stream())) {
      return 1;
    }
    for (const auto& in : x.inputs()) {
      todo.push_back(&in);
    }
  }
  return 0;
}

// A part of a flat buffer as an array of its own, without a copy. Of an evaluated buffer the part is evaluated too and
// shares its event; of a lazy one it is a lazy view. Null: an exception, which only a lazy view can throw.
void* faststep_array_view(const void* flat, const int* shape, size_t ndim, size_t offset) {
  const auto& buffer = at(flat);
  mx::Shape dims(shape, shape + ndim);
  mx::Strides strides(ndim);
  int64_t stride = 1;
  for (size_t i = ndim; i-- > 0;) {
    strides[i] = stride;
    stride *= shape[i];
  }
  try {
    if (buffer.status() == mx::array::Status::unscheduled || !buffer.flags().row_contiguous) {
      return new mx::array(mx::as_strided(buffer, std::move(dims), std::move(strides), offset));
    }
    bool column = ndim < 2 || stride == *std::max_element(shape, shape + ndim);
    auto part = new mx::array(std::move(dims), buffer.dtype(), nullptr, {});
    part->copy_shared_buffer(buffer, strides, {true, true, column}, stride, offset);
    part->set_status(buffer.status());
    part->attach_event(buffer.event());
    return part;
  } catch (const std::exception&) {
    return nullptr;
  }
}

// An array without a value: what an object holds while its value is in the device's hands. Reading it raises.
void* faststep_array_hollow() {
  return new mx::array(mx::Shape{}, mx::float32, nullptr, {});
}

// The random state before a lazy draw: the draw's key is one half of a split, which itself is random bits of that state.
void* faststep_array_random_state(const void* draw) {
  const auto* bits = random_bits(at(draw));
  const auto* halves = bits ? random_bits(bits->inputs()[0]) : nullptr;
  return halves ? new mx::array(halves->inputs()[0]) : nullptr;
}
}
