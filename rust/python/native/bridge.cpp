// Joins the nanobind domain of mlx.core, so that its arrays are ours: read, made and overwritten without a copy.
#include <nanobind/nanobind.h>

#include "mlx/mlx.h"

namespace mx = mlx::core;
namespace nb = nanobind;

namespace {

PyTypeObject* array_type = nullptr;

mx::array* inside(PyObject* object) {
  return nb::inst_ptr<mx::array>(nb::handle(object));
}

bool holds(PyObject* object, uintptr_t id) {
  return Py_TYPE(object) == array_type && inside(object)->id() == id;
}

uintptr_t address(const void* object) {
  return reinterpret_cast<uintptr_t>(object);
}

PyObject* at(uintptr_t address) {
  return reinterpret_cast<PyObject*>(address);
}

// What a weak reference refers to, borrowed, or null.
PyObject* referent(uintptr_t reference) {
#if PY_VERSION_HEX >= 0x030D0000
  PyObject* object = nullptr;
  PyWeakref_GetRef(at(reference), &object);
  Py_XDECREF(object);
  return object;
#else
  return PyWeakref_GetObject(at(reference));
#endif
}

enum Kind : size_t { array, value, weak, strings, key, list, tuple, dict, module, attributes };

// An object that a walk is to meet: bridge.rs has the same.
struct Expected {
  size_t kind;
  Py_ssize_t size; // of a container, or of a set
  uintptr_t object; // itself, or a weak reference to it
  uintptr_t type; // of a container
  uintptr_t type_reference; // a weak reference to the type, or 0 where somebody holds that
};

// A walk through containers, in which no reference is counted: no code of Python's runs meanwhile: sets are of strings.
class Glance {
 public:
  // Where met is not null, it gets the array objects, with a reference to each.
  Glance(const Expected* next, size_t count, const uintptr_t* ids, size_t arrays, PyObject** met)
      : next_(next), end_(next + count), ids_(ids), ids_end_(ids + arrays), met_(met), met_first_(met) {}

  bool sees_all(PyObject* root) {
    bool all = sees(root) && next_ == end_ && ids_ == ids_end_;
    while (!all && met_ != met_first_) {
      Py_DECREF(*--met_);
    }
    return all;
  }

 private:
  bool sees(PyObject* object) {
    if (next_ == end_) {
      return false;
    }
    const auto& it = *next_++;
    switch (it.kind) {
      case Kind::array:
        return ids_ != ids_end_ && holds(object, *ids_++) && keeps(object);
      case Kind::value:
        return address(object) == it.object;
      case Kind::weak:
        return referent(it.object) == object;
      case Kind::strings:
        return is_set_of(object, it.size);
      case Kind::list:
        return is(object, it) && PyList_GET_SIZE(object) == it.size &&
            sees_each(reinterpret_cast<PyListObject*>(object)->ob_item, it.size);
      case Kind::tuple:
        return is(object, it) && PyTuple_GET_SIZE(object) == it.size &&
            sees_each(reinterpret_cast<PyTupleObject*>(object)->ob_item, it.size);
      case Kind::dict:
        return is(object, it) && sees_items(object, it.size);
      case Kind::module:
        return is(object, it) && sees_items(object, it.size) && sees_attributes(object);
      default:
        return false;
    }
  }

  bool keeps(PyObject* object) {
    if (met_ != nullptr) {
      *met_++ = Py_NewRef(object);
    }
    return true;
  }

  static bool is(PyObject* object, const Expected& it) {
    return address(object) == it.object && address(Py_TYPE(object)) == it.type &&
        (it.type_reference == 0 || address(referent(it.type_reference)) == it.type);
  }

  // Whether it is a set of the next strings.
  bool is_set_of(PyObject* object, Py_ssize_t size) {
    if (!PySet_CheckExact(object) || PySet_GET_SIZE(object) != size || end_ - next_ < size) {
      return false;
    }
    for (Py_ssize_t i = 0; i < size; ++i) {
      int has = PySet_Contains(object, at((next_++)->object));
      if (has < 0) {
        PyErr_Clear();
      }
      if (has != 1) {
        return false;
      }
    }
    return true;
  }

  bool sees_each(PyObject* const* items, Py_ssize_t size) {
    for (Py_ssize_t i = 0; i < size; ++i) {
      if (!sees(items[i])) {
        return false;
      }
    }
    return true;
  }

  bool sees_items(PyObject* dict, Py_ssize_t size) {
    if (PyDict_GET_SIZE(dict) != size) {
      return false;
    }
    Py_ssize_t position = 0;
    PyObject *key = nullptr, *value = nullptr;
    while (PyDict_Next(dict, &position, &key, &value)) {
      if (next_ == end_ || next_->kind != Kind::key || next_->object != address(key)) {
        return false;
      }
      ++next_;
      if (!sees(value)) {
        return false;
      }
    }
    return true;
  }

  bool sees_attributes(PyObject* object) {
    PyObject* dict = PyObject_GenericGetDict(object, nullptr);
    if (dict == nullptr) {
      PyErr_Clear();
      return false;
    }
    bool same = next_ != end_ && next_->kind == Kind::attributes && is(dict, *next_);
    if (same) {
      auto size = (next_++)->size;
      same = sees_items(dict, size);
    }
    Py_DECREF(dict);
    return same;
  }

  const Expected* next_;
  const Expected* end_;
  const uintptr_t* ids_;
  const uintptr_t* ids_end_;
  PyObject** met_;
  PyObject** met_first_;
};

} // namespace

extern "C" {

// 0, or -1 with a Python error set.
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

// A new object for the array, or null with a Python error set.
PyObject* faststep_bridge_wrap(const void* array) {
  try {
    return nb::cast(*static_cast<const mx::array*>(array)).release().ptr();
  } catch (const std::exception& e) {
    PyErr_SetString(PyExc_RuntimeError, e.what());
    return nullptr;
  }
}

// Whether a walk meets what is expected, and arrays with these identities; the array objects, new references, where asked for.
int faststep_bridge_glance(
    PyObject* root, const Expected* expected, size_t count, const uintptr_t* ids, size_t arrays, PyObject** met) {
  return Glance(expected, count, ids, arrays, met).sees_all(root);
}

// The number of items of a list, from the first one on, that are arrays with these identities.
size_t faststep_bridge_list_holds(PyObject* list, size_t first, const uintptr_t* ids, size_t count) {
  auto size = static_cast<size_t>(PyList_GET_SIZE(list));
  size_t found = 0;
  while (found < count && first + found < size && holds(PyList_GET_ITEM(list, first + found), ids[found])) {
    ++found;
  }
  return found;
}

// The number of keys, in the order of a dict, at which arrays with these identities stand; other keys are passed over.
size_t faststep_bridge_dict_holds(PyObject* dict, PyObject* const* keys, const uintptr_t* ids, size_t count) {
  Py_ssize_t position = 0;
  PyObject *key = nullptr, *value = nullptr;
  size_t found = 0;
  while (found < count && PyDict_Next(dict, &position, &key, &value)) {
    if (key == keys[found]) {
      if (!holds(value, ids[found])) {
        break;
      }
      ++found;
    }
  }
  return found;
}

// The object takes another value.
void faststep_bridge_assign(PyObject* object, const void* array) {
  *inside(object) = *static_cast<const mx::array*>(array);
}
}
