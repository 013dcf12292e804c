// Products with quantized weights of a traced step on a CPU, evaluated by src/mlx/quantized in place of MLX.
#include "cpu/quantized.hpp"

#include <algorithm>
#include <memory>
#include <string_view>
#include <tuple>
#include <unordered_set>
#include <utility>

#include "mlx/backend/common/utils.h"
#include "mlx/backend/cpu/encoder.h"
#include "status.hpp"

namespace faststep {

namespace {

// Common part of both products: QuantizedMatmul, and GatherQMM with its indices.
struct Kind {
  int group;
  int bits;
  mx::QuantizationMode mode;
  bool transposed;
  bool gathers;

  bool operator==(const Kind&) const = default;
};

Kind kind_of(const mx::Primitive& primitive) {
  if (primitive.name() == std::string_view("GatherQMM")) {
    auto [group, bits, mode, transposed, left, right] = static_cast<const mx::GatherQMM&>(primitive).state();
    return {group, bits, mode, transposed, true};
  }
  auto [group, bits, mode, transposed] = static_cast<const mx::QuantizedMatmul&>(primitive).state();
  return {group, bits, mode, transposed, false};
}

// An array's numbers in order, wherever they lie.
struct Numbers {
  explicit Numbers(const mx::array& array)
      : data(array.data<uint32_t>()), size(array.size()), shape(array.shape()), strides(array.strides()) {}

  std::vector<uint32_t> list() const {
    std::vector<uint32_t> all(size);
    for (size_t i = 0; i < size; ++i) {
      all[i] = data[mx::elem_to_loc(static_cast<int>(i), shape, strides)];
    }
    return all;
  }

  const uint32_t* data;
  size_t size;
  mx::Shape shape;
  mx::Strides strides;
};

class Dequantized : public mx::UnaryPrimitive {
 public:
  Dequantized(std::shared_ptr<mx::Primitive> original, Functions functions)
      : UnaryPrimitive(original->stream()),
        original_(std::move(original)),
        kind_(kind_of(*original_)),
        functions_(functions) {}

  void eval_cpu(const std::vector<mx::array>& inputs, mx::array& out) override {
    auto call = described(inputs, out);
    auto lies = [](const mx::array& in) { return in.flags().row_contiguous; };
    size_t operands = kind_.mode == mx::QuantizationMode::Affine ? 4 : 3;
    auto numbers = functions_.scratch(&call);
    if (out.size() == 0 || numbers == 0 || !std::all_of(inputs.begin(), inputs.begin() + operands, lies)) {
      std::vector<mx::array> outputs{out};
      original_->eval_cpu(inputs, outputs);
      return;
    }
    out.set_data(mx::allocator::malloc(out.nbytes()));
    call.x = inputs[0].data<void>();
    call.w = inputs[1].data<uint8_t>();
    call.scales = inputs[2].data<void>();
    call.biases = operands == 4 ? inputs[3].data<void>() : nullptr;
    call.out = out.data<void>();
    std::vector<Numbers> indices;
    if (kind_.gathers) {
      indices = {Numbers(inputs[operands]), Numbers(inputs[operands + 1])};
    }
    auto run = [call, numbers, indices = std::move(indices), functions = functions_]() mutable {
      std::vector<uint32_t> left, right;
      if (!indices.empty()) {
        left = indices[0].list();
        right = indices[1].list();
      } else {
        for (uint32_t i = 0; i < call.pairs; ++i) {
          left.push_back(i);
        }
        right = left;
      }
      mx::array scratch(mx::Shape{static_cast<int>(numbers)}, mx::float32, nullptr, {});
      scratch.set_data(mx::allocator::malloc(scratch.nbytes()));
      call.left = left.data();
      call.right = right.data();
      call.scratch = scratch.data<float>();
      functions.run(&call);
    };
    mx::cpu::get_command_encoder(stream()).dispatch(std::move(run));
  }

  void eval_gpu(const std::vector<mx::array>& inputs, mx::array& out) override {
    std::vector<mx::array> outputs{out};
    original_->eval_gpu(inputs, outputs);
  }

  const char* name() const override {
    return "Dequantized";
  }

  bool is_equivalent(const mx::Primitive& other) const override {
    return kind_ == static_cast<const Dequantized&>(other).kind_;
  }

  // Bytes that it needs while it runs, beside those of its inputs and its output.
  size_t scratch(const std::vector<mx::array>& inputs, const mx::array& out) const {
    auto call = described(inputs, out);
    return functions_.scratch(&call) * sizeof(float);
  }

 private:
  // The product of these arrays, without their memory.
  QuantizedProduct described(const std::vector<mx::array>& inputs, const mx::array& out) const {
    const auto &x = inputs[0], &w = inputs[1];
    QuantizedProduct call{};
    call.dtype = x.dtype() == mx::float32 ? 0 : x.dtype() == mx::float16 ? 1 : 2;
    call.mode = static_cast<size_t>(kind_.mode);
    call.bits = kind_.bits;
    call.group = kind_.group;
    call.transposed = kind_.transposed;
    call.inner = x.shape(-1);
    call.columns = out.shape(-1);
    call.weights = w.size() / std::max<size_t>(1, static_cast<size_t>(w.shape(-1)) * w.shape(-2));
    bool one = !kind_.gathers && call.weights == 1;
    call.rows = one ? out.size() / std::max<size_t>(1, call.columns) : x.ndim() > 1 ? x.shape(-2) : 1;
    call.inputs = x.size() / std::max<size_t>(1, call.rows * call.inner);
    call.pairs = one ? 0 : out.size() / std::max<size_t>(1, call.rows * call.columns);
    return call;
  }

  std::shared_ptr<mx::Primitive> original_;
  Kind kind_;
  Functions functions_;
};

bool multiplies(const mx::array& array) {
  if (array.primitive().stream().device != mx::Device::cpu) {
    return false;
  }
  std::string_view name = array.primitive().name();
  auto dtype = array.dtype();
  bool known = dtype == mx::float32 || dtype == mx::float16 || dtype == mx::bfloat16;
  return known && (name == "QuantizedMatmul" || name == "GatherQMM");
}

void replace(mx::array array, Functions functions) {
  auto& x = array.inputs()[0];
  x = mx::contiguous(x, false, array.primitive().stream());
  array.primitive_ptr() = std::make_shared<Dequantized>(array.primitive_ptr(), functions);
}

} // namespace

size_t scratch_of(const mx::Primitive& primitive, const std::vector<mx::array>& inputs, const mx::array& out) {
  auto* product = dynamic_cast<const Dequantized*>(&primitive);
  return product == nullptr ? 0 : product->scratch(inputs, out);
}

} // namespace faststep

int faststep_dequantize(
    const void* input,
    const void* const* arrays,
    size_t count,
    size_t (*scratch)(const faststep::QuantizedProduct*),
    int (*run)(const faststep::QuantizedProduct*)) {
  using mlx::core::array;
  return faststep::guarded([&] {
    const auto& tracer = faststep::at(input);
    if (tracer.has_primitive() || tracer.status() != array::Status::unscheduled) {
      return faststep::not_applicable;
    }
    std::unordered_set<uintptr_t> seen;
    auto todo = faststep::list(arrays, count);
    while (!todo.empty()) {
      auto next = std::move(todo.back());
      todo.pop_back();
      if (!next.has_primitive() || next.status() != array::Status::unscheduled || !seen.insert(next.id()).second) {
        continue;
      }
      if (faststep::multiplies(next)) {
        faststep::replace(next, {scratch, run});
      }
      todo.insert(todo.end(), next.inputs().begin(), next.inputs().end());
    }
    return faststep::done;
  });
}
