// Random programs over a few cells of memory, and over buffers that share a block: in whatever order their operations run that
// the plan of a capture allows, the result is that of one after another.
#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <limits>
#include <numeric>
#include <random>
#include <set>
#include <vector>

#include "replay/plan.hpp"

using faststep::replay::direct;
using faststep::replay::Hazards;
using faststep::replay::Operation;
using faststep::replay::plan;
using faststep::replay::Plan;
using faststep::replay::Sizes;
using faststep::replay::Within;

namespace {

using Cells = std::vector<unsigned long>;

struct Op {
  size_t number;
  std::vector<int> reads;
  int writes;
  bool copies = false;
  std::vector<size_t> before;
};

unsigned long value(const Op& op, const Cells& cells) {
  if (op.copies) {
    return cells[op.reads[0]];
  }
  unsigned long sum = op.number * 2654435761u + 1;
  for (int cell : op.reads) {
    sum = (sum ^ cells[cell]) * 6364136223846793005u + 1442695040888963407u;
  }
  return sum;
}

std::mt19937 engine(7);

int below(int n) {
  return std::uniform_int_distribution<int>(0, n - 1)(engine);
}

// Operations on `shared` cells, and on one of its own for each: at times its value is copied into a shared one.
bool is_serial(int shared, int count, size_t* spared) {
  std::vector<char> memory(shared + 3 * count); // addresses
  auto address = [&](int cell) { return &memory[cell]; };
  Hazards hazards;
  std::vector<Op> ops;
  auto add = [&](Op op) {
    op.number = ops.size();
    std::vector<Hazards::Address> reads, writes{address(op.writes)};
    for (int cell : op.reads) {
      reads.push_back(address(cell));
    }
    op.before = hazards.add(reads, writes);
    ops.push_back(op);
  };
  int own = shared;
  for (int i = 0; i < count; ++i) {
    Op op{};
    for (int n = below(4); n > 0; --n) {
      op.reads.push_back(below(shared));
    }
    bool fresh = below(2) == 0;
    op.writes = fresh ? own++ : below(shared);
    add(op);
    for (int n = below(3); fresh && n > 0; --n) { // others come between; some read the fresh cell
      Op other{};
      other.reads = {below(3) == 0 ? op.writes : below(shared)};
      other.writes = own++;
      add(other);
    }
    if (fresh) {
      int target = below(shared);
      add({0, {op.writes}, target, true, {}});
    }
  }
  Cells wanted(memory.size()), got(memory.size());
  for (const auto& op : ops) {
    wanted[op.writes] = value(op, wanted);
  }
  std::vector<std::vector<size_t>> before;
  for (const auto& op : ops) {
    before.push_back(op.before);
  }
  before = direct(std::move(before));
  for (auto& op : ops) {
    *spared += op.before.size() - before[op.number].size();
    op.before = before[op.number];
  }
  std::vector<bool> done(ops.size());
  for (size_t left = ops.size(); left > 0; --left) {
    std::vector<size_t> ready;
    for (size_t i = 0; i < ops.size(); ++i) {
      bool free = !done[i];
      for (auto b : ops[i].before) {
        free = free && b < i && done[b];
      }
      if (free) {
        ready.push_back(i);
      }
    }
    if (ready.empty()) {
      return false; // they wait for each other
    }
    auto next = ready[below(static_cast<int>(ready.size()))];
    got[ops[next].writes] = value(ops[next], got);
    done[next] = true;
  }
  for (int cell = 0; cell < shared; ++cell) {
    if (wanted[cell] != got[cell]) {
      return false;
    }
  }
  return true;
}

// Operations on buffers, each of which is written before it is read; the last one reads what stays.
struct Program {
  std::vector<Operation> operations;
  Sizes sizes;
  std::vector<Within> within;

