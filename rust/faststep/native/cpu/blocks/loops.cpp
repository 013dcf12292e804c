// MLX's own functions of one element (mlx/backend/cpu/unary_ops.h, binary_ops.h), as its fused kernels call them, in loops for vectors
// of 256 bits. Without the instructions that round a product and a sum once: a compiler would use them where MLX rounds twice.
// Functions that a compiler does not vectorise, and that are used often, are in vectors.hpp.
#include "cpu/blocks/loops.hpp"

#if defined(__x86_64__) && defined(__GNUC__)

#include <cstdint>
#include <cstring>
#include <unordered_map>

#include "mlx/backend/cpu/binary_ops.h"
#include "mlx/backend/cpu/unary_ops.h"
#include "cpu/blocks/vectors.hpp"

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

// --- by name

// The loop for the one of these types that a dtype is.
template <typename... Ts, typename Make>
Loop among(mx::Dtype dtype, Make make) {
  Loop found = nullptr;
  ((dtype == mx::Dtype(mx::TypeToDtype<Ts>()) ? void(found = make.template operator()<Ts>()) : void()), ...);
  return found;
}

using Maker = Loop (*)(mx::Dtype dtype, unsigned single);

// Whether a function of float16 equals that of float32, rounded.
template <typename Op, typename T>
constexpr bool is_by_float = std::is_same_v<T, float16_t> &&
    is_one_of<Op, ops::Add, ops::Subtract, ops::Multiply, ops::Divide, ops::Maximum, ops::Minimum, ops::Square, ops::Sqrt, ops::Abs,
              ops::Negative, ops::Equal, ops::NotEqual, ops::Greater, ops::GreaterEqual, ops::Less, ops::LessEqual>;

template <typename Op, typename T>
constexpr Loop of_one() {
  if constexpr (is_by_float<Op, T>) {
    return by_float<unary<Op, float>, 1, 0, float16_t>;
  } else {
    return unary<Op, T>;
  }
}

template <typename Op, typename T, typename Result, bool first, bool second>
constexpr Loop of_two() {
  if constexpr (is_by_float<Op, T>) {
    using Wide = std::conditional_t<std::is_same_v<Result, bool>, bool, float>;
    return by_float<binary<Op, float, Wide, first, second>, 2, first | second << 1, Result>;
  } else {
    return binary<Op, T, Result, first, second>;
  }
}

template <typename Op>
Loop of_floats(mx::Dtype dtype, unsigned) {
  return among<float, float16_t, bfloat16_t>(dtype, []<typename T>() -> Loop { return of_one<Op, T>(); });
}

template <typename Op, __m256 (*of)(__m256)>
Loop by_vectors(mx::Dtype dtype, unsigned single) {
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
  return among<float, float16_t, bfloat16_t, int32_t>(dtype, []<typename T>() -> Loop { return of_one<Op, T>(); });
}

template <typename Op>
Loop of_integers(mx::Dtype dtype, unsigned) {
  return among<uint8_t, int32_t, uint32_t, int64_t, uint64_t>(dtype, []<typename T>() -> Loop { return unary<Op, T>; });
}

Loop negation(mx::Dtype dtype, unsigned) {
  return dtype == mx::bool_ ? negate : nullptr;
}

