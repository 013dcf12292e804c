// Operations of a small step, computed by the calling thread in place of the CPU's worker.
//
// MLX hands each operation to the worker as a task or two, and wakes it for most of them where they are short: waking costs a
// thread some microseconds, more than such a task takes. While a thread has called faststep_caller_begin, tasks of its own stream
// run as they are enqueued: in the same order, since that needs a worker that is done with all before.
//
// What enqueues tasks calls the functions below, in place of those of MLX's scheduler (src/mlx/caller.rs). Other threads, other
// streams and calls at other times go on to MLX's.
#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstring>
#include <exception>
#include <functional>
#include <memory>
#include <thread>
#include <utility>

#include "mlx/backend/cpu/encoder.h"
#include "mlx/mlx.h"
#include "mlx/scheduler.h"
#include "cpu/float_mode.hpp"
#include "cpu/replay/capture.hpp"
#include "status.hpp"

namespace faststep {

namespace {

using mx::scheduler::Scheduler;
using Task = std::function<void()>;
using EventTask = std::function<void(mx::Event&)>;
using Flag = std::shared_ptr<std::atomic<bool>>;
using Clock = std::chrono::steady_clock;

// MLX's own: a member function is called as a function is that has the object before all else.
struct Own {
  void (*enqueue)(Scheduler*, mx::Stream, Task) = nullptr;
  void (*wait_event)(Scheduler*, mx::Stream, mx::Event, EventTask) = nullptr;
  void (*signal_event)(Scheduler*, mx::Stream, mx::Event, EventTask) = nullptr;
};

Own own;

template <typename Function, typename Member>
Function address(Member member) {
  Function function;
  std::memcpy(&function, &member, sizeof(function));
  return function;
}

// The calling thread's stream and its worker.
struct Worker {
  int stream = -1;
  bool bound = false; // to this thread: no other one hands tasks to it
  Flag idle; // of the last event, if nothing has been handed over since: whether it has been signalled
  Flag has_mode;
  std::shared_ptr<uint64_t> mode; // how it computes
  bool replaced = false; // by the calling thread, now
  bool whole = false; // and has been, so far
  bool measures = false;
  uint64_t before = 0; // how the calling thread computes otherwise
  Clock::duration busy{};
};

thread_local Worker worker;

// The memory in use when the calling thread enqueued a task, while it watches that.
struct Watched {
  bool on = false;
  size_t most = 0;

