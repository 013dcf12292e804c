// The array inside an object of mlx.core.
#pragma once

#include <nanobind/nanobind.h>

#include "mlx/mlx.h"

namespace faststep {

extern PyTypeObject* array_type; // mx.array, once the domain has been joined

inline mlx::core::array* inside(PyObject* object) {
  return nanobind::inst_ptr<mlx::core::array>(nanobind::handle(object));
}

// Return whether an object is an array of this identity.
inline bool holds(PyObject* object, uintptr_t id) {
  return Py_TYPE(object) == array_type && inside(object)->id() == id;
}

} // namespace faststep
