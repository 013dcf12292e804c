// c + a b of a linear layer, whose c is a row for all or a slice of a sequence, products of many matrices, as those of attention's heads,
// concatenations, and other shapes: MLX copies element by element what does not lie in memory as the result does.
#include "cpu/copied.hpp"

#include <cstdint>
#include <memory>
#include <string_view>
#include <utility>
#include <vector>

#include "mlx/backend/cpu/encoder.h"
#include "mlx/primitives.h"
#include "cpu/copy.hpp"
#include "cpu/factor.hpp"
#include "cpu/matrices.hpp"
#include "cpu/on_cpu.hpp"

namespace faststep {

namespace {

class AddedProduct : public OnCpu {
 public:
  AddedProduct(mx::Stream stream, Sgemm sgemm) : OnCpu(stream), sgemm_(sgemm) {}

  void eval_cpu(const std::vector<mx::array>& inputs, mx::array& out) override {
    out.set_data(mx::allocator::malloc(out.nbytes()));
    int m = out.shape(0), n = out.shape(1), k = inputs[0].shape(1);
    auto run = [=, a = Factor(inputs[0]), b = Factor(inputs[1]), added = part_of(inputs[2]), to = out.data<float>(), sgemm = sgemm_] {
      faststep::copy_all({added}, reinterpret_cast<char*>(to), sizeof(float));
      std::vector<char> rooms[2];
      sgemm(by_rows, a.order, b.order, m, n, k, 1.0f, a.data(rooms[0]), a.ld, b.data(rooms[1]), b.ld, 1.0f, to, n);
    };
    mx::cpu::get_command_encoder(stream()).dispatch(std::move(run));
  }

  const char* name() const override {
    return "AddedProduct";
  }

 private:
  Sgemm sgemm_;
};

class Products : public OnCpu {
 public:
  Products(mx::Stream stream, Sgemm sgemm) : OnCpu(stream), sgemm_(sgemm) {}

  void eval_cpu(const std::vector<mx::array>& inputs, mx::array& out) override {
    out.set_data(mx::allocator::malloc(out.nbytes()));
    auto factors = std::make_shared<std::pair<Matrices, Matrices>>(matrices_of(inputs[0]), matrices_of(inputs[1]));
    int m = out.shape(-2), n = out.shape(-1), k = inputs[0].shape(-1);
    auto run = [=, to = out.data<float>(), sgemm = sgemm_] {
      const auto& [a, b] = *factors;
      for (size_t i = 0; i < a.starts.size(); ++i) {
        auto* c = to + i * static_cast<size_t>(m) * n;
        sgemm(by_rows, a.order(), b.order(), m, n, k, 1.0f, a.from(i, 0), a.ld, b.from(i, 0), b.ld, 0.0f, c, n);
      }
    };
    mx::cpu::get_command_encoder(stream()).dispatch(std::move(run));
  }

  const char* name() const override {
    return "Matmul";
  }

 private:
  // As MLX gives them to BLAS, by rows, by columns, or copied; but rows need not lie one after the other.
  Matrices matrices_of(const mx::array& x) {
    bool lies_by_columns = x.strides(-2) == 1 && x.strides(-1) == x.shape(-2);
    return Matrices(Matrices::lies_by_rows(x) || lies_by_columns ? x : temporary_rows(x, stream()));
  }

  Sgemm sgemm_;
};

// Return true if an array can be given another shape without a copy: adjacent axes are merged where memory allows it, then split.
bool has_view(const mx::array& in, const mx::Shape& shape) {
  std::vector<int64_t> sizes;
  int64_t last = 0;
  for (int axis = 0; axis < static_cast<int>(in.ndim()); ++axis) {
    int64_t size = in.shape(axis), stride = in.strides(axis);
    if (size == 1) {
      continue;
    }
    if (!sizes.empty() && last == size * stride) {
      sizes.back() *= size;
    } else {
      sizes.push_back(size);
    }
    last = stride;
  }
  int64_t seen = 1;
  for (auto size = sizes.begin(); auto length : shape) {
    seen *= length;
    if (size != sizes.end() && seen == *size) {
      ++size;
      seen = 1;
    } else if (size == sizes.end() ? seen > 1 : seen > *size) {
      return false;
    }
  }
  return true;
}

class Reshaped : public OnCpu {
 public:
  explicit Reshaped(std::shared_ptr<mx::Primitive> operation) : OnCpu(operation->stream()), operation_(std::move(operation)) {}

