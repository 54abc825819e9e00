#include "zero/engine/zero_redundancy_optimizer.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/zeros_like.h>
#include <c10/core/GradMode.h>
#include <fmt/format.h>
#include <torch/optim/lbfgs.h>
#include <torch/serialize/archive.h>

#include <algorithm>
#include <numeric>
#include <sstream>
#include <string>
#include <utility>

#include "zero/base/error.h"
#include "zero/base/hash.h"
#include "zero/comm/gather_records.h"
#include "zero/engine/owner_buckets.h"

namespace zero {
namespace {

using Groups = ZeroRedundancyOptimizer::ParameterGroups;

constexpr const char* kOtherRank = "zero_redundancy_optimizer_rank";
/// Saved states travel to rank 0 in pieces of this size.
constexpr int64_t kStateBytes = int64_t{16} << 20;

/// A rank's report on one parameter's gradient before a step.
enum Gradient : uint8_t { absent = 0, dense = 1, unusable = 2 };

Groups with_all_options(Groups groups, const torch::optim::Optimizer& made) {
  for (size_t i = 0; i < groups.size(); ++i) {
    groups[i].set_options(made.param_groups()[i].options().clone());
  }
  return groups;
}

/// Returns a dense tensor's elements in memory order.
at::Tensor flat(const at::Tensor& tensor) { return tensor.as_strided({tensor.numel()}, {1}); }

void check_parameter(const at::Tensor& parameter, size_t index) {
  const auto dtype = parameter.scalar_type();
  if (parameter.layout() != at::kStrided || !parameter.is_non_overlapping_and_dense()) {
    throw ConfigError(fmt::format(
        "parameter {} is a sparse, expanded or strided tensor, which cannot be sharded. Make it "
        "dense with contiguous().",
        index));
  }
  if (dtype != at::kFloat && dtype != at::kDouble && dtype != at::kBFloat16 && dtype != at::kHalf) {
    throw ConfigError(
        fmt::format("parameter {} has dtype {}, but it may be Float, Double, BFloat16 or Half",
                    index, c10::toString(dtype)));
  }
}

std::string serialised(const torch::optim::Optimizer& optimizer) {
  torch::serialize::OutputArchive archive;
  optimizer.save(archive);
  std::ostringstream stream;
  archive.save_to(stream);
  return std::move(stream).str();
}

/// Moves the states that `from` holds into `to`.
void move_states(torch::optim::Optimizer& from, torch::optim::Optimizer& to) {
  for (auto& [key, state] : from.state()) {
    if (state) to.state()[key] = std::move(state);
  }
}

}  // namespace

struct ZeroRedundancyOptimizer::Impl {
  struct Parameter {
    at::Tensor tensor;
    size_t group;
    int owner;
  };

  Impl(std::shared_ptr<comm::Group> comm, const Groups& groups, Factory make,
       ZeroRedundancyOptions configuration)
      : group(std::move(comm)),
        factory(std::move(make)),
        options(configuration),
        load(static_cast<size_t>(group->size()), 0),
        buckets(group, options.bucket_bytes) {
    if (options.bucket_bytes <= 0) {
      throw ConfigError(
          fmt::format("bucket_bytes is {}, but it must be above 0", options.bucket_bytes));
    }
    for (size_t i = 0; i < groups.size(); ++i) deal(groups[i].params(), i);
    agree();
    inner = make_inner(owned_by(groups, group->rank()));
    all_groups = with_all_options(groups, *inner);
    if (options.broadcast_parameters) broadcast(0);
  }

  void deal(const std::vector<at::Tensor>& tensors, size_t group_index);
  void agree() const;
  void broadcast(size_t first) const;
  Groups owned_by(const Groups& groups, int rank) const;
  std::unique_ptr<torch::optim::Optimizer> make_inner(const Groups& groups) const;
  void check_groups(const Groups& groups) const;
  /// Returns the parameters to update: those that have a gradient on some rank.
  std::vector<size_t> with_gradient() const;
  void reduce_gradients(const std::vector<size_t>& active);
  void share_parameters(const std::vector<size_t>& active);
  void plan(const std::vector<size_t>& active);
  std::unique_ptr<torch::optim::Optimizer> gather_states(const Groups& groups) const;

  bool owns(size_t i) const { return parameters[i].owner == group->rank(); }

