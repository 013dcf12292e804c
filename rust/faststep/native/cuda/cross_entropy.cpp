#include "cuda/cross_entropy.hpp"

#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "mlx/fast.h"
#include "mlx/mlx.h"
#include "told.hpp"

namespace faststep {

namespace mx = mlx::core;

namespace {

constexpr int threads = 512; // of a block, which has one row

// Reads 16 bytes at a time: rows are multiples of that.
constexpr const char* begin = R"(
  constexpr int width = 16 / sizeof(T);
  const T* row = logits + size_t(blockIdx.x) * LENGTH;
  int target = targets[blockIdx.x];
  int nearest = target < 0 ? 0 : (target < CLASSES ? target : CLASSES - 1);
  alignas(16) T in[width];
)";

constexpr const char* forward = R"(
  __shared__ float maxima[32], sums[32];
  float largest = -3.402823466e38f, sum = 0; // finite: the difference of two infinite ones is no number
  auto add = [&](float other, float others) {
    float both = fmaxf(largest, other);
    sum = sum * __expf(largest - both) + others * __expf(other - both);
    largest = both;
  };
  constexpr int times = 4, all = times * width; // what is loaded at once
  for (int i = threadIdx.x; i < LENGTH / width; i += times * blockDim.x) {
    alignas(16) T in[all];
    #pragma unroll
    for (int n = 0; n < times; ++n) {
      int at = i + n * blockDim.x;
      if (at < LENGTH / width) { reinterpret_cast<uint4*>(in)[n] = reinterpret_cast<const uint4*>(row)[at]; }
    }
    float values[all], most = -3.402823466e38f, total = 0;
    #pragma unroll
    for (int k = 0; k < all; ++k) {
      bool is_class = (i + k / width * int(blockDim.x)) * width + k % width < CLASSES;
      values[k] = is_class ? float(in[k]) : -INFINITY;
      most = is_class ? fmaxf(most, values[k]) : most;
    }
    #pragma unroll
    for (int k = 0; k < all; ++k) { total += __expf(values[k] - most); }
    add(most, total);
  }
  auto gather = [&]() {
    for (int step = 16; step > 0; step /= 2) {
      float other = __shfl_down_sync(0xffffffff, largest, step);
      add(other, __shfl_down_sync(0xffffffff, sum, step));
    }
  };
  gather();
  if (threadIdx.x % 32 == 0) { maxima[threadIdx.x / 32] = largest; sums[threadIdx.x / 32] = sum; }
  __syncthreads();
  if (threadIdx.x < 32) {
    bool used = threadIdx.x < blockDim.x / 32;
    largest = used ? maxima[threadIdx.x] : -3.402823466e38f;
    sum = used ? sums[threadIdx.x] : 0;
    gather();
    if (threadIdx.x == 0) { losses[blockIdx.x] = logf(sum) + largest - float(row[nearest]); }
  }
)";

constexpr const char* backward = R"(
  float cotangent = cotangents[blockIdx.x], normalizer = losses[blockIdx.x] + float(row[nearest]);
  O* to = gradient + size_t(blockIdx.x) * LENGTH;
  alignas(16) O made[width];
  __syncthreads(); // the gradient may lie where the logits do
  for (int i = threadIdx.x; i < LENGTH / width; i += blockDim.x) {
    *reinterpret_cast<uint4*>(in) = reinterpret_cast<const uint4*>(row)[i];
    for (int k = 0; k < width; ++k) {
      int at = i * width + k;
      float value = cotangent * (__expf(float(in[k]) - normalizer) - (at == target ? 1.0f : 0.0f));
      made[k] = O(at < CLASSES ? value : 0.0f);
    }
    constexpr int parts = width * sizeof(O) / 16; // two where float16 logits have a float32 gradient
    for (int part = 0; part < parts; ++part) {
      reinterpret_cast<uint4*>(to)[i * parts + part] = reinterpret_cast<const uint4*>(made)[part];
    }
  }
)";

mx::array run(
    const std::string& name,
    const char* source,
    const Logits& logits,
    std::vector<mx::array> inputs,
    std::vector<std::string> names,
    const char* output,
    mx::Shape shape,
    mx::Dtype dtype,
    mx::StreamOrDevice stream) {
  int length = logits.whole.shape(-1);
  int rows = static_cast<int>(logits.whole.size() / length);
  names.insert(names.begin(), "logits");
  inputs.insert(inputs.begin(), logits.whole);
  auto made = mx::fast::cuda_kernel(name, names, {output}, std::string(begin) + source)(
      inputs,
      {std::move(shape)},
      {dtype},
      {threads * rows, 1, 1},
      {threads, 1, 1},
      {{"T", logits.whole.dtype()}, {"O", dtype}, {"LENGTH", length}, {"CLASSES", logits.classes}},
      std::nullopt,
      false,
      stream);
  is_determined_by_inputs(made[0]);
  return made[0];
}

} // namespace

mx::array cross_entropy(const Logits& logits, const mx::array& targets, mx::StreamOrDevice stream) {
  return run(
      "faststep_cross_entropy", forward, logits, {targets}, {"targets"}, "losses", targets.shape(), mx::float32, stream);
}

mx::array cross_entropy_vjp(
    const Logits& logits,
    const mx::array& targets,
    const mx::array& losses,
    const mx::array& cotangents,
    mx::Dtype dtype,
    mx::StreamOrDevice stream) {
  auto made = run(
      "faststep_cross_entropy_vjp",
      backward,
      logits,
      {targets, losses, cotangents},
      {"targets", "losses", "cotangents"},
      "gradient",
      logits.whole.shape(),
      dtype,
      stream);
  if (dtype == logits.whole.dtype()) {
    may_lie_within(made, {{0, 0}});
  }
  return made;
}

} // namespace faststep