  void eval_cpu(const std::vector<mx::array>& inputs, mx::array& out) override {
    if (inputs[0].flags().row_contiguous || has_view(inputs[0], out.shape())) {
      std::vector<mx::array> outputs{out};
      return operation_->eval_cpu(inputs, outputs);
    }
    copy_rows(inputs[0], out, stream());
  }

  const char* name() const override {
    return operation_->name();
  }

  bool is_equivalent(const mx::Primitive& other) const override {
    const auto& theirs = *static_cast<const Reshaped&>(other).operation_;
    return std::string_view(name()) == theirs.name() && operation_->is_equivalent(theirs);
  }

 private:
  std::shared_ptr<mx::Primitive> operation_;
};

class Concatenated : public OnCpu {
 public:
  Concatenated(mx::Stream stream, size_t axis) : OnCpu(stream), axis_(axis) {}

  void eval_cpu(const std::vector<mx::array>& inputs, mx::array& out) override {
    out.set_data(mx::allocator::malloc(out.nbytes()));
    size_t rows = 1;
    for (size_t axis = 0; axis < axis_; ++axis) {
      rows *= static_cast<size_t>(out.shape(static_cast<int>(axis)));
    }
    auto parts = std::make_shared<std::vector<Part>>(parts_of(inputs)); // or they would be copied with the task
    auto run = [parts, axis = axis_, rows, bytes = out.nbytes() / rows, to = out.data<char>(), itemsize = out.itemsize()] {
      copy_beside(*parts, {axis, rows, bytes}, to, itemsize);
    };
    mx::cpu::get_command_encoder(stream()).dispatch(std::move(run));
  }

  const char* name() const override {
    return "Concatenated";
  }

  bool is_equivalent(const mx::Primitive& other) const override {
    return axis_ == static_cast<const Concatenated&>(other).axis_;
  }

 private:
  size_t axis_;
};

bool adds_product(const mx::array& a) {
  bool fits = std::string_view(a.primitive().name()) == "AddMM" && a.dtype() == mx::float32 && a.ndim() == 2 && a.size() > 0 &&
      a.inputs()[0].ndim() == 2 && a.inputs()[1].ndim() == 2 && a.inputs()[0].size() > 0 && a.inputs()[2].shape() == a.shape();
  return fits && static_cast<const mx::AddMM&>(a.primitive()).state() == std::pair{1.0f, 1.0f};
}

} // namespace

std::optional<mx::array> copied_by_rows(const mx::array& a, Sgemm sgemm) {
  auto stream = a.primitive().stream();
  if (stream.device != mx::Device::cpu) {
    return std::nullopt;
  }
  if (sgemm != nullptr && adds_product(a)) {
    return mx::array(a.shape(), a.dtype(), std::make_shared<AddedProduct>(stream, sgemm), a.inputs());
  }
  std::string_view name = a.primitive().name();
  if (sgemm != nullptr && name == "Matmul" && a.dtype() == mx::float32 && a.ndim() > 2 && a.size() > 0 && a.inputs()[0].size() > 0) {
    return mx::array(a.shape(), a.dtype(), std::make_shared<Products>(stream, sgemm), a.inputs());
  }
  if ((name == "Reshape" || name == "Flatten") && a.size() > 0) {
    return mx::array(a.shape(), a.dtype(), std::make_shared<Reshaped>(a.primitive_ptr()), a.inputs());
  }
  if (name == "Concatenate" && a.size() > 0) {
    auto axis = static_cast<size_t>(static_cast<const mx::Concatenate&>(a.primitive()).state());
    return mx::array(a.shape(), a.dtype(), std::make_shared<Concatenated>(stream, axis), a.inputs());
  }
  return std::nullopt;
}

} // namespace faststep
