// Softmax's gradient, and causal attention in float32, which MLX has no kernel for.
//
// MLX composes them of operations that each read and write all scores: the mask is applied, masked scores are summed
// with the rest, and the gradient takes three more. Here a warp has a row of scores in registers.
#include <limits>

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

bool fits(const mx::array& a) {
  return is_known(a.dtype()) && a.ndim() > 0 && a.size() > 0 && a.shape(-1) <= max_columns &&
      a.size() / a.shape(-1) <= max_rows;
}

} // namespace

std::optional<mx::array> Softmax::rewritten(const mx::array& a) {
  if (is(a, "Softmax")) {
    return causal(a);
  }
  if (is(a, "Subtract")) {
    return gradient(a);
  }
  if (is(a, "Multiply")) {
    return masked(a);
  }
  return is(a, "Matmul") ? product(a) : std::nullopt;
}

// softmax(where(i + columns - rows >= j, scores, lowest)), or of scores and lowest values in the places of the others
std::optional<mx::array> Softmax::causal(const mx::array& softmax) {
  const auto& masked = softmax.inputs()[0];
  if (softmax.dtype() != mx::float32 || softmax.ndim() < 2 || softmax.size() == 0) {
    return std::nullopt;
  }
  int rows = softmax.shape(-2), columns = softmax.shape(-1);
  std::optional<std::pair<mx::array, mx::array>> found; // scores and mask
  if (is(masked, "Select")) {
    auto lowest = number(masked.inputs()[2]);
    if (lowest && *lowest <= std::numeric_limits<float>::lowest() && shows_causal(masked.inputs()[0], rows, columns)) {
      found.emplace(masked.inputs()[1], unrepeated(masked.inputs()[0]));
    }
  } else if (is(masked, "Add")) {
    for (int side : {0, 1}) {
      if (adds_causal(masked.inputs()[side], rows, columns)) {
        found.emplace(masked.inputs()[1 - side], masked.inputs()[side]);
      }
    }
  }
  if (!found || found->first.shape() != softmax.shape()) {
    return std::nullopt;
  }
  const auto& [scores, mask] = *found;
  auto made = fits(softmax) ? by_row("causal_softmax", softmax_source, {scores}, rows) : softmax;
  causal_.emplace(made.id(), Causal{scores, mask});
  return made;
}

// p c - p sum(p c): the gradient of p = softmax(x), where c is that of p
std::optional<mx::array> Softmax::gradient(const mx::array& difference) {
  const auto &whole = difference.inputs()[0], &part = difference.inputs()[1];
  if (!is(whole, "Multiply") || !is(part, "Multiply")) {
    return std::nullopt;
  }
  const auto &p = whole.inputs()[0], &cotangent = whole.inputs()[1], &sum = unrepeated(part.inputs()[1]);
  if (part.inputs()[0].id() != p.id() || !is(sum, "Sum") || sum.inputs()[0].id() != whole.id()) {
    return std::nullopt;
  }
  auto axes = static_cast<const mx::Reduce&>(sum.primitive()).state().second;
  bool is_causal = causal_.contains(p.id()), last = axes.size() == 1 && axes[0] == static_cast<int>(whole.ndim()) - 1;
  if (!last || !(is_causal || is(p, "Softmax")) || cotangent.dtype() != p.dtype() || cotangent.shape() != p.shape()) {
    return std::nullopt;
  }
  auto made = difference;
  if (fits(difference)) {
    made = by_row("softmax_vjp", gradient_source, {p, cotangent}, is_causal ? p.shape(-2) : 0);
  }
  if (is_causal || attentions_.contains(p.id())) {
    gradients_.emplace(made.id(), Gradient{p, cotangent});
  }
  return made;
}

// A gradient of masked scores is zero where they are masked; that of queries is scaled where it is computed.
std::optional<mx::array> Softmax::masked(const mx::array& product) {
  const auto &factor = product.inputs()[0], &other = product.inputs()[1];
  auto gradient = gradients_.find(other.id());
  if (gradient != gradients_.end()) {
    const auto& cast = unrepeated(factor);
    auto of = causal_.find(gradient->second.probabilities.id());
    bool same = of != causal_.end() && is(cast, "AsType") && unrepeated(cast.inputs()[0]).id() == of->second.mask.id() &&
        of->second.mask.dtype() == mx::bool_; // what is added has no gradient of the scores' own
    return same ? std::optional(other) : std::nullopt;
  }
  auto query = queries_.find(other.id());
  bool same = query != queries_.end() && number(factor) == query->second.second;
  return same ? std::optional(query->second.first) : std::nullopt;
}

} // namespace faststep::rules
