// MLX's allocator while a step is recorded: what the calling thread allocates comes from the pass that is under way.
//
// libmlx and what is linked with it call `allocator` below in place of MLX's (src/mlx/caller.rs). Other threads, and all at
// other times, get MLX's buffers. A buffer from a pass belongs to whoever holds it: however late it is freed, its region is
// still there.
#pragma once

#include <cstddef>
#include <memory>
#include <unordered_map>
#include <vector>

#include "mlx/mlx.h"

namespace faststep::tasks {

namespace mx = mlx::core;

// In place of mlx::core::allocator::allocator, which `own` is.
mx::allocator::Allocator& allocator();
void keep_own(mx::allocator::Allocator& (*own)());

// A buffer as MLX lays it out: its bytes in the word before its data.
inline constexpr size_t alignment = 64;

// Memory that buffers are cut from. It is given back when it is closed and all of them have been freed.
class Region;

// What a pass through a graph allocates, in order.
class Allocations {
 public:
  struct Buffer {
    size_t bytes;
    size_t evaluation; // the one that made it
    char* data;
    bool constant = false; // written by the host, which a replay does not do again
  };
  // Where a buffer lies that another pass has made in the same place of the order.
  struct Place {
    size_t bytes = 0;
    size_t offset = 0; // in the block
    const mx::array* home = nullptr; // or the static array whose memory it is
    bool is_part = false; // of another buffer
  };
  static constexpr size_t never = ~size_t{0};

  // To learn: each buffer has bytes of its own, which nobody but a host that makes a constant writes.
  Allocations();
  // To record: each lies in its place, in the block of the thread's last capture where that is large enough.
  Allocations(size_t bytes, std::vector<Place> places);
  ~Allocations();
  Allocations(const Allocations&) = delete;
  Allocations& operator=(const Allocations&) = delete;

  // While it lives, the calling thread allocates from this.
  class Scope {
   public:
    explicit Scope(Allocations& allocations);
    ~Scope();
    Scope(const Scope&) = delete;
    Scope& operator=(const Scope&) = delete;
  };

  // Those of the evaluation of that number come.
  void next(size_t evaluation);
  // The number of the buffer with that pointer; `never`: it is none of these.
  size_t find(const void* memory) const;
  // Of those that its evaluation has made.
  size_t order(size_t number) const;
  // The beginning of the block.
  char* fixed() const;
  // The bytes of a block that was not there before.
  size_t own_bytes() const {
    return own_bytes_;
  }
  const std::vector<Buffer>& buffers() const {
    return buffers_;
  }
  // The pointer of a buffer in MLX, `allocator::Buffer::ptr`.
  const void* memory(size_t number) const {
    return buffers_[number].data - sizeof(size_t);
  }
  // Return whether a buffer lies in the memory of a static array.
  bool is_home(size_t number) const {
    return !learns_ && places_[number].home != nullptr;
  }
  // The bytes from `memory` on that nobody but the buffer uses: a part of another one begins behind the word before its data.
  size_t room(size_t number) const {
    bool is_part = !learns_ && places_[number].is_part;
    return buffers_[number].bytes + (is_part ? 0 : sizeof(size_t));
  }
  // Finds the constants; for a pass that learns, when it is done.
  void find_constants();
  // Throws where not all that has been planned has been asked for.
  void finish() const;

  // For the allocator.
  mx::allocator::Buffer take(size_t bytes);

 private:
  char* fresh(size_t bytes);
  void add(std::shared_ptr<Region> region);

  std::vector<std::shared_ptr<Region>> regions_;
  std::vector<Place> places_;
  std::vector<Buffer> buffers_;
  std::unordered_map<const void*, size_t> latest_; // by their data
  size_t evaluation_ = 0;
  bool learns_;
  size_t left_ = 0, own_bytes_ = 0;
  char* next_ = nullptr;
};

} // namespace faststep::tasks
