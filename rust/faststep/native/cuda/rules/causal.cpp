// MLX's own attention with a mask that says no more than "causal": its kernels know that without reading one.
#include "cuda/rules/rules.hpp"

namespace faststep::rules {

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