  std::shared_ptr<comm::Group> group;
  Factory factory;
  ZeroRedundancyOptions options;
  std::vector<Parameter> parameters;  // in the order of the groups
  std::vector<int64_t> load;          // bytes dealt to each rank
  OwnerBuckets buckets;
  std::unique_ptr<torch::optim::Optimizer> inner;
  Groups all_groups;  // for the base's constructor
};

void ZeroRedundancyOptimizer::Impl::deal(const std::vector<at::Tensor>& tensors,
                                         size_t group_index) {
  const size_t first = parameters.size();
  for (const auto& tensor : tensors) {
    check_parameter(tensor, parameters.size());
    parameters.push_back({tensor, group_index, 0});
  }
  std::vector<size_t> order(tensors.size());
  std::iota(order.begin(), order.end(), first);
  std::stable_sort(order.begin(), order.end(), [&](size_t a, size_t b) {
    return parameters[a].tensor.nbytes() > parameters[b].tensor.nbytes();
  });
  for (const size_t i : order) {
    const auto least = std::min_element(load.begin(), load.end());
    parameters[i].owner = static_cast<int>(least - load.begin());
    *least += static_cast<int64_t>(parameters[i].tensor.nbytes());
  }
}

void ZeroRedundancyOptimizer::Impl::agree() const {
  Hash own;
  for (const auto& parameter : parameters) {
    own.add(static_cast<int64_t>(parameter.group));
    own.add(static_cast<int64_t>(parameter.tensor.scalar_type()));
    for (const int64_t size : parameter.tensor.sizes()) own.add(size);
    for (const int64_t stride : parameter.tensor.strides()) own.add(stride);
  }
  const auto all = comm::gather_records(*group, own.value(), "the parameters' shapes");
  for (size_t r = 1; r < all.size(); ++r) {
    if (all[r] == all[0]) continue;
    throw ConfigError(fmt::format(
        "the parameters of rank {} differ from those of rank 0 in number, shape, strides or dtype, "
        "but every rank must pass the same model's; this is rank {}, with {} parameters",
        r, group->rank(), parameters.size()));
  }
}

void ZeroRedundancyOptimizer::Impl::broadcast(size_t first) const {
  const c10::AutoGradMode no_gradients(false);
  for (size_t i = first; i < parameters.size(); ++i) {
    group->broadcast(flat(parameters[i].tensor), 0, "initial parameters").wait();
  }
}

Groups ZeroRedundancyOptimizer::Impl::owned_by(const Groups& groups, int rank) const {
  Groups owned = groups;
  for (auto& each : owned) each.params().clear();
  for (const auto& parameter : parameters) {
    if (parameter.owner == rank) owned[parameter.group].params().push_back(parameter.tensor);
  }
  return owned;
}

std::unique_ptr<torch::optim::Optimizer> ZeroRedundancyOptimizer::Impl::make_inner(
    const Groups& groups) const {
  auto made = factory(groups);
  if (!made || made->param_groups().size() != groups.size()) {
    throw ConfigError(fmt::format(
        "the factory of ZeroRedundancyOptimizer must make an optimizer over the {} parameter "
        "groups that it is given",
        groups.size()));
  }
  if (dynamic_cast<torch::optim::LBFGS*>(made.get()) != nullptr) {
    throw ConfigError(
        "LBFGS needs all parameters at once, so its state cannot be sharded. Use it without "
        "ZeroRedundancyOptimizer, or use AdamW, Adam, SGD, Adagrad or RMSprop.");
  }
  return made;
}

void ZeroRedundancyOptimizer::Impl::check_groups(const Groups& groups) const {
  size_t count = 0;
  for (const auto& each : groups) count += each.params().size();
  if (groups.size() == inner->param_groups().size() && count == parameters.size()) return;
  throw ConfigError(fmt::format(
      "param_groups() of a ZeroRedundancyOptimizer has {} groups with {} parameters, but {} groups "
      "with {} were dealt to the ranks. Add parameters with "
      "ZeroRedundancyOptimizer::add_param_group.",
      groups.size(), count, inner->param_groups().size(), parameters.size()));
}

std::vector<size_t> ZeroRedundancyOptimizer::Impl::with_gradient() const {
  std::vector<uint8_t> own;
  for (const auto& parameter : parameters) {
    const auto& gradient = parameter.tensor.grad();
    own.push_back(!gradient.defined()                 ? absent
                  : gradient.layout() == at::kStrided ? dense
                                                      : unusable);
  }
  const auto all = comm::gather_arrays<uint8_t>(*group, own, "which parameters have gradients");
  std::vector<size_t> active;
  for (size_t i = 0; i < parameters.size(); ++i) {
    bool any = false;
    for (int r = 0; r < group->size(); ++r) {
      const auto said = all[static_cast<size_t>(r) * own.size() + i];
      if (said == unusable) {
        throw ConfigError(fmt::format(
            "parameter {} of shape {} has a sparse gradient on rank {}, but "
            "ZeroRedundancyOptimizer needs dense ones. Make the embedding with sparse(false).",
            i, fmt::join(parameters[i].tensor.sizes(), " x "), r));
      }
      any = any || (said == dense && (options.average_gradients || r == parameters[i].owner));
    }
    if (any) active.push_back(i);
  }
  return active;
}

void ZeroRedundancyOptimizer::Impl::plan(const std::vector<size_t>& active) {
  std::vector<OwnerBuckets::Item> items;
  items.reserve(active.size());
  for (const size_t i : active) {
    const auto& tensor = parameters[i].tensor;
    items.push_back({tensor.scalar_type(), tensor.numel(), parameters[i].owner});
  }
  buckets.plan(items);
}

void ZeroRedundancyOptimizer::Impl::reduce_gradients(const std::vector<size_t>& active) {
  if (group->size() == 1) return;
  std::vector<at::Tensor> gradients;
  std::vector<std::pair<size_t, at::Tensor>> rearranged;
  gradients.reserve(active.size());
  for (const size_t i : active) {
    const auto& tensor = parameters[i].tensor;
    auto& gradient = tensor.mutable_grad();
    if (!gradient.defined()) {
      // A parameter that another rank owns gets zeros that last for this step only.
      const auto zeros = at::zeros_like(tensor);
      if (owns(i)) gradient = zeros;
      gradients.push_back(flat(zeros));
    } else if (gradient.strides() == tensor.strides()) {
      gradients.push_back(flat(gradient));
    } else {
      // The gradient keeps its strides, since LibTorch's bf16 operators round by them.
      const auto copy = at::empty_like(tensor).copy_(gradient);
      if (owns(i)) rearranged.emplace_back(i, copy);
      gradients.push_back(flat(copy));
    }
  }
  buckets.reduce(gradients);
  for (const auto& [i, copy] : rearranged) parameters[i].tensor.mutable_grad().copy_(copy);
}

void ZeroRedundancyOptimizer::Impl::share_parameters(const std::vector<size_t>& active) {
  std::vector<at::Tensor> tensors;
  tensors.reserve(active.size());
  for (const size_t i : active) tensors.push_back(flat(parameters[i].tensor));
  buckets.share(tensors);
}

std::unique_ptr<torch::optim::Optimizer> ZeroRedundancyOptimizer::Impl::gather_states(
    const Groups& groups) const {
  const bool receives = group->rank() == 0;
  const auto own = receives ? std::string() : serialised(*inner);
  const auto sizes = comm::gather_records(*group, static_cast<int64_t>(own.size()),
                                          "sizes of the optimizers' states");
  auto whole = receives ? make_inner(groups) : nullptr;
  auto piece = at::empty({kStateBytes}, at::kByte);
  auto* bytes = reinterpret_cast<char*>(piece.mutable_data_ptr<uint8_t>());  // NOLINT
  for (int r = 1; r < group->size(); ++r) {
    std::string state;
    const int64_t size = sizes[static_cast<size_t>(r)];
    for (int64_t from = 0; from < size; from += kStateBytes) {
      const int64_t count = std::min(kStateBytes, size - from);
      if (r == group->rank())
        own.copy(bytes, static_cast<size_t>(count), static_cast<size_t>(from));
      group->broadcast(piece.narrow(0, 0, count), r, "the optimizer's state").wait();
      if (receives) state.append(bytes, static_cast<size_t>(count));
    }
    if (!receives) continue;
    // An optimizer over that rank's parameters, which this rank has too, turns the bytes into
    // states.
    auto theirs = make_inner(owned_by(groups, r));
    torch::serialize::InputArchive archive;
    archive.load_from(state.data(), state.size());
    theirs->load(archive);
    move_states(*theirs, *whole);
  }
  if (receives) {
    for (const auto& [key, state] : inner->state()) {
      if (state) whole->state()[key] = state->clone();
    }
  }
  return whole;
}

ZeroRedundancyOptimizer::ZeroRedundancyOptimizer(std::unique_ptr<Impl> impl)
    : Optimizer(impl->all_groups, impl->inner->defaults().clone()), impl_(std::move(impl)) {
  impl_->all_groups.clear();
}

ZeroRedundancyOptimizer::ZeroRedundancyOptimizer(std::shared_ptr<comm::Group> group,
                                                 const ParameterGroups& groups, Factory factory,
                                                 ZeroRedundancyOptions options)
    : ZeroRedundancyOptimizer(
          std::make_unique<Impl>(std::move(group), groups, std::move(factory), options)) {}

ZeroRedundancyOptimizer::ZeroRedundancyOptimizer(std::shared_ptr<comm::Group> group,
                                                 std::vector<at::Tensor> parameters,
                                                 Factory factory, ZeroRedundancyOptions options)
    : ZeroRedundancyOptimizer(std::move(group), ParameterGroups{{std::move(parameters)}},
                              std::move(factory), options) {}

ZeroRedundancyOptimizer::~ZeroRedundancyOptimizer() = default;

at::Tensor ZeroRedundancyOptimizer::step(LossClosure closure) {
  at::Tensor loss;
  if (closure) {
    const c10::AutoGradMode gradients(true);
    loss = closure();
  }
  const c10::AutoGradMode no_gradients(false);
  impl_->check_groups(param_groups_);
  const auto active = impl_->with_gradient();
  impl_->plan(active);
  if (impl_->options.average_gradients) impl_->reduce_gradients(active);
  for (size_t i = 0; i < param_groups_.size(); ++i) {
    impl_->inner->param_groups()[i].set_options(param_groups_[i].options().clone());
  }
  impl_->inner->step();
  impl_->share_parameters(active);
  return loss;
}

void ZeroRedundancyOptimizer::add_param_group(const torch::optim::OptimizerParamGroup& group) {
  impl_->check_groups(param_groups_);
  Optimizer::add_param_group(group);
  const auto parameters = impl_->parameters;
  const auto load = impl_->load;
  try {
    impl_->deal(group.params(), param_groups_.size() - 1);
    impl_->agree();
    if (impl_->options.broadcast_parameters) impl_->broadcast(parameters.size());
    auto grown = impl_->make_inner(impl_->owned_by(param_groups_, impl_->group->rank()));
    move_states(*impl_->inner, *grown);
    impl_->inner = std::move(grown);
  } catch (...) {  // a group that is refused leaves the others as they were
    param_groups_.pop_back();
    impl_->parameters = parameters;
    impl_->load = load;
    throw;
  }
}

void ZeroRedundancyOptimizer::save(torch::serialize::OutputArchive& archive) const {
  const auto whole = impl_->gather_states(param_groups_);
  if (whole) {
    whole->save(archive);
  } else {
    archive.write(kOtherRank, c10::IValue(static_cast<int64_t>(impl_->group->rank())));
  }
}

void ZeroRedundancyOptimizer::load(torch::serialize::InputArchive& archive) {
  c10::IValue rank;
  if (archive.try_read(kOtherRank, rank)) {
    throw CheckpointError(fmt::format(
        "this archive of a ZeroRedundancyOptimizer is rank {}'s and holds no state. Load the one "
        "that rank 0 saved, on every rank.",
        rank.toInt()));
  }
  auto whole = impl_->make_inner(param_groups_);
  try {
    whole->load(archive);
  } catch (const c10::Error& error) {
    throw CheckpointError(fmt::format("the archive does not hold this optimizer's state: {}",
                                      error.what_without_backtrace()));
  }
  auto& own = impl_->inner->state();
  own.clear();
  for (const auto& parameter : impl_->parameters) {
    if (parameter.owner != impl_->group->rank()) continue;
    void* key = parameter.tensor.unsafeGetTensorImpl();
    const auto state = whole->state().find(key);
    if (state != whole->state().end() && state->second) own[key] = std::move(state->second);
  }
  for (size_t i = 0; i < param_groups_.size(); ++i) {
    param_groups_[i].set_options(whole->param_groups()[i].options().clone());
  }
}

torch::optim::Optimizer& ZeroRedundancyOptimizer::inner() { return *impl_->inner; }

int ZeroRedundancyOptimizer::owner(size_t group, size_t index) const {
  const auto key = param_groups_.at(group).params().at(index).unsafeGetTensorImpl();
  for (const auto& parameter : impl_->parameters) {
    if (parameter.tensor.unsafeGetTensorImpl() == key) return parameter.owner;
  }
  throw ConfigError(fmt::format("parameter {} of group {} was not dealt to a rank", index, group));
}

}  // namespace zero
