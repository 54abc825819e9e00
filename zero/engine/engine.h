// The engine: trains any module with its states partitioned over a group's ranks.
//
//   auto group = zero::init();
//   auto model = std::make_shared<MyNet>();
//   zero::Engine engine(model, zero::AdamW{.lr = 3e-4}, config, group);
//   for (auto& batch : loader) {
//     auto loss = model->forward(batch);
//     engine.backward(loss);  // or loss.backward()
//     engine.step();  // a no-op until the accumulation boundary
//   }
//   engine.save("checkpoint");
//
// All ranks call the same functions in the same order; functions marked "collective" talk to the
// other ranks.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/util/Exception.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "zero/base/error.h"
#include "zero/base/ledger.h"
#include "zero/checkpoint/manifest.h"
#include "zero/checkpoint/safetensors.h"
#include "zero/comm/group.h"
#include "zero/config/config.h"
#include "zero/engine/disk_use.h"
#include "zero/engine/fits.h"
#include "zero/engine/named_tensors.h"
#include "zero/engine/parameter_group.h"
#include "zero/engine/replicas.h"
#include "zero/engine/save_options.h"
#include "zero/engine/traffic_formula.h"
#include "zero/optim/optimizer.h"
#include "zero/partition/formulas.h"
#include "zero/partition/layout.h"
#include "zero/store/tier.h"

namespace zero {

namespace paging {
class Pager;
struct StepSchedule;
}  // namespace paging

struct PretrainedOptions;
struct PretrainedReport;

/// The result of Engine::step.
struct StepResult {
  /// False until the accumulation boundary; then every field below is set.
  bool boundary = false;
  /// The update was applied. False at a boundary means that `step(false)` was called, or that a
  /// gradient was infinite or NaN on some rank: nothing was changed, on any rank.
  bool updated = false;
  /// Global L2 norm of the mean gradient before clipping; the same on every rank and, bit for bit,
  /// at every stage.
  double grad_norm = 0;
  /// Number of updates applied so far.
  int64_t step = 0;
  /// The loss scale of this step, and of the next; 1 if losses are not scaled.
  double loss_scale = 1;
  double next_loss_scale = 1;
};

class Engine {
 public:
  /// Takes over the model's parameters: broadcasts rank 0's values, lays them out, and shards the
  /// states that the stage shards. The model keeps its tensors; at stage 3 their bytes come and go.
  /// Several engines may share `group`. Collective. Throws ConfigError for a configuration or
  /// parameter groups that make no sense, CommError, OutOfMemory or StoreError. The model is then
  /// as it was, except that all ranks may have rank 0's values (in bf16 if the last arrays were
  /// being made already). If a disk fails while parameters move to it (stage 3), any use of those
  /// parameters throws an error that says so.
  ///
  /// Parameters are Float or BFloat16, or Half with Config::fp16. Tensors that share their memory
  /// are one parameter. With Config::bf16 (fp16) Float parameters become BFloat16 (Half), except
  /// those of a module with running statistics (batch norm: buffers `running_mean`, `running_var`
  /// in Float), which computes in fp32. Buffers keep their dtype.
  ///
  /// A model belongs to one engine at a time. If another live engine has it and does not shard its
  /// parameters (stages 0 to 2), this one takes it over with its values. The other engine can then
  /// only be destroyed; any other use of it throws. So `engine = std::make_unique<Engine>(model,
  /// ...)` works. If the other engine is at stage 3, this throws ConfigError; so it does for a
  /// model whose parameters were lost with an engine of stage 3.
  ///
  /// Parameters and buffers that the engine took over must stay as they are. `backward` or `step`
  /// throws an Error that names a parameter if its storage was replaced since (Module::to,
  /// set_data), if it was unfrozen, or if it was registered later (found where the module was given
  /// as a pointer or holder). A parameter that is frozen later keeps its value and its moments
  /// until it is unfrozen.
  ///
  /// The memory that the host allocator keeps from the old tensors goes back to the system, and the
  /// peaks of the allocator and of the group's ledger begin anew.
  template <ModelLike Model>
  Engine(const Model& model, Optimizer optimizer, Config config = {},
         std::shared_ptr<comm::Group> group = comm::single())
      : Engine(named_tensors(model), {ParameterGroup{.optimizer = optimizer, .rest = true}},
               std::move(config), std::move(group)) {}
  /// Takes parameter groups, each with an optimizer of its own.
  template <ModelLike Model>
  Engine(const Model& model, std::vector<ParameterGroup> groups, Config config = {},
         std::shared_ptr<comm::Group> group = comm::single())
      : Engine(named_tensors(model), std::move(groups), std::move(config), std::move(group)) {}
  /// Takes the optimizer from the configuration's `optimizer` section. Throws ConfigError if there
  /// is none.
  template <ModelLike Model>
  Engine(const Model& model, const Config& config,
         std::shared_ptr<comm::Group> group = comm::single())
      : Engine(named_tensors(model), groups_of(config), config, std::move(group)) {}
  Engine(NamedTensors tensors, std::vector<ParameterGroup> groups, Config config,
         std::shared_ptr<comm::Group> group);
  /// Gives replicated parameters (stages 0 to 2) back to the model. At stage 3 the parameters stay
  /// sharded, and any further use of one throws an error that says so: export them before. There
  /// the destructor is collective, since peers may still be reading this rank's shards, except
  /// while an exception unwinds.
  ~Engine();
  Engine(const Engine&) = delete;
  Engine& operator=(const Engine&) = delete;

