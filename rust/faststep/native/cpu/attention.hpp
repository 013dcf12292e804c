// Attention in float32 and its gradient by blocks of rows of the scores: the matrix of them is never there as a whole.
#pragma once

#include <functional>
#include <optional>
#include <utility>
#include <vector>

#include "patterns/attention.hpp"
#include "ffi.hpp"

namespace faststep {

class CpuAttention : public AttentionRule {
 public:
  // `sgemm` may be null: nothing is found then. `is_alone`: as of the rule.
  CpuAttention(Sgemm sgemm, Share share, std::function<bool(const mx::array&)> is_alone)
      : sgemm_(sgemm), share_(share), is_alone_(std::move(is_alone)) {}

 private:
  bool reads_masks() const override {
    return true;
  }

  bool is_alone(const mx::array& softmax) const override {
    return is_alone_(softmax);
  }

  std::optional<mx::array> probabilities(const mx::array& softmax, const Scores& scores) override;
  bool fits(const Attention& attention) const override;
  Arrays forward(const Attention& attention) override;
  Arrays backward(const Attention& attention, const mx::array& cotangent) override;
  template <typename Kernel>
  Arrays call(const Attention& attention, const Arrays& others, std::vector<mx::Shape> shapes) const;

  Sgemm sgemm_;
  Share share_;
  std::function<bool(const mx::array&)> is_alone_;
};

// Return true if the attention kernel has to copy these matrices, since BLAS cannot read them with these strides.
bool attention_copies(const mx::array& matrices);

} // namespace faststep
