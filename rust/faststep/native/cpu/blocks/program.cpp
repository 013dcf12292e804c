#include "cpu/blocks/program.hpp"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <mutex>
#include <new>
#include <string>
#include <string_view>
#include <unordered_map>
#include <unordered_set>
#include <utility>

#include "mlx/backend/cpu/encoder.h"
#include "kernel.hpp"

namespace faststep::blocks {

mx::Strides strides_over(const mx::array& in, const mx::Shape& shape) {
  mx::Strides strides(shape.size(), 0);
  auto missing = shape.size() - in.ndim();
  for (size_t i = 0; i < in.ndim(); ++i) {
    bool repeats = in.shape(static_cast<int>(i)) == 1;
    strides[missing + i] = repeats ? 0 : in.strides()[i];
  }
  return strides;
}

// An input whose elements do not lie as those of the output: it is brought into a room, block by block.
struct Brought {
  size_t place;
  size_t itemsize;
  const char* from;
  mx::Strides strides;
};

namespace {

constexpr size_t block = 512; // elements: a few of them lie in the first cache
constexpr size_t most_bytes = 8; // of an element
constexpr size_t alignment = 64;
constexpr size_t most_places = 96;
constexpr size_t never = SIZE_MAX;

std::array<char, 8> bytes_of(const mx::array& number) {
  std::array<char, 8> bytes{};
  std::memcpy(bytes.data(), number.data<char>(), number.itemsize());
  return bytes;
}

// Neighbouring axes become one where all of these go over them in one stride.
void join_axes(mx::Shape& shape, std::vector<Brought>& all) {
  for (size_t i = shape.size(); i-- > 1;) {
    bool joins = shape[i] == 1 || shape[i - 1] == 1 || std::all_of(all.begin(), all.end(), [&](const Brought& each) {
      return each.strides[i - 1] == each.strides[i] * shape[i];
    });
    if (!joins) {
      continue;
    }
    size_t gone = shape[i] == 1 ? i : i - 1;
    shape[shape[i] == 1 ? i - 1 : i] *= shape[gone];
    shape.erase(shape.begin() + static_cast<std::ptrdiff_t>(gone));
    for (auto& each : all) {
      each.strides.erase(each.strides.begin() + static_cast<std::ptrdiff_t>(gone));
    }
  }
}

template <typename T>
void bring_run(T* to, const T* from, int64_t stride, size_t count) {
  if (stride == 1) {
    std::memcpy(to, from, count * sizeof(T));
  } else if (stride == 0) {
    std::fill_n(to, count, *from);
  } else {
    for (size_t i = 0; i < count; ++i) {
      to[i] = from[static_cast<int64_t>(i) * stride];
    }
  }
}

// Elements from `first` on, row after row.
template <typename T>
void bring(const Brought& in, const mx::Shape& shape, size_t first, size_t count, T* to) {
  auto last = shape.size() - 1;
  std::array<size_t, Program::most_axes> at{};
  const auto* from = reinterpret_cast<const T*>(in.from);
  for (size_t i = last + 1, rest = first; i-- > 0;) {
    auto size = static_cast<size_t>(shape[i]);
    at[i] = rest % size;
    rest /= size;
    from += static_cast<int64_t>(at[i]) * in.strides[i];
  }
  while (count > 0) {
    auto run = std::min(count, static_cast<size_t>(shape[last]) - at[last]);
    bring_run(to, from, in.strides[last], run);
    to += run;
    count -= run;
    at[last] += run;
    from += static_cast<int64_t>(run) * in.strides[last];
    for (size_t i = last; i > 0 && at[i] == static_cast<size_t>(shape[i]); --i) {
      from += in.strides[i - 1] - static_cast<int64_t>(at[i]) * in.strides[i];
      at[i] = 0;
      ++at[i - 1];
    }
  }
}

// Whether all inputs lie in memory as one another, and the output can lie so too (compiled_check_contiguity in
// mlx/backend/common/compiled.cpp).
bool lie_alike(const std::vector<mx::array>& inputs, const mx::Shape& shape) {
  bool whole = true, by_rows = true, by_columns = true;
  size_t count = 0;
  for (const auto& in : inputs) {
    if (in.ndim() == 0) {
      continue;
    }
    ++count;
    bool same = in.shape() == shape;
    whole &= in.flags().contiguous && same;
    by_rows &= in.flags().row_contiguous && same;
    by_columns &= in.flags().col_contiguous && same;
    bool is_backwards = std::any_of(in.strides().begin(), in.strides().end(), [](auto stride) { return stride < 0; });
    if (is_backwards) {
      return false;
    }
  }
  return count == 0 ? shape.empty() : count == 1 ? whole : by_rows || by_columns;
}

} // namespace

class Program::Builder {
 public:
  explicit Builder(const mx::Compiled& kernel) {
    auto [is_input, is_output, is_operation] = arrays_of_kernel();
    const auto& constants = kernel.*constants_of_kernel();
    for (const auto& in : kernel.*is_input) {
      if (constants.contains(in.id())) {
        known_[in.id()] = single(in.itemsize(), bytes_of(in));
        numbers_.insert(known_[in.id()]);
        it_->inputs_.emplace_back();
      } else {
        it_->inputs_.emplace_back(add({Place::input, it_->inputs_.size(), in.itemsize(), in.ndim() == 0}));
        known_[in.id()] = *it_->inputs_.back();
      }
    }
    for (const auto& array : kernel.*is_operation) {
      fits_ = fits_ && take(array);
    }
    const auto& outputs = kernel.*is_output;
    it_->outputs_.resize(outputs.size());
    it_->writers_.assign(outputs.size(), never);
    for (size_t i = 0; fits_ && i < outputs.size(); ++i) {
      give(i, outputs[i]);
    }
  }

