// Small products on processors with AVX2 and without AVX-512: OpenBLAS's kernels for them copy both factors first, and sum up some rows
// and columns in another order than the others. Here 6 x 16 numbers are summed up at a time, from the factors where they lie, each over
// the terms in their order: a product and its transpose have the same bits.
#include <algorithm>
#include <cstddef>

#include "ffi.hpp"

#if defined(__x86_64__) && defined(__GNUC__)

#include <immintrin.h>

namespace faststep {

namespace small {

#define FASTSTEP_AVX2_FMA __attribute__((target("avx2,fma")))

constexpr size_t lanes = 8;
constexpr size_t width = 2 * lanes; // columns that are summed up at once
constexpr size_t most_rows = 6;
constexpr size_t most_terms = 1024;
constexpr size_t far_apart = 128; // numbers between two rows, of which a cache holds few: rows that are read often are copied
constexpr size_t most_work = size_t{1} << 20; // multiplications; of larger ones, OpenBLAS makes better use of the caches
constexpr size_t most_few_rows = 64; // for which OpenBLAS would turn all of a right side, however large

using Square = __m256[lanes];

// A square of numbers, transposed.
FASTSTEP_AVX2_FMA inline void transpose(Square& x) {
  Square y;
#pragma GCC unroll 4
  for (size_t i = 0; i < lanes; i += 2) {
    y[i] = _mm256_unpacklo_ps(x[i], x[i + 1]);
    y[i + 1] = _mm256_unpackhi_ps(x[i], x[i + 1]);
  }
#pragma GCC unroll 2
  for (size_t i = 0; i < lanes; i += 4) {
#pragma GCC unroll 2
    for (size_t j = 0; j < 2; ++j) {
      x[i + 2 * j] = _mm256_shuffle_ps(y[i + j], y[i + j + 2], 0x44);
      x[i + 2 * j + 1] = _mm256_shuffle_ps(y[i + j], y[i + j + 2], 0xee);
    }
  }
#pragma GCC unroll 4
  for (size_t i = 0; i < lanes / 2; ++i) {
    y[i] = _mm256_permute2f128_ps(x[i], x[i + 4], 0x20);
    y[i + 4] = _mm256_permute2f128_ps(x[i], x[i + 4], 0x31);
  }
  std::copy_n(y, lanes, x);
}

// The transpose of a matrix, whose rows are `ld` apart, to rows that are `to_ld` apart: put or added there.
FASTSTEP_AVX2_FMA void turn(
    const float* from, size_t ld, size_t rows, size_t columns, float* to, size_t to_ld, bool adds = false) {
  auto singly = [=](size_t row, size_t first, size_t last) {
    for (auto column = first; column < last; ++column) {
      auto& at = to[column * to_ld + row];
      at = adds ? at + from[row * ld + column] : from[row * ld + column];
    }
  };
  size_t row = 0;
  for (; row + lanes <= rows; row += lanes) {
    size_t column = 0;
    for (; column + lanes <= columns; column += lanes) {
      Square square;
#pragma GCC unroll 8
      for (size_t i = 0; i < lanes; ++i) {
        square[i] = _mm256_loadu_ps(from + (row + i) * ld + column);
      }
      transpose(square);
#pragma GCC unroll 8
      for (size_t i = 0; i < lanes; ++i) {
        auto* at = to + (column + i) * to_ld + row;
        _mm256_storeu_ps(at, adds ? _mm256_add_ps(_mm256_loadu_ps(at), square[i]) : square[i]);
      }
    }
    for (size_t i = 0; i < lanes; ++i) {
      singly(row + i, column, columns);
    }
  }
  for (; row < rows; ++row) {
    singly(row, 0, columns);
  }
}

// Pieces of rows that are `ld` apart, one behind the other.
FASTSTEP_AVX2_FMA void copy(const float* from, size_t ld, size_t rows, float* to) {
  for (size_t row = 0; row < rows; ++row, from += ld, to += width) {
    _mm256_store_ps(to, _mm256_loadu_ps(from));
    _mm256_store_ps(to + lanes, _mm256_loadu_ps(from + lanes));
  }
}

// Some columns of a product, fewer than `width` at its edge.
struct Columns {
  const float* b; // of the right side
  size_t ld;
  size_t terms;
  size_t count;
  bool adds;
};

// One row's columns at the edge: vectors are stored as a whole elsewhere, for a masked store takes long on some processors.
template <size_t vectors>
FASTSTEP_AVX2_FMA void store_edge(const __m256 (&sums)[vectors], const Columns& columns, float* c) {
  alignas(32) float row[vectors * lanes];
  for (size_t v = 0; v < vectors; ++v) {
    _mm256_store_ps(row + v * lanes, sums[v]);
  }
  for (size_t i = 0; i < columns.count; ++i) {
    c[i] = (columns.adds ? c[i] : 0.0f) + row[i];
  }
}

template <size_t rows, size_t vectors, bool whole>
FASTSTEP_AVX2_FMA void multiply(const float* a, size_t row, size_t step, const Columns& columns, float* c, size_t ldc) {
  alignas(32) static constexpr int bits[2 * lanes] = {-1, -1, -1, -1, -1, -1, -1, -1};
  auto mask = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(bits + vectors * lanes - columns.count));
  __m256 sums[rows][vectors];
#pragma GCC unroll 6
  for (size_t i = 0; i < rows; ++i) {
#pragma GCC unroll 2
    for (size_t v = 0; v < vectors; ++v) {
      sums[i][v] = _mm256_setzero_ps();
    }
  }
  const auto* b = columns.b;
  for (size_t term = 0; term < columns.terms; ++term, a += step, b += columns.ld) {
    __m256 right[vectors];
#pragma GCC unroll 2
    for (size_t v = 0; v < vectors; ++v) {
      bool is_edge = !whole && v + 1 == vectors;
      right[v] = is_edge ? _mm256_maskload_ps(b + v * lanes, mask) : _mm256_loadu_ps(b + v * lanes);
    }
#pragma GCC unroll 6
    for (size_t i = 0; i < rows; ++i) {
      auto left = _mm256_broadcast_ss(a + i * row);
#pragma GCC unroll 2
      for (size_t v = 0; v < vectors; ++v) {
        sums[i][v] = _mm256_fmadd_ps(left, right[v], sums[i][v]);
      }
    }
  }
#pragma GCC unroll 6
  for (size_t i = 0; i < rows; ++i, c += ldc) {
    if constexpr (whole) {
#pragma GCC unroll 2
      for (size_t v = 0; v < vectors; ++v) {
        auto before = columns.adds ? _mm256_loadu_ps(c + v * lanes) : _mm256_setzero_ps();
        _mm256_storeu_ps(c + v * lanes, _mm256_add_ps(before, sums[i][v]));
      }
    } else {
      store_edge(sums[i], columns, c);
    }
  }
}

using Multiply = void (*)(const float*, size_t, size_t, const Columns&, float*, size_t);

template <size_t vectors, bool whole>
constexpr Multiply by_rows_of[] = {
    multiply<1, vectors, whole>,
    multiply<2, vectors, whole>,
    multiply<3, vectors, whole>,
    multiply<4, vectors, whole>,
    multiply<5, vectors, whole>,
    multiply<6, vectors, whole>};

// A factor whose columns are rows in memory, of which as many as are summed up at once lie beside each other.
alignas(64) thread_local float turned[most_terms * width];

void compute(const MatrixProduct& it) {
  auto row = it.a_turned != 0 ? 1 : it.lda, step = it.a_turned != 0 ? it.lda : 1;
  for (size_t column = 0; column < it.n; column += width) {
    Columns columns{it.b + column, it.ldb, it.k, std::min(width, it.n - column), it.adds != 0};
    if (it.b_turned != 0) {
      turn(it.b + column * it.ldb, it.ldb, columns.count, it.k, turned, width);
      columns.b = turned;
      columns.ld = width;
    } else if (columns.count == width && it.ldb >= far_apart && it.m > width) {
      copy(columns.b, it.ldb, it.k, turned);
      columns.b = turned;
      columns.ld = width;
    }
    const auto* multiply = columns.count == width ? by_rows_of<2, true>
        : columns.count > lanes                   ? by_rows_of<2, false>
                                                  : by_rows_of<1, false>;
    for (size_t i = 0, rows = 0; i < it.m; i += rows) {
      auto left = it.m - i;
      rows = left == 7 || left == 8 ? 4 : std::min(left, most_rows);
      multiply[rows - 1](it.a + i * row, row, step, columns, it.c + i * it.ldc + column, it.ldc);
    }
  }
}

// By the product's transpose: of few rows it takes less to turn them, and what comes out, than all of the right side.
void compute_turned(const MatrixProduct& it) {
  constexpr size_t most = 8 * most_rows; // columns of the product
  alignas(64) float columns[most * width];
  MatrixProduct part{0, it.m, it.k, nullptr, it.ldb, 0, it.a, it.lda, 0, columns, width, 0};
  if (it.a_turned == 0) {
    turn(it.a, it.lda, it.m, it.k, turned, width);
    part.b = turned;
    part.ldb = width;
  }
  for (size_t column = 0; column < it.n; column += part.m) {
    part.m = std::min(most, it.n - column);
    part.a = it.b + column * it.ldb;
    compute(part);
    turn(columns, width, part.m, it.m, it.c + column, it.ldc, it.adds != 0);
  }
}

bool has_instructions() {
  static const bool has =
      __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && !__builtin_cpu_supports("avx512f");
  return has;
}

} // namespace small

} // namespace faststep

bool faststep_is_small_product(size_t m, size_t n, size_t k, size_t b_turned) noexcept {
  using namespace faststep::small;
  bool has_few_rows = b_turned != 0 && m <= most_few_rows && n >= width;
  return has_instructions() && std::min(m, n) > 1 && k <= most_terms && (has_few_rows || m * n * k <= most_work);
}

bool faststep_small_product(const faststep::MatrixProduct* product) noexcept {
  using namespace faststep::small;
  const auto& it = *product;
  if (!faststep_is_small_product(it.m, it.n, it.k, it.b_turned)) {
    return false;
  }
  bool turns_rows = it.b_turned != 0 && it.m <= width && it.m < it.n;
  (turns_rows ? compute_turned : compute)(it);
  return true;
}

#else

bool faststep_is_small_product(size_t, size_t, size_t, size_t) noexcept {
  return false;
}

bool faststep_small_product(const faststep::MatrixProduct*) noexcept {
  return false;
}

#endif