  /// Runs loss.backward() and takes the gradients: `.grad` is empty afterwards. May be called
  /// several times before `step`; all gradients add up. If losses are scaled, the gradients are
  /// those of the loss times the loss scale; `loss` itself does not change. Collective at stages 2
  /// and 3 (reduce-scatter of each unit as it becomes ready), and between hosts or on a device at
  /// stages 0 and 1, in the step's last pass (Note [Early reductions] in early_reductions.h).
  ///
  /// A pass that throws, for example OutOfMemory, drops the gradients of the step so far: the
  /// accumulation begins anew. Training can go on if the pass has thrown at the same place on all
  /// ranks; at stages 0 and 1 also if all ranks call `zero_grad` or `drop_gradients` after it.
  /// (With update_in_backward some weights have changed: load a checkpoint.)
  ///
  /// LibTorch's `loss.backward()` does the same for every engine that it brings gradients to, from
  /// the first gradient on: Note [Passes] in backward_pass.h. It does not scale the loss (`scale`
  /// does), and no phase of the timeline shows it.
  ///
  /// Another engine's `backward` may bring gradients to these parameters: a GAN's generator does,
  /// whose loss goes through this model. They are no part of the step and are dropped as they come,
  /// at every stage. To train two parts of a model by one loss, give one engine two parameter
  /// groups, or call loss.backward(). A `step` that has only such gradients throws an Error.
  void backward(const at::Tensor& loss);
  /// Returns the loss times the factor with which `backward` begins, for
  /// `engine.scale(loss).backward()`. If losses are scaled (Config::scales_loss), loss.backward()
  /// without it throws Error. `scale` throws nothing.
  at::Tensor scale(const at::Tensor& loss);
  /// Sets the engine's hooks again. It then also takes the gradients of parameters on which the
  /// program has set a post-accumulate hook since the last pass; the program's hook runs before.
  /// Each pass does this when it begins. Call it before loss.backward() if the hook is on the
  /// parameter whose gradient comes first.
  void rehook();
  /// Runs several backward passes as one, for a model whose micro-batches all pass one layer before
  /// the next (train/layer_major.h does that for any model that shows its layers). `passes` runs
  /// torch's backward as often as `micro_batches` micro-batches need. It calls `layer_done`
  /// whenever all parameters used so far have their gradients; the engine then reduces their units,
  /// once for all micro-batches. It reduces the units of parameters that several layers use
  /// (`shared`: a tied weight) at the end. A gradient that comes later than that costs one more
  /// reduction. As after `backward`, `step` counts the last of the micro-batches. Gradients of a
  /// loss must begin with `loss_gradient`. Throws ConfigError unless
  /// Config::layer_major_accumulation is set, for more micro-batches than the step has left, and
  /// for a shared tensor that is no parameter. Collective at stages 2 and 3.
  void accumulate(int64_t micro_batches,
                  const std::function<void(const std::function<void()>& layer_done)>& passes,
                  const std::vector<at::Tensor>& shared = {});
  /// Returns the gradient that backward begins with, in the loss's shape and dtype: one, or the
  /// loss scale over the micro-batches of a step if losses are scaled (Config::scales_loss).
  at::Tensor loss_gradient(const at::Tensor& loss) const;
  /// Counts a micro-batch. Every gradient_accumulation_steps-th call reduces the gradients that are
  /// left, clips, updates and publishes the new parameters. Gradients are divided by the numbers of
  /// ranks and micro-batches, and by the loss scale. If a gradient is infinite or NaN on any rank,
  /// no rank updates (StepResult::updated), and in fp16 the loss scale falls. If the loss scale is
  /// at its minimum already, `step` throws NotFinite and leaves weights and states as they were
  /// (StepWatch finds the cause). Collective at the boundary. A call that throws because of an open
  /// zero::Gathered scope at stage 3 changes nothing and may be made again.
  ///
  /// With `update` false nothing is updated whatever the gradients are: use it to leave a step out
  /// because of its loss. It throws Error if backward has updated weights already
  /// (update_in_backward).
  StepResult step(bool update = true);
  /// Drops the gradients of the step so far, in memory, on the host and on disk: the accumulation
  /// begins anew. To be called by every rank in the same place; collective where reductions may
  /// have begun in a backward pass, at stages 0 and 1 between hosts and on a device. Throws Error
  /// between backward and step with update_in_backward, which has used them.
  void zero_grad();
  /// Does the same as `zero_grad` if some rank has had a pass since the last `step`, and else
  /// nothing. Right after `step` it keeps the micro-batches that `step` has counted, so a loop that
  /// accumulates may call it anywhere.
  void drop_gradients();
  /// Completes the updates that `step` has left under way (update_in_forward, delayed updates).
  /// Functions that read or write states by name do so themselves. Collective.
  void complete_update();

