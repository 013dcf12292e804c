#include "cpu/blocks/operations.hpp"

#include <cstdint>
#include <cstring>
#include <string_view>
#include <unordered_map>

#include "cpu/blocks/program.hpp"
#include "kernel.hpp"
#include "mlx/backend/cpu/encoder.h"

namespace faststep::blocks {

namespace {

// An input as it goes over the outputs' shape.
mx::array over(const mx::array& in, const mx::Shape& shape) {
  mx::array out(shape, in.dtype(), nullptr, {});
  auto flags = in.flags();
  if (out.size() != in.size()) {
    flags.row_contiguous = flags.col_contiguous = false;
  }
  out.copy_shared_buffer(in, strides_over(in, shape), flags, in.data_size());
  return out;
}

// An output has memory of its own, written when all inputs have been read: a captured step may give it that of one of them.
void give(const mx::array& made, mx::array& out, mx::cpu::CommandEncoder& encoder) {
  auto bytes = made.data_size() * made.itemsize();
  out.set_data(mx::allocator::malloc(bytes), made.data_size(), made.strides(), made.flags());
  encoder.dispatch([to = out.data<char>(), from = made.data<char>(), bytes] { std::memcpy(to, from, bytes); });
}

} // namespace

void compute_operations(mx::Compiled& kernel, const std::vector<mx::array>& inputs, std::vector<mx::array>& outputs) {
  auto [is_input, is_output, is_operation] = arrays_of_kernel();
  auto& encoder = mx::cpu::get_command_encoder(kernel.stream());
  const auto& shape = outputs[0].shape();
  std::unordered_map<uintptr_t, mx::array> known;
  for (size_t i = 0; i < inputs.size(); ++i) {
    known.insert_or_assign((kernel.*is_input)[i].id(), over(inputs[i], shape));
  }
  for (const auto& array : kernel.*is_operation) {
    std::vector<mx::array> in;
    for (const auto& each : array.inputs()) {
      in.push_back(known.at(each.id()));
    }
    if (std::string_view(array.primitive().name()) == "Broadcast") {
      known.insert_or_assign(array.id(), in[0]);
      continue;
    }
    std::vector<mx::array> out{mx::array(shape, array.dtype(), array.primitive_ptr(), {})};
    array.primitive().eval_cpu(in, out);
    encoder.add_temporary(out[0]);
    known.insert_or_assign(array.id(), out[0]);
  }
  for (size_t i = 0; i < outputs.size(); ++i) {
    give(known.at((kernel.*is_output)[i].id()), outputs[i], encoder);
  }
}

} // namespace faststep::blocks
