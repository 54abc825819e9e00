// `zero ckpt`: shows and checks checkpoints, and removes old ones.
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <filesystem>
#include <map>
#include <string>

#include "apps/zero/ckpt_convert.h"
#include "apps/zero/options.h"
#include "apps/zero/subcommands.h"
#include "zero/base/error.h"
#include "zero/checkpoint/in_force.h"
#include "zero/checkpoint/manifest.h"
#include "zero/train/resume.h"
#include "zero/train/run_folder.h"

namespace zero::app {
namespace {

/// Returns the folder of a checkpoint; of a run's folder that of its newest.
std::filesystem::path checkpoint_of(const std::filesystem::path& folder) {
  std::error_code ignored;
  if (std::filesystem::exists(folder / Manifest::kFile, ignored)) return folder;
  const train::RunFolder run(folder);
  const auto all = run.checkpoints();
  return all.empty() ? folder : run.checkpoint(all.back());
}

void inspect(const std::filesystem::path& folder, bool parameters) {
  const auto manifest = read_manifest(folder);
  uint64_t bytes = 0;
  for (const auto& file : manifest.files) bytes += file.sums.bytes;
  int64_t elements = 0;
  std::map<std::string, int64_t> kinds;
  for (const auto& each : manifest.parameters) {
    elements += each.numel();
    kinds[each.optimizer.empty() ? "frozen" : each.optimizer] += each.numel();
  }
  fmt::print("{}: step {}, by libzero {} at stage {} on {} rank{}\n", folder.string(),
             manifest.steps, manifest.library, manifest.stage, manifest.files.size(),
             manifest.files.size() == 1 ? "" : "s");
  fmt::print("  {} parameters of {} elements, {} buffers, {} in {} file{}\n",
             manifest.parameters.size(), elements, manifest.buffers.size(),
             format_bytes(static_cast<double>(bytes)), manifest.files.size(),
             manifest.files.size() == 1 ? "" : "s");
  for (const auto& [kind, count] : kinds) fmt::print("  {}: {} elements\n", kind, count);
  for (size_t i = 0; i < manifest.groups.size(); ++i)
    fmt::print("  group {}: {}\n", i, manifest.groups[i]);
  if (const auto& scale = manifest.loss_scale) fmt::print("  loss scale {}\n", scale->scale);
  if (manifest.grad_norm)
    fmt::print("  gradient norm of the last step {:.6g}\n", *manifest.grad_norm);
  if (has_in_force(manifest))
    fmt::print("  a delayed update: the next step computes with the parameters before it\n");
  for (const auto& [name, text] : manifest.files.front().attached)
    fmt::print("  attached: {} ({} bytes)\n", name, text.size());
  if (!parameters) return;
  for (const auto& each : manifest.parameters) {
    std::string states;
    for (const auto& state : each.states) states += fmt::format(" {} {}", state.name, state.format);
    for (const auto& [name, shape] : each.factored)
      states += fmt::format(" {} [{}]", name, fmt::join(shape, ", "));
    fmt::print("  {} [{}] step {}:{}\n", each.name, fmt::join(each.shape, ", "), each.steps,
               states);
  }
}

void prune(const std::filesystem::path& folder, int64_t last, int64_t every, bool keeps_best) {
  const train::RunFolder run(folder);
  const auto all = run.checkpoints();
  const auto kept = std::min(all.size(), static_cast<size_t>(last));
  const int64_t oldest = kept > 0 ? all[all.size() - kept] : 0;
  const auto best = keeps_best ? train::best_checkpoint(run) : std::nullopt;
  const auto keeps = [&](int64_t step) {
    return step >= oldest || (every > 0 && step % every == 0) || step == best;
  };
  // The newest must be sound before anything goes.
  if (!all.empty()) verify(run.checkpoint(all.back()), read_manifest(run.checkpoint(all.back())));
  for (const auto& dropped : run.drop_checkpoints(keeps)) {
    std::error_code error;
    std::filesystem::remove_all(dropped, error);
    if (error) {
      throw CheckpointError(fmt::format(
          "Cannot remove {}: {}. It is no checkpoint any more; remove what is left by hand.",
          dropped.string(), error.message()));
    }
    fmt::print("removed {}\n", dropped.string());
  }
}

}  // namespace

int ckpt(const Arguments& arguments) {
  OptionParser parser("ckpt", "Shows, checks and converts checkpoints.");
  std::string folder;
  bool parameters = false;
  int64_t last = 1;
  int64_t every = 0;
  auto* shows = parser.add_subcommand("inspect", "Shows what a checkpoint holds.");
  shows->add_option("folder", folder, "The checkpoint, or a run, whose newest is taken")
      ->required()
      ->type_name("DIR");
  shows->add_flag("--parameters", parameters, "List the parameters");
  auto* checks =
      parser.add_subcommand("verify", "Reads every byte of a checkpoint and compares checksums.");
  checks->add_option("folder", folder, "The checkpoint, or a run, whose newest is taken")
      ->required()
      ->type_name("DIR");
  auto* prunes =
      parser.add_subcommand("prune", "Removes a run's old checkpoints, if the newest is sound.");
  prunes->add_option("folder", folder, "The run's folder (--out)")->required()->type_name("DIR");
  prunes->add_option("--keep-last", last, "Newest checkpoints that stay")
      ->capture_default_str()
      ->check(positive());
  prunes->add_option("--keep-every", every, "Steps whose multiples stay too; 0: none")
      ->capture_default_str()
      ->check(not_negative());
  bool best = false;
  prunes->add_flag("--keep-best", best, "The one with the lowest validation loss stays too");
  const CheckpointConversions conversions(parser);
  parser.require_subcommand(1);
  if (const auto status = parser.read(arguments)) return *status;
  if (shows->parsed()) inspect(checkpoint_of(folder), parameters);
  if (checks->parsed()) {
    const auto place = checkpoint_of(folder);
    const auto manifest = read_manifest(place);
    verify(place, manifest);
    fmt::print("{} is sound: step {}, {} files\n", place.string(), manifest.steps,
               manifest.files.size());
  }
  if (prunes->parsed()) prune(folder, last, every, best);
  return conversions.run();
}

}  // namespace zero::app