  std::shared_ptr<const Program> program() {
    if (!fits_ || it_->places_.size() > most_places) {
      return nullptr;
    }
    share_rooms();
    for (const auto& place : it_->places_) {
      it_->room_bytes_ = std::max(it_->room_bytes_, block * place.itemsize);
    }
    it_->readers_.assign(it_->inputs_.size(), 0);
    for (size_t i = 0; i < it_->steps_.size(); ++i) {
      for (auto in : it_->steps_[i].in) {
        if (const auto& place = it_->places_[in]; place.kind == Place::input) {
          it_->readers_[place.number] = i;
        }
      }
    }
    return it_;
  }

 private:
  size_t add(Place place) {
    it_->places_.push_back(place);
    return it_->places_.size() - 1;
  }

  // One element for all.
  size_t single(size_t itemsize, std::array<char, 8> bytes = {}) {
    it_->constants_.push_back(bytes);
    return add({Place::constant, it_->constants_.size() - 1, itemsize, true});
  }

  void step(Loop loop, size_t out, const std::vector<size_t>& in) {
    Step step{loop, out, {in[0], in[0], in[0]}};
    std::copy(in.begin(), in.end(), step.in.begin());
    auto& steps = it_->places_[out].single ? it_->once_ : it_->steps_;
    steps.push_back(step);
  }

  // Whether there is a loop for an operation.
  bool take(const mx::array& array) {
    std::vector<size_t> in;
    unsigned which = 0;
    for (const auto& each : array.inputs()) {
      if (in.size() == 3 || each.itemsize() > most_bytes) {
        return false;
      }
      in.push_back(known_.at(each.id()));
      which |= unsigned{it_->places_[in.back()].single} << (in.size() - 1);
    }
    if (in.empty() || array.itemsize() > most_bytes) {
      return false;
    }
    bool is_single = which == (1u << in.size()) - 1;
    std::string_view name = array.primitive().name();
    const auto& first = array.inputs()[0];
    Loop loop = nullptr;
    if (name == "Broadcast" || name == "AsType") {
      if (first.dtype() == array.dtype()) {
        known_[array.id()] = in[0];
        return true;
      }
      loop = cast_of(first.dtype(), array.dtype());
    } else if (name == "Power" && numbers_.contains(in[1])) {
      return take_power(array, in[0], in[1]);
    } else {
      const auto& last = array.inputs().back();
      bool alike = name == "Select" ? array.inputs()[1].dtype() == last.dtype() : first.dtype() == last.dtype();
      loop = alike ? loop_of(name, last.dtype(), is_single ? 0 : which) : nullptr;
    }
    if (loop == nullptr || (in.size() == 1 && which == 1 && !is_single)) {
      return false;
    }
    auto out = is_single ? single(array.itemsize()) : add({Place::room, rooms_++, array.itemsize(), false});
    step(loop, out, in);
    known_[array.id()] = out;
    it_->is_ahead_of_library_ |= !is_single && blocks::is_ahead_of_library(name, first.dtype());
    return true;
  }