  void look() {
    if (on) {
      most = std::max(most, mx::get_active_memory());
    }
  }
};

thread_local Watched watched;

bool is_known(const mx::Stream& stream) {
  return stream.index == worker.stream && stream.device == mx::Device::cpu;
}

void run(const Task& task) {
  if (!worker.measures) {
    return task();
  }
  auto start = Clock::now();
  task();
  worker.busy += Clock::now() - start;
}

// What comes next goes to the worker.
void give_back() {
  worker.replaced = worker.whole = false;
  set_float_mode(worker.before);
}

void enqueue(Scheduler* scheduler, mx::Stream stream, Task task) {
  if (auto* recording = tasks::recording(); recording && recording->take(stream, task)) {
    return;
  }
  if (tasks::has_lost_worker(stream)) {
    return task();
  }
  watched.look(); // an operation has allocated what it needs
  if (is_known(stream)) {
    if (worker.replaced) {
      try {
        return run(task);
      } catch (const std::exception&) { // which MLX keeps where the worker has met it
        task = [error = std::current_exception()] { std::rethrow_exception(error); };
        give_back();
      }
    }
    worker.idle = nullptr;
  }
  own.enqueue(scheduler, stream, std::move(task));
}

void wait_event(Scheduler* scheduler, mx::Stream stream, mx::Event event, EventTask task) {
  if (tasks::has_lost_worker(stream)) {
    return task(event);
  }
  if (is_known(stream)) {
    if (worker.replaced) {
      give_back(); // it may have to wait
    }
    worker.idle = nullptr;
  }
  own.wait_event(scheduler, stream, std::move(event), std::move(task));
}

void signal_event(Scheduler* scheduler, mx::Stream stream, mx::Event event, EventTask task) {
  if (tasks::has_lost_worker(stream)) {
    return task(event);
  }
  if (is_known(stream)) {
    if (worker.replaced) {
      return task(event);
    }
    worker.idle = std::make_shared<std::atomic<bool>>(false);
    task = [task = std::move(task), idle = worker.idle](mx::Event& event) {
      task(event);
      *idle = true;
    };
  }
  own.signal_event(scheduler, stream, std::move(event), std::move(task));
}

// Whether another thread could use the stream, too.
bool is_shared(mx::Stream stream) {
  bool shared = true;
  std::thread([&] {
    try {
      mx::cpu::get_command_encoder(stream);
    } catch (const std::exception&) {
      shared = false;
    }
  }).join();
  return shared;
}

// A thread that goes from stream to stream is left alone: to know one takes longer than it saves a step.
constexpr int max_streams = 8;

void know(mx::Stream stream) {
  static thread_local int streams = 0;
  if (++streams > max_streams) {
    return;
  }
  worker = Worker{};
  worker.bound = !is_shared(stream);
  worker.has_mode = std::make_shared<std::atomic<bool>>(false);
  worker.mode = std::make_shared<uint64_t>(0);
  own.enqueue(&mx::scheduler::scheduler(), stream, [has = worker.has_mode, mode = worker.mode] {
    *mode = float_mode();
    *has = true;
  });
  worker.stream = stream.index;
}

bool is_set(const Flag& flag) {
  return flag != nullptr && *flag;
}

} // namespace

} // namespace faststep

void faststep_caller_functions(void** functions) noexcept {
  using namespace faststep;
  if (own.enqueue == nullptr) {
    own.wait_event = address<decltype(own.wait_event)>(&Scheduler::wait_event);
    own.signal_event = address<decltype(own.signal_event)>(&Scheduler::signal_event);
    own.enqueue = address<decltype(own.enqueue)>(&Scheduler::enqueue);
    tasks::keep_own(&mx::allocator::allocator);
  }
  functions[0] = reinterpret_cast<void*>(&enqueue);
  functions[1] = reinterpret_cast<void*>(&wait_event);
  functions[2] = reinterpret_cast<void*>(&signal_event);
  functions[3] = reinterpret_cast<void*>(&tasks::allocator);
}

int faststep_caller_begin(int measures) {
  return faststep::guarded([&] {
    using faststep::worker;
    static const bool has_gpu = mx::is_available(mx::Device::gpu); // whose work begins when an evaluation has been handed over
    if (has_gpu || mx::default_device() != mx::Device::cpu) {
      return faststep::not_applicable;
    }
    auto stream = mx::default_stream(mx::Device::cpu);
    if (stream.index != worker.stream) {
      faststep::know(stream);
    }
    bool knows = stream.index == worker.stream && worker.bound && faststep::is_set(worker.has_mode);
    if (!knows || worker.replaced || !faststep::is_set(worker.idle)) {
      return faststep::not_applicable;
    }
    mx::scheduler::check_error(stream);
    worker.replaced = worker.whole = true;
    worker.measures = measures != 0;
    worker.busy = {};
    worker.before = faststep::float_mode();
    faststep::set_float_mode(*worker.mode);
    return faststep::done;
  });
}

int faststep_caller_end(double* seconds) noexcept {
  using faststep::worker;
  if (worker.replaced) {
    worker.replaced = false;
    faststep::set_float_mode(worker.before);
  }
  *seconds = std::chrono::duration<double>(worker.busy).count();
  return worker.whole;
}

void faststep_caller_watch() noexcept {
  using faststep::watched;
  watched = {true, 0};
  watched.look();
}

size_t faststep_caller_watched() noexcept {
  faststep::watched.on = false;
  return faststep::watched.most;
}
