// The device's own time of operations: events between them, in the graphs that MLX's encoder makes of their kernels. They
// run one after another, and the host's work is not in it.
#pragma once

#include <memory>
#include <vector>

#include "cuda/replay/encoder.hpp"
#include "mlx/mlx.h"

namespace faststep {

class OpClock {
 public:
  // Throws where MLX's encoder is not known.
  explicit OpClock(mlx::core::Stream stream);
  ~OpClock();
  OpClock(const OpClock&) = delete;
  OpClock& operator=(const OpClock&) = delete;

  // True if an operation's work is all kernels of this stream.
  bool takes(const mlx::core::array& array) const;
  // Encode an operation, whose inputs have been evaluated or encoded.
  void evaluate(mlx::core::array array);
  // True if MLX would submit what has been encoded.
  bool is_full() const;
  // Wait for all that has been encoded; the seconds of each operation since the last time.
  std::vector<double> finish();

 private:
  std::vector<CUgraphNode> nodes() const;
  CUgraphNode record(const std::vector<CUgraphNode>& after);
  double seconds(size_t from, size_t to) const;
  void submit();

  mlx::core::Stream stream_;
  replay::Encoder& encoder_;
  std::vector<CUevent> events_; // made once, recorded in each graph
  size_t recorded_ = 0; // events in this graph
  size_t nodes_ = 0; // nodes of this graph that are known
  CUgraphNode last_ = nullptr; // the event behind the last operation that has kernels
  std::vector<size_t> ends_; // of each operation the event behind it; 0: it has no kernels
};

// None where the default device has no events of CUDA's, or MLX's encoder is not known.
std::unique_ptr<OpClock> op_clock();

} // namespace faststep
