// A part of a step as one CUDA graph over arrays that stay where they are.
//
// The lazy graph of the part is gone through in MLX's order, and each primitive encodes its kernels as it always does, into
// a graph that is kept and launched again, instead of into one that is submitted. What it reads and writes lies in memory
// that is the capture's: static inputs, static outputs, and what is in between.
#pragma once

#include <cstddef>
#include <memory>
#include <stdexcept>
#include <unordered_set>
#include <vector>

#include "cuda.h"
#include "cuda/replay/encoder.hpp"
#include "ffi.hpp"
#include "mlx/mlx.h"

namespace faststep::replay {

namespace mx = mlx::core;

// Why a part cannot be captured, or not be launched any more.
struct Refused : std::runtime_error {
  using std::runtime_error::runtime_error;
};

struct Learnt;
class Block;
class Feed;

class Capture {
 public:
  // `results` keep their memory. When a replay is done, the value of each of `from` is in the memory of `into`. `fed`: static
  // arrays that get other values before a launch; `inputs`: all arrays whose values may be others then.
  Capture(
      std::vector<mx::array> results,
      std::vector<mx::array> from,
      std::vector<mx::array> into,
      std::vector<mx::array> fed,
      const std::vector<mx::array>& inputs);
  ~Capture();
  Capture(const Capture&) = delete;
  Capture& operator=(const Capture&) = delete;

  // Go through the graph to learn what memory it takes (plan.hpp); nothing is computed, and there is nothing to launch.
  Learnt learn();
  // Go through the graph once more, which is made anew for it, and keep what primitives encode, with their memory where it
  // has been planned.
  void record(const Learnt& learnt);
  // Whether the memory that the graph reads lies where it did: MLX moves what a host reads.
  bool is_valid() const;
  // What both passes feed the graph with.
  void begin();
  void share(Capture& other);
  // Compute small operations on what is the same in every launch, once.
  void fold();
  // Copy arrays into static ones and launch the graph, behind everything that the stream had to do. An array without a
  // value to wait for, and the small results (feed.hpp), copied, in their order, with the same event.
  std::vector<mx::array> launch(const std::vector<mx::array>& from, const std::vector<mx::array>& into);

  CaptureInfo info{};

 private:
  struct Fixed {
    std::shared_ptr<mx::array::Data> data;
    void* memory;
  };
  std::vector<mx::array> results_, from_, into_, fed_;
  std::unordered_set<const mx::array::Data*> inputs_;
  bool failed_ = false;
  std::shared_ptr<Feed> feed_;
  mx::Stream stream_;
  CUstream queue_ = nullptr;
  CUcontext context_ = nullptr;
  CUgraphExec exec_ = nullptr;
  std::unique_ptr<Block> block_;
  std::vector<Fixed> fixed_; // what the graph reads and others may hold
  std::vector<std::shared_ptr<mx::array::Data>> kept_;
  friend class Recorder;
};

// Copies evaluated arrays into static ones, which stay until that is done.
void copy(const std::vector<mx::array>& from, const std::vector<mx::array>& into, mx::Stream stream);

// Submits what the encoder has to do, behind what these evaluated arrays wait for.
void settle(const std::vector<mx::array>& arrays, Encoder& encoder, mx::Stream stream);

} // namespace faststep::replay
