// A capture is launched as an operation of MLX, whose event is that of all that it gives.
#include <algorithm>
#include <cstdint>
#include <exception>
#include <iterator>

#include "cuda/replay/capture.hpp"
#include "cuda/replay/driver.hpp"
#include "cuda/replay/encoder.hpp"
#include "cuda/replay/feed.hpp"
#include "cuda/replay/launch.hpp"

namespace faststep::replay {

namespace {

// It has no inputs, and one output without memory: for those MLX would have a thread of its own wait.
class Launch : public mx::UnaryPrimitive {
 public:
  Launch(mx::Stream stream, std::function<void(Encoder&)> launch) : UnaryPrimitive(stream), launch_(std::move(launch)) {}

  void eval_cpu(const std::vector<mx::array>&, mx::array&) override {
    throw std::logic_error("a capture is launched on a GPU");
  }

  // An error is kept for whoever launches: MLX would leave events behind that nobody signals.
  void eval_gpu(const std::vector<mx::array>&, mx::array&) override {
    // nor does it get memory, which a thread would wait to free
    try {
      launch_(encoder_of(stream()));
    } catch (...) {
      error = std::current_exception();
    }
  }

  const char* name() const override {
    return "Launch";
  }

  std::exception_ptr error;

 private:
  std::function<void(Encoder&)> launch_;
};

} // namespace

mx::array submit(mx::Stream stream, std::function<void(Encoder&)> work) {
  auto launch = std::make_shared<Launch>(stream, std::move(work));
  mx::array done(mx::Shape{}, mx::bool_, launch, {});
  mx::async_eval({done});
  if (launch->error) {
    std::rethrow_exception(launch->error);
  }
  return done;
}

std::vector<mx::array> Capture::launch(const std::vector<mx::array>& from, const std::vector<mx::array>& into, Runner) {
  std::vector<mx::array> lazy, fed, fed_into, copied, copied_into, given;
  auto is_lazy = [](const mx::array& array) { return array.status() == mx::array::Status::unscheduled; };
  std::copy_if(from.begin(), from.end(), std::back_inserter(lazy), is_lazy);
  if (!lazy.empty()) {
    mx::async_eval(lazy);
  }
  for (size_t i = 0; i < from.size(); ++i) {
    bool feeds = feed_->takes(from[i], into[i]);
    (feeds ? fed : copied).push_back(from[i]);
    (feeds ? fed_into : copied_into).push_back(into[i]);
  }
  auto done = submit(stream_, [&](Encoder& encoder) {
    settle(fed, encoder, stream_);
    if (!copied.empty()) {
      copy(copied, copied_into, stream_);
    }
    given = feed_->next(fed, fed_into, queue_);
    failed_ = true; // the graph may have read what it is fed with already
    check(driver().cuGraphLaunch(exec_, queue_), "cuGraphLaunch");
    failed_ = false;
    feed_->launched();
  });
  std::vector<mx::array> outputs{std::move(done)};
  for (auto& result : given) {
    result.set_status(mx::array::Status::evaluated);
    result.attach_event(outputs[0].event());
    outputs.push_back(std::move(result));
  }
  return outputs;
}

} // namespace faststep::replay
