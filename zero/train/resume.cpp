#include "zero/train/resume.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <array>
#include <charconv>
#include <cmath>
#include <nlohmann/json.hpp>
#include <utility>

#include "zero/base/error.h"
#include "zero/base/hash.h"
#include "zero/base/memory_limit.h"
#include "zero/checkpoint/file.h"
#include "zero/checkpoint/manifest.h"
#include "zero/config/fields.h"
#include "zero/models/architectures.h"

namespace zero::train {
namespace {

using Json = nlohmann::ordered_json;

/// The options that concern the folder, or one start of the run, but not the run itself.
constexpr std::array kFolderOptions{"out",         "overwrite", "resume",
                                    "resume_from", "profile",   "profile_step"};

Json json_of(const RunSettings& run) {
  auto engine = Json::parse(run.settings.dump());
  auto options = engine.at("train");
  engine.erase("train");
  for (const char* key : kFolderOptions) options.erase(key);
  return {{"engine", std::move(engine)},
          {"train", std::move(options)},
          {"model", Json::parse(run.model)}};
}

Json parse_record(const std::string& text, const std::filesystem::path& checkpoint) {
  try {
    auto record = Json::parse(text);
    if (record.is_object()) return record;
  } catch (const Json::exception& error) {
    throw CheckpointError(fmt::format("The run's record in {} cannot be read: {}.",
                                      checkpoint.string(), error.what()));
  }
  throw CheckpointError(fmt::format("The run's record in {} cannot be read: it is no JSON object.",
                                    checkpoint.string()));
}

/// Returns the record in a manifest.
std::string record_in(const Manifest& manifest, const std::filesystem::path& checkpoint) {
  const auto& attached = manifest.files.front().attached;
  const auto found = attached.find(kRecord);
  if (found != attached.end()) return found->second;
  throw CheckpointError(
      fmt::format("{} was saved by another program than zero train: it has no record of a run. "
                  "Engine::load loads it.",
                  checkpoint.string()));
}

/// Returns the record of a checkpoint whose files are there.
std::string read_record(const std::filesystem::path& checkpoint) {
  if (!has_manifest(checkpoint)) {
    const auto earlier = checkpoint / RunFolder::kEarlierMarker;
    std::error_code ignored;
    if (std::filesystem::exists(earlier, ignored)) return read_file(earlier, fail<CheckpointError>);
    throw DamagedCheckpoint(fmt::format("{} has no {}: it is not complete, or no checkpoint.",
                                        checkpoint.string(), Manifest::kFile));
  }
  const auto manifest = read_manifest(checkpoint);
  verify_sizes(checkpoint, manifest);
  return record_in(manifest, checkpoint);
}

// JSON has no NaN.
Json to_json(double value) { return std::isfinite(value) ? Json(value) : Json(nullptr); }
double to_number(const Json& value) { return value.is_null() ? NAN : value.get<double>(); }

Json to_json(const std::vector<LossSample>& samples) {
  auto array = Json::array();
  for (const auto& each : samples) {
    array.push_back(
        {to_json(each.loss), to_json(each.grad_norm), to_json(each.loss_scale), to_json(each.lr)});
  }
  return array;
}

/// Adds each value that differs, as "key old -> new", also in sections.
void add_differences(std::vector<std::string>& changes, const Json& before, const Json& now,
                     const std::string& prefix) {
  const auto text = [](const Json& object, const std::string& key) {
    const auto found = object.find(key);
    return found == object.end() ? std::string("(default)") : found->dump();
  };
  const auto compare = [&](const std::string& key) {
    const auto old_value = before.find(key);
    const auto new_value = now.find(key);
    const bool both = old_value != before.end() && new_value != now.end();
    if (both && old_value->is_object() && new_value->is_object()) {
      add_differences(changes, *old_value, *new_value, prefix + key + ".");
    } else if (!both || *old_value != *new_value) {
      changes.push_back(
          fmt::format("{}{} {} -> {}", prefix, key, text(before, key), text(now, key)));
    }
  };
  for (const auto& [key, value] : before.items()) compare(key);
  for (const auto& [key, value] : now.items()) {
    if (!before.contains(key)) compare(key);
  }
}

}  // namespace

std::vector<std::string> differences(const std::string& before, const std::string& now) {
  std::vector<std::string> all;
  add_differences(all, Json::parse(before), Json::parse(now), "");
  return all;
}

namespace {

/// Returns the sizes alone: values that a run may change are set to the same.
Json sizes_of(const std::string& model, const std::string& source) {
  const auto sizes = language_model_config_from_json(model, source);
  sizes->set_dropout(0);
  return Json::parse(sizes->to_json());
}

void check_same_model(const std::filesystem::path& checkpoint, const Json& saved,
                      const RunSettings& run) {
  const auto before = sizes_of(saved.dump(), checkpoint.string());
  const auto now = sizes_of(run.model, run.settings.program.model);
  for (const auto& [key, value] : before.items()) {
    const auto& here = now.value(key, Json());
    if (here == value) continue;
    throw ConfigError(fmt::format(
        "{} is of a model whose {} is {}, but that of {} is {}. Leave out --model and --vocab-size "
        "to go on with the checkpoint's model, or give another --out to train this one.",
        checkpoint.string(), key, value.dump(), run.settings.program.model, here.dump()));
  }
}

/// Returns the section `optimizer` that is left of a saved one where another is given: all of it if
/// both are of one kind, but for the values that the given name stands for (ApolloMini's rank).
/// Returns null if they are of two kinds.
Json kept_optimizer(const Json& saved, const Json& given) {
  if (!saved.is_object() || !given.is_object()) return nullptr;
  try {
    fields::Report report(true);
    const auto with_defaults = [&](const Json& section) {
      return fields::read_optimizer({{"type", section.value("type", "AdamW")}}, report);
    };
    const auto usual = with_defaults(saved);
    const auto named = with_defaults(given);
    if (usual.index() != named.index()) return nullptr;
    auto kept = saved;
    const auto usual_values = fields::write_optimizer(usual).at("params");
    const auto named_values = fields::write_optimizer(named).at("params");
    for (const auto& [key, value] : named_values.items()) {
      if (usual_values.value(key, Json()) != value) kept["params"][key] = value;
    }
    return kept;
  } catch (const Error&) {  // the whole section is read elsewhere, with an error
    return nullptr;
  }
}

}  // namespace

std::string record_of(const RunSettings& run, const Progress& progress) {
  const Json record{{"step", progress.step},
                    {"world_size", run.ranks},
                    {"stage", run.settings.engine.stage},
                    {"unit_bytes", run.settings.engine.unit_bytes},
                    {"tile_elements", run.settings.model.tile_elements.value_or(0)},
                    {"loader", Json::parse(progress.loader.to_json())},
                    {"data", progress.data},
                    {"sample", progress.sample},
                    {"losses", to_json(progress.losses)},
                    {"grad_norm", to_json(progress.grad_norm)},
                    {"validation", progress.validation ? Json(*progress.validation) : Json()},
                    {"rewinds", {progress.rewinds.count, progress.rewinds.until}},
                    {"settings", json_of(run)}};
  return record.dump();
}

void write_record(const RunFolder& folder, const RunSettings& run, const Progress& progress) {
  const auto path = folder.checkpoint(progress.step);
  const auto text = record_of(run, progress);
  if (has_manifest(path)) return attach(path, kRecord, text);
  write_file(path / RunFolder::kEarlierMarker, text, fail<CheckpointError>);
}

namespace {

Progress progress_of(const Json& record, int64_t step) {
  Progress progress{step, LoaderState::from_json(record.at("loader").dump())};
  progress.sample = record.value("sample", progress.loader.sample);
  for (const auto& each : record.value("losses", Json::array())) {
    progress.losses.push_back({.loss = to_number(each.at(0)),
                               .grad_norm = to_number(each.at(1)),
                               .loss_scale = to_number(each.at(2)),
                               .lr = to_number(each.at(3))});
  }
  progress.grad_norm = to_number(record.value("grad_norm", Json(0)));
  if (const auto found = record.find("validation"); found != record.end() && !found->is_null())
    progress.validation = found->get<double>();
  const auto rewinds = record.value("rewinds", Json{0, 0});
  progress.data = record.value("data", std::string());
  progress.rewinds = {rewinds.at(0).get<int64_t>(), rewinds.at(1).get<int64_t>()};
  return progress;
}

/// Runs `body`, whose errors are about the record of a checkpoint.
template <class Body>
auto reading(const std::filesystem::path& checkpoint, const Body& body) {
  try {
    return body();
  } catch (const Json::exception& error) {
    throw CheckpointError(fmt::format("The run's record in {} cannot be read: {}.",
                                      checkpoint.string(), error.what()));
  }
}

}  // namespace

Progress progress_at(const RunFolder& folder, int64_t step) {
  const auto path = folder.checkpoint(step);
  const auto record = parse_record(read_record(path), path);
  return reading(path, [&] { return progress_of(record, step); });
}

std::optional<int64_t> best_checkpoint(const RunFolder& folder, int64_t most) {
  std::optional<std::pair<double, int64_t>> best;
  for (const int64_t step : folder.checkpoints()) {
    if (step > most) continue;
    try {
      const auto loss = progress_at(folder, step).validation;
      if (loss && (!best || *loss < best->first)) best = {*loss, step};
    } catch (const CheckpointError&) {  // whoever resumes from it is told
    }
  }
  if (!best) return std::nullopt;
  return best->second;
}

bool names_checkpoint(const Options& options) {
  return !options.resume_from.empty() && options.resume_from != "auto";
}

bool is_started_again(const RunFolder& folder, const std::vector<comm::LaunchedJob>& jobs) {
  const auto own = folder.jobs();
  return std::ranges::any_of(
      jobs, [&](const auto& job) { return job.restarted && own.contains(job.name); });
}

Options with_auto_resume(Options options, const std::vector<comm::LaunchedJob>& jobs) {
  const RunFolder folder(options.out);
  const bool restarted = is_started_again(folder, jobs);
  const bool automatic = options.resume && options.resume_from == "auto";
  if (!automatic && !restarted) return options;
  if (folder.last_checkpoint()) {
    options.resume = true;
    options.resume_from = "auto";
    options.overwrite = false;
    return options;
  }
  if (automatic) {
    options.resume = false;
    options.resume_from.clear();
  }
  const bool ended = folder.has_weights();
  if (restarted && ended) {
    throw ConfigError(fmt::format(
        "An earlier attempt of this job has trained to the end, and its weights are in {}; only "
        "its last checkpoint is missing. To train again, start another job with --overwrite.",
        folder.model().string()));
  }
  options.overwrite = options.overwrite || (!continues(options) && !ended);
  return options;
}

namespace {

/// Returns the step that these options name; none if they name a folder, or nothing.
std::optional<int64_t> named_step(const Options& options) {
  int64_t step = 0;
  const auto& text = options.resume_from;
  const auto [rest, error] = std::from_chars(text.data(), text.data() + text.size(), step);
  if (text.empty() || error != std::errc() || rest != text.data() + text.size()) return {};
  return step;
}

}  // namespace

bool continues(const Options& options) {
  namespace fs = std::filesystem;
  if (!options.resume) return false;
  if (!names_checkpoint(options) || named_step(options)) return true;
  std::error_code ignored;
  const auto absolute = [&](const fs::path& path) {
    auto found = fs::weakly_canonical(path, ignored);
    return found.has_filename() ? found : found.parent_path();
  };
  return absolute(options.resume_from).parent_path() == absolute(options.out);
}

std::filesystem::path checkpoint_of(const Options& options, int64_t step) {
  const bool by_path = names_checkpoint(options) && !named_step(options);
  return by_path ? std::filesystem::path(options.resume_from)
                 : RunFolder(options.out).checkpoint(step);
}

Source find_checkpoint(const Options& options, const std::vector<int64_t>& damaged) {
  const auto from = [&](int64_t step) {
    Source source{.step = step, .path = checkpoint_of(options, step), .record = {}};
    source.record = read_record(source.path);
    source.step = reading(source.path, [&] {
      return parse_record(source.record, source.path).at("step").get<int64_t>();
    });
    return source;
  };
  if (names_checkpoint(options)) return from(named_step(options).value_or(0));
  auto steps = RunFolder(options.out).checkpoints();
  if (steps.empty()) {
    throw ConfigError(
        fmt::format("{} holds no checkpoint to resume. Checkpoints are written with --save-every.",
                    options.out));
  }
  std::vector<std::string> faults;
  for (; !steps.empty(); steps.pop_back()) {
    if (std::find(damaged.begin(), damaged.end(), steps.back()) != damaged.end()) continue;
    try {
      auto source = from(steps.back());
      source.damaged = faults;
      return source;
    } catch (const DamagedCheckpoint& error) {
      faults.emplace_back(error.what());
    }
  }
  throw DamagedCheckpoint(
      fmt::format("No checkpoint in {} can be loaded. {}", options.out, fmt::join(faults, " ")));
}

std::filesystem::path memory_folder(const Options& options) {
  const auto folder = MemoryCopies::launcher_folder();
  if (!folder) {
    throw ConfigError(fmt::format(
        "--memory-copies is {}, and no launcher keeps a folder in memory that outlives the ranks. "
        "Start the run by zero launch --max-restarts R, or leave the option out.",
        *options.memory_copies));
  }
  // A job may train several models, one after the other.
  std::error_code ignored;
  const auto out =
      std::filesystem::weakly_canonical(std::filesystem::absolute(options.out), ignored);
  return *folder / fmt::format("run-{:016x}", Hash().add(out.string()).value());
}

Source source_of(const MemoryCopies::Found& copy) {
  return {.step = copy.step,
          .path = copy.folder,
          .record = record_in(read_manifest(copy.folder), copy.folder),
          .damaged = {}};
}

std::jthread read_ahead(const Source& source, int rank, int ranks) {
  return std::jthread([path = source.path, rank, ranks] {
    try {
      if (!has_manifest(path)) return;
      const auto manifest = read_manifest(path);
      uint64_t bytes = 0;
      for (const auto& file : manifest.files) bytes += file.sums.bytes;
      if (static_cast<double>(bytes) < static_cast<double>(available_memory().available) / 2)
        zero::read_ahead(path, manifest, rank, ranks);
    } catch (const Error&) {  // whoever loads it is told
    }
  });
}

ResumePoint resume_point(const Source& source, const RunSettings& run) {
  const int64_t step = source.step;
  const auto& path = source.path;
  const auto record = parse_record(source.record, path);
  const auto& program = run.settings.program;
  if (step > program.steps || (step == program.steps && program.resume_from != "auto")) {
    throw ConfigError(
        fmt::format("The run in {} has already done {} steps; --steps is {}. Give more --steps.",
                    run.settings.program.out, step, run.settings.program.steps));
  }
  const auto expect = [&](const char* key, const char* option, int64_t here) {
    const auto there = record.value(key, here);
    if (there == here) return;
    throw ConfigError(fmt::format("{} was saved with {} {}, but this run has {}. Give {} {}.",
                                  path.string(), option, there, here, option, there));
  };
  return reading(path, [&] {
    if (!has_manifest(path)) {  // a checkpoint of an earlier version
      expect("world_size", "--nproc", run.ranks);
      expect("stage", "--stage", run.settings.engine.stage);
      expect("unit_bytes", "--bucket-size", run.settings.engine.unit_bytes);
    }
    expect("tile_elements", "--tile-elements", run.settings.model.tile_elements.value_or(0));
    ResumePoint point{progress_of(record, step), {}};
    if (!record.contains("settings")) {
      point.changes.emplace_back(
          "not known: the checkpoint does not say with which options it was made");
      return point;
    }
    const auto& saved = record.at("settings");
    check_same_model(path, saved.at("model"), run);
    const auto now = json_of(run);
    if (const int ranks = record.value("world_size", run.ranks); ranks != run.ranks)
      point.changes.push_back(fmt::format("ranks {} -> {}", ranks, run.ranks));
    for (const char* section : {"train", "engine", "model"})
      add_differences(point.changes, saved.at(section), now.at(section), "");
    return point;
  });
}

std::optional<SavedSettings> saved_settings(const Source& source) {
  const auto record = parse_record(source.record, source.path);
  if (!record.contains("settings")) return std::nullopt;
  return reading(source.path, [&] {
    auto configuration = record.at("settings").at("engine");
    configuration["train"] = record.at("settings").at("train");
    return SavedSettings{configuration.dump(), record.at("world_size").get<int>()};
  });
}

std::string keep_global_batch(const SavedSettings& saved, int ranks) {
  if (ranks == saved.ranks) return saved.configuration;
  auto configuration = Json::parse(saved.configuration);
  const char* key = "gradient_accumulation_steps";
  const auto micro_batches = configuration.value(key, int64_t{1});
  const auto all = micro_batches * saved.ranks;
  if (all % ranks != 0) {
    throw ConfigError(fmt::format(
        "The checkpoint is of {} ranks with {} micro-batches a step, and {} ranks cannot "
        "share these {}: a step would have other samples. Give --nproc {}, or other "
        "batches by --micro-batch and --accumulate.",
        saved.ranks, micro_batches, ranks, all, saved.ranks));
  }
  configuration[key] = all / ranks;
  configuration.erase("train_batch_size");
  return configuration.dump();
}

std::string override_settings(std::string_view saved, std::string_view file,
                              std::string_view origin) {
  auto merged = Json::parse(saved);
  const auto over = fields::without_defaults(
      fields::with_present_names(fields::parse_json(file, origin), origin));
  if (over.contains("optimizer")) {
    auto kept = kept_optimizer(merged.value("optimizer", Json()), over.at("optimizer"));
    merged.erase("optimizer");
    if (!kept.is_null()) merged["optimizer"] = std::move(kept);
  }
  if (over.contains("scheduler")) {
    merged.erase("scheduler");
    for (const char* key : {"min_lr", "decay_steps"}) merged["train"].erase(key);
  }
  if (over.contains("train_batch_size")) {
    merged.erase("train_micro_batch_size_per_gpu");
    merged.erase("gradient_accumulation_steps");
  }
  merged.merge_patch(over);
  return merged.dump();
}

}  // namespace zero::train
