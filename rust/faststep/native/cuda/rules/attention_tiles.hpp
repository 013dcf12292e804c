// Kernels of attention in float32 over any number of positions: tiles of the scores are in registers, never in memory.
//
// Products are those of tensor cores: TF32 where MLX's are, and otherwise three of them, of each factor's first and second
// 11 bits, whose sum is as near as one in float32. A block has 64 positions of one head, a warp 16 of them. What the
// gradients need is computed anew: those of queries by one kernel, those of keys and values by another, each element by
// one thread in one order.
#pragma once

namespace faststep::rules {

inline constexpr int tile_threads = 128, tile_rows = 64;

// PTX ISA, "Matrix Fragments for mma.m16n8k8": lane = 4 * group + member has rows group and group + 8.
inline constexpr const char* tensor_cores_source = R"(
__device__ __forceinline__ float faststep_tf32(float x) {
  unsigned bits;
  asm("cvt.rna.tf32.f32 %0, %1;" : "=r"(bits) : "f"(x));
  return __uint_as_float(bits);
}

// sums, 16 x 8, += a, 16 x 8, times b, 8 x 8
__device__ __forceinline__ void faststep_multiply(float (&sums)[4], const float (&a)[4], const float (&b)[2]) {
  asm("mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
      : "+f"(sums[0]), "+f"(sums[1]), "+f"(sums[2]), "+f"(sums[3])
      : "r"(__float_as_uint(a[0])), "r"(__float_as_uint(a[1])), "r"(__float_as_uint(a[2])), "r"(__float_as_uint(a[3])),
        "r"(__float_as_uint(b[0])), "r"(__float_as_uint(b[1])));
}
)";

