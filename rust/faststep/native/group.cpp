// A group of processes that exchange arrays. mlx-c's sum takes a stream, and only the group's back end knows its own.
#include "group.hpp"

#include "mlx/distributed/distributed_impl.h"
#include "mlx/distributed/ops.h"
#include "status.hpp"

namespace faststep {

mx::Stream communication_stream(const mx::distributed::Group& group) {
  auto own = group.raw_group()->communication_stream({});
  if (own.device == mx::Device::cpu) {
    return own;
  }
  thread_local const auto beside = mx::new_stream(mx::Device::gpu);
  return beside;
}

} // namespace faststep

using faststep::group_at;

int faststep_group_init(void** group) {
  return faststep::guarded([&] { *group = new mx::distributed::Group(mx::distributed::init(true)); });
}

void* faststep_group_new(const void* group) noexcept {
  return new mx::distributed::Group(group_at(group));
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

int faststep_group_sum(const void* group, const void* array, void** sum) {
  return faststep::guarded([&] {
    const auto& ranks = group_at(group);
    auto stream = faststep::communication_stream(ranks);
    *sum = faststep::owned(mx::distributed::all_sum(faststep::at(array), ranks, stream));
  });
}
