// Attention in float32 and its gradient, found in a trace operation by operation, as MLX composes them where it has no kernel for
// them, or as a program writes them: softmax(mask(queries keys^T scale)) values.
#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <unordered_map>
#include <unordered_set>
#include <utility>
#include <vector>

#include "mlx/mlx.h"

namespace faststep {

namespace mx = mlx::core;

using Arrays = std::vector<mx::array>;

class AttentionRule {
 public:
  virtual ~AttentionRule() = default;

  // The array that takes another one's place, whose inputs have been replaced already.
  std::optional<mx::array> rewritten(const mx::array& a);

 protected:
  // Input of a softmax.
  struct Scores {
    mx::array visible; // before the mask
    std::optional<mx::array> mask; // of bools that show a score, or of numbers that are added
    float hidden = 0; // what stands where bools show nothing
    bool is_causal = false; // row i sees the columns up to i + columns - rows, and the mask says no more
  };

  // With queries as they are before `scaled`, which the product of the scores reads.
  struct Attention {
    mx::array probabilities, queries, scaled, keys_swapped, values;
    mx::array values_read; // by the product of the output
    Scores scores;
    float scale; // of queries and scores together
    float scale_of_queries, scale_of_scores;
    Arrays made; // by `forward`
  };

  // Of scores; `is_scaled`: of their product before the scale, too.
  struct Gradient {
    mx::array array, probabilities, cotangent;
    Scores scores;
    bool is_scaled = false;
  };

  // The array that another one has been copied from, or the array itself.
  virtual const mx::array& original(const mx::array& a) const {
    return a;
  }

  // Return true if the kernels take masks other than causal ones.
  virtual bool reads_masks() const {
    return false;
  }

  // Return true if only an attention and its gradient use a softmax, and the gradient of its input.
  virtual bool is_alone(const mx::array&) const {
    return true;
  }

  // A softmax, and the gradient of one, computed in another way.
  virtual std::optional<mx::array> probabilities(const mx::array& softmax, const Scores& scores) = 0;
  virtual std::optional<mx::array> gradient(const Gradient&) {
    return std::nullopt;
  }

  virtual bool fits(const Attention& attention) const = 0;
  // The output, and what its gradient is computed from.
  virtual Arrays forward(const Attention& attention) = 0;
  // The gradients of queries, keys and values by that of the output.
  virtual Arrays backward(const Attention& attention, const mx::array& cotangent) = 0;

 private:
  using Id = std::uintptr_t;

  std::optional<Scores> scores_of(const mx::array& softmax) const;
  std::optional<mx::array> softmax(const mx::array& a);
  std::optional<mx::array> difference(const mx::array& a);
  std::optional<mx::array> multiple(const mx::array& a);
  std::optional<mx::array> masked(const mx::array& a);
  std::optional<mx::array> product(const mx::array& a);
  const Attention* attention(const mx::array& probabilities, const mx::array& values);
  const Attention* attention_of(const Gradient& gradient);
  const Arrays& gradients_of(const Attention& attention, const mx::array& cotangent);

  std::unordered_map<Id, Scores> scores_; // by the probabilities
  std::unordered_set<Id> computed_; // probabilities that operations read which stay as they are
  std::unordered_map<Id, Gradient> gradients_; // by themselves
  std::unordered_map<Id, Attention> attentions_; // by the probabilities
  std::map<std::pair<Id, Id>, Arrays> backward_; // by the output and its cotangent
  std::unordered_map<Id, std::pair<mx::array, float>> queries_; // their gradient, by that of what is scaled, and the scale
};

} // namespace faststep
