// The simulator as src/memory/simulator.rs calls it.
#include <cstddef>

#include "simulator/simulator.hpp"
#include "status.hpp"

using namespace faststep::simulator;
using faststep::guarded;
using faststep::pointers;

namespace {

Simulator& simulator_at(void* simulator) {
  return *static_cast<Simulator*>(simulator);
}

} // namespace

int faststep_simulator_new(const Device* device, void** simulator) {
  return guarded([&] { *simulator = new Simulator(*device); });
}

void faststep_simulator_delete(void* simulator) noexcept {
  delete static_cast<Simulator*>(simulator);
}

int faststep_simulator_begin(
    void* simulator, const void* const* given, size_t n_given, const void* const* roots, size_t n_roots) {
  return guarded([&] { simulator_at(simulator).begin(pointers(given, n_given), pointers(roots, n_roots)); });
}

int faststep_simulator_hold(void* simulator, const void* const* arrays, size_t count, int change) {
  return guarded([&] { simulator_at(simulator).hold(pointers(arrays, count), change); });
}

int faststep_simulator_keep(void* simulator, size_t slot, const void* const* arrays, size_t count) {
  return guarded([&] { simulator_at(simulator).keep(slot, pointers(arrays, count)); });
}

int faststep_simulator_evaluate(
    void* simulator, const void* const* arrays, size_t count, int one_by_one, size_t* until) {
  return guarded([&] { *until = simulator_at(simulator).evaluate(pointers(arrays, count), one_by_one != 0); });
}

int faststep_simulator_carry(void* simulator, const void* input, const void* output) {
  return guarded([&] { simulator_at(simulator).carry(faststep::at(input), faststep::at(output)); });
}

void faststep_simulator_wait(void* simulator, size_t until) noexcept {
  simulator_at(simulator).wait(until);
}

void faststep_simulator_limit(void* simulator, size_t bytes) noexcept {
  simulator_at(simulator).limit(bytes);
}

void faststep_simulator_read(void* simulator, Reading* reading) noexcept {
  auto& memory = simulator_at(simulator).memory;
  *reading = {memory.active, memory.peak, memory.cached};
  memory.peak = memory.active;
}

int faststep_simulator_mark(void* simulator, size_t own, size_t before, const void* const* arrays, size_t count) {
  return guarded([&] {
    simulator_at(simulator).mark(static_cast<Kind>(own), static_cast<Kind>(before), pointers(arrays, count));
  });
}

void faststep_simulator_record(void* simulator) noexcept {
  simulator_at(simulator).recorded.emplace();
}

void faststep_simulator_recorded(void* simulator, const Held** held, size_t* count) noexcept {
  const auto& recorded = simulator_at(simulator).recorded;
  *held = recorded ? recorded->data() : nullptr;
  *count = recorded ? recorded->size() : 0;
}
