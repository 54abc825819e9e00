// The rows of the section `scheduler`: DeepSpeed's types with its parameters, and ours.
#include <fmt/format.h>

#include <type_traits>

#include "zero/base/error.h"
#include "zero/config/rows.h"

namespace zero::fields {

template <>
struct Choices<optim::WarmupType> {
  static constexpr std::pair<std::string_view, optim::WarmupType> list[] = {
      {"log", optim::WarmupType::logarithmic}, {"linear", optim::WarmupType::linear}};
};

namespace {

using optim::Schedule;

/// The values of the section itself.
struct SchedulerSection {
  std::string type;
  Json params = Json::object();
};

const std::vector<std::pair<std::string_view, Schedule>>& types() {
  static const std::vector<std::pair<std::string_view, Schedule>> all{
      {"WarmupLR", optim::DeepSpeedWarmup{}},
      {"WarmupDecayLR", optim::DeepSpeedWarmupDecay{}},
      {"WarmupCosineLR", optim::DeepSpeedWarmupCosine{}},
      {"OneCycle", optim::DeepSpeedOneCycle{}},
      {"LRRangeTest", optim::DeepSpeedRangeTest{}},
      {"Constant", optim::WarmupDecay{.decay = optim::Decay::constant}},
      {"Linear", optim::WarmupDecay{.decay = optim::Decay::linear}},
      {"Cosine", optim::WarmupDecay{.decay = optim::Decay::cosine}},
      {"WSD", optim::WarmupDecay{.decay = optim::Decay::wsd}}};
  return all;
}

std::string_view type_of(const Schedule& schedule) {
  const auto* ours = std::get_if<optim::WarmupDecay>(&schedule);
  for (const auto& [name, initial] : types()) {
    if (initial.index() != schedule.index()) continue;
    if (ours == nullptr || std::get<optim::WarmupDecay>(initial).decay == ours->decay) return name;
  }
  return {};
}

About steps(std::string_view sentence, std::string_view details = {}) {
  return {.sentence = sentence, .details = details, .auto_is_none = true};
}
About rate(std::string_view sentence) { return {.sentence = sentence, .least = 0}; }

constexpr std::string_view kAutoSteps = "\"auto\" means the run's `train.steps`.";
constexpr std::string_view kAutoWarmup =
    "\"auto\" means the run's `train.warmup`. 1 counts as 2, as in DeepSpeed. 0 counts as 2 too; "
    "DeepSpeed refuses it.";

template <class S>
void add_start(std::vector<Field<S>>& rows) {
  rows.push_back(
      accepted<S, int64_t>("last_batch_iteration",
                           {.sentence = "Must be the default, -1",
                            .least = -1,
                            .only = -1,
                            .because = "a run that goes on knows its step from its checkpoint"}));
}

template <class S>
void add_warmup(std::vector<Field<S>>& rows) {
  rows.push_back(field<S>("warmup_num_steps",
                          steps("Number of updates in the warm-up", kAutoWarmup),
                          &S::warmup_steps));
  rows.push_back(
      field<S>("warmup_type", {.sentence = "How the rate grows during the warm-up"}, &S::type));
}

template <class S>
void add_warmup_rates(std::vector<Field<S>>& rows) {
  rows.push_back(field<S>("warmup_min_lr", rate("Rate of the first update"), &S::min_lr));
  rows.push_back(field<S>("warmup_max_lr",
                          {.sentence = "Rate after the warm-up",
                           .details = "\"auto\" means the optimizer's rate.",
                           .least = 0,
                           .auto_is_none = true},
                          &S::max_lr));
}

template <class S>
void add_total(std::vector<Field<S>>& rows) {
  rows.push_back(field<S>("total_num_steps",
                          steps("Number of updates in the whole schedule", kAutoSteps),
                          &S::total_steps));
}

void fill(std::vector<Field<optim::DeepSpeedWarmup>>& rows) {
  add_warmup_rates(rows);
  add_warmup(rows);
}
void fill(std::vector<Field<optim::DeepSpeedWarmupDecay>>& rows) {
  add_total(rows);
  add_warmup_rates(rows);
  add_warmup(rows);
}
void fill(std::vector<Field<optim::DeepSpeedWarmupCosine>>& rows) {
  using S = optim::DeepSpeedWarmupCosine;
  add_total(rows);
  rows.push_back(
      field<S>("lr", rate("Rate at the peak; if left out, the optimizer's rate"), &S::lr));
  rows.push_back(field<S>("warmup_min_ratio",
                          rate("Start of the warm-up, as a part of the optimizer's rate"),
                          &S::warmup_min_ratio));
  rows.push_back(field<S>("cos_min_ratio",
                          rate("End of the cosine, as a part of the optimizer's rate"),
                          &S::cos_min_ratio));
  add_warmup(rows);
}
void fill(std::vector<Field<optim::DeepSpeedOneCycle>>& rows) {
  using S = optim::DeepSpeedOneCycle;
  const auto momentum = [](std::string_view sentence) {
    return About{.sentence = sentence, .least = 0, .below = 1};
  };
  const auto count = [](std::string_view sentence, std::optional<double> least = {}) {
    return About{.sentence = sentence, .least = least};
  };
  rows.push_back(
      field<S>("cycle_min_lr", rate("Rate at both ends of the cycle; required"), &S::min_lr));
  rows.push_back(
      field<S>("cycle_max_lr", rate("Rate at the peak of the cycle; required"), &S::max_lr));
  rows.push_back(
      field<S>("decay_lr_rate", rate("How fast the rate falls after the cycle"), &S::decay_rate));
  rows.push_back(field<S>("cycle_first_step_size",
                          count("Number of updates in the first half of the cycle", 1),
                          &S::first_steps));
  rows.push_back(
      field<S>("cycle_second_step_size",
               count("Number of updates in the second half; if left out, as in the first"),
               &S::second_steps));
  rows.push_back(field<S>("cycle_first_stair_count",
                          count("Number of stairs in the first half; 0: a straight line"),
                          &S::first_stairs));
  rows.push_back(
      field<S>("cycle_second_stair_count",
               count("Number of stairs in the second half; if left out, as in the first"),
               &S::second_stairs));
  rows.push_back(
      field<S>("decay_step_size",
               count("Number of updates in one unit of the decay after the cycle; 0: no decay"),
               &S::decay_steps));
  rows.push_back(
      field<S>("cycle_momentum",
               {.sentence = "Cycle Adam's beta1 in the opposite direction, and set beta2 to 0.99"},
               &S::cycle_momentum));
  rows.push_back(field<S>("cycle_min_mom", momentum("beta1 at the peak"), &S::min_momentum));
  rows.push_back(field<S>("cycle_max_mom", momentum("beta1 at both ends"), &S::max_momentum));
  rows.push_back(field<S>("decay_mom_rate", rate("How fast beta1 grows after the cycle"),
                          &S::momentum_decay_rate));
}
void fill(std::vector<Field<optim::DeepSpeedRangeTest>>& rows) {
  using S = optim::DeepSpeedRangeTest;
  rows.push_back(field<S>("lr_range_test_min_lr", rate("Rate of the first update"), &S::min_lr));
  rows.push_back(field<S>(
      "lr_range_test_step_size",
      {.sentence = "Number of updates in which the rate grows by `lr_range_test_step_rate`",
       .least = 1},
      &S::step_size));
  rows.push_back(field<S>("lr_range_test_step_rate",
                          rate("Growth of the rate in one such step, as a part of the first rate"),
                          &S::step_rate));
  rows.push_back(field<S>("lr_range_test_staircase", {.sentence = "Let the rate grow in stairs"},
                          &S::staircase));
}
void fill(std::vector<Field<optim::WarmupDecay>>& rows) {
  using S = optim::WarmupDecay;
  rows.push_back(field<S>("lr",
                          {.sentence = "Rate after the warm-up",
                           .details = "If left out, the optimizer's rate.",
                           .least = 0},
                          &S::lr));
  rows.push_back(field<S>("min_lr", rate("Rate at the last step"), &S::min_lr));
  rows.push_back(field<S>(
      "warmup_num_steps",
      steps("Number of updates in the linear warm-up", "\"auto\" means the run's `train.warmup`."),
      &S::warmup_steps));
  auto total =
      steps("Number of updates in the whole schedule", "If left out, the run's `train.steps`.");
  total.least = 1;
  rows.push_back(field<S>("total_num_steps", total, &S::total_steps));
  rows.push_back(field<S>(
      "decay_num_steps",
      {.sentence = "Number of updates in WSD's decay; if left out, a tenth of all", .least = 1},
      &S::decay_steps));
}

template <class S>
const std::vector<Field<S>>& rows_of() {
  static const auto rows = [] {
    std::vector<Field<S>> all;
    fill(all);
    if constexpr (!std::is_same_v<S, optim::WarmupDecay>) add_start(all);
    return all;
  }();
  return rows;
}

constexpr const char* kPrefix = "scheduler.params.";

const std::vector<Field<SchedulerSection>>& section_rows() {
  static const auto rows = [] {
    Spec type{"type", {.sentence = "The schedule"}, Kind::choice};
    for (const auto& [name, initial] : types()) type.choices.emplace_back(name);
    return std::vector<Field<SchedulerSection>>{
        {std::move(type), [](SchedulerSection& section,
                             const Json& value) { section.type = value.get<std::string>(); }},
        {Spec{"params", {.sentence = ""}, Kind::section},
         [](SchedulerSection& section, const Json& value) { section.params = value; }}};
  }();
  return rows;
}

void require_given(const Json& params, const char* key) {
  if (!params.contains(key))
    throw ConfigError(fmt::format("{}{} is missing: OneCycle needs it.", kPrefix, key));
}

}  // namespace

std::optional<optim::Schedule> read_schedule(const Json& section, Report& report) {
  SchedulerSection named;
  read(named, section_rows(), section, "scheduler.", report);
  if (named.type.empty()) {
    if (!named.params.empty() && !section.contains("type")) {
      report.refuse("scheduler.type",
                    "scheduler.type is missing: name the schedule whose params these are.");
    }
    return std::nullopt;
  }
  for (const auto& [name, initial] : types()) {
    if (name != named.type) continue;
    Schedule schedule = initial;
    std::visit(
        [&](auto& s) {
          using S = std::remove_cvref_t<decltype(s)>;
          read(s, rows_of<S>(), named.params, kPrefix, report);
          if constexpr (std::is_same_v<S, optim::DeepSpeedOneCycle>) {
            require_given(named.params, "cycle_min_lr");
            require_given(named.params, "cycle_max_lr");
          }
        },
        schedule);
    return schedule;
  }
  return std::nullopt;
}

Json write_schedule(const optim::Schedule& schedule) {
  return std::visit(
      [&](const auto& s) {
        return Json{{"type", type_of(schedule)},
                    {"params", write(s, rows_of<std::remove_cvref_t<decltype(s)>>())}};
      },
      schedule);
}

std::vector<ParamsTable> schedule_tables() {
  std::vector<ParamsTable> tables;
  for (const auto& type : types()) {
    std::visit(
        [&](const auto& s) {
          using S = std::remove_cvref_t<decltype(s)>;
          // Types with the same parameters have one table.
          if constexpr (std::is_same_v<S, optim::WarmupDecay>) {
            if (s.decay != optim::Decay::constant) return;
          }
          ParamsTable table{fmt::format("scheduler.params of {}", type.first), kPrefix, {}, {}};
          if constexpr (std::is_same_v<S, optim::WarmupDecay>)
            table.title = "scheduler.params of Constant, Linear, Cosine and WSD";
          for (const auto& row : rows_of<S>()) {
            table.rows.push_back(row);
            table.defaults.push_back(row.get ? row.get(s) : Json());
          }
          tables.push_back(std::move(table));
        },
        type.second);
  }
  return tables;
}

void add_scheduler(All& all) {
  all.push_back(
      {Spec{"scheduler",
            {.sentence = "The learning rate's schedule: `type` and `params`",
             .details = "Types are DeepSpeed's five, with DeepSpeed's results, and Constant, "
                        "Linear, Cosine and WSD. The section replaces `train.schedule`. In C++ use "
                        "`Settings::scheduler` and `zero::optim::rate`.",
             .option = "--scheduler",
             .argument = "TYPE[:KEY=VALUE,...]"},
            Kind::section,
            {},
            Part::program},
       [](Settings& root, const Json& section, Report& report) {
         root.scheduler = read_schedule(section, report);
       },
       [](const Settings& root) {
         return root.scheduler ? write_schedule(*root.scheduler) : Json();
       }});
}

}  // namespace zero::fields
