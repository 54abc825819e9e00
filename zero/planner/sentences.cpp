#include "zero/planner/sentences.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <array>
#include <initializer_list>
#include <optional>
#include <string_view>
#include <utility>
#include <vector>

#include "zero/base/error.h"
#include "zero/partition/formulas.h"

namespace zero::plan {
namespace {

std::string bytes(double count) { return format_bytes(count); }

const Candidate* fastest(const std::vector<Candidate>& all, auto&& suits) {
  const Candidate* best = nullptr;
  for (const auto& candidate : all) {
    if (!candidate.fits() || !suits(candidate)) continue;
    if (best == nullptr || candidate.tokens_per_second > best->tokens_per_second) best = &candidate;
  }
  return best;
}

struct Part {
  double seconds;
  const char* name;
  const char* why;
};

std::array<Part, 6> parts(const StepTime& time) {
  return {{{time.compute, "compute", "the devices' operators"},
           {time.gather, "gathers", "operators wait for parameters on the links"},
           {time.reduce, "reductions", "gradients wait for the links"},
           {time.offload, "copies between device and host", "PCIe is slower than the step"},
           {time.update, "the update", "the optimizer's states are read and written"},
           {time.disk, "the disk", "states wait for the disk"}}};
}

// Returns why `fast` is faster than `slow`: the part of the step that differs most.
std::string_view advantage(const StepTime& fast, const StepTime& slow) {
  constexpr std::array<std::string_view, 6> kWhy{
      "since it computes more at a time",      "since it gathers less",
      "since it sends less for the gradients", "since less is copied to and from the host",
      "since ranks share the update",          "since the disk has less to do"};
  const auto of_fast = parts(fast);
  const auto of_slow = parts(slow);
  size_t most = 0;
  for (size_t i = 1; i < kWhy.size(); ++i) {
    if (of_slow[i].seconds - of_fast[i].seconds > of_slow[most].seconds - of_fast[most].seconds)
      most = i;
  }
  return kWhy[most];
}

// Nothing fits: says why the nearest candidate does not.
std::string nothing_fits(const Answer& answer, const Question& question) {
  const auto& cluster = question.cluster;
  const auto& nearest = answer.candidates.front();
  auto sentence =
      fmt::format("Nothing fits on {} device{}", cluster.ranks(), cluster.ranks() == 1 ? "" : "s");
  const auto activations = static_cast<double>(nearest.memory.of(Category::activations));
  if (activations > 0.8 * usable(cluster)) {
    return sentence +
           fmt::format(
               ": activations alone take {} of each, which ZeRO does not share. {} shorter "
               "sequences or a device with more memory.",
               bytes(activations),
               nearest.recompute > 0 ? "Layers are recomputed already; use"
                                     : "Recompute layers, or use");
  }
  const auto host = std::ranges::find_if(answer.candidates, [](const Candidate& c) {
    return c.device_lacks == 0 && c.host_lacks > 0;
  });
  if (host != answer.candidates.end())
    sentence += fmt::format("; with {} each host lacks {} of memory", host->words(),
                            bytes(host->host_lacks));
  return sentence + fmt::format(". The nearest is {}.", nearest.words());
}

}  // namespace

std::string zero_or_not(const Answer& answer, const Question& question) {
  const auto& cluster = question.cluster;
  const auto* alone = fastest(answer.candidates, [](const Candidate& c) { return plain(c); });
  const bool any = !answer.candidates.empty() && answer.candidates.front().fits();
  constexpr double kStates = 16;  // bytes a parameter, in fp32 as in bf16
  const double states = kStates * static_cast<double>(answer.trained);
  if (!any) return nothing_fits(answer, question);
  const auto& best = answer.candidates.front();
  if (cluster.ranks() == 1) {
    if (alone != nullptr)
      return fmt::format(
          "ZeRO is not needed: one device has nobody to share with, and the model fits on it ({} "
          "of "
          "{}).",
          bytes(static_cast<double>(alone->memory.device)), bytes(cluster.memory_of_rank()));
    return fmt::format(
        "One device has nobody to share with, so ZeRO's stages do nothing here; the states of {} "
        "go "
        "to {}.",
        bytes(states),
        best.config.offload_optimizer.device == OffloadDevice::nvme ||
                best.config.offload_param.device == OffloadDevice::nvme
            ? "the disk (ZeRO-Infinity)"
        : best.config.offload_optimizer.device == OffloadDevice::cpu
            ? "the host's memory (ZeRO-Offload)"
            : "fewer bits (8-bit states)");
  }
  const double frozen = 1 - static_cast<double>(answer.trained) /
                                static_cast<double>(std::max<int64_t>(1, answer.parameters));
  if (alone != nullptr) {
    const double gain = best.tokens_per_second / alone->tokens_per_second;
    return fmt::format(
        "ZeRO is not needed: plain data parallelism (stage 0) fits ({} of {} on each device{}), "
        "{}.",
        bytes(static_cast<double>(alone->memory.device)), bytes(cluster.memory_of_rank()),
        frozen > 0.5 ? fmt::format("; {:.1f} % of the parameters are frozen and have no states",
                                   100 * frozen)
                     : std::string(),
        gain < 1.02 ? std::string("and is as fast as any stage")
                    : fmt::format("though {} would be {:.2f} times as fast, {}", best.words(), gain,
                                  advantage(best.time, alone->time)));
  }
  const bool less_will_do = std::ranges::any_of(answer.candidates, [](const Candidate& c) {
    return c.fits() && c.config.stage < 3 &&
           c.config.offload_optimizer.device == OffloadDevice::none;
  });
  if (frozen > 0.5 && !less_will_do) {
    return fmt::format(
        "ZeRO-3 is needed for the parameters alone: {:.0f} % of them are frozen and have no "
        "states, "
        "so stages 1 and 2 save little.",
        100 * frozen);
  }
  const auto& plain_one = std::ranges::find_if(
      answer.candidates, [](const Candidate& c) { return plain(c) && c.recompute > 0; });
  const bool activations = plain_one != answer.candidates.end() &&
                           static_cast<double>(plain_one->memory.of(Category::activations)) >
                               0.5 * static_cast<double>(plain_one->memory.device);
  return fmt::format(
      "ZeRO is needed: plain data parallelism lacks {} on each device{}.",
      plain_one != answer.candidates.end()
          ? bytes(plain_one->device_lacks +
                  plain_one->host_lacks / static_cast<double>(cluster.per_host))
          : std::string("memory"),
      activations ? ", most of it for activations, which ZeRO does not share: shorter sequences "
                    "would help more"
                  : "");
}

std::string nearest_lacks(const Candidate& nearest) {
  std::vector<std::string> lacks;
  for (const auto& [count, where] : {std::pair(nearest.device_lacks, "on each device"),
                                     {nearest.host_lacks, "of host memory"},
                                     {nearest.disk_lacks, "of disk"}}) {
    if (count > 0) lacks.push_back(fmt::format("{} {}", bytes(count), where));
  }
  return fmt::format("The nearest configuration lacks {}.", fmt::join(lacks, " and "));
}

std::string binds(const Candidate& best) {
  const auto all = parts(best.time);
  const auto& most = *std::ranges::max_element(all, {}, &Part::seconds);
  return fmt::format("The step of {:.3g} s is bound by {} ({:.0f} % of it: {}).", best.time.seconds,
                     most.name, 100 * most.seconds / best.time.seconds, most.why);
}

std::string helps(const Table& table, const Candidate& best) {
  struct Change {
    const char* name;
    void (*apply)(Cluster&);
  };
  constexpr std::array kChanges{
      Change{"devices that compute twice as fast",
             [](Cluster& c) {
               c.device.flops *= 2;
               c.device.flops_fp32 *= 2;
             }},
      Change{"memory of the devices twice as fast", [](Cluster& c) { c.device.bandwidth *= 2; }},
      Change{"links inside a host twice as fast", [](Cluster& c) { c.inside.bandwidth *= 2; }},
      Change{"a network twice as fast", [](Cluster& c) { c.between.bandwidth *= 2; }},
      Change{"PCIe twice as fast", [](Cluster& c) { c.device.pcie *= 2; }},
      Change{"updates on the host twice as fast", [](Cluster& c) { c.host_update *= 2; }},
      Change{"disks twice as fast", [](Cluster& c) { c.nvme *= 2; }}};
  const auto& trace = table.traces.of(best.config, best.micro_batch, best.recompute);
  const Change* most = nullptr;
  double gain = 1.005;  // less is told as "1.00 times"
  for (const auto& change : kChanges) {
    auto cluster = table.question.cluster;
    change.apply(cluster);
    const double faster = best.time.seconds / simulate(trace, best.config, cluster, false).seconds;
    if (faster <= gain) continue;
    gain = faster;
    most = &change;
  }
  auto sentence = most == nullptr ? std::string("No single part of the machine binds it.")
                                  : fmt::format(
                                        "On the machine, {} would help most: {:.2f} times "
                                        "as many tokens a second.",
                                        most->name, gain);
  const auto* other =
      fastest(table.all, [&](const Candidate& c) { return c.config.stage != best.config.stage; });
  if (other != nullptr) {
    sentence +=
        fmt::format(" Of other stages, {} is the fastest, with {:.2f} of the first one's speed.",
                    other->words(), other->tokens_per_second / best.tokens_per_second);
  }
  return sentence;
}

namespace {

// A number of things and what was found with it.
struct Least {
  int64_t count = 0;
  Candidate candidate;
};

// Returns the least number up to `most` with which `with(number)` finds something. More never find
// less.
template <typename With>
std::optional<Least> least(int64_t most, const With& with) {
  int64_t too_few = 0;
  int64_t enough = 1;
  auto found = with(enough);
  while (!found && enough < most) {
    too_few = enough;
    enough = std::min(2 * enough, most);
    found = with(enough);
  }
  if (!found) return std::nullopt;
  while (enough - too_few > 1) {
    const int64_t middle = too_few + (enough - too_few) / 2;
    if (auto fewer = with(middle)) {
      found = std::move(fewer);
      enough = middle;
    } else {
      too_few = middle;
    }
  }
  return Least{enough, std::move(*found)};
}

// Returns a candidate that fits, of those that need the least memory for these micro-batches and
// passes.
std::optional<Candidate> smallest_that_fits(const Question& asked, Traces& traces,
                                            const std::vector<std::pair<int64_t, int64_t>>& of) {
  const int stage = asked.cluster.ranks() > 1 ? 3 : 0;
  Table table(asked, traces);
  auto all = ways(asked);
  std::ranges::stable_sort(all, {}, &Way::eight_bit);  // fewer bits change results
  for (const auto& way : all) {
    // A rank with its states on the host may need a little less at a lower stage.
    const bool leasts = way.stage == stage || way.parameters != OffloadDevice::none ||
                        way.optimizer != OffloadDevice::none;
    if (!leasts || way.across != Way::Across::all || way.updates != Updates::in_step) continue;
    for (const auto& [micro_batch, passes] : of) {
      auto candidate = table.make(way, micro_batch, passes, asked.recomputes ? 1 : 0);
      if (candidate.fits()) return candidate;
    }
  }
  return std::nullopt;
}

std::string billions(double parameters) {
  return parameters < 1e12 ? fmt::format("{:.3g} B", parameters / 1e9)
                           : fmt::format("{:.3g} T", parameters / 1e12);
}

// Returns the model with the most layers that fits, of those like the question's.
std::string deepest_model(const Question& question) {
  constexpr int64_t kMostLayers = 512;
  if (!question.of_layers) return {};
  const int64_t of_rank = question.global_batch / question.cluster.ranks();
  double parameters = 0;
  std::optional<Candidate> last;
  // `least` finds the first depth that is too large.
  const auto too_large = [&](int64_t layers) -> std::optional<Candidate> {
    auto asked = question;
    asked.trace = question.of_layers(layers);
    Traces traces(asked);
    std::vector<std::pair<int64_t, int64_t>> of{{1, of_rank}};
    if (of_rank <= question.most_micro_batch) of.emplace_back(of_rank, 1);
    auto fits = smallest_that_fits(asked, traces, of);
    if (!fits) return Candidate{};
    parameters = static_cast<double>(
        traces.of(fits->config, fits->micro_batch, fits->recompute).parameters());
    last = std::move(fits);
    return std::nullopt;
  };
  const auto found = least(kMostLayers, too_large);
  if (!last) return {};
  return fmt::format(" Of models of this width, {} layers ({} parameters) {}: {}.",
                     found ? found->count - 1 : kMostLayers, billions(parameters),
                     found ? "are the most that fit" : "fit", last->words());
}

}  // namespace

std::string largest_model(const Question& question, const Candidate& plain, int64_t parameters) {
  const auto& c = question.cluster;
  const auto n = static_cast<double>(c.ranks());
  // The states of a parameter, all on one rank.
  const double all = static_cast<double>(plain.memory.of(Category::parameters) +
                                         plain.memory.of(Category::gradients) +
                                         plain.memory.of(Category::optimizer)) /
                     static_cast<double>(parameters);
  const double device = usable(c);
  auto sentence = fmt::format(
      "By states alone ({:.3g} bytes a parameter) the cluster holds {} "
      "parameters at stage 0",
      all, billions(device / all));
  if (c.ranks() > 1) sentence += fmt::format(" and {} at stage 3", billions(device / all * n));
  if (!c.device.cpu)
    sentence += fmt::format(", {} with states in the hosts' memory",
                            billions(c.host_memory * static_cast<double>(c.hosts) / all));
  if (c.nvme > 0)
    sentence += fmt::format(", {} with states on disk",
                            billions(c.nvme_bytes * static_cast<double>(c.hosts) / all));
  return sentence + "; activations come on top." + deepest_model(question);
}

std::string fewest_devices(const Question& question, Traces& traces,
                           const std::vector<Candidate>& known) {
  const auto on = [&](int64_t hosts, int64_t per_host) {
    auto asked = question;
    asked.cluster.hosts = hosts;
    asked.cluster.per_host = per_host;
    return smallest_that_fits(asked, traces, {{1, 1}});
  };
  const int64_t usual = question.cluster.per_host;
  const int64_t most_hosts = std::max<int64_t>(1, (int64_t{1} << 16) / usual);
  int64_t hosts = 1;
  auto found = least(usual, [&](int64_t devices) { return on(1, devices); });
  if (!found) {
    found = least(most_hosts, [&](int64_t several) { return on(several, usual); });
    if (found) hosts = found->count;
  }
  // The table has more configurations, as lower stages, which may need a little less.
  const auto* in_table = fastest(known, [](const Candidate&) { return true; });
  if (in_table != nullptr && (!found || in_table->ranks < found->candidate.ranks)) {
    found = Least{in_table->ranks, *in_table};
    hosts = question.cluster.hosts;
  }
  if (found) {
    return fmt::format(
        "The fewest devices that hold this model, with a micro-batch of one, are {}{}: {}.",
        found->candidate.ranks, hosts > 1 ? fmt::format(" on {} hosts", hosts) : "",
        found->candidate.words());
  }
  return fmt::format(
      "No number of devices up to {} holds this model: what one rank needs for a micro-batch of "
      "one sequence is larger than a device, or its host has too little memory.",
      most_hosts * usual);
}

}  // namespace zero::plan
