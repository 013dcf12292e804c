// Sums over the rows of a matrix: the gradients of biases, and those of a layer norm.
//
// MLX gives each 32 columns one block, whatever the number of rows: most of the device has nothing to do. Here blocks
// share the rows too, and a second kernel adds up their sums.
#include <algorithm>
#include <cmath>

#include "cuda/rules/rules.hpp"

namespace faststep::rules {

namespace {

constexpr int lanes = 32, warps = 8;
constexpr int wanted_blocks = 528; // four for each multiprocessor of a large device
constexpr int few_rows = 64; // MLX's own kernel is as fast
constexpr int max_normed = 1024; // columns of which a warp keeps its share in registers

// Each lane has WIDE columns, each warp every so many rows.
constexpr const char* sums_source = R"(
  constexpr int lanes = 32, warps = 8;
  __shared__ float shared[warps][lanes * WIDE];
  int columns = x_shape[x_ndim - 1];
  int64_t rows = 1;
  for (int i = 0; i < x_ndim - 1; ++i) { rows *= x_shape[i]; }
  int first = blockIdx.x * lanes * WIDE;
  int column = first + threadIdx.x * WIDE;
  float sums[WIDE] = {};
  if (column < columns) {
    const IN* at = x + column;
    #pragma unroll 4
    for (int64_t row = blockIdx.y * warps + threadIdx.y; row < rows; row += gridDim.y * warps) {
      auto values = load_vector<WIDE>(at + row * columns, 0);
      #pragma unroll
      for (int i = 0; i < WIDE; ++i) { sums[i] += float(values[i]); }
    }
  }
  #pragma unroll
  for (int i = 0; i < WIDE; ++i) { shared[threadIdx.y][threadIdx.x * WIDE + i] = sums[i]; }
  __syncthreads();
  for (int i = threadIdx.y * lanes + threadIdx.x; i < lanes * WIDE; i += warps * lanes) {
    float sum = 0;
    for (int w = 0; w < warps; ++w) { sum += shared[w][i]; }
    if (first + i < columns) { out[int64_t(blockIdx.y) * columns + first + i] = OUT(sum); }
  }
)";

// A warp has a row, and lane i of it the columns i, i + 32, ...
std::string normed_source(float eps) {
  return "  constexpr float eps = " + literal(eps) + ";\n" + R"(
  constexpr int lanes = 32, each = (COLUMNS + lanes - 1) / lanes;
  __shared__ float shared[WARPS][each * lanes];
  int64_t rows = 1;
  for (int i = 0; i < x_ndim - 1; ++i) { rows *= x_shape[i]; }
  int lane = threadIdx.x, warp = threadIdx.y;
  float weights[each], dw[each] = {}, db[each] = {};
  #pragma unroll
  for (int j = 0; j < each; ++j) { weights[j] = j * lanes + lane < COLUMNS ? float(w[j * lanes + lane]) : 0.0f; }
  auto added = [](float value) {
    for (int step = 16; step > 0; step /= 2) { value += __shfl_xor_sync(0xffffffff, value, step); }
    return value;
  };
  for (int64_t row = blockIdx.x * WARPS + warp; row < rows; row += gridDim.x * WARPS) {
    float xs[each], gs[each], sum = 0;
    #pragma unroll
    for (int j = 0; j < each; ++j) {
      int column = j * lanes + lane;
      xs[j] = column < COLUMNS ? float(x[row * COLUMNS + column]) : 0.0f;
      gs[j] = column < COLUMNS ? float(g[row * COLUMNS + column]) : 0.0f;
      sum += xs[j];
    }
    float mean = added(sum) / COLUMNS, wg = 0, wgx = 0, xx = 0;
    #pragma unroll
    for (int j = 0; j < each; ++j) {
      xs[j] = j * lanes + lane < COLUMNS ? xs[j] - mean : 0.0f;
      float both = weights[j] * gs[j];
      wg += both;
      wgx += both * xs[j];
      xx += xs[j] * xs[j];
    }
    wg = added(wg) / COLUMNS;
    wgx = added(wgx) / COLUMNS;
    float inverse2 = 1 / (added(xx) / COLUMNS + eps), inverse = sqrtf(inverse2);
    #pragma unroll
    for (int j = 0; j < each; ++j) {
      int column = j * lanes + lane;
      float normed = xs[j] * inverse;
      if (column < COLUMNS) {
        float gradient = inverse * (weights[j] * gs[j] - wg) - normed * wgx * inverse2;
        if constexpr (ADDS) { gradient += float(added_to[row * COLUMNS + column]); }
        gx[row * COLUMNS + column] = T(gradient);
      }
      dw[j] += gs[j] * normed;
      db[j] += gs[j];
    }
  }
  for (int part = 0; part < 2; ++part) {
    #pragma unroll
    for (int j = 0; j < each; ++j) { shared[warp][j * lanes + lane] = part == 0 ? dw[j] : db[j]; }
    __syncthreads();
    for (int i = warp * lanes + lane; i < COLUMNS; i += WARPS * lanes) {
      float sum = 0;
      for (int k = 0; k < WARPS; ++k) { sum += shared[k][i]; }
      sums[(int64_t(blockIdx.x) * 2 + part) * COLUMNS + i] = sum;
    }
    __syncthreads();
  }
)";
}

