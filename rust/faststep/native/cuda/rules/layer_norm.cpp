// Layer norms and their gradients, in float32 whatever the dtype.
//
// MLX reads a row three times, and its gradients by weight and bias are sums over an array that it writes for them. Here a
// row stays in registers. Only the gradient by the input is waited for: where there are many rows, a kernel of its own sums up
// the others meanwhile.
#include <algorithm>

#include "cuda/rules/pieces.hpp"
#include "cuda/rules/rules.hpp"

namespace faststep::rules {

namespace {

constexpr int max_normed = 1024; // of which a warp keeps its share in registers
constexpr int few_columns = 256;
constexpr int few_warps = 4; // of a block, where a warp has a row
constexpr int few_blocks = 264; // two for each multiprocessor of a large device

// The norm of a warp's row, behind `row_source`.
constexpr const char* norm_source = R"(
  float xs[each][WIDE], sum = 0, squares = 0;
  #pragma unroll
  for (int j = 0; j < each; ++j) {
    int column = (j * lanes + threadIdx.x) * WIDE;
    if (column < COLUMNS) {
      auto values = load_vector<WIDE>(x + row * COLUMNS + column, 0);
      #pragma unroll
      for (int i = 0; i < WIDE; ++i) { xs[j][i] = float(values[i]), sum += xs[j][i]; }
    }
  }
  float mean = added(sum) / COLUMNS;
  #pragma unroll
  for (int j = 0; j < each; ++j) {
    if ((j * lanes + threadIdx.x) * WIDE < COLUMNS) {
      #pragma unroll
      for (int i = 0; i < WIDE; ++i) { xs[j][i] -= mean, squares += xs[j][i] * xs[j][i]; }
    }
  }
  float inverse = 1 / sqrtf(added(squares) / COLUMNS + eps);
  #pragma unroll
  for (int j = 0; j < each; ++j) {
    int column = (j * lanes + threadIdx.x) * WIDE;
    if (column < COLUMNS) {
      auto weights = load_vector<WIDE>(w + column, 0);
      auto biases = load_vector<WIDE>(b + column, 0);
      AlignedVector<T, WIDE> made;
      #pragma unroll
      for (int i = 0; i < WIDE; ++i) { made[i] = T(xs[j][i] * inverse * float(weights[i]) + float(biases[i])); }
      store_vector<WIDE>(normed + row * COLUMNS + column, 0, made);
    }
  }
)";

// A warp has a row, and lane i of it the columns i, i + 32, ...: where there are few, one block may do.
constexpr const char* norm_few_gradients_source = R"(
  constexpr int lanes = 32, each = (COLUMNS + lanes - 1) / lanes;
  __shared__ float shared[WARPS][each * lanes];
  int64_t rows = x_shape[0];
  int lane = threadIdx.x, warp = threadIdx.y;
  float weights[each], dw[each] = {}, db[each] = {};
  #pragma unroll
  for (int j = 0; j < each; ++j) { weights[j] = j * lanes + lane < COLUMNS ? float(w[j * lanes + lane]) : 0.0f; }
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

// The gradient by a warp's row, behind `row_source`; what the gradients by weight and bias need of it is written beside.
constexpr const char* norm_gradient_source = R"(
  float xs[each][WIDE], gs[each][WIDE], sum = 0, xx = 0, wg = 0, wgx = 0;
  #pragma unroll
  for (int j = 0; j < each; ++j) {
    int column = (j * lanes + threadIdx.x) * WIDE;
    if (column < COLUMNS) {
      auto values = load_vector<WIDE>(x + row * COLUMNS + column, 0);
      auto gradients = load_vector<WIDE>(g + row * COLUMNS + column, 0);
      auto weights = load_vector<WIDE>(w + column, 0);
      #pragma unroll
      for (int i = 0; i < WIDE; ++i) {
        xs[j][i] = float(values[i]), gs[j][i] = float(weights[i]) * float(gradients[i]);
        sum += xs[j][i], wg += gs[j][i];
      }
    }
  }
  float mean = added(sum) / COLUMNS;
  #pragma unroll
  for (int j = 0; j < each; ++j) {
    if ((j * lanes + threadIdx.x) * WIDE < COLUMNS) {
      #pragma unroll
      for (int i = 0; i < WIDE; ++i) {
        xs[j][i] -= mean;
        xx += xs[j][i] * xs[j][i], wgx += gs[j][i] * xs[j][i];
      }
    }
  }
  wg = added(wg) / COLUMNS;
  wgx = added(wgx) / COLUMNS;
  float inverse2 = 1 / (added(xx) / COLUMNS + eps), inverse = sqrtf(inverse2);
  #pragma unroll
  for (int j = 0; j < each; ++j) {
    int column = (j * lanes + threadIdx.x) * WIDE;
    if (column < COLUMNS) {
      AlignedVector<T, WIDE> made, before;
      if constexpr (ADDS) { before = load_vector<WIDE>(added_to + row * COLUMNS + column, 0); }
      #pragma unroll
      for (int i = 0; i < WIDE; ++i) {
        float gradient = inverse * (gs[j][i] - wg) - xs[j][i] * inverse * wgx * inverse2;
        if constexpr (ADDS) { gradient += float(before[i]); }
        made[i] = T(gradient);
      }
      store_vector<WIDE>(gx + row * COLUMNS + column, 0, made);
    }
  }
  if (threadIdx.x == 0) { rows[row * 2] = mean, rows[row * 2 + 1] = inverse; }
)";

