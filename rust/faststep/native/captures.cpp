// The calls from Rust: by the default device, or a group's, to what records there or exchanges.
#include <algorithm>
#include <cstring>
#include <iterator>
#include <memory>
#include <mutex>
#include <stdexcept>
#include <string_view>
#include <utility>

#include "cpu/replay/capture.hpp"
#include "cuda/replay/capture.hpp"
#include "cuda/replay/exchange.hpp"
#include "group.hpp"
#include "mlx/distributed/ops.h"
#include "replay/capture.hpp"
#include "status.hpp"

namespace faststep::replay {

size_t learning_passes() {
  return faststep_is_cuda() ? 1 : 2;
}

namespace {

// A stream that any thread may use, beside the thread's own.
mx::Stream shared_stream() {
  if (!faststep_is_cuda()) {
    return tasks::shared_stream();
  }
  static const mx::Stream stream = mx::new_thread_unsafe_stream(mx::Device::gpu);
  return stream;
}

Recorded& recorded(void* capture) {
  return *static_cast<Recorded*>(capture);
}

std::shared_ptr<Gate>& gate_of(void* gate) {
  return *static_cast<std::shared_ptr<Gate>*>(gate);
}

const std::shared_ptr<Exchange>& exchange_at(const void* exchange) {
  return *static_cast<const std::shared_ptr<Exchange>*>(exchange);
}

} // namespace

} // namespace faststep::replay

namespace mx = mlx::core;
using faststep::at;
using faststep::replay::exchange_at;
using faststep::replay::gate_of;
using faststep::replay::Exchange;
using faststep::replay::Recorded;
using Source = std::shared_ptr<faststep::tasks::Source>;

int faststep_is_cpu() noexcept {
  return mx::default_device() == mx::Device::cpu;
}

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
    const void* const* summed,
    size_t n_summed,
    const void* exchange,
    void** capture) {
  return faststep::guarded([&] {
    faststep::replay::Graph graph{
        faststep::list(results, n_results),
        faststep::list(from, n_carried),
        faststep::list(into, n_carried),
        faststep::list(fed, n_fed),
        faststep::list(inputs, n_inputs),
        faststep::list(summed, n_summed),
        exchange ? exchange_at(exchange) : nullptr};
    std::unique_ptr<Recorded> made;
    if (faststep_is_cuda()) {
      made = std::make_unique<faststep::replay::Capture>(std::move(graph));
    } else {
      made = std::make_unique<faststep::tasks::Capture>(std::move(graph));
    }
    *capture = made.release();
  });
}

size_t faststep_replay_learning_passes() noexcept {
  return faststep::replay::learning_passes();
}

int faststep_replay_record(
    void* const* learns, size_t count, size_t threads, void* capture, faststep::CaptureInfo* info) {
  return faststep::guarded([&] {
    std::vector<Recorded*> others;
    std::transform(learns, learns + count, std::back_inserter(others), [](void* it) { return static_cast<Recorded*>(it); });
    auto& recorded = faststep::replay::recorded(capture);
    recorded.record(others, threads);
    *info = recorded.info;
  });
}

int faststep_replay_is_valid(const void* capture) noexcept {
  return static_cast<const Recorded*>(capture)->is_valid();
}

void faststep_replay_free(void* capture) noexcept {
  delete static_cast<Recorded*>(capture);
}

int faststep_replay_launch(
    void* capture,
    const void* const* from,
    const void* const* into,
    size_t count,
    void* gate,
    void (*run)(const void* context),
    const void* context,
    void** launched,
    size_t room,
    size_t* given) {
  return faststep::guarded([&] {
    auto sources = faststep::list(from, count), places = faststep::list(into, count);
    auto outputs = faststep::replay::recorded(capture).launch(sources, places, {run, context});
    gate_of(gate)->done.attach_event(outputs[0].event());
    *given = std::min(room, outputs.size());
    std::transform(outputs.begin(), outputs.begin() + *given, launched, faststep::owned);
  });
}

size_t faststep_replay_units(const void* capture) noexcept {
  return static_cast<const Recorded*>(capture)->units.size();
}

size_t faststep_replay_waits(const void* capture, size_t unit, const size_t** others) noexcept {
  const auto& waits = static_cast<const Recorded*>(capture)->units[unit];
  *others = waits.data();
  return waits.size();
}

int faststep_replay_run_unit(void* capture, size_t unit) noexcept {
  return faststep::replay::recorded(capture).run_unit(unit);
}

int faststep_replay_exchange_new(size_t count, void** exchange) {
  return faststep::guarded([&] { *exchange = new std::shared_ptr<Exchange>(std::make_shared<Exchange>(count)); });
}

void faststep_replay_exchange_free(void* exchange) noexcept {
  delete static_cast<std::shared_ptr<Exchange>*>(exchange);
}

int faststep_replay_exchange(
    const void* exchange, const void* group, const void* const* arrays, size_t count, int in_order, void* gate) {
  return faststep::guarded([&] {
    auto done = exchange_at(exchange)->sum(faststep::group_at(group), faststep::list(arrays, count), in_order != 0);
    gate_of(gate)->done.attach_event(done.event());
  });
}

