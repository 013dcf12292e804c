// Convolutions of images of float32, and the gradients of their weights: some patches at a time are written out and multiplied
// (src/mlx/convolution.rs). MLX writes out all of them, nine times the image for a kernel of 3 x 3, number by number, and computes the
// gradient of a convolution with a stride without a product of matrices (mlx/backend/cpu/conv.cpp).
#include "cpu/convolution.hpp"

#include <algorithm>
#include <initializer_list>
#include <memory>
#include <string_view>
#include <utility>
#include <vector>

#include "mlx/backend/cpu/encoder.h"
#include "mlx/primitives.h"
#include "cpu/on_cpu.hpp"
#include "patterns/known.hpp"

namespace faststep {

namespace {

class Convolved : public OnCpu {
 public:
  Convolved(mx::Stream stream, const Convolution& call, Convolve convolve) : OnCpu(stream), call_(call), convolve_(convolve) {}

  void eval_cpu(const std::vector<mx::array>& inputs, mx::array& out) override {
    out.set_data(mx::allocator::malloc(out.nbytes()));
    auto call = call_;
    call.x = inputs[0].data<float>();
    call.other = inputs[1].data<float>();
    call.out = out.data<float>();
    mx::cpu::get_command_encoder(stream()).dispatch([call, convolve = convolve_] { convolve(&call); });
  }

  const char* name() const override {
    return "Convolved";
  }

  bool is_equivalent(const mx::Primitive& other) const override {
    return call_ == static_cast<const Convolved&>(other).call_;
  }

 private:
  Convolution call_; // without its memory
  Convolve convolve_;
};

mx::array convolution_by(const mx::array& a, const mx::array& x, const mx::array& other, const Convolution& call, Convolve convolve) {
  auto stream = a.primitive().stream();
  std::vector<mx::array> inputs{mx::contiguous(x, false, stream), mx::contiguous(other, false, stream)};
  return mx::array(a.shape(), a.dtype(), std::make_shared<Convolved>(stream, call, convolve), std::move(inputs));
}

mx::array flipped(const mx::array& weights, mx::Stream stream) {
  auto shape = weights.shape();
  return mx::slice(weights, {0, shape[1] - 1, shape[2] - 1, 0}, {shape[0], -shape[1] - 1, -shape[2] - 1, shape[3]}, {1, -1, -1, 1}, stream);
}

void set_pair(size_t (&pair)[2], int height, int width) {
  pair[0] = static_cast<size_t>(height);
  pair[1] = static_cast<size_t>(width);
}

// But for strides, dilation and padding.
Convolution convolution_over(const mx::array& x, const mx::Shape& kernel, const mx::Shape& patches) {
  Convolution call{};
  call.images = x.shape(0);
  call.channels = x.shape(3);
  call.outputs = kernel[0];
  set_pair(call.size, x.shape(1), x.shape(2));
  set_pair(call.kernel, kernel[1], kernel[2]);
  set_pair(call.patches, patches[1], patches[2]);
  set_pair(call.dilation, 1, 1);
  return call;
}

std::optional<mx::array> convolved(const mx::array& a, Convolve convolve) {
  const auto &x = a.inputs()[0], &weights = a.inputs()[1];
  auto [strides, before, behind, kernel_dilation, dilation, groups, flips] = static_cast<const mx::Convolution&>(a.primitive()).state();
  bool fits = x.ndim() == 4 && x.dtype() == mx::float32 && weights.dtype() == mx::float32 && groups == 1 &&
      kernel_dilation == std::vector{1, 1} && std::min(before[0], before[1]) >= 0;
  if (!fits) {
    return std::nullopt;
  }
  auto call = convolution_over(x, weights.shape(), a.shape());
  set_pair(call.stride, strides[0], strides[1]);
  set_pair(call.dilation, dilation[0], dilation[1]);
  set_pair(call.padding, before[0], before[1]);
  return convolution_by(a, x, flips ? flipped(weights, a.primitive().stream()) : weights, call, convolve);
}

bool is_one_of(const mx::array& a, std::initializer_list<std::string_view> names) {
  return a.has_primitive() && std::find(names.begin(), names.end(), a.primitive().name()) != names.end();
}

// A product with a matrix of patches, of which MLX makes the gradient of weights (conv_weight_backward_patches in mlx/primitives.cpp).
std::optional<mx::array> weight_gradient(const mx::array& a, Convolve convolve) {
  const auto &turned = known::input(a, 0), &matrix = known::input(a, 1);
  bool is_product = a.ndim() == 2 && is_one_of(turned, {"Transpose"}) &&
      static_cast<const mx::Transpose&>(turned.primitive()).state() == std::vector{1, 0} && is_one_of(matrix, {"Reshape", "Flatten"});
  if (!is_product) {
    return std::nullopt;
  }
  const auto& view = known::input(matrix, 0);
  if (!is_one_of(view, {"AsStrided"}) || !is_one_of(view.inputs()[0], {"Reshape", "Flatten"})) {
    return std::nullopt;
  }
  const auto* x = &known::input(known::input(view, 0), 0);
  if (x->ndim() != 4) {
    return std::nullopt;
  }
  int height = x->shape(1), width = x->shape(2), channels = x->shape(3);
  mx::Shape before{0, 0};
  if (is_one_of(*x, {"Pad"})) {
    auto [axes, low, high] = static_cast<const mx::Pad&>(x->primitive()).state();
    const auto& value = known::input(*x, 1);
    bool is_zero = value.is_available() && value.dtype() == mx::float32 && value.item<float>() == 0;
    if (axes != std::vector{1, 2} || !is_zero) {
      return std::nullopt;
    }
    before = low;
    x = &x->inputs()[0];
  }
  auto [shape, strides, offset] = static_cast<const mx::AsStrided&>(view.primitive()).state();
  int64_t row = int64_t{width} * channels;
  bool fits = x->dtype() == mx::float32 && shape.size() == 6 && offset == 0 && shape[5] == channels && matrix.ndim() == 2 &&
      int64_t{matrix.shape(1)} == int64_t{shape[3]} * shape[4] * channels && row > 0 && strides[1] % row == 0 && strides[2] % channels == 0 &&
      strides[0] == height * row && strides[3] == row && strides[4] == channels && strides[5] == 1;
  if (!fits) {
    return std::nullopt;
  }
  auto call = convolution_over(*x, {a.shape(0), shape[3], shape[4]}, shape);
  call.is_gradient = 1;
  set_pair(call.stride, static_cast<int>(strides[1] / row), static_cast<int>(strides[2] / channels));
  set_pair(call.padding, before[0], before[1]);
  return convolution_by(a, *x, turned.inputs()[0], call, convolve);
}

} // namespace

std::optional<mx::array> convolution_of(const mx::array& a, Convolve convolve) {
  bool fits = convolve != nullptr && a.dtype() == mx::float32 && a.size() > 0 && a.primitive().device() == mx::Device::cpu;
  if (!fits) {
    return std::nullopt;
  }
  return is_one_of(a, {"Convolution"}) ? convolved(a, convolve) : is_one_of(a, {"Matmul"}) ? weight_gradient(a, convolve) : std::nullopt;
}

} // namespace faststep