  /// Puts the weights for evaluation into force, where the optimizer has others than those that it
  /// trains (ScheduleFreeAdamW): the model computes with them, and `parameter`, `visit_parameters`
  /// and save_pretrained give them. Until `optimizer_train` passes, steps and writes throw
  /// Error. `save` and `save_full` keep the weights of training all the same, and a load puts those
  /// into force. With fp32 parameters, and with split master weights, the weights of training wait
  /// in memory meanwhile, 4 bytes for each element that this rank owns. Does nothing with other
  /// optimizers, and where they are in force already. To be called between steps. Collective.
  ///
  ///   engine.optimizer_eval();
  ///   const auto loss = evaluate(model);
  ///   engine.optimizer_train();
  void optimizer_eval();
  /// Puts the weights of training back into force, bit for bit. Does nothing if they are. Throws
  /// Error if the user has written a parameter meanwhile, and drops what was written; the next call
  /// succeeds. Collective.
  void optimizer_train();

  /// Sets the largest norm of the mean gradient, from the next step on (with update_in_backward,
  /// from the next backward pass on); 0 clips nothing. Must be the same on every rank. Throws
  /// ConfigError if it is negative, and if it is above 0 with update_in_backward and without
  /// clip_by_previous_norm.
  void set_gradient_clipping(double norm);
  /// Sets the learning rate of parameter group `index` from the next update on. The parameters of a
  /// Muon or Apollo group that AdamW trains are a group of their own behind the given groups. Its
  /// learning rate follows, at the same ratio, and may be set afterwards.
  void set_lr(double lr, size_t index = 0);
  double lr(size_t index = 0) const;
  /// Returns the hyper-parameters of parameter group `index`, with the learning rate in force.
  Optimizer optimizer(size_t index = 0) const;
  /// Sets the hyper-parameters of parameter group `index` from the next update on, its learning
  /// rate among them: for schedules of betas, momentum or weight decay. Must be the same on every
  /// rank. Throws ConfigError for a value that cannot be used, for another optimizer than the group
  /// has, and for one with other states (SGD without momentum for SGD with it); the group then
  /// stays as it was. The parameters of a Muon or Apollo group that AdamW trains follow.
  void set_optimizer(const Optimizer& optimizer, size_t index = 0);
  /// Does the same as `set_optimizer` with other betas. Throws ConfigError if the group's optimizer
  /// has none.
  void set_betas(double beta1, double beta2, size_t index = 0);
  /// Returns the number of parameter groups.
  size_t group_count() const;
  /// Returns the L2 norm of the mean gradient of each parameter group, before clipping; NaN if a
  /// gradient is not finite. It takes a pass over the gradients. Call it between a step's last
  /// backward and `step`: elsewhere it throws Error, and with update_in_backward ConfigError. The
  /// result is the same on every rank, and equal bit for bit wherever the gradients are.
  /// Collective.
  std::vector<double> group_norms();

