// What a CUDA kernel finds on its device, on a CPU: one block after another, its threads as coroutines in turns.
#pragma once

#include <ucontext.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <functional>
#include <memory>
#include <vector>

#define __device__
#define __forceinline__ inline
#define __shared__ static

using std::min;

struct float2 {
  float x, y;
};
struct float4 {
  float x, y, z, w;
};
struct Dim3 {
  int x, y, z;
};
using Shape = std::array<int32_t, 8>;
using Strides = std::array<int64_t, 8>;

inline Dim3 threadIdx, blockIdx, blockDim, gridDim;

template <typename T, int N>
struct alignas(sizeof(T) * N) AlignedVector {
  T val[N];
  T& operator[](int i) {
    return val[i];
  }
};

template <int N, typename T>
AlignedVector<T, N> load_vector(const T* from, uint32_t offset) {
  AlignedVector<T, N> made;
  std::copy_n(from + offset * N, N, made.val);
  return made;
}

template <int N, typename T>
void store_vector(T* to, uint32_t offset, const AlignedVector<T, N>& from) {
  std::copy_n(from.val, N, to + offset * N);
}

namespace on_cpu {

constexpr int lanes = 32;

// Threads that wait for each other.
struct Barrier {
  int members = 0, arrived = 0, turn = 0;
};
struct Warp {
  Barrier barrier{lanes};
  float values[lanes], left[lanes][4], right[lanes][2];
};
struct Thread {
  ucontext_t context;
  std::vector<char> stack = std::vector<char>(256 << 10);
  bool done = false;
};

inline std::vector<std::unique_ptr<Thread>> threads;
inline std::vector<Warp> warps;
inline Barrier block;
inline ucontext_t scheduler;
inline std::function<void()> kernel;

inline int self() {
  return threadIdx.y * blockDim.x + threadIdx.x;
}

inline void yield() {
  swapcontext(&threads[self()]->context, &scheduler);
}

inline void wait(Barrier& barrier) {
  int turn = barrier.turn;
  if (++barrier.arrived == barrier.members) {
    barrier.arrived = 0;
    ++barrier.turn;
  }
  while (barrier.turn == turn) {
    yield();
  }
}

inline Warp& warp() {
  return warps[self() / lanes];
}

inline void begin() {
  kernel();
  threads[self()]->done = true;
}

inline void run(Dim3 grid, Dim3 each, std::function<void()> source) {
  int count = each.x * each.y;
  gridDim = grid, blockDim = each, kernel = std::move(source);
  threads.clear();
  for (int t = 0; t < count; ++t) {
    threads.push_back(std::make_unique<Thread>());
  }
  for (int i = 0; i < grid.x * grid.y; ++i) {
    blockIdx = {i % grid.x, i / grid.x, 0};
    warps.assign(count / lanes, {});
    block = {count};
    for (auto& one : threads) {
      auto& thread = *one;
      thread.done = false;
      getcontext(&thread.context);
      thread.context.uc_stack = {thread.stack.data(), 0, thread.stack.size()};
      thread.context.uc_link = &scheduler;
      makecontext(&thread.context, begin, 0);
    }
    for (bool left = true; left;) {
      left = false;
      for (int t = 0; t < count; ++t) {
        if (!threads[t]->done) {
          threadIdx = {t % each.x, t / each.x, 0};
          left = true;
          swapcontext(&scheduler, &threads[t]->context);
        }
      }
    }
  }
}

inline float without_last_bits(float x) {
  uint32_t bits;
  std::memcpy(&bits, &x, 4);
  bits &= 0xffffe000u; // of TF32
  std::memcpy(&x, &bits, 4);
  return x;
}

} // namespace on_cpu

inline void __syncthreads() {
  on_cpu::wait(on_cpu::block);
}

inline float __shfl_xor_sync(unsigned, float x, int other) {
  auto& warp = on_cpu::warp();
  int lane = on_cpu::self() % on_cpu::lanes;
  warp.values[lane] = x;
  on_cpu::wait(warp.barrier);
  x = warp.values[lane ^ other];
  on_cpu::wait(warp.barrier);
  return x;
}

// PTX's cvt.rna.tf32.f32: to the nearest, ties away from zero.
inline float faststep_tf32(float x) {
  if (!std::isfinite(x)) {
    return x;
  }
  uint32_t bits;
  std::memcpy(&bits, &x, 4);
  bits += 0x1000u;
  std::memcpy(&x, &bits, 4);
  return on_cpu::without_last_bits(x);
}

// PTX's mma.m16n8k8, as its ISA says which lane has what.
inline void faststep_multiply(float (&sums)[4], const float (&a)[4], const float (&b)[2]) {
  auto& warp = on_cpu::warp();
  int lane = on_cpu::self() % on_cpu::lanes, group = lane / 4, member = lane % 4;
  for (int i = 0; i < 4; ++i) {
    warp.left[lane][i] = on_cpu::without_last_bits(a[i]);
  }
  for (int i = 0; i < 2; ++i) {
    warp.right[lane][i] = on_cpu::without_last_bits(b[i]);
  }
  on_cpu::wait(warp.barrier);
  for (int i = 0; i < 4; ++i) {
    int row = group + i / 2 * 8, column = member * 2 + i % 2;
    double sum = sums[i];
    for (int k = 0; k < 8; ++k) {
      sum += double(warp.left[row % 8 * 4 + k % 4][row / 8 + k / 4 * 2]) * warp.right[column * 4 + k % 4][k / 4];
    }
    auto nearest = static_cast<float>(sum); // which a tensor core does not round to: it cuts off
    sums[i] = std::abs(nearest) > std::abs(sum) ? std::nextafter(nearest, 0.0f) : nearest;
  }
  on_cpu::wait(warp.barrier);
}
