// Products of matrices with an odd dimension, such as a vocabulary of 50,257, by kernels that want whole 16 bytes.
//
// cuBLAS has its fast kernels only where rows begin at multiples of 16 bytes. The odd dimension is padded with zeros here,
// which add nothing to a sum, and cut off behind the product. Logits stay padded up to the cross entropy, and its gradient
// comes out padded. The cross entropy reads half precision itself, so a cast to float32 before it, and that of its gradient
// back, take no memory. It computes in float32 either way.
#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <map>
#include <optional>
#include <string_view>
#include <unordered_map>
#include <utility>
#include <vector>

#include "mlx/mlx.h"
#include "mlx/primitives.h"
#include "cuda/cross_entropy.hpp"
#include "graph/rewrite.hpp"
#include "graph/transposed.hpp"
#include "status.hpp"

namespace mx = mlx::core;

namespace {

constexpr int bytes = 16; // where a row may begin
constexpr int block = 64; // elements that a padded dimension is a multiple of
constexpr int least = 512; // elements of a dimension for which padding costs little
constexpr int64_t work = int64_t{1} << 30; // multiplications below which the copies cost more than they bring

bool is_half(mx::Dtype dtype) {
  return dtype == mx::float16 || dtype == mx::bfloat16;
}

bool is_aligned(const mx::array& a, int length) {
  return length * a.itemsize() % bytes == 0;
}

int padded(int length) {
  return (length + block - 1) / block * block;
}

mx::Shape with_last(mx::Shape shape, int length) {
  shape.back() = length;
  return shape;
}

// Whether the same row is added to each row of a product.
bool is_broadcast_row(const mx::array& a) {
  return a.has_primitive() && std::string_view(a.primitive().name()) == "Broadcast" && a.inputs()[0].ndim() == 1 &&
      a.inputs()[0].shape(0) == a.shape(-1);
}

bool is_on_gpu(const mx::array& a) {
  return a.primitive().stream().device == mx::Device::gpu;
}

class Align : public faststep::Rewrite {
  std::vector<mx::array> operation(const std::vector<mx::array>& outputs) override {
    const auto& a = outputs[0];
    if (outputs.size() != 1 || !is_on_gpu(a)) {
      return outputs;
    }
    stream_ = a.primitive().stream();
    auto made = instead(a);
    if (!made) {
      return outputs;
    }
    hold(*made);
    return {*made};
  }

  std::optional<mx::array> instead(const mx::array& a) {
    std::string_view name = a.primitive().name();
    if (name == "Matmul" || name == "AddMM") {
      return product(a);
    }
    if (name == "Reshape" || name == "Flatten" || name == "Unflatten") {
      return reshaped(a);
    }
    if (name == "Transpose") {
      return turned(a);
    }
    if (name == "Depends") {
      return delayed(a);
    }
    if (name == "AsType") {
      return cast(a);
    }
    if (name == "CrossEntropy") {
      return loss(a);
    }
    return name == "CrossEntropyVJP" ? gradient(a) : std::nullopt;
  }

  // [m, k] x [k, n], where rows of either factor or of the product are not aligned.
  std::optional<mx::array> product(const mx::array& a) {
    const auto &left = a.inputs()[0], &right = a.inputs()[1];
    if (a.ndim() != 2 || left.ndim() != 2 || right.ndim() != 2 || !(is_half(a.dtype()) || a.dtype() == mx::float32)) {
      return std::nullopt;
    }
    int k = left.shape(1), n = a.shape(1);
    bool pads_k = k >= least && !is_aligned(a, k), pads_n = n >= least && !is_aligned(a, n);
    if (!(pads_k || pads_n) || int64_t{left.shape(0)} * k * n < work) {
      return std::nullopt;
    }
    auto first = pads_k ? pad(left, 1) : left;
    auto second = pads_k ? pad(right, 0) : right;
    second = pads_n ? pad(second, 1) : second;
    if (a.inputs().size() == 2) {
      if (pads_n && is_turned(a)) {
        auto whole = mx::matmul(mx::transpose(second, stream_), mx::transpose(first, stream_), stream_);
        return mx::transpose(mx::slice(whole, {0, 0}, {n, a.shape(0)}, stream_), stream_);
      }
      auto whole = mx::matmul(first, second, stream_);
      return pads_n ? cut_off(whole, n) : whole;
    }
    const auto& added = a.inputs()[2];
    auto row = is_broadcast_row(added) ? added.inputs()[0] : added;
    if (pads_n && row.ndim() != 1) {
      return std::nullopt;
    }
    auto [alpha, beta] = static_cast<const mx::AddMM&>(a.primitive()).state();
    auto made = mx::addmm(pads_n ? pad(row, 0) : row, first, second, alpha, beta, stream_);
    return pads_n ? cut_off(made, n) : made;
  }

  // The same shape of a padded array, where the padded dimension stays.
  std::optional<mx::array> reshaped(const mx::array& a) {
    const auto* whole = find(a.inputs()[0]);
    if (whole == nullptr || a.ndim() == 0 || a.shape(-1) != a.inputs()[0].shape(-1)) {
      return std::nullopt;
    }
    return cut_off(mx::reshape(*whole, with_last(a.shape(), whole->shape(-1)), stream_), a.shape(-1));
  }

