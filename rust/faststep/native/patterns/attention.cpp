#include "patterns/attention.hpp"

#include <limits>

#include "patterns/known.hpp"
#include "mlx/primitives.h"

namespace faststep {

std::optional<mx::array> AttentionRule::rewritten(const mx::array& a) {
  if (known::is(a, "Softmax")) {
    return softmax(a);
  }
  if (known::is(a, "Subtract")) {
    return difference(a);
  }
  if (known::is(a, "Matmul")) {
    return product(a);
  }
  if (known::is(a, "Multiply")) {
    if (auto found = masked(a)) {
      return found;
    }
  }
  return known::is(a, "Multiply") || known::is(a, "Divide") ? multiple(a) : std::nullopt;
}

std::optional<AttentionRule::Scores> AttentionRule::scores_of(const mx::array& softmax) const {
  const auto& masked = known::input(softmax, 0);
  if (softmax.dtype() != mx::float32 || softmax.ndim() < 2 || softmax.size() == 0) {
    return std::nullopt;
  }
  int rows = softmax.shape(-2), columns = softmax.shape(-1);
  if (known::is(masked, "Select")) {
    const auto &mask = known::input(masked, 0), &scores = known::input(masked, 1);
    if (auto hidden = known::number(known::input(masked, 2)); hidden && scores.shape() == softmax.shape()) {
      bool is_causal = *hidden <= std::numeric_limits<float>::lowest() && known::shows_causal(mask, rows, columns);
      if (is_causal || reads_masks()) {
        return Scores{scores, mask, *hidden, is_causal};
      }
    }
  } else if (known::is(masked, "Add")) {
    for (int side : {0, 1}) {
      const auto &mask = known::input(masked, side), &scores = known::input(masked, 1 - side);
      bool is_causal = known::adds_causal(mask, rows, columns);
      bool is_read = is_causal || (reads_masks() && mask.dtype() == mx::float32 && known::is(*known::without_factor(scores).first, "Matmul"));
      if (is_read && scores.shape() == softmax.shape() && mask.shape() == softmax.shape()) {
        return Scores{scores, mask, 0, is_causal};
      }
    }
  }
  return Scores{masked, std::nullopt};
}

std::optional<mx::array> AttentionRule::softmax(const mx::array& a) {
  auto scores = scores_of(a);
  auto made = probabilities(a, scores.value_or(Scores{known::input(a, 0), std::nullopt}));
  if (scores && is_alone(a)) {
    scores_.emplace(made.value_or(a).id(), *scores);
  }
  return made;
}

// p c - p sum(p c): the gradient of p = softmax(x), where c is that of p
std::optional<mx::array> AttentionRule::difference(const mx::array& a) {
  const auto &whole = known::input(a, 0), &part = known::input(a, 1);
  if (!known::is(whole, "Multiply") || !known::is(part, "Multiply")) {
    return std::nullopt;
  }
  const auto &p = known::input(whole, 0), &cotangent = known::input(whole, 1), &sum = known::unrepeated(known::input(part, 1));
  if (known::input(part, 0).id() != p.id() || !known::is(sum, "Sum") || known::input(sum, 0).id() != whole.id()) {
    return std::nullopt;
  }
  auto axes = static_cast<const mx::Reduce&>(sum.primitive()).state().second;
  bool is_last = axes.size() == 1 && axes[0] == static_cast<int>(whole.ndim()) - 1;
  auto scores = scores_.find(p.id());
  bool is_known = scores != scores_.end() || known::is(p, "Softmax");
  if (!is_last || !is_known || cotangent.dtype() != p.dtype() || cotangent.shape() != p.shape()) {
    return std::nullopt;
  }
  Gradient found{a, p, cotangent, scores == scores_.end() ? Scores{p, std::nullopt} : scores->second};
  auto made = gradient(found);
  if (scores != scores_.end()) {
    found.array = made.value_or(a);
    gradients_.emplace(found.array.id(), found);
  }
  return made;
}

// A gradient of scores is zero where they are masked: it is so already behind a causal mask.
std::optional<mx::array> AttentionRule::masked(const mx::array& a) {
  const auto &factor = known::input(a, 0), &other = known::input(a, 1);
  auto found = gradients_.find(other.id());
  const auto& cast = known::unrepeated(factor);
  if (found == gradients_.end() || !known::is(cast, "AsType")) {
    return std::nullopt;
  }
  auto gradient = found->second;
  const auto& scores = gradient.scores;
  bool is_same = scores.mask && scores.mask->dtype() == mx::bool_ &&
      known::unrepeated(known::input(cast, 0)).id() == known::unrepeated(*scores.mask).id();
  if (is_same && scores.is_causal) {
    return other;
  }
  if (is_same) {
    gradient.array = a;
    gradients_.emplace(a.id(), gradient);
  }
  return std::nullopt;
}

// The gradient of a product is scaled where that is; that of queries is scaled where it is computed.
std::optional<mx::array> AttentionRule::multiple(const mx::array& a) {
  auto [of, factor] = known::without_factor(a);
  if (of == &a) {
    return std::nullopt;
  }
  if (auto found = gradients_.find(of->id()); found != gradients_.end() && !found->second.is_scaled) {
    auto gradient = found->second;
    if (factor == known::without_factor(gradient.scores.visible).second) {
      gradient.array = a;
      gradient.is_scaled = true;
      gradients_.emplace(a.id(), gradient);
    }
    return std::nullopt;
  }
  auto found = queries_.find(of->id());
  bool is_same = found != queries_.end() && factor == found->second.second;
  return is_same ? std::optional(found->second.first) : std::nullopt;
}

// The products of attention, and those of its gradient.
std::optional<mx::array> AttentionRule::product(const mx::array& a) {
  const auto &left = known::input(a, 0), &right = known::input(a, 1);
  if (scores_.contains(left.id())) {
    const auto* found = attention(left, right);
    return found ? std::optional(found->made[0]) : std::nullopt;
  }
  if (auto of = gradients_.find(left.id()); of != gradients_.end()) {
    const auto* found = attention_of(of->second);
    if (!found || !known::are_swapped(right, found->keys_swapped)) {
      return std::nullopt;
    }
    auto made = gradients_of(*found, known::input(of->second.cotangent, 0))[0];
    if (found->scale_of_queries == 1) {
      return made;
    }
    queries_.emplace(a.id(), std::pair{made, found->scale_of_queries});
    return std::nullopt;
  }
  if (auto of = gradients_.find(right.id()); of != gradients_.end()) {
    const auto* found = attention_of(of->second);
    if (!found || !known::are_swapped(left, found->scaled)) {
      return std::nullopt;
    }
    auto keys = gradients_of(*found, known::input(of->second.cotangent, 0))[1];
    return mx::swapaxes(keys, -1, -2, a.primitive().stream());
  }
  const auto* p = known::swapped_back(left);
  auto found = p ? attentions_.find(p->id()) : attentions_.end();
  if (p && found == attentions_.end()) {
    computed_.insert(p->id()); // for this product: the other gradients may as well read them
  }
  bool fits = found != attentions_.end() && right.dtype() == mx::float32 && right.shape() == found->second.made[0].shape();
  return fits ? std::optional(gradients_of(found->second, right)[2]) : std::nullopt;
}

const AttentionRule::Attention* AttentionRule::attention(const mx::array& p, const mx::array& values) {
  if (auto found = attentions_.find(p.id()); found != attentions_.end()) {
    return found->second.values_read.id() == values.id() ? &found->second : nullptr;
  }
  const auto& scores = scores_.at(p.id());
  auto [product, scale_of_scores] = known::without_factor(scores.visible);
  if (computed_.contains(p.id()) || !known::is(*product, "Matmul") || product->shape() != p.shape() || values.ndim() != p.ndim()) {
    return nullptr;
  }
  const auto &scaled = known::input(*product, 0), &keys_swapped = known::input(*product, 1);
  auto [before, scale_of_queries] = known::without_factor(scaled);
  Attention made{
      p,
      original(*before),
      scaled,
      keys_swapped,
      original(values),
      values,
      scores,
      scale_of_queries * scale_of_scores,
      scale_of_queries,
      scale_of_scores,
      {}};
  for (const auto& factor : {made.queries, keys_swapped, made.values}) {
    if (factor.dtype() != mx::float32 || factor.size() == 0) {
      return nullptr;
    }
  }
  if (made.queries.shape() != scaled.shape() || !fits(made)) {
    return nullptr;
  }
  made.made = forward(made);
  return &attentions_.emplace(p.id(), std::move(made)).first->second;
}

// The attention that a gradient of scores comes from: that of the probabilities is a product with the values.
const AttentionRule::Attention* AttentionRule::attention_of(const Gradient& gradient) {
  const auto &p = gradient.probabilities, &of = gradient.cotangent;
  if (!known::is(of, "Matmul")) {
    return nullptr;
  }
  const auto &cotangent = known::input(of, 0), &swapped = known::input(of, 1);
  const auto* values = known::swapped_back(swapped);
  if (!attentions_.contains(p.id()) && values) {
    attention(p, *values); // a checkpoint's, whose output is not computed again
  }
  auto found = attentions_.find(p.id());
  bool is_same = found != attentions_.end() && known::are_swapped(swapped, found->second.values_read) &&
      cotangent.shape() == found->second.made[0].shape() && gradient.is_scaled == (found->second.scale_of_scores != 1);
  return is_same ? &found->second : nullptr;
}

const Arrays& AttentionRule::gradients_of(const Attention& attention, const mx::array& cotangent) {
  std::pair at{attention.made[0].id(), cotangent.id()};
  auto found = backward_.find(at);
  if (found == backward_.end()) {
    found = backward_.emplace(at, backward(attention, original(cotangent))).first;
  }
  return found->second;
}

} // namespace faststep
