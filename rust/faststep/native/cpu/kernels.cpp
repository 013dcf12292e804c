// The directory that MLX keeps its CPU kernels below, in place of the system's temporary one.
#include <cstddef>
#include <filesystem>
#include <system_error>

#include "ffi.hpp"

namespace {

bool (*find)(char* path, size_t size) = nullptr;

std::filesystem::path temp_directory_path() {
  char path[4096];
  if (!find(path, sizeof(path))) {
    // the system's own is not taken: others may have written what lies there
    throw std::filesystem::filesystem_error(
        "no directory for compiled kernels that only this user can write to",
        std::make_error_code(std::errc::permission_denied));
  }
  return path;
}

} // namespace

void* faststep_temp_directory_path(bool (*find_)(char* path, size_t size)) noexcept {
  find = find_;
  return reinterpret_cast<void*>(&temp_directory_path);
}
