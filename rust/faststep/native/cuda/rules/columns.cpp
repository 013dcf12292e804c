// Sums over the rows of a matrix: the gradients of biases.
//
// MLX gives each 32 columns one block, whatever the number of rows: most of the device has nothing to do. Here blocks
// share the rows too, and a second kernel adds up their sums.
#include <algorithm>

#include "cuda/rules/pieces.hpp"
#include "cuda/rules/rules.hpp"

namespace faststep::rules {

namespace {

constexpr int most_warps = 32;
constexpr int wanted_blocks = 528; // four for each multiprocessor of a large device
constexpr int few_rows = 64; // MLX's own kernel is as fast

// Each lane has WIDE columns, each warp every so many rows.
constexpr const char* sums_source = R"(
  constexpr int lanes = 32;
  __shared__ float shared[WARPS][lanes * WIDE];
  int columns = x_shape[x_ndim - 1];
  int64_t rows = 1;
  for (int i = 0; i < x_ndim - 1; ++i) { rows *= x_shape[i]; }
  int first = blockIdx.x * lanes * WIDE;
  int column = first + threadIdx.x * WIDE;
  float sums[WIDE] = {};
  if (column < columns) {
    const IN* at = x + column;
    #pragma unroll 4
    for (int64_t row = blockIdx.y * WARPS + threadIdx.y; row < rows; row += gridDim.y * WARPS) {
      auto values = load_vector<WIDE>(at + row * columns, 0);
      #pragma unroll
      for (int i = 0; i < WIDE; ++i) { sums[i] += float(values[i]); }
    }
  }
)";

// Sums of the rows of `x`, [..., columns], by `parts` blocks for each column.
mx::array sums(const mx::array& x, int wide, int parts, int warps, mx::Shape shape, mx::Dtype dtype) {
  Kernel kernel{
      "columns_" + std::to_string(wide),
      {"x"},
      {"out"},
      std::string(sums_source) + column_sums_source,
      {{"WIDE", wide}, {"WARPS", warps}, {"IN", x.dtype()}, {"OUT", dtype}},
      {divided(x.shape(-1), lanes * wide), parts},
      {lanes, warps}};
  return call(kernel, {x}, {std::move(shape)}, {dtype})[0];
}

} // namespace

mx::array sum_of_few(const mx::array& x, mx::Shape shape, mx::Dtype dtype) {
  return sums(x, 1, 1, x.shape(0) > most_warps ? most_warps : warps, std::move(shape), dtype);
}

int parts_of_rows(int64_t rows, int across) {
  return std::clamp(divided(wanted_blocks, across), 1, divided(rows, 4 * warps));
}

bool sums_rows(const mx::array& sum) {
  if (!is(sum, "Sum") || !is_known(sum.dtype()) || sum.inputs()[0].dtype() != sum.dtype()) {
    return false;
  }
  auto axes = static_cast<const mx::Reduce&>(sum.primitive()).state().second;
  bool leading = axes.size() + 1 == sum.inputs()[0].ndim();
  for (size_t i = 0; i < axes.size(); ++i) {
    leading &= axes[i] == static_cast<int>(i);
  }
  return leading;
}

std::optional<mx::array> column_sum(const mx::array& sum) {
  if (!sums_rows(sum)) {
    return std::nullopt;
  }
  const auto& in = sum.inputs()[0];
  int wide = static_cast<int>(16 / in.itemsize());
  bool lies_together = !is(in, "Broadcast") && !is(in, "Transpose") && !is(in, "Slice");
  if (!lies_together || in.shape(-1) % wide != 0 || in.size() == 0) {
    return std::nullopt;
  }
  auto rows = static_cast<int64_t>(in.size() / in.shape(-1));
  if (rows < few_rows) {
    return std::nullopt;
  }
  auto across = divided(in.shape(-1), lanes * wide);
  auto parts = parts_of_rows(rows, across);
  if (parts == 1) {
    return sums(in, wide, 1, warps, sum.shape(), sum.dtype());
  }
  auto of_parts = sums(in, wide, parts, warps, {parts, in.shape(-1)}, mx::float32);
  return sum_of_few(of_parts, sum.shape(), sum.dtype());
}

} // namespace faststep::rules
