// Every function of the crate that Rust calls; src/mlx/ffi.rs declares the same ones. Each source that defines one includes
// this file, so that the compiler holds the definition against the declaration.
//
// An array is an mlx::core::array: the `ctx` of mlx-c's mlx_array. One that is written through an out parameter is new, on
// the heap, and belongs to the caller.
//
// A function that can fail returns a status and writes its results through out parameters, which are left alone unless it
// is `done`. The others are noexcept. No exception crosses this boundary, and none is swallowed.
//
// `graph` rewrites the lazy graph of a step; `cpu` and `cuda` have kernels of our own, `replay` captures and launches
// a step; `simulator` goes through MLX's evaluation for a plan of the memory, and orders gradients by it; `measure` times
// operations one by one; `array`, `status`, `lazy` and `walk` are what these share.
#pragma once

#include <cstddef>
#include <cstdint>

namespace faststep {

enum Status : int {
  done = 0,
  not_applicable = 1, // MLX has to do it, or there is no such thing: no error
  failed = -1, // faststep_last_error says why
};

// `cblas_sgemm`.
using Sgemm = void (*)(int, int, int, int, int, int, float, const float*, int, const float*, int, float, float*, int);

// Does so many chunks of work, each by its number, with other threads where they have time.
using Share = void (*)(size_t count, void (*chunk)(const void* context, size_t at), const void* context);

// A product with quantized weights: matrices of `rows` of `inner` numbers each, times packed weights.
struct QuantizedProduct {
  size_t dtype; // 0: float32, 1: float16, 2: bfloat16
  size_t mode; // of mlx::core::QuantizationMode
  size_t bits;
  size_t group;
  size_t transposed;
  size_t rows;
  size_t inner;
  size_t columns;
  size_t weights; // matrices of packed weights
  size_t inputs; // matrices of activations
  size_t pairs; // of matrices of activations and of weights, whose products stand one after the other; 0: one of each
  const void* x;
  const uint8_t* w;
  const void* scales;
  const void* biases;
  const uint32_t* left; // of each pair the matrix of activations, and that of weights
  const uint32_t* right;
  void* out;
  float* scratch;
};

// A convolution of images of float32, or the gradient of its weights, by patches of the images. Pairs: height and width.
struct Convolution {
  size_t is_gradient; // of [patches, outputs] in `other`; otherwise the weights are there
  size_t images;
  size_t channels;
  size_t outputs;
  size_t size[2]; // of an image
  size_t kernel[2];
  size_t patches[2]; // of an image
  size_t stride[2]; // of patches, over the image with its padding and its dilation
  size_t dilation[2]; // of the image
  size_t padding[2]; // before the image
  const float* x;
  const float* other;
  float* out;

  bool operator==(const Convolution&) const = default;
};

// A product of float32, c = a b or c + a b, of matrices that lie row after row, each so many numbers apart, or a^T, or b^T.
struct MatrixProduct {
  size_t m, n, k;
  const float* a;
  size_t lda, a_turned;
  const float* b;
  size_t ldb, b_turned;
  float* c;
  size_t ldc, adds;
};

// What a call of the compiler for a fused kernel comes to: a library, or nothing, where MLX is to say whether it has one; `ask`: one is
// made meanwhile.
enum class KernelCall : int { compile = 0, look = 1, ask = 2 };

// Contents of a capture: kernels and copies, dependencies between them, bytes of memory.
struct CaptureInfo {
  size_t nodes;
  size_t edges;
  size_t bytes;
};

// An operation that has been timed; the texts live as long as the call that tells of it.
struct TimedOperation {
  uintptr_t id; // the least of the identities of its outputs
  const char* name;
  const char* module; // that it belongs to; empty where that is not known
  const char* output; // dtype and shape of its output
  size_t bytes; // that it reads and writes
  double seconds;
  int by_events; // of the device; otherwise by waiting for it
};

namespace simulator {

// The device that evaluates, and its memory when the plan begins, in bytes.
struct Device {
  size_t gpu; // 0: the CPU
  size_t active;
  size_t cached;
  size_t cache_limit;
  size_t memory_limit;
  size_t max_ops; // kernels in one CUDA graph, and the millions of elements that they read
  size_t max_mega;
};

// In bytes: in use, the most that was in use since the last reading, and freed buffers that MLX keeps.
struct Reading {
  size_t active;
  size_t peak;
  size_t cache;
};

// The purpose of memory.
enum class Kind : size_t {
  others, // of the process, and constants
  parameters,
  state,
  model, // its other arrays
  batch,
  activations,
  backward,
  gradients,
  update,
};
constexpr size_t kinds = 9;

// Memory in use while an operation runs, by kind, and freed buffers that MLX keeps.
struct Held {
  uintptr_t operation; // the least of the identities of its outputs
  size_t bytes[kinds];
  size_t cache;
};

} // namespace simulator

} // namespace faststep

