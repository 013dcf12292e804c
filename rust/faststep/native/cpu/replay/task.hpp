// A task of a CPU's stream that is called again and again.
#pragma once

#include <functional>
#include <utility>
#include <vector>

#include "mlx/mlx.h"

namespace faststep::tasks {

namespace mx = mlx::core;

// What MLX has handed over for an operation. Its closure may change itself when it is called: it moves pointers on, and called
// again it would write behind its buffer. The first call tells by the closure's bytes; then a copy of it is called each time.
class Task {
 public:
  explicit Task(std::function<void()> call) : call_(std::move(call)) {}

  void run_first();
  void run() {
    if (!changes_) {
      return call_();
    }
    auto copy = call_;
    copy();
  }
  bool changes() const {
    return changes_;
  }

 private:
  std::function<void()> call_;
  bool changes_ = false;
};

// While it lives, tasks that the calling thread hands to this stream are kept, and not run.
class Recording {
 public:
  explicit Recording(mx::Stream stream);
  ~Recording();
  Recording(const Recording&) = delete;
  Recording& operator=(const Recording&) = delete;

  std::vector<Task> tasks;
  // Why they are not all that has to be done; null: they are.
  const char* refused = nullptr;

  // For what is called in place of MLX's scheduler: whether a task has been kept or run.
  bool take(mx::Stream stream, std::function<void()>& task);

 private:
  mx::Stream stream_;
};

// The recording of the calling thread, or null.
Recording* recording();

} // namespace faststep::tasks
