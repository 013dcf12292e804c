// MLX composes attention of operations that each go through all scores, and copies heads that do not lie row after row. Here a block
// of rows stays in a core's cache from the product of its scores to that with the values, and the gradient computes its probabilities
// again. What a causal mask hides is not computed. Terms are added in another order than MLX's.
#include "cpu/attention.hpp"

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <limits>
#include <memory>
#include <numeric>
#include <stdexcept>
#include <vector>

#include "mlx/backend/cpu/encoder.h"
#include "mlx/primitives.h"
#include "cpu/copy.hpp"
#include "cpu/exp.hpp"
#include "cpu/matrices.hpp"
#include "cpu/softmax.hpp"
#include "lazy.hpp"

namespace faststep {

namespace {

// The most numbers of a block of scores, and its rows: fewer numbers stay in a cache, but products of few rows take longer.
constexpr int64_t block_numbers = 128 << 10, most_block_rows = 64, least_block_rows = 16;
// Scores of fewer bytes are left to MLX's operations: they stay in a cache, and what comes of them has MLX's bits.
constexpr size_t least_score_bytes = 1 << 20;

// Settings of an attention kernel: all but its arrays.
struct AttentionOptions {
  float scale;
  float hidden; // where a mask of bools shows nothing
  bool is_causal;
  bool is_masked; // the fourth input is the mask

  bool operator==(const AttentionOptions&) const = default;
};

// Matrices that are computed, whose rows lie beside those of the other heads: [first, rows, others, columns].
struct Results {
  Results(float* data, const mx::Shape& heads, int rows, int columns) : data(data), rows(rows), columns(columns) {
    others = 1;
    for (size_t i = 1; i < heads.size(); ++i) {
      others *= heads[i];
    }
  }

  float* from(size_t at, int64_t row) const {
    auto first = static_cast<int64_t>(at) / others, other = static_cast<int64_t>(at) % others;
    return data + ((first * rows + row) * others + other) * columns;
  }

  int ld() const {
    return static_cast<int>(others * columns);
  }

  float* data;
  int64_t others, rows, columns;
};

struct Mask {
  const void* data = nullptr;
  bool is_bool = false;
  std::vector<int64_t> starts;
  int64_t row = 0, column = 0; // strides
};

// One attention, with its memory.
struct AttentionCall {
  AttentionOptions options;
  Sgemm sgemm;
  int64_t count, rows, columns, width, value_width; // of matrices; of scores; of queries and values
  std::vector<Matrices> in; // queries, keys swapped, values, cotangent
  Mask mask;
  float* normalizers; // of each row the largest score, and 1 over the sum of e^(score - largest)
  std::vector<Results> out; // the output, or the gradients of queries, keys and values

  int64_t block() const {
    return std::clamp(block_numbers / columns, least_block_rows, most_block_rows);
  }

  int64_t blocks() const {
    return (rows + block() - 1) / block();
  }

  // The columns that the rows before `end` see.
  int64_t visible(int64_t end) const {
    return options.is_causal ? end + columns - rows : columns;
  }

