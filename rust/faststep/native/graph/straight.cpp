// The gradient of a linear layer is the transpose of a product: here it is computed as the product of the transposes.
#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <initializer_list>
#include <optional>
#include <utility>
#include <vector>

#include "mlx/mlx.h"
#include "cpu/turned.hpp"
#include "ffi.hpp"
#include "graph/transposed.hpp"
#include "status.hpp"

namespace mx = mlx::core;
using faststep::is_matrix;
using faststep::transposed;

namespace {

mx::array turned(const mx::array& a) {
  const auto* in = transposed(a);
  return in ? *in : mx::transpose(a);
}

using Sizes = std::array<int, 3>; // of a product: rows, columns, terms

// Return true if (a b)^T and b^T a^T have the same bits on this machine, for random matrices of each of these sizes.
bool turns_exactly(std::initializer_list<Sizes> sizes) {
  return std::all_of(sizes.begin(), sizes.end(), [](const Sizes& each) {
    auto [m, n, k] = each;
    std::vector<float> values(static_cast<size_t>(k) * (m + n));
    uint32_t state = 1;
    for (auto& value : values) {
      state = state * 1664525u + 1013904223u;
      value = static_cast<float>(state >> 8) / (1 << 23) - 1.0f;
    }
    mx::array a(values.begin(), {k, m});
    mx::array b(values.begin() + static_cast<ptrdiff_t>(k) * m, {k, n});
    auto product = mx::transpose(mx::matmul(mx::transpose(a), b));
    return mx::array_equal(product, mx::matmul(mx::transpose(b), a)).item<bool>();
  });
}

// Return true if that holds for all products with that many multiplications. Each element is the same sum, but some of OpenBLAS's kernels
// (for Haswell, Zen) add up rows and columns in different orders. With AVX-512, small products have kernels of their own.
bool turns_exactly(size_t work) {
  constexpr size_t most_small = 100 * 100 * 100; // of OpenBLAS's sgemm_small_kernel_permit
  static const bool exact = turns_exactly({{130, 170, 50}, {300, 70, 80}});
  static const bool has_own = faststep_is_small_product(70, 30, 50, 0); // which then would be tried in place of OpenBLAS's
  static const bool small = has_own ? exact : turns_exactly({{70, 30, 50}, {64, 96, 40}, {10, 64, 8}});
  return work <= most_small ? small : exact;
}

// (a b)^T as b^T a^T, which lies row after row, where that has the same bits, or else, if it is `alone`, by `sgemm` and a copy. Nothing:
// another transpose. What is none is left as it is.
std::optional<mx::array> straight_product(const mx::array& a, faststep::Sgemm sgemm, bool alone) {
  const auto* product = transposed(a);
  if (!product) {
    return a;
  }
  if (!is_matrix(*product, "Matmul")) {
    return std::nullopt;
  }
  const auto& factors = product->inputs();
  if (factors[0].ndim() != 2 || factors[1].ndim() != 2) {
    return std::nullopt;
  }
  size_t m = a.shape(0), n = a.shape(1), k = factors[0].shape(1);
  bool is_own = sgemm && faststep_is_small_product(m, n, k, 0);
  if (a.dtype() != mx::float32 || is_own || turns_exactly(m * n * k)) {
    return mx::matmul(turned(factors[1]), turned(factors[0]));
  }
  bool empty = a.size() == 0 || factors[0].size() == 0;
  return sgemm && alone && !empty ? std::optional(faststep::turned_product(factors[0], factors[1], sgemm)) : std::nullopt;
}

// From so many products on, each smaller than a sum of them, their sum is one product, in another order.
constexpr size_t many_products = 8;

// The sum of (a b)^T, or of a b, as one product of the factors below each other: the gradient of what is used step by step, as in a
// recurrent layer. Nothing: other terms.
std::optional<mx::array> joined_product(const std::vector<mx::array>& terms) {
  bool turns = transposed(terms[0]) != nullptr;
  std::vector<mx::array> left, right;
  for (auto term = terms.rbegin(); term != terms.rend(); ++term) {
    const auto* product = turns ? transposed(*term) : &*term;
    bool fits = product && is_matrix(*product, "Matmul") && product->dtype() == mx::float32 &&
        product->inputs()[0].shape(1) < std::min(product->shape(0), product->shape(1));
    if (!fits) {
      return std::nullopt;
    }
    left.push_back(turned(product->inputs()[0]));
    right.push_back(product->inputs()[1]);
  }
  auto all = [](const std::vector<mx::array>& parts) { return mx::concatenate(parts, 0); };
  return turns ? mx::matmul(mx::transpose(all(right)), all(left)) : mx::matmul(mx::transpose(all(left)), all(right));
}

// The gradient of a matrix: a product, or of one that is used more than once a sum of them, one added after the other.
mx::array straight(const mx::array& a, faststep::Sgemm sgemm, bool alone, bool joins) {
  std::vector<mx::array> terms;
  auto first = a;
  for (; is_matrix(first, "Add"); first = mx::array(first.inputs()[0])) {
    terms.push_back(first.inputs()[1]);
  }
  terms.push_back(first);
  if (joins && terms.size() >= many_products) {
    if (auto joined = joined_product(terms)) {
      return *joined;
    }
  }
  bool turns = false;
  for (auto& term : terms) {
    auto made = straight_product(term, sgemm, alone);
    if (!made || (terms.size() > 1 && is_matrix(term, "Add"))) {
      return a; // what would not lie as the others do, or is no row of terms
    }
    turns |= made->id() != term.id();
    term = *made;
  }
  if (!turns) {
    return a;
  }
  auto sum = terms.back();
  for (auto term = terms.rbegin() + 1; term != terms.rend(); ++term) {
    sum = mx::add(sum, *term);
  }
  return sum;
}

// Where rows of both lie at multiples of 16 bytes: what is not aligned is for the other rewrites.
mx::array straight_on_gpu(const mx::array& a) {
  const auto* product = transposed(a);
  if (!product || !is_matrix(*product, "Matmul")) {
    return a;
  }
  const auto& factors = product->inputs();
  auto is_aligned = [&](int length) { return length * a.itemsize() % 16 == 0; };
  bool known = a.dtype() == mx::float32 || a.dtype() == mx::float16 || a.dtype() == mx::bfloat16;
  bool fits = factors[0].ndim() == 2 && factors[1].ndim() == 2 && is_aligned(a.shape(0)) && is_aligned(a.shape(1));
  return known && fits ? mx::matmul(turned(factors[1]), turned(factors[0])) : a;
}

} // namespace

int faststep_straight(const void* gradient, faststep::Sgemm sgemm, int alone, int joins, void** out) {
  return faststep::guarded([&] {
    const auto& in = faststep::at(gradient);
    auto made = mx::default_device() == mx::Device::cpu ? straight(in, sgemm, alone != 0, joins != 0) : straight_on_gpu(in);
    if (made.id() == in.id()) {
      return faststep::not_applicable;
    }
    *out = faststep::owned(std::move(made));
    return faststep::done;
  });
}
