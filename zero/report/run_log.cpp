#include "zero/report/run_log.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <cmath>
#include <fstream>
#include <map>
#include <set>
#include <string_view>
#include <system_error>
#include <utility>

#include "zero/base/error.h"
#include "zero/base/json.h"
#include "zero/comm/traffic.h"
#include "zero/config/settings.h"
#include "zero/train/metrics.h"
#include "zero/train/run_folder.h"

namespace zero::report {
namespace {

namespace fs = std::filesystem;
using Json = nlohmann::json;
using Kind = LoggedEvent::Kind;

/// An object of the log, whose values are asked for by name.
class Object {
 public:
  Object(const Json& json, std::string place) : json_(json), place_(std::move(place)) {
    if (!json_.is_object()) fail("is no object");
  }
  [[noreturn]] void fail(const std::string& why) const {
    throw DataError(
        fmt::format("{} {}. This is no log of this version's `zero train`.", place_, why));
  }
  bool has(const char* key) const { return json_.contains(key) && !json_.at(key).is_null(); }
  double number(const char* key, double absent = kAbsent) const {
    return has(key) ? expect(key, json_.at(key).is_number(), "number").get<double>() : absent;
  }
  int64_t whole(const char* key, int64_t absent = 0) const {
    return has(key) ? expect(key, json_.at(key).is_number_integer(), "whole number").get<int64_t>()
                    : absent;
  }
  std::string text(const char* key) const {
    return has(key) ? expect(key, json_.at(key).is_string(), "text").get<std::string>()
                    : std::string();
  }
  bool flag(const char* key) const {
    return has(key) && expect(key, json_.at(key).is_boolean(), "truth value").get<bool>();
  }
  Object object(const char* key) const {
    if (!has(key)) fail(fmt::format("has no '{}'", key));
    return {json_.at(key), fmt::format("{}, '{}',", place_, key)};
  }
  std::vector<std::string> texts(const char* key) const {
    std::vector<std::string> all;
    if (!has(key)) return all;
    for (const auto& item : expect(key, json_.at(key).is_array(), "list")) {
      if (!item.is_string()) fail(fmt::format("has a '{}' that is no list of texts", key));
      all.push_back(item.get<std::string>());
    }
    return all;
  }
  std::vector<Object> objects(const char* key) const {
    std::vector<Object> all;
    if (!has(key)) fail(fmt::format("has no '{}'", key));
    for (const auto& item : expect(key, json_.at(key).is_array(), "list"))
      all.emplace_back(item, fmt::format("{}, '{}',", place_, key));
    return all;
  }
  const Json& json() const { return json_; }

 private:
  const Json& expect(const char* key, bool holds, const char* what) const {
    if (!holds) fail(fmt::format("has a '{}' that is no {}", key, what));
    return json_.at(key);
  }
  const Json& json_;
  std::string place_;
};

/// Adds the values of `json` by their full keys.
void flatten(const Json& json, const std::string& path, std::map<std::string, std::string>& all) {
  if (json.is_object() && !json.empty()) {
    for (const auto& [key, value] : json.items())
      flatten(value, path.empty() ? key : fmt::format("{}.{}", path, key), all);
    return;
  }
  all[path] = json.is_string() ? json.get<std::string>()
                               : json.dump(-1, ' ', false, Json::error_handler_t::replace);
}

comm::LinkTimes link_of(const Object& object) {
  comm::LinkTimes link;
  for (const auto& part : train::kLinkParts)
    link.*part.ms = object.number(std::string(part.name).c_str(), 0);
  return link;
}

Usage usage_of(const Object& object) {
  return {.current = object.whole("current"), .peak = object.whole("peak")};
}

train::RankMemory memory_of(const Object& rank) {
  train::RankMemory memory;
  for (size_t i = 0; i < kCategories; ++i) {
    const std::string key(zero::name(static_cast<Category>(i)));
    if (!rank.has(key.c_str())) continue;
    const auto object = rank.object(key.c_str());
    memory.usage[i] = usage_of(object);
    if (object.has("formula")) memory.formula[i] = object.whole("formula");
  }
  memory.total = usage_of(rank.object("total"));
  if (rank.has("device")) memory.device = usage_of(rank.object("device"));
  if (rank.has("reserved")) memory.reserved = usage_of(rank.object("reserved"));
  memory.padding = rank.whole("padding");
  if (rank.has("disk")) {
    const auto disk = rank.object("disk");
    memory.disk.bytes = disk.whole("bytes");
    memory.disk.read = disk.whole("read");
    memory.disk.written = disk.whole("written");
  }
  return memory;
}

train::RankTraffic traffic_of(const Object& rank) {
  train::RankTraffic traffic;
  for (size_t i = 0; i < comm::kCollectives; ++i) {
    const std::string key(comm::name(static_cast<comm::Collective>(i)));
    if (!rank.has(key.c_str())) continue;
    const auto object = rank.object(key.c_str());
    auto& count = traffic.counts[i];
    count.calls = object.whole("calls");
    count.logical_bytes = object.whole("logical_bytes");
    count.copied_bytes = object.whole("copied_bytes");
    if (object.has("link_bytes")) {
      traffic.hosts = 2;  // the log says only that there were several
      count.link_bytes = object.whole("link_bytes");
    }
    if (object.has("formula")) traffic.formula[i] = object.whole("formula");
    if (object.has("link_formula")) traffic.link_formula[i] = object.whole("link_formula");
  }
  if (rank.has("disk")) {
    const auto disk = rank.object("disk");
    traffic.disk.read = disk.whole("read");
    traffic.disk.written = disk.whole("written");
    traffic.disk.wait_ms = disk.number("wait_ms", 0);
    traffic.disk_read_formula = disk.whole("read_formula");
    traffic.disk_written_formula = disk.whole("written_formula");
  }
  if (rank.has("host")) {
    const auto host = rank.object("host");
    traffic.host = {.down = host.whole("down"), .up = host.whole("up")};
    traffic.host_formula = {.down = host.whole("down_formula"), .up = host.whole("up_formula")};
  }
  if (rank.has("link")) traffic.link = link_of(rank.object("link"));
  return traffic;
}

class Reader {
 public:
  explicit Reader(RunLog& log) : log_(log) {}