template <typename Op, typename T, typename Result>
Loop with_single(unsigned single) {
  switch (single & 3) {
    case 1:
      return of_two<Op, T, Result, true, false>();
    case 2:
      return of_two<Op, T, Result, false, true>();
    default:
      return of_two<Op, T, Result, false, false>();
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

// A bool is a byte of 0 or 1.
mx::Dtype as_bytes(mx::Dtype dtype) {
  return dtype == mx::bool_ ? mx::uint8 : dtype;
}

template <typename Op>
Loop of_two_integers(mx::Dtype dtype, unsigned single) {
  return among<uint8_t, int32_t, uint32_t, int64_t, uint64_t>(
      as_bytes(dtype), [=]<typename T>() { return with_single<Op, T, T>(single); });
}

template <typename Op>
Loop of_two_bools(mx::Dtype dtype, unsigned single) {
  return dtype == mx::bool_ ? of_two_integers<Op>(dtype, single) : nullptr;
}

template <typename Op>
Loop comparison(mx::Dtype dtype, unsigned single) {
  return among<float, float16_t, bfloat16_t, int32_t, uint32_t, int64_t, uint64_t, int8_t, uint8_t, bool>(
      dtype, [=]<typename T>() { return with_single<Op, T, bool>(single); });
}

Loop selection(mx::Dtype dtype, unsigned single) {
  switch (mx::size_of(dtype)) {
    case 1:
      return select_of<uint8_t>(single);
    case 2:
      return select_of<uint16_t>(single);
    case 4:
      return select_of<uint32_t>(single);
    case 8:
      return select_of<uint64_t>(single);
    default:
      return nullptr;
  }
}

const std::unordered_map<std::string_view, Maker>& makers() {
  static const auto& all = *new std::unordered_map<std::string_view, Maker>{
      {"Abs", of_signed<ops::Abs>},
      {"ArcCos", of_floats<ops::ArcCos>},
      {"ArcCosh", of_floats<ops::ArcCosh>},
      {"ArcSin", of_floats<ops::ArcSin>},
      {"ArcSinh", of_floats<ops::ArcSinh>},
      {"ArcTan", of_floats<ops::ArcTan>},
      {"ArcTan2", of_two_floats<ops::ArcTan2>},
      {"ArcTanh", of_floats<ops::ArcTanh>},
      {"Add", of_two_numbers<ops::Add>},
      {"BitwiseAnd", of_two_integers<ops::BitwiseAnd>},
      {"BitwiseInvert", of_integers<ops::BitwiseInvert>},
      {"BitwiseOr", of_two_integers<ops::BitwiseOr>},
      {"BitwiseXor", of_two_integers<ops::BitwiseXor>},
      {"Ceil", by_vectors<ops::Ceil, ceil_vector>},
      {"Cos", of_floats<ops::Cos>},
      {"Cosh", by_library<ops::Cosh, cosh_ahead>},
      {"Divide", of_two_floats<ops::Divide>},
      {"Equal", comparison<ops::Equal>},
      {"Erf", by_vectors<ops::Erf, erf_vector>},
      {"ErfInv", of_floats<ops::ErfInv>},
      {"Exp", by_vectors<ops::Exp, exp_vector>},
      {"Expm1", of_floats<ops::Expm1>},
      {"Floor", by_vectors<ops::Floor, floor_vector>},
      {"Greater", comparison<ops::Greater>},
      {"GreaterEqual", comparison<ops::GreaterEqual>},
      {"LeftShift", of_two_integers<ops::LeftShift>},
      {"Less", comparison<ops::Less>},
      {"LessEqual", comparison<ops::LessEqual>},
      {"Log", of_floats<ops::Log>},
      {"Log10", of_floats<ops::Log10>},
      {"Log1p", of_floats<ops::Log1p>},
      {"Log2", of_floats<ops::Log2>},
      {"LogAddExp", of_two_floats<ops::LogAddExp>},
      {"LogicalAnd", of_two_bools<ops::BitwiseAnd>},
      {"LogicalNot", negation},
      {"LogicalOr", of_two_bools<ops::BitwiseOr>},
      {"Maximum", of_two_numbers<ops::Maximum>},
      {"Minimum", of_two_numbers<ops::Minimum>},
      {"Multiply", of_two_numbers<ops::Multiply>},
      {"Negative", of_signed<ops::Negative>},
      {"NotEqual", comparison<ops::NotEqual>},
      {"Power", of_two_floats<ops::Power>},
      {"Remainder", of_two_numbers<ops::Remainder>},
      {"RightShift", of_two_integers<ops::RightShift>},
      {"Round", of_floats<ops::Round>},
      {"Rsqrt", by_vectors<ops::Rsqrt, rsqrt_vector>},
      {"Select", selection},
      {"Sigmoid", by_vectors<ops::Sigmoid, sigmoid_vector>},
      {"Sign", of_signed<ops::Sign>},
      {"Sin", of_floats<ops::Sin>},
      {"Sinh", of_floats<ops::Sinh>},
      {"Sqrt", by_vectors<ops::Sqrt, sqrt_vector>},
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
  if (from == mx::float16 && to == mx::float32) {
    return widen;
  }
  if (from == mx::float32 && to == mx::float16) {
    return narrow;
  }
  return among<float, float16_t, bfloat16_t, int32_t, uint32_t, int64_t, uint64_t, int8_t, uint8_t>(as_bytes(from), [to]<typename From>() {
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
  static const bool can = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c") && is_exp_known();
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
