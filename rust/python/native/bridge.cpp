// Joins the nanobind domain of mlx.core, so that its arrays are ours: read, made and overwritten without a copy.
#include "arrays.h"

#include "mlx/distributed/distributed.h"

namespace mx = mlx::core;
namespace nb = nanobind;
using faststep::array_type;
using faststep::inside;

PyTypeObject* faststep::array_type = nullptr;

extern "C" {

// Returns 0, or -1 with a Python error set.
int faststep_bridge_init(PyObject* module) {
  try {
    if (!nb::register_module(nb::handle(module))) {
      PyErr_SetString(PyExc_ImportError, "mlx.core was built with another nanobind than faststep");
      return -1;
    }
    array_type = reinterpret_cast<PyTypeObject*>(nb::type<mx::array>().ptr());
    if (array_type == nullptr) {
      PyErr_SetString(PyExc_ImportError, "mlx.core does not share its array type: it was built with another nanobind");
      return -1;
    }
    return 0;
  } catch (const std::exception& e) {
    PyErr_SetString(PyExc_ImportError, e.what());
    return -1;
  }
}

int faststep_bridge_is_array(PyObject* object) {
  return Py_TYPE(object) == array_type || PyType_IsSubtype(Py_TYPE(object), array_type);
}

// The array inside an object for which is_array holds; the object keeps owning it.
void* faststep_bridge_borrow(PyObject* object) {
  return inside(object);
}

// A copy of the handle inside the object; the caller owns it.
void* faststep_bridge_clone(PyObject* object) {
  return new mx::array(*inside(object));
}

// The group inside an mx.distributed.Group, which keeps owning it, or null.
const void* faststep_bridge_group(PyObject* object) {
  using mx::distributed::Group;
  return nb::isinstance<Group>(nb::handle(object)) ? nb::inst_ptr<Group>(nb::handle(object)) : nullptr;
}

// A new object for the array, or null with a Python error set.
PyObject* faststep_bridge_wrap(const void* array) {
  try {
    return nb::cast(*static_cast<const mx::array*>(array)).release().ptr();
  } catch (const std::exception& e) {
    PyErr_SetString(PyExc_RuntimeError, e.what());
    return nullptr;
  }
}

// The object takes another value.
void faststep_bridge_assign(PyObject* object, const void* array) {
  *inside(object) = *static_cast<const mx::array*>(array);
}
}
