// `zero tune`: short real runs of the configurations that the planner ranks first.
//
// Note [Tries]
// Each try is a run of `zero train` with a file that holds the candidate's keys over those of
// --config, in a folder of its own. Its log says how long its steps took. tune.json has every try
// that has ended, so a tuning that was stopped goes on from there; it belongs to one question. A
// try that failed is made again.
#include <fcntl.h>
#include <fmt/format.h>
#include <fmt/ranges.h>
#include <spawn.h>
#include <sys/wait.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <filesystem>
#include <map>
#include <sstream>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "apps/zero/options.h"
#include "apps/zero/subcommands.h"
#include "zero/base/error.h"
#include "zero/checkpoint/file.h"
#include "zero/config/fields.h"
#include "zero/config/settings.h"
#include "zero/models/architectures.h"
#include "zero/planner/calibrate.h"
#include "zero/planner/halving.h"
#include "zero/planner/here.h"
#include "zero/planner/planner.h"
#include "zero/report/run_log.h"
#include "zero/train/run_folder.h"
#include "zero/train/stop.h"

extern char** environ;  // NOLINT(readability-redundant-declaration)

namespace zero::app::tuning {
namespace {

namespace fs = std::filesystem;
using Json = nlohmann::ordered_json;
using plan::Candidate;

constexpr const char* kDescription =
    "Finds the fastest configuration of a training on this machine: the planner ranks what fits, "
    "the first of them run\n"
    "for a few steps, the faster half for twice as many, and so on. Every one has steps of --batch "
    "sequences.\n\n"
    "  zero tune --model gpt2-nano --data my_tokens --batch 16 --seq 128 --nproc 2 --out tuned\n"
    "  zero train --config tuned/ds_config.json --model gpt2-nano --data my_tokens --seq 128 "
    "--nproc 2\n\n"
    "DIR gets ds_config.json, tune.json (every try), hardware.json (this machine as the tries "
    "found it, for --hardware\n"
    "of the next plan) and a file for what each try printed. A tuning that was stopped goes on "
    "where "
    "it was when the same\n"
    "command is given again.";

constexpr std::array kVaried{"stage", "micro-batch", "recompute", "format"};

struct Options {
  std::string model = "gpt2";
  std::vector<std::string> data;
  std::string data_weights;
  int64_t batch = 16;
  int64_t seq = 256;
  int nproc = 2;
  std::string dtype = "fp32";
  std::vector<std::string> vary{"stage", "micro-batch", "recompute"};
  int64_t tries = 8;
  int64_t steps = 4;
  std::string config;
  std::string hardware;
  std::string out = "tuned";
  bool overwrite = false;
};

std::optional<int> read_command_line(const Arguments& arguments, Options& o) {
  OptionParser parser("tune", kDescription);
  parser.add_option("--model", o.model, "As `zero train` takes it");
  parser.add_option("--data", o.data, "As `zero train` takes it")
      ->required()
      ->allow_extra_args(false);
  parser.add_option("--data-weights", o.data_weights, "As `zero train` takes them")
      ->type_name("LIST");
  parser.add_option("--batch", o.batch, "Sequences of a step, over all ranks")->check(positive());
  parser.add_option("--seq", o.seq, "Tokens of a sequence")->check(positive());
  parser.add_option("-n,--nproc", o.nproc, "Ranks on this machine")->check(positive());
  parser.add_option("--dtype", o.dtype, "fp32, or bf16 with fp32 master weights")
      ->check(CLI::IsMember({"fp32", "bf16"}));
  parser
      .add_option("--vary", o.vary,
                  "What may change: stage, micro-batch, recompute, and format (states in 8 bits, "
                  "which changes results)")
      ->delimiter(',')
      ->check(CLI::IsMember(std::vector<std::string>(kVaried.begin(), kVaried.end())))
      ->type_name("LIST");
  parser.add_option("--tries", o.tries, "Candidates of the first round")->check(positive());
  parser.add_option("--steps", o.steps, "Steps of each of them, behind two to warm up")
      ->check(positive());
  parser.add_option("--config", o.config, "Other settings of the runs")->type_name("FILE");
  parser
      .add_option("--hardware", o.hardware,
                  "A JSON file that describes this machine; else it is measured")
      ->type_name("FILE");
  parser.add_option("-o,--out", o.out, "Folder for the results")->type_name("DIR");
  parser.add_flag(
      "--overwrite", o.overwrite,
      "Replace the tries of an earlier question, and a ds_config.json of another origin");
  return parser.read(arguments);
}

bool varies(const Options& o, std::string_view what) {
  return std::ranges::find(o.vary, what) != o.vary.end();
}

/// Returns the question whose candidates are tried. `sizes` outlive it.
plan::Question question_of(const Options& o, const LanguageModelConfig& sizes) {
  auto cluster = o.hardware.empty() ? plan::measured_here(o.nproc)
                                    : plan::cluster_from_json(
                                          read_file(o.hardware, fail<ConfigError>), o.hardware);
  cluster.hosts = 1;
  cluster.per_host = o.nproc;
  return {.trace = plan::tracer(sizes, o.seq),
          .global_batch = o.batch,
          .sequence = o.seq,
          .bf16 = o.dtype == "bf16",
          .cluster = cluster,
          .recomputes = varies(o, "recompute")};
}

/// Returns the candidates to try, the best expected one first.
std::vector<Candidate> candidates_of(const Options& o, const plan::Question& question) {
  const auto answer = plan::plan(question);
  if (!answer.best().fits())
    throw ConfigError(fmt::format("There is nothing to tune. {}", answer.zero_or_not));
  const auto& best = answer.best();
  std::vector<Candidate> chosen;
  for (const auto& c : answer.candidates) {
    const bool other =
        (!varies(o, "stage") && c.config.stage != best.config.stage) ||
        (!varies(o, "micro-batch") && c.micro_batch != best.micro_batch) ||
        (!varies(o, "format") && c.config.optimizer_states != optim::StateFormat::fp32);
    if (c.fits() && !other && static_cast<int64_t>(chosen.size()) < o.tries) chosen.push_back(c);
  }
  if (chosen.empty())
    throw ConfigError(
        "There is nothing to try. Name more in --vary, as stage,micro-batch,recompute.");
  return chosen;
}

/// Returns the settings of --config, with the present names of keys.
Json settings_of(const Options& o) {
  if (o.config.empty()) return Json::object();
  const auto file = fields::parse_json(fields::read_text(o.config), o.config);
  return Json::parse(fields::with_present_names(file, o.config).dump());
}

/// Throws ConfigError where the tuning would write over --config or --hardware, or over results
/// that no tuning has written.
void check_files(const Options& o) {
  const fs::path folder(o.out);
  std::error_code error;
  for (fs::directory_iterator at(folder, error), end; !error && at != end; at.increment(error)) {
    const auto name = at->path().filename().string();
    const bool written = name == "ds_config.json" || name == "tune.json" ||
                         name == "hardware.json" || name.starts_with("try-");
    std::error_code ignored;
    const auto replaces = [&](const std::string& file) {
      return written && !file.empty() && fs::equivalent(at->path(), file, ignored);
    };
    for (const auto& [option, file] :
         {std::pair("--config", o.config), std::pair("--hardware", o.hardware)}) {
      if (!replaces(file)) continue;
      throw ConfigError(fmt::format(
          "{} is {}, which this tuning would overwrite: its results go to {}. Give another --out.",
          option, file, o.out));
    }
  }
  for (const auto* name : {"ds_config.json", "hardware.json"}) {
    const auto result = folder / name;
    if (o.overwrite || !fs::exists(fs::symlink_status(result, error)) ||
        fs::exists(folder / "tune.json", error))
      continue;
    throw ConfigError(
        fmt::format("{} is there, and no tuning has written it, since there is no tune.json beside "
                    "it. Give another --out, or --overwrite to replace it.",
                    result.string()));
  }
}

/// Runs this program with `arguments`; its output goes to `file`. Returns its exit status.
int run_program(const std::vector<std::string>& arguments, const fs::path& file) {
  std::vector<std::string> words{"zero"};
  words.insert(words.end(), arguments.begin(), arguments.end());
  std::vector<char*> pointers;
  for (auto& word : words) pointers.push_back(word.data());
  pointers.push_back(nullptr);
  posix_spawn_file_actions_t actions;
  posix_spawn_file_actions_init(&actions);
  posix_spawn_file_actions_addopen(&actions, STDOUT_FILENO, file.c_str(),
                                   O_WRONLY | O_CREAT | O_TRUNC, 0666);
  posix_spawn_file_actions_adddup2(&actions, STDOUT_FILENO, STDERR_FILENO);
  pid_t child = 0;
  const auto self = fs::read_symlink("/proc/self/exe").string();
  const int error = posix_spawn(&child, self.c_str(), &actions, nullptr, pointers.data(), environ);
  posix_spawn_file_actions_destroy(&actions);
  if (error != 0)
    throw Error(fmt::format("The program {} cannot be started: {}.", self, std::strerror(error)));
  int status = 0;
  while (waitpid(child, &status, 0) < 0 && errno == EINTR) {
  }
  return WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status);
}

/// Returns the last line that a try printed, for a message.
std::string last_line(const fs::path& file) {
  std::istringstream text(read_file(file, fail<Error>));
  std::string last;
  for (std::string line; std::getline(text, line);) {
    if (!line.empty()) last = line;
  }
  return last;
}

constexpr int64_t kWarmUp = 2;

/// Returns the speed that a run's log says.
plan::Speed speed_of(const fs::path& run) {
  std::vector<double> seconds;
  for (const auto& step : report::read_log(run).steps) {
    if (step.step > kWarmUp && std::isfinite(step.step_ms)) seconds.push_back(step.step_ms * 1e-3);
  }
  if (seconds.empty()) return {.failure = "Its log has no steps."};
  std::ranges::sort(seconds);
  const auto at = [&](size_t quarters) { return seconds[(seconds.size() - 1) * quarters / 4]; };
  return {.seconds = at(2), .spread = (at(3) - at(1)) / 2};
}

class Tuning {
 public:
  Tuning(const Options& options, Json settings, std::vector<Candidate> candidates)
      : o_(options),
        folder_(options.out),
        settings_(std::move(settings)),
        candidates_(std::move(candidates)) {}

