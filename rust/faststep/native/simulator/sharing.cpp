// Primitives that take over an input's memory: mlx/backend/common/{utils,compiled}.cpp and
// mlx/backend/common/{unary,binary,ternary,copy}.h, which the CPU and the GPUs have in common.
#include <algorithm>

#include "mlx/backend/common/binary.h"
#include "mlx/backend/common/ternary.h"
#include "mlx/backend/common/utils.h"
#include "simulator/rules.hpp"

namespace faststep::simulator {

namespace {

constexpr size_t donation_extra = 16384; // an array may take over a buffer that is larger by so many bytes

// Return whether a fused kernel can go through all of its inputs as they lie.
bool lies_together(const std::vector<Node*>& inputs, const mx::Shape& shape) {
  bool any = true, rows = true, columns = true;
  int count = 0;
  for (const auto* in : inputs) {
    if (in->face.ndim() == 0) {
      continue;
    }
    ++count;
    auto flags = in->face.flags();
    bool same = in->face.shape() == shape;
    any &= flags.contiguous && same;
    rows &= flags.row_contiguous && same;
    columns &= flags.col_contiguous && same;
  }
  return count == 0 ? shape.empty() : count == 1 ? any : rows || columns;
}

} // namespace

void lay_out(Node& node, Data data, size_t data_size, mx::Strides strides, mx::array::Flags flags) {
  node.face = bare(node.face);
  node.face.set_data(nothing(), data_size, std::move(strides), flags, 0);
  node.data = std::move(data);
}

void fresh(Site& site, Node& out) {
  out.face = bare(out.face);
  out.face.set_data(nothing());
  out.data = site.memory.allocate(out.face.nbytes());
}

void fresh_like(Site& site, Node& out, const mx::array& like) {
  auto data = site.memory.allocate(like.data_size() * out.face.itemsize());
  lay_out(out, std::move(data), like.data_size(), like.strides(), like.flags());
}

void share(Node& out, const Node& in) {
  lay_out(out, in.data, in.face.data_size(), in.face.strides(), in.face.flags());
}

void temporary(Site& site, size_t bytes) {
  site.work.temporaries.push_back(site.memory.allocate(bytes));
  ++site.work.kernels;
}

bool is_free(const Node& in) {
  return in.refs == 1 && in.data.use_count() == 1 && in.data->owned;
}

namespace {

bool can_donate(const Node& in, const Node& out) {
  return is_free(in) && in.face.itemsize() == out.face.itemsize() &&
      in.data->bytes <= out.face.nbytes() + donation_extra;
}

bool takes_over(const Node& in, Node& out) {
  if (can_donate(in, out)) {
    share(out, in);
    return true;
  }
  return false;
}

void binary_into(Site& site, Node& out) {
  auto &a = site.in(0), &b = site.in(1);
  auto whole = [&out](const Node& x) {
    return x.face.flags().row_contiguous && x.face.size() == out.face.size();
  };
  switch (mx::get_binary_op_type(a.face, b.face)) {
    case mx::BinaryOpType::ScalarScalar:
      lay_out(out, site.memory.allocate(out.face.itemsize()), 1, a.face.strides(), a.face.flags());
      break;
    case mx::BinaryOpType::ScalarVector:
      takes_over(b, out) || (fresh_like(site, out, b.face), true);
      break;
    case mx::BinaryOpType::VectorScalar:
      takes_over(a, out) || (fresh_like(site, out, a.face), true);
      break;
    case mx::BinaryOpType::VectorVector:
      takes_over(a, out) || takes_over(b, out) || (fresh_like(site, out, a.face), true);
      break;
    case mx::BinaryOpType::General:
      (whole(a) && takes_over(a, out)) || (whole(b) && takes_over(b, out)) || (fresh(site, out), true);
      break;
  }
}

} // namespace

void unary(Site& site) {
  auto &in = site.in(0), &out = site.out();
  if (!in.face.flags().contiguous) {
    fresh(site, out);
  } else if (!takes_over(in, out)) {
    fresh_like(site, out, in.face);
  }
}

void binary(Site& site) {
  for (auto* out : site.op.outputs) {
    binary_into(site, *out);
  }
}

void select(Site& site) {
  auto &a = site.in(0), &b = site.in(1), &c = site.in(2), &out = site.out();
  auto type = mx::get_ternary_op_type(a.face, b.face, c.face);
  auto taken = [&](const Node& x) {
    bool fits = type == mx::TernaryOpType::VectorVectorVector || x.face.flags().row_contiguous;
    return fits && takes_over(x, out);
  };
  if (type == mx::TernaryOpType::ScalarScalarScalar) {
    lay_out(out, site.memory.allocate(out.face.itemsize()), 1, b.face.strides(), b.face.flags());
  } else if (!(taken(a) || taken(b) || taken(c))) {
    if (type == mx::TernaryOpType::VectorVectorVector) {
      fresh_like(site, out, b.face);
    } else {
      fresh(site, out);
    }
  }
}

// A copy of the buffer as it lies (`vector`), or one in rows.
void copy_into(Site& site, const Node& in, Node& out, bool vector) {
  if (!vector) {
    fresh(site, out);
  } else if (takes_over(in, out)) {
    site.work.kernels -= in.face.dtype() == out.face.dtype();
  } else {
    fresh_like(site, out, in.face);
  }
}

// Primitives that begin with a copy of their first input: in place where nobody else wants it. Of a broadcast input, only
// the one that changes the dtype copies no more than there is.
void copied(Site& site) {
  const auto& in = site.in(0).face;
  bool vector = in.data_size() == in.size() || in.dtype() != site.out().face.dtype();
  site.work.kernels += site.op.inputs.size() > 1;
  copy_into(site, site.in(0), site.out(), vector && in.flags().contiguous);
}

void contiguous(Site& site) {
  const auto& in = site.in(0);
  auto& out = site.out();
  if (in.data->bytes <= out.face.nbytes() + donation_extra && in.face.flags().row_contiguous) {
    share(out, in);
    site.work.kernels = 0;
  } else {
    fresh(site, out);
  }
}

// A fused kernel.
void compiled(Site& site) {
  const auto& outputs = site.op.outputs;
  bool together = lies_together(site.op.inputs, outputs[0]->face.shape());
  const mx::array* like = nullptr;
  size_t next = 0;
  for (auto* in : site.op.inputs) {
    if (next == outputs.size()) {
      break;
    }
    auto& out = *outputs[next];
    bool fits = together || (in->face.flags().row_contiguous && in->face.size() == out.face.size());
    if (like == nullptr && together && in->face.size() == out.face.size()) {
      like = &in->face;
    }
    if (fits && in->face.ndim() > 0 && in->face.itemsize() == out.face.itemsize() && is_free(*in)) {
      auto strides = together ? in->face.strides() : mx::make_contiguous_strides(out.face.shape());
      lay_out(out, in->data, in->face.data_size(), std::move(strides), in->face.flags());
      ++next;
    }
  }
  for (; next < outputs.size(); ++next) {
    if (like != nullptr) {
      fresh_like(site, *outputs[next], *like);
    } else {
      fresh(site, *outputs[next]);
    }
  }
}

} // namespace faststep::simulator