  void take(const Object& line) {
    if (log_.configuration.empty() && line.text("event") != "config")
      line.fail("is not the configuration with which a log begins");
    if (!line.has("event")) return step(line);
    const auto event = line.text("event");
    if (event == "config") return config(line);
    if (event == "origins") {
      std::map<std::string, std::string> from;
      flatten(line.object("from").json(), "", from);
      for (auto& setting : log_.settings) {
        const auto found = from.find(setting.key);
        setting.origin = found == from.end() ? "default" : found->second;
      }
    } else if (event == "validation") {
      log_.validations.push_back({.step = line.whole("step"),
                                  .loss = line.number("loss"),
                                  .tokens = line.whole("tokens")});
      if (line.has("texts"))
        log_.validations.back().accuracy =
            train::Accuracy{line.whole("correct"), line.whole("texts")};
    } else if (event == "save") {
      save(line);
    } else if (event == "rewind") {
      const auto to = line.whole("to");
      add(line.whole("from"), Kind::rewind,
          fmt::format("Training went back to the checkpoint of step {}. {}", to,
                      line.text("reason")));
      forget_after(to);
    } else if (event == "link") {
      log_.link = comm::LinkSpeed{.bandwidth = line.number("bytes_per_s", 0),
                                  .latency = line.number("latency_ms", 0) / 1e3};
    } else if (event == "profile") {
      add(line.whole("step"), Kind::profile,
          fmt::format("The step's profile is in {}.", line.text("file")));
    } else if (event == "memory") {
      log_.memory.clear();
      for (const auto& rank : line.objects("per_rank")) log_.memory.push_back(memory_of(rank));
    } else if (event == "traffic") {
      log_.traffic.clear();
      log_.traffic_steps = line.whole("steps");
      for (const auto& rank : line.objects("per_rank")) log_.traffic.push_back(traffic_of(rank));
    } else if (event == "comms") {
      log_.calls.clear();
      for (const auto& op : line.objects("ops")) {
        log_.calls.push_back({.op = op.text("op") + (op.flag("in_place") ? " in place" : ""),
                              .ranks = op.whole("ranks"),
                              .message_bytes = op.whole("message_bytes"),
                              .calls = op.whole("calls"),
                              .total_ms = op.number("total_ms"),
                              .bus_gb_per_s = op.number("bus_gb_per_s")});
      }
    } else if (event == "flops") {
      log_.flops = line.number("flops", 0) + line.number("flops_backward", 0);
      log_.mfu = line.number("mfu");
    } else if (event == "sample") {
      log_.prompt = line.text("prompt");
      log_.sample = line.text("text");
    } else if (event == "end") {
      log_.end = train::EndReport{.steps = line.whole("steps"),
                                  .seconds = line.number("seconds", 0),
                                  .reason = line.text("reason"),
                                  .model_file = line.text("model")};
    } else if (std::ranges::find(log_.unknown, event) == log_.unknown.end()) {
      log_.unknown.push_back(event);
    }
  }

