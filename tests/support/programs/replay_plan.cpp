// Random programs over a few cells of memory: in whatever order their operations run that the plan of a capture allows, the
// result is that of one after another.
#include <cstdio>
#include <cstdlib>
#include <memory>
#include <random>
#include <vector>

#include "cuda/replay/plan.hpp"

using faststep::replay::Hazards;
using faststep::replay::Retention;

namespace {

using Cells = std::vector<unsigned long>;

struct Op {
  size_t number;
  std::vector<int> reads;
  int computes; // the cell of its value as it was planned first
  int writes; // and where it is written
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

// Operations on `shared` cells, and on one of its own for each: at times its value has to go into a shared one.
bool is_serial(int shared, int count, int* redirected) {
  std::vector<char> memory(shared + 3 * count); // addresses
  auto address = [&](int cell) { return &memory[cell]; };
  Hazards hazards;
  std::vector<Op> ops, serial;
  auto add = [&](Op op) {
    op.number = ops.size();
    std::vector<Hazards::Address> reads, writes{address(op.writes)};
    for (int cell : op.reads) {
      reads.push_back(address(cell));
    }
    op.before = hazards.add(reads, writes);
    ops.push_back(op);
    serial.push_back(op);
  };
  int own = shared;
  for (int i = 0; i < count; ++i) {
    Op op{};
    for (int n = below(4); n > 0; --n) {
      op.reads.push_back(below(shared));
    }
    bool fresh = below(2) == 0;
    op.computes = op.writes = fresh ? own++ : below(shared);
    add(op);
    auto made = ops.size() - 1;
    for (int n = below(3); fresh && n > 0; --n) { // others come between; some read the fresh cell
      Op other{};
      other.reads = {below(3) == 0 ? op.writes : below(shared)};
      other.computes = other.writes = own++;
      add(other);
    }
    if (fresh) {
      int target = below(shared);
      Op copy{0, {op.writes}, target, target, true, {}};
      if (auto before = hazards.redirect(made, address(op.writes), address(target))) {
        serial.push_back(copy); // what it stands for
        ops[made].writes = target;
        ops[made].before.insert(ops[made].before.end(), before->begin(), before->end());
        ++*redirected;
      } else {
        add(copy);
      }
    }
  }
  Cells wanted(memory.size()), got(memory.size());
  for (const auto& op : serial) {
    wanted[op.computes] = value(op, wanted);
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

// No more than the budget is kept, the oldest goes first, and nothing goes before it has to.
bool is_bounded(size_t budget) {
  Retention<std::shared_ptr<int>> retention(budget);
  std::vector<std::weak_ptr<int>> given;
  std::vector<size_t> sizes;
  for (int i = 0; i < 50; ++i) {
    auto handle = std::make_shared<int>(i);
    given.push_back(handle);
    sizes.push_back(1 + below(20));
    retention.add(std::move(handle), sizes.back());
    size_t sum = 0;
    bool gone = false;
    for (size_t k = given.size(); k-- > 0;) {
      sum += sizes[k];
      gone = gone || sum > budget;
      if (given[k].expired() != gone) {
        return false;
      }
    }
  }
  retention.clear();
  return given.back().expired();
}

} // namespace

int main() {
  int redirected = 0, programs = 3000;
  for (int i = 0; i < programs; ++i) {
    if (!is_serial(2 + below(6), 1 + below(12), &redirected)) {
      std::printf("program %d depends on the order\n", i);
      return EXIT_FAILURE;
    }
  }
  for (size_t budget : {0, 1, 30, 1000}) {
    if (!is_bounded(budget)) {
      std::printf("a budget of %zu is not kept\n", budget);
      return EXIT_FAILURE;
    }
  }
  std::printf("%d programs, %d copies saved\n", programs, redirected);
  return redirected > 100 ? EXIT_SUCCESS : EXIT_FAILURE;
}
