#include "zero/planner/operator_table.h"

#include <algorithm>
#include <functional>
#include <map>
#include <string_view>
#include <tuple>

#include "zero/config/config.h"
#include "zero/engine/costs.h"
#include "zero/engine/plan_units.h"
#include "zero/planner/simulate.h"

namespace zero::plan {
namespace {

// Returns the path with * in the place of numbers: the layers of a model are alike.
std::string kind_of(std::string_view path) {
  std::string kind;
  while (!path.empty()) {
    const auto dot = std::min(path.find('.'), path.size());
    const auto part = path.substr(0, dot);
    const bool number = part.find_first_not_of("0123456789") == std::string_view::npos;
    kind += (kind.empty() ? "" : ".") + std::string(number ? "*" : part);
    path.remove_prefix(std::min(dot + 1, path.size()));
  }
  return kind;
}

void add(OperatorRow& row, const TracedOperator& op, const Device& device, at::ScalarType dtype) {
  const double seconds = operator_seconds(op, device, dtype);
  ++row.count;
  row.flops += op.flops;
  row.bytes += op.bytes;
  row.seconds += seconds;
  auto without = op;
  without.flops = 0;
  if (operator_seconds(without, device, dtype) == seconds) row.memory_seconds += seconds;
}

}  // namespace

std::vector<OperatorRow> operator_rows(const Trace& trace, const Device& device,
                                       at::ScalarType dtype) {
  std::map<std::tuple<int64_t, std::string, bool>, OperatorRow> found;
  std::vector<std::string> kinds;
  for (const auto& module : trace.modules) kinds.push_back(kind_of(module));
  for (const auto& op : trace.operators) {
    const auto& module = kinds[static_cast<size_t>(op.module)];
    auto& row = found[{op.name, module, op.backward}];
    if (row.count == 0) {
      row.name = trace.names[static_cast<size_t>(op.name)];
      row.module = module;
      row.backward = op.backward;
    }
    add(row, op, device, dtype);
  }
  std::vector<OperatorRow> rows;
  // Views take nothing.
  for (auto& [key, row] : found)
    if (row.seconds > 0) rows.push_back(std::move(row));

  Config config;
  config.bf16 = dtype == at::kBFloat16;
  config.fp16 = dtype == at::kHalf;
  const partition::RankGrid grid{.hosts = 1, .ranks_a_host = 1, .shards = 1};
  const auto layout = lay_out(trace.model, config, grid);
  const auto units = plan_units(layout, trace.model, config, {.grid = grid});
  TracedOperator norm, update;
  for (const auto& costs :
       unit_costs(planned_step(layout, units, trace.model, config, {.grid = grid})))
    update.bytes += static_cast<double>(costs.update);
  for (const auto& unit : units) {
    if (!unit.trainable) continue;
    norm.bytes += static_cast<double>(unit.owned.size()) *
                  static_cast<double>(c10::elementSize(unit.gradient_dtype));
  }
  const auto add_row = [&](const char* name, const TracedOperator& op) {
    add(rows.emplace_back(OperatorRow{.name = name, .module = {}, .backward = true}), op, device,
        dtype);
  };
  add_row("zero::squared_norm_", norm);
  add_row("zero::update_", update);
  std::ranges::stable_sort(rows, std::greater{}, &OperatorRow::seconds);
  return rows;
}

}  // namespace zero::plan