// Constants: WIDTH, EXACT, CAUSAL and `scale`.
inline constexpr const char* tiles_source = R"(
  constexpr int threads = 128, rows = 64, columns = 32, pitch = WIDTH + 4, steps = WIDTH / 8, tiles = columns / 8;
  // two pairs of tiles take turns: one is computed with while the next is on its way
  alignas(16) __shared__ float shared[4 * columns][pitch];
  float4 one[(columns * WIDTH / 4 + threads - 1) / threads], other[(columns * WIDTH / 4 + threads - 1) / threads];
  constexpr float in_twos = scale * 1.44269504088896341f; // scores as exponents of two
  int thread = threadIdx.x, lane = thread % 32, own = thread / 32 * 16, group = lane / 4, member = lane % 4;
  int heads = queries_shape[1], length = queries_shape[2];
  int64_t batch = blockIdx.x / heads, head = blockIdx.x % heads;
  auto rounded = [](float x) { return EXACT ? x : faststep_tf32(x); };
  auto multiply = [](float (&sums)[4], const float (&a)[4], const float (&b)[2]) {
    if constexpr (EXACT) {
      float a1[4], a2[4], b1[2], b2[2];
      #pragma unroll
      for (int i = 0; i < 4; ++i) { a1[i] = faststep_tf32(a[i]), a2[i] = faststep_tf32(a[i] - a1[i]); }
      #pragma unroll
      for (int i = 0; i < 2; ++i) { b1[i] = faststep_tf32(b[i]), b2[i] = faststep_tf32(b[i] - b1[i]); }
      float part[4] = {}; // tensor cores cut off what they add up: over many columns all sums would be too small
      faststep_multiply(part, a1, b2);
      faststep_multiply(part, a2, b1);
      faststep_multiply(part, a1, b1);
      #pragma unroll
      for (int i = 0; i < 4; ++i) { sums[i] += part[i]; }
    } else {
      faststep_multiply(sums, a, b);
    }
  };
  // `count` positions from `first` on, on their way to shared memory; behind the last one, which no sum sees, that again
  auto fetch = [&](auto& to, const float* from, const Strides& strides, int first, int count) {
    from += batch * strides[0] + head * strides[1];
    bool wide = strides[3] == 1 && strides[2] % 4 == 0 && reinterpret_cast<size_t>(from) % 16 == 0;
    auto each = [&](auto at) {
      #pragma unroll
      for (int n = 0; n < sizeof(to) / sizeof(to[0]); ++n) {
        int i = n * threads + thread, row = i / (WIDTH / 4), column = i % (WIDTH / 4) * 4;
        if (count * WIDTH / 4 % threads == 0 || row < count) {
          to[n] = at(from + min(first + row, length - 1) * strides[2] + column * strides[3]);
        }
      }
    };
    if (wide) {
      each([](const float* at) { return *reinterpret_cast<const float4*>(at); });
    } else {
      each([&](const float* at) {
        return float4{at[0], at[strides[3]], at[2 * strides[3]], at[3 * strides[3]]};
      });
    }
  };
  auto store = [&](float (*into)[pitch], const auto& from, int count, auto change) {
    #pragma unroll
    for (int n = 0; n < sizeof(from) / sizeof(from[0]); ++n) {
      int i = n * threads + thread, row = i / (WIDTH / 4), column = i % (WIDTH / 4) * 4;
      if (count * WIDTH / 4 % threads == 0 || row < count) {
        float4 x = {change(from[n].x), change(from[n].y), change(from[n].z), change(from[n].w)};
        *reinterpret_cast<float4*>(&into[row][column]) = x;
      }
    }
  };
  // the rows of this warp, as left factors of products
  auto left = [&](float (&to)[steps][4], const auto& from, auto change) {
    __syncthreads();
    store(shared, from, rows, change);
    __syncthreads();
    #pragma unroll
    for (int s = 0; s < steps; ++s) {
      #pragma unroll
      for (int i = 0; i < 4; ++i) { to[s][i] = shared[own + group + i % 2 * 8][s * 8 + member + i / 2 * 4]; }
    }
  };
  // sums += left right^T
  auto add_scores = [&](auto& sums, const float (&left)[steps][4], float (*right)[pitch]) {
    #pragma unroll
    for (int s = 0; s < steps; ++s) {
      #pragma unroll
      for (int n = 0; n < sizeof(sums) / sizeof(sums[0]); ++n) {
        float b[2] = {right[n * 8 + group][s * 8 + member], right[n * 8 + group][s * 8 + member + 4]};
        multiply(sums[n], left[s], b);
      }
    }
  };
  // sums += left right, where columns 2 i and 2 i + 1 of a tile on the left are what the product calls i and i + 4
  auto add_weighted = [&](float (&sums)[steps][4], const auto& left, float (*right)[pitch]) {
    #pragma unroll
    for (int n = 0; n < sizeof(left) / sizeof(left[0]); ++n) {
      float a[4] = {rounded(left[n][0]), rounded(left[n][2]), rounded(left[n][1]), rounded(left[n][3])};
      #pragma unroll
      for (int s = 0; s < steps; ++s) {
        float b[2] = {right[n * 8 + member * 2][s * 8 + group], right[n * 8 + member * 2 + 1][s * 8 + group]};
        multiply(sums[s], a, b);
      }
    }
  };
  constexpr int pieces = (rows * WIDTH / 4 + threads - 1) / threads; // of `rows` positions that a thread has
  // of the four lanes that have a row
  auto added = [](float x) {
    x += __shfl_xor_sync(0xffffffff, x, 1);
    return x + __shfl_xor_sync(0xffffffff, x, 2);
  };
  // the rows of this warp into an array of positions by heads; `factors`: of row `group` and of the one 8 behind it
  auto write = [&](float* to, const float (&sums)[steps][4], int first, float factor, float other) {
    #pragma unroll
    for (int i = 0; i < 2; ++i) {
      int position = first + own + group + i * 8;
      if (position < length) {
        float* at = to + ((batch * length + position) * heads + head) * WIDTH + member * 2;
        float by = i == 0 ? factor : other;
        #pragma unroll
        for (int s = 0; s < steps; ++s) {
          *reinterpret_cast<float2*>(at + s * 8) = {by * sums[s][i * 2], by * sums[s][i * 2 + 1]};
        }
      }
    }
  };
)";

