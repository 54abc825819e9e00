#include <array>
#include <charconv>
#include <cmath>
#include <nlohmann/json.hpp>
#include <utility>

#include "zero/train/metrics.h"
#include "zero/train/monitor.h"
#include "zero/train/report_file.h"

namespace zero::train {
namespace {

using Json = nlohmann::ordered_json;

/// Returns a number as JSON has it: null if it is not finite.
Json finite(double value) { return std::isfinite(value) ? Json(value) : Json(nullptr); }

/// Returns the shortest decimal that reads back to this very float, whether it is read as a float
/// or through a double (a float widened to double would print twice the digits).
Json shortest(float value) {
  if (!std::isfinite(value)) return nullptr;
  std::array<char, 32> text{};
  const auto end = std::to_chars(text.data(), text.data() + text.size(), value).ptr;
  double widened = 0;
  std::from_chars(text.data(), end, widened);
  return static_cast<float>(widened) == value ? widened : static_cast<double>(value);
}

Json to_json(const Usage& usage) { return {{"current", usage.current}, {"peak", usage.peak}}; }

Json to_json(const comm::LinkTimes& link) {
  Json object;
  for (const auto& part : kLinkParts) object[std::string(part.name)] = finite(link.*part.ms);
  return object;
}

Json to_json(const RankMemory& memory) {
  Json object;
  for (size_t i = 0; i < kCategories; ++i) {
    auto& shown = object[std::string(name(static_cast<Category>(i)))] = to_json(memory.usage[i]);
    if (memory.formula[i]) shown["formula"] = *memory.formula[i];
  }
  object["total"] = to_json(memory.total);
  object["device"] = to_json(memory.device);
  object["padding"] = memory.padding;
  object["reserved"] = to_json(memory.reserved);
  if (memory.disk.bytes > 0) {
    object["disk"] = {
        {"bytes", memory.disk.bytes}, {"read", memory.disk.read}, {"written", memory.disk.written}};
  }
  object["system_requests"] = memory.system_requests;
  return object;
}

Json to_json(const RankTraffic& traffic) {
  const bool several_hosts = traffic.hosts > 1;
  Json object;
  for (size_t i = 0; i < comm::kCollectives; ++i) {
    const auto& count = traffic.counts[i];
    auto& shown = object[std::string(comm::name(static_cast<comm::Collective>(i)))];
    shown = {{"calls", count.calls},
             {"logical_bytes", count.logical_bytes},
             {"copied_bytes", count.copied_bytes}};
    if (several_hosts) shown["link_bytes"] = count.link_bytes;
    if (traffic.formula[i]) shown["formula"] = *traffic.formula[i];
    if (several_hosts && traffic.link_formula[i]) shown["link_formula"] = *traffic.link_formula[i];
  }
  if (traffic.disk.bytes > 0) {
    object["disk"] = {{"read", traffic.disk.read},
                      {"read_formula", traffic.disk_read_formula},
                      {"written", traffic.disk.written},
                      {"written_formula", traffic.disk_written_formula},
                      {"wait_ms", traffic.disk.wait_ms}};
  }
  if (traffic.host.down > 0 || traffic.host.up > 0) {
    object["host"] = {{"down", traffic.host.down},
                      {"down_formula", traffic.host_formula.down},
                      {"up", traffic.host.up},
                      {"up_formula", traffic.host_formula.up}};
  }
  if (traffic.link) object["link"] = to_json(*traffic.link);
  return object;
}

Json to_json(const Breakdown& breakdown) {
  Json object;
  for (const auto& part : kBreakdown) object[std::string(part.name)] = breakdown.*part.ms;
  return object;
}

Json to_json(const comm::CallTimes& calls) {
  Json object{{"op", comm::name(calls.collective)},
              {"ranks", calls.ranks},
              {"message_bytes", calls.message},
              {"calls", calls.calls},
              {"total_bytes", calls.calls * calls.message},
              {"total_ms", calls.total_ms()},
              {"average_ms", calls.average_ms()}};
  if (calls.in_place) {
    object["in_place"] = true;
  } else {
    object["algorithm_gb_per_s"] = calls.algorithm_bandwidth();
    object["bus_gb_per_s"] = calls.bus_bandwidth();
  }
  return object;
}

Json to_json(const FlopsCount& count) {
  return {{"parameters", count.parameters},
          {"macs", count.macs},
          {"flops", count.flops},
          {"ms", finite(count.ms)}};
}

/// Adds all modules, parents before the modules in them.
void add_modules(const ModuleFlops& module, Json& all) {
  Json object{{"module", module.name}};
  object.update(to_json(module.total));
  all.push_back(std::move(object));
  for (const auto& child : module.children) add_modules(child, all);
}

Json to_json(const StepFlops& step) {
  Json object{{"event", "flops"}, {"step", step.step}};
  object.update(to_json(step.model.total));
  object["flops_backward"] = step.backward_factor() * static_cast<double>(step.model.total.flops);
  object["step_ms"] = finite(step.step_ms);
  object["tokens_per_s"] = finite(step.tokens_per_s);
  if (step.peak > 0) {
    object["peak_flops_per_s"] = finite(step.peak);
    object["mfu"] = finite(step.mfu());
  }
  add_modules(step.model, object["modules"] = Json::array());
  return object;
}

template <class Report>
Json per_rank(const std::vector<Report>& reports) {
  Json array = Json::array();
  for (size_t rank = 0; rank < reports.size(); ++rank) {
    Json object{{"rank", rank}};
    object.update(to_json(reports[rank]));
    array.push_back(std::move(object));
  }
  return array;
}

class JsonlMonitor final : public Monitor {
 public:
  JsonlMonitor(const std::string& path, bool append) : file_(path, "the log"), replaces_(!append) {}

