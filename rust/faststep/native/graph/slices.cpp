// The gradient of an array that is read slice by slice, as a sequence is step by step: of float32 on a CPU one operation adds the slices
// up (cpu/slices.cpp), elsewhere they are concatenated, in place of an array of zeros for each, and a sum of all.
#include <algorithm>
#include <map>
#include <optional>
#include <string_view>
#include <tuple>
#include <utility>
#include <vector>

#include "mlx/mlx.h"
#include "mlx/primitives.h"
#include "patterns/known.hpp"
#include "cpu/slices.hpp"
#include "graph/rewrite.hpp"
#include "lazy.hpp"
#include "status.hpp"

namespace mx = mlx::core;
using faststep::Slice;

namespace {

// From so many slices on a sum may be taken in another order: its bits may be other ones.
constexpr size_t many = 8;

bool is_lazy(const mx::array& a, std::string_view name) {
  return a.has_primitive() && a.status() == mx::array::Status::unscheduled && a.primitive().name() == name;
}

bool is_on_cpu(const mx::array& a) {
  return a.primitive().stream().device == mx::Device::cpu;
}

bool is_sum(const mx::array& a) {
  bool is_known = a.dtype() == mx::float32 || a.dtype() == mx::bfloat16 || a.dtype() == mx::float16;
  return is_lazy(a, "Add") && is_known && a.is_tracer();
}

std::optional<Slice> slice_of(const mx::array& a) {
  if (!is_lazy(a, "SliceUpdate") || faststep_array_is_zero(&faststep::known::input(a, 0)) == 0) {
    return std::nullopt;
  }
  auto [kind, start, end, steps] = static_cast<const mx::SliceUpdate&>(a.primitive()).state();
  const auto& values = a.inputs()[1];
  if (values.dtype() != a.dtype() || values.ndim() != a.ndim() || values.size() == 0) {
    return std::nullopt;
  }
  for (size_t axis = 0; axis < a.ndim(); ++axis) {
    bool fits = steps[axis] > 0 && start[axis] >= 0 &&
                start[axis] + (values.shape(axis) - 1) * steps[axis] < a.shape(axis);
    if (!fits) {
      return std::nullopt;
    }
  }
  return Slice{values, start, steps};
}

// Whether two slices have an index in common, as far as their bounds tell.
bool meet(const Slice& one, const Slice& other) {
  for (size_t axis = 0; axis < one.start.size(); ++axis) {
    auto last = [axis](const Slice& slice) {
      return slice.start[axis] + (slice.values.shape(axis) - 1) * slice.steps[axis];
    };
    if (last(one) < other.start[axis] || last(other) < one.start[axis]) {
      return false;
    }
  }
  return true;
}

bool any_meet(const std::vector<Slice>& slices) {
  for (size_t i = 0; i < slices.size(); ++i) {
    for (size_t j = 0; j < i; ++j) {
      if (meet(slices[i], slices[j])) {
        return true;
      }
    }
  }
  return false;
}

// Slices one after the other along one axis, whole along the others, with zeros where there are none; several of the same place
// are added up. None where they lie in another way.
std::optional<mx::array> concatenated(const mx::Shape& shape, const std::vector<Slice>& slices, mx::Stream stream) {
  std::optional<size_t> along;
  std::map<int, mx::array> parts; // by where they begin
  for (const auto& slice : slices) {
    int start = 0;
    for (size_t axis = 0; axis < shape.size(); ++axis) {
      if (slice.values.shape(axis) == shape[axis]) {
        continue;
      }
      if (slice.steps[axis] != 1 || along.value_or(axis) != axis) {
        return std::nullopt;
      }
      along = axis;
      start = slice.start[axis];
    }
    auto [known, is_new] = parts.try_emplace(start, slice.values);
    if (!is_new) {
      if (known->second.shape() != slice.values.shape()) {
        return std::nullopt;
      }
      known->second = mx::add(known->second, slice.values, stream);
    }
  }
  if (!along) {
    return std::nullopt;
  }
  std::vector<mx::array> all;
  int at = 0;
  auto fill = [&](int to) {
    if (at < to) {
      auto gap = shape;
      gap[*along] = to - at;
      all.push_back(mx::zeros(gap, slices[0].values.dtype(), stream));
    }
  };
  for (const auto& [start, values] : parts) {
    if (start < at) {
      return std::nullopt;
    }
    fill(start);
    all.push_back(values);
    at = start + values.shape(*along);
  }
  fill(shape[*along]);
  return mx::concatenate(all, *along, stream);
}

class SumSlices : public faststep::Rewrite {
  std::vector<mx::array> operation(const std::vector<mx::array>& outputs) override {
    const auto& a = outputs[0];
    if (outputs.size() != 1 || !is_sum(a)) {
      return outputs;
    }
    auto by = users(a);
    if (by.count == 1 && by.all.size() == 1 && is_sum(by.all[0])) {
      return outputs; // a part of a sum
    }
    std::vector<Slice> slices;
    std::vector<mx::array> rest, path{a.inputs()[1], a.inputs()[0]};
    size_t before = 0; // slices before the first other term
    bool in_order = true; // each sum is one of a sum and a term
    while (!path.empty()) {
      auto term = path.back();
      path.pop_back();
      bool is_own = uses(term) == 1;
      if (auto slice = is_own ? slice_of(term) : std::nullopt) {
        slices.push_back(*slice);
        before += rest.empty();
      } else if (is_own && is_sum(term)) {
        in_order = in_order && slices.empty() && rest.empty();
        path.push_back(term.inputs()[1]);
        path.push_back(term.inputs()[0]);
      } else {
        rest.push_back(term);
      }
    }
    // where two slices meet, elements are sums of more than two terms: of the same bits in the same order
    auto is_same = [&] {
      return rest.size() < 2 && ((in_order && (rest.empty() || before < 2)) || !any_meet(slices));
    };
    if (slices.size() < 2 || (slices.size() < many && !is_same())) {
      return outputs;
    }
    auto made = summed(a, slices, rest);
    if (!made) {
      return outputs;
    }
    faststep::take_module(a, *made);
    return {*made};
  }

  static std::optional<mx::array> summed(
      const mx::array& a, const std::vector<Slice>& slices, const std::vector<mx::array>& rest) {
    auto stream = a.primitive().stream();
    std::optional<mx::array> base;
    for (const auto& term : rest) {
      base = base ? mx::add(*base, term, stream) : term;
    }
    if (is_on_cpu(a) && a.dtype() == mx::float32) {
      return base ? faststep::with_slices(*base, slices, stream) : faststep::sum_of_slices(a.shape(), slices, stream);
    }
    auto all = concatenated(a.shape(), slices, stream);
    return all && base ? mx::add(*base, *all, stream) : all;
  }
};

} // namespace

int faststep_sum_slices(const void* const* arrays, size_t count, void** summed) {
  return faststep::guarded([&] {
    auto all = faststep::list(arrays, count);
    SumSlices rewrite;
    rewrite.look(all);
    rewrite.run(arrays, count, summed);
  });
}