  /// Returns whether a backward pass has ended since the last `step` or `zero_grad`.
  bool passed() const;
  /// Returns the micro-batches that `step` has counted since the last boundary.
  int64_t micro_batches() const;

  /// Sets the policy of buffers from the next step on; it is BufferPolicy::per_rank at first. Must
  /// be the same on every rank.
  void set_buffer_policy(BufferPolicy policy);
  BufferPolicy buffer_policy() const;

  // The next functions read and write full states by name, at any stage, in fp32, with the
  // parameter's shape. They are collective; every rank gets (and gives) the same. They throw
  // ConfigError for an unknown name (naming the nearest), for a frozen parameter's gradient or
  // state, and for another shape. They throw Error if ranks give different values (checksums are
  // compared), and between backward and step with update_in_backward.

  /// Returns the fp32 (master) parameter.
  at::Tensor parameter(std::string_view name);
  /// Returns the mean gradient over ranks and micro-batches so far, before clipping; an undefined
  /// tensor if no rank has one. Call it between backward and step.
  at::Tensor gradient(std::string_view name);
  /// Returns an optimizer state by a name of optim::state_names: "exp_avg", "momentum_buffer", ...
  /// Those of optim::factored_states have a shape of their own.
  at::Tensor optimizer_state(std::string_view name, std::string_view state);
  /// Returns, by parameter in the order of parameter_names, 1 if some rank has had a gradient since
  /// the last step. Like `gradient`, it completes reductions under way.
  std::vector<uint8_t> gradients_present();
  /// Returns the same for the step that ended last, even if that was skipped. Not collective.
  const std::vector<uint8_t>& gradients_used() const;
  void set_parameter(std::string_view name, const at::Tensor& value);
  /// An undefined tensor drops the gradient: the parameter has had none then.
  void set_gradient(std::string_view name, const at::Tensor& value);
  void set_optimizer_state(std::string_view name, std::string_view state, const at::Tensor& value);

  /// Returns the number of updates that a parameter has had, on which Adam's correction of its
  /// moments depends. Not collective.
  int64_t parameter_steps(std::string_view name) const;
  /// Sets that number, which must be the same on every rank; `steps` becomes the largest of all
  /// parameters. Call it between steps.
  void set_parameter_steps(std::string_view name, int64_t count);

  /// Calls `visit` with each full parameter in registration order, in the model's dtype, on rank 0
  /// only; the tensor is valid during the call. Needs memory for one unit. Collective.
  void visit_parameters(
      const std::function<void(const std::string& name, const at::Tensor& value)>& visit);

  /// Returns this rank's buffers by name, as files hold them: dense, complex numbers as pairs. Not
  /// collective.
  std::vector<std::pair<std::string, at::Tensor>> buffers() const;

