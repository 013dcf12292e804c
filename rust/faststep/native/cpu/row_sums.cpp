#include "cpu/row_sums.hpp"

#include <memory>
#include <string_view>
#include <vector>

#include "mlx/backend/cpu/encoder.h"
#include "mlx/primitives.h"

namespace faststep {

namespace mx = mlx::core;

namespace {

class RowSums : public mx::Reduce {
 public:
  using Reduce::Reduce;

  void eval_cpu(const std::vector<mx::array>& inputs, mx::array& out) override {
    const auto& in = inputs[0];
    if (!in.flags().row_contiguous) {
      return Reduce::eval_cpu(inputs, out);
    }
    out.set_data(mx::allocator::malloc(out.nbytes()));
    auto rows = out.size(), size = in.size() / rows;
    mx::cpu::get_command_encoder(stream()).dispatch([=, x = in.data<float>(), to = out.data<float>()] {
      sums_of_rows(x, rows, size, to, [](float number) { return number; });
    });
  }
};

} // namespace

std::optional<mx::array> row_sums_of(const mx::array& a) {
  bool fits = std::string_view(a.primitive().name()) == "Sum" && a.dtype() == mx::float32 && a.size() >= sums_beside &&
      a.inputs()[0].dtype() == mx::float32 && a.primitive().stream().device == mx::Device::cpu;
  if (!fits) {
    return std::nullopt;
  }
  auto [type, axes] = static_cast<const mx::Reduce&>(a.primitive()).state();
  auto axis = static_cast<int>(a.inputs()[0].ndim() - axes.size());
  if (axes.empty() || !std::all_of(axes.begin(), axes.end(), [&](int each) { return each == axis++; })) {
    return std::nullopt;
  }
  auto own = std::make_shared<RowSums>(a.primitive().stream(), type, axes);
  return mx::array(a.shape(), a.dtype(), std::move(own), a.inputs());
}

} // namespace faststep
