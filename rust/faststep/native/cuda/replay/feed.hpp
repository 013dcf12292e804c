// What changes from launch to launch, without a call of the driver for each array: the host writes pointers into memory of
// its own, a kernel at the beginning of the graph copies what they point at, and one behind the results copies those out.
#pragma once

#include <cstddef>
#include <cstdint>
#include <deque>
#include <memory>
#include <unordered_map>
#include <utility>
#include <vector>

#include "cuda.h"
#include "mlx/mlx.h"

namespace faststep::replay {

namespace mx = mlx::core;

using Data = std::shared_ptr<mx::array::Data>;

class Feed {
 public:
  // Static arrays that get other values, and lazy results, of which those are given out that are small. The stream has to
  // be idle.
  Feed(const std::vector<mx::array>& into, const std::vector<mx::array>& results, mx::Stream stream);

  // What a kernel reads and writes that has just been encoded.
  struct Encoded {
    std::vector<Data> reads, writes;
  };
  Encoded encode_in() const;
  Encoded encode_out(const std::vector<mx::array>& results) const;

  // Whether the next launch can copy the array into that one.
  bool takes(const mx::array& from, const mx::array& into) const;

  // The next launch: copy arrays, which are kept until it has done so, into those, and give the small results, in their
  // order, in memory that any host may read. To be launched on `queue`, or to be taken back by another call.
  std::vector<mx::array> next(
      const std::vector<mx::array>& from, const std::vector<mx::array>& into, CUstream queue);
  // It has been launched.
  void launched();

 private:
  std::uint64_t* slot() const;
  std::uint64_t done() const;

  mx::Stream stream_;
  std::vector<mx::array> into_;
  std::unordered_map<std::uintptr_t, size_t> numbers_; // of those, by array
  std::vector<size_t> small_; // the numbers of the results that are
  std::vector<std::pair<mx::Shape, mx::Dtype>> kinds_; // of those
  size_t width_, blocks_;
  mx::array slots_, table_, state_;
  std::uint64_t launches_ = 0;
  std::vector<Data> next_; // kept for the next launch
  std::deque<std::pair<std::uint64_t, std::vector<Data>>> kept_;
};

} // namespace faststep::replay