  float* normalizers_from(size_t at, int64_t row) const {
    return normalizers + (static_cast<int64_t>(at) * rows + row) * 2;
  }
};

#if defined(__x86_64__)

int64_t padded(int64_t columns) {
  return (columns + exp_lanes - 1) / exp_lanes * exp_lanes;
}

FASTSTEP_AVX2 float sum_of(__m256 all) {
  float lanes[exp_lanes];
  std::memcpy(lanes, &all, sizeof(lanes));
  return std::accumulate(lanes, lanes + exp_lanes, 0.0f);
}

// Scale a row of scores and mask it; the rest of it, up to `ld`, is hidden.
FASTSTEP_AVX2 void mask_row(const AttentionCall& call, size_t at, int64_t row, int64_t visible, int64_t ld, float* scores) {
  constexpr float none = -std::numeric_limits<float>::infinity();
  auto seen = std::min(visible, call.visible(row + 1));
  if (call.options.scale != 1) {
    for (int64_t i = 0; i < seen; ++i) {
      scores[i] *= call.options.scale;
    }
  }
  if (const auto& mask = call.mask; mask.data != nullptr) {
    auto start = mask.starts[at] + row * mask.row;
    if (mask.is_bool) {
      const auto* shown = static_cast<const bool*>(mask.data) + start;
      for (int64_t i = 0; i < seen; ++i) {
        scores[i] = shown[i * mask.column] ? scores[i] : call.options.hidden;
      }
    } else {
      const auto* added = static_cast<const float*>(mask.data) + start;
      for (int64_t i = 0; i < seen; ++i) {
        scores[i] += added[i * mask.column];
      }
    }
  }
  std::fill(scores + seen, scores + ld, none);
}

FASTSTEP_AVX2 float largest_of(const float* row, int64_t ld) {
  auto all = _mm256_loadu_ps(row);
  for (int64_t i = exp_lanes; i < ld; i += exp_lanes) {
    all = _mm256_max_ps(_mm256_loadu_ps(row + i), all);
  }
  float lanes[exp_lanes];
  std::memcpy(lanes, &all, sizeof(lanes));
  return *std::max_element(lanes, lanes + exp_lanes);
}

// e^(score - largest) times a factor, in place; the sum of them.
FASTSTEP_AVX2 float exponentials_of(float* row, int64_t ld, float largest, float factor) {
  auto most = _mm256_set1_ps(largest), times = _mm256_set1_ps(factor), sum = _mm256_setzero_ps();
  for (int64_t i = 0; i < ld; i += exp_lanes) {
    auto e = _mm256_mul_ps(exp_of(_mm256_sub_ps(_mm256_loadu_ps(row + i), most)), times);
    _mm256_storeu_ps(row + i, e);
    sum = _mm256_add_ps(sum, e);
  }
  return sum_of(sum);
}

// p (g - sum(p g)) scale, in place of g.
FASTSTEP_AVX2 void gradient_row(const float* p, float* g, int64_t ld, float scale) {
  auto sum = _mm256_setzero_ps();
  for (int64_t i = 0; i < ld; i += exp_lanes) {
    sum = _mm256_fmadd_ps(_mm256_loadu_ps(p + i), _mm256_loadu_ps(g + i), sum);
  }
  auto all = _mm256_set1_ps(sum_of(sum)), times = _mm256_set1_ps(scale);
  for (int64_t i = 0; i < ld; i += exp_lanes) {
    auto scaled = _mm256_mul_ps(_mm256_sub_ps(_mm256_loadu_ps(g + i), all), times);
    _mm256_storeu_ps(g + i, _mm256_mul_ps(_mm256_loadu_ps(p + i), scaled));
  }
}

#else

int64_t padded(int64_t columns) {
  return columns;
}

void mask_row(const AttentionCall&, size_t, int64_t, int64_t, int64_t, float*) {}

float largest_of(const float*, int64_t) {
  return 0;
}

float exponentials_of(float*, int64_t, float, float) {
  return 0;
}

void gradient_row(const float*, float*, int64_t, float) {}

#endif

// Memory of a thread for so many numbers.
float* room_for(int64_t numbers) {
  thread_local std::vector<float> room;
  if (room.size() < static_cast<size_t>(numbers)) {
    room.resize(numbers);
  }
  return room.data();
}

// A block of rows of scores, of which so many columns are visible.
struct Block {
  Block(const AttentionCall& call, size_t at)
      : first(static_cast<int64_t>(at) * call.block()),
        rows(std::min(call.block(), call.rows - first)),
        visible(call.visible(first + rows)),
        ld(padded(visible)) {}

