// Comparisons of what stands in containers with what stood there: of addresses, and of arrays' identities.
#include "arrays.h"

using faststep::holds;

namespace {

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

// The instance dict of an object, borrowed, or null; `distance`: see below.
PyObject* attributes(PyObject* object, uintptr_t distance) {
  if (distance != 0) {
    return *reinterpret_cast<PyObject**>(address(object) + distance);
  }
  PyObject* dict = PyObject_GenericGetDict(object, nullptr);
  if (dict == nullptr) {
    PyErr_Clear();
  }
  Py_XDECREF(dict);
  return dict;
}

// A number that Python gives to a dict when it is made and whenever it is changed, no number twice (PEP 509); 0: none. 3.13 gives no
// other one where an attribute is assigned whose value stands in the object (a split table), and 3.14 none at all.
uintptr_t version(PyObject* object) {
#if PY_VERSION_HEX < 0x030E0000 && !defined(Py_GIL_DISABLED)
  auto* dict = reinterpret_cast<PyDictObject*>(object);
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wdeprecated-declarations"
  return PY_VERSION_HEX < 0x030D0000 || dict->ma_values == nullptr ? dict->ma_version_tag : 0;
#pragma GCC diagnostic pop
#else
  return 0;
#endif
}

// Whether a set has a string: most often that stands where it stood, else Python looks for it.
bool has(PyObject* set, PyObject* string, uintptr_t place) {
  auto* table = reinterpret_cast<PySetObject*>(set);
  if (place <= static_cast<uintptr_t>(table->mask) && table->table[place].key == string) {
    return true;
  }
  int has = PySet_Contains(set, string);
  if (has < 0) {
    PyErr_Clear();
  }
  return has == 1;
}

// The lowest bits of a word; objects stand at multiples of eight. mlx/glance.rs has the same.
enum Kind : uintptr_t { array, value, weak, strings, list, tuple, dict, module };
constexpr uintptr_t kinds = 7;
// A class's lowest bit: behind it stands a weak reference to it, because nobody holds it.
constexpr uintptr_t referred = 1;

// A walk through containers, in which no reference is counted: no code of Python's runs meanwhile: sets are of strings.
// Each function is given the words that it is to meet, and returns those behind them, or null where it meets another thing. Of
// what is met in a dict the addresses are noted, and the dict's version then: while it has that, the same objects are in it.
template <bool keeps>
class Glance {
 public:
  // Where it keeps the array objects, met gets them, with a reference to each.
  Glance(const uintptr_t* ids, size_t arrays, PyObject** met) : ids_(ids), ids_end_(ids + arrays), met_(met) {}

  bool sees_all(PyObject* root, uintptr_t* words, size_t count) {
    auto* first = met_;
    bool all = count > 0 && sees(root, words) == words + count && ids_ == ids_end_;
    while (!all && met_ != first) {
      Py_DECREF(*--met_);
    }
    return all;
  }

 private:
  [[gnu::always_inline]] uintptr_t* sees(PyObject* object, uintptr_t* words) {
    uintptr_t word = *words++;
    if ((word & kinds) == Kind::array) {
      words[-1] = address(object);
      return is_next_array(object) ? words : nullptr;
    }
    return word - Kind::value == address(object) ? words : sees_other(object, word, words);
  }

  bool is_next_array(PyObject* object) {
    if (ids_ == ids_end_ || !holds(object, *ids_++)) {
      return false;
    }
    if constexpr (keeps) {
      *met_++ = Py_NewRef(object);
    }
    return true;
  }

  [[gnu::noinline]] uintptr_t* sees_other(PyObject* object, uintptr_t word, uintptr_t* words) {
    auto kind = word & kinds;
    auto known = word - kind;
    switch (kind) {
      case Kind::weak:
        return is_weak(object, known) ? words : nullptr;
      case Kind::strings:
        return sees_strings(object, known >> 3, words);
      case Kind::list:
        words = is(object, known, words);
        return words == nullptr ? nullptr : sees_each(items<PyListObject>(object), PyList_GET_SIZE(object), words);
      case Kind::tuple:
        words = is(object, known, words);
        return words == nullptr ? nullptr : sees_each(items<PyTupleObject>(object), PyTuple_GET_SIZE(object), words);
      case Kind::dict:
        words = is(object, known, words);
        return words == nullptr ? nullptr : sees_items(object, words);
      case Kind::module:
        words = is(object, known, words);
        return words == nullptr ? nullptr : sees_module(object, *words, words + 1);
      default:
        return nullptr;
    }
  }

  // What a weak reference refers to, or any object of a class.
  static bool is_weak(PyObject* object, uintptr_t known) {
    bool is_class = PyType_Check(at(known)) != 0;
    return is_class ? address(Py_TYPE(object)) == known : referent(known) == object;
  }