  // Whether an operation transposes a product, as the gradient of a linear layer does. Then the product is computed transposed,
  // (a b)^T = b^T a^T: with a padded b it is contiguous once the last rows are cut off. All others read that one product.
  bool is_turned(const mx::array& product) const {
    auto all = users(product).all;
    return std::any_of(all.begin(), all.end(), [](const mx::array& user) { return faststep::transposed(user); });
  }

  // The transpose of a transpose.
  std::optional<mx::array> turned(const mx::array& a) {
    const auto* once = faststep::transposed(a);
    const auto* twice = once ? faststep::transposed(*once) : nullptr;
    return twice ? std::optional(*twice) : std::nullopt;
  }

  // A padded array that comes after others.
  std::optional<mx::array> delayed(const mx::array& a) {
    const auto* whole = find(a.inputs()[0]);
    if (whole == nullptr) {
      return std::nullopt;
    }
    return cut_off(mx::depends({*whole}, {a.inputs().begin() + 1, a.inputs().end()})[0], a.shape(-1));
  }

  std::optional<mx::array> cast(const mx::array& a) {
    const auto& in = a.inputs()[0];
    if (a.dtype() == mx::float32 && is_half(in.dtype())) {
      widened_.emplace(a.id(), in);
    } else if (auto found = gradients_.find(in.id()); found != gradients_.end() && is_half(a.dtype())) {
      auto of = found->second;
      if (of.logits.whole.dtype() == a.dtype()) {
        return gradient(of, a.dtype());
      }
    }
    return std::nullopt;
  }

  std::optional<mx::array> loss(const mx::array& a) {
    const auto &logits = a.inputs()[0], &targets = a.inputs()[1];
    auto wide = widened_.find(logits.id());
    const auto& source = wide == widened_.end() ? logits : wide->second;
    const auto* whole = find(source);
    if (whole == nullptr && (wide == widened_.end() || !is_aligned(source, source.shape(-1)))) {
      return std::nullopt;
    }
    if (targets.dtype() != mx::int32 || a.dtype() != mx::float32) {
      return std::nullopt;
    }
    faststep::Logits taken{whole ? *whole : source, source.shape(-1)};
    auto made = faststep::cross_entropy(taken, targets, stream_);
    losses_.emplace(made.id(), taken);
    return made;
  }

  // Of a loss that was made here.
  std::optional<mx::array> gradient(const mx::array& a) {
    const auto& in = a.inputs();
    if (in.size() != 4) {
      return std::nullopt;
    }
    for (auto [losses, cotangents] : {std::pair{2, 3}, std::pair{3, 2}}) {
      auto found = losses_.find(in[losses].id());
      if (found != losses_.end() && in[cotangents].dtype() == mx::float32 && in[cotangents].shape() == in[1].shape()) {
        return gradient({found->second, in[1], in[losses], in[cotangents]}, a.dtype());
      }
    }
    return std::nullopt;
  }

  struct Gradient {
    faststep::Logits logits;
    mx::array targets, losses, cotangents;
  };

  mx::array gradient(const Gradient& of, mx::Dtype dtype) {
    auto whole = faststep::cross_entropy_vjp(of.logits, of.targets, of.losses, of.cotangents, dtype, stream_);
    bool pads = of.logits.classes != whole.shape(-1);
    auto made = pads ? cut_off(whole, of.logits.classes) : whole;
    gradients_.emplace(made.id(), of);
    return made;
  }

  // The first elements of each row of an array whose others are zeros.
  mx::array cut_off(const mx::array& whole, int length) {
    auto made = mx::slice(whole, mx::Shape(whole.ndim(), 0), with_last(whole.shape(), length), stream_);
    wholes_.emplace(made.id(), whole);
    hold(made);
    return made;
  }

  const mx::array* find(const mx::array& a) const {
    auto found = wholes_.find(a.id());
    return found == wholes_.end() ? nullptr : &found->second;
  }

  // A matrix with zeros behind it along an axis.
  mx::array pad(const mx::array& a, int axis) {
    if (const auto* whole = find(a); whole && axis == 1) {
      return *whole;
    }
    if (const auto* turned = faststep::transposed(a)) {
      return mx::transpose(pad(*turned, 1 - axis), stream_);
    }
    auto [found, added] = pads_.try_emplace({a.id(), axis}, a);
    if (added) {
      hold(a);
      auto more = a.shape();
      more[axis] = padded(a.shape(axis)) - a.shape(axis);
      found->second = mx::concatenate({a, mx::zeros(more, a.dtype(), stream_)}, axis, stream_);
    }
    return found->second;
  }

  mx::StreamOrDevice stream_; // of the operation that is replaced
  std::unordered_map<std::uintptr_t, mx::array> wholes_; // of which these are the first elements of each row
  std::unordered_map<std::uintptr_t, mx::array> widened_; // from half precision to float32
  std::unordered_map<std::uintptr_t, faststep::Logits> losses_;
  std::unordered_map<std::uintptr_t, Gradient> gradients_;
  std::map<std::pair<std::uintptr_t, int>, mx::array> pads_;
};

} // namespace

int faststep_align(const void* const* arrays, size_t count, void** aligned) {
  return faststep::guarded([&] {
    Align align;
    align.look(faststep::list(arrays, count));
    align.run(arrays, count, aligned);
  });
}
