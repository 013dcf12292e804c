// The collective operations of a lazy graph, in one order that follows from the graph alone.
//
// MLX orders independent operations by the arrays that are asked for first. A rank that exchanges two arrays in another order than
// the others gets wrong numbers, without an error. So each collective operation depends on the one before. Ranks compare a hash of
// them.
#include "exchanges.hpp"

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <optional>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "mlx/distributed/primitives.h"
#include "mlx/mlx.h"
#include "graph/rewrite.hpp"
#include "status.hpp"

namespace mx = mlx::core;

namespace {

class InOrder : public faststep::Rewrite {
 public:
  uint64_t number = 0;

 private:
  std::vector<mx::array> operation(const std::vector<mx::array>& outputs) override {
    auto a = outputs[0];
    if (!faststep::exchanges(a.primitive().name())) {
      return outputs;
    }
    note(std::hash<std::string_view>{}(a.primitive().name()));
    note(static_cast<uint64_t>(a.dtype().val()));
    for (auto length : a.shape()) {
      note(static_cast<uint64_t>(length));
    }
    if (last_ && !a.inputs().empty()) {
      a.inputs()[0] = mx::depends({a.inputs()[0]}, {*last_})[0];
    }
    last_ = a;
    return outputs;
  }

  void note(uint64_t value) {
    number = (number ^ value) * 0x100000001b3u + 1;
  }

  std::optional<mx::array> last_;
};

// Whether the value of an array differs from rank to rank: it does if it depends on shards, unless it is summed or gathered over ranks.
class ByRank {
 public:
  ByRank(const void* const* shards, size_t count) {
    for (size_t i = 0; i < count; ++i) {
      differs_[faststep::at(shards[i]).id()] = true;
    }
  }

  bool differs(const mx::array& root) {
    auto enter = [this](const mx::array& a) { return a.has_primitive() && differs_.count(a.id()) == 0; };
    faststep::visit(root, enter, [this](const mx::array& a) {
      if (differs_.count(a.id()) == 0) {
        differs_[a.id()] = computed(a);
      }
    });
    return differs_.at(root.id());
  }

 private:
  bool computed(const mx::array& a) {
    if (!a.has_primitive() || faststep::exchanges(a.primitive().name())) {
      return false;
    }
    std::string_view name = a.primitive().name();
    if (name == "CustomTransforms" || name == "Depends") {
      return differs_.at(passed(a, name == "Depends").id());
    }
    auto differs = [this](const mx::array& input) { return differs_.at(input.id()); };
    return std::any_of(a.inputs().begin(), a.inputs().end(), differs);
  }

  // The input that an operation passes on as this output: its outputs are its last inputs, or its first ones.
  static const mx::array& passed(const mx::array& a, bool first) {
    auto outputs = a.outputs();
    size_t place = 0;
    while (outputs[place].id() != a.id()) {
      ++place;
    }
    return a.inputs()[first ? place : a.inputs().size() - outputs.size() + place];
  }

  std::unordered_map<uintptr_t, bool> differs_;
};

} // namespace

int faststep_exchange_in_order(const void* const* arrays, size_t count, void** ordered, uint64_t* exchanges) {
  return faststep::guarded([&] {
    InOrder in_order;
    in_order.run(arrays, count, ordered);
    *exchanges = in_order.number;
  });
}

int faststep_differ_by_rank(const void* const* arrays, size_t count, const void* const* shards, size_t shards_count, int* differ) {
  return faststep::guarded([&] {
    ByRank by_rank(shards, shards_count);
    for (size_t i = 0; i < count; ++i) {
      differ[i] = by_rank.differs(faststep::at(arrays[i])) ? 1 : 0;
    }
  });
}
