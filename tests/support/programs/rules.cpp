// Graphs rewritten by the rules for CUDA, on a CPU: MLX's own operations stand in for the kernels, and what comes out is
// what the graph gave before. With a folder as its argument, the program writes the source of each kernel there.
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <functional>
#include <map>
#include <random>
#include <set>
#include <sstream>
#include <string>
#include <tuple>
#include <unordered_map>
#include <variant>
#include <vector>

#include "mlx/backend/cuda/cuda.h"
#include "mlx/device.h"
#include "mlx/fast.h"
#include "mlx/mlx.h"
#include "mlx/primitives.h"

namespace mlx::core {

const std::unordered_map<std::string, std::variant<std::string, size_t>>& stand_in_info(Device);

namespace fast {

CustomKernelFunction stand_in(
    const std::string& name,
    const std::vector<std::string>& inputs,
    const std::vector<std::string>& outputs,
    const std::string& source,
    const std::string& functions = "",
    bool contiguous = true);

array stand_in_attention(
    const array& queries,
    const array& keys,
    const array& values,
    float scale,
    const std::string& mask,
    std::optional<array> mask_array,
    std::optional<array> sinks,
    bool forced,
    Stream stream);

} // namespace fast

} // namespace mlx::core

#define gpu cpu
#define cuda_kernel stand_in
#define device_info stand_in_info
#include "cuda/rules/kernels.cpp"

#include "cuda/cross_entropy.cpp"

#include "cuda/rules/attention.cpp"
#define scaled_dot_product_attention stand_in_attention
#include "cuda/rules/causal.cpp"
#undef scaled_dot_product_attention
#include "cuda/rules/columns.cpp"
#include "cuda/rules/heads.cpp"
#include "cuda/rules/layer_norm.cpp"
#include "cuda/rules/relu.cpp"
#include "cuda/rules/small.cpp"
#include "cuda/rules/softmax.cpp"
#undef gpu
#undef cuda_kernel
#undef device_info
#include "patterns/attention.cpp"
#include "patterns/known.cpp"

namespace mx = mlx::core;
using Arrays = std::vector<mx::array>;

namespace faststep {

void is_determined_by_inputs(const mx::array&) {}
void take_module(const mx::array&, const mx::array&) {}
void may_lie_within(const mx::array&, std::vector<Place>) {}

void set_last_error(const char* message) noexcept {
  std::printf("%s\n", message);
}

} // namespace faststep

