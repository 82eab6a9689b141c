// The autograd node of selection_attention for calls whose passes are recorded (backends/_replay.py): both passes start without Python's
// autograd.Function, checks and packing. What is not recorded, or may not be replayed, goes to Python: `attend` returns None, and a
// backward pass calls nsa_sel/core/run.py. All but the launches holds the GIL, which guards what passes share.
#include <ATen/Context.h>
#include <ATen/EmptyTensor.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <torch/csrc/Exceptions.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/utils/pybind.h>

#include <array>
#include <memory>
#include <set>
#include <string>
#include <tuple>
#include <vector>

using at::Tensor;
using torch::autograd::AutogradContext;
using torch::autograd::variable_list;
using Addresses = std::vector<uint64_t>;

constexpr size_t MOST_BYTES = 4096;  // of a kernel's arguments

struct Driver {  // the CUDA driver's functions by address, and what is asked of Python
  int (*launch)(const void* config, void* function, void** parameters, void** extra);  // cuLaunchKernelEx
  int (*fill)(uint64_t address, unsigned char value, size_t size, void* stream);       // cuMemsetD8Async
  int (*capturing)(void* stream, int* status);                                         // cuStreamIsCapturing
  uint64_t early;                                                                      // the attribute of an early start
  py::object stream_of, bind, blocked, count;
};
static Driver* driver;  // never freed: it holds Python objects, which outlive the interpreter otherwise
static long counts[2];  // passes that ran here: forward, backward

struct Config {  // CUlaunchConfig (cuda.h)
  std::array<uint32_t, 7> grid;
  uint64_t stream, attributes;
  uint32_t number;
};
static_assert(sizeof(Config) == 56);

// What a recording holds for, of one input.
struct Facts {
  bool given;
  at::ScalarType dtype{};
  std::vector<int64_t> sizes, strides;
  c10::DispatchKeySet keys;
  int64_t device = -1;

  explicit Facts(const Tensor& x) : given(x.defined()) {
    if (!given) return;
    dtype = x.scalar_type(), sizes = x.sizes().vec(), strides = x.strides().vec(), keys = backend_keys(x), device = x.get_device();
  }
  static c10::DispatchKeySet backend_keys(const Tensor& x) { return x.key_set() - c10::autograd_dispatch_keyset_with_ADInplaceOrView; }
  bool fit(const Tensor& x) const {
    if (!given || !x.defined()) return given == x.defined();
    return x.scalar_type() == dtype && backend_keys(x) == keys && x.get_device() == device && x.sizes() == sizes && x.strides() == strides;
  }
};

struct Pass;
using Argument = std::tuple<size_t, size_t, size_t>;  // its entry of the table, and where it is packed: offset, bytes
using Output = std::tuple<std::vector<int64_t>, std::vector<int64_t>, at::ScalarType>;
using Step = std::tuple<uint64_t, std::array<uint32_t, 7>, bool, std::vector<size_t>, std::vector<Argument>>;
using Plan = std::tuple<py::tuple, std::shared_ptr<Pass>, py::object>;  // key in the selection, how it is built, KeptPlan of a buffer

// A `Recording` of _replay.py, by the same names.
struct Pass {
  int device;
  std::vector<Facts> inputs;
  std::vector<Output> outputs;
  int64_t scratch;
  std::vector<Plan> plans;
  std::vector<std::pair<size_t, uint64_t>> offsets;
  std::vector<std::pair<size_t, py::object>> maps;
  std::vector<std::string> constants;
  std::vector<std::pair<size_t, size_t>> cleared;
  std::vector<Step> steps;
  py::object recording;  // held: its kernels stay loaded

  Tensor make(at::IntArrayRef sizes, at::IntArrayRef strides, at::ScalarType dtype) const {
    auto* allocator = c10::GetAllocator(device < 0 ? at::kCPU : at::kCUDA);
    c10::DispatchKeySet keys(device < 0 ? c10::DispatchKey::CPU : c10::DispatchKey::CUDA);
    return at::detail::empty_strided_generic(sizes, strides, allocator, keys, dtype);
  }

  // The addresses of inputs as the recording takes them; nothing if it does not.
  Addresses addresses(const variable_list& given) const {
    Addresses found;
    uint64_t bits = 0;
    for (size_t i = 0; i < inputs.size(); ++i) {
      if (!inputs[i].fit(given[i])) return {};
      found.push_back(given[i].defined() ? reinterpret_cast<uint64_t>(given[i].data_ptr()) : 0);
      bits |= found.back();
    }
    return bits & 15 ? Addresses() : found;
  }

