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
#include "zero/engine/named_tensors.h"
#include "zero/engine/parameter_group.h"
#include "zero/engine/replicas.h"
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
  /// The loss scale of this step, and of the next; 1 where losses are not scaled.
  double loss_scale = 1;
  double next_loss_scale = 1;
};

/// States of one rank on disk.
struct DiskUse {
  int64_t bytes = 0;    ///< reserved there
  int64_t read = 0;     ///< bytes since construction
  int64_t written = 0;  ///< the same
  double wait_ms = 0;   ///< that this rank has spent waiting for it
};

/// Bytes that its host (or the cgroup that the ranks run in) has left for each rank; the least of
/// all ranks. Collective.
int64_t memory_of_rank(comm::Group& group);

/// Bytes that the ranks of this host together need while each builds a model of `parameters`
/// parameters whole, in fp32.
double bytes_to_build(int64_t parameters, const comm::Group& group);

/// Throws OutOfMemory, on every rank, if a model of `parameters` parameters cannot be trained so in
/// the memory that this host (or the cgroup that the ranks run in) has left: because building it in
/// fp32 takes more (`built_on_disk`: it is built in a zero::BuildOnDisk scope), or its states do by
/// formula. Names what would do. For use before the model is built; activations and buffers come on
/// top. Collective.
void check_fits(int64_t parameters, const Config& config, comm::Group& group,
                bool built_on_disk = false);

class Engine {
 public:
  /// Takes over the model's parameters: broadcasts rank 0's values, lays them out, shards what the
  /// stage shards. The model keeps its tensors; at stage 3 their bytes come and go. `group` may be
  /// shared by several engines. Collective. Throws ConfigError for a configuration or parameter
  /// groups that make no sense, CommError, OutOfMemory, StoreError; the model then is as it was,
  /// but for rank 0's values on all ranks (bf16 once the last arrays were being made), and where a
  /// disk fails while parameters move to it (stage 3): using those says so.
  ///
  /// Parameters are Float, BFloat16, or with Config::fp16 Half; those that share their memory are
  /// one. With Config::bf16 (fp16) Float ones become BFloat16 (Half), but not those of a module
  /// with running statistics (batch norm: buffers `running_mean`, `running_var` in Float), which
  /// computes in fp32. Buffers keep their dtype.
  ///
  /// A model belongs to one engine at a time. Where another engine that lives has it and does not
  /// shard its parameters (stages 0 to 2), this one takes it over with its values, and any further
  /// use of the other but its destruction throws: `engine = std::make_unique<Engine>(model, ...)`
  /// works. At stage 3 that is a ConfigError; so is a model whose parameters went with an engine of
  /// stage 3.
  ///
  /// Parameters and buffers that the engine took over must stay so: a parameter whose storage was
  /// replaced since (Module::to, set_data), that was unfrozen, or registered later (where the
  /// module was given as a pointer or holder), is an Error by `backward` or `step` that names it.
  /// One that is frozen later stays as it is, moments included, until it is unfrozen.
  ///
  /// The memory that the host allocator keeps of the old tensors goes back to the system, and the
  /// peaks of the allocator and of the group's ledger begin anew.
  template <ModelLike Model>
  Engine(const Model& model, Optimizer optimizer, Config config = {},
         std::shared_ptr<comm::Group> group = comm::single())
      : Engine(named_tensors(model), {ParameterGroup{.optimizer = optimizer, .rest = true}},
               std::move(config), std::move(group)) {}
  /// With parameter groups, each with an optimizer of its own.
  template <ModelLike Model>
  Engine(const Model& model, std::vector<ParameterGroup> groups, Config config = {},
         std::shared_ptr<comm::Group> group = comm::single())
      : Engine(named_tensors(model), std::move(groups), std::move(config), std::move(group)) {}
  /// With the optimizer of the configuration's `optimizer` section. Throws ConfigError if there is
  /// none.
  template <ModelLike Model>
  Engine(const Model& model, const Config& config,
         std::shared_ptr<comm::Group> group = comm::single())
      : Engine(named_tensors(model), groups_of(config), config, std::move(group)) {}
  Engine(NamedTensors tensors, std::vector<ParameterGroup> groups, Config config,
         std::shared_ptr<comm::Group> group);
  /// Gives replicated parameters (stages 0 to 2) back to the model. At stage 3 the parameters stay
  /// sharded and any further use of one throws an error that says so: export them before; and,
  /// since peers may still be reading this rank's shards, it is collective there, except while an
  /// exception unwinds.
  ~Engine();
  Engine(const Engine&) = delete;
  Engine& operator=(const Engine&) = delete;

