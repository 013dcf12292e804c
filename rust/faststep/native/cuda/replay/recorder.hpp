// The pass through a lazy graph that records it.
#pragma once

#include <cstdint>
#include <memory>
#include <unordered_map>
#include <utility>
#include <vector>

#include "cuda/replay/capture.hpp"
#include "cuda/replay/encoder.hpp"
#include "cuda/replay/plan.hpp"

namespace faststep::replay {

using Data = std::shared_ptr<mx::array::Data>;

// An operation's nodes, the last one excluded, and the operations that it waits for.
struct Unit {
  size_t begin, end;
  std::vector<size_t> before;
};

// A fused kernel that has just written its outputs element by element.
struct Kernel {
  struct Input {
    void* memory;
    size_t bytes;
    bool by_element; // row after row, from the beginning of its memory, element by element of the outputs
  };
  size_t unit;
  std::vector<Input> inputs;
};

class Recorder {
 public:
  Recorder(Capture& capture, Encoder& encoder, size_t retained);
  void run();

 private:
  std::vector<mx::array> tape();
  void count(const std::vector<mx::array>& tape);
  void evaluate(mx::array array);
  void add(size_t begin, const std::vector<Data>& reads, const std::vector<Data>& writes);
  void note(const Data& data);
  void let_go(std::vector<Data> all);
  void carry();
  bool is_free(size_t i) const;
  void remember(const mx::array& array, const std::vector<mx::array>& outputs);
  bool write_in_place(size_t i);
  bool replace_pointer(size_t node, void* from, void* into) const;
  void copy(const mx::array& from, const mx::array& into);
  void reclaim();
  void connect();

  Capture& capture_;
  Recording recording_;
  Retention<Data> retention_;
  Hazards hazards_;
  std::vector<Unit> units_;
  std::unordered_map<void*, std::pair<size_t, std::weak_ptr<mx::array::Data>>> seen_; // memory that was allocated
  std::unordered_map<void*, Kernel> kernels_; // by what they wrote
  std::unordered_map<void*, int> reads_; // that are still to come, by memory
  std::unordered_map<std::uintptr_t, int> consumers_; // by array
};

} // namespace faststep::replay
