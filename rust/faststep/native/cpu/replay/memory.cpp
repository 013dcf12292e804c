#include "cpu/replay/memory.hpp"

#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <cstring>
#include <map>
#include <mutex>
#include <new>
#include <optional>
#include <unordered_map>
#include <utility>

#include "replay/capture.hpp"

namespace faststep::tasks {

using replay::Refused;

namespace {

size_t rounded(size_t bytes, size_t to) {
  return (bytes + to - 1) / to * to;
}

} // namespace

class Region {
 public:
  // Of the system: not there until it is written.
  explicit Region(size_t bytes) : end_(bytes) {
    auto* mapped = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (mapped == MAP_FAILED) {
      throw std::bad_alloc();
    }
#ifdef MADV_NOHUGEPAGE
    madvise(mapped, bytes, MADV_NOHUGEPAGE); // pages that are written are to be told from others
#endif
    begin_ = static_cast<char*>(mapped);
    end_ += reinterpret_cast<uintptr_t>(mapped);
  }
  // Of MLX, which counts it.
  explicit Region(mx::allocator::Data block) : block_(std::move(block)) {
    auto at = reinterpret_cast<uintptr_t>(block_->buffer().raw_ptr());
    end_ = at + mx::allocator::allocator().size(block_->buffer());
    begin_ = reinterpret_cast<char*>(rounded(at, alignment));
  }
  ~Region() {
    if (!block_) {
      munmap(begin_, bytes());
    }
  }
  Region(const Region&) = delete;
  Region& operator=(const Region&) = delete;

  char* begin() const {
    return begin_;
  }
  char* end() const {
    return reinterpret_cast<char*>(end_);
  }

  size_t bytes() const {
    return static_cast<size_t>(end() - begin());
  }

  size_t passes = 0; // that have not been closed
  size_t in_use = 0; // buffers

 private:
  std::optional<mx::allocator::Data> block_;
  char* begin_ = nullptr;
  uintptr_t end_ = 0;
};

namespace {

const size_t page = static_cast<size_t>(sysconf(_SC_PAGESIZE));
constexpr size_t chunk = size_t{64} << 20;
// Up to so many bytes a constant shows in the bytes that were there before, above that in the pages that have been touched.
const size_t small = 16 * page;
constexpr unsigned char unwritten = 0xa7;

mx::allocator::Allocator& (*own_allocator)() = nullptr;

thread_local Allocations* pass = nullptr;

// The block of the thread's last capture: captures run one after the other, and none needs what another one has left in it.
thread_local std::weak_ptr<Region> last_block;

// The regions that buffers may lie in, and the buffers of static arrays that have been lent, each so often.
class Registry {
 public:
  void open(const std::shared_ptr<Region>& region) {
    std::lock_guard lock(mutex_);
    ++region->passes;
    if (regions_.emplace(region->begin(), region).second) {
      ++count_;
    }
  }

  // A pass is over.
  void close(const std::shared_ptr<Region>& region) {
    std::shared_ptr<Region> dropped; // when it is unlocked: its memory is freed by way of this
    std::lock_guard lock(mutex_);
    --region->passes;
    dropped = drop(region->begin());
  }

  void take(const std::shared_ptr<Region>& region) {
    std::lock_guard lock(mutex_);
    ++region->in_use;
  }

  void lend(const void* buffer) {
    std::lock_guard lock(mutex_);
    ++lent_[buffer];
    ++count_;
  }

  // Return whether a buffer is none of MLX's, or is still in use.
  bool free(const void* buffer) {
    if (count_ == 0) {
      return false;
    }
    std::shared_ptr<Region> dropped;
    std::lock_guard lock(mutex_);
    if (auto lent = lent_.find(buffer); lent != lent_.end()) {
      if (--lent->second == 0) {
        lent_.erase(lent);
      }
      --count_;
      return true;
    }
    auto* at = static_cast<const char*>(buffer);
    auto found = regions_.upper_bound(const_cast<char*>(at));
    if (found == regions_.begin() || at >= std::prev(found)->second->end()) {
      return false;
    }
    auto& region = *std::prev(found)->second;
    --region.in_use;
    dropped = drop(region.begin());
    return true;
  }

 private:
  std::shared_ptr<Region> drop(char* begin) {
    auto found = regions_.find(begin);
    if (found == regions_.end() || found->second->passes > 0 || found->second->in_use > 0) {
      return nullptr;
    }
    auto dropped = std::move(found->second);
    regions_.erase(found);
    --count_;
    return dropped;
  }

