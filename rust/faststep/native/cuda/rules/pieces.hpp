// Pieces of sources that the kernels of several rules are put together from.
#pragma once

namespace faststep::rules {

// The sum of what the lanes of a warp have, in each of them.
inline constexpr const char* warp_sum_source = R"(
  auto added = [](float value) {
    for (int step = 16; step > 0; step /= 2) { value += __shfl_xor_sync(0xffffffff, value, step); }
    return value;
  };
)";

// The opening of a kernel in which a warp has a row of `x`, and each lane WIDE columns, 32 times as many behind those as many
// again.
inline constexpr const char* row_source = R"(
  constexpr int lanes = 32, each = (COLUMNS + lanes * WIDE - 1) / (lanes * WIDE);
  int64_t row = int64_t(blockIdx.x) * blockDim.y + threadIdx.y;
  if (row >= x_shape[0]) { return; }
)";

// The end of a kernel in which each lane has `sums` of WIDE of a block's columns: those of its WARPS warps are added up in
// `shared`, and stored in the block's row of `out`, from column `first` on.
inline constexpr const char* column_sums_source = R"(
  #pragma unroll
  for (int i = 0; i < WIDE; ++i) { shared[threadIdx.y][threadIdx.x * WIDE + i] = sums[i]; }
  __syncthreads();
  for (int i = threadIdx.y * lanes + threadIdx.x; i < lanes * WIDE; i += WARPS * lanes) {
    float sum = 0;
    for (int w = 0; w < WARPS; ++w) { sum += shared[w][i]; }
    if (first + i < columns) { out[int64_t(blockIdx.y) * columns + first + i] = OUT(sum); }
  }
)";

} // namespace faststep::rules
