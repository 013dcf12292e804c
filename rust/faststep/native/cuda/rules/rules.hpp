// Rules by which a traced step is rewritten for CUDA: kernels of our own in place of MLX's operations.
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <optional>
#include <string>
#include <string_view>
#include <unordered_map>
#include <utility>
#include <vector>

#include "mlx/fast.h"
#include "mlx/mlx.h"
#include "mlx/primitives.h"
#include "fast_primitives.hpp"

namespace faststep::rules {

namespace mx = mlx::core;

using Arrays = std::vector<mx::array>;

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

inline bool is(const mx::array& a, std::string_view primitive) {
  return a.has_primitive() && a.primitive().name() == primitive;
}

// Whether kernels here compute with it.
inline bool is_known(mx::Dtype dtype) {
  return dtype == mx::float32 || dtype == mx::float16 || dtype == mx::bfloat16;
}

inline int divided(int64_t a, int64_t b) {
  return static_cast<int>((a + b - 1) / b);
}

// The array that another one repeats along some axes, or the array itself.
inline const mx::array& unrepeated(const mx::array& a) {
  return is(a, "Broadcast") ? a.inputs()[0] : a;
}

// The array that another one has in another shape, or the array itself.
inline const mx::array& unshaped(const mx::array& a) {
  return is(a, "Reshape") || is(a, "Flatten") || is(a, "Unflatten") ? unshaped(a.inputs()[0]) : a;
}

// The value of a scalar of a floating dtype, if it is there.
std::optional<float> number(const mx::array& a);

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

// Whether row i of a mask of these positions shows the columns up to i + columns - rows.
bool shows_causal(const mx::array& mask, int rows, int columns);

// Whether a mask that is added to scores hides all but these.
bool adds_causal(const mx::array& mask, int rows, int columns);

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
class Softmax {
 public:
  explicit Softmax(const Heads& heads) : heads_(heads) {}

  // The array that takes another one's place, whose inputs have been replaced already.
  std::optional<mx::array> rewritten(const mx::array& a);

  struct Attention {
    mx::array probabilities, queries, keys, values;
    mx::array scaled, keys_swapped, values_read; // by the products
    float scale;
    bool is_causal, is_few; // in positions
    Arrays made; // the output, and what its gradient is computed from
  };

 private:
  // Scores of which row i sees the columns up to i + columns - rows, and the mask that says so.
  struct Causal {
    mx::array scores, mask;
  };
  struct Gradient {
    mx::array probabilities, cotangent;
  };
  std::optional<mx::array> causal(const mx::array& softmax);
  std::optional<mx::array> gradient(const mx::array& difference);
  std::optional<mx::array> masked(const mx::array& product);
  std::optional<mx::array> product(const mx::array& product);
  std::optional<mx::array> attention(const mx::array& product);
  const Arrays* backward(const Attention& attention, const mx::array& cotangent);
  const Arrays& gradient_of(const Attention& attention, const mx::array& cotangent);
  Arrays few(const Attention& attention, const std::optional<mx::array>& cotangent) const;
  static Arrays tiles(const Attention& attention);
  static Arrays tiles(const Attention& attention, const mx::array& cotangent);

  using Id = std::uintptr_t;
  const Heads& heads_;
  std::unordered_map<Id, Causal> causal_; // by the probabilities
  std::unordered_map<Id, Attention> attentions_; // by the probabilities
  std::unordered_map<Id, Gradient> gradients_; // by the gradient of the scores
  std::map<std::pair<Id, Id>, Arrays> backward_; // of queries, keys and values, by probabilities and cotangent
  std::unordered_map<Id, std::pair<mx::array, float>> queries_; // their gradient, by that of what is scaled
};

} // namespace faststep::rules