// Each lane has WIDE columns, each warp every so many rows: sums of the gradients by weight, and behind them by bias.
constexpr const char* norm_sums_source = R"(
  constexpr int lanes = 32;
  __shared__ float shared[WARPS][lanes * WIDE];
  int first = blockIdx.x * lanes * WIDE, column = first + threadIdx.x * WIDE;
  int64_t count = x_shape[0];
  float dw[WIDE] = {}, db[WIDE] = {};
  if (column < COLUMNS) {
    #pragma unroll 4
    for (int64_t row = blockIdx.y * WARPS + threadIdx.y; row < count; row += gridDim.y * WARPS) {
      auto values = load_vector<WIDE>(x + row * COLUMNS + column, 0);
      auto gradients = load_vector<WIDE>(g + row * COLUMNS + column, 0);
      float mean = rows[row * 2], inverse = rows[row * 2 + 1];
      #pragma unroll
      for (int i = 0; i < WIDE; ++i) {
        dw[i] += float(gradients[i]) * ((float(values[i]) - mean) * inverse);
        db[i] += float(gradients[i]);
      }
    }
  }
  #pragma unroll
  for (int part = 0; part < 2; ++part) {
    #pragma unroll
    for (int i = 0; i < WIDE; ++i) { shared[threadIdx.y][threadIdx.x * WIDE + i] = part == 0 ? dw[i] : db[i]; }
    __syncthreads();
    for (int i = threadIdx.y * lanes + threadIdx.x; i < lanes * WIDE; i += WARPS * lanes) {
      float sum = 0;
      for (int k = 0; k < WARPS; ++k) { sum += shared[k][i]; }
      if (first + i < COLUMNS) { sums[(int64_t(blockIdx.y) * 2 + part) * COLUMNS + first + i] = sum; }
    }
    __syncthreads();
  }
)";

std::string with(float eps, const std::string& source) {
  return "  constexpr float eps = " + literal(eps) + ";\n" + source;
}

// Input, weight and bias of a layer norm, where kernels here have them.
bool fits(const mx::array& x, const mx::array& w, const mx::array& b) {
  return is_known(x.dtype()) && w.dtype() == x.dtype() && b.dtype() == x.dtype() && w.ndim() == 1 && b.ndim() == 1 &&
      x.size() > 0;
}

mx::array as_rows(const mx::array& x) {
  return mx::reshape(x, {static_cast<int>(x.size() / x.shape(-1)), x.shape(-1)}, mx::Device::gpu);
}

} // namespace

std::optional<mx::array> layer_norm(const mx::array& normed) {
  if (!is(normed, "LayerNorm")) {
    return std::nullopt;
  }
  const auto &x = normed.inputs()[0], &w = normed.inputs()[1], &b = normed.inputs()[2];
  int columns = x.shape(-1), wide = static_cast<int>(16 / x.itemsize());
  if (!fits(x, w, b) || normed.dtype() != x.dtype() || columns > max_normed || columns % wide != 0) {
    return std::nullopt;
  }
  auto eps = static_cast<const mx::fast::LayerNorm&>(normed.primitive()).state().second;
  auto rows = as_rows(x);
  Kernel kernel{
      "layer_norm",
      {"x", "w", "b"},
      {"normed"},
      with(eps, std::string(row_source) + warp_sum_source + norm_source),
      {{"COLUMNS", columns}, {"WIDE", wide}, {"T", x.dtype()}},
      {divided(rows.shape(0), warps), 1},
      {lanes, warps}};
  auto made = call(kernel, {rows, w, b}, {rows.shape()}, {x.dtype()})[0];
  return mx::reshape(made, x.shape(), mx::Device::gpu);
}

