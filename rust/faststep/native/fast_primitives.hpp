// MLX's header of fast primitives, which has no guard of its own.
#pragma once

#include "mlx/fast_primitives.h"
