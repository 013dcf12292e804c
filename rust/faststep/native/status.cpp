// The message of a call that failed.
#include "status.hpp"

#include <string>

namespace {

thread_local std::string message;
thread_local const char* last_error = "";

} // namespace

namespace faststep {

void set_last_error(const char* text) noexcept {
  try {
    message = text;
    last_error = message.c_str();
  } catch (const std::exception&) {
    last_error = "no memory";
  }
}

} // namespace faststep

const char* faststep_last_error() noexcept {
  return last_error;
}
