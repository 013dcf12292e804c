// Loops for vectors that a compiler does not make of MLX's functions: e^x, what MLX computes with it, and what it leaves to the C
// library; roots; choices; float16, by float32.
#pragma once

#if defined(__x86_64__) && defined(__GNUC__)

#include <immintrin.h>

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <type_traits>

#include "cpu/blocks/loops.hpp"
#include "cpu/exp.hpp"
#include "cpu/hyperbolic.hpp"

namespace faststep::blocks {

#define FASTSTEP_HALF __attribute__((target("avx2,f16c")))

template <typename T, typename... Ts>
constexpr bool is_one_of = (std::is_same_v<T, Ts> || ...);

// --- functions of float32, eight numbers at a time

template <__m256 (*of)(__m256)>
FASTSTEP_AVX2 void by_eight(char* out, const char* const* in, int n) {
  auto* a = reinterpret_cast<const float*>(in[0]);
  auto* to = reinterpret_cast<float*>(out);
  int i = 0;
  for (; i + exp_lanes <= n; i += exp_lanes) {
    _mm256_storeu_ps(to + i, of(_mm256_loadu_ps(a + i)));
  }
  if (i < n) {
    float rest[exp_lanes] = {};
    auto bytes = static_cast<size_t>(n - i) * sizeof(float);
    std::memcpy(rest, a + i, bytes);
    _mm256_storeu_ps(rest, of(_mm256_loadu_ps(rest)));
    std::memcpy(to + i, rest, bytes);
  }
}

FASTSTEP_AVX2 inline __m256 exp_vector(__m256 x) {
  return exp_of(x);
}

FASTSTEP_AVX2 inline __m256 tanh_vector(__m256 x) {
  return tanh_of(x);
}

FASTSTEP_AVX2 inline __m256 cosh_vector(__m256 x) {
  return cosh_of(x);
}

FASTSTEP_AVX2 inline __m256 sqrt_vector(__m256 x) {
  return _mm256_sqrt_ps(x);
}

FASTSTEP_AVX2 inline __m256 rsqrt_vector(__m256 x) {
  return _mm256_div_ps(_mm256_set1_ps(1.0f), _mm256_sqrt_ps(x));
}

FASTSTEP_AVX2 inline __m256 ceil_vector(__m256 x) {
  return _mm256_ceil_ps(x);
}

FASTSTEP_AVX2 inline __m256 floor_vector(__m256 x) {
  return _mm256_floor_ps(x);
}

FASTSTEP_AVX2 inline __m256 sigmoid_vector(__m256 x) {
  auto one = _mm256_set1_ps(1.0f);
  auto y = _mm256_div_ps(one, _mm256_add_ps(one, exp_of(magnitude(x))));
  auto above = _mm256_sub_ps(one, y);
  return _mm256_blendv_ps(above, y, _mm256_cmp_ps(x, _mm256_setzero_ps(), _CMP_LT_OQ));
}

FASTSTEP_AVX2 inline __m256 erf_vector(__m256 x) {
  auto one = _mm256_set1_ps(1.0f);
  auto minus = _mm256_set1_ps(-0.0f);
  auto t = _mm256_div_ps(one, _mm256_fmadd_ps(_mm256_set1_ps(0.3275911f), magnitude(x), one));
  auto r = _mm256_fmadd_ps(_mm256_set1_ps(1.061405429f), t, _mm256_set1_ps(-1.453152027f));
  r = _mm256_fmadd_ps(r, t, _mm256_set1_ps(1.421413741f));
  r = _mm256_fmadd_ps(r, t, _mm256_set1_ps(-0.284496736f));
  r = _mm256_fmadd_ps(r, t, _mm256_set1_ps(0.254829592f));
  auto e = _mm256_xor_ps(minus, exp_of(_mm256_mul_ps(_mm256_xor_ps(minus, x), x)));
  auto result = _mm256_fmadd_ps(_mm256_mul_ps(e, t), r, one);
  return _mm256_blendv_ps(_mm256_xor_ps(minus, result), result, _mm256_cmp_ps(x, _mm256_setzero_ps(), _CMP_GT_OQ));
}

// --- choices, whatever the elements are

// As many bools as there are elements of a type in a vector, each as wide as one of these: all bits or none.
template <typename T>
FASTSTEP_AVX2 inline __m256i mask_of(const char* bools) {
  __m256i wide;
  if constexpr (sizeof(T) == 1) {
    wide = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(bools));
  } else if constexpr (sizeof(T) == 2) {
    wide = _mm256_cvtepu8_epi16(_mm_loadu_si128(reinterpret_cast<const __m128i*>(bools)));
  } else if constexpr (sizeof(T) == 4) {
    wide = _mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(bools)));
  } else {
    int four;
    std::memcpy(&four, bools, sizeof(four));
    wide = _mm256_cvtepu8_epi64(_mm_cvtsi32_si128(four));
  }
  auto zero = _mm256_setzero_si256();
  return sizeof(T) == 1 ? _mm256_cmpgt_epi8(wide, zero)
      : sizeof(T) == 2  ? _mm256_cmpgt_epi16(wide, zero)
      : sizeof(T) == 4  ? _mm256_cmpgt_epi32(wide, zero)
                        : _mm256_cmpgt_epi64(wide, zero);
}

