// The gradient of a table that rows are taken from, on a CPU: one operation adds up its rows (cpu/rows.cpp), in place of a
// table of zeros and a scatter for each time that rows are taken, and a sum of tables.
#include <algorithm>
#include <optional>
#include <string_view>
#include <utility>
#include <vector>

#include "mlx/mlx.h"
#include "mlx/primitives.h"
#include "cpu/rows.hpp"
#include "graph/rewrite.hpp"
#include "lazy.hpp"
#include "status.hpp"

namespace mx = mlx::core;
using faststep::Addends;

namespace {

bool is(const mx::array& a, std::string_view name) {
  return a.has_primitive() && a.status() == mx::array::Status::unscheduled && a.primitive().name() == name;
}

class SumRows : public faststep::Rewrite {
  std::vector<mx::array> operation(const std::vector<mx::array>& outputs) override {
    const auto& a = outputs[0];
    bool is_known = outputs.size() == 1 && a.dtype() == mx::float32 && a.size() > 0;
    if (!is_known || !a.is_tracer() || a.primitive().stream().device != mx::Device::cpu) {
      return outputs; // uncompiled, others may hold it
    }
    auto made = is(a, "Scatter Sum") ? scattered(a) : is(a, "Add") ? added(a) : std::nullopt;
    if (!made) {
      return outputs;
    }
    faststep::take_module(a, *made);
    return {*made};
  }

  // Whole rows, added to a table of zeros.
  static std::optional<mx::array> scattered(const mx::array& a) {
    const auto& inputs = a.inputs();
    auto axes = static_cast<const mx::Scatter&>(a.primitive()).state().second;
    if (inputs.size() != 3 || axes != std::vector<int>{0} || !faststep_array_is_zero(&inputs[0])) {
      return std::nullopt;
    }
    const auto &indices = inputs[1], &rows = inputs[2];
    auto row = a.shape();
    row[0] = 1;
    mx::Shape taken(rows.shape().begin() + indices.ndim(), rows.shape().end());
    if (taken != row || rows.size() == 0 || rows.dtype() != mx::float32 || indices.dtype() == mx::bool_) {
      return std::nullopt;
    }
    return faststep::sum_of_rows(a.shape(), {{indices, rows}}, a.primitive().stream());
  }

  // A sum of tables, of which one is made of one list of rows and wanted by nobody else: the list is added to the other one.
  std::optional<mx::array> added(const mx::array& a) const {
    for (bool swap : {false, true}) {
      const auto &table = a.inputs()[swap], &rows = a.inputs()[!swap];
      bool is_list = is(rows, "SumOfRows") && rows.inputs().size() == 2 && uses(rows) == 1;
      if (!is_list || table.shape() != a.shape() || rows.shape() != a.shape()) {
        continue;
      }
      auto stream = a.primitive().stream();
      Addends list{rows.inputs()[0], rows.inputs()[1]};
      bool has_table = is(table, "WithRows"), is_alone = uses(table) == 1;
      if (!is_alone || (!has_table && !is(table, "SumOfRows"))) {
        return faststep::with_rows(table, {list}, stream);
      }
      std::vector<Addends> lists;
      for (size_t i = has_table; i < table.inputs().size(); i += 2) {
        lists.emplace_back(table.inputs()[i], table.inputs()[i + 1]);
      }
      lists.push_back(std::move(list));
      return has_table ? faststep::with_rows(table.inputs()[0], lists, stream)
                       : faststep::sum_of_rows(a.shape(), lists, stream);
    }
    return std::nullopt;
  }
};

} // namespace

int faststep_sum_rows(const void* const* arrays, size_t count, void** summed) {
  return faststep::guarded([&] {
    auto all = faststep::list(arrays, count);
    if (std::none_of(all.begin(), all.end(), [](const mx::array& a) { return a.is_tracer(); })) {
      std::transform(all.begin(), all.end(), summed, faststep::owned);
      return;
    }
    SumRows rewrite;
    rewrite.look(all);
    rewrite.run(arrays, count, summed);
  });
}
