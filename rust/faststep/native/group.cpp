// A group of processes that exchange arrays. mlx-c's sum takes a stream, and only the group's back end knows its own.
#include "status.hpp"

#include "mlx/distributed/distributed.h"
#include "mlx/distributed/ops.h"

namespace {

const mx::distributed::Group& group_at(const void* group) {
  return *static_cast<const mx::distributed::Group*>(group);
}

} // namespace

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
  return faststep::guarded(
      [&] { *sum = faststep::owned(mx::distributed::all_sum(faststep::at(array), group_at(group))); });
}
