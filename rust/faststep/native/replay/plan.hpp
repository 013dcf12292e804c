// Places of the memory of a captured step, and what has to wait for what because of them. Knows neither MLX nor a device.
//
// A step is recorded twice. The first time each buffer has memory of its own in all but name, and what is learnt are the
// operations, in their order, and the buffers that they read and write. `plan` then gives each buffer its place in one block
// of memory. Two buffers may share bytes where one is done with before the other is made: that costs nothing where the
// operation that makes the second waits for all users of the first anyway; elsewhere it makes it wait, which keeps two
// operations from running side by side. Of the buffers for which it costs something, only large ones share bytes that are far
// apart in the order: as far as the block stays within a given part of the least that any such plan takes.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <optional>
#include <unordered_map>
#include <vector>

namespace faststep::replay {

// One operation of a step: the buffers that it reads and writes, by number.
struct Operation {
  std::vector<size_t> reads, writes;
};

// Places in one block of memory.
struct Plan {
  std::vector<size_t> offsets; // of each buffer
  size_t bytes = 0; // of the block
  size_t least = 0; // of the smallest block found
  size_t apart = 0; // buffers whose sharing costs something are so many operations apart, at least
};

// A buffer: its bytes; none: it is not in the block. Those that are there before the step, or stay, are not in it either.
using Sizes = std::vector<size_t>;

// A buffer that lies in another one, so many bytes behind its beginning. The operation that makes that one is the last to read
// this one.
struct Within {
  size_t buffer, other, offset;
};

// The places of buffers, each of which is written before it is read, in a block of at most `factor` times the least bytes.
Plan plan(std::vector<Operation> operations, Sizes sizes, const std::vector<Within>& within, double factor);

// The same order with as few dependencies as say it: without those on an operation that another one waits for anyway. Each
// operation waits for ones before it; none twice in what is returned.
std::vector<std::vector<size_t>> direct(std::vector<std::vector<size_t>> before);

// How many operations have to be done one after the other before each begins, at most.
std::vector<size_t> depths(const std::vector<std::vector<size_t>>& before);

// The operations that have to be done before another one: who wrote what it reads, and who reads or wrote what it writes.
class Hazards {
 public:
  using Address = const void*;

  // The next operation, with the memory that it reads and writes: the numbers of those before it that it waits for, each
  // once, in their order.
  std::vector<size_t> add(const std::vector<Address>& reads, const std::vector<Address>& writes);

  // So many bytes from an address on are another buffer's from now on: whoever writes it first waits for all that used any
  // of them.
  void take(Address address, size_t bytes);

  // All that have used a buffer's memory since it was written, or since it was there: it is free when they are done.
  std::vector<size_t> users(Address address) const;

 private:
  using At = std::uintptr_t;
  struct Use {
    std::optional<size_t> writer;
    std::vector<size_t> readers; // since it was written
  };
  struct Past {
    At begin, end;
    std::vector<size_t> users;
  };
  void leave(At begin, At end, const Use& use);

  std::unordered_map<Address, Use> uses_;
  std::map<At, At> taken_; // where the buffers begin that have been taken, and end
  std::vector<Past> past_; // who used memory before the buffer that it is now
  size_t count_ = 0;
};

} // namespace faststep::replay
