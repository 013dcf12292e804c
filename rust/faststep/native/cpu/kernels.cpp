// The directory that MLX keeps its CPU kernels below, in place of the system's temporary one.
#include <cstddef>
#include <filesystem>

#include "ffi.hpp"

namespace {

bool (*find)(char* path, size_t size) = nullptr;

std::filesystem::path temp_directory_path() {
  char path[4096];
  return find(path, sizeof(path)) ? path : std::filesystem::temp_directory_path();
}

} // namespace

void* faststep_temp_directory_path(bool (*find_)(char* path, size_t size)) noexcept {
  find = find_;
  return reinterpret_cast<void*>(&temp_directory_path);
}