  // A power of a number in the source. Compilers make a product of the second one.
  bool take_power(const mx::array& array, size_t base, size_t number) {
    const auto* bytes = it_->constants_[it_->places_[number].number].data();
    bool is_wide = array.dtype() == mx::float32;
    float exponent = is_wide       ? *reinterpret_cast<const float*>(bytes)
        : array.dtype() == mx::float16 ? static_cast<float>(*reinterpret_cast<const mx::float16_t*>(bytes))
                                       : static_cast<float>(*reinterpret_cast<const mx::bfloat16_t*>(bytes));
    bool is_known = exponent != 0 && std::abs(exponent) != 1 && (exponent != 2 || is_wide);
    bool is_single = it_->places_[base].single;
    auto loop = is_known && exponent == 2 ? loop_of("Multiply", array.dtype(), 0) : loop_of("Power", array.dtype(), is_single ? 0 : 2);
    if (!is_known || loop == nullptr || numbers_.contains(base)) {
      return false;
    }
    auto out = is_single ? single(array.itemsize()) : add({Place::room, rooms_++, array.itemsize(), false});
    step(loop, out, {base, exponent == 2 ? base : number});
    known_[array.id()] = out;
    return true;
  }

  // Have an output written by the step that makes it, or by a copy where something else has that place already.
  void give(size_t number, const mx::array& output) {
    auto made = known_.at(output.id());
    auto& place = it_->places_[made];
    if (place.kind == Place::room) {
      place.kind = Place::output;
      place.number = number;
    } else {
      bool is_single = place.single;
      made = add({Place::output, number, output.itemsize(), false});
      step(copy_of(output.itemsize(), is_single), made, {known_.at(output.id())});
    }
    it_->outputs_[number] = made;
    for (size_t i = 0; i < it_->steps_.size(); ++i) {
      if (it_->steps_[i].out == made) {
        it_->writers_[number] = i;
      }
    }
  }

  // Rooms go to later steps once they have been read for the last time.
  void share_rooms() {
    auto& places = it_->places_;
    std::unordered_map<size_t, size_t> last;
    for (size_t i = 0; i < it_->steps_.size(); ++i) {
      for (auto in : it_->steps_[i].in) {
        last[in] = i;
      }
    }
    std::vector<size_t> free;
    std::unordered_map<size_t, bool> freed;
    for (size_t i = 0; i < it_->steps_.size(); ++i) {
      const auto& step = it_->steps_[i];
      auto release = [&](bool same_size) {
        for (auto in : step.in) {
          bool ends = places[in].kind == Place::room && last[in] == i && !freed[in];
          if (ends && (!same_size || places[in].itemsize == places[step.out].itemsize)) {
            free.push_back(places[in].number);
            freed[in] = true;
          }
        }
      };
      release(true);
      if (places[step.out].kind == Place::room) {
        if (free.empty()) {
          free.push_back(it_->rooms_++);
        }
        places[step.out].number = free.back();
        free.pop_back();
      }
      release(false);
    }
  }

