// Errors as Python sees them: their types, and messages that name Python's functions.
#include <array>
#include <exception>
#include <string>
#include <string_view>
#include <utility>

#include "binding.h"
#include "zero/base/error.h"
#include "zero/base/not_finite.h"

namespace zero::python {

namespace {

using Pair = std::pair<std::string_view, std::string_view>;

// Tried in this order at each place of a message: longer phrases come before those that they hold.
constexpr std::array kNames{
    Pair{"Name it in one, add one that takes the rest (ParameterGroup::rest), or freeze it",
         "Add it to one of the optimizer's, or freeze it"},
    Pair{"belongs to another Engine that still lives", "belongs to another optimizer that is open"},
    Pair{"each Engine trains parameters of its own. Give one Engine a module",
         "each optimizer has parameters of its own. Give libzero.shard a module"},
    Pair{"end the other Engine first", "close the other optimizer first"},
    Pair{"zero::Gathered", "libzero.gathered"},
    Pair{"zero::BuildOnDisk", "libzero.init"},
    Pair{"zero::Init", "libzero.init"},
    Pair{"zero::init", "libzero.group"},
    Pair{"zero::Autocast", "torch.autocast"},
    Pair{"torch::optim::Optimizer", "torch.optim.Optimizer"},
    Pair{"zero::ZeroRedundancyOptimizer", "libzero.shard with native=False"},
    Pair{"zero::AdamW{} to the constructor", "a torch.optim.AdamW to libzero.shard"},
    Pair{"comm::Group::broadcast", "libzero.group().broadcast(values, rank)"},
    Pair{"Engine::visit_parameters, Engine::save_full", "opt.full_state_dict(), opt.save_full"},
    Pair{"Engine::visit_parameters", "opt.full_state_dict()"},
    Pair{"Engine::step", "opt.step()"},
    Pair{"Engine::zero_grad", "opt.zero_grad()"},
    Pair{"Engine::backward", "backward"},
    Pair{"Engine::optimizer_", "opt."},
    Pair{"Engine::", "opt."},
    Pair{"engine.backward", "opt.backward"},
    Pair{"engine.scale", "opt.scale"},
    Pair{"set_data(p.clone())", "p.data = p.clone()"},
    Pair{"(set_data, Module::to)", "(p.data = t, model.to)"},
    Pair{"(set_data)", "(p.data = t)"},
    Pair{"under NoGradGuard or InferenceMode", "under torch.no_grad or torch.inference_mode"},
    Pair{"by an Engine whose constructor failed", "by a libzero.shard that failed"},
    Pair{"by an Engine that no longer exists", "by an optimizer that was closed or is gone"},
    Pair{"with an Engine that sharded it (ZeRO stage 3) and no longer exists",
         "with an optimizer of stage 3 that was closed or is gone"},
    Pair{"before the Engine ends", "before opt.close()"},
    Pair{"belongs to an Engine that still lives and shards it",
         "belongs to an optimizer of libzero.shard that is open and shards it"},
    Pair{"end that Engine", "close that optimizer"},
    Pair{"The model of this Engine was taken over by another Engine, constructed after it",
         "The model of this optimizer was given to libzero.shard again"},
    Pair{"The model was given to another Engine", "The model was given to libzero.shard again"},
    Pair{"of its Engine", "of its optimizer"},
    Pair{"the start of another Engine", "another libzero.shard"},
    Pair{"this one can only be destroyed", "this one can only be closed"},
    Pair{"after the Engine took it over, so the Engine would train",
         "after libzero.shard took it over, so opt would train"},
    Pair{"after the Engine took it over", "after libzero.shard took it over"},
    Pair{"after the Engine was constructed", "after libzero.shard"},
    Pair{"when the Engine was constructed", "at libzero.shard"},
    Pair{"when the Engine was made", "at libzero.shard"},
    Pair{"before constructing the Engine", "before libzero.shard"},
    Pair{"construct the Engine", "call libzero.shard"},
    Pair{"Construct a new Engine", "Call libzero.shard again"},
    Pair{"construct a new Engine", "call libzero.shard again"},
    Pair{"the engine trains Float, BFloat16 and Half, and keeps Byte (packed weights). Convert it,",
         "libzero trains float32, bfloat16 and float16. Convert it before libzero.shard "
         "(model.float()),"},
    Pair{"The Engine", "libzero.shard"},
    Pair{"the Engine", "libzero"},
};

const char* type_name(const Error& error) {
  if (dynamic_cast<const ConfigError*>(&error) != nullptr) return "ConfigError";
  if (dynamic_cast<const CommError*>(&error) != nullptr) return "CommError";
  if (dynamic_cast<const CheckpointError*>(&error) != nullptr) return "CheckpointError";
  if (dynamic_cast<const StoreError*>(&error) != nullptr) return "StoreError";
  if (dynamic_cast<const OutOfMemory*>(&error) != nullptr) return "OutOfMemory";
  if (dynamic_cast<const NotFinite*>(&error) != nullptr) return "NotFinite";
  return "Error";
}

// Makes it Python's current exception.
void set_current(const Error& error) {
  const auto module = py::module_::import("libzero._C");
  const py::object type = module.attr(type_name(error));
  PyErr_SetString(type.ptr(), python_text(error.what()).c_str());
}

void translate(std::exception_ptr pointer) {
  try {
    if (pointer) std::rethrow_exception(std::move(pointer));
  } catch (const Error& error) {
    set_current(error);
  }
}

}  // namespace

// Torch's bindings make a RuntimeError of what they do not know.
void rethrow_for_python() {
  try {
    throw;
  } catch (const Error& error) {
    const py::gil_scoped_acquire gil;
    set_current(error);
    python_error raised;
    raised.persist();
    throw raised;  // NOLINT(misc-throw-by-value-catch-by-reference): LibTorch's own way
  }
}

std::string python_text(std::string_view message) {
  std::string text;
  while (!message.empty()) {
    const auto* found = kNames.begin();
    while (found != kNames.end() && !message.starts_with(found->first)) ++found;
    if (found == kNames.end()) {
      text += message.front();
      message.remove_prefix(1);
    } else {
      text += found->second;
      message.remove_prefix(found->first.size());
    }
  }
  return text;
}

void bind_errors(py::module_& module) {
  const auto add = [&](const char* name, const py::handle& base) {
    const auto qualified = std::string("libzero.") + name;
    auto type = py::reinterpret_steal<py::object>(
        PyErr_NewException(qualified.c_str(), base.ptr(), nullptr));
    module.attr(name) = type;
    return type;
  };
  const auto error = add("Error", PyExc_RuntimeError);
  for (const auto* name :
       {"ConfigError", "CommError", "CheckpointError", "StoreError", "OutOfMemory", "NotFinite"})
    add(name, error);
  py::register_exception_translator(&translate);
  module.def("python_text", &python_text);
}

}  // namespace zero::python
