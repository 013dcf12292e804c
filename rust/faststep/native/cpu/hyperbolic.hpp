// tanh and cosh of eight numbers at once, with the bits of the C library's, which MLX calls for each number: of glibc's before 2.41,
// which are fdlibm's (s_tanhf.c, e_coshf.c, s_expm1f.c; Copyright (C) 1993 by Sun Microsystems, Inc. All rights reserved. Permission to
// use, copy, modify, and distribute this software is freely granted, provided that this notice is preserved) and, in cosh, the expf of
// Arm's optimized-routines.
#pragma once

#if defined(__x86_64__)

#include <immintrin.h>

#include <cmath>
#include <cstdint>
#include <cstring>
#include <vector>

#include "cpu/exp.hpp"

namespace faststep {

// A product that a compiler does not fuse with a sum.
FASTSTEP_AVX2 inline __m256 product(__m256 a, __m256 b) {
  auto c = _mm256_mul_ps(a, b);
  asm("" : "+x"(c));
  return c;
}

FASTSTEP_AVX2 inline __m256 magnitude(__m256 x) {
  return _mm256_andnot_ps(_mm256_set1_ps(-0.0f), x);
}

// 2^k for whole numbers.
FASTSTEP_AVX2 inline __m256 power_of_two(__m256 k) {
  return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_add_epi32(_mm256_cvttps_epi32(k), _mm256_set1_epi32(127)), 23));
}

// e^(x + c) - 1 where |x| is at most ln(2) / 2, and c what is left of its rounding.
FASTSTEP_AVX2 inline __m256 expm1_of_rest(__m256 x, __m256 c) {
  auto half = product(_mm256_set1_ps(0.5f), x);
  auto square = product(x, half);
  auto r = _mm256_add_ps(_mm256_set1_ps(4.0082177293e-06f), product(square, _mm256_set1_ps(-2.0109921195e-07f)));
  r = _mm256_add_ps(_mm256_set1_ps(-7.9365076090e-05f), product(square, r));
  r = _mm256_add_ps(_mm256_set1_ps(1.5873016091e-03f), product(square, r));
  r = _mm256_add_ps(_mm256_set1_ps(-3.3333335072e-02f), product(square, r));
  r = _mm256_add_ps(_mm256_set1_ps(1.0f), product(square, r));
  auto t = _mm256_sub_ps(_mm256_set1_ps(3.0f), product(r, half));
  auto below = _mm256_sub_ps(_mm256_set1_ps(6.0f), product(x, t));
  auto e = product(square, _mm256_div_ps(_mm256_sub_ps(r, t), below));
  e = _mm256_sub_ps(product(x, _mm256_sub_ps(e, c)), c);
  return _mm256_sub_ps(x, _mm256_sub_ps(e, square));
}

FASTSTEP_AVX2 inline __m256 tanh_of(__m256 in) {
  auto sign = _mm256_set1_ps(-0.0f), one = _mm256_set1_ps(1.0f), two = _mm256_set1_ps(2.0f), zero = _mm256_setzero_ps();
  auto a = _mm256_min_ps(magnitude(in), _mm256_set1_ps(22.0f)); // from there on it is 1
  auto is_large = _mm256_cmp_ps(a, one, _CMP_GE_OQ);
  auto x = product(a, _mm256_blendv_ps(_mm256_set1_ps(-2.0f), two, is_large));

  auto k = _mm256_add_ps(product(_mm256_set1_ps(1.4426950216e+00f), x), _mm256_or_ps(_mm256_set1_ps(0.5f), _mm256_and_ps(sign, x)));
  k = _mm256_round_ps(k, _MM_FROUND_TO_ZERO | _MM_FROUND_NO_EXC);
  auto high = _mm256_sub_ps(x, product(k, _mm256_set1_ps(6.9313812256e-01f)));
  auto low = product(k, _mm256_set1_ps(9.0580006145e-06f));
  auto rest = _mm256_sub_ps(high, low);
  auto y = expm1_of_rest(rest, _mm256_sub_ps(_mm256_sub_ps(high, rest), low));

  // e^x - 1 from that of the rest: by k the same in another order
  auto is_far = _mm256_cmp_ps(k, _mm256_set1_ps(-1.5f), _CMP_LT_OQ);
  auto before = _mm256_and_ps(is_far, one);
  before = _mm256_blendv_ps(before, _mm256_sub_ps(one, power_of_two(_mm256_sub_ps(zero, k))), is_large);
  auto behind = _mm256_blendv_ps(_mm256_mul_ps(k, _mm256_set1_ps(-0.5f)), one, is_far);
  behind = _mm256_andnot_ps(is_large, behind);
  auto t = _mm256_sub_ps(product(_mm256_add_ps(before, y), power_of_two(k)), behind);

  auto part = _mm256_div_ps(_mm256_blendv_ps(_mm256_xor_ps(sign, t), two, is_large), _mm256_add_ps(t, two));
  auto z = _mm256_blendv_ps(part, _mm256_sub_ps(one, part), is_large);
  z = _mm256_or_ps(magnitude(z), _mm256_and_ps(sign, in));
  return _mm256_blendv_ps(z, in, _mm256_cmp_ps(in, in, _CMP_UNORD_Q));
}

