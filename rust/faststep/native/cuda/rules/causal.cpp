// Masks that say no more than "causal": kernels know that without reading one.
#include <limits>

#include "cuda/rules/rules.hpp"

namespace faststep::rules {

namespace {

constexpr float hidden = -1e9f; // an exponential of less, beside any score that a model trains with, is zero

// The numbers from `first` on, along this axis of a matrix; of a dtype that has them all.
bool counts(const mx::array& a, size_t axis, int first) {
  const auto& line = unrepeated(a);
  if (!is(line, "ExpandDims") || line.ndim() != 2 || line.shape(1 - axis) != 1 || line.shape(axis) != a.shape(axis)) {
    return false;
  }
  const auto& range = line.inputs()[0];
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
  return repeats && a.inputs()[0].ndim() >= 2 ? matrix_of(a.inputs()[0], shape) : a;
}

bool hides(float value, mx::Dtype dtype) {
  return value <= (dtype == mx::float16 ? static_cast<float>(std::numeric_limits<mx::float16_t>::lowest()) : hidden);
}

} // namespace

bool shows_causal(const mx::array& mask, int rows, int columns) {
  const auto& m = matrix_of(mask, {rows, columns});
  return is(m, "GreaterEqual") && m.shape() == mx::Shape{rows, columns} && rows <= columns &&
      counts(m.inputs()[0], 0, columns - rows) && counts(m.inputs()[1], 1, 0);
}

// (i < j) * lowest, as MLX's create_additive_causal_mask has it, for as many rows as columns
bool adds_causal(const mx::array& mask, int rows, int columns) {
  const auto* m = &matrix_of(mask, {rows, columns});
  if (is(*m, "AsType") && mx::issubdtype(m->dtype(), mx::floating)) {
    const auto& from = m->inputs()[0];
    if (mx::issubdtype(from.dtype(), mx::floating)) {
      m = &matrix_of(from, {rows, columns});
    }
  }
  if (!is(*m, "Multiply") || m->shape() != mx::Shape{rows, columns} || rows != columns) {
    return false;
  }
  for (int side : {0, 1}) {
    const auto& flags = m->inputs()[side];
    auto lowest = number(m->inputs()[1 - side]);
    if (!lowest || *lowest == -std::numeric_limits<float>::infinity() || !hides(*lowest, m->dtype()) ||
        !is(flags, "AsType") || !is(flags.inputs()[0], "Less")) {
      continue;
    }
    const auto& less = flags.inputs()[0];
    return less.shape() == mx::Shape{rows, columns} && counts(less.inputs()[0], 0, 0) && counts(less.inputs()[1], 1, 0);
  }
  return false;
}

namespace {

// Arrays of a gradient that was traced here read what the trace reads itself.
void unwrap(const mx::array& a) {
  for (auto output : a.outputs()) {
    for (auto& in : output.inputs()) {
      if (is(in, "Copy")) {
        in = mx::array(in.inputs()[0]);
      }
    }
  }
}

bool is_attention(const mx::array& a) {
  return is(a, "ScaledDotProductAttention");
}

bool is_gradient(const mx::array& a) {
  return is(a, "ScaledDotProductAttentionVJP");
}

} // namespace

std::optional<Arrays> CausalAttention::rewritten(const Arrays& outputs) {
  if (is_attention(outputs[0])) {
    return attention(outputs);
  }
  return is_gradient(outputs[0]) ? gradient(outputs[0]) : std::nullopt;
}

std::optional<Arrays> CausalAttention::attention(const Arrays& outputs) {
  const auto& out = outputs[0];
  auto [_, scale, causal, sinks, logsumexp, forced] =
      static_cast<const mx::fast::ScaledDotProductAttention&>(out.primitive()).state();
  const auto& in = out.inputs();
  if (in.size() != 4 || causal || sinks || forced || !adds_causal(in[3], in[0].shape(2), in[1].shape(2))) {
    return std::nullopt;
  }
  auto stream = out.primitive().stream();
  auto attend = [scale, stream](const Arrays& of) -> Arrays {
    return {mx::fast::scaled_dot_product_attention(of[0], of[1], of[2], scale, "causal", {}, {}, false, stream)};
  };
  Arrays inputs{in[0], in[1], in[2]};
  if (!logsumexp) {
    auto made = attend(inputs)[0];
    return is_attention(made) && made.outputs().size() == outputs.size() ? std::optional(made.outputs()) : std::nullopt;
  }
  // MLX lets nobody else make the operations, but makes them where something is differentiated
  auto [made, gradients] = mx::vjp(attend, inputs, {mx::zeros(out.shape(), out.dtype(), stream)});
  if (!is_attention(made[0]) || made[0].outputs().size() != outputs.size() || !is_gradient(gradients[0])) {
    return std::nullopt;
  }
  unwrap(made[0]);
  unwrap(gradients[0]);
  gradients_.emplace(made[0].id(), gradients[0]);
  return made[0].outputs();
}

std::optional<Arrays> CausalAttention::gradient(const mx::array& gradient) {
  const auto& in = gradient.inputs();
  auto found = in.size() == 7 ? gradients_.find(in[4].id()) : gradients_.end();
  if (found == gradients_.end()) {
    return std::nullopt;
  }
  auto made = found->second.outputs();
  for (auto& each : made) {
    each.inputs().back() = in[6];
  }
  gradients_.erase(found);
  return made;
}

} // namespace faststep::rules