int faststep_replay_gather(
    const void* exchange, const void* group, const void* const* arrays, size_t count, const bool* own, void* gate) {
  return faststep::guarded([&] {
    auto done = exchange_at(exchange)->gather(faststep::group_at(group), faststep::list(arrays, count), own);
    gate_of(gate)->done.attach_event(done.event());
  });
}

size_t faststep_replay_order(const void* exchange, const size_t** order) noexcept {
  const auto& known = exchange_at(exchange)->order();
  *order = known.data();
  return known.size();
}

int faststep_replay_gate_new(void** gate) {
  return faststep::guarded([&] {
    auto made = std::make_unique<std::shared_ptr<faststep::replay::Gate>>(std::make_shared<faststep::replay::Gate>());
    *gate = made.release();
  });
}

void faststep_replay_gate_free(void* gate) noexcept {
  delete &gate_of(gate);
}

// A device's own queue keeps the order.
void faststep_replay_gate_close(void* gate) noexcept {
  if (!faststep_is_cuda()) {
    gate_of(gate)->mutex.lock();
  }
}

void faststep_replay_gate_open(void* gate) noexcept {
  if (!faststep_is_cuda()) {
    gate_of(gate)->mutex.unlock();
  }
}

int faststep_replay_shown(const void* place, void* gate, void** shown, void** source) {
  return faststep::guarded([&] {
    const auto& array = at(place);
    if (faststep_is_cuda()) {
      *shown = faststep::owned(mx::where(gate_of(gate)->done, array, array, faststep::replay::shared_stream()));
      *source = nullptr;
    } else {
      auto made = std::make_unique<Source>(faststep::tasks::source_of(array, gate_of(gate)));
      *shown = faststep::owned(faststep::tasks::shown(*made));
      *source = made.release();
    }
  });
}

int faststep_replay_preserve(void* source) {
  return faststep::guarded([&] { faststep::tasks::preserve(**static_cast<Source*>(source)); });
}

int faststep_replay_value(void* source, void** value) {
  return faststep::guarded([&] { *value = faststep::owned(faststep::tasks::value_of(**static_cast<Source*>(source))); });
}

int faststep_replay_is_over(const void* source) noexcept {
  return faststep::tasks::is_over(**static_cast<const Source*>(source));
}

void faststep_replay_source_free(void* source) noexcept {
  delete static_cast<Source*>(source);
}

int faststep_replay_share_stream(int* index) {
  return faststep::guarded([&] {
    auto device = faststep_is_cuda() ? mx::Device::gpu : mx::Device::cpu;
    auto before = mx::default_stream(device);
    mx::set_default_stream(*index < 0 ? faststep::replay::shared_stream() : mx::Stream(*index, device));
    *index = before.index;
  });
}

int faststep_replay_copy(const void* const* from, const void* const* into, size_t count) {
  return faststep::guarded([&] {
    auto sources = faststep::list(from, count), places = faststep::list(into, count);
    if (faststep_is_cuda()) {
      faststep::replay::copy(sources, places, mx::default_stream(mx::Device::gpu));
    } else {
      faststep::tasks::copy(sources, places);
    }
  });
}

int faststep_replay_is_same(const void* array, const void* other, int* same) {
  return faststep::guarded([&] {
    auto a = at(array), b = at(other);
    for (auto* each : {&a, &b}) {
      each->eval();
      if (!each->flags().row_contiguous) {
        throw std::logic_error("expected arrays that lie row after row");
      }
    }
    *same = a.nbytes() == b.nbytes() && std::memcmp(a.data<char>(), b.data<char>(), a.nbytes()) == 0;
  });
}

int faststep_replay_scalars_apart(void** apart) {
  return faststep::guarded([&] {
    if (!faststep_is_cuda()) {
      return; // a host's memory is where the step is computed
    }
    if (*apart == nullptr) {
      *apart = new faststep::replay::ScalarsApart;
    } else {
      delete static_cast<faststep::replay::ScalarsApart*>(*apart);
    }
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

int faststep_replay_is_ready(const void* array) noexcept {
  try {
    return at(array).is_available();
  } catch (const std::exception&) { // which whoever waits gets
    return false;
  }
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

int faststep_group_sum(const void* group, const void* array, size_t message, void** sum) {
  return faststep::guarded([&] {
    const auto& ranks = faststep::group_at(group);
    auto stream = faststep::replay::communication_stream(ranks);
    const auto& whole = at(array);
    bool in_one = stream.device == mx::Device::gpu || message == 0 || message >= whole.size();
    *sum = faststep::owned(
        in_one ? mx::distributed::all_sum(whole, ranks, stream) : faststep::in_messages(ranks, whole, message, stream));
  });
}

int faststep_group_sum_numbers(const void* group, float* numbers, size_t count) {
  return faststep::guarded([&] {
    const auto& ranks = faststep::group_at(group);
    auto stream = faststep::replay::communication_stream(ranks);
    if (stream.device == mx::Device::gpu) {
      faststep::replay::sum_numbers(ranks, numbers, count);
      return;
    }
    auto sum = mx::distributed::all_sum(mx::array(numbers, {static_cast<int>(count)}), ranks, stream);
    sum.eval();
    std::copy_n(sum.data<float>(), count, numbers);
  });
}