  std::shared_ptr<Program> it_ = std::make_shared<Program>();
  std::unordered_map<uintptr_t, size_t> known_; // the places of arrays
  std::unordered_set<size_t> numbers_; // places of numbers in the source
  size_t rooms_ = 0;
  bool fits_ = true;
};

std::shared_ptr<const Program> Program::of(const mx::Compiled& kernel) {
  return Builder(kernel).program();
}

std::shared_ptr<const Program> Program::known(const mx::Compiled& kernel) {
  static std::mutex mutex;
  static auto& all = *new std::unordered_map<std::string, std::shared_ptr<const Program>>(); // MLX keeps its libraries too
  std::lock_guard lock(mutex);
  auto [at, is_new] = all.try_emplace(kernel.lib_name());
  if (is_new) {
    at->second = of(kernel);
  }
  return at->second;
}

// One run of a program. It does not change as it is called.
class Program::Task {
 public:
  Task(std::shared_ptr<const Program> program, const std::vector<mx::array>& inputs, std::vector<mx::array>& outputs)
      : program_(std::move(program)), at_(program_->places_.size(), nullptr) {
    const auto& it = *program_;
    auto shape = outputs[0].shape();
    bool alike = lie_alike(inputs, shape);
    for (size_t i = 0; i < inputs.size(); ++i) {
      const auto& in = inputs[i];
      if (!it.inputs_[i]) {
        continue;
      }
      auto place = *it.inputs_[i];
      at_[place] = const_cast<char*>(in.data<char>());
      bool as_output = in.flags().row_contiguous && in.size() == outputs[0].size();
      if (!alike && !it.places_[place].single && !as_output) {
        brought_.push_back({place, in.itemsize(), at_[place], strides_over(in, shape)});
      }
    }
    allocate(inputs, outputs, alike);
    for (size_t i = 0; i < outputs.size(); ++i) {
      at_[it.outputs_[i]] = outputs[i].data<char>();
    }
    find_late(inputs, outputs);
    count_ = outputs[0].data_size();
    if (!brought_.empty()) {
      shape_ = std::move(shape);
      join_axes(shape_, brought_);
    }
    find_moving();
  }

  void operator()() const {
    const auto& it = *program_;
    char* now[most_places];
    std::array<char, 8> single[most_places];
    auto* rooms = room_for((it.rooms_ + brought_.size() + late_.size()) * it.room_bytes_);
    for (size_t i = 0; i < at_.size(); ++i) {
      const auto& place = it.places_[i];
      now[i] = place.kind == Place::room ? rooms + place.number * it.room_bytes_ : at_[i];
      if (place.kind == Place::constant) {
        single[i] = it.constants_[place.number];
        now[i] = single[i].data();
      }
    }
    auto next = rooms + it.rooms_ * it.room_bytes_;
    for (const auto& each : brought_) {
      now[each.place] = next;
      next += it.room_bytes_;
    }
    for (auto place : late_) {
      now[place] = next;
      next += it.room_bytes_;
    }
    for (const auto& step : it.once_) {
      run(step, now, 1);
    }
    for (size_t first = 0; first < count_; first += block) {
      auto n = std::min(block, count_ - first);
      bring_near(now, n, std::min(block, count_ - first - n));
      for (const auto& each : brought_) {
        fetch(each, first, n, now[each.place]);
      }
      for (const auto& step : it.steps_) {
        run(step, now, static_cast<int>(n));
      }
      for (auto place : late_) {
        auto itemsize = it.places_[place].itemsize;
        std::memcpy(at_[place] + first * itemsize, now[place], n * itemsize);
      }
      for (auto place : moving_) {
        now[place] += n * it.places_[place].itemsize;
      }
    }
  }

 private:
  // The places that move on with each block.
  void find_moving() {
    for (size_t i = 0; i < at_.size(); ++i) {
      const auto& place = program_->places_[i];
      bool moves = (place.kind == Place::input && !place.single) || place.kind == Place::output;
      bool is_brought = std::any_of(brought_.begin(), brought_.end(), [i](const auto& each) { return each.place == i; });
      bool is_late = std::find(late_.begin(), late_.end(), i) != late_.end();
      if (moves && !is_brought && !is_late) {
        moving_.push_back(i);
      }
    }
  }

