#include "apps/zero/plan_tables.h"

#include <fmt/format.h>

#include <string>

#include "zero/planner/hardware.h"
#include "zero/planner/operator_table.h"
#include "zero/planner/papers.h"
#include "zero/planner/trace.h"

namespace zero::app::planning {

using benchmarks::Json;

bool print_papers() {
  std::string table;
  int failed = 0;
  for (const auto& row : plan::published_rows()) {
    if (row.table != table) {
      table = row.table;
      fmt::print("\n{}\n  {:<44} {:>10} {:>10} {:<6} {:>8} {:>6}\n", table, "row", "published",
                 "predicted", "", "off", "may be");
    }
    const bool tested = row.tolerance > 0;
    fmt::print("  {:<44} {:>10.4g} {:>10.4g} {:<6} {:>+7.1f}% {:>6}{}{}\n", row.name, row.published,
               row.predicted, row.unit, 100 * row.error(),
               tested ? fmt::format("{:.3g}%", 100 * row.tolerance) : "-",
               row.note.empty() ? "" : "  " + row.note, row.passes() ? "" : "  TOO FAR");
    if (!row.passes()) ++failed;
  }
  if (failed > 0) fmt::print("\n{} rows are further off than they may be.\n", failed);
  return failed == 0;
}

void print_devices() {
  fmt::print("{:<11} {:>9} {:>9} {:>8} {:>9} {:>9} {:>8} {:>5} {:>9} {:>8}  {}\n", "device",
             "TFLOP/s", "fp32", "memory", "GB/s", "link", "PCIe", "host", "network", "products",
             "source");
  for (const auto& d : plan::devices()) {
    fmt::print(
        "{:<11} {:>9.1f} {:>9.1f} {:>8.0f} {:>9.0f} {:>9.0f} {:>8.0f} {:>5} {:>9.1f} {:>8.2f}  "
        "{}\n",
        d.name, d.flops * 1e-12, d.flops_fp32 * 1e-12, d.memory * 1e-9, d.bandwidth * 1e-9,
        d.link * 1e-9, d.pcie * 1e-9, d.per_host, d.network * 1e-9, d.products, d.source);
  }
}

void print_operators(const Options& o, const LanguageModelConfig& sizes) {
  const auto device = o.device_of_operators();
  const auto dtype = o.dtype == "fp32" ? at::kFloat : device.bf16 ? at::kBFloat16 : at::kHalf;
  auto autocast = o.autocast_dtype();
  if (autocast && !device.bf16) autocast = at::kHalf;
  const bool narrow = dtype != at::kFloat || autocast;
  const double flops = (narrow ? device.flops : device.flops_fp32) * device.products;
  const auto rows =
      plan::operator_rows(plan::trace(sizes, o.batch, o.seq, 0,
                                      {.dtype = dtype, .host = device.cpu, .autocast = autocast}),
                          device, dtype);
  double seconds = 0;
  for (const auto& row : rows) seconds += row.seconds;
  fmt::print(
      "{} in {}, {} sequences of {} tokens on one {}: {:.4g} TFLOP/s, {:.4g} GB/s\n\n{:>9} {:>6} "
      "{:>10} {:>10}  {:<7} {:<9} {:<46} {}\n",
      o.model, c10::toString(dtype), o.batch, o.seq, device.name, flops * 1e-12,
      device.bandwidth * device.streams * 1e-9, "ms", "count", "GFLOP", "MB", "bound", "pass",
      "operator", "module");
  Json results = Json::array();
  for (const auto& row : rows) {
    const bool by_memory = row.memory_seconds > row.seconds / 2;
    fmt::print("{:>9.3f} {:>6} {:>10.1f} {:>10.1f}  {:<7} {:<9} {:<46} {}\n", 1e3 * row.seconds,
               row.count, row.flops * 1e-9, row.bytes * 1e-6, by_memory ? "memory" : "compute",
               row.backward ? "backward" : "forward", row.name, row.module);
    results.push_back({{"operator", row.name},
                       {"module", row.module},
                       {"backward", row.backward},
                       {"count", row.count},
                       {"flops", row.flops},
                       {"bytes", row.bytes},
                       {"ms", 1e3 * row.seconds},
                       {"memory_ms", 1e3 * row.memory_seconds}});
  }
  fmt::print("{:>9.3f} ms together: {:.0f} tokens a second at the most\n", 1e3 * seconds,
             static_cast<double>(o.batch * o.seq) / seconds);
  o.json.write("operators", benchmarks::machine(),
               {{"model", o.model},
                {"micro_batch", o.batch},
                {"seq", o.seq},
                {"dtype", c10::toString(dtype)},
                {"flop_per_s", flops},
                {"bytes_per_s", device.bandwidth * device.streams}},
               results);
}

}  // namespace zero::app::planning