// `normalizers`: log2 of the sum of a row's exponentials.
inline constexpr const char* tiles_forward_source = R"(
  int first = (gridDim.y - 1 - blockIdx.y) * rows; // those with the most columns first
  float q[steps][4], sums[steps][4] = {}, largest[2] = {-INFINITY, -INFINITY}, totals[2] = {};
  float4 piece[pieces];
  fetch(piece, queries, queries_strides, first, rows);
  fetch(one, keys, keys_strides, 0, columns);
  fetch(other, values, values_strides, 0, columns);
  left(q, piece, rounded);
  __syncthreads();
  int end = CAUSAL ? min(length, first + rows) : length;
  for (int from = 0; from < end; from += columns) {
    float (*k)[pitch] = shared + from / columns % 2 * 2 * columns, (*v)[pitch] = k + columns;
    store(k, one, columns, rounded);
    store(v, other, columns, rounded);
    fetch(one, keys, keys_strides, from + columns, columns);
    fetch(other, values, values_strides, from + columns, columns);
    __syncthreads();
    float p[tiles][4] = {};
    add_scores(p, q, k);
    #pragma unroll
    for (int i = 0; i < 2; ++i) {
      int last = CAUSAL ? min(length - 1, first + own + group + i * 8) : length - 1;
      float most = largest[i];
      #pragma unroll
      for (int n = 0; n < tiles; ++n) {
        #pragma unroll
        for (int j = 0; j < 2; ++j) {
          float& x = p[n][i * 2 + j];
          x = from + n * 8 + member * 2 + j <= last ? x * in_twos : -INFINITY;
          most = fmaxf(most, x);
        }
      }
      most = fmaxf(most, __shfl_xor_sync(0xffffffff, most, 1));
      most = fmaxf(most, __shfl_xor_sync(0xffffffff, most, 2));
      float base = most == -INFINITY ? 0.0f : most, factor = exp2f(largest[i] - base);
      largest[i] = most;
      totals[i] *= factor;
      #pragma unroll
      for (int n = 0; n < tiles; ++n) {
        #pragma unroll
        for (int j = 0; j < 2; ++j) {
          float& x = p[n][i * 2 + j];
          x = exp2f(x - base);
          totals[i] += x;
        }
      }
      #pragma unroll
      for (int s = 0; s < steps; ++s) {
        sums[s][i * 2] *= factor;
        sums[s][i * 2 + 1] *= factor;
      }
    }
    add_weighted(sums, p, v);
  }
  for (int i = 0; i < 2; ++i) {
    totals[i] = added(totals[i]);
    int position = first + own + group + i * 8;
    if (member == 0 && position < length) {
      normalizers[int64_t(blockIdx.x) * length + position] = largest[i] + log2f(totals[i]);
    }
  }
  write(out, sums, first, 1 / totals[0], 1 / totals[1]);
)";