  /// Runs loss.backward() and takes the gradients: `.grad` is empty afterwards. May be called
  /// several times before `step`; all gradients add up. With a scaled loss they are those of the
  /// loss times the loss scale; the loss itself is as it was. Collective at stages 2 and 3
  /// (reduce-scatter of each unit as it becomes ready), and between hosts or on a device at stages
  /// 0 and 1, in the step's last pass (Note [Early reductions] in early_reductions.h).
  ///
  /// A pass that throws, as OutOfMemory, takes the gradients of the step so far with it: the
  /// accumulation begins anew. Training can go on if the pass has thrown at the same place on all
  /// ranks; at stages 0 and 1 also if all ranks call `zero_grad` or `drop_gradients` after it.
  /// (With update_in_backward some weights have changed: load a checkpoint.)
  ///
  /// LibTorch's `loss.backward()` does the same, at the first gradient, for every engine that it
  /// brings gradients to: Note [Passes] in backward_pass.h. It cannot scale the loss (`scale`), and
  /// is in no phase of the timeline.
  ///
  /// Gradients that another engine's `backward` brings to these parameters (a GAN's generator's,
  /// whose loss goes through this model) are no part of the step: they are dropped as they come, at
  /// every stage. To train two parts of a model by one loss give one engine two parameter groups,
  /// or call loss.backward(). A `step` that has nothing but such gradients throws an Error.
  void backward(const at::Tensor& loss);
  /// For `engine.scale(loss).backward()`: the loss times what `backward` begins with, as the loss
  /// is scaled now. Throws nothing; without it loss.backward() of a loss that is to be scaled
  /// (Config::scales_loss) throws Error.
  at::Tensor scale(const at::Tensor& loss);
  /// Takes the gradients also of parameters on which the program has set a post-accumulate hook
  /// since the last pass; that hook is called before. Each pass does so when it begins; before
  /// loss.backward() it is needed where the hook is on the parameter whose gradient comes first.
  void rehook();
  /// Several backward passes as one, for a model whose micro-batches all pass one layer before the
  /// next (train/layer_major.h does that for any model that shows its layers). `passes` runs
  /// torch's backward as often as it needs for `micro_batches` micro-batches, and calls
  /// `layer_done` whenever the parameters used so far have their gradients: then the units of these
  /// are reduced, once for all micro-batches; those that several layers use (`shared`: a tied
  /// weight) at the end. A gradient that comes later than that all the same costs a reduction more.
  /// `step` counts the last of the micro-batches, as after `backward`. Gradients of a loss begin
  /// with `loss_gradient`. Throws ConfigError unless
  /// Config::layer_major_accumulation is set, for more micro-batches than the step has left, or for
  /// a shared tensor that is no parameter. Collective at stages 2 and 3.
  void accumulate(int64_t micro_batches,
                  const std::function<void(const std::function<void()>& layer_done)>& passes,
                  const std::vector<at::Tensor>& shared = {});
  /// Returns the gradient that backward begins with, in the loss's shape and dtype: one, or the
  /// loss scale over the micro-batches of a step if losses are scaled (Config::scales_loss).
  at::Tensor loss_gradient(const at::Tensor& loss) const;
  /// Counts a micro-batch; at every gradient_accumulation_steps-th call reduces what is left,
  /// clips, updates and publishes the new parameters. Gradients are divided by ranks and
  /// micro-batches, and by the loss scale. A gradient that is infinite or NaN on any rank leaves
  /// the update out on all (StepResult::updated), and in fp16 lowers the loss scale; where that is
  /// at its minimum already it throws NotFinite, with weights and states as they were (StepWatch
  /// tells what made it). Collective at the boundary. A call that is refused (an open
  /// zero::Gathered scope at stage 3) changes nothing and may be made again.
  /// Without `update` nothing is updated whatever the gradients are, as where one is not finite:
  /// for a step that is to be left out for its loss. Throws Error where backward has updated
  /// weights already (update_in_backward).
  StepResult step(bool update = true);
  /// Drops the gradients of the step so far, in memory, on the host and on disk: the accumulation
  /// begins anew. To be called by every rank in the same place; collective where reductions may
  /// have begun in a backward pass, at stages 0 and 1 between hosts and on a device. Throws Error
  /// between backward and step with update_in_backward, which has used them.
  void zero_grad();
  /// As `zero_grad` where some rank has had a pass since the last `step`, else nothing: right
  /// behind `step` it keeps what that has counted, so a loop that accumulates may call it
  /// everywhere.
  void drop_gradients();
  /// Completes the updates that `step` has left under way (update_in_forward, delayed updates);
  /// whatever reads or writes states by name does so itself. Collective.
  void complete_update();