  Json question() const {
    Json question{{"model", o_.model}, {"data", o_.data},   {"batch", o_.batch},  {"seq", o_.seq},
                  {"nproc", o_.nproc}, {"dtype", o_.dtype}, {"config", settings_}};
    if (!o_.data_weights.empty()) question["data_weights"] = o_.data_weights;
    return question;
  }

  /// Throws ConfigError for a configuration that no try could have.
  void check() const {
    (void)Settings::parse(file_of(candidates_.front()).dump(), o_.nproc,
                          o_.config.empty() ? "the candidate" : o_.config);
  }

  /// Takes the tries of an earlier tuning of the same question that ran.
  void resume() {
    std::error_code error;
    const auto file = folder_ / "tune.json";
    if (!fs::exists(file, error) || o_.overwrite) return;
    const auto earlier = Json::parse(read_file(file, fail<Error>), nullptr, false);
    if (!earlier.is_object() || earlier.value("question", Json()) != question()) {
      throw ConfigError(fmt::format(
          "{} is of another question. Give another --out, or --overwrite to replace it.",
          file.string()));
    }
    for (const auto& each : earlier.value("tries", Json::array())) {
      if (each.contains("failure")) continue;  // its cause may be gone
      known_[{each.value("configuration", ""), each.value("steps", int64_t{0})}] = {
          .seconds = each.value("seconds", 0.0), .spread = each.value("spread", 0.0)};
    }
    if (!known_.empty())
      fmt::print("{} has {} tries, which are not made again\n", file.string(), known_.size());
  }

