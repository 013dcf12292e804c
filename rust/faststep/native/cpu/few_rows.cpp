// Products of few rows, as those of one step of a sequence: OpenBLAS makes a copy of the whole right side first, which takes as long as
// the product. Here 32 of its columns at a time are copied to where the processor's caches hold them. Terms are added up in the order of
// OpenBLAS's kernel for AVX-512, with its bits (src/mlx/blas/few_rows.rs compares them).
#include <algorithm>
#include <cstddef>
#include <memory>

#include "ffi.hpp"

#if defined(__x86_64__) && defined(__GNUC__)

#include <immintrin.h>

namespace faststep {

namespace {

#define FASTSTEP_AVX512 __attribute__((target("avx512f")))

constexpr size_t lanes = 16;
constexpr size_t width = 2 * lanes; // columns that are copied at once
constexpr size_t most_rows = 8; // that are computed at once
constexpr size_t most_depth = 448; // terms between two roundings to memory, as in OpenBLAS

// Columns of the right side beside each other, zeros where there are none.
struct Panel {
  alignas(64) float numbers[most_depth * width];
};

FASTSTEP_AVX512 inline __mmask16 first(size_t count) {
  return static_cast<__mmask16>(count >= lanes ? 0xffff : (1u << count) - 1);
}

// A square of numbers, transposed.
FASTSTEP_AVX512 inline void transpose(__m512 (&x)[lanes]) {
  __m512 y[lanes];
#pragma GCC unroll 16
  for (size_t i = 0; i < lanes; i += 2) {
    y[i] = _mm512_unpacklo_ps(x[i], x[i + 1]);
    y[i + 1] = _mm512_unpackhi_ps(x[i], x[i + 1]);
  }
#pragma GCC unroll 16
  for (size_t i = 0; i < lanes; i += 4) {
    for (size_t j = 0; j < 2; ++j) {
      auto a = _mm512_castps_pd(y[i + j]), b = _mm512_castps_pd(y[i + j + 2]);
      x[i + 2 * j] = _mm512_castpd_ps(_mm512_unpacklo_pd(a, b));
      x[i + 2 * j + 1] = _mm512_castpd_ps(_mm512_unpackhi_pd(a, b));
    }
  }
#pragma GCC unroll 16
  for (size_t i = 0; i < 4; ++i) {
    y[i] = _mm512_shuffle_f32x4(x[i], x[i + 4], 0x88);
    y[i + 4] = _mm512_shuffle_f32x4(x[i], x[i + 4], 0xdd);
    y[i + 8] = _mm512_shuffle_f32x4(x[i + 8], x[i + 12], 0x88);
    y[i + 12] = _mm512_shuffle_f32x4(x[i + 8], x[i + 12], 0xdd);
  }
#pragma GCC unroll 16
  for (size_t i = 0; i < 8; ++i) {
    x[i] = _mm512_shuffle_f32x4(y[i], y[i + 8], 0x88);
    x[i + 8] = _mm512_shuffle_f32x4(y[i], y[i + 8], 0xdd);
  }
}

// From columns that are rows in memory, `ld` apart.
FASTSTEP_AVX512 void copy_turned(const float* b, size_t ld, size_t depth, size_t columns, float* to) {
  for (size_t column = 0; column < width; column += lanes) {
    auto rows = columns - std::min(columns, column);
    for (size_t p = 0; p < depth; p += lanes) {
      auto mask = first(depth - p);
      __m512 square[lanes];
#pragma GCC unroll 16
      for (size_t i = 0; i < lanes; ++i) {
        square[i] = i < rows ? _mm512_maskz_loadu_ps(mask, b + (column + i) * ld + p) : _mm512_setzero_ps();
      }
      transpose(square);
#pragma GCC unroll 16
      for (size_t i = 0; i < lanes; ++i) {
        if (p + i < depth) {
          _mm512_store_ps(to + (p + i) * width + column, square[i]);
        }
      }
    }
  }
}

// Some columns of the right side, for all rows of the left one.
struct Columns {
  const float* from; // where they lie beside each other, row after row
  size_t ld;
  size_t depth;
  __mmask16 low, high; // which there are
  bool adds;
  float* panel;
};

template <size_t rows, bool copies>
FASTSTEP_AVX512 void multiply(const float* a, size_t row, size_t step, const Columns& columns, float* c, size_t ldc) {
  __m512 sums[rows][2];
#pragma GCC unroll 8
  for (size_t i = 0; i < rows; ++i) {
    sums[i][0] = sums[i][1] = _mm512_setzero_ps();
  }
  const auto* from = columns.from;
  auto* panel = columns.panel;
  for (size_t p = 0; p < columns.depth; ++p, a += step, panel += width) {
    __m512 low, high;
    if constexpr (copies) {
      low = _mm512_maskz_loadu_ps(columns.low, from);
      high = _mm512_maskz_loadu_ps(columns.high, from + lanes);
      _mm512_store_ps(panel, low);
      _mm512_store_ps(panel + lanes, high);
      from += columns.ld;
    } else {
      low = _mm512_load_ps(panel);
      high = _mm512_load_ps(panel + lanes);
    }
#pragma GCC unroll 8
    for (size_t i = 0; i < rows; ++i) {
      auto x = _mm512_set1_ps(a[i * row]);
      sums[i][0] = _mm512_fmadd_ps(x, low, sums[i][0]);
      sums[i][1] = _mm512_fmadd_ps(x, high, sums[i][1]);
    }
  }
  auto add = [&](float* to, __mmask16 mask, __m512 sum) __attribute__((target("avx512f"))) {
    auto before = _mm512_maskz_loadu_ps(columns.adds ? mask : 0, to);
    _mm512_mask_storeu_ps(to, mask, _mm512_add_ps(before, sum));
  };
#pragma GCC unroll 8
  for (size_t i = 0; i < rows; ++i) {
    add(c + i * ldc, columns.low, sums[i][0]);
    add(c + i * ldc + lanes, columns.high, sums[i][1]);
  }
}

using Multiply = void (*)(const float*, size_t, size_t, const Columns&, float*, size_t);

template <bool copies>
constexpr Multiply by_number[] = {
    multiply<1, copies>,
    multiply<2, copies>,
    multiply<3, copies>,
    multiply<4, copies>,
    multiply<5, copies>,
    multiply<6, copies>,
    multiply<7, copies>,
    multiply<8, copies>};

// As OpenBLAS cuts sums of many terms.
size_t depth_of(size_t left) {
  return left >= 2 * most_depth ? most_depth : left > most_depth ? (left / 2 + lanes - 1) / lanes * lanes : left;
}

void few_rows(const MatrixProduct& it) {
  thread_local std::unique_ptr<Panel> room(new Panel);
  auto row = it.a_turned != 0 ? 1 : it.lda, step = it.a_turned != 0 ? it.lda : 1;
  for (size_t from = 0, depth = 0; from < it.k; from += depth) {
    depth = depth_of(it.k - from);
    for (size_t column = 0; column < it.n; column += width) {
      auto count = std::min(width, it.n - column);
      Columns columns{
          it.b + from * it.ldb + column,
          it.ldb,
          depth,
          first(count),
          first(count - std::min(count, lanes)),
          it.adds != 0 || from > 0,
          room->numbers};
      bool copies = it.b_turned == 0;
      if (!copies) {
        copy_turned(it.b + column * it.ldb + from, it.ldb, depth, count, room->numbers);
      }
      for (size_t i = 0; i < it.m; i += most_rows, copies = false) {
        auto number = std::min(most_rows, it.m - i) - 1;
        auto multiply = copies ? by_number<true>[number] : by_number<false>[number];
        multiply(it.a + i * row + from * step, row, step, columns, it.c + i * it.ldc + column, it.ldc);
      }
    }
  }
}

} // namespace

} // namespace faststep

bool faststep_few_rows(const faststep::MatrixProduct* product) noexcept {
  static const bool can = __builtin_cpu_supports("avx512f");
  if (can) {
    faststep::few_rows(*product);
  }
  return can;
}

#else

bool faststep_few_rows(const faststep::MatrixProduct*) noexcept {
  return false;
}

#endif