std::optional<Arrays> layer_norm_vjp(const Arrays& gradients, const std::optional<mx::array>& added) {
  if (!is(gradients[0], "LayerNormVJP")) {
    return std::nullopt;
  }
  const auto& in = gradients[0].inputs();
  const auto &x = in[0], &w = in[1], &g = in[3];
  auto dtype = x.dtype();
  int columns = x.shape(-1), wide = static_cast<int>(16 / x.itemsize());
  if (!fits(x, w, in[2]) || g.dtype() != dtype || columns > max_normed) {
    return std::nullopt;
  }
  auto eps = static_cast<const mx::fast::LayerNormVJP&>(gradients[0].primitive()).state().second;
  auto rows_of_x = as_rows(x), rows_of_g = as_rows(g);
  int rows = rows_of_x.shape(0), parts = 1;
  bool is_large = columns > few_columns && columns % wide == 0;
  Arrays inputs{rows_of_x, w, rows_of_g};
  Kernel kernel{"layer_norm_vjp", {"x", "w", "g"}, {"gx", "sums"}, "", {{"COLUMNS", columns}, {"T", dtype}}, {}, {}};
  kernel.constants.emplace_back("ADDS", added.has_value());
  if (added) {
    kernel.inputs.emplace_back("added_to");
    inputs.push_back(as_rows(*added));
  }
  std::string nothing = added ? "" : "  const T* added_to = nullptr;\n";
  Arrays made; // the gradient of the input, and sums of those by weight and bias
  if (is_large) { // two kernels: nobody waits for the second
    kernel.name += "_rows";
    kernel.outputs[1] = "rows";
    kernel.source = with(eps, nothing + row_source + warp_sum_source + norm_gradient_source);
    kernel.constants.emplace_back("WIDE", wide);
    kernel.blocks = {divided(rows, few_warps), 1};
    kernel.threads = {lanes, few_warps};
    made = call(kernel, inputs, {rows_of_x.shape(), {rows, 2}}, {dtype, mx::float32});
    int across = divided(columns, lanes * wide);
    parts = parts_of_rows(rows, across);
    Kernel sums{
        "layer_norm_vjp_sums",
        {"x", "g", "rows"},
        {"sums"},
        norm_sums_source,
        {{"COLUMNS", columns}, {"T", dtype}, {"WIDE", wide}, {"WARPS", warps}},
        {across, parts},
        {lanes, warps}};
    made[1] = call(sums, {rows_of_x, rows_of_g, made[1]}, {{parts, 2 * columns}}, {mx::float32})[0];
  } else {
    int at_once = rows <= 32 && columns <= few_columns ? 2 * warps : warps;
    parts = rows <= 2 * at_once ? 1 : std::min(divided(rows, at_once), few_blocks);
    kernel.source = with(eps, nothing + warp_sum_source + norm_few_gradients_source);
    kernel.constants.emplace_back("WARPS", at_once);
    kernel.blocks = {parts, 1};
    kernel.threads = {lanes, at_once};
    made = call(kernel, inputs, {rows_of_x.shape(), {parts, 2 * columns}}, {dtype, mx::float32});
  }
  auto total = made[1];
  if (parts > 1 || dtype != mx::float32) {
    total = sum_of_few(total, {1, 2 * columns}, dtype);
  }
  total = mx::reshape(total, {2, columns}, mx::Device::gpu);
  auto row = [&](int i) {
    auto one = mx::slice(total, {i, 0}, {i + 1, columns}, mx::Device::gpu);
    return mx::reshape(one, {columns}, mx::Device::gpu);
  };
  return Arrays{mx::reshape(made[0], x.shape(), mx::Device::gpu), row(0), row(1)};
}

} // namespace faststep::rules