  Plan planned(double factor) const {
    return plan(operations, sizes, within, factor);
  }
};

// A program like a training step: layers forward, whose values are read again backward, in the opposite order; beside each
// layer backward a gradient that stays, and now and then a buffer that only one operation needs, or one within which
// lies what is read for the last time: all of it, or the parts that are joined to it.
Program step(int layers, int width, bool takes) {
  Program made;
  auto buffer = [&](size_t bytes) {
    made.sizes.push_back(bytes);
    return made.sizes.size() - 1;
  };
  auto add = [&](std::vector<size_t> reads, std::vector<size_t> writes) {
    made.operations.push_back({std::move(reads), std::move(writes)});
    return made.operations.back().writes[0];
  };
  auto size = [&] { return static_cast<size_t>(1 + below(width)); };
  auto value = add({}, {buffer(size())});
  std::vector<size_t> values{value}, stay;
  for (int i = 0; i < layers; ++i) {
    std::vector<size_t> writes{buffer(size())};
    if (below(3) == 0) {
      writes.push_back(buffer(size()));
    }
    values.push_back(value = add({value}, writes));
  }
  for (int i = layers; i > 0; --i) {
    stay.push_back(add({value, values[i - 1]}, {buffer(size())}));
    if (below(2) == 0) { // in place
      add({stay.back()}, {stay.back()});
    }
    if (takes && below(2) == 0) {
      auto last = below(2) == 0 ? value : values[i];
      auto gap = size();
      auto next = buffer(gap + made.sizes[last] + size());
      made.within.push_back({last, next, gap});
      value = add({value, values[i]}, {next});
    } else {
      value = add({value, values[i]}, {buffer(size())});
    }
  }
  if (takes) { // what has been made once for each layer lies side by side
    std::vector<size_t> parts;
    size_t end = 0;
    for (auto each : stay) {
      if (below(3) > 0) {
        parts.push_back(each);
        end += made.sizes[each];
      }
    }
    auto whole = buffer(end + 1);
    for (size_t begin = 0; auto each : parts) {
      made.within.push_back({each, whole, begin});
      begin += made.sizes[each];
    }
    std::erase_if(stay, [&](size_t each) { return std::count(parts.begin(), parts.end(), each) > 0; });
    stay.push_back(add(parts, {whole}));
  }
  stay.push_back(value);
  made.operations.push_back({stay, {}});
  return made;
}

// The most bytes that are there at once where the operations run one after the other.
size_t live(const Program& program) {
  std::vector<size_t> place(program.sizes.size());
  std::iota(place.begin(), place.end(), 0);
  for (auto inner = program.within.rbegin(); inner != program.within.rend(); ++inner) {
    place[inner->buffer] = place[inner->other];
  }
  std::vector<size_t> first(program.sizes.size(), SIZE_MAX), last(program.sizes.size());
  for (size_t i = 0; i < program.operations.size(); ++i) {
    for (const auto* buffers : {&program.operations[i].reads, &program.operations[i].writes}) {
      for (auto buffer : *buffers) {
        first[place[buffer]] = std::min(first[place[buffer]], i);
        last[place[buffer]] = i;
      }
    }
  }
  size_t most = 0;
  for (size_t i = 0; i < program.operations.size(); ++i) {
    size_t sum = 0;
    for (size_t buffer = 0; buffer < program.sizes.size(); ++buffer) {
      sum += place[buffer] == buffer && first[buffer] <= i && i <= last[buffer] ? program.sizes[buffer] : 0;
    }
    most = std::max(most, sum);
  }
  return most;
}

// Dependencies of each operation, as a capture finds them, where its buffers lie in the block.
std::vector<std::vector<size_t>> waits(const Program& program, const Plan& plan, const char* block) {
  Hazards hazards;
  std::vector<std::vector<size_t>> before;
  std::set<size_t> taken;
  for (const auto& operation : program.operations) {
    auto addresses = [&](const std::vector<size_t>& buffers) {
      std::vector<Hazards::Address> all;
      for (auto buffer : buffers) {
        all.push_back(block + plan.offsets[buffer]);
      }
      return all;
    };
    for (auto buffer : operation.writes) {
      if (taken.insert(buffer).second) {
        hazards.take(block + plan.offsets[buffer], program.sizes[buffer]);
      }
    }
    before.push_back(hazards.add(addresses(operation.reads), addresses(operation.writes)));
  }
  return before;
}

// Every byte that an operation writes depends on every byte that it reads: in any order that is allowed, what stays is what it
// is where each buffer has memory of its own.
bool is_safe(const Program& program, const Plan& plan) {
  const auto& [operations, sizes, within] = program;
  std::vector<char> block(plan.bytes);
  auto before = waits(program, plan, block.data());
  std::vector<std::vector<uint64_t>> own(sizes.size());
  for (size_t buffer = 0; buffer < sizes.size(); ++buffer) {
    own[buffer].resize(sizes[buffer]);
  }
  std::vector<uint64_t> shared(plan.bytes);
  auto run = [&](size_t number, auto&& bytes) {
    uint64_t sum = number + 1;
    for (auto buffer : operations[number].reads) {
      for (size_t i = 0; i < sizes[buffer]; ++i) {
        sum = (sum ^ bytes(buffer)[i]) * 6364136223846793005u + 1442695040888963407u;
      }
    }
    for (auto buffer : operations[number].writes) {
      for (size_t i = 0; i < sizes[buffer]; ++i) {
        bytes(buffer)[i] = sum + i;
      }
    }
    return sum;
  };
  uint64_t wanted = 0, got = 0;
  for (size_t i = 0; i < operations.size(); ++i) {
    wanted = run(i, [&](size_t buffer) { return own[buffer].data(); });
  }
  std::vector<bool> done(operations.size());
  for (size_t left = operations.size(); left > 0; --left) {
    std::vector<size_t> ready;
    for (size_t i = 0; i < operations.size(); ++i) {
      auto is_done = [&](size_t b) { return b < i && done[b]; };
      if (!done[i] && std::all_of(before[i].begin(), before[i].end(), is_done)) {
        ready.push_back(i);
      }
    }
    if (ready.empty()) {
      return false;
    }
    auto next = below(3) == 0 ? ready.back() : ready[below(static_cast<int>(ready.size()))];
    auto sum = run(next, [&](size_t buffer) { return shared.data() + plan.offsets[buffer]; });
    got = next + 1 == operations.size() ? sum : got;
    done[next] = true;
  }
  return wanted == got;
}

// Number of pairs of operations that may run side by side.
size_t pairs(const Program& program, const Plan& plan) {
  std::vector<char> block(plan.bytes);
  auto before = waits(program, plan, block.data());
  std::vector<std::set<size_t>> all(before.size());
  size_t sum = 0;
  for (size_t i = 0; i < before.size(); ++i) {
    for (auto b : before[i]) {
      all[i].insert(b);
      all[i].insert(all[b].begin(), all[b].end());
    }
    sum += i - all[i].size();
  }
  return sum;
}

Plan separate(const Program& program) {
  Plan plan;
  for (auto bytes : program.sizes) {
    plan.offsets.push_back(plan.bytes);
    plan.bytes += bytes;
  }
  return plan;
}

// Sharing is safe, stays within its bound, and costs nothing where memory does not matter.
bool is_planned(int* beside) {
  auto program = step(1 + below(12), 1 + below(20), below(2) == 0);
  const auto endless = 1e6;
  auto least = program.planned(1), some = program.planned(1.1), free = program.planned(endless);
  auto apart = separate(program);
  for (const auto& each : {least, some, free, apart}) {
    for (int i = 0; i < 3; ++i) {
      if (!is_safe(program, each)) {
        std::printf("a result depends on the order\n");
        return false;
      }
    }
  }
  auto most = live(program);
  if (least.bytes < most || some.bytes > static_cast<size_t>(1.1 * static_cast<double>(some.least)) || free.bytes > apart.bytes) {
    std::printf("%zu live, least %zu, some %zu of %zu, free %zu, apart %zu\n", most, least.bytes, some.bytes, some.least, free.bytes,
                apart.bytes);
    return false;
  }
  auto in_free = pairs(program, free), in_apart = pairs(program, apart);
  if (program.within.empty() ? in_free != in_apart : in_free > in_apart) { // who writes over a buffer waits for its readers
    std::printf("operations wait for each other without need\n");
    return false;
  }
  *beside += pairs(program, some) > pairs(program, least) ? 1 : 0;
  return true;
}

// A large step: its block is hardly larger than what is there at once.
bool is_dense() {
  engine.seed(7);
  auto program = step(150, 1000, false);
  auto found = program.planned(1.1);
  auto most = static_cast<double>(live(program));
  std::printf("at once %.0f, least %zu, planned %zu, apart %zu\n", most, found.least, found.bytes, separate(program).bytes);
  return static_cast<double>(found.least) <= 1.1 * most && static_cast<double>(found.bytes) <= 1.21 * most;
}

} // namespace

int main() {
  int programs = 3000;
  size_t spared = 0;
  for (int i = 0; i < programs; ++i) {
    if (!is_serial(2 + below(6), 1 + below(12), &spared)) {
      std::printf("program %d depends on the order\n", i);
      return EXIT_FAILURE;
    }
  }
  int beside = 0, steps = 300;
  for (int i = 0; i < steps; ++i) {
    if (!is_planned(&beside)) {
      std::printf("step %d\n", i);
      return EXIT_FAILURE;
    }
  }
  std::printf("%d programs, %zu dependencies saved; ", programs, spared);
  std::printf("%d steps, %d with more side by side\n", steps, beside);
  return spared > 1000 && beside > 10 && is_dense() ? EXIT_SUCCESS : EXIT_FAILURE;
}