  plan::Speed measure(size_t candidate, int64_t steps) {
    const auto& c = candidates_[candidate];
    const std::pair key(c.words(), steps);
    auto found = known_.find(key);
    if (found == known_.end()) {
      if (signals_.received() != 0)
        throw Error("Tuning was stopped. The same command goes on with it.");
      found = known_.emplace(key, run(c, candidate, steps)).first;
      if (signals_.received() != 0) {  // it ended before its time
        known_.erase(found);
        throw Error("Tuning was stopped. The same command goes on with it.");
      }
      write();
    }
    const auto& speed = found->second;
    fmt::print("{:<44} {:>6} {:>12}  {}\n", c.words(), steps,
               c.time.seconds > 0 ? fmt::format("{:.1f}", 1e3 * c.time.seconds) : "-",
               speed.failure.empty()
                   ? fmt::format("{:>9.1f} +- {:.1f}", 1e3 * speed.seconds, 1e3 * speed.spread)
                   : speed.failure);
    std::fflush(stdout);
    return speed;
  }

  /// Writes the configuration of the best one, the table, and the machine as the tries found it.
  /// Returns whether any ran.
  bool finish(const std::vector<plan::Tried>& tried, const plan::Question& question) {
    Json order = Json::array();
    for (const auto& each : tried) order.push_back(candidates_[each.candidate].words());
    order_ = std::move(order);
    write();
    const auto& best = tried.front();
    if (!best.speed.failure.empty()) return false;
    const auto& c = candidates_[best.candidate];
    write_text(folder_ / "ds_config.json", file_of(c).dump(2) + "\n");
    const auto tokens = static_cast<double>(o_.batch * o_.seq);
    fmt::print("\nThe fastest is {}: {:.1f} ms a step, {:.0f} tokens/s; its configuration is {}.\n",
               c.words(), 1e3 * best.speed.seconds, tokens / best.speed.seconds,
               (folder_ / "ds_config.json").string());
    write_machine(tried, question);
    return true;
  }