namespace {

std::multiset<std::string> used;
bool is_differentiated = false;

std::string folder; // for sources

std::string cuda_name(mx::Dtype dtype) {
  static const std::map<mx::Dtype::Val, std::string> names{
      {mx::Dtype::Val::float32, "float"},
      {mx::Dtype::Val::bfloat16, "__nv_bfloat16"},
      {mx::Dtype::Val::float16, "__half"},
      {mx::Dtype::Val::int32, "int32_t"}};
  return names.at(dtype.val());
}

// Writes a kernel as MLX's cuda_kernel has it compiled.
void keep(
    const std::string& name,
    const std::vector<std::string>& inputs,
    const Arrays& given,
    const std::vector<std::string>& outputs,
    const std::vector<mx::Dtype>& dtypes,
    const std::vector<std::pair<std::string, mx::fast::TemplateArg>>& constants,
    const std::string& source,
    const std::string& functions) {
  std::ostringstream to;
  to << "#include \"mlx/backend/cuda/device/utils.cuh\"\n" << functions << "\nnamespace mlx::core::cu {\n__global__ void ";
  to << name << "(\n";
  for (size_t i = 0; i < inputs.size(); ++i) {
    to << "const " << cuda_name(given[i].dtype()) << "* " << inputs[i] << ",\n";
    for (auto [part, type] : {std::pair{"_shape", "Shape"}, {"_strides", "Strides"}, {"_ndim", "int"}}) {
      if (given[i].ndim() > 0 && source.find(inputs[i] + part) != std::string::npos) {
        to << "const __grid_constant__ " << type << " " << inputs[i] << part << ",\n";
      }
    }
  }
  for (size_t i = 0; i < outputs.size(); ++i) {
    to << cuda_name(dtypes[i]) << "* " << outputs[i] << (i + 1 < outputs.size() ? ",\n" : ") {\n");
  }
  for (const auto& [constant, value] : constants) {
    if (const auto* number = std::get_if<int>(&value)) {
      to << "constexpr int " << constant << " = " << *number << ";\n";
    } else if (const auto* flag = std::get_if<bool>(&value)) {
      to << "constexpr bool " << constant << " = " << *flag << ";\n";
    } else {
      to << "using " << constant << " = " << cuda_name(std::get<mx::Dtype>(value)) << ";\n";
    }
  }
  to << source << "\n}\n}\n";
  auto number = std::to_string(std::hash<std::string>{}(to.str()));
  std::ofstream(folder + "/" + name + "-" + number.substr(0, 6) + ".cu") << to.str();
}

mx::array by_heads(const mx::array& a) {
  return mx::transpose(a, {0, 2, 1, 3});
}

mx::array turned(const mx::array& a) {
  return mx::swapaxes(a, -1, -2);
}

mx::array hidden(const mx::array& scores, bool causal) {
  auto n = scores.shape(-1);
  return causal ? mx::where(mx::tri(n, n, 0, mx::bool_), scores, mx::array(-INFINITY)) : scores;
}

Arrays attend(const std::map<std::string, mx::array>& in, float scale, bool causal, const std::string& name) {
  const auto &q = in.at("queries"), &k = in.at("keys"), &v = in.at("values");
  auto scores = hidden(mx::array(scale) * mx::matmul(q, turned(k)), causal);
  if (name == "attention_tiles" || name == "attention_forward") {
    auto out = by_heads(mx::matmul(mx::softmax(scores, -1), v));
    return {out, mx::logsumexp(scores, -1) / mx::array(std::log(2.0f))};
  }
  auto g = in.at("cotangent");
  auto p = in.count("normalizers")
      ? mx::exp(scores - mx::expand_dims(in.at("normalizers") * mx::array(std::log(2.0f)), -1))
      : mx::softmax(scores, -1);
  auto dp = mx::matmul(g, turned(v));
  auto dots = in.count("dots") ? in.at("dots") : mx::sum(p * dp, -1);
  if (in.count("out")) {
    dots = mx::sum(in.at("out") * g, -1);
  }
  auto ds = mx::array(scale) * p * (dp - mx::expand_dims(dots, -1));
  auto dq = by_heads(mx::matmul(ds, k)), dk = by_heads(mx::matmul(turned(ds), q));
  auto dv = by_heads(mx::matmul(turned(p), g));
  if (name == "attention_tiles_queries") {
    return {dq, dots};
  }
  return name == "attention_tiles_keys" ? Arrays{dk, dv} : Arrays{dq, dk, dv};
}

Arrays rows_of(const std::map<std::string, mx::array>& in, int queries, bool causal, const std::string& name) {
  const auto& rows = in.at("x");
  auto columns = rows.shape(1);
  auto seen = mx::array(true);
  if (causal) {
    auto last = mx::remainder(mx::arange(rows.shape(0)), mx::array(queries)) + mx::array(columns - queries);
    seen = mx::expand_dims(last, 1) >= mx::expand_dims(mx::arange(columns), 0);
  }
  if (name == "causal_softmax") {
    return {mx::softmax(mx::where(seen, rows, mx::array(-INFINITY)), -1)};
  }
  auto p = mx::where(seen, rows, mx::array(0.0f)), g = in.at("cotangent");
  return {p * (g - mx::sum(p * g, -1, true))};
}

// A layer norm as MLX composes it.
Arrays norm_of(const std::map<std::string, mx::array>& in, float eps, const std::vector<mx::Shape>& shapes) {
  auto norm = [eps](const Arrays& a) -> Arrays { return {mx::fast::layer_norm(a[0], a[1], a[2], eps)}; };
  auto x = in.at("x");
  if (in.count("rows")) { // of each the mean and by how much it is scaled
    auto row = [&](int i) { return mx::slice(in.at("rows"), {0, i}, {x.shape(0), i + 1}); };
    auto g = in.at("g"), hat = (x - row(0)) * row(1);
    auto both = mx::reshape(mx::stack({mx::sum(g * hat, 0), mx::sum(g, 0)}), {1, shapes[0][1]});
    return {mx::concatenate({both, mx::zeros({shapes[0][0] - 1, shapes[0][1]})}, 0)};
  }
  auto w = in.at("w");
  if (!in.count("g")) {
    return norm({x, w, in.at("b")});
  }
  auto made = mx::vjp(norm, {x, w, mx::zeros_like(w)}, {in.at("g")}).second;
  if (in.count("added_to")) {
    made[0] = made[0] + in.at("added_to");
  }
  if (shapes[1] == mx::Shape{x.shape(0), 2}) {
    auto wide = mx::astype(x, mx::float32);
    auto inverse = mx::rsqrt(mx::var(wide, -1, true) + mx::array(eps));
    return {made[0], mx::concatenate({mx::mean(wide, -1, true), inverse}, 1)};
  }
  auto sums = mx::reshape(mx::concatenate({made[1], made[2]}), {1, shapes[1][1]});
  auto nothing = mx::zeros({shapes[1][0] - 1, shapes[1][1]});
  return {made[0], mx::concatenate({sums, nothing}, 0)};
}

// What a kernel of this name computes.
Arrays computed(
    const std::string& name,
    const std::map<std::string, mx::array>& in,
    const std::map<std::string, int>& constants,
    const std::string& source,
    const std::vector<mx::Shape>& shapes) {
  if (name.starts_with("attention_")) {
    auto scale = std::strtof(source.c_str() + source.find("scale = ") + std::strlen("scale = "), nullptr);
    bool causal = constants.count("CAUSAL") == 0 || constants.at("CAUSAL");
    return attend(in, scale, causal, name);
  }
  if (name == "causal_softmax" || name == "softmax_vjp") {
    return rows_of(in, constants.at("QUERIES"), constants.at("CAUSAL"), name);
  }
  if (name == "heads") {
    return {mx::contiguous(by_heads(in.at("from")))};
  }
  if (name.starts_with("columns_")) {
    const auto& x = in.at("x");
    auto sum = mx::sum(mx::reshape(x, {-1, x.shape(-1)}), 0);
    if (sum.size() == mx::zeros(shapes[0]).size()) {
      return {mx::reshape(sum, shapes[0])};
    }
    auto nothing = mx::zeros({shapes[0][0] - 1, x.shape(-1)});
    return {mx::concatenate({mx::expand_dims(sum, 0), nothing}, 0)};
  }
  if (name == "small_product") {
    auto product = mx::matmul(in.at("a"), in.at("b"));
    return {in.count("row") ? product + in.at("row") : product};
  }
  if (name == "relu_vjp") {
    const auto& g = in.at("g");
    auto gradient = g * mx::astype(in.at("y") > mx::array(0.0f), g.dtype());
    auto nothing = mx::zeros({shapes[1][0] - 1, g.shape(1)});
    return {gradient, mx::concatenate({mx::sum(gradient, 0, true), nothing}, 0)};
  }
  if (name.starts_with("layer_norm")) {
    return norm_of(in, std::strtof(source.c_str() + source.find("eps = ") + std::strlen("eps = "), nullptr), shapes);
  }
  std::printf("no kernel is called %s\n", name.c_str());
  std::exit(1);
}

} // namespace

