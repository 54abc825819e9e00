// A budget: one number, the bytes that a rank may hold, decides how many units stay gathered.
//
// Note [Memory budget]
// States are known before anything is allocated: a budget that they exceed is refused at once, with
// what the other stages would take. What activations, buckets and staging take is known after the
// first step, which therefore keeps as few units gathered as it can; what the budget leaves then is
// for gathered units, and the pager plans the steps from there on with it. Ranks gather together,
// so all of them use what the poorest has. Where units are read in place (ranks of one host) there
// is nothing to gather, and the budget is only checked. Where a device has memory of its own, what
// it has is the budget.
#include <ATen/ops/empty.h>
#include <ATen/ops/min.h>
#include <ATen/ops/zeros.h>
#include <fmt/format.h>

#include <algorithm>
#include <span>
#include <string>
#include <string_view>
#include <utility>

#include "zero/base/error.h"
#include "zero/base/host_allocator.h"
#include "zero/base/memory_limit.h"
#include "zero/comm/gather_records.h"
#include "zero/device/memory.h"
#include "zero/engine/engine_impl.h"
#include "zero/engine/tiers.h"

namespace zero {

namespace {

std::string bytes(int64_t count) { return format_bytes(static_cast<double>(count)); }

}  // namespace

int64_t Engine::Impl::bytes_of(int64_t elements) const {
  const int64_t element_bytes = config.parameter_bytes();
  return elements > INT64_MAX / element_bytes ? INT64_MAX : elements * element_bytes;
}

partition::StateMemory Engine::Impl::states_in_memory(partition::Placement sharded) const {
  auto step = planned();
  step.sharded = sharded;
  const bool apart = is_asynchronous(model.device());
  const auto device = apart ? partition::LayoutMemory{} : state_memory(step, Tier::device);
  const auto host = state_memory(step, Tier::host);
  const auto both = [](int64_t a, int64_t b) { return static_cast<double>(a + b); };
  return {.parameters = both(device.parameters, host.parameters),
          .gradients = both(device.gradients, host.gradients),
          .optimizer = both(device.optimizer, host.optimizer)};
}

void Engine::Impl::check_budget() const {
  zero::check_budget(
      config, placement.shards->size(), states_in_memory(placement.sharded),
      [&](int stage) { return states_in_memory(partition::placement_of_stage(stage)).total(); });
}

// Private memory is granted to every rank that asks, and only missed when it is touched: what all
// of them are about to take is known here, before any has begun.
void Engine::Impl::check_memory(int64_t available) const {
  const auto states = states_in_memory(placement.sharded);
  double held = 0;  // by the model, whose parameters move into the states
  for (const auto& parameter : model.parameters()) held += static_cast<double>(parameter.nbytes());
  if (states.total() <= static_cast<double>(available) + held) return;
  throw OutOfMemory(fmt::format(
      "The states of the model take {} on each of {} rank{} of this host at stage {} (parameters "
      "{}, gradients {}, optimizer {}), but only {} are left for each ({}), besides the {} that "
      "the model holds now. Use a higher stage, more hosts, or states on disk (offload_optimizer "
      "and offload_param with the device nvme).",
      format_bytes(states.total()), group().local_size(), group().local_size() == 1 ? "" : "s",
      config.stage, format_bytes(states.parameters), format_bytes(states.gradients),
      format_bytes(states.optimizer), bytes(available), available_memory().reason,
      format_bytes(held)));
}

// Every rank has the same states: what is refused here is refused on all.
void Engine::Impl::limit_device() {
  const auto device = model.device();
  const bool own = is_asynchronous(device);
  const int64_t capacity = own ? device_memory(device).total : config.device_memory;
  if (capacity == 0) return;
  std::function<Usage()> allocated;
  if (own) allocated = [device] { return device_memory(device).tensors; };
  limit = std::make_unique<DeviceLimit>(
      group().ledger(), capacity,
      cheaper_choices(config, step_size(model.shape(), placement.shards->size())),
      std::move(allocated));
  const auto need = state_memory(planned(), Tier::device);
  if (need.total() <= capacity) return;
  throw OutOfMemory(fmt::format(
      "The device has {}{}, but the states of the model that stay there take {} of "
      "each of {} rank{} at stage {} (parameters {}, gradients {}, optimizer {}). {}",
      bytes(capacity), own ? "" : " (device_memory)", bytes(need.total()), group().size(),
      group().size() == 1 ? "" : "s", config.stage, bytes(need.parameters), bytes(need.gradients),
      bytes(need.optimizer), limit->advice(need.total() - capacity)));
}

OutOfMemory Engine::Impl::explained(const c10::OutOfMemoryError& error) const {
  std::string why = error.what_without_backtrace();
  if (limit != nullptr)
    why = fmt::format("{} LibTorch says: {}", limit->refusal(0, "what a step takes"), why);
  return OutOfMemory(why);
}

OutOfMemory Engine::explained(const c10::OutOfMemoryError& error) const {
  return impl_->explained(error);
}

namespace {

/// The limit that leaves this rank the least memory, and how many ranks of the group share it.
struct MemoryShare {
  MemoryLimit limit;
  int ranks = 1;
  int64_t of_rank() const { return limit.available / ranks; }
};

// Ranks of one host may be in containers with limits of their own, and ranks that share no memory
// may be on one machine all the same. Collective.
MemoryShare memory_share(comm::Group& group) {
  constexpr auto kIds = static_cast<int64_t>(kMemoryLimits);
  const auto limits = memory_limits();
  auto mine = at::zeros({kIds}, at::kLong);
  auto all = at::empty({kIds * group.size()}, at::kLong);
  for (size_t i = 0; i < limits.size(); ++i) mine[static_cast<int64_t>(i)] = limits[i].id;
  group.all_gather_control(all, mine, "memory of the host");
  const std::span<const int64_t> ids(all.const_data_ptr<int64_t>(),
                                     static_cast<size_t>(all.numel()));
  ensure(!limits.empty(), "the machine's memory is a limit");
  const auto share_of = [&](const MemoryLimit& limit) {
    return MemoryShare{limit, limit.id == 0 ? group.local_size()
                                            : static_cast<int>(std::ranges::count(ids, limit.id))};
  };
  auto least = share_of(limits.front());
  for (const auto& limit : limits) {
    auto share = share_of(limit);
    if (share.of_rank() < least.of_rank()) least = std::move(share);
  }
  return least;
}

}  // namespace

int64_t memory_of_rank(comm::Group& group) {
  auto mine = at::empty({1}, at::kLong);
  auto all = at::empty({group.size()}, at::kLong);
  mine[0] = memory_share(group).of_rank();
  group.all_gather_control(all, mine, "memory of the host");
  return all.min().item<int64_t>();
}

double bytes_to_build(int64_t parameters, const comm::Group& group) {
  return 4.0 * static_cast<double>(parameters) * group.local_size();
}

void check_fits(int64_t parameters, const Config& config, comm::Group& group, bool built_on_disk) {
  const auto share = memory_share(group);
  const auto& limit = share.limit;
  const double local = share.ranks;
  const auto on_host = [&](const Config& as) {
    return predicted_states(as, parameters, group.size(), Bound::least).total() * local;
  };
  const double states = on_host(config);
  const double build = built_on_disk ? 0 : 4.0 * static_cast<double>(parameters) * local;
  const auto available = static_cast<double>(limit.available);
  const bool fits = std::max(states, build) <= available;
  const auto failed = comm::first_failure(group, !fits, "memory of the host");
  if (!failed) return;
  if (fits) {
    throw OutOfMemory(fmt::format(
        "The model does not fit in the memory of rank {}'s host; its own message says why.",
        *failed));
  }
  std::string ways;
  const auto way = [&](std::string_view what, const Config& as) {
    ways += fmt::format("{} {} {}", ways.empty() ? "; they take" : ",", format_bytes(on_host(as)),
                        what);
  };
  auto other = config;
  if (group.size() > 1 && config.stage < 3) {
    other.stage = 3;
    way("at stage 3", other);
  }
  if (other.offload_optimizer.device != OffloadDevice::nvme) {
    other.offload_optimizer.device = OffloadDevice::nvme;
    way("with the optimizer's on disk (offload_optimizer, --offload-optimizer nvme)", other);
  }
  if (other.offload_param.device != OffloadDevice::nvme) {
    other.stage = 3;
    other.offload_param.device = OffloadDevice::nvme;
    way("with the parameters there too (stage 3, offload_param, --offload-param nvme)", other);
  }
  if (!other.offload_optimizer.gradients) {
    other.offload_optimizer.gradients = true;
    way("with the gradients too (--offload-gradients)", other);
  }
  const auto of_rank = predicted_states(config, parameters, group.size(), Bound::least);
  throw OutOfMemory(fmt::format(
      "A model of {:.2f} billion parameters does not fit: its states take {} on this host "
      "({} rank{} at stage {}, each with {} of parameters, {} of gradients and {} of optimizer "
      "states in memory){}, but only {} are left ({}){}. Activations and buffers come on top.",
      static_cast<double>(parameters) / 1e9, format_bytes(states), share.ranks,
      share.ranks == 1 ? "" : "s", config.stage, format_bytes(of_rank.parameters),
      format_bytes(of_rank.gradients), format_bytes(of_rank.optimizer),
      build > states ? fmt::format(", and building it in fp32 {}", format_bytes(build)) : "",
      format_bytes(available), limit.reason, ways));
}

bool Engine::Impl::spends_budget() const {
  if (is_asynchronous(model.device())) return limit != nullptr;
  return config.memory_budget > 0 || config.device_memory > 0;
}

// A device with memory of its own gives gathered units all that it has left beside the most that a
// step has taken.
void Engine::Impl::spend_device() {
  auto* pages = gather->pager();
  if (pages == nullptr) return;
  const auto memory = device_memory(model.device());
  const int64_t gathered = group().ledger()->usage(Category::gathered_units).peak;
  auto mine = at::empty({1}, at::kLong);
  auto all = at::empty({group().size()}, at::kLong);
  // A step may hold a little more than the first, and the allocator loses some to fragments.
  mine[0] = memory.available() - memory.available() / 16 - (memory.tensors.peak - gathered);
  group().all_gather_control(all, mine, "memory of the device");
  pages->set_budget(
      std::clamp<int64_t>(all.min().item<int64_t>(), 0, bytes_of(config.max_live_parameters)));
}

void Engine::Impl::spend_budget() {
  if (!spends_budget()) return;
  if (is_asynchronous(model.device())) return spend_device();
  if (!schedule->delayed()) schedule->finish();  // their buffers are among what is held
  const auto& ledger = *group().ledger();
  const int64_t held = ledger.total().peak;
  const int64_t activations = HostAllocator::instance().usage().used.peak;
  // Categories need not have had their peaks together, but one day they may.
  int64_t on_device = activations;
  int64_t below = 0;
  for (size_t i = 0; i < kCategories; ++i) {
    const auto category = static_cast<Category>(i);
    if (category == Category::gathered_units) continue;
    (on_host(category) ? below : on_device) += ledger.usage(category).peak;
  }
  auto mine = at::empty({2}, at::kLong);
  const int64_t budget = config.memory_budget;
  // A step may hold a little more than the first.
  const int64_t device = config.device_memory - config.device_memory / 16;
  mine[0] = budget == 0 ? 0 : budget - activations - held;
  mine[1] = std::min(budget == 0 ? INT64_MAX : budget - on_device - below,
                     device == 0 ? INT64_MAX : device - on_device);
  auto all = at::empty({2 * group().size()}, at::kLong);
  group().all_gather_control(all, mine, "memory budget");
  const auto least = std::get<0>(all.view({-1, 2}).min(0));
  if (const auto spare = least[0].item<int64_t>(); spare < 0) {
    throw OutOfMemory(fmt::format(
        "The memory budget is {}, but on the rank with the most the first step took {} more than "
        "that; on rank {} it took {} for states and buffers (of them {} for gathered units) and {} "
        "for activations. Use a smaller micro-batch, shorter sequences, a higher stage, more "
        "ranks, or a larger budget.",
        bytes(config.memory_budget), bytes(-spare), group().rank(), bytes(held),
        bytes(ledger.usage(Category::gathered_units).peak), bytes(activations)));
  }
  if (auto* pages = gather->pager(); pages != nullptr && !gather->in_place()) {
    pages->set_budget(
        std::clamp<int64_t>(least[1].item<int64_t>(), 0, bytes_of(config.max_live_parameters)));
  }
}

}  // namespace zero