 private:
  void write_machine(const std::vector<plan::Tried>& tried, const plan::Question& question) const {
    std::vector<plan::MeasuredStep> steps;
    for (const auto& each : tried) {
      const auto& c = candidates_[each.candidate];
      if (each.speed.failure.empty())
        steps.push_back({.config = c.config,
                         .micro_batch = c.micro_batch,
                         .recompute = c.recompute,
                         .seconds = each.speed.seconds});
    }
    auto machine = Json::parse(plan::to_json(plan::calibrated(question, steps)));
    machine["source"] = fmt::format("zero tune: {} tries of {}", steps.size(), o_.model);
    const auto file = folder_ / "hardware.json";
    write_text(file, machine.dump(2, ' ', false, Json::error_handler_t::replace) + "\n");
    fmt::print("{} has this machine's speeds by these tries, for --hardware of the next plan.\n",
               file.string());
  }

  static void write_text(const fs::path& path, const std::string& text) {
    OutputFile file(path, fail<Error>);
    file.write(text.data(), text.size());
    file.commit();
  }

  /// Returns the candidate's keys over those of --config.
  Json file_of(const Candidate& c) const {
    Json file = settings_;
    file.merge_patch(Json::parse(plan::ds_config(c)));
    if (!varies(o_, "recompute") || c.recompute > 0) return file;
    // --config may recompute, which this candidate does not.
    Json off{{"every", 0}};
    if (file.value("layer_major_accumulation", Json()) != true) off["nvme"] = nullptr;
    file.merge_patch({{"activation_checkpointing", off}});
    return file;
  }