const std::unordered_map<std::string, std::variant<std::string, size_t>>& mx::stand_in_info(mx::Device) {
  static const std::unordered_map<std::string, std::variant<std::string, size_t>> known{
      {"compute_capability_major", size_t{9}}};
  return known;
}

mx::fast::CustomKernelFunction mx::fast::stand_in(
    const std::string& name,
    const std::vector<std::string>& inputs,
    const std::vector<std::string>& outputs,
    const std::string& source,
    const std::string& functions,
    bool) {
  return [=](const Arrays& given,
             const std::vector<mx::Shape>& shapes,
             const std::vector<mx::Dtype>& dtypes,
             auto,
             auto,
             const std::vector<std::pair<std::string, TemplateArg>>& templates,
             auto&&...) {
    auto plain = name.substr(std::strlen("faststep_"));
    if (!folder.empty()) {
      keep(plain, inputs, given, outputs, dtypes, templates, source, functions);
    }
    std::map<std::string, int> constants;
    for (const auto& [constant, value] : templates) {
      if (const auto* number = std::get_if<int>(&value)) {
        constants[constant] = *number;
      } else if (const auto* flag = std::get_if<bool>(&value)) {
        constants[constant] = *flag;
      }
    }
    // evaluated first: a graph of the reference's own is none that a rule looks into
    struct Late : mx::Primitive {
      using Primitive::Primitive;
      std::function<Arrays(const Arrays&)> work;
      std::string label;
      void eval_cpu(const Arrays& in, Arrays& out) override {
        auto made = work(in);
        for (size_t i = 0; i < out.size(); ++i) {
          auto whole = mx::contiguous(mx::astype(made[i], out[i].dtype()));
          whole.eval();
          out[i].copy_shared_buffer(whole);
        }
      }
      void eval_gpu(const Arrays&, Arrays&) override {}
      const char* name() const override {
        return "CustomKernel";
      }
    };
    auto late = std::make_shared<Late>(mx::default_stream(mx::Device::cpu));
    late->label = plain;
    late->work = [=](const Arrays& values) {
      used.insert(plain);
      std::map<std::string, mx::array> named;
      for (size_t i = 0; i < values.size(); ++i) {
        named.emplace(inputs[i], values[i]);
      }
      return computed(plain, named, constants, source, shapes);
    };
    return mx::array::make_arrays(shapes, dtypes, late, given);
  };
}

