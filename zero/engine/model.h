// The parameters and buffers that an engine takes over from a module, and the checks that they stay
// as it made them.
//
// Note [The model and its engine]
// A parameter belongs to one engine at a time: the one whose hook it holds. The engine moves the
// parameter's bytes, so it must know when somebody else changes them: a storage that was replaced
// (set_data, Module::to), a parameter that was unfrozen or registered since. The engine looks for
// all of that when a pass or a step begins. It throws an error that names the parameter, since the
// engine would go on with values that the module no longer uses. An operator's write to a parameter
// shows in its version and is taken over.
//
// Note [Ties]
// A parameter may have several names, and several tensors (`a.set_data(b)`). Tensors that show the
// same elements of one storage are one parameter: they share the storage that the engine gives it,
// and the node of autograd that accumulates its gradient, so that the gradient is the sum over all
// of them before anybody sees it, as for one tensor that is used several times. Tensors that
// overlap otherwise cannot be told apart by an optimizer, and are refused.
//
// Note [Buffers]
// Buffers keep their dtype: running statistics and tables of angles lose too much in bf16. Batch
// norm computes with statistics, weight and bias of one dtype, which is fp32 if its input is bf16;
// so parameters whose module has running statistics in fp32 stay in fp32. Each rank's buffers are
// its own, unless a BufferPolicy says otherwise, and each rank saves its own.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Storage.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <string_view>
#include <unordered_map>
#include <utility>
#include <vector>

#include "zero/comm/group.h"
#include "zero/config/config.h"
#include "zero/engine/gradient_sink.h"
#include "zero/engine/model_shape.h"
#include "zero/engine/named_tensors.h"
#include "zero/engine/parameter_group.h"
#include "zero/optim/optimizer.h"

namespace torch::autograd {
struct Node;
}

namespace zero {

class Model {
 public:
  using Buffer = std::pair<std::string, at::Tensor>;

  /// Takes parameters in registration order, tied ones once. Looks at the tensors and changes none.
  /// Throws ConfigError naming a parameter that cannot be trained, or groups that make no sense.
  Model(NamedTensors tensors, const std::vector<ParameterGroup>& groups);
  ~Model();
  Model(const Model&) = delete;
  Model& operator=(const Model&) = delete;

  const std::vector<at::Tensor>& parameters() const { return parameters_; }
  const at::Tensor& parameter(int64_t index) const {
    return parameters_[static_cast<size_t>(index)];
  }
  int64_t size() const { return static_cast<int64_t>(parameters_.size()); }
  /// Returns the first name of each parameter.
  const std::vector<std::string>& names() const { return names_; }
  /// Returns all names of a parameter.
  std::vector<std::string> names_of(int64_t index) const;
  const std::string& name(int64_t index) const { return names_[static_cast<size_t>(index)]; }
  const std::vector<Buffer>& buffers() const { return buffers_; }
  /// Returns the device that all parameters are on, or go to (`goes_to`).
  c10::Device device() const { return device_.value_or(parameters_.front().device()); }
  /// Parameters and buffers, which are on the CPU, move to this device when the engine takes them
  /// over: one after the other, so that a model need not fit there whole.
  void goes_to(c10::Device device) { device_ = device; }
  /// Moves the buffers. Those in floating point get `dtype`, if it is given, unless their module
  /// stays in fp32.
  void move_buffers(std::optional<at::ScalarType> dtype) const;
  /// Returns the index of a parameter by any of its names. Throws ConfigError naming the nearest.
  int64_t index_of(std::string_view name) const;
  /// Returns the index of a parameter by any of its names.
  std::optional<int64_t> find(const std::string& name) const;
  /// Returns the index of a parameter by any of its tensors.
  std::optional<int64_t> find(const at::Tensor& tensor) const;
  /// Returns whether the parameter required a gradient when the engine was made.
  bool trainable(int64_t index) const { return trainable_[static_cast<size_t>(index)]; }

  /// The parameters of the modules that `patterns` (Config::fp32_modules) name stay in fp32 too.
  /// Throws ConfigError for a pattern that none has.
  void keep_fp32(const std::string& patterns);
  /// Returns whether the parameter's module computes in fp32: it has running statistics in fp32
  /// (Note [Buffers]), or was named.
  bool stays_fp32(int64_t index) const { return stays_fp32_[static_cast<size_t>(index)]; }

  /// Returns NamedTensors::rethrow.
  const std::function<void()>& rethrow() const { return rethrow_; }

  /// Returns the optimizer of each parameter group.
  const std::vector<Optimizer>& optimizers() const { return optimizers_; }
  /// Returns the group of those parameters of `group` that its optimizer leaves to AdamW, if there
  /// are any.
  std::optional<size_t> beside_matrices_of(size_t group) const {
    return group < beside_.size() ? beside_[group] : std::nullopt;
  }
  /// Returns the group of each parameter.
  const std::vector<size_t>& parameter_group_of() const { return parameter_group_of_; }
  /// Returns the optimizer as it suits a parameter.
  Optimizer optimizer_of(int64_t index) const {
    return optim::suited(optimizers_[parameter_group_of_[static_cast<size_t>(index)]],
                         parameter(index).dim());
  }

  /// Return one parameter, and the whole model, as the plan needs them.
  ParameterShape shape_of(int64_t index) const;
  ModelShape shape() const;

  /// Throws ConfigError, on every rank, unless all were given the same model and configuration:
  /// otherwise their collectives would not match. Collective.
  void agree(const Config& config, comm::Group& group) const;

