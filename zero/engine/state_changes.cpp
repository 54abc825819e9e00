#include "zero/engine/state_changes.h"

#include <c10/core/GradMode.h>
#include <fmt/format.h>

#include <algorithm>
#include <optional>
#include <utility>

#include "zero/base/error.h"
#include "zero/comm/gather_records.h"
#include "zero/engine/replicas.h"
#include "zero/paging/pager.h"

namespace zero {

void StateChanges::complete_update(std::string_view label) {
  if (flows_.schedule().delayed()) {
    change_parameters(label);
  } else {
    flows_.gather().start_owed();
    flows_.schedule().finish();
  }
}

bool StateChanges::settle_update(std::string_view label) {
  const bool delayed = flows_.schedule().delayed();
  change(
      label, [] {}, {}, delayed);
  return delayed;
}

// Returns, by unit, whether it has `changed`, or a user on any rank has changed it. Collective if
// parameters are replicated and updated in slices: then only changed units are gathered.
std::vector<uint8_t> StateChanges::changed_units(std::string_view label,
                                                 std::vector<uint8_t> changed) {
  // Publishing costs nothing at stage 3 unless units go to other hosts, and does nothing at stage
  // 0.
  const auto& sharded = plan_.placement().sharded;
  const bool gathers = sharded.optimizer && (!sharded.parameters || plan_.kept_on_hosts());
  if (!gathers) return std::vector<uint8_t>(plan_.units().size(), 1);
  const auto written = flows_.writes().written_units();
  for (size_t u = 0; u < changed.size(); ++u) changed[u] |= written[u];
  return comm::flags_of_any_rank(plan_.group(), std::move(changed), label);
}

void StateChanges::publish(const std::vector<uint8_t>& units) const {
  auto& gather = flows_.gather();
  for (size_t u = 0; u < units.size(); ++u) {
    if (units[u] != 0) gather.publish(static_cast<int64_t>(u));
  }
  gather.finish_publish();
  gather.settle();
}

void StateChanges::change_parameters(std::string_view label, const std::function<void()>& write,
                                     const std::vector<int64_t>& units) {
  change(label, write, units, false);
}

void StateChanges::change(std::string_view label, const std::function<void()>& write,
                          const std::vector<int64_t>& units, bool keeps_delayed) {
  const c10::NoGradGuard no_grad;
  check_between_steps(label);
  std::optional<paging::Pager::Change> change;
  if (auto* pager = flows_.gather().pager()) change.emplace(*pager);
  // Every rank has ended its gathers when this returns.
  const auto mine = flows_.writes().written_units();
  const bool wrote = std::ranges::any_of(mine, [](uint8_t unit) { return unit != 0; });
  if (comm::any_rank(plan_.group(), wrote, label)) {
    if (plan_.model().evaluates())
      flows_.writes().refuse(
          "while the weights for evaluation were in force: Engine::optimizer_train puts those of "
          "training back");
    check_writes(plan_, flows_, fmt::format("before {}", label));
  }
  auto updated = keeps_delayed ? std::vector<uint8_t>(plan_.units().size(), 0)
                               : flows_.schedule().pending_units();
  for (const int64_t unit : units) updated[static_cast<size_t>(unit)] = 1;
  const auto changed = changed_units(label, std::move(updated));
  flows_.gather().settle();
  if (keeps_delayed) {
    flows_.schedule().settle();
  } else {
    flows_.schedule().finish();
  }
  flows_.writes().commit();
  flows_.writes().invalidate();
  write();
  publish(changed);
}

void StateChanges::replace_states(std::string_view label, const std::function<void()>& write) {
  std::optional<paging::Pager::Change> change;
  if (auto* pager = flows_.gather().pager()) change.emplace(*pager);
  plan_.group().barrier(label);  // every rank has ended its gathers
  flows_.gather().settle();
  flows_.writes().commit();
  flows_.writes().invalidate();  // refused in a zero::Gathered scope, before anything has changed
  flows_.schedule().discard();
  drop_gradients();
  flows_.reduce().forget_residuals();  // they are not saved with the states
  write();
  publish(std::vector<uint8_t>(plan_.units().size(), 1));  // frozen ones, too
}

void StateChanges::drop_gradients() {
  flows_.reduce().join_begun();
  flows_.reduce().clear();
  progress_.restart();
}

void StateChanges::check_between_steps(std::string_view what) const {
  if (!flows_.reduce().handed_over()) return;
  throw Error(
      fmt::format("{} between Engine::backward and Engine::step: with update_in_backward some "
                  "weights have been updated already and others have not. Call it after the step; "
                  "where the pass or the step failed, load a checkpoint first.",
                  what));
}

void StateChanges::check_trains(std::string_view what) const {
  if (!plan_.model().evaluates()) return;
  throw Error(fmt::format(
      "{} while the weights for evaluation are in force (Engine::optimizer_eval), which "
      "are not those that the optimizer trains. Call Engine::optimizer_train first.",
      what));
}

}  // namespace zero
