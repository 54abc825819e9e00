// `zero tune`: short real runs of the configurations that the planner ranks first.
//
// Note [Tries]
// Each try is a run of `zero train` with a file that holds the candidate's keys over those of
// --config, in a folder of its own. Its log says how long its steps took. tune.json has the
// machine, all candidates in the planner's order, and every try that has ended. A tuning that was
// stopped, or that is to make more tries, goes on from there: measured again, the machine would
// give another order, and so another question. The file belongs to one model, as its sizes say, and
// to one text, wherever their files lie. A try that failed is made again.
#include <fcntl.h>
#include <fmt/format.h>
#include <fmt/ranges.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <csignal>
#include <cstring>
#include <filesystem>
#include <map>
#include <optional>
#include <set>
#include <sstream>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "apps/zero/options.h"
#include "apps/zero/subcommands.h"
#include "zero/base/descriptor.h"
#include "zero/base/error.h"
#include "zero/base/hash.h"
#include "zero/base/json.h"
#include "zero/checkpoint/file.h"
#include "zero/config/fields.h"
#include "zero/config/settings.h"
#include "zero/data/dataset.h"
#include "zero/models/language/language_model.h"
#include "zero/planner/calibrate.h"
#include "zero/planner/halving.h"
#include "zero/planner/here.h"
#include "zero/planner/planner.h"
#include "zero/report/run_log.h"
#include "zero/train/resume.h"
#include "zero/train/run_folder.h"
#include "zero/train/same_run.h"
#include "zero/train/stop.h"

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
  bool dtype_given = false;
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
  const auto* dtype =
      parser
          .add_option("--dtype", o.dtype, "fp32, or bf16 with fp32 master weights; else --config's")
          ->check(CLI::IsMember({"fp32", "bf16"}));
  parser
      .add_option("--vary", o.vary,
                  "What may change: stage, micro-batch, recompute, and format (states in 8 bits, "
                  "which changes results)")
      ->delimiter(',')
      ->check(CLI::IsMember(std::vector<std::string>(kVaried.begin(), kVaried.end())))
      ->type_name("LIST");
  parser.add_option("--tries", o.tries, "Candidates of the first round")->check(positive());
  parser.add_option("--steps", o.steps, "Steps of each of them, at least 3, behind two to warm up")
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
  const auto status = parser.read(arguments);
  o.dtype_given = dtype->count() > 0;
  return status;
}

bool varies(const Options& o, std::string_view what) {
  return std::ranges::find(o.vary, what) != o.vary.end();
}

/// Returns the machine that --hardware describes.
plan::Cluster described(const Options& o) {
  auto cluster = plan::cluster_from_json(read_file(o.hardware, fail<ConfigError>), o.hardware);
  cluster.hosts = 1;
  cluster.per_host = o.nproc;
  return cluster;
}

/// Returns the question whose candidates are tried. `sizes` outlive it.
plan::Question question_of(const Options& o, const LanguageModelConfig& sizes,
                           const plan::Cluster& machine) {
  return {.trace = plan::tracer(sizes, o.seq),
          .global_batch = o.batch,
          .sequence = o.seq,
          .bf16 = o.dtype == "bf16",
          .cluster = machine,
          .recomputes = varies(o, "recompute")};
}

/// Returns all candidates that --vary allows, the best expected one first.
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
    if (c.fits() && !other) chosen.push_back(c);
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