  // Whether this thread may replay now, and in which stream.
  bool ready(void** stream) const {
    using c10::impl::tls_is_dispatch_key_included;
    if (at::globalContext().deterministicAlgorithms() || driver->blocked().cast<bool>()) return false;
    if (tls_is_dispatch_key_included(c10::DispatchKey::FuncTorchDynamicLayerFrontMode)) return false;
    *stream = reinterpret_cast<void*>(driver->stream_of(device).cast<uint64_t>());
    if (device < 0) return true;
    int status = 0;
    if (c10::impl::VirtualGuardImpl(at::kCUDA).getDevice().index() != device) return false;
    if (driver->capturing(*stream, &status) || status) return false;
    static thread_local std::set<int> bound;
    if (bound.insert(device).second) driver->bind(device);
    return true;
  }

  // `_play` of _replay.py: the results of the pass; none if the driver refuses a launch, or memory is short.
  variable_list play(Addresses table, const py::object& selection, void* stream) const try {
    variable_list results;
    std::vector<py::object> held;  // until all kernels are queued
    const Addresses first(table.begin(), table.begin() + 4);
    for (const auto& [sizes, strides, dtype] : outputs) {
      results.push_back(make(sizes, strides, dtype));
      table.push_back(reinterpret_cast<uint64_t>(results.back().data_ptr()));
    }
    Tensor temporaries;
    if (scratch) temporaries = make({scratch}, {1}, at::kByte);
    table.push_back(scratch ? reinterpret_cast<uint64_t>(temporaries.data_ptr()) : 0);
    for (const auto& [key, pass, kept_plan] : plans) {
      py::object on = device < 0 ? py::object(key) : py::object(key + py::make_tuple(reinterpret_cast<uint64_t>(stream)));
      py::object kept = selection.attr("kept")(on);
      if (kept.is_none()) {
        variable_list buffer = pass->play(first, selection, stream);
        if (buffer.empty()) return {};
        kept = kept_plan(buffer[0]);
        selection.attr("keep")(on, kept);
      }
      for (py::handle address : kept.attr("addresses")) table.push_back(address.cast<uint64_t>());
      held.push_back(std::move(kept));
    }
    for (const auto& [entry, offset] : offsets) table.push_back(table[entry] + offset);
    const size_t addressed = table.size();  // what follows points to bytes
    for (const auto& [entry, encode] : maps) {
      held.push_back(encode(table[entry]));
      if (held.back().is_none()) return {};
      table.push_back(reinterpret_cast<uint64_t>(PyBytes_AS_STRING(held.back().ptr())));
    }
    for (const auto& bytes : constants) table.push_back(reinterpret_cast<uint64_t>(bytes.data()));
    py::gil_scoped_release unlocked;  // the driver waits where a stream's queue is full
    for (const auto& [entry, size] : cleared)
      if (driver->fill(table[entry], 0, size, stream)) return {};
    alignas(64) char packed[MOST_BYTES];
    std::vector<void*> list;
    for (const auto& [function, grid, early, parameters, arguments] : steps) {
      for (const auto& [entry, offset, size] : arguments)
        memcpy(packed + offset, entry < addressed ? static_cast<const void*>(&table[entry]) : reinterpret_cast<void*>(table[entry]), size);
      list.clear();
      for (size_t offset : parameters) list.push_back(packed + offset);
      const Config config{grid, reinterpret_cast<uint64_t>(stream), early ? driver->early : 0, early};
      if (driver->launch(&config, reinterpret_cast<void*>(function), list.data(), nullptr)) return {};
    }
    return results;
  } catch (const c10::OutOfMemoryError&) {  // Python's path says what to do
    return {};
  }
};

// What a backward pass has beside autograd's saved tensors.
struct State : torch::CustomClassHolder {
  struct Python {
    py::object selection, exact;  // exact: what is known of its lengths
    py::object run_backward;      // of tensors, where no pass of C++ fits
    py::list passes;
    py::object name;  // of the backend
  };
  Tensor ranges;  // disjoint
  std::unique_ptr<Python> python;

  State(Tensor ranges, Python given) : ranges(std::move(ranges)), python(new Python(std::move(given))) {}
  ~State() override {  // on any thread
    if (Py_IsInitialized()) {
      py::gil_scoped_acquire gil;
      python.reset();
    } else {
      python.release();
    }
  }

