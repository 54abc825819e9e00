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
  std::shared_ptr<Engine::Impl> engine;  // which may end before the scope
  Access access;
  std::optional<int> modifier_rank;
  std::vector<int64_t> parameters;
  std::vector<paging::Pager::Pin> pins;
};

Gathered::Gathered(Engine& engine, const std::vector<at::Tensor>& parameters, Access access,
                   std::optional<int> modifier_rank)
    : impl_(std::make_unique<Impl>(Impl{engine.impl_.shared(), access, modifier_rank, {}, {}})),
      exceptions_(std::uncaught_exceptions()) {
  const auto& model = engine.impl_->model;
  std::set<int64_t> units;
  for (const auto& wanted : parameters.empty() ? model.parameters() : parameters) {
    const auto found = model.find(wanted);
    if (!found)
      throw ConfigError(
          "zero::Gathered was given a tensor that is not a parameter of its engine. Pass the "
          "parameters themselves, not views or copies.");
    impl_->parameters.push_back(*found);
    units.insert(engine.impl_->layout.unit_of(impl_->parameters.back()));
  }
  // An update that began before must not overwrite the writes of this scope.
  if (access == Access::write) {
    engine.impl_->check_between_steps("A write in zero::Gathered");
    engine.impl_->complete_update("zero::Gathered");
  }
  if (auto* pager = engine.pager()) {
    for (const int64_t unit : units) impl_->pins.push_back(pager->pin(unit));
  }
}

void Gathered::close() {
  if (!impl_) return;
  const auto scope = std::exchange(impl_, nullptr);
  if (scope->access == Access::read) return;
  auto& engine = *scope->engine;
  auto* pager = engine.gather->pager();
  if (scope->modifier_rank && engine.group().size() > 1) {
    for (const int64_t i : scope->parameters) {
      engine.group()
          .broadcast(flat_view(engine.model.parameter(i)), *scope->modifier_rank,
                     engine.model.name(i))
          .wait();
    }
  }
  if (pager != nullptr) {
    for (const int64_t i : scope->parameters) {
      paging::Page page{.pager = pager, .parameter = i, .unit = engine.layout.unit_of(i)};
      pager->mark_dirty(page);
    }
    scope->pins.clear();
  }
  std::vector<int64_t> units;
  for (const int64_t i : scope->parameters) units.push_back(engine.layout.unit_of(i));
  engine.change_parameters(
      "writes in zero::Gathered",
      [&] {
        if (pager != nullptr) return;
        for (const int64_t i : scope->parameters) {
          if (engine.model.trainable(i)) engine.table->refresh_master(i);
        }
      },
      units);
}

Gathered::~Gathered() noexcept(false) {
  if (std::uncaught_exceptions() == exceptions_) {
    close();
  }
}

}  // namespace zero