  void begin(const RunInfo& info) override {
    Json object{{"event", "config"}};
    object.update(Json::parse(info.config_json));
    object["parameters"] = info.parameters;
    object["world_size"] = info.ranks;
    object["tokens_per_step"] = info.tokens_per_step();
    object["train_tokens"] = info.train_tokens;
    object["validation_tokens"] = info.validation_tokens;
    object["first_step"] = info.first_step;
    if (!info.weights.empty()) object["weights"] = info.weights;
    if (!info.changes.empty()) object["changes"] = info.changes;
    if (info.from_memory) object["from_memory"] = true;
    if (!info.damaged.empty()) object["damaged"] = info.damaged;
    if (!info.tiers.empty()) object["tiers"] = info.tiers;
    write(object);
    if (info.link) {
      write({{"event", "link"},
             {"bytes_per_s", finite(info.link->bandwidth)},
             {"latency_ms", finite(info.link->latency * 1e3)}});
    }
  }
  void step(const StepReport& report) override {
    Json object{{"step", report.step},
                {"loss", shortest(report.loss)},
                {"grad_norm", finite(report.grad_norm)},
                {"lr", finite(report.lr)},
                {"step_ms", finite(report.step_ms)},
                {"tokens_per_s", finite(report.tokens_per_s)},
                {"comm_ms", finite(report.comm_ms)},
                {"disk_ms", finite(report.disk_ms)},
                {"memory_peak", report.memory_peak}};
    if (!report.group_norms.empty()) {
      auto& norms = object["group_norms"] = Json::array();
      for (const double norm : report.group_norms) norms.push_back(finite(norm));
    }
    if (report.loss_scale != 0) object["loss_scale"] = report.loss_scale;
    if (report.breakdown) object["breakdown"] = to_json(*report.breakdown);
    if (report.link) object["link"] = to_json(*report.link);
    if (report.skipped) object["skipped"] = true;
    if (!report.anomaly.empty()) object["anomaly"] = report.anomaly;
    if (!report.notices.empty()) object["notices"] = report.notices;
    write(object);
    if (report.flops) write(to_json(report.flops->step));
  }
  void rewound(const RewindReport& report) override {
    write(
        {{"event", "rewind"}, {"from", report.from}, {"to", report.to}, {"reason", report.reason}});
  }
  void validation(const ValidationReport& report) override {
    Json object{{"event", "validation"},
                {"step", report.step},
                {"loss", finite(report.loss)},
                {"tokens", report.tokens}};
    if (const auto& accuracy = report.accuracy) {
      object["accuracy"] = accuracy->share();
      object["correct"] = accuracy->correct;
      object["texts"] = accuracy->texts;
    }
    write(object);
  }
  void saved(const SaveReport& report) override {
    Json object{{"event", report.in_memory ? "memory_copy" : "save"},
                {"step", report.step},
                {"path", report.path}};
    if (!report.failure.empty()) {
      object["failure"] = report.failure;
    } else {
      object["bytes"] = report.bytes;
      object["held_ms"] = finite(report.held_ms);
      object["seconds"] = finite(report.seconds);
    }
    write(object);
  }
  void profile(const ProfileReport& report) override {
    write({{"event", "profile"},
           {"step", report.step},
           {"file", report.file},
           {"spans", report.spans},
           {"dropped", report.dropped}});
  }
  void memory(const std::vector<RankMemory>& ranks) override {
    write({{"event", "memory"}, {"per_rank", per_rank(ranks)}});
  }
  void traffic(const std::vector<RankTraffic>& ranks, int64_t steps) override {
    write({{"event", "traffic"}, {"steps", steps}, {"per_rank", per_rank(ranks)}});
  }
  void calls(const std::vector<comm::CallTimes>& calls) override {
    Json ops = Json::array();
    for (const auto& each : calls) ops.push_back(to_json(each));
    write({{"event", "comms"}, {"ops", std::move(ops)}});
  }
  void sample(const std::string& prompt, const std::string& text) override {
    write({{"event", "sample"}, {"prompt", prompt}, {"text", text}});
  }
  void end(const EndReport& report) override {
    write({{"event", "end"},
           {"reason", report.reason},
           {"steps", report.steps},
           {"seconds", finite(report.seconds)},
           {"model", report.model_file}});
  }

 private:
  void write(const Json& object) {
    // A model may produce bytes that are not UTF-8: they become U+FFFD.
    const std::string line = object.dump(-1, ' ', false, Json::error_handler_t::replace) + "\n";
    if (std::exchange(replaces_, false)) file_.clear();
    file_.write(line);
  }

  ReportFile file_;
  bool replaces_;  // whether the first line replaces the file's contents
};

}  // namespace

std::unique_ptr<Monitor> jsonl_monitor(const std::string& file, bool append) {
  return std::make_unique<JsonlMonitor>(file, append);
}

}  // namespace zero::train
