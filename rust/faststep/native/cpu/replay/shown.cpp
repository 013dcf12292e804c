// Copies of static arrays, which any thread may evaluate.
#include <pthread.h>

#include <atomic>
#include <cstring>
#include <memory>
#include <mutex>
#include <optional>
#include <shared_mutex>
#include <utility>

#include "cpu/on_cpu.hpp"
#include "cpu/replay/capture.hpp"
#include "mlx/backend/cpu/encoder.h"

namespace faststep::tasks {

// All of it is read and written behind the gate.
struct Source {
  Source(std::shared_ptr<Gate> gate, mx::array place) : gate(std::move(gate)), place(std::move(place)) {}

  const mx::array& value() const {
    return kept ? *kept : place;
  }

  std::shared_ptr<Gate> gate;
  mx::array place; // that is static
  std::optional<mx::array> kept; // what was there, once that has been or will be written over
  std::atomic<bool> done = false; // the copy has been made
};

namespace {

mx::array copy_of(const mx::array& array) {
  mx::array copy(mx::allocator::malloc(array.nbytes()), array.shape(), array.dtype());
  tasks::copy({array}, {copy});
  return copy;
}

class Shown : public OnCpu {
 public:
  Shown(mx::Stream stream, std::shared_ptr<Source> source) : OnCpu(stream), source_(std::move(source)) {}

  void eval_cpu(const std::vector<mx::array>&, mx::array& out) override {
    out.set_data(mx::allocator::malloc(out.nbytes()));
    auto copy = [source = source_, to = out.data<char>(), bytes = out.nbytes()] {
      std::shared_lock open(source->gate->mutex);
      std::memcpy(to, source->value().data<char>(), bytes);
      source->done = true;
    };
    mx::cpu::get_command_encoder(stream()).dispatch(std::move(copy));
  }

  bool is_equivalent(const mx::Primitive&) const override {
    return false; // there may be a launch between two
  }

  const char* name() const override {
    return "Shown";
  }

 private:
  std::shared_ptr<Source> source_;
};

std::atomic<int> shared_index = -1;
std::atomic<bool> is_child = false;

} // namespace

mx::Stream shared_stream() {
  static const mx::Stream stream = [] {
    auto made = mx::new_thread_unsafe_stream(mx::Device::cpu);
    shared_index = made.index;
    pthread_atfork(nullptr, nullptr, [] { is_child = true; });
    return made;
  }();
  return stream;
}

bool has_lost_worker(mx::Stream stream) {
  return is_child && stream.device == mx::Device::cpu && stream.index == shared_index;
}

std::shared_ptr<Source> source_of(const mx::array& place, std::shared_ptr<Gate> gate) {
  return std::make_shared<Source>(std::move(gate), place);
}

mx::array shown(const std::shared_ptr<Source>& source) {
  const auto& place = source->place;
  return mx::array(place.shape(), place.dtype(), std::make_shared<Shown>(shared_stream(), source), {place});
}

void preserve(Source& source) {
  if (!source.done && !source.kept) {
    source.kept = copy_of(source.place);
  }
}

mx::array value_of(Source& source) {
  preserve(source);
  return source.kept ? *source.kept : copy_of(source.place);
}

bool is_over(const Source& source) {
  return source.done || source.kept;
}

} // namespace faststep::tasks
