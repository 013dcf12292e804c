// Sums of rows by an index, by one task of the CPU that goes through the rows that there are. MLX makes a table of zeros for
// each list of rows, adds the rows element by element, and adds the tables.
#include "cpu/rows.hpp"

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <memory>
#include <vector>

#include "mlx/backend/common/utils.h"
#include "mlx/backend/cpu/encoder.h"
#include "cpu/on_cpu.hpp"

namespace faststep {

namespace {

constexpr int64_t nowhere = -1;

template <typename T>
int64_t read(const mx::array& a, int i) {
  return static_cast<int64_t>(a.data<T>()[mx::elem_to_loc(i, a.shape(), a.strides())]);
}

int64_t integer(const mx::array& a, int i) {
  switch (a.itemsize()) {
    case 1:
      return a.dtype() == mx::int8 ? read<int8_t>(a, i) : read<uint8_t>(a, i);
    case 2:
      return a.dtype() == mx::int16 ? read<int16_t>(a, i) : read<uint16_t>(a, i);
    case 4:
      return a.dtype() == mx::int32 ? read<int32_t>(a, i) : read<uint32_t>(a, i);
    default:
      return read<int64_t>(a, i);
  }
}

// The rows of one list, evaluated.
class List {
 public:
  List(const mx::array& indices, const mx::array& rows)
      : indices_(mx::array::unsafe_weak_copy(indices)), rows_(mx::array::unsafe_weak_copy(rows)) {
    auto axes = indices.ndim();
    shape_ = {rows.shape().begin(), rows.shape().begin() + axes};
    strides_ = {rows.strides().begin(), rows.strides().begin() + axes};
    row_shape_ = {rows.shape().begin() + axes, rows.shape().end()};
    row_strides_ = {rows.strides().begin() + axes, rows.strides().end()};
    int64_t stride = 1;
    for (size_t axis = row_shape_.size(); axis-- > 0; stride *= row_shape_[axis]) {
      together_ = together_ && (row_shape_[axis] == 1 || row_strides_[axis] == stride);
    }
    length_ = static_cast<size_t>(stride);
  }

  int size() const {
    return static_cast<int>(indices_.size());
  }

  // Where in a table of `count` rows this one is added; a negative index counts from the end.
  int64_t place(int i, int64_t count) const {
    auto place = integer(indices_, i);
    place += place < 0 ? count : 0;
    return place < 0 || place >= count ? nowhere : place;
  }

  // A row, which lies in `copied` where its elements do not lie together.
  const float* row(int i, std::vector<float>& copied) const {
    const float* from = rows_.data<float>() + mx::elem_to_loc(i, shape_, strides_);
    if (together_) {
      return from;
    }
    copied.resize(length_);
    for (size_t at = 0; at < length_; ++at) {
      copied[at] = from[mx::elem_to_loc(static_cast<int>(at), row_shape_, row_strides_)];
    }
    return copied.data();
  }

 private:
  mx::array indices_;
  mx::array rows_;
  mx::Shape shape_;
  mx::Strides strides_;
  mx::Shape row_shape_;
  mx::Strides row_strides_;
  bool together_ = true; // the elements of a row
  size_t length_ = 0;
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
    std::vector<List> lists;
    for (size_t i = has_table; i + 1 < inputs.size(); i += 2) {
      lists.emplace_back(inputs[i], inputs[i + 1]);
    }
    Table table{out.data<float>(), out.shape(0), out.size() / out.shape(0)};
    auto run = [lists = std::move(lists), table, from, donated, bytes = out.nbytes()] {
      size_t next = 0;
      if (from != nullptr) {
        std::memcpy(table.data, from, bytes);
      } else if (!donated) {
        std::memset(table.data, 0, bytes);
        table.add_each(lists[next++]);
      }
      for (; next < lists.size(); ++next) {
        table.add_sums(lists[next]);
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
