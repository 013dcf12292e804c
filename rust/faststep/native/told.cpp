#include "told.hpp"

#include <memory>
#include <unordered_map>
#include <utility>

#include "mlx/primitives.h"

namespace faststep {

namespace mx = mlx::core;

namespace {

// Facts about primitives, each kept as long as its primitive.
template <typename T>
class Told {
 public:
  void add(const mx::array& array, T what) {
    std::erase_if(all_, [](const auto& item) { return item.second.first.expired(); });
    all_.insert_or_assign(&array.primitive(), std::pair{std::weak_ptr(array.primitive_ptr()), std::move(what)});
  }

  const T* find(const mx::Primitive& primitive) const {
    auto found = all_.find(&primitive);
    return found != all_.end() && !found->second.first.expired() ? &found->second.second : nullptr;
  }

 private:
  std::unordered_map<const mx::Primitive*, std::pair<std::weak_ptr<mx::Primitive>, T>> all_;
};

thread_local Told<bool> determined;
thread_local Told<std::vector<Place>> within;

} // namespace

void is_determined_by_inputs(const mx::array& array) {
  determined.add(array, true);
}

bool is_determined_by_inputs(const mx::Primitive& primitive) {
  return determined.find(primitive) != nullptr;
}

void may_lie_within(const mx::array& array, std::vector<Place> inputs) {
  within.add(array, std::move(inputs));
}

const std::vector<Place>& may_lie_within(const mx::Primitive& primitive) {
  static const std::vector<Place> none;
  const auto* found = within.find(primitive);
  return found ? *found : none;
}

} // namespace faststep