template <typename T, bool second, bool third>
FASTSTEP_AVX2 void select(char* out, const char* const* in, int n) {
  constexpr int lanes = sizeof(__m256i) / sizeof(T);
  auto* a = reinterpret_cast<const T*>(in[1]);
  auto* b = reinterpret_cast<const T*>(in[2]);
  auto* to = reinterpret_cast<T*>(out);
  T one = a[0], other = b[0], many[lanes], others[lanes];
  std::fill_n(many, lanes, one);
  std::fill_n(others, lanes, other);
  int i = 0;
  for (; i + lanes <= n; i += lanes) {
    auto x = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(second ? many : a + i));
    auto y = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(third ? others : b + i));
    auto chosen = _mm256_blendv_epi8(y, x, mask_of<T>(in[0] + i));
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(to + i), chosen);
  }
  for (; i < n; ++i) {
    T x = second ? one : a[i], y = third ? other : b[i];
    to[i] = in[0][i] != 0 ? x : y;
  }
}

// By one condition for all.
template <typename T, bool second, bool third>
void select_all(char* out, const char* const* in, int n) {
  bool is = in[0][0] != 0;
  bool is_single = is ? second : third;
  const auto* from = in[is ? 1 : 2];
  if (is_single) {
    T value;
    std::memcpy(&value, from, sizeof(T));
    std::fill_n(reinterpret_cast<T*>(out), n, value);
  } else {
    std::memmove(out, from, static_cast<size_t>(n) * sizeof(T));
  }
}

template <typename T>
Loop select_of(unsigned single) {
  constexpr Loop all[] = {
      select<T, false, false>,     select_all<T, false, false>, select<T, true, false>, select_all<T, true, false>,
      select<T, false, true>,      select_all<T, false, true>,  select<T, true, true>,  select_all<T, true, true>};
  return all[single & 7];
}

inline void negate(char* out, const char* const* in, int n) {
#pragma GCC ivdep
  for (int i = 0; i < n; ++i) {
    out[i] = static_cast<char>(in[0][i] ^ 1);
  }
}

// --- float16

FASTSTEP_HALF inline void widen(char* out, const char* const* in, int n) {
  auto* a = reinterpret_cast<const mx::float16_t*>(in[0]);
  auto* to = reinterpret_cast<float*>(out);
  int i = 0;
  for (; i + exp_lanes <= n; i += exp_lanes) {
    _mm256_storeu_ps(to + i, _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(a + i))));
  }
  for (; i < n; ++i) {
    to[i] = a[i];
  }
}

FASTSTEP_HALF inline void narrow(char* out, const char* const* in, int n) {
  auto* a = reinterpret_cast<const float*>(in[0]);
  auto* to = reinterpret_cast<mx::float16_t*>(out);
  int i = 0;
  for (; i + exp_lanes <= n; i += exp_lanes) {
    auto x = _mm256_loadu_ps(a + i);
    if (_mm256_movemask_ps(_mm256_cmp_ps(x, x, _CMP_UNORD_Q)) != 0) [[unlikely]] { // MLX has a NaN of its own
      std::copy_n(a + i, exp_lanes, to + i);
      continue;
    }
    auto half = _mm256_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
    _mm_storeu_si128(reinterpret_cast<__m128i*>(to + i), half);
  }
  std::copy_n(a + i, n - i, to + i);
}

// A loop of float32 over float16, whose results are rounded, or are bools.
template <Loop loop, int inputs, unsigned single, typename Result>
void by_float(char* out, const char* const* in, int n) {
  constexpr int few = 128;
  alignas(32) float wide[inputs + 1][few];
  const char* now[inputs];
  for (int i = 0; i < inputs; ++i) {
    now[i] = reinterpret_cast<const char*>(wide[i]);
    if ((single >> i & 1) != 0) {
      widen(reinterpret_cast<char*>(wide[i]), in + i, 1);
    }
  }
  for (int first = 0; first < n; first += few) {
    int count = std::min(few, n - first);
    for (int i = 0; i < inputs; ++i) {
      if ((single >> i & 1) == 0) {
        const char* from = in[i] + static_cast<size_t>(first) * sizeof(mx::float16_t);
        widen(reinterpret_cast<char*>(wide[i]), &from, count);
      }
    }
    auto* to = out + static_cast<size_t>(first) * sizeof(Result);
    if constexpr (std::is_same_v<Result, bool>) {
      loop(to, now, count);
    } else {
      const auto* made = reinterpret_cast<const char*>(wide[inputs]);
      loop(reinterpret_cast<char*>(wide[inputs]), now, count);
      narrow(to, &made, count);
    }
  }
}

} // namespace faststep::blocks

#endif
