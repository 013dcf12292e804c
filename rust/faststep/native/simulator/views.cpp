// Arrays that are views of others: mlx/backend/common/{common,slicing,broadcasting}.cpp.
#include <algorithm>

#include "mlx/backend/common/utils.h"
#include "simulator/rules.hpp"

namespace faststep::simulator {

namespace {

// The strides with which `in` can be seen in another shape, where that needs no copy.
bool reshapes(const mx::array& in, const mx::Shape& to, mx::Strides& strides) {
  mx::Shape shape;
  mx::Strides steps;
  for (int i = 0; i < static_cast<int>(in.ndim()); ++i) {
    if (i == 0 || (in.shape(i) != 1 && in.strides(i) * in.shape(i) != steps.back())) {
      shape.push_back(in.shape(i));
      steps.push_back(in.strides(i));
    } else if (in.shape(i) != 1) {
      shape.back() *= in.shape(i);
      steps.back() = in.strides(i);
    }
  }
  size_t j = 0;
  for (auto n : to) {
    if (j < shape.size() && shape[j] % n == 0) {
      shape[j] /= n;
      strides.push_back(shape[j] * steps[j]);
      j += shape[j] == 1;
    } else if (n == 1) {
      strides.push_back(strides.back());
    } else {
      return false;
    }
  }
  return true;
}

} // namespace

// The primitives whose outputs are views lay them out themselves: on arrays without memory.
void view(Site& site) {
  std::vector<mx::array> inputs, outputs;
  for (auto* in : site.op.inputs) {
    inputs.push_back(bare(in->face));
    inputs.back().set_data(nothing(), in->face.data_size(), in->face.strides(), in->face.flags(), 0);
  }
  for (auto* out : site.op.outputs) {
    outputs.push_back(bare(out->face));
  }
  site.op.primitive->eval_cpu(inputs, outputs);
  for (size_t i = 0; i < outputs.size(); ++i) {
    const auto& face = outputs[i];
    Data data;
    for (size_t j = 0; j < inputs.size(); ++j) {
      if (inputs[j].data_shared_ptr() == face.data_shared_ptr()) {
        data = site.in(j).data;
      }
    }
    data = data ? data : site.memory.allocate(0);
    lay_out(site.out(i), std::move(data), face.data_size(), face.strides(), face.flags());
  }
  site.work.kernels = 0;
}

void reshape(Site& site) {
  const auto& in = site.in(0);
  auto& out = site.out();
  const auto& shape = out.face.shape();
  auto flags = in.face.flags();
  mx::Strides strides;
  site.work.kernels = 0;
  if (in.face.size() == 0 || flags.row_contiguous) {
    auto longest = std::max_element(shape.begin(), shape.end());
    flags.col_contiguous = out.face.size() <= 1 || out.face.size() == static_cast<size_t>(*longest);
    strides = mx::make_contiguous_strides(shape);
  } else if (in.face.ndim() == 0) {
    strides = mx::Strides(shape.size(), 0);
  } else if (!reshapes(in.face, shape, strides)) {
    site.work.kernels = 1;
    fresh(site, out);
    return;
  }
  lay_out(out, in.data, in.face.data_size(), std::move(strides), flags);
}

} // namespace faststep::simulator