  /// Writes a checkpoint (docs/checkpoint-format.md): each rank its slices of all states and its
  /// buffers to `folder`/rank-R-of-N.safetensors, and rank 0 the manifest with step counts, loss
  /// scale and checksums. `folder` appears, by renaming, when all is whole; an earlier save in it
  /// stays until then, and goes with all other files there. What a rank has `attached`, any UTF-8
  /// texts by name, is kept with it. Collective. Throws CheckpointError on every rank if any fails,
  /// or if `folder` holds files and no earlier save, or folders. It changes nothing in the run: a
  /// delayed update is computed, and its parameters come into force in the next step, as ever. The
  /// checkpoint has both the new parameters and those in force.
  ///
  /// With SaveOptions::background it returns when the parameters and buffers are copied, and a
  /// thread writes the states of that moment beside the steps that follow (Note [Saving beside
  /// training]). `complete_save` ends such a save; the next save and `load` call it. On a device
  /// with memory of its own, and with a memory budget, every save is complete when it returns.
  void save(const std::string& folder, const Attached& attached = {},
            const SaveOptions& options = {});
  /// Gets the memory into which a save in the background copies parameters and buffers, and fills
  /// it on a thread, so that the first save holds the run no longer than later ones. Without this
  /// call the first save gets the memory. It does nothing where saves do not go on beside training,
  /// or while one does.
  void prepare_saves();
  /// Returns how far this rank is with the save that `complete_save` would end.
  SaveProgress save_progress() const;
  /// Blocks until a save in the background is complete; does nothing without one. An engine that is
  /// destroyed before gives the save up, and the earlier checkpoint stays. Collective. Throws
  /// CheckpointError on every rank if any has failed: the earlier checkpoint stays then too, and
  /// the states of the engine are as they are.
  void complete_save();
  /// Reads a checkpoint of `save`, at any number of ranks, stage, unit size and tier. Parameters,
  /// master weights and moments may have other dtypes than before, and are rounded where they get
  /// fewer bits. Moments and step counts of parameters that were frozen then begin at zero. Every
  /// byte is checked before anything changes. The step under way is dropped, even if it has failed.
  /// An update that was delayed then is delayed again where this engine delays updates
  /// (Config::offload_optimizer), and else complete.
  /// Returns the texts that this rank had attached. If more ranks load than have saved, each rank
  /// beyond those takes the texts and buffers of the rank with its number modulo the number that
  /// saved. A checkpoint of an earlier version loads only at the same stage, ranks and unit size.
  /// Collective. Throws on every rank and changes nothing: DamagedCheckpoint if a file is missing
  /// or not as it was written, CheckpointError if it is of another model (names or shapes) or of
  /// another kind of optimizer.
  Attached load(const std::string& folder);
  /// Does the same with a checkpoint of SaveOptions::on_each_host: `folder` is this host's, has the
  /// manifest, and may lack files. `fetch` is called once on each rank, with the names of the files
  /// that this rank needs; these alone are checked. Collective.
  Attached load_on_each_host(const std::string& folder, const FetchFiles& fetch);
  /// Writes the full fp32 parameters and optimizer states, and rank 0's buffers, to one safetensors
  /// file (rank 0 writes, one unit at a time). Collective.
  void save_full(const std::string& file);
  /// Reads a file of `save_full`, at any stage and number of ranks. Collective.
  void load_full(const std::string& file);
  /// Begins anew from the parameters in a safetensors file, one that `save_full` wrote or another
  /// program's, or in a folder: load_pretrained (engine/pretrained.h) without its report.
  void load_weights(const std::string& path);

  /// Returns the parameters that ranks should hold equally and do not. It compares whole parameters
  /// (stages 0 to 2) or replicas of shards (mics_shard_size), and returns none if nothing is
  /// held twice. It takes a pass over the parameters, and the ranks exchange checksums, 8 bytes a
  /// unit. Call it between a backward and its `step`, or between steps. Collective; the result is
  /// the same on every rank.
  std::vector<Divergence> diverged_parameters();