  plan::Speed run(const Candidate& c, size_t number, int64_t steps) {
    const auto name = fmt::format("try-{}", number);
    const auto run = folder_ / name;
    const auto config = folder_ / (name + ".json");
    const auto printed = folder_ / (name + ".txt");
    write_text(config, file_of(c).dump(2) + "\n");
    std::vector<std::string> arguments{"train",
                                       "--config",
                                       config,
                                       "--model",
                                       o_.model,
                                       "--seq",
                                       std::to_string(o_.seq),
                                       "--nproc",
                                       std::to_string(o_.nproc),
                                       "--steps",
                                       std::to_string(steps + kWarmUp),
                                       "--warmup",
                                       "0",
                                       "--eval-tokens",
                                       "0",
                                       "--sample-tokens",
                                       "0",
                                       "--overwrite",
                                       "--out",
                                       run};
    for (const auto& data : o_.data) arguments.insert(arguments.end(), {"--data", data});
    if (!o_.data_weights.empty())
      arguments.insert(arguments.end(), {"--data-weights", o_.data_weights});
    const int status = run_program(arguments, printed);
    const auto speed =
        status == 0 ? speed_of(run) : plan::Speed{.failure = "It failed: " + last_line(printed)};
    std::error_code ignored;
    fs::remove_all(run, ignored);  // its weights are of no use
    return speed;
  }

  void write() const {
    Json tries = Json::array();
    for (const auto& [key, speed] : known_) {
      Json each{{"configuration", key.first}, {"steps", key.second}};
      if (speed.failure.empty()) {
        each["seconds"] = speed.seconds;
        each["spread"] = speed.spread;
      } else {
        each["failure"] = speed.failure;
      }
      const auto found = std::ranges::find(candidates_, key.first, &Candidate::words);
      if (found != candidates_.end()) each["predicted_seconds"] = found->time.seconds;
      tries.push_back(std::move(each));
    }
    const Json whole{{"question", question()}, {"order", order_}, {"tries", tries}};
    write_text(folder_ / "tune.json",
               whole.dump(2, ' ', false, Json::error_handler_t::replace) + "\n");
  }

  const Options& o_;
  fs::path folder_;
  Json settings_;
  std::vector<Candidate> candidates_;
  std::map<std::pair<std::string, int64_t>, plan::Speed> known_;
  Json order_ = Json::array();
  train::StopSignals signals_;
};

}  // namespace

int run(const Arguments& arguments) {
  Options o;
  if (const auto status = read_command_line(arguments, o)) return *status;
  const auto sizes = language_model_config(o.model);
  if (o.seq > sizes->context()) {
    throw ConfigError(fmt::format("--seq is {}, but the model {} takes at most {} tokens.", o.seq,
                                  o.model, sizes->context()));
  }
  sizes->set_dropout(0);
  train::check_folder(o.out, "The option 'out'", "Give another --out.");
  check_files(o);
  const auto settings = settings_of(o);
  const train::RunFolder folder(o.out);
  folder.make();
  const auto question = question_of(o, *sizes);
  const auto candidates = candidates_of(o, question);
  Tuning tuning(o, settings, candidates);
  tuning.check();
  tuning.resume();
  fmt::print("{:<44} {:>6} {:>12}  {}\n", "configuration", "steps", "predicted ms", "  ms a step");
  const auto tried =
      plan::halve(candidates.size(),
                  [&](size_t candidate, int64_t steps) { return tuning.measure(candidate, steps); },
                  {.first_steps = o.steps});
  if (tuning.finish(tried, question)) return 0;
  throw Error(fmt::format("No candidate ran. {}", tried.front().speed.failure));
}

}  // namespace zero::app::tuning

namespace zero::app {

int tune(const Arguments& arguments) { return tuning::run(arguments); }

}  // namespace zero::app