  /// Joins the steps that were skipped one after the other.
  void finish() {
    const auto& steps = log_.steps;
    for (size_t i = 0; i < steps.size(); ++i) {
      if (!steps[i].skipped) continue;
      size_t last = i;
      while (last + 1 < steps.size() && steps[last + 1].skipped) ++last;
      const auto first_step = steps[i].step;
      add(first_step, Kind::skipped,
          last == i ? std::string("The step was skipped: it updated nothing.")
                    : fmt::format("Steps {} to {} were skipped: they updated nothing.", first_step,
                                  steps[last].step));
      i = last;
    }
    std::ranges::stable_sort(log_.events, {}, &LoggedEvent::step);
  }

 private:
  void add(int64_t step, Kind kind, std::string text) {
    log_.events.push_back({.step = step, .kind = kind, .text = std::move(text)});
  }

  /// A later line tells of these steps again.
  void forget_after(int64_t step) {
    std::erase_if(log_.steps, [&](const LoggedStep& each) { return each.step > step; });
    std::erase_if(log_.validations, [&](const auto& each) { return each.step > step; });
  }

  void config(const Object& line) {
    const bool again = !log_.configuration.empty();
    const auto engine = line.object("engine").json();
    auto file = engine;
    file["train"] = line.object("train").json();
    log_.configuration = file.dump(-1, ' ', false, Json::error_handler_t::replace);
    log_.model = line.object("model").json().dump(-1, ' ', false, Json::error_handler_t::replace);
    log_.parameters = line.whole("parameters");
    log_.ranks = static_cast<int>(std::clamp<int64_t>(line.whole("world_size", 1), 1, 1 << 24));
    log_.tokens_per_step = line.whole("tokens_per_step");
    log_.train_tokens = line.whole("train_tokens");
    log_.weights = line.text("weights");
    log_.tiers = line.text("tiers");
    settings(file);
    const auto first = line.whole("first_step", 1);
    forget_after(first - 1);
    const auto changes = line.texts("changes");
    for (const auto& damage : line.texts("damaged")) add(first, Kind::restart, damage);
    if (again || first > 1) {
      add(first, Kind::restart,
          fmt::format("The run went on from the checkpoint of step {} on {} rank{}{}{}.", first - 1,
                      log_.ranks, log_.ranks == 1 ? "" : "s",
                      changes.empty() ? "" : "; changed: ", fmt::join(changes, ", ")));
    }
    // The end that an earlier part of the run came to is none.
    log_.end.reset();
    log_.memory.clear();
    log_.traffic.clear();
    log_.calls.clear();
    log_.sample.clear();
  }

  void settings(const Json& file) {
    std::map<std::string, std::string> values;
    std::map<std::string, std::string> defaults;
    flatten(file, "", values);
    flatten(Json::parse(Settings{}.dump()), "", defaults);
    log_.settings.clear();
    for (const auto& [key, value] : values) {
      const auto found = defaults.find(key);
      const bool is_default = found != defaults.end() && found->second == value;
      log_.settings.push_back(
          {.key = key, .value = value, .origin = is_default ? "default" : "given"});
    }
  }

  void save(const Object& line) {
    const auto step = line.whole("step");
    if (const auto failure = line.text("failure"); !failure.empty())
      return add(step, Kind::failed_save, failure);
    add(step, Kind::save,
        fmt::format("A checkpoint of {} was written in {:.2f} s; training waited {:.1f} ms.",
                    format_bytes(line.number("bytes", 0)), line.number("seconds", 0),
                    line.number("held_ms", 0)));
  }

  void step(const Object& line) {
    LoggedStep step{.step = line.whole("step", -1),
                    .loss = line.number("loss"),
                    .grad_norm = line.number("grad_norm"),
                    .lr = line.number("lr"),
                    .loss_scale = line.number("loss_scale"),
                    .step_ms = line.number("step_ms"),
                    .tokens_per_s = line.number("tokens_per_s"),
                    .comm_ms = line.number("comm_ms"),
                    .disk_ms = line.number("disk_ms"),
                    .memory_peak = line.number("memory_peak"),
                    .skipped = line.flag("skipped")};
    if (step.step < 0) line.fail("has neither 'event' nor 'step'");
    if (line.has("breakdown")) {
      const auto parts = line.object("breakdown");
      step.breakdown.emplace();
      for (const auto& part : train::kBreakdown)
        *step.breakdown.*part.ms = parts.number(std::string(part.name).c_str(), 0);
    }
    if (line.has("link")) step.link = link_of(line.object("link"));
    if (!std::isfinite(step.loss))
      add(step.step, Kind::anomaly, "The loss was not a finite number.");
    if (const auto anomaly = line.text("anomaly"); !anomaly.empty())
      add(step.step, Kind::anomaly, anomaly);
    for (const auto& notice : line.texts("notices")) add(step.step, Kind::notice, notice);
    if (!log_.steps.empty() && step.step <= log_.steps.back().step) forget_after(step.step - 1);
    log_.steps.push_back(step);
  }

