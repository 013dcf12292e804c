// Which memory of a captured step is used again, and what has to wait for what because of it. Knows neither MLX nor CUDA.
#pragma once

#include <cstddef>
#include <deque>
#include <optional>
#include <unordered_map>
#include <utility>
#include <vector>

namespace faststep::replay {

// Memory that nothing reads any more, and that is not to be used again yet. What is written into memory that has just been
// read waits for its reader; what finds memory of its own runs beside it. A budget of 0 gives the least memory, one without
// end the most independent operations.
template <typename Handle>
class Retention {
 public:
  explicit Retention(size_t budget) : budget_(budget) {}

  // Keep this too; the oldest goes as long as there is more than the budget.
  void add(Handle handle, size_t bytes) {
    kept_.emplace_back(std::move(handle), bytes);
    bytes_ += bytes;
    while (bytes_ > budget_ && !kept_.empty()) {
      bytes_ -= kept_.front().second;
      kept_.pop_front();
    }
  }

  void clear() {
    kept_.clear();
    bytes_ = 0;
  }

 private:
  size_t budget_, bytes_ = 0;
  std::deque<std::pair<Handle, size_t>> kept_;
};

// The operations that have to be done before another one: who wrote what it reads, and who reads or wrote what it writes.
class Hazards {
 public:
  using Address = const void*;

  // The next operation, with the memory that it reads and writes: the numbers of those before it that it waits for, each
  // once, in their order.
  std::vector<size_t> add(const std::vector<Address>& reads, const std::vector<Address>& writes);

  // Whether an operation, the only one to have used `from`, may write `into` in its place: not where another operation has
  // used either since.
  bool may_redirect(size_t number, Address from, Address into) const;

  // Have it do so: the numbers of those before it that it waits for because of that. None where it may not.
  std::optional<std::vector<size_t>> redirect(size_t number, Address from, Address into);

 private:
  struct Use {
    std::optional<size_t> writer;
    std::vector<size_t> readers; // since it was written
  };
  std::unordered_map<Address, Use> uses_;
  size_t count_ = 0;
};

} // namespace faststep::replay
