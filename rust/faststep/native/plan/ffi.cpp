// The plan as src/simulation.rs calls it. Every array is an mlx::core::array, as in mlx_array.ctx.
#include <algorithm>
#include <exception>
#include <string>

#include "plan.hpp"

using namespace faststep::plan;

namespace {

// A plan, and what went wrong with it.
struct Simulation {
  explicit Simulation(const Device& device) : plan(device) {}
  Plan plan;
  std::string error;
};

// The order is that of `Reading` in simulation.rs.
struct Reading {
  size_t active, peak, cache;
};

Simulation& at(void* simulation) {
  return *static_cast<Simulation*>(simulation);
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
    work(at(simulation).plan);
    return 0;
  } catch (const std::exception& error) {
    at(simulation).error = error.what();
    return 1;
  }
}

} // namespace

extern "C" {

void* faststep_plan_new(const Device* device) {
  return new Simulation(*device);
}

void faststep_plan_delete(void* simulation) {
  delete static_cast<Simulation*>(simulation);
}

const char* faststep_plan_error(void* simulation) {
  return at(simulation).error.c_str();
}

int faststep_plan_begin(
    void* simulation, const void* const* given, size_t givens, const void* const* roots, size_t count) {
  return guarded(simulation, [&](Plan& plan) { plan.begin(list(given, givens), list(roots, count)); });
}

int faststep_plan_hold(void* simulation, const void* const* arrays, size_t count, int handles) {
  return guarded(simulation, [&](Plan& plan) { plan.hold(list(arrays, count), handles); });
}

int faststep_plan_keep(void* simulation, size_t slot, const void* const* arrays, size_t count) {
  return guarded(simulation, [&](Plan& plan) { plan.keep(slot, list(arrays, count)); });
}

int faststep_plan_evaluate(void* simulation, const void* const* arrays, size_t count, size_t* done) {
  return guarded(simulation, [&](Plan& plan) { *done = plan.evaluate(list(arrays, count)); });
}

int faststep_plan_carry(void* simulation, const void* input, const void* output) {
  return guarded(simulation, [&](Plan& plan) {
    plan.carry(*static_cast<const mx::array*>(input), *static_cast<const mx::array*>(output));
  });
}

void faststep_plan_wait(void* simulation, size_t done) {
  at(simulation).plan.wait(done);
}

void faststep_plan_limit(void* simulation, size_t bytes) {
  at(simulation).plan.limit(bytes);
}

// What is in use, the most that was since the last call, and the cache, in bytes.
void faststep_plan_read(void* simulation, Reading* reading) {
  auto& memory = at(simulation).plan.memory;
  *reading = {memory.active, memory.peak, memory.cached};
  memory.peak = memory.active;
}
}