  variable_list replayed(const variable_list& saved, const variable_list& given) const {
    const auto& [selection, exact, run_backward, passes, name] = *python;
    if (c10::GradMode::is_enabled() || !given[0].defined() || selection.attr("_exact").ptr() != exact.ptr()) return {};
    const variable_list inputs{saved[0], saved[1], saved[2], ranges, saved[3], saved[4], given[0], given[1]};
    for (py::handle x : passes) {
      const auto& pass = x.cast<const Pass&>();
      Addresses addresses = pass.addresses(inputs);
      void* stream;
      if (addresses.empty()) continue;
      if (!pass.ready(&stream)) return {};
      variable_list found = pass.play(std::move(addresses), selection, stream);
      if (found.empty()) return {};
      ++counts[1];
      driver->count("backward", name);
      return found;
    }
    return {};
  }
};

struct SelectionAttention : torch::autograd::Function<SelectionAttention> {
  struct Forward {
    c10::intrusive_ptr<State> state;
    Tensor written;  // the selection's ranges, saved so that autograd notices in-place writes
    variable_list results;
    bool with_lse;
  };

  static variable_list forward(AutogradContext* ctx, const Tensor& q, const Tensor& k, const Tensor& v, Forward* made) {
    const auto& results = made->results;
    ctx->save_for_backward({q, k, v, results[0], results[1], made->written});
    ctx->saved_data["state"] = c10::IValue::make_capsule(made->state);
    ctx->set_materialize_grads(false);
    return made->with_lse ? results : variable_list{results[0]};
  }

  static variable_list backward(AutogradContext* ctx, variable_list given) {
    variable_list saved = ctx->get_saved_variables();
    auto state = c10::static_intrusive_pointer_cast<State>(ctx->saved_data["state"].toCapsule());
    given.resize(2);
    py::gil_scoped_acquire gil;
    try {
      variable_list found = state->replayed(saved, given);
      if (found.empty())
        for (py::handle x : state->python->run_backward(saved[0], saved[1], saved[2], saved[3], saved[4], given[0], given[1]))
          found.push_back(x.is_none() ? Tensor() : x.cast<Tensor>());
      found.emplace_back();
      return found;
    } catch (py::error_already_set& error) {  // as the engine takes errors of Python from its threads
      error.restore();
      python_error kept;
      kept.persist();
      throw kept;
    }
  }
};

// o, or (o, lse), with their node; None where Python has to run the call.
static py::object attend(
    const Pass& pass, const py::list& backward, const Tensor& q, const Tensor& k, const Tensor& v, const py::object& selection,
    const py::object& run_backward, const py::object& name, bool with_lse) {
  void* stream;
  if (!pass.ready(&stream)) return py::none();
  auto ranges = selection.attr("disjoint_ranges")(false).cast<Tensor>();  // no graph captures the call
  Addresses addresses = pass.addresses({q, k, v, ranges});
  if (addresses.empty()) return py::none();
  SelectionAttention::Forward made;
  made.results = pass.play(std::move(addresses), selection, stream);
  if (made.results.empty()) return py::none();
  ++counts[0];
  State::Python python{selection, selection.attr("_exact"), run_backward, backward, name};
  made.state = c10::make_intrusive<State>(ranges, std::move(python));
  made.written = selection.attr("ranges").cast<Tensor>();
  made.with_lse = with_lse;
  variable_list found = SelectionAttention::apply(q, k, v, &made);
  return with_lse ? py::object(py::make_tuple(found[0], found[1])) : py::cast(found[0]);
}

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  py::class_<Pass, std::shared_ptr<Pass>>(m, "Pass").def(py::init([](int device, const std::vector<std::optional<Tensor>>& inputs,
      std::vector<Output> outputs, int64_t scratch, std::vector<Plan> plans, std::vector<std::pair<size_t, uint64_t>> offsets,
      std::vector<std::pair<size_t, py::object>> maps, const std::vector<py::bytes>& constants,
      std::vector<std::pair<size_t, size_t>> cleared, std::vector<Step> steps, py::object recording) {
    std::vector<Facts> facts;
    for (const auto& x : inputs) facts.emplace_back(x.value_or(Tensor()));
    return std::make_shared<Pass>(Pass{device, std::move(facts), std::move(outputs), scratch, std::move(plans), std::move(offsets),
        std::move(maps), {constants.begin(), constants.end()}, std::move(cleared), std::move(steps), std::move(recording)});
  }));
  m.def("attend", &attend);
  m.def("counts", [] { return std::make_pair(counts[0], counts[1]); });
  m.def("configure", [](uint64_t launch, uint64_t fill, uint64_t capturing, uint64_t early, py::object stream_of, py::object bind,
                         py::object blocked, py::object count) {
    driver = new Driver{reinterpret_cast<decltype(Driver::launch)>(launch), reinterpret_cast<decltype(Driver::fill)>(fill),
        reinterpret_cast<decltype(Driver::capturing)>(capturing), early, std::move(stream_of), std::move(bind), std::move(blocked),
        std::move(count)};
  });
}
