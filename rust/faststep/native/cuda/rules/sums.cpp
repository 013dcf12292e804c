// Sums with products of matrices, as cuBLAS computes them: the product adds to what is there.
#include "cuda/rules/rules.hpp"

namespace faststep::rules {

namespace {

constexpr int few = 8; // rows or columns: MLX has kernels of its own for vectors
constexpr int64_t work = int64_t{1} << 30; // multiplications with which one product fills a device

bool is_large(const mx::array& product) {
  return int64_t{product.inputs()[0].shape(1)} * static_cast<int64_t>(product.size()) >= work;
}

// What a product of this shape can be added to.
std::optional<mx::array> addend(const mx::array& a, const mx::array& product) {
  auto stream = product.primitive().stream();
  const auto& row = unrepeated(a);
  if (row.id() != a.id()) {
    bool is_row = row.ndim() == 1 && row.shape(0) == product.shape(1);
    return is_row ? std::optional(mx::broadcast_to(row, product.shape(), stream)) : std::nullopt;
  }
  return mx::reshape(a, product.shape(), stream);
}

} // namespace

std::optional<mx::array> product_and_sum(
    const mx::array& sum,
    const std::function<bool(const mx::array&)>& is_alone) {
  if (!is(sum, "Add") || !is_known(sum.dtype()) || sum.ndim() < 2) {
    return std::nullopt;
  }
  for (int side : {1, 0}) {
    const auto &with = sum.inputs()[1 - side], &product = unshaped(sum.inputs()[side]);
    bool same = with.shape() == sum.shape() && sum.inputs()[side].shape() == sum.shape() && with.dtype() == sum.dtype() &&
        product.dtype() == sum.dtype();
    if (!same || !is(product, "Matmul") || product.ndim() != 2 || product.inputs()[0].ndim() != 2 ||
        product.inputs()[1].ndim() != 2 || product.shape(1) != sum.shape(-1) || product.shape(0) < few ||
        product.shape(1) < few) {
      continue;
    }
    bool alone = is_alone(product);
    for (const auto* at = &sum.inputs()[side]; alone && at->id() != product.id(); at = &at->inputs()[0]) {
      alone = is_alone(*at);
    }
    // two small products run side by side, and a sum behind them takes less time than one product behind the other
    const auto& other = unshaped(with);
    bool waits = (is(other, "Matmul") || is(other, "AddMM")) && !is_large(product);
    auto onto = alone && !waits ? addend(with, product) : std::nullopt;
    if (onto) {
      auto stream = product.primitive().stream();
      auto made = mx::addmm(*onto, product.inputs()[0], product.inputs()[1], 1.0f, 1.0f, stream);
      return mx::reshape(made, sum.shape(), stream);
    }
  }
  return std::nullopt;
}

} // namespace faststep::rules
