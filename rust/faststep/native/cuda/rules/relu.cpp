// The gradient of max(x, 0), by what came out and not by what went in: MLX keeps both until then.
//
// Where a bias was added, its gradient is the sum of the rows of this one, which the same kernel begins to add up.
#include "cuda/rules/pieces.hpp"
#include "cuda/rules/rules.hpp"

namespace faststep::rules {

namespace {

constexpr int64_t least_rows = 64;

// Each lane has WIDE columns, each warp every so many rows.
constexpr const char* relu_vjp_source = R"(
  using OUT = float;
  constexpr int lanes = 32;
  __shared__ float shared[WARPS][lanes * WIDE];
  int columns = y_shape[1], first = blockIdx.x * lanes * WIDE, column = first + threadIdx.x * WIDE;
  int64_t rows = y_shape[0];
  float sums[WIDE] = {};
  if (column < columns) {
    #pragma unroll 2
    for (int64_t row = blockIdx.y * WARPS + threadIdx.y; row < rows; row += gridDim.y * WARPS) {
      auto ys = load_vector<WIDE>(y + row * columns + column, 0), gs = load_vector<WIDE>(g + row * columns + column, 0);
      #pragma unroll
      for (int i = 0; i < WIDE; ++i) {
        float value = float(gs[i]) * (float(ys[i]) > 0.0f ? 1.0f : 0.0f); // what is no number stays
        gs[i] = T(value);
        sums[i] += value;
      }
      store_vector<WIDE>(gx + row * columns + column, 0, gs);
    }
  }
)";

bool is_zero(const mx::array& a) {
  return number(a) == 0.0f;
}

} // namespace

std::optional<mx::array> Relu::rewritten(const mx::array& a, const Uses& uses) {
  if (is(a, "Maximum") && is_zero(a.inputs()[1])) {
    outputs_.emplace(a.inputs()[0].id(), a);
  } else if (is(a, "Greater") && is_zero(a.inputs()[1])) {
    auto of = outputs_.find(a.inputs()[0].id());
    bool alone = of != outputs_.end() && uses.count(a.inputs()[0]) == 2; // nobody else keeps what went in
    if (alone && of->second.shape() == a.shape()) {
      auto made = mx::greater(of->second, a.inputs()[1], a.primitive().stream());
      masks_.emplace(made.id(), of->second);
      return made;
    }
  } else if (is(a, "Multiply")) {
    return gradient(a, uses);
  } else if (is(a, "Sum")) {
    return sum(a);
  }
  return std::nullopt;
}

std::optional<mx::array> Relu::gradient(const mx::array& product, const Uses& uses) {
  const auto &g = product.inputs()[0], &cast = product.inputs()[1];
  auto found = is(cast, "AsType") ? masks_.find(cast.inputs()[0].id()) : masks_.end();
  if (found == masks_.end() || !is_known(product.dtype()) || product.ndim() < 2 || product.size() == 0) {
    return std::nullopt;
  }
  const auto& y = found->second;
  int columns = product.shape(-1), wide = static_cast<int>(16 / product.itemsize());
  auto rows = static_cast<int64_t>(product.size() / columns);
  bool same = y.dtype() == product.dtype() && g.dtype() == product.dtype() && y.shape() == product.shape() &&
      g.shape() == product.shape();
  if (!same || columns % wide != 0 || rows < least_rows || !uses.is_summed) {
    return std::nullopt;
  }
  auto as_matrix = [&](const mx::array& x) { return mx::reshape(x, {static_cast<int>(rows), columns}, mx::Device::gpu); };
  int across = divided(columns, lanes * wide);
  int parts = parts_of_rows(rows, across);
  Kernel kernel{
      "relu_vjp",
      {"y", "g"},
      {"gx", "out"},
      std::string(relu_vjp_source) + column_sums_source,
      {{"WIDE", wide}, {"WARPS", warps}, {"T", product.dtype()}},
      {across, parts},
      {lanes, warps}};
  auto made = call(
      kernel,
      {as_matrix(y), as_matrix(g)},
      {{static_cast<int>(rows), columns}, {parts, columns}},
      {product.dtype(), mx::float32});
  auto gradient = mx::reshape(made[0], product.shape(), mx::Device::gpu);
  sums_.emplace(unshaped(gradient).id(), made[1]);
  return gradient;
}

// The gradient of a bias, whose parts are there.
std::optional<mx::array> Relu::sum(const mx::array& sum) const {
  const auto& in = sum.inputs()[0];
  auto found = sums_.find(unshaped(in).id());
  bool known = found != sums_.end() && found->second.shape(1) == in.shape(-1) && sums_rows(sum);
  return known ? std::optional(sum_of_few(found->second, sum.shape(), sum.dtype())) : std::nullopt;
}

} // namespace faststep::rules
