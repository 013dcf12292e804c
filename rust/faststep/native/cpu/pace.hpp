// The thread that hands operations to the CPU's worker waits for it, so that less memory is under way (pace.cpp).
#pragma once

#include <memory>

#include "mlx/mlx.h"
#include "mlx/primitives.h"

namespace faststep {

namespace mx = mlx::core;

// From so many bytes on, what has been joined is waited for.
inline constexpr size_t wait_bytes = 128 << 10;

// From so many bytes on, what an update makes of a matrix on its way is paced.
inline constexpr size_t update_bytes = 256 << 10;

// A join of so many bytes begins when the worker is done with all before: what the gradients were made of is free then. It is about
// to be waited for anyway, before the update ("Wait").
inline constexpr size_t join_bytes = 512 << 10;

// Wait until the worker has come to where the calling thread has called this the last time: it always has work.
void pace(mx::Stream stream);

// "Pace": passes an array on, paced. "Wait": passes arrays on when the worker has computed all that it has been handed.
std::shared_ptr<mx::Primitive> paced(mx::Stream stream);
std::shared_ptr<mx::Primitive> waited(mx::Stream stream);

} // namespace faststep
