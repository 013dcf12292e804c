// Sums of arrays that are zero but for a slice, by one task of the CPU that goes through the slices. MLX makes an array of zeros
// for each of them, and adds the arrays: memory and time that grow with the square of their number.
#include "cpu/slices.hpp"

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

struct Corner {
  mx::Shape start;
  mx::Shape steps;

  bool operator==(const Corner&) const = default;
};

// One slice, evaluated: axes over which both lie evenly are one, the last is a row.
class AddedSlice {
 public:
  AddedSlice(const mx::array& values, float* to, const mx::Strides& out) : from_(values.data<float>()), to_(to) {
    for (size_t axis = 0; axis < values.ndim(); ++axis) {
      int length = values.shape(axis);
      if (length == 1) {
        continue;
      }
      int64_t in_step = values.strides(axis), out_step = out[axis];
      if (!shape_.empty() && in_.back() == in_step * length && out_.back() == out_step * length) {
        shape_.back() *= length;
        in_.back() = in_step;
        out_.back() = out_step;
      } else {
        shape_.push_back(length);
        in_.push_back(in_step);
        out_.push_back(out_step);
      }
    }
    if (!shape_.empty()) {
      row_ = shape_.back();
      in_row_ = in_.back();
      out_row_ = out_.back();
      shape_.pop_back();
      in_.pop_back();
      out_.pop_back();
    }
    for (auto length : shape_) {
      rows_ *= length;
    }
  }

  void add() const {
    for (int64_t i = 0; i < rows_; ++i) {
      const float* source = from_ + mx::elem_to_loc(i, shape_, in_);
      float* target = to_ + mx::elem_to_loc(i, shape_, out_);
      if (in_row_ == 1 && out_row_ == 1) {
        for (int at = 0; at < row_; ++at) {
          target[at] += source[at];
        }
        continue;
      }
      for (int at = 0; at < row_; ++at) {
        target[at * out_row_] += source[at * in_row_];
      }
    }
  }

 private:
  const float* from_;
  float* to_;
  mx::Shape shape_; // but for the row
  mx::Strides in_;
  mx::Strides out_;
  int64_t rows_ = 1;
  int row_ = 1;
  int64_t in_row_ = 1;
  int64_t out_row_ = 1;
};

// Inputs: an array, where there is one, and what is in each slice.
class Slices : public OnCpu {
 public:
  Slices(mx::Stream stream, std::vector<Corner> corners) : OnCpu(stream), corners_(std::move(corners)) {}

  void eval_cpu(const std::vector<mx::array>& inputs, mx::array& out) override {
    size_t has_base = inputs.size() - corners_.size();
    const char* from = nullptr;
    if (has_base != 0 && inputs[0].is_donatable() && inputs[0].flags().row_contiguous) {
      out.copy_shared_buffer(inputs[0]);
    } else {
      out.set_data(mx::allocator::malloc(out.nbytes()));
      from = has_base != 0 ? inputs[0].data<char>() : nullptr;
    }
    bool donated = has_base != 0 && from == nullptr;
    auto parts = std::make_shared<std::vector<AddedSlice>>(); // or it would be copied with the task
    parts->reserve(corners_.size());
    for (size_t i = 0; i < corners_.size(); ++i) {
      const auto& [start, steps] = corners_[i];
      int64_t offset = 0;
      mx::Strides strides(out.strides());
      for (size_t axis = 0; axis < start.size(); ++axis) {
        offset += start[axis] * strides[axis];
        strides[axis] *= steps[axis];
      }
      parts->emplace_back(inputs[has_base + i], out.data<float>() + offset, strides);
    }
    mx::cpu::get_command_encoder(stream()).dispatch([parts, from, donated, to = out.data<char>(), bytes = out.nbytes()] {
      if (from != nullptr) {
        std::memcpy(to, from, bytes);
      } else if (!donated) {
        std::memset(to, 0, bytes);
      }
      for (const auto& part : *parts) {
        part.add();
      }
    });
  }

  bool is_equivalent(const mx::Primitive& other) const override {
    return corners_ == static_cast<const Slices&>(other).corners_;
  }

 private:
  std::vector<Corner> corners_;
};

class SumOfSlices : public Slices {
 public:
  using Slices::Slices;
  const char* name() const override {
    return "SumOfSlices";
  }
};

class WithSlices : public Slices {
 public:
  using Slices::Slices;
  const char* name() const override {
    return "WithSlices";
  }
};

template <typename Kind>
mx::array made(const mx::Shape& shape, std::vector<mx::array> inputs, const std::vector<Slice>& slices, mx::Stream stream) {
  std::vector<Corner> corners;
  for (const auto& slice : slices) {
    corners.push_back({slice.start, slice.steps});
    inputs.push_back(slice.values);
  }
  return mx::array(shape, mx::float32, std::make_shared<Kind>(stream, std::move(corners)), std::move(inputs));
}

} // namespace

mx::array sum_of_slices(const mx::Shape& shape, const std::vector<Slice>& slices, mx::Stream stream) {
  return made<SumOfSlices>(shape, {}, slices, stream);
}

mx::array with_slices(const mx::array& base, const std::vector<Slice>& slices, mx::Stream stream) {
  return made<WithSlices>(base.shape(), {mx::contiguous(base, false, stream)}, slices, stream);
}

} // namespace faststep