  int64_t first, rows, visible, ld;
};

void scores_of(const AttentionCall& call, size_t at, const Block& block, float* scores) {
  const auto &queries = call.in[0], &keys = call.in[1];
  int m = static_cast<int>(block.rows), n = static_cast<int>(block.visible), k = static_cast<int>(call.width), ld = static_cast<int>(block.ld);
  call.sgemm(by_rows, queries.order(), keys.order(), m, n, k, 1, queries.from(at, block.first), queries.ld, keys.from(at, 0), keys.ld, 0, scores, ld);
  for (int64_t row = 0; row < block.rows; ++row) {
    mask_row(call, at, block.first + row, block.visible, block.ld, scores + row * block.ld);
  }
}

void attend(const AttentionCall& call, size_t at, const Block& block) {
  auto* scores = room_for(block.rows * block.ld);
  scores_of(call, at, block, scores);
  auto* normalizers = call.normalizers_from(at, block.first);
  for (int64_t row = 0; row < block.rows; ++row) {
    auto* line = scores + row * block.ld;
    auto largest = largest_of(line, block.ld);
    normalizers[2 * row] = largest;
    normalizers[2 * row + 1] = 1 / exponentials_of(line, block.ld, largest, 1);
  }
  const auto &values = call.in[2];
  const auto& out = call.out[0];
  int m = static_cast<int>(block.rows), n = static_cast<int>(call.value_width), k = static_cast<int>(block.visible), ld = static_cast<int>(block.ld);
  call.sgemm(by_rows, plain, values.order(), m, n, k, 1, scores, ld, values.from(at, 0), values.ld, 0, out.from(at, block.first), out.ld());
  for (int64_t row = 0; row < block.rows; ++row) {
    auto* line = out.from(at, block.first + row);
    for (int64_t i = 0; i < call.value_width; ++i) {
      line[i] *= normalizers[2 * row + 1];
    }
  }
}

// The gradients of one matrix, the last block first: it sees all keys.
void attend_back(const AttentionCall& call, size_t at) {
  const auto &queries = call.in[0], &keys = call.in[1], &values = call.in[2], &cotangent = call.in[3];
  const auto &dq = call.out[0], &dk = call.out[1], &dv = call.out[2];
  int width = static_cast<int>(call.width), value_width = static_cast<int>(call.value_width);
  for (auto i = call.blocks(); i-- > 0;) {
    Block block(call, i);
    auto* p = room_for(2 * block.rows * block.ld);
    auto* g = p + block.rows * block.ld;
    int m = static_cast<int>(block.rows), n = static_cast<int>(block.visible), ld = static_cast<int>(block.ld);
    scores_of(call, at, block, p);
    const auto *q = queries.from(at, block.first), *c = cotangent.from(at, block.first);
    call.sgemm(by_rows, cotangent.order(), values.order(true), m, n, value_width, 1, c, cotangent.ld, values.from(at, 0), values.ld, 0, g, ld);
    const auto* normalizers = call.normalizers_from(at, block.first);
    for (int64_t row = 0; row < block.rows; ++row) {
      auto *p_row = p + row * ld, *g_row = g + row * ld;
      exponentials_of(p_row, ld, normalizers[2 * row], normalizers[2 * row + 1]);
      std::fill(g_row + n, g_row + ld, 0.0f);
      gradient_row(p_row, g_row, ld, call.options.scale);
      if (call.mask.is_bool) {
        const auto* shown = static_cast<const bool*>(call.mask.data) + call.mask.starts[at] + (block.first + row) * call.mask.row;
        for (int64_t column = 0; column < n; ++column) {
          g_row[column] = shown[column * call.mask.column] ? g_row[column] : 0;
        }
      }
    }
    float adds = i + 1 < call.blocks() ? 1 : 0;
    call.sgemm(by_rows, plain, keys.order(true), m, width, n, 1, g, ld, keys.from(at, 0), keys.ld, 0, dq.from(at, block.first), dq.ld());
    call.sgemm(by_rows, transposed_by_blas, queries.order(), n, width, m, 1, g, ld, q, queries.ld, adds, dk.from(at, 0), dk.ld());
    call.sgemm(by_rows, transposed_by_blas, cotangent.order(), n, value_width, m, 1, p, ld, c, cotangent.ld, adds, dv.from(at, 0), dv.ld());
  }
}

void run_forward(const AttentionCall& call, Share share) {
  auto chunk = [](const void* context, size_t at) {
    const auto& call = *static_cast<const AttentionCall*>(context);
    auto blocks = static_cast<size_t>(call.blocks());
    attend(call, at / blocks, Block(call, blocks - 1 - at % blocks)); // the largest one first
  };
  share(call.count * call.blocks(), chunk, &call);
}

void run_backward(const AttentionCall& call, Share share) {
  auto chunk = [](const void* context, size_t at) { attend_back(*static_cast<const AttentionCall*>(context), at); };
  share(call.count, chunk, &call);
}

mx::Shape heads_of(const mx::array& matrices) {
  return {matrices.shape().begin(), matrices.shape().end() - 2};
}

// Inputs: queries, keys swapped, values, the mask where there is one; for a gradient the cotangent and the normalizers behind them.
class AttentionKernel : public mx::Primitive {
 public:
  AttentionKernel(mx::Stream stream, AttentionOptions options, Sgemm sgemm, Share share)
      : Primitive(stream), options_(options), sgemm_(sgemm), share_(share) {}