namespace {

constexpr int batch = 2, heads = 3, width = 16;

struct Case {
  const char* name;
  int positions;
  const char* mask; // "causal", "", or what additive_mask knows
  std::multiset<std::string> kernels;
  const char* twist = nullptr; // of an attention that is written out
  int queries = 0; // the last ones only
};

mx::array drawn(mx::Shape shape, int seed) {
  auto made = mx::random::normal(shape, mx::float32, mx::random::key(seed));
  made.eval();
  return made;
}

// What is added to scores: lowest values in the places of those that a causal mask hides, or something that looks like it.
mx::array additive_mask(const std::string& name, int n) {
  auto i = mx::arange(n), lowest = mx::array(std::numeric_limits<float>::lowest());
  auto rows = mx::expand_dims(i, 1), columns = mx::expand_dims(i, 0);
  auto hidden = rows < columns;
  if (name == "future") {
    hidden = columns < rows;
  } else if (name == "one row") {
    hidden = mx::expand_dims(mx::arange(1), 1) < mx::broadcast_to(columns, {n, n});
  } else if (name == "shifted") {
    hidden = mx::expand_dims(mx::arange(1, n + 1), 1) < columns;
  } else if (name == "coarse") { // neighbours are one number
    auto j = mx::arange(0.0, n, 1.0, mx::bfloat16);
    hidden = mx::expand_dims(j, 1) < mx::expand_dims(j, 0);
  } else if (name == "soft") {
    lowest = mx::array(-10.0f);
  }
  return mx::astype(hidden, mx::float32) * lowest;
}

// Attention as a user writes it, whose scores or probabilities something else uses, too.
mx::array attention(const mx::array& q, const mx::array& k, const mx::array& v, const std::string& twist) {
  int n = q.shape(2), of = k.shape(2);
  auto scores = mx::matmul(mx::array(0.25f) * q, turned(k));
  auto rows = mx::expand_dims(mx::arange(of - n, of), 1), columns = mx::expand_dims(mx::arange(of), 0);
  auto masked = mx::where(rows >= columns, scores, mx::array(-INFINITY));
  auto p = mx::softmax(masked, -1, true);
  auto weights = twist == "dropout" ? p * mx::cos(mx::stop_gradient(p)) : p;
  auto out = mx::matmul(weights, v);
  if (twist == "scores") {
    return out + mx::mean(mx::sin(scores));
  }
  return twist == "probabilities" ? out + mx::mean(mx::square(p)) : out;
}

// Loss and gradients of a layer with attention and a bias.
Arrays layer(const Case& of) {
  int n = of.positions, dims = heads * width;
  auto loss = [&](const Arrays& in) -> Arrays {
    auto project = [&](const mx::array& w) {
      auto y = mx::matmul(in[0], mx::transpose(w));
      return by_heads(mx::unflatten(y, -1, {heads, width}));
    };
    auto q = project(in[1]), k = project(in[2]), v = project(in[3]);
    std::string name = of.mask;
    std::optional<mx::array> mask;
    if (!name.empty() && name != "causal" && of.twist == nullptr) {
      mask = additive_mask(name, n);
    }
    if (of.queries > 0) {
      q = mx::slice(q, {0, 0, n - of.queries, 0}, q.shape());
    }
    auto y = of.twist ? attention(q, k, v, of.twist)
                      : mx::fast::scaled_dot_product_attention(q, k, v, 0.25f, mask ? "array" : name, mask);
    if (of.queries > 0) {
      y = mx::pad(y, {{0, 0}, {0, 0}, {n - of.queries, 0}, {0, 0}});
    }
    auto out = mx::matmul(mx::flatten(by_heads(y), -2, -1), mx::transpose(in[4]));
    auto summed = mx::tanh(in[0] + out);
    auto biased = mx::addmm(in[5], mx::reshape(summed, {batch * n, dims}), mx::transpose(in[4]));
    return {mx::mean(mx::square(biased))};
  };
  Arrays inputs{drawn({batch, n, dims}, 0)};
  for (int i = 1; i < 5; ++i) {
    inputs.push_back(drawn({dims, dims}, i) * mx::array(0.3f));
  }
  inputs.push_back(drawn({dims}, 5));
  mx::eval(inputs);
  auto [out, gradients] = mx::vjp(loss, inputs, {mx::array(1.0f)});
  out.insert(out.end(), gradients.begin(), gradients.end());
  return out;
}

// A norm, its gradients, and what is added to the first of them: before it is computed, behind it, or to both twice.
Arrays normed(int rows, int columns, mx::Dtype dtype, bool rewritten, int added) {
  auto given = [&](mx::Shape shape, int seed) { return mx::astype(drawn(std::move(shape), seed), dtype); };
  auto x = given({2, rows, columns}, 0), w = given({columns}, 1), b = given({columns}, 2), g = given({2, rows, columns}, 3);
  mx::eval(x, w, b, g);
  auto y = mx::sin(x);
  g = mx::sin(g);
  auto norm = [](const Arrays& a) -> Arrays { return {mx::fast::layer_norm(a[0], a[1], a[2], 1e-5f)}; };
  auto cpu = mx::default_stream(mx::Device::cpu);
  Arrays out, gradients;
  if (rewritten) {
    auto never = [](const Arrays&) -> Arrays { std::abort(); };
    out = {mx::array(y.shape(), y.dtype(), std::make_shared<mx::fast::LayerNorm>(cpu, never, 1e-5f), {y, w, b})};
    gradients = mx::array::make_arrays(
        {y.shape(), w.shape(), b.shape()},
        {y.dtype(), y.dtype(), y.dtype()},
        std::make_shared<mx::fast::LayerNormVJP>(cpu, never, 1e-5f),
        {y, w, b, g});
  } else {
    std::tie(out, gradients) = mx::vjp(norm, {y, w, b}, {g});
  }
  auto sum = added == 0 ? g + gradients[0] : gradients[0] + mx::cos(mx::mean(gradients[1]) + y);
  return {out[0], added == 2 ? sum * gradients[0] : sum, gradients[1], gradients[2]};
}

std::set<std::string> names(const Arrays& roots) {
  std::set<std::string> found;
  std::set<std::uintptr_t> seen;
  auto path = roots;
  while (!path.empty()) {
    auto a = path.back();
    path.pop_back();
    if (!a.has_primitive() || a.status() != mx::array::Status::unscheduled || !seen.insert(a.id()).second) {
      continue;
    }
    found.insert(a.primitive().name());
    path.insert(path.end(), a.inputs().begin(), a.inputs().end());
  }
  return found;
}

Arrays rewritten(const Arrays& roots) {
  faststep::rules::Kernels rules;
  rules.look(roots);
  Arrays got;
  for (const auto& root : roots) {
    got.push_back(rules.run(root));
  }
  return got;
}

bool are_near(const std::string& name, Arrays wanted, Arrays got, float near) {
  mx::eval(wanted);
  mx::eval(got);
  bool right = true;
  for (size_t i = 0; i < got.size(); ++i) {
    auto largest = [](const mx::array& a) { return mx::max(mx::abs(mx::astype(a, mx::float32))).item<float>(); };
    auto off = largest(got[i] - wanted[i]) / std::max(largest(wanted[i]), 1e-6f);
    if (!(off < near) || got[i].shape() != wanted[i].shape()) {
      std::printf("%s: result %zu is off by %g\n", name.c_str(), i, off);
      right = false;
    }
  }
  return right;
}

// Whether graphs give what they are to give, by these kernels, and what operations are left.
bool is_right(
    const std::string& name,
    Arrays wanted,
    const Arrays& roots,
    const std::multiset<std::string>& kernels,
    const std::function<bool(const std::set<std::string>&)>& are_left,
    float near = 1e-5f) {
  auto got = rewritten(roots);
  auto left = names(got);
  mx::eval(wanted);
  used.clear();
  bool right = are_near(name, wanted, got, near);
  used.erase("small_product"); // as many as there are products of these small arrays
  if (used != kernels || !are_left(left)) {
    std::printf("%s: kernels", name.c_str());
    for (const auto& each : used) {
      std::printf(" %s", each.c_str());
    }
    std::printf("; operations");
    for (const auto& each : left) {
      std::printf(" %s", each.c_str());
    }
    std::printf("\n");
    right = false;
  }
  return right;
}

bool is_right(const Case& of) {
  bool whole = of.kernels.count("attention_tiles") || of.kernels.count("attention_forward");
  return is_right(of.name, layer(of), layer(of), of.kernels, [whole](const auto& left) {
    return !whole || (!left.count("Softmax") && !left.count("Select"));
  });
}

bool is_right(int rows, int columns, mx::Dtype dtype, int added, std::multiset<std::string> kernels) {
  auto name = "norm of " + std::to_string(rows) + " x " + std::to_string(columns) + ", " + std::to_string(added);
  kernels.insert("layer_norm");
  bool half = dtype != mx::float32;
  if (half) {
    kernels.insert("columns_1"); // rounds what the blocks have summed up
  }
  auto adds = [&](const auto& left) { return bool(left.count("Add")) == (added != 0); };
  return is_right(
      name,
      normed(rows, columns, dtype, false, added),
      normed(rows, columns, dtype, true, added),
      kernels,
      adds,
      half ? 2e-2f : 1e-5f);
}

// Loss and gradients of an encoder's layer, its norms behind the sums or before what is added.
Arrays encoder(bool rewritten, bool norms_first, bool relu, int n) {
  int dims = heads * width;
  auto cpu = mx::default_stream(mx::Device::cpu);
  auto never = [](const Arrays&) -> Arrays { std::abort(); };
  auto norm = [&](const mx::array& x, const mx::array& w, const mx::array& b) {
    if (!rewritten) {
      return mx::fast::layer_norm(x, w, b, 1e-5f);
    }
    return mx::array(x.shape(), x.dtype(), std::make_shared<mx::fast::LayerNorm>(cpu, never, 1e-5f), {x, w, b});
  };
  auto linear = [](const mx::array& x, const mx::array& w, const mx::array& b) {
    return mx::addmm(b, x, mx::transpose(w));
  };
  auto loss = [&](const Arrays& in) -> Arrays {
    auto attention = [&](const mx::array& x) {
      auto project = [&](const mx::array& w) {
        return by_heads(mx::unflatten(mx::matmul(x, mx::transpose(w)), -1, {heads, width}));
      };
      auto q = project(in[1]), k = project(in[2]), v = project(in[3]);
      auto y = mx::fast::scaled_dot_product_attention(q, k, v, 0.25f, "causal");
      return mx::matmul(mx::flatten(by_heads(y), -2, -1), mx::transpose(in[4]));
    };
    auto mlp = [&](const mx::array& x) {
      auto h = linear(x, in[5], in[6]);
      h = relu ? mx::maximum(h, mx::array(0.0f)) : h * (mx::array(1.0f) + mx::erf(h / mx::array(1.4142135f))) / mx::array(2.0f);
      return linear(h, in[7], in[8]);
    };
    auto x = in[0];
    for (int i = 0; i < 2; ++i) {
      if (norms_first) {
        x = x + attention(norm(x, in[9], in[10]));
        x = x + mlp(norm(x, in[11], in[12]));
      } else {
        x = norm(x + attention(x), in[9], in[10]);
        x = norm(x + mlp(x), in[11], in[12]);
      }
    }
    return {mx::mean(mx::square(norm(x, in[13], in[14]) - mx::array(0.5f)))};
  };
  Arrays inputs{drawn({batch, n, dims}, 0)};
  for (int i = 1; i < 5; ++i) {
    inputs.push_back(drawn({dims, dims}, i) * mx::array(0.3f));
  }
  for (const auto& shape : {mx::Shape{2 * dims, dims}, {2 * dims}, {dims, 2 * dims}, {dims}}) {
    inputs.push_back(drawn(shape, static_cast<int>(inputs.size())) * mx::array(0.3f));
  }
  while (inputs.size() < 15) {
    inputs.push_back(drawn({dims}, static_cast<int>(inputs.size())));
  }
  mx::eval(inputs);
  auto [out, gradients] = mx::vjp(loss, inputs, {mx::array(1.0f)});
  out.insert(out.end(), gradients.begin(), gradients.end());
  return out;
}

// MLX's own attention with a mask in an array, and its gradient, become those of causal attention.
bool is_attention_right(bool differentiated) {
  int n = 8;
  auto stream = mx::default_stream(mx::Device::cpu);
  auto q = mx::sin(drawn({1, 2, n, 4}, 0)), k = mx::sin(drawn({1, 2, n, 4}, 1)), v = mx::sin(drawn({1, 2, n, 4}, 2));
  auto g = mx::sin(drawn({1, 2, n, 4}, 3)), i = mx::arange(n);
  auto less = mx::expand_dims(i, 1) < mx::expand_dims(i, 0);
  auto lowest = mx::array(std::numeric_limits<float>::lowest());
  auto mask = mx::broadcast_to(mx::astype(mx::astype(less, mx::float32) * lowest, mx::bfloat16), {1, 2, n, n});
  auto never = [](const Arrays&) -> Arrays { std::abort(); };
  using Attention = mx::fast::ScaledDotProductAttention;
  using Gradient = mx::fast::ScaledDotProductAttentionVJP;
  auto primitive = std::make_shared<Attention>(stream, never, 0.5f, false, false, differentiated, false);
  Arrays roots;
  if (differentiated) {
    auto outs = mx::array::make_arrays(
        {q.shape(), {1, 2, n, 1}}, {q.dtype(), mx::float32}, primitive, {q, k, v, mask});
    roots = mx::array::make_arrays(
        {q.shape(), k.shape(), v.shape()},
        {q.dtype(), k.dtype(), v.dtype()},
        std::make_shared<Gradient>(stream, never, 0.5f, false, false),
        {q, k, v, mask, outs[0], outs[1], g});
    roots.push_back(outs[0]);
  } else {
    roots = {mx::array(q.shape(), q.dtype(), primitive, {q, k, v, mask})};
  }
  is_differentiated = differentiated;
  faststep::rules::Kernels rules;
  rules.look(roots);
  Arrays got;
  for (const auto& root : roots) {
    got.push_back(rules.run(root));
  }
  auto reads = [](const mx::array& a, const Arrays& wanted) {
    bool same = a.inputs().size() == wanted.size();
    for (size_t j = 0; same && j < wanted.size(); ++j) {
      same = a.inputs()[j].id() == wanted[j].id();
    }
    return same;
  };
  const auto& out = got.back();
  bool right = std::get<2>(static_cast<const Attention&>(out.primitive()).state()) && reads(out, {q, k, v});
  for (size_t j = 0; differentiated && j < 3; ++j) {
    right = right && got[j].outputs()[j].id() == got[j].id() &&
        std::get<2>(static_cast<const Gradient&>(got[j].primitive()).state()) &&
        reads(got[j], {q, k, v, out.outputs()[0], out.outputs()[1], g});
  }
  right = right && !names(got).count("Arange") && !names(got).count("Copy");
  if (!right) {
    std::printf("attention with a mask in an array, differentiated: %d\n", differentiated);
  }
  return right;
}

// Loss and gradients of rows that a scalar parameter scales, once it has been given their dimensions.
Arrays scaled() {
  auto loss = [](const Arrays& in) -> Arrays {
    return {mx::mean(mx::square(in[0] * mx::reshape(mx::exp(in[1]), {1, 1})))};
  };
  Arrays inputs{drawn({40, 64}, 0), drawn({}, 1)};
  auto [out, gradients] = mx::vjp(loss, inputs, {mx::array(1.0f)});
  out.insert(out.end(), gradients.begin(), gradients.end());
  return out;
}

// Loss and gradients of a network that is drawn: any operations in any order, of scalars, rows, matrices and stacks of them.
Arrays drawn_network(unsigned seed) {
  const std::vector<mx::Shape> shapes{{}, {1}, {8}, {64}, {8, 64}, {40, 64}, {64, 64}, {64, 40}, {2, 40, 64}, {1, 2, 8, 64}};
  auto loss = [&](const Arrays& in) -> Arrays {
    std::mt19937 random(seed);
    auto below = [&](size_t n) { return static_cast<int>(random() % n); };
    auto pool = in;
    auto any = [&]() { return pool[below(pool.size())]; };
    auto next = [&]() -> std::optional<mx::array> {
      auto a = any();
      int ndim = static_cast<int>(a.ndim()), axis = ndim ? below(ndim) : 0;
      switch (below(9)) {
        case 0:
          return mx::tanh(a);
        case 1:
          return mx::maximum(a, mx::array(0.0f));
        case 2:
          return mx::softmax(ndim ? a : mx::reshape(a, {1}), -1);
        case 3:
          return mx::expand_dims(a, below(ndim + 1));
        case 4:
          return ndim ? mx::sum(a, axis, below(2) == 0) * mx::array(0.1f) : mx::exp(mx::tanh(a));
        case 5:
          return ndim > 1 ? mx::swapaxes(a, -1, -2) : mx::reshape(a, {1, -1});
        case 6:
          return ndim > 1 ? mx::flatten(a, 0, -2) : mx::flatten(a);
        default: // of what fits together
          break;
      }
      for (int tried = 0; tried < 20; ++tried) {
        auto b = any();
        bool multiplies = below(2) == 0;
        if (multiplies && a.ndim() >= 2 && b.ndim() == 2 && a.shape(-1) == b.shape(0)) {
          auto product = mx::matmul(a, b) * mx::array(0.2f);
          return b.shape(1) == 64 && below(2) == 0 ? product + in[3] : product;
        }
        bool fits = true;
        for (int i = 1; i <= static_cast<int>(std::min(a.ndim(), b.ndim())); ++i) {
          fits = fits && (a.shape(-i) == b.shape(-i) || a.shape(-i) == 1 || b.shape(-i) == 1);
        }
        if (!multiplies && fits && a.ndim() + b.ndim() < 8) {
          return below(2) == 0 ? a + b : mx::tanh(a) * b;
        }
      }
      return std::nullopt;
    };
    for (int i = 0; i < 30; ++i) {
      auto made = next();
      if (made && made->size() < 100000 && made->ndim() < 6) {
        pool.push_back(*made);
      }
    }
    auto all = mx::array(0.0f);
    for (size_t i = pool.size() - 6; i < pool.size(); ++i) {
      all = all + mx::mean(mx::tanh(pool[i]));
    }
    return {all};
  };
  Arrays inputs;
  for (const auto& shape : shapes) {
    inputs.push_back(drawn(shape, static_cast<int>(seed * shapes.size() + inputs.size())));
  }
  auto [out, gradients] = mx::vjp(loss, inputs, {mx::array(1.0f)});
  out.insert(out.end(), gradients.begin(), gradients.end());
  return out;
}

bool are_drawn_networks_right() {
  bool right = true;
  std::multiset<std::string> of_all;
  for (unsigned seed = 0; seed < 200; ++seed) {
    used.clear();
    right &= are_near("network " + std::to_string(seed), drawn_network(seed), rewritten(drawn_network(seed)), 1e-3f);
    of_all.insert(used.begin(), used.end());
  }
  for (const char* kernel : {"columns_1", "columns_4", "small_product", "softmax_vjp", "relu_vjp"}) {
    if (of_all.count(kernel) == 0) {
      std::printf("no network that is drawn takes %s\n", kernel);
      right = false;
    }
  }
  return right;
}

bool is_encoder_right(int n, bool norms_first, bool relu) {
  std::multiset<std::string> kernels;
  auto add = [&](int times, const char* name) {
    for (int i = 0; i < times; ++i) {
      kernels.insert(name);
    }
  };
  constexpr int layers = 2, norms = 2 * layers + 1, biases = 2 * layers;
  bool few = n <= 32;
  add(norms, "layer_norm");
  add(norms, "layer_norm_vjp");
  add(few ? norms : norms + biases, "columns_1");
  add(few ? 0 : relu ? biases - layers : biases, "columns_4");
  add(relu && !few ? layers : 0, "relu_vjp");
  for (const char* name : {"attention_forward", "attention_backward"}) {
    add(few ? layers : 0, name);
  }
  for (const char* name : {"attention_tiles", "attention_tiles_queries", "attention_tiles_keys"}) {
    add(few ? 0 : layers, name);
  }
  return is_right(
      norms_first ? "norms first" : "norms behind",
      encoder(false, norms_first, relu, n),
      encoder(true, norms_first, relu, n),
      kernels,
      [](const auto& left) { return !left.count("Softmax"); },
      1e-4f);
}

} // namespace