  std::mutex mutex_;
  std::map<char*, std::shared_ptr<Region>> regions_;
  std::unordered_map<const void*, size_t> lent_;
  std::atomic<size_t> count_ = 0;
};

Registry& registry() {
  static auto& all = *new Registry; // arrays may outlive everything else
  return all;
}

class Passing : public mx::allocator::Allocator {
 public:
  mx::allocator::Buffer malloc(size_t size) override {
    return pass ? pass->take(size) : own_allocator().malloc(size);
  }
  void free(mx::allocator::Buffer buffer) override {
    if (!registry().free(buffer.ptr())) {
      own_allocator().free(buffer);
    }
  }
  size_t size(mx::allocator::Buffer buffer) const override {
    return own_allocator().size(buffer);
  }
  mx::allocator::Buffer make_buffer(void* pointer, size_t size) override {
    return own_allocator().make_buffer(pointer, size);
  }
  void release(mx::allocator::Buffer buffer) override {
    own_allocator().release(buffer);
  }
};

// The pages that lie in a buffer as a whole.
struct Pages {
  explicit Pages(char* data, size_t bytes)
      : begin(reinterpret_cast<char*>(rounded(reinterpret_cast<uintptr_t>(data), page))),
        end(reinterpret_cast<char*>(reinterpret_cast<uintptr_t>(data + bytes) / page * page)) {}
  char *begin, *end;
};

bool is_touched(Pages pages) {
#ifdef __linux__
  std::vector<unsigned char> resident(static_cast<size_t>(pages.end - pages.begin) / page);
  if (mincore(pages.begin, resident.size() * page, resident.data()) == 0) {
    return std::any_of(resident.begin(), resident.end(), [](unsigned char is) { return (is & 1) != 0; });
  }
#endif
  throw Refused("the system does not tell which memory has been written");
}

bool is_written(const char* begin, const char* end) {
  return std::any_of(begin, end, [](char byte) { return static_cast<unsigned char>(byte) != unwritten; });
}

} // namespace

void keep_own(mx::allocator::Allocator& (*own)()) {
  own_allocator = own;
}

mx::allocator::Allocator& allocator() {
  static auto& passing = *new Passing;
  return passing;
}

Allocations::Allocations() : learns_(true) {}

Allocations::Allocations(size_t bytes, std::vector<Place> places) : places_(std::move(places)), learns_(false) {
  if (auto block = last_block.lock(); block && block->bytes() >= bytes) {
    add(std::move(block));
    return;
  }
  auto block = mx::allocator::malloc(bytes + alignment);
  if (block.buffer().ptr() == nullptr) {
    throw std::bad_alloc();
  }
  own_bytes_ = bytes;
  add(std::make_shared<Region>(std::move(block)));
  last_block = regions_[0];
}

Allocations::~Allocations() {
  for (auto& region : regions_) {
    registry().close(region);
  }
}

Allocations::Scope::Scope(Allocations& allocations) {
  pass = &allocations;
}

Allocations::Scope::~Scope() {
  pass = nullptr;
}

void Allocations::next(size_t evaluation) {
  evaluation_ = evaluation;
}

size_t Allocations::order(size_t number) const {
  size_t order = 0;
  while (number > order && buffers_[number - order - 1].evaluation == buffers_[number].evaluation) {
    ++order;
  }
  return order;
}

char* Allocations::fixed() const {
  return regions_[0]->begin();
}

void Allocations::add(std::shared_ptr<Region> region) {
  registry().open(region);
  regions_.push_back(std::move(region));
}

char* Allocations::fresh(size_t bytes) {
  auto room = rounded(bytes, alignment) + alignment; // the number of bytes comes before
  if (left_ < room) {
    add(std::make_shared<Region>(std::max(chunk, rounded(room, page))));
    next_ = regions_.back()->begin();
    left_ = static_cast<size_t>(regions_.back()->end() - next_);
  }
  auto* data = next_ + alignment;
  next_ += room;
  left_ -= room;
  Pages pages(data, bytes);
  if (bytes <= small) {
    std::memset(data, unwritten, bytes);
  } else {
    std::memset(data, unwritten, static_cast<size_t>(pages.begin - data));
    std::memset(pages.end, unwritten, static_cast<size_t>(data + bytes - pages.end));
  }
  return data;
}

mx::allocator::Buffer Allocations::take(size_t bytes) {
  auto number = buffers_.size();
  char* data = nullptr;
  if (learns_) {
    data = fresh(bytes);
  } else {
    if (number >= places_.size() || places_[number].bytes != bytes) {
      throw Refused("a step that takes other memory when it is gone through again");
    }
    const auto& place = places_[number];
    if (place.home != nullptr) {
      data = const_cast<char*>(place.home->data<char>());
      registry().lend(data - sizeof(size_t));
    } else {
      data = regions_[0]->begin() + place.offset + alignment;
    }
  }
  if (!is_home(number)) {
    reinterpret_cast<size_t*>(data)[-1] = bytes;
    registry().take(regions_.back());
  }
  latest_[data] = number;
  buffers_.push_back({bytes, evaluation_, data});
  return mx::allocator::Buffer(data - sizeof(size_t));
}

size_t Allocations::find(const void* memory) const {
  auto found = latest_.find(static_cast<const char*>(memory) + sizeof(size_t));
  return found == latest_.end() ? never : found->second;
}

void Allocations::find_constants() {
  for (auto& buffer : buffers_) {
    auto *begin = buffer.data, *end = buffer.data + buffer.bytes;
    if (buffer.bytes <= small) {
      buffer.constant = is_written(begin, end);
    } else {
      Pages pages(begin, buffer.bytes);
      buffer.constant = is_written(begin, pages.begin) || is_written(pages.end, end) || is_touched(pages);
    }
  }
}

void Allocations::finish() const {
  if (buffers_.size() != places_.size()) {
    throw Refused("a step that takes less memory when it is gone through again");
  }
}

} // namespace faststep::tasks
