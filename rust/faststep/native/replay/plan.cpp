#include "replay/plan.hpp"

#include <algorithm>
#include <bit>
#include <iterator>
#include <numeric>
#include <utility>

namespace faststep::replay {

namespace {

// Ancestors of each operation, those that are done when it begins, as bits; unknown where there are too many operations.
class Ancestors {
 public:
  explicit Ancestors(const std::vector<std::vector<size_t>>& before)
      : words_(before.size() > many ? 0 : (before.size() + 63) / 64), bits_(words_ * before.size()) {
    for (size_t i = 0; i < before.size() && words_ > 0; ++i) {
      for (auto b : before[i]) {
        for (size_t w = 0; w < words_; ++w) {
          bits_[i * words_ + w] |= bits_[b * words_ + w];
        }
        bits_[i * words_ + b / 64] |= uint64_t{1} << (b % 64);
      }
    }
  }

  bool has(size_t operation, size_t other) const {
    return words_ > 0 && (bits_[operation * words_ + other / 64] >> (other % 64) & 1) != 0;
  }

 private:
  static constexpr size_t many = size_t{1} << 15;
  size_t words_;
  std::vector<uint64_t> bits_;
};

// A buffer in the block: who makes it, and who uses it last; all its users.
struct Life {
  size_t buffer, bytes, begin, end;
  std::vector<size_t> users;
};

// Dependencies of each operation where every buffer has memory of its own.
std::vector<std::vector<size_t>> dependencies(const std::vector<Operation>& operations) {
  Hazards hazards;
  std::vector<std::vector<size_t>> before;
  auto addresses = [](const std::vector<size_t>& buffers) {
    std::vector<Hazards::Address> all;
    for (auto buffer : buffers) {
      all.push_back(reinterpret_cast<Hazards::Address>(buffer + 1));
    }
    return all;
  };
  for (const auto& operation : operations) {
    before.push_back(hazards.add(addresses(operation.reads), addresses(operation.writes)));
  }
  return before;
}

std::vector<Life> lives(const std::vector<Operation>& operations, const Sizes& sizes) {
  std::vector<Life> all(sizes.size());
  for (size_t i = 0; i < operations.size(); ++i) {
    for (const auto* buffers : {&operations[i].reads, &operations[i].writes}) {
      for (auto buffer : *buffers) {
        auto& life = all[buffer];
        if (life.users.empty()) {
          life.begin = i;
        }
        life.end = i;
        life.users.push_back(i);
      }
    }
  }
  std::vector<Life> there;
  for (size_t buffer = 0; buffer < sizes.size(); ++buffer) {
    if (sizes[buffer] > 0 && !all[buffer].users.empty()) {
      all[buffer].buffer = buffer;
      all[buffer].bytes = sizes[buffer];
      there.push_back(std::move(all[buffer]));
    }
  }
  return there;
}

// Orders in which to place buffers: what comes first lies low, what comes later finds room between.
std::vector<std::vector<size_t>> orders(const std::vector<Life>& lives) {
  auto length = [&](size_t i) { return lives[i].end - lives[i].begin + 1; };
  auto sorted = [&](auto&& key) {
    std::vector<size_t> order(lives.size());
    std::iota(order.begin(), order.end(), 0);
    std::stable_sort(order.begin(), order.end(), [&](size_t a, size_t b) { return key(a) > key(b); });
    return order;
  };
  return {
      sorted([&](size_t i) { return lives[i].bytes; }),
      sorted([&](size_t i) { return length(i); }),
      sorted([&](size_t i) { return static_cast<double>(lives[i].bytes) * static_cast<double>(length(i)); })};
}

// Pairs of buffers that may share bytes.
class Sharing {
 public:
  Sharing(const std::vector<Life>& lives, const Ancestors& ancestors) : lives_(lives), free_(lives.size() * lives.size()) {
    auto add = [](size_t sum, const Life& life) { return sum + life.bytes; };
    small_ = std::accumulate(lives.begin(), lives.end(), size_t{0}, add) / part;
    for (size_t i = 0; i < lives.size(); ++i) {
      for (size_t k = 0; k < lives.size(); ++k) {
        const auto &a = lives[i], &b = lives[k];
        auto waits = [&](size_t user) { return ancestors.has(b.begin, user); };
        free_[i * lives.size() + k] = a.end < b.begin && std::all_of(a.users.begin(), a.users.end(), waits);
      }
    }
  }

  bool may(size_t i, size_t k, size_t apart) const {
    if (lives_[i].begin > lives_[k].begin) {
      std::swap(i, k);
    }
    const auto &a = lives_[i], &b = lives_[k];
    bool pays = apart == 1 || std::min(a.bytes, b.bytes) > small_;
    return a.end < b.begin && (free_[i * lives_.size() + k] || (pays && b.begin - a.end >= apart));
  }

