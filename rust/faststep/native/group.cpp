// A group of processes that exchange arrays. mlx-c's sum takes a stream, and only the group's back end knows its own.
#include "group.hpp"

#include <algorithm>
#include <cstring>
#include <memory>
#include <utility>
#include <vector>

#include "mlx/distributed/distributed_impl.h"
#include "mlx/distributed/ops.h"
#include "mlx/backend/cpu/encoder.h"
#include "cpu/on_cpu.hpp"
#include "status.hpp"

namespace faststep {

namespace {

// The sum of an array that lies row after row, in messages of so many elements.
class PiecewiseAllReduce : public OnCpu {
 public:
  PiecewiseAllReduce(mx::Stream stream, mx::distributed::Group group, size_t message)
      : OnCpu(stream), group_(std::move(group)), message_(message) {}

  void eval_cpu(const std::vector<mx::array>& inputs, mx::array& out) override {
    const auto& in = inputs[0];
    if (in.is_donatable()) {
      out.copy_shared_buffer(in);
    } else {
      out.set_data(mx::allocator::malloc(out.nbytes()));
      mx::cpu::get_command_encoder(stream()).dispatch(
          [from = in.data<char>(), to = out.data<char>(), bytes = in.nbytes()] { std::memcpy(to, from, bytes); });
    }
    for (size_t begin = 0; begin < out.size(); begin += message_) {
      auto size = std::min(message_, out.size() - begin);
      mx::array piece({static_cast<int>(size)}, out.dtype(), nullptr, {});
      piece.copy_shared_buffer(out, {1}, {true, true, true}, size, static_cast<int64_t>(begin));
      group_.raw_group()->all_sum(piece, piece, stream());
      mx::synchronize(stream()); // behind an error the next one would wait for ever
    }
  }

  const char* name() const override {
    return "PiecewiseAllReduce";
  }

 private:
  mx::distributed::Group group_;
  size_t message_;
};

} // namespace

mx::array in_messages(const mx::distributed::Group& group, const mx::array& whole, size_t message, mx::Stream stream) {
  auto pieces = std::make_shared<PiecewiseAllReduce>(stream, group, message);
  return mx::array(whole.shape(), whole.dtype(), std::move(pieces), {mx::contiguous(whole, false, stream)});
}

} // namespace faststep

using faststep::group_at;

int faststep_group_init(void** group) {
  return faststep::guarded([&] { *group = new mx::distributed::Group(mx::distributed::init(true)); });
}

void* faststep_group_new(const void* group) noexcept {
  return new mx::distributed::Group(group_at(group));
}

int faststep_group_is(const void* group, const void* other) noexcept {
  return group_at(group).raw_group() == group_at(other).raw_group() ? 1 : 0;
}

void faststep_group_free(void* group) noexcept {
  delete static_cast<mx::distributed::Group*>(group);
}

int faststep_group_rank(const void* group) noexcept {
  return group_at(group).rank();
}

int faststep_group_size(const void* group) noexcept {
  return group_at(group).size();
}

int faststep_group_sum_in_turn(const void* group, const void* array, void** sum) {
  return faststep::guarded([&] { *sum = faststep::owned(mx::distributed::all_sum(faststep::at(array), group_at(group))); });
}
