// Memory that evaluating a lazy graph would allocate, found by going through MLX's evaluation without evaluating anything.
//
// `memory.cpp` stands for MLX's allocator, `queue.cpp` for a device that works behind the thread that feeds it,
// `rules.cpp`, `sharing.cpp` and `views.cpp` for what each primitive allocates, shares or takes over, `simulator.cpp`
// for the graph and `evaluate.cpp` for the order of evaluation; `device.cpp` says what device that is, `ffi.cpp` is called by
// Rust. They follow the sources of MLX that each of them names; where those change, these have to. `order.cpp` uses the same
// rules for the step itself: it puts gradients in an order that takes less memory.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <optional>
#include <unordered_map>
#include <vector>

#include "mlx/mlx.h"
#include "mlx/primitives.h"
#include "ffi.hpp"

namespace faststep::simulator {

namespace mx = mlx::core;

class Memory;

// A piece of memory, given back when the last array lets go of it.
struct Buffer {
  Memory& memory;
  size_t bytes;
  bool owned; // by MLX: only then may another array take it over
  Kind kind = Kind::others;
  Buffer(Memory& memory, size_t bytes, bool owned) : memory(memory), bytes(bytes), owned(owned) {}
  Buffer(const Buffer&) = delete;
  Buffer& operator=(const Buffer&) = delete;
  ~Buffer();
};
using Data = std::shared_ptr<Buffer>;

// MLX's allocator: what is in use, the most that was, and how much it keeps of what has been freed.
class Memory {
 public:
  explicit Memory(const Device& device);
  Data allocate(size_t bytes);
  void release(const Buffer& buffer);
  void mark(Buffer& buffer, Kind kind);
  // Bytes in use by kind; those that nobody has marked are of `others`.
  const std::array<size_t, kinds>& by_kind() const {
    return by_kind_;
  }

  size_t active, peak, cached;

 private:
  size_t rounded(size_t bytes) const;
  size_t reused(size_t bytes);
  bool gpu_;
  size_t cache_limit_;
  std::map<size_t, size_t> pool_; // number of freed buffers by size
  std::array<size_t, kinds> by_kind_{};
};

struct Op;

// An array of the graph. `face` has its shape, its dtype and, once it is evaluated, its layout, but no memory.
struct Node {
  Node(mx::array face, uintptr_t id) : face(std::move(face)), id(id) {}
  mx::array face;
  uintptr_t id; // of MLX's array
  std::optional<Kind> kind; // where it has one of its own
  Data data;
  Op* op = nullptr; // the operation that computes it; null: it was there before
  int refs = 0; // the handles to it, as MLX would count them
  int degree = 0; // of the tape that is being built: its consumers that are not in it yet
  bool done = false;
};

// A primitive with its arrays.
struct Op {
  std::shared_ptr<mx::Primitive> primitive;
  std::vector<Node*> inputs, outputs;
  int handles = 0; // to each of the inputs
  std::optional<Kind> kind; // of the memory that it takes
};

// Memory of a join to which its parts move as they come (cpu/gather.hpp).
struct Room {
  size_t bytes, ready = 0;
  Data memory;
  std::vector<Node*> waiting;
};

// Allocations of one primitive's evaluation beside its outputs.
struct Work {
  int kernels = 1;
  std::vector<Data> temporaries;
  size_t scratch = 0; // bytes that the CPU's worker takes and frees as it computes
};

// Give the outputs of an op their memory and layout.
Work run(Memory& memory, const Op& op);

// A device that works behind the thread that feeds it: memory that it has yet to read is not free.
class Queue {
 public:
  Queue(Memory& memory, const Device& device);
  void dispatch(Work work, size_t elements, std::vector<Data> keeps);
  size_t finish(); // the end of an evaluation; what to wait for
  void wait(size_t until);
  void wait_for_one();
  int tasks() const {
    return tasks_;
  }

 private:
  struct Item {
    bool ends_task;
    std::vector<Data> keeps;
    size_t scratch;
  };
  void push(std::vector<Data> keeps, size_t scratch);
  void commit();
  void work();

  Memory& memory_;
  Device device_;
  int tasks_ = 0;
  size_t pending_ = 0, elements_ = 0; // of the task or graph that is being filled
  std::vector<Data> keeps_;
  std::deque<Item> items_;
  size_t done_ = 0;
};

using Arrays = std::vector<const mx::array*>;

// The evaluations of a step, one after another.
class Simulator {
 public:
  explicit Simulator(const Device& device);
  // Take in a graph: `roots`, computed from `given` and from whatever else there is.
  void begin(const Arrays& given, const Arrays& roots);
  // Handles to arrays, beside those of the graph.
  void hold(const Arrays& arrays, int handles);
  // Hold the memory of these arrays, and let go of what the slot held before; the slots are those of
  // src/memory/simulator.rs.
  void keep(size_t slot, const Arrays& arrays);
  // `mx.async_eval`; what to wait for. `one_by_one`: each operation waits for the one before (one_by_one.cpp).
  size_t evaluate(const Arrays& arrays, bool one_by_one);
  // Wait for an evaluation: what it read is free then.
  void wait(size_t done);
  // Let MLX's memory limit be no more than that; on a CPU wait for all in its place, as src/mlx/memory.rs does.
  void limit(size_t bytes);
  // Put the value of `output` in the place of that of `input`.
  void carry(const mx::array& input, const mx::array& output);
  // The kind of the memory of arrays, and of operations before them without one.
  void mark(Kind own, Kind before, const Arrays& arrays);

  Memory memory;
  std::optional<std::vector<Held>> recorded; // by operation, where that is asked for

 private:
  Node& node(const mx::array& array);
  Node& add(const mx::array& array);
  void add_resident(Node& node);
  void link(Node& root);
  std::vector<Node*> tape(const std::vector<Node*>& outputs);
  void evaluate(Op& op, const Node& last);
  void gather(const std::vector<Node*>& order);
  void move(const Op& op);
  void mark(const Op& op, const Work& work);
  void release(Node& node, int handles);

  Device device_;
  size_t limit_;
  Queue queue_;
  size_t paced_ = 0; // the place of the last `Pace`
  std::unordered_map<const Op*, Room> rooms_; // of the joins of an evaluation one by one
  std::unordered_map<const Node*, const Op*> parts_; // and their parts
  std::deque<Node> nodes_;
  std::deque<Op> ops_;
  std::vector<mx::array> sources_; // kept alive: an id is that of another array once the first is gone
  std::unordered_map<uintptr_t, Node*> by_id_;
  std::unordered_map<const void*, std::weak_ptr<Buffer>> residents_; // memory that was there before
  std::vector<Data> kept_[2];
};

} // namespace faststep::simulator
