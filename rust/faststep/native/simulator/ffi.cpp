// The simulator as src/memory/simulator.rs calls it. Every array is an mlx::core::array, as in mlx_array.ctx.
#include <algorithm>
#include <exception>
#include <string>

#include "simulator/simulator.hpp"

using namespace faststep::simulator;

namespace {

// A simulator, and what went wrong with it.
struct Held {
  explicit Held(const Device& device) : simulator(device) {}
  Simulator simulator;
  std::string error;
};

// The order is that of `Reading` in memory/simulator.rs.
struct Reading {
  size_t active, peak, cache;
};

Held& at(void* simulation) {
  return *static_cast<Held*>(simulation);
}

Arrays list(const void* const* arrays, size_t count) {
  Arrays all(count);
  std::transform(
      arrays, arrays + count, all.begin(), [](const void* array) { return static_cast<const mx::array*>(array); });
  return all;
}

template <typename F>
int guarded(void* simulation, F work) {
  try {
    work(at(simulation).simulator);
    return 0;
  } catch (const std::exception& error) {
    at(simulation).error = error.what();
    return 1;
  }
}

} // namespace

extern "C" {

void* faststep_simulator_new(const Device* device) {
  return new Held(*device);
}

void faststep_simulator_delete(void* simulation) {
  delete static_cast<Held*>(simulation);
}

const char* faststep_simulator_error(void* simulation) {
  return at(simulation).error.c_str();
}

int faststep_simulator_begin(
    void* simulation, const void* const* given, size_t givens, const void* const* roots, size_t count) {
  return guarded(simulation, [&](Simulator& it) { it.begin(list(given, givens), list(roots, count)); });
}

int faststep_simulator_hold(void* simulation, const void* const* arrays, size_t count, int handles) {
  return guarded(simulation, [&](Simulator& it) { it.hold(list(arrays, count), handles); });
}

int faststep_simulator_keep(void* simulation, size_t slot, const void* const* arrays, size_t count) {
  return guarded(simulation, [&](Simulator& it) { it.keep(slot, list(arrays, count)); });
}

int faststep_simulator_evaluate(void* simulation, const void* const* arrays, size_t count, size_t* done) {
  return guarded(simulation, [&](Simulator& it) { *done = it.evaluate(list(arrays, count)); });
}

int faststep_simulator_carry(void* simulation, const void* input, const void* output) {
  return guarded(simulation, [&](Simulator& it) {
    it.carry(*static_cast<const mx::array*>(input), *static_cast<const mx::array*>(output));
  });
}

void faststep_simulator_wait(void* simulation, size_t done) {
  at(simulation).simulator.wait(done);
}

void faststep_simulator_limit(void* simulation, size_t bytes) {
  at(simulation).simulator.limit(bytes);
}

// What is in use, the most that was since the last call, and the cache, in bytes.
void faststep_simulator_read(void* simulation, Reading* reading) {
  auto& memory = at(simulation).simulator.memory;
  *reading = {memory.active, memory.peak, memory.cached};
  memory.peak = memory.active;
}
}