  template <typename Sequence>
  static PyObject* const* items(PyObject* sequence) {
    return reinterpret_cast<Sequence*>(sequence)->ob_item;
  }

  // Of a container that has to be at an address and of the next class.
  static uintptr_t* is(PyObject* object, uintptr_t known, uintptr_t* words) {
    uintptr_t type = *words++;
    bool weakly = (type & referred) != 0;
    type -= weakly;
    bool same = address(object) == known && address(Py_TYPE(object)) == type; // a known address is no null
    if (weakly) {
      same = same && address(referent(*words++)) == type;
    }
    return same ? words : nullptr;
  }

  static uintptr_t* sees_strings(PyObject* object, uintptr_t count, uintptr_t* words) {
    if (!PySet_CheckExact(object) || static_cast<uintptr_t>(PySet_GET_SIZE(object)) != count) {
      return nullptr;
    }
    *words++ = address(object);
    for (; count > 0; --count, words += 2) {
      if (!has(object, at(words[0]), words[1])) {
        return nullptr;
      }
    }
    return words;
  }

  uintptr_t* sees_each(PyObject* const* items, Py_ssize_t size, uintptr_t* words) {
    if (*words++ != static_cast<uintptr_t>(size)) {
      return nullptr;
    }
    for (Py_ssize_t i = 0; i < size; ++i) {
      words = sees(items[i], words);
      if (words == nullptr) {
        return nullptr;
      }
    }
    return words;
  }

  uintptr_t* sees_items(PyObject* dict, uintptr_t* words) {
    auto left = PyDict_GET_SIZE(dict);
    if (*words++ != static_cast<uintptr_t>(left)) {
      return nullptr;
    }
    auto* last = words++;
    auto now = version(dict);
    if (now != 0 && now == *last) {
      return sees_same(left, words);
    }
    Py_ssize_t position = 0;
    PyObject *key, *value;
    for (; left > 0; --left) {
      if (!PyDict_Next(dict, &position, &key, &value) || *words != address(key)) {
        return nullptr;
      }
      words = sees(value, words + 1);
      if (words == nullptr) {
        return nullptr;
      }
    }
    *last = now;
    return words;
  }

  // Of a dict in which nothing has been changed: what may have changed in that.
  uintptr_t* sees_same(Py_ssize_t left, uintptr_t* words) {
    for (; left > 0; --left) {
      auto word = words[1];
      auto kind = word & kinds;
      words += 2;
      if (kind == Kind::array) {
        if (!is_next_array(at(word))) {
          return nullptr;
        }
      } else if (kind != Kind::value && kind != Kind::weak) {
        words = kind == Kind::strings ? sees_strings(at(*words), word >> 3, words)
                                      : sees_other(at(word - kind), word, words);
        if (words == nullptr) {
          return nullptr;
        }
      }
    }
    return words;
  }

  // Its items, and its instance dict, which has to be at the address behind them.
  uintptr_t* sees_module(PyObject* module, uintptr_t distance, uintptr_t* words) {
    words = sees_items(module, words);
    if (words == nullptr) {
      return nullptr;
    }
    PyObject* dict = attributes(module, distance);
    words = is(dict, *words, words + 1);
    return words == nullptr ? nullptr : sees_items(dict, words);
  }

  const uintptr_t* ids_;
  const uintptr_t* ids_end_;
  PyObject** met_;
};

} // namespace

extern "C" {

// Whether a walk meets what is expected, and arrays with these identities; the array objects, new references, where asked for.
int faststep_bridge_glance(
    PyObject* root, uintptr_t* expected, size_t count, const uintptr_t* ids, size_t arrays, PyObject** met) {
  return met == nullptr ? Glance<false>(ids, arrays, met).sees_all(root, expected, count)
                        : Glance<true>(ids, arrays, met).sees_all(root, expected, count);
}

// The place of a string in the table of a set that has it, or any number.
size_t faststep_bridge_place(PyObject* set, PyObject* string) {
  auto* table = reinterpret_cast<PySetObject*>(set);
  size_t place = 0;
  while (place <= static_cast<size_t>(table->mask) && table->table[place].key != string) {
    ++place;
  }
  return place;
}

// The distance from an object to the pointer to its instance dict, which other objects of the class have too; 0 where Python has
// to be asked for the dict. Until there is a dict that pointer is null, or odd.
uintptr_t faststep_bridge_dict_distance(PyObject* object) {
#ifdef Py_GIL_DISABLED
  return 0;
#else
  PyObject** dict = _PyObject_GetDictPtr(object);
  return dict == nullptr ? 0 : address(dict) - address(object);
#endif
}

// The same number while nothing is changed in a dict; 0 where there is none.
uintptr_t faststep_bridge_version(PyObject* dict) {
  return version(dict);
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
}
