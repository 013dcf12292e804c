// The dependencies between the recorded nodes: those of the plan and of MLX in place of the order in which they were made.
#include <algorithm>
#include <iterator>
#include <set>
#include <unordered_map>

#include "cuda/replay/driver.hpp"
#include "cuda/replay/exchange.hpp"
#include "cuda/replay/recorder.hpp"

namespace faststep::replay {

// The dependencies of the nodes: within an operation those that MLX gives them, between operations those of the plan.
void Recorder::connect() {
  const auto& driver = replay::driver();
  auto graph = recording_.graph();
  size_t count = recording_.nodes();
  std::vector<CUgraphNode> nodes(count);
  check(driver.cuGraphGetNodes(graph, nodes.data(), &count), "cuGraphGetNodes");
  std::unordered_map<CUgraphNode, size_t> number;
  for (size_t i = 0; i < count; ++i) {
    number[nodes[i]] = i;
  }
  std::vector<size_t> unit(count, SIZE_MAX);
  for (size_t u = 0; u < units_.size(); ++u) {
    std::fill(unit.begin() + static_cast<std::ptrdiff_t>(units_[u].begin),
              unit.begin() + static_cast<std::ptrdiff_t>(units_[u].end), u);
  }
  std::set<std::pair<size_t, size_t>> edges;
  std::vector<bool> first(count, true), last(count, true);
  for (size_t i = 0; i < recording_.from().size(); ++i) {
    auto a = number.at(recording_.from()[i]), b = number.at(recording_.to()[i]);
    if (a >= b) {
      throw Refused("CUDA gives the nodes of a graph in another order than they were made in");
    }
    if (unit[a] == unit[b]) {
      edges.insert({a, b});
      last[a] = first[b] = false;
    }
  }
  std::vector<std::vector<CUgraphNode>> ends(units_.size()); // what the next operations wait for
  std::vector<CUgraphNode> from, to;
  for (auto [a, b] : edges) {
    from.push_back(nodes[a]);
    to.push_back(nodes[b]);
  }
  std::vector<std::vector<size_t>> waits;
  for (auto& unit : units_) {
    waits.push_back(std::move(unit.before));
  }
  waits = direct(std::move(waits));
  for (size_t u = 0; u < units_.size(); ++u) {
    std::vector<CUgraphNode> begins, before;
    for (auto i = units_[u].begin; i < units_[u].end; ++i) {
      if (first[i]) {
        begins.push_back(nodes[i]);
      }
      if (last[i]) {
        ends[u].push_back(nodes[i]);
      }
    }
    for (auto b : waits[u]) {
      before.insert(before.end(), ends[b].begin(), ends[b].end());
    }
    if (begins.size() > 1 && before.size() > 1) {
      CUgraphNode all = nullptr;
      check(driver.cuGraphAddEmptyNode(&all, graph, before.data(), before.size()), "cuGraphAddEmptyNode");
      before = {all};
    }
    if (units_[u].end - units_[u].begin == 1) { // no other node uses that memory before
      for (auto [a, b] : fill_early(nodes[units_[u].begin], units_[u], ends)) {
        from.push_back(a);
        to.push_back(b);
      }
    }
    for (auto b : begins) {
      for (auto a : before) {
        from.push_back(a);
        to.push_back(b);
      }
    }
  }
  announce(ends, depths(waits));
  if (!from.empty()) {
    check(driver.cuGraphAddDependencies(graph, from.data(), to.data(), from.size()), "cuGraphAddDependencies");
  }
  capture_.info.nodes = count;
  capture_.info.edges = from.size();
  check(driver.cuGraphInstantiateWithFlags(&capture_.exec_, graph, 0), "cuGraphInstantiate");
  check(driver.cuGraphUpload(capture_.exec_, capture_.queue_), "cuGraphUpload");
}

// An exchange is told when what it sums is made, and in which order.
void Recorder::announce(const std::vector<Nodes>& ends, const std::vector<size_t>& depths) {
  const auto& summed = capture_.graph_.summed;
  std::vector<std::pair<size_t, size_t>> made; // how deep, and which
  for (size_t i = 0; i < summed.size(); ++i) {
    Nodes before;
    auto& [depth, number] = made.emplace_back(0, i);
    for (auto user : hazards_.users(memory_of(*summed[i].data_shared_ptr()))) {
      before.insert(before.end(), ends[user].begin(), ends[user].end());
      depth = std::max(depth, depths[user]);
    }
    CUgraphNode node = nullptr;
    auto event = capture_.graph_.exchange->made(i);
    check(
        driver().cuGraphAddEventRecordNode(&node, recording_.graph(), before.data(), before.size(), event),
        "cuGraphAddEventRecordNode");
  }
  if (capture_.graph_.exchange) {
    std::sort(made.begin(), made.end());
    std::vector<size_t> order;
    std::transform(made.begin(), made.end(), std::back_inserter(order), [](const auto& each) { return each.second; });
    capture_.graph_.exchange->set_order(std::move(order));
  }
}

// cuBLAS has its workspace filled with zeros before a product, which then waits for that and not only for its factors. It is
// done beside the operations before it here, as soon as the workspace is free. Returns what waits for what because of that.
std::vector<std::pair<CUgraphNode, CUgraphNode>> Recorder::fill_early(
    CUgraphNode node, const Unit& unit, const std::vector<Nodes>& ends) {
  const auto& driver = replay::driver();
  auto is_of = [&](CUgraphNode each, int wanted) {
    int type = -1;
    return driver.cuGraphNodeGetType(each, &type) == CUDA_SUCCESS && type == wanted;
  };
  std::vector<std::pair<CUgraphNode, CUgraphNode>> edges;
  CUgraph child = nullptr;
  size_t count = 0;
  if (!is_of(node, child_node) || driver.cuGraphChildGraphNodeGetGraph(node, &child) != CUDA_SUCCESS ||
      driver.cuGraphGetNodes(child, nullptr, &count) != CUDA_SUCCESS || count < 2) {
    return edges;
  }
  Nodes inner(count);
  check(driver.cuGraphGetNodes(child, inner.data(), &count), "cuGraphGetNodes");
  for (auto each : inner) {
    Fill fill;
    size_t waits = 1;
    if (!is_of(each, fill_node) || driver.cuGraphNodeGetDependencies(each, nullptr, &waits) != CUDA_SUCCESS || waits > 0 ||
        driver.cuGraphMemsetNodeGetParams(each, &fill) != CUDA_SUCCESS || edges.size() + 1 == count) {
      continue;
    }
    auto bytes = fill.height > 1 ? fill.pitch * fill.height : fill.width * fill.elementSize;
    auto room = std::find_if(unit.rooms.begin(), unit.rooms.end(), [&](const Room& has) {
      return has.begin <= fill.dst && fill.dst + bytes <= has.end;
    });
    if (room == unit.rooms.end()) {
      continue;
    }
    Nodes before;
    for (auto user : room->users) {
      before.insert(before.end(), ends[user].begin(), ends[user].end());
    }
    CUgraphNode early = nullptr;
    check(
        driver.cuGraphAddMemsetNode(&early, recording_.graph(), before.data(), before.size(), &fill, capture_.context_),
        "cuGraphAddMemsetNode");
    check(driver.cuGraphDestroyNode(each), "cuGraphDestroyNode");
    edges.emplace_back(early, node);
  }
  return edges;
}

} // namespace faststep::replay
