// A part of a step as a list of the CPU's tasks, in units, one of an operation: one after the other, or, where one need not wait
// for another, by several threads.
//
// The lazy graph of the part is gone through in MLX's order, and each primitive hands over its tasks as it always does, to a list
// that is kept. It is gone through three times. The first time nothing is given up for what is written next, which shows what
// makes the values that belong into static arrays. The second shows which units use each buffer: who comes later may have the
// bytes of who has gone. The third time buffers lie where they are planned, and values of static arrays, where nobody reads
// the old ones any more, in the memory of those.
#pragma once

#include <cstdint>
#include <exception>
#include <memory>
#include <mutex>
#include <unordered_map>
#include <unordered_set>
#include <vector>

#include "cpu/replay/memory.hpp"
#include "cpu/replay/task.hpp"
#include "lazy.hpp"
#include "replay/capture.hpp"
#include "replay/plan.hpp"

namespace faststep::tasks {

using replay::Data;
using replay::Gate;
using replay::Graph;
using replay::Recorded;
using replay::Refused;

class Capture : public Recorded {
 public:
  explicit Capture(Graph graph);
  ~Capture() override;

  void record(const std::vector<Recorded*>& learns, size_t threads) override;
  bool is_valid() const override {
    return !failed_;
  }
  std::vector<mx::array> launch(
      const std::vector<mx::array>& from, const std::vector<mx::array>& into, replay::Runner runner) override;
  bool run_unit(size_t number) override;

 private:
  // A value that is made in the memory of the static array that it belongs into: the buffer of that number, of those that an
  // evaluation makes.
  struct Home {
    size_t evaluation, order, carried;
  };
  struct Kernel;
  // The memory that a unit reads and writes.
  struct Use {
    std::vector<const void*> reads, writes;
  };
  // Memory that may lie in other memory, so many bytes behind its beginning, where the evaluation of that one is the last to read it.
  struct Part {
    const void *memory, *other;
    size_t bytes, offset, evaluation;
  };

  // The inputs of evaluations that are `held` lend their memory to no output; without a set, of none.
  void go_through(Allocations& allocations, const std::unordered_set<size_t>* held);
  void evaluate(mx::array array, size_t number, bool holds, const Allocations& allocations, Recording& recording);
  void add_unit(size_t end, Use use);
  std::vector<replay::Operation> operations(const Allocations& allocations) const;
  std::vector<replay::Within> within(const Allocations& allocations, const replay::Sizes& sizes) const;
  std::vector<Home> homes(const Allocations& allocations) const;
  bool may_be_written(size_t i, size_t evaluation) const;
  bool is_given(const void* memory) const;
  void plan(
      const Allocations& allocations,
      std::vector<Home>& homes,
      const std::vector<mx::array>& into,
      Capture& records) const;
  void bring_home(const std::vector<Home>& homes);
  void run(replay::Runner runner);

  Graph graph_;
  mx::Stream stream_;
  bool failed_ = false, has_run_ = false;
  uint64_t float_mode_ = 0;
  size_t threads_ = 1; // that may run its units
  std::vector<Data> kept_; // what the tasks read and others may let go of
  std::unique_ptr<Allocations> memory_;
  size_t fixed_bytes_ = 0; // at its beginning, of buffers that share theirs with no other
  std::vector<char> constants_; // what is there before a run: what the host has written is not made again by a task
  std::vector<Task> tasks_;
  std::vector<size_t> ends_; // of each unit's tasks
  std::mutex failing_;
  std::exception_ptr failure_; // of a unit
  // of a pass
  replay::Hazards hazards_;
  std::vector<Use> uses_; // by unit
  std::vector<Part> parts_;
  std::unordered_map<const void*, size_t> last_reads_; // by memory: the last evaluation that reads it
  std::unordered_map<size_t, Kernel> kernels_; // by evaluation
};

// The stream of copies of static arrays.
mx::Stream shared_stream();
// Whether its worker is one of the process that this one has been forked from: who hands it a task has to run that.
bool has_lost_worker(mx::Stream stream);
// What a lazy copy is made of: a static array, or what was there before that is written over.
struct Source;
std::shared_ptr<Source> source_of(const mx::array& place, std::shared_ptr<Gate> gate);
// A lazy copy; it is made while the gate is open.
mx::array shown(const std::shared_ptr<Source>& source);
// While the gate is closed: the static array is about to be written over. A copy that has not been made is of what is there now.
void preserve(Source& source);
// The same, and what is there now, in memory of its own.
mx::array value_of(Source& source);
// Whether its copies are not of what the static array will hold.
bool is_over(const Source& source);
// Copies evaluated arrays into static ones.
void copy(const std::vector<mx::array>& from, const std::vector<mx::array>& into);

} // namespace faststep::tasks
