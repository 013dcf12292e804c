// Gradients of many tensors into one flat buffer by one CUDA kernel, with the sum of their squares.
#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <sstream>
#include <string>
#include <vector>

#include "mlx/backend/cuda/cuda.h"
#include "mlx/fast.h"
#include "mlx/mlx.h"
#include "graph/transposed.hpp"
#include "status.hpp"
#include "told.hpp"

namespace mx = mlx::core;

namespace {

constexpr int side = 64; // a block copies a tile of side x side, or so many elements in a row

// One source for so many parts, whatever their shapes: what a part is stands in the table.
std::string source(int slots) {
  std::ostringstream out;
  out << R"(
  constexpr int side = 64, fields = 5;
  __shared__ T tile[side][side + 1];
  __shared__ float sums[8];
  int lo = 0, hi = table_shape[0] / fields - 1;
  while (lo < hi) { // the part to which this block belongs
    int mid = (lo + hi + 1) / 2;
    if (table[fields * mid] <= int(blockIdx.x)) { lo = mid; } else { hi = mid - 1; }
  }
  const int* entry = table + fields * lo;
  int at = blockIdx.x - entry[0], rows = entry[1], cols = entry[2];
  bool transposed = entry[3];
  T* to = flat + entry[4];
  const T* part;
  switch (lo) {
)";
  for (int i = 0; i < slots; ++i) {
    out << "    case " << i << ": part = p" << i << "; break;\n";
  }
  out << R"(    default: part = p0;
  }
  float sum = 0;
  if (!transposed) {
    int begin = at * side * side, size = rows * cols, thread = threadIdx.y * 32 + threadIdx.x;
    int end = size - begin < side * side ? size : begin + side * side;
    auto odd = (reinterpret_cast<size_t>(part + begin) | reinterpret_cast<size_t>(to + begin)) % 16;
    if (end - begin == side * side && odd == 0) { // all is read before anything is written
      constexpr int width = 16 / sizeof(T), each = side * side / (256 * width);
      uint4 values[each];
      #pragma unroll
      for (int k = 0; k < each; ++k) { values[k] = reinterpret_cast<const uint4*>(part + begin)[k * 256 + thread]; }
      #pragma unroll
      for (int k = 0; k < each; ++k) {
        if (part != to) { reinterpret_cast<uint4*>(to + begin)[k * 256 + thread] = values[k]; } // a part may lie there already
        const T* elements = reinterpret_cast<const T*>(&values[k]);
        #pragma unroll
        for (int i = 0; i < width; ++i) { sum += float(elements[i]) * float(elements[i]); }
      }
    } else {
      for (int i = begin + thread; i < end; i += 256) {
        T value = part[i];
        if (part != to) { to[i] = value; }
        sum += float(value) * float(value);
      }
    }
  } else { // it lies there as [cols, rows]
    int across = (cols + side - 1) / side;
    int row = at / across * side, col = at % across * side;
    #pragma unroll
    for (int i = threadIdx.y; i < side; i += 8) {
      #pragma unroll
      for (int j = threadIdx.x; j < side; j += 32) {
        if (col + i < cols && row + j < rows) {
          tile[i][j] = __ldg(part + (col + i) * rows + row + j); // nobody writes there: loads need not wait for stores
        }
      }
    }
    __syncthreads();
    for (int i = threadIdx.y; i < side; i += 8) {
      for (int j = threadIdx.x; j < side; j += 32) {
        if (row + i < rows && col + j < cols) {
          T value = tile[j][i];
          to[(row + i) * cols + col + j] = value;
          sum += float(value) * float(value);
        }
      }
    }
  }
  for (int step = 16; step > 0; step /= 2) { sum += __shfl_down_sync(0xffffffff, sum, step); }
  if (threadIdx.x == 0) { sums[threadIdx.y] = sum; }
  __syncthreads();
  if (threadIdx.x == 0 && threadIdx.y == 0) {
    for (int i = 1; i < 8; ++i) { sum += sums[i]; }
    squares[blockIdx.x] = sum;
  }
)";
  return out.str();
}