// `dots`: of each position's output and its cotangent, which the softmax's gradient subtracts.
inline constexpr const char* tiles_queries_source = R"(
  int first = (gridDim.y - 1 - blockIdx.y) * rows;
  float q[steps][4], g[steps][4], dot[2] = {}, normalizer[2] = {}, sums[steps][4] = {};
  {
    float4 of_out[pieces], of_cotangent[pieces], of_queries[pieces];
    fetch(of_out, out, out_strides, first, rows);
    fetch(of_cotangent, cotangent, cotangent_strides, first, rows);
    fetch(of_queries, queries, queries_strides, first, rows);
    left(q, of_out, [](float x) { return x; });
    left(g, of_cotangent, rounded);
    #pragma unroll
    for (int s = 0; s < steps; ++s) {
      #pragma unroll
      for (int i = 0; i < 4; ++i) { dot[i % 2] += q[s][i] * g[s][i]; }
    }
    left(q, of_queries, rounded);
  }
  fetch(one, keys, keys_strides, 0, columns);
  fetch(other, values, values_strides, 0, columns);
  for (int i = 0; i < 2; ++i) {
    dot[i] = added(dot[i]);
    int position = first + own + group + i * 8;
    if (position < length) {
      int64_t at = int64_t(blockIdx.x) * length + position;
      normalizer[i] = normalizers[at];
      if (member == 0) { dots[at] = dot[i]; }
    }
  }
  __syncthreads();
  int end = CAUSAL ? min(length, first + rows) : length;
  for (int from = 0; from < end; from += columns) {
    float (*k)[pitch] = shared + from / columns % 2 * 2 * columns, (*v)[pitch] = k + columns;
    store(k, one, columns, rounded);
    store(v, other, columns, rounded);
    fetch(one, keys, keys_strides, from + columns, columns);
    fetch(other, values, values_strides, from + columns, columns);
    __syncthreads();
    float p[tiles][4] = {}, dp[tiles][4] = {};
    add_scores(p, q, k);
    add_scores(dp, g, v);
    #pragma unroll
    for (int n = 0; n < tiles; ++n) {
      #pragma unroll
      for (int i = 0; i < 4; ++i) {
        int last = CAUSAL ? min(length - 1, first + own + group + i / 2 * 8) : length - 1;
        bool seen = from + n * 8 + member * 2 + i % 2 <= last;
        p[n][i] = seen ? exp2f(p[n][i] * in_twos - normalizer[i / 2]) * (dp[n][i] - dot[i / 2]) : 0.0f;
      }
    }
    add_weighted(sums, p, k);
  }
  write(dq, sums, first, scale, scale);
)";

// Scores here are transposed: a row for each key.
inline constexpr const char* tiles_keys_source = R"(
  __shared__ float normalizers_read[2][columns], dots_read[2][columns];
  int first = blockIdx.y * rows;
  float k[steps][4], v[steps][4], of_keys[steps][4] = {}, of_values[steps][4] = {};
  float of_normalizers = 0.0f, of_dots = 0.0f;
  auto fetch_both = [&](int from) {
    fetch(one, queries, queries_strides, from, columns);
    fetch(other, cotangent, cotangent_strides, from, columns);
    if (thread < columns && from + thread < length) {
      int64_t at = int64_t(blockIdx.x) * length + from + thread;
      of_normalizers = normalizers[at];
      of_dots = dots[at];
    }
  };
  {
    float4 first_keys[pieces], first_values[pieces];
    fetch(first_keys, keys, keys_strides, first, rows);
    fetch(first_values, values, values_strides, first, rows);
    left(k, first_keys, rounded);
    left(v, first_values, rounded);
  }
  int begin = CAUSAL ? first : 0;
  fetch_both(begin);
  __syncthreads();
  for (int from = begin; from < length; from += columns) {
    int turn = from / columns % 2;
    float (*q)[pitch] = shared + turn * 2 * columns, (*g)[pitch] = q + columns;
    float *normalizer = normalizers_read[turn], *dot = dots_read[turn];
    store(q, one, columns, rounded);
    store(g, other, columns, rounded);
    if (thread < columns) {
      normalizer[thread] = of_normalizers;
      dot[thread] = of_dots;
    }
    fetch_both(from + columns);
    __syncthreads();
    float p[tiles][4] = {}, dp[tiles][4] = {};
    add_scores(p, k, q);
    #pragma unroll
    for (int n = 0; n < tiles; ++n) {
      #pragma unroll
      for (int i = 0; i < 4; ++i) {
        int column = n * 8 + member * 2 + i % 2, query = from + column;
        bool seen = query < length && (!CAUSAL || first + own + group + i / 2 * 8 <= query);
        p[n][i] = seen ? exp2f(p[n][i] * in_twos - normalizer[column]) : 0.0f;
      }
    }
    add_weighted(of_values, p, g);
    add_scores(dp, v, g);
    #pragma unroll
    for (int n = 0; n < tiles; ++n) {
      #pragma unroll
      for (int i = 0; i < 4; ++i) { p[n][i] *= dp[n][i] - dot[n * 8 + member * 2 + i % 2]; }
    }
    add_weighted(of_keys, p, q);
  }
  write(dk, of_keys, first, scale, scale);
  write(dv, of_values, first, 1.0f, 1.0f);
)";

} // namespace faststep::rules