  void eval_gpu(const std::vector<mx::array>&, std::vector<mx::array>&) override {
    throw std::runtime_error(std::string("[") + name() + "] expected a stream of the CPU, got one of a GPU");
  }

  bool is_equivalent(const mx::Primitive& other) const override {
    return options_ == static_cast<const AttentionKernel&>(other).options_;
  }

 protected:
  std::shared_ptr<AttentionCall> call_of(const std::vector<mx::array>& inputs, bool is_gradient) {
    const auto &queries = inputs[0], &keys = inputs[1], &values = inputs[2];
    auto call = std::make_shared<AttentionCall>();
    call->options = options_;
    call->sgemm = sgemm_;
    call->rows = queries.shape(-2);
    call->columns = keys.shape(-1);
    call->width = queries.shape(-1);
    call->value_width = values.shape(-1);
    call->count = static_cast<int64_t>(queries.size()) / (call->rows * call->width);
    for (size_t i : {0, 1, 2}) {
      call->in.push_back(matrices_of(inputs[i]));
    }
    if (options_.is_masked) {
      const auto& mask = inputs[3];
      bool is_bool = mask.dtype() == mx::bool_;
      call->mask = {is_bool ? static_cast<const void*>(mask.data<bool>()) : mask.data<float>(), is_bool, starts_of(mask), mask.strides(-2), mask.strides(-1)};
    }
    if (is_gradient) {
      call->in.push_back(matrices_of(inputs[inputs.size() - 2]));
    }
    return call;
  }

  static float* laid_out(mx::array& out) {
    out.set_data(mx::allocator::malloc(out.nbytes()));
    return out.data<float>();
  }

  void dispatch(std::shared_ptr<AttentionCall> call, void (*run)(const AttentionCall&, Share)) {
    mx::cpu::get_command_encoder(stream()).dispatch([call = std::move(call), run, share = share_] { run(*call, share); });
  }

 private:
  Matrices matrices_of(const mx::array& a) {
    return Matrices(attention_copies(a) ? temporary_rows(a, stream()) : a);
  }

  AttentionOptions options_;
  Sgemm sgemm_;
  Share share_;
};

class AttentionForward : public AttentionKernel {
 public:
  using AttentionKernel::AttentionKernel;

  void eval_cpu(const std::vector<mx::array>& inputs, std::vector<mx::array>& outputs) override {
    auto call = call_of(inputs, false);
    call->out.emplace_back(laid_out(outputs[0]), heads_of(inputs[0]), call->rows, call->value_width);
    call->normalizers = laid_out(outputs[1]);
    dispatch(std::move(call), run_forward);
  }

  const char* name() const override {
    return "Attention";
  }
};

class AttentionBackward : public AttentionKernel {
 public:
  using AttentionKernel::AttentionKernel;