// Each block sums up its share of the squares.
constexpr const char* squares_source = R"(
  constexpr int wide = 16 / sizeof(T);
  __shared__ float sums[8];
  int64_t size = 1, every = int64_t(gridDim.x) * 256 * wide;
  for (int i = 0; i < x_ndim; ++i) { size *= x_shape[i]; }
  float sum = 0;
  #pragma unroll 4
  for (int64_t at = (int64_t(blockIdx.x) * 256 + threadIdx.x) * wide; at < size; at += every) {
    if (at + wide <= size) {
      auto values = load_vector<wide>(x + at, 0);
      for (int i = 0; i < wide; ++i) { sum += float(values[i]) * float(values[i]); }
    } else {
      for (int64_t i = at; i < size; ++i) { sum += float(x[i]) * float(x[i]); }
    }
  }
  for (int step = 16; step > 0; step /= 2) { sum += __shfl_down_sync(0xffffffff, sum, step); }
  if (threadIdx.x % 32 == 0) { sums[threadIdx.x / 32] = sum; }
  __syncthreads();
  if (threadIdx.x == 0) {
    for (int i = 1; i < 8; ++i) { sum += sums[i]; }
    squares[blockIdx.x] = sum;
  }
)";

// One block: the norm from sums of squares, the factor that clips to it, and whether norm and loss are numbers within limits.
std::string norm_source(size_t slots) {
  std::ostringstream out;
  out << R"(
  __shared__ float sums[32];
  float sum = 0;
  auto add = [&](const float* from, int size) {
    #pragma unroll 8
    for (int i = threadIdx.x; i < size; i += blockDim.x) { sum += from[i]; }
  };
)";
  for (size_t i = 0; i < slots; ++i) {
    out << "  add(p" << i << ", p" << i << "_shape[0]);\n";
  }
  out << R"(
  for (int step = 16; step > 0; step /= 2) { sum += __shfl_down_sync(0xffffffff, sum, step); }
  if (threadIdx.x % 32 == 0) { sums[threadIdx.x / 32] = sum; }
  __syncthreads();
  if (threadIdx.x >= 32) { return; }
  sum = threadIdx.x < blockDim.x / 32 ? sums[threadIdx.x] : 0.0f;
  for (int step = 16; step > 0; step /= 2) { sum += __shfl_down_sync(0xffffffff, sum, step); }
  if (threadIdx.x == 0) {
    constexpr float largest = 3.402823466e38f;
    float root = sqrtf(sum), factor = limits[0] / (root + 1e-6f), value = loss[0];
    norm[0] = root;
    scale[0] = factor > 1.0f ? 1.0f : factor; // a NaN stays
    good[0] = value <= limits[1] && value >= -largest && root <= largest;
  }
)";
  return out.str();
}

// The names by which a source sees its parts.
std::vector<std::string> part_names(size_t count) {
  std::vector<std::string> names;
  for (size_t i = 0; i < count; ++i) {
    names.push_back(std::string("p").append(std::to_string(i)));
  }
  return names;
}

int tiles(int n) {
  return (n + side - 1) / side;
}

} // namespace

int faststep_is_cuda() noexcept {
  return mx::default_device() == mx::Device::gpu && mx::cu::is_available();
}

