// The two passes through a lazy graph: the first learns what memory it takes, the second records it.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <unordered_map>
#include <unordered_set>
#include <utility>
#include <vector>

#include "cuda/replay/block.hpp"
#include "cuda/replay/capture.hpp"
#include "cuda/replay/encoder.hpp"
#include "cuda/replay/feed.hpp"
#include "replay/plan.hpp"

namespace faststep::replay {

// Memory that an operation writes, and the operations that have used it before.
struct Room {
  CUdeviceptr begin, end;
  std::vector<size_t> users;
};

// An operation's nodes, the last one excluded, and the operations that it waits for.
struct Unit {
  size_t begin, end;
  std::vector<size_t> before;
  std::vector<Room> rooms;
};

// An input of a fused kernel that writes its outputs element by element.
struct Input {
  void* memory;
  size_t bytes;
  bool by_element; // row after row, from the beginning of its memory, element by element of the outputs
};

// The evaluation that makes a buffer.
struct Made {
  size_t unit; // no operation before this one uses it
  size_t bytes;
};

// Findings of the first pass: the operations, the bytes of their buffers in the block, and the buffers that each of the evaluations
// makes.
struct Learnt {
  std::vector<Operation> operations;
  Sizes sizes;
  std::vector<std::vector<size_t>> made;
  std::vector<Within> within;
  std::unordered_map<size_t, Place> there; // of buffers in static arrays
  Plan plan;
};

// Whether an array is all that lies in its memory, as far as it knows.
inline bool is_whole(const mx::array& a) {
  return a.flags().row_contiguous && a.offset() == 0 && a.data_size() == a.size();
}

class Recorder {
 public:
  // With nothing learnt, to learn; else to record, with the buffers that have been planned in the block.
  Recorder(Capture& capture, Encoder& encoder, const Learnt* learnt, Block* block);
  Learnt learn();
  void record();

 private:
  struct Evaluation;
  void run();
  std::vector<mx::array> tape();
  void count(const std::vector<mx::array>& tape);
  void evaluate(mx::array array);
  void evaluate(Evaluation& evaluation);
  void take(const std::vector<Data>& writes);
  void lay_within(const mx::array& array, const mx::array& out);
  void add(size_t begin, const std::vector<Data>& reads, const std::vector<Data>& writes);
  size_t id(const Data& data);
  void let_go(std::vector<Data> all);
  void carry();
  bool is_free(size_t i) const;
  void remember(const mx::array& array, const std::vector<mx::array>& outputs);
  bool lay_there(size_t i);
  std::optional<Place> place(size_t buffer) const;
  void leave_room();
  void copy(const mx::array& from, const mx::array& into);
  void feed(Feed::Encoded (*encode)(const Capture&));
  void connect();
  using Nodes = std::vector<CUgraphNode>;
  void announce(const std::vector<Nodes>& ends, const std::vector<size_t>& depths);
  std::vector<std::pair<CUgraphNode, CUgraphNode>> fill_early(CUgraphNode node, const Unit& unit, const std::vector<Nodes>& ends);

  Capture& capture_;
  Recording recording_;
  const Learnt* learnt_;
  Block* block_;
  Learnt learning_;
  size_t evaluations_ = 0;
  Hazards hazards_;
  std::vector<Unit> units_;
  std::unordered_map<mx::array::Data*, std::pair<size_t, std::weak_ptr<mx::array::Data>>> ids_; // of buffers, as they are learnt
  std::unordered_map<size_t, size_t> made_whole_; // bytes of the arrays that buffers were made for
  std::unordered_set<size_t> lies_within_; // buffers, in other ones
  std::unordered_map<size_t, Made> made_by_; // by buffer
  std::unordered_map<size_t, std::vector<Input>> fused_; // kernels, by operation
  std::unordered_map<void*, int> reads_; // that are still to come, by memory
  std::unordered_map<std::uintptr_t, int> consumers_; // by array
};

} // namespace faststep::replay