  RunLog& log_;
};

fs::path log_of(const fs::path& run) {
  std::error_code error;
  if (fs::is_regular_file(run, error)) return run;
  if (!fs::exists(run, error)) {
    throw ConfigError(
        fmt::format("{} does not exist. Name the folder of a run, which `zero train` got as --out.",
                    run.string()));
  }
  const auto log = train::RunFolder(run).log();
  if (!fs::is_regular_file(log, error)) {
    throw ConfigError(
        fmt::format("{} holds no log.jsonl, so it is no run's folder. Name the folder that `zero "
                    "train` got as --out.",
                    run.string()));
  }
  return log;
}

}  // namespace

std::string_view name(LoggedEvent::Kind kind) {
  switch (kind) {
    case Kind::notice:
      return "notice";
    case Kind::anomaly:
      return "not finite";
    case Kind::skipped:
      return "skipped";
    case Kind::rewind:
      return "went back";
    case Kind::restart:
      return "restart";
    case Kind::save:
      return "save";
    case Kind::failed_save:
      return "save failed";
    case Kind::profile:
      return "profile";
  }
  return "";
}

std::string RunLog::setting(std::string_view key) const {
  const auto found = std::ranges::find(settings, key, &LoggedSetting::key);
  return found == settings.end() ? std::string() : found->value;
}

RunLog read_log(const fs::path& run) {
  RunLog log;
  log.path = log_of(run);
  const auto folder = fs::absolute(log.path).lexically_normal().parent_path();
  log.name = folder.filename().string();
  std::error_code error;
  const auto age = fs::file_time_type::clock::now() - fs::last_write_time(log.path, error);
  log.written = std::chrono::system_clock::now() -
                std::chrono::duration_cast<std::chrono::system_clock::duration>(age);
  std::ifstream file(log.path, std::ios::binary);
  if (!file) throw DataError(fmt::format("The log {} cannot be read.", log.path.string()));
  Reader reader(log);
  int64_t number = 0;
  for (std::string line; std::getline(file, line);) {
    ++number;
    const bool last = file.eof();  // it has no line break
    const auto place = fmt::format("Line {} of {}", number, log.path.string());
    Json json;
    try {
      json = parse_json(line);
    } catch (const Error& fault) {
      if (last && number > 1) {
        log.cut = true;
        break;
      }
      throw DataError(fmt::format("{} {}. This is no log of `zero train`.", place, fault.what()));
    }
    reader.take(Object(json, place));
  }
  if (number == 0) {
    throw DataError(fmt::format("The log {} is empty: its run was refused, or has not begun.",
                                log.path.string()));
  }
  reader.finish();
  return log;
}

std::vector<TimePart> time_parts(const LoggedStep& step) {
  const auto known = [](double ms) { return std::isfinite(ms) ? std::max(0.0, ms) : 0; };
  const double all = known(step.step_ms);
  if (!step.breakdown) {
    const double ranks = known(step.comm_ms);
    const double disk = known(step.disk_ms);
    return {{"everything else", std::max(0.0, all - ranks - disk)},
            {"waits for other ranks", ranks},
            {"waits for the disk", disk}};
  }
  const auto& b = *step.breakdown;
  const double passes = b.forward + b.backward + b.step;
  const double waits = b.gather + b.reduce + b.update + b.disk + b.control;
  return {{"computation", std::max(0.0, passes - waits)},
          {"gathers", b.gather},
          {"reductions", b.reduce},
          {"updates", b.update},
          {"disk", b.disk},
          {"control", b.control},
          {"data and the rest", std::max(0.0, all - passes)}};
}

std::vector<TimePart> link_parts(const LoggedStep& step) {
  std::vector<TimePart> parts;
  if (!step.link) return parts;
  for (const auto& part : train::kLinkParts) parts.push_back({part.text, *step.link.*part.ms});
  return parts;
}

}  // namespace zero::report
