// A part of a step over arrays that stay where they are, recorded once and launched again: what the devices have in common.
// `cuda/replay` records one graph of kernels, `cpu/replay` a list of tasks.
#pragma once

#include <cstddef>
#include <functional>
#include <memory>
#include <shared_mutex>
#include <stdexcept>
#include <string>
#include <vector>

#include "ffi.hpp"
#include "mlx/mlx.h"

namespace faststep::replay {

namespace mx = mlx::core;

using Data = std::shared_ptr<mx::array::Data>;

// Why a part cannot be captured, or not be launched any more.
struct Refused : std::runtime_error {
  using std::runtime_error::runtime_error;
};

class Exchange;

// The graph of a part. `results` keep their memory. When a replay is done, the value of each of `from` is in the memory of
// `into`. `fed`: static arrays that get other values before a launch; `inputs`: all arrays whose values may be others then.
// `summed`: static arrays of which an exchange, if there is one, has to know when they are made.
struct Graph {
  std::vector<mx::array> results, from, into, fed, inputs, summed;
  std::shared_ptr<Exchange> exchange;
};

// Runs the units of a capture, each when those are done that it waits for.
struct Runner {
  void (*run)(const void* context);
  const void* context;
};

class Recorded {
 public:
  Recorded() = default;
  virtual ~Recorded() = default;
  Recorded(const Recorded&) = delete;
  Recorded& operator=(const Recorded&) = delete;

  // Record it. `learns`: as many others of the same graph, made anew, as the device asks for, of no use any more then. `threads` of
  // the host may run its units.
  virtual void record(const std::vector<Recorded*>& learns, size_t threads) = 0;
  // Whether it can be launched, as far as is known.
  virtual bool is_valid() const = 0;
  // Copy arrays into static ones and launch, behind everything that the stream had to do. An array without a value to wait for,
  // and copies of the first results that are small, or of all.
  virtual std::vector<mx::array> launch(
      const std::vector<mx::array>& from, const std::vector<mx::array>& into, Runner runner) = 0;

  // Run a unit, within a launch, on any thread; whether it has not failed.
  virtual bool run_unit(size_t) {
    return false;
  }

  CaptureInfo info{};
  // The dependencies of each unit on a CPU: units with lower numbers. Empty on CUDA.
  std::vector<std::vector<size_t>> units;
};

// Who reads static arrays for a copy of them, and when.
struct Gate {
  mx::array done = mx::array(true); // has the event of the last launch, where a device has one
  std::shared_mutex mutex; // a host that reads them shares it, and has it alone while it writes them
};

// How many graphs a recording needs for itself.
size_t learning_passes();

// Compute small operations on what is the same in every launch, once: those that no input reaches, and that may be computed
// before.
void fold(
    const Graph& graph, mx::Stream stream, const std::function<bool(const mx::Primitive&)>& stays_in_the_step);

} // namespace faststep::replay
