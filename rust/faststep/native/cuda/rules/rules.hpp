// Rules by which a traced step is rewritten for CUDA: kernels of our own in place of MLX's operations.
#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "mlx/fast.h"
#include "mlx/mlx.h"
#include "mlx/primitives.h"
#include "fast_primitives.hpp"
#include "patterns/attention.hpp"
#include "patterns/known.hpp"

namespace faststep::rules {

namespace mx = mlx::core;

using namespace known;

inline constexpr int lanes = 32; // of a warp
inline constexpr int warps = 8; // of a block

// A kernel with its launch: `blocks` of `threads` each; its source sees the inputs and outputs by these names.
struct Kernel {
  std::string name;
  std::vector<std::string> inputs, outputs;
  std::string source;
  std::vector<std::pair<std::string, mx::fast::TemplateArg>> constants;
  std::pair<int, int> blocks, threads;
  bool contiguous = true; // whether inputs are copied that do not lie row after row
  std::string functions = {}; // that the source calls
};

// Its outputs, of these shapes and dtypes.
Arrays call(
    const Kernel& kernel,
    const Arrays& inputs,
    const std::vector<mx::Shape>& shapes,
    std::vector<mx::Dtype> dtypes);

// Whether kernels here compute with it.
inline bool is_known(mx::Dtype dtype) {
  return dtype == mx::float32 || dtype == mx::float16 || dtype == mx::bfloat16;
}

inline int divided(int64_t a, int64_t b) {
  return static_cast<int>((a + b - 1) / b);
}

// A number in a kernel's source, to the bit.
std::string literal(float value);

// Blocks that share so many rows, where so many lie side by side.
int parts_of_rows(int64_t rows, int across);

// Whether this is the sum of the rows of a matrix, or of all matrices in an array.
bool sums_rows(const mx::array& sum);

// The sum of the rows of a matrix, or of all matrices in an array, if this is one.
std::optional<mx::array> column_sum(const mx::array& sum);

// The sum of the rows of a float32 matrix, by one kernel.
mx::array sum_of_few(const mx::array& x, mx::Shape shape, mx::Dtype dtype);

// A product of small matrices, with a row added to each of its own or not, if this is one.
std::optional<mx::array> small_product(const mx::array& product);

// A layer norm, if this is one.
std::optional<mx::array> layer_norm(const mx::array& normed);

// The gradients of a layer norm by its input, weight and bias, if these are they; something may be added to the first.
std::optional<Arrays> layer_norm_vjp(const Arrays& gradients, const std::optional<mx::array>& added);

// MLX's own attention in half precision, and its gradient, with such a mask: the same without one.
class CausalAttention {
 public:
  std::optional<Arrays> rewritten(const Arrays& outputs);

 private:
  std::optional<Arrays> attention(const Arrays& outputs);
  std::optional<Arrays> gradient(const mx::array& gradient);

  std::unordered_map<std::uintptr_t, mx::array> gradients_; // that wait for their cotangent, by the output
};

// The gradient of max(x, 0), with that of a bias before it.
class Relu {
 public:
  // Who reads arrays: how many read one that has taken another one's place, and whether the rows of the one that is looked at
  // are summed up.
  struct Uses {
    std::function<size_t(const mx::array&)> count;
    bool is_summed;
  };

  // The array that takes another one's place, whose inputs have been replaced already.
  std::optional<mx::array> rewritten(const mx::array& a, const Uses& uses);

 private:
  std::optional<mx::array> gradient(const mx::array& product, const Uses& uses);
  std::optional<mx::array> sum(const mx::array& sum) const;

  std::unordered_map<std::uintptr_t, mx::array> outputs_; // by what went in
  std::unordered_map<std::uintptr_t, mx::array> masks_; // the output, by where it is positive
  std::unordered_map<std::uintptr_t, mx::array> sums_; // of some rows each, by the gradient
};

// Heads and positions of attention change places before a product and behind it: each is copied once.
class Heads {
 public:
  // Let an operation read a copy that lies row after row, where it would make one for itself.
  void read_by(mx::array& a);
  // The array of which a transpose is the transpose.
  std::optional<mx::array> rewritten(const mx::array& a) const;
  // The array of which another one is a copy, or the array itself.
  const mx::array& original(const mx::array& a) const;

 private:
  mx::array moved(const mx::array& a);

  std::unordered_map<std::uintptr_t, mx::array> moved_, originals_;
};

// Softmax along the last axis, attention in float32 and the gradients of both.
class Softmax : public AttentionRule {
 public:
  explicit Softmax(const Heads& heads) : heads_(heads) {}

 private:
  const mx::array& original(const mx::array& a) const override;
  std::optional<mx::array> probabilities(const mx::array& softmax, const Scores& scores) override;
  std::optional<mx::array> gradient(const Gradient& gradient) override;
  bool fits(const Attention& attention) const override;
  Arrays forward(const Attention& attention) override;
  Arrays backward(const Attention& attention, const mx::array& cotangent) override;

  static bool is_few(const Attention& attention); // in positions
  Arrays read(const Attention& attention) const;
  Arrays few(const Attention& attention, const std::optional<mx::array>& cotangent) const;
  static Kernel of_tiles(const Attention& attention, const char* name, const char* source);
  Arrays tiles(const Attention& attention) const;
  Arrays tiles(const Attention& attention, const mx::array& cotangent) const;

  const Heads& heads_;
};

} // namespace faststep::rules
