#include "cuda/replay/exchange.hpp"

#include <algorithm>
#include <optional>

#include "cuda/replay/capture.hpp"
#include "cuda/replay/driver.hpp"
#include "cuda/replay/encoder.hpp"
#include "cuda/replay/launch.hpp"
#include "mlx/distributed/distributed_impl.h"

namespace faststep::replay {

namespace {

constexpr unsigned no_timing = 2, blocking_wait = 1; // CU_EVENT_DISABLE_TIMING, CU_EVENT_BLOCKING_SYNC

// Numbers of this thread, on pages of the host and on the device.
struct Numbers {
  explicit Numbers(size_t count) : on_device(mx::zeros({static_cast<int>(count)}, mx::float32, mx::Device::gpu)) {
    constexpr unsigned portable = 1; // CU_MEMHOSTALLOC_PORTABLE
    on_device.eval();
    void* memory = nullptr;
    check(driver().cuMemHostAlloc(&memory, count * sizeof(float), portable), "cuMemHostAlloc");
    on_host = static_cast<float*>(memory);
    check(driver().cuEventCreate(&summed, no_timing | blocking_wait), "cuEventCreate");
  }
  ~Numbers() {
    driver().cuEventDestroy(summed);
    driver().cuMemFreeHost(on_host);
  }
  Numbers(const Numbers&) = delete;
  Numbers& operator=(const Numbers&) = delete;

  mx::array on_device;
  float* on_host = nullptr;
  CUevent summed = nullptr;
};

} // namespace

mx::Stream communication_stream(const mx::distributed::Group& group) {
  auto own = group.raw_group()->communication_stream({});
  if (own.device == mx::Device::cpu) {
    return own;
  }
  thread_local const auto beside = mx::new_stream(mx::Device::gpu);
  return beside;
}

void sum_numbers(const mx::distributed::Group& group, float* numbers, size_t count) {
  thread_local std::optional<Numbers> known;
  if (!known || known->on_device.size() != count) {
    known.emplace(count);
  }
  auto beside = communication_stream(group);
  auto* queue = queue_of(beside);
  auto bytes = count * sizeof(float);
  auto host = device_pointer(known->on_host), device = device_pointer(address_of(known->on_device));
  std::copy_n(numbers, count, known->on_host);
  check(driver().cuMemcpyAsync(device, host, bytes, queue), "cuMemcpyAsync");
  group.raw_group()->all_sum(known->on_device, known->on_device, beside);
  check(driver().cuMemcpyAsync(host, device, bytes, queue), "cuMemcpyAsync");
  check(driver().cuEventRecord(known->summed, queue), "cuEventRecord");
  check(driver().cuEventSynchronize(known->summed), "cuEventSynchronize");
  std::copy_n(known->on_host, count, numbers);
}

Exchange::Exchange(size_t count) : made_(count) {
  check(driver().cuCtxGetCurrent(&context_), "cuCtxGetCurrent");
  for (auto& event : made_) {
    check(driver().cuEventCreate(&event, no_timing), "cuEventCreate");
  }
  check(driver().cuEventCreate(&done_, no_timing), "cuEventCreate");
}

Exchange::~Exchange() {
  driver().cuCtxSetCurrent(context_); // any thread may be the last to let go
  for (auto event : made_) {
    driver().cuEventDestroy(event);
  }
  driver().cuEventDestroy(done_);
}

mx::array Exchange::beside(
    const mx::distributed::Group& group, std::function<void(CUstream, mx::Stream)> sums, bool waits) const {
  auto stream = mx::default_stream(mx::Device::gpu), beside = communication_stream(group);
  return submit(stream, [&](Encoder& encoder) {
    settle({}, encoder, stream);
    auto* queue = queue_of(beside);
    if (waits) {
      check(driver().cuEventRecord(done_, encoder.stream()), "cuEventRecord");
      check(driver().cuStreamWaitEvent(queue, done_, 0), "cuStreamWaitEvent");
    }
    sums(queue, beside);
    check(driver().cuEventRecord(done_, queue), "cuEventRecord");
    check(driver().cuStreamWaitEvent(encoder.stream(), done_, 0), "cuStreamWaitEvent");
  });
}

mx::array Exchange::sum(const mx::distributed::Group& group, std::vector<mx::array> arrays, bool in_order) const {
  auto sums = [&](CUstream queue, mx::Stream beside) {
    for (size_t i = 0; i < arrays.size(); ++i) {
      auto number = in_order ? order_.at(i) : i;
      check(driver().cuStreamWaitEvent(queue, made(number), 0), "cuStreamWaitEvent");
      group.raw_group()->all_sum(arrays[number], arrays[number], beside);
    }
  };
  return beside(group, sums, false);
}

mx::array Exchange::gather(const mx::distributed::Group& group, std::vector<mx::array> arrays, const bool* own) const {
  auto sums = [&](CUstream queue, mx::Stream beside) {
    for (size_t i = 0; i < arrays.size(); ++i) {
      if (!own[i]) {
        auto place = device_pointer(address_of(arrays[i]));
        check(driver().cuMemsetD8Async(place, 0, arrays[i].nbytes(), queue), "cuMemsetD8Async");
      }
      group.raw_group()->all_sum(arrays[i], arrays[i], beside);
    }
  };
  return beside(group, sums, true);
}

} // namespace faststep::replay
