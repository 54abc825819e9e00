// Writes to parameters. The user's writes go to the table when a step or a scope ends; the engine
// writes by itself while no rank reads the parameters.
#include <ATen/ops/empty.h>
#include <c10/core/GradMode.h>
#include <fmt/format.h>

#include <algorithm>

#include "zero/base/error.h"
#include "zero/comm/gather_records.h"
#include "zero/device/memory.h"
#include "zero/engine/engine_impl.h"
#include "zero/paging/pager.h"

namespace zero {

void Engine::Impl::commit_writes() {
  if (auto* pages = gather->pager()) {
    pages->settle_gathers();
    for (const int64_t i : pages->take_dirty()) {
      const int64_t u = layout.unit_of(i);
      const auto& segment = layout.segment_of(i);
      const auto dtype = table->plan(u).dtype;
      auto values = tensor_at(pages->data(u), layout.unit(u).numel, dtype, table->device())
                        .narrow(0, segment.offset, segment.numel);
      table->write_from_device(i, values);
      if (trainable(u)) table->refresh_master(i);
    }
    return;
  }
  for (const int64_t i : model.take_written([](int64_t) { return true; })) {
    if (model.trainable(i)) table->refresh_master(i);
  }
}

void Engine::Impl::invalidate() {
  if (auto* pages = gather->pager()) {
    pages->invalidate();
    gather->forget();
  }
}

void Engine::Impl::publish(int64_t unit) {
  if (trainable(unit) || frozen_written[static_cast<size_t>(unit)] != 0) gather->publish(unit);
}

std::vector<uint8_t> Engine::Impl::written_units() const {
  std::vector<uint8_t> written(plans.size(), 0);
  if (const auto* pages = gather->pager()) {
    for (const int64_t p : pages->dirty()) written[static_cast<size_t>(layout.unit_of(p))] = 1;
    return written;
  }
  for (int64_t i = 0; i < model.size(); ++i) {
    if (model.written(i)) written[static_cast<size_t>(layout.unit_of(i))] = 1;
  }
  return written;
}

void Engine::Impl::refuse_writes(std::string_view when) {
  std::vector<int64_t> written;
  const auto is_updated = [&](int64_t p) { return model.trainable(p); };
  if (auto* pages = gather->pager()) {
    for (const int64_t p : pages->take_dirty()) {
      if (is_updated(p)) {
        written.push_back(p);
      } else {  // stays for `commit_writes`
        pages->mark_dirty({.pager = pages, .parameter = p, .unit = layout.unit_of(p)});
      }
    }
  } else {
    written = model.take_written(is_updated);
  }
  const auto all =
      comm::gather_records(group(), written.empty() ? model.size() : written.front(), when);
  for (size_t rank = 0; rank < all.size(); ++rank) {
    if (all[rank] == model.size()) continue;
    throw Error(fmt::format(
        "Parameter '{}' was written on rank {} {}, which takes the place of what was written. "
        "Write it inside zero::Gathered or with Engine::set_parameter.",
        model.name(all[rank]), rank, when));
  }
}

void Engine::Impl::complete_update(std::string_view label) {
  if (schedule->delayed()) {
    change_parameters(label);
  } else {
    schedule->finish();
  }
}

std::vector<uint8_t> Engine::Impl::changed_units(std::string_view label,
                                                 const std::vector<int64_t>& units) {
  // Publishing costs nothing at stage 3 unless units go to other hosts, and does nothing at stage
  // 0.
  const bool gathers =
      placement.sharded.optimizer && (!placement.sharded.parameters || kept_on_hosts());
  if (!gathers) return std::vector<uint8_t>(plans.size(), 1);
  auto changed = schedule->left_units();
  for (const int64_t unit : units) changed[static_cast<size_t>(unit)] = 1;
  const auto written = written_units();
  for (size_t u = 0; u < changed.size(); ++u) changed[u] |= written[u];
  const auto count = static_cast<int64_t>(changed.size());
  auto mine = at::empty({count}, at::kByte);
  std::copy(changed.begin(), changed.end(), mine.mutable_data_ptr<uint8_t>());
  auto all = at::empty({group().size() * count}, at::kByte);
  group().all_gather_control(all, mine, label);
  const auto* theirs = all.const_data_ptr<uint8_t>();
  for (int64_t i = 0; i < all.numel(); ++i) changed[static_cast<size_t>(i % count)] |= theirs[i];
  return changed;
}

void Engine::Impl::change_parameters(std::string_view label, const std::function<void()>& write,
                                     const std::vector<int64_t>& units) {
  const c10::NoGradGuard no_grad;
  check_between_steps(label);
  group().barrier(label);  // every rank has ended its gathers
  const auto changed = changed_units(label, units);
  schedule->finish();
  commit_writes();
  invalidate();
  write();
  for (int64_t u = 0; u < layout.unit_count(); ++u) {
    if (changed[static_cast<size_t>(u)] != 0) gather->publish(u);
  }
  gather->finish_publish();
  gather->settle();
}

void Engine::Impl::replace_states(std::string_view label, const std::function<void()>& write) {
  group().barrier(label);  // every rank has ended its gathers
  commit_writes();
  invalidate();  // refused while a zero::Gathered scope is open: then nothing has changed yet
  schedule->discard();
  reduce->join_begun();
  reduce->clear();
  reduce->forget_losses();  // they are not among the states
  micro_batches = 0;
  passed = false;
  write();
  for (int64_t u = 0; u < layout.unit_count(); ++u) gather->publish(u);  // frozen ones, too
  gather->finish_publish();
  gather->settle();
}

void Engine::Impl::check_gradients_kept() const {
  if (!timing.in_backward) return;
  throw ConfigError(
      "With update_in_backward gradients are used as they come and are not kept. Switch it off to "
      "read or write them.");
}

void Engine::Impl::at_boundary(std::string_view what) const {
  check_between_steps(what);
  if (micro_batches == 0) return;
  throw Error(
      fmt::format("{} in the middle of an accumulation ({} of {} micro-batches): gradients are not "
                  "saved. Call it after the step.",
                  what, micro_batches, config.gradient_accumulation_steps));
}

void Engine::Impl::check_between_steps(std::string_view what) const {
  if (!reduce->handed_over()) return;
  throw Error(
      fmt::format("{} between Engine::backward and Engine::step: with update_in_backward some "
                  "weights have been updated already and others have not. Call it after the step; "
                  "where the pass or the step failed, load a checkpoint first.",
                  what));
}

}  // namespace zero
