// How a thread computes with denormals.
#pragma once

#include <cstdint>

#ifdef __x86_64__
#include <xmmintrin.h>
#endif

namespace faststep {

// The mode of the calling thread, and the bits by which the denormals that it reads or would write are zeros.
#if defined(__x86_64__)
inline constexpr uint64_t zeros = 0x8040; // FTZ and DAZ of MXCSR

inline uint64_t float_mode() {
  return _mm_getcsr();
}

inline void set_float_mode(uint64_t mode) {
  _mm_setcsr(static_cast<unsigned>(mode));
}
#elif defined(__aarch64__)
inline constexpr uint64_t zeros = uint64_t{1} << 24; // FZ of FPCR

inline uint64_t float_mode() {
  uint64_t mode;
  asm volatile("mrs %0, fpcr" : "=r"(mode));
  return mode;
}

inline void set_float_mode(uint64_t mode) {
  asm volatile("msr fpcr, %0" : : "r"(mode));
}
#else
inline constexpr uint64_t zeros = 0;

inline uint64_t float_mode() {
  return 0;
}

inline void set_float_mode(uint64_t) {}
#endif

} // namespace faststep