  // The next block comes into the cache while this one is computed: the loops are too short for the processor to see it coming.
  void bring_near(char* const* now, size_t done, size_t next) const {
    constexpr size_t line = 64;
    for (auto place : moving_) {
      auto itemsize = program_->places_[place].itemsize;
      for (size_t at = 0; at < next * itemsize; at += line) {
        __builtin_prefetch(now[place] + done * itemsize + at);
      }
    }
  }

  static void run(const Step& step, char* const* now, int n) {
    const char* in[] = {now[step.in[0]], now[step.in[1]], now[step.in[2]]};
    step.loop(now[step.out], in, n);
  }

  // Memory of the thread, which has no more than it has needed at once.
  static char* room_for(size_t bytes) {
    struct Free {
      void operator()(char* memory) const {
        ::operator delete(memory, std::align_val_t{alignment});
      }
    };
    thread_local std::unique_ptr<char, Free> memory;
    thread_local size_t has = 0;
    if (bytes > has) {
      memory.reset(static_cast<char*>(::operator new(bytes, std::align_val_t{alignment})));
      has = bytes;
    }
    return memory.get();
  }

  void fetch(const Brought& in, size_t first, size_t n, char* to) const {
    switch (in.itemsize) {
      case 1:
        return bring(in, shape_, first, n, reinterpret_cast<uint8_t*>(to));
      case 2:
        return bring(in, shape_, first, n, reinterpret_cast<uint16_t*>(to));
      case 4:
        return bring(in, shape_, first, n, reinterpret_cast<uint32_t*>(to));
      default:
        return bring(in, shape_, first, n, reinterpret_cast<uint64_t*>(to));
    }
  }

  // As compiled_allocate_outputs does it: an output may take over an input.
  void allocate(const std::vector<mx::array>& inputs, std::vector<mx::array>& outputs, bool alike) {
    const mx::array* like = nullptr;
    size_t o = 0;
    for (size_t i = 0; i < inputs.size() && o < outputs.size(); ++i) {
      const auto& in = inputs[i];
      bool lies_so = alike ? in.ndim() > 0 : in.flags().row_contiguous && in.size() == outputs[o].size();
      if (program_->inputs_[i] && in.itemsize() == outputs[o].itemsize() && in.is_donatable() && lies_so) {
        take_over(in, outputs[o], alike);
        ++o;
      }
      if (like == nullptr && in.size() == outputs[0].size()) {
        like = &in;
      }
    }
    for (; o < outputs.size(); ++o) {
      auto& out = outputs[o];
      if (alike && like != nullptr) {
        auto bytes = like->data_size() * out.itemsize();
        out.set_data(mx::allocator::malloc(bytes), like->data_size(), like->strides(), like->flags());
      } else {
        out.set_data(mx::allocator::malloc(out.nbytes()));
      }
    }
  }

  static void take_over(const mx::array& in, mx::array& out, bool alike) {
    if (alike) {
      out.copy_shared_buffer(in);
    } else {
      out.copy_shared_buffer(in, out.strides(), in.flags(), in.data_size());
    }
  }

  // A step may read an input behind the one that writes an output in its place: then that is copied when a block is done.
  void find_late(const std::vector<mx::array>& inputs, const std::vector<mx::array>& outputs) {
    for (size_t o = 0; o < outputs.size(); ++o) {
      for (size_t i = 0; i < inputs.size(); ++i) {
        bool is_read = program_->inputs_[i] && program_->readers_[i] > program_->writers_[o];
        if (is_read && inputs[i].data<char>() == outputs[o].data<char>()) {
          late_.push_back(program_->outputs_[o]);
        }
      }
    }
  }

  std::shared_ptr<const Program> program_;
  std::vector<char*> at_; // places in memory
  std::vector<Brought> brought_;
  std::vector<size_t> late_, moving_; // outputs that are copied when a block is done; places that move on with each block
  mx::Shape shape_; // of what is brought
  size_t count_ = 0;
};

void Program::dispatch(
    std::shared_ptr<const Program> program,
    const std::vector<mx::array>& inputs,
    std::vector<mx::array>& outputs,
    mx::Stream stream) {
  mx::cpu::get_command_encoder(stream).dispatch(Task(std::move(program), inputs, outputs));
}

} // namespace faststep::blocks
