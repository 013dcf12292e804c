#include "cuda/replay/feed.hpp"

#include <algorithm>
#include <atomic>
#include <cstring>
#include <sstream>
#include <string>

#include "cuda/replay/driver.hpp"
#include "cuda/replay/encoder.hpp"
#include "cuda/replay/scalars.hpp"
#include "mlx/fast.h"

namespace faststep::replay {

namespace {

constexpr size_t ring = 64; // launches that may be under way
constexpr size_t head = 8; // words before the slots, of which the first is the number of launches that have given their results
constexpr size_t most_inputs = 1024, most_results = 16; // what is beyond that is copied as large arrays are
constexpr size_t most_bytes = size_t{1} << 20; // of an array; a copy of more takes longer than its call
constexpr size_t block_bytes = 4096;

// The table: how many arrays and results; of each array its first block, its address and its bytes; then the bytes of each
// result. A slot: where the arrays come from and the results go, and the number of the launch that it is for. The state: the
// number of launches before this one, the number of the launch of which the words are there, where this one's results go, and
// those words: reading the host's memory takes a few microseconds, so the last launch has read them where it could.
constexpr const char* in_source = R"(
  __shared__ int64_t plan[2 + 3 * 1024 + 16], now[18 + 1024 + 16], from;
  for (int i = threadIdx.x; i < table_shape[0]; i += 256) { plan[i] = table[i]; }
  for (int i = threadIdx.x; i < state_shape[0]; i += 256) { now[i] = reinterpret_cast<const volatile int64_t*>(state)[i]; }
  __syncthreads();
  int inputs = int(plan[0]), results = int(plan[1]);
  bool ready = now[1] == now[0] + 1;
  const volatile int64_t* slot = slots + 8 + (now[0] & 63) * (inputs + results + 1);
  if (blockIdx.x == 0 && threadIdx.x < results) {
    int at = inputs + threadIdx.x;
    const_cast<int64_t*>(state)[2 + threadIdx.x] = ready ? now[18 + at] : slot[at];
  }
  if (inputs == 0) { return; }
  int lo = 0, hi = inputs - 1;
  while (lo < hi) { // the array to which this block belongs
    int mid = (lo + hi + 1) / 2;
    if (plan[2 + 3 * mid] <= int64_t(blockIdx.x)) { lo = mid; } else { hi = mid - 1; }
  }
  const int64_t* entry = plan + 2 + 3 * lo;
  if (threadIdx.x == 0) { from = ready ? now[18 + lo] : slot[lo]; }
  __syncthreads();
  if (from == 0) { return; }
  int64_t begin = (blockIdx.x - entry[0]) * 4096, bytes = entry[2] - begin < 4096 ? entry[2] - begin : 4096;
  const char* source = reinterpret_cast<const char*>(from) + begin;
  char* target = reinterpret_cast<char*>(entry[1]) + begin;
  int64_t odd = from | entry[1] | bytes;
  if (odd % 16 == 0) {
    for (int i = threadIdx.x; i < bytes / 16; i += 256) {
      reinterpret_cast<uint4*>(target)[i] = reinterpret_cast<const uint4*>(source)[i];
    }
  } else if (odd % 4 == 0) {
    for (int i = threadIdx.x; i < bytes / 4; i += 256) {
      reinterpret_cast<uint32_t*>(target)[i] = reinterpret_cast<const uint32_t*>(source)[i];
    }
  } else {
    for (int i = threadIdx.x; i < bytes; i += 256) { target[i] = source[i]; }
  }
)";

std::string out_source() {
  std::ostringstream out;
  out << R"(
  __shared__ int64_t next, stamp;
  int64_t* own = const_cast<int64_t*>(state);
  int inputs = int(table[0]), results = int(table[1]), width = inputs + results;
  if (threadIdx.x < results) {
    const uint8_t* from = p0;
    switch (threadIdx.x) {
)";
  for (size_t i = 1; i < most_results; ++i) {
    out << "      case " << i << ": from = p" << i << "; break;\n";
  }
  out << R"(    }
    int bytes = int(table[2 + 3 * inputs + threadIdx.x]);
    volatile uint8_t* target = reinterpret_cast<uint8_t*>(own[2 + threadIdx.x]);
    if (bytes == 4) {
      *reinterpret_cast<volatile uint32_t*>(target) = *reinterpret_cast<const uint32_t*>(from);
    } else {
      for (int i = 0; i < bytes; ++i) { target[i] = from[i]; }
    }
  }
  __threadfence_system();
  __syncthreads();
  if (threadIdx.x == 0) {
    next = own[0] + 1;
    own[0] = next;
    *const_cast<volatile int64_t*>(slots) = next;
    stamp = reinterpret_cast<const volatile int64_t*>(slots)[8 + (next & 63) * (width + 1) + width];
    __threadfence_system();
  }
  __syncthreads();
  if (stamp != next + 1) { return; } // the host is not that far
  const volatile int64_t* slot = slots + 8 + (next & 63) * (width + 1);
  for (int i = threadIdx.x; i < width; i += 32) { own[18 + i] = slot[i]; }
  if (threadIdx.x == 0) { own[1] = stamp; }
)";
  return out.str();
}

