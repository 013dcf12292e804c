// A part of a step as one CUDA graph over arrays that stay where they are.
//
// The lazy graph of the part is gone through in MLX's order, and each primitive encodes its kernels as it always does, into
// a graph that is kept and launched again, instead of into one that is submitted. What it reads and writes lies in memory
// that is the capture's: static inputs, static outputs, and what is in between.
#pragma once

#include <memory>
#include <vector>

#include "cuda.h"
#include "cuda/replay/encoder.hpp"
#include "mlx/mlx.h"
#include "replay/capture.hpp"

namespace faststep::replay {

struct Learnt;
class Block;
class Feed;

class Capture : public Recorded {
 public:
  explicit Capture(Graph graph);
  ~Capture() override;

  // Of one other, which goes through the graph first to learn what memory it takes (plan.hpp). Nothing is computed, and there is
  // nothing to launch in that one. Then what primitives encode is kept, with their memory where it has been planned.
  void record(const std::vector<Recorded*>& learns, size_t) override;
  // Whether the memory that the graph reads lies where it did: MLX moves what a host reads.
  bool is_valid() const override;
  // The small results (feed.hpp) are copied, with the event of the array to wait for.
  std::vector<mx::array> launch(const std::vector<mx::array>& from, const std::vector<mx::array>& into, Runner) override;

 private:
  struct Fixed {
    std::shared_ptr<mx::array::Data> data;
    void* memory;
  };
  Learnt learn();
  void record(const Learnt& learnt);
  void fold() const;

  Graph graph_;
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
