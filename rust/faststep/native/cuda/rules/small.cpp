// Products of small matrices in float32: one kernel, where cuBLAS takes two that each take longer to begin than to run.
#include <algorithm>

#include "cuda/rules/rules.hpp"

namespace faststep::rules {

namespace {

constexpr int few = 8; // rows or columns: MLX has kernels of its own for vectors
constexpr int64_t work = int64_t{1} << 20; // multiplications
constexpr int side = 16, most_deep = 256; // of what a block computes; elements of a row that it reads at once

// A thread has one element of the product.
constexpr const char* small_source = R"(
  constexpr int side = 16, threads = side * side;
  __shared__ float left[side][DEPTH + 1], right[DEPTH][side + 1];
  int thread = threadIdx.x, r = thread / side, c = thread % side;
  int first = blockIdx.y * side, column = blockIdx.x * side, rows = a_shape[0], depth = a_shape[1], columns = b_shape[1];
  bool along = a_strides[1] == 1, across = b_strides[1] == 1;
  float sums[4] = {};
  for (int from = 0; from < depth; from += DEPTH) {
    __syncthreads();
    #pragma unroll
    for (int n = 0; n < side * DEPTH / threads; ++n) {
      int i = n * threads + thread;
      int row = along ? i / DEPTH : i % side, k = along ? i % DEPTH : i / side;
      bool there = first + row < rows && from + k < depth;
      left[row][k] = there ? a[(first + row) * a_strides[0] + (from + k) * a_strides[1]] : 0.0f;
    }
    #pragma unroll
    for (int n = 0; n < side * DEPTH / threads; ++n) {
      int i = n * threads + thread;
      int col = across ? i % side : i / DEPTH, k = across ? i / side : i % DEPTH;
      bool there = column + col < columns && from + k < depth;
      right[k][col] = there ? b[(from + k) * b_strides[0] + (column + col) * b_strides[1]] : 0.0f;
    }
    __syncthreads();
    #pragma unroll
    for (int k = 0; k < DEPTH; ++k) { sums[k % 4] += left[r][k] * right[k][c]; }
  }
  if (first + r < rows && column + c < columns) {
    float sum = (sums[0] + sums[1]) + (sums[2] + sums[3]);
    if constexpr (ADDS) { sum += row[(column + c) * row_strides[0]]; }
    out[int64_t(first + r) * columns + column + c] = sum;
  }
)";

} // namespace

std::optional<mx::array> small_product(const mx::array& product) {
  bool adds = is(product, "AddMM");
  if (!(adds || is(product, "Matmul")) || product.dtype() != mx::float32 || product.ndim() != 2) {
    return std::nullopt;
  }
  const auto &a = product.inputs()[0], &b = product.inputs()[1];
  if (a.ndim() != 2 || b.ndim() != 2) {
    return std::nullopt;
  }
  int rows = a.shape(0), depth = a.shape(1), columns = b.shape(1);
  if (rows < few || columns < few || depth < 1 || int64_t{rows} * depth * columns > work) {
    return std::nullopt;
  }
  Kernel kernel{
      "small_product",
      {"a", "b"},
      {"out"},
      small_source,
      {},
      {divided(columns, side), divided(rows, side)},
      {side * side, 1},
      false};
  Arrays inputs{a, b};
  if (adds) {
    const auto& row = unrepeated(product.inputs()[2]);
    auto [alpha, beta] = static_cast<const mx::AddMM&>(product.primitive()).state();
    if (alpha != 1 || beta != 1 || row.ndim() != 1 || row.shape(0) != columns || row.dtype() != mx::float32) {
      return std::nullopt;
    }
    kernel.inputs.emplace_back("row");
    inputs.push_back(row);
  } else {
    kernel.source = "  const float* row = nullptr;\n  const long long row_strides[1] = {};\n" + kernel.source;
  }
  kernel.constants = {{"DEPTH", std::min(divided(depth, side) * side, most_deep)}, {"ADDS", adds}};
  return call(kernel, inputs, {product.shape()}, {mx::float32})[0];
}

} // namespace faststep::rules
