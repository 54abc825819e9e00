#include "zero/engine/engine.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/Context.h>
#include <ATen/ops/empty.h>
#include <c10/core/GradMode.h>
#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <set>
#include <utility>

#include "zero/base/error.h"
#include "zero/base/host_allocator.h"
#include "zero/base/host_memory.h"
#include "zero/comm/gather_records.h"
#include "zero/engine/engine_impl.h"
#include "zero/engine/flat.h"
#include "zero/engine/tiers.h"

namespace zero {

namespace {

// FNV-1a: an order-sensitive fingerprint that is the same in every process.
uint64_t hash(uint64_t seed, std::string_view text) {
  for (const char c : text) seed = (seed ^ static_cast<uint8_t>(c)) * 1099511628211ULL;
  return seed;
}

bool dense(const at::Tensor& tensor) { return tensor.is_non_overlapping_and_dense(); }

}  // namespace

Engine::Impl::Impl(NamedTensors tensors, std::vector<ParameterGroup> groups, Config configuration,
                   std::shared_ptr<comm::Group> ranks)
    : config(std::move(configuration)), group(std::move(ranks)) {
  config.validate();
  const c10::NoGradGuard no_grad;
  take_names(tensors);
  assign_groups(groups);
  agree_on_model();
  broadcast_values(tensors);
  lay_out();
  place();
  check_budget();
  limit_device();
  move_in(tensors);
}

// Parameters in registration order, tied ones once, each with a dense storage of its own.
void Engine::Impl::take_names(NamedTensors tensors) {
  std::unordered_map<const c10::TensorImpl*, int64_t> seen;
  std::set<const c10::StorageImpl*> storages;
  for (auto& [name, tensor] : tensors.parameters) {
    if (!tensor.defined()) continue;
    if (const auto found = seen.find(tensor.unsafeGetTensorImpl()); found != seen.end()) {
      index[name] = found->second;
      continue;
    }
    if (!tensor.device().is_cpu()) {
      throw ConfigError(
          fmt::format("Parameter '{}' is on device {}; this build trains on CPUs. Move the module "
                      "to the CPU before constructing the Engine.",
                      name, tensor.device().str()));
    }
    if (!at::isFloatingType(tensor.scalar_type()) || tensor.scalar_type() == at::kDouble) {
      throw ConfigError(
          fmt::format("Parameter '{}' has dtype {}; the engine trains float, bfloat16 and half. "
                      "Convert it, or register it as a buffer.",
                      name, c10::toString(tensor.scalar_type())));
    }
    const auto& storage = tensor.storage();
    const bool own = dense(tensor) && tensor.storage_offset() == 0 &&
                     storage.nbytes() == tensor.nbytes() &&
                     storages.insert(storage.unsafeGetStorageImpl()).second;
    if (!own) {
      tensor.set_data(dense(tensor) ? tensor.detach().clone(at::MemoryFormat::Preserve)
                                    : tensor.detach().contiguous().clone());
    }
    const auto position = static_cast<int64_t>(parameters.size());
    seen[tensor.unsafeGetTensorImpl()] = position;
    index[name] = position;
    names.push_back(name);
    parameters.push_back(tensor);
  }
  if (parameters.empty())
    throw ConfigError("The model has no parameters: there is nothing to train.");
}

void Engine::Impl::assign_groups(const std::vector<ParameterGroup>& groups) {
  constexpr size_t kNone = static_cast<size_t>(-1);
  group_of.assign(parameters.size(), kNone);
  size_t rest = kNone;
  if (groups.empty())
    throw ConfigError("The Engine was given no parameter group: pass one, or an optimizer.");
  for (size_t g = 0; g < groups.size(); ++g) {
    optim::check(groups[g].optimizer);
    const double lr =
        std::visit([](const auto& optimizer) { return optimizer.lr; }, groups[g].optimizer);
    optimizer_groups.push_back({groups[g].optimizer, lr});
    if (groups[g].names.empty()) {
      if (rest != kNone)
        throw ConfigError(fmt::format(
            "Parameter groups {} and {} both name no parameters; only one may take the rest.", rest,
            g));
      rest = g;
    }
    for (const auto& name : groups[g].names) {
      auto& chosen = group_of[static_cast<size_t>(index_of(name))];
      if (chosen != kNone)
        throw ConfigError(fmt::format("Parameter '{}' is in groups {} and {}.", name, chosen, g));
      chosen = g;
    }
  }
  for (size_t p = 0; p < parameters.size(); ++p) {
    if (group_of[p] != kNone) continue;
    if (rest == kNone && parameters[p].requires_grad()) {
      throw ConfigError(
          fmt::format("Parameter '{}' is in no parameter group. Name it in one, add a group "
                      "without names, or freeze it.",
                      names[p]));
    }
    group_of[p] = rest == kNone ? 0 : rest;
  }
}

int64_t Engine::Impl::index_of(std::string_view name) const {
  if (const auto found = index.find(std::string(name)); found != index.end()) return found->second;
  std::vector<std::string> known;
  for (const auto& entry : index) known.push_back(entry.first);
  throw ConfigError(
      fmt::format("The model has no parameter '{}'.{}", name, did_you_mean(name, known)));
}

// Every rank must hold the same model and configuration, or their collectives would not match.
void Engine::Impl::agree_on_model() {
  std::vector<std::string> lines{config.dump()};
  for (const auto& each : optimizer_groups) lines.push_back(dump(each.optimizer));
  for (size_t p = 0; p < parameters.size(); ++p) {
    lines.push_back(
        fmt::format("{} {} ({}) {} group {}", names[p], c10::toString(parameters[p].scalar_type()),
                    fmt::join(parameters[p].sizes(), ", "),
                    parameters[p].requires_grad() ? "trainable" : "frozen", group_of[p]));
  }
  auto mine = at::empty({2}, at::kLong);
  uint64_t all_lines = 14695981039346656037ULL;
  for (const auto& line : lines) all_lines = hash(all_lines, line);
  mine[0] = static_cast<int64_t>(all_lines);
  mine[1] = static_cast<int64_t>(parameters.size());
  auto all = at::empty({2 * group->size()}, at::kLong);
  group->all_gather_control(all, mine, "the model's plan");
  for (int rank = 1; rank < group->size(); ++rank) {
    if (all[2 * rank].item<int64_t>() == all[0].item<int64_t>()) continue;
    throw ConfigError(fmt::format(
        "Rank {} was given another model or configuration than rank 0 ({} parameters there, {} on "
        "rank 0; this is rank {} with {}). Names, shapes, dtypes, order, frozen parameters, "
        "optimizers and the configuration must be the same on all ranks.",
        rank, all[2 * rank + 1].item<int64_t>(), all[1].item<int64_t>(), group->rank(),
        parameters.size()));
  }
}

void Engine::Impl::broadcast_values(const NamedTensors& tensors) {
  if (group->size() > 1) {
    for (size_t p = 0; p < parameters.size(); ++p)
      group->broadcast(flat_view(parameters[p]), 0, names[p]).wait();
    for (const auto& [name, buffer] : tensors.buffers) {
      if (!buffer.defined() || buffer.numel() == 0) continue;
      auto value = buffer.detach().contiguous().clone();
      group->broadcast(value.view({-1}), 0, name).wait();
      buffer.detach().copy_(value);
    }
  }
  if (config.seed_by_rank && group->rank() > 0) {
    auto generator = at::detail::getDefaultCPUGenerator();
    const std::lock_guard lock(generator.mutex());
    generator.set_current_seed(generator.current_seed() + static_cast<uint64_t>(group->rank()));
  }
}

void Engine::Impl::lay_out() {
  std::vector<partition::Parameter> described;
  std::vector<at::ScalarType> dtypes;
  for (size_t p = 0; p < parameters.size(); ++p) {
    const auto dtype = config.bf16 && parameters[p].scalar_type() == at::kFloat
                           ? at::kBFloat16
                           : parameters[p].scalar_type();
    // Of one dtype, trainable or not, and with the same optimizer states; hyper-parameters may
    // differ within a unit.
    const auto& optimizer_of = optimizer_groups[group_of[p]].optimizer;
    const auto states =
        static_cast<int64_t>(optimizer_of.index() * 4 + optim::state_names(optimizer_of).size());
    const int64_t kind =
        (states * 64 + static_cast<int64_t>(dtype)) * 2 + (parameters[p].requires_grad() ? 1 : 0);
    described.push_back(
        {names[p], parameters[p].numel(), static_cast<int64_t>(c10::elementSize(dtype)), kind});
    dtypes.push_back(dtype);
  }
  layout =
      std::make_unique<partition::Layout>(std::move(described), group->size(), config.unit_bytes);
  for (int64_t u = 0; u < layout->unit_count(); ++u) {
    const auto first = static_cast<size_t>(layout->unit(u).segments.front().parameter);
    unit_dtypes.push_back(dtypes[first]);
  }
}

StepSize Engine::Impl::step_size() const {
  StepSize size{.parameters = layout->content(), .ranks = group->size()};
  for (const auto& parameter : parameters)
    size.largest_parameter = std::max(size.largest_parameter, parameter.numel());
  return size;
}

void Engine::Impl::place() {
  auto size = step_size();
  size.available = memory_of_rank(*group);
  config = choose_tiers(std::move(config), size).config;
  // One rank has nobody to shard with: every state is whole on it. What is elsewhere comes and goes
  // all the same.
  const bool pages = group->size() > 1 || config.offload_param.device != OffloadDevice::none ||
                     config.offload_optimizer.device == OffloadDevice::cpu ||
                     config.offload_optimizer.on_disk_with_gradients() || config.update_in_backward;
  placement = partition::placement_of_stage(pages ? config.stage : 0);
  choose_tiers_of_units();
  check_memory(size.available);
}

int64_t Engine::Impl::bytes_of(int64_t elements) const {
  const int64_t element_bytes = config.bf16 ? 2 : 4;
  return elements > INT64_MAX / element_bytes ? INT64_MAX : elements * element_bytes;
}

partition::Range Engine::Impl::owned_range(int64_t unit) const {
  return partition::owned_range(*layout, unit, placement, group->rank());
}

// All units but the first ones that hold no more than `may_stay` of this rank's elements. Every
// unit is used as often as any other; but backward reduces the gradients of the first ones last,
// and the next forward pass needs them first, so there an update that waits for a disk is waited
// for.
std::vector<Tier> Engine::Impl::beyond(int64_t may_stay, Tier tier) const {
  std::vector<Tier> chosen;
  int64_t stay = 0;
  for (int64_t u = 0; u < layout->unit_count(); ++u) {
    const int64_t numel = owned_range(u).size();
    const bool stays = stay + numel <= may_stay;
    if (stays) stay += numel;
    chosen.push_back(stays ? Tier::device : tier);
  }
  return chosen;
}

void Engine::Impl::choose_tiers_of_units() {
  const auto tier_of = [](OffloadDevice device) {
    return device == OffloadDevice::nvme  ? Tier::disk
           : device == OffloadDevice::cpu ? Tier::host
                                          : Tier::device;
  };
  const auto& param = config.offload_param;
  const auto& states = config.offload_optimizer;
  int64_t all = 0;
  for (int64_t u = 0; u < layout->unit_count(); ++u) all += owned_range(u).size();
  const auto kept = static_cast<int64_t>(std::floor((1 - states.ratio) * static_cast<double>(all)));
  const auto parameters_at =
      beyond(param.device == OffloadDevice::nvme ? param.max_in_cpu : 0, tier_of(param.device));
  const auto optimizer_at = beyond(kept, tier_of(states.device));
  const bool gradients_on_disk =
      states.on_disk_with_gradients() && placement.gradients && !updates_in_backward();
  for (size_t u = 0; u < optimizer_at.size(); ++u) {
    // To the host they go with what they update; to a disk they need not.
    const bool on_host = optimizer_at[u] == Tier::host;
    tiers.push_back({.parameters = parameters_at[u],
                     .gradients = gradients_on_disk ? Tier::disk
                                  : on_host         ? Tier::host
                                                    : Tier::device,
                     .optimizer = optimizer_at[u]});
  }
  check_split();
}

StateForm Engine::Impl::form_of(int64_t unit) const {
  const auto first = static_cast<size_t>(layout->unit(unit).segments.front().parameter);
  const auto dtype = unit_dtypes[static_cast<size_t>(unit)];
  return {.dtype = dtype,
          .parameters_at = tiers_of(unit).parameters,
          .states_at = tiers_of(unit).optimizer,
          .split = config.split_master_weights && dtype == at::kBFloat16 &&
                   parameters[first].requires_grad()};
}

void Engine::Impl::check_split() const {
  for (int64_t u = 0; u < layout->unit_count(); ++u) {
    const auto form = form_of(u);
    if (!form.split || form.states_at == Tier::disk || form.states_at == form.parameters_at)
      continue;
    throw ConfigError(
        "bf16.split_master_weights needs each parameter and its optimizer states in the same "
        "place, "
        "or the states on disk, since the parameter is half of its master weight. Give "
        "offload_param.device and offload_optimizer.device the same value (with ratio 1 and "
        "max_in_cpu 0), or switch split_master_weights off.");
  }
}

std::optional<at::ScalarType> Engine::Impl::gradient_on_disk(int64_t unit) const {
  if (tiers_of(unit).gradients != Tier::disk) return std::nullopt;
  return config.accumulates_fp32() ? at::kFloat : unit_dtypes[static_cast<size_t>(unit)];
}

// Collective where states live on disk: a rank whose disk cannot hold them fails all.
std::unique_ptr<StateStream> Engine::Impl::make_disk() const {
  const auto& optimizer_section = config.offload_optimizer;
  const bool optimizer_there = optimizer_section.device == OffloadDevice::nvme;
  if (!optimizer_there && config.offload_param.device != OffloadDevice::nvme) return nullptr;
  std::vector<StateStream::Unit> units;
  for (int64_t u = 0; u < layout->unit_count(); ++u) {
    const auto first = static_cast<size_t>(layout->unit(u).segments.front().parameter);
    const auto states = optim::state_names(optimizer_groups[group_of[first]].optimizer).size();
    units.push_back(OptimizerStore::arrays_on_disk(
        owned_range(u).size(), form_of(u), parameters[first].requires_grad(),
        static_cast<int64_t>(states), {.gradients = gradient_on_disk(u), .doubled = hides()}));
  }
  const StateStream::Options options{
      .folders = config.nvme_folders(),
      .buffer_count = optimizer_section.buffer_count,
      .read_ahead = optimizer_section.pipeline_read,
      .write_behind = optimizer_section.pipeline_write,
      .file = {.block_bytes = config.aio.block_size,
               .queue_depth = static_cast<int>(config.aio.queue_depth),
               .uring = config.aio.use_io_uring,
               .checksums = config.aio.checksums}};
  std::unique_ptr<StateStream> made;
  std::string failure;
  try {
    made = std::make_unique<StateStream>(std::move(units), options, group->ledger());
  } catch (const StoreError& error) {
    failure = error.what();
  }
  const auto failed = comm::first_failure(*group, !failure.empty(), "files for states");
  if (!failure.empty()) throw StoreError(failure);
  if (failed) {
    throw StoreError(fmt::format(
        "Rank {} could not make its file for states; its own message says why.", *failed));
  }
  return made;
}

// From here on the model's states live in the stores.
void Engine::Impl::move_in(NamedTensors& tensors) {
  std::vector<bool> trainable;
  for (int64_t u = 0; u < layout->unit_count(); ++u)
    trainable.push_back(parameters[static_cast<size_t>(layout->unit(u).segments.front().parameter)]
                            .requires_grad());
  disk = make_disk();
  updating.assign(unit_dtypes.size(), 0);
  std::vector<Tier> parameters_at;
  for (const auto& of_unit : tiers) parameters_at.push_back(of_unit.parameters);
  // Every rank has a device of its own: where there is one, units are copied to it.
  const bool shares = config.device_memory == 0 || group->size() == 1;
  store = std::make_unique<ParameterStore>(
      *layout, unit_dtypes, *group,
      ParameterStore::Options{
          .placement = placement,
          .live_bytes = spends_budget() ? 0 : bytes_of(config.max_live_parameters),
          .prefetch_bytes = bytes_of(config.prefetch_bucket_size),
          .one_sided = config.one_sided_gather && shares,
          .tiers = std::move(parameters_at),
          .disk = config.offload_param.device == OffloadDevice::nvme ? disk.get() : nullptr,
          .complete =
              [this](int64_t unit, bool beforehand) {
                if (delayed || updating[static_cast<size_t>(unit)] == 0) return true;
                if (beforehand && !queue->done(unit)) return false;
                finish_update(unit);
                return true;
              },
          .host = &link,
          .read_ahead_bytes =
              config.offload_param.buffer_count * (config.unit_bytes / group->size()),
          .slice_bytes = config.unit_bytes / group->size()});
  std::vector<OptimizerStore::Unit> units;
  for (int64_t u = 0; u < layout->unit_count(); ++u) {
    units.push_back({form_of(u),
                     trainable[static_cast<size_t>(u)] ? owned_range(u) : partition::Range{},
                     store->on_disk(u) ? at::Tensor() : store->owned(u), gradient_on_disk(u)});
  }
  optimizer =
      std::make_unique<OptimizerStore>(*layout, optimizer_groups, group_of, std::move(units),
                                       group->ledger(), link, disk.get(), hides());
  for (size_t p = 0; p < parameters.size(); ++p) {
    const auto i = static_cast<int64_t>(p);
    auto& parameter = parameters[p];
    const int64_t u = layout->unit_of(i);
    const auto dtype = store->dtype(u);
    const auto original = flat_view(parameter);
    // The master weights come from the original values, not from the rounded ones.
    if (parameter.requires_grad() && optimizer->own_master(u)) optimizer->set_master(i, original);
    if (parameter.scalar_type() != dtype) parameter.set_data(optimizer->narrowed(u, parameter));
    store->take(i, parameter);
  }
  for (int64_t u = 0; u < layout->unit_count(); ++u) optimizer->follow(u);
  if (config.bf16) {
    for (auto& [name, buffer] : tensors.buffers) {
      if (buffer.defined() && buffer.scalar_type() == at::kFloat)
        buffer.set_data(buffer.detach().to(at::kBFloat16));
    }
  }
  for (const auto& [name, buffer] : tensors.buffers) {
    if (buffer.defined()) buffers.emplace_back(name, buffer);
  }
  const bool gradients_there = std::any_of(tiers.begin(), tiers.end(), [](const Tiers& of_unit) {
    return of_unit.gradients == Tier::disk;
  });
  bool late = false;
  for (int64_t u = 0; u < layout->unit_count(); ++u) late = late || updates_in_forward(u);
  if (hides() || late) {
    queue = std::make_unique<UpdateQueue>([this] {
      if (!disk) return;
      disk->settle();
      disk->end_step();
    });
    if (disk) disk->run_beside([this](int64_t index) { return queue->upcoming(index); });
  }
  std::function<void(int64_t, at::Tensor)> update;
  if (updates_in_backward()) {
    all_present.assign(parameters.size(), 1);
    update = [this](int64_t unit, at::Tensor slice) { update_beside(unit, std::move(slice)); };
  }
  std::vector<bool> gradients_on_host;
  for (const auto& of_unit : tiers) gradients_on_host.push_back(of_unit.gradients == Tier::host);
  gradients = std::make_unique<GradientStore>(
      *layout, parameters, trainable, *group,
      GradientStore::Options{.placement = placement,
                             .accumulate_fp32 = config.accumulates_fp32(),
                             .add_in_buckets = config.layer_major_accumulation,
                             .unit_bytes = config.unit_bytes,
                             .disk = gradients_there ? disk.get() : nullptr,
                             .on_host = std::move(gradients_on_host),
                             .host = &link,
                             .doubled = delays(),
                             .update = std::move(update)});
  store->start(parameters);
  for (const auto& parameter : parameters)
    versions.push_back(static_cast<int64_t>(parameter._version()));
  if (spends_budget()) {
    // What the construction held is not what a step holds.
    group->ledger()->reset_peaks();
    HostAllocator::instance().reset_peaks();
  }
  if (limit) {
    // Ranks that are threads share the tensors' allocator: none is capped while another still holds
    // the model twice.
    group->barrier("start of the engine");
    limit->include_tensors();
  }
}

Engine::Engine(NamedTensors tensors, std::vector<ParameterGroup> groups, Config config,
               std::shared_ptr<comm::Group> group)
    : impl_(std::make_unique<Impl>(std::move(tensors), std::move(groups), std::move(config),
                                   std::move(group))) {}

// What a forked child has is a copy: threads, files, shared memory and peers are its parent's.
Engine::~Engine() {
  if (!impl_->owner.here()) (void)impl_.release();
}

std::vector<ParameterGroup> Engine::groups_of(const Config& config) {
  if (!config.optimizer) {
    throw ConfigError(
        "The configuration has no `optimizer` section, and the Engine was given no optimizer. Add "
        "{\"optimizer\": {\"type\": \"AdamW\", \"params\": {\"lr\": 3e-4}}}, or pass zero::AdamW{} "
        "to the constructor.");
  }
  return {ParameterGroup{{}, *config.optimizer}};
}

void Engine::backward(const at::Tensor& loss) {
  if (!loss.defined() || loss.numel() != 1) {
    throw Error(fmt::format("Engine::backward takes a loss of one element; this one has {}.",
                            loss.defined() ? loss.numel() : 0));
  }
  if (!loss.requires_grad()) {
    throw Error(
        "Engine::backward was given a loss that depends on no parameter that requires a gradient "
        "(computed under NoGradGuard or InferenceMode?).");
  }
  impl_->collect(false, {}, [&] { loss.backward(); });
}

void Engine::accumulate(int64_t micro_batches,
                        const std::function<void(const std::function<void()>& layer_done)>& passes,
                        const std::vector<at::Tensor>& shared) {
  auto& impl = *impl_;
  if (!impl.config.layer_major_accumulation) {
    throw ConfigError(
        "Engine::accumulate needs layer_major_accumulation to be true in the configuration: it "
        "decides where gradients of several micro-batches add up.");
  }
  const int64_t left = impl.config.gradient_accumulation_steps - impl.micro_batches;
  if (micro_batches < 1 || micro_batches > left) {
    throw ConfigError(
        fmt::format("Engine::accumulate was given {} micro-batches; this step has {} left of "
                    "gradient_accumulation_steps {}.",
                    micro_batches, left, impl.config.gradient_accumulation_steps));
  }
  std::vector<int64_t> indices;
  for (const auto& tensor : shared) {
    const auto found = std::find_if(impl.parameters.begin(), impl.parameters.end(),
                                    [&](const at::Tensor& p) { return p.is_same(tensor); });
    if (found == impl.parameters.end())
      throw ConfigError("Engine::accumulate: a shared tensor is no parameter of this model.");
    indices.push_back(found - impl.parameters.begin());
  }
  impl.collect(true, indices, [&] { passes([&] { impl.gradients->release(); }); });
  impl.micro_batches += micro_batches - 1;
}

void Engine::Impl::collect(bool holds, const std::vector<int64_t>& shared,
                           const std::function<void()>& passes) {
  if (auto* pages = store->pager()) pages->check_storages();
  // Of units that this forward pass has not used; where it is to come yet (`holds`), after it.
  if (!delayed && (!holds || updates_in_backward())) finish_updates();
  gradients->begin_backward(holds, shared);
  if (updates_in_backward()) optimizer->begin_update();
  try {
    passes();
    if (!delayed) finish_updates();  // of units that these passes have not used either
    gradients->end_backward();
  } catch (...) {
    gradients->abandon_backward();
    if (!updates_in_backward()) {
      gradients->clear();
      micro_batches = 0;
    }
    throw;
  }
}

// The square root of the sum over all units and ranks, in that order, of each slice's sum of
// squares: the same at every stage.
double Engine::Impl::global_norm(bool& finite) {
  const int64_t units = layout->unit_count();
  auto mine = at::zeros({units + 1}, at::kDouble);
  auto* partial = mine.mutable_data_ptr<double>();
  for (int64_t u = 0; u < units; ++u) {
    if (!gradients->trainable(u)) continue;
    const auto& segments = layout->unit(u).segments;
    const bool any = std::any_of(segments.begin(), segments.end(), [&](const auto& segment) {
      return gradients->present()[static_cast<size_t>(segment.parameter)] != 0;
    });
    if (!any) continue;
    const auto norm = gradients->norm(u);
    partial[u] = norm.sum;
    if (!norm.finite) partial[units] = 1;
  }
  auto all = at::empty({group->size() * mine.numel()}, at::kDouble);
  // Also the point after which no rank reads the published parameters any more: each has ended its
  // backward pass.
  group->all_gather_control(all, mine, "gradient norm");
  const auto* theirs = all.const_data_ptr<double>();
  double sum = 0;
  finite = true;
  for (int64_t u = 0; u < units; ++u) {
    for (int rank = 0; rank < group->size(); ++rank) sum += theirs[rank * (units + 1) + u];
  }
  for (int rank = 0; rank < group->size(); ++rank)
    finite = finite && theirs[rank * (units + 1) + units] == 0;
  return std::sqrt(sum);
}

void Engine::Impl::commit_writes() {
  if (auto* pages = store->pager()) {
    for (const int64_t i : pages->take_dirty()) {
      const int64_t u = layout->unit_of(i);
      const auto& segment = layout->segment_of(i);
      const auto dtype = store->dtype(u);
      auto values =
          at::from_blob(pages->data(u), {layout->unit(u).numel}, at::TensorOptions().dtype(dtype))
              .narrow(0, segment.offset, segment.numel);
      store->write(i, values);
      if (gradients->trainable(u)) optimizer->refresh_master(i);
    }
    return;
  }
  for (size_t p = 0; p < parameters.size(); ++p) {
    const auto version = static_cast<int64_t>(parameters[p]._version());
    if (std::exchange(versions[p], version) == version) continue;
    const auto i = static_cast<int64_t>(p);
    if (gradients->trainable(layout->unit_of(i))) optimizer->refresh_master(i);
  }
}

// Gathered units are about to be out of date.
void Engine::Impl::invalidate() {
  if (auto* pages = store->pager()) {
    pages->invalidate();
    store->forget();
  }
}

// Shows the owned elements of a unit to all: at stage 3 always, since a frozen parameter may have
// been written too.
void Engine::Impl::publish(int64_t unit) {
  if (placement.parameters || gradients->trainable(unit)) store->publish(unit);
}

// Note [Update in backward]
// Without clipping a unit can be updated as soon as its gradient is reduced. A thread does so
// beside the rest of backward, above all where states are on disk: then their bytes pass while the
// other units' gradients are computed. The weights are still needed by this rank's backward, if
// they are shared, and by its peers', so new ones stay hidden until `step`, as with a delayed
// update.
//
// A few slices wait for their turn. Of units that may be updated in the next forward pass as many
// more as find room in memory that activations have left: backward frees that as it goes, and the
// next forward pass, which needs it again, completes the updates as it goes. What was held at most
// before the first of them is the measure; the peak so far would grow by what comes on top of them.
void Engine::Impl::update_beside(int64_t unit, at::Tensor slice) {
  constexpr int64_t kUpdates = 4;  // under way, without memory of activations
  const auto bytes = static_cast<int64_t>(slice.nbytes());
  queue->push(unit, [this, unit, slice = std::move(slice)] {
    optimizer->update(unit, slice, mean_scale(), all_present);
  });
  const auto held = HostAllocator::instance().held();
  if (held_before_updates == 0) held_before_updates = held.peak;
  if (updates_in_forward(unit) && held_before_updates - held.current > bytes) return;
  std::optional<comm::ClockedScope> counted;
  if (disk) counted.emplace(disk->clock());
  queue->wait_for_fewer(std::max(kUpdates, queue->size()));
}

double Engine::Impl::mean_scale() const {
  return 1.0 / static_cast<double>(group->size() * config.gradient_accumulation_steps);
}

// Note [Delayed update]
// Step i's update may run while step i + 1 computes (ZeRO-Offload, 2101.06840, section 5.2): then
// step i + 1 uses the weights that the gradients of step i - 1 gave. The update leaves the new
// parameters hidden, in memory of their own (which held those of before: it does not read the
// model's) or in a second copy on disk, and reads gradients that were set apart; the next step
// waits for it before it changes anything. Reading, writing or saving states completes an update
// under way first.
//
// Note [Update in forward]
// Nobody needs the new parameters of a unit before the next forward pass gathers it. Where they lie
// on disk each rank reads its own slice for that, so it can wait for its own update then, and no
// rank needs to tell another: the disk works on the optimizer's states while the first layers
// compute already, with clipping too. The results are those of an update within `step`. What the
// next backward pass will change (gradients on disk, learning rates) is read by then: it begins by
// completing the updates of units that were not used. Units in memory are updated within `step`.
void Engine::Impl::start_update(double scale, bool delayed) {
  gradients->detach();
  if (!updates_in_backward()) optimizer->begin_update();
  updating_present = gradients->present();
  this->delayed = delayed;
  const auto trainable = [&](int64_t u) { return gradients->trainable(u); };
  if (!queue) {
    for (int64_t u = 0; u < layout->unit_count(); ++u) {
      if (trainable(u)) optimizer->update(u, gradients->detached(u), scale, updating_present);
      publish(u);
    }
    if (disk) disk->end_step();
    return;
  }
  // The last one first: they are updated in the order in which the next forward pass needs them.
  for (const int64_t u : gradients->order()) {
    if (gradients->updated(u)) continue;
    queue->push(u, [this, u, scale, gradient = gradients->detached(u)] {
      optimizer->update(u, gradient, scale, updating_present);
    });
  }
  for (int64_t u = 0; u < layout->unit_count(); ++u) {
    if (!trainable(u)) continue;
    updating[static_cast<size_t>(u)] = 1;
    if (!delayed && !updates_in_forward(u)) finish_update(u);
  }
}

void Engine::Impl::refuse_writes(std::string_view when) {
  std::vector<int64_t> written;
  const auto is_updated = [&](int64_t p) { return gradients->trainable(layout->unit_of(p)); };
  if (auto* pages = store->pager()) {
    for (const int64_t p : pages->take_dirty()) {
      if (is_updated(p)) {
        written.push_back(p);
      } else {  // stays for `commit_writes`
        pages->mark_dirty({.pager = pages, .parameter = p, .unit = layout->unit_of(p)});
      }
    }
  } else {
    for (size_t p = 0; p < parameters.size(); ++p) {
      const auto i = static_cast<int64_t>(p);
      const auto version = static_cast<int64_t>(parameters[p]._version());
      if (is_updated(i) && std::exchange(versions[p], version) != version) written.push_back(i);
    }
  }
  if (written.empty()) return;
  throw Error(
      fmt::format("Parameter '{}' was written {}, which takes the place of what was written. Write "
                  "it inside zero::Gathered or with Engine::set_parameter.",
                  names[static_cast<size_t>(written.front())], when));
}

void Engine::Impl::finish_update(int64_t unit) {
  auto& left = updating[static_cast<size_t>(unit)];
  if (left == 0) return;
  std::optional<comm::ClockedScope> counted;
  if (disk) counted.emplace(disk->clock());
  queue->wait(unit);
  optimizer->reveal(unit);
  left = 0;
}

bool Engine::Impl::left_updates() const {
  return std::find(updating.begin(), updating.end(), 1) != updating.end();
}

void Engine::Impl::finish_updates() {
  if (!left_updates()) return;
  if (delayed) refuse_writes("while its delayed update was under way");
  {
    std::optional<comm::ClockedScope> counted;
    if (disk) counted.emplace(disk->clock());
    queue->wait_all();
  }
  for (int64_t u = 0; u < layout->unit_count(); ++u) finish_update(u);
}

void Engine::Impl::complete_update(std::string_view label) {
  if (!delayed) {
    finish_updates();
  } else if (left_updates()) {
    change_parameters(label, [] {});
  }
}

void Engine::complete_update() { impl_->complete_update("Engine::complete_update"); }

StepResult Engine::step() {
  auto& impl = *impl_;
  const c10::NoGradGuard no_grad;
  // Not more: a `step` that was refused may be called again.
  const int64_t k = impl.config.gradient_accumulation_steps;
  impl.micro_batches = std::min(impl.micro_batches + 1, k);
  if (impl.micro_batches < k) return {.step = impl.steps};
  impl.gradients->finish();
  StepResult result{.boundary = true, .step = impl.steps};
  // The one place where gradients are scaled: sums over ranks and micro-batches become the mean.
  double scale = impl.mean_scale();
  bool finite = true;
  result.grad_norm = impl.global_norm(finite) * scale;
  if (impl.updates_in_backward())
    impl.refuse_writes("in a step whose backward updates it (update_in_backward)");
  if (!finite && impl.updates_in_backward()) {
    throw Error(
        "A gradient is infinite or NaN, and with update_in_backward other weights have been "
        "updated from this step already. Load the last checkpoint; without update_in_backward such "
        "a step is left out.");
  }
  if (finite) {
    const double clip = impl.config.gradient_clipping;
    // As torch::nn::utils::clip_grad_norm_: the small constant keeps the quotient below one.
    if (clip > 0 && result.grad_norm > clip)
      scale *= std::min(1.0, clip / (result.grad_norm + 1e-6));
  }
  impl.finish_updates();   // of the step before, where they are delayed
  impl.micro_batches = 0;  // from here on nothing is refused
  impl.commit_writes();
  impl.invalidate();
  if (auto* pages = pager()) pages->end_step();
  if (finite) {
    const bool beside =
        impl.delays() && impl.steps >= impl.config.offload_optimizer.delayed_update_after;
    impl.start_update(scale, beside);
    result.updated = true;
    result.step = ++impl.steps;
  }
  // An update that runs here publishes each unit itself. What the user wrote to sharded parameters
  // must reach the peers in any case.
  if (impl.queue || (!finite && impl.placement.parameters)) {
    for (int64_t u = 0; u < impl.layout->unit_count(); ++u) impl.publish(u);
  }
  impl.store->finish_publish();
  impl.gradients->clear();
  if (!std::exchange(impl.budget_spent, true)) impl.spend_budget();
  return result;
}

OptimizerStore::Group& Engine::Impl::parameter_group(size_t index) const {
  auto& groups = optimizer->groups();
  if (index >= groups.size())
    throw ConfigError(
        fmt::format("There is no parameter group {}; there are {}.", index, groups.size()));
  return groups[index];
}

void Engine::set_lr(double lr, size_t index) { impl_->parameter_group(index).lr = lr; }
double Engine::lr(size_t index) const { return impl_->parameter_group(index).lr; }
size_t Engine::group_count() const { return impl_->optimizer->groups().size(); }
const Config& Engine::config() const { return impl_->config; }
comm::Group& Engine::group() { return *impl_->group; }
int64_t Engine::steps() const { return impl_->steps; }
int64_t Engine::parameter_count() const { return impl_->layout->content(); }
const partition::Layout& Engine::layout() const { return *impl_->layout; }
std::vector<std::string> Engine::parameter_names() const { return impl_->names; }
paging::Pager* Engine::pager() { return impl_->store->pager(); }

partition::LayoutMemory Engine::memory_formula() const {
  return impl_->states(impl_->placement, Tier::device);
}

partition::LayoutMemory Engine::host_memory_formula() const {
  return impl_->states(impl_->placement, Tier::host);
}

HostTraffic Engine::host_traffic() const { return impl_->link.counts(); }

DiskUse Engine::disk() const {
  if (!impl_->disk) return {};
  const auto counts = impl_->disk->file().counts();
  return {impl_->disk->bytes(), counts.read, counts.written, impl_->disk->wait_ms()};
}

TrafficFormula Engine::traffic_formula() const {
  const auto& impl = *impl_;
  // Passes of a step, each of which gathers and reduces.
  const int64_t k =
      impl.config.layer_major_accumulation ? 1 : impl.config.gradient_accumulation_steps;
  TrafficFormula sum;
  for (int64_t u = 0; u < impl.layout->unit_count(); ++u) {
    const auto& unit = impl.layout->unit(u);
    const bool trainable = impl.gradients->trainable(u);
    if (impl.store->on_disk(u)) sum.disk_read += 2 * k * impl.disk->whole_bytes(u, 0);
    if (trainable && impl.gradient_on_disk(u)) {
      const int64_t bytes = impl.disk->whole_bytes(u, impl.disk->array_count(u) - 1);
      sum.disk_written += k * bytes;
      sum.disk_read += (k - 1) * bytes;
    }
    const bool owns =
        std::any_of(unit.segments.begin(), unit.segments.end(), [&](const auto& segment) {
          return !partition::intersect(segment.range(), impl.owned_range(u)).empty();
        });
    if (impl.disk && trainable && owns) {  // a slice of padding alone is not updated
      const auto update = impl.disk->update_bytes(u);
      sum.disk_read += update.read;
      sum.disk_written += update.written;
    }
    const auto& tiers = impl.tiers_of(u);
    const int64_t owned_bytes = impl.owned_range(u).size() * unit.element_bytes;
    if (tiers.parameters == Tier::host) sum.host_up += 2 * k * owned_bytes;
    if (trainable) sum.host_down += impl.gradients->bytes_down(u, k);
    if (trainable && owns) {
      const auto update = impl.optimizer->host_bytes(u);
      sum.host_down += update.down;
      sum.host_up += update.up;
    }
    const int64_t parameter_bytes = partition::share_sent(unit.bytes(), impl.group->size());
    const int64_t gradient_bytes =
        trainable ? partition::share_sent(unit.numel * static_cast<int64_t>(c10::elementSize(
                                                           impl.gradients->wire_dtype(u))),
                                          impl.group->size())
                  : 0;
    if (!impl.placement.optimizer) {
      sum.all_reduce += 2 * gradient_bytes;
    } else {
      sum.reduce_scatter += gradient_bytes * (impl.placement.gradients ? k : 1);
      if (impl.placement.parameters) {
        sum.all_gather += 2 * k * parameter_bytes;
      } else if (trainable) {
        sum.all_gather += parameter_bytes;
      }
    }
  }
  return sum;
}

}  // namespace zero
