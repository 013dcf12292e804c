// The lazy graph of a trace (graph.cpp).
#pragma once

#include "mlx/mlx.h"

namespace faststep {

// Return true if two operations compute the same from the same inputs. Functions with gradients of their own are not looked into.
bool same_primitive(const mlx::core::Primitive& a, const mlx::core::Primitive& b);

} // namespace faststep
