// The directory that MLX keeps its CPU kernels below, in place of the system's temporary one.
#include <cstddef>
#include <filesystem>

namespace {

// Writes the path of the directory, with its NUL; false when there is none.
using Find = bool (*)(char* path, std::size_t size);

Find find = nullptr;

std::filesystem::path temp_directory_path() {
  char path[4096];
  return find(path, sizeof(path)) ? path : std::filesystem::temp_directory_path();
}

} // namespace

// The function to take the place of std::filesystem::temp_directory_path.
extern "C" void* faststep_temp_directory_path(Find find_) {
  find = find_;
  return reinterpret_cast<void*>(&temp_directory_path);
}
