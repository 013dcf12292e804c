// Attention in float32, and its gradient: over few positions two kernels in place of some twenty, which take longer to
// begin than to run; over more of them three, which keep no scores. Queries, keys and values are read where they lie.
#include <algorithm>
#include <cstdlib>

#include "cuda/rules/attention_tiles.hpp"
#include "cuda/rules/pieces.hpp"
#include "cuda/rules/rules.hpp"
#include "mlx/device.h"

namespace faststep::rules {

namespace {

// A block has the attention of one head over few positions: scores and probabilities in shared memory.
constexpr int few_positions = 32;
constexpr int max_dimensions = 64; // of which a warp keeps its share in registers

constexpr const char* few_source = R"(
  constexpr int threads = 256;
  __shared__ float q[LENGTH][WIDTH + 1], k[LENGTH][WIDTH + 1], v[LENGTH][WIDTH + 1], p[LENGTH][LENGTH + 1];
  int heads = queries_shape[1], batch = blockIdx.x / heads, head = blockIdx.x % heads, thread = threadIdx.x;
  auto read = [&](float (*into)[WIDTH + 1], const float* from, const Strides& strides, float scale) {
    from += batch * strides[0] + head * strides[1];
    for (int i = thread; i < LENGTH * WIDTH; i += threads) {
      into[i / WIDTH][i % WIDTH] = scale * from[(i / WIDTH) * strides[2] + (i % WIDTH) * strides[3]];
    }
  };
  // where the elements of one position of this head begin, in an array of positions by heads
  auto place = [&](int position) {
    return ((int64_t(batch) * LENGTH + position) * heads + head) * WIDTH;
  };
  read(q, queries, queries_strides, scale);
  read(k, keys, keys_strides, 1.0f);
  read(v, values, values_strides, 1.0f);
  __syncthreads();
  for (int i = thread; i < LENGTH * LENGTH; i += threads) {
    int row = i / LENGTH, column = i % LENGTH;
    float sum = 0;
    for (int d = 0; d < WIDTH; ++d) { sum += q[row][d] * k[column][d]; }
    p[row][column] = column <= row ? sum : -INFINITY;
  }
  __syncthreads();
  for (int row = thread / 32; row < LENGTH; row += threads / 32) {
    int column = thread % 32;
    float value = column < LENGTH ? p[row][column] : -INFINITY, largest = value;
    for (int step = 16; step > 0; step /= 2) { largest = fmaxf(largest, __shfl_xor_sync(0xffffffff, largest, step)); }
    value = column <= row ? __expf(value - largest) : 0.0f;
    float sum = added(value);
    if (column < LENGTH) { p[row][column] = value / sum; }
  }
  __syncthreads();
)";

constexpr const char* few_forward_source = R"(
  for (int i = thread; i < LENGTH * WIDTH; i += threads) {
    int row = i / WIDTH, d = i % WIDTH;
    float sum = 0;
    for (int j = 0; j <= row; ++j) { sum += p[row][j] * v[j][d]; }
    out[place(row) + d] = sum;
  }
)";

constexpr const char* few_backward_source = R"(
  __shared__ float g[LENGTH][WIDTH + 1], s[LENGTH][LENGTH + 1];
  read(g, cotangent, cotangent_strides, 1.0f);
  __syncthreads();
  for (int i = thread; i < LENGTH * LENGTH; i += threads) {
    int row = i / LENGTH, column = i % LENGTH;
    float sum = 0;
    for (int d = 0; d < WIDTH; ++d) { sum += g[row][d] * v[column][d]; }
    s[row][column] = column <= row ? sum : 0.0f;
  }
  __syncthreads();
  for (int row = thread / 32; row < LENGTH; row += threads / 32) {
    int column = thread % 32;
    float probability = column < LENGTH ? p[row][column] : 0.0f, gradient = column < LENGTH ? s[row][column] : 0.0f;
    float sum = added(probability * gradient);
    if (column < LENGTH) { s[row][column] = probability * (gradient - sum); }
  }
  __syncthreads();
  for (int i = thread; i < LENGTH * WIDTH; i += threads) {
    int row = i / WIDTH, d = i % WIDTH;
    float query = 0, key = 0, value = 0;
    for (int j = 0; j <= row; ++j) { query += s[row][j] * k[j][d]; }
    for (int j = row; j < LENGTH; ++j) {
      key += s[j][row] * q[j][d];
      value += p[j][row] * g[j][d];
    }
    dq[place(row) + d] = scale * query;
    dk[place(row) + d] = key;
    dv[place(row) + d] = value;
  }
)";

// Whether MLX's products in float32 are in TF32 (mlx/utils.h has it, but libmlx does not export what it calls).
bool is_tf32() {
  static const bool set = [] {
    const char* value = std::getenv("MLX_ENABLE_TF32");
    return value == nullptr || std::atoi(value) != 0;
  }();
  return set;
}

// Whether kernels of tiles take attention over these queries, keys and values, all of one shape.
bool fits_tiles(const mx::array& a) {
  static const bool has_tensor_cores = [] {
    const auto& known = mx::device_info(mx::Device::gpu);
    auto major = known.find("compute_capability_major");
    return major != known.end() && std::get<size_t>(major->second) >= 8;
  }();
  constexpr int heads = 1 << 20, positions = 1 << 20; // fewer blocks than CUDA takes
  return has_tensor_cores && a.shape(3) % 8 == 0 && a.shape(2) <= positions && a.shape(0) * int64_t{a.shape(1)} <= heads;
}

