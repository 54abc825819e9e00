#include "zero/planner/answer_text.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <iterator>
#include <utility>

#include "zero/base/error.h"
#include "zero/planner/here.h"

namespace zero::plan {
namespace {

std::string bytes(int64_t count) { return format_bytes(static_cast<double>(count)); }

}  // namespace

std::string title(const std::string& model, const Question& question, const Answer& answer) {
  const auto& cluster = question.cluster;
  const auto batch = question.sequence > 1 ? fmt::format("{} sequences of {} tokens",
                                                         question.global_batch, question.sequence)
                                           : fmt::format("{} samples", question.global_batch);
  const auto* narrow = cluster.device.bf16 ? "bf16" : "fp16";
  const auto autocast =
      !question.autocast
          ? std::string()
          : fmt::format(" under autocast to {}", question.autocast == at::kHalf ? "fp16" : narrow);
  return fmt::format("{} in {}{}, {:.1f} M parameters; {}; {} {} on {} host{}", model,
                     question.bf16 ? narrow : "fp32", autocast,
                     static_cast<double>(answer.parameters) * 1e-6, batch, cluster.ranks(),
                     cluster.device.name != kThisMachine ? cluster.device.name
                     : cluster.hosts == 1                ? "ranks of this machine"
                                                         : "ranks of such machines",
                     cluster.hosts, cluster.hosts == 1 ? "" : "s");
}

std::string here_text(const Cluster& cluster) {
  return fmt::format(
      "A rank of this machine: {:.4g} GFLOP/s in fp32, {:.4g} in bf16; {:.3g} GB/s of memory, "
      "{:.3g} to other ranks{}{}; {} for all\n",
      cluster.device.flops_fp32 * 1e-9, cluster.device.flops * 1e-9,
      cluster.device.bandwidth * 1e-9, cluster.inside.bandwidth * 1e-9,
      cluster.hosts > 1
          ? fmt::format(
                "; {:.3g} GB/s between hosts, {:.3g} ms for a message, which takes {:.0f} % "
                "of computing while it is under way",
                cluster.between.bandwidth * 1e-9, cluster.between.latency * 1e3,
                100 * cluster.between.processors)
          : "",
      cluster.nvme > 0 ? fmt::format("; a disk of {:.3g} GB/s", cluster.nvme * 1e-9) : "",
      format_bytes(cluster.host_memory));
}

std::string duration(double seconds) {
  return seconds >= 86400  ? fmt::format("{:.3g} days", seconds / 86400)
         : seconds >= 3600 ? fmt::format("{:.3g} hours", seconds / 3600)
         : seconds >= 60   ? fmt::format("{:.3g} minutes", seconds / 60)
                           : fmt::format("{:.3g} seconds", seconds);
}

std::string verdict(const Candidate& c) {
  if (c.fits()) return "fits";
  std::vector<std::string> lacks;
  for (const auto& [bytes, where] :
       {std::pair(c.device_lacks, "device"), {c.host_lacks, "host"}, {c.disk_lacks, "disk"}}) {
    if (bytes > 0) lacks.push_back(fmt::format("{} {}", where, format_bytes(bytes)));
  }
  return fmt::format("lacks {}", fmt::join(lacks, ", "));
}

std::string table_text(const std::vector<Candidate>& candidates, size_t rows) {
  std::string text;
  const auto add = [&]<class... T>(fmt::format_string<T...> format, T&&... values) {
    fmt::format_to(std::back_inserter(text), format, std::forward<T>(values)...);
  };
  rows = std::min(rows, candidates.size());
  size_t width = std::string("configuration").size();
  for (size_t i = 0; i < rows; ++i) width = std::max(width, candidates[i].words().size());
  add("{:<{}} {:>10} {:>10} {:>10}", "configuration", width, "device", "host", "disk");
  for (const auto* column : {"step ms", "compute", "gather", "reduce", "offload", "update", "disk"})
    add(" {:>8}", column);
  add(" {:>10} {:>6}\n", "tokens/s", "MFU");
  for (size_t i = 0; i < rows; ++i) {
    const auto& c = candidates[i];
    add("{:<{}} {:>10} {:>10} {:>10}", c.words(), width, bytes(c.memory.device),
        bytes(c.memory.host), bytes(c.memory.disk));
    if (!c.fits()) {
      add("  {}\n", verdict(c));
      continue;
    }
    const auto& t = c.time;
    for (const double part :
         {t.seconds, t.compute, t.gather, t.reduce, t.offload, t.update, t.disk})
      add(" {:>8.1f}", 1e3 * part);
    add(" {:>10.0f} {:>5.1f}%\n", c.tokens_per_second, 100 * c.mfu);
  }
  return text;
}

std::string memory_text(const Candidate& candidate, const std::string& of) {
  auto text = fmt::format("A rank of {}, by category:\n", of);
  const auto& memory = candidate.memory;
  for (size_t i = 0; i < kCategories; ++i) {
    const auto category = static_cast<Category>(i);
    if (memory.of(category) == 0) continue;
    text += fmt::format("  {:<18} {:>12}\n", name(category), bytes(memory.of(category)));
  }
  return text + fmt::format("  {:<18} {:>12}, at {} in {}\n", "all at once", bytes(memory.device),
                            memory.peak_operator,
                            memory.peak_module.empty() ? "the model" : memory.peak_module);
}

std::string sentences_text(const Answer& answer) {
  std::string text;
  for (const auto& sentence : {answer.zero_or_not, answer.binds, answer.helps, answer.largest_model,
                               answer.fewest_devices}) {
    if (!sentence.empty()) text += sentence + "\n";
  }
  return text;
}

std::string bounds_text(const std::vector<Bound>& bounds) {
  std::string text;
  for (const auto& bound : bounds) {
    text += fmt::format("The memory of {} in {} is not exact: {}{}.\n", bound.name,
                        bound.module.empty() ? "the model" : bound.module, bound.why,
                        bound.bytes > 0 ? fmt::format(", at most {}", bytes(bound.bytes)) : "");
  }
  return text;
}

std::string training_text(const Training& training, bool failures) {
  const auto cost = training.price > 0 ? fmt::format(", which cost {:.5g} at {:.4g} each",
                                                     training.cost(), training.price)
                                       : std::string();
  return fmt::format("{:.4g} tokens take {} on {} device{}: {:.4g} device hours{}.{}\n",
                     training.tokens, duration(training.seconds()), training.devices,
                     training.devices == 1 ? "" : "s", training.device_hours(), cost,
                     failures ? " That counts failures." : "");
}

std::string scale_text(const std::vector<ScalePoint>& points, const TrainingOf& training_of) {
  std::string rows;
  bool timed = false;
  bool priced = false;
  for (const auto& point : points) {
    const auto& c = point.best;
    rows += fmt::format("{:>7}  {:<54} {:>10}", point.ranks, c.words(), bytes(c.memory.device));
    if (!point.fits) {
      rows += fmt::format("  {}\n", verdict(c));
      continue;
    }
    rows += fmt::format(" {:>9.1f} {:>12.0f} {:>12.0f} {:>5.0f}%", 1e3 * c.time.seconds,
                        c.tokens_per_second, c.tokens_per_second / static_cast<double>(point.ranks),
                        100 * point.efficiency);
    if (const auto training = training_of(c)) {
      timed = true;
      rows += fmt::format(" {:>12}", duration(training->seconds()));
      priced |= training->price > 0;
      if (training->price > 0) rows += fmt::format(" {:>10.5g}", training->cost());
    }
    rows += "\n";
  }
  return fmt::format("{:>7}  {:<54} {:>10} {:>9} {:>12} {:>12} {:>6}{}{}\n", "ranks", "the fastest",
                     "device", "step ms", "tokens/s", "of a rank", "scales",
                     timed ? fmt::format(" {:>12}", "time") : "",
                     priced ? fmt::format(" {:>10}", "cost") : "") +
         rows;
}

std::string to_text(const Answer& answer, size_t rows) {
  auto text = table_text(answer.candidates, rows) + "\n";
  if (answer.best().fits()) text += memory_text(answer.best(), "the first one") + "\n";
  return text + sentences_text(answer) + bounds_text(answer.bounds);
}

}  // namespace zero::plan
