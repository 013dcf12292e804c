// Access to mlx::core::array that the step needs and mlx-c leaves out. Every pointer is an mlx::core::array, as in
// mlx_array.ctx.
#include <algorithm>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <stdexcept>
#include <iterator>
#include <memory>
#include <string_view>
#include <thread>
#include <unordered_set>
#include <utility>
#include <vector>

#include "mlx/backend/cpu/encoder.h"
#include "mlx/distributed/primitives.h"
#include "mlx/mlx.h"
#include "mlx/primitives.h"
#include "mlx/scheduler.h"
#include "exchanges.hpp"
#include "status.hpp"

namespace mx = mlx::core;
using faststep::at;

namespace {

bool foreign(mx::Stream s) {
  try { // these throw for a stream of another thread; the GPU back ends offer nothing that does not wait
    if (s == mx::default_stream(s.device)) {
      return false;
    }
    if (s.device == mx::Device::gpu) {
      mx::synchronize(s);
    } else {
      mx::cpu::get_command_encoder(s);
    }
    return false;
  } catch (const std::exception&) {
    return true;
  }
}

bool waits(const mx::array& a) {
  return a.status() == mx::array::Status::unscheduled && a.has_primitive();
}

// The nearest array that this one still has to be computed from and whose operation fits; null: none.
template <typename Fits>
const mx::array* pending(const mx::array& a, Fits fits) {
  if (!waits(a)) {
    return nullptr; // asked of each array of each batch
  }
  std::vector<const mx::array*> todo{&a};
  std::unordered_set<uintptr_t> seen;
  for (size_t next = 0; next < todo.size(); ++next) {
    const auto& x = *todo[next];
    if (!waits(x) || !seen.insert(x.id()).second) {
      continue;
    }
    if (fits(x.primitive())) {
      return &x;
    }
    for (const auto& in : x.inputs()) {
      todo.push_back(&in);
    }
  }
  return nullptr;
}

// mlx::core::array is one shared pointer (mlx/array.h); what it points at, and how many arrays share it, is not public.
const std::shared_ptr<void>& shared(const void* a) {
  static_assert(sizeof(mx::array) == sizeof(std::shared_ptr<void>));
  return reinterpret_cast<const std::shared_ptr<void>&>(at(a));
}

using Watched = std::weak_ptr<void>;

bool is(mx::Primitive& primitive, std::string_view name) {
  return primitive.name() == name;
}

// The ranks between which an operation exchanges arrays; one for those that exchange nothing.
int ranks(mx::Primitive& primitive) {
  return faststep::exchanges(primitive.name()) ? static_cast<mx::distributed::DistPrimitive&>(primitive).group().size() : 1;
}

} // namespace

uintptr_t faststep_array_id(const void* a) noexcept {
  return at(a).id();
}

int faststep_array_is_lazy(const void* a) noexcept {
  return at(a).status() == mx::array::Status::unscheduled;
}

int faststep_array_has_rows(const void* a) noexcept {
  return at(a).status() != mx::array::Status::unscheduled && at(a).flags().row_contiguous;
}

size_t faststep_array_holders(const void* a) noexcept {
  return static_cast<size_t>(shared(a).use_count());
}

int faststep_watch_new(const void* a, void** watched) {
  return faststep::guarded([&] { *watched = new Watched(shared(a)); });
}

int faststep_watch_is_alive(const void* watched) noexcept {
  return !static_cast<const Watched*>(watched)->expired();
}

void faststep_watch_free(void* watched) noexcept {
  delete static_cast<Watched*>(watched);
}

size_t faststep_array_operations(const void* a) noexcept {
  size_t count = 0;
  pending(at(a), [&](mx::Primitive&) { ++count; return false; });
  return count;
}

int faststep_array_is_filled(const void* array) noexcept {
  const auto* from = &at(array);
  auto is_lazy = [&from] { return from->status() == mx::array::Status::unscheduled; };
  if (!is_lazy()) {
    return 0;
  }
  while (is_lazy() && from->inputs().size() == 1) {
    from = &from->inputs()[0];
  }
  return !is_lazy() && from->size() == 1;
}

int faststep_array_is_foreign(const void* a) noexcept {
  return pending(at(a), [](mx::Primitive& p) { return foreign(p.stream()); }) != nullptr;
}

int faststep_array_reads_file(const void* a) noexcept {
  return pending(at(a), [](mx::Primitive& p) { return is(p, "Load"); }) != nullptr;
}

namespace {

// MLX counts a task, and does not hand it over where that throws the error of one before (mlx/backend/cpu/encoder.h). It waits for
// ever for one of eleven such tasks, or above its memory limit for a single one: what nobody will ever do counts no more.
void forget_lost_tasks() {
  constexpr int looks = 20; // other threads may have tasks under way
  auto lost = mx::scheduler::n_active_tasks();
  for (int i = 0; i < looks && lost > 0; ++i) {
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
    lost = std::min(lost, mx::scheduler::n_active_tasks());
  }
  for (; lost > 0; --lost) {
    mx::scheduler::notify_task_completion(mx::default_stream(mx::Device::cpu));
  }
}

} // namespace