/// Takes the dtype from --config where it has 16 bits. Throws ConfigError if --dtype says another.
void follow_dtype(const Json& settings, Options& o) {
  const auto on = [&](const char* key) {
    const auto section = settings.find(key);
    return section != settings.end() && section->is_object() && section->contains("enabled") &&
           section->at("enabled") == true;
  };
  if (!on("bf16") && !on("fp16")) return;
  if (o.dtype_given && o.dtype != "bf16") {
    throw ConfigError(fmt::format("--dtype is {}, and {} enables 16 bits. Leave one of them out.",
                                  o.dtype, o.config));
  }
  o.dtype = "bf16";
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

/// Runs this program with `arguments`; its output goes to `file`. Returns its exit status. It ends
/// with this process, however that ends, and so do its ranks (zero/comm/launcher.cpp).
int run_program(const std::vector<std::string>& arguments, const fs::path& file) {
  std::vector<std::string> words{"zero"};
  words.insert(words.end(), arguments.begin(), arguments.end());
  std::vector<char*> pointers;
  for (auto& word : words) pointers.push_back(word.data());
  pointers.push_back(nullptr);
  const auto self = fs::read_symlink("/proc/self/exe").string();
  const Descriptor output(open(file.c_str(), O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0666));
  if (!output)
    throw Error(fmt::format("Cannot write {}: {}.", file.string(), std::strerror(errno)));
  const pid_t tuning = getpid();
  const pid_t child = fork();
  if (child < 0)
    throw Error(fmt::format("The program {} cannot be started: {}.", self, std::strerror(errno)));
  if (child == 0) {  // no function here may take a lock that another thread had
    prctl(PR_SET_PDEATHSIG, SIGKILL);
    if (getppid() != tuning) _exit(1);  // it died before the line above
    dup2(output.get(), STDOUT_FILENO);
    dup2(output.get(), STDERR_FILENO);
    execv(self.c_str(), pointers.data());
    constexpr std::string_view kFailed = "zero: error: The program could not be started.\n";
    [[maybe_unused]] const auto told = write(STDERR_FILENO, kFailed.data(), kFailed.size());
    _exit(127);
  }
  int status = 0;
  while (waitpid(child, &status, 0) < 0 && errno == EINTR) {
  }
  return WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status);
}

/// Returns what a try that failed says of the cause, for a message: the error of a rank, and not
/// those of ranks that only saw it, nor that of their launcher, which knows exit statuses alone.
std::string cause_of(const fs::path& file) {
  constexpr std::string_view kError = "zero: error: ";
  std::istringstream text(read_file(file, fail<Error>));
  std::string last, of_rank, seen;
  for (std::string line; std::getline(text, line);) {
    if (line.empty()) continue;
    last = line;
    const auto prefix = line.starts_with('[') ? line.find("] ") : std::string::npos;
    if (prefix == std::string::npos) continue;
    const auto said = std::string_view(line).substr(prefix + 2);
    if (!said.starts_with(kError)) continue;
    auto& first = said.substr(kError.size()).starts_with("Rank ") ? seen : of_rank;
    if (first.empty()) first = said.substr(kError.size());
  }
  auto cause = !of_rank.empty() ? of_rank : !seen.empty() ? seen : last;
  if (cause.starts_with(kError)) cause.erase(0, kError.size());
  if (!cause.empty() && !cause.ends_with('.')) cause += '.';
  return fmt::format("It failed: {} All that it printed is in {}.",
                     cause.empty() ? "it printed nothing." : cause, file.string());
}

constexpr int64_t kWarmUp = 2;

/// Returns the speed that a run's log says.
plan::Speed speed_of(const fs::path& run) {
  std::vector<double> seconds;
  for (const auto& step : report::read_log(run).steps) {
    if (step.step > kWarmUp && std::isfinite(step.step_ms)) seconds.push_back(step.step_ms * 1e-3);
  }
  return plan::speed_of_steps(std::move(seconds));
}

/// A value of an earlier tuning's file, and its place there. Reading throws ConfigError that names
/// the file, the place, what is there and the remedy.
class Saved {
 public:
  Saved(Json value, std::string file, std::string place = "")
      : value_(std::move(value)), file_(std::move(file)), place_(std::move(place)) {}

  /// Reads the file.
  static Saved read(const std::string& file) {
    const auto text = read_file(file, fail<ConfigError>);
    Saved whole(Json(), file);
    try {
      whole.value_ = Json::parse(parse_json(text).dump());
    } catch (const Error& error) {
      whole.refuse(text.empty() ? "is empty" : fmt::format("cannot be read: it {}", error.what()));
    }
    return whole;
  }

  [[noreturn]] void refuse(const std::string& why) const {
    throw ConfigError(fmt::format(
        "{} {}. It should be what a tuning has written there. Give another --out, or --overwrite "
        "to replace it, with its tries.",
        file_, why));
  }

