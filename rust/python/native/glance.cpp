// Comparison of the objects in containers with those that were there: by address, arrays by their identity.
#include "arrays.h"

using faststep::holds;

namespace {

uintptr_t address(const void* object) {
  return reinterpret_cast<uintptr_t>(object);
}

PyObject* at(uintptr_t address) {
  return reinterpret_cast<PyObject*>(address);
}

// The object of a weak reference, borrowed, or null.
PyObject* referent(uintptr_t reference) {
#if PY_VERSION_HEX >= 0x030D0000
  PyObject* object = nullptr;
  PyWeakref_GetRef(at(reference), &object);
  Py_XDECREF(object);
  return object;
#else
  PyObject* object = PyWeakref_GetObject(at(reference));
  return object == Py_None ? nullptr : object;
#endif
}

// The instance dict of an object, borrowed, or null; distance: see faststep_bridge_dict_distance.
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

// The number that Python gives to a dict when it is made and whenever it changes, no number twice (PEP 509); 0: none. Python 3.13
// does not change it for attributes whose values stand in the object (a split table), and 3.14 has none.
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

// Return whether a set has a string: most often at the place in its table where it was, else Python looks for it.
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

// The lowest bits of a word, which is the address of an object: a multiple of eight. mlx/glance.rs has the same numbers.
enum Kind : uintptr_t { array, value, weak, strings, list, tuple, dict, module };
constexpr uintptr_t kinds = 7;
// The lowest bit of a class: a weak reference to it follows, because nobody holds it.
constexpr uintptr_t referred = 1;

// A walk through containers that compares each object with a list of words:
//   array:   the address of the object, which the walk writes; the value has to have the next identity
//   value:   the address of the object
//   weak:    the address of a weak reference to the object
//   strings: the size of a set; then its address, and for each string its address and its place in the set's table
//   others:  the address of a container; then its class (and a weak reference to that), its size, and its items
// A module has the distance to its instance dict before its size, and the dict behind its items. A dict has its version behind its
// size, then for each item the key's address and the value's words; while the version stays, the items are not compared.
// No Python code runs, so that no reference needs to be counted: the sets are of strings.
// Each function takes the words to compare, and returns those behind them, or null if an object is another.
class Glance {
 public:
  // met gets the array objects, with a reference to each.
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
    *met_++ = Py_NewRef(object);
    return true;
  }

  [[gnu::noinline]] uintptr_t* sees_other(PyObject* object, uintptr_t word, uintptr_t* words) {
    auto kind = word & kinds;
    auto known = word - kind;
    switch (kind) {
      case Kind::weak:
        return referent(known) == object ? words : nullptr;
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

  template <typename Sequence>
  static PyObject* const* items(PyObject* sequence) {
    return reinterpret_cast<Sequence*>(sequence)->ob_item;
  }

  // Compare a container's address and class.
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

  // Compare the containers and arrays in a dict that has the same items.
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

  // Compare a module's items, and its instance dict.
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

// Return whether a walk from root meets these words and arrays of these identities; met gets the array objects, new references.
int faststep_bridge_glance(
    PyObject* root, uintptr_t* words, size_t count, const uintptr_t* ids, size_t arrays, PyObject** met) {
  return Glance(ids, arrays, met).sees_all(root, words, count);
}

// The place of a string in the table of a set; a number behind the table if it is not there.
size_t faststep_bridge_place(PyObject* set, PyObject* string) {
  auto* table = reinterpret_cast<PySetObject*>(set);
  size_t place = 0;
  while (place <= static_cast<size_t>(table->mask) && table->table[place].key != string) {
    ++place;
  }
  return place;
}

// The distance from an object to the pointer to its instance dict; 0 if only Python can tell the dict. The pointer is null or odd
// until there is a dict.
uintptr_t faststep_bridge_dict_distance(PyObject* object) {
#ifdef Py_GIL_DISABLED
  return 0;
#else
  PyObject** dict = _PyObject_GetDictPtr(object);
  return dict == nullptr ? 0 : address(dict) - address(object);
#endif
}
}
