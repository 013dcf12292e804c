// Cross entropy over rows that may be longer than the number of classes, by CUDA kernels.
#pragma once

#include "mlx/mlx.h"

namespace faststep {

// Logits as `cross_entropy` takes them: [..., length] with a length that is a multiple of 8, in float32, float16 or bfloat16,
// of which the first `classes` of each row count.
struct Logits {
  mlx::core::array whole;
  int classes;
};

// The loss of each row, float32 in the shape of the targets: logsumexp(row) - row[target], computed in float32. Targets are
// int32; of one that is no class the nearest class is taken.
mlx::core::array cross_entropy(const Logits& logits, const mlx::core::array& targets, mlx::core::StreamOrDevice stream);

// Its gradient with respect to the whole logits, in `dtype`: cotangent * (exp(logit - logsumexp(row)) - (class == target)),
// and 0 behind the classes. `losses` are those of `cross_entropy`; both float32 in the shape of the targets.
mlx::core::array cross_entropy_vjp(
    const Logits& logits,
    const mlx::core::array& targets,
    const mlx::core::array& losses,
    const mlx::core::array& cotangents,
    mlx::core::Dtype dtype,
    mlx::core::StreamOrDevice stream);

} // namespace faststep