mx::array mx::fast::stand_in_attention(
    const array& queries,
    const array& keys,
    const array& values,
    float scale,
    const std::string& mask,
    std::optional<array>,
    std::optional<array>,
    bool,
    Stream stream) {
  auto never = [](const Arrays&) -> Arrays { std::abort(); };
  bool differentiated = is_differentiated; // libmlx tells nobody
  auto primitive = std::make_shared<ScaledDotProductAttention>(
      stream, never, scale, mask == "causal", false, differentiated, false);
  if (!differentiated) {
    return array(queries.shape(), queries.dtype(), primitive, {queries, keys, values});
  }
  auto positions = queries.shape();
  positions.back() = 1;
  return array::make_arrays(
      {queries.shape(), positions}, {queries.dtype(), float32}, primitive, {queries, keys, values})[0];
}

// Virtual functions of MLX's that libmlx keeps to itself, and that nobody calls.
std::pair<Arrays, std::vector<int>> mx::fast::Custom::vmap(const Arrays&, const std::vector<int>&) {
  return {};
}
Arrays mx::fast::Custom::jvp(const Arrays&, const Arrays&, const std::vector<int>&) {
  return {};
}
Arrays mx::fast::Custom::vjp(const Arrays&, const Arrays&, const std::vector<int>&, const Arrays&) {
  return {};
}
void mx::fast::ScaledDotProductAttention::eval_gpu(const Arrays&, Arrays&) {}
bool mx::fast::ScaledDotProductAttention::is_equivalent(const Primitive&) const {
  return false;
}
// as MLX has it
Arrays mx::fast::ScaledDotProductAttention::vjp(
    const Arrays& primals,
    const Arrays& cotangents,
    const std::vector<int>& arguments,
    const Arrays& outputs) {
  auto inputs = primals;
  inputs.insert(inputs.end(), {outputs[0], outputs[1], cotangents[0]});
  auto primitive =
      std::make_shared<ScaledDotProductAttentionVJP>(stream(), fallback_, scale_, do_causal_, has_sinks_);
  auto made = array::make_arrays(
      {primals[0].shape(), primals[1].shape(), primals[2].shape()},
      {primals[0].dtype(), primals[1].dtype(), primals[2].dtype()},
      primitive,
      inputs);
  Arrays wanted;
  for (int each : arguments) {
    wanted.push_back(made[each]);
  }
  return wanted;
}
void mx::fast::ScaledDotProductAttentionVJP::eval_gpu(const Arrays&, Arrays&) {}
bool mx::fast::ScaledDotProductAttentionVJP::is_equivalent(const Primitive&) const {
  return false;
}
void mx::fast::LayerNorm::eval_gpu(const Arrays&, Arrays&) {}
// as MLX has it
Arrays mx::fast::LayerNorm::vjp(
    const Arrays& primals,
    const Arrays& cotangents,
    const std::vector<int>& arguments,
    const Arrays&) {
  auto made = array::make_arrays(
      {primals[0].shape(), primals[1].shape(), primals[2].shape()},
      {primals[0].dtype(), primals[1].dtype(), primals[2].dtype()},
      std::make_shared<LayerNormVJP>(stream(), fallback_, eps_),
      {primals[0], primals[1], primals[2], cotangents[0]});
  Arrays wanted;
  for (int each : arguments) {
    wanted.push_back(made[each]);
  }
  return wanted;
}
bool mx::fast::LayerNorm::is_equivalent(const Primitive&) const {
  return false;
}
void mx::fast::LayerNormVJP::eval_gpu(const Arrays&, Arrays&) {}
bool mx::fast::LayerNormVJP::is_equivalent(const Primitive&) const {
  return false;
}

