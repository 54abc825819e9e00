// zero::plan for modules of Python's torch, whose forward passes are functions of Python.
//
// Note [Traces from Python]
// A trace runs on the thread that asked for it, without the GIL, as the rest of libzero does. It
// takes the GIL for the module's functions alone: those that give parameters without memory,
// compute the loss, and bring the module back. Their tensors are made on meta, as those of C++ are
// (Note [Traces] in zero/planner/trace.h); Note [Kernels of Python] in trace.cpp says what is
// different.
#include <torch/csrc/autograd/python_variable.h>

#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "binding.h"
#include "zero/base/error.h"
#include "zero/config/config.h"
#include "zero/planner/answer_json.h"
#include "zero/planner/answer_text.h"
#include "zero/planner/here.h"
#include "zero/planner/planner.h"

namespace zero::python {

namespace {

using Named = std::vector<std::pair<std::string, at::Tensor>>;

/// Returns the message of the exception that is being handled. Those that are no RuntimeErrors of
/// Python go on: Ctrl-C, and the one by which torch's checkpoint ends a recomputation.
std::string reason() {
  try {
    throw;
  } catch (python_error& error) {
    error.persist();
    const py::gil_scoped_acquire gil;
    if (PyErr_GivenExceptionMatches(error.type, PyExc_RuntimeError) == 0) throw;
    return error.what();
  } catch (const std::exception& error) {
    return error.what();
  }
}

/// A module whose parameters have no memory, as long as this lives: an object with `parameters` and
/// `buffers` (names and tensors), `loss()` and `close()`.
class WithoutMemory {
 public:
  /// Needs the GIL, as all functions but the destructor do.
  explicit WithoutMemory(py::object module) : module_(std::move(module)) {}
  WithoutMemory(const WithoutMemory&) = delete;
  WithoutMemory& operator=(const WithoutMemory&) = delete;
  // Only an interpreter that has ended could throw here.
  ~WithoutMemory() {  // NOLINT(bugprone-exception-escape)
    const py::gil_scoped_acquire gil;
    const py::error_scope under_way;  // an exception that is being thrown
    try {
      module_.attr("close")();
    } catch (py::error_already_set& error) {
      error.discard_as_unraisable("libzero.plan");
    }
    module_ = py::object();
  }
  Named list(const char* what) const { return module_.attr(what).cast<Named>(); }
  at::Tensor loss() const {
    const py::object value = module_.attr("loss")();
    if (!THPVariable_Check(value.ptr()))
      throw ConfigError("The function of the loss returned no tensor; it must return the loss.");
    return value.cast<at::Tensor>();
  }

 private:
  py::object module_;
};

plan::Trace trace(const py::function& module, int64_t batch, int64_t recompute,
                  plan::TraceOptions options) {
  options.reason = &reason;
  plan::Tracing tracing(options);
  NamedTensors tensors;
  tensors.rethrow = &rethrow_for_python;
  std::unique_ptr<WithoutMemory> without;
  {
    const py::gil_scoped_acquire gil;
    without = std::make_unique<WithoutMemory>(module(
        batch, recompute > 0, options.host, options.autocast.has_value(), options.casts_dropped));
    tensors.parameters = without->list("parameters");
    tensors.buffers = without->list("buffers");
  }
  tracing.begin(tensors);
  return tracing.run([&] {
    const py::gil_scoped_acquire gil;
    return without->loss();
  });
}

struct Asked {
  int64_t batch, sequence;
  std::string dtype, optimizer;
  std::string cluster;  ///< JSON; empty: this machine
  int64_t ranks_here;
  int64_t most_micro_batch, least_micro_batch;
  bool recomputes;
  std::string name;
  std::vector<std::string> updates;
  std::string autocast;               ///< empty: none
  std::pair<int64_t, int64_t> scale;  ///< ranks, from and to; 0: no other clusters
  double tokens, price;               ///< 0: none
};

struct Answered {
  std::string answer, cluster, text;
  std::string training;            ///< JSON; empty: nobody asked, or nothing fits
  std::vector<std::string> scale;  ///< JSON
};

Answered answer(const py::function& module, const Asked& asked) {
  plan::Question question;
  question.trace = [&](int64_t batch, int64_t recompute, const plan::TraceOptions& options) {
    return trace(module, batch, recompute, options);
  };
  question.global_batch = asked.batch;
  question.sequence = asked.sequence;
  question.bf16 = asked.dtype == "bf16";
  if (!asked.autocast.empty())
    question.autocast = asked.autocast == "bf16" ? at::kBFloat16 : at::kHalf;
  question.cluster = asked.cluster.empty()
                         ? plan::measured_here(asked.ranks_here)
                         : plan::cluster_from_json(asked.cluster, "of libzero.plan");
  question.optimizer = *Config::parse(asked.optimizer, 1, "libzero.plan").optimizer;
  question.most_micro_batch = asked.most_micro_batch;
  question.least_micro_batch = asked.least_micro_batch;
  question.recomputes = asked.recomputes;
  for (const auto& updates : asked.updates)
    question.updates.push_back(plan::updates_named(updates));
  const auto [first, last] = asked.scale;
  if (first > 0) (void)plan::scaled(question.cluster, first, last);  // before time is spent
  constexpr size_t kRows = 8;
  const auto found = plan::plan(question);
  const plan::TrainingOf training_of = [&](const plan::Candidate& c) {
    return asked.tokens > 0 && c.fits()
               ? std::optional(plan::Training{.tokens = asked.tokens,
                                              .tokens_per_second = c.tokens_per_second,
                                              .devices = c.ranks,
                                              .price = asked.price})
               : std::nullopt;
  };
  Answered answered{
      .answer = plan::to_json(found),
      .cluster = plan::to_json(question.cluster),
      .text = plan::title(asked.name, question, found) + "\n\n" + plan::to_text(found, kRows),
      .training = {},
      .scale = {}};
  if (const auto training = training_of(found.best())) {
    answered.text += plan::training_text(*training, /*failures=*/false);
    answered.training = plan::to_json(*training);
  }
  if (first > 0) {
    const auto points = plan::scale(question, first, last);
    answered.text += "\n" + plan::scale_text(points, training_of);
    for (const auto& point : points)
      answered.scale.push_back(plan::to_json(point, training_of(point.best)));
  }
  return answered;
}

}  // namespace

void bind_plan(py::module_& module) {
  module.def("plan", [](const py::function& traced, const std::string& name, int64_t batch,
                        int64_t sequence, const std::string& dtype, const std::string& optimizer,
                        const std::string& cluster, int64_t ranks_here, int64_t most_micro_batch,
                        int64_t least_micro_batch, bool recomputes,
                        const std::vector<std::string>& updates, const std::string& autocast,
                        const std::pair<int64_t, int64_t>& scale, double tokens, double price) {
    const auto found = released([&] {
      return answer(traced,
                    {batch, sequence, dtype, optimizer, cluster, ranks_here, most_micro_batch,
                     least_micro_batch, recomputes, name, updates, autocast, scale, tokens, price});
    });
    return py::make_tuple(found.answer, found.cluster, found.text, found.training, found.scale);
  });
}

}  // namespace zero::python
