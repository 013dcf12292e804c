// Allocations of each primitive: the `eval_cpu` of mlx/backend/cpu and the `eval_gpu` of mlx/backend/{gpu,cuda}. A
// primitive without a rule allocates its outputs and nothing else.
#include "simulator/rules.hpp"

#include <algorithm>
#include <string_view>
#include <unordered_map>

#include "cpu/attention.hpp"
#include "cpu/quantized.hpp"

namespace faststep::simulator {

namespace {

bool has_rows(const mx::array& x) {
  return x.flags().contiguous && (x.ndim() == 0 || x.strides().back() == 1);
}

// Softmax and the norms: a row at a time, in place where nobody else wants the input.
void by_row(Site& site) {
  const auto& in = site.in(0);
  auto& out = site.out();
  if (!has_rows(in.face)) {
    ++site.work.kernels;
    fresh(site, out);
  } else if (is_free(in)) {
    share(out, in);
  } else {
    fresh_like(site, out, in.face);
  }
}

void log_sum_exp(Site& site) {
  const auto& in = site.in(0).face;
  if (!has_rows(in)) {
    temporary(site, in.nbytes());
  }
  fresh(site, site.out());
}

void concatenate(Site& site) {
  fresh(site, site.out());
  site.work.kernels = static_cast<int>(site.op.inputs.size());
}

// Inputs are copied where their rows do not lie together.
void needs_rows(Site& site) {
  for (auto* in : site.op.inputs) {
    if (!in->face.flags().row_contiguous) {
      temporary(site, in->face.nbytes());
    }
  }
  for (auto* out : site.op.outputs) {
    fresh(site, *out);
  }
}

// The gradient of a norm's weight is gathered from as many numbers as the input has.
void norm_vjp(Site& site) {
  needs_rows(site);
  if (site.in(1).face.ndim() > 0) {
    temporary(site, site.in(0).face.nbytes());
  }
}

bool is_matrix(const mx::array& x) {
  auto row = x.strides(-2), column = x.strides(-1);
  return (row == x.shape(-1) && column == 1) || (row == 1 && column == x.shape(-2));
}

// `c` is copied into the output of `a @ b + c`; a GPU reads it where it is.
void matmul(Site& site) {
  bool adds = site.op.inputs.size() == 3, on_gpu = site.op.primitive->device() == mx::Device::gpu;
  if (adds && !on_gpu) {
    const auto& c = site.in(2).face;
    ++site.work.kernels;
    copy_into(site, site.in(2), site.out(), c.data_size() != 1 && c.flags().row_contiguous);
  } else {
    fresh(site, site.out());
  }
  for (size_t i = 0; i < 2; ++i) {
    const auto& x = site.in(i).face;
    if (!is_matrix(x)) {
      temporary(site, x.nbytes());
    }
  }
}

// Of a GPU's, only the gradient of the weights was seen to need much: the unfolded input. It is the convolution with a
// large kernel, the outputs' gradient.
void gpu_convolution(Site& site) {
  const auto &in = site.in(0).face, &weight = site.in(1).face, &out = site.out().face;
  fresh(site, site.out());
  bool backward = !in.flags().row_contiguous && !weight.flags().row_contiguous && weight.shape(1) > out.shape(1);
  if (backward && out.size() > 0) {
    auto rows = weight.size() / weight.shape(0), columns = out.size() / out.shape(-1);
    temporary(site, rows * columns * in.itemsize() + in.nbytes());
  }
}

// The CPU unfolds the padded input and multiplies it with the weights, in float32.
void convolution(Site& site) {
  if (site.op.primitive->device() == mx::Device::gpu) {
    gpu_convolution(site);
    return;
  }
  const auto &in = site.in(0).face, &weight = site.in(1).face, &out = site.out().face;
  fresh(site, site.out());
  auto [_, low, high, dilation, input_dilation, groups, flip] =
      static_cast<const mx::Convolution&>(*site.op.primitive).state();
  auto is_one = [](int n) { return n == 1; };
  bool plain = std::all_of(dilation.begin(), dilation.end(), is_one) &&
      std::all_of(input_dilation.begin(), input_dilation.end(), is_one);
  if (!plain || (groups != 1 && (in.ndim() != 3 || flip))) {
    return; // by loops, without temporaries
  }
  auto item = mx::size_of(mx::float32);
  size_t padded = in.shape(0) * in.shape(-1), unfolded = out.size() / out.shape(-1) * in.shape(-1);
  for (size_t i = 0; i < low.size(); ++i) {
    padded *= in.shape(i + 1) + low[i] + high[i];
    unfolded *= weight.shape(i + 1);
  }
  temporary(site, padded * item);
  temporary(site, unfolded * item);
  if (groups > 1 || weight.dtype() != mx::float32 || !weight.flags().row_contiguous) {
    temporary(site, weight.size() * item);
  }
  if (flip) {
    temporary(site, weight.size() * item);
  }
  if (out.dtype() != mx::float32) {
    temporary(site, out.size() * item);
  }
}

// Needs its scratch while it runs, and one product runs at a time (cpu/quantized.cpp).
void dequantized(Site& site) {
  std::vector<mx::array> inputs;
  for (auto* in : site.op.inputs) {
    inputs.push_back(in->face);
  }
  fresh(site, site.out());
  site.work.scratch = scratch_of(*site.op.primitive, inputs, site.out().face);
}

// Needs scratch of the size of its output while it runs (cpu/turned.cpp).
void turned_product(Site& site) {
  fresh(site, site.out());
  site.work.scratch = site.out().face.nbytes();
}

// Copies the factors that BLAS cannot read where they lie (cpu/attention.cpp).
void attention(Site& site) {
  for (auto* out : site.op.outputs) {
    fresh(site, *out);
  }
  auto add = [&](size_t i) {
    if (const auto& x = site.in(i).face; attention_copies(x)) {
      temporary(site, x.nbytes());
    }
  };
  for (size_t i : {0, 1, 2}) {
    add(i);
  }
  if (site.op.outputs.size() == 3) {
    add(site.op.inputs.size() - 2); // the cotangent
  }
}

// Passes its input on, and marks the place (cpu/pace.cpp).
void pace(Site& site) {
  share(site.out(), site.in(0));
}

// Passes its inputs on (cpu/pace.cpp).
void wait(Site& site) {
  for (size_t i = 0; i < site.op.outputs.size(); ++i) {
    share(site.out(i), site.in(i));
  }
  site.work.kernels = 0;
}

void others(Site& site) {
  for (auto* out : site.op.outputs) {
    fresh(site, *out);
  }
}

using Rule = void (*)(Site&);

Rule rule(std::string_view name) {
  static const std::unordered_map<std::string_view, Rule> rules = [] {
    std::unordered_map<std::string_view, Rule> rules{
        {"Contiguous", contiguous},   {"Softmax", by_row},             {"LogSumExp", log_sum_exp},
        {"LayerNorm", by_row},        {"RMSNorm", by_row},             {"RoPE", by_row},
        {"Concatenate", concatenate}, {"Matmul", matmul},              {"AddMM", matmul},
        {"Convolution", convolution}, {"QuantizedMatmul", needs_rows}, {"Select", select},
        {"LayerNormVJP", norm_vjp},   {"RMSNormVJP", norm_vjp},        {"Dequantized", dequantized},
        {"Pace", pace},               {"Wait", wait},                  {"TurnedProduct", turned_product},
        {"AddedProduct", matmul},     {"Attention", attention},      {"AttentionVJP", attention}};
    for (auto name : {"Reshape", "Flatten", "Unflatten"}) {
      rules[name] = reshape;
    }
    for (auto name : {"AsStrided", "Broadcast", "BroadcastAxes", "Copy", "CustomTransforms", "Depends", "ExpandDims",
                      "Slice", "Split", "Squeeze", "StopGradient", "Transpose"}) {
      rules[name] = view;
    }
    for (auto name : {"Abs",  "ArcCos", "ArcCosh",    "ArcSin", "ArcSinh", "ArcTan",  "ArcTanh", "BitwiseInvert",
                      "Ceil", "Cos",    "Conjugate",  "Cosh",   "Erf",     "ErfInv",  "Exp",     "Expm1",
                      "Floor", "Imag",  "Log",        "Log10",  "Log1p",   "Log2",    "LogicalNot", "Negative",
                      "Real", "Round",  "Rsqrt",      "Sigmoid", "Sign",   "Sin",     "Sinh",    "Sqrt",
                      "Square", "Tan",  "Tanh",       "ToFP8",  "FromFP8"}) {
      rules[name] = unary;
    }
    for (auto name : {"Add",        "ArcTan2",    "BitwiseAnd", "BitwiseOr", "BitwiseXor", "Divide",    "DivMod",
                      "Equal",      "FloorDivide", "Greater",   "GreaterEqual", "LeftShift", "Less",    "LessEqual",
                      "LogAddExp",  "LogicalAnd", "LogicalOr",  "Maximum",   "Minimum",    "Multiply",  "NaNEqual",
                      "NotEqual",   "Power",      "Remainder",  "RightShift", "Subtract"}) {
      rules[name] = binary;
    }
    for (auto name : {"AsType", "Full", "Sort", "WithRows", "Scatter", "Scatter Sum", "Scatter Prod", "Scatter Min", "Scatter Max",
                      "ScatterAxis", "ScatterAxis Sum", "MaskedScatter", "SliceUpdate", "SliceUpdate Sum",
                      "SliceUpdate Prod", "SliceUpdate Min", "SliceUpdate Max", "DynamicSliceUpdate"}) {
      rules[name] = copied;
    }
    return rules;
  }();
  auto found = rules.find(name);
  if (found != rules.end()) {
    return found->second;
  }
  return name.starts_with("Compiled") ? compiled : others;
}

} // namespace

bool is_elementwise(std::string_view name) {
  auto found = rule(name);
  return found == unary || found == binary || found == select || name == "AsType" || name == "Broadcast";
}

bool is_view(std::string_view name) {
  auto found = rule(name);
  return found == view || found == reshape;
}

Work run(Memory& memory, const Op& op) {
  Site site{memory, op, {}};
  rule(op.primitive->name())(site);
  return std::move(site.work);
}

} // namespace faststep::simulator