extern "C" {

// The message of this thread's last function that failed; it stays until the next one does.
const char* faststep_last_error() noexcept;

// --- array.cpp

// The identity of an array's value, and whether it waits to be evaluated.
uintptr_t faststep_array_id(const void* array) noexcept;
// Number of handles to an array's value.
size_t faststep_array_holders(const void* array) noexcept;
int faststep_array_is_lazy(const void* array) noexcept;
// Return whether the array has its value, row after row.
int faststep_array_has_rows(const void* array) noexcept;
// Number of operations that are computed before the array has its value.
size_t faststep_array_operations(const void* array) noexcept;
// The value of an array, watched without being kept alive.
int faststep_watch_new(const void* array, void** watched);
int faststep_watch_is_alive(const void* watched) noexcept;
void faststep_watch_free(void* watched) noexcept;
// Return whether the array is filled with one number that is there, as the zeros are that an optimizer begins with.
int faststep_array_is_filled(const void* array) noexcept;
// Return whether the array waits for work on a stream of another thread, or for a file to be read.
int faststep_array_is_foreign(const void* array) noexcept;
int faststep_array_reads_file(const void* array) noexcept;
// Return whether the caller is inside of a transformation, where nothing may be evaluated.
int faststep_is_transforming() noexcept;
// Return whether a lazy array is zero in every element, whatever it is computed from: MLX's gradient of what is not used.
int faststep_array_is_zero(const void* array) noexcept;
// The most ranks between which lazy arrays are exchanged on the way to these.
int faststep_arrays_ranks(const void* const* arrays, size_t count) noexcept;
// The group of all processes that were started together; an error where there is none.
int faststep_group_init(void** group);
// A group of mlx::core::distributed, from one that lies somewhere else; freed by faststep_group_free.
void* faststep_group_new(const void* group) noexcept;
int faststep_group_is(const void* group, const void* other) noexcept;
void faststep_group_free(void* group) noexcept;
int faststep_group_rank(const void* group) noexcept;
int faststep_group_size(const void* group) noexcept;
// The lazy sum of an array over the group, on the stream on which it communicates: on a CPU in messages of so many elements, 0:
// in one.
int faststep_group_sum(const void* group, const void* array, size_t message, void** sum);
// The sum on the group's default stream, as an operation within a step's graph.
int faststep_group_sum_in_turn(const void* group, const void* array, void** sum);
// Sums numbers over the group, in their place, and waits for that: on a GPU not for what it computes meanwhile.
int faststep_group_sum_numbers(const void* group, float* numbers, size_t count);
// After an error of the device, which is known: waits for all that is under way, and has none of the arrays wait any more.
void faststep_arrays_recover(const void* const* arrays, size_t count) noexcept;
// Evaluates arrays, on a CPU each operation when the one before is done.
int faststep_eval_one_by_one(const void* const* arrays, size_t count);
// Waits for the default stream, and for what its device lets go of when it is done.
int faststep_synchronize();
// The same, where the default device is a CPU; not applicable elsewhere.
int faststep_synchronize_cpu();
// A part of a flat buffer as an array of its own, without a copy. Of an evaluated buffer the part is evaluated too and
// shares its event; of a lazy one it is a lazy view.
int faststep_array_view(const void* flat, const int* shape, size_t ndim, size_t offset, void** view);
// An array without a value: what an object holds while its value is in the device's hands. Reading it raises.
void* faststep_array_hollow() noexcept;
// The random state before a lazy draw; not applicable where the array is no such draw.
int faststep_array_random_state(const void* draw, void** state);

// --- measure.cpp

// Evaluates arrays operation by operation, and tells of each.
int faststep_measure(
    const void* const* arrays,
    size_t count,
    void (*take)(void* into, const faststep::TimedOperation* operation),
    void* into);
// The operations that these arrays are computed from, and have no module yet, belong to this one; what reads this array
// does. Labels are of the calling thread, and stay until they are cleared.
int faststep_label(const void* const* arrays, size_t count, const char* module);
int faststep_label_input(const void* array, const char* module);
void faststep_labels_clear() noexcept;

// --- graph/

// Merge equal operations of a lazy graph: the replacement of each of these arrays, some of which may be one array.
int faststep_merge(const void* const* arrays, size_t count, void** merged);
// Put the collective operations of a graph into one order, the same for the same graph on every rank. `exchanges`: a hash of them, 0 if
// there are none.
int faststep_exchange_in_order(const void* const* arrays, size_t count, void** ordered, uint64_t* exchanges);
// For each array, whether it depends on shards, so that its value differs from rank to rank.
int faststep_differ_by_rank(const void* const* arrays, size_t count, const void* const* shards, size_t shards_count, int* differ);
// Sum the rows of tables by one operation each, on a CPU: the replacement of each of these arrays.
int faststep_sum_rows(const void* const* arrays, size_t count, void** summed);
// On a CPU: operations of a trace that have kernels of our own are computed by these: the replacement of each of these arrays.
// `convolve` and `sgemm` may be null.
int faststep_own_kernels(
    const void* const* arrays,
    size_t count,
    void (*convolve)(const faststep::Convolution*),
    faststep::Sgemm sgemm,
    faststep::Share share,
    void** rewritten);
// Compute a product of few rows; false, and nothing is done, where this processor has no instructions for it.
bool faststep_few_rows(const faststep::MatrixProduct* product) noexcept;
// Return true if `faststep_small_product` computes products of m rows, n columns and k terms on this processor. Unless `b_turned`, it
// computes their transposes too.
bool faststep_is_small_product(size_t m, size_t n, size_t k, size_t b_turned) noexcept;
// Compute a small product; false, and nothing is done, where it is none.
bool faststep_small_product(const faststep::MatrixProduct* product) noexcept;
// Write the slices of gradients by one operation each, on a CPU: the replacement of each of these traced arrays.
int faststep_sum_slices(const void* const* arrays, size_t count, void** summed);
// A gradient that lies row after row, where it can be computed so; not applicable where it is as good as it is. `sgemm`: the function
// of this package that MLX calls for products, or null. `alone`: by that function, and a copy, where MLX's own operations would give
// other bits. `joins`: a sum of many products may be one, with other bits.
int faststep_straight(const void* gradient, faststep::Sgemm sgemm, int alone, int joins, void** straight);
// Let the kernels that compute these arrays take over their inputs; after an error too, the arrays can be evaluated.
int faststep_fuse(const void* const* arrays, size_t count);
// Put casts that fused kernels read into the kernels that compute these arrays.
int faststep_fuse_casts(const void* const* arrays, size_t count);
// Number the kernels that compute each of the arrays from those that are known: arrays of the same kernels share a number.
int faststep_kinds(
    const void* const* arrays, size_t count, const void* const* known, size_t known_count, size_t* kinds);

// The graph of a compiled trace, from inputs without values to outputs, to be made over others; how many outputs it has.
int faststep_tape_new(
    const void* const* inputs, size_t n_inputs, const void* const* outputs, size_t n_outputs, void** tape);
void faststep_tape_free(void* tape) noexcept;
size_t faststep_tape_size(const void* tape) noexcept;
// Its outputs over these inputs, of which those from known to known_end are known to have its inputs' shapes and dtypes; not
// applicable where MLX would trace anew, or not compile.
int faststep_tape_build(
    const void* tape, const void* const* inputs, size_t count, size_t known, size_t known_end, void** outputs);

// Call `work` as MLX calls a function that it differentiates: what is made meanwhile keeps its graph.
int faststep_in_tracing(void (*work)(void*), void* context);
// A lazy copy of an array, for a function to be called with in its place.
int faststep_tracer(const void* array, void** tracer);
// Return 1 if the value of the tracer has been read.
int faststep_tracer_is_read(const void* tracer) noexcept;
void faststep_tracers_end(const void* const* tracers, size_t n) noexcept;
// The gradients of the first output with respect to parameters whose tracers it has been computed from, one for each.
int faststep_differentiate(
    const void* const* parameters,
    const void* const* tracers,
    size_t n,
    const void* const* outputs,
    size_t n_outputs,
    void** gradients);
// Evaluate what somebody holds of the graph behind the roots and is computed from no tracer; in a step, such tracers too.
int faststep_call_settle(
    const void* const* tracers, size_t n_tracers, const void* const* roots, size_t n_roots, size_t results, int is_step);
// The graph of a call: from tracers to roots, of each of which the caller has one handle. So many `results`, the first roots, are
// outputs whoever holds them. Nothing may have been differentiated yet.
int faststep_call_graph_new(
    const void* const* tracers, size_t n_tracers, const void* const* roots, size_t n_roots, size_t results, void** graph);
// Add the gradients of the same call to its graph; the random key among the roots may be a later one.
int faststep_call_graph_add_gradients(
    void* graph,
    const void* const* tracers,
    size_t n_tracers,
    const void* const* roots,
    size_t n_roots,
    const void* const* gradients,
    size_t n_gradients);
// Keep a graph, without the arrays of its call.
void faststep_call_graph_keep(void* graph) noexcept;
void faststep_call_graph_free(void* graph) noexcept;
// Return done if another call has the same graph and nobody holds an array of it; else not applicable. Constants that differ are inputs
// from here on.
int faststep_call_graph_follow(
    void* graph, const void* const* tracers, size_t n_tracers, const void* const* roots, size_t n_roots);
// Compare with the graph of a call that is not kept; somebody may hold arrays of it.
int faststep_call_graph_equals(void* graph, const void* other);
// The number of roots (0), of arrays that somebody holds (1), of gradients (2), of inputs (3); whether Python makes gradients (4); the
// number of picks (5).
size_t faststep_call_graph_count(const void* graph, int of) noexcept;
// The inputs of the call that was compared last.
int faststep_call_graph_inputs(void* graph, void** inputs);
// Its arrays that are outputs because somebody holds them, or held them once.
int faststep_call_graph_held(void* graph, void** held);
// Roots, arrays that somebody holds, and gradients, over other arrays.
int faststep_call_graph_replay(
    const void* graph, const void* const* traced, size_t n_traced, const void* const* inputs, size_t n_inputs, void** outputs);
// Find where whole numbers of the batch, so many tracers from this one on, pick from an axis: labels of a cross entropy, rows of an
// embedding. To be called once.
int faststep_call_graph_find_picks(void* graph, size_t first, size_t count);
// The tracer of a pick, the length of the axis, and whether numbers below zero count from its end.
void faststep_call_graph_pick(const void* graph, size_t which, size_t* tracer, int64_t* length, int* from_end) noexcept;
// The least and the greatest number of each pick, int64 scalars, over these arrays of the batch, the first of which is that tracer.
int faststep_call_graph_extremes(const void* graph, const void* const* batch, size_t first, void** extremes);
// Let an array that is yet to be computed go of what it would be computed from.
void faststep_array_detach(const void* array) noexcept;
// Give such an array a value, which all who hold it see.
int faststep_array_fill(const void* array, const void* value);

// The number of operations from inputs to outputs.
size_t faststep_graph_size(
    const void* const* inputs, size_t n_inputs, const void* const* outputs, size_t n_outputs) noexcept;
// Have the operations behind the outputs read `to` in the place of `from`, of which `to` is made by one operation.
int faststep_graph_read_instead(
    const void* const* from, const void* const* to, size_t n, const void* const* outputs, size_t n_outputs);

// --- cpu/

// Arrays joined along their first axis. Not applicable where they do not agree, or the default device is no CPU.
int faststep_join(const void* const* parts, size_t count, void** joined);
// The same arrays, there when the CPU's worker has computed all that it has been handed: what they are made of is free then.
// Not applicable where they are small, or the default device is no CPU.
int faststep_wait(const void* const* arrays, size_t count, void** waited);
// The same array, there when the CPU's worker has come to where the one before was asked for. Not applicable where it is small, or
// the default device is no CPU.
int faststep_paced(const void* array, void** paced);
// The functions that stand for the scheduler's enqueue, wait_event and signal_event, wherever these are called. To be asked for before
// any of them is replaced.
void faststep_caller_functions(void** functions) noexcept;
// From here on the calling thread computes what it hands to the worker of its CPU stream, and `measures` how long that takes. Not
// applicable where the worker may be at work, where others use the stream, or where there is a GPU.
int faststep_caller_begin(int measures);
// Up to here; whether it has computed all of it, and the seconds that have been measured.
int faststep_caller_end(double* seconds) noexcept;
// From here on the memory in use is looked at wherever the calling thread hands a task to a worker.
void faststep_caller_watch() noexcept;
// Up to here; the most bytes that have been in use at once.
size_t faststep_caller_watched() noexcept;
// An array row after row. Not applicable where the default device is no CPU.
int faststep_contiguous(const void* array, void** contiguous);
// The sum of the squares of arrays, a float32 scalar. Not applicable to other arrays than float32 ones, and where the
// default device is no CPU.
int faststep_sum_of_squares(const void* const* arrays, size_t count, void** sum);
// Of gradients and a loss, by limits of the norm and of the loss: the norm, the factor that clips to it, whether both are finite and
// the loss is at most its limit, and whether not. Not applicable as above.
int faststep_checked(const void* const* gradients, size_t count, const void* loss, const float* limits, void** made);
// The mean of the squares of an array, a float32 scalar, or of each of its slices along the first axis, whose other axes are 1 then;
// and of the rows and of the columns of matrices, with the float32 scalar `eps` added to each square: two arrays. Not applicable to other arrays than
// float32 ones with elements, and where the default device is no CPU.
int faststep_mean_square(const void* array, int by_slice, void** mean);
int faststep_mean_squares(const void* array, const void* eps, void** means);
// Replace the products with quantized weights that arrays are computed from by such as Rust computes. Not applicable where
// `input`, from which they are computed, is no tracer of a compilation.
int faststep_dequantize(
    const void* input,
    const void* const* arrays,
    size_t count,
    size_t (*scratch)(const faststep::QuantizedProduct*),
    int (*run)(const faststep::QuantizedProduct*));
// Have fused kernels computed in blocks until they are compiled; false on a processor without the loops for that. `is_made`: whether a
// library that has been asked for is there.
bool faststep_blocks_begin(bool (*is_made)(uint64_t number)) noexcept;
// Let those that compute these arrays, and what they are made of, be such.
int faststep_blocks(const void* const* arrays, size_t count);
// The number of kernels that the calling thread has had computed in blocks, and that are compiled later.
size_t faststep_blocks_computed() noexcept;
// There is no compiler: all fused kernels are computed in blocks, for good. Returns the function to take the place of
// Compiled::eval_cpu.
void* faststep_blocks_alone() noexcept;
// Return whether MLX's compilation fuses operations: not without a compiler, nor after mx.disable_compile().
bool faststep_fuses() noexcept;
// What MLX calls the compiler for, on this thread; and the answer where it is refused, with the number of what has been asked for.
faststep::KernelCall faststep_kernel_call() noexcept;
void faststep_kernel_refused(uint64_t number) noexcept;
// The function to take the place of std::filesystem::temp_directory_path. `find` writes the path of a directory, with its
// NUL; false where there is none.
void* faststep_temp_directory_path(bool (*find)(char* path, size_t size)) noexcept;

// --- cuda/

// Return whether arrays are computed by CUDA unless told otherwise.
int faststep_is_cuda() noexcept;
// Have MLX ask for each fused kernel that lazy arrays are computed from, as if it were to run.
int faststep_ask_kernels(const void* const* arrays, size_t count);
// Parts of one dtype, which agree in all axes but the first, joined along it by one kernel, and the sums of squares of its
// tiles in float32.
int faststep_pack(const void* const* parts, size_t count, size_t slots, void** flat, void** squares);
// Sums of the squares of an array, a float32 vector. Not applicable where the default device is not CUDA, or MLX is as fast.
int faststep_squares(const void* array, void** squares);
// From sums of squares, float32 vectors, their root; the factor that brings it to a limit where it is larger; and whether it
// is finite, and a loss, a float32 scalar, is and is at most another limit: three scalars. Not applicable but on CUDA.
int faststep_norm(const void* const* squares, size_t count, const void* loss, const float* limits, void** made);
// On CUDA: products of odd dimensions of a lazy graph are padded for cuBLAS, and a cross entropy reads half precision itself:
// the replacement of each of these arrays.
int faststep_align(const void* const* arrays, size_t count, void** aligned);
// On CUDA: operations of a lazy graph that have kernels of our own are computed by these: the replacement of each of these
// arrays.
int faststep_kernels(const void* const* arrays, size_t count, void** rewritten);

// --- captures

// Return whether arrays are computed by a CPU unless told otherwise.
int faststep_is_cpu() noexcept;

// Exchanges of so many static arrays, on CUDA.
int faststep_replay_exchange_new(size_t count, void** exchange);
void faststep_replay_exchange_free(void* exchange) noexcept;
// Sums them over a group, in their memory, each as soon as the last launch has made it; what the gate lets through waits for
// that. Every rank has to sum as many arrays of the same sizes, in the same order: as they are given, or as a graph makes them.
int faststep_replay_exchange(
    const void* exchange, const void* group, const void* const* arrays, size_t count, int in_order, void* gate);
// The numbers of the arrays in that order; none before a graph has been recorded.
size_t faststep_replay_order(const void* exchange, const size_t** order) noexcept;
// Sums any arrays in the same way, once all that has been submitted is done: `own` are those of which this rank has the values; it
// gives zeros for the others.
int faststep_replay_gather(
    const void* exchange, const void* group, const void* const* arrays, size_t count, const bool* own, void* gate);
// A capture of what `results` and `from` are computed from, over arrays that are there; `into` are `n_carried` of those, and
// `fed` those that get other values before a launch; `inputs` are all whose values may be others then. `exchange`, or null: it is
// told when a launch has made each of `summed`.
int faststep_replay_new(
    const void* const* results,
    size_t n_results,
    const void* const* from,
    const void* const* into,
    size_t n_carried,
    const void* const* fed,
    size_t n_fed,
    const void* const* inputs,
    size_t n_inputs,
    const void* const* summed,
    size_t n_summed,
    const void* exchange,
    void** capture);
// How many others a recording needs.
size_t faststep_replay_learning_passes() noexcept;
// Record it once, when nobody else holds `from`. `learns` are so many others of the same graph, made anew, of no use any more
// then; `threads` of the host may run its units. The message of a failure says why it cannot be captured.
int faststep_replay_record(
    void* const* learns, size_t count, size_t threads, void* capture, faststep::CaptureInfo* info);
// Return whether the memory that it reads lies where it did.
int faststep_replay_is_valid(const void* capture) noexcept;
// Copies arrays into static ones and replays. `launched`: an array without a value, to wait for, then copies of results in their
// order: of those of at most 8 bytes, as far as there is room for them, or of all; `given` are. On a CPU the arrays have been
// evaluated, the gate is closed, and all is done when it returns: `run`, with its context, has the units run. Elsewhere the gate
// gets the event.
int faststep_replay_launch(
    void* capture,
    const void* const* from,
    const void* const* into,
    size_t count,
    void* gate,
    void (*run)(const void* context),
    const void* context,
    void** launched,
    size_t room,
    size_t* given);
// The number of units of a capture on a CPU (0 on CUDA); then the units that one of them depends on, all with lower numbers.
size_t faststep_replay_units(const void* capture) noexcept;
size_t faststep_replay_waits(const void* capture, size_t unit, const size_t** others) noexcept;
// Run a unit, within a launch, on any thread; return whether it has not failed.
int faststep_replay_run_unit(void* capture, size_t unit) noexcept;
// What copies of static arrays wait for. While it is closed, by one thread, nobody reads a static array on a CPU.
int faststep_replay_gate_new(void** gate);
void faststep_replay_gate_free(void* gate) noexcept;
void faststep_replay_gate_close(void* gate) noexcept;
void faststep_replay_gate_open(void* gate) noexcept;
// A lazy copy of a static array, which any thread may evaluate: behind the launch that is under way. `source`: what it is made of,
// which belongs to the caller; null where the device's queue keeps the order.
int faststep_replay_shown(const void* place, void* gate, void** shown, void** source);
// With the gate closed, before the static array is written over: the copy is of what is there now.
int faststep_replay_preserve(void* source);
// The same, and what is there now, in memory of its own.
int faststep_replay_value(void* source, void** value);
// Return whether the copy is not of what the static array will hold.
int faststep_replay_is_over(const void* source) noexcept;
void faststep_replay_source_free(void* source) noexcept;
// Make the stream of those copies the thread's default one; `index`: below 0, or that of the stream to go back to, and then
// that of the one before.
int faststep_replay_share_stream(int* index);
// Waits for an array that is not lazy.
int faststep_replay_wait(const void* array);
// Return whether such an array need not be waited for; false where that fails.
int faststep_replay_is_ready(const void* array) noexcept;
// Return whether arrays are those of these ids, and lazy, with at most so many holders; 0 holders: whatever they are.
int faststep_replay_untouched(
    const void* const* arrays, const size_t* ids, const size_t* holders, size_t count) noexcept;
// Copies arrays into static ones.
int faststep_replay_copy(const void* const* from, const void* const* into, size_t count);
// Return whether two arrays that have been evaluated have the same bits, row after row.
int faststep_replay_is_same(const void* array, const void* other, int* same);
// Return whether a lazy array gets memory of its own when it is computed, as far as its operation tells.
int faststep_replay_is_own(const void* array) noexcept;
// Arrays of at most 8 bytes get memory that no host touches, until it is called once more with what it has written.
int faststep_replay_scalars_apart(void** apart);
// Waits for it, and frees it.
void faststep_replay_free(void* capture) noexcept;

// --- simulator/

// Put the operations of a trace that makes these gradients in order; values are the same.
int faststep_order(const void* const* gradients, size_t count);
// The default device, and how much memory it has, in bytes, 0 where that is not known.
int faststep_simulator_device(faststep::simulator::Device* device, size_t* memory);
int faststep_simulator_new(const faststep::simulator::Device* device, void** simulator);
void faststep_simulator_delete(void* simulator) noexcept;
// The methods of `Simulator`.
int faststep_simulator_begin(
    void* simulator, const void* const* given, size_t n_given, const void* const* roots, size_t n_roots);
int faststep_simulator_hold(void* simulator, const void* const* arrays, size_t count, int handles);
int faststep_simulator_keep(void* simulator, size_t slot, const void* const* arrays, size_t count);
int faststep_simulator_evaluate(
    void* simulator, const void* const* arrays, size_t count, int one_by_one, size_t* until);
int faststep_simulator_carry(void* simulator, const void* input, const void* output);
void faststep_simulator_wait(void* simulator, size_t until) noexcept;
void faststep_simulator_limit(void* simulator, size_t bytes) noexcept;
void faststep_simulator_read(void* simulator, faststep::simulator::Reading* reading) noexcept;
// The memory of these arrays is of one kind, that of the operations before them without a kind of another.
int faststep_simulator_mark(void* simulator, size_t own, size_t before, const void* const* arrays, size_t count);
// Write down what is in use while each operation runs; what has been written down since.
void faststep_simulator_record(void* simulator) noexcept;
void faststep_simulator_recorded(void* simulator, const faststep::simulator::Held** held, size_t* count) noexcept;
}