  Saved at(const char* key) const {
    check(value_.is_object(), "an object");
    const auto place = place_.empty() ? std::string(key) : fmt::format("{}.{}", place_, key);
    const auto found = value_.find(key);
    if (found == value_.end()) refuse(fmt::format("has no '{}'", place));
    return {*found, file_, place};
  }
  bool has(const char* key) const {
    check(value_.is_object(), "an object");
    return value_.contains(key);
  }
  std::vector<Saved> list() const {
    check(value_.is_array(), "a list");
    std::vector<Saved> all;
    for (size_t i = 0; i < value_.size(); ++i)
      all.emplace_back(value_[i], file_, fmt::format("{}[{}]", place_, i));
    return all;
  }
  const Json& object() const {
    check(value_.is_object(), "an object");
    return value_;
  }
  std::string text() const {
    check(value_.is_string(), "a text");
    return value_.get<std::string>();
  }
  int64_t count() const {
    check(value_.is_number_integer() && value_.get<int64_t>() > 0, "a whole number above 0");
    return value_.get<int64_t>();
  }
  double seconds() const {
    check(value_.is_number() && value_.get<double>() > 0, "a number above 0");
    return value_.get<double>();
  }
  double error() const {
    check(value_.is_number() && value_.get<double>() >= 0, "a number of 0 or more");
    return value_.get<double>();
  }
  const std::string& file() const { return file_; }
  const std::string& place() const { return place_; }

 private:
  void check(bool right, const char* what) const {
    if (right) return;
    const auto there = excerpt(value_.dump());
    refuse(place_.empty()
               ? fmt::format("holds {}, where {} should be", there, what)
               : fmt::format("has {} for '{}', which should be {}", there, place_, what));
  }

  Json value_;
  std::string file_;
  std::string place_;
};

/// The machine and the candidates of a tuning, the best expected one first.
struct Ranking {
  plan::Cluster machine{};
  std::vector<Candidate> candidates{};

  Json json() const {
    Json all = Json::array();
    for (const auto& c : candidates) {
      all.push_back({{"configuration", c.words()},
                     {"predicted_seconds", c.time.seconds},
                     {"ds_config", Json::parse(plan::ds_config(c))}});
    }
    return {{"machine", Json::parse(plan::to_json(machine))}, {"candidates", all}};
  }

  static Ranking read(const Saved& tuning, int nproc) {
    const auto machine = tuning.at("machine");
    Ranking ranking;
    try {
      ranking.machine = plan::cluster_from_json(machine.object().dump(), "of the tuning");
    } catch (const ConfigError& error) {
      machine.refuse(
          fmt::format("has a '{}' that cannot be used ({})", machine.place(), error.what()));
    }
    if (machine.has("source")) ranking.machine.device.source = machine.at("source").text();
    for (const auto& each : tuning.at("candidates").list())
      ranking.candidates.push_back(candidate(each, nproc));
    if (ranking.candidates.empty()) tuning.refuse("has no candidates");
    return ranking;
  }

 private:
  static Candidate candidate(const Saved& saved, int nproc) {
    const auto keys = saved.at("ds_config");
    Candidate c{.ranks = nproc, .micro_batch = keys.at("train_micro_batch_size_per_gpu").count()};
    try {
      const auto settings = Settings::parse(keys.object().dump(), nproc, keys.place());
      c.config = settings.engine;
      c.recompute = settings.model.activation_checkpointing.every.value_or(0);
    } catch (const ConfigError& error) {
      keys.refuse(fmt::format("has a '{}' that cannot be used ({})", keys.place(), error.what()));
    }
    c.time.seconds = saved.at("predicted_seconds").seconds();
    if (const auto name = saved.at("configuration").text(); name != c.words()) {
      saved.refuse(fmt::format("has the keys of '{}' for '{}', which is called '{}'", c.words(),
                               keys.place(), name));
    }
    return c;
  }
};

class Tuning {
 public:
  /// `sizes` outlive it.
  Tuning(const Options& options, const LanguageModelConfig& sizes, Json settings)
      : o_(options), sizes_(sizes), folder_(options.out), settings_(std::move(settings)) {
    const std::set<std::string> vary(o_.vary.begin(), o_.vary.end());
    question_ = {
        {"model", Json::parse(sizes.to_json())},
        {"data",
         train::identity(
             open_mixture({o_.data.begin(), o_.data.end()}, {}, {.validation_fraction = 0}).train)},
        {"batch", o_.batch},
        {"seq", o_.seq},
        {"nproc", o_.nproc},
        {"dtype", o_.dtype},
        {"vary", fmt::format("{}", fmt::join(vary, ","))},
        {"hardware", "measured"},
        {"config", settings_}};
    if (!o_.data_weights.empty()) question_["data_weights"] = o_.data_weights;
    if (o_.hardware.empty()) return;
    ranking_.machine = described(o_);
    question_["hardware"] = fmt::format("{} with the checksum {:x}", ranking_.machine.device.name,
                                        Hash().add(plan::to_json(ranking_.machine)).value());
  }

