#include "cuda/replay/plan.hpp"

#include <algorithm>

namespace faststep::replay {

std::vector<size_t> Hazards::add(const std::vector<Address>& reads, const std::vector<Address>& writes) {
  auto number = count_++;
  std::vector<size_t> before;
  for (auto address : reads) {
    auto& use = uses_[address];
    if (use.writer) {
      before.push_back(*use.writer);
    }
    use.readers.push_back(number);
  }
  for (auto address : writes) {
    auto& use = uses_[address];
    if (use.writer) {
      before.push_back(*use.writer);
    }
    before.insert(before.end(), use.readers.begin(), use.readers.end());
    use = {number, {}};
  }
  std::sort(before.begin(), before.end());
  before.erase(std::unique(before.begin(), before.end()), before.end());
  std::erase(before, number);
  return before;
}

bool Hazards::may_redirect(size_t number, Address from, Address into) const {
  auto made = uses_.find(from);
  if (made == uses_.end() || made->second.writer != number || !made->second.readers.empty() || from == into) {
    return false;
  }
  auto use = uses_.find(into);
  if (use == uses_.end()) {
    return true;
  }
  auto is_later = [number](size_t other) { return other > number; };
  const auto& [writer, readers] = use->second;
  return !(writer && is_later(*writer)) && std::none_of(readers.begin(), readers.end(), is_later);
}

std::optional<std::vector<size_t>> Hazards::redirect(size_t number, Address from, Address into) {
  if (!may_redirect(number, from, into)) {
    return std::nullopt;
  }
  auto& use = uses_[into];
  auto before = use.readers;
  if (use.writer) {
    before.push_back(*use.writer);
  }
  std::erase(before, number);
  use = {number, {}};
  uses_.erase(from);
  return before;
}

} // namespace faststep::replay