 private:
  static constexpr size_t part = size_t{1} << 16;
  const std::vector<Life>& lives_;
  size_t small_; // what is no larger takes little room of its own
  std::vector<bool> free_; // where the second waits for all users of the first anyway
};

// Each buffer as low as may be: beside those that it must not share bytes with.
template <typename May>
Plan placed(const std::vector<Life>& lives, const std::vector<size_t>& order, size_t buffers, May may) {
  Plan plan;
  plan.offsets.resize(buffers);
  std::vector<std::pair<size_t, size_t>> beside; // from, to
  for (size_t i = 0; i < order.size(); ++i) {
    const auto& life = lives[order[i]];
    beside.clear();
    for (size_t k = 0; k < i; ++k) {
      if (!may(order[i], order[k])) {
        auto from = plan.offsets[lives[order[k]].buffer];
        beside.emplace_back(from, from + lives[order[k]].bytes);
      }
    }
    std::sort(beside.begin(), beside.end());
    size_t at = 0;
    for (auto [from, to] : beside) {
      if (at + life.bytes <= from) {
        break;
      }
      at = std::max(at, to);
    }
    plan.offsets[life.buffer] = at;
    plan.bytes = std::max(plan.bytes, at + life.bytes);
  }
  return plan;
}

template <typename May>
Plan smallest_of(const std::vector<Life>& lives, const std::vector<std::vector<size_t>>& orders, size_t buffers, May may) {
  auto best = placed(lives, orders[0], buffers, may);
  for (size_t i = 1; i < orders.size(); ++i) {
    auto other = placed(lives, orders[i], buffers, may);
    if (other.bytes < best.bytes) {
      best = std::move(other);
    }
  }
  return best;
}

} // namespace

Plan plan(std::vector<Operation> operations, Sizes sizes, const std::vector<Within>& within, double factor) {
  std::vector<size_t> place(sizes.size());
  std::iota(place.begin(), place.end(), 0);
  for (auto inner = within.rbegin(); inner != within.rend(); ++inner) { // what lies in another one that does so itself, later
    place[inner->buffer] = place[inner->other];
    sizes[inner->buffer] = 0;
  }
  for (auto& operation : operations) {
    for (auto* buffers : {&operation.reads, &operation.writes}) {
      std::transform(buffers->begin(), buffers->end(), buffers->begin(), [&](size_t buffer) { return place[buffer]; });
    }
  }
  auto all = lives(operations, sizes);
  auto tried = orders(all);
  Sharing sharing(all, Ancestors(dependencies(operations)));
  auto smallest = [&](size_t apart) {
    auto may = [&](size_t i, size_t k) { return sharing.may(i, k, apart); };
    auto best = smallest_of(all, tried, sizes.size(), may);
    best.apart = apart;
    return best;
  };
  auto best = smallest(1);
  auto least = best.bytes;
  auto most = static_cast<size_t>(factor * static_cast<double>(least));
  int fits = 0, too_far = static_cast<int>(std::bit_width(operations.size() + 1)) + 1; // powers of two
  while (factor > 1 && too_far - fits > 1) {
    auto middle = (fits + too_far) / 2;
    auto other = smallest(size_t{1} << middle);
    if (other.bytes <= most) {
      best = std::move(other);
      fits = middle;
    } else {
      too_far = middle;
    }
  }
  best.least = least;
  for (auto inner = within.rbegin(); inner != within.rend(); ++inner) {
    best.offsets[inner->buffer] = best.offsets[inner->other] + inner->offset;
  }
  return best;
}

std::vector<std::vector<size_t>> direct(std::vector<std::vector<size_t>> before) {
  Ancestors ancestors(before);
  for (auto& all : before) {
    std::sort(all.begin(), all.end());
    all.erase(std::unique(all.begin(), all.end()), all.end());
    std::vector<size_t> needed;
    std::copy_if(all.begin(), all.end(), std::back_inserter(needed), [&](size_t b) {
      return std::none_of(all.begin(), all.end(), [&](size_t other) { return ancestors.has(other, b); });
    });
    all = std::move(needed);
  }
  return before;
}

std::vector<size_t> depths(const std::vector<std::vector<size_t>>& before) {
  std::vector<size_t> all(before.size());
  for (size_t i = 0; i < before.size(); ++i) {
    for (auto b : before[i]) {
      all[i] = std::max(all[i], all[b] + 1);
    }
  }
  return all;
}

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

void Hazards::leave(At begin, At end, const Use& use) {
  auto users = use.readers;
  if (use.writer) {
    users.push_back(*use.writer);
  }
  if (!users.empty()) {
    past_.push_back({begin, end, std::move(users)});
  }
}

void Hazards::take(Address address, size_t bytes) {
  auto begin = reinterpret_cast<At>(address), end = begin + bytes;
  auto other = taken_.lower_bound(begin);
  if (other != taken_.begin() && std::prev(other)->second > begin) {
    --other;
  }
  while (other != taken_.end() && other->first < end) {
    auto use = uses_.extract(reinterpret_cast<Address>(other->first));
    if (!use.empty()) {
      leave(other->first, other->second, use.mapped());
    }
    other = taken_.erase(other);
  }
  std::vector<size_t> users;
  std::vector<Past> rest;
  std::erase_if(past_, [&](const Past& past) {
    if (past.end <= begin || past.begin >= end) {
      return false;
    }
    users.insert(users.end(), past.users.begin(), past.users.end());
    if (past.begin < begin) {
      rest.push_back({past.begin, begin, past.users});
    }
    if (past.end > end) {
      rest.push_back({end, past.end, past.users});
    }
    return true;
  });
  past_.insert(past_.end(), rest.begin(), rest.end());
  std::sort(users.begin(), users.end());
  users.erase(std::unique(users.begin(), users.end()), users.end());
  taken_[begin] = end;
  uses_[address] = {std::nullopt, std::move(users)};
}

std::vector<size_t> Hazards::users(Address address) const {
  auto found = uses_.find(address);
  if (found == uses_.end()) {
    return {};
  }
  auto all = found->second.readers;
  if (found->second.writer) {
    all.push_back(*found->second.writer);
  }
  return all;
}

} // namespace faststep::replay
