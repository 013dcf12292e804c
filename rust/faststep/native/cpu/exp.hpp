// e^x of eight numbers at once, with the bits of MLX's on x86-64 (mlx/backend/cpu/simd/math.h), which computes one at a time and
// calls the C library for each fused product and sum.
#pragma once

#if defined(__x86_64__)

#include <immintrin.h>

#include <cstring>

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

// Whether it has the bits of MLX's.
FASTSTEP_AVX2 inline bool is_exp_known() {
  for (int from = 0; from < 90 * 64; from += exp_lanes) {
    float in[exp_lanes], out[exp_lanes], wanted[exp_lanes];
    for (int lane = 0; lane < exp_lanes; ++lane) {
      in[lane] = static_cast<float>(from + lane) * -0.015625f + 1e-3f * static_cast<float>(lane);
      wanted[lane] = mlx::core::simd::exp(mlx::core::simd::Simd<float, 1>(in[lane])).value;
    }
    _mm256_storeu_ps(out, exp_of(_mm256_loadu_ps(in)));
    if (std::memcmp(out, wanted, sizeof(wanted)) != 0) {
      return false;
    }
  }
  return true;
}

} // namespace faststep

#endif
