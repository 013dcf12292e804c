#include "cuda/replay/capture.hpp"

#include <algorithm>
#include <cstdint>
#include <iterator>
#include <memory>
#include <string_view>
#include <unordered_map>
#include <utility>

#include "cuda/replay/driver.hpp"
#include "cuda/replay/encoder.hpp"
#include "cuda/replay/feed.hpp"
#include "cuda/replay/recorder.hpp"
#include "mlx/memory.h"
#include "status.hpp"

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

Capture::Capture(
    std::vector<mx::array> results,
    std::vector<mx::array> from,
    std::vector<mx::array> into,
    std::vector<mx::array> fed,
    const std::vector<mx::array>& inputs)
    : results_(std::move(results)),
      from_(std::move(from)),
      into_(std::move(into)),
      fed_(std::move(fed)),
      stream_(mx::default_stream(mx::Device::gpu)) {
  for (const auto& list : {into_, fed_, inputs}) {
    for (const auto& array : list) {
      inputs_.insert(array.data_shared_ptr().get());
    }
  }
}

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

void Capture::begin() {
  feed_ = std::make_shared<Feed>(fed_, results_, stream_);
}

void Capture::share(Capture& other) {
  other.feed_ = feed_;
}

// In a graph they would be branches of their own, which begin late and hold up the others.
void Capture::fold() {
  constexpr size_t small = size_t{1} << 20; // what they leave takes memory between launches
  auto is_lazy = [](const mx::array& array) { return array.status() == mx::array::Status::unscheduled; };
  std::unordered_map<std::uintptr_t, bool> same; // by array
  auto is_same = [&](const mx::array& array) {
    return is_lazy(array) ? same.at(array.id()) : !inputs_.contains(array.data_shared_ptr().get());
  };
  auto is_small = [](const mx::array& array) { return array.nbytes() <= small; };
  std::vector<mx::array> folded;
  std::vector<std::pair<mx::array, size_t>> todo;
  for (const auto* roots : {&results_, &from_}) {
    for (const auto& root : *roots) {
      todo.emplace_back(root, 0);
    }
  }
  while (!todo.empty()) {
    auto& [array, next] = todo.back();
    if (!is_lazy(array) || same.contains(array.id())) {
      todo.pop_back();
      continue;
    }
    if (next < array.inputs().size()) {
      auto in = array.inputs()[next++];
      todo.emplace_back(std::move(in), 0);
      continue;
    }
    auto outputs = array.outputs();
    const auto& inputs = array.inputs();
    bool stays = array.primitive().stream() == stream_ && !leaves_work_to_host(array.primitive().name()) &&
        std::all_of(outputs.begin(), outputs.end(), is_small) && std::all_of(inputs.begin(), inputs.end(), is_same);
    for (const auto& in : inputs) {
      if (!stays && is_lazy(in) && is_same(in)) {
        folded.push_back(in);
      }
    }
    for (const auto& out : outputs) {
      same[out.id()] = stays;
    }
    todo.pop_back();
  }
  if (!folded.empty()) {
    ScalarsApart apart;
    mx::eval(folded);
  }
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

using faststep::replay::Capture;

int faststep_replay_new(
    const void* const* results,
    size_t n_results,
    const void* const* from,
    const void* const* into,
    size_t n_carried,
    const void* const* fed,
    size_t n_fed,
    const void* const* inputs,
    size_t n_inputs,
    void** capture) {
  return faststep::guarded([&] {
    *capture = new Capture(
        faststep::list(results, n_results),
        faststep::list(from, n_carried),
        faststep::list(into, n_carried),
        faststep::list(fed, n_fed),
        faststep::list(inputs, n_inputs));
  });
}

int faststep_replay_record(void* learns, void* capture, faststep::CaptureInfo* info) {
  return faststep::guarded([&] {
    auto &to_learn = *static_cast<Capture*>(learns), &to_record = *static_cast<Capture*>(capture);
    to_record.begin();
    to_record.share(to_learn);
    to_learn.fold();
    to_record.fold();
    to_record.record(to_learn.learn());
    *info = to_record.info;
  });
}

int faststep_replay_is_valid(const void* capture) noexcept {
  return static_cast<const Capture*>(capture)->is_valid();
}

int faststep_replay_copy(const void* const* from, const void* const* into, size_t count) {
  return faststep::guarded([&] {
    auto stream = mlx::core::default_stream(mlx::core::Device::gpu);
    faststep::replay::copy(faststep::list(from, count), faststep::list(into, count), stream);
  });
}

int faststep_replay_is_own(const void* array) noexcept {
  const auto& result = faststep::at(array);
  if (result.status() != mlx::core::array::Status::unscheduled || !result.has_primitive()) {
    return false;
  }
  std::string_view name = result.primitive().name();
  constexpr std::string_view names[] = {"Add", "CustomKernel", "Divide", "LogicalNot", "Multiply", "Select", "Sqrt", "Sum"};
  auto is = [name](std::string_view other) { return name == other; };
  return name.starts_with("Compiled") || std::any_of(std::begin(names), std::end(names), is);
}

int faststep_replay_scalars_apart(void** apart) {
  return faststep::guarded([&] {
    if (*apart == nullptr) {
      *apart = new faststep::replay::ScalarsApart;
    } else {
      delete static_cast<faststep::replay::ScalarsApart*>(*apart);
    }
  });
}

void faststep_replay_free(void* capture) noexcept {
  delete static_cast<Capture*>(capture);
}