// Memory of the host that the device reads and writes.
mx::array on_host(size_t words) {
  constexpr unsigned portable = 1, device_map = 2; // CU_MEMHOSTALLOC_PORTABLE, CU_MEMHOSTALLOC_DEVICEMAP
  void* memory = nullptr;
  size_t bytes = words * sizeof(std::uint64_t);
  check(driver().cuMemHostAlloc(&memory, bytes, portable | device_map), "cuMemHostAlloc");
  std::memset(memory, 0, bytes);
  auto give_back = [](mx::allocator::Buffer buffer) {
    auto* owned = static_cast<mx::cu::CudaBuffer*>(buffer.ptr());
    driver().cuMemFreeHost(owned->data);
    delete owned;
  };
  auto* buffer = new mx::cu::CudaBuffer{memory, bytes, -1};
  return mx::array({mx::allocator::Buffer(buffer), give_back}, {static_cast<int>(words)}, mx::int64);
}

// Words on the device.
mx::array on_device(const std::vector<std::int64_t>& words, mx::Stream stream) {
  auto array = mx::arange(0, static_cast<int>(words.size()), 1, mx::int64, stream);
  mx::eval(array);
  mx::synchronize(stream);
  auto target = device_pointer(address_of(array)), source = device_pointer(words.data());
  CUstream queue = encoder_of(stream).stream();
  check(driver().cuMemcpyAsync(target, source, array.nbytes(), queue), "cuMemcpyAsync");
  check(driver().cuStreamSynchronize(queue), "cuStreamSynchronize");
  return array;
}

mx::array bytes_of(const mx::array& array) {
  mx::array bytes(mx::Shape{static_cast<int>(array.nbytes())}, mx::uint8, nullptr, {});
  bytes.copy_shared_buffer(array, {1}, array.flags(), array.nbytes());
  return bytes;
}

// Has a kernel encode itself. The memory of what it gives is returned: there is nothing in it.
Data encode(
    const char* name,
    const std::vector<std::string>& names,
    const std::string& source,
    const std::vector<mx::array>& inputs,
    size_t blocks,
    int threads,
    mx::Stream stream) {
  auto kernel = mx::fast::cuda_kernel(name, names, {"nothing"}, source);
  std::tuple<int, int, int> grid{threads * static_cast<int>(blocks), 1, 1}, block{threads, 1, 1};
  auto made = kernel(inputs, {{2}}, {mx::int64}, grid, block, {}, std::nullopt, false, stream);
  made[0].primitive().eval_gpu(made[0].inputs(), made);
  return made[0].data_shared_ptr();
}

} // namespace

