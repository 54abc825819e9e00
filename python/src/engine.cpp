// zero::Engine over tensors that Python's torch has made.
#include "zero/engine/engine.h"

#include <c10/core/StorageImpl.h>

#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "binding.h"
#include "zero/base/error.h"
#include "zero/config/settings.h"
#include "zero/engine/gathered.h"
#include "zero/engine/pretrained.h"
#include "zero/optim/schedule.h"
#include "zero/paging/pager.h"

namespace zero::python {

namespace {

using Named = std::vector<std::pair<std::string, at::Tensor>>;
/// Names of parameters, and a configuration's `optimizer` section as JSON text.
using Groups = std::vector<std::pair<std::vector<std::string>, std::string>>;

Optimizer optimizer_of(const std::string& section) {
  return *Config::parse("{\"optimizer\": " + section + "}", 1).optimizer;
}

struct PySchedule {
  optim::Schedule value;
};

/// A configuration, read once.
struct PyConfiguration {
  PyConfiguration(const std::string& text, int ranks, bool lenient, const std::string& origin) {
    ReadOptions options;
    options.lenient = lenient;
    options.warn = [&](std::string_view warning) { warnings.emplace_back(warning); };
    settings = Settings::parse(text, ranks, origin, options);
  }
  /// Makes the schedule of the `scheduler` section for an optimizer of this rate; null without one.
  std::unique_ptr<PySchedule> schedule(double lr) const {
    if (!settings.scheduler) return nullptr;
    return std::make_unique<PySchedule>(
        PySchedule{optim::complete(*settings.scheduler, optim::RunLength{.lr = lr})});
  }

  Settings settings;
  std::vector<std::string> warnings;
};

class PyEngine {
 public:
  PyEngine(Named parameters, Named buffers, const py::function& again, const Groups& groups,
           const PyConfiguration& configuration, const std::shared_ptr<comm::Group>& group,
           bool values_follow) {
    NamedTensors tensors{std::move(parameters), std::move(buffers), lister(again),
                         &rethrow_for_python, values_follow};
    released([&] {
      const auto& settings = configuration.settings.engine;
      std::vector<ParameterGroup> made;
      for (const auto& [names, section] : groups)
        made.push_back({.names = names, .optimizer = optimizer_of(section)});
      if (made.empty()) made.push_back({.optimizer = settings.optimizer.value(), .rest = true});
      try {
        engine_ = std::make_unique<Engine>(tensors, std::move(made), settings, group);
      } catch (...) {
        tell_in_python(tensors);
        throw;
      }
    });
    tell_in_python(tensors);
    for (const auto& [name, tensor] : tensors.parameters)
      storages_.push_back(tensor.unsafeGetTensorImpl()->unsafe_storage().getWeakStorageImpl());
  }
  PyEngine(const PyEngine&) = delete;
  PyEngine& operator=(const PyEngine&) = delete;
  /// Meets nobody: the interpreter may end while other ranks have failed. `close` is the place to
  /// meet.
  ~PyEngine() {
    unraisable([&] { close(); });
  }

  Engine& get() const {
    if (!engine_) {
      throw Error(
          "This optimizer was closed (close(), or the end of its `with` block): its states are "
          "gone.");
    }
    return *engine_;
  }
  bool open() const { return engine_ != nullptr; }
  void close() {
    if (!engine_) return;
    reset_released(engine_);
    for (auto& weak : storages_) {
      if (const auto storage = weak.lock(); storage.defined()) tell_in_python(*storage);
    }
    storages_.clear();
  }

 private:
  // Sets the message that an access to absent bytes raises.
  static void tell_in_python(c10::StorageImpl& storage) {
    auto& message = storage.get_extra_meta().custom_data_ptr_error_msg_;
    if (message) message = python_text(*message);
  }
  static void tell_in_python(const NamedTensors& tensors) {
    for (const auto& [name, tensor] : tensors.parameters)
      tell_in_python(*tensor.unsafeGetTensorImpl()->unsafe_storage().unsafeGetStorageImpl());
  }

  // `again` lists the module's parameters as they are now, or returns None once it is gone.
  static std::function<NamedTensors()> lister(const py::function& again) {
    // Dropped where the engine ends, without the GIL.
    const std::shared_ptr<py::function> held(new py::function(again), [](py::function* function) {
      const py::gil_scoped_acquire gil;
      delete function;
    });
    return [held]() -> NamedTensors {
      const py::gil_scoped_acquire gil;
      const py::object list = (*held)();
      if (list.is_none()) return {};
      return {list.cast<Named>(), {}};
    };
  }

