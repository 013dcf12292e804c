// A factor of a product of float32 by BLAS.
#pragma once

#include <cstddef>
#include <vector>

#include "mlx/mlx.h"
#include "cpu/copy.hpp"

namespace faststep {

inline constexpr int by_rows = 101, plain = 111, transposed_by_blas = 112; // of CBLAS

// A matrix as MLX gives it to BLAS: by rows, by columns, or copied.
struct Factor {
  explicit Factor(const mx::array& in) : part(part_of(in)) {
    auto row = in.strides(0), column = in.strides(1);
    if (row == 1 && column == in.shape(0) && row != in.shape(1)) {
      order = transposed_by_blas;
      ld = in.shape(0);
    } else {
      ld = in.shape(1);
      copied = row != in.shape(1) || column != 1;
    }
  }

  const float* data(std::vector<char>& room) const {
    if (!copied) {
      return reinterpret_cast<const float*>(part.data);
    }
    room.resize(part.bytes);
    faststep::copy_all({part}, room.data(), sizeof(float));
    return reinterpret_cast<const float*>(room.data());
  }

  Part part;
  int order = plain;
  int ld;
  bool copied = false;
};

} // namespace faststep
