#include "apps/zero/ckpt_convert.h"

#include <fmt/format.h>

#include <algorithm>
#include <nlohmann/json.hpp>
#include <vector>

#include "zero/base/error.h"
#include "zero/checkpoint/foreign/checkpoint_view.h"
#include "zero/checkpoint/foreign/export.h"
#include "zero/checkpoint/foreign/readers.h"

namespace zero::app {

namespace {

using foreign::CheckpointView;
using nlohmann::ordered_json;

int64_t elements_of(const CheckpointView& view) {
  int64_t elements = 0;
  for (const auto& each : view.parameters) elements += each.weights().numel();
  return elements;
}

// Says what was done: the two paths, what was taken over, and what was not.
void report(const std::string& from, const std::string& to, const CheckpointView& view,
            const std::vector<std::string>& left_out, bool json) {
  const auto trained = std::ranges::count_if(
      view.parameters, [](const auto& each) { return !each.optimizer.empty(); });
  if (json) {
    const ordered_json line{{"from", from},
                            {"form", view.form},
                            {"to", to},
                            {"step", view.steps},
                            {"parameters", view.parameters.size()},
                            {"elements", elements_of(view)},
                            {"with_states", trained},
                            {"buffers", view.buffers.size()},
                            {"left_out", left_out},
                            {"missing", view.missing}};
    fmt::print("{}\n", line.dump());
    return;
  }
  fmt::print("{} ({}) -> {}\n", from, view.form, to);
  fmt::print("  step {}, {} parameters of {} elements, {} with states, {} buffers\n", view.steps,
             view.parameters.size(), elements_of(view), trained, view.buffers.size());
  for (const auto& each : left_out) fmt::print("  left out: {}\n", each);
  for (const auto& each : view.missing) fmt::print("  missing: {}\n", each);
}

}  // namespace

CheckpointConversions::CheckpointConversions(OptionParser& parser) {
  const auto add = [&](const char* name, const char* text, bool writes) {
    auto* command = parser.add_subcommand(name, text);
    command->add_option("from", from_, "The checkpoint, of any known form")
        ->required()
        ->type_name("FROM");
    command->add_option("to", to_, writes ? "The folder to write" : "Another checkpoint")
        ->required()
        ->type_name("TO");
    command->add_flag("--json", json_, "Print one line of JSON");
    return command;
  };
  import_ = add("import", "Makes a checkpoint of libzero from DeepSpeed's or PyTorch's.", true);
  import_->add_flag("--weights", weights_, "Take the weights alone");
  export_ = add("export", "Writes a checkpoint as other programs read it.", true);
  export_->add_option("--to", form_, "hf: safetensors and an index; deepspeed: universal; dcp")
      ->check(CLI::IsMember({"hf", "deepspeed", "dcp"}))
      ->required();
  export_->add_option("--shard-bytes", shard_, "With hf: the most bytes of a file")
      ->capture_default_str();
  diff_ = add("diff", "Compares two checkpoints of any forms; exits with 1 if they differ.", false);
  diff_->add_option("--tolerance", tolerance_, "Differences of elements up to this do not count")
      ->capture_default_str()
      ->check(not_negative());
  reshard_ = add("reshard", "Writes a checkpoint with the files of another number of ranks.", true);
  reshard_->add_option("--ranks", ranks_, "Files to write")->required()->check(positive());
  reshard_->add_option("--stage", stage_, "The stage that it names; it loads at any")
      ->check(CLI::Range(0, 3));
}

int CheckpointConversions::run() const {
  if (import_->parsed()) return import();
  if (export_->parsed()) return export_to();
  if (diff_->parsed()) return diff();
  if (reshard_->parsed()) return reshard();
  return 0;
}

int CheckpointConversions::import() const {
  const auto view = foreign::view_checkpoint(from_, weights_);
  foreign::write_checkpoint(view, to_);
  report(from_, to_, view, view.left_out, json_);
  return 0;
}

int CheckpointConversions::export_to() const {
  const auto shard = parse_bytes(shard_);
  if (!shard || *shard < 1)
    throw ConfigError(fmt::format("--shard-bytes is '{}'; it takes bytes: 500MB, 5 GB.", shard_));
  const auto view = foreign::view_checkpoint(from_);
  auto left = form_ == "hf"          ? foreign::export_huggingface(view, to_, *shard)
              : form_ == "deepspeed" ? foreign::export_deepspeed(view, to_)
                                     : foreign::export_distributed(view, to_);
  left.insert(left.begin(), view.left_out.begin(), view.left_out.end());
  std::vector<std::string> packed;
  for (const auto& parameter : view.parameters) {
    if (parameter.weights().dtype == at::kByte) packed.push_back(parameter.name);
  }
  if (!packed.empty()) {
    left.push_back(foreign::listed(packed,
                                   "the values; the folder has the packed bytes, which other "
                                   "programs do not read, and `zero merge` writes whole weights"));
  }
  report(from_, to_, view, left, json_);
  return 0;
}

int CheckpointConversions::diff() const {
  const auto a = foreign::view_checkpoint(from_);
  const auto b = foreign::view_checkpoint(to_);
  const auto found = foreign::differences(a, b, tolerance_);
  if (json_) {
    const ordered_json line{{"same", found.empty()}, {"differences", found}};
    fmt::print("{}\n", line.dump());
    return found.empty() ? 0 : 1;
  }
  for (const auto& each : found) fmt::print("{}\n", each);
  if (found.empty())
    fmt::print("{} and {} are the same: step {}, {} parameters of {} elements\n", from_, to_,
               a.steps, a.parameters.size(), elements_of(a));
  return found.empty() ? 0 : 1;
}

int CheckpointConversions::reshard() const {
  constexpr int64_t kMostRanks = 512;  // whose files are open at once
  if (ranks_ > kMostRanks)
    throw ConfigError(
        fmt::format("--ranks is {}; at most {} files are written. Checkpoints load at "
                    "any number of ranks.",
                    ranks_, kMostRanks));
  auto view = foreign::view_checkpoint(from_);
  view.stage = stage_.value_or(view.stage);
  foreign::write_checkpoint(view, to_, static_cast<int>(ranks_));
  report(from_, to_, view, view.left_out, json_);
  return 0;
}

}  // namespace zero::app