  /// Returns whether parameters were given without values (NamedTensors::values_follow) and none
  /// have been loaded since.
  bool awaits_values() const { return awaits_values_; }
  /// Returns whether a parameter has no values, before they are given.
  bool is_absent(int64_t index) const;
  /// Throws Error where that is so; `what` begins its sentence.
  void check_values(std::string_view what) const;
  /// All states were replaced.
  void has_values() { awaits_values_ = false; }

  /// Returns whether the parameters are those for evaluation: Note [Weights for evaluation].
  bool evaluates() const { return evaluates_; }
  void set_evaluates(bool evaluates) { evaluates_ = evaluates; }

  // The engine takes the model over by these calls, in this order.

  /// Takes the parameters, with their values, from the engines that have them. Collective if
  /// those have updates under way.
  void take_over();
  /// Makes each parameter dense.
  void make_dense() const;
  /// Gives a parameter a storage of its own, with rank 0's values. The engine calls it as it takes
  /// one parameter after the other, since the model may lie in files that are larger than memory. A
  /// parameter without values gets memory in `dtype` that nothing is written to. Collective.
  void give_storage(int64_t index, at::ScalarType dtype, comm::Group& group) const;
  /// Makes tied tensors follow the first tensor of their parameter, which has been moved.
  void tie() const;
  /// The parameters have reached their final memory (`paged`: a pager brings the bytes of the first
  /// tensor of each). Installs the hooks: from here on changes are noticed, and gradients go to
  /// `sink`.
  void begin_use(bool paged, GradientSink& sink);
  /// Taking over has failed: parameters whose bytes are gone say so when they are used.
  void disown() const;
  /// Another engine may take the model over. It calls `release`, which ends this engine.
  void allow_take_over(std::function<void()> release) { release_ = std::move(release); }
  /// Ends the use of the model, and gives the user's hooks their places back.
  void leave();

  /// Throws Error naming a parameter whose storage was replaced since `begin_use`, or one that was
  /// frozen then and is not now; or where the parameters still have no values, or are those for
  /// evaluation.
  void check() const;
  /// Throws Error naming a parameter that was registered, or replaced by another, since
  /// `begin_use`. Does nothing if the module cannot be asked, or is gone.
  void check_names() const;
  /// Puts the engine's hooks back where the user has set others since; the user's run first.
  void hook();

  // Buffers. See Note [Buffers].

  /// Returns the buffers as a file holds them: dense, complex numbers as pairs.
  std::vector<Buffer> plain_buffers() const;
  /// Writes a buffer in the form of `plain_buffers`, in any dtype.
  void set_buffer(size_t index, const at::Tensor& plain) const;
  /// Makes the buffers of all ranks follow the policy. Collective, except with
  /// BufferPolicy::per_rank.
  void synchronize_buffers(BufferPolicy policy, comm::Group& group) const;

  /// Returns whether operators have written the parameter since the last `take_written`.
  bool written(int64_t index) const {
    return version(index) != versions_[static_cast<size_t>(index)];
  }
  /// Counts a parameter as written although its version does not show it.
  void mark_written(int64_t index) { versions_[static_cast<size_t>(index)] = -1; }
  /// Returns the parameters that are `wanted` (a predicate of the index) and that operators have
  /// written since the last call.
  template <class Wanted>
  std::vector<int64_t> take_written(const Wanted& wanted) {
    std::vector<int64_t> written;
    for (int64_t i = 0; i < size(); ++i) {
      if (!wanted(i)) continue;
      const auto now = version(i);
      if (std::exchange(versions_[static_cast<size_t>(i)], now) != now) written.push_back(i);
    }
    return written;
  }

 private:
  std::optional<c10::Device> device_;
  bool awaits_values_ = false;
  bool evaluates_ = false;
  class Hook;
  /// A tensor that shows a parameter, and its storage as the engine left it.
  struct Shown {
    at::Tensor tensor;
    std::string name;
    int64_t parameter = 0;
    c10::Storage storage = {};  // undefined before `begin_use`
    const void* data = nullptr;
    at::ScalarType dtype = at::kFloat;
    int64_t numel = 0;
  };

  void take_names(const NamedTensors& tensors);
  void assign_groups(const std::vector<ParameterGroup>& groups);
  void part_from_matrices();
  static void check_owner(const std::string& name, const at::Tensor& tensor);
  void check_whole_take_over() const;
  std::optional<int64_t> tied_to(const Shown& shown, const std::vector<int64_t>& neighbours) const;
  int64_t version(int64_t index) const;

  std::vector<at::Tensor> parameters_;
  std::vector<std::string> names_;
  std::vector<Buffer> buffers_;
  std::vector<bool> trainable_;
  std::vector<bool> stays_fp32_;
  std::set<std::string> fp32_modules_;              // their names with the dot
  std::unordered_map<std::string, int64_t> index_;  // by every name, tied ones too
  std::vector<Shown> shown_;  // first those of parameters_, then those tied to them
  std::vector<Optimizer> optimizers_;
  std::vector<std::optional<size_t>> beside_;  // by group as given: that of the rest
  std::vector<size_t> parameter_group_of_;
  std::function<NamedTensors()> list_again_;
  std::function<void()> rethrow_;
  std::vector<int64_t> versions_;
  std::vector<std::shared_ptr<torch::autograd::Node>> accumulators_;  // those of tied parameters
  GradientSink* sink_ = nullptr;
  bool paged_ = false;
  std::function<void()> release_;
};

}  // namespace zero