  /// Finds what there is to try. An earlier tuning of the same question has it, and tries that ran.
  void begin() {
    std::error_code error;
    const auto file = folder_ / "tune.json";
    const bool resumes = fs::exists(file, error) && !o_.overwrite;
    if (resumes) {
      resume(Saved::read(file.string()));
    } else {
      if (o_.hardware.empty()) ranking_.machine = plan::measured_here(o_.nproc);
      ranking_.candidates = candidates_of(o_, question());
    }
    // No try could have a configuration that cannot be used.
    (void)Settings::parse(file_of(ranking_.candidates.front()).dump(), o_.nproc,
                          o_.config.empty() ? "the candidate" : o_.config);
    if (!resumes) write();
    signals_.emplace();
  }

  size_t tries() const {
    return std::min(static_cast<size_t>(o_.tries), ranking_.candidates.size());
  }

  plan::Speed measure(size_t candidate, int64_t steps) {
    const auto& c = ranking_.candidates[candidate];
    const std::pair key(c.words(), steps);
    auto found = known_.find(key);
    if (found == known_.end()) {
      if (signals_->received() != 0)
        throw Error("Tuning was stopped. The same command goes on with it.");
      found = known_.emplace(key, run(c, candidate, steps)).first;
      if (signals_->received() != 0) {  // it ended before its time
        known_.erase(found);
        throw Error("Tuning was stopped. The same command goes on with it.");
      }
      write();
    }
    const auto& speed = found->second;
    fmt::print("{:<44} {:>6} {:>12}  {}\n", c.words(), steps,
               c.time.seconds > 0 ? fmt::format("{:.1f}", 1e3 * c.time.seconds) : "-",
               speed.failure.empty() ? fmt::format("{:>9.1f} +- {:.1f}", 1e3 * speed.seconds,
                                                   1e3 * speed.standard_error)
                                     : speed.failure);
    std::fflush(stdout);
    return speed;
  }

  /// Writes the configuration of the best one, the table, and the machine as the tries found it.
  /// Returns whether any ran.
  bool finish(const std::vector<plan::Tried>& tried) {
    Json order = Json::array();
    for (const auto& each : tried) order.push_back(ranking_.candidates[each.candidate].words());
    order_ = std::move(order);
    write();
    const auto& best = tried.front();
    if (!best.speed.failure.empty()) return false;
    const auto& c = ranking_.candidates[best.candidate];
    write_file(folder_ / "ds_config.json", file_of(c).dump(2) + "\n", fail<Error>);
    const auto tokens = static_cast<double>(o_.batch * o_.seq);
    const bool tied = std::ranges::any_of(tried, [&](const plan::Tried& each) {
      return each.steps == best.steps && each.speed.failure.empty() &&
             each.speed.seconds < best.speed.seconds;
    });
    fmt::print("\n{} is {}: {:.1f} ms a step, {:.0f} tokens/s; its configuration is {}.\n",
               tied ? "The planner's first of those that cannot be told apart" : "The fastest",
               c.words(), 1e3 * best.speed.seconds, tokens / best.speed.seconds,
               (folder_ / "ds_config.json").string());
    write_machine(tried);
    return true;
  }

 private:
  plan::Question question() const {
    auto question = question_of(o_, sizes_, ranking_.machine);
    if (const auto found = settings_.find("optimizer"); found != settings_.end())
      question.optimizer =
          *Config::parse(Json{{"optimizer", *found}}.dump(), 1, o_.config).optimizer;
    return question;
  }