  std::unique_ptr<Engine> engine_;
  std::vector<c10::weak_intrusive_ptr<c10::StorageImpl>> storages_;
};

struct PyGathered {
  std::unique_ptr<Gathered> scope;
  ~PyGathered() {
    if (scope) unraisable([&] { reset_released(scope); });
  }
};

py::dict dict_of(const StepResult& result) {
  py::dict all;
  all["boundary"] = result.boundary;
  all["updated"] = result.updated;
  all["grad_norm"] = result.grad_norm;
  all["step"] = result.step;
  all["loss_scale"] = result.loss_scale;
  return all;
}

py::dict dict_of(const TrafficFormula& formula) {
  py::dict all;
  all["all_gather"] = formula.all_gather;
  all["reduce_scatter"] = formula.reduce_scatter;
  all["all_reduce"] = formula.all_reduce;
  all["all_gather_link"] = formula.all_gather_link;
  all["reduce_scatter_link"] = formula.reduce_scatter_link;
  all["all_reduce_link"] = formula.all_reduce_link;
  all["disk_read"] = formula.disk_read;
  all["disk_written"] = formula.disk_written;
  return all;
}

py::dict dict_of(const partition::LayoutMemory& memory) {
  py::dict all;
  all["parameters"] = memory.parameters;
  all["gradients"] = memory.gradients;
  all["optimizer"] = memory.optimizer;
  return all;
}

py::object pager_of(PyEngine& self) {
  const auto* pager = self.get().pager();
  if (pager == nullptr) return py::none();
  const auto counts = pager->counts();
  py::dict all;
  all["touches"] = counts.touches;
  all["gathers"] = counts.gathers;
  all["live_bytes"] = pager->live_bytes();
  return all;
}

std::unique_ptr<PyGathered> gathered(PyEngine& self, const std::vector<at::Tensor>& parameters,
                                     bool write, std::optional<int> modifier_rank) {
  auto made = std::make_unique<PyGathered>();
  released([&] {
    made->scope = std::make_unique<Gathered>(
        self.get(), parameters, write ? Gathered::Access::write : Gathered::Access::read,
        modifier_rank);
  });
  return made;
}

void visit(PyEngine& self, const py::function& function) {
  released([&] {
    self.get().visit_parameters([&](const std::string& name, const at::Tensor& value) {
      const py::gil_scoped_acquire gil;
      function(name, value);
    });
  });
}

/// A function of the engine's that may wait for other ranks.
template <class Result, class... Arguments>
auto waiting(Result (Engine::*function)(Arguments...)) {
  return [function](PyEngine& self, Arguments... arguments) -> Result {
    return released([&] { return (self.get().*function)(arguments...); });
  };
}

}  // namespace

void bind_engine(py::module_& module) {
  py::class_<PySchedule>(module, "Schedule")
      .def("rate",
           [](const PySchedule& self, int64_t step) { return optim::rate(self.value, step); })
      .def("betas",
           [](const PySchedule& self, int64_t step) -> std::optional<std::pair<double, double>> {
             const auto betas = optim::betas(self.value, step);
             if (!betas) return {};
             return std::pair{betas->beta1, betas->beta2};
           });
  py::class_<PyConfiguration>(module, "Configuration")
      .def(py::init<const std::string&, int, bool, const std::string&>(), py::arg("text"),
           py::arg("ranks"), py::arg("lenient"), py::arg("origin"))
      .def_readonly("warnings", &PyConfiguration::warnings)
      .def("dump", [](const PyConfiguration& self) { return self.settings.dump(); })
      .def("schedule", &PyConfiguration::schedule, py::arg("lr"));
  py::class_<PyGathered>(module, "Gathered").def("close", [](PyGathered& self) {
    released([&] {
      if (self.scope) self.scope->close();
      self.scope.reset();
    });
  });
  py::class_<PyEngine>(module, "Engine")
      .def(py::init<Named, Named, const py::function&, const Groups&, const PyConfiguration&,
                    const std::shared_ptr<comm::Group>&, bool>(),
           py::arg("parameters"), py::arg("buffers"), py::arg("again"), py::arg("groups"),
           py::arg("configuration"), py::arg("group"), py::arg("values_follow") = false)
      .def_property_readonly("open", &PyEngine::open)
      .def("close", &PyEngine::close)
      .def("backward", waiting(&Engine::backward))
      .def("scale", waiting(&Engine::scale))
      .def("rehook", [](PyEngine& self) { self.get().rehook(); })
      .def("step",
           [](PyEngine& self) { return dict_of(released([&] { return self.get().step(); })); })
      .def_property_readonly("passed", [](PyEngine& self) { return self.get().passed(); })
      .def_property_readonly("micro_batches",
                             [](PyEngine& self) { return self.get().micro_batches(); })
      .def("drop_gradients", waiting(&Engine::drop_gradients))
      .def("complete_update", waiting(&Engine::complete_update))
      .def("optimizer_eval", waiting(&Engine::optimizer_eval))
      .def("optimizer_train", waiting(&Engine::optimizer_train))
      .def("set_lr", [](PyEngine& self, double lr, size_t index) { self.get().set_lr(lr, index); })
      .def("lr", [](PyEngine& self, size_t index) { return self.get().lr(index); })
      .def("set_optimizer",
           [](PyEngine& self, const std::string& section, size_t index) {
             self.get().set_optimizer(optimizer_of(section), index);
           })
      .def("set_gradient_clipping",
           [](PyEngine& self, double norm) { self.get().set_gradient_clipping(norm); })
      .def("group_norms", waiting(&Engine::group_norms))
      .def("set_buffer_policy",
           [](PyEngine& self, const std::string& policy) {
             if (policy != "per_rank" && policy != "rank_0" && policy != "average") {
               throw ConfigError("The policy of buffers is \"" + policy +
                                 "\"; it must be \"per_rank\", \"rank_0\" or \"average\".");
             }
             self.get().set_buffer_policy(policy == "rank_0"    ? BufferPolicy::rank_0
                                          : policy == "average" ? BufferPolicy::average
                                                                : BufferPolicy::per_rank);
           })
      .def("parameter", waiting(&Engine::parameter))
      .def("set_parameter", waiting(&Engine::set_parameter))
      .def("gradient",
           [](PyEngine& self, std::string_view name) -> std::optional<at::Tensor> {
             auto gradient = released([&] { return self.get().gradient(name); });
             if (!gradient.defined()) return {};
             return gradient;
           })
      .def("set_gradient",
           [](PyEngine& self, std::string_view name, const std::optional<at::Tensor>& value) {
             released([&] { self.get().set_gradient(name, value.value_or(at::Tensor())); });
           })
      .def("gradients_present", waiting(&Engine::gradients_present))
      .def("gradients_used", [](PyEngine& self) { return self.get().gradients_used(); })
      .def("optimizer_state", waiting(&Engine::optimizer_state))
      .def("set_optimizer_state", waiting(&Engine::set_optimizer_state))
      .def("parameter_steps",
           [](PyEngine& self, std::string_view name) { return self.get().parameter_steps(name); })
      .def("set_parameter_steps", waiting(&Engine::set_parameter_steps))
      .def("visit_parameters", &visit)
      .def("gathered", &gathered, py::arg("parameters"), py::arg("write"), py::arg("modifier_rank"),
           py::keep_alive<0, 1>())
      .def(
          "save",
          [](PyEngine& self, const std::string& folder, const Attached& attached, bool background,
             int64_t staging_bytes) {
            released([&] { self.get().save(folder, attached, {background, staging_bytes}); });
          },
          py::arg("folder"), py::arg("attached") = Attached(), py::arg("background") = false,
          py::arg("staging_bytes") = SaveOptions().staging_bytes)
      .def("complete_save", waiting(&Engine::complete_save))
      .def("load", waiting(&Engine::load))
      .def("save_full", waiting(&Engine::save_full))
      .def("load_full", waiting(&Engine::load_full))
      .def("load_weights", waiting(&Engine::load_weights))
      .def("load_pretrained",
           [](PyEngine& self, const std::string& path) {
             const auto report = released([&] { return load_pretrained(self.get(), path); });
             return std::make_pair(report.left_over, report.kept_buffers);
           })
      .def("diverged_parameters",
           [](PyEngine& self) {
             const auto found = released([&] { return self.get().diverged_parameters(); });
             std::vector<std::string> names;
             for (const auto& each : found) names.push_back(each.parameter);
             return names;
           })
      .def_property_readonly("config", [](PyEngine& self) { return self.get().config().dump(); })
      .def_property_readonly("steps", [](PyEngine& self) { return self.get().steps(); })
      .def_property_readonly("loss_scale", [](PyEngine& self) { return self.get().loss_scale(); })
      .def_property_readonly("parameter_count",
                             [](PyEngine& self) { return self.get().parameter_count(); })
      .def_property_readonly("parameter_names",
                             [](PyEngine& self) { return self.get().parameter_names(); })
      .def("memory_formula", [](PyEngine& self) { return dict_of(self.get().memory_formula()); })
      .def("host_memory_formula",
           [](PyEngine& self) { return dict_of(self.get().host_memory_formula()); })
      .def(
          "traffic_formula",
          [](PyEngine& self, bool updated) { return dict_of(self.get().traffic_formula(updated)); },
          py::arg("updated") = true)
      .def("pager", &pager_of);
}

}  // namespace zero::python