  /// The largest norm of the mean gradient from the next step on; 0: none is clipped. The same on
  /// every rank. Throws ConfigError for a negative one.
  void set_gradient_clipping(double norm);
  /// The learning rate of group `index` from the next update on. What a group of Muon trains with
  /// AdamW is a group of its own behind those that were given: it follows, at the same ratio, and
  /// may be set after.
  void set_lr(double lr, size_t index = 0);
  double lr(size_t index = 0) const;
  /// The hyper-parameters of group `index`, with the learning rate in force.
  Optimizer optimizer(size_t index = 0) const;
  /// Sets the hyper-parameters of group `index` from the next update on, its learning rate among
  /// them: for schedules of betas, momentum or weight decay. The same on every rank. Throws
  /// ConfigError for a value that cannot be used, and for another optimizer than the group has or
  /// one with other states (SGD without momentum for SGD with it); the group then stays as it was.
  /// What a group of Muon trains with AdamW follows.
  void set_optimizer(const Optimizer& optimizer, size_t index = 0);
  /// `set_optimizer` with other betas. Throws ConfigError where the group's optimizer has none.
  void set_betas(double beta1, double beta2, size_t index = 0);
  size_t group_count() const;
  /// The L2 norm of the mean gradient of each group's parameters, before clipping; NaN where a
  /// gradient is not finite. A pass over the gradients. Between a step's last backward and `step`:
  /// Error elsewhere, ConfigError with update_in_backward. The same on every rank, and bit for
  /// bit where the gradients are. Collective.
  std::vector<double> group_norms();

  /// A backward pass has ended since the last `step` or `zero_grad`.
  bool passed() const;
  /// Micro-batches that `step` has counted since the last boundary.
  int64_t micro_batches() const;

  /// Sets the policy of buffers from the next step on; it is BufferPolicy::per_rank at first, and
  /// the same on every rank.
  void set_buffer_policy(BufferPolicy policy);
  BufferPolicy buffer_policy() const;

  // Full states by name, at any stage, in fp32, with the parameter's shape. Collective; every rank
  // gets (and gives) the same. Throws ConfigError for an unknown name (naming the nearest), a
  // frozen parameter's gradient or state, or another shape; Error between backward and step with
  // update_in_backward.

  /// The fp32 (master) parameter.
  at::Tensor parameter(std::string_view name);
  /// The mean gradient over ranks and micro-batches so far, before clipping; undefined tensor where
  /// no rank has one. Between backward and step.
  at::Tensor gradient(std::string_view name);
  /// An optimizer state by a name of optim::state_names: "exp_avg", "momentum_buffer", ... Where
  /// Adafactor factors it, "row_var" or "col_var", whose last dimension, or the one before, is 1.
  at::Tensor optimizer_state(std::string_view name, std::string_view state);
  /// By parameter, in the order of parameter_names: 1 where some rank has had a gradient since the
  /// last step. Completes what is under way, as `gradient`.
  std::vector<uint8_t> gradients_present();
  /// The same of the step that ended last, one that was skipped too. Not collective.
  const std::vector<uint8_t>& gradients_used() const;
  void set_parameter(std::string_view name, const at::Tensor& value);
  void set_gradient(std::string_view name, const at::Tensor& value);
  void set_optimizer_state(std::string_view name, std::string_view state, const at::Tensor& value);

  /// Updates that a parameter has had, which Adam's correction of its moments depends on. Not
  /// collective.
  int64_t parameter_steps(std::string_view name) const;
  /// Sets them, the same on every rank; `steps` becomes the most of any parameter. Between steps.
  void set_parameter_steps(std::string_view name, int64_t count);

  /// Calls `visit` with each full parameter in registration order, in the model's dtype, on rank 0
  /// only; the tensor is valid during the call. Needs memory for one unit. Collective.
  void visit_parameters(
      const std::function<void(const std::string& name, const at::Tensor& value)>& visit);

  /// Writes a checkpoint (docs/checkpoint-format.md): each rank its slices of all states and its
  /// buffers to `folder`/rank-R-of-N.safetensors, and rank 0 the manifest with step counts, loss
  /// scale and checksums. `folder` appears, by renaming, when all is whole; an earlier save in it
  /// stays until then, and goes with all other files there. What a rank has `attached`, any UTF-8
  /// texts by name, is kept with it. Collective. Throws CheckpointError on every rank if any fails,
  /// or if `folder` holds files and no earlier save, or folders.
  void save(const std::string& folder, const Attached& attached = {});
  /// Reads what `save` wrote, at any number of ranks, stage, unit size and tier, and with other
  /// dtypes of parameters, master weights and moments, which are rounded where they get fewer bits;
  /// of a parameter that was frozen then moments and step count begin at zero. Every byte is
  /// checked before. Drops the step of now, also one that has failed. Returns what this rank had
  /// attached; where more ranks load than have saved, ranks beyond those take texts and buffers of
  /// rank modulo their number. What earlier versions saved loads at the same stage, ranks and unit
  /// size. Collective. Throws on every rank, and changes nothing: DamagedCheckpoint if a file is
  /// missing or not as it was written, CheckpointError if it is of another model (names or shapes)
  /// or of another kind of optimizer.
  Attached load(const std::string& folder);
  /// Writes the full fp32 parameters and optimizer states, and rank 0's buffers, to one safetensors
  /// file (rank 0 writes, one unit at a time). Collective.
  void save_full(const std::string& file);
  /// Reads what `save_full` wrote, at any stage and number of ranks. Collective.
  void load_full(const std::string& file);
  /// Begins anew from the parameters in a safetensors file, one that `save_full` wrote or another
  /// program's, or in a folder: load_pretrained (engine/pretrained.h) without its report.
  void load_weights(const std::string& path);