// e^x of four numbers, of which the caller makes floats: 2^(k / 32), from a table, times a polynomial.
FASTSTEP_AVX2 inline __m256d expf_of(__m256d x) {
  alignas(32) static constexpr uint64_t powers[] = {
      0x3ff0000000000000, 0x3fefd9b0d3158574, 0x3fefb5586cf9890f, 0x3fef9301d0125b51, 0x3fef72b83c7d517b, 0x3fef54873168b9aa,
      0x3fef387a6e756238, 0x3fef1e9df51fdee1, 0x3fef06fe0a31b715, 0x3feef1a7373aa9cb, 0x3feedea64c123422, 0x3feece086061892d,
      0x3feebfdad5362a27, 0x3feeb42b569d4f82, 0x3feeab07dd485429, 0x3feea47eb03a5585, 0x3feea09e667f3bcd, 0x3fee9f75e8ec5f74,
      0x3feea11473eb0187, 0x3feea589994cce13, 0x3feeace5422aa0db, 0x3feeb737b0cdc5e5, 0x3feec49182a3f090, 0x3feed503b23e255d,
      0x3feee89f995ad3ad, 0x3feeff76f2fb5e47, 0x3fef199bdd85529c, 0x3fef3720dcef9069, 0x3fef5818dcfba487, 0x3fef7c97337b9b5f,
      0x3fefa4afa2a490da, 0x3fefd0765b6e4540};
  auto shift = _mm256_set1_pd(0x1.8p+52), scale = _mm256_set1_pd(0x1.71547652b82fep+0 * 32);
  auto k = _mm256_fmadd_pd(scale, x, shift);
  auto ki = _mm256_castpd_si256(k);
  auto r = _mm256_fmsub_pd(scale, x, _mm256_sub_pd(k, shift));
  auto at = _mm256_and_si256(ki, _mm256_set1_epi64x(31));
  auto s = _mm256_i64gather_epi64(reinterpret_cast<const long long*>(powers), at, sizeof(uint64_t));
  s = _mm256_add_epi64(s, _mm256_slli_epi64(ki, 52 - 5));
  auto z = _mm256_fmadd_pd(_mm256_set1_pd(0x1.c6af84b912394p-5 / 32 / 32 / 32), r, _mm256_set1_pd(0x1.ebfce50fac4f3p-3 / 32 / 32));
  auto y = _mm256_fmadd_pd(_mm256_set1_pd(0x1.62e42ff0c52d6p-1 / 32), r, _mm256_set1_pd(1.0));
  y = _mm256_fmadd_pd(z, _mm256_mul_pd(r, r), y);
  return _mm256_mul_pd(y, _mm256_castsi256_pd(s));
}

FASTSTEP_AVX2 inline __m256 cosh_of(__m256 in) {
  auto a = magnitude(in);
  auto is_small = _mm256_cmp_ps(a, _mm256_set1_ps(0x1.62e43p-2f), _CMP_LT_OQ);
  auto half = _mm256_set1_ps(0.5f), one = _mm256_set1_ps(1.0f);
  auto below = _mm256_cvtpd_ps(expf_of(_mm256_cvtps_pd(_mm256_castps256_ps128(a))));
  auto above = _mm256_cvtpd_ps(expf_of(_mm256_cvtps_pd(_mm256_extractf128_ps(a, 1))));
  auto e = _mm256_set_m128(above, below);
  auto y = _mm256_add_ps(product(half, e), _mm256_div_ps(half, e));
  auto t = expm1_of_rest(a, _mm256_setzero_ps());
  auto w = _mm256_add_ps(one, t);
  auto near = _mm256_add_ps(one, _mm256_div_ps(product(t, t), _mm256_add_ps(w, w)));
  y = _mm256_blendv_ps(y, near, is_small);
  auto is_far = _mm256_movemask_ps(_mm256_cmp_ps(a, _mm256_set1_ps(88.0f), _CMP_NLT_UQ));
  if (is_far != 0) [[unlikely]] {
    float numbers[exp_lanes], all[exp_lanes];
    _mm256_storeu_ps(numbers, a);
    _mm256_storeu_ps(all, y);
    for (int lane = 0; lane < exp_lanes; ++lane) {
      all[lane] = (is_far >> lane & 1) != 0 ? std::cosh(numbers[lane]) : all[lane];
    }
    y = _mm256_loadu_ps(all);
  }
  return y;
}

// Compare a function with the C library's of this machine: 4,096 numbers from 2^-20 to 2^7, of either sign.
template <__m256 (*of)(__m256)>
bool has_bits_of_library(float (*library)(float)) {
  uint32_t state = 1;
  std::vector<float> numbers(4096);
  for (auto& number : numbers) {
    state = state * 1664525u + 1013904223u;
    auto significand = static_cast<float>(static_cast<int32_t>(state)) * 0x1p-31f;
    number = std::ldexp(significand, static_cast<int>(state >> 4) % 28 - 20);
  }
  return has_bits_of<of>(library, numbers);
}

} // namespace faststep

#endif