// An array of positions by heads, as one of heads by positions and back.
mx::array moved(const mx::array& a) {
  return mx::transpose(a, {0, 2, 1, 3}, mx::Device::gpu);
}

mx::Shape positions_by_heads(const mx::array& a) {
  return {a.shape(0), a.shape(2), a.shape(1), a.shape(3)};
}

} // namespace

const mx::array& Softmax::original(const mx::array& a) const {
  return heads_.original(a);
}

// Queries, keys and values are of one shape.
bool Softmax::fits(const Attention& attention) const {
  const auto& values = attention.values;
  const auto* keys = swapped_back(attention.keys_swapped);
  bool is_known = keys && values.ndim() == 4 && attention.queries.shape() == values.shape() && keys->shape() == values.shape() &&
      values.shape(3) <= max_dimensions;
  return is_known && (is_few(attention) || fits_tiles(values));
}

bool Softmax::is_few(const Attention& attention) {
  return attention.scores.is_causal && attention.values.shape(2) <= few_positions;
}

Arrays Softmax::forward(const Attention& attention) {
  return is_few(attention) ? few(attention, {}) : tiles(attention);
}

Arrays Softmax::backward(const Attention& attention, const mx::array& cotangent) {
  return is_few(attention) ? few(attention, cotangent) : tiles(attention, cotangent);
}

// Queries, keys and values where they lie.
Arrays Softmax::read(const Attention& attention) const {
  return {attention.queries, original(*swapped_back(attention.keys_swapped)), attention.values};
}

// The output, or the gradients of queries, keys and values by its cotangent.
Arrays Softmax::few(const Attention& attention, const std::optional<mx::array>& cotangent) const {
  const auto& shape = attention.values.shape();
  Kernel kernel{
      cotangent ? "attention_backward" : "attention_forward",
      {"queries", "keys", "values"},
      cotangent ? std::vector<std::string>{"dq", "dk", "dv"} : std::vector<std::string>{"out"},
      "  constexpr float scale = " + literal(attention.scale) + ";\n" + warp_sum_source + few_source +
          (cotangent ? few_backward_source : few_forward_source),
      {{"LENGTH", shape[2]}, {"WIDTH", shape[3]}},
      {shape[0] * shape[1], 1},
      {256, 1},
      false};
  auto inputs = read(attention);
  if (cotangent) {
    kernel.inputs.emplace_back("cotangent");
    inputs.push_back(*cotangent);
  }
  auto n = kernel.outputs.size();
  auto made = call(kernel, inputs, std::vector(n, positions_by_heads(attention.values)), std::vector(n, mx::float32));
  std::transform(made.begin(), made.end(), made.begin(), moved);
  return made;
}

Kernel Softmax::of_tiles(const Attention& attention, const char* name, const char* source) {
  const auto& shape = attention.values.shape();
  return {
      std::string("attention_") + name,
      {},
      {},
      "  constexpr float scale = " + literal(attention.scale) + ";\n" + tiles_source + source,
      {{"WIDTH", shape[3]}, {"CAUSAL", attention.scores.is_causal}, {"EXACT", !is_tf32()}},
      {shape[0] * shape[1], (shape[2] + tile_rows - 1) / tile_rows},
      {tile_threads, 1},
      false,
      tensor_cores_source};
}

// The output, and each position's normalizer.
Arrays Softmax::tiles(const Attention& attention) const {
  auto kernel = of_tiles(attention, "tiles", tiles_forward_source);
  kernel.inputs = {"queries", "keys", "values"};
  kernel.outputs = {"out", "normalizers"};
  const auto& shape = attention.values.shape();
  auto made = call(
      kernel,
      read(attention),
      {positions_by_heads(attention.values), {shape[0], shape[1], shape[2]}},
      {mx::float32, mx::float32});
  made[0] = moved(made[0]);
  return made;
}

// The gradients of queries, keys and values.
Arrays Softmax::tiles(const Attention& attention, const mx::array& cotangent) const {
  auto of_queries = of_tiles(attention, "tiles_queries", tiles_queries_source);
  of_queries.inputs = {"queries", "keys", "values", "cotangent", "out", "normalizers"};
  of_queries.outputs = {"dq", "dots"};
  auto inputs = read(attention);
  inputs.push_back(cotangent);
  const auto &out = attention.made[0], &normalizers = attention.made[1];
  auto shape = positions_by_heads(attention.values);
  auto first = call(
      of_queries,
      {inputs[0], inputs[1], inputs[2], inputs[3], out, normalizers},
      {shape, normalizers.shape()},
      {mx::float32, mx::float32});
  auto of_keys = of_tiles(attention, "tiles_keys", tiles_keys_source);
  of_keys.inputs = {"queries", "keys", "values", "cotangent", "normalizers", "dots"};
  of_keys.outputs = {"dk", "dv"};
  auto second = call(
      of_keys,
      {inputs[0], inputs[1], inputs[2], inputs[3], normalizers, first[1]},
      {shape, shape},
      {mx::float32, mx::float32});
  return {moved(first[0]), moved(second[0]), moved(second[1])};
}

} // namespace faststep::rules