  /// The parameters that ranks should hold the same of and do not: of whole ones (stages 0 to 2),
  /// or with replicas of shards (mics_shard_size); none where nothing is held twice. By checksums:
  /// 8 bytes a unit are exchanged, and a pass over the parameters is made. Between a backward and
  /// its `step`, or between steps. Collective; the same on every rank.
  std::vector<Divergence> diverged_parameters();

  const Config& config() const;
  comm::Group& group();
  /// Updates applied so far.
  int64_t steps() const;
  /// The loss scale of the next step; 1 where losses are not scaled.
  double loss_scale() const;
  /// Parameters of the model (Psi), frozen ones included; tied ones count once.
  int64_t parameter_count() const;
  const partition::Layout& layout() const;
  /// Names as the model registered them, in order, tied ones once.
  std::vector<std::string> parameter_names() const;
  /// The same with the dtypes and shapes that the model has them in.
  std::vector<TensorInfo> parameter_infos() const;
  /// Returns the bytes of this rank's states by formula, padding included: equals the ledger's
  /// `parameters`, `gradients` and `optimizer`.
  partition::LayoutMemory memory_formula() const;
  /// The same of what lies in the host tier: the ledger's `host_parameters`, `host_gradients` and
  /// `host_optimizer`.
  partition::LayoutMemory host_memory_formula() const;
  /// Returns the bytes of a step that updates, or of one that was skipped (StepResult::updated),
  /// which lacks the bytes that updates read, write and show. Updates that backward makes and
  /// `step` takes back (update_in_backward) count, though those of units that overflow themselves
  /// are not made.
  TrafficFormula traffic_formula(bool updated = true) const;
  /// This rank's states on disk; all zero where there are none. Updates under way are counted as
  /// far as they are.
  DiskUse disk() const;
  /// Returns the bytes that this rank's device and its host have exchanged since construction.
  HostTraffic host_traffic() const;
  /// The error of a device that has no room left, as LibTorch's operators throw it in a forward
  /// pass, with what is held there and the cheapest change of the configuration that frees enough.
  /// Backward passes and steps throw such an OutOfMemory themselves.
  ///
  ///   try {
  ///     loss = model->forward(x);
  ///   } catch (const c10::OutOfMemoryError& error) {
  ///     throw engine.explained(error);
  ///   }
  OutOfMemory explained(const c10::OutOfMemoryError& error) const;
  /// Stage 3's pager; null where parameters are replicated.
  paging::Pager* pager();
  /// Records the step that begins now, or the next that updates where that does not: which units
  /// its operators use and how much these compute, and which of them reductions follow. Operators
  /// are observed until then, which makes them a little longer. On the thread that trains. Throws
  /// ConfigError where parameters are replicated.
  void record_schedule();
  /// Returns the step that was recorded last, with this rank's bytes, for zero/paging/simulation.h;
  /// null before one was.
  const paging::StepSchedule* schedule() const;

 private:
  friend class Gathered;
  friend PretrainedReport load_pretrained(Engine& engine, const std::string& path,
                                          const PretrainedOptions& options);
  PretrainedReport load_weights_of(const std::string& path, const PretrainedOptions& options,
                                   std::string_view label);
  static std::vector<ParameterGroup> groups_of(const Config& config);
  struct Impl;
  // Until another engine takes the model over; throws Error after that.
  class Held {
   public:
    explicit Held(std::shared_ptr<Impl> impl) : impl_(std::move(impl)) {}
    Impl* operator->() const { return &**this; }
    Impl& operator*() const;
    /// For a scope that may outlive the engine.
    const std::shared_ptr<Impl>& shared() const { return impl_; }
    void reset() { impl_.reset(); }
    /// Never ends it.
    void abandon();

   private:
    std::shared_ptr<Impl> impl_;
  };
  void release();
  Held impl_;
};

}  // namespace zero