int main(int count, char** arguments) {
  mx::set_default_device(mx::Device::cpu);
  folder = count > 1 ? arguments[1] : "";
  std::multiset<std::string> few{"attention_forward", "attention_backward"};
  std::multiset<std::string> tiles{"attention_tiles", "attention_tiles_queries", "attention_tiles_keys"};
  std::multiset<std::string> many = tiles, some = few;
  many.insert("columns_4");
  many.insert("columns_1");
  auto with_heads = [](std::multiset<std::string> others, int count) {
    others.insert({"columns_4", "columns_1", "softmax_vjp"});
    for (int i = 0; i < count; ++i) {
      others.insert("heads");
    }
    return others;
  };
  auto plain = with_heads({}, 8), by_row = with_heads({"causal_softmax"}, 8), of_last = with_heads({"causal_softmax"}, 4);
  auto kept = tiles; // what is used is computed beside
  kept.insert("causal_softmax");
  kept = with_heads(kept, 6);
  bool right = true;
  for (const auto& each : std::vector<Case>{
           {"few positions", 20, "causal", some},
           {"few positions, mask in an array", 20, "array", some},
           {"few positions, no mask", 20, "", tiles},
           {"many positions", 40, "causal", many},
           {"many positions, mask in an array", 40, "array", many},
           {"many positions, no mask", 40, "", many},
           {"more than a warp keeps", 1030, "causal", many},
           {"future", 40, "future", plain},
           {"one row", 40, "one row", plain},
           {"shifted", 40, "shifted", plain},
           {"soft", 40, "soft", plain},
           {"neighbours are one number", 300, "coarse", plain},
           {"written out", 40, "causal", many, ""},
           {"dropout", 40, "causal", by_row, "dropout"},
           {"scores are used", 40, "causal", kept, "scores"},
           {"probabilities are used", 40, "causal", kept, "probabilities"},
           {"the last queries", 40, "causal", of_last, "", 24},
       }) {
    right &= is_right(each);
  }
  for (bool first : {false, true}) {
    for (int n : {20, 40}) {
      right &= is_encoder_right(n, first, false);
      right &= is_encoder_right(n, first, true);
    }
  }
  right &= is_right("a scalar parameter", scaled(), scaled(), {}, [](const auto&) { return true; });
  right &= are_drawn_networks_right();
  right &= is_attention_right(false);
  right &= is_attention_right(true);
  for (int added : {0, 1, 2}) {
    right &= is_right(5, 64, mx::float32, added, {"layer_norm_vjp"});
    right &= is_right(100, 64, mx::float32, added, {"layer_norm_vjp", "columns_1"});
    right &= is_right(100, 320, mx::float32, added, {"layer_norm_vjp_rows", "layer_norm_vjp_sums", "columns_1"});
    right &= is_right(5, 64, mx::float16, added, {"layer_norm_vjp"});
    right &= is_right(100, 1024, mx::bfloat16, added, {"layer_norm_vjp_rows", "layer_norm_vjp_sums"});
  }
  for (auto dtype : {mx::float32, mx::bfloat16}) { // sources only
    faststep::Logits logits{mx::zeros({8, 64}, dtype), 57};
    auto targets = mx::zeros({8}, mx::int32);
    auto losses = faststep::cross_entropy(logits, targets, mx::Device::cpu);
    faststep::cross_entropy_vjp(logits, targets, losses, losses, dtype, mx::Device::cpu);
  }
  return right ? 0 : 1;
}
