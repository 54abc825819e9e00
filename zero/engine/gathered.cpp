#include "zero/engine/gathered.h"

#include <exception>
#include <set>
#include <utility>

#include "zero/base/error.h"
#include "zero/engine/engine_impl.h"
#include "zero/engine/flat.h"
#include "zero/paging/pager.h"

namespace zero {

struct Gathered::Impl {
  std::shared_ptr<Engine::Impl> engine;  // it may end before the scope
  Access access;
  std::optional<int> modifier_rank;
  std::vector<int64_t> parameters;
  std::vector<paging::Pager::Pin> pins;
};

Gathered::Gathered(Engine& engine, const std::vector<at::Tensor>& parameters, Access access,
                   std::optional<int> modifier_rank)
    : impl_(std::make_unique<Impl>(Impl{engine.impl_.shared(), access, modifier_rank, {}, {}})),
      exceptions_(std::uncaught_exceptions()) {
  const auto& plan = engine.impl_->plan;
  std::set<int64_t> units;
  for (const auto& wanted : parameters.empty() ? plan.model().parameters() : parameters) {
    const auto found = plan.model().find(wanted);
    if (!found)
      throw ConfigError(
          "zero::Gathered was given a tensor that is not a parameter of its engine. Pass the "
          "parameters themselves, not views or copies.");
    impl_->parameters.push_back(*found);
    units.insert(plan.layout().unit_of(impl_->parameters.back()));
  }
  if (access == Access::read) plan.model().check_values("zero::Gathered");
  // An update that began before must not overwrite the writes of this scope.
  if (access == Access::write) {
    engine.impl_->changes.check_trains("A write in zero::Gathered");
    engine.impl_->changes.check_between_steps("A write in zero::Gathered");
    engine.impl_->changes.complete_update("zero::Gathered");
  }
  if (auto* pager = engine.pager()) {
    for (const int64_t unit : units) impl_->pins.push_back(pager->pin(unit));
  }
}

void Gathered::close() {
  if (!impl_) return;
  const auto scope = std::exchange(impl_, nullptr);
  if (scope->access == Access::read) return;
  auto& plan = scope->engine->plan;
  const auto& flows = scope->engine->flows;
  auto* pager = flows.gather().pager();
  if (scope->modifier_rank && plan.group().size() > 1) {
    for (const int64_t i : scope->parameters) {
      plan.group()
          .broadcast(flat_view(plan.model().parameter(i)), *scope->modifier_rank,
                     plan.model().name(i))
          .wait();
    }
  }
  std::vector<int64_t> units;
  for (const int64_t i : scope->parameters) {
    units.push_back(plan.layout().unit_of(i));
    if (pager != nullptr) {
      pager->mark_dirty({.pager = pager, .parameter = i, .unit = units.back()});
    } else {
      plan.model().mark_written(i);
    }
  }
  scope->pins.clear();
  scope->engine->changes.change_parameters(
      "writes in zero::Gathered", [] {}, units);
}

Gathered::~Gathered() noexcept(false) {
  if (std::uncaught_exceptions() == exceptions_) {
    close();
  }
}

}  // namespace zero
