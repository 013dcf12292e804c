#include "patterns/known.hpp"

#include <algorithm>
#include <limits>

namespace faststep::known {

const mx::array& input(const mx::array& a, size_t i) {
  const auto* it = &a.inputs()[i];
  while (passes_on(*it)) {
    auto outputs = it->outputs();
    auto is_it = [it](const mx::array& output) { return output.id() == it->id(); };
    it = &it->inputs()[std::find_if(outputs.begin(), outputs.end(), is_it) - outputs.begin()];
  }
  return *it;
}

std::optional<float> number(const mx::array& a) {
  const auto& scalar = unrepeated(a);
  bool readable = !scalar.has_primitive() && scalar.is_available() && scalar.size() == 1;
  if (!readable) {
    return std::nullopt;
  }
  if (scalar.dtype() == mx::bfloat16) {
    return static_cast<float>(*scalar.data<mx::bfloat16_t>());
  }
  if (scalar.dtype() == mx::float16) {
    return static_cast<float>(*scalar.data<mx::float16_t>());
  }
  return scalar.dtype() == mx::float32 ? std::optional(*scalar.data<float>()) : std::nullopt;
}

std::pair<const mx::array*, float> without_factor(const mx::array& a) {
  if (is(a, "Multiply")) {
    for (int side : {0, 1}) {
      if (auto factor = number(input(a, side))) {
        return {&input(a, 1 - side), *factor};
      }
    }
  } else if (is(a, "Divide")) {
    if (auto divisor = number(input(a, 1))) {
      return {&input(a, 0), 1 / *divisor};
    }
  }
  return {&a, 1.0f};
}

const mx::array* swapped_back(const mx::array& a) {
  if (!is(a, "Transpose") || a.ndim() < 2) {
    return nullptr;
  }
  auto axes = static_cast<const mx::Transpose&>(a.primitive()).state();
  int n = static_cast<int>(a.ndim());
  for (int i = 0; i < n; ++i) {
    if (axes[i] != (i < n - 2 ? i : 2 * n - 3 - i)) {
      return nullptr;
    }
  }
  return &input(a, 0);
}

bool are_swapped(const mx::array& a, const mx::array& b) {
  const auto *of_a = swapped_back(a), *of_b = swapped_back(b);
  return (of_a && of_a->id() == b.id()) || (of_b && of_b->id() == a.id());
}

namespace {

constexpr float hidden = -1e9f; // an exponential of less, beside any score that a model trains with, is zero

// The numbers from `first` on, along this axis of a matrix; of a dtype that has them all.
bool counts(const mx::array& a, size_t axis, int first) {
  const auto& line = unrepeated(a);
  if (!is(line, "ExpandDims") || line.ndim() != 2 || line.shape(1 - axis) != 1 || line.shape(axis) != a.shape(axis)) {
    return false;
  }
  const auto& range = input(line, 0);
  bool exact = range.dtype() == mx::int32 || range.dtype() == mx::uint32 || range.dtype() == mx::int64;
  if (!is(range, "Arange") || !exact) {
    return false;
  }
  auto [start, stop, step] = static_cast<const mx::Arange&>(range.primitive()).state();
  return start == first && step == 1;
}

// The matrix that an array repeats along all axes but its last two.
const mx::array& matrix_of(const mx::array& a, const mx::Shape& shape) {
  bool repeats = (is(a, "Broadcast") || is(a, "ExpandDims")) && a.ndim() >= 2 && a.shape(-2) == shape[0] &&
      a.shape(-1) == shape[1];
  return repeats && input(a, 0).ndim() >= 2 ? matrix_of(input(a, 0), shape) : a;
}

bool hides(float value, mx::Dtype dtype) {
  return value <= (dtype == mx::float16 ? static_cast<float>(std::numeric_limits<mx::float16_t>::lowest()) : hidden);
}

} // namespace

bool shows_causal(const mx::array& mask, int rows, int columns) {
  const auto& m = matrix_of(mask, {rows, columns});
  return is(m, "GreaterEqual") && m.shape() == mx::Shape{rows, columns} && rows <= columns &&
      counts(input(m, 0), 0, columns - rows) && counts(input(m, 1), 1, 0);
}

// (i < j) * lowest, as MLX's create_additive_causal_mask has it, for as many rows as columns
bool adds_causal(const mx::array& mask, int rows, int columns) {
  const auto* m = &matrix_of(mask, {rows, columns});
  if (is(*m, "AsType") && mx::issubdtype(m->dtype(), mx::floating)) {
    const auto& from = input(*m, 0);
    if (mx::issubdtype(from.dtype(), mx::floating)) {
      m = &matrix_of(from, {rows, columns});
    }
  }
  if (!is(*m, "Multiply") || m->shape() != mx::Shape{rows, columns} || rows != columns) {
    return false;
  }
  for (int side : {0, 1}) {
    const auto& flags = input(*m, side);
    auto lowest = number(input(*m, 1 - side));
    if (!lowest || *lowest == -std::numeric_limits<float>::infinity() || !hides(*lowest, m->dtype()) ||
        !is(flags, "AsType") || !is(input(flags, 0), "Less")) {
      continue;
    }
    const auto& less = input(flags, 0);
    return less.shape() == mx::Shape{rows, columns} && counts(input(less, 0), 0, 0) && counts(input(less, 1), 1, 0);
  }
  return false;
}

} // namespace faststep::known