int faststep_pack(const void* const* parts, size_t count, size_t slots, void** flat, void** squares) {
  return faststep::guarded([&] {
    std::vector<mx::array> inputs;
    std::vector<int> table;
    std::vector<faststep::Place> within;
    int blocks = 0, offset = 0, first = 0;
    auto at = [&](size_t i) -> const mx::array& { return faststep::at(parts[i]); };
    for (size_t i = 0; i < count; ++i) {
      const auto& part = at(i);
      int size = static_cast<int>(part.size());
      const auto* stored = faststep::transposed(part);
      inputs.push_back(stored ? *stored : part);
      int rows = stored ? part.shape(0) : 1, cols = stored ? part.shape(1) : size;
      table.insert(table.end(), {blocks, rows, cols, stored != nullptr, offset});
      if (!stored) {
        within.push_back({i, static_cast<size_t>(offset) * part.itemsize()});
      }
      blocks += stored ? tiles(rows) * tiles(cols) : (size + side * side - 1) / (side * side);
      offset += size;
      first += part.shape(0);
    }
    while (inputs.size() < slots) {
      inputs.push_back(inputs[0]);
    }
    auto names = part_names(slots);
    names.push_back("table");
    inputs.push_back(mx::array(table.data(), {static_cast<int>(table.size())}, mx::int32));
    auto shape = at(0).shape();
    shape[0] = first;
    auto kernel = mx::fast::cuda_kernel(
        "faststep_pack_" + std::to_string(slots), names, {"flat", "squares"}, source(static_cast<int>(slots)));
    auto made = kernel(
        inputs,
        {shape, {blocks}},
        {at(0).dtype(), mx::float32},
        {32 * blocks, 8, 1},
        {32, 8, 1},
        {{"T", at(0).dtype()}},
        std::nullopt,
        false,
        mx::Device::gpu);
    faststep::is_determined_by_inputs(made[0]);
    faststep::may_lie_within(made[0], std::move(within));
    *flat = faststep::owned(made[0]);
    *squares = faststep::owned(made[1]);
  });
}

int faststep_squares(const void* array, void** squares) {
  return faststep::guarded([&] {
    const auto& x = faststep::at(array);
    bool known = x.dtype() == mx::float32 || x.dtype() == mx::float16 || x.dtype() == mx::bfloat16;
    constexpr size_t small = 1 << 20, most = 1056;
    if (!faststep_is_cuda() || !known || x.size() < small) {
      return faststep::not_applicable;
    }
    int blocks = static_cast<int>(std::min(x.size() / 4096, most));
    auto kernel = mx::fast::cuda_kernel("faststep_squares", {"x"}, {"squares"}, squares_source);
    auto made = kernel(
        {x},
        {{blocks}},
        {mx::float32},
        {256 * blocks, 1, 1},
        {256, 1, 1},
        {{"T", x.dtype()}},
        std::nullopt,
        false,
        mx::Device::gpu);
    faststep::is_determined_by_inputs(made[0]);
    *squares = faststep::owned(made[0]);
    return faststep::done;
  });
}

int faststep_norm(const void* const* squares, size_t count, const void* loss, const float* limits, void** made) {
  return faststep::guarded([&] {
    constexpr size_t most = 16; // each number of them is a kernel
    auto inputs = faststep::list(squares, count);
    auto fits = [](const mx::array& sums) { return sums.dtype() == mx::float32 && sums.ndim() == 1; };
    if (!faststep_is_cuda() || count == 0 || count > most || !std::all_of(inputs.begin(), inputs.end(), fits)) {
      return faststep::not_applicable;
    }
    auto names = part_names(count);
    names.insert(names.end(), {"loss", "limits"});
    inputs.push_back(faststep::at(loss));
    const float padded[]{limits[0], limits[1], 0, 0}; // MLX keeps 8 bytes on pages of the host
    inputs.push_back(mx::array(padded, {4}, mx::float32));
    auto kernel = mx::fast::cuda_kernel(
        "faststep_norm_" + std::to_string(count), names, {"norm", "scale", "good"}, norm_source(count));
    auto outputs = kernel(
        inputs,
        {mx::Shape{}, mx::Shape{}, mx::Shape{}},
        {mx::float32, mx::float32, mx::bool_},
        {1024, 1, 1},
        {1024, 1, 1},
        {},
        std::nullopt,
        false,
        mx::Device::gpu);
    faststep::is_determined_by_inputs(outputs[0]);
    std::transform(outputs.begin(), outputs.end(), made, faststep::owned);
    return faststep::done;
  });
}
