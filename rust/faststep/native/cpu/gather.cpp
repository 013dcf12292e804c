#include "cpu/gather.hpp"

#include <algorithm>
#include <functional>
#include <iterator>
#include <numeric>
#include <string_view>
#include <utility>

#include "cpu/copy.hpp"
#include "mlx/backend/common/utils.h"

namespace faststep {

namespace {

void copy_to(const mx::array& part, char* to) {
  copy_all(parts_of({part}), to, part.itemsize());
}

// Row after row in other memory, from an element on.
void lay_out(mx::array& array, const mx::array& memory, int64_t from) {
  array.copy_shared_buffer(
      memory, mx::make_contiguous_strides(array.shape()), rows_of(array.shape()), array.size(), from);
}

mx::array allocated(size_t bytes, mx::Dtype dtype) {
  mx::array memory({static_cast<mx::ShapeElem>(bytes / mx::size_of(dtype))}, dtype, nullptr, {});
  memory.set_data(mx::allocator::malloc(bytes));
  return memory;
}

} // namespace

mx::array::Flags rows_of(const mx::Shape& shape) {
  auto size = std::accumulate(shape.begin(), shape.end(), size_t{1}, std::multiplies<size_t>());
  auto is_all = [size](auto n) { return static_cast<size_t>(n) == size; };
  return {true, true, size <= 1 || std::any_of(shape.begin(), shape.end(), is_all)};
}

bool is_join(const mx::Primitive& primitive) {
  return std::string_view(primitive.name()) == "Join";
}

Gathering::Gathering(const std::vector<mx::array>& tape) {
  for (const auto& array : tape) {
    if (!array.has_primitive() || !is_join(array.primitive())) {
      continue; // MLX's evaluation says of one that has none what is wrong
    }
    rooms_.emplace(array.id(), Room{array.nbytes(), 0, array.dtype(), std::nullopt, {}});
    size_t offset = 0;
    for (const auto& part : array.inputs()) {
      places_.emplace(part.id(), Place{array.id(), offset}); // of one that is joined twice, the first
      offset += part.nbytes();
    }
  }
}

std::vector<mx::array> Gathering::parts(const mx::array& array) const {
  std::vector<mx::array> parts;
  auto outputs = places_.empty() ? std::vector<mx::array>{} : array.outputs();
  auto is_part = [this](const mx::array& out) { return places_.contains(out.id()); };
  std::copy_if(outputs.begin(), outputs.end(), std::back_inserter(parts), is_part);
  return parts;
}

void Gathering::add(mx::array part) {
  auto found = rooms_.find(places_.at(part.id()).join);
  if (found == rooms_.end()) {
    return;
  }
  auto& room = found->second;
  room.ready += part.nbytes();
  room.waiting.push_back(std::move(part));
  if (!has_room(room.ready, room.bytes)) {
    return;
  }
  if (!room.memory) {
    room.memory = allocated(room.bytes, room.dtype);
  }
  for (auto& waiting : std::exchange(room.waiting, {})) {
    move(waiting, room);
  }
}

void Gathering::move(mx::array& part, Room& room) const {
  auto offset = places_.at(part.id()).offset;
  copy_to(part, room.memory->data<char>() + offset);
  lay_out(part, *room.memory, static_cast<int64_t>(offset / part.itemsize()));
}

bool Gathering::finish(mx::array& join) {
  auto room = rooms_.extract(join.id());
  if (room.empty() || !room.mapped().memory) {
    return false;
  }
  auto& memory = *room.mapped().memory;
  auto* to = memory.data<char>();
  for (const auto& part : join.inputs()) {
    if (part.data<char>() != to) {
      copy_to(part, to);
    }
    to += part.nbytes();
  }
  lay_out(join, memory, 0);
  join.detach();
  join.set_status(mx::array::Status::available);
  return true;
}

} // namespace faststep