bool is_known(mx::Dtype dtype) {
  return dtype == mx::float32 || dtype == mx::float16 || dtype == mx::bfloat16;
}

int divided(int64_t a, int64_t b) {
  return static_cast<int>((a + b - 1) / b);
}

// Sums of the rows of `x`, [..., columns], by `parts` blocks for each column.
mx::array sums(const mx::array& x, int wide, int parts, mx::Shape shape, mx::Dtype dtype) {
  Kernel kernel{
      "columns_" + std::to_string(wide),
      {"x"},
      {"out"},
      sums_source,
      {{"WIDE", wide}, {"IN", x.dtype()}, {"OUT", dtype}},
      {divided(x.shape(-1), lanes * wide), parts},
      {lanes, warps}};
  return call(kernel, {x}, {std::move(shape)}, {dtype})[0];
}

} // namespace

std::optional<mx::array> column_sum(const mx::array& sum) {
  if (!is(sum, "Sum") || !is_known(sum.dtype()) || sum.inputs()[0].dtype() != sum.dtype()) {
    return std::nullopt;
  }
  const auto& in = sum.inputs()[0];
  auto axes = static_cast<const mx::Reduce&>(sum.primitive()).state().second;
  bool leading = axes.size() + 1 == in.ndim();
  for (size_t i = 0; i < axes.size(); ++i) {
    leading &= axes[i] == static_cast<int>(i);
  }
  int wide = static_cast<int>(16 / in.itemsize());
  bool lies_together = !is(in, "Broadcast") && !is(in, "Transpose") && !is(in, "Slice");
  if (!leading || !lies_together || in.shape(-1) % wide != 0 || in.size() == 0) {
    return std::nullopt;
  }
  auto rows = static_cast<int64_t>(in.size() / in.shape(-1));
  if (rows < few_rows) {
    return std::nullopt;
  }
  auto across = divided(in.shape(-1), lanes * wide);
  auto parts = std::clamp(divided(wanted_blocks, across), 1, divided(rows, 4 * warps));
  if (parts == 1) {
    return sums(in, wide, 1, sum.shape(), sum.dtype());
  }
  return sums(sums(in, wide, parts, {parts, in.shape(-1)}, mx::float32), 1, 1, sum.shape(), sum.dtype());
}

std::optional<Arrays> layer_norm_vjp(const Arrays& gradients, const std::optional<mx::array>& added) {
  if (!is(gradients[0], "LayerNormVJP")) {
    return std::nullopt;
  }
  const auto& in = gradients[0].inputs();
  const auto &x = in[0], &w = in[1], &b = in[2], &g = in[3];
  auto dtype = x.dtype();
  bool same = w.dtype() == dtype && b.dtype() == dtype && g.dtype() == dtype && is_known(dtype);
  if (!same || w.ndim() != 1 || b.ndim() != 1 || x.size() == 0 || x.shape(-1) > max_normed) {
    return std::nullopt;
  }
  auto eps = static_cast<const mx::fast::LayerNormVJP&>(gradients[0].primitive()).state().second;
  int columns = x.shape(-1);
  auto rows = static_cast<int64_t>(x.size() / columns);
  int at_once = rows <= 32 && columns <= 256 ? 2 * warps : warps;
  int parts = std::min(divided(rows, at_once), wanted_blocks / 2);
  if (rows <= 2 * at_once) {
    parts = 1;
  }
  Kernel kernel{
      "layer_norm_vjp",
      {"x", "w", "g"},
      {"gx", "sums"},
      normed_source(eps),
      {{"COLUMNS", columns}, {"WARPS", at_once}, {"T", dtype}, {"ADDS", added.has_value()}},
      {parts, 1},
      {lanes, at_once}};
  Arrays inputs{x, w, g};
  if (added) {
    kernel.inputs.emplace_back("added_to");
    inputs.push_back(*added);
  }
  auto made = call(kernel, inputs, {x.shape(), {parts, 2 * columns}}, {dtype, mx::float32});
  auto total = made[1];
  if (parts > 1 || dtype != mx::float32) {
    total = sums(total, 1, 1, {1, 2 * columns}, dtype);
  }
  total = mx::reshape(total, {2, columns}, mx::Device::gpu);
  auto row = [&](int i) {
    auto one = mx::slice(total, {i, 0}, {i + 1, columns}, mx::Device::gpu);
    return mx::reshape(one, {columns}, mx::Device::gpu);
  };
  return Arrays{made[0], row(0), row(1)};
}

} // namespace faststep::rules
