// Evaluation in MLX's order, of one operation when the one before is done: what that has read is free before the next allocates.
// MLX runs ahead of its worker otherwise. Its memory limit, at which it waits, is no way to that: an error that is thrown where
// a task is handed over leaves the number of tasks too high for good (encoder.h), and MLX waits for it to come down for ever.
// What is joined lies in its place before all of it is there.
#include <utility>
#include <vector>

#include "cpu/gather.hpp"
#include "ffi.hpp"
#include "lazy.hpp"
#include "status.hpp"

int faststep_eval_one_by_one(const void* const* arrays, size_t count) {
  return faststep::guarded([&] {
    bool is_on_cpu = mlx::core::default_device() == mlx::core::Device::cpu;
    auto tape = is_on_cpu ? faststep::tape_of(faststep::pointers(arrays, count)) : std::vector<mlx::core::array>();
    faststep::Gathering joins(tape);
    while (!tape.empty()) {
      auto array = std::move(tape.back()); // no longer in the list: its memory can be used again
      tape.pop_back();
      bool is_done = array.status() != mlx::core::array::Status::unscheduled; // it came with a sibling
      if (is_done || joins.finish(array)) {
        continue;
      }
      auto parts = joins.parts(array);
      mlx::core::eval({std::move(array)});
      for (auto& part : parts) {
        joins.add(std::move(part));
      }
    }
    mlx::core::eval(faststep::list(arrays, count)); // on a GPU all, otherwise what was under way
  });
}