Feed::Feed(const std::vector<mx::array>& into, const std::vector<mx::array>& results, mx::Stream stream)
    : stream_(stream), slots_(on_host(1)), table_(slots_), state_(slots_) {
  for (const auto& array : into) {
    bool fits = array.nbytes() > 0 && array.nbytes() <= most_bytes && array.flags().row_contiguous;
    if (fits && into_.size() < most_inputs && !numbers_.contains(array.id())) {
      numbers_.emplace(array.id(), into_.size());
      into_.push_back(array);
    }
  }
  for (size_t i = 0; i < results.size() && small_.size() < most_results; ++i) {
    if (results[i].nbytes() <= scalar_bytes) {
      small_.push_back(i);
      kinds_.emplace_back(results[i].shape(), results[i].dtype());
    }
  }
  width_ = into_.size() + small_.size();
  std::vector<std::int64_t> table{static_cast<std::int64_t>(into_.size()), static_cast<std::int64_t>(small_.size())};
  blocks_ = 0;
  for (const auto& array : into_) {
    auto address = reinterpret_cast<std::int64_t>(address_of(array));
    table.insert(table.end(), {static_cast<std::int64_t>(blocks_), address, static_cast<std::int64_t>(array.nbytes())});
    blocks_ += (array.nbytes() + block_bytes - 1) / block_bytes;
  }
  for (auto i : small_) {
    table.push_back(static_cast<std::int64_t>(results[i].nbytes()));
  }
  blocks_ = std::max<size_t>(1, blocks_);
  slots_ = on_host(head + ring * (width_ + 1));
  table_ = on_device(table, stream);
  state_ = on_device(std::vector<std::int64_t>(2 + most_results + width_), stream);
}

Feed::Encoded Feed::encode_in() const {
  std::vector<std::string> names{"slots", "table", "state"};
  auto given = encode("faststep_feed_in", names, in_source, {slots_, table_, state_}, blocks_, 256, stream_);
  Encoded encoded{{table_.data_shared_ptr()}, {state_.data_shared_ptr(), std::move(given)}};
  for (const auto& array : into_) {
    encoded.writes.push_back(array.data_shared_ptr());
  }
  return encoded;
}

Feed::Encoded Feed::encode_out(const std::vector<mx::array>& results) const {
  std::vector<std::string> names{"slots", "table", "state"};
  std::vector<mx::array> inputs{slots_, table_, state_};
  Encoded encoded{{table_.data_shared_ptr()}, {state_.data_shared_ptr()}};
  for (size_t i = 0; i < most_results; ++i) {
    names.push_back(std::string("p").append(std::to_string(i)));
    inputs.push_back(bytes_of(i < small_.size() ? results[small_[i]] : state_));
  }
  for (auto i : small_) {
    encoded.reads.push_back(results[i].data_shared_ptr());
  }
  encoded.writes.push_back(encode("faststep_feed_out", names, out_source(), inputs, 1, 32, stream_));
  return encoded;
}

bool Feed::takes(const mx::array& from, const mx::array& into) const {
  return numbers_.contains(into.id()) && from.nbytes() == into.nbytes();
}

std::uint64_t Feed::done() const {
  return std::atomic_ref(*static_cast<std::uint64_t*>(memory_of(*slots_.data_shared_ptr())))
      .load(std::memory_order_acquire);
}

std::uint64_t* Feed::slot() const {
  return static_cast<std::uint64_t*>(memory_of(*slots_.data_shared_ptr())) + head + launches_ % ring * (width_ + 1);
}

std::vector<mx::array> Feed::next(
    const std::vector<mx::array>& from, const std::vector<mx::array>& into, CUstream queue) {
  if (launches_ - done() >= ring) {
    check(driver().cuStreamSynchronize(queue), "cuStreamSynchronize");
  }
  for (auto now = done(); !kept_.empty() && kept_.front().first <= now;) {
    kept_.pop_front();
  }
  auto* words = slot();
  std::fill_n(words, width_, 0);
  next_.clear();
  for (size_t i = 0; i < from.size(); ++i) {
    words[numbers_.at(into[i].id())] = device_pointer(address_of(from[i]));
    next_.push_back(from[i].data_shared_ptr());
  }
  std::vector<mx::array> given;
  given.reserve(small_.size());
  for (size_t i = 0; i < small_.size(); ++i) {
    const auto& result = given.emplace_back(scalar(), kinds_[i].first, kinds_[i].second);
    words[into_.size() + i] = device_pointer(address_of(result));
    next_.push_back(result.data_shared_ptr()); // whoever has it next is not to have it written then
  }
  std::atomic_ref(words[width_]).store(launches_ + 1, std::memory_order_release);
  return given;
}

void Feed::launched() {
  kept_.emplace_back(++launches_, std::move(next_));
  next_ = {};
}

} // namespace faststep::replay
