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

mx::array swapped(const mx::array& a) {
  return mx::swapaxes(a, -1, -2, mx::Device::gpu);
}

// The matrix of which another one is the transpose, or all in an array.
const mx::array* swapped_back(const mx::array& a) {
  if (!is(a, "Transpose") || a.ndim() < 2) {
    return nullptr;
  }
  auto axes = static_cast<const mx::Transpose&>(a.primitive()).state();
  int n = static_cast<int>(a.ndim());
  for (int i = 0; i < n; ++i) {
    if (axes[i] != (i < n - 2 ? i : 2 * n - 3 - i)) {
      return nullptr;
    }
  }
  return &a.inputs()[0];
}

bool are_swapped(const mx::array& a, const mx::array& b) {
  const auto *of_a = swapped_back(a), *of_b = swapped_back(b);
  return (of_a && of_a->id() == b.id()) || (of_b && of_b->id() == a.id());
}

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

} // namespace

// The products of attention, and those of its gradient.
std::optional<mx::array> Softmax::product(const mx::array& product) {
  const auto &left = product.inputs()[0], &right = product.inputs()[1];
  if (causal_.contains(left.id()) || is(left, "Softmax")) {
    return attention(product);
  }
  auto of = [&](const mx::array& gradient) {
    auto found = gradients_.find(gradient.id());
    return found == gradients_.end() ? attentions_.end() : attentions_.find(found->second.probabilities.id());
  };
  if (auto found = of(left); found != attentions_.end() && are_swapped(right, found->second.keys_swapped)) {
    if (auto* made = backward(found->second, gradients_.at(left.id()).cotangent)) {
      queries_.emplace(product.id(), std::pair{(*made)[0], found->second.scale});
    }
    return std::nullopt;
  }
  if (auto found = of(right); found != attentions_.end() && are_swapped(left, found->second.scaled)) {
    auto* made = backward(found->second, gradients_.at(right.id()).cotangent);
    return made ? std::optional(swapped((*made)[1])) : std::nullopt;
  }
  const auto* probabilities = swapped_back(left);
  auto found = probabilities ? attentions_.find(probabilities->id()) : attentions_.end();
  if (found == attentions_.end() || right.shape() != found->second.values.shape()) {
    return std::nullopt;
  }
  return gradient_of(found->second, right)[2];
}

// softmax(mask(scale queries keys^T)) values, or without a mask
std::optional<mx::array> Softmax::attention(const mx::array& product) {
  const auto &p = product.inputs()[0], &values = product.inputs()[1];
  auto found = causal_.find(p.id());
  bool is_causal = found != causal_.end();
  const auto& scores = is_causal ? found->second.scores : p.inputs()[0];
  if (!is(scores, "Matmul") || p.dtype() != mx::float32 || p.ndim() != 4 || p.shape(-1) != p.shape(-2) || p.size() == 0) {
    return std::nullopt;
  }
  const auto &scaled = scores.inputs()[0], &keys_swapped = scores.inputs()[1];
  const auto* keys = swapped_back(keys_swapped);
  if (!keys || !is(scaled, "Multiply") || values.ndim() != 4) {
    return std::nullopt;
  }
  const auto& queries = heads_.original(scaled.inputs()[1]);
  const auto &from = heads_.original(*keys), &into = heads_.original(values);
  auto scale = number(scaled.inputs()[0]);
  if (!scale || queries.shape() != from.shape() || queries.shape() != into.shape() ||
      values.shape(-1) > max_dimensions) {
    return std::nullopt;
  }
  bool is_few = is_causal && p.shape(-1) <= few_positions;
  if (!is_few && !fits_tiles(queries)) {
    return std::nullopt;
  }
  Attention attention{p, queries, from, into, scaled, keys_swapped, values, *scale, is_causal, is_few, {}};
  attention.made = is_few ? few(attention, {}) : tiles(attention);
  auto out = attention.made[0];
  attentions_.emplace(p.id(), std::move(attention));
  return out;
}

// The gradients by the cotangent of the product with the values, which that of the probabilities is computed from.
const Arrays* Softmax::backward(const Attention& attention, const mx::array& cotangent) {
  bool known = is(cotangent, "Matmul") && are_swapped(cotangent.inputs()[1], attention.values_read) &&
      cotangent.inputs()[0].shape() == attention.values.shape();
  return known ? &gradient_of(attention, cotangent.inputs()[0]) : nullptr;
}

const Arrays& Softmax::gradient_of(const Attention& attention, const mx::array& cotangent) {
  std::pair at{attention.probabilities.id(), cotangent.id()};
  auto found = backward_.find(at);
  if (found == backward_.end()) {
    const auto& original = heads_.original(cotangent);
    auto made = attention.is_few ? few(attention, original) : tiles(attention, original);
    found = backward_.emplace(at, std::move(made)).first;
  }
  return found->second;
}

namespace {

// An array of positions by heads, as one of heads by positions and back.
mx::array moved(const mx::array& a) {
  return mx::transpose(a, {0, 2, 1, 3}, mx::Device::gpu);
}

mx::Shape positions_by_heads(const mx::array& a) {
  return {a.shape(0), a.shape(2), a.shape(1), a.shape(3)};
}

} // namespace

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
  Arrays inputs{attention.queries, attention.keys, attention.values};
  if (cotangent) {
    kernel.inputs.emplace_back("cotangent");
    inputs.push_back(*cotangent);
  }
  auto n = kernel.outputs.size();
  auto made = call(kernel, inputs, std::vector(n, positions_by_heads(attention.values)), std::vector(n, mx::float32));
  std::transform(made.begin(), made.end(), made.begin(), moved);
  return made;
}

namespace {

Kernel of_tiles(const Softmax::Attention& attention, const char* name, const char* source) {
  const auto& shape = attention.values.shape();
  return {
      std::string("attention_") + name,
      {},
      {},
      "  constexpr float scale = " + literal(attention.scale) + ";\n" + tiles_source + source,
      {{"WIDTH", shape[3]}, {"CAUSAL", attention.is_causal}, {"EXACT", !is_tf32()}},
      {shape[0] * shape[1], (shape[2] + tile_rows - 1) / tile_rows},
      {tile_threads, 1},
      false,
      tensor_cores_source};
}

} // namespace

// The output, and each position's normalizer.
Arrays Softmax::tiles(const Attention& attention) {
  auto kernel = of_tiles(attention, "tiles", tiles_forward_source);
  kernel.inputs = {"queries", "keys", "values"};
  kernel.outputs = {"out", "normalizers"};
  const auto& shape = attention.values.shape();
  auto made = call(
      kernel,
      {attention.queries, attention.keys, attention.values},
      {positions_by_heads(attention.values), {shape[0], shape[1], shape[2]}},
      {mx::float32, mx::float32});
  made[0] = moved(made[0]);
  return made;
}

// The gradients of queries, keys and values.
Arrays Softmax::tiles(const Attention& attention, const mx::array& cotangent) {
  auto of_queries = of_tiles(attention, "tiles_queries", tiles_queries_source);
  of_queries.inputs = {"queries", "keys", "values", "cotangent", "out", "normalizers"};
  of_queries.outputs = {"dq", "dots"};
  Arrays inputs{attention.queries, attention.keys, attention.values, cotangent};
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
