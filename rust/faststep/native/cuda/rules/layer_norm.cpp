// Layer norms and their gradients, in float32 whatever the dtype.
//
// MLX reads a row three times, and its gradients by weight and bias are sums over an array that it writes for them. Here a
// row stays in registers, and a block sums up what its rows give.
#include <algorithm>

#include "cuda/rules/rules.hpp"

namespace faststep::rules {

namespace {

constexpr int max_normed = 1024; // of which a warp keeps its share in registers
constexpr int few_columns = 256;
constexpr int quad = 4, max_threads = 512; // elements of a thread, of a block that has a row
constexpr int rows_at_once = 4;
constexpr int few_blocks = 264, large_blocks = 528; // two and four for each multiprocessor of a large device

// A warp has a row, and each lane WIDE columns, 32 times as many behind those as many again.
constexpr const char* norm_source = R"(
  constexpr int lanes = 32, each = (COLUMNS + lanes * WIDE - 1) / (lanes * WIDE);
  int64_t row = int64_t(blockIdx.x) * blockDim.y + threadIdx.y;
  if (row >= x_shape[0]) { return; }
  auto added = [](float value) {
    for (int step = 16; step > 0; step /= 2) { value += __shfl_xor_sync(0xffffffff, value, step); }
    return value;
  };
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

// A block has ROWS rows at a time, a thread of it four columns.
constexpr const char* norm_gradients_source = R"(
  constexpr int lanes = 32, wide = 4, warps = (COLUMNS / wide + lanes - 1) / lanes;
  alignas(16) __shared__ float first[warps][ROWS], second[warps][3 * ROWS];
  int lane = threadIdx.x % lanes, warp = threadIdx.x / lanes, column = threadIdx.x * wide;
  int64_t rows = x_shape[0];
  bool active = column < COLUMNS;
  float weights[wide] = {}, dw[wide] = {}, db[wide] = {};
  if (active) {
    auto values = load_vector<wide>(w + column, 0);
    for (int i = 0; i < wide; ++i) { weights[i] = float(values[i]); }
  }
  // sums over the block; between two that take place in the same room there is another one
  auto add = [&](auto& sums, auto room) {
    constexpr int count = sizeof(sums) / sizeof(float);
    #pragma unroll
    for (int n = 0; n < count; ++n) {
      for (int step = 16; step > 0; step /= 2) { sums[n] += __shfl_xor_sync(0xffffffff, sums[n], step); }
    }
    if (lane == 0) {
      #pragma unroll
      for (int n = 0; n < count; ++n) { room[warp][n] = sums[n]; }
    }
    __syncthreads();
    #pragma unroll
    for (int n = 0; n < count; n += 4) {
      float4 total = *reinterpret_cast<const float4*>(&room[0][n]);
      for (int k = 1; k < warps; ++k) {
        float4 more = *reinterpret_cast<const float4*>(&room[k][n]);
        total.x += more.x, total.y += more.y, total.z += more.z, total.w += more.w;
      }
      sums[n] = total.x, sums[n + 1] = total.y, sums[n + 2] = total.z, sums[n + 3] = total.w;
    }
  };
  for (int64_t row = int64_t(blockIdx.x) * ROWS; row < rows; row += int64_t(gridDim.x) * ROWS) {
    float xs[ROWS][wide] = {}, gs[ROWS][wide] = {}, means[ROWS] = {};
    #pragma unroll
    for (int r = 0; r < ROWS; ++r) {
      if (active && row + r < rows) {
        auto values = load_vector<wide>(x + (row + r) * COLUMNS + column, 0);
        auto gradients = load_vector<wide>(g + (row + r) * COLUMNS + column, 0);
        #pragma unroll
        for (int i = 0; i < wide; ++i) {
          xs[r][i] = float(values[i]), gs[r][i] = float(gradients[i]);
          means[r] += xs[r][i];
        }
      }
    }
    add(means, first);
    float all[3 * ROWS] = {}; // of each row the squares, w g and w g x
    #pragma unroll
    for (int r = 0; r < ROWS; ++r) {
      #pragma unroll
      for (int i = 0; i < wide; ++i) {
        xs[r][i] = active ? xs[r][i] - means[r] / COLUMNS : 0.0f;
        float both = weights[i] * gs[r][i];
        all[r] += xs[r][i] * xs[r][i];
        all[ROWS + r] += both;
        all[2 * ROWS + r] += both * xs[r][i];
      }
    }
    add(all, second);
    #pragma unroll
    for (int r = 0; r < ROWS; ++r) {
      float inverse2 = 1 / (all[r] / COLUMNS + eps), inverse = sqrtf(inverse2);
      float wg = all[ROWS + r] / COLUMNS, wgx = all[2 * ROWS + r] / COLUMNS;
      if (active && row + r < rows) {
        int64_t at = (row + r) * COLUMNS + column;
        AlignedVector<T, wide> made, before;
        if constexpr (ADDS) { before = load_vector<wide>(added_to + at, 0); }
        #pragma unroll
        for (int i = 0; i < wide; ++i) {
          float normed = xs[r][i] * inverse;
          float gradient = inverse * (weights[i] * gs[r][i] - wg) - normed * wgx * inverse2;
          if constexpr (ADDS) { gradient += float(before[i]); }
          made[i] = T(gradient);
          dw[i] += gs[r][i] * normed;
          db[i] += gs[r][i];
        }
        store_vector<wide>(gx + at, 0, made);
      }
    }
  }
  if (active) {
    float* to = sums + int64_t(blockIdx.x) * 2 * COLUMNS + column;
    *reinterpret_cast<float4*>(to) = {dw[0], dw[1], dw[2], dw[3]};
    *reinterpret_cast<float4*>(to + COLUMNS) = {db[0], db[1], db[2], db[3]};
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
      with(eps, norm_source),
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
  int columns = x.shape(-1);
  bool is_large = columns > few_columns && columns % quad == 0 && columns <= quad * max_threads;
  if (!fits(x, w, in[2]) || g.dtype() != dtype || (!is_large && columns > max_normed)) {
    return std::nullopt;
  }
  auto eps = static_cast<const mx::fast::LayerNormVJP&>(gradients[0].primitive()).state().second;
  Arrays inputs{as_rows(x), w, as_rows(g)};
  int rows = inputs[0].shape(0);
  Kernel kernel{"layer_norm_vjp", {"x", "w", "g"}, {"gx", "sums"}, "", {{"COLUMNS", columns}, {"T", dtype}}, {}, {}};
  kernel.constants.emplace_back("ADDS", added.has_value());
  if (added) {
    kernel.inputs.emplace_back("added_to");
    inputs.push_back(as_rows(*added));
  }
  std::string nothing = added ? "" : "  const T* added_to = nullptr;\n";
  int parts = 1;
  if (is_large) {
    int groups = divided(rows, rows_at_once);
    parts = divided(groups, divided(groups, large_blocks)); // as many for each block
    kernel.name += "_large";
    kernel.source = with(eps, nothing + norm_gradients_source);
    kernel.constants.emplace_back("ROWS", rows_at_once);
    kernel.threads = {divided(columns / quad, lanes) * lanes, 1};
  } else {
    int at_once = rows <= 32 && columns <= few_columns ? 2 * warps : warps;
    parts = rows <= 2 * at_once ? 1 : std::min(divided(rows, at_once), few_blocks);
    kernel.source = with(eps, nothing + norm_few_gradients_source);
    kernel.constants.emplace_back("WARPS", at_once);
    kernel.threads = {lanes, at_once};
  }
  kernel.blocks = {parts, 1};
  auto made = call(kernel, inputs, {inputs[0].shape(), {parts, 2 * columns}}, {dtype, mx::float32});
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
