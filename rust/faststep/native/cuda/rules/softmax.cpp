// Softmax's gradient, and causal attention in float32, which MLX has no kernel for.
//
// MLX composes them of operations that each read and write all scores: the mask is applied, masked scores are summed
// with the rest, and the gradient takes three more. Here a warp has a row of scores in registers.
#include "cuda/rules/pieces.hpp"
#include "cuda/rules/rules.hpp"

namespace faststep::rules {

namespace {

constexpr int max_columns = 1024; // of which a warp keeps its share in registers
constexpr size_t max_rows = size_t{1} << 28;

// Lane i of the warp of a row has the columns i, i + 32, ...
constexpr const char* lane_source = R"(
  constexpr int WIDE = 1;
  int lane = threadIdx.x;
)";

// The last column that a row sees.
constexpr const char* last_source = R"(
  int last = CAUSAL ? int(row % QUERIES) + COLUMNS - QUERIES : COLUMNS - 1;
)";

constexpr const char* softmax_source = R"(
  float values[each], largest = -INFINITY, sum = 0;
  #pragma unroll
  for (int j = 0; j < each; ++j) {
    int column = j * lanes + lane;
    values[j] = column <= last ? float(x[row * COLUMNS + column]) : -INFINITY;
    largest = fmaxf(largest, values[j]);
  }
  for (int step = 16; step > 0; step /= 2) { largest = fmaxf(largest, __shfl_xor_sync(0xffffffff, largest, step)); }
  #pragma unroll
  for (int j = 0; j < each; ++j) {
    values[j] = j * lanes + lane <= last ? __expf(values[j] - largest) : 0.0f;
    sum += values[j];
  }
  sum = 1 / added(sum);
  #pragma unroll
  for (int j = 0; j < each; ++j) {
    int column = j * lanes + lane;
    if (column < COLUMNS) { out[row * COLUMNS + column] = T(values[j] * sum); }
  }
)";

constexpr const char* gradient_source = R"(
  float ps[each], gs[each], sum = 0;
  #pragma unroll
  for (int j = 0; j < each; ++j) {
    int column = j * lanes + lane;
    ps[j] = column <= last ? float(x[row * COLUMNS + column]) : 0.0f;
    gs[j] = column <= last ? float(cotangent[row * COLUMNS + column]) : 0.0f;
    sum += ps[j] * gs[j];
  }
  sum = added(sum);
  #pragma unroll
  for (int j = 0; j < each; ++j) {
    int column = j * lanes + lane;
    if (column < COLUMNS) { out[row * COLUMNS + column] = T(ps[j] * (gs[j] - sum)); }
  }
)";

// Rows of a warp each.
mx::array by_row(const char* name, const char* source, const Arrays& inputs, int queries) {
  const auto& x = inputs[0];
  int columns = x.shape(-1), rows = static_cast<int>(x.size() / columns);
  Kernel kernel{
      name,
      {"x"},
      {"out"},
      std::string(lane_source) + row_source + last_source + warp_sum_source + source,
      {{"COLUMNS", columns}, {"QUERIES", queries == 0 ? 1 : queries}, {"CAUSAL", queries > 0}, {"T", x.dtype()}},
      {divided(rows, warps), 1},
      {lanes, warps}};
  Arrays matrices;
  for (const auto& in : inputs) {
    matrices.push_back(mx::reshape(in, {rows, columns}, mx::Device::gpu));
  }
  if (inputs.size() > 1) {
    kernel.inputs.emplace_back("cotangent");
  }
  auto out = call(kernel, matrices, {{rows, columns}}, {x.dtype()})[0];
  return mx::reshape(out, x.shape(), mx::Device::gpu);
}

bool fits_registers(const mx::array& a) {
  return is_known(a.dtype()) && a.ndim() > 0 && a.size() > 0 && a.shape(-1) <= max_columns &&
      a.size() / a.shape(-1) <= max_rows;
}

} // namespace

std::optional<mx::array> Softmax::probabilities(const mx::array& softmax, const Scores& scores) {
  bool is_ours = scores.is_causal && fits_registers(softmax);
  return is_ours ? std::optional(by_row("causal_softmax", softmax_source, {scores.visible}, softmax.shape(-2))) : std::nullopt;
}

std::optional<mx::array> Softmax::gradient(const Gradient& gradient) {
  const auto& p = gradient.probabilities;
  if (!fits_registers(p)) {
    return std::nullopt;
  }
  return by_row("softmax_vjp", gradient_source, {p, gradient.cotangent}, gradient.scores.is_causal ? p.shape(-2) : 0);
}

} // namespace faststep::rules
