#include "cpu/replay/task.hpp"

#include <cstdlib>
#include <stdexcept>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "replay/capture.hpp"

#if defined(__GLIBC__) && defined(__GLIBCXX__)
#include <malloc.h>
#define FASTSTEP_KNOWS_CLOSURES
#endif

namespace faststep::tasks {

namespace {

thread_local Recording* now = nullptr;

using Function = std::function<void()>;

#ifdef FASTSTEP_KNOWS_CLOSURES

// A std::function as libstdc++ lays it out.
struct Layout {
  std::_Any_data functor;
  bool (*manager)(std::_Any_data&, const std::_Any_data&, std::_Manager_operation);
  void* invoker;
};
static_assert(sizeof(Layout) == sizeof(Function));

// The bytes of its closure, and at most a few behind it.
std::string_view bytes_of(const Function& function) {
  const auto& layout = reinterpret_cast<const Layout&>(function);
  std::_Any_data at;
  layout.manager(at, layout.functor, std::__get_functor_ptr);
  auto* closure = at._M_access<void*>();
  bool inside = closure == static_cast<const void*>(&layout.functor);
  return {static_cast<const char*>(closure), inside ? sizeof(layout.functor) : malloc_usable_size(closure)};
}

#else

std::string_view bytes_of(const Function&) {
  throw replay::Refused("closures of tasks are not known on this system");
}

#endif

// The names that compilers give to closures within functions of MLX.
bool is_of(const Function& task, std::string_view function) {
  std::string_view name = task.target_type().name();
  return name.substr(name.starts_with('*') ? 1 : 0).starts_with(function);
}

} // namespace

void Task::run_first() {
  auto before = call_; // as it was handed over
  auto bytes = std::string(bytes_of(call_));
  call_();
  changes_ = bytes_of(call_) != bytes;
  if (changes_) {
    call_ = std::move(before);
  }
}

Recording::Recording(mx::Stream stream) : stream_(stream) {
  if (now != nullptr) {
    throw std::logic_error("two recordings at once");
  }
  now = this;
}

Recording::~Recording() {
  now = nullptr;
}

bool Recording::take(mx::Stream stream, Function& task) {
  if (is_of(task, "ZN3mlx4core3cpu14CommandEncoder8dispatchI")) {
    task(); // MLX's count of tasks under way, which it has added one to
    return true;
  }
  if (is_of(task, "ZN3mlx4core11synchronize")) {
    refused = "an operation waits for its stream";
    return false;
  }
  if (stream != stream_) {
    refused = "an operation uses another stream";
    return false;
  }
  tasks.emplace_back(std::move(task));
  return true;
}

Recording* recording() {
  return now;
}

} // namespace faststep::tasks
