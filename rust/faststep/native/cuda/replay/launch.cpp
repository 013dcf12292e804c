// A capture is launched as an operation of MLX: what it reads is evaluated before it, and what it gives has events, as all
// arrays have.
#include <cstdint>
#include <exception>

#include "cuda/replay/capture.hpp"
#include "cuda/replay/driver.hpp"
#include "cuda/replay/encoder.hpp"
#include "cuda/replay/scalars.hpp"
#include "status.hpp"

namespace faststep::replay {

class Launch : public mx::Primitive {
 public:
  Launch(mx::Stream stream, const Capture& capture, std::vector<mx::array> into, std::vector<mx::array> results)
      : Primitive(stream), capture_(capture), into_(std::move(into)), results_(std::move(results)) {}

  void eval_cpu(const std::vector<mx::array>&, std::vector<mx::array>&) override {
    throw std::logic_error("a capture is launched on a GPU");
  }

  // An error is kept for whoever launches: MLX would leave events behind that nobody signals.
  void eval_gpu(const std::vector<mx::array>& inputs, std::vector<mx::array>& outputs) override {
    auto& encoder = encoder_of(stream());
    for (auto& out : outputs) {
      out.set_data(scalar());
      encoder.add_temporary(out);
    }
    try {
      copy(inputs, into_, stream());
      check(driver().cuGraphLaunch(capture_.exec_, capture_.queue_), "cuGraphLaunch");
      for (size_t i = 0; i < results_.size(); ++i) {
        auto from = device_pointer(address_of(results_[i])), to = device_pointer(address_of(outputs[i]));
        check(driver().cuMemcpyAsync(to, from, outputs[i].nbytes(), capture_.queue_), "cuMemcpyAsync");
      }
    } catch (...) {
      error = std::current_exception();
    }
  }

  const char* name() const override {
    return "Launch";
  }

  std::exception_ptr error;

 private:
  const Capture& capture_;
  std::vector<mx::array> into_, results_;
};

std::vector<mx::array> Capture::launch(
    std::vector<mx::array> from, std::vector<mx::array> into, const std::vector<size_t>& results) {
  std::vector<mx::array> copied;
  std::vector<mx::Shape> shapes;
  std::vector<mx::Dtype> dtypes;
  for (auto i : results) {
    copied.push_back(results_.at(i));
    shapes.push_back(copied.back().shape());
    dtypes.push_back(copied.back().dtype());
  }
  if (results.empty()) { // nothing but the event
    shapes.emplace_back();
    dtypes.push_back(mx::bool_);
  }
  auto launch = std::make_shared<Launch>(stream_, *this, std::move(into), std::move(copied));
  auto outputs = mx::array::make_arrays(std::move(shapes), dtypes, launch, std::move(from));
  mx::async_eval(outputs);
  if (launch->error) {
    std::rethrow_exception(launch->error);
  }
  return outputs;
}

namespace {

// A stream of the GPU that any thread may use, beside the thread's own.
mx::Stream shared_stream() {
  static const mx::Stream stream = mx::new_thread_unsafe_stream(mx::Device::gpu);
  return stream;
}

} // namespace

} // namespace faststep::replay

using faststep::at;
using faststep::replay::Capture;

int faststep_replay_launch(
    void* capture,
    const void* const* from,
    const void* const* into,
    size_t count,
    const size_t* results,
    size_t n_results,
    const void* done,
    void** launched) {
  return faststep::guarded([&] {
    auto outputs = static_cast<Capture*>(capture)->launch(
        faststep::list(from, count), faststep::list(into, count), {results, results + n_results});
    at(done).attach_event(outputs[0].event());
    for (size_t i = 0; i < outputs.size(); ++i) {
      launched[i] = faststep::owned(outputs[i]);
    }
  });
}

int faststep_replay_shown(const void* place, const void* done, void** shown) {
  return faststep::guarded([&] {
    *shown = faststep::owned(mx::where(at(done), at(place), at(place), faststep::replay::shared_stream()));
  });
}

int faststep_replay_share_stream(int* index) {
  return faststep::guarded([&] {
    auto before = mx::default_stream(mx::Device::gpu);
    mx::set_default_stream(*index < 0 ? faststep::replay::shared_stream() : mx::Stream(*index, mx::Device::gpu));
    *index = before.index;
  });
}

int faststep_replay_wait(const void* array) {
  return faststep::guarded([&] {
    auto shown = at(array);
    if (shown.status() != mx::array::Status::unscheduled && shown.event().valid()) {
      shown.wait();
    }
  });
}

int faststep_replay_untouched(
    const void* const* arrays, const size_t* ids, const size_t* holders, size_t count) noexcept {
  for (size_t i = 0; i < count; ++i) {
    bool stays = holders[i] == 0 ||
        (faststep_array_is_lazy(arrays[i]) && faststep_array_holders(arrays[i]) <= holders[i]);
    if (faststep_array_id(arrays[i]) != ids[i] || !stays) {
      return 0;
    }
  }
  return 1;
}