  /// Takes the candidates of an earlier tuning of the same question, and the tries that ran.
  void resume(const Saved& earlier) {
    const auto sorted = [](const Json& object) {
      return nlohmann::json::parse(object.dump()).dump();
    };
    const auto changes =
        train::differences(sorted(earlier.at("question").object()), sorted(question_));
    if (!changes.empty()) {
      throw ConfigError(
          fmt::format("{} is of another question: {}. Give another --out, or --overwrite to "
                      "replace it, with its tries.",
                      earlier.file(), fmt::join(changes, ", ")));
    }
    ranking_ = Ranking::read(earlier, o_.nproc);
    for (const auto& each : earlier.at("tries").list()) {
      if (each.has("failure")) continue;  // its cause may be gone
      known_[{each.at("configuration").text(), each.at("steps").count()}] = {
          .seconds = each.at("seconds").seconds(),
          .standard_error = each.at("standard_error").error()};
    }
    fmt::print("{} has {} candidates for this machine, and {} tries, which are not made again\n",
               earlier.file(), ranking_.candidates.size(), known_.size());
  }

  void write_machine(const std::vector<plan::Tried>& tried) const {
    std::vector<plan::MeasuredStep> steps;
    for (const auto& each : tried) {
      const auto& c = ranking_.candidates[each.candidate];
      if (each.speed.failure.empty())
        steps.push_back({.config = c.config,
                         .micro_batch = c.micro_batch,
                         .recompute = c.recompute,
                         .seconds = each.speed.seconds});
    }
    auto machine = Json::parse(plan::to_json(plan::calibrated(question(), steps)));
    machine["source"] = fmt::format("zero tune: {} tries of {}", steps.size(), o_.model);
    const auto file = folder_ / "hardware.json";
    write_file(file, machine.dump(2, ' ', false, Json::error_handler_t::replace) + "\n",
               fail<Error>);
    fmt::print("{} has this machine's speeds by these tries, for --hardware of the next plan.\n",
               file.string());
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
    write_file(config, file_of(c).dump(2) + "\n", fail<Error>);
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
    const auto speed = status == 0 ? speed_of(run) : plan::Speed{.failure = cause_of(printed)};
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
        each["standard_error"] = speed.standard_error;
      } else {
        each["failure"] = speed.failure;
      }
      const auto& all = ranking_.candidates;
      const auto found = std::ranges::find(all, key.first, &Candidate::words);
      if (found != all.end()) each["predicted_seconds"] = found->time.seconds;
      tries.push_back(std::move(each));
    }
    Json whole{{"question", question_}, {"order", order_}, {"tries", tries}};
    whole.update(ranking_.json());
    write_file(folder_ / "tune.json",
               whole.dump(2, ' ', false, Json::error_handler_t::replace) + "\n", fail<Error>);
  }

  const Options& o_;
  const LanguageModelConfig& sizes_;
  fs::path folder_;
  Json settings_;
  Json question_;  // of tune.json
  Ranking ranking_;
  std::map<std::pair<std::string, int64_t>, plan::Speed> known_;
  Json order_ = Json::array();
  std::optional<train::StopSignals> signals_;  // once there are tries to stop
};

}  // namespace

int run(const Arguments& arguments) {
  Options o;
  if (const auto status = read_command_line(arguments, o)) return *status;
  if (o.steps < plan::kFewestSteps) {
    throw ConfigError(fmt::format(
        "--steps is {}, but a speed needs at least {} steps: those of fewer vary by chance, and "
        "nothing says by how much.",
        o.steps, plan::kFewestSteps));
  }
  const auto sizes = model_for_sequences(o.model, o.seq);
  train::check_folder(o.out, "The option 'out'", "Give another --out.");
  check_files(o);
  const auto settings = settings_of(o);
  follow_dtype(settings, o);
  Tuning tuning(o, *sizes, settings);
  const train::RunFolder folder(o.out);
  folder.make();
  tuning.begin();
  fmt::print("{:<44} {:>6} {:>12}  {}\n", "configuration", "steps", "predicted ms", "  ms a step");
  std::fflush(stdout);
  const auto tried =
      plan::halve(tuning.tries(),
                  [&](size_t candidate, int64_t steps) { return tuning.measure(candidate, steps); },
                  {.first_steps = o.steps});
  if (tuning.finish(tried)) return 0;
  throw Error(fmt::format("No candidate ran. {}", tried.front().speed.failure));
}

}  // namespace zero::app::tuning

namespace zero::app {

int tune(const Arguments& arguments) { return tuning::run(arguments); }

}  // namespace zero::app
