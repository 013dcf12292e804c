// The transpose of a product, row after row: the product lies in scratch memory, which is there while the worker copies it. As
// two operations, MLX allocates products far ahead of its worker, each of which is kept until its copy is made.
#include "cpu/turned.hpp"

#include <cstddef>
#include <memory>
#include <utility>
#include <vector>

#include "mlx/backend/cpu/encoder.h"
#include "mlx/primitives.h"
#include "cpu/copy.hpp"
#include "cpu/factor.hpp"
#include "cpu/on_cpu.hpp"

namespace faststep {

namespace {

class TurnedProduct : public OnCpu {
 public:
  TurnedProduct(mx::Stream stream, Sgemm sgemm) : OnCpu(stream), sgemm_(sgemm) {}

  void eval_cpu(const std::vector<mx::array>& inputs, mx::array& out) override {
    out.set_data(mx::allocator::malloc(out.nbytes()));
    int m = out.shape(1), n = out.shape(0), k = inputs[0].shape(1);
    auto run = [=, a = Factor(inputs[0]), b = Factor(inputs[1]), to = out.data<char>(), sgemm = sgemm_] {
      mx::array product(mx::Shape{m, n}, mx::float32, nullptr, {});
      product.set_data(mx::allocator::malloc(product.nbytes()));
      auto* c = product.data<float>();
      std::vector<char> rooms[2];
      sgemm(by_rows, a.order, b.order, m, n, k, 1.0f, a.data(rooms[0]), a.ld, b.data(rooms[1]), b.ld, 0.0f, c, n);
      faststep::copy_all({{reinterpret_cast<char*>(c), product.nbytes(), false, {n, m}, {1, n}}}, to, sizeof(float));
    };
    mx::cpu::get_command_encoder(stream()).dispatch(std::move(run));
  }

  const char* name() const override {
    return "TurnedProduct";
  }

 private:
  Sgemm sgemm_;
};

} // namespace

mx::array turned_product(const mx::array& a, const mx::array& b, Sgemm sgemm) {
  auto stream = mx::default_stream(mx::Device::cpu);
  mx::Shape shape{b.shape(1), a.shape(0)};
  return mx::array(std::move(shape), a.dtype(), std::make_shared<TurnedProduct>(stream, sgemm), {a, b});
}

} // namespace faststep
