// The graph of a compiled trace as a list of operations on numbered arrays, from which it is made over other inputs.
//
// MLX does so too at each call of a compiled function (compile_replace), by a table of all arrays: half of the time goes there,
// and inputs that nothing is computed from cost as much as others.
#include <cstddef>
#include <cstdint>
#include <limits>
#include <memory>
#include <string_view>
#include <unordered_map>
#include <utility>
#include <vector>

#include "mlx/compile.h"
#include "mlx/mlx.h"
#include "mlx/primitives.h"
#include "cpu/blocks/blocks.hpp"
#include "ffi.hpp"
#include "graph/visit.hpp"
#include "status.hpp"

namespace faststep {

namespace {

mx::Stream stream() {
  return mx::default_stream(mx::default_device());
}

} // namespace

class Tape {
 public:
  // Of the graph from inputs, which are all different and without values, to outputs.
  Tape(const std::vector<mx::array>& inputs, const std::vector<mx::array>& outputs)
      : stream_(stream()) {
    std::unordered_map<std::uintptr_t, uint32_t> given;
    for (uint32_t i = 0; i < inputs.size(); ++i) {
      given.emplace(inputs[i].id(), i);
      forms_.emplace_back(inputs[i].shape(), inputs[i].dtype());
    }
    Numbers numbers;
    auto is_new = [&](const mx::array& a) { return !numbers.contains(a.id()) && !given.contains(a.id()) && is_operation(a); };
    for (const auto& output : outputs) {
      visit(output, is_new, [&](const mx::array& a) { add(a, given, numbers); });
    }
    for (const auto& output : outputs) {
      outputs_.push_back(numbers.at(output.id()));
    }
  }

  // Whether the graph is that of these inputs, of which some are known to have the shapes and dtypes of its own.
  bool fits(const void* const* inputs, size_t count, size_t known, size_t known_end) const {
    if (count != forms_.size() || !(stream() == stream_) || !faststep_fuses()) {
      return false;
    }
    bool traces = faststep_is_transforming() != 0; // whether any array may be a tracer
    for (size_t i = 0; i < count; ++i) {
      if (i == known && !traces) {
        i = known_end;
        if (i == count) {
          break;
        }
      }
      const auto& input = at(inputs[i]);
      if (input.shape() != forms_[i].first || input.dtype() != forms_[i].second || input.is_tracer()) {
        return false;
      }
    }
    return true;
  }

  size_t size() const {
    return outputs_.size();
  }

  // The outputs over other inputs, each an array of the caller's.
  void build(const void* const* inputs, void** outputs) const {
    std::vector<mx::array> made;
    made.reserve(arrays_);
    for (const auto& step : steps_) {
      if (step.primitive == nullptr) {
        made.push_back(step.input == none ? constants_[step.constant] : at(inputs[step.input]));
        continue;
      }
      std::vector<mx::array> in;
      in.reserve(step.inputs.size());
      for (auto number : step.inputs) {
        in.push_back(made[number]);
      }
      if (step.dtypes.size() == 1) {
        made.emplace_back(step.shapes[0], step.dtypes[0], step.primitive, std::move(in));
      } else {
        for (auto& array : mx::array::make_arrays(step.shapes, step.dtypes, step.primitive, in)) {
          made.push_back(std::move(array));
        }
      }
    }
    for (size_t i = 0; i < outputs_.size(); ++i) {
      outputs[i] = owned(made[outputs_[i]]);
    }
  }

 private:
  using Numbers = std::unordered_map<std::uintptr_t, uint32_t>;
  static constexpr uint32_t none = std::numeric_limits<uint32_t>::max();

  // An operation, whose outputs have the next numbers; an input; or a constant.
  struct Step {
    std::shared_ptr<mx::Primitive> primitive;
    std::vector<uint32_t> inputs;
    std::vector<mx::Shape> shapes;
    std::vector<mx::Dtype> dtypes;
    uint32_t input = none;
    uint32_t constant = none;
  };

  // What is read from a file is there after the first evaluation.
  static bool is_operation(const mx::array& array) {
    return array.has_primitive() && std::string_view(array.primitive().name()) != "Load";
  }

  void add(const mx::array& array, const Numbers& given, Numbers& numbers) {
    if (numbers.contains(array.id())) {
      return;
    }
    Step step;
    auto outputs = std::vector<mx::array>{array};
    if (auto found = given.find(array.id()); found != given.end()) {
      step.input = found->second;
    } else if (!is_operation(array)) {
      step.constant = static_cast<uint32_t>(constants_.size());
      constants_.push_back(array);
    } else {
      outputs = array.outputs();
      step.primitive = by_blocks(array);
      for (const auto& in : array.inputs()) {
        step.inputs.push_back(numbers.at(in.id()));
      }
      for (const auto& out : outputs) {
        step.shapes.push_back(out.shape());
        step.dtypes.push_back(out.dtype());
      }
    }
    for (const auto& out : outputs) {
      numbers.emplace(out.id(), arrays_++);
    }
    steps_.push_back(std::move(step));
  }

  mx::Stream stream_;
  std::vector<std::pair<mx::Shape, mx::Dtype>> forms_;
  std::vector<Step> steps_;
  std::vector<mx::array> constants_;
  std::vector<uint32_t> outputs_;
  uint32_t arrays_ = 0;
};

} // namespace faststep

// A function that MLX does not compile comes back as it is.
bool faststep_fuses() noexcept {
  using Function = std::vector<mlx::core::array> (*)(const std::vector<mlx::core::array>&);
  Function same = [](const std::vector<mlx::core::array>& arrays) { return arrays; };
  return mlx::core::compile(same).target<Function>() == nullptr;
}

int faststep_tape_new(
    const void* const* inputs, size_t n_inputs, const void* const* outputs, size_t n_outputs, void** tape) {
  return faststep::guarded([&] {
    *tape = new faststep::Tape(faststep::list(inputs, n_inputs), faststep::list(outputs, n_outputs));
  });
}

void faststep_tape_free(void* tape) noexcept {
  delete static_cast<faststep::Tape*>(tape);
}

size_t faststep_tape_size(const void* tape) noexcept {
  return static_cast<const faststep::Tape*>(tape)->size();
}

int faststep_tape_build(
    const void* tape, const void* const* inputs, size_t count, size_t known, size_t known_end, void** outputs) {
  return faststep::guarded([&] {
    const auto& it = *static_cast<const faststep::Tape*>(tape);
    if (!it.fits(inputs, count, known, known_end)) {
      return faststep::not_applicable;
    }
    it.build(inputs, outputs);
    return faststep::done;
  });
}