  void eval_cpu(const std::vector<mx::array>& inputs, std::vector<mx::array>& outputs) override {
    auto call = call_of(inputs, true);
    auto heads = heads_of(inputs[0]);
    call->out.emplace_back(laid_out(outputs[0]), heads, call->rows, call->width);
    call->out.emplace_back(laid_out(outputs[1]), heads, call->columns, call->width);
    call->out.emplace_back(laid_out(outputs[2]), heads, call->columns, call->value_width);
    auto normalizers = inputs.back();
    call->normalizers = normalizers.data<float>();
    dispatch(std::move(call), run_backward);
  }

  const char* name() const override {
    return "AttentionVJP";
  }
};

// Matrices of each head as [first, rows, others, columns].
mx::Shape beside(const mx::Shape& heads, int rows, int columns) {
  mx::Shape shape;
  if (!heads.empty()) {
    shape.push_back(heads[0]);
  }
  shape.push_back(rows);
  if (heads.size() > 1) {
    shape.insert(shape.end(), heads.begin() + 1, heads.end());
  }
  shape.push_back(columns);
  return shape;
}

// Transpose [first, rows, others, columns] to [heads, rows, columns].
mx::array by_heads(const mx::array& a) {
  if (a.ndim() < 4) {
    return a;
  }
  std::vector<int> axes(a.ndim());
  std::iota(axes.begin(), axes.end(), 0);
  std::rotate(axes.begin() + 1, axes.begin() + 2, axes.end() - 1);
  return mx::transpose(a, std::move(axes), a.primitive().stream());
}

} // namespace

bool attention_copies(const mx::array& matrices) {
  return !Matrices::lies_by_rows(matrices) && !Matrices::lies_by_columns(matrices);
}

std::optional<mx::array> CpuAttention::probabilities(const mx::array& softmax, const Scores&) {
  return softmax_of(softmax);
}

bool CpuAttention::fits(const Attention& attention) const {
  const auto &queries = attention.queries, &keys = attention.keys_swapped, &values = attention.values;
  auto heads = heads_of(queries);
  bool are_same = heads_of(keys) == heads && heads_of(values) == heads && values.shape(-2) == keys.shape(-1);
  return sgemm_ != nullptr && can_compute_exp() && are_same &&
      attention.probabilities.nbytes() >= least_score_bytes && attention.probabilities.primitive().stream().device == mx::Device::cpu;
}

template <typename Kernel>
Arrays CpuAttention::call(const Attention& attention, const Arrays& others, std::vector<mx::Shape> shapes) const {
  const auto& scores = attention.scores;
  Arrays inputs{attention.queries, attention.keys_swapped, attention.values};
  bool is_masked = scores.mask && !scores.is_causal;
  if (is_masked) {
    inputs.push_back(*scores.mask);
  }
  inputs.insert(inputs.end(), others.begin(), others.end());
  auto stream = attention.probabilities.primitive().stream();
  AttentionOptions options{attention.scale, scores.hidden, scores.is_causal, is_masked};
  auto kernel = std::make_shared<Kernel>(stream, options, sgemm_, share_);
  std::vector dtypes(shapes.size(), mx::float32);
  auto made = mx::array::make_arrays(std::move(shapes), dtypes, std::move(kernel), inputs);
  take_module(attention.probabilities, made[0]);
  return made;
}

Arrays CpuAttention::forward(const Attention& attention) {
  const auto& p = attention.probabilities;
  auto heads = heads_of(p);
  auto normalizers = heads;
  normalizers.insert(normalizers.end(), {p.shape(-2), 2});
  auto made = call<AttentionForward>(attention, {}, {beside(heads, p.shape(-2), attention.values.shape(-1)), normalizers});
  made[0] = by_heads(made[0]);
  return made;
}

Arrays CpuAttention::backward(const Attention& attention, const mx::array& cotangent) {
  const auto& p = attention.probabilities;
  auto heads = heads_of(p);
  int width = attention.queries.shape(-1), value_width = attention.values.shape(-1);
  auto made = call<AttentionBackward>(
      attention,
      {cotangent, attention.made[1]},
      {beside(heads, p.shape(-2), width), beside(heads, p.shape(-1), width), beside(heads, p.shape(-1), value_width)});
  std::transform(made.begin(), made.end(), made.begin(), by_heads);
  return made;
}

} // namespace faststep
