// MLX's own functions of one element (mlx/backend/cpu/unary_ops.h, binary_ops.h), as its fused kernels call them, in loops for vectors
// of 256 bits. Without the instructions that round a product and a sum once: a compiler would use them where MLX rounds twice.
// MLX's e^x rounds once, and is taken from exp.hpp.
#include "cpu/blocks/loops.hpp"

#if defined(__x86_64__) && defined(__GNUC__)

#include <cstdint>
#include <cstring>
#include <unordered_map>

#include "mlx/backend/cpu/binary_ops.h"
#include "mlx/backend/cpu/unary_ops.h"
#include "cpu/exp.hpp"
#include "cpu/hyperbolic.hpp"

namespace faststep::blocks {

#define FASTSTEP_LOOP __attribute__((target("avx2")))

namespace {

namespace ops = mx::detail;
using mx::bfloat16_t;
using mx::float16_t;

template <typename Op, typename T>
FASTSTEP_LOOP void unary(char* out, const char* const* in, int n) {
  auto* a = reinterpret_cast<const T*>(in[0]);
  auto* to = reinterpret_cast<T*>(out);
#pragma GCC ivdep
  for (int i = 0; i < n; ++i) {
    to[i] = Op()(a[i]);
  }
}

template <typename Op, typename T, typename Result, bool first, bool second>
FASTSTEP_LOOP void binary(char* out, const char* const* in, int n) {
  auto* a = reinterpret_cast<const T*>(in[0]);
  auto* b = reinterpret_cast<const T*>(in[1]);
  auto* to = reinterpret_cast<Result*>(out);
  T one = a[0], other = b[0];
#pragma GCC ivdep
  for (int i = 0; i < n; ++i) {
    to[i] = Op()(first ? one : a[i], second ? other : b[i]);
  }
}

template <typename T, bool first, bool second, bool third>
FASTSTEP_LOOP void select(char* out, const char* const* in, int n) {
  auto* condition = reinterpret_cast<const bool*>(in[0]);
  auto* a = reinterpret_cast<const T*>(in[1]);
  auto* b = reinterpret_cast<const T*>(in[2]);
  auto* to = reinterpret_cast<T*>(out);
  bool is = condition[0];
  T one = a[0], other = b[0];
#pragma GCC ivdep
  for (int i = 0; i < n; ++i) {
    T x = second ? one : a[i], y = third ? other : b[i];
    to[i] = (first ? is : condition[i]) ? x : y;
  }
}

template <typename From, typename To>
FASTSTEP_LOOP void cast(char* out, const char* const* in, int n) {
  auto* a = reinterpret_cast<const From*>(in[0]);
  auto* to = reinterpret_cast<To*>(out);
  if constexpr (sizeof(From) >= sizeof(To)) {
#pragma GCC ivdep
    for (int i = 0; i < n; ++i) {
      to[i] = static_cast<To>(a[i]);
    }
  } else { // the output may be the input only where both have the same size
    for (int i = 0; i < n; ++i) {
      to[i] = static_cast<To>(a[i]);
    }
  }
}

template <typename T, bool single>
FASTSTEP_LOOP void copy(char* out, const char* const* in, int n) {
  if constexpr (single) {
    T value;
    std::memcpy(&value, in[0], sizeof(T));
    auto* to = reinterpret_cast<T*>(out);
    for (int i = 0; i < n; ++i) {
      to[i] = value;
    }
  } else {
    std::memmove(out, in[0], static_cast<size_t>(n) * sizeof(T));
  }
}

// --- e^x, what MLX computes with it, and what it leaves to the C library, eight at a time

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

// --- by name

// The loop for the one of these types that a dtype is.
template <typename... Ts, typename Make>
Loop among(mx::Dtype dtype, Make make) {
  Loop found = nullptr;
  ((dtype == mx::Dtype(mx::TypeToDtype<Ts>()) ? void(found = make.template operator()<Ts>()) : void()), ...);
  return found;
}

using Maker = Loop (*)(mx::Dtype dtype, unsigned single);

template <typename Op>
Loop of_floats(mx::Dtype dtype, unsigned) {
  return among<float, float16_t, bfloat16_t>(dtype, []<typename T>() -> Loop { return unary<Op, T>; });
}

template <typename Op, __m256 (*of)(__m256)>
Loop by_exp(mx::Dtype dtype, unsigned single) {
  return dtype == mx::float32 ? by_eight<of> : of_floats<Op>(dtype, single);
}

// Null for another C library than the one whose bits are known.
template <__m256 (*of)(__m256), float (*library)(float)>
Loop ahead_of_library() {
  static const bool is_known = has_bits_of_library<of>(library);
  return is_known ? by_eight<of> : nullptr;
}

template <typename Op, Loop (*ahead)()>
Loop by_library(mx::Dtype dtype, unsigned single) {
  auto loop = dtype == mx::float32 ? ahead() : nullptr;
  return loop != nullptr ? loop : of_floats<Op>(dtype, single);
}

constexpr auto tanh_ahead = ahead_of_library<tanh_vector, std::tanh>;
constexpr auto cosh_ahead = ahead_of_library<cosh_vector, std::cosh>;

template <typename Op>
Loop of_signed(mx::Dtype dtype, unsigned) {
  return among<float, float16_t, bfloat16_t, int32_t>(dtype, []<typename T>() -> Loop { return unary<Op, T>; });
}

template <typename Op>
Loop of_bools(mx::Dtype dtype, unsigned) {
  return among<bool>(dtype, []<typename T>() -> Loop { return unary<Op, T>; });
}

template <typename Op, typename T, typename Result>
Loop with_single(unsigned single) {
  switch (single & 3) {
    case 1:
      return binary<Op, T, Result, true, false>;
    case 2:
      return binary<Op, T, Result, false, true>;
    default:
      return binary<Op, T, Result, false, false>;
  }
}

template <typename Op>
Loop of_two_floats(mx::Dtype dtype, unsigned single) {
  return among<float, float16_t, bfloat16_t>(dtype, [=]<typename T>() { return with_single<Op, T, T>(single); });
}

template <typename Op>
Loop of_two_numbers(mx::Dtype dtype, unsigned single) {
  return among<float, float16_t, bfloat16_t, int32_t, uint32_t, int64_t, uint64_t>(
      dtype, [=]<typename T>() { return with_single<Op, T, T>(single); });
}

template <typename Op>
Loop of_two_integers(mx::Dtype dtype, unsigned single) {
  return among<bool, int32_t, uint32_t, int64_t, uint64_t>(dtype, [=]<typename T>() { return with_single<Op, T, T>(single); });
}

template <typename Op>
Loop of_two_bools(mx::Dtype dtype, unsigned single) {
  return among<bool>(dtype, [=]<typename T>() { return with_single<Op, T, bool>(single); });
}

template <typename Op>
Loop comparison(mx::Dtype dtype, unsigned single) {
  return among<float, float16_t, bfloat16_t, int32_t, uint32_t, int64_t, uint64_t, int8_t, uint8_t, bool>(
      dtype, [=]<typename T>() { return with_single<Op, T, bool>(single); });
}

Loop selection(mx::Dtype dtype, unsigned single) {
  return among<float, float16_t, bfloat16_t, int32_t, uint32_t, int64_t, uint64_t, int8_t, uint8_t, bool>(dtype, [=]<typename T>() -> Loop {
    constexpr Loop all[] = {
        select<T, false, false, false>, select<T, true, false, false>, select<T, false, true, false>,
        select<T, true, true, false>,   select<T, false, false, true>, select<T, true, false, true>,
        select<T, false, true, true>,   select<T, true, true, true>};
    return all[single & 7];
  });
}

const std::unordered_map<std::string_view, Maker>& makers() {
  static const auto& all = *new std::unordered_map<std::string_view, Maker>{
      {"Abs", of_signed<ops::Abs>},
      {"ArcTan", of_floats<ops::ArcTan>},
      {"ArcTan2", of_two_floats<ops::ArcTan2>},
      {"Add", of_two_numbers<ops::Add>},
      {"BitwiseAnd", of_two_integers<ops::BitwiseAnd>},
      {"BitwiseOr", of_two_integers<ops::BitwiseOr>},
      {"BitwiseXor", of_two_integers<ops::BitwiseXor>},
      {"Ceil", of_floats<ops::Ceil>},
      {"Cos", of_floats<ops::Cos>},
      {"Cosh", by_library<ops::Cosh, cosh_ahead>},
      {"Divide", of_two_floats<ops::Divide>},
      {"Equal", comparison<ops::Equal>},
      {"Erf", by_exp<ops::Erf, erf_vector>},
      {"ErfInv", of_floats<ops::ErfInv>},
      {"Exp", by_exp<ops::Exp, exp_vector>},
      {"Expm1", of_floats<ops::Expm1>},
      {"Floor", of_floats<ops::Floor>},
      {"Greater", comparison<ops::Greater>},
      {"GreaterEqual", comparison<ops::GreaterEqual>},
      {"Less", comparison<ops::Less>},
      {"LessEqual", comparison<ops::LessEqual>},
      {"Log", of_floats<ops::Log>},
      {"Log10", of_floats<ops::Log10>},
      {"Log1p", of_floats<ops::Log1p>},
      {"Log2", of_floats<ops::Log2>},
      {"LogAddExp", of_two_floats<ops::LogAddExp>},
      {"LogicalAnd", of_two_bools<ops::LogicalAnd>},
      {"LogicalNot", of_bools<ops::LogicalNot>},
      {"LogicalOr", of_two_bools<ops::LogicalOr>},
      {"Maximum", of_two_numbers<ops::Maximum>},
      {"Minimum", of_two_numbers<ops::Minimum>},
      {"Multiply", of_two_numbers<ops::Multiply>},
      {"Negative", of_signed<ops::Negative>},
      {"NotEqual", comparison<ops::NotEqual>},
      {"Power", of_two_floats<ops::Power>},
      {"Round", of_floats<ops::Round>},
      {"Rsqrt", of_floats<ops::Rsqrt>},
      {"Select", selection},
      {"Sigmoid", by_exp<ops::Sigmoid, sigmoid_vector>},
      {"Sign", of_signed<ops::Sign>},
      {"Sin", of_floats<ops::Sin>},
      {"Sinh", of_floats<ops::Sinh>},
      {"Sqrt", of_floats<ops::Sqrt>},
      {"Square", of_signed<ops::Square>},
      {"Subtract", of_two_numbers<ops::Subtract>},
      {"Tan", of_floats<ops::Tan>},
      {"Tanh", by_library<ops::Tanh, tanh_ahead>}};
  return all;
}

} // namespace

Loop loop_of(std::string_view operation, mx::Dtype dtype, unsigned single) {
  auto found = makers().find(operation);
  return found == makers().end() ? nullptr : found->second(dtype, single);
}

bool is_ahead_of_library(std::string_view operation, mx::Dtype dtype) {
  auto ahead = operation == "Tanh" ? tanh_ahead : operation == "Cosh" ? cosh_ahead : nullptr;
  return ahead != nullptr && dtype == mx::float32 && ahead() != nullptr;
}

Loop cast_of(mx::Dtype from, mx::Dtype to) {
  return among<float, float16_t, bfloat16_t, int32_t, uint32_t, int64_t, uint64_t, int8_t, uint8_t, bool>(from, [to]<typename From>() {
    return among<float, float16_t, bfloat16_t, int32_t, uint32_t, int64_t, uint64_t, int8_t, uint8_t, bool>(
        to, []<typename To>() -> Loop { return cast<From, To>; });
  });
}

Loop copy_of(size_t itemsize, bool single) {
  switch (itemsize) {
    case 1:
      return single ? copy<uint8_t, true> : copy<uint8_t, false>;
    case 2:
      return single ? copy<uint16_t, true> : copy<uint16_t, false>;
    case 4:
      return single ? copy<uint32_t, true> : copy<uint32_t, false>;
    case 8:
      return single ? copy<uint64_t, true> : copy<uint64_t, false>;
    default:
      return nullptr;
  }
}

bool can_loop() {
  static const bool can = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && is_exp_known();
  return can;
}

} // namespace faststep::blocks

#else

namespace faststep::blocks {

Loop loop_of(std::string_view, mx::Dtype, unsigned) {
  return nullptr;
}

bool is_ahead_of_library(std::string_view, mx::Dtype) {
  return false;
}

Loop cast_of(mx::Dtype, mx::Dtype) {
  return nullptr;
}

Loop copy_of(size_t, bool) {
  return nullptr;
}

bool can_loop() {
  return false;
}

} // namespace faststep::blocks

#endif
