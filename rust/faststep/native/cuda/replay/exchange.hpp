// The sums of static arrays over the ranks of a group, in their memory, on a stream beside the one that computes: each begins when
// the graph that makes it has come so far, while the rest of that graph goes on.
//
// MLX's own sum of an array is an operation within a graph, which has another order wherever the ranks' graphs differ. These
// have the order in which they are given.
#pragma once

#include <functional>
#include <utility>
#include <vector>

#include "cuda.h"
#include "group.hpp"
#include "mlx/mlx.h"

namespace faststep::replay {

class Exchange {
 public:
  // Of so many arrays.
  explicit Exchange(size_t count);
  ~Exchange();
  Exchange(const Exchange&) = delete;
  Exchange& operator=(const Exchange&) = delete;

  // The event that a graph records when it has made the array of this number.
  CUevent made(size_t number) const {
    return made_.at(number);
  }
  // The order in which a graph makes them; unknown before one has been recorded.
  const std::vector<size_t>& order() const {
    return order_;
  }
  void set_order(std::vector<size_t> order) {
    order_ = std::move(order);
  }
  // Sum them as soon as the last launch has made them. What is submitted to the stream of launches afterwards waits for that,
  // as does who waits for the returned array, which has no value.
  mx::array sum(const mx::distributed::Group& group, std::vector<mx::array> arrays, bool in_order) const;
  // Sum any arrays, once all that has been submitted is done: `own` are those that this rank gives; it has zeros for the others.
  mx::array gather(const mx::distributed::Group& group, std::vector<mx::array> arrays, const bool* own) const;

 private:
  // Submit sums to the stream beside; `waits`: once all work before them is done. Work that is submitted later waits for them.
  mx::array beside(const mx::distributed::Group& group, std::function<void(CUstream queue, mx::Stream beside)> sums, bool waits) const;

  std::vector<CUevent> made_;
  std::vector<size_t> order_;
  CUevent done_ = nullptr;
  CUcontext context_ = nullptr;
};

// The stream on which a group exchanges; on a GPU one of this thread's own, beside the one that computes.
mx::Stream communication_stream(const mx::distributed::Group& group);

// Sum numbers over the ranks of a group, in their place, and wait for that alone. MLX's own sum of an array waits for all that
// the device does before.
void sum_numbers(const mx::distributed::Group& group, float* numbers, size_t count);

} // namespace faststep::replay
