// e^x of eight numbers at once, with the bits of MLX's on x86-64 (mlx/backend/cpu/simd/math.h), which computes one at a time and
// calls the C library for each fused product and sum.
#pragma once

#if defined(__x86_64__)

#include <immintrin.h>

#include <algorithm>
#include <cstring>
#include <vector>

#include "mlx/backend/cpu/simd/simd.h"

namespace faststep {

#define FASTSTEP_AVX2 __attribute__((target("avx2,fma")))

inline constexpr int exp_lanes = 8;

FASTSTEP_AVX2 inline __m256 exp_of(__m256 in) {
  auto x = _mm256_mul_ps(in, _mm256_set1_ps(1.442695f));
  // MLX adds 0.5 in float64 and takes the integer below: to the nearest one, and a half up
  auto whole = _mm256_round_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
  auto is_half = _mm256_cmp_ps(_mm256_sub_ps(x, whole), _mm256_set1_ps(0.5f), _CMP_EQ_OQ);
  whole = _mm256_add_ps(whole, _mm256_and_ps(is_half, _mm256_set1_ps(1.0f)));
  asm("" : "+x"(x)); // a compiler may fuse this product with the difference
  auto part = _mm256_sub_ps(x, whole);
  auto y = _mm256_set1_ps(1.535336188319500e-4f);
  y = _mm256_fmadd_ps(y, part, _mm256_set1_ps(1.339887440266574e-3f));
  y = _mm256_fmadd_ps(y, part, _mm256_set1_ps(9.618437357674640e-3f));
  y = _mm256_fmadd_ps(y, part, _mm256_set1_ps(5.550332471162809e-2f));
  y = _mm256_fmadd_ps(y, part, _mm256_set1_ps(2.402264791363012e-1f));
  y = _mm256_fmadd_ps(y, part, _mm256_set1_ps(6.931472028550421e-1f));
  y = _mm256_fmadd_ps(y, part, _mm256_set1_ps(1.000000000000000f));
  auto power = _mm256_slli_epi32(_mm256_add_epi32(_mm256_cvttps_epi32(whole), _mm256_set1_epi32(127)), 23);
  y = _mm256_mul_ps(_mm256_castsi256_ps(power), y);
  y = _mm256_blendv_ps(y, in, _mm256_cmp_ps(in, in, _CMP_UNORD_Q));
  y = _mm256_blendv_ps(y, _mm256_set1_ps(__builtin_inff()), _mm256_cmp_ps(in, _mm256_set1_ps(88.0f), _CMP_GT_OQ));
  return _mm256_blendv_ps(y, _mm256_setzero_ps(), _mm256_cmp_ps(in, _mm256_set1_ps(-88.0f), _CMP_LT_OQ));
}

// Compare a function, to the bit, with one that computes number by number; there are a multiple of eight numbers.
template <__m256 (*of)(__m256)>
FASTSTEP_AVX2 bool has_bits_of(float (*other)(float), const std::vector<float>& numbers) {
  for (size_t from = 0; from < numbers.size(); from += exp_lanes) {
    float out[exp_lanes], wanted[exp_lanes];
    std::transform(&numbers[from], &numbers[from] + exp_lanes, wanted, other);
    _mm256_storeu_ps(out, of(_mm256_loadu_ps(&numbers[from])));
    if (std::memcmp(out, wanted, sizeof(wanted)) != 0) {
      return false;
    }
  }
  return true;
}

// Compare e^x with MLX's.
inline bool is_exp_known() {
  std::vector<float> numbers;
  for (int i = 0; i < 90 * 64; ++i) {
    numbers.push_back(static_cast<float>(i) * -0.015625f + 1e-3f * static_cast<float>(i % exp_lanes));
  }
  auto of_mlx = [](float x) { return mlx::core::simd::exp(mlx::core::simd::Simd<float, 1>(x)).value; };
  return has_bits_of<exp_of>(of_mlx, numbers);
}

// Return true if exponentials here have MLX's bits on this processor.
inline bool can_compute_exp() {
  static const bool can = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && is_exp_known();
  return can;
}

} // namespace faststep

#else

namespace faststep {

inline bool can_compute_exp() {
  return false; // elsewhere a product and a sum are one instruction of MLX's own loop
}

} // namespace faststep

#endif
