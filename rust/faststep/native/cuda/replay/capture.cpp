#include "cuda/replay/capture.hpp"

#include <algorithm>
#include <memory>
#include <utility>

#include "cuda/replay/driver.hpp"
#include "cuda/replay/encoder.hpp"
#include "cuda/replay/feed.hpp"
#include "cuda/replay/recorder.hpp"
#include "mlx/memory.h"

namespace faststep::replay {

namespace {

constexpr size_t all = size_t{1} << 60;

// While it lives, MLX keeps at most so many bytes of what is freed, whatever memory is in use.
class Keep {
 public:
  explicit Keep(size_t bytes) : cache_(mx::set_cache_limit(bytes)), memory_(mx::set_memory_limit(all)) {}
  ~Keep() {
    mx::set_cache_limit(cache_);
    mx::set_memory_limit(memory_);
  }
  Keep(const Keep&) = delete;
  Keep& operator=(const Keep&) = delete;

 private:
  size_t cache_, memory_;
};

} // namespace

Capture::Capture(Graph graph) : graph_(std::move(graph)), stream_(mx::default_stream(mx::Device::gpu)) {}

Capture::~Capture() {
  if (block_ != nullptr) {
    block_->end(); // before its buffers go
  }
  if (exec_ != nullptr) {
    driver().cuCtxSetCurrent(context_); // any thread may be the last to let go
    driver().cuStreamSynchronize(queue_);
    driver().cuGraphExecDestroy(exec_);
  }
}

void Capture::record(const std::vector<Recorded*>& learns, size_t) {
  auto& first = static_cast<Capture&>(*learns.at(0));
  feed_ = std::make_shared<Feed>(graph_.fed, graph_.results, stream_);
  first.feed_ = feed_; // both feed the graph with the same
  first.fold();
  fold();
  graph_.inputs.clear();
  record(first.learn());
}

// In a graph they would be branches of their own, which begin late and hold up the others.
void Capture::fold() const {
  ScalarsApart apart;
  replay::fold(graph_, stream_, [](const mx::Primitive& primitive) {
    return leaves_work_to_host(primitive.name());
  });
}

Learnt Capture::learn() {
  auto& encoder = encoder_of(stream_);
  mx::synchronize(stream_);
  check(driver().cuCtxGetCurrent(&context_), "cuCtxGetCurrent");
  mx::clear_cache();
  Keep none(0); // a buffer that is used again may be larger than what is asked for
  return Recorder(*this, encoder, nullptr, nullptr).learn();
}

void Capture::record(const Learnt& learnt) {
  auto& encoder = encoder_of(stream_);
  queue_ = encoder.stream();
  mx::synchronize(stream_);
  check(driver().cuCtxGetCurrent(&context_), "cuCtxGetCurrent");
  mx::clear_cache();
  Keep everything(all);
  block_ = std::make_unique<Block>(encoder, stream_, learnt.plan.bytes);
  {
    ScalarsApart apart;
    Recorder(*this, encoder, &learnt, block_.get()).record();
  }
  block_->end();
  check(driver().cuStreamSynchronize(queue_), "cuStreamSynchronize");
}

bool Capture::is_valid() const {
  if (failed_) {
    return false;
  }
  auto stays = [](const Fixed& fixed) { return memory_of(*fixed.data) == fixed.memory; };
  return std::all_of(fixed_.begin(), fixed_.end(), stays);
}

// Evaluated arrays that lie row after row have their values when the stream comes to what is submitted next.
void settle(const std::vector<mx::array>& arrays, Encoder& encoder, mx::Stream stream) {
  for (auto array : arrays) {
    if (!array.flags().row_contiguous || array.status() == mx::array::Status::unscheduled) {
      throw std::logic_error("a replay copies evaluated arrays that lie row after row");
    }
    bool there = array.is_available(); // throws where its evaluation has failed
    if (!there && array.event().valid() && array.event().stream() != stream) {
      array.wait(); // libmlx does not export what lets a stream wait
    }
  }
  if (encoder.node_count_ > 0) {
    commit(encoder);
  }
}

void copy(const std::vector<mx::array>& from, const std::vector<mx::array>& into, mx::Stream stream) {
  auto& encoder = encoder_of(stream);
  settle(from, encoder, stream);
  for (size_t i = 0; i < from.size(); ++i) {
    if (from[i].nbytes() != into[i].nbytes()) {
      throw std::logic_error("a replay copies arrays of one size");
    }
    if (from[i].nbytes() > 0) {
      auto target = device_pointer(address_of(into[i])), source = device_pointer(address_of(from[i]));
      check(driver().cuMemcpyAsync(target, source, into[i].nbytes(), encoder.stream()), "cuMemcpyAsync");
      encoder.add_temporary(from[i]);
    }
  }
}

} // namespace faststep::replay
