#include "zero/engine/memory_budget.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <functional>
#include <string>
#include <string_view>
#include <utility>

#include "zero/base/host_allocator.h"
#include "zero/base/memory_limit.h"
#include "zero/comm/gather_records.h"
#include "zero/device/memory.h"
#include "zero/engine/fits.h"
#include "zero/engine/flows.h"
#include "zero/engine/plan_units.h"
#include "zero/engine/tiers.h"

namespace zero {

namespace {

std::string bytes(int64_t count) { return format_bytes(static_cast<double>(count)); }

}  // namespace

MemoryBudget::MemoryBudget(const EnginePlan& plan) : plan_(plan) {
  const auto states = states_in_memory(plan.placement().sharded);
  check_budget(
      plan.config(), plan.placement().shards->size(), states_in_budget(plan.placement().sharded),
      [&](int stage) { return states_in_budget(partition::sharding_of_stage(stage)).total(); });
  check_host(states);
  limit_device();
}

int64_t MemoryBudget::bytes_of(int64_t elements) const {
  const int64_t element_bytes = plan_.config().parameter_bytes();
  return elements > INT64_MAX / element_bytes ? INT64_MAX : elements * element_bytes;
}

// Returns the bytes of this rank's states in the host's memory, if states are sharded as `sharded`
// says: all states except those on a disk or on a device with memory of its own.
partition::StateMemory MemoryBudget::states_in_memory(partition::Sharding sharded) const {
  auto step = plan_.step();
  step.sharded = sharded;
  const bool apart = is_asynchronous(plan_.model().device());
  const auto device = apart ? partition::LayoutMemory{} : planned_memory(step, Tier::device);
  const auto host = planned_memory(step, Tier::host);
  const auto both = [](int64_t a, int64_t b) { return static_cast<double>(a + b); };
  return {.parameters = both(device.parameters, host.parameters),
          .gradients = both(device.gradients, host.gradients),
          .optimizer = both(device.optimizer, host.optimizer)};
}

// Returns the bytes of this rank's states that count against the configuration's budget: those on a
// device with memory of its own, else those in the host's memory.
partition::StateMemory MemoryBudget::states_in_budget(partition::Sharding sharded) const {
  if (!is_asynchronous(plan_.model().device())) return states_in_memory(sharded);
  auto step = plan_.step();
  step.sharded = sharded;
  const auto bytes = planned_memory(step, Tier::device);
  return {.parameters = static_cast<double>(bytes.parameters),
          .gradients = static_cast<double>(bytes.gradients),
          .optimizer = static_cast<double>(bytes.optimizer)};
}

// The system grants private memory to every rank that asks, and fails only when it is touched. Here
// the bytes that all ranks are about to take are known before any has begun.
void MemoryBudget::check_host(const partition::StateMemory& states) const {
  double held = 0;  // by the model; its parameters move into the states
  for (const auto& parameter : plan_.model().parameters())
    held += static_cast<double>(parameter.nbytes());
  if (states.total() <= static_cast<double>(plan_.available()) + held) return;
  const int ranks = plan_.group().local_size();
  throw OutOfMemory(fmt::format(
      "The states of the model take {} on each of {} rank{} of this host at stage {} (parameters "
      "{}, gradients {}, optimizer {}), but only {} are left for each ({}), besides the {} that "
      "the model holds now. Use a higher stage, more hosts, or states on disk (offload_optimizer "
      "and offload_param with the device nvme).",
      format_bytes(states.total()), ranks, ranks == 1 ? "" : "s", plan_.config().stage,
      format_bytes(states.parameters), format_bytes(states.gradients),
      format_bytes(states.optimizer), bytes(plan_.available()), available_memory().reason,
      format_bytes(held)));
}

// Every rank has the same states, so all refuse or none does.
void MemoryBudget::limit_device() {
  const auto& config = plan_.config();
  const auto& model = plan_.model();
  const auto device = model.device();
  const bool own = is_asynchronous(device);
  const int64_t capacity = own ? device_memory(device).total : config.device_memory;
  if (capacity == 0) return;
  std::function<Usage()> allocated;
  if (own) allocated = [device] { return device_memory(device).tensors; };
  limit_ = std::make_unique<DeviceLimit>(
      plan_.group().ledger(), capacity,
      cheaper_choices(config, step_size(model.shape(), plan_.placement().shards->size(),
                                        config.parameter_bytes())),
      std::move(allocated));
  const auto need = planned_memory(plan_.step(), Tier::device);
  if (need.total() <= capacity) return;
  const int ranks = plan_.group().size();
  throw OutOfMemory(fmt::format(
      "The device has {}{}, but the states of the model that stay there take {} of "
      "each of {} rank{} at stage {} (parameters {}, gradients {}, optimizer {}). {}",
      bytes(capacity), own ? "" : " (device_memory)", bytes(need.total()), ranks,
      ranks == 1 ? "" : "s", config.stage, bytes(need.parameters), bytes(need.gradients),
      bytes(need.optimizer), limit_->advice(need.total() - capacity)));
}

void MemoryBudget::include_tensors() {
  if (limit_ == nullptr || !plan_.model().device().is_cpu()) return;
  // Ranks that are threads share the tensors' allocator. The barrier makes sure that none is capped
  // while another still holds the model twice.
  plan_.group().barrier("start of the engine");
  limit_->include_tensors();
}

OutOfMemory MemoryBudget::explained(const c10::OutOfMemoryError& error) const {
  std::string why = error.what_without_backtrace();
  if (limit_ != nullptr)
    why = fmt::format("{} LibTorch says: {}", limit_->refusal(0, "what a step takes"), why);
  return OutOfMemory(why);
}

bool MemoryBudget::spends() const {
  if (is_asynchronous(plan_.model().device())) return limit_ != nullptr;
  return plan_.config().memory_budget > 0 || plan_.config().device_memory > 0;
}

void MemoryBudget::leave_for_gathers(const Flows& flows, int64_t bytes) const {
  flows.gather().pager()->set_budget(
      std::clamp<int64_t>(bytes, 0, bytes_of(plan_.config().max_live_parameters)));
}

// A device with memory of its own gives gathered units all that it has beyond the most that a step
// has taken, or all that the budget leaves.
void MemoryBudget::spend_device(const Flows& flows) const {
  const int64_t budget = plan_.config().memory_budget;
  const bool gathers = flows.gather().pager() != nullptr;
  if (!gathers && budget == 0) return;
  auto& group = plan_.group();
  const auto memory = device_memory(plan_.model().device());
  const int64_t gathered = group.ledger()->usage(Category::gathered_units).peak;
  const int64_t others = memory.tensors.peak - gathered;
  // A step may hold a little more than the first one, and fragments cost the allocator some.
  const auto most = [](int64_t bytes) { return bytes - bytes / 16; };
  const int64_t of_device = most(memory.available()) - others;
  struct Left {
    int64_t of_budget = 0;
    int64_t for_gathers = 0;
  };
  const Left mine{
      .of_budget = budget == 0 ? 0 : budget - memory.tensors.peak,
      .for_gathers = budget == 0 ? of_device : std::min(of_device, most(budget - others))};
  const auto all = comm::gather_records(group, mine, "memory of the device");
  const int64_t spare = std::ranges::min(all, {}, &Left::of_budget).of_budget;
  if (spare < 0) {
    throw OutOfMemory(fmt::format(
        "The memory budget is {}, but on the rank with the most the first step took {} more than "
        "that of its device; on rank {} it took {} there (of them {} for gathered units). Use a "
        "smaller micro-batch, shorter sequences, a higher stage, more ranks, states on the host "
        "(offload_optimizer, offload_param), or a larger budget.",
        bytes(budget), bytes(-spare), group.rank(), bytes(memory.tensors.peak), bytes(gathered)));
  }
  if (gathers) leave_for_gathers(flows, std::ranges::min(all, {}, &Left::for_gathers).for_gathers);
}

void MemoryBudget::spend(const Flows& flows) {
  if (std::exchange(spent_, true) || !spends()) return;
  if (is_asynchronous(plan_.model().device())) return spend_device(flows);
  auto& schedule = flows.schedule();
  if (!schedule.delayed()) schedule.finish();  // their buffers count as held
  auto& group = plan_.group();
  const auto& ledger = *group.ledger();
  const int64_t held = ledger.total().peak;
  const int64_t activations = HostAllocator::instance().usage().used.peak;
  // Categories may have had their peaks at different times, but a later step may have them
  // together.
  int64_t on_device = activations;
  int64_t below = 0;
  for (size_t i = 0; i < kCategories; ++i) {
    const auto category = static_cast<Category>(i);
    if (category == Category::gathered_units) continue;
    (on_host(category) ? below : on_device) += ledger.usage(category).peak;
  }
  const int64_t budget = plan_.config().memory_budget;
  // A step may hold a little more than the first.
  const int64_t device = plan_.config().device_memory - plan_.config().device_memory / 16;
  struct Left {
    int64_t of_budget = 0;
    int64_t for_gathers = 0;
  };
  const Left mine{.of_budget = budget == 0 ? 0 : budget - activations - held,
                  .for_gathers = std::min(budget == 0 ? INT64_MAX : budget - on_device - below,
                                          device == 0 ? INT64_MAX : device - on_device)};
  const auto all = comm::gather_records(group, mine, "memory budget");
  const int64_t spare = std::ranges::min(all, {}, &Left::of_budget).of_budget;
  if (spare < 0) {
    throw OutOfMemory(fmt::format(
        "The memory budget is {}, but on the rank with the most the first step took {} more than "
        "that; on rank {} it took {} for states and buffers (of them {} for gathered units) and {} "
        "for activations. Use a smaller micro-batch, shorter sequences, a higher stage, more "
        "ranks, or a larger budget.",
        bytes(budget), bytes(-spare), group.rank(), bytes(held),
        bytes(ledger.usage(Category::gathered_units).peak), bytes(activations)));
  }
  if (flows.gather().pager() != nullptr && !flows.gather().in_place())
    leave_for_gathers(flows, std::ranges::min(all, {}, &Left::for_gathers).for_gathers);
}

namespace {

/// The limit that leaves this rank the least memory, and how many ranks of the group share it.
struct MemoryShare {
  MemoryLimit limit;
  int ranks = 1;
  int64_t of_rank() const { return limit.available / ranks; }
};

// Ranks of one host may be in containers with limits of their own, and ranks that share no memory
// may be on one machine. Collective.
MemoryShare memory_share(comm::Group& group) {
  const auto limits = memory_limits();
  std::array<int64_t, kMemoryLimits> mine{};
  std::ranges::transform(limits, mine.begin(), &MemoryLimit::id);
  const auto all = comm::gather_records(group, mine, "memory of the host");
  ensure(!limits.empty(), "the machine's memory is a limit");
  const auto share_of = [&](const MemoryLimit& limit) {
    int ranks = 0;
    for (const auto& ids : all) ranks += static_cast<int>(std::ranges::count(ids, limit.id));
    return MemoryShare{limit, limit.id == 0 ? group.local_size() : ranks};
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
  return std::ranges::min(
      comm::gather_records(group, memory_share(group).of_rank(), "memory of the host"));
}

double bytes_to_build(int64_t parameters, const comm::Group& group) {
  return 4.0 * static_cast<double>(parameters) * group.local_size();
}

void check_fits(int64_t parameters, const Config& config, comm::Group& group, bool built_on_disk,
                int64_t frozen) {
  const auto share = memory_share(group);
  const auto& limit = share.limit;
  const double local = share.ranks;
  const auto on_host = [&](const Config& as) {
    return predicted_states(as, parameters, group.size(), Bound::least, frozen).total() * local;
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
  const auto of_rank = predicted_states(config, parameters, group.size(), Bound::least, frozen);
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

}  // namespace zero
