// Positions by heads as heads by positions, and back: copied once, where MLX makes a copy for each product.
#include <limits>

#include "cuda/rules/rules.hpp"

namespace faststep::rules {

namespace {

// [.., ROWS, COLUMNS, DEPTH] as [.., COLUMNS, ROWS, DEPTH], 16 bytes a thread
constexpr const char* moved_source = R"(
  constexpr int wide = 16 / sizeof(T);
  unsigned at = blockIdx.x * blockDim.x + threadIdx.x;
  unsigned rows = from_shape[1], columns = from_shape[2], depth = from_shape[3] / wide;
  if (at >= from_shape[0] * rows * columns * depth) { return; }
  unsigned d = at % depth, row = at / depth % rows, column = at / depth / rows % columns;
  size_t batch = at / depth / rows / columns;
  auto values = load_vector<wide>(from + (((batch * rows + row) * columns + column) * depth + d) * wide, 0);
  *reinterpret_cast<AlignedVector<T, wide>*>(out + size_t(at) * wide) = values;
)";

std::vector<int> axes(const mx::array& transpose) {
  return static_cast<const mx::Transpose&>(transpose.primitive()).state();
}

// The array of which another one is the transpose, its axes in this order.
const mx::array* transposed(const mx::array& a, const std::vector<int>& order) {
  return is(a, "Transpose") && axes(a) == order ? &a.inputs()[0] : nullptr;
}

// The axes of positions and heads change places.
const mx::array* moved_from(const mx::array& a) {
  return transposed(a, {0, 2, 1, 3});
}

// The matrices of which others are the transposes.
const mx::array* turned_from(const mx::array& a) {
  return transposed(a, {0, 1, 3, 2});
}

// Matrices that lie row after row: the transposes of products are products of transposes.
mx::array straight(const mx::array& a) {
  const auto* product = turned_from(a);
  if (!product || !is(*product, "Matmul")) {
    return a;
  }
  auto turned = [](const mx::array& factor) {
    const auto* from = turned_from(factor);
    return from ? *from : mx::transpose(factor, {0, 1, 3, 2}, factor.primitive().stream());
  };
  const auto& factors = product->inputs();
  bool lazy = factors[0].has_primitive() && factors[1].has_primitive();
  return lazy ? mx::matmul(turned(factors[1]), turned(factors[0]), product->primitive().stream()) : a;
}

// True of arrays that are known to lie row after row: products, in another shape or by another scale.
bool lies_in_rows(const mx::array& a) {
  if (is(a, "Unflatten") || is(a, "Reshape") || is(a, "Flatten")) {
    return lies_in_rows(a.inputs()[0]);
  }
  if (is(a, "Multiply")) {
    return number(a.inputs()[0]) && lies_in_rows(a.inputs()[1]);
  }
  return is(a, "Matmul") || is(a, "AddMM") || is(a, "CustomKernel");
}

bool reads_rows(const mx::array& a) {
  if (turned_from(a)) {
    return true;
  }
  return is(a, "Matmul") || is(a, "Flatten") || (is(a, "Multiply") && number(a.inputs()[0]));
}

} // namespace

void Heads::read_by(mx::array& a) {
  if (!reads_rows(a)) {
    return;
  }
  for (auto& in : a.inputs()) {
    if (moved_from(in)) {
      in = moved(in);
    }
  }
}

std::optional<mx::array> Heads::rewritten(const mx::array& a) const {
  if (!is(a, "Transpose") || !is(a.inputs()[0], "Transpose")) {
    return std::nullopt;
  }
  auto last = axes(a), first = axes(a.inputs()[0]);
  for (size_t i = 0; i < last.size(); ++i) {
    if (first[last[i]] != static_cast<int>(i)) {
      return std::nullopt;
    }
  }
  return a.inputs()[0].inputs()[0];
}

const mx::array& Heads::original(const mx::array& a) const {
  auto found = originals_.find(a.id());
  return found == originals_.end() ? a : found->second;
}

mx::array Heads::moved(const mx::array& a) {
  auto known = moved_.find(a.id());
  if (known != moved_.end()) {
    return known->second;
  }
  int wide = static_cast<int>(16 / a.itemsize());
  bool fits = a.itemsize() <= 4 && mx::issubdtype(a.dtype(), mx::floating) && a.shape(3) % wide == 0 && a.size() > 0 &&
      a.shape(1) > 1 && a.shape(2) > 1 && a.size() <= static_cast<size_t>(std::numeric_limits<int>::max());
  auto from = straight(*moved_from(a));
  if (!fits || !lies_in_rows(from)) {
    return a;
  }
  int threads = 256, vectors = static_cast<int>(a.size()) / wide;
  Kernel kernel{
      "heads",
      {"from"},
      {"out"},
      moved_source,
      {{"T", a.dtype()}},
      {(vectors + threads - 1) / threads, 1},
      {threads, 1}};
  auto made = call(kernel, {from}, {a.shape()}, {a.dtype()})[0];
  moved_.emplace(a.id(), made);
  originals_.emplace(made.id(), a);
  return made;
}

} // namespace faststep::rules