  const Config& config() const;
  /// Returns the ranks that train together.
  comm::Group& group();
  /// Returns the number of updates applied so far.
  int64_t steps() const;
  /// Returns the loss scale of the next step; 1 if losses are not scaled.
  double loss_scale() const;
  /// Returns the number of parameters of the model (Psi), frozen ones included; tied ones count
  /// once.
  int64_t parameter_count() const;
  const partition::Layout& layout() const;
  /// Returns the names as the model registered them, in order, tied ones once.
  std::vector<std::string> parameter_names() const;
  /// The same with the dtypes and shapes that the model has them in.
  std::vector<TensorInfo> parameter_infos() const;
  /// Returns the bytes of this rank's states by formula, padding included: equals the ledger's
  /// `parameters`, `gradients` and `optimizer`.
  partition::LayoutMemory memory_formula() const;
  /// Returns the same for the host tier: it equals the ledger's `host_parameters`, `host_gradients`
  /// and `host_optimizer`.
  partition::LayoutMemory host_memory_formula() const;
  /// Returns the bytes of a step that updates, or (`updated` false) of one that was skipped
  /// (StepResult::updated): then the bytes that updates read, write and publish are missing.
  /// Updates that backward makes and `step` takes back (update_in_backward) count, although those
  /// of units that overflow themselves are not made.
  TrafficFormula traffic_formula(bool updated = true) const;
  /// Returns the use of this rank's disk; all is zero if it has none. Updates under way count as
  /// far as they have come.
  DiskUse disk() const;
  /// Returns the bytes of gradients, parameters and states that the updates of a step pass over in
  /// the host's memory; 0 where the device updates.
  int64_t host_update_bytes() const;
  /// Returns the bytes that this rank's device and its host have exchanged since construction.
  DeviceTraffic host_traffic() const;
  /// Returns `error`, with a list of the device's contents and the cheapest change of the
  /// configuration that frees enough. LibTorch's operators throw `error` in a forward pass when a
  /// device has no room left. Backward passes and steps throw such an OutOfMemory themselves.
  ///
  ///   try {
  ///     loss = model->forward(x);
  ///   } catch (const c10::OutOfMemoryError& error) {
  ///     throw engine.explained(error);
  ///   }
  OutOfMemory explained(const c10::OutOfMemoryError& error) const;
  /// Returns stage 3's pager; null if parameters are replicated.
  paging::Pager* pager();
  /// Records the step that begins now, or the next one that updates if this one does not: which
  /// units its operators use, how much they compute, and after which of them a unit is reduced.
  /// Until then operators are observed, which slows them a little. Call it on the thread that
  /// trains. Throws ConfigError if parameters are replicated.
  void record_schedule();
  /// Returns the step that was recorded last, with this rank's bytes, for zero/paging/simulation.h;
  /// null before the first one.
  const paging::StepSchedule* schedule() const;

 private:
  friend class Gathered;
  friend PretrainedReport load_pretrained(Engine& engine, const std::string& path,
                                          const PretrainedOptions& options);
  PretrainedReport load_weights_of(const std::string& path, const PretrainedOptions& options,
                                   std::string_view label);
  static std::vector<ParameterGroup> groups_of(const Config& config);
  struct Impl;
  // Gives access to the engine until another engine takes the model over; throws Error after that.
  class Held {
   public:
    explicit Held(std::shared_ptr<Impl> impl) : impl_(std::move(impl)) {}
    Impl* operator->() const { return &**this; }
    Impl& operator*() const;
    /// Returns the owner, for a scope that may outlive the engine.
    const std::shared_ptr<Impl>& shared() const { return impl_; }
    void reset() { impl_.reset(); }
    /// Leaves the engine in memory for ever.
    void abandon();

   private:
    std::shared_ptr<Impl> impl_;
  };
  void release();
  Held impl_;
};

}  // namespace zero
