#include "cuda/replay/exchange.hpp"

#include "cuda/replay/capture.hpp"
#include "cuda/replay/driver.hpp"
#include "cuda/replay/encoder.hpp"
#include "cuda/replay/launch.hpp"
#include "mlx/distributed/distributed_impl.h"

namespace faststep::replay {

Exchange::Exchange(size_t count) : made_(count) {
  constexpr unsigned no_timing = 2; // CU_EVENT_DISABLE_TIMING
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

mx::array Exchange::sum(const mx::distributed::Group& group, std::vector<mx::array> arrays) const {
  auto stream = mx::default_stream(mx::Device::gpu), beside = communication_stream(group);
  return submit(stream, [&](Encoder& encoder) {
    settle({}, encoder, stream);
    CUstream queue = encoder_of(beside).stream();
    for (size_t i = 0; i < arrays.size(); ++i) {
      check(driver().cuStreamWaitEvent(queue, made(i), 0), "cuStreamWaitEvent");
      group.raw_group()->all_sum(arrays[i], arrays[i], beside);
    }
    check(driver().cuEventRecord(done_, queue), "cuEventRecord");
    check(driver().cuStreamWaitEvent(encoder.stream(), done_, 0), "cuStreamWaitEvent");
  });
}

} // namespace faststep::replay
