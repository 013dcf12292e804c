// Sums of rows by an index, by one task of the CPU that goes through the rows that there are. MLX makes a table of zeros for
// each list of rows, adds the rows element by element, and adds the tables.
#include "cpu/rows.hpp"

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <memory>
#include <utility>
#include <vector>

#include "mlx/backend/common/utils.h"
#include "mlx/backend/cpu/encoder.h"
#include "cpu/on_cpu.hpp"

namespace faststep {

namespace {

constexpr int64_t nowhere = -1;

// Where the elements of an evaluated array lie.
struct Places {
  explicit Places(const mx::array& a) : Places(a.shape(), a.strides()) {}

  Places(mx::Shape shape, mx::Strides strides) : shape(std::move(shape)), strides(std::move(strides)) {
    for (size_t axis = this->shape.size(); axis-- > 0; size *= this->shape[axis]) {
      together = together && (this->shape[axis] == 1 || this->strides[axis] == size);
    }
  }

  int64_t of(int i) const {
    return together ? i : mx::elem_to_loc(i, shape, strides);
  }

  mx::Shape shape;
  mx::Strides strides;
  int64_t size = 1;
  bool together = true;
};

// The rows of one list, evaluated.
class List {
 public:
  List(const mx::array& indices, const mx::array& rows)
      : indices_(indices.data<char>()),
        dtype_(indices.dtype()),
        places_(indices),
        rows_(rows.data<float>()),
        starts_(first(rows.shape(), indices.ndim()), first(rows.strides(), indices.ndim())),
        row_(rest(rows.shape(), indices.ndim()), rest(rows.strides(), indices.ndim())) {
    are_together_ = Places(rows).together;
  }

  int size() const {
    return static_cast<int>(places_.size);
  }

  // Where in a table of `count` rows this one is added; a negative index counts from the end.
  int64_t place(int i, int64_t count) const {
    auto place = integer(places_.of(i));
    place += place < 0 ? count : 0;
    return place < 0 || place >= count ? nowhere : place;
  }

  // A row, which lies in `copied` where its elements do not lie together.
  const float* row(int i, std::vector<float>& copied) const {
    const float* from = rows_ + (are_together_ ? i * row_.size : mx::elem_to_loc(i, starts_.shape, starts_.strides));
    if (row_.together) {
      return from;
    }
    copied.resize(row_.size);
    for (int at = 0; at < row_.size; ++at) {
      copied[at] = from[row_.of(at)];
    }
    return copied.data();
  }

 private:
  template <typename All>
  static All first(const All& all, size_t axes) {
    return {all.begin(), all.begin() + axes};
  }

  template <typename All>
  static All rest(const All& all, size_t axes) {
    return {all.begin() + axes, all.end()};
  }

  template <typename T>
  int64_t read(int64_t at) const {
    return static_cast<int64_t>(reinterpret_cast<const T*>(indices_)[at]);
  }

  int64_t integer(int64_t at) const {
    switch (dtype_.size()) {
      case 1:
        return dtype_ == mx::int8 ? read<int8_t>(at) : read<uint8_t>(at);
      case 2:
        return dtype_ == mx::int16 ? read<int16_t>(at) : read<uint16_t>(at);
      case 4:
        return dtype_ == mx::int32 ? read<int32_t>(at) : read<uint32_t>(at);
      default:
        return read<int64_t>(at);
    }
  }

  const char* indices_;
  mx::Dtype dtype_;
  Places places_;
  const float* rows_;
  Places starts_;
  Places row_;
  bool are_together_; // the rows
};

struct Table {
  float* data;
  int64_t count;
  size_t length; // of a row

  void add(int64_t place, const float* row) const {
    float* to = data + place * length;
    for (size_t i = 0; i < length; ++i) {
      to[i] += row[i];
    }
  }

  void add_each(const List& list) const {
    std::vector<float> copied;
    for (int i = 0; i < list.size(); ++i) {
      if (auto place = list.place(i, count); place != nowhere) {
        add(place, list.row(i, copied));
      }
    }
  }

  // As MLX adds a table of sums: those of a row are summed before they are added to it.
  void add_sums(const List& list) const {
    constexpr int none = -1;
    std::vector<int> first(count, none), next(list.size(), none); // the list's rows by their place, in their order
    std::vector<int64_t> places;
    for (int i = list.size(); i-- > 0;) {
      auto place = list.place(i, count);
      if (place == nowhere) {
        continue;
      }
      if (first[place] == none) {
        places.push_back(place);
      }
      next[i] = first[place];
      first[place] = i;
    }
    std::vector<float> copied, sum(length);
    for (auto place : places) {
      if (next[first[place]] == none) {
        add(place, list.row(first[place], copied));
        continue;
      }
      std::memset(sum.data(), 0, length * sizeof(float));
      for (int i = first[place]; i != none; i = next[i]) {
        Table{sum.data(), 1, length}.add(0, list.row(i, copied));
      }
      add(place, sum.data());
    }
  }
};

// Inputs: a table, where there is one, and for each list its indices and its rows.
class Rows : public OnCpu {
 public:
  using OnCpu::OnCpu;

  void eval_cpu(const std::vector<mx::array>& inputs, mx::array& out) override {
    bool has_table = inputs.size() % 2 == 1;
    const char* from = nullptr;
    if (has_table && inputs[0].is_donatable() && inputs[0].flags().row_contiguous) {
      out.copy_shared_buffer(inputs[0]);
    } else {
      out.set_data(mx::allocator::malloc(out.nbytes()));
      from = has_table ? inputs[0].data<char>() : nullptr;
    }
    bool donated = has_table && from == nullptr;
    auto lists = std::make_shared<std::vector<List>>(); // or it would be copied with the task
    lists->reserve(inputs.size() / 2);
    for (size_t i = has_table; i + 1 < inputs.size(); i += 2) {
      lists->emplace_back(inputs[i], inputs[i + 1]);
    }
    Table table{out.data<float>(), out.shape(0), out.size() / out.shape(0)};
    auto run = [lists = std::move(lists), table, from, donated, bytes = out.nbytes()] {
      size_t next = 0;
      if (from != nullptr) {
        std::memcpy(table.data, from, bytes);
      } else if (!donated) {
        std::memset(table.data, 0, bytes);
        table.add_each((*lists)[next++]);
      }
      for (; next < lists->size(); ++next) {
        table.add_sums((*lists)[next]);
      }
    };
    mx::cpu::get_command_encoder(stream()).dispatch(std::move(run));
  }
};

class SumOfRows : public Rows {
 public:
  using Rows::Rows;
  const char* name() const override {
    return "SumOfRows";
  }
};

class WithRows : public Rows {
 public:
  using Rows::Rows;
  const char* name() const override {
    return "WithRows";
  }
};

std::vector<mx::array> flat(std::vector<mx::array> inputs, const std::vector<Addends>& addends) {
  for (const auto& [indices, rows] : addends) {
    inputs.push_back(indices);
    inputs.push_back(rows);
  }
  return inputs;
}

} // namespace

mx::array sum_of_rows(const mx::Shape& shape, const std::vector<Addends>& addends, mx::Stream stream) {
  return mx::array(shape, mx::float32, std::make_shared<SumOfRows>(stream), flat({}, addends));
}

mx::array with_rows(const mx::array& table, const std::vector<Addends>& addends, mx::Stream stream) {
  auto lies_in_rows = mx::contiguous(table, false, stream);
  return mx::array(
      table.shape(), mx::float32, std::make_shared<WithRows>(stream), flat({std::move(lies_in_rows)}, addends));
}

} // namespace faststep
