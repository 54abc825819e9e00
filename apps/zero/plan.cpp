// `zero plan`: which configurations of ZeRO fit on described machines, and how fast they are.
#include <fmt/format.h>

#include <optional>
#include <utility>
#include <vector>

#include "apps/zero/plan_options.h"
#include "apps/zero/plan_tables.h"
#include "zero/base/error.h"
#include "zero/checkpoint/file.h"
#include "zero/models/language/language_model.h"
#include "zero/planner/answer_json.h"
#include "zero/planner/answer_text.h"
#include "zero/planner/here.h"
#include "zero/report/plan_picture.h"

namespace zero::app::planning {
namespace {

using benchmarks::Json;
using plan::Candidate;

void add_training(Json& json, const std::optional<plan::Training>& training) {
  if (training) json["training"] = Json::parse(plan::to_json(*training));
}
}  // namespace

int run(const Arguments& arguments) {
  Options o;
  if (const auto status = read_command_line(arguments, o)) return *status;
  if (o.devices) {
    print_devices();
    return 0;
  }
  if (o.papers) return print_papers() ? 0 : kFailed;
  const auto sizes = model_for_sequences(o.model, o.seq);
  if (o.operators) {
    print_operators(o, *sizes);
    return 0;
  }
  std::vector<plan::Updates> updates;
  for (const auto& name : o.updates) updates.push_back(plan::updates_named(name));
  plan::Question question{.trace = plan::tracer(*sizes, o.seq),
                          .global_batch = o.batch,
                          .sequence = o.seq,
                          .bf16 = o.dtype == "bf16",
                          .autocast = o.autocast_dtype(),
                          .cluster = o.cluster(),
                          .most_micro_batch = o.most_micro_batch,
                          .updates = std::move(updates)};
  plan::ask_of_depths(question, *sizes);
  const auto& cluster = question.cluster;
  std::pair<int64_t, int64_t> range;
  if (!o.scale.empty()) {
    range = o.scale_range();
    (void)plan::scaled(cluster, range.first, range.second);  // before time is spent
  }
  const auto answer = plan::plan(question);
  const auto title = plan::title(o.model, question, answer);
  fmt::print("{}\n", title);
  if (o.here) fmt::print("{}", plan::here_text(cluster));
  fmt::print("\n{}", plan::table_text(answer.candidates, static_cast<size_t>(o.rows)));
  if (answer.best().fits()) fmt::print("\n{}", plan::memory_text(answer.best(), "the first one"));
  fmt::print("\n{}", plan::sentences_text(answer));
  const double slowest = plan::slowest_rank(cluster.speeds_differ, cluster.ranks());
  if (slowest > 1) {
    fmt::print(
        "Each step waits for the slowest of {} ranks, which computes {:.3f} times as long as a "
        "usual one.\n",
        cluster.ranks(), slowest);
  }
  const auto failures = o.failures(cluster.ranks());
  Json of_failures;
  if (failures) {
    const double interval = plan::best_interval(*failures);
    of_failures = {{"seconds_between", failures->of_job()},
                   {"save_interval_seconds", interval},
                   {"goodput", plan::goodput(*failures, interval)}};
    fmt::print(
        "A failure comes every {:.3g} hours: save after each {:.3g} minutes of training, and "
        "{:.1f} % "
        "of the time is training.\n",
        failures->of_job() / 3600, interval / 60, 100 * plan::goodput(*failures, interval));
  }
  if (const auto training = o.training(answer.best()))
    fmt::print("{}", plan::training_text(*training, failures.has_value()));
  fmt::print("{}", plan::bounds_text(answer.bounds));
  const auto answered = Json::parse(plan::to_json(answer));
  Json results = answered.at("candidates");
  for (size_t i = 0; i < results.size(); ++i)
    add_training(results[i], o.training(answer.candidates[i]));
  Json scale = Json::array();
  std::vector<plan::ScalePoint> points;
  if (!o.scale.empty()) {
    points = plan::scale(question, range.first, range.second);
    const auto of = [&](const Candidate& c) { return o.training(c); };
    fmt::print("\n{}", plan::scale_text(points, of));
    for (const auto& point : points)
      scale.push_back(Json::parse(plan::to_json(point, of(point.best))));
  }
  if (!o.svg.empty()) {
    const auto picture =
        report::plan_picture(title, answer, cluster, points, static_cast<size_t>(o.rows));
    write_file(o.svg, picture, fail<Error>);
    fmt::print("\nThe picture is in {}.\n", o.svg);
  }
  if (!o.out.empty()) {
    if (!answer.best().fits()) {
      throw ConfigError(
          fmt::format("Nothing fits, so {} was not written. {}", o.out, answer.binds));
    }
    const auto text = plan::ds_config(answer.best(), o.nvme_path);
    write_file(o.out, text, fail<Error>);
    fmt::print("\nThe configuration of the first one is in {}.\n", o.out);
  }
  Json settings{{"model", o.model},
                {"batch", o.batch},
                {"seq", o.seq},
                {"dtype", o.dtype},
                {"autocast", o.autocast},
                {"cluster", Json::parse(plan::to_json(cluster))},
                {"slowest_rank", slowest},
                {"failures", of_failures},
                {"scale", scale}};
  for (const auto& [key, value] : answered.items()) {
    if (key != "candidates") settings[key] = value;
  }
  o.json.write("plan", benchmarks::machine(), settings, results);
  return 0;
}

}  // namespace zero::app::planning

namespace zero::app {

int plan_run(const Arguments& arguments) { return planning::run(arguments); }

}  // namespace zero::app