// If MLX meets the error while it signals the end of an evaluation (transforms.cpp), the event is never signalled, and who
// waits hangs.
void faststep_arrays_recover(const void* const* arrays, size_t n) noexcept {
  for (auto device : {mx::Device::cpu, mx::Device::gpu}) {
    try {
      if (mx::is_available(device)) {
        mx::synchronize(mx::default_stream(device));
      }
    } catch (const std::exception&) { // another error
    }
  }
  forget_lost_tasks();
  // MLX looks for errors each time that it hands over an operation, and then leaves the rest of the graph alone: what
  // comes next is handed over before any of it can fail
  auto rest = [] { std::this_thread::sleep_for(std::chrono::milliseconds(50)); };
  mx::scheduler::enqueue(mx::default_stream(mx::Device::cpu), rest);
  for (size_t i = 0; i < n; i++) {
    const auto& a = at(arrays[i]);
    if (a.status() == mx::array::Status::evaluated) {
      a.attach_event(mx::Event());
      a.set_status(mx::array::Status::available);
    }
  }
}

int faststep_synchronize() {
  return faststep::guarded([] { mx::synchronize(); });
}

int faststep_synchronize_cpu() {
  return mx::default_device() == mx::Device::cpu ? faststep_synchronize() : faststep::not_applicable;
}

int faststep_array_view(const void* flat, const int* shape, size_t ndim, size_t offset, void** view) {
  return faststep::guarded([&] {
    const auto& buffer = at(flat);
    mx::Shape dims(shape, shape + ndim);
    mx::Strides strides(ndim);
    int64_t stride = 1;
    for (size_t i = ndim; i-- > 0;) {
      strides[i] = stride;
      stride *= shape[i];
    }
    if (buffer.status() == mx::array::Status::unscheduled || !buffer.flags().row_contiguous) {
      *view = faststep::owned(mx::as_strided(buffer, std::move(dims), std::move(strides), offset));
      return;
    }
    bool column = ndim < 2 || stride == *std::max_element(shape, shape + ndim);
    mx::array part(std::move(dims), buffer.dtype(), nullptr, {});
    part.copy_shared_buffer(buffer, strides, {true, true, column}, stride, offset);
    part.set_status(buffer.status());
    part.attach_event(buffer.event());
    *view = faststep::owned(std::move(part));
  });
}

int faststep_is_transforming() noexcept {
  static const auto* probe = [] {
    auto* made = new mx::array(mx::Shape{}, mx::float32, nullptr, {});
    made->set_tracer(true); // which is one inside of a transformation only
    return made;
  }();
  return probe->is_tracer();
}

int faststep_array_is_zero(const void* array) noexcept {
  const auto* a = &at(array);
  constexpr std::string_view spreads[] = {"Full", "Broadcast", "AsType"};
  while (waits(*a) && std::find(std::begin(spreads), std::end(spreads), a->primitive().name()) != std::end(spreads)) {
    a = &a->inputs()[0];
  }
  if (!a->is_available() || a->size() != 1) {
    return 0;
  }
  const auto* bytes = a->data<char>();
  return std::all_of(bytes, bytes + a->itemsize(), [](char byte) { return byte == 0; });
}

int faststep_arrays_ranks(const void* const* arrays, size_t n) noexcept {
  std::vector<const mx::array*> todo;
  for (size_t i = 0; i < n; ++i) {
    todo.push_back(&at(arrays[i]));
  }
  std::unordered_set<uintptr_t> seen;
  int most = 1;
  while (!todo.empty()) {
    const auto& a = *todo.back();
    todo.pop_back();
    if (!waits(a) || !seen.insert(a.id()).second) {
      continue;
    }
    most = std::max(most, ranks(a.primitive()));
    for (const auto& in : a.inputs()) {
      todo.push_back(&in);
    }
  }
  return most;
}

void* faststep_array_hollow() noexcept {
  return faststep::owned(mx::array(mx::Shape{}, mx::float32, nullptr, {}));
}

// The draw's key is one half of a split, which itself is random bits of the state before it.
int faststep_array_random_state(const void* draw, void** state) {
  return faststep::guarded([&] {
    auto random = [](mx::Primitive& p) { return is(p, "RandomBits"); };
    const auto* bits = pending(at(draw), random);
    const auto* halves = bits ? pending(bits->inputs()[0], random) : nullptr;
    if (halves == nullptr) {
      return faststep::not_applicable;
    }
    *state = faststep::owned(halves->inputs()[0]);
    return faststep::done;
  });
}
